"""What `deformer-train` can be told. Imports nothing heavy: `--help` is built from `TrainSettings`.

`Everything` adds what the configuration file and the environment may set beyond the flags: the model's hyperparameters
and the recipe of training. What nobody set follows from the preset and the table (`trainer.job`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from deformer_stream.settings import Device, Duration, MinorityShare, Settings, Share, WindowWidth

Preset = Literal["tiny", "small", "base", "paper"]
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["muon", "adamw", "adam"]


def _joined(value: Any) -> Any:
    """A list in the file means the same as names with commas between."""
    return ",".join(str(v) for v in value) if isinstance(value, list) else value


def _text(value: Any) -> Any:
    """`normal = 0` in the file means the text 0."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Names = Annotated[str, BeforeValidator(_joined)]
Text = Annotated[str, BeforeValidator(_text)]


def split_names(text: str) -> tuple[str, ...]:
    """`a, b` → ("a", "b")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_periods(text: str) -> tuple[tuple[str, float], ...]:
    """`hour=24, heading=360` → (("hour", 24.0), ("heading", 360.0)). Raises ValueError."""
    found: dict[str, float] = {}
    for part in split_names(text):
        name, _, period = part.rpartition("=")
        try:
            found[name.strip()] = number = float(period)
        except ValueError:
            number = 0.0
        if not name.strip() or not 0 < number < math.inf:
            raise ValueError(f"{part!r} is no column with a positive period, like heading=360")
    return tuple(found.items())


def _checked(text: str) -> str:
    parse_periods(text)
    return text


Cycles = Annotated[str, BeforeValidator(_joined), AfterValidator(_checked)]


class TrainSettings(Settings):
    """`deformer-train`"""

    out: Path = Field(description="Model directory to write; a model that stands there is replaced at the end.")
    layout: Literal["wide", "long"] | None = Field(
        None, description="wide: a row is a record; long: columns record, feature, value, time. By default as it looks."
    )
    label: str | None = Field(None, description="Column that says which rows are normal; never a feature.")
    normal: Text | None = Field(None, description="Value of the label in normal rows; only these are used.")
    exclude: Names = Field("", description="Columns to leave out, comma-separated.")
    context: Names = Field("", description="Columns that condition the others and are never scored, comma-separated.")
    discrete: Names = Field("", description="Columns whose values are labels, comma-separated; inferred otherwise.")
    continuous: Names = Field(
        "", description="Columns whose values are measurements, comma-separated; inferred otherwise."
    )
    cycle: Cycles = Field(
        "",
        description="Columns whose values are places on a cycle, with its period in their unit, comma-separated: "
        "hour=24,heading=360. Times of day are found by themselves.",
    )
    window: WindowWidth | None = Field(
        None,
        description="Records are windows of this length of a device's time: 60s. The table is long, with columns "
        "device, feature, value, time.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Equal parts of the window in each of which a feature may report: a series. By default a feature "
        "reports once in a window.",
    )
    once: Names = Field("", description="Features that report once in a window all the same, comma-separated.")
    preset: Preset = Field("small", description="Size of the model; paper is that of the paper and wants a GPU.")
    epochs: int | None = Field(
        None, ge=1, description="Passes over the training rows; by default a number that suits table and preset."
    )
    max_time: Duration | None = Field(
        None, gt=0, description="End within this time, calibration included: 90s, 10m, 2h."
    )
    device: Device = Field("auto", description="Where to train; auto takes a GPU if there is one.")
    seed: int = Field(0, ge=0, description="Of splits, orders, noise and initial weights.")
    resume: bool = Field(False, description="Continue an interrupted run; starts from the beginning if there is none.")
    training_precision: Precision | None = Field(
        None, description="Of the matrix products of training; auto takes bfloat16 where that is quicker."
    )
    accumulate: int | None = Field(
        None, ge=1, description="Batches that make one step: as one batch so many times as large, in less memory."
    )
    init_from: Path | None = Field(
        None, description="Begin with this model: adapt it to few records of one plant or device; columns may be added."
    )
    calibration_share: Share = Field(
        0.2, description="Share of the records held out from the start to calibrate p-values."
    )
    folds: int | None = Field(
        None,
        ge=2,
        le=20,
        description="Calibrate on all records, each judged by a model that was trained without its fold: so many "
        "trainings in the same time, for tables too small for --calibration-share, which is then 1/folds.",
    )
    contamination: MinorityShare = Field(
        0,
        description="Share of the records that may be anomalies: as many are left out of training, the farthest from "
        "the others, and of calibration, the most surprising. If there are none, up to this share of normal records "
        "alerts beside alpha.",
    )
    order: Literal["arrival", "random", "schema"] | None = Field(
        None,
        description="Order of arrival to calibrate for; by default that of the table if it has one, otherwise random.",
    )
    ties: Literal["arrival", "hold"] = Field(
        "arrival",
        description="Readings of one record with one time (long tables): one after the other as they stand there "
        "(arrival), or a block whose order means nothing and that is judged once (hold).",
    )

    @model_validator(mode="after")
    def _whole_windows(self) -> Self:
        """What has no effect would be taken for one that it has."""
        if self.slots is not None and self.window is None:
            raise ValueError("--slots needs --window")
        if self.once and (self.slots or 1) == 1:
            raise ValueError("--once needs --slots")
        return self


class TrainConfig(TrainSettings):
    """Flags, hyperparameters of the model and the recipe; a None follows from preset and table."""

    d_model: int | None = Field(None, ge=1)
    layers: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    feedforward: int | None = Field(None, ge=1)
    mixtures: int | None = Field(None, ge=1)
    dropout: float | None = Field(None, ge=0, lt=1)
    norm: Literal["pre", "post"] | None = None
    activation: Literal["gelu", "relu"] | None = None
    embedding: int | None = Field(None, ge=1)
    hidden: tuple[int, ...] | None = None
    memory: Literal["all", "values"] | None = None
    tokens: Literal["pair", "single"] | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    gaussians: int | None = Field(None, ge=0, description="Most Gaussians that may guide the network.")

    exemplars: int | None = Field(None, ge=0, description="Most training records kept to rank whole records by.")

    batch: int | None = Field(None, ge=1)
    optimizer: Optimizer | None = None
    learning_rate: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)
    warmup: int | None = Field(None, ge=1)
    clip: float | None = Field(None, gt=0)
    smoothing: float | None = Field(None, ge=0)
    forget: float | None = Field(None, ge=0, lt=1)
    arrival_share: float | None = Field(None, ge=0, le=1)
    averaging: float | None = Field(None, gt=0, lt=1)
    patience: int | None = Field(None, ge=1)
