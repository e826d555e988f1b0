"""Imputed and drawn values at given times, compared with the exact conditionals of a Gaussian process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from deformer_stream.engine import irregular_imputation
from deformer_stream.engine.imputation import ImputedValues, impute
from deformer_stream.engine.irregular_imputation import (
    ObservedReadings,
    Targets,
    draw_at_times,
    impute_at_times,
    impute_quantiles_at_times,
    iterate_target_conditionals,
)
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from tests.engine.irregular_streams import make_model
from tests.model.irregular_models import make_config
from tests.models import make_small_model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROCESS_SCHEMA = Schema(
    (*(Feature(f"sensor{i}", "continuous") for i in range(3)), Feature("age", "continuous", context=True)),
    reading_times=ReadingTimes(duration=100_000_000, resolution=1_000_000),
)


@cache
def make_process_model(recent: int = 10, block: int = 40, neighbors: int = 60) -> DEformer:
    """Return a model with initial weights, which predicts exactly what its Gaussian process predicts, in float64."""
    torch.manual_seed(0)
    config = replace(make_config(neighbors=neighbors), context_recent=recent, context_block=block)
    model = DEformer(PROCESS_SCHEMA, config).double().eval()
    with torch.no_grad():  # the components of the network itself get practically no weight
        model.head.project.bias[: config.mixtures] = -40.0
    process, generator = model.process, torch.Generator().manual_seed(3)
    assert process is not None
    process.factors.copy_(0.6 * torch.randn(process.factors.shape, generator=generator, dtype=torch.float64))
    process.means.copy_(torch.tensor([0.5, -1.0, 0.0, 0.0], dtype=torch.float64))
    process.deviations.fill_(0.2)
    process.noise.fill_(0.1)
    process.scales.copy_(torch.tensor([5.0, 50.0, 1e5], dtype=torch.float64))
    process.outlier_share.fill_(1e-12)  # practically one Gaussian
    return model


def compute_covariance(model: DEformer, codes: Ints, ages: Floats, other_codes: Ints, other_ages: Floats) -> Floats:
    """Return the covariances of two sets of readings without their noise."""
    assert model.process is not None
    lag = np.abs(ages[:, None] - other_ages)
    terms = [
        matrix[codes[:, None], other_codes] * np.exp(-lag / scale)
        for matrix, scale in zip(model.process.compute_covariances().numpy(), model.process.scales.numpy(), strict=True)
    ]
    return np.asarray(sum(terms))


def compute_exact(
    model: DEformer, codes: Ints, values: Floats, ages: Floats, target_codes: Ints, target_ages: Floats
) -> tuple[Floats, Floats]:
    """Return the exact mean (T,) and covariance (T, T) of targets given readings, by linear algebra."""
    assert model.process is not None
    means, noise = model.process.means.numpy(), model.process.compute_noise_variances().numpy()
    own = compute_covariance(model, codes, ages, codes, ages) + np.diag(noise[codes])
    cross = compute_covariance(model, target_codes, target_ages, codes, ages)
    weights = np.linalg.solve(own, cross.T).T
    mean = means[target_codes] + weights @ (values - means[codes])
    prior = compute_covariance(model, target_codes, target_ages, target_codes, target_ages)
    return mean, prior + np.diag(noise[target_codes]) - weights @ cross.T


def draw_readings(model: DEformer, num_readings: int, seed: int, seconds: float) -> tuple[Ints, Floats, Floats]:
    """Return codes, values and ages of readings that are drawn from the process."""
    rng = np.random.default_rng(seed)
    codes, ages = rng.integers(0, 3, num_readings), np.sort(rng.uniform(0, seconds, num_readings))
    assert model.process is not None
    noise = model.process.compute_noise_variances().numpy()
    covariance = compute_covariance(model, codes, ages, codes, ages) + np.diag(noise[codes])
    values = model.process.means.numpy()[codes] + np.linalg.cholesky(covariance) @ rng.normal(size=num_readings)
    return codes, values, ages


def make_one_record(codes: Ints, values: Floats, ages: Floats) -> ObservedReadings:
    return ObservedReadings.sort(np.zeros(len(codes), np.int64), codes, values, ages, 1)


def make_targets(codes: list[int], ages: list[float], record: int = 0) -> Targets:
    return Targets(np.full(len(codes), record), np.array(codes, np.int64), np.array(ages, np.float64))


def test_imputed_values_are_those_of_the_exact_conditional() -> None:
    model = make_process_model()
    codes, values, ages = draw_readings(model, 40, 0, 100.0)
    targets = make_targets([0, 1, 2, 0, 1], [50.0, 3.0, 99.0, 120.0, 50.5])
    mean, covariance = compute_exact(model, codes, values, ages, targets.codes, targets.ages)
    deviation = np.sqrt(np.diag(covariance))
    observed = make_one_record(codes, values, ages)
    imputed = impute_at_times(model, observed, targets, 0.8)
    assert imputed.median == pytest.approx(mean, abs=1e-4)
    assert imputed.mean == pytest.approx(mean, abs=1e-4)
    assert imputed.mode == pytest.approx(mean, abs=0.01)
    assert imputed.low == pytest.approx(mean + deviation * norm.ppf(0.1), abs=1e-4)
    assert imputed.high == pytest.approx(mean + deviation * norm.ppf(0.9), abs=1e-4)
    quantiles = impute_quantiles_at_times(model, observed, targets, [0.25, 0.6])
    assert quantiles == pytest.approx(mean + deviation * norm.ppf([[0.25], [0.6]]), abs=1e-4)
    # The error of the estimates is smaller than with earlier readings alone.
    is_earlier = ages < 50.0
    earlier, _ = compute_exact(
        model, codes[is_earlier], values[is_earlier], ages[is_earlier], targets.codes, targets.ages
    )
    assert abs(earlier[0] - mean[0]) > 0.05


@pytest.mark.parametrize("memory", ["values", "all"])
def test_a_target_has_the_conditional_of_its_sequence(memory: str) -> None:
    """The cached conditionals are those of the complete sequence: the context, and then the target."""
    model = make_model(5, memory=memory)
    rng = np.random.default_rng(1)
    codes, ages = rng.integers(0, 4, 6), np.sort(rng.uniform(0, 1e5, 6))
    values = rng.normal(size=6)
    observed = make_one_record(codes, values, ages)
    for code in range(len(model.schema)):
        targets = make_targets([code], [4e4])
        ((index, conditional),) = iterate_target_conditionals(model, observed, targets)
        assert index.tolist() == [0]
        order = irregular_imputation.shuffle(6)
        with torch.inference_mode():
            expected = model.conditionals(
                torch.from_numpy(np.append(codes[order], code))[None],
                torch.from_numpy(np.append(model.schema.normalise(codes, values)[order], 0.0))[None],
                ages=torch.from_numpy(np.append(ages[order], 4e4))[None],
            )[:, -1]
        number = torch.tensor([1.0], dtype=torch.float64)
        torch.testing.assert_close(conditional.log_prob(number), expected.log_prob(number), rtol=0, atol=1e-9)


def test_a_long_record_has_bounded_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_process_model(recent=20, block=40)
    rng = np.random.default_rng(2)
    num_readings, seconds = 10_000, 20_000.0
    codes, ages = rng.integers(0, 2, num_readings), np.sort(rng.uniform(0, seconds, num_readings))
    codes[[10, 9_900]] = 2  # a rare sensor, far from most targets
    values = np.sin(ages / 20.0) + 0.1 * rng.normal(size=num_readings)
    values[[10, 9_900]] = [0.3, -0.2]
    observed = make_one_record(codes, values, ages)
    targets = make_targets([0, 1, 2, 0], [10_000.0, 10_000.5, 10_000.5, 10_500.0])
    contexts: list[Ints] = []
    prefill = irregular_imputation._prefill

    def record_contexts(model: DEformer, *given: object) -> object:
        contexts.extend(given[2])  # type: ignore[call-overload]
        return prefill(model, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(irregular_imputation, "_prefill", record_contexts)
    imputed = impute_at_times(model, observed, targets)
    assert len(contexts) == 2  # of the first three targets, and of the last one
    for context in contexts:
        assert 59 <= len(context) <= 59 + 2 * 3
        assert {ages[10], ages[9_900]} <= set(context.tolist())
    # The nearest readings on both sides are in the context.
    nearest = ages[np.argsort(np.abs(ages - 10_000.0))[:20]]
    assert set(nearest.tolist()) <= set(contexts[0].tolist())
    # Readings outside of the context have no effect, and those after the target have one.
    is_used = np.isin(ages, contexts[0])
    other = make_one_record(codes, np.where(is_used, values, values + 5.0), ages)
    again = impute_at_times(model, other, targets.select(np.arange(3)))
    assert again.median == pytest.approx(imputed.median[:3], abs=1e-9)
    after = np.flatnonzero((ages > 10_000.0) & (codes == 0))[0]
    changed = values.copy()
    changed[after] += 1.0
    assert (
        abs(impute_at_times(model, make_one_record(codes, changed, ages), targets).median[0] - imputed.median[0]) > 0.05
    )


def test_estimates_do_not_depend_on_what_shares_the_batch() -> None:
    model = make_model(2)
    rng = np.random.default_rng(7)
    record, codes, ages = rng.integers(0, 4, 90), rng.integers(0, 5, 90), rng.uniform(0, 1e5, 90)
    values = np.where(codes == 4, rng.integers(0, 2, 90), rng.normal(size=90))
    is_empty = record == 3  # a record without readings
    observed = ObservedReadings.sort(
        record[~is_empty], codes[~is_empty], values[~is_empty], ages[~is_empty], num_records=4
    )
    targets = Targets(rng.integers(0, 4, 30), rng.integers(0, 5, 30), rng.uniform(0, 1e5, 30))
    together = impute_at_times(model, observed, targets)
    for i in range(30):
        alone = impute_at_times(model, observed, targets.select(np.array([i])))
        for name in ("median", "low", "high", "mean", "mode"):
            expected = getattr(together, name)[i]
            assert getattr(alone, name)[0] == pytest.approx(expected, abs=1e-6, nan_ok=True), name
    assert not np.isnan(together.median).any()
    is_label = targets.codes == 4
    assert set(together.median[is_label]) <= {0.0, 1.0}
    assert np.isnan(together.low[is_label]).all()


def test_draws_have_the_exact_joint_distribution() -> None:
    model = make_process_model()
    codes, values, ages = draw_readings(model, 30, 1, 100.0)
    targets = make_targets([0, 1, 0], [50.0, 50.2, 51.0])
    mean, covariance = compute_exact(model, codes, values, ages, targets.codes, targets.ages)
    observed = make_one_record(codes, values, ages)
    drawn = draw_at_times(model, observed, targets, 3000, seed=4)
    deviation = np.sqrt(np.diag(covariance))
    assert np.abs((drawn.mean(0) - mean) / deviation).max() < 0.1
    correlation = covariance / np.outer(deviation, deviation)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() > 0.3
    assert np.corrcoef(drawn.T) == pytest.approx(correlation, abs=0.08)
    assert drawn.std(0) == pytest.approx(deviation, rel=0.08)
    few = [draw_at_times(model, observed, targets, 5, seed=seed) for seed in (4, 4, 5)]
    assert np.array_equal(few[0], few[1])
    assert not np.array_equal(few[0], few[2])


def test_values_of_earlier_groups_are_in_the_context_of_later_ones() -> None:
    """In a record without readings, the long time scale gives all values of a draw a common level."""
    model = make_process_model(recent=2, block=6)
    assert model.process is not None
    model.process.factors[2, 0] = torch.tensor([1.5, 0.0])
    nothing = make_one_record(np.empty(0, np.int64), np.empty(0), np.empty(0))
    times = np.arange(0.0, 1200.0, 60.0)  # far apart for the shorter scales
    targets = make_targets([0] * 20, times.tolist())
    drawn = draw_at_times(model, nothing, targets, 600, seed=1)
    expected = compute_exact(model, np.empty(0, np.int64), np.empty(0), np.empty(0), targets.codes, targets.ages)[1]
    correlation = expected[0, 19] / np.sqrt(expected[0, 0] * expected[19, 19])
    assert correlation > 0.5
    # It is somewhat smaller, because a context holds few of the drawn values; without them it would be 0.
    assert 0.5 < np.corrcoef(drawn[:, 0], drawn[:, 19])[0, 1] < correlation + 0.05


def test_context_features_are_skipped_and_repetitions_left_out() -> None:
    model = make_process_model()
    codes, values, ages = draw_readings(model, 10, 3, 50.0)
    observed = make_one_record(codes, values, ages)
    twice = make_one_record(np.tile(codes, 2), np.tile(values, 2), np.tile(ages, 2))
    assert len(twice.codes) == 10
    assert np.array_equal(twice.ages, observed.ages)
    # Two different values of a sensor at the same time are two readings.
    both = make_one_record(np.tile(codes, 2), np.concatenate([values, values + 1.0]), np.tile(ages, 2))
    assert len(both.codes) == 20
    targets = make_targets([3, 0], [10.0, 10.0])
    assert np.isnan(impute_at_times(model, observed, targets).median).tolist() == [True, False]
    assert np.isnan(draw_at_times(model, observed, targets, 2)).tolist() == [[True, False]] * 2
    nothing = impute_at_times(model, observed, make_targets([], []))
    assert isinstance(nothing, ImputedValues)
    assert nothing.median.shape == (0,)


def test_models_of_other_records_are_refused() -> None:
    model = make_small_model()
    observed = make_one_record(np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    for function in (impute_at_times, lambda *given: draw_at_times(*given, 2)):
        with pytest.raises(ConfigError, match="a sensor reports once in a record"):
            function(model, observed, make_targets([0], [0.0]))
    with pytest.raises(ConfigError, match="the model is for irregular readings"):
        impute(make_model(), np.zeros((1, 5)), np.ones((1, 5), bool))
