"""Train the pretrained model on synthetic tables. A run can be interrupted and continued with the same result.

Each step draws one table, whose seed is the number of the step. So a continued run sees the same tables as one without
an interruption. The difficulty of the tables rises over the first part of the run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.pretrained.guide import Guide, GuideTensors, fit_guide
from experiments.pretrained.network import Context, InContextDensity
from experiments.pretrained.synthetic import draw_table

NUM_QUERIES = 32
"""Held-out rows of a table in one step."""

NUM_SUPPORT = 32
"""Largest number of support rows in training."""

NUM_REFERENCES = 192
"""Largest number of reference rows in training."""

STATE_FILE = "state.safetensors"
"""Name of the file with the state of a run."""

CLIP_NORM = 1.0
"""Largest norm of a gradient."""

CURRICULUM_STEPS = 1500
"""Steps in which the difficulty of the tables rises to its largest value."""

DECAY_STEPS = 2000
"""The learning rate falls in proportion to 1 / √(1 + step / DECAY_STEPS), so a run can be continued at any length."""

STEP_SEED = 0x57E9
"""Constant that is combined with the user's seed, so that this module's random numbers differ from others."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of a run.

    Attributes:
        seed: Seed of the tables, the orders and the initial weights.
        learning_rate: Largest learning rate of Adam.
        warmup_steps: Steps in which the learning rate rises.
        num_heads: Heads of the network.
        width: Width of the hidden layers.
        averaging: Weight of the previous average in the moving average of the weights.
    """

    seed: int = 0
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    num_heads: int = 4
    width: int = 96
    averaging: float = 0.998


def build_context(
    x: np.ndarray,
    quantum_widths: np.ndarray,
    guide: Guide,
    num_references: int,
    num_support: int,
    rng: np.random.Generator,
) -> Context:
    """Choose the reference rows and the support rows of a table.

    Args:
        x: (N, D) rows to which the guide was fitted.
        quantum_widths: (D,) resolutions.
        guide: The fitted guide.
        num_references: Largest number of reference rows.
        num_support: Largest number of support rows.
        rng: The source of random numbers.
    """
    references = rng.choice(len(x), min(num_references, len(x)), replace=False)
    fold = np.flatnonzero(guide.is_in_fold)
    support = rng.choice(fold, min(num_support, len(fold)), replace=False)
    position_by_row = {int(row): position for position, row in enumerate(references)}
    support_index = [position_by_row.get(int(row), -1) for row in support]
    return Context(
        torch.as_tensor(x[references], dtype=torch.float32),
        torch.as_tensor(quantum_widths, dtype=torch.float32),
        len(x),
        GuideTensors.from_mixture(guide.mixture),
        GuideTensors.from_mixture(guide.gaussian),
        torch.as_tensor(x[support], dtype=torch.float32),
        torch.tensor(support_index),
        GuideTensors.from_mixture(guide.mixture_without_fold),
        GuideTensors.from_mixture(guide.gaussian_without_fold),
    )


def draw_orders(num_rows: int, num_features: int, generator: torch.Generator) -> Tensor:
    """Return a random order of the features for each row, (B, D)."""
    return torch.rand(num_rows, num_features, generator=generator).argsort(1)


@dataclass(frozen=True, slots=True)
class Task:
    """A table with rows to predict.

    Attributes:
        context: What the network sees of the table.
        rows: (B, D) rows to predict.
        order: (B, D) their orders.
        support_order: (S, D) orders of the support rows.
    """

    context: Context
    rows: Tensor
    order: Tensor
    support_order: Tensor


def draw_task(seed: int, number: int, difficulty: float, num_queries: int = NUM_QUERIES) -> Task:
    """Draw a synthetic table and fit its guide; the result depends on the arguments alone."""
    table = draw_table(seed, number, difficulty, num_queries)
    rng = np.random.default_rng([seed, STEP_SEED, number])
    guide = fit_guide(table.rows, rng)
    num_references = int(rng.integers(NUM_REFERENCES // 3, NUM_REFERENCES + 1))
    context = build_context(table.rows, table.quantum_widths, guide, num_references, NUM_SUPPORT, rng)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    rows = torch.as_tensor(table.held_out, dtype=torch.float32)
    return Task(
        context,
        rows,
        draw_orders(len(rows), rows.shape[1], generator),
        draw_orders(len(context.support), rows.shape[1], generator),
    )


def compute_learning_rate(settings: TrainingSettings, step: int) -> float:
    """Return the learning rate of a step: a linear rise, then a slow decay."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warmup / math.sqrt(1.0 + step / DECAY_STEPS)


class Run:
    """A training run with its state.

    Args:
        settings: The settings.
        folder: Where the state is stored.
    """

    def __init__(self, settings: TrainingSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        torch.manual_seed(settings.seed)
        self.network = InContextDensity(settings.num_heads, settings.width)
        self.average = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
        self.step = 0
        self.gains: list[float] = []

    def take_step(self) -> float:
        """Take one step, and return the mean gain over the guide in nats for each reading."""
        task = draw_task(self.settings.seed, self.step, min(1.0, self.step / CURRICULUM_STEPS))
        log_density, log_guide = self.network(task.context, task.rows, task.order, task.support_order)
        gain = (log_density - log_guide).mean()
        self.optimizer.zero_grad()
        (-gain).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = compute_learning_rate(self.settings, self.step)
        self.optimizer.step()
        rate = min(self.settings.averaging, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                self.average[name].lerp_(value, 1 - rate)
        self.step += 1
        self.gains.append(float(gain.detach()))
        return self.gains[-1]

    def save(self) -> None:
        """Store the state; an interruption leaves the old state or the new one."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, state in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        description = {"settings": asdict(self.settings), "step": self.step}
        metadata = {"state": json.dumps(description | {"gains": self.gains[-1000:]})}
        save_file(
            {name: value.contiguous().clone() for name, value in tensors.items()},
            self.folder / "state.new",
            metadata,
        )
        (self.folder / "state.new").replace(self.folder / STATE_FILE)

    def restore(self) -> None:
        """Continue with the stored state.

        Raises:
            ValueError: The state belongs to other settings.
        """
        from safetensors import safe_open

        path = self.folder / STATE_FILE
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
        if state["settings"] != asdict(self.settings):
            raise ValueError(f"{path} belongs to a run with other settings: {state['settings']}")
        tensors = load_file(path)
        self.network.load_state_dict(_select(tensors, "network."))
        self.average = _select(tensors, "average.")
        optimizer_state = self.optimizer.state_dict()
        for name, value in _select(tensors, "optimizer.").items():
            index, key = name.split(".", 1)
            optimizer_state["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(optimizer_state)
        self.step, self.gains = state["step"], state["gains"]

    def get_averaged_network(self) -> InContextDensity:
        """Return a network with the moving average of the weights."""
        network = InContextDensity(self.settings.num_heads, self.settings.width)
        network.load_state_dict(self.average)
        return network.eval()


def _select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose name begins with the prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def train(
    run: Run,
    num_steps: int,
    report: Callable[[str], None],
    save_every: float = 60.0,
    pause_after: float | None = None,
) -> None:
    """Train until the run has a number of steps or the time has passed, and store the state.

    Args:
        run: The run.
        num_steps: Number of steps of the whole run.
        report: Receives a line of progress with each stored state.
        save_every: Seconds between stored states.
        pause_after: Seconds after which training stops, None for no limit.
    """
    start = last = time.monotonic()
    while run.step < num_steps and (pause_after is None or time.monotonic() - start < pause_after):
        run.take_step()
        if time.monotonic() - last > save_every:
            run.save()
            last = time.monotonic()
            recent = float(np.mean(run.gains[-500:]))
            report(f"step {run.step} of {num_steps}, gain over the guide {recent:.4f} nats per reading")
    run.save()
