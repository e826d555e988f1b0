"""Tests of the search for input files: patterns, hidden files, and the metadata of Delta Lake and Iceberg tables."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deformer_stream.errors import InputError
from deformer_stream.tables.discovery import CSV, TABLES, find_files, get_stem, has_ending, list_data_files

SUFFIXES = (".parquet", ".json")


def write_files(folder: Path, *names: str) -> None:
    """Create files in a folder; their content is not read."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def write_delta_commit(table: Path, version: int, *actions: dict[str, object]) -> None:
    """Write one commit of a Delta Lake table."""
    path = table / "_delta_log" / f"{version:020}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(action) + "\n" for action in actions))


def write_iceberg_metadata(table: Path, *operations: str) -> None:
    """Write the metadata of an Iceberg table with one snapshot per operation."""
    path = table / "metadata" / "00001-5d1c.metadata.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    snapshots = [{"snapshot-id": i, "summary": {"operation": operation}} for i, operation in enumerate(operations)]
    path.write_text(json.dumps({"format-version": 2, "snapshots": snapshots}, indent=2))


def list_names(folder: Path) -> list[str]:
    """Return the paths of the data files below a folder."""
    return [path.relative_to(folder).as_posix() for path in list_data_files(folder, SUFFIXES)]


def test_files_with_a_matching_ending_are_sorted_by_path(tmp_path: Path) -> None:
    write_files(tmp_path, "b.parquet", "a/2.JSON", "a/1.parquet", "notes.txt", "folder.parquet/part.parquet")
    assert list_names(tmp_path) == ["a/1.parquet", "a/2.JSON", "b.parquet", "folder.parquet/part.parquet"]


def test_hidden_files_and_folders_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "_input"  # the name of the given folder itself does not matter
    write_files(folder, "a.parquet", "_SUCCESS.json", ".b.parquet", "_temporary/c.parquet", "d/.checkpoints/e.parquet")
    assert list_names(folder) == ["a.parquet"]


def test_delta_table_without_removed_files_is_read_as_its_data_files(tmp_path: Path) -> None:
    write_files(
        tmp_path / "t", "part-0.parquet", "part-1.parquet", "_delta_log/00000000000000000001.checkpoint.parquet"
    )
    write_delta_commit(tmp_path / "t", 0, {"protocol": {}}, {"metaData": {}}, {"add": {"path": "part-0.parquet"}})
    write_delta_commit(tmp_path / "t", 1, {"add": {"path": "part-1.parquet", "deletionVector": None}})
    assert list_names(tmp_path) == ["t/part-0.parquet", "t/part-1.parquet"]


@pytest.mark.parametrize(
    "action",
    [{"remove": {"path": "part-0.parquet"}}, {"add": {"path": "part-0.parquet", "deletionVector": {"cardinality": 1}}}],
)
def test_delta_table_with_removed_rows_is_rejected(tmp_path: Path, action: dict[str, object]) -> None:
    write_files(tmp_path / "t", "part-0.parquet", "part-1.parquet")
    write_delta_commit(tmp_path / "t", 0, {"add": {"path": "part-0.parquet"}})
    write_delta_commit(tmp_path / "t", 1, action, {"add": {"path": "part-1.parquet"}})
    with pytest.raises(InputError, match=r"t: this Delta Lake table may hold files of older versions .*plain Parquet"):
        list_names(tmp_path)


def test_delta_table_whose_log_is_incomplete_is_rejected(tmp_path: Path) -> None:
    write_files(tmp_path, "part-0.parquet")
    write_delta_commit(tmp_path, 7, {"add": {"path": "part-0.parquet"}})
    with pytest.raises(InputError, match="without the first commit of its log, which is missing"):
        list_names(tmp_path)
    write_delta_commit(tmp_path, 0, {"add": {}})
    (tmp_path / "_delta_log" / f"{7:020}.json").write_text("{torn")
    with pytest.raises(InputError, match=r"00007\.json.* cannot be read"):
        list_names(tmp_path)


def test_delta_table_in_a_hidden_folder_is_ignored(tmp_path: Path) -> None:
    write_files(tmp_path, "a.parquet", ".old/part-0.parquet")
    write_delta_commit(tmp_path / ".old", 0, {"remove": {"path": "part-0.parquet"}})
    assert list_names(tmp_path) == ["a.parquet"]


def test_iceberg_table_with_appends_only_is_read_as_its_data_files(tmp_path: Path) -> None:
    write_files(tmp_path, "t/data/part-0.parquet", "t/metadata/version-hint.json", "metadata/a.parquet")
    write_iceberg_metadata(tmp_path / "t", "append", "append")
    assert list_names(tmp_path) == ["metadata/a.parquet", "t/data/part-0.parquet"]


def test_iceberg_table_with_overwritten_files_is_rejected(tmp_path: Path) -> None:
    write_files(tmp_path, "data/part-0.parquet", "data/part-1.parquet")
    write_iceberg_metadata(tmp_path, "append", "overwrite")
    with pytest.raises(InputError, match=r"this Iceberg table may hold files of older versions .*'overwrite'"):
        list_names(tmp_path)


def find_names(folder: Path, *inputs: str) -> list[str]:
    """Return the paths below a folder of the files that some inputs in it denote."""
    return [path.relative_to(folder).as_posix() for path in find_files([folder / entry for entry in inputs])]


def test_patterns_are_replaced_by_the_files_that_match(tmp_path: Path) -> None:
    write_files(tmp_path, "b.parquet", "a.csv", "a.CSV.GZ", "notes.txt", "_b.csv", ".c.csv", "d/1.csv", "d/e/2.csv")
    assert find_names(tmp_path, "*") == ["a.CSV.GZ", "a.csv", "b.parquet", "d/1.csv", "d/e/2.csv"]
    assert find_names(tmp_path, "?.csv") == ["a.csv"]
    assert find_names(tmp_path, "**/[12].csv") == ["d/1.csv", "d/e/2.csv"]
    assert find_names(tmp_path, "**") == find_names(tmp_path, "*")  # each file once
    assert find_names(tmp_path, "d", "a.csv") == ["d/1.csv", "d/e/2.csv", "a.csv"]


def test_patterns_skip_hidden_folders_and_descriptions_of_tables(tmp_path: Path) -> None:
    write_files(
        tmp_path, "t/a.parquet", "t/_delta_log/1.checkpoint.parquet", "t/_temporary/0/b.parquet", "t/.x/c.parquet"
    )
    write_files(tmp_path, "i/data/a.parquet", "i/metadata/stats.parquet", "no/metadata/a.parquet")
    write_iceberg_metadata(tmp_path / "i", "append")
    visible = ["i/data/a.parquet", "no/metadata/a.parquet", "t/a.parquet"]
    assert find_names(tmp_path, "**/*.parquet") == visible
    assert find_names(tmp_path, "t/_temporary/*/*.parquet") == ["t/_temporary/0/b.parquet"]  # named explicitly
    assert find_names(tmp_path, "*/*/*.parquet") == visible[:2]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    write_files(tmp_path, "[1].csv", "1.csv")
    assert find_names(tmp_path, "[1].csv") == ["[1].csv"]


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would be read twice: by training as records of their own, in part for calibration."""
    write_files(tmp_path, "d/1.csv", "d/2.csv")
    (tmp_path / "d" / "latest.csv").symlink_to(tmp_path / "d" / "2.csv")
    monkeypatch.chdir(tmp_path)
    for inputs in (["d/1.csv", "d/1.csv"], ["d/1.csv", tmp_path / "d" / "1.csv"], ["d/1.csv", "d/*.csv"], ["d"]):
        with pytest.raises(InputError, match=r"\.csv: the input names this file twice"):
            find_files(inputs)


def test_inputs_without_files_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, "notes.txt", "empty/notes.txt")
    cases = {
        "*.csv": "no Parquet, CSV or JSON lines file matches this pattern",
        "empty": "no Parquet, CSV or JSON lines file in this folder",
        "none.csv": "no such file or folder",
        "notes.txt": "unknown kind of file",
    }
    for entry, words in cases.items():
        with pytest.raises(InputError, match=words):
            find_files([tmp_path / entry])
    with pytest.raises(InputError, match="no Parquet or CSV file matches"):
        find_files([tmp_path / "*.json"], TABLES)
    write_files(tmp_path, "log.jsonl")
    with pytest.raises(InputError, match=r"deformer-stream init .*log\.jsonl converts them"):
        find_files([tmp_path / "log.jsonl"], TABLES)


def test_a_folder_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files must not be left out without a word."""
    write_files(tmp_path, "a.csv", "secret/b.csv", ".hidden/c.csv")
    list_folder = os.scandir

    def refuse(folder: str) -> object:
        if Path(folder).name in ("secret", ".hidden"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return list_folder(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"secret: the file or folder cannot be read \(permission denied\); make it"):
        find_files([tmp_path])


def test_a_parquet_file_may_have_any_ending(tmp_path: Path) -> None:
    (tmp_path / "table.data").write_bytes(b"PAR1...")
    assert find_names(tmp_path, "table.data") == ["table.data"]


def test_names_of_compressed_files_have_one_ending() -> None:
    assert [get_stem(name) for name in ("a/pump.1.csv", "pump.csv.gz", "pump.parquet", "x.tsv.GZ")] == [
        "pump.1",
        "pump",
        "pump",
        "x",
    ]
    assert has_ending("a.CSV.gz", CSV)
    assert not has_ending("a.gz", CSV)


def test_a_search_for_files_imports_nothing_heavy() -> None:
    code = "import sys, deformer_stream.tables.discovery; print(*{'torch', 'numpy', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
