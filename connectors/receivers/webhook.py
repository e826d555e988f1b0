"""A webhook: each notification as JSON over HTTP, signed as Standard Webhooks says, with the headers of CloudEvents."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from connectors.receivers.http import HttpSender, check_url, make_identity
from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE, make_attributes, make_source
from deformer_stream.errors import ConfigError
from deformer_stream.runtime.incident_ports import Notification
from deformer_stream.settings.logins import read_secret

SECRET_PREFIX = "whsec_"  # noqa: S105 - a prefix of secrets, none itself
MIN_KEY_BYTES = 16
"""A shorter key could be guessed. The specification recommends 24 to 64 bytes."""


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a message: HMAC-SHA256 as in the specification Standard Webhooks, version 1.

    Args:
        key: The secret key.
        message_id: Id of the message, header `webhook-id`.
        timestamp: Seconds since 1970 of the request, header `webhook-timestamp`.
        body: The content of the request.
    """
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def read_key(path: Path) -> bytes:
    """Return the key of a file: `whsec_` and the key in Base64, or any other text, whose bytes are the key.

    Raises:
        ConfigError: The file cannot be read, or the key is too short or not Base64.
    """
    secret = read_secret("--webhook-secret-file", path).strip()
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(
                f"--webhook-secret-file {path}: after {SECRET_PREFIX} the secret is not Base64: copy it again"
            ) from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"--webhook-secret-file {path}: the secret is shorter than {MIN_KEY_BYTES} bytes: make one with "
            "`openssl rand -base64 32`"
        )
    return key


class Webhook:
    """A receiver that gets each notification as an HTTP request. The content is the incident as in the topic.

    The headers are `webhook-id` (equal if a notification is repeated), `webhook-timestamp` and `webhook-signature` of
    Standard Webhooks, and the attributes of CloudEvents as `ce-…`. `ce-action` is `open`, `update` or `resolve`;
    `ce-silenced` is why a person has silenced the incident.

    Args:
        url: The address.
        key: The key of the signature, None for requests without signature.
        topic: The topic of events, for the source of CloudEvents.
        timeout: Seconds after which a request has failed.
        now: Returns seconds since 1970.
    """

    wants_updates = True
    resend_seconds: float | None = None

    def __init__(
        self, url: str, key: bytes | None, topic: str, timeout: float, now: Callable[[], float] = time.time
    ) -> None:
        self.name = f"webhook {check_url('--webhook', url)}"
        self.identity = make_identity("webhook", url)
        self._key, self._source, self._now = key, make_source(topic), now
        self._sender = HttpSender(url, timeout)

    def send(self, notification: Notification) -> None:
        """Send a notification."""
        attributes = make_attributes("incident", notification.key, self._source, notification.incident.last)
        attributes["action"] = notification.action
        if notification.presentation.silenced is not None:
            attributes["silenced"] = notification.presentation.silenced
        headers = {"content-type": JSON_CONTENT_TYPE} | {f"ce-{name}": value for name, value in attributes.items()}
        headers["webhook-id"] = notification.key
        timestamp = int(self._now())
        headers["webhook-timestamp"] = str(timestamp)
        if self._key is not None:
            headers["webhook-signature"] = sign(self._key, notification.key, timestamp, notification.body)
        self._sender.post(notification.body, headers)

    def close(self) -> None:
        """Close the connections."""
        self._sender.close()
