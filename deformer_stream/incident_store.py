"""Reading and writing of incidents.json, the calibration of incidents in a model directory.

    segments   the largest statistics of segments of normal operation (`calibration.incident_segments`)
    patterns   kinds of false alarms that people have labelled (`calibration.false_alarm_patterns`)
    history    what was replaced by approved candidates, for `propose --roll-back`
    log        who has approved or rolled back what, and when

The file is outside the fingerprint of the model: scores and alerts do not depend on it. It states the fingerprint of
the model to which it belongs. It is replaced atomically, and holds its own SHA-256, so a truncated or altered file is
refused. This module needs no torch, because the process that detects incidents starts without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern, read_patterns
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ArtifactError

INCIDENTS_FILE = "incidents.json"
"""Name of the file in a model directory."""

FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 * 2**20
"""Largest size of the file. Its history can hold several manifests, each of which can have `MAX_MANIFEST_BYTES`."""

MAX_HISTORY, MAX_LOG = 20, 200
"""Largest number of replaced calibrations, and of entries of the log, that are kept."""

_REMEDY = "restore the file from a copy, or delete it and run `deformer-stream calibrate --incidents` again"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What a person has done with the calibration.

    Attributes:
        time: When, in microseconds since 1970.
        by: Who; "" if unknown.
        action: "approve" or "roll-back".
        summary: What it has changed, in one line.
    """

    time: int
    by: str
    action: str
    summary: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A calibration that was replaced by a candidate.

    Attributes:
        model: Fingerprint of the model to which it belonged.
        segments: Its segments.
        patterns: Its patterns.
        manifest: The text of manifest.json, None if the candidate did not change it.
        report_sha256: SHA-256 of the difference.json of the candidate, by which the approval can be traced.
    """

    model: str
    segments: tuple[SegmentCalibration, ...]
    patterns: tuple[FalseAlarmPattern, ...]
    manifest: str | None
    report_sha256: str


@dataclass(frozen=True, slots=True)
class IncidentCalibration:
    """The contents of incidents.json.

    Attributes:
        model: Fingerprint of the model to which the contents belong.
        segments: Calibrations by segments of normal operation, of different lengths.
        patterns: Patterns of false alarms.
        history: What was replaced by approved candidates, the oldest first.
        log: Who has approved or rolled back what, the oldest first.
    """

    model: str
    segments: tuple[SegmentCalibration, ...] = ()
    patterns: tuple[FalseAlarmPattern, ...] = ()
    history: tuple[Replaced, ...] = ()
    log: tuple[LogEntry, ...] = ()

    def with_segments(self, model: str, segments: Sequence[SegmentCalibration]) -> IncidentCalibration:
        """Return a copy with new segments.

        If they belong to another model, the patterns are dropped, because their scores cannot be compared with those of
        the new model.

        Args:
            model: Fingerprint of the model that has scored the records of the segments.
            segments: The new segments.
        """
        patterns = self.patterns if model == self.model else ()
        return replace(self, model=model, segments=tuple(segments), patterns=patterns)

    def to_json(self) -> dict[str, Any]:
        """Return the contents as JSON values, without the checksum."""
        return {
            "format": FORMAT_VERSION,
            "for_model": self.model,
            "segments": [calibration.to_json() for calibration in self.segments],
            "patterns": [pattern.to_json() for pattern in self.patterns],
            "history": [
                {
                    "for_model": replaced.model,
                    "segments": [calibration.to_json() for calibration in replaced.segments],
                    "patterns": [pattern.to_json() for pattern in replaced.patterns],
                    "manifest": replaced.manifest,
                    "report_sha256": replaced.report_sha256,
                }
                for replaced in self.history[-MAX_HISTORY:]
            ],
            "log": [
                {"time": entry.time, "by": entry.by, "action": entry.action, "summary": entry.summary}
                for entry in self.log[-MAX_LOG:]
            ],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> IncidentCalibration:
        """Return the contents that `to_json` has converted.

        Raises:
            ValueError: The document is not such a calibration.
        """
        try:
            return IncidentCalibration(
                _check_text(document["for_model"]),
                *_read_calibrations(document),
                tuple(
                    Replaced(
                        _check_text(entry["for_model"]),
                        *_read_calibrations(entry),
                        None if entry["manifest"] is None else _check_text(entry["manifest"]),
                        _check_text(entry["report_sha256"]),
                    )
                    for entry in document["history"]
                ),
                tuple(
                    LogEntry(
                        int(entry["time"]),
                        _check_text(entry["by"]),
                        _check_text(entry["action"]),
                        _check_text(entry["summary"]),
                    )
                    for entry in document["log"]
                ),
            )
        except (AttributeError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"an entry is missing or has a wrong type ({type(error).__name__}: {error})") from None


def _read_calibrations(
    document: Mapping[str, Any],
) -> tuple[tuple[SegmentCalibration, ...], tuple[FalseAlarmPattern, ...]]:
    """Return the segments and the patterns of an object of the format."""
    segments = tuple(SegmentCalibration.from_json(entry) for entry in document["segments"])
    return segments, read_patterns(document["patterns"])


def _check_text(value: Any) -> str:
    """Return a value that must be a text.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is in the place of a text")
    return value


def render_incident_calibration(calibration: IncidentCalibration) -> bytes:
    """Return the bytes of incidents.json."""
    document = calibration.to_json()
    return _render(document | {"sha256": _compute_digest(document)})


def read_incident_calibration(directory: Path) -> IncidentCalibration | None:
    """Return the incident calibration of a model directory, None if it has none.

    The caller compares `model` with the fingerprint of the model.

    Raises:
        ArtifactError: The file cannot be read, was cut short or altered, or is of a later format.
    """
    path = Path(directory) / INCIDENTS_FILE
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise ArtifactError(f"{path} is not a file of at most {MAX_FILE_BYTES} bytes: {_REMEDY}")
        raw = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    return parse_incident_calibration(raw, path)


def parse_incident_calibration(raw: bytes, path: Path) -> IncidentCalibration:
    """Return the incident calibration that the bytes of incidents.json hold.

    Args:
        raw: The bytes.
        path: The path of the file, for error messages.

    Raises:
        ArtifactError: The bytes were cut short or altered, or are of a later format.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({' '.join(str(error).split())[:200]}): {_REMEDY}") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{path} does not contain a JSON object: {_REMEDY}")
    version = document.get("format")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has the format {version!r:.20}, but this release reads {FORMAT_VERSION}: install the release "
            "that wrote it"
        )
    digest = document.pop("sha256", None)
    if digest != _compute_digest(document):
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {_REMEDY}")
    try:
        return IncidentCalibration.from_json(document)
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({' '.join(str(error).split())[:200]}): {_REMEDY}") from None


def write_incident_calibration(directory: Path, calibration: IncidentCalibration) -> None:
    """Write incidents.json to a model directory. An existing file is replaced atomically.

    Raises:
        Unavailable: Writing fails, for example because the disk is full.
    """
    replace_file(Path(directory) / INCIDENTS_FILE, render_incident_calibration(calibration))


def _render(document: Mapping[str, Any]) -> bytes:
    """Return a document as indented JSON."""
    return json.dumps(document, indent=1).encode()


def _compute_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document without its entry `sha256`, in hexadecimal digits."""
    return hashlib.sha256(_render(document)).hexdigest()
