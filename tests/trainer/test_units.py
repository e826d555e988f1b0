"""Training reads the units of features from the metadata of columns, and from the option `--units`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import DataOptions
from trainer.prepare import prepare_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a table of three columns, two of which state their unit, and return its path."""
    rng = np.random.default_rng(0)
    columns = [
        pa.field("flow", pa.float64(), metadata={b"unit": "m³/h".encode()}),
        pa.field("pressure", pa.float64(), metadata={b"units": b" bar "}),
        pa.field("speed", pa.float64()),
    ]
    table = pa.table([rng.normal(size=60) for _ in columns], pa.schema(columns))
    pq.write_table(table, tmp_path / "plant.parquet")
    return tmp_path / "plant.parquet"


def test_units_come_from_the_metadata_of_columns_unless_an_option_names_them(path: Path, tmp_path: Path) -> None:
    from_metadata = prepare_table([path], DataOptions(), tmp_path)
    assert [feature.unit for feature in from_metadata.schema.features] == ["m³/h", "bar", None]
    options = DataOptions(units={"pressure": "kPa", "speed": "rpm", "unknown": "s"})
    from_options = prepare_table([path], options, tmp_path)
    assert [feature.unit for feature in from_options.schema.features] == ["m³/h", "kPa", "rpm"]
    assert from_options.fingerprint == from_metadata.fingerprint
