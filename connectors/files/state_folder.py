"""A folder with the state of open records, for a source that has no log of its own (`runtime.plant_source`).

The folder has three files:

    snapshot  the complete state at one commit, and the states of the translator
    journal   a line for each later commit: its events, its decisions, and the changed states of the translator
    lock      held by the process that uses the folder

A commit appends a line to the journal, or replaces the snapshot and empties the journal. Each line, and the first line
of the snapshot, is the CRC-32 of a JSON document and this document. Commits have consecutive numbers, so a line that an
earlier snapshot has made obsolete is recognised. If a crash cuts a line, the messages of its commit were not
acknowledged. So the line is removed when the folder is opened again.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import msgspec
import orjson

from deformer_stream import log
from deformer_stream.codec.state import check_state
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ConfigError, InvariantViolated, StateError, map_write_errors
from deformer_stream.file_lock import open_locked
from deformer_stream.runtime.plant_source import SavedEvent, SavedState
from deformer_stream.runtime.ports import PartitionState

FORMAT_VERSION = 1


class StateFolder:
    """A store of commits in a folder, which one process uses at a time.

    Args:
        folder: The folder, which is created if it does not exist.

    Raises:
        ConfigError: The folder cannot be written, or another process uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshot_path, self._journal_path = folder / "snapshot", folder / "journal"
        self._journal: FileIO | None = None
        self._last_commit = 0
        self._translator_states: dict[str, bytes] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open_locked(folder / "lock")
        except OSError as error:
            raise ConfigError(
                f"--state-dir {folder} cannot be written ({error.strerror}): choose another folder"
            ) from None
        if lock is None:
            raise ConfigError(f"--state-dir {folder} is in use by another process: give each process its own folder")
        self._lock = lock  # held until this process ends

    def load(self) -> SavedState:
        """Return what earlier runs have saved, and remove a commit that was cut by a crash.

        Raises:
            StateError: The snapshot or the journal is damaged.
            Unavailable: The folder cannot be written.
        """
        saved = SavedState()
        try:
            self._read_snapshot(saved)
            length = self._read_journal(saved)
        except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
            raise self._make_error(str(error)) from None
        if saved.snapshot is not None:
            try:
                check_state(saved.snapshot, saved.decisions)
            except StateError:
                raise self._make_error("the snapshot or a decision after it cannot be decoded") from None
        self._translator_states = dict(saved.translator_states)
        with map_write_errors(self._journal_path):
            # A buffer would keep the line of a commit that failed, and write it later.
            self._journal = self._journal_path.open("ab", buffering=0)
            self._journal.truncate(length)
            os.fsync(self._journal.fileno())
            self._sync_folder()
        return saved

    def _make_error(self, problem: str) -> StateError:
        """Return the error for a folder that cannot be read."""
        return StateError(
            f"--state-dir {self._folder}: the saved state is damaged ({problem}): restore the folder from a backup, or "
            "move it away to start without open records"
        )

    def _read_snapshot(self, saved: SavedState) -> None:
        """Read the snapshot, if there is one, into `saved`."""
        if not self._snapshot_path.exists():
            return
        first_line, _, snapshot = self._snapshot_path.read_bytes().partition(b"\n")
        line = _decode_line(first_line)
        if line is None:
            raise ValueError(f"{self._snapshot_path.name}: the checksum of the first line is wrong")
        self._last_commit, saved.next_offset, saved.snapshot = line.commit, line.next_offset, snapshot
        saved.translator_states = line.states

    def _read_journal(self, saved: SavedState) -> int:
        """Read the commits after the snapshot into `saved`, and return the number of bytes of whole lines."""
        if not self._journal_path.exists():
            return 0
        *lines, rest = self._journal_path.read_bytes().split(b"\n")
        length = 0
        for index, encoded in enumerate(lines):
            line = _decode_line(encoded)
            if line is None:
                if index < len(lines) - 1 or rest:
                    raise ValueError(f"{self._journal_path.name}: the checksum of line {index + 1} is wrong")
                rest = encoded  # the file was enlarged before a power failure, but not all of the line was written
                break
            length += len(encoded) + 1
            if line.commit <= self._last_commit:  # the process was killed before it emptied the journal
                continue
            if line.commit != self._last_commit + 1:
                raise ValueError(f"{self._journal_path.name}: the commit before line {index + 1} is missing")
            self._last_commit, saved.next_offset = line.commit, line.next_offset
            saved.events += [SavedEvent(offset, time, bytes(value)) for offset, time, value in line.events]
            if line.decisions is not None:
                saved.decisions.append(line.decisions)
            saved.translator_states |= line.states
        if rest:
            log.get_logger("state").warning("commit_cut", file=str(self._journal_path), bytes=len(rest))
        return length

    def save(
        self,
        next_offset: int,
        events: list[SavedEvent],
        state: PartitionState,
        translator_states: Mapping[str, bytes],
    ) -> None:
        """Save a commit, as `StateStore` says."""
        if self._journal is None:
            raise InvariantViolated("the state folder was not read before a commit: report this bug")
        self._translator_states |= translator_states
        document: dict[str, Any] = {"v": FORMAT_VERSION, "commit": self._last_commit + 1, "next_offset": next_offset}
        if state.snapshot is not None:
            document |= _encode_states(self._translator_states)
            replace_file(self._snapshot_path, _encode_line(document) + state.snapshot)
            with map_write_errors(self._journal_path):
                self._sync_folder()  # the new snapshot must survive a power failure before the journal is emptied
                self._journal.truncate(0)
        else:
            decisions = None if state.decisions is None else b64encode(state.decisions).decode()
            document |= {
                "events": [[event.offset, event.time, orjson.Fragment(event.value)] for event in events],
                "decisions": decisions,
                **_encode_states(translator_states),
            }
            with map_write_errors(self._journal_path):
                _write_all(self._journal, _encode_line(document))
                os.fdatasync(self._journal.fileno())
        self._last_commit += 1

    def _sync_folder(self) -> None:
        """Make the names of the files durable."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the files, which releases the lock."""
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            self._lock.close()


def _write_all(file: FileIO, content: bytes) -> None:
    """Write to a file without a buffer, which may take only a part at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _encode_line(document: dict[str, Any]) -> bytes:
    """Return a line with the checksum of a JSON document and this document."""
    text = orjson.dumps(document)
    return b"%08x %s\n" % (crc32(text), text)


_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Version(msgspec.Struct):
    """The part of a line that every release writes."""

    v: int


class _Line(msgspec.Struct):
    """The document of a line of the journal, or of the first line of the snapshot, which has no events and decisions.

    Bytes are base64 in the document.
    """

    commit: _Number
    next_offset: _Number
    states: dict[str, bytes]
    events: list[tuple[_Number, _Number, msgspec.Raw]] = []
    decisions: bytes | None = None


def _decode_line(line: bytes) -> _Line | None:
    """Return the document of a line without its end; None if the checksum is wrong.

    Raises:
        ValueError: A later release has written the line.
        msgspec.DecodeError: The document is not one of a line.
    """
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % crc32(text):
        return None
    version = msgspec.json.decode(text, type=_Version).v
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version} is of a later release")
    return msgspec.json.decode(text, type=_Line)


def _encode_states(states: Mapping[str, bytes]) -> dict[str, Any]:
    """Return states of the translator as a part of a document."""
    return {"states": {key: b64encode(value).decode() for key, value in states.items()}}
