"""Tests that every error has an exit code and a docstring, and that the overview lists it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free disk space or repair the disk"),
        (errno.EIO, "free disk space or repair the disk"),
        (errno.ENOENT, "check that its folder exists"),
        (errno.EACCES, "check the permissions"),
    ],
)
def test_remedy_fits_the_reason_why_writing_failed(number: int, remedy: str) -> None:
    with (
        pytest.raises(errors.Unavailable, match=rf"a\.csv: writing failed \({os.strerror(number)}\); {remedy}"),
        errors.map_write_errors(Path("a.csv")),
    ):
        raise OSError(number, os.strerror(number))
