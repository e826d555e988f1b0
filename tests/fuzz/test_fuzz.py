"""The same generators and laws as under the fuzzer, seeded and bounded, without it; and everything it ever found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz.hostile import Fed
from tests.fuzz.targets import TARGETS

RUNS = {"one_message": 300, "messages": 300, "long_tables": 200, "wide_tables": 200, "model_directories": 150}
CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_inputs(name: str) -> None:
    for seed in range(RUNS.get(name, 100)):
        TARGETS[name](random.Random(seed).randbytes(1 << seed % 11))  # noqa: S311


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kept_inputs(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@given(st.binary(max_size=300))
def test_messages_made_of_any_bytes(data: bytes) -> None:
    TARGETS["one_message"](data)


@given(st.binary(max_size=200))
def test_tables_made_of_any_bytes(data: bytes) -> None:
    TARGETS["long_tables"](data)
    TARGETS["wide_tables"](data)


def test_numbers_fed_from_bytes_are_those_bytes_and_then_of_one_seed() -> None:
    one, other = Fed(b"\x05\x07\xff\xff\xff\xff"), Fed(b"")
    assert [one.getrandbits(8), one.getrandbits(4)] == [5, 7]
    assert one.random() == pytest.approx(1, abs=1e-9)
    assert [one.randrange(10) for _ in range(9)] == [other.randrange(10) for _ in range(9)]
    assert Fed(b"\0" * 64).sample(range(100), 3) != [0, 0, 0]


def test_the_command_knows_every_target() -> None:
    assert set(command.TARGETS) == set(TARGETS)
