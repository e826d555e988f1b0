"""What stands in a model directory's place need be no file, nor have an end; and what it quotes may be anything."""

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
from tests.engine.worlds import model_of
from tests.models import CONFIG, SCHEMA, TRAINING, calibration_of, small_model
from tests.test_model_store import directory, forge, refused

__all__ = ["directory"]


@pytest.mark.parametrize("version", ["x" * 10_000, list(range(5000)), "a\nb"])
def test_format_versions_of_any_length(directory: Path, version: object) -> None:
    forge(directory, lambda manifest: manifest.update(format_version=version))
    refused(directory, model_store.MANIFEST, "format version", "train again")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_what_is_no_file_is_not_read(directory: Path, name: str) -> None:
    path = directory / name
    for make in (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(name),
    ):
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        refused(directory, name)


def test_a_manifest_without_end_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "LARGEST_MANIFEST", (directory / model_store.MANIFEST).stat().st_size)
    model_store.read(directory)
    with (directory / model_store.MANIFEST).open("ab") as file:
        file.truncate(2**40)  # takes no room on the disk
    refused(directory, model_store.MANIFEST, "altered")
    with pytest.raises(ArtifactError, match="can be read again"):
        model_store.write(directory, small_model(), calibration_of(small_model(), 500), TRAINING, "")


def test_weights_without_end_are_not_read(directory: Path) -> None:
    with (directory / model_store.WEIGHTS).open("ab") as file:
        file.truncate(2**40)
    refused(directory, model_store.WEIGHTS, "more than")


def test_periods_that_are_none_are_refused(directory: Path) -> None:
    schema = Schema((*SCHEMA.features[:-1], replace(SCHEMA.features[-1], period=24.0)))
    model = model_of(schema, CONFIG, 0, torch.float32)
    model_store.write(directory, model, calibration_of(model), TRAINING, "")
    assert model_store.read(directory).schema == schema
    good = (directory / model_store.MANIFEST).read_bytes()
    lies: list[tuple[int, Any]] = [(-1, period) for period in (0, -24.0, "24", [], 10**400, 1e-9, None)]
    for place, period in [*lies, (3, 24.0)]:  # the latter is a text
        (directory / model_store.MANIFEST).write_bytes(good)
        forge(directory, lambda manifest, at=place, said=period: manifest["features"][at].update(period=said))
        refused(directory, "contradicts itself")
