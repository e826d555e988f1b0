"""Partially ordered sequences: records whose events of one instant have no order among themselves.

A record is a sequence of sets x = (x_1, …, x_T). Each set x_t holds the events e_j ∈ R^M of one instant: a single
reading, or all readings of an instant. The method is from Ger, Klabjan and Utke, "Classification Models for Partially
Ordered Sequences", arXiv 2102.00380.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.ragged import ragged_indices, run_boundaries

Ints = NDArray[np.int64]
Floats32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EventSets:
    """E events in S sets in R records, record after record and set after set.

    Attributes:
        events: (E, M) the events. Those of a set are stored in any order.
        event_offsets: (S + 1,) index of each set's first event; the last entry is E.
        set_offsets: (R + 1,) index of each record's first set; the last entry is S. Each record has at least one set.
    """

    events: Floats32
    event_offsets: Ints
    set_offsets: Ints

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.set_offsets) - 1

    @property
    def num_sets(self) -> Ints:
        """The number of sets of each record, (R,)."""
        return np.diff(self.set_offsets)

    def select(self, records: Ints) -> EventSets:
        """Return the given records, in the given order."""
        sets, set_offsets = _gather_rows(self.set_offsets, records)
        events, event_offsets = _gather_rows(self.event_offsets, sets)
        return EventSets(self.events[events], event_offsets, set_offsets)

    def merge(self, num_adjacent: int) -> EventSets:
        """Join adjacent sets of each record, so that the order of their events is lost.

        Args:
            num_adjacent: Number of sets that become one; the last set of a record can have fewer.
        """
        record, position = ragged_indices(self.num_sets)
        firsts = np.flatnonzero(position % num_adjacent == 0)
        event_offsets = np.append(self.event_offsets[firsts], self.event_offsets[-1])
        return EventSets(self.events, event_offsets, np.searchsorted(record[firsts], np.arange(len(self) + 1)))


def make_event_sets(events: Floats32, records: Ints, times: NDArray[np.generic]) -> EventSets:
    """Return records whose events with equal times form sets.

    Args:
        events: (E, M) the events, in any order.
        records: (E,) number of each event's record, from 0 to R − 1. Each record has at least one event.
        times: (E,) the time of each event.
    """
    order = np.lexsort((times, records))
    records, times = records[order], times[order]
    _, instants = np.unique(times, return_inverse=True)
    event_offsets = run_boundaries(records * (instants.max(initial=0) + 1) + instants)
    set_offsets = np.searchsorted(records[event_offsets[:-1]], np.arange(records.max(initial=-1) + 2))
    return EventSets(events[order], event_offsets, set_offsets)


def encode_readings(rows: Ints, codes: Ints, values: NDArray[np.floating], num_sensors: int) -> Floats32:
    """Return readings as events, (E, 2 · num_sensors): which sensors reported (1 or 0), and their values (or 0).

    If a sensor has several readings in an event, the last one counts.

    Args:
        rows: (N,) the event of each of N readings, from 0 to E − 1: an event of its own, or that of its instant.
        codes: (N,) the sensors, from 0 to `num_sensors` − 1.
        values: (N,) the values, in units in which the sensors are comparable.
        num_sensors: The number of sensors.
    """
    events = np.zeros((rows.max(initial=-1) + 1, 2 * num_sensors), np.float32)
    events[rows, codes] = 1.0
    events[rows, num_sensors + codes] = values
    return events


def _gather_rows(offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the indexes of the elements of rows of a ragged array, and the offsets of these rows among them.

    Args:
        offsets: (R + 1,) index of the first element of each row; the last entry is the number of elements.
        rows: (N,) the rows.
    """
    lengths = np.diff(offsets)[rows]
    row, position = ragged_indices(lengths)
    return offsets[rows][row] + position, np.concatenate([[0], lengths.cumsum()])
