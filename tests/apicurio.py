"""Run a real schema registry for tests: Apicurio Registry, which Maven fetches, with its data in memory.

    python tests/apicurio.py                            fetch it, for `make test`

This file needs only the standard library, so that it runs before the project is installed.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "3.0.9"
"""The newest version that runs with Java 17; 3.3 needs Java 21."""

COPY_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy"
"""Goal of Maven. Later versions of the plugin also read the parent POM, which this archive does not need."""

FOLDER = Path(__file__).resolve().parents[1] / ".kafka" / "apicurio"
"""Where it is installed, beside the broker for tests. `make clean` removes it."""

START_SECONDS = 180.0
PATH = "/apis/ccompat/v7"
"""Path of the interface of Confluent's registry."""


def is_installed() -> bool:
    """Return whether this version was fetched."""
    return (FOLDER / VERSION).exists()


def ensure() -> int:
    """Fetch the registry if it is missing, and return the exit status."""
    if is_installed():
        return 0
    if shutil.which("mvn") is None or shutil.which("java") is None:
        print("make: tests need a schema registry, and Maven and Java 17 to fetch it: install them", file=sys.stderr)
        return 4
    print(f"fetching Apicurio Registry {VERSION} with Maven …", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
    command = ["mvn", "-q", "-B", COPY_GOAL, f"-Dartifact={artifact}", f"-DoutputDirectory={FOLDER}"]
    with (FOLDER / "maven.log").open("wb") as log:
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            print(f"make: fetching {artifact} failed: see {FOLDER / 'maven.log'}", file=sys.stderr)
            return 4
    (archive,) = FOLDER.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(FOLDER / "new", filter="data")
    archive.unlink()
    (FOLDER / "new").rename(FOLDER / VERSION)
    return 0


@contextmanager
def run_apicurio() -> Iterator[str]:
    """Run the registry on a free port of the loopback interface, and return the address of Confluent's interface."""
    if not is_installed():
        raise RuntimeError("the schema registry for tests is missing: run `python tests/apicurio.py`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (program,) = (FOLDER / VERSION).glob("*-runner.jar")
    options = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dquarkus.http.host=127.0.0.1"]
    process = subprocess.Popen(
        ["java", *options, f"-Dquarkus.http.port={port}", "-jar", str(program)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}{PATH}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the schema registry did not start (exit status {process.poll()})")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    """Return whether the registry answers requests."""
    try:
        with urllib.request.urlopen(f"{url}/subjects", timeout=5.0) as response:  # noqa: S310 - an address of our own
            return isinstance(json.load(response), list)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(ensure())
