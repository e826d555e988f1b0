"""The model directory: a round trip, and every way of breaking one is refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ArtifactError, ConfigError, Unavailable
from tests.engine.worlds import model_of, normalised, records_of
from tests.fuzz.forgery import signed
from tests.models import CONFIG, SCHEMA, TRAINING, calibration_of, small_model, write_model

Manifest = dict[str, Any]


@pytest.fixture
def directory(model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may ruin."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def refused(directory: Path, *words: str) -> str:
    """Reading fails with one line that holds these words and a remedy."""
    with pytest.raises(ArtifactError) as caught:
        model_store.read(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    assert any(remedy in line for remedy in ("restore it", "train again", "deformer-train wrote"))
    for word in (str(directory), *words):
        assert word in line
    return line


def forge(directory: Path, change: Callable[[Manifest], object]) -> None:
    """Alter the manifest as someone would who knows how it is signed."""
    manifest = json.loads((directory / model_store.MANIFEST).read_bytes())
    change(manifest)
    (directory / model_store.MANIFEST).write_bytes(signed(manifest))


def forge_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = safetensors.torch.load_file(directory / model_store.WEIGHTS)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (directory / model_store.WEIGHTS).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(directory, lambda manifest: manifest["files"].update({model_store.WEIGHTS: entry}))


@pytest.mark.parametrize("tokens", ["pair", "single"])
def test_round_trip(tmp_path: Path, tokens: Literal["pair", "single"]) -> None:
    model = model_of(SCHEMA, replace(CONFIG, tokens=tokens), 0, torch.float32)
    calibration = calibration_of(model)
    fingerprint = model_store.write(tmp_path / "deep" / "model", model, calibration, TRAINING, "<p>é</p>")
    loaded = model_store.read(tmp_path / "deep" / "model")
    codes, values = records_of(SCHEMA, 50, 3, missing=0.2)
    x = torch.from_numpy(normalised(SCHEMA, codes, values)).float()
    with torch.inference_mode():
        before, after = (m.log_prob(torch.from_numpy(codes), x) for m in (model, loaded.model))
    assert torch.equal(before, after)
    assert not loaded.model.training
    assert loaded.schema == SCHEMA
    assert loaded.fingerprint == fingerprint == loaded.manifest["fingerprint"]
    assert np.array_equal(loaded.calibration.scores, calibration.scores)
    assert loaded.calibration.arrival_order == "random"
    assert loaded.manifest["training"] == TRAINING
    assert (tmp_path / "deep" / "model" / model_store.REPORT).read_text() == "<p>é</p>"
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["model"]


def test_a_manifest_from_before_single_tokens(directory: Path) -> None:
    forge(directory, lambda manifest: manifest["hyperparameters"].pop("tokens"))
    assert model_store.read(directory).model.config.tokens == "pair"


def test_fingerprint_names_everything_that_decides_a_score(tmp_path: Path) -> None:
    model = small_model()
    calibration = calibration_of(model)
    same = [model_store.write(tmp_path / str(i), model, calibration, {"run": i}, "") for i in range(2)]
    other_calibration = model_store.write(tmp_path / "c", model, calibration_of(model, 50), {}, "")
    other_weights = model_store.write(tmp_path / "w", small_model(1), calibration, {}, "")
    assert len({*same, other_calibration, other_weights}) == 3


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_missing_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    refused(directory, name, "missing")


def test_report_is_for_people(directory: Path) -> None:
    (directory / model_store.REPORT).unlink()
    assert model_store.read(directory).schema == SCHEMA


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.999, -1])
def test_cut_short(directory: Path, name: str, share: float) -> None:
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: -1 if share < 0 else int(len(data) * share)])
    refused(directory, name, "cut short")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_one_flipped_bit(directory: Path, name: str) -> None:
    data = (directory / name).read_bytes()
    rng = np.random.default_rng(0)
    places = {0, len(data) - 1, *rng.integers(0, len(data), 100).tolist()}
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        (directory / name).write_bytes(flipped)
        refused(directory, name)


@pytest.mark.parametrize("more", [b" ", b"\n", b"{}", b"\0"])
def test_bytes_at_the_end(directory: Path, more: bytes) -> None:
    for name in (model_store.MANIFEST, model_store.WEIGHTS):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(whole + more)
        refused(directory, name)
        (directory / name).write_bytes(whole)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5, [1], True])
def test_format_version(directory: Path, version: object) -> None:
    forge(directory, lambda manifest: manifest.update(format_version=version))
    if version is True:  # JSON's true equals 1 in Python, but the file says something else than was written
        assert model_store.read(directory)
    else:
        refused(directory, model_store.MANIFEST, "format version", repr(version), "train again")


def test_a_newer_format_asks_for_a_newer_package(directory: Path) -> None:
    forge(directory, lambda manifest: manifest.update(format_version=99))
    refused(directory, "format version 99", "install the newer deformer-stream", "or train again")


def test_a_file_in_place_of_a_model(directory: Path) -> None:
    refused(directory / model_store.REPORT, "is missing", "give the directory that deformer-train wrote")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[]",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"17",
        b"{}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"[" * 5_000 + b"]" * 5_000,
        b'{"format_version": 1}',
        b'{"format_version": 1, "sha256": null}',
        b'{"format_version": NaN}',
        b'{"format_version": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{",
        b"\x80\x81",
        b"\0" * 1000,
    ],
    ids=range(18),
)
def test_manifest_that_is_none(directory: Path, text: bytes) -> None:
    (directory / model_store.MANIFEST).write_bytes(text)
    refused(directory, model_store.MANIFEST)


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("hello")
    refused(tmp_path / "model")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_file_that_is_a_directory(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()
    refused(directory, name)


def first(manifest: Manifest) -> Manifest:
    feature: Manifest = manifest["features"][0]
    return feature


def labelled(manifest: Manifest) -> Manifest:
    feature: Manifest = manifest["features"][3]
    return feature


CONTRADICTIONS: dict[str, Callable[[Manifest], object]] = {
    "features gone": lambda m: m.pop("features"),
    "hyperparameters gone": lambda m: m.pop("hyperparameters"),
    "calibration gone": lambda m: m.pop("calibration"),
    "files gone": lambda m: m.pop("files"),
    "training gone": lambda m: m.pop("training"),
    "training a list": lambda m: m.update(training=[]),
    "files a list": lambda m: m.update(files=[]),
    "size a text": lambda m: m["files"][model_store.WEIGHTS].update(size="many"),
    "no features": lambda m: m.update(features=[]),
    "a feature less": lambda m: m["features"].pop(),
    "a feature more": lambda m: m["features"].append(dict(first(m), name="more")),
    "features of numbers": lambda m: m.update(features=[1, 2]),
    "features of texts": lambda m: m.update(features=["temperature"]),
    "two of a name": lambda m: labelled(m).update(name="temperature"),
    "name empty": lambda m: first(m).update(name=""),
    "name a number": lambda m: first(m).update(name=5),
    "name a list": lambda m: first(m).update(name=["a"]),
    "name endless": lambda m: first(m).update(name="x" * 100_000),
    "name no unicode": lambda m: first(m).update(name="\ud800"),
    "label no unicode": lambda m: labelled(m).update(labels=["a", "b", "\udfff"]),
    "label a number": lambda m: labelled(m).update(labels=["a", "b", 3]),
    "labels none": lambda m: labelled(m).update(labels=[]),
    "labels more": lambda m: labelled(m).update(labels=["a", "b", "c", "d"]),
    "labels a number": lambda m: labelled(m).update(labels=7),
    "reason a list": lambda m: first(m).update(reason=["because"]),
    "kind continuous": lambda m: labelled(m).update(kind="continuous", labels=[]),
    "unknown field": lambda m: first(m).update(colour="red"),
    "scale zero": lambda m: first(m).update(scale=0.0),
    "scale negative": lambda m: first(m).update(scale=-1.0),
    "scale NaN": lambda m: first(m).update(scale=float("nan")),
    "scale a text": lambda m: first(m).update(scale="wide"),
    "location infinite": lambda m: first(m).update(location=float("inf")),
    "quantum NaN": lambda m: first(m).update(quantum=float("nan")),
    "low infinite": lambda m: first(m).update(low=float("-inf")),
    "unseen one": lambda m: first(m).update(unseen=1.0),
    "coordinates of one": lambda m: first(m).update(coordinates=[0.0, 1.0]),
    "coordinates NaN": lambda m: [f.update(coordinates=[float("nan")]) for f in m["features"]],
    "d_model": lambda m: m["hyperparameters"].update(d_model=32),
    "d_model zero": lambda m: m["hyperparameters"].update(d_model=0),
    "d_model huge": lambda m: m["hyperparameters"].update(d_model=2**40),
    "layers": lambda m: m["hyperparameters"].update(layers=3),
    "layers endless": lambda m: m["hyperparameters"].update(layers=10**9),
    "layers a half": lambda m: m["hyperparameters"].update(layers=2.5),
    "mixtures huge": lambda m: m["hyperparameters"].update(mixtures=10**12),
    "feedforward huge": lambda m: m["hyperparameters"].update(feedforward=10**15),
    "embedding huge": lambda m: m["hyperparameters"].update(embedding=10**15),
    "hidden huge": lambda m: m["hyperparameters"].update(hidden=[10**15]),
    "hidden a number": lambda m: m["hyperparameters"].update(hidden=5),
    "norm unknown": lambda m: m["hyperparameters"].update(norm="none"),
    "dropout NaN": lambda m: m["hyperparameters"].update(dropout=float("nan")),
    "hyperparameters a list": lambda m: m.update(hyperparameters=[1]),
    "unknown hyperparameter": lambda m: m["hyperparameters"].update(experts=8),
    "calibration a text": lambda m: m.update(calibration="good"),
    "scores NaN": lambda m: m["calibration"]["scores"].append(float("nan")),
    "scores infinite": lambda m: m["calibration"]["scores"].append(float("inf")),
    "scores unsorted": lambda m: m["calibration"]["scores"].reverse(),
    "scores texts": lambda m: m["calibration"].update(scores=["a"]),
    "scores nested": lambda m: m["calibration"].update(scores=[[1.0]]),
    "scores null": lambda m: m["calibration"].update(scores=None),
    "number beyond floats": lambda m: first(m).update(location=10**400),
    # what fuzzing found
    "size in two lines": lambda m: m["files"][model_store.WEIGHTS].update(size="a\nb"),
    "size endless": lambda m: m["files"][model_store.WEIGHTS].update(size=10**4000),
    "size beyond memory": lambda m: m["files"][model_store.WEIGHTS].update(size=2**62),
    "size negative": lambda m: m["files"][model_store.WEIGHTS].update(size=-1),
    "unknown field no unicode": lambda m: first(m).update({"\ud800": 1}),
    "unknown hyperparameter no unicode": lambda m: m["hyperparameters"].update({"\ud800": 1}),
    "embeddings beyond memory": lambda m: m["hyperparameters"].update(embedding=2**40),
    "gaussians beyond memory": lambda m: m["hyperparameters"].update(gaussians=2**31),
    "hidden layers without end": lambda m: m["hyperparameters"].update(hidden=[1] * 500_000),
    "layers without end": lambda m: m["hyperparameters"].update(layers=10**6, d_model=1, heads=1, feedforward=1),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_signed_contradiction(directory: Path, name: str) -> None:
    forge(directory, CONTRADICTIONS[name])
    refused(directory)


def test_fingerprint_that_is_none(directory: Path) -> None:
    manifest = json.loads((directory / model_store.MANIFEST).read_bytes())
    manifest["fingerprint"] = "\x1b[2J"
    manifest["sha256"] = model_store._digest(manifest)
    (directory / model_store.MANIFEST).write_bytes(model_store._render(manifest))
    assert "\x1b" not in refused(directory, "fingerprint")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(directory: Path, value: float) -> None:
    forge_weights(directory, lambda tensors: tensors["head.project.weight"].view(-1)[3:4].fill_(value))
    refused(directory, "not finite", "head.project.weight")


def test_weights_of_another_model(directory: Path) -> None:
    forge_weights(directory, lambda tensors: tensors.pop("head.project.weight"))
    refused(directory, "head.project.weight")


def test_weights_that_are_no_safetensors(directory: Path) -> None:
    data = b"\xff" * 64
    (directory / model_store.WEIGHTS).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(directory, lambda manifest: manifest["files"].update({model_store.WEIGHTS: entry}))
    refused(directory, "contradicts itself")


def test_command_line_says_it_in_one_line(directory: Path, cli: Callable[..., SimpleNamespace]) -> None:
    (directory / model_store.WEIGHTS).write_bytes(b"short")
    ended = cli("inspect", directory)
    assert ended.code == 3
    assert ended.out == ""
    assert len(ended.lines) == 1
    assert ended.lines[0].startswith(f"deformer-stream: {directory / model_store.WEIGHTS} has 5 bytes")


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_failed_write_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException
) -> None:
    """Steps: the three files, the directory's entries, moving the old aside, moving the new in."""
    write_model(tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    calls = iter(range(100))

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if next(calls) == step:
                raise error
            return real(*given)

        return call

    monkeypatch.setattr(model_store, "_write_durably", failing(model_store._write_durably))
    monkeypatch.setattr(model_store, "_sync", failing(model_store._sync))
    monkeypatch.setattr(Path, "rename", failing(Path.rename))
    with pytest.raises(Unavailable if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_model(tmp_path / "model", seed=1)
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
    model_store.read(tmp_path / "model")


def test_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    old = model_store.read(write_model(tmp_path / "model")).fingerprint
    assert model_store.read(write_model(tmp_path / "model", seed=1)).fingerprint != old
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no model"):
        write_model(tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ConfigError, match="is a file"):
        write_model(tmp_path / "home" / "thesis.tex")


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    model = small_model()
    with torch.no_grad():
        model.head.project.bias[0] = float("nan")
    with pytest.raises(ArtifactError, match="not finite"):
        model_store.write(tmp_path / "model", model, Calibration.from_statistics(np.ones(3), "random"), {}, "")
    model_store.read(tmp_path / "model")


def test_training_summary_is_json(tmp_path: Path) -> None:
    training = {"best": float("inf"), "curve": [1.0, float("nan")], "nested": {"x": -float("inf")}}
    model_store.write(tmp_path / "model", small_model(), Calibration.from_statistics(np.ones(3), "random"), training, "\udc80")

    def none(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    manifest = json.loads((tmp_path / "model" / model_store.MANIFEST).read_text(), parse_constant=none)
    assert manifest["training"] == {"best": None, "curve": [1.0, None], "nested": {"x": None}}
    model_store.read(tmp_path / "model")
