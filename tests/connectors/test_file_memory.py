"""Tests that a large table is read with as little memory as a small one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.tables.table import Table
from trainer.tables import open_training_input

COLUMNS = [f"f{i}" for i in range(8)]
GROUP, GROUPS = 65_536, 20
FEW = 5 * GROUP * len(COLUMNS) * 8


@pytest.fixture(scope="module")
def long_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of 80 MiB that cannot be compressed, in row groups of 4 MiB."""
    path = tmp_path_factory.mktemp("long") / "long.parquet"
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([(name, pa.float64()) for name in COLUMNS]), use_dictionary=False) as writer:
        for _ in range(GROUPS):
            writer.write_table(pa.table({name: rng.normal(size=GROUP) for name in COLUMNS}))
    return path


def measure_peak_bytes(read: Iterable[Any]) -> int:
    """Return how many bytes more than at the beginning Arrow has allocated at most while something is read."""
    before = pa.total_allocated_bytes()
    return max(pa.total_allocated_bytes() - before for _ in read)


def test_replay_keeps_few_row_groups_in_memory(long_table: Path) -> None:
    assert measure_peak_bytes(Table.open(long_table).iterate_batches(COLUMNS, 8192)) < FEW


def test_training_keeps_few_row_groups_in_memory(long_table: Path) -> None:
    source = open_training_input([long_table], "wide", None, None)
    source.feature_columns = COLUMNS
    assert measure_peak_bytes(source.iterate_readings()) < FEW
