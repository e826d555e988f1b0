"""A long table is read in the memory of a short one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files.tables import Table
from trainer.tables import open_tables

COLUMNS = [f"f{i}" for i in range(8)]
GROUP, GROUPS = 65_536, 20
FEW = 5 * GROUP * len(COLUMNS) * 8


@pytest.fixture(scope="module")
def long_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 MiB that do not compress, in row groups of 4 MiB."""
    path = tmp_path_factory.mktemp("long") / "long.parquet"
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([(name, pa.float64()) for name in COLUMNS]), use_dictionary=False) as writer:
        for _ in range(GROUPS):
            writer.write_table(pa.table({name: rng.normal(size=GROUP) for name in COLUMNS}))
    return path


def _most_held(read: Iterable[Any]) -> int:
    """Bytes beyond what Arrow held before."""
    before = pa.total_allocated_bytes()
    return max(pa.total_allocated_bytes() - before for _ in read)


def test_replay_holds_a_few_row_groups(long_table: Path) -> None:
    assert _most_held(Table.open(long_table).iterate_batches(COLUMNS, 8192)) < FEW


def test_training_holds_a_few_row_groups(long_table: Path) -> None:
    source = open_tables([long_table], "wide", None, None)
    source.feature_columns = COLUMNS
    assert _most_held(source.iterate_readings()) < FEW
