"""Run a training job from tables to a model directory: prepare, train, calibrate, evaluate, write.

Under a time limit (`--max-time`), the job measures before training how long the phases after it take. It then reserves
this time and reduces the batch and the numbers of records as needed.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import MAX_CALIBRATION_RECORDS, Calibration
from deformer_stream.calibration.seen_records import RecordSet, SeenRecords, find_seen_records
from deformer_stream.cli_utils import pass_second_signal_on
from deformer_stream.errors import ConfigError, DeformerError
from deformer_stream.model.deformer import DEformer
from trainer.alert_distance import AlertDistanceResult, add_alert_distance
from trainer.alert_prior import add_alert_prior
from trainer.budget import (
    NO_COSTS,
    Costs,
    Phase,
    PhaseBudget,
    PhaseCosts,
    TimeBudget,
    choose_batch_size,
    compute_min_counts,
    plan_record_counts,
)
from trainer.calibrate import BATCH_SIZE as CALIBRATION_BATCH_SIZE
from trainer.calibrate import (
    Order,
    build_calibration,
    choose_order,
    sample_rows,
    score_calibration_records,
    split_folds,
)
from trainer.data import PreparedTable, Split, create_data_options
from trainer.distributed import Ranks
from trainer.evaluate import BATCH_SIZE as EVALUATION_BATCH_SIZE
from trainer.evaluate import HeldOutLikelihood, compute_independent_nll, evaluate_held_out
from trainer.exemplars import MAX_REFERENCE_RECORDS, add_ranking, choose_exemplar_rows, score_complete_records
from trainer.faults import learn_faults
from trainer.fit import SINGLE_PROCESS, TrainingResult, TrainingStatus
from trainer.gaussian_prior import CrossFittedPriors
from trainer.job_output import JobOutput, summarize_job
from trainer.outliers import (
    SearchSize,
    choose_num_references,
    count_examined,
    describe_suspects,
    drop_outliers,
    find_suspects,
    leave_out,
    plan_search,
    restore_left_out,
)
from trainer.planning import (
    HELD_OUT_ORDERS,
    HELD_OUT_ROWS,
    PlannedRun,
    RunPlanner,
    compute_reserve,
    count_all_records,
    create_first_part,
    is_limit_too_short,
    restore_run,
)
from trainer.prepare import prepare_table
from trainer.reading_time import ReadingMonitor
from trainer.recipes import SHAPE_HYPERPARAMETERS, choose_exemplars
from trainer.settings import TrainConfig
from trainer.tables import TableSource
from trainer.training_warnings import (
    MIN_COMPARED_RECORDS,
    TrainingWarning,
    WarningList,
    check_calibration,
    check_independence,
    check_row_order,
    check_training,
)
from trainer.working_folder import get_working_folder, load_previous_run, lock_working_folder

MIN_CALIBRATION_SHARE = 0.1
"""Share of the time of one of several models (`--folds`) that its calibration may take in any case."""

OUTLIER_SHARE = 0.1
"""Share of a time limit that the search for suspected anomalies (`--contamination`) may take.

With `--folds`, the searches of all models share it.
"""


@dataclass(frozen=True, slots=True)
class TrainingOutput(JobOutput):
    """The results of a finished training job.

    Attributes:
        data: The prepared table.
        held_out: The likelihood of records that were not used for training.
    """

    data: PreparedTable
    held_out: HeldOutLikelihood


class StopSignals:
    """A context manager in which SIGINT and SIGTERM request a stop after the current training step.

    Calling the object returns whether a signal was received, so it can be passed as `should_stop`. A second signal of
    the same kind ends the process at once, unless it repeats the first one (`cli_utils.REPEATED_SIGNAL_SECONDS`).

    Attributes:
        received: Number of the signal that was received, 0 if none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._handler_before_by_signal: dict[int, Any] = {}
        self._received_at_by_signal: dict[int, float] = {}

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
        """Store the number of the first signal of a kind, and pass a second one on to the previous handler.

        The previous handler usually ends the process, so a user can force the end with a second signal.
        """
        pass_second_signal_on(number, self._received_at_by_signal, self._handler_before_by_signal[number])
        self.received = number


def train(
    tables: Sequence[TableSource],
    settings: TrainConfig,
    *,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
    on_message: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    budget: TimeBudget | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    part_sizes: Sequence[int] = (),
) -> TrainingOutput:
    """Train a model on tables, calibrate and evaluate it, and write the model directory.

    Args:
        tables: The tables: files, folders or quoted patterns of files, and tables in memory.
        settings: All options of `deformer-train`.
        on_prepared: Called once with the prepared table, before training.
        on_status: Called after every training step.
        on_message: Called with one line of text at the beginning of each phase, and for its progress.
        should_stop: Called after every training step. If it returns True, a checkpoint is written and training stops.
        budget: The time that the job may take; by default `settings.max_time` from now.
        ranks: The processes that train together. This process must be the first; the others call `run_worker_rank`.
        part_sizes: Numbers of records of consecutive parts of the tables that are split by themselves (`DataOptions`).

    Returns:
        The model, its calibration and its evaluation, which were also written to the model directory.

    Raises:
        DeformerError: A file or an option cannot be used.
        Interrupted: `should_stop` returned True.
    """
    from trainer.report import render

    budget = budget or TimeBudget(settings.max_time)
    warnings = WarningList(on_message)
    with lock_working_folder(settings.out) as folder:
        planned = _prepare_run(
            tables,
            settings,
            folder,
            budget=budget,
            ranks=ranks,
            on_prepared=on_prepared,
            on_message=on_message,
            part_sizes=part_sizes,
        )
        run, data = planned.run, planned.run.data
        warnings.add(*(TrainingWarning(code, message) for code, message in data.warnings))
        order = choose_order(settings.order_of_features, data)
        # Before the training, because the old directory may be damaged, and because this time is then known.
        seen_records = _collect_seen_records(data, settings)
        result = _train_model(planned, should_stop, on_status)
        if ranks.world_size > 1:
            # The other processes have finished, so their shared clock (a collective operation) can no longer be read.
            budget.clock = run.budget.clock = time.monotonic
        budget.mark_phase("training")
        has_prior, has_old_model = run.model.num_prior_components > 0, settings.init_from is not None
        warnings.add(*check_training(result, budget.limit, has_prior, has_old_model))
        final_costs = planned.costs and replace(planned.costs, fixed=planned.fixed_seconds)
        final_phases = _FinalPhases(settings, budget, final_costs, on_message)
        part = run.budget if settings.folds else None  # with --folds, each model has a part of the time
        add_alert_prior(result.model, data, run.priors, order, settings.seed, settings.alert_prior)
        distance_result = _add_alert_distance(result.model, data, order, settings)
        warnings.add(*check_row_order(distance_result.row_order))
        scores = final_phases.score_calibration_records(result.model, data, order, settings.seed, part)
        budget.mark_phase("calibration")
        # All records calibrate, also those that one model has left out as suspects (--contamination).
        calibrated_data = restore_left_out(data) if settings.folds or data.left_out is not None else data
        if settings.folds:
            further_scores = _score_folds(calibrated_data, planned, order, folder, final_phases, should_stop)
            scores = sum(further_scores, start=scores)
        model = final_phases.add_ranking(result.model, data, run.priors)
        record_scores = final_phases.score_complete_records(model, data, scores, run.priors)
        calibration = build_calibration(
            scores, data.schema, order, settings.calibration_trim, data.ties, record_scores=record_scores
        )
        budget.mark_phase("ranking")
        held_out = final_phases.evaluate_held_out(model, data)
        budget.mark_phase("held-out figures")
        warnings.add(
            *_check_results(settings, calibrated_data, held_out, final_phases.held_out_rows, calibration, budget.limit)
        )
        on_message("writing the report and the model directory")
        summary = summarize_job(
            settings,
            data,
            run.recipe,
            result=result,
            held_out=_summarize_held_out(data, held_out),
            preset=(planned.settings.preset, planned.preset_reason),
            budget=budget,
            warnings=warnings.warnings,
        )
        summary |= _count_records(planned, result, final_phases, calibrated_data, scores, calibration, held_out)
        summary |= _summarize_table(data, distance_result)
        page = render(data, result, calibration, held_out, summary)
        fingerprint = model_store.write(settings.out, model, calibration, summary, page, seen_records)
        _learn_faults(tables, settings, on_message)
        shutil.rmtree(folder)
    return TrainingOutput(
        directory=settings.out,
        fingerprint=fingerprint,
        model=model,
        training_result=result,
        calibration=calibration,
        summary=summary,
        data=data,
        held_out=held_out,
    )


def _collect_seen_records(data: PreparedTable, settings: TrainConfig) -> SeenRecords:
    """Return the fingerprints of the records for training and calibration, and of those of the old model."""
    return find_seen_records(
        data.schema,
        data.values,
        # Suspected anomalies are no new records: training left them out because of their values.
        is_training=np.isin(data.split, (Split.TRAIN, Split.VALIDATION, Split.LEFT_OUT)),
        is_calibration=data.split == Split.CALIBRATION,
        earlier=_read_earlier_records(settings),
    )


def _count_records(
    planned: PlannedRun,
    result: TrainingResult,
    final_phases: _FinalPhases,
    calibrated_data: PreparedTable,
    scores: CalibrationScores,
    calibration: Calibration,
    held_out: HeldOutLikelihood,
) -> dict[str, Any]:
    """Return how many records the job has used and how many there were, for the model's manifest.

    Args:
        planned: The training run of the first model.
        result: Its result.
        final_phases: The phases after training.
        calibrated_data: The table whose records calibrate.
        scores: The scores of the calibration records.
        calibration: The calibration of the alert rule.
        held_out: The likelihood of held-out records.
    """
    run, config = planned.run, result.model.config
    return {
        "records_used": {
            "train": result.num_train_examples,
            "validation": result.num_validation_examples,
            "prior": planned.num_prior_records,
            "calibration": len(calibration.scores),
            "calibration_trimmed": len(scores.statistics) - len(calibration.scores),
            "exemplars": config.exemplars,
            "alert_exemplars": config.alert_exemplars,
            "ranking": final_phases.num_ranking_records,
            "held_out": len(held_out.nll_by_record),
        },
        "records_available": {
            "train": len(run.train_rows),
            "validation": len(run.data.select_rows(Split.VALIDATION)),
            "calibration": count_calibration_records(calibrated_data, planned.settings.folds),
            "table": run.data.num_input_records,
        },
    }


def _summarize_table(data: PreparedTable, distance_result: AlertDistanceResult) -> dict[str, Any]:
    """Return what is known about the rows of the table and the suspected anomalies, for the model's manifest."""
    from trainer.report import estimate_records_per_day

    summary: dict[str, Any] = {}
    if distance_result.row_order is not None:
        summary["row_order_ratio"] = round(distance_result.row_order.ratio, 4)
    if data.left_out is not None:
        summary["left_out"] = data.left_out
    summary["records_per_day"] = estimate_records_per_day(data)
    return summary


def _learn_faults(tables: Sequence[TableSource], settings: TrainConfig, on_message: Callable[[str], None]) -> None:
    """Add the names of faults to the model that was written, if there are labelled records.

    Args:
        tables: The training tables, whose records have labels with `--label`.
        settings: All options of `deformer-train`.
        on_message: Called with lines of text about what was learnt, or why nothing was.
    """
    if settings.faults == "off" or (settings.faults is None and settings.label is None):
        return
    options = {
        "--model": str(settings.out),
        "--faults": settings.faults or "TABLE",
        "--label": settings.label,
        "--normal": settings.normal,
    }
    words = [word for option, value in options.items() if value is not None for word in (option, value)]
    command = f"deformer-train {shlex.join(words)}"
    if settings.faults is None and settings.max_time is not None:
        on_message(f"the names of faults are not learnt because of --max-time: run {command}")
        return
    try:
        if settings.faults is not None:
            learn_faults([Path(settings.faults)], settings.out, settings, on_message)
        else:
            learn_faults(tables, settings.out, settings, on_message, is_strict=False)
    except DeformerError as error:  # the model is complete without them
        on_message(f"the model names no faults, because {error}; then run {command}")


def run_worker_rank(
    tables: Sequence[TableSource],
    settings: TrainConfig,
    should_stop: Callable[[], bool],
    budget: TimeBudget,
    ranks: Ranks,
) -> None:
    """Run the training loop in a process that is not the first: compute gradients of a part of each batch.

    The first process calls `train` at the same time. It alone writes files and calibrates the model.

    Args:
        tables: The tables, as in `train`.
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


def _add_alert_distance(
    model: DEformer, data: PreparedTable, order: Order, settings: TrainConfig
) -> AlertDistanceResult:
    """Store training records for the alert in a trained model, as far as the options and the table permit.

    With `--folds`, calibration records are training records of the model, and would be their own nearest records.
    """
    max_exemplars = settings.alert_exemplars
    if settings.folds or choose_exemplars(settings) == 0:
        max_exemplars = 0
    return add_alert_distance(model, data, order, settings.seed, max_exemplars)


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
        held_out_rows: Row numbers of the records of the held-out figures.
    """

    def __init__(
        self, settings: TrainConfig, budget: TimeBudget, costs: PhaseCosts | None, on_message: Callable[[str], None]
    ) -> None:
        self.settings, self.budget, self.costs, self.on_message = settings, budget, costs, on_message
        self._phases = PhaseBudget(budget, costs, on_message)
        self.num_ranking_records = 0
        self.calibration_rows: list[NDArray[np.int64]] = []  # the scored records of each call
        self.held_out_rows: NDArray[np.int64] = np.empty(0, np.int64)

    def score_calibration_records(
        self, model: DEformer, data: PreparedTable, order: Order, seed: int, part: TimeBudget | None = None
    ) -> CalibrationScores:
        """Score as many calibration records as the time permits, at most `MAX_CALIBRATION_RECORDS`.

        Args:
            model: The trained model.
            data: The prepared table, in which the records of `Split.CALIBRATION` are scored.
            order: The arrival-order distribution from which the order of each record's readings is drawn: "arrival"
                (the logged order), "random" or "schema" (the order of the features).
            seed: Seed of the choice of records and of random orders.
            part: The part of the time limit for this model, if several models are trained (`--folds`). The other phases
                are not part of it.
        """
        rows = data.select_rows(Split.CALIBRATION)
        maximum = count_all_records(data)
        if part is not None:
            maximum = replace(maximum, ranking=0, held_out_passes=0)
        minimum = compute_min_counts(maximum)
        if part is None or self.costs is None:
            num_records = self._phases.plan_counts(maximum).calibration
            # Time is kept for ranking and held-out figures, which follow, with their smallest numbers of records.
            later_seconds = self._phases.estimate_later(replace(minimum, calibration=0))
        else:
            # Training may end a little late. The calibration then uses time of the later models, which share the rest.
            seconds = max(part.remaining, MIN_CALIBRATION_SHARE * (part.limit or 0.0))
            num_records = plan_record_counts(self.costs, seconds, maximum).calibration
            later_seconds = max(0.0, self.budget.remaining - self.costs.fixed - seconds)
        # Under a time limit, the records that are scored at its end must be a random sample.
        rows = sample_rows(rows, seed) if self.costs is None else _shuffle(rows, seed)[:num_records]
        phase = self._phases.start_phase(
            "calibrating", num_records, minimum.calibration, later_seconds, maximum.calibration
        )
        seconds_per_record = None if self.costs is None else self.costs.calibration
        batch_size = choose_batch_size(seconds_per_record, CALIBRATION_BATCH_SIZE)
        scores = score_calibration_records(model, data, rows, order, seed, batch_size, phase.should_continue)
        self.calibration_rows.append(rows[: len(scores.statistics)])
        return scores

    def add_ranking(self, model: DEformer, data: PreparedTable, priors: CrossFittedPriors | None) -> DEformer:
        """Add exemplars and typical values of normal records to the model.

        By comparison with them the model ranks complete records from normal to anomalous. As many records as the time
        permits are used for the typical values.

        Args:
            model: The trained model.
            data: The prepared table.
            priors: The Gaussian prior with its variants, None if the model has none.

        Returns:
            The same model, which was changed in place.
        """
        max_exemplars = choose_exemplars(self.settings)
        maximum = replace(count_all_records(data), calibration=0)  # calibration is finished
        minimum = compute_min_counts(maximum)
        num_records = self._phases.plan_counts(maximum).ranking
        # Time is kept for the held-out figures, which follow, with their smallest number of records.
        later_seconds = self._phases.estimate_later(replace(minimum, ranking=0))
        phase = self._phases.start_phase("ranking", num_records, minimum.ranking, later_seconds, maximum.ranking)
        self.num_ranking_records = num_records if max_exemplars else 0
        num_reference_records, batch_size = MAX_REFERENCE_RECORDS, None
        if self.costs is not None:
            num_reference_records = num_records
            # A record is compared with the exemplars, and also scored like a calibration record.
            batch_size = choose_batch_size(self.costs.ranking, MAX_REFERENCE_RECORDS)
        return add_ranking(
            model,
            data,
            max_exemplars,
            self.settings.seed,
            num_reference_records=num_reference_records,
            batch_size=batch_size,
            should_continue=phase.should_continue,
            calibration_exemplars=self.settings.calibration_exemplars is not False,
            priors=priors,
            prior_weight=self.settings.prior_weight,
            marginal_weight=self.settings.marginal_weight,
            trim=self.settings.calibration_trim,
        )

    def score_complete_records(
        self,
        model: DEformer,
        data: PreparedTable,
        calibrated: CalibrationScores,
        priors: CrossFittedPriors | None,
    ) -> NDArray[np.float64] | None:
        """Return the anomaly scores of the complete calibration records, or of as many as the time permits.

        Args:
            model: The model with its exemplars.
            data: The prepared table.
            calibrated: The scores of the records for the calibration of alerts.
            priors: The Gaussian prior with its variants, None if the model has none.

        Returns:
            The scores; None if there are none.
        """
        rows = np.concatenate([np.empty(0, np.int64), *self.calibration_rows])
        if len(rows) != len(calibrated.centered_nll):
            return None  # tie groups of an adapted model, whose centered NLLs are unknown
        exemplar_rows = choose_exemplar_rows(
            data,
            choose_exemplars(self.settings),
            self.settings.seed,
            self.settings.calibration_exemplars is not False,
        )
        maximum = replace(count_all_records(data), calibration=0, ranking=0)
        later_seconds = self._phases.estimate_later(compute_min_counts(maximum))
        phase = self._phases.start_phase("scoring complete calibration records", len(rows), 1, later_seconds)
        scores = score_complete_records(
            model,
            data,
            rows,
            calibrated.centered_nll,
            calibrated.complete_terms,
            exemplar_rows,
            phase.should_continue,
            priors,
        )
        return scores if len(scores) else None

    def evaluate_held_out(self, model: DEformer, data: PreparedTable) -> HeldOutLikelihood:
        """Compute the likelihood of calibration records, which training has not used, for the report.

        The time that is left determines how many records are used, and how many orders of the readings of each.
        """
        rows, seed = data.select_rows(Split.CALIBRATION), self.settings.seed
        order_seed = seed + 1  # for other random orders than in validation
        maximum = replace(count_all_records(data), calibration=0, ranking=0)
        num_passes = self._phases.plan_counts(maximum).held_out_passes
        # A pass is one record in one order. With few passes, one order of many records gives a more precise mean than
        # several orders of few records.
        has_many_passes = num_passes >= 100 * HELD_OUT_ORDERS or num_passes == maximum.held_out_passes
        num_orders = HELD_OUT_ORDERS if has_many_passes else 1
        num_records = max(1, num_passes // num_orders)
        num_available = min(len(rows), HELD_OUT_ROWS)
        phase = self._phases.start_phase(
            "held-out figures", num_records, min_records=0, later_seconds=0.0, num_available=num_available
        )
        phase.num_records *= num_orders  # its progress counts each record once in each order
        seconds_per_pass = None if self.costs is None else self.costs.held_out
        batch_size = choose_batch_size(seconds_per_pass, EVALUATION_BATCH_SIZE)
        sampled = self.held_out_rows = sample_rows(rows, seed, num_records)
        return evaluate_held_out(
            model, data, sampled, num_orders, order_seed, batch_size=batch_size, should_continue=phase.should_continue
        )


def count_calibration_records(data: PreparedTable, num_folds: int | None) -> int:
    """Return how many records of a table can be used for calibration.

    Args:
        data: The prepared table.
        num_folds: The value of `--folds`, with which all records are used. None if only the records of
            `Split.CALIBRATION` are used.
    """
    part = data.is_used if num_folds else data.split == Split.CALIBRATION
    return min(int(part.sum()), MAX_CALIBRATION_RECORDS * (num_folds or 1))


def _check_results(
    settings: TrainConfig,
    data: PreparedTable,
    held_out: HeldOutLikelihood,
    held_out_rows: NDArray[np.int64],
    calibration: Calibration,
    limit: float | None,
) -> list[TrainingWarning]:
    """Return the warnings about held-out figures and calibration.

    Args:
        settings: All options of `deformer-train`.
        data: The prepared table.
        held_out: The likelihood of held-out records.
        held_out_rows: The row numbers of these records.
        calibration: The calibration of the alert rule.
        limit: The time limit in seconds, or None.
    """
    warnings = []
    if len(held_out_rows) >= MIN_COMPARED_RECORDS:
        num_scored = int((~data.schema.is_context).sum())
        independent_nll = compute_independent_nll(data, held_out_rows)
        warnings += check_independence(held_out.nll_by_record, independent_nll, num_scored)
    num_available = count_calibration_records(data, settings.folds)
    num_records = int(data.is_used.sum())
    return [*warnings, *check_calibration(calibration, num_available, num_records, limit, settings.folds)]


def _shuffle(rows: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return row numbers in random order. If the time ends early, the rows used so far are then a random sample."""
    return np.random.default_rng([seed, 0xCA12]).permutation(rows)


def _train_model(
    planned: PlannedRun,
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
    costs, limit = NO_COSTS, planned.run.budget.limit
    if planned.costs is not None and limit is not None:
        after = compute_reserve(planned.costs, planned.maximum, limit)
        costs = Costs(after, record=planned.costs.held_out)  # validation computes the same likelihoods
    return planned.run.run(should_stop, on_status, costs)


def _prepare_run(
    tables: Sequence[TableSource],
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    ranks: Ranks,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_message: Callable[[str], None] = lambda line: None,
    part_sizes: Sequence[int] = (),
) -> PlannedRun:
    """Prepare the table and create the training run. With `--resume`, restore it from the checkpoint if there is one.

    Args:
        tables: The tables: files, folders or quoted patterns of files, and tables in memory.
        settings: All options of `deformer-train`.
        folder: An existing folder for the matrix of the table's values. Checkpoints are in the working folder of
            `--out`.
        budget: The time that the job may take.
        ranks: The processes that train together.
        on_prepared: Called once with the prepared table.
        on_message: Called with a line of text for the user.
        part_sizes: As in `train`.

    Returns:
        The run, with the measured costs of the phases after training (calibration, ranking, held-out figures).

    Raises:
        DeformerError: A file or an option cannot be used.
    """
    budget.mark_phase("start")
    start_seconds = budget.elapsed
    is_rushed = is_limit_too_short(budget, start_seconds, on_message)
    checkpoint_folder = get_working_folder(settings.out)
    state = load_previous_run(checkpoint_folder, settings)  # None if no interrupted run is to be continued
    previous = state["identity"] if state is not None else {}
    old_model = _read_old_model(settings)  # None without --init-from
    monitor = ReadingMonitor.for_job(budget, on_message, previous.get("records"))
    old_schema = old_model.schema if old_model is not None else None
    options = replace(create_data_options(settings, old_schema), part_sizes=tuple(part_sizes))
    data = prepare_table(tables, options, folder, monitor)
    budget.mark_phase("reading")
    data, search = _leave_out_outliers(data, settings, budget, _get_search_size(previous), on_message)
    budget.mark_phase("contamination")
    on_prepared(data)
    choose_order(settings.order_of_features, data)  # raises before training if the order is impossible
    first_budget = budget
    if settings.folds:  # several models share the time
        first_budget = create_first_part(budget, settings.folds, start_seconds, len(data.schema))
    planner = RunPlanner(
        settings,
        folder=checkpoint_folder,
        budget=first_budget,
        start_seconds=start_seconds,
        is_rushed=is_rushed,
        state=state,
        ranks=ranks,
        on_message=on_message,
        data_identity={
            "references": search.num_references,
            "examined_share": search.share if search.share < 1.0 else None,
        },
    )
    planned = planner.plan(data, old_model)
    if first_budget is not budget:
        budget.mark_phase("planning")
    restore_run(planned.run, state, settings, checkpoint_folder, on_message)
    return planned


def _get_search_size(identity: dict[str, Any]) -> SearchSize | None:
    """Return how much the search for suspected anomalies did in a training run, None if it made none.

    Args:
        identity: The identity of the run, which its checkpoints contain. It may be empty.
    """
    if not identity.get("references"):
        return None
    return SearchSize(identity["references"], identity.get("examined_share") or 1.0)


def _leave_out_outliers(
    data: PreparedTable,
    settings: TrainConfig,
    budget: TimeBudget,
    size: SearchSize | None,
    on_message: Callable[[str], None],
) -> tuple[PreparedTable, SearchSize]:
    """Leave suspected anomalies out of training (`--contamination`), within `OUTLIER_SHARE` of the time limit.

    Args:
        data: The prepared table.
        settings: All options of `deformer-train`.
        budget: The time that the job may take.
        size: How much the search does, if it is known. It is known from the interrupted run that is continued, or from
            the search of the first of several models (`--folds`). None to choose it from the time.
        on_message: Called with a line of text about the progress.

    Returns:
        The table without the suspected anomalies, and how much the search did; with 0 references if there was none.
    """
    if not settings.contamination:
        return data, SearchSize(0)
    seconds = OUTLIER_SHARE * budget.remaining / (settings.folds or 1)  # infinite without a limit
    name = "finding suspected anomalies"
    # The size is also None if the interrupted run had no --contamination, which `restore` then refuses.
    if settings.contamination == "auto":
        size = size or plan_search(data, seconds, budget.clock)
        phase = Phase(name, count_examined(data, size), clock=budget.clock, on_message=on_message)
        data = leave_out(data, find_suspects(data, settings.seed, size, phase.should_continue))
        on_message(describe_suspects(data.left_out or {}))
        return data, size
    num_references = size.num_references if size else choose_num_references(data, seconds, budget.clock)
    phase = Phase(name, len(data.split), clock=budget.clock, on_message=on_message)
    data = drop_outliers(data, settings.contamination, settings.seed, num_references, phase.should_continue)
    return data, SearchSize(num_references)


def _score_folds(
    data: PreparedTable,
    first: PlannedRun,
    order: Order,
    folder: Path,
    final_phases: _FinalPhases,
    should_stop: Callable[[], bool],
) -> Iterator[CalibrationScores]:
    """Yield the scores of the records of each further fold of cross-conformal calibration (`--folds`).

    The records of each fold are scored by a model that is trained without them.

    Args:
        data: The table, whose records all calibrate.
        first: The run of the first model, which has scored the records of the first fold.
        order: The arrival-order distribution of the calibration.
        folder: The working folder of the job.
        final_phases: The phases after training.
        should_stop: Called after every training step. If it returns True, training stops.

    Raises:
        Interrupted: `should_stop` returned True.
    """
    num_folds = final_phases.settings.folds or 1
    for number, fold_data in enumerate(split_folds(data, num_folds, final_phases.settings.seed), 2):
        final_phases.on_message(f"fold {number} of {num_folds}")
        yield _score_fold(fold_data, first, number, order, folder, final_phases, should_stop)
        final_phases.budget.mark_phase("folds")


def _score_fold(
    fold_data: PreparedTable,
    first: PlannedRun,
    number: int,
    order: Order,
    folder: Path,
    final_phases: _FinalPhases,
    should_stop: Callable[[], bool],
) -> CalibrationScores:
    """Train one further model for cross-conformal calibration (`--folds`), and score the records of its fold.

    Args:
        fold_data: The table, with the fold as its calibration records.
        first: The run of the first model.
        number: Number of the model, from 2 to the value of `--folds`.
        order: The arrival-order distribution of the calibration.
        folder: The working folder of the job.
        final_phases: The phases after training.
        should_stop: Called after every training step. If it returns True, training stops.

    Raises:
        Interrupted: `should_stop` returned True.
    """
    settings, budget = final_phases.settings, final_phases.budget
    if settings.contamination:
        search = _get_search_size(first.run.identity)
        fold_data, _ = _leave_out_outliers(fold_data, settings, budget, search, final_phases.on_message)
    planned = _plan_fold(fold_data, first, number, folder, final_phases)
    model, seed = _train_model(planned, should_stop).model, settings.seed + number
    add_alert_prior(model, fold_data, planned.run.priors, order, seed, settings.alert_prior)
    return final_phases.score_calibration_records(model, fold_data, order, seed, planned.run.budget)


def _plan_fold(
    fold_data: PreparedTable, first: PlannedRun, number: int, folder: Path, final_phases: _FinalPhases
) -> PlannedRun:
    """Plan the training run of one further model for cross-conformal calibration (`--folds`).

    In cross-conformal calibration, one model is trained for each fold of the records, without the fold. The first model
    is trained by the main run. The runs of the others cannot be resumed.

    Args:
        fold_data: The table, with the fold as its calibration records.
        first: The run of the first model, whose preset, batch and costs are used.
        number: Number of the model, from 2 to the value of `--folds`.
        folder: The working folder of the job.
        final_phases: The phases after training, for which time is reserved. The models that remain share the rest.
    """
    settings = final_phases.settings
    fold_folder = folder / f"fold-{number}"
    fold_folder.mkdir(exist_ok=True)
    final_seconds = 0.0
    if final_phases.costs is not None:
        # Calibration is part of each model's share of the time. Ranking and held-out figures follow the last model.
        minimum = replace(compute_min_counts(count_all_records(fold_data)), calibration=0)
        final_seconds = minimum.estimate_seconds(final_phases.costs) + final_phases.costs.fixed
    num_remaining = (settings.folds or 1) + 1 - number  # models that are not trained, including this one
    fold_budget = final_phases.budget.create_equal_part(num_remaining, final_seconds)
    # Another seed gives each model its own random numbers.
    fold_settings = settings.model_copy(update={"seed": settings.seed + number})
    return RunPlanner(fold_settings, fold_folder, fold_budget).plan_fold(fold_data, _read_old_model(settings), first)


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


def _summarize_held_out(data: PreparedTable, held_out: HeldOutLikelihood) -> dict[str, Any]:
    """Return the likelihood of records that were not used for training, as JSON values for the model's manifest."""
    num_scored = max(1, int((~data.schema.is_context).sum()))
    log_likelihood_by_feature = {
        name: -float(nll)
        for name, nll in zip(data.schema.names, held_out.nll_by_feature, strict=True)
        if np.isfinite(nll)
    }
    return {
        "log_likelihood": -held_out.mean_nll,
        "log_likelihood_per_feature": -held_out.mean_nll / num_scored,
        "features": log_likelihood_by_feature,
        "records": len(held_out.nll_by_record),
        "orders": held_out.num_orders,
        "unit": "nats, normalised units",
    }
