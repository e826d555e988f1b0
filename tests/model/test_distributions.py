"""Law 4: conditionals are distributions, and cdf, quantile, sample and p-value belong to the density."""

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
from tests.engine.worlds import configs, model_of, normalised, records_of, schemas


def gaussian(n: int, mean: float = 0.0, scale: float = 1.0) -> Conditional:
    """n times the same single Gaussian, float64."""
    one = torch.ones(n, 1, dtype=torch.float64)
    return Conditional(torch.zeros(n, dtype=torch.bool), 0 * one, mean * one, scale * one, 0 * one)


def mixture(weights: list[float], means: list[float], scales: list[float], n: int) -> Conditional:
    rows = [torch.tensor(x, dtype=torch.float64).expand(n, -1) for x in (weights, means, scales)]
    return Conditional(
        torch.zeros(n, dtype=torch.bool), rows[0].log(), rows[1], rows[2], torch.zeros(n, 1, dtype=torch.float64)
    )


def categorical(mass: list[float], n: int) -> Conditional:
    none = torch.zeros(n, 0, dtype=torch.float64)
    return Conditional(
        torch.ones(n, dtype=torch.bool), none, none, none, torch.tensor(mass, dtype=torch.float64).log().expand(n, -1)
    )


@settings(max_examples=20, deadline=None)
@given(schema=schemas(most=6), config=configs, seed=st.integers(0, 999))
def test_conditionals_are_distributions(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = model_of(schema, config, seed)
    codes, raw = records_of(schema, 2, seed)
    with torch.inference_mode():
        out = model.conditionals(torch.from_numpy(codes), torch.from_numpy(normalised(schema, codes, raw)))
        for r in range(2):
            for k, code in enumerate(codes[r]):
                one = out[r : r + 1, k : k + 1]
                feature = schema.features[code]
                if feature.kind == "discrete":
                    labels = torch.arange(len(feature.labels) + 1, dtype=torch.float64)
                    mass = torch.stack([one.log_prob(v.expand(1, 1)) for v in labels]).exp()
                    assert mass.sum().item() == pytest.approx(1.0, abs=1e-9)
                    assert mass[-1].item() == pytest.approx(feature.unseen)
                    assert one.cdf(labels[-1].expand(1, 1)).item() == pytest.approx(1.0, abs=1e-9)
                else:
                    reach = 12 * float(one.scales.max())
                    low, high = float(one.means.min()) - reach, float(one.means.max()) + reach
                    # Trapezoids resolve the narrowest component with ten points a standard deviation.
                    x = torch.linspace(
                        low, high, int((high - low) / float(one.scales.min()) * 10) + 2, dtype=torch.float64
                    )
                    rows = Conditional(
                        *(
                            getattr(one, n)[0].expand(len(x), *([-1] * (getattr(one, n).dim() - 2)))
                            for n in Conditional.__slots__
                        )
                    )
                    density = rows.log_prob(x).exp()
                    integral = torch.cumulative_trapezoid(density, x)
                    assert integral[-1].item() == pytest.approx(1.0, abs=1e-6)
                    torch.testing.assert_close(rows.cdf(x)[1:], integral, atol=1e-3, rtol=0)


@given(st.floats(0.001, 0.999))
def test_quantile_inverts_cdf(q: float) -> None:
    out = mixture([0.3, 0.7], [-2.0, 1.0], [0.1, 2.0], 3)
    torch.testing.assert_close(out.cdf(out.quantile(q)), torch.full((3,), q, dtype=torch.float64), atol=1e-9, rtol=0)


def test_quantile_of_labels() -> None:
    out = categorical([0.2, 0.5, 0.3], 1)
    assert [int(out.quantile(q)) for q in (0.1, 0.2, 0.5, 0.7, 0.71, 0.99)] == [0, 0, 1, 1, 2, 2]


def test_p_value_of_a_gaussian_is_two_sided() -> None:
    z = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 6.0], dtype=torch.float64)
    expected = torch.special.erfc(z / math.sqrt(2)).log()
    torch.testing.assert_close(gaussian(6, 0.0, 1.0).log_p_value(z), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gaussian(6, 3.0, 0.2).log_p_value(3 - 0.2 * z), expected, atol=1e-6, rtol=1e-6)


def test_p_value_has_a_smooth_falling_tail() -> None:
    z = torch.linspace(0, 60, 400, dtype=torch.float64)
    p = gaussian(400).log_p_value(z)
    assert (p.diff() < 0).all()
    assert p[-1].item() == pytest.approx(-(60**2) / 2, rel=0.01)


def test_p_value_sees_the_gap_between_modes() -> None:
    out = mixture([0.5, 0.5], [-5.0, 5.0], [0.5, 0.5], 3)
    at_mode, in_gap, outside = out.log_p_value(torch.tensor([5.0, 0.0, 10.0], dtype=torch.float64)).tolist()
    assert in_gap < -15 < at_mode
    assert outside < -15


@pytest.mark.parametrize(
    ("weights", "means", "bound"),
    [
        ([1.0], [0.0], 0.01),  # exact
        ([0.5, 0.5], [0.0, 12.0], 0.01),  # exact: two copies that do not touch
        ([0.5, 0.5], [0.0, 4.0], 0.05),  # approximate: the Gamma law is fitted to two moments
        ([0.9, 0.1], [0.0, 12.0], 0.08),
    ],
)
def test_p_values_of_a_mixtures_own_draws_are_uniform(weights: list[float], means: list[float], bound: float) -> None:
    out = mixture(weights, means, [1.0] * len(weights), 40_000)
    draws = out.sample(torch.Generator().manual_seed(1))
    p = np.sort(out.log_p_value(draws).exp().numpy())
    assert np.abs(p - (np.arange(len(p)) + 0.5) / len(p)).max() < bound


def test_p_value_of_labels_is_exact() -> None:
    out = categorical([0.1, 0.2, 0.2, 0.5], 4)
    p = out.log_p_value(torch.arange(4, dtype=torch.float64)).exp()
    torch.testing.assert_close(p, torch.tensor([0.1, 0.5, 0.5, 1.0], dtype=torch.float64), atol=1e-5, rtol=0)


def test_samples_follow_the_distribution() -> None:
    n = 100_000
    out = mixture([0.25, 0.75], [-3.0, 2.0], [0.5, 1.0], n)
    draws = out.sample(torch.Generator().manual_seed(0))
    assert draws.mean().item() == pytest.approx(0.75, abs=0.03)
    assert (draws < -1).double().mean().item() == pytest.approx(0.25, abs=0.01)
    labels = categorical([0.2, 0.7999, 0.0001], n).sample(torch.Generator().manual_seed(0))
    assert labels.mean().item() == pytest.approx(0.8, abs=0.01)
    assert labels.max() == 1, "the last code stands for an unseen label, which is never drawn"


@given(a=st.floats(0.05, 40), x=st.floats(0, 500))
def test_log_gamma_sf_against_numerical_integration(a: float, x: float) -> None:
    t = np.linspace(0, 80 + 4 * a, 400_001)[1:]
    log_density = (a - 1) * np.log(x + t) - (x + t) - math.lgamma(a)
    if x > 1:  # near zero the integrand has a pole for a < 1
        top = log_density.max()
        expected = top + math.log(np.trapezoid(np.exp(log_density - top), t))
        got = log_gamma_sf(torch.tensor([a], dtype=torch.float64), torch.tensor([x], dtype=torch.float64), 40).item()
        assert got == pytest.approx(expected, abs=2e-3, rel=1e-4)


@given(a=st.floats(0.05, 50), more=st.floats(0.001, 200))
def test_far_out_the_tail_goes_on_where_it_can_still_be_computed_otherwise(a: float, more: float) -> None:
    shape, x = torch.tensor([a], dtype=torch.float64), torch.tensor([a + 20 + more], dtype=torch.float64)
    expected = torch.special.gammaincc(shape, x).log().item()
    assert log_gamma_sf(shape, x, 50).item() == pytest.approx(expected, rel=1e-9)


def test_scales_keep_their_floor() -> None:
    schema = Schema((Feature("fine", "continuous"), Feature("coarse", "continuous", scale=2.0, quantum=1.0)))
    head = Head(schema, 8, 4)
    with torch.no_grad():
        head.project.bias[4:8] = -1e3
    out = head(torch.zeros(2, 8), torch.tensor([0, 1]))
    assert out.scales[0].min().item() == pytest.approx(1e-3)
    assert out.scales[1].min().item() == pytest.approx(0.25), "half a quantum, in scales"
    assert torch.isfinite(out.log_prob(torch.tensor([1e3, 1e3]))).all()


def test_labels_of_features_with_different_counts() -> None:
    schema = Schema(
        (
            Feature("two", "discrete", labels=("a", "b")),
            Feature("five", "discrete", labels=tuple("abcde")),
            Feature("x", "continuous"),
        )
    )
    out = Head(schema, 8, 2)(torch.randn(3, 8), torch.tensor([0, 1, 2]))
    assert out.log_mass[0].isfinite().sum() == 3
    assert out.log_mass[1].isfinite().sum() == 6
    assert out.log_prob(torch.tensor([99.0, 99.0, 0.0]))[:2].exp().tolist() == pytest.approx([1e-4, 1e-4])


def test_surprisal_exceeds_its_mean_by_nothing_on_average() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    one = gaussian(len(x), 0.5, 1.2)
    weights = one.log_prob(x).exp() * (x[1] - x[0])
    assert (weights * one.surprise(x)[1]).sum().item() == pytest.approx(0.0, abs=1e-6)
    mass = [0.6, 0.3, 0.1]
    excess = categorical(mass, 3).surprise(torch.arange(3.0, dtype=torch.float64))[1]
    assert (torch.tensor(mass, dtype=torch.float64) * excess).sum().item() == pytest.approx(0.0, abs=1e-12)


def test_a_guide_is_trusted_before_training_and_bounded_by_the_sensor() -> None:
    schema = Schema((Feature("fine", "continuous"), Feature("coarse", "continuous", quantum=0.6)))
    torch.manual_seed(0)
    head = Head(schema, 8, 4, guides=2)
    weights = torch.tensor([[0.25, 0.75]] * 2).log()
    guide = PriorConditional(
        weights, torch.tensor([[-3.0, 3.0]] * 2), torch.full((2, 2), 1e-6), torch.ones(2, dtype=torch.bool)
    )
    out = head(torch.zeros(2, 8), torch.tensor([0, 1]), guide)
    assert out.means[:, 4:].tolist() == [[-3.0, 3.0]] * 2
    followed = out.log_weights.exp()[:, 4:]
    assert followed.sum(1).min() > 0.85
    assert (followed[:, 1] / followed[:, 0]).tolist() == pytest.approx([3.0, 3.0], rel=1e-5)
    assert out.scales[0, 4:].tolist() == pytest.approx([1e-3 / math.sqrt(3.0)] * 2, rel=1e-3)
    assert out.scales[1, 4:].tolist() == pytest.approx([0.6 / math.sqrt(12.0)] * 2, rel=1e-3)
