"""How fast training is, as a ratio of one run: against a straightforward PyTorch version of the paper's model.

    python -m benchmarks.training            (make bench)

The straightforward version (`Plain`) is what the paper's figure becomes with `nn.TransformerEncoder`: 2D interleaved
tokens, two separate networks for identities and values, a boolean mask, a linear map to mixtures at the identity
tokens; random orders of a whole batch at once, Adam, float32. It has our architecture, our batch, our optimizer and, by
a copy of the weights, our loss ("apart" is by how much they differ, in nats a record). A step of ours is the trainer's
own loop, with noise on readings, averaged weights and clipping. All are measured in turn, several times, and the best
round of each counts: whoever else is at work only ever makes a round slower. A round begins with a step that does not
count: training goes on, and nothing else has been in the processor's cache, another network's weights no more than the
checkpoint that ends a run of the trainer.

Presets: `small`, whose tokens look back at values alone, and `paper`, with the paper's mask; both on the same mask.
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

from benchmarks.command import describe_machine, publish_results, format_today
from benchmarks.feed import schema_of
from deformer_stream.model.deformer import PRESETS, DEformer, ModelConfig
from deformer_stream.model.distributions import SCALE_FLOOR
from experiments.experiment import make_prepared_table
from trainer.budget import TimeBudget
from trainer.data import PreparedTable, Split
from trainer.fit import Interrupted, Recipe, TrainingRun
from trainer.settings import Precision

RECORDS = 2048


class Plain(nn.Module):
    """The paper's model as PyTorch's own layers have it."""

    def __init__(self, features: int, config: ModelConfig) -> None:
        super().__init__()
        d, self.config = config.d_model, config
        self.embedding = nn.Embedding(features, config.embedding)
        self.g_z, self.g_u = _network(config.embedding, config), _network(config.embedding + 1, config)
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
        """(N, F) codes in their order, (N, F) values → (N, F) ln p of each value given the ones before it."""
        identity = self.embedding(features)
        z, u = self.g_z(identity), self.g_u(torch.cat([identity, values.unsqueeze(-1)], -1))
        tokens = torch.stack([z, u], 2).flatten(1, 2) * math.sqrt(self.config.d_model)
        weights, scales, means = self.head(self.encoder(tokens, mask=self.blocked)[:, ::2]).chunk(3, -1)
        scales = SCALE_FLOOR + nn.functional.softplus(scales)
        inside = torch.distributions.Normal(means, scales).log_prob(values.unsqueeze(-1))
        return torch.logsumexp(torch.log_softmax(weights, -1) + inside, -1)

    @torch.no_grad()
    def copy(self, model: DEformer) -> None:
        """Take over the weights of one of ours."""
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


def _network(inputs: int, config: ModelConfig) -> nn.Sequential:
    widths = (inputs, *config.hidden, config.d_model)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(before, after)] if layers else [nn.Linear(before, after)]
    return nn.Sequential(*layers)


def table(features: int) -> PreparedTable:
    """Records of correlated numbers, in memory."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RECORDS, features)).cumsum(1) / np.sqrt(1 + np.arange(features))
    split = np.full(RECORDS, Split.TRAIN, np.uint8)
    split[:20] = Split.VALIDATION
    return make_prepared_table(schema_of(features), x.astype(np.float32), split)


@dataclass(frozen=True, slots=True)
class Line:
    """rows: records trained on a second. difference: of the losses from equal weights, nats a record."""

    preset: str
    features: int
    batch: int
    plain: float
    ours_float32: float
    ours: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.ours / self.plain


Steps = Callable[[int], float]
"""Trains one step and then so many more, and answers with the seconds of one of these."""


def plain_steps(model: Plain, x: Tensor, batch: int) -> Steps:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(0)

    def steps(count: int) -> float:
        for step in range(count + 1):
            if step == 1:
                began = time.perf_counter()
            values = x[torch.randint(len(x), (batch,), generator=generator)]
            order = torch.rand(values.shape, generator=generator).argsort(1)
            loss = -model(order, values.gather(1, order)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - began) / count

    return steps


def our_steps(model: DEformer, data: PreparedTable, batch: int, precision: Precision, folder: Path) -> Steps:
    recipe = Recipe(batch, 1e-4, 1_000_000, training_precision=precision, optimizer="adam")
    fit = TrainingRun(data, model, recipe, 0, folder, TimeBudget(), {})

    def steps(count: int) -> float:
        last, ended = fit.step + 1 + count, []

        def stop() -> bool:
            ended.append(time.perf_counter())
            return fit.step >= last

        with contextlib.suppress(Interrupted):
            fit.run(stop)
        return (ended[-1] - ended[0]) / count

    return steps


def measure(preset: str, features: int, batch: int, rounds: int, steps: int) -> Line:
    config = replace(PRESETS[preset], dropout=0.0)
    data = table(features)
    torch.manual_seed(0)
    ours = [DEformer(data.schema, config) for _ in range(2)]
    plain = Plain(features, config)
    plain.copy(ours[0])
    x = torch.from_numpy(np.asarray(data.values))
    order = torch.rand(64, features).argsort(1)
    with torch.no_grad():
        both = [m(order, x[:64].gather(1, order)).sum(1).mean() for m in (plain, ours[0].log_prob)]
    with tempfile.TemporaryDirectory() as name:
        to_path = [
            plain_steps(plain, x, batch),
            our_steps(ours[0], data, batch, "float32", Path(name)),
            our_steps(ours[1], data, batch, "auto", Path(name)),
        ]
        seconds = [[run(steps) for run in to_path] for _ in range(rounds)]
    rates = [batch / min(column) for column in zip(*seconds, strict=True)]
    return Line(preset, features, batch, *rates, difference=float((both[0] - both[1]).abs()))


def record(line: Line) -> dict[str, Any]:
    """A line as JSON has it."""
    return {"benchmark": "training"} | asdict(line)


def table_of(lines: list[Line]) -> str:
    text = ["| preset | features | batch | plain PyTorch | ours, float32 | ours | ratio | apart |"]
    text.append("|---|---|---|---|---|---|---|---|")
    for line in lines:
        rates = " | ".join(f"{rate:,.0f}" for rate in (line.plain, line.ours_float32, line.ours))
        end = f"**{line.ratio:.1f}** | {line.difference:.0e}"
        text.append(f"| {line.preset} | {line.features} | {line.batch} | {rates} | {end} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="small,paper")
    parser.add_argument("--features", default="8,21,40")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = []
    for preset in arguments.presets.split(","):
        batch, steps = (128, 3) if preset == "small" else (16, 1)
        for features in map(int, arguments.features.split(",")):
            lines.append(measure(preset, features, batch, arguments.rounds, steps))
            print(json.dumps(record(lines[-1])), flush=True)
    text = (
        f"# Training speed\n\n{describe_machine()}, {arguments.threads} threads used, {format_today()}; records "
        f"trained on a second, the best of {arguments.rounds} rounds in turn.\n\n{table_of(lines)}\n"
    )
    publish_results("training", text, [record(line) for line in lines])


if __name__ == "__main__":
    main()
