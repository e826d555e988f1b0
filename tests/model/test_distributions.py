"""Tests that conditionals are probability distributions, and that cdf, quantile, sample and p-value fit the density."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.distributions import Conditional, Head, log_gamma_sf
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.random_models import configs, draw_records, make_model, normalise_values, schemas


def make_gaussian(n: int, mean: float = 0.0, scale: float = 1.0) -> Conditional:
    """Return n copies of a single Gaussian, float64."""
    one = torch.ones(n, 1, dtype=torch.float64)
    return Conditional(torch.zeros(n, dtype=torch.bool), 0 * one, mean * one, scale * one, 0 * one)


def make_mixture(weights: list[float], means: list[float], scales: list[float], n: int) -> Conditional:
    """Return n copies of a mixture of Gaussians, float64."""
    rows = [torch.tensor(x, dtype=torch.float64).expand(n, -1) for x in (weights, means, scales)]
    no_labels = torch.zeros(n, 1, dtype=torch.float64)
    return Conditional(torch.zeros(n, dtype=torch.bool), rows[0].log(), rows[1], rows[2], no_labels)


def make_categorical(mass: list[float], n: int) -> Conditional:
    """Return n copies of a categorical distribution, float64; the last code stands for unseen labels."""
    no_components = torch.zeros(n, 0, dtype=torch.float64)
    log_mass = torch.tensor(mass, dtype=torch.float64).log().expand(n, -1)
    return Conditional(torch.ones(n, dtype=torch.bool), no_components, no_components, no_components, log_mass)


def check_discrete(conditional: Conditional, feature: Feature) -> None:
    """Check that the probabilities of a discrete reading, of shape (1, 1), sum to one."""
    codes = torch.arange(len(feature.labels) + 1, dtype=torch.float64)
    mass = torch.stack([conditional.log_prob(code.expand(1, 1)) for code in codes]).exp()
    assert mass.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert mass[-1].item() == pytest.approx(feature.unseen)
    assert conditional.cdf(codes[-1].expand(1, 1)).item() == pytest.approx(1.0, abs=1e-9)


def check_continuous(conditional: Conditional) -> None:
    """Check that the density of a continuous reading, of shape (1, 1), integrates to one and to its cdf."""
    reach = 12 * float(conditional.scales.max())
    low, high = float(conditional.means.min()) - reach, float(conditional.means.max()) + reach
    # Ten points per standard deviation of the narrowest component.
    num_points = int((high - low) / float(conditional.scales.min()) * 10) + 2
    x = torch.linspace(low, high, num_points, dtype=torch.float64)
    repeated = conditional[0, torch.zeros(len(x), dtype=torch.long)]
    integral = torch.cumulative_trapezoid(repeated.log_prob(x).exp(), x)
    assert integral[-1].item() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(repeated.cdf(x)[1:], integral, atol=1e-3, rtol=0)


@settings(max_examples=num_examples(20), deadline=None)
@given(schema=schemas(max_features=6), config=configs, seed=st.integers(0, 999))
def test_conditionals_are_probability_distributions(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = make_model(schema, config, seed)
    codes, raw = draw_records(schema, 2, seed)
    with torch.inference_mode():
        values = torch.from_numpy(normalise_values(schema, codes, raw))
        conditionals = model.conditionals(torch.from_numpy(codes), values)
        for record_index in range(2):
            for k, code in enumerate(codes[record_index]):
                conditional = conditionals[record_index : record_index + 1, k : k + 1]
                feature = schema.features[code]
                if feature.kind == "discrete":
                    check_discrete(conditional, feature)
                else:
                    check_continuous(conditional)


@given(st.floats(0.001, 0.999))
def test_quantile_is_the_inverse_of_the_cdf(q: float) -> None:
    mixture = make_mixture([0.3, 0.7], [-2.0, 1.0], [0.1, 2.0], 3)
    expected = torch.full((3,), q, dtype=torch.float64)
    torch.testing.assert_close(mixture.cdf(mixture.quantile(q)), expected, atol=1e-9, rtol=0)


def test_quantile_of_a_discrete_reading_is_a_label_code() -> None:
    categorical = make_categorical([0.2, 0.5, 0.3], 1)
    assert [int(categorical.quantile(q)) for q in (0.1, 0.2, 0.5, 0.7, 0.71, 0.99)] == [0, 0, 1, 1, 2, 2]


def test_p_value_of_a_gaussian_is_the_two_sided_one() -> None:
    z = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 6.0], dtype=torch.float64)
    expected = torch.special.erfc(z / math.sqrt(2)).log()
    torch.testing.assert_close(make_gaussian(6, 0.0, 1.0).log_p_value(z), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(make_gaussian(6, 3.0, 0.2).log_p_value(3 - 0.2 * z), expected, atol=1e-6, rtol=1e-6)


def test_p_value_falls_strictly_and_without_a_floor() -> None:
    z = torch.linspace(0, 60, 400, dtype=torch.float64)
    log_p = make_gaussian(400).log_p_value(z)
    assert (log_p.diff() < 0).all()
    assert log_p[-1].item() == pytest.approx(-(60**2) / 2, rel=0.01)


def test_p_value_is_small_between_two_modes() -> None:
    mixture = make_mixture([0.5, 0.5], [-5.0, 5.0], [0.5, 0.5], 3)
    values = torch.tensor([5.0, 0.0, 10.0], dtype=torch.float64)
    at_mode, between_modes, outside = mixture.log_p_value(values).tolist()
    assert between_modes < -15 < at_mode
    assert outside < -15


@pytest.mark.parametrize(
    ("weights", "means", "max_deviation"),
    [
        pytest.param([1.0], [0.0], 0.01, id="single component, exact"),
        pytest.param([0.5, 0.5], [0.0, 12.0], 0.01, id="equal components without overlap, exact"),
        pytest.param([0.5, 0.5], [0.0, 4.0], 0.05, id="overlapping components, approximate"),
        pytest.param([0.9, 0.1], [0.0, 12.0], 0.08, id="unequal components, approximate"),
    ],
)
def test_p_values_of_samples_are_uniform(weights: list[float], means: list[float], max_deviation: float) -> None:
    mixture = make_mixture(weights, means, [1.0] * len(weights), 40_000)
    samples = mixture.sample(torch.Generator().manual_seed(1))
    p = np.sort(mixture.log_p_value(samples).exp().numpy())
    assert np.abs(p - (np.arange(len(p)) + 0.5) / len(p)).max() < max_deviation


def test_p_value_of_a_label_is_the_mass_of_labels_that_are_at_most_as_probable() -> None:
    categorical = make_categorical([0.1, 0.2, 0.2, 0.5], 4)
    p = categorical.log_p_value(torch.arange(4, dtype=torch.float64)).exp()
    torch.testing.assert_close(p, torch.tensor([0.1, 0.5, 0.5, 1.0], dtype=torch.float64), atol=1e-5, rtol=0)


def test_samples_follow_the_distribution() -> None:
    n = 100_000
    mixture = make_mixture([0.25, 0.75], [-3.0, 2.0], [0.5, 1.0], n)
    samples = mixture.sample(torch.Generator().manual_seed(0))
    assert samples.mean().item() == pytest.approx(0.75, abs=0.03)
    assert (samples < -1).double().mean().item() == pytest.approx(0.25, abs=0.01)
    labels = make_categorical([0.2, 0.7999, 0.0001], n).sample(torch.Generator().manual_seed(0))
    assert labels.mean().item() == pytest.approx(0.8, abs=0.01)
    assert labels.max() == 1, "the last code stands for an unseen label, which is never drawn"


@given(shape=st.floats(0.05, 40), x=st.floats(0, 500))
def test_log_gamma_sf_equals_numerical_integration(shape: float, x: float) -> None:
    t = np.linspace(0, 80 + 4 * shape, 400_001)[1:]
    log_density = (shape - 1) * np.log(x + t) - (x + t) - math.lgamma(shape)
    if x > 1:  # near zero the integrand has a pole if the shape is less than 1
        top = log_density.max()
        expected = top + math.log(np.trapezoid(np.exp(log_density - top), t))
        shapes, xs = torch.tensor([shape], dtype=torch.float64), torch.tensor([x], dtype=torch.float64)
        assert log_gamma_sf(shapes, xs, 40).item() == pytest.approx(expected, abs=2e-3, rel=1e-4)


@given(shape=st.floats(0.05, 50), beyond=st.floats(0.001, 200))
def test_log_gamma_sf_beyond_the_threshold_equals_the_incomplete_gamma_function(shape: float, beyond: float) -> None:
    shapes = torch.tensor([shape], dtype=torch.float64)
    x = torch.tensor([shape + 20 + beyond], dtype=torch.float64)
    expected = torch.special.gammaincc(shapes, x).log().item()
    assert log_gamma_sf(shapes, x, 50).item() == pytest.approx(expected, rel=1e-9)


def test_scales_have_a_floor() -> None:
    schema = Schema((Feature("fine", "continuous"), Feature("coarse", "continuous", scale=2.0, quantum=1.0)))
    head = Head(schema, 8, 4)
    with torch.no_grad():
        head.project.bias[4:8] = -1e3
    conditional = head(torch.zeros(2, 8), torch.tensor([0, 1]))
    assert conditional.scales[0].min().item() == pytest.approx(1e-3)
    assert conditional.scales[1].min().item() == pytest.approx(0.25), "half a quantum, in scales"
    assert torch.isfinite(conditional.log_prob(torch.tensor([1e3, 1e3]))).all()


def test_features_with_different_numbers_of_labels_share_a_batch() -> None:
    schema = Schema(
        (
            Feature("two", "discrete", labels=("a", "b")),
            Feature("five", "discrete", labels=tuple("abcde")),
            Feature("x", "continuous"),
        )
    )
    conditional = Head(schema, 8, 2)(torch.randn(3, 8), torch.tensor([0, 1, 2]))
    assert conditional.log_mass[0].isfinite().sum() == 3
    assert conditional.log_mass[1].isfinite().sum() == 6
    mass_of_unseen_label = conditional.log_prob(torch.tensor([99.0, 99.0, 0.0]))[:2].exp()
    assert mass_of_unseen_label.tolist() == pytest.approx([1e-4, 1e-4])


def test_centered_nll_has_the_mean_zero() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    gaussian = make_gaussian(len(x), 0.5, 1.2)
    weights = gaussian.log_prob(x).exp() * (x[1] - x[0])
    assert (weights * gaussian.score(x)[1]).sum().item() == pytest.approx(0.0, abs=1e-6)
    mass = [0.6, 0.3, 0.1]
    centered_nll = make_categorical(mass, 3).score(torch.arange(3.0, dtype=torch.float64))[1]
    assert (torch.tensor(mass, dtype=torch.float64) * centered_nll).sum().item() == pytest.approx(0.0, abs=1e-12)


def test_prior_dominates_before_training_and_its_scales_have_the_floor_of_the_sensor() -> None:
    schema = Schema((Feature("fine", "continuous"), Feature("coarse", "continuous", quantum=0.6)))
    torch.manual_seed(0)
    head = Head(schema, 8, 4, num_prior_components=2)
    prior = PriorConditional(
        log_weights=torch.tensor([[0.25, 0.75]] * 2).log(),
        means=torch.tensor([[-3.0, 3.0]] * 2),
        scales=torch.full((2, 2), 1e-6),
        has_prior=torch.ones(2, dtype=torch.bool),
    )
    conditional = head(torch.zeros(2, 8), torch.tensor([0, 1]), prior)
    assert conditional.means[:, 4:].tolist() == [[-3.0, 3.0]] * 2
    prior_weights = conditional.log_weights.exp()[:, 4:]
    assert prior_weights.sum(1).min() > 0.85
    assert (prior_weights[:, 1] / prior_weights[:, 0]).tolist() == pytest.approx([3.0, 3.0], rel=1e-5)
    assert conditional.scales[0, 4:].tolist() == pytest.approx([1e-3 / math.sqrt(3.0)] * 2, rel=1e-3)
    assert conditional.scales[1, 4:].tolist() == pytest.approx([0.6 / math.sqrt(12.0)] * 2, rel=1e-3)
