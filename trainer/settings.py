"""The options of `deformer-train`.

`TrainSettings` contains the command-line flags. `TrainConfig` adds the hyperparameters of model and training, which
come from the configuration file or the environment. If a hyperparameter is None, it follows from the preset and the
table. This module imports neither PyTorch nor other heavy modules, so that `--help` is shown at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from deformer_stream.model.config import IRREGULAR
from deformer_stream.record_limits import MAX_SLOTS
from deformer_stream.settings import (
    Device,
    Duration,
    MinorityShare,
    OptionGroups,
    Share,
    Units,
    WindowedTableSettings,
    WindowWidth,
    text_default,
)
from deformer_stream.settings.base import Layout

Preset = Literal["auto", "tiny", "small", "base", "paper"]
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["muon", "adamw", "adam"]
Compile = Literal["auto", "always", "never"]


def _convert_to_text(value: Any) -> Any:
    """Convert a number or boolean from the configuration file to text, so that `normal = 0` means the label "0".

    Any other value is returned unchanged.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_convert_to_text)]


def split_names(value: Any) -> tuple[str, ...]:
    """Return names as a tuple.

    Args:
        value: A text that lists names with commas between them, such as "a, b", or a list of names. Names in a list may
            contain commas.

    Raises:
        ValueError: The value is neither.
    """
    return tuple(str(item) for item in _list_items(value))


def _list_items(value: Any) -> Sequence[Any]:
    """Return the parts of a text between commas, without the blanks around them, or the items of a list.

    Raises:
        ValueError: The value is neither a text nor a list.
    """
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        return list(value)
    raise ValueError("it should be a text such as 'a,b' or a list")


def parse_periods(value: Any) -> tuple[tuple[str, float], ...]:
    """Parse the option `--cycle`, which lists cyclic columns (such as angles), each with its period.

    "hour=24, heading=360" becomes (("hour", 24.0), ("heading", 360.0)). If a column is listed twice, the last period is
    used.

    Args:
        value: A text, a list of texts such as "hour=24", or a mapping from names to periods.

    Raises:
        ValueError: A part of the text is not a column with a positive period.
    """
    period_by_name: dict[str, float] = {}
    for item in value.items() if isinstance(value, Mapping) else _list_items(value):
        # The last "=" separates name and period, because a column's name may contain others.
        name, period_text = item if isinstance(item, tuple) else str(item).rpartition("=")[::2]
        try:
            period = float(period_text)
        except (TypeError, ValueError):
            period = 0.0  # refused below, as any period that is not positive
        name = name if isinstance(item, tuple) else name.strip()
        if not name or not 0 < period < math.inf:
            part = f"{name}={period_text}" if isinstance(item, tuple) else item
            raise ValueError(
                f"{part!r} is no column with a positive period; write each column as name=period, such as heading=360"
            )
        period_by_name[str(name)] = period
    return tuple(period_by_name.items())


def parse_fill_values(value: Any) -> tuple[tuple[str | None, str], ...]:
    """Parse the option `--fill-values`, which lists values that stand for a missing reading.

    "99999, flow=-1.0" becomes ((None, "99999"), ("flow", "-1")).

    Args:
        value: A text, a number, a list of texts and numbers, or a mapping from names of features to values.

    Returns:
        (name, value) for each part: the feature whose fill value it is, None for all features; and the value, a number
        in its shortest spelling or another text.

    Raises:
        ValueError: A part has no value, or one that is never a reading.
    """
    value = _convert_to_text(value)
    fill_values = []
    for item in value.items() if isinstance(value, Mapping) else _list_items(value):
        if isinstance(item, tuple):
            name, text = item[0], str(_convert_to_text(item[1])).strip()
            part = text if name is None else f"{name}={text}"
        else:
            part = str(_convert_to_text(item))
            name, separator, text = (piece.strip() for piece in part.rpartition("="))
            name = name if separator else None
        try:
            number = float(text)
        except ValueError:
            pass  # a text such as Bad
        else:
            is_exact = abs(number) < 2**53 or not text.lstrip("+-").isdecimal()  # float64 rounds larger integers
            text = repr(number).removesuffix(".0") if is_exact else str(int(text))
            if not math.isfinite(number):
                raise ValueError(f"{part!r} never counts as a reading; remove it")
        if not text or name == "":
            raise ValueError(f"{part!r} is no fill value; write 99999 for all columns, or name=99999 for one of them")
        fill_values.append((None if name is None else str(name), text))
    return tuple(fill_values)


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_names)]
Cycles = Annotated[tuple[tuple[str, float], ...], NoDecode, BeforeValidator(parse_periods)]
FillValueList = Annotated[tuple[tuple[str | None, str], ...], NoDecode, BeforeValidator(parse_fill_values)]


OPTION_GROUPS: OptionGroups = {
    "Model directory": ("out", "resume", "init_from", "model"),
    "One model for each value of a column": ("per", "adapt_below"),
    "Time and size": ("max_time", "preset", "epochs", "device", "training_precision", "accumulate", "seed", "dry_run"),
    "Tables": (
        *(
            "where",
            "layout",
            "time_column",
            "device_column",
            "timezone",
            "time_unit",
            "delimiter",
            "decimal",
            "encoding",
        ),
        *("header", "no_header"),
    ),
    "Normal records and names of faults": ("label", "normal", "contamination", "faults", "fault_level"),
    "Columns": ("exclude", "context", "discrete", "continuous", "cycle", "fill_values", "units"),
    "Windows": ("window", "irregular", "slots", "per_slot", "once"),
    "Calibration": ("calibration_share", "folds", "order", "ties", "evidence"),
}
"""The headings under which `--help` lists the options, each with the names of its settings fields."""


class TrainSettings(WindowedTableSettings):
    """The command-line flags of `deformer-train`. The description of each field is its text in `--help`."""

    option_groups: ClassVar[OptionGroups] = OPTION_GROUPS

    out: Path = Field(
        description="Model directory to write. An existing model directory is replaced when training has succeeded."
    )
    layout: Layout | None = Field(
        None,
        description="Layout of the tables. wide: a row is a record. long: a row is a reading, with columns record, "
        "feature, value and perhaps time. By default the layout is inferred from the columns.",
    )
    time_column: str | None = Field(
        None,
        description="Column with the time of a reading or a row. Default: the column time or, in wide tables, the "
        "first column of timestamps.",
    )
    label: str | None = Field(
        None,
        description="Column that says whether a row is normal, such as 'fault'. It is never a feature. Give the value "
        "of normal rows with --normal. Its other values are names of faults, which alerts then state; see --faults.",
    )
    normal: Text | None = Field(
        None, description="Value of the column --label in normal rows. Other rows are not used for training."
    )
    exclude: Names = text_default("", "Columns to ignore, separated by commas, such as ids and indexes.")
    context: Names = text_default(
        "",
        "Columns that only help to predict other columns, separated by commas. They are never scored.",
    )
    discrete: Names = text_default(
        "",
        "Columns whose values are labels, separated by commas. For columns without this option, the kind is inferred.",
    )
    continuous: Names = text_default(
        "",
        "Columns whose values are measurements, separated by commas. For columns without this option, the "
        "kind is inferred.",
    )
    cycle: Cycles = text_default(
        "",
        "Columns whose values are positions on a cycle, such as angles, with the period in the column's "
        "unit, separated by commas: hour=24,heading=360. Times of day (Parquet type time) are detected automatically.",
    )
    fill_values: FillValueList = text_default(
        "",
        "Values that stand for a missing reading, separated by commas, such as 99999,-9999 for all columns "
        "or flow=-1 for one of them. The model stores them, so that they are no readings in a stream either.",
    )
    units: Units = text_default(
        "",
        "Units of features, such as flow=m³/h,pressure=bar, or a table [units] in the file of --config. The model "
        "stores them, and alerts and reports show them. By default the units in the metadata of the columns.",
    )
    window: WindowWidth | None = Field(
        None,
        description="Length of a time window, such as 60s. All readings of a device in one window are a record. The "
        "table is long, with columns device, feature, value, time, or has a column for each sensor and one for the "
        "time.",
    )
    irregular: bool = Field(
        False,
        description="A sensor may report any number of times in a record, at any times, and each reading keeps its own "
        "time. For long records whose readings arrive asynchronously. The table is long, with a column of times, or "
        "--window makes the records.",
    )
    evidence: Literal["fading", "lasting"] | None = Field(
        None,
        description="What the anomaly score of a record of irregular readings is computed from (default: fading). "
        "fading: cumulative sums of each sensor, which return to zero when a fault has gone, so that late faults of "
        "long records are found. lasting: all readings of the record with equal weights; it is the default if "
        "arrival_share is 0, because such a model is for imputation.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=MAX_SLOTS,
        description="Number of equal time slots into which each --window is divided. A feature may report once in each "
        "time slot. By default it may report once in a window.",
    )
    per_slot: Literal["first", "last", "mean", "min", "max"] = Field(
        "first",
        description="Which value counts if a sensor has several readings in a time slot (without --slots: in a "
        "window). last, mean, min and max are known only when the time slot is over, so alerts come later.",
    )
    once: Names = text_default(
        "",
        "Features that report only once in a window, although --slots divides it, separated by commas.",
    )
    preset: Preset = Field(
        "auto",
        description="Size of the model. 'auto' is 'small', or 'tiny' if --max-time leaves too few training steps for "
        "'small'. 'paper' is the large model of the DEformer paper and needs a GPU.",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Number of passes over the training rows. By default it is chosen for the table and the preset.",
    )
    max_time: Duration | None = Field(
        None,
        gt=0,
        description="Time limit for the whole command, such as 90s, 10m or 2h. It includes reading, calibration and "
        "the report. If it is short, fewer records are used for calibration, and their number is printed.",
    )
    device: Device = Field("auto", description="Device to train on. 'auto' uses a GPU if there is one.")
    seed: int = Field(
        0, ge=0, description="Seed of all random choices: split of the records, orders, noise and initial weights."
    )
    dry_run: bool = Field(
        False,
        description="Only show which features would be learnt, and why, from the first rows of the tables. Nothing is "
        "written, and --out is not needed.",
    )
    resume: bool = Field(
        False, description="Continue an interrupted run of --out. If there is none, start from the beginning."
    )
    training_precision: Precision | None = Field(
        None,
        description="Precision of matrix products in training. 'auto', the default, uses bfloat16 if the processor or "
        "GPU is faster with it.",
    )
    accumulate: int | None = Field(
        None,
        ge=1,
        description="Number of batches whose gradients are added for one training step. Use it if the batch that you "
        "want does not fit into memory.",
    )
    init_from: Path | None = Field(
        None,
        description="Model directory to start from. Its model is adapted to the tables, such as the few records of one "
        "machine. The tables may have additional columns.",
    )
    per: str | None = Field(
        None,
        min_length=1,
        description="Column whose values have a model each, such as the type of a machine. --out is then a folder with "
        "a model directory for each value. The column is not a feature.",
    )
    adapt_below: int | None = Field(
        None,
        ge=0,
        description="With --per, a value with fewer normal records than this gets a model that is adapted from a fleet "
        "model, which is trained on the records of all values. Default: 1000; 0 for no fleet model.",
    )
    calibration_share: Share | None = Field(
        None,
        description="Share (0 to 1) of the records that are used for calibration and not for training. Default: about "
        "0.2, with 99, 199, 299, ... records, for which alerts at alpha = 1% use all of alpha.",
    )
    folds: int | None = Field(
        None,
        ge=2,
        le=20,
        description="Number of equal parts of the records, for each of which a model is trained without it. "
        "Calibration then uses all records. Use it for small tables; it replaces --calibration-share.",
    )
    contamination: MinorityShare | Literal["auto"] = Field(
        0,
        description="Share (0 to 1) of the records that may be anomalies. The most unusual ones are left out of "
        "training and calibration. If there are no anomalies, up to this share of normal records raises alerts in "
        "addition to alpha. auto is for an unknown share: groups of unusual records apart from the others, and records "
        "far from all others, are left out of training. Calibration keeps all its records, and alpha its guarantee.",
    )
    order: Literal["arrival", "random", "schema", "time"] | None = Field(
        None,
        description="Order in which the readings of a record will arrive. arrival: as in a long table. random: any "
        "order. schema: the order of the columns. By default arrival for a long table, otherwise random. With "
        "--irregular: arrival, the order of the rows; or time, that of their times. By default the order of the rows "
        "if few of them are late, otherwise that of their times.",
    )
    ties: Literal["arrival", "hold"] = Field(
        "arrival",
        description="How readings of one record with the same time are scored (long tables). arrival: one after the "
        "other, in the order of the table. hold: together, because their order has no meaning.",
    )

    faults: str | None = Field(
        None,
        min_length=1,
        description="Table, folder or quoted pattern with labelled records of faults, which alerts then name. The "
        "column --label (default: fault) has the name of the fault of each record; at least 2 records of each, better "
        "10. By default the tables themselves, if --label is set and --max-time is not. 'off' to learn no names.",
    )
    fault_level: Share = Field(
        0.9,
        description="Coverage of the prediction sets of faults (0 to 1): the share of the records of a known fault "
        "whose set is to contain that fault.",
    )
    model: Path | None = Field(
        None,
        description="Model directory that gets the names of the faults of --faults, in place of those that it has. "
        "Nothing else is trained, and its scores and alerts stay as they are. There is then no TABLE and no --out.",
    )

    @model_validator(mode="before")
    @classmethod
    def _supply_output(cls, values: Any) -> Any:
        """Supply a value for --out, which a dry run does not need."""
        if isinstance(values, dict) and values.get("dry_run") and values.get("out") is None:
            return values | {"out": Path("model")}
        return values

    @model_validator(mode="after")
    def _check_window_options(self) -> Self:
        """Check that no option is without effect: --slots or --per-slot without --window, or --once without --slots.

        Raises:
            ValueError: An option is set without the other option that it needs.
        """
        if self.slots is not None and self.window is None:
            raise ValueError("--slots needs --window, because it divides the window; add --window, such as 60s")
        if self.per_slot != "first" and self.window is None:
            raise ValueError(
                "--per-slot needs --window, because it combines readings of one window; add --window, such as 60s"
            )
        self._check_irregular()
        self._check_per()
        has_time_slots = self.slots is not None and self.slots > 1
        if self.once and not has_time_slots:
            raise ValueError(
                "--once needs --slots, because without time slots every feature reports once in a window; "
                "remove --once, or divide the window with --slots 2 or more"
            )
        return self

    @property
    def order_of_features(self) -> Literal["arrival", "random", "schema"] | None:
        """The value of --order for records whose features report once. The value "time" needs irregular readings."""
        return None if self.order == "time" else self.order

    @property
    def calibration_trim(self) -> float:
        """The share of the calibration records with the largest statistics that is left out.

        With `--contamination auto` it is 0: a calibration set from which records were dropped by their own scores would
        no longer be exchangeable with new records.
        """
        return 0.0 if self.contamination == "auto" else self.contamination

    def _check_per(self) -> None:
        """Check that --adapt-below has an effect, and that --per is not combined with --folds.

        Raises:
            ValueError: One of both is not the case.
        """
        if self.per is None and self.adapt_below is not None:
            raise ValueError("--adapt-below needs --per: add --per, or remove --adapt-below")
        if self.adapt_below and self.irregular:
            raise ValueError("--adapt-below cannot be combined with --irregular, because such models are not adapted")
        if self.per is not None and self.faults not in (None, "off"):
            raise ValueError(
                "--per cannot be combined with --faults, because each model learns the faults of its own rows: "
                "leave --faults out, or add the names later with --model"
            )
        if self.per is not None and self.folds is not None:
            # The fleet model has seen all records but the calibration records of one split.
            raise ValueError("--per cannot be combined with --folds: remove one of the two options")

    def _check_irregular(self) -> None:
        """Check that --irregular is not combined with an option that has no meaning for irregular readings.

        Raises:
            ValueError: There is such an option, or one that needs --irregular.
        """
        if not self.irregular:
            if self.evidence is not None:
                raise ValueError("--evidence needs --irregular: add --irregular, or remove --evidence")
            if self.order == "time":
                raise ValueError("--order time needs --irregular: add --irregular, or remove --order time")
            return
        is_set_by_option = {
            "--slots": self.slots is not None,
            "--per-slot": self.per_slot != "first",
            "--once": bool(self.once),
            "--ties hold": self.ties == "hold",
            f"--order {self.order}": self.order not in (None, "arrival", "time"),
            "--folds": self.folds is not None,
            "--contamination": bool(self.contamination),
            "--init-from": self.init_from is not None,
            "--layout wide": self.layout == "wide" and self.window is None,
            "--faults": self.faults not in (None, "off"),
        }
        for option, is_set in is_set_by_option.items():
            if is_set:
                raise ValueError(f"--irregular cannot be combined with {option}: remove one of the two options")


class TrainConfig(TrainSettings):
    """All settings of `deformer-train`: command-line flags, and hyperparameters of the model and of training.

    The hyperparameters are described in `ModelConfig` and `trainer.fit.Recipe`. If one is None, `trainer.recipes`
    chooses it from the preset (`--preset`) and the number of training records.
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
    gaussians: int | None = Field(
        None,
        ge=0,
        description="Largest number of Gaussians in the mixture that is fitted before training, 0 for no mixture.",
    )
    neighbors: int | None = Field(
        None,
        ge=0,
        description="Number of earlier readings on which the Gaussian process of irregular readings is conditioned, 0 "
        "for no process.",
    )
    neighbor_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Factor by which the correlation of a reading is multiplied for each later reading of its sensor "
        "before these are chosen.",
    )
    process_rank: int | None = Field(None, ge=0)
    process_scales: int | None = Field(None, ge=1)
    outlier_limit: float | None = Field(
        None,
        ge=0,
        description="Number of standard deviations between a reading and what the Gaussian process predicts from the "
        "others, beyond which it counts less as a condition of others; 0 for no limit. It needs as many neighbors as a "
        "context has readings.",
    )
    context_recent: int | None = Field(None, ge=0)
    context_block: int | None = Field(None, ge=1)
    exemplars: int | None = Field(
        None,
        ge=0,
        description="Largest number of training records that are stored to rank complete records, 0 for none.",
    )
    calibration_exemplars: bool | None = Field(
        None,
        description="Whether calibration records may be among the records that are stored to rank complete records. "
        "False makes the anomaly scores of calibration records comparable with those of new records.",
    )
    prior_weight: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Weight of the density of the Gaussian prior in the ranking of complete records, 0 for none. By "
        "default it is learnt for each table.",
    )

    marginal_weight: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Weight in the ranking of complete records of the density of the readings without regard to one "
        "another, 0 for none. By default it rises from 0, if at most half of the features have labels, to 1, if all "
        "have.",
    )

    alert_exemplars: int | None = Field(
        None,
        ge=0,
        description="Largest number of training records that are stored for the alert, 0 for none. The distance of an "
        "open record to the nearest ones is a term of its statistic. By default 1024; none with --folds, with fewer "
        "than 100 training records or more than 200 features, or if the order of the rows of the table matters.",
    )

    alert_prior: bool | None = Field(
        None,
        description="Whether the p-values of readings under the Gaussian prior alone are a term of the alert's "
        "statistic. By default true if the model has such a prior and at least 100 training records.",
    )

    batch: int | None = Field(None, ge=1)
    optimizer: Optimizer | None = None
    compile_layers: Compile | None = None
    learning_rate: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)
    warmup: int | None = Field(None, ge=1)
    clip: float | None = Field(None, gt=0)
    smoothing: float | None = Field(None, ge=0)
    forget: float | None = Field(None, ge=0, lt=1)
    arrival_share: float | None = Field(None, ge=0, le=1)
    averaging: float | None = Field(None, gt=0, lt=1)
    patience: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_irregular_hyperparameters(self) -> Self:
        """Check that hyperparameters of irregular readings are not set for other records.

        Raises:
            ValueError: One of them is set without --irregular.
        """
        for name in IRREGULAR:
            if getattr(self, name) is not None and not self.irregular:
                raise ValueError(f"the setting {name} needs --irregular, because it is for irregular readings")
        return self
