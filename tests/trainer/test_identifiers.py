"""Tests of columns that identify rows: columns that each rule leaves out, and measurements that are kept."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.trainer.tables import correlated, prepared
from trainer.data import DataOptions
from trainer.identifiers import OrderStatistics, describe_identifier
from trainer.prepare import prepare_table

N = 600
RNG = np.random.default_rng(0)
SHUFFLED = RNG.permutation(N)
NOW = 1_583_750_073

IDENTIFIERS: dict[str, Any] = {
    "row number": np.arange(N),
    "row number as floats": np.arange(N).astype(float),
    "falling row number": np.arange(N)[::-1],
    "id with an offset": 100_000 + np.arange(N),
    "id with gaps": np.cumsum(RNG.integers(1, 50, N)),
    "shuffled id": 100_000 + SHUFFLED,
    "shuffled id with gaps": np.sort(RNG.choice(5_000, N, replace=False))[SHUFFLED],
    "shuffled id in steps of ten": 10 * SHUFFLED,
    "shuffled id with some repeated rows": np.where(np.arange(N) % 50 == 0, 7, SHUFFLED),
    "64-bit id": (1 << 60) + RNG.permutation(N).astype(np.int64) * 4096,
    "shuffled 64-bit id without gaps": (1 << 60) + RNG.permutation(N).astype(np.int64),
    "64-bit id with gaps": (1 << 60) + np.cumsum(RNG.integers(1, 50, N)),
    "shuffled id of 25 digits as text": [str(10**24 + i) for i in RNG.permutation(N).tolist()],
    "id as text": [str(i) for i in range(N)],
    "UUID": [str(uuid.UUID(int=int(i) << 64)) for i in RNG.integers(0, 2**60, N)],
    "Unix time in seconds": NOW + np.arange(N),
    "Unix time of four devices in turn": NOW + np.arange(N) // 4,
    "Unix time of four devices one after the other": NOW + np.arange(N) % (N // 4) * 60,
    "Unix time in milliseconds": NOW * 1000 + np.cumsum(RNG.integers(900, 1100, N)),
    "Unix time with fractions": NOW + np.cumsum(RNG.uniform(0.5, 1.5, N)),
    "elapsed time": np.arange(N) * 0.25,
    "elapsed time with jitter": np.arange(N) * 0.1 + RNG.uniform(0, 0.005, N),
}

MEASUREMENTS: dict[str, Any] = {
    "noise": RNG.normal(size=N),
    "counts": RNG.poisson(40, N),
    "converter of 12 bits": RNG.integers(0, 4096, N),
    "converter of 24 bits": RNG.integers(0, 2**24, N),
    "random walk of integers": np.cumsum(RNG.integers(-30, 31, N)),
    "bytes of memory": 1_600_000_000 + RNG.integers(-(10**6), 10**6, N) * 100,
    "carrier density": RNG.normal(3e22, 4e21, N),
    "sorted carrier density": np.sort(RNG.normal(3e22, 4e21, N)),
    "carrier density as text": [f"{density:e}" for density in RNG.normal(3e22, 4e21, N)],
    "sorted measurement": np.sort(RNG.normal(20, 5, N)),
    "sorted integers": np.sort(RNG.integers(1200, 1800, N)),
    "counter with resets": np.arange(N) % 150,
    "position in a batch": np.arange(N) % 150 * 0.5,
    "hour": np.arange(N) // 10 % 24,
    "always the same": np.full(N, 5),
    "program step": np.arange(N) // 150,
    "angle": np.arange(N) * 7.0 % 360,
}


def prepare_beside_features(folder: Path, column: Any, name: str = "column", **options: Any) -> Any:
    x, _ = correlated(np.random.default_rng(1), len(column), 2)
    return prepared(folder, {"a": x[:, 0], name: column, "b": x[:, 1]}, **options)


@pytest.mark.parametrize("column", IDENTIFIERS.values(), ids=IDENTIFIERS.keys())
def test_column_that_identifies_rows_is_left_out(tmp_path: Path, column: Any) -> None:
    data = prepare_beside_features(tmp_path, column)
    assert data.schema.names == ("a", "b")
    (excluded,) = data.excluded_columns
    assert any(word in excluded.reason for word in ("identifier", "row number", "clock"))


@pytest.mark.parametrize("column", MEASUREMENTS.values(), ids=MEASUREMENTS.keys())
def test_measurement_is_kept(tmp_path: Path, column: Any) -> None:
    data = prepare_beside_features(tmp_path, column)
    assert data.schema.names == ("a", "column", "b")
    assert not data.excluded_columns


def test_reason_states_the_number_of_values_and_the_option_that_keeps_the_column(tmp_path: Path) -> None:
    data = prepare_beside_features(tmp_path, SHUFFLED, name="part")
    (excluded,) = data.excluded_columns
    assert excluded.reason == "all 451 values differ: looks like an identifier; --continuous part trains on it"
    data = prepare_beside_features(tmp_path, NOW + np.arange(N), name="t")
    assert "Unix times from 2020-03-09 10:34 to 2020-03-09 10:44" in data.excluded_columns[0].reason


@pytest.mark.parametrize(
    "options", [{"continuous": ("column",)}, {"context": ("column",)}, {"cycle": (("column", 600.0),)}]
)
def test_column_that_an_option_names_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    assert "column" in prepare_beside_features(tmp_path, np.arange(N), **options).schema.names
    assert "column" in prepare_beside_features(tmp_path, np.arange(N) // 2, discrete=("column",)).schema.names


def test_total_is_left_out_only_if_the_rows_are_in_the_order_of_time(tmp_path: Path) -> None:
    """Without times, a table that was sorted by a measurement would look the same."""
    energy = np.cumsum(np.random.default_rng(3).gamma(2.0, 3.0, N)) + 0.1
    energy[100:200] = energy[100]  # the meter stands still
    times = pa.array(np.datetime64("2020-03-09") + np.arange(N) * np.timedelta64(60, "s"))
    data = prepared(tmp_path, {"time": times, "energy": energy, "a": np.sin(np.arange(N))})
    reason = {column.name: column.reason for column in data.excluded_columns}["energy"]
    assert reason.startswith("only rises in the course of time: looks like a total or a counter")
    order = np.random.default_rng(4).permutation(N)
    for columns in ({"energy": energy}, {"energy": energy, "time": times.take(pa.array(order))}):
        data = prepared(tmp_path, columns | {"a": np.sin(np.arange(N))})
        (feature,) = (f for f in data.schema.features if f.name == "energy")
        assert "only rises from row to row: if it is a total or a counter, name it in --exclude" in feature.reason


@pytest.mark.parametrize("date", ["01/02/2007", "1.2.07", "2007-02-01", "2007/2/1 10:30"])
def test_texts_of_dates_are_no_labels(tmp_path: Path, date: str) -> None:
    """The next day has another date."""
    dates = [date] * (N // 2) + [date.replace("7", "8")] * (N // 2)
    assert prepare_beside_features(tmp_path, dates).schema.names == ("a", "b")
    for option in ("discrete", "context"):
        options: dict[str, Any] = {option: ("column",)}
        assert "column" in prepare_beside_features(tmp_path, dates, **options).schema.names
    codes = ["1-2-3-4", "10/12"] * (N // 2)
    assert "column" in prepare_beside_features(tmp_path, codes).schema.names


def test_number_of_a_batch_is_left_out_if_the_rows_are_in_the_order_of_time(tmp_path: Path) -> None:
    times = pa.array(np.datetime64("2020-03-09") + np.arange(N) * np.timedelta64(60, "s"))
    batches = [f"B{i // 20:03}" for i in range(N)]
    columns = {"time": times, "batch": batches, "a": np.random.default_rng(0).normal(size=N)}
    data = prepared(tmp_path, columns)
    assert data.schema.names == ("a",)
    assert data.excluded_columns[1].reason.startswith("no text comes back: looks like the number of a batch")
    assert "batch" in prepared(tmp_path, columns | {"batch": [*batches[:-30], *batches[:30]]}).schema.names
    del columns["time"]
    assert "batch" in prepared(tmp_path, columns).schema.names, "the table may be sorted by this column"


def test_row_number_that_starts_again_in_each_file_is_left_out(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        columns = {"row": np.arange(200 + i), "a": np.random.default_rng(i).normal(size=200 + i)}
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
        paths.append(tmp_path / f"{i}.parquet")
    data = prepare_table(paths, DataOptions(), tmp_path)
    assert data.schema.names == ("a",)


def test_short_tables_and_measured_integers_in_small_tables_are_kept(tmp_path: Path) -> None:
    """In 30 rows, integers of a wide range are all different by chance."""
    data = prepare_beside_features(tmp_path, 1200 + 37 * SHUFFLED[:30])
    assert "column" in data.schema.names
    assert len(set(1200 + 37 * SHUFFLED[:30])) == 30


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), num_values=st.integers(10, 3000), bits=st.integers(8, 31))
def test_independent_integers_are_never_taken_for_identifiers(seed: int, num_values: int, bits: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, num_values).astype(float)
    assert describe(values) is None


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), num_values=st.integers(500, 3000), gaps=st.integers(1, 15))
def test_shuffled_ids_are_always_recognised(seed: int, num_values: int, gaps: int) -> None:
    values = np.random.default_rng(seed).choice(num_values * gaps, num_values, replace=False).astype(float)
    assert describe(values) == f"all {num_values:,} values differ: looks like an identifier"


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_order_does_not_depend_on_the_size_of_the_batches(values: list[int], data: st.DataObject) -> None:
    bounds = sorted(data.draw(st.sets(st.integers(0, len(values)), max_size=5)))
    whole, cut = OrderStatistics(), OrderStatistics()
    whole.add(np.array(values, float), 0)
    for part in np.split(np.array(values, float), bounds):
        cut.add(part, 0)
    assert (whole.num_rises, whole.num_falls, whole.num_equal) == (cut.num_rises, cut.num_falls, cut.num_equal)
    assert whole.steps.tolist() == cut.steps.tolist()


def describe(values: NDArray[np.float64]) -> str | None:
    order = OrderStatistics()
    order.add(values, 0)
    return describe_identifier(np.sort(values), order, is_integer=True, is_in_time_order=False)
