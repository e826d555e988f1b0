"""A small run of the chaos test. It has a file of its own, because it takes as long as many other tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import CLIENT_LIBRARIES, ROOT

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.mark.parametrize("client", CLIENT_LIBRARIES)
def test_small_chaos_run(client: str) -> None:
    """Consumers that are killed and disturbed raise the same alerts as an undisturbed one, with both kinds of
    delivery.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--size", "small", "--seed", "3", "--client", client],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["alerts"] > 100
    once, twice = figures["exactly-once"], figures["at-least-once"]
    assert once["lost"] == once["extra"] == once["doubled"] == once["letters_lost"] == once["letters_doubled"] == 0
    assert twice["lost"] == twice["extra"] == twice["letters_lost"] == 0
    assert min(once["kills"], twice["kills"]) >= 4
