"""Runs the generators and invariants of the fuzzer with fixed seeds, and all inputs that the fuzzer ever found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import num_examples
from tests.fuzz import __main__ as command
from tests.fuzz.hostile import FedRandom
from tests.fuzz.targets import TARGETS

RUNS = {"one_message": 300, "messages": 300, "long_tables": 200, "wide_tables": 200, "model_directories": 150}
CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_inputs_keep_the_invariants(name: str) -> None:
    for seed in range(num_examples(RUNS.get(name, 100))):
        TARGETS[name](random.Random(seed).randbytes(1 << seed % 11))  # noqa: S311


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kept_inputs_keep_the_invariants(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@given(st.binary(max_size=300))
def test_any_bytes_as_messages_keep_the_invariants(data: bytes) -> None:
    TARGETS["one_message"](data)


@given(st.binary(max_size=200))
def test_any_bytes_as_tables_keep_the_invariants(data: bytes) -> None:
    TARGETS["long_tables"](data)
    TARGETS["wide_tables"](data)


@given(st.binary(max_size=200))
def test_any_bytes_as_messages_of_a_registry_keep_the_invariants(data: bytes) -> None:
    TARGETS["registry_messages"](data)


def test_fed_random_returns_the_bytes_and_then_seeded_numbers() -> None:
    one, other = FedRandom(b"\x05\x07\xff\xff\xff\xff"), FedRandom(b"")
    assert [one.getrandbits(8), one.getrandbits(4)] == [5, 7]
    assert one.random() == pytest.approx(1, abs=1e-9)
    assert [one.randrange(10) for _ in range(9)] == [other.randrange(10) for _ in range(9)]
    assert FedRandom(b"\0" * 64).sample(range(100), 3) != [0, 0, 0]


def test_command_lists_every_target() -> None:
    assert set(command.TARGETS) == set(TARGETS)
