"""Reading of small files that options name, such as files with secrets."""

from __future__ import annotations

from pathlib import Path

from deformer_stream.errors import ConfigError

MAX_OPTION_FILE_BYTES = 2**20
"""Largest size of a file that an option names. Files with secrets, users or addresses are much smaller."""


def read_option_file(flag: str, path: Path) -> str:
    """Return the text of a small file that an option names. No error repeats a part of it, because it may be a secret.

    Args:
        flag: The option, for error messages.
        path: The file.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_OPTION_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{flag} {path} cannot be read ({reason}): check the path and the permissions") from None
    if len(content) > MAX_OPTION_FILE_BYTES:
        raise ConfigError(f"{flag} {path} has more than {MAX_OPTION_FILE_BYTES} bytes: check that it is the right file")
    return text.replace("\r\n", "\n")
