"""The files that describe the package agree with each other."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "deformer_stream" / "kernels" / "csrc"
FEATURES_OF_V2 = {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"}
"""What `-march=x86-64-v2` adds to the instructions of every processor of the architecture, as far as C code uses it."""


@pytest.fixture(scope="module")
def project() -> Any:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_flags_of_the_compiler_are_the_features_that_are_checked() -> None:
    """A feature that is used and not checked ends the process on a processor that lacks it."""
    cmake, processor = (SOURCES / "CMakeLists.txt").read_text(), (SOURCES / "processor.c").read_text()
    expected: set[str] = set()
    for name in ("sse4", "avx2", "avx512", "avx512bf16"):
        match = re.search(rf"set\({name} (.*)\)", cmake)
        assert match
        flags = match[1].split()
        expected = {flag.removeprefix("-m") for flag in flags if flag.startswith("-m") and "-march" not in flag}
        expected |= FEATURES_OF_V2 if "-march=x86-64-v2" in flags else set()
        function = re.search(rf"has_{name}\(void\) {{(.*?)}}", processor, re.DOTALL)
        assert function
        assert set(re.findall(r'__builtin_cpu_supports\("(.*?)"\)', function[1])) == expected


def test_every_package_of_the_wheel_has_types(project: Any) -> None:
    for package in project["tool"]["scikit-build"]["wheel"]["packages"]:
        assert (ROOT / package / "py.typed").exists()
        assert package in project["tool"]["mypy"]["packages"]


@pytest.mark.parametrize("top", ["benchmarks", "connectors", "deformer_stream", "experiments", "trainer"])
def test_the_docstring_of_a_package_names_its_modules(top: str) -> None:
    """A reader finds every module by the docstring of its package, or in the table of the page on architecture."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    for file in sorted((ROOT / top).rglob("__init__.py")):
        text = (ast.get_docstring(ast.parse(file.read_text())) or "") + (page if file.parent == ROOT / top else "")
        modules = [path.stem for path in file.parent.glob("*.py") if not path.name.startswith("__")]
        packages = [path.parent.name for path in file.parent.glob("*/__init__.py")]
        for name in modules + packages:
            assert re.search(rf"\b{name}\b", text), f"{file.parent.relative_to(ROOT)}: {name}"


def test_versions_of_python_are_the_same_everywhere(project: Any) -> None:
    versions = [classifier.split()[-1] for classifier in project["project"]["classifiers"] if ":: 3." in classifier]
    assert versions == [f"3.{minor}" for minor in range(11, 11 + len(versions))]
    assert project["project"]["requires-python"] == f">=3.11,<3.{11 + len(versions)}"
    builds = project["tool"]["cibuildwheel"]["build"]
    assert builds == [f"cp{version.replace('.', '')}-*" for version in versions]
    newest = f"(3, {10 + len(versions)})"
    assert f"(3, 11) <= sys.version_info[:2] <= {newest}" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_constraints_pin_versions_and_hold_no_addresses(name: str, project: Any) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+( ;.*)?", line) for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    required = {re.split(r"[\[<>=]", line)[0].lower() for line in project["project"]["dependencies"]}
    assert required <= pinned


def test_lowest_versions_are_those_of_the_dependencies(project: Any) -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower(): line.split("==")[1] for line in lines if not line.startswith("#")}
    extras = project["project"]["optional-dependencies"]
    for requirement in [*project["project"]["dependencies"], *extras["dev"]]:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?>=([0-9.]+)", requirement)
        if match and match[1].lower() in pinned:
            lowest, used = match[2].split("."), pinned[match[1].lower()].split(".")
            assert used[: len(lowest)] == lowest, f"{requirement} is tested with {'.'.join(used)}"


def test_release_publishes_what_it_has_built_without_a_password() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert set(jobs["publish"]["needs"]) == {"source", "wheels"}
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
