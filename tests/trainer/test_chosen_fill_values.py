"""Tests of `--fill-values`: training treats these values as empty cells, and the model stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import deformer_stream
from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from deformer_stream.model.windows import Window
from tests.commands import RunCommand
from tests.trainer.irregular import fleet, prepared_irregular
from tests.trainer.tables import mixed, prepared
from trainer.data import DataOptions, PreparedTable
from trainer.settings import parse_fill_values

FILLS: dict[str, Any] = {"fill_values": ((None, "99999"), ("b", "-7"), (None, "n.v."))}
TINY = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 2, "hidden": (16,), "epochs": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("99999.0, Bad,-1e4", ((None, "99999"), (None, "Bad"), (None, "-10000"))),
        ("flow=-9999.90,a=b=3", (("flow", "-9999.9"), ("a=b", "3"))),
        ("9007199254740993", ((None, "9007199254740993"),)),
    ],
)
def test_option_lists_values_of_all_features_or_of_one(text: str, expected: tuple[Any, ...]) -> None:
    assert parse_fill_values(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flow=", "'flow=' is no fill value"),
        ("=3", "'=3' is no fill value"),
        ("nan", "'nan' never counts as a reading"),
    ],
)
def test_option_with_a_part_that_has_no_meaning_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fill_values(text)


def make_wide(rng: np.random.Generator, fill: bool) -> dict[str, Any]:
    """Return a table of numbers and labels in which some cells are missing: null, or with a fill value."""
    columns = mixed(rng, 400)
    is_missing = {name: rng.random(400) < 0.1 for name in columns}
    fills = {"a": 99999.0, "b": -7.0, "c": 99999.0, "state": "n.v."}
    cells = {}
    for name, column in columns.items():
        values = column.to_pylist() if isinstance(column, pa.Array) else column.tolist()
        fill_value = fills[name] if fill else None
        cells[name] = pa.array(
            [fill_value if gap else cell for cell, gap in zip(values, is_missing[name], strict=True)]
        )
    return cells


def assert_equal(filled: PreparedTable, empty: PreparedTable) -> None:
    np.testing.assert_array_equal(filled.values, empty.values)
    assert filled.missing_by_feature == empty.missing_by_feature
    assert not filled.warnings
    assert [(f.name, f.kind, f.scale, f.labels) for f in filled.schema.features] == [
        (f.name, f.kind, f.scale, f.labels) for f in empty.schema.features
    ]
    assert {f.name: f.fill_values for f in filled.schema.features} == {
        f.name: ("99999", "-7", "n.v.") if f.sensor_name == "b" else ("99999", "n.v.") for f in filled.schema.features
    }


def test_records_are_those_of_a_table_with_empty_cells(tmp_path: Path) -> None:
    tables = [make_wide(np.random.default_rng(3), fill) for fill in (True, False)]
    assert_equal(prepared(tmp_path, tables[0], **FILLS), prepared(tmp_path, tables[1]))


def test_windows_of_a_wide_table_are_those_with_empty_cells(tmp_path: Path) -> None:
    times = pa.array(1_700_000_000_000_000 + 10_000_000 * np.arange(400), pa.timestamp("us", "UTC"))
    options: dict[str, Any] = {"window": Window(60_000_000, 6)}
    prepared_tables = []
    for fill in (True, False):
        columns = {"time": times} | make_wide(np.random.default_rng(3), fill)
        for name in ("a", "b", "c", "state"):  # a window without any reading is no record
            cells = columns[name].to_pylist()
            missing = {"b": -7.0, "state": "n.v."}.get(name, 99999.0) if fill else None
            columns[name] = pa.array([*cells[:60], *[missing] * 6, *cells[66:]])
        (tmp_path / str(fill)).mkdir()
        prepared_tables.append(prepared(tmp_path / str(fill), columns, **options | (FILLS if fill else {})))
    assert_equal(*prepared_tables)


def make_long(fill: bool, make: Callable[[np.random.Generator], dict[str, Any]] = fleet) -> dict[str, Any]:
    columns = make(np.random.default_rng(4))
    is_missing = np.random.default_rng(5).random(len(columns["value"])) < 0.1
    fills = {"a": "99999.0", "b": "-7", "state": "n.v."}
    cells = zip(columns["feature"], columns["value"], is_missing.tolist(), strict=True)
    columns["value"] = [(fills[name] if fill else None) if gap else value for name, value, gap in cells]
    return columns


def test_irregular_readings_are_those_of_a_table_with_empty_cells(tmp_path: Path) -> None:
    filled, empty = (prepared_irregular(tmp_path, make_long(fill), **(FILLS if fill else {})) for fill in (True, False))
    np.testing.assert_array_equal(filled.codes, empty.codes)
    np.testing.assert_array_equal(filled.values, empty.values)
    np.testing.assert_array_equal(filled.ages, empty.ages)
    assert filled.schema.features[0].fill_values


def test_long_table_with_records_is_that_with_empty_cells(tmp_path: Path) -> None:
    filled, empty = (prepared(tmp_path, make_long(fill), **(FILLS if fill else {})) for fill in (True, False))
    assert_equal(filled, empty)


def test_fill_values_are_no_names_of_features(tmp_path: Path) -> None:
    columns = make_long(False)
    columns["feature"] = [{"a": "1", "b": "7", "state": "state"}[name] for name in columns["feature"]]
    table = prepared(tmp_path, columns, fill_values=((None, "7"),))
    assert {feature.name for feature in table.schema.features} == {"1", "7", "state"}


@pytest.mark.parametrize("per_slot", ["first", "mean"])
def test_long_table_with_windows_is_that_without_these_readings(tmp_path: Path, per_slot: Any) -> None:
    """A sensor may report again in its window, so that a fill value is no reading, and not even a first one."""
    columns = make_long(True)
    columns["device"] = columns.pop("record")
    fills = {"a": "99999.0", "b": "-7", "state": "n.v."}
    cells = list(zip(columns["feature"], columns["value"], strict=True))
    is_reading = [value != fills[name] for name, value in cells]
    without = {
        name: [cell for cell, keep in zip(column, is_reading, strict=True) if keep] for name, column in columns.items()
    }
    options: dict[str, Any] = {"window": Window(900_000_000, 1, per_slot), "order": "arrival"}
    filled, rest = prepared(tmp_path, columns, **options, **FILLS), prepared(tmp_path, without, **options)
    np.testing.assert_array_equal(filled.values, rest.values)
    np.testing.assert_array_equal(filled.split, rest.split)
    assert filled.skipped_by_reason["readings with fill values"] == is_reading.count(False) > 100


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_fill_value_of_a_feature_that_does_not_exist_is_refused(tmp_path: Path, layout: str) -> None:
    columns = make_wide(np.random.default_rng(3), False) if layout == "wide" else make_long(False)
    with pytest.raises(ConfigError, match=r"fill-values.* nope"):
        prepared(tmp_path, columns, fill_values=(("nope", "3"),))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fill") / "model"


@pytest.fixture(scope="module")
def detector(model_directory: Path) -> deformer_stream.Detector:
    """Return a detector that was trained on a table with fill values."""
    table = pa.table(make_wide(np.random.default_rng(3), True))
    options: dict[str, Any] = {"fill_values": "99999, b=-7, n.v.", "faults": "off"}
    return deformer_stream.train(table, model_directory, device="cpu", **options, **TINY)


def test_model_stores_the_values_and_scores_them_as_empty_cells(
    detector: deformer_stream.Detector, model_directory: Path
) -> None:
    rows = [{"a": 99999, "b": 0.1, "c": 99999.0, "state": "n.v."}, {"a": 0.3, "b": -7.0, "c": 0.2, "state": "high"}]
    empty = [{"b": 0.1}, {"a": 0.3, "c": 0.2, "state": "high"}]
    np.testing.assert_array_equal(detector.score(rows).anomaly_score, detector.score(empty).anomaly_score)
    np.testing.assert_array_equal(detector.score(rows).log_likelihood, detector.score(empty).log_likelihood)
    assert detector.impute(rows[0]) == detector.impute(empty[0])
    texts = pd.DataFrame({"a": ["n.v.", "0.3"], "b": [0.1, -7.0], "c": ["n.v.", "0.2"], "state": ["n.v.", "high"]})
    np.testing.assert_array_equal(detector.score(texts).anomaly_score, detector.score(empty).anomaly_score)
    manifest = json.loads((model_directory / "manifest.json").read_text())
    assert manifest["format_version"] == 16
    assert [row["fill_values"] for row in manifest["features"]] == [["99999", "n.v."]] * 1 + [
        ["99999", "-7", "n.v."],
        ["99999", "n.v."],
        ["99999", "n.v."],
    ]


def test_an_adapted_model_keeps_the_values_and_gets_new_ones(
    detector: deformer_stream.Detector, model_directory: Path, tmp_path: Path
) -> None:
    columns = make_wide(np.random.default_rng(6), True)
    columns["c"] = pa.array([-5.0 if cell == 99999 else cell for cell in columns["c"].to_pylist()])
    options: dict[str, Any] = {
        "fill_values": "c=-5",
        "units": "c=bar",
        "init_from": model_directory,
        "faults": "off",
        "epochs": 1,
    }
    adapted = deformer_stream.train(pa.table(columns), tmp_path / "model", device="cpu", **options)
    assert {feature.name: feature.fill_values for feature in adapted.schema.features} == {
        "a": ("99999", "n.v."),
        "b": ("99999", "-7", "n.v."),
        "c": ("99999", "n.v.", "-5"),
        "state": ("99999", "n.v."),
    }
    assert adapted.schema.features[2].unit == "bar"


@pytest.mark.usefixtures("detector")
def test_inspect_shows_the_values(model_directory: Path, cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = cli("inspect", model_directory)
    assert done.code == 0, done.err
    assert "continuous, no reading if 99999 or -7 or n.v." in done.out


def test_a_model_without_fill_values_keeps_its_format(tmp_path: Path) -> None:
    table = pa.table(make_wide(np.random.default_rng(3), False))
    deformer_stream.train(table, tmp_path / "model", device="cpu", faults="off", **TINY)
    manifest = model_store.read_manifest(tmp_path / "model")
    assert manifest["format_version"] < 16
    assert DataOptions().features_with_fill_values == ()
