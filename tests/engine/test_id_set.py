"""Remembered ids, beside a list of them that does the same at any price."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.engine import id_set
from deformer_stream.engine.id_set import BoundedIdSet, StringColumn

IDS = ["", "a", "b", "ab", "ba", "ümlaut", "\0", "\U0001f4a7", "a" * 300]


@pytest.mark.parametrize("tags", [0, id_set.TAGS])
@pytest.mark.parametrize("block", [1, id_set.BLOCK])
@given(most=st.integers(0, 6), came=st.lists(st.sampled_from(IDS), max_size=60))
def test_the_latest_are_known_in_the_order_in_which_they_came(
    block: int, tags: int, most: int, came: list[str]
) -> None:
    """Where no tag tells ids of one chain apart, too, and however many stand in one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_set, "TAGS", tags)
        patch.setattr(id_set, "BLOCK", block)
        ids, kept = BoundedIdSet(most), list[str]()
        for record in came:
            assert (record in ids) == (record in kept)
            if record not in kept:
                ids.add(record)
                kept = [*kept, record][-most:] if most else []
            assert list(ids) == kept
        assert [record in ids for record in IDS] == [record in kept for record in IDS]


@pytest.mark.parametrize("block", [1, id_set.BLOCK])
@given(most=st.integers(0, 6), ids=st.permutations(IDS), first=st.integers(0, len(IDS)))
def test_those_it_begins_with_are_as_if_added_one_by_one(block: int, most: int, ids: list[str], first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_set, "BLOCK", block)
        begun, grown = BoundedIdSet(most, ids[:first]), BoundedIdSet(most)
        for record in ids[:first]:
            grown.add(record)
        for record in [None, *ids[first:]]:
            if record is not None:
                begun.add(record)
                grown.add(record)
            assert list(begun) == list(grown)
            assert [known in begun for known in IDS] == [known in grown for known in IDS]


def test_what_was_taken_of_it_stays_as_it_was() -> None:
    ids = BoundedIdSet(3, ["a", "bc", "d"])
    texts = ids.to_column()
    ids.add("e")
    assert (list(texts), len(texts), list(ids)) == (["a", "bc", "d"], 3, ["bc", "d", "e"])


@given(texts=st.lists(st.text(max_size=5)))
def test_texts_in_one_piece_come_back(texts: list[str]) -> None:
    assert list(StringColumn.from_strings(texts)) == texts
    assert len(StringColumn.from_strings(texts)) == len(texts)


def test_an_id_takes_few_bytes_and_later_ones_take_none() -> None:
    most, held = 20_000, list[int]()
    tracemalloc.start()
    try:
        before, ids = tracemalloc.get_traced_memory()[0], BoundedIdSet(most)
        for turn in range(6):
            for i in range(most):
                ids.add(f"{turn}/{i:05d}")
            held.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert held[0] < 30 * most
    assert max(held) < 1.1 * held[0]
