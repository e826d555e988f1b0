"""Alerts, false alarms and detections of the benchmarks with irregular readings, and their reports."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import fleet, hydraulic, icu, irregular_deformer
from benchmarks import irregular_alerts as alerts
from benchmarks.early import compute_false_alarm_bounds
from benchmarks.irregular_contenders import describe_times, read_stored_peers
from benchmarks.irregular_cusums import CusumContender
from benchmarks.irregular_records import FaultyReadings, Readings, compute_log_slopes, fit_units, make_readings
from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema


def make_records(lengths: list[int]) -> Readings:
    """Return records of one sensor with a reading each second."""
    records = np.array([f"r{i:03d}" for i, n in enumerate(lengths) for _ in range(n)], object)
    times = np.array([float(k) for n in lengths for k in range(n)])
    return make_readings(records, np.array(["a"] * len(records), object), np.zeros(len(records)), times)


def test_statistic_of_densities_is_that_of_the_engine() -> None:
    readings = make_records([3, 1, 5])
    log_p = -np.random.default_rng(0).exponential(2.0, len(readings))
    statistics = alerts.combine_p_values(log_p, readings.offsets)
    for row in range(3):
        part = slice(readings.offsets[row], readings.offsets[row + 1])
        own = log_p[None, part]
        expected, _ = advance_prefix_state(PrefixState.initial(1), own, np.ones(own.shape, bool))
        assert statistics[part] == pytest.approx(expected[0])


def test_running_maxima_begin_anew_in_each_record() -> None:
    readings = make_records([3, 2])
    running = alerts.compute_running_maxima(np.array([1.0, 5.0, 2.0, 0.0, 3.0]), readings.offsets)
    assert running.tolist() == [1, 5, 5, 0, 3]


def test_alert_is_raised_at_the_first_reading_with_a_small_p_value() -> None:
    """Of 99 calibration records, 4 have a statistic of 10, so larger ones have p = 1% and smaller ones at least 5%."""
    readings = make_records([1] * 99)
    calibration = alerts.calibrate(np.where(np.arange(99) < 4, 10.0, 1.0), readings.offsets)
    test = make_records([4, 4, 2])
    statistics = np.array([0, 12, 0, 13, 0, 5, 0, 0, 0, 0.5])
    assert alerts.find_alert_times(calibration, statistics, test, 0.01).tolist() == [1, np.inf, np.inf]
    assert alerts.find_alert_times(calibration, statistics, test, 0.05).tolist() == [1, 1, np.inf]
    assert alerts.find_alert_times(calibration, statistics, test, 1.0).tolist() == [0, 0, 0]


def test_false_alarms_of_exchangeable_records_are_within_their_bounds() -> None:
    """The statistics of normal records and of calibration records have the same distribution."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 30, 1200).tolist()
    readings = make_records(lengths)
    statistics = rng.exponential(size=len(readings))
    calibration_records, test_records = readings.select(range(400)), readings.select(range(400, 1200))
    first = calibration_records.offsets[-1]
    calibration = alerts.calibrate(statistics[:first], calibration_records.offsets)
    for alpha in alerts.ALPHAS:
        times = alerts.find_alert_times(calibration, statistics[first:], test_records, alpha)
        figures = alerts.count_false_alarms(times, 400, alpha)
        assert figures["within"]
        assert (figures["low"], figures["high"]) == compute_false_alarm_bounds(alpha, 400, 800)
        shifted = alerts.find_alert_times(calibration, statistics[first:] + 2, test_records, alpha)
        assert not alerts.count_false_alarms(shifted, 400, alpha)["within"]


def test_alerts_before_the_onset_are_no_detections() -> None:
    figures = alerts.measure_detections(
        np.array([5.0, 10.0, 14.0, 40.0, np.inf]), np.array([10.0, 10.0, 10.0, 10.0, 10.0]), [0.0, 5.0, 100.0]
    )
    assert figures == {"records": 5, "detected": 0.6, "within": [0.2, 0.4, 0.6], "median_delay": 4.0}
    assert alerts.measure_detections(np.array([np.inf]), np.zeros(1), [1.0])["median_delay"] is None


def test_auroc_uses_only_the_readings_until_the_time() -> None:
    """The statistics of abnormal records are larger from the second 2 on."""
    normal, abnormal = make_records([4] * 20), make_records([4] * 10)
    normal_statistics = np.tile([1.0, 1.0, 1.0, 1.0], 20)
    abnormal_statistics = np.tile([1.0, 1.0, 3.0, 0.0], 10)
    pairs = (normal, normal_statistics), (abnormal, abnormal_statistics)
    assert alerts.compute_auroc_by_time(*pairs, [0.0, 1.0, 2.0, 3.0]) == [0.5, 0.5, 1.0, 1.0]


class FakeContender:
    """A contender whose statistics are the absolute values of the readings."""

    name = "fake"

    def fit(self, train: Readings) -> None:
        """Do nothing."""

    def score(self, readings: Readings) -> alerts.PrefixScores:
        """Return the absolute values as statistics, and minus their halves as log-likelihoods."""
        return alerts.PrefixScores(np.abs(readings.values), -0.5 * np.abs(readings.values))


def make_case(seed: int) -> alerts.Case:
    """Return records in which the fault doubles the values from the second 5 on."""
    rng = np.random.default_rng(seed)
    normal = make_records([10] * 400)
    normal = Readings(**{key: getattr(normal, key) for key in normal.__slots__} | {"values": rng.normal(size=4000)})
    faulty = normal.select(range(50))
    values = np.where(faulty.times >= 5, 10 * faulty.values, faulty.values)
    faulty = Readings(**{key: getattr(faulty, key) for key in faulty.__slots__} | {"values": values})
    faults = FaultyReadings(faulty, np.full(50, 5.0), np.arange(50))
    parts = (normal.select(range(start, start + 100)) for start in (100, 200, 300))
    return alerts.Case(*parts, {"larger": faults}, [0.0, 4.0], {"larger": faulty}, [4.0, 9.0])


def test_contenders_are_measured_and_averaged() -> None:
    lines = [alerts.measure_contender(FakeContender(), make_case(seed)) for seed in (0, 1)]
    assert json.loads(json.dumps(lines, allow_nan=False)) == lines
    line = lines[0]
    assert line["nll"] == pytest.approx(0.5 * np.sqrt(2 / np.pi), rel=0.1)
    assert line["auroc"]["larger"][0] < 0.7 < 0.95 < line["auroc"]["larger"][1]
    assert line["0.05"]["faults"]["larger"]["detected"] > 0.9
    (average,) = alerts.average_lines(lines)
    first, second = (entry["0.05"] for entry in lines)
    alarms = average["0.05"]["false alarms"]
    assert alarms["alarms"] == first["false alarms"]["alarms"] + second["false alarms"]["alarms"]
    assert (alarms["records"], average["0.05"]["faults"]["larger"]["records"]) == (200, 100)
    detected = [entry["faults"]["larger"]["detected"] for entry in (first, second)]
    assert average["0.05"]["faults"]["larger"]["detected"] == pytest.approx(np.mean(detected))


class LateFaults:
    """A density with standard normal readings."""

    name = "normal"

    def fit(self, train: Readings) -> None:
        """Do nothing."""

    def score(self, readings: Readings) -> alerts.PrefixScores:
        """Return the log-densities and two-sided p-values of a standard normal distribution."""
        log_p = np.log(np.maximum([math.erfc(abs(x) / math.sqrt(2)) for x in readings.values.tolist()], 1e-300))
        statistics = alerts.combine_p_values(log_p, readings.offsets)
        return alerts.PrefixScores(statistics, -0.5 * np.square(readings.values), log_p)


def test_cumulative_sums_of_a_density_detect_late_and_stuck_faults() -> None:
    """After 300 normal readings: those of one of four sensors become wide, or repeat the last value."""
    rng, num_readings = np.random.default_rng(0), 400
    normal = make_records([num_readings] * 300)
    codes = np.tile(np.arange(num_readings) % 4, 300)
    replaced = {"sensors": ("a", "b", "c", "d"), "codes": codes, "values": rng.normal(size=len(codes)).round(2)}
    normal = Readings(**{key: getattr(normal, key) for key in normal.__slots__} | replaced)
    train, calibration, test = (normal.select(range(start, start + 100)) for start in (0, 100, 200))
    is_faulty = (test.times >= 300) & (test.codes == 1)
    before = test.values[(test.times == 297)][test.record_index]  # the last reading of the sensor before the fault
    plain, summed = LateFaults(), CusumContender(LateFaults(), train)
    shares = {}
    for name, values in {"wide": 1.8 * test.values, "stuck": before, "none": test.values}.items():
        faulty = Readings(
            **{key: getattr(test, key) for key in test.__slots__} | {"values": np.where(is_faulty, values, test.values)}
        )
        for contender in (plain, summed):
            statistics = contender.score(calibration).statistics
            alert_times = alerts.find_alert_times(
                alerts.calibrate(statistics, calibration.offsets), contender.score(faulty).statistics, faulty, 0.05
            )
            shares[name, contender.name] = float(np.isfinite(alert_times).mean())
    sums = "normal, cumulative sums"
    assert shares["wide", sums] > shares["wide", "normal"] + 0.3
    assert shares["stuck", sums] > 0.9 > 0.3 > shares["stuck", "normal"]
    assert shares["none", sums] < 0.15


@pytest.mark.parametrize("module", [icu, fleet, hydraulic])
def test_reports_contain_each_contender(module: Any) -> None:
    line = alerts.measure_contender(FakeContender(), make_case(0))
    num_times = {icu: len(icu.AUROC_HOURS), fleet: len(fleet.AUROC_SECONDS), hydraulic: len(hydraulic.SEEN_SECONDS)}
    num_delays = {icu: len(icu.DELAYS), fleet: len(fleet.DELAYS), hydraulic: len(hydraulic.SEEN_SECONDS)}
    line["auroc"]["larger"] = [0.5] * num_times[module]
    for alpha in alerts.ALPHAS:
        if f"{alpha:g}" in line:
            line[f"{alpha:g}"]["faults"]["larger"]["within"] = [0.25] * num_delays[module]
    without_density = line | {"contender": "other", "nll": None}
    text = module.format_report([line, without_density], "Today.")
    assert text.count("| larger (50) | fake |") >= 1
    assert "| other |  |" in text
    rows = [row for row in text.splitlines() if row.startswith("|")]
    widths = [row.count("|") for row in rows]
    starts = [i for i, row in enumerate(rows) if set(row) <= set("|-")]
    for start, end in zip(starts, [*starts[1:], len(rows) + 1], strict=True):
        assert len(set(widths[start - 1 : end - 1])) == 1, "the rows of a table have the same number of cells"


def test_results_of_the_commands_are_assigned_to_their_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay rejects the redelivery of a reading, and writes the readings of several records interleaved."""
    readings = make_readings(
        ["x", "x", "x", "y"], ["a", "a", "b", "a"], np.array([1.0, 1.0, 1.0, 2.0]), np.array([0.0, 0.0, 5.0, 2.0])
    )
    schema = Schema((Feature("b", "continuous", location=1.0, scale=2.0), Feature("a", "continuous", scale=4.0)))

    def run_command(program: str, *words: object) -> None:
        arguments = list(map(str, words))
        if program == "deformer-train":
            assert pq.read_table(arguments[0]).num_rows == 4
            assert "--irregular" in arguments
            training = {"steps": 3, "preset": {"name": "tiny"}, "seconds": 1.0}
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "manifest.json").write_text(json.dumps({"training": training}))
            return
        columns = {"record": ["x", "y", "x"], "seq": [0, 0, 1], "score": [0.5, 7.0, 0.75]}
        table = pa.table(columns | {"log_likelihood": [-1.0, -2.0, -3.0]})
        pq.write_table(table.slice(0, num_rows), arguments[arguments.index("--output") + 1])

    class Loaded:
        """A detector with a schema only."""

        def __init__(self) -> None:
            self.artifact = self
            self.schema = schema

    num_rows = 3
    monkeypatch.setattr(irregular_deformer, "run_command", run_command)
    monkeypatch.setattr(irregular_deformer, "load", lambda path: Loaded())
    contender = irregular_deformer.CommandDeformer("1m", 0, tmp_path)
    contender.fit(readings)
    assert contender.training.items() >= {"steps": 3, "preset": "tiny", "seconds": 1.0}.items()
    assert contender.training["load"] >= 0
    scores = contender.score(readings)
    assert scores.statistics.tolist() == [0.5, 0.5, 0.75, 7.0]
    assert scores.log_likelihoods is not None
    units = fit_units(readings)
    expected = np.array([-1.0, np.nan, -3.0, -2.0]) - np.log([4.0, 4.0, 2.0, 4.0])
    expected -= compute_log_slopes(units, readings.codes, readings.values)
    assert scores.log_likelihoods == pytest.approx(expected, nan_ok=True)
    num_rows = 2
    with pytest.raises(InputError, match="scored 2 of 3 readings"):
        contender.score(readings)


def test_conditions_state_the_steps_and_the_load_of_the_trainings() -> None:
    arguments = argparse.Namespace(peer_time=60.0, deformer=True, max_time="2m", peers="measured")
    training = {"steps": 700, "preset": "tiny", "seconds": 119.0, "load": 1.5}
    text = describe_times(arguments, [{"contender": "deformer", "training": training}, {"contender": "GRU-D"}])
    assert "700 steps of preset tiny" in text
    assert "load average of 1.5" in text
    assert describe_times(arguments, []).endswith("the deformer for at most 2m.")


def test_stored_peers_are_those_of_the_same_case(tmp_path: Path) -> None:
    path = tmp_path / "icu.jsonl"
    case = {"benchmark": "icu", "seed": 1}
    lines = [{**case, "contender": name} for name in ("deformer", "GRU-D")]
    lines.append({**case, "seed": 2, "contender": "GRU-D"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_stored_peers(path, case) == [lines[1]]
    with pytest.raises(InputError, match="no peers of benchmark icu, seed 3: measure them"):
        read_stored_peers(path, {**case, "seed": 3})
    with pytest.raises(InputError, match="no peers"):
        read_stored_peers(tmp_path / "none.jsonl", case)
