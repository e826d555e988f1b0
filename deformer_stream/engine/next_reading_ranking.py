"""Which reading to take next: the most informative one about a suspicious open record that has not alerted.

The p-value of a reading is uniform if the value comes from the model's conditional distribution given the readings so
far, whatever the feature. Drawing from these conditionals would therefore rank all continuous features as equal. What
differs is what a feature would show if something is wrong. The hypothesis here is that one of the suspicious readings
is wrong, and that the others are right:

1. Each reading j of the record gets the weight w_j = max(−ln p_j − 1, 0), where p_j is the p-value of its value given
   all other readings of the record. The mean of −ln p is 1 for a normal reading. Up to `MAX_SUSPECTS` readings count.
2. For each unseen feature f, K values are drawn from the conditional p(x_f | readings without j), with the readings j
   in proportion to their weights.
3. Each value is added to a copy of the record's running statistics, as if it had arrived, with its p-value given all
   readings. This gives the score and the p-value of the record after it.

Features are ranked by the probability of an alert after their reading, then by the mean rise of the score. A feature
that depends on a suspicious reading is ranked first: if that reading is wrong, the feature contradicts it. A feature
that depends on none of them has the same probability of an alert as in a normal record.

The values are not random: they are the quantiles (k + ½)/K of a conditional, or all labels with their probabilities. So
equal records give equal rankings, and the error of a probability is at most 1/K.

The order of the readings of a record that is chosen by this ranking depends on their values. The guarantee of the
false-alarm rate then needs a calibration with the same choice, which `arrange_by_next_reading` makes of complete
records.

In a stream, open records that are suspicious, and alerts of open records, state the reading to take next
(`suggest_readings`). A record that has alerted stays alerted, so its ranking is by the probability of an alert at the
next smaller alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.engine.events import SuggestedReading
from deformer_stream.engine.imputation import iterate_conditionals
from deformer_stream.engine.next_reading import DEFAULT_NUM_DRAWS, DEFAULT_SUSPICIOUS, NextReading
from deformer_stream.engine.records import PREFIX_FIELDS, RecordTable
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.engine.slot_ingest import find_settled_features
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.exemplars import MAX_DIFFERENCES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_SUSPECTS = 3
"""Largest number of readings of a record that may be wrong according to the hypothesis, one at a time."""

PROBABILITY_DECIMALS = 4
"""Decimals of the probabilities and rises of scores that alerts state."""

MAX_VALUES_PER_PASS = 65_536
"""Largest number of values whose p-values are computed at a time, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class OpenRecords:
    """R open records: what the ranking of their next readings needs.

    Attributes:
        record_ids: R record ids, for the calibration groups.
        values: (R, F) values of the readings in raw units or label codes, NaN for features without a reading.
        is_candidate: (R, F) which features may be read next. Features with a reading and context features are ignored.
        state: The running statistics of the R records.
    """

    record_ids: Sequence[str]
    values: Floats
    is_candidate: Bools
    state: PrefixState


def collect_open_records(records: RecordTable, record_indices: Ints) -> OpenRecords:
    """Return what the ranking needs of R open records.

    Readings that wait for others with the same event time, or for the end of their time slot, are not scored yet. They
    are left out, and so are their features. Features whose time slot is over are left out, too, if the readings of a
    slot are combined.

    Args:
        records: The table of open records, whose readings are not irregular.
        record_indices: (R,) rows of the records.
    """
    num_records, num_features = len(record_indices), len(records.schema)
    values = np.full((num_records, num_features), np.nan)
    for row, record_index in enumerate(record_indices.tolist()):
        codes, raw_values = records.readings_of(record_index)
        num_scored = len(codes) - int(records.num_pending[record_index])
        values[row, codes[:num_scored]] = raw_values[:num_scored]
    # The bits of the features that have a reading or were declared missing.
    mask = records.observed_mask[record_indices]
    is_decided = np.unpackbits(mask, axis=1, count=num_features, bitorder="little").astype(np.bool_)
    is_decided |= find_settled_features(records, record_indices)
    running = records.running[record_indices]
    state = PrefixState(*(running[name].copy() for name in PREFIX_FIELDS))
    return OpenRecords([records.record_ids[index] for index in record_indices.tolist()], values, ~is_decided, state)


def collect_alerted_records(
    model: DEformer,
    records: RecordTable,
    record_indices: Ints,
    num_readings: Ints,
    scores: Floats,
    declared_later: Bools,
) -> OpenRecords:
    """Return what the ranking needs of A records as they were when they alerted; their later readings are ignored.

    Args:
        model: The network, in evaluation mode.
        records: The table of open records, whose readings are not irregular.
        record_indices: (A,) rows of the records.
        num_readings: (A,) number of readings of each record at the alert.
        scores: (A,) anomaly score of each record at the alert.
        declared_later: (A, F) which features were declared as "will not be observed" after the alert.
    """
    codes, raw_values = records.log.gather_padded(record_indices, num_readings)
    is_reading = codes >= 0
    known = np.maximum(codes, 0)
    values = np.full((len(codes), len(records.schema)), np.nan)
    rows = np.nonzero(is_reading)[0]
    values[rows, codes[is_reading]] = raw_values[is_reading]
    # Readings after the alert count as missing, and features without a reading whose bit is set were declared so.
    mask = records.observed_mask[record_indices]
    is_decided = np.unpackbits(mask, axis=1, count=len(records.schema), bitorder="little").astype(np.bool_)
    is_missing = is_decided & ~declared_later
    for row, record_index in enumerate(record_indices.tolist()):
        is_missing[row, records.readings_of(record_index)[0]] = False
    with torch.inference_mode():
        inputs = to_tensor(np.where(is_reading, np.nan_to_num(model.schema.normalise(known, raw_values)), 0.0), model)
        conditional = model.conditionals(torch.from_numpy(codes).to(model.device), inputs)
        log_p, log_p_prior = _compute_log_p_values(conditional, inputs)
    is_scored = is_reading & ~model.schema.is_context[known] & np.isfinite(log_p)
    # The terms of distances change only the score, which is replaced.
    _, state = advance_prefix_state(
        PrefixState.initial(len(codes)),
        np.where(is_scored, log_p, 0.0),
        is_scored,
        prior=_pair_with_lines(AlertPrior.from_model(model), log_p_prior, is_scored),
    )
    state = replace(state, max_statistic=scores)  # that of the stream, where tie groups are scored together
    return OpenRecords([records.record_ids[index] for index in record_indices.tolist()], values, ~is_missing, state)


def suggest_readings(
    model: DEformer, calibration: Calibration, records: OpenRecords, next_alphas: Floats
) -> list[SuggestedReading | None]:
    """Return the reading to take next of each of R records, None if it has no candidate.

    Args:
        model: The network, in evaluation mode.
        calibration: The scores of normal records, from which p-values are computed.
        records: The R records.
        next_alphas: (R,) the largest false-alarm rate at which each record has not alerted; NaN if there is none.
    """
    ranked = rank_features(model, calibration, records, next_alphas)
    suggestions: list[SuggestedReading | None] = []
    for row, alpha in enumerate(next_alphas.tolist()):
        order = ranked.order(row)
        if not order:
            suggestions.append(None)
            continue
        code = order[0]
        has_next = not math.isnan(alpha)
        suggestions.append(
            SuggestedReading(
                model.schema.names[code],
                alpha if has_next else None,
                round(float(ranked.alert_probability[row, code]), PROBABILITY_DECIMALS) if has_next else None,
                round(float(ranked.score_rise[row, code]), PROBABILITY_DECIMALS),
            )
        )
    return suggestions


@dataclass(frozen=True, slots=True)
class RankedFeatures:
    """The expected effect of a reading of each of F features on R records; NaN for features that are no candidates.

    Attributes:
        alert_probability: (R, F) as in `NextReading`.
        false_alarm_probability: (R, F) as in `NextReading`.
        score_rise: (R, F) as in `NextReading`.
    """

    alert_probability: Floats
    false_alarm_probability: Floats
    score_rise: Floats

    def order(self, row: int) -> list[int]:
        """Return the codes of the candidates of a record, the most informative feature first; ties by code."""
        codes = np.flatnonzero(~np.isnan(self.alert_probability[row]))
        keys = (codes, -self.score_rise[row, codes], -self.alert_probability[row, codes])
        order: list[int] = codes[np.lexsort(keys)].tolist()
        return order


def list_next_readings(
    model: DEformer, ranked: RankedFeatures, record_ids: Sequence[str]
) -> dict[str, list[NextReading]]:
    """Return the candidates of each record as objects, the most informative feature first, by record id."""
    names = model.schema.names
    return {
        record: [
            NextReading(
                names[code],
                float(ranked.alert_probability[row, code]),
                float(ranked.false_alarm_probability[row, code]),
                float(ranked.score_rise[row, code]),
            )
            for code in ranked.order(row)
        ]
        for row, record in enumerate(record_ids)
    }


@dataclass(frozen=True, slots=True)
class _Collected:
    """The conditionals of M readings, and where they are.

    Attributes:
        rows: (M,) row of each reading.
        codes: (M,) feature code of each reading.
        conditional: The distributions, of shape (M,).
    """

    rows: Ints
    codes: Ints
    conditional: Conditional


def rank_features(
    model: DEformer,
    calibration: Calibration,
    records: OpenRecords,
    alpha: float | Floats,
    num_draws: int = DEFAULT_NUM_DRAWS,
) -> RankedFeatures:
    """Compute the expected effect of a reading of each feature that open records do not have yet.

    Args:
        model: The network, in evaluation mode.
        calibration: The scores of normal records, from which p-values are computed.
        records: The R open records.
        alpha: The false-alarm rate of the alert, one for all records or (R,); NaN for a record that cannot alert.
        num_draws: Number of values that stand for the conditional distribution of a continuous feature.

    Raises:
        ConfigError: The readings of the model are irregular.
        ValueError: `num_draws` is below 1.
    """
    check_single_readings(model.schema, "choose the next reading of")
    if num_draws < 1:
        raise ValueError(f"the number of draws is {num_draws}, but it must be at least 1")
    shape = records.values.shape
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), shape[:1])
    is_candidate = records.is_candidate & np.isnan(records.values) & ~model.schema.is_context
    effects = RankedFeatures(*(np.where(is_candidate, 0.0, np.nan) for _ in range(3)))
    given_all = _collect_conditionals(model, records.values, is_candidate)
    if given_all is None:
        return effects
    position = np.full(shape, -1)
    position[given_all.rows, given_all.codes] = np.arange(len(given_all.rows))
    everyone = np.arange(shape[0])
    for is_normal, rows, weights, without in (
        (True, everyone, np.ones(shape[0]), records.values),
        (False, *_leave_out_suspects(model, records.values)),
    ):
        drawn_from = given_all if is_normal else _collect_conditionals(model, without, is_candidate[rows])
        assert drawn_from is not None  # noqa: S101 - the candidates are the same
        outcomes, probabilities = _list_outcomes(model, drawn_from, num_draws)
        record = rows[drawn_from.rows]
        conditional = given_all.conditional[torch.as_tensor(position[record, drawn_from.codes])]
        statistics = _advance_copies(model, records, record, drawn_from.codes, conditional, outcomes)
        record_ids = [records.record_ids[i] for i in record.tolist()]
        p_values = calibration.compute_p_values(statistics, partial(list, record_ids))
        weight = weights[drawn_from.rows]
        index = (record, drawn_from.codes)
        alert_probability = weight * (probabilities * (p_values <= alphas[record][:, None])).sum(1)
        if is_normal:
            np.add.at(effects.false_alarm_probability, index, alert_probability)
            continue
        rise = statistics - records.state.max_statistic[record][:, None]
        np.add.at(effects.alert_probability, index, alert_probability)
        np.add.at(effects.score_rise, index, weight * (probabilities * rise).sum(1))
    # Sums of float32 probabilities can exceed 1 by rounding.
    for probability in (effects.alert_probability, effects.false_alarm_probability):
        np.clip(probability, 0.0, 1.0, out=probability)
    return effects


def _collect_conditionals(model: DEformer, values: Floats, is_requested: Bools) -> _Collected | None:
    """Return the conditionals of requested features given the present readings of their records; None if none is.

    Args:
        model: The network.
        values: (N, F) values of N records in raw units or label codes, NaN if missing.
        is_requested: (N, F) which features to compute.
    """
    parts = list(iterate_conditionals(model, values, is_requested))
    if not parts:
        return None
    return _Collected(
        np.concatenate([rows for rows, _, _ in parts]),
        np.concatenate([codes for _, codes, _ in parts]),
        Conditional.concatenate([conditional for _, _, conditional in parts]),
    )


def _compute_log_p_values(conditional: Conditional, values: torch.Tensor) -> tuple[Floats, Floats | None]:
    """Return ln of the p-values of readings, and of those under the Gaussian prior alone if these are a term."""
    terms = conditional.compute_score_terms(values, conditional.compute_surprisal(values))
    log_p = terms.log_p_value.double().cpu().numpy()
    return log_p, None if terms.log_p_prior is None else terms.log_p_prior.double().cpu().numpy()


def _pair_with_lines(lines: AlertPrior | None, log_p_prior: Floats | None, is_scored: Bools) -> PriorPValues | None:
    """Return p-values under the prior alone with the lines of the model; None if they are no term.

    Args:
        lines: The lines of the model, None if it has none.
        log_p_prior: Their logarithms, of any shape; None if they are no term.
        is_scored: Of the same shape, false for readings whose p-values do not count.
    """
    return PriorPValues.pair(lines, None if log_p_prior is None else np.where(is_scored, log_p_prior, 0.0))


def compute_own_log_p_values(model: DEformer, values: Floats) -> Floats:
    """Return ln of the p-value of each reading given all other readings of its record, (R, F).

    Args:
        model: The network, in evaluation mode.
        values: (R, F) values of R records in raw units or label codes, NaN if missing.

    Returns:
        The logarithms; 0, that of a normal value, for missing readings and those of context features.
    """
    rows, codes = np.nonzero(~np.isnan(values) & ~model.schema.is_context)
    without = values[rows].copy()
    without[np.arange(len(rows)), codes] = np.nan
    is_requested = np.zeros(without.shape, bool)
    is_requested[np.arange(len(rows)), codes] = True
    log_p = np.zeros(values.shape)
    for indexes, requested_codes, conditional in iterate_conditionals(model, without, is_requested):
        observed = values[rows[indexes], requested_codes]
        log_p[rows[indexes], requested_codes], _ = _score_raw_values(model, conditional, requested_codes, observed)
    return log_p


def _score_raw_values(
    model: DEformer, conditional: Conditional, codes: Ints, raw_values: Floats
) -> tuple[Floats, Floats | None]:
    """Return `_compute_log_p_values` of M raw values of the given features, one for each distribution, (M,) each."""
    with torch.inference_mode():
        return _compute_log_p_values(conditional, to_tensor(model.schema.normalise(codes, raw_values), model))


def _leave_out_suspects(model: DEformer, values: Floats) -> tuple[Ints, Floats, Floats]:
    """Return copies of R records, each without one suspicious reading.

    A record without any suspicious reading is copied once, as it is.

    Args:
        model: The network.
        values: (R, F) values of the records in raw units or label codes, NaN if missing.

    Returns:
        First (S,) the row of the record of each copy. Second (S,) the weight of each copy; those of a record sum to 1.
        Third (S, F) the values of the copies.
    """
    excess = np.maximum(-compute_own_log_p_values(model, values) - 1.0, 0.0)
    # Ties are broken by the code, so that the choice does not depend on the other records.
    order = np.argsort(-excess, 1, kind="stable")[:, :MAX_SUSPECTS]
    largest = np.take_along_axis(excess, order, 1)
    rows, ranks = np.nonzero(largest > 0)
    weights = largest[rows, ranks] / largest.sum(1)[rows]
    copies = values[rows].copy()
    copies[np.arange(len(rows)), order[rows, ranks]] = np.nan
    inconspicuous = np.flatnonzero(largest.sum(1) <= 0)
    return (
        np.concatenate([rows, inconspicuous]),
        np.concatenate([weights, np.ones(len(inconspicuous))]),
        np.concatenate([copies, values[inconspicuous]]),
    )


def _list_outcomes(model: DEformer, collected: _Collected, num_draws: int) -> tuple[Floats, Floats]:
    """Return values that stand for each of M distributions, and their probabilities.

    Args:
        model: The network.
        collected: The distributions.
        num_draws: Number K of quantiles of a continuous feature.

    Returns:
        (M, P) normalised values or label codes, and (M, P) their probabilities. P is the larger one of K and the number
        of labels plus 1. A continuous feature has the quantiles (k + ½)/K with equal probabilities, a discrete one all
        labels and "any other label". The other entries have the probability 0.
    """
    conditional, is_discrete = collected.conditional, model.schema.is_discrete[collected.codes]
    num_values = max(num_draws, conditional.log_mass.shape[-1]) if is_discrete.any() else num_draws
    outcomes, probabilities = np.zeros((2, len(collected.rows), num_values))
    with torch.inference_mode():
        quantiles = conditional.quantiles([(k + 0.5) / num_draws for k in range(num_draws)]).double().cpu().numpy()
        outcomes[:, :num_draws] = quantiles.T
        probabilities[:, :num_draws] = 1.0 / num_draws
        if is_discrete.any():
            mass = conditional.log_mass.exp().double().cpu().numpy()[is_discrete]  # 0 beyond the labels of a feature
            outcomes[is_discrete] = np.arange(num_values)
            probabilities[is_discrete] = 0.0
            probabilities[np.flatnonzero(is_discrete)[:, None], np.arange(mass.shape[1])] = mass
            # A code beyond the labels of a feature has no distribution; its probability is 0 anyway.
            outcomes[is_discrete] *= probabilities[is_discrete] > 0
    return outcomes, probabilities


def _advance_copies(
    model: DEformer, records: OpenRecords, record: Ints, codes: Ints, conditional: Conditional, outcomes: Floats
) -> Floats:
    """Return the running anomaly score of copies of records, to each of which one further reading is added, (M, P).

    Args:
        model: The network.
        records: The R records.
        record: (M,) row of the record whose copies get the values.
        codes: (M,) features of the values.
        conditional: The distributions of the readings given all readings of their records, of shape (M,).
        outcomes: (M, P) the P values that are added, each to another copy: normalised, or label codes.
    """
    num_values = outcomes.shape[1]
    statistics = np.empty(outcomes.shape)
    distance, lines = AlertDistance.from_model(model), AlertPrior.from_model(model)
    prefixes = None if distance is None else distance.sum_differences(_normalise(model, records.values))
    values_at_once = MAX_VALUES_PER_PASS
    if distance is not None:
        values_at_once = min(values_at_once, max(1, MAX_DIFFERENCES // distance.num_stored))
    step = max(1, values_at_once // num_values)
    for start in range(0, len(outcomes), step):
        part = slice(start, start + step)
        repeated = np.arange(start, min(start + step, len(outcomes))).repeat(num_values)
        with torch.inference_mode():
            values = to_tensor(outcomes[part].reshape(-1), model)
            log_p, log_p_prior = _compute_log_p_values(conditional[torch.as_tensor(repeated)], values)
        copies = records.state.select(record[repeated])
        is_finite = np.isfinite(log_p)  # other readings are not scored, as in the stream
        terms = None
        if distance is not None and prefixes is not None:
            sums, counts = prefixes
            added = codes[repeated], outcomes[part].reshape(-1)
            terms = distance.compute_terms_of_further_readings(sums, counts, record[repeated], *added)[:, None]
        if log_p_prior is not None:
            log_p_prior = log_p_prior[:, None]
        prior = _pair_with_lines(lines, log_p_prior, is_finite[:, None])
        log_p = np.where(is_finite, log_p, 0.0)
        running, _ = advance_prefix_state(copies, log_p[:, None], is_finite[:, None], None, terms, prior)
        statistics[part] = running.reshape(-1, num_values)
    return statistics


def arrange_by_next_reading(
    model: DEformer,
    calibration: Calibration,
    record_ids: Sequence[str],
    values: Floats,
    orders: Ints,
    alpha: float,
    suspicious: float = DEFAULT_SUSPICIOUS,
) -> Ints:
    """Return the orders in which the readings of complete records arrive if suspicious records choose the next one.

    The readings of a record arrive in the given order. If the p-value of the record is at most `suspicious` and above
    `alpha`, the next reading is the most informative one of the record's readings that have not arrived yet. The scores
    of normal records in these orders make a calibration for streams. The readings of these streams must be chosen in
    the same way, with the same `calibration`, `alpha` and `suspicious`.

    Args:
        model: The network, in evaluation mode.
        calibration: The calibration whose p-values decide which records are suspicious.
        record_ids: N record ids, for the calibration groups.
        values: (N, F) values of N records in raw units or label codes, NaN if missing.
        orders: (N, L) feature codes of the readings of each record in the order of arrival without a choice, −1 as
            padding at the end.
        alpha: The false-alarm rate of the alert.
        suspicious: Largest p-value of a suspicious record.

    Returns:
        (N, L) feature codes in the order of arrival with the choice, −1 as padding at the end.

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "choose the next reading of")
    arranged = orders.copy()
    seen = np.full(values.shape, np.nan)
    state = PrefixState.initial(len(values))
    distance, lines = AlertDistance.from_model(model), AlertPrior.from_model(model)
    p_values = np.ones(len(values))
    for step in range(orders.shape[1]):
        rows = np.flatnonzero(arranged[:, step] >= 0)
        suspicious_rows = rows[(p_values[rows] <= suspicious) & (p_values[rows] > alpha)]
        records = OpenRecords(
            [record_ids[row] for row in suspicious_rows.tolist()],
            seen[suspicious_rows],
            ~np.isnan(values[suspicious_rows]),
            state.select(suspicious_rows),
        )
        ranked = rank_features(model, calibration, records, alpha)
        for index, row in enumerate(suspicious_rows.tolist()):
            order = ranked.order(index)
            if order:  # else only context features are left
                remaining = arranged[row, step:].tolist()
                remaining.remove(order[0])
                arranged[row, step:] = [order[0], *remaining]
        codes = arranged[rows, step]
        log_p, log_p_prior = np.zeros((2, len(values)))
        is_scored = np.zeros(len(values), bool)
        is_requested = np.zeros(values.shape, bool)
        is_requested[rows, codes] = True  # context features have no distribution and are skipped
        for scored_rows, scored_codes, conditional in iterate_conditionals(model, seen, is_requested):
            observed = values[scored_rows, scored_codes]
            log_p[scored_rows], of_prior = _score_raw_values(model, conditional, scored_codes, observed)
            if of_prior is not None:
                log_p_prior[scored_rows] = of_prior
            is_scored[scored_rows] = np.isfinite(log_p[scored_rows])
        log_p[~is_scored] = 0.0
        seen[rows, codes] = values[rows, codes]
        terms = None
        if distance is not None:
            terms = distance.compute_terms_of_sums(*distance.sum_differences(_normalise(model, seen)))[:, None]
        prior = _pair_with_lines(lines, log_p_prior[:, None], is_scored[:, None])
        running, state = advance_prefix_state(state, log_p[:, None], is_scored[:, None], None, terms, prior)
        p_values = calibration.compute_p_values(running, lambda: record_ids)[:, 0]
    return arranged


def _normalise(model: DEformer, values: Floats) -> Floats:
    """Return values of records, (N, F), in normalised units or label codes; NaN stays NaN."""
    codes = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    is_known = ~np.isnan(values)
    return np.where(is_known, model.schema.normalise(codes, np.where(is_known, values, 0.0)), np.nan)
