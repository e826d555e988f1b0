"""A sink that publishes alerts to an MQTT broker, and waits for its acknowledgements."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from connectors.mqtt.client import TEMPORARY_REASONS, MqttOptions, connect, create_client, make_refusal
from deformer_stream import log
from deformer_stream.codec import encode_alert, encode_drift, encode_storm
from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Alert, Effects
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.incidents.device import extract_device

if TYPE_CHECKING:
    from paho.mqtt.client import Client

MAX_TOPIC_BYTES = 65_535
"""Largest topic of MQTT in bytes."""

MAX_LEVELS = 100
"""Further levels of a topic are joined, because Mosquitto refuses topics with more than 200 levels."""

MAX_PENDING = 10_000
"""Largest number of alerts without acknowledgement, as packet identifiers have 16 bits. Brokers may permit less."""

MAX_HEADER_BYTES = 9
"""Largest size of the parts of a message that always exist: type, size, size of the topic, packet identifier."""

NO_DEVICE = "none"
"""What stands for the device of a record that has none."""

WAIT_SECONDS = 1.0
"""Time in seconds between two reports of progress while the broker has not acknowledged an alert."""

STOP_SECONDS = 5.0
"""Longest time in seconds to wait for acknowledgements after the command has received a signal to end."""

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
        unknown = set(_PLACE.findall(text)) - {"device", "record"}
        if unknown or re.search(r"[+#\0{}]", _PLACE.sub("", text)):
            raise ConfigError(
                f"--alerts-to {text!r} is not a topic; write text, {{device}} and {{record}}, without + and #"
            )
        self._text = text
        # The topics that begin with "$" are those of the broker, which no wildcard fits.
        is_internal = text.startswith("$") and filter[:1] in ("+", "#")
        if not is_internal and _can_fit(text.split("/"), filter.split("/")):
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


def _can_fit(levels: Sequence[str], filter_levels: Sequence[str]) -> bool:
    """Return whether a topic with places can fit a topic filter. A place stands for one level or several.

    Args:
        levels: The levels of the topic.
        filter_levels: The levels of the filter.
    """
    if not filter_levels or filter_levels[0] == "#":
        return bool(filter_levels) or not levels
    if not levels:
        return False
    expected, further = filter_levels[0], filter_levels[1:]
    texts = _PLACE.split(levels[0])[::2]  # without the names of the places
    level_pattern = ".*".join(map(re.escape, texts))
    if (expected == "+" or re.fullmatch(level_pattern, expected, re.DOTALL)) and _can_fit(levels[1:], further):
        return True
    if len(texts) == 1 or not (expected == "+" or expected.startswith(texts[0])):
        return False
    # The first place has a "/", and what follows it is a part of the next level.
    return _can_fit(["{}" + "{}".join(texts[1:]), *levels[1:]], further)


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
        # Topics and payloads: of messages without acknowledgement, by packet identifier; and of those that the broker
        # has refused for the time being.
        self._pending: dict[int, tuple[str, bytes]] = {}
        self._postponed: list[tuple[str, bytes]] = []
        self._publish_again_at = 0.0
        # The client calls the callbacks while it holds a lock that `publish` takes. So this lock is not held then.
        self._changed = threading.Condition()  # of `_refusal` and the following ones, which callbacks change
        self._acknowledged: set[int] = set()
        self._busy: set[int] = set()  # packet identifiers of messages that the broker has refused for the time being
        self._max_pending = 0  # until the broker has said how many messages it permits
        self._max_packet_bytes: int | None = None
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
            self._publish_alert(alert, data)
        for notice in effects.drift_notices:
            self._publish(notice.record, encode_drift(notice))
        for storm in effects.storm_notices:
            self._publish(storm.records[0], encode_storm(storm))

    def _publish_alert(self, alert: Alert, data: Payload | None) -> None:
        """Begin to publish an alert, without the last contributions if the broker does not take so large a message."""
        self._wait(self._can_publish)  # the limit is known then
        value, max_bytes = encode_alert(alert, data), self._get_max_bytes(self._topic.format(alert.record))
        if len(value) > max_bytes:
            value = encode_alert(alert, data, max_bytes)
            log.get_logger("mqtt").warning("alert_shortened", id=alert.id, max_bytes=max_bytes)
        self._publish(alert.record, value)

    def _publish(self, record: str, value: bytes) -> None:
        """Begin to publish a message. If there is no connection, the client publishes it after it has reconnected.

        Raises:
            Unavailable: The broker does not acknowledge earlier messages, for too long.
            ConfigError: It refuses the connection or a message, or does not take so large a message.
        """
        self._wait(self._can_publish)
        topic = self._topic.format(record)
        if len(value) > self._get_max_bytes(topic):
            raise ConfigError(
                f"the MQTT broker at {self._options.address} takes messages of {self._max_packet_bytes} bytes at most, "
                f"but an alert has {len(value)}: raise this limit of the broker"
            )
        self._send(topic, value)

    def _get_max_bytes(self, topic: str) -> int:
        """Return the size in bytes of the largest payload that the broker takes."""
        if self._max_packet_bytes is None:
            return sys.maxsize
        properties: bytes = self._properties.pack()  # type: ignore[no-untyped-call]  # no annotations
        return self._max_packet_bytes - MAX_HEADER_BYTES - len(topic.encode()) - len(properties)

    def _send(self, topic: str, value: bytes) -> None:
        """Pass a message to the client."""
        info = self._client.publish(topic, value, qos=1, properties=self._properties)
        self._pending[info.mid] = topic, value

    def flush(self) -> None:
        """Wait until the broker has acknowledged everything that was published.

        Raises:
            Unavailable: It has not, for too long.
            ConfigError: It refuses the connection or a message.
        """
        self._wait(lambda: self._num_unacknowledged == 0)

    @property
    def _num_unacknowledged(self) -> int:
        """Number of messages without acknowledgement."""
        return len(self._pending) + len(self._postponed)

    def _can_publish(self) -> bool:
        """Return whether the broker permits a further message without acknowledgement."""
        return self._num_unacknowledged < self._max_pending

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for acknowledgements, and publish again what the broker has refused for the time being.

        Args:
            is_done: Returns whether the wait ends.

        Raises:
            Unavailable: The broker does not acknowledge enough, for too long.
            ConfigError: It refuses the connection or a message.
        """
        began, stopped_at = time.monotonic(), None
        while True:
            with self._changed:
                self._settle()
                if self._refusal is not None:
                    raise self._refusal
                if is_done():
                    return
                self._changed.wait(WAIT_SECONDS)
            self._on_wait()
            now = time.monotonic()
            if self._stop.is_set():
                stopped_at = stopped_at or now
            if now - began > self._options.patience or now - (stopped_at or now) > STOP_SECONDS:
                raise Unavailable(
                    f"the MQTT broker at {self._options.address} has not acknowledged {self._num_unacknowledged} "
                    "alerts: check that it is running; the next run publishes them again"
                )
            if self._postponed and now >= self._publish_again_at:
                messages, self._postponed = self._postponed, []
                for topic, value in messages:
                    self._send(topic, value)

    def _settle(self) -> None:
        """Take over what the callbacks have noted about messages; the caller holds the lock."""
        for mid in self._acknowledged:
            self._pending.pop(mid)
        if self._busy:
            self._postponed += [self._pending.pop(mid) for mid in self._busy]
            self._publish_again_at = time.monotonic() + WAIT_SECONDS
        self._acknowledged.clear()
        self._busy.clear()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(self, _client: Client, _userdata: Any, _flags: Any, reason: Any, properties: Any) -> None:
        """Note the limits of the broker, or that it refuses the connection."""
        if not reason.is_failure:
            with self._changed:
                self._max_pending = min(getattr(properties, "ReceiveMaximum", MAX_PENDING), MAX_PENDING)
                self._max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
                self._changed.notify_all()
        elif reason.value not in TEMPORARY_REASONS:
            self._refuse(make_refusal(self._options, reason))

    def _on_disconnect(self, _client: Client, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        """Log that the connection is lost."""
        if reason.is_failure:
            log.get_logger("mqtt").warning("alert_connection_lost", broker=self._options.address, reason=str(reason))

    def _on_publish(self, _client: Client, _userdata: Any, mid: int, reason: Any, _properties: Any) -> None:
        """Note that a message is acknowledged, or refused."""
        is_busy = reason.is_failure and reason.value in TEMPORARY_REASONS
        if reason.is_failure and not is_busy:
            self._refuse(
                ConfigError(
                    f"the MQTT broker at {self._options.address} refuses an alert ({reason}): check --alerts-to and "
                    "the permissions of this user"
                )
            )
        with self._changed:
            (self._busy if is_busy else self._acknowledged).add(mid)
            self._changed.notify_all()

    def _refuse(self, error: ConfigError) -> None:
        """Let `flush` raise an error."""
        with self._changed:
            self._refusal = self._refusal or error
            self._changed.notify_all()
