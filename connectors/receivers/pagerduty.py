"""PagerDuty: an incident is an alert of the Events API v2, with the id of the incident as its deduplication key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from connectors.receivers.http import HttpSender, check_url, make_identity
from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE
from deformer_stream.codec.incident_text import list_facts, name_device, summarize_incident
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.errors import ConfigError
from deformer_stream.runtime.incident_ports import Notification
from deformer_stream.settings.logins import read_secret

CLIENT_NAME = "deformer-stream"
MAX_SUMMARY_CHARS = 1024
"""Longest summary that PagerDuty accepts."""

KEY_LENGTH = 32
"""Number of characters of an integration key."""

_SEVERITIES = {1: "warning", 2: "error", 3: "critical"}


def read_routing_key(path: Path) -> str:
    """Return the integration key of a file.

    Raises:
        ConfigError: The file cannot be read, or it holds something else.
    """
    key = read_secret("--pagerduty-key-file", path).strip()
    if len(key) != KEY_LENGTH or not (key.isascii() and key.isalnum()):
        raise ConfigError(
            f"--pagerduty-key-file {path} does not hold an integration key: copy the {KEY_LENGTH} characters of the "
            "service's Events API v2 integration"
        )
    return key


class PagerDuty:
    """A receiver that is a service of PagerDuty. It gets no updates: PagerDuty would log them without showing them.

    Args:
        url: Address of the Events API v2.
        key: The integration key of the service.
        timeout: Seconds after which a request has failed.
    """

    wants_updates = False
    resend_seconds: float | None = None

    def __init__(self, url: str, key: str, timeout: float) -> None:
        self.name = f"pagerduty {check_url('--pagerduty-url', url)}"
        self.identity = make_identity("pagerduty", url, key)
        self._key = key
        self._sender = HttpSender(url, timeout)

    def send(self, notification: Notification) -> None:
        """Send a notification."""
        event = make_event(notification) | {"routing_key": self._key}
        self._sender.post(orjson.dumps(event), {"content-type": JSON_CONTENT_TYPE})

    def close(self) -> None:
        """Close the connections."""
        self._sender.close()


def make_event(notification: Notification) -> dict[str, Any]:
    """Return a notification as an event of the API, without the integration key."""
    incident = notification.incident
    event: dict[str, Any] = {
        "event_action": "resolve" if notification.action == "resolve" else "trigger",
        "dedup_key": incident.id,
    }
    if notification.action == "resolve":
        return event
    event["payload"] = {
        "summary": summarize_incident(incident)[:MAX_SUMMARY_CHARS],
        "source": name_device(incident),
        "severity": _SEVERITIES.get(incident.severity, "critical"),
        "timestamp": format_rfc3339(incident.opened),
        "component": incident.suspects[0].feature if incident.suspects else None,
        "group": incident.group or None,
        "class": incident.kind,
        "custom_details": list_facts(incident),
    }
    event["client"] = CLIENT_NAME
    if notification.url is not None:
        event |= {"client_url": notification.url, "links": [{"href": notification.url, "text": "Incident"}]}
    return event
