"""The options of `deformer-train`. This module imports nothing heavy, because `--help` is built from it.

`TrainSettings` holds the command-line flags. `TrainConfig` adds the hyperparameters of model and training, which come
from the configuration file or the environment. A value of None means that it follows from the preset and the table.
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


def _join_list(value: Any) -> Any:
    """Return a list from the configuration file as text with commas, as on the command line; other values unchanged."""
    return ",".join(str(item) for item in value) if isinstance(value, list) else value


def _convert_to_text(value: Any) -> Any:
    """Return a number or boolean from the configuration file as text: `normal = 0` means the label "0"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Names = Annotated[str, BeforeValidator(_join_list)]
Text = Annotated[str, BeforeValidator(_convert_to_text)]


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text that are separated by commas: "a, b" becomes ("a", "b")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_periods(text: str) -> tuple[tuple[str, float], ...]:
    """Return columns with their periods: "hour=24, heading=360" becomes (("hour", 24.0), ("heading", 360.0)).

    Raises:
        ValueError: A part of the text is no column with a positive period.
    """
    period_by_name: dict[str, float] = {}
    for part in split_names(text):
        name, _, period_text = part.rpartition("=")
        try:
            period = float(period_text)
        except ValueError:
            period = 0.0
        if not name.strip() or not 0 < period < math.inf:
            raise ValueError(f"{part!r} is no column with a positive period, like heading=360")
        period_by_name[name.strip()] = period
    return tuple(period_by_name.items())


def _check_periods(text: str) -> str:
    """Return the text unchanged if it names columns with positive periods; raise ValueError otherwise."""
    parse_periods(text)
    return text


Cycles = Annotated[str, BeforeValidator(_join_list), AfterValidator(_check_periods)]


class TrainSettings(Settings):
    """`deformer-train`"""

    out: Path = Field(description="Model directory to write. An existing model directory is replaced at the end.")
    layout: Literal["wide", "long"] | None = Field(
        None,
        description="Layout of the tables. wide: a row is a record. long: a row is a reading, with columns record, "
        "feature, value and time. Inferred from the columns by default.",
    )
    label: str | None = Field(
        None, description="Column that marks normal rows, such as 'fault'. It is never a feature. Needs --normal."
    )
    normal: Text | None = Field(None, description="Value of --label in normal rows. Other rows are not used.")
    exclude: Names = Field("", description="Columns to ignore, separated by commas, such as ids and indexes.")
    context: Names = Field(
        "", description="Columns that the other features may depend on but that are never scored, separated by commas."
    )
    discrete: Names = Field(
        "", description="Columns whose values are labels, separated by commas. Inferred for all other columns."
    )
    continuous: Names = Field(
        "", description="Columns whose values are measurements, separated by commas. Inferred for all other columns."
    )
    cycle: Cycles = Field(
        "",
        description="Columns whose values are positions on a cycle, with the period in the column's unit, separated by "
        "commas: hour=24,heading=360. Columns of times of day are detected.",
    )
    window: WindowWidth | None = Field(
        None,
        description="Length of a time window of a device that makes a record, such as 60s. The table must be long, "
        "with columns device, feature, value, time.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Number of equal time slots of a window. A feature may report once in each of them. By default it "
        "reports once in a window.",
    )
    once: Names = Field(
        "", description="Features that report once in a window in spite of --slots, separated by commas."
    )
    preset: Preset = Field(
        "small", description="Size of the model. 'paper' is the model of the DEformer paper and needs a GPU."
    )
    epochs: int | None = Field(
        None, ge=1, description="Passes over the training rows. By default the number suits the table and the preset."
    )
    max_time: Duration | None = Field(
        None,
        gt=0,
        description="Time limit for the whole command, such as 90s, 10m or 2h. It includes reading, calibration and "
        "the report. If it is short, fewer records are used for calibration, and the output says how many.",
    )
    device: Device = Field("auto", description="Device to train on. 'auto' uses a GPU if there is one.")
    seed: int = Field(0, ge=0, description="Seed of the split, orders, noise and initial weights.")
    resume: bool = Field(
        False, description="Continue an interrupted run. If there is none, training starts from the beginning."
    )
    training_precision: Precision | None = Field(
        None,
        description="Precision of matrix products in training. 'auto', the default, uses bfloat16 if the processor is "
        "faster with it.",
    )
    accumulate: int | None = Field(
        None,
        ge=1,
        description="Batches whose gradients are added for one step. Set it if a large batch does not fit into memory.",
    )
    init_from: Path | None = Field(
        None,
        description="Model directory to start from. The model is adapted to the few records of one machine; columns "
        "may be added.",
    )
    calibration_share: Share = Field(
        0.2, description="Share of the records that are used for calibration and not for training."
    )
    folds: int | None = Field(
        None,
        ge=2,
        le=20,
        description="Train this many models, each without another part of the records, and calibrate on all records. "
        "Use it for tables that are too small for --calibration-share, which is then 1/folds.",
    )
    contamination: MinorityShare = Field(
        0,
        description="Share of the records that may be anomalies. The most unusual ones are left out of training and "
        "calibration. If the records have no anomalies, up to this share of normal records raises alerts in addition "
        "to alpha.",
    )
    order: Literal["arrival", "random", "schema"] | None = Field(
        None,
        description="Order in which the readings of a record will arrive. By default the order of the table if it has "
        "one, otherwise random.",
    )
    ties: Literal["arrival", "hold"] = Field(
        "arrival",
        description="Treatment of readings of one record with the same time in a long table. arrival: scored one after "
        "the other in the order of the table. hold: scored together, as their order has no meaning.",
    )

    @model_validator(mode="after")
    def _check_window_options(self) -> Self:
        """Raise ValueError if an option has no effect because the option that it belongs to is missing."""
        if self.slots is not None and self.window is None:
            raise ValueError("--slots needs --window")
        if self.once and (self.slots or 1) == 1:
            raise ValueError("--once needs --slots")
        return self


class TrainConfig(TrainSettings):
    """All settings of `deformer-train`: flags, and hyperparameters of the model and of training.

    `ModelConfig` and `trainer.fit.Recipe` describe the hyperparameters. None means that they follow from preset and
    table.
    """

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
    gaussians: int | None = Field(None, ge=0, description="Largest number of Gaussians of the prior, 0 for none.")

    exemplars: int | None = Field(
        None,
        ge=0,
        description="Largest number of training records that are stored to rank complete records, 0 for none.",
    )

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
