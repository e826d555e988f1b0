"""Encoding of incidents as JSON: the messages of `TOPIC-incidents` and the lines of `replay --incidents`.

The times of an incident are RFC 3339 text. The times of its series are integers, microseconds since 1970, because an
incident has hundreds of them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import orjson

from deformer_stream.codec.json_types import MessageId, Micros
from deformer_stream.codec.timestamps import format_rfc3339, parse_rfc3339
from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.engine.events import ONLY_MODEL, SuggestedReading
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import (
    NO_READINGS,
    Incident,
    IncidentKind,
    IncidentRule,
    IncidentState,
    IncidentSuspect,
    OpenRecordReading,
    SuspectReadings,
    Timeline,
)

MAX_INCIDENT_BYTES = 2**17
"""Maximum size of an incident in bytes. A larger incident loses points of its series, then entries of its lists."""

MAX_MESSAGE_BYTES = 2**20
"""Maximum size of a message that is decoded. It exceeds what this program writes, for messages of later releases."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def encode_incident(incident: Incident) -> bytes:
    """Return an incident as a JSON object, with its keys in the order of the public format.

    If the object would exceed `MAX_INCIDENT_BYTES`, every second point of its series is left out, then the second half
    of each of its lists, until it fits.
    """
    document = _to_document(incident)
    encoded = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    while len(encoded) > MAX_INCIDENT_BYTES and _shrink(document):
        encoded = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return encoded


def decode_incident(payload: bytes) -> Incident:
    """Return the incident of a JSON object. Keys that are unknown are ignored.

    Raises:
        InputError: The payload is not an incident.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InputError(
            f"the message has {len(payload)} bytes, an incident has at most {MAX_MESSAGE_BYTES}: check that the topic "
            "or file holds incidents"
        )
    try:
        return _from_message(_DECODER.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RejectionError, ValueError) as error:
        raise InputError(
            f"the message is not an incident ({quote(str(error), 200)}): check that the topic or file holds incidents"
        ) from None


def _to_document(incident: Incident) -> dict[str, Any]:
    """Return an incident as the JSON object of the public format."""
    silenced_by = incident.silenced_by
    return {
        "id": incident.id,
        "device": incident.device,
        "state": incident.state,
        "opened": format_rfc3339(incident.opened),
        "last": format_rfc3339(incident.last),
        "resolved": None if incident.resolved is None else format_rfc3339(incident.resolved),
        "records": incident.num_records,
        "alerted": incident.num_alerted,
        "share": round(incident.num_alerted / incident.num_records, 4) if incident.num_records else 0.0,
        "evidence": incident.evidence,
        "threshold": incident.threshold,
        "rule": incident.rule,
        "budget": incident.budget,
        "severity": incident.severity,
        "suspects": [_suspect_to_json(suspect) for suspect in incident.suspects],
        "model": incident.model,
        **({} if incident.model_name == ONLY_MODEL else {"model_name": incident.model_name}),
        "fault": [{"name": name, "probability": probability} for name, probability in incident.fault],
        "kind": incident.kind,
        "group": incident.group,
        "parent": incident.parent,
        **({} if incident.former_parent is None else {"former_parent": incident.former_parent}),
        "members": list(incident.members),
        **({"devices": list(incident.devices)} if incident.devices else {}),
        "revision": incident.revision,
        "reopened": incident.num_reopened,
        "resolution": incident.resolution,
        "first_record": incident.first_record,
        "record_ids": list(incident.record_ids),
        "alert_ids": list(incident.alert_ids),
        "silenced_by": None if silenced_by is None else {"features": list(silenced_by[0]), "share": silenced_by[1]},
        **({} if incident.next_reading is None else {"next_reading": _reading_to_json(incident.next_reading)}),
        "timeline": {
            "time": list(incident.timeline.times),
            "evidence": list(incident.timeline.evidence),
            "p_value": list(incident.timeline.p_values),
        },
        "readings": {
            feature: {
                "time": list(readings.times),
                "value": list(readings.values),
                "low": list(readings.lows),
                "high": list(readings.highs),
            }
            for feature, readings in incident.readings.items()
        },
    }


def _suspect_to_json(suspect: IncidentSuspect) -> dict[str, Any]:
    """Return a suspect of an incident as a JSON object of the public format."""
    unit = {} if suspect.unit is None else {"unit": suspect.unit}  # left out if it is not known
    return {
        "feature": suspect.feature,
        **unit,
        "share": suspect.share,
        "expected": {"low": suspect.low, "high": suspect.high},
        "came": {"low": suspect.came_low, "high": suspect.came_high},
    }


def _reading_to_json(reading: OpenRecordReading) -> dict[str, Any]:
    """Return the reading to take next as a JSON object of the public format."""
    suggestion = reading.suggestion
    return {
        "feature": suggestion.feature,
        "record": reading.record,
        "time": format_rfc3339(reading.time),
        "alpha": suggestion.alpha,
        "alert_probability": suggestion.alert_probability,
        "score_rise": suggestion.score_rise,
    }


def _shrink(document: dict[str, Any]) -> bool:
    """Make the JSON object of an incident smaller, and return whether that was possible.

    First all series are thinned together. Then the other parts are shortened one after the other, those that people
    need least first; each is empty before the next one is shortened.
    """
    series = [document["timeline"], *document["readings"].values()]
    if any(len(columns["time"]) > 1 for columns in series):
        for columns in series:
            for name, points in columns.items():
                columns[name] = points[::2]
        return True
    if document["readings"]:
        document["readings"] = {}
        return True
    for name in ("alert_ids", "record_ids", "devices", "members", "fault", "suspects"):
        if document.get(name):
            document[name] = document[name][: len(document[name]) // 2]
            return True
    for name in ("silenced_by", "next_reading"):
        if document.get(name) is not None:
            document[name] = None
            return True
    return False


class _RangeJson(msgspec.Struct, frozen=True):
    """The ends of a range of values."""

    low: float | None = None
    high: float | None = None


class _SuspectJson(msgspec.Struct, frozen=True):
    """A suspect of an incident."""

    feature: str
    share: float
    expected: _RangeJson = _RangeJson()
    came: _RangeJson = _RangeJson()
    unit: str | None = None


class _FaultJson(msgspec.Struct, frozen=True):
    """A known fault."""

    name: str
    probability: float


class _SilencedJson(msgspec.Struct, frozen=True):
    """The features whose expected values would prevent alerts, and the share of the alerts for which this holds."""

    features: tuple[str, ...]
    share: float


class _NextReadingJson(msgspec.Struct, frozen=True):
    """The reading to take next of an open record."""

    feature: str
    record: str
    time: str
    alpha: float | None = None
    alert_probability: float | None = None
    score_rise: float = 0.0


class _TimelineJson(msgspec.Struct, frozen=True):
    """The evidence of an incident over time."""

    time: tuple[Micros, ...] = ()
    evidence: tuple[float, ...] = ()
    p_value: tuple[float, ...] = ()


class _ReadingsJson(msgspec.Struct, frozen=True):
    """The readings of one suspect."""

    time: tuple[Micros, ...] = ()
    value: tuple[float | None, ...] = ()
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


class _IncidentJson(msgspec.Struct, frozen=True):
    """An incident as JSON. The keys without a default are those of the first version of the format."""

    id: MessageId
    device: str
    state: IncidentState
    opened: str
    last: str
    records: _Count
    alerted: _Count
    evidence: float
    rule: IncidentRule
    budget: str
    severity: _Count
    suspects: tuple[_SuspectJson, ...]
    model: str
    resolved: str | None = None
    fault: tuple[_FaultJson, ...] = ()
    threshold: float = 0.0
    kind: IncidentKind = "device"
    group: str = ""
    parent: MessageId | None = None
    former_parent: MessageId | None = None
    members: tuple[MessageId, ...] = ()
    devices: tuple[str, ...] = ()
    revision: _Count = 0
    reopened: _Count = 0
    resolution: str | None = None
    first_record: str = ""
    record_ids: tuple[str, ...] = ()
    alert_ids: tuple[str, ...] = ()
    silenced_by: _SilencedJson | None = None
    next_reading: _NextReadingJson | None = None
    timeline: _TimelineJson = _TimelineJson()
    readings: dict[str, _ReadingsJson] = {}
    model_name: str | None = None


_DECODER = msgspec.json.Decoder(_IncidentJson)


def _from_message(message: _IncidentJson) -> Incident:
    """Return the incident of a parsed message.

    Raises:
        RejectionError: A time is not RFC 3339.
        ValueError: The columns of a series have different lengths.
    """
    timeline = Timeline(message.timeline.time, message.timeline.evidence, message.timeline.p_value)
    _check_lengths("timeline", timeline.times, timeline.evidence, timeline.p_values)
    readings = {
        feature: SuspectReadings(columns.time, columns.value, columns.low, columns.high)
        for feature, columns in message.readings.items()
    }
    for feature, columns in readings.items():
        _check_lengths(f"readings of {feature}", columns.times, columns.values, columns.lows, columns.highs)
    return Incident(
        id=message.id,
        device=message.device,
        state=message.state,
        opened=parse_rfc3339(message.opened),
        last=parse_rfc3339(message.last),
        resolved=None if message.resolved is None else parse_rfc3339(message.resolved),
        num_records=message.records,
        num_alerted=message.alerted,
        evidence=message.evidence,
        rule=message.rule,
        budget=message.budget,
        severity=message.severity,
        suspects=tuple(
            IncidentSuspect(
                feature=suspect.feature,
                share=suspect.share,
                low=suspect.expected.low,
                high=suspect.expected.high,
                came_low=suspect.came.low,
                came_high=suspect.came.high,
                unit=suspect.unit,
            )
            for suspect in message.suspects
        ),
        model=message.model,
        first_record=message.first_record,
        kind=message.kind,
        group=message.group,
        members=message.members,
        devices=message.devices,
        parent=message.parent,
        former_parent=message.former_parent,
        revision=message.revision,
        num_reopened=message.reopened,
        resolution=message.resolution,
        threshold=message.threshold,
        record_ids=message.record_ids,
        alert_ids=message.alert_ids,
        silenced_by=None if message.silenced_by is None else (message.silenced_by.features, message.silenced_by.share),
        timeline=timeline,
        readings=MappingProxyType(readings) if readings else NO_READINGS,
        next_reading=None if message.next_reading is None else _read_next_reading(message.next_reading),
        fault=tuple((fault.name, fault.probability) for fault in message.fault),
        model_name=message.model_name or ONLY_MODEL,
    )


def _read_next_reading(message: _NextReadingJson) -> OpenRecordReading:
    """Return the reading to take next of a parsed message.

    Raises:
        RejectionError: The time is not RFC 3339.
    """
    suggestion = SuggestedReading(message.feature, message.alpha, message.alert_probability, message.score_rise)
    return OpenRecordReading(suggestion, message.record, parse_rfc3339(message.time))


def _check_lengths(name: str, *columns: tuple[object, ...]) -> None:
    """Raise `ValueError` if the columns of a series have different lengths."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"the columns of {name} have different lengths")
