"""The training loop: it minimises the negative log-likelihood of records whose readings are in random order.

The loss of a record is −Σ ln p(value | earlier readings) / F over its F scored features, with a fresh random order for
each sample (equation 2 of arXiv 2106.06989). The learning rate rises linearly at first and then falls along half a
cosine. The model that results has averaged weights, those with the smallest validation loss.

All random numbers of step t depend on the seed and t alone. Therefore a run that was interrupted and continued ends
with the same bits as one that was not, unless a time limit was set.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from trainer import checkpoint
from trainer.budget import Costs, TimeBudget, choose_batch_size
from trainer.data import PreparedTable, Split
from trainer.distributed import Ranks
from trainer.evaluate import BATCH_SIZE, evaluate_held_out
from trainer.gaussian_prior import CrossFittedPriors
from trainer.sampling import (
    Noise,
    Samples,
    create_generator,
    draw_samples,
    gather_values,
    move_to_device,
    order_readings,
)
from trainer.settings import Optimizer, Precision

EVALUATIONS = 30
"""Number of validations in a run that is not stopped early."""

VALIDATION_ROWS, VALIDATION_ORDERS = 1000, 4
"""Largest number of validation records, and the number of orders in which each is scored."""

MIN_VALIDATION_ROWS = 2
"""Validation records that are used even if they take more than `VALIDATION_SHARE` of a time limit."""

VALIDATION_SHARE = 0.1
"""Share of a time limit that all validations together may take."""

CHECKPOINT_SECONDS = 30.0

MUON_RATE_FACTOR = 10.0
"""Learning rate of the matrices that Muon updates, relative to that of AdamW for all other weights."""

SINGLE_PROCESS = Ranks()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of training. The fields are keys of the configuration file and of the manifest.

    Defaults are those of the preset `small`; `trainer.recipes` sets what differs for other presets and table sizes.

    Attributes:
        batch: Records in one batch.
        learning_rate: The largest learning rate.
        epochs: Passes over the training records.
        weight_decay: Decoupled weight decay of matrices.
        warmup: Steps in which the learning rate rises.
        clip: Largest norm of the gradient; longer gradients are scaled down.
        smoothing: Standard deviation of Gaussian noise on measurements, in units of their scale. It makes alerts on
            tables with exact relations more reliable and reduces the held-out likelihood a little.
        forget: Probability that a label is replaced by an unseen label.
        arrival_share: Share of the samples in their logged order of arrival, if the table has one. Such samples train
            the model on the orders that it will score (Shih et al., 2022).
        averaging: The average of the weights covers about this share of the steps so far.
        patience: Validations without improvement after which training stops. By default it never stops early, because a
            falling learning rate improves the model most at the end.
        accumulate: Batches whose gradients are added for one step, which equals a step of one batch this many times as
            large in less memory.
        training_precision: Precision of the layers' matrix products. "auto" is bfloat16 if the processor is faster with
            it.
        optimizer: "adamw"; "muon" for the matrices of the layers, with AdamW for other weights; or "adam" with a
            constant learning rate, as in the paper.
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


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The state of a running training, for a progress display.

    Attributes:
        step: Steps done.
        steps: Steps of the whole schedule.
        epoch: Complete passes over the training records.
        progress: Share of the schedule that is done, by steps or by time.
        train_nll: Mean loss of a record since the last validation, in nats. NaN if unknown.
        validation_nll: Validation loss of a record, in nats. NaN if unknown.
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
        model: The model with the averaged weights that had the smallest validation loss.
        history: One row for each validation, with step, epoch, seconds, learning rate and losses.
        steps: Steps done.
        epochs: Passes over the training records.
        stopped_early: Whether training stopped because the validation loss no longer improved.
    """

    model: DEformer
    history: list[dict[str, float]]
    steps: int
    epochs: float
    stopped_early: bool


class Interrupted(Exception):  # noqa: N818 - not an error: the run was stopped by a signal and can be continued
    """Training was stopped by a signal after its checkpoint was written."""


class TrainingRun:
    """The training of one model, which can be interrupted and continued.

    Args:
        data: The prepared table.
        model: The model to train.
        recipe: The hyperparameters.
        seed: Seed of orders, noise and batches.
        folder: The folder for checkpoints.
        budget: The time that training may take.
        identity: Options and data fingerprint. A checkpoint is only continued if they are the same.
        priors: Variants of the model's Gaussian prior that are used in training. None if the model has no prior.
        ranks: The processes that train together.
    """

    def __init__(
        self,
        data: PreparedTable,
        model: DEformer,
        recipe: Recipe,
        seed: int,
        folder: Path,
        budget: TimeBudget,
        identity: dict[str, Any],
        priors: CrossFittedPriors | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.data, self.model, self.recipe, self.seed = data, model, recipe, seed
        self.folder, self.budget, self.identity = folder, budget, identity
        self.priors, self.ranks = priors, ranks
        self.train_rows = data.select_rows(Split.TRAIN)
        shuffled_rows = np.random.default_rng([seed, 0x7A1]).permutation(data.select_rows(Split.VALIDATION))
        self.validation_rows = shuffled_rows[:VALIDATION_ROWS]
        self.validation_batch_size = BATCH_SIZE
        self.batch_size = min(recipe.batch * recipe.accumulate * ranks.world_size, len(self.train_rows))
        self.steps_per_epoch = len(self.train_rows) // self.batch_size
        self.steps = max(1, recipe.epochs * self.steps_per_epoch)
        self.noise = Noise.from_schema(data.schema, recipe.smoothing, recipe.forget)
        self.num_scored_features = int((~data.schema.is_context).sum())
        self.averaged_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.best_weights = {name: p.clone() for name, p in self.averaged_model.named_parameters()}
        self.parameters: list[Tensor] = list(model.parameters())
        self.averaged_parameters: list[Tensor] = list(self.averaged_model.parameters())
        self.optimizers = _create_optimizers(model, recipe)
        self.is_low_precision = low_precision(recipe.training_precision, model.device)
        self.step = 0
        self.validations_since_best = 0
        self.best_validation = math.inf
        self.history: list[dict[str, float]] = []
        self.next_validation_progress = 1.0 / EVALUATIONS
        self.losses: list[float] = []
        self.has_measured_costs = False
        self._epoch_permutation: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        self._validated_at = -math.inf
        self._validation_seconds = 0.0

    @property
    def progress(self) -> float:
        """Share of the schedule that is done, by steps or by time, whichever is larger."""
        return min(1.0, max(self.step / self.steps, self.budget.compute_training_progress()))

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_status: Callable[[TrainingStatus], None] = lambda status: None,
        measure_costs: Callable[[DEformer], Costs] = lambda model: Costs(0.0, 0.0),
    ) -> TrainingResult:
        """Train until the schedule or the time ends, for at least one step.

        Args:
            should_stop: Called after every step. If it returns true, a checkpoint is written and training stops.
            on_status: Called after every step.
            measure_costs: Called once before the first step if there is a time limit.

        Raises:
            Interrupted: `should_stop` returned true.
            ConfigError: Training diverged.
        """
        if self.budget.limit is not None and not self.has_measured_costs:
            self._reserve_time(measure_costs(self.averaged_model), self.budget.limit)
        saved_at = self.budget.elapsed
        is_exhausted = self.validations_since_best >= self.recipe.patience
        step_seconds = 0.0
        self.model.train()
        with _deterministic_algorithms(self.model.device):
            while not self.step or not (is_exhausted or self.progress >= 1.0 or self._is_too_late(step_seconds)):
                step_started = self.budget.elapsed
                self._train_step()
                step_seconds = self.budget.elapsed - step_started
                if self._is_validation_due():
                    self._validate_and_record()
                    is_exhausted = self.validations_since_best >= self.recipe.patience
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
        return TrainingResult(self.averaged_model, self.history, self.step, num_epochs, stopped_early)

    def _is_too_late(self, step_seconds: float) -> bool:
        """Return whether half of another step would end after the time for training."""
        if self.budget.limit is None:
            return False
        return self.budget.elapsed + 0.5 * step_seconds > self.budget.limit - self.budget.reserve

    def _reserve_time(self, costs: Costs, limit: float) -> None:
        """Reserve time for the work after training, and limit the validation records.

        All validations together may take `VALIDATION_SHARE` of the limit.
        """
        self.has_measured_costs = True
        seconds_per_record = max(VALIDATION_ORDERS * costs.record, 1e-9)
        num_affordable = VALIDATION_SHARE * limit / EVALUATIONS / seconds_per_record
        self.validation_rows = self.validation_rows[: max(MIN_VALIDATION_ROWS, int(num_affordable))]
        self.validation_batch_size = choose_batch_size(costs.record, BATCH_SIZE)
        self.budget.reserve = costs.after + len(self.validation_rows) * seconds_per_record  # for the last validation

    def get_status(self) -> TrainingStatus:
        """Return the state of the training for a progress display."""
        last = self.history[-1] if self.history else {"train": math.nan, "validation": math.nan}
        train_nll = fmean(self.losses) if self.losses else last["train"]
        epoch = self.step // self.steps_per_epoch
        return TrainingStatus(self.step, self.steps, epoch, self.progress, train_nll, last["validation"])

    def measure_step_seconds(self, num_records: int) -> float:
        """Return the seconds of a forward and backward pass of some records, without changing any weight."""
        rows = self.train_rows[:num_records]
        samples = draw_samples(self.data, rows, self.noise, self.recipe.arrival_share, create_generator(self.seed))
        started = self.budget.elapsed
        self.model.train()
        with _deterministic_algorithms(self.model.device):
            self._accumulate_gradients(samples, rows, len(rows))
        self.model.zero_grad(set_to_none=True)
        return self.budget.elapsed - started

    def _choose_batch_rows(self) -> NDArray[np.int64]:
        """Return the row numbers of the records of this step, ascending.

        Every epoch has a permutation of its own. Records that do not fill a batch at its end are left out.
        """
        epoch, batch_index = divmod(self.step, self.steps_per_epoch)
        if self._epoch_permutation[0] != epoch:
            rng = np.random.default_rng([self.seed, 0xE90C, epoch])
            self._epoch_permutation = epoch, rng.permutation(self.train_rows)
        first = batch_index * self.batch_size
        return np.sort(self._epoch_permutation[1][first : first + self.batch_size])

    def _train_step(self) -> None:
        """Compute the gradient of one batch and update the weights and their average.

        Raises:
            ConfigError: The gradient is not finite.
        """
        rows = self._choose_batch_rows()
        generator = create_generator(self.seed, 0x57E9, self.step)
        samples = draw_samples(self.data, rows, self.noise, self.recipe.arrival_share, generator)
        self.model.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.model.device)
        for part in self.ranks.select_slices(len(rows), self.recipe.accumulate):
            if self.model.config.dropout:  # dropout uses the global generator
                torch.manual_seed(create_generator(self.seed, 0x57E9, self.step, part.start).initial_seed())
            loss += self._accumulate_gradients(samples[part], rows[part], len(rows))
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.ranks.sum_in_place([loss, *gradients])
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise ConfigError(
                f"training diverged at step {self.step}: the gradient is not finite; lower learning_rate in --config"
            )
        if norm > self.recipe.clip:
            torch._foreach_mul_(gradients, self.recipe.clip / norm)
        self._update_weights()
        self.step += 1
        self._update_average()
        self.losses.append(float(loss) * self.num_scored_features)

    def _update_weights(self) -> None:
        """Set the learning rate of this step and let the optimizers update the weights from their gradients."""
        learning_rate = self._compute_learning_rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                is_muon = isinstance(optimizer, torch.optim.Muon)
                group["lr"] = learning_rate * MUON_RATE_FACTOR if is_muon else learning_rate
            optimizer.step()

    def _accumulate_gradients(self, samples: Samples, rows: NDArray[np.int64], num_records: int) -> Tensor:
        """Add the gradient of some records of a batch to the gradients of the weights.

        Args:
            samples: The records, with noise and order.
            rows: (B,) their row numbers.
            num_records: Number of records of the whole batch, by which the loss is divided.

        Returns:
            The share of these records in the loss of the batch.
        """
        device = self.model.device
        features, columns = order_readings(samples.values, samples.keys)
        values, is_hidden = gather_values(samples.values, columns), samples.is_hidden.gather(1, columns)
        features, values, is_hidden = (move_to_device(tensor, device) for tensor in (features, values, is_hidden))
        conditionals = None if self.priors is None else self.priors.compute_conditionals(features, values, rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.is_low_precision):
            log_p = self.model.log_prob(features, values, conditionals)
        log_p = log_p.masked_fill(is_hidden, 0.0)
        loss = -log_p.sum() / num_records / self.num_scored_features
        torch.autograd.backward(loss)
        return loss.detach()

    def _compute_learning_rate(self) -> float:
        """Return the learning rate of this step.

        It rises linearly, for at most 8% of the schedule, and then falls along half a cosine to 1% of its peak. Adam,
        the paper's optimizer, has a constant rate.
        """
        if self.recipe.optimizer == "adam":
            return self.recipe.learning_rate
        warmup_factor = min(1.0, max((self.step + 1) / self.recipe.warmup, self.progress / 0.08))
        cosine_factor = 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * self.progress))
        return self.recipe.learning_rate * warmup_factor * cosine_factor

    def _update_average(self) -> None:
        """Add the new weights to their power-function average, whose length grows with the run.

        The formula is equation 121 of Karras et al., arXiv 2312.02696.
        """
        gamma = 1.0 / self.recipe.averaging
        old_weight = (1.0 - 1.0 / self.step) ** (gamma + 1.0)
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged_parameters, self.parameters, 1.0 - old_weight)

    def _is_validation_due(self) -> bool:
        """Return whether to validate now: at every thirtieth of the schedule.

        Under a time limit, validation takes at most a ninth of the time.
        """
        if self.progress < self.next_validation_progress:
            return False
        if self.budget.limit is not None:
            return self.budget.clock() - self._validated_at > 8.0 * self._validation_seconds
        return True

    def _validate_and_record(self) -> None:
        """Validate the averaged weights, keep them if they are the best so far, and add a row to the history."""
        started = self.budget.clock()
        if math.isinf(self.best_validation):
            self.best_validation = self._validate_initial_weights()
        nll = self._validate()
        self._validated_at = self.budget.clock()
        self._validation_seconds = self._validated_at - started
        self.next_validation_progress = (math.floor(self.progress * EVALUATIONS + 1e-9) + 1) / EVALUATIONS
        self.validations_since_best += 1
        if nll < self.best_validation:
            self.best_validation, self.validations_since_best = nll, 0
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

        The records and their orders are always the same. As in training, some of the orders are logged ones.
        """
        held_out = evaluate_held_out(
            self.averaged_model,
            self.data,
            self.validation_rows,
            VALIDATION_ORDERS,
            self.seed,
            self.recipe.arrival_share,
            self.validation_batch_size,
        )
        return self.ranks.broadcast(held_out.mean_nll)

    def _validate_initial_weights(self) -> float:
        """Return the validation loss of the weights with which training began.

        These weights give the prior's conditionals, or those of the model that is adapted. No run ends with weights
        that are worse.
        """
        current = [parameter.clone() for parameter in self.averaged_parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.averaged_parameters, list(self.best_weights.values()))
            nll = self._validate()
            torch._foreach_copy_(self.averaged_parameters, current)
        return nll

    def save(self) -> None:
        """Write the checkpoint, if this is the process that writes files."""
        elapsed = self.budget.elapsed
        if not self.ranks.is_first:
            return
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
        """Continue from the checkpoint in the folder.

        Args:
            state: The part of the checkpoint that `checkpoint.load_state` returns.

        Raises:
            ConfigError: The checkpoint was written with other data or options.
        """
        for name, value in self.identity.items():
            before = state["identity"].get(name)
            if before != value:
                raise ConfigError(
                    f"--resume: {name} was {before}, now it is {value}; "
                    f"use the same data and options as before, or delete {self.folder} to start anew"
                )
        self.step, self.validations_since_best = state["step"], state["since_best"]
        self.best_validation, self.history = state["best_validation"], state["history"]
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
            moments_by_parameter: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{i}."):
                    _, _, parameter_index, moment_name = name.split(".")
                    moments_by_parameter.setdefault(int(parameter_index), {})[moment_name] = tensor
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments_by_parameter, "param_groups": groups})


def low_precision(requested: Precision, device: torch.device) -> bool:
    """Return whether to compute the layers' matrix products in bfloat16.

    Args:
        requested: The precision that the user has chosen. "auto" selects bfloat16 on a GPU and on a CPU with AMX tiles;
            on other CPUs, PyTorch multiplies float32 faster.
        device: The device on which the model is trained.
    """
    if requested != "auto" or device.type == "cuda":
        return requested != "float32"
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _create_optimizers(model: DEformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model, each for some of its weights.

    With "muon", the matrices of the layers are updated by Muon (K. Jordan and others, 2024), whose steps are orthogonal
    matrices, with the learning rate scaled by the size of the matrix as in arXiv 2502.16982. Weight decay applies to
    matrices only.
    """
    if recipe.optimizer == "adam":
        return [torch.optim.Adam(model.parameters(), lr=recipe.learning_rate, fused=True)]
    optimizers: list[torch.optim.Optimizer] = []
    others = list(model.parameters())
    if recipe.optimizer == "muon":
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
    """Return PyTorch's Muon for the matrices of the layers.

    The joint matrix of queries, keys and values is updated as three matrices, because orthogonalising it as a whole
    trains clearly worse (held-out NLL of binarised MNIST after a short run: 133 nats against less than 127). The
    optimizer gets parameters that share memory with the three parts; a hook gives them the gradients of the parts.

    Args:
        matrix_by_name: The matrices, by name within the layers.
        recipe: Learning rate and weight decay.
    """
    parameters: list[nn.Parameter] = []
    parts_by_matrix: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
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
        for matrix, parts in parts_by_matrix:
            gradients = [None] * len(parts) if matrix.grad is None else matrix.grad.chunk(len(parts))
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient

    muon.register_step_pre_hook(share_gradients)
    return muon


@contextmanager
def _deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on the CPU while the context is open, so that runs can be repeated to the bit."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # this code never reads memory that it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
