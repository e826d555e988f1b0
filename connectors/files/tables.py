"""Find input files and read them in batches, in bounded memory.

Parquet and CSV files are read as batches of rows, JSON lines as lists of lines. A file that is missing, unreadable or
damaged always raises `InputError` with the name of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from deformer_stream.codec.columns import is_time_of_day
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.input_files import list_data_files
from deformer_stream.model.schema import Feature

Layout = Literal["wide", "long"]
"""wide: a row is a record and a column is a feature. long: a row is one reading of one feature of a record."""

PARQUET, CSV, JSON_LINES = (".parquet", ".pq"), (".csv", ".tsv"), (".jsonl", ".ndjson", ".json")
"""Endings of file names, by format."""
DEFAULT_RECORD_COLUMN = "record"
"""The column of record ids in wide tables unless another one is chosen. A table need not have it."""

BLOCK_BYTES = 1 << 20
"""Bytes of text that are read at a time."""

MAX_LISTED_NAMES = 8
"""Number of names in an error message, after which the rest is left out."""


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """Return the input files: each folder among the inputs is replaced by the Parquet, CSV and JSON lines files in it.

    The files of a folder are sorted by path. Hidden files and the metadata of Delta Lake and Iceberg tables are left
    out.

    Args:
        inputs: Paths of files and folders.

    Raises:
        InputError: An input does not exist or has an unknown ending, a folder holds no data file, or a folder is a
            Delta Lake or Iceberg table that may hold outdated files.
    """
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            files_in_folder = list_data_files(entry, PARQUET + CSV + JSON_LINES)
            if not files_in_folder:
                raise InputError(f"{entry}: no Parquet, CSV or JSON lines file in this folder; check the path")
            files += files_in_folder
        elif not entry.exists():
            raise InputError(f"{entry}: no such file or folder; check the path")
        elif entry.suffix.lower() not in PARQUET + CSV + JSON_LINES:
            known_endings = " ".join(PARQUET + CSV + JSON_LINES)
            raise InputError(f"{entry}: unknown kind of file; choose a file whose name ends in one of {known_endings}")
        else:
            files.append(entry)
    if not files:
        raise InputError("no input files were given; name at least one file or folder")
    return files


def check_no_overwrite(inputs: Sequence[str | Path], outputs: Mapping[str, str | Path | None]) -> None:
    """Check that no output file is also an input file or another output file, which would then be overwritten.

    Standard input and output ("-") and special files such as /dev/null are not checked, because writing to them
    destroys nothing.

    Args:
        inputs: Paths of input files and folders.
        outputs: For the name of each option, such as "--alerts", the path of its output file; None or "" if the option
            is not used.

    Raises:
        ConfigError: An output file is also an input or another output.
        InputError: An input does not exist.
    """
    input_files_and_folders = [entry for entry in inputs if str(entry) != "-"]
    input_files = find_files(input_files_and_folders) if input_files_and_folders else []
    use_by_path = {path.resolve(): "an input" for path in input_files}
    for option, output in outputs.items():
        if output is None or str(output) in ("", "-"):
            continue
        path = Path(output).resolve()
        if path in use_by_path:
            raise ConfigError(
                f"{option} {output} would overwrite a file that is also {use_by_path[path]}; choose another path"
            )
        is_special_file = path.exists() and not path.is_file()
        if not is_special_file:
            use_by_path[path] = f"the output of {option}"


@contextmanager
def map_read_errors(path: Path) -> Iterator[None]:
    """Convert errors of the operating system and of Arrow in a `with` block to `InputError` with the file's name.

    Args:
        path: The file that the `with` block reads.
    """
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"{path}: the file cannot be read (permission denied); make it readable for this user"
        ) from error
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        text = str(error).strip()
        reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
        raise InputError(f"{path}: the file cannot be read ({reason}); repair it, or leave it out") from error


@dataclass(frozen=True, slots=True)
class Table:
    """A Parquet or CSV file whose columns are known and whose rows can be read.

    Attributes:
        path: The file.
        schema: Names and types of the columns. The types of a CSV file are inferred from its first block.
        num_rows: Number of rows, or None for a CSV file, whose rows are not counted in advance.
    """

    path: Path
    schema: pa.Schema
    num_rows: int | None

    @staticmethod
    def open(path: Path) -> Table:
        """Open a file to find out the names and types of its columns; no rows are returned.

        Args:
            path: A Parquet or CSV file.

        Raises:
            InputError: The file cannot be read, or two of its columns have the same name.
        """
        with map_read_errors(path):
            if path.suffix.lower() in PARQUET:
                with pq.ParquetFile(path) as file:
                    table = Table(path, file.schema_arrow.remove_metadata(), file.metadata.num_rows)
            else:
                with _open_csv(path, None) as reader:
                    table = Table(path, reader.schema, None)
        names = table.schema.names
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: two columns are called {duplicate!r}; rename one of them")
        return table

    def check_columns(self, time: str | None, record: str = DEFAULT_RECORD_COLUMN) -> None:
        """Check that the columns that the user chose for times and record ids exist.

        Args:
            time: Name of the column of times, or None if the user chose none.
            record: Name of the column of record ids. The default name is not checked, because that column is optional.

        Raises:
            InputError: A chosen column does not exist.
        """
        chosen_record = None if record == DEFAULT_RECORD_COLUMN else record
        for role, name in (("time", time), ("record", chosen_record)):
            if name is not None and name not in self.schema.names:
                columns = ", ".join(self.schema.names)
                raise InputError(
                    f"{self.path}: there is no {role} column {name!r}; choose one of the columns {columns}"
                )

    def format_column_names(self) -> str:
        """Return the names of the first `MAX_LISTED_NAMES` columns as text for an error message."""
        return join_names(self.schema.names)

    def choose_layout(
        self,
        requested: Layout | None,
        record: str = DEFAULT_RECORD_COLUMN,
        feature: str = "feature",
        value: str = "value",
    ) -> Layout:
        """Return the layout of the table: "wide" (a row is a record) or "long" (a row is one reading).

        Args:
            requested: The layout that the user chose, which is returned. None chooses "long" if the table has the three
                columns below, and "wide" otherwise.
            record: Name of the column that identifies the record or the device, in a long table.
            feature: Name of the column with the names of features, in a long table.
            value: Name of the column with values, in a long table.
        """
        if requested is not None:
            return requested
        has_long_columns = {record, feature, value} <= set(self.schema.names)
        return "long" if has_long_columns else "wide"

    def iterate_batches(
        self, columns: Sequence[str], max_rows: int, types: Mapping[str, pa.DataType] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns in batches.

        Args:
            columns: Names of the columns to read.
            max_rows: Maximum number of rows of a batch.
            types: For columns of a CSV file, the types to read them as, in place of the inferred types. They are not
                used for a Parquet file.

        Raises:
            InputError: The file cannot be read, or a cell of a CSV file does not have the column's type.
        """
        with map_read_errors(self.path):
            if self.path.suffix.lower() in PARQUET:
                # With pre_buffer, Arrow would keep all row groups in memory until the file is closed.
                with pq.ParquetFile(self.path, pre_buffer=False) as file:
                    yield from file.iter_batches(batch_size=max_rows, columns=list(columns))
                return
            inferred_types = {field.name: field.type for field in self.schema}
            type_by_column = inferred_types | dict(types or {})
            with _open_csv(self.path, {name: type_by_column[name] for name in columns}) as reader:
                for block in reader:  # a block has as many rows as `BLOCK_BYTES` bytes of text hold
                    for start in range(0, block.num_rows, max_rows):
                        yield block.slice(start, max_rows)


def join_names(names: Sequence[str]) -> str:
    """Return the first `MAX_LISTED_NAMES` names as text for an error message, or "none" if there are no names."""
    ending = ", …" if len(names) > MAX_LISTED_NAMES else ""
    return (", ".join(names[:MAX_LISTED_NAMES]) + ending) or "none"


def choose_csv_type(table: Table, feature: Feature) -> pa.DataType:
    """Return the Arrow type for reading the column of a feature from a CSV file.

    Labels are read as text, and other values as numbers. A column that Arrow recognised as times of day keeps its type.

    Args:
        table: The CSV file.
        feature: A feature for which the table has a column.
    """
    inferred_type = table.schema.field(feature.name).type
    if is_time_of_day(inferred_type) and not feature.labels:
        return inferred_type
    return get_value_type(feature)


def get_value_type(feature: Feature) -> pa.DataType:
    """Return the Arrow type of a feature's values: text for a discrete feature with labels, else float64."""
    return pa.string() if feature.labels else pa.float64()


def _open_csv(path: Path, types: Mapping[str, pa.DataType] | None) -> pc_csv.CSVStreamingReader:
    """Open a CSV file for reading block by block.

    The delimiter is the comma, semicolon or tab, whichever is most frequent in the header line.

    Args:
        path: The file.
        types: The names of the columns to read and their types. None reads all columns and infers their types.

    Raises:
        ArrowException: The file is empty or malformed.
    """
    with path.open("rb") as file:
        header = file.readline(BLOCK_BYTES)
    if not header.strip():  # the callers convert this error to `InputError` with the path of the file
        fault = "its first line is empty" if header else "it is empty"
        raise pa.ArrowInvalid(f"{fault}, but the first line must be a header with the column names")
    delimiter = max(",", ";", "\t", key=lambda candidate: header.count(candidate.encode()))
    # Text cells such as "NA" are null as well, not only cells of numbers.
    convert_options = pc_csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA", "N/A", "null", "NULL"])
    if types is not None:
        convert_options.include_columns = list(types)
        convert_options.column_types = dict(types)
    return pc_csv.open_csv(
        path,
        read_options=pc_csv.ReadOptions(block_size=BLOCK_BYTES),
        parse_options=pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=convert_options,
    )


def read_lines(path: Path, max_line_bytes: int) -> Iterator[list[bytes]]:
    """Read a file in blocks, and for each block yield the list of the lines that end in it, without their line ends.

    Args:
        path: The file.
        max_line_bytes: Longest line that is returned complete. Of a longer line, only the first `max_line_bytes + 1`
            bytes are returned, so that the decoder rejects it as too large.

    Raises:
        InputError: The file cannot be read.
    """
    splitter = LineSplitter(max_line_bytes)
    with map_read_errors(path), path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield splitter.feed(block)
    yield splitter.finish()


class LineSplitter:
    """A converter from blocks of bytes to lines, in bounded memory.

    Blank lines are returned as well, so that lines can be numbered. Of a line that is too long, only the first
    `max_line_bytes + 1` bytes are kept. They are enough for the decoder to reject the line as too large.

    Args:
        max_line_bytes: Maximum length of a line that is returned complete.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._unfinished_line = b""

    def feed(self, block: bytes) -> list[bytes]:
        """Return the lines that end in this block of bytes, without their line ends."""
        *complete_lines, beginning = block.split(b"\n")  # the last part is the beginning of a line that ends later
        if complete_lines:
            complete_lines[0] = self._unfinished_line + complete_lines[0]
            self._unfinished_line = b""
        self._unfinished_line = (self._unfinished_line + beginning)[: self._max_line_bytes + 1]
        return [line[: self._max_line_bytes + 1] for line in complete_lines]

    def finish(self) -> list[bytes]:
        """Return the last line, as a list of one element, if the input did not end with a line end; otherwise []."""
        last_line, self._unfinished_line = self._unfinished_line, b""
        return [last_line] if last_line else []
