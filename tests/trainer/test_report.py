"""The training report begins with warnings and with the number of false alerts to expect."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.calibration.conformal import Calibration
from tests.report.reader import read_html
from trainer import report
from trainer.data import DataOptions, PreparedTable
from trainer.evaluate import HeldOutLikelihood
from trainer.prepare import prepare_table

pytestmark = pytest.mark.charts
NUM_RECORDS = 200
START = datetime(2026, 11, 20)
TRAINING: dict[str, Any] = {
    "rows": {"train": 128, "validation": 32, "calibration": 40},
    "records_used": {"train": 128, "validation": 32, "calibration": 40},
    "seconds": 9.6,
    "device": "cpu",
    "seed": 0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedTable:
    """Return a prepared table of one record each second, whose column `flow` has the unit m³/h."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("data")
    fields = [
        pa.field("flow", pa.float64(), metadata={b"unit": "m³/h".encode()}),
        pa.field("mode", pa.string()),
        pa.field("time", pa.timestamp("us", "UTC")),
    ]
    times = [START + timedelta(seconds=i) for i in range(NUM_RECORDS)]
    columns = [rng.normal(size=NUM_RECORDS), rng.choice(["on", "off"], NUM_RECORDS), times]
    pq.write_table(pa.table(columns, pa.schema(fields)), folder / "t.parquet")
    return prepare_table([folder / "t.parquet"], DataOptions(), folder)


def render(data: PreparedTable, num_calibration_records: int, steps: int = 3, **training: Any) -> list[str]:
    """Return the texts of the report of a training with this number of calibration records."""
    history = [{"step": step, "train": 1.0, "validation": 2.0 - step / 10} for step in (1.0, 2.0, 3.0)]
    fitted: Any = SimpleNamespace(history=history, steps=steps, epochs=1.5, stopped_early=False, best_step=3)
    scores = np.random.default_rng(1).normal(size=num_calibration_records)
    calibration = Calibration.from_statistics(scores, "random")
    held_out = HeldOutLikelihood(np.array([1.0, 2.0]), np.array([1.4, 0.1]), 2)
    texts = read_html(report.render(data, fitted, calibration, held_out, TRAINING | training)).texts
    return [text for text in texts if text.strip()]


def test_report_begins_with_the_number_of_false_alerts_a_day(data: PreparedTable) -> None:
    texts = render(data, 500)
    figures = texts[
        texts.index("How many false alerts to expect, what the model has learned, and on which data.") + 1 :
    ]
    assert figures[:4] == [
        "false alerts to expect at α = 1%",
        "at most 864 a day",
        "records a day in the training table",
        "86,400",
    ]
    (sentence,) = (text for text in texts if "today's rate" in text)
    assert "At α = 1% and today's rate of 86,400 records a day expect at most 864 false alerts a day" in sentence
    assert texts.index("False alerts to expect") < texts.index("What is predictable") < texts.index("Learning")
    first_nats = next(i for i, text in enumerate(texts) if "nats" in text)
    assert first_nats > texts.index("False alerts to expect")


def test_report_without_times_counts_false_alerts_per_1000_records(data: PreparedTable) -> None:
    texts = render(replace(data, time_span=None), 500)
    assert "at most 10 per 1,000 records" in texts
    assert "records a day in the training table" not in texts
    assert not any("today's rate" in text for text in texts)


def test_report_names_the_smallest_alpha_in_reach(data: PreparedTable) -> None:
    assert "false alerts to expect at α = 5%" in render(data, 40)
    texts = render(data, 10)
    assert not any(text.startswith("false alerts to expect at") for text in texts)
    assert any("too few calibration records for an alert" in text for text in texts)


def test_warnings_stand_at_the_top(data: PreparedTable) -> None:
    texts = render(data, 500, warnings=[{"code": "few_steps", "message": "only 3 steps: use --max-time 60s"}])
    assert texts.index("only 3 steps: use --max-time 60s") < texts.index("at most 864 a day")
    assert "Warning" in texts
    assert "Warning" not in render(data, 500)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (1, "Training was too short to learn how the features depend on each other: 1 step, 1.5 passes"),
        (1200, "Training ran its complete schedule: 1,200 steps, 1.5 passes"),
    ],
)
def test_schedule_of_few_steps_is_no_success(data: PreparedTable, steps: int, text: str) -> None:
    assert any(line.startswith(text) for line in render(data, 500, steps=steps))


def test_features_have_their_units(data: PreparedTable) -> None:
    assert any(text.endswith("] m³/h") for text in render(data, 500))


def test_records_that_were_not_used_are_counted_apart(data: PreparedTable) -> None:
    texts = render(data, 500, records_used={"train": 128, "calibration": 19})
    assert texts[texts.index("records for calibration") + 1] == "19"
    assert texts[texts.index("records for calibration that were not used") + 1] == "21"


def test_line_for_the_terminal_names_rate_and_number(data: PreparedTable) -> None:
    calibration = Calibration.from_statistics(np.arange(500.0), "random")
    assert report.describe_expected_alerts(data, calibration) == (
        "at alpha 1% expect at most 864 false alerts a day while everything is normal (86,400 records a day)"
    )
    few = Calibration.from_statistics(np.arange(5.0), "random")
    assert report.describe_expected_alerts(data, few) == "none, because there are too few calibration records"


@pytest.mark.parametrize(
    ("records_per_day", "alpha", "text"),
    [
        (86_400.0, 0.01, "at most 864 a day"),
        (86_400.0, 0.001, "at most 86.4 a day"),
        (24.0, 0.01, "at most 1 in 4.2 days"),
        (None, 0.05, "at most 50 per 1,000 records"),
    ],
)
def test_number_of_false_alerts_is_described(records_per_day: float | None, alpha: float, text: str) -> None:
    assert report.describe_false_alerts(records_per_day, alpha) == text


@pytest.mark.parametrize(
    ("records_per_day", "text"), [(86_400.0, "864 false alerts a"), (24.0, "1 false alert in 4.2")]
)
def test_description_can_name_what_is_counted(records_per_day: float, text: str) -> None:
    assert f"at most {text} day" in report.describe_false_alerts(records_per_day, 0.01, "false alerts")


@pytest.mark.parametrize("time_span", [None, (5, 5)])
def test_no_rate_without_two_times(data: PreparedTable, time_span: tuple[int, int] | None) -> None:
    assert report.estimate_records_per_day(replace(data, time_span=time_span)) is None
