"""What `imputation` and `reading_imputation` have in common: options, the columns of tables, values, and the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.sources import choose_cell_forms
from deformer_stream import log
from deformer_stream.codec.columns import decode_dictionary, parse_labels, to_python_values
from deformer_stream.engine.events import Rejection
from deformer_stream.errors import InputError
from deformer_stream.model.schema import BOOLEAN_NUMBERS, BOOLEANS, Feature
from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
from deformer_stream.tables.table import CellForm, Table, TableOptions, join_names

if TYPE_CHECKING:
    from deformer_stream.engine.imputation import ImputedValues

ROWS_PER_BATCH = 4096
"""Number of rows that are read and imputed at a time."""
DRAW_COLUMN = "draw"
"""The column with the number of the draw, if gaps are filled by random draws."""

ReportProgress = Callable[[int], None]
"""Receives the number of rows that were finished since the last call."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ImputeOptions:
    """How missing values (gaps) are filled. Each gap has a distribution, given the present values of its row.

    Attributes:
        interval: Probability of the central prediction interval. The bounds of this interval, in which the missing
            value lies with this probability, are written to two additional columns.
        estimate: Which statistic of the distribution fills the gap of a continuous feature.
        quantiles: Probabilities of quantiles to compute, such as 0.05. Each quantile is written to an additional
            column.
        draws: If not None, gaps are filled with random draws from the distribution instead of the estimate. Each row is
            then repeated this number of times, and no columns for the interval and the quantiles are added.
        seed: The seed of the random draws.
    """

    interval: float = 0.9
    estimate: Literal["median", "mean", "mode"] = "median"
    quantiles: tuple[float, ...] = ()
    draws: int | None = None
    seed: int = 0

    def list_added_columns(self, name: str) -> list[str]:
        """Return the names of the columns that are added after the column `name` of a continuous feature.

        There are none if each row is repeated with random draws.
        """
        if self.draws:
            return []
        bounds = [f"{name}__{bound}" for bound in ("low", "high")]
        return bounds + [f"{name}__q{quantile:g}" for quantile in sorted(self.quantiles)]

    def derive_seed(self, first_index: int) -> int:
        """Return the seed of the random draws of a batch, so that the draws of batches are independent.

        Args:
            first_index: Number of the first row or record of the batch.
        """
        seed = np.random.SeedSequence([self.seed, first_index]).generate_state(1, np.uint64)[0]
        return int(seed >> 1)  # 63 bits, so that it fits into a signed integer


def open_imputed_tables(
    sources: Sequence[str | Path], needed: str, table_options: TableOptions | None, kept_columns: Iterable[str]
) -> list[Table]:
    """Open the tables to impute.

    Args:
        sources: Parquet and CSV files, folders of such files, and patterns.
        needed: What the inputs must be, for error messages.
        table_options: How to read the tables: dialect of CSV files and zone of times. None for the defaults.
        kept_columns: As `TableOptions.kept_columns`.

    Raises:
        InputError: An input is no table, or cannot be read.
    """
    files = find_data_files(sources)
    for path in files:
        if has_ending(path, JSON_LINES):
            raise InputError(f"{path}: this input is not {needed}, as imputation needs; name Parquet or CSV files")
    return Table.open_all(files, replace(table_options or TableOptions(), kept_columns=frozenset(kept_columns)))


def check_columns(table: Table, first_table: Table, continuous_columns: Iterable[str], options: ImputeOptions) -> None:
    """Check that columns can be added to a table, and that it has the same columns as the first table.

    Args:
        table: The table.
        first_table: The first table of the input.
        continuous_columns: The columns after which columns are added, of which the table may lack some.
        options: How the gaps are filled. This determines the added columns.

    Raises:
        InputError: A column has the name of a column that is added, or the tables have different columns.
    """
    columns = set(table.schema.names)
    added_columns = [DRAW_COLUMN] if options.draws else []
    for column in continuous_columns:
        if column in columns:
            added_columns += sorted(options.list_added_columns(column))
    for name in added_columns:
        if name in columns:
            raise InputError(
                f"{table.name}: imputation adds a column {name!r}, but the table already has a column of this name; "
                "rename or remove the column of the table"
            )
    different = sorted(columns ^ set(first_table.schema.names))
    if different:
        raise InputError(
            f"{table.name}: this table and {first_table.name} have different columns ({join_names(different)}); "
            "impute them one by one"
        )


def unify_column_types(tables: Sequence[Table], feature_by_name: dict[str, Feature]) -> dict[str, pa.DataType]:
    """Return the type of each column, which fits its cells in all tables.

    Args:
        tables: The tables, which have the same columns.
        feature_by_name: The features that have columns of their own, by name; empty for long tables.

    Raises:
        InputError: A column has types in two tables that do not fit each other.
    """
    type_by_column: dict[str, pa.DataType] = {}
    for table in tables:
        types = _find_column_types(table, choose_cell_forms(table, feature_by_name), feature_by_name)
        for name, column_type in types.items():
            fields = [pa.field(name, known) for known in (type_by_column.get(name, column_type), column_type)]
            try:
                unified = pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive")
            except pa.ArrowException as error:
                raise InputError(
                    f"{table.name}: column {name!r} has the type {column_type}, but another table has "
                    f"{type_by_column[name]}; convert the columns to the same type, or impute the tables one by one"
                ) from error
            type_by_column[name] = unified.field(name).type
    return {name: type_by_column[name] for name in tables[0].schema.names}


def _find_column_types(
    table: Table, forms: dict[str, CellForm], feature_by_name: dict[str, Feature]
) -> dict[str, pa.DataType]:
    """Return the type of each column of the table, as its cells are read.

    The types of a CSV file are guessed from its beginning. It is read once more here, because a column that is copied
    must have a type that fits all of its cells. Features keep the type of their values.

    Args:
        table: The table.
        forms: What the cells of features are to be.
        feature_by_name: The features of the model by name.
    """
    type_by_column: dict[str, pa.DataType] = dict(zip(table.schema.names, table.schema.types, strict=True))
    for name, form in forms.items():
        if table.is_text_column(name) and (form == "number" or table.dialect is not None):
            type_by_column[name] = get_value_type(feature_by_name[name])
    if table.dialect is None:
        return type_by_column
    copied_columns = [name for name in table.schema.names if name not in forms and name not in table.partition_values]
    types_by_column: dict[str, set[pa.DataType]] = {name: set() for name in copied_columns}
    for batch in table.iterate_batches(copied_columns, ROWS_PER_BATCH) if copied_columns else ():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count < len(column):
                types_by_column[name].add(column.type)
    for name, types in types_by_column.items():
        if types <= {pa.int64(), pa.float64()} and len(types) > 1:
            type_by_column[name] = pa.float64()
        elif types:
            type_by_column[name] = types.pop() if len(types) == 1 else pa.string()
    return type_by_column


def get_value_type(feature: Feature) -> pa.DataType:
    """Return the Arrow type of a feature's values: text for a discrete feature with labels, else float64."""
    return pa.string() if feature.labels else pa.float64()


_SPELLING_STYLES: tuple[Callable[[str], str], ...] = (
    str,
    str.upper,
    str.capitalize,
    lambda label: dict(zip(BOOLEANS, BOOLEAN_NUMBERS, strict=True)).get(label, label),
    lambda label: dict(zip(BOOLEAN_NUMBERS, BOOLEANS, strict=True)).get(label, label),
)
"""How the texts of a column may differ from the labels of its feature; the first one that fits is used."""


class LabelSpellings:
    """The spelling of the labels of a discrete feature in columns of texts, such as True for the label "true".

    Args:
        feature: The feature.
    """

    def __init__(self, feature: Feature) -> None:
        self._feature = feature
        self._code_by_label = {label: code for code, label in enumerate(feature.labels)}
        self._counts: Counter[tuple[int, str]] = Counter()  # by label code and text

    def add(self, column: pa.Array) -> None:
        """Count the texts of a column that are labels of the feature.

        Args:
            column: The cells, which are texts.
        """
        counts = decode_dictionary(column).drop_null().value_counts()
        texts = counts.field("values")
        codes, _ = parse_labels(texts, self._code_by_label, self._feature.name)
        rows = zip(codes.tolist(), to_python_values(texts), counts.field("counts").to_pylist(), strict=True)
        for code, text, count in rows:
            if code < len(self._code_by_label):  # false for NaN, for unseen labels and for rejected cells
                self._counts[int(code), str(text)] += count

    def list_labels(self) -> list[str]:
        """Return the text of each label by code: the most frequent one of the columns.

        A label that the columns do not have is spelled in the way of the others, or as in the model.
        """
        text_by_code: dict[int, str] = {}
        for (code, text), _ in self._counts.most_common():
            text_by_code.setdefault(code, text)
        labels = self._feature.labels
        fits = (all(style(labels[code]) == text for code, text in text_by_code.items()) for style in _SPELLING_STYLES)
        style = next(compress(_SPELLING_STYLES, fits), str)
        spelled = [style(label) for label in labels]
        codes, _ = parse_labels(pa.array(spelled, pa.string()), self._code_by_label, self._feature.name)
        return [
            text_by_code.get(code, spelled[code] if codes[code] == code else label) for code, label in enumerate(labels)
        ]


def copy_column(column: pa.Array, column_type: pa.DataType) -> pa.Array:
    """Return a column that is not imputed, in the type that it has in the output."""
    return column if column.type == column_type else column.cast(column_type)


def make_output_schema(
    fields: Iterable[pa.Field], continuous_columns: Iterable[str], options: ImputeOptions
) -> pa.Schema:
    """Return the Arrow schema of the output: fields, each followed by those that are added for it.

    Args:
        fields: The columns of the tables, with their types in the output.
        continuous_columns: The columns after which columns are added. These get the metadata of the column.
        options: How the gaps are filled. This determines the added columns.
    """
    output_fields: list[pa.Field] = []
    continuous = set(continuous_columns)
    for field in fields:
        output_fields.append(field)
        if field.name in continuous:
            added_columns = options.list_added_columns(field.name)
            output_fields += [pa.field(name, pa.float64(), metadata=field.metadata) for name in added_columns]
    if options.draws:
        output_fields.append(pa.field(DRAW_COLUMN, pa.int64()))
    return pa.schema(output_fields)


def compute_columns(
    impute: Callable[[float], ImputedValues], impute_quantiles: Callable[[list[float]], Floats], options: ImputeOptions
) -> list[Floats]:
    """Compute the values that fill gaps without random draws, and those of the added columns.

    Args:
        impute: Returns estimates and intervals for a probability of the interval.
        impute_quantiles: Returns the quantiles, (Q, …), for Q probabilities.
        options: Which values are computed.

    Returns:
        The estimates, then the added columns in the order of `ImputeOptions.list_added_columns`.
    """
    imputed = impute(options.interval)
    estimates = {"median": imputed.median, "mean": imputed.mean, "mode": imputed.mode}[options.estimate]
    # A discrete feature has no mean or mode; its most probable label is stored as the median.
    estimates = np.where(np.isnan(estimates), imputed.median, estimates)
    quantiles = impute_quantiles(sorted(options.quantiles)) if options.quantiles else ()
    return [estimates, imputed.low, imputed.high, *quantiles]


def make_nullable(values: Floats) -> pa.Array:
    """Return numbers as an Arrow array of float64 with nulls in place of NaN."""
    return pa.array(values, pa.float64(), mask=np.isnan(values))


@dataclass(slots=True)
class BadCells:
    """The cells of features that cannot be read.

    Attributes:
        num_cells: Number of these cells.
        first: Which cell was the first one, and what is wrong with it; "" if there is none.
    """

    num_cells: int = 0
    first: str = ""

    def add(self, table: Table, rows: NDArray[np.int64], rejections: Sequence[Rejection]) -> None:
        """Count the cells that were rejected in some rows.

        Args:
            table: The table.
            rows: (N,) numbers of these rows in the table.
            rejections: The rejections of the codec.
        """
        self.num_cells += sum(rejection.num_readings for rejection in rejections)
        if rejections and not self.first:
            row = int(rows[min(rejection.message_index for rejection in rejections)])
            first = min(rejections, key=lambda rejection: rejection.message_index)
            self.first = f"{table.name}: row {row}, {first.detail}"

    def log(self) -> None:
        """Log a warning if there are such cells."""
        if self.num_cells:
            log.get_logger("impute").warning(
                "cells_not_read",
                cells=self.num_cells,
                first=self.first,
                remedy="correct these cells, or empty them to have them filled",
            )
