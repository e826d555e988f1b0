"""Tests that a model directory of format version 1 is read, scores as it did when it was written, and is written alike.

An earlier release wrote the directory `model.v1` and computed `model.v1.scores.json` with it. The model has random
weights, a Gaussian prior, exemplars, a cyclic feature, discrete features and a context feature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream import model_store
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model_store import Artifact

GOLDEN = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "model.v1.scores.json").read_text())


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return model_store.read(GOLDEN / "model.v1")


def test_fingerprint_is_that_of_the_release_that_wrote_the_model(artifact: Artifact) -> None:
    assert artifact.fingerprint == EXPECTED["fingerprint"]


def test_scores_are_those_of_the_release_that_wrote_the_model(artifact: Artifact) -> None:
    """Compare with a tolerance, because sums in float32 depend on the processor."""
    model = artifact.model
    codes, raw_values = np.array(EXPECTED["features"]), np.array(EXPECTED["values"])
    is_reading = codes >= 0
    values = np.where(is_reading, model.schema.normalise(np.maximum(codes, 0), raw_values), 0.0)
    features, x = torch.from_numpy(codes), torch.from_numpy(values).float()
    with torch.inference_mode():
        log_prob = model.log_prob(features, x)
        log_p_value, centered_nll = model.conditionals(features, x).score(x)
    actual = {"log_prob": log_prob, "log_p_value": log_p_value, "centered_nll": centered_nll}
    for name, tensor in actual.items():
        expected = np.array(EXPECTED[name])[is_reading]
        np.testing.assert_allclose(tensor.numpy()[is_reading], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_ranking_is_that_of_the_release_that_wrote_the_model(artifact: Artifact) -> None:
    exemplars = Exemplars.from_parameters(artifact.scoring_model.extract_parameters())
    assert exemplars is not None
    assert exemplars.prior is None, "that release ranked without the density of the prior"
    codes, raw_values = np.array(EXPECTED["features"]), np.array(EXPECTED["values"])
    values = artifact.schema.normalise(np.maximum(codes, 0), raw_values)
    scores = exemplars.score(codes, values, np.zeros(len(codes)))
    np.testing.assert_allclose(scores, EXPECTED["ranking"], rtol=1e-5)


def test_model_is_written_with_the_same_keys_and_bytes(artifact: Artifact, tmp_path: Path) -> None:
    """The keys of the manifest and of the weights are a file format, whatever the names in the code are."""
    training = artifact.manifest["training"]
    model_store.write(tmp_path / "model", artifact.scoring_model, artifact.calibration, training, "")
    fingerprint = model_store.write(tmp_path / "network", artifact.model, artifact.calibration, training, "")
    assert fingerprint == artifact.fingerprint, "the network in PyTorch has the same weights"
    original_weights = (GOLDEN / "model.v1" / model_store.WEIGHTS).read_bytes()
    assert (tmp_path / "model" / model_store.WEIGHTS).read_bytes() == original_weights
    manifest = model_store.read_manifest(tmp_path / "model")
    # The checksum covers the version of the package, which differs from release to release.
    release_keys = {"package_version", "sha256"}
    assert {key: v for key, v in manifest.items() if key not in release_keys} == {
        key: v for key, v in artifact.manifest.items() if key not in release_keys
    }
