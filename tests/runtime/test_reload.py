"""Tests of the model reload: a changed model is returned once, and no failure to read it ends the pipeline."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from deformer_stream import model_store
from deformer_stream.model_set import MODELS_FILE, find_models
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import reload
from deformer_stream.runtime.reload import ModelReloader, ModelSetReloader
from tests.models import write_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", seed=0)


class FakeClock:
    """Monotonic seconds that advance by one check interval with each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += reload.CHECK_SECONDS
        return self.now


def check(reloader: ModelReloader) -> Artifact | None:
    """Let the reloader look at its directory once, wait for its thread, and return the new model."""
    new_model = reloader.take_new_model()
    assert new_model is None, "the directory is read in the background"
    if reloader._reader is None:
        return None
    reloader._reader.join(60)
    found = reloader.take_new_model()
    return None if found is None else found[1]


def test_changed_model_is_returned_once(directory: Path) -> None:
    reloader = ModelReloader(model_store.read(directory), "cpu", threading.Event(), now=FakeClock())
    assert check(reloader) is None
    write_model(directory, seed=1)
    new_model = check(reloader)
    assert new_model is not None
    assert new_model.fingerprint == model_store.read(directory).fingerprint
    assert check(reloader) is None


def test_model_that_is_replaced_after_it_was_read_is_returned(directory: Path) -> None:
    """The directory is watched later than it is read, because other models of a folder may be read in between."""
    artifact = model_store.read(directory)
    write_model(directory, seed=1)
    reloader = ModelReloader(artifact, "cpu", threading.Event(), now=FakeClock())
    new_model = check(reloader)
    assert new_model is not None
    assert new_model.fingerprint == model_store.read(directory).fingerprint != artifact.fingerprint
    assert check(reloader) is None


def test_unchanged_directory_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reloader = ModelReloader(model_store.read(directory), "cpu", threading.Event(), now=FakeClock())
    monkeypatch.setattr(model_store, "read", lambda *args: pytest.fail("the directory was read"))
    assert check(reloader) is None


def test_request_reads_an_unchanged_directory(directory: Path) -> None:
    requested = threading.Event()
    reloader = ModelReloader(model_store.read(directory), "cpu", requested, now=lambda: 0.0)
    requested.set()
    assert check(reloader) is None
    assert not requested.is_set()


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), MemoryError(), KeyError("features"), OSError(5, "I/O")]
)
def test_any_error_is_logged_once_per_state_of_the_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reloader = ModelReloader(model_store.read(directory), "cpu", threading.Event(), now=FakeClock())
    read = model_store.read

    def fail(*args: object) -> Artifact:
        raise error

    monkeypatch.setattr(model_store, "read", fail)
    structlog.reset_defaults()
    with capture_logs() as lines:
        write_model(directory, seed=1)
        assert [check(reloader) for _ in range(3)] == [None] * 3
        assert len(lines) == 1
        write_model(directory, seed=2)
        assert [check(reloader) for _ in range(3)] == [None] * 3
    assert [line["event"] for line in lines] == ["model_not_readable"] * 2
    assert lines[0]["error_type"] == type(error).__name__
    assert lines[0]["error"] == str(error)
    assert json.dumps(lines[0])
    monkeypatch.setattr(model_store, "read", read)
    new_model = check(reloader)
    assert new_model is not None, "the directory is read again until it can be read"


def test_damaged_model_is_not_returned(directory: Path) -> None:
    reloader = ModelReloader(model_store.read(directory), "cpu", threading.Event(), now=FakeClock())
    manifest = directory / model_store.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-10])
    with capture_logs() as lines:
        assert check(reloader) is None
    assert [(line["event"], line["error_type"]) for line in lines] == [("model_not_readable", "ArtifactError")]


def take_all(reloader: ModelSetReloader, rounds: int = 6) -> list[tuple[str, str]]:
    """Return name and fingerprint of the models that a reloader returns within some rounds of checks."""
    found = []
    for _ in range(rounds):
        for _ in range(20):
            named = reloader.take_new_model()
            if named is not None:
                found.append((named[0], named[1].fingerprint))
            readers = [r._reader for r in reloader._reloader_by_name.values() if r._reader is not None]
            assert len(readers) <= 1, "models are read one after the other"
            for reader in readers:
                reader.join(60)
    return found


class SteppingClock:
    """Monotonic seconds that advance by a twentieth of the check interval with each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += reload.CHECK_SECONDS / 20
        return self.now


def make_set_reloader(folder: Path, requested: threading.Event | None = None) -> ModelSetReloader:
    artifacts = {name: model_store.read(path) for name, path in find_models(folder)[1].items()}
    requested = requested or threading.Event()
    return ModelSetReloader(lambda: find_models(folder)[1], artifacts, "cpu", requested, now=SteppingClock())


def test_changed_and_added_models_of_a_folder_are_returned_once(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        write_model(tmp_path / name, seed=number)
    reloader = make_set_reloader(tmp_path)
    assert take_all(reloader) == []
    write_model(tmp_path / "b", seed=7)
    write_model(tmp_path / "d", seed=8)
    changed = {name: model_store.read(tmp_path / name).fingerprint for name in "bd"}
    assert sorted(take_all(reloader)) == sorted(changed.items())
    assert take_all(reloader) == []


def test_models_that_are_exchanged_are_all_returned(tmp_path: Path) -> None:
    """Each of the new models is one that another name still uses. Checks fall between the renames."""
    for number, name in enumerate("abc"):
        write_model(tmp_path / name, seed=number)
    reloader = make_set_reloader(tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (tmp_path / "a").rename(outside)
    assert take_all(reloader) == []
    (tmp_path / "b").rename(tmp_path / "a")
    with capture_logs() as logs:
        assert take_all(reloader) == []
    assert [line["event"] for line in logs if line.get("name") == "a"] == ["model_repeated"]
    (tmp_path / "c").rename(tmp_path / "b")
    outside.rename(tmp_path / "c")
    on_disk = [(name, model_store.read(tmp_path / name).fingerprint) for name in "abc"]
    with capture_logs() as logs:
        assert sorted(take_all(reloader)) == on_disk
        assert take_all(reloader) == []
    assert logs == []


def test_copy_of_a_model_is_used_when_the_original_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate("ab"):
        write_model(tmp_path / name, seed=number)
    reloader = make_set_reloader(tmp_path)
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    with capture_logs() as logs:
        assert take_all(reloader) == []
    assert [(line["event"], line["name"], line["same_as"]) for line in logs] == [
        ("model_repeated", "b", "a"),
        ("model_repeated", "c", "a"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(model_store, "read", lambda *args: pytest.fail("a directory was read"))
        assert take_all(reloader) == []
    copied = model_store.read(tmp_path / "b").fingerprint
    write_model(tmp_path / "a", seed=7)
    with capture_logs() as logs:
        assert sorted(take_all(reloader)) == [("a", model_store.read(tmp_path / "a").fingerprint), ("b", copied)]
    assert [(line["event"], line["name"], line["same_as"]) for line in logs] == []


def test_model_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_model(tmp_path / name, seed=number)
    reloader = make_set_reloader(tmp_path)
    (tmp_path / "a" / model_store.WEIGHTS).write_bytes(b"damaged")
    (tmp_path / "a" / model_store.MANIFEST).touch()
    write_model(tmp_path / "b", seed=7)
    with capture_logs() as logs:
        assert take_all(reloader) == [("b", model_store.read(tmp_path / "b").fingerprint)]
    assert [line["event"] for line in logs] == ["model_not_readable"]
    write_model(tmp_path / "a", seed=9)
    assert take_all(reloader) == [("a", model_store.read(tmp_path / "a").fingerprint)]


def test_removed_models_stay_in_use_and_a_damaged_list_is_logged_once(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_model(tmp_path / name, seed=number)
    reloader = make_set_reloader(tmp_path)
    shutil.rmtree(tmp_path / "a")
    assert take_all(reloader) == []
    (tmp_path / MODELS_FILE).write_bytes(b"{")
    with capture_logs() as logs:
        assert take_all(reloader) == []
    assert [line["event"] for line in logs] == ["models_not_readable"]


def test_request_reads_all_models_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate("ab"):
        write_model(tmp_path / name, seed=number)
    requested = threading.Event()
    reloader = make_set_reloader(tmp_path, requested)
    names: list[str] = []
    read = model_store.read

    def record_and_read(directory: Path, *arguments: Any) -> Artifact:
        names.append(directory.name)
        return read(directory, *arguments)

    monkeypatch.setattr(model_store, "read", record_and_read)
    requested.set()
    assert take_all(reloader, rounds=1) == []  # unchanged
    assert (names, requested.is_set()) == (["a", "b"], False)
