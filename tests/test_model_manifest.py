"""The format version of a manifest is the lowest one that can express its contents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.model_manifest import BASE_VERSION, LATEST_VERSION, determine_version

ADDITIONS: dict[int, list[tuple[str, ...]]] = {
    2: [("calibration", "groups")],
    3: [("calibration", "ties")],
    4: [("window", "width")],
    5: [("window", "per_slot")],
    6: [("reading_times", "duration")],
    7: [("reading_times", "duration"), ("calibration", "cusum", "extreme")],
    8: [("reading_times", "duration"), ("calibration", "cusum", "step")],
    9: [("reading_times", "duration"), ("hyperparameters", "outlier_limit")],
    10: [("hyperparameters", "prior_weight")],
    11: [("hyperparameters", "neighbors")],
    12: [("hyperparameters", "alert_exemplars")],
    13: [("hyperparameters", "alert_prior")],
    14: [("hyperparameters", "marginal_weight")],
    15: [("faults", "units")],
}
"""The keys, with those of the objects around them, for which a format version is needed."""


def make_manifest(*versions: int) -> dict[str, Any]:
    """Return a manifest with the additions of these format versions."""
    features: list[dict[str, Any]] = [{"name": "flow"}, {"name": "heat"}]
    if 16 in versions:
        features[1]["fill_values"] = [-1.0]
    manifest: dict[str, Any] = {"features": features, "hyperparameters": {"d_model": 64}, "calibration": {"scores": []}}
    for version in versions:
        for *objects, key in ADDITIONS.get(version, []):
            inner = manifest
            for name in objects:
                inner = inner.setdefault(name, {})
            inner[key] = 1
    return manifest


@pytest.mark.parametrize("version", range(BASE_VERSION, LATEST_VERSION + 1))
def test_each_addition_needs_its_version(version: int) -> None:
    assert determine_version(make_manifest(version)) == version


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ((2, 3), 3),
        ((3, 4), 4),
        ((2, 3, 5), 5),
        ((4, 6), 6),
        ((7, 8), 8),
        ((8, 9), 9),
        ((6, 11), 6),
        ((9, 11), 9),
        ((10, 11), 11),
        ((6, 10, 11), 10),
        ((5, 16), 16),
        ((14, 15), 15),
    ],
)
def test_the_newest_addition_determines_the_version(versions: tuple[int, ...], expected: int) -> None:
    """A Gaussian process is an addition of version 11 for records that are not irregular only."""
    assert determine_version(make_manifest(*versions)) == expected


@given(versions=st.sets(st.integers(BASE_VERSION, LATEST_VERSION)))
def test_any_additions(versions: set[int]) -> None:
    is_irregular = bool(versions & {6, 7, 8, 9})
    expected = max(versions - {11} if is_irregular else versions, default=BASE_VERSION)
    assert determine_version(make_manifest(*versions)) == expected


@pytest.mark.parametrize(
    ("key", "version"),
    [(("calibration", "cusum", "extreme"), 1), (("hyperparameters", "outlier_limit"), 1), (("window", "slots"), 4)],
)
def test_some_keys_count_for_irregular_readings_only(key: tuple[str, ...], version: int) -> None:
    manifest = make_manifest()
    inner = manifest
    for name in key[:-1]:
        inner = inner.setdefault(name, {})
    inner[key[-1]] = 1
    assert determine_version(manifest) == version


@pytest.mark.parametrize("value", [None, 3, "text", [], [3], {}])
def test_invalid_contents_need_no_later_version(value: Any) -> None:
    """They are refused later, by a message that names them."""
    names = ("features", "hyperparameters", "calibration", "faults")
    assert determine_version(dict.fromkeys(names, value)) == BASE_VERSION
    assert determine_version({"window": value}) == 4
    assert determine_version({"reading_times": value, "calibration": {"cusum": value}}) == 6
