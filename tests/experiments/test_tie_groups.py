"""Tie groups in the density: order of a group's readings, visible readings, normalisation, and averages over orders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deformer_stream.engine.ties import draw_orders
from deformer_stream.model.config import ModelConfig
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from experiments.experiment import make_prepared_table
from experiments.tie_groups import (
    ENCODINGS,
    Encoding,
    TieGroupDEformer,
    TieGroupExamples,
    score,
    score_in_orders,
    sort_groups,
)
from trainer.data import Split
from trainer.fit import Recipe
from trainer.sampling import create_generator

CONFIG = ModelConfig(d_model=16, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(16,))
NUM_FEATURES, GROUP_SIZE = 7, 3  # groups of 3, 3 and 1
SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(NUM_FEATURES)))
GROUPS = [range(3), range(3, 6), range(6, 7)]
LEARNT = [encoding for encoding in ENCODINGS if encoding != "order"]


def make_model(encoding: Encoding, gaussians: int = 0) -> TieGroupDEformer:
    """Return an untrained network in float64."""
    torch.manual_seed(0)
    config = ModelConfig(**{**CONFIG.to_json(), "hidden": CONFIG.hidden, "gaussians": gaussians})
    return TieGroupDEformer(SCHEMA, config, GROUP_SIZE, encoding).double().eval()


def draw_records(num_records: int) -> tuple[Tensor, Tensor]:
    """Return features in random orders and values, (N, 7) each."""
    rng = np.random.default_rng(1)
    features = np.argsort(rng.random((num_records, NUM_FEATURES)), 1)
    return torch.from_numpy(features), torch.from_numpy(rng.normal(size=features.shape))


def shuffle_groups(rng: np.random.Generator) -> Tensor:
    """Return a random order of the readings that keeps the groups, (7,)."""
    return torch.from_numpy(np.concatenate([rng.permutation(group) for group in GROUPS]))


@pytest.mark.parametrize("gaussians", [0, 2])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_order_within_a_group_has_no_influence(encoding: Encoding, gaussians: int) -> None:
    model = make_model(encoding, gaussians)
    features, values = draw_records(5)
    before, rng = score(model, features, values), np.random.default_rng(2)
    for _ in range(5):
        order = shuffle_groups(rng)
        after = score(model, features[:, order], values[:, order])
        torch.testing.assert_close(after.log_p, before.log_p)
        torch.testing.assert_close(after.log_p_value, before.log_p_value[:, order])


@pytest.mark.parametrize("encoding", LEARNT)
def test_the_past_is_encoded_without_order(encoding: Encoding) -> None:
    """Without sorting, the order of an earlier group still has no influence on later ones."""
    model = make_model(encoding)
    features, values = draw_records(5)

    def predict_later(order: list[int]) -> Tensor:
        later = slice(GROUPS[0].stop, None)
        conditional = model.predict_sorted(features[:, order], values[:, order], None)
        return conditional.log_prob(values[:, order])[:, later]

    before = predict_later(list(range(NUM_FEATURES)))
    for first_group in itertools.permutations(GROUPS[0]):
        after = predict_later([*first_group, *range(GROUPS[0].stop, NUM_FEATURES)])
        torch.testing.assert_close(after, before)
    later_features = torch.arange(NUM_FEATURES).expand(5, -1)
    plain = DEformer(SCHEMA, CONFIG).double().eval()
    in_order, swapped = (
        plain.log_prob(later_features[:, o], values[:, o])[:, 3:]
        for o in ([0, 1, 2, 3, 4, 5, 6], [2, 1, 0, 3, 4, 5, 6])
    )
    assert (in_order - swapped).abs().max() > 1e-6, "the product's network has an order, so the test can fail"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_reading_is_predicted_from_the_past_and_the_given_readings_of_its_group(encoding: Encoding) -> None:
    model = make_model(encoding)
    _, values = draw_records(1)
    features = torch.arange(NUM_FEATURES)[None]
    zeros = torch.zeros_like(values)
    before = model.conditionals(features, values).log_prob(zeros)[0]
    for changed in range(NUM_FEATURES):
        other = values.clone()
        other[0, changed] += 1.0
        after = model.conditionals(features, other).log_prob(zeros)[0]
        is_different = (after - before).abs() > 1e-12
        assert is_different.tolist() == [k > changed for k in range(NUM_FEATURES)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_density_of_a_group_integrates_to_one(encoding: Encoding) -> None:
    torch.manual_seed(3)
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))
    model = TieGroupDEformer(schema, CONFIG, 2, encoding).double().eval()
    grid = torch.linspace(-30.0, 30.0, 151, dtype=torch.float64)
    first, second = torch.meshgrid(grid, grid, indexing="ij")
    features = torch.tensor([[3, 1, 2, 0]]).expand(first.numel(), -1)
    values = torch.stack([torch.full_like(first, 0.3), torch.full_like(first, -1.2), first, second], -1).reshape(-1, 4)
    with torch.inference_mode():
        log_p = model.log_prob(features, values)[:, 2:].sum(1)
    total = float(log_p.exp().sum()) * (60.0 / 150) ** 2
    assert total == pytest.approx(1.0, abs=1e-3)


def test_readings_are_sorted_by_code_within_their_groups() -> None:
    features, _ = draw_records(20)
    ordered = features.gather(1, sort_groups(features, GROUP_SIZE))
    for group in GROUPS:
        assert ordered[:, group].tolist() == features[:, group].sort(1).values.tolist()


@pytest.mark.parametrize("gaussians", [0, 2])
def test_four_orders_are_those_of_separate_passes(gaussians: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**{**CONFIG.to_json(), "hidden": CONFIG.hidden, "gaussians": gaussians})
    model = DEformer(SCHEMA, config).double().eval()
    if model.gaussians is not None:
        torch.nn.init.normal_(model.gaussians.means)
    features, values = draw_records(4)
    result = score_in_orders(model, features, values, GROUP_SIZE, seed=5)
    canonical = sort_groups(features, GROUP_SIZE)
    features, values = features.gather(1, canonical), values.gather(1, canonical)
    expected, p_values = torch.zeros(4, dtype=torch.float64), []
    for group in GROUPS:
        codes = np.arange(len(group))
        orders = [codes, *draw_orders(f"5 {group.start}", codes, 0)]
        assert len(orders) == (4 if len(group) == 3 else 1)
        terms, p_value = [], []
        for order in orders:
            positions = [*range(group.start), *(order + group.start).tolist()]
            conditional = model.conditionals(features[:, positions], values[:, positions])
            terms.append(conditional.log_prob(values[:, positions])[:, group].sum(1))
            p_value.append(conditional.log_p_value(values[:, positions])[:, group.start + order.argsort()])
        expected += torch.logsumexp(torch.stack(terms), 0) - math.log(len(orders))
        p_values.append(torch.stack(p_value).amin(0))
    torch.testing.assert_close(result.log_p, expected)
    torch.testing.assert_close(result.log_p_value, torch.cat(p_values, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group_size", [None, GROUP_SIZE])
def test_examples_have_random_groups_in_the_order_that_is_learnt(group_size: int | None) -> None:
    values = np.random.default_rng(0).normal(size=(200, NUM_FEATURES)).astype(np.float32)
    data = make_prepared_table(SCHEMA, values, np.full(200, Split.TRAIN, np.uint8))
    recipe = Recipe(batch=8, learning_rate=1e-3, epochs=1, smoothing=0.0)
    samples, rows = TieGroupExamples(data, recipe, group_size, None).draw(np.arange(200), create_generator(0))
    assert (samples.features.sort(1).values == torch.arange(NUM_FEATURES)).all()
    np.testing.assert_array_equal(np.take_along_axis(values, samples.features.numpy(), 1), samples.values.numpy())
    assert rows.tolist() == list(range(200))
    counts = torch.stack([(samples.features == code).sum(0) for code in range(NUM_FEATURES)]).double()
    assert (counts[:, 6] > 10).all(), "each feature is alone in the last group of some records"
    is_ascending = samples.features[:, :3].diff(dim=1).gt(0).all(1)
    assert is_ascending.double().mean() == (1.0 if group_size else pytest.approx(1 / 6, abs=0.1))
