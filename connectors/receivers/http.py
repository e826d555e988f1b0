"""HTTP requests to receivers: a time limit for the whole request, failures as exceptions, no secrets in messages."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from deformer_stream.errors import ConfigError
from deformer_stream.runtime.incident_ports import PermanentFailure, TemporaryFailure

MAX_ANSWER_BYTES = 4096
"""Number of bytes of an answer that are read. Only its beginning is reported."""

MAX_REPORTED_CHARS = 200
"""Number of characters of an answer or an error that are reported."""

_TEMPORARY_STATUSES = frozenset((401, 402, 403, 404, 405, 407, 408, 410, 425, 429))
"""Statuses below 500 that the notification has not caused: the receiver is busy, or the address or the login is wrong.
Other statuses, such as 400 and 413, refuse this notification only."""

# httpx logs the address of each request, which may contain a secret.
logging.getLogger("httpx").setLevel(logging.WARNING)


class HttpSender:
    """Sends HTTP requests to one address. Only the thread that has sent the first request may use it.

    The time limit is for the whole request, so that a receiver that sends one byte every few seconds cannot block the
    sender. Requests must therefore be cancellable, so they run in an event loop.

    Args:
        url: The address.
        timeout: Seconds after which a request has failed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._runner: asyncio.Runner | None = None
        self._client: httpx.AsyncClient | None = None

    def post(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a request, and return if the receiver has accepted it with a status from 200 to 299.

        Args:
            body: The content.
            headers: The headers, without those that HTTP itself needs.

        Raises:
            TemporaryFailure: The receiver could not be reached, was too slow, is busy, or the address is wrong.
            PermanentFailure: The receiver has refused this request.
        """
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            status, answer, retry_after = self._runner.run(self._post(body, headers))
        except TimeoutError:
            raise TemporaryFailure(f"no answer within {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            # The text of an error can contain the address.
            raise TemporaryFailure(_describe_error(error)) from None
        except (OSError, httpx.InvalidURL) as error:
            raise TemporaryFailure(f"the connection failed ({type(error).__name__})") from None
        if 200 <= status < 300:
            return
        problem = f"HTTP status {status}{answer}"
        if status >= 500 or status < 400 or status in _TEMPORARY_STATUSES:
            raise TemporaryFailure(problem, retry_after)
        raise PermanentFailure(problem)

    def close(self) -> None:
        """Close the connections."""
        if self._runner is not None:
            if self._client is not None:
                self._runner.run(self._client.aclose())
            self._runner.close()

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, str, float | None]:
        """Send a request within the limit.

        Returns:
            The status, the beginning of the answer as text, and the seconds that the receiver asks to wait.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout, follow_redirects=False)
        async with asyncio.timeout(self._timeout):
            async with self._client.stream("POST", self._url, content=body, headers=dict(headers)) as response:
                content = b""
                async for chunk in response.aiter_bytes(MAX_ANSWER_BYTES):
                    content += chunk
                    if len(content) >= MAX_ANSWER_BYTES:
                        break  # the connection is closed, because the rest of the answer was not read
            text = content[:MAX_ANSWER_BYTES].decode("utf-8", "replace")
            return response.status_code, _quote_answer(text), _parse_retry_after(response.headers.get("retry-after"))


def check_url(flag: str, url: str) -> str:
    """Return the host and the port of an address, which identify a receiver in messages without its secrets.

    Args:
        flag: The option with the address, for the error message.
        url: The address.

    Raises:
        ConfigError: It is no address of an HTTP server. The message does not show it, because it may have a secret.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{flag}: the address is not valid: write it like https://host:port/path")
    return host if port is None else f"{host}:{port}"


def make_identity(kind: str, *address: str) -> str:
    """Return the identity of a receiver: its kind and a hash of its address.

    The address may have a password, and the identity is shown to everybody who lists the consumer groups of a broker.
    The hash is therefore a slow one, with which passwords are not guessed quickly.

    Args:
        kind: Kind of the receiver.
        *address: Everything that distinguishes it from others of its kind.
    """
    digest = hashlib.scrypt("\0".join(address).encode(), salt=b"deformer-stream receiver", n=2**14, r=8, p=1, dklen=8)
    return f"{kind}-{digest.hex()}"


def to_printable_line(text: str) -> str:
    """Return the first `MAX_REPORTED_CHARS` characters of a text on one line, without those that cannot be printed."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "�" for character in line)[:MAX_REPORTED_CHARS]


def _describe_error(error: httpx.HTTPError) -> str:
    """Return what failed, without the address."""
    kinds: tuple[tuple[type[httpx.HTTPError], str], ...] = (
        (httpx.TimeoutException, "no answer in time"),
        (httpx.ConnectError, "the connection could not be made"),
        (httpx.RemoteProtocolError, "the connection was closed, or the answer is not HTTP"),
        (httpx.NetworkError, "the connection was interrupted"),
        (httpx.ProxyError, "the proxy refuses the connection"),
        (httpx.UnsupportedProtocol, "the address is not valid"),
    )
    text = next((text for kind, text in kinds if isinstance(error, kind)), "the request failed")
    return f"{text} ({type(error).__name__})"


def _quote_answer(text: str) -> str:
    """Return the beginning of an answer for a message, on one line."""
    line = to_printable_line(text)
    return f": {line}" if line else ""


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a header `Retry-After`, which has a number or a date; None if it is missing or invalid."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
