"""A sink that publishes alerts to an MQTT broker, and waits for its acknowledgements."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from connectors.mqtt.client import TEMPORARY_REASONS, MqttOptions, connect, create_client, make_refusal
from deformer_stream import log
from deformer_stream.codec import encode_alert, encode_drift, encode_storm
from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.incidents.device import extract_device

if TYPE_CHECKING:
    from paho.mqtt.client import Client

MAX_TOPIC_BYTES = 65_535
"""Largest topic of MQTT in bytes."""

MAX_LEVELS = 100
"""Further levels of a topic are joined, because Mosquitto refuses topics with more than 200 levels."""

MAX_PENDING = 10_000
"""Number of alerts without acknowledgement beyond which `write` waits, because packet identifiers have 16 bits."""

NO_DEVICE = "none"
"""What stands for the device of a record that has none."""

WAIT_SECONDS = 1.0
"""Time in seconds between two reports of progress while the broker has not acknowledged an alert."""

STOP_SECONDS = 5.0
"""Longest time in seconds to wait for acknowledgements after the command was told to end."""

_PLACE = re.compile(r"\{(\w*)\}")


class AlertTopic:
    """The topic of alerts, with places for the device and the record.

    Args:
        text: The topic, such as `alerts/{device}`.
        filter: The topic filter of the readings, which must not match it.

    Raises:
        ConfigError: The text is no topic, or readings and alerts would have the same topics.
    """

    def __init__(self, text: str, filter: str) -> None:
        from paho.mqtt.client import topic_matches_sub

        unknown = set(_PLACE.findall(text)) - {"device", "record"}
        if unknown or re.search(r"[+#\0{}]", _PLACE.sub("", text)):
            raise ConfigError(
                f"--alerts-to {text!r} is not a topic; write text, {{device}} and {{record}}, without + and #"
            )
        self._text = text
        devices = ("/".join(["x"] * num_levels) for num_levels in range(1, 32))
        if any(topic_matches_sub(filter, self.format(f"{device}@x")) for device in devices):
            raise ConfigError(
                f"--alerts-to {text!r} fits the topic filter {filter!r} of --source, so alerts would be read as "
                "readings; choose another topic or a narrower filter"
            )

    def format(self, record: str) -> str:
        """Return the topic of an alert of a record. What brokers refuse in a topic is replaced by "_"."""
        name_by_place = {"device": extract_device(record) or NO_DEVICE, "record": record}
        topic = _PLACE.sub(lambda match: _replace_refused(name_by_place[match[1]]), self._text)
        levels = topic.split("/")
        if len(levels) > MAX_LEVELS:
            topic = "/".join([*levels[:MAX_LEVELS], "_".join(levels[MAX_LEVELS:])])
        return topic.encode()[:MAX_TOPIC_BYTES].decode("utf-8", "ignore")


def _replace_refused(name: str) -> str:
    """Return a name without wildcards, control characters and surrogates, for which brokers close the connection."""
    return "".join(character if character.isprintable() and character not in "+#" else "_" for character in name)


class MqttAlertSink:
    """A sink that publishes alerts and notices as JSON with QoS 1, over a connection of its own.

    A thread of paho-mqtt drives the connection, reconnects, and publishes again what was not acknowledged. The
    constructor connects.

    Args:
        options: The broker, and how this process connects to it.
        topic: The topic of alerts.
        on_wait: Called about every second during a wait for acknowledgements, so that the process counts as healthy.
        stop: Set when the command must end.

    Raises:
        Unavailable: The broker does not respond.
        ConfigError: paho-mqtt is not installed, or the broker refuses the connection.
    """

    def __init__(
        self, options: MqttOptions, topic: AlertTopic, on_wait: Callable[[], None], stop: threading.Event
    ) -> None:
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        self._options, self._topic = options, topic
        self._on_wait, self._stop = on_wait, stop
        self._properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]  # no annotations
        self._properties.ContentType = JSON_CONTENT_TYPE
        self._refusal: ConfigError | None = None
        self._pending: set[int] = set()  # packet identifiers of messages without acknowledgement
        # The client calls the callbacks while it holds a lock that `publish` takes. So this lock is not held then.
        self._changed = threading.Condition()  # of `_refusal` and `_acknowledged`, which callbacks change
        self._acknowledged: set[int] = set()
        self._client = create_client(options, f"{options.client_id}-alerts")
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_publish = self._on_publish
        self._client.reconnect_delay_set(1, 5)
        connect(self._client, options, session_seconds=0)
        self._client.loop_start()

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Begin to publish alerts and notices.

        Args:
            effects: The results of one poll.
            data: The messages of the poll, to which indexes in the effects refer. None if there were none.
        """
        for alert in effects.alerts:
            self._publish(alert.record, encode_alert(alert, data))
        for notice in effects.drift_notices:
            self._publish(notice.record, encode_drift(notice))
        for storm in effects.storm_notices:
            self._publish(storm.records[0], encode_storm(storm))

    def _publish(self, record: str, value: bytes) -> None:
        """Begin to publish a message. If there is no connection, the client publishes it after it has reconnected."""
        info = self._client.publish(self._topic.format(record), value, qos=1, properties=self._properties)
        self._pending.add(info.mid)
        if len(self._pending) >= MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """Wait until the broker has acknowledged everything that was published.

        Raises:
            Unavailable: It has not, for too long.
            ConfigError: It refuses the connection or a message.
        """
        began, stopped_at = time.monotonic(), None
        with self._changed:
            while self._has_pending() and self._refusal is None:
                self._changed.wait(WAIT_SECONDS)
                self._on_wait()
                now = time.monotonic()
                if self._stop.is_set():
                    stopped_at = stopped_at or now
                if now - began > self._options.patience or now - (stopped_at or now) > STOP_SECONDS:
                    raise Unavailable(
                        f"the MQTT broker at {self._options.address} has not acknowledged {len(self._pending)} alerts: "
                        "check that it is running; the next run publishes them again"
                    )
        if self._refusal is not None:
            raise self._refusal

    def _has_pending(self) -> bool:
        """Return whether messages are not acknowledged; the caller holds the lock."""
        self._pending -= self._acknowledged
        self._acknowledged.clear()
        return bool(self._pending)

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(self, _client: Client, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        """Note that the broker refuses the connection."""
        if reason.is_failure and reason.value not in TEMPORARY_REASONS:
            self._refuse(make_refusal(self._options, reason))

    def _on_disconnect(self, _client: Client, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        """Log that the connection is lost."""
        if reason.is_failure:
            log.get_logger("mqtt").warning("alert_connection_lost", broker=self._options.address, reason=str(reason))

    def _on_publish(self, _client: Client, _userdata: Any, mid: int, reason: Any, _properties: Any) -> None:
        """Note that a message is acknowledged, or refused."""
        if reason.is_failure:
            self._refuse(
                ConfigError(
                    f"the MQTT broker at {self._options.address} refuses an alert ({reason}): check --alerts-to and "
                    "the permissions of this user"
                )
            )
        with self._changed:
            self._acknowledged.add(mid)
            self._changed.notify_all()

    def _refuse(self, error: ConfigError) -> None:
        """Let `flush` raise an error."""
        with self._changed:
            self._refusal = self._refusal or error
            self._changed.notify_all()
