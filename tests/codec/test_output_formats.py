"""Tests of outgoing messages as Avro: they say what the JSON says, foreign readers read them, and damage is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, get_args

import fastavro
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.calibration.drift_state import DriftNotice, FeatureShift
from deformer_stream.calibration.fault_classifier import FaultCandidate, FaultName
from deformer_stream.codec import encode_alert, encode_drift, encode_storm
from deformer_stream.codec.cloud_events import EventKind
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.encode_next_readings import decode_suspicious_record, encode_suspicious_record
from deformer_stream.codec.output_formats import JSON_FORMAT, AvroFormat, OutputReader, OutputSchema, load_schema
from deformer_stream.codec.schema_formats import HEADER_BYTES, RegisteredSchema, frame
from deformer_stream.codec.timestamps import MAX_MICROS, MIN_MICROS
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import (
    NO_TIME,
    Alert,
    AlertCause,
    Contribution,
    ExpectedRange,
    RejectionReason,
    StormNotice,
    SuggestedReading,
)
from deformer_stream.errors import ConfigError, InputError, Unavailable
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Incident
from tests.codec.evidence_examples import alerts as evidence_alerts
from tests.codec.evidence_examples import assert_equal, make_batch
from tests.codec.incident_examples import INCIDENTS
from tests.codec.next_reading_examples import RECORD
from tests.contracts.effects import make_alert, make_drift_notice, make_effects
from tests.incidents.examples import make_incidents
from tests.schema_registry import fetch_from

SCHEMA_NAMES: tuple[OutputSchema, ...] = get_args(OutputSchema)
SCHEMAS = [RegisteredSchema("AVRO", load_schema(name), {}) for name in SCHEMA_NAMES]
FORMATS = {name: AvroFormat(load_schema(name), i + 1) for i, name in enumerate(SCHEMA_NAMES)}
READER = OutputReader(fetch_from(*SCHEMAS))
SCHEMA_BY_KIND: dict[EventKind, OutputSchema] = {
    **dict.fromkeys(("alert", "drift", "storm"), "alerts"),
    "evidence": "evidence",
    "incident": "incidents",
    "next-reading": "next-readings",
}

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
TIMES = st.integers(MIN_MICROS, MAX_MICROS)
COUNTS = st.integers(0, 2**40)
NUMBERS = st.floats()  # with NaN and infinity, which JSON and Avro both write as null
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.none() | NUMBERS | TEXTS
SUGGESTIONS = st.builds(SuggestedReading, TEXTS, st.none() | FINITE, st.none() | FINITE, NUMBERS)
CANDIDATES = st.builds(FaultCandidate, TEXTS, FINITE, st.booleans())
ALERTS = st.builds(
    Alert,
    id=TEXTS,
    record=TEXTS,
    raised_at=COUNTS,
    features_seen=COUNTS,
    features_expected=COUNTS,
    time=TIMES | st.just(NO_TIME),
    p_value=FINITE,
    alpha=FINITE,
    score=NUMBERS,
    running_log_likelihood=NUMBERS,
    model=TEXTS,
    message_index=st.integers(-1, 3),
    contributions=st.lists(
        st.builds(
            Contribution,
            feature=TEXTS,
            value=VALUES,
            surprise=NUMBERS,
            expected=st.builds(ExpectedRange, VALUES, VALUES, VALUES),
            attribution=st.none() | NUMBERS,
            leave_one_out=st.none() | NUMBERS,
            relief=st.none() | NUMBERS,
            suspect=st.booleans(),
            unit=st.none() | TEXTS,
            time=st.none() | TIMES,
            sensor=st.none() | TEXTS,
        ),
        max_size=3,
    ).map(tuple),
    partition=st.integers(0, 2**31 - 1),
    is_record_closed=st.booleans(),
    severity=COUNTS,
    silenced_by=st.none() | st.lists(TEXTS, max_size=2).map(tuple),
    evidence=st.none() | st.builds(AlertCause, TEXTS, st.none() | TEXTS),
    next_reading=st.none() | SUGGESTIONS,
    fault=st.none() | st.builds(FaultName, TEXTS, FINITE, st.lists(CANDIDATES, max_size=2).map(tuple)),
)
NOTICES = st.builds(
    DriftNotice,
    TEXTS,
    TEXTS,
    st.integers(0, 2**31 - 1),
    TEXTS,
    NUMBERS,
    NUMBERS,
    COUNTS,
    TIMES,
    st.lists(st.builds(FeatureShift, TEXTS, NUMBERS, NUMBERS), max_size=2).map(tuple),
)
DATA = make_effects(1)[1]


def drop_nulls(value: Any) -> Any:
    """Return a document without the keys that are null, and without an empty list of devices.

    JSON leaves some of them out, and Avro has them.
    """
    if isinstance(value, dict):
        return {
            key: drop_nulls(part)
            for key, part in value.items()
            if part is not None and not (key == "devices" and not part)
        }
    return [drop_nulls(part) for part in value] if isinstance(value, list) else value


def assert_same(kind: EventKind, encoded: bytes) -> None:
    """Check that a message says the same as Avro, to the last bit of each number."""
    avro = FORMATS[SCHEMA_BY_KIND[kind]].convert(kind, encoded)
    read_back, original = (orjson.loads(text) for text in (READER(avro), encoded))
    options = orjson.OPT_SORT_KEYS
    assert orjson.dumps(drop_nulls(read_back), option=options) == orjson.dumps(drop_nulls(original), option=options)


@pytest.mark.parametrize(
    ("row_type", "strategy"), [(Alert, ALERTS), (AlertRow, evidence_alerts), (Incident, INCIDENTS)]
)
def test_strategies_cover_all_fields(row_type: type, strategy: Any) -> None:
    """A field that is added without a test of its Avro is noticed."""
    assert {field.name for field in fields(row_type)} == set(strategy.wrapped_strategy.kwargs)


@given(ALERTS)
def test_alerts_say_the_same_in_both_formats(alert: Alert) -> None:
    assert_same("alert", encode_alert(alert, DATA))


@given(NOTICES)
def test_drift_notices_say_the_same_in_both_formats(notice: DriftNotice) -> None:
    assert_same("drift", encode_drift(notice))


def test_examples_say_the_same_in_both_formats() -> None:
    assert_same("drift", encode_drift(make_drift_notice()))
    storm = StormNotice(
        id="id",
        partition=0,
        time=1_583_750_073_000_001,
        model="model",
        num_by_partition={0: 2650, 3: 2662},
        records=("r1", "time"),
        max_rate=1000.0,
    )
    assert_same("storm", encode_storm(storm))
    assert_same("next-reading", encode_suspicious_record(RECORD))


@given(INCIDENTS)
def test_incidents_are_read_back(incident: Incident) -> None:
    encoded = encode_incident(incident)
    assert_same("incident", encoded)
    assert decode_incident(READER(FORMATS["incidents"].convert("incident", encoded))) == incident


def test_example_incidents_are_read_back_and_smaller() -> None:
    for incident in make_incidents(100):
        encoded = encode_incident(incident)
        avro = FORMATS["incidents"].convert("incident", encoded)
        assert decode_incident(READER(avro)) == incident
        assert len(avro) < len(encoded)


@given(st.lists(evidence_alerts, max_size=3), st.lists(FINITE, max_size=4), st.booleans())
def test_evidence_is_read_back(alert_rows: list[Any], numbers: list[float], has_record_columns: bool) -> None:
    n = len(numbers)
    record_columns = (np.full(n, 0.25), np.array(numbers)) if has_record_columns else (None, None)
    if has_record_columns and n:
        record_columns[0][0] = record_columns[1][0] = np.nan  # type: ignore[index]
    closed = ClosedRows(
        [f"r{i}@ü" for i in range(n)],
        np.arange(n) * 1_000_003 - 1,
        np.full(n, 0.000531),
        np.array(numbers, np.float64),
        np.full(n, 2**31 - 1, np.int32),
        np.arange(n) % 2 == 1,
        *record_columns,
    )
    batch = EvidenceBatch("model", 3, closed, tuple(alert_rows))
    encoded = encode_evidence(batch)
    assert_same("evidence", encoded)
    found = decode_evidence(READER(FORMATS["evidence"].convert("evidence", encoded)))
    assert_equal(found, batch)
    if has_record_columns:
        np.testing.assert_array_equal(found.closed.record_p_values, record_columns[0])
        np.testing.assert_array_equal(found.closed.record_scores, record_columns[1])


def test_suspicious_records_are_read_back() -> None:
    for record in (RECORD, replace(RECORD, time=NO_TIME, expires=None), replace(RECORD, time=MIN_MICROS)):
        avro = FORMATS["next-readings"].convert("next-reading", encode_suspicious_record(record))
        assert decode_suspicious_record(READER(avro)) == record


def test_foreign_reader_needs_only_the_registered_schema() -> None:
    """fastavro reads the message with the text of the schema; a time is a timestamp, and the union names its record."""
    alert = replace(
        make_alert("pump-7", 2, 1_583_750_073_000_001),
        evidence=AlertCause("step", "flow"),
        fault=FaultName("leak", 0.9, (FaultCandidate("leak", 0.75, True),)),
        next_reading=SuggestedReading("flow", 0.001, 0.5, 1.25),
    )
    avro = FORMATS["alerts"].convert("alert", encode_alert(alert, DATA))
    assert avro[:HEADER_BYTES] == frame(SCHEMA_NAMES.index("alerts") + 1, b"")
    schema = fastavro.parse_schema(json.loads(load_schema("alerts")))
    name, found = fastavro.schemaless_reader(BytesIO(avro[HEADER_BYTES:]), schema, None, return_record_name=True)
    assert name == "io.deformer.Alert"
    assert found["time"] == datetime(2020, 3, 9, 10, 34, 33, 1, tzinfo=UTC)
    assert (found["p_value"], found["score"], found["running_log_likelihood"]) == (0.0008, 9.31, -21.7)
    assert found["contributions"][1]["value"] == "broken"
    notice = FORMATS["alerts"].convert("drift", encode_drift(make_drift_notice()))
    name, found = fastavro.schemaless_reader(BytesIO(notice[HEADER_BYTES:]), schema, None, return_record_name=True)
    assert (name, found["kind"]) == ("io.deformer.DriftNotice", "drift")


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_optional_fields_have_defaults(name: OutputSchema) -> None:
    """Then a later release can leave them out, and an earlier reader still resolves the message."""

    def check(schema: Any) -> None:
        if isinstance(schema, list):
            for part in schema:
                check(part)
        elif isinstance(schema, dict):
            for field in schema.get("fields", ()):
                if isinstance(field["type"], list):
                    assert field["type"][0] == "null", field
                    assert field["default"] is None, field
                check(field["type"])
            for key in ("items", "values"):
                check(schema.get(key))

    check(json.loads(load_schema(name)))


def test_reader_of_this_release_reads_a_message_with_one_more_field() -> None:
    """A later release has added a field with a default value; the message names its own schema."""
    later = json.loads(load_schema("next-readings"))
    later["fields"].append({"name": "site", "type": "string", "default": ""})
    text = json.dumps(later)
    document = orjson.loads(encode_suspicious_record(RECORD)) | {"site": "north"}
    avro = AvroFormat(text, 1).convert("next-reading", orjson.dumps(document))
    assert decode_suspicious_record(OutputReader(fetch_from(RegisteredSchema("AVRO", text, {})))(avro)) == RECORD


def test_key_that_the_schema_lacks_is_an_error() -> None:
    """Otherwise a field that is added to the JSON would be missing in Avro, and nobody would notice."""
    document = orjson.loads(encode_suspicious_record(RECORD)) | {"new": 1}
    with pytest.raises(ValueError, match="new"):
        FORMATS["next-readings"].convert("next-reading", orjson.dumps(document))


def test_evidence_grows_by_the_stated_factor_at_most() -> None:
    """The shortest columns as JSON: ids without characters, numbers with one digit, and times of one digit."""
    n = 1000
    ones, zeros = np.ones(n), np.zeros(n)
    times = np.full(n, 1_583_750_073_000_000)
    closed = ClosedRows([""] * n, times, ones, zeros, np.ones(n, np.int32), zeros.astype(bool), ones, zeros)
    encoded = encode_evidence(EvidenceBatch("", 0, closed))
    assert len(FORMATS["evidence"].convert("evidence", encoded)) <= AvroFormat.max_growth * len(encoded)


def test_json_stays_as_it_is() -> None:
    encoded = encode_evidence(make_batch())
    assert JSON_FORMAT.convert("evidence", encoded) is encoded
    assert OutputReader()(encoded) is encoded
    assert READER(encoded) is encoded


def test_avro_without_a_registry_names_the_option() -> None:
    with pytest.raises(ConfigError, match="--schema-registry"):
        OutputReader()(frame(1, b""))


def test_unknown_schema_and_damaged_messages_are_refused() -> None:
    avro = FORMATS["incidents"].convert("incident", encode_incident(make_incidents(1)[0]))
    schema_id = SCHEMA_NAMES.index("incidents") + 1
    for broken in (b"\0", b"\0\0\0\0", avro[:-1], avro[:HEADER_BYTES], frame(schema_id, b"\xff" * 40)):
        with pytest.raises(InputError):
            READER(broken)
    with pytest.raises(ConfigError, match="give the registry of the process that has written the topic"):
        READER(frame(99, b""))
    not_a_schema = RegisteredSchema("AVRO", '{"type": "nothing"}', {})
    with pytest.raises(InputError, match="schema 1"):
        OutputReader(fetch_from(not_a_schema))(frame(1, b""))


@given(st.integers(1, len(SCHEMA_NAMES)), st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read(schema_id: int, content: bytes) -> None:
    with contextlib.suppress(InputError):
        orjson.loads(READER(frame(schema_id, content)))


def test_schema_is_requested_once_and_an_outage_is_passed_on() -> None:
    requests: list[int] = []
    answers: list[Exception] = [
        Unavailable("away"),
        RejectionError(RejectionReason.UNKNOWN_SCHEMA, "no schema with id 4"),
    ]

    def fetch(schema_id: int) -> RegisteredSchema:
        requests.append(schema_id)
        if answers:
            raise answers.pop(0)
        return SCHEMAS[schema_id - 1]

    reader = OutputReader(fetch)
    avro = FORMATS["evidence"].convert("evidence", encode_evidence(make_batch()))
    with pytest.raises(Unavailable, match="away"):
        reader(avro)
    with pytest.raises(ConfigError, match="no schema with id 4"):
        reader(avro)
    for _ in range(3):
        assert_equal(decode_evidence(reader(avro)), make_batch())
    assert len(requests) == 3
