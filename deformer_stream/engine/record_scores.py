"""Scores of complete records, computed by the same code as the scores of a stream.

A p-value compares a streamed record with calibration records, so both must be scored by the same code. In bfloat16,
PyTorch and the compiled kernels differ by more than the tolerance within which two scores count as equal. If a model
has compiled kernels, these functions use them. A record's scores are then the same bits as in the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import P_VALUE_EXPONENT, PrefixState, compute_complete_terms
from deformer_stream.calibration.drift import RecordReadings
from deformer_stream.engine.passes import MAX_READINGS_PER_PASS
from deformer_stream.engine.records import INITIAL_RUNNING, PREFIX_FIELDS, RUNNING_DTYPE
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.kernels.prefix_distances import choose_distance_function
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.load_network import load_network
from deformer_stream.model.parameters import Model
from deformer_stream.model.score_terms import LOG_P_PRIOR, LOG_P_VALUE, count_score_terms

if TYPE_CHECKING:
    from deformer_stream.model.deformer import DEformer

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONTEXTS_PER_PASS = 16
"""Number of contexts of irregular readings that go through the network together. It bounds memory."""


@dataclass(frozen=True, slots=True)
class PassScores:
    """Scores of N complete records with M readings in total, one record after the other.

    Attributes:
        features: (M,) feature code of each reading.
        log_p_value: (M,) natural logarithm of each reading's p-value (probability of a value at most as likely as the
            observed one).
        log_p_prior: (M,) the same under the prior alone; 0 if that is no term of the alert.
        is_scored: (M,) False for readings of context features. They condition the other features and are not scored.
        running: (N,) sums and extremes over the scored readings of each record, such as its largest anomaly score
            ("max_statistic"). `RUNNING_DTYPE` describes the fields.
    """

    features: Ints
    log_p_value: Floats
    log_p_prior: Floats
    is_scored: Bools
    running: NDArray[np.void]


def compute_record_scores(
    kernels: CpuKernels | None, model: Model, features: Ints, values: Floats
) -> CalibrationScores:
    """Score N complete records, and return one statistic per record and one sum per feature.

    The statistic of a record is its largest anomaly score over all prefixes (its first 1, 2, … readings), from which
    alerts are calibrated. The sum of a feature adds up −ln p-value (probability of a value at most as likely) over the
    readings of the feature in all records. It shows how unusual the values of the feature are.

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: The features, hyperparameters and weights.
        features: (N, L) feature codes of N records with at most L readings, in order of arrival. -1 is padding at the
            end of a row.
        values: (N, L) values in the model's normalised units; label codes of discrete features. Padding is ignored.

    Returns:
        The statistics and the sums of centered NLLs of the N records, the sum of each feature, and the number of scored
        readings of each feature.

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "score")
    if kernels is None:
        torch_scoring, network = _load_torch(model)
        torch_scores: CalibrationScores = torch_scoring.score_records(network, features, values)
        return torch_scores
    num_features = len(model.schema)
    ranking_lines = AlertPrior.for_ranking(model)
    scores = CalibrationScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    for part in _score_in_passes(kernels, features, values):
        codes, neg_log_p = part.features[part.is_scored], -part.log_p_value[part.is_scored]
        sum_by_feature = np.bincount(codes, neg_log_p, num_features).astype(np.float64)
        count_by_feature = np.bincount(codes, minlength=num_features)
        # Adding appends the statistics of the records, and adds the sums and the counts.
        scores += CalibrationScores(
            part.running["max_statistic"],
            sum_by_feature,
            count_by_feature,
            part.running["centered_nll"],
            compute_ranking_terms(ranking_lines, part.running),
        )
    return scores


def compute_ranking_terms(lines: AlertPrior | None, running: NDArray[np.void]) -> Floats:
    """Return what p-values add to the ranking of R complete records, (R,); 0 without lines (`AlertPrior.for_ranking`).

    Args:
        lines: The lines of a model for wide records, None for other models.
        running: (R,) the running statistics of the records after their last readings.
    """
    if lines is None:
        return np.zeros(len(running))
    return compute_complete_terms(PrefixState(*(running[name] for name in PREFIX_FIELDS)), lines)


def sum_centered_nll(kernels: CpuKernels | None, model: Model, features: Ints, values: Floats) -> Floats:
    """Return the sum of centered NLLs of each of N records, (N,) nats; larger is more anomalous.

    The centered NLL of a reading is its negative log-likelihood minus the entropy of its conditional (the model's
    distribution of the value given the earlier readings).

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: The features, hyperparameters and weights.
        features: (N, L) feature codes of N records with at most L readings, in order of arrival. -1 is padding at the
            end of a row.
        values: (N, L) values in the model's normalised units; label codes of discrete features. Padding is ignored.

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "score")
    if kernels is None:
        torch_scoring, network = _load_torch(model)
        centered_nll: Floats = torch_scoring.compute_centered_nll(network, features, values)
        return centered_nll
    sums = [part.running["centered_nll"] for part in _score_in_passes(kernels, features, values)]
    return np.concatenate([np.empty(0), *sums])  # the empty array keeps the result valid if there is no record


def average_neg_log_p_by_feature(
    kernels: CpuKernels | None, model: Model, records: Collection[RecordReadings]
) -> dict[str, float]:
    """Return the mean of −ln p over the readings of each feature, in nats, by the feature's name.

    p is a reading's highest-density p-value: the probability of a value that is at most as likely as the observed one.

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: The features, hyperparameters and weights.
        records: The readings of each record; with their ages, if readings are irregular.

    Returns:
        The mean by feature name. Empty if readings are irregular and have no ages.
    """
    is_irregular = model.schema.reading_times is not None
    if not records or (is_irregular and any(record.ages is None for record in records)):
        return {}
    # (R, L) for R records with at most L readings; the code −1 is padding at the end of a row.
    max_readings = max(len(record.codes) for record in records)
    codes = np.full((len(records), max_readings), -1, np.int64)
    values, ages = np.zeros(codes.shape), np.zeros(codes.shape)
    for row, record in enumerate(records):
        codes[row, : len(record.codes)] = record.codes
        values[row, : len(record.values)] = record.values
        if record.ages is not None:
            ages[row, : len(record.ages)] = record.ages
    normalised_values = model.schema.normalise(np.maximum(codes, 0), values)  # padding needs a valid code
    if not is_irregular:
        scores = compute_record_scores(kernels, model, codes, normalised_values)
    else:
        num_context = np.array([record.num_context for record in records])
        is_scored = (codes >= 0) & (np.arange(max_readings) >= num_context[:, None])
        scores = _sum_neg_log_p(kernels, model, codes, normalised_values, ages, is_scored)
    return scores.average_neg_log_p_by_feature(model.schema.names)


def _sum_neg_log_p(
    kernels: CpuKernels | None, model: Model, features: Ints, values: Floats, ages: Floats, is_scored: Bools
) -> CalibrationScores:
    """Return how improbable the irregular readings of each feature are, in N contexts of records.

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: The features, hyperparameters and weights.
        features: (N, L) feature codes of the readings of contexts, −1 as padding.
        values: (N, L) values in normalised units, or label codes.
        ages: (N, L) seconds from the origin of the record to each reading.
        is_scored: (N, L) which readings are counted. Those of context features are never counted.

    Returns:
        For each feature the sum of −ln p-value over its readings and their number, without statistics of records.
    """
    if kernels is None:
        torch_scoring, network = _load_torch(model)
        torch_sums: CalibrationScores = torch_scoring.sum_neg_log_p(
            network, features, values, ages, is_scored, CONTEXTS_PER_PASS
        )
        return torch_sums
    num_features = len(model.schema)
    sums, counts = np.zeros(num_features), np.zeros(num_features, np.int64)
    for start in range(0, len(features), CONTEXTS_PER_PASS):
        part = slice(start, start + CONTEXTS_PER_PASS)
        is_reading = features[part] >= 0
        codes, num_readings = features[part][is_reading], is_reading.sum(1)
        cache, pages = kernels.create_cache_of_records(len(num_readings), int(num_readings.max(initial=0)))
        batch = RaggedBatch(
            features=codes,
            values=values[part][is_reading].astype(np.float32),
            offsets=np.append(0, np.cumsum(num_readings)),
            num_cached=np.zeros(len(num_readings), np.int64),
            page_table=pages,
            ages=ages[part][is_reading],
        )
        _, log_p_value, _ = kernels.score(cache, batch)
        is_counted = is_scored[part][is_reading] & ~model.schema.is_context[codes]
        sums += np.bincount(codes[is_counted], -log_p_value[is_counted].astype(np.float64), num_features)
        counts += np.bincount(codes[is_counted], minlength=num_features)
    return CalibrationScores(np.empty(0), sums, counts)


def _score_in_passes(kernels: CpuKernels, features: Ints, values: Floats) -> Iterator[PassScores]:
    """Score N records with compiled kernels, and yield the scores of some consecutive records at a time.

    Each part has at most `MAX_READINGS_PER_PASS` readings (padding included) or a single record, which bounds memory.

    Args:
        kernels: The model's compiled kernels.
        features: (N, L) feature codes of N records with at most L readings, in order of arrival. -1 is padding at the
            end of a row.
        values: (N, L) values in normalised units; label codes of discrete features.
    """
    num_records, max_readings = features.shape
    records_per_pass = max(1, MAX_READINGS_PER_PASS // max(max_readings, 1))
    distance, alert_prior = AlertDistance.from_model(kernels.parameters), AlertPrior.from_model(kernels.parameters)
    for start in range(0, num_records, records_per_pass):
        records = slice(start, start + records_per_pass)
        yield _score_pass(kernels, distance, alert_prior, features[records], values[records])


def _score_pass(
    kernels: CpuKernels, distance: AlertDistance | None, alert_prior: AlertPrior | None, features: Ints, values: Floats
) -> PassScores:
    """Return the scores of N records, computed in one call of the compiled kernels.

    Args:
        kernels: The model's compiled kernels.
        distance: The distance to training records in the alert, None if it is no term.
        alert_prior: The p-values under the prior in the alert, None if they are no term.
        features: (N, L) feature codes of N records with at most L readings, in order of arrival. -1 is padding at the
            end of a row.
        values: (N, L) values in normalised units; label codes of discrete features.
    """
    # The kernels take the M readings of all records one after the other, without padding.
    is_reading = features >= 0
    codes, num_records = features[is_reading], len(features)
    boundaries = np.append(0, np.cumsum(is_reading.sum(1)))  # index of each record's first reading, followed by M
    is_scored = ~kernels.parameters.schema.is_context[codes]
    distance_terms = None
    if distance is not None:
        measure = choose_distance_function(kernels.library)
        distance_terms = distance.compute_terms(features, values, measure)[is_reading]
    running = np.full(num_records, INITIAL_RUNNING, RUNNING_DTYPE)
    score_terms = np.zeros(
        (count_score_terms(has_prior_row=True), len(codes))
    )  # those under the prior stay 0 without it
    if len(codes):
        cache, pages = kernels.create_cache_of_records(num_records, features.shape[1])
        num_cached = np.zeros(num_records, np.int64)
        batch = RaggedBatch(codes, values[is_reading].astype(np.float32), boundaries, num_cached, pages)
        scored = kernels.score(cache, batch, alert_prior is not None)
        score_terms[: len(scored)] = scored  # also converts float32 to float64
        prior = None if alert_prior is None else PriorPValues(score_terms[LOG_P_PRIOR], alert_prior)
        # Update `running` with the readings of each record. The scores after each reading are not needed here, but
        # `advance` requires an array for them.
        unused_scores = np.empty((3, len(codes)))
        kernels.advance(
            running,
            record_index=np.arange(num_records),
            boundaries=boundaries,
            score_terms=score_terms,
            is_scored=is_scored,
            is_decision_point=None,  # no tie groups: the anomaly score is updated after each reading
            score_rows=unused_scores,
            p_value_exponent=P_VALUE_EXPONENT,
            distance_terms=distance_terms,
            prior=prior,
        )
    return PassScores(codes, score_terms[LOG_P_VALUE], score_terms[LOG_P_PRIOR], is_scored, running)


def compute_log_p_values(kernels: CpuKernels | None, model: Model, features: Ints, values: Floats) -> Floats:
    """Return ln of the p-values of the readings of N complete records, by the network and under the prior alone.

    Args:
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        model: The model, whose prior must be a term of the alert.
        features: (N, L) feature codes in order of arrival, −1 as padding at the end.
        values: (N, L) normalised values, or label codes.

    Returns:
        (2, N, L) natural logarithms; 0 for padding.
    """
    if kernels is None:
        torch_scoring, network = _load_torch(model)
        log_p_values: Floats = torch_scoring.compute_log_p_values(network, features, values)
        return log_p_values
    log_p, is_reading = np.zeros((2, *features.shape)), features >= 0
    parts = list(_score_in_passes(kernels, features, values))
    log_p[0, is_reading] = np.concatenate([np.empty(0), *(part.log_p_value for part in parts)])
    log_p[1, is_reading] = np.concatenate([np.empty(0), *(part.log_p_prior for part in parts)])
    return log_p


def _load_torch(model: Model) -> tuple[ModuleType, DEformer]:
    """Return the module that scores records with PyTorch, and the network of a model.

    Both are imported only if they are needed, because scoring with compiled kernels needs no PyTorch.

    Raises:
        ConfigError: PyTorch is not installed.
    """
    network = load_network(model)  # first, because its error says how to install PyTorch
    from deformer_stream.calibration import torch_scoring

    return torch_scoring, network
