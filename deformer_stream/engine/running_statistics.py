"""The running statistics of records: the inputs of their cumulative sums, and their update in NumPy.

`CpuKernels.advance` updates the running statistics of records by compiled code. `advance_running_statistics` computes
the same in NumPy, for models that PyTorch runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state, compute_running_sums
from deformer_stream.calibration.cusum import (
    MAX_EXTREME,
    MAX_REPETITION,
    MAX_SURPRISE,
    NO_KIND,
    OFFSET_KAPPA,
    RECORD_KAPPA,
    SENSOR_KAPPA,
    STEP_KAPPA,
    TIE_TOLERANCE,
    Codes,
    CusumReadings,
    CusumScale,
    advance_sums,
    compute_log_resolutions,
    compute_statistics_by_kind,
    find_largest_kinds,
    find_previous_values,
)
from deformer_stream.calibration.marginals import find_log_p
from deformer_stream.calibration.sensor_steps import find_step_log_p
from deformer_stream.engine.passes import group_by_length
from deformer_stream.engine.records import PREFIX_FIELDS, RecordTable
from deformer_stream.kernels.cpu import CusumArguments
from deformer_stream.model.alert_prior import PriorPValues
from deformer_stream.model.schema import Schema
from deformer_stream.model.score_terms import LOG_P_PRIOR, LOG_P_VALUE, LOG_PROB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CusumInputs:
    """What the cumulative sums of a model need for any readings, computed once for all of them.

    Attributes:
        schema: The features of the model.
        scale: The lines that turn sums into statistics.
        log_resolutions: (F,) ln of the width of each sensor's values (`compute_log_resolutions`).
        level_log_p: ln of the p-values of the cells of the sensors' values, None without such cells.
        step_log_p: ln of the p-values of the cells of the sensors' steps, None without such cells.
    """

    schema: Schema
    scale: CusumScale
    log_resolutions: Floats
    level_log_p: Floats | None
    step_log_p: Floats | None

    @staticmethod
    def for_scale(schema: Schema, scale: CusumScale | None) -> CusumInputs | None:
        """Return the inputs of the cumulative sums of a scale; None without a scale, and thus without sums.

        Args:
            schema: The features of the model.
            scale: The lines that turn sums into statistics.
        """
        if scale is None:
            return None
        return CusumInputs(
            schema,
            scale,
            compute_log_resolutions(schema),
            level_log_p=None if scale.marginals is None else scale.marginals.compute_log_p_by_cell(),
            step_log_p=None if scale.steps is None else scale.steps.compute_log_p_by_cell(),
        )

    def for_readings(
        self, records: RecordTable, index_by_reading: Ints, seq: Ints, log_p_others: Floats | None, kinds: Codes
    ) -> CusumArguments:
        """Return what the cumulative sums need of M readings.

        Args:
            records: The table of open records, which holds the readings and the states of the sums.
            index_by_reading: (M,) row of the record of each reading.
            seq: (M,) position of each reading in its record, from 0.
            log_p_others: (M,) ln of the p-values given the readings of other sensors only; None without a process.
            kinds: (M,) array that receives the kinds of evidence.
        """
        codes, raw_values = records.log.gather(index_by_reading, records.find_places(index_by_reading, seq))
        scale = self.scale
        return CusumArguments(
            cusum_states=records.cusum_states,
            codes=codes.astype(np.int64),
            values=self.schema.normalise(codes, raw_values).astype(np.float32),
            log_p_others=log_p_others,
            log_resolutions=self.log_resolutions,
            slopes=scale.slopes,
            intercepts=scale.intercepts,
            level_edges=None if scale.marginals is None else scale.marginals.edges,
            level_log_p=self.level_log_p,
            step_slopes=None if scale.steps is None else scale.steps.slopes,
            step_edges=None if scale.steps is None else scale.steps.edges,
            step_log_p=self.step_log_p,
            largest_kinds=kinds,
            record_slope=scale.record_slope,
            record_intercept=scale.record_intercept,
            sensor_kappa=SENSOR_KAPPA,
            offset_kappa=OFFSET_KAPPA,
            step_kappa=STEP_KAPPA,
            record_kappa=RECORD_KAPPA,
            max_surprise=MAX_SURPRISE,
            max_repetition=MAX_REPETITION,
            max_extreme=MAX_EXTREME,
            tie_tolerance=TIE_TOLERANCE,
        )


def advance_running_statistics(
    running: NDArray[np.void],
    *,
    record_index: Ints,
    boundaries: Ints,
    score_terms: Floats,
    is_scored: Bools | None,
    is_decision_point: Bools | None,
    score_rows: Floats,
    cusums: CusumArguments | None,
    distance_terms: Floats | None,
    prior: PriorPValues | None,
) -> None:
    """Add M readings to the running statistics of their R records. The readings are one record after the other.

    The running statistics of a record are sums and extremes over its scored readings. This is the NumPy version of
    `CpuKernels.advance`, for models that PyTorch runs.

    Args:
        running: The running statistics of all records in the table of open records (`RUNNING_DTYPE`). Those of the R
            records are updated, except for the p-value, which the caller computes.
        record_index: (R,) row of each record in the table.
        boundaries: (R + 1,) index of the first reading of each record among the M readings, followed by M.
        score_terms: (3 or 4, M) score terms of the readings (`model.score_terms`). `LOG_P_PRIOR` is not used.
        is_scored: (M,) false for readings that leave the statistics unchanged, such as those of context features; None
            if all are scored.
        is_decision_point: (M,) false for readings after which the anomaly score is not updated, because readings with
            the same event time follow. None if it is updated after each reading.
        score_rows: (4, M) array whose first three rows receive, for each reading, ln p (NaN if it is not scored), the
            sum of ln p over the record so far, and the running anomaly score of the record.
        cusums: What the cumulative sums need, whose statistics take the place of combined p-values; None without sums.
        distance_terms: (M,) terms of the statistic that come from distances to stored training records; None without.
        prior: The p-values of the M readings under the Gaussian prior alone; None if they are no term.
    """
    first, num_new = boundaries[:-1], boundaries[1:] - boundaries[:-1]
    score_rows[0] = score_terms[LOG_PROB] if is_scored is None else np.where(is_scored, score_terms[LOG_PROB], np.nan)
    # Records with similar numbers of readings are processed together, padded to the longest of them.
    for rows in group_by_length(num_new, np.zeros_like(num_new)):
        running_before = running[record_index[rows]]
        column = np.arange(int(num_new[rows].max()))
        is_valid = column < num_new[rows, None]
        reading = np.where(is_valid, first[rows, None] + column, 0)  # index among the M readings, 0 for padding
        is_counted = is_valid if is_scored is None else is_valid & is_scored[reading]
        log_prob, log_p_value, centered_nll = np.where(is_counted, score_terms[:LOG_P_PRIOR, reading], 0.0)
        state = PrefixState(*(running_before[name] for name in PREFIX_FIELDS))
        decision_points = None if is_decision_point is None else is_decision_point[reading]
        # No term is negative, so that of padding, 0, does not change the maximum.
        further_terms = None if distance_terms is None else np.where(is_valid, distance_terms[reading], 0.0)
        prior_of_rows = None
        if prior is not None:
            prior_of_rows = replace(prior, log_p=np.where(is_counted, prior.log_p[reading], 0.0))
        score, state = advance_prefix_state(
            state, log_p_value, is_counted, decision_points, further_terms, prior_of_rows
        )
        if cusums is not None:
            statistics, kinds = _compute_cusum_statistics(cusums, record_index[rows], score_terms, reading, is_counted)
            score_before = running_before["max_statistic"][:, None]
            score = np.maximum.accumulate(np.maximum(statistics, score_before), 1)
            is_raised = is_counted & (statistics > np.concatenate([score_before, score[:, :-1]], 1))
            cusums.largest_kinds[reading[is_valid]] = np.where(is_raised, kinds, NO_KIND)[is_valid]
        # Sums run in arrival order, so that any division of the readings into batches gives the same bits.
        log_likelihood = compute_running_sums(running_before["log_likelihood"], log_prob)
        centered_sum = compute_running_sums(running_before["centered_nll"], centered_nll)
        score_rows[1:3, reading[is_valid]] = np.stack([log_likelihood, score])[:, is_valid]
        # Padding adds nothing, so the last column holds the sums after each record's last reading.
        last_by_field = {
            "num_scored": state.num_scored,
            "neg_log_p_sum": state.neg_log_p_sum,
            "min_log_p": state.min_log_p,
            "max_statistic": score[:, -1],
            "log_likelihood": log_likelihood[:, -1],
            "centered_nll": centered_sum[:, -1],
            "prior_neg_log_p_sum": state.prior_neg_log_p_sum,
            "prior_min_log_p": state.prior_min_log_p,
        }
        for field, last in last_by_field.items():
            running[field][record_index[rows]] = last


def _compute_cusum_statistics(
    cusums: CusumArguments, record_index: Ints, score_terms: Floats, reading: Ints, is_counted: Bools
) -> tuple[Floats, Codes]:
    """Add readings to the cumulative sums of R records.

    Args:
        cusums: The readings, and the states of all records, which are updated.
        record_index: (R,) row of each record in the table.
        score_terms: (3 or 4, M) score terms of all readings (`model.score_terms`). `LOG_P_PRIOR` is not used.
        reading: (R, L) index of each reading of the records among the M readings.
        is_counted: (R, L) false for padding and for readings that are not scored, whose statistic is 0.

    Returns:
        The statistic of each reading, (R, L), and the kind of the sum from which it was computed, (R, L).
    """
    codes, values = cusums.codes[reading], cusums.values[reading]
    log_p_level = None
    if cusums.level_edges is not None and cusums.level_log_p is not None:
        log_p_level = find_log_p(cusums.level_edges, cusums.level_log_p, codes, values)
    states = cusums.cusum_states[record_index]
    log_p_step = None
    if cusums.step_slopes is not None and cusums.step_edges is not None and cusums.step_log_p is not None:
        previous = find_previous_values(states, codes, values, is_counted)
        log_p_step = find_step_log_p(cusums.step_slopes, cusums.step_edges, cusums.step_log_p, codes, values, previous)
    readings = CusumReadings(
        codes=codes,
        values=values,
        log_p=score_terms[LOG_P_VALUE, reading],
        log_p_others=None if cusums.log_p_others is None else cusums.log_p_others[reading],
        log_masses=score_terms[LOG_PROB, reading] + cusums.log_resolutions[codes],
        is_counted=is_counted,
        log_p_level=log_p_level,
        log_p_step=log_p_step,
    )
    sums = advance_sums(states, readings)
    cusums.cusum_states[record_index] = states
    scale = CusumScale(cusums.slopes, cusums.intercepts, cusums.record_slope, cusums.record_intercept)
    by_kind = compute_statistics_by_kind(scale, codes, *sums)
    return np.where(is_counted, by_kind.max(0), 0.0), find_largest_kinds(by_kind)
