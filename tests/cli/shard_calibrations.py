"""The comparison of a calibration in shards with one in a single process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deformer_stream import model_store
from tests.commands import RunCommand

SHARDS = ("--shards", "5")


def list_files(model: Path) -> dict[str, bytes]:
    """Return the contents of the files of a model directory."""
    return {path.name: path.read_bytes() for path in model.iterdir()}


def compare(
    cli: RunCommand,
    folder: Path,
    model: Path,
    inputs: Sequence[Path],
    *options: object,
    shard_options: Sequence[object] = SHARDS,
) -> model_store.Artifact:
    """Calibrate in one process and in shards, assert that the models are equal, and return the new one."""
    command = ("calibrate", *inputs, "--model", model, "--alpha", "0.1", *options)
    whole = cli(*command, "--out", folder / "whole")
    assert whole.code == 0, whole.err
    in_shards = cli(*command, "--out", folder / "in-shards", *shard_options)
    assert in_shards.code == 0, in_shards.err
    assert in_shards.out == whole.out
    assert list_files(folder / "in-shards") == list_files(folder / "whole")
    assert not (folder / ".in-shards.calibration").exists()
    # The number of records and that of refused readings
    assert whole.err[whole.err.index("calibrated on") :].partition(";")[0] in in_shards.err
    return model_store.read(folder / "whole")
