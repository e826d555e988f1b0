"""Tests of the HTTP server with real connections: those without a request, and forms that never arrive."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import pytest

from deformer_stream import log
from deformer_stream.page import app, server
from deformer_stream.page.security import MAX_FAILURES, Credentials
from deformer_stream.page.server import PageServer, bind, list_addresses
from tests.incidents.examples import make_incident
from tests.page.pages import make_site

LONG_SECONDS = 120.0
"""Longer than any wait of these tests, also on a machine with much other work."""


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    """A page that waits for requests and forms for a short time."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    listener = bind("127.0.0.1", 0)
    page_server = PageServer(make_site([make_incident(1)]).page, listener)
    page_server.start()
    yield page_server
    page_server.stop()
    listener.close()


def connect(running: PageServer) -> socket.socket:
    """Return a connection to a page."""
    return socket.create_connection(running.listener.getsockname()[:2], timeout=LONG_SECONDS)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what arrives until it contains `end`, or until the connection is closed if `end` is empty."""
    received = b""
    while (not end or end not in received) and (chunk := connection.recv(4096)):
        received += chunk
    return received


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_connection_without_a_whole_request_is_closed(running: PageServer, sent: bytes) -> None:
    with connect(running) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_a_head_that_follows_a_request_and_never_ends_is_given_up(running: PageServer) -> None:
    """The time-out of uvicorn between two requests ends with the first byte of the second one."""
    request = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with connect(running) as connection:
        connection.sendall(request + b"\r\n" + request)
        assert read_until(connection, b"").count(b"HTTP/1.1 200") == 1


def test_a_form_that_never_arrives_is_refused(running: PageServer) -> None:
    head = (
        b"POST /maintenance HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\n"
    )
    with connect(running) as connection:
        connection.sendall(head + b"device=")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_is_in_use_stays(running: PageServer) -> None:
    """Notices are sent for hours over one connection."""
    request = b"GET /events?since=x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connect(running) as connection, connect(running) as unused:
        connection.sendall(request)
        assert b"event: change" in read_until(connection, b"event: change")
        assert unused.recv(1) == b""  # so that the time has passed
        running.page.store.add_incidents([make_incident(2)])
        assert b"event: change" in read_until(connection, b"event: change")


def try_password(running: PageServer, password: str, forwarded_for: str) -> bytes:
    """Return the status of an attempt to log in through a proxy, which adds a header."""
    form = f"user=anna&password={password}".encode()
    head = (
        "POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\nConnection: close\r\n"
        f"X-Forwarded-For: {forwarded_for}\r\nContent-Length: {len(form)}\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    )
    with connect(running) as connection:
        connection.sendall(head.encode() + form)
        return read_until(connection, b"").split()[1]


@pytest.mark.parametrize(
    ("proxies", "others"),
    [
        (("127.0.0.1",), b"303"),
        (("10.0.0.0/8", "127.0.0.0/8"), b"303"),
        ((), b"429"),  # the client is whoever connects, and may send any header
        (("10.1.1.1",), b"429"),
    ],
)
def test_wrong_passwords_count_for_the_client_that_a_trusted_proxy_names(
    proxies: tuple[str, ...], others: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client writes into the header itself comes before the address that the proxy adds."""
    token = "a-token-of-a-plant-7"
    page = make_site(credentials=Credentials(token=token), trusted_proxies=proxies).page
    log.configure()
    listener = bind("127.0.0.1", 0)
    running = PageServer(page, listener)
    running.start()
    try:
        for number in range(MAX_FAILURES):
            assert try_password(running, "wrong", f"1.2.3.{number}, 192.0.2.1") == b"403"
        assert try_password(running, token, "192.0.2.1") == b"429"
        assert try_password(running, token, "192.0.2.2") == others
    finally:
        running.stop()
        listener.close()
    assert capsys.readouterr().err.count("proxy_not_trusted") == (others == b"429")


def test_proxies_are_recognised_on_a_socket_for_both_protocols() -> None:
    networks = [ipaddress.ip_network(text) for text in list_addresses(("10.0.0.1", "192.168.0.0/16", "fd00::/8"))]
    for address, is_trusted in (("10.0.0.1", True), ("10.0.0.2", False), ("192.168.7.1", True)):
        for text in (address, f"::ffff:{address}"):
            assert any(ipaddress.ip_address(text) in network for network in networks) == is_trusted, text
