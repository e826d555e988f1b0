"""Tests of incidents of files: `replay --incidents` and `calibrate --incidents`."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files import IncidentLines
from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.incident_store import read_incident_calibration
from deformer_stream.incidents.events import ClosedRows, EvidenceBatch, Incident
from tests.commands import RunCommand, assert_command_failed, make_record_table, read_json_lines
from tests.incidents.evidence_logs import SECOND, make_log

DAY_INTERVAL = 3600 * SECOND
"""Microseconds between records, with which a day has few records."""


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the model, to which a test may write."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def get_fingerprint(model: Path) -> str:
    return str(model_store.read_manifest(model)["fingerprint"])


def write_log(path: Path, batches: list[EvidenceBatch]) -> Path:
    path.write_bytes(b"".join(encode_evidence(batch) + b"\n" for batch in batches))
    return path


def test_replay_of_evidence_gives_one_incident_for_each_fault(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    batches = list(make_log(get_fingerprint(model), faults={0: [(50, 80)], 1: [(120, 130)]}))
    log, incidents = write_log(tmp_path / "evidence.jsonl", batches), tmp_path / "incidents.jsonl"
    options = ("--records-per-day", "8640", "--fleet", "off")
    result = cli("replay", log, "--model", model, "--incidents", incidents, *options)
    assert result.code == 0, result.err
    assert "by the e-detector" in result.lines[0]
    assert result.lines[-2:] == ["600 records", "2 incidents, 0 of them open at the end of the input"]
    messages = [decode_incident(line) for line in incidents.read_bytes().splitlines()]
    opened = [message for message in messages if message.state == "open"]
    assert [message.device for message in opened] == ["pump-0", "pump-1"]
    assert [message.suspects[0].feature for message in opened] == ["flow", "flow"]
    assert {message.id for message in messages if message.state == "resolved"} == {m.id for m in opened}
    # The same input gives the same bytes.
    again = tmp_path / "again.jsonl"
    assert cli("replay", log, "--model", model, "--incidents", again, *options).code == 0
    assert again.read_bytes() == incidents.read_bytes()


def test_interrupted_run_keeps_the_incidents_of_an_earlier_one(
    cli: RunCommand, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = list(make_log(get_fingerprint(model), faults={0: [(50, 80)], 1: [(120, 130)]}))
    log, incidents = write_log(tmp_path / "evidence.jsonl", batches), tmp_path / "incidents.jsonl"
    words = ("replay", log, "--model", model, "--incidents", incidents, "--records-per-day", "8640", "--fleet", "off")
    assert cli(*words).code == 0
    complete, add, added = incidents.read_bytes(), IncidentLines.add, list[Incident]()

    def add_and_interrupt(file: IncidentLines, incident: Incident) -> None:
        add(file, incident)
        added.append(incident)
        if len(added) == 1:  # a second signal ends the process
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(IncidentLines, "add", add_and_interrupt)
        ended = cli(*words)
    assert ended.code == 130
    assert ended.lines[-1].startswith(f"interrupted: the results so far are in {incidents}.part;")
    assert incidents.read_bytes() == complete
    so_far = (tmp_path / "incidents.jsonl.part").read_bytes()
    assert 0 < len(so_far) < len(complete)
    assert cli(*words).code == 0
    assert incidents.read_bytes() == complete
    assert not (tmp_path / "incidents.jsonl.part").exists()


def test_evidence_that_files_repeat_counts_once(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    """Two exports of a topic overlap."""
    batches = list(
        make_log(get_fingerprint(model), 4, 24 * 10, DAY_INTERVAL, faults={0: [(50, 80)]}, records_per_batch=24)
    )
    whole = write_log(tmp_path / "whole.jsonl", batches)
    first, second = write_log(tmp_path / "1.jsonl", batches[:7]), write_log(tmp_path / "2.jsonl", batches[5:])
    incidents, again = tmp_path / "incidents.jsonl", tmp_path / "again.jsonl"
    options = ("--model", model, "--records-per-day", "24", "--fleet", "off", "--incidents")
    assert cli("replay", whole, *options, incidents).code == 0
    assert incidents.read_bytes()
    result = cli("replay", first, second, *options, again)
    assert result.code == 0, result.err
    assert "960 records" in result.lines
    assert again.read_bytes() == incidents.read_bytes()

    assert cli("calibrate", "--incidents", whole, "--model", model, "--out", tmp_path / "once").code == 0
    repeated = ("--incidents", f"{first},{second}")
    assert cli("calibrate", *repeated, "--model", model, "--out", tmp_path / "twice").code == 0
    once, twice = (read_incident_calibration(tmp_path / name) for name in ("once", "twice"))
    assert once == twice


def test_replay_of_events_gives_the_incidents_of_their_evidence(
    cli: RunCommand, model: Path, wide: Path, tmp_path: Path
) -> None:
    """The incidents do not depend on whether the evidence was written and read in between."""
    direct, evidence, later = (tmp_path / name for name in ("direct.jsonl", "evidence.jsonl", "later.jsonl"))
    rule = ("--incident-budget", "20 per d", "--records-per-day", "200", "--fleet", "off")
    outputs = ("--time-column", "at", "--incidents", direct, "--evidence", evidence, "--alpha", "0.3")
    result = cli("replay", wide, "--model", model, *outputs, *rule)
    assert result.code == 0, result.err
    assert "incident" in result.lines[-1]
    assert cli("replay", evidence, "--model", model, "--incidents", later, *rule).code == 0
    assert direct.read_bytes() == later.read_bytes()
    assert direct.read_bytes()


def test_evidence_cannot_be_scored(cli: RunCommand, model: Path, wide: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "evidence.jsonl", list(make_log("m", num_records=4)))
    assert_command_failed(cli("replay", log, "--model", model), 2, "--incidents")
    result = cli(
        "replay", log, "--model", model, "--incidents", tmp_path / "i.jsonl", "--records", tmp_path / "r.parquet"
    )
    assert_command_failed(result, 2, "--records", "needs events")
    words = ("replay", log, "--model", model, "--incidents", tmp_path / "i.jsonl")
    assert_command_failed(cli(*words, "--label", "fault", "--normal", "none"), 2, "--label", "needs events")
    assert_command_failed(
        cli("replay", log, wide, "--model", model, "--incidents", tmp_path / "i.jsonl"), 3, "not both"
    )


def test_outputs_of_a_configuration_for_events_are_not_written_for_evidence(
    cli: RunCommand, model: Path, tmp_path: Path
) -> None:
    log = write_log(tmp_path / "evidence.jsonl", list(make_log(get_fingerprint(model), num_records=4)))
    config, records = tmp_path / "plant.toml", tmp_path / "records.parquet"
    config.write_text(f'records = "{records}"\nalerts = ""\n')
    words = ("replay", log, "--model", model, "--incidents", tmp_path / "i.jsonl", "--records-per-day", "1000")
    result = cli(*words, "--config", config)
    assert result.code == 0, result.err
    assert "--records of the configuration is not written, because" in result.err
    assert not records.exists()


def test_line_that_is_no_evidence_is_named(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "evidence.jsonl", list(make_log("m", num_records=8)))
    log.write_bytes(log.read_bytes() + b'{"v":1}\n')
    result = cli("replay", log, "--model", model, "--incidents", tmp_path / "i.jsonl", "--records-per-day", "9")
    assert result.code == 3
    assert f"{log}, line 3:" in result.lines[-1]


def test_unknown_number_of_records_names_both_remedies(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "evidence.jsonl", list(make_log("m", num_records=8)))
    result = cli("replay", log, "--model", model, "--incidents", tmp_path / "i.jsonl")
    assert_command_failed(result, 2, "--records-per-day", "calibrate --incidents")


def test_calibrated_segments_keep_the_budget(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    fingerprint = get_fingerprint(model)
    normal = list(make_log(fingerprint, 4, 24 * 10, DAY_INTERVAL, records_per_batch=24))
    log = write_log(tmp_path / "normal.jsonl", normal)
    result = cli("calibrate", "--incidents", log, "--model", model)
    assert result.code == 0, result.err
    table = result.out.splitlines()
    assert table[0].split()[:2] == ["segments", "of"]
    assert [line.split()[:2] for line in table[1:]] == [["1d", "40"], ["8h", "120"], ["1h", "960"]]
    assert table[1].endswith("1 per 41d                 in reach")
    assert table[3].endswith("in reach")
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert calibration.model == fingerprint
    assert [segment.num_segments for segment in calibration.segments] == [40, 120, 960]
    assert get_fingerprint(model) == fingerprint, "alert ids and scores do not depend on segments"
    faulty = list(make_log(fingerprint, 2, 24 * 3, DAY_INTERVAL, {1: [(30, 40)]}, seed=5))
    result = cli(
        "replay", write_log(tmp_path / "e.jsonl", faulty), "--model", model, "--incidents", tmp_path / "i.jsonl"
    )
    assert "kept by segments: 40 device-days, at least 29 needed" in result.lines[0]
    incidents = [decode_incident(line) for line in (tmp_path / "i.jsonl").read_bytes().splitlines()]
    assert {incident.rule for incident in incidents} == {"segments"}
    assert {incident.device for incident in incidents} == {"pump-1"}


@pytest.mark.parametrize("opens_early", [True, False])
def test_incidents_open_at_alerts_of_open_records_if_the_segments_were_calibrated_so(
    opens_early: bool, cli: RunCommand, model: Path, tmp_path: Path
) -> None:
    fingerprint = get_fingerprint(model)
    normal = write_log(
        tmp_path / "normal.jsonl", list(make_log(fingerprint, 4, 24 * 10, DAY_INTERVAL, records_per_batch=24))
    )
    option = ("--open-early", "on") if opens_early else ()  # the readings of this model are not irregular
    assert cli("calibrate", "--incidents", normal, "--model", model, *option).code == 0
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert {segment.opens_early for segment in calibration.segments} == {opens_early}
    # Three records of a device alert on the fourth day, and close hours later.
    usual = list(make_log(fingerprint, 1, 24 * 3, DAY_INTERVAL, seed=5))
    alerted = list(make_log(fingerprint, 1, 100, 600 * SECOND, {0: [(0, 99)]}))[:6]
    start = usual[-1].closed.times[-1] + 10 * SECOND
    alerts = [
        replace(alert, time=int(start) + number * SECOND, record=f"pump-0@long-{number}", p_value=1e-6)
        for number, alert in enumerate(alert for batch in alerted for alert in batch.alerts)
    ]
    empty = replace(alerted[0], closed=ClosedRows([], *(column[:0] for column in get_columns(usual[0]))))
    faulty = write_log(tmp_path / "e.jsonl", [*usual, *(replace(empty, alerts=(alert,)) for alert in alerts)])
    assert cli("replay", faulty, "--model", model, "--incidents", tmp_path / "i.jsonl").code == 0
    incidents = [decode_incident(line) for line in (tmp_path / "i.jsonl").read_bytes().splitlines()]
    assert bool(incidents) == opens_early
    if opens_early:
        assert incidents[0].first_record.startswith("pump-0@long-")
        assert incidents[0].opened < start + 10 * SECOND


def get_columns(batch: EvidenceBatch) -> list[Any]:
    """Return the columns of the closed records of a batch, without their ids."""
    closed = batch.closed
    return [closed.times, closed.p_values, closed.scores, closed.num_readings, closed.is_alerted]


def test_segments_are_written_to_another_directory(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "n.jsonl", list(make_log(get_fingerprint(model), 2, 48, DAY_INTERVAL)))
    out = tmp_path / "out"
    assert cli("calibrate", "--incidents", log, "--model", model, "--out", out).code == 0
    assert read_incident_calibration(model) is None
    assert read_incident_calibration(out) is not None
    assert get_fingerprint(out) == get_fingerprint(model)
    model_store.read(out)


def test_evidence_of_another_model_is_refused(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "n.jsonl", list(make_log("another", 2, 48, DAY_INTERVAL)))
    assert_command_failed(cli("calibrate", "--incidents", log, "--model", model), 3, "another", "replay --evidence")
    assert_command_failed(cli("calibrate", "--model", model), 2, "--incidents")
    missing = cli("calibrate", "--incidents", tmp_path / "none.jsonl", "--model", model)
    assert_command_failed(missing, 3, "no such file")


def test_replay_refuses_evidence_of_another_model(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    """A log with records of another model as well, such as one from before a change of the model, is no error."""
    other = list(make_log("another", 2, 48, DAY_INTERVAL))
    log, incidents = write_log(tmp_path / "other.jsonl", other), tmp_path / "incidents.jsonl"
    command = ("replay", log, "--model", model, "--incidents", incidents, "--records-per-day", "24")
    assert_command_failed(cli(*command), 3, "another", get_fingerprint(model), "give the model directory")
    assert not incidents.exists()
    own = list(make_log(get_fingerprint(model), 2, 48, DAY_INTERVAL, seed=1))
    write_log(log, [*other, *own])
    result = cli(*command)
    assert result.code == 0, result.err
    assert "96 records were scored by another model" in result.lines[-1]
    write_log(log, own)
    assert "another model" not in cli(*command).lines[-1]


def test_new_calibration_ranks_the_evidence_again(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    """Records and segments are calibrated by one command. The evidence was scored under the calibration before."""
    old = get_fingerprint(model)
    table = make_record_table()
    days = [1_700_000_000_000_000 + 3600 * 10**6 * i for i in range(len(table))]
    table = table.set_column(table.schema.get_field_index("at"), "at", pa.array(days, pa.timestamp("us", "UTC")))
    pq.write_table(table.drop_columns("note"), tmp_path / "normal.parquet")
    evidence = tmp_path / "evidence.jsonl"
    assert cli("replay", tmp_path / "normal.parquet", "--model", model, "--evidence", evidence).code == 0
    new = cli("calibrate", tmp_path / "normal.parquet", "--incidents", evidence, "--model", model, "--alpha", "0.1")
    assert new.code == 0, new.err
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert calibration.model == get_fingerprint(model) != old
    assert [segment.num_devices for segment in calibration.segments] == [1, 1, 1]
    # Evidence that the new calibration has scored gives equal segments.
    assert cli("replay", tmp_path / "normal.parquet", "--model", model, "--evidence", evidence).code == 0
    # It compares each closed record as a whole with the records of the calibration, which are the same here.
    batches = [decode_evidence(line) for line in evidence.read_bytes().splitlines()]
    p_values = [batch.closed.record_p_values for batch in batches if len(batch.closed)]
    assert all(column is not None for column in p_values)
    ranks = np.sort(np.concatenate([column for column in p_values if column is not None]))
    expected = (1 + np.arange(1, len(ranks) + 1)) / (len(ranks) + 1)
    np.testing.assert_allclose(ranks, expected, atol=3 / len(ranks))
    assert cli("calibrate", "--incidents", evidence, "--model", model).code == 0
    again = read_incident_calibration(model)
    assert again is not None
    for before, after in zip(calibration.segments, again.segments, strict=True):
        assert before.log_statistics == pytest.approx(after.log_statistics, rel=1e-4, abs=1e-4)


def test_calibration_of_records_keeps_the_history_of_incidents(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "n.jsonl", list(make_log(get_fingerprint(model), 2, 48, DAY_INTERVAL)))
    assert cli("calibrate", "--incidents", log, "--model", model).code == 0
    before = read_incident_calibration(model)
    pq.write_table(make_record_table().drop_columns("note"), tmp_path / "normal.parquet")
    assert cli("calibrate", tmp_path / "normal.parquet", "--model", model, "--alpha", "0.1").code == 0
    assert read_incident_calibration(model) == before
    faulty = write_log(tmp_path / "e.jsonl", list(make_log("m", num_records=4)))
    result = cli("replay", faulty, "--model", model, "--incidents", tmp_path / "i.jsonl", "--records-per-day", "99")
    assert json.loads(result.lines[0])["event"] == "incident_calibration_differs"


def test_incidents_are_json_lines(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "evidence.jsonl", list(make_log(get_fingerprint(model), faults={0: [(50, 80)]})))
    incidents = tmp_path / "incidents.jsonl"
    assert cli("replay", log, "--model", model, "--incidents", incidents, "--records-per-day", "8640").code == 0
    document = read_json_lines(incidents)[0]
    assert (document["state"], document["device"], document["budget"]) == ("open", "pump-0", "1 per 30d")


def test_device_is_named_by_another_separator(cli: RunCommand, model: Path, tmp_path: Path) -> None:
    """Records of `pump-0@17` belong to the device `pump` with --device-by -."""
    log = write_log(tmp_path / "n.jsonl", list(make_log(get_fingerprint(model), 3, 48, DAY_INTERVAL)))
    assert cli("calibrate", "--incidents", log, "--model", model, "--device-by", "-").code == 0
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert {segment.num_devices for segment in calibration.segments} == {1}
    faulty = list(make_log(get_fingerprint(model), faults={0: [(50, 80)]}))
    log, incidents = write_log(tmp_path / "e.jsonl", faulty), tmp_path / "i.jsonl"
    rule = ("--incident-rule", "e-detector", "--records-per-day", "8640", "--device-by", "-")
    assert cli("replay", log, "--model", model, "--incidents", incidents, *rule).code == 0
    assert {decode_incident(line).device for line in incidents.read_bytes().splitlines()} == {"pump"}
