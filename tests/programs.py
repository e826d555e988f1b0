"""Install programs other than Kafka that tests start, from Debian's packages.

    python tests/programs.py                            a browser, Alertmanager and Mosquitto, for `make test`
    python tests/programs.py clang                      packages by name

This file needs only the standard library, so that it runs before the project is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOG_FILE = Path(__file__).resolve().parents[1] / ".kafka" / "programs.log"
"""The output of the package manager; the folder is that of the broker for tests, which `make clean` removes."""

PROGRAMS_BY_PACKAGE = {
    "chromium": ("chromium", "google-chrome"),
    "prometheus-alertmanager": ("prometheus-alertmanager", "alertmanager"),
    "clang": ("clang",),
    "mosquitto": ("mosquitto",),
}
"""By Debian's package, the names that its program may have. One of them must be on the PATH."""

EXTRA_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
"""Folders in which Debian installs servers such as Mosquitto, which are not on the PATH of every user."""

PATH_VARIABLE_BY_PACKAGE = {"chromium": "DEFORMER_TEST_CHROMIUM"}
"""Environment variables that name the program, by Debian's package."""


DEFAULT_PACKAGES = ("chromium", "prometheus-alertmanager", "mosquitto")
"""Debian's packages that `make test` needs."""


def find_program(package: str) -> str | None:
    """Return the path of the program of a package, None if it is not installed."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *EXTRA_FOLDERS))
    return next(filter(None, (shutil.which(name, path=path) for name in PROGRAMS_BY_PACKAGE[package])), None)


def find_missing(packages: Sequence[str]) -> list[str]:
    """Return those of Debian's packages whose programs are neither on the PATH nor named by an environment variable."""
    return [
        package
        for package in packages
        if not os.environ.get(PATH_VARIABLE_BY_PACKAGE.get(package, "")) and find_program(package) is None
    ]


def main() -> int:
    """Install the packages that are missing and return the exit status."""
    missing = find_missing(sys.argv[1:] or DEFAULT_PACKAGES)
    if not missing:
        return 0
    if not (shutil.which("apt-get") and os.geteuid() == 0):
        print(
            f"make: tests need {' and '.join(missing)}: install them (Debian, Ubuntu: `sudo apt-get install "
            f"{' '.join(missing)}`), or leave out their tests with `make check`",
            file=sys.stderr,
        )
        return 4
    LOG_FILE.parent.mkdir(exist_ok=True)
    print(f"installing {' and '.join(missing)} (log: {LOG_FILE})", flush=True)
    install = ("apt-get", "-o", "Dpkg::Use-Pty=0", "install", "-y", "--no-install-recommends", *missing)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with LOG_FILE.open("ab") as log:
        for command in (("apt-get", "update"), install):
            status = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
            if status != 0:
                print(f"make: {' '.join(command)} failed with the status {status}: see {LOG_FILE}", file=sys.stderr)
                return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
