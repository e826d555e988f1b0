"""Tests of the labels of records in the input, and of what became of the records of each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec.payloads import LongRows
from deformer_stream.codec.tables import RECORD_LABEL_COLUMN
from deformer_stream.engine.events import (
    NO_ALERT,
    ONLY_MODEL,
    ClosedRecords,
    CloseReason,
    Effects,
    EventBatch,
    Rejection,
    RejectionReason,
)
from deformer_stream.runtime.label_outcomes import LabelOutcomes
from deformer_stream.runtime.record_labels import RecordLabels
from tests.contracts.effects import make_alert


def observe(
    labels: RecordLabels, rows: list[tuple[str, str | None]], model: str = ONLY_MODEL, late: Sequence[int] = ()
) -> None:
    """Let labels observe rows of one reading each, given as pairs of record id and label, some of which are late."""
    record_ids, column = [row[0] for row in rows], pa.array([row[1] for row in rows], pa.string())
    codes, times = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int64)
    indices = np.arange(len(rows), dtype=np.int32)
    batch = EventBatch(record_ids, codes, np.zeros(len(rows)), times, indices, codes)
    data = LongRows("file", pa.RecordBatch.from_arrays([column], [RECORD_LABEL_COLUMN]), 0)
    rejections = [Rejection(row, RejectionReason.LATE, "") for row in late]
    labels.observe(data, {model: batch}, [replace(Effects.empty("fingerprint", model), rejections=rejections)])


def close(*record_ids: str, model: str = ONLY_MODEL) -> Effects:
    """Return effects in which records are closed."""
    n = len(record_ids)
    zeros, ints = np.zeros(n), np.zeros(n, np.int32)
    closed = ClosedRecords(
        record_ids=list(record_ids),
        reasons=[CloseReason.COMPLETE] * n,
        partitions=ints,
        num_readings=ints + 2,
        is_complete=zeros > 0,
        log_likelihood=zeros,
        anomaly_score=zeros,
        p_value=zeros,
        alert_seq=ints - 1,
        alert_alpha=zeros + NO_ALERT,
        score=zeros,
        latest_time=np.zeros(n, np.int64),
        record_p_value=zeros,
    )
    return replace(Effects.empty("fingerprint", model), closed=closed)


def test_a_record_is_faulty_if_one_of_its_rows_is() -> None:
    labels = RecordLabels("0")
    observe(labels, [("a", "0.0"), ("b", "leak"), ("c", None), ("d", " 0 "), ("a", "0"), ("e", None)])
    observe(labels, [("a", "7"), ("b", "0"), ("b", "wear"), ("c", "0"), ("x", None)])
    assert labels.list_labels(close("a", "b", "c", "d", "e", "f")) == ["7", "leak", "0", "0", None, None]


def test_empty_labels_are_no_labels() -> None:
    labels = RecordLabels("0")
    observe(labels, [("a", ""), ("b", " "), ("c", "1"), ("c", "")])
    assert labels.list_labels(close("a", "b", "c")) == [None, None, "1"]
    unnamed = RecordLabels("")
    observe(unnamed, [("a", ""), ("b", "leak")])
    assert unnamed.list_labels(close("a", "b")) == ["", "leak"]


def test_rows_that_came_too_late_label_no_record() -> None:
    labels = RecordLabels("0")
    observe(labels, [("a", "0"), ("a", "leak"), ("b", "leak"), ("b", "wear")], late=[1, 2])
    assert labels.list_labels(close("a", "b")) == ["0", "wear"]
    labels.forget(close("a", "b"))
    observe(labels, [("a", "leak")], late=[0])
    assert labels.list_labels(close("a")) == [None]


def test_labels_are_forgotten_with_their_records_and_belong_to_a_model() -> None:
    labels = RecordLabels("0")
    observe(labels, [("a", "1")], "pump")
    observe(labels, [("a", "0"), ("b", "0")], "fan")
    assert labels.list_labels(close("a", model="pump")) == ["1"]
    labels.forget(close("a", model="pump"))
    assert labels.list_labels(close("a", model="pump")) == [None]
    assert labels.list_labels(close("a", "b", model="fan")) == ["0", "0"]


def test_records_with_a_known_fault_are_found_by_their_alerts_and_when_they_are_closed() -> None:
    labels = RecordLabels("ok")
    observe(labels, [("a", "ok"), ("b", "leak"), ("c", "ok"), ("d", "wear"), ("e", "wear")])
    effects = replace(close("a", "b", "f"), alerts=[make_alert("d", 0), make_alert("c", 0)])
    assert labels.find_faulty(effects) == {"b", "d"}


def test_outcomes_of_each_label() -> None:
    outcomes = LabelOutcomes([0.01, 0.05], "ok")
    no = NO_ALERT
    outcomes.add(
        ["ok", "leak", None, "leak", "ok"],
        np.array([4, 4, 4, 8, 4], np.int32),
        np.array([0.0, 3.0, 9.0, 1.0, 2.0]),
        np.array([-1, 1, 0, 7, 3], np.int32),
        np.array([no, 0.01, 0.01, 0.05, 0.05]),
    )
    outcomes.add(["wear"], np.array([2], np.int32), np.array([np.nan]), np.array([-1], np.int32), np.array([no]))
    report = outcomes.summarize()
    assert (report.normal.num_records, report.normal.num_alerted_by_alpha) == (2, {0.05: 1, 0.01: 0})
    assert report.normal.median_share_read == 1.0
    leak, wear = report.faults
    assert (leak.label, leak.num_records, leak.num_alerted_by_alpha) == ("leak", 2, {0.05: 2, 0.01: 1})
    assert leak.median_share_read == pytest.approx(0.75)  # of 2 of 4 readings, and of all
    assert (wear.label, wear.num_records, wear.num_alerted_by_alpha) == ("wear", 1, {0.05: 0, 0.01: 0})
    assert math.isnan(wear.median_share_read)
    assert (report.all_faults.num_records, report.all_faults.num_alerted_by_alpha) == (3, {0.05: 2, 0.01: 1})
    assert (report.num_unlabelled, report.num_labelled) == (1, 5)
    assert report.auroc == 0.75  # of the pairs (0, 3), (2, 3), (0, 1) and (2, 1), one is in the wrong order


def test_a_run_without_records_or_with_normal_records_only_has_no_auroc() -> None:
    outcomes = LabelOutcomes([0.01], "ok")
    report = outcomes.summarize()
    assert (report.num_labelled, report.faults) == (0, ())
    assert math.isnan(report.auroc)
    outcomes.add(["ok"], np.array([2], np.int32), np.array([1.0]), np.array([-1], np.int32), np.array([NO_ALERT]))
    assert math.isnan(outcomes.summarize().auroc)
