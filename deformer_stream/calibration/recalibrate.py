"""Replace the calibration of a model by one from new normal records. The network does not change.

A calibration holds the anomaly scores of normal records, from which p-values are computed. The scores of the new
records come from the same engine that scores a stream, so windows and arrival orders have the same effect on both. This
module has no input or output: `cli.calibrate` runs the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import (
    DEFAULT_ALPHAS,
    MAX_CALIBRATION_RECORDS,
    Calibration,
    TiePolicy,
    extract_group,
    group_indexes_by_key,
    trim_largest,
)
from deformer_stream.counts import format_count
from deformer_stream.errors import InputError
from deformer_stream.model.windows import WINDOW_SEPARATOR

DEVICE_GROUP = "device"
"""The value of the option `--group-by` that makes each device a group, if records are windows with ids DEVICE@START."""

MAX_LISTED_GROUPS = 8
"""Largest number of groups that a text lists by name."""


@dataclass(frozen=True, slots=True)
class CalibrationStatistics:
    """The anomaly scores of N new normal records, from which a new calibration is made.

    Attributes:
        max_statistics: (N,) the anomaly score of each record, larger is more anomalous. It is the largest one over all
            prefixes of the record (its first 1, 2, … readings).
        record_ids: Ids of the N records, in the same order.
        mean_neg_log_p_by_feature: Mean of −ln p over the readings of each feature, in nats, by feature name. p is the
            highest-density p-value of a reading (probability of a value at most as likely as the observed one).
        arrival_order: The distribution of the orders in which the readings of the records arrived: "arrival" for
            logged arrivals, "random", or "schema" for the order of the features in the schema.
        tie_policy: How readings of one record with the same event time were scored: "arrival" for one after the other,
            "hold" for all together.
        record_scores: (N,) the anomaly score of each complete record, in the same order; None if they are unknown.
    """

    max_statistics: NDArray[np.float64]
    record_ids: Sequence[str]
    mean_neg_log_p_by_feature: Mapping[str, float]
    arrival_order: str
    tie_policy: TiePolicy
    record_scores: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Recalibration:
    """A new calibration together with the one that it replaces.

    Attributes:
        old: The calibration that is replaced.
        new: The calibration that replaces it.
        num_records: Number of records from which the new calibration was made.
        num_records_by_shared_group: The groups (such as devices) that have too few records for a calibration of their
            own, with their numbers of records. They share a calibration with each other and with records without a
            group, and keep alpha (the false-alarm rate) together.
        num_shared: Number of records of this shared calibration, or of the only one without groups. If it is below
            `min_records`, new records of these groups are compared with the records of all groups instead, by which
            alpha is not guaranteed.
        min_records: Number of records that a calibration of a group, or the shared one, needs.
        num_ungrouped: Number of records whose id does not contain the name of a group.
    """

    old: Calibration
    new: Calibration
    num_records: int
    num_records_by_shared_group: dict[str, int]
    num_shared: int
    min_records: int
    num_ungrouped: int

    def format_rows(self, alphas: Iterable[float]) -> list[tuple[str, str, str, str]]:
        """Return the rows of a table that compares the old and the new calibration, without a header.

        Args:
            alphas: False-alarm rates to show, in addition to `DEFAULT_ALPHAS`.

        Returns:
            One row of four texts for each alpha, the largest alpha first. The first text is the alpha. The second and
            the third are the alert thresholds (the anomaly scores above which an alert is raised) of the old and the
            new calibration. The fourth says whether alerts at this alpha are possible with the new calibration. A last
            row shows the smallest possible p-value of the old and the new calibration.
        """
        rows = [
            (
                f"{alpha:g}",
                _format_threshold(self.old, alpha),
                _format_threshold(self.new, alpha),
                self.new.describe_reachability(alpha),
            )
            for alpha in sorted({*DEFAULT_ALPHAS, *alphas}, reverse=True)
        ]
        return [*rows, ("smallest p", f"{self.old.min_p_value:.2g}", f"{self.new.min_p_value:.2g}", "")]

    def describe_groups(self) -> list[str]:
        """Return sentences, without full stops, that say which groups of records have a calibration of their own.

        The list is empty if records are not grouped.
        """
        groups, shared = self.new.calibration_by_group, self.num_records_by_shared_group
        if not groups and not shared:
            return []
        num_records_by_group = {name: len(group.scores) for name, group in groups.items()}
        group_list = f": {_format_counts(num_records_by_group)}" if groups else ""
        sentences = [f"{len(groups)} groups have calibrations of their own{group_list}"]
        if shared:
            sentences.append(
                f"{format_count(len(shared), 'group')} with fewer than {self.min_records} records "
                f"{'uses the shared' if len(shared) == 1 else 'share a'} calibration: "
                f"{_format_counts(shared)}"
            )
        if self.num_ungrouped:
            sentences.append(f"{self.num_ungrouped} records name no group and use the shared calibration")
        if not groups:
            return sentences
        if self.num_shared >= self.min_records:
            sentences.append(
                f"the thresholds of the table are those of the shared calibration, of {self.num_shared} records"
            )
        else:
            why = "no group needs it" if not self.num_shared else f"it has only {self.num_shared} records"
            sentences.append(
                f"the thresholds of the table are those of the records of all groups, which take the place of the "
                f"shared calibration because {why}: alpha is not guaranteed for records of groups without a "
                "calibration of their own, such as new devices"
            )
        return sentences


def recalibrate(
    old: Calibration,
    statistics: CalibrationStatistics,
    alphas: Sequence[float],
    group_by: str | None = None,
    trim: float = 0.0,
    seed: int = 0,
) -> Recalibration:
    """Make a calibration from the scores of new normal records, and return it together with the old one.

    Args:
        old: The calibration that is replaced.
        statistics: The scores of the new records.
        alphas: False-alarm rates that the user wants. A group gets a calibration of its own if it has enough records
            for alerts at all of them.
        group_by: The text that separates the name of the group from the rest of a record id. It is `DEVICE_GROUP` if
            records are windows of a device's readings and each device is a group. None for no groups.
        trim: The share of records to leave out, from 0 to 1. Those with the largest scores are left out, because they
            may be anomalies.
        seed: Seed of the random choice if there are more than `MAX_CALIBRATION_RECORDS` records.

    Returns:
        The new calibration and the old one, with the numbers of records that a report shows.

    Raises:
        InputError: There is no record, or no record id contains the name of a group although `group_by` is given.
    """
    scores = statistics.max_statistics
    if not len(scores):
        raise InputError(
            "there is no record to calibrate with, because the input has no reading of a feature of the model: "
            "check that the input uses the feature names of the model"
        )
    generator = np.random.default_rng([seed, 0xCA1B])  # other numbers than other users of the same seed draw
    record_scores = statistics.record_scores

    def choose_statistics(rows: slice | list[int]) -> NDArray[np.float64]:
        """Return the statistics of some records from which a calibration is made."""
        return trim_largest(_choose_records(scores[rows], generator), trim)

    def choose_record_scores(rows: slice | list[int]) -> NDArray[np.float64] | None:
        """Return the scores of some complete records from which a calibration is made, None if they are unknown."""
        if record_scores is None:
            return None
        # Another generator, so that the choice of the statistics does not depend on these scores.
        return trim_largest(_choose_records(record_scores[rows], np.random.default_rng([seed, 0xCA1C])), trim)

    def calibrate(rows: slice | list[int]) -> Calibration:
        """Return a calibration without groups from some records."""
        return Calibration.from_statistics(
            choose_statistics(rows),
            statistics.arrival_order,
            statistics.mean_neg_log_p_by_feature,
            statistics.tie_policy,
            old.cusum_scale,
            choose_record_scores(rows),
        )

    min_records = max(1, *(Calibration.count_required_records(alpha) for alpha in alphas))
    if group_by is None:
        new = calibrate(slice(None))
        return Recalibration(
            old=old,
            new=new,
            num_records=len(scores),
            num_records_by_shared_group={},
            num_shared=len(new.scores),
            min_records=min_records,
            num_ungrouped=0,
        )
    separator = WINDOW_SEPARATOR if group_by == DEVICE_GROUP else group_by
    indexes_by_group = group_indexes_by_key(extract_group(record, separator) for record in statistics.record_ids)
    ungrouped = indexes_by_group.pop("", [])
    if not indexes_by_group:
        raise InputError(
            f"the records cannot be grouped by --group-by {group_by}, because no record id has the form "
            f"GROUP{separator}REST (the first id is {statistics.record_ids[0][:40]!r}): change the ids in the input, "
            "or choose them with --record-column or --window"
        )
    statistics_by_group = {name: choose_statistics(indexes) for name, indexes in indexes_by_group.items()}
    shared = [name for name, of_group in statistics_by_group.items() if len(of_group) < min_records]
    record_scores_by_group = {
        name: scores_of_group
        for name, indexes in indexes_by_group.items()
        if (scores_of_group := choose_record_scores(indexes)) is not None
    }
    # The records of the groups that share a calibration are exchangeable with new records of these groups. Those of the
    # other groups are not, because new ones of them are compared with their own group only.
    rest = calibrate(sorted([*ungrouped, *(index for name in shared for index in indexes_by_group[name])]))
    # Too few records would never raise an alert at all alphas.
    new = rest if len(rest.scores) >= min_records else calibrate(slice(None))
    return Recalibration(
        old=old,
        new=new.with_groups(statistics_by_group, separator, min_records, record_scores_by_group or None),
        num_records=len(scores),
        num_records_by_shared_group={name: len(indexes_by_group[name]) for name in shared},
        num_shared=len(rest.scores),
        min_records=min_records,
        num_ungrouped=len(ungrouped),
    )


def _choose_records(scores: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the scores of at most `MAX_CALIBRATION_RECORDS` records, a random choice if there are more.

    Args:
        scores: (N,) the anomaly scores of N records.
        generator: Source of random numbers.

    Returns:
        All N scores in the given order, or the chosen ones in random order.
    """
    if len(scores) <= MAX_CALIBRATION_RECORDS:
        return scores
    return generator.choice(scores, MAX_CALIBRATION_RECORDS, replace=False)


def _format_threshold(calibration: Calibration, alpha: float) -> str:
    """Return as text the anomaly score above which an alert is raised at an alpha (false-alarm rate).

    The text is a dash if no alert is possible at this alpha, or if every record raises one.
    """
    threshold = calibration.compute_threshold(alpha)
    return f"{threshold:.3f}" if np.isfinite(threshold) else "—"


def _format_counts(num_records_by_group: Mapping[str, int]) -> str:
    """Return the names of groups with their numbers of records as text, like `pump-1 (120), pump-2 (80), …`.

    Only the first `MAX_LISTED_GROUPS` groups in alphabetical order are listed, then `…`.
    """
    first = sorted(num_records_by_group.items())[:MAX_LISTED_GROUPS]
    text = ", ".join(f"{name[:40]} ({count})" for name, count in first)
    return text + (", …" if len(num_records_by_group) > MAX_LISTED_GROUPS else "")
