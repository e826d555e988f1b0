"""Tests of the codes of labels: a label in another spelling is the same label in every format of the input."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec import Codec
from deformer_stream.codec.labels import encode_label, find_spelling
from deformer_stream.codec.payloads import WideRows
from deformer_stream.codec.validation import RejectionError
from deformer_stream.model.schema import Feature, Schema
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import decode
from tests.codec.table_examples import decode_long

SCHEMA = Schema(
    (
        Feature("mode", "discrete", labels=("low", "High", "a", "A")),
        Feature("step", "discrete", labels=("1", "2")),
        Feature("is_on", "discrete", labels=("false", "true")),
        Feature("serial", "discrete", labels=("9007199254740993", "9007199254740994", "36893488147419103235")),
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
        ("9007199254740993", ("9007199254740992",), "9007199254740993"),
        ("9007199254740993.0", ("9007199254740992", "9007199254740993"), "9007199254740993"),
        ("0" * 5000 + "9007199254740993", ("9007199254740992", "9007199254740993"), "9007199254740993"),
        (2**53 + 1, ("9007199254740992",), "9007199254740993"),
        ("3e22", ("30000000000000000000000",), "30000000000000000000000"),
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
    ("serial", "9007199254740993", 0),
    ("serial", " 9007199254740994.0", 1),
    ("serial", "9007199254740995", 3),
    ("serial", "36893488147419103235", 2),
    ("serial", "36893488147419103232", 3),  # the same number as float64
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
        assert unseen == ([value] if code == len(SCHEMA.features[feature].labels) else [])


@pytest.mark.parametrize("value", [2**53 + 1, 2**53 + 2, 2**53 + 3, 2**65 + 3, 2**65])
def test_large_integers_are_exact_in_all_formats(value: int) -> None:
    labels = SCHEMA.features[3].labels
    code = labels.index(str(value)) if str(value) in labels else len(labels)
    columns = [pa.array([Decimal(value)]), pa.array([Decimal(value)]).dictionary_encode(), pa.array([str(value)])]
    columns += [pa.array([value])] if value < 2**63 else []
    batches = [decode({"record": "r", "feature": "serial", "value": value}, codec=CODEC)]
    for column in columns:
        row = {"record": pa.array(["r"]), "serial": column}
        batches.append(decode(make_stream(row), codec=CODEC))
        batches.append(CODEC.decode(WideRows("log", pa.RecordBatch.from_pydict({"serial": column}), ["r"], 0)))
    for batch, rejections in batches:
        assert rejections == []
        assert batch.values[batch.features == 3].tolist() == [code]


def test_a_large_float_stands_for_the_only_label_that_is_rounded_to_it() -> None:
    code_by_label = {"9007199254740993": 0, "36893488147419103235": 1, "36893488147419103237": 2}
    assert encode_label(2.0**53, code_by_label, "serial") == (0, None)
    assert encode_label(2.0**53 + 2, code_by_label, "serial") == (3, "9007199254740994")
    with pytest.raises(RejectionError, match=r"'serial'.*36893488147419103235 and 36893488147419103237.*integers or"):
        encode_label(2.0**65, code_by_label, "serial")
