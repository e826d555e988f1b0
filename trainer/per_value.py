"""Train one model for each value of a column, such as the type of a machine (`deformer-train --per FIELD`).

The rows of the tables are first split by value into files, in one pass. Each value then has a training job of its own.
A value with few records gets a model that is adapted from a fleet model (`trainer.finetune`). Types of machines have
different features, and an adapted model keeps all features of the fleet model. So there is one fleet model for each
distinct set of features of the values with few records. It is trained on these features only, and on the records of all
values that have them. The fleet model splits the records of each value as the value's own job does. So the calibration
records of an adapted model are new to the fleet model as well, and its false-alarm rate holds.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model_set import (
    FLEET_PREFIX,
    ModelEntry,
    ModelSet,
    make_folder_name,
    read_model_set,
    write_model_set,
)
from deformer_stream.model_store import MANIFEST
from deformer_stream.tables.table import join_names
from trainer.budget import TimeBudget
from trainer.data import MIN_RECORDS, DataOptions
from trainer.distributed import Ranks
from trainer.fit import SINGLE_PROCESS, TrainingStatus
from trainer.irregular_job import train_irregular
from trainer.job import train
from trainer.job_output import JobOutput
from trainer.per_value_tables import (
    PARTS_FOLDER,
    ValueRows,
    check_records_have_one_value,
    create_options,
    find_features,
    hash_texts,
    open_tables_with_column,
    split_by_value,
)
from trainer.prepare import count_records
from trainer.recipes import SHAPE_HYPERPARAMETERS
from trainer.settings import TrainConfig
from trainer.tables import InputTables, TableSource, classify_type
from trainer.working_folder import lock_folder

DEFAULT_ADAPT_BELOW = 1000
"""Number of normal records of a value below which its model is adapted from the fleet model, without --adapt-below.

In docs/experiments/10-adapting-a-fleet-model.md an adapted model is better than one that is trained anew by 1.6 nats or
more for up to 160 records. More records were not measured.
"""


@dataclass(frozen=True, slots=True)
class TrainedValue:
    """The model of one value.

    Attributes:
        value: The value.
        entry: What the file models.json states about the model.
        output: The result of the training. None if an earlier run has finished it (`--resume`).
    """

    value: str
    entry: ModelEntry
    output: JobOutput | None


@dataclass(frozen=True, slots=True)
class PerValueOutput:
    """The results of one training job for each value of a column.

    Attributes:
        directory: The folder with the model directories.
        models: The models, in the order of the values.
        reason_by_value: Why some values have no new model.
    """

    directory: Path
    models: tuple[TrainedValue, ...]
    reason_by_value: dict[str, str]


def train_per_value(
    sources: Sequence[TableSource],
    settings: TrainConfig,
    *,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
    on_message: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    budget: TimeBudget | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> PerValueOutput:
    """Train a model for each value of the column `--per`, and write a folder of model directories.

    Models of an earlier run for values that the tables do not have stay in the folder. With `--resume`, trainings that
    have finished with the same rows and options are skipped, and an interrupted one is continued.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        settings: All options of `deformer-train`, with `per`.
        on_status: Called after every training step.
        on_message: Called with one line of text at the beginning of each training and of each of its phases.
        should_stop: Called after every training step. If it returns True, a checkpoint is written and training stops.
        budget: The time that all trainings may take together; by default `settings.max_time` from now.
        ranks: The processes that `torchrun` started, which must be one.

    Raises:
        DeformerError: A file or an option cannot be used, or no value has enough records.
        Interrupted: `should_stop` returned True.
    """
    if ranks.world_size > 1:
        raise ConfigError("--per trains in one process, but torchrun started several: start deformer-train alone")
    budget = budget or TimeBudget(settings.max_time)
    out, column = settings.out, settings.per
    if column is None:
        raise ValueError("the setting `per` must name a column")
    if (out / MANIFEST).exists() or (out.exists() and not out.is_dir()):
        raise ConfigError(
            f"--out {out} is {'a model directory' if out.is_dir() else 'a file'}, but --per writes a folder of model "
            "directories: name another path"
        )
    options = create_options(settings, column)
    tables = open_tables_with_column(sources, options, column)
    earlier = read_model_set(out) or ModelSet(column)
    if earlier.field != column:
        raise ConfigError(
            f"--out {out} has models for the values of {earlier.field!r}, not of {column!r}: name another folder"
        )
    parts_folder = out / PARTS_FOLDER
    with lock_folder(parts_folder, out):
        try:
            check_records_have_one_value(tables, column)
            values = split_by_value(tables, column, parts_folder, on_message)
            trainer = _PerValueTrainer(
                settings,
                options,
                tables,
                earlier=earlier,
                budget=budget,
                on_status=on_status,
                on_message=on_message,
                should_stop=should_stop,
            )
            return trainer.train(values)
        finally:
            shutil.rmtree(parts_folder)


@dataclass(frozen=True, slots=True)
class _FleetModel:
    """A fleet model to be trained.

    Attributes:
        features: Its features: those of the values with few records that start from it.
        excluded: Features of its records that it does not have.
        sources: The values on whose records it is trained.
        few: The values whose models are adapted from it.
    """

    features: frozenset[str]
    excluded: tuple[str, ...]
    sources: tuple[ValueRows, ...]
    few: tuple[ValueRows, ...]

    @property
    def folder(self) -> str:
        """The name of its model directory."""
        return f"{FLEET_PREFIX}{hash_texts(sorted(self.features))[:12]}"


class _PerValueTrainer:
    """Trains the fleet models and the model of each value, one after the other.

    Args:
        settings: All options of `deformer-train`.
        options: How to read the tables.
        tables: The tables with all rows.
        earlier: The models that the folder has already.
        budget: The time that all trainings may take together.
        on_status: Called after every training step.
        on_message: Called with a line of text.
        should_stop: Called after every training step.
    """

    def __init__(
        self,
        settings: TrainConfig,
        options: DataOptions,
        tables: InputTables,
        earlier: ModelSet,
        budget: TimeBudget,
        on_status: Callable[[TrainingStatus], None],
        on_message: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.settings, self.options, self.tables, self.models = settings, options, tables, earlier
        self.budget = budget
        self.on_status, self.on_message, self.should_stop = on_status, on_message, should_stop
        self.num_trainings_left = 0
        self.errors: list[InputError | ConfigError] = []  # of values that have no new model
        self.settings_digest = hash_texts([json.dumps(self._get_decisive_options(), sort_keys=True)])

    def train(self, values: Sequence[ValueRows]) -> PerValueOutput:
        """Train the models of all values that have enough records.

        Raises:
            InputError: No value has enough records.
        """
        reason_by_value: dict[str, str] = {}
        usable = [value_rows for value_rows in values if self._count(value_rows, reason_by_value)]
        fleets = self._plan_fleet_models(usable)
        self.num_trainings_left = len(usable) + len(fleets)
        fleet_by_value: dict[str, str] = {}
        for fleet in fleets:
            try:
                self._train_fleet_model(fleet)
            except (InputError, ConfigError) as error:  # such as a feature with the same value in all records
                names = join_names([value_rows.value for value_rows in fleet.few])
                self.on_message(f"no fleet model for {names}, which start from their own records: {error}")
            else:
                fleet_by_value |= {value_rows.value: fleet.folder for value_rows in fleet.few}
        trained: list[TrainedValue] = []
        for value_rows in usable:
            try:
                trained.append(self._train_value(value_rows, fleet_by_value.get(value_rows.value)))
            except (InputError, ConfigError) as error:  # one value does not stop the training of the others
                reason_by_value[value_rows.value] = str(error)
                self.errors.append(error)
        if not trained:
            if self.errors and isinstance(self.errors[0], ConfigError):  # an option that fits no value
                raise self.errors[0]
            value, reason = next(iter(reason_by_value.items()))
            raise InputError(f"no value of {self.settings.per} can be trained on, such as {value!r}: {reason}")
        return PerValueOutput(self.settings.out, tuple(trained), reason_by_value)

    def _plan_fleet_models(self, values: Sequence[ValueRows]) -> list[_FleetModel]:
        """Return the fleet models to train: one for each distinct set of features of the values with few records.

        A set of features that only one value has needs none, because that value has no others to learn from.

        Args:
            values: The values that can have a model.
        """
        few = [value_rows for value_rows in values if self._has_few_records(value_rows)]
        if not few or self.settings.init_from is not None:
            return []
        ignored = {*self.options.exclude, self.settings.per or ""}
        if self.tables.layout == "wide":  # columns of dates are no features unless an option names them
            dates = {column.name for column in self.tables.schema if classify_type(column.type) == "time"}
            ignored |= dates - self.options.named_columns
        features_by_value = {
            value_rows.value: find_features(value_rows.tables, self.tables) - ignored for value_rows in values
        }
        groups: dict[frozenset[str], list[ValueRows]] = {}
        for value_rows in few:
            groups.setdefault(features_by_value[value_rows.value], []).append(value_rows)
        fleets = []
        for features, group in groups.items():
            sources = [value_rows for value_rows in values if features <= features_by_value[value_rows.value]]
            if len(sources) > 1:
                others = frozenset().union(*(features_by_value[value_rows.value] for value_rows in sources)) - features
                fleets.append(_FleetModel(features, tuple(sorted(others)), tuple(sources), tuple(group)))
            else:
                self.on_message(
                    f"{group[0].value}: trained on its own records, because no other value has all of its features"
                )
        return fleets

    def _count(self, value_rows: ValueRows, reason_by_value: dict[str, str]) -> bool:
        """Count the normal records of a value, and return whether it can have a model.

        Args:
            value_rows: The value. Its `num_records` is set, unless readings are irregular.
            reason_by_value: Receives the reason if it cannot.
        """
        try:
            make_folder_name(value_rows.value)
        except ConfigError as error:
            reason_by_value[value_rows.value] = str(error)
            return False
        try:
            if not self.settings.irregular:
                value_rows.num_records = count_records(value_rows.tables, self.options)
        except (InputError, ConfigError) as error:  # such as no normal record, or an option that does not fit
            reason_by_value[value_rows.value] = str(error)
            self.errors.append(error)
            return False
        if value_rows.num_records is not None and value_rows.num_records < MIN_RECORDS:
            reason_by_value[value_rows.value] = (
                f"{format_count(value_rows.num_records, 'normal record')}, but a model needs at least {MIN_RECORDS}"
            )
            return False
        return True

    def _has_few_records(self, value_rows: ValueRows) -> bool:
        """Return whether the model of a value is adapted if there is a model to start from."""
        limit = DEFAULT_ADAPT_BELOW if self.settings.adapt_below is None else self.settings.adapt_below
        return value_rows.num_records is not None and value_rows.num_records < limit

    def _train_fleet_model(self, fleet: _FleetModel) -> None:
        """Train a fleet model, unless an earlier run has done so.

        Raises:
            InputError: The rows cannot be used.
            ConfigError: An option does not fit the features.
        """
        directory = self.settings.out / fleet.folder
        digest = hash_texts([self.settings_digest, *sorted(fleet.features), *(m.digest for m in fleet.sources)])
        is_known = self.models.fleet_inputs.get(fleet.folder) == digest
        if self.settings.resume and is_known and (directory / MANIFEST).exists():
            self.num_trainings_left -= 1
            return
        num_records = sum(value_rows.num_records or 0 for value_rows in fleet.sources)
        self.on_message(
            f"training a fleet model on {format_count(num_records, 'record')} of "
            f"{join_names([value_rows.value for value_rows in fleet.sources])}"
        )
        # Options that name features which the fleet model does not have would be refused.
        changes: dict[str, object] = {
            name: tuple(feature for feature in getattr(self.settings, name) if feature in fleet.features)
            for name in ("context", "discrete", "continuous", "once")
        }
        changes["cycle"] = tuple((name, period) for name, period in self.settings.cycle if name in fleet.features)
        changes["fill_values"] = tuple(
            (name, value) for name, value in self.settings.fill_values if name is None or name in fleet.features
        )
        changes["faults"] = "off"  # no record is scored by a fleet model
        train(
            [table for value_rows in fleet.sources for table in value_rows.tables],
            self._make_settings(directory, changes, fleet.excluded),
            on_status=self.on_status,
            on_message=self.on_message,
            should_stop=self.should_stop,
            budget=self._take_budget(),
            part_sizes=[value_rows.num_records or 0 for value_rows in fleet.sources],
        )
        self.models = replace(self.models, fleet_inputs={**self.models.fleet_inputs, fleet.folder: digest})
        write_model_set(self.settings.out, self.models)

    def _train_value(self, value_rows: ValueRows, fleet_folder: str | None) -> TrainedValue:
        """Train the model of a value, unless an earlier run has done so.

        Args:
            value_rows: The value and its rows.
            fleet_folder: The folder of the fleet model from which the model is adapted; None to train it anew.

        Raises:
            InputError: The rows cannot be used.
            ConfigError: An option does not fit the rows.
        """
        settings, folder = self.settings, make_folder_name(value_rows.value)
        directory = settings.out / folder
        start_from = () if fleet_folder is None else (self.models.fleet_inputs[fleet_folder],)
        digest = hash_texts([self.settings_digest, value_rows.digest, *start_from])
        entry = self.models.entry_by_value.get(value_rows.value)
        if settings.resume and entry is not None and entry.input == digest and (directory / MANIFEST).exists():
            self.num_trainings_left -= 1
            return TrainedValue(value_rows.value, entry, None)
        how = "its own records" if fleet_folder is None else "adapted from the fleet model"
        count = "" if value_rows.num_records is None else f"{format_count(value_rows.num_records, 'record')}, "
        self.on_message(f"training the model of {value_rows.value} ({count}{how})")
        changes: dict[str, object] = {}
        if fleet_folder is not None:
            # The fleet model determines the shape of the network.
            fixed = TrainConfig.model_fields.keys() & {"gaussians", *SHAPE_HYPERPARAMETERS}
            changes = {**dict.fromkeys(fixed), "init_from": settings.out / fleet_folder}
        run_job: Callable[..., JobOutput] = train_irregular if settings.irregular else train
        if fleet_folder is not None and value_rows.num_records is not None:
            # The split of the fleet model's training, also if only a sample of the records is used: its calibration
            # records are those that the fleet model has not seen.
            run_job = functools.partial(run_job, part_sizes=[value_rows.num_records])
        output = run_job(
            value_rows.tables,
            self._make_settings(directory, changes),
            on_status=self.on_status,
            on_message=self.on_message,
            should_stop=self.should_stop,
            budget=self._take_budget(),
        )
        num_records = (
            value_rows.num_records if value_rows.num_records is not None else sum(output.summary["rows"].values())
        )
        entry = ModelEntry(folder, output.fingerprint, num_records, fleet_folder is not None, digest)
        self.models = replace(self.models, entry_by_value={**self.models.entry_by_value, value_rows.value: entry})
        write_model_set(settings.out, self.models)
        return TrainedValue(value_rows.value, entry, output)

    def _make_settings(self, directory: Path, changes: dict[str, object], excluded: Sequence[str] = ()) -> TrainConfig:
        """Return the settings of one training job.

        Args:
            directory: The model directory that it writes.
            changes: Further settings that differ.
            excluded: Features that are left out, besides those that the user leaves out.
        """
        exclude = tuple(name for name in (*self.settings.exclude, *excluded) if name != self.settings.per)
        common: dict[str, object] = {"out": directory, "per": None, "adapt_below": None, "exclude": exclude}
        return self.settings.model_copy(update=common | changes)

    def _take_budget(self) -> TimeBudget:
        """Return the budget of the next training: an equal part of the time that is left."""
        budget, num_left = self.budget, max(1, self.num_trainings_left)
        self.num_trainings_left -= 1
        # Each job has a budget of its own, because it also measures how long its phases take.
        return TimeBudget(None if budget.limit is None else budget.remaining / num_left, budget.clock)

    def _get_decisive_options(self) -> dict[str, object]:
        """Return the options that decide about the models, as JSON values."""
        other = {"out", "resume", "max_time", "dry_run", "adapt_below"}
        return self.settings.model_dump(mode="json", exclude=other, exclude_none=True)
