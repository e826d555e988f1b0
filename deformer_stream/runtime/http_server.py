"""The HTTP server of `consume --http` and `incidents --http`, with the paths `/metrics`, `/healthz` and `/readyz`.

The server of `prometheus_client` serves the metrics only. This server adds the two health checks to that package's WSGI
application.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from deformer_stream.errors import ConfigError

CLIENT_TIMEOUT_SECONDS = 10.0
"""A connection is closed if the client sends nothing for this long."""


class ServedMetrics(Protocol):
    """The metrics and the health of a process.

    Attributes:
        registry: The metrics.
        is_ready: Whether the process has everything that it needs to work.
    """

    registry: CollectorRegistry
    is_ready: bool

    def is_healthy(self) -> bool:
        """Return whether the process has made progress recently."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """A server with one thread per request, so that a client that sends nothing cannot delay a health check."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a connection, since its cause is a client that disconnected or timed out."""


class _IPv6Server(_ThreadingServer):
    """A `_ThreadingServer` that listens on an IPv6 address."""

    address_family = socket.AF_INET6


class _RequestHandler(WSGIRequestHandler):
    """A request handler with a time-out and without access logs."""

    timeout = CLIENT_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log, because it would get a line for each request of a monitoring system."""


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address `[HOST]:PORT`. Without a host it is the loopback address.

    Raises:
        ConfigError: It is not an address.
    """
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # as the system does when it looks the host up
        is_host = True
    except UnicodeError:  # such as an empty label between two dots
        is_host = False
    if not is_host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"--http {address!r} is not an address: use [HOST]:PORT, for example 127.0.0.1:8080")
    return host.strip("[]") or "127.0.0.1", int(port)  # an IPv6 address is given in brackets, as in a URL


def start_http_server(address: str, metrics: ServedMetrics) -> Callable[[], None]:
    """Start the HTTP server for metrics and health checks in a background thread.

    Args:
        address: `[HOST]:PORT`; without a host the server listens on the loopback interface only.
        metrics: The metrics for `/metrics`, and the health and readiness for `/healthz` and `/readyz`.

    Returns:
        A function that stops the server and waits for its thread.

    Raises:
        ConfigError: If the address is malformed, or if the server cannot listen on it.
    """
    host, port = parse_address(address)
    server_class = _IPv6Server if ":" in host else _ThreadingServer
    try:
        server = make_server(host, port, _make_app(metrics), server_class, _RequestHandler)
    except OSError as error:
        raise ConfigError(
            f"--http {address}: the server cannot listen on this address ({error.strerror}): choose another address"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()

    def stop() -> None:
        """Stop the server and wait for its thread."""
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _make_app(metrics: ServedMetrics) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application that serves the metrics (`/metrics`) and the health checks.

    A health check answers with status 200 if it passes, otherwise with 503. `/healthz` passes if the pipeline has made
    progress recently. `/readyz` also requires that partitions are assigned and that their state is restored. Other
    paths give 404.

    Args:
        metrics: The metrics, and the health and readiness of the pipeline.
    """
    metrics_app = make_wsgi_app(metrics.registry)
    check_by_path: dict[str, Callable[[], bool]] = {
        "/healthz": metrics.is_healthy,
        "/readyz": lambda: metrics.is_ready and metrics.is_healthy(),
    }

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request; `environ` and `start_response` are those of the WSGI protocol (PEP 3333)."""
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            page: Iterable[bytes] = metrics_app(environ, start_response)
            return page
        check = check_by_path.get(path)
        if check is None:
            status, text = "404 Not Found", b"not found\n"
        elif check():
            status, text = "200 OK", b"ok\n"
        else:
            status, text = "503 Service Unavailable", b"not yet\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text]

    return app
