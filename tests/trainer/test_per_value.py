"""Tests of training one model for each value of a column (`deformer-train --per`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import deformer_stream
from deformer_stream import model_store
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model_set import read_model_set
from tests.trainer.tables import write
from trainer import job, per_value, per_value_tables
from trainer.budget import TimeBudget
from trainer.data import Split
from trainer.distributed import Ranks
from trainer.fit import Interrupted
from trainer.job import TrainingOutput
from trainer.per_value import train_per_value
from trainer.settings import TrainConfig

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
SIZES = {"fan": 60, "pump": 150, "valve": 5}
"""Number of records of each type of the table: few, many if --adapt-below is 100, and too few."""


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def draw(rng: np.random.Generator, kind: str) -> dict[str, NDArray[Any]]:
    """Return records of one type of machine, whose levels depend on the type."""
    load = rng.normal(size=SIZES[kind])
    level = sorted(SIZES).index(kind)
    return {"flow": load + level, "power": 2.0 * load - level + 0.1 * rng.normal(size=len(load))}


def machines(rng: np.random.Generator) -> dict[str, Any]:
    """Return the records of all types in random order, with a column `type`, which is null in two rows."""
    kinds = [kind for kind, size in SIZES.items() for _ in range(size)]
    parts = [draw(rng, kind) for kind in SIZES]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = rng.permutation(len(kinds))
    shuffled: dict[str, Any] = {name: column[order] for name, column in columns.items()}
    types: list[str | None] = [kinds[row] for row in order]
    rows = [row for row, kind in enumerate(types) if kind == "pump"][:2]
    for row in rows:
        types[row] = None
    return {"type": types} | shuffled


@pytest.fixture
def table(tmp_path: Path, rng: np.random.Generator) -> Path:
    return write(tmp_path / "machines.parquet", machines(rng))


FLEET = "_fleet-" + per_value_tables.hash_texts(["flow", "power"])[:12]
"""Name of the fleet model of the table, whose types have the same features."""


def make_settings(out: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{"out": out, "per": "type", "adapt_below": 100, "epochs": 1, **SMALL, **options})


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, TrainingOutput]]:
    """Return the results of all training jobs by the name of their model directory."""
    outputs: dict[str, TrainingOutput] = {}
    run = job.train

    def record(*args: Any, **options: Any) -> TrainingOutput:
        output = run(*args, **options)
        outputs[output.directory.name] = output
        return output

    monkeypatch.setattr(per_value, "train", record)
    return outputs


def test_models_of_values_learn_the_faults_of_their_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = machines(rng)
    faults = ["none"] * len(columns["type"])
    for kind in ("fan", "pump"):
        for row in [row for row, name in enumerate(columns["type"]) if name == kind][:6]:
            faults[row] = f"leak of a {kind}"
            columns["power"][row] += 5.0
    table = write(tmp_path / "machines.parquet", columns | {"fault": faults})
    train_per_value([table], make_settings(tmp_path / "models", label="fault", normal="none"))
    names_by_model = {}
    for name in (FLEET, "fan", "pump"):
        classifier = model_store.read(tmp_path / "models" / name).fault_classifier
        names_by_model[name] = None if classifier is None else classifier.names
    assert names_by_model == {FLEET: None, "fan": ("leak of a fan",), "pump": ("leak of a pump",)}


def test_values_with_many_records_get_their_own_model_and_others_an_adapted_one(
    tmp_path: Path, table: Path, jobs: dict[str, TrainingOutput]
) -> None:
    messages: list[str] = []
    result = train_per_value([table], make_settings(tmp_path / "models"), on_message=messages.append)
    assert [(model.value, model.entry.records, model.entry.adapted) for model in result.models] == [
        ("fan", 60, True),
        ("pump", 148, False),
    ]
    assert result.reason_by_value == {"valve": "5 normal records, but a model needs at least 20"}
    assert "left out: 2 rows without type" in messages
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [FLEET, "fan", "models.json", "pump"]
    for name in (FLEET, "fan", "pump"):
        assert model_store.read(tmp_path / "models" / name).schema.names == ("flow", "power")
    models = read_model_set(tmp_path / "models")
    assert models is not None
    assert models.field == "type"
    assert {value: entry.fingerprint for value, entry in models.entry_by_value.items()} == {
        name: jobs[name].fingerprint for name in ("fan", "pump")
    }
    fan = model_store.read_manifest(tmp_path / "models" / "fan")
    assert fan["training"]["options"]["init_from"] == str(tmp_path / "models" / FLEET)


def test_fleet_model_has_not_seen_the_calibration_records_of_adapted_models(
    tmp_path: Path, table: Path, jobs: dict[str, TrainingOutput]
) -> None:
    """Otherwise these records would fit the adapted model too well, and it would raise too many alerts."""
    train_per_value([table], make_settings(tmp_path / "models"))
    fan, everything = jobs["fan"].data, jobs[FLEET].data
    assert [len(jobs[name].data.split) for name in ("fan", "pump", FLEET)] == [60, 148, 208]
    np.testing.assert_array_equal(everything.split[:60], fan.split)
    np.testing.assert_array_equal(everything.split[60:], jobs["pump"].data.split)
    # The first 60 records of the fleet are those of the fan, in the same order.
    np.testing.assert_allclose(everything.values[:60], fan.values, atol=1e-6)
    seen = {tuple(row) for row in everything.values[everything.split == Split.TRAIN]}
    assert not seen & {tuple(row) for row in fan.values[fan.split == Split.CALIBRATION]}


def test_model_of_a_value_equals_the_model_of_its_rows_alone(
    tmp_path: Path, rng: np.random.Generator, jobs: dict[str, TrainingOutput]
) -> None:
    columns = machines(rng)
    is_pump = np.array([kind == "pump" for kind in columns["type"]])
    alone = write(tmp_path / "pump.parquet", {name: columns[name][is_pump] for name in ("flow", "power")})
    table = write(tmp_path / "machines.parquet", columns)
    train_per_value([table], make_settings(tmp_path / "models", adapt_below=0))
    expected = job.train([alone], make_settings(tmp_path / "model", per=None, adapt_below=None))
    assert set(jobs) == {"fan", "pump"}  # no fleet model is needed
    np.testing.assert_array_equal(jobs["pump"].data.values, expected.data.values)
    np.testing.assert_array_equal(jobs["pump"].calibration.scores, expected.calibration.scores)


def test_value_whose_features_no_other_value_has_is_trained_on_its_own_records(
    tmp_path: Path, rng: np.random.Generator, jobs: dict[str, TrainingOutput]
) -> None:
    """An adapted model would wait for a feature that never comes."""
    columns = machines(rng)
    speed = rng.normal(size=len(columns["type"]))
    columns["speed"] = np.where([kind == "fan" for kind in columns["type"]], speed, np.nan)
    messages: list[str] = []
    table = write(tmp_path / "t.parquet", columns)
    result = train_per_value([table], make_settings(tmp_path / "models"), on_message=messages.append)
    assert {model.value: model.entry.adapted for model in result.models} == {"fan": False, "pump": False}
    assert "fan: trained on its own records, because no other value has all of its features" in messages
    assert jobs["fan"].data.schema.names == ("flow", "power", "speed")
    assert jobs["pump"].data.schema.names == ("flow", "power")


def test_each_set_of_features_has_a_fleet_model_of_the_values_that_have_them(
    tmp_path: Path, rng: np.random.Generator, jobs: dict[str, TrainingOutput]
) -> None:
    """With one fleet model of the union of all features, no value could be adapted."""
    sizes = {"fan": 30, "mixer": 30, "motor": 40, "pump": 150}
    features = {
        "fan": {"flow", "power"},
        "mixer": {"flow", "power"},
        "motor": {"power", "speed"},
        "pump": {"flow", "power", "speed"},
    }
    kinds = [kind for kind, size in sizes.items() for _ in range(size)]
    load = rng.normal(size=len(kinds))
    columns: dict[str, Any] = {"type": kinds, "day": np.arange(len(kinds)).astype("datetime64[D]")}
    for name in ("flow", "power", "speed"):
        values = load + 0.1 * rng.normal(size=len(kinds))
        columns[name] = np.where([name in features[kind] for kind in kinds], values, np.nan)
    table = write(tmp_path / "t.parquet", columns)
    out = tmp_path / "models"
    # An option concerns the fleet models that have the feature.
    result = train_per_value([table], make_settings(out, continuous="speed,power"))
    assert {model.value: model.entry.adapted for model in result.models} == {
        "fan": True,
        "mixer": True,
        "motor": True,
        "pump": False,
    }
    names = {name: output.data.schema.names for name, output in jobs.items()}
    other = "_fleet-" + per_value_tables.hash_texts(["power", "speed"])[:12]
    assert names == {
        FLEET: ("flow", "power"),
        other: ("power", "speed"),
        "fan": ("flow", "power"),
        "mixer": ("flow", "power"),
        "motor": ("power", "speed"),
        "pump": ("flow", "power", "speed"),
    }
    assert len(jobs[FLEET].data.split) == 30 + 30 + 150
    assert len(jobs[other].data.split) == 40 + 150
    assert jobs["motor"].summary["options"]["init_from"] == str(out / other)
    # No calibration record of an adapted model was among the training records of its fleet model.
    np.testing.assert_array_equal(jobs[other].data.split[:40], jobs["motor"].data.split)
    jobs.clear()
    train_per_value([table], make_settings(out, continuous="speed,power", resume=True))
    assert not jobs


def test_an_option_that_does_not_fit_one_value_does_not_stop_the_others(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    columns = machines(rng)
    columns["speed"] = ["fast" if kind == "fan" else str(rng.normal()) for kind in columns["type"]]
    table = write(tmp_path / "t.parquet", columns)
    result = train_per_value([table], make_settings(tmp_path / "models", adapt_below=0, continuous="speed"))
    assert [model.value for model in result.models] == ["pump"]
    assert "texts that are not numbers, such as 'fast'" in result.reason_by_value["fan"]
    with pytest.raises(ConfigError, match="--context nothing"):  # it fits no value
        train_per_value([table], make_settings(tmp_path / "others", adapt_below=0, context="nothing"))


def test_records_with_several_values_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    """Otherwise they would be cut apart, also if no fleet model is trained."""
    rows = {
        "record": [f"r{row // 2}" for row in range(100)],
        "feature": ["flow", "power"] * 50,
        "value": rng.normal(size=100),
        "type": ["fan"] * 60 + ["pump"] * 40,
    }
    train_per_value([write(tmp_path / "a.parquet", rows)], make_settings(tmp_path / "models", adapt_below=0))
    rows["type"] = ["fan"] * 61 + ["pump"] * 39
    table = write(tmp_path / "b.parquet", rows)
    message = r"different values in the column 'type' of --per, 'fan' and 'pump'"
    with pytest.raises(InputError, match=message):
        train_per_value([table], make_settings(tmp_path / "others", adapt_below=0))
    # The record is also divided if its rows are in two files.
    first = {name: values[:60] for name, values in rows.items()}
    second = {name: values[60:] for name, values in rows.items()}
    tables = [write(tmp_path / "1.parquet", first), write(tmp_path / "2.parquet", second | {"type": ["pump"] * 40})]
    train_per_value(tables, make_settings(tmp_path / "good", adapt_below=0))
    second["record"] = ["r0", *second["record"][1:]]
    tables[1] = write(tmp_path / "2.parquet", second | {"type": ["pump"] * 40})
    with pytest.raises(InputError, match=message):
        train_per_value(tables, make_settings(tmp_path / "others", adapt_below=0))


def test_windows_with_several_values_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = {
        "device": ["a"] * 80,
        "time": np.repeat(1_700_000_040 + 60.0 * np.arange(40), 2),
        "flow": rng.normal(size=80),
        "type": ["x"] * 40 + ["y"] * 40,
    }
    settings = make_settings(tmp_path / "models", window="60s", adapt_below=0, layout="wide", continuous="flow")
    train_per_value([write(tmp_path / "t.parquet", columns)], settings)
    columns["type"] = ["x"] * 41 + ["y"] * 39
    with pytest.raises(InputError, match="'x' and 'y'"):
        train_per_value([write(tmp_path / "t.parquet", columns)], settings)


def test_long_table_is_split_by_its_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = machines(rng)
    num_records = len(columns["type"])
    rows: dict[str, list[Any]] = {"record": [], "feature": [], "value": [], "type": []}
    for record in range(num_records):
        for feature in ("flow", "power"):
            rows["record"].append(f"r{record}")
            rows["feature"].append(feature)
            rows["value"].append(columns[feature][record])
            rows["type"].append(columns["type"][record])
    table = write(tmp_path / "long.parquet", rows)
    result = train_per_value([table], make_settings(tmp_path / "models"))
    assert [(model.value, model.entry.records) for model in result.models] == [("fan", 60), ("pump", 148)]
    rows["type"][rows["type"].index("fan") + 1] = "pump"  # the second row of a record
    mixed = write(tmp_path / "mixed.parquet", rows)
    with pytest.raises(InputError, match="the rows of one record have different values in the column 'type' of --per"):
        train_per_value([mixed], make_settings(tmp_path / "others"))


def test_windows_have_a_model_for_each_device(tmp_path: Path, rng: np.random.Generator) -> None:
    times = np.repeat(1_700_000_040 + 60.0 * np.arange(40), 2)
    columns = {
        "device": ["a", "b"] * 40,
        "time": times,
        "flow": rng.normal(size=80),
        "power": rng.normal(size=80),
    }
    table = write(tmp_path / "t.parquet", columns)
    result = train_per_value([table], make_settings(tmp_path / "models", per="device", window="60s", adapt_below=0))
    assert [(model.value, model.entry.records) for model in result.models] == [("a", 40), ("b", 40)]
    assert model_store.read(tmp_path / "models" / "a").schema.window is not None


def test_finished_trainings_are_skipped_when_the_command_is_resumed(
    tmp_path: Path, table: Path, jobs: dict[str, TrainingOutput]
) -> None:
    out = tmp_path / "models"
    with pytest.raises(Interrupted):
        train_per_value([table], make_settings(out, epochs=4), should_stop=lambda: "fan" in jobs)
    assert set(jobs) == {FLEET, "fan"}
    first = dict(jobs)
    jobs.clear()
    result = train_per_value([table], make_settings(out, epochs=4, resume=True))
    assert set(jobs) == {"pump"}
    assert [(model.value, model.output is None) for model in result.models] == [("fan", True), ("pump", False)]
    assert result.models[0].entry.fingerprint == first["fan"].fingerprint
    jobs.clear()
    train_per_value([table], make_settings(out, epochs=4, resume=True, seed=1))  # other options
    assert set(jobs) == {FLEET, "fan", "pump"}


def test_models_of_values_that_the_table_does_not_have_stay(
    tmp_path: Path, table: Path, rng: np.random.Generator
) -> None:
    out = tmp_path / "models"
    train_per_value([table], make_settings(out, adapt_below=0))
    columns = machines(rng) | {"type": ["compressor"] * sum(SIZES.values())}
    train_per_value([write(tmp_path / "new.parquet", columns)], make_settings(out, adapt_below=0))
    models = read_model_set(out)
    assert models is not None
    assert set(models.entry_by_value) == {"compressor", "fan", "pump"}
    with pytest.raises(ConfigError, match="has models for the values of 'type', not of 'flow'"):
        train_per_value([table], make_settings(out, per="flow"))


def test_every_value_starts_from_the_model_of_init_from(
    tmp_path: Path, table: Path, jobs: dict[str, TrainingOutput]
) -> None:
    train_per_value([table], make_settings(tmp_path / "models"))
    start = tmp_path / "start"
    shutil.copytree(tmp_path / "models" / FLEET, start)
    jobs.clear()
    settings = make_settings(tmp_path / "adapted", init_from=start, **dict.fromkeys(SMALL))
    train_per_value([table], settings)
    assert set(jobs) == {"fan", "pump"}
    assert jobs["pump"].summary["options"]["init_from"] == str(start)


def test_trainings_share_the_time_limit(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    run = job.train

    def record(*args: Any, budget: TimeBudget, **options: Any) -> TrainingOutput:
        limits.append(budget.limit)
        return run(*args, budget=TimeBudget(None), **options)

    monkeypatch.setattr(per_value, "train", record)
    budget = TimeBudget(300.0, clock=lambda: 0.0)  # no time passes
    train_per_value([table], make_settings(tmp_path / "models"), budget=budget)
    assert limits == [100.0, 150.0, 300.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "kind"}, "--per kind: .* has no such column; give one of its columns: type, flow, power"),
        ({"per": "type", "label": "type", "normal": "pump"}, "--per type: this column is the label"),
        ({"discrete": "type"}, "--discrete type: the column of --per is no feature"),
    ],
)
def test_wrong_column_is_refused(tmp_path: Path, table: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_per_value([table], make_settings(tmp_path / "models", **options))
    assert not (tmp_path / "models").exists()


def test_output_must_be_a_folder_of_models(tmp_path: Path, table: Path) -> None:
    out = tmp_path / "models"
    train_per_value([table], make_settings(out, adapt_below=0))
    with pytest.raises(ConfigError, match="is a model directory, but --per writes a folder"):
        train_per_value([table], make_settings(out / "pump"))
    with pytest.raises(ConfigError, match="--per trains in one process"):
        train_per_value([table], make_settings(out), ranks=Ranks(0, 2))


def test_no_value_with_enough_records_is_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = {"type": [str(row // 4) for row in range(40)], "flow": rng.normal(size=40)}
    with pytest.raises(InputError, match="no value of type can be trained on, such as '0': 4 normal records"):
        train_per_value([write(tmp_path / "t.parquet", columns)], make_settings(tmp_path / "models"))


@pytest.mark.parametrize("options", [{"folds": 3}, {"irregular": True}, {"per": None}])
def test_options_without_meaning_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--folds|--irregular|--adapt-below needs --per"):
        make_settings(tmp_path, **options)


Run = Callable[..., SimpleNamespace]


def test_command_trains_a_model_for_each_value(tmp_path: Path, table: Path, cli: Run) -> None:
    config = tmp_path / "train.toml"
    config.write_text("\n".join([*(f"{name} = {list(v) if name == 'hidden' else v}" for name, v in SMALL.items())]))
    out = tmp_path / "models"
    options = ["--per", "type", "--adapt-below", 100, "--config", config, "--epochs", 1]
    done = cli(table, "--out", out, *options, program="deformer-train")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("fan   60 records, adapted from the fleet model; −ln p is")
    assert lines[1].startswith("pump  148 records, trained on its own records; −ln p is")
    assert lines[2] == "warning: type 'valve' has no new model: 5 normal records, but a model needs at least 20"
    assert lines[3] == f"written: 2 models in {out}"


def test_dry_run_leaves_the_column_out(tmp_path: Path, table: Path, cli: Run) -> None:
    done = cli(table, "--dry-run", "--per", "type", program="deformer-train")
    assert done.code == 0, done.err
    assert "left out" in next(line for line in done.out.splitlines() if line.startswith("type"))
    assert "--per type: each value gets a model of the features that occur in its records" in done.out
    done = cli(table, "--dry-run", "--per", "kind", program="deformer-train")
    assert done.code == 2
    assert "--per kind" in done.err


def test_library_returns_one_model_only(table: Path) -> None:
    with pytest.raises(ConfigError, match="use deformer-train --per"):
        deformer_stream.train(table, per="type")
