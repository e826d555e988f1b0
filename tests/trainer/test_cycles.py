"""Tests of columns whose values are positions on a cycle, from the table to the alert."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import SECONDS_PER_DAY
from tests.commands import RunCommand
from tests.trainer.tables import prepared, write
from trainer.job import train
from trainer.outliers import compute_median_distances
from trainer.settings import TrainConfig, parse_periods

SMALL: dict[str, Any] = {"d_model": 32, "layers": 1, "heads": 2, "feedforward": 64, "mixtures": 3, "hidden": (32,)}


def clock_of(seconds: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(seconds.astype(np.int32), pa.time32("s"))


def daily(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Return a table in which y is highest at midnight and lowest at noon."""
    seconds = rng.integers(0, 86_400, n)
    return {"clock": clock_of(seconds), "y": np.cos(2 * np.pi * seconds / SECONDS_PER_DAY) + 0.05 * rng.normal(size=n)}


def test_cyclic_columns_are_inferred_or_chosen_with_a_reason(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = daily(rng, 300) | {"heading": rng.uniform(0, 360, 300), "hour": rng.integers(0, 24, 300)}
    moments = pa.array(np.arange(300), pa.timestamp("s"))
    data = prepared(tmp_path, columns | {"at": moments, "on": moments}, cycle=(("heading", 360.0), ("hour", 24.0)))
    found = {f.name: (f.kind, f.period, f.context, f.reason) for f in data.schema.features}
    assert found["clock"] == (
        "continuous",
        SECONDS_PER_DAY,
        True,
        "time of day, a cycle of 24 h: context for the other features",
    )
    assert found["heading"] == ("continuous", 360.0, False, "chosen by an option")
    assert found["hour"][:3] == ("continuous", 24.0, False)
    assert found["y"][:3] == ("continuous", None, False)
    assert data.time_column == "at", "a time of day is no moment"
    assert {e.name: e.reason for e in data.excluded_columns} == {
        "at": "the record's time",
        "on": "times are no features",
    }
    raw = data.schema.denormalise(np.zeros(300, int), data.values[:, 0].astype(float))
    np.testing.assert_allclose(
        raw, [3600 * t.hour + 60 * t.minute + t.second for t in columns["clock"].to_pylist()], atol=0.1
    )


def test_time_of_day_can_be_scored_or_treated_as_a_number(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = daily(rng, 60)
    (asked, _) = prepared(tmp_path, columns, cycle=(("clock", SECONDS_PER_DAY),)).schema.features
    (plain, _) = prepared(tmp_path, columns, continuous=("clock",)).schema.features
    assert [(f.period, f.context) for f in (asked, plain)] == [(SECONDS_PER_DAY, False), (None, False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cycle": (("nope", 24.0),)}, "--cycle nope: .* no such column"),
        ({"cycle": (("word", 24.0),)}, "--cycle word=24: the values of the column are not numbers"),
        ({"cycle": (("y", 1e-9),)}, "spread over more than"),
        ({"cycle": (("y", 1.0),), "discrete": ("y",)}, "--discrete and --cycle both name y"),
        ({"discrete": ("clock",)}, "--discrete clock: times of day are no labels"),
    ],
)
def test_columns_that_cannot_be_cyclic_are_rejected(
    tmp_path: Path, rng: np.random.Generator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, daily(rng, 60) | {"word": ["a", "b"] * 30}, **options)


@pytest.mark.parametrize(
    "text", ["heading", "heading=", "=360", "heading=0", "heading=-1", "heading=nan", "h=inf", "h=a"]
)
def test_periods_must_be_positive_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="no column with a positive period"):
        parse_periods(f"hour=24,{text}")
    assert parse_periods("a=b=24, heading=3.6e2") == (("a=b", 24.0), ("heading", 360.0))


def test_scores_are_continuous_at_midnight(tmp_path: Path, rng: np.random.Generator, cli: RunCommand) -> None:
    """A model of values that depend on the time of day gives nearly the same scores before and after midnight.

    The period also holds in replay, produce and inspect.
    """
    table = write(tmp_path / "t.parquet", daily(rng, 1500))
    out = tmp_path / "model"
    model = train([table], TrainConfig(out=out, epochs=15, batch=64, exemplars=0, gaussians=2, **SMALL)).model.eval()

    clock = np.array([86_340.0, 60.0, 43_200.0])
    codes = np.tile([0, 1], (3, 1))
    values = model.schema.normalise(codes, np.stack([clock, np.zeros(3)], 1))
    with torch.no_grad():
        mean = model.conditionals(torch.from_numpy(codes), torch.from_numpy(values).float()).mean()[:, 1].double()
    y = model.schema.denormalise(np.ones(3, int), mean.numpy())
    assert abs(y[0] - y[1]) < 0.05
    assert y[0] == pytest.approx(1.0, abs=0.3)
    assert y[2] == pytest.approx(-1.0, abs=0.3)

    times = [dt.time(23, 59), dt.time(0, 1), dt.time(12, 0), dt.time(0, 0)]
    new = write(tmp_path / "new.parquet", {"clock": pa.array(times, pa.time32("s")), "y": [1.0, 1.0, -1.0, -1.0]})
    scores = tmp_path / "scores.parquet"
    ended = cli("replay", new, "--model", out, "--order", "schema", "--output", scores)
    assert ended.code == 0, ended.err
    scored = [row for row in pq.read_table(scores).to_pylist() if row["feature"] == "y"]
    assert [row["alert"] for row in scored] == [False, False, False, True]
    assert scored[0]["log_likelihood"] == pytest.approx(scored[1]["log_likelihood"], abs=0.3)
    sent = tmp_path / "sent.jsonl"
    assert cli("produce", new, "--output", sent).code == 0
    events = [json.loads(line) for line in sent.read_text().splitlines()]
    assert [e["value"] for e in events if e["feature"] == "clock"] == [86_340.0, 60.0, 43_200.0, 0.0]
    shown = cli("inspect", out)
    assert "cycle of 86400" in " ".join(shown.out.split())


def test_angles_on_both_sides_of_north_are_close(tmp_path: Path, rng: np.random.Generator) -> None:
    heading = rng.normal(0, 20, 200) % 360
    heading[7], heading[9] = 180.0, np.nan
    far = compute_median_distances(prepared(tmp_path, {"heading": heading}, cycle=(("heading", 360.0),)), 0)
    assert far[9] == 0.0, "it has nothing to be compared by"
    assert far[7] > 2 * np.delete(far, 7).max()
