"""Tests of fill values such as 99999: they are named, and a small share of them does not change the scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from trainer.feature_kinds import compute_location_and_scale
from trainer.fill_values import NumberSample, describe_fill_values, find_fill_values

Run = Callable[..., SimpleNamespace]
Floats = NDArray[np.float64]

RNG = np.random.default_rng(0)
N = 4000


def sample(name: str, values: Floats, num_readings: int | None = None) -> NumberSample:
    return NumberSample(name, np.sort(values), len(values) if num_readings is None else num_readings)


def fill(values: Floats, value: float, count: int) -> Floats:
    filled = values.copy()
    filled[RNG.choice(len(filled), count, replace=False)] = value
    return filled


def find(*columns: Floats) -> list[float]:
    return [found.value for found in find_fill_values(sample(str(i), column) for i, column in enumerate(columns))]


PRESSURE = RNG.normal(1.0, 0.012, N)
SPEED = RNG.normal(2400, 170, N)


@pytest.mark.parametrize("share", [0.002, 0.005, 0.05])
@pytest.mark.parametrize("value", [99999.0, -9999.0, 1e30])
def test_a_small_share_of_fill_values_does_not_change_the_scale(share: float, value: float) -> None:
    filled = fill(PRESSURE, value, round(share * N))
    location, scale = compute_location_and_scale(filled)
    assert location == pytest.approx(1.0, abs=0.001)
    assert scale == pytest.approx(0.012, rel=0.05)


def test_fill_values_at_both_ends_do_not_change_the_scale() -> None:
    filled = fill(fill(PRESSURE, 99999.0, 20), -9999.0, 20)
    assert compute_location_and_scale(filled)[1] == pytest.approx(0.012, rel=0.05)
    assert sorted(find(filled)) == [-9999.0, 99999.0]


ORDINARY = {
    "normal": PRESSURE,
    "lognormal": RNG.lognormal(0, 2, N),
    "heavy tails": RNG.standard_t(1.5, N),
    "machine at rest": np.where(RNG.random(N) < 0.1, 0.0, SPEED),
    "seldom at rest": np.where(RNG.random(N) < 0.01, 0.0, SPEED),
    "two modes": np.where(RNG.random(N) < 0.3, RNG.normal(20, 0.1, N), RNG.normal(80, 0.1, N)),
    "plateaus": np.where(RNG.random(N) < 0.5, 40.0, RNG.choice([10.0, 20.0, 30.0], N)),
    "saturated": np.minimum(RNG.normal(95, 4, N), 100.0),
    "mostly zero": np.where(RNG.random(N) < 0.97, 0.0, RNG.gamma(2.0, 3.0, N)),
    "counts": RNG.poisson(0.3, N).astype(float),
    "one wild reading": np.append(SPEED, 1e9),
    "constant": np.full(N, 3.0),
    "constant with few events": fill(np.full(N, 3.0), 700.0, 20),
    "few readings": np.array([1.0, 2.0, 1e6]),
    "speed up to 999": fill(RNG.uniform(0, 1200, N), 999.0, 100),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_columns_keep_their_scale_and_have_no_fill_values(name: str) -> None:
    values = ORDINARY[name]
    low, high = np.quantile(values, 0.001, method="higher"), np.quantile(values, 0.999, method="lower")
    clipped = np.clip(values, min(low, high), max(low, high))
    if clipped.std() == 0:
        clipped = values
    location, scale = compute_location_and_scale(values)
    assert location == float(clipped.mean())
    assert scale == (float(clipped.std()) or 3.0)
    assert find(values) == []


def test_ordinary_columns_together_have_no_fill_values() -> None:
    assert find(*ORDINARY.values()) == []


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([fill(PRESSURE, 99999.0, 8)], [99999.0]),
        ([fill(SPEED, 32767.0, 400)], [32767.0]),  # a typical one may be frequent
        ([fill(PRESSURE, -999.25, 1000)], [-999.25]),
        ([fill(PRESSURE, 7.0, 8)], [7.0]),
        ([fill(PRESSURE, 3.0, 8)], []),  # not far enough for a value that is not typical
        ([fill(PRESSURE, 3.0, 8), fill(PRESSURE, 3.0, 8)], [3.0]),
        ([fill(PRESSURE, 99999.0, 1)] * 7, [99999.0]),
        ([fill(PRESSURE, 99999.0, 1)] * 3, []),
        ([fill(PRESSURE, 0.0, 8)] * 2, []),  # a machine at rest
        ([np.append(PRESSURE, RNG.normal(500.0, 1.0, 20))], []),  # another mode
    ],
)
def test_values_that_are_found(columns: list[Floats], expected: list[float]) -> None:
    assert find(*columns) == expected


def test_message_names_the_columns_the_number_of_occurrences_and_what_to_do() -> None:
    found = find_fill_values([sample("a", fill(PRESSURE, 99999.0, 20)), sample("b", fill(SPEED, 99999.0, 10), 2 * N)])
    message = describe_fill_values(found, "long")
    assert message is not None
    assert message.startswith(
        "99999 occurs about 40 times in 2 sensors (a, b), far from all other values: is it a fill"
    )
    assert message.endswith("is it a fill value? If so, train with --fill-values 99999")
    found = find_fill_values([sample("a", fill(fill(PRESSURE, -9999.0, 9), 99999.0, 20))])
    message = describe_fill_values(found, "wide")
    assert message is not None
    assert message.startswith("99999 occurs 20 times in column a; -9999 occurs 9 times in column a, far from all")
    assert message.endswith("are these fill values? If so, train with --fill-values 99999,-9999")
    assert describe_fill_values([], "wide") is None


def write_with_fill_values(folder: Path, share_of_texts: float) -> Path:
    """Write readings of a device, of which some are 99999, and texts of a third sensor."""
    n = 4000
    sensor = np.where(np.arange(n) % 100 < 100 * share_of_texts, 2, np.arange(n) % 2)
    numbers = fill(np.where(sensor == 1, RNG.normal(20, 0.5, n), RNG.normal(2400, 17, n)).round(2), 99999, 40)
    columns: dict[str, Any] = {"device": ["pump"] * n, "feature": np.array(["speed", "flow", "mode"])[sensor]}
    columns["value"] = np.where(sensor == 2, "auto", [f"{number:g}" for number in numbers])
    columns["time"] = pd.to_datetime(1_700_000_000 + np.arange(n), unit="s", utc=True)
    pd.DataFrame(columns).to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


@pytest.mark.parametrize("options", [(), ("--irregular",)])
@pytest.mark.parametrize("share_of_texts", [0.0, 0.02, 0.4])
def test_training_warns_of_fill_values_and_the_remedy_keeps_all_sensors(
    tmp_path: Path, deformer_train: Run, options: tuple[str, ...], share_of_texts: float
) -> None:
    table = write_with_fill_values(tmp_path, share_of_texts)
    done = deformer_train(table, "--dry-run", "--window", "20s", *options)
    assert done.code == 0, done.err
    assert "warning: 99999 occurs" in done.out
    assert "times in 2 sensors (speed, flow), far from all other values" in done.out.replace(
        "flow, speed", "speed, flow"
    )
    assert "train with --fill-values 99999" in done.out
    done = deformer_train(table, "--dry-run", "--window", "20s", *options, "--fill-values", "99999")
    assert done.code == 0, done.err
    assert "99999" not in done.out
    assert f"dry run: {3 if share_of_texts else 2} features" in done.out
