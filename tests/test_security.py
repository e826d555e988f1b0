"""Security tests of all sources: nothing is unpickled, evaluated or run in a shell, and HTTP is local by default."""

from __future__ import annotations

import ast
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deformer_stream.runtime import http_server, metrics
from tests.conftest import ROOT, find_free_port

PLACES = ("deformer_stream", "trainer", "connectors", "tests/kafka")
MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"),
    *(
        "subprocess.getstatusoutput",
        "torch.load",
        "torch.jit.load",
        "yaml.load",
        "yaml.unsafe_load",
        "pandas.read_pickle",
    ),
}
SWITCHES = {"shell", "allow_pickle"}
"""Keyword arguments that may be given nothing but False."""


def find_dangerous_names(source: str) -> Iterator[str]:
    """Yield the dangerous modules, functions and arguments that a source uses, also under another name."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from (path for path in names.values() if path.partition(".")[0] in MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and (path := _get_qualified_name(node, names)) in CALLS:
            yield path
        if isinstance(node, ast.keyword) and node.arg in SWITCHES and not _is_false(node.value):
            yield str(node.arg)


def _is_false(node: ast.expr) -> bool:
    """Return whether an expression is the constant False."""
    return isinstance(node, ast.Constant) and node.value is False


def _get_qualified_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the qualified name of an expression: `t.load` gives `torch.load` after `import torch as t`."""
    if isinstance(node, ast.Attribute):
        return f"{_get_qualified_name(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "…"


def test_sources_use_no_pickle_eval_or_shell() -> None:
    files = [path for place in PLACES for path in (ROOT / place).rglob("*.py")]
    assert all(any(ROOT / place in path.parents for path in files) for place in PLACES)
    found = {str(path.relative_to(ROOT)): list(find_dangerous_names(path.read_text())) for path in files}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", ["pickle"]),
        ("from joblib import load as get", ["joblib.load"]),
        ("eval('1')", ["eval"]),
        ("f = exec", ["exec"]),
        ("import os\nos.system('ls')", ["os.system"]),
        ("from os import popen as run\nrun('ls')", ["os.popen"]),
        ("import torch as t\nt.load('x')", ["torch.load"]),
        ("from torch import jit\njit.load('x')", ["torch.jit.load"]),
        ("import yaml\nyaml.load('x')", ["yaml.load"]),
        ("import subprocess\nsubprocess.run('ls', shell=True)", ["shell"]),
        ("import numpy as np\nnp.load('x', allow_pickle=1 == 1)", ["allow_pickle"]),
        ("import re, numpy as np\nre.compile('x')\nmodel.eval()\nnp.load('x', allow_pickle=False)", []),
    ],
)
def test_search_finds_dangerous_names(source: str, expected: list[str]) -> None:
    assert list(find_dangerous_names(source)) == expected


def find_listening_addresses(port: int) -> set[str]:
    """Return the addresses at which a port is open, in the notation of Linux (hexadecimal, byte order of the
    machine).
    """
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


@pytest.mark.parametrize(("host", "bound"), [("", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")])  # noqa: S104
def test_http_listens_on_loopback_by_default(host: str, bound: str) -> None:
    port = find_free_port()
    stop = http_server.start_http_server(f"{host}:{port}", metrics.Metrics())
    try:
        assert find_listening_addresses(port) == {f"{int.from_bytes(socket.inet_aton(bound), sys.byteorder):08X}"}
    finally:
        stop()
