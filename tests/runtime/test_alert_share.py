"""The share of records that alerted: chance is not reported, a flood is reported soon and with its cause."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import (
    ONLY_MODEL,
    Alert,
    ClosedRecords,
    CloseReason,
    Contribution,
    Effects,
    ExpectedRange,
)
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import alert_share
from deformer_stream.runtime.alert_share import ERROR_RATE, AlertCountSink, AlertShareMonitor, AlertShareReport
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import WallClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.contracts.effects import make_empty_effects
from tests.runtime.pipelines import make_model_reload

SCHEMA = Schema(
    (
        Feature("id", "continuous", low=0.0, high=1000.0),
        Feature("flow", "continuous", low=119.0, high=127.0),
        Feature("mode", "discrete", labels=("idle", "run")),
    )
)
CALIBRATION = Calibration.from_statistics(np.arange(999.0), "random")


def make_effects(
    p_values: Sequence[float] | NDArray[np.float64],
    blamed: Sequence[tuple[str, float | str]] = (),
    reason: CloseReason = CloseReason.COMPLETE,
) -> Effects:
    """Return effects with closed records of these p-values, and alerts that blame these readings first."""
    size = len(p_values)
    floats, ints = np.zeros(size), np.zeros(size, np.int32)
    closed = replace(
        ClosedRecords.empty(),
        record_ids=[f"r{i}" for i in range(size)],
        reasons=[reason] * size,
        partitions=ints,
        num_readings=ints + 1,
        p_value=np.asarray(p_values, np.float64),
        alert_seq=ints,
        score=floats,
    )
    expected = ExpectedRange(119.0, 123.0, 127.0)
    alerts = [
        Alert(
            *("id", "r", 1, 1, 3, 0, 0.001, 0.01, 9.0, -3.0, "m", 0),
            contributions=(Contribution(name, value, 5.0, expected), Contribution("mode", "idle", 0.1, expected)),
        )
        for name, value in blamed
    ]
    return replace(make_empty_effects(), closed=closed, alerts=alerts)


def make_monitor(alphas: Sequence[float] = (0.01,), calibration: Calibration = CALIBRATION) -> AlertShareMonitor:
    return AlertShareMonitor(alphas, calibration, SCHEMA)


def test_exchangeable_records_are_hardly_ever_reported() -> None:
    """Of 2,000 runs of 3,000 records, at most 0.1% may be reported by a check of blocks, and 0.1% at the end."""
    rng, num_runs, alpha, n = np.random.default_rng(0), 2000, 0.05, 199
    num_reported = num_summarized = 0
    for _ in range(num_runs):
        calibration = np.sort(rng.random(n))
        ranks = n - np.searchsorted(calibration, rng.random(3000))
        monitor = AlertShareMonitor((alpha,), Calibration.from_statistics(calibration, "random"), SCHEMA)
        num_reported += bool(monitor.add(make_effects((1 + ranks) / (n + 1))))
        num_summarized += monitor.summarize() is not None
    assert num_reported <= 8, "the probability of more is below 0.1%"
    assert num_summarized <= 8


def test_flood_is_reported_within_the_first_block_and_once_per_block() -> None:
    monitor = make_monitor()
    bound = bound_false_alarms(0.01, 999, 64, 1 - ERROR_RATE / 2)
    for i in range(bound):
        assert monitor.add(make_effects([0.001])) == [], i
    assert monitor.get_shares() == {}
    (report,) = monitor.add(make_effects([0.001]))
    assert (report.num_records, report.num_alerted, report.bound) == (bound + 1, bound + 1, bound)
    assert monitor.get_shares() == {0.01: (1.0, bound / 64)}
    rest = make_effects([0.001] * (63 - bound))
    assert monitor.add(rest) == []
    assert len(monitor.add(make_effects([0.001] * 128))) == 1, "each block is checked anew"


def test_late_flood_is_not_hidden_by_a_long_quiet_time() -> None:
    monitor = make_monitor()
    for _ in range(300):
        assert monitor.add(make_effects([0.5] * 1000)) == []
    num_flooded = 0
    while not monitor.add(make_effects([0.5, 0.001])):
        num_flooded += 2
    assert num_flooded < 600


def test_blocks_do_not_depend_on_how_records_are_divided_into_batches() -> None:
    p_values = np.where(np.random.default_rng(1).random(5000) < 0.08, 0.005, 0.5)
    whole, parts = make_monitor(), make_monitor()
    reports = whole.add(make_effects(p_values))
    part_reports = [report for part in np.array_split(p_values, 700) for report in parts.add(make_effects(part))]
    assert len(reports) == len(part_reports) > 0
    assert whole.get_shares() == parts.get_shares()
    assert whole.summarize() == parts.summarize()


def test_counts_of_several_runs_give_the_report_of_one() -> None:
    """The numbers of each run pass through JSON. Blocks are not checked."""
    p_values = np.where(np.arange(900) % 3 == 0, 0.001, 0.5)
    blamed = [("id", 1000.0 + i) for i in range(300)]
    whole, merged = make_monitor((0.01, 0.05)), make_monitor((0.01, 0.05))
    whole.add(make_effects(p_values, blamed))
    for part in range(3):
        counter = AlertCountSink({ONLY_MODEL: make_monitor((0.01, 0.05))}, None)
        counter.write(make_effects(p_values[300 * part :][:300], blamed[100 * part :][:100]), None)
        merged.merge_counts(json.loads(json.dumps(counter.export_counts()))[ONLY_MODEL])
    report = merged.summarize()
    assert report is not None
    assert report == whole.summarize()
    assert (report.num_records, report.num_alerted, report.main_feature) == (900, 300, "id")
    assert report.is_rising
    assert report.is_outside
    assert merged.get_shares() == {}


def test_each_alpha_is_compared_with_its_own_share() -> None:
    """8% of records alert at 5%, which 999 calibration records hardly explain; none alerts at 1%."""
    monitor = make_monitor((0.01, 0.05))
    monitor.add(make_effects(np.where(np.arange(5000) % 100 < 8, 0.03, 0.5)))
    report = monitor.summarize()
    assert report is not None
    assert (report.alpha, report.share) == (0.05, 0.08)
    assert make_monitor((0.01,)).summarize() is None


def test_records_of_revoked_partitions_and_without_readings_are_not_counted() -> None:
    monitor = make_monitor()
    monitor.add(make_effects([0.001] * 200, reason=CloseReason.REVOKED))
    effects = make_effects([0.001] * 200)
    monitor.add(replace(effects, closed=replace(effects.closed, num_readings=np.zeros(200, np.int32))))
    assert monitor.summarize() is None
    assert monitor.get_shares() == {}


def test_smallest_group_decides_how_far_chance_can_go() -> None:
    groups = CALIBRATION.with_groups({"a": np.arange(150.0)}, "/", 99)
    p_values = np.where(np.arange(1000) % 100 < 4, 0.005, 0.5)
    reports = []
    for calibration in (CALIBRATION, groups):
        monitor = make_monitor(calibration=calibration)
        monitor.add(make_effects(p_values))
        reports.append(monitor.summarize())
    assert reports[0] is not None
    assert reports[1] is None, "4% instead of 1% can be the luck of the draw of 150 records"


def report_flood(blamed: Sequence[tuple[str, float | str]]) -> AlertShareReport:
    monitor = make_monitor()
    monitor.add(make_effects([0.001] * 77 + [0.5] * 23, blamed))
    report = monitor.summarize()
    assert report is not None
    return report


def test_counter_is_recognised() -> None:
    text = report_flood([("id", 1001.0 + i) for i in range(75)] + [("flow", 120.0)] * 2).describe()
    assert text.startswith(
        "77% of records alerted, 1% is allowed; `id` is blamed first: is this column a counter? "
        "is this another machine than the one calibrated on? or are that many records faulty? (77 of 100 records, "
    )
    assert "`id` is first in 97% of the alerts" in text
    assert "its values rise in time and are outside the range of training" in text
    assert "train with --exclude id if it is a counter" in text


@pytest.mark.parametrize(
    ("blamed", "words", "missing"),
    [
        ([("flow", 30.0 + i % 3) for i in range(77)], ["`flow`", "outside the range of training"], ["counter", "rise"]),
        ([("flow", 120.0 + i % 3) for i in range(77)], ["`flow`", "another machine"], ["outside", "rise"]),
        (
            [("mode", "stop") for _ in range(77)],
            ["`mode`", "are labels that training has not seen, such as 'stop'"],
            ["rise", "range"],
        ),
        ([("mode", "run") for _ in range(77)], ["`mode`"], ["outside"]),
        ([("id", 1.0), ("flow", 120.0), ("mode", "run")] * 20, ["no single feature", "another machine"], ["`"]),
        ([], ["another machine", "or are that many records faulty?"], ["`", "blamed"]),
        ([("removed feature", 1.0)] * 77, ["another machine"], ["`", "blamed"]),
    ],
)
def test_text_follows_what_is_seen(blamed: list[tuple[str, float | str]], words: list[str], missing: list[str]) -> None:
    text = report_flood(blamed).describe()
    assert all(word in text for word in words), text
    assert not any(word in text for word in missing), text
    assert "\n" not in text


def test_small_shares_are_shown_with_two_digits() -> None:
    monitor = make_monitor((0.001,))
    monitor.add(make_effects(np.where(np.arange(100_000) % 1000 < 33, 0.001, 0.5)))
    report = monitor.summarize()
    assert report is not None
    assert report.describe().startswith("3.3% of records alerted, 0.1% is allowed")


# In the pipeline


def make_pipeline(loaded: Artifact, count: int, *, is_finite: bool = False, **options: Any) -> tuple[Pipeline, Metrics]:
    """Return a pipeline for records whose only reading is far from those of the calibration."""
    rows = [json.dumps({"record": f"r{i}", "values": {"vibration": 90.0 + i}}).encode() for i in range(count)]
    metrics = Metrics()
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, (0.05, 0.01), effort="fast")
    for name in loaded.schema.names:  # all other features are declared as missing, so that the records are complete
        if name != "vibration":
            rows = [row.replace(b"}}", f', "{name}": null}}}}'.encode()) for row in rows]
    source = MemorySource(rows, chunk=50)
    return (
        Pipeline(
            source,
            Codec(loaded.schema),
            EngineSet.of_only_model(engine),
            [MemorySink()],
            WallClock(),
            metrics,
            is_finite,
            **options,
        ),
        metrics,
    )


def run_and_find_events(pipeline: Pipeline) -> list[Any]:
    """Run a pipeline to the end of its input, and return its log lines about the share of alerts."""
    with capture_logs() as logs:
        pipeline.run(threading.Event())
    return [line for line in logs if line["event"] == "alert_share_exceeded"]


def test_flood_is_logged_once_and_shown_by_metrics(loaded: Artifact) -> None:
    pipeline, metrics = make_pipeline(loaded, 400, is_finite=True)
    (line,) = run_and_find_events(pipeline)
    assert (line["alpha"], line["feature"], line["log_level"]) == (0.05, "vibration", "warning")
    assert "100% of records alerted, 5% is allowed" in line["message"]
    share, bound = (
        metrics.registry.get_sample_value(f"deformer_alert_share{suffix}", {"alpha": "0.01"})
        for suffix in ("", "_bound")
    )
    assert share == 1.0
    assert bound is not None
    assert 0 < bound < 0.5
    assert pipeline.totals.alert_share is not None
    assert pipeline.totals.alert_share.num_records == 400


def test_flood_is_logged_again_after_an_hour(loaded: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deformer_stream.runtime.pipeline_report.ALERT_SHARE_SECONDS", 0.0)
    pipeline, _ = make_pipeline(loaded, 400, is_finite=True)
    alphas = [line["alpha"] for line in run_and_find_events(pipeline)]
    assert len(alphas) > 2
    assert set(alphas) == {0.05, 0.01}


def test_command_that_prints_the_share_does_not_log_it(loaded: Artifact) -> None:
    pipeline, _ = make_pipeline(loaded, 200, is_finite=True, log_alert_share=False)
    assert run_and_find_events(pipeline) == []
    assert pipeline.totals.alert_share is not None


def test_short_input_is_compared_as_a_whole(loaded: Artifact) -> None:
    """Fewer records than a block."""
    pipeline, _ = make_pipeline(loaded, 12, is_finite=True)
    (line,) = run_and_find_events(pipeline)
    assert (line["records"], line["alerted"]) == (12, 12)


def test_model_change_starts_the_count_anew(loaded: Artifact) -> None:
    pipeline, _ = make_pipeline(loaded, 200, is_finite=True)
    before = pipeline._reporter._alert_shares[ONLY_MODEL]
    new = [replace(loaded, fingerprint="another")]
    pipeline.model_reload = make_model_reload(lambda: (ONLY_MODEL, new.pop()) if new else None)
    pipeline.run(threading.Event())
    assert pipeline._reporter._alert_shares[ONLY_MODEL] is not before
    assert before.summarize() is None
    assert alert_share.FIRST_BLOCK == 64
