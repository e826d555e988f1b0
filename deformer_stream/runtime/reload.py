"""Reload of a model that changes while the pipeline runs.

The model directory is checked every few seconds. A new model is read and verified in a background thread, and the
pipeline receives it only when it is complete.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deformer_stream import log, model_store
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import ArtifactError, DeformerError
from deformer_stream.model_manifest import DirectoryState, get_directory_state, read_manifest
from deformer_stream.model_store import Artifact

CHECK_SECONDS = 5.0
"""How often the model directory is checked for a change, in seconds."""

ModelIdentity = tuple[str, object]
"""The fingerprint of a model, and the entry of its manifest that describes its classifier of faults."""


@dataclass(frozen=True, slots=True)
class ModelReload:
    """How a pipeline gets new models while it runs.

    Attributes:
        take_new_model: Returns the name of a model and the model to use from now on, or None. The name is `ONLY_MODEL`
            for the only model; among several models, it may be new.
        make_codec: Returns the codec for a new model. It raises `ConfigError` if the model does not fit the options of
            the run.
        make_engine: Returns the engine for a model with a new name. It raises `ConfigError` as `make_codec` does.
    """

    take_new_model: Callable[[], tuple[str, Artifact] | None]
    make_codec: Callable[[Artifact], Codec]
    make_engine: Callable[[Artifact], Engine]


class ModelReloader:
    """Watches a model directory, and returns the new model after the directory has changed.

    If the new model cannot be read, for whatever reason, the model in use stays. The directory is then read again at
    each check until it can be read. The same failure is logged only once, unless the directory changes.

    Args:
        artifact: The model in use, whose directory is watched; or the directory of a model that is not read yet.
        device: The device (such as "cpu") for the new model, as in `model_store.read`.
        reload_requested: Set from outside (by SIGHUP), so that the next call reads the directory without waiting for a
            change.
        compiled: Whether to use compiled kernels, as in `model_store.read`.
        now: Returns monotonic seconds.
        check_seconds: How often the directory is checked for a change, in seconds.
    """

    def __init__(
        self,
        artifact: Artifact | Path,
        device: str,
        reload_requested: threading.Event,
        compiled: bool = True,
        now: Callable[[], float] = time.monotonic,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._directory = artifact if isinstance(artifact, Path) else artifact.directory
        self._device, self._compiled = device, compiled
        self._reload_requested, self._now, self._check_seconds = reload_requested, now, check_seconds
        # What identifies the model in use, the one before it, and the model that was last read from the directory.
        self._identity = None if isinstance(artifact, Path) else _identify(artifact)
        self._previous_identity: ModelIdentity | None = None
        self._last_read_identity = self._identity
        # The inode, modification time and size of the manifest of the model in use, to detect that it was replaced.
        self._loaded_state = None if isinstance(artifact, Path) else _find_loaded_state(artifact)
        self._last_check = now()
        self._reader: threading.Thread | None = None  # reads the directory in the background; None if none runs
        self._new_artifact: Artifact | None = None  # the result of this thread
        # The last logged failure, as state of the directory and error text, so that it is not logged again.
        self._logged_failure: tuple[DirectoryState, str] | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a background thread reads the directory, or its result was not taken yet."""
        return self._reader is not None

    def take_new_model(self) -> tuple[str, Artifact] | None:
        """Return `ONLY_MODEL` and a new model if one has been read completely, else None. Never blocks.

        A model with the same fingerprint and another classifier of faults is also new.

        Each new model is returned once. If the directory has changed, the call starts to read it in the background, and
        a later call returns the model.
        """
        if self._reader is not None:  # a background thread reads the directory, or has just finished
            artifact = None if self._reader.is_alive() else self._finish_reading()
            return None if artifact is None else (ONLY_MODEL, artifact)
        is_requested = self._reload_requested.is_set()
        if is_requested or self._now() - self._last_check >= self._check_seconds:
            self._last_check = self._now()
            # The inode, modification time and size of the manifest, which change if the model is replaced.
            state = get_directory_state(self._directory)
            if is_requested or state != self._loaded_state:
                self._reload_requested.clear()
                self._reader = threading.Thread(target=self._read, args=(state,), name="model", daemon=True)
                self._reader.start()
        return None

    def _finish_reading(self) -> Artifact | None:
        """Return the model that the background thread has read, or None if it failed or read the model in use."""
        self._reader = None  # so that the next check can start a new thread
        artifact, self._new_artifact = self._new_artifact, None
        if artifact is None:
            return None
        self._last_read_identity = _identify(artifact)
        if self._last_read_identity == self._identity:
            return None
        self._previous_identity, self._identity = self._identity, self._last_read_identity
        return artifact

    def reject(self) -> None:
        """Record that the model that was returned last is not used.

        It is returned again when the directory is read again.
        """
        self._identity = self._previous_identity

    def has_other_model(self) -> bool:
        """Return whether the directory now holds a model with another fingerprint than the model in use.

        False if its manifest cannot be read now.
        """
        on_disk = self._last_read_identity
        if get_directory_state(self._directory) != self._loaded_state:
            on_disk = _read_identity(self._directory)
        return on_disk is not None and self._identity is not None and on_disk[0] != self._identity[0]

    def _read(self, state: DirectoryState) -> None:
        """Read the model directory and keep the model for `take_new_model`. Runs in the background thread.

        Args:
            state: The inode, modification time and size of the manifest before reading. They are stored if the model
                can be read, so that only a later change of the directory is read again.
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


def _identify(artifact: Artifact) -> ModelIdentity:
    """Return what identifies a model with its classifier of faults."""
    return artifact.fingerprint, artifact.manifest.get("faults")


def _read_identity(directory: Path) -> ModelIdentity | None:
    """Return what identifies the model that a directory holds now, None if its manifest cannot be read."""
    try:
        manifest = read_manifest(directory)
    except ArtifactError:
        return None
    return str(manifest.get("fingerprint")), manifest.get("faults")


def _find_loaded_state(artifact: Artifact) -> DirectoryState:
    """Return the state of the directory of a model that was read earlier, None if it holds another one now.

    It may have been replaced since, for example while the other models of a folder were read.
    """
    state = get_directory_state(artifact.directory)
    return state if _read_identity(artifact.directory) == _identify(artifact) else None


class ModelSetReloader:
    """Watches the folder of several models, and returns one new model after the other.

    The models are read in turn, so that a change of all of them takes no more memory than that of one. A model that is
    added to the folder is new as well. A model that is removed from it stays in use.

    A model is not used while it is the same as another one in use, because the ids of their alerts could be equal. If
    that one is replaced later, the model is used. Directories can also exchange their models: it is not the same as
    another one whose directory has changed already.

    Args:
        models: Returns the directories of the models by name, as the folder has them now.
        artifact_by_name: The models in use.
        device: The device for new models, as in `model_store.read`.
        reload_requested: Set from outside (by SIGHUP), so that all directories are read without waiting for a change.
        compiled: Whether to use compiled kernels, as in `model_store.read`.
        now: Returns monotonic seconds.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, Path]],
        artifact_by_name: Mapping[str, Artifact],
        device: str,
        reload_requested: threading.Event,
        compiled: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_models, self._device, self._compiled, self._now = models, device, compiled, now
        self._reload_requested = reload_requested
        self._requests: dict[str, threading.Event] = {}
        self._reloader_by_name: dict[str, ModelReloader] = {}
        self._fingerprint_by_name = {name: artifact.fingerprint for name, artifact in artifact_by_name.items()}
        for name, artifact in artifact_by_name.items():
            self._watch(name, artifact)
        self._last_check = now()
        self._waiting: deque[str] = deque()  # names of the models that are still to be checked in this round
        self._problem = ""  # why the folder could not be read, so that it is logged once
        # The fingerprints of the models that are not used, because another one in use is the same, by name.
        self._repeated: dict[str, str] = {}

    def _watch(self, name: str, artifact: Artifact | Path) -> None:
        """Begin to watch the directory of a model, which is checked in each round."""
        request = self._requests[name] = threading.Event()
        self._reloader_by_name[name] = ModelReloader(
            artifact, self._device, request, self._compiled, self._now, check_seconds=0.0
        )

    def take_new_model(self) -> tuple[str, Artifact] | None:
        """Return a new model and its name if one has been read completely, else None. Never blocks."""
        is_requested = self._reload_requested.is_set()
        if is_requested:
            self._reload_requested.clear()
            for request in self._requests.values():
                request.set()
        if is_requested or (not self._waiting and self._now() - self._last_check >= CHECK_SECONDS):
            self._last_check = self._now()
            self._add_new_models()
            self._waiting = deque(self._reloader_by_name)
        while self._waiting:
            name = self._waiting[0]
            reloader = self._reloader_by_name[name]
            repeated = self._repeated.get(name)
            if repeated is not None and not reloader.is_reading and self._find_same_model(name, repeated) is None:
                self._requests[name].set()
            found = reloader.take_new_model()
            if reloader.is_reading:
                return None
            self._waiting.popleft()
            if found is None:
                if repeated is not None and not reloader.has_other_model():  # it holds the model in use again
                    self._repeated.pop(name, None)
                continue
            _, artifact = found
            same = self._find_same_model(name, artifact.fingerprint)
            if same is not None:
                reloader.reject()
                if self._repeated.get(name) != artifact.fingerprint:
                    log.get_logger("model").warning(
                        "model_repeated", name=name, same_as=same, path=str(artifact.directory)
                    )
                self._repeated[name] = artifact.fingerprint
                continue
            self._repeated.pop(name, None)
            self._fingerprint_by_name[name] = artifact.fingerprint
            return name, artifact
        return None

    def _find_same_model(self, name: str, fingerprint: str) -> str | None:
        """Return the name of another model that is in use and in its directory, and has a fingerprint; None if none is.

        Args:
            name: The model that is not meant.
            fingerprint: The fingerprint.
        """
        return next(
            (
                other
                for other, used in self._fingerprint_by_name.items()
                if other != name and used == fingerprint and not self._reloader_by_name[other].has_other_model()
            ),
            None,
        )

    def _add_new_models(self) -> None:
        """Begin to watch the directories of models that were added to the folder."""
        try:
            directory_by_name = self._list_models()
        except DeformerError as error:
            if str(error) != self._problem:
                log.get_logger("model").warning("models_not_readable", error=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        for name in sorted(directory_by_name.keys() - self._reloader_by_name.keys()):
            self._watch(name, directory_by_name[name])
