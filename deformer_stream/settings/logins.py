"""Secrets that options name, and the check of logins that consist of a user name and a password."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import SecretStr

from deformer_stream.errors import ConfigError
from deformer_stream.settings.option_files import read_option_file

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Names of this machine. A connection to it needs no encryption."""


def check_login(
    flag: str,
    server: str,
    username: str | None,
    password: SecretStr | None,
    password_file: Path | None,
    encrypted_address: str | None,
) -> None:
    """Check the options of a login: those whose names are `flag` with -username, -password and -password-file.

    Args:
        flag: The option with the address of the server, such as "--schema-registry".
        server: What the server is, for error messages.
        username: The user name, None if it is not set.
        password: The password, None if it is not set.
        password_file: The file with the password, None if it is not set.
        encrypted_address: How an address begins with which the password would be encrypted; None if it is, or needs not
            to be.

    Raises:
        ValueError: The login is incomplete or contradictory, or would be sent without encryption.
    """
    if password is not None and password_file is not None:
        raise ValueError(f"both {flag}-password and {flag}-password-file are set; give one")
    has_password = password is not None or password_file is not None
    if has_password != (username is not None):
        raise ValueError(
            f"a login to {server} requires {flag}-username and {flag}-password-file; give both, or neither"
        )
    if has_password and encrypted_address is not None:
        raise ValueError(f"{flag} would send the password without encryption; write {encrypted_address}…")


def remove_login(text: str, mask: str = "") -> str:
    """Return a text without the logins of addresses in it, such as scheme://user:password@host.

    Args:
        text: The text, such as an address.
        mask: What is put in place of a login; nothing by default, also without the "@".
    """
    return re.sub("//[^/]*@", f"//{mask}@" if mask else "//", text)


def read_password(flag: str, password: SecretStr | None, password_file: Path | None) -> str | None:
    """Return the password of a login, None if there is none. Never log it.

    Args:
        flag: The beginning of the names of the options, such as "--schema-registry".
        password: The password, None if it is not set.
        password_file: The file with the password, None if it is not set.

    Raises:
        ConfigError: The file with the password cannot be read or is empty.
    """
    if password_file is not None:
        return read_secret(f"{flag}-password-file", password_file)
    return password.get_secret_value() if password else None


def read_secret(flag: str, path: Path) -> str:
    """Return the secret (a password, a passphrase or a key) in the first line of a file.

    Args:
        flag: The option with which the user has named the file, for the error message.
        path: The file.

    Raises:
        ConfigError: The file cannot be read, or its first line is empty.
    """
    secret = read_option_file(flag, path).split("\n", 1)[0]
    if not secret:
        raise ConfigError(f"{flag} {path} has an empty first line: write the secret there")
    return secret
