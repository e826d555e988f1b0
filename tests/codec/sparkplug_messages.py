"""A Sparkplug B edge node for tests, which numbers its messages as the specification says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deformer_stream.codec.sparkplug import INT32, INT64, load_payload_class

DOUBLE, STRING = 10, 12


class SimulatedNode:
    """An edge node with the group `plant`.

    Attributes:
        name: Its name.
        sequence: Sequence number of its next message.
        birth_sequence: Number of its next birth.
        alias_by_name: Aliases that its next birth declares.
    """

    def __init__(self, name: str = "line-1") -> None:
        self.name, self.sequence, self.birth_sequence = name, 0, 0
        self.alias_by_name: dict[str, int] = {}

    def make_topic(self, kind: str, device: str = "") -> str:
        """Return the topic of a message."""
        return f"spBv1.0/plant/{kind}/{self.name}" + (f"/{device}" if device else "")

    def birth(self, values: Mapping[str, Any], time: int = 1_600_000_000_000, device: str = "") -> tuple[str, bytes]:
        """Return the birth of the node, or of a device; the metrics of the values have aliases from then on."""
        payload = load_payload_class()(timestamp=time)
        if not device:
            self.sequence = 0
            payload.metrics.add(name=b"bdSeq", datatype=INT64, long_value=self.birth_sequence)
            payload.metrics.add(name=b"Node Control/Rebirth", datatype=11, boolean_value=False)
        for name, value in values.items():
            self.alias_by_name.setdefault(name, len(self.alias_by_name) + 1)
            _set_value(payload.metrics.add(name=name.encode(), alias=self.alias_by_name[name]), value, True)
        return self.make_topic("DBIRTH" if device else "NBIRTH", device), self._number(payload)

    def data(self, values: Mapping[str, Any], time: int = 1_600_000_000_000, device: str = "") -> tuple[str, bytes]:
        """Return data whose metrics have aliases only."""
        payload = load_payload_class()(timestamp=time)
        for name, value in values.items():
            _set_value(payload.metrics.add(alias=self.alias_by_name[name]), value, False)
        return self.make_topic("DDATA" if device else "NDATA", device), self._number(payload)

    def death(self, device: str = "") -> tuple[str, bytes]:
        """Return the death of the node, or of a device."""
        payload = load_payload_class()(timestamp=1_600_000_000_000)
        if device:
            return self.make_topic("DDEATH", device), self._number(payload)
        payload.metrics.add(name=b"bdSeq", datatype=INT64, long_value=self.birth_sequence)
        return self.make_topic("NDEATH"), bytes(payload.SerializeToString())

    def _number(self, payload: Any) -> bytes:
        """Return a payload with the next sequence number."""
        payload.seq = self.sequence
        self.sequence = (self.sequence + 1) % 256
        return bytes(payload.SerializeToString())


def _set_value(metric: Any, value: Any, is_birth: bool) -> None:
    """Set the value of a metric, and its type in a birth."""
    if isinstance(value, bool):
        metric.boolean_value, datatype = value, 11
    elif isinstance(value, int):
        metric.int_value, datatype = value % 2**32, INT32
    elif isinstance(value, float):
        metric.double_value, datatype = value, DOUBLE
    elif value is None:
        metric.is_null, datatype = True, DOUBLE
    else:
        metric.string_value, datatype = value.encode(), STRING
    if is_birth:
        metric.datatype = datatype
