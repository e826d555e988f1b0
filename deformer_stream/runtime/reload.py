"""A model that changes under way: noticed, read and verified beside the stream, handed over when it is whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from deformer_stream import log, model_store
from deformer_stream.errors import DeformerError
from deformer_stream.model_store import Artifact

LOOK_SECONDS = 5.0
"""How often the directory is looked at."""


class ModelReloader:
    """Watches a model directory. asked: set from outside (SIGHUP) to have it read again now. now: monotonic seconds.

    A directory that cannot be read is said to be so, and looked at again; meanwhile the model in force stays.
    """

    def __init__(
        self,
        loaded: Artifact,
        device: str,
        asked: threading.Event,
        compiled: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._device, self._asked, self._now = loaded.directory, device, asked, now
        self._compiled = compiled
        self._fingerprint = loaded.fingerprint
        self._seen = _mark(loaded.directory)
        self._looked = now()
        self._reading: threading.Thread | None = None
        self._found: Artifact | None = None
        self._complaint = ""

    def take(self) -> Artifact | None:
        """Another model than the last, if there is one by now. Never waits for it."""
        if self._reading is not None:
            if self._reading.is_alive():
                return None
            self._reading = None
            found, self._found = self._found, None
            if found is not None and found.fingerprint != self._fingerprint:
                self._fingerprint = found.fingerprint
                return found
            return None
        if self._asked.is_set() or self._now() - self._looked >= LOOK_SECONDS:
            self._looked = self._now()
            mark = _mark(self._directory)
            if self._asked.is_set() or mark != self._seen:
                self._asked.clear()
                self._reading = threading.Thread(target=self._read, args=(mark,), name="model", daemon=True)
                self._reading.start()
        return None

    def _read(self, mark: tuple[int, ...] | None) -> None:
        try:
            self._found = model_store.read(self._directory, self._device, self._compiled)
        except DeformerError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.get("model").warning("the model in force stays", error=self._complaint)
        else:
            self._seen, self._complaint = mark, ""


def _mark(directory: Path) -> tuple[int, ...] | None:
    """Tells a manifest from one that was put in its place; None where there is none."""
    try:
        found = (directory / model_store.MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
