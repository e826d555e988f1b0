"""The data files of the current version of an Apache Iceberg table, read by the extra `iceberg` (pyiceberg).

A table is named by its folder, or by one of its files `metadata/….metadata.json`, such as the one that its catalog
lists. Deleted rows are left out, and columns that were renamed or added have their present names in all files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from deformer_stream.errors import InputError, summarize_error
from deformer_stream.extras import format_remedy, is_installed
from deformer_stream.tables.data_files import RemoteFile, get_s3_server

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_FOLDER = "metadata"
"""Name of the folder with the descriptions of all versions."""

METADATA_ENDING = ".metadata.json"
"""Ending of the names of these descriptions."""

_VERSION = re.compile(r"v?(\d+)(?:-.*)?(?:\.gz)?\.metadata\.json")  # v3.metadata.json, 00003-75821b08.metadata.json
_REMEDY = "write the current version to plain Parquet files, and give their folder"


def choose_metadata(table: str, names: Sequence[str]) -> str:
    """Return the name of the description of the newest version of a table.

    Args:
        table: The folder of the table, for messages.
        names: The names of the files in its metadata folder.

    Raises:
        InputError: No name states a version, or several state the newest one.
    """
    names_by_version: dict[int, list[str]] = {}
    for name in names:
        if match := _VERSION.fullmatch(PurePath(name).name):
            names_by_version.setdefault(int(match[1]), []).append(name)
    newest = sorted(names_by_version[max(names_by_version)]) if names_by_version else []
    if len(newest) != 1:
        found = " and ".join(newest[:2]) or "no file says which version it describes"
        raise InputError(
            f"{table}: the newest version of this Iceberg table is not known ({found}); give the file "
            f"{METADATA_FOLDER}/…{METADATA_ENDING} that its catalog lists"
        )
    return newest[0]


def list_iceberg_files(metadata: str) -> list[IcebergFile]:
    """Return the data files of a version of a table, sorted by path.

    Args:
        metadata: The path or the URL of the file that describes the version.

    Raises:
        InputError: The library is missing, or the table cannot be read, has no rows, or has a feature that the library
            cannot read.
    """
    if not is_installed("pyiceberg"):
        raise InputError(f"{metadata}: Iceberg tables need a package that is not installed: {format_remedy('iceberg')}")
    from pyiceberg.table import StaticTable

    with _map_errors(metadata):
        table = StaticTable.from_metadata(metadata, _make_properties(metadata))
        tasks = sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)
    if not tasks:
        raise InputError(f"{metadata}: this version of the Iceberg table has no rows; check the path")
    return [IcebergFile(task.file.file_path, task.file.file_size_in_bytes, _table=table, _task=task) for task in tasks]


@dataclass(frozen=True)
class IcebergFile(RemoteFile):
    """A data file of an Iceberg table, whose rows are those of one version of the table.

    Names of folders, such as `day=2025-01-31`, state no columns: the table does.
    """

    _table: Any = field(default=None, compare=False, repr=False)
    _task: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the table, without metadata."""
        import pyarrow as pa

        with _map_errors(self.url):
            return pa.schema([pa.field(column.name, column.type) for column in self._table.schema().as_arrow()])

    @property
    def num_rows(self) -> int | None:
        """Number of rows, None if some are deleted."""
        return None if self._task.delete_files else int(self._task.file.record_count)

    @property
    def version(self) -> str:
        """What determines the rows beside the file: the schema of the table, and the files that list deleted rows."""
        deletes = sorted(str(file.file_path) for file in self._task.delete_files)
        return " ".join([f"schema {self._table.schema().schema_id}", *deletes])

    def read(self, columns: Sequence[str], max_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows.

        The library reads the columns of the whole file into memory.

        Raises:
            InputError: The file cannot be read.
        """
        import pyarrow as pa
        from pyiceberg.io.pyarrow import ArrowScan

        names = list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        with _map_errors(self.url):
            scan = self._table.scan(selected_fields=tuple(names))
            batches = ArrowScan(self._table.metadata, self._table.io, scan.projection(), scan.row_filter)
            for batch in batches.to_record_batches([self._task]):
                rows = pa.Table.from_batches([batch]).select(names).cast(schema)
                yield from rows.combine_chunks().to_batches(max_chunksize=max_rows)


@contextmanager
def _map_errors(name: str) -> Iterator[None]:
    """Convert an error of the library in a `with` block to `InputError` with the name of the file or the table."""
    try:
        yield
    except Exception as error:  # the errors of the library have no common base class
        reason = summarize_error(error)[:300]
        raise InputError(f"{name}: this Iceberg table cannot be read ({reason}); {_REMEDY}") from error


def _make_properties(location: str) -> dict[str, str]:
    """Return the settings of the object store that the library does not take from the environment as Arrow does."""
    if not location.startswith("s3://"):
        return {}
    endpoint, region = get_s3_server()
    settings = {"s3.endpoint": endpoint, "s3.region": region}
    return {name: value for name, value in settings.items() if value is not None}
