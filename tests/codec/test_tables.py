"""Tests of long and wide tables: types, orders of readings, and the same rejections as for messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from tests.codec.json_examples import CODEC, SCHEMA, list_readings
from tests.codec.table_examples import decode_long

# --- long tables


def test_long_rows_are_rejected_like_messages() -> None:
    batch, rejections = decode_long(
        record=["a", "a", None, "", "b", "b", "b", "x" * 1025, "b"],
        feature=["Pressure", "state", "Pressure", "Current", None, "nope", "Current", "Current", "Pressure"],
        value=[1.5, 3.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0, None],
        time=pa.array([1, 2, 3, None, 5, 6, 7, 8, None], pa.timestamp("s")),
    )
    assert list_readings(batch) == [("a", "Pressure", 1.5), ("a", "state", 2), ("b", "Pressure", None)]
    assert batch.times.tolist() == [1_000_000, 2_000_000, NO_TIME]
    assert batch.message_indices.tolist() == [0, 1, 8]
    assert [(r.message_index, r.reason) for r in rejections] == [
        (2, RejectionReason.MISSING_FIELD),
        (3, RejectionReason.MISSING_FIELD),
        (4, RejectionReason.MISSING_FIELD),
        (5, RejectionReason.UNKNOWN_FEATURE),
        (6, RejectionReason.NOT_FINITE),
        (7, RejectionReason.TOO_LARGE),
    ]


def test_long_values_as_text() -> None:
    features = ["Pressure", "state", "state", "state", "Current", "Current", "Current", "state", "Pressure"]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        values = pa.array(["0.5", "on", "3.0", "True", "wet", "inf", "1_0", "odd", None]).cast(kind)
        batch, rejections = decode_long(record=["r"] * 9, feature=features, value=values)
        assert list_readings(batch) == [
            ("r", "Pressure", 0.5),
            ("r", "state", 1),
            ("r", "state", 2),
            ("r", "state", 3),
            ("r", "state", 4),
            ("r", "Pressure", None),
        ]
        assert batch.unseen_labels == {4: "odd"}
        assert [(r.message_index, r.reason) for r in rejections] == [
            (4, RejectionReason.WRONG_TYPE),
            (5, RejectionReason.NOT_FINITE),
            (6, RejectionReason.WRONG_TYPE),
        ]


def test_long_values_as_numbers_with_a_column_of_labels() -> None:
    batch, rejections = decode_long(
        record=["r"] * 5,
        feature=["Pressure", "state", "state", "state", "state"],
        value=pa.array([1.0, None, 3.0, None, math.nan]),
        label=[None, "off", None, None, None],
    )
    assert list_readings(batch)[:4] == [
        ("r", "Pressure", 1),
        ("r", "state", 0),
        ("r", "state", 2),
        ("r", "state", None),
    ]
    assert rejections == []


def test_long_boolean_values() -> None:
    batch, rejections = decode_long(record=[1, 2], feature=["state", "Pressure"], value=[True, True])
    assert list_readings(batch) == [("1", "state", 3)]
    assert [(r.message_index, r.reason) for r in rejections] == [(1, RejectionReason.WRONG_TYPE)]


@pytest.mark.parametrize(
    ("time", "micros", "rejected"),
    [
        (
            pa.array([1583750073.5, None, math.nan, 1e15]),
            [1583750073500000, NO_TIME],
            {2: RejectionReason.NOT_FINITE, 3: RejectionReason.WRONG_TYPE},
        ),
        (pa.array([7, 8, 9, None]), [7_000_000, 8_000_000, 9_000_000, NO_TIME], {}),
        (pa.array([1, 2, 3, 4], pa.timestamp("ns", "Europe/Paris")), [0, 0, 0, 0], {}),
        (pa.array([1, 2, None, 4], pa.timestamp("ms")), [1000, 2000, NO_TIME, 4000], {}),
        (
            pa.array(["1970-01-01T00:00:01Z", "soon", None, "1970-01-01"]),
            [1_000_000, NO_TIME],
            {1: RejectionReason.WRONG_TYPE, 3: RejectionReason.WRONG_TYPE},
        ),
        (pa.array([1, 0, 0, 0], pa.date32()), [86_400_000_000, 0, 0, 0], {}),
        (pa.nulls(4), [NO_TIME] * 4, {}),
        (pa.array([2**61, 0, 0, 0], pa.timestamp("us")), [0, 0, 0], {0: RejectionReason.WRONG_TYPE}),
        # In microseconds, this number of seconds would overflow to a time in the year 1970.
        (pa.array([2**58, 1, 0, 0], pa.timestamp("s")), [1_000_000, 0, 0], {0: RejectionReason.WRONG_TYPE}),
        (pa.array([2**63 - 1, 1999, 0, 0], pa.timestamp("ns")), [(2**63 - 1) // 1000, 1, 0, 0], {}),
        (pa.array([2**31 - 1, 1, 0, 0], pa.date32()), [86_400_000_000, 0, 0], {0: RejectionReason.WRONG_TYPE}),
    ],
)
def test_times_of_all_column_types(time: pa.Array, micros: list[int], rejected: dict[int, RejectionReason]) -> None:
    batch, rejections = decode_long(record=list("abcd"), feature=["Pressure"] * 4, value=[1.0] * 4, time=time)
    assert batch.times.tolist() == micros
    assert {r.message_index: r.reason for r in rejections} == rejected


@pytest.mark.parametrize(
    ("columns", "expected_text"),
    [
        ({"record": ["a"], "feature": ["Pressure"]}, "column 'value' is missing"),
        ({"record": [1.5], "feature": ["Pressure"], "value": [1.0]}, "'record' has the type double"),
        ({"record": ["a"], "feature": [1], "value": [1.0]}, "'feature' has the type int64"),
        ({"record": ["a"], "feature": ["Pressure"], "value": [[1.0]]}, "'value' has the type list"),
        ({"record": ["a"], "feature": ["Pressure"], "value": [1.0], "time": [[1]]}, "'time' has the type list"),
    ],
)
def test_long_tables_with_missing_or_wrong_columns(columns: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(InputError, match=r"log\.parquet") as caught:
        decode_long(**columns)
    assert expected_text in str(caught.value)


@given(
    st.lists(
        st.tuples(
            st.none() | st.text(max_size=3),
            st.sampled_from([None, "Pressure", "state", "zzz"]),
            st.none() | st.sampled_from(["1.5", "on", "nan", "1e999", "true", "3.0", "x"]),
        ),
        max_size=12,
    )
)
def test_every_long_row_gives_an_event_or_a_rejection(rows: list[tuple[str | None, str | None, str | None]]) -> None:
    columns = [pa.array([row[k] for row in rows], pa.string()) for k in range(3)]
    batch, rejections = decode_long(**dict(zip(("record", "feature", "value"), columns, strict=True)))
    assert sorted([*batch.message_indices.tolist(), *(r.message_index for r in rejections)]) == list(range(len(rows)))


def test_full_dictionary_index_type_with_null() -> None:
    ids = (
        pa.array([str(i) for i in range(127)] + [None]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    )
    batch, rejections = decode_long(record=ids, feature=["Pressure"] * 128, value=[1.0] * 128)
    assert batch.record_ids == [str(i) for i in range(127)]
    assert [r.message_index for r in rejections] == [127]


# --- wide tables


def decode_wide(
    codec: Codec = CODEC, ids: list[str] | None = None, first: int = 0, time: str | None = None, **columns: Any
) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of a table in wide layout, given by its columns."""
    table = pa.RecordBatch.from_pydict(
        {name: c if isinstance(c, pa.Array) else pa.array(c) for name, c in columns.items()}
    )
    ids = [str(first + i) for i in range(table.num_rows)] if ids is None else ids
    return codec.decode(WideRows("pumps.parquet", table, ids, first, time))


def test_missing_features_of_a_wide_row_come_first() -> None:
    batch, rejections = decode_wide(
        state=["on", None, "odd"],
        comment=["x", "y", "z"],
        Pressure=[1.0, math.nan, 3.0],
        when=pa.array([1, None, 3], pa.timestamp("s")),
        time="when",
    )
    assert list_readings(batch) == [
        ("0", "Current", None),  # a feature without a column
        ("0", "state", 1),
        ("0", "Pressure", 1),
        ("1", "state", None),
        ("1", "Pressure", None),
        ("1", "Current", None),
        ("2", "Current", None),
        ("2", "state", 4),
        ("2", "Pressure", 3),
    ]
    assert batch.unseen_labels == {7: "odd"}
    assert batch.message_indices.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.row_boundaries is not None
    assert batch.row_boundaries.tolist() == [0, 3, 6, 9]
    assert batch.times.tolist() == [1_000_000] * 3 + [NO_TIME] * 3 + [3_000_000] * 3
    assert rejections == []


def test_orders_of_wide_readings() -> None:
    columns: dict[str, Any] = {"state": ["on"] * 50, "Current": [2.0] * 50, "Pressure": [1.0] * 50}
    arrival, _ = decode_wide(Codec(SCHEMA, order="arrival"), **columns)
    schema, _ = decode_wide(Codec(SCHEMA, order="schema"), **columns)
    random, _ = decode_wide(Codec(SCHEMA, order="random", seed=4), **columns)
    again, _ = decode_wide(Codec(SCHEMA, order="random", seed=4), **columns)
    other, _ = decode_wide(Codec(SCHEMA, order="random", seed=5), **columns)
    assert arrival.features.tolist() == [2, 1, 0] * 50
    assert schema.features.tolist() == [0, 1, 2] * 50
    assert random.features.tolist() == again.features.tolist() != other.features.tolist()
    permutations = {tuple(row) for row in random.features.reshape(50, 3).tolist()}
    assert len(permutations) == 6
    with pytest.raises(ConfigError):
        Codec(SCHEMA, order="sideways")  # type: ignore[arg-type]


def test_random_orders_are_uniform_and_independent_of_chunking() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    codec = Codec(schema, order="random", seed=11)
    n = 20_000
    table = pa.RecordBatch.from_pydict({f"f{i}": np.full(n, float(i)) for i in range(5)})
    ids = [str(i) for i in range(n)]
    whole = codec.decode(WideRows("f", table, ids, 0))[0].features.reshape(n, 5)
    parts = [
        codec.decode(WideRows("f", table.slice(a, 700), ids[a : a + 700], a))[0].features for a in range(0, n, 700)
    ]
    assert (np.concatenate(parts).reshape(n, 5) == whole).all()
    alone = codec.decode(WideRows("g", table.slice(9, 1), ["9"], 0))[0].features
    assert (alone == whole[9]).all()
    for place in range(5):
        share = np.bincount(whole[:, place], minlength=5) / n
        assert np.abs(share - 0.2).max() < 5 * math.sqrt(0.2 * 0.8 / n)
    pairs = np.unique(whole[:, :2], axis=0, return_counts=True)[1] / n
    assert len(pairs) == 20
    assert np.abs(pairs - 0.05).max() < 5 * math.sqrt(0.05 * 0.95 / n)


def test_rejections_of_wide_tables() -> None:
    batch, rejections = decode_wide(
        ids=["a", "", "c", "x" * 1025], Pressure=[1.0, 2.0, math.inf, 4.0], Current=[1, 2, 3, 4], state=[True] * 4
    )
    assert [(r.message_index, r.reason) for r in rejections] == [
        (1, RejectionReason.MISSING_FIELD),
        (2, RejectionReason.NOT_FINITE),
        (3, RejectionReason.TOO_LARGE),
    ]
    assert "'Pressure'" in rejections[1].detail
    assert [list(part) for part in batch.records_of_rows()] == [["a", "c"], [0, 0, 0, 1, 1]]
    assert sorted(list_readings(batch)) == [
        ("a", "Current", 1), ("a", "Pressure", 1), ("a", "state", 3), ("c", "Current", 3), ("c", "state", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "column",
    [
        pa.array([3, None], pa.int64()),
        pa.array([3.0, math.nan]),
        pa.array(["3", None]),
        pa.array(["3.0", None]),
        pa.array(["3", None]).dictionary_encode(),
        pa.array([3, None], pa.decimal128(5, 1)),
        pa.array([np.float16(3.0), None], pa.float16()),
    ],
)
def test_wide_labels_of_any_type(column: pa.Array) -> None:
    batch, rejections = decode_wide(Codec(SCHEMA, order="schema"), state=column)
    assert batch.values.tolist()[2] == 2
    assert np.isnan(np.delete(batch.values, 2)).all()
    assert rejections == []


def test_rejected_labels_of_wide_tables() -> None:
    batch, rejections = decode_wide(Codec(SCHEMA, order="schema"), state=[math.inf, 3.0], Pressure=[1.0, 1.0])
    assert [(r.message_index, r.reason) for r in rejections] == [(0, RejectionReason.NOT_FINITE)]
    assert "'state'" in rejections[0].detail
    assert len(batch) == 5
    _, rejections = decode_wide(state=["x" * 1025])
    assert [(r.message_index, r.reason) for r in rejections] == [(0, RejectionReason.TOO_LARGE)]


@pytest.mark.parametrize(
    ("columns", "expected_text"),
    [
        ({"Pressure": [True]}, "column 'Pressure' has the type bool"),
        ({"state": [[1]]}, "column 'state' has the type list"),
        ({"Pressure": [1.0], "when": ["noon"], "time": "when"}, "the time in column 'when' of row 7 is not valid"),
    ],
)
def test_wide_column_of_wrong_type_raises_input_error(columns: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(InputError, match=r"pumps\.parquet") as caught:
        decode_wide(first=7, **columns)
    assert expected_text in str(caught.value)


def test_texts_in_a_wide_column_of_numbers_are_read_and_bad_ones_are_rejected_one_by_one() -> None:
    texts = ["1.5", "I/O Timeout", " 2e-1 ", "No Data", None, "1 234.5", "inf"]
    batch, rejections = decode_wide(Pressure=texts, state=["on"] * len(texts))
    pressures = batch.values[batch.features == SCHEMA.code_by_name["Pressure"]].tolist()
    assert pressures == pytest.approx([1.5, 0.2, math.nan, math.nan, 1234.5], nan_ok=True)
    assert [(r.message_index, r.reason) for r in rejections] == [
        (1, RejectionReason.WRONG_TYPE),
        (6, RejectionReason.NOT_FINITE),
    ]
    assert "'I/O Timeout'" in rejections[0].detail
    assert (batch.features == SCHEMA.code_by_name["state"]).sum() == len(
        texts
    )  # the other readings of the rows are accepted


def test_a_bad_time_of_a_wide_table_rejects_its_row() -> None:
    times = ["2020-03-09T10:34:33Z", "noon", None]
    batch, rejections = decode_wide(Pressure=[1.0, 2.0, 3.0], when=times, time="when")
    pressures = batch.values[batch.features == SCHEMA.code_by_name["Pressure"]].tolist()
    assert (pressures, set(batch.times.tolist())) == ([1.0, 3.0], {1583750073000000, NO_TIME})
    assert [(r.message_index, r.reason) for r in rejections] == [(1, RejectionReason.WRONG_TYPE)]


def test_an_empty_wide_table_has_no_events() -> None:
    assert len(decode_wide(Pressure=pa.array([], pa.float64()))[0]) == 0
