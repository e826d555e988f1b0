"""Find the data files in a folder of input, for replay, training and every other command that accepts folders.

Hidden files are skipped. The folder of a Delta Lake or Apache Iceberg table is accepted only if each of its data files
belongs to the table's current version, because no command reads the table's own list of files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from deformer_stream.errors import InputError

_DELTA_LOG = "_delta_log"
_FIRST_DELTA_COMMIT = f"{0:020}.json"
_ICEBERG_METADATA = "metadata"


def list_data_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the data files in a folder and in its subfolders, sorted by path.

    Skipped are files and folders whose name begins with a dot or an underscore, which marks hidden and temporary files,
    and the `metadata` folder of an Iceberg table.

    Args:
        folder: The folder.
        suffixes: Endings of file names in lower case, such as ".parquet". Case is ignored.

    Raises:
        InputError: The folder contains a Delta Lake or Iceberg table that may hold files of older versions.
    """
    for log_folder in folder.rglob(_DELTA_LOG):
        if not _is_hidden(log_folder.parent.relative_to(folder)):
            _check_delta_log(log_folder)
    metadata_folders = set()
    for metadata_file in folder.rglob("*.metadata.json"):
        is_table = metadata_file.parent.name == _ICEBERG_METADATA
        if is_table and not _is_hidden(metadata_file.relative_to(folder)):
            _check_iceberg_metadata(metadata_file)
            metadata_folders.add(metadata_file.parent)
    candidates = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    return sorted(
        path
        for path in candidates
        if not _is_hidden(path.relative_to(folder)) and metadata_folders.isdisjoint(path.parents)
    )


def _is_hidden(path: Path) -> bool:
    """Return whether any part of a path begins with a dot or an underscore, which marks hidden and temporary files."""
    return any(part.startswith((".", "_")) for part in path.parts)


def _check_delta_log(log_folder: Path) -> None:
    """Raise `InputError` unless all files that were ever added to a Delta Lake table are complete parts of it today.

    A commit that removes a file leaves the file in the folder for a while, and a deletion vector marks rows of a file
    as deleted. Either would make outdated rows part of the input.

    Args:
        log_folder: The folder `_delta_log` of the table, with one file of JSON lines per commit.
    """
    table = log_folder.parent
    if not (log_folder / _FIRST_DELTA_COMMIT).is_file():
        raise _make_outdated_error(table, "Delta Lake", "the first commit of its log is missing")
    for commit_file in sorted(log_folder.glob("*.json")):
        for action in _read_json_lines(commit_file, table):
            if "remove" in action:
                raise _make_outdated_error(table, "Delta Lake", f"{commit_file.name} removes a file")
            if (action.get("add") or {}).get("deletionVector"):
                raise _make_outdated_error(table, "Delta Lake", f"{commit_file.name} deletes rows of a file")


def _check_iceberg_metadata(metadata_file: Path) -> None:
    """Raise `InputError` if a snapshot of an Iceberg table did anything else than append files.

    Overwritten and deleted files stay in the folder until they expire, and files of row deletions look like data.

    Args:
        metadata_file: A file `metadata/*.metadata.json` of the table.
    """
    table = metadata_file.parent.parent
    for document in _read_json_lines(metadata_file, table, is_one_document=True):
        for snapshot in document.get("snapshots") or []:
            operation = (snapshot.get("summary") or {}).get("operation", "unknown")
            if operation != "append":
                raise _make_outdated_error(
                    table, "Iceberg", f"{metadata_file.name} lists a snapshot with the operation {operation!r}"
                )


def _read_json_lines(path: Path, table: Path, is_one_document: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a metadata file.

    Args:
        path: The file.
        table: The folder of the table, for error messages.
        is_one_document: Whether the file holds one object, instead of one object per line.

    Raises:
        InputError: The file cannot be read as JSON.
    """
    try:
        content = path.read_bytes()
        for text in [content] if is_one_document else content.splitlines():
            document = orjson.loads(text) if text.strip() else {}
            if isinstance(document, dict):
                yield document
    except (OSError, orjson.JSONDecodeError) as error:
        kind = "Iceberg" if is_one_document else "Delta Lake"
        raise _make_outdated_error(table, kind, f"{path.name} cannot be read") from error


def _make_outdated_error(table: Path, kind: str, reason: str) -> InputError:
    """Return the error for a table whose folder may hold rows that are no longer part of the table."""
    return InputError(
        f"{table}: this {kind} table may hold files of older versions ({reason}), and all files would be read; "
        "write the current version to plain Parquet files and give their folder"
    )
