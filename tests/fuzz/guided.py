"""Runs one target under the coverage-guided fuzzer; `python -m tests.fuzz` starts a process of this for each target."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(
    include=["deformer_stream.codec", "deformer_stream.model_store", "deformer_stream.engine", "deformer_stream.model"]
):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
