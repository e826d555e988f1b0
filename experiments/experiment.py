"""The parts of an experiment, and the changes of a preset that `--override` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Schema
from deformer_stream.settings import explain_error
from trainer.data import PreparedTable, compute_fingerprint
from trainer.fit import Recipe


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the recipe of its training.

    The names of all fields are names of `--override` and keys of results.json.

    Attributes:
        model: Hyperparameters of the network.
        recipe: Hyperparameters of training.
        waves: Spatial frequencies, in periods per side of an image, whose sines and cosines are added to the
            coordinates of a pixel. Empty for data sets without pixels.
    """

    model: ModelConfig
    recipe: Recipe
    waves: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all hyperparameters as they are stored in results.json."""
        tuples_as_lists = {"hidden": list(self.model.hidden), "waves": list(self.waves)}
        return asdict(self.recipe) | self.model.to_json() | tuples_as_lists


@dataclass(frozen=True, slots=True)
class ExperimentData:
    """The data set of an experiment.

    Attributes:
        prepared: All N records in the model's units, split into training, validation, calibration and test.
        correction: (N,) nats to add to the negative log-likelihood (NLL) of each record. The sum is in the units in
            which results are published.
    """

    prepared: PreparedTable
    correction: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A trained model with its test scores, from which the report is made.

    Attributes:
        model: The trained model.
        data: The data set.
        rows: Row numbers of the M scored test records.
        nll: (orders, M) negative log-likelihood of each test record in each random order, in nats and published units.
        per_feature: (F,) mean negative log-likelihood of each feature.
        history: Losses during training, one row for each validation.
        training: Summary of the training as in results.json.
        should_stop: Returns whether the run must pause; it is called between long steps.
        seed: Seed of the run.
    """

    model: DEformer
    data: ExperimentData
    rows: NDArray[np.int64]
    nll: NDArray[np.float64]
    per_feature: NDArray[np.float64]
    history: list[dict[str, float]]
    training: Mapping[str, Any]
    should_stop: Callable[[], bool]
    seed: int


@dataclass(frozen=True, slots=True)
class Experiment:
    """A data set with presets, published results and a report.

    Attributes:
        name: Name of the package.
        title: Name of the data set, for the report.
        record_noun: Word for several records, such as "images".
        num_records: Number of records of the complete data set. Results on fewer records cannot be compared.
        presets: The presets by name.
        published_nll_by_method: Published test NLL in nats by the name of the method.
        load_data: Returns the data set, given its path, the preset and the seed.
        make_report: Returns the parts of the report's page and further entries of results.json.
    """

    name: str
    title: str
    record_noun: str
    num_records: int
    presets: Mapping[str, Preset]
    published_nll_by_method: Mapping[str, float]
    load_data: Callable[[Path, Preset, int], ExperimentData]
    make_report: Callable[[ScoredRun], tuple[Sequence[str], dict[str, Any]]]


def make_prepared_table(schema: Schema, values: NDArray[np.float32], split: NDArray[np.uint8]) -> PreparedTable:
    """Return arrays in the form in which the trainer reads them.

    Args:
        schema: The F features.
        values: (N, F) readings in the model's units.
        split: (N,) code of the part of the split that each record belongs to.
    """
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


def apply_overrides(preset: Preset, text: str) -> Preset:
    """Return a preset with the changes of `--override`.

    Args:
        preset: The preset.
        text: The changes as `name=value, …`. The items of a tuple are separated by a plus sign.

    Raises:
        ConfigError: A name is unknown or a value does not fit.
    """
    own_types = {name: kind for name, kind in get_type_hints(Preset).items() if name not in ("model", "recipe")}
    types_by_part = {"model": get_type_hints(ModelConfig), "recipe": get_type_hints(Recipe), "": own_types}
    changes_by_part: dict[str, dict[str, Any]] = {part: {} for part in types_by_part}
    for name, value in _split_pairs(text):
        part = next((part for part, types in types_by_part.items() if name in types), None)
        if part is None:
            known = ", ".join(name for types in types_by_part.values() for name in types)
            raise ConfigError(f"--override: there is no {name!r}; use one of {known}")
        changes_by_part[part][name] = _parse_value(name, types_by_part[part][name], value)
    try:
        model = replace(preset.model, **changes_by_part["model"])
        recipe = replace(preset.recipe, **changes_by_part["recipe"])
    except ValueError as error:
        raise ConfigError(f"--override {text}: {error}") from None
    return replace(preset, model=model, recipe=recipe, **changes_by_part[""])


def _split_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each comma-separated `name=value`."""
    for part in text.split(","):
        if part.strip():
            name, _, value = part.partition("=")
            yield name.strip(), value.strip()


def _parse_value(name: str, kind: Any, text: str) -> Any:
    """Return the value of an override as its field's type requires it.

    Args:
        name: Name of the field, for the error message.
        kind: Type of the field.
        text: The value; the items of a tuple are separated by a plus sign, and no text is an empty tuple.

    Raises:
        ConfigError: The text is not a value of this type.
    """
    is_tuple = str(kind).startswith("tuple")
    value: Any = [item for item in text.split("+") if item] if is_tuple else text
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"--override {name}={text}: {explain_error(error.errors()[0])}") from None
