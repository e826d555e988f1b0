"""Learn the names of faults from labelled records, for a model whose density is trained already.

The model directory gets a classifier (`calibration.fault_classifier`). Its weights, its calibration and its fingerprint
do not change, so scores, p-values and alerts stay as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.fault_classifier import UNKNOWN, FaultClassifier
from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.schema import Schema
from deformer_stream.record_limits import MAX_NAME_CHARS
from deformer_stream.tables.labels import normalize_label
from trainer.data import DataOptions, create_data_options
from trainer.fault_training import train_classifier
from trainer.prepare import open_with_options
from trainer.settings import TrainConfig
from trainer.tables import TableSource, index_records, read_record_labels
from trainer.value_matrix import encode_table

MIN_RECORDS = 2
"""Smallest number of labelled records of a fault: one to learn from, and one to test what was learnt."""

MAX_RECORDS = 200
"""Largest number of labelled records of a fault that are used. More of them are sampled at random."""

MAX_FAULTS = 100
"""Largest number of faults."""

DEFAULT_LABEL = "fault"
"""The column with the names of faults, if `--label` does not name another one."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LabelledRecords:
    """The labelled records of a table.

    Attributes:
        values: (L, F) values in normalised units or label codes, NaN for features without a reading.
        ranks: (L, F) positions of the readings in their order of arrival, −1 if missing. None if a row is a record.
        fault_indexes: (L,) the index of each record's fault.
        names: The names of the faults in alphabetical order.
        num_left_out: By reason, the number of records that are not used.
    """

    values: NDArray[np.float64]
    ranks: Ints | None
    fault_indexes: Ints
    names: tuple[str, ...]
    num_left_out: dict[str, int]


def learn_faults(
    tables: Sequence[TableSource],
    directory: Path,
    settings: TrainConfig,
    on_message: Callable[[str], None] = lambda line: None,
    is_strict: bool = True,
) -> FaultClassifier | None:
    """Train a classifier of faults on labelled records, and add it to a model directory or replace that of it.

    Args:
        tables: The tables with the labelled records. Their other columns are those of the training tables.
        directory: The model directory.
        settings: All options of `deformer-train`.
        on_message: Called with lines of text about what was learnt.
        is_strict: Whether a table from which nothing can be learnt is an error. Otherwise a message says why, and the
            model directory does not change. Faults with too few records are then left out.

    Returns:
        The classifier; None if there is none.

    Raises:
        ArtifactError: The model directory cannot be read.
        ConfigError: The model is for irregular readings, or an option does not fit the tables.
        InputError: A table cannot be used, or has no labelled records, or one of its labels cannot be used.
    """
    loaded = model_store.read(directory)
    schema = loaded.schema
    if schema.reading_times is not None:
        raise ConfigError(
            f"{directory} is a model for irregular readings, which cannot name faults, because its records have no "
            "fixed set of readings: leave --faults out, or train a model without --irregular"
        )
    label = settings.label or DEFAULT_LABEL
    options = create_data_options(settings)
    with tempfile.TemporaryDirectory() as folder:
        records = read_labelled_records(tables, options, schema, label, Path(folder))
    for reason, count in records.num_left_out.items():
        on_message(f"left out for the names of faults: {format_count(count, 'record')} {reason}")
    counts = np.bincount(records.fault_indexes, minlength=len(records.names))
    rare = [name for name, count in zip(records.names, counts.tolist(), strict=True) if count < MIN_RECORDS]
    problem = _find_problem(records.names, rare, is_strict, label)
    if problem is not None:
        if is_strict:
            raise InputError(problem)
        on_message(f"the names of faults are not learnt: {problem}")
        return None
    if rare:
        on_message(f"left out for the names of faults: {_list_names(rare)}, with fewer than {MIN_RECORDS} records")
        records = _select_faults(records, counts >= MIN_RECORDS)
    records = _sample(records, settings.seed)
    num_faults, num_records = len(records.names), len(records.fault_indexes)
    on_message(f"learning the names of {format_count(num_faults, 'fault')} from {format_count(num_records, 'record')}")
    has_arrivals = records.ranks is not None and loaded.calibration.arrival_order == "arrival"
    ranks = records.ranks if has_arrivals else None
    if loaded.calibration.arrival_order == "schema":
        ranks = np.broadcast_to(np.arange(len(schema)), records.values.shape)
    classifier = train_classifier(
        model=loaded.scoring_model,
        kernels=CpuKernels.for_model(loaded.scoring_model),
        values=records.values,
        fault_indexes=records.fault_indexes,
        names=records.names,
        level=settings.fault_level,
        seed=settings.seed,
        ranks=ranks,
    )
    model_store.write_faults(directory, classifier)
    few = [name for name, count in classifier.num_records_by_fault.items() if count < classifier.min_records]
    if few:
        on_message(
            f"{_list_names(few)}: fewer than {classifier.min_records} records, so these faults are never excluded at "
            f"the level {classifier.level:g}; label more records of them"
        )
    return classifier


def _find_problem(names: Sequence[str], rare: Sequence[str], is_strict: bool, label: str) -> str | None:
    """Return why no classifier can be trained, None if one can be trained."""
    if not names:
        return (
            f"no record has the name of a fault in the column {label!r}; write the name of its fault into each "
            "labelled record, and leave other records empty or name their value with --normal"
        )
    if rare and (is_strict or len(rare) == len(names)):
        return (
            f"{_list_names(rare)}: one record is too few to learn a fault and to test what was learnt; give at least "
            f"{MIN_RECORDS} records of each fault, better 10, or remove its rows"
        )
    if len(names) - len(rare) > MAX_FAULTS:
        return (
            f"the column {label!r} has {len(names)} different values, but at most {MAX_FAULTS} faults can be learnt; "
            "name the column with the names of faults with --label, or merge faults"
        )
    unknown = next((name for name in names if name.casefold() == UNKNOWN), None)
    if unknown is not None:
        return (
            f"the value {unknown!r} of the column {label!r} is the name for records that resemble no known fault; "
            "rename it, or leave it empty in records whose fault is not known"
        )
    too_long = [name for name in names if len(name) > MAX_NAME_CHARS]
    if too_long:
        return (
            f"the name of a fault that begins with {too_long[0][:40]!r} has {len(too_long[0])} characters, but at most "
            f"{MAX_NAME_CHARS} are accepted; shorten it"
        )
    return None


def _list_names(names: Sequence[str]) -> str:
    """Return the first names of faults as text."""
    return ", ".join(map(repr, names[:6])) + (", …" if len(names) > 6 else "")


def read_labelled_records(
    sources: Sequence[TableSource], options: DataOptions, schema: Schema, label: str, folder: Path
) -> LabelledRecords:
    """Read the labelled records of tables.

    Records without a label, with the label `options.normal`, with several labels or without a reading are left out.
    White space around the name of a fault is not part of it.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.
        schema: The features of the model.
        label: The column with the names of faults.
        folder: An existing folder for temporary files.

    Raises:
        InputError: A table cannot be used.
        ConfigError: There is no column with the names of faults, or no feature of the model. Or the column with the
            names is a feature of the model.
    """
    reading = replace(options.reading, kept_columns=options.reading.kept_columns | {label})
    options_of_all = replace(options, label=None, normal=None, reading=reading)
    tables = open_with_options(sources, options_of_all, schema.window)
    if label not in tables.schema.names:
        raise ConfigError(
            f"{tables.tables[0].name} has no column {label!r} with the names of faults; name it with --label: "
            f"{', '.join(tables.schema.names)}"
        )
    if tables.layout == "wide":
        if label in schema.sensor_names:
            # Its value would be a reading of records in a stream, but not of the labelled records.
            raise ConfigError(
                f"the column {label!r} with the names of faults is a feature of the model, whose scores then depend on "
                f"it: train the model again with --label {label}, or name another column with --label"
            )
        tables.feature_columns = [name for name in tables.schema.names if name in schema.sensor_names]
        if not tables.feature_columns:
            raise ConfigError(
                f"{tables.tables[0].name} has no column of the model's features ({', '.join(schema.sensor_names[:6])}"
                f"{', …' if len(schema.sensor_names) > 6 else ''}); give a table with these columns"
            )
    index_records(tables)
    matrix, arrival_ranks = encode_table(tables, schema, folder, options.ties)
    label_indexes, labels, has_several = read_record_labels(tables, label)
    normal = None if options.normal is None else normalize_label(options.normal)
    is_name = np.array([bool(text) and normalize_label(text) != normal for text in labels] + [False])
    is_labelled = is_name[label_indexes]
    has_readings = ~np.isnan(matrix).all(1)
    is_used = is_labelled & ~has_several & has_readings
    num_left_out = {
        "with several labels": int((is_labelled & has_several).sum()),
        "without a reading of a feature": int((is_labelled & ~has_several & ~has_readings).sum()),
    }
    used_indexes, positions = np.unique(label_indexes[is_used], return_inverse=True)
    names = [labels[index] for index in used_indexes.tolist()]
    ranks = np.argsort(sorted(range(len(names)), key=names.__getitem__))  # of the names in alphabetical order
    return LabelledRecords(
        np.asarray(matrix[is_used], np.float64),
        None if arrival_ranks is None else np.asarray(arrival_ranks[is_used], np.int64),
        ranks[positions].astype(np.int64),
        tuple(sorted(names)),
        {reason: count for reason, count in num_left_out.items() if count},
    )


def _select_faults(records: LabelledRecords, is_kept: NDArray[np.bool_]) -> LabelledRecords:
    """Return the records of some of the C faults, (C,)."""
    rows = np.flatnonzero(is_kept[records.fault_indexes])
    names = tuple(name for name, kept in zip(records.names, is_kept.tolist(), strict=True) if kept)
    return replace(
        _select(records, rows), names=names, fault_indexes=(np.cumsum(is_kept) - 1)[records.fault_indexes[rows]]
    )


def _sample(records: LabelledRecords, seed: int) -> LabelledRecords:
    """Return the records with at most `MAX_RECORDS` of each fault."""
    order = np.random.default_rng([seed, 0x5A3]).permutation(len(records.fault_indexes))
    chosen = [order[records.fault_indexes[order] == fault][:MAX_RECORDS] for fault in range(len(records.names))]
    return _select(records, np.sort(np.concatenate(chosen)))


def _select(records: LabelledRecords, rows: Ints) -> LabelledRecords:
    """Return some of the records."""
    ranks = None if records.ranks is None else records.ranks[rows]
    return replace(records, values=records.values[rows], ranks=ranks, fault_indexes=records.fault_indexes[rows])
