"""Run a training job for irregular readings (`--irregular`): prepare, fit the process, train, calibrate, evaluate.

Its phases are those of `trainer.job`. It differs from `trainer.job` because records are long. The training examples are
blocks of records with their contexts (`trainer.examples`). The prior is a Gaussian process
(`trainer.gaussian_process`). The engine scores the calibration records (`trainer.irregular_calibration`). Likelihoods
are stated for a reading. Complete records are ranked by the density alone, without exemplars.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import MAX_CALIBRATION_RECORDS, Calibration
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.calibration.seen_records import RecordHasher, RecordSet, SeenRecords
from deformer_stream.errors import ConfigError, map_write_errors
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.bounded_context import ContextLimit
from deformer_stream.model.deformer import DEformer
from trainer.budget import (
    MIN_HELD_OUT_PASSES,
    NO_COSTS,
    Costs,
    PhaseBudget,
    PhaseCosts,
    RecordCounts,
    StepCost,
    TimeBudget,
    choose_batch_size,
    combine_costs,
    compute_min_counts,
    measure_seconds_per_record,
)
from trainer.calibrate import build_calibration
from trainer.cusum_scale import (
    MAX_SCALE_RECORDS,
    MIN_HELD_OUT_RECORDS,
    MIN_SCALE_RECORDS,
    SensorDistributions,
    find_largest_sums,
    fit_cusum_scale,
)
from trainer.data import Split, create_data_options
from trainer.distributed import Ranks
from trainer.examples import BlockExamples, Blocks, Ints
from trainer.fit import MIN_VALIDATION_ROWS, SINGLE_PROCESS, TrainingResult, TrainingRun, TrainingStatus
from trainer.gaussian_process import attach_compiled_process, fit_process, is_for_imputation
from trainer.irregular_calibration import average_neg_log_p, score_irregular_records
from trainer.irregular_evaluation import (
    IrregularLikelihood,
    Readings,
    draw_references,
    evaluate_blocks,
    iterate_predictions,
    predict_baselines,
)
from trainer.irregular_table import IrregularTable, iterate_record_chunks, prepare_irregular_table
from trainer.job_output import JobOutput, summarize_job
from trainer.planning import (
    PRIOR_SHARE,
    SAFETY_FACTOR,
    PresetPlanner,
    compute_reserve,
    convert_identity,
    estimate_fixed_seconds,
    estimate_training_seconds,
    is_limit_too_short,
    restore_run,
)
from trainer.reading_time import ReadingMonitor
from trainer.recipes import (
    AUTO_PRESETS,
    MIN_STEPS_OF_LARGER_PRESET,
    choose_irregular_recipe,
    irregular_model_config,
)
from trainer.settings import TrainConfig
from trainer.tables import TableSource
from trainer.training_warnings import (
    TrainingWarning,
    WarningList,
    check_calibration,
    check_training,
)
from trainer.working_folder import get_working_folder, load_previous_run, lock_working_folder

HELD_OUT_BLOCKS = 1000
"""Largest number of blocks from which the held-out figures are computed."""

BLOCKS_PER_PASS = 16
"""Number of blocks that count as one pass of the held-out figures when the time is divided (`trainer.budget`).

The smallest number of passes (`budget.MIN_HELD_OUT_PASSES`) is then enough for figures that can be compared.
"""

EVALUATION_BATCH = 32
"""Number of blocks that are evaluated together by default."""

CALIBRATION_BATCH = 64
"""Number of records that are sent to the engine together by default."""

MAX_MEASURED_READINGS = 10_000
"""Number of readings with which the time to fit the baselines is measured."""

MAX_MEASURED_RECORDS, MAX_MEASURED_SECONDS = 16, 0.5
"""Largest number of records or blocks with which a cost is measured, and seconds after which no more are added."""

MEASURED_SHARE = 0.002
"""Share of a time limit that the measurement of a cost takes if it is shorter than `MAX_MEASURED_SECONDS`."""

FEATURE_BLOCKS_SHARE, MAX_FEATURE_BLOCKS = 0.2, 200
"""Share of the blocks of the held-out figures from which the typical −ln p of each feature is computed for the drift
monitor, and the largest number of these blocks."""

STEPS_SHARE = 8.0 / 9.0
"""Share of the time for training that its steps take. Validations take the rest (`fit.TrainingRun`)."""

IMPUTATION_PRIOR_SHARE = 0.45
"""Share of the time limit in which a process for imputation is fitted.

Its predictions from all readings of a context are nearly those of the trained network
(docs/experiments/24-imputation-at-given-times.md).
"""

PROCESS_FILE = "process.safetensors"
"""File of the fitted Gaussian process in the working folder, which a continued run reads."""


@dataclass(frozen=True, slots=True)
class IrregularOutput(JobOutput):
    """The results of a finished training job for irregular readings.

    Attributes:
        data: The prepared table.
        held_out: The likelihood of readings of records that were not used for training.
    """

    data: IrregularTable
    held_out: IrregularLikelihood


def train_irregular(
    tables: Sequence[TableSource],
    settings: TrainConfig,
    *,
    on_prepared: Callable[[IrregularTable], None] = lambda data: None,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
    on_message: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    budget: TimeBudget | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> IrregularOutput:
    """Train a model of irregular readings, calibrate and evaluate it, and write the model directory.

    The arguments and errors are those of `trainer.job.train`.
    """
    from trainer.irregular_report import render

    if ranks.world_size > 1:
        raise ConfigError("--irregular trains in one process, but torchrun started several: start deformer-train alone")
    budget = budget or TimeBudget(settings.max_time)
    warnings = WarningList(on_message)
    with lock_working_folder(settings.out) as folder:
        job = _Job(settings, folder, budget, on_message)
        data = job.prepare(tables)
        on_prepared(data)
        warnings.add(*(TrainingWarning(code, message) for code, message in data.warnings))
        run = job.plan()
        seen_records = _collect_seen_records(data)
        result = run.run(should_stop, on_status, job.compute_costs(), job.measure_costs_again)
        budget.mark_phase("training")
        has_prior = run.model.process is not None
        warnings.add(*check_training(result, budget.limit, has_prior, has_old_model=False))
        model = result.model
        calibration = job.calibrate(model)
        budget.mark_phase("calibration")
        held_out = job.evaluate_held_out(model)
        budget.mark_phase("held-out figures")
        num_available = min(len(data.select_rows(Split.CALIBRATION)), MAX_CALIBRATION_RECORDS)
        warnings.add(*_check_baselines(held_out))
        warnings.add(*check_calibration(calibration, num_available, int(data.is_used.sum()), budget.limit, None))
        on_message("writing the report and the model directory")
        summary = {
            **summarize_job(
                settings,
                data,
                run.recipe,
                result=result,
                held_out=held_out.to_json(data.schema.names),
                preset=(job.settings.preset, job.preset_reason),
                budget=budget,
                warnings=warnings.warnings,
            ),
            "context": {"recent": model.config.context_recent, "block": model.config.context_block},
            "process": {"rounds": job.num_rounds, "neighbors": model.config.neighbors},
            "records_used": {
                "train": job.count_train_records(result),
                "validation": len(np.unique(job.blocks.records[run.validation_rows])),
                "calibration": len(calibration.scores),
                "held_out": held_out.num_records,
            },
            "blocks_used": {
                "train": result.num_train_examples,
                "validation": len(run.validation_rows),
                "held_out": held_out.num_blocks,
            },
            "records_available": {
                "train": len(data.select_rows(Split.TRAIN)),
                "validation": len(data.select_rows(Split.VALIDATION)),
                "calibration": num_available,
                "table": data.num_input_records,
            },
        }
        page = render(data, result, calibration, held_out, summary)
        fingerprint = model_store.write(settings.out, model, calibration, summary, page, seen_records)
        if settings.label is not None and settings.faults != "off":
            on_message("the names of faults are not learnt, because readings are irregular")
        shutil.rmtree(folder)
    return IrregularOutput(
        directory=settings.out,
        fingerprint=fingerprint,
        model=model,
        training_result=result,
        calibration=calibration,
        summary=summary,
        data=data,
        held_out=held_out,
    )


@dataclass(frozen=True, slots=True)
class _MeasuredRun:
    """A training run with one of the presets, and what it costs.

    Attributes:
        run: The run.
        settings: All options, with the preset of the run.
        step_cost: The cost of a training step with a single batch, 0 if it was not measured.
        phase_costs: The measured costs of the phases after training. None without a time limit.
    """

    run: TrainingRun
    settings: TrainConfig
    step_cost: StepCost
    phase_costs: PhaseCosts | None


class _Job(PresetPlanner):
    """The phases of a training job for irregular readings, which fit into a time limit.

    Args:
        settings: All options of `deformer-train`.
        folder: The working folder.
        budget: The time that the job may take.
        on_message: Called with a line of text for the user.

    Attributes:
        settings: The options, with the preset that was chosen in place of "auto" after `plan`.
        preset_reason: Why this preset was chosen, as text for the user.
        data: The prepared table.
        blocks: The blocks of its records.
        num_rounds: Number of rounds in which the Gaussian process was fitted, 0 without one.
        costs: Costs of the phases after training, of which `compute_costs` says how they are measured. None without a
            time limit.
        references: The training readings to which the baselines of the held-out figures are fitted.
        maximum: Numbers of records and blocks that these phases use if there is enough time.
    """

    data: IrregularTable
    blocks: Blocks
    references: Readings

    def __init__(
        self, settings: TrainConfig, folder: Path, budget: TimeBudget, on_message: Callable[[str], None]
    ) -> None:
        self.settings, self.folder, self.budget, self.on_message = settings, folder, budget, on_message
        self.preset_reason = ""
        self.num_rounds = 0
        self.maximum = RecordCounts(0, 0, 0)
        self._measured: list[PhaseCosts] = []
        self._baseline_seconds = 0.0  # of the fit of the baselines, which does not depend on the number of blocks
        self._examples_by_noise: dict[tuple[float, float, float], BlockExamples] = {}
        self.state = load_previous_run(get_working_folder(settings.out), settings)
        self.start_seconds = budget.elapsed
        budget.mark_phase("start")
        self.is_rushed = is_limit_too_short(budget, self.start_seconds, on_message)

    def prepare(self, tables: Sequence[TableSource]) -> IrregularTable:
        """Read the tables, and divide their records into blocks."""
        budget = self.budget
        previous = self.state["identity"] if self.state is not None else {}
        monitor = ReadingMonitor.for_job(budget, self.on_message, previous.get("records"))
        self.data = prepare_irregular_table(tables, create_data_options(self.settings), self.folder, monitor)
        self.on_message(self.data.order.describe())
        config = irregular_model_config(self.settings, len(self.data.schema))
        limit = config.context_limit or ContextLimit(0, 1)  # the block is at least 1
        self.blocks = Blocks.divide(self.data, limit, self.folder)
        budget.mark_phase("reading")
        num_calibration = len(self.data.select_rows(Split.CALIBRATION))
        num_blocks = len(self._create_examples(self.settings).select(Split.CALIBRATION))
        if not num_blocks or not len(self._create_examples(self.settings).validation_indexes):
            raise ConfigError("the table has too few records with readings: give more records")
        num_passes = -(-min(num_blocks, HELD_OUT_BLOCKS) // BLOCKS_PER_PASS)
        # The baselines do not depend on the model. What is done before training need not be estimated.
        self.references = draw_references(self._create_examples(self.settings), self.settings.seed + 1)
        started, num_measured = budget.clock(), min(MAX_MEASURED_READINGS, len(self.references.codes))
        predict_baselines(self.data.schema, self.references, self.references.select(np.arange(num_measured)))
        self._baseline_seconds = budget.clock() - started
        num_scale = 0
        if self._has_sums():
            num_scale = len(self._select_scale_records())
        elif self.settings.evidence is None:
            self.on_message(
                "arrival_share = 0 trains a model for imputation: as with --evidence lasting, it has no sums"
            )
        # The records of the scale of cumulative sums are planned as those for ranking, which are typical ones, too.
        self.maximum = RecordCounts(
            min(num_calibration, MAX_CALIBRATION_RECORDS),
            min(num_scale, MAX_SCALE_RECORDS),
            num_passes,
            min_ranking=MIN_SCALE_RECORDS,
        )
        return self.data

    def plan(self) -> TrainingRun:
        """Fit the Gaussian process, choose preset and batch, and return the run, restored if it is continued."""
        budget = self.budget
        model_store.resolve_device(self.settings.device)
        process = self._fit_process()
        budget.mark_phase("prior")
        if budget.limit is not None and not self.is_rushed:
            self.on_message("measuring how long training and calibration take")
        chosen, self.preset_reason = self._choose_preset(process)
        run, self.settings, costs = chosen.run, chosen.settings, chosen.phase_costs
        self._measured = [] if costs is None else [costs]
        if costs is not None:  # there is a time limit
            batch = run.recipe.batch
            if self.state is not None:
                batch = self.state["identity"]["batch"]
            elif not self.is_rushed:
                validation_seconds = _estimate_validation_seconds(costs)
                batch = self._choose_batch(run, chosen.step_cost, costs, self.maximum, validation_seconds, "block")
            if batch != run.recipe.batch:
                run = self._create_run(self.settings, process, batch)
        budget.mark_phase("planning")
        restore_run(run, self.state, self.settings, self.folder, self.on_message)
        return run

    def _create_examples(self, settings: TrainConfig) -> BlockExamples:
        """Return the training examples. The hyperparameters determine their noise and the share of random orders."""
        recipe = choose_irregular_recipe(settings, 1)
        key = recipe.smoothing, recipe.forget, recipe.arrival_share
        if key not in self._examples_by_noise:  # counting the readings of a large table takes time
            self._examples_by_noise[key] = BlockExamples(self.data, self.blocks, *key)
        return self._examples_by_noise[key]

    def _fit_process(self) -> dict[str, torch.Tensor] | None:
        """Fit the Gaussian process, or read that of the interrupted run. None if the model has no process."""
        settings, schema = self.settings, self.data.schema
        config = irregular_model_config(settings, len(schema))
        if not config.neighbors or not schema.is_linear.any():
            return None
        path = self.folder / PROCESS_FILE
        if self.state is not None and path.exists():
            self.num_rounds = self.state["identity"]["process_rounds"]
            return safetensors.torch.load_file(path)
        self.on_message("fitting the Gaussian process prior")
        process = DEformer(schema, config).process
        if process is None:
            return None
        budget, examples = self.budget, self._create_examples(settings)
        share = IMPUTATION_PRIOR_SHARE if is_for_imputation(process, examples) else PRIOR_SHARE
        seconds = math.inf if budget.limit is None else share * budget.remaining
        self.num_rounds = fit_process(
            process, examples, settings.seed, seconds, budget.clock, on_message=self.on_message
        )
        tensors = process.state_dict()
        with map_write_errors(path):
            path.write_bytes(safetensors.torch.save(tensors))
        return tensors

    def _create_run(
        self, settings: TrainConfig, process: dict[str, torch.Tensor] | None, batch: int | None = None
    ) -> TrainingRun:
        """Create a model with new weights, and the run that trains it.

        Args:
            settings: All options, with a preset that is not "auto".
            process: The tensors of the Gaussian process, or None.
            batch: Number of blocks in a batch. None to use the number of the recipe.
        """
        data = self.data
        torch.manual_seed(settings.seed)  # the initial weights depend on the seed alone
        model = DEformer(data.schema, irregular_model_config(settings, len(data.schema)))
        if model.process is not None and process is not None:
            model.process.load_state_dict(process)
            attach_compiled_process(model.process, data.schema)
        model = model.to(model_store.resolve_device(settings.device))
        examples = self._create_examples(settings)
        if model.process is not None and model.device.type == "cpu":
            examples = examples.with_process(model.process)
        recipe = choose_irregular_recipe(settings, len(examples.train_indexes))
        recipe = recipe if batch is None else replace(recipe, batch=batch)
        identity: dict[str, Any] = {
            "the data's fingerprint": data.fingerprint,
            "records": len(data.split),  # fewer than those of the input if a time limit permitted only a sample
            "seed": settings.seed,
            "max_time": settings.max_time,  # a time limit changes the schedule
            "preset": settings.preset,
            "process_rounds": self.num_rounds,
            **asdict(model.config),
            **asdict(recipe),
        }
        folder = get_working_folder(settings.out)
        return TrainingRun(examples, model, recipe, settings.seed, folder, self.budget, convert_identity(identity))

    def _choose_preset(self, process: dict[str, torch.Tensor] | None) -> tuple[_MeasuredRun, str]:
        """Return the run with the preset that suits the time, and the reason for the preset, as text for the user.

        With `--preset auto`, it is the larger one of `AUTO_PRESETS` if the time limit leaves enough training steps. It
        is also the larger one if the schedule of the smaller one would end before the time does.
        """
        chosen = self._choose_without_measuring()
        if chosen is not None:
            settings, reason = chosen
            return self._measure_run(settings, process), reason
        large_preset, small_preset = AUTO_PRESETS
        large = self._measure_run(self._set_preset(large_preset), process)
        num_steps, num_needed = self._estimate_steps(large), min(MIN_STEPS_OF_LARGER_PRESET, large.run.steps)
        if num_steps >= num_needed:
            return large, "the time limit leaves enough training steps for it"
        small = self._measure_run(self._set_preset(small_preset), process)
        if self._estimate_steps(small) > small.run.steps:
            return large, f"preset {small_preset} would end its training before --max-time"
        return small, self._explain_smaller_preset(num_steps, num_needed)

    def _measure_run(self, settings: TrainConfig, process: dict[str, torch.Tensor] | None) -> _MeasuredRun:
        """Create the run of a preset, and measure its costs under a time limit."""
        run = self._create_run(settings, process)
        phase_costs = None if self.budget.limit is None else self._measure_costs(run.averaged_model)
        return _MeasuredRun(run, settings, self._measure_step(run), phase_costs)

    def _estimate_steps(self, measured: _MeasuredRun) -> int:
        """Return about how many training steps of a run fit into the time before the work after training.

        The first and the last validation are assumed to be short. Without a time limit, all steps of the schedule fit.
        """
        run, costs = measured.run, measured.phase_costs
        if costs is None:
            return run.steps
        seconds = estimate_training_seconds(self.budget, costs, self.maximum, _estimate_validation_seconds(costs))
        return self._count_steps(run, measured.step_cost, STEPS_SHARE * max(0.0, seconds))

    @property
    def costs(self) -> PhaseCosts | None:
        """Costs of the phases after training, from the last measurements. None without a time limit."""
        return combine_costs(self._measured) if self._measured else None

    def _measure_costs(self, model: DEformer) -> PhaseCosts:
        """Return the measured seconds for each record of calibration and sums, and for each pass of held-out figures.

        Args:
            model: The model in evaluation mode. Its weights do not change the costs.
        """
        fixed_seconds = self._baseline_seconds + estimate_fixed_seconds(self.start_seconds, len(self.data.schema))
        if self.is_rushed:
            seconds = 0.1
            return PhaseCosts(
                calibration=seconds, ranking=seconds, held_out=0.02 * BLOCKS_PER_PASS, fixed=fixed_seconds
            )
        examples, seed = self._create_examples(self.settings), self.settings.seed
        calibration_rows = self._find_typical_records(self._sample_calibration_records())
        calibration_seconds = self._measure(
            lambda num_records: score_irregular_records(model, self.data, calibration_rows[:num_records]),
            len(calibration_rows),
        )
        scale_seconds = 0.0
        if self.maximum.ranking:
            scale_rows = self._find_typical_records(self._select_scale_records())
            distributions = SensorDistributions.fit(self.data, scale_rows)
            with attached_kernels(model) as kernels:
                scale_seconds = self._measure(
                    lambda num_records: find_largest_sums(
                        kernels, model, examples, scale_rows[:num_records], distributions, EVALUATION_BATCH
                    ),
                    len(scale_rows),
                )
        blocks = self._sample_held_out_blocks(examples)[:MAX_MEASURED_RECORDS]
        held_out_seconds = self._measure(
            lambda num_blocks: list(iterate_predictions(model, examples, blocks[:num_blocks], seed, EVALUATION_BATCH)),
            len(blocks),
        )
        feature_seconds = self._measure(
            lambda num_blocks: average_neg_log_p(model, examples, blocks[:num_blocks], EVALUATION_BATCH), len(blocks)
        )
        return PhaseCosts(
            calibration=SAFETY_FACTOR * calibration_seconds,
            ranking=SAFETY_FACTOR * scale_seconds,
            held_out=SAFETY_FACTOR * BLOCKS_PER_PASS * (held_out_seconds + FEATURE_BLOCKS_SHARE * feature_seconds),
            fixed=fixed_seconds,
        )

    def _measure(self, process: Callable[[int], object], num_available: int) -> float:
        """Return the seconds for each record of a function, which is called with a number of records.

        It is the smaller one of two measurements, because a short load of the machine seldom spoils both.
        """
        min_seconds = min(MAX_MEASURED_SECONDS, MEASURED_SHARE * (self.budget.limit or math.inf))
        clock = self.budget.clock
        first, second = (
            measure_seconds_per_record(process, clock, num_available, warm_up, min_seconds) for warm_up in (True, False)
        )
        return min(first, second)

    def _find_typical_records(self, rows: Ints) -> Ints:
        """Return the records whose number of readings is next to the mean, `MAX_MEASURED_RECORDS` of them at most."""
        num_readings = self.data.num_readings[rows]
        return rows[np.argsort(np.abs(num_readings - num_readings.mean()), kind="stable")][:MAX_MEASURED_RECORDS]

    def compute_costs(self) -> Costs:
        """Return the seconds to reserve for the work after training, and the seconds to validate a block."""
        costs = self.costs
        if costs is None or self.budget.limit is None:
            return NO_COSTS
        after = compute_reserve(costs, self.maximum, self.budget.limit)
        return Costs(after, record=costs.held_out / BLOCKS_PER_PASS)

    def measure_costs_again(self, model: DEformer) -> Costs:
        """Measure the costs during the training, and return what `compute_costs` returns then.

        The medians of the last measurements count (`budget.combine_costs`).

        Args:
            model: The averaged model, in evaluation mode.
        """
        if not self.is_rushed:
            self._measured.append(self._measure_costs(model))
        return self.compute_costs()

    def _has_sums(self) -> bool:
        """Return whether the anomaly score is that of cumulative sums, to which a scale is fitted.

        A model that has learnt no reading in its real order is for imputation, and has none unless the user wants it.
        """
        if self.settings.evidence is not None:
            return self.settings.evidence == "fading"
        return self._create_examples(self.settings).arrival_share > 0.0

    def _select_scale_records(self) -> Ints:
        """Return the records to which the scale of the cumulative sums can be fitted, in random order.

        They are those for validation, which the network has not learnt, or those for training if the former are few.
        """
        rows = self.data.select_rows(Split.VALIDATION)
        if len(rows) < MIN_HELD_OUT_RECORDS:
            rows = self.data.select_rows(Split.TRAIN)
        return np.random.default_rng([self.settings.seed, 0xC5]).permutation(rows)[:MAX_SCALE_RECORDS]

    def _sample_calibration_records(self) -> Ints:
        """Return the calibration records in random order, `MAX_CALIBRATION_RECORDS` of them at most."""
        rows = self.data.select_rows(Split.CALIBRATION)
        return np.random.default_rng([self.settings.seed, 0xCA12]).permutation(rows)[:MAX_CALIBRATION_RECORDS]

    def _sample_held_out_blocks(self, examples: BlockExamples) -> Ints:
        """Return the blocks of calibration records in random order, `HELD_OUT_BLOCKS` of them at most."""
        blocks = examples.select(Split.CALIBRATION)
        return np.random.default_rng([self.settings.seed, 0xB10]).permutation(blocks)[:HELD_OUT_BLOCKS]

    @property
    def _phases(self) -> PhaseBudget:
        """The time of the phases after training, with the costs of the last measurements."""
        return PhaseBudget(self.budget, self.costs, self.on_message)

    def calibrate(self, model: DEformer) -> Calibration:
        """Score as many calibration records as the time permits, and return the calibration of the alert rule."""
        rows = self._sample_calibration_records()
        cusum_scale = self._fit_cusum_scale(model)
        num_records = self._phases.plan_counts(replace(self.maximum, ranking=0)).calibration
        minimum = min(len(rows), Calibration.count_required_records(0.01))
        later_seconds = self._phases.estimate_later(RecordCounts(0, 0, MIN_HELD_OUT_PASSES))
        phase = self._phases.start_phase("calibrating", num_records, minimum, later_seconds, len(rows))
        seconds_per_record = None if self.costs is None else self.costs.calibration
        batch_size = choose_batch_size(seconds_per_record, CALIBRATION_BATCH)
        statistics = score_irregular_records(
            model, self.data, rows[:num_records], batch_size, cusum_scale, phase.should_continue
        )
        sums = self._average_neg_log_p(model)
        scores = CalibrationScores(statistics, sums.neg_log_p_sums, sums.num_readings)
        return build_calibration(scores, self.data.schema, "arrival", 0.0, cusum_scale=cusum_scale)

    def _average_neg_log_p(self, model: DEformer) -> CalibrationScores:
        """Return the sums of −ln p over the readings of each feature, from as many blocks as the time permits."""
        examples = self._create_examples(self.settings)
        blocks = self._sample_held_out_blocks(examples)
        num_blocks = int(FEATURE_BLOCKS_SHARE * min(self._count_held_out_blocks(), len(blocks)))
        num_blocks = min(max(num_blocks, 1), MAX_FEATURE_BLOCKS)
        minimum = min(num_blocks, int(FEATURE_BLOCKS_SHARE * MIN_HELD_OUT_PASSES * BLOCKS_PER_PASS))
        later_seconds = self._phases.estimate_later(RecordCounts(0, 0, MIN_HELD_OUT_PASSES))
        phase = self._phases.create_phase("typical readings of each feature", num_blocks, minimum, later_seconds)
        return average_neg_log_p(
            model, examples, blocks[:num_blocks], self._choose_block_batch(), phase.should_continue
        )

    def _fit_cusum_scale(self, model: DEformer) -> CusumScale | None:
        """Fit the scale of the cumulative sums to normal records; None if the anomaly score has no sums."""
        if not self.maximum.ranking:
            return None
        rows = self._select_scale_records()
        num_records = self._phases.plan_counts(self.maximum).ranking
        minimum = compute_min_counts(self.maximum)
        later_seconds = self._phases.estimate_later(replace(minimum, ranking=0))
        phase = self._phases.start_phase(
            "fitting the scale of the sums", num_records, minimum.ranking, later_seconds, len(rows)
        )
        examples = self._create_examples(self.settings)
        training_rows = self.data.select_rows(Split.TRAIN)
        shuffled_rows = np.random.default_rng([self.settings.seed, 0xC6]).permutation(training_rows)
        distributions = SensorDistributions.fit(self.data, shuffled_rows[:MAX_SCALE_RECORDS])
        return fit_cusum_scale(
            model, examples, rows[:num_records], distributions, self._choose_block_batch(), phase.should_continue
        )

    def _choose_block_batch(self) -> int:
        """Return the number of blocks that are scored together after training."""
        seconds_per_block = None if self.costs is None else self.costs.held_out / BLOCKS_PER_PASS
        return choose_batch_size(seconds_per_block, EVALUATION_BATCH)

    def _count_held_out_blocks(self) -> int:
        """Return the number of blocks of the held-out figures in the time that is left, if nothing else is done."""
        counts = self._phases.plan_counts(replace(self.maximum, calibration=0, ranking=0))
        return max(1, counts.held_out_passes * BLOCKS_PER_PASS)

    def evaluate_held_out(self, model: DEformer) -> IrregularLikelihood:
        """Compute the likelihood of readings of calibration records, which training has not used."""
        examples = self._create_examples(self.settings)
        blocks = self._sample_held_out_blocks(examples)
        # This is the last phase, so it takes the time that is left, whatever the costs were expected to be.
        minimum = min(len(blocks), MIN_HELD_OUT_PASSES * BLOCKS_PER_PASS)
        phase = self._phases.start_phase("held-out figures", len(blocks), minimum, later_seconds=0.0, noun="block")
        seed = self.settings.seed + 1  # for other noise than in validation
        return evaluate_blocks(
            model,
            examples,
            blocks,
            seed,
            self._choose_block_batch(),
            phase.should_continue,
            self.references,
        )

    def count_train_records(self, result: TrainingResult) -> int:
        """Return about how many different training records the steps used: all if they used all blocks."""
        num_records = len(self.data.select_rows(Split.TRAIN))
        num_blocks = len(self._create_examples(self.settings).train_indexes)
        return min(num_records, result.num_train_examples) if result.num_train_examples < num_blocks else num_records


def _estimate_validation_seconds(costs: PhaseCosts) -> float:
    """Return the seconds of the first and the last validation with the smallest number of blocks."""
    return 2 * MIN_VALIDATION_ROWS * costs.held_out / BLOCKS_PER_PASS


def _collect_seen_records(data: IrregularTable) -> SeenRecords:
    """Return the fingerprints of the records for training and validation, and of those for calibration."""
    hasher = RecordHasher(data.schema)
    fingerprints = np.zeros(len(data.split), np.uint64)
    for records in iterate_record_chunks(data.offsets):
        chunk = slice(int(data.offsets[records.start]), int(data.offsets[records.stop]))
        hashes = hasher.hash_normalised(data.codes[chunk], data.values[chunk])
        # Sums of unsigned integers are modulo 2⁶⁴. Sums over all readings before a record are subtracted.
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        bounds = data.offsets[records.start : records.stop + 1] - chunk.start
        fingerprints[records] = sums[bounds[1:]] - sums[bounds[:-1]]
    is_training: NDArray[np.bool_] = np.isin(data.split, (Split.TRAIN, Split.VALIDATION))
    return SeenRecords(
        (RecordSet.from_fingerprints(fingerprints[is_training]),),
        RecordSet.from_fingerprints(fingerprints[data.split == Split.CALIBRATION]),
    )


def _check_baselines(held_out: IrregularLikelihood) -> list[TrainingWarning]:
    """Return a warning if the model predicts held-out readings no better than the best of the simple predictions."""
    name, best = min(held_out.baselines.items(), key=lambda item: item[1])
    if name == "process" or held_out.mean_nll <= best - 2.0 * held_out.standard_error:
        return []
    words = {"marginal": "the distribution of each sensor", "last_value": "the sensor's previous reading"}
    return [
        TrainingWarning(
            "no_better_than_baseline",
            f"the model predicts held-out readings no better ({held_out.mean_nll:.3f} nats) than {words[name]} alone "
            f"({best:.3f} nats): give more records or more time",
        )
    ]
