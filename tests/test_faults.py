"""Tests of the names of faults: records of any length and order, unchanged scores, coverage, files and reload."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy.stats import betabinom

import deformer_stream
from deformer_stream import Detector, model_store
from deformer_stream.calibration.fault_classifier import UNKNOWN, FaultClassifier, FaultName
from deformer_stream.codec.encode_alerts import encode_alert
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.engine import fault_inputs
from deformer_stream.engine.fault_inputs import classify_records, compute_fault_inputs, count_inputs
from deformer_stream.errors import ArtifactError, ConfigError, InputError
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.runtime.reload import ModelReloader
from tests.engine.random_models import draw_records, normalise_values
from tests.faults import SHIFT_BY_FAULT, draw_fault, write_labelled, write_linear_model
from tests.model_folders import forge_manifest
from tests.models import draw_linear_records
from trainer.fault_training import train_classifier
from trainer.faults import learn_faults
from trainer.settings import TrainConfig

NAMES = tuple(SHIFT_BY_FAULT)
OFFSET, DROP, LABEL = NAMES


def learn(directory: Path, table: Path, **options: object) -> list[str]:
    """Learn the faults of a table, and return the messages."""
    messages: list[str] = []
    settings = TrainConfig.model_validate({"out": directory, **options})
    learn_faults([table], directory, settings, messages.append)
    return messages


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model that knows no faults."""
    return write_linear_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def taught(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the same model with the names of three faults, from 20 records each."""
    folder = tmp_path_factory.mktemp("taught")
    directory = Path(shutil.copytree(plain, folder / "model"))
    learn(directory, write_labelled(folder / "faults.parquet", dict.fromkeys(NAMES, 20)))
    return directory


def make_records(name: str, num_records: int, seed: int) -> list[dict[str, float | str]]:
    return [
        {"x": x, "y": y, "sign": ("minus", "plus")[int(code)]} for x, y, code in draw_fault(name, num_records, seed)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_complete_records_get_the_name_of_their_fault(taught: Path, name: str) -> None:
    found = deformer_stream.load(taught).classify(make_records(name, 60, 40))
    assert np.mean([one is not None and one.name == name for one in found]) > 0.75


def test_the_order_of_the_readings_changes_nothing(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    for record in make_records(OFFSET, 10, 41):
        assert detector.classify(record) == detector.classify(dict(reversed(record.items())))


def test_any_subset_has_probabilities_that_add_up_to_one(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    frame = pd.DataFrame(make_records(DROP, 8, 42))
    frame.loc[0, ["x", "y"]] = np.nan
    frame.loc[1, "sign"] = None
    frame.loc[2, ["x", "y", "sign"]] = [np.nan, np.nan, None]
    frame["sign"] = frame["sign"].astype(object)
    result = detector.classify(frame)
    assert list(result.columns) == ["fault", "fault_probability", *(f"probability__{name}" for name in sorted(NAMES))]
    sums = result.filter(like="probability__").sum(axis=1, skipna=False)
    assert pd.isna(result["fault"][2])
    assert np.isnan(sums[2])
    assert np.allclose(sums.drop(2), 1.0, atol=1e-3)


def test_many_records_are_classified_in_parts(taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = deformer_stream.load(taught)
    frame = pd.DataFrame(make_records(OFFSET, 8, 55)).astype({"sign": object})
    frame.loc[4] = [np.nan, np.nan, None]
    whole = detector.classify(frame)
    monkeypatch.setattr(fault_inputs, "RECORDS_AT_ONCE", 3)
    pd.testing.assert_frame_equal(detector.classify(frame), whole)


def test_numpy_and_single_records_give_the_same_names(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    rows = draw_fault(OFFSET, 5, 43)
    records = make_records(OFFSET, 5, 43)
    single = [detector.classify(record) for record in records]
    assert detector.classify(records) == single
    array = np.array([[record[name] for name in detector.schema.names] for record in records], object)
    assert detector.classify(array, columns=detector.schema.names) == single
    numbers = rows.astype(object)
    numbers[:, 2] = [record["sign"] for record in records]
    assert detector.classify(pd.DataFrame(numbers, columns=["x", "y", "sign"]))["fault"].tolist() == [
        one.name for one in single
    ]


def test_a_record_of_an_unlabelled_fault_is_unknown(plain: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    learn(directory, write_labelled(tmp_path / "faults.parquet", {OFFSET: 20, LABEL: 20}))
    detector = deformer_stream.load(directory)
    held_out = detector.classify(make_records(DROP, 100, 44))
    known = detector.classify(make_records(OFFSET, 100, 45))
    assert np.mean([one is not None and one.name == UNKNOWN for one in held_out]) > 0.5
    assert np.mean([one is not None and one.name == UNKNOWN for one in known]) < 0.2
    unknown = next(one for one in held_out if one is not None and one.name == UNKNOWN)
    assert unknown.probability is None
    assert not any(candidate.in_set for candidate in unknown.candidates)


def test_the_coverage_of_prediction_sets_is_within_its_bounds(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    rng = np.random.default_rng(46)
    sizes = []
    for name in NAMES:
        records = make_records(name, 300, 47)
        for num_readings in (1, 2, 3):
            partial = [{key: record[key] for key in rng.permutation(list(record))[:num_readings]} for record in records]
            found = detector.classify(partial)
            covered = sum(
                any(candidate.in_set and candidate.name == name for candidate in one.candidates)
                for one in found
                if one is not None
            )
            # With 20 calibration scores, the set has the fault if its rank is at least 2: Beta(19, 2) of the coverage.
            assert covered >= betabinom.ppf(1e-4, 300, 19, 2)
            sizes += [sum(c.in_set for c in one.candidates) for one in found if one is not None and num_readings == 3]
    assert np.mean(sizes) < len(NAMES) - 0.5, "the sets of complete records exclude faults"


def test_five_labels_and_imbalance_are_served(plain: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    messages = learn(directory, write_labelled(tmp_path / "faults.parquet", {OFFSET: 5, DROP: 60, LABEL: 2}))
    detector = deformer_stream.load(directory)
    for name, least in ((OFFSET, 0.7), (DROP, 0.7)):
        found = detector.classify(make_records(name, 60, 48))
        top = [max(one.candidates, key=lambda c: c.probability).name for one in found if one is not None]
        assert np.mean([one == name for one in top]) > least
    assert "never excluded at the level 0.9" in messages[-1]
    # A fault with fewer than nine records is in every set, so that no record is unknown.
    assert all(
        {OFFSET, LABEL} <= {candidate.name for candidate in one.candidates if candidate.in_set}
        for one in detector.classify(make_records(DROP, 30, 49))
        if one is not None
    )


def test_scores_p_values_and_alerts_are_the_same_with_and_without_names(plain: Path, taught: Path) -> None:
    without, with_names = deformer_stream.load(plain), deformer_stream.load(taught)
    assert without.fingerprint == with_names.fingerprint
    named = 0
    for name in NAMES:
        records = make_records(name, 20, 50)
        pd.testing.assert_frame_equal(without.score(pd.DataFrame(records)), with_names.score(pd.DataFrame(records)))
        scorers = without.scorer([0.05, 0.01]), with_names.scorer([0.05, 0.01])
        for number, record in enumerate(records):
            for feature, value in record.items():
                before, after = (scorer.update(str(number), feature, value) for scorer in scorers)
                assert before.p_value == after.p_value
                assert len(before.alerts) == len(after.alerts)
                for old, new in zip(before.alerts, after.alerts, strict=True):
                    document = json.loads(encode_alert(new, None))
                    fault = document.pop("fault")
                    assert document == json.loads(encode_alert(old, None))
                    assert fault["level"] == 0.9
                    assert isinstance(new.fault, FaultName)
                    assert fault["name"] == new.fault.name
                    named += 1
    assert named > 20


def test_an_alert_is_named_by_its_readings_until_then(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    scorer = detector.scorer(0.05)
    for number, record in enumerate(make_records(OFFSET, 20, 51)):
        seen: dict[str, float | str] = {}
        for feature, value in record.items():
            seen[feature] = value
            for alert in scorer.update(str(number), feature, value).alerts:
                assert alert.fault == detector.classify(seen)


def test_evidence_of_incidents_has_the_fault(taught: Path) -> None:
    detector = deformer_stream.load(taught)
    engine = detector.engine(0.05)
    batch, _ = detector.codec.decode_document(
        {"record": "pump/1", "values": (record := make_records(OFFSET, 1, 52)[0]), "time": 1.7e9}
    )
    effects = engine.handle(batch, 0)
    assert effects.alerts
    rows = [row for evidence in make_evidence(effects)[0] for row in evidence.alerts]
    assert [row.fault for row in rows] == [alert.fault for alert in effects.alerts]
    for evidence in make_evidence(effects)[0]:
        assert decode_evidence(encode_evidence(evidence)).alerts == evidence.alerts
    assert effects.closed.faults == (detector.classify(record),)  # by all of its readings


def test_the_classifier_survives_saving_and_pickling(taught: Path, tmp_path: Path) -> None:
    detector = deformer_stream.load(taught)
    record = make_records(DROP, 1, 53)[0]
    detector.save(tmp_path / "copy")
    assert deformer_stream.load(tmp_path / "copy").classify(record) == detector.classify(record)
    restored: Detector = pickle.loads(pickle.dumps(detector))
    assert restored.classify(record) == detector.classify(record)


def test_faults_far_from_normal_records_and_near_one_another_are_told_apart(plain: Path) -> None:
    """Both shift y, whose standard deviation is about 2, so far that only logarithms in normal units differ."""
    artifact = model_store.read(plain)
    schema = artifact.model.schema

    def draw(count: int, seed: int) -> NDArray[np.float64]:
        rows = draw_linear_records(2 * count, seed)
        rows[:, 1] += np.repeat([60.0, 80.0], count)
        return schema.normalise(np.broadcast_to(np.arange(3), rows.shape), rows)

    indexes = np.repeat([0, 1], 10)
    classifier = train_classifier(artifact.model, None, draw(10, 54), indexes, ("near", "far"), 0.9, 0)
    tested = draw(100, 55)
    tested[:, 0] = np.nan
    probabilities = classify_records(artifact.model, None, classifier, tested)[1]
    assert np.mean(probabilities.argmax(1) == np.repeat([0, 1], 100)) > 0.97


def test_classifiers_of_earlier_releases_are_read(taught: Path, tmp_path: Path) -> None:
    """They have no units of the labelled records: their inputs are in units of normal records, and limited."""
    directory = Path(shutil.copytree(taught, tmp_path / "model"))
    classifier = model_store.read(directory).fault_classifier
    assert classifier is not None
    earlier = replace(classifier, weights=classifier.weights[:, : -classifier.num_features], centers=None, scales=None)
    model_store.write_faults(directory, earlier)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert "units" not in manifest["faults"]
    assert manifest["format_version"] < 15
    read = model_store.read(directory).fault_classifier
    assert read is not None
    assert read.num_inputs == classifier.num_inputs
    inputs = np.zeros((2, read.num_inputs))
    inputs[:, 6:9] = [[9.0, -20.0, 0.0], [8.0, -8.0, 0.0]]
    first, second = read.compute_log_probabilities(inputs).swapaxes(0, 1)
    np.testing.assert_array_equal(first, second)


def test_names_can_be_renewed_and_removed(taught: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(taught, tmp_path / "model"))
    learn(directory, write_labelled(tmp_path / "faults.parquet", {LABEL: 9}))
    renewed = deformer_stream.load(directory)
    assert renewed.artifact.fault_classifier is not None
    assert renewed.artifact.fault_classifier.names == (LABEL,)
    model_store.write_faults(directory, None)
    assert not (directory / model_store.FAULTS).exists()
    with pytest.raises(ConfigError, match="deformer-train --faults TABLE --model DIR"):
        deformer_stream.load(directory).classify({"x": 1.0})


def test_a_record_without_a_known_reading_is_refused(taught: Path) -> None:
    with pytest.warns(UserWarning, match="other"), pytest.raises(InputError, match="no reading"):
        deformer_stream.load(taught).classify({"other": 1.0})


@pytest.mark.parametrize(
    "damage", ["cut", "altered", "missing", "size", "inputs", "features", "folds", "units", "scale"]
)
def test_a_damaged_classifier_is_refused_by_name(taught: Path, tmp_path: Path, damage: str) -> None:
    directory = Path(shutil.copytree(taught, tmp_path / "model"))
    path = directory / model_store.FAULTS
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "altered":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        path.unlink()
    elif damage == "size":
        forge_manifest(directory, lambda manifest: manifest["faults"]["file"].update(size=-5))
    else:
        classifier = model_store.read(directory).fault_classifier
        assert classifier is not None
        damaged = SimpleNamespace(**_damage_arrays(classifier, damage))
        with pytest.raises(ArtifactError, match=r"faults\.safetensors"):
            model_store.write_faults(directory, damaged)  # type: ignore[arg-type]
        return
    with pytest.raises(ArtifactError, match=r"faults\.safetensors"):
        model_store.read(directory)


def _damage_arrays(classifier: FaultClassifier, damage: str) -> dict[str, object]:
    """Return the attributes of a classifier that has an input or a feature less, or other arrays that do not fit."""
    attributes = {field.name: getattr(classifier, field.name) for field in fields(classifier)}
    assert classifier.centers is not None
    assert classifier.scales is not None
    changes: dict[str, dict[str, object]] = {
        "inputs": {"weights": classifier.weights[:, :-1]},
        "features": {name: getattr(classifier, name)[..., :-2] for name in ("means", "precisions")},
        "folds": {"folds": classifier.folds.astype(np.float64)},
        "units": {"centers": classifier.centers[:, :-1]},
        "scale": {"scales": 0 * classifier.scales},
    }
    return attributes | changes[damage] | {"num_records_by_fault": dict.fromkeys(NAMES, 1)}


def test_a_new_classifier_is_reloaded_without_a_new_model(taught: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(taught, tmp_path / "model"))
    requested = threading.Event()
    reloader = ModelReloader(model_store.read(directory), "cpu", requested)
    learn(directory, write_labelled(tmp_path / "faults.parquet", {LABEL: 9}))
    requested.set()
    while (found := reloader.take_new_model()) is None:
        time.sleep(0.01)
    _, artifact = found
    assert artifact.fault_classifier is not None
    assert artifact.fault_classifier.names == (LABEL,)


def test_both_backends_give_the_same_inputs(model_dir: Path) -> None:
    model = model_store.read(model_dir).scoring_model
    kernels = CpuKernels.for_model(model)
    assert kernels is not None
    codes, raw_values = draw_records(model.schema, 20, 54, missing_share=0.3)
    normalised = normalise_values(model.schema, codes, raw_values)
    rows, positions = np.nonzero(codes >= 0)
    values = np.full((20, len(model.schema)), np.nan)
    values[rows, codes[rows, positions]] = normalised[rows, positions]
    inputs = compute_fault_inputs(model, kernels, values)
    assert inputs.shape == (20, count_inputs(model.schema))
    assert np.allclose(inputs, compute_fault_inputs(model, None, values), atol=5e-3)
    # A record has the same inputs beside any others.
    assert np.allclose(compute_fault_inputs(model, kernels, values[3:4]), inputs[3:4], atol=1e-6)
