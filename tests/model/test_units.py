"""Tests of the units of features: they are stored, they reach alerts, and they change no fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from deformer_stream import model_store
from deformer_stream.codec import encode_alert
from deformer_stream.errors import ArtifactError
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_slots import collapse_time_slots, expand_time_slots
from deformer_stream.model.windows import Window
from tests import models
from tests.contracts.effects import make_alert
from tests.engine.random_models import make_model
from tests.model_folders import forge_manifest

UNITS = {"temperature": "°C", "load": "%"}


def test_units_change_no_fingerprint_and_are_left_out_of_a_manifest_without_them() -> None:
    with_units = models.SCHEMA.with_units(UNITS)
    assert with_units != models.SCHEMA
    assert with_units.fingerprint == models.SCHEMA.fingerprint
    assert all("unit" not in row for row in models.SCHEMA.to_json())
    assert [row.get("unit") for row in with_units.to_json()] == ["°C", None, None, None, None, "%"]
    assert Schema.from_json(with_units.to_json()) == with_units


def test_empty_text_removes_a_unit_and_unknown_names_are_ignored() -> None:
    schema = models.SCHEMA.with_units(UNITS).with_units({"temperature": "", "pressure": "bar", "colour": "nm"})
    assert [f.unit for f in schema.features] == [None, "bar", None, None, None, "%"]


def test_time_slots_of_a_sensor_have_its_unit() -> None:
    slotted = expand_time_slots(models.SCHEMA, Window(60_000_000, 4), ["load"])
    before = expand_time_slots(models.SCHEMA.with_units(UNITS), Window(60_000_000, 4), ["load"])
    assert slotted.with_units(UNITS) == before
    assert [f.unit for f in before.features if f.sensor_name == "temperature"] == ["°C"] * 4
    assert collapse_time_slots(before).features[0].unit == "°C"


def test_model_directory_stores_units(tmp_path: Path) -> None:
    model = make_model(models.SCHEMA.with_units(UNITS), models.CONFIG, 0, torch.float32)
    calibration = models.make_calibration(model)
    fingerprint = model_store.write(tmp_path / "with", model, calibration, models.TRAINING_SUMMARY, "<p>")
    loaded = model_store.read(tmp_path / "with")
    assert [f.unit for f in loaded.schema.features] == ["°C", None, None, None, None, "%"]
    assert loaded.manifest["format_version"] == 1
    without = make_model(models.SCHEMA, models.CONFIG, 0, torch.float32)
    assert model_store.write(tmp_path / "without", without, calibration, models.TRAINING_SUMMARY, "<p>") == fingerprint


@pytest.mark.parametrize("unit", [5, 0, ["bar"], "\ud800", "x" * 100_000])
def test_forged_unit_is_refused(tmp_path: Path, unit: object) -> None:
    model = models.make_small_model()
    model_store.write(tmp_path / "m", model, models.make_calibration(model), models.TRAINING_SUMMARY, "<p>")
    forge_manifest(tmp_path / "m", lambda manifest: manifest["features"][0].update(unit=unit))
    with pytest.raises(ArtifactError):
        model_store.read(tmp_path / "m")


def test_alert_has_the_unit_of_each_value_that_has_one() -> None:
    alert = make_alert("r", 0)
    first, *others = alert.contributions
    alert = replace(alert, contributions=(replace(first, unit="bar"), *others))
    contributions = orjson.loads(encode_alert(alert, None))["contributions"]
    assert contributions[0]["unit"] == "bar"
    assert "unit" not in contributions[1]
