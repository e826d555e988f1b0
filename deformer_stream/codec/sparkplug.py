"""Translation of Sparkplug B messages (Eclipse Sparkplug 3.0) to events.

An edge node and its devices publish birth certificates, which name all their metrics, then data, and a death
certificate when they leave. A metric of data may have only an alias, a number that the last birth has declared. The
messages of an edge node have sequence numbers from 0 to 255. If one is missing, aliases may have another meaning. So
metrics that have only an alias are rejected until the node has answered a request for a new birth.

The protobuf library (extra `mqtt`) decodes payloads with descriptors that are made here, without generated code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import orjson

from deformer_stream.codec.bridge_messages import (
    MAX_EVENT_BYTES,
    MAX_READINGS,
    BridgeMessage,
    Translation,
    add_event,
    check_name,
    check_value,
    is_possible_time,
    make_rejecter,
)
from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.engine.events import RejectionReason

NAMESPACE = "spBv1.0"
PREFIX = f"{NAMESPACE}/"
"""Beginning of the topics of Sparkplug B messages."""

REBIRTH_SECONDS = 10.0
"""Shortest time between two requests for a new birth of one edge node."""

USELESS_BIRTH_SECONDS = 600.0
"""Shortest time until the next request if a birth has not helped, because the next one would probably not help either.

Such a birth is too large, or does not declare the alias because of which it was requested.
"""

REBIRTH_METRIC, BIRTH_SEQUENCE_METRIC = "Node Control/Rebirth", "bdSeq"
CONTROL_PREFIXES = ("Node Control/", "Device Control/")
"""Beginnings of the names of metrics that are commands and no readings."""

NUM_SEQUENCES = 256
INT8, INT16, INT32, INT64, BOOLEAN = 1, 2, 3, 4, 11
_BITS_BY_TYPE = {INT8: 8, INT16: 16, INT32: 32, INT64: 64}
"""Number of bits of the signed types, whose values are transmitted as unsigned numbers."""

_VALUE_FIELDS = ("int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value")
"""Fields of a metric's value that a reading can have. The others are bytes, data sets and templates."""

SEQUENCE_SUFFIX = "#seq"
"""End of the key of the state that holds a sequence number. An id of Sparkplug contains no "#"."""

MAX_METRICS_OF_NODE = 20_000
"""Largest number of metrics of an edge node and its devices, a bound for hostile senders."""

MAX_NODES = 10_000
"""Largest number of edge nodes."""

DATA_KINDS = ("NDATA", "DDATA")
IGNORED_KINDS = ("NCMD", "DCMD")
KINDS = ("NBIRTH", "DBIRTH", *DATA_KINDS, "NDEATH", "DDEATH")


@cache
def load_payload_class() -> Any:
    """Return the class of Sparkplug B payloads.

    The fields have the numbers of the specification. Fields that no reading needs are left out; the library skips them.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sparkplug_b.proto", package="sparkplug_b", syntax="proto2")
    payload, metric = file.message_type.add(name="Payload"), file.message_type.add(name="Metric")

    def add(message: Any, number: int, name: str, kind: Any, label: Any = types.LABEL_OPTIONAL, **others: Any) -> None:
        message.field.add(name=name, number=number, type=kind, label=label, **others)

    add(payload, 1, "timestamp", types.TYPE_UINT64)
    add(payload, 2, "metrics", types.TYPE_MESSAGE, types.LABEL_REPEATED, type_name=".sparkplug_b.Metric")
    add(payload, 3, "seq", types.TYPE_UINT64)
    # Names and texts are read as bytes, so that a text that is not UTF-8 rejects one metric and not the message.
    add(metric, 1, "name", types.TYPE_BYTES)
    add(metric, 2, "alias", types.TYPE_UINT64)
    add(metric, 3, "timestamp", types.TYPE_UINT64)
    add(metric, 4, "datatype", types.TYPE_UINT32)
    add(metric, 7, "is_null", types.TYPE_BOOL)
    metric.oneof_decl.add(name="value")
    kinds = (
        *(types.TYPE_UINT32, types.TYPE_UINT64, types.TYPE_FLOAT, types.TYPE_DOUBLE, types.TYPE_BOOL),
        types.TYPE_BYTES,
    )
    for number, (name, kind) in enumerate(zip(_VALUE_FIELDS, kinds, strict=True), start=10):
        add(metric, number, name, kind, oneof_index=0)
    for number, name in ((16, "bytes_value"), (17, "dataset_value"), (18, "template_value"), (19, "extension_value")):
        add(metric, number, name, types.TYPE_BYTES, oneof_index=0)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sparkplug_b.Payload"))


def encode_rebirth_request(time: int) -> bytes:
    """Return the payload that requests a new birth of an edge node.

    Args:
        time: The present time, microseconds since 1970.
    """
    payload = load_payload_class()(timestamp=time // 1000)
    payload.metrics.add(name=REBIRTH_METRIC.encode(), datatype=BOOLEAN, timestamp=time // 1000, boolean_value=True)
    return bytes(payload.SerializeToString())


Declaration = tuple[str, str, int]
"""What a birth declares: the device ("" for the edge node itself), the name and the type of a metric."""


@dataclass(slots=True)
class EdgeNode:
    """What is known about an edge node.

    Attributes:
        sequence: Sequence number of its last message; None if a message is missing, so that aliases are not certain.
        birth_sequence: Number (`bdSeq`) of its last birth, which its death repeats; None if it is unknown.
        is_online: Whether it was born and has not died.
        declaration_by_alias: What an alias stands for.
        type_by_name: Type of each metric by device and name.
        next_request: When a new birth may be requested at the earliest, microseconds since 1970.
        next_alias_request: The same for requests because of an alias that no birth has declared.
        lacks_alias: Whether a birth was requested because of such an alias, and none has arrived since.
    """

    sequence: int | None = None
    birth_sequence: int | None = None
    is_online: bool = False
    declaration_by_alias: dict[int, Declaration] = field(default_factory=dict)
    type_by_name: dict[tuple[str, str], int] = field(default_factory=dict)
    next_request: int = -(2**62)
    next_alias_request: int = -(2**62)
    lacks_alias: bool = False

    def note_birth(self, time: int) -> None:
        """Note that a birth has arrived; the next one because of an alias may only be requested much later."""
        if self.lacks_alias:
            self.lacks_alias = False
            self.next_alias_request = time + round(USELESS_BIRTH_SECONDS * 1e6)

    def drop_device(self, device: str) -> None:
        """Remove what was declared about a device ("" for the edge node itself)."""
        self.declaration_by_alias = {
            alias: entry for alias, entry in self.declaration_by_alias.items() if entry[0] != device
        }
        self.type_by_name = {key: kind for key, kind in self.type_by_name.items() if key[0] != device}


class _Received(NamedTuple):
    """A message of an edge node, and what receives its translation.

    Attributes:
        kind: Its type, such as "NBIRTH".
        node_id: The edge node as `GROUP/NODE`.
        device: The device, "" for the edge node itself.
        payload: The decoded payload.
        message: The message.
        translation: Receives events, requests and states.
        reject: A function that adds a rejection, given its reason and its detail.
    """

    kind: str
    node_id: str
    device: str
    payload: Any
    message: BridgeMessage
    translation: Translation
    reject: Callable[[RejectionReason, str], None]


class SparkplugTranslator:
    """Translates Sparkplug B messages, with what their births have declared.

    The device of an event is `GROUP/NODE/DEVICE`, or `GROUP/NODE` for metrics of the edge node itself. The feature is
    the name of the metric.

    Args:
        max_bytes: Largest payload in bytes.
        max_event_bytes: Largest event in bytes.

    Attributes:
        num_by_kind: Number of messages by type, such as "NBIRTH".
        num_gaps: Number of messages whose sequence number was not the next one.
        num_requests: Number of requests for a new birth.

    Raises:
        ModuleNotFoundError: The protobuf library is not installed.
    """

    def __init__(self, max_bytes: int = 2**20, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._payload_class = load_payload_class()
        self._max_bytes, self._max_event_bytes = max_bytes, max_event_bytes
        self._node_by_id: dict[str, EdgeNode] = {}
        self.num_by_kind: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.num_gaps = self.num_requests = 0

    @property
    def num_online(self) -> int:
        """Number of edge nodes that are online."""
        return sum(node.is_online for node in self._node_by_id.values())

    def translate(self, message: BridgeMessage, translation: Translation) -> None:
        """Add what follows from a message to a translation: events, rejections, requests and states."""
        reject = make_rejecter(message, translation)
        address: tuple[str, str, str] | None = None
        try:
            address = self._read_topic(message.topic)
            if address is None:
                return
            kind, node_id, device = address
            node = self._node_by_id.get(node_id)
            if node is None:
                if len(self._node_by_id) >= MAX_NODES:
                    raise RejectionError(
                        RejectionReason.TOO_LARGE,
                        f"there are more than {MAX_NODES} edge nodes; narrow the topic filter",
                    )
                node = self._node_by_id[node_id] = EdgeNode()
            is_birth = kind.endswith("BIRTH")
            if is_birth:
                node.note_birth(message.time)
            try:
                payload = self._parse(message.payload, MAX_METRICS_OF_NODE if is_birth else MAX_READINGS)
            except RejectionError:
                is_counted = kind not in ("NBIRTH", "NDEATH") and not message.is_repeated
                if is_counted and node.sequence is not None:
                    # The message has a sequence number, too. What it says about its device does not concern the others.
                    node.sequence = (node.sequence + 1) % NUM_SEQUENCES
                    translation.states[node_id + SEQUENCE_SUFFIX] = b"%d" % node.sequence
                raise
            self.num_by_kind[kind] += 1
            self._handle(_Received(kind, node_id, device, payload, message, translation, reject), node)
        except RejectionError as error:
            if address is not None and address[0] == "NBIRTH" and error.reason is RejectionReason.TOO_LARGE:
                born = self._node_by_id.get(address[1])
                if born is not None:
                    born.next_request = message.time + round(USELESS_BIRTH_SECONDS * 1e6)
            reject(error.reason, error.detail)

    def _read_topic(self, topic: str) -> tuple[str, str, str] | None:
        """Return the type, the edge node as `GROUP/NODE` and the device of a topic; None for what is no reading.

        Raises:
            RejectionError: The topic is not one of Sparkplug B.
        """
        parts = topic.split("/")
        if len(parts) >= 2 and parts[1] == "STATE":
            return None
        if len(parts) in (4, 5) and all(parts):
            kind = parts[2]
            if kind in IGNORED_KINDS:
                return None
            if kind in KINDS and (len(parts) == 5) == kind.startswith("D"):
                device = parts[4] if len(parts) == 5 else ""
                check_name("the topic", topic)
                return kind, f"{parts[1]}/{parts[3]}", device
        raise RejectionError(
            RejectionReason.NOT_SPARKPLUG, f"the topic {quote(topic)} is not {NAMESPACE}/GROUP/TYPE/NODE[/DEVICE]"
        )

    def _parse(self, data: bytes, max_metrics: int) -> Any:
        """Return the payload of a message; raise `RejectionError` if it is too large or malformed."""
        from google.protobuf.message import DecodeError

        if len(data) > self._max_bytes:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the payload has {len(data)} bytes; at most {self._max_bytes} are accepted; raise --max-message-bytes",
            )
        try:
            payload = self._payload_class.FromString(data)
        except DecodeError:
            raise RejectionError(RejectionReason.NOT_SPARKPLUG, "the payload is not a Sparkplug B payload") from None
        if len(payload.metrics) > max_metrics:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the payload has {len(payload.metrics)} metrics; at most {max_metrics} are accepted",
            )
        return payload

    def _handle(self, received: _Received, node: EdgeNode) -> None:
        """Handle a message of an edge node, and add what follows from it to the translation."""
        kind, node_id, device, payload, message, translation, _ = received
        if kind == "NDEATH":
            self._handle_death(received, node)
            return
        sequence = payload.seq % NUM_SEQUENCES if payload.HasField("seq") else None
        if kind == "NBIRTH":
            earlier = node
            node = self._node_by_id[node_id] = EdgeNode(sequence or 0, _find_birth_sequence(payload), True)
            node.next_request, node.next_alias_request = earlier.next_request, earlier.next_alias_request
        else:
            is_known_repetition = (
                message.is_repeated
                and sequence is not None
                and node.sequence is not None
                and (node.sequence - sequence) % NUM_SEQUENCES < NUM_SEQUENCES // 2
            )
            # A message that the broker delivers again says nothing about what was lost since.
            if not is_known_repetition:
                self._check_sequence(received, node, sequence)
                if node.sequence is not None:
                    translation.states[node_id + SEQUENCE_SUFFIX] = b"%d" % node.sequence
        if kind == "DDEATH":
            node.drop_device(device)
            translation.states[node_id] = _encode_node(node)
            return
        if kind == "DBIRTH":
            node.drop_device(device)
        if kind.endswith("BIRTH"):
            self._declare(node, device, payload)
            translation.states[node_id] = _encode_node(node)
            if node.sequence is not None:
                translation.states[node_id + SEQUENCE_SUFFIX] = b"%d" % node.sequence
        self._add_readings(received, node)

    def _handle_death(self, received: _Received, node: EdgeNode) -> None:
        """Mark an edge node as dead, unless the death belongs to an earlier birth."""
        node_id, translation = received.node_id, received.translation
        number = _find_birth_sequence(received.payload)
        if node.is_online and None not in (number, node.birth_sequence) and number != node.birth_sequence:
            return  # the broker has published the will of an earlier connection
        dead = self._node_by_id[node_id] = EdgeNode()
        translation.states[node_id] = _encode_node(dead)
        translation.states[node_id + SEQUENCE_SUFFIX] = b""

    def _check_sequence(self, received: _Received, node: EdgeNode, sequence: int | None) -> None:
        """Compare a sequence number with the last one, and request a new birth if messages are missing."""
        node_id, translation = received.node_id, received.translation
        expected = None if node.sequence is None else (node.sequence + 1) % NUM_SEQUENCES
        if expected is not None and sequence == expected:
            node.sequence = sequence
            return
        if expected is not None:
            self.num_gaps += 1
            translation.states[node_id + SEQUENCE_SUFFIX] = b""
        node.sequence = None
        self._request_birth(received, node)

    def _request_birth(self, received: _Received, node: EdgeNode) -> None:
        """Request a new birth of an edge node, unless this was done a short time ago."""
        node_id, message, translation = received.node_id, received.message, received.translation
        if message.time >= node.next_request:
            node.next_request = message.time + round(REBIRTH_SECONDS * 1e6)
            self.num_requests += 1
            group, edge_node = node_id.split("/")
            topic = f"{NAMESPACE}/{group}/NCMD/{edge_node}"
            translation.requests.append((topic, encode_rebirth_request(message.time)))

    def _request_alias(self, received: _Received, node: EdgeNode) -> None:
        """Request a new birth because of an alias that is not known, unless the last such birth did not declare it."""
        if node.sequence is None:  # a message is missing, so that no alias is certain
            self._request_birth(received, node)
        elif received.message.time >= node.next_alias_request:
            node.lacks_alias = True
            self._request_birth(received, node)

    def _declare(self, node: EdgeNode, device: str, payload: Any) -> None:
        """Store the names, types and aliases of a birth."""
        for metric in payload.metrics:
            if len(node.type_by_name) >= MAX_METRICS_OF_NODE:
                raise RejectionError(
                    RejectionReason.TOO_LARGE, f"an edge node has more than {MAX_METRICS_OF_NODE} metrics"
                )
            name = metric.name.decode("utf-8", "replace")
            node.type_by_name[device, name] = metric.datatype
            if metric.HasField("alias"):
                node.declaration_by_alias[metric.alias] = (device, name, metric.datatype)

    def _add_readings(self, received: _Received, node: EdgeNode) -> None:
        """Add the readings of a payload to the translation, one event for each time."""
        _, node_id, device, payload, message, translation, reject = received
        full_device = f"{node_id}/{device}" if device else node_id
        default_time = payload.timestamp * 1000 if payload.HasField("timestamp") else message.time
        events: list[tuple[int, dict[str, Any]]] = []  # the times and the values of events
        index_by_time: dict[int, int] = {}  # of the last event of a time
        for metric in payload.metrics:
            try:
                name, datatype = _identify(node, device, metric)
                if name == BIRTH_SEQUENCE_METRIC or name.startswith(CONTROL_PREFIXES):
                    continue
                field_name = metric.WhichOneof("value")
                if metric.is_null or field_name is None:
                    continue  # no value is known, which says nothing about later values of the same record
                value = check_value(name, _read_value(name, metric, field_name, datatype))
                time = metric.timestamp * 1000 if metric.HasField("timestamp") else default_time
                if not is_possible_time(time):
                    raise RejectionError(
                        RejectionReason.WRONG_TYPE,
                        f"the time of {quote(name)} is after the year 9999; send milliseconds since 1970",
                    )
                if time not in index_by_time or name in events[index_by_time[time]][1]:
                    # Two values of a metric at one time are two events.
                    index_by_time[time] = len(events)
                    events.append((time, {}))
                events[index_by_time[time]][1][name] = value
            except RejectionError as error:
                if error.reason is RejectionReason.UNKNOWN_ALIAS:
                    self._request_alias(received, node)
                reject(error.reason, error.detail)
        for time, values in events:
            add_event(translation, full_device, values, time, reject, self._max_event_bytes)

    def restore(self, key: str, value: bytes) -> None:
        """Restore what an earlier run has stored in `Translation.states`. A value that cannot be read is ignored.

        Args:
            key: The key.
            value: The last value of the key.
        """
        node_id = key.removesuffix(SEQUENCE_SUFFIX)
        if node_id.count("/") != 1:
            return
        if key.endswith(SEQUENCE_SUFFIX):
            if value.isdigit() and len(value) <= 3:
                self._node_by_id.setdefault(node_id, EdgeNode()).sequence = int(value) % NUM_SEQUENCES
            else:
                self._node_by_id.setdefault(node_id, EdgeNode()).sequence = None
            return
        restored = _decode_node(value)
        if restored is not None:
            known = self._node_by_id.get(node_id)
            restored.sequence = None if known is None else known.sequence
            self._node_by_id[node_id] = restored


def _identify(node: EdgeNode, device: str, metric: Any) -> tuple[str, int]:
    """Return the name and the type of a metric.

    Raises:
        RejectionError: It has neither a valid name nor an alias that is certain.
    """
    if metric.name:
        try:
            name = check_name("the name of a metric", metric.name.decode())
        except UnicodeDecodeError:
            raise RejectionError(RejectionReason.WRONG_TYPE, "the name of a metric is not UTF-8") from None
        datatype = metric.datatype or (node.type_by_name.get((device, name), 0) if node.sequence is not None else 0)
        if not datatype and metric.WhichOneof("value") in ("int_value", "long_value"):
            # Without the type, a negative number cannot be distinguished from a large one.
            raise RejectionError(
                RejectionReason.UNKNOWN_ALIAS, f"the type of {quote(name)} is not known before a birth of its edge node"
            )
        return name, datatype
    if not metric.HasField("alias"):
        raise RejectionError(RejectionReason.MISSING_FIELD, "a metric has neither a name nor an alias")
    declared = node.declaration_by_alias.get(metric.alias) if node.sequence is not None else None
    if declared is None or declared[0] != device:
        raise RejectionError(
            RejectionReason.UNKNOWN_ALIAS,
            f"the alias {metric.alias} was not declared by a birth since which no message is missing",
        )
    return check_name("the name of a metric", declared[1]), metric.datatype or declared[2]


def _read_value(name: str, metric: Any, field_name: str, datatype: int) -> Any:
    """Return the value of a metric as a number, a boolean or text.

    Raises:
        RejectionError: It is of a type that no reading has, or is not UTF-8.
    """
    if field_name not in _VALUE_FIELDS:
        raise RejectionError(
            RejectionReason.WRONG_TYPE, f"the metric {quote(name)} is no number, boolean or text ({field_name})"
        )
    value = getattr(metric, field_name)
    if field_name == "string_value":
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RejectionError(RejectionReason.WRONG_TYPE, f"the text of {quote(name)} is not UTF-8") from None
    bits = _BITS_BY_TYPE.get(datatype)
    if bits is not None and field_name in ("int_value", "long_value"):
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> (bits - 1) else value
    if datatype == BOOLEAN and field_name in ("int_value", "long_value"):
        return bool(value)
    return value


def _find_birth_sequence(payload: Any) -> int | None:
    """Return the value of the metric `bdSeq`, None if there is none."""
    for metric in payload.metrics:
        if metric.name == BIRTH_SEQUENCE_METRIC.encode() and metric.WhichOneof("value") in ("int_value", "long_value"):
            return int(getattr(metric, metric.WhichOneof("value")))
    return None


def _encode_node(node: EdgeNode) -> bytes:
    """Return what is known about an edge node, without its sequence number, as JSON."""
    return orjson.dumps(
        {
            "v": 1,
            "online": node.is_online,
            "bdSeq": node.birth_sequence,
            "aliases": [[alias, *declared] for alias, declared in node.declaration_by_alias.items()],
            "types": [[*key, datatype] for key, datatype in node.type_by_name.items()],
        }
    )


def _decode_node(value: bytes) -> EdgeNode | None:
    """Return what `_encode_node` has written, without its sequence number; None if it cannot be read."""
    try:
        document = orjson.loads(value)
        if document["v"] != 1:
            return None
        return EdgeNode(
            birth_sequence=None if document["bdSeq"] is None else int(document["bdSeq"]),
            is_online=bool(document["online"]),
            declaration_by_alias={
                int(alias): (str(device), str(name), int(kind)) for alias, device, name, kind in document["aliases"]
            },
            type_by_name={(str(device), str(name)): int(kind) for device, name, kind in document["types"]},
        )
    except (ValueError, TypeError, KeyError):
        return None
