"""Records as data scientists have them: data frames, Arrow tables and NumPy arrays in, results of the same kind out.

The library accepts every eager data frame that narwhals supports (pandas, polars, Arrow tables and others). It also
accepts Arrow record batches, objects with the Arrow PyCapsule interface, and NumPy arrays. `read_tabular` gives all of
them one interface. Each row is a record and each column a feature. Neither pandas nor polars is imported here, so
neither must be installed.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pyarrow as pa
from narwhals.exceptions import NarwhalsError
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    convert_decimal,
    convert_times_of_day,
    is_numeric,
    is_scalar,
    parse_numbers,
    to_float64,
)
from deformer_stream.codec.fill_values import FillValues
from deformer_stream.codec.validation import RejectionError, is_unicode, not_finite_error
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema, format_label

MAX_LISTED_NAMES = 20
"""Largest number of columns that a warning lists."""

_PACKAGE_FOLDER = str(Path(__file__).parent.parent)  # deformer_stream


class TabularRecords(ABC):
    """N records in a table: each row is a record, each column is a feature or another column.

    Attributes:
        column_names: The names of the columns, as text.
        num_records: The number N of rows.
    """

    column_names: tuple[str, ...]
    num_records: int

    @abstractmethod
    def get_column(self, name: str) -> pa.Array:
        """Return the N cells of a column as an Arrow array.

        Args:
            name: One of `column_names`.

        Raises:
            InputError: A cell is a Python object that is neither a number, a text, a boolean nor a missing value.
        """

    @abstractmethod
    def make_table(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a new table of the same kind as the input, whose rows have the index of rows of the input.

        Args:
            columns: The M cells of each column by name.
            rows: (M,) the row of the input to which each new row belongs. None if M is N and the rows correspond.
        """

    @abstractmethod
    def replace_columns(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a copy of the input in which some columns are replaced or appended.

        Args:
            columns: The M cells of each replaced or appended column by name.
            rows: (M,) the row of the input that each row of the copy repeats. None for all N rows in their order.
        """


class FrameRecords(TabularRecords):
    """Records in a data frame or in an Arrow table.

    Args:
        frame: The data frame, wrapped by narwhals.
        convert: A function that converts an Arrow table to the kind of the user's object. It is used for kinds that
            narwhals does not have, such as Arrow record batches.
    """

    def __init__(self, frame: nw.DataFrame[Any], convert: Callable[[Any], Any] = lambda table: table) -> None:
        self._frame = frame
        self._convert = convert
        # The columns of a pandas data frame can have names that are no texts, such as numbers.
        self._native_name_by_name = {str(name): name for name in frame.columns}
        if len(self._native_name_by_name) < len(frame.columns):
            raise InputError("two columns of the data frame have the same name as text; rename one of them")
        self.column_names = tuple(self._native_name_by_name)
        self.num_records = len(frame)

    def get_column(self, name: str) -> pa.Array:
        """Return the N cells of a column as an Arrow array (see `TabularRecords.get_column`)."""
        series = self._frame[:, list(self._native_name_by_name).index(name)]
        try:
            column = series.to_arrow()
        except (pa.ArrowException, TypeError, ValueError, OverflowError):  # Python objects of different types
            return convert_objects(series.to_list(), name)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def make_table(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a new data frame with the index of the input (see `TabularRecords.make_table`)."""
        return self._convert(self._make_frame(columns, rows).to_native())

    def replace_columns(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a copy of the data frame with other columns (see `TabularRecords.replace_columns`)."""
        frame = self._frame if rows is None else self._frame[rows.tolist()]
        replacements = self._make_frame(columns, rows)
        aliased = [replacements[name].alias(self._native_name_by_name.get(name, name)) for name in columns]
        return self._convert(frame.with_columns(*aliased).to_native())

    def _make_frame(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None) -> nw.DataFrame[Any]:
        """Return a data frame of the same library as the input, with the index of some rows of the input.

        Args:
            columns: The cells of each column by name.
            rows: The row of the input to which each new row belongs, or None if they correspond.
        """
        # An implementation that narwhals knows by its enumeration is accepted as a backend.
        backend: Any = self._frame.implementation
        frame = nw.from_arrow(pa.table(dict(columns)), backend=backend)
        index = nw.maybe_get_index(self._frame)
        if index is None:  # only pandas and libraries like it have an index
            return frame
        native: Any = frame.to_native()
        native.index = index if rows is None else index[rows]
        return nw.from_native(native, eager_only=True)


class ArrayRecords(TabularRecords):
    """Records in a NumPy array: a matrix with one column per feature, or a structured array with named fields.

    Args:
        array: (N, C) values, or (N,) rows with C named fields.
        column_names: The names of the C columns of a matrix.
    """

    def __init__(self, array: NDArray[Any], column_names: Sequence[str]) -> None:
        self._array = array
        self._is_structured = array.dtype.names is not None
        self.column_names = tuple(array.dtype.names or column_names)
        self.num_records = len(array)

    def get_column(self, name: str) -> pa.Array:
        """Return the N cells of a column as an Arrow array (see `TabularRecords.get_column`)."""
        cells = self._array[name] if self._is_structured else self._array[:, self.column_names.index(name)]
        return convert_cells(cells, name)

    def make_table(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a matrix with the given columns; NumPy arrays have no names and no index."""
        return np.column_stack([column.to_numpy(zero_copy_only=False) for column in columns.values()])

    def replace_columns(self, columns: Mapping[str, pa.Array], rows: NDArray[np.int64] | None = None) -> Any:
        """Return a copy of the array, or of some of its rows, with other values in existing columns.

        Args:
            columns: The values by name of the column. A matrix cannot get further columns, so other names are ignored.
            rows: Indexes of the rows to copy; None for all.
        """
        array = self._array.copy() if rows is None else self._array[rows]
        cells_by_name = {
            name: columns[name].to_numpy(zero_copy_only=False) for name in self.column_names if name in columns
        }
        array = array.astype(self._widen_texts(array.dtype, cells_by_name), copy=False)
        for index, name in enumerate(self.column_names):
            if name in cells_by_name:
                target = array[name] if self._is_structured else array[:, index]
                target[:] = cells_by_name[name]
        return array

    def _widen_texts(self, dtype: np.dtype[Any], cells_by_name: Mapping[str, NDArray[Any]]) -> np.dtype[Any]:
        """Return a data type that is wide enough for the texts of the new cells; NumPy would truncate them silently."""

        def widen(old: np.dtype[Any], cells: Iterable[Any]) -> np.dtype[Any]:
            if old.kind != "U":
                return old
            return np.promote_types(old, f"U{max((len(str(cell)) for cell in cells), default=0)}")

        if not self._is_structured:
            return widen(dtype, (cell for cells in cells_by_name.values() for cell in cells))
        fields = [(name, dtype[name]) for name in self.column_names]
        return np.dtype([(name, widen(old, cells_by_name.get(name, ()))) for name, old in fields])


def read_tabular(records: object, schema: Schema, columns: Sequence[str] | None = None) -> TabularRecords | None:
    """Return records in a table, or None if the object is no table, such as a list of dicts.

    Args:
        records: A data frame, an Arrow table or record batch, an object with the Arrow PyCapsule interface, a NumPy
            array, or any other object.
        schema: The features of the model. The columns of a matrix without names have their order.
        columns: The names of the columns of a NumPy matrix. None for the features in the order of the schema.

    Raises:
        InputError: The table is lazy, has the wrong shape, or has two columns of the same name.
    """
    if isinstance(records, np.ndarray):
        is_plain = records.dtype.names is None
        return read_array(records, schema.names if columns is None and is_plain else columns)
    check_columns(records, columns)
    return read_frame(records)


def check_columns(records: object, columns: Sequence[str] | None) -> None:
    """Check that names of columns are only given for a NumPy array.

    Args:
        records: The records.
        columns: The argument `columns`, None if it was not given.

    Raises:
        InputError: Names are given, but the records are no NumPy array.
    """
    if columns is not None and not isinstance(records, np.ndarray):
        raise InputError(
            "the argument columns names the columns of a NumPy array, but the records are of type "
            f"{type(records).__name__}, which has names of its own; leave out the argument"
        )


def read_frame(records: object) -> FrameRecords | None:
    """Return the records of a data frame or an Arrow table; None if the object is neither.

    Args:
        records: A data frame, an Arrow table or record batch, an object with the Arrow PyCapsule interface, or any
            other object.

    Raises:
        InputError: The data frame is lazy or has two columns of the same name.
    """
    if isinstance(records, pa.RecordBatch):
        return FrameRecords(_wrap(pa.Table.from_batches([records])), _to_record_batch)
    frame = _wrap(records)
    if isinstance(frame, nw.LazyFrame):
        raise InputError(
            f"the records are a lazy frame ({type(records).__module__.partition('.')[0]}.{type(records).__name__}), "
            "which has not been computed yet; collect it first"
        )
    if isinstance(frame, nw.DataFrame):
        return FrameRecords(frame)
    if hasattr(records, "__arrow_c_stream__") and not hasattr(records, "__array__"):  # a table, and no series
        return FrameRecords(_wrap(pa.table(records)))
    return None


def read_single_record(record: object) -> Mapping[str, Any] | None:
    """Return an object as one record, a mapping from feature names to values; None if it is no single record.

    Args:
        record: A mapping, a row of a pandas data frame (a series whose index has the names of the features), or any
            other object.
    """
    if isinstance(record, Mapping):
        return record
    series = nw.from_native(record, series_only=True, pass_through=True)
    if isinstance(series, nw.Series) and (index := nw.maybe_get_index(series)) is not None:
        return {str(name): value for name, value in zip(index, series.to_list(), strict=True)}
    return None


def _wrap(records: Any) -> Any:
    """Return a data frame wrapped by narwhals, and any other object unchanged.

    Raises:
        InputError: Two columns of the data frame have the same name.
    """
    try:
        return nw.from_native(records, pass_through=True)
    except NarwhalsError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the data frame cannot be read ({reason}); correct its columns") from None


def _to_record_batch(table: pa.Table) -> pa.RecordBatch:
    """Return an Arrow table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def is_missing(value: object) -> bool:
    """Return whether a cell is None, NaN, `pandas.NA` or `pandas.NaT`: the feature was not observed."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def convert_time(value: time) -> float:
    """Return a time of day as seconds since midnight."""
    return 3600.0 * value.hour + 60.0 * value.minute + value.second + 1e-6 * value.microsecond


def read_array(array: NDArray[Any], columns: Sequence[str] | None) -> ArrayRecords:
    """Return the records of a NumPy array, after checking its shape.

    Args:
        array: (N, C) values, or (N,) rows with named fields.
        columns: The names of the C columns of a matrix; None for an array with named fields.

    Raises:
        InputError: The shape does not fit the names of the columns.
    """
    if array.dtype.names is not None:
        if array.ndim != 1 or columns is not None:
            raise InputError(
                f"the structured array has the shape {array.shape}, but it must have one dimension; leave out the "
                "argument columns, because its fields have names"
            )
        return ArrayRecords(array, ())
    names = tuple(columns or ())
    if array.ndim != 2 and columns is None:
        raise InputError(
            f"the array has the shape {array.shape}, but a matrix (rows, features) is needed; write the values of one "
            "feature as array.reshape(-1, 1), and one record as array.reshape(1, -1)"
        )
    if array.ndim != 2 or array.shape[1] != len(names):
        raise InputError(
            f"the array has the shape {array.shape}, but a matrix with {len(names)} columns is expected "
            f"({list_names(names)}); write a single record as array.reshape(1, -1), and name other columns "
            "with columns=[...]"
        )
    if len(set(names)) < len(names):
        raise InputError("the argument columns contains a name twice; give each column a name of its own")
    return ArrayRecords(array, names)


def convert_cells(cells: Any, name: str) -> pa.Array:
    """Return cells as an Arrow array; NaN becomes null.

    Args:
        cells: A list or a NumPy array with one dimension.
        name: The name of the column, for error messages.

    Raises:
        InputError: A cell is a Python object that is neither a number, a text, a boolean nor a missing value.
    """
    try:
        return pa.array(cells, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # Python objects of different types
        return convert_objects(cells, name)


def convert_objects(cells: Iterable[Any], name: str) -> pa.Array:
    """Convert cells that are Python objects of different types to texts.

    The decoder reads numbers from texts, so a column with the number 1.5 and the text "run" loses nothing.

    Args:
        cells: The cells. None, NaN and missing values of pandas become null.
        name: The name of the column, for the error message.

    Raises:
        InputError: A cell is neither a number, a text, a boolean nor a missing value.
    """
    texts: list[str | None] = []
    for row, cell in enumerate(cells):
        value = _convert_object(cell)
        if is_missing(value):
            texts.append(None)
        elif isinstance(value, str | bool | int | float):
            text = format_label(value)
            if not is_unicode(text):
                raise InputError(
                    f"row {row}, column {name!r} cannot be accepted: the value {text!r} is not valid Unicode text; "
                    "correct its encoding"
                )
            texts.append(text)
        else:
            raise InputError(
                f"row {row}, column {name!r} cannot be accepted: the value has the type {type(value).__name__}; "
                "a number, a text, a boolean or a missing value is expected"
            )
    return pa.array(texts, pa.string())


def _convert_object(cell: object) -> object:
    """Return a number or a time of day of another type as a Python number, and any other object unchanged."""
    if isinstance(cell, np.floating):
        return float(cell)  # also a longdouble, which has no Python type
    if isinstance(cell, np.generic) and not isinstance(cell, np.timedelta64):  # a duration is no reading
        return cell.item()
    if isinstance(cell, Decimal):
        return convert_decimal(cell)
    return convert_time(cell) if isinstance(cell, time) else cell


def read_feature_columns(records: TabularRecords, schema: Schema) -> dict[str, pa.Array]:
    """Return the columns of the table that are features of the model, checked and ready for the decoder of tables.

    Other columns are ignored with a warning. Features without a column count as not observed; if they are more than
    half of the features, there is a warning.

    Args:
        records: The N records.
        schema: The features of the model.

    Returns:
        The N cells of each feature column by name, in the order of the table. Continuous features are float64.

    Raises:
        InputError: No column is a feature, or a value cannot be accepted. The message names its row, from 0, and its
            column.
    """
    present = [name for name in records.column_names if name in schema.code_by_name]
    if not present:
        raise InputError(
            f"no column is a feature of the model (the columns are {list_names(records.column_names)}; the features "
            f"are {list_names(schema.names)}); rename the columns, or load another model"
        )
    # A first column without a name is the index of a data frame that was written to a CSV file.
    named = records.column_names if records.column_names[0] else records.column_names[1:]
    warn_of_unknown_names([name for name in named if name not in schema.code_by_name], "columns")
    missing = [name for name in schema.names if name not in records.column_names]
    if 2 * len(missing) > len(schema):
        warn(
            f"{len(missing)} of {len(schema)} features have no column and count as not observed: {list_names(missing)}"
        )
    return {name: _convert_column(records, schema.features[schema.code_by_name[name]]) for name in present}


def _convert_column(records: TabularRecords, feature: Feature) -> pa.Array:
    """Return the column of a feature as the decoder of tables accepts it.

    Args:
        records: The table.
        feature: The feature, which has a column.

    Raises:
        InputError: The type of the column, or a value, cannot be accepted.
    """
    column = convert_times_of_day(records.get_column(feature.name))
    if not is_scalar(column.type):
        expected = "numbers" if feature.kind == "continuous" else "labels (texts, numbers or booleans)"
        raise InputError(
            f"column {feature.name!r} has the type {column.type}, but the model expects {expected}; convert the column"
        )
    column = FillValues(feature.fill_values).remove(column)
    if feature.kind == "discrete":
        return column
    errors: Mapping[int, RejectionError] = {}
    if is_numeric(column.type):
        values = to_float64(column)  # missing values become NaN
        errors = {int(row): not_finite_error(feature.name, values[row]) for row in np.flatnonzero(np.isinf(values))[:1]}
    else:
        values, errors = parse_numbers(column, feature)
    for row, error in errors.items():
        raise InputError(
            f"row {row}, column {feature.name!r} cannot be accepted: {error.detail} ({error.reason.value})"
        )
    return pa.array(values)


def list_names(names: Sequence[str]) -> str:
    """Return names in quotation marks, separated by commas; only the number of those after the first few."""
    listed = ", ".join(map(repr, names[:MAX_LISTED_NAMES]))
    num_others = len(names) - MAX_LISTED_NAMES
    return f"{listed} and {num_others} others" if num_others > 0 else listed


def warn_of_unknown_names(names: Sequence[str], what: str) -> None:
    """Warn that some columns or keys are ignored, because they are not features of the model.

    Args:
        names: The names. If there are none, there is no warning.
        what: What the names are called: "columns" or "keys".
    """
    if names:
        warn(f"{what} that are not features of the model are ignored: {list_names(names)}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's program that has called the library.

    Args:
        message: One line of text.
        category: The class of the warning, by which programs can filter it.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
