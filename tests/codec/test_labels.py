"""Tests of the codes of labels: a label in another spelling is the same label in every format of the input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec import Codec
from deformer_stream.codec.labels import find_spelling
from deformer_stream.codec.payloads import WideRows
from deformer_stream.model.schema import Feature, Schema
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import decode
from tests.codec.table_examples import decode_long

SCHEMA = Schema(
    (
        Feature("mode", "discrete", labels=("low", "High", "a", "A")),
        Feature("step", "discrete", labels=("1", "2")),
        Feature("is_on", "discrete", labels=("false", "true")),
    )
)
CODEC = Codec(SCHEMA)


@pytest.mark.parametrize(
    ("value", "labels", "expected"),
    [
        ("low", ("low",), "low"),
        (" LOW ", ("low",), "low"),
        ("high", ("High", "low"), "High"),
        ("a", ("a", "A"), "a"),
        ("A ", ("a", "A"), "A"),
        ("Ab", ("aB", "AB"), "Ab"),
        ("STRASSE", ("Straße",), "Straße"),
        ("3.0", ("3",), "3"),
        (3.0, ("3",), "3"),
        ("True", ("true", "false"), "true"),
        (True, ("0", "1"), "1"),
        ("TRUE", ("0", "1"), "1"),
        (1, ("true", "false"), "true"),
        ("off", ("on",), "off"),
        ("nan", ("1", "2"), "nan"),
    ],
)
def test_known_label_is_found_in_another_spelling(value: object, labels: tuple[str, ...], expected: str) -> None:
    assert find_spelling(value, labels) == expected


READINGS: list[tuple[str, Any, float]] = [
    ("mode", "LOW", 0),
    ("mode", "high", 1),
    ("mode", " a", 2),
    ("mode", "A", 3),
    ("mode", "middle", 4),
    ("step", "2.0", 1),
    ("step", "No Data", math.nan),
    ("is_on", "TRUE", 1),
    ("is_on", "0", 0),
]


@pytest.mark.parametrize(("name", "value", "code"), READINGS)
def test_all_formats_give_the_same_code(name: str, value: str, code: float) -> None:
    row = {"record": pa.array(["r"]), name: pa.array([value])}
    wide = pa.RecordBatch.from_pydict({name: row[name]})
    batches = [
        decode({"record": "r", "feature": name, "value": value}, codec=CODEC),
        decode({"record": "r", "values": {name: value}}, codec=CODEC),
        decode(make_stream(row), codec=CODEC),
        decode_long(CODEC, record=["r"], feature=[name], value=[value]),
        CODEC.decode(WideRows("log.parquet", wide, ["r"], 0)),
    ]
    feature = SCHEMA.code_by_name[name]
    for batch, rejections in batches:
        assert rejections == []
        np.testing.assert_array_equal(batch.values[batch.features == feature], [code])
        unseen = [batch.unseen_labels[i] for i in np.flatnonzero(batch.features == feature) if i in batch.unseen_labels]
        assert unseen == ([value] if code == 4 else [])
