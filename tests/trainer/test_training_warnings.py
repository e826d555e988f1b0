"""Trainings that did not learn, and calibrations without alerts, are reported with what the user can do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from tests.trainer.tables import correlated, prepared, write
from trainer.console import format_summary
from trainer.data import Split
from trainer.evaluate import compute_independent_nll
from trainer.job import train
from trainer.settings import TrainConfig
from trainer.training_warnings import (
    TrainingWarning,
    WarningList,
    check_best_step,
    check_calibration,
    check_independence,
    check_steps,
)

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}


def result(steps: int, best_step: int = 100, planned_steps: int = 4000) -> Any:
    history = [{"step": steps, "validation": 3.5}]
    return SimpleNamespace(
        steps=steps,
        best_step=best_step,
        planned_steps=planned_steps,
        step_seconds=0.5,
        initial_validation=3.0,
        history=history,
    )


def codes(warnings: list[TrainingWarning]) -> list[str]:
    return [warning.code for warning in warnings]


def calibration(num_records: int) -> Calibration:
    return Calibration.from_statistics(np.random.default_rng(0).normal(size=num_records), "random")


@pytest.mark.parametrize(
    ("steps", "planned_steps", "limit", "expected"),
    [
        (3, 4000, 30.0, True),
        (150, 4000, 30.0, True),
        (200, 4000, 30.0, False),
        (50, 50, 30.0, False),
        (3, 9, None, False),
    ],
)
def test_few_steps_are_reported_with_a_limit_that_is_enough(
    steps: int, planned_steps: int, limit: float | None, expected: bool
) -> None:
    warnings = check_steps(result(steps, planned_steps=planned_steps), limit)
    assert codes(warnings) == ["few_steps"] * expected
    if steps == 150:  # 50 steps of 0.5 s are missing, and training gets half of the time
        assert "150 training steps" in warnings[0].message
        assert "--max-time 80s would be enough" in warnings[0].message


def test_best_weights_at_the_start_are_reported() -> None:
    assert codes(check_best_step(result(239, best_step=3), True, False)) == ["best_at_first_steps"]
    assert "step 3 of 239" in check_best_step(result(239, best_step=3), True, False)[0].message
    assert codes(check_best_step(result(239, best_step=200), True, False)) == []
    assert codes(check_best_step(result(239, best_step=0), True, False)) == ["no_better_than_prior"]
    assert "the Gaussian prior alone" in check_best_step(result(239, best_step=0), True, False)[0].message
    assert "the old model" in check_best_step(result(239, best_step=0), True, True)[0].message
    assert codes(check_best_step(result(239, best_step=0), False, False)) == ["no_better_than_initial_weights"]


def test_model_that_is_no_better_than_independent_columns_is_reported() -> None:
    independent = np.random.default_rng(0).normal(5.0, 1.0, 200)
    noise = np.random.default_rng(1).normal(0.0, 0.5, 200)
    assert codes(check_independence(independent + noise, independent, 4)) == ["no_better_than_independent_columns"]
    assert codes(check_independence(independent + noise - 1.0, independent, 4)) == []
    assert codes(check_independence(independent + 1.0, independent, 1)) == []  # a single feature depends on nothing
    assert codes(check_independence(independent[:10], independent[:10], 4)) == []  # too few records to tell


def test_independent_columns_have_their_entropy(tmp_path: Path, rng: np.random.Generator) -> None:
    """Normal columns have 1.42 nats each; labels with probabilities 3/4 and 1/4 have 0.56 nats."""
    x, _ = correlated(rng, 4000, 2)
    label = np.where(rng.random(4000) < 0.25, "b", "a")
    data = prepared(tmp_path, {"x0": x[:, 0], "x1": x[:, 1], "label": label.tolist()})
    nll = compute_independent_nll(data, data.select_rows(Split.CALIBRATION))
    assert nll.shape == (799,)
    assert nll.mean() == pytest.approx(2 * 1.419 + 0.562, abs=0.1)


@pytest.mark.parametrize(
    ("num_used", "num_available", "num_records", "limit", "folds", "expected", "words"),
    [
        (
            6,
            6,
            30,
            None,
            None,
            "alpha_out_of_reach",
            "alpha 5% needs 19 calibration records, and there are 6; --folds 5",
        ),
        (3, 3, 15, None, None, "alpha_out_of_reach", "give at least 19 normal records and --folds 5"),
        (15, 15, 15, None, 5, "alpha_out_of_reach", "give at least 19 normal records"),
        (
            19,
            1280,
            6400,
            25.0,
            None,
            "calibration_cut_short",
            "time for 19 of 1,280 records (these alphas stay in reach: 0.05): allow more time",
        ),
        (500, 1280, 6400, 25.0, None, "calibration_cut_short", "alpha 0.001 need 999"),
        (99, 1280, 6400, 25.0, None, "calibration_cut_short", "(these alphas stay in reach: 0.05, 0.01)"),
        (7, 1280, 6400, 25.0, None, "calibration_cut_short", "(no alert is possible)"),
        (72, 72, 360, 25.0, None, None, ""),
        (1000, 20000, 100000, 25.0, None, None, ""),
    ],
)
def test_alphas_out_of_reach_are_reported(
    num_used: int,
    num_available: int,
    num_records: int,
    limit: float | None,
    folds: int | None,
    expected: str | None,
    words: str,
) -> None:
    warnings = check_calibration(calibration(num_used), num_available, num_records, limit, folds)
    assert codes(warnings) == ([] if expected is None else [expected])
    assert all(words in warning.message for warning in warnings)


def test_each_warning_is_sent_once() -> None:
    messages: list[str] = []
    warnings = WarningList(messages.append)
    warnings.add(TrainingWarning("a", "first"), TrainingWarning("a", "second"), TrainingWarning("b", "third"))
    assert messages == ["warning: first", "warning: third"]
    assert [warning.to_json() for warning in warnings.warnings] == [
        {"code": "a", "message": "first"},
        {"code": "b", "message": "third"},
    ]


def test_thirty_records_say_that_folds_would_help(tmp_path: Path, rng: np.random.Generator) -> None:
    x, _ = correlated(rng, 30)
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(x.T)})
    messages: list[str] = []
    output = train([table], TrainConfig(out=tmp_path / "model", epochs=2, **SMALL), on_message=messages.append)
    (warning,) = (w for w in output.summary["warnings"] if w["code"] == "alpha_out_of_reach")
    assert "alpha 5% needs 19 calibration records, and there are 6" in warning["message"]
    assert "--folds 5 calibrates on all 30 records" in warning["message"]
    assert f"warning: {warning['message']}" in messages
    assert warning["message"] in format_summary(output)
    assert model_store.read_manifest(tmp_path / "model")["training"]["warnings"] == output.summary["warnings"]
    folded = train([table], TrainConfig(out=tmp_path / "folded", folds=5, epochs=2, **SMALL))
    assert "alpha_out_of_reach" not in [w["code"] for w in folded.summary["warnings"]]
    assert "30 for calibration" in format_summary(folded)


def test_independent_columns_are_reported_by_a_training(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = {f"x{i}": rng.normal(size=300) for i in range(3)}
    table = write(tmp_path / "table.parquet", columns)
    output = train([table], TrainConfig(out=tmp_path / "model", epochs=2, gaussians=0, **SMALL))
    assert "no_better_than_independent_columns" in [warning["code"] for warning in output.summary["warnings"]]
