"""The model directory: written whole or not at all, verified before use.

    model.safetensors   weights
    manifest.json       format version, features, hyperparameters, calibration, training summary, digests
    report.html         for people; not needed for scoring

The manifest holds the size and SHA-256 of the weights and its own SHA-256, so a file that was cut short or altered is
refused by name. Nothing in a model directory is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from deformer_stream import __version__
from deformer_stream.core.conformal import Calibration
from deformer_stream.core.model import DEformer, ModelConfig
from deformer_stream.core.schema import Schema
from deformer_stream.errors import ArtifactError

FORMAT_VERSION = 1
WEIGHTS, MANIFEST, REPORT = "model.safetensors", "manifest.json", "report.html"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model ready to score. fingerprint: names weights, schema and calibration together."""

    model: DEformer
    calibration: Calibration
    fingerprint: str
    manifest: dict[str, Any]
    directory: Path

    @property
    def schema(self) -> Schema:
        return self.model.schema


def write(directory: Path, model: DEformer, calibration: Calibration, training: dict[str, Any], report: str) -> str:
    """Write the model directory beside its final name, make it durable, then rename; returns the fingerprint.

    training: the summary (JSON values only). report: an HTML page. A directory that stands there is replaced.
    """
    directory = Path(directory)
    weights = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()})
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "features": model.schema.to_json(),
        "schema_fingerprint": model.schema.fingerprint,
        "hyperparameters": model.config.to_json(),
        "calibration": calibration.to_json(),
        "training": training,
        "files": {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}},
    }
    manifest["fingerprint"] = _fingerprint(manifest)
    manifest["sha256"] = _digest(manifest)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial.chmod(0o755)
        _write_durably(partial / WEIGHTS, weights)
        _write_durably(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        _write_durably(partial / REPORT, report.encode())
        _replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return str(manifest["fingerprint"])


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, directory: Path) -> None:
    """Rename into place; what stood there is moved aside first, since a directory cannot be renamed over another."""
    old = partial.with_name(partial.name + ".old")
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    parent = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    if old.exists():
        shutil.rmtree(old)


def _fingerprint(manifest: dict[str, Any]) -> str:
    """16 hex digits over everything that decides a score or a p-value."""
    parts = [manifest[k] for k in ("schema_fingerprint", "hyperparameters", "calibration", "files")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _digest(manifest: dict[str, Any]) -> str:
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The verified manifest of a model directory. Raises `ArtifactError` that names the file and the remedy."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing: give the directory that deformer-train wrote with --out") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}): restore it from a copy, or train again") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ArtifactError(f"{path} has format version {version!r}, this package reads {FORMAT_VERSION}: train again")
    if manifest.get("sha256") != _digest(manifest):
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): restore it from a copy, or train again")
    return manifest


def read(directory: Path, device: str = "cpu") -> Artifact:
    """Load and verify a model directory. Raises `ArtifactError` that names the file and the remedy."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    path = directory / WEIGHTS
    try:
        weights = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): restore it from a copy, or train again") from None
    expected = manifest["files"][WEIGHTS]
    if len(weights) != expected["size"]:
        raise ArtifactError(f"{path} has {len(weights)} bytes, not {expected['size']}: it was cut short; restore it from a copy")
    if hashlib.sha256(weights).hexdigest() != expected["sha256"]:
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): restore it from a copy, or train again")
    try:
        model = DEformer(Schema.from_json(manifest["features"]), ModelConfig.from_json(manifest["hyperparameters"]))
        model.load_state_dict(safetensors.torch.load(weights))
        calibration = Calibration.from_json(manifest["calibration"])
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        line = str(error).splitlines()[0]
        raise ArtifactError(f"{directory} contradicts itself ({line}): restore it from a copy, or train again") from None
    return Artifact(model.to(torch.device(device)).eval(), calibration, manifest["fingerprint"], manifest, directory)
