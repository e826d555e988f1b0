"""Fixtures for the tests that run complete programs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import CLIENT_LIBRARIES
from tests.integration.programs import Cluster

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the options of pytest select tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark one of the two variants of a test with each client library as long, so that `make test` runs the other.

    Programs take seconds to start. What they do with a client library is tested in `tests/contracts` and
    `tests/connectors` with both.
    """
    for item in items:
        variant = getattr(item, "callspec", None)
        if variant is None or not item.path.is_relative_to(FOLDER) or item.get_closest_marker("both_clients"):
            continue
        name = variant.params.get("client_library")
        number = zlib.crc32(item.name.partition("[")[0].encode()) % len(CLIENT_LIBRARIES)
        if name not in (None, CLIENT_LIBRARIES[number]):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cluster(kafka: SimpleNamespace) -> Iterator[Cluster]:
    """Return a view of the topics and groups of the broker."""
    found = Cluster(kafka.bootstrap)
    yield found
    found.close()
