"""Fixtures that the tests of the kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Use two threads, which share the work and must not change the scores; other tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
