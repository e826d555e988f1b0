"""Tests of what determines incidents, as the model directory and the options state it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from deformer_stream import log, model_store
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.errors import ArtifactError, ConfigError
from deformer_stream.incident_store import IncidentCalibration, write_incident_calibration
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import Window
from deformer_stream.runtime.incident_plan import (
    NUM_REMEMBERED_RECORDS,
    REORDER_MICROS,
    PlanLoader,
    load_detection_plan,
)
from deformer_stream.settings.incident_rule import IncidentRuleSettings
from tests.engine.random_models import make_model
from tests.model_folders import write_folder
from tests.models import CONFIG, SCHEMA, TRAINING_SUMMARY, make_calibration

DAY = 86_400_000_000


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the model, to which a test may write."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose records are windows of 10 s."""
    schema = Schema(SCHEMA.features, Window(10_000_000, 1))
    model, folder = make_model(schema, CONFIG), tmp_path_factory.mktemp("window") / "model"
    model_store.write(folder, model, make_calibration(model), TRAINING_SUMMARY, "")
    return folder


def make_segments(count: int = 40) -> SegmentCalibration:
    return SegmentCalibration(DAY, tuple(i / 10 for i in range(count)), 8640.0, 4)


def get_fingerprint(model: Path) -> str:
    return str(model_store.read_manifest(model)["fingerprint"])


def test_windows_of_a_device_close_in_order_of_time_and_have_a_known_rate(window_model: Path, model: Path) -> None:
    detection = load_detection_plan(window_model, IncidentRuleSettings())
    assert detection.options.reorder == 0
    assert detection.plan.rule == "e-detector"
    assert detection.plan.records_per_period == pytest.approx(30 * 8640)
    assert detection.plan.log_normalisers is not None, "e-values are normalised for the calibration records"
    other = load_detection_plan(model, IncidentRuleSettings(records_per_day=100))
    assert other.options.reorder == REORDER_MICROS
    assert other.plan.records_per_period == pytest.approx(3000)
    with pytest.raises(ConfigError, match="--records-per-day"):
        load_detection_plan(model, IncidentRuleSettings())


def test_options_are_those_of_the_command(model: Path) -> None:
    settings = IncidentRuleSettings(
        quiet="5m", gap="1h", fleet="4 within 2h", records_per_day=100, device_by="-", incident_budget="2 per w"
    )
    detection = load_detection_plan(model, settings)
    options = detection.options
    assert (options.quiet, options.gap) == (300_000_000, 3_600_000_000)
    assert options.fleet == FleetRule(4, 7_200_000_000)
    assert options.get_device("pump-7@1") == "pump"
    assert options.num_remembered_records == 0
    assert math.exp(detection.plan.log_threshold) == pytest.approx(350)
    again = load_detection_plan(model, settings, can_repeat=True)
    assert again.options.num_remembered_records == NUM_REMEMBERED_RECORDS
    with pytest.raises(ConfigError, match="--incident-budget"):
        load_detection_plan(model, IncidentRuleSettings(incident_budget="few"))
    with pytest.raises(ConfigError, match="--fleet"):
        load_detection_plan(model, IncidentRuleSettings(fleet="some", records_per_day=9))


def test_an_error_names_the_directory_of_one_of_several_models(tmp_path: Path) -> None:
    """The directory is what `calibrate --incidents --model` needs."""
    folder = write_folder(tmp_path / "models", 2)
    first = folder / "model-0"
    write_incident_calibration(first, IncidentCalibration(get_fingerprint(first), (make_segments(),)))
    with pytest.raises(ConfigError, match=r"models/model-1: --incident-budget 1 per 30d: .*--records-per-day"):
        PlanLoader(IncidentRuleSettings(), None, folder).load_all()
    with pytest.raises(ConfigError, match=r"^--incident-budget"):
        PlanLoader(IncidentRuleSettings(), folder / "model-1", None).load_all()
    plans = PlanLoader(IncidentRuleSettings(records_per_day=100), None, folder).load_all()
    assert {plan.plan.rule for plan in plans.values()} == {"segments", "e-detector"}


def test_own_segments_keep_the_budget(model: Path) -> None:
    write_incident_calibration(model, IncidentCalibration(get_fingerprint(model), (make_segments(),)))
    detection = load_detection_plan(model, IncidentRuleSettings())
    assert (detection.plan.rule, detection.plan.segment, detection.plan.is_kept) == ("segments", DAY, True)
    assert detection.plan.model == get_fingerprint(model)


def test_segments_of_another_calibration_are_not_used(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    write_incident_calibration(model, IncidentCalibration("another", (make_segments(),)))
    detection = load_detection_plan(model, IncidentRuleSettings(records_per_day=100))
    assert detection.plan.rule == "e-detector"
    assert "incident_calibration_differs" in "".join(capsys.readouterr())


def test_damaged_calibration_is_refused(model: Path) -> None:
    write_incident_calibration(model, IncidentCalibration("m", (make_segments(),)))
    path = model / "incidents.json"
    path.write_bytes(path.read_bytes().replace(b"8640", b"8641"))
    with pytest.raises(ArtifactError, match="altered"):
        load_detection_plan(model, IncidentRuleSettings())
