"""Plan a training run: fit the Gaussian prior, choose the preset and the batch, and measure costs under a time limit.

Training is the only phase of a job that can be made as short as needed. Under a time limit (`--max-time`), this module
therefore measures what a training step and the phases after training cost on this table and this machine. From these
costs follow the size of the network (`--preset auto`), the batch, and the time that is reserved for the other phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deformer_stream import model_store
from deformer_stream.calibration.conformal import MAX_CALIBRATION_RECORDS
from deformer_stream.counts import format_count
from deformer_stream.model.deformer import DEformer, ModelConfig
from trainer import factor_analysis, finetune, gaussian_prior
from trainer.budget import (
    MIN_CLEAR_RATIO,
    MessageLimiter,
    PhaseCosts,
    RecordCounts,
    StepCost,
    TimeBudget,
    compute_min_counts,
    measure_seconds_per_record,
    measure_step_cost,
)
from trainer.calibrate import choose_order, compute_statistics
from trainer.data import PreparedTable, Split
from trainer.distributed import Ranks
from trainer.evaluate import evaluate_held_out
from trainer.examples import VALIDATION_ORDERS
from trainer.exemplars import MAX_REFERENCE_RECORDS, measure_distance_seconds
from trainer.factor_analysis import NEIGHBORS
from trainer.fit import MIN_VALIDATION_ROWS, SINGLE_PROCESS, Recipe, TrainingRun
from trainer.gaussian_prior import CrossFittedPriors
from trainer.gaussian_process import attach_compiled_process
from trainer.recipes import (
    AUTO_PRESETS,
    MIN_STEPS_OF_LARGER_PRESET,
    MIN_USEFUL_STEPS,
    choose_exemplars,
    choose_gaussians,
    choose_recipe,
    has_own_size,
    model_config,
    resolve_preset,
)
from trainer.settings import TrainConfig
from trainer.training_warnings import MIN_STEPS

HELD_OUT_ROWS, HELD_OUT_ORDERS = 2000, 4
"""Largest number of records of the held-out figures, and the number of orders in which each is scored."""

AFTER_SHARE = 0.4
"""Share of a time limit that is reserved for calibration, ranking and held-out figures together.

More is reserved only if the smallest possible numbers of records take longer.
"""

PRIOR_SHARE = 0.15
"""Share of the remaining time that fitting the Gaussian prior may take."""

PROBE_RECORDS = 500
"""Number of records to which the Gaussian prior is fitted to measure how long it takes."""

TRAINING_SHARE = 0.55
"""Share of the remaining time that training gets, as far as it is known before the phases are measured."""

MIN_USEFUL_BATCH = 32
"""Smallest number of records to which a batch is reduced for the sake of `MIN_USEFUL_STEPS` training steps.

For `MIN_STEPS` it is reduced further.
"""

MIN_COST_RATIO = 2.0
"""A training step of the larger one of `AUTO_PRESETS` takes at least this many times as long as one of the smaller.

Measured ratios are 3 to 6.
"""

SAFETY_FACTOR = 1.1
"""Factor by which measured costs are multiplied, because measurements on a few records are too low."""

MIN_FIXED_SECONDS, FIXED_SHARE_OF_START, FIXED_SECONDS_PER_FEATURE = 1.5, 0.85, 0.002
"""Estimated seconds to render the report, write the model directory and end the process.

Most of this time is imports. It is therefore estimated from the time that the start of the command took, which shows
how fast the machine is at present. The last number is added for each feature.
"""

LEAST_SHARE_OF_START, MIN_LEAST_SECONDS = 1.6, 1.5
"""The smallest possible job takes this many times as long as the start of the command, in addition to the start, but at
least this many seconds. It trains for one step and uses the smallest numbers of records.
"""

ASSUMED_SECONDS_PER_RECORD = 0.01
"""Cost of a record in the phases after training that is assumed if there is no time to measure it."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A training run that is ready to start.

    Attributes:
        run: The training run.
        settings: All options, with the preset that was chosen in place of "auto".
        preset_reason: Why this preset was chosen, as text for the user.
        costs: Measured costs of the phases after training: calibration, ranking and held-out figures. None without a
            time limit.
        maximum: The numbers of records that these phases use if there is enough time. With `--folds`, each model has
            only a calibration; ranking and held-out figures are made once, for all models together, and count as 0.
        num_prior_records: Number of records to which the Gaussian prior was fitted, 0 if there is none.
        fixed_seconds: Estimated seconds for the report, the model directory and the end of the process.
    """

    run: TrainingRun
    settings: TrainConfig
    preset_reason: str
    costs: PhaseCosts | None
    maximum: RecordCounts
    num_prior_records: int
    fixed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FittedPrior:
    """The Gaussian prior of a training run.

    Attributes:
        priors: The prior and its variants that are used in training. None if the model has no prior.
        max_records: Largest number of records to which it was fitted. It is stored in the checkpoint, because a
            continued run must get the same prior again.
        process: The parameters of the prior of wide records (`trainer.factor_analysis`), in place of `priors`.
    """

    priors: CrossFittedPriors | None
    max_records: int
    process: dict[str, torch.Tensor] | None = None

    @property
    def hyperparameters(self) -> dict[str, int]:
        """The hyperparameters of a network with this prior."""
        if self.process is None:
            return {"gaussians": self.priors.num_components if self.priors else 0}
        rank = self.process["factors"].shape[2]
        return {"gaussians": 0, "neighbors": NEIGHBORS, "process_rank": rank, "process_scales": 1}


def estimate_least_seconds(start_seconds: float) -> float:
    """Return about how long the smallest possible job takes on this machine, including the start of the command.

    Args:
        start_seconds: Seconds that the start of the command took: of the process, and of importing modules.
    """
    return start_seconds + max(MIN_LEAST_SECONDS, LEAST_SHARE_OF_START * start_seconds)


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


def compute_reserve(costs: PhaseCosts, maximum: RecordCounts, limit: float) -> float:
    """Return the seconds to reserve for the phases after training: calibration, ranking and held-out figures.

    The result is the time of the phases with all records, but at most `AFTER_SHARE` of the time limit. It is at least
    the time of the phases with the smallest numbers of records.

    Args:
        costs: Measured costs of the phases.
        maximum: The numbers of records that the phases use if there is enough time.
        limit: The time limit in seconds.
    """
    max_seconds = maximum.estimate_seconds(costs)
    min_seconds = compute_min_counts(maximum).estimate_seconds(costs)
    allowed_seconds = AFTER_SHARE * limit - costs.fixed  # fixed: report, model files, end of the process
    return costs.fixed + max(min(max_seconds, allowed_seconds), min_seconds)


def estimate_training_seconds(
    budget: TimeBudget, costs: PhaseCosts, maximum: RecordCounts, validation_seconds: float
) -> float:
    """Return the seconds that a time limit leaves for training steps; negative if it is too short.

    Args:
        budget: The time of the job.
        costs: Measured costs of the phases after training.
        maximum: The numbers of records that these phases use if there is enough time.
        validation_seconds: Seconds of the first and the last validation.
    """
    reserve = compute_reserve(costs, maximum, budget.limit or math.inf)
    return budget.remaining - reserve - validation_seconds


def is_limit_too_short(budget: TimeBudget, start_seconds: float, on_message: Callable[[str], None]) -> bool:
    """Return whether the time limit is too short for any job on this machine, and send a message if so.

    Args:
        budget: The time that the job may take.
        start_seconds: Seconds that the start of the command took.
        on_message: Called with the message.
    """
    least_seconds = estimate_least_seconds(start_seconds)
    if budget.limit is None or budget.limit >= least_seconds:
        return False
    on_message(
        f"--max-time {budget.limit:g}s is too short: this machine needs at least about {least_seconds:.0f} s for "
        "any table at present; training for one step and finishing as early as possible"
    )
    return True


def restore_run(
    run: TrainingRun,
    state: dict[str, Any] | None,
    settings: TrainConfig,
    folder: Path,
    on_message: Callable[[str], None],
) -> None:
    """Restore the state of an interrupted run, if it is continued, and send a message about it.

    Args:
        run: The run that continues it.
        state: JSON state of the interrupted run; None if there is none.
        settings: All options of `deformer-train`.
        folder: The folder for checkpoints.
        on_message: Called with the message.
    """
    if state is not None:
        run.restore(state)
        on_message(f"continuing at step {run.step} of {run.steps}")
    elif settings.resume:
        on_message(f"there is nothing to resume in {folder}: starting from the beginning")


def convert_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a run as JSON returns it, to be compared with a checkpoint. JSON has no tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in identity.items()}


class PresetPlanner:
    """The part of the planning that all training jobs share: presets, the cost of training steps, and the batch.

    Attributes:
        settings: All options of `deformer-train`.
        budget: The time that the job may take.
        is_rushed: Whether the time limit is too short for any job. Nothing is measured then.
        state: JSON state of the interrupted run that is continued. None to start from the beginning.
        on_message: Called with a line of text for the user.
    """

    settings: TrainConfig
    budget: TimeBudget
    is_rushed: bool
    state: dict[str, Any] | None
    on_message: Callable[[str], None]

    def _set_preset(self, preset: str) -> TrainConfig:
        """Return the settings with another preset."""
        return self.settings.model_copy(update={"preset": preset})

    def _choose_without_measuring(self) -> tuple[TrainConfig, str] | None:
        """Return the settings with their preset and the reason for it, as text for the user.

        Returns:
            None if the cost of training steps decides which one of `AUTO_PRESETS` is used (`--preset auto`).
        """
        if self.state is not None and "preset" in self.state["identity"]:
            return self._set_preset(self.state["identity"]["preset"]), "that of the interrupted run"
        is_auto = self.settings.preset == "auto"
        if not is_auto or self.budget.limit is None or has_own_size(self.settings):
            reason = "the default" if is_auto else "chosen by --preset"
            if self.settings.init_from is not None:
                reason += ", except for the size, which is that of the old model"
            return self._set_preset(resolve_preset(self.settings)), reason
        large, small = AUTO_PRESETS
        if self.is_rushed:
            return self._set_preset(small), f"--max-time leaves no time to measure preset {large}"
        return None

    def _explain_smaller_preset(self, num_steps: int, num_needed: int) -> str:
        """Return the reason for the smaller one of `AUTO_PRESETS`, which is also sent as a message.

        Args:
            num_steps: Number of training steps of the larger one for which there is time.
            num_needed: Number of steps that it needs.
        """
        large, small = AUTO_PRESETS
        reason = (
            f"--max-time leaves time for at most about {format_count(num_steps, 'training step')} of preset {large}, "
            f"which should have at least {num_needed}"
        )
        self.on_message(f"preset {small}: {reason}")
        return reason

    def _measure_step(self, run: TrainingRun) -> StepCost:
        """Return the cost of a training step with a single batch, 0 if no decision depends on it.

        It is measured under a time limit, unless the run is continued or must be as short as possible.
        """
        if self.budget.limit is None or self.is_rushed or self.state is not None:
            return StepCost(0.0, 0.0)
        max_examples = min(run.recipe.batch, len(run.train_rows))
        return measure_step_cost(run.measure_step_seconds, max_examples, self.budget.remaining)

    def _count_steps(self, run: TrainingRun, cost: StepCost, seconds: float) -> int:
        """Return about how many training steps of a run fit into a time.

        Args:
            run: The run.
            cost: The cost of a training step with a single batch.
            seconds: The time.
        """
        num_batches = run.recipe.accumulate  # in each process
        num_examples = run.batch_size / (num_batches * run.ranks.world_size)
        step_seconds = num_batches * cost.estimate_seconds(num_examples)
        return int(seconds / max(step_seconds, 1e-9))

    def _choose_batch(
        self,
        run: TrainingRun,
        step_cost: StepCost,
        costs: PhaseCosts,
        maximum: RecordCounts,
        validation_seconds: float,
        noun: str,
    ) -> int:
        """Return the number of examples in a batch with which the time limit allows enough training steps.

        It is the batch of the recipe or a smaller power of two (`reduce_batch`). If the batch is reduced, or if the
        limit is too short even for one step with one example, a message is sent.

        Args:
            run: The training run with the batch of its recipe.
            step_cost: The cost of a training step with a single batch.
            costs: Measured costs of the phases after training.
            maximum: The numbers of records that these phases use if there is enough time.
            validation_seconds: Seconds of the first and the last validation, if they are short.
            noun: What an example is, for the message.
        """
        recipe = run.recipe
        min_final_seconds = compute_min_counts(maximum).estimate_seconds(costs) + costs.fixed
        # The shortest training is one step with one example in each of its batches.
        min_seconds = recipe.accumulate * step_cost.estimate_seconds(1) + validation_seconds + min_final_seconds
        if is_time_too_short(self.budget, min_seconds, self.on_message):
            return 1
        training_seconds = estimate_training_seconds(self.budget, costs, maximum, validation_seconds)
        is_set = self.settings.batch is not None
        return reduce_batch(recipe, training_seconds, step_cost, noun, self.on_message, is_set)


class RunPlanner(PresetPlanner):
    """Creates training runs that fit into a time limit.

    Args:
        settings: All options of `deformer-train`.
        folder: An existing folder for checkpoints.
        budget: The time that the run may take.
        start_seconds: Seconds that the start of the command took.
        is_rushed: Whether the time limit is too short for any job. Nothing is measured then, and the run is as short as
            possible.
        state: JSON state of the interrupted run that is continued. None to start from the beginning.
        ranks: The processes that train together.
        on_message: Called with a line of text for the user.
        data_identity: Values by name that must be unchanged when the run is continued, in addition to the
            hyperparameters and the table.
    """

    def __init__(
        self,
        settings: TrainConfig,
        folder: Path,
        budget: TimeBudget,
        start_seconds: float = 0.0,
        is_rushed: bool = False,
        state: dict[str, Any] | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        on_message: Callable[[str], None] = lambda line: None,
        data_identity: dict[str, Any] | None = None,
    ) -> None:
        self.settings, self.folder, self.budget, self.start_seconds = settings, folder, budget, start_seconds
        self.is_rushed, self.state, self.ranks, self.on_message = is_rushed, state, ranks, on_message
        self.data_identity = data_identity or {}

    def plan(self, data: PreparedTable, old_model: DEformer | None) -> PlannedRun:
        """Create the model, its Gaussian prior and the training run.

        Under a time limit, the costs of the phases after training are measured, a preset is chosen, and the batch is
        reduced if necessary.

        Args:
            data: The prepared table.
            old_model: The model that is adapted (`--init-from`). None to train a new model.

        Returns:
            The run. The state of an interrupted run is not restored yet.
        """
        # Options that cannot be used are reported before the prior is fitted, which may take long.
        model_store.resolve_device(self.settings.device)
        if old_model is None:
            model_config(self._set_preset(resolve_preset(self.settings)), data.schema.has_repeating_sensors)
        self.on_message("fitting the Gaussian prior")
        prior = self._fit_prior(data, old_model)
        self.budget.mark_phase("prior")
        if self.budget.limit is not None and not self.is_rushed:
            self.on_message("measuring how long training and calibration take")
        run, settings, reason, step_costs = self._choose_preset(data, old_model, prior)
        maximum = count_all_records(data)
        num_train = len(run.train_rows)
        has_prior = prior.priors is not None or prior.process is not None
        num_prior_records = min(num_train, prior.max_records) if has_prior else 0
        if self.budget.limit is None:
            return PlannedRun(run, settings, reason, None, maximum, num_prior_records)
        costs = self._measure_phase_costs(run.averaged_model, data, prior.priors)
        fixed_seconds = costs.fixed
        if self.settings.folds:
            costs, maximum = _leave_out_final_phases(costs, maximum)
        if self.state is not None:  # an interrupted run is continued with its own batch
            batch = self.state["identity"]["batch"]
        elif self.is_rushed:
            batch = min(run.recipe.batch, MIN_STEPS)
        else:
            # There are at least two validations: of the initial weights and of the trained ones.
            validation_seconds = 2 * MIN_VALIDATION_ROWS * VALIDATION_ORDERS * costs.held_out
            batch = self._choose_batch(run, step_costs, costs, maximum, validation_seconds, "record")
        if batch != run.recipe.batch:
            run = self._create_run(data, old_model, prior, settings, batch)
        self.budget.mark_phase("planning")
        return PlannedRun(run, settings, reason, costs, maximum, num_prior_records, fixed_seconds)

    def plan_fold(self, data: PreparedTable, old_model: DEformer | None, first: PlannedRun) -> PlannedRun:
        """Create a further model and its run for cross-conformal calibration (`--folds`).

        Preset, batch and costs are those of the first model, so nothing is measured again.

        Args:
            data: The table with another split.
            old_model: The model that is adapted (`--init-from`). None to train a new model.
            first: The run of the first model.
        """
        prior = self._fit_prior(data, old_model, first.run.identity["prior_records"])
        settings = self.settings.model_copy(update={"preset": first.settings.preset})
        run = self._create_run(data, old_model, prior, settings, first.run.recipe.batch)
        maximum = replace(count_all_records(data), ranking=0, held_out_passes=0)
        return PlannedRun(run, settings, first.preset_reason, first.costs, maximum, first.num_prior_records)

    def _create_run(
        self,
        data: PreparedTable,
        old_model: DEformer | None,
        prior: FittedPrior,
        settings: TrainConfig,
        batch: int | None = None,
    ) -> TrainingRun:
        """Create a model with new weights, or with those of the old model, and the run that trains it.

        Args:
            data: The prepared table.
            old_model: The model that is adapted (`--init-from`). None for new weights.
            prior: The fitted Gaussian prior.
            settings: All options, with a preset that is not "auto".
            batch: Number of records in a batch. None to use the number of the recipe.
        """
        torch.manual_seed(settings.seed)  # the initial weights depend on the seed alone
        if old_model is None:
            config = model_config(settings, data.schema.has_repeating_sensors)
            model = DEformer(data.schema, replace(config, **prior.hyperparameters))  # type: ignore[arg-type]
        else:
            model = finetune.extend_model(old_model, data.schema)
            model.ranking = old_model.ranking  # `add_ranking` keeps the old exemplars and adds those of this table
        device = self.ranks.choose_device(model_store.resolve_device(settings.device))
        if prior.priors is not None:
            model.gaussians = prior.priors.full
            prior.priors.by_fold.to(device)
        if prior.process is not None and model.process is not None:
            model.process.load_state_dict(prior.process)
            if device.type == "cpu":
                attach_compiled_process(model.process, data.schema)
        model = model.to(device)
        recipe = choose_recipe(settings, int((data.split == Split.TRAIN).sum()))
        recipe = recipe if batch is None else replace(recipe, batch=batch)
        identity = _describe_identity(settings, data, model.config) | asdict(recipe)
        identity |= {"processes": self.ranks.world_size, "prior_records": prior.max_records} | self.data_identity
        identity = convert_identity(identity)
        return TrainingRun(
            data,
            model,
            recipe,
            seed=settings.seed,
            folder=self.folder,
            budget=self.budget,
            identity=identity,
            priors=prior.priors,
            ranks=self.ranks,
        )

    def _fit_prior(
        self, data: PreparedTable, old_model: DEformer | None, max_records: int | None = None
    ) -> FittedPrior:
        """Fit the Gaussian prior to the table, or adapt that of the old model (`--init-from`).

        The prior is fitted with more and more Gaussians, as long as they improve it and there is time. Under a time
        limit, it is first fitted to a few records, to measure for how many records there is time.

        Args:
            data: The prepared table.
            old_model: The model that is adapted, or None.
            max_records: Largest number of records to which the prior is fitted, if it is known already.
        """
        seed = self.settings.seed
        if old_model is not None:
            num_old_features = len(old_model.schema)
            if old_model.process is not None:
                return FittedPrior(None, 0, factor_analysis.adapt_factors(old_model.process, data, num_old_features))
            if old_model.gaussians is None:
                return FittedPrior(None, 0)
            priors = finetune.adapt_priors(old_model.gaussians, data, num_old_features, seed)
            return FittedPrior(priors, gaussian_prior.MAX_ROWS)
        max_gaussians, deadline = choose_gaussians(self.settings), math.inf
        if max_gaussians and int(data.schema.is_linear.sum()) > gaussian_prior.MAX_MIXTURE_FEATURES:
            return self._fit_factors(data, max_records)
        if self.state is not None:
            # A run that is continued must get the same prior again, so it must not depend on the time.
            max_gaussians = self.state["identity"]["gaussians"]
            max_records = self.state["identity"]["prior_records"]
        elif self.budget.limit is not None:
            started = self.budget.elapsed
            deadline = started + PRIOR_SHARE * self.budget.remaining
            num_records = int((data.split == Split.TRAIN).sum())
            if max_records is None and num_records > PROBE_RECORDS:
                probe = gaussian_prior.fit_priors(data, max_gaussians, seed, lambda: True, PROBE_RECORDS)
                probe_seconds = self.budget.elapsed - started
                # Half of the time is for one Gaussian, and the other half for more of them.
                num_affordable = PROBE_RECORDS * 0.5 * (deadline - self.budget.elapsed) / max(probe_seconds, 1e-9)
                max_records = int(min(gaussian_prior.MAX_ROWS, num_affordable))
                if max_records < 2 * PROBE_RECORDS:
                    return FittedPrior(probe, PROBE_RECORDS)
        max_records = max_records or gaussian_prior.MAX_ROWS
        previous = self.budget.elapsed
        messages = MessageLimiter(self.on_message, previous)

        def is_time_short() -> bool:
            """Return whether a larger number of Gaussians probably takes longer than the prior may take."""
            nonlocal previous
            now = self.budget.elapsed
            last_seconds, previous = now - previous, now
            messages.pass_on(now, lambda: "fitting the Gaussian prior with more Gaussians")
            return now + 1.5 * last_seconds > deadline

        return FittedPrior(
            gaussian_prior.fit_priors(data, max_gaussians, seed, is_time_short, max_records), max_records
        )

    def _fit_factors(self, data: PreparedTable, max_records: int | None) -> FittedPrior:
        """Fit the prior of wide records. Under a time limit, more factors are tried as long as there is time.

        Args:
            data: The prepared table.
            max_records: Largest number of records to which the prior is fitted, if it is known already.
        """
        max_records, rank = max_records or factor_analysis.MAX_ROWS, None
        if self.state is not None:
            # A run that is continued must get the same prior again, so it must not depend on the time.
            max_records, rank = self.state["identity"]["prior_records"], self.state["identity"]["process_rank"]
        started = previous = self.budget.elapsed
        deadline = started + PRIOR_SHARE * self.budget.remaining

        def is_time_short() -> bool:
            """Return whether a larger number of factors, and the final fit, probably take longer than they may."""
            nonlocal previous
            now = self.budget.elapsed
            last_seconds, previous = now - previous, now
            return now + 4.0 * last_seconds > deadline

        factors = factor_analysis.fit_factors(data, self.settings.seed, max_records, is_time_short, rank)
        return FittedPrior(None, max_records, factors.to_state(data.schema.is_linear))

    def _choose_preset(
        self, data: PreparedTable, old_model: DEformer | None, prior: FittedPrior
    ) -> tuple[TrainingRun, TrainConfig, str, StepCost]:
        """Create the run with the preset that suits the table and the time.

        With `--preset auto`, it is the larger one of `AUTO_PRESETS` if the time limit leaves at least
        `MIN_STEPS_OF_LARGER_PRESET` training steps for it, otherwise the smaller one.

        Args:
            data: The prepared table.
            old_model: The model that is adapted, or None.
            prior: The fitted Gaussian prior.

        Returns:
            (run, settings, reason, cost). The settings have the chosen preset. The reason is a text for the user. The
            cost is that of a training step, 0 if it was not measured.
        """
        chosen = self._choose_without_measuring()
        if chosen is not None:
            run = self._create_run(data, old_model, prior, chosen[0])
            return run, *chosen, self._measure_step(run)
        large, small = AUTO_PRESETS
        settings = self._set_preset(small)
        run = self._create_run(data, old_model, prior, settings)
        cost = self._measure_step(run)
        # The larger preset is only measured if its steps would be affordable at the least possible cost.
        num_steps = int(self._estimate_steps(run, cost) / MIN_COST_RATIO)
        num_needed = min(MIN_STEPS_OF_LARGER_PRESET, run.steps)  # with --epochs the schedule may be shorter
        if num_steps >= num_needed:
            large_settings = self._set_preset(large)
            large_run = self._create_run(data, old_model, prior, large_settings)
            num_needed = min(MIN_STEPS_OF_LARGER_PRESET, large_run.steps)
            large_cost = self._measure_step(large_run)
            num_steps = self._estimate_steps(large_run, large_cost)
            if num_steps >= num_needed:
                reason = "the time limit leaves enough training steps for it"
                return large_run, large_settings, reason, large_cost
        return run, settings, self._explain_smaller_preset(num_steps, num_needed), cost

    def _estimate_steps(self, run: TrainingRun, cost: StepCost) -> int:
        """Return about how many training steps of a run fit into the remaining time.

        Args:
            run: The run.
            cost: The cost of a training step with a single batch.
        """
        return self._count_steps(run, cost, TRAINING_SHARE * self.budget.remaining)

    def _measure_phase_costs(
        self, model: DEformer, data: PreparedTable, priors: CrossFittedPriors | None
    ) -> PhaseCosts:
        """Measure on a few records how long calibration, ranking and held-out figures take.

        Args:
            model: The model before training, which takes as long as the trained one.
            data: The prepared table.
            priors: The Gaussian prior with its variants, None if the model has none.

        Returns:
            The seconds per record of each phase, increased by a safety factor.
        """
        fixed_seconds = estimate_fixed_seconds(self.start_seconds, len(data.schema))
        if self.is_rushed:
            seconds = ASSUMED_SECONDS_PER_RECORD
            return PhaseCosts(calibration=seconds, ranking=2 * seconds, held_out=seconds, fixed=fixed_seconds)
        settings, clock = self.settings, self.budget.clock
        rows = data.select_rows(Split.CALIBRATION)
        order = choose_order(settings.order_of_features, data)
        calibration_seconds = measure_seconds_per_record(
            lambda num_records: compute_statistics(model, data, rows[:num_records], order, seed=0),
            clock,
            len(rows),
            min_ratio=MIN_CLEAR_RATIO,
        )
        held_out_seconds = measure_seconds_per_record(
            lambda num_records: evaluate_held_out(model, data, rows[:num_records], num_orders=1, seed=0),
            clock,
            len(rows),
            min_ratio=MIN_CLEAR_RATIO,
        )
        distance_seconds = measure_distance_seconds(
            model, data, choose_exemplars(settings), settings.seed, clock, priors
        )
        return PhaseCosts(
            calibration=SAFETY_FACTOR * calibration_seconds,
            ranking=SAFETY_FACTOR * (calibration_seconds + distance_seconds),
            held_out=SAFETY_FACTOR * held_out_seconds,
            fixed=fixed_seconds,
        )


def is_time_too_short(budget: TimeBudget, min_seconds: float, on_message: Callable[[str], None]) -> bool:
    """Return whether the shortest training and the least work after it do not fit, and send a message if so.

    Args:
        budget: The time of the job, which is limited.
        min_seconds: Seconds of one training step with the smallest batch, of its validation, and of the phases after
            training with the smallest numbers of records.
        on_message: Called with the message.
    """
    min_limit = budget.elapsed + min_seconds
    if budget.limit is None or min_limit <= budget.limit:
        return False
    on_message(
        f"--max-time {budget.limit:g}s is too short for this table on this machine, which needs at least about "
        f"{min_limit:.0f} s; training for one step and finishing as early as possible"
    )
    return True


def reduce_batch(
    recipe: Recipe,
    training_seconds: float,
    cost: StepCost,
    noun: str,
    on_message: Callable[[str], None],
    is_set: bool = False,
) -> int:
    """Return the number of examples in a batch with which the time allows enough training steps.

    It is reduced for `MIN_USEFUL_STEPS` steps to `MIN_USEFUL_BATCH` examples, and for `MIN_STEPS` steps as far as
    necessary. But it is not reduced further if most of the time of a step does not depend on it. The number of steps
    would then hardly grow.

    Args:
        recipe: The hyperparameters of training, whose batch is the largest one.
        training_seconds: Seconds for all training steps.
        cost: The cost of a step with a single batch.
        noun: What an example is, for the message.
        on_message: Called with a message if the batch is reduced.
        is_set: Whether the user has set the batch. The message then says that it is not used.
    """
    # Seconds of each of the `accumulate` batches of a step if the steps take all of the time.
    batch_seconds = training_seconds / recipe.accumulate
    for_useful_steps = cost.count_affordable(batch_seconds / MIN_USEFUL_STEPS)
    for_few_steps = cost.count_affordable(batch_seconds / MIN_STEPS)
    num_as_long_as_fixed = cost.fixed / max(cost.per_record, 1e-9)
    num_chosen = max(for_useful_steps, min(for_few_steps, MIN_USEFUL_BATCH), num_as_long_as_fixed, 1.0)
    if num_chosen >= recipe.batch:
        return recipe.batch
    batch = 1 << int(math.log2(num_chosen))  # the largest power of two that is not larger
    setting = f"batch = {recipe.batch} of the settings is not used: " if is_set else ""
    remedy = "; raise --max-time to use it" if is_set else ""
    on_message(
        f"{setting}the batch is reduced from {recipe.batch} to {format_count(batch, noun)}, so that --max-time allows "
        f"enough steps{remedy}"
    )
    return batch


def estimate_fixed_seconds(start_seconds: float, num_features: int) -> float:
    """Return the estimated seconds to render the report, write the model directory and end the process.

    Args:
        start_seconds: Seconds that the start of the command took.
        num_features: Number of features of the model.
    """
    seconds = max(MIN_FIXED_SECONDS, FIXED_SHARE_OF_START * start_seconds)
    return seconds + FIXED_SECONDS_PER_FEATURE * num_features


def create_first_part(budget: TimeBudget, num_folds: int, start_seconds: float, num_features: int) -> TimeBudget:
    """Return the part of the time for the first of several models (`--folds`).

    The preset and the batch are planned once, for the first model, which therefore gets additional time. Planning takes
    about as long as the start of the command. Time for the report is subtracted before the rest is divided.

    Args:
        budget: The time of the whole job.
        num_folds: Number of models.
        start_seconds: Seconds that the start of the command took.
        num_features: Number of features of the model.
    """
    if budget.limit is None:
        return budget
    final_seconds = estimate_fixed_seconds(start_seconds, num_features)
    part = budget.create_equal_part(num_folds, final_seconds + start_seconds)
    return TimeBudget((part.limit or 0.0) + start_seconds, budget.clock)


def _leave_out_final_phases(costs: PhaseCosts, maximum: RecordCounts) -> tuple[PhaseCosts, RecordCounts]:
    """Return costs and numbers of records without ranking, held-out figures and the report."""
    return replace(costs, fixed=0.0), replace(maximum, ranking=0, held_out_passes=0)


def _describe_identity(settings: TrainConfig, data: PreparedTable, config: ModelConfig) -> dict[str, Any]:
    """Return what must be unchanged when an interrupted run is continued: data, seed, hyperparameters and old model.

    The keys are names for an error message.

    Args:
        settings: All options of `deformer-train`, with a preset that is not "auto".
        data: The prepared table.
        config: Hyperparameters of the network.
    """
    old_fingerprint = None
    if settings.init_from is not None:
        old_fingerprint = model_store.read_manifest(settings.init_from)["fingerprint"]
    return {
        "the model of --init-from": old_fingerprint,
        "the data's fingerprint": data.fingerprint,
        "records": len(data.split),  # fewer than those of the input if a time limit permitted only a sample
        "seed": settings.seed,
        "max_time": settings.max_time,  # a time limit changes the schedule
        "contamination": settings.contamination or None,  # it determines which records are left out of training
        "preset": settings.preset,
        **asdict(config),
    }
