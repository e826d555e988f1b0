"""Compile the kernels for aarch64, and compare a replay under qemu with one on this machine.

    python -m tests.packaging.try_aarch64          (`make test-aarch64`)

The emulator, Clang with its linker, and Python for aarch64 are packages of Debian that are unpacked and not installed.
The dependencies are wheels for aarch64. Everything lies in `build/aarch64`. A run downloads 300 MB and takes minutes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.packaging.try_wheel import NUM_UNUSUAL, write_table

FOLDER = ROOT / "build" / "aarch64"
TOOLS = (
    "qemu-user-static",
    "clang-14",
    "libclang-cpp14",
    "libclang-common-14-dev",
    "libclang1-14",
    "libllvm14",
    "lld-14",
)
"""Debian's packages with the programs that run on this machine."""

PYTHON = (
    "libc6",
    "libc6-dev",
    "linux-libc-dev",
    "libgcc-s1",
    "libgcc-12-dev",
    "gcc-12-base",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libexpat1",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "libcrypt1",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
)
"""Debian's packages for aarch64: Python, what it loads, and the headers of the C library."""

PLATFORMS = ("manylinux_2_34_aarch64", "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
MAX_SCORE_DIFFERENCE = 1e-4
"""Largest difference of scores, relative to a score of at least one. Sums of float32 have another order."""


def unpack_debian(packages: Sequence[str], target: Path, architecture: str) -> None:
    """Download packages of Debian and unpack them into a folder, without changing what is installed.

    Args:
        packages: Their names.
        target: The folder.
        architecture: The architecture as Debian names it.

    Raises:
        CalledProcessError: A package cannot be downloaded.
    """
    state = FOLDER / f"apt-{architecture}"
    for folder in (state / "lists" / "partial", state / "cache" / "archives" / "partial", state / "packages", target):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": architecture,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    lines = [f'{name} "{value}";' for name, value in options.items()]
    (state / "apt.conf").write_text("\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};', ""]))
    environment = {**os.environ, "APT_CONFIG": str(state / "apt.conf")}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
    subprocess.run(["apt-get", "download", "-qq", *packages], check=True, env=environment, cwd=state / "packages")
    for package in (state / "packages").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)


def build_kernels(tools: Path, root: Path, output: Path) -> None:
    """Compile the kernels with Clang for aarch64.

    Args:
        tools: The folder with Clang.
        root: The folder with the headers and libraries of aarch64.
        output: The folder of the shared libraries.
    """
    flags = f"--gcc-toolchain={root / 'usr'}"
    definitions = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": tools / "usr" / "lib" / "llvm-14" / "bin" / "clang",
        "CMAKE_C_COMPILER_TARGET": "aarch64-linux-gnu",
        "CMAKE_SYSROOT": root,
        "CMAKE_C_FLAGS": flags,
        "CMAKE_EXE_LINKER_FLAGS": "-fuse-ld=lld",
        "CMAKE_MODULE_LINKER_FLAGS": "-fuse-ld=lld",
        "OUTPUT_FOLDER": output,
    }
    libraries = tools / "usr" / "lib"
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries / 'x86_64-linux-gnu'}:{libraries / 'llvm-14' / 'lib'}"}
    # A build file in the sources, which an editable installation writes, would be preferred to the folder given here.
    sources = FOLDER / "csrc"
    shutil.rmtree(sources, ignore_errors=True)
    unwanted = shutil.ignore_patterns("CMakeCache.txt", "CMakeFiles", "build.ninja", ".ninja*")
    shutil.copytree(ROOT / "deformer_stream" / "kernels" / "csrc", sources, ignore=unwanted)
    shutil.rmtree(FOLDER / "kernels", ignore_errors=True)
    configure = ["cmake", "-G", "Ninja", "-S", sources, "-B", FOLDER / "kernels"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", FOLDER / "kernels"], check=True, env=environment, stdout=subprocess.DEVNULL)


def install_packages(site_packages: Path) -> None:
    """Install the checkout without kernels, and its dependencies for aarch64, into a folder.

    Args:
        site_packages: The folder, which is emptied before.
    """
    shutil.rmtree(site_packages, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", FOLDER / "wheel", ROOT]
    shutil.rmtree(FOLDER / "wheel", ignore_errors=True)
    subprocess.run(build, check=True, env={**os.environ, "DEFORMER_PURE_WHEEL": "1"}, stdout=subprocess.DEVNULL)
    (wheel,) = (FOLDER / "wheel").glob("*.whl")
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        site_packages,
    ]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for_python = ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *platforms, *for_python, *constraints, *dependencies], check=True)
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)


def read_alerts(path: Path) -> list[dict[str, Any]]:
    """Return the alerts of a file of JSON lines."""
    return [alert for alert in map(json.loads, path.read_text().splitlines()) if "record" in alert]


def compare(native: list[dict[str, Any]], emulated: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of the scores of alerts.

    Args:
        native: The alerts of this machine.
        emulated: Those of the emulator.

    Raises:
        AssertionError: An alert is missing, or was raised at another reading.
    """
    assert native, "the replay has raised no alert"
    keys = [[(alert["id"], alert["record"], alert["raised_at"]) for alert in alerts] for alerts in (native, emulated)]
    assert keys[0] == keys[1], "the alerts differ"
    pairs = zip(native, emulated, strict=True)
    difference = max(abs(a["score"] - b["score"]) / max(1.0, abs(a["score"])) for a, b in pairs)
    assert math.isfinite(difference)
    assert difference < MAX_SCORE_DIFFERENCE, f"scores differ by {difference}"
    return difference


def main() -> None:
    """Build, replay on both, compare, and print what was done."""
    if platform.machine() != "x86_64":
        sys.exit("make: this check runs on x86-64 and emulates aarch64")
    if shutil.which("apt-get") is None:
        sys.exit("make: this check unpacks packages of Debian 12: run it there, or in a container of Debian 12")
    tools, root, site_packages = FOLDER / "tools", FOLDER / "root", FOLDER / "site-packages"
    if not (tools / "usr" / "bin" / "qemu-aarch64-static").exists():
        unpack_debian(TOOLS, tools, "amd64")
    if not (root / "usr" / "bin" / "python3.11").exists():
        unpack_debian(PYTHON, root, "arm64")
    install_packages(site_packages)
    build_kernels(tools, root, site_packages / "deformer_stream" / "kernels" / "compiled")

    write_table(FOLDER / "normal.csv", 0, 1)
    write_table(FOLDER / "stream.csv", NUM_UNUSUAL, 2)
    python = [sys.executable, "-m"]
    model, events = FOLDER / "model", FOLDER / "events.jsonl"
    size = ("--preset", "tiny", "--epochs", "10", "--max-time", "60s", "--device", "cpu")
    shutil.rmtree(model, ignore_errors=True)
    subprocess.run([*python, "trainer.cli", FOLDER / "normal.csv", "--out", model, *size], check=True, cwd=ROOT)
    produce = ("deformer_stream.cli.main", "produce", FOLDER / "stream.csv", "--output", events)
    subprocess.run([*python, *produce], check=True, cwd=ROOT)
    replay = ("deformer_stream.cli.main", "replay", events, "--model", model, "--alerts")
    subprocess.run([*python, *replay, FOLDER / "native.jsonl"], check=True, cwd=ROOT)
    emulator = [tools / "usr" / "bin" / "qemu-aarch64-static", "-L", root, root / "usr" / "bin" / "python3.11"]
    variables = {"PYTHONPATH": str(site_packages), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    describe = (
        "import platform; from deformer_stream.kernels.library import choose_instruction_set, load_library; "
        "assert load_library(False); print(platform.machine(), choose_instruction_set(False))"
    )
    subprocess.run([*emulator, "-c", describe], check=True, env=variables, cwd=FOLDER)
    emulated = [*emulator, "-m", *replay, FOLDER / "emulated.jsonl"]
    subprocess.run(emulated, check=True, env=variables, cwd=FOLDER)
    native = read_alerts(FOLDER / "native.jsonl")
    difference = compare(native, read_alerts(FOLDER / "emulated.jsonl"))
    print(f"{len(native)} alerts are the same on aarch64 under qemu; scores differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()
