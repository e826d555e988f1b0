"""Scores of complete records, computed by the code that scores streams.

An alert compares a streamed record with calibration records, so both must be scored by the same code: in bfloat16,
PyTorch and the compiled kernels differ by more than the tolerance within which two scores count as equal. These
functions use the compiled kernels if there are any; a record's scores are then the same bits as in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import P_VALUE_EXPONENT
from deformer_stream.calibration.torch_scoring import RecordScores, compute_centered_nll, score_records
from deformer_stream.engine.records import INITIAL_RUNNING, RUNNING_DTYPE
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.model.deformer import DEformer

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

READINGS_PER_PASS = 8_192
"""Readings that go through the network together: a bound on memory that does not change any score."""


@dataclass(frozen=True, slots=True)
class ScoredRecords:
    """N complete records with M readings in all, one record after the other.

    Attributes:
        features: (M,) feature codes.
        log_p_value: (M,) natural logarithm of each reading's p-value.
        is_scored: (M,) False for readings of context features, which are given to the network and not scored.
        running: (N,) running sums and statistics of each record after its last reading, of dtype `RUNNING_DTYPE`.
    """

    features: Ints
    log_p_value: Floats
    is_scored: Bools
    running: NDArray[np.void]


def survey_records(kernels: CpuKernels | None, model: DEformer, features: Ints, values: Floats) -> RecordScores:
    """Return the largest prefix statistic of each record, and the sum of negative log p-values by feature.

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: A model in eval mode.
        features: (N, L) feature codes in order of arrival, N records with at most L readings; -1 is padding at the end.
        values: (N, L) values in the model's normalised units.
    """
    if kernels is None:
        return score_records(model, features, values)
    num_features = len(model.schema)
    total = RecordScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    for part in _score(kernels, features, values):
        codes, neg_log_p = part.features[part.is_scored], -part.log_p_value[part.is_scored]
        sums = np.bincount(codes, neg_log_p, num_features).astype(np.float64)
        total += RecordScores(part.running["peak"], sums, np.bincount(codes, minlength=num_features))
    return total


def sum_centered_nll(kernels: CpuKernels | None, model: DEformer, features: Ints, values: Floats) -> Floats:
    """Return each record's sum of centered NLLs (NLL of a value minus the entropy of its conditional), (N,) nats.

    The arguments are those of `survey_records`.
    """
    if kernels is None:
        return compute_centered_nll(model, features, values)
    return np.concatenate([np.empty(0), *(part.running["excess"] for part in _score(kernels, features, values))])


def _score(kernels: CpuKernels, features: Ints, values: Floats) -> Iterator[ScoredRecords]:
    """Score the records with compiled kernels, a bounded number of readings at a time."""
    num_records, longest = features.shape
    step = max(1, READINGS_PER_PASS // max(longest, 1))
    for start in range(0, num_records, step):
        yield _score_together(kernels, features[start : start + step], values[start : start + step])


def _score_together(kernels: CpuKernels, features: Ints, values: Floats) -> ScoredRecords:
    is_reading = features >= 0
    codes, num_records = features[is_reading], len(features)
    offsets = np.append(0, np.cumsum(is_reading.sum(1)))
    is_scored = ~kernels.model.schema.is_context[codes]
    running = np.full(num_records, INITIAL_RUNNING, RUNNING_DTYPE)
    terms = np.empty((3, len(codes)))
    if len(codes):
        cache = kernels.create_cache(num_records * kernels.bytes_per_record)
        pages = np.arange(num_records * cache.pages_per_record).reshape(num_records, -1)
        no_past = np.zeros(num_records, np.int64)
        batch = RaggedBatch(codes, values[is_reading].astype(np.float32), offsets, no_past, pages)
        terms[:] = kernels.score(cache, batch)
        columns = np.empty((3, len(codes)))
        kernels.advance(running, np.arange(num_records), offsets, terms, is_scored, None, columns, P_VALUE_EXPONENT)
    return ScoredRecords(codes, terms[1], is_scored, running)
