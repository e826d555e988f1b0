"""Tests of `replay --output-dir`: the shards give what one process gives, and an interrupted run continues."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.cli.shards import run as shard_run
from deformer_stream.runtime.shard_job import divide_files, lock_folder
from tests.cli.shard_examples import ALPHA, OUTPUTS, compare, draw_readings, list_shards, place, read_file, write_lines
from tests.commands import RunCommand, assert_command_failed, make_record_table
from tests.integration.programs import list_workers
from tests.irregular_tables import make_long_table, write_irregular_model
from tests.s3 import BUCKET, run_server, write_parquet

EVIDENCE = {"evidence": "evidence.jsonl"}


@pytest.mark.usefixtures("in_this_process")
def test_wide_tables(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    summary = compare(cli, tmp_path, [wide], ("--model", model_dir, "--time-column", "at", *ALPHA), OUTPUTS | EVIDENCE)
    assert summary["records"] == 80
    assert summary["alerts"] > 0


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("shard_by", ["records", "files"])
def test_rows_without_record_ids_keep_their_numbers(
    cli: RunCommand, model_dir: Path, tmp_path: Path, shard_by: str
) -> None:
    table = make_record_table().drop_columns(["record"])
    for index in range(5):
        pq.write_table(table.slice(16 * index, 16), tmp_path / f"part-{index}.parquet")
    options = ("--model", model_dir, *ALPHA)
    shard_options = ("--shards", "4", "--shard-by", shard_by)
    summary = compare(cli, tmp_path, [str(tmp_path / "part-*.parquet")], options, OUTPUTS, shard_options)
    assert (summary["records"], summary["shards"]) == (80, 4)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("timeout", [(), ("--record-timeout", "2s")])
def test_readings_of_interleaved_records(
    cli: RunCommand, model_dir: Path, tmp_path: Path, kind: str, timeout: tuple[str, ...]
) -> None:
    """Time-outs close records between their readings, by the times of the whole input."""
    readings, inputs = draw_readings(60, 3), []
    for index, start in enumerate(range(0, len(readings), 12)):
        part = readings[start : start + 12]
        path = tmp_path / f"log-{index}.{kind}"
        inputs.append(path)
        if kind == "jsonl":
            write_lines(path, part)
        elif kind == "csv":
            pa.csv.write_csv(pa.Table.from_pylist(part), path)
        else:
            pq.write_table(pa.Table.from_pylist(part), path)
    if kind == "jsonl":
        inputs[0].write_text("no JSON\n\n" + inputs[0].read_text())
    if kind == "csv":
        inputs[1].write_text(inputs[1].read_text() + "1,2\n")
    options = ("--model", model_dir, "--ties", "arrival", *ALPHA, *timeout)
    summary = compare(cli, tmp_path, inputs, options, OUTPUTS | EVIDENCE)
    assert summary["rejected"]["unknown_feature"] > 0
    assert summary["alerts"] > 0
    # Readings that come after their record was closed are refused.
    # Without time-outs, 13 readings come a second time after their records are complete.
    assert (summary["rejected"]["late"] > 13) == bool(timeout)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("ties", ["arrival", "hold"])
def test_windows_of_devices(cli: RunCommand, model_dir: Path, tmp_path: Path, ties: str) -> None:
    """A window closes when its device has sent a later reading, so all readings of a device are in one shard."""
    readings = draw_readings(80, 5, "device", gap=2.0)
    for reading in readings:
        reading["device"] = f"pump-{int(reading['device'][1:]) % 7}"
        if ties == "hold":
            reading["time"] = round(reading["time"])
    path = write_lines(tmp_path / "log.jsonl", readings)
    options = ("--model", model_dir, "--window", "10s", "--grace", "2s", "--ties", ties, *ALPHA)
    summary = compare(cli, tmp_path, [path], options, OUTPUTS | EVIDENCE)
    assert summary["rejected"]["late"] > 0
    assert summary["alerts"] > 0


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("column", ["record", "device"])
def test_irregular_readings(cli: RunCommand, tmp_path: Path, column: str) -> None:
    from deformer_stream.model.windows import Window

    window = Window(600_000_000, 1) if column == "device" else None
    model = write_irregular_model(tmp_path / "m", window, d_model=64)
    table = make_long_table(400, column)
    pq.write_table(table, tmp_path / "in.parquet")
    summary = compare(
        cli, tmp_path, [tmp_path / "in.parquet"], ("--model", model, "--layout", "long"), OUTPUTS | EVIDENCE
    )
    assert summary["readings"] == 400
    assert summary["alerts"] > 0


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("label", "population"),
    [((), "records"), (("--label", "fault", "--normal", "none"), "records without a known fault")],
)
def test_the_share_of_alerts_is_that_of_all_shards(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path, label: tuple[str, ...], population: str
) -> None:
    """The last line states it as that of a run in one process, and before the warnings of single shards."""
    temperatures = [1e4 if i % 2 else value for i, value in enumerate(table["temperature"].to_pylist())]
    far = table.set_column(table.schema.get_field_index("temperature"), "temperature", pa.array(temperatures))
    far = far.append_column("fault", pa.array(["hot" if i % 4 == 1 else "none" for i in range(len(table))]))
    pq.write_table(far, tmp_path / "far.parquet")
    refused = [{"record": f"x{i}", "feature": "unknown", "value": 1.0} for i in range(20)]
    inputs = (tmp_path / "far.parquet", write_lines(tmp_path / "refused.jsonl", refused))
    words = ("replay", *inputs, "--model", model_dir, "--alpha", "0.1", "--drift", "off", *label)
    whole = cli(*words)
    in_shards = cli(*words, "--output-dir", tmp_path / "shards", "--shards", 10)
    assert (whole.code, in_shards.code) == (0, 0)
    share = re.search(rf"\d+% of {population} alerted, 10% is allowed; .*\)", whole.lines[-1])
    assert share is not None, whole.lines[-1]
    assert re.search(rf"; {re.escape(share[0])}; shard \d+: first unknown_feature: ", in_shards.lines[-1])
    summary = json.loads((tmp_path / "shards" / "summary.json").read_text())
    assert summary["alert_share"]["message"] == share[0]
    assert not any("is allowed" in entry["warning"] for entry in summary["warnings"])


@pytest.mark.usefixtures("in_this_process")
def test_hive_partitions_of_an_object_store(
    cli: RunCommand, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(monkeypatch) as (store, _):
        table = make_record_table()
        for index, site in enumerate("ABAB"):
            columns = table.slice(20 * index, 20).to_pydict()
            write_parquet(store, f"logs/site={site}/day={index}/0.parquet", columns)
        options = ("--model", model_dir, "--time-column", "at", *ALPHA)
        url = f"s3://{BUCKET}/logs"
        summary = compare(cli, tmp_path, [url], (*options, "--where", "site = 'A'"), OUTPUTS)
        assert summary["records"] == 40
        (tmp_path / "whole").rename(tmp_path / "of-site-a")
        # The folder is that of another condition.
        again = cli("replay", url, *options, "--output-dir", tmp_path / "in-shards", *place(OUTPUTS))
        assert_command_failed(again, 2, "--where was", "is not set", "another --output-dir")
        shutil.rmtree(tmp_path / "in-shards")
        assert compare(cli, tmp_path, [url], options, OUTPUTS)["records"] == 80


@pytest.mark.usefixtures("in_this_process")
def test_incidents_of_shards_are_those_of_one_process(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """The evidence of shards is merged in order of time. In one process, complete rows close in this order."""
    table = make_record_table()
    for index, name in enumerate(table.schema.names):
        column = table[name].combine_chunks()
        table = table.set_column(index, name, column.fill_null(column.drop_null()[0]))
    records = [f"pump-{i % 5}/{i}" for i in range(table.num_rows)]
    table = table.set_column(table.schema.get_field_index("record"), "record", pa.array(records))
    pq.write_table(table, tmp_path / "in.parquet")
    rule = ("--incident-budget", "50 per d", "--records-per-day", "200", "--fleet", "off")
    options = ("--model", model_dir, "--time-column", "at", "--alpha", "0.5", *rule)
    whole, folder = tmp_path / "incidents.jsonl", tmp_path / "out"
    assert cli("replay", tmp_path / "in.parquet", *options, "--incidents", whole).code == 0
    in_shards = ("--output-dir", folder, "--shards", "4", "--incidents", "incidents.jsonl")
    result = cli("replay", tmp_path / "in.parquet", *options, *in_shards)
    assert result.code == 0, result.err
    assert (folder / "incidents.jsonl").read_bytes() == whole.read_bytes()
    assert whole.read_bytes()


@pytest.mark.usefixtures("in_this_process")
def test_finished_shards_are_skipped(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    command = ("replay", wide, "--model", model_dir, "--output-dir", tmp_path / "out", *ALPHA)
    assert cli(*command, "--shards", "4").code == 0
    shards = tmp_path / "out" / "shards"
    expected_outputs = ["alerts.jsonl", "receipt.json", "records.parquet", "rejected.jsonl", "scores.parquet"]
    assert sorted(path.name for path in (shards / "00002").iterdir()) == expected_outputs
    summary = (tmp_path / "out" / "summary.json").read_text()
    identities = {path.name: path.stat().st_ino for path in shards.iterdir()}
    shutil.rmtree(shards / "00001")
    (tmp_path / "out" / "shards" / ".00001.0123.part").mkdir()  # as a process leaves it that was killed
    result = cli(*command, "--shards", "4", "--workers", "2")
    assert result.code == 0, result.err
    assert "3 of 4 shards are finished and are skipped" in result.err
    now = {path.name: path.stat().st_ino for path in shards.iterdir()}
    assert now.keys() == identities.keys()
    assert {name for name in now if now[name] != identities[name]} <= {"00001"}

    def without_seconds(text: str) -> dict[str, Any]:
        return {name: value for name, value in json.loads(text).items() if name != "seconds_of_workers"}

    assert without_seconds((tmp_path / "out" / "summary.json").read_text()) == without_seconds(summary)
    # Nothing is left to do.
    assert "4 of 4 shards" in cli(*command).err


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_of_another_run_is_refused(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = ("replay", wide, "--model", model_dir, "--output-dir", folder)
    assert cli(*command).code == 0
    assert_command_failed(cli(*command, "--alpha", "0.2"), 2, "--alpha was [0.01] and is [0.2]", "delete this folder")
    assert_command_failed(cli(*command, "--shards", "9"), 2, "the number of shards was 8 and is 9")
    assert_command_failed(cli(*command, "--shard-by", "files"), 2, "--shard-by was records and is files")
    with lock_folder(folder):
        assert_command_failed(cli(*command), 2, "in use by another process")
    table = pq.read_table(wide)
    pq.write_table(table.slice(1), wide)
    assert_command_failed(cli(*command), 2, f"the input {wide.resolve()} has changed")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"model": "other"}))
    assert_command_failed(cli(*command), 2, "the model was other and is")
    (folder / "manifest.json").write_text(json.dumps(manifest | {"faults": [{"file": {"size": 1}}]}))
    assert_command_failed(cli(*command), 2, "the classifier of faults has changed")
    (folder / "manifest.json").write_text("[]")
    assert_command_failed(cli(*command), 2, "manifest.json cannot be read")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for other in (tmp_path / "full", model_dir):  # a model directory also has a file manifest.json
        result = cli("replay", wide, "--model", model_dir, "--output-dir", other)
        assert_command_failed(result, 2, "is not empty")
        assert not (other / ".lock").exists()


def test_options_that_do_not_fit_are_refused(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    command = ("replay", wide, "--model", model_dir)
    folder = ("--output-dir", tmp_path / "out")
    assert_command_failed(cli(*command, "--workers", "2"), 2, "add --output-dir")
    assert_command_failed(cli(*command, *folder, "--alerts", "-"), 2, "--alerts -")
    assert_command_failed(cli(*command, *folder, "--records", tmp_path / "r.parquet"), 2, "without a folder")
    assert_command_failed(cli(*command, *folder, "--rejected", "a.jsonl", "--alerts", "a.jsonl"), 2, "same name")
    for name in ("receipt.json", "manifest.json", "shards"):
        assert_command_failed(cli(*command, *folder, "--rejected", name), 2, f"--rejected {name}", "another name")
    assert_command_failed(cli(*command, "--output-dir", "s3://plant/out"), 2, "cannot be in an object store")
    assert not Path("s3:").exists()
    assert_command_failed(cli(*command, *folder, "--drift", "1000"), 2, "--drift needs all records")
    assert_command_failed(cli("replay", "-", "--model", model_dir, *folder), 2, "standard input")
    inside = ("--output-dir", wide.parent / "out")
    assert_command_failed(cli("replay", wide.parent, "--model", model_dir, *inside), 2, "in the input folder")
    lines = write_lines(tmp_path / "log.jsonl", draw_readings(3, 1))
    reordered = cli("replay", lines, "--model", model_dir, *folder, "--order", "random")
    assert_command_failed(reordered, 2, "--order random")


@pytest.mark.usefixtures("in_this_process")
def test_files_are_on_the_disk_before_a_folder_has_its_name(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure could otherwise leave a shard that counts as finished, with empty files."""
    synced: set[int] = set()
    rename, sync = Path.rename, os.fsync

    def record(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def check(path: Path, target: Path) -> Path:
        if path.name.startswith(".0"):
            assert {file.stat().st_ino for file in (path, *path.iterdir())} <= synced, path
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", check)
    options = ("--time-column", "at", "--shards", "2", *place(OUTPUTS | EVIDENCE))
    assert cli("replay", wide, "--model", model_dir, "--output-dir", tmp_path / "out", *options).code == 0


@pytest.mark.usefixtures("in_this_process")
def test_the_input_grows_or_changes_while_shards_are_scored(
    cli: RunCommand, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, log = make_record_table(), tmp_path / "log"
    log.mkdir()
    for index in range(2):
        pq.write_table(table.slice(20 * index, 20), log / f"{index + 1}.parquet")
    open_job = shard_run.open_job

    def run_while(change: Callable[[], object]) -> Any:
        def open_and_change(*arguments: Any) -> Any:
            opened = open_job(*arguments)
            change()
            return opened

        monkeypatch.setattr(shard_run, "open_job", open_and_change)
        return cli("replay", log, "--model", model_dir, "--output-dir", tmp_path / "out", "--shards", "2")

    (log / "4.parquet").write_bytes(b"PAR1 not read")
    (log / "4.parquet").rename(tmp_path / "4.parquet")
    result = run_while(lambda: (tmp_path / "4.parquet").rename(log / "0.parquet"))
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["records"] == 40
    (log / "0.parquet").unlink()
    for change in (lambda: os.utime(log / "1.parquet"), (log / "1.parquet").unlink):
        shutil.rmtree(tmp_path / "out")
        result = run_while(change)
        assert (result.code, "1.parquet: the input has changed while it was read" in result.err) == (3, True)


class PoolWithoutOutputs:
    """A pool whose processes write to a folder that this process does not see."""

    def run(self, tasks: Sequence[int], *_: object) -> list[tuple[int, dict[str, int]]]:
        return [(task, {"readings": 1}) for task in tasks]


def test_outputs_that_are_not_in_the_folder_of_this_process_are_an_error(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of Ray may see another folder under the same path."""
    monkeypatch.setattr(shard_run, "_make_pool", lambda *_: PoolWithoutOutputs())
    monkeypatch.setattr(shard_run, "VISIBLE_SECONDS", 0.1)
    result = cli("replay", wide, "--model", model_dir, "--output-dir", tmp_path / "out", "--engine", "ray")
    assert result.code == 2
    assert "waiting_for_written_folders" in result.err
    assert "the same one on all machines of RAY_ADDRESS" in result.lines[-1]


def test_missing_outputs_of_local_processes_are_an_error_at_once(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other machine writes them, so waiting cannot help."""
    monkeypatch.setattr(shard_run, "_make_pool", lambda *_: PoolWithoutOutputs())
    monkeypatch.setattr(shard_run, "VISIBLE_SECONDS", 0.1)
    result = cli("replay", wide, "--model", model_dir, "--output-dir", tmp_path / "out", "--shards", "3")
    assert result.code == 2
    assert f"{tmp_path / 'out'} lacks what the processes have written there (1 folder missing)" in result.lines[-1]
    assert "waiting" not in result.err
    assert "ray" not in result.err.lower()


@pytest.mark.usefixtures("in_this_process")
def test_outputs_that_this_machine_sees_later_than_they_were_written_are_awaited(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS may answer for some seconds that a folder does not exist, which another machine has renamed.

    It asks the server when its parent is opened. Here it answers wrongly some times even then.
    """
    monkeypatch.setattr(shard_run, "RETRY_SECONDS", 0.01)
    folder, stale = tmp_path / "out", dict[str, int]()
    open_file, exists = os.open, Path.exists
    opened: list[str] = []

    def is_stale(path: Path) -> bool:
        """Return whether the file system still hides a folder that exists."""
        if path.parent.parent != folder or not path.name.isdigit() or not exists(path):
            return False
        stale[str(path)] = stale.get(str(path), 0) + 1
        return stale[str(path)] <= 3

    def open_later(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if isinstance(path, Path):
            opened.append(path.name)
            if is_stale(path):
                raise FileNotFoundError(path)
        return open_file(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", open_later)
    options = ("--model", model_dir, "--output-dir", folder, "--shards", "2", "--engine", "ray")
    result = cli("replay", wide, *options)
    assert result.code == 0, result.err
    assert "waiting_for_written_folders" in result.err
    assert json.loads((folder / "summary.json").read_text())["records"] == pq.read_metadata(wide).num_rows
    # The parent is opened each time, before its folders.
    order = [name for name in opened if name in ("shards", "00000")]
    assert ("shards", "00000") in pairwise(order)


def test_the_wait_for_outputs_ends_when_the_command_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, job = threading.Event(), SimpleNamespace(folder=tmp_path, settings=SimpleNamespace(engine="ray"))
    calls: list[None] = []

    def list_missing() -> list[int]:
        calls.append(None)
        if len(calls) == 3:
            stop.set()
        return [4]

    monkeypatch.setattr(shard_run, "RETRY_SECONDS", 0.0)
    assert shard_run._wait_until_written(job, list_missing, stop) == [4]  # type: ignore[arg-type]
    assert len(calls) == 3


def run_program(
    model: Path, inputs: Sequence[Path], folder: Path, *options: str, **others: Any
) -> subprocess.Popen[str]:
    """Start `replay --output-dir` in a process of its own, with two workers."""
    command = [sys.executable, "-m", "deformer_stream.cli", "replay", *map(str, inputs), "--model", str(model)]
    command += ["--output-dir", str(folder), "--workers", "2", "--shards", "6", *ALPHA, *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **others)


@pytest.mark.slow
def test_processes_score_shards_and_a_killed_run_continues(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """Kill the run as soon as one shard is finished, then a worker of the next run, and compare with one process."""
    inputs = [write_lines(tmp_path / "log.jsonl", draw_readings(700, 0))]
    whole, folder = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    assert cli("replay", *inputs, "--model", model_dir, *ALPHA, *place(OUTPUTS, whole)).code == 0
    process = run_program(model_dir, inputs, folder, *place(OUTPUTS))
    _wait_until(lambda: bool(list_shards(folder)) or process.poll() is not None)
    process.kill()
    process.communicate()
    finished = list_shards(folder)
    assert 0 < len(finished) < 6
    process = run_program(model_dir, inputs, folder, *place(OUTPUTS))
    _wait_until(lambda: bool(list_workers(process.pid)) or process.poll() is not None)
    os.kill(list_workers(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert f"{len(finished)} of 6 shards are finished and are skipped" in err
    assert "worker_died" in err
    assert finished.items() <= list_shards(folder).items(), "no finished shard was written again"
    assert [path for path in (folder / "shards").iterdir() if path.name.startswith(".")] == []
    for name in OUTPUTS.values():
        rows = [row for shard in sorted(list_shards(folder)) for row in read_file(folder / "shards" / shard / name)]
        assert sorted(rows) == read_file(whole / name)


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_continue(model_dir: Path, tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "log.jsonl", draw_readings(700, 1))]
    process = run_program(model_dir, inputs, tmp_path / "out")
    _wait_until(lambda: bool(list_shards(tmp_path / "out")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130, err
    assert "of 6 shards are finished; the same command continues" in err.splitlines()[-1]


def _wait_until(condition: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 20))
def test_ranges_of_files_cover_all_files_once(sizes: list[int], max_ranges: int) -> None:
    ranges = divide_files(sizes, max_ranges)
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(len(sizes)))
    assert all(start < stop for start, stop in ranges)
    assert len(ranges) <= max_ranges
