"""Fit the term of the Gaussian prior in the alert: how improbable training records are under the prior alone.

The term is that of `deformer_stream.model.alert_prior`. Each training record is scored under a prior that was fitted
without it, so its p-values are like those of new records. Calibration records are not used, so the guarantee of the
alert rule holds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import combine_p_values
from deformer_stream.model.alert_prior import MAX_NEG_LOG_P, fit_line
from deformer_stream.model.deformer import AlertPriorTensors, DEformer
from deformer_stream.model.distributions import build_prior_conditional
from trainer.calibrate import Order, order_records
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import CrossFittedPriors
from trainer.prefix_tails import MAX_REFERENCE_RECORDS, MIN_RECORDS, fit_lines
from trainer.sampling import create_generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_EXCESS = 0.2
"""Smallest mean excess of the tail, in nats. That of independent p-values, raised to the usual power, is about 0.8."""
PRIOR_SEED = 0xA9107
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""
BATCH_SIZE = 64
"""Number of records whose conditionals are computed together. A covariance matrix of each takes memory."""


def add_alert_prior(
    model: DEformer,
    data: PreparedTable,
    priors: CrossFittedPriors | None,
    order: Order,
    seed: int,
    is_wanted: bool | None,
) -> None:
    """Make the Gaussian prior a term of the alert of a trained model, unless it has none or few training records.

    Args:
        model: The trained model, which is changed in place. A term that it has already is replaced.
        data: The prepared table.
        priors: The Gaussian prior of the model with its variants; None if the model has none.
        order: The arrival-order distribution (`calibrate.choose_order`).
        seed: Seed of the random choices.
        is_wanted: Whether the prior becomes a term; None for the default, with which `MIN_RECORDS` are needed.
    """
    model.alert_prior = None
    model.config = replace(model.config, alert_prior=False)
    rows = np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION))
    if is_wanted is None:
        is_wanted = len(rows) >= MIN_RECORDS
    num_counted = int((~data.schema.is_context).sum())
    if priors is None or model.gaussians is None or not is_wanted or not num_counted:
        return
    chosen = np.sort(np.random.default_rng([seed, PRIOR_SEED]).permutation(rows)[:MAX_REFERENCE_RECORDS])
    codes, values, _ = order_records(data, chosen, order, create_generator(seed, PRIOR_SEED))
    log_p = np.maximum(_compute_log_p(priors, codes, values, chosen), -MAX_NEG_LOG_P)
    is_counted = (codes >= 0) & ~data.schema.is_context[np.maximum(codes, 0)]
    statistics, counts = combine_p_values(log_p, is_counted), is_counted.cumsum(1)
    # Readings of context features do not change the statistic, so each prefix occurs once.
    starts, slopes = fit_lines(statistics[is_counted], counts[is_counted], num_counted, MIN_EXCESS, fit_line)
    tensors = AlertPriorTensors(data.schema)
    tensors.starts, tensors.slopes = torch.from_numpy(starts), torch.from_numpy(slopes)
    model.alert_prior = tensors.to(model.device)
    model.config = replace(model.config, alert_prior=True)


def _compute_log_p(priors: CrossFittedPriors, codes: Ints, values: Floats, rows: Ints) -> Floats:
    """Return ln of the p-values of readings under priors that were fitted without their records, (R, L).

    Args:
        priors: The Gaussian prior with its variants.
        codes: (R, L) features in order of arrival, −1 as padding.
        values: (R, L) normalised values or label codes, arbitrary at padding.
        rows: (R,) row numbers of the records in the table.
    """
    device = priors.by_fold.means.device
    result = np.zeros(codes.shape)
    for start in range(0, len(codes), BATCH_SIZE):
        part = slice(start, start + BATCH_SIZE)
        features, x = (torch.from_numpy(np.ascontiguousarray(array[part])).to(device) for array in (codes, values))
        conditional = build_prior_conditional(priors.compute_conditionals(features, x.double(), rows[part]))
        with torch.no_grad():
            result[part] = conditional.log_p_value(x.double()).cpu().numpy()
    return result
