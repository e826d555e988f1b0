"""Tests that a model directory survives a round trip, and that damaged or inconsistent ones are refused by name."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch

from deformer_stream import model_manifest, model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ArtifactError, ConfigError, Unavailable
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.parameters import check_parameters
from deformer_stream.model.positions import MAX_POSITION
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.model_folders import Manifest, assert_read_fails, directory, forge_manifest
from tests.models import CONFIG, SCHEMA, TRAINING_SUMMARY, make_calibration, make_small_model, write_model

__all__ = ["directory"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755)])
def test_the_umask_decides_who_may_read_a_model(tmp_path: Path, umask: int, mode: int) -> None:
    """A model directory holds training records, which can be those of patients."""
    before = os.umask(umask)
    try:
        directory = write_model(tmp_path / "model")
        replace_file(directory / "incidents.json", b"{}")
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == mode
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {mode & 0o666}
    assert list(tmp_path.iterdir()) == [directory]


def forge_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights and give the manifest valid checksums, as an attacker would."""
    tensors = safetensors.torch.load_file(directory / model_store.WEIGHTS)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (directory / model_store.WEIGHTS).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge_manifest(directory, lambda manifest: manifest["files"].update({model_store.WEIGHTS: entry}))


@pytest.mark.parametrize("tokens", ["pair", "single"])
def test_written_model_is_read_with_equal_scores_and_calibration(
    tmp_path: Path, tokens: Literal["pair", "single"]
) -> None:
    model = make_model(SCHEMA, replace(CONFIG, tokens=tokens), 0, torch.float32)
    calibration = make_calibration(model)
    fingerprint = model_store.write(tmp_path / "deep" / "model", model, calibration, TRAINING_SUMMARY, "<p>é</p>")
    loaded = model_store.read(tmp_path / "deep" / "model")
    codes, values = draw_records(SCHEMA, 50, 3, missing_share=0.2)
    x = torch.from_numpy(normalise_values(SCHEMA, codes, values)).float()
    with torch.inference_mode():
        written, read = (m.log_prob(torch.from_numpy(codes), x) for m in (model, loaded.model))
    assert torch.equal(written, read)
    assert not loaded.model.training
    assert loaded.schema == SCHEMA
    assert loaded.fingerprint == fingerprint == loaded.manifest["fingerprint"]
    assert np.array_equal(loaded.calibration.scores, calibration.scores)
    assert loaded.calibration.arrival_order == "random"
    assert loaded.manifest["training"] == TRAINING_SUMMARY
    assert (tmp_path / "deep" / "model" / model_store.REPORT).read_text() == "<p>é</p>"
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["model"]


def test_manifest_without_the_key_tokens_means_pairs_of_tokens(directory: Path) -> None:
    forge_manifest(directory, lambda manifest: manifest["hyperparameters"].pop("tokens"))
    assert model_store.read(directory).model.config.tokens == "pair"


def write_ranking_model(directory: Path, **changes: Any) -> DEformer:
    """Write a model that ranks with the density of its Gaussian prior, and return it."""
    model = make_model(SCHEMA, replace(CONFIG, gaussians=2, exemplars=3, **changes), 0, torch.float32)
    assert model.ranking is not None
    model.ranking.typical = 1.0 + torch.rand(model.ranking.typical.shape, dtype=torch.float64)
    model_store.write(directory, model, make_calibration(model), {}, "")
    return model


def add_weight(manifest: Manifest, name: str, version: int) -> None:
    """State the weight of a term of the ranking in a manifest, and the format version that it needs."""
    manifest["hyperparameters"][name] = 0.7
    manifest["format_version"] = version


def test_weight_of_the_prior_in_the_ranking_survives_a_round_trip(tmp_path: Path) -> None:
    model = write_ranking_model(tmp_path / "with", prior_weight=0.7)
    artifact = model_store.read(tmp_path / "with")
    assert artifact.manifest["format_version"] == 10  # earlier releases do not know the term
    assert artifact.manifest["hyperparameters"]["prior_weight"] == 0.7
    assert model.ranking is not None
    assert model.gaussians is not None
    exemplars = Exemplars.from_parameters(artifact.scoring_model.extract_parameters())
    assert exemplars is not None
    assert exemplars.prior is not None
    assert exemplars.prior_weight == 0.7
    np.testing.assert_array_equal(exemplars.typical, model.ranking.typical.numpy())
    np.testing.assert_array_equal(exemplars.prior.covariances, model.gaussians.covariances[0].numpy())
    copy = artifact.model.ranking
    assert copy is not None
    assert torch.equal(copy.typical, model.ranking.typical)


def test_model_without_a_weight_of_the_prior_keeps_its_format_version(tmp_path: Path) -> None:
    write_ranking_model(tmp_path / "without")
    manifest = model_store.read_manifest(tmp_path / "without")
    assert manifest["format_version"] == 1
    assert "prior_weight" not in manifest["hyperparameters"]
    artifact = model_store.read(tmp_path / "without")
    assert artifact.scoring_model.config.prior_weight == 0.0


def test_weight_of_single_readings_in_the_ranking_survives_a_round_trip(tmp_path: Path) -> None:
    model = write_ranking_model(tmp_path / "with", prior_weight=0.7, marginal_weight=0.4)
    artifact = model_store.read(tmp_path / "with")
    assert artifact.manifest["format_version"] == 14  # earlier releases do not know the term
    assert artifact.manifest["hyperparameters"]["marginal_weight"] == 0.4
    assert model.ranking is not None
    exemplars = Exemplars.from_parameters(artifact.scoring_model.extract_parameters())
    assert exemplars is not None
    assert exemplars.marginals is not None
    assert exemplars.marginal_weight == 0.4
    np.testing.assert_array_equal(exemplars.typical, model.ranking.typical.numpy())
    assert exemplars.typical.shape == (4, 2)


def test_inconsistent_weight_of_single_readings_is_refused(tmp_path: Path) -> None:
    write_ranking_model(tmp_path / "without")
    forge_manifest(tmp_path / "without", partial(add_weight, name="marginal_weight", version=14))
    assert_read_fails(tmp_path / "without", "ranking.typical")
    forge_manifest(tmp_path / "without", lambda manifest: manifest.update(format_version=13))
    assert_read_fails(tmp_path / "without", "its contents need version 14")


def test_training_records_for_the_alert_survive_a_round_trip(tmp_path: Path) -> None:
    model = make_model(SCHEMA, replace(CONFIG, alert_exemplars=5), dtype=torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), {}, "")
    artifact = model_store.read(tmp_path / "model")
    assert artifact.manifest["format_version"] == 12  # earlier releases do not know them
    expected = AlertDistance.from_model(model)
    actual = AlertDistance.from_model(artifact.scoring_model)
    assert expected is not None
    assert actual is not None
    for name in ("positions", "deviations", "starts", "slopes"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    forge_manifest(tmp_path / "model", lambda manifest: manifest.update(format_version=11))
    assert_read_fails(tmp_path / "model", "its contents need version 12")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deviations", lambda array: array.zero_()),
        ("slopes", lambda array: array.fill_(-1.0)),
    ],
)
def test_damaged_training_records_for_the_alert_are_refused(tmp_path: Path, name: str, change: Any) -> None:
    model = make_model(SCHEMA, replace(CONFIG, alert_exemplars=5), dtype=torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), {}, "")
    forge_weights(tmp_path / "model", lambda tensors: change(tensors[f"alert_distance.{name}"]))
    assert_read_fails(tmp_path / "model", "a tensor alert_distance of the weights file")


def test_prior_in_the_alert_survives_a_round_trip(tmp_path: Path) -> None:
    model = make_model(SCHEMA, replace(CONFIG, gaussians=2, alert_prior=True), dtype=torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), {}, "")
    artifact = model_store.read(tmp_path / "model")
    assert artifact.manifest["format_version"] == 13  # earlier releases do not know it
    assert model.alert_prior is not None
    for loaded in (artifact.scoring_model, artifact.model):
        lines = AlertPrior.from_model(loaded)
        assert lines is not None
        np.testing.assert_array_equal(lines.starts, model.alert_prior.starts.numpy())
        np.testing.assert_array_equal(lines.slopes, model.alert_prior.slopes.numpy())
    forge_manifest(tmp_path / "model", lambda manifest: manifest.update(format_version=12))
    assert_read_fails(tmp_path / "model", "its contents need version 13")


@pytest.mark.parametrize(
    ("name", "value", "said"), [("starts", np.nan, "not finite"), ("slopes", -1.0, "alert_prior.slopes")]
)
def test_damaged_prior_in_the_alert_is_refused(tmp_path: Path, name: str, value: float, said: str) -> None:
    model = make_model(SCHEMA, replace(CONFIG, gaussians=2, alert_prior=True), dtype=torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), {}, "")
    forge_weights(tmp_path / "model", lambda tensors: tensors[f"alert_prior.{name}"].fill_(value))
    assert_read_fails(tmp_path / "model", said)


def test_prior_in_the_alert_needs_a_prior(tmp_path: Path) -> None:
    """An altered manifest can state the term for a model without a mixture."""
    write_ranking_model(tmp_path / "model")

    def add_term(manifest: Manifest) -> None:
        manifest["hyperparameters"]["alert_prior"] = True
        manifest["format_version"] = 13

    forge_manifest(tmp_path / "model", add_term)
    assert_read_fails(tmp_path / "model", "missing: ['alert_prior.slopes', 'alert_prior.starts']")
    forge_manifest(tmp_path / "model", lambda manifest: manifest["hyperparameters"].update(gaussians=0))
    assert_read_fails(tmp_path / "model", "alert_prior needs gaussians or neighbors of at least 1")


def test_inconsistent_weight_of_the_prior_is_refused(tmp_path: Path) -> None:
    """An altered manifest can state a weight for a model without the other numbers of the term, or none for one."""
    write_ranking_model(tmp_path / "with", prior_weight=0.7)
    write_ranking_model(tmp_path / "without")
    forge_manifest(tmp_path / "without", partial(add_weight, name="prior_weight", version=10))
    assert_read_fails(tmp_path / "without", "ranking.typical")
    forge_manifest(tmp_path / "with", lambda manifest: manifest.update(format_version=9))
    assert_read_fails(tmp_path / "with", "its contents need version 10")

    def remove_weight(manifest: Manifest) -> None:
        del manifest["hyperparameters"]["prior_weight"]
        manifest["format_version"] = 1

    forge_manifest(tmp_path / "with", lambda manifest: manifest.update(format_version=10))
    forge_manifest(tmp_path / "with", remove_weight)
    assert_read_fails(tmp_path / "with")
    labels_only = Schema(tuple(feature for feature in SCHEMA.features if feature.kind == "discrete"))
    config = replace(CONFIG, gaussians=2, exemplars=3, prior_weight=0.7)
    with pytest.raises(ValueError, match="prior_weight needs a feature"):
        check_parameters(labels_only, config, {})


def test_fingerprint_depends_on_weights_and_calibration_and_not_on_the_training_summary(tmp_path: Path) -> None:
    model = make_small_model()
    calibration = make_calibration(model)
    other_summary = [model_store.write(tmp_path / str(i), model, calibration, {"run": i}, "") for i in range(2)]
    other_calibration = model_store.write(tmp_path / "c", model, make_calibration(model, 50), {}, "")
    other_weights = model_store.write(tmp_path / "w", make_small_model(1), calibration, {}, "")
    assert len({*other_summary, other_calibration, other_weights}) == 3


def without_kinds(scale: CusumScale, *kinds: str) -> CusumScale:
    """Return the scale that an earlier release wrote, which did not have these kinds of evidence."""
    return CusumScale.from_json({key: value for key, value in scale.to_json().items() if key not in kinds})


def test_model_of_irregular_readings_survives_a_round_trip(tmp_path: Path) -> None:
    schema = replace(SCHEMA, reading_times=ReadingTimes(48 * 3_600_000_000, 60_000_000))
    context = {"context_recent": 8, "context_block": 16}
    model = DEformer(schema, replace(CONFIG, neighbors=4, process_rank=2, process_scales=3, **context)).eval()
    model_store.write(tmp_path / "m", model, make_calibration(make_small_model()), {}, "")
    manifest = json.loads((tmp_path / "m" / model_store.MANIFEST).read_text())
    assert manifest["format_version"] == 6
    limited = DEformer(schema, replace(model.config, neighbors=60, outlier_limit=5.0)).eval()
    model_store.write(tmp_path / "limited", limited, make_calibration(make_small_model()), {}, "")
    stored_model = model_store.read(tmp_path / "limited")
    assert stored_model.manifest["format_version"] == 9  # earlier releases do not know the limit
    assert stored_model.model.config.outlier_limit == 5.0
    scale = CusumScale.neutral(len(schema))
    for kinds, version in (((), 8), (("step",), 7), (("step", "level", "extreme"), 6)):
        cusum_scale = without_kinds(scale, *kinds)
        calibration = replace(make_calibration(make_small_model()), cusum_scale=cusum_scale)
        model_store.write(tmp_path / str(version), model, calibration, {}, "")
        manifest = json.loads((tmp_path / str(version) / model_store.MANIFEST).read_text())
        assert manifest["format_version"] == version
        stored = model_store.read(tmp_path / str(version)).calibration.cusum_scale
        assert stored is not None
        np.testing.assert_array_equal(stored.intercepts, cusum_scale.intercepts)
    restored = model_store.read(tmp_path / "m").model
    assert restored.schema == schema
    codes, values = torch.tensor([[0, 1, 0]]), torch.tensor([[0.5, 0.1, 0.2]])
    ages = torch.tensor([[0.0, 60.0, 90.0]], dtype=torch.float64)
    expected = model.log_prob(codes, values, ages=ages)
    torch.testing.assert_close(restored.log_prob(codes, values, ages=ages), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_missing_file_is_refused(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert_read_fails(directory, name, "missing")


def test_missing_report_is_accepted(directory: Path) -> None:
    (directory / model_store.REPORT).unlink()
    assert model_store.read(directory).schema == SCHEMA


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.999, -1])
def test_truncated_file_is_refused(directory: Path, name: str, share: float) -> None:
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: -1 if share < 0 else int(len(data) * share)])
    assert_read_fails(directory, name, "cut short")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_file_with_one_flipped_bit_is_refused(directory: Path, name: str) -> None:
    data = (directory / name).read_bytes()
    rng = np.random.default_rng(0)
    byte_indexes = {0, len(data) - 1, *rng.integers(0, len(data), 100).tolist()}
    for byte_index in byte_indexes:
        flipped = bytearray(data)
        flipped[byte_index] ^= 1 << int(rng.integers(8))
        (directory / name).write_bytes(flipped)
        assert_read_fails(directory, name)


@pytest.mark.parametrize("suffix", [b" ", b"\n", b"{}", b"\0"])
def test_file_with_bytes_appended_is_refused(directory: Path, suffix: bytes) -> None:
    for name in (model_store.MANIFEST, model_store.WEIGHTS):
        original = (directory / name).read_bytes()
        (directory / name).write_bytes(original + suffix)
        assert_read_fails(directory, name)
        (directory / name).write_bytes(original)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5, [1], True])
def test_unexpected_format_version_is_refused(directory: Path, version: object) -> None:
    forge_manifest(directory, lambda manifest: manifest.update(format_version=version))
    if version is True:  # JSON's true equals 1 in Python, and the checksum of the forged file is valid
        assert model_store.read(directory)
    else:
        assert_read_fails(directory, model_store.MANIFEST, "format version", repr(version), "train again")


def test_newer_format_version_is_refused_with_the_advice_to_upgrade(directory: Path) -> None:
    forge_manifest(directory, lambda manifest: manifest.update(format_version=99))
    assert_read_fails(directory, "format version 99", "install the newer deformer-stream", "or train again")


def test_path_of_a_file_inside_a_model_directory_is_refused(directory: Path) -> None:
    assert_read_fails(directory / model_store.REPORT, "is missing", "give the directory that deformer-train wrote")


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
def test_malformed_manifest_is_refused(directory: Path, text: bytes) -> None:
    (directory / model_store.MANIFEST).write_bytes(text)
    assert_read_fails(directory, model_store.MANIFEST)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("hello")
    assert_read_fails(tmp_path / "model")


@pytest.mark.parametrize("name", [model_store.WEIGHTS, model_store.MANIFEST])
def test_directory_in_place_of_a_file_is_refused(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()
    assert_read_fails(directory, name)


def get_continuous_feature(manifest: Manifest) -> Manifest:
    feature: Manifest = manifest["features"][0]
    return feature


def get_discrete_feature(manifest: Manifest) -> Manifest:
    feature: Manifest = manifest["features"][3]
    return feature


INCONSISTENCIES: dict[str, Callable[[Manifest], object]] = {
    "features missing": lambda m: m.pop("features"),
    "hyperparameters missing": lambda m: m.pop("hyperparameters"),
    "calibration missing": lambda m: m.pop("calibration"),
    "files missing": lambda m: m.pop("files"),
    "training missing": lambda m: m.pop("training"),
    "training a list": lambda m: m.update(training=[]),
    "files a list": lambda m: m.update(files=[]),
    "size a string": lambda m: m["files"][model_store.WEIGHTS].update(size="many"),
    "features empty": lambda m: m.update(features=[]),
    "one feature too few": lambda m: m["features"].pop(),
    "one feature too many": lambda m: m["features"].append(dict(get_continuous_feature(m), name="more")),
    "features numbers": lambda m: m.update(features=[1, 2]),
    "features strings": lambda m: m.update(features=["temperature"]),
    "feature name repeated": lambda m: get_discrete_feature(m).update(name="temperature"),
    "feature name empty": lambda m: get_continuous_feature(m).update(name=""),
    "feature name a number": lambda m: get_continuous_feature(m).update(name=5),
    "feature name a list": lambda m: get_continuous_feature(m).update(name=["a"]),
    "feature name too long": lambda m: get_continuous_feature(m).update(name="x" * 100_000),
    "feature name not encodable": lambda m: get_continuous_feature(m).update(name="\ud800"),
    "label not encodable": lambda m: get_discrete_feature(m).update(labels=["a", "b", "\udfff"]),
    "label a number": lambda m: get_discrete_feature(m).update(labels=["a", "b", 3]),
    "labels empty": lambda m: get_discrete_feature(m).update(labels=[]),
    "one label too many": lambda m: get_discrete_feature(m).update(labels=["a", "b", "c", "d"]),
    "labels a number": lambda m: get_discrete_feature(m).update(labels=7),
    "reason a list": lambda m: get_continuous_feature(m).update(reason=["because"]),
    "kind does not match the weights": lambda m: get_discrete_feature(m).update(kind="continuous", labels=[]),
    "unknown key of a feature": lambda m: get_continuous_feature(m).update(colour="red"),
    "scale zero": lambda m: get_continuous_feature(m).update(scale=0.0),
    "scale negative": lambda m: get_continuous_feature(m).update(scale=-1.0),
    "scale NaN": lambda m: get_continuous_feature(m).update(scale=float("nan")),
    "scale a string": lambda m: get_continuous_feature(m).update(scale="wide"),
    "location infinite": lambda m: get_continuous_feature(m).update(location=float("inf")),
    "quantum NaN": lambda m: get_continuous_feature(m).update(quantum=float("nan")),
    "low infinite": lambda m: get_continuous_feature(m).update(low=float("-inf")),
    "unseen one": lambda m: get_continuous_feature(m).update(unseen=1.0),
    "coordinates of one feature only": lambda m: get_continuous_feature(m).update(coordinates=[0.0, 1.0]),
    "coordinates NaN": lambda m: [f.update(coordinates=[float("nan")]) for f in m["features"]],
    "d_model does not match the weights": lambda m: m["hyperparameters"].update(d_model=32),
    "d_model zero": lambda m: m["hyperparameters"].update(d_model=0),
    "d_model huge": lambda m: m["hyperparameters"].update(d_model=2**40),
    "layers do not match the weights": lambda m: m["hyperparameters"].update(layers=3),
    "layers huge": lambda m: m["hyperparameters"].update(layers=10**9),
    "layers a fraction": lambda m: m["hyperparameters"].update(layers=2.5),
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
    "scores strings": lambda m: m["calibration"].update(scores=["a"]),
    "scores nested": lambda m: m["calibration"].update(scores=[[1.0]]),
    "scores null": lambda m: m["calibration"].update(scores=None),
    "number too large for a float": lambda m: get_continuous_feature(m).update(location=10**400),
    # These were found by fuzzing.
    "size with a line break": lambda m: m["files"][model_store.WEIGHTS].update(size="a\nb"),
    "size with 4000 digits": lambda m: m["files"][model_store.WEIGHTS].update(size=10**4000),
    "size larger than memory": lambda m: m["files"][model_store.WEIGHTS].update(size=2**62),
    "size negative": lambda m: m["files"][model_store.WEIGHTS].update(size=-1),
    "unknown key not encodable": lambda m: get_continuous_feature(m).update({"\ud800": 1}),
    "unknown hyperparameter not encodable": lambda m: m["hyperparameters"].update({"\ud800": 1}),
    "embeddings larger than memory": lambda m: m["hyperparameters"].update(embedding=2**40),
    "gaussians larger than memory": lambda m: m["hyperparameters"].update(gaussians=2**31),
    "hidden with 500000 layers": lambda m: m["hyperparameters"].update(hidden=[1] * 500_000),
    "a million tiny layers": lambda m: m["hyperparameters"].update(layers=10**6, d_model=1, heads=1, feedforward=1),
}


@pytest.mark.parametrize("name", INCONSISTENCIES)
def test_inconsistent_manifest_with_valid_checksums_is_refused(directory: Path, name: str) -> None:
    forge_manifest(directory, INCONSISTENCIES[name])
    assert_read_fails(directory)


def test_control_characters_of_a_forged_fingerprint_are_not_printed(directory: Path) -> None:
    manifest = json.loads((directory / model_store.MANIFEST).read_bytes())
    manifest["fingerprint"] = "\x1b[2J"
    manifest["sha256"] = model_manifest.compute_digest(manifest)
    (directory / model_store.MANIFEST).write_bytes(model_manifest.render_manifest(manifest))
    assert "\x1b" not in assert_read_fails(directory, "fingerprint")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(directory: Path, value: float) -> None:
    forge_weights(directory, lambda tensors: tensors["head.project.weight"].view(-1)[3:4].fill_(value))
    assert_read_fails(directory, "not finite", "head.project.weight")


def test_weights_without_an_expected_tensor_are_refused(directory: Path) -> None:
    forge_weights(directory, lambda tensors: tensors.pop("head.project.weight"))
    assert_read_fails(directory, "head.project.weight")


def test_weights_in_another_format_are_refused(directory: Path) -> None:
    data = b"\xff" * 64
    (directory / model_store.WEIGHTS).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge_manifest(directory, lambda manifest: manifest["files"].update({model_store.WEIGHTS: entry}))
    assert_read_fails(directory, "is damaged")


def test_command_line_reports_a_damaged_model_in_one_line(directory: Path, cli: Callable[..., SimpleNamespace]) -> None:
    (directory / model_store.WEIGHTS).write_bytes(b"short")
    result = cli("inspect", directory)
    assert result.code == 3
    assert result.out == ""
    assert len(result.lines) == 1
    assert result.lines[0].startswith(f"deformer-stream: {directory / model_store.WEIGHTS} has 5 bytes")


@pytest.mark.parametrize(
    ("can_exchange", "step"), [(True, step) for step in range(5)] + [(False, step) for step in range(6)]
)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, step: int, error: BaseException
) -> None:
    """Let one of the steps fail: three files, the directory's entries, and those that give the directory its name.

    These are the entries of its folder after the exchange, or renaming the old model and the new one.
    """
    if not can_exchange:
        monkeypatch.setattr(model_store, "exchange_paths", lambda first, second: False)
    write_model(tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    call_indexes = iter(range(100))

    def fail_at_step(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if next(call_indexes) == step:
                raise error
            return function(*args)

        return call

    monkeypatch.setattr(model_store, "_write_and_sync", fail_at_step(model_store._write_and_sync))
    monkeypatch.setattr(model_store, "_sync_directory", fail_at_step(model_store._sync_directory))
    monkeypatch.setattr(Path, "rename", fail_at_step(Path.rename))
    with pytest.raises(Unavailable if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_model(tmp_path / "model", seed=1)
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
    model_store.read(tmp_path / "model")


def test_writing_to_a_link_replaces_its_target(tmp_path: Path) -> None:
    """A link that names the current version keeps naming it; a link to nothing gets a model."""
    write_model(tmp_path / "v1")
    for link, target in (("current", "v1"), ("next", "v2")):
        (tmp_path / link).symlink_to(target)
        write_model(tmp_path / link, seed=1)
        assert (tmp_path / link).is_symlink()
    assert (tmp_path / "v1" / "manifest.json").read_bytes() == (tmp_path / "v2" / "manifest.json").read_bytes()
    model_store.read(tmp_path / "current")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "next", "v1", "v2"]


def test_error_names_the_old_model_if_its_replacement_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    rename = Path.rename

    def rename_old_only(path: Path, target: Path) -> Path:
        """Rename the old model, and let no further step take effect, as if the process were killed."""
        if target.name == "model":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(model_store, "exchange_paths", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", rename_old_only)
    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "model", seed=1)
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match=r"killed; rename .*/\.model\.[0-9a-f]+\.old to .*/model$") as caught:
        model_store.read(tmp_path / "model")
    old = Path(str(caught.value).split("rename ")[1].split(" to ")[0])
    old.rename(tmp_path / "model")
    model_store.read(tmp_path / "model")


def test_directory_exists_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process is killed: two directories exchange their names in one step, and none is renamed."""
    write_model(tmp_path / "model")
    monkeypatch.setattr(Path, "rename", lambda path, target: pytest.fail(f"{path} is renamed"))
    write_model(tmp_path / "model", seed=1)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    same = model_store.read(write_model(tmp_path / "same", seed=1))
    assert model_store.read(tmp_path / "model").fingerprint == same.fingerprint


@pytest.mark.parametrize("can_exchange", [True, False])
def test_directory_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    directory = write_model(tmp_path / "model")
    new = write_model(tmp_path / "new", seed=1)
    expected = {path.name: path.read_bytes() for path in new.iterdir()}
    if not can_exchange:
        monkeypatch.setattr(model_store, "exchange_paths", lambda first, second: False)
    read_at_most, seeds = model_store.read_at_most, iter([2, 1])

    def replace_and_read(path: Path, max_bytes: int) -> bytes:
        """Read a file of the directory after the manifest was read, and the model was then replaced."""
        seed = next(seeds, None)
        if seed is not None:
            write_model(directory, seed=seed)
        return read_at_most(path, max_bytes)

    monkeypatch.setattr(model_store, "read_at_most", replace_and_read)
    assert model_store.read(directory).fingerprint == model_store.read(new).fingerprint
    write_model(directory)
    seeds = iter([2, 1])
    assert model_store.read_files(directory) == expected


def test_directory_that_is_replaced_at_each_reading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, read_at_most, seeds = write_model(tmp_path / "model"), model_store.read_at_most, itertools.count(1)

    def replace_and_read(path: Path, max_bytes: int) -> bytes:
        write_model(directory, seed=next(seeds))
        return read_at_most(path, max_bytes)

    monkeypatch.setattr(model_store, "read_at_most", replace_and_read)
    with pytest.raises(ArtifactError, match="was replaced 5 times while it was read"):
        model_store.read(directory)


def test_write_replaces_a_model_and_refuses_other_directories(tmp_path: Path) -> None:
    old = model_store.read(write_model(tmp_path / "model")).fingerprint
    assert model_store.read(write_model(tmp_path / "model", seed=1)).fingerprint != old
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "document.txt").write_text("contents")
    with pytest.raises(ConfigError, match="not a model"):
        write_model(tmp_path / "other")
    assert (tmp_path / "other" / "document.txt").read_text() == "contents"
    with pytest.raises(ConfigError, match="is a file"):
        write_model(tmp_path / "other" / "document.txt")


def test_model_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    model = make_small_model()
    with torch.no_grad():
        model.head.project.bias[0] = float("nan")
    with pytest.raises(ArtifactError, match="not finite"):
        model_store.write(tmp_path / "model", model, Calibration.from_statistics(np.ones(3), "random"), {}, "")
    model_store.read(tmp_path / "model")


def test_numbers_that_are_not_finite_become_null_in_the_training_summary(tmp_path: Path) -> None:
    training = {"best": float("inf"), "curve": [1.0, float("nan")], "nested": {"x": -float("inf")}}
    model_store.write(
        tmp_path / "model", make_small_model(), Calibration.from_statistics(np.ones(3), "random"), training, "\udc80"
    )

    def reject_constant(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    manifest_text = (tmp_path / "model" / model_store.MANIFEST).read_text()
    manifest = json.loads(manifest_text, parse_constant=reject_constant)
    assert manifest["training"] == {"best": None, "curve": [1.0, None], "nested": {"x": None}}
    model_store.read(tmp_path / "model")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99"])
def test_devices_that_do_not_exist_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {device}.*use --device cpu") as caught:
        model_store.resolve_device(device)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_distinguish_its_labels_is_refused(tmp_path: Path) -> None:
    """An earlier release has trained it, and stored one position for all labels that are large numbers."""
    schema = Schema((Feature("x", "continuous"), Feature("product", "discrete", labels=("1000234", "2000017"))))
    model = DEformer(schema, ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,)))
    positions = np.array([[0.5, MAX_POSITION], [0.1, MAX_POSITION]], np.float32)
    exemplars = Exemplars(schema, positions, np.ones((2, 2), bool), np.ones(2, np.float32), np.tile([0.0, 1.0], (2, 1)))
    model.ranking = Ranking.from_exemplars(exemplars)
    model.config = replace(model.config, exemplars=2)
    with pytest.raises(ArtifactError, match=r": an earlier release .*'product'.*train the model again"):
        # It reads what it has written.
        model_store.write(tmp_path / "m", model, Calibration.from_statistics(np.arange(50.0), "random"), {}, "")
