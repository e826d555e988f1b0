"""Find the input files of a command: files, folders and quoted patterns such as `'logs/*.parquet'`, local or remote.

Nothing heavy is imported here, so that every command can report a wrong path at once. Hidden files in folders are
skipped. The folder of a Delta Lake or Apache Iceberg table may also hold files of older versions of the table. An input
can be the folder of such a table. If the extra `delta` or `iceberg` is installed, only the files of the current version
are then input files. Other folders of tables are accepted only if each data file belongs to the current version.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NoReturn

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.extras import format_remedy, is_installed
from deformer_stream.tables import delta, iceberg
from deformer_stream.tables.data_files import (
    DataFile,
    RemoteFile,
    describe_unknown_scheme,
    find_remote,
    is_pattern,
    parse_url,
)
from deformer_stream.tables.delta import DELTA_LOG
from deformer_stream.tables.iceberg import METADATA_ENDING, METADATA_FOLDER, IcebergFile

PARQUET = (".parquet", ".pq")
"""Endings of the names of Parquet files."""
CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
"""Endings of the names of CSV files."""
TABLES = PARQUET + CSV
"""Endings of the names of files that hold a table."""
JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Endings of the names of files of JSON lines."""

_PARQUET_MAGIC = b"PAR1"  # the first bytes of each Parquet file
_COMPRESSED = (".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_FIRST_DELTA_COMMIT = f"{0:020}.json"  # a commit file is named after the version, with 20 digits
_EXPORT_CURRENT_VERSION = (
    "all files in the folder would be read, so write the current version to plain Parquet files and give their folder"
)
_READ_DELTA_LOG, _READ_ICEBERG_METADATA = (
    f"{_EXPORT_CURRENT_VERSION}; or install what reads a table that is an input itself: {format_remedy(extra)}"
    for extra in ("delta", "iceberg")
)


def has_ending(path: str | DataFile, endings: Collection[str]) -> bool:
    """Return whether the name of a file ends with one of several endings, in lower or upper case.

    Args:
        path: The file.
        endings: Endings in lower case, such as ".parquet" or ".csv.gz".
    """
    return PurePath(str(path)).name.lower().endswith(tuple(endings))


def get_stem(path: str | PurePath) -> str:
    """Return the name of a file without its folder and its ending; `.csv.gz` is one ending."""
    name = PurePath(path).name
    return PurePath(name[: -len(".gz")] if has_ending(name, _COMPRESSED) else name).stem


def find_files(inputs: Sequence[str | Path], endings: Collection[str] = TABLES + JSON_LINES) -> list[Path]:
    """Return the local input files; see `find_data_files`.

    Raises:
        InputError: As for `find_data_files`, or an input is the URL of an object store or an Iceberg table.
    """
    url = next((url for entry in inputs if (url := parse_url(entry)) is not None), None)
    if url is not None:
        raise InputError(f"{url}: this command reads local files only; copy the files to this machine, and name them")
    files: list[Path] = []
    for file in find_data_files(inputs, endings):
        if not isinstance(file, Path):
            raise InputError(
                f"{', '.join(map(str, inputs))}: this command does not read Iceberg tables; write the table to Parquet "
                "files, and name these"
            )
        files.append(file)
    return files


def find_data_files(inputs: Sequence[str | Path], endings: Collection[str] = TABLES + JSON_LINES) -> list[DataFile]:
    """Return the input files: folders and patterns among the inputs are replaced by the data files that they denote.

    The files of a folder or of a pattern are sorted by path. Hidden files, files with other endings, and the metadata
    of Delta Lake and Iceberg tables are left out there. A Parquet file that is an input itself, and not found
    in a folder, may have any ending.

    Args:
        inputs: Paths of files and folders, and patterns with `*`, `?`, `[…]` and `**` (any number of folders). URLs of
            object stores, such as `s3://bucket/logs/*.parquet`, may be files, folders and patterns as well.
        endings: Endings of the names of data files in lower case.

    Raises:
        InputError: An input does not exist, has an unknown ending or cannot be read, or a folder or a pattern holds no
            data file. Or a folder is a Delta Lake or Iceberg table that may hold outdated files, or a file is named
            twice.
        ConfigError: A URL contains credentials or has no bucket.
    """
    files: list[DataFile] = []
    for text in inputs:
        with _map_permission_errors():
            files += _find_files_of_input(text, endings)
    if not files:
        raise InputError("no input files were given; name at least one file or folder")
    _check_named_once(files)
    return files


def _find_files_of_input(text: str | Path, endings: Collection[str]) -> Sequence[DataFile]:
    """Return the data files that one input denotes. See `find_data_files`."""
    url, entry = parse_url(text), Path(text)
    if url is not None:
        return _find_remote_files(url, endings)
    if is_delta_table(text):
        return [entry / path for path in delta.list_delta_files(str(entry))]
    if _is_iceberg_metadata(entry) or (is_installed("pyiceberg") and _list_metadata(entry)):
        return _list_iceberg_files(entry)
    if entry.is_dir():
        files = list_data_files(entry, endings)
        if not files:
            raise InputError(f"{entry}: no {_name_formats(endings)} file in this folder; check the path")
        return files
    if entry.exists():
        if not has_ending(entry, endings) and not _is_parquet(entry):
            raise _make_unknown_kind_error(entry, endings)
        return [entry]
    if (reason := describe_unknown_scheme(entry)) is not None:
        raise InputError(reason)
    if is_pattern(str(entry)):
        return _expand_pattern(str(entry), endings)
    raise InputError(f"{entry}: no such file or folder; check the path")


@contextmanager
def _map_permission_errors() -> Iterator[None]:
    """Convert errors about missing permissions in a `with` block to `InputError`."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"{error.filename}: the file or folder cannot be read (permission denied); make it readable for this user, "
            "or name other files"
        ) from error


def is_delta_table(text: str | Path) -> bool:
    """Return whether an input is the folder of a Delta Lake table whose current version is read."""
    if not is_installed("deltalake"):
        return False
    url = parse_url(text)
    if url is None:
        return (Path(text) / DELTA_LOG).is_dir()
    return _has_delta_log(*find_remote(url))


def _has_delta_log(found: Sequence[RemoteFile], folder: PurePosixPath | None) -> bool:
    """Return whether a remote folder with these files is that of a Delta Lake table; None stands for no folder."""
    return folder is not None and any(file.path.parent == folder / DELTA_LOG for file in found)


def _check_named_once(files: Sequence[DataFile]) -> None:
    """Raise `InputError` if two paths are those of the same file, because its rows would be read twice."""
    path_by_target: dict[DataFile, DataFile] = {}
    for path in files:
        other = path_by_target.setdefault(path.resolve() if isinstance(path, Path) else path, path)
        if other is not path:
            also = "" if str(other) == str(path) else f" (also as {other})"
            raise InputError(f"{path}: the input names this file twice{also}; name every file once")


def _is_iceberg_metadata(path: PurePath) -> bool:
    """Return whether a path is that of a file that describes a version of an Iceberg table."""
    return path.name.endswith(METADATA_ENDING) and path.parent.name == METADATA_FOLDER


def _list_metadata(folder: Path) -> list[str]:
    """Return the files that describe the versions of an Iceberg table; an empty list for other folders."""
    return [str(path) for path in (folder / METADATA_FOLDER).glob(f"*{METADATA_ENDING}")]


def _list_iceberg_files(entry: Path) -> list[IcebergFile]:
    """Return the data files of an Iceberg table on this machine.

    Args:
        entry: The folder of the table, or the file that describes one of its versions.

    Raises:
        InputError: The table cannot be read, or the library that reads it is missing.
    """
    if entry.is_dir():
        entry = Path(iceberg.choose_metadata(str(entry), _list_metadata(entry)))
    return iceberg.list_iceberg_files(str(entry.resolve()))


def _make_unknown_kind_error(entry: DataFile, endings: Collection[str]) -> InputError:
    """Return the error for a file whose name ends in none of the given endings."""
    known_endings = " ".join(endings)
    if has_ending(entry, JSON_LINES):
        return InputError(
            f"{entry}: JSON lines are not a table; deformer-stream init {entry} converts them to one, or choose a file "
            f"whose name ends in one of {known_endings}"
        )
    return InputError(f"{entry}: unknown kind of file; choose a file whose name ends in one of {known_endings}")


def _find_remote_files(url: str, endings: Collection[str]) -> list[RemoteFile]:
    """Return the data files that a URL of an object store denotes, sorted by path.

    Args:
        url: The URL of a file or a folder, or a pattern.
        endings: Endings of the names of data files in lower case.

    Raises:
        InputError: See `find_data_files`.
        ConfigError: The URL has no bucket.
    """
    found, folder = find_remote(url)
    if folder is None and _is_iceberg_metadata(found[0].path):
        return list(iceberg.list_iceberg_files(url))
    if folder is None:
        if not has_ending(found[0], endings) and not _is_parquet(found[0]):
            raise _make_unknown_kind_error(found[0], endings)
        return found
    if _has_delta_log(found, folder) and is_installed("deltalake"):
        return _choose_current_files(url, folder, found)
    metadata = [file.url for file in found if _is_iceberg_metadata(file.path) and file.path.parents[1] == folder]
    if metadata and is_installed("pyiceberg"):
        return list(iceberg.list_iceberg_files(iceberg.choose_metadata(url, metadata)))
    visible = [file for file in found if not _is_hidden(file.path.relative_to(folder))]
    for file in found:
        table = _find_table_folder(file.path)
        if table is not None and table.is_relative_to(folder) and not _is_hidden(table.relative_to(folder)):
            remedy = _READ_ICEBERG_METADATA if _is_iceberg_metadata(file.path) else _READ_DELTA_LOG
            raise InputError(
                f"{url}: the files of this table may be those of older versions (it is a Delta Lake or Iceberg table, "
                f"with {file}, which is not read): {remedy}"
            )
    files = [file for file in visible if has_ending(file, endings)]
    if not files and is_pattern(url):
        raise InputError(
            f"{url}: no {_name_formats(endings)} file matches this pattern; check the pattern and the folder"
        )
    if not files:
        raise InputError(f"{url}: no {_name_formats(endings)} file in this folder; check the URL")
    return files


def _choose_current_files(url: str, folder: PurePosixPath, found: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the data files of the current version of a Delta Lake table.

    Args:
        url: The URL of its folder.
        folder: The folder, as `RemoteFile.path` states it.
        found: All files in the folder.

    Raises:
        InputError: The log cannot be read, or a file is missing.
    """
    file_by_path = {file.path: file for file in found}
    paths = delta.list_delta_files(url)
    missing = next((path for path in paths if folder / path not in file_by_path), None)
    if missing is not None:
        raise InputError(f"{url}/{missing}: the log of the Delta Lake table lists this file, but it does not exist")
    return [file_by_path[folder / path] for path in paths]


def _find_table_folder(path: PurePosixPath) -> PurePosixPath | None:
    """Return the folder of the Delta Lake or Iceberg table whose metadata a file belongs to; None for other files."""
    if path.parent.name == DELTA_LOG:
        return path.parent.parent
    return path.parent.parent if _is_iceberg_metadata(path) else None


def _expand_pattern(pattern: str, endings: Collection[str]) -> list[Path]:
    """Return the data files that a pattern such as `logs/*.parquet` matches, sorted by path.

    A folder that the pattern matches stands for the data files in it. With `**`, a folder and the files in it may both
    match; each file is returned once. Hidden files and folders are skipped, and so are the files that describe Delta
    Lake and Iceberg tables, unless the part of the pattern before its first wildcard names their folder.

    Raises:
        InputError: The pattern matches no data file.
    """
    files: set[Path] = set()
    # The part of the pattern before the first name with a wildcard.
    base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    for match in map(Path, glob.iglob(pattern, recursive=True)):
        if _is_hidden(match.relative_to(base)):
            continue
        if match.is_dir():
            files.update(list_data_files(match, endings))
        elif has_ending(match, endings) and not _describes_iceberg_table(match, base):
            files.add(match)
    if not files:
        raise InputError(
            f"{pattern}: no {_name_formats(endings)} file matches this pattern; check the pattern and the folder "
            "(names that begin with a dot or an underscore are skipped)"
        )
    return sorted(files)


def _name_formats(endings: Collection[str]) -> str:
    """Return the names of the file formats with some endings as text for an error message, "Parquet or CSV"."""
    endings_by_format = {"Parquet": PARQUET, "CSV": CSV, "JSON lines": JSON_LINES}
    names = [name for name, known in endings_by_format.items() if not set(known).isdisjoint(endings)]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _is_parquet(path: DataFile) -> bool:
    """Return whether a file begins as a Parquet file does. The result is false if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    except OSError:
        return False


def check_no_overwrite(
    inputs: Sequence[str | Path], outputs: Mapping[str, str | Path | None], other_inputs: Iterable[Path] = ()
) -> None:
    """Check that no output is also an input or another output, which would then be overwritten.

    Standard input and output ("-") and special files such as /dev/null are not checked, because writing to them
    destroys nothing.

    Args:
        inputs: Paths of input files and folders.
        outputs: For the name of each option, such as "--alerts", the path of its output; None or "" if the option is
            not used. An output that is a folder, such as a model directory, is replaced with all files in it.
        other_inputs: Files that are read and are no data files, such as those of a model. They may be missing.

    Raises:
        ConfigError: An output is also an input or another output, or a folder that holds an input.
        InputError: One of `inputs` does not exist.
    """
    input_files_and_folders = [entry for entry in inputs if str(entry) != "-"]
    input_files = find_data_files(input_files_and_folders) if input_files_and_folders else []
    paths = [*(path for path in input_files if isinstance(path, Path)), *other_inputs]
    use_by_path = {path.resolve(): "an input" for path in paths}
    for option, output in outputs.items():
        if output is None or str(output) in ("", "-"):
            continue
        path = Path(output).resolve()
        if path in use_by_path:
            raise ConfigError(
                f"{option} {output} would overwrite a file that is also {use_by_path[path]}; choose another path"
            )
        replaced = next((known for known in use_by_path if known.is_relative_to(path)), None)
        if replaced is not None:
            raise ConfigError(
                f"{option} {output} would replace the folder of {replaced}, which is also {use_by_path[replaced]}; "
                "choose another path, or move the file"
            )
        is_special_file = path.exists() and not path.is_file()
        if not is_special_file:
            use_by_path[path] = f"the output of {option}"


def list_data_files(folder: Path, endings: Collection[str]) -> list[Path]:
    """Return the data files in a folder and in its subfolders, sorted by path.

    Files and folders are skipped if their name begins with a dot or an underscore, which marks hidden and temporary
    files. The `metadata` folder of an Iceberg table is skipped as well.

    Args:
        folder: The folder.
        endings: Endings of the names of data files in lower case, such as ".parquet". Files with the same ending in
            upper case count as well.

    Raises:
        InputError: The folder contains a Delta Lake or Iceberg table that may hold files of older versions.
        PermissionError: The folder, or one below it, cannot be read.
    """
    files: list[Path] = []
    metadata_folders: set[Path] = set()
    for parent, subfolders, names in os.walk(folder, onerror=_raise):
        here = Path(parent)
        if DELTA_LOG in subfolders:
            _check_delta_log(here / DELTA_LOG)
        subfolders[:] = [name for name in subfolders if not _is_hidden(PurePath(name))]
        for path in (here / name for name in names if not _is_hidden(PurePath(name))):
            if _is_iceberg_metadata(path):
                _check_iceberg_metadata(path)
                metadata_folders.add(here)
            elif has_ending(path, endings) and path.is_file():
                files.append(path)
    # Some files that describe an Iceberg table have the ending of a data file. They lie in its metadata folder.
    return sorted(path for path in files if metadata_folders.isdisjoint(path.parents))


def _raise(error: OSError) -> NoReturn:
    """Raise an error. `os.walk` skips a folder that cannot be read otherwise."""
    raise error


def _is_hidden(path: PurePath) -> bool:
    """Return whether a file or folder name in a path begins with a dot or an underscore.

    Such names mark hidden and temporary files.
    """
    return any(part.startswith((".", "_")) for part in path.parts)


def _describes_iceberg_table(path: Path, base: Path) -> bool:
    """Return whether a file lies in the metadata folder of an Iceberg table below the folder `base`."""
    folders = itertools.takewhile(lambda folder: folder != base, path.parents)
    return any(
        _is_iceberg_metadata(file)
        for folder in folders
        if folder.name == METADATA_FOLDER
        for file in folder.glob(f"*{METADATA_ENDING}")
    )


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
            f"{_READ_DELTA_LOG}"
        )
    for commit_file in sorted(log_folder.glob("*.json")):
        # Each object adds a file to the table, removes one, or changes a setting.
        for action in _read_json_objects(commit_file, table):
            if "remove" in action:
                raise InputError(
                    f"{table}: this Delta Lake table may hold files of older versions "
                    f"(the commit {commit_file.name} removed a file from it): {_READ_DELTA_LOG}"
                )
            if (action.get("add") or {}).get("deletionVector"):
                raise InputError(
                    f"{table}: this Delta Lake table may hold files of older versions "
                    f"(the commit {commit_file.name} deleted rows of a file): {_READ_DELTA_LOG}"
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
                    f"{_READ_ICEBERG_METADATA}"
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
    import orjson  # only folders of tables need it, and it would delay the report of a wrong path

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
