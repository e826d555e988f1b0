"""Tests of adapting a model of many machines (the fleet) to one machine (the plant) with few records."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.gaussian_prior import GaussianPrior
from deformer_stream.model.schema import Feature, Schema
from tests.trainer.tables import write
from trainer import finetune
from trainer.evaluate import evaluate_held_out
from trainer.fit import Interrupted
from trainer.job import TrainingOutput, train
from trainer.settings import TrainConfig
from trainer.tables import index_records, open_training_input
from trainer.value_matrix import encode_table

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
NUMBERS = tuple(Feature(f"x{i}", "continuous") for i in range(3))
STATE = Feature("state", "discrete", labels=("a", "b"))
HOUR = Feature("hour", "continuous", scale=0.5, period=4.0)


@pytest.mark.parametrize("tokens", ["pair", "single"])
@pytest.mark.parametrize("old", [NUMBERS, (*NUMBERS, STATE), (*NUMBERS, HOUR)])
def test_extended_model_keeps_the_likelihood_of_old_features(old: tuple[Feature, ...], tokens: str) -> None:
    torch.manual_seed(0)
    before = DEformer(Schema(old), ModelConfig(**SMALL | {"tokens": tokens})).eval()
    new = (Feature("mode", "discrete", labels=("1", "2", "3")), Feature("y", "continuous"), replace(HOUR, name="z"))
    after = finetune.extend_model(before, Schema(old + new)).eval()
    order = torch.rand(9, len(old)).argsort(1)
    values = torch.where(order == 3, torch.randint(0, 3, order.shape).float(), torch.randn(order.shape))
    torch.testing.assert_close(after.log_prob(order, values), before.log_prob(order, values))
    everything = torch.arange(len(old) + 3).repeat(9, 1)
    assert after.log_prob(everything, torch.ones(everything.shape)).isfinite().all()


def test_measurements_cannot_be_added_to_a_model_of_labels() -> None:
    model = DEformer(Schema((STATE,)), ModelConfig(**SMALL))
    with pytest.raises(ConfigError, match="train anew"):
        finetune.extend_model(model, Schema((STATE, *NUMBERS)))


def machines(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Return readings with nonlinear relations and modes of operation, which few records do not show."""
    load, mode = rng.normal(size=n), rng.integers(0, 3, n)
    clean = np.stack([load, np.sin(2.0 * load), load**2 - 1.0, 2.0 * mode - 2.0, mode * np.sin(2.0 * load)], 1)
    return clean + 0.15 * rng.normal(size=clean.shape)


def plant(rng: np.random.Generator, n: int) -> dict[str, NDArray[Any]]:
    """Return readings like the fleet's with a shifted sensor and a new one that depends on two others."""
    x = machines(rng, n)
    x[:, 1] += 0.5
    columns = {f"x{i}": column for i, column in enumerate(x.T)}
    return columns | {"extra": x[:, 0] - x[:, 4] + 0.2 * rng.normal(size=n)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    x = machines(np.random.default_rng(0), 2000)
    table = write(folder / "fleet.parquet", {f"x{i}": column for i, column in enumerate(x.T)})
    train([table], TrainConfig(out=folder / "model", epochs=8, **SMALL))
    return folder / "model"


def compute_nll(result: TrainingOutput, folder: Path) -> float:
    """Return the mean −ln p of new records of the plant, in the units of the fleet's model."""
    table = write(folder / "held.parquet", plant(np.random.default_rng(2), 500))
    source = open_training_input([table], "wide", None, None)
    source.feature_columns = list(source.schema.names)
    index_records(source)
    (folder / "held").mkdir(exist_ok=True)
    values, _ = encode_table(source, result.data.schema, folder / "held")
    data = replace(result.data, values=values, arrival_ranks=None, split=np.zeros(len(values), np.uint8))
    scales = float(sum(np.log(f.scale) for f in result.data.schema.features))
    return evaluate_held_out(result.model, data, np.arange(len(values)), 2, 0).mean_nll + scales


def test_adapted_model_beats_a_model_trained_on_few_records(tmp_path: Path, fleet: Path) -> None:
    table = write(tmp_path / "plant.parquet", plant(np.random.default_rng(1), 40))
    adapted = train([table], TrainConfig(out=tmp_path / "adapted", init_from=fleet, epochs=30))
    anew = train([table], TrainConfig(out=tmp_path / "anew", epochs=30, **SMALL))
    old = adapted.data.schema.features
    assert [f.name for f in old] == ["x0", "x1", "x2", "x3", "x4", "extra"]
    assert abs(old[1].location) < 0.2  # the fleet's, not the plant's
    assert adapted.model.config.exemplars > 2000
    assert compute_nll(adapted, tmp_path) < compute_nll(anew, tmp_path) - 0.2


def test_missing_old_feature_stays_in_the_model(tmp_path: Path, fleet: Path) -> None:
    columns = plant(np.random.default_rng(3), 60)
    del columns["x2"]
    result = train([write(tmp_path / "t.parquet", columns)], TrainConfig(out=tmp_path / "m", init_from=fleet, epochs=2))
    assert "x2" in result.data.schema.code_by_name


def test_incompatible_adaptation_is_rejected(tmp_path: Path, fleet: Path) -> None:
    columns = plant(np.random.default_rng(4), 60)
    words = write(tmp_path / "words.parquet", {**columns, "x1": ["warm"] * 60})
    with pytest.raises(ConfigError, match="x1 is a measurement in the old model, but text in the new table"):
        train([words], TrainConfig(out=tmp_path / "a", init_from=fleet))
    table = write(tmp_path / "table.parquet", columns)
    with pytest.raises(ConfigError, match="the setting d_model cannot be combined with --init-from"):
        train([table], TrainConfig(out=tmp_path / "b", init_from=fleet, d_model=32))


def test_adaptation_is_resumed_only_with_the_same_initial_model(tmp_path: Path, fleet: Path) -> None:
    """The model directory may have moved, but its content must be the same."""
    table = write(tmp_path / "plant.parquet", plant(np.random.default_rng(5), 60))

    def run(model: Path, **options: Any) -> TrainingOutput:
        return train([table], TrainConfig(out=tmp_path / "adapted", init_from=model, epochs=4), **options)

    with pytest.raises(Interrupted):
        run(fleet, should_stop=lambda: True)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(fleet, moved)
    loaded = model_store.read(fleet)
    model_store.write(other, loaded.model, replace(loaded.calibration, scores=loaded.calibration.scores[1:]), {}, "")
    with pytest.raises(ConfigError, match=f"the model of --init-from was {loaded.fingerprint}, now it is"):
        train([table], TrainConfig(out=tmp_path / "adapted", init_from=other, epochs=4, resume=True))
    resumed = train([table], TrainConfig(out=tmp_path / "adapted", init_from=moved, epochs=4, resume=True))
    assert resumed.training_result.steps > 1


def test_missing_readings_are_imputed_from_the_adapted_prior(
    tmp_path: Path, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each random imputation uses the prior that was adapted to the previous one."""
    means: list[NDArray[np.float64]] = []
    sample_missing = GaussianPrior.sample_missing

    def record_means(prior: GaussianPrior, *args: Any) -> torch.Tensor:
        means.append(prior.means.numpy().copy())
        return sample_missing(prior, *args)

    columns = plant(np.random.default_rng(5), 60)
    columns["x0"][::3] = np.nan
    monkeypatch.setattr(GaussianPrior, "sample_missing", record_means)
    train([write(tmp_path / "t.parquet", columns)], TrainConfig(out=tmp_path / "m", init_from=fleet, epochs=1))
    assert len(means) == finetune.NUM_DRAWS > 1
    assert all((left != right).any() for left, right in pairwise(means))
