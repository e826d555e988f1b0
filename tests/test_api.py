"""Tests of the library: readings one by one, complete records and the replay of a file give the same scores."""

from __future__ import annotations

import copy
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deformer_stream
from deformer_stream import model_store
from deformer_stream.api import Detector
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine, compute_alert_id
from deformer_stream.engine.events import Effects, EventBatch, Rejection
from deformer_stream.errors import AlphaOutOfReachWarning, ArtifactError, ConfigError, InputError
from deformer_stream.library.records import NOT_CONVERTED, encode_json, make_messages, to_json_type
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.models import SCHEMA, draw_linear_records, draw_rows, train_linear_model, write_model

ALPHA = 0.3
RANKS = 1e-12
"""Tolerance of p-values. Scores differ in their last bits; p-values do not, because such scores count as ties."""


@pytest.fixture(scope="module")
def detector(model_dir: Path) -> Detector:
    return deformer_stream.load(model_dir)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Detector:
    """Return a detector that has learned y = 2x + 1, and that `sign` is the sign of x."""
    directory = tmp_path_factory.mktemp("linear") / "model"
    model_store.write(
        directory, train_linear_model(), Calibration.from_statistics(np.linspace(0, 5, 99), "random"), {}, ""
    )
    return deformer_stream.load(str(directory))


def test_a_scorer_ranks_the_next_readings_of_suspicious_records(linear: Detector) -> None:
    """If x is far out, y = 2x + 1 tells most; a usual record is not suspicious, and nothing changes."""
    scorer, other = linear.scorer(alpha=0.02), linear.scorer(alpha=0.02)
    odd, usual = scorer.update("odd", "x", 2.9), scorer.update("usual", "x", 0.1)
    assert other.update("odd", "x", 2.9) == odd
    assert odd.alert is None
    assert odd.p_value <= 0.2 < usual.p_value
    found = scorer.next_readings()
    assert list(found) == ["odd"]
    first = found["odd"][0]
    assert isinstance(first, deformer_stream.NextReading)
    assert (first.feature, len(found["odd"])) == ("y", 2)
    assert first.alert_probability > first.false_alarm_probability
    assert first.score_rise > found["odd"][1].score_rise
    assert scorer.next_readings() == found
    assert list(scorer.next_readings("usual", draws=8)) == ["usual"]
    assert scorer.next_readings("not open") == {}
    assert scorer.update("odd", "y", 6.8) == other.update("odd", "y", 6.8)
    with pytest.raises(ValueError, match="suspicious is 2"):
        scorer.next_readings(suspicious=2)
    with pytest.raises(ValueError, match="at least 1"):
        scorer.next_readings(draws=0)


def test_public_names_exist() -> None:
    assert set(deformer_stream.__all__) <= set(dir(deformer_stream)) | set(deformer_stream.__all__)
    for name in deformer_stream.__all__:
        assert getattr(deformer_stream, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = deformer_stream.lode


def test_load_of_an_empty_directory_raises_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="missing"):
        deformer_stream.load(tmp_path)


def test_update_equals_score_equals_replay(
    detector: Detector, model_dir: Path, tmp_path: Path, cli: Callable[..., SimpleNamespace]
) -> None:
    rows = draw_rows(SCHEMA, 60, 5)
    scores = detector.score(rows, ALPHA, order="arrival")
    assert (scores.alert_seq >= 0).sum() >= 5

    scorer = detector.scorer(ALPHA)
    streamed = []
    longest = max(map(len, rows))
    for k in range(longest):  # all records interleaved
        for i, row in enumerate(rows):
            if k < len(row):
                feature, value = list(row.items())[k]
                streamed.append((i, feature, k, scorer.update(f"{i}", feature, value)))
    for i, row in enumerate(rows):
        updates = [update for record, _, _, update in streamed if record == i]
        assert len(updates) == len(row)
        assert all(update.rejection is None for update in updates)
        assert updates[-1].running_log_likelihood == pytest.approx(scores.log_likelihood[i], abs=1e-4)
        assert updates[-1].p_value == pytest.approx(scores.p_value[i], abs=RANKS)
        raised = [update.alert for update in updates if update.alert]
        assert len(raised) == (scores.alert_seq[i] >= 0)
        p = [update.p_value for update in updates]
        assert p == sorted(p, reverse=True)
        for alert in raised:
            assert alert.raised_at == scores.alert_seq[i] + 1
            assert alert.id == compute_alert_id(str(i), detector.fingerprint, ALPHA)

    table = [(str(i), f, v) for i, row in enumerate(rows) for f, v in row.items()]
    numbers = [v if isinstance(v, float) else None for _, _, v in table]
    columns = {"record": [r for r, _, _ in table], "feature": [f for _, f, _ in table], "value": numbers}
    labels = [v if isinstance(v, str) else None for _, _, v in table]
    pq.write_table(pa.table({**columns, "label": labels}), tmp_path / "long.parquet")
    out = tmp_path / "scores.parquet"
    ended = cli("replay", tmp_path / "long.parquet", "--model", model_dir, "--alpha", ALPHA, "--output", out)
    assert ended.code == 0, ended.err
    replayed = {(row["record"], row["feature"]): row for row in pq.read_table(out).to_pylist()}
    assert len(replayed) == len(streamed) == len(table)
    for i, feature, k, update in streamed:
        row = replayed[str(i), feature]
        assert row["seq"] == k
        assert (row["log_likelihood"] is None) == math.isnan(update.log_likelihood) == (feature == "load")
        if row["log_likelihood"] is not None:
            assert row["log_likelihood"] == pytest.approx(update.log_likelihood, abs=1e-4)
        assert row["score"] == pytest.approx(update.score, abs=1e-4)
        assert row["p_value"] == pytest.approx(update.p_value, abs=RANKS)
        assert row["alert"] == (update.alert is not None)


@pytest.mark.parametrize(
    ("feature", "value", "reason"),
    [
        ("temperatur", 1.0, "unknown_feature"),
        ("temperature", "warm", "wrong_type"),
        ("temperature", True, "wrong_type"),
        ("temperature", [1.0], "wrong_type"),
        *(("temperature", value, "not_finite") for value in (math.nan, np.float32("nan"), pd.NA, pd.NaT)),
        ("temperature", float("inf"), "not_finite"),
        ("temperature", np.float32("-inf"), "not_finite"),
        ("temperature", 10**400, "not_finite"),
        ("state", float("inf"), "not_finite"),
        ("state", {"a": 1}, "wrong_type"),
        ("state", "x" * 5000, "too_large"),
    ],
)
def test_rejected_readings_change_nothing(detector: Detector, feature: str, value: Any, reason: str) -> None:
    scorer = detector.scorer()
    update = scorer.update("r", feature, value)
    assert update.rejection is not None
    assert update.rejection.reason.value == reason
    assert feature in update.rejection.detail
    assert math.isnan(update.log_likelihood)
    assert math.isnan(update.running_log_likelihood)
    assert math.isnan(update.score)
    assert math.isnan(update.p_value)
    assert update.alert is None
    after, fresh = scorer.update("r", "pressure", 1.1), detector.scorer().update("r", "pressure", 1.1)
    assert after == fresh


def test_duplicate_and_late_readings_are_rejected(detector: Detector) -> None:
    scorer = detector.scorer()
    for name in SCHEMA.names:
        assert scorer.update("r", name, 1 if name != "state" else "run").rejection is None
        again = scorer.update("r", name, 2.0)
        assert again.rejection is not None
        assert again.rejection.reason.value == ("late" if name == SCHEMA.names[-1] else "duplicate")
    assert scorer.update("s", "pressure", 1.0).rejection is None
    scorer.finish()
    late = scorer.update("s", "temperature", 1.0)
    assert late.rejection is not None
    assert late.rejection.reason.value == "late"


def test_none_declares_that_a_feature_will_not_be_observed(detector: Detector) -> None:
    scorer = detector.scorer()
    update = scorer.update("r", "temperature", None)
    assert update.rejection is None
    assert math.isnan(update.p_value)
    again = scorer.update("r", "temperature", 1.0)
    assert again.rejection is not None
    assert again.rejection.reason.value == "duplicate"


def test_update_device_needs_a_model_of_windows(detector: Detector) -> None:
    with pytest.raises(ConfigError, match=r"was not trained on windows .* use update\(record, feature, value, time\)"):
        detector.scorer().update_device("p", "pressure", 1.0, 5.0)


@pytest.mark.parametrize("unit", ["D", "s", "us", "ns"])
def test_times_of_numpy_are_datetimes(detector: Detector, unit: str) -> None:
    """They have no time zone, and are rejected like other datetimes without one."""
    update = detector.scorer().update("r", "pressure", 1.0, np.datetime64("2026-01-02", unit))  # type: ignore[arg-type]
    naive = detector.scorer().update("r", "pressure", 1.0, datetime(2026, 1, 2))
    assert update.rejection is not None
    assert update.rejection == naive.rejection
    assert "has no UTC offset" in update.rejection.detail
    assert detector.scorer().update("r", "pressure", 1.0, np.datetime64("NaT")).rejection is None  # type: ignore[arg-type]


@pytest.mark.parametrize("record", ["", "x" * 5000])
def test_empty_and_long_record_ids_are_rejected(detector: Detector, record: str) -> None:
    assert detector.scorer().update(record, "pressure", 1.0).rejection is not None


def test_invalid_unicode_is_rejected(detector: Detector) -> None:
    assert detector.scorer().update("\ud800", "pressure", 1.0).rejection is not None
    assert detector.scorer().update("r", "\ud800", 1.0).rejection is not None
    assert detector.scorer().update("π 泵", "pressure", 1.0).rejection is None


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float64(1), np.float32(1), np.int8(1), np.uint64(1)], ids=lambda v: type(v).__name__
)
def test_numpy_scalars_are_accepted(detector: Detector, value: Any) -> None:
    expected = detector.scorer().update("r", "pressure", 1.0)
    assert detector.scorer().update("r", "pressure", value) == expected
    assert detector.score([{"pressure": value}]).p_value[0] == expected.p_value


@pytest.mark.parametrize(
    "value", [Decimal("1.50"), np.longdouble(1.5), np.float16(1.5), time(0, 0, 1, 500_000)], ids=str
)
def test_numbers_of_other_types_are_accepted(detector: Detector, value: Any) -> None:
    """A record, a reading and a cell of a data frame with such a value have the scores of a float."""
    expected = detector.scorer().update("r", "pressure", 1.5)
    assert detector.scorer().update("r", "pressure", value) == expected
    record = {"pressure": value, "vibration": Decimal("NaN")}
    for records in (record, [record], pd.Series(record), pd.DataFrame([record]), pd.DataFrame([record] * 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # most features have no column
            assert np.asarray(detector.score(records).p_value)[0] == expected.p_value
    assert detector.explain(record) == detector.explain({"pressure": 1.5})
    assert detector.impute(record) == detector.impute({"pressure": 1.5})


def test_decimal_labels_are_those_of_numbers() -> None:
    assert to_json_type(Decimal("3.00")) == 3.0
    assert math.isnan(to_json_type(Decimal("sNaN")))  # type: ignore[arg-type]
    assert to_json_type(Decimal(2**53 + 1)) == 2**53 + 1
    assert encode_json({"value": Decimal(2**70 + 1)}) == b'{"value": 1180591620717411303425}'


@pytest.mark.parametrize("value", [True, np.bool_(True), "true"], ids=["bool", "numpy", "text"])
def test_booleans_are_labels(detector: Detector, value: Any) -> None:
    assert detector.scorer().update("r", "valve", value) == detector.scorer().update("r", "valve", "true")
    assert detector.explain({"valve": value})[0].value == "true"


class Colour(StrEnum):
    RED = "run"


class Level(IntEnum):
    LOW = 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(["run", "idle", "true", "12:30", "", "\ud800", "x" * 1025, "π", 10**400, Colour.RED, Level.LOW]),
    st.text(max_size=5),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.booleans().map(np.bool_),
    st.text(max_size=5).map(np.str_),
    st.decimals(),
    st.times(),
    st.floats(width=32).map(np.longdouble),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
moments = st.one_of(
    scalars,
    st.floats(0, 2e9),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.sampled_from(["2020-03-09T10:34:33Z", "2020-03-09T10:34:33", np.datetime64("2020-03-09T10:34:33")]),
)


def describe(result: tuple[EventBatch, list[Rejection]]) -> tuple[Any, ...]:
    """Return everything that a decoded event and its rejections say. Values are text, as NaN equals nothing."""
    batch, rejections = result
    events = (batch.record_ids, batch.features.tolist(), str(batch.values.tolist()), batch.times.tolist())
    return events, batch.unseen_labels, rejections


@settings(max_examples=num_examples(400))
@given(
    record=scalars,
    feature=st.sampled_from([*SCHEMA.names, "unknown"]) | scalars,
    value=scalars,
    time=moments,
    owner=st.sampled_from(["record", "device"]),
)
def test_decoding_python_values_equals_decoding_their_json(
    detector: Detector, record: Any, feature: Any, value: Any, time: Any, owner: str
) -> None:
    event = {owner: record, "feature": feature, "value": value, "time": time}
    scorer = detector.scorer()
    direct = describe(scorer._decode(event))
    assert direct == describe(scorer._codec.decode(make_messages([encode_json(event)])))


def test_update_by_way_of_json_gives_the_same_result(detector: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [
        (f"r{i % 3}", name, value) for i, row in enumerate(draw_rows(SCHEMA, 12, 3)) for name, value in row.items()
    ]
    scorer = detector.scorer(ALPHA)
    direct = [scorer.update(*reading) for reading in readings]
    monkeypatch.setattr("deformer_stream.library.scorer.to_json_type", lambda value: NOT_CONVERTED)
    scorer = detector.scorer(ALPHA)
    assert repr([scorer.update(*reading) for reading in readings]) == repr(direct)


def test_an_update_calls_the_engine_once(detector: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    handle = Engine.handle

    def count(engine: Engine, batch: EventBatch, now: int) -> Effects:
        calls.append(len(batch))
        return handle(engine, batch, now)

    monkeypatch.setattr(Engine, "handle", count)
    detector.scorer().update("r", "pressure", 1.0)
    assert calls == [1]


def test_values_of_impossible_types_raise_input_error(detector: Detector) -> None:
    with pytest.raises(InputError, match=r"record 'r', feature 'pressure' .*type object cannot be a reading"):
        detector.scorer().update("r", "pressure", object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"its id or time .*type object cannot be a reading"):
        detector.scorer().update("r", "pressure", 1.0, object())  # type: ignore[arg-type]
    for value in (1j, b"x", timedelta(1), np.timedelta64(5, "ns")):
        with pytest.raises(InputError, match=f"feature 'pressure' .*type {type(value).__name__}"):
            detector.score([{"state": "run"}, {"state": "run", "pressure": value}])  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "time", [1.5, 1, np.float64(1.5), np.int64(1), datetime(2026, 1, 2, 3, tzinfo=UTC)], ids=lambda t: type(t).__name__
)
def test_times_of_all_types(detector: Detector, time: Any) -> None:
    assert detector.scorer().update("r", "pressure", 1.0, time).rejection is None
    alerted = next(
        a for v in np.linspace(2, 90, 200) if (a := detector.scorer(0.9).update("r", "vibration", v, time).alert)
    )
    assert alerted.time == round((time.timestamp() if isinstance(time, datetime) else float(time)) * 1e6)


@pytest.mark.parametrize("time", [datetime(2026, 1, 2), "yesterday", float("nan"), 1e18], ids=str)
def test_impossible_times_are_rejected(detector: Detector, time: Any) -> None:
    assert detector.scorer().update("r", "pressure", 1.0, time).rejection is not None


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, float("nan")])
def test_impossible_alpha_raises_value_error(detector: Detector, alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        detector.scorer(alpha)
    with pytest.raises(ValueError, match="alpha"):
        detector.score([], alpha)


@pytest.mark.parametrize("alpha", [[0.01, 0.05], (), "1%", "0.01", None, True, np.array([0.1]), {0.1}], ids=repr)
def test_score_and_explain_need_one_number_as_alpha(detector: Detector, alpha: Any) -> None:
    message = re.escape(f"alpha is {alpha!r}, but it must be one false-alarm rate between 0 and 1, such as 0.01")
    with pytest.raises(ValueError, match=message):
        detector.score([{"pressure": 1.0}], alpha)
    with pytest.raises(ValueError, match=message):
        detector.explain({"pressure": 1.0}, alpha)
    if not isinstance(alpha, list | np.ndarray):
        with pytest.raises(ValueError, match="it must be one or more false-alarm rates between 0 and 1"):
            detector.scorer(alpha)


@pytest.mark.parametrize("alpha", [np.float64(ALPHA), np.array(ALPHA)], ids=repr)
def test_alpha_can_be_a_number_of_numpy(detector: Detector, alpha: Any) -> None:
    expected = detector.score([{"pressure": 1.0}], ALPHA)
    assert repr(detector.score([{"pressure": 1.0}], alpha)) == repr(expected)
    assert repr(detector.scorer([alpha])) == repr(detector.scorer(ALPHA))


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_timeout_raises_value_error(detector: Detector, timeout: float) -> None:
    with pytest.raises(ValueError, match="record_timeout"):
        detector.scorer(record_timeout=timeout)


def test_reading_after_timeout_is_late(detector: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("deformer_stream.runtime.timing.read_elapsed_time", lambda: now[0])
    scorer = detector.scorer(record_timeout=10.0)
    scorer.update("r", "pressure", 1.0)
    now[0] = 11 * 10**6
    late = scorer.update("r", "temperature", 1.0)
    assert late.rejection is not None
    assert late.rejection.reason.value == "late"


def test_score_accepts_missing_values_and_empty_records(detector: Detector) -> None:
    whole = {"pressure": 1.0, "state": "run"}
    gaps = [whole, {}, {**whole, "vibration": None}, {"vibration": float("nan"), **whole}, {"vibration": np.nan}]
    scores = detector.score(gaps)
    for column in (scores.log_likelihood, scores.anomaly_score, scores.p_value, scores.alert_seq):
        assert column.shape == (5,)
        np.testing.assert_allclose(column[[2, 3]], column[0], rtol=1e-5)
        assert column[1] == column[4]
    assert (scores.p_value[1], scores.log_likelihood[1], scores.alert_seq[1]) == (1.0, 0.0, -1)
    assert len(detector.score([]).p_value) == 0


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"pressure": "high"}, ["record 1", "pressure"]),
        ({"pressure": math.inf}, ["record 1", "pressure", "finite"]),
    ],
)
def test_score_error_names_record_and_feature(detector: Detector, record: dict[str, Any], words: list[str]) -> None:
    for call in (detector.score, lambda rows: [detector.explain(row) for row in rows]):
        with pytest.raises(InputError) as caught:
            call([{"pressure": 1.0}, record])
        text = str(caught.value).replace("record 0", "record 1")
        assert "\n" not in text
        assert all(word in text for word in words)


def test_keys_that_are_no_features_are_ignored_with_one_warning(detector: Detector) -> None:
    expected = detector.score([{"pressure": 1.0}, {"state": "run"}])
    with pytest.warns(
        UserWarning, match=r"keys that are not features of the model are ignored: 'id', 'pressur'$"
    ) as caught:
        scores = detector.score([{"id": 7, "pressure": 1.0}, {"pressur": 1.0, "id": object(), "state": "run"}])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(scores.score, expected.score)
    with pytest.warns(UserWarning, match="'id'"):
        assert detector.explain({"id": 7, "pressure": 1.0}) == detector.explain({"pressure": 1.0})


def test_one_record_is_a_list_of_one(detector: Detector) -> None:
    one, listed = detector.score({"pressure": 1.0}), detector.score([{"pressure": 1.0}])
    assert len(one) == 1
    assert repr(one) == repr(listed)
    assert detector.impute([{"pressure": 1.0}]) == [detector.impute({"pressure": 1.0})]
    assert detector.quantiles([{"pressure": 1.0}], [0.5]) == [detector.quantiles({"pressure": 1.0}, [0.5])]
    assert detector.complete([{"pressure": 1.0}]) == [detector.complete({"pressure": 1.0})]
    assert detector.explain([{"pressure": 1.0}, {}]) == [detector.explain({"pressure": 1.0}), ()]


@pytest.mark.parametrize("records", ["table.parquet", 5, [1.0], None, [["pressure", 1.0]]], ids=repr)
def test_objects_that_are_no_records_raise_input_error(detector: Detector, records: Any) -> None:
    for method in (detector.score, detector.explain, detector.impute, detector.complete):
        with pytest.raises(InputError, match="dict") as caught:
            method(records)
        assert "\n" not in str(caught.value)


def test_alpha_out_of_reach_is_a_warning(detector: Detector) -> None:
    with pytest.warns(
        AlphaOutOfReachWarning, match=r"alpha 1e-07: this needs 9,999,999 calibration records, and the model has 199"
    ):
        detector.scorer([0.1, 1e-7])


def test_alpha_out_of_reach_in_a_group_is_a_warning(detector: Detector) -> None:
    group = Calibration.from_statistics(np.arange(19.0), "random")
    calibration = replace(detector.artifact.calibration, separator="@", calibration_by_group={"pump": group})
    grouped = Detector(replace(detector.artifact, calibration=calibration))
    with pytest.warns(AlphaOutOfReachWarning, match=r"1 of 1 calibration groups .* alpha 0.01, such as 'pump'"):
        grouped.scorer(0.01)


def test_missing_values_of_pandas_are_not_observed(detector: Detector) -> None:
    expected = detector.score({"temperature": 20.0})
    assert detector.score({"temperature": 20.0, "pressure": pd.NA, "state": pd.NaT}) == expected


def test_text_of_the_objects(detector: Detector) -> None:
    assert repr(detector) == (
        "Detector(6 features: temperature, pressure, vibration, state, valve, load; 199 calibration records; "
        f"model {detector.fingerprint} in {detector.artifact.directory})"
    )
    assert repr(detector.schema) == "Schema(6 features: temperature, pressure, vibration, state, valve, load)"
    scorer = detector.scorer([0.01, 0.1])
    scorer.update("r", "pressure", 1.0)
    assert repr(scorer) == f"Scorer(alpha=0.1, 0.01; open records: 1; model {detector.fingerprint})"
    text = repr(detector.score([{"pressure": 1.0}] * 1000))
    assert text.startswith("RecordScores(1000 records, 0 alerts, anomaly_score=[")
    assert len(text) < 200
    assert repr(detector.impute({"pressure": 1.0})["state"]).startswith("Imputation(value='")
    assert repr(deformer_stream.Imputation(1 / 3, 0.0, 1e6)) == "Imputation(value=0.333333, low=0, high=1e+06)"


def test_html_of_a_detector_escapes_names(tmp_path: Path) -> None:
    from deformer_stream.model.deformer import DEformer, ModelConfig

    schema = Schema((Feature("<b>", "continuous"), Feature("mode", "discrete", labels=("<i>", "run"))))
    model = DEformer(schema, ModelConfig(d_model=8, layers=1, heads=1, feedforward=8, mixtures=2, hidden=(8,)))
    model_store.write(tmp_path / "m", model, Calibration.from_statistics(np.ones(9), "random"), {}, "")
    page = deformer_stream.load(tmp_path / "m")._repr_html_()
    assert "<td>&lt;b&gt;</td>" in page
    assert "&lt;i&gt;, run" in page
    assert "<b>" not in page


def test_module_lists_its_public_names_only() -> None:
    assert dir(deformer_stream) == sorted(deformer_stream.__all__)


def test_pickle_of_a_detector_refers_to_its_directory(tmp_path: Path) -> None:
    detector = deformer_stream.load(write_model(tmp_path / "m"))
    pickled = pickle.dumps(detector)
    assert len(pickled) < 1000
    restored = pickle.loads(pickled)
    rows = draw_rows(SCHEMA, 5, 1)
    assert repr(restored.score(rows)) == repr(detector.score(rows))
    for copied in (copy.copy(detector), copy.deepcopy(detector)):
        assert repr(copied.score(rows)) == repr(detector.score(rows))
    write_model(tmp_path / "m", seed=1)
    with pytest.raises(ArtifactError, match="refers to the model"):
        pickle.loads(pickled)
    with pytest.raises(ArtifactError, match="refers to the model"):
        detector.save(tmp_path / "copy")
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(ArtifactError, match="missing"):
        pickle.loads(pickled)


def test_saved_detector_equals_the_original(detector: Detector, tmp_path: Path) -> None:
    detector.save(tmp_path / "copy")
    assert deformer_stream.load(tmp_path / "copy").fingerprint == detector.fingerprint
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        path.name for path in detector.artifact.directory.iterdir()
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="not a model directory"):
        detector.save(tmp_path / "other")


def test_scorer_refuses_to_be_pickled(detector: Detector) -> None:
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pickle the Detector and create a scorer from it"):
            refused(detector.scorer())


def test_explain_finds_the_wrong_reading(linear: Detector) -> None:
    parts = linear.explain({"x": 0.5, "y": 9.0, "sign": "plus"})
    assert parts[0].feature == "y"
    assert parts[0].value == 9.0
    assert parts[0].surprise > 5 > max(part.surprise for part in parts[1:])
    low, median, high = parts[0].expected.low, parts[0].expected.median, parts[0].expected.high
    assert low is not None
    assert isinstance(median, float)
    assert high is not None
    assert 1.0 < low < median < high < 3.0
    sign = next(part for part in parts if part.feature == "sign")
    assert (sign.value, sign.expected.median, sign.expected.low) == ("plus", "plus", None)
    assert linear.explain({}) == ()
    assert [part.feature for part in linear.explain({"sign": "zero"})] == ["sign"]
    assert linear.explain({"sign": "zero"})[0].value == "zero"


def test_imputed_values_are_near_the_true_values(linear: Detector) -> None:
    rows = draw_linear_records(60, 11)
    inside = 0
    for x, y, _ in rows.tolist():
        filled = linear.impute({"x": x})
        assert filled.keys() == {"y", "sign"}
        assert filled["y"].value == pytest.approx(2 * x + 1, abs=0.5)
        assert filled["y"].low is not None
        assert filled["y"].high is not None
        inside += filled["y"].low <= y <= filled["y"].high
        if abs(x) > 0.3:
            assert filled["sign"].value == ("plus" if x > 0 else "minus")
        assert filled["sign"].low is filled["sign"].high is None
    assert inside >= 48  # of 60 intervals with 90% probability
    narrow, wide = (linear.impute({"x": 0.0}, interval=q)["y"] for q in (0.5, 0.99))
    assert narrow.low is not None
    assert wide.low is not None
    assert narrow.high is not None
    assert wide.high is not None
    assert wide.low < narrow.low < narrow.high < wide.high


def test_quantiles_depend_on_present_features(linear: Detector) -> None:
    found = linear.quantiles({"x": 0.5}, (0.05, 0.5, 0.95))
    assert found.keys() == {"y"}
    assert 1.0 < found["y"][0] < found["y"][1] < found["y"][2] < 3.0
    known = linear.impute({"x": 0.5})["y"]
    assert found["y"] == pytest.approx((known.low, known.value, known.high), abs=1e-6)
    wide = linear.quantiles({}, (0.05, 0.95))["y"]
    assert wide[1] - wide[0] > found["y"][2] - found["y"][0] + 1.0
    assert linear.quantiles({"x": 0.5}, np.array([0.05, 0.5, 0.95])) == found
    for qs in ((), (0.0,), (0.5, 1.0)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            linear.quantiles({}, qs)


def test_completions_follow_the_learned_distribution(linear: Detector) -> None:
    drawn = linear.complete({}, draws=200, seed=1)
    assert len(drawn) == 200
    assert drawn == linear.complete({}, draws=200, seed=1)
    assert drawn != linear.complete({}, draws=200, seed=2)
    x, y = (np.array([row[name] for row in drawn], float) for name in ("x", "y"))
    assert np.median(np.abs(y - 2 * x - 1)) < 0.2
    assert {row["sign"] for row in drawn} == {"minus", "plus"}
    assert {row["x"] for row in linear.complete({"x": 0.25}, draws=3)} == {0.25}
    with pytest.raises(ValueError, match="draws"):
        linear.complete({}, draws=0)


def test_impute_leaves_out_present_and_context_features(detector: Detector) -> None:
    assert detector.impute({}).keys() == set(SCHEMA.names) - {"load"}
    filled = detector.impute({"pressure": 1.0, "vibration": float("nan"), "load": 40.0})
    assert filled.keys() == {"temperature", "vibration", "state", "valve"}
    assert filled["state"].value in SCHEMA.features[3].labels
    assert float(filled["temperature"].value) == pytest.approx(round(float(filled["temperature"].value), 1), abs=1e-12)
    whole: dict[str, Any] = {"pressure": 1.0, "vibration": 0.0, "temperature": 20.0, "state": "run", "valve": True}
    assert detector.impute(whole) == {}
    for interval in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="interval"):
            detector.impute({}, interval)


def test_record_with_many_features(tmp_path: Path) -> None:
    """The codec's limit on readings per message must not apply to the library."""
    from deformer_stream.model.deformer import DEformer, ModelConfig

    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(60)))
    model = DEformer(schema, ModelConfig(d_model=8, layers=1, heads=1, feedforward=8, mixtures=2, hidden=(8,)))
    model_store.write(tmp_path / "m", model, Calibration.from_statistics(np.ones(9), "random"), {}, "")
    detector = deformer_stream.load(tmp_path / "m")
    assert np.isfinite(detector.score([dict.fromkeys(schema.names, 0.5)], alpha=0.3).log_likelihood).all()


def test_detectors_do_not_share_state(model_dir: Path, tmp_path: Path) -> None:
    one, other = deformer_stream.load(model_dir), deformer_stream.load(write_model(tmp_path / "m", seed=1))
    assert one.fingerprint != other.fingerprint
    first = one.scorer().update("r", "pressure", 1.0)
    assert other.scorer().update("r", "pressure", 1.0) != first
    assert one.scorer().update("r", "pressure", 1.0) == first
