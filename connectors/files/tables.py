"""Finding input files and reading them a block at a time, in bounded memory.

Every way in which a file can fail (missing, unreadable, cut short, not what its name says) is mapped here to
`InputError`."""

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
from deformer_stream.model.schema import Feature

Layout = Literal["wide", "long"]

PARQUET, CSV, LINES = (".parquet", ".pq"), (".csv", ".tsv"), (".jsonl", ".ndjson", ".json")
RECORD = "record"
"""The column of record ids in wide tables, if there is one and no other is asked for."""

BLOCK = 1 << 20
"""Bytes of text read at a time."""


def find(inputs: Sequence[str | Path]) -> list[Path]:
    """The files named, and those inside the folders named, sorted by path within each folder. Raises `InputError`."""
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            inside = sorted(p for p in entry.rglob("*") if p.suffix.lower() in PARQUET + CSV + LINES and p.is_file())
            if not inside:
                raise InputError(f"{entry}: no Parquet, CSV or JSON lines file in this folder; check the path")
            files += inside
        elif not entry.exists():
            raise InputError(f"{entry}: no such file or folder; check the path")
        elif entry.suffix.lower() not in PARQUET + CSV + LINES:
            known = " ".join(PARQUET + CSV + LINES)
            raise InputError(f"{entry}: unknown kind of file; the name must end in one of {known}")
        else:
            files.append(entry)
    if not files:
        raise InputError("no input; name at least one file or folder")
    return files


def check_no_overwrite(inputs: Sequence[str | Path], outputs: Mapping[str, str | Path | None]) -> None:
    """No output takes the place of an input or of another output. inputs: files and folders. outputs: by option, None
    or "" where there is none. Standard streams ("-"), and what is no regular file (/dev/null), cannot be lost. Raises
    `ConfigError`, and `InputError` where there is no such input."""
    entries = [entry for entry in inputs if str(entry) != "-"]
    taken = {path.resolve(): "an input" for path in (find(entries) if entries else [])}
    for option, given in outputs.items():
        if given is None or str(given) in ("", "-"):
            continue
        path = Path(given).resolve()
        if path in taken:
            raise ConfigError(f"{option} {given}: this file is {taken[path]}, too; choose another path")
        if path.is_file() or not path.exists():
            taken[path] = f"that of {option}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Maps what the file system and Arrow raise about `path` to `InputError`."""
    try:
        yield
    except PermissionError as error:
        raise InputError(f"{path}: permission denied; make it readable for this user") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        what = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise InputError(f"{path}: cannot be read ({what}); write the file again, or leave it out") from error


@dataclass(frozen=True, slots=True)
class Table:
    """A Parquet or CSV file. schema: its columns (a CSV's types as its first block suggests). rows: None if not
    known."""

    path: Path
    schema: pa.Schema
    rows: int | None

    @staticmethod
    def open(path: Path) -> Table:
        """Read only what describes the table. Raises `InputError`, also where two columns have one name."""
        with reading(path):
            if path.suffix.lower() in PARQUET:
                with pq.ParquetFile(path) as file:
                    table = Table(path, file.schema_arrow.remove_metadata(), file.metadata.num_rows)
            else:
                with _open_csv(path, None) as reader:
                    table = Table(path, reader.schema, None)
        names = table.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: two columns are called {twice!r}; rename one")
        return table

    def demand(self, time: str | None, record: str = RECORD) -> None:
        """Raises `InputError` where a column that was asked for is not there; `RECORD` nobody need have asked for."""
        for what, name in (("time", time), ("record", None if record == RECORD else record)):
            if name is not None and name not in self.schema.names:
                columns = ", ".join(self.schema.names)
                raise InputError(f"{self.path}: there is no {what} column {name!r}; the columns are {columns}")

    def shown(self) -> str:
        """The columns' names for a message, the first of them."""
        return enumerated(self.schema.names)

    def layout(
        self, asked: Layout | None, record: str = "record", feature: str = "feature", value: str = "value"
    ) -> Layout:
        """The layout asked for, otherwise long where the three columns of a long table are there."""
        return asked or ("long" if {record, feature, value} <= set(self.schema.names) else "wide")

    def batches(
        self, columns: Sequence[str], rows: int, types: Mapping[str, pa.DataType] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """These columns, at most `rows` rows at a time. types: what a CSV's columns are to be read as."""
        with reading(self.path):
            if self.path.suffix.lower() in PARQUET:
                with pq.ParquetFile(self.path, pre_buffer=False) as file:  # or all that was read is held to the end
                    yield from file.iter_batches(batch_size=rows, columns=list(columns))
                return
            kinds = {field.name: field.type for field in self.schema} | dict(types or {})
            with _open_csv(self.path, {name: kinds[name] for name in columns}) as reader:
                for block in reader:
                    for start in range(0, block.num_rows, rows):
                        yield block.slice(start, rows)


def enumerated(names: Sequence[str]) -> str:
    """Names for a message; of many the first eight."""
    return (", ".join(names[:8]) + (", …" if len(names) > 8 else "")) or "none"


def csv_type(table: Table, feature: Feature) -> pa.DataType:
    """What a CSV's column of this feature is to be read as: labels as text, numbers as such or as times of day."""
    kind = table.schema.field(feature.name).type
    return kind if is_time_of_day(kind) and not feature.labels else type_of(feature)


def type_of(feature: Feature) -> pa.DataType:
    """Labels are text, all else is numbers."""
    return pa.string() if feature.labels else pa.float64()


def _open_csv(path: Path, types: Mapping[str, pa.DataType] | None) -> pc_csv.CSVStreamingReader:
    """types: the columns to read and their types; None reads all and infers. The delimiter is the header's
    commonest."""
    with path.open("rb") as file:
        header = file.readline(BLOCK)
    if not header.strip():
        raise pa.ArrowInvalid("empty: a header line is needed")
    delimiter = max(",", ";", "\t", key=lambda d: header.count(d.encode()))
    convert = pc_csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA", "N/A", "null", "NULL"])
    if types is not None:
        convert.include_columns = list(types)
        convert.column_types = dict(types)
    return pc_csv.open_csv(
        path,
        read_options=pc_csv.ReadOptions(block_size=BLOCK),
        parse_options=pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=convert,
    )


def lines(path: Path, limit: int) -> Iterator[list[bytes]]:
    """The lines of a file, a block at a time, without their ends; see `LineSplitter`."""
    splitter = LineSplitter(limit)
    with reading(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            yield splitter.feed(block)
    yield splitter.finish()


class LineSplitter:
    """Cuts a byte stream into lines, blank lines included so that they count, in bounded memory: of a line longer than
    `limit` bytes only the first `limit + 1` are kept, enough for it to be refused as too large."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, block: bytes) -> list[bytes]:
        """The lines that this block completes."""
        *complete, rest = block.split(b"\n")
        if complete:
            complete[0] = self._rest + complete[0]
            self._rest = b""
        self._rest = (self._rest + rest)[: self._limit + 1]
        return [line[: self._limit + 1] for line in complete]

    def finish(self) -> list[bytes]:
        """The last line, where the stream did not end with a line end."""
        last, self._rest = self._rest, b""
        return [last] if last else []
