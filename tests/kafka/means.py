"""What a Kafka broker needs of this machine: Java with the jars of the pom beside this file, or a container engine.

The standard library is all this file needs, so that it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORE = HERE.parents[1] / ".kafka"
LIB = STORE / "lib"
POM = HERE / "pom.xml"
JAVA = 17


class BrokerError(Exception):
    """No broker can be had; the message is one line with the remedy. Commands end with 4, "a service is missing"."""


def kafka_version() -> str:
    """The version of Kafka that the pom names."""
    found = re.search(r"<kafka\.version>(.+?)</kafka\.version>", POM.read_text())
    if found is None:
        raise BrokerError(f"{POM}: names no <kafka.version>: restore the file")
    return found.group(1)


def image() -> str:
    """The container image of that version."""
    return f"apache/kafka:{kafka_version()}"


def _answers(*command: str) -> str | None:
    """Output of a command, None where it is missing, fails or does not answer in time."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def has_java() -> bool:
    found = re.search(r'version "(\d+)', _answers("java", "-version") or "")
    return found is not None and int(found.group(1)) >= JAVA


def container_engine() -> str | None:
    """`docker` or `podman`, whichever answers."""
    return next((name for name in ("docker", "podman") if _answers(name, "info") is not None), None)


def _pom_digest() -> str:
    return hashlib.sha256(POM.read_bytes()).hexdigest()


def has_jars() -> bool:
    """Whether the jars of exactly this pom are in place."""
    stamp = LIB / "pom.sha256"
    return stamp.is_file() and stamp.read_text() == _pom_digest()


def _run_logged(what: str, log: Path, *command: str) -> None:
    print(f"kafka: {what} …", file=sys.stderr, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False).returncode
    if code != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line or "E:" in line]
        first = errors[0][:300] if errors else f"exit {code}"
        raise BrokerError(f"{what} failed ({first}): see {log}, then run the command again")


def _fetch_jars() -> None:
    """Let Maven copy the jars; they become visible only when all of them are there."""
    partial = STORE / "lib.partial"
    shutil.rmtree(partial, ignore_errors=True)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    _run_logged(
        f"fetching Apache Kafka {kafka_version()} with Maven",
        STORE / "maven.log",
        *["mvn", "-B", "-ntp", "-Dstyle.color=never", "-f", str(POM), *goal],
    )
    (partial / "pom.sha256").write_text(_pom_digest())
    shutil.rmtree(LIB, ignore_errors=True)
    partial.rename(LIB)


def ensure() -> None:
    """Make `start` possible: jars, or else a container image, or else the Debian packages and then the jars.

    Raises BrokerError with the remedy where none of it can be done.
    """
    if has_java() and has_jars():
        return
    maven = shutil.which("mvn") is not None
    if not (has_java() and maven):
        engine = container_engine()
        if engine is not None:
            _run_logged(f"fetching {image()} with {engine}", STORE / f"{engine}.log", engine, "pull", image())
            return
        if not (shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0):
            raise BrokerError(
                f"no Java {JAVA} with Maven, no container engine: install them (Debian, Ubuntu: `sudo apt-get install"
                f" openjdk-{JAVA}-jre-headless maven`), or start Docker, or set DEFORMER_TEST_BOOTSTRAP=host:port"
            )
        apt = ("apt-get", "-o", "Dpkg::Use-Pty=0")
        packages = [f"openjdk-{JAVA}-jre-headless", "maven"]
        _run_logged("refreshing the package lists", STORE / "apt.log", *apt, "update")
        _run_logged(
            f"installing {' and '.join(packages)}",
            STORE / "apt.log",
            *["env", "DEBIAN_FRONTEND=noninteractive", *apt, "install", "-y", "--no-install-recommends", *packages],
        )
    _fetch_jars()
