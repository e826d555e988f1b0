"""Tests of evidence as bytes: the stored format, the inverse, and refused messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from deformer_stream.codec.encode_evidence import (
    EVIDENCE_VERSION,
    LaterEvidenceError,
    decode_evidence,
    encode_evidence,
    encode_evidence_parts,
)
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import AlertRow, EvidenceBatch
from tests.codec.evidence_examples import alerts, assert_equal, make_batch, make_closed, numbers, p_values, texts, times

GOLDEN = Path(__file__).parents[1] / "golden" / "evidence.jsonl"


def test_format_is_the_stored_one() -> None:
    assert encode_evidence(make_batch()) + b"\n" == GOLDEN.read_bytes()
    assert_equal(decode_evidence(GOLDEN.read_bytes()), make_batch())


def test_batch_without_records_or_alerts_survives() -> None:
    batch = EvidenceBatch("m", 0, make_closed())
    assert_equal(decode_evidence(encode_evidence(batch)), batch)


rows = st.tuples(texts, times, p_values, numbers, st.integers(0, 2**31 - 1), st.booleans())


@given(texts, st.integers(0, 2**31 - 1), st.lists(rows, max_size=5), st.lists(alerts, max_size=3), texts)
def test_decoding_is_the_inverse_of_encoding(
    model: str,
    partition: int,
    closed: list[tuple[str, int, float, float, int, bool]],
    alert_rows: list[AlertRow],
    model_name: str,
) -> None:
    batch = EvidenceBatch(model, partition, make_closed(*closed), tuple(alert_rows), model_name)
    payload = encode_evidence(batch)
    assert b"\n" not in payload
    assert_equal(decode_evidence(payload), batch)


VALID = encode_evidence(make_batch())


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"\xff", "malformed"),
        (VALID.replace("Prüfung".encode(), b"\xff"), "no message of evidence"),
        (VALID.replace(b'"v":1', b'"v":3'), "format version 3"),
        (VALID.replace(b'"p":[0.000531', b'"p":[0.0'), "$.closed.p"),
        (VALID.replace(b'"p":[0.000531', b'"p":[null'), "$.closed.p"),
        (VALID.replace(b'"score":[83.8', b'"score":[1e999'), "no message of evidence"),
        (VALID.replace(b'"time":[1583750073000000', b'"time":[9223372036854775808'), "$.closed.time"),
        (VALID.replace(b'"readings":[8,3]', b'"readings":[8]'), "different lengths"),
        (VALID.replace(b'"alerted":[1,0]', b'"alerted":[1,2]'), "$.closed.alerted"),
        (VALID.replace(b'"share":0.82', b'"share":1.5'), "share"),
        (VALID.replace(b'"model":"16e9",', b""), "model"),
        (b"[" * 100_000, "Expected `object`"),
        (VALID.replace(b'"v":1', b'"v":1,"x":' + b"[" * 100_000), "recursion"),
    ],
)
def test_other_messages_are_refused_by_one_line(payload: bytes, cause: str) -> None:
    with pytest.raises(InputError, match=cause.replace("$", r"\$")) as refused:
        decode_evidence(payload)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_evidence_of_a_later_version_is_told_from_other_messages() -> None:
    """A reader that cannot read it must not skip it, as it skips what is no evidence."""
    for version in (EVIDENCE_VERSION + 1, 1000):
        with pytest.raises(LaterEvidenceError, match=f"format version {version} .* use the release that wrote it"):
            decode_evidence(b'{"v":%d,"model":"16e9","partition":0,"columns":{}}' % version)
    for other in (b'{"v":3}', b'{"v":3,"model":"16e9"}', b'{"v":3,"model":1,"partition":0}', b'{"v":0,"model":"16e9"}'):
        with pytest.raises(InputError) as refused:
            decode_evidence(other)
        assert not isinstance(refused.value, LaterEvidenceError)


@given(st.binary(max_size=64) | st.integers(0, len(VALID) - 1).map(lambda end: VALID[:end]))
def test_any_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(InputError):
        decode_evidence(payload)


def test_keys_of_later_releases_are_ignored() -> None:
    assert_equal(decode_evidence(VALID.replace(b'"v":1', b'"v":1,"later":{"a":[1]}')), make_batch())


def test_only_evidence_of_several_models_names_the_model() -> None:
    assert b"model_name" not in VALID
    assert decode_evidence(VALID).model_name == ONLY_MODEL
    named = encode_evidence(replace(make_batch(), model_name="fan/ä"))
    assert decode_evidence(named).model_name == "fan/ä"
    # As the reader of Avro writes a missing value
    assert decode_evidence(VALID.replace(b'"v":1', b'"v":1,"model_name":null')).model_name == ONLY_MODEL


def test_large_batch_becomes_several_messages_with_alerts_first() -> None:
    rows = [(f"pump-{i}@2020-03-09T10:34:30Z", 10**15 + i, 0.5, 1.0, 8, False) for i in range(300)]
    alert_rows = tuple(AlertRow(f"id-{i}", f"r{i}", 10**15, 0.5, 1) for i in range(40))
    batch = EvidenceBatch("m", 1, make_closed(*rows), alert_rows)
    parts = list(map(decode_evidence, encode_evidence_parts(batch, 2000)))
    assert len(parts) > 10
    assert all(len(part) <= 2000 for part in encode_evidence_parts(batch, 2000))
    assert tuple(alert for part in parts for alert in part.alerts) == alert_rows
    assert [record for part in parts for record in part.closed.record_ids] == [record for record, *_ in rows]
    first_closed = next(i for i, part in enumerate(parts) if len(part.closed))
    assert not any(part.alerts for part in parts[first_closed:])
    assert np.array_equal(np.concatenate([part.closed.times for part in parts]), batch.closed.times)


def test_small_batch_is_one_message_and_an_empty_one_is_none() -> None:
    assert encode_evidence_parts(make_batch()) == [VALID]
    assert encode_evidence_parts(EvidenceBatch("m", 0, make_closed())) == []


def test_row_that_is_too_large_is_a_message_of_its_own() -> None:
    batch = EvidenceBatch("m", 0, make_closed(("a" * 900, 1, 0.5, 1.0, 1, False), ("b" * 900, 1, 0.5, 1.0, 1, False)))
    assert len(encode_evidence_parts(batch, 100)) == 2


def test_p_values_of_complete_records_have_the_second_version_and_survive() -> None:
    closed = make_batch().closed
    batch = replace(
        make_batch(),
        closed=replace(closed, record_p_values=np.array([0.002, np.nan]), record_scores=np.array([-0.5, np.nan])),
    )
    payload = encode_evidence(batch)
    assert payload.startswith(b'{"v":2,')
    assert b'"record_p":[0.002,null],"record_score":[-0.5,null]' in payload
    decoded = decode_evidence(payload)
    assert_array_equal(decoded.closed.record_p_values, batch.closed.record_p_values)
    assert_array_equal(decoded.closed.record_scores, batch.closed.record_scores)
    first, second = (decode_evidence(part) for part in encode_evidence_parts(replace(batch, alerts=()), 200))
    assert (first.closed.record_p_values, first.closed.record_ids) == (0.002, closed.record_ids[:1])
    assert np.isnan(second.closed.record_scores)
    with pytest.raises(InputError, match="different lengths"):
        decode_evidence(payload.replace(b"[0.002,null]", b"[0.002]"))
    with pytest.raises(InputError, match="record_p"):
        decode_evidence(payload.replace(b"[0.002,null]", b"[0.0,null]"))
