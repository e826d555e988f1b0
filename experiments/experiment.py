"""What an experiment is made of, and how a preset is changed from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Schema
from deformer_stream.settings import reason
from trainer.data import PreparedTable, compute_fingerprint
from trainer.fit import Recipe

TEST = 3
"""The part of the split beside `trainer.data`'s three that only the final score may look at."""


@dataclass(frozen=True, slots=True)
class Preset:
    """waves: of images, the spatial frequencies (periods per side) that pixels are also told apart by."""

    model: ModelConfig
    recipe: Recipe
    waves: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        own = {"hidden": list(self.model.hidden), "waves": list(self.waves)}
        return asdict(self.recipe) | self.model.to_json() | own


@dataclass(frozen=True, slots=True)
class Data:
    """prepared: all records in the model's units, split in four. correction: (N,) nats to be added to a record's NLL to
    have it in the units of the published figures."""

    prepared: PreparedTable
    correction: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a report is made from. nll: (orders, N) nats of the test records `rows` in as many random orders, published
    units; per_feature: (F,) means. directory: of the run. stop: asked between long steps."""

    model: DEformer
    data: Data
    rows: NDArray[np.int64]
    nll: NDArray[np.float64]
    per_feature: NDArray[np.float64]
    history: list[dict[str, float]]
    training: Mapping[str, Any]
    stop: Callable[[], bool]
    seed: int


@dataclass(frozen=True, slots=True)
class Experiment:
    """name: the folder its data lies in. size: records of the whole data set; with fewer, nothing is comparable.
    published: test NLL in nats, by method. load: (path, preset, seed) → data. report: blocks of HTML and further
    results of the finished run."""

    name: str
    title: str
    records: str
    size: int
    presets: Mapping[str, Preset]
    published: Mapping[str, float]
    load: Callable[[Path, Preset, int], Data]
    report: Callable[[Scored], tuple[list[str], dict[str, Any]]]


def in_memory(schema: Schema, values: NDArray[np.float32], split: NDArray[np.uint8]) -> PreparedTable:
    """Arrays as the trainer takes them. values: (N, F) in the model's units; split: (N,)."""
    return PreparedTable(
        schema=schema,
        excluded_columns=(),
        values=values,
        arrival_ranks=None,
        split=split,
        layout="wide",
        time_column=None,
        missing_by_feature={},
        infinite_by_feature={},
        skipped_by_reason={},
        fingerprint=compute_fingerprint(schema, values, None, split),
    )


def changed(preset: Preset, text: str) -> Preset:
    """The preset with `name=value, …` applied. Raises `ConfigError` for a name or a value that does not fit."""
    own = {name: kind for name, kind in get_type_hints(Preset).items() if name not in ("model", "recipe")}
    kinds = {"model": get_type_hints(ModelConfig), "recipe": get_type_hints(Recipe), "": own}
    given: dict[str, dict[str, Any]] = {part: {} for part in kinds}
    for name, value in _pairs(text):
        part = next((part for part, names in kinds.items() if name in names), None)
        if part is None:
            raise ConfigError(
                f"--override: there is no {name!r}; there are {', '.join(n for k in kinds.values() for n in k)}"
            )
        given[part][name] = _typed(name, kinds[part][name], value)
    try:
        model, recipe = replace(preset.model, **given["model"]), replace(preset.recipe, **given["recipe"])
    except ValueError as error:
        raise ConfigError(f"--override {text}: {error}") from None
    return replace(preset, model=model, recipe=recipe, **given[""])


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = (s.strip() for s in part.partition("="))
        yield name, value


def _typed(name: str, kind: Any, text: str) -> Any:
    """A value as the field's type wants it; tuples are written 128+256, empty ones not at all."""
    value: Any = list(filter(None, text.split("+"))) if str(kind).startswith("tuple") else text
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"--override {name}={text}: {reason(error.errors()[0])}") from None
