"""Approval of a candidate calibration of incidents, and its roll-back. Both replace what is in use atomically.

A candidate is a folder with

    model/            a complete model directory with the candidate's calibration
    difference.json   what it would have changed, and the calibration to which it was compared
    report.html       the same for people
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deformer_stream import model_store
from deformer_stream.errors import ArtifactError, ConfigError
from deformer_stream.incident_store import (
    INCIDENTS_FILE,
    IncidentCalibration,
    LogEntry,
    Replaced,
    parse_incident_calibration,
    read_incident_calibration,
    render_incident_calibration,
    write_incident_calibration,
)
from deformer_stream.model_manifest import MANIFEST, read_manifest

MODEL_FOLDER, DIFFERENCE_FILE, REPORT_FILE = "model", "difference.json", "report.html"
"""The contents of a candidate's folder."""

MAX_DIFFERENCE_BYTES = 64 * 2**20
"""Largest size of difference.json."""


def describe_base(directory: Path) -> dict[str, Any]:
    """Return what identifies the calibration of a model directory, with which a candidate is compared.

    Raises:
        ArtifactError: The directory cannot be read.
    """
    calibration = read_incident_calibration(directory)
    document = None if calibration is None else calibration.to_json()
    if document is not None:
        # What was done earlier does not change any incident.
        del document["history"], document["log"]
    text = json.dumps(document, sort_keys=True)
    return {
        "model": str(read_manifest(directory)["fingerprint"]),
        "incidents_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def approve(candidate: Path, directory: Path, by: str, time: int) -> str:
    """Replace the calibration of a model directory by a candidate, and return a line that says what has changed.

    Args:
        candidate: The folder of the candidate.
        directory: The model directory.
        by: Who approves.
        time: When, in microseconds since 1970.

    Raises:
        ConfigError: The candidate was compared with another calibration than the one in use.
        ArtifactError: The candidate or the model directory cannot be read.
        Unavailable: Writing fails.
    """
    raw, difference = _read_difference(candidate)
    if difference.get("base") != describe_base(directory):
        raise ConfigError(
            f"the candidate {candidate} was compared with another calibration than the one in {directory}: make and "
            "compare it again with `deformer-stream propose --out`"
        )
    files, current = model_store.read_files(candidate / MODEL_FOLDER), model_store.read_files(directory)
    if model_store.WEIGHTS in current and files[model_store.WEIGHTS] != current[model_store.WEIGHTS]:
        raise ArtifactError(f"{candidate} holds another model than {directory}: make the candidate again")
    path = candidate / MODEL_FOLDER / INCIDENTS_FILE
    if INCIDENTS_FILE not in files:
        raise ArtifactError(f"{path} is missing: make the candidate again")
    new = parse_incident_calibration(files[INCIDENTS_FILE], path)
    old = read_incident_calibration(directory) or IncidentCalibration(str(read_manifest(directory)["fingerprint"]))
    has_same_manifest = files[MANIFEST] == current[MANIFEST]
    replaced = Replaced(
        old.model,
        old.segments,
        old.patterns,
        None if has_same_manifest else current[MANIFEST].decode(),
        hashlib.sha256(raw).hexdigest(),
    )
    summary = str(difference.get("summary", ""))
    entry = LogEntry(time, by, "approve", summary)
    new = replace(new, history=(*old.history, replaced), log=(*old.log, entry))
    if has_same_manifest:
        write_incident_calibration(directory, new)
    else:
        model_store.write_files(directory, files | {INCIDENTS_FILE: render_incident_calibration(new)})
    return summary


def _read_difference(candidate: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the contents of a candidate's difference.json, as bytes and parsed.

    Raises:
        ArtifactError: It is missing or is no JSON object.
    """
    path = candidate / DIFFERENCE_FILE
    try:
        if path.stat().st_size > MAX_DIFFERENCE_BYTES:
            raise ArtifactError(f"{path} has more than {MAX_DIFFERENCE_BYTES} bytes: make the candidate again")
        raw = path.read_bytes()
        document = json.loads(raw)
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read ({error.strerror}): give the folder that `deformer-stream propose --out` wrote"
        ) from None
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path} is not JSON: make the candidate again") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{path} is not a JSON object: make the candidate again")
    return raw, document


def roll_back(directory: Path, by: str, time: int) -> str:
    """Restore the calibration that the last approved candidate has replaced, and return a line about it.

    Args:
        directory: The model directory.
        by: Who rolls back.
        time: When, in microseconds since 1970.

    Raises:
        ConfigError: No approved candidate is left, or the model was changed otherwise since.
        ArtifactError: The model directory cannot be read.
        Unavailable: Writing fails.
    """
    calibration = read_incident_calibration(directory)
    if calibration is None or not calibration.history:
        raise ConfigError(f"no approved candidate of {directory} is left that could be rolled back")
    manifest = read_manifest(directory)
    replaced = calibration.history[-1]
    approval = _find_approval(calibration.log)
    summary = "restored" if approval is None else f"restored what was in use before: {approval.summary}"
    restored = IncidentCalibration(
        replaced.model,
        replaced.segments,
        replaced.patterns,
        calibration.history[:-1],
        (*calibration.log, LogEntry(time, by, "roll-back", summary)),
    )
    is_own = calibration.model == manifest["fingerprint"]
    if replaced.manifest is None:
        if not is_own or replaced.model not in ("", calibration.model):
            raise _make_changed_error(directory)
        write_incident_calibration(directory, restored)
        return summary
    try:
        earlier = json.loads(replaced.manifest)
        is_own &= earlier["files"] == manifest["files"]  # the weights have not changed
    except (ValueError, LookupError, TypeError):
        raise ArtifactError(f"the history in {directory / INCIDENTS_FILE} is damaged: restore a copy") from None
    if not is_own:
        raise _make_changed_error(directory)
    files = model_store.read_files(directory)
    files |= {MANIFEST: replaced.manifest.encode(), INCIDENTS_FILE: render_incident_calibration(restored)}
    model_store.write_files(directory, files)
    return summary


def _find_approval(log: Sequence[LogEntry]) -> LogEntry | None:
    """Return the last approval that was not rolled back yet, None if the log does not hold it any more."""
    num_rolled_back = 0
    for entry in reversed(log):
        if entry.action == "roll-back":
            num_rolled_back += 1
        elif num_rolled_back:
            num_rolled_back -= 1
        else:
            return entry
    return None


def _make_changed_error(directory: Path) -> ConfigError:
    """Return the error for a model that was trained or calibrated after the last approval."""
    return ConfigError(
        f"the model in {directory} was trained or calibrated again after the last approval, so its earlier calibration "
        "of incidents does not belong to it: restore a copy of the directory instead"
    )
