"""The readings that go through the network in one pass, and groups of records that share a padded pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_READINGS_PER_PASS = 8_192
"""Largest number of readings that go through the network in one pass. In PyTorch, cached readings count as well,
because attention has to gather copies of them. Larger matrices are not faster, because their intermediate results no
longer fit into the processor's cache."""

MAX_PADDING_RATIO = 1.25
"""Largest ratio of padded to actual readings at which records with unequal numbers of readings share a padded pass."""

SMALL_PASS_READINGS = 512
"""Number of padded readings that a pass may hold in addition to `MAX_PADDING_RATIO`. A pass has a fixed cost, so a
little padding is cheaper than another pass."""


@dataclass(frozen=True, slots=True)
class PassReadings:
    """The K readings of R records that go through the network in one pass, record after record.

    The readings of a record are first those that are only added to the cache, and then the new ones. The first were
    scored before, and are not cached any more.

    Attributes:
        record_index: (R,) row of each record in the table of open records.
        num_cached: (R,) number of readings of each record that the cache holds before the pass.
        num_prefill_only: (R,) number of readings that are only added to the cache.
        num_new: (R,) number of readings to score.
        codes: (K,) feature codes (indexes in the schema).
        values: (K,) values in normalised units, or label codes.
        ages: (K,) float64 seconds from the origin of the record to each reading; None if readings are not irregular.
    """

    record_index: Ints
    num_cached: Ints
    num_prefill_only: Ints
    num_new: Ints
    codes: Ints
    values: Floats
    ages: Floats | None

    @property
    def num_processed(self) -> Ints:
        """(R,) the number of readings of each record in the pass."""
        return self.num_prefill_only + self.num_new


def group_by_length(num_processed: Ints, num_cached: Ints) -> Iterator[Ints]:
    """Divide R records into groups for padded passes, so that little padding is computed.

    In a pass, every record is padded to the longest one of its group. The records of a group therefore have similar
    numbers of readings to process and similar numbers of cached readings.

    Args:
        num_processed: (R,) number of readings of each record that go through the network.
        num_cached: (R,) number of readings of each record that attention reads from the KV cache.

    Yields:
        Indexes of the records of one group, each from 0 to R − 1.
    """
    max_readings = int((num_processed + num_cached).max(initial=0))
    if len(num_processed) * max_readings <= SMALL_PASS_READINGS:
        yield np.arange(len(num_processed))  # one small pass, whatever its padding
        return
    # Add records from the shortest to the longest, and begin a new group if padding would become too much.
    order = np.argsort(num_processed, kind="stable")
    # For each distinct length: where its records start in `order`, and how many there are.
    lengths, starts, counts = np.unique(num_processed[order], return_index=True, return_counts=True)
    group_start, group_readings = 0, 0  # start of the current group in `order`, and its readings without padding
    for length, start, count in zip(lengths.tolist(), starts.tolist(), counts.tolist(), strict=True):
        # Sizes of the current group if all records of this length are added, with and without padding.
        padded_size = length * (start + count - group_start)
        actual_size = group_readings + length * count
        if padded_size > MAX_PADDING_RATIO * actual_size + SMALL_PASS_READINGS:
            yield from _split_by_num_cached(order[group_start:start], num_processed, num_cached)
            group_start, group_readings = start, 0
        group_readings += length * count
    yield from _split_by_num_cached(order[group_start:], num_processed, num_cached)


def _split_by_num_cached(rows: Ints, num_processed: Ints, num_cached: Ints) -> Iterator[Ints]:
    """Divide a group of records into smaller groups that fit one padded pass, records with few cached readings first.

    A pass of G records computes matrices with G rows. Their number of columns is the largest number of readings of one
    record, those in the pass and those in the cache together. Such a matrix has at most about `MAX_READINGS_PER_PASS`
    entries.

    Args:
        rows: Indexes of the records of the group, some of 0 … R − 1.
        num_processed: (R,) number of readings of each of R records that go through the network.
        num_cached: (R,) number of readings of each record that attention reads from the KV cache.

    Yields:
        Indexes of the records of one smaller group.
    """
    rows = rows[np.argsort(num_cached[rows], kind="stable")]
    max_processed = int(num_processed[rows].max())
    start = 0
    while start < len(rows):
        # The exact number of columns needs the largest `num_cached` of the group, which depends on the group's size.
        # The value of the first record is used instead. It is the smallest one, but seldom much smaller, because the
        # records are sorted by it.
        num_columns = max_processed + int(num_cached[rows[start]])
        size = max(1, MAX_READINGS_PER_PASS // num_columns)
        yield rows[start : start + size]
        start += size
