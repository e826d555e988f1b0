"""Who may see and label incidents, and how the page defends itself against other pages in the same browser.

The page serves people, from a network that may hold hostile machines, and shows texts that devices have sent:

- Without a login it listens on this machine only (`check_address`).
- A request must name a host that the page is known by, so that a foreign name that resolves to this machine (DNS
  rebinding) reads nothing.
- A request that changes something must come from the page itself: by the headers that browsers add, and by a token that
  is bound to the session.
- The content security policy permits scripts, styles and connections of this server only, and neither inline code nor
  evaluation of texts.
- Passwords are stored as scrypt hashes and compared in constant time. Wrong ones are limited for each client, which is
  whoever connects, or whom a trusted proxy names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from itsdangerous import BadSignature, URLSafeSerializer, URLSafeTimedSerializer
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deformer_stream.codec.feedback_messages import MAX_NAME_CHARS
from deformer_stream.errors import ConfigError
from deformer_stream.settings.option_files import read_option_file

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": browsers then send "Origin: null" with forms, and the origin of a form could not be checked.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}

PATHS_FOR_PROGRAMS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths whose content is numbers only. They need no login, and are served under every host name."""

MAX_BODY_BYTES = 16 * 1024
"""Maximum size of the body of a request. A label has at most a name and a note."""
SESSION_SECONDS = 12 * 3600
"""Time without a request after which a person has to log in again."""
MAX_FAILURES, FAILURE_SECONDS = 10, 300.0
"""After this many wrong passwords of a client within this time, further ones are refused."""
MAX_CLIENTS = 10_000
"""Maximum number of clients whose wrong passwords are counted."""
MAX_ENDED_SESSIONS = 10_000
"""Maximum number of sessions of which it is stored that they have ended."""
MAX_SECRET_BYTES = 1024
MIN_TOKEN_CHARS = 16

_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1  # OWASP's minimum with p = 3 is 2**15; one login takes about 0.1 s
_SCRYPT_MEMORY = 128 * _SCRYPT_N * _SCRYPT_R * 2
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared, not bound


def hash_password(password: str) -> str:
    """Return the scrypt hash of a password, as a line of `--users-file` holds it."""
    salt = secrets.token_bytes(16)
    digest = _compute_scrypt(password, salt, _SCRYPT_N, _SCRYPT_R, _SCRYPT_P)
    parts = ("scrypt", _SCRYPT_N, _SCRYPT_R, _SCRYPT_P, _to_base64(salt), _to_base64(digest))
    return "$".join(str(part) for part in parts)


def verify_password(password: str, password_hash: str) -> bool:
    """Return whether a password has a hash that `hash_password` returned. The time does not depend on the password."""
    _, n, r, p, salt, digest = password_hash.split("$")
    computed = _compute_scrypt(password, base64.b64decode(salt), int(n), int(r), int(p))
    return hmac.compare_digest(computed, base64.b64decode(digest))


def _compute_scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    """Return the scrypt digest of a password."""
    return hashlib.scrypt(password.encode("utf-8", "surrogatepass"), salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_MEMORY)


def _to_base64(value: bytes) -> str:
    """Return bytes as Base64 text."""
    return base64.b64encode(value).decode()


def _check_hash(text: str) -> bool:
    """Return whether a text is a hash that `hash_password` could have returned."""
    parts = text.split("$")
    if len(parts) != 6 or parts[:4] != ["scrypt", str(_SCRYPT_N), str(_SCRYPT_R), str(_SCRYPT_P)]:
        return False
    try:
        return all(base64.b64decode(part, validate=True) for part in parts[4:])
    except (binascii.Error, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who may log in: everybody who has the token, or the users with their passwords, or nobody needs to.

    Attributes:
        token: The token, None if there is none.
        hash_by_user: Hash of the password of each user.
    """

    token: str | None = None
    hash_by_user: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_required(self) -> bool:
        """Whether a person has to log in."""
        return self.token is not None or bool(self.hash_by_user)

    def verify(self, name: str, password: str) -> bool:
        """Return whether a person may log in.

        Args:
            name: The user. With a token it may be any name.
            password: The token or the password.
        """
        if len(password) > MAX_SECRET_BYTES or len(name) > MAX_NAME_CHARS:
            return False
        if self.token is not None:
            given = password.encode("utf-8", "surrogatepass")
            return hmac.compare_digest(given, self.token.encode("utf-8", "surrogatepass"))
        known = self.hash_by_user.get(name)
        # An unknown user takes as long as a known one, so that the time does not show which users exist.
        is_right = verify_password(password, known or next(iter(self.hash_by_user.values())))
        return is_right and known is not None


def read_credentials(token_file: Path | None, users_file: Path | None) -> Credentials:
    """Return who may log in, from the files that the options name.

    Raises:
        ConfigError: A file cannot be read, is empty, or has a line that is not a user with a hash.
    """
    if token_file is not None and users_file is not None:
        raise ConfigError("--token-file and --users-file cannot be used together: give one of them")
    if token_file is not None:
        token = read_option_file("--token-file", token_file).strip()
        if not MIN_TOKEN_CHARS <= len(token) <= MAX_SECRET_BYTES or "\n" in token:
            raise ConfigError(
                f"--token-file {token_file} does not hold one line of {MIN_TOKEN_CHARS} to {MAX_SECRET_BYTES} "
                f"characters: make a token with: openssl rand -hex 24 > {token_file}"
            )
        return Credentials(token=token)
    if users_file is not None:
        return Credentials(hash_by_user=_parse_users(read_option_file("--users-file", users_file), users_file))
    return Credentials()


def _parse_users(text: str, path: Path) -> dict[str, str]:
    """Return the hash of each user of a file.

    Raises:
        ConfigError: A line is not a user with a hash, or there is no user. The message does not contain the line.
    """
    hash_by_user = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, password_hash = line.strip().rpartition(":")
        if not separator or not 0 < len(name) <= MAX_NAME_CHARS or not _check_hash(password_hash):
            raise ConfigError(
                f"line {number} of --users-file {path} is not NAME:HASH: make a hash with deformer-stream serve --hash"
            )
        hash_by_user[name] = password_hash
    if not hash_by_user:
        raise ConfigError(f"--users-file {path} has no user: add lines NAME:HASH (deformer-stream serve --hash)")
    return hash_by_user


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host name or an IP address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, credentials: Credentials) -> None:
    """Raise `ConfigError` if other machines could open the page without a login."""
    if not credentials.is_required and not is_loopback(host):
        raise ConfigError(
            f"--http {host}: other machines can reach this address, and everybody could label incidents: add "
            "--token-file or --users-file, or use 127.0.0.1"
        )


def list_allowed_hosts(host: str, credentials: Credentials, external_url: str | None) -> frozenset[str] | None:
    """Return the host names that a request may name, without ports; None for any name.

    With a login any name is allowed unless `external_url` states it. The cookie of a session is bound to the name under
    which the person has logged in, so that a foreign name has none.

    Args:
        host: Host on which the page listens.
        credentials: Who may log in.
        external_url: Address under which people reach the page, None if it is not known.
    """
    names = {"localhost", "127.0.0.1", "::1"}
    external = urlsplit(external_url).hostname if external_url else None
    if credentials.is_required and external is None:
        return None
    if external is not None:
        names.add(external.lower())
    if host not in _ANY_ADDRESS:
        names.add(host.lower())
    return frozenset(names)


def split_host(header: str) -> str | None:
    """Return the host name of a `Host` header in lower case, without its port; None if it is malformed."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port  # raises ValueError if the port is none
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None or not parts.hostname:
        return None
    return parts.hostname.lower()


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a browser.

    Attributes:
        id: Random id, to which the tokens of forms are bound.
        user: Name of the person, "" if unknown.
    """

    id: str
    user: str = ""


class SessionSigner:
    """Makes and checks the cookies of sessions and the tokens of forms.

    The key is drawn at the start of the program, so a restart ends all sessions. The ids of ended sessions are stored,
    because an answer that is on its way to another tab when a person logs out contains the cookie again.

    Args:
        cookie_name: Name of the cookie.
        is_secure: Whether browsers send the cookie over HTTPS only.
        path: Path below which browsers send the cookie.
    """

    def __init__(self, cookie_name: str, is_secure: bool, path: str = "/") -> None:
        key = secrets.token_bytes(32)
        self.cookie_name = cookie_name
        self._is_secure, self._path = is_secure, path
        self._sessions = URLSafeTimedSerializer(key, salt="session")
        self._forms = URLSafeSerializer(key, salt="form")
        self._ended_ids: OrderedDict[str, None] = OrderedDict()

    def read(self, request: Request) -> Session | None:
        """Return the session of a request; None if its cookie is missing, forged or too old, or if it has ended."""
        cookie = request.cookies.get(self.cookie_name)
        if cookie is None:
            return None
        try:
            content = self._sessions.loads(cookie, max_age=SESSION_SECONDS)
        except BadSignature:
            return None
        session = Session(str(content["id"]), str(content["user"]))
        return None if session.id in self._ended_ids else session

    def make(self, user: str) -> Session:
        """Return a new session of a person who has logged in."""
        return Session(secrets.token_urlsafe(16), user)

    def write(self, headers: MutableHeaders, session: Session) -> None:
        """Add the cookie of a session to the headers of a response."""
        value = self._sessions.dumps({"id": session.id, "user": session.user})
        headers.append("set-cookie", self._format_cookie(str(value), SESSION_SECONDS))

    def end(self, headers: MutableHeaders, session: Session) -> None:
        """End a session, and remove its cookie from the browser."""
        self._ended_ids[session.id] = None
        while len(self._ended_ids) > MAX_ENDED_SESSIONS:
            self._ended_ids.popitem(last=False)
        headers.append("set-cookie", self._format_cookie("", 0))

    def _format_cookie(self, value: str, max_age: int) -> str:
        """Return the value of a `Set-Cookie` header."""
        secure = "; Secure" if self._is_secure else ""
        path = self._path or "/"
        return f"{self.cookie_name}={value}; Max-Age={max_age}; Path={path}; HttpOnly; SameSite=Strict{secure}"

    def make_form_token(self, session: Session) -> str:
        """Return the token that a form of this session contains."""
        return str(self._forms.dumps(session.id))

    def check_form_token(self, session: Session, token: str) -> bool:
        """Return whether a form has a token of this session."""
        try:
            content = self._forms.loads(token)
        except BadSignature:
            return False
        return isinstance(content, str) and hmac.compare_digest(content, session.id)


class LoginLimiter:
    """Counts wrong passwords of each client.

    Args:
        now: Returns a time in seconds that never runs backwards.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._failures_by_client: OrderedDict[str, list[float]] = OrderedDict()

    def is_allowed(self, client: str) -> bool:
        """Return whether a client may try a password."""
        with self._lock:
            return len(self._get_recent(client)) < MAX_FAILURES

    def add_failure(self, client: str) -> None:
        """Count a wrong password."""
        with self._lock:
            self._failures_by_client[client] = [*self._get_recent(client), self._now()]
            self._failures_by_client.move_to_end(client)
            while len(self._failures_by_client) > MAX_CLIENTS:
                self._failures_by_client.popitem(last=False)

    def _get_recent(self, client: str) -> list[float]:
        """Return the times of the recent wrong passwords of a client."""
        since = self._now() - FAILURE_SECONDS
        return [moment for moment in self._failures_by_client.get(client, []) if moment > since]


def is_same_origin(headers: Headers, external_url: str | None) -> bool:
    """Return whether a request comes from a page of this server, by the headers that browsers add.

    `Sec-Fetch-Site` is decisive if it is there. Browsers send it over HTTPS and to this machine. Otherwise `Origin`
    must name the host of the request.

    Args:
        headers: The headers of the request.
        external_url: Address under which people reach the page, None if it is not known.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        sender = urlsplit(origin)
        _ = sender.port
    except ValueError:
        return False
    known = {headers.get("host", "").lower()}
    if external_url:
        known.add(urlsplit(external_url).netloc.lower())
    return sender.scheme in ("http", "https") and bool(sender.netloc) and sender.netloc.lower() in known


class SecurityMiddleware:
    """Refuses requests of foreign hosts and origins and large bodies, and adds the security headers.

    Args:
        app: The application.
        allowed_hosts: Host names that a request may name, None for any.
        external_url: Address under which people reach the page, None if it is not known.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str] | None, external_url: str | None) -> None:
        self._app, self._allowed_hosts, self._external_url = app, allowed_hosts, external_url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    response_headers[name] = value
                response_headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._find_refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        await self._app(scope, _limit_body(receive), send_with_headers)

    def _find_refusal(self, method: str, path: str, headers: Headers) -> PlainTextResponse | None:
        """Return the answer to a request that is refused, None for other requests."""
        hosts = headers.getlist("host")
        host = split_host(hosts[0]) if len(hosts) == 1 else None
        # An orchestrator and Prometheus name the address of this machine, whatever people call the page.
        is_any_allowed = self._allowed_hosts is None or path in PATHS_FOR_PROGRAMS
        if host is None or not (is_any_allowed or host in (self._allowed_hosts or ())):
            return PlainTextResponse("This host name is not served here: start serve with --external-url.\n", 421)
        if method not in _SAFE_METHODS:
            if not is_same_origin(headers, self._external_url):
                return PlainTextResponse("The request comes from another site and was refused.\n", 403)
            length = headers.get("content-length", "0")
            if not (length.isascii() and length.isdigit()) or int(length[:20]) > MAX_BODY_BYTES:
                return PlainTextResponse(f"The request has more than {MAX_BODY_BYTES} bytes.\n", 413)
        return None


class BodyTooLargeError(Exception):
    """The body of a request has more than `MAX_BODY_BYTES`."""


def _limit_body(receive: Receive) -> Receive:
    """Return a function that receives a request and raises `BodyTooLargeError` if its body is too large."""
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message: Any = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise BodyTooLargeError
        return message  # type: ignore[no-any-return]

    return receive_limited
