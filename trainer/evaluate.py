"""How likely a model finds records it was not trained on, in nats, over several random orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer
from trainer.data import PreparedTable
from trainer.sampling import (
    Noise,
    create_generator,
    draw_random_keys,
    gather_values,
    move_to_device,
    order_readings,
    read_rows,
)

BATCH = 512


@dataclass(frozen=True, slots=True)
class HeldOutLikelihood:
    """Held-out likelihood. records, orders: how many were scored.

    nll: (N,) −ln p of each record in nats (normalised units, smaller is likelier), mean over orders. per_feature: (F,)
    mean of −ln p(value | readings before it) over the records and orders in which the feature was scored, NaN where it
    never was.
    """

    nll_by_record: NDArray[np.float64]
    nll_by_feature: NDArray[np.float64]
    num_orders: int

    @property
    def mean_nll(self) -> float:
        """Nats per record."""
        return float(self.nll_by_record.mean())


def evaluate_held_out(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], orders: int, seed: int, arrival_share: float = 0.0
) -> HeldOutLikelihood:
    """Score the rows in `orders` orders each: random ones, but a share as logged, where the table knows that order.

    Gridded readings are spread over their quantum by noise, as in training, so that the result is a density's. Orders
    and noise depend on the seed and the rows alone: models are compared like with like.
    """
    noise = Noise.from_schema(data.schema)
    device = model.device
    features_total = len(data.schema)
    nll = np.zeros(len(rows))
    sums, counts = np.zeros(features_total), np.zeros(features_total)
    scored = torch.tensor(~data.schema.is_context)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for k in range(orders):
            generator = create_generator(seed, 0xE7A1, k)
            for start in range(0, len(rows), BATCH):
                part = slice(start, start + BATCH)
                values, ranks = read_rows(data, rows[part])
                values, _ = noise.apply(values, generator)
                keys = draw_random_keys(values.shape, generator)
                if ranks is not None and k < arrival_share * orders:
                    keys = ranks
                features, order = order_readings(values, keys)
                out = model.log_prob(move_to_device(features, device), move_to_device(gather_values(values, order), device)).double().cpu()
                nll[part] -= out.sum(1).numpy() / orders
                use = (features >= 0) & scored[features.clamp(min=0)]
                codes = features[use].numpy()
                sums -= np.bincount(codes, out[use].numpy(), features_total)
                counts += np.bincount(codes, minlength=features_total)
    model.train(was_training)
    per_feature = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return HeldOutLikelihood(nll, per_feature, orders)
