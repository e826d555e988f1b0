"""The demo: its figures for constructed outcomes, its texts, its report, and a complete small run."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from structlog.testing import capture_logs

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.demo import report
from deformer_stream.demo import run as demo
from deformer_stream.demo.report import Outcome, Reading, Summary
from deformer_stream.demo.simulate import FEATURES, MEANING_BY_FAULT, MODES, simulate
from deformer_stream.engine.events import (
    Alert,
    ClosedRecords,
    Contribution,
    Effects,
    EventBatch,
    ExpectedRange,
    ScoredReadings,
)
from deformer_stream.errors import ConfigError
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model_store import Artifact


def alert(record: str, raised_at: int = 3, parts: tuple[Contribution, ...] = ()) -> Alert:
    return Alert(
        id="0" * 32, record=record, raised_at=raised_at, features_seen=raised_at, features_expected=14, time=1_000_000,
        p_value=0.0008, alpha=0.01, score=9.3, running_log_likelihood=-21.7, model="m", message_index=0,
        contributions=parts,
    )  # fmt: skip


pytestmark = pytest.mark.charts
FLOW = Contribution("flow", 61.25, 11.2, ExpectedRange(75.12, 78.0, 81.9))
MODE = Contribution("mode", "idle", 5.0, ExpectedRange(None, "boost", None))
MILD = Contribution("voltage", 401.0, 0.4, ExpectedRange(395.0, 400.0, 405.0))


def outcomes() -> list[Outcome]:
    return [
        Outcome("pump-01/000000", "", 10, None),
        Outcome("pump-01/000001", "", 12, alert("pump-01/000001", 6)),
        Outcome("pump-02/000000", "", 14, None),
        Outcome("pump-02/000001", "", 14, None),
        Outcome("pump-03/000000", "cavitation", 10, alert("pump-03/000000", 2, (FLOW, MODE, MILD))),
        Outcome("pump-03/000001", "cavitation", 10, alert("pump-03/000001", 10, (MODE,))),
        Outcome("pump-03/000002", "cavitation", 10, None),
        Outcome("pump-04/000000", "sensor drift", 14, None),
        Outcome("pump-04/000001", "bearing wear", 10, alert("pump-04/000001", 6, (FLOW,))),
    ]


def test_summary_counts_alerts_and_detections() -> None:
    summary = report.summarize(outcomes(), alpha=0.01, num_calibration_records=999)
    assert (summary.num_normal, summary.num_false_alarms) == (4, 1)
    assert (summary.num_faulty, summary.num_detected, summary.num_early) == (5, 3, 2)
    assert summary.mean_share_seen == pytest.approx((0.2 + 1.0 + 0.6) / 3)
    assert list(summary.detection_by_fault) == ["cavitation", "bearing wear", "sensor drift"]
    assert summary.detection_by_fault["cavitation"] == (3, 2, pytest.approx(0.6))
    assert summary.detection_by_fault["sensor drift"][:2] == (1, 0)
    assert math.isnan(summary.detection_by_fault["sensor drift"][2])
    assert summary.max_false_alarms == report.bound_false_alarms(0.01, 999, 4)


def test_share_of_alerted_records_grows_with_the_share_seen() -> None:
    faulty = [o for o in outcomes() if o.fault]
    found = report.compute_alerted_shares(faulty, np.array([0.0, 0.19, 0.2, 0.6, 0.99, 1.0]))
    assert found.tolist() == pytest.approx([0, 0, 0.2, 0.4, 0.4, 0.6])
    assert np.isnan(report.compute_alerted_shares([], np.array([0.5]))).all()


@pytest.mark.parametrize(("alpha", "calibrated", "records"), [(0.01, 2400, 1500), (0.01, 300, 10_000), (0.05, 99, 50)])
def test_bound_is_a_quantile_of_the_beta_binomial_distribution(alpha: float, calibrated: int, records: int) -> None:
    """Compared with a simulation of its definition: scores ranked among newly drawn calibration scores."""
    bound = report.bound_false_alarms(alpha, calibrated, records)
    rng = np.random.default_rng(0)
    k = math.floor(alpha * (calibrated + 1) + 1e-9)
    # A score raises an alert iff fewer than k calibration scores reach it: iff it passes the k-th largest of them.
    rates = [np.partition(rng.random(calibrated), k - 1)[k - 1] for _ in range(4_000)]
    counts = rng.binomial(records, np.repeat(rates, 50))
    assert np.mean(counts <= bound) >= 0.985
    assert np.mean(counts <= bound - 1) <= 0.9925


def test_bound_is_zero_if_alpha_is_out_of_reach() -> None:
    assert report.bound_false_alarms(0.01, 50, 1000) == 0
    assert report.bound_false_alarms(0.5, 99, 0) == 0
    assert report.bound_false_alarms(0.01, 100_000, 1500) == pytest.approx(25, abs=1)  # nearly binomial(1500, 0.01)


def test_alert_is_formatted_in_words() -> None:
    assert report.format_contribution(FLOW) == "flow: expected 75.1 … 81.9, came 61.2 m³/h"
    assert report.format_contribution(MODE) == "mode: expected boost, came idle"
    assert (
        report.format_contribution(Contribution("x", -1.5, 4.0, ExpectedRange(0.25, 0.3, 0.5)))
        == "x: expected 0.25 … 0.5, came −1.5"
    )
    assert report.format_measurement("valve", "100") == "100 %"
    assert report.explain_alert(alert("r", parts=(FLOW, MODE, MILD))) == [
        report.format_contribution(FLOW),
        report.format_contribution(MODE),
    ]
    line = demo.format_alert(alert("pump-03/000000", parts=(FLOW, MODE)), "cavitation").plain
    assert "pump-03" in line
    assert "cavitation" in line
    assert "after  3 of 14 readings" in line
    assert "p = 0.0008" in line
    assert "expected 75.1 … 81.9, came 61.2 m³/h" in line
    assert "false alarm" in demo.format_alert(alert("pump-03/000000"), "").plain


def test_example_is_the_median_detection() -> None:
    example = report.choose_example(outcomes())
    assert example is not None
    assert example.record == "pump-04/000001"
    assert report.choose_example([o for o in outcomes() if not o.fault]) is None
    with pytest.raises(ValueError, match="no alert"):
        report.render_example(outcomes()[0], [], 5.0)


def test_report_explains_an_alert() -> None:
    blamed = replace(FLOW, attribution=3.5, leave_one_out=9.0, relief=8.5, suspect=True)
    example = replace(alert("pump-03/000000", parts=(blamed, MODE)), silenced_by=("flow",))
    text = "".join(report.render_explanation(example))
    assert "With the expected value of flow there would have been no alert." in text
    assert text.index("61.2 m³/h") < text.index("75.1 … 81.9") < text.index("8.5") < text.index("3.5")
    assert text.count("suspect") == 1
    assert "there would have been" not in "".join(
        report.render_explanation(alert("pump-03/000000", parts=(FLOW, MODE)))
    )


def test_sink_keeps_readings_and_prints_alerts() -> None:
    schema = Schema((Feature("flow", "continuous"), Feature("mode", "discrete", labels=("idle", "boost"))))
    out = io.StringIO()
    printer = demo.AlertPrinter(
        Console(file=out, width=200), schema, {"pump-01/000000": "cavitation", "pump-02/000000": ""}
    )
    ints = np.zeros(3, np.int32)
    batch = EventBatch(
        ["pump-01/000000", "pump-01/000000", "pump-02/000000"],
        np.array([0, 1, 1], np.int32),
        np.array([61.0, 1.0, 2.0]),
        np.zeros(3, np.int64),
        ints,
        ints,
        {2: "turbo"},
    )
    values = np.array([1.0, 9.3, 0.5])
    raised = np.array([0, 1, 0], bool)
    seq = np.array([0, 1, 0], np.int32)
    scored = ScoredReadings(np.arange(3), seq, values, values, values, values / 10, raised)
    printer.write(
        Effects(batch, scored, [alert("pump-01/000000", 2, (FLOW,))], [], ClosedRecords.concatenate([])), None
    )
    printer.flush()
    printer.close()
    assert printer.readings_by_record["pump-01/000000"] == [
        Reading("flow", 61.0, 1.0, 0.1),
        Reading("mode", "boost", 9.3, 0.93),
    ]
    assert printer.readings_by_record["pump-02/000000"][0].value == "turbo"
    assert [(o.record, o.num_readings, o.alert is not None) for o in printer.get_outcomes()] == [
        ("pump-01/000000", 2, True),
        ("pump-02/000000", 1, False),
    ]
    assert printer.get_outcomes()[0].share_seen == 1.0
    assert out.getvalue().count("pump-01") == 1


def make_untrained_detector() -> Artifact:
    """Return a detector with an make_untrained_detector model, which is sufficient to run the pipeline."""
    torch.manual_seed(0)
    table = simulate(300, seed=5).select_normal_records()
    features = []
    for name in FEATURES:
        column = [v for v in table.column(name).to_pylist() if v is not None]
        if name == "mode":
            features.append(Feature(name, "discrete", labels=tuple(sorted(MODES))))
        else:
            features.append(Feature(name, "continuous", location=float(np.mean(column)), scale=float(np.std(column))))
    model = DEformer(Schema(tuple(features)), PRESETS["tiny"]).eval()
    return Artifact(
        model, Calibration.from_statistics(np.linspace(0.0, 8.0, 999), "random"), "f" * 16, {}, Path("model")
    )


def test_pipeline_scores_every_reading() -> None:
    fleet = simulate(60, seed=4, fault_share=0.2)
    out = io.StringIO()
    printer, totals = demo.stream_readings(Console(file=out, width=200), make_untrained_detector(), fleet)
    results = printer.get_outcomes()
    assert not totals.rejected
    assert totals.events == len(fleet.sort_by_arrival()[0]) == sum(o.num_readings for o in results)
    assert totals.closed == 60
    assert [o.record for o in results] == fleet.table.column("record").to_pylist()
    assert [o.fault for o in results] == fleet.table.column("fault").to_pylist()
    for o in results:
        p = [reading.p_value for reading in printer.readings_by_record[o.record]]
        assert p == sorted(p, reverse=True)
        if o.alert:
            assert p[o.alert.raised_at - 1] <= demo.ALPHA
            assert all(value > demo.ALPHA for value in p[: o.alert.raised_at - 1])
        else:
            assert p[-1] > demo.ALPHA
    assert len(out.getvalue().splitlines()) == sum(o.alert is not None for o in results)


def test_many_alerts_are_not_logged_as_an_error_of_the_calibration() -> None:
    """The demo has many faults, so a warning about the share of alerts would mislead."""
    detector = make_untrained_detector()
    strict = replace(detector, calibration=Calibration.from_statistics(np.linspace(0.0, 0.1, 999), "random"))
    with capture_logs() as logs:
        _, totals = demo.stream_readings(Console(file=io.StringIO()), strict, simulate(20, seed=4, fault_share=0.2))
    assert totals.alert_share is not None
    assert not logs


def render_example_report() -> str:
    results = outcomes()
    trace = [Reading("flow", 61.0 + k, k * 1.5, 1 / (k + 1)) for k in range(10)]
    summary = report.summarize(results, 0.01, 999)
    return report.render_report(summary, results, {o.record: trace for o in results}, threshold=6.0)


def test_report_shows_the_summary() -> None:
    document = render_example_report()
    for words in (
        "1 of 4 (25.0%)",
        "3 of 5 (60%)",
        "2 (67%)",
        "60%",
        "By fault",
        MEANING_BY_FAULT["cavitation"],
        "a false alarm",
    ):
        assert words in document
    assert document.count("<svg xmlns") == 4  # two charts, each for wide and for narrow screens
    for svg in re.findall(r"<svg xmlns.*?</svg>", document, re.S):
        ElementTree.fromstring(svg)  # noqa: S314 - ours
    assert "threshold" in document
    assert "<script" not in document


def test_report_without_detections_and_without_records() -> None:
    quiet = [o for o in outcomes() if not o.alert]
    assert "All alerts" in report.render_report(report.summarize(quiet, 0.01, 999), quiet, {}, 6.0)
    nothing = report.summarize([], 0.01, 999)
    assert nothing == Summary(0.01, 999, 0, 0, 0, 0, 0, 0, pytest.approx(math.nan, nan_ok=True), {})
    assert "no data" in report.render_report(nothing, [], {}, 6.0)
    out = io.StringIO()
    demo.print_summary(Console(file=out), nothing)
    assert "0 of 0" in out.getvalue()


def test_failing_trainer_ends_the_demo_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NUM_TRAINING_RECORDS", 50)
    assert demo.run_demo(tmp_path, seed=0, train_time="soon") == 2
    assert "max-time" in capfd.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_output_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_TRAINING_RECORDS", 50)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file/demo cannot be written"):
        demo.run_demo(tmp_path / "file" / "demo", seed=0)


@pytest.mark.parametrize("name", ["normal.parquet", "pumps.parquet"])
def test_files_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(demo, "NUM_TRAINING_RECORDS", 50)
    monkeypatch.setattr(demo, "run_trainer", lambda *_: 0)
    monkeypatch.setattr(demo.model_store, "read", lambda _: None)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        demo.run_demo(tmp_path, seed=0)


def test_options_come_from_flags_environment_and_file(
    cli: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, int, str]] = []
    monkeypatch.setattr(demo, "run_demo", lambda *words: calls.append(words) or 0)
    file = tmp_path / "demo.toml"
    file.write_text('[demo]\noutput = "of-the-file"\ntrain-time = "3m"\nseed = 3\n')
    monkeypatch.setenv("DEFORMER_TRAIN_TIME", "1500000s")
    assert [cli("demo", *words).code for words in ((), ("--config", file, "--seed", "7"))] == [0, 0]
    assert calls == [(Path("demo-output"), 0, "1500000s"), (Path("of-the-file"), 7, "1500000s")]
    monkeypatch.setenv("DEFORMER_TRAIN_TIME", "soon")
    ended = cli("demo")
    assert (ended.code, len(ended.lines)) == (2, 1)
    assert "DEFORMER_TRAIN_TIME" in ended.lines[0]


@pytest.mark.slow
def test_complete_small_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NUM_TRAINING_RECORDS", 1_500)
    monkeypatch.setattr(demo, "NUM_NORMAL_RECORDS", 100)
    monkeypatch.setattr(demo, "NUM_FAULTY_RECORDS", 24)
    assert demo.run_demo(tmp_path, seed=0, train_time="8s") == 0
    printed = capfd.readouterr().out
    for words in ("Simulate", "deformer-train", "Results", "of 100", "of 24", "report.html"):
        assert words in printed
    assert str((tmp_path / "report.html").resolve()) in printed.replace("\n", "")
    pumps = pq.read_table(tmp_path / "pumps.parquet")
    assert pumps.column_names == ["record", "time", *FEATURES]
    labelled = pq.read_table(tmp_path / "labelled-pumps.parquet")
    assert labelled.drop_columns(["fault"]).equals(pumps)
    assert 0 < labelled["fault"].to_pylist().count("none") < len(labelled)
    assert "" not in labelled["fault"].to_pylist()
    assert "All alerts" in (tmp_path / "report.html").read_text(encoding="utf-8")
    false_alarms = re.search(r"(\d+) of 100", printed)
    assert false_alarms is not None
    assert int(false_alarms[1]) <= report.bound_false_alarms(demo.ALPHA, 300, 100, confidence=0.9999)
