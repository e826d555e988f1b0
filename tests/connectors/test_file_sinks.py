"""Tests of files as sinks: complete files, and errors while writing. The formats are tested in tests/golden."""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files import AlertLines, LinesSink, RecordsTable, ScoresTable, sinks
from connectors.files.sinks import RowsTable, write_rows
from connectors.files.table_writers import read_written_table
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.tables.discovery import check_no_overwrite
from tests.contracts.effects import SCHEMA, make_effects


def test_parquet_file_gets_its_name_when_it_is_closed_and_is_removed_when_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ROW_GROUP_SIZE", 10)
    path = tmp_path / "scores.parquet"
    path.write_text("previous run")
    sink = ScoresTable(path, {ONLY_MODEL: SCHEMA})
    for first in range(0, 100, 2):
        sink.write(*make_effects(first))
    assert path.read_text() == "previous run"
    sink.close()
    file = pq.ParquetFile(path)
    assert (file.metadata.num_rows, file.metadata.num_row_groups) == (300, 25)
    file.close()
    before = path.read_bytes()
    failed = ScoresTable(path, {ONLY_MODEL: SCHEMA})
    failed.write(*make_effects(0))
    failed.discard()
    failed.close()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["scores.parquet"]
    records = RecordsTable(tmp_path / "none.parquet")
    records.close()
    records.discard()
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0  # an empty run leaves an empty table


@pytest.mark.parametrize(("name", "delimiter"), [("scores.csv", ","), ("scores.TSV", "\t")])
def test_csv_has_the_rows_of_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, delimiter: str
) -> None:
    """Numbers keep all their digits, and nulls differ from empty texts."""
    monkeypatch.setattr(sinks, "ROW_GROUP_SIZE", 10)
    for path in (tmp_path / name, tmp_path / "scores.parquet"):
        sink = ScoresTable(path, {ONLY_MODEL: SCHEMA})
        for first in range(0, 100, 2):
            sink.write(*make_effects(first))
        assert not path.exists()
        sink.close()
    expected = pq.read_table(tmp_path / "scores.parquet")
    lines = (tmp_path / name).read_text().splitlines()
    assert len(lines) == 301
    assert lines[0].split(delimiter)[:2] == ['"record"', '"seq"']
    assert read_written_table(tmp_path / name, expected.schema).equals(expected)
    columns = pa.schema([expected.schema.field(column) for column in ("seq", "label")])
    assert read_written_table(tmp_path / name, columns).equals(expected.select(["seq", "label"]))
    failed = ScoresTable(tmp_path / name, {ONLY_MODEL: SCHEMA})
    failed.write(*make_effects(0))
    failed.discard()
    assert len((tmp_path / name).read_text().splitlines()) == 301
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "scores.parquet"])


def test_csv_of_dictionaries_and_of_columns_that_it_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = pa.table({"a": pa.array(["x", "", None, "x"]).dictionary_encode(), "b": pa.array([1.5, None, 2.0, -0.0])})
    with write_rows(path, rows.schema) as sink:
        for batch in rows.to_batches():
            sink.append(batch)
    assert path.read_text() == '"a","b"\n"x",1.5\n"",\n,2\n"x",-0\n'
    with pytest.raises(ConfigError, match=r"rows\.csv: CSV cannot hold the column 'c' of the type list<.*\.parquet$"):
        RowsTable(path, pa.schema([("c", pa.list_(pa.int32()))]))


def test_alerts_are_written_to_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    sink = AlertLines("-")
    sink.write(*make_effects(0))
    sink.flush()
    assert [orjson.loads(line)["record"] for line in raw.getvalue().splitlines()] == ["r0", "r1"]
    sink.close()
    assert not raw.closed


def test_output_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scores\.parquet: the file cannot be written \(No such file or directory\)"):
        ScoresTable(tmp_path / "no" / "scores.parquet", {ONLY_MODEL: SCHEMA})
    with pytest.raises(ConfigError, match="cannot be written"):
        AlertLines(tmp_path)
    for name in (
        "scores.csv.gz",
        "scores.jsonl",
        "q.xlsx",
        "Q.XLS",
        "q.txt",
        "q.json",
        "q.parquet.gz",
        "model.safetensors",
    ):
        with pytest.raises(ConfigError, match=r"Parquet or CSV.*\.parquet, \.csv or \.tsv$"):
            ScoresTable(tmp_path / name, {ONLY_MODEL: SCHEMA})
    with pytest.raises(ConfigError, match=r"JSON lines.*\.jsonl$"):
        AlertLines(tmp_path / "alerts.parquet")
    assert list(tmp_path.iterdir()) == []
    full = AlertLines("/dev/full")
    full.write(*make_effects(0))
    with pytest.raises(Unavailable, match="writing failed"):
        full.flush()
    with pytest.raises(Unavailable, match="writing failed"):
        full.close()
    full.close()


def test_full_disk_is_reported_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a row group that is written in the background is raised with a later write."""
    monkeypatch.setattr(sinks, "ROW_GROUP_SIZE", 10)
    sink = ScoresTable(tmp_path / "scores.parquet", {ONLY_MODEL: SCHEMA})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> None:
        for first in range(0, 100, 2):
            sink.write(*make_effects(first))

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(Unavailable, match=r"scores\.parquet: writing failed"):
            write()
        sink.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["scores", "scores.pq", "wide.parquet.records", "2026.04.01"])
def test_table_without_a_known_ending_is_parquet(tmp_path: Path, name: str) -> None:
    ScoresTable(tmp_path / name, {ONLY_MODEL: SCHEMA}).close()
    assert pq.read_table(tmp_path / name).num_rows == 0


def test_file_of_an_interrupted_run_keeps_its_temporary_name(tmp_path: Path) -> None:
    """The rows and lines so far can be read there, and the next run replaces them."""
    for name, open_sink in (
        ("scores.parquet", lambda path: ScoresTable(path, {ONLY_MODEL: SCHEMA})),
        ("records.csv", RecordsTable),
        ("alerts.jsonl", AlertLines),
    ):
        path = tmp_path / name
        path.write_text("previous run")
        interrupted = open_sink(path)
        interrupted.write(*make_effects(0))
        partial_path = interrupted.keep_partial()
        interrupted.discard()
        interrupted.close()
        assert interrupted.keep_partial() is None
        assert partial_path == tmp_path / f"{name}.part"
        assert path.read_text() == "previous run"
        so_far = partial_path.read_bytes()
        complete = open_sink(path)
        complete.write(*make_effects(0))
        complete.close()
        assert complete.keep_partial() is None
        assert path.read_bytes() == so_far
        assert not partial_path.exists()
    standard_output = AlertLines("-")
    assert standard_output.keep_partial() is None


def test_lines_before_an_error_are_kept_under_the_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    path.write_text("previous run")
    failed = AlertLines(path)
    failed.write(*make_effects(0))
    failed.discard()
    assert path.read_text() == "previous run"
    assert len((tmp_path / "alerts.jsonl.part").read_bytes().splitlines()) == 2


def test_a_link_is_kept_and_its_target_is_replaced(tmp_path: Path) -> None:
    """Two names of the same file are locked as one."""
    (tmp_path / "folder").mkdir()
    for name, open_sink in (("records.parquet", RecordsTable), ("alerts.jsonl", AlertLines)):
        link, target = tmp_path / name, tmp_path / "folder" / name
        link.symlink_to(target)
        sink = open_sink(link)
        with pytest.raises(ConfigError, match="another process is writing it"):
            open_sink(target)
        sink.close()
        assert link.is_symlink()
        assert target.is_file()


def test_several_processes_append_lines_to_a_file(tmp_path: Path) -> None:
    sinks = [AlertLines(tmp_path / "alerts.jsonl", append=True) for _ in range(2)]
    for sink in sinks:
        sink.write(*make_effects(0))
        sink.flush()
    with pytest.raises(ConfigError, match="another process is writing it"):
        AlertLines(tmp_path / "alerts.jsonl")  # would replace the file, to which the others append
    for sink in sinks:
        sink.close()
    assert len((tmp_path / "alerts.jsonl").read_bytes().splitlines()) == 4
    replaced = AlertLines(tmp_path / "alerts.jsonl")
    with pytest.raises(ConfigError, match="another process is writing it"):
        AlertLines(tmp_path / "alerts.jsonl", append=True)
    replaced.close()
    assert (tmp_path / "alerts.jsonl").read_bytes() == b""


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    path.write_text("earlier")
    path.chmod(0o640)
    RecordsTable(path).close()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_renamed_over_gets_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a file that is mounted into a container by its name."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    path = tmp_path / "alerts.jsonl"
    path.write_text("earlier")
    sink = AlertLines(path)
    sink.write(*make_effects(0))
    monkeypatch.setattr(Path, "replace", refuse)
    sink.close()
    assert len(path.read_bytes().splitlines()) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alerts.jsonl"]


@pytest.mark.parametrize(
    ("name", "open_sink"),
    [
        ("scores.parquet", lambda path: ScoresTable(path, {ONLY_MODEL: SCHEMA})),
        ("records.csv", RecordsTable),
        ("alerts.jsonl", AlertLines),
        ("events.jsonl", lambda path: LinesSink(path, is_live=True)),
    ],
)
def test_one_process_writes_a_file_at_a_time(tmp_path: Path, name: str, open_sink: Callable[[Path], Any]) -> None:
    """The lock belongs to the open file, so that two sinks of a process exclude each other as those of two do."""
    path = tmp_path / name
    first = open_sink(path)
    with pytest.raises(ConfigError, match=rf"{name}: another process is writing it; wait .* or choose another path$"):
        open_sink(path)
    first.close()
    complete = path.read_bytes()
    second = open_sink(path)
    with pytest.raises(ConfigError, match="another process is writing it"):
        open_sink(path)
    second.discard()
    third = open_sink(path)
    third.close()
    assert path.read_bytes() == complete


def test_lines_that_others_read_are_in_the_file_when_they_are_flushed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("previous run")
    sink = LinesSink(path, is_live=True)
    sink.write_lines([b"{}"])
    sink.flush()
    assert path.read_bytes() == b"{}\n"
    assert sink.keep_partial() is None
    assert path.read_bytes() == b"{}\n"


def test_lines_are_appended_to_a_file(tmp_path: Path) -> None:
    sink = LinesSink(tmp_path / "events.jsonl")
    sink.write_lines([b'{"record":"r"}'])
    sink.write_lines([])
    sink.write_lines([b'{"record":"s"}'])
    sink.close()
    sink.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"record":"r"}\n{"record":"s"}\n'


def test_output_must_not_replace_an_input_or_another_output(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.parquet").touch()
    (tmp_path / "link.parquet").symlink_to(folder / "a.parquet")
    free = tmp_path / "new.parquet"
    check_no_overwrite([folder], {"--output": free, "--records": None, "--alerts": "", "--rejected": "-"})
    check_no_overwrite(["-"], {"--output": "-", "--alerts": "-"})
    check_no_overwrite([folder], {"--alerts": "/dev/null", "--rejected": "/dev/null"})
    for taken in (folder / "a.parquet", tmp_path / "link.parquet", folder / ".." / "logs" / "a.parquet"):
        with pytest.raises(ConfigError, match=r"--output .* is also an input"):
            check_no_overwrite([folder], {"--output": taken})
    with pytest.raises(ConfigError, match=r"--records .* is also the output of --output"):
        check_no_overwrite([folder], {"--output": free, "--records": str(free)})


def test_lines_can_be_written_to_a_device(tmp_path: Path) -> None:
    sink = AlertLines("/dev/null")
    sink.close()
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ConfigError, match="a pipe or a device"):
        sinks.TableSink(tmp_path / "pipe.parquet", pa.schema([("a", pa.int64())]))
    assert (tmp_path / "pipe.parquet").is_fifo()
