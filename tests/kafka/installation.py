"""Install what a Kafka broker needs on this machine: Java with the jars that `pom.xml` lists, or a container image.

This file needs only the standard library, so that it runs before the project is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT_FOLDER = Path(__file__).resolve().parent
DATA_FOLDER = SCRIPT_FOLDER.parents[1] / ".kafka"
"""Where jars, logs and the state of a background broker are stored."""
JAR_FOLDER = DATA_FOLDER / "lib"
POM = SCRIPT_FOLDER / "pom.xml"
MIN_JAVA_VERSION = 17


class BrokerError(Exception):
    """A broker cannot be installed, started or reached.

    The message is one line with the remedy. Commands that fail with it end with exit code 4, "a service is missing".
    """


def kafka_version() -> str:
    """Return the version of Kafka that `pom.xml` names."""
    match = re.search(r"<kafka\.version>(.+?)</kafka\.version>", POM.read_text())
    if match is None:
        raise BrokerError(f"{POM} contains no <kafka.version>: restore the file")
    return match.group(1)


def get_image_name() -> str:
    """Return the name of the container image of that version."""
    return f"apache/kafka:{kafka_version()}"


def _run_and_capture(*command: str) -> str | None:
    """Return the output of a command, or None if it is missing, fails or does not end within 20 seconds."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return result.stdout + result.stderr if result.returncode == 0 else None


def has_java() -> bool:
    """Return whether a recent version of Java is installed."""
    match = re.search(r'version "(\d+)', _run_and_capture("java", "-version") or "")
    return match is not None and int(match.group(1)) >= MIN_JAVA_VERSION


def find_container_engine() -> str | None:
    """Return "docker" or "podman" if its service is running, otherwise None."""
    return next((name for name in ("docker", "podman") if _run_and_capture(name, "info") is not None), None)


def _compute_pom_digest() -> str:
    """Return the checksum of `pom.xml`, which is stored with the jars to detect a changed version."""
    return hashlib.sha256(POM.read_bytes()).hexdigest()


def has_jars() -> bool:
    """Return whether the jars that the present `pom.xml` lists are installed."""
    digest_file = JAR_FOLDER / "pom.sha256"
    return digest_file.is_file() and digest_file.read_text() == _compute_pom_digest()


def _run_logged(description: str, log: Path, *command: str) -> None:
    """Run a command with its output in a log file.

    Args:
        description: What the command does, for messages.
        log: The log file.
        *command: The command and its arguments.

    Raises:
        BrokerError: The command failed. The message quotes the first error in the log.
    """
    print(f"kafka: {description} …", file=sys.stderr, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
    if code != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line or "E:" in line]
        first_error = errors[0][:300] if errors else f"exit {code}"
        raise BrokerError(f"{description} failed ({first_error}): see {log}, then run the command again")


def _fetch_jars() -> None:
    """Download the jars with Maven. They get their final place only when all of them are complete."""
    partial_folder = DATA_FOLDER / "lib.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={partial_folder}"]
    _run_logged(
        f"fetching Apache Kafka {kafka_version()} with Maven",
        DATA_FOLDER / "maven.log",
        *["mvn", "-B", "-ntp", "-Dstyle.color=never", "-f", str(POM), *goal],
    )
    (partial_folder / "pom.sha256").write_text(_compute_pom_digest())
    shutil.rmtree(JAR_FOLDER, ignore_errors=True)
    partial_folder.rename(JAR_FOLDER)


def ensure() -> None:
    """Install what a broker needs, unless it is installed.

    The first possible way is taken: download the jars if Java and Maven are installed; pull the container image if a
    container engine is running; install the Debian packages, if the user is root, and then download the jars.

    Raises:
        BrokerError: None of this is possible. The message states the remedy.
    """
    if has_java() and has_jars():
        return
    has_maven = shutil.which("mvn") is not None
    if not (has_java() and has_maven):
        engine = find_container_engine()
        if engine is not None:
            image = get_image_name()
            _run_logged(f"fetching {image} with {engine}", DATA_FOLDER / f"{engine}.log", engine, "pull", image)
            return
        if not (shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0):
            raise BrokerError(
                f"no Java {MIN_JAVA_VERSION} with Maven, no container engine: install them (Debian, Ubuntu: "
                f"`sudo apt-get install openjdk-{MIN_JAVA_VERSION}-jre-headless maven`), or start Docker, or set "
                "DEFORMER_TEST_BOOTSTRAP=host:port"
            )
        apt = ("apt-get", "-o", "Dpkg::Use-Pty=0")
        packages = [f"openjdk-{MIN_JAVA_VERSION}-jre-headless", "maven"]
        _run_logged("refreshing the package lists", DATA_FOLDER / "apt.log", *apt, "update")
        _run_logged(
            f"installing {' and '.join(packages)}",
            DATA_FOLDER / "apt.log",
            *["env", "DEBIAN_FRONTEND=noninteractive", *apt, "install", "-y", "--no-install-recommends", *packages],
        )
    _fetch_jars()
