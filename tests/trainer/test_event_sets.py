"""Partially ordered sequences: sets of events of one instant, their selection and their merging."""

from __future__ import annotations

import numpy as np

from trainer.event_sets import EventSets, encode_readings, make_event_sets


def list_sets(records: EventSets) -> list[list[list[float]]]:
    """Return the first number of each event, by set and record."""
    sets = [
        sorted(records.events[start:end, 0].tolist())
        for start, end in zip(records.event_offsets, records.event_offsets[1:], strict=False)
    ]
    return [sets[start:end] for start, end in zip(records.set_offsets, records.set_offsets[1:], strict=False)]


def make_records() -> EventSets:
    """Return two records with ties, whose events are given in disorder."""
    events = np.array([[3], [1], [2], [10], [11], [12], [4]], np.float32)
    return make_event_sets(events, np.array([0, 0, 0, 1, 1, 1, 0]), np.array([20, 10, 10, 5, 7, 7, 30]))


def test_events_of_one_instant_of_a_record_form_a_set() -> None:
    records = make_records()
    assert list_sets(records) == [[[1, 2], [3], [4]], [[10], [11, 12]]]
    assert records.num_sets.tolist() == [3, 2]


def test_equal_times_of_neighbouring_records_stay_apart() -> None:
    records = make_event_sets(np.array([[1], [2]], np.float32), np.array([0, 1]), np.array([5, 5]))
    assert list_sets(records) == [[[1]], [[2]]]


def test_records_are_selected_in_the_given_order() -> None:
    assert list_sets(make_records().select(np.array([1, 0, 1]))) == [
        *([[10], [11, 12]], [[1, 2], [3], [4]]),
        [[10], [11, 12]],
    ]


def test_merging_joins_adjacent_sets_within_a_record() -> None:
    assert list_sets(make_records().merge(2)) == [[[1, 2, 3], [4]], [[10, 11, 12]]]
    assert list_sets(make_records().merge(1)) == list_sets(make_records())


def test_readings_become_events_of_their_own_or_of_their_instant() -> None:
    codes, values = np.array([2, 0]), np.array([0.5, -1.0])
    assert encode_readings(np.arange(2), codes, values, 3).tolist() == [[0, 0, 1, 0, 0, 0.5], [1, 0, 0, -1, 0, 0]]
    assert encode_readings(np.zeros(2, int), codes, values, 3).tolist() == [[1, 0, 1, -1, 0, 0.5]]
