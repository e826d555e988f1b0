"""Tables of irregular readings: no reading is lost, each keeps its time, and records are divided into blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.early import compute_false_alarm_bounds
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import EventBatch, RejectionReason
from deformer_stream.errors import ConfigError
from deformer_stream.model.bounded_context import select_contexts
from deformer_stream.model.deformer import DEformer
from tests.trainer.irregular import CONFIG, START, divided, fleet, prepared_irregular
from tests.trainer.tables import correlated, prepared, write
from trainer import irregular_table
from trainer.data import EMPTY_RECORDS, DataOptions, Split
from trainer.irregular_calibration import create_event_batches, score_irregular_records
from trainer.irregular_table import NO_VALUE, REPEATED, UNKNOWN, UNTIMED, IrregularTable, prepare_irregular_table


def readings_of(table: IrregularTable, record: int) -> list[tuple[str, float, float]]:
    own = slice(table.offsets[record], table.offsets[record + 1])
    codes, values = np.asarray(table.codes[own]), np.asarray(table.values[own], np.float64)
    names = [table.schema.names[code] for code in codes]
    raw = table.schema.denormalise(codes, values).round(4)
    return list(zip(names, raw.tolist(), np.asarray(table.ages[own]).round(4).tolist(), strict=True))


def long_table(first_record: list[tuple[str, float | None, float | None]]) -> dict[str, Any]:
    """Return a table whose first record has the given readings (sensor, value, age); 29 others have two each."""
    rng = np.random.default_rng(0)
    rows = [("r0", *reading) for reading in first_record]
    for record in range(1, 30):
        rows += [(f"r{record}", "x", rng.normal(), 0.0), (f"r{record}", "y", rng.normal(), 60.0)]
    record_ids, sensors, values, ages = zip(*rows, strict=True)
    times = [None if age is None else START + age for age in ages]
    return {
        "record": list(record_ids),
        "feature": list(sensors),
        "value": pa.array(values, pa.float64()),
        "time": pa.array(times, pa.float64()),
    }


def test_no_reading_is_left_out_except_repetitions_nulls_and_readings_without_time(tmp_path: Path) -> None:
    first = [
        ("x", 1.0, 30.0),
        ("y", 2.0, 10.0),  # late: it comes first in the order of time
        ("x", 1.0, 30.0),  # delivered twice
        ("x", 1.5, 30.0),  # another value at the same time
        ("x", 1.0, 40.0),  # the same value later
        ("y", None, 50.0),
        ("y", 3.0, None),
        ("y", np.inf, 60.0),
    ]
    table = prepared_irregular(tmp_path, long_table(first))
    assert readings_of(table, 0) == [("y", 2.0, 0.0), ("x", 1.0, 20.0), ("x", 1.5, 20.0), ("x", 1.0, 30.0)]
    assert readings_of(table, 1)[1][2] == 60.0
    assert table.skipped_by_reason == {REPEATED: 1, NO_VALUE: 2, UNTIMED: 1}
    assert table.origins[0] == 1e6 * (START + 10)
    assert table.num_readings.tolist() == [4] + 29 * [2]
    assert set(np.unique(table.split)) == {Split.TRAIN, Split.VALIDATION, Split.CALIBRATION}


def test_readings_of_sensors_that_are_no_features_are_counted(tmp_path: Path) -> None:
    columns = long_table([("x", 1.0, 0.0), ("excluded", 5.0, 0.0), ("excluded", None, 1.0)])
    columns["value"] = columns["value"].to_pylist()
    columns["time"] = columns["time"].to_pylist()
    split = prepared_irregular(tmp_path, columns, exclude=("excluded",)).split
    held_out = [record for record in range(1, 30) if split[record] != Split.TRAIN]
    for record in held_out:  # the sensor does not occur in training records
        for name, cell in zip(columns, (f"r{record}", "rare", 1.0 + record, START), strict=True):
            columns[name].append(cell)
    table = prepared_irregular(tmp_path, columns, exclude=("excluded",))
    assert table.schema.names == ("x", "y")
    assert table.skipped_by_reason == {UNKNOWN: len(held_out)}  # without those that the user has excluded


def test_values_that_differ_only_beyond_float32_are_no_repetitions(tmp_path: Path) -> None:
    """A stream compares values in float64, so it accepts all but the last of these readings."""
    close = [1.0, 1.0 + 1e-12, 1.0 + 2e-12]
    table = prepared_irregular(tmp_path, long_table([*(("x", value, 0.0) for value in close), ("x", close[1], 0.0)]))
    assert table.num_readings[0] == 3
    assert len(set(table.values[:3].tolist())) == 1
    assert table.skipped_by_reason == {REPEATED: 1}
    model = DEformer(table.schema, replace(CONFIG, context_recent=3, context_block=4)).eval()
    engine = Engine(model, Calibration(np.empty(0), "arrival"), fingerprint="", alpha=(), effort="off")
    for batch in create_event_batches(table, np.arange(30)):
        assert engine.handle(batch, now=0).rejections == []
    assert engine.finish().closed.num_readings.sum() == table.offsets[-1]


@pytest.mark.parametrize("chunk", [7, 100, 10**6])
def test_chunks_do_not_change_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    columns = fleet(np.random.default_rng(1))
    order = np.random.default_rng(2).permutation(len(columns["record"]))
    shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
    (tmp_path / "whole").mkdir()
    expected = prepared_irregular(tmp_path / "whole", shuffled)
    monkeypatch.setattr(irregular_table, "CHUNK_READINGS", chunk)
    actual = prepared_irregular(tmp_path, shuffled)
    assert actual.fingerprint == expected.fingerprint
    assert np.array_equal(actual.origins, expected.origins)
    assert all((np.diff(actual.ages[a:b]) >= 0).all() for a, b in zip(actual.offsets, actual.offsets[1:], strict=False))


def test_time_scales_are_the_duration_of_records_and_a_small_interval(tmp_path: Path) -> None:
    times = prepared_irregular(tmp_path, fleet(np.random.default_rng(3))).schema.reading_times
    assert times is not None
    assert 3.3e9 < times.duration <= 3.6e9
    assert 0.1e6 <= times.resolution < 60e6


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_windows_begin_at_multiples_of_their_width(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(4)
    times = np.sort(rng.uniform(0, 40 * 600, 500)).round(2) + 1_599_999_600.0  # a multiple of 600
    columns: dict[str, Any]
    if layout == "long":
        columns = {"device": ["p"] * 500, "feature": ["x", "y"] * 250, "value": rng.normal(size=500), "time": times}
    else:
        stamps = pa.array((1e6 * times).astype(np.int64), pa.timestamp("us", "UTC"))
        columns = {"time": stamps, "x": rng.normal(size=500), "y": rng.normal(size=500)}
    from deformer_stream.model.windows import Window

    table = prepared_irregular(tmp_path, columns, window=Window(600_000_000))
    assert (table.origins % 600_000_000 == 0).all()
    assert 0 <= table.ages.min() <= table.ages.max() < 600
    assert table.offsets[-1] == (500 if layout == "long" else 1000)
    assert table.schema.window == Window(600_000_000)
    assert table.schema.reading_times is not None
    assert table.schema.reading_times.duration == 600_000_000


def test_records_without_a_usable_reading_are_counted_and_not_selected(tmp_path: Path) -> None:
    columns = long_table([("x", 1.0, 0.0), ("x", 2.0, 5.0)])
    for record in range(30, 60):
        value, time = (None, START) if record % 2 else (1.0, None)
        for name, cell in zip(columns, (f"r{record}", "x", value, time), strict=True):
            cells = columns[name]
            columns[name] = [*(cells if isinstance(cells, list) else cells.to_pylist()), cell]
    table = prepared_irregular(tmp_path, columns)
    assert len(table.split) == 60
    selected = [table.select_rows(part) for part in (Split.TRAIN, Split.VALIDATION, Split.CALIBRATION)]
    assert sorted(np.concatenate(selected).tolist()) == list(range(30))
    assert table.skipped_by_reason[EMPTY_RECORDS] == 30
    assert sum(table.summarize()["rows"].values()) == 30


def test_records_without_times_are_refused(tmp_path: Path) -> None:
    columns = {name: values for name, values in long_table([]).items() if name != "time"}
    with pytest.raises(ConfigError, match="does not contain the time of each reading"):
        prepared_irregular(tmp_path, columns)
    x, _ = correlated(np.random.default_rng(0), 50)
    with pytest.raises(ConfigError, match="--window"):
        prepared_irregular(tmp_path, {"a": x[:, 0], "b": x[:, 1]})


def test_features_are_those_of_a_table_of_other_records(tmp_path: Path) -> None:
    columns = {name: pa.array(values) for name, values in fleet(np.random.default_rng(5)).items()}
    dense = prepared(tmp_path, columns)
    irregular = prepare_irregular_table([write(tmp_path / "t.parquet", columns)], DataOptions(), tmp_path / "work")
    assert irregular.schema.features == dense.schema.features
    assert irregular.split.tolist() == dense.split.tolist()


@pytest.mark.parametrize(("recent", "block"), [(0, 1), (0, 7), (5, 8), (3, 1), (40, 4)])
def test_contexts_of_blocks_are_those_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int, block: int
) -> None:
    table = prepared_irregular(tmp_path, fleet(np.random.default_rng(6), 40))
    monkeypatch.setattr(irregular_table, "CHUNK_READINGS", 300)
    blocks = divided(tmp_path, table, recent, block).blocks
    assert blocks.lengths.sum() == table.offsets[-1]
    for index in range(len(blocks)):
        first = table.offsets[blocks.records[index]]
        before = np.asarray(table.codes[first : blocks.starts[index]])
        expected, _ = select_contexts(before, np.array([0, len(before)]), len(table.schema), recent)
        older = blocks.context_readings[slice(*blocks.context_offsets[index : index + 2])]
        latest = np.arange(blocks.starts[index] - blocks.num_recent[index], blocks.starts[index])
        assert np.concatenate([older, latest]).tolist() == (first + expected).tolist()
        if block > 1:
            assert blocks.lengths[index] <= block


def late_log(rng: np.random.Generator, mean_delay: float = 60.0, **options: int) -> dict[str, Any]:
    """Return the readings of a fleet in the order in which they arrive, after a delay of each, all records together."""
    columns = fleet(rng, **options)
    ages = (np.array(columns["time"]) - START) % 7200  # records begin every two hours
    order = np.argsort(ages + rng.exponential(mean_delay, len(ages)), kind="stable")
    return {name: [values[i] for i in order] for name, values in columns.items()}


def test_rows_in_order_of_arrival_keep_their_order(tmp_path: Path) -> None:
    first = [("x", 1.0, 30.0), ("x", 1.0, 30.0), ("y", 2.0, 28.0), ("x", 1.5, 60.0), ("y", 2.5, 59.0)]
    table = prepared_irregular(tmp_path, long_table(first))
    assert table.order.name == "arrival"
    assert table.order.late_share == pytest.approx(2 / 63)
    assert table.order.mean_lateness == pytest.approx((2 + 1) / 2 / 32)  # the record lasts 32 seconds
    assert readings_of(table, 0) == [("x", 1.0, 0.0), ("y", 2.0, -2.0), ("x", 1.5, 30.0), ("y", 2.5, 29.0)]
    assert table.origins[0] == 1e6 * (START + 30)  # that of the first reading, as in a stream
    assert table.summarize()["order"]["name"] == "arrival"
    assert "--order time" in table.order.describe()


@pytest.mark.parametrize("requested", ["arrival", "time"])
def test_order_can_be_forced(tmp_path: Path, requested: str) -> None:
    columns = late_log(np.random.default_rng(2))
    table = prepared_irregular(tmp_path, columns, order=requested)
    ages = [table.ages[a:b] for a, b in zip(table.offsets, table.offsets[1:], strict=False)]
    assert all((np.diff(own) >= 0).all() for own in ages) == (requested == "time")
    assert f"--order {requested}" in table.order.describe()
    times = table.schema.reading_times
    assert times is not None
    assert times.duration == pytest.approx(3.5e9, rel=0.05)  # also if the last row does not have the latest time


def test_other_orders_than_that_of_arrival_are_sorted_by_time(tmp_path: Path) -> None:
    columns = fleet(np.random.default_rng(3))
    records, sensors, times = (np.array(columns[name]) for name in ("record", "feature", "time"))
    orders = {
        "sensor after sensor": np.lexsort((times, sensors, records)),
        "random": np.random.default_rng(0).permutation(len(times)),
        "latest first": np.argsort(-times),
    }
    for name, order in orders.items():
        (tmp_path / name).mkdir()
        table = prepared_irregular(
            tmp_path / name, {key: [column[i] for i in order] for key, column in columns.items()}
        )
        assert table.order.name == "time", name
        assert "--order arrival" in table.order.describe()
    (tmp_path / "sorted").mkdir()
    table = prepared_irregular(tmp_path / "sorted", columns)
    assert table.order.late_share == 0
    assert "no late readings" in table.order.describe()


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16), mean_delay=st.sampled_from([20.0, 120.0, 300.0]))
def test_alpha_holds_for_a_stream_whose_readings_are_as_late_as_those_of_the_table(
    tmp_path: Path, seed: int, mean_delay: float
) -> None:
    """Calibration records have the scores of a stream with their rows, so they are exchangeable with new records."""
    folder = tmp_path / f"{seed}-{mean_delay}"
    folder.mkdir(exist_ok=True)
    columns = late_log(np.random.default_rng(seed), mean_delay, num_records=300, max_readings=20)
    table = prepared_irregular(folder, columns)
    assert table.order.name == "arrival"
    assert table.order.late_share > 0.02
    torch.manual_seed(0)
    model = DEformer(table.schema, replace(CONFIG, context_recent=3, context_block=4)).eval()
    rows = np.arange(len(table.split))
    scores = score_irregular_records(model, table, rows, cusum_scale=CusumScale.neutral(len(table.schema)))
    # The stream gets the rows of the log, in which the records alternate.
    schema, names = table.schema, columns["feature"]
    codes = np.array([schema.code_by_name[name] for name in names], np.int32)
    is_label = schema.is_discrete[codes]
    labels = schema.features[schema.code_by_name["state"]].labels
    values = [labels.index(v) if flag else float(v) for v, flag in zip(columns["value"], is_label, strict=True)]
    times = np.round(1e6 * np.array(columns["time"])).astype(np.int64)
    zeros = np.zeros(len(codes), np.int32)
    log = EventBatch(columns["record"], codes, np.array(values, np.float64), times, zeros, zeros)
    calibration = Calibration(np.empty(0), "arrival", cusum_scale=CusumScale.neutral(len(schema)))
    engine = Engine(model, calibration, fingerprint="", alpha=(), effort="off")
    rejections = engine.handle(log, now=0).rejections
    assert {rejection.reason for rejection in rejections} <= {RejectionReason.DUPLICATE}
    assert len(rejections) == sum(table.skipped_by_reason.values())
    closed = engine.finish().closed
    # The rows of the table are numbered in the order in which their records begin in the log.
    number_by_id = {record: i for i, record in enumerate(dict.fromkeys(columns["record"]))}
    streamed = np.zeros(len(rows))
    streamed[[number_by_id[record] for record in closed.record_ids]] = closed.score
    np.testing.assert_allclose(scores, streamed, rtol=1e-4, atol=1e-4)
    half = np.random.default_rng(seed).permutation(rows)
    p_values = Calibration.from_statistics(scores[half[:150]], "arrival").compute_pooled_p_values(streamed[half[150:]])
    low, high = compute_false_alarm_bounds(0.1, 150, 150)
    assert low <= (p_values <= 0.1).sum() <= high
