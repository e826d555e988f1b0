"""Reading keeps to its part of a time limit by using a random sample of the records, and reports its progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.trainer.tables import write
from trainer import prepare as training_preparation
from trainer.budget import PROGRESS_SECONDS
from trainer.data import DataOptions, PreparedTable
from trainer.prepare import prepare_table
from trainer.reading_time import ReadingMonitor, ReadingTooSlow


class Clock:
    """A clock that advances by the same time at each reading."""

    def __init__(self, seconds_per_call: float = 1.0) -> None:
        self.now, self.seconds_per_call = 0.0, seconds_per_call

    def __call__(self) -> float:
        self.now += self.seconds_per_call
        return self.now


def prepare(folder: Path, columns: dict[str, Any], monitor: ReadingMonitor, **options: Any) -> PreparedTable:
    folder.mkdir(exist_ok=True)
    return prepare_table([write(folder / "table.parquet", columns)], DataOptions(**options), folder, monitor)


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples may be smaller than in practice, so that the tables can be small."""
    monkeypatch.setattr(training_preparation, "MIN_SAMPLED_RECORDS", 100)


def test_wide_table_is_sampled_if_time_is_short(tmp_path: Path, small_samples: None) -> None:
    rng = np.random.default_rng(0)
    columns = {"x": np.arange(5000) + rng.normal(size=5000) * 1e-3, "y": rng.normal(size=5000)}
    messages: list[str] = []
    data = prepare(tmp_path / "a", columns, ReadingMonitor(3.5, Clock(), messages.append), continuous=("x", "y"))
    num_records = len(data.split)
    assert 100 <= num_records < 0.7 * 5000
    assert messages[-1] == f"used {num_records:,} of 5,000 records, because of --max-time"
    assert data.num_input_records == 5000
    assert data.skipped_by_reason["records, because of --max-time"] == 5000 - num_records
    # The records are a random sample of the whole table, in its order: the column `x` holds the row number.
    row_numbers = np.round(
        data.schema.denormalise(np.zeros(num_records, np.int64), data.values[:, 0].astype(np.float64))
    ).astype(int)
    assert bool((np.diff(row_numbers) > 0).all())
    assert row_numbers.max() > 4000
    assert row_numbers.min() < 1000
    # A continued run uses as many records, and the sample depends on the seed alone.
    again = prepare(tmp_path / "b", columns, ReadingMonitor(max_records=num_records), continuous=("x", "y"))
    assert again.fingerprint == data.fingerprint
    # The records of a sample keep their part of the table (--per).
    assert data.part_by_record is None
    monitor = ReadingMonitor(max_records=num_records)
    parts = prepare(tmp_path / "c", columns, monitor, continuous=("x", "y"), part_sizes=(2000, 3000)).part_by_record
    assert parts is not None
    assert parts.tolist() == (row_numbers >= 2000).astype(int).tolist()


def test_records_of_a_sample_have_the_split_of_the_whole_table_if_it_is_one_part(tmp_path: Path) -> None:
    """So the calibration records of a model that is adapted from a fleet model are new to the fleet model as well."""
    columns = {"x": np.arange(5000.0), "y": np.random.default_rng(0).normal(size=5000)}
    options: dict[str, Any] = {"continuous": ("x", "y"), "part_sizes": (5000,)}
    whole = prepare(tmp_path / "a", columns, ReadingMonitor(), **options)
    sample = prepare(tmp_path / "b", columns, ReadingMonitor(max_records=1000), **options)
    rows = np.round(sample.schema.denormalise(np.zeros(1000, np.int64), sample.values[:, 0].astype(np.float64))).astype(
        int
    )
    assert sample.split.tolist() == whole.split[rows].tolist()


def test_long_table_is_sampled_by_record(tmp_path: Path, small_samples: None) -> None:
    rng = np.random.default_rng(0)
    num_records = 2000
    columns = {
        "record": [f"r{i // 2}" for i in range(2 * num_records)],
        "feature": ["x", "y"] * num_records,
        "value": rng.normal(size=2 * num_records),
        "time": pa.array(np.arange(2 * num_records) * 1_000_000, pa.timestamp("us", "UTC")),
    }
    data = prepare(tmp_path / "a", columns, ReadingMonitor(3.5, Clock()))
    assert len(data.split) < 0.7 * num_records
    assert np.isfinite(data.values).all()  # both readings of each record of the sample are there
    assert data.num_input_records == num_records


def test_a_run_that_is_continued_uses_the_records_of_before_however_slow_the_machine_is(
    tmp_path: Path, small_samples: None
) -> None:
    columns = {"x": np.random.default_rng(0).normal(size=2000)}
    assert len(prepare(tmp_path / "a", columns, ReadingMonitor(0.5, Clock())).split) < 2000
    assert len(prepare(tmp_path / "b", columns, ReadingMonitor(0.5, Clock(), max_records=2000)).split) == 2000


def test_all_records_are_used_if_there_is_time(tmp_path: Path) -> None:
    columns = {"x": np.random.default_rng(0).normal(size=300)}
    data = prepare(tmp_path / "a", columns, ReadingMonitor(1000.0, Clock()))
    assert len(data.split) == data.num_input_records == 300
    assert data.skipped_by_reason == {}


def test_pass_is_stopped_when_the_rest_would_take_too_long() -> None:
    """A batch takes 1 s to decode and 3 s to process; two passes of ten batches may take 30 s."""
    now = [0.0]
    monitor = ReadingMonitor(30.0, lambda: now[0], num_rows=100)
    monitor.start_pass("collecting statistics", num_limited_passes=2)
    now[0] = 1.0
    monitor.begin_batch()
    now[0] = 4.0
    with pytest.raises(ReadingTooSlow) as stop:
        monitor.end_batch(10)
    # Decoding takes 20 s in any case, and processing 60 s. 30 s − 4 s − 20 s = 6 s are left for processing.
    assert stop.value.share == pytest.approx(0.1)
    monitor.start_pass("converting the records")  # without a limit
    now[0] = 100.0
    monitor.end_batch(100)


def test_long_pass_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now, messages = [0.0], list[str]()
    monitor = ReadingMonitor(clock=lambda: now[0], on_message=messages.append, num_rows=3000)
    monitor.start_pass("converting the records")
    for second in range(1, 4):
        now[0] = second * (PROGRESS_SECONDS - 1.0)
        monitor.begin_batch()
        monitor.end_batch(1000)
    assert messages == ["converting the records: 2,000 of 3,000 rows"]


def test_times_of_the_records_are_known(tmp_path: Path) -> None:
    micros = np.arange(200) * 60_000_000 + 1_600_000_000_000_000
    columns = {"when": pa.array(micros, pa.timestamp("us", "UTC")), "x": np.random.default_rng(0).normal(size=200)}
    data = prepare(tmp_path / "a", columns, ReadingMonitor())
    assert data.time_span == (micros[0], micros[-1])
    without = prepare(tmp_path / "b", {"x": columns["x"]}, ReadingMonitor())
    assert without.time_span is None
