"""Reading and checking of manifest.json, which describes the model of a model directory.

This module needs no torch, because processes that do not score, such as the one that looks for incidents, start
without it. `model_store` writes the file, and builds the model from it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deformer_stream.errors import ArtifactError

FAULT_UNITS_KEY = "units"
"""The key of the entry `faults` of the manifest that a classifier has whose inputs are standardised."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
"""The largest size of manifest.json; with a million calibration records, the file has half of it."""
OLD_SUFFIX = ".old"
"""The end of the temporary name that a model directory has until a new one has its name."""
BASE_VERSION = 1
"""The format version of a manifest without any of the additions of `_IS_NEEDED_BY_VERSION`."""
REMEDY = "restore the model directory from a copy, or train again"
"""What a person should do about a damaged model directory; the end of error messages."""


def _has(manifest: dict[str, Any], *path: str) -> bool:
    """Return whether a manifest has a key within nested objects, such as "calibration" and "ties" for that of ties.

    Args:
        manifest: The parsed manifest; its contents may be invalid.
        path: The key of each object, from the outermost one, and the key itself.
    """
    value: Any = manifest
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _has_fill_values(manifest: dict[str, Any]) -> bool:
    """Return whether a feature of a manifest has values that stand for a missing reading."""
    features = manifest.get("features")
    return isinstance(features, list) and any(isinstance(row, dict) and "fill_values" in row for row in features)


_IS_NEEDED_BY_VERSION: dict[int, Callable[[dict[str, Any]], bool]] = {
    # Groups of records have calibrations of their own.
    2: lambda manifest: _has(manifest, "calibration", "groups"),
    # There is a rule for readings with equal event times.
    3: lambda manifest: _has(manifest, "calibration", "ties"),
    # Each record is a window of event time.
    4: lambda manifest: _has(manifest, "window"),
    # The readings of a sensor in one time slot are combined.
    5: lambda manifest: _has(manifest, "window", "per_slot"),
    # Readings are irregular, that is, they keep their own times.
    6: lambda manifest: _has(manifest, "reading_times"),
    # Single readings and levels are evidence.
    7: lambda manifest: _has(manifest, "reading_times") and _has(manifest, "calibration", "cusum", "extreme"),
    # Steps from the last value are evidence.
    8: lambda manifest: _has(manifest, "reading_times") and _has(manifest, "calibration", "cusum", "step"),
    # Outliers count less as conditions of other readings.
    9: lambda manifest: _has(manifest, "reading_times") and _has(manifest, "hyperparameters", "outlier_limit"),
    # The density of the Gaussian prior is a term of the ranking.
    10: lambda manifest: _has(manifest, "hyperparameters", "prior_weight"),
    # Wide records have a Gaussian process as their prior.
    11: lambda manifest: _has(manifest, "hyperparameters", "neighbors") and not _has(manifest, "reading_times"),
    # Training records are stored for the alert.
    12: lambda manifest: _has(manifest, "hyperparameters", "alert_exemplars"),
    # P-values under the Gaussian prior are a term of the alert.
    13: lambda manifest: _has(manifest, "hyperparameters", "alert_prior"),
    # The density of readings without regard to one another is a term of the ranking.
    14: lambda manifest: _has(manifest, "hyperparameters", "marginal_weight"),
    # The inputs of the classifier of faults are standardised.
    15: lambda manifest: _has(manifest, "faults", FAULT_UNITS_KEY),
    # Values stand for a missing reading.
    16: _has_fill_values,
}
"""Whether a manifest needs a format version, because it has what this version has added to the one before."""

LATEST_VERSION = max(_IS_NEEDED_BY_VERSION)
"""The newest format version of manifest.json, which this release reads and writes."""

DirectoryState = tuple[int, int, int] | None
"""Inode, modification time in nanoseconds and size in bytes of the manifest of a model directory, which change if the
model is replaced. None if there is no manifest."""


def get_directory_state(directory: Path) -> DirectoryState:
    """Return (inode, modification time in nanoseconds, size in bytes) of the manifest of a model directory.

    At least one of them changes if the model in the directory is replaced. None if there is no manifest.
    """
    try:
        status = (directory / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the contents of a model directory's manifest.json after checking the format version and the checksum.

    Raises:
        ArtifactError: The manifest is missing, truncated, altered or of an unknown format version. The message names
            the file and the remedy.
    """
    path = Path(directory) / MANIFEST
    raw = read_at_most(path, MAX_MANIFEST_BYTES, name_remedy_if_missing(directory))
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes, so it was altered: {REMEDY}")
    try:
        manifest = json.loads(raw)
        is_unaltered = _is_unaltered(manifest, raw)  # used below, because a version error is more useful to report
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}): it was cut short or altered; {REMEDY}") from None
    if not isinstance(manifest, dict):
        raise ArtifactError(f"{path} contains {shorten(manifest)} instead of a JSON object: {REMEDY}")
    version = manifest.get("format_version")
    expected_version = determine_version(manifest)
    if isinstance(version, int) and version > LATEST_VERSION:
        raise ArtifactError(
            f"{path} has format version {shorten(version)}, but this release reads no version above "
            f"{LATEST_VERSION}: install the newer deformer-stream that wrote it, or train again"
        )
    # `write` always states the lowest version that can express the contents.
    if version != expected_version:
        raise ArtifactError(
            f"{path} states the format version {shorten(version)}, but its contents need version {expected_version}, "
            f"so it was altered: {REMEDY}"
        )
    if not is_unaltered:
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {REMEDY}")
    return manifest


def name_remedy_if_missing(directory: Path) -> str:
    """Return what a person should do if a path has no model; the end of an error message.

    A process that was killed while it replaced the model may have left the old one under a temporary name.

    Args:
        directory: The path without a model directory.
    """
    directory = Path(directory)
    old_models = sorted(directory.parent.glob(f".{glob.escape(directory.name)}.*{OLD_SUFFIX}/{MANIFEST}"))
    if old_models and not directory.exists():
        return f"a process that replaced the model was killed; rename {old_models[-1].parent} to {directory}"
    return "give the directory that deformer-train wrote with --out"


def read_at_most(path: Path, max_bytes: int, remedy: str = REMEDY) -> bytes:
    """Return the contents of a file of a model directory, or its first `max_bytes` + 1 bytes if it is longer.

    If the result has more than `max_bytes` bytes, the file is too long. Only regular files are opened, because reading
    a device, such as /dev/zero, might never end.

    Args:
        path: The file.
        max_bytes: The largest size that the file should have.
        remedy: What a person should do if the file is missing; it becomes the end of the error message.

    Raises:
        ArtifactError: The file is missing, is not a regular file or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path} is not a regular file: {REMEDY}")
        with path.open("rb") as file:
            # `read` allocates as many bytes as requested, so do not request more than the file has.
            file_size = os.fstat(file.fileno()).st_size
            return file.read(min(max_bytes, file_size) + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None


def _is_unaltered(manifest: Any, raw: bytes) -> bool:
    """Return whether manifest.json has the checksum that it states, and the bytes that `write` would have written.

    The checksum covers the parsed contents. Comparing the bytes also detects changes of spaces or of the order of keys.

    Args:
        manifest: The parsed contents of the file, any JSON value.
        raw: The bytes of the file.
    """
    if not isinstance(manifest, dict):
        return False
    return manifest.get("sha256") == compute_digest(manifest) and render_manifest(manifest) == raw


def determine_version(manifest: dict[str, Any]) -> int:
    """Return the lowest format version of manifest.json that can express the contents of a manifest.

    A manifest gets the lowest version, so that releases that read only this version can still read it.

    Args:
        manifest: The parsed manifest; its contents may be invalid.
    """
    needed = (version for version, is_needed in _IS_NEEDED_BY_VERSION.items() if is_needed(manifest))
    return max(needed, default=BASE_VERSION)


def compute_fingerprint(manifest: dict[str, Any]) -> str:
    """Return the fingerprint of a model, 16 hexadecimal digits that identify everything its p-values depend on.

    The digits are a hash of the schema, the hyperparameters, the calibration and the checksum of the weights.
    """
    entries = [manifest[key] for key in ("schema_fingerprint", "hyperparameters", "calibration", "files")]
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:16]


def render_manifest(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of the file manifest.json for the given contents."""
    return json.dumps(manifest, indent=1).encode()


def compute_digest(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest: the SHA-256 of all entries but `sha256` itself, in hexadecimal digits."""
    entries = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(render_manifest(entries)).hexdigest()


def shorten(value: object) -> str:
    """Return a value as text for an error message: one line of at most 60 characters."""
    return repr(value)[:60]


def count_calibration_records(manifest: dict[str, Any]) -> tuple[int, ...]:
    """Return the number of calibration records of a model, and of each of its groups with a calibration of their own.

    Args:
        manifest: The contents of manifest.json.

    Raises:
        ArtifactError: The manifest does not have them.
    """
    try:
        calibration = manifest["calibration"]
        groups = calibration.get("groups", {})
        return len(calibration["scores"]), *(len(scores) for scores in groups.values())
    except (AttributeError, LookupError, TypeError):
        raise ArtifactError(f"{MANIFEST} has no calibration records: {REMEDY}") from None
