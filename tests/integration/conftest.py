"""Kafka as seen from outside, for the tests that run whole programs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.integration.programs import Cluster


@pytest.fixture(scope="session")
def cluster(kafka: SimpleNamespace) -> Iterator[Cluster]:
    found = Cluster(kafka.bootstrap)
    yield found
    found.close()
