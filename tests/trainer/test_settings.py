"""Tests of the options of `deformer-train` that are lists, from flags, the environment, files and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deformer_stream.errors import ConfigError
from deformer_stream.settings import load_settings
from tests.trainer.tables import prepared, write
from trainer.data import create_data_options
from trainer.per_value import train_per_value
from trainer.settings import TrainConfig

NAMES = ("exclude", "context", "discrete", "continuous", "once")
WINDOW = {"window": "60s", "slots": 2}


def load(values: dict[str, Any], file: str = "", folder: Path | None = None) -> TrainConfig:
    """Return settings from flags or a program, and from a configuration file with the given text."""
    config = None
    if folder is not None:
        config = folder / "deformer.toml"
        config.write_text(file)
    return load_settings(TrainConfig, {"out": "model", **WINDOW, **values}, config, "train")


@pytest.mark.parametrize("name", NAMES)
def test_only_texts_are_split_at_commas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(load({}), name) == ()
    assert getattr(load({name: " a, b c,"}), name) == ("a", "b c")
    for names in (["a,b", "c"], ("a,b", "c"), np.array(["a,b", "c"])):
        assert getattr(load({name: names}), name) == ("a,b", "c")
    assert getattr(load({name: [0, ""]}), name) == ("0", "")
    assert getattr(load({}, f'{name} = ["a,b", "c"]', tmp_path), name) == ("a,b", "c")
    assert getattr(load({}, f'[train]\n{name} = "a,b"', tmp_path), name) == ("a", "b")
    monkeypatch.setenv(f"DEFORMER_{name.upper()}", "a,b")
    assert getattr(load({}), name) == ("a", "b")
    assert getattr(create_data_options(load({name: ["a,b"]})), name) == ("a,b",)
    with pytest.raises(ConfigError, match=rf"--{name} 5 .*it should be a text such as 'a,b' or a list; see --help"):
        load({name: 5})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("hour=24, a=b=360", (("hour", 24.0), ("a=b", 360.0))),
        (["a,b=24", "hour=12"], (("a,b", 24.0), ("hour", 12.0))),
        ({"a,b": 24, "c=d": 1.5}, (("a,b", 24.0), ("c=d", 1.5))),
        ((("a,b", 24.0),), (("a,b", 24.0),)),
    ],
)
def test_periods_are_read_from_texts_lists_and_mappings(value: Any, expected: Any) -> None:
    assert load({"cycle": value}).cycle == expected


@pytest.mark.parametrize("value", ["hour", ["hour"], {"hour": 0}, {"hour": None}, {"": 5}, {"hour": "x"}])
def test_periods_without_a_name_or_a_number_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"--cycle .*is no column with a positive period; write each column as name="):
        load({"cycle": value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("99999.0,flow=-1", ((None, "99999"), ("flow", "-1"))),
        (99999, ((None, "99999"),)),
        ([99999, "a,b=-1.0", "No, Data"], ((None, "99999"), ("a,b", "-1"), (None, "No, Data"))),
        ({"a,b": -1.0, "c=d": "Bad"}, (("a,b", "-1"), ("c=d", "Bad"))),
        (((None, "99999"),), ((None, "99999"),)),
    ],
)
def test_fill_values_are_read_from_texts_lists_and_mappings(value: Any, expected: Any) -> None:
    assert load({"fill_values": value}).fill_values == expected


@pytest.mark.parametrize("value", ["flow=", {"flow": ""}, {"": 5}, [float("nan")], {"flow": float("inf")}])
def test_fill_values_without_a_meaning_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"--fill-values .*(is no fill value|never counts as a reading)"):
        load({"fill_values": value})


def test_columns_whose_names_contain_commas_can_be_chosen(tmp_path: Path) -> None:
    columns = {"a,b": np.arange(60) % 3, "c,d": np.sin(np.arange(60)), "x": np.cos(np.arange(60)), "e,f": [1.0] * 60}
    data = prepared(tmp_path, columns, exclude=("e,f",), discrete=("a,b",), cycle=(("c,d", 6.0),))
    assert [(feature.name, feature.kind, feature.period) for feature in data.schema.features] == [
        ("a,b", "discrete", None),
        ("c,d", "continuous", 6.0),
        ("x", "continuous", None),
    ]


def test_fleet_models_keep_names_with_commas(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"a,b": rng.integers(0, 40, 120), "x": rng.normal(size=120), "y,z": rng.normal(size=120)}
    table = write(tmp_path / "t.parquet", {"type": ["fan", "pump"] * 60, **columns})
    settings = TrainConfig(
        out=tmp_path / "models", per="type", discrete=["a,b"], exclude=["y,z"], fill_values={"a,b": 5}, epochs=1,
        d_model=16, layers=1, heads=2, feedforward=32, mixtures=2, hidden=(16,),
    )  # fmt: skip
    output = train_per_value([table], settings)
    for trained in output.models:
        assert trained.output is not None
        schema = trained.output.model.schema
        assert schema.names == ("a,b", "x")
        assert (schema.features[0].kind, schema.features[0].fill_values) == ("discrete", ("5",))
    assert output.models[0].entry.adapted
