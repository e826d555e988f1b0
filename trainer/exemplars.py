"""Add exemplars (stored training records) to a trained model, so that it can rank complete records by anomaly.

The ranking score of a complete record combines several numbers. One is its distance to the nearest exemplars. Another
is its centered NLL (negative log-likelihood minus the entropy of the conditionals). If it is useful for the table,
−ln p under the Gaussian prior is a third one (`prior_weight`). For tables with mostly labels, −ln p of the readings
without regard to one another is a further one. Each is expressed relative to its typical values, which are its median
and 90% quantile for normal records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import trim_largest
from deformer_stream.engine.record_scores import sum_centered_nll
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.exemplars import Exemplars, estimate_marginals
from deformer_stream.model.positions import compute_positions, has_unordered_labels
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.schema import LINEAR_LIMIT, Schema
from trainer.budget import MIN_CLEAR_RATIO, measure_seconds_per_record
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import CrossFittedPriors, extract_mixture
from trainer.prior_weight import PriorWeightEstimator
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_EXEMPLARS = 4096
"""Largest number of exemplars by default.

More of them would improve the ranking of very large tables only a little. Each closed record is compared with all
exemplars, so its ranking would take longer.
"""

MAX_REFERENCE_RECORDS = 1000
"""Largest number of normal records from which the typical distance and the typical centered NLL are computed."""

MIN_PRIOR_RECORDS = 300
"""Number of records from which the weight and the typical value of the prior's density are computed if time is over.

It takes some tenths of a second at most, and from fewer records the weight would depend on chance.
"""

MIN_DIFFERENCE_RATE = 0.05
"""Smallest assumed probability that two records differ in a label.

Differences of labels are divided by this probability. Without a lower bound, a label that is nearly always the same
would outweigh all other features.
"""

MIN_SPREAD = 1e-6
"""Spreads of typical values up to this number are rounding errors of equal values."""

DISTANCE_BATCH = 256
"""Number of calibration records whose distances to the exemplars are computed at once."""

RANKING_SEED = 0x4A4C
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""


def add_ranking(
    model: DEformer,
    data: PreparedTable,
    max_exemplars: int,
    seed: int,
    num_reference_records: int = MAX_REFERENCE_RECORDS,
    batch_size: int | None = None,
    should_continue: Callable[[int], bool] = lambda num_done: True,
    calibration_exemplars: bool = True,
    priors: CrossFittedPriors | None = None,
    prior_weight: float | None = None,
    marginal_weight: float | None = None,
    trim: float = 0.0,
) -> DEformer:
    """Store exemplars (training records for comparison) and typical values of normal records in the model.

    The model ranks complete records from normal to anomalous by comparison with them. Alerts do not depend on the
    ranking. Therefore exemplars are drawn at random from all records, including calibration records. If suspected
    anomalies were left out of training, only training and validation records are used. If a model is adapted
    (`--init-from`), its old exemplars are kept as far as `max_exemplars` permits.

    Args:
        model: The trained model. Its ranking and its configuration are replaced.
        data: The prepared table.
        max_exemplars: Largest number of exemplars. With 0, or with fewer than two records, the model gets no ranking.
        seed: Seed of the random choices.
        num_reference_records: Largest number of normal records from which the typical distance, and the typical
            centered NLL, are computed.
        batch_size: Number of these records that are processed together; by default all.
        should_continue: Called before each batch with the number of these records that are done. If it returns False,
            typical values are computed from the records that are done.
        calibration_exemplars: Whether calibration records may become exemplars. If not, their anomaly scores are
            comparable with those of new records, and a threshold can be computed from them.
        priors: The Gaussian prior of the model with its variants, None if the model has no prior.
        prior_weight: The weight of the prior's density in the ranking. None to learn it; it is 0 without a prior.
        marginal_weight: The weight of the density of the readings without regard to one another. None for that of
            `choose_marginal_weight`.
        trim: Share (0 to 1) of the calibration records that may be anomalies. The largest values of this share are left
            out of the typical values.

    Returns:
        The same model, which was changed in place.
    """
    rng = np.random.default_rng([seed, RANKING_SEED])
    exemplar_rows = _choose_exemplar_rows(data, max_exemplars, rng, calibration_exemplars)
    exemplars = _create_exemplars(model, data, exemplar_rows, max_exemplars, rng)
    if exemplars is None:
        model.ranking = None
        return model
    # The exemplars of an old model (`--init-from`) come first. The typical distance is computed from new ones only.
    num_new = len(exemplar_rows)
    num_exemplars = len(exemplars.positions)
    new_indexes = np.arange(num_exemplars - num_new, num_exemplars)
    references = _measure_references(
        model, data, exemplars, new_indexes, num_reference_records, rng, seed, batch_size, should_continue
    )
    typical = [
        _summarize_typical(references.distances),
        _summarize_typical(trim_largest(references.centered_nll, trim)),
    ]
    # Densities need no network, so they are computed for more records than the time permitted for the network.
    num_prior_records = min(max(references.num_done, MIN_PRIOR_RECORDS), MAX_REFERENCE_RECORDS)
    if priors is None:
        prior_weight = 0.0
    elif prior_weight is None:
        further = rng.permutation(np.setdiff1d(new_indexes, references.exemplar_indexes))
        further = further[: max(num_prior_records - len(references.exemplar_indexes), 0)]
        estimator = PriorWeightEstimator(exemplars, data, exemplar_rows, priors, seed)
        prior_weight = _estimate_prior_weight(estimator, exemplars, references, further)
    if marginal_weight is None:
        marginal_weight = choose_marginal_weight(data.schema)
    # Typical densities are those of calibration records, because training records fit the prior too well.
    rows = rng.permutation(data.select_rows(Split.CALIBRATION))[:num_prior_records]
    values = np.asarray(data.values[np.sort(rows)], np.float64)
    if priors is not None and prior_weight:
        prior_nll = extract_mixture(priors.full).compute_neg_log_density(values[:, data.schema.is_linear])
        typical.append(_summarize_typical(trim_largest(prior_nll, trim)))
    if marginal_weight:
        typical.append(_summarize_typical(trim_largest(_compute_marginal_nll(exemplars, values), trim)))
    model.ranking = Ranking.from_exemplars(replace(exemplars, typical=np.array(typical))).to(model.device)
    model.config = replace(
        model.config,
        exemplars=num_exemplars,
        prior_weight=prior_weight,
        marginal_weight=marginal_weight,
    )
    return model


@dataclass(frozen=True, slots=True)
class _References:
    """Normal records by which typical values are computed.

    Attributes:
        exemplar_indexes: (R,) the indexes of exemplars whose distances were measured.
        distances: (R,) the distances of these exemplars to the others.
        centered_nll: (C,) the centered NLL of calibration records.
        num_done: Number of exemplars and of calibration records up to which the time was sufficient.
    """

    exemplar_indexes: Ints
    distances: Floats
    centered_nll: Floats
    num_done: int


def _measure_references(
    model: DEformer,
    data: PreparedTable,
    exemplars: Exemplars,
    new_indexes: Ints,
    num_reference_records: int,
    rng: np.random.Generator,
    seed: int,
    batch_size: int | None,
    should_continue: Callable[[int], bool],
) -> _References:
    """Measure distances of new exemplars, and the centered NLL of calibration records, as far as the time permits.

    Args:
        model: As for `add_ranking`.
        data: As for `add_ranking`.
        exemplars: All exemplars.
        new_indexes: Indexes of the exemplars that are not those of an old model.
        num_reference_records: As for `add_ranking`.
        rng: Draws the records.
        seed: As for `add_ranking`.
        batch_size: As for `add_ranking`.
        should_continue: As for `add_ranking`.
    """
    reference_indexes = np.sort(rng.permutation(new_indexes)[:num_reference_records])
    held_out_rows = rng.permutation(data.select_rows(Split.CALIBRATION))[:num_reference_records]
    distances, centered_nll = [], []
    num_done = 0
    batch_size = batch_size or max(len(reference_indexes), len(held_out_rows), 1)
    if batch_size < len(reference_indexes):
        # If the time ends before the last batch, the records that are done must be a random sample.
        reference_indexes = rng.permutation(reference_indexes)
    for start in range(0, max(len(reference_indexes), len(held_out_rows)), batch_size):
        if not should_continue(start):
            break
        batch = slice(start, start + batch_size)
        if len(reference_indexes[batch]):
            distances.append(_compute_distances_to_others(exemplars, reference_indexes[batch]))
        if len(held_out_rows[batch]):
            centered_nll.append(_compute_centered_nll(model, data, held_out_rows[batch], seed))
        num_done = start + batch_size
    reference_distances = np.concatenate(distances)
    measured_indexes = reference_indexes[: len(reference_distances)]
    return _References(measured_indexes, reference_distances, np.concatenate(centered_nll), num_done)


def _estimate_prior_weight(
    estimator: PriorWeightEstimator, exemplars: Exemplars, references: _References, further: Ints
) -> float:
    """Return the weight of the prior's density in the ranking.

    Args:
        estimator: The estimator, which has no records yet.
        exemplars: All exemplars.
        references: Exemplars whose distances are known.
        further: Indexes of further exemplars to use.
    """
    estimator.add(references.exemplar_indexes, references.distances)
    if len(further):
        estimator.add(further, _compute_distances_to_others(exemplars, further))
    return estimator.estimate_weight()


def choose_marginal_weight(schema: Schema) -> float:
    """Return the weight of the density of single readings in the ranking: 0 to 1.

    It is 0 if at most half of the features have labels, and rises linearly to 1 if all have
    (docs/experiments/35-density-of-single-readings-in-the-ranking.md).
    """
    return max(0.0, 2.0 * float(schema.is_discrete.mean()) - 1.0)


def score_complete_records(
    model: DEformer,
    data: PreparedTable,
    rows: Ints,
    centered_nll: Floats,
    complete_terms: Floats,
    exemplar_rows: Ints,
    should_continue: Callable[[int], bool] = lambda num_done: True,
    priors: CrossFittedPriors | None = None,
) -> Floats:
    """Return the anomaly scores of complete calibration records, computed as those of new records (`Exemplars.score`).

    A calibration record that is an exemplar is compared with all exemplars but itself. If all calibration records are
    exemplars, the p-value of a new record is at least the conformal one. For the conformal p-value, the new record
    would have to be an exemplar as well, and the calibration records could then only be nearer to their nearest
    exemplars. With `--folds`, calibration records may be records to which the Gaussian prior was fitted. Their density
    is then that of the variant without their fold.

    Args:
        model: The trained model with its exemplars. Without them, the scores are the centered NLLs.
        data: The prepared table.
        rows: (N,) row numbers of the records.
        centered_nll: (N,) the sum of the centered NLLs of the readings of each record.
        complete_terms: (N,) what p-values add to the ranking of each record (`CalibrationScores.complete_terms`).
        exemplar_rows: (M,) row numbers of the last M exemplars of the model, which are records of the table.
        should_continue: Called before each batch with the number of records that are scored. If it returns False, no
            more records are scored.
        priors: The Gaussian prior of the model with its variants; needed if its density is a term of the ranking.

    Returns:
        The scores of the N records, or of the first ones if `should_continue` returned False.
    """
    exemplars = Exemplars.from_parameters(model.extract_parameters())
    if exemplars is None:
        return centered_nll
    num_old = len(exemplars.positions) - len(exemplar_rows)
    index_by_row = {row: num_old + index for index, row in enumerate(exemplar_rows.tolist())}
    codes = np.arange(len(data.schema))
    parts = [np.empty(0)]
    for start in range(0, len(rows), DISTANCE_BATCH):
        if not should_continue(start):
            break
        batch = rows[start : start + DISTANCE_BATCH]
        values = np.asarray(data.values[batch], np.float64)
        excluded_exemplar = np.array([index_by_row.get(row, -1) for row in batch.tolist()])
        prior_nll = None
        if exemplars.prior is not None and priors is not None:
            x = values[:, data.schema.is_linear]
            without_fold = priors.compute_neg_log_density(x, batch)
            is_training = data.split[batch] == Split.TRAIN
            prior_nll = np.where(is_training, without_fold, exemplars.prior.compute_neg_log_density(x))
        scores = exemplars.score(
            np.where(np.isnan(values), -1, codes),
            np.nan_to_num(values),
            centered_nll[start : start + DISTANCE_BATCH],
            excluded_exemplar,
            prior_nll,
        )
        parts.append(scores + complete_terms[start : start + DISTANCE_BATCH])
    return np.concatenate(parts)


def choose_exemplar_rows(data: PreparedTable, max_exemplars: int, seed: int, calibration_exemplars: bool) -> Ints:
    """Return the row numbers of the records of a table that `add_ranking` stores as exemplars, in their order.

    Args:
        data: The prepared table.
        max_exemplars: As in `add_ranking`.
        seed: As in `add_ranking`.
        calibration_exemplars: As in `add_ranking`.
    """
    rng = np.random.default_rng([seed, RANKING_SEED])  # the choice of exemplars draws its first numbers
    return _choose_exemplar_rows(data, max_exemplars, rng, calibration_exemplars)


def measure_distance_seconds(
    model: DEformer,
    data: PreparedTable,
    max_exemplars: int,
    seed: int,
    clock: Callable[[], float],
    priors: CrossFittedPriors | None = None,
) -> float:
    """Return the measured seconds to compute the distance of one record to the exemplars; 0 if there are none.

    Exemplars are training records that the model stores to rank complete records. With a Gaussian prior, the time to
    estimate the weight of its density is included.

    Args:
        model: The model before training. It is not changed.
        data: The prepared table.
        max_exemplars: Largest number of exemplars.
        seed: Seed of the random choice of exemplars.
        clock: A function that returns the current time in seconds.
        priors: The Gaussian prior of the model with its variants, None if the weight is not estimated.
    """
    rng = np.random.default_rng([seed, RANKING_SEED])
    exemplar_rows = _choose_exemplar_rows(data, max_exemplars, rng, calibration_exemplars=True)
    exemplars = _create_exemplars(model, data, exemplar_rows, max_exemplars, rng)
    if exemplars is None:
        return 0.0
    num_old = len(exemplars.positions) - len(exemplar_rows)
    prior = None if priors is None else extract_mixture(priors.full)
    estimator = None if priors is None else PriorWeightEstimator(exemplars, data, exemplar_rows, priors, seed)

    def compute_distances(num_records: int) -> None:
        """Compute the distance of each of `num_records` exemplars to its nearest other exemplars, and the densities."""
        indexes = np.arange(num_old, num_old + num_records)
        distances = _compute_distances_to_others(exemplars, indexes)
        if estimator is not None and prior is not None:
            estimator.add(indexes, distances)
            values = np.asarray(data.values[exemplar_rows[:num_records]], np.float64)
            prior.compute_neg_log_density(values[:, data.schema.is_linear])

    return measure_seconds_per_record(compute_distances, clock, len(exemplar_rows), min_ratio=MIN_CLEAR_RATIO)


def _choose_exemplar_rows(
    data: PreparedTable, max_exemplars: int, rng: np.random.Generator, calibration_exemplars: bool
) -> Ints:
    """Return the row numbers of the table's records that become exemplars (stored records to compare with), ascending.

    Args:
        data: The prepared table.
        max_exemplars: Largest number of exemplars.
        rng: The source of the random choice.
        calibration_exemplars: Whether calibration records may become exemplars.
    """
    rows = np.flatnonzero(data.is_used)
    if not calibration_exemplars or (data.split == Split.LEFT_OUT).any():
        # Suspected anomalies were left out of training, but not of the calibration records.
        rows = np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION))
    if len(rows) <= max_exemplars:
        return rows
    return np.sort(rng.choice(rows, max_exemplars, replace=False))


def _create_exemplars(
    model: DEformer, data: PreparedTable, rows: Ints, max_exemplars: int, rng: np.random.Generator
) -> Exemplars | None:
    """Return exemplars, which score complete records by their distances to them.

    The typical values of normal records are not set yet.

    Args:
        model: The model. If it has a ranking (of the model that is adapted), its exemplars are kept.
        data: The prepared table.
        rows: Row numbers of the records that become exemplars.
        max_exemplars: Largest number of exemplars, with those of the model that is adapted.
        rng: The source of the random choice among the latter.

    Returns:
        The exemplars; None if `max_exemplars` is 0 or the table has fewer than two usable records.
    """
    if not max_exemplars or len(rows) < 2:
        return None
    values = np.asarray(data.values[rows], np.float64)
    known = ~np.isnan(values)
    positions = compute_positions(data.schema, np.nan_to_num(values))
    if model.ranking is not None:
        positions, known = _prepend_old_exemplars(model.ranking.to_exemplars(), positions, known, max_exemplars, rng)
    deviations = compute_deviations(data.schema, positions, known)
    return Exemplars(data.schema, positions / deviations, known, deviations, typical=np.tile([0.0, 1.0], (2, 1)))


def _prepend_old_exemplars(
    old: Exemplars,
    positions: NDArray[np.float32],
    known: NDArray[np.bool_],
    max_exemplars: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Put exemplars of an old model before the M exemplars of a new table.

    The old model is adapted to the table (`--init-from`).

    Args:
        old: The exemplars of the old model, whose features are the first ones of the new model.
        positions: (M, F) positions of the table's exemplars in each of the new model's F features, before division by
            the deviations (the unit of distance of each feature).
        known: (M, F) bool, whether an exemplar has a reading of the feature.
        max_exemplars: Largest number of exemplars in all. If it is too small, some old ones are dropped at random.
        rng: The source of the random choice.

    Returns:
        `positions` and `known` of all exemplars, old ones first. Old exemplars have no readings of new features.
    """
    num_old = max(0, max_exemplars - len(positions))
    kept_indexes = np.sort(rng.permutation(len(old.positions))[:num_old])
    num_new_features = positions.shape[1] - old.positions.shape[1]
    padding = (0, 0), (0, num_new_features)  # zeros (False) in the columns of new features
    # Stored positions are divided by the old deviations; the caller divides all positions by new deviations.
    old_positions = old.positions * old.deviations
    # Labels without an order are compared for equality, so their codes must be exact.
    old_positions[:, old.is_text_label] = np.rint(old_positions[:, old.is_text_label])
    old_positions = np.pad(old_positions[kept_indexes], padding)
    old_known = np.pad(old.known[kept_indexes], padding)
    return np.concatenate([old_positions, positions]), np.concatenate([old_known, known])


def compute_deviations(schema: Schema, positions: NDArray[np.float32], known: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the unit of distance of each feature, so that all features have similar weight in a distance.

    For numbers it is the standard deviation of the readings after clipping to `LINEAR_LIMIT` normalised units, or 1 if
    all readings are the same. For labels that are not numbers it is the probability that two random records have
    different labels, but at least `MIN_DIFFERENCE_RATE`.

    Args:
        schema: The F features.
        positions: (M, F) positions of M exemplars in F features. For a label that is not a number, the position is its
            code.
        known: (M, F) whether an exemplar has a reading of the feature.

    Returns:
        (F,) float32 units. The unit of a feature without readings is 1.
    """
    deviations = np.ones(positions.shape[1])
    for feature_index, feature in enumerate(schema.features):
        readings = positions[known[:, feature_index], feature_index].astype(np.float64)
        if len(readings) and has_unordered_labels(feature):
            _, counts = np.unique(readings, return_counts=True)  # of each label
            probability_of_equality = float(((counts / len(readings)) ** 2).sum())
            deviations[feature_index] = max(1.0 - probability_of_equality, MIN_DIFFERENCE_RATE)
        elif len(readings):
            is_number = feature.kind == "continuous"
            # Among extreme values, the differences of all other values would not count.
            clipped = np.clip(readings, -LINEAR_LIMIT, LINEAR_LIMIT) if is_number else readings
            deviations[feature_index] = next((std for std in (clipped.std(), readings.std()) if std > 0), 1.0)
    return deviations.astype(np.float32)


def _compute_distances_to_others(exemplars: Exemplars, exemplar_indexes: Ints) -> Floats:
    """Return the mean distance of each of R exemplars to its nearest other exemplars.

    Exemplars are normal records, so these distances show which distance is typical of a normal record.

    Args:
        exemplars: The exemplars.
        exemplar_indexes: (R,) indexes of exemplars.

    Returns:
        (R,) distances.
    """
    positions, known = exemplars.positions[exemplar_indexes], exemplars.known[exemplar_indexes]
    # `excluded_exemplar` excludes each record itself, whose distance is 0.
    return exemplars.compute_distances(positions, known, excluded_exemplar=exemplar_indexes)


def _compute_marginal_nll(exemplars: Exemplars, values: Floats) -> Floats:
    """Return the sum of −ln p of the readings of N records, each without regard to the others, (N,).

    Args:
        exemplars: The exemplars.
        values: (N, F) normalised values and label codes, NaN for missing readings.
    """
    known, values = ~np.isnan(values), np.nan_to_num(values)
    positions = compute_positions(exemplars.schema, values) / exemplars.deviations
    marginals = estimate_marginals(exemplars.schema, exemplars.positions, exemplars.known, exemplars.deviations)
    return marginals.compute_nll(values.astype(np.int64), positions, known)


def _compute_centered_nll(model: DEformer, data: PreparedTable, rows: Ints, seed: int) -> Floats:
    """Return the centered NLL of N records.

    The readings of each record are in a random order.

    Args:
        model: The trained model.
        data: The prepared table.
        rows: (N,) row numbers of records that were not used for training.
        seed: Seed of the random order of each record's readings.

    Returns:
        (N,) centered NLL in nats, by ascending row number.
    """
    values, _ = read_rows(data, np.sort(rows))
    keys = draw_random_keys(values.shape, create_generator(seed, RANKING_SEED))  # sorting by them gives a random order
    features, columns = order_readings(values, keys)
    ordered_values = gather_values(values, columns).double().numpy()
    with attached_kernels(model) as kernels:  # the streaming engine computes its sums with the same kernels
        return sum_centered_nll(kernels, model, features.numpy(), ordered_values)


def _summarize_typical(values: Floats) -> list[float]:
    """Return [median, spread] of the values. Another value is compared with them by (value − median) / spread.

    The spread is the 90% quantile minus the median. If both are equal, as among records that repeat each other, it is
    the standard deviation, or 1 for equal values. Otherwise this term would outweigh all others. NaN is ignored.
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return [0.0, 1.0]
    median, high_quantile = np.quantile(values, [0.5, 0.9])
    spreads = (float(high_quantile - median), float(values.std()), 1.0)
    return [float(median), next(spread for spread in spreads if spread > MIN_SPREAD)]
