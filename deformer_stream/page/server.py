"""Run the operator's page in a thread of this process."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field

import uvicorn

from deformer_stream.errors import ConfigError
from deformer_stream.page.app import Page, make_app

STOP_SECONDS = 3
"""Time for which requests may still run after the page was stopped."""
MAX_CONCURRENT_REQUESTS = 500


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
        config = uvicorn.Config(
            make_app(self.page),
            log_config=None,
            access_log=False,  # one line for each request of each browser would hide other lines
            server_header=False,
            ws="none",
            http="h11",
            timeout_keep_alive=10,
            timeout_graceful_shutdown=STOP_SECONDS,
            limit_concurrency=MAX_CONCURRENT_REQUESTS,
            proxy_headers=False,
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
