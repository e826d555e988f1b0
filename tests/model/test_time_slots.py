"""Sensors that report several times in a record: their features, their identity, and what a model makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream import model_store
from deformer_stream.errors import ArtifactError
from deformer_stream.model.config import ModelConfig
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import in_words, name_of, repeated, single
from deformer_stream.model.windows import Window, format_duration, window_start
from deformer_stream.settings.base import Settings, Width
from tests import models
from tests.engine.worlds import model_of, normalised, records_of
from tests.test_model_store import forge

SECOND = 1_000_000
PLAIN = Schema(
    (
        Feature("temp", "continuous", location=20.0, scale=5.0, low=5.0, high=35.0),
        Feature("state", "discrete", labels=("idle", "run")),
        Feature("site", "discrete", labels=("a", "b", "c"), context=True),
    )
)
MINUTE = Window(60 * SECOND, 4)
SERIES = repeated(PLAIN, MINUTE, ["site"])
CONFIG = ModelConfig(
    d_model=16, layers=2, heads=2, feedforward=32, mixtures=3, embedding=6, hidden=(16,), identity="both"
)


@given(width=st.integers(1, 10**12), slots=st.integers(1, 500), time=st.integers(-(10**15), 10**15))
def test_every_time_is_in_the_slot_that_began_last(width: int, slots: int, time: int) -> None:
    window = Window(width, min(slots, width))
    slot = window.slot(time)
    since = time - window_start(time, width)
    assert 0 <= slot < window.slots
    assert window.offset(slot) <= since < (window.offset(slot + 1) if slot + 1 < window.slots else width)
    assert window.slot(np.array([time])).tolist() == [slot]
    assert window_start(np.array([time]), width).tolist() == [time - since]


def test_a_slot_has_its_start_and_not_its_end() -> None:
    thirds = Window(10 * SECOND, 3)
    assert [thirds.offset(k) for k in range(3)] == [0, 3_333_334, 6_666_667]
    times = [0, 3_333_333, 3_333_334, 6_666_666, 6_666_667, 9_999_999, 10 * SECOND, -1, -3_333_333, -3_333_334]
    assert [thirds.slot(t) for t in times] == [0, 0, 1, 1, 2, 2, 0, 2, 2, 1]


class Asked(Settings):
    width: Width


@given(st.integers(1000, 10**15))
def test_durations_are_written_as_options_take_them(micros: int) -> None:
    assert round(Asked.model_validate({"width": format_duration(micros)}).width * 1e6) == micros


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0s"), (500, "0.5ms"), (1500, "1.5ms"), (20 * SECOND, "20s"), (90 * SECOND, "90s"), (120 * SECOND, "2m")],
)
def test_durations_are_short(micros: int, text: str) -> None:
    assert format_duration(micros) == text
    assert name_of("temp", micros) == f"temp+{text}"


def test_a_feature_for_each_slot() -> None:
    assert SERIES.names == (
        *(f"temp+{t}" for t in ("0s", "15s", "30s", "45s")),
        *(f"state+{t}" for t in ("0s", "15s", "30s", "45s")),
        "site",
    )
    assert SERIES.sources == ("temp", "state", "site")
    assert SERIES.places == {"temp": (0, 1), "state": (4, 1), "site": (8, 0)}
    places = [f.coordinates for f in SERIES.features]
    assert places[:4] == places[4:8]
    assert len(set(places)) == 5, "each slot has its own, and what comes once is nowhere"
    assert {(f.kind, f.location, f.labels) for f in SERIES.features[4:8]} == {("discrete", 0.0, ("idle", "run"))}
    assert in_words(PLAIN) == ""
    assert in_words(repeated(PLAIN, Window(10 * SECOND))) == "A record is a window of 10s of a device's time."
    assert in_words(SERIES) == (
        "A record is a window of 1m of a device's time in 4 slots, in each of which a sensor may report (temp+0s, …); "
        "once only: site."
    )


@given(slots=st.integers(1, 40), once=st.sets(st.sampled_from(PLAIN.names)))
def test_there_and_back(slots: int, once: set[str]) -> None:
    schema = repeated(PLAIN, Window(3600 * SECOND, slots), once)
    assert single(schema) == PLAIN
    assert schema.window is not None
    again = Schema.from_json(schema.to_json(), schema.window.to_json())
    assert (again, again.fingerprint) == (schema, schema.fingerprint)
    assert schema.repeats == (slots > 1 and len(once) < 3)
    if schema.repeats:
        for name, (first, step) in schema.places.items():
            codes = {first + step * k for k in range(slots)}
            assert len(codes) == (1 if name in once else slots)
            assert {schema.features[code].source for code in codes} == {name}


def test_the_window_is_part_of_the_fingerprint_and_nothing_else_changes() -> None:
    prints = {repeated(PLAIN, Window(width * SECOND)).fingerprint for width in (10, 60)}
    assert len(prints | {PLAIN.fingerprint}) == 3
    assert models.SCHEMA.fingerprint == "ecf01fd00589770e", "of schemas before there were windows"
    assert all("sensor" not in row for row in models.SCHEMA.to_json())


@pytest.mark.parametrize(
    ("features", "window"),
    [
        (SERIES.features, None),
        (SERIES.features, Window(60 * SECOND, 3)),
        (SERIES.features[1:], MINUTE),
        (SERIES.features[:3], MINUTE),
        (SERIES.features[8:], MINUTE),
        ((*SERIES.features[:3], SERIES.features[8], SERIES.features[3]), MINUTE),
        ((*SERIES.features, Feature("temp", "continuous", coordinates=(0.0,) * 3)), MINUTE),
        ((*SERIES.features[:3], *repeated(PLAIN, MINUTE).features[7:8], *SERIES.features[4:]), MINUTE),
    ],
)
def test_a_schema_that_is_not_whole_is_refused(features: tuple[Feature, ...], window: Window | None) -> None:
    with pytest.raises(ValueError, match=r"sensor|unique|slots"):
        Schema(features, window)


@pytest.mark.parametrize("shape", [(0, 1), (10, 0), (10, 11), (2**62, 2), (1.5, 1), (10, True)])
def test_an_impossible_window_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        Window(*shape)


def test_a_sensor_is_known_by_one_embedding_and_its_readings_by_their_time() -> None:
    torch.manual_seed(0)
    model = DEformer(SERIES, CONFIG).double().eval()
    assert model.embedding is not None
    assert model.label_embedding is not None
    assert model.embedding.weight.shape[0] == 3
    assert model.label_embedding.weight.shape[0] == 1 + 3 + 4, "a row for each label of a sensor and one for others"
    values = torch.zeros(1, 2, dtype=torch.float64)
    early, late = (model.log_prob(torch.tensor([[0, code]]), values)[0, 1] for code in (1, 2))
    assert not torch.isclose(early, late), "its coordinates tell the slots apart"
    early.backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.abs().sum(1).gt(0).tolist() == [True, False, False]


def test_a_directory_keeps_the_window(tmp_path: Path) -> None:
    model = model_of(SERIES, CONFIG, 3, torch.float32)
    calibration = models.calibration_of(model)
    mark = model_store.write(tmp_path / "m", model, calibration, models.TRAINING, "<p>")
    loaded = model_store.read(tmp_path / "m")
    assert (loaded.schema, loaded.fingerprint) == (SERIES, mark)
    assert loaded.manifest["format_version"] == 4
    assert loaded.manifest["window"] == {"width": 60 * SECOND, "slots": 4}
    codes, raw = records_of(SERIES, 5, 1)
    values = normalised(SERIES, codes, raw)
    both = [m.log_prob(torch.from_numpy(codes), torch.from_numpy(values).float()) for m in (model, loaded.model)]
    assert torch.equal(*both)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no window": lambda m: m.pop("window"),
    "other slots": lambda m: m["window"].update(slots=5),
    "no width": lambda m: m["window"].pop("width"),
    "a width of text": lambda m: m["window"].update(width="60s"),
    "more": lambda m: m["window"].update(grace=1),
    "a number for a sensor": lambda m: m["features"][0].update(sensor=5),
    "no sensor": lambda m: m["features"][0].update(sensor=""),
    "another kind": lambda m: m["features"][1].update(context=True),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_window_is_refused(tmp_path: Path, forgery: Callable[[dict[str, Any]], object]) -> None:
    model = model_of(SERIES, CONFIG, 3, torch.float32)
    model_store.write(tmp_path / "m", model, models.calibration_of(model), models.TRAINING, "<p>")
    forge(tmp_path / "m", forgery)
    with pytest.raises(ArtifactError, match="train again"):
        model_store.read(tmp_path / "m")
