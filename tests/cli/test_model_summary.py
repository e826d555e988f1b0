"""The output of `deformer-stream inspect`, also for names that contain markup or control sequences."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rich.console import Console

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.cli.model_summary import print_model
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from tests.model.irregular_models import SCHEMA as IRREGULAR_SCHEMA
from tests.model.irregular_models import make_config
from tests.models import CONFIG, SCHEMA


def render(directory: Path) -> str:
    out = io.StringIO()
    print_model(model_store.read(directory), Console(file=out, width=200, force_terminal=True, color_system=None))
    return out.getvalue()


def test_inspect_shows_features_calibration_and_training(model_dir: Path) -> None:
    text = render(model_dir)
    loaded = model_store.read(model_dir)
    assert str(model_dir) in text
    assert loaded.fingerprint in text
    for feature in SCHEMA.features:
        assert feature.name in text
    assert "idle, run, stop" in text
    assert "5 … 35" in text
    assert "0.1" in text
    assert "continuous (context)" in text
    assert "199 normal records, random order" in text
    assert f"{loaded.calibration.compute_threshold(0.01):.3f}" in text
    assert "out of reach: too few calibration records" in text  # alpha 0.001 with 199 records
    assert "-4.25" in text
    assert "curve" not in text


def test_ranges_have_their_unit(tmp_path: Path) -> None:
    model = DEformer(SCHEMA.with_units({"temperature": "°C", "pressure": "\x1b[2J"}), CONFIG)
    model_store.write(tmp_path / "m", model, Calibration.from_statistics(np.ones(3), "random"), {}, "")
    text = render(tmp_path / "m")
    assert "5 … 35 °C" in text
    assert "\\x1b[2J" in text


def test_irregular_readings_are_described(tmp_path: Path) -> None:
    model = DEformer(IRREGULAR_SCHEMA, replace(make_config(), context_recent=3, context_block=4))
    model_store.write(tmp_path / "m", model, Calibration.from_statistics(np.ones(3), "arrival"), {}, "")
    text = " ".join(render(tmp_path / "m").split())
    assert "Readings are irregular" in text
    assert "A record usually lasts 2 days." in text
    assert "up to 3 recent readings, the last reading of each sensor, and its block of 4." in text


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    names = [
        "[/bold]",
        "[link=http://x]y",
        "\x1b[2J\x1b]0;title\x07",
        "line\nbreak",
        "back\\",
        "tab\t\r\x00",
        "\u202eevil",
    ]
    features = [Feature(name, "discrete", labels=(name, "[red]"), reason=name) for name in names]
    model = DEformer(Schema(tuple(features)), CONFIG)
    directory = tmp_path / "[red]model"
    model_store.write(directory, model, Calibration.from_statistics(np.ones(3), "random"), {"[/x]": "[/y]"}, "")
    text = render(directory)
    assert "[/bold]" in text
    assert "[link=http://x]y" in text
    assert "[red]model" in text
    assert "[/x]" in text
    assert "\\x1b[2J" in text
    assert "line\\nbreak" in text
    assert "\\u202eevil" in text
    for control in "\x07\x00\u202e\r":
        assert control not in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text


def test_command_prints_summary_or_manifest(model_dir: Path, cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("inspect", model_dir)
    assert (result.code, result.err) == (0, "")
    assert "temperature" in result.out
    result = cli("inspect", model_dir, "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == model_store.read(model_dir).manifest


def test_training_summary_is_shown_in_words(tmp_path: Path) -> None:
    training = {"fingerprint": "0123", "stopped_early": False}
    model_store.write(
        tmp_path / "model", DEformer(SCHEMA, CONFIG), Calibration.from_statistics(np.ones(3), "random"), training, ""
    )
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in render(tmp_path / "model").splitlines()]
    assert ["data fingerprint", "0123"] in rows
    assert ["stopped early", "no"] in rows
