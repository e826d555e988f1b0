"""Programs run in new processes, which fail if they import what they do not need."""

from __future__ import annotations

import subprocess
import sys

HEAVY_PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "kafka",
    "safetensors",
    "rich",
    "structlog",
    "prometheus_client",
    "orjson",
)
ENTRY_POINT_BY_PROGRAM = {
    "deformer-stream": ("deformer_stream.cli.main", "main"),
    "deformer-replay": ("deformer_stream.cli.main", "replay_main"),
    "deformer-train": ("trainer.cli", "main"),
}


def run_program(program: str, words: list[str], unwanted: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in a new Python process, which fails if it imports one of the unwanted packages."""
    module, main = ENTRY_POINT_BY_PROGRAM[program]
    code = f"""
import sys
sys.argv = {[program, *words]!r}
from {module} import {main}
try:
    {main}()
finally:
    heavy = [name for name in {unwanted!r} if name in sys.modules]
    assert not heavy, heavy
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
