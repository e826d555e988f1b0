"""The exceptions of the package, classified by what the operator has to do next.

    DeformerError
    ├── ConfigError        (exit code 2)  change an option, an environment variable or the configuration file
    ├── InputError         (exit code 3)  correct or exclude the input data
    ├── ArtifactError      (exit code 3)  restore the model directory, or train again
    ├── StateError         (exit code 3)  restore the saved state, or choose how to continue without it
    ├── Unavailable        (exit code 4)  start the service or make it reachable, then run again
    │   └── StoppedWaiting                the same; the process was to end before the service responded
    └── InvariantViolated  (exit code 1)  report a bug

A message is one line that states what failed, where, and the remedy. A single reading that cannot be accepted does not
raise an exception. The decoder returns it as a value, `deformer_stream.engine.events.Rejection`, so that bad input
never stops the stream.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DeformerError(Exception):
    """The base class of all errors whose message is meant for the operator.

    The command line prints the message without a traceback and ends with the exit code of the class.

    Attributes:
        exit_code: The exit code of a command that ends with this error.
    """

    exit_code = 1


class ConfigError(DeformerError):
    """An invalid setting: an option, an environment variable or an entry of the configuration file. Exit code 2.

    Raised by the command line, by connectors, and by functions that check a combination of settings. The operator
    changes the setting that the message names.
    """

    exit_code = 2


class InputError(DeformerError):
    """Input data that cannot be read, or that does not have the expected form. Exit code 3.

    Raised by file connectors, by the decoders of tables and by the trainer. The operator corrects the file, row or
    column that the message names, or excludes it.
    """

    exit_code = 3


class ArtifactError(DeformerError):
    """A model directory that is missing, incomplete, altered, or of an unsupported format version. Exit code 3.

    Raised by `deformer_stream.model_store`. The operator restores the directory from a copy, or trains again.
    """

    exit_code = 3


class StateError(DeformerError):
    """Saved state of open records that is missing, incomplete, altered, or of an unsupported version. Exit code 3.

    Raised by `deformer_stream.codec.state` and by the Kafka connector. The operator restores the state, or chooses with
    `--lost-state` how to continue without it.
    """

    exit_code = 3


class Unavailable(DeformerError):  # noqa: N818 - named after the condition that the operator has to end
    """A service or a file system that cannot be used now, such as a broker or a full disk. Exit code 4.

    Raised by connectors and while files are written. The same command may succeed later, so the operator makes the
    service available and runs it again.
    """

    exit_code = 4


class StoppedWaiting(Unavailable):
    """A service did not respond, and the wait for it was not continued because the process has received a signal to
    end.

    Raised by connectors whose calls wait for a service. A caller that can leave its work to the next run ends without
    an error.
    """


class AlphaOutOfReachWarning(UserWarning):
    """The warning that no record can raise an alert at a false-alarm rate, as the calibration has too few records.

    The library issues it. The commands log the event `alpha_out_of_reach` instead.
    """


class InvariantViolated(DeformerError):  # noqa: N818 - named after the condition, as `Unavailable`
    """A contradiction inside the program, which is always a bug. Exit code 1.

    Raised by checks inside the engine and the connectors. The operator reports the bug.
    """

    exit_code = 1


def summarize_error(error: Exception) -> str:
    """Return the first line of the text of an error without its full stop, or the name of its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


_WRITE_REMEDIES = {
    errno.ENOENT: "check that its folder exists and that no other program renames or deletes files in it",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EPERM: "check the permissions of the file and of its folder",
    errno.EROFS: "choose a file system that can be written",
}
"""What to do about errors of the operating system that are not those of a full or damaged disk."""


@contextmanager
def map_write_errors(path: Path) -> Iterator[None]:
    """Return a context manager that replaces an `OSError` by `Unavailable`, for code that writes a file.

    `BrokenPipeError` is not replaced. It means that the program that reads the output ended first (as in `... | head`),
    which is not a failure.

    Args:
        path: The file or directory that is written, for the error message.

    Raises:
        Unavailable: Writing fails, for example because the disk is full.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # although it is an OSError
    except OSError as error:
        remedy = _WRITE_REMEDIES.get(error.errno or 0, "free disk space or repair the disk")
        raise Unavailable(
            f"{path}: writing failed ({error.strerror or error}); {remedy}, then run the command again"
        ) from error
