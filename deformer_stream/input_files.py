"""Search for the data files in a folder of input, for replay, training and every other command that accepts folders.

Hidden files are skipped. The folder of a Delta Lake or Apache Iceberg table may also hold files of older versions of
the table. Such a folder is accepted only if each data file belongs to the current version, because the table's own list
of files is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from deformer_stream.errors import InputError

_DELTA_LOG = "_delta_log"
_FIRST_DELTA_COMMIT = f"{0:020}.json"  # a commit file is named after the version, with 20 digits
_ICEBERG_METADATA = "metadata"
_EXPORT_CURRENT_VERSION = (
    "all files in the folder would be read, so write the current version to plain Parquet files and give their folder"
)


def list_data_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the data files in a folder and in its subfolders, sorted by path.

    Files and folders are skipped if their name begins with a dot or an underscore, which marks hidden and temporary
    files. The `metadata` folder of an Iceberg table is skipped as well.

    Args:
        folder: The folder.
        suffixes: Endings of the names of data files in lower case, such as ".parquet". Files with the same ending in
            upper case count as well.

    Raises:
        InputError: The folder contains a Delta Lake or Iceberg table that may hold files of older versions.
    """
    # Refuse tables with outdated rows, before any file is returned.
    for log_folder in folder.rglob(_DELTA_LOG):
        if not _is_hidden(log_folder.parent.relative_to(folder)):
            _check_delta_log(log_folder)
    metadata_folders = set()
    for metadata_file in folder.rglob("*.metadata.json"):
        is_table = metadata_file.parent.name == _ICEBERG_METADATA
        if is_table and not _is_hidden(metadata_file.relative_to(folder)):
            _check_iceberg_metadata(metadata_file)
            metadata_folders.add(metadata_file.parent)
    # Some files that describe an Iceberg table have the ending of a data file. They lie in its metadata folder.
    candidates = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    return sorted(
        path
        for path in candidates
        if not _is_hidden(path.relative_to(folder)) and metadata_folders.isdisjoint(path.parents)
    )


def _is_hidden(path: Path) -> bool:
    """Return whether a file or folder name in a path begins with a dot or an underscore.

    Such names mark hidden and temporary files.
    """
    return any(part.startswith((".", "_")) for part in path.parts)


def _check_delta_log(log_folder: Path) -> None:
    """Check that all rows in the files of a Delta Lake table belong to its current version.

    A commit that removes a file leaves the file in the folder for a while, and a deletion vector marks rows of a file
    as deleted. In both cases outdated rows would become part of the input.

    Args:
        log_folder: The folder `_delta_log` of the table, with one file of JSON lines per commit.

    Raises:
        InputError: If a commit removed a file or deleted rows, or if the log is incomplete or not readable.
    """
    table = log_folder.parent
    # Old commits can be deleted from the log. Without the first one, it is unknown whether a commit removed a file.
    if not (log_folder / _FIRST_DELTA_COMMIT).is_file():
        raise InputError(
            f"{table}: this Delta Lake table may hold files of older versions "
            "(without the first commit of its log, which is missing, it is unknown which files were removed): "
            f"{_EXPORT_CURRENT_VERSION}"
        )
    for commit_file in sorted(log_folder.glob("*.json")):
        # Each object adds a file to the table, removes one, or changes a setting.
        for action in _read_json_objects(commit_file, table):
            if "remove" in action:
                raise InputError(
                    f"{table}: this Delta Lake table may hold files of older versions "
                    f"(the commit {commit_file.name} removed a file from it): {_EXPORT_CURRENT_VERSION}"
                )
            if (action.get("add") or {}).get("deletionVector"):
                raise InputError(
                    f"{table}: this Delta Lake table may hold files of older versions "
                    f"(the commit {commit_file.name} deleted rows of a file): {_EXPORT_CURRENT_VERSION}"
                )


def _check_iceberg_metadata(metadata_file: Path) -> None:
    """Check that all rows in the files of an Iceberg table belong to its current version.

    This holds if each snapshot (version) of the table only appended files. Files that were overwritten or deleted stay
    in the folder until they expire, and files that list deleted rows look like data files.

    Args:
        metadata_file: A file `metadata/*.metadata.json` of the table, which lists its snapshots.

    Raises:
        InputError: If a snapshot did anything other than append files, or if the file is not readable.
    """
    table = metadata_file.parent.parent
    for document in _read_json_objects(metadata_file, table, is_one_document=True):
        for snapshot in document.get("snapshots") or []:
            operation = (snapshot.get("summary") or {}).get("operation", "unknown")
            if operation != "append":
                raise InputError(
                    f"{table}: this Iceberg table may hold files of older versions "
                    f"({metadata_file.name} lists a snapshot with the operation {operation!r}): "
                    f"{_EXPORT_CURRENT_VERSION}"
                )


def _read_json_objects(path: Path, table: Path, is_one_document: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file that describes a table; other JSON values in the file are skipped.

    Args:
        path: The file.
        table: The folder of the table, for error messages.
        is_one_document: Whether the file holds one object (Iceberg), instead of one object per line (Delta Lake).

    Raises:
        InputError: The file cannot be read as JSON.
    """
    try:
        content = path.read_bytes()
        for text in [content] if is_one_document else content.splitlines():
            # An empty line is yielded as an object without entries, which states nothing about the table.
            document = orjson.loads(text) if text.strip() else {}
            if isinstance(document, dict):
                yield document
    except (OSError, orjson.JSONDecodeError) as error:
        kind = "Iceberg" if is_one_document else "Delta Lake"
        raise InputError(
            f"{table}: this {kind} table may hold files of older versions (its file {path.name}, which lists the "
            f"changes of the table, cannot be read: {error}): {_EXPORT_CURRENT_VERSION}"
        ) from error
