"""The error tree, named by what the operator does next.

    DeformerError
    ├── ConfigError        (exit 2)  change a flag, a variable or the configuration file
    ├── InputError         (exit 3)  mend or exclude the input data
    ├── ArtifactError      (exit 3)  restore or retrain the model directory
    ├── StateError         (exit 3)  say what to do without the saved state, or restore it
    ├── Unavailable        (exit 4)  start or reach the service, then run again
    └── InvariantViolated  (exit 1)  report a bug

A message is one line: what is wrong, where, and the remedy. An event that is refused is no exception but a value,
`deformer_stream.engine.events.Rejected`: bad input never stops the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DeformerError(Exception):
    """An error whose message is meant for the operator; `exit_code` is what the command ends with."""

    exit_code = 1


class ConfigError(DeformerError):
    """A flag, an environment variable or the configuration file asks for something impossible."""

    exit_code = 2


class InputError(DeformerError):
    """The input data cannot be read, or not as what it is said to be."""

    exit_code = 3


class ArtifactError(DeformerError):
    """The model directory is missing, cut short, altered, or of another format version."""

    exit_code = 3


class StateError(DeformerError):
    """What was saved of open records is missing, cut short, altered, or of another format version."""

    exit_code = 3


class Unavailable(DeformerError):  # noqa: N818 - named by what is the matter, as the others are
    """A service (a broker, a topic) cannot be reached now; running again later may succeed."""

    exit_code = 4


class InvariantViolated(DeformerError):  # noqa: N818
    """The program contradicts itself: a bug, never the operator's fault."""

    exit_code = 1


@contextmanager
def map_write_errors(path: Path) -> Iterator[None]:
    """Maps what the file system raises while `path` is being written to `Unavailable`. A reader that went away
    (`| head`) stays a `BrokenPipeError`: it is no fault, and the command line ends on it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(
            f"{path}: writing failed ({error.strerror or error}); make room or mend the disk, then run again"
        ) from error
