"""An HTTP server that answers as a script says: statuses, `Retry-After`, hanging, a reset, or one byte at a time."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

LIMIT_SECONDS = 60.0
"""Limit of all waits. It decides no test: a test that reaches it has failed."""


@dataclass(frozen=True)
class Request:
    """A request that the server has received.

    Attributes:
        path: The path.
        headers: The headers, with names in lower case.
        body: The content.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What the server does with a request.

    Attributes:
        status: The status of the answer.
        body: Its content.
        headers: Its headers.
        behaviour: "answer" at once; "hang" without an answer; "reset" the connection; "drip" the answer, one byte of an
            endless header after the other; "garbage" that is not HTTP.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] | None = None
    behaviour: Literal["answer", "hang", "reset", "drip", "garbage"] = "answer"


class ReceivingServer:
    """A server on a free port of the loopback interface. Each connection has a thread.

    Attributes:
        url: Its address.
        requests: The requests so far.
        accepted: Those that were answered with a status from 200 to 299.
        script: The answers to the next requests; without an entry, `default` is the answer.
        default: The answer without a script.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.accepted: list[Request] = []
        self.script: deque[Answer] = deque()
        self.default = Answer()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def wait_until(self, is_true: Callable[[list[Request]], bool]) -> None:
        """Wait until a condition on the requests holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_true(self.requests), LIMIT_SECONDS), "the requests did not come"

    def close(self) -> None:
        """End all threads."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        """Start a thread."""
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of a connection."""
        with connection:
            connection.settimeout(0.2)
            while (request := self._read(connection)) is not None:
                with self._changed:
                    answer = self.script.popleft() if self.script else self.default
                    self.requests.append(request)
                    self._changed.notify_all()
                try:
                    is_open = self._answer(connection, answer)
                    if is_open and 200 <= answer.status < 300:
                        self.accepted.append(request)
                    if not is_open:
                        return
                except OSError:  # the client has given up
                    return

    def _read(self, connection: socket.socket) -> Request | None:
        """Return the next request, None if the connection or the server was closed."""
        data = b""
        while True:
            head, separator, body = data.partition(b"\r\n\r\n")
            if separator:
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                if len(body) >= int(headers.get("content-length", 0)):
                    return Request(first.split()[1], headers, body)
            try:
                received = connection.recv(65536)
            except TimeoutError:
                if self._is_closing.is_set():
                    return None
                continue
            except OSError:
                return None
            if not received:
                return None
            data += received

    def _answer(self, connection: socket.socket, answer: Answer) -> bool:
        """Answer a request, and return whether the connection stays open."""
        if answer.behaviour == "hang":
            self._is_closing.wait(LIMIT_SECONDS)
            return False
        if answer.behaviour == "reset":
            # With a linger time of 0, closing sends a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if answer.behaviour == "drip":
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while not self._is_closing.wait(0.05):
                connection.sendall(b"x")
            return False
        if answer.behaviour == "garbage":
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            return False
        headers = {"Content-Length": str(len(answer.body)), **(answer.headers or {})}
        lines = [f"HTTP/1.1 {answer.status} Reason", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode() + answer.body)
        return True
