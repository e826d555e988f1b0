"""Tests of Apache Iceberg tables as inputs, on disk and in a local S3 server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import IdentityTransform

from deformer_stream.errors import InputError
from deformer_stream.runtime.shard_job import describe_files
from deformer_stream.tables import discovery, iceberg
from deformer_stream.tables.discovery import find_data_files
from deformer_stream.tables.filters import parse_where
from deformer_stream.tables.table import Table, TableOptions
from tests.s3 import BUCKET, run_server

NAMES = ["flow", "site"]
ROWS = [(1.0, "A b"), (3.0, "C"), (4.0, "C")]


def write(warehouse: str, **properties: str) -> Any:
    """Write a table with deleted rows, a renamed column and folders that are no columns; return it."""
    catalog = SqlCatalog("test", uri="sqlite://", warehouse=warehouse, **properties)
    catalog.create_namespace("plant")
    table = catalog.create_table("plant.pumps", pa.schema([("x", pa.float64()), ("site", pa.string())]))
    with table.update_spec() as spec:
        spec.add_field("site", IdentityTransform(), "area")
    schema = table.schema().as_arrow()
    table.append(pa.table({"x": [1.0, 2.0, 3.0], "site": ["A b", "C", "C"]}, schema=schema))
    table.delete("x = 2.0")
    with table.update_schema() as changed:
        changed.rename_column("x", "flow")
    table.append(pa.table({"flow": [4.0], "site": ["C"]}, schema=table.schema().as_arrow()))
    return table


def open_tables(source: object, options: TableOptions | None = None) -> list[Table]:
    return Table.open_all(find_data_files([str(source)]), options)


def read(source: object, options: TableOptions | None = None) -> list[tuple[float, str]]:
    """Return the rows of an input, sorted."""
    batches = [batch for table in open_tables(source, options) for batch in table.iterate_batches(NAMES, 1)]
    assert {batch.num_rows for batch in batches} == {1}
    return sorted((row["flow"], row["site"]) for batch in batches for row in batch.to_pylist())


def test_only_the_current_version_is_read(tmp_path: Path) -> None:
    metadata = write(f"file://{tmp_path}").metadata_location
    pq.write_table(pa.table({"x": [9.0]}), tmp_path / "plant" / "pumps" / "data" / "of-a-failed-commit.parquet")
    assert read(tmp_path / "plant" / "pumps") == ROWS
    assert read(metadata.removeprefix("file://")) == ROWS
    assert {name for table in open_tables(tmp_path / "plant" / "pumps") for name in table.schema.names} == {*NAMES}
    assert sum(table.num_rows or 0 for table in open_tables(tmp_path / "plant" / "pumps")) == 3


def test_an_older_version_is_read_by_its_file(tmp_path: Path) -> None:
    write(f"file://{tmp_path}")
    metadata = sorted((tmp_path / "plant" / "pumps" / "metadata").glob("00002-*.metadata.json"))
    tables = open_tables(metadata[0])
    rows = [row for table in tables for batch in table.iterate_batches(["x"], 10) for row in batch.to_pylist()]
    assert sorted(row["x"] for row in rows) == [1.0, 2.0, 3.0]


def test_condition(tmp_path: Path) -> None:
    write(f"file://{tmp_path}")
    options = TableOptions(where=parse_where("site = 'C' AND flow > 3"))
    assert read(tmp_path / "plant" / "pumps", options) == [(4.0, "C")]


def test_table_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_server(monkeypatch):
        metadata = write(f"s3://{BUCKET}/wh", **{"s3.endpoint": os.environ["AWS_ENDPOINT_URL"]}).metadata_location
        assert read(f"s3://{BUCKET}/wh/plant/pumps") == ROWS
        assert read(metadata) == ROWS
        for module in (discovery, iceberg):
            monkeypatch.setattr(module, "is_installed", lambda name: name != "pyiceberg")
        with pytest.raises(InputError, match=r"may be those of older versions.*deformer-stream\[iceberg\]"):
            read(f"s3://{BUCKET}/wh/plant/pumps")
        with pytest.raises(
            InputError, match=r"a package that is not installed: pip install 'deformer-stream\[iceberg\]'"
        ):
            read(metadata)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = write(f"file://{tmp_path}").metadata_location.removeprefix("file://")
    for module in (discovery, iceberg):
        monkeypatch.setattr(module, "is_installed", lambda name: name != "pyiceberg")
    with pytest.raises(InputError, match=r"may hold files of older versions.*deformer-stream\[iceberg\]"):
        read(tmp_path / "plant" / "pumps")
    with pytest.raises(InputError, match=r"deformer-stream\[iceberg\]"):
        read(metadata)


def test_two_newest_versions_are_refused(tmp_path: Path) -> None:
    """A commit that failed may leave its description behind; only the catalog knows which one counts."""
    write(f"file://{tmp_path}")
    folder = tmp_path / "plant" / "pumps" / "metadata"
    newest = max(folder.glob("*.metadata.json"))
    (folder / f"{newest.name.split('-')[0]}-of-a-failed-commit.metadata.json").write_bytes(newest.read_bytes())
    with pytest.raises(InputError, match="the newest version of this Iceberg table is not known") as caught:
        read(tmp_path / "plant" / "pumps")
    assert "\n" not in str(caught.value)


def test_damage_is_reported_in_one_line(tmp_path: Path) -> None:
    table = write(f"file://{tmp_path}")
    for path in (tmp_path / "plant" / "pumps" / "data").rglob("*.parquet"):
        path.unlink()
    with pytest.raises(InputError, match="cannot be read") as caught:
        read(tmp_path / "plant" / "pumps")
    assert "\n" not in str(caught.value)
    Path(table.metadata_location.removeprefix("file://")).write_text("{broken")
    with pytest.raises(InputError, match="this Iceberg table cannot be read") as caught:
        find_data_files([tmp_path / "plant" / "pumps"])
    assert "\n" not in str(caught.value)


def test_table_without_rows(tmp_path: Path) -> None:
    catalog = SqlCatalog("test", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("plant")
    catalog.create_table("plant.pumps", pa.schema([("x", pa.float64())]))
    with pytest.raises(InputError, match="has no rows"):
        find_data_files([tmp_path / "plant" / "pumps"])


def test_the_version_of_a_file_changes_with_the_columns_of_the_table(tmp_path: Path) -> None:
    """A run in shards must not continue with the columns or the deleted rows of another version of the table."""
    table = write(f"file://{tmp_path}")
    before = describe_files(find_data_files([tmp_path / "plant" / "pumps"]))
    with table.update_schema() as changed:
        changed.rename_column("flow", "rate")
    after = describe_files(find_data_files([tmp_path / "plant" / "pumps"]))
    assert [file["name"] for file in before] == [file["name"] for file in after]
    assert not any(file in before for file in after)
