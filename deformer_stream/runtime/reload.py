"""Reload of a model that changes while the pipeline runs.

The model directory is checked every few seconds. A new model is read and verified in a background thread, and the
pipeline receives it only when it is complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from deformer_stream import log, model_store
from deformer_stream.model_store import Artifact

CHECK_SECONDS = 5.0
"""How often the model directory is checked for a change."""

DirectoryState = tuple[int, int, int] | None


class ModelReloader:
    """Watches a model directory and provides its new model.

    If the new model cannot be read, for whatever reason, the model in use stays. The failure is logged once per state
    of the directory and error, and the directory is read again at each check until it can be read.

    Args:
        artifact: The model in use; its directory is watched.
        device: The device for the new model, as in `model_store.read`.
        reload_requested: Set from outside (by SIGHUP) to have the directory read at the next call.
        compiled: Whether to use compiled kernels, as in `model_store.read`.
        now: Returns monotonic seconds.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        reload_requested: threading.Event,
        compiled: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._device, self._compiled = artifact.directory, device, compiled
        self._reload_requested, self._now = reload_requested, now
        self._fingerprint = artifact.fingerprint
        self._loaded_state = _get_directory_state(artifact.directory)
        self._last_check = now()
        self._reader: threading.Thread | None = None
        self._new_artifact: Artifact | None = None
        self._logged_failure: tuple[DirectoryState, str] | None = None

    def take_new_model(self) -> Artifact | None:
        """Return a model that differs from the last one, if it has been read by now. Never blocks.

        Each new model is returned once. The call also starts to read the directory if it has changed.
        """
        if self._reader is not None:
            return None if self._reader.is_alive() else self._finish_reading()
        is_requested = self._reload_requested.is_set()
        if is_requested or self._now() - self._last_check >= CHECK_SECONDS:
            self._last_check = self._now()
            state = _get_directory_state(self._directory)
            if is_requested or state != self._loaded_state:
                self._reload_requested.clear()
                self._reader = threading.Thread(target=self._read, args=(state,), name="model", daemon=True)
                self._reader.start()
        return None

    def _finish_reading(self) -> Artifact | None:
        """Return the model that the background thread has read, if it has read one and it is another model."""
        self._reader = None
        artifact, self._new_artifact = self._new_artifact, None
        if artifact is None or artifact.fingerprint == self._fingerprint:
            return None
        self._fingerprint = artifact.fingerprint
        return artifact

    def _read(self, state: DirectoryState) -> None:
        """Read the model directory; runs in the background thread.

        Args:
            state: The state of the directory before reading.
        """
        try:
            self._new_artifact = model_store.read(self._directory, self._device, self._compiled)
        except Exception as error:  # a damaged model may raise anything, and none of it may stop the pipeline
            failure = (state, f"{type(error).__name__}: {error}")
            if failure != self._logged_failure:
                self._logged_failure = failure
                log.get_logger("model").warning(
                    "model_not_readable",
                    directory=str(self._directory),
                    error=str(error),
                    error_type=type(error).__name__,
                )
        else:
            self._loaded_state, self._logged_failure = state, None


def _get_directory_state(directory: Path) -> DirectoryState:
    """Return inode, modification time and size of the manifest, which change if it is replaced; None without one."""
    try:
        status = (directory / model_store.MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
