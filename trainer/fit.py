"""The training loop: random orders, warm-up and cosine, averaged weights, early stopping, exact continuation.

Loss: −Σ ln p(value | readings before it) / F, averaged over records, a fresh random order for every sample (equation 2
of arXiv 2106.06989). All randomness of step t is seeded by (seed, t), and time enters only where a time limit was set:
a run stopped anywhere and continued ends in the same bits as one that was not.
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
from torch import Tensor

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from trainer import checkpoint
from trainer.budget import Costs, TimeBudget
from trainer.data import PreparedTable, Split
from trainer.distributed import Ranks
from trainer.evaluate import evaluate_held_out
from trainer.gaussian_prior import CrossFittedPriors
from trainer.muon import Muon
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
"""How often a whole run is validated."""
VALIDATION_ROWS, VALIDATION_ORDERS = 1000, 4
CHECKPOINT_SECONDS = 30.0

SINGLE_PROCESS = Ranks()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    batch: records a step. warmup: steps of rising learning rate. optimizer: adam is the paper's, at a constant rate;
    the others follow the schedule. smoothing: Gaussian noise on continuous readings, in scales; held-out likelihood
    wants none. forget: chance that a label is shown as unseen. arrival_share: what share of samples is in the logged
    order of arrival, where the table has one (training on the law that scoring will meet: Shih et al. 2022). averaging:
    the average of weights reaches back over about this share of the steps so far. patience: validations without
    progress before training stops; by default it never does, for a falling rate of learning gains most at the end.
    accumulate: batches whose gradients are added up for one step, which is that of one batch so many times as large.
    training_precision: of the layers' matrix products; auto is bfloat16 where that is quicker.
    """

    batch: int
    learning_rate: float
    epochs: int
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    smoothing: float = 0.0
    forget: float = 0.01
    arrival_share: float = 0.5
    averaging: float = 0.1
    patience: int = EVALUATIONS
    accumulate: int = 1
    training_precision: Precision = "auto"
    optimizer: Optimizer = "muon"


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where training stands. train, validation: nats per record, NaN while unknown."""

    step: int
    steps: int
    epoch: int
    progress: float
    train_nll: float
    validation_nll: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """model: the averaged weights that did best on validation rows. history: one row per validation."""

    model: DEformer
    history: list[dict[str, float]]
    steps: int
    epochs: float
    stopped_early: bool


class Interrupted(Exception):  # noqa: N818 - not an error: the run was asked to stop and can be continued
    """Training was asked to stop; its checkpoint is written."""


def low_precision(precision: Precision, device: torch.device) -> bool:
    """Return whether the layers' matrix products are multiplied in bfloat16.

    "auto" means bfloat16 on a GPU and on CPUs that multiply tiles of bfloat16 (AMX), where PyTorch is quicker with it.
    On other CPUs the conversions cost more than bfloat16 products save, so "auto" means float32.
    """
    if precision != "auto" or device.type == "cuda":
        return precision != "float32"
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


class TrainingRun:
    """One training run."""

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
        """folder: where checkpoints go. identity: options and data fingerprint that a checkpoint must share. guides:
        where the model has Gaussians, the variants that training is guided by. peers: who takes part."""
        self.data, self.model, self.recipe, self.seed = data, model, recipe, seed
        self.folder, self.budget, self.identity = folder, budget, identity
        self.priors, self.ranks = priors, ranks
        self.train_rows = data.select_rows(Split.TRAIN)
        self.validation_rows = np.random.default_rng([seed, 0x7A1]).permutation(data.select_rows(Split.VALIDATION))[:VALIDATION_ROWS]
        self.batch_size = min(recipe.batch * recipe.accumulate * ranks.world_size, len(self.train_rows))
        self.steps_per_epoch = len(self.train_rows) // self.batch_size
        self.steps = max(1, recipe.epochs * self.steps_per_epoch)
        self.noise = Noise.from_schema(data.schema, recipe.smoothing, recipe.forget)
        self.num_scored_features = int((~data.schema.is_context).sum())
        self.averaged_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.best_weights = {name: p.clone() for name, p in self.averaged_model.named_parameters()}
        self.parameters: list[Tensor] = list(model.parameters())
        self.averaged_parameters: list[Tensor] = list(self.averaged_model.parameters())
        self.optimizer = _optimiser(model, recipe)
        self.is_low_precision = low_precision(recipe.training_precision, model.device)
        self.step = 0
        self.validations_since_best = 0
        self.best_validation = math.inf
        self.history: list[dict[str, float]] = []
        self.next_validation_progress = 1.0 / EVALUATIONS
        self.losses: list[float] = []
        self.measured = False
        self._permutation: tuple[int, Any] = (-1, None)
        self._evaluated_at = -math.inf
        self._evaluation_seconds = 0.0

    @property
    def progress(self) -> float:
        """Share of the schedule that is done, by steps or by time, whichever is further."""
        return min(1.0, max(self.step / self.steps, self.budget.used()))

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_status: Callable[[TrainingStatus], None] = lambda status: None,
        costs: Callable[[DEformer], Costs] = lambda model: Costs(0.0, 0.0),
    ) -> TrainingResult:
        """Train to the end of the schedule, a step at least. stop: asked after every step. observe: told after every
        step. costs: asked once where there is a time limit. Raises `Interrupted` when told to stop."""
        saved = self.budget.elapsed
        exhausted = self.validations_since_best >= self.recipe.patience
        self.model.train()
        with _deterministic(self.model.device):
            while (self.progress < 1.0 or not self.step) and not exhausted:
                self._train_step()
                if not self.measured and self.budget.limit is not None and self.step >= 3:
                    self._fit_into(costs(self.averaged_model), self.budget.limit)
                if self._evaluation_due():
                    self._evaluate()
                    exhausted = self.validations_since_best >= self.recipe.patience
                on_status(self.status())
                if self.ranks.is_any(should_stop()):
                    self.save()
                    raise Interrupted
                if self.budget.elapsed - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = self.budget.elapsed
            if not self.history or self.history[-1]["step"] != self.step:
                self._evaluate()
        self.save()
        with torch.no_grad():
            for name, p in self.averaged_model.named_parameters():
                p.copy_(self.best_weights[name])
        early = exhausted and self.progress < 1.0
        return TrainingResult(self.averaged_model, self.history, self.step, self.step / self.steps_per_epoch, early)

    def _fit_into(self, costs: Costs, limit: float) -> None:
        """Keep time for what comes after, and validate on so few records that all of it takes about a tenth."""
        self.measured = True
        self.budget.reserve, self.budget.share = costs.after, costs.share
        affordable = 0.1 * limit / EVALUATIONS / VALIDATION_ORDERS / max(costs.record, 1e-9)
        self.validation_rows = self.validation_rows[: max(32, int(affordable))]

    def status(self) -> TrainingStatus:
        last = self.history[-1] if self.history else {"train": math.nan, "validation": math.nan}
        train, validation = fmean(self.losses) if self.losses else last["train"], last["validation"]
        return TrainingStatus(self.step, self.steps, self.step // self.steps_per_epoch, self.progress, train, validation)

    def _batch_rows(self) -> Any:
        """The rows of this step: every epoch is a permutation of its own; what does not fill a batch is left out."""
        epoch, place = divmod(self.step, self.steps_per_epoch)
        if self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng([self.seed, 0xE90C, epoch]).permutation(self.train_rows)
        return np.sort(self._permutation[1][place * self.batch_size : (place + 1) * self.batch_size])

    def _train_step(self) -> None:
        rows = self._batch_rows()
        samples = draw_samples(self.data, rows, self.noise, self.recipe.arrival_share, create_generator(self.seed, 0x57E9, self.step))
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.model.device)
        for part in self.ranks.select_slices(len(rows), self.recipe.accumulate):
            if self.model.config.dropout:  # it draws from the global generator
                torch.manual_seed(create_generator(self.seed, 0x57E9, self.step, part.start).initial_seed())
            total += self._accumulate_gradients(samples[part], rows[part], len(rows))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.ranks.sum_in_place([total, *gradients])
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise ConfigError(
                f"training diverged at step {self.step}: the gradient is not finite; lower learning_rate in --config"
            )
        if norm > self.recipe.clip:
            torch._foreach_mul_(gradients, self.recipe.clip / norm)
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        self._update_average()
        self.losses.append(float(total) * self.num_scored_features)

    def _accumulate_gradients(self, samples: Samples, rows: Any, records: int) -> Tensor:
        """Add the gradient of a part of a step of so many records; the part's share of the loss."""
        device = self.model.device
        places, order = order_readings(samples.values, samples.keys)
        here = places, gather_values(samples.values, order), samples.hidden.gather(1, order)
        features, taken, hidden = (move_to_device(tensor, device) for tensor in here)
        guide = None if self.priors is None else self.priors.compute_conditionals(features, taken, rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.is_low_precision):
            log_p = self.model.log_prob(features, taken, guide)
        log_p = log_p.masked_fill(hidden, 0.0)
        loss = -log_p.sum() / records / self.num_scored_features
        torch.autograd.backward(loss)
        return loss.detach()

    def _learning_rate(self) -> float:
        """Linear warm-up, over by 8% of the schedule at the latest, then half a cosine down to 1% of the peak."""
        if self.recipe.optimizer == "adam":
            return self.recipe.learning_rate
        rising = min(1.0, max((self.step + 1) / self.recipe.warmup, self.progress / 0.08))
        return self.recipe.learning_rate * rising * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * self.progress)))

    def _update_average(self) -> None:
        """Power-function average (Karras et al., arXiv 2312.02696, equation 121): its memory grows with the run."""
        gamma = 1.0 / self.recipe.averaging
        keep = (1.0 - 1.0 / self.step) ** (gamma + 1.0)
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged_parameters, self.parameters, 1.0 - keep)

    def _evaluation_due(self) -> bool:
        """At every thirtieth of the schedule; under a time limit so that it takes at most a ninth of the time."""
        if self.progress < self.next_validation_progress or (self.budget.limit is not None and not self.measured):
            return False
        if self.budget.limit is not None:
            return self.budget.clock() - self._evaluated_at > 8.0 * self._evaluation_seconds
        return True

    def _evaluate(self) -> None:
        began = self.budget.clock()
        if math.isinf(self.best_validation):
            self.best_validation = self._validation_at_first()
        nll = self._validation()
        self._evaluated_at = self.budget.clock()
        self._evaluation_seconds = self._evaluated_at - began
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
                "learning_rate": self._learning_rate(),
                "train": fmean(self.losses),
                "validation": nll,
            }
        )
        self.losses = []

    def _validation(self) -> float:
        """Nats per record of the averaged weights, always of the same records in the same orders, logged ones among
        them as in training."""
        share = self.recipe.arrival_share
        held = evaluate_held_out(self.averaged_model, self.data, self.validation_rows, VALIDATION_ORDERS, self.seed, share)
        return self.ranks.broadcast(held.mean_nll)

    def _validation_at_first(self) -> float:
        """Of the weights that training began with, which say what the guide says, or the model that is adapted: no run
        ends with worse ones."""
        now = [p.clone() for p in self.averaged_parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.averaged_parameters, list(self.best_weights.values()))
            nll = self._validation()
            torch._foreach_copy_(self.averaged_parameters, now)
        return nll

    def save(self) -> None:
        """Write the checkpoint, where this process is the one that writes."""
        elapsed = self.budget.elapsed
        if not self.ranks.is_first:
            return
        tensors: dict[str, Tensor] = {f"model.{k}": p for k, p in self.model.named_parameters()}
        tensors |= {f"average.{k}": p for k, p in self.averaged_model.named_parameters()}
        tensors |= {f"best.{k}": p for k, p in self.best_weights.items()}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": t for k, t in moments.items()}
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
            "share": self.budget.share,
            "measured": self.measured,
            "validation_rows": len(self.validation_rows),
        }
        checkpoint.save(self.folder, tensors, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the checkpoint in the folder. Raises ConfigError where data or options differ."""
        for name, value in self.identity.items():
            before = state["identity"].get(name)
            if before != value:
                raise ConfigError(
                    f"--resume: {name} was {before}, now it is {value}; "
                    f"run as before, or delete {self.folder} to start anew"
                )
        self.step, self.validations_since_best = state["step"], state["since_best"]
        self.best_validation, self.history = state["best_validation"], state["history"]
        self.next_validation_progress, self.losses = state["next_mark"], state["losses"]
        self.budget.spent += state["elapsed"]
        self.budget.reserve, self.budget.share = state["reserve"], state["share"]
        self.measured = state["measured"]
        self.validation_rows = self.validation_rows[: state["validation_rows"]]
        tensors = checkpoint.load_tensors(self.folder)
        device = self.model.device
        with torch.no_grad():
            for module, prefix in ((self.model, "model."), (self.averaged_model, "average.")):
                for name, p in module.named_parameters():
                    p.copy_(tensors[prefix + name])
        self.best_weights = {name: tensors[f"best.{name}"].to(device) for name in self.best_weights}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, t in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                moments.setdefault(int(index), {})[key] = t
        full = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": moments, "param_groups": full["param_groups"]})


def _optimiser(model: DEformer, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "muon":
        return Muon(model, recipe.learning_rate, recipe.weight_decay)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=recipe.learning_rate, fused=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU: sums of gradients in one order, so that runs can be repeated to the bit."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing of ours reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
