"""Show which features a training would learn, from the first rows of its tables (`deformer-train --dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from deformer_stream.counts import format_count
from deformer_stream.model.schema import Schema
from trainer.data import DataOptions, Split, TrainingTable, create_data_options
from trainer.feature_table import print_features
from trainer.irregular_table import prepare_irregular_table
from trainer.per_value_tables import create_options, open_tables_with_column
from trainer.prepare import prepare_table
from trainer.reading_time import ReadingMonitor
from trainer.settings import TrainConfig
from trainer.tables import TableSource, TooFewRecordsError

ROW_LIMITS = (20_000, 400_000, None)
"""Numbers of rows that are read, one after the other, until there are enough records; None for all rows."""


def preview_table(
    sources: Sequence[TableSource], options: DataOptions, is_irregular: bool = False
) -> tuple[TrainingTable, int, bool]:
    """Prepare the first rows of training tables, and delete the matrix of values.

    More rows are read if the first ones contain too few records, such as long windows of time.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.
        is_irregular: Whether the readings are irregular (`--irregular`).

    Returns:
        The prepared table, whose matrix is no longer on disk; the number of rows that were read; and whether these are
        all rows.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
    """
    prepare = prepare_irregular_table if is_irregular else prepare_table
    for max_rows in ROW_LIMITS:
        monitor = ReadingMonitor()
        try:
            with TemporaryDirectory() as folder:
                data = prepare(sources, options, Path(folder), monitor, max_rows)
            return data, monitor.num_rows, max_rows is None or monitor.num_rows < max_rows
        except TooFewRecordsError:
            if max_rows is None or monitor.num_rows < max_rows:
                raise
    raise AssertionError("the last limit is None")


def print_preview(sources: Sequence[TableSource], settings: TrainConfig) -> None:
    """Print to standard output which features a training with these settings would learn, and why.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        settings: All options of `deformer-train`. With `per`, the features of all values are shown together. Nothing is
            written to `settings.out`.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
    """
    options = create_data_options(settings, _read_old_schema(settings))
    if settings.per is not None:
        tables = open_tables_with_column(sources, create_options(settings, settings.per), settings.per)
        if tables.layout == "wide" and settings.per not in (tables.device_column, *options.exclude):
            options = replace(options, exclude=(*options.exclude, settings.per))
    data, num_rows, are_all_rows = preview_table(sources, options, settings.irregular)
    print_features(data)
    for _, message in data.warnings:
        print(f"warning: {message}")
    rows = (
        f"all {format_count(num_rows, 'row')}"
        if are_all_rows
        else f"the first {format_count(num_rows, 'row')}; others may change it"
    )
    num_train = len(data.select_rows(Split.TRAIN))
    if settings.per is not None:
        print(f"--per {settings.per}: each value gets a model of the features that occur in its records")
    print(
        f"dry run: {format_count(len(data.schema), 'feature')} from {rows} "
        f"({format_count(len(data.split), 'record')}, {num_train:,} of them for training); nothing was written"
    )


def _read_old_schema(settings: TrainConfig) -> Schema | None:
    """Return the schema of the model that would be adapted (`--init-from`), None without this option.

    Raises:
        ArtifactError: The model directory cannot be read.
    """
    if settings.init_from is None:
        return None
    from deformer_stream import model_store  # imports PyTorch, which a dry run without this option does not need

    return model_store.read(settings.init_from).schema
