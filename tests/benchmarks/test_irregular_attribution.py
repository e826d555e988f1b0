"""The benchmark of explanations of irregular readings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import deformer_stream
from benchmarks.irregular_attribution import find_faulty_readings, format_report, measure_kind
from benchmarks.irregular_records import FIRST_TIME, FaultyReadings, make_readings
from tests.irregular_tables import write_irregular_model


def test_the_faulty_sensor_of_each_alert_is_looked_up(tmp_path: Path) -> None:
    detector = deformer_stream.load(write_irregular_model(tmp_path / "m"))
    rng = np.random.default_rng(0)
    records = np.repeat([f"r{i}" for i in range(12)], 20)
    sensors = np.tile(["sensor0", "sensor1"], 120)
    times = np.tile(60.0 * np.arange(20, dtype=np.float64), 12)
    values = rng.normal(size=240)
    normal = make_readings(records, sensors, values, times)
    is_faulty = (times >= 600.0) & (sensors == "sensor1")
    faulty = make_readings(records, sensors, values + 1e4 * is_faulty, times)
    faults = FaultyReadings(faulty, np.full(12, 600.0), np.arange(12))
    expected = {("sensor1", round((time + FIRST_TIME) * 1e6)) for time in times[is_faulty].tolist()}
    assert find_faulty_readings(faults, normal)["r3"] == expected
    line = measure_kind(faults, normal, detector, 0.2)
    assert line["alerts"] >= line["explained"] > 0
    assert line["suspects"] >= 0.9
    report = format_report([{"alpha": 0.2, "fault": "shifted", **line}], "Conditions.")
    assert f"| 20% | shifted | {line['alerts']} |" in report
