"""Chat and mail by the library Apprise, which supports more than a hundred services. It is in the extra `notify`."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from connectors.receivers.http import make_identity, to_printable_line
from deformer_stream.codec.incident_text import list_facts, summarize_incident
from deformer_stream.errors import ConfigError
from deformer_stream.extras import format_remedy
from deformer_stream.runtime.incident_ports import Notification, TemporaryFailure
from deformer_stream.settings.option_files import read_option_file

APP_NAME = "deformer-stream"
MIN_HIDDEN_CHARS = 3
"""Smallest number of characters of a part of an address that is hidden in messages, because it may be a secret."""


class AppriseReceiver:
    """A receiver that is a chat or a mailbox. It cannot recognise a message that is sent twice.

    Args:
        url: The address in the notation of Apprise.
        number: Number of the address among those of the user, for the name of the receiver.
        timeout: Seconds after which a message has failed.

    Raises:
        ConfigError: Apprise is not installed, or does not understand the address.
    """

    wants_updates = False
    resend_seconds: float | None = None

    def __init__(self, url: str, number: int, timeout: float) -> None:
        try:
            import apprise
        except ImportError:
            raise ConfigError(f"--notify needs the package apprise: run {format_remedy('notify')}") from None
        # Apprise's own log could show addresses. Its messages are part of the exceptions, without the address.
        logger = logging.getLogger("apprise")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
        asset = apprise.AppriseAsset(
            app_id=APP_NAME, storage_mode="memory", service_timeout=timeout, allow_templates=False
        )
        asset.http_redirects = False
        self._apprise = apprise.Apprise(asset=asset)
        self._kinds: Any = apprise.NotifyType
        if not self._apprise.add(url) or len(self._apprise) != 1:
            raise ConfigError(f"--notify: address {number} is not understood by Apprise: see its list of services")
        self.name = f"{re.split('[^a-z0-9]', url.lower(), maxsplit=1)[0]} {number}"
        self.identity = make_identity("notify", url)
        self._timeout = timeout
        self._hidden = re.compile(
            "|".join(re.escape(part) for part in sorted(_split_address(url), key=len, reverse=True)) or r"(?!)",
            re.IGNORECASE,
        )

    def send(self, notification: Notification) -> None:
        """Send a notification as text.

        Raises:
            TemporaryFailure: It was not sent. Apprise does not state whether it could be sent later.
        """
        body = "\n".join(f"{name}: {text}" for name, text in list_facts(notification.incident).items())
        if notification.url is not None:
            body += f"\n{notification.url}"
        result = self._apprise.notify(
            title=make_title(notification),
            body=body,
            body_format="text",
            notify_type=self._kinds.SUCCESS if notification.action == "resolve" else self._kinds.FAILURE,
            timeout=self._timeout,
        )
        if not result:
            reasons = [entry.message for entry in result.logs()]
            raise TemporaryFailure(self._hide_secrets("; ".join(reasons) or f"Apprise: {result.status.name}"))

    def close(self) -> None:
        """Do nothing: Apprise keeps no connections."""

    def _hide_secrets(self, text: str) -> str:
        """Return a text on one line, without any part of the address."""
        return to_printable_line(self._hidden.sub("…", " ".join(text.split())))


def make_title(notification: Notification) -> str:
    """Return the title of a message: what has happened, and the incident on one line."""
    if notification.presentation.silenced is not None:
        prefix = f"Silenced ({notification.presentation.silenced})"
    else:
        prefix = {"open": "Open", "update": "Changed", "resolve": "Resolved"}[notification.action]
    return f"{prefix}: {summarize_incident(notification.incident)}"


def read_addresses(path: Path) -> list[str]:
    """Return the addresses of a file, one in each line. Empty lines and those that begin with # are left out.

    Raises:
        ConfigError: The file cannot be read, or has no address.
    """
    lines = [line.strip() for line in read_option_file("--notify-file", path).splitlines()]
    addresses = [line for line in lines if line and not line.startswith("#")]
    if not addresses:
        raise ConfigError(f"--notify-file {path} has no address: write one in each line")
    return addresses


def _split_address(url: str) -> set[str]:
    """Return the parts of an address that can be secrets: all but its scheme."""
    return {part for part in re.split(r"[^\w.-]+", url)[1:] if len(part) >= MIN_HIDDEN_CHARS}
