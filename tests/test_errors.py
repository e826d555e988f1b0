"""Tests that every error has an exit code and a docstring, and that the overview lists it."""

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
def test_exit_codes_are_documented(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.DeformerError)
    assert kind.exit_code == code
    assert str(kind("what: where; remedy")) == "what: where; remedy"
    assert kind.__doc__
    assert name in (errors.__doc__ or "")
    assert f"(exit code {code})" in (errors.__doc__ or "")


def test_every_error_is_tested() -> None:
    assert {kind.__name__ for kind in errors.DeformerError.__subclasses__()} == CODES.keys()
