"""Tests of `calibrate --workers`: shards give the calibration of one process, and an interrupted run continues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.calibration import recalibrate
from deformer_stream.cli.shards import run as shard_run
from deformer_stream.incident_store import read_incident_calibration
from deformer_stream.runtime import calibration_sink
from tests.cli.shard_calibrations import SHARDS, compare, list_files
from tests.cli.shard_examples import draw_readings, write_lines
from tests.commands import RunCommand, assert_command_failed, make_record_table
from tests.integration.programs import list_workers
from tests.irregular_tables import make_long_table, write_irregular_model


@pytest.fixture
def few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits beyond which records are chosen, so that a small input exceeds them."""
    monkeypatch.setattr(recalibrate, "MAX_CALIBRATION_RECORDS", 41)
    monkeypatch.setattr(calibration_sink, "NUM_RECORDS_WITH_READINGS", 23)


@pytest.mark.usefixtures("in_this_process", "few_records")
@pytest.mark.parametrize("order", [(), ("--order", "random"), ("--order", "next")])
def test_rows(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, order: tuple[str, ...]) -> None:
    calibration = compare(cli, tmp_path, model_dir, [wide], *order).calibration
    assert len(calibration.scores) == 41
    assert len(calibration.mean_neg_log_p_by_feature) > 3
    assert calibration.arrival_order == (order[1] if order else "random")


@pytest.mark.usefixtures("in_this_process", "few_records")
def test_rows_without_ids_in_several_files(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    table = make_record_table().drop_columns(["record"])
    inputs = [tmp_path / f"part-{index}.parquet" for index in range(5)]
    for index, path in enumerate(inputs):
        pq.write_table(table.slice(16 * index, 16), path)
    compare(cli, tmp_path, model_dir, inputs, shard_options=("--shard-by", "files"))


@pytest.mark.usefixtures("in_this_process", "few_records")
@pytest.mark.parametrize("timeout", [(), ("--record-timeout", "2s")])
def test_readings_of_interleaved_records(
    cli: RunCommand, model_dir: Path, tmp_path: Path, timeout: tuple[str, ...]
) -> None:
    inputs = [write_lines(tmp_path / "log.jsonl", draw_readings(120, 3))]
    compare(cli, tmp_path, model_dir, inputs, "--ties", "arrival", *timeout)


@pytest.mark.usefixtures("in_this_process", "few_records")
def test_windows_of_devices_in_groups(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    readings = draw_readings(240, 5, "device", gap=2.0)
    for reading in readings:
        reading["device"] = f"pump-{int(reading['device'][1:]) % 3}"
    path = write_lines(tmp_path / "log.jsonl", readings)
    options = ("--window", "4s", "--group-by", "device", "--trim", "0.05")
    assert len(compare(cli, tmp_path, model_dir, [path], *options).calibration.calibration_by_group) == 3


@pytest.mark.usefixtures("in_this_process")
def test_irregular_readings(cli: RunCommand, tmp_path: Path) -> None:
    model = write_irregular_model(tmp_path / "m", None, d_model=64)
    pq.write_table(make_long_table(800, "record"), tmp_path / "in.parquet")
    compare(cli, tmp_path, model, [tmp_path / "in.parquet"], "--layout", "long")


@pytest.mark.usefixtures("in_this_process")
def test_finished_shards_are_skipped(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration that was refused in the end keeps its shards; so does one that was interrupted."""
    folder, model = tmp_path / ".out.calibration", tmp_path / "model"
    assert cli("calibrate", wide, "--model", model_dir, "--out", model).code == 0
    command = ("calibrate", wide, "--model", model, "--out", tmp_path / "out", *SHARDS)
    assert_command_failed(cli(*command), 3, "80 of 80 records were used to calibrate this model")
    assert not (tmp_path / "out").exists()
    leftover = tmp_path / "..out.calibration.part"  # of a process that was killed while it deleted shards
    (leftover / "shards").mkdir(parents=True)
    shutil.rmtree(folder / "shards" / "00002")
    with monkeypatch.context() as patch:
        patch.setattr(shard_run, "_run_tasks", lambda *arguments: arguments[-1].set() or 0)  # as a signal does
        result = cli(*command)
        assert (result.code, result.lines[-2:]) == (
            130,
            [
                "interrupted: 4 of 5 shards are finished; the same command continues",
                "the calibration was interrupted, so no model was written",
            ],
        )
    assert_command_failed(cli(*command, "--ties", "hold"), 2, "--ties was not set", "another --out", "delete this")
    result = cli(*command, "--seen-records", "allow", "--workers", "2")
    assert result.code == 0, result.err
    assert "4 of 5 shards are finished and are skipped" in result.err
    assert not folder.exists()
    assert not leftover.exists()


@pytest.mark.usefixtures("in_this_process")
def test_a_calibration_whose_evidence_cannot_be_read_can_be_repeated(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path
) -> None:
    """Otherwise the records would count as seen, and a repetition would be refused."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    before = model_store.read(model).fingerprint
    evidence = tmp_path / "evidence.jsonl"
    evidence.write_text("no evidence\n")
    result = cli("calibrate", wide, "--model", model, "--incidents", evidence, *SHARDS)
    assert result.code == 3, result.err
    assert model_store.read(model).fingerprint == before
    result = cli("replay", wide, "--model", model, "--evidence", evidence)
    assert result.code == 0, result.err
    result = cli("calibrate", wide, "--model", model, "--incidents", evidence, *SHARDS)
    assert result.code == 0, result.err
    assert "5 of 5 shards are finished and are skipped" in result.err
    fingerprint = model_store.read(model).fingerprint
    assert fingerprint != before
    incidents = read_incident_calibration(model)
    assert incidents is not None
    assert incidents.model == fingerprint
    assert f"segments of {fingerprint}" in result.err
    assert [path.name for path in tmp_path.iterdir() if "calibration" in path.name] == []


@pytest.mark.usefixtures("in_this_process")
def test_shards_of_a_review_remain_for_the_calibration_without_the_confirmed_records(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path
) -> None:
    command = ("calibrate", wide, "--model", model_dir, "--out", tmp_path / "out", *SHARDS)
    folder, review = tmp_path / ".out.calibration", tmp_path / "review.csv"
    result = cli(*command, "--review", "3")
    assert result.code == 0, result.err
    assert f"the scored shards remain in {folder}" in result.err
    lines = result.out.splitlines(keepends=True)
    review.write_text(lines[0] + lines[1].rstrip() + "yes\n" + "".join(lines[2:]))
    result = cli(*command, "--anomalous", review)
    assert result.code == 0, result.err
    assert "5 of 5 shards are finished and are skipped" in result.err
    assert "left out: 1 confirmed record" in result.err
    assert not folder.exists()


def test_the_first_warning_and_the_number_of_the_others_are_stated() -> None:
    warnings = shard_run.list_warnings([{"warnings": []}, {"warnings": ["a", "b"]}, {"warnings": ["c"]}])
    assert shard_run.describe_warnings(warnings) == "shard 1: a (and 2 more warnings)"
    assert shard_run.describe_warnings(warnings, "summary.json") == "shard 1: a (and 2 more warnings in summary.json)"
    assert shard_run.describe_warnings(warnings[2:]) == "shard 2: c"


def test_options_that_do_not_fit_are_refused(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    command = ("--model", model_dir, "--out", tmp_path / "out", "--workers", "2")
    assert_command_failed(cli("calibrate", "-", *command), 2, "standard input", "leave out --workers")
    (tmp_path / "e.jsonl").touch()
    assert_command_failed(
        cli("calibrate", "--incidents", tmp_path / "e.jsonl", *command), 2, "--workers", "no input is given"
    )
    table = write_lines(tmp_path / "log.jsonl", draw_readings(3, 1))
    assert_command_failed(cli("calibrate", table, *command, "--order", "random"), 2, "--order random", "--workers")
    inside = cli("calibrate", tmp_path, *command)
    assert_command_failed(inside, 2, "in the input folder")


@pytest.mark.slow
@pytest.mark.charts
def test_processes_collect_records_and_a_killed_run_continues(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """Kill the run as soon as one shard is finished, then a worker of the next run, and compare with one process."""
    lines = write_lines(tmp_path / "log.jsonl", draw_readings(700, 0))
    command: list[Any] = ["calibrate", lines, "--model", model_dir]
    assert cli(*command, "--out", tmp_path / "whole").code == 0
    words = [*map(str, command), "--out", str(tmp_path / "out"), "--workers", "2", "--shards", "6"]
    shards = tmp_path / ".out.calibration" / "shards"

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", "deformer_stream.cli", *words]
        return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)

    def list_shards() -> set[str]:
        return {path.name for path in shards.glob("[0-9]*")}

    process = start()
    while not list_shards() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    num_finished = len(list_shards())
    assert 0 < num_finished < 6
    process = start()
    while not list_workers(process.pid) and process.poll() is None:
        time.sleep(0.01)
    os.kill(list_workers(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert f"{num_finished} of 6 shards are finished and are skipped" in err
    assert list_files(tmp_path / "out") == list_files(tmp_path / "whole")
