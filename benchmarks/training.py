"""Measure how fast training is, compared with a straightforward PyTorch version of the paper's model.

    python -m benchmarks.training            (make bench)
    python -m benchmarks.training --device cuda --presets small,base,paper

The straightforward version (`PlainModel`) is what the paper's figure becomes with `nn.TransformerEncoder`. It has
interleaved tokens, two separate networks for identities and values, a boolean mask, and a linear map to mixtures at the
query tokens. It trains on random orders, one per record of a batch, with Adam in float32. Architecture, batch size and
optimizer are ours. Its weights are a copy of ours, so the loss must be ours, too: the column "difference" is the
difference of the two, in nats per record. Our step is that of the trainer, with noise on readings, averaged weights and
clipping.

All versions are measured in turn for several rounds, and the best round of each counts, because other load on the
machine only makes a round slower. Each round begins with a step that does not count, because the other versions have
displaced this one's data from the processor's cache.

Preset `small` attends to observation tokens only; preset `paper` has the paper's mask. Both versions use the same mask.

On a GPU, the straightforward version is also compiled by `torch.compile` and trained with autocast to bfloat16. Our
layers are compiled in the column "ours", and not in the column "ours, float32". The batches are larger, to fill the
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.feed import make_schema
from deformer_stream.model.config import PRESETS
from deformer_stream.model.constants import SCALE_FLOOR
from deformer_stream.model.deformer import DEformer, ModelConfig
from experiments.experiment import make_prepared_table
from trainer.budget import TimeBudget
from trainer.data import PreparedTable, Split
from trainer.fit import Interrupted, Recipe, TrainingRun
from trainer.settings import Compile, Precision

NUM_RECORDS = 4160


class PlainModel(nn.Module):
    """The paper's model, built from PyTorch's own Transformer layers.

    Args:
        features: The number of features, all continuous.
        config: The hyperparameters, those of our model.
    """

    def __init__(self, features: int, config: ModelConfig) -> None:
        super().__init__()
        d, self.config = config.d_model, config
        self.embedding = nn.Embedding(features, config.embedding)
        self.g_z, self.g_u = _build_encoder(config.embedding, config), _build_encoder(config.embedding + 1, config)
        layer = nn.TransformerEncoderLayer(
            d,
            config.heads,
            config.feedforward,
            config.dropout,
            config.activation,
            batch_first=True,
            norm_first=config.norm == "pre",
        )
        norm = nn.LayerNorm(d) if config.norm == "pre" else None
        self.encoder = nn.TransformerEncoder(layer, config.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(d, 3 * config.mixtures)
        place = torch.arange(2 * features)
        blocked = place[:, None] < place[None, :]
        if config.memory == "values":
            blocked = blocked | ((place[None, :] % 2 == 0) & (place[:, None] != place[None, :]))
        self.register_buffer("blocked", blocked)

    def forward(self, features: Tensor, values: Tensor) -> Tensor:
        """Return the log-density of each value given the values before it, (N, F), N records with F readings each.

        Args:
            features: (N, F) feature codes in order of arrival.
            values: (N, F) values in normalised units.
        """
        identity = self.embedding(features)
        z, u = self.g_z(identity), self.g_u(torch.cat([identity, values.unsqueeze(-1)], -1))
        tokens = torch.stack([z, u], 2).flatten(1, 2) * math.sqrt(self.config.d_model)
        weights, scales, means = self.head(self.encoder(tokens, mask=self.blocked)[:, ::2]).chunk(3, -1)
        scales = SCALE_FLOOR + nn.functional.softplus(scales)
        inside = torch.distributions.Normal(means, scales).log_prob(values.unsqueeze(-1))
        return torch.logsumexp(torch.log_softmax(weights, -1) + inside, -1)

    @torch.no_grad()
    def copy_weights(self, model: DEformer) -> None:
        """Copy the weights of our model."""
        assert model.embedding is not None
        assert model.identity_encoder is not None
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.embedding, model.embedding), (self.head, model.head.project)]
        for own, theirs in ((self.g_z, model.identity_encoder), (self.g_u, model.value_encoder)):
            pairs += zip([m for m in own if isinstance(m, nn.Linear)], theirs.maps, strict=True)
        if self.encoder.norm is not None:
            pairs.append((self.encoder.norm, model.norm))
        for own, theirs in zip(self.encoder.layers, model.blocks, strict=True):
            attention: Any = own.self_attn
            attention.in_proj_weight.copy_(theirs.qkv.weight)
            attention.in_proj_bias.copy_(theirs.qkv.bias)
            pairs += [(attention.out_proj, theirs.out), (own.linear1, theirs.up), (own.linear2, theirs.down)]
            pairs += [(own.norm1, theirs.norm1), (own.norm2, theirs.norm2)]
        for own, theirs in pairs:
            own.load_state_dict(theirs.state_dict())


def _build_encoder(inputs: int, config: ModelConfig) -> nn.Sequential:
    """Return a multilayer perceptron with ReLU that makes tokens."""
    widths = (inputs, *config.hidden, config.d_model)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(before, after)] if layers else [nn.Linear(before, after)]
    return nn.Sequential(*layers)


def make_table(features: int) -> PreparedTable:
    """Return a prepared table of records of correlated numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_RECORDS, features)).cumsum(1) / np.sqrt(1 + np.arange(features))
    split = np.full(NUM_RECORDS, Split.TRAIN, np.uint8)
    split[:20] = Split.VALIDATION
    return make_prepared_table(make_schema(features), x.astype(np.float32), split)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. The names of the attributes are keys in benchmarks/results/training.jsonl.

    Attributes:
        preset: The preset of the model.
        features: The number of features.
        batch: Records of a step.
        plain: Records per second of the straightforward version.
        plain_compiled: Records per second of the straightforward version, compiled and in bfloat16; None on a CPU.
        ours_float32: Records per second of our trainer in float32.
        ours: Records per second of our trainer with `--training-precision auto`.
        difference: The difference of the losses with equal weights, in nats per record.
        device: The device, as PyTorch names it.
    """

    preset: str
    features: int
    batch: int
    plain: float
    plain_compiled: float | None
    ours_float32: float
    ours: float
    difference: float
    device: str

    @property
    def ratio(self) -> float:
        """Return how many times as fast our trainer is as the fastest straightforward version."""
        return self.ours / max(self.plain, self.plain_compiled or 0.0)


TrainSteps = Callable[[int], float]
"""A function that trains one step that does not count, then the given number of steps, and returns seconds per step."""


def make_plain_training(model: PlainModel, x: Tensor, batch: int, is_compiled: bool = False) -> TrainSteps:
    """Return a function that trains the straightforward version on records x, (N, F), on the device of x.

    Args:
        model: The straightforward version.
        x: The records.
        batch: Records of a step.
        is_compiled: Whether the model is compiled, with autocast to bfloat16.
    """
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(0)
    compute: Callable[..., Tensor] = torch.compile(model) if is_compiled else model

    def train(count: int) -> float:
        for step in range(count + 1):
            if step == 1:
                began = read_clock(x.device)
            values = x[torch.randint(len(x), (batch,), generator=generator).to(x.device)]
            order = torch.rand(values.shape, generator=generator).argsort(1).to(x.device)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=is_compiled):
                loss = -compute(order, values.gather(1, order)).float().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (read_clock(x.device) - began) / count

    return train


def read_clock(device: torch.device) -> float:
    """Return the seconds of a clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_our_training(
    model: DEformer, data: PreparedTable, batch: int, precision: Precision, folder: Path
) -> TrainSteps:
    """Return a function that trains our model by the loop of the trainer."""
    compiled: Compile = "always" if precision == "auto" else "never"
    recipe = Recipe(batch, 1e-4, 1_000_000, training_precision=precision, optimizer="adam", compile_layers=compiled)
    run = TrainingRun(data, model, recipe, 0, folder, TimeBudget(), {})

    def train(count: int) -> float:
        last_step, step_times = run.step + 1 + count, []

        def should_stop() -> bool:
            # Every step of a GPU ends after the one before it has been read, so only the whole time is exact.
            step_times.append(read_clock(model.device) if run.step in (last_step - count, last_step) else math.nan)
            return run.step >= last_step

        with contextlib.suppress(Interrupted):
            run.run(should_stop)
        return (step_times[-1] - step_times[0]) / count

    return train


def measure(preset: str, features: int, batch: int, rounds: int, steps: int, device: torch.device) -> Row:
    """Measure one preset on records of one number of features.

    Args:
        preset: The preset of the model, without its dropout.
        features: The number of features.
        batch: Records of a step.
        rounds: How often each version is measured.
        steps: Steps of a round.
        device: The device.
    """
    is_gpu = device.type == "cuda"
    config = replace(PRESETS[preset], dropout=0.0)
    data = make_table(features)
    torch.manual_seed(0)
    ours = [DEformer(data.schema, config).to(device) for _ in range(2)]
    plains = [PlainModel(features, config).to(device) for _ in range(2 if is_gpu else 1)]
    for plain in plains:
        plain.copy_weights(ours[0])
    x = torch.from_numpy(np.asarray(data.values)).to(device)
    order = torch.rand(64, features).argsort(1).to(device)
    with torch.no_grad():
        losses = [m(order, x[:64].gather(1, order)).sum(1).mean() for m in (plains[0], ours[0].log_prob)]
    with tempfile.TemporaryDirectory() as name:
        trainings = [make_plain_training(plain, x, batch, i == 1) for i, plain in enumerate(plains)]
        trainings.append(make_our_training(ours[0], data, batch, "float32", Path(name)))
        trainings.append(make_our_training(ours[1], data, batch, "auto", Path(name)))
        seconds = [[train(steps) for train in trainings] for _ in range(rounds)]
    plain_rate, *compiled_rate, float32_rate, our_rate = (batch / min(column) for column in zip(*seconds, strict=True))
    return Row(
        preset,
        features,
        batch,
        plain_rate,
        compiled_rate[0] if compiled_rate else None,
        float32_rate,
        our_rate,
        float((losses[0] - losses[1]).abs()),
        device.type,
    )


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as a line of the results."""
    return {"benchmark": "training"} | asdict(row)


def format_table(rows: list[Row]) -> str:
    """Return rows as a Markdown table."""
    text = ["| preset | features | batch | plain PyTorch | compiled | ours, float32 | ours | ratio | difference |"]
    text.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        measured = (row.plain, row.plain_compiled, row.ours_float32, row.ours)
        rates = " | ".join("–" if rate is None else f"{rate:,.0f}" for rate in measured)
        end = f"**{row.ratio:.1f}** | {row.difference:.0e}"
        text.append(f"| {row.preset} | {row.features} | {row.batch} | {rates} | {end} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="small,paper", help="Presets, comma-separated.")
    parser.add_argument("--features", default="8,21,40", help="Numbers of features, comma-separated.")
    parser.add_argument("--threads", type=int, default=2, help="Threads of PyTorch.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds, of which the best counts.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="The device.")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, rows = torch.device(arguments.device), []
    is_gpu = device.type == "cuda"
    where = f"{describe_machine()}; {torch.cuda.get_device_name()}" if is_gpu else describe_machine()
    for preset in arguments.presets.split(","):
        batch, steps = (128, 3) if preset == "small" else (16, 1)
        if is_gpu:
            batch, steps = (512 if preset == "paper" else 2048), 20
        for features in map(int, arguments.features.split(",")):
            rows.append(measure(preset, features, batch, arguments.rounds, steps, device))
            print(json.dumps(to_json(rows[-1])), flush=True)
    text = (
        f"# Training speed\n\n{where}, {arguments.threads} threads used, {format_today()}. "
        f"Records per second, the best of {arguments.rounds} rounds in turn.\n\n{format_table(rows)}\n"
    )
    publish_results("training_gpu" if is_gpu else "training", text, [to_json(row) for row in rows])


if __name__ == "__main__":
    main()
