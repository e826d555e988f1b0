"""Imputation at given times with models of irregular readings, by the command `impute` and in the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import deformer_stream
from connectors.files import reading_imputation
from deformer_stream import model_store
from deformer_stream.engine.irregular_imputation import ObservedReadings, Targets, impute_at_times
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.library.results import Imputation
from deformer_stream.model.windows import Window
from tests.commands import RunCommand, assert_command_failed
from tests.irregular_tables import START, write_irregular_model
from tests.model.irregular_models import SCHEMA


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_irregular_model(tmp_path / "m")


def make_readings(num_rows: int = 90, id_column: str = "record") -> list[dict[str, Any]]:
    """Return readings of three records in random order of time; about every third row requests its value."""
    rng = np.random.default_rng(6)
    rows: list[dict[str, Any]] = []
    for i in range(num_rows):
        code = int(rng.integers(len(SCHEMA)))
        feature = SCHEMA.features[code]
        is_request = bool(rng.random() < 0.33)
        label = None if is_request or not feature.labels else str(rng.choice(["off", "on"]))
        value = None if is_request or feature.labels else float(rng.normal())
        time = START + float(rng.integers(0, 3000))
        row = {id_column: f"r{i % 3}", "feature": feature.name, "value": value, "label": label, "time": time, "note": i}
        rows.append(row)
    return rows


def compute_expected(model_dir: Path, rows: list[dict[str, Any]], window: float | None = None) -> list[Any]:
    """Return median, bounds, mean and mode of each request by the function of the engine, None for other rows."""
    model = model_store.read(model_dir).model
    name = "device" if window else "record"
    keys = [(row[name], row["time"] // window if window else 0) for row in rows]
    records = sorted(set(keys))
    index = np.array([records.index(key) for key in keys])
    codes = np.array([SCHEMA.code_by_name[row["feature"]] for row in rows])
    times = np.array([row["time"] for row in rows])
    is_observed = np.array([row["value"] is not None or row["label"] is not None for row in rows])
    values = np.array(
        [
            SCHEMA.features[code].labels.index(row["label"]) if row["label"] else row["value"] or 0.0
            for row, code in zip(rows, codes, strict=True)
        ]
    )
    origins = [
        record[1] * window if window else times[(index == i) & is_observed].min() for i, record in enumerate(records)
    ]
    ages = times - np.array(origins)[index]
    own = is_observed
    observed = ObservedReadings.sort(index[own], codes[own], values[own], ages[own], len(records))
    imputed = impute_at_times(model, observed, Targets(index[~own], codes[~own], ages[~own]), 0.8)
    expected: list[Any] = [None] * len(rows)
    statistics = np.stack([imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode], 1)
    for row, numbers in zip(np.flatnonzero(~own).tolist(), statistics.tolist(), strict=True):
        expected[row] = numbers
    return expected


def assert_filled(rows: list[dict[str, Any]], filled: list[dict[str, Any]], expected: list[Any]) -> None:
    assert len(filled) == len(rows)
    for before, after, numbers in zip(rows, filled, expected, strict=True):
        assert {key: after[key] for key in ("feature", "note")} == {key: before[key] for key in ("feature", "note")}
        if numbers is None:  # an observed reading stays
            assert (after["value"], after["label"]) == (before["value"], before["label"] or None)
            assert after["value__low"] is None
        elif before["feature"] == "mode":
            assert after["label"] == ("off", "on")[int(numbers[0])]
            assert after["value"] is after["value__low"] is None
        else:
            actual = [after[name] for name in ("value", "value__low", "value__high")]
            assert actual == pytest.approx(numbers[:3], rel=1e-4, abs=1e-4)


def test_impute_fills_rows_without_values(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    rows = make_readings()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    options = ("--interval", "0.8", "--quantiles", "0.5,0.1")
    ended = cli("impute", tmp_path / "in.parquet", "--model", model_dir, "--output", out, *options)
    num_requests = sum(row["value"] is None and row["label"] is None for row in rows)
    assert ended.lines == [f"{num_requests} missing values filled in 90 rows; the table was written to {out}"]
    filled = pq.read_table(out)
    added = ["value__low", "value__high", "value__q0.1", "value__q0.5"]
    assert filled.schema.names == ["record", "feature", "value", *added, "label", "time", "note"]
    assert_filled(rows, filled.to_pylist(), compute_expected(model_dir, rows))
    lows, tenths, medians = (
        np.array(filled[name].to_pylist(), np.float64) for name in ("value__low", "value__q0.1", "value__q0.5")
    )
    np.testing.assert_array_equal(lows, tenths)
    assert (medians[~np.isnan(medians)] > lows[~np.isnan(medians)]).all()
    assert not list(tmp_path.glob(".impute*"))


def test_impute_reads_csv_files_and_chunks_of_records(
    cli: RunCommand, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are divided over two files, and their readings over several chunks and batches."""
    monkeypatch.setattr(reading_imputation, "CHUNK_ROWS", 7)
    monkeypatch.setattr(reading_imputation, "ROWS_PER_BATCH", 8)
    rows = make_readings()
    for name, part in (("a.csv", rows[:40]), ("b.csv", rows[40:])):
        pa.csv.write_csv(pa.Table.from_pylist(part, schema=pa.Table.from_pylist(rows).schema), tmp_path / name)
    out = tmp_path / "out.parquet"
    inputs = [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert cli("impute", *inputs, "--model", model_dir, "--output", out, "--interval", "0.8").code == 0
    assert_filled(rows, pq.read_table(out).to_pylist(), compute_expected(model_dir, rows))


def test_impute_of_windows_counts_ages_from_their_start(cli: RunCommand, tmp_path: Path) -> None:
    model_dir = write_irregular_model(tmp_path / "m", Window(600_000_000, 1))
    rows = [{**row, "clock": row["time"]} for row in make_readings(id_column="device")]
    table = pa.Table.from_pylist(rows).drop_columns(["time"])
    pq.write_table(table, tmp_path / "in.parquet")
    options = ("--interval", "0.8", "--time-column", "clock")
    ended = cli("impute", tmp_path / "in.parquet", "--model", model_dir, "--output", tmp_path / "out.parquet", *options)
    assert ended.code == 0, ended.lines
    filled = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert_filled(rows, filled, compute_expected(model_dir, rows, 600.0))


def test_impute_writes_joint_draws(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    rows = make_readings(30)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    outputs = []
    for seed in ("1", "1", "2"):
        out = tmp_path / "out.parquet"
        options = ("--draws", "3", "--seed", seed)
        assert cli("impute", tmp_path / "in.parquet", "--model", model_dir, "--output", out, *options).code == 0
        outputs.append(pq.read_table(out).to_pylist())
    assert outputs[0] == outputs[1] != outputs[2]
    assert [row["draw"] for row in outputs[0]] == [0, 1, 2] * 30
    assert [row["note"] for row in outputs[0]] == np.repeat(np.arange(30), 3).tolist()
    for i, row in enumerate(rows):
        copies = outputs[0][3 * i : 3 * i + 3]
        if row["value"] is not None or row["label"] is not None:
            assert {copy["value"] for copy in copies} == {row["value"]}
        elif row["feature"] != "mode":
            assert len({copy["value"] for copy in copies}) == 3


def test_rows_that_cannot_be_used_stay_as_they_are(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    rows = make_readings(20)
    rows[3] |= {"feature": "sensor1", "value": None, "label": None, "time": None}
    rows[5] |= {"feature": "nobody knows it", "value": 4.0}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    ended = cli("impute", tmp_path / "in.parquet", "--model", model_dir, "--output", out)
    assert ended.code == 0
    assert "rows_without_time_not_used" in ended.lines[0]
    assert "nobody knows it" in ended.lines[1]
    filled = pq.read_table(out).to_pylist()
    assert (filled[3]["value"], filled[5]["value"]) == (None, 4.0)


def test_refusals_are_one_line(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    words = ("impute", path, "--model", model_dir, "--output", out)
    table = pa.Table.from_pylist(make_readings())
    for wrong, message in (
        (
            table.drop_columns(["time"]),
            "imputation needs a long table with the columns record, feature, value and time",
        ),
        (pa.table({"sensor0": [1.0, None]}), "the model is for irregular readings, so imputation needs a long table"),
        (table.append_column("value__low", table["value"]), "imputation adds a column 'value__low'"),
        (table.drop_columns(["label"]), "holds numbers, so the label"),
    ):
        pq.write_table(wrong, path)
        assert_command_failed(cli(*words), 3, message)
        assert not out.exists()
        assert not list(tmp_path.glob(".impute*"))


def test_tables_must_fit_each_other(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    first, second, out = (tmp_path / name for name in ("a.parquet", "b.parquet", "out.parquet"))
    table = pa.Table.from_pylist(make_readings())
    pq.write_table(table, first)
    words = ("impute", first, second, "--model", model_dir, "--output", out)
    place = table.schema.get_field_index("note")
    for wrong, message in (
        (table.drop_columns(["note"]), "have different columns (note); impute them one by one"),
        (
            table.set_column(place, "note", pa.array(["x"] * len(table))),
            "b.parquet: column 'note' has the type string, but another table has int64; convert the columns",
        ),
    ):
        pq.write_table(wrong, second)
        assert_command_failed(cli(*words), 3, message)
        assert not out.exists()


def test_library_fills_data_frames(model_dir: Path) -> None:
    rows = make_readings()
    detector = deformer_stream.load(model_dir)
    expected = compute_expected(model_dir, rows)
    for frame in (pd.DataFrame(rows), pa.Table.from_pylist(rows)):
        filled = detector.impute(frame, 0.8, bounds=True)
        assert isinstance(filled, type(frame))
        records = filled.to_pylist() if isinstance(filled, pa.Table) else pa.Table.from_pandas(filled).to_pylist()
        assert_filled(rows, records, expected)
        quantiles = detector.quantiles(frame, [0.1, 0.9])
        assert isinstance(quantiles, type(frame))
        low = np.array(quantiles["value__q0.1"].to_numpy(), np.float64)
        np.testing.assert_allclose(low, np.array(filled["value__low"].to_numpy(), np.float64), rtol=1e-4, atol=1e-4)
        drawn = detector.complete(frame, draws=2, seed=3)
        assert len(drawn) == 180


def test_library_fills_dicts(model_dir: Path) -> None:
    rows = make_readings()
    detector = deformer_stream.load(model_dir)
    expected = compute_expected(model_dir, rows)
    imputed: Any = detector.impute(rows, 0.8)
    quantiles: Any = detector.quantiles(rows, [0.1])
    for row, imputation, quantile, numbers in zip(rows, imputed, quantiles, expected, strict=True):
        assert (imputation is None) == (numbers is None)
        if isinstance(imputation, Imputation) and row["feature"] == "mode":
            assert imputation.value in ("off", "on")
            assert quantile is None
        elif isinstance(imputation, Imputation):
            own = [getattr(imputation, name) for name in ("value", "low", "high", "mean", "mode")]
            assert own == pytest.approx(numbers, rel=1e-4, abs=1e-4)
            assert quantile == pytest.approx((numbers[1],), rel=1e-4, abs=1e-4)
    drawn: Any = detector.complete(rows, draws=2, seed=3)
    assert [len(copy) for copy in drawn] == [90, 90]
    for copy in drawn:
        for before, after in zip(rows, copy, strict=True):
            assert after["value"] is not None or after["label"] is not None
            if before["value"] is not None:
                assert after == before
    assert drawn == detector.complete(rows, draws=2, seed=3)
    assert drawn[0] != drawn[1]


def test_readings_without_records_belong_to_one(model_dir: Path) -> None:
    rows = [{"feature": f"sensor{i % 2}", "value": 0.1 * i, "time": START + 60.0 * i} for i in range(8)]
    request = {"feature": "sensor0", "value": None, "time": START + 90.0}
    detector = deformer_stream.load(model_dir)
    imputed: Any = detector.impute([*rows, request])
    named: Any = detector.impute([{**row, "record": "r"} for row in [*rows, request]])
    assert imputed[:8] == [None] * 8
    assert imputed[8] == named[8]
    # A reading after the request changes the estimate.
    changed: Any = detector.impute([*rows[:-1], {**rows[-1], "value": 9.0}, request])
    assert changed[8] != imputed[8]


def test_library_refuses_rows_in_one_line(model_dir: Path) -> None:
    detector = deformer_stream.load(model_dir)
    reading = {"feature": "sensor0", "value": None, "time": START}
    for call in (detector.impute, detector.complete, lambda rows: detector.quantiles(rows, [0.5])):
        with pytest.raises(ConfigError, match="the model is for irregular readings, so values are imputed at given"):
            call([{"sensor0": 1.0}])
        with pytest.raises(InputError, match=r"row 1 cannot be accepted: .*sensor9"):
            call([reading, {**reading, "feature": "sensor9"}])
        with pytest.raises(InputError, match="row 1 cannot be accepted: it has no time"):
            call([reading, {**reading, "time": None}])
    with pytest.raises(ValueError, match="bounds=True adds columns"):
        detector.impute([reading], bounds=True)  # type: ignore[call-overload]


def test_devices_are_for_models_of_windows(model_dir: Path) -> None:
    rows = [{"device": "a", "feature": "sensor0", "value": 1.0, "time": START}]
    with pytest.raises(InputError, match="the readings name a device, but the records"):
        deformer_stream.load(model_dir).impute(rows)
