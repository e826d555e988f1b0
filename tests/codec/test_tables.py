"""Long and wide tables as events: types, orders, and the same refusals as for messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import LongRows, WideRows
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from tests.codec.test_json_messages import CODEC, SCHEMA, readings

# --- long tables


def long(codec: Codec = CODEC, first: int = 0, **columns: Any) -> tuple[EventBatch, list[Rejection]]:
    arrays = {name: c if isinstance(c, pa.Array) else pa.array(c) for name, c in columns.items()}
    return codec.decode(LongRows("log.parquet", pa.RecordBatch.from_pydict(arrays), first))


def test_long_rows_refuse_what_messages_refuse() -> None:
    batch, rejected = long(
        record=["a", "a", None, "", "b", "b", "b", "x" * 1025, "b"],
        feature=["Pressure", "state", "Pressure", "Current", None, "nope", "Current", "Current", "Pressure"],
        value=[1.5, 3.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0, None],
        time=pa.array([1, 2, 3, None, 5, 6, 7, 8, None], pa.timestamp("s")),
    )
    assert readings(batch) == [("a", "Pressure", 1.5), ("a", "state", 2), ("b", "Pressure", None)]
    assert batch.times.tolist() == [1_000_000, 2_000_000, NO_TIME]
    assert batch.message_indices.tolist() == [0, 1, 8]
    assert [(r.message_index, r.reason) for r in rejected] == [
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
        batch, rejected = long(record=["r"] * 9, feature=features, value=values)
        assert readings(batch) == [
            ("r", "Pressure", 0.5),
            ("r", "state", 1),
            ("r", "state", 2),
            ("r", "state", 3),
            ("r", "state", 4),
            ("r", "Pressure", None),
        ]
        assert batch.unseen_labels == {4: "odd"}
        assert [(r.message_index, r.reason) for r in rejected] == [
            (4, RejectionReason.WRONG_TYPE),
            (5, RejectionReason.NOT_FINITE),
            (6, RejectionReason.WRONG_TYPE),
        ]


def test_long_values_as_numbers_with_a_column_of_labels() -> None:
    batch, rejected = long(
        record=["r"] * 5,
        feature=["Pressure", "state", "state", "state", "state"],
        value=pa.array([1.0, None, 3.0, None, math.nan]),
        label=[None, "off", None, None, None],
    )
    assert readings(batch)[:4] == [("r", "Pressure", 1), ("r", "state", 0), ("r", "state", 2), ("r", "state", None)]
    assert rejected == []


def test_long_booleans() -> None:
    batch, rejected = long(record=[1, 2], feature=["state", "Pressure"], value=[True, True])
    assert readings(batch) == [("1", "state", 3)]
    assert [(r.message_index, r.reason) for r in rejected] == [(1, RejectionReason.WRONG_TYPE)]


@pytest.mark.parametrize(
    ("time", "micros", "refused"),
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
    ],
)
def test_times_of_tables(time: pa.Array, micros: list[int], refused: dict[int, RejectionReason]) -> None:
    batch, rejected = long(record=list("abcd"), feature=["Pressure"] * 4, value=[1.0] * 4, time=time)
    assert batch.times.tolist() == micros
    assert {r.message_index: r.reason for r in rejected} == refused


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"record": ["a"], "feature": ["Pressure"]}, "column 'value' is missing"),
        ({"record": [1.5], "feature": ["Pressure"], "value": [1.0]}, "'record' is double"),
        ({"record": ["a"], "feature": [1], "value": [1.0]}, "'feature' is int64"),
        ({"record": ["a"], "feature": ["Pressure"], "value": [[1.0]]}, "'value' is list"),
        ({"record": ["a"], "feature": ["Pressure"], "value": [1.0], "time": [[1]]}, "'time' is list"),
    ],
)
def test_long_tables_of_the_wrong_shape(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=r"log\.parquet") as caught:
        long(**columns)
    assert says in str(caught.value)


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
def test_every_long_row_is_accounted_for(rows: list[tuple[str | None, str | None, str | None]]) -> None:
    columns = [pa.array([row[k] for row in rows], pa.string()) for k in range(3)]
    batch, rejected = long(**dict(zip(("record", "feature", "value"), columns, strict=True)))
    assert sorted([*batch.message_indices.tolist(), *(r.message_index for r in rejected)]) == list(range(len(rows)))


def test_dictionary_columns_with_more_values_than_their_index_type_has_room_for_a_null() -> None:
    ids = (
        pa.array([str(i) for i in range(127)] + [None]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    )
    batch, rejected = long(record=ids, feature=["Pressure"] * 128, value=[1.0] * 128)
    assert batch.record_ids == [str(i) for i in range(127)]
    assert [r.message_index for r in rejected] == [127]


# --- wide tables


def wide(
    codec: Codec = CODEC, ids: list[str] | None = None, first: int = 0, time: str | None = None, **columns: Any
) -> tuple[EventBatch, list[Rejection]]:
    table = pa.RecordBatch.from_pydict(
        {name: c if isinstance(c, pa.Array) else pa.array(c) for name, c in columns.items()}
    )
    ids = [str(first + i) for i in range(table.num_rows)] if ids is None else ids
    return codec.decode(WideRows("pumps.parquet", table, ids, first, time))


def test_a_wide_row_is_a_whole_record_whose_gaps_come_first() -> None:
    batch, rejected = wide(
        state=["on", None, "odd"],
        comment=["x", "y", "z"],
        Pressure=[1.0, math.nan, 3.0],
        when=pa.array([1, None, 3], pa.timestamp("s")),
        time="when",
    )
    assert readings(batch) == [
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
    assert rejected == []


def test_wide_orders() -> None:
    columns: dict[str, Any] = {"state": ["on"] * 50, "Current": [2.0] * 50, "Pressure": [1.0] * 50}
    arrival, _ = wide(Codec(SCHEMA, order="arrival"), **columns)
    schema, _ = wide(Codec(SCHEMA, order="schema"), **columns)
    random, _ = wide(Codec(SCHEMA, order="random", seed=4), **columns)
    again, _ = wide(Codec(SCHEMA, order="random", seed=4), **columns)
    other, _ = wide(Codec(SCHEMA, order="random", seed=5), **columns)
    assert arrival.features.tolist() == [2, 1, 0] * 50
    assert schema.features.tolist() == [0, 1, 2] * 50
    assert random.features.tolist() == again.features.tolist() != other.features.tolist()
    permutations = {tuple(row) for row in random.features.reshape(50, 3).tolist()}
    assert len(permutations) == 6
    with pytest.raises(ConfigError):
        Codec(SCHEMA, order="sideways")  # type: ignore[arg-type]


def test_random_orders_are_uniform_and_independent_of_chunking_and_of_other_records() -> None:
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


def test_wide_refusals() -> None:
    batch, rejected = wide(
        ids=["a", "", "c", "x" * 1025], Pressure=[1.0, 2.0, math.inf, 4.0], Current=[1, 2, 3, 4], state=[True] * 4
    )
    assert [(r.message_index, r.reason) for r in rejected] == [
        (1, RejectionReason.MISSING_FIELD),
        (2, RejectionReason.NOT_FINITE),
        (3, RejectionReason.TOO_LARGE),
    ]
    assert "'Pressure'" in rejected[1].detail
    assert [list(part) for part in batch.records_of_rows()] == [["a", "c"], [0, 0, 0, 1, 1]]
    assert sorted(readings(batch)) == [
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
        pa.array([3.0, None], pa.float16()),
    ],
)
def test_wide_labels_of_any_type(column: pa.Array) -> None:
    batch, rejected = wide(Codec(SCHEMA, order="schema"), state=column)
    assert batch.values.tolist()[2] == 2
    assert np.isnan(np.delete(batch.values, 2)).all()
    assert rejected == []


def test_wide_labels_that_are_refused() -> None:
    batch, rejected = wide(Codec(SCHEMA, order="schema"), state=[math.inf, 3.0], Pressure=[1.0, 1.0])
    assert [(r.message_index, r.reason) for r in rejected] == [(0, RejectionReason.NOT_FINITE)]
    assert "'state'" in rejected[0].detail
    assert len(batch) == 5
    _, rejected = wide(state=["x" * 1025])
    assert [(r.message_index, r.reason) for r in rejected] == [(0, RejectionReason.TOO_LARGE)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"Pressure": ["high"]}, "column 'Pressure' is string, but the model expects numbers"),
        ({"Pressure": [True]}, "column 'Pressure' is bool"),
        ({"state": [[1]]}, "column 'state' is list"),
        ({"Pressure": [1.0], "when": ["noon"], "time": "when"}, "row 7: column 'when'"),
    ],
)
def test_wide_columns_of_the_wrong_type(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=r"pumps\.parquet") as caught:
        wide(first=7, **columns)
    assert says in str(caught.value)


def test_an_empty_wide_table_has_no_events() -> None:
    assert len(wide(Pressure=pa.array([], pa.float64()))[0]) == 0
