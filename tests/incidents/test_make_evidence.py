"""Tests of the evidence that the effects of the engine give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.engine.events import NO_TIME, ClosedRecords, CloseReason, Contribution, Effects, ExpectedRange
from deformer_stream.incidents.events import AlertRow, Suspect
from deformer_stream.incidents.make_evidence import MAX_LABEL_CHARACTERS, make_evidence, round_significant
from tests.contracts.effects import make_alert, make_effects

TIME = 1_583_750_074_500_000


def make_closed_effects(**columns: object) -> Effects:
    """Return effects of three closed records of the partitions 2, 0 and 2, with some columns replaced."""
    effects, _ = make_effects(1, 3)
    closed = replace(effects.closed, partitions=np.array([2, 0, 2], np.int32))
    return replace(effects, closed=replace(closed, **columns), alerts=[], model="m")  # type: ignore[arg-type]


def get_ids(effects: Effects) -> list[tuple[int, list[str]]]:
    return [(batch.partition, batch.closed.record_ids) for batch in make_evidence(effects)[0]]


def suspects_of(*contributions: Contribution) -> tuple[Suspect, ...]:
    alert = replace(make_alert("r", 0), contributions=contributions)
    (batch,), _ = make_evidence(replace(make_closed_effects(), alerts=[alert], closed=ClosedRecords.empty()))
    return batch.alerts[0].suspects


def make_reading(feature: str, relief: float | None = None, suspect: bool = True, **fields: object) -> Contribution:
    reading = Contribution(feature, 9.1, 11.2, ExpectedRange(-0.27, 0.05, 0.38), relief=relief, suspect=suspect)
    return replace(reading, **fields)  # type: ignore[arg-type]


def test_each_partition_has_its_records_in_the_order_of_closing() -> None:
    assert get_ids(make_closed_effects()) == [(0, ["r2"]), (2, ["r1", "r3"])]
    (_, batch), _ = make_evidence(make_closed_effects(p_value=np.array([0.12345678, 1.0, 1 / 3000])))
    closed = batch.closed
    assert (batch.model, closed.times.tolist(), closed.num_readings.tolist()) == ("m", [TIME, TIME], [3, 3])
    assert (closed.p_values.tolist(), closed.is_alerted.tolist()) == ([0.123457, 0.000333333], [True, True])


def test_records_and_alerts_of_earlier_models_are_batches_of_their_own() -> None:
    """Their p-values and scores must not be compared with the calibration of another model."""
    effects = make_closed_effects(models=["m", "m", "old"])
    alerts = [
        replace(make_alert(record, 0), partition=2, model=model) for record, model in (("r9", "m"), ("r3", "old"))
    ]
    batches, _ = make_evidence(replace(effects, alerts=[*alerts, replace(alerts[0], partition=1, model="older")]))
    assert [
        (batch.partition, batch.model, batch.closed.record_ids, [alert.record for alert in batch.alerts])
        for batch in batches
    ] == [
        (0, "m", ["r2"], []),
        (1, "older", [], ["r9"]),
        (2, "old", ["r3"], ["r3"]),
        (2, "m", ["r1"], ["r9"]),
    ]
    assert {batch.model_name for batch in batches} == {effects.model_name}


def test_records_that_another_process_continues_and_records_without_readings_are_left_out() -> None:
    reasons = [CloseReason.REVOKED, CloseReason.TIMEOUT, CloseReason.END]
    effects = make_closed_effects(reasons=reasons, num_readings=np.array([3, 0, 3], np.int32))
    assert get_ids(effects) == [(2, ["r3"])]


def test_records_without_a_time_are_left_out_and_returned() -> None:
    effects = make_closed_effects(latest_time=np.array([NO_TIME, TIME, TIME]))
    assert get_ids(effects) == [(0, ["r2"]), (2, ["r3"])]
    assert make_evidence(effects)[1] == ["r1"]


def test_nothing_closed_and_no_alert_give_no_batch() -> None:
    assert make_evidence(replace(make_closed_effects(), closed=ClosedRecords.empty())) == ([], [])


def test_alert_of_an_open_record_has_its_suspects_and_what_would_prevent_it() -> None:
    alert = replace(make_alert("r9", 0), partition=1)
    batches, _ = make_evidence(replace(make_closed_effects(), alerts=[alert]))
    (batch,) = (batch for batch in batches if batch.partition == 1)
    assert not len(batch.closed)
    suspect = Suspect("Pressure", 9.1, -0.27, 0.38, 1.0)
    assert batch.alerts == (
        AlertRow("id-of-r9", "r9", 1_583_750_073_000_000, 0.0008, 1, (suspect,), ("Pressure",), 9.31, alpha=0.01),
    )


def test_shares_are_those_of_the_relief_and_negative_relief_counts_as_none() -> None:
    suspects = suspects_of(make_reading("a", 1.0), make_reading("b", 3.0), make_reading("c", -2.0))
    assert [(suspect.feature, suspect.share) for suspect in suspects] == [("b", 0.75), ("a", 0.25), ("c", 0.0)]


def test_without_relief_the_attribution_counts_and_equal_shares_without_any_weight() -> None:
    suspects = suspects_of(make_reading("a", attribution=1.0), make_reading("b", attribution=4.0))
    assert [(suspect.feature, suspect.share) for suspect in suspects] == [("b", 0.8), ("a", 0.2)]
    suspects = suspects_of(make_reading("a", 0.0), make_reading("b", -1.0))
    assert [(suspect.feature, suspect.share) for suspect in suspects] == [("a", 0.5), ("b", 0.5)]


def test_several_readings_of_a_sensor_are_one_suspect() -> None:
    """The features of time slots have names of their own, by which incidents could not be grouped."""
    suspects = suspects_of(
        make_reading("flow+0s", 1.0, sensor="flow"),
        make_reading("flow+10s", 2.0, sensor="flow", value=7.0),
        make_reading("heat", 1.0),
    )
    assert [(suspect.feature, suspect.share, suspect.value) for suspect in suspects] == [
        ("flow", 0.75, 9.1),
        ("heat", 0.25, 9.1),
    ]
    slots = (make_reading("flow+0s", sensor="flow"), make_reading("flow+10s", sensor="flow"))
    alert = replace(make_alert("r", 0), contributions=slots, silenced_by=("flow+0s", "flow+10s", "heat"))
    batches, _ = make_evidence(replace(make_closed_effects(), alerts=[alert]))
    assert batches[0].alerts[0].silenced_by == ("flow", "heat")


def test_without_suspects_the_most_suspicious_reading_is_the_suspect() -> None:
    readings = [make_reading(name, suspect=False) for name in "ab"]
    assert [suspect.feature for suspect in suspects_of(*readings)] == ["a"]
    assert suspects_of() == ()


def test_suspects_are_bounded_and_can_be_encoded() -> None:
    readings = [make_reading(f"s{i}", 1.0 + i) for i in range(9)]
    readings[8] = replace(readings[8], value="x" * 5000)
    readings[7] = replace(readings[7], value=float("nan"), expected=ExpectedRange(float("-inf"), 0.0, 1.0))
    suspects = suspects_of(*readings)
    assert [suspect.feature for suspect in suspects] == ["s8", "s7", "s6", "s5", "s4"]
    assert suspects[0].value == "x" * MAX_LABEL_CHARACTERS
    assert (suspects[1].value, suspects[1].low, suspects[1].high) == (None, None, 1.0)


def test_batches_survive_encoding_without_change() -> None:
    effects = make_closed_effects(
        p_value=np.random.default_rng(0).random(3) + 1e-9, score=np.array([np.pi * 1e7, -1e-9 / 3, np.nan])
    )
    batches, _ = make_evidence(replace(effects, alerts=[replace(make_alert("r", 0), p_value=1 / 7)]))
    for batch in batches:
        again = decode_evidence(encode_evidence(batch))
        assert again.alerts == batch.alerts
        for name in ("times", "p_values", "scores", "num_readings", "is_alerted"):
            assert np.array_equal(getattr(again.closed, name), getattr(batch.closed, name)), name


@given(st.floats(1e-17, 1e15) | st.floats(-1e15, -1e-17), st.integers(1, 8))
def test_rounding_gives_short_numbers_that_differ_little(number: float, digits: int) -> None:
    rounded = float(round_significant(np.array([number]), digits)[0])
    assert abs(rounded - number) <= 0.5000001 * 10 ** (1 - digits) * abs(number)
    text = f"{rounded:.{digits}g}"  # a number at a power of ten can have a digit more
    assert float(text) == rounded or float(f"{rounded:.{digits + 1}g}") == rounded


@pytest.mark.parametrize(("number", "rounded"), [(0.0, 0.0), (1.0, 1.0), (1 / 3, 0.333333), (123456789.0, 123457000.0)])
def test_rounding_examples(number: float, rounded: float) -> None:
    assert round_significant(np.array([number]), 6).tolist() == [rounded]


def test_p_values_of_complete_records_are_stated_where_they_are_known() -> None:
    effects = make_closed_effects(
        record_p_value=np.array([0.0123456789, np.nan, np.nan]), anomaly_score=np.array([-1.2345678, 2.0, np.nan])
    )
    (first, second), _ = make_evidence(effects)
    assert first.closed.record_p_values is None
    assert first.closed.record_scores is not None
    assert first.closed.record_scores.tolist() == [2.0]
    np.testing.assert_array_equal(second.closed.record_p_values, [0.0123457, np.nan])
    np.testing.assert_array_equal(second.closed.record_scores, [-1.2346, np.nan])
