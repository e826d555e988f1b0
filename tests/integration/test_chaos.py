"""Short runs of the chaos test. They have a file of their own, because they take as long as many other tests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from connectors.kafka.ports import ClientLibrary
from tests.conftest import CLIENT_LIBRARIES, ROOT

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def run_chaos(size: str, client: str, delivery: str) -> Any:
    """Run the chaos test in a process of its own, which must find no error, and return its figures."""
    options = ("--size", size, "--seed", "3", "--client", client, "--delivery", delivery)
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    modes = ["exactly-once", "at-least-once"] if delivery == "both" else [delivery]
    assert all(figures[mode]["alerts"] > 100 for mode in modes)
    return figures


def check_exactly_once(figures: dict[str, int]) -> None:
    """Check that the disturbances have changed and repeated nothing."""
    names = ("lost", "extra", "doubled", "letters_lost", "letters_doubled")
    assert {figures[name] for name in names} == {0}


def check_at_least_once(figures: dict[str, int]) -> None:
    """Check that the disturbances have changed nothing."""
    assert {figures[name] for name in ("lost", "extra", "letters_lost")} == {0}


def test_tiny_run_exactly_once() -> None:
    """Consumers that are killed and disturbed raise the same alerts as an undisturbed one."""
    figures = run_chaos("tiny", "librdkafka", "exactly-once")["exactly-once"]
    check_exactly_once(figures)
    assert figures["kills"] >= 3


def test_tiny_run_at_least_once() -> None:
    figures = run_chaos("tiny", "kafka-python", "at-least-once")["at-least-once"]
    check_at_least_once(figures)
    assert figures["kills"] >= 3


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENT_LIBRARIES)
def test_small_run(client: ClientLibrary) -> None:
    """The same with more disturbances, and with both kinds of delivery for each client library."""
    figures = run_chaos("small", client, "both")
    once, twice = figures["exactly-once"], figures["at-least-once"]
    check_exactly_once(once)
    check_at_least_once(twice)
    assert min(once["kills"], twice["kills"]) >= 4
