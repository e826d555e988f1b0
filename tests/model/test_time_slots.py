"""Tests of sensors that report several times in a record: windows, time slots, their features and their embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream import model_store
from deformer_stream.errors import ArtifactError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import collapse_time_slots, describe_records, expand_time_slots, name_time_slot
from deformer_stream.model.windows import PerSlot, Window, floor_to_window
from tests import models
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.model.slot_models import CONFIG
from tests.model_folders import forge_manifest

SECOND = 1_000_000
SENSORS = Schema(
    (
        Feature("temp", "continuous", location=20.0, scale=5.0, low=5.0, high=35.0),
        Feature("state", "discrete", labels=("idle", "run")),
        Feature("site", "discrete", labels=("a", "b", "c"), context=True),
    )
)
MINUTE = Window(60 * SECOND, 4)
SLOTTED = expand_time_slots(SENSORS, MINUTE, ["site"])
"""A schema in which `temp` and `state` report in each quarter of a minute, and `site` once."""


@given(width=st.integers(1, 10**12), num_slots=st.integers(1, 500), time=st.integers(-(10**15), 10**15))
def test_time_lies_between_the_start_of_its_time_slot_and_the_next(width: int, num_slots: int, time: int) -> None:
    window = Window(width, min(num_slots, width))
    slot_index = window.time_slot_index(time)
    since_start = time - floor_to_window(time, width)
    assert 0 <= slot_index < window.slots
    is_last = slot_index + 1 == window.slots
    slot_end = width if is_last else window.time_slot_offset(slot_index + 1)
    assert window.time_slot_offset(slot_index) <= since_start < slot_end
    assert window.time_slot_index(np.array([time])).tolist() == [slot_index]
    assert floor_to_window(np.array([time]), width).tolist() == [time - since_start]


def test_time_slot_includes_its_start_and_excludes_its_end() -> None:
    thirds = Window(10 * SECOND, 3)
    assert [thirds.time_slot_offset(k) for k in range(3)] == [0, 3_333_334, 6_666_667]
    times = [0, 3_333_333, 3_333_334, 6_666_666, 6_666_667, 9_999_999, 10 * SECOND, -1, -3_333_333, -3_333_334]
    assert [thirds.time_slot_index(t) for t in times] == [0, 0, 1, 1, 2, 2, 0, 2, 2, 1]


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0s"),
        (500, "0.5ms"),
        (1500, "1.5ms"),
        (20 * SECOND, "20s"),
        (90 * SECOND, "90s"),
        (24 * 3600 * SECOND, "24h"),
    ],
)
def test_time_slot_is_named_by_its_start(microseconds: int, text: str) -> None:
    assert name_time_slot("temp", microseconds) == f"temp+{text}"


def test_expanded_schema_has_a_feature_for_each_time_slot() -> None:
    assert SLOTTED.names == (
        *(f"temp+{t}" for t in ("0s", "15s", "30s", "45s")),
        *(f"state+{t}" for t in ("0s", "15s", "30s", "45s")),
        "site",
    )
    assert SLOTTED.sensor_names == ("temp", "state", "site")
    assert SLOTTED.slot_layout_by_sensor == {"temp": (0, 1), "state": (4, 1), "site": (8, 0)}
    coordinates = [f.coordinates for f in SLOTTED.features]
    assert coordinates[:4] == coordinates[4:8]
    assert len(set(coordinates)) == 5, "each time slot has coordinates of its own; a sensor that reports once has zeros"
    assert {(f.kind, f.location, f.labels) for f in SLOTTED.features[4:8]} == {("discrete", 0.0, ("idle", "run"))}


def test_records_are_described_for_a_person() -> None:
    assert describe_records(SENSORS) == ""
    without_slots = expand_time_slots(SENSORS, Window(10 * SECOND))
    assert describe_records(without_slots) == "A record is a window of 10s of a device's time."
    assert describe_records(SLOTTED) == (
        "A record is a window of 1m of a device's time in 4 time slots. A sensor can report once in each time slot "
        "(feature temp+0s, …), but these sensors report only once in a record: site."
    )
    mean = expand_time_slots(SENSORS, Window(10 * SECOND, per_slot="mean"))
    assert describe_records(mean).endswith("Of several readings of a sensor, the mean is used.")
    mean = expand_time_slots(SENSORS, replace(MINUTE, per_slot="mean"), ["site"])
    assert describe_records(mean).endswith(": site. Of several readings in one time slot, the mean is used.")


@given(num_slots=st.integers(1, 40), reported_once=st.sets(st.sampled_from(SENSORS.names)))
def test_collapse_is_the_inverse_of_expand(num_slots: int, reported_once: set[str]) -> None:
    schema = expand_time_slots(SENSORS, Window(3600 * SECOND, num_slots), reported_once)
    assert collapse_time_slots(schema) == SENSORS
    assert schema.window is not None
    reread = Schema.from_json(schema.to_json(), schema.window.to_json())
    assert (reread, reread.fingerprint) == (schema, schema.fingerprint)
    assert schema.has_repeating_sensors == (num_slots > 1 and len(reported_once) < 3)
    if schema.has_repeating_sensors:
        for name, (first_code, code_step) in schema.slot_layout_by_sensor.items():
            codes = {first_code + code_step * k for k in range(num_slots)}
            assert len(codes) == (1 if name in reported_once else num_slots)
            assert {schema.features[code].sensor_name for code in codes} == {name}


def test_window_is_part_of_the_fingerprint() -> None:
    fingerprints = {expand_time_slots(SENSORS, Window(width * SECOND)).fingerprint for width in (10, 60)}
    assert len(fingerprints | {SENSORS.fingerprint}) == 3


def test_schema_without_a_window_keeps_its_fingerprint_from_before_windows_existed() -> None:
    assert models.SCHEMA.fingerprint == "ecf01fd00589770e"
    assert all("sensor" not in row for row in models.SCHEMA.to_json())


@pytest.mark.parametrize(
    ("features", "window"),
    [
        pytest.param(SLOTTED.features, None, id="no window"),
        pytest.param(SLOTTED.features, Window(60 * SECOND, 3), id="fewer time slots than features"),
        pytest.param(SLOTTED.features[1:], MINUTE, id="first time slot missing"),
        pytest.param(SLOTTED.features[:3], MINUTE, id="last time slot missing"),
        pytest.param(SLOTTED.features[8:], MINUTE, id="no sensor with time slots"),
        pytest.param(
            (*SLOTTED.features[:3], SLOTTED.features[8], SLOTTED.features[3]), MINUTE, id="time slots not adjacent"
        ),
        pytest.param(
            (*SLOTTED.features, Feature("temp", "continuous", coordinates=(0.0,) * 3)), MINUTE, id="sensor name reused"
        ),
        pytest.param(
            (*SLOTTED.features[:3], *expand_time_slots(SENSORS, MINUTE).features[7:8], *SLOTTED.features[4:]),
            MINUTE,
            id="time slot of another sensor",
        ),
    ],
)
def test_schema_with_wrong_time_slots_is_rejected(features: tuple[Feature, ...], window: Window | None) -> None:
    with pytest.raises(ValueError, match=r"sensor|unique|slots"):
        Schema(features, window)


@pytest.mark.parametrize("width_and_slots", [(0, 1), (10, 0), (10, 11), (2**62, 2), (1.5, 1), (10, True)])
def test_invalid_window_is_rejected(width_and_slots: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        Window(*width_and_slots)


def test_rule_for_a_time_slot_is_stored_only_if_it_is_not_the_first_reading() -> None:
    assert MINUTE.to_json() == {"width": 60 * SECOND, "slots": 4}
    mean = replace(MINUTE, per_slot="mean")
    assert mean.to_json() == {"width": 60 * SECOND, "slots": 4, "per_slot": "mean"}
    assert Window.from_json(mean.to_json()) == mean
    assert Window.from_json({"width": 60 * SECOND, "slots": 4}) == MINUTE
    fingerprints = {
        expand_time_slots(SENSORS, Window(60 * SECOND, slots, rule)).fingerprint
        for slots in (1, 4)
        for rule in get_args(PerSlot)
    }
    assert len(fingerprints) == 10


@pytest.mark.parametrize("rule", ["median", None, 1, ["mean"]])
def test_unknown_rule_for_a_time_slot_is_rejected(rule: Any) -> None:
    with pytest.raises(ValueError, match="first, last, mean, min, max"):
        Window(60 * SECOND, 4, rule)


def test_rule_for_a_time_slot_depends_on_the_sensor() -> None:
    """Labels have no mean, and the reading of a sensor that reports once is not delayed."""
    slotted = expand_time_slots(SENSORS, replace(MINUTE, per_slot="mean"), ["site"])
    assert slotted.per_slot_by_sensor == {"temp": "mean", "state": "last", "site": "first"}
    without_slots = expand_time_slots(SENSORS, Window(60 * SECOND, per_slot="max"))
    assert without_slots.window == Window(60 * SECOND, per_slot="max")
    assert without_slots.per_slot_by_sensor == {"temp": "max", "state": "last", "site": "last"}
    assert set(SLOTTED.per_slot_by_sensor.values()) == {"first"}
    assert set(SENSORS.per_slot_by_sensor.values()) == {"first"}


def test_time_slots_of_a_sensor_share_an_embedding_and_differ_by_coordinates() -> None:
    torch.manual_seed(0)
    model = DEformer(SLOTTED, CONFIG).double().eval()
    assert model.embedding is not None
    assert model.label_embedding is not None
    assert model.embedding.weight.shape[0] == 3
    num_label_rows = 1 + 3 + 4  # continuous values; two labels of `state` and one for others; three of `site` and one
    assert model.label_embedding.weight.shape[0] == num_label_rows
    values = torch.zeros(1, 2, dtype=torch.float64)
    second_slot, third_slot = (model.log_prob(torch.tensor([[0, code]]), values)[0, 1] for code in (1, 2))
    assert not torch.isclose(second_slot, third_slot), "the coordinates distinguish the time slots"
    second_slot.backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.abs().sum(1).gt(0).tolist() == [True, False, False]


def test_model_directory_stores_the_window(tmp_path: Path) -> None:
    model = make_model(SLOTTED, CONFIG, 3, torch.float32)
    calibration = models.make_calibration(model)
    fingerprint = model_store.write(tmp_path / "m", model, calibration, models.TRAINING_SUMMARY, "<p>")
    loaded = model_store.read(tmp_path / "m")
    assert (loaded.schema, loaded.fingerprint) == (SLOTTED, fingerprint)
    assert loaded.manifest["format_version"] == 4
    assert loaded.manifest["window"] == {"width": 60 * SECOND, "slots": 4}
    codes, raw = draw_records(SLOTTED, 5, 1)
    values = torch.from_numpy(normalise_values(SLOTTED, codes, raw)).float()
    assert torch.equal(*(m.log_prob(torch.from_numpy(codes), values) for m in (model, loaded.model)))


def test_model_directory_stores_the_rule_for_a_time_slot(tmp_path: Path) -> None:
    """Releases that do not have the rule would score other values, so the format version tells them to refuse it."""
    schema = expand_time_slots(SENSORS, replace(MINUTE, per_slot="max"), ["site"])
    model = make_model(schema, CONFIG, 3, torch.float32)
    model_store.write(tmp_path / "m", model, models.make_calibration(model), models.TRAINING_SUMMARY, "<p>")
    loaded = model_store.read(tmp_path / "m")
    assert loaded.schema == schema
    assert loaded.manifest["format_version"] == 5


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "window missing": lambda m: m.pop("window"),
    "another number of slots": lambda m: m["window"].update(slots=5),
    "width missing": lambda m: m["window"].pop("width"),
    "width a string": lambda m: m["window"].update(width="60s"),
    "unknown rule for a time slot": lambda m: m["window"].update(per_slot="median") or m.update(format_version=5),
    "unknown key": lambda m: m["window"].update(grace=1),
    "sensor a number": lambda m: m["features"][0].update(sensor=5),
    "sensor empty": lambda m: m["features"][0].update(sensor=""),
    "one time slot of another kind": lambda m: m["features"][1].update(context=True),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_manifest_with_a_forged_window_is_rejected(tmp_path: Path, forgery: Callable[[dict[str, Any]], object]) -> None:
    model = make_model(SLOTTED, CONFIG, 3, torch.float32)
    model_store.write(tmp_path / "m", model, models.make_calibration(model), models.TRAINING_SUMMARY, "<p>")
    forge_manifest(tmp_path / "m", forgery)
    with pytest.raises(ArtifactError, match="train again"):
        model_store.read(tmp_path / "m")
