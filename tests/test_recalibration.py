"""`deformer-stream calibrate`: the alerts follow new normal records, and the weights do not change."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import deformer_stream
from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.cli.shards import run as shard_run
from deformer_stream.report.pages import render_page, render_paragraph
from deformer_stream.runtime.next_reading_order import score_in_chosen_order
from deformer_stream.runtime.reload import ModelReloader
from tests.cli.conftest import SerialPool
from tests.commands import assert_command_failed
from tests.models import SCHEMA, copy_model_with_label, draw_rows, write_model

Run = Callable[..., SimpleNamespace]


def write_lines(path: Path, rows: dict[str, dict[str, float | str]]) -> Path:
    """Write records as JSON lines, one reading per line, one record after the other."""
    readings = ({"record": r, "feature": f, "value": v} for r, row in rows.items() for f, v in row.items())
    path.write_text("".join(json.dumps(reading) + "\n" for reading in readings))
    return path


def make_normal_records(count: int, seed: int, name: str = "r{}") -> dict[str, dict[str, float | str]]:
    return {name.format(i): row for i, row in enumerate(draw_rows(SCHEMA, count, seed))}


def write_wide_table(path: Path, count: int, seed: int) -> Path:
    rows = draw_rows(SCHEMA, count, seed, missing_share=0.0)
    pq.write_table(pa.table({f.name: [row[f.name] for row in rows] for f in SCHEMA.features}), path)
    return path


def test_new_calibration_has_the_largest_scores_of_a_replay(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    """Each record contributes its largest score in order of arrival; weights, schema and ranking do not change."""
    lines, out, scores = (
        write_lines(tmp_path / "new.jsonl", make_normal_records(150, 21)),
        tmp_path / "again",
        tmp_path / "s.parquet",
    )
    assert cli("replay", lines, "--model", model_dir, "--output", scores).code == 0
    result = cli("calibrate", lines, "--model", model_dir, "--out", out)
    assert (result.code, len(result.lines)) == (0, 1), result.err
    before, after = model_store.read(model_dir), model_store.read(out)
    table = pq.read_table(scores).to_pydict()
    max_score_by_record: dict[str, float] = {}
    for record, score in zip(table["record"], table["score"], strict=True):
        max_score_by_record[record] = max(score, max_score_by_record.get(record, 0.0))
    np.testing.assert_allclose(after.calibration.scores, sorted(max_score_by_record.values()), rtol=1e-5)
    assert after.calibration.arrival_order == "arrival"
    assert after.fingerprint != before.fingerprint
    assert after.fingerprint in result.lines[0]
    for name, tensor in before.model.state_dict().items():
        assert (after.model.state_dict()[name] == tensor).all()
    assert after.manifest["files"] == before.manifest["files"]
    note = after.manifest["training"].pop("recalibrated")
    assert (note["from"], note["records"]) == (before.fingerprint, 150)
    assert after.manifest["training"] == before.manifest["training"]


def test_order_next_scores_records_in_the_chosen_order(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    """Suspicious records take the reading next that is ranked first; the others keep their order of arrival."""
    rows = make_normal_records(150, 21)
    lines, arrival, chosen = write_lines(tmp_path / "new.jsonl", rows), tmp_path / "arrival", tmp_path / "chosen"
    assert cli("calibrate", lines, "--model", model_dir, "--out", arrival, "--alpha", "5%").code == 0
    result = cli("calibrate", lines, "--model", model_dir, "--out", chosen, "--alpha", "5%", "--order", "next")
    assert (result.code, "in next order" in result.err) == (0, True), result.err
    old = model_store.read(model_dir)
    after = model_store.read(chosen).calibration
    assert after.arrival_order == "next"
    values = np.full((150, len(SCHEMA)), np.nan)
    orders = np.full((150, len(SCHEMA)), -1)
    for index, row in enumerate(rows.values()):
        for position, (name, value) in enumerate(row.items()):
            code = SCHEMA.code_by_name[name]
            labels = SCHEMA.features[code].labels
            known = labels.index(value) if value in labels else len(labels)
            values[index, code] = known if labels else value
            orders[index, position] = code
    expected = score_in_chosen_order(old.model, old.calibration, list(rows), values, orders, 0.05)
    np.testing.assert_allclose(after.scores, np.sort(expected), rtol=1e-5)
    differs = ~np.isclose(after.scores, model_store.read(arrival).calibration.scores, rtol=1e-4)
    assert 0 < differs.sum() < 100
    # Readings that are chosen after an alert at 30%
    arguments = ("--model", model_dir, "--out", chosen, "--alpha", "5%", "--order", "next", "--suspicious", "0.3")
    assert cli("calibrate", lines, *arguments).code == 0
    after_alert = score_in_chosen_order(old.model, old.calibration, list(rows), values, orders, 0.05, 0.3)
    np.testing.assert_allclose(model_store.read(chosen).calibration.scores, np.sort(after_alert), rtol=1e-5)
    assert not np.allclose(after_alert, expected)
    assert cli("calibrate", lines, "--model", model_dir, "--out", tmp_path / "x", "--order", "last").code == 2


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_only_rows_with_the_normal_label_of_the_training_are_used(
    cli: Run,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    ending: str,
) -> None:
    """A fault in one of three rows; the labels are spelt otherwise than in the training.

    Only one of the cases starts the processes for which `--workers` asks.
    """
    if ending == "parquet":
        monkeypatch.setattr(shard_run, "_make_pool", lambda engine, *arguments: SerialPool(*arguments))
    copy_model_with_label(model_dir, tmp_path / "m", "fault", "0")
    rows = draw_rows(SCHEMA, 150, 21, missing_share=0.0)
    columns = {f.name: [row[f.name] for row in rows] for f in SCHEMA.features}
    normal = pa.table(columns)
    faulty = pa.table({name: [values[-1]] * 75 for name, values in columns.items()})
    table = pa.concat_tables([normal, faulty]).append_column("fault", pa.array(["0.0", " 0"] * 75 + ["7"] * 75))
    path = tmp_path / f"new.{ending}"
    (pacsv.write_csv if ending == "csv" else pq.write_table)(table, path)
    pq.write_table(normal, tmp_path / "normal.parquet")
    words = ("calibrate", path, "--model", tmp_path / "m")
    result = cli(*words, "--out", tmp_path / "chosen", *options)
    assert result.code == 0, result.err
    assert "calibrated on 150 records" in result.lines[-1]
    assert "only rows with fault = 0 were used (--label, --normal)" in result.lines[-1]
    assert cli("calibrate", tmp_path / "normal.parquet", "--model", model_dir, "--out", tmp_path / "plain").code == 0
    chosen, plain = (model_store.read(tmp_path / name).calibration for name in ("chosen", "plain"))
    np.testing.assert_allclose(chosen.scores, plain.scores, rtol=1e-5)
    result = cli(*words, "--out", tmp_path / "all", "--label", "", *options)
    assert "calibrated on 225 records" in result.lines[-1]
    assert len(model_store.read(tmp_path / "all").calibration.scores) == 225
    result = cli(*words, "--out", tmp_path / "none", "--label", "fault", "--normal", "ok", *options)
    assert result.code == 3
    assert result.lines[-1].endswith("no row has fault = ok: check --label and --normal")
    assert_command_failed(cli(*words, "--label", "fault"), 2, "--label and --normal belong together")


def test_the_option_of_a_missing_column_is_named(cli: Run, model_dir: Path, lines: Path, tmp_path: Path) -> None:
    path = write_wide_table(tmp_path / "new.parquet", 99, 3)
    words = ("calibrate", path, "--model", model_dir, "--out", tmp_path / "out", "--label", "fault", "--normal", "ok")
    assert_command_failed(cli(*words), 2, "--label: ", "has no column 'fault'; choose one of its columns")
    assert_command_failed(cli(*words, "--where", "pressure > 0"), 2, "--label: ", "has no column 'fault'")
    assert_command_failed(cli(*words, "--where", "quality = 'good'"), 2, "--where: ", "has no column 'quality'")
    assert_command_failed(cli(*words, "--where", "fault = 'x'"), 2, "--where: ", "has no column 'fault'")
    assert_command_failed(cli("calibrate", lines, *words[2:]), 3, "--label chooses rows of tables, not of JSON lines")


def test_the_label_can_be_the_index_of_a_data_frame(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    copy_model_with_label(model_dir, tmp_path / "m", "fault", "0")
    frame = pd.DataFrame(draw_rows(SCHEMA, 90, 22, missing_share=0.0)).assign(fault=[0, 0, 1] * 30)
    frame.set_index("fault").to_parquet(tmp_path / "new.parquet")
    result = cli("calibrate", tmp_path / "new.parquet", "--model", tmp_path / "m", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "calibrated on 60 records" in result.lines[-1]


@pytest.mark.charts
def test_output_and_report_compare_both_calibrations(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    result = cli(
        "calibrate",
        write_wide_table(tmp_path / "new.parquet", 99, 3),
        "--model",
        model_dir,
        "--out",
        out,
        "--alpha",
        0.3,
    )
    before, after = model_store.read(model_dir).calibration, model_store.read(out).calibration
    assert after.arrival_order == before.arrival_order == "random"
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()}
    assert rows["alpha"] == ["before", "now", "in", "reach?"]
    for alpha in (0.3, 0.05, 0.01):
        assert rows[f"{alpha:g}"] == [
            f"{before.compute_threshold(alpha):.3f}",
            f"{after.compute_threshold(alpha):.3f}",
            "yes",
        ]
    assert rows["0.001"][:2] == ["—", "—"]
    assert "it takes 999 calibration records, there are 99" in result.out
    assert rows["smallest"] == ["p", "0.005", "0.01"]
    report = (out / "report.html").read_text()
    today = datetime.now(UTC).date().isoformat()
    assert f"New calibration of {today}" in report
    assert model_store.read(out).manifest["training"]["recalibrated"]["date"] == today
    assert f"{after.compute_threshold(0.01):.3f}" in report


def test_report_names_only_the_calibration_in_force_below_its_title(cli: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "report.html").write_text(render_page("Training report", render_paragraph("x"), lead="How it went."))
    for count in (60, 99):
        new = write_wide_table(tmp_path / f"{count}.parquet", count, count)
        assert cli("calibrate", new, "--model", model, "--alpha", "0.05").code == 0
    report = (model / "report.html").read_text()
    assert report.count("its calibration was replaced by") == 1
    assert "replaced by one of 99 records; the smallest α in reach is 1% now" in report
    assert report.index("How it went.") < report.index("replaced by") < report.index("New calibration of")


def test_trim_leaves_out_the_largest_scores(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    new, out = write_lines(tmp_path / "new.jsonl", make_normal_records(100, 11)), tmp_path / "again"
    words = ["calibrate", new, "--model", model_dir, "--out", out]
    assert cli(*words).code == 0
    whole = model_store.read(out).calibration.scores
    assert cli(*words, "--trim", "0.05").code == 0
    np.testing.assert_allclose(model_store.read(out).calibration.scores, whole[:95], rtol=1e-6)


def test_only_confirmed_anomalies_are_left_out(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    """The review lists the largest scores; of these, a person confirms some. Nothing else is removed."""
    anomalies = {f"odd, {i}": row | {"temperature": 160.0 + i} for i, row in enumerate(draw_rows(SCHEMA, 5, 8, 0.0))}
    new, out = write_lines(tmp_path / "new.jsonl", make_normal_records(100, 11) | anomalies), tmp_path / "again"
    words = ["calibrate", new, "--model", model_dir, "--out", out]
    assert cli(*words).code == 0
    whole = model_store.read(out).calibration.scores
    shutil.rmtree(out)
    result = cli(*words, "--review", "8")
    assert result.code == 0, result.err
    assert not out.exists()
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert {row["record"] for row in rows} >= set(anomalies)
    assert len(rows) == 8
    np.testing.assert_allclose([float(row["statistic"]) for row in rows], whole[:-9:-1], rtol=1e-5)
    assert float(rows[0]["p_value"]) == pytest.approx(1 / 105, rel=1e-2)
    for row in rows:
        row["anomalous"] = "yes" if row["record"] in anomalies else ""
    review = tmp_path / "review.csv"
    with review.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    result = cli(*words, "--anomalous", review)
    assert (result.code, "left out: 5 confirmed records" in result.err) == (0, True), result.err
    assert len(model_store.read(out).calibration.scores) == 100
    remaining = cli(*words, "--anomalous", review, "--review", "3")
    assert not {row["record"] for row in csv.DictReader(io.StringIO(remaining.out))} & set(anomalies)
    shutil.rmtree(out)
    unedited = tmp_path / "unedited.csv"
    unedited.write_text(cli(*words, "--review", "8").out)
    assert cli(*words, "--anomalous", unedited).code == 0
    assert len(model_store.read(out).calibration.scores) == 105, "nothing was confirmed, so nothing is removed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record,anomalous\nr1,perhaps\n", "line 2: 'perhaps'"),
        ("record,score\nr1,1\n", "expected the columns record and anomalous"),
        ("", "line 1: expected the columns record and anomalous"),
        ("id,anomalous\n", "line 1: expected the columns record and anomalous"),
        ('record,anomalous\n"r\n1",no\nr2,perhaps\n', "line 4: 'perhaps'"),
        ("record,anomalous\nr1\n", "line 2: the row has fewer columns"),
        ("record,anomalous\nr-none,yes\n", "does not contain, such as 'r-none'"),
        ("record,anomalous\n" + "".join(f"r{i},yes\n" for i in range(60)), "confirms all records"),
    ],
)
def test_list_of_anomalies_that_cannot_be_used_is_refused(
    cli: Run, model_dir: Path, tmp_path: Path, text: str, message: str
) -> None:
    new, review = write_lines(tmp_path / "new.jsonl", make_normal_records(60, 11)), tmp_path / "review.csv"
    review.write_text(text)
    result = cli("calibrate", new, "--model", model_dir, "--out", tmp_path / "x", "--anomalous", review)
    assert result.code != 0
    assert message in result.err
    assert not (tmp_path / "x").exists()


def test_confirmed_anomalies_and_a_trimmed_share_are_not_combined(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    new, review = write_lines(tmp_path / "new.jsonl", make_normal_records(60, 11)), tmp_path / "review.csv"
    review.write_text("record,anomalous\nr1,yes\n")
    result = cli("calibrate", new, "--model", model_dir, "--anomalous", review, "--trim", "0.02")
    assert result.code == 2
    assert "--anomalous and --trim cannot be combined: leave out --trim" in result.err


def test_review_needs_input(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "e.jsonl"
    evidence.write_text("")
    result = cli("calibrate", "--model", model_dir, "--incidents", evidence, "--review", "5")
    assert result.code == 2
    assert "--review and --anomalous need INPUT" in result.err


def test_new_calibration_replaces_the_model_and_is_reloaded(cli: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    before, reload_requested = model_store.read(model), threading.Event()
    reloader = ModelReloader(before, "cpu", reload_requested)
    assert cli("calibrate", write_lines(tmp_path / "new.jsonl", make_normal_records(60, 4)), "--model", model).code == 0
    after = model_store.read(model)
    assert len(after.calibration.scores) == 60 != len(before.calibration.scores)
    reload_requested.set()  # like SIGHUP
    while (found := reloader.take_new_model()) is None:
        time.sleep(0.01)
    assert found[1].fingerprint == after.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "new.jsonl"]


def test_groups_with_enough_records_have_calibrations_of_their_own(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    rows = (
        make_normal_records(60, 5, "north/a/{}")
        | make_normal_records(50, 6, "north/b/{}")
        | make_normal_records(10, 7, "south/{}")
        | make_normal_records(3, 8)
    )
    out = tmp_path / "again"
    words = ["--model", model_dir, "--out", out, "--group-by", "/", "--alpha", "0.05,0.02"]
    result = cli("calibrate", write_lines(tmp_path / "new.jsonl", rows), *words)
    assert result.code == 0, result.err
    assert "2 groups have calibrations of their own: north/a (60), north/b (50)" in result.out
    assert "1 group with fewer than 49 records uses the shared calibration: south (10)" in result.out
    assert "3 records name no group" in result.out
    assert "because it has only 13 records: alpha is not guaranteed for records of groups without" in result.out
    calibration = model_store.read(out).calibration
    assert {name: len(own.scores) for name, own in calibration.calibration_by_group.items()} == {
        "north/a": 60,
        "north/b": 50,
    }
    assert len(calibration.scores) == 123
    assert model_store.read_manifest(out)["format_version"] == 2
    assert "north/a" in cli("inspect", out).out
    warnings = cli("replay", tmp_path / "new.jsonl", "--model", out, "--alpha", "0.018").err
    assert "alpha 0.018 is out of reach in 1 of 2 calibration groups" in warnings
    assert "(north/b)" in warnings


def test_records_are_compared_with_their_group(model_dir: Path, tmp_path: Path) -> None:
    """A group whose normal records have much larger scores than the others still has the false-alarm rate alpha."""
    loaded = model_store.read(model_dir)
    groups = {"loud": loaded.calibration.scores + 1e6, "calm": loaded.calibration.scores}
    pooled = Calibration.from_statistics(np.concatenate(list(groups.values())), "random")
    model_store.write(tmp_path / "m", loaded.model, pooled.with_groups(groups, "@", 99), {}, "")
    detector = deformer_stream.load(tmp_path / "m")
    found = {}
    for record in ("loud@1", "calm@1", "other@1"):
        scorer = detector.scorer(alpha=0.02)
        updates = [scorer.update(record, f, v) for f, v in (("vibration", 60.0), ("pressure", -3.0))]
        found[record] = updates[-1].p_value
        expected = detector.artifact.calibration.compute_p_values(np.array([[updates[-1].score]]), lambda r=record: [r])
        assert updates[-1].p_value == expected[0, 0]
    assert found["calm@1"] < found["other@1"] < found["loud@1"]


def test_windows_are_grouped_by_device(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"device": f"pump-{i % 2}", "time": 10 * (i // 2) + k, "feature": f, "value": v}
        for i, row in enumerate(draw_rows(SCHEMA, 80, 9))
        for k, (f, v) in enumerate(row.items())
    ]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", model_dir, "--out", tmp_path / "again", "--window", "10s", "--group-by", "device"]
    result = cli("calibrate", tmp_path / "new.jsonl", *words, "--alpha", 0.05)
    assert result.code == 0, result.err
    calibration = model_store.read(tmp_path / "again").calibration
    assert {name: len(own.scores) for name, own in calibration.calibration_by_group.items()} == {
        "pump-0": 40,
        "pump-1": 40,
    }


@pytest.mark.parametrize(
    ("rows", "more", "word"),
    [
        (make_normal_records(5, 1), ["--group-by", "device"], "--group-by device"),
        ({"r": {"unheard of": 1.0}}, [], "no record"),
    ],
)
def test_unusable_input_writes_nothing(
    cli: Run, model_dir: Path, tmp_path: Path, rows: dict[str, dict[str, float | str]], more: list[str], word: str
) -> None:
    result = cli(
        "calibrate", write_lines(tmp_path / "new.jsonl", rows), "--model", model_dir, "--out", tmp_path / "m", *more
    )
    assert result.code == 3
    assert word in result.lines[-1]
    assert not (tmp_path / "m").exists()


def test_input_with_two_arrival_orders_is_rejected(cli: Run, model_dir: Path, tmp_path: Path) -> None:
    files = write_wide_table(tmp_path / "w.parquet", 5, 1), write_lines(tmp_path / "l.jsonl", make_normal_records(5, 2))
    words = [*files, "--model", model_dir, "--out", tmp_path / "m"]
    assert cli("calibrate", *words).code == 2
    assert cli("calibrate", *words, "--order", "schema").code == 0
    assert model_store.read(tmp_path / "m").calibration.arrival_order == "schema"


def test_interrupted_calibration_writes_nothing(
    cli: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr("deformer_stream.cli.calibrate.stop_on_signals", lambda: stopped)
    out = tmp_path / "m"
    result = cli(
        "calibrate", write_lines(tmp_path / "new.jsonl", make_normal_records(60, 4)), "--model", model_dir, "--out", out
    )
    assert (result.code, result.out, result.lines) == (
        130,
        "",
        ["the calibration was interrupted, so no model was written"],
    )
    assert not out.exists()
