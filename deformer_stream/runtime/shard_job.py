"""The plan and the manifest of a run in shards: what the shards are, and from what they are scored.

Such a run is `replay --output-dir DIR`, or `calibrate --workers`, whose folder is temporary.

    DIR/manifest.json                 the plan, and the fingerprints of the model, the settings and the input
    DIR/partition/PPPPP/SSSSS.arrows  rows of shard S in part P of the input files; deleted when all shards are finished
    DIR/shards/SSSSS/                 the outputs of a finished shard, and its receipt
    DIR/summary.json                  totals of replay; written when all shards are finished

Folders of parts and of shards are written under a temporary name and renamed, so a folder with its name is complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from deformer_stream import __version__
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ConfigError, InputError, map_write_errors
from deformer_stream.file_lock import open_locked
from deformer_stream.tables.iceberg import IcebergFile

if TYPE_CHECKING:
    from deformer_stream.settings import CalibrateSettings, ReplaySettings
    from deformer_stream.settings.commands import ShardSettings
    from deformer_stream.tables.data_files import DataFile

JobSettings = TypeVar("JobSettings", bound="ReplaySettings | CalibrateSettings")
JobSettings_co = TypeVar("JobSettings_co", bound="ReplaySettings | CalibrateSettings", covariant=True)
"""The options of the command that runs in shards."""

MANIFEST, RECEIPT, SUMMARY = "manifest.json", "receipt.json", "summary.json"
PARTITION_FOLDER, SHARDS_FOLDER = "partition", "shards"
_TEMPORARY_ENDING, _LOCK = ".part", ".lock"
_OWN_NAMES = (MANIFEST, RECEIPT, SUMMARY, PARTITION_FOLDER, SHARDS_FOLDER, _LOCK)

BYTES_PER_SHARD = 64 * 2**20
"""Size of the input for which there is one shard by default. It is about the work that is lost with a process."""

MIN_SHARDS, MAX_SHARDS = 8, 256
"""Smallest and largest default of the number of shards. All of them are open files when evidence is merged."""

MAX_PARTS = 16
"""Largest number of parts into which the input files are divided, so that several processes can partition them."""

DEFAULT_OUTPUTS = {
    "output": "scores.parquet",
    "records": "records.parquet",
    "alerts": "alerts.jsonl",
    "rejected": "rejected.jsonl",
}
"""The outputs of a shard, by setting, if no option names one."""

_NOT_COMPARED = frozenset(
    {
        # these have no effect on the outputs of a shard, or are compared in another form
        *("model", "models", "device", "output_dir", "out", "workers", "engine", "shards", "shard_by", "cache_memory"),
        # incidents are made when all shards are finished
        *("incidents", "incident_budget", "incident_rule", "segment", "quiet", "silent_after", "gap", "fleet"),
        *("device_by", "records_per_day", "open_early"),
        # a calibration is made when all records are scored
        *("group_by", "trim", "review", "anomalous", "seen_records"),
    }
)
"""Settings with which a run can be continued although they have changed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the input is divided.

    Attributes:
        shard_by: "records" if rows are assigned to shards by a hash, "files" if a shard is a range of files.
        num_shards: Number of shards.
        ranges: Ranges of the input files, each the index of its first file and that after its last one: those of the
            shards if `shard_by` is "files", otherwise the parts that are partitioned on their own.
    """

    shard_by: str
    num_shards: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardJob(Generic[JobSettings_co]):
    """What a process must know to partition input and to score shards.

    Attributes:
        inputs: The inputs of the command.
        settings: Its options; those of the outputs name files in the folder of a shard.
        folder: The folder of the outputs, absolute.
        plan: How the input is divided.
        fingerprint: Fingerprint of the model, or of the set of models.
        fault_entries: The entry of the classifier of faults in the manifest of each model, None without one.
        files: The input files, as `describe_files` returns them.
        working_directory: The folder to which relative paths refer.
        is_debugging: Whether events of all levels are logged.
    """

    inputs: tuple[str, ...]
    settings: JobSettings_co
    folder: Path
    plan: Plan
    fingerprint: str
    fault_entries: list[Any]
    files: list[dict[str, Any]]
    working_directory: str
    is_debugging: bool = False

    def get_part_folder(self, part: int) -> Path:
        """Return the folder with the rows of a part of the input files."""
        return self.folder / PARTITION_FOLDER / f"{part:05}"

    def get_shard_folder(self, shard: int) -> Path:
        """Return the folder with the outputs of a finished shard."""
        return self.folder / SHARDS_FOLDER / f"{shard:05}"

    def list_unfinished(self) -> list[int]:
        """Return the shards that are not finished."""
        return _list_missing([self.get_shard_folder(shard) for shard in range(self.plan.num_shards)])

    def list_unfinished_parts(self) -> list[int]:
        """Return the parts of the input files that are not partitioned."""
        if self.plan.shard_by == "files":
            return []
        return _list_missing([self.get_part_folder(part) for part in range(len(self.plan.ranges))])


AnyShardJob = ShardJob["ReplaySettings | CalibrateSettings"]
"""A job of any command."""


def _list_missing(folders: Sequence[Path]) -> list[int]:
    """Return the numbers of the folders that do not exist, in the state in which other machines have left them.

    A client of NFS stores for up to a minute what a folder holds, and that a name does not exist. When a folder is
    opened, it requests from the server whether the folder has changed. When a status is read, it may not. So the parent
    is opened, and then each folder by its name.

    Args:
        folders: Folders with one parent.
    """
    missing: list[int] = []
    for number, folder in enumerate(folders):
        try:
            if number == 0:
                _open(folder.parent)
            _open(folder)
        except OSError as error:
            # ESTALE: the client of NFS knew another folder of this name, or has not noticed that it was replaced.
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ESTALE:
                raise
            missing.append(number)
    return missing


def _open(folder: Path) -> None:
    """Open a folder and close it again."""
    os.close(os.open(folder, os.O_RDONLY))


def choose_outputs(settings: ReplaySettings) -> ReplaySettings:
    """Return the settings with the names of the outputs of a shard: those of `DEFAULT_OUTPUTS` if none is named.

    Incidents are made of evidence, so evidence is an output if incidents are.

    Raises:
        ConfigError: An output has the name of a file or folder of the run itself, which would be replaced.
    """
    for flag, path in settings.get_output_by_flag().items():
        if str(path) in _OWN_NAMES:
            raise ConfigError(f"{flag} {path}: a run in shards has a file or folder of this name; choose another name")
    has_outputs = any(path for flag, path in settings.get_output_by_flag().items() if flag != "--incidents")
    names: dict[str, object] = {} if has_outputs else {**DEFAULT_OUTPUTS}
    if settings.incidents is not None and settings.evidence is None:
        names["evidence"] = "evidence.jsonl"
    return settings.model_copy(
        update={name: value if name == "alerts" else Path(str(value)) for name, value in names.items()}
    )


def make_plan(settings: ShardSettings, sizes: Sequence[int]) -> Plan:
    """Return how input files are divided.

    Args:
        settings: Options of the command.
        sizes: Size of each input file in bytes.
    """
    default = min(max(-(-sum(sizes) // BYTES_PER_SHARD), MIN_SHARDS), MAX_SHARDS)
    num_shards = settings.shards or default
    if settings.shard_by == "files":
        ranges = divide_files(sizes, num_shards)
        return Plan("files", len(ranges), ranges)
    return Plan("records", num_shards, divide_files(sizes, MAX_PARTS))


def divide_files(sizes: Sequence[int], max_ranges: int) -> tuple[tuple[int, int], ...]:
    """Return ranges of consecutive files with about the same number of bytes, at most `max_ranges`; none is empty.

    Args:
        sizes: Size of each file in bytes; there is at least one file.
        max_ranges: Largest number of ranges.
    """
    num_ranges = min(max_ranges, len(sizes))
    ends = np.cumsum(np.maximum(np.array(sizes, np.float64), 1.0))
    shares = np.arange(1, num_ranges) / num_ranges
    first_files = [0, *(int(np.searchsorted(ends, share * ends[-1])) + 1 for share in shares), len(sizes)]
    bounds = sorted({bound for bound in first_files if bound <= len(sizes)})
    return tuple(pairwise(bounds))


def get_file_name(file: DataFile) -> str:
    """Return the name of an input file in the manifest, which does not depend on the working directory."""
    return str(file.resolve() if isinstance(file, Path) else file)


def describe_files(files: Sequence[DataFile]) -> list[dict[str, Any]]:
    """Return the name, the size and the time of the last change of each input file, by which a change is recognised.

    A data file of an Iceberg table has the version of its rows as well, because rows can be deleted without a change of
    the file.

    Raises:
        InputError: A file cannot be read.
    """
    descriptions: list[dict[str, Any]] = []
    for file in files:
        if isinstance(file, Path):
            try:
                status = file.stat()
            except OSError as error:
                raise InputError(f"{file}: the file cannot be read ({error.strerror}); check the path") from error
            size, modified = status.st_size, status.st_mtime_ns
        else:
            size, modified = file.size, file.modified
        version = {"version": file.version} if isinstance(file, IcebergFile) else {}
        descriptions.append({"name": get_file_name(file), "bytes": size, "modified": modified, **version})
    return descriptions


def make_manifest(
    settings: ShardSettings, plan: Plan, fingerprint: str, fault_entries: list[Any], files: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest: the plan, and everything on which the outputs of shards depend."""
    compared = {name: value for name, value in settings.model_dump(mode="json").items() if name not in _NOT_COMPARED}
    return {
        "format": 2,  # 2: receipts of `replay` have the numbers of alerts
        "version": __version__,
        "model": fingerprint,
        **({"faults": fault_entries} if any(fault_entries) else {}),
        "settings": compared,
        "inputs": files,
        "shard_by": plan.shard_by,
        "num_shards": plan.num_shards,
        "ranges": [list(bounds) for bounds in plan.ranges],
    }


def open_folder(folder: Path, manifest: dict[str, Any], has_chosen_number: bool, flag: str) -> Plan:
    """Write the manifest into the folder of a run, or check that it is that of an earlier run of the same job.

    Args:
        folder: The folder.
        manifest: The manifest of this run.
        has_chosen_number: Whether the number of shards was chosen. Otherwise that of the earlier run is used.
        flag: The option that determines the folder.

    Returns:
        The plan that is in force.

    Raises:
        ConfigError: What the outputs depend on has changed, or the manifest cannot be read.
    """
    path = folder / MANIFEST
    if path.exists():
        try:
            earlier = json.loads(path.read_bytes())
            change = _describe_change(earlier, manifest, has_chosen_number)
            ranges = tuple((int(start), int(stop)) for start, stop in earlier["ranges"])
            plan = Plan(str(earlier["shard_by"]), int(earlier["num_shards"]), ranges)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); delete {folder}, or choose another folder") from error
        if change is not None:
            raise ConfigError(
                f"{folder} holds shards of another run: {change}; choose another {flag}, or delete this folder"
            )
        return plan
    with map_write_errors(folder):
        (folder / SHARDS_FOLDER).mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(manifest, indent=1).encode())
    return open_folder(folder, manifest, has_chosen_number, flag)


def _describe_change(earlier: dict[str, Any], now: dict[str, Any], has_chosen_number: bool) -> str | None:
    """Return in words the first difference of two manifests; None if a run can continue the other."""
    for name, words in (("format", "format"), ("version", "version of this program"), ("model", "model")):
        if earlier[name] != now[name]:
            return f"the {words} was {earlier[name]} and is {now[name]}"
    if earlier.get("faults") != now.get("faults"):  # their names are a part of alerts and records
        return "the classifier of faults has changed"
    before, after = earlier["settings"], now["settings"]
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            flag = f"--{name.replace('_', '-')}"
            return f"{flag} was {_format(before.get(name))} and is {_format(after.get(name))}"
    files_before = {file["name"]: file for file in earlier["inputs"]}
    files_now = {file["name"]: file for file in now["inputs"]}
    for name in sorted(files_before.keys() | files_now.keys()):
        if name not in files_now:
            return f"the input {name} is missing"
        if name not in files_before:
            return f"the input {name} is new"
        if files_before[name] != files_now[name]:
            return f"the input {name} has changed"
    if list(files_before) != list(files_now):
        return "the order of the inputs has changed"
    if earlier["shard_by"] != now["shard_by"]:
        return f"--shard-by was {earlier['shard_by']} and is {now['shard_by']}"
    if has_chosen_number and earlier["num_shards"] != now["num_shards"]:
        return f"the number of shards was {earlier['num_shards']} and is {now['num_shards']}"
    return None


def _format(value: object) -> str:
    """Return the value of an option for a message."""
    return "not set" if value is None or value == "" else json.dumps(value)


@contextmanager
def lock_folder(folder: Path, flag: str = "--output-dir") -> Iterator[None]:
    """Hold the lock of the folder of a run, which ends with this process.

    Args:
        folder: The folder.
        flag: The option that determines it.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be created, or it holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}, the folder for shards, is a file; choose another {flag}")
    if folder.exists() and not _is_of_run(folder):
        raise ConfigError(
            f"{folder}, the folder for shards, is not empty and not of a run in shards; choose another {flag}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_locked(folder / _LOCK)
    except OSError as error:
        raise ConfigError(
            f"{folder}, the folder for shards, cannot be written ({error.strerror}); choose another {flag}"
        ) from error
    if lock is None:
        raise ConfigError(f"{folder} is in use by another process; wait for it, or choose another {flag}")
    with lock:
        yield


def _is_of_run(folder: Path) -> bool:
    """Return whether a folder is empty, or has a manifest of a run in shards or one that cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return all(path.name == _LOCK for path in folder.iterdir())
    except (OSError, ValueError):
        return True
    return not isinstance(manifest, dict) or "shard_by" in manifest  # that of a model directory has no shards


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, and rename it when it is complete.

    If the folder exists when it is renamed, another process was faster, and the new one is deleted. After an error it
    is deleted, too.

    Args:
        folder: The folder to create.

    Yields:
        The folder to write into.

    Raises:
        Unavailable: It cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}{_TEMPORARY_ENDING}")
    with map_write_errors(folder):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        with map_write_errors(folder):
            # The rename can be on the disk before the content of the files, unless they are there already.
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            if not folder.exists():
                try:
                    temporary.rename(folder)
                except OSError:
                    if _list_missing([folder]):
                        raise
            _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_folder(folder: Path) -> None:
    """Delete a folder, if it exists. It loses its name first, so that a part of it is never taken for all.

    Raises:
        Unavailable: The folder cannot be renamed.
    """
    delete_leftover(folder)
    if folder.exists():
        with map_write_errors(folder):
            folder.rename(_get_temporary_path(folder))
        delete_leftover(folder)


def delete_leftover(folder: Path) -> None:
    """Delete what a process that was killed in `delete_folder` has left."""
    shutil.rmtree(_get_temporary_path(folder), ignore_errors=True)


def _get_temporary_path(folder: Path) -> Path:
    """Return the name of a folder that is being deleted."""
    return folder.with_name(f".{folder.name}{_TEMPORARY_ENDING}")


def delete_temporary_folders(folder: Path) -> None:
    """Delete what processes that were killed have left in the folder of the outputs."""
    for parent in (folder, folder / PARTITION_FOLDER, folder / SHARDS_FOLDER):
        for path in parent.glob(f".*{_TEMPORARY_ENDING}"):
            shutil.rmtree(path, ignore_errors=True)
