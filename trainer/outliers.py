"""Leave suspected anomalies out of training (`--contamination`).

A table for training should contain normal records only. If it may contain anomalies, suspected ones are left out before
a model exists. If the user states their share, these are the records that are most distant from the others. With
`auto`, the share is not known. A record is left out for one of two reasons (`find_suspects`). It belongs to a group of
unusual records that is apart from the others, or it is far from all others.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.counts import format_count
from trainer.data import PreparedTable, Split

Floats = NDArray[np.float64]

NUM_REFERENCES = 500
"""Number of random records to which the distances of each record are computed."""

MIN_REFERENCES = 50
"""Smallest such number, if a time limit is short. The median of 50 distances is less precise than that of 500."""

MIN_SEARCH_REFERENCES = 125
"""Smallest such number for `find_suspects`. With fewer, too few members of a group are among the compared records."""

MEASURED_RECORDS = 2000
"""Number of records on which the time of a search is measured; for `plan_search` the largest number."""

FIRST_MEASURED_RECORDS = 250
"""Number of records with which `plan_search` begins to measure."""

MEASURING_SHARE = 0.02
"""`plan_search` measures four times as many records as before until measuring takes this share of the time limit."""

COST_FACTOR = 1.6
"""Factor by which the time that `plan_search` measures is multiplied.

The measured records fit into the caches of the processor. In larger tables a distance took up to 1.6 times as long.
"""

MAX_DIFFERENCES = 4_000_000
"""Largest number of distances between two records that are in memory at once."""

UNUSUAL_SHARES, MAX_SUSPECTED_SHARE = (0.2, 0.1), 0.08
"""Shares of the records that `find_suspects` examines, one after the other: the most unusual ones by one of its scores.

A group of anomalies is only found as a whole if all of it and some ordinary records are among them. But a mode of
normal operation can then look like such a group. So if more records than `MAX_SUSPECTED_SHARE` would be suspects, the
next share is tried. For the last share there is no limit (docs/experiments/12-anomalies-in-training-data.md).
"""

GROUP_RATIO = 1.25
"""An unusual record is in a group apart if ordinary records are farther from it than its group by this factor."""

ISOLATION_RATIO = 6.0
"""An unusual record is isolated if it is farther from ordinary records than these from each other by this factor."""

NUM_OUTLIER_NEIGHBORS = 5
"""Number of nearest records over which these distances are averaged. The mean is at least `_compute_min_distances`."""

COMPARED_PER_REFERENCE, MIN_UNUSUAL = 4, 2 * NUM_OUTLIER_NEIGHBORS
"""Number of random records among which nearest records are searched, for each reference, and the smallest number of
unusual records.

With fewer of these, groups cannot be distinguished from single records, and nothing is left out.
"""

CENTRAL_SHARE, MAX_TRIMMING_ROUNDS = 0.75, 12
"""Share of the records to which the trimmed Gaussian is fitted, and the largest number of its rounds."""

FITTED_PER_REFERENCE, MAX_FITTED_FEATURES = 12, 200
"""Number of records to which the trimmed Gaussian is fitted, for each reference, and largest number of features with
correlations.
"""

MIN_VARIANCE = 0.01
"""Smallest variance of the trimmed Gaussian, as a share of the variance of all records."""

CORRELATION_SHRINKAGE = 0.02
"""How far the correlations of the trimmed Gaussian are reduced, so that its covariance is invertible."""

MAX_LISTED_FEATURES = 5
"""Largest number of features that a summary names."""


@dataclass(frozen=True, slots=True)
class SearchSize:
    """How much work `find_suspects` does. Under a time limit, `plan_search` reduces it.

    Attributes:
        num_references: Number of records of the sample for the median distance. The other samples are multiples of it.
        share: Share (0 to 1) of the records that are examined, at random. The others remain in the training.
    """

    num_references: int = NUM_REFERENCES
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Suspects:
    """The suspected anomalies that `find_suspects` has found in a table of N records.

    Attributes:
        is_grouped: (N,) whether the record belongs to a group of unusual records that is apart from the others.
        is_isolated: (N,) whether the record is far from all ordinary records, and in no such group.
        num_examined: Number of records among which suspects were searched, 0 if there are too few for a search.
        num_by_feature: For the features that are the most unusual ones of the most suspects, the number of suspects.
    """

    is_grouped: NDArray[np.bool_]
    is_isolated: NDArray[np.bool_]
    num_examined: int
    num_by_feature: dict[str, int]

    def summarize(self) -> dict[str, Any]:
        """Return the numbers of suspects as JSON values for the model's manifest."""
        num_grouped, num_isolated = int(self.is_grouped.sum()), int(self.is_isolated.sum())
        return {
            "records": num_grouped + num_isolated,
            "share": round((num_grouped + num_isolated) / max(self.num_examined, 1), 4),
            "examined": self.num_examined,
            "in_groups": num_grouped,
            "isolated": num_isolated,
            "most_unusual_feature": self.num_by_feature,
        }


def describe_suspects(summary: dict[str, Any]) -> str:
    """Return a sentence without a full stop about the records that were left out, for the log and the report.

    Args:
        summary: The result of `Suspects.summarize`.
    """
    if not summary["examined"]:
        return "no record was left out: there are too few records to distinguish anomalies from rare normal records"
    if not summary["records"]:
        return "no record was left out: no group of unusual records is apart from the others, and none is far from all"
    features = ", ".join(f"{name} ({count})" for name, count in summary["most_unusual_feature"].items())
    return (
        f"left out of training: {format_count(summary['records'], 'record')} ({summary['share']:.1%} of "
        f"{summary['examined']:,} examined), "
        f"{summary['in_groups']} in groups apart from the others and {summary['isolated']} far from all others; "
        f"their most unusual features: {features}"
    )


def drop_outliers(
    data: PreparedTable,
    share: float,
    seed: int,
    num_references: int = NUM_REFERENCES,
    on_progress: Callable[[int], object] = lambda num_done: None,
) -> PreparedTable:
    """Return the table with its most distant records moved from training and validation to `Split.LEFT_OUT`.

    Records of `Split.LEFT_OUT` are used for nothing. A record's distance is the median of its distances to a random
    sample of all records. The median detects groups of similar anomalies. A distance to the nearest neighbours would
    not, because these anomalies are near to each other. Calibration records are not left out, because calibration needs
    a random sample of all records.

    If the table has parts, such as types of machines, the share of each part is left out by its own distances.
    Otherwise a small part, whose records differ from all others, would be left out as a whole.

    Args:
        data: The prepared table.
        share: Share (0 to 1) of all records that may be anomalies. With 0 the table is returned unchanged.
        seed: Seed of the random sample.
        num_references: Number of records of the random sample.
        on_progress: Called with the number of records that are done, about once a second or more often.
    """
    if not share:
        return data
    split = data.split.copy()
    num_done = 0
    for rows in _list_parts(data, np.arange(len(split))):
        num_before, num_done = num_done, num_done + len(rows)
        num_suspected = round(share * len(rows))
        if not num_suspected:
            continue
        distances = compute_median_distances(
            data, seed, num_references, functools.partial(_report_sum, on_progress, num_before), rows
        )
        suspected_rows = rows[np.argsort(distances, kind="stable")[len(rows) - num_suspected :]]  # the most distant
        split[suspected_rows[split[suspected_rows] != Split.CALIBRATION]] = Split.LEFT_OUT
    return replace(data, split=split)


def _report_sum(on_progress: Callable[[int], object], num_before: int, num_done: int) -> None:
    """Report the number of records that are done together with those that were done before."""
    on_progress(num_before + num_done)


def find_suspects(
    data: PreparedTable,
    seed: int,
    size: SearchSize | None = None,
    on_progress: Callable[[int], object] = lambda num_done: None,
) -> Suspects:
    """Find suspected anomalies among the training and validation records, if their share is unknown.

    Two scores choose the most unusual records, a share of `UNUSUAL_SHARES`. One is the median distance to a random
    sample. The other is the distance from a Gaussian that is fitted to the central records only. A part of every table
    is unusual, so this alone is no reason. An unusual record becomes a suspect if it is in a group apart, as repeated
    faults are (`_find_groups`), or isolated (`ISOLATION_RATIO`). Records in a continuous tail are neither.

    If the table has parts, such as types of machines, each is examined by itself. Otherwise a small part, whose records
    differ from all others, would be a group apart.

    Calibration records are not examined, and they do not influence the result. So calibration records and new normal
    records stay exchangeable.

    Args:
        data: The prepared table.
        seed: Seed of the random samples.
        size: How much work is done; by default as much as without a time limit.
        on_progress: Called with the number of records that are done, about once a second or more often.
    """
    size = size or SearchSize()
    is_grouped, is_isolated = np.zeros(len(data.split), bool), np.zeros(len(data.split), bool)
    counts = np.zeros(len(data.schema), np.int64)
    num_done, num_examined = 0, 0
    rng = np.random.default_rng([seed, 0x5059])
    for part_rows in _list_examined_parts(data):
        rows = part_rows
        if size.share < 1.0:
            rows = np.sort(rng.permutation(part_rows)[: math.ceil(size.share * len(part_rows))])
        if round(min(UNUSUAL_SHARES) * len(rows)) >= MIN_UNUSUAL:
            search = _Search(data, rows, rng, seed, size.num_references)
            is_grouped[rows], is_isolated[rows] = search.run(on_progress, num_done)
            counts += search.count_features(np.flatnonzero(is_grouped[rows] | is_isolated[rows]))
            num_examined += len(rows)
        num_done += len(rows)
    codes = [code for code in np.argsort(-counts, kind="stable")[:MAX_LISTED_FEATURES] if counts[code]]
    num_by_feature = {data.schema.names[code]: int(counts[code]) for code in codes}
    return Suspects(is_grouped, is_isolated, num_examined, num_by_feature)


def count_examined(data: PreparedTable, size: SearchSize) -> int:
    """Return among how many records `find_suspects` searches, for its progress."""
    return sum(math.ceil(size.share * len(rows)) for rows in _list_examined_parts(data))


def _list_examined_parts(data: PreparedTable) -> list[NDArray[np.int64]]:
    """Return the row numbers of the training and validation records of each part of the table."""
    return _list_parts(data, np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION)))


def _list_parts(data: PreparedTable, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the given row numbers, divided by the parts of the table to which they belong."""
    if data.part_by_record is None:
        return [rows]
    parts = data.part_by_record[rows]
    return [rows[parts == part] for part in np.unique(parts)]


class _Search:
    """The search of `find_suspects` in one part of a table.

    Args:
        data: The prepared table.
        rows: (N,) row numbers of the examined records.
        rng: The source of the random samples.
        seed: Seed of the sample for the median distance.
        num_references: Number of records of this sample. The other samples are in proportion.
    """

    def __init__(
        self, data: PreparedTable, rows: NDArray[np.int64], rng: np.random.Generator, seed: int, num_references: int
    ) -> None:
        self.data, self.rows, self.seed, self.num_references = data, rows, seed, num_references
        self.fitted = np.sort(rng.permutation(len(rows))[: FITTED_PER_REFERENCE * num_references])
        self.compared = np.sort(rng.permutation(len(rows))[: COMPARED_PER_REFERENCE * num_references])
        self.coordinates = _Coordinates.fit(data, rows[self.fitted])
        self.gaussian: _TrimmedGaussian

    def run(self, on_progress: Callable[[int], object], num_before: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which of the N records are in groups apart, and which are isolated, each (N,).

        Args:
            on_progress: Called with the number of records that are done.
            num_before: How many records of other parts are done.
        """
        rows = self.rows
        num_compared_by_step = [1.0, *(share * COMPARED_PER_REFERENCE for share in UNUSUAL_SHARES)]
        # The share of all distances that is computed when a step begins, and after the last one.
        shares = np.cumsum([0.0, *num_compared_by_step]) / sum(num_compared_by_step)

        def report(step: int, share_of_step: float) -> None:
            share = shares[step] + (shares[step + 1] - shares[step]) * share_of_step
            on_progress(num_before + round(share * len(rows)))

        distances = compute_median_distances(
            self.data, self.seed, self.num_references, lambda done: report(0, done / len(rows)), rows
        )
        self.gaussian = _TrimmedGaussian.fit(self._convert(rows[self.fitted]), distances[self.fitted])
        deviations = _compute_in_chunks(lambda chunk: self.gaussian.measure(self._convert(chunk)), self.data, rows)
        # The rank of a record is that of the more unusual one of its two scores, so that each contributes records.
        ranks = np.maximum(np.argsort(np.argsort(distances)), np.argsort(np.argsort(deviations)))
        by_rank = np.argsort(ranks, kind="stable")
        for step, share in enumerate(UNUSUAL_SHARES, 1):
            is_unusual = np.zeros(len(rows), bool)
            is_unusual[by_rank[len(rows) - round(share * len(rows)) :]] = True
            is_grouped, is_isolated = self._find_suspects_among(is_unusual, functools.partial(report, step))
            if (is_grouped | is_isolated).mean() <= MAX_SUSPECTED_SHARE:
                break
        on_progress(num_before + len(rows))
        return is_grouped, is_isolated

    def _find_suspects_among(
        self, is_unusual: NDArray[np.bool_], on_progress: Callable[[float], object]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which of the N records are in groups apart, and which are isolated, each (N,).

        Args:
            is_unusual: (N,) the records that can be either.
            on_progress: Called with the share of the unusual records that are done.
        """
        rows, compared = self.rows, self.compared
        in_group = _find_groups(self.data, rows[compared], is_unusual[compared])  # (R,) for the R compared records
        ordinary = rows[compared[~is_unusual[compared]]]
        (to_each_other,) = self._measure(ordinary, ~is_unusual[compared])
        typical = float(np.median(to_each_other))
        to_ordinary, to_group = self._measure(rows[is_unusual], ~in_group, in_group, on_progress=on_progress)
        is_grouped, is_isolated = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        is_grouped[is_unusual] = to_ordinary > GROUP_RATIO * to_group
        is_isolated[is_unusual] = ~is_grouped[is_unusual] & (to_ordinary > ISOLATION_RATIO * typical)
        return is_grouped, is_isolated

    def count_features(self, suspects: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each feature of the schema, of how many suspects it is the most unusual one.

        Args:
            suspects: Indexes of the suspects among the N records.
        """
        numbers = self.gaussian.find_largest(self._convert(self.rows[suspects]))
        return np.bincount(self.coordinates.feature_codes[numbers], minlength=len(self.data.schema))

    def _convert(self, rows: NDArray[np.int64]) -> Floats:
        """Return the coordinates of the records with the given row numbers."""
        return self.coordinates.compute(self.data, rows)

    def _measure(
        self,
        examined: NDArray[np.int64],
        *neighbors: NDArray[np.bool_],
        on_progress: Callable[[float], object] = lambda share: None,
    ) -> list[Floats]:
        """Return the mean distances of E records to the nearest ones of each of several sets of compared records.

        Args:
            examined: (E,) row numbers of the records.
            neighbors: (R,) which of the R compared records belong to the set, for each set.
            on_progress: Called with the share of the records that are done.

        Returns:
            (E,) mean distances for each set.
        """
        minima = _compute_min_distances(self.data, examined)
        means = [np.empty(len(examined)) for _ in neighbors]
        for chunk, distances in _iterate_distances(self.data, examined, self.rows[self.compared]):
            for mean, is_neighbor in zip(means, neighbors, strict=True):
                mean[chunk] = _average_nearest_above_minimum(distances[:, is_neighbor], minima[chunk])
            on_progress(chunk.stop / len(examined))
        return means


def _find_groups(data: PreparedTable, rows: NDArray[np.int64], is_unusual: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of R records are in groups of unusual records that are apart from the others, (R,).

    In the beginning all unusual records count as members of groups. A member to which ordinary records are nearly as
    near as other members becomes an ordinary record, until there is no such member. So a tail, which is connected to
    the ordinary records, is removed from its beginning to its end, and only what is behind a gap remains.

    Args:
        data: The prepared table.
        rows: (R,) row numbers of the records.
        is_unusual: (R,) which of them are unusual.
    """
    is_member = is_unusual.copy()
    unusual = np.flatnonzero(is_unusual)
    minima = _compute_min_distances(data, rows[unusual])
    distances = np.concatenate(
        [chunk_distances for _, chunk_distances in _iterate_distances(data, rows[unusual], rows)]
    )
    while True:
        remains = is_member[unusual] & (
            _average_nearest_above_minimum(distances[:, ~is_member], minima)
            > GROUP_RATIO * _average_nearest_above_minimum(distances[:, is_member], minima)
        )
        if (remains == is_member[unusual]).all():
            return is_member
        is_member[unusual] = remains


def _average_nearest_above_minimum(distances: Floats, minima: Floats) -> Floats:
    """Return the mean of the `NUM_OUTLIER_NEIGHBORS` smallest distances in each row, (N,); infinite if there are fewer.

    Unlike the means in the ranking and in the alert (`model.exemplars`, `model.alert_distance`), it is at least the
    minimum of the record. Otherwise values of low resolution, with distances near 0, would form groups.

    Args:
        distances: (N, R) distances of N records to R others. A record has an infinite distance to itself.
        minima: (N,) smallest mean of each record (`_compute_min_distances`).
    """
    if distances.shape[1] < NUM_OUTLIER_NEIGHBORS:
        return np.full(len(distances), np.inf)
    nearest = np.partition(distances, NUM_OUTLIER_NEIGHBORS - 1, 1)[:, :NUM_OUTLIER_NEIGHBORS]
    return np.asarray(np.maximum(nearest.mean(1), minima))


def _compute_min_distances(data: PreparedTable, rows: NDArray[np.int64]) -> Floats:
    """Return the smallest distances from N records that count, (N,).

    It is the distance to a record that differs in one label, or by one standard deviation in one measurement. Records
    of labels or coarse numbers often equal each other. Without a minimum, their nearest distances would be 0, and each
    rare combination of normal readings would be infinitely farther from the others.

    Args:
        data: The prepared table.
        rows: (N,) row numbers of the records.
    """

    def count_readings(chunk: NDArray[np.int64]) -> Floats:
        return np.asarray((~np.isnan(data.values[chunk])).sum(1), np.float64)

    return np.asarray(1.0 / np.sqrt(np.maximum(_compute_in_chunks(count_readings, data, rows), 1.0)))


def leave_out(data: PreparedTable, suspects: Suspects) -> PreparedTable:
    """Return the table with its suspected anomalies moved to `Split.LEFT_OUT`, and with a summary of them."""
    split = data.split.copy()
    split[suspects.is_grouped | suspects.is_isolated] = Split.LEFT_OUT
    return replace(data, split=split, left_out=suspects.summarize())


def restore_left_out(data: PreparedTable) -> PreparedTable:
    """Return the table with all records of `Split.LEFT_OUT` as training records, also former validation records."""
    return replace(data, split=np.where(data.split == Split.LEFT_OUT, Split.TRAIN, data.split).astype(np.uint8))


def choose_num_references(data: PreparedTable, seconds: float, clock: Callable[[], float]) -> int:
    """Return the number of references with which the distances of all records take at most the given time.

    The time is measured on the first records.

    Args:
        data: The prepared table.
        seconds: The time in seconds.
        clock: A function that returns the current time in seconds.

    Returns:
        A number from `MIN_REFERENCES` to `NUM_REFERENCES`. With the smallest one, it may take longer.
    """
    num_records = len(data.values)
    if num_records <= MEASURED_RECORDS:
        return NUM_REFERENCES
    first_records = replace(data, values=data.values[:MEASURED_RECORDS], split=data.split[:MEASURED_RECORDS])
    started = clock()
    compute_median_distances(first_records, seed=0)
    expected_seconds = (clock() - started) * num_records / MEASURED_RECORDS
    num_affordable = NUM_REFERENCES * seconds / max(expected_seconds, 1e-9)
    return int(np.clip(num_affordable, MIN_REFERENCES, NUM_REFERENCES))


def plan_search(data: PreparedTable, seconds: float, clock: Callable[[], float]) -> SearchSize:
    """Return how much work `find_suspects` can do in the given time.

    The time is measured by a small search in the first records. If the time is short, the samples are smaller first,
    down to `MIN_SEARCH_REFERENCES`. Then fewer records are examined, but at least `FIRST_MEASURED_RECORDS`.

    Args:
        data: The prepared table.
        seconds: The time in seconds.
        clock: A function that returns the current time in seconds.
    """
    part_sizes = [len(rows) for rows in _list_examined_parts(data)]
    num_records = sum(part_sizes)
    if math.isinf(seconds) or num_records <= FIRST_MEASURED_RECORDS:
        return SearchSize()
    num_measured = FIRST_MEASURED_RECORDS
    while True:
        first = slice(0, num_measured)
        sample = replace(data, values=data.values[first], split=data.split[first], part_by_record=None)
        started = clock()
        find_suspects(sample, 0, SearchSize(MIN_SEARCH_REFERENCES))
        measured_seconds = clock() - started
        if measured_seconds >= MEASURING_SHARE * seconds or num_measured >= min(MEASURED_RECORDS, len(data.split)):
            break
        num_measured = min(4 * num_measured, MEASURED_RECORDS)
    measured_distances = _count_distances([len(rows) for rows in _list_examined_parts(sample)], MIN_SEARCH_REFERENCES)
    num_affordable = seconds * measured_distances / max(COST_FACTOR * measured_seconds, 1e-9)
    numbers = range(MIN_SEARCH_REFERENCES, NUM_REFERENCES + 1)
    index = bisect.bisect_right(numbers, num_affordable, key=lambda number: _count_distances(part_sizes, number)) - 1
    if index >= 0:
        return SearchSize(numbers[index])
    share = num_affordable / _count_distances(part_sizes, MIN_SEARCH_REFERENCES)
    return SearchSize(MIN_SEARCH_REFERENCES, max(share, FIRST_MEASURED_RECORDS / num_records))


def _count_distances(part_sizes: Sequence[int], num_references: int) -> float:
    """Return about how many distances between two records `find_suspects` computes at most.

    Args:
        part_sizes: Number of examined records of each part of the table.
        num_references: As in `SearchSize`.
    """
    total = 0.0
    for size in part_sizes:
        num_compared = min(COMPARED_PER_REFERENCE * num_references, size)
        total += size * (num_references + sum(UNUSUAL_SHARES) * num_compared) + len(UNUSUAL_SHARES) * num_compared**2
    return total


def compute_median_distances(
    data: PreparedTable,
    seed: int,
    num_references: int = NUM_REFERENCES,
    on_progress: Callable[[int], object] = lambda num_done: None,
    rows: NDArray[np.int64] | None = None,
) -> Floats:
    """Return the median distance of each of N records to a random sample of these records, the references.

    Args:
        data: The prepared table.
        seed: Seed of the random choice.
        num_references: Number of references.
        on_progress: Called with the number of records that are done, about once a second or more often.
        rows: (N,) row numbers of the records. All records of the table by default.

    Returns:
        (N,) median distances. A larger distance means a more unusual record.
    """
    rows = np.arange(len(data.values)) if rows is None else rows
    rng = np.random.default_rng([seed, 0x51F7])
    reference_rows = np.sort(rng.permutation(rows)[:num_references])
    median_distances = np.zeros(len(rows))
    for chunk, distances in _iterate_distances(data, rows, reference_rows, self_distance=0.0):
        median_distances[chunk] = np.median(distances, 1)
        on_progress(chunk.stop)
    return median_distances


def _iterate_distances(
    data: PreparedTable, rows: NDArray[np.int64], reference_rows: NDArray[np.int64], self_distance: float = math.inf
) -> Iterator[tuple[slice, Floats]]:
    """Yield the distances of N records to R references, some records at a time.

    The distance of two records is the root mean square of their differences, over the features of which both have a
    reading. A difference of measurements is in standard deviations; for cyclic features, such as angles, it is the
    shorter way around the cycle. A difference of labels is 1, or 0 if they are equal. The distance is 0 if no feature
    has a reading in both records.

    Args:
        data: The prepared table.
        rows: (N,) row numbers of the records.
        reference_rows: (R,) row numbers of the references, ascending.
        self_distance: The distance of a record to itself. It is infinite if nearest others are searched.

    Yields:
        The slice of `rows` with C records, and their distances (C, R).
    """
    # Shapes: N records, R references, F features, C records of a chunk.
    references = np.asarray(data.values[reference_rows], np.float64)  # (R, F)
    # The unit of a difference. It must be positive, even for features without readings (NaN) or with a constant value.
    units = np.maximum(np.nan_to_num(_compute_deviations(references), nan=1.0), 1e-9)
    # Each chunk has so few records that at most MAX_DIFFERENCES distances or readings are in memory.
    chunk_size = max(1, MAX_DIFFERENCES // max(len(reference_rows), len(data.schema)))
    for start in range(0, len(rows), chunk_size):
        chunk = slice(start, min(start + chunk_size, len(rows)))
        values = np.asarray(data.values[rows[chunk]], np.float64)  # (C, F)
        square_sums = _sum_linear_squares(values, references, units, data.schema.is_linear)  # (C, R)
        for code in np.flatnonzero(~data.schema.is_linear):
            differences = np.abs(values[:, code, None] - references[:, code])  # (C, R), NaN if a reading is missing
            if data.schema.is_discrete[code]:
                differences = (differences > 0).astype(np.float64)  # NaN is not larger than 0
            else:  # the feature is cyclic
                remainders = differences % data.schema.cycle_lengths[code]
                differences = np.minimum(remainders, data.schema.cycle_lengths[code] - remainders) / units[code]
            square_sums += np.nan_to_num(differences) ** 2
        num_in_both = (~np.isnan(values)).astype(np.float64) @ (~np.isnan(references)).astype(np.float64).T
        # The number is at least 1, so that the distance is 0 if no feature has a reading in both records.
        distances = np.sqrt(square_sums / np.maximum(num_in_both, 1.0))
        distances[rows[chunk, None] == reference_rows] = self_distance
        yield chunk, distances


@dataclass(frozen=True, slots=True)
class _Coordinates:
    """A mapping of records to D numbers each, to which a Gaussian can be fitted.

    A measurement is one number, a cyclic value is its sine and its cosine, and a label is −ln of its frequency. Each
    number is in standard deviations from its mean. A missing reading is 0, so it is not unusual.

    Attributes:
        feature_codes: (D,) the feature of each number, as an index in the schema.
        label_values: For each discrete feature by its index in the schema, −ln of the frequency of each label. The last
            number is for all other labels.
        means: (D,) means before the standardisation.
        units: (D,) standard deviations before it, or 1 for a constant.
    """

    feature_codes: NDArray[np.int64]
    label_values: dict[int, Floats]
    means: Floats
    units: Floats

    @staticmethod
    def fit(data: PreparedTable, rows: NDArray[np.int64]) -> _Coordinates:
        """Return the mapping for a table, with frequencies, means and units of the records with the given rows."""
        schema = data.schema
        values = np.asarray(data.values[rows], np.float64)
        label_values = {}
        for code in np.flatnonzero(schema.is_discrete).tolist():
            labels = values[~np.isnan(values[:, code]), code].astype(np.int64)
            counts = np.bincount(labels, minlength=len(schema.features[code].labels) + 1)
            label_values[code] = -np.log((counts + 1.0) / (len(labels) + len(counts)))
        feature_codes = np.repeat(np.arange(len(schema)), np.where(schema.is_cyclic, 2, 1))
        unscaled = _Coordinates(feature_codes, label_values, np.zeros(1), np.ones(1))
        numbers = unscaled._convert(data, values)
        is_known = ~np.isnan(numbers)
        means = np.where(is_known, numbers, 0.0).sum(0) / np.maximum(is_known.sum(0), 1)
        units = np.nan_to_num(_compute_deviations(numbers), nan=1.0)
        return replace(unscaled, means=means, units=np.where(units > 0, units, 1.0))

    def compute(self, data: PreparedTable, rows: NDArray[np.int64]) -> Floats:
        """Return the numbers of the N records with the given rows, (N, D)."""
        numbers = self._convert(data, np.asarray(data.values[rows], np.float64))
        return np.nan_to_num((numbers - self.means) / self.units)

    def _convert(self, data: PreparedTable, values: Floats) -> Floats:
        """Return the numbers before the standardisation, (N, D), NaN if missing, of the values of N records, (N, F)."""
        columns = []
        for code in range(len(data.schema)):
            column = values[:, code]
            if code in self.label_values:
                labels = np.nan_to_num(column).astype(np.int64)
                by_label = self.label_values[code]
                column = np.where(np.isnan(column), np.nan, by_label[np.minimum(labels, len(by_label) - 1)])
            if data.schema.is_cyclic[code]:
                angles = 2.0 * np.pi * column / data.schema.cycle_lengths[code]
                columns += [np.sin(angles), np.cos(angles)]
            else:
                columns.append(column)
        return np.stack(columns, 1)


@dataclass(frozen=True, slots=True)
class _TrimmedGaussian:
    """A Gaussian that is fitted to the central records only, so that anomalies hardly change it.

    Attributes:
        mean: (D,) the mean.
        scales: (D,) the standard deviations.
        whitening: (D, D) the matrix that makes the coordinates of central records uncorrelated, with variance 1. (D,)
            its diagonal, if correlations are not used.
    """

    mean: Floats
    scales: Floats
    whitening: Floats

    @staticmethod
    def fit(x: Floats, initial_scores: Floats) -> _TrimmedGaussian:
        """Fit the Gaussian to `CENTRAL_SHARE` of the records: those to which the fitted Gaussian itself is nearest.

        These are the concentration steps of the minimum covariance determinant (Rousseeuw and Van Driessen, 1999).

        Args:
            x: (N, D) records, each number with variance 1.
            initial_scores: (N,) how unusual each record is; the fit begins with those that are the least unusual.
        """
        num_central, scores = max(2, int(CENTRAL_SHARE * len(x))), initial_scores
        central: NDArray[np.int64] = np.empty(0, np.int64)
        for _ in range(MAX_TRIMMING_ROUNDS):
            nearest = np.sort(np.argsort(scores, kind="stable")[:num_central])
            if np.array_equal(nearest, central):
                break
            central = nearest
            mean = x[central].mean(0)
            gaussian = _TrimmedGaussian._create(mean, x[central] - mean)
            scores = gaussian.measure(x)
        return gaussian

    @staticmethod
    def _create(mean: Floats, differences: Floats) -> _TrimmedGaussian:
        """Return the Gaussian of records with the given mean and differences from it, (N, D)."""
        variances = (differences**2).mean(0) + MIN_VARIANCE
        if len(mean) > MAX_FITTED_FEATURES:  # without correlations, which would take too long
            return _TrimmedGaussian(mean, np.sqrt(variances), 1.0 / np.sqrt(variances))
        covariance = (1.0 - CORRELATION_SHRINKAGE) * (differences.T @ differences / len(differences))
        np.fill_diagonal(covariance, variances)
        return _TrimmedGaussian(mean, np.sqrt(variances), np.linalg.inv(np.linalg.cholesky(covariance)))

    def measure(self, x: Floats) -> Floats:
        """Return the squared Mahalanobis distance of each of N records, (N,), from the mean."""
        differences = x - self.mean
        whitened = differences * self.whitening if self.whitening.ndim == 1 else differences @ self.whitening.T
        distances: Floats = (whitened**2).sum(1)
        return distances

    def find_largest(self, x: Floats) -> NDArray[np.int64]:
        """Return, for each of N records, the index of the number that is most standard deviations from the mean."""
        return np.asarray((np.abs(x - self.mean) / self.scales).argmax(1))


def _compute_in_chunks(
    function: Callable[[NDArray[np.int64]], Floats], data: PreparedTable, rows: NDArray[np.int64]
) -> Floats:
    """Return the results of a function of row numbers for many records, of which few are in memory at once."""
    chunk_size = max(1, MAX_DIFFERENCES // (2 * len(data.schema)))
    return np.concatenate([function(rows[start : start + chunk_size]) for start in range(0, len(rows), chunk_size)])


def _sum_linear_squares(
    values: NDArray[np.float64],
    references: NDArray[np.float64],
    units: NDArray[np.float64],
    is_linear: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the sums of squared differences of C records to R references over the measurements that are not cyclic.

    Matrix products compute them many times faster than the differences themselves: (x − r)² = x² − 2xr + r².

    Args:
        values: (C, F) normalised values of the records, NaN if missing.
        references: (R, F) normalised values of the references, NaN if missing.
        units: (F,) unit of a difference of each feature.
        is_linear: (F,) whether a feature is a measurement and not cyclic.

    Returns:
        (C, R) sums over the features of which both records have a reading, at least 0.
    """
    x, r = values[:, is_linear] / units[is_linear], references[:, is_linear] / units[is_linear]
    is_known, is_known_reference = (~np.isnan(x)).astype(np.float64), (~np.isnan(r)).astype(np.float64)
    x, r = np.nan_to_num(x), np.nan_to_num(r)
    sums = x**2 @ is_known_reference.T - 2.0 * (x @ r.T) + is_known @ (r**2).T
    clipped: NDArray[np.float64] = np.maximum(sums, 0.0)  # rounding can make a sum of 0 negative
    return clipped


def _compute_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of each feature over the readings that are not missing.

    Args:
        values: (R, F) values of R records and F features, NaN if missing.

    Returns:
        (F,) standard deviations, NaN for a feature without readings.
    """
    # Unlike np.nanstd, this raises no warning for a feature without readings.
    is_known = ~np.isnan(values)
    counts = is_known.sum(0)
    divisors = np.maximum(counts, 1)
    means = np.where(is_known, values, 0.0).sum(0) / divisors
    variances = np.where(is_known, (values - means) ** 2, 0.0).sum(0) / divisors
    return np.where(counts > 0, np.sqrt(variances), np.nan)
