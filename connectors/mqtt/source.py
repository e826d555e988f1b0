"""A source of MQTT messages with a session that outlives the process, for `BridgePipeline`.

The client is driven in one thread without a thread of its own: `poll` reads from the socket, `acknowledge` writes to
it. So a message is never acknowledged over another connection than that over which it arrived. Packet identifiers are
valid for one connection only, and such an acknowledgement could confirm another message, which would then be lost.
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from connectors.mqtt.client import (
    CONNECT_SECONDS,
    RECEIVE_MAXIMUM,
    TEMPORARY_REASONS,
    MqttOptions,
    connect,
    create_client,
    make_refusal,
)
from deformer_stream import log
from deformer_stream.codec.bridge_messages import BridgeMessage
from deformer_stream.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from paho.mqtt.client import Client

RETRY_SECONDS = 1.0
"""Time in seconds between two attempts to connect."""

CLOSE_SECONDS = 2.0
"""Longest time in seconds to send the acknowledgements that are left when the source is closed."""

MAX_PENDING_BYTES = 64 * 2**20
"""Beyond this size of the messages without acknowledgement in memory, nothing is read until some are acknowledged.

Then responses to keepalive messages are not read either. So if this takes more than a minute, paho-mqtt closes the
connection. The broker then delivers the messages again over the next one.
"""

MESSAGE_BYTES = 300
"""Memory in bytes of the Python objects of a message, besides the characters of its topic and its payload.

Most messages of sensors have a payload of a few bytes. If only payloads counted, such messages could take gigabytes.
"""

SESSION_TAKEN_OVER = 142
"""Reason code with which a broker disconnects a client if another one with the same id has connected."""


class MqttSource:
    """A source of MQTT messages.

    The constructor connects and subscribes. Messages with QoS 1 or 2 arrive with QoS 1: the broker keeps each of them
    until it is acknowledged, also while this process does not run.

    Args:
        options: The broker, and how messages are received.

    Raises:
        Unavailable: The broker does not respond.
        ConfigError: paho-mqtt is not installed, or the broker refuses the connection or the subscription.
    """

    def __init__(self, options: MqttOptions) -> None:
        self._options = options
        self._messages: list[BridgeMessage] = []  # received by the running call of `poll`
        self._pending_bytes = 0  # of the messages without acknowledgement
        self._refusal: ConfigError | None = None  # set by a callback
        self._lost_reason = ""
        self._is_subscribed = False
        self._num_connections = 0
        self._connection_index = 0  # of the present attempt to connect, whether or not the broker has accepted it
        self._away_since: float | None = None
        self._retry_at = 0.0
        self._client = create_client(options, options.client_id, manual_ack=True)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        try:
            self._connect()
            deadline = time.monotonic() + CONNECT_SECONDS
            # A session that is resumed may deliver many messages before the confirmation of the subscription.
            while not (self._is_subscribed or self._messages):
                if time.monotonic() > deadline or self._client.socket() is None:
                    raise self._make_unavailable()
                self._turn(0.1)
        except BaseException:
            self.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether the broker has confirmed the subscription of this connection."""
        return self._is_subscribed

    @property
    def num_connections(self) -> int:
        """How often the broker has accepted a connection."""
        return self._num_connections

    def poll(self, timeout: float) -> Sequence[BridgeMessage]:
        """Return messages that have arrived, after at most about `timeout` seconds; reconnect if necessary.

        Raises:
            Unavailable: The broker could not be reached for too long.
            ConfigError: The broker refuses the connection or the subscription.
        """
        if self._client.socket() is None:
            self._reconnect(timeout)
        else:
            self._turn(timeout)
        messages, self._messages = self._messages, []
        # Messages arrive before the confirmation of the subscription if the session is resumed. While too much is not
        # acknowledged, nothing is read but the answer to a connection, and so no such confirmation.
        is_silent = not messages and not self._is_full
        if is_silent and self._away_since and time.monotonic() - self._away_since > self._options.patience:
            raise self._make_unavailable()
        return messages

    def _make_unavailable(self) -> Unavailable:
        """Return the error for a broker that does not confirm the connection or the subscription."""
        reason = self._lost_reason or "it has not confirmed the subscription in time"
        return Unavailable(
            f"the MQTT broker at {self._options.address} does not accept the connection ({reason}): check --source and "
            "that the broker is running"
        )

    def acknowledge(self, messages: Sequence[BridgeMessage]) -> None:
        """Acknowledge messages. Those of an earlier connection are left out, because the broker sends them again."""
        for message in messages:
            connection_index, mid, qos = message.ticket
            self._pending_bytes -= _count_bytes(message)
            if qos and connection_index == self._connection_index and self._client.socket() is not None:
                self._client.ack(mid, qos)

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a message with QoS 0. It is lost if there is no connection."""
        if self._is_subscribed:
            self._client.publish(topic, payload, qos=0)

    def close(self) -> None:
        """Send the acknowledgements that are left, and close the connection; the broker keeps the session."""
        deadline = time.monotonic() + CLOSE_SECONDS
        client = self._client
        while (connection := client.socket()) is not None and client.want_write() and time.monotonic() < deadline:
            select.select([], [connection], [], 0.1)
            client.loop_write()
        client.disconnect()
        self._is_subscribed = False

    def _connect(self) -> None:
        """Open a connection; its confirmation comes later, in `_on_connect`.

        Raises:
            Unavailable: The broker cannot be reached.
            ConfigError: Its certificate is not accepted.
        """
        self._lost_reason = ""
        self._connection_index += 1
        connect(self._client, self._options, self._options.session_seconds)

    def _reconnect(self, timeout: float) -> None:
        """Wait for the next attempt to connect, and make it.

        Raises:
            Unavailable: The broker could not be reached for `patience` seconds.
        """
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.get_logger("mqtt").warning("connection_lost", broker=self._options.address, reason=self._lost_reason)
        if now < self._retry_at:
            time.sleep(min(timeout, self._retry_at - now))
            return
        self._retry_at = now + RETRY_SECONDS
        try:
            self._connect()
        except Unavailable:
            if now - self._away_since > self._options.patience:
                raise

    def _turn(self, timeout: float) -> None:
        """Read and write what is possible, after a wait of at most `timeout` seconds for the first packet.

        Raises:
            ConfigError: The broker refuses the connection or the subscription.
        """
        client = self._client
        connection: Any = client.socket()
        is_full = self._is_full
        has_decrypted = isinstance(connection, ssl.SSLSocket) and connection.pending() > 0
        readable, writable, _ = select.select(
            [] if is_full else [connection],
            [connection] if client.want_write() else [],
            [],
            0.0 if has_decrypted and not is_full else timeout,
        )
        if writable:
            client.loop_write()
        if readable or (has_decrypted and not is_full):
            num_before = -1
            while num_before < len(self._messages) < RECEIVE_MAXIMUM and not self._is_full:
                num_before = len(self._messages)
                if client.loop_read() != 0:
                    break
        client.loop_misc()
        if self._refusal is not None:
            raise self._refusal

    @property
    def _is_full(self) -> bool:
        """Whether nothing may be read. The broker's answer to a connection is read in any case."""
        return self._pending_bytes > MAX_PENDING_BYTES and self._client.is_connected()

    def _on_connect(self, client: Client, _userdata: Any, flags: Any, reason: Any, _properties: Any) -> None:
        """Subscribe after the broker has accepted the connection."""
        from paho.mqtt.subscribeoptions import SubscribeOptions

        if reason.is_failure:
            self._lost_reason = str(reason)
            if reason.value not in TEMPORARY_REASONS:
                self._refusal = make_refusal(self._options, reason)
            return
        self._num_connections += 1
        log.get_logger("mqtt").info(
            "connected", broker=self._options.address, filter=self._options.filter, resumed=bool(flags.session_present)
        )
        # Retained messages are old values, which would look like readings of the present.
        choice = SubscribeOptions(qos=1, retainAsPublished=True, retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND)
        client.subscribe(self._options.filter, options=choice)

    def _on_subscribe(self, _client: Client, _userdata: Any, _mid: int, reasons: Any, _properties: Any) -> None:
        """Note that the subscription is confirmed, or refused."""
        failures = [reason for reason in reasons if reason.is_failure]
        if failures:
            self._refusal = ConfigError(
                f"the MQTT broker at {self._options.address} refuses the subscription to {self._options.filter!r} "
                f"({failures[0]}): check the filter in --source and the permissions of this user"
            )
            return
        if self._away_since is not None:
            log.get_logger("mqtt").info("reconnected", broker=self._options.address)
        self._away_since, self._is_subscribed = None, True

    def _on_disconnect(self, _client: Client, _userdata: Any, flags: Any, reason: Any, _properties: Any) -> None:
        """Note that the connection is lost, and why."""
        self._is_subscribed = False
        self._lost_reason = self._lost_reason or str(reason)
        if flags.is_disconnect_packet_from_server and reason.value == SESSION_TAKEN_OVER:
            self._refusal = ConfigError(
                f"another client has connected to {self._options.address} with the id {self._options.client_id!r}: "
                "give each bridge its own --client-id"
            )

    def _on_message(self, _client: Client, _userdata: Any, message: Any) -> None:
        """Add a message to those that the running call of `poll` returns."""
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = "�"
        payload, ticket = bytes(message.payload), (self._connection_index, message.mid, message.qos)
        received = BridgeMessage(topic, payload, time.time_ns() // 1000, bool(message.dup), ticket)
        self._pending_bytes += _count_bytes(received)
        self._messages.append(received)


def _count_bytes(message: BridgeMessage) -> int:
    """Return about how much memory a message takes, in bytes."""
    return MESSAGE_BYTES + len(message.topic) + len(message.payload)
