"""Training of a detector on a table in memory or in files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from deformer_stream import model_store
from deformer_stream.codec.validation import is_unicode
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.library.detector import Detector, TemporaryFolder
from deformer_stream.library.frames import (
    MAX_LISTED_NAMES,
    TabularRecords,
    check_columns,
    convert_cells,
    read_array,
    read_frame,
    warn,
)
from deformer_stream.model.load_network import require_torch
from deformer_stream.tables.table import Table, TableOptions

if TYPE_CHECKING:
    from trainer.irregular_job import IrregularOutput
    from trainer.job import TrainingOutput


class UnknownOptionError(TypeError):
    """The error of `train` about an option that does not exist. It is a `TypeError`, like that of Python."""


def train(
    records: Any,
    out: str | Path | None = None,
    *,
    columns: Sequence[str] | None = None,
    verbose: bool = False,
    **options: Any,
) -> Detector:
    """Train a model on normal records, as the command `deformer-train` does, and return it as a `Detector`.

    Args:
        records: The training table: a data frame, an Arrow table, a list of dicts, a NumPy array, a path of a file or
            folder, or a list of paths. The data frame may be of pandas, polars or another library that narwhals
            supports. The index of a pandas data frame is left out.
        out: The model directory to write. An existing model directory is replaced when training has succeeded. None
            for a temporary directory that exists as long as the detector; `Detector.save` writes it to another one.
        columns: The names of the columns of a NumPy matrix; by default x0, x1, and so on.
        verbose: Whether to print the features and the progress, as the command does.
        options: The options of `deformer-train` with underscores, such as `max_time="2m"`, `exclude=["id"]` or
            `preset="small"`, and the hyperparameters of its configuration file. `DEFORMER_…` environment variables
            apply as well.

    Returns:
        The trained detector, with its model on the CPU.

    Warns:
        UserWarning: If columns are left out because of their values, or if training reports that the model may be poor.

    Raises:
        TypeError: If an option does not exist.
        ConfigError: If the value of an option is not allowed.
        InputError: If the table cannot be used.
    """
    detector, output = run_training(records, out, options, columns, verbose)
    left_out = [column for column in output.data.excluded_columns if column.has_unsuitable_values]
    if left_out:
        reasons = ", ".join(f"{column.name!r} ({column.reason})" for column in left_out[:MAX_LISTED_NAMES])
        others = f" and {len(left_out) - MAX_LISTED_NAMES} others" if len(left_out) > MAX_LISTED_NAMES else ""
        warn(f"columns are not used: {reasons}{others}; exclude=[...] leaves them out without this warning")
    for entry in output.summary.get("warnings", ()):
        warn(entry["message"])
    return detector


def run_training(
    records: Any,
    out: str | Path | None,
    options: Mapping[str, Any],
    columns: Sequence[str] | None = None,
    verbose: bool = False,
) -> tuple[Detector, TrainingOutput | IrregularOutput]:
    """Train a model, and return the detector with all results of the training job.

    The arguments and errors are those of `train`.

    Returns:
        The detector, with its model on the CPU, and the results of the training job, such as the split of the records.
    """
    require_torch("training")
    from deformer_stream.settings import load_settings
    from trainer import irregular_job, job
    from trainer.feature_table import print_features
    from trainer.global_state import preserve_global_state
    from trainer.settings import TrainConfig

    check_columns(records, columns)
    values = dict(options)
    for name in values.keys() - TrainConfig.model_fields.keys():
        similar = difflib.get_close_matches(name, TrainConfig.model_fields, 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "; deformer-train --help lists the options"
        raise UnknownOptionError(f"train() got an unknown option {name!r}{hint}")
    temporary_folder = TemporaryFolder() if out is None else None
    directory = Path(str(out)) if temporary_folder is None else temporary_folder.path / "model"
    settings = load_settings(TrainConfig, {**values, "out": directory}, None, "train")
    if settings.per is not None:
        raise ConfigError("the option per makes several models, but train() returns one: use deformer-train --per")
    sources: Sequence[Path | Table] | None = _list_paths(records)
    if sources is None:
        kept = [name for name in (settings.label, settings.time_column, settings.device_column) if name is not None]
        table_options = TableOptions.from_settings(settings, kept)
        sources = [Table.from_arrow(_to_training_table(records, columns), "the training table", table_options)]
    run_job = irregular_job.train_irregular if settings.irregular else job.train
    with preserve_global_state():
        if verbose:
            output = run_job(sources, settings, on_prepared=print_features, on_message=print)
        else:
            output = run_job(sources, settings)
    return Detector(model_store.read(directory), temporary_folder), output


def _list_paths(records: object) -> list[Path] | None:
    """Return the paths that an argument names; None if it is no path and no list of paths."""
    if isinstance(records, str | Path):
        return [Path(records)]
    if isinstance(records, list | tuple) and records and all(isinstance(item, str | Path) for item in records):
        return [Path(item) for item in records]
    return None


def _to_training_table(records: Any, columns: Sequence[str] | None) -> pa.Table:
    """Return a training table in memory as an Arrow table.

    Args:
        records: A data frame, an Arrow table, a list of dicts or a NumPy array.
        columns: The names of the columns of a NumPy matrix; None for x0, x1, and so on.

    Raises:
        InputError: The object is none of these, or a cell has a type that no reading can have.
    """
    table: TabularRecords | None
    if isinstance(records, np.ndarray):
        names = columns
        if names is None and records.ndim == 2 and records.dtype.names is None:
            names = [f"x{index}" for index in range(records.shape[1])]
        table = read_array(records, names)
    else:
        table = read_frame(records)
    if table is not None:
        _check_names(table.column_names)
        arrays = {name: table.get_column(name) for name in table.column_names}
        # Metadata of a field states the unit of its values.
        has_metadata = isinstance(records, pa.Table | pa.RecordBatch)
        metadata = {field.name: field.metadata for field in records.schema} if has_metadata else {}
        fields = [pa.field(name, array.type, metadata=metadata.get(name)) for name, array in arrays.items()]
        return pa.table(list(arrays.values()), pa.schema(fields))
    if not isinstance(records, Sequence) or not all(isinstance(record, Mapping) for record in records):
        raise InputError(
            f"a training table of type {type(records).__name__} cannot be read: give a data frame, an Arrow table, a "
            "list of dicts, a NumPy array or paths of files"
        )
    keys = dict.fromkeys(name for record in records for name in record)  # in the order of their first use
    _check_names([str(name) for name in keys])
    cells_by_name = {str(name): [record.get(name) for record in records] for name in keys}
    return pa.table({name: convert_cells(cells, name) for name, cells in cells_by_name.items()})


def _check_names(names: Sequence[str]) -> None:
    """Check that names of columns can be written as UTF-8.

    Raises:
        InputError: One of them contains a lone surrogate.
    """
    for name in names:
        if not is_unicode(name):
            raise InputError(f"the column name {name!r} is not valid Unicode text; rename the column")
