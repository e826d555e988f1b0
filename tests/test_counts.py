"""Tests of counts as texts."""

from __future__ import annotations

import pytest

from deformer_stream.counts import format_count


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1280, "1,280 steps")])
def test_noun_has_the_number_of_the_count(count: int, text: str) -> None:
    assert format_count(count, "step") == text
