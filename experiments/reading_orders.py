"""Two objectives that differ in the order of readings only: any order, and span corruption.

A step of training draws which readings are earlier than which, as an (F, F) mask over the F features, for all records
of its batch:

- "any order", the objective of the DEformer: the features have a random order, and each reading is predicted from the
  earlier ones.
- "span corruption", the objective of T5 (Raffel et al., arXiv 1910.10683): spans of adjacent features are corrupted,
  15% of all features in spans of three on average. The others see each other, as the tokens of T5's encoder do. A
  corrupted reading is predicted from them and from the corrupted ones before it, as in T5's decoder. Only corrupted
  readings count in the loss.

So a network that was pretrained by span corruption is fine-tuned in any order without a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.deformer import DEformer
from trainer.data import PreparedTable, Split
from trainer.sampling import Noise, create_generator, read_rows

Objective = Literal["any order", "span corruption"]
Ints = NDArray[np.int64]
Batch = tuple[Tensor, Tensor, Tensor]
"""The values of B records (B, F), the mask (F, F) that is true at [k, j] if reading j is earlier than reading k, and
(F,) which readings are predicted."""

CORRUPTED_SHARE, SPAN_LENGTH = 0.15, 3.0
VALIDATION_ORDERS = 4


def draw_any_order(num_features: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return which readings are earlier in a random order, (F, F), and that all are predicted, (F,)."""
    rank = torch.randperm(num_features, generator=generator)
    return rank[None, :] < rank[:, None], torch.ones(num_features, dtype=torch.bool)


def draw_spans(num_features: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return which readings are earlier under span corruption, (F, F), and which are corrupted, (F,).

    The lengths of the spans add up to 15% of the features, and visible features stand between them. With few features,
    there is one span with at least one feature.
    """
    num_corrupted = max(1, round(CORRUPTED_SHARE * num_features))
    num_spans = max(1, round(num_corrupted / SPAN_LENGTH))
    lengths = _divide(num_corrupted, num_spans, generator)
    gaps = _divide(num_features - num_corrupted + 2, num_spans + 1, generator)
    gaps[0] -= 1  # the first and the last feature can be corrupted
    gaps[-1] -= 1
    is_corrupted = torch.zeros(num_features, dtype=torch.bool)
    start = 0
    for gap, length in zip(gaps, lengths, strict=False):
        is_corrupted[start + gap : start + gap + length] = True
        start += gap + length
    position = torch.arange(num_features)
    is_before = position[None, :] < position[:, None]
    is_other = position[None, :] != position[:, None]
    # All see the other visible readings. Corrupted ones also see the corrupted ones before them.
    is_earlier = (~is_corrupted & is_other) | (is_corrupted[:, None] & is_corrupted & is_before)
    return is_earlier, is_corrupted


def _divide(total: int, num_parts: int, generator: torch.Generator) -> list[int]:
    """Return positive numbers that add up to the total, all such divisions with the same probability."""
    cuts = torch.randperm(total - 1, generator=generator)[: num_parts - 1].sort().values + 1
    bounds = [0, *cuts.tolist(), total]
    return [end - start for start, end in pairwise(bounds)]


class OrderedExamples:
    """Complete records of a table, learnt by one of the objectives (see `trainer.examples.Examples`).

    Args:
        data: The prepared table, without missing readings.
        objective: The objective.
    """

    def __init__(self, data: PreparedTable, objective: Objective) -> None:
        self.data, self.objective = data, objective
        self.train_indexes = data.select_rows(Split.TRAIN)
        self.validation_indexes = data.select_rows(Split.VALIDATION)
        self.noise = Noise.from_schema(data.schema)
        self.nats_factor, self.num_orders = float(len(data.schema)), VALIDATION_ORDERS
        self.draws_ahead = False

    def draw(self, indexes: Ints, generator: torch.Generator) -> Batch:
        """Return records with noise, and which of their readings are earlier than which."""
        values, _ = self.noise.apply(read_rows(self.data, indexes)[0], generator)
        draw_orders = draw_any_order if self.objective == "any order" else draw_spans
        return values, *draw_orders(len(self.data.schema), generator)

    def compute_loss(self, model: DEformer, batch: Batch, part: slice, is_low_precision: bool) -> Tensor:
        """Return the share of a part in the mean of −ln p of a predicted reading, always computed in float32."""
        values, is_earlier, is_predicted = batch
        log_p = compute_log_p(model, values[part], is_earlier)
        return -log_p[:, is_predicted].sum() / len(values) / is_predicted.sum()

    def evaluate(
        self, model: DEformer, indexes: Ints, seed: int, batch_size: int, is_low_precision: bool = False
    ) -> float:
        """Return the mean −ln p of a predicted reading times the number of features, in nats."""
        losses = []
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            for order in range(self.num_orders):
                batch = self.draw(indexes, create_generator(seed, 0x5A4, order))
                parts = [slice(start, start + batch_size) for start in range(0, len(indexes), batch_size)]
                losses.append(sum(float(self.compute_loss(model, batch, part, is_low_precision)) for part in parts))
        model.train(was_training)
        return self.nats_factor * math.fsum(losses) / len(losses)


def compute_log_p(model: DEformer, values: Tensor, is_earlier: Tensor) -> Tensor:
    """Return ln p of each reading given the earlier ones, (B, F).

    Args:
        model: A network without a prior.
        values: (B, F) normalised values or label codes of complete records.
        is_earlier: (F, F) true at [k, j] if reading j is earlier than reading k.
    """
    features = torch.arange(values.shape[1]).expand(len(values), -1)
    return model.conditionals(features, values, earlier_mask=is_earlier).log_prob(values)


def evaluate_any_order(model: DEformer, data: PreparedTable, rows: Ints, seeds: Sequence[int]) -> float:
    """Return the mean −ln p of records in random orders, one for each seed, in nats."""
    examples = OrderedExamples(data, "any order")
    examples.num_orders = 1
    return float(np.mean([examples.evaluate(model, rows, seed, 256) for seed in seeds]))
