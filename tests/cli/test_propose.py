"""The command `propose`: a candidate, its page, approval and roll-back, on a small model and made-up evidence."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from connectors.kafka import describe_evidence_topic, describe_incident_topics, ensure_topics, produce
from deformer_stream import model_store
from deformer_stream.cli.propose import build_propose
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.feedback_messages import encode_label
from deformer_stream.errors import ArtifactError, ConfigError, InputError
from deformer_stream.incident_store import (
    INCIDENTS_FILE,
    IncidentCalibration,
    LogEntry,
    Replaced,
    read_incident_calibration,
    write_incident_calibration,
)
from deformer_stream.runtime.incident_plan import load_detection_plan
from deformer_stream.settings import load_settings
from deformer_stream.settings.incident_commands import ProposeSettings
from tests.incidents.examples import make_label
from tests.incidents.simulated_evidence import FALSE_SHARES, FAULT_SHARES, HOUR, Fleet, draw_episodes, make_segments
from tests.models import write_model

NUM_DEVICES, NUM_DAYS = 6, 40
OPTIONS = ["--quiet", "1h", "--gap", "1h"]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its segments, evidence with false alarms and faults, and labels of a person."""
    folder = tmp_path_factory.mktemp("site")
    fingerprint = model_store.read(write_model(folder / "model")).fingerprint
    write_incident_calibration(folder / "model", IncidentCalibration(fingerprint, tuple(make_segments())))
    episodes = [
        *draw_episodes(2, NUM_DEVICES, NUM_DAYS, 0.02, FAULT_SHARES, 9.0),
        *draw_episodes(1, NUM_DEVICES, NUM_DAYS, 0.05, FALSE_SHARES),
    ]
    fleet = Fleet(NUM_DEVICES, NUM_DAYS, 5, episodes)
    batches = [replace(batch, model=fingerprint) for batch in fleet.batches]
    middle = len(batches) // 2
    for name, part in (("one", batches[:middle]), ("two", batches[middle:])):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(map(encode_evidence, part)) + b"\n")
    detection = load_detection_plan(
        folder / "model", load_settings(ProposeSettings, {"model": folder, "quiet": "1h", "gap": "1h", "out": folder})
    )
    tracker, labels, num_false = detection.make_tracker(), [], 0
    incidents = {incident.id: incident for batch in batches for incident in tracker.handle(batch)}
    for incident in sorted(incidents.values(), key=lambda incident: (incident.opened, incident.id)):
        if incident.kind == "device" and incident.suspects and incident.suspects[0].feature == "vibration":
            labels.append(make_label("true", incident.opened, incident=incident.id, name="<b>bearing</b>", by="Ada"))
        elif incident.kind == "device" and incident.suspects and incident.suspects[0].feature == "flow":
            num_false += 1
            if num_false <= 10:
                labels.append(make_label("false-alarm", incident.opened, incident=incident.id, by="Ada"))
    labels.append(make_label("maintenance", 0, device="pump-0", start=0, end=HOUR))
    (folder / "labels.jsonl").write_bytes(b"\n".join(map(encode_label, labels)) + b"\n\n")
    return folder


@pytest.fixture
def model(site: Path, tmp_path: Path) -> Path:
    """Return a copy of the model directory, which the test may change."""
    model_store.write_files(tmp_path / "model", model_store.read_files(site / "model"))
    return tmp_path / "model"


@pytest.fixture
def run(model: Path) -> Run:
    return bind_model(model)


def bind_model(model: Path) -> Run:
    """Return a function that runs `propose` for a model."""

    def call(*arguments: str | Path, **options: object) -> Result:
        texts = ["--model", str(model), *OPTIONS, *map(str, arguments)]
        return CliRunner().invoke(build_propose(), texts, catch_exceptions=False, standalone_mode=False, **options)  # type: ignore[arg-type]

    return call


def make_candidate(run: Run, site: Path, out: Path, *more: str) -> Result:
    logs = f"{site / 'one.jsonl'},{site / 'two.jsonl'}"
    return run("--log", logs, "--feedback", site / "labels.jsonl", "--out", out, *more)


@pytest.fixture(scope="module")
def made_once(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a candidate for the model. Tests must not change it."""
    out = tmp_path_factory.mktemp("made") / "candidate"
    make_candidate(bind_model(site / "model"), site, out)
    return out


@pytest.fixture
def candidate(made_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the candidate, which the test may change."""
    return Path(shutil.copytree(made_once, tmp_path / "copied-candidate"))


def test_several_logs_are_named_after_the_option(run: Run, site: Path, made_once: Path, tmp_path: Path) -> None:
    """The logs of the other candidate were separated by commas."""
    logs = [site / "one.jsonl", site / "two.jsonl"]
    run("--log", *logs, "--feedback", site / "labels.jsonl", "--out", tmp_path / "with-spaces")
    documents = [json.loads((out / "difference.json").read_text()) for out in (made_once, tmp_path / "with-spaces")]
    for document in documents:
        del document["made"]
    assert documents[0] == documents[1]
    with pytest.raises(ConfigError, match="after --log"):
        run(logs[0], "--out", tmp_path / "other")


@pytest.mark.kafka
def test_evidence_and_labels_of_topics(
    run: Run, site: Path, made_once: Path, tmp_path: Path, kafka: SimpleNamespace
) -> None:
    topic = f"pumps-{uuid.uuid4().hex[:8]}"
    specs = describe_evidence_topic(f"{topic}-evidence") | describe_incident_topics("unused", f"{topic}-feedback")
    del specs["unused"]
    ensure_topics(kafka.cluster, specs)
    for name, files in (("evidence", ("one.jsonl", "two.jsonl")), ("feedback", ("labels.jsonl",))):
        lines = [line for file in files for line in (site / file).read_bytes().splitlines() if line]
        produce(kafka.cluster, f"{topic}-{name}", [(None, line, None) for line in [b"no message", *lines]])
    options = ["--topic", topic, "--bootstrap-servers", kafka.bootstrap]
    assert run(*options, "--out", tmp_path / "topics").exit_code == 0
    documents = [json.loads((out / "difference.json").read_text()) for out in (made_once, tmp_path / "topics")]
    for document in documents:
        del document["made"]
    assert documents[0] == documents[1]


def hash_files(directory: Path) -> dict[str, str]:
    """Return the hash of each file of a directory by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.charts
def test_a_candidate_is_shown_approved_and_rolled_back(run: Run, site: Path, model: Path, tmp_path: Path) -> None:
    before = hash_files(model)
    out = tmp_path / "candidate"
    result = make_candidate(run, site, out)
    assert result.exit_code == 0
    assert hash_files(model) == before, "nothing changes before the approval"
    assert "confirmed faults" in result.output
    document = json.loads((out / "difference.json").read_text())
    assert document["summary"] in result.output
    assert len(document["patterns"]) >= 1
    assert document["patterns"][0]["used"]
    num_kind = len(document["patterns"][0]["labelled"]) + len(document["patterns"][0]["unlabelled"])
    assert document["patterns"][0]["removed"] >= 0.8 * num_kind
    assert document["confirmed_faults"]
    assert all(fault["kept"] for fault in document["confirmed_faults"])
    assert len(document["review"]["largest"]) == len(document["review"]["silent"]) == 20
    assert document["incidents"]["new"] == []
    assert document["alerts"]["removed"] == 0
    assert document["label_again"] == []

    page = (out / "report.html").read_text()
    assert "&lt;b&gt;bearing&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "<script" not in page

    result = run("--approve", out, "--by", "Grace")
    assert "approved by Grace" in result.output
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert len(calibration.patterns) == sum(pattern["used"] for pattern in document["patterns"])
    assert [(entry.by, entry.action, entry.summary) for entry in calibration.log] == [
        ("Grace", "approve", document["summary"])
    ]
    assert hash_files(model) | {INCIDENTS_FILE: ""} == before | {INCIDENTS_FILE: ""}, "only incidents.json changes"
    settings = load_settings(ProposeSettings, {"model": model, "out": tmp_path})
    assert load_detection_plan(model, settings).patterns == calibration.patterns

    result = run("--roll-back", "--by", "Linus")
    assert "restored what was in use before" in result.output
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert calibration.patterns == ()
    assert calibration.segments == tuple(make_segments())
    assert [entry.action for entry in calibration.log] == ["approve", "roll-back"]
    with pytest.raises(ConfigError, match="no approved candidate"):
        run("--roll-back")


def test_incidents_to_label_again_are_listed(run: Run, site: Path, tmp_path: Path) -> None:
    labels = [json.loads(line) for line in (site / "labels.jsonl").read_bytes().splitlines() if line]
    outdated = next(label for label in labels if label["label"] == "false-alarm")
    outdated["severity"] = 0
    (tmp_path / "labels.jsonl").write_text("".join(f"{json.dumps(label)}\n" for label in labels))
    logs, out = f"{site / 'one.jsonl'},{site / 'two.jsonl'}", tmp_path / "candidate"
    result = run("--log", logs, "--feedback", tmp_path / "labels.jsonl", "--out", out)
    assert f"their severity has risen since: 1, such as {outdated['incident']}" in result.output
    document = json.loads((out / "difference.json").read_text())
    (entry,) = document["label_again"]
    assert (entry["id"], entry["label"], entry["outdated_label"]) == (outdated["incident"], None, "false-alarm")
    page = (out / "report.html").read_text()
    assert ">Label again<" in page
    assert "label again (false-alarm)" in page


def test_each_roll_back_names_the_approval_that_it_takes_back(run: Run, model: Path) -> None:
    calibration = read_incident_calibration(model)
    assert calibration is not None
    replaced = Replaced(calibration.model, calibration.segments, (), None, "0" * 64)
    approvals = tuple(LogEntry(time, "Ada", "approve", summary) for time, summary in enumerate("ABC"))
    write_incident_calibration(model, replace(calibration, history=(replaced,) * 3, log=approvals))
    run("--roll-back")
    run("--roll-back")
    run("--roll-back")
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert [entry.summary[-2:] for entry in calibration.log] == ["A", "B", "C", " C", " B", " A"]


def test_a_candidate_of_another_calibration_is_refused(run: Run, site: Path, candidate: Path, tmp_path: Path) -> None:
    first, second = candidate, tmp_path / "second"
    make_candidate(run, site, second)
    assert (
        json.loads((first / "difference.json").read_text())["patterns"]
        == json.loads((second / "difference.json").read_text())["patterns"]
    )
    run("--approve", first)
    with pytest.raises(ConfigError, match="another calibration"):
        run("--approve", second)
    run("--roll-back")
    run("--approve", second)


def test_a_calibration_of_records_replaces_the_manifest_and_is_rolled_back(
    run: Run, site: Path, model: Path, tmp_path: Path
) -> None:
    before = model_store.read(model)
    out = tmp_path / "candidate"
    make_candidate(run, site, out, "--change", "patterns,records")
    document = json.loads((out / "difference.json").read_text())
    assert document["alerts"]["removed"] > 0
    run("--approve", out, "--by", "Ada")
    after = model_store.read(model)
    assert after.fingerprint != before.fingerprint
    # Half of the device-days calibrate the records, and the other half the segments.
    num_records = NUM_DEVICES * NUM_DAYS * 144
    assert 0.4 * num_records < len(after.calibration.scores) < 0.6 * num_records
    calibration = read_incident_calibration(model)
    assert calibration is not None
    assert calibration.model == after.fingerprint
    assert calibration.segments
    run("--roll-back")
    restored = model_store.read(model)
    assert restored.fingerprint == before.fingerprint
    assert restored.manifest == before.manifest
    restored_incidents = read_incident_calibration(model)
    assert restored_incidents is not None
    assert restored_incidents.model == before.fingerprint


def test_a_calibration_of_records_replaces_segments_that_the_rule_in_use_ignores(
    run: Run, site: Path, model: Path, tmp_path: Path
) -> None:
    """Segments hold statistics of p-values, so those of the calibration before do not belong to the new one."""
    before = read_incident_calibration(model)
    assert before is not None
    out = tmp_path / "candidate"
    options = ["--change", "records", "--incident-rule", "e-detector"]
    run("--log", site / "one.jsonl", "--feedback", site / "labels.jsonl", "--out", out, *options)
    after = read_incident_calibration(out / "model")
    assert after is not None
    assert after.model != before.model
    assert [segments.length for segments in after.segments] == [segments.length for segments in before.segments]
    assert all(new.end != old.end for new, old in zip(after.segments, before.segments, strict=True))


def test_a_roll_back_after_another_training_is_refused(run: Run, model: Path, candidate: Path) -> None:
    run("--approve", candidate)
    calibration = read_incident_calibration(model)
    assert calibration is not None
    write_model(model, seed=3)
    write_incident_calibration(model, calibration)
    with pytest.raises(ConfigError, match="trained or calibrated again"):
        run("--roll-back")


def test_damaged_candidates_are_refused(run: Run, model: Path, candidate: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        run("--approve", tmp_path)
    out = candidate
    before = hash_files(model)
    path = out / "model" / INCIDENTS_FILE
    raw = path.read_bytes()
    for damaged in (raw[:-10], raw.replace(b'"flow"', b'"vibration"')):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=INCIDENTS_FILE):
            run("--approve", out)
    path.unlink()
    with pytest.raises(ArtifactError, match="missing"):
        run("--approve", out)
    (out / "difference.json").write_text("[]")
    with pytest.raises(ArtifactError, match="no"):
        run("--approve", out)
    assert hash_files(model) == before


def test_refused_options(run: Run, site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        run("--log", site / "one.jsonl")
    with pytest.raises(ConfigError, match="--log"):
        run("--out", tmp_path / "candidate")
    with pytest.raises(ConfigError, match="exists already"):
        run("--log", site / "one.jsonl", "--out", site)
    with pytest.raises(ConfigError, match="--since"):
        run("--log", site / "one.jsonl", "--out", tmp_path / "candidate", "--since", "yesterday")
    with pytest.raises(ConfigError, match="change"):
        run("--log", site / "one.jsonl", "--out", tmp_path / "candidate", "--change", "weights")
    with pytest.raises(InputError, match=r"labels\.jsonl"):
        run("--log", site / "one.jsonl", "--out", tmp_path / "candidate", "--feedback", tmp_path / "labels.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(InputError, match=r"bad\.jsonl, line 1"):
        run("--log", site / "one.jsonl", "--out", tmp_path / "candidate", "--feedback", tmp_path / "bad.jsonl")
    assert not (tmp_path / "candidate").exists()
