"""A training job from Parquet tables to a model directory: prepare, train, calibrate, evaluate, write."""

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
from trainer.recipes import SHAPE, choose_exemplars, choose_gaussians, choose_recipe, model_config
from trainer.settings import TrainConfig, parse_periods, split_names

HELD_OUT_ROWS, HELD_OUT_ORDERS = 2000, 4
"""Largest number of records of the held-out figures, and the number of orders in which each is scored."""

AFTER_SHARE = 0.4
"""Share of a time limit that calibration, ranking and held-out figures may take together, unless the smallest numbers
of records take longer."""

PRIOR_SHARE = 0.15
"""Share of a time limit after which no larger number of Gaussians is tried."""

MIN_STEPS = 20
"""Steps that a time limit should allow. The batch is reduced for it, and fewer steps are reported to the user."""

SAFETY_FACTOR = 1.1
"""Factor for measured costs, as a few records do not show all of them."""

FIXED_SECONDS, FIXED_SECONDS_PER_FEATURE = 2.0, 0.002
"""Estimated seconds to render the report, write the model directory and end the process."""


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    """Everything that a finished training job has produced.

    Attributes:
        directory: The model directory.
        fingerprint: The model's fingerprint.
        data: The prepared table.
        model: The trained model with its ranking.
        training_result: The result of the training loop.
        calibration: The calibration of the alert rule.
        held_out: The likelihood of held-out records.
        summary: The training summary of the manifest.
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
    """A context in which SIGINT and SIGTERM request a stop after the current training step.

    Calling the object returns whether a signal was received. A second signal has its usual effect: it ends the process
    at once.

    Attributes:
        received: Number of the signal that was received, 0 if none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._handler_before_by_signal: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Return whether a signal was received."""
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
        """Store the number of the signal and restore the previous handler, so that a second signal ends the process."""
        self.received = number
        signal.signal(number, self._handler_before_by_signal[number])


@dataclass(frozen=True, slots=True)
class _PlannedRun:
    """A training run with the measured costs of the phases after it; None without a time limit."""

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
    """Train a model and write its directory.

    Args:
        tables: Parquet files and folders.
        settings: All options.
        on_prepared: Called with the prepared table before training.
        on_status: Called after every training step.
        on_message: Called with one line of text at the begin of each phase and now and then during it.
        should_stop: Called after every training step. If it returns true, a checkpoint is written and training stops.
        budget: The time that the job may take; by default `settings.max_time` from now.
        ranks: The processes that train together. This process must be the first; the others call `run_worker_rank`.

    Raises:
        DeformerError: A file or an option cannot be used.
        Interrupted: `should_stop` returned true.
    """
    from trainer.report import render

    budget = budget or TimeBudget(settings.max_time)
    with _lock_working_folder(settings.out) as folder:
        planned = _prepare_run(tables, settings, folder, budget, ranks, on_prepared, on_message)
        run, data = planned.run, planned.run.data
        order = choose_order(settings.order, data)
        result = _train_model(planned, settings, should_stop, on_status)
        if ranks.world_size > 1:
            budget.clock = run.budget.clock = time.monotonic  # the other processes have ended their part
        if result.steps < MIN_STEPS and budget.limit is not None:
            on_message(f"--max-time left next to no time to train (steps: {result.steps}); allow more")
        finishing = _Finishing(settings, budget, planned.costs, on_message)
        scores = finishing.score_calibration_records(result.model, data, order, settings.seed)
        for number, fold_data in enumerate(
            split_folds(data, settings.folds, settings.seed) if settings.folds else (), 2
        ):
            on_message(f"fold {number} of {settings.folds}")
            fold_run = _create_fold_run(fold_data, settings, number, folder, budget, finishing)
            fold_model = _train_model(fold_run, settings, should_stop).model
            scores += finishing.score_calibration_records(fold_model, fold_data, order, settings.seed + number)
        calibration = build_calibration(scores, data.schema, order, settings.contamination, data.ties)
        model = finishing.add_ranking(result.model, data)
        held_out = finishing.evaluate_held_out(model, data)
        finishing.warn_if_unreachable(calibration, data)
        on_message("writing the report and the model directory")
        summary = _summarize_training(settings, data, run.recipe, result, held_out, budget, str(model.device))
        summary["records_used"] = {
            "calibration": len(scores.statistics),
            "exemplars": model.config.exemplars,
            "ranking": finishing.num_ranking_records,
            "held_out": len(held_out.nll_by_record),
        }
        page = render(data, result, calibration, held_out, summary)
        fingerprint = model_store.write(settings.out, model, calibration, summary, page)
        shutil.rmtree(folder)
    return TrainingOutput(settings.out, fingerprint, data, model, result, calibration, held_out, summary)


def run_worker_rank(
    tables: Sequence[Path], settings: TrainConfig, should_stop: Callable[[], bool], budget: TimeBudget, ranks: Ranks
) -> None:
    """Take part in a training as a process that is not the first: compute gradients, and write no model.

    The arguments are those of `train`.
    """
    with tempfile.TemporaryDirectory() as name:
        _train_model(_prepare_run(tables, settings, Path(name), budget, ranks), settings, should_stop)


class _Finishing:
    """The phases after training: calibration, ranking and held-out figures, within the time that is left.

    Args:
        settings: All options.
        budget: The time that the job may take.
        costs: Measured costs of the phases. None without a time limit.
        on_message: Called with one line of text about the progress.
    """

    def __init__(
        self, settings: TrainConfig, budget: TimeBudget, costs: PhaseCosts | None, on_message: Callable[[str], None]
    ) -> None:
        self.settings, self.budget, self.costs, self.on_message = settings, budget, costs, on_message
        self.num_ranking_records = 0

    def score_calibration_records(self, model: DEformer, data: PreparedTable, order: Order, seed: int) -> RecordScores:
        """Score as many calibration records as the time permits, in the given arrival-order distribution."""
        rows = data.select_rows(Split.CALIBRATION)
        if self.costs is None:
            phase = self._start_phase("calibrating", len(rows), 0, 0.0)
            return score_calibration_records(model, data, rows, order, seed, should_continue=phase.should_continue)
        maximum = count_all_records(data)
        minimum = compute_min_counts(maximum)
        num_records = self._plan(maximum).calibration
        rows = _shuffle(rows, seed)[:num_records]
        later = replace(minimum, calibration=0).estimate_seconds(self.costs)
        phase = self._start_phase("calibrating", num_records, minimum.calibration, later, maximum.calibration)
        batch_size = choose_batch_size(self.costs.calibration, CALIBRATION_BATCH_SIZE)
        return score_calibration_records(model, data, rows, order, seed, batch_size, phase.should_continue)

    def add_ranking(self, model: DEformer, data: PreparedTable) -> DEformer:
        """Add exemplars to the model; see `trainer.exemplars.add_ranking`."""
        max_exemplars, seed = choose_exemplars(self.settings), self.settings.seed
        maximum = replace(count_all_records(data), calibration=0)
        self.num_ranking_records = maximum.ranking if max_exemplars else 0
        if self.costs is None:
            phase = self._start_phase("ranking", maximum.ranking, 0, 0.0)
            return add_ranking(model, data, max_exemplars, seed, should_continue=phase.should_continue)
        minimum = compute_min_counts(maximum)
        num_records = self._plan(maximum).ranking
        later = replace(minimum, ranking=0).estimate_seconds(self.costs)
        phase = self._start_phase("ranking", num_records, minimum.ranking, later, maximum.ranking)
        self.num_ranking_records = min(self.num_ranking_records, num_records)
        seconds_per_record = self.costs.ranking + self.costs.calibration
        batch_size = choose_batch_size(seconds_per_record, MAX_REFERENCE_RECORDS)
        return add_ranking(model, data, max_exemplars, seed, num_records, batch_size, phase.should_continue)

    def evaluate_held_out(self, model: DEformer, data: PreparedTable) -> HeldOutLikelihood:
        """Compute the held-out figures on calibration records."""
        rows, seed = data.select_rows(Split.CALIBRATION), self.settings.seed
        if self.costs is None:
            sampled = sample_rows(rows, seed, HELD_OUT_ROWS)
            phase = self._start_phase("held-out figures", len(sampled), 0, 0.0)
            return evaluate_held_out(
                model, data, sampled, HELD_OUT_ORDERS, seed + 1, should_continue=phase.should_continue
            )
        maximum = replace(count_all_records(data), calibration=0, ranking=0)
        num_passes = self._plan(maximum).held_out_passes
        # With very few records, more records in one order say more than fewer records in several.
        num_orders = (
            HELD_OUT_ORDERS if num_passes >= 100 * HELD_OUT_ORDERS or num_passes == maximum.held_out_passes else 1
        )
        num_records = max(1, num_passes // num_orders)
        phase = self._start_phase("held-out figures", num_records, 0, 0.0, min(len(rows), HELD_OUT_ROWS))
        batch_size = choose_batch_size(self.costs.held_out, EVALUATION_BATCH_SIZE)
        sampled = sample_rows(rows, seed, num_records)
        return evaluate_held_out(
            model, data, sampled, num_orders, seed + 1, batch_size=batch_size, should_continue=phase.should_continue
        )

    def warn_if_unreachable(self, calibration: Calibration, data: PreparedTable) -> None:
        """Send a message if the time limit left too few calibration records for one of the default alphas."""
        num_available = len(data.select_rows(Split.CALIBRATION))
        for alpha, num_needed in calibration.find_unreachable_alphas(DEFAULT_ALPHAS).items():
            if self.costs is not None and num_needed <= num_available:
                self.on_message(
                    f"alpha {alpha:g} needs {num_needed:,} calibration records; --max-time left time for "
                    f"{len(calibration.scores):,} of {num_available:,}: allow more time"
                )

    def _plan(self, maximum: RecordCounts) -> RecordCounts:
        """Return the numbers of records that the remaining phases can use in the time that is left."""
        if self.costs is None:
            return maximum
        return plan_record_counts(self.costs, self.budget.remaining - self.costs.fixed, maximum)

    def _start_phase(
        self, name: str, num_records: int, min_records: int, later_seconds: float, num_available: int | None = None
    ) -> Phase:
        """Announce a phase and return the object that ends it in time.

        Args:
            name: What the phase does.
            num_records: Number of records that it uses.
            min_records: Number of records that it uses even if the time is over.
            later_seconds: Seconds that must be left for the phases after it.
            num_available: Number of records that it would use without a time limit.
        """
        of_available = "" if num_available in (None, num_records) else f" of {num_available:,}"
        self.on_message(f"{name}: {num_records:,}{of_available} records")
        deadline, clock = math.inf, self.budget.clock
        if self.costs is not None:
            deadline = clock() + self.budget.remaining - self.costs.fixed - later_seconds
        return Phase(name, num_records, min_records, deadline, clock, self.on_message)


def count_all_records(data: PreparedTable) -> RecordCounts:
    """Return the numbers of records that the phases after training use if there is time for all of them."""
    num_calibration = int((data.split == Split.CALIBRATION).sum())
    return RecordCounts(
        min(num_calibration, MAX_CALIBRATION_RECORDS),
        min(num_calibration, MAX_REFERENCE_RECORDS),
        min(num_calibration, HELD_OUT_ROWS) * HELD_OUT_ORDERS,
    )


def _shuffle(rows: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the rows in random order, so that the first of them are a random sample if time runs out."""
    return np.random.default_rng([seed, 0xCA12]).permutation(rows)


def _train_model(
    planned: _PlannedRun,
    settings: TrainConfig,
    should_stop: Callable[[], bool],
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
) -> TrainingResult:
    """Run the training loop. Under a time limit, keep the time that the phases after it need."""

    def compute_costs(model: DEformer) -> Costs:
        """Return the time to reserve for the phases after training, and the cost of validating a record."""
        if planned.costs is None or planned.run.budget.limit is None:
            return Costs(0.0, 0.0)
        after = _compute_reserve(planned.costs, planned.run.data, planned.run.budget.limit)
        return Costs(after, planned.costs.held_out)

    return planned.run.run(should_stop, on_status, compute_costs)


def _compute_reserve(costs: PhaseCosts, data: PreparedTable, limit: float) -> float:
    """Return the seconds to reserve for the phases after training.

    They get the time for all records or `AFTER_SHARE` of the limit, but never less than the smallest numbers of records
    need.
    """
    maximum = count_all_records(data)
    seconds = min(maximum.estimate_seconds(costs), AFTER_SHARE * limit - costs.fixed)
    return costs.fixed + max(seconds, compute_min_counts(maximum).estimate_seconds(costs))


def _prepare_run(
    tables: Sequence[Path],
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    ranks: Ranks,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_message: Callable[[str], None] = lambda line: None,
) -> _PlannedRun:
    """Prepare the table and create the training run, or restore it from a checkpoint.

    Args:
        tables: Parquet files and folders.
        settings: All options.
        folder: The folder for the matrix of the table.
        budget: The time that the job may take.
        ranks: The processes that train together.
        on_prepared: Called with the prepared table.
        on_message: Called with one line of text.
    """
    checkpoint_folder = _get_working_folder(settings.out)
    state = _load_previous_run(checkpoint_folder, settings)
    old_model = _read_old_model(settings)
    data = prepare_table(tables, _create_data_options(settings, old_model), folder)
    data = drop_outliers(data, settings.contamination, settings.seed)
    on_prepared(data)
    choose_order(settings.order, data)  # raises before training if the order is impossible
    part = budget.create_equal_part(settings.folds or 1)
    planned = _create_run(data, settings, checkpoint_folder, part, old_model, state, ranks, on_message)
    if state is not None:
        planned.run.restore(state)
        on_message(f"continuing at step {planned.run.step} of {planned.run.steps}")
    elif settings.resume:
        on_message(f"nothing to resume in {checkpoint_folder}: starting from the beginning")
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
    """Create the model, its prior and the training run. Under a time limit, measure costs and choose the batch.

    Args:
        data: The prepared table.
        settings: All options.
        folder: The folder for checkpoints.
        budget: The time that training may take.
        old_model: The model that is adapted (`--init-from`).
        state: State of the interrupted run that is continued.
        ranks: The processes that train together.
        on_message: Called with one line of text.
    """
    device = ranks.choose_device(model_store.resolve_device(settings.device))
    recipe = choose_recipe(settings, int((data.split == Split.TRAIN).sum()))
    torch.manual_seed(settings.seed)
    if old_model is not None:
        model, priors = _adapt_model(old_model, data, settings.seed)
    else:
        max_gaussians = choose_gaussians(settings)
        is_time_short: Callable[[], bool] = lambda: budget.is_share_used(PRIOR_SHARE)  # noqa: E731
        if state is not None:  # the same number as in the interrupted run, whatever the time
            max_gaussians, is_time_short = state["identity"]["gaussians"], lambda: False
        priors = gaussian_prior.fit_priors(data, max_gaussians, settings.seed, is_time_short)
        config = model_config(settings, data.schema.has_repeating_sensors)
        model = DEformer(data.schema, replace(config, gaussians=priors.num_components if priors else 0))
    if priors is not None:
        model.gaussians = priors.full
        priors.by_fold.to(device)
    model = model.to(device)

    def create(recipe: Recipe) -> TrainingRun:
        identity = _describe_identity(settings, data, model.config, recipe) | {"processes": ranks.world_size}
        return TrainingRun(data, model, recipe, settings.seed, folder, budget, identity, priors, ranks)

    run = create(recipe)
    if budget.limit is None:
        return _PlannedRun(run, None)
    costs = _measure_phase_costs(run.averaged_model, data, settings, budget.clock)
    batch = state["identity"]["batch"] if state is not None else _choose_affordable_batch(run, costs, on_message)
    return _PlannedRun(run if batch == recipe.batch else create(replace(recipe, batch=batch)), costs)


def _measure_phase_costs(
    model: DEformer, data: PreparedTable, settings: TrainConfig, clock: Callable[[], float]
) -> PhaseCosts:
    """Measure the costs of calibration, ranking and held-out figures on a few records."""
    rows = data.select_rows(Split.CALIBRATION)
    order = choose_order(settings.order, data)
    calibration = measure_seconds_per_record(
        lambda n: compute_statistics(model, data, rows[:n], order, 0), clock, len(rows)
    )
    held_out = measure_seconds_per_record(lambda n: evaluate_held_out(model, data, rows[:n], 1, 0), clock, len(rows))
    ranking = measure_distance_seconds(model, data, choose_exemplars(settings), settings.seed, clock)
    fixed = FIXED_SECONDS + FIXED_SECONDS_PER_FEATURE * len(data.schema)
    return PhaseCosts(SAFETY_FACTOR * calibration, SAFETY_FACTOR * ranking, SAFETY_FACTOR * held_out, fixed)


def _choose_affordable_batch(run: TrainingRun, costs: PhaseCosts, on_message: Callable[[str], None]) -> int:
    """Return a batch with which a time limit allows at least `MIN_STEPS` steps, at most the batch of the recipe.

    A message is sent if the batch is reduced, or if the limit is too short even for a single record.
    """
    budget, recipe = run.budget, run.recipe
    limit = budget.limit or math.inf
    seconds_per_record = measure_seconds_per_record(
        run.measure_step_seconds, budget.clock, min(recipe.batch, len(run.train_rows)), warm_up=False
    )
    validation_seconds = 2 * MIN_VALIDATION_ROWS * VALIDATION_ORDERS * costs.held_out
    minimum = compute_min_counts(count_all_records(run.data)).estimate_seconds(costs) + costs.fixed
    least = budget.elapsed + seconds_per_record * recipe.accumulate + validation_seconds + minimum
    if least > limit:
        on_message(
            f"--max-time {limit:g}s is too short for this table on this machine: the least is about {least:.0f} s; "
            "training for one step and finishing as early as possible"
        )
        return 1
    seconds = budget.remaining - _compute_reserve(costs, run.data, limit) - validation_seconds
    num_affordable = seconds / (MIN_STEPS * recipe.accumulate * max(seconds_per_record, 1e-9))
    if num_affordable >= recipe.batch:
        return recipe.batch
    batch = 1 << int(math.log2(max(num_affordable, 1.0)))
    on_message(f"batch reduced from {recipe.batch} to {batch} records, so that --max-time allows enough steps")
    return batch


def _create_fold_run(
    fold_data: PreparedTable,
    settings: TrainConfig,
    number: int,
    folder: Path,
    budget: TimeBudget,
    finishing: _Finishing,
) -> _PlannedRun:
    """Create the training run of one further fold of cross-conformal calibration. It cannot be resumed.

    Args:
        fold_data: The table with the split of this fold.
        settings: All options.
        number: Number of the fold, from 2.
        folder: The working folder of the job.
        budget: The time that the job may take.
        finishing: The phases after training, for which time is kept.
    """
    fold_folder = folder / f"fold-{number}"
    fold_folder.mkdir(exist_ok=True)
    final_seconds = 0.0
    if finishing.costs is not None:
        minimum = replace(compute_min_counts(count_all_records(fold_data)), calibration=0)
        final_seconds = minimum.estimate_seconds(finishing.costs) + finishing.costs.fixed
    num_parts = (settings.folds or 1) + 1 - number
    part = budget.create_equal_part(num_parts, final_seconds)
    fold_settings = settings.model_copy(update={"seed": settings.seed + number})
    return _create_run(fold_data, fold_settings, fold_folder, part, _read_old_model(settings))


@contextmanager
def _lock_working_folder(out: Path) -> Iterator[Path]:
    """Create the folder `DIR.training` next to the model directory and lock it while the context is open.

    The folder is deleted at the end, unless it contains the checkpoint of an interrupted run.

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
            f"--out {out}: {folder} cannot be written ({error.strerror}); choose another folder"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}: another deformer-train is using {folder}; wait for its end or choose another name"
            ) from None
        try:
            yield folder
        finally:
            if folder.exists() and not (folder / checkpoint.FILE_NAME).exists():
                shutil.rmtree(folder)


def _get_working_folder(out: Path) -> Path:
    """Return the path of the working folder that belongs to a model directory."""
    return out.absolute().with_name(out.absolute().name + ".training")


def _load_previous_run(folder: Path, settings: TrainConfig) -> dict[str, Any] | None:
    """Return the state of an interrupted run, None if there is none.

    Raises:
        ConfigError: There is one, and `--resume` was not given.
    """
    state = checkpoint.load_state(folder)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{folder} holds an interrupted run (step {state['step']} of {state['steps']}): "
            f"add --resume to continue it, or delete the folder to start anew"
        )
    return state


def _create_data_options(settings: TrainConfig, old_model: DEformer | None) -> DataOptions:
    """Return the options that concern the tables."""
    window = None
    if settings.window is not None:
        window = Window(round(settings.window * 1e6), settings.slots or 1)
    return DataOptions(
        layout=settings.layout,
        label=settings.label,
        normal=settings.normal,
        exclude=split_names(settings.exclude),
        context=split_names(settings.context),
        discrete=split_names(settings.discrete),
        continuous=split_names(settings.continuous),
        cycle=parse_periods(settings.cycle),
        calibration_share=1 / settings.folds if settings.folds else settings.calibration_share,
        seed=settings.seed,
        window=window,
        once=split_names(settings.once),
        base=old_model.schema if old_model is not None else None,
        ties=settings.ties,
    )


def _read_old_model(settings: TrainConfig) -> DEformer | None:
    """Return the model that `--init-from` names, None without that option.

    Raises:
        ConfigError: The settings ask for other hyperparameters than those of that model.
    """
    if settings.init_from is None:
        return None
    for name in ("gaussians", *SHAPE):
        if getattr(settings, name, None) is not None:
            raise ConfigError(f"--init-from: {name} is that of the model in {settings.init_from}; leave it out")
    return model_store.read(settings.init_from).model.train()


def _adapt_model(old_model: DEformer, data: PreparedTable, seed: int) -> tuple[DEformer, CrossFittedPriors | None]:
    """Return a model with the old model's weights for the table's features, and its adapted Gaussian priors."""
    priors = None
    if old_model.gaussians is not None:
        priors = finetune.adapt_priors(old_model.gaussians, data, len(old_model.schema), seed)
    model = finetune.extend_model(old_model, data.schema)
    model.ranking = old_model.ranking  # `add_ranking` keeps the old exemplars and adds those of this table
    return model, priors


def _describe_identity(
    settings: TrainConfig, data: PreparedTable, config: ModelConfig, recipe: Recipe
) -> dict[str, Any]:
    """Return everything that must be the same for an interrupted run to be continued, ready for JSON."""
    old_fingerprint = None
    if settings.init_from is not None:
        old_fingerprint = model_store.read_manifest(settings.init_from)["fingerprint"]
    identity = {"the model of --init-from": old_fingerprint, "the data's fingerprint": data.fingerprint}
    identity |= {"seed": settings.seed, "max_time": settings.max_time}
    hyperparameters = asdict(config) | asdict(recipe)
    return identity | {
        name: list(value) if isinstance(value, tuple) else value for name, value in hyperparameters.items()
    }


def _summarize_training(
    settings: TrainConfig,
    data: PreparedTable,
    recipe: Recipe,
    result: TrainingResult,
    held_out: HeldOutLikelihood,
    budget: TimeBudget,
    device: str,
) -> dict[str, Any]:
    """Return the training summary of the manifest, ready for JSON."""
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
