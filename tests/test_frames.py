"""Tests of records in data frames, Arrow tables and NumPy arrays: equal values give equal results of the same kind."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import deformer_stream
from deformer_stream import model_store
from deformer_stream.api import Detector
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import AlphaOutOfReachWarning, ConfigError, InputError
from deformer_stream.library.frames import read_array
from deformer_stream.library.training import run_training
from tests.models import SCHEMA, draw_linear_records, draw_rows, train_linear_model

ALPHA = 0.3
SCORE_COLUMNS = ["log_likelihood", "anomaly_score", "p_value", "alert_seq", "score"]


@pytest.fixture(scope="module")
def detector(model_dir: Path) -> Detector:
    return deformer_stream.load(model_dir)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Detector:
    """Return a detector that has learned y = 2x + 1, and that `sign` is the sign of x."""
    directory = tmp_path_factory.mktemp("linear") / "model"
    calibration = Calibration.from_statistics(np.linspace(0, 5, 99), "random")
    model_store.write(directory, train_linear_model(), calibration, {}, "")
    return deformer_stream.load(directory)


def make_arrow_table(num_records: int = 40, seed: int = 5) -> pa.Table:
    """Return random records with gaps as an Arrow table in the order of the schema."""
    rows = draw_rows(SCHEMA, num_records, seed)
    return pa.table({name: [row.get(name) for row in rows] for name in SCHEMA.names})


def to_structured(table: pa.Table) -> np.ndarray[Any, Any]:
    """Return an Arrow table as a structured NumPy array, with object fields for texts."""
    types = [(field.name, object if pa.types.is_string(field.type) else float) for field in table.schema]
    rows = [
        tuple(
            np.nan if value is None and kind is float else value
            for value, (_, kind) in zip(row.values(), types, strict=True)
        )
        for row in table.to_pylist()
    ]
    return np.array(rows, types)


TO_FRAME: dict[str, Callable[[pa.Table], Any]] = {
    "pandas": lambda table: table.to_pandas(),
    "pandas-arrow": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas-object": lambda table: table.to_pandas().astype(object),
    "pandas-category": lambda table: table.to_pandas().astype({"state": "category", "valve": "category"}),
    "polars": pl.from_arrow,
    "arrow": lambda table: table.slice(0),
    "record-batch": lambda table: table.combine_chunks().to_batches()[0],
}
TO_ARRAY: dict[str, Callable[[pa.Table], Any]] = {
    "object": lambda table: np.column_stack([np.array(column.to_pylist(), object) for column in table.columns]),
    "structured": to_structured,
}


class SimpleCapsule:
    """A table of an unknown library, which only has the Arrow PyCapsule interface."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


TO_FRAME["capsule"] = SimpleCapsule


def to_arrow(frame: Any) -> pa.Table:
    """Return the result for a data frame as an Arrow table."""
    if isinstance(frame, pd.DataFrame):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    return frame.to_arrow() if isinstance(frame, pl.DataFrame) else frame


@pytest.mark.parametrize("kind", TO_FRAME)
def test_scores_of_a_frame_are_a_frame_of_the_same_kind(detector: Detector, kind: str) -> None:
    table = make_arrow_table()
    frame = TO_FRAME[kind](table)
    expected = detector.score([dict(row) for row in table.to_pylist()], ALPHA)
    assert (expected.alert_seq >= 0).any()
    scores = detector.score(frame, ALPHA)
    assert type(scores) is (pa.Table if kind == "capsule" else type(frame))
    columns = to_arrow(scores)
    assert columns.schema.names == SCORE_COLUMNS
    for name in SCORE_COLUMNS:
        np.testing.assert_allclose(columns[name].to_numpy(), getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TO_ARRAY)
def test_scores_of_an_array_are_record_scores(detector: Detector, kind: str) -> None:
    table = make_arrow_table()
    expected = detector.score(table, ALPHA)
    scores = detector.score(TO_ARRAY[kind](table), ALPHA)
    np.testing.assert_array_equal(scores.score, expected["score"].to_numpy())
    np.testing.assert_array_equal(scores.alert_seq, expected["alert_seq"].to_numpy())


def test_columns_of_an_array_can_be_named(detector: Detector) -> None:
    table = make_arrow_table()
    names = ["vibration", "temperature", "pressure"]
    array = np.column_stack([table[name].to_numpy() for name in names])
    np.testing.assert_array_equal(
        detector.score(array, columns=names).score, detector.score(table.select(names))["score"].to_numpy()
    )
    with pytest.raises(InputError, match=r"shape \(40, 3\), but a matrix with 6 columns is expected"):
        detector.score(array)
    with pytest.raises(InputError, match="twice"):
        detector.score(array, columns=["load", "load", "pressure"])
    with pytest.raises(InputError, match="leave out the argument"):
        detector.score(table, columns=names)  # type: ignore[call-overload]


def test_results_keep_the_index_of_a_pandas_frame(detector: Detector) -> None:
    frame = make_arrow_table(4).to_pandas()
    frame.index = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1), ("a", 1)], names=["site", "pump"])
    assert detector.score(frame).index.equals(frame.index)
    assert detector.impute(frame).index.equals(frame.index)
    assert detector.quantiles(frame, [0.5]).index.equals(frame.index)
    assert detector.complete(frame, draws=2).index.equals(frame.index.repeat(2))
    explained = detector.explain(frame)
    assert explained.index.equals(frame.index[explained["record"]])


def test_frame_with_numbers_as_column_names(tmp_path: Path) -> None:
    from deformer_stream.model.deformer import DEformer, ModelConfig
    from deformer_stream.model.schema import Feature, Schema

    schema = Schema(tuple(Feature(str(i), "continuous") for i in range(3)))
    model = DEformer(schema, ModelConfig(d_model=8, layers=1, heads=1, feedforward=8, mixtures=2, hidden=(8,)))
    model_store.write(tmp_path / "m", model.eval(), Calibration.from_statistics(np.ones(9), "random"), {}, "")
    detector = deformer_stream.load(tmp_path / "m")
    values = np.array([[0.5, np.nan, 1.0], [0.1, 0.2, 0.3]])
    frame = pd.DataFrame(values)
    np.testing.assert_array_equal(detector.score(frame, 0.3)["score"], detector.score(values, 0.3).score)
    filled = detector.impute(frame)
    assert list(filled.columns) == [0, 1, 2]
    assert filled.notna().all(axis=None)
    np.testing.assert_array_equal(filled, detector.impute(values))


def test_a_row_of_a_pandas_frame_is_a_record(detector: Detector) -> None:
    row = make_arrow_table(1).to_pandas().iloc[0]
    record = {name: value for name, value in row.items() if not pd.isna(value)}
    assert repr(detector.score(row)) == repr(detector.score(record))
    assert detector.explain(row) == detector.explain(record)
    assert detector.impute(row) == detector.impute(record)


def test_extra_columns_are_ignored_with_one_warning(detector: Detector) -> None:
    table = make_arrow_table(5)
    frame = table.append_column("id", pa.array(range(5))).append_column("when", pa.array(["now"] * 5))
    for kind in (lambda t: t, pl.from_arrow, lambda t: t.to_pandas()):
        with pytest.warns(UserWarning, match="ignored") as caught:
            scores = detector.score(kind(frame))
        assert [str(warning.message) for warning in caught] == [
            "columns that are not features of the model are ignored: 'id', 'when'"
        ]
        assert caught[0].filename == __file__
        np.testing.assert_array_equal(to_arrow(scores)["score"], detector.score(table)["score"])


def test_missing_columns_are_missing_values(detector: Detector) -> None:
    table = make_arrow_table(5)
    names = ["temperature", "pressure", "state"]
    nulls = {name: table[name] if name in names else pa.nulls(5) for name in SCHEMA.names}
    expected = detector.score(pa.table(nulls))
    assert detector.score(table.select(names)) == expected  # half of the features: no warning
    with pytest.warns(UserWarning, match=r"4 of 6 features have no column and count as not observed: 'vibration'"):
        detector.score(table.select(names[:2]))
    with pytest.raises(InputError, match="no column is a feature of the model"):
        detector.score(pa.table({"id": [1, 2]}))


@pytest.mark.parametrize(
    ("name", "cells", "words"),
    [
        ("temperature", [1.0, "warm", None], ["row 1", "'temperature'", "'warm'"]),
        ("temperature", [1.0, 2.0, np.inf], ["row 2", "'temperature'", "finite"]),
        ("temperature", [True, False, None], ["row 0", "'temperature'", "boolean"]),
        ("temperature", [1.0, [2.0], None], ["row 1", "'temperature'", "list"]),
        ("state", ["run", "x" * 2000, None], ["row 1", "'state'", "2000"]),
        ("state", ["run", {"a": 1}, None], ["row 1", "'state'", "dict"]),
    ],
)
def test_error_names_row_and_column(detector: Detector, name: str, cells: list[Any], words: list[str]) -> None:
    frames: list[Any] = [pd.DataFrame({name: pd.Series(cells, dtype=object), "pressure": 1.0, "load": 1.0})]
    if all(type(cell) is type(cells[0]) or cell is None for cell in cells):
        frames += [pl.DataFrame({name: cells, "pressure": 1.0, "load": 1.0})]
        frames += [pa.table({name: cells, "pressure": [1.0] * 3, "load": [1.0] * 3})]
    for frame in frames:
        for method in (detector.score, detector.explain, detector.impute):
            with pytest.raises(InputError) as caught:
                method(frame)
            assert "\n" not in str(caught.value)
            assert all(word in str(caught.value) for word in words)


def test_column_of_a_wrong_type_is_refused(detector: Detector) -> None:
    for name in ("temperature", "state"):
        with pytest.raises(InputError, match=rf"column '{name}' has the type timestamp\[us\], but the model expects"):
            detector.score(
                make_arrow_table(1).drop_columns(name).append_column(name, pa.array([1], pa.timestamp("us")))
            )
    with pytest.raises(InputError, match=r"lazy frame .*collect"):
        detector.score(pl.LazyFrame({"load": [1.0]}))  # type: ignore[call-overload]
    with pytest.raises(InputError, match="load"):
        detector.score(pd.DataFrame([[1.0, 2.0]], columns=["load", "load"]))


def test_texts_that_spell_numbers_are_numbers(detector: Detector) -> None:
    numbers = pa.table({"temperature": [20.0, 25.5, None], "pressure": [1.0, 1.5, 2.0], "load": [50.0] * 3})
    texts = numbers.set_column(0, "temperature", pa.array(["20", "25.5", None]))
    assert detector.score(texts) == detector.score(numbers)


def test_many_rows_are_scored_in_batches(detector: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_arrow_table(50)
    expected = detector.score(table), detector.explain(table), detector.impute(table)
    monkeypatch.setattr("deformer_stream.library.records.ROWS_PER_BATCH", 7)
    for got, want in zip(
        (detector.score(table), detector.explain(table), detector.impute(table)), expected, strict=True
    ):
        assert got.schema.names == want.schema.names
        for name in want.schema.names:
            if pa.types.is_floating(want[name].type):
                np.testing.assert_allclose(got[name].to_numpy(), want[name].to_numpy(), rtol=1e-4, atol=1e-5)
            else:
                assert got[name].to_pylist() == want[name].to_pylist()


def test_scores_of_a_frame_equal_replay(
    detector: Detector, model_dir: Path, tmp_path: Path, cli: Callable[..., SimpleNamespace]
) -> None:
    table = make_arrow_table(60)
    pq.write_table(table, tmp_path / "wide.parquet")
    out = tmp_path / "records.parquet"
    # Not the order of the calibration: random orders of `replay` depend on record ids, which tables do not have here.
    arguments = ["--model", model_dir, "--alpha", ALPHA, "--order", "schema", "--records", out]
    ended = cli("replay", tmp_path / "wide.parquet", *arguments)
    assert ended.code == 0, ended.err
    replayed = {row["record"]: row for row in pq.read_table(out).to_pylist()}
    scores = detector.score(table, ALPHA, order="schema")
    for row, score in enumerate(scores.to_pylist()):
        expected = replayed[str(row)]
        assert score["p_value"] == pytest.approx(expected["p_value"], abs=1e-12)
        assert score["anomaly_score"] == pytest.approx(expected["anomaly_score"], abs=1e-4)
        assert score["alert_seq"] == (-1 if expected["alert_seq"] is None else expected["alert_seq"])


def replace_calibration(detector: Detector, **changes: Any) -> Detector:
    """Return a detector with the same model and another calibration."""
    calibration = replace(detector.artifact.calibration, **changes)
    return Detector(replace(detector.artifact, calibration=calibration))


def test_order_of_the_readings(detector: Detector) -> None:
    table = make_arrow_table(10)
    reversed_table = table.select(list(reversed(SCHEMA.names)))
    arrived = detector.score(table, order="arrival")
    assert detector.score(reversed_table, order="schema") == arrived
    assert detector.score(reversed_table, order="arrival") != arrived
    assert detector.score(table, order="random") != arrived
    for method in (detector.score, detector.explain):
        with pytest.raises(ConfigError, match="the order of readings 'backwards' is unknown"):
            method(table, order="backwards")  # type: ignore[operator]


@pytest.mark.parametrize("order", ["random", "schema", "arrival"])
def test_default_order_is_that_of_the_calibration(detector: Detector, order: Any) -> None:
    calibrated = replace_calibration(detector, arrival_order=order)
    table = make_arrow_table(20).select(list(reversed(SCHEMA.names)))
    assert calibrated.score(table) == calibrated.score(table, order=order)
    assert calibrated.explain(table) == calibrated.explain(table, order=order)
    dicts = table.to_pylist()
    assert repr(calibrated.score(dicts)) == repr(calibrated.score(dicts, order=order))
    assert calibrated.explain(dicts) == calibrated.explain(dicts, order=order)
    others = {"random", "schema", "arrival"} - {order}
    assert all(calibrated.score(table, order=other) != calibrated.score(table) for other in others)


@pytest.mark.parametrize("order", ["random", "schema"])
def test_order_depends_on_the_record_alone(detector: Detector, order: Any) -> None:
    """Neither the selection of records, nor the order of columns and keys, nor the kind of the table changes it."""
    table = make_arrow_table(40)
    scores = detector.score(table, ALPHA, order=order)
    selected = [31, 5, 17]
    reversed_table = table.select(list(reversed(SCHEMA.names)))
    for some in (table.take(selected), reversed_table.take(selected)):
        got = detector.score(some, ALPHA, order=order)
        assert got["alert_seq"] == scores["alert_seq"].take(selected)
        np.testing.assert_allclose(got["score"], scores["score"].take(selected), rtol=1e-5)
    for row, record in enumerate(reversed_table.to_pylist()[:10]):
        one = detector.score(record, ALPHA, order=order)
        assert one.alert_seq[0] == scores["alert_seq"][row].as_py()
        np.testing.assert_allclose(one.score[0], scores["score"][row].as_py(), rtol=1e-5)


def test_random_orders_differ_between_records(linear: Detector) -> None:
    """The unusual reading comes at each position about equally often."""
    records = [{"x": x, "y": -9.0, "sign": "plus"} for x in np.linspace(0.1, 1.0, 300).tolist()]
    positions = linear.score(records, 0.02, order="random").alert_seq
    assert (np.bincount(positions, minlength=3) > 60).all()


@pytest.mark.parametrize("order", [None, "random", "schema", "arrival"])
def test_every_alert_has_a_suspect_in_the_same_order(detector: Detector, order: Any) -> None:
    frame = make_arrow_table(150).to_pandas()
    scores = detector.score(frame, ALPHA, order=order)
    alerts = frame[scores["alert_seq"] >= 0]
    assert len(alerts) >= 20
    explained = detector.explain(alerts, ALPHA, order=order)
    assert explained.groupby("record")["suspect"].any().all()
    others = detector.explain(frame[scores["alert_seq"] < 0].head(20), ALPHA, order=order)
    assert not others["suspect"].any()


def test_alpha_out_of_reach_is_a_warning(detector: Detector) -> None:
    table = make_arrow_table(3)
    for call in (detector.score, detector.explain):
        for records in (table, table.to_pylist(), table.to_pylist()[0]):
            with pytest.warns(AlphaOutOfReachWarning, match=r"alpha 0\.001: this needs 999 .* has 199") as caught:
                call(records, 0.001)
            assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="alpha is 0"):
        detector.explain(table, 0)


def test_labels_that_training_has_not_seen_are_a_warning(linear: Detector) -> None:
    frame = pd.DataFrame({"x": [0.1, 0.2], "y": [1.2, 1.4], "sign": ["positive", "positive"]})
    pattern = (
        r"feature 'sign' has only labels that training has not seen, such as 'positive', so every record may raise an "
        r"alert; the labels of training are 'minus', 'plus'$"
    )
    for records in (frame, frame.to_dict("records")):
        with pytest.warns(UserWarning, match=pattern) as caught:
            linear.score(records)
        assert len(caught) == 1
    linear.score(frame.head(1))  # one record may be an anomaly
    linear.score(frame.assign(sign=["positive", "plus"]))


def test_a_row_without_readings_has_the_scores_of_an_empty_record(detector: Detector) -> None:
    table = pa.table(
        {name: pa.array([None], pa.float64()) for name in SCHEMA.names[:3]} | {"state": pa.array([None], "string")}
    )
    assert detector.score(table).to_pylist() == [
        {"log_likelihood": 0.0, "anomaly_score": 0.0, "p_value": 1.0, "alert_seq": -1, "score": 0.0}
    ]
    assert detector.score(table.slice(0, 0)).num_rows == 0
    assert detector.explain(table).num_rows == 0


@pytest.mark.parametrize("kind", TO_FRAME)
def test_explanations_of_a_frame_equal_those_of_dicts(detector: Detector, kind: str) -> None:
    table = make_arrow_table(12)
    expected = detector.explain(table.to_pylist(), ALPHA)
    explained = to_arrow(detector.explain(TO_FRAME[kind](table), ALPHA)).to_pylist()
    assert any(row["suspect"] for row in explained)
    assert len(explained) == sum(map(len, expected))
    for row in explained:
        contribution = expected[row["record"]][row["rank"]]
        assert row["feature"] == contribution.feature
        assert contribution.value == (row["value"] if row["label"] is None else row["label"])
        assert row["suspect"] == contribution.suspect
        assert row["surprise"] == pytest.approx(contribution.surprise, abs=1e-4)
        median = row["median"] if row["expected_label"] is None else row["expected_label"]
        assert contribution.expected.median == (median if isinstance(median, str) else pytest.approx(median, rel=1e-4))


@pytest.mark.parametrize("kind", TO_FRAME)
def test_imputed_frame_has_no_gaps(detector: Detector, kind: str) -> None:
    table = make_arrow_table(20)
    frame = TO_FRAME[kind](table)
    filled = detector.impute(frame)
    assert type(filled) is (pa.Table if kind == "capsule" else type(frame))
    expected = detector.impute(table.to_pylist())
    assert sum(map(len, expected)) > 5
    columns = to_arrow(filled)
    assert columns.schema.names == table.schema.names
    for row, (old, new) in enumerate(zip(table.to_pylist(), columns.to_pylist(), strict=True)):
        for name in SCHEMA.names:
            value = old[name]
            if value is None and name != "load":  # a context feature is never filled
                value = expected[row][name].value
            assert new[name] == (value if value is None or isinstance(value, str) else pytest.approx(value, rel=1e-5))


def test_imputation_adds_bounds_and_missing_columns(linear: Detector) -> None:
    frame = pd.DataFrame({"x": [0.5, None], "y": [2.0, 1.0], "note": ["a", "b"]}, index=["p", "q"])
    with pytest.warns(UserWarning, match="'note'"):
        filled = linear.impute(frame, bounds=True)
    assert list(filled.columns) == ["x", "y", "note", "sign", "x__low", "x__high", "y__low", "y__high"]
    assert filled.loc["p", "x"] == 0.5
    assert filled["x__low"].isna().tolist() == [True, False]
    assert filled.loc["q", "x__low"] < filled.loc["q", "x"] < filled.loc["q", "x__high"]
    assert filled["y__low"].isna().all()
    assert filled["sign"].tolist()[0] == "plus"
    assert filled["note"].tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="bounds=True"):
        linear.impute([{"x": 1.0}], bounds=True)  # type: ignore[call-overload]


def test_imputed_columns_keep_their_types(linear: Detector) -> None:
    frame = pl.DataFrame({"x": [1, None, 2], "y": [3.0, 1.0, None]}, schema={"x": pl.Int64, "y": pl.Float32})
    filled = linear.impute(frame)
    assert filled.schema["x"] == pl.Int64
    assert filled.schema["y"] == pl.Float32
    assert filled["x"].to_list() == [1, 0, 2]
    array = np.array([[0.5, np.nan, np.nan]])
    assert linear.impute(array[:, :2], columns=["x", "y"])[0, 1] == pytest.approx(2.0, abs=0.5)
    assert np.isnan(array[0, 1])  # the input is unchanged


def test_quantiles_of_a_frame(linear: Detector) -> None:
    frame = pl.DataFrame({"x": [0.5, None], "y": [None, 1.0]})
    found = linear.quantiles(frame, (0.05, 0.95))
    assert found.columns == ["x__q0.05", "x__q0.95", "y__q0.05", "y__q0.95"]
    assert found["x__q0.05"].is_null().to_list() == [True, False]
    expected = linear.quantiles({"x": 0.5}, (0.05, 0.95))["y"]
    assert (found["y__q0.05"][0], found["y__q0.95"][0]) == pytest.approx(expected, rel=1e-5)
    array = linear.quantiles(frame.to_numpy(), (0.05, 0.95), columns=["x", "y"])
    assert array.shape == (2, 2, 2)
    np.testing.assert_allclose(array[:, 0, 1], expected, rtol=1e-5)
    assert np.isnan(array[:, 0, 0]).all()


def test_completions_of_a_frame(linear: Detector) -> None:
    frame = pd.DataFrame({"x": [0.5, np.nan], "y": [np.nan, 1.0]}, index=["p", "q"])
    drawn = linear.complete(frame, draws=50, seed=1)
    assert list(drawn.columns) == ["x", "y", "sign", "draw"]
    assert drawn.index.tolist() == ["p"] * 50 + ["q"] * 50
    assert drawn["draw"].tolist() == list(range(50)) * 2
    assert (drawn.loc["p", "x"] == 0.5).all()
    assert drawn.loc["p", "y"].nunique() > 40
    assert np.median(drawn.loc["p", "y"]) == pytest.approx(2.0, abs=0.2)
    pd.testing.assert_frame_equal(drawn, linear.complete(frame, draws=50, seed=1))
    array = linear.complete(frame.to_numpy(), draws=3, columns=["x", "y"])
    assert array.shape == (6, 2)
    assert not np.isnan(array).any()


@pytest.mark.filterwarnings("ignore::UserWarning")  # short trainings are reported as such
@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "dicts", "array", "file"])
def test_training_on_all_kinds_of_tables_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    values = draw_linear_records(200, 1)
    table = pa.table({"x": values[:, 0], "y": values[:, 1], "sign": np.where(values[:, 2] > 0, "plus", "minus")})
    options = {"preset": "tiny", "epochs": 1, "seed": 3}
    pq.write_table(table, tmp_path / "table.parquet")
    expected = deformer_stream.train(tmp_path / "table.parquet", **options)
    records: Any = {
        "pandas": table.to_pandas().set_index(np.arange(200) * 7),  # the index is no feature
        "polars": pl.from_arrow(table),
        "arrow": table,
        "dicts": table.to_pylist(),
        "array": np.column_stack([np.array(column.to_pylist(), object) for column in table.columns]),
        "file": [str(tmp_path / "table.parquet")],
    }[kind]
    columns = table.schema.names if kind == "array" else None
    assert deformer_stream.train(records, columns=columns, **options).fingerprint == expected.fingerprint


@pytest.mark.filterwarnings("ignore::UserWarning")  # short trainings are reported as such
def test_training_without_a_directory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    detector = deformer_stream.train(draw_linear_records(60, 1), preset="tiny", epochs=1)
    assert detector.schema.names == ("x0", "x1", "x2")
    assert detector.artifact.directory.is_relative_to(tmp_path)
    assert repr(detector).endswith(f"model {detector.fingerprint})")  # the directory is not for the user
    restored = pickle.loads(pickle.dumps(detector))
    values = draw_linear_records(5, 2)
    scores = detector.score(values)
    del detector
    assert len(list(tmp_path.iterdir())) == 1  # that of the restored detector
    np.testing.assert_array_equal(restored.score(values).score, scores.score)
    restored.save(tmp_path / "saved")
    del restored
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    np.testing.assert_array_equal(deformer_stream.load(tmp_path / "saved").score(values).score, scores.score)


@pytest.mark.filterwarnings("ignore::UserWarning")  # short trainings are reported as such
def test_options_of_reading_hold_for_tables_in_memory() -> None:
    values = draw_linear_records(120, 1)
    table = pa.table({"x": values[:, 0], "y": values[:, 1], "site": ["A", "B"] * 60})
    schema = pa.schema([pa.field("x", pa.float64(), metadata={"unit": "bar"}), *list(table.schema)[1:]])
    options = {"preset": "tiny", "epochs": 1, "where": "site = 'A'"}
    _, output = run_training(table.cast(schema), None, options)
    assert len(output.data.split) == 60
    assert output.data.schema.features[0].unit == "bar"
    texts = table.append_column("time", pa.array([f"2025-03-{1 + i // 24:02} {i % 24:02}:00:00" for i in range(120)]))
    windows = {"preset": "tiny", "epochs": 1, "window": "6h", "timezone": "Europe/Berlin"}
    _, output = run_training(texts.append_column("device", pa.array(["d"] * 120)), None, windows)
    assert len(output.data.split) == 21  # hours of Berlin: the first window begins an hour before midnight of UTC


@pytest.mark.filterwarnings("ignore::UserWarning")  # short trainings are reported as such
def test_training_writes_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = draw_linear_records(60, 1)
    detector = deformer_stream.train(values, tmp_path / "model", preset="tiny", epochs=1, exclude=["x2"], verbose=True)
    assert detector.schema.names == ("x0", "x1")
    assert detector.artifact.directory == tmp_path / "model"
    assert "calibrating" in capsys.readouterr().out
    assert deformer_stream.load(tmp_path / "model").fingerprint == detector.fingerprint


def test_training_refuses_what_it_cannot_use() -> None:
    values = draw_linear_records(60, 1)
    with pytest.raises(TypeError, match="unknown option 'presett'; did you mean 'preset'"):
        deformer_stream.train(values, presett="tiny")
    with pytest.raises(ConfigError, match="--preset"):
        deformer_stream.train(values, preset="huge")
    with pytest.raises(InputError, match="type int"):
        deformer_stream.train(5)
    for records in (pd.DataFrame(values), pd.DataFrame(values).to_dict("records"), "table.parquet"):
        with pytest.raises(InputError, match=r"columns names the columns of a NumPy array, .* leave out the argument"):
            deformer_stream.train(records, columns=["x", "y", "sign"])
    with pytest.raises(InputError, match=r"shape \(60,\), but a matrix \(rows, features\) is needed; .*reshape"):
        deformer_stream.train(values[:, 0])
    with pytest.raises(InputError, match="few"):
        deformer_stream.train(values[:5], preset="tiny", epochs=1)


def test_a_column_without_a_name_is_an_index() -> None:
    values = pl.DataFrame(draw_linear_records(60, 1), ["x", "y", "sign"])
    table = pl.DataFrame({"": [f"row {i % 7}" for i in range(len(values))]}).hstack(values)
    detector, _ = run_training(table, None, {"preset": "tiny", "epochs": 1, "exclude": ["sign"]})
    assert detector.schema.names == ("x", "y")
    assert detector.score(table.drop("sign"), alpha=ALPHA).shape == (60, 5)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"\ud800": 1.0}] * 60, "column name '\\ud800' is not valid Unicode"),
        ([{"state": "\ud800"}] * 60, "row 0, column 'state' cannot be accepted: the value '\\ud800' is not valid Uni"),
    ],
)
def test_training_refuses_texts_that_are_not_unicode(records: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        deformer_stream.train(records)


@pytest.mark.parametrize(("factor", "value"), [(1.0, 1e308), (1e300, 1e300)])
def test_extreme_numbers_give_no_warnings_of_numpy(factor: float, value: float) -> None:
    values = np.random.default_rng(0).normal(size=(120, 2)) * [factor, 1.0]
    values[5, 0] = value
    detector, _ = run_training(values, None, {"preset": "tiny", "epochs": 1})
    assert detector.schema.features[0].scale == pytest.approx(factor, rel=0.3)
    assert np.isfinite(detector.score(values, alpha=ALPHA).p_value).all()
    assert np.isfinite(detector.impute([{"x1": 0.5}])[0]["x0"].value)


@pytest.mark.parametrize("fails", [False, True])
def test_training_changes_neither_the_random_state_nor_the_environment(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    from trainer import job

    train = job.train

    def train_with_compiler(*arguments: Any, **options: Any) -> Any:
        output = train(*arguments, **options)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "cache"  # as the compiler of PyTorch does
        os.environ["TRITON_CACHE_DIR"] = "other cache"
        if fails:
            raise InputError("failed")
        return output

    monkeypatch.setattr(job, "train", train_with_compiler)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    values, options, fingerprints = draw_linear_records(60, 1), {"preset": "tiny", "epochs": 1}, set()
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        with pytest.raises(InputError) if fails else nullcontext():
            fingerprints.add(run_training(values, None, options)[0].fingerprint)
        assert torch.equal(torch.rand(3), expected)
        assert torch.initial_seed() == seed
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert len(fingerprints) == int(not fails)


def test_columns_that_are_left_out_for_their_values_are_a_warning() -> None:
    table = pd.DataFrame(draw_linear_records(60, 1)[:, :2], columns=["x", "y"])
    table = table.assign(id=range(60), note=[f"note {i}" for i in range(60)])
    table["time"] = pd.date_range("2026-01-01", periods=60)
    options: dict[str, Any] = {"preset": "tiny", "epochs": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deformer_stream.train(table, **options)
        deformer_stream.train(table, exclude=["id", "note"], **options)
    (message,) = [str(w.message) for w in caught if "columns are not used" in str(w.message)]
    assert "'id' (all 37 values differ" in message
    assert "'note' (most texts occur once" in message
    assert message.endswith("; exclude=[...] leaves them out without this warning")
    assert "'time'" not in message


def test_warnings_of_training_are_warnings_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import job

    train = job.train

    def train_badly(*arguments: Any, **options: Any) -> Any:
        output = train(*arguments, **options)
        output.summary["warnings"] = [{"code": "few_steps", "message": "the model has hardly learned"}]
        return output

    monkeypatch.setattr(job, "train", train_badly)
    with pytest.warns(UserWarning, match="the model has hardly learned"):
        deformer_stream.train(draw_linear_records(60, 1), preset="tiny", epochs=1)


def test_texts_that_replace_others_are_not_cut() -> None:
    matrix = read_array(np.array([["run", "1.0"], ["", "2.0"]]), ("state", "x"))
    assert matrix is not None
    replaced = matrix.replace_columns({"state": pa.array(["run", "standby"]), "x": pa.array([1.25, 12.34567])})
    assert replaced.tolist() == [["run", "1.25"], ["standby", "12.34567"]]
    rows = read_array(np.array([("run", 1.0), ("", 2.0)], [("state", "U3"), ("x", "f8")]), None)
    assert rows is not None
    assert rows.replace_columns({"state": pa.array(["run", "standby"])})["state"].tolist() == ["run", "standby"]
