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
    """Mark the tests of this folder as slow, because programs take seconds to start.

    Of the two variants of a test with each client library, one is marked as long, so that `make test` runs the other
    one. What the programs do with a client library is tested in `tests/contracts` and `tests/connectors` with both.
    """
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        item.add_marker(pytest.mark.slow)
        variant = getattr(item, "callspec", None)
        if variant is None or item.get_closest_marker("both_clients"):
            continue
        name = variant.params.get("client_library", variant.params.get("client"))
        number = zlib.crc32(item.name.partition("[")[0].encode()) % len(CLIENT_LIBRARIES)
        if name not in (None, CLIENT_LIBRARIES[number]):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cluster(kafka: SimpleNamespace) -> Iterator[Cluster]:
    """Return a view of the topics and groups of the broker."""
    found = Cluster(kafka.bootstrap)
    yield found
    found.close()
