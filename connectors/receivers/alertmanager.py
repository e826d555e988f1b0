"""Prometheus Alertmanager: an incident is an alert of its API v2, sent again until it is resolved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit, urlunsplit

import orjson

from connectors.receivers.http import HttpSender, check_url, make_identity
from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE
from deformer_stream.codec.incident_text import list_facts, summarize_incident
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_ports import Notification

ALERT_NAME = "DeformerIncident"
RESEND_SECONDS = 60.0
"""Seconds after which an open incident is sent again, as Prometheus does."""

LIFETIME_SECONDS = 900.0
"""Alertmanager resolves an incident by itself if it was not sent again for this long."""

MAX_BATCH = 64
"""Largest number of alerts in one request, as Prometheus sends by default."""

API_PATH = "/api/v2/alerts"


class Alertmanager:
    """A receiver that is a Prometheus Alertmanager.

    The labels of an incident never change, so that all messages are about one alert of Alertmanager. What changes, such
    as the severity, is an annotation.

    Args:
        url: Address of Alertmanager, without the path of its API.
        timeout: Seconds after which a request has failed.
        now: Returns seconds since 1970.
    """

    wants_updates = True
    max_batch = MAX_BATCH
    resend_seconds: float | None = RESEND_SECONDS

    def __init__(self, url: str, timeout: float, now: Callable[[], float] = time.time) -> None:
        self.name = f"alertmanager {check_url('--alertmanager', url)}"
        self.identity = make_identity("alertmanager", url)
        self._now = now
        parts = urlsplit(url)
        path = parts.path.rstrip("/").removesuffix(API_PATH) + API_PATH
        self._sender = HttpSender(urlunsplit((parts.scheme, parts.netloc, path, "", "")), timeout)

    def send(self, notification: Notification) -> None:
        """Send a notification."""
        self.send_batch([notification])

    def send_batch(self, notifications: Sequence[Notification]) -> None:
        """Send notifications of different incidents in one request."""
        now = round(self._now() * 1e6)
        alerts = [make_alert(notification, now) for notification in notifications]
        self._sender.post(orjson.dumps(alerts), {"content-type": JSON_CONTENT_TYPE})

    def close(self) -> None:
        """Close the connections."""
        self._sender.close()


def make_alert(notification: Notification, now: int) -> dict[str, object]:
    """Return a notification as an alert of the API v2.

    Args:
        notification: The notification.
        now: Microseconds since 1970. An alert that ends now or before is resolved.
    """
    incident = notification.incident
    is_firing = notification.action != "resolve"
    annotations = {
        "summary": summarize_incident(incident),
        **{name.replace(" ", "_"): text for name, text in list_facts(incident).items() if name != "incident"},
    }
    if notification.presentation.silenced is not None:
        annotations["silenced"] = notification.presentation.silenced
    if notification.presentation.name is not None:
        annotations["fault"] = notification.presentation.name
    alert: dict[str, object] = {
        "labels": make_labels(incident),
        "annotations": annotations,
        # A device's clock may run ahead, and replayed events lie in the past. Alertmanager refuses an alert that ends
        # before it starts.
        "startsAt": format_rfc3339(min(incident.opened, now)),
        "endsAt": format_rfc3339(now + round(LIFETIME_SECONDS * 1e6) if is_firing else now),
    }
    return alert if notification.url is None else alert | {"generatorURL": notification.url}


def make_labels(incident: Incident) -> dict[str, str]:
    """Return the labels of an incident, which never change. Empty ones are left out, as Alertmanager does."""
    labels = {
        "alertname": ALERT_NAME,
        "incident": incident.id,
        "device": incident.device,
        "group": incident.group,
        "kind": incident.kind,
        "model": incident.model,
    }
    return {name: value for name, value in labels.items() if value}
