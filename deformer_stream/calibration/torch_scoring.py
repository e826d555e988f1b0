"""Scores of complete records, computed by the network in PyTorch.

The conditionals of all readings of a record come from one forward pass without a cache. Calibration, explanations and
benchmarks use these functions; `engine.record_scores` offers the same with the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state, compute_complete_terms
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.deformer import DEformer, to_tensor

Floats = NDArray[np.float64]


def score_records(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int = 256
) -> CalibrationScores:
    """Return the anomaly scores of N complete records, and how improbable the readings of each feature are.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes (indexes in the model's schema) of at most L readings per record in order of
            arrival, −1 as padding at the end.
        values: (N, L) values in normalised units or label codes; those of padding are ignored.
        batch_size: Number of records in one forward pass.

    Returns:
        The scores of the records in the given order, and for each feature the sum of −ln p-value over its readings.
    """
    num_features = len(model.schema)
    total = CalibrationScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    distance = AlertDistance.from_model(model)
    batches = _iterate_score_terms(model, features, values, batch_size)
    lines, ranking_lines = AlertPrior.from_model(model), AlertPrior.for_ranking(model)
    for batch_index, (log_p, centered_nll, log_p_prior, is_scored) in enumerate(batches):
        start = batch_index * batch_size
        batch = slice(start, start + batch_size)
        scored_codes = features[batch][is_scored]  # flat: one code per scored reading
        terms = None if distance is None else distance.compute_terms(features[batch], values[batch])
        initial = PrefixState.initial(len(is_scored))
        prior = PriorPValues.pair(lines, log_p_prior)
        _, state = advance_prefix_state(initial, log_p, is_scored, distance_terms=terms, prior=prior)
        # Sum −ln p over the readings of each feature, and count them.
        neg_log_p_sums = np.bincount(scored_codes, weights=-log_p[is_scored], minlength=num_features).astype(np.float64)
        num_readings = np.bincount(scored_codes, minlength=num_features)
        sums = np.where(is_scored, centered_nll, 0.0).sum(1)
        complete = compute_complete_terms(state, ranking_lines) if ranking_lines else np.zeros(len(sums))
        total += CalibrationScores(state.max_statistic, neg_log_p_sums, num_readings, sums, complete)
    return total


def compute_log_p_values(model: DEformer, features: NDArray[np.int64], values: Floats) -> Floats:
    """Return ln of the p-values of readings, by the network and under the prior alone (`record_scores`), (2, N, L)."""
    log_p = np.zeros((2, *features.shape))
    start = 0
    for of_network, _, of_prior, _ in _iterate_score_terms(model, features, values, batch_size=32):
        part = slice(start, start := start + len(of_network))
        is_reading = features[part] >= 0
        log_p[0, part] = np.where(is_reading, of_network, 0.0)
        if of_prior is not None:
            log_p[1, part] = np.where(is_reading, of_prior, 0.0)
    return log_p


def compute_centered_nll(model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int = 256) -> Floats:
    """Return the centered NLL of each of N complete records, (N,), in nats; larger is more anomalous.

    The centered NLL of a reading is its negative log-likelihood −ln p(v) minus the entropy of its conditional
    distribution. Its mean is therefore 0 under a correct model. The centered NLL of a record is the sum over its
    readings, except those of context features, which only condition the others and are not scored.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes of at most L readings per record in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units or label codes; those of padding are ignored.
        batch_size: Number of records in one forward pass.
    """
    sums = [
        np.where(is_scored, centered_nll, 0.0).sum(1)
        for _, centered_nll, _, is_scored in _iterate_score_terms(model, features, values, batch_size)
    ]
    return np.concatenate(sums) if sums else np.empty(0)


def sum_neg_log_p(
    model: DEformer,
    features: NDArray[np.int64],
    values: Floats,
    ages: Floats,
    is_scored: NDArray[np.bool_],
    batch_size: int = 32,
) -> CalibrationScores:
    """Return how improbable the irregular readings of each feature are, in N contexts of records.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes of the readings of contexts, −1 as padding.
        values: (N, L) values in normalised units or label codes; those of padding are ignored.
        ages: (N, L) seconds from the origin of the record to each reading; those of padding are ignored.
        is_scored: (N, L) which readings are counted. Those of context features are never counted.
        batch_size: Number of contexts in one forward pass.

    Returns:
        For each feature the sum of −ln p-value over its readings and their number, without statistics of records.
    """
    num_features = len(model.schema)
    sums, counts = np.zeros(num_features), np.zeros(num_features, np.int64)
    is_scored = is_scored & (features >= 0) & ~model.schema.is_context[np.maximum(features, 0)]
    for start in range(0, len(features), batch_size):
        part = slice(start, start + batch_size)
        with torch.inference_mode():
            value_tensor = to_tensor(np.ascontiguousarray(values[part]), model)
            code_tensor = torch.from_numpy(np.ascontiguousarray(features[part])).to(model.device)
            # float64, whatever the dtype of the model
            age_tensor = torch.from_numpy(np.ascontiguousarray(ages[part], np.float64)).to(model.device)
            conditionals = model.conditionals(code_tensor, value_tensor, ages=age_tensor)
            log_p = conditionals.score(value_tensor)[0].double().cpu().numpy()
        codes = features[part][is_scored[part]]
        sums += np.bincount(codes, -log_p[is_scored[part]], num_features)
        counts += np.bincount(codes, minlength=num_features)
    return CalibrationScores(np.empty(0), sums, counts)


def _iterate_score_terms(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int
) -> Iterator[tuple[Floats, Floats, Floats | None, NDArray[np.bool_]]]:
    """Score N complete records and yield the scores of their readings, batch by batch.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes of at most L readings per record in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units or label codes; those of padding are ignored.
        batch_size: Number of records in one batch.

    Yields:
        For each batch of B records four arrays of shape (B, L), with an entry for each reading:
        the natural logarithm of its highest-density p-value (probability of a value that is at most as likely as the
        observed one);
        its centered NLL (negative log-likelihood minus the entropy of the conditional distribution), in nats;
        ln of its p-value under the Gaussian prior alone, None if that is no term of the alert;
        whether it is scored. Padding and context features (which only condition the others) are not scored; their
        entries in the other arrays are meaningless.
    """
    for start in range(0, len(features), batch_size):
        # torch.from_numpy refuses negative strides, as reversed arrays have.
        batch_codes = np.ascontiguousarray(features[start : start + batch_size])
        batch_values = np.ascontiguousarray(values[start : start + batch_size])
        with torch.inference_mode():
            codes_on_device = torch.from_numpy(batch_codes).to(model.device)
            values_on_device = to_tensor(batch_values, model)
            conditionals = model.conditionals(codes_on_device, values_on_device)
            terms = conditionals.compute_score_terms(values_on_device, conditionals.compute_surprisal(values_on_device))
            _, log_p, centered_nll, *further = terms.stack().double().cpu().numpy()
        # Padding has no feature. Code 0 stands in for it, and `batch_codes >= 0` excludes it again.
        is_context = model.schema.is_context[np.maximum(batch_codes, 0)]
        yield log_p, centered_nll, further[0] if further else None, (batch_codes >= 0) & ~is_context
