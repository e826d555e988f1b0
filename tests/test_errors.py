"""Every error of the tree has its exit code and a docstring that says what the operator does next."""

from __future__ import annotations

import pytest

from deformer_stream import errors

CODES = {
    "ConfigError": 2,
    "InputError": 3,
    "ArtifactError": 3,
    "StateError": 3,
    "Unavailable": 4,
    "InvariantViolated": 1,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_exit_code(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.DeformerError)
    assert kind.exit_code == code
    assert str(kind("what: where; remedy")) == "what: where; remedy"
    assert kind.__doc__
    assert name in (errors.__doc__ or "")
    assert f"(exit code {code})" in (errors.__doc__ or "")


def test_nothing_is_missing_from_the_table() -> None:
    assert {kind.__name__ for kind in errors.DeformerError.__subclasses__()} == CODES.keys()
