"""Fixtures for the tests that run complete programs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.integration.programs import Cluster


@pytest.fixture(scope="session")
def cluster(kafka: SimpleNamespace) -> Iterator[Cluster]:
    """Return a view of the topics and groups of the broker."""
    found = Cluster(kafka.bootstrap)
    yield found
    found.close()
