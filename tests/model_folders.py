"""Folders of several small models for tests, and readings of records of all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.errors import ArtifactError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model_set import ModelEntry, ModelSet, write_model_set
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.fuzz.forgery import sign
from tests.models import CONFIG, SCHEMA, TRAINING_SUMMARY, draw_rows


def make_schema(number: int) -> Schema:
    """Return the schema of a type of machine. Types share most features, in different orders and scales."""
    features = [replace(f, scale=f.scale * (1 + 0.1 * number)) for f in SCHEMA.features]
    features = features[number % 6 :] + features[: number % 6]
    if number % 3 == 1:
        features.append(Feature(f"extra-{number}", "continuous", location=3.0, low=-1.0, high=7.0))
    return Schema(tuple(features))


def write_type(directory: Path, number: int, seed: int = 0) -> Path:
    """Write the model directory of a type of machine, with random weights, and return its path."""
    return write_schema(directory, make_schema(number), 1000 * seed + number)


def write_schema(directory: Path, schema: Schema, seed: int, ties: TiePolicy = "arrival") -> Path:
    """Write a model directory with this schema, with random weights, and return its path."""
    model = make_model(schema, CONFIG, seed, torch.float32)
    codes, values = draw_records(schema, 99, 7, missing_share=0.1)
    statistics = compute_max_statistics(model, codes, normalise_values(schema, codes, values))
    calibration = replace(Calibration.from_statistics(statistics, "random"), tie_policy=ties)
    model_store.write(directory, model, calibration, TRAINING_SUMMARY, "<!doctype html><p>report</p>")
    return directory


def name_type(number: int) -> str:
    """Return the name of a type of machine; some are no names of folders."""
    return f"type {number}/a" if number % 7 == 3 else f"type-{number}"


def write_folder(folder: Path, num_models: int, field: str = "type") -> Path:
    """Write a folder of models as `deformer-train --per` does, and return its path."""
    entries = {}
    for number in range(num_models):
        directory = write_type(folder / f"model-{number}", number)
        fingerprint = model_store.read_manifest(directory)["fingerprint"]
        entries[name_type(number)] = ModelEntry(directory.name, fingerprint, 99, False, "0")
    write_model_set(folder, ModelSet(field, entries))
    return folder


def draw_messages(num_models: int, records_per_model: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return the readings of interleaved records of all types as documents. Types have records with the same ids."""
    rng = np.random.default_rng(seed)
    readings = []
    for number in range(num_models):
        rows = draw_rows(make_schema(number), records_per_model, seed)
        for i, row in enumerate(rows):
            start = rng.uniform(0, 100)
            for place, (feature, value) in enumerate(row.items()):
                document = {"record": f"r{i}", "type": name_type(number), "feature": feature, "value": value}
                readings.append((start + place + rng.random(), document))
    documents = [document for _, document in sorted(readings, key=lambda reading: reading[0])]
    return [{**document, "time": 1.7e9 + i} for i, document in enumerate(documents)]


def write_mixed_table(path: Path, num_models: int, records_per_model: int) -> Path:
    """Write the readings of `draw_messages` as a wide table, whose column `type` names the model, and return its path.

    The type is also the device of the records. Records have no values in the columns of other types.
    """
    row_by_record: dict[str, dict[str, Any]] = {}
    for document in draw_messages(num_models, records_per_model):
        record = f"{document['type']}/{document['record']}"
        row = row_by_record.setdefault(record, {"record": record, "type": document["type"]})
        row[document["feature"]] = document["value"]
    columns = list(dict.fromkeys(name for row in row_by_record.values() for name in row))
    pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(columns), **row} for row in row_by_record.values()]), path)
    return path


def encode(document: dict[str, Any]) -> bytes:
    """Return a document as a JSON message."""
    return json.dumps(document).encode()


Manifest = dict[str, Any]


def forge_manifest(directory: Path, change: Callable[[Manifest], object]) -> None:
    """Change the manifest and give it valid checksums, as an attacker would."""
    manifest = json.loads((directory / model_store.MANIFEST).read_bytes())
    change(manifest)
    (directory / model_store.MANIFEST).write_bytes(sign(manifest))


@pytest.fixture
def directory(model_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of a model directory, which a test may damage."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def assert_read_fails(directory: Path, *phrases: str) -> str:
    """Check that reading fails with one line that contains these phrases and a remedy; return the line."""
    with pytest.raises(ArtifactError) as caught:
        model_store.read(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    remedies = ("restore the model directory", "train again", "deformer-train wrote")
    assert any(remedy in message for remedy in remedies)
    for phrase in (str(directory), *phrases):
        assert phrase in message
    return message
