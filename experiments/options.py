"""What an experiment can be told. Imports nothing heavy: `--help` is built from these fields."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from deformer_stream.settings import Device, Duration, Settings

PresetName = Literal["default", "small", "paper"]


class ExperimentSettings(Settings):
    """`python -m experiments.…`"""

    data: Path = Field(description="Where the data set is, or the folder that holds it under its own name.")
    out: Path = Field(description="Folder for checkpoint, model, results.json and report.html.")
    preset: PresetName = Field(
        "default", description="paper: its model and optimiser; default: better in less time; small: for a CPU."
    )
    override: str = Field("", description="Changes of the preset, comma-separated: d_model=128,batch=32,epochs=10.")
    max_time: Duration | None = Field(
        None, gt=0, description="Train for this long, over all pieces of a run: 90s, 20m, 2h. Scoring comes after it."
    )
    pause_after: Duration | None = Field(
        None, gt=0, description="Stop after this long, wherever the run stands; --resume continues it."
    )
    resume: bool = Field(False, description="Continue an interrupted run; starts from the beginning if there is none.")
    orders: int = Field(10, ge=1, description="Random orders in which every test record is scored.")
    test_records: int | None = Field(
        None, ge=1, description="Score only this many test records, and say so; by default all."
    )
    device: Device = Field("auto", description="Where to train; auto takes a GPU if there is one.")
    seed: int = Field(0, ge=0, description="Of splits, orders and initial weights.")
