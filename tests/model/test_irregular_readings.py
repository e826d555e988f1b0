"""Tests of models of irregular readings: a sensor reports any number of times, and each reading has its own time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.bounded_context import ContextLimit, select_contexts
from deformer_stream.model.constants import MIN_NOISE_VARIANCE
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.gaussian_process import MAX_OTHER_NEIGHBORS, GaussianProcessPrior, Neighbors
from deformer_stream.model.parameters import count_state_values, describe_tensors
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_inputs import compute_gaps, encode_times, find_previous_of_sensor
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from tests.effort import num_examples
from tests.model.irregular_models import (
    SCHEMA,
    TIMES,
    draw_contexts,
    log_prob_by_steps,
    make_config,
    make_irregular_model,
    randomize_process,
)

seeds = st.integers(0, 2**16)


@settings(max_examples=num_examples(30), deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    memory=st.sampled_from(["values", "all"]),
    neighbors=st.sampled_from([(0, 1.0), (1, 1.0), (3, 1.0), (50, 1.0), (3, 0.8)]),
)
def test_any_split_into_prefill_and_steps_equals_log_prob(
    data: st.DataObject, seed: int, memory: str, neighbors: tuple[int, float]
) -> None:
    model = make_irregular_model(make_config(memory, *neighbors), seed)
    codes, values, ages = draw_contexts(3, 12, seed)
    random_cuts = sorted(data.draw(st.sets(st.integers(1, 11), max_size=4)))
    with torch.inference_mode():
        expected = model.log_prob(codes, values, ages=ages)
        for cuts in (list(range(1, 12)), random_cuts):
            actual = log_prob_by_steps(model, codes, values, ages, cuts)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@settings(max_examples=num_examples(20), deadline=None)
@given(seed=seeds, changed=st.integers(1, 11), decay=st.sampled_from([1.0, 0.5]))
def test_later_readings_and_padding_change_no_score(seed: int, changed: int, decay: float) -> None:
    model = make_irregular_model(make_config(decay=decay), seed)
    codes, values, ages = draw_contexts(2, 12, seed)
    other_codes, other_values, other_ages = draw_contexts(2, 12, seed + 1)
    with torch.inference_mode():
        before = model.log_prob(codes, values, ages=ages)
        for t, other in ((codes, other_codes), (values, other_values), (ages, other_ages)):
            t[:, changed:] = other[:, changed:]
        after = model.log_prob(codes, values, ages=ages)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-10)
        codes[0, changed:] = -1
        padded = model.log_prob(codes, values, ages=ages)
        torch.testing.assert_close(padded[1], after[1], rtol=0, atol=1e-10)
        torch.testing.assert_close(padded[0, :changed], before[0, :changed], rtol=0, atol=1e-10)
        assert (padded[0, changed:] == 0).all()


@pytest.mark.parametrize("shift", ["age", "order", "sensor"])
def test_a_prediction_depends_on_the_time_and_on_the_earlier_readings_of_the_sensor(shift: str) -> None:
    model = make_irregular_model(make_config(neighbors=0), seed=5)
    codes, values, ages = (
        torch.tensor([[0, 1, 0]]),
        torch.tensor([[0.3, -0.4, 0.5]]).double(),
        torch.zeros(1, 3).double(),
    )
    ages[0] = torch.tensor([0.0, 60.0, 3600.0])
    with torch.inference_mode():
        before = float(model.log_prob(codes, values, ages=ages)[0, 2])
        if shift == "age":
            ages[0, 2] = 7200.0
        elif shift == "order":
            ages[0, 0] = 120.0  # the sensor's previous reading is nearer
        else:
            codes[0, 0] = 2  # the sensor has not reported before
        assert abs(float(model.log_prob(codes, values, ages=ages)[0, 2]) - before) > 1e-3


def test_continuous_conditionals_integrate_to_one() -> None:
    model = make_irregular_model(make_config(), seed=1)
    codes, values, ages = draw_contexts(1, 8, seed=3)
    codes[0, 7] = 1
    grid = torch.linspace(-60, 60, 24_001, dtype=torch.float64)
    with torch.inference_mode():
        conditional = model.conditionals(codes, values, ages=ages)
        density = torch.stack(
            [conditional.log_prob(values.index_fill(1, torch.tensor([7]), float(x)))[0, 7] for x in grid[::40]]
        )
    assert float(torch.trapezoid(density.exp(), grid[::40])) == pytest.approx(1.0, abs=2e-3)


def test_prior_with_enough_neighbors_is_the_exact_conditional_of_the_process() -> None:
    process = GaussianProcessPrior(SCHEMA, rank=2, num_scales=3, num_neighbors=50)
    randomize_process(process, torch.Generator().manual_seed(2))
    codes = torch.tensor([[0, 2, 1, 0, 2]])
    ages = torch.tensor([[0.0, 300.0, 300.0, 5000.0, 9000.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, -0.2, 0.9, 0.1, -1.0]], dtype=torch.float64)
    prior = process(codes, values, ages)
    matrices = process.compute_covariances()
    c, t = codes[0], ages[0]
    covariance = sum(
        (matrix[c[:, None], c[None]] * torch.exp(-(t[:, None] - t[None]).abs() / scale))
        for matrix, scale in zip(matrices, process.scales, strict=True)
    ) + torch.diag(process.noise[c] ** 2 + MIN_NOISE_VARIANCE)
    assert isinstance(covariance, torch.Tensor)
    residual = values[0] - process.means[c]
    for k in range(5):
        weights = torch.linalg.solve(covariance[:k, :k], covariance[:k, k]) if k else torch.zeros(0).double()
        mean = process.means[c[k]] + weights @ residual[:k]
        variance = covariance[k, k] - weights @ covariance[:k, k]
        assert float(prior.means[0, k, 0]) == pytest.approx(float(mean), abs=1e-9)
        assert float(prior.scales[0, k, 0]) == pytest.approx(math.sqrt(float(variance)), abs=1e-9)
        assert float(prior.scales[0, k, 1] / prior.scales[0, k, 0]) == pytest.approx(3.0)


def test_p_value_given_other_sensors_is_that_of_the_exact_conditional_without_the_own_readings() -> None:
    process = GaussianProcessPrior(SCHEMA, rank=2, num_scales=3, num_neighbors=50)
    randomize_process(process, torch.Generator().manual_seed(2))
    process.outlier_share.fill_(0.1)
    codes = torch.tensor([[0, 2, 1, 0, 2, 0]])
    ages = torch.tensor([[0.0, 300.0, 300.0, 5000.0, 9000.0, 9001.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, -0.2, 0.9, 0.1, -1.0, 2.0]], dtype=torch.float64)
    log_p = process.compute_log_p_others(codes, values, ages)[0]
    c, t = codes[0], ages[0]
    covariance = sum(
        (matrix[c[:, None], c[None]] * torch.exp(-(t[:, None] - t[None]).abs() / scale))
        for matrix, scale in zip(process.compute_covariances(), process.scales, strict=True)
    ) + torch.diag(process.noise[c] ** 2 + MIN_NOISE_VARIANCE)
    assert isinstance(covariance, torch.Tensor)
    residual = values[0] - process.means[c]
    for k in range(6):
        others = [j for j in range(k) if c[j] != c[k]]
        weights = torch.linalg.solve(covariance[others][:, others], covariance[others, k])
        deviation = math.sqrt(float(covariance[k, k] - weights @ covariance[others, k]))
        distance = abs(float(residual[k] - weights @ residual[others])) / deviation
        tails = [math.erfc(distance / math.sqrt(2)), math.erfc(distance / math.sqrt(2) / 3.0)]
        assert float(log_p[k]) == pytest.approx(math.log(0.9 * tails[0] + 0.1 * tails[1]), abs=1e-9)
    # Readings without a prior are evidence of nothing: code 3 is cyclic.
    cyclic = process.compute_log_p_others(torch.tensor([[0, 3]]), torch.tensor([[0.5, 9.0]]).double(), ages[:, :2])
    assert float(cyclic[0, 1]) == 0.0


def test_neighbors_of_other_sensors_are_bounded_although_all_readings_are_neighbors() -> None:
    """With 1,024 neighbors, covariance matrices of all readings of long records exceeded 20 GB."""
    codes = torch.arange(100).remainder(3).view(1, -1)
    ages = 60.0 * torch.arange(100, dtype=torch.float64).view(1, -1)
    values = torch.randn(1, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_p = {}
    for num_neighbors in (MAX_OTHER_NEIGHBORS, 1024):
        process = GaussianProcessPrior(SCHEMA, rank=2, num_scales=3, num_neighbors=num_neighbors)
        randomize_process(process, torch.Generator().manual_seed(2))
        has_prior = process.is_linear[codes]
        index, _ = process.choose_neighbors(codes, ages, has_prior, is_own_excluded=True)
        assert index.shape == (1, 100, MAX_OTHER_NEIGHBORS)
        log_p[num_neighbors] = process.compute_log_p_others(codes, values, ages)
    assert torch.equal(log_p[MAX_OTHER_NEIGHBORS], log_p[1024])


def test_prior_conditions_on_the_most_correlated_earlier_readings() -> None:
    process = GaussianProcessPrior(SCHEMA, rank=1, num_scales=1, num_neighbors=2)
    process.scales.fill_(1000.0)
    process.factors.copy_(torch.tensor([[[1.0], [0.9], [0.01], [1.0], [1.0]]]).double())
    codes = torch.tensor([[0, 1, 2, 3, 0, 1, 0]])  # code 3 is cyclic, so the process does not contain it
    ages = torch.tensor([[0.0, 900.0, 990.0, 995.0, 100.0, 901.0, 1000.0]], dtype=torch.float64)
    has_prior = torch.from_numpy(SCHEMA.is_linear)[codes]
    index, is_neighbor = process.choose_neighbors(codes, ages, has_prior)
    assert index[0, 6].tolist() == [5, 1]
    assert is_neighbor[0].sum(1).tolist() == [0, 1, 2, 0, 2, 2, 2]


def test_older_readings_of_a_sensor_do_not_displace_another_sensor_if_correlations_decay() -> None:
    """Without the decay, the older readings of the sensor count more than the simultaneous one of the other sensor."""
    process = GaussianProcessPrior(SCHEMA, rank=1, num_scales=1, num_neighbors=2)
    process.scales.fill_(1000.0)
    process.factors.copy_(torch.tensor([[[1.0], [0.7], [0.0], [0.0], [0.0]]]).double())
    process.deviations.fill_(0.2)
    process.noise.fill_(0.2)
    codes = torch.tensor([[0, 0, 0, 1, 0]])
    ages = torch.tensor([[920.0, 940.0, 950.0, 1000.0, 1000.0]], dtype=torch.float64)
    deviations = {}
    for decay, expected in ((1.0, [2, 1]), (0.9, [2, 3])):
        process.decay = decay
        index, is_neighbor = process.choose_neighbors(codes, ages, torch.ones_like(codes, dtype=torch.bool))
        assert index[0, 4].tolist() == expected
        assert is_neighbor[0, 4].all()
        deviations[decay] = float(process(codes, torch.zeros(1, 5).double(), ages).scales[0, 4, 0])
    assert deviations[0.9] < deviations[1.0]


@settings(max_examples=num_examples(30), deadline=None)
@given(seed=seeds, neighbors=st.integers(1, 6), decay=st.sampled_from([1.0, 0.8, 0.1]), first=st.integers(0, 11))
def test_neighbors_have_the_largest_correlations_after_decay(
    seed: int, neighbors: int, decay: float, first: int
) -> None:
    process = GaussianProcessPrior(SCHEMA, 2, 3, neighbors, decay)
    randomize_process(process, torch.Generator().manual_seed(seed))
    codes, _, ages = draw_contexts(1, 12, seed)
    has_prior = process.is_linear[codes]
    has_prior[0, 2] = False  # padding may be at any position, with any code
    index, is_neighbor = process.choose_neighbors(codes, ages, has_prior, first)
    assert index.shape == (1, 12 - first, neighbors)
    c, t = codes[0], ages[0]
    covariance = sum(
        (matrix[c[:, None], c[None]] * torch.exp(-(t[:, None] - t[None]).abs() / scale))
        for matrix, scale in zip(process.compute_covariances(), process.scales, strict=True)
    )
    assert isinstance(covariance, torch.Tensor)
    correlation = (covariance / (covariance.diagonal() + process.noise[c] ** 2 + MIN_NOISE_VARIANCE).sqrt()).abs()
    for k in range(first, 12):
        earlier = [j for j in range(k) if has_prior[0, j] and has_prior[0, k]]
        num_later = {j: sum(1 for other in earlier if other > j and codes[0, other] == codes[0, j]) for j in earlier}
        product = {j: float(correlation[k, j]) * decay ** num_later[j] for j in earlier}
        chosen = index[0, k - first][is_neighbor[0, k - first]].tolist()
        expected = sorted(product.values(), reverse=True)[:neighbors]
        assert [product[j] for j in chosen] == pytest.approx(expected)
        assert len(set(chosen)) == len(chosen)


def test_outlier_among_the_neighbors_is_clipped() -> None:
    process = GaussianProcessPrior(SCHEMA, rank=1, num_scales=1, num_neighbors=1)
    process.scales.fill_(1000.0)
    process.factors.fill_(1.0)

    def condition(value: float) -> float:
        neighbors = Neighbors(*(torch.tensor([[x]]) for x in (0, value, 0.0, True)))
        neighbors = Neighbors(
            neighbors.features, neighbors.values.double(), neighbors.ages.double(), neighbors.is_neighbor
        )
        return float(process.condition(torch.tensor([1]), torch.zeros(1).double(), neighbors)[0])

    assert condition(100.0) == condition(6.0) > condition(5.0)


def test_damaged_process_is_refused() -> None:
    model = make_irregular_model(make_config(), seed=0)
    state = model.state_dict()
    state["process.scales"] = torch.zeros_like(state["process.scales"])
    with pytest.raises(ValueError, match="Gaussian process, so the file is damaged"):
        model.load_state_dict(state)


@pytest.mark.parametrize("neighbors", [0, 4])
def test_number_of_state_values_is_computed_without_the_model(neighbors: int) -> None:
    config = make_config(neighbors=neighbors)
    state = DEformer(SCHEMA, config).state_dict()
    expected = {name: (tuple(t.shape), t.detach().numpy().dtype) for name, t in state.items()}
    assert describe_tensors(SCHEMA, config) == expected
    assert count_state_values(SCHEMA, config) == sum(tensor.numel() for tensor in state.values())


def test_hyperparameters_must_fit_the_schema() -> None:
    with pytest.raises(ValueError, match="two tokens for each reading"):
        DEformer(SCHEMA, ModelConfig(gaussians=2))
    with pytest.raises(ValueError, match="one prior"):
        ModelConfig(neighbors=2, gaussians=2, process_scales=1)
    with pytest.raises(ValueError, match="one prior"):
        ModelConfig(neighbors=2)
    limited = replace(make_config(neighbors=59), outlier_limit=2.0, context_block=50)
    with pytest.raises(ValueError, match="outlier_limit needs neighbors of at least 60"):
        DEformer(SCHEMA, limited)
    with pytest.raises(ValueError, match="outlier_limit needs neighbors"):
        DEformer(SCHEMA, replace(limited, neighbors=1000, context_block=0))  # contexts without limit
    DEformer(SCHEMA, replace(limited, neighbors=60))
    for outlier_limit in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="outlier_limit"):
            replace(limited, outlier_limit=outlier_limit)
    for decay in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="neighbor_decay"):
            make_config(decay=decay)
    with pytest.raises(ValueError, match="pass the age"):
        DEformer(SCHEMA, make_config()).log_prob(torch.tensor([[0]]), torch.tensor([[0.0]]))


def test_hyperparameters_of_other_models_keep_their_json() -> None:
    assert "neighbors" not in ModelConfig().to_json()
    # Models of the first version choose neighbors by correlation, and their manifests do not contain the rule.
    assert "neighbor_decay" not in make_config().to_json()
    assert ModelConfig.from_json(make_config().to_json()).neighbor_decay == 1.0
    assert ModelConfig.from_json(make_config(decay=0.8).to_json()).neighbor_decay == 0.8
    # Models that were trained before the limit existed give all readings their weight.
    assert "outlier_limit" not in make_config().to_json()
    assert ModelConfig.from_json(make_config().to_json()).outlier_limit == 0.0
    assert ModelConfig.from_json(replace(make_config(), outlier_limit=5.0).to_json()).outlier_limit == 5.0
    config = ModelConfig(neighbors=8, process_rank=4, process_scales=5, context_recent=32, context_block=64)
    assert ModelConfig.from_json(config.to_json()) == config
    assert config.context_limit == ContextLimit(32, 64)
    assert ModelConfig().context_limit is None


def test_time_scales_are_part_of_the_schema() -> None:
    restored = Schema.from_json(SCHEMA.to_json(), None, TIMES.to_json())
    assert restored == SCHEMA
    assert restored.fingerprint == SCHEMA.fingerprint != Schema(SCHEMA.features).fingerprint
    with pytest.raises(ValueError, match="time slots"):
        replace(expand_time_slots(Schema((Feature("a", "continuous"),)), Window(10, 2)), reading_times=TIMES)
    for duration, resolution in ((0, 1), (10, 0), (10, 11), (10.0, 1)):
        with pytest.raises(ValueError, match="positive integers"):
            ReadingTimes(duration, resolution)  # type: ignore[arg-type]


def test_gaps_are_the_times_since_the_previous_reading_of_the_sensor() -> None:
    codes = torch.tensor([[1, 0, 1, 1, -1, 0], [2, 2, 2, 0, 1, 2]])
    ages = torch.tensor([[5.0, 6.0, 8.0, 7.0, 0.0, 9.0], [0.0, 0.0, 4.0, 5.0, 6.0, 3.0]], dtype=torch.float64)
    assert find_previous_of_sensor(codes)[0, [0, 1, 2, 3, 5]].tolist() == [-1, -1, 0, 2, 1]
    gaps = compute_gaps(codes, ages)
    nan = math.nan
    np.testing.assert_array_equal(gaps[0, [0, 1, 2, 3, 5]], [nan, nan, 3.0, -1.0, 3.0])
    np.testing.assert_array_equal(gaps[1], [nan, 0.0, 4.0, nan, nan, -1.0])


def test_time_inputs_tell_gaps_apart() -> None:
    ages = torch.full((5,), 3600.0, dtype=torch.float64)
    gaps = torch.tensor([math.nan, 0.0, 60.0, -60.0, 3600.0], dtype=torch.float64)
    inputs = encode_times(TIMES, ages, gaps)
    assert inputs.shape == (5, TIMES.num_inputs)
    log_gap, has_previous, is_simultaneous = inputs[:, -3:].unbind(1)
    assert has_previous.tolist() == [0, 1, 1, 1, 1]
    assert is_simultaneous.tolist() == [0, 1, 0, 0, 0]
    assert log_gap[2] == -log_gap[3]
    assert 0 < log_gap[2] < log_gap[4] < 1
    # The shortest period is longer than two minutes: 48 h / 2**10 is 169 s.
    assert TIMES.num_octaves == 11
    assert torch.isfinite(encode_times(TIMES, ages * 1e9, gaps * 1e9)).all()


@settings(max_examples=num_examples(50), deadline=None)
@given(data=st.data(), recent=st.integers(0, 5))
def test_selected_context_is_the_recent_readings_and_the_last_of_each_sensor(data: st.DataObject, recent: int) -> None:
    records = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4))
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in records])])
    codes = np.array([code for record in records for code in record], np.int16)
    selected, selected_offsets = select_contexts(codes, offsets, 4, recent)
    for i, record in enumerate(records):
        last = {code: place for place, code in enumerate(record)}
        expected = sorted({*last.values(), *range(max(0, len(record) - recent), len(record))})
        actual = selected[selected_offsets[i] : selected_offsets[i + 1]] - offsets[i]
        assert actual.tolist() == expected


@settings(max_examples=num_examples(30), deadline=None)
@given(seed=seeds, recent=st.integers(0, 4), block=st.integers(1, 6))
def test_next_context_needs_only_the_block_and_its_context(seed: int, recent: int, block: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 4, 40)
    context = np.empty(0, np.int64)
    for start in range(0, 40 - block, block):
        stop = start + block
        kept = np.concatenate([context, np.arange(start, stop)])
        from_all, _ = select_contexts(codes[:stop], np.array([0, stop]), 4, recent)
        from_kept, _ = select_contexts(codes[kept], np.array([0, len(kept)]), 4, recent)
        context = kept[from_kept]
        assert context.tolist() == from_all.tolist()
        assert len(context) + block <= ContextLimit(recent, block).max_readings(4)
