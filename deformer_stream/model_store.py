"""Reading and writing of model directories.

A model directory holds:

    model.safetensors   the weights
    manifest.json       format version, features, hyperparameters, calibration, training summary, checksums
    report.html         the training report for people; not needed to score

A directory is written under a temporary name and renamed, so that it is never incomplete. The manifest holds its own
SHA-256 and the size and SHA-256 of the weights, so that a truncated or altered file is refused with its name. Manifests
can also be forged with valid checksums. Their contents are therefore checked for consistency, and memory is allocated
only in proportion to the size of the files. Nothing in a model directory is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ArtifactError, ConfigError, map_write_errors
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import is_supported
from deformer_stream.model.deformer import DEformer, ModelConfig, count_state_values
from deformer_stream.model.schema import Schema

BASE_VERSION, GROUPS_VERSION, TIES_VERSION, WINDOW_VERSION = 1, 2, 3, 4
"""Format versions of the manifest, each with one addition to the one before.

Version 2 has calibrations of groups, version 3 has a rule for readings with equal times, and version 4 has the window
of the records. A manifest gets the lowest version that describes it, so that older releases can read it unless they
would ignore an addition.
"""
WEIGHTS, MANIFEST, REPORT = "model.safetensors", "manifest.json", "report.html"
MAX_NAME_CHARS = 1024
"""The largest number of characters in the name of a feature or in a label; events with longer ones are refused."""
MAX_MANIFEST_BYTES = 64 * 2**20
"""The largest size of a manifest; one with a million calibration records has half of it."""
_INCONSISTENCY_ERRORS = (
    *(AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError),
)
"""The exceptions that building a model from an inconsistent manifest can raise."""
_REMEDY = "restore the model directory from a copy, or train again"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model that was read from a model directory and is ready to score.

    Attributes:
        model: The network.
        calibration: The distribution of scores of normal records, from which p-values are computed.
        fingerprint: 16 hexadecimal digits that identify the weights, the schema and the calibration together.
        manifest: The contents of manifest.json.
        directory: The model directory.
    """

    model: DEformer
    calibration: Calibration
    fingerprint: str
    manifest: dict[str, Any]
    directory: Path

    @property
    def schema(self) -> Schema:
        """The features of the records that the model scores."""
        return self.model.schema


def check_output_directory(directory: Path) -> None:
    """Raise `ConfigError` if writing a model to this path would replace something other than a model."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file, but the model needs a directory: name another path")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ConfigError(
            f"{directory} is not a model directory, and writing a model would remove its files: name another directory"
        )


def write(directory: Path, model: DEformer, calibration: Calibration, training: dict[str, Any], report: str) -> str:
    """Write a model directory and return the fingerprint of the model.

    The files are written to a temporary directory beside the final one and synced to disk; then the directory is
    renamed. A model that the path already holds is replaced. If anything fails, that model stays as it was.

    Args:
        directory: The path of the model directory; missing parents are created.
        model: The network.
        calibration: The calibration of its scores.
        training: The training summary, JSON values. Numbers that are not finite are stored as null.
        report: The training report, an HTML page.

    Raises:
        ConfigError: The directory cannot be created, or the path holds something other than a model.
        Unavailable: Writing fails, for example because the disk is full.
        ArtifactError: `read` would refuse the model, for example because a weight is not finite.
    """
    directory = Path(directory).absolute()
    check_output_directory(directory)
    weights = safetensors.torch.save({key: t.detach().cpu().contiguous() for key, t in model.state_dict().items()})
    rendered = _render_manifest(_create_manifest(model, calibration, training, weights))
    if len(rendered) > MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"{MANIFEST} would have {len(rendered)} bytes, but only {MAX_MANIFEST_BYTES} can be read again: use fewer "
            "calibration records or fewer labels"
        )
    # Build the model from the bytes, as `read` will, so that a model that cannot be read is not written.
    manifest = json.loads(rendered)
    _build_model(manifest, weights, directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error.strerror}): name another directory") from error
    try:
        with map_write_errors(directory):
            partial.chmod(0o755)
            _write_and_sync(partial / WEIGHTS, weights)
            _write_and_sync(partial / MANIFEST, rendered)
            _write_and_sync(partial / REPORT, report.encode("utf-8", "backslashreplace"))
            _sync_directory(partial)
            _replace_directory(partial, directory)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    return str(manifest["fingerprint"])


def _create_manifest(
    model: DEformer, calibration: Calibration, training: dict[str, Any], weights: bytes
) -> dict[str, Any]:
    """Return the manifest of a model, with fingerprints and checksums.

    Args:
        model: The network.
        calibration: The calibration of its scores.
        training: The training summary.
        weights: The contents of model.safetensors.
    """
    window = model.schema.window
    manifest: dict[str, Any] = {
        "format_version": BASE_VERSION,
        "package_version": __version__,
        "features": model.schema.to_json(),
        **({} if window is None else {"window": window.to_json()}),
        "schema_fingerprint": model.schema.fingerprint,
        "hyperparameters": model.config.to_json(),
        "calibration": calibration.to_json(),
        "training": _replace_non_finite(training),
        "files": {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}},
    }
    manifest["format_version"] = _determine_version(manifest)
    manifest["fingerprint"] = _compute_fingerprint(manifest)
    manifest["sha256"] = _compute_digest(manifest)
    return manifest


def _write_and_sync(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Flush the entries of a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_directory(partial: Path, directory: Path) -> None:
    """Rename a directory to its final name, and remove the directory that had this name before.

    A directory cannot be renamed over another one. The old directory is therefore renamed first, and renamed back if
    the second renaming fails.
    """
    old = partial.with_name(partial.name + ".old")
    has_old = directory.exists()
    if has_old:
        directory.rename(old)
    try:
        partial.rename(directory)
    except BaseException:
        if has_old:
            old.rename(directory)
        raise
    _sync_directory(directory.parent)
    if has_old:
        shutil.rmtree(old)


def _replace_non_finite(value: Any) -> Any:
    """Return a JSON value in which NaN and infinite numbers are None, because JSON cannot express them."""
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _determine_version(manifest: dict[str, Any]) -> int:
    """Return the lowest format version that has everything that a manifest contains."""
    if "window" in manifest:
        return WINDOW_VERSION
    calibration = manifest.get("calibration")
    if not isinstance(calibration, dict):
        return BASE_VERSION
    if "ties" in calibration:
        return TIES_VERSION
    return GROUPS_VERSION if "groups" in calibration else BASE_VERSION


def _compute_fingerprint(manifest: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify everything that decides a score or a p-value."""
    parts = [manifest[key] for key in ("schema_fingerprint", "hyperparameters", "calibration", "files")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _render_manifest(manifest: dict[str, Any]) -> bytes:
    """Return the contents of manifest.json."""
    return json.dumps(manifest, indent=1).encode()


def _compute_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its entry `sha256`, in hexadecimal digits."""
    return hashlib.sha256(_render_manifest({key: v for key, v in manifest.items() if key != "sha256"})).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a model directory after checking its version and its checksum.

    Raises:
        ArtifactError: The manifest is missing, truncated, altered or of an unknown format version. The message names
            the file and the remedy.
    """
    path = Path(directory) / MANIFEST
    raw = _read_at_most(path, MAX_MANIFEST_BYTES, "give the directory that deformer-train wrote with --out")
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes, so it was altered: {_REMEDY}")
    try:
        manifest = json.loads(raw)
        is_genuine = _is_genuine(manifest, raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}): it was cut short or altered; {_REMEDY}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or version != _determine_version(manifest):
        is_newer = isinstance(version, int) and version > WINDOW_VERSION
        remedy = "install the newer deformer-stream that wrote it, or train again" if is_newer else "train again"
        raise ArtifactError(
            f"{path} has format version {_shorten(version)}, but this package reads the versions {BASE_VERSION} to "
            f"{WINDOW_VERSION}: {remedy}"
        )
    if not is_genuine:
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {_REMEDY}")
    return dict(manifest)


def _read_at_most(path: Path, max_bytes: int, remedy: str = _REMEDY) -> bytes:
    """Return the contents of a file, but of a longer file only the first `max_bytes` + 1 bytes.

    The path may name anything, such as a device without an end, so only regular files are opened.

    Raises:
        ArtifactError: The file is missing, is not a regular file or cannot be read. The message ends with `remedy`.
    """
    try:
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path} is not a regular file: {_REMEDY}")
        with path.open("rb") as file:
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None


def _shorten(value: object) -> str:
    """Return a value as text for an error message: one line of at most 60 characters."""
    return repr(value)[:60]


def _is_genuine(manifest: Any, raw: bytes) -> bool:
    """Return whether a manifest file is exactly as it was written.

    Each byte counts, so that two files with equal contents and different bytes cannot both be valid.

    Args:
        manifest: The parsed contents, any JSON value.
        raw: The bytes of the file.
    """
    if not isinstance(manifest, dict):
        return False
    return manifest.get("sha256") == _compute_digest(manifest) and _render_manifest(manifest) == raw


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a name; `auto` means a GPU if there is one, else the CPU.

    Raises:
        ConfigError: The name is `cuda`, but there is no usable GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no usable GPU; use --device cpu or --device auto")
    return torch.device(name)


def read(directory: Path, device: str = "cpu", compiled: bool = True) -> Artifact:
    """Read a model directory, verify it and return the model.

    Args:
        directory: The model directory.
        device: The name of the device to load the model to, as for `resolve_device`.
        compiled: Whether to attach the compiled kernels to the model (`DEformer.kernel_library`), so that the engine
            scores with them. It has no effect if there is no compiler, or if the kernels do not support the model.

    Raises:
        ArtifactError: The model directory is incomplete, altered or inconsistent. The message names the file and the
            remedy.
        ConfigError: The device is not available.
    """
    torch_device = resolve_device(device)
    directory = Path(directory)
    manifest = read_manifest(directory)
    weights = _read_at_most(directory / WEIGHTS, _get_weights_size(manifest, directory))
    model, calibration = _build_model(manifest, weights, directory)
    model = model.to(torch_device).eval()
    if compiled and is_supported(model):
        model.kernel_library = build.load_kernels(model.config.precision == "bfloat16")
    return Artifact(model, calibration, manifest["fingerprint"], manifest, directory)


def _get_weights_size(manifest: dict[str, Any], directory: Path) -> int:
    """Return the size in bytes that the weights file must have.

    Raises:
        ArtifactError: The manifest has no valid size. The message names the model directory.
    """
    try:
        size = manifest["files"][WEIGHTS]["size"]
    except (LookupError, TypeError):
        size = None
    if not isinstance(size, int) or not 0 <= size < 2**63 - 1:
        raise ArtifactError(f"{directory} contradicts itself (the size of {WEIGHTS} is {_shorten(size)}): {_REMEDY}")
    return size


def _build_model(manifest: dict[str, Any], weights: bytes, directory: Path) -> tuple[DEformer, Calibration]:
    """Return the model and the calibration that a manifest and the bytes of the weights describe.

    Args:
        manifest: The manifest.
        weights: The contents of the weights file, or a little more if the file is longer than the manifest says.
        directory: The model directory, for error messages.

    Raises:
        ArtifactError: The weights were altered, or the manifest is inconsistent.
    """
    path = directory / WEIGHTS
    size = _get_weights_size(manifest, directory)
    if len(weights) != size:
        actual_size = len(weights) if len(weights) < size else f"more than {size}"
        raise ArtifactError(f"{path} has {actual_size} bytes, not {size}: it was cut short or altered; {_REMEDY}")
    try:
        if hashlib.sha256(weights).hexdigest() != manifest["files"][WEIGHTS]["sha256"]:
            raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {_REMEDY}")
        tensors = safetensors.torch.load(weights)
        schema = Schema.from_json(manifest["features"], manifest.get("window"))
        config = ModelConfig.from_json(manifest["hyperparameters"])
        _check_manifest(manifest, schema)
        _check_tensors(tensors, schema, config)
        model = DEformer(schema, config)
        model.load_state_dict(tensors)
        return model, Calibration.from_json(manifest["calibration"])
    except _INCONSISTENCY_ERRORS as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        printable = repr(message)[1:-1]  # the message can quote control characters from the file
        raise ArtifactError(f"{directory} contradicts itself ({printable}): {_REMEDY}") from None


def _check_manifest(manifest: dict[str, Any], schema: Schema) -> None:
    """Raise ValueError if a manifest has an error that `Schema` and `Feature` do not detect themselves."""
    if not isinstance(manifest["training"], dict):
        raise ValueError("the training summary is not an object")
    if manifest["schema_fingerprint"] != schema.fingerprint or manifest["fingerprint"] != _compute_fingerprint(
        manifest
    ):
        raise ValueError("a fingerprint does not match")
    for feature in schema.features:
        for text in (feature.name, *feature.labels):
            if not isinstance(text, str) or len(text) > MAX_NAME_CHARS:
                raise ValueError(
                    f"{str(text)[:40]!r} is not a string of at most {MAX_NAME_CHARS} characters, as the name of a "
                    "feature and a label must be"
                )
            text.encode()  # raises a ValueError if a surrogate code point cannot be encoded
        if feature.sensor is not None and (not isinstance(feature.sensor, str) or not feature.sensor):
            raise ValueError(f"feature {feature.name!r}: the name of its sensor is not a string, or is empty")
        if not feature.name or not isinstance(feature.reason, str):
            raise ValueError("the name of a feature is empty, or its reason is not a string")
        numbers = (feature.quantum, feature.low, feature.high, feature.period, *(feature.coordinates or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"feature {feature.name!r}: a number is not finite")


def _check_tensors(tensors: dict[str, torch.Tensor], schema: Schema, config: ModelConfig) -> None:
    """Raise ValueError if the weights are not finite, or if they cannot be those of the described network.

    The check comes before the network is built. A forged manifest could otherwise describe a network that is much
    larger than the weights file, and building it would exhaust the memory.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name} of {WEIGHTS} has values that are not finite")
    # Each layer has tensors of its own. Many tiny layers would take much more memory than their weights.
    if config.layers > len(tensors) or len(config.hidden) > len(tensors):
        raise ValueError(f"the hyperparameters describe more layers than the {len(tensors)} tensors in {WEIGHTS} hold")
    num_described = count_state_values(schema, config)
    num_values = sum(tensor.numel() for tensor in tensors.values())
    # A smaller difference takes little memory; `load_state_dict` then reports the name of the tensor that differs.
    if num_described > 4 * num_values + 1_000_000:
        raise ValueError(
            f"the hyperparameters describe a network of {num_described} values, but {WEIGHTS} has {num_values}"
        )
