"""Tests of the model reload: a changed model is returned once, and no failure to read it ends the pipeline."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from deformer_stream import model_store
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import reload
from deformer_stream.runtime.reload import ModelReloader
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
    return reloader.take_new_model()


def test_changed_model_is_returned_once(directory: Path) -> None:
    reloader = ModelReloader(model_store.read(directory), "cpu", threading.Event(), now=FakeClock())
    assert check(reloader) is None
    write_model(directory, seed=1)
    new_model = check(reloader)
    assert new_model is not None
    assert new_model.fingerprint == model_store.read(directory).fingerprint
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
