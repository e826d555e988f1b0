"""Run the operator's page in a thread of this process."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deformer_stream.errors import ConfigError
from deformer_stream.page.app import Page, make_app

STOP_SECONDS = 3
"""Time for which requests may still run after the page was stopped."""
MAX_CONCURRENT_REQUESTS = 500
"""Maximum number of connections. Others get the status 503."""
KEEP_ALIVE_SECONDS = 10
"""Time without a request after which a connection is closed."""
REQUEST_SECONDS = 30.0
"""Time within which a request must begin, and its head must arrive."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Args:
        host: Host name or IP address.
        port: Port, 0 for a free one.

    Raises:
        ConfigError: The page cannot listen on the address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--http {host}:{port}: the page cannot listen on this address ({error.strerror}): choose another one"
        ) from None
    return listener


def list_addresses(proxies: Sequence[str]) -> list[str]:
    """Return IP addresses and networks, and the form that IPv4 ones have on a socket for IPv6, such as ::ffff:10.0.0.1.

    Args:
        proxies: Addresses such as "10.0.0.1", and networks such as "10.0.0.0/8".
    """
    networks = [ipaddress.ip_network(text) for text in proxies]
    mapped = [f"::ffff:{net.network_address}/{96 + net.prefixlen}" for net in networks if net.version == 4]
    return [*proxies, *mapped]


class PageProtocol(H11Protocol):
    """A connection that is closed if no request arrives for a while.

    uvicorn itself waits for the first request, and for the rest of a head that has begun, without a limit of time. Such
    connections, which browsers open in advance and networks lose, would add up to the maximum number.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to watch the connection."""
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._close_if_unused, None)

    def _close_if_unused(self, last_request: object) -> None:
        """Close the connection if no request was answered since the last call, and look again later otherwise.

        Args:
            last_request: The last request at the last call, None if there was none.
        """
        if self.transport.is_closing():
            return
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.cycle is last_request:
            self.transport.close()
        else:
            self.loop.call_later(REQUEST_SECONDS, self._close_if_unused, self.cycle)


@dataclass
class PageServer:
    """The HTTP server of a page, in a thread of its own.

    Attributes:
        page: The page.
        listener: A socket that is bound to its address; see `bind`.
    """

    page: Page
    listener: socket.socket
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        proxies = list_addresses(self.page.options.trusted_proxies)
        config = uvicorn.Config(
            make_app(self.page),
            log_config=None,
            access_log=False,  # one line for each request of each browser would hide other lines
            server_header=False,
            ws="none",
            http=PageProtocol,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            limit_concurrency=MAX_CONCURRENT_REQUESTS,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=proxies,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{self.page.prefix}/"

    def start(self) -> None:
        """Start the thread, and return when the page can be opened."""
        self.listener.listen(128)  # connections wait from now on, and the server accepts them when it has started
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and wait for its thread."""
        self.page.notifier.end_streams()
        self._server.should_exit = True
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        """Serve until the server is stopped."""
        self._server.run(sockets=[self.listener])
