"""Install a wheel into a fresh environment outside the checkout, and train, replay and consume with it.

    python -m tests.packaging.try_wheel dist/deformer_stream-*.whl            (`make test-wheel`)
    python -m tests.packaging.try_wheel --fresh dist/deformer_stream-*.whl    download all dependencies, too

The programs that the wheel installs run without a compiler on the path. The environment borrows the dependencies of the
one that runs this script, unless `--fresh` is given. After the training, replay and consume run without the packages of
every extra, and consume once more with librdkafka. The consumers read from a broker that is started for them. The time
until each is ready is printed and not checked, because it depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tests.conftest import find_free_port, start_broker

PACKAGES = ("connectors", "deformer_stream", "trainer")
HIDDEN = ("torch", "matplotlib", "confluent_kafka", "pandas", "polars", "sklearn", "scipy", "apprise", "starlette")
"""Modules that no wheel without extras brings; replay and consume run where none of them can be imported."""

NUM_RECORDS, NUM_UNUSUAL = 600, 30
LONGEST_WAIT_SECONDS = 180
DESCRIBE = """
import json, shutil, deformer_stream, trainer, connectors
from deformer_stream.kernels.library import choose_instruction_set, load_library
print(json.dumps({
    "files": [package.__file__ for package in (deformer_stream, trainer, connectors)],
    "version": deformer_stream.__version__,
    "instruction_set": choose_instruction_set(False),
    "has_kernels": load_library(False) is not None,
    "compilers": [name for name in ("cc", "gcc", "clang", "c99") if shutil.which(name)],
}))
"""
"""A program that describes the installation, for the Python of the fresh environment."""

HIDE = """
import sys


class Finder:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)


sys.meta_path[:] = map(Finder, sys.meta_path)
"""
"""A module `sitecustomize`, without its first line, after which Python does not find the packages in `HIDDEN`."""


class Environment:
    """A virtual environment outside the checkout in which the wheel is installed.

    Args:
        folder: An empty folder; the environment and all files that its programs write are in it.
        wheel: The wheel.
        is_fresh: Whether all dependencies are downloaded. Otherwise those of the running Python are used.
    """

    def __init__(self, folder: Path, wheel: Path, is_fresh: bool) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        install = [self.bin / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if is_fresh:
            subprocess.run([*install, "-c", "constraints.txt", f"{wheel}[train,librdkafka]"], check=True)
        else:
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            site_packages = folder / "venv" / "lib" / version / "site-packages"
            # Unlike the folder of the environment itself, this one is only added to the import path: the `.pth` file
            # in it, which leads to the checkout, is not read.
            (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
            subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)
        # Nothing of the environment in which this script runs: no compiler, no settings, no path of the checkout.
        self.variables = {"PATH": str(self.bin), "HOME": str(folder), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

    def hide(self, modules: Iterable[str]) -> None:
        """Let programs that are started from now on not find some modules, as if they were not installed.

        Args:
            modules: The names of packages. Those of an earlier call can be found again.
        """
        (site_packages,) = self.folder.glob("venv/lib/python*/site-packages")
        (site_packages / "sitecustomize.py").write_text(f"HIDDEN = {sorted(modules)!r}\n{HIDE}")

    def start(self, *command: object) -> subprocess.Popen[str]:
        """Start a program of the environment, whose standard output and error are pipes."""
        words = [str(self.bin / str(command[0])), *map(str, command[1:])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, env=self.variables, cwd=self.folder, text=True, **pipes)

    def run(self, *command: object) -> str:
        """Run a program of the environment and return its standard output; end this script if it fails."""
        began = time.monotonic()
        process = self.start(*command)
        out, err = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(map(str, command))} ended with exit code {process.returncode}:\n{out}\n{err}")
        print(f"  {time.monotonic() - began:6.1f} s  {' '.join(map(str, command))[:100]}".splitlines()[0], flush=True)
        return out


def check_files(wheel: Path) -> None:
    """Check the files of a wheel: the three packages with their markers of types, and nothing else.

    Raises:
        AssertionError: A file is missing or superfluous.
    """
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGES), folders
    missing = {f"{package}/py.typed" for package in PACKAGES} - set(names)
    assert not missing, f"the wheel lacks {missing}"
    superfluous = [name for name in names if name.endswith((".c", ".h", ".pyc", "CMakeCache.txt"))]
    assert not superfluous, f"the wheel holds files of the build: {superfluous}"


def check_dependencies(wheel: Path) -> None:
    """Check that the dependencies which a wheel names are installed here, because the environment borrows them.

    Raises:
        PackageNotFoundError: One of them is not installed.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    for line in lines:
        if line.startswith("Requires-Dist: ") and "extra ==" not in line:
            match = re.match(r"Requires-Dist: ([A-Za-z0-9._-]+)", line)
            assert match, line
            metadata.version(match[1])


def write_table(path: Path, num_unusual: int, seed: int) -> None:
    """Write records of six sensors that follow one another; in the last `num_unusual` records one sensor does not.

    Args:
        path: The CSV file.
        num_unusual: The number of unusual records.
        seed: The seed of the random numbers.
    """
    draw = random.Random(seed)  # noqa: S311 -- not for cryptography
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["record", *(f"sensor_{i}" for i in range(6))])
        for k in range(NUM_RECORDS):
            load = draw.gauss(0, 1)
            values = [10 * i + load + draw.gauss(0, 0.1) for i in range(6)]
            if k >= NUM_RECORDS - num_unusual:
                values[draw.randrange(6)] += 8
            writer.writerow([f"r{seed}-{k}", *(round(x, 4) for x in values)])


def read_alerts(path: Path) -> dict[str, set[str]]:
    """Return the ids of the records with alerts, by alert id."""
    lines = path.read_text().splitlines() if path.exists() else []
    records: dict[str, set[str]] = {}
    for line in lines:
        alert = json.loads(line)
        if "record" in alert:
            records.setdefault(alert["id"], set()).add(alert["record"])
    return records


def consume(environment: Environment, expected: dict[str, set[str]], client: str) -> float:
    """Consume the events with the wheel's program from a real broker until all alerts of the replay have been raised.

    Args:
        environment: The environment, whose folder has the model and the events.
        expected: The alerts of the replay of the same events.
        client: The client library for Kafka.

    Returns:
        Seconds from the start of the program until it is ready.

    Raises:
        AssertionError: The alerts differ, or the program fails.
    """
    folder = environment.folder
    with start_broker() as broker:
        addresses = ("--bootstrap-servers", broker.bootstrap)
        produce = ("deformer-stream", "produce", folder / "stream.csv", "--topic", "events", "--partitions", 1)
        environment.run(*produce, *addresses)
        port = find_free_port()
        began = time.monotonic()
        live = folder / f"{client}.jsonl"
        files = ("--alerts", live, "--http", f"127.0.0.1:{port}", "--client", client)
        process = environment.start(
            "deformer-stream", "consume", "--model", folder / "model", "--topic", "events", *addresses, *files
        )
        try:
            ready_after = None
            while read_alerts(live).keys() != expected.keys():
                assert process.poll() is None, f"consume ended with {process.returncode}:\n{process.communicate()}"
                assert time.monotonic() < began + LONGEST_WAIT_SECONDS, (
                    f"{len(read_alerts(live))} alerts instead of {len(expected)}"
                )
                if ready_after is None and is_ready(port):
                    ready_after = time.monotonic() - began
                time.sleep(0.05)
        finally:
            process.terminate()
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"consume ended with {process.returncode}:\n{out}\n{err}"
        assert "scoring runs without compiled code" not in err + out
    return time.monotonic() - began if ready_after is None else ready_after


def is_ready(port: int) -> bool:
    """Return whether the probe /readyz of a consumer on this machine answers that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Try the wheel and print what was done and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--fresh", action="store_true", help="download all dependencies")
    parser.add_argument("--pure", action="store_true", help="the wheel has no kernels")
    parser.add_argument("--without-kafka", action="store_true", help="do not start a broker")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    check_files(wheel)
    if not arguments.fresh:
        check_dependencies(wheel)
    folder = Path(tempfile.mkdtemp(prefix="deformer-wheel-"))
    try:
        environment = Environment(folder, wheel, arguments.fresh)
        found = json.loads(environment.run("python", "-c", DESCRIBE).splitlines()[-1])
        print(json.dumps(found))
        assert all(str(folder) in file for file in found["files"]), "the packages are imported from another place"
        assert found["version"] == wheel.name.split("-")[1], "the package has another version than the wheel"
        assert not found["compilers"], "there is a compiler on the path"
        assert found["has_kernels"] != arguments.pure, "the kernels are missing, or in a wheel without kernels"
        assert found["version"] in environment.run("deformer-stream", "--version")
        write_table(folder / "normal.csv", 0, 1)
        write_table(folder / "stream.csv", NUM_UNUSUAL, 2)
        size = ("--preset", "tiny", "--epochs", 10, "--max-time", "60s", "--device", "cpu")
        environment.run("deformer-train", folder / "normal.csv", "--out", folder / "model", *size)
        environment.run("deformer-stream", "produce", folder / "stream.csv", "--output", folder / "events.jsonl")
        replay = ("deformer-replay", "--model", folder / "model", "--alerts", folder / "replayed.jsonl")
        environment.run(*replay, folder / "events.jsonl")
        alerts = read_alerts(folder / "replayed.jsonl")
        print(f"  {len(alerts)} alerts, {NUM_UNUSUAL} unusual records of {NUM_RECORDS}")
        assert len(alerts) >= NUM_UNUSUAL * 0.8, "the replay has raised too few alerts"
        # Without kernels, scoring needs PyTorch.
        hidden = set(HIDDEN) - ({"torch"} if arguments.pure else set())
        environment.hide(hidden)
        replay = ("deformer-replay", "--model", folder / "model", "--alerts", folder / "without_extras.jsonl")
        environment.run(*replay, folder / "events.jsonl")
        same = (folder / "without_extras.jsonl").read_bytes() == (folder / "replayed.jsonl").read_bytes()
        assert same, "the alerts differ without the packages of the extras"
        print(f"  without {', '.join(sorted(hidden))}: the same bytes")
        if not arguments.without_kafka:
            for client in ("kafka-python", "librdkafka"):
                environment.hide(hidden - ({"confluent_kafka"} if client == "librdkafka" else set()))
                seconds = consume(environment, alerts, client)
                print(f"  consume with {client} was ready after {seconds:.1f} s, and raised the same alerts")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
