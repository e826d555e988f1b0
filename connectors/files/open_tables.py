"""The tables among the input files of a command: opening them, what is logged, and names of their records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from deformer_stream import log
from deformer_stream.errors import InputError
from deformer_stream.tables.data_files import DataFile
from deformer_stream.tables.discovery import JSON_LINES, get_stem, has_ending
from deformer_stream.tables.table import Table, TableOptions, describe_bad_rows, join_names


def open_table_files(files: Sequence[DataFile], options: TableOptions) -> dict[DataFile, Table]:
    """Open the tables among the input files.

    Args:
        files: All input files.
        options: How tables are read.

    Returns:
        The table of each file that is not JSON lines, and that can have rows with the condition of the options.

    Raises:
        InputError: A table cannot be read, or rows are to be chosen of JSON lines.
        ConfigError: The condition does not fit a table.
    """
    paths = [path for path in files if not has_ending(path, JSON_LINES)]
    if options.where is not None and len(paths) < len(files):
        lines = next(path for path in files if has_ending(path, JSON_LINES))
        flag = options.where.get_flag(options.where.columns[0])
        raise InputError(f"{lines}: {flag} chooses rows of tables, not of JSON lines; leave it out, or name tables")
    return {table.path: table for table in Table.open_all(paths, options) if table.path is not None}


def log_dialects(tables: Iterable[Table]) -> None:
    """Log how CSV files are read: one entry for all files that are read alike.

    Args:
        tables: The tables, of any format.
    """
    names_by_dialect: dict[str, list[str]] = {}
    for table in tables:
        if table.dialect is not None:
            names_by_dialect.setdefault(table.dialect.describe(), []).append(table.name)
    for description, names in names_by_dialect.items():
        log.get_logger("files").info("csv_dialect", files=join_names(names), dialect=description)


def log_bad_rows(tables: Iterable[Table]) -> None:
    """Log a warning if rows of CSV files were left out because they have a wrong number of cells.

    Args:
        tables: The tables, of any format, whose rows were read.
    """
    description = describe_bad_rows(tables)
    if description is not None:
        log.get_logger("files").warning("malformed_rows", description=description)


def make_record_prefixes(files: Sequence[DataFile]) -> dict[DataFile, str | None]:
    """Return for each file a text that distinguishes its records from those of other files.

    Records without an id get this text and their row number as id.

    Args:
        files: All input files.

    Returns:
        For each file, its name without the ending. If two names are equal, the paths below the folder that all files
        share, without endings. If two of these are equal, the same paths with their endings. A single file has None,
        so that a record's id is only its row number.
    """
    if len(files) == 1:
        return {files[0]: None}
    prefix_by_file: dict[DataFile, str | None] = {path: get_stem(path.name) for path in files}
    if len(set(prefix_by_file.values())) == len(files):
        return prefix_by_file
    # Two files have the same name without ending, so the folders are needed to distinguish them.
    locations: dict[DataFile, PurePath] = {
        path: path.resolve() if isinstance(path, Path) else path.path for path in files
    }
    shared_folder = os.path.commonpath([location.parent for location in locations.values()])
    relative_paths = {path: location.relative_to(shared_folder) for path, location in locations.items()}
    prefix_by_file = {
        path: (relative.parent / get_stem(relative)).as_posix() for path, relative in relative_paths.items()
    }
    if len(set(prefix_by_file.values())) < len(files):
        prefix_by_file = {path: relative.as_posix() for path, relative in relative_paths.items()}
    return prefix_by_file
