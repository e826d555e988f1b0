"""The deformer's cumulative sums (`deformer_stream.calibration.cusum`) on the p-values of other densities.

So that a comparison shows what the density contributes and what the sums do, each density is also measured with them.
They get all evidence but the sums "offset", which need predictions from other sensors, and only the deformer's process
gives these.
"""

from __future__ import annotations

import numpy as np

from benchmarks.irregular_alerts import RECORDS_PER_BATCH, Contender, Floats, PrefixScores
from benchmarks.irregular_records import Readings, fit_units
from deformer_stream.calibration.cusum import (
    KINDS,
    CusumReadings,
    CusumScale,
    advance_sums,
    compute_log_resolutions,
    compute_statistics,
    create_states,
    fit_scale,
)
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.ragged import ragged_indices

MAX_SCALE_RECORDS = 1000
"""Largest number of training records to which the scale of the sums is fitted, as in `trainer.cusum_scale`."""


class CusumContender:
    """A fitted density with cumulative sums in place of the combination of all p-values.

    Args:
        density: The density, which is fitted already.
        train: Its training records, to which the scale is fitted.
    """

    def __init__(self, density: Contender, train: Readings) -> None:
        self.density, self.name = density, f"{density.name}, cumulative sums"
        self.units = fit_units(train)
        self.log_resolutions = compute_log_resolutions(self.units)
        records = np.random.default_rng(0).permutation(len(train.records))[:MAX_SCALE_RECORDS]
        sample = train.select(records)
        num_sensors = len(sample.sensors)
        values = self.units.normalise(sample.codes, sample.values)
        self.marginals = Marginals.fit(self.units, sample.codes, values)
        previous = sample.find_previous_of_sensor()
        is_first = sample.record_index % 2 == 0
        previous_values = np.where(previous >= 0, values[previous], np.inf)
        self.steps, first, second = Steps.fit_halves(self.units, sample.codes, values, previous_values, is_first)
        # The sums of a record are computed with the steps of the half that does not contain it.
        log_p_step = np.where(
            is_first,
            second.compute_log_p(sample.codes, values, previous_values),
            first.compute_log_p(sample.codes, values, previous_values),
        )
        sensor_sums, record_sums = self._compute_sums(sample, density.score(sample), log_p_step)
        largest = np.zeros((len(KINDS), len(sample.records), num_sensors))
        has_readings = np.zeros((len(sample.records), num_sensors), bool)
        has_readings[sample.record_index, sample.codes] = True
        for kind in range(len(KINDS)):
            np.maximum.at(largest[kind], (sample.record_index, sample.codes), sensor_sums[kind])
        largest_record_sums = np.zeros(len(sample.records))
        np.maximum.at(largest_record_sums, sample.record_index, record_sums)
        self.scale: CusumScale = fit_scale(largest, largest_record_sums, has_readings, self.marginals, self.steps)

    def fit(self, train: Readings) -> None:
        """Do nothing: the density is fitted already."""

    def score(self, readings: Readings) -> PrefixScores:
        """Score the prefixes of records in order of time."""
        scores = self.density.score(readings)
        values = self.units.normalise(readings.codes, readings.values)
        previous = readings.find_previous_of_sensor()
        previous_values = np.where(previous >= 0, values[previous], np.inf)
        log_p_step = self.steps.compute_log_p(readings.codes, values, previous_values)
        sensor_sums, record_sums = self._compute_sums(readings, scores, log_p_step)
        codes = readings.codes[None]
        statistics = compute_statistics(self.scale, codes, sensor_sums[:, None], record_sums[None])[0]
        return PrefixScores(statistics, scores.log_likelihoods, scores.log_p_values)

    def _compute_sums(self, readings: Readings, scores: PrefixScores, log_p_step: Floats) -> tuple[Floats, Floats]:
        """Return the evidence after each of M readings: (6, M) that of its sensor, and (M,) the sum of its record."""
        if scores.log_p_values is None or scores.log_likelihoods is None:
            raise ValueError(f"{self.density.name} has no density, but cumulative sums need p-values")
        log_masses = np.nan_to_num(scores.log_likelihoods) + self.log_resolutions[readings.codes]
        log_p_level = self.marginals.compute_log_p(
            readings.codes, self.units.normalise(readings.codes, readings.values)
        )
        sensor_sums, record_sums = np.zeros((len(KINDS), len(readings))), np.zeros(len(readings))
        for start in range(0, len(readings.records), RECORDS_PER_BATCH):
            bounds = readings.offsets[start : start + RECORDS_PER_BATCH + 1]
            lengths = np.diff(bounds)
            row, place = ragged_indices(lengths)
            span, shape = slice(int(bounds[0]), int(bounds[-1])), (len(lengths), int(lengths.max()))
            codes, values = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
            (log_p, masses, level, step), is_counted = np.zeros((4, *shape)), np.zeros(shape, bool)
            codes[row, place], values[row, place] = readings.codes[span], readings.values[span]
            log_p[row, place], masses[row, place] = scores.log_p_values[span], log_masses[span]
            level[row, place], step[row, place] = log_p_level[span], log_p_step[span]
            is_counted[row, place] = True
            states = create_states(len(lengths), len(readings.sensors))
            own = advance_sums(states, CusumReadings(codes, values, log_p, None, masses, is_counted, level, step))
            sensor_sums[:, span], record_sums[span] = own[0][:, row, place], own[1][row, place]
        return sensor_sums, record_sums
