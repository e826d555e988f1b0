"""Tests of the file that lists the models of a folder, and of the names of their directories."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

import pytest

from deformer_stream.errors import ArtifactError, ConfigError
from deformer_stream.model_set import (
    FLEET_PREFIX,
    MODELS_FILE,
    ModelEntry,
    ModelSet,
    find_models,
    make_folder_name,
    read_model_set,
    write_model_set,
)

ENTRY = ModelEntry("pump", "abc", 120, adapted=True, input="00")


def test_models_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_model_set(tmp_path) is None
    models = ModelSet(
        "type", {"pump": ENTRY, "äöü/7": ModelEntry("%C3", "d", 20, adapted=False, input="01")}, {"_fleet-1": "02"}
    )
    write_model_set(tmp_path, models)
    assert read_model_set(tmp_path) == models
    assert [path.name for path in tmp_path.iterdir()] == [MODELS_FILE]


@pytest.mark.parametrize(
    "value", ["pump", "Pump 7", "a/b", "..", ".hidden", "_fleet", "_fleet-1f3a", "50%", "pump.training", "Köln", "a\\b"]
)
def test_folder_of_a_value_is_a_safe_name_that_states_the_value(value: str) -> None:
    name = make_folder_name(value)
    assert unquote(name) == value
    assert not name.startswith(FLEET_PREFIX)
    assert name[0] not in "._"
    assert not name.endswith(".training")
    assert not set(name) & set('/\\:*?"<>|')


def test_different_values_have_different_folders() -> None:
    values = ["a", "A", "%61", "a%", "_a", "%5Fa", ".a", "a.training", "a%2Etraining"]
    assert len({make_folder_name(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", ["", "x" * 201, "ü" * 40])
def test_value_that_is_no_name_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a model directory"):
        make_folder_name(value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"format": 1, "field": "type", "models": []}',
        '{"format": 1, "field": "type", "models": {"pump": {"folder": "pump"}}}',
        json.dumps(
            {
                "format": 1,
                "field": "type",
                "models": {"x": {"folder": "../x", "fingerprint": "", "records": 1, "adapted": False, "input": ""}},
            }
        ),
        '{"format": 1, "field": "type", "models": {"x": '
        '{"folder": "a\\u0000b", "fingerprint": "", "records": 1, "adapted": false, "input": ""}}}',
        '{"format": 1, "field": "type", "models": {"x": '
        '{"folder": "x", "fingerprint": "", "records": Infinity, "adapted": false, "input": ""}}}',
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MODELS_FILE).write_text(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        read_model_set(tmp_path)


def test_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODELS_FILE).write_text('{"format": 2}')
    with pytest.raises(ArtifactError, match="install the release that wrote it"):
        read_model_set(tmp_path)


def make_directories(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")


def test_models_are_those_that_the_file_lists(tmp_path: Path) -> None:
    make_directories(tmp_path, "pump", "other")
    write_model_set(tmp_path, ModelSet("type", {"Pump": ENTRY}))
    assert find_models(tmp_path) == ("type", {"Pump": tmp_path / "pump"})


def test_without_the_file_each_model_directory_is_a_model(tmp_path: Path) -> None:
    make_directories(tmp_path, "pump", make_folder_name("fan/small"), "_fleet-1", ".hidden")
    (tmp_path / "empty").mkdir()
    assert find_models(tmp_path) == (None, {"pump": tmp_path / "pump", "fan/small": tmp_path / "fan%2Fsmall"})


def test_folder_without_models_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ArtifactError, match="has no model directories"):
            find_models(folder)
