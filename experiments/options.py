"""The options of an experiment. Heavy packages are not imported, because `--help` is built from these fields."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from deformer_stream.settings import Device, Duration, Settings

Precision = Literal["float32", "bfloat16"]
PresetName = Literal["default", "small", "paper"]


class ExperimentSettings(Settings):
    """The options of `python -m experiments.NAME`."""

    data: Path = Field(description="The data set, or the folder that contains it under its own name.")
    out: Path = Field(description="Folder for the checkpoint, the model, results.json and report.html.")
    preset: PresetName = Field(
        "default",
        description="Model and optimizer. paper is that of the publication, default is better in less time, and small "
        "suits a CPU.",
    )
    override: str = Field("", description="Changes of the preset, comma-separated: d_model=128,batch=32,epochs=10.")
    max_time: Duration | None = Field(
        None,
        gt=0,
        description="Limit of the training time, summed over all parts of an interrupted run: 90s, 20m, 2h. Scoring "
        "follows and needs more time.",
    )
    pause_after: Duration | None = Field(
        None, gt=0, description="Save the progress and end after this time. Continue the run with --resume."
    )
    resume: bool = Field(
        False, description="Continue an interrupted run. If there is none, the run starts from the beginning."
    )
    orders: int = Field(10, ge=1, description="Number of random feature orders in which each test record is scored.")
    test_records: int | None = Field(
        None,
        ge=1,
        description="Number of test records to score, chosen at random; by default all. The report shows the number.",
    )
    precision: Precision = Field(
        "float32",
        description="Precision of matrix products in validation and scoring. bfloat16 is faster on a GPU. Densities "
        "are computed in float32.",
    )
    device: Device = Field("auto", description="Device for training; auto uses a GPU if one is available.")
    seed: int = Field(0, ge=0, description="Seed of the split, the orders and the initial weights.")
