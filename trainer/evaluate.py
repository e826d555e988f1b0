"""Compute the likelihood of records that a model was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer
from trainer.data import PreparedTable, Split
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


MAX_REFERENCE_ROWS = 5000
"""Largest number of training records from which the distributions of independent columns are estimated."""

NUMBERS_OF_BINS = (0, 10, 30)
"""Candidates for the number of bins of a column's histogram. 0 stands for a normal distribution."""

MIN_BIN_WIDTH = 0.02
"""Smallest width of a bin in normalised units, which is that of the noise in training (`Recipe.smoothing`)."""

WIDE_SHARE, WIDE_SCALE = 0.01, 3.0
"""Share and standard deviation of a wide normal distribution that is mixed with that of each column."""


def compute_independent_nll(data: PreparedTable, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return −ln p of records if each column has the distribution of its training values, independently of the others.

    A model that predicts held-out records no better has not learned how the features depend on each other. The
    distribution of a measurement is a normal one, or a histogram whose bins have equal numbers of training readings,
    whichever predicts the column better. As in `evaluate_held_out`, readings of a sensor with a limited resolution get
    uniform noise.

    Args:
        data: The prepared table.
        rows: (N,) row numbers of the records.

    Returns:
        (N,) −ln p in nats, summed over the readings of features that are scored.
    """
    noise = Noise.from_schema(data.schema)
    train_rows = data.select_rows(Split.TRAIN)
    if len(train_rows) > MAX_REFERENCE_ROWS:
        train_rows = np.sort(np.random.default_rng(HELD_OUT_SEED).choice(train_rows, MAX_REFERENCE_ROWS, replace=False))
    references, _ = noise.apply(read_rows(data, train_rows)[0], create_generator(HELD_OUT_SEED, 0))
    values, _ = noise.apply(read_rows(data, rows)[0], create_generator(HELD_OUT_SEED, 1))
    nll = np.zeros(len(rows))
    for code in np.flatnonzero(~data.schema.is_context):
        x, reference = values[:, code].double().numpy(), references[:, code].double().numpy()
        x_is_known, reference = ~np.isnan(x), reference[~np.isnan(reference)]
        if data.schema.is_discrete[code]:
            num_labels = int(data.schema.label_counts[code]) + 1  # an unseen label is one more
            counts = np.bincount(reference.astype(np.int64), minlength=num_labels) + 0.5
            log_p = np.log(counts / counts.sum())[x[x_is_known].astype(np.int64)]
        else:
            # The first half of the training readings chooses the number of bins that predicts the second half best.
            half = len(reference) // 2
            num_bins = max(
                NUMBERS_OF_BINS,
                key=lambda n: compute_log_density(reference[:half], reference[half:], n).sum(),
            )
            log_p = compute_log_density(reference, x[x_is_known], num_bins)
        nll[x_is_known] -= log_p
    return nll


def compute_log_density(reference: NDArray[np.float64], x: NDArray[np.float64], num_bins: int) -> NDArray[np.float64]:
    """Return the log-density of M readings under the distribution of R reference readings.

    A wide normal distribution is mixed with it, so that readings outside the histogram have a density.

    Args:
        reference: (R,) readings from which the distribution is estimated.
        x: (M,) readings.
        num_bins: Number of bins of the histogram, 0 for a normal distribution.
    """
    wide_density = _compute_normal_density(x, 0.0, WIDE_SCALE)
    if not len(reference):
        density = wide_density
    elif not num_bins:
        density = _compute_normal_density(x, float(reference.mean()), max(float(reference.std()), MIN_BIN_WIDTH))
    else:
        edges = np.unique(np.quantile(reference, np.linspace(0.0, 1.0, num_bins + 1)))
        # Bins that are too narrow are joined with the next one, so that repeated readings have no extreme density.
        wide_enough = [edges[0]]
        for edge in edges[1:]:
            if edge - wide_enough[-1] >= MIN_BIN_WIDTH:
                wide_enough.append(edge)
        if wide_enough[-1] < edges[-1] or len(wide_enough) == 1:
            wide_enough.append(max(edges[-1], wide_enough[-1] + MIN_BIN_WIDTH))
        edges = np.array(wide_enough)
        counts, _ = np.histogram(reference, edges)
        densities = np.concatenate([[0.0], counts / len(reference) / np.diff(edges), [0.0]])
        # Index 0 is for readings below the histogram, the last index for those above it.
        bin_indexes = np.searchsorted(edges, x, side="right")
        bin_indexes[x == edges[-1]] = len(edges) - 1  # the last edge belongs to the last bin
        density = densities[bin_indexes]
    mixed: NDArray[np.float64] = (1.0 - WIDE_SHARE) * density + WIDE_SHARE * wide_density
    return np.log(np.maximum(mixed, 1e-300))


def _compute_normal_density(x: NDArray[np.float64], mean: float, deviation: float) -> NDArray[np.float64]:
    """Return the density of M readings under a normal distribution."""
    density: NDArray[np.float64] = np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2.0 * np.pi))
    return density


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
        should_continue: Called before each batch with the number of passes that are done. A pass is one record in one
            order. If it returns False, the result covers only the orders that are done, but at least the first one.

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
            nll_before, sum_before, count_before = nll_by_record.copy(), nll_sum_by_feature, count_by_feature
            is_stopped = False
            generator = create_generator(seed, HELD_OUT_SEED, order_index)
            for start in range(0, len(rows), batch_size):
                is_stopped = not should_continue(order_index * len(rows) + start) and order_index > 0
                if is_stopped:
                    break
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
                nll_sum = np.bincount(feature_codes, log_p[is_counted].numpy(), num_features)
                nll_sum_by_feature = nll_sum_by_feature - nll_sum
                count_by_feature = count_by_feature + np.bincount(feature_codes, minlength=num_features)
            if is_stopped:  # the readings of an incomplete order do not count
                nll_by_record, nll_sum_by_feature, count_by_feature = nll_before, sum_before, count_before
                break
            num_done = order_index + 1
    model.train(was_training)
    if num_done < num_orders:  # the sums were divided by `num_orders`
        nll_by_record *= num_orders / num_done
    nll_by_feature = np.where(count_by_feature > 0, nll_sum_by_feature / np.maximum(count_by_feature, 1), np.nan)
    return HeldOutLikelihood(nll_by_record, nll_by_feature, num_done)
