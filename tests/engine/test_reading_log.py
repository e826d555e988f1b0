"""The log of readings against a dictionary of lists, by stateful property testing."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deformer_stream.engine.reading_log import MIN_EXTENT_SIZE, ReadingLog
from tests.effort import num_examples

NUM_FEATURES, NUM_RECORDS = 40, 9

Reading = tuple[int, float, bool]
"""Feature code, value, and whether the reading belongs to the tie group of the reading before it."""


class ReadingLogMachine(RuleBasedStateMachine):
    """Applies each operation to a `ReadingLog` and to lists of readings by record index."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ReadingLog(NUM_FEATURES, has_ties=True)
        self.log.resize(NUM_RECORDS)
        self.expected: dict[int, list[Reading]] = {}
        self.next_feature = 0

    @rule(lengths=st.dictionaries(st.integers(0, NUM_RECORDS - 1), st.integers(0, NUM_FEATURES), min_size=1))
    def append_readings(self, lengths: dict[int, int]) -> None:
        """Extend some records to a number of readings; a shorter number changes nothing."""
        record_indices = np.array(list(lengths), np.int64)
        num_stored = np.array([len(self.expected.get(index, [])) for index in lengths], np.int64)
        num_readings = np.maximum(num_stored, list(lengths.values()))
        self.log.reserve(record_indices, num_stored, num_readings)
        for record_index, first, end in zip(lengths, num_stored.tolist(), num_readings.tolist(), strict=True):
            readings = [self.new_reading() for _ in range(first, end)]
            owners, places = np.full(end - first, record_index), np.arange(first, end)
            self.log.write(
                owners, places, np.array([r[0] for r in readings], np.int64), np.array([r[1] for r in readings])
            )
            self.log.mark_tied(owners, places, np.array([r[2] for r in readings], np.bool_))
            self.expected.setdefault(record_index, []).extend(readings)

    def new_reading(self) -> Reading:
        self.next_feature += 1
        return self.next_feature % NUM_FEATURES, self.next_feature / 7, self.next_feature % 3 == 0

    @rule(record_indices=st.sets(st.integers(0, NUM_RECORDS - 1)))
    def free_records(self, record_indices: set[int]) -> None:
        self.log.free(np.array(sorted(record_indices), np.int64))
        for record_index in record_indices:
            self.expected.pop(record_index, None)

    @rule(lengths=st.lists(st.integers(0, 5), min_size=NUM_RECORDS, max_size=NUM_RECORDS))
    def gather_first_readings_of_all_records(self, lengths: list[int]) -> None:
        num_readings = np.array([min(n, len(self.expected.get(i, []))) for i, n in enumerate(lengths)], np.int64)
        features, values = self.log.gather_padded(np.arange(NUM_RECORDS), num_readings)
        assert features.shape == values.shape == (NUM_RECORDS, max(1, num_readings.max()))
        for record_index, n in enumerate(num_readings.tolist()):
            expected = self.expected.get(record_index, [])[:n]
            assert features[record_index, :n].tolist() == [feature for feature, _, _ in expected]
            assert values[record_index, :n].tolist() == [value for _, value, _ in expected]
            assert (features[record_index, n:] == -1).all()
            assert (values[record_index, n:] == 0).all()

    @invariant()
    def log_agrees_with_lists(self) -> None:
        for record_index, expected in self.expected.items():
            places = np.arange(len(expected))
            features, values = self.log.gather(np.int64(record_index), places)
            is_tied = self.log.is_tied(np.int64(record_index), places)
            assert list(zip(features.tolist(), values.tolist(), is_tied.tolist(), strict=True)) == expected

    @invariant()
    def extents_depend_on_number_of_readings_only(self) -> None:
        """Rebuilding the log, as a restart does, gives extents of the same size."""
        rebuilt = ReadingLog(NUM_FEATURES, has_ties=True)
        rebuilt.resize(NUM_RECORDS)
        record_indices = np.array(list(self.expected), np.int64)
        lengths = np.array([len(readings) for readings in self.expected.values()], np.int64)
        rebuilt.reserve(record_indices, np.zeros_like(lengths), lengths)
        assert rebuilt.num_bytes == self.log.num_bytes == self.log.extent_bytes(np.arange(NUM_RECORDS)).sum()
        assert self.log.num_places <= (2 * lengths + MIN_EXTENT_SIZE).sum()


def test_freed_extents_are_used_again() -> None:
    log = ReadingLog(NUM_FEATURES, has_ties=False)
    log.resize(64)
    record_indices, none = np.arange(64), np.zeros(64, np.int64)
    for _ in range(50):
        for length in (1, 9, 20, 40):
            log.reserve(record_indices, none, np.full(64, length))
        log.free(record_indices)
    assert log.num_places == 0
    assert log._end <= 64 * (8 + 16 + 32 + 40)


ReadingLogMachine.TestCase.settings = settings(max_examples=num_examples(60), stateful_step_count=25, deadline=None)
TestReadingLog = ReadingLogMachine.TestCase
