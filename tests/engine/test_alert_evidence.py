"""The evidence of alerts of irregular readings: which cumulative sum has raised an alert of a simulated process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import KINDS, NEVER, TIE_TOLERANCE, CusumScale, find_largest_kinds
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.codec.alert_text import format_alert_line, summarize_cause
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine import explain_contexts
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Alert, AlertCause, EventBatch
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.engine.explain_contexts import explain_context
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from tests.codec.saved_state import decode_snapshot
from tests.engine.exact_models import NUM_SENSORS, PROCESS_SCHEMA, make_exact_model, make_process_batch, simulate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

QUANTUM, ONSET, FAULTY = 0.01, 60, 2
"""Resolution of all sensors, position from which a record has the fault, and the faulty sensor."""


def make_quantized_model(is_compiled: bool) -> DEformer:
    """Return the model of the simulated process whose sensors have a resolution, without which nothing is repeated."""
    exact = make_exact_model()
    features = tuple(Feature(f"sensor{i}", "continuous", unit="bar", quantum=QUANTUM) for i in range(NUM_SENSORS))
    schema = Schema(features, reading_times=PROCESS_SCHEMA.reading_times)
    model = DEformer(schema, exact.config).eval()
    model.load_state_dict(exact.state_dict())
    model.kernel_library = load_library(False) if is_compiled else None
    assert (model.kernel_library is not None) == is_compiled
    return model


def make_engine(
    is_compiled: bool = True,
    effort: ExplanationEffort = "full",
    alphas: tuple[float, ...] = (0.05,),
    scale: CusumScale | None = None,
) -> Engine:
    """Return an engine that raises alerts at statistics above about 15 nats."""
    scale = scale or CusumScale.neutral(NUM_SENSORS)
    calibration = Calibration.from_statistics(np.linspace(0.0, 15.5, 200), "arrival", cusum_scale=scale)
    return Engine(make_quantized_model(is_compiled), calibration, "process", alphas, effort=effort)


def make_stuck(rng: np.random.Generator, codes: Ints, values: Floats) -> Floats:
    """Let the sensor repeat its last value before the onset."""
    faulty = np.flatnonzero(codes == FAULTY)
    last_value = values[faulty[faulty < ONSET][-1]]
    values[faulty[faulty >= ONSET]] = last_value
    return values


def add_ramp(rng: np.random.Generator, codes: Ints, values: Floats) -> Floats:
    """Let the sensor drift away slowly, so that its own readings predict the next ones."""
    faulty = np.flatnonzero(codes == FAULTY)
    values[faulty] += 0.12 * np.arange(len(faulty))
    return values


def add_noise(rng: np.random.Generator, codes: Ints, values: Floats) -> Floats:
    """Let the sensor jump up and down."""
    faulty = np.flatnonzero((codes == FAULTY) & (np.arange(len(codes)) >= ONSET))
    values[faulty] += 0.9 * (-1.0) ** np.arange(len(faulty))
    return values


def add_spike(rng: np.random.Generator, codes: Ints, values: Floats) -> Floats:
    """Let the sensor have one reading that is far away."""
    values[np.flatnonzero((codes == FAULTY) & (np.arange(len(codes)) >= ONSET))[0]] += 30.0
    return values


def disturb_all(rng: np.random.Generator, codes: Ints, values: Floats) -> Floats:
    """Let all sensors have improbable readings."""
    values[ONSET:] += 0.8 * rng.choice([-1.0, 1.0], len(values) - ONSET)
    return values


Fault = Callable[[np.random.Generator, Ints, Floats], Floats]
FAULTS: dict[str, Fault] = {
    "improbable": add_noise,
    "offset": add_ramp,
    "repeated": make_stuck,
    "extreme": add_spike,
    "record": disturb_all,
}
TEXTS = {
    "improbable": "evidence: {sensor} is improbable (",
    "offset": "evidence: {sensor} differs from what other sensors imply (",
    "repeated": "evidence: {sensor} repeats its last value (",
    "extreme": "evidence: {sensor} has a very improbable reading (",
    "record": "evidence: improbable readings of several sensors (",
}


def make_records(kind: str, num_records: int, seed: int = 3) -> EventBatch:
    """Return records of the process with a fault whose evidence should be of this kind."""
    rng, records = np.random.default_rng(seed), []
    for _ in range(num_records):
        codes, values, ages = simulate(rng, 120)
        records.append((codes, FAULTS[kind](rng, codes, values).round(2), ages))
    return make_process_batch(records)


def handle_in_parts(engine: Engine, batch: EventBatch, size: int) -> list[Alert]:
    """Return the alerts of a batch that arrives in parts of `size` events."""
    alerts = []
    for start in range(0, len(batch), size):
        part = slice(start, start + size)
        alerts += engine.handle(
            EventBatch(
                batch.record_ids[part],
                batch.features[part],
                batch.values[part],
                batch.times[part],
                np.arange(len(batch.record_ids[part]), dtype=np.int32),
                batch.partitions[part],
            ),
            0,
        ).alerts
    return [replace(alert, message_index=0) for alert in alerts]


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("kind", FAULTS)
def test_an_alert_names_the_kind_of_evidence_and_the_sensor(kind: str, is_compiled: bool) -> None:
    alerts = make_engine(is_compiled).handle(make_records(kind, 10), 0).alerts
    expected = AlertCause(kind, None if kind == "record" else f"sensor{FAULTY}")
    # A record without the fault would raise an alert of any kind with a probability of 5%.
    assert [alert.evidence for alert in alerts].count(expected) >= 8
    for alert in alerts:
        evidence = alert.evidence
        assert evidence is not None
        assert (evidence.sensor is None) == (evidence.kind == "record")
        assert TEXTS[evidence.kind].format(sensor=evidence.sensor) in format_alert_line(alert)
        summary = summarize_cause(alert)
        assert (summary["evidence"], summary.get("evidence_sensor")) == (evidence.kind, evidence.sensor)
        if evidence.sensor is None:
            continue
        # The suspects are the last readings of the sensor.
        assert alert.contributions[0].feature == evidence.sensor
        own = [part for part in alert.contributions if part.feature == evidence.sensor]
        own.sort(key=lambda part: part.time or 0)
        suspects = [part for part in alert.contributions if part.suspect]
        assert {part.time for part in suspects} == {part.time for part in own[-len(suspects) :]}
        assert own[-1].time == alert.time
        if evidence.kind == "repeated":
            assert {part.value for part in suspects} == {own[-1].value}
            # The reading before the repeated ones has another value, or is not in the context any more.
            assert len(own) == len(suspects) or own[-len(suspects) - 1].value != own[-1].value


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_sensor_whose_level_is_unusual_raises_an_alert(is_compiled: bool) -> None:
    """A scale that counts nothing else: the sensor has values that no normal record has, from the beginning."""
    intercepts = np.full((6, NUM_SENSORS), NEVER)
    intercepts[KINDS.index("level")] = 0.0
    edges = np.tile(np.linspace(-8.0, 8.0, 41), (NUM_SENSORS, 1))
    marginals = Marginals(edges, np.full(NUM_SENSORS, 10_000))
    scale = CusumScale(np.ones((6, NUM_SENSORS)), intercepts, 0.0, NEVER, marginals)
    codes, values, ages = simulate(np.random.default_rng(3), 120)
    normal = make_process_batch([(codes, values.round(2), ages)])
    assert not make_engine(is_compiled, scale=scale).handle(normal, 0).alerts
    values[codes == FAULTY] = 30.0 + 0.01 * np.arange((codes == FAULTY).sum())
    (alert,) = (
        make_engine(is_compiled, scale=scale).handle(make_process_batch([(codes, values.round(2), ages)]), 0).alerts
    )
    assert alert.evidence == AlertCause("level", f"sensor{FAULTY}")
    assert f"evidence: sensor{FAULTY} has unusual values (" in format_alert_line(alert)
    # Four readings, each with ln κ + (1 − κ) ln 10,001 nats, are more than 15.
    assert alert.score == pytest.approx(3 * (math.log(0.2) + 0.8 * math.log(10_001)), rel=0.4)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_sensor_with_unusual_steps_raises_an_alert(is_compiled: bool) -> None:
    """A scale that counts nothing else: the sensor alternates between two usual values."""
    intercepts = np.full((6, NUM_SENSORS), NEVER)
    intercepts[KINDS.index("step")] = 0.0
    edges = np.tile(np.linspace(-6.0, 6.0, 41), (NUM_SENSORS, 1))
    counts, num_steps = np.full((NUM_SENSORS, 40), 250), np.full(NUM_SENSORS, 10_000)
    scale = CusumScale(
        np.ones((6, NUM_SENSORS)), intercepts, 0.0, NEVER, steps=Steps(np.ones(NUM_SENSORS), edges, counts, num_steps)
    )
    codes, values, ages = simulate(np.random.default_rng(3), 120)
    normal = make_process_batch([(codes, values.round(2), ages)])
    assert not make_engine(is_compiled, scale=scale).handle(normal, 0).alerts
    values[codes == FAULTY] = 4.0 * (-1.0) ** np.arange((codes == FAULTY).sum())
    batch = make_process_batch([(codes, values.round(2), ages)])
    (alert,) = make_engine(is_compiled, scale=scale).handle(batch, 0).alerts
    assert alert.evidence == AlertCause("step", f"sensor{FAULTY}")
    assert f"evidence: sensor{FAULTY} changes by unusual steps (" in format_alert_line(alert)
    # The first reading has no step. Each of the next ones adds ln λ + (1 − λ) ln 10,001 nats.
    increment = math.log(0.1) + 0.9 * math.log(10_001)
    assert alert.score / increment == pytest.approx(round(alert.score / increment), abs=1e-4)
    again = handle_in_parts(make_engine(is_compiled, scale=scale), batch, 7)
    assert again == [replace(alert, message_index=0)]


def test_the_division_into_batches_does_not_change_the_evidence() -> None:
    for kind in FAULTS:
        batch = make_records(kind, 2)
        expected = handle_in_parts(make_engine(), batch, len(batch))
        assert len(expected) == 2
        for size in (1, 7):
            assert handle_in_parts(make_engine(), batch, size) == expected


def test_fast_explanations_mark_readings_of_the_sensor_of_the_evidence() -> None:
    for kind in ("improbable", "offset", "repeated", "extreme"):
        for alert in make_engine(effort="fast").handle(make_records(kind, 3), 0).alerts:
            assert alert.evidence is not None
            suspects = [part for part in alert.contributions if part.suspect]
            assert {part.feature for part in suspects} == {alert.evidence.sensor}
            assert alert.time in {part.time for part in suspects}
            assert (len(suspects) > 1) == (alert.evidence.kind == "repeated")


def test_a_snapshot_without_open_records_is_restored() -> None:
    engine = make_engine()
    handle_in_parts(engine, make_records("repeated", 1), 200)
    engine.finish()
    snapshot = decode_snapshot(encode_snapshot(engine.snapshot(0, 0)))
    assert len(snapshot) == 0
    make_engine().restore(0, snapshot, 0)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_alert_without_a_rise_of_the_score_has_no_evidence(is_compiled: bool) -> None:
    """After a restart with other alphas, a normal reading raises the alert for earlier ones."""
    batch = make_records("repeated", 1)
    engine = make_engine(is_compiled, alphas=())
    assert not handle_in_parts(engine, batch, len(batch))
    assert engine.records.running["max_statistic"][0] > 20
    resumed = make_engine(is_compiled, effort="fast")
    resumed.restore(0, decode_snapshot(encode_snapshot(engine.snapshot(0, 0))), 0)
    normal = make_process_batch(
        [(np.array([0]), np.array([batch.values[batch.features == 0][-1]]), np.array([3600.0]))]
    )
    (alert,) = resumed.handle(normal, 0).alerts
    assert alert.evidence is None
    assert "evidence" not in format_alert_line(alert)
    assert "evidence" not in summarize_cause(alert)


@pytest.mark.parametrize("max_candidates", [4, 256])
def test_suspects_of_evidence_need_not_be_candidates(max_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of a stuck sensor are likely, so a large context has other candidates."""
    monkeypatch.setattr(explain_contexts, "MAX_CONTEXT_CANDIDATES", max_candidates)
    model, rng = make_quantized_model(False), np.random.default_rng(0)
    codes, values, ages = simulate(rng, 40)
    codes[-6:], values[-6:] = FAULTY, 0.5
    times = np.round(1e6 * ages).astype(np.int64)
    for kind in ("repeated", "improbable", "offset"):
        evidence = AlertCause(kind, f"sensor{FAULTY}")
        parts = explain_context(model, codes, values, ages, times, "r", {}, evidence=evidence).contributions
        assert len(parts) == 40
        assert np.isfinite([part.surprise for part in parts]).all()
        suspects = {part.time for part in parts if part.suspect}
        assert times[-1] in suspects
        assert {part.feature for part in parts if part.suspect} == {f"sensor{FAULTY}"}
        if kind == "repeated":
            assert suspects == set(times[-6:].tolist())


@pytest.mark.parametrize("effort", ["full", "fast"])
@pytest.mark.parametrize("kind", ["repeated", "improbable", "offset"])
def test_all_readings_of_a_record_can_be_suspects(kind: str, effort: ExplanationEffort) -> None:
    evidence, times = AlertCause(kind, "sensor0"), np.arange(4)
    for length in (1, 4):
        arguments = np.zeros(length, np.int64), np.full(length, 0.5), 60.0 * times[:length], times[:length]
        model = make_quantized_model(False)
        parts = explain_context(model, *arguments, "r", {}, effort, evidence=evidence).contributions
        assert len(parts) == length
        num_suspects = sum(part.suspect for part in parts)
        assert num_suspects == length if kind == "repeated" else num_suspects >= 1


def test_the_first_of_equal_statistics_is_the_evidence() -> None:
    """Statistics count as equal up to rounding, so that batches do not decide."""
    statistics = np.array([[1.0, 5.0, 2.0, 0.0], [3.0, 5.0, 2.0, 0.0], [3.0, 9.0, 2.0, 0.0], [3.0, 9.0, 7.0, 0.0]])
    for noise in (0.0, 0.4 * TIE_TOLERANCE):
        noisy = statistics + noise * np.array([[-1.0], [0.5], [1.0], [1.0]])
        assert find_largest_kinds(noisy[:, None]).tolist() == [[1, 2, 3, 0]]
