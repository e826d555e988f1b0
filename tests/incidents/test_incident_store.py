"""The file incidents.json: what is written is read, and damaged or forged files are refused with one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deformer_stream import incident_store, model_store
from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.errors import ArtifactError, Unavailable
from deformer_stream.incident_store import (
    INCIDENTS_FILE,
    IncidentCalibration,
    LogEntry,
    Replaced,
    read_incident_calibration,
    write_incident_calibration,
)
from tests.models import write_model

SEGMENTS = (SegmentCalibration(86_400_000_000, (0.5, 2.0), 100.0, 2, ScoreTail(9.0, 0.01, 1.5)),)
PATTERNS = (FalseAlarmPattern({"flow": 1.0}, {"i1": 3.0, "i2": 4.5}, ("i1",), ("pump",)),)
CALIBRATION = IncidentCalibration(
    "0123456789abcdef",
    SEGMENTS,
    PATTERNS,
    (Replaced("0123456789abcdef", SEGMENTS, (), '{"a": "ä"}', "ab"), Replaced("x", (), PATTERNS, None, "cd")),
    (LogEntry(5, "Ada", "approve", "12 incidents removed"),),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_incident_calibration(tmp_path) is None
    for calibration in (CALIBRATION, IncidentCalibration("m")):
        write_incident_calibration(tmp_path, calibration)
        assert read_incident_calibration(tmp_path) == calibration
    assert [path.name for path in tmp_path.iterdir()] == [INCIDENTS_FILE], "no temporary file is left"


def test_segments_of_another_model_drop_the_patterns() -> None:
    assert CALIBRATION.with_segments(CALIBRATION.model, []).patterns == PATTERNS
    other = CALIBRATION.with_segments("other", SEGMENTS)
    assert (other.model, other.patterns, other.segments) == ("other", (), SEGMENTS)
    assert other.history == CALIBRATION.history


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_incident_calibration(tmp_path, CALIBRATION)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(Unavailable, match="free disk space"):
        write_incident_calibration(tmp_path, IncidentCalibration("m"))
    assert read_incident_calibration(tmp_path) == CALIBRATION
    assert [path.name for path in tmp_path.iterdir()] == [INCIDENTS_FILE]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_incident_calibration(tmp_path, CALIBRATION)
    path = tmp_path / INCIDENTS_FILE
    raw = path.read_bytes()
    for damaged in (raw[:-20], raw.replace(b"4.5", b"4.6"), b"[]", b"", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=INCIDENTS_FILE) as caught:
            read_incident_calibration(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_bytes(raw.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ArtifactError, match="install the release"):
        read_incident_calibration(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError, match="not a file"):
        read_incident_calibration(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"for_model": 5},
        {"segments": None},
        {"segments": [{"length": -1}]},
        {"patterns": {}},
        {"patterns": [{"direction": {}}]},
        {"history": [{"for_model": "x"}]},
        {"log": [{"time": "never", "by": "", "action": "", "summary": ""}]},
        {"log": [5]},
    ],
)
def test_forged_files_with_a_valid_checksum_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    document = json.loads(json.dumps(CALIBRATION.to_json() | change))
    content = document | {"sha256": incident_store._compute_digest(document)}
    (tmp_path / INCIDENTS_FILE).write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="damaged") as caught:
        read_incident_calibration(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_history_and_the_log_are_bounded() -> None:
    many = replace(CALIBRATION, history=CALIBRATION.history * 20, log=CALIBRATION.log * 500)
    document = many.to_json()
    assert len(document["history"]) == incident_store.MAX_HISTORY
    assert len(document["log"]) == incident_store.MAX_LOG


def test_a_copy_of_a_model_has_its_incident_calibration(tmp_path: Path) -> None:
    """The file is outside the fingerprint, and is copied with the model."""
    directory = write_model(tmp_path / "model")
    fingerprint = model_store.read(directory).fingerprint
    write_incident_calibration(directory, CALIBRATION)
    assert model_store.read(directory).fingerprint == fingerprint
    model_store.write_files(tmp_path / "copy", model_store.read_files(directory))
    assert read_incident_calibration(tmp_path / "copy") == CALIBRATION
