"""The bounded set of ids against a list with the same contents, and the column of strings."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.engine.id_set import BoundedIdSet, StringColumn

IDS = ["", "a", "b", "ab", "ba", "ümlaut", "\0", "\U0001f4a7", "a" * 300]


@given(max_ids=st.integers(0, 6), added=st.lists(st.sampled_from(IDS), max_size=60))
def test_latest_ids_are_kept_in_order_of_addition(max_ids: int, added: list[str]) -> None:
    ids, expected = BoundedIdSet(max_ids), list[str]()
    for record_id in added:
        assert (record_id in ids) == (record_id in expected)
        if record_id not in expected:
            ids.add(record_id)
            expected = [*expected, record_id][-max_ids:] if max_ids else []
        assert list(ids) == expected
        assert len(ids) == len(expected)
    assert [record_id in ids for record_id in IDS] == [record_id in expected for record_id in IDS]


@given(max_ids=st.integers(0, 6), ids=st.permutations(IDS), num_first=st.integers(0, len(IDS)))
def test_restored_set_equals_set_built_by_additions(max_ids: int, ids: list[str], num_first: int) -> None:
    restored, grown = BoundedIdSet(max_ids, StringColumn.from_strings(ids[:num_first])), BoundedIdSet(max_ids)
    for record_id in ids[:num_first]:
        grown.add(record_id)
    for record_id in [None, *ids[num_first:]]:
        if record_id is not None:
            restored.add(record_id)
            grown.add(record_id)
        assert list(restored) == list(grown)
        assert [known in restored for known in IDS] == [known in grown for known in IDS]


def test_exported_column_does_not_change_with_the_set() -> None:
    ids = BoundedIdSet(3, ["a", "bc", "d"])
    column = ids.to_column()
    ids.add("e")
    assert (list(column), len(column), list(ids)) == (["a", "bc", "d"], 3, ["bc", "d", "e"])


@given(strings=st.lists(st.text(max_size=5)))
def test_string_column_round_trip(strings: list[str]) -> None:
    column = StringColumn.from_strings(strings)
    assert list(column) == strings
    assert len(column) == len(strings)
    assert (column.offsets.dtype, column.offsets[0], column.offsets[-1]) == (np.int64, 0, len(column.utf8))


def test_memory_per_id_is_bounded_and_does_not_grow_with_later_ids() -> None:
    """A set and a queue of 20,000 ids of seven characters take about 140 bytes an id."""
    max_ids, sizes = 20_000, list[int]()
    tracemalloc.start()
    try:
        before, ids = tracemalloc.get_traced_memory()[0], BoundedIdSet(max_ids)
        for turn in range(6):
            for i in range(max_ids):
                ids.add(f"{turn}/{i:05d}")
            sizes.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert sizes[0] < 200 * max_ids
    assert max(sizes) < 1.1 * sizes[0]
