"""Tests of `replay --models`: one process with several models gives what a process for each model gives."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.codec.encode_evidence import decode_evidence
from deformer_stream.model.windows import Window
from deformer_stream.model_set import MODELS_FILE, ModelEntry, ModelSet, read_model_set, write_model_set
from tests.commands import RunCommand, assert_command_failed, read_json_lines
from tests.model_folders import (
    draw_messages,
    encode,
    make_schema,
    name_type,
    write_folder,
    write_mixed_table,
    write_schema,
    write_type,
)

NUM_MODELS = 5
OUTPUTS = ("scores.parquet", "records.parquet", "alerts.jsonl", "explain.parquet", "rejected.jsonl", "evidence.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sets") / "models", NUM_MODELS)


def replay(cli: RunCommand, inputs: Path, out: Path, *options: object) -> dict[str, Any]:
    """Return the contents of the outputs of `replay`, by name."""
    out.mkdir()
    flags = ("--output", "--records", "--alerts", "--explain", "--rejected", "--evidence")
    named = [word for flag, name in zip(flags, OUTPUTS, strict=True) for word in (flag, out / name)]
    result = cli("replay", inputs, "--alpha", "0.3,0.05", *named, *options)
    assert result.code == 0, result.err
    contents = {
        name: pq.read_table(out / name).to_pylist() if name.endswith("parquet") else read_json_lines(out / name)
        for name in OUTPUTS
    }
    contents["evidence.jsonl"] = list_evidence(out / "evidence.jsonl")
    return contents


def list_evidence(path: Path) -> list[dict[str, Any]]:
    """Return the evidence of each closed record and of each alert, which does not depend on the size of the polls."""
    rows = []
    for batch in map(decode_evidence, path.read_bytes().splitlines()):
        closed = batch.closed
        for i, record in enumerate(closed.record_ids):
            numbers = [float(column[i]) for column in (closed.times, closed.p_values, closed.scores)]
            rows.append({"model": batch.model, "record": record, "numbers": numbers})
        rows += [{"model": batch.model, "alert": str(alert)} for alert in batch.alerts]
    return rows


def write_lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"\n".join(encode(document) for document in documents))
    return path


def sort(rows: list[dict[str, Any]], drops: str = "") -> list[str]:
    """Return rows as texts in an order of their own, without a key."""
    return sorted(json.dumps({k: v for k, v in row.items() if k != drops}, default=str, sort_keys=True) for row in rows)


def assert_equals_single_runs(
    cli: RunCommand, folder: Path, together: dict[str, Any], inputs: dict[str, Path], tmp_path: Path, *options: object
) -> None:
    """Compare the outputs of one process with those of a process for each model, which read its own input only."""
    models = read_model_set(folder)
    assert models is not None
    alone: dict[str, Any] = {name: [] for name in OUTPUTS}
    for number, (value, path) in enumerate(inputs.items()):
        model = folder / models.entry_by_value[value].folder
        outputs = replay(cli, path, tmp_path / f"alone-{number}", "--model", model, *options)
        for name in OUTPUTS:
            alone[name] += outputs[name]
    assert len(together["alerts.jsonl"]) > 20
    for name in OUTPUTS:
        drops = "source" if name == "alerts.jsonl" else ""  # the position differs with the file
        assert sort(together[name], drops) == sort(alone[name], drops), name


def test_replay_of_lines_equals_a_run_for_each_model(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    documents = draw_messages(NUM_MODELS, 60)
    together = replay(cli, write_lines(tmp_path / "all.jsonl", documents), tmp_path / "together", "--models", folder)
    assert len(together["scores.parquet"]) == len(documents)
    inputs = {
        name_type(n): write_lines(tmp_path / f"{n}.jsonl", [d for d in documents if d["type"] == name_type(n)])
        for n in range(NUM_MODELS)
    }
    assert_equals_single_runs(cli, folder, together, inputs, tmp_path)


def test_scores_of_each_model_are_in_order_of_arrival(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    documents = draw_messages(NUM_MODELS, 20)
    together = replay(cli, write_lines(tmp_path / "all.jsonl", documents), tmp_path / "together", "--models", folder)
    places = {(d["record"], d["type"], d["feature"]): i for i, d in enumerate(documents)}
    times = [row["time"].timestamp() - 1.7e9 for row in together["scores.parquet"]]
    for number in range(NUM_MODELS):
        own = [place for (_, name, _), place in places.items() if name == name_type(number)]
        assert [t for t in times if int(t) in own] == sorted(own)


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_replay_of_tables_equals_a_run_for_each_model(
    cli: RunCommand, folder: Path, tmp_path: Path, layout: str
) -> None:
    documents = draw_messages(NUM_MODELS, 60)
    rows: list[dict[str, Any]] = [{**d, "value": str(d["value"])} for d in documents]
    if layout == "wide":
        records: dict[tuple[str, str], dict[str, Any]] = {}
        for d in documents:
            row = records.setdefault((d["type"], d["record"]), {"type": d["type"], "record": d["record"]})
            row.setdefault("time", datetime.fromtimestamp(d["time"], UTC))
            row[d["feature"]] = d["value"]
        names = dict.fromkeys(name for row in records.values() for name in row)
        rows = [{name: row.get(name) for name in names} for row in records.values()]

    def write(name: str, chosen: list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(chosen), path)
        return path

    options = ("--order", "arrival")
    together = replay(cli, write("all.parquet", rows), tmp_path / "together", "--models", folder, *options)
    inputs = {
        name_type(n): write(f"{n}.parquet", [row for row in rows if row["type"] == name_type(n)])
        for n in range(NUM_MODELS)
    }
    assert_equals_single_runs(cli, folder, together, inputs, tmp_path, *options)


@pytest.mark.slow
def test_fifty_models_equal_fifty_runs(cli: RunCommand, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "models", 50)
    documents = draw_messages(50, 8)
    together = replay(cli, write_lines(tmp_path / "all.jsonl", documents), tmp_path / "together", "--models", folder)
    inputs = {
        name_type(n): write_lines(tmp_path / f"{n}.jsonl", [d for d in documents if d["type"] == name_type(n)])
        for n in range(50)
    }
    assert_equals_single_runs(cli, folder, together, inputs, tmp_path)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("timeout", [(), ("--record-timeout", "20s")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_shards_give_the_outputs_of_one_process(
    cli: RunCommand, folder: Path, tmp_path: Path, kind: str, timeout: tuple[str, ...]
) -> None:
    documents = [*draw_messages(NUM_MODELS, 60), {"record": "r", "type": "none", "feature": "x", "value": 1.0}]
    path = tmp_path / f"all.{kind}"
    if kind == "jsonl":
        write_lines(path, documents)
    else:
        pq.write_table(pa.Table.from_pylist([{**d, "value": str(d["value"])} for d in documents]), path)
    options = ("--models", folder, *timeout)
    whole = replay(cli, path, tmp_path / "whole", *options)
    outputs = read_shards(cli, path, tmp_path / "shards", *options)
    assert len(whole["alerts.jsonl"]) > 20
    assert [row["reason"] for row in whole["rejected.jsonl"]].count("unknown_model") == 1
    for name in OUTPUTS:
        assert sort(outputs[name]) == sort(whole[name]), name


def read_shards(cli: RunCommand, inputs: Path, out: Path, *options: object) -> dict[str, Any]:
    """Return the contents of the outputs of all shards of `replay --output-dir`, by name."""
    flags = ("--output", "--records", "--alerts", "--explain", "--rejected", "--evidence")
    named = [word for pair in zip(flags, OUTPUTS, strict=True) for word in pair]
    result = cli("replay", inputs, "--alpha", "0.3,0.05", *named, "--output-dir", out, "--shards", "4", *options)
    assert result.code == 0, result.err
    shards = sorted((out / "shards").iterdir())
    assert len(shards) == 4
    contents: dict[str, Any] = {}
    for name in OUTPUTS:
        read = {"parquet": lambda path: pq.read_table(path).to_pylist(), "jsonl": read_json_lines}
        of_kind = list_evidence if name == "evidence.jsonl" else read[name.rpartition(".")[2]]
        contents[name] = [row for shard in shards for row in of_kind(shard / name)]
    assert sort(list_evidence(out / "evidence.jsonl")) == sort(contents["evidence.jsonl"])
    return contents


@pytest.mark.usefixtures("in_this_process")
def test_incidents_of_each_model_are_those_of_a_run_of_its_own(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    """Directly, of evidence, and in shards. Fleet incidents have devices of one model only."""
    # Complete records, one after the other, so that records close in order of time.
    documents = [
        {**d, "record": f"{d['type']}/pump-{int(d['record'][1:]) % 3}/{d['record']}"}
        for d in draw_messages(NUM_MODELS, 120)
    ]
    num_readings = Counter(d["record"] for d in documents)
    sizes = {name_type(n): len(make_schema(n)) for n in range(NUM_MODELS)}
    documents = [d for d in documents if num_readings[d["record"]] == sizes[d["type"]]]
    documents.sort(key=lambda d: (int(d["record"].rpartition("r")[2]), d["record"]))
    documents = [{**d, "time": 1.7e9 + 10 * i} for i, d in enumerate(documents)]
    lines = write_lines(tmp_path / "all.jsonl", documents)
    rule = ("--alpha", "0.3", "--incident-budget", "50 per d", "--records-per-day", "200")
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("direct", "evidence", "later")}
    outputs = ("--incidents", paths["direct"], "--evidence", paths["evidence"])
    result = cli("replay", lines, "--models", folder, *rule, *outputs)
    assert result.code == 0, result.err
    assert all(name_type(n) in result.lines[0] for n in range(NUM_MODELS))
    direct = read_json_lines(paths["direct"])
    models = read_model_set(folder)
    assert models is not None
    alone = []
    for n in range(NUM_MODELS):
        own = write_lines(tmp_path / "own.jsonl", [d for d in documents if d["type"] == name_type(n)])
        model = folder / models.entry_by_value[name_type(n)].folder
        assert cli("replay", own, "--model", model, *rule, "--incidents", tmp_path / "own-incidents.jsonl").code == 0
        incidents = read_json_lines(tmp_path / "own-incidents.jsonl")
        alone += [{**incident, "model_name": name_type(n)} for incident in incidents]
    assert len({incident["model"] for incident in direct}) == NUM_MODELS
    assert sort(direct) == sort(alone)
    assert cli("replay", paths["evidence"], "--models", folder, *rule, "--incidents", paths["later"]).code == 0
    assert paths["later"].read_bytes() == paths["direct"].read_bytes()
    out = tmp_path / "shards"
    in_shards = ("--output-dir", out, "--shards", "3", "--incidents", "incidents.jsonl")
    result = cli("replay", lines, "--models", folder, *rule, *in_shards)
    assert result.code == 0, result.err
    assert sort(read_json_lines(out / "incidents.jsonl")) == sort(direct)
    # Evidence of a model that is not in the folder
    other = write_type(tmp_path / "others" / "pump", 99)
    write_type(tmp_path / "others" / "fan", 98)
    unknown = cli("replay", paths["evidence"], "--models", other.parent, *rule, "--incidents", paths["later"])
    assert unknown.code == 3
    assert "none of --models" in unknown.lines[-1]


@pytest.mark.parametrize("column", ["label", "feature", "time", "value"])
def test_a_windowed_table_cannot_name_its_model_in_a_field_of_readings(
    cli: RunCommand, tmp_path: Path, column: str
) -> None:
    folder = tmp_path / "models"
    for number in range(2):
        write_schema(folder / f"m{number}", replace(make_schema(number), window=Window(10_000_000)), number)
    times = pa.array([1_700_000_000, 1_700_000_020], pa.timestamp("s", "UTC"))
    table = pa.table({"at": times, "pressure": [1.0, 2.0], column: ["m0", "m1"]})
    pq.write_table(table, tmp_path / "in.parquet")
    command = ("replay", tmp_path / "in.parquet", "--models", folder, "--time-column", "at")
    result = cli(*command, "--model-by", column)
    assert_command_failed(result, 3, f"the column '{column}' cannot determine the model", "rename")
    pq.write_table(table.rename_columns(["at", "pressure", "kind"]), tmp_path / "in.parquet")
    assert cli(*command, "--model-by", "kind").code == 0


def test_models_have_windows_and_tie_groups_of_their_own(cli: RunCommand, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    entries = {}
    for number, (width, ties) in enumerate(((10, "arrival"), (60, "hold"))):
        schema = replace(make_schema(number), window=Window(width * 1_000_000))
        write_schema(folder / str(number), schema, number, ties)
        entries[name_type(number)] = ModelEntry(str(number), "", 99, False, "0")
    write_model_set(folder, ModelSet("type", entries))
    documents = [
        {
            **{name: value for name, value in d.items() if name != "record"},
            "device": d["record"],
            "time": 1.7e9 + i // 3,
        }
        for i, d in enumerate(draw_messages(2, 60))
    ]
    together = replay(cli, write_lines(tmp_path / "all.jsonl", documents), tmp_path / "together", "--models", folder)
    inputs = {
        name_type(n): write_lines(tmp_path / f"{n}.jsonl", [d for d in documents if d["type"] == name_type(n)])
        for n in range(2)
    }
    assert_equals_single_runs(cli, folder, together, inputs, tmp_path)
    records = {row["record"] for row in together["records.parquet"]}
    assert any(record.endswith(":10Z") for record in records)


def test_files_of_models_with_and_without_windows_are_refused(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "models"
    write_type(mixed / "plain", 0)
    write_schema(mixed / "windowed", replace(make_schema(1), window=Window(10_000_000)), 1)
    lines = write_lines(tmp_path / "all.jsonl", draw_messages(1, 2))
    for words in (("replay", lines), ("consume", "--source", lines, "--alerts", "")):
        result = cli(*words, "--models", mixed, "--model-by", "type")
        assert result.code == 2
        assert "only some of the models have time windows" in result.lines[-1]


def test_consume_reads_a_file_for_several_models(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "all.jsonl", draw_messages(NUM_MODELS, 30))
    alerts = {}
    for command, words in (("replay", (lines,)), ("consume", ("--source", lines, "--record-timeout", "1d"))):
        path = tmp_path / f"{command}.jsonl"
        result = cli(command, *words, "--models", folder, "--alerts", path, "--alpha", "0.3,0.05")
        assert result.code == 0, result.err
        alerts[command] = sort(read_json_lines(path))
    assert len(alerts["replay"]) > 10
    assert alerts["consume"] == alerts["replay"]


def test_messages_without_a_model_are_refused(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    good = {"record": "r", "feature": "pressure", "value": 1.0, "time": 1.7e9}
    documents = [
        {**good, "type": "type-0"},
        {**good, "type": "no such type"},
        good,
        {**good, "type": ""},
        {**good, "type": 3.5},
        {**good, "type": "x" * 2000},
        {**good, "type": "type-1"},
    ]
    together = replay(cli, write_lines(tmp_path / "all.jsonl", documents), tmp_path / "together", "--models", folder)
    reasons = [(row["source"]["offset"], row["reason"]) for row in together["rejected.jsonl"]]
    assert reasons == [
        (1, "unknown_model"),
        (2, "missing_field"),
        (3, "missing_field"),
        (4, "wrong_type"),
        (5, "too_large"),
    ]
    assert len(together["scores.parquet"]) == 2


def test_pattern_finds_the_model_in_the_device(cli: RunCommand, tmp_path: Path) -> None:
    folder = tmp_path / "models"  # without models.json: the names of the folders are those of the models
    for number, name in enumerate(("pump", "fan%2Fsmall", "_fleet-0", ".hidden")):
        write_type(folder / name, number)
    assert not (folder / MODELS_FILE).exists()
    documents = [
        {"record": "a", "device": "pump-7", "feature": "pressure", "value": 1.0, "time": 1.7e9},
        {"record": "a", "device": "fan/small-7", "feature": "pressure", "value": 1.0, "time": 1.7e9},
        {"record": "a", "device": "valve-7", "feature": "pressure", "value": 1.0, "time": 1.7e9},
        {"record": "a", "device": "7", "feature": "pressure", "value": 1.0, "time": 1.7e9},
    ]
    lines = write_lines(tmp_path / "all.jsonl", documents)
    options = ("--models", folder, "--model-pattern", "^([a-z/]+)-")
    together = replay(cli, lines, tmp_path / "together", *options)
    assert [row["reason"] for row in together["rejected.jsonl"]] == ["unknown_model"] * 2
    assert len({row["score"] for row in together["scores.parquet"]}) == 2
    result = cli("replay", lines, "--models", folder)
    assert_command_failed(result, 2, "models.json", "--model-by", "--model-pattern")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--model", "--models")),
        (("--model", "x", "--models", "y"), ("--model", "--models")),
        (("--model", "x", "--model-by", "type"), ("--model-by", "--models")),
        (("--models", "x", "--model-pattern", "("), ("--model-pattern", "regular expression")),
    ],
)
def test_contradictory_options_are_refused(
    cli: RunCommand, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    lines = write_lines(tmp_path / "all.jsonl", [])
    assert_command_failed(cli("replay", lines, *options), 2, *words)


def test_equal_models_are_refused(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    """The ids of their alerts would be equal for records of the same id."""
    lines = write_lines(tmp_path / "all.jsonl", [])
    models = tmp_path / "models"
    for name in ("fan", "pump"):
        shutil.copytree(folder / "model-0", models / name)
    done = cli("replay", lines, "--models", models, "--model-by", "type")
    assert_command_failed(done, 2, "'fan' and 'pump' are the same model")


def test_folder_without_models_is_refused(cli: RunCommand, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "all.jsonl", [])
    (tmp_path / "empty").mkdir()
    assert_command_failed(cli("replay", lines, "--models", tmp_path / "empty"), 3, "empty", "--per")


@pytest.mark.parametrize("payload", ["json", "json-many"])
def test_a_table_of_several_types_can_be_produced_and_consumed(
    cli: RunCommand, folder: Path, tmp_path: Path, payload: str
) -> None:
    table, lines = write_mixed_table(tmp_path / "day.parquet", NUM_MODELS, 20), tmp_path / "day.jsonl"
    expected = {
        (f"{document['type']}/{document['record']}", document["feature"]): (document["type"], document["value"])
        for document in draw_messages(NUM_MODELS, 20)
    }
    for options in (("--models", folder), ("--model-by", "type")):
        assert cli("produce", table, "--output", lines, "--payload", payload, *options).code == 0
        found = {
            (document["record"], feature): (document["type"], value)
            for document in read_json_lines(lines)
            for feature, value in document.get("values", {document.get("feature"): document.get("value")}).items()
        }
        assert found == expected
        result = cli("replay", lines, "--models", folder, "--records", tmp_path / "records.parquet")
        assert result.code == 0, result.err
        assert f"{len(expected)} events accepted, 0 refused, {20 * NUM_MODELS} records" in result.err


def test_events_without_the_field_of_their_model_name_the_option_that_adds_it(
    cli: RunCommand, folder: Path, tmp_path: Path
) -> None:
    table, lines = write_mixed_table(tmp_path / "day.parquet", 2, 3), tmp_path / "day.jsonl"
    assert cli("produce", table, "--output", lines).code == 0
    result = cli("replay", lines, "--models", folder, "--rejected", tmp_path / "rejected.jsonl")
    assert result.code == 3
    details = {line["detail"] for line in read_json_lines(tmp_path / "rejected.jsonl")}
    assert len(details) == 1
    assert "the field 'type', which determines the model, is missing" in min(details)
    assert "produce --model-by" in min(details)


def test_produce_refuses_a_model_and_models(cli: RunCommand, folder: Path, tmp_path: Path) -> None:
    table = write_mixed_table(tmp_path / "day.parquet", 1, 2)
    words = ("produce", table, "--output", tmp_path / "x.jsonl")
    one = folder / "model-0"
    assert_command_failed(cli(*words, "--models", folder, "--model", one), 2, "exclude each other")
    assert_command_failed(cli(*words, "--models", tmp_path / "none"), 3, "none")
    assert_command_failed(cli(*words, "--models", folder, "--model-by", "kind"), 3, "no column 'kind'")


def test_produce_needs_no_folder_of_models_that_only_the_configuration_names(
    cli: RunCommand, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_mixed_table(tmp_path / "day.parquet", 1, 2)
    (tmp_path / "deformer.toml").write_text('models = "not-trained-yet"\n')
    result = cli("produce", table, "--output", tmp_path / "x.jsonl")
    assert result.code == 0, result.err
    assert "model_not_found" in result.err
    # A flag replaces the folder of the file.
    assert cli("produce", table, "--output", tmp_path / "x.jsonl", "--model", folder / "model-0").code == 0
