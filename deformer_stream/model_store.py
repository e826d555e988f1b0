"""Reading and writing of model directories.

A model directory holds:

    model.safetensors         the weights
    manifest.json             format version, features, hyperparameters, calibration, training summary, checksums
    seen-records.safetensors  fingerprints of the records that the model has seen; only `calibrate` reads it
    faults.safetensors        the classifier of faults (`calibration.fault_classifier`); it changes no score
    report.html               the training report for people; not needed to score
    incidents.json            the calibration of incidents (`incident_store`); not needed to score

A directory is written under a temporary name, and exchanges its name with the old one, so that it is never incomplete
or missing. If it is replaced while it is read, it is read again. The manifest holds its own SHA-256 and the size and
SHA-256 of the weights. A truncated or altered file is refused with an error that names it. Manifests can also be forged
with valid checksums. Their contents are therefore checked for consistency, and memory is allocated only in proportion
to the size of the files. Nothing in a model directory is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from deformer_stream import __version__
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.fault_classifier import FaultClassifier
from deformer_stream.calibration.seen_records import RecordSet, SeenRecords
from deformer_stream.counts import format_count
from deformer_stream.durable_file import exchange_paths
from deformer_stream.engine.fault_inputs import count_inputs
from deformer_stream.errors import ArtifactError, ConfigError, map_write_errors
from deformer_stream.extras import is_installed
from deformer_stream.incident_store import INCIDENTS_FILE
from deformer_stream.kernels.cpu import is_supported
from deformer_stream.kernels.library import load_library
from deformer_stream.model.config import ModelConfig
from deformer_stream.model.exemplars import find_merged_labels
from deformer_stream.model.load_network import load_network, require_torch
from deformer_stream.model.parameters import Array, Model, ModelParameters, check_parameters, count_state_values
from deformer_stream.model.schema import Schema
from deformer_stream.model_manifest import (
    BASE_VERSION,
    FAULT_UNITS_KEY,
    MAX_MANIFEST_BYTES,
    OLD_SUFFIX,
    REMEDY,
    compute_digest,
    compute_fingerprint,
    determine_version,
    get_directory_state,
    read_at_most,
    render_manifest,
    shorten,
)
from deformer_stream.model_manifest import MANIFEST as MANIFEST
from deformer_stream.model_manifest import read_manifest as read_manifest
from deformer_stream.record_limits import MAX_NAME_CHARS

if TYPE_CHECKING:
    import torch

    from deformer_stream.model.deformer import DEformer

Result = TypeVar("Result")

WEIGHTS, REPORT = "model.safetensors", "report.html"
SEEN_RECORDS = "seen-records.safetensors"
FAULTS = "faults.safetensors"
_FAULT_ARRAYS = ("weights", "biases", "means", "precisions", "lengths", "scores", "fault_indexes", "folds")
_FAULT_UNITS = ("centers", "scales")
"""The attributes of `FaultClassifier` that are tensors of the file with the classifier of faults.

The second ones are missing in files of earlier releases.
"""
GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""Device files of the drivers with which PyTorch uses GPUs: NVIDIA's, AMD's, and that of a Linux on Windows."""
MAX_READS = 5
"""How often a model directory is read if it is replaced while it is read."""
_INCONSISTENCY_ERRORS = (
    *(AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError),
)
"""The exceptions that can be raised when a model is read from inconsistent files."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model that was read from a model directory and is ready to score.

    Attributes:
        scoring_model: The features, hyperparameters and weights. It is the network in PyTorch if the model is on a GPU.
        calibration: The anomaly scores of normal records, with which new scores are compared to compute p-values.
        fingerprint: 16 hexadecimal digits that identify the weights, the schema (the features) and the calibration
            together.
        manifest: The contents of manifest.json, which describes the model: features, hyperparameters, calibration and
            training summary.
        directory: The model directory.
        fault_classifier: Names the known fault that a record looks like. None if the model has no such classifier.
    """

    scoring_model: Model
    calibration: Calibration
    fingerprint: str
    manifest: dict[str, Any]
    directory: Path
    fault_classifier: FaultClassifier | None = None

    @property
    def schema(self) -> Schema:
        """The features of the records that the model scores."""
        return self.scoring_model.schema

    @property
    def model(self) -> DEformer:
        """The network in PyTorch, which is built when it is first needed.

        Raises:
            ConfigError: PyTorch is not installed.
        """
        return load_network(self.scoring_model, "the network of a model")

    @property
    def device(self) -> str:
        """The name of the device on which the model is."""
        return "cpu" if isinstance(self.scoring_model, ModelParameters) else str(self.model.device)

    def replace_schema(self, schema: Schema) -> None:
        """Replace the schema by one that differs only in texts for people, such as units."""
        self.scoring_model.schema = schema
        if isinstance(self.scoring_model, ModelParameters) and self.scoring_model.network is not None:
            self.scoring_model.network.schema = schema


def check_output_directory(directory: Path) -> None:
    """Check that writing a model to a path would replace nothing but another model.

    Args:
        directory: The path. It may be missing, an empty directory or a model directory, whose model is then replaced.

    Raises:
        ConfigError: The path is a file, or a directory that holds other files than a model.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"the model cannot be written to {directory}, because it is a file and not a directory: name another path"
        )
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ConfigError(
            f"the model cannot be written to {directory}, because it is not a model directory and its files would be "
            "removed: name a new or empty directory"
        )


def write(
    directory: Path,
    model: Model,
    calibration: Calibration,
    training: dict[str, Any],
    report: str,
    seen_records: SeenRecords | None = None,
    fault_classifier: FaultClassifier | None = None,
) -> str:
    """Write a model directory and return the fingerprint of the model.

    The files are written to a temporary directory next to the final one and synced to disk; then the directory gets its
    name. If the path already holds a model, the new one replaces it. If anything fails, the old model stays as it
    was.

    Args:
        directory: The path of the model directory; missing parents are created.
        model: The features, hyperparameters and weights: those of a model directory, or of a network in PyTorch.
        calibration: The model's anomaly scores of normal records, with which new scores are compared.
        training: A summary of the training, as JSON values by key. Numbers that are not finite are stored as null.
        report: The training report, an HTML page.
        seen_records: Fingerprints of the records that the model was trained and calibrated with, None if they are not
            known. They do not enter the fingerprint of the model.
        fault_classifier: The classifier of faults, None if there is none. It does not enter the fingerprint either.

    Returns:
        The fingerprint: 16 hexadecimal digits that identify the weights, the schema (the features) and the calibration
        together.

    Raises:
        ConfigError: The directory cannot be created, or the path holds something other than a model.
        Unavailable: Writing fails, for example because the disk is full.
        ArtifactError: `read` would refuse the model, for example because a weight is not finite.
    """
    directory = Path(directory).resolve()  # of a symbolic link, the target is replaced and the link stays
    check_output_directory(directory)
    arrays = model.extract_parameters().arrays
    weights = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    seen = None if seen_records is None else _encode_seen_records(seen_records)
    faults = None if fault_classifier is None else _encode_faults(fault_classifier)
    manifest = _create_manifest(model, calibration, training, weights, seen and seen[0], faults and faults[0])
    rendered = render_manifest(manifest)
    if len(rendered) > MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"the model cannot be written, because its {MANIFEST} would have {len(rendered)} bytes and the limit is "
            f"{MAX_MANIFEST_BYTES} bytes: use fewer calibration records, or features with fewer labels"
        )
    # Read the model from the bytes, as `read` will, so that a model that cannot be read is not written.
    manifest = json.loads(rendered)
    _parse_model(manifest, weights, directory)
    contents = {WEIGHTS: weights, MANIFEST: rendered}
    if seen is not None:
        contents[SEEN_RECORDS] = seen[1]
    if faults is not None:
        contents[FAULTS] = faults[1]
    write_files(directory, contents | {REPORT: report.encode("utf-8", "backslashreplace")})
    return str(manifest["fingerprint"])


def write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files of a model directory, as `write` does: under a temporary name, which is then replaced.

    Args:
        directory: The path of the model directory; missing parents are created. A model that it holds is replaced.
        contents: The contents of the files by name, as `read_files` returns them.

    Raises:
        ConfigError: The directory cannot be created, or the path holds something other than a model.
        Unavailable: Writing fails, for example because the disk is full.
    """
    directory = Path(directory).resolve()  # of a symbolic link, the target is replaced and the link stays
    check_output_directory(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Unlike `tempfile.mkdtemp`, `mkdir` gives the permissions that the umask of the user states.
        temporary = directory.parent / f".{directory.name}.{secrets.token_hex(8)}"
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(
            f"the model directory {directory} cannot be created ({error.strerror}): name another directory"
        ) from error
    try:
        with map_write_errors(directory):
            for name, content in contents.items():
                _write_and_sync(temporary / name, content)
            _sync_directory(temporary)
            _replace_directory(temporary, directory)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the files of a model directory by name, for a copy of the model.

    The manifest is verified. The other files are verified when the copy is read.

    Args:
        directory: The model directory. Files that do not belong to a model are left out.

    Raises:
        ArtifactError: A file is missing or cannot be read, or the manifest was altered.
    """
    directory = Path(directory)

    def read_once() -> dict[str, bytes]:
        """Return the contents of the files. Some may be of another model if the directory is replaced meanwhile."""
        manifest = read_manifest(directory)
        contents = {WEIGHTS: read_at_most(directory / WEIGHTS, _get_weights_size(manifest, directory))}
        contents[MANIFEST] = read_at_most(directory / MANIFEST, MAX_MANIFEST_BYTES)
        for name in (SEEN_RECORDS, FAULTS, REPORT, INCIDENTS_FILE):
            if (directory / name).is_file():
                contents[name] = read_at_most(directory / name, sys.maxsize)
        return contents

    return _read_unreplaced(directory, read_once)


def _read_unreplaced(directory: Path, read_once: Callable[[], Result]) -> Result:
    """Return what a function reads from a model directory. It is called again if the directory is replaced meanwhile.

    Raises:
        ArtifactError: The function has raised it although the directory was not replaced; or it is replaced each time.
    """
    for _ in range(MAX_READS):
        state = get_directory_state(directory)
        try:
            result = read_once()
        except ArtifactError:
            if get_directory_state(directory) == state:
                raise
        else:
            if get_directory_state(directory) == state:
                return result
    raise ArtifactError(f"{directory} was replaced {MAX_READS} times while it was read: read it again later")


def _create_manifest(
    model: Model,
    calibration: Calibration,
    training: dict[str, Any],
    weights: bytes,
    seen_records: dict[str, Any] | None,
    faults: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the contents of manifest.json for a model, with fingerprints and checksums.

    Args:
        model: The features, hyperparameters and weights: those of a model directory, or of a network in PyTorch.
        calibration: The model's anomaly scores of normal records, with which new scores are compared.
        training: A summary of the training, as JSON values by key.
        weights: The contents of model.safetensors, for their size and checksum.
        seen_records: The entry `seen_records`, which describes the file of this name; None if there is no such file.
        faults: The entry `faults`, which describes the classifier of faults; None if there is none.
    """
    window, reading_times = model.schema.window, model.schema.reading_times
    manifest: dict[str, Any] = {
        "format_version": BASE_VERSION,  # is replaced below; here it keeps its place at the start of the file
        "package_version": __version__,
        "features": model.schema.to_json(),
        **({} if window is None else {"window": window.to_json()}),
        **({} if reading_times is None else {"reading_times": reading_times.to_json()}),
        "schema_fingerprint": model.schema.fingerprint,
        "hyperparameters": model.config.to_json(),
        "calibration": calibration.to_json(),
        "training": _replace_non_finite(training),
        "files": {WEIGHTS: _describe_file(weights)},
        # Not a part of `files`, because these determine the fingerprint of the model.
        **({} if seen_records is None else {"seen_records": seen_records}),
        **({} if faults is None else {"faults": faults}),
    }
    # Each of these entries is computed from entries above, and the checksum from all others.
    manifest["format_version"] = determine_version(manifest)
    manifest["fingerprint"] = compute_fingerprint(manifest)
    manifest["sha256"] = compute_digest(manifest)
    return manifest


def _describe_file(content: bytes) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file, as the manifest states them."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _encode_seen_records(seen_records: SeenRecords) -> tuple[dict[str, Any], bytes]:
    """Return the entry `seen_records` of the manifest, and the contents of the file seen-records.safetensors.

    The entry holds the numbers of each set of records and describes the file. The file has a tensor with the
    fingerprints of each set: `calibration`, and `training.0`, `training.1`, … for the tables of the training.
    """
    calibration = seen_records.calibration
    tensors = {f"training.{i}": records.fingerprints for i, records in enumerate(seen_records.training)}
    if calibration is not None:
        tensors["calibration"] = calibration.fingerprints
    content = safetensors.numpy.save(tensors)
    entry = {
        "file": _describe_file(content),
        "training": [_describe_record_set(records) for records in seen_records.training],
        "calibration": None if calibration is None else _describe_record_set(calibration),
    }
    return entry, content


def _encode_faults(classifier: FaultClassifier) -> tuple[dict[str, Any], bytes]:
    """Return the entry `faults` of the manifest, and the contents of the file faults.safetensors."""
    is_standardised = classifier.centers is not None
    attributes = _FAULT_ARRAYS + (_FAULT_UNITS if is_standardised else ())
    content = safetensors.numpy.save({name: np.ascontiguousarray(getattr(classifier, name)) for name in attributes})
    names = [{"name": name, "records": count} for name, count in classifier.num_records_by_fault.items()]
    entry = {"file": _describe_file(content), "level": classifier.level, "names": names}
    return entry | ({FAULT_UNITS_KEY: list(_FAULT_UNITS)} if is_standardised else {}), content


def write_faults(directory: Path, classifier: FaultClassifier | None) -> None:
    """Add a classifier of faults to a model directory, or replace or remove it. The model itself does not change.

    Args:
        directory: The model directory.
        classifier: The classifier, None to remove it.

    Raises:
        ConfigError: The directory cannot be written.
        Unavailable: Writing fails, for example because the disk is full.
        ArtifactError: The model directory is incomplete or damaged, or `read` would refuse the classifier.
    """
    contents = read_files(directory)
    manifest = json.loads(contents[MANIFEST])
    manifest.pop("faults", None)
    contents.pop(FAULTS, None)
    if classifier is not None:
        manifest["faults"], contents[FAULTS] = _encode_faults(classifier)
        _parse_faults(
            manifest, contents[FAULTS], directory, Schema.from_json(manifest["features"], manifest.get("window"))
        )
    manifest["format_version"] = determine_version(manifest)
    manifest["sha256"] = compute_digest(manifest)
    contents[MANIFEST] = render_manifest(manifest)
    write_files(directory, contents)


def _read_faults(directory: Path, manifest: dict[str, Any], schema: Schema) -> FaultClassifier | None:
    """Return the classifier of faults of a model directory, None if it has none.

    Raises:
        ArtifactError: The file with the classifier is missing, altered or inconsistent. The message names it.
    """
    if "faults" not in manifest:
        return None
    try:
        size = int(manifest["faults"]["file"]["size"])
        if size < 0:
            raise ValueError(f"the size of {FAULTS} is negative")
    except _INCONSISTENCY_ERRORS as error:
        raise ArtifactError(f"{directory / MANIFEST} is damaged ({_to_printable_line(error)}): {REMEDY}") from None
    return _parse_faults(manifest, read_at_most(directory / FAULTS, size), directory, schema)


def _parse_faults(manifest: dict[str, Any], content: bytes, directory: Path, schema: Schema) -> FaultClassifier:
    """Return the classifier of faults from the contents of its file.

    Args:
        manifest: The contents of manifest.json.
        content: The contents of faults.safetensors.
        directory: The model directory, for error messages.
        schema: The features of the model.

    Raises:
        ArtifactError: The contents were altered or do not fit the model.
    """
    path = directory / FAULTS
    try:
        entry = manifest["faults"]
        if _describe_file(content) != entry["file"]:
            raise ArtifactError(f"{path} was cut short or altered (its SHA-256 does not match): {REMEDY}")
        arrays = safetensors.numpy.load(content)
        names = tuple(str(fault["name"]) for fault in entry["names"])
        if any(len(name) > MAX_NAME_CHARS for name in names):
            raise ValueError("a name is too long")
        for name in names:
            name.encode()  # raises a ValueError if the text is not valid Unicode, because it has a lone surrogate
        attributes = _FAULT_ARRAYS + (_FAULT_UNITS if FAULT_UNITS_KEY in entry else ())
        classifier = FaultClassifier(names, float(entry["level"]), **{name: arrays[name] for name in attributes})
        if (classifier.num_inputs, classifier.num_features) != (count_inputs(schema), len(schema)):
            raise ValueError(
                f"it has {classifier.num_inputs} inputs of {classifier.num_features} features instead of "
                f"{count_inputs(schema)} of {len(schema)}"
            )
        if schema.reading_times is not None:
            raise ValueError("the readings of the model are irregular")
        return classifier
    except _INCONSISTENCY_ERRORS as error:
        raise ArtifactError(f"{path} is damaged ({_to_printable_line(error)}): {REMEDY}") from None


def _describe_record_set(records: RecordSet) -> dict[str, int]:
    """Return the numbers of a set of seen records; the keys are part of the format of the manifest."""
    return {
        "records": records.num_records,
        "repeated": records.num_repeated,
        "different": records.num_different,
        "different_repeated": records.num_different_repeated,
    }


def read_seen_records(directory: Path, manifest: dict[str, Any]) -> SeenRecords | None:
    """Return the fingerprints of the records that a model has seen, from its directory.

    Args:
        directory: The model directory.
        manifest: The contents of its manifest.json.

    Returns:
        The fingerprints; None if the model was written by a release that did not store them.

    Raises:
        ArtifactError: The file with the fingerprints is missing, altered or inconsistent. The message names it.
    """
    entry = manifest.get("seen_records")
    if entry is None:
        return None
    path = Path(directory) / SEEN_RECORDS
    try:
        size, sha256 = int(entry["file"]["size"]), entry["file"]["sha256"]
        content = read_at_most(path, size)
        if _describe_file(content) != {"size": size, "sha256": sha256}:
            raise ArtifactError(f"{path} was cut short or altered (its SHA-256 does not match): {REMEDY}")
        tensors = safetensors.numpy.load(content)
        training = tuple(
            _build_record_set(tensors[f"training.{i}"], numbers) for i, numbers in enumerate(entry["training"])
        )
        numbers = entry["calibration"]
        calibration = None if numbers is None else _build_record_set(tensors["calibration"], numbers)
        return SeenRecords(training, calibration)
    except _INCONSISTENCY_ERRORS as error:
        raise ArtifactError(f"{path} is damaged ({_to_printable_line(error)}): {REMEDY}") from None


def _build_record_set(fingerprints: np.ndarray[Any, Any], numbers: dict[str, int]) -> RecordSet:
    """Return a set of seen records from its tensor and from the numbers that `_describe_record_set` returned."""
    return RecordSet(
        fingerprints=fingerprints,
        num_records=numbers["records"],
        num_repeated=numbers["repeated"],
        num_different=numbers["different"],
        num_different_repeated=numbers["different_repeated"],
    )


def _write_and_sync(path: Path, data: bytes) -> None:
    """Write a file and return only when its contents are on the disk, so that a power failure cannot lose them."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Force new and renamed entries of a directory to the disk, so that a power failure cannot lose them.

    Windows cannot do this, and the function then does nothing.
    """
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_directory(temporary: Path, directory: Path) -> None:
    """Rename a directory to its final name, and remove the directory that had this name before, if any.

    A directory cannot be renamed over another one that holds files, so the two exchange their names. If the system
    cannot do this, the old directory is renamed first, and renamed back if the renaming of the new one fails. There is
    then no directory of this name for a moment.

    Args:
        temporary: The path of the new directory, in the same parent directory as its final path.
        directory: The final path.
    """
    old = temporary.with_name(temporary.name + OLD_SUFFIX)
    has_old = directory.exists()
    if has_old and exchange_paths(temporary, directory):
        try:
            _sync_directory(directory.parent)
        except BaseException:
            exchange_paths(temporary, directory)
            raise
        shutil.rmtree(temporary)
        return
    if has_old:
        directory.rename(old)
    try:
        temporary.rename(directory)
    except BaseException:  # also KeyboardInterrupt: the old model must get its name back in any case
        if has_old:
            old.rename(directory)
        raise
    _sync_directory(directory.parent)
    if has_old:
        shutil.rmtree(old)


def _replace_non_finite(value: Any) -> Any:
    """Return a copy of a JSON value in which None replaces NaN and infinite numbers, which JSON cannot express.

    Args:
        value: A dict, list, tuple, string, number, boolean or None, nested to any depth.
    """
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def resolve_device(name: str) -> torch.device:
    """Return the torch device that the option `--device` names.

    Args:
        name: `cpu`, `cuda` or another name of a torch device; `auto` means a GPU if there is one, else the CPU.

    Raises:
        ConfigError: There is no such device, or no usable GPU of this number. Or PyTorch is not installed.
    """
    require_torch(f"--device {name}")
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"--device {name}: PyTorch has no device of this name; use --device cpu, cuda or auto"
        ) from None
    num_gpus = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        found = f"there is only {format_count(num_gpus, 'usable GPU')}" if num_gpus else "there is no usable GPU"
        raise ConfigError(f"--device {name} cannot be used, because {found}: use --device cpu or auto")
    return device


def _is_cpu(device: str) -> bool:
    """Return whether the name of a device, as for `resolve_device`, means the CPU on this machine.

    PyTorch takes seconds to import, so it is not asked for a GPU if the system has no device file of one.

    Raises:
        ConfigError: The name is that of a GPU, but there is none, or PyTorch is not installed.
    """
    has_gpu_file = any(os.path.exists(path) for path in GPU_FILES)
    if device == "cpu" or (device == "auto" and not (has_gpu_file and is_installed("torch"))):
        return True
    return resolve_device(device).type == "cpu"


def read(directory: Path, device: str = "cpu", compiled: bool = True) -> Artifact:
    """Read a model directory, verify it and return the model.

    Args:
        directory: The model directory.
        device: The name of the device to load the model to, as for `resolve_device`. PyTorch is imported for all
            devices but "cpu".
        compiled: Whether to attach the compiled CPU kernels to the model. They score faster than PyTorch, which is then
            not needed (`ModelParameters.kernel_library`). If PyTorch has to score, on a GPU or because they do not
            support the model, they only measure distances (`distance_library`). Nothing is attached if there are no
            kernels for the processor.

    Raises:
        ArtifactError: The model directory is incomplete, altered or inconsistent. The message names the file and the
            remedy.
        ConfigError: The device is not available.
    """
    directory = Path(directory)
    return _read_unreplaced(directory, lambda: _read_once(directory, device, compiled))


def _read_once(directory: Path, device: str, compiled: bool) -> Artifact:
    """Read a model directory, as `read` does, without considering that it may be replaced meanwhile."""
    is_on_cpu = _is_cpu(device)
    manifest = read_manifest(directory)
    weights = read_at_most(directory / WEIGHTS, _get_weights_size(manifest, directory))
    parameters, calibration = _parse_model(manifest, weights, directory)
    if compiled and is_on_cpu and is_supported(parameters):
        has_low_precision = parameters.config.precision == "bfloat16"
        parameters.kernel_library = load_library(has_low_precision)
    elif compiled and parameters.config.alert_exemplars:
        parameters.distance_library = load_library(False)
    model: Model = parameters
    if not is_on_cpu:
        model = load_network(parameters).to(resolve_device(device)).eval()
    fault_classifier = _read_faults(directory, manifest, parameters.schema)
    return Artifact(model, calibration, manifest["fingerprint"], manifest, directory, fault_classifier)


def _get_weights_size(manifest: dict[str, Any], directory: Path) -> int:
    """Return the size in bytes that the weights file must have according to the manifest.

    Args:
        manifest: The contents of manifest.json.
        directory: The model directory, for the error message.

    Raises:
        ArtifactError: The manifest has no valid size.
    """
    try:
        size = manifest["files"][WEIGHTS]["size"]
    except (LookupError, TypeError):
        size = None
    if not isinstance(size, int) or not 0 <= size < 2**63 - 1:
        raise ArtifactError(
            f"the model directory {directory} is damaged ({MANIFEST} states the size of {WEIGHTS} as "
            f"{shorten(size)}, which is not a number of bytes): {REMEDY}"
        )
    return size


def _parse_model(manifest: dict[str, Any], weights: bytes, directory: Path) -> tuple[ModelParameters, Calibration]:
    """Return the model and its calibration from the contents of the files of a model directory.

    Args:
        manifest: The contents of manifest.json.
        weights: The contents of model.safetensors. If the file is longer than the manifest states, it is enough to pass
            the stated number of bytes plus one; the file is then refused.
        directory: The model directory, for error messages.

    Raises:
        ArtifactError: The weights file was altered, or does not match the manifest.
    """
    path = directory / WEIGHTS
    size = _get_weights_size(manifest, directory)
    if len(weights) != size:
        actual_size = len(weights) if len(weights) < size else f"more than {size}"
        raise ArtifactError(
            f"{path} has {actual_size} bytes, but {MANIFEST} states {size}: it was cut short or altered; {REMEDY}"
        )
    try:
        if hashlib.sha256(weights).hexdigest() != manifest["files"][WEIGHTS]["sha256"]:
            raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {REMEDY}")
        arrays = safetensors.numpy.load(weights)
        schema = Schema.from_json(manifest["features"], manifest.get("window"), manifest.get("reading_times"))
        config = ModelConfig.from_json(manifest["hyperparameters"])
        _check_manifest(manifest, schema, directory)
        _check_arrays(arrays, schema, config, directory)
        parameters = ModelParameters(schema, config, check_parameters(schema, config, arrays))
        calibration = Calibration.from_json(manifest["calibration"])
    except _INCONSISTENCY_ERRORS as error:
        raise ArtifactError(
            f"the model directory {directory} is damaged ({_to_printable_line(error)}): {REMEDY}"
        ) from None
    merged = find_merged_labels(parameters)
    if merged is not None:
        raise ArtifactError(
            f"{directory}: an earlier release has stored one position for all labels of the feature {merged!r}, which "
            "are large numbers, so they cannot be distinguished: train the model again"
        )
    return parameters, calibration


def _to_printable_line(error: Exception) -> str:
    """Return the type and the text of an error, which can quote text from damaged files, as one short line.

    Control characters are escaped, because they could otherwise change what a terminal shows.
    """
    one_line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return repr(one_line)[1:-1]


def _check_manifest(manifest: dict[str, Any], schema: Schema, directory: Path) -> None:
    """Check a manifest for errors that the constructors of `Schema` and `Feature` do not detect.

    Args:
        manifest: The contents of manifest.json.
        schema: The schema (the features) that was built from them.
        directory: The model directory, for error messages.

    Raises:
        ArtifactError: The manifest has such an error.
        ValueError: A name or a label is not valid Unicode text.
    """
    path = directory / MANIFEST
    training = manifest["training"]
    if not isinstance(training, dict):
        raise ArtifactError(
            f"{path} is damaged: its entry `training` is {shorten(training)}, but must be a JSON object; {REMEDY}"
        )
    if manifest["schema_fingerprint"] != schema.fingerprint:
        raise ArtifactError(
            f"{path} is damaged: its entry `schema_fingerprint` is not the checksum of its features, so one of the two "
            f"was altered; {REMEDY}"
        )
    if manifest["fingerprint"] != compute_fingerprint(manifest):
        raise ArtifactError(
            f"{path} is damaged: its entry `fingerprint` is not the checksum of its features, hyperparameters, "
            f"calibration and files, so one of them was altered; {REMEDY}"
        )
    for feature in schema.features:
        unit = () if feature.unit is None else (feature.unit,)
        for text in (feature.name, *feature.labels, *unit):
            if not isinstance(text, str):
                raise ArtifactError(
                    f"{path} is damaged: the feature name, label or unit {shorten(text)} is not a string; {REMEDY}"
                )
            if len(text) > MAX_NAME_CHARS:
                raise ArtifactError(
                    f"{path} is damaged: the feature name or label that begins with {text[:40]!r} has {len(text)} "
                    f"characters, but at most {MAX_NAME_CHARS} are accepted; {REMEDY}"
                )
            text.encode()  # raises a ValueError if the text is not valid Unicode, because it has a lone surrogate
        if not feature.name:
            raise ArtifactError(f"{path} is damaged: a feature has an empty name; {REMEDY}")
        if feature.sensor is not None and (not isinstance(feature.sensor, str) or not feature.sensor):
            raise ArtifactError(
                f"{path} is damaged: the entry `sensor` of feature {shorten(feature.name)} is "
                f"{shorten(feature.sensor)}, but must be a string that is not empty; {REMEDY}"
            )
        if not isinstance(feature.reason, str):
            raise ArtifactError(
                f"{path} is damaged: the entry `reason` of feature {shorten(feature.name)} is "
                f"{shorten(feature.reason)}, but must be a string; {REMEDY}"
            )
        for key in ("quantum", "low", "high", "period", "coordinates"):
            entry = getattr(feature, key)
            numbers = entry if isinstance(entry, tuple) else (entry,)  # only `coordinates` has several numbers
            if not all(number is None or math.isfinite(number) for number in numbers):
                raise ArtifactError(
                    f"{path} is damaged: the entry `{key}` of feature {shorten(feature.name)} is {shorten(entry)}, "
                    f"but must be finite; {REMEDY}"
                )


def _check_arrays(arrays: dict[str, Array], schema: Schema, config: ModelConfig, directory: Path) -> None:
    """Check that the weights are finite, and that the described network is not much larger than the weights file.

    The check is made before the weights are used. A forged manifest could otherwise describe such a large network that
    its description would exhaust the memory.

    Args:
        arrays: The arrays of model.safetensors by name.
        schema: The features of the described network.
        config: The hyperparameters of the described network.
        directory: The model directory, for error messages.

    Raises:
        ArtifactError: The check fails.
    """
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ArtifactError(
                f"{directory / WEIGHTS} is damaged: its tensor {shorten(name)} has values that are not finite; {REMEDY}"
            )
    # Each layer has at least one tensor of its own. The values are counted below, but the objects of very many tiny
    # layers would take much more memory than their values, so the layers are counted, too.
    num_layers = max(config.layers, len(config.hidden))  # Transformer layers, and hidden layers of the encoders
    if num_layers > len(arrays):
        raise ArtifactError(
            f"the model directory {directory} is damaged: the hyperparameters in {MANIFEST} describe {num_layers} "
            f"layers, each with tensors of its own, but {WEIGHTS} has only {len(arrays)} tensors; {REMEDY}"
        )
    num_described_values = count_state_values(schema, config)
    num_values = sum(array.size for array in arrays.values())
    # A smaller difference is allowed here: `check_parameters` reports which tensor differs.
    if num_described_values > 4 * num_values + 1_000_000:
        raise ArtifactError(
            f"the model directory {directory} is damaged: the hyperparameters in {MANIFEST} describe a network with "
            f"{num_described_values} weights, but {WEIGHTS} has only {num_values}; {REMEDY}"
        )
