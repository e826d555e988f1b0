"""Run a training job from Parquet tables to a model directory: prepare, train, calibrate, evaluate, write.

Under a time limit (`--max-time`), the job measures before training how long the phases after it take. It then reserves
this time and reduces the batch and the numbers of records as needed.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, MAX_CALIBRATION_RECORDS, Calibration
from deformer_stream.calibration.seen_records import RecordSet, find_seen_records
from deformer_stream.calibration.torch_scoring import RecordScores
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.windows import Window
from trainer import checkpoint, finetune, gaussian_prior
from trainer.budget import (
    Costs,
    Phase,
    PhaseCosts,
    RecordCounts,
    TimeBudget,
    choose_batch_size,
    compute_min_counts,
    measure_seconds_per_record,
    plan_record_counts,
)
from trainer.calibrate import BATCH_SIZE as CALIBRATION_BATCH_SIZE
from trainer.calibrate import (
    Order,
    build_calibration,
    choose_order,
    compute_statistics,
    sample_rows,
    score_calibration_records,
    split_folds,
)
from trainer.data import DataOptions, PreparedTable, Split, prepare_table
from trainer.distributed import Ranks
from trainer.evaluate import BATCH_SIZE as EVALUATION_BATCH_SIZE
from trainer.evaluate import HeldOutLikelihood, evaluate_held_out
from trainer.exemplars import MAX_REFERENCE_RECORDS, add_ranking, measure_distance_seconds
from trainer.fit import (
    MIN_VALIDATION_ROWS,
    SINGLE_PROCESS,
    VALIDATION_ORDERS,
    Recipe,
    TrainingResult,
    TrainingRun,
    TrainingStatus,
)
from trainer.gaussian_prior import CrossFittedPriors
from trainer.outliers import drop_outliers
from trainer.recipes import SHAPE_HYPERPARAMETERS, choose_exemplars, choose_gaussians, choose_recipe, model_config
from trainer.settings import TrainConfig, parse_periods, split_names

HELD_OUT_ROWS, HELD_OUT_ORDERS = 2000, 4
"""Largest number of records of the held-out figures, and the number of orders in which each is scored."""

AFTER_SHARE = 0.4
"""Share of a time limit that is reserved for calibration, ranking and held-out figures together.

More is reserved only if the smallest possible numbers of records take longer.
"""

PRIOR_SHARE = 0.15
"""Share of a time limit after which no larger number of Gaussians is tried for the Gaussian prior."""

MIN_STEPS = 20
"""Number of training steps that a time limit should allow.

The batch size is reduced until this number of steps fits into the limit. If training ends with fewer steps, a message
tells the user.
"""

SAFETY_FACTOR = 1.1
"""Factor by which measured costs are multiplied, because measurements on a few records are too low."""

FIXED_SECONDS, FIXED_SECONDS_PER_FEATURE = 2.0, 0.002
"""Estimated seconds to render the report, write the model directory and end the process.

The second number is added for each feature.
"""


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    """The results of a finished training job.

    Attributes:
        directory: The model directory that was written.
        fingerprint: The model's fingerprint: a hexadecimal digest that identifies it.
        data: The prepared table.
        model: The trained model, with exemplars (stored training records) for the ranking of complete records.
        training_result: The result of the training loop.
        calibration: The calibration of the alert rule.
        held_out: The likelihood of records that were not used for training.
        summary: The entry `training` of the manifest in the model directory.
    """

    directory: Path
    fingerprint: str
    data: PreparedTable
    model: DEformer
    training_result: TrainingResult
    calibration: Calibration
    held_out: HeldOutLikelihood
    summary: dict[str, Any]


class StopSignals:
    """A context manager in which SIGINT and SIGTERM request a stop after the current training step.

    Calling the object returns whether a signal was received, so it can be passed as `should_stop`. A second signal of
    the same kind ends the process at once.

    Attributes:
        received: Number of the signal that was received, 0 if none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._handler_before_by_signal: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Return whether SIGINT or SIGTERM was received."""
        return self.received != 0

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handler_before_by_signal[number] = signal.signal(number, self._request_stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handler_before_by_signal.items():
            signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Store the number of a received signal, and restore the previous handler for the next signal of its kind.

        The previous handler usually ends the process, so a user can force the end with a second signal.
        """
        self.received = number
        signal.signal(number, self._handler_before_by_signal[number])


@dataclass(frozen=True, slots=True)
class _PlannedRun:
    """A training run that is ready to start.

    Attributes:
        run: The training run.
        costs: Measured costs of the phases after training: calibration, ranking and held-out figures. None without a
            time limit.
    """

    run: TrainingRun
    costs: PhaseCosts | None


def train(
    tables: Sequence[Path],
    settings: TrainConfig,
    *,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
    on_message: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    budget: TimeBudget | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainingOutput:
    """Train a model on tables, calibrate and evaluate it, and write the model directory.

    Args:
        tables: Parquet files and folders of Parquet files.
        settings: All options of `deformer-train`.
        on_prepared: Called once with the prepared table, before training.
        on_status: Called after every training step.
        on_message: Called with one line of text at the beginning of each phase, and for its progress.
        should_stop: Called after every training step. If it returns True, a checkpoint is written and training stops.
        budget: The time that the job may take; by default `settings.max_time` from now.
        ranks: The processes that train together. This process must be the first; the others call `run_worker_rank`.

    Returns:
        The model, its calibration and its evaluation, which were also written to the model directory.

    Raises:
        DeformerError: A file or an option cannot be used.
        Interrupted: `should_stop` returned True.
    """
    from trainer.report import render

    budget = budget or TimeBudget(settings.max_time)
    with _lock_working_folder(settings.out) as folder:
        planned = _prepare_run(tables, settings, folder, budget, ranks, on_prepared, on_message)
        run, data = planned.run, planned.run.data
        order = choose_order(settings.order, data)
        earlier_records = _read_earlier_records(settings)  # before the training, because the directory may be damaged
        result = _train_model(planned, should_stop, on_status)
        if ranks.world_size > 1:
            # The other processes have finished, so their shared clock (a collective operation) can no longer be read.
            budget.clock = run.budget.clock = time.monotonic
        if result.steps < MIN_STEPS and budget.limit is not None:
            on_message(
                f"--max-time left next to no time to train (steps: {result.steps}): "
                "the model may be poor; allow more time"
            )
        final_phases = _FinalPhases(settings, budget, planned.costs, on_message)
        scores = final_phases.score_calibration_records(result.model, data, order, settings.seed)
        # Cross-conformal calibration: the records of each further fold are scored by a model trained without them.
        fold_tables = split_folds(data, settings.folds, settings.seed) if settings.folds else ()
        for number, fold_data in enumerate(fold_tables, 2):
            on_message(f"fold {number} of {settings.folds}")
            fold_run = _create_fold_run(fold_data, settings, number, folder, budget, final_phases)
            fold_model = _train_model(fold_run, should_stop).model
            scores += final_phases.score_calibration_records(fold_model, fold_data, order, settings.seed + number)
        calibration = build_calibration(scores, data.schema, order, settings.contamination, data.ties)
        model = final_phases.add_ranking(result.model, data)
        held_out = final_phases.evaluate_held_out(model, data)
        final_phases.warn_if_unreachable(calibration, data)
        on_message("writing the report and the model directory")
        summary = _summarize_training(settings, data, run.recipe, result, held_out, budget, str(model.device))
        summary["records_used"] = {
            "calibration": len(scores.statistics),
            "exemplars": model.config.exemplars,
            "ranking": final_phases.num_ranking_records,
            "held_out": len(held_out.nll_by_record),
        }
        page = render(data, result, calibration, held_out, summary)
        seen_records = find_seen_records(
            data.schema,
            data.values,
            is_training=np.isin(data.split, (Split.TRAIN, Split.VALIDATION)),
            is_calibration=data.split == Split.CALIBRATION,
            earlier=earlier_records,
        )
        fingerprint = model_store.write(settings.out, model, calibration, summary, page, seen_records)
        shutil.rmtree(folder)
    return TrainingOutput(settings.out, fingerprint, data, model, result, calibration, held_out, summary)


def run_worker_rank(
    tables: Sequence[Path], settings: TrainConfig, should_stop: Callable[[], bool], budget: TimeBudget, ranks: Ranks
) -> None:
    """Run the training loop in a process that is not the first: compute gradients of a part of each batch.

    The first process calls `train` at the same time. It alone writes files and calibrates the model.

    Args:
        tables: Parquet files and folders, as in `train`.
        settings: All options of `deformer-train`, as in `train`.
        should_stop: Called after every training step. If it returns True, all processes stop.
        budget: The time that training may take, with the same clock in all processes.
        ranks: The processes that train together.

    Raises:
        DeformerError: A file or an option cannot be used.
        Interrupted: `should_stop` returned True in one of the processes.
    """
    # Each process writes its own matrix of the table's values. That of this process is deleted after training.
    with tempfile.TemporaryDirectory() as folder:
        _train_model(_prepare_run(tables, settings, Path(folder), budget, ranks), should_stop)


class _FinalPhases:
    """The phases after training: calibration, ranking and held-out figures, within the time that is left.

    Calibration scores normal records for the alert rule. Ranking adds exemplars (stored training records) and typical
    values of normal records to the model, by which complete records are ranked. Held-out figures are the likelihoods of
    records that training has not used, for the report.

    Args:
        settings: All options of `deformer-train`.
        budget: The time that the job may take.
        costs: Measured costs of the phases. None without a time limit; all records are then used.
        on_message: Called with a line of text at the beginning of each phase, and for its progress.

    Attributes:
        num_ranking_records: Number of records from which the typical values of normal records were computed.
    """

    def __init__(
        self, settings: TrainConfig, budget: TimeBudget, costs: PhaseCosts | None, on_message: Callable[[str], None]
    ) -> None:
        self.settings, self.budget, self.costs, self.on_message = settings, budget, costs, on_message
        self.num_ranking_records = 0

    def score_calibration_records(self, model: DEformer, data: PreparedTable, order: Order, seed: int) -> RecordScores:
        """Score as many calibration records as the time permits, at most `MAX_CALIBRATION_RECORDS`.

        Args:
            model: The trained model.
            data: The prepared table, in which the records of `Split.CALIBRATION` are scored.
            order: The arrival-order distribution from which the order of each record's readings is drawn: "arrival"
                (the logged order), "random" or "schema" (the order of the features).
            seed: Seed of the choice of records and of random orders.
        """
        rows = data.select_rows(Split.CALIBRATION)
        if self.costs is None:  # there is no time limit
            rows = sample_rows(rows, seed)
            phase = self._start_phase("calibrating", len(rows), min_records=0, later_seconds=0.0)
            return score_calibration_records(model, data, rows, order, seed, should_continue=phase.should_continue)
        maximum = count_all_records(data)
        minimum = compute_min_counts(maximum)
        num_records = self._plan(maximum).calibration
        rows = _shuffle(rows, seed)[:num_records]
        # Time is kept for ranking and held-out figures, which follow, with their smallest numbers of records.
        later_seconds = replace(minimum, calibration=0).estimate_seconds(self.costs)
        phase = self._start_phase("calibrating", num_records, minimum.calibration, later_seconds, maximum.calibration)
        batch_size = choose_batch_size(self.costs.calibration, CALIBRATION_BATCH_SIZE)
        return score_calibration_records(model, data, rows, order, seed, batch_size, phase.should_continue)

    def add_ranking(self, model: DEformer, data: PreparedTable) -> DEformer:
        """Add exemplars (stored training records) and typical values of normal records to the model.

        By comparison with them the model ranks complete records from normal to anomalous. As many records as the time
        permits are used for the typical values.

        Returns:
            The same model, which was changed in place.
        """
        max_exemplars, seed = choose_exemplars(self.settings), self.settings.seed
        maximum = replace(count_all_records(data), calibration=0)  # calibration is finished
        self.num_ranking_records = maximum.ranking if max_exemplars else 0
        if self.costs is None:  # there is no time limit
            phase = self._start_phase("ranking", maximum.ranking, min_records=0, later_seconds=0.0)
            return add_ranking(model, data, max_exemplars, seed, should_continue=phase.should_continue)
        minimum = compute_min_counts(maximum)
        num_records = self._plan(maximum).ranking
        # Time is kept for the held-out figures, which follow, with their smallest number of records.
        later_seconds = replace(minimum, ranking=0).estimate_seconds(self.costs)
        phase = self._start_phase("ranking", num_records, minimum.ranking, later_seconds, maximum.ranking)
        self.num_ranking_records = min(self.num_ranking_records, num_records)
        # A record is compared with the exemplars, and also scored like a calibration record.
        seconds_per_record = self.costs.ranking + self.costs.calibration
        batch_size = choose_batch_size(seconds_per_record, MAX_REFERENCE_RECORDS)
        return add_ranking(model, data, max_exemplars, seed, num_records, batch_size, phase.should_continue)

    def evaluate_held_out(self, model: DEformer, data: PreparedTable) -> HeldOutLikelihood:
        """Compute the likelihood of calibration records, which training has not used, for the report.

        The time that is left determines how many records are used, and how many orders of the readings of each.
        """
        rows, seed = data.select_rows(Split.CALIBRATION), self.settings.seed
        order_seed = seed + 1  # for other random orders than in validation
        if self.costs is None:  # there is no time limit
            sampled = sample_rows(rows, seed, HELD_OUT_ROWS)
            phase = self._start_phase("held-out figures", len(sampled), min_records=0, later_seconds=0.0)
            return evaluate_held_out(
                model, data, sampled, HELD_OUT_ORDERS, order_seed, should_continue=phase.should_continue
            )
        maximum = replace(count_all_records(data), calibration=0, ranking=0)
        num_passes = self._plan(maximum).held_out_passes
        # A pass is one record in one order. With few passes, one order of many records gives a more precise mean than
        # several orders of few records.
        has_many_passes = num_passes >= 100 * HELD_OUT_ORDERS or num_passes == maximum.held_out_passes
        num_orders = HELD_OUT_ORDERS if has_many_passes else 1
        num_records = max(1, num_passes // num_orders)
        num_available = min(len(rows), HELD_OUT_ROWS)
        phase = self._start_phase(
            "held-out figures", num_records, min_records=0, later_seconds=0.0, num_available=num_available
        )
        batch_size = choose_batch_size(self.costs.held_out, EVALUATION_BATCH_SIZE)
        sampled = sample_rows(rows, seed, num_records)
        return evaluate_held_out(
            model, data, sampled, num_orders, order_seed, batch_size=batch_size, should_continue=phase.should_continue
        )

    def warn_if_unreachable(self, calibration: Calibration, data: PreparedTable) -> None:
        """Send a message for each false-alarm rate in `DEFAULT_ALPHAS` at which the time limit makes alerts impossible.

        An alert rule with false-alarm rate alpha needs about 1 / alpha calibration records. If the table itself has
        fewer than that, there is no message for this alpha.
        """
        num_available = len(data.select_rows(Split.CALIBRATION))
        for alpha, num_needed in calibration.find_unreachable_alphas(DEFAULT_ALPHAS).items():
            if self.costs is not None and num_needed <= num_available:
                self.on_message(
                    f"alerts with alpha {alpha:g} need {num_needed:,} calibration records; --max-time left time for "
                    f"{len(calibration.scores):,} of {num_available:,} records: allow more time"
                )

    def _plan(self, maximum: RecordCounts) -> RecordCounts:
        """Return how many records the phases after training can use in the time that is left.

        The phases are calibration, ranking and held-out figures.

        Args:
            maximum: The numbers of records without a time limit, 0 for phases that are finished.
        """
        if self.costs is None:  # there is no time limit
            return maximum
        # Time that does not depend on the number of records: report, model files, end of the process.
        fixed_seconds = self.costs.fixed
        return plan_record_counts(self.costs, self.budget.remaining - fixed_seconds, maximum)

    def _start_phase(
        self, name: str, num_records: int, min_records: int, later_seconds: float, num_available: int | None = None
    ) -> Phase:
        """Send a message that a phase begins, and return the object that ends the phase at its deadline.

        Args:
            name: What the phase does, such as "calibrating".
            num_records: Number of records that it uses.
            min_records: Number of records that it uses even if the time is over.
            later_seconds: Seconds that must be left at its end for the phases after it.
            num_available: Number of records that it would use without a time limit. None if there is no limit.
        """
        total = "" if num_available in (None, num_records) else f" of {num_available:,}"
        self.on_message(f"{name}: {num_records:,}{total} records")
        deadline, clock = math.inf, self.budget.clock
        if self.costs is not None:
            limit_at = clock() + self.budget.remaining
            deadline = limit_at - self.costs.fixed - later_seconds  # fixed: report, model files, end of the process
        return Phase(name, num_records, min_records, deadline, clock, self.on_message)


def count_all_records(data: PreparedTable) -> RecordCounts:
    """Return the numbers of records that the phases after training use if the time limit leaves enough time.

    The phases are calibration, ranking and held-out figures. All of them score calibration records.
    """
    num_calibration = int((data.split == Split.CALIBRATION).sum())
    return RecordCounts(
        calibration=min(num_calibration, MAX_CALIBRATION_RECORDS),
        ranking=min(num_calibration, MAX_REFERENCE_RECORDS),
        held_out_passes=min(num_calibration, HELD_OUT_ROWS) * HELD_OUT_ORDERS,  # a pass is one record in one order
    )


def _shuffle(rows: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return row numbers in random order. If the time ends early, the rows used so far are then a random sample."""
    return np.random.default_rng([seed, 0xCA12]).permutation(rows)


def _train_model(
    planned: _PlannedRun,
    should_stop: Callable[[], bool],
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
) -> TrainingResult:
    """Run the training loop. Under a time limit, it ends early enough for calibration and the other later phases.

    Args:
        planned: The training run with the measured costs of the phases after it.
        should_stop: Called after every training step. If it returns True, a checkpoint is written and training stops.
        on_status: Called after every training step.

    Returns:
        The trained model, with the history of the losses.

    Raises:
        Interrupted: `should_stop` returned True.
        ConfigError: Training diverged.
    """

    def compute_costs(model: DEformer) -> Costs:
        """Return the seconds to reserve for the work after training, and the seconds to validate a record.

        The model is not used, because the costs were measured when the run was planned.
        """
        if planned.costs is None or planned.run.budget.limit is None:  # there is no time limit
            return Costs(after=0.0, record=0.0)
        after = _compute_reserve(planned.costs, planned.run.data, planned.run.budget.limit)
        return Costs(after, record=planned.costs.held_out)  # validation computes the same likelihoods

    return planned.run.run(should_stop, on_status, compute_costs)


def _compute_reserve(costs: PhaseCosts, data: PreparedTable, limit: float) -> float:
    """Return the seconds to reserve for the phases after training: calibration, ranking and held-out figures.

    The result is the time of the phases with all records, but at most `AFTER_SHARE` of the time limit, and at least the
    time of the phases with the smallest numbers of records.

    Args:
        costs: Measured costs of the phases.
        data: The prepared table.
        limit: The time limit in seconds.
    """
    maximum = count_all_records(data)
    max_seconds = maximum.estimate_seconds(costs)
    min_seconds = compute_min_counts(maximum).estimate_seconds(costs)
    allowed_seconds = AFTER_SHARE * limit - costs.fixed  # fixed: report, model files, end of the process
    return costs.fixed + max(min(max_seconds, allowed_seconds), min_seconds)


def _prepare_run(
    tables: Sequence[Path],
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    ranks: Ranks,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_message: Callable[[str], None] = lambda line: None,
) -> _PlannedRun:
    """Prepare the table and create the training run. With `--resume`, restore it from the checkpoint if there is one.

    Args:
        tables: Parquet files and folders of Parquet files.
        settings: All options of `deformer-train`.
        folder: An existing folder for the matrix of the table's values. Checkpoints are in the working folder of
            `--out`.
        budget: The time that the job may take.
        ranks: The processes that train together.
        on_prepared: Called once with the prepared table.
        on_message: Called with a line of text for the user.

    Returns:
        The run, with the measured costs of the phases after training (calibration, ranking, held-out figures).

    Raises:
        DeformerError: A file or an option cannot be used.
    """
    checkpoint_folder = _get_working_folder(settings.out)
    state = _load_previous_run(checkpoint_folder, settings)  # None if no interrupted run is to be continued
    old_model = _read_old_model(settings)  # None without --init-from
    data = prepare_table(tables, _create_data_options(settings, old_model), folder)
    data = drop_outliers(data, settings.contamination, settings.seed)
    on_prepared(data)
    choose_order(settings.order, data)  # raises before training if the order is impossible
    first_budget = budget.create_equal_part(settings.folds or 1)  # with --folds, several models share the time
    planned = _create_run(data, settings, checkpoint_folder, first_budget, old_model, state, ranks, on_message)
    if state is not None:
        planned.run.restore(state)
        on_message(f"continuing at step {planned.run.step} of {planned.run.steps}")
    elif settings.resume:
        on_message(f"there is nothing to resume in {checkpoint_folder}: starting from the beginning")
    return planned


def _create_run(
    data: PreparedTable,
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    old_model: DEformer | None,
    state: dict[str, Any] | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    on_message: Callable[[str], None] = lambda line: None,
) -> _PlannedRun:
    """Create the model, its Gaussian prior (mixture fitted before training) and the training run.

    Under a time limit, the costs of the phases after training are measured, and the batch is reduced if necessary.

    Args:
        data: The prepared table.
        settings: All options of `deformer-train`.
        folder: An existing folder for checkpoints.
        budget: The time that training may take.
        old_model: The model that is adapted (`--init-from`). None to train a new model.
        state: JSON state of the interrupted run that is continued. None to start from the beginning.
        ranks: The processes that train together.
        on_message: Called with a line of text for the user.

    Returns:
        The run, with the measured costs of the phases after training. The state is not restored yet.
    """
    device = ranks.choose_device(model_store.resolve_device(settings.device))
    recipe = choose_recipe(settings, int((data.split == Split.TRAIN).sum()))
    torch.manual_seed(settings.seed)
    if old_model is None:
        model, priors = _create_model(data, settings, budget, state)
    else:
        model, priors = _adapt_model(old_model, data, settings.seed)
    if priors is not None:
        model.gaussians = priors.full
        priors.by_fold.to(device)
    model = model.to(device)

    def create_run(recipe: Recipe) -> TrainingRun:
        """Return the training run with the given hyperparameters."""
        identity = _describe_identity(settings, data, model.config, recipe) | {"processes": ranks.world_size}
        return TrainingRun(data, model, recipe, settings.seed, folder, budget, identity, priors, ranks)

    run = create_run(recipe)
    if budget.limit is None:
        return _PlannedRun(run, None)
    costs = _measure_phase_costs(run.averaged_model, data, settings, budget.clock)
    # An interrupted run is continued with its own batch.
    batch = state["identity"]["batch"] if state is not None else _choose_affordable_batch(run, costs, on_message)
    if batch != recipe.batch:
        run = create_run(replace(recipe, batch=batch))
    return _PlannedRun(run, costs)


def _create_model(
    data: PreparedTable, settings: TrainConfig, budget: TimeBudget, state: dict[str, Any] | None
) -> tuple[DEformer, CrossFittedPriors | None]:
    """Fit the Gaussian prior (a mixture of Gaussians) to the table, and create a model with new weights.

    The prior is fitted with more and more Gaussians, as long as they improve it and there is time.

    Args:
        data: The prepared table.
        settings: All options of `deformer-train`.
        budget: The time limit of the run. Fitting the prior may use the share `PRIOR_SHARE` of it.
        state: JSON state of the interrupted run that is continued. None to start from the beginning.

    Returns:
        (model, priors). `priors` contains the prior and its variants that are used in training. It is None if the model
        has no prior.
    """
    # A run that is continued must get the same prior again, so its number of Gaussians must not depend on the time.
    max_gaussians = choose_gaussians(settings) if state is None else state["identity"]["gaussians"]

    def is_time_short() -> bool:
        """Return whether to stop adding Gaussians to the prior, because the time for fitting it is used up."""
        return state is None and budget.is_share_used(PRIOR_SHARE)

    priors = gaussian_prior.fit_priors(data, max_gaussians, settings.seed, is_time_short)
    config = model_config(settings, data.schema.has_repeating_sensors)
    num_gaussians = priors.num_components if priors else 0
    return DEformer(data.schema, replace(config, gaussians=num_gaussians)), priors


def _measure_phase_costs(
    model: DEformer, data: PreparedTable, settings: TrainConfig, clock: Callable[[], float]
) -> PhaseCosts:
    """Measure on a few records how long calibration, ranking and held-out figures take.

    Args:
        model: The model before training, which takes as long as the trained one.
        data: The prepared table.
        settings: All options of `deformer-train`.
        clock: A function that returns the current time in seconds.

    Returns:
        The seconds per record of each phase, increased by a safety factor.
    """
    rows = data.select_rows(Split.CALIBRATION)
    order = choose_order(settings.order, data)
    calibration_seconds = measure_seconds_per_record(
        lambda num_records: compute_statistics(model, data, rows[:num_records], order, seed=0), clock, len(rows)
    )
    held_out_seconds = measure_seconds_per_record(
        lambda num_records: evaluate_held_out(model, data, rows[:num_records], num_orders=1, seed=0), clock, len(rows)
    )
    ranking_seconds = measure_distance_seconds(model, data, choose_exemplars(settings), settings.seed, clock)
    return PhaseCosts(
        calibration=SAFETY_FACTOR * calibration_seconds,
        ranking=SAFETY_FACTOR * ranking_seconds,
        held_out=SAFETY_FACTOR * held_out_seconds,
        fixed=FIXED_SECONDS + FIXED_SECONDS_PER_FEATURE * len(data.schema),
    )


def _choose_affordable_batch(run: TrainingRun, costs: PhaseCosts, on_message: Callable[[str], None]) -> int:
    """Return the number of records per batch with which the time limit allows at least `MIN_STEPS` training steps.

    It is the batch of the recipe or a smaller power of two. If the batch is reduced, or if the limit is too short even
    for one step with one record, a message is sent.

    Args:
        run: The training run with the batch of its recipe.
        costs: Measured costs of the phases after training.
        on_message: Called with a line of text for the user.
    """
    budget, recipe = run.budget, run.recipe
    limit = budget.limit or math.inf
    seconds_per_record = measure_seconds_per_record(
        run.measure_step_seconds, budget.clock, min(recipe.batch, len(run.train_rows)), warm_up=False
    )
    # There are at least two validations: of the initial weights and of the trained ones.
    validation_seconds = 2 * MIN_VALIDATION_ROWS * VALIDATION_ORDERS * costs.held_out
    min_final_seconds = compute_min_counts(count_all_records(run.data)).estimate_seconds(costs) + costs.fixed
    # The shortest training is one step with one record in each of its batches.
    min_limit = budget.elapsed + seconds_per_record * recipe.accumulate + validation_seconds + min_final_seconds
    if min_limit > limit:
        on_message(
            f"--max-time {limit:g}s is too short for this table on this machine, which needs at least about "
            f"{min_limit:.0f} s; training for one step and finishing as early as possible"
        )
        return 1
    training_seconds = budget.remaining - _compute_reserve(costs, run.data, limit) - validation_seconds
    # Number of records in each batch if MIN_STEPS steps of `accumulate` batches take all of this time.
    num_affordable = training_seconds / (MIN_STEPS * recipe.accumulate * max(seconds_per_record, 1e-9))
    if num_affordable >= recipe.batch:
        return recipe.batch
    batch = 1 << int(math.log2(max(num_affordable, 1.0)))  # the largest power of two that is affordable
    on_message(f"the batch is reduced from {recipe.batch} to {batch} records, so that --max-time allows enough steps")
    return batch


def _create_fold_run(
    fold_data: PreparedTable,
    settings: TrainConfig,
    number: int,
    folder: Path,
    budget: TimeBudget,
    final_phases: _FinalPhases,
) -> _PlannedRun:
    """Create the training run of one further model for cross-conformal calibration (`--folds`).

    In cross-conformal calibration, one model is trained for each fold of the records, without the fold. The first model
    is trained by the main run. The runs of the others cannot be resumed.

    Args:
        fold_data: The table, with the fold as its calibration records.
        settings: All options of `deformer-train`.
        number: Number of the model, from 2 to `settings.folds`.
        folder: The working folder of the job.
        budget: The time that the job may take. The models that remain share it equally.
        final_phases: The phases after training, for which time is reserved.

    Returns:
        The run, with the measured costs of the phases after training.
    """
    fold_folder = folder / f"fold-{number}"
    fold_folder.mkdir(exist_ok=True)
    final_seconds = 0.0
    if final_phases.costs is not None:
        # Calibration is part of each model's share of the time. Ranking and held-out figures follow the last model.
        minimum = replace(compute_min_counts(count_all_records(fold_data)), calibration=0)
        final_seconds = minimum.estimate_seconds(final_phases.costs) + final_phases.costs.fixed
    num_remaining = (settings.folds or 1) + 1 - number  # models that are not trained, including this one
    fold_budget = budget.create_equal_part(num_remaining, final_seconds)
    # Another seed gives each model its own random numbers.
    fold_settings = settings.model_copy(update={"seed": settings.seed + number})
    return _create_run(fold_data, fold_settings, fold_folder, fold_budget, _read_old_model(settings))


@contextmanager
def _lock_working_folder(out: Path) -> Iterator[Path]:
    """Create the working folder of a job and lock it while the context is open, so that no other process uses it.

    The folder `DIR.training`, next to the model directory `DIR`, contains the matrix of the table's values and the
    checkpoint. It is deleted when the context closes, unless it contains the checkpoint of an interrupted run.

    Args:
        out: The model directory (`--out`).

    Raises:
        ConfigError: The folder cannot be written, or another process is using it.
    """
    model_store.check_output_directory(out)
    folder = _get_working_folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"--out {out}: the working folder {folder} cannot be written ({error.strerror}); "
            "choose a model directory in another folder"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}: another deformer-train process is using {folder}; "
                "wait until it has ended, or choose another model directory"
            ) from None
        try:
            yield folder
        finally:
            if folder.exists() and not (folder / checkpoint.FILE_NAME).exists():
                shutil.rmtree(folder)


def _get_working_folder(out: Path) -> Path:
    """Return the working folder of a training job: the path of the model directory with `.training` appended."""
    return out.absolute().with_name(out.absolute().name + ".training")


def _load_previous_run(folder: Path, settings: TrainConfig) -> dict[str, Any] | None:
    """Return the JSON state of the interrupted training run in a folder; None if the folder contains no checkpoint.

    Raises:
        ConfigError: There is an interrupted run, and the option `--resume` is not set.
        InputError: The checkpoint is damaged.
    """
    state = checkpoint.load_state(folder)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{folder} contains an interrupted training run (step {state['step']} of {state['steps']}): "
            f"add --resume to continue it, or delete the folder to train from the beginning"
        )
    return state


def _create_data_options(settings: TrainConfig, old_model: DEformer | None) -> DataOptions:
    """Return the options for reading the training tables, converted from the options of the command line.

    Args:
        settings: All options of `deformer-train`.
        old_model: The model that is adapted (`--init-from`), or None. Its features are kept.
    """
    window = None
    if settings.window is not None:
        window = Window(round(settings.window * 1e6), settings.slots or 1)  # seconds to microseconds
    return DataOptions(
        layout=settings.layout,
        label=settings.label,
        normal=settings.normal,
        exclude=split_names(settings.exclude),
        context=split_names(settings.context),
        discrete=split_names(settings.discrete),
        continuous=split_names(settings.continuous),
        cycle=parse_periods(settings.cycle),
        # With --folds, the calibration records of the first model are one fold.
        calibration_share=1 / settings.folds if settings.folds else settings.calibration_share,
        seed=settings.seed,
        window=window,
        once=split_names(settings.once),
        base=old_model.schema if old_model is not None else None,
        ties=settings.ties,
        units=settings.units,
    )


def _read_old_model(settings: TrainConfig) -> DEformer | None:
    """Read the model that is adapted to the tables (`--init-from`).

    Returns:
        The model in training mode; None if the option is not set.

    Raises:
        ConfigError: The settings contain hyperparameters of the network, which are fixed by that model.
    """
    if settings.init_from is None:
        return None
    for name in ("gaussians", *SHAPE_HYPERPARAMETERS):
        if getattr(settings, name, None) is not None:
            raise ConfigError(
                f"the setting {name} cannot be combined with --init-from, because the model in {settings.init_from} "
                f"determines it; remove the setting {name}"
            )
    return model_store.read(settings.init_from).model.train()


def _adapt_model(old_model: DEformer, data: PreparedTable, seed: int) -> tuple[DEformer, CrossFittedPriors | None]:
    """Create a model from the weights of an old model, and adapt the old Gaussian prior to the table (`--init-from`).

    Args:
        old_model: The model that is adapted.
        data: The prepared table, whose schema begins with the features of the old model.
        seed: Seed of folds, noise and imputed readings.

    Returns:
        (model, priors). The model has additional weights for new features. `priors` are the adapted prior (mixture of
        Gaussians) and its variants that are used in training, None if the old model has no prior.
    """
    priors = None
    if old_model.gaussians is not None:
        priors = finetune.adapt_priors(old_model.gaussians, data, len(old_model.schema), seed)
    model = finetune.extend_model(old_model, data.schema)
    model.ranking = old_model.ranking  # `add_ranking` keeps the old exemplars and adds those of this table
    return model, priors


def _describe_identity(
    settings: TrainConfig, data: PreparedTable, config: ModelConfig, recipe: Recipe
) -> dict[str, Any]:
    """Return what must be unchanged when an interrupted run is continued: data, seed, hyperparameters and old model.

    The keys are names for an error message. The values are as JSON would return them, so that they can be compared with
    those of a checkpoint.

    Args:
        settings: All options of `deformer-train`.
        data: The prepared table.
        config: Hyperparameters of the network.
        recipe: Hyperparameters of training.
    """
    old_fingerprint = None
    if settings.init_from is not None:
        old_fingerprint = model_store.read_manifest(settings.init_from)["fingerprint"]
    identity = {"the model of --init-from": old_fingerprint, "the data's fingerprint": data.fingerprint}
    identity |= {"seed": settings.seed, "max_time": settings.max_time}  # a time limit changes the schedule
    hyperparameters = asdict(config) | asdict(recipe)
    return identity | {  # JSON has lists, but no tuples
        name: list(value) if isinstance(value, tuple) else value for name, value in hyperparameters.items()
    }


def _read_earlier_records(settings: TrainConfig) -> tuple[RecordSet, ...]:
    """Return fingerprints of the records that the old model was trained on, which is adapted (`--init-from`).

    The adapted model has seen them, too. The result is empty without the option, and if the old model was written by a
    release that did not store fingerprints.
    """
    if settings.init_from is None:
        return ()
    manifest = model_store.read_manifest(settings.init_from)
    seen_records = model_store.read_seen_records(settings.init_from, manifest)
    return () if seen_records is None else seen_records.training


def _summarize_training(
    settings: TrainConfig,
    data: PreparedTable,
    recipe: Recipe,
    result: TrainingResult,
    held_out: HeldOutLikelihood,
    budget: TimeBudget,
    device: str,
) -> dict[str, Any]:
    """Return the entry `training` of the model's manifest: facts about the data, the training and its quality.

    The values can be written as JSON.

    Args:
        settings: All options of `deformer-train`.
        data: The prepared table.
        recipe: Hyperparameters of training.
        result: The result of the training loop.
        held_out: The likelihood of records that were not used for training.
        budget: The budget whose elapsed time is stored.
        device: Name of the device on which the model was trained.
    """
    num_scored = max(1, int((~data.schema.is_context).sum()))
    log_likelihood_by_feature = {
        name: -float(nll)
        for name, nll in zip(data.schema.names, held_out.nll_by_feature, strict=True)
        if np.isfinite(nll)
    }
    return {
        **data.summarize(),
        "held_out": {
            "log_likelihood": -held_out.mean_nll,
            "log_likelihood_per_feature": -held_out.mean_nll / num_scored,
            "features": log_likelihood_by_feature,
            "records": len(held_out.nll_by_record),
            "orders": held_out.num_orders,
            "unit": "nats, normalised units",
        },
        "steps": result.steps,
        "epochs": round(result.epochs, 3),
        "stopped_early": result.stopped_early,
        "seconds": round(budget.elapsed, 1),
        "device": device,
        "seed": settings.seed,
        "recipe": asdict(recipe),
        "options": settings.model_dump(mode="json", exclude_none=True),
        "history": result.history,
    }
