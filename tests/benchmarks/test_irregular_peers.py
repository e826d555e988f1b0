"""The other methods of the benchmarks with irregular readings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from benchmarks import gru_d
from benchmarks import irregular_peers as peers
from benchmarks.irregular_records import Readings, make_readings

Floats = NDArray[np.float64]


def draw_readings(num_records: int = 60, num_readings: int = 40, seed: int = 0) -> Readings:
    """Return records of two sensors: a is a slow random walk, b is a plus noise and is read at the same instants."""
    rng = np.random.default_rng(seed)
    records, sensors, values, times = [], [], [], []
    for i in range(num_records):
        walk = 2 * rng.normal() + np.cumsum(0.2 * rng.normal(size=num_readings))
        instants = np.cumsum(rng.exponential(600, num_readings))
        for k in range(num_readings):
            records += [f"r{i:03d}"] * 2
            sensors += ["a", "b"]
            values += [walk[k], walk[k] + 0.1 * rng.normal()]
            times += [instants[k]] * 2
    return make_readings(np.array(records, object), np.array(sensors, object), np.array(values), np.array(times))


def compute_nll(contender: peers.MarginalMixtures | peers.IntervalMixture | gru_d.GruD, readings: Readings) -> float:
    log_likelihoods = contender.score(readings).log_likelihoods
    assert log_likelihoods is not None
    return -float(log_likelihoods.mean())


@pytest.fixture
def _without_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the component for outliers, for tests of exact densities."""
    monkeypatch.setattr(peers, "OUTLIER_SHARE", 1e-12)


def make_contenders() -> list[peers.MarginalMixtures | peers.IntervalMixture | gru_d.GruD]:
    """Return the methods with a density."""
    mixture = peers.IntervalMixture(3600.0, 0, num_components=2, max_rows=500, num_rounds=4)
    return [peers.MarginalMixtures(0), peers.LastValue(0), mixture, gru_d.GruD(0, 0.3, 3600.0)]


def test_methods_that_use_more_of_the_record_predict_better() -> None:
    train, test = draw_readings(), draw_readings(20, seed=1)
    marginal, last, mixture, _ = make_contenders()
    for contender in (marginal, last, mixture):
        contender.fit(train)
    nll = [compute_nll(contender, test) for contender in (marginal, last, mixture)]
    # Only the mixture uses the reading of the other sensor at the same instant.
    assert nll[0] > nll[1] + 1.0
    assert nll[1] > nll[2] + 0.2


@pytest.mark.parametrize("index", range(4))
def test_later_readings_do_not_change_earlier_scores(index: int) -> None:
    train, test = draw_readings(20), draw_readings(3, seed=1)
    contender = make_contenders()[index]
    contender.fit(train)
    changed = Readings(**{key: getattr(test, key) for key in test.__slots__} | {"values": test.values.copy()})
    middle = int(test.offsets[1]) + 30  # a reading of the second record
    changed.values[middle] += 3.0
    before, after = contender.score(test), contender.score(changed)
    assert before.log_likelihoods is not None
    assert after.log_likelihoods is not None
    assert after.log_likelihoods[:middle] == pytest.approx(before.log_likelihoods[:middle], rel=1e-5)
    assert after.statistics[:middle] == pytest.approx(before.statistics[:middle], rel=1e-5)
    assert after.log_likelihoods[middle] != before.log_likelihoods[middle]
    end = int(test.offsets[2])
    assert after.log_likelihoods[end:] == pytest.approx(before.log_likelihoods[end:], rel=1e-5)
    # Each record is scored as if it were alone.
    alone = contender.score(test.select([2]))
    assert alone.log_likelihoods == pytest.approx(before.log_likelihoods[end:], rel=1e-4)
    assert alone.statistics == pytest.approx(before.statistics[end:], rel=1e-4)


@pytest.mark.parametrize("index", range(4))
def test_densities_integrate_to_one(index: int) -> None:
    train = draw_readings(20)
    contender = make_contenders()[index]
    contender.fit(train)
    record = draw_readings(1, 4, seed=1)
    grid = np.linspace(-8, 8, 2001)  # the linear range of normalised values
    scale, location = (getattr(contender.units.features[1], key) for key in ("scale", "location"))
    count = len(grid)
    values = np.tile(record.values, (count, 1))
    values[:, 7] = location + scale * grid  # the last reading, of sensor b
    copies = make_readings(
        np.array([f"{i:04d}" for i in range(count)], object).repeat(8),
        np.tile(np.array(["a", "b"], object), 4 * count),
        values.ravel(),
        np.tile(record.times, count),
    )
    log_likelihoods = contender.score(copies).log_likelihoods
    assert log_likelihoods is not None
    assert np.trapezoid(np.exp(log_likelihoods[7::8]), grid) == pytest.approx(1, abs=0.02)


def test_densities_contain_a_component_for_outliers() -> None:
    zero, one = np.zeros((2, 1)), np.ones((2, 1))
    log_densities, log_p_values = peers.score_mixtures(zero, zero, 0.1 * one, np.array([0.0, 3.0]))
    share, scale = peers.OUTLIER_SHARE, peers.OUTLIER_SCALE
    expected = [(1 - share) * norm.pdf(x, 0, 0.1) + share * norm.pdf(x, 0, scale) for x in (0.0, 3.0)]
    assert log_densities == pytest.approx(np.log(expected))
    # The p-values do not contain it: 30 standard deviations.
    assert log_p_values[1] == pytest.approx(np.log(2) + norm.logsf(30), rel=0.01)
    assert log_p_values[0] == pytest.approx(0, abs=0.01)


def test_rows_carry_the_last_value_of_each_sensor_forward() -> None:
    readings = make_readings(
        ["x", "x", "x", "x", "y"], ["a", "b", "a", "b", "b"], np.arange(1.0, 6.0), np.array([0.0, 1.0, 1.0, 2.0, 0.0])
    )
    instants = peers.find_last_of_instant(readings)
    assert instants.tolist() == [0, 2, 3, 4]
    rows = peers.carry_forward(readings, readings.values, instants)
    assert rows.tolist() == [[1, 0], [3, 2], [3, 4], [0, 5]]
    assert peers.carry_forward(readings, readings.values, np.array([3])).tolist() == [[3, 4]]


@pytest.mark.parametrize("detector", ["forest", "neighbours"])
def test_detectors_of_rows_give_outliers_larger_statistics(detector: str) -> None:
    train, test = draw_readings(), draw_readings(5, seed=1)
    contender = peers.CarriedForward(detector, 0)
    contender.fit(train)
    usual = contender.score(test)
    assert usual.log_likelihoods is None
    assert (usual.statistics[:-1][np.diff(test.times) == 0] == 0).all()  # not the last reading of its instant
    values = test.values.copy()
    values[test.codes == 1] += 100.0
    outliers = Readings(**{key: getattr(test, key) for key in test.__slots__} | {"values": values})
    instants = peers.find_last_of_instant(test)
    is_larger = contender.score(outliers).statistics[instants] > usual.statistics[instants]
    assert is_larger.mean() > 0.8  # Isolation Forest cannot tell outliers beyond the training rows apart


def test_rows_of_intervals_end_when_a_sensor_repeats() -> None:
    readings = make_readings(
        ["x"] * 6, list("abaabb"), np.array([1.0, 2.0, 3.0, 5.0, 8.0, 9.0]), np.array([0.0, 1, 2, 12, 13, 21])
    )
    table = peers.make_interval_rows(readings, readings.values, 10.0)
    assert table.row.tolist() == [0, 0, 1, 2, 2, 3]
    assert table.first.tolist() == [0, 2, 3, 5]
    expected = [[np.nan, np.nan], [1, 2], [2, 2], [5, 8]]  # the mean of 1 and 3 is the last mean of sensor a
    assert table.before.tolist() == pytest.approx(np.array(expected), nan_ok=True)


@pytest.mark.usefixtures("_without_outliers")
def test_gaussian_mixture_with_one_component_has_the_conditionals_of_its_covariance() -> None:
    train, test = draw_readings(40), draw_readings(1, seed=1)
    mixture = peers.IntervalMixture(3600.0, 0, num_components=1, max_rows=400, num_rounds=5)
    mixture.fit(train)
    z = mixture.units.normalise(test.codes, test.values)
    table = peers.make_interval_rows(test, z, 3600.0)
    scores = mixture.score(test)
    assert scores.log_likelihoods is not None
    covariance, mean = mixture.covariances[0].numpy(), mixture.means[0].numpy()
    reading = 11
    row = table.row[reading]
    own = np.arange(table.first[row], reading)
    known = np.flatnonzero(~np.isnan(table.before[row]))
    columns = [*known.tolist(), *(2 + test.codes[own]).tolist()]
    x = np.array([*table.before[row, known].tolist(), *z[own].tolist()]) - mean[columns]
    target = 2 + test.codes[reading]
    weights = np.linalg.solve(covariance[np.ix_(columns, columns)], covariance[columns, target])
    variance = covariance[target, target] - covariance[columns, target] @ weights
    residual = z[reading] - mean[target] - weights @ x
    expected = -0.5 * residual**2 / variance - 0.5 * np.log(2 * np.pi * variance)
    assert scores.log_likelihoods[reading] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("_without_outliers")
def test_conditionals_of_a_gaussian_mixture_multiply_to_the_density_of_the_row() -> None:
    mixture = peers.IntervalMixture(3600.0, 0, num_components=2)
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    mixture.log_weights = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    mixture.means = 2 * torch.randn(2, 4, generator=generator, dtype=torch.float64)
    mixture.covariances = factor @ factor.transpose(1, 2) + 0.5 * torch.eye(4)
    columns, values = np.array([[0, 3, 2]]), np.array([[0.3, -0.4, 1.1]])
    log_weights, means, scales = mixture._compute_conditionals(columns, values, np.ones((1, 3), bool))
    densities, _ = peers.score_mixtures(log_weights[0], means[0], scales[0], values[0])
    expected = 0.0
    for k in range(2):
        mean, covariance = mixture.means[k][columns[0]], mixture.covariances[k][columns[0]][:, columns[0]]
        component = torch.distributions.MultivariateNormal(mean, covariance)
        expected += float(mixture.log_weights[k].exp() * component.log_prob(torch.from_numpy(values[0])).exp())
    assert densities.sum() == pytest.approx(np.log(expected))


def test_missing_values_are_completed_by_their_conditional_distribution() -> None:
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(3, 3))
    covariance = torch.from_numpy(factor @ factor.T + np.eye(3))
    mean, x = torch.from_numpy(rng.normal(size=3)), torch.from_numpy(rng.normal(size=(1, 3)))
    is_seen = torch.tensor([[True, False, True]])
    log_density, expected, remaining = peers._complete(mean, covariance, x, is_seen)
    seen, missing = [0, 2], 1
    c = covariance.numpy()
    weights = np.linalg.solve(c[np.ix_(seen, seen)], c[seen, missing])
    residual = (x[0, seen] - mean[seen]).numpy()
    assert float(expected[0, missing]) == pytest.approx(float(mean[missing]) + weights @ residual)
    assert expected[0, seen].tolist() == x[0, seen].tolist()
    assert float(remaining[0, missing, missing]) == pytest.approx(c[missing, missing] - c[seen, missing] @ weights)
    assert float(remaining[0].abs().sum()) == pytest.approx(abs(float(remaining[0, missing, missing])))
    distribution = torch.distributions.MultivariateNormal(mean[seen], covariance[seen][:, seen])
    assert float(log_density[0]) == pytest.approx(float(distribution.log_prob(x[0, seen])))


def test_mixture_fitted_to_rows_with_missing_values_has_their_moments() -> None:
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.3], [0.0, 0.3, 1.0]])
    x = rng.multivariate_normal([1.0, -1.0, 0.5], covariance, 4000)
    x[rng.random(x.shape) < 0.3] = np.nan
    mixture = peers.IntervalMixture(1.0, 0, num_components=1, num_rounds=20)
    mixture._maximise(torch.from_numpy(x), rng)
    assert mixture.means[0].numpy() == pytest.approx(np.array([1.0, -1.0, 0.5]), abs=0.06)
    assert mixture.covariances[0].numpy() == pytest.approx(covariance, abs=0.06)


def test_recurrent_network_reads_gaps_and_last_values() -> None:
    readings = make_readings(
        ["x", "x", "x", "y"], ["a", "b", "a", "b"], np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 7.0, 11.0, 2.0])
    )
    ((first, chunk),) = list(gru_d._iterate_chunks(readings, readings.values, np.array([0, 1])))
    codes, values, last, gaps, is_present, index = chunk
    assert first == 0
    assert codes.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert values.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert is_present.tolist() == [[True, True, True], [True, False, False]]
    assert last[0].tolist() == [[0, 0], [1, 0], [1, 2]]
    assert gaps[0].tolist() == [[5, 5], [2, 7], [6, 4]]
    assert index[0].tolist() == [0, 1, 2]


def test_recurrent_network_predicts_a_reading_from_earlier_ones_only() -> None:
    torch.manual_seed(0)
    network = gru_d.GruDNetwork(3, 3600.0)
    codes, is_present = torch.randint(3, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    values, last, gaps = torch.randn(2, 6), torch.randn(2, 6, 3), 3600 * torch.rand(2, 6, 3)
    hidden = torch.zeros(2, gru_d.HIDDEN)
    with torch.no_grad():
        *before, _ = network(codes, values, last, gaps, is_present, hidden)
        values[:, 4] += 1.0
        *after, _ = network(codes, values, last, gaps, is_present, hidden)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :5], new[:, :5])
        assert not torch.equal(old[:, 5], new[:, 5])


def test_recurrent_network_learns_the_last_value() -> None:
    train, test = draw_readings(40), draw_readings(10, seed=1)
    contender = gru_d.GruD(0, 6.0, 3600.0)
    contender.fit(train)
    assert contender.num_steps > 20
    marginal = peers.MarginalMixtures(0)
    marginal.fit(train)
    assert compute_nll(contender, test) < compute_nll(marginal, test) - 0.3
