"""Scores of complete records, computed by the network in PyTorch.

The conditionals of all readings of a record come from one forward pass without a cache. Calibration, explanations and
benchmarks use these functions; `engine.record_scores` offers the same with the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.model.deformer import DEformer, to_tensor

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordScores:
    """Scores of N complete records, and sums by feature over all their readings.

    Attributes:
        statistics: (N,) the largest prefix statistic of each record, larger is more anomalous.
        neg_log_p_sums: (F,) sum of −ln p over the readings of each of F features, in nats.
        num_readings: (F,) number of scored readings of each feature.
    """

    statistics: Floats
    neg_log_p_sums: Floats
    num_readings: NDArray[np.int64]

    def __add__(self, other: RecordScores) -> RecordScores:
        return RecordScores(
            np.concatenate([self.statistics, other.statistics]),
            self.neg_log_p_sums + other.neg_log_p_sums,
            self.num_readings + other.num_readings,
        )

    def average_neg_log_p_by_feature(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean of −ln p for each feature that has readings, in nats; 1 is expected of a correct model.

        Args:
            names: The names of the F features.
        """
        return {
            names[f]: float(self.neg_log_p_sums[f] / self.num_readings[f])
            for f in np.flatnonzero(self.num_readings).tolist()
        }


def score_records(model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int = 256) -> RecordScores:
    """Score N complete records with at most L readings each.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units.
        batch_size: Number of records in one forward pass.
    """
    num_features = len(model.schema)
    total = RecordScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    batches = _iterate_score_terms(model, features, values, batch_size)
    for batch_index, (log_p, _, is_scored) in enumerate(batches):
        start = batch_index * batch_size
        codes = features[start : start + batch_size][is_scored]
        _, state = advance_prefix_state(PrefixState.initial(len(is_scored)), log_p, is_scored)
        neg_log_p_sums = np.bincount(codes, -log_p[is_scored], num_features).astype(np.float64)
        num_readings = np.bincount(codes, minlength=num_features)
        total += RecordScores(state.max_statistic, neg_log_p_sums, num_readings)
    return total


def compute_max_statistics(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int = 256
) -> Floats:
    """Return the largest prefix statistic of each of N complete records, (N,), larger is more anomalous.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units.
        batch_size: Number of records in one forward pass.
    """
    return score_records(model, features, values, batch_size).statistics


def compute_centered_nll(model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int = 256) -> Floats:
    """Return the centered NLL of each of N complete records, (N,), in nats; larger is more anomalous.

    A reading's centered NLL is −ln p(v) minus its mean under the model, the entropy of its conditional distribution. A
    record's is the sum over its scored readings.

    Args:
        model: The network, in evaluation mode.
        features: (N, L) feature codes in order of arrival, −1 as padding at the end.
        values: (N, L) values in normalised units.
        batch_size: Number of records in one forward pass.
    """
    sums = [
        np.where(is_scored, centered_nll, 0.0).sum(1)
        for _, centered_nll, is_scored in _iterate_score_terms(model, features, values, batch_size)
    ]
    return np.concatenate(sums) if sums else np.empty(0)


def _iterate_score_terms(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch_size: int
) -> Iterator[tuple[Floats, Floats, NDArray[np.bool_]]]:
    """Yield the score terms of each batch of B records.

    Each item holds ln of the highest-density p-values, the centered NLLs, and whether a place is a scored reading
    rather than context or padding; all of shape (B, L).
    """
    for start in range(0, len(features), batch_size):
        codes = np.ascontiguousarray(features[start : start + batch_size])
        inputs = torch.from_numpy(codes).to(model.device)
        with torch.inference_mode():
            x = to_tensor(np.ascontiguousarray(values[start : start + batch_size]), model)
            terms = model.conditionals(inputs, x).score(x)
            log_p, centered_nll = (term.double().cpu().numpy() for term in terms)
        is_context = model.schema.is_context[np.maximum(codes, 0)]
        yield log_p, centered_nll, (codes >= 0) & ~is_context
