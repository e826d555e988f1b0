"""Tests of Delta Lake tables as inputs, on disk and in a local S3 server."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow import fs

from deformer_stream.errors import InputError
from deformer_stream.tables import discovery
from deformer_stream.tables.discovery import find_data_files, is_delta_table
from deformer_stream.tables.table import Table
from tests.s3 import BUCKET, run_server, write_object
from trainer.data import DataOptions
from trainer.prepare import prepare_table
from trainer.tables import open_training_input


def write(path: Path) -> None:
    """Write a table whose folder holds a file of an older version."""
    write_deltalake(path, pa.table({"x": [1.0, 2.0, 3.0], "site": ["A b", "C", "C"]}), partition_by=["site"])
    write_deltalake(path, pa.table({"x": [4.0], "site": ["C"]}), mode="append", partition_by=["site"])
    DeltaTable(path).delete("x = 2.0")
    pq.write_table(pa.table({"x": [9.0]}), path / "site=C" / "of-a-failed-commit.parquet")


def read(source: object) -> list[tuple[float, str]]:
    """Return the rows of an input, sorted."""
    tables = Table.open_all(find_data_files([str(source)]))
    rows = [row for table in tables for batch in table.iterate_batches(["x", "site"], 10) for row in batch.to_pylist()]
    return sorted((row["x"], row["site"]) for row in rows)


ROWS = [(1.0, "A b"), (3.0, "C"), (4.0, "C")]


def test_only_the_current_version_is_read(tmp_path: Path) -> None:
    write(tmp_path / "t")
    assert read(tmp_path / "t") == ROWS
    assert (
        len(list((tmp_path / "t").rglob("*.parquet"))) == 5
    )  # one file is outdated, and one was never part of the table


def test_table_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t")
    with run_server(monkeypatch) as (store, _):
        upload(store, tmp_path / "t")
        assert read(f"s3://{BUCKET}/t") == ROWS
        monkeypatch.setattr(discovery, "is_installed", lambda module: module != "deltalake")
        with pytest.raises(InputError, match=r"may be those of older versions.*deformer-stream\[delta\]"):
            read(f"s3://{BUCKET}/t")


def upload(store: fs.S3FileSystem, folder: Path) -> None:
    """Copy a folder to the bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            write_object(store, os.path.relpath(path, folder.parent), path.read_bytes())


def test_without_the_library_only_tables_without_older_versions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "t")
    write_deltalake(tmp_path / "new", pa.table({"x": [1.0], "site": ["A"]}))
    monkeypatch.setattr(discovery, "is_installed", lambda module: module != "deltalake")
    assert read(tmp_path / "new") == [(1.0, "A")]
    with pytest.raises(InputError, match="may hold files of older versions"):
        read(tmp_path / "t")


def test_tables_whose_files_cannot_be_read_alone_are_refused(tmp_path: Path) -> None:
    for feature, path in (("deletionVectors", tmp_path / "a"), ("columnMapping", tmp_path / "b")):
        write_deltalake(path, pa.table({"x": [1.0]}))
        log = path / "_delta_log" / f"{0:020}.json"
        lines = log.read_text().splitlines()
        protocol = (
            '{"protocol":{"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["%s"],"writerFeatures":["%s"]}}'
        )
        lines = [protocol % (feature, feature) if '"protocol"' in line else line for line in lines]
        log.write_text("\n".join(lines) + "\n")
        with pytest.raises(InputError, match=r"Delta Lake table (has the feature|cannot be read)"):
            find_data_files([path])


def test_a_damaged_log_is_reported_in_one_line(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"x": [1.0]}))
    (tmp_path / "t" / "_delta_log" / f"{0:020}.json").write_text("{broken")
    with pytest.raises(InputError, match="this Delta Lake table cannot be read") as caught:
        find_data_files([tmp_path / "t"])
    assert "\n" not in str(caught.value)


def test_columns_that_were_added_later_are_missing_in_earlier_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old, new = (pa.table({"x": rng.normal(size=300), "y": rng.normal(size=300)}) for _ in range(2))
    write_deltalake(tmp_path / "t", old)
    new = new.append_column("z", pa.array(rng.normal(size=300)))
    write_deltalake(tmp_path / "t", new, mode="append", schema_mode="merge")
    (tmp_path / "work").mkdir()
    data = prepare_table([tmp_path / "t"], DataOptions(), tmp_path / "work")
    assert set(data.schema.names) == {"x", "y", "z"}
    assert data.missing_by_feature == {"z": 300}
    pq.write_table(old, tmp_path / "other.parquet")
    with pytest.raises(InputError, match=r"other\.parquet: column 'z' is missing"):  # no part of the Delta Lake table
        prepare_table([tmp_path / "t", tmp_path / "other.parquet"], DataOptions(), tmp_path / "work")


def test_columns_that_were_added_later_are_found_in_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "t", pa.table({"x": [1.0]}))
    write_deltalake(tmp_path / "t", pa.table({"x": [2.0], "z": [3.0]}), mode="append", schema_mode="merge")
    assert is_delta_table(tmp_path / "t")
    assert not is_delta_table(tmp_path)
    with run_server(monkeypatch) as (store, _):
        upload(store, tmp_path / "t")
        tables = Table.open_all(find_data_files([f"s3://{BUCKET}/t"]))
        assert [len(table.schema) for table in sorted(tables, key=lambda table: len(table.schema))] == [1, 2]
        filled = open_training_input([Path(f"s3://{BUCKET}/t")], None, None, None).tables
        assert [len(table.schema) for table in filled] == [2, 2]
