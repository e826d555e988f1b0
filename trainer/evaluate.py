"""Compute the likelihood of records that a model was not trained on."""

from __future__ import annotations

from collections.abc import Callable
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

BATCH_SIZE = 512

HELD_OUT_SEED = 0xE7A1
"""Constant that separates the random numbers of this module from others of the same seed."""


@dataclass(frozen=True, slots=True)
class HeldOutLikelihood:
    """The likelihood of N held-out records.

    Attributes:
        nll_by_record: (N,) −ln p of each record in nats, in normalised units, averaged over orders. Smaller is
            likelier.
        nll_by_feature: (F,) mean of −ln p(value | earlier readings of the record) of each feature, in nats. NaN if the
            feature was never scored.
        num_orders: Number of orders in which each record was scored.
    """

    nll_by_record: NDArray[np.float64]
    nll_by_feature: NDArray[np.float64]
    num_orders: int

    @property
    def mean_nll(self) -> float:
        """Mean of −ln p over the records, in nats."""
        return float(self.nll_by_record.mean())


def evaluate_held_out(
    model: DEformer,
    data: PreparedTable,
    rows: NDArray[np.int64],
    num_orders: int,
    seed: int,
    arrival_share: float = 0.0,
    batch_size: int = BATCH_SIZE,
    should_continue: Callable[[int], bool] = lambda num_passes: True,
) -> HeldOutLikelihood:
    """Score records in several orders each.

    A reading of a sensor with a limited resolution gets uniform noise of one step, as in training, so that the result
    is a density. Orders and noise depend on the seed and the rows alone, so that models are compared on equal terms.

    Args:
        model: The model. It is put into evaluation mode and back.
        data: The prepared table.
        rows: (N,) row numbers of the records.
        num_orders: Number of orders of each record.
        seed: Seed of orders and noise.
        arrival_share: Share of the orders that are the logged order of arrival, if the table has one. Others are
            random.
        batch_size: Records that are scored together.
        should_continue: Called before each further order with the number of passes done (records times orders). If it
            returns false, the result covers the orders so far.
    """
    noise = Noise.from_schema(data.schema)
    device = model.device
    num_features = len(data.schema)
    nll_by_record = np.zeros(len(rows))
    nll_sums, counts = np.zeros(num_features), np.zeros(num_features)
    is_scored = torch.tensor(~data.schema.is_context)
    was_training = model.training
    model.eval()
    num_done = 0
    with torch.inference_mode():
        for order_index in range(num_orders):
            if order_index and not should_continue(order_index * len(rows)):
                break
            generator = create_generator(seed, HELD_OUT_SEED, order_index)
            for start in range(0, len(rows), batch_size):
                batch = slice(start, start + batch_size)
                values, arrival_ranks = read_rows(data, rows[batch])
                values, _ = noise.apply(values, generator)
                keys = draw_random_keys(values.shape, generator)
                if arrival_ranks is not None and order_index < arrival_share * num_orders:
                    keys = arrival_ranks
                features, order = order_readings(values, keys)
                ordered_values = move_to_device(gather_values(values, order), device)
                log_p = model.log_prob(move_to_device(features, device), ordered_values).double().cpu()
                nll_by_record[batch] -= log_p.sum(1).numpy() / num_orders
                is_counted = (features >= 0) & is_scored[features.clamp(min=0)]
                codes = features[is_counted].numpy()
                nll_sums -= np.bincount(codes, log_p[is_counted].numpy(), num_features)
                counts += np.bincount(codes, minlength=num_features)
            num_done = order_index + 1
    model.train(was_training)
    if num_done < num_orders:
        nll_by_record *= num_orders / num_done
    nll_by_feature = np.where(counts > 0, nll_sums / np.maximum(counts, 1), np.nan)
    return HeldOutLikelihood(nll_by_record, nll_by_feature, num_done)
