"""The training loop: it minimises the negative log-likelihood of records whose readings are in random order.

The loss of a record is −Σ ln p(value | earlier readings) / F. The sum is over its readings, F is the number of scored
features, and each sample has a new random order (equation 2 of arXiv 2106.06989). Records with irregular readings are
learnt in blocks, and the loss is the mean of −ln p over readings (`trainer.examples`). The learning rate rises linearly
at first and then falls along half a cosine. The weights are averaged over the last steps. The result is the average
with the smallest validation loss.

All random numbers of step t depend on the seed and t alone. Therefore a run that was interrupted and continued has
bit-identical results to one that was not, unless a time limit is set.
"""

from __future__ import annotations

import copy
import math
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._triton import has_triton

from deformer_stream.durations import format_duration
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.settings.base import to_flag
from trainer import checkpoint
from trainer.batches import BatchSource
from trainer.budget import NO_COSTS, Costs, TimeBudget, choose_batch_size
from trainer.data import PreparedTable
from trainer.distributed import Ranks
from trainer.evaluate import BATCH_SIZE
from trainer.examples import Examples, RecordExamples
from trainer.gaussian_prior import CrossFittedPriors
from trainer.sampling import create_generator
from trainer.settings import Compile, Optimizer, Precision, TrainSettings

EVALUATIONS = 30
"""Number of validations in a run that is not stopped early. They are at equal distances."""

VALIDATION_ROWS = 1000
"""Largest number of validation records, or of blocks of records with irregular readings."""

MIN_VALIDATION_ROWS = 2
"""Number of validation records that are used even if they take more than `VALIDATION_SHARE` of a time limit."""

VALIDATION_SHARE = 0.02
"""Share of a time limit that one validation may take.

With fewer records, chance would decide which weights are kept. If validations take long, there are fewer of them.
"""

MEASURED_AGAIN_AT = (0.5, 0.8, 0.95)
"""Shares of the schedule after which the costs of the work after training are measured again.

The load of the machine can change during a training. With the last one, little time is lost or missing if it did.
"""

CHECKPOINT_SECONDS = 30.0
"""Seconds between two checkpoints."""

MIN_SECONDS_TO_COMPILE, MIN_STEPS_TO_COMPILE = 300.0, 2000
"""The shortest training on a GPU, in seconds and in steps, for which the layers are compiled."""

MUON_RATE_FACTOR = 10.0
"""Learning rate of the matrices that Muon updates, relative to that of AdamW for all other weights."""

SINGLE_PROCESS = Ranks()
"""The group of processes if one process trains alone."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of training. The fields are keys of the configuration file and of the manifest.

    Defaults are those of the preset `small`; `trainer.recipes` sets what differs for other presets and table sizes.

    Attributes:
        batch: Number of records in one batch.
        learning_rate: The largest learning rate of the schedule.
        epochs: Number of passes over the training records, from which the number of steps follows.
        weight_decay: Decoupled weight decay (as in AdamW) of weight matrices. Vectors have none.
        warmup: Number of steps in which the learning rate rises.
        clip: Largest norm of the gradient. Longer gradients are scaled to this norm.
        smoothing: Standard deviation of Gaussian noise that is added to measurements, in normalised units. Without it,
            exact relations between features make densities extremely narrow, and alerts less reliable. It reduces the
            held-out likelihood a little.
        forget: Probability that a label is replaced by the code of an unseen label, so that the network learns what to
            predict after an unseen label.
        arrival_share: Share (0 to 1) of the samples in their logged order of arrival, if the table has one. The others
            have random orders. Logged orders train the model on the orders that it will score (Shih et al., 2022).
        averaging: The final weights are an average over the latest steps. It covers this share (0 to 1) of all steps.
        patience: Number of validations without improvement after which training stops. By default it never stops early,
            because a falling learning rate improves the model most at the end.
        accumulate: Number of batches whose gradients are added for one step. The step is the same as with a single
            batch of all their records, but needs less memory.
        training_precision: Precision of the matrix products in the Transformer layers. "auto" selects bfloat16 if the
            processor or GPU is faster with it.
        optimizer: "adamw"; "muon" for the matrices of the Transformer layers, with AdamW for other weights; or "adam"
            with a constant learning rate, as in the paper.
        compile_layers: Whether to compile the Transformer layers if a GPU trains. "auto" compiles them if training is
            long enough to be faster with the time that this takes, and if a C compiler and Python's headers are
            installed.
    """

    batch: int
    learning_rate: float
    epochs: int
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    smoothing: float = 0.02
    forget: float = 0.01
    arrival_share: float = 0.5
    averaging: float = 0.1
    patience: int = EVALUATIONS
    accumulate: int = 1
    training_precision: Precision = "auto"
    optimizer: Optimizer = "adamw"
    compile_layers: Compile = "auto"


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The state of a running training, for a progress display.

    Attributes:
        step: Number of steps that are done.
        steps: Number of steps of the complete schedule.
        epoch: Number of complete passes over the training records.
        progress: Share (0 to 1) of the schedule that is done, by steps or by time, whichever is larger.
        train_nll: Mean −ln p of a training record since the last validation, in nats. NaN before the first step.
        validation_nll: Mean −ln p of a record in the last validation, in nats. NaN before the first validation.
    """

    step: int
    steps: int
    epoch: int
    progress: float
    train_nll: float
    validation_nll: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of the training loop.

    Attributes:
        model: The model in evaluation mode, with the averaged weights that had the smallest validation loss.
        history: One entry for each validation: "step", "epoch", "seconds" since the start, "learning_rate", and the
            mean −ln p of a record in nats in "train" and "validation".
        steps: Number of steps that were done.
        epochs: Number of passes over the training records, perhaps fractional.
        stopped_early: Whether training stopped before the end of its schedule, because the validation loss no longer
            improved.
        best_step: The step after which the averaged weights had the smallest validation loss, 0 for the initial
            weights. The model has the weights of this step.
        best_validation: The smallest validation loss: mean −ln p of a record, in nats.
        initial_validation: The validation loss of the initial weights, which predict what the Gaussian prior or the old
            model (`--init-from`) predicts.
        planned_steps: Number of steps of the complete schedule.
        num_train_examples: Number of different training records that the steps used, or of blocks of records with
            irregular readings.
        num_validation_examples: Number of records or blocks of each validation.
        step_seconds: Mean seconds of a training step, without the first one; 0 if there was only one.
    """

    model: DEformer
    history: list[dict[str, float]]
    steps: int
    epochs: float
    stopped_early: bool
    best_step: int
    best_validation: float
    initial_validation: float
    planned_steps: int
    num_train_examples: int
    num_validation_examples: int
    step_seconds: float


class Interrupted(Exception):  # noqa: N818 - not an error: the run was stopped by a signal and can be continued
    """Training was stopped by a signal after its checkpoint was written."""


class TrainingRun:
    """The training of one model, which can be interrupted and continued.

    The order of calls is: create the run, `restore` to continue from a checkpoint, `run`.

    Args:
        data: The prepared table, or the examples to learn from, such as those of a table of irregular readings.
        model: The model to train, on the device for training.
        recipe: The hyperparameters of training.
        seed: Seed of orders, noise and batches.
        folder: An existing folder for checkpoints.
        budget: The time that training may take.
        identity: Options and fingerprint of the data, by name. A checkpoint can only be restored if they are the same.
        priors: The Gaussian prior with the variants that are used in training. None if the model has no prior.
        ranks: The processes that train together.
        validation_precision: Precision of the matrix products of the layers in validations.
    """

    def __init__(
        self,
        data: PreparedTable | Examples,
        model: DEformer,
        recipe: Recipe,
        seed: int,
        folder: Path,
        budget: TimeBudget,
        identity: dict[str, Any],
        priors: CrossFittedPriors | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        validation_precision: Precision = "float32",
    ) -> None:
        self.model, self.recipe, self.seed = model, recipe, seed
        self.validation_precision = validation_precision
        self.examples: Examples = (
            RecordExamples(data, recipe.smoothing, recipe.forget, recipe.arrival_share, priors)
            if isinstance(data, PreparedTable)
            else data
        )
        self.folder, self.budget = folder, budget  # the folder for checkpoints, the time that training may take
        self.identity = identity  # options and fingerprint of the data, which must be the same in a continued run
        self.priors = priors  # the Gaussian prior, None if the model has none
        self.ranks = ranks  # the processes that train together
        self.train_rows = self.examples.train_indexes  # rows of the table, or indexes of blocks
        # The order is random, because a time limit may reduce the validation records to the first ones.
        shuffled_rows = np.random.default_rng([seed, 0x7A1]).permutation(self.examples.validation_indexes)
        self.validation_rows = shuffled_rows[:VALIDATION_ROWS]
        self.validation_batch_size = BATCH_SIZE
        # Number of records of one step, in all processes together.
        self.batch_size = min(recipe.batch * recipe.accumulate * ranks.world_size, len(self.train_rows))
        self.steps_per_epoch = len(self.train_rows) // self.batch_size
        self.steps = max(1, recipe.epochs * self.steps_per_epoch)
        self.averaged_model = copy.deepcopy(model).eval().requires_grad_(False)
        # The averaged weights with the smallest validation loss; before the first validation the initial weights.
        self.best_weights = {name: p.clone() for name, p in self.averaged_model.named_parameters()}
        self.parameters: list[Tensor] = list(model.parameters())
        self.averaged_parameters: list[Tensor] = list(self.averaged_model.parameters())
        self.optimizers = _create_optimizers(model, recipe)
        self.is_low_precision = should_use_bfloat16(recipe.training_precision, model.device)
        self.step = 0  # number of steps that are done
        self.validations_since_best = 0  # number of validations without improvement
        self.best_validation = math.inf  # smallest validation loss, in nats
        self.best_step = 0  # the step of the smallest validation loss, 0 for the initial weights
        self.initial_validation = math.nan  # validation loss of the initial weights
        self.history: list[dict[str, float]] = []
        self.next_validation_progress = 1.0 / EVALUATIONS
        self.losses: list[float] = []  # mean −ln p of a record in each step since the last validation
        # Whether time was reserved for the work after training, which needs measured costs.
        self.has_measured_costs = False
        # (epoch, its permutation of the training records); −1 before the first epoch.
        self._epoch_permutation: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        # The loss and the norm of the gradient, (2,) on the device, of steps whose results have not been read yet.
        self._unread_results: list[Tensor] = []
        self._validated_at = -math.inf  # clock at the end of the last validation
        self._validation_seconds = 0.0  # duration of the last validation

    @property
    def data(self) -> PreparedTable:
        """The prepared table, if its features report once in a record.

        Raises:
            TypeError: The examples are blocks of a table of irregular readings.
        """
        if not isinstance(self.examples, RecordExamples):
            raise TypeError("the examples of this run are blocks of records, so there is no matrix of values")
        return self.examples.data

    @property
    def progress(self) -> float:
        """Share (0 to 1) of the schedule that is done, by steps or by time, whichever is larger."""
        return min(1.0, max(self.step / self.steps, self.budget.compute_training_progress()))

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_status: Callable[[TrainingStatus], None] = lambda status: None,
        costs: Costs = NO_COSTS,
        measure_again: Callable[[DEformer], Costs] | None = None,
    ) -> TrainingResult:
        """Train until the schedule or the time ends, for at least one step.

        Args:
            should_stop: Called after every step. If it returns True, a checkpoint is written and training stops.
            on_status: Called after every step.
            costs: The seconds that validation and the work after training take, for which time is reserved if there is
                a time limit.
            measure_again: Called with the averaged model during a training with a time limit, at the shares
                `MEASURED_AGAIN_AT` of its schedule. It returns the seconds at present. The time for training becomes
                longer or shorter accordingly. None to keep the first costs.

        Returns:
            The trained model, with the history of the losses.

        Raises:
            Interrupted: `should_stop` returned True.
            ConfigError: Training diverged.
        """
        if self.budget.limit is not None and not self.has_measured_costs:
            self._reserve_time(costs, self.budget.limit)
        if measure_again is None or self.budget.limit is None:
            shares_left = []
        else:
            shares_left = [share for share in MEASURED_AGAIN_AT if share > self.progress]
        saved_at = self.budget.elapsed
        is_exhausted = self.validations_since_best >= self.recipe.patience
        step_seconds, num_steps_before, seconds_of_steps = 0.0, self.step, 0.0
        self.model.train()
        is_gpu = self.model.device.type == "cuda"
        if is_gpu and self._should_compile():
            # The layers of a network have the same code, so few variants are compiled.
            self.model.apply_layer = torch.compile(self.model.apply_layer)
        with (
            _deterministic_algorithms(self.model.device),
            closing(BatchSource(self._draw_batch, is_gpu or self.examples.draws_ahead)) as batches,
        ):
            while not self.step or not (is_exhausted or self.progress >= 1.0 or self._is_too_late(step_seconds)):
                step_started = self.budget.elapsed
                self._train_step(batches.get(self.step))
                # While a GPU computes a step, the next one is prepared. Its result is read at the end of the next step.
                self._read_results(1 if is_gpu else 0)
                step_seconds = self.budget.elapsed - step_started
                if self.step > num_steps_before + 1:  # the first step may load libraries
                    seconds_of_steps += step_seconds
                if self._is_validation_due():
                    self._validate_and_record()
                    is_exhausted = self.validations_since_best >= self.recipe.patience
                if (
                    measure_again is not None
                    and shares_left
                    and self.budget.compute_training_progress() >= shares_left[0]
                ):
                    shares_left = [share for share in shares_left if share > self.progress]
                    self._change_reserve(measure_again(self.averaged_model))
                on_status(self.get_status())
                if self.ranks.is_any(should_stop()):
                    self.save()
                    raise Interrupted
                if self.budget.elapsed - saved_at > CHECKPOINT_SECONDS:
                    self.save()
                    saved_at = self.budget.elapsed
            if not self.history or self.history[-1]["step"] != self.step:
                self._validate_and_record()
        self.save()
        with torch.no_grad():
            for name, parameter in self.averaged_model.named_parameters():
                parameter.copy_(self.best_weights[name])
        stopped_early = is_exhausted and self.progress < 1.0
        num_epochs = self.step / self.steps_per_epoch
        return TrainingResult(
            model=self.averaged_model,
            history=self.history,
            steps=self.step,
            epochs=num_epochs,
            stopped_early=stopped_early,
            best_step=self.best_step,
            best_validation=self.best_validation,
            initial_validation=self.initial_validation,
            planned_steps=self.steps,
            num_train_examples=min(len(self.train_rows), self.step * self.batch_size),
            num_validation_examples=len(self.validation_rows),
            step_seconds=seconds_of_steps / max(self.step - num_steps_before - 1, 1),
        )

    def _is_too_late(self, step_seconds: float) -> bool:
        """Return whether the time for training is too short for another step.

        A step is started if at least half of it fits. So training ends at most half a step late.

        Args:
            step_seconds: Seconds that the last step took. Another step is assumed to take as long.
        """
        if self.budget.limit is None:
            return False
        # Seconds of the budget after which training must end, because the rest is for the work after it.
        training_seconds = self.budget.limit - self.budget.reserve
        return self.budget.elapsed + 0.5 * step_seconds > training_seconds

    def _reserve_time(self, costs: Costs, limit: float) -> None:
        """Reserve time for the last validation and the work after training, and limit the validation records.

        A validation may take `VALIDATION_SHARE` of the limit.

        Args:
            costs: Measured costs of validation and of the work after training.
            limit: The time limit in seconds.
        """
        self.has_measured_costs = True
        # `costs.record` is the time of one record in one order of its readings. Validation may use several orders.
        seconds_per_record = max(self.examples.num_orders * costs.record, 1e-9)
        num_affordable = VALIDATION_SHARE * limit / seconds_per_record
        self.validation_rows = self.validation_rows[: max(MIN_VALIDATION_ROWS, int(num_affordable))]
        self.validation_batch_size = choose_batch_size(costs.record, BATCH_SIZE)
        self._change_reserve(costs)

    def _change_reserve(self, costs: Costs) -> None:
        """Reserve time for the last validation and the work after training.

        Args:
            costs: Measured costs of validation and of the work after training.
        """
        last_validation_seconds = len(self.validation_rows) * self.examples.num_orders * costs.record
        # `costs.after` is the time of all work after training, such as calibration and the report.
        self.budget.reserve = costs.after + last_validation_seconds

    def get_status(self) -> TrainingStatus:
        """Return the state of the training for a progress display."""
        last_validation = self.history[-1] if self.history else {"train": math.nan, "validation": math.nan}
        # `losses` contains the steps since the last validation, so it is empty directly after a validation.
        train_nll = fmean(self.losses) if self.losses else last_validation["train"]
        epoch = self.step // self.steps_per_epoch
        return TrainingStatus(self.step, self.steps, epoch, self.progress, train_nll, last_validation["validation"])

    def measure_step_seconds(self, num_records: int) -> float:
        """Return the measured seconds of a forward and backward pass of the first `num_records` training records.

        They show which batch size a time limit allows. No weight is changed.
        """
        rows = self.train_rows[:num_records]
        batch = self.examples.draw(rows, create_generator(self.seed))
        started = self.budget.elapsed
        self.model.train()
        with _deterministic_algorithms(self.model.device):
            self._accumulate_gradients(batch, slice(0, len(rows)))
        self.model.zero_grad(set_to_none=True)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the kernels run after the calls that start them
        return self.budget.elapsed - started

    def _should_compile(self) -> bool:
        """Return whether to compile the layers for a GPU, which takes 10 to 30 seconds before the first step."""
        if self.recipe.compile_layers != "auto":
            return self.recipe.compile_layers == "always"
        has_time = self.budget.limit is None or self.budget.limit - self.budget.elapsed >= MIN_SECONDS_TO_COMPILE
        # Triton compiles C code that includes Python's headers.
        has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
        can_compile = has_triton() and shutil.which("cc") is not None and has_headers
        return has_time and self.steps >= MIN_STEPS_TO_COMPILE and can_compile

    def _draw_batch(self, step: int) -> Any:
        """Return the batch of a step, in which all processes train together."""
        return self.examples.draw(self._choose_batch_rows(step), create_generator(self.seed, 0x57E9, step))

    def _choose_batch_rows(self, step: int) -> NDArray[np.int64]:
        """Return the row numbers of the records of a step, ascending.

        Every epoch has its own random permutation of the training records. If the last records of an epoch do not fill
        a batch, they are not used in it.
        """
        epoch, batch_index = divmod(step, self.steps_per_epoch)
        if self._epoch_permutation[0] != epoch:
            rng = np.random.default_rng([self.seed, 0xE90C, epoch])
            self._epoch_permutation = epoch, rng.permutation(self.train_rows)
        _, shuffled_rows = self._epoch_permutation
        first = batch_index * self.batch_size
        return np.sort(shuffled_rows[first : first + self.batch_size])  # ascending rows are read faster from disk

    def _train_step(self, batch: Any) -> None:
        """Compute the gradient of one batch, and update the weights and their running average.

        Nothing here waits for a GPU to finish. `_read_results` gets the loss later.

        Args:
            batch: The batch of this step, which `examples.draw` has returned.
        """
        self.model.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.model.device)
        # All processes drew the same batch. Each computes the gradients of its own slices, one after the other.
        for part in self.ranks.select_slices(self.batch_size, self.recipe.accumulate):
            if self.model.config.dropout:  # dropout uses PyTorch's global generator, which must depend on the step
                torch.manual_seed(create_generator(self.seed, 0x57E9, self.step, part.start).initial_seed())
            loss += self._accumulate_gradients(batch, part)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.ranks.sum_in_place([loss, *gradients])  # over all processes
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.recipe.clip / norm).clamp(max=1.0))
        self._update_weights()
        self.step += 1
        self._update_average()
        self._unread_results.append(torch.stack([loss, norm]))

    def _read_results(self, num_left: int = 0) -> None:
        """Add the losses of steps to `losses`.

        Args:
            num_left: The number of last steps whose losses are left to the next call. Reading the result of a step
                blocks until a GPU has finished it.

        Raises:
            ConfigError: A gradient is not finite, so training has diverged.
        """
        while len(self._unread_results) > num_left:
            loss, norm = self._unread_results.pop(0).tolist()
            if not math.isfinite(norm):
                raise ConfigError(
                    f"training diverged at step {self.step - len(self._unread_results) - 1}: the gradient is not "
                    "finite; set a smaller learning_rate in the file that --config names"
                )
            self.losses.append(loss * self.examples.nats_factor)

    def _update_weights(self) -> None:
        """Set the learning rate of this step and let the optimizers update the weights from their gradients."""
        learning_rate = self._compute_learning_rate()
        for optimizer in self.optimizers:
            is_muon = isinstance(optimizer, torch.optim.Muon)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * MUON_RATE_FACTOR if is_muon else learning_rate
            optimizer.step()

    def _accumulate_gradients(self, batch: Any, part: slice) -> Tensor:
        """Compute the gradient of a part of a batch and add it to the gradients of the weights.

        Args:
            batch: The complete batch, which `examples.draw` has returned.
            part: The examples of the batch that belong to the part.

        Returns:
            A scalar: the part's share of the batch's loss. The sum over all parts is the loss.
        """
        loss = self.examples.compute_loss(self.model, batch, part, self.is_low_precision)
        torch.autograd.backward(loss)
        return loss.detach()

    def _compute_learning_rate(self) -> float:
        """Return the learning rate of this step.

        It is `recipe.learning_rate` times two factors. The first rises linearly to 1 in `recipe.warmup` steps or
        in 8% of the schedule, whichever is shorter. The second falls along half a cosine from 1 to 0.01. With "adam",
        the paper's optimizer, both are omitted.
        """
        if self.recipe.optimizer == "adam":
            return self.recipe.learning_rate
        warmup_factor = min(1.0, max((self.step + 1) / self.recipe.warmup, self.progress / 0.08))
        cosine_factor = 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * self.progress))
        return self.recipe.learning_rate * warmup_factor * cosine_factor

    def _update_average(self) -> None:
        """Update the running average of the weights after a step.

        The average always covers about the last `recipe.averaging` share of the steps so far. So the number of steps
        that it covers grows in the course of training. In step t, the old average has the factor β = (1 − 1/t)^(γ + 1),
        and the new weights have the factor 1 − β. Here γ = 1 / averaging (equation 121 of Karras et al., arXiv
        2312.02696).
        """
        gamma = 1.0 / self.recipe.averaging
        old_weight = (1.0 - 1.0 / self.step) ** (gamma + 1.0)  # β
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged_parameters, self.parameters, 1.0 - old_weight)

    def _is_validation_due(self) -> bool:
        """Return whether to validate after this step.

        There are `EVALUATIONS` validations at equal distances in the schedule. Under a time limit, they may take at
        most about a ninth of the time. Therefore a validation that took s seconds is followed by more than 8 · s
        seconds of training before the next one.
        """
        if self.progress < self.next_validation_progress:
            return False
        if self.budget.limit is not None:
            return self.budget.clock() - self._validated_at > 8.0 * self._validation_seconds
        return True

    def _validate_and_record(self) -> None:
        """Validate the averaged weights, keep them if they are the best so far, and add a row to the history."""
        self._read_results()
        started = self.budget.clock()
        if math.isinf(self.best_validation):  # this is the first validation
            self.best_validation = self.initial_validation = self._validate_initial_weights()
        nll = self._validate()
        self._validated_at = self.budget.clock()
        self._validation_seconds = self._validated_at - started
        # The next multiple of 1 / EVALUATIONS; 1e-9 compensates rounding errors of the progress.
        self.next_validation_progress = (math.floor(self.progress * EVALUATIONS + 1e-9) + 1) / EVALUATIONS
        self.validations_since_best += 1
        if nll < self.best_validation:
            self.best_validation, self.best_step, self.validations_since_best = nll, self.step, 0
            self.best_weights = {name: p.clone() for name, p in self.averaged_model.named_parameters()}
        self.history.append(
            {
                "step": self.step,
                "epoch": self.step / self.steps_per_epoch,
                "seconds": round(self.budget.elapsed, 2),
                "learning_rate": self._compute_learning_rate(),
                "train": fmean(self.losses),
                "validation": nll,
            }
        )
        self.losses = []

    def _validate(self) -> float:
        """Return the mean −ln p of the validation records under the averaged weights, in nats.

        The records and the orders of their readings are the same in every validation. As in training, the share
        `recipe.arrival_share` of the orders is the logged order of arrival.
        """
        is_low_precision = should_use_bfloat16(self.validation_precision, self.model.device)
        nll = self.examples.evaluate(
            self.averaged_model, self.validation_rows, self.seed, self.validation_batch_size, is_low_precision
        )
        return self.ranks.broadcast(nll)

    def _validate_initial_weights(self) -> float:
        """Return the mean −ln p of the validation records under the initial weights, in nats.

        The initial weights reproduce the predictions of the Gaussian prior, or of the model that is adapted. If
        training does not make this value smaller, the initial weights are the result. The method may only be called
        before the first validation, as long as `best_weights` are the initial weights.
        """
        # `_validate` evaluates the averaged model. It gets the initial weights meanwhile, then its own ones again.
        averaged_weights = [parameter.clone() for parameter in self.averaged_parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.averaged_parameters, list(self.best_weights.values()))
            nll = self._validate()
            torch._foreach_copy_(self.averaged_parameters, averaged_weights)
        return nll

    def save(self) -> None:
        """Write a checkpoint, from which `restore` can continue the run. Each process must call this method.

        Only the first process writes the file.
        """
        self._read_results()
        # All processes must read the clock, because the first one sends its time to the others.
        elapsed = self.budget.elapsed
        if not self.ranks.is_first:
            return
        # All tensors are stored in one dictionary, under names whose prefixes say what they belong to.
        tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in self.model.named_parameters()}
        tensors |= {f"average.{name}": p for name, p in self.averaged_model.named_parameters()}
        tensors |= {f"best.{name}": p for name, p in self.best_weights.items()}
        for i, optimizer in enumerate(self.optimizers):
            for parameter_index, moments in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{i}.{parameter_index}.{name}": moment for name, moment in moments.items()}
        state = {
            "identity": self.identity,
            "step": self.step,
            "steps": self.steps,
            "since_best": self.validations_since_best,
            "best_validation": self.best_validation,
            "best_step": self.best_step,
            "initial_validation": self.initial_validation,
            "history": self.history,
            "next_mark": self.next_validation_progress,
            "losses": self.losses,
            "elapsed": elapsed,
            "reserve": self.budget.reserve,
            "measured": self.has_measured_costs,
            "validation_rows": len(self.validation_rows),
        }
        checkpoint.save(self.folder, tensors, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Set weights, optimizers and progress to those of the checkpoint in the folder, so that `run` continues it.

        Args:
            state: The JSON state of the checkpoint, which `checkpoint.load_state` returned.

        Raises:
            ConfigError: The checkpoint was written with other data or options.
        """
        for name, value in self.identity.items():
            previous_value = state["identity"].get(name)
            if previous_value != value:
                option, before, now = _describe_change(name, previous_value, value)
                raise ConfigError(
                    f"--resume: the interrupted run cannot be continued, because {option} was {before}, "
                    f"now it is {now}; use the same data and options as before, or delete {self.folder} to train "
                    "from the beginning"
                )
        self.step, self.validations_since_best = state["step"], state["since_best"]
        self.best_validation, self.history = state["best_validation"], state["history"]
        self.best_step, self.initial_validation = state["best_step"], state["initial_validation"]
        self.next_validation_progress, self.losses = state["next_mark"], state["losses"]
        self.budget.spent += state["elapsed"]
        self.budget.reserve, self.has_measured_costs = state["reserve"], state["measured"]
        self.validation_rows = self.validation_rows[: state["validation_rows"]]
        tensors = checkpoint.load_tensors(self.folder)
        with torch.no_grad():
            for module, prefix in ((self.model, "model."), (self.averaged_model, "average.")):
                for name, parameter in module.named_parameters():
                    parameter.copy_(tensors[prefix + name])
        self.best_weights = {name: tensors[f"best.{name}"].to(self.model.device) for name in self.best_weights}
        for i, optimizer in enumerate(self.optimizers):
            # Names are "optimizer.<i>.<index of the parameter>.<name of the moment>".
            moments_by_parameter: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{i}."):
                    _, _, parameter_index, moment_name = name.split(".")
                    moments_by_parameter.setdefault(int(parameter_index), {})[moment_name] = tensor
            # The groups (weights and hyperparameters) are not stored, because the recipe determines them.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments_by_parameter, "param_groups": groups})


def should_use_bfloat16(requested: Precision, device: torch.device) -> bool:
    """Return whether to compute the matrix products of the Transformer layers in bfloat16 instead of float32.

    Args:
        requested: The precision that the user has chosen. "auto" selects bfloat16 on a GPU and on a CPU with AMX
            instructions. On other CPUs, PyTorch multiplies float32 matrices faster.
        device: The device on which the model is trained.
    """
    if requested != "auto" or device.type == "cuda":
        return requested != "float32"
    if not hasattr(torch.cpu, "get_capabilities"):  # PyTorch 2.9 has no such function
        return False
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _create_optimizers(model: DEformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model. Each weight is updated by exactly one of them.

    With "muon", the weight matrices of the Transformer layers are updated by Muon (K. Jordan and others, 2024), whose
    update of a matrix is orthogonal. The learning rate is scaled by the size of the matrix as in arXiv 2502.16982.
    AdamW updates all other weights. Weight decay applies to matrices only.

    Args:
        model: The model to train.
        recipe: The hyperparameters of training, of which the optimizer, the learning rate and weight decay are used.
    """
    if recipe.optimizer == "adam":
        return [torch.optim.Adam(model.parameters(), lr=recipe.learning_rate, fused=True)]
    optimizers: list[torch.optim.Optimizer] = []
    others = list(model.parameters())
    if recipe.optimizer == "muon":
        # `model.blocks` are the Transformer layers.
        layer_matrices = {name: p for name, p in model.blocks.named_parameters() if p.dim() == 2}
        matrix_ids = {id(p) for p in layer_matrices.values()}
        others = [p for p in others if id(p) not in matrix_ids]
        optimizers = [_create_muon(layer_matrices, recipe)]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [*optimizers, torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)]


def _create_muon(matrix_by_name: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.Muon:
    """Return PyTorch's optimizer Muon for the weight matrices of the Transformer layers.

    The joint matrix of queries, keys and values is updated as three matrices, because orthogonalising its update as a
    whole trains clearly worse (held-out NLL of binarised MNIST after a short run: 133 nats against less than 127). The
    optimizer gets parameters that share memory with the three parts. Before each step, a hook sets their gradients.

    Args:
        matrix_by_name: The matrices, by their parameter names, such as those that end in "qkv.weight".
        recipe: Learning rate and weight decay.
    """
    parameters: list[nn.Parameter] = []
    parts_by_matrix: list[tuple[nn.Parameter, list[nn.Parameter]]] = []  # (joint matrix, its three parts)
    for name, matrix in matrix_by_name.items():
        if name.endswith("qkv.weight"):
            parts = [nn.Parameter(part) for part in matrix.data.chunk(3)]
            parts_by_matrix.append((matrix, parts))
            parameters += parts
        else:
            parameters.append(matrix)
    muon = torch.optim.Muon(
        parameters,
        lr=MUON_RATE_FACTOR * recipe.learning_rate,
        # PyTorch multiplies weight decay by the learning rate, which is MUON_RATE_FACTOR times as large here.
        weight_decay=recipe.weight_decay / MUON_RATE_FACTOR,
        adjust_lr_fn="match_rms_adamw",
    )

    def share_gradients(*_: Any) -> None:
        """Divide the gradient of each joint matrix among its parts. Parts of a matrix without a gradient get None."""
        for matrix, parts in parts_by_matrix:
            gradients = [None] * len(parts) if matrix.grad is None else matrix.grad.chunk(len(parts))
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient

    muon.register_step_pre_hook(share_gradients)
    return muon


@contextmanager
def _deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms while the context is open, so that a repeated run has exactly the same result.

    On a GPU nothing is changed, because deterministic algorithms would be slower there.
    """
    settings: Any = torch.utils.deterministic  # a module whose attributes are settings
    was_enabled, filled_memory = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # this code never reads memory that it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
        settings.fill_uninitialized_memory = filled_memory


def _describe_change(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the name and two values of a setting as users write them: options as flags, and times with their unit."""
    if name == "max_time":
        before, now = ("none" if value is None else format_duration(round(1e6 * value)) for value in (before, now))
    return to_flag(name) if name in TrainSettings.model_fields else name, before, now
