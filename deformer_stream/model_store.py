"""The model directory: written whole or not at all, verified before use.

    model.safetensors   weights
    manifest.json       format version, features, hyperparameters, calibration, training summary, digests
    report.html         for people; not needed for scoring

The manifest holds the size and SHA-256 of the weights and its own SHA-256, so a file that was cut short or altered is
refused by name; what it says must then fit together and be finite. Nothing in a model directory is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from deformer_stream import __version__
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ArtifactError, ConfigError, map_write_errors
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import is_supported
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Schema

FORMAT_VERSION, GROUPED_VERSION, HELD_VERSION, WINDOWED_VERSION = 1, 2, 3, 4
"""The second with calibrations of groups, the third with ties held, the fourth with the window that records are cut out
of: a release that does not know of what is new would pass it over."""
WEIGHTS, MANIFEST, REPORT = "model.safetensors", "manifest.json", "report.html"
LONGEST_NAME = 1024
"""Characters in a feature's name or label; longer ones could never arrive as events."""
LARGEST_MANIFEST = 64 * 2**20
"""Bytes; one with a million calibration records has half of it."""
_CONTRADICTIONS = (AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError)
"""What building a model from a manifest that does not fit together can raise."""
_MAKERS = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
    torch.Tensor.repeat,
)
"""What the parts of a model take their memory with."""
_REMEDY = "restore it from a copy, or train again"


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


def check_target(directory: Path) -> None:
    """Raise `ConfigError` if something other than a model stands where one is to be written: it would be replaced."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: name a directory for the model")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ConfigError(f"{directory} is no model directory and its files would be removed: name another directory")


def write(directory: Path, model: DEformer, calibration: Calibration, training: dict[str, Any], report: str) -> str:
    """Write the model directory beside its final name, make it durable, then rename; returns the fingerprint.

    training: the summary (JSON values; numbers that are not finite become null). report: an HTML page. A model that
    stands there is replaced; if anything fails it stays as it was. Raises `ConfigError` where the directory cannot be
    made or holds something else, `Unavailable` where writing fails, `ArtifactError` for a model that `read` would
    refuse.
    """
    directory = Path(directory).absolute()
    check_target(directory)
    weights = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()})
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "features": model.schema.to_json(),
        **({} if model.schema.window is None else {"window": model.schema.window.to_json()}),
        "schema_fingerprint": model.schema.fingerprint,
        "hyperparameters": model.config.to_json(),
        "calibration": calibration.to_json(),
        "training": _finite(training),
        "files": {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}},
    }
    manifest["format_version"] = _version(manifest)
    manifest["fingerprint"] = _fingerprint(manifest)
    manifest["sha256"] = _digest(manifest)
    rendered = _render(manifest)
    if len(rendered) > LARGEST_MANIFEST:
        raise ArtifactError(
            f"{MANIFEST} would have {len(rendered)} bytes, at most {LARGEST_MANIFEST} can be read again"
        )
    _build(json.loads(rendered), weights, directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error.strerror}): name another directory") from error
    try:
        with map_write_errors(directory):
            partial.chmod(0o755)
            _write_durably(partial / WEIGHTS, weights)
            _write_durably(partial / MANIFEST, rendered)
            _write_durably(partial / REPORT, report.encode("utf-8", "backslashreplace"))
            _sync(partial)
            _replace(partial, directory)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    return str(manifest["fingerprint"])


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Make the directory's entries durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(partial: Path, directory: Path) -> None:
    """Rename into place; what stood there is moved aside first, since a directory cannot be renamed over another, and
    comes back if the rename fails."""
    old = partial.with_name(partial.name + ".old")
    replacing = directory.exists()
    if replacing:
        directory.rename(old)
    try:
        partial.rename(directory)
    except BaseException:
        if replacing:
            old.rename(directory)
        raise
    _sync(directory.parent)
    if replacing:
        shutil.rmtree(old)


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(manifest: dict[str, Any]) -> int:
    """The format version of what is in a manifest."""
    if "window" in manifest:
        return WINDOWED_VERSION
    calibration = manifest.get("calibration")
    if not isinstance(calibration, dict):
        return FORMAT_VERSION
    if "ties" in calibration:
        return HELD_VERSION
    return GROUPED_VERSION if "groups" in calibration else FORMAT_VERSION


def _fingerprint(manifest: dict[str, Any]) -> str:
    """16 hex digits over everything that decides a score or a p-value."""
    parts = [manifest[k] for k in ("schema_fingerprint", "hyperparameters", "calibration", "files")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _render(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_render({k: v for k, v in manifest.items() if k != "sha256"})).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The verified manifest of a model directory. Raises `ArtifactError` that names the file and the remedy."""
    path = Path(directory) / MANIFEST
    raw = _contents(path, LARGEST_MANIFEST, "give the directory that deformer-train wrote with --out")
    if len(raw) > LARGEST_MANIFEST:
        raise ArtifactError(f"{path} has more than {LARGEST_MANIFEST} bytes: it was altered; {_REMEDY}")
    try:
        manifest = json.loads(raw)
        genuine = _genuine(manifest, raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}): it was cut short or altered; {_REMEDY}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or version != _version(manifest):
        found = f"{path} has format version {_short(version)}"
        newer = isinstance(version, int) and version > WINDOWED_VERSION
        remedy = "install the newer deformer-stream that wrote it, or train again" if newer else "train again"
        raise ArtifactError(f"{found}, this package reads {FORMAT_VERSION} to {WINDOWED_VERSION}: {remedy}")
    if not genuine:
        raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {_REMEDY}")
    return dict(manifest)


def _contents(path: Path, most: int, remedy: str = _REMEDY) -> bytes:
    """A file, or of a longer one the first `most` + 1 bytes. What stands there need not be a file nor have an end.
    Raises `ArtifactError`."""
    try:
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path} is no file: {_REMEDY}")
        with path.open("rb") as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None


def _short(value: object) -> str:
    """For a message: one line of bounded length."""
    return repr(value)[:60]


def _genuine(manifest: Any, raw: bytes) -> bool:
    """Whether the file is as it was written; every byte counts, also where another text would mean the same."""
    return isinstance(manifest, dict) and manifest.get("sha256") == _digest(manifest) and _render(manifest) == raw


def device_named(name: str) -> torch.device:
    """torch's name of a device, or `auto`, which takes a GPU if there is one. Raises `ConfigError` where none is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no usable GPU is there; use --device cpu or auto")
    return torch.device(name)


def read(directory: Path, device: str = "cpu", compiled: bool = True) -> Artifact:
    """Load and verify a model directory onto a device (`device_named`), with compiled code to score by where it fits.

    Raises `ArtifactError` that names the file and the remedy."""
    place = device_named(device)
    directory = Path(directory)
    manifest = read_manifest(directory)
    weights = _contents(directory / WEIGHTS, _size_of_weights(manifest, directory))
    model, calibration = _build(manifest, weights, directory)
    model = model.to(place).eval()
    if compiled and is_supported(model):
        model.kernel_library = build.load_kernels(model.config.precision == "bfloat16")
    return Artifact(model, calibration, manifest["fingerprint"], manifest, directory)


def _size_of_weights(manifest: dict[str, Any], directory: Path) -> int:
    """As the manifest has it. Raises `ArtifactError`."""
    try:
        size = manifest["files"][WEIGHTS]["size"]
    except (LookupError, TypeError):
        size = None
    if not isinstance(size, int) or not 0 <= size < 2**63 - 1:
        raise ArtifactError(f"{directory} contradicts itself (the size of {WEIGHTS} is {_short(size)}): {_REMEDY}")
    return size


def _build(manifest: dict[str, Any], weights: bytes, directory: Path) -> tuple[DEformer, Calibration]:
    """Model and calibration, all that the manifest says about them verified. Raises `ArtifactError`."""
    path = directory / WEIGHTS
    size = _size_of_weights(manifest, directory)
    if len(weights) != size:
        has = len(weights) if len(weights) < size else f"more than {size}"
        raise ArtifactError(f"{path} has {has} bytes, not {size}: it was cut short or altered; {_REMEDY}")
    try:
        if hashlib.sha256(weights).hexdigest() != manifest["files"][WEIGHTS]["sha256"]:
            raise ArtifactError(f"{path} was altered (its SHA-256 does not match): {_REMEDY}")
        tensors = safetensors.torch.load(weights)
        schema = Schema.from_json(manifest["features"], manifest.get("window"))
        config = ModelConfig.from_json(manifest["hyperparameters"])
        _check(manifest, schema, tensors)
        with _Modest(tensors):
            model = DEformer(schema, config)
        model.load_state_dict(tensors)
        return model, Calibration.from_json(manifest["calibration"])
    except _CONTRADICTIONS as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        printable = repr(line)[1:-1]  # it quotes what the file says
        raise ArtifactError(f"{directory} contradicts itself ({printable}): {_REMEDY}") from None


def _check(manifest: dict[str, Any], schema: Schema, tensors: dict[str, torch.Tensor]) -> None:
    """What the classes themselves do not check. Raises `ValueError`."""
    if not isinstance(manifest["training"], dict):
        raise ValueError("the training summary is no object")
    if manifest["schema_fingerprint"] != schema.fingerprint or manifest["fingerprint"] != _fingerprint(manifest):
        raise ValueError("a fingerprint does not match")
    for feature in schema.features:
        for text in (feature.name, *feature.labels):
            if not isinstance(text, str) or len(text) > LONGEST_NAME:
                raise ValueError(f"{str(text)[:40]!r} is no name for a feature or label")
            text.encode()
        if feature.sensor is not None and (not isinstance(feature.sensor, str) or not feature.sensor):
            raise ValueError(f"feature {feature.name!r}: its sensor is no name")
        if not feature.name or not isinstance(feature.reason, str):
            raise ValueError("a feature has no name, or a reason that is no text")
        numbers = (feature.quantum, feature.low, feature.high, feature.period, *(feature.coordinates or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"feature {feature.name!r}: a number is not finite")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name} of {WEIGHTS} holds numbers that are not finite")


class _Modest(TorchFunctionMode):
    """While it is in force, a model that takes much more than its weights hold is refused before memory is taken for
    it, whatever it is in its hyperparameters that asks for so much. Raises `ValueError`."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = sum(tensor.numel() for tensor in tensors.values())
        self._numbers, self._calls = 4 * self._held + 1_000_000, 16 * len(tensors) + 1_000

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            self._calls -= 1
            self._numbers -= _numbers_made(func, args, kwargs)
            if self._calls < 0 or self._numbers < 0:
                raise ValueError(f"the hyperparameters ask for more than the {self._held} numbers in {WEIGHTS}")
        return func(*args, **kwargs)


def _numbers_made(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Found on torch's device without memory."""
    if func is torch.Tensor.repeat:
        return int(func(args[0].to("meta"), *args[1:], **kwargs).numel())
    return int(func(*args, **{**kwargs, "device": "meta"}).numel())
