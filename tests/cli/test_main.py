"""The commands from end to end on files, with their outputs and their errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from connectors.files import RecordsTable, ScoresTable
from deformer_stream import model_store
from deformer_stream.model.schema import Schema
from tests.commands import RunCommand, assert_command_failed, list_events, read_json_lines
from tests.models import SCHEMA, draw_rows, write_model

SECRET = "hunter2-äöü"


# replay


def test_replay_writes_scores_records_alerts_and_rejected_events(
    cli: RunCommand, model_dir: Path, lines: Path, table: pa.Table, tmp_path: Path
) -> None:
    extra = [
        "not json",
        json.dumps({"record": "r0", "feature": "nonsense", "value": 1}),
        lines.read_text().split("\n", 1)[0],
    ]
    with lines.open("a") as file:
        file.write("\n".join(extra) + "\n")
    flags = {
        "--output": "scores.parquet",
        "--records": "records.parquet",
        "--alerts": "alerts.jsonl",
        "--rejected": "rejected.jsonl",
        "--explain": "why.parquet",
    }
    out = {name: tmp_path / name for name in flags.values()}
    options = [word for flag, name in flags.items() for word in (flag, out[name])]
    for program in ("deformer-stream", "deformer-replay"):
        for path in out.values():
            path.unlink(missing_ok=True)
        arguments = [*(["replay"] if program == "deformer-stream" else []), lines, "--model", model_dir, *options]
        result = cli(*arguments, "--alpha", "0.3", program=program)
        assert (result.code, result.out) == (0, "")
    scores, records, alerts, rejected, reasons = (
        pq.read_table(path).to_pylist() if path.suffix == ".parquet" else read_json_lines(path) for path in out.values()
    )
    events = list_events(table)
    assert [(s["record"], s["feature"]) for s in scores] == [(e["record"], e["feature"]) for e in events]
    assert {r["record"] for r in records} == {e["record"] for e in events}
    assert sum(r["events"] for r in records) == len(events)
    assert [a["record"] for a in alerts] == [s["record"] for s in scores if s["alert"]]
    assert {a["record"] for a in alerts} == {r["record"] for r in records if r["alerted"]}
    assert len(alerts) >= 5
    assert [(w["record"], w["rank"], w["feature"], w["surprise"]) for w in reasons] == [
        (a["record"], k, c["feature"], c["surprise"]) for a in alerts for k, c in enumerate(a["contributions"])
    ]
    assert Counter(r["reason"] for r in rejected) == {"not_json": 1, "unknown_feature": 1, "late": 1}
    assert result.lines == [
        f"{len(events)} events accepted, 3 refused (1 not_json, 1 unknown_feature, 1 late), "
        f"{len(records)} records, {len(alerts)} alerts at alpha 0.3"
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([lines.name, *out])


def test_the_last_line_of_replay_shows_why_readings_were_refused(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    events = list_events(table)
    for event in events:
        event["time"] = "2024-02-01 00:00:00"
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = cli("replay", path, "--model", model_dir, "--rejected", tmp_path / "rejected.jsonl")
    last = result.lines[-1]
    assert result.code == 3, "all readings were refused"
    assert len(read_json_lines(tmp_path / "rejected.jsonl")) == len(events)
    assert last.startswith(f"0 events accepted, {len(events)} refused ({len(events)} wrong_type)")
    assert "no reading was accepted; first wrong_type: the time '2024-02-01 00:00:00' has no UTC offset" in last
    path.write_text(json.dumps(events))
    last = cli("replay", path, "--model", model_dir).lines[-1]
    assert "first not_json: the message is a list; a JSON object is expected: write one per message" in last
    del events[0]["record"]
    for event in events:
        del event["time"]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = cli("replay", path, "--model", model_dir)
    assert result.code == 0
    assert result.lines[-1].count("missing_field") == 1, "one of many needs no example"


@pytest.mark.usefixtures("in_this_process")
def test_lines_of_rows_as_objects_are_refused_with_the_form_that_they_need(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = table.drop_columns(["record", "at"]).to_pylist()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cli("replay", path, "--model", model_dir)
    assert result.code == 3
    assert f"0 events accepted, {len(rows)} refused ({len(rows)} missing_field)" in result.lines[-1]
    assert 'send {"record": …, "values": {"NAME": VALUE}}' in result.lines[-1]
    assert f"such as {SCHEMA.names[0]!r}, are features: they belong into 'values'" in result.lines[-1]
    result = cli("replay", path, "--model", model_dir, "--output-dir", tmp_path / "shards", "--shards", 2)
    assert result.code == 3
    assert (tmp_path / "shards" / "summary.json").exists()


def test_replay_gives_same_scores_for_wide_tables_long_tables_and_lines(
    cli: RunCommand, model_dir: Path, wide: Path, lines: Path, table: pa.Table, tmp_path: Path
) -> None:
    long = [{**e, "value": str(e["value"])} for e in list_events(table)]
    pq.write_table(pa.Table.from_pylist(long), tmp_path / "long.parquet")
    pa.csv.write_csv(pa.Table.from_pylist(long), tmp_path / "long.csv")
    found = []
    for source in (wide, lines, tmp_path / "long.parquet", tmp_path / "long.csv"):
        for order in ("schema", "random"):
            out = tmp_path / "scores.parquet"
            arguments = ["--order", order, "--seed", "3", "--alpha", "0.3", "--output", out]
            assert cli("replay", source, "--model", model_dir, *arguments).code == 0
            rows = sorted(pq.read_table(out).to_pylist(), key=lambda r: (r["record"], r["seq"]))
            found.append([(r["record"], r["feature"], r["seq"], r["value"], r["label"]) for r in rows])
    assert found[0] == found[2] == found[4] == found[6]
    assert found[1] == found[3] == found[5] == found[7]
    assert found[0] != found[1]


def test_wide_tables_are_replayed_in_calibrated_order(cli: RunCommand, wide: Path, tmp_path: Path) -> None:
    orders = {}
    for order in ("random", "schema", "arrival"):
        model = write_model(tmp_path / order, arrival_order=order)
        assert cli("replay", wide, "--model", model, "--output", tmp_path / "s.parquet").code == 0
        rows = pq.read_table(tmp_path / "s.parquet", columns=["record", "feature"]).to_pylist()
        orders[order] = [r["feature"] for r in rows]
    assert orders["schema"] == orders["arrival"] != orders["random"]


def test_replay_writes_alerts_to_standard_output(cli: RunCommand, model_dir: Path, lines: Path) -> None:
    result = cli("replay", lines, "--model", model_dir, "--alpha", "0.3", "--alerts", "-")
    assert result.code == 0
    assert all(json.loads(line)["alpha"] == 0.3 for line in result.out.splitlines())
    assert len(result.out.splitlines()) == int(result.lines[0].split(" alerts")[0].split()[-1]) > 0


def test_replay_reports_drift_if_requested(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """The vibration changes at the 100th record; drift detection does not change the alerts."""
    rows = draw_rows(SCHEMA, 160, 31, missing_share=0.0)
    for row in rows[100:]:
        row["vibration"] = 40.0
    events = [{"record": f"r{i}", "values": row} for i, row in enumerate(rows)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    arguments = ["replay", tmp_path / "events.jsonl", "--model", model_dir, "--alerts", tmp_path / "alerts.jsonl"]
    assert cli(*arguments).code == 0
    alerts = read_json_lines(tmp_path / "alerts.jsonl")
    assert cli(*arguments, "--drift", "1000").code == 0
    alerts_by_effort = read_json_lines(tmp_path / "alerts.jsonl")
    (notice,) = [document for document in alerts_by_effort if document.get("kind") == "drift"]
    assert [document for document in alerts_by_effort if document != notice] == alerts
    assert 100 <= int(notice["record"][1:]) < 140
    assert notice["features"][0]["feature"] == "vibration"
    assert notice["log10_martingale"] >= 3
    assert len(notice["id"]) == 32


def test_unreachable_alpha_is_reported(cli: RunCommand, model_dir: Path, lines: Path) -> None:
    result = cli("replay", lines, "--model", model_dir, "--alpha", "0.004")
    assert result.code == 0
    assert "out of reach" in result.lines[0]
    assert "at least 249 records" in result.lines[0]
    assert "0 alerts" in result.lines[-1]


def test_ignored_columns_are_reported(cli: RunCommand, model_dir: Path, wide: Path) -> None:
    result = cli("replay", wide, "--model", model_dir)
    assert json.loads(result.lines[0])["columns"] == ["note"]


def test_missing_columns_are_a_warning_that_names_a_similar_column(
    cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path
) -> None:
    table = pq.read_table(wide)
    name = next(name for name in table.schema.names if pa.types.is_floating(table.schema.field(name).type))
    pq.write_table(table.rename_columns({name: f"{name}_1"}), tmp_path / "t.parquet")
    result = cli("replay", tmp_path / "t.parquet", "--model", model_dir)
    assert result.code == 0
    (warning,) = [entry for entry in map(json.loads, result.lines[:-1]) if entry["event"] == "columns_missing"]
    assert (warning["columns"], warning["level"]) == ([name], "warning")
    assert f"the input has no column {name} (is it {name}_1?)" in warning["message"]


def test_explanations_option_chooses_content_of_alerts(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path
) -> None:
    arguments = ["replay", lines, "--model", model_dir, "--alpha", "0.3", "--alerts", tmp_path / "a.jsonl"]
    alerts_by_effort = {}
    for effort in ("full", "fast", "off"):
        assert cli(*arguments, "--explanations", effort).code == 0
        alerts_by_effort[effort] = {a["record"]: a["contributions"] for a in read_json_lines(tmp_path / "a.jsonl")}
    assert alerts_by_effort["full"].keys() == alerts_by_effort["fast"].keys() == alerts_by_effort["off"].keys()
    assert not any(alerts_by_effort["off"].values())
    assert all(part["relief"] is None for parts in alerts_by_effort["fast"].values() for part in parts)
    assert all(part["relief"] is not None for parts in alerts_by_effort["full"].values() for part in parts)
    assert_command_failed(cli(*arguments, "--explanations", "off", "--explain", tmp_path / "w.parquet"), 2, "--explain")


def test_failed_replay_leaves_no_incomplete_files(cli: RunCommand, model_dir: Path, tmp_path: Path, wide: Path) -> None:
    pq.write_table(pa.table({"pressure": ["high"]}), tmp_path / "bad.parquet")
    (tmp_path / "scores.parquet").write_text("of yesterday")
    arguments = [
        "--model",
        model_dir,
        "--output",
        tmp_path / "scores.parquet",
        "--records",
        tmp_path / "records.parquet",
    ]
    assert_command_failed(cli("replay", tmp_path / "bad.parquet", *arguments), 3, "bad.parquet", "pressure")
    assert (tmp_path / "scores.parquet").read_text() == "of yesterday"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.parquet", "scores.parquet", "wide.parquet"]
    assert_command_failed(
        cli("replay", wide, *arguments[:3], tmp_path / "s.parquet", "--records", tmp_path / "no" / "r.parquet"), 2, "no"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.parquet", "scores.parquet", "wide.parquet"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_replay_keeps_the_files_of_an_earlier_run(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flags = {
        "--output": "scores.parquet",
        "--records": "records.csv",
        "--alerts": "alerts.jsonl",
        "--explain": "why.parquet",
        "--rejected": "rejected.jsonl",
        "--evidence": "evidence.jsonl",
        "--incidents": "incidents.jsonl",
    }
    monkeypatch.setattr("deformer_stream.cli.input_files.DEFAULT_BATCH_EVENTS", 50)
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = [word for flag, name in flags.items() for word in (flag, folder / name)]
    arguments = ["replay", lines, "--model", model_dir, "--alpha", "0.3", *arguments, "--records-per-day", "8640"]
    assert cli(*arguments).code == 0
    complete = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert complete.keys() == set(flags.values())
    write = ScoresTable.write

    def write_and_interrupt(sink: ScoresTable, *given: Any) -> None:
        write(sink, *given)
        monkeypatch.setattr(ScoresTable, "write", write)  # a second signal ends the process
        signal.raise_signal(number)

    monkeypatch.setattr(ScoresTable, "write", write_and_interrupt)
    ended = cli(*arguments)
    assert ended.code == 130
    partial_names = [f"{name}.part" for name in flags.values()]
    paths = ", ".join(str(folder / name) for name in partial_names)
    assert ended.lines[-1] == f"interrupted: the results so far are in {paths}; files of earlier runs are unchanged"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {*complete, *partial_names}
    assert complete.items() <= files.items()
    num_rows, num_complete = (pq.read_table(folder / f"scores.parquet{end}").num_rows for end in (".part", ""))
    assert 0 < num_rows < num_complete
    so_far = files["alerts.jsonl.part"]
    assert complete["alerts.jsonl"].startswith(so_far)
    assert 0 < len(so_far) < len(complete["alerts.jsonl"])
    assert cli(*arguments).code == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == complete


def test_interrupted_replay_without_files_says_so_in_its_summary(
    cli: RunCommand, model_dir: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr("deformer_stream.cli.stream.stop_on_signals", lambda: stopped)
    ended = cli("replay", lines, "--model", model_dir, "--alerts", "-")
    assert (ended.code, ended.out) == (130, "")
    assert ended.lines[-1].endswith(", interrupted")


def test_second_replay_of_the_same_outputs_ends_at_its_start(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "records.parquet"
    first = RecordsTable(out)
    words = ["replay", lines, "--model", model_dir, "--records", out]
    assert_command_failed(cli(*words), 2, f"{out}: another process is writing it", "choose another path")
    first.close()
    assert cli(*words).code == 0


REPLACED_INPUTS = {
    "replay: a table": "deformer-stream replay {wide} --output {wide} --model {model}",
    "replay: lines": "deformer-stream replay {lines} --alerts {lines} --model {model}",
    "replay: another output": "deformer-stream replay {wide} --output {folder}/s --records {folder}/s --model {model}",
    "replay: a folder": "deformer-stream replay {inputs} --records {inputs}/a.parquet --model {model}",
    "replay: a link": "deformer-stream replay {wide} --records {link} --model {model}",
    "replay: incidents": "deformer-stream replay {evidence} --incidents {evidence} --model {model}",
    "consume: lines": "deformer-stream consume --source {lines} --alerts {lines} --model {model}",
    "produce: lines": "deformer-stream produce {lines} --output {lines}",
    "produce: a folder": "deformer-stream produce {inputs} --output {inputs}/a.parquet",
    "calibrate: a table": "deformer-stream calibrate {wide} --out {wide} --model {model}",
    "calibrate: evidence": "deformer-stream calibrate --incidents {evidence} --out {evidence} --model {model}",
    "calibrate: a folder": "deformer-stream calibrate {inputs} --out {inputs} --model {model}",
    "calibrate: in the model": "deformer-stream calibrate {model}/normal.parquet --model {model}",
    "calibrate: a list": "deformer-stream calibrate {wide} --anomalous {model}/list.csv --model {model}",
    "sample: the manifest": "deformer-stream sample --output {model}/manifest.json --model {model}",
    "sample: the weights": "deformer-stream sample --output {model}/model.safetensors --model {model}",
    "propose": "deformer-stream propose --log {evidence} --out {evidence} --model {model}",
    "propose: a folder": "deformer-stream propose --log {evidence} --out {folder} --model {model}",
    "init: --output": "deformer-stream init {wide} --yes --output {wide} --force",
    "init: --save": "deformer-stream init {lines} --yes --save {lines} --force",
    "init: --output of lines": "deformer-stream init {lines} --yes --output {lines} --force",
    "init: another output": "deformer-stream init {lines} --yes --output {folder}/events.parquet --force",
    "init: a topic": "deformer-stream init --topic t --yes --output {folder}/s --save {folder}/s --force",
    "train": "deformer-train {wide} --out {wide}",
    "train: a folder": "deformer-train {inputs} --out {inputs}",
    "train: in the model": "deformer-train {model}/normal.parquet --out {model}",
    "train: faults": "deformer-train --faults {model}/normal.parquet --label state --normal run --model {model}",
    "train: for each value": "deformer-train {model}/normal.parquet --out {folder} --per state",
}


@pytest.mark.parametrize("command", REPLACED_INPUTS.values(), ids=REPLACED_INPUTS.keys())
def test_no_command_overwrites_its_input(
    cli: RunCommand, model_dir: Path, tmp_path: Path, wide: Path, lines: Path, command: str
) -> None:
    model, inputs = shutil.copytree(model_dir, tmp_path / "model"), tmp_path / "inputs"
    inputs.mkdir()
    for path in (inputs / "a.parquet", model / "normal.parquet"):
        shutil.copy(wide, path)
    (model / "list.csv").write_text("record,occurrence,anomalous\nr1,1,yes\n")
    (tmp_path / "evidence.jsonl").write_text('{"v":1,"closed":{}}\n')
    (tmp_path / "link.parquet").symlink_to(wide)

    def read_all() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = read_all()
    places = {"wide": wide, "lines": lines, "model": model, "inputs": inputs, "folder": tmp_path}
    places |= {"evidence": tmp_path / "evidence.jsonl", "link": tmp_path / "link.parquet"}
    program, *words = command.format(**places).split()
    ended = cli(*words, program=program)
    assert (ended.code, len(ended.lines)) == (2, 1), ended.err
    assert re.search(r"(choose|name) (another|a new)|choose a name that ends in", ended.lines[0])
    assert read_all() == before


def test_replay_reads_standard_input(model_dir: Path, lines: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "deformer_stream.cli.main",
        "replay",
        "-",
        "--model",
        str(model_dir),
        "--alpha",
        "0.3",
    ]
    with lines.open() as file:
        result = subprocess.run(arguments, stdin=file, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0
    assert f"{len(lines.read_text().splitlines())} events accepted, 0 refused" in result.stderr


# consume


def test_consume_prints_alerts_of_a_file(cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path) -> None:
    arguments = ["consume", "--source", lines, "--model", model_dir, "--alpha", "0.3"]
    printed = cli(*arguments)
    assert printed.code == 0
    alerts = [json.loads(line) for line in printed.out.splitlines()]
    assert len(alerts) >= 5
    assert {alert["source"]["topic"] for alert in alerts} == {str(lines)}
    quiet = cli(*arguments, "--alerts", "")
    assert (quiet.code, quiet.out) == (0, "")
    path = tmp_path / "alerts.jsonl"
    for times in (1, 2):  # a consumer that is started again must keep its earlier alerts
        assert cli(*arguments, "--alerts", path).out == ""
        assert [a["id"] for a in read_json_lines(path)] == [a["id"] for a in alerts] * times
    replayed = tmp_path / "replayed.jsonl"
    assert cli("replay", lines, "--model", model_dir, "--alpha", "0.3", "--alerts", replayed).code == 0
    assert {a["id"] for a in read_json_lines(replayed)} == {a["id"] for a in alerts}
    stopped = json.loads(quiet.lines[-1])
    assert (stopped["event"], stopped["alerts"], stopped["rejected"]) == ("stopped", len(alerts), {})


def test_consume_appends_alerts_after_an_incomplete_line(
    cli: RunCommand, model_dir: Path, lines: Path, tmp_path: Path
) -> None:
    path = tmp_path / "alerts.jsonl"
    path.write_text('{"id": "tor')
    assert cli("consume", "--source", lines, "--model", model_dir, "--alpha", "0.3", "--alerts", path).code == 0
    first, *rest = path.read_text().splitlines()
    assert first == '{"id": "tor'
    assert all(json.loads(line)["id"] for line in rest)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_consume_ends_gracefully(model_dir: Path, lines: Path, number: int) -> None:
    """Alerts are printed while the input is still open, and a signal ends the command with exit code 0."""
    arguments = [
        sys.executable,
        "-u",
        "-m",
        "deformer_stream.cli.main",
        "consume",
        "--source",
        "-",
        "--model",
        str(model_dir),
    ]
    with subprocess.Popen(
        [*arguments, "--alpha", "0.3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(lines.read_bytes())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["alpha"] == 0.3
        process.send_signal(number)
        err = process.stderr.read().decode()
        assert process.wait(timeout=60) == 0, err
    stopped = json.loads(err.splitlines()[-1])
    assert (stopped["event"], stopped["events"]) == ("stopped", len(lines.read_text().splitlines()))
    assert stopped["open"] > 0
    assert "Traceback" not in err


def test_consume_ends_gracefully_during_startup(model_dir: Path) -> None:
    """A signal while libraries and the model are loaded also ends the command with exit code 0."""
    arguments = [
        sys.executable,
        "-m",
        "deformer_stream.cli.main",
        "consume",
        "--source",
        "-",
        "--model",
        str(model_dir),
    ]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        status, deadline = Path(f"/proc/{process.pid}/status"), time.monotonic() + 60
        while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGTERM - 1) & 1:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0, err
    stopped = json.loads(err.splitlines()[-1])
    assert (stopped["event"], stopped["events"]) == ("stopped", 0)


def test_unreachable_broker_is_reported(cli: RunCommand, model_dir: Path) -> None:
    with closing(socket.socket()) as quiet:
        quiet.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{quiet.getsockname()[1]}"
    arguments = ["--model", model_dir, "--alerts", ""]
    assert_command_failed(cli("consume", "--topic", "t", "--bootstrap-servers", address, *arguments), 4, address)
    assert_command_failed(cli("consume", "--source", f"kafka://{address}/t", *arguments), 4, address)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--source", "kafka://host:9092"], "kafka://HOST:PORT/TOPIC"),
        (["--source", "kafka:///topic"], "kafka://HOST:PORT/TOPIC"),
        (["--source", "kafka://[::1:9092/topic"], "kafka://HOST:PORT/TOPIC"),
        (["--source", "kafka://host:9092/topic?from=latest"], "kafka://HOST:PORT/TOPIC"),
        (["--topic", "t", "--alerts-topic", "t"], "must differ"),
        (["--topic", "t", "--dead-letter-topic", "t-alerts"], "must differ"),
        (["--topic", "t", "--source", "-"], "exactly one option"),
        (["--source", "-", "--http", "nowhere"], "--http"),
        (["--source", "-", "--cache-memory", "4000000GiB"], "--cache-memory"),
        (["--source", "-", "--alerts", "/no/such/folder/alerts"], "/no/such/folder/alerts"),
    ],
)
def test_consume_rejects_impossible_options(
    cli: RunCommand, model_dir: Path, arguments: list[str], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:  # the replacement that pytest sets has no file descriptor
        monkeypatch.setattr("sys.stdin", nothing)
        assert_command_failed(cli("consume", "--model", model_dir, *arguments), 2, hint)


def test_missing_source_or_model_is_reported(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    assert_command_failed(cli("consume", "--source", tmp_path / "none.jsonl", "--model", model_dir), 3, "none.jsonl")
    assert_command_failed(cli("replay", tmp_path / "none.jsonl", "--model", model_dir), 3, "none.jsonl")
    assert_command_failed(cli("consume", "--source", "-", "--model", tmp_path), 3, "manifest.json is missing")


def test_output_never_contains_a_secret(cli: RunCommand, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFORMER_SASL_PASSWORD", SECRET)
    with closing(socket.socket()) as quiet:
        quiet.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{quiet.getsockname()[1]}"
    login = ["--security-protocol", "SASL_PLAINTEXT", "--sasl-mechanism", "PLAIN", "--sasl-username", "me"]
    for arguments in (
        ["config"],
        ["consume", "--topic", "t", "--model", model_dir, "--bootstrap-servers", address, *login, "--debug"],
        ["consume", "--topic", "t", "--model", model_dir, "--debug"],
        ["consume", "--topic", "t", "--model", model_dir, "--alpha", "2", *login],
        ["consume", "--source", f"kafka://me:{SECRET}@{address}/t", "--model", model_dir],
        ["produce", "x.parquet", "--topic", "t", "--bootstrap-servers", address, *login, "--debug"],
    ):
        result = cli(*arguments)
        assert SECRET not in result.out + result.err
        assert "hunter2" not in result.out + result.err


# produce


def test_produce_writes_a_file(cli: RunCommand, model_dir: Path, wide: Path, table: pa.Table, tmp_path: Path) -> None:
    out = tmp_path / "stream.jsonl"
    arguments = ["produce", wide, "--output", out, "--shuffle-within", "20s", "--record-prefix", "pump-", "--seed", "4"]
    result = cli(*arguments, "--model", model_dir)
    sent = read_json_lines(out)
    expected = list_events(table)
    assert (result.code, result.lines) == (0, [f"{len(expected)} events sent to {out}"])
    key = lambda e: (e["record"], e["feature"])  # noqa: E731
    assert sorted(map(key, sent)) == sorted(("pump-" + e["record"], e["feature"]) for e in expected)
    assert [e["time"] for e in sent] == sorted(e["time"] for e in sent)
    assert [e["record"] for e in sent] != sorted((e["record"] for e in sent), key=[e["record"] for e in sent].index)
    again = cli(*arguments[:-1], "5", "--exclude", "note,state")
    assert again.code == 0
    assert {e["feature"] for e in read_json_lines(out)} == set(SCHEMA.names) - {"state"}
    printed = cli("produce", wide, "--output", "-", "--rate", "1e6")
    assert {json.loads(line)["feature"] for line in printed.out.splitlines()} == {*SCHEMA.names, "note"}


def test_produce_by_device_needs_devices_in_the_ids(cli: RunCommand, wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "stream.jsonl"
    assert_command_failed(cli("produce", wide, "--output", out, "--key", "device"), 3, "contains no device")
    assert cli("produce", wide, "--output", out, "--key", "device", "--record-prefix", "pump-7/").code == 0
    by_text = ("--record-prefix", "pump-7:", "--device-by", ":")
    assert cli("produce", wide, "--output", out, "--key", "device", *by_text).code == 0


def test_produced_events_can_be_consumed(cli: RunCommand, model_dir: Path, wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "stream.jsonl"
    assert cli("produce", wide, "--output", out, "--model", model_dir, "--shuffle-within", "10s").code == 0
    result = cli("consume", "--source", out, "--model", model_dir, "--alpha", "0.3", "--alerts", "")
    stopped = json.loads(result.lines[-1])
    assert (stopped["events"], stopped["rejected"]) == (len(read_json_lines(out)), {})


def test_produce_needs_no_model_that_only_the_configuration_names(
    cli: RunCommand, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deformer.toml").write_text('model = "not-trained-yet"\n')
    result = cli("produce", wide, "--output", tmp_path / "x.jsonl")
    assert result.code == 0, result.err
    assert {e["feature"] for e in read_json_lines(tmp_path / "x.jsonl")} == {*SCHEMA.names, "note"}
    assert_command_failed(cli("produce", wide, "--output", tmp_path / "x", "--model", "no-model"), 3, "manifest.json")


def test_produce_counts_rows_that_cannot_be_sent(cli: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,a\n2020-01-01T00:00:00Z,1\nnoon,2\n2020-01-01T00:00:02Z,3\n")
    result = cli("produce", tmp_path / "t.csv", "--time-column", "time", "--output", tmp_path / "x.jsonl")
    assert result.code == 0
    assert "2 events sent to" in result.lines[-1]
    assert "1 row was left out" in result.lines[-1]
    assert "row 1, column 'time', holds no valid time" in result.lines[-1]


def test_produce_rejects_impossible_options(cli: RunCommand, wide: Path, tmp_path: Path) -> None:
    assert_command_failed(cli("produce", wide), 2, "--topic or --output")
    assert_command_failed(cli("produce", wide, "--output", tmp_path / "no" / "x"), 2, "no/x")
    assert_command_failed(cli("produce", tmp_path / "none.parquet", "--output", tmp_path / "x"), 3, "none.parquet")
    assert_command_failed(cli("produce", wide, "--output", tmp_path / "x", "--model", tmp_path), 3, "manifest.json")


def test_manifest_has_the_schema_of_the_model(model_dir: Path) -> None:
    manifest = model_store.read_manifest(model_dir)
    assert Schema.from_json(manifest["features"]) == SCHEMA
