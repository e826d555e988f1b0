"""Warn if a training probably did not learn, or if it cannot give the alerts that users expect.

Each check returns warnings with a stable code for programs and a sentence for people: what happened, and what to do.
The warnings are printed, stored in the manifest of the model directory (`training.warnings`), and shown in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, Calibration
from deformer_stream.counts import format_count
from trainer.alert_distance import RowOrder
from trainer.fit import TrainingResult
from trainer.recipes import MIN_USEFUL_STEPS

MIN_STEPS = 20
"""Number of training steps that a time limit should allow. With fewer, the network has learned next to nothing."""

EARLY_SHARE = 0.1
"""If the best weights are from this first share of the steps, the rest of the training made the model worse."""

MIN_COMPARED_RECORDS = 30
"""Smallest number of held-out records with which the model is compared with independent columns."""

SUGGESTED_FOLDS = 5
"""Number of folds (`--folds`) that is suggested for small tables."""


@dataclass(frozen=True, slots=True)
class TrainingWarning:
    """A warning about a finished training.

    Attributes:
        code: A short constant text, by which programs recognise the warning.
        message: What happened, and what the user can do, as one line.
    """

    code: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Return the warning as it is stored in the manifest."""
        return asdict(self)


class WarningList:
    """The warnings of a training job in the order in which they were found, each code at most once.

    Args:
        on_message: Called with the text of each new warning.
    """

    def __init__(self, on_message: Callable[[str], None]) -> None:
        self.on_message = on_message
        self.warnings: list[TrainingWarning] = []

    def add(self, *warnings: TrainingWarning) -> None:
        """Add warnings and send their texts. A warning whose code is in the list already is dropped."""
        for warning in warnings:
            if all(warning.code != other.code for other in self.warnings):
                self.warnings.append(warning)
                self.on_message(f"warning: {warning.message}")


def check_row_order(row_order: RowOrder | None) -> list[TrainingWarning]:
    """Return a warning if rows near each other in the table resemble each other.

    Args:
        row_order: Whether they do, None if it was not measured.
    """
    if row_order is None or not row_order.has_meaning:
        return []
    message = (
        "records near each other in the table resemble each other (those of other parts of the table are "
        f"{row_order.ratio:.2f} times as far away as those of all parts). If the table is in order of time, later "
        "normal records may raise more alerts than alpha permits: calibrate with later records (deformer-stream "
        "calibrate). If its order has no meaning, shuffle it, so that the alert can use the distance to training "
        "records"
    )
    return [TrainingWarning("row_order", message)]


def check_training(
    result: TrainingResult, limit: float | None, has_prior: bool, has_old_model: bool
) -> list[TrainingWarning]:
    """Return the warnings about the training loop. The arguments are those of `check_steps` and `check_best_step`."""
    return [*check_steps(result, limit), *check_best_step(result, has_prior, has_old_model)]


def check_steps(result: TrainingResult, limit: float | None) -> list[TrainingWarning]:
    """Return a warning if a time limit ended the training before enough steps were done to matter.

    Args:
        result: The result of the training loop.
        limit: The time limit in seconds, or None. Without a limit the schedule has the steps that the user wants.
    """
    if limit is None or result.steps >= min(MIN_USEFUL_STEPS, result.planned_steps):
        return []
    advice = "allow more time"
    if result.step_seconds:
        missing_seconds = (min(MIN_USEFUL_STEPS, result.planned_steps) - result.steps) * result.step_seconds
        # Training gets about half of a limit. The rest is needed for calibration and the other phases.
        advice += f", --max-time {_round_up(limit + 2.0 * missing_seconds)}s would be enough"
    if result.steps < MIN_STEPS:
        message = f"--max-time left next to no time to train (steps: {result.steps}): the model may be poor; {advice}"
    else:
        message = (
            f"--max-time left time for {result.steps} training steps, but about {MIN_USEFUL_STEPS} are needed to "
            f"learn how the features depend on each other: {advice}"
        )
    return [TrainingWarning("few_steps", message)]


def _round_up(seconds: float) -> int:
    """Return a number of seconds rounded up to one that is easy to read: a multiple of 5, or of 60 from 300 on."""
    unit = 60 if seconds >= 300 else 5
    return int(np.ceil(seconds / unit)) * unit


def check_best_step(result: TrainingResult, has_prior: bool, has_old_model: bool) -> list[TrainingWarning]:
    """Return a warning if the weights that were kept are the initial ones or are from the first steps.

    Args:
        result: The result of the training loop.
        has_prior: Whether the model has a Gaussian prior, whose predictions the initial weights reproduce.
        has_old_model: Whether an old model was adapted (`--init-from`), whose weights are the initial ones.
    """
    if result.best_step == 0:
        origin = (
            "the old model" if has_old_model else "the Gaussian prior alone" if has_prior else "the initial weights"
        )
        return [
            TrainingWarning(
                "no_better_than_prior" if has_prior or has_old_model else "no_better_than_initial_weights",
                f"training did not improve on {origin}: validation was {result.initial_validation:.3f} nats before the "
                f"first of {format_count(result.steps, 'step')} and {result.history[-1]['validation']:.3f} nats "
                f"after the last one, so the model predicts what {origin} predicts; give more normal records, or more "
                "time with --max-time",
            )
        ]
    if result.steps >= MIN_STEPS and result.best_step <= EARLY_SHARE * result.steps:
        return [
            TrainingWarning(
                "best_at_first_steps",
                f"training made the model worse from step {result.best_step} of {result.steps} on, so the weights of "
                "that step were kept: the table is probably too small or has repeated records; give more normal "
                "records, or choose a smaller model with --preset tiny",
            )
        ]
    return []


def check_independence(
    nll_by_record: NDArray[np.float64], independent_nll_by_record: NDArray[np.float64], num_scored_features: int
) -> list[TrainingWarning]:
    """Return a warning if the model predicts held-out records no better than independent columns do.

    Args:
        nll_by_record: (N,) −ln p of N held-out records under the model, in nats.
        independent_nll_by_record: (N,) −ln p of the same records if each column has the distribution of its training
            values, independently of the others.
        num_scored_features: Number of features that the model scores.
    """
    if num_scored_features < 2 or len(nll_by_record) < MIN_COMPARED_RECORDS:
        return []
    gains = independent_nll_by_record - nll_by_record
    standard_error = float(gains.std(ddof=1)) / np.sqrt(len(gains))
    if gains.mean() > 2.0 * standard_error:
        return []
    return [
        TrainingWarning(
            "no_better_than_independent_columns",
            f"the model predicts held-out records no better ({nll_by_record.mean():.3f} nats) than independent columns "
            f"({independent_nll_by_record.mean():.3f} nats): it has not learned how the features depend on each other, "
            "so alerts only show unusual single values; give more records or more time, or check that the columns of "
            "a row belong to the same moment",
        )
    ]


def check_calibration(
    calibration: Calibration, num_available: int, num_records: int, limit: float | None, num_folds: int | None
) -> list[TrainingWarning]:
    """Return a warning if the calibration has too few records for alerts at one of `DEFAULT_ALPHAS`.

    Args:
        calibration: The calibration of the alert rule.
        num_available: Number of calibration records of the table, in all folds together.
        num_records: Number of all records of the table that may be used for training or calibration.
        limit: The time limit in seconds, or None.
        num_folds: The value of `--folds`, or None.
    """
    num_used = len(calibration.scores)
    unreachable = calibration.find_unreachable_alphas(DEFAULT_ALPHAS)  # needed records by alpha
    reachable = [f"{alpha:g}" for alpha in DEFAULT_ALPHAS if alpha not in unreachable]
    if limit is not None and num_used < num_available:
        cut = {alpha: num_needed for alpha, num_needed in unreachable.items() if num_needed <= num_available}
        if cut:
            in_reach = f"these alphas stay in reach: {', '.join(reachable)}" if reachable else "no alert is possible"
            needs = " and ".join(f"alpha {alpha:g} need {num_needed:,}" for alpha, num_needed in cut.items())
            return [
                TrainingWarning(
                    "calibration_cut_short",
                    f"alerts with {needs} calibration records; --max-time left time for {num_used:,} of "
                    f"{format_count(num_available, 'record')} ({in_reach}): allow more time",
                )
            ]
    if max(DEFAULT_ALPHAS) not in unreachable:
        return []
    # Not even the largest alpha is in reach, so the model can raise no alert.
    alpha, num_needed = max(DEFAULT_ALPHAS), unreachable[max(DEFAULT_ALPHAS)]
    if num_folds is None and num_records >= num_needed:
        advice = f"--folds {SUGGESTED_FOLDS} calibrates on all {num_records:,} records"
    else:
        advice = f"give at least {num_needed:,} normal records"
        advice += "" if num_folds is not None else f" and --folds {SUGGESTED_FOLDS}"
    return [
        TrainingWarning(
            "alpha_out_of_reach",
            f"no alert is possible: alpha {alpha:.0%} needs {num_needed} calibration records, and there are "
            f"{num_used}; {advice}",
        )
    ]
