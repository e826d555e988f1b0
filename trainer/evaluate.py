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
"""Number of records that are scored together by default."""

HELD_OUT_SEED = 0xE7A1
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""


@dataclass(frozen=True, slots=True)
class HeldOutLikelihood:
    """The likelihood of N held-out records with F features.

    Densities p are those of normalised values (with mean 0 and standard deviation 1 in training), not of raw units.

    Attributes:
        nll_by_record: (N,) −ln p of each record in nats, averaged over several orders of its readings. A smaller value
            means a likelier record.
        nll_by_feature: (F,) for each feature the mean of −ln p(value | earlier readings of the record) over all records
            and orders, in nats. NaN if the feature was never scored.
        num_orders: Number of orders in which each record was scored.
    """

    nll_by_record: NDArray[np.float64]
    nll_by_feature: NDArray[np.float64]
    num_orders: int

    @property
    def mean_nll(self) -> float:
        """Mean of −ln p over the records, in nats. Smaller is better."""
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
    """Compute the mean negative log-likelihood of records over several orders of their readings.

    A sensor with a limited resolution reports multiples of a step. As in training, its readings get uniform noise of
    the width of the step. Without noise, a density at the multiples could be arbitrarily large. Orders and noise depend
    on the seed and the rows alone, so that different models can be compared.

    Args:
        model: The model. It is in evaluation mode during this call only.
        data: The prepared table.
        rows: (N,) row numbers of the records in the table.
        num_orders: Number of orders in which each record is scored.
        seed: Seed of orders and noise.
        arrival_share: Share (0 to 1) of the orders that are the logged order of arrival, if the table has one. The
            other orders are random.
        batch_size: Number of records that are scored together.
        should_continue: Called before each order except the first one, with the number of passes that are done. A pass
            is one record in one order. If it returns False, the result covers only the orders that are done.

    Returns:
        The means of −ln p of each record and of each feature, in nats.
    """
    noise = Noise.from_schema(data.schema)
    device = model.device
    num_features = len(data.schema)
    nll_by_record = np.zeros(len(rows))
    nll_sum_by_feature, count_by_feature = np.zeros(num_features), np.zeros(num_features)
    is_scored_feature = torch.tensor(~data.schema.is_context)
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
                    keys = arrival_ranks  # readings are sorted by the keys
                features, order = order_readings(values, keys)
                ordered_values = move_to_device(gather_values(values, order), device)
                log_p = model.log_prob(move_to_device(features, device), ordered_values).double().cpu()
                nll_by_record[batch] -= log_p.sum(1).numpy() / num_orders
                # Padding has the feature code −1, which must not be used as an index.
                is_counted = (features >= 0) & is_scored_feature[features.clamp(min=0)]
                feature_codes = features[is_counted].numpy()
                nll_sum_by_feature -= np.bincount(feature_codes, log_p[is_counted].numpy(), num_features)
                count_by_feature += np.bincount(feature_codes, minlength=num_features)
            num_done = order_index + 1
    model.train(was_training)
    if num_done < num_orders:  # the sums were divided by `num_orders`
        nll_by_record *= num_orders / num_done
    nll_by_feature = np.where(count_by_feature > 0, nll_sum_by_feature / np.maximum(count_by_feature, 1), np.nan)
    return HeldOutLikelihood(nll_by_record, nll_by_feature, num_done)
