"""Fit the term of the Gaussian prior in the alert: how improbable training records are under the prior alone.

The term is that of `deformer_stream.model.alert_prior`. Each training record is scored under a mixture that was fitted
without it, so its p-values are like those of new records. The prior of wide records, and the network, are fitted to all
training records, so validation records are scored instead. Calibration records are not used, so the guarantee of the
alert rule holds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import combine_p_values
from deformer_stream.engine.record_scores import compute_log_p_values
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.alert_prior import EXPONENT, MAX_NEG_LOG_P, NETWORK, PRIOR
from deformer_stream.model.deformer import AlertPriorTensors, DEformer
from deformer_stream.model.distributions import build_prior_conditional
from trainer.calibrate import Order, order_records
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import CrossFittedPriors
from trainer.prefix_tails import MAX_REFERENCE_RECORDS, MIN_PREFIXES, MIN_RECORDS, TermScale, fit_lines
from trainer.sampling import create_generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_EXCESS = 0.02
"""Smallest mean excess of the tail, in nats. That of the combined p-values of complete records with hundreds of
readings is near 0; that of short prefixes is about 1."""
PRIOR_SEED = 0xA9107
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""
MAX_WIDE_READINGS, MIN_WIDE_RECORDS = 60_000, 30
"""Largest number of readings of wide records from which the lines are fitted, because each takes long to score; and
number of records that are used even if they have more readings."""
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
    """Make the prior a term of the alert of a trained model, unless it has none or few training records.

    Args:
        model: The trained model, which is changed in place. A term that it has already is replaced.
        data: The prepared table.
        priors: The mixture of Gaussians of the model with its variants; None if it has none.
        order: The arrival-order distribution (`calibrate.choose_order`).
        seed: Seed of the random choices.
        is_wanted: Whether the prior becomes a term; None for the default, with which `MIN_RECORDS` are needed.
    """
    model.alert_prior = None
    model.config = replace(model.config, alert_prior=False)
    is_training, is_validation = data.split == Split.TRAIN, data.split == Split.VALIDATION
    if is_wanted is None:
        is_wanted = int((is_training | is_validation).sum()) >= MIN_RECORDS
    num_counted = int((~data.schema.is_context).sum())
    is_wide = priors is None
    if not is_wanted or not num_counted or not model.num_prior_components:
        return
    # The prior of wide records has no variants that were fitted without some of the training records.
    rows = np.flatnonzero(is_validation if is_wide else is_training | is_validation)
    limit = max(MAX_WIDE_READINGS // num_counted, MIN_WIDE_RECORDS) if is_wide else MAX_REFERENCE_RECORDS
    chosen = np.sort(np.random.default_rng([seed, PRIOR_SEED]).permutation(rows)[:limit])
    if is_wide and len(chosen) < MIN_PREFIXES:
        return
    codes, values, _ = order_records(data, chosen, order, create_generator(seed, PRIOR_SEED))
    model.alert_prior = AlertPriorTensors(data.schema).to(model.device)
    model.config = replace(model.config, alert_prior=True)
    if priors is None:
        with attached_kernels(model) as kernels:
            log_p = compute_log_p_values(kernels, model, codes, values)
    else:
        log_p = np.stack([np.zeros(codes.shape), _compute_log_p(priors, codes, values, chosen)])
    is_counted = (codes >= 0) & ~data.schema.is_context[np.maximum(codes, 0)]
    counts = is_counted.cumsum(1)[is_counted]  # readings of context features do not change the statistic
    starts, slopes, scale = np.zeros((2, num_counted)), np.ones((2, num_counted)), TermScale(EXPONENT)
    for source in (NETWORK, PRIOR) if is_wide else (PRIOR,):
        bounded = np.maximum(log_p[source], -MAX_NEG_LOG_P) if source == PRIOR else log_p[source]
        statistics = combine_p_values(bounded, is_counted)[is_counted]
        # Without the line of the network, a wide record with an unusual number of readings could not alert.
        starts[source], slopes[source] = fit_lines(statistics, counts, num_counted, MIN_EXCESS, scale, is_wide)
    model.alert_prior.starts, model.alert_prior.slopes = (
        torch.from_numpy(lines).to(model.device) for lines in (starts, slopes)
    )


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
