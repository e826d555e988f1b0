"""Tests of model directories that an attacker could make: special files, endless files, forged manifests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deformer_stream import model_store
from deformer_stream.errors import ArtifactError
from deformer_stream.model.schema import Schema
from tests.engine.random_models import make_model
from tests.model_folders import assert_read_fails, directory, forge_manifest
from tests.models import CONFIG, SCHEMA, TRAINING_SUMMARY, make_calibration, make_small_model

__all__ = ["directory"]


@pytest.mark.parametrize("version", ["x" * 10_000, list(range(5000)), "a\nb"])
def test_long_format_version_is_shortened_in_the_message(directory: Path, version: object) -> None:
    forge_manifest(directory, lambda manifest: manifest.update(format_version=version))
    assert_read_fails(directory, model_store.MANIFEST, "format version", "train again")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_special_file_is_not_opened(directory: Path, name: str) -> None:
    """Replace the file by a directory, a pipe, a link to an endless device and a link to itself."""
    path = directory / name
    for create in (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(name),
    ):
        path.rmdir() if path.is_dir() else path.unlink()
        create()
        assert_read_fails(directory, name)


def test_manifest_that_is_too_large_is_refused_when_read_and_when_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "MAX_MANIFEST_BYTES", (directory / model_store.MANIFEST).stat().st_size)
    model_store.read(directory)
    with (directory / model_store.MANIFEST).open("ab") as file:
        file.truncate(2**40)  # a sparse file, which occupies no space on the disk
    assert_read_fails(directory, model_store.MANIFEST, "altered")
    with pytest.raises(ArtifactError, match="the limit is"):
        model_store.write(
            directory, make_small_model(), make_calibration(make_small_model(), 500), TRAINING_SUMMARY, ""
        )


def test_weights_that_are_longer_than_the_manifest_says_are_refused(directory: Path) -> None:
    with (directory / model_store.WEIGHTS).open("ab") as file:
        file.truncate(2**40)
    assert_read_fails(directory, model_store.WEIGHTS, "more than")


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"d_model": 2**20},
        {"feedforward": 2**30},
        {"mixtures": 2**30},
        {"embedding": 2**30},
        {"gaussians": 2**20},
        {"exemplars": 2**30},
        {"hidden": [2**30]},
        {"d_model": 10**4000},
    ],
    ids=lambda hyperparameters: next(iter(hyperparameters)),
)
def test_network_larger_than_the_weights_file_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, hyperparameters: dict[str, Any]
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("the weights were used")

    monkeypatch.setattr(model_store, "check_parameters", fail)
    forge_manifest(directory, lambda manifest: manifest["hyperparameters"].update(hyperparameters))
    assert_read_fails(directory, "is damaged")


def test_invalid_periods_are_refused(directory: Path) -> None:
    schema = Schema((*SCHEMA.features[:-1], replace(SCHEMA.features[-1], period=24.0)))
    model = make_model(schema, CONFIG, 0, torch.float32)
    model_store.write(directory, model, make_calibration(model), TRAINING_SUMMARY, "")
    assert model_store.read(directory).schema == schema
    valid_manifest = (directory / model_store.MANIFEST).read_bytes()
    invalid_periods: list[tuple[int, Any]] = [(-1, period) for period in (0, -24.0, "24", [], 10**400, 1e-9, None)]
    discrete_feature = 3
    for feature_index, period in [*invalid_periods, (discrete_feature, 24.0)]:
        (directory / model_store.MANIFEST).write_bytes(valid_manifest)
        forge_manifest(
            directory,
            lambda manifest, i=feature_index, value=period: manifest["features"][i].update(period=value),
        )
        assert_read_fails(directory, "is damaged")
