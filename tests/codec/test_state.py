"""Tests of saved state: encoding and decoding is lossless, and any other bytes raise `StateError` with one line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.cusum import StateLayout, create_states
from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.codec.state import (
    DECISIONS,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    SET_VERSION,
    SNAPSHOT,
    check_state,
    decode_decisions_by_model,
    decode_snapshots,
    encode_decisions,
    encode_decisions_by_model,
    encode_snapshot,
    encode_snapshots,
)
from deformer_stream.engine.events import ONLY_MODEL, AlertState, Decisions
from deformer_stream.engine.id_set import StringColumn
from deformer_stream.engine.snapshot import (
    CircularSums,
    CompleteWindows,
    EventTimes,
    Snapshot,
    TieGroups,
    WaitingReadings,
)
from deformer_stream.errors import StateError
from tests.codec.saved_state import decode_decisions, decode_snapshot
from tests.codec.state_examples import DECIDED, EXAMPLE, VOCABULARY, make_ints, make_running
from tests.effort import num_examples
from tests.engine.restarts import assert_same_snapshot

GOLDEN = Path(__file__).parents[1] / "golden"


TIED = replace(EXAMPLE, ties=TieGroups(np.array([False, True, False]), make_ints(2, 0, 0), np.array([5, -(2**63), 7])))
WAITED = replace(DECIDED, tie_timeouts={"a": (2, 3), "ümlaut\0": (1,)})
"""With readings of one time that wait for each other."""

SLOTTED = replace(
    EXAMPLE,
    waiting=WaitingReadings(
        "mean",
        record=make_ints(1, 1),
        feature=np.array([1, 0], np.int16),
        deadline=np.array([1_583_750_075_000_000, 1_583_750_080_000_000]),
        num_values=make_ints(2, 0),
        value=np.array([3.0, 0.0]),
        time=np.array([1_583_750_074_000_000, 1_583_750_076_000_000]),
        unseen=make_ints(0),
        unseen_text=["ümlaut"],
    ),
    complete_windows=CompleteWindows(["pump-9@0"], ["pump-9"], np.array([7])),
)
"""With readings that wait for the end of their time slot, and with a window that is complete before it is over."""

assert SLOTTED.waiting is not None
CIRCULAR = replace(
    SLOTTED,
    waiting=replace(
        SLOTTED.waiting,
        circular=CircularSums(
            sine=np.array([0.0, 0.5]),
            cosine=np.array([0.0, -1.25]),
            period=np.array([0.0, 360.0]),
            start=np.array([0.0, -180.0]),
        ),
    ),
)
"""With a reading whose mean is circular."""

UNIX_2020 = 1_583_750_073_000_000
IRREGULAR = replace(
    EXAMPLE,
    event_times=EventTimes(
        np.array([UNIX_2020, UNIX_2020 - 7, UNIX_2020 + 9]),
        np.array([UNIX_2020, -(2**63), UNIX_2020 + 1]),
        np.zeros(3, np.int64),
    ),
)
"""With irregular readings, none of which was dropped."""

TIMED = replace(EXAMPLE, latest_event_time=np.array([UNIX_2020, -(2**63), UNIX_2020 + 9]))
"""With the latest event time of each record, one of which is not known."""

texts = st.text(max_size=12)
"""Any text but lone surrogates, which no JSON that is accepted carries."""


counted = st.dictionaries(texts, st.lists(st.integers(0, 2**40), max_size=9).map(tuple), max_size=3)
drifts = st.none() | st.builds(
    lambda model, counts, wealth, alarmed: DriftState(model, sum(map(sum, counts.values())), wealth, alarmed, counts),
    texts,
    counted,
    st.tuples(*[st.floats(0, 1e12)] * 3),
    st.booleans(),
)


@st.composite
def draw_snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw consistent snapshots."""
    ids = draw(st.lists(texts, unique=True, max_size=8))
    R, F = len(ids), len(VOCABULARY)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = np.argsort(rng.random((R, F)), axis=1).astype(np.int16)
    counts = rng.integers(0, F + 1, R).astype(np.int32)
    absent = np.array([rng.integers(0, F - c + 1) for c in counts], np.int32)
    features = [order[i, : counts[i]] for i in range(R)]
    gone = [order[i, counts[i] : counts[i] + absent[i]] for i in range(R)]
    codes = np.concatenate([*features, np.empty(0, np.int16)])
    values = np.where(codes == 1, rng.integers(0, 4, len(codes)), rng.normal(size=len(codes)))
    sums = {
        name: rng.normal(size=R)
        for name in ("log_likelihood", "neg_log_p_sum", "min_log_p", "max_statistic", "centered_nll", "p_value")
    }
    prior_sums = {name: rng.normal(size=R) for name in ("prior_neg_log_p_sum", "prior_min_log_p")}
    windowed = np.flatnonzero(rng.random(R) < 0.5).astype(np.int32)
    new = [(i, int(k)) for i in range(R) for k in np.flatnonzero(features[i] == 1)]
    devices = draw(st.lists(texts, unique=True, max_size=4))
    seq = rng.integers(-1, 3, R).astype(np.int32)
    tied = np.concatenate([np.arange(c) > 0 for c in counts] + [np.empty(0, bool)])
    ties = TieGroups(tied, counts * rng.integers(0, 2, R).astype(np.int32), rng.integers(-(2**63), 2**63 - 1, R))
    return Snapshot(
        vocabulary=VOCABULARY,
        models=("m", "n"),
        ids=ids,
        model=rng.integers(0, 2, R).astype(np.int32),
        idle_micros=rng.integers(-(2**40), 2**40, R),
        counts=counts,
        features=codes,
        values=values,
        num_declared_missing=absent,
        declared_missing=np.concatenate([*gone, np.empty(0, np.int16)]),
        running=make_running(num_scored=counts, **sums, **draw(st.sampled_from([{}, prior_sums]))),
        alert_seq=seq,
        alert_alpha=np.where(seq < 0, 1.0, rng.uniform(0, 0.5, R)),
        unseen_record=make_ints(*(i for i, _ in new)),
        unseen_place=make_ints(*(k for _, k in new)),
        unseen_text=[draw(texts) for _ in new],
        window_record=windowed,
        window_device=[draw(texts) for _ in windowed],
        window_deadline=rng.integers(-(2**60), 2**60, len(windowed)),
        closed=StringColumn.from_strings(draw(st.lists(texts, max_size=8))),
        devices=devices,
        marks=rng.integers(-(2**60), 2**60, len(devices)),
        drift=draw(drifts),
        ties=draw(st.sampled_from([None, ties])),
        latest_event_time=draw(st.sampled_from([None, rng.integers(-(2**60), 2**60, R)])),
    )


def change_running(snapshot: Snapshot, **columns: Any) -> Snapshot:
    """Return a snapshot with other running statistics."""
    running = snapshot.running.copy()
    for name, column in columns.items():
        running[name] = column
    return replace(snapshot, running=running)


@settings(max_examples=num_examples(150), deadline=None)
@given(snapshot=draw_snapshots())
def test_decoded_snapshot_equals_encoded_snapshot(snapshot: Snapshot) -> None:
    assert_same_snapshot(decode_snapshot(encode_snapshot(snapshot)), snapshot)


@settings(max_examples=num_examples(100), deadline=None)
@given(
    closed=st.lists(texts),
    alerted=st.dictionaries(texts, st.builds(AlertState, st.integers(0, 2**31 - 1), st.floats(0, 0.999))),
    drift=drifts,
)
def test_decoded_decisions_equal_encoded_decisions(
    closed: list[str], alerted: dict[str, AlertState], drift: DriftState | None
) -> None:
    decisions = Decisions(tuple(closed), alerted, drift)
    again = decode_decisions(encode_decisions(decisions))
    assert again == decisions
    assert list(again.alert_states) == list(alerted)


@pytest.mark.parametrize(("records", "smaller"), [(10, False), (10_000, True)])
def test_large_state_is_compressed(records: int, smaller: bool) -> None:
    decisions = Decisions(tuple(f"record-{i}" for i in range(records)))
    data = encode_decisions(decisions)
    assert (len(data) < sum(map(len, decisions.closed_ids))) == smaller
    assert decode_decisions(data) == decisions


def test_format_version_2_is_read() -> None:
    """Bytes written by a release must stay readable; a change of the format increases FORMAT_VERSION."""
    assert FORMAT_VERSION == 12
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v2").read_bytes()), EXAMPLE)
    assert decode_decisions((GOLDEN / "decisions.v2").read_bytes()) == DECIDED
    head = (GOLDEN / "snapshot.v2").read_bytes()[: HEADER.size]
    assert head[:11] == b"deformerS\x00\x02"


def test_format_version_3_is_written_only_for_ties() -> None:
    """Without tie groups version 2 is written, which earlier releases can read."""
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v3").read_bytes()), TIED)
    assert decode_decisions((GOLDEN / "decisions.v3").read_bytes()) == WAITED
    written = (encode_snapshot(EXAMPLE), encode_snapshot(TIED), encode_decisions(DECIDED), encode_decisions(WAITED))
    assert [data[10] for data in written] == [2, 3, 2, 3]


@pytest.mark.parametrize("ties", [None, TIED.ties])
@pytest.mark.parametrize("parts", [("waiting", "complete_windows"), ("waiting",), ("complete_windows",)])
def test_format_version_4_is_written_only_for_time_slots(ties: TieGroups | None, parts: tuple[str, ...]) -> None:
    """Since version 4, the columns of tie groups are missing if there are no tie groups."""
    snapshot = replace(EXAMPLE, ties=ties, **{name: getattr(SLOTTED, name) for name in parts})
    data = encode_snapshot(snapshot)
    assert data[10] == 4
    assert_same_snapshot(decode_snapshot(data), snapshot)
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v4").read_bytes()), SLOTTED)


def test_format_version_5_is_written_only_for_circular_means() -> None:
    """The sums of sines and cosines are an addition, so version 4 has the same other columns."""
    data = encode_snapshot(CIRCULAR)
    assert data[10] == 5
    assert_same_snapshot(decode_snapshot(data), CIRCULAR)
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v5").read_bytes()), CIRCULAR)


def test_format_version_7_is_written_for_irregular_readings() -> None:
    """Since version 7, the columns of all parts that a snapshot does not have are missing."""
    assert IRREGULAR.event_times is not None
    sums = (
        np.random.default_rng(0).exponential(size=(3, StateLayout(len(IRREGULAR.vocabulary)).width)).astype(np.float32)
    )
    num_sensors = len(IRREGULAR.vocabulary)
    sums[:, -2 * num_sensors :] = 0.0  # the sums "level" and "step", for which there are versions 9 and 10
    dropping = replace(
        IRREGULAR, event_times=replace(IRREGULAR.event_times, num_dropped=np.array([7, 0, 2**40])), cusums=sums
    )
    data = encode_snapshot(dropping)
    assert data[10] == 7
    assert_same_snapshot(decode_snapshot(data), dropping)
    for part in ({"waiting": SLOTTED.waiting}, {"waiting": CIRCULAR.waiting}, {"ties": TIED.ties}):
        snapshot = replace(dropping, **part)
        assert_same_snapshot(decode_snapshot(encode_snapshot(snapshot)), snapshot)


@pytest.mark.parametrize(("has_level", "has_step", "version"), [(True, False, 9), (False, True, 10), (True, True, 10)])
def test_format_versions_9_and_10_are_written_only_for_sums_of_levels_and_of_steps(
    has_level: bool, has_step: bool, version: int
) -> None:
    num_sensors = len(IRREGULAR.vocabulary)
    sums = create_states(3, num_sensors)
    if has_level:
        sums[1, -num_sensors - 1] = 2.5
    if has_step:
        sums[2, -num_sensors:] = 1.5
    data = encode_snapshot(replace(IRREGULAR, cusums=sums))
    assert data[10] == version
    restored = decode_snapshot(data).cusums
    assert restored is not None
    np.testing.assert_array_equal(restored, sums)


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"ties": TIED.ties},
        {"waiting": CIRCULAR.waiting},
        {"event_times": IRREGULAR.event_times, "cusums": create_states(3, len(EXAMPLE.vocabulary))},
    ],
)
def test_format_version_8_is_written_only_for_event_times(part: dict[str, Any]) -> None:
    snapshot = replace(TIMED, **part)
    data = encode_snapshot(snapshot)
    assert data[10] == 8
    assert_same_snapshot(decode_snapshot(data), snapshot)
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v8").read_bytes()), TIMED)


def test_format_version_12_is_written_only_for_p_values_under_the_prior() -> None:
    snapshot = change_running(EXAMPLE, prior_neg_log_p_sum=[3.5, 0.0, 1.0], prior_min_log_p=[-2.0, 0.0, -1.0])
    data = encode_snapshot(snapshot)
    assert data[10] == 12
    assert_same_snapshot(decode_snapshot(data), snapshot)
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v12").read_bytes()), snapshot)
    damaged = change_running(snapshot, prior_min_log_p=[0.0, np.nan, 1.0])
    assert_rejected(decode_snapshot, encode_snapshot(damaged), "'prior_least' is not finite")


def test_event_times_must_fit_the_records() -> None:
    for times in ([1, 2], [1, 2, 2**62], [1, 2, -(2**62)]):
        data = encode_snapshot(replace(EXAMPLE, latest_event_time=np.array(times)))
        assert_rejected(decode_snapshot, data, "latest event time")


def test_cumulative_sums_must_fit_the_records() -> None:
    assert_rejected(decode_snapshot, encode_snapshot(replace(IRREGULAR, cusums=np.zeros((3, 5), np.float32))), "sums")
    # Without sums, those of records without readings are written.
    initial = decode_snapshot(encode_snapshot(replace(IRREGULAR, cusums=None))).cusums
    assert initial is not None
    assert np.array_equal(initial, create_states(3, len(IRREGULAR.vocabulary)))


def test_format_version_6_has_all_irregular_readings() -> None:
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v6").read_bytes()), IRREGULAR)


def test_format_version_1_suppresses_further_alerts() -> None:
    """Version 1 does not state the alpha of an alert, so records with an alert do not alert again."""
    assert (GOLDEN / "snapshot.v1").read_bytes()[9:11] == b"\x00\x01"
    old = replace(EXAMPLE, drift=None, alert_seq=make_ints(1, -1, -1), alert_alpha=np.array([0.0, 1.0, 1.0]))
    assert_same_snapshot(decode_snapshot((GOLDEN / "snapshot.v1").read_bytes()), old)
    told = {"a": AlertState(3, 0.0), "": AlertState(0, 0.0)}
    assert decode_decisions((GOLDEN / "decisions.v1").read_bytes()) == Decisions(DECIDED.closed_ids, told)


def assert_rejected(decode: Callable[[bytes, str], object], data: bytes, what: str) -> None:
    """Assert that decoding raises a `StateError` of one line with the description, the problem and the remedy."""
    with pytest.raises(StateError) as caught:
        decode(data, "partition 3")
    message = str(caught.value)
    assert message.startswith("partition 3: ")
    assert what in message
    assert message.endswith("how to continue without it")
    assert "\n" not in message


KINDS: dict[str, tuple[Callable[[bytes, str], object], bytes]] = {
    "snapshot": (decode_snapshot, encode_snapshot(EXAMPLE)),
    "decisions": (decode_decisions, encode_decisions(DECIDED)),
    "ties": (decode_snapshot, encode_snapshot(TIED)),
    "slots": (decode_snapshot, encode_snapshot(SLOTTED)),
    "cycles": (decode_snapshot, encode_snapshot(CIRCULAR)),
    "times": (decode_snapshot, encode_snapshot(IRREGULAR)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_state_is_rejected(kind: str) -> None:
    decode, data = KINDS[kind]
    for size in {*range(60), *range(60, len(data), 97), len(data) - 1}:
        assert_rejected(decode, data[:size], "cut short")


@settings(max_examples=num_examples(200), deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), place=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_altered_state_is_rejected(kind: str, place: int, flip: int) -> None:
    decode, data = KINDS[kind]
    place %= len(data)
    assert_rejected(decode, data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :], "")


@settings(max_examples=num_examples(100), deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.binary(max_size=300))
def test_random_bytes_are_rejected(kind: str, data: bytes) -> None:
    decode = KINDS[kind][0]
    assert_rejected(decode, data, "")
    assert_rejected(decode, add_header(data, DECISIONS if kind == "decisions" else SNAPSHOT), "cannot be read")


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 65535])
def test_unsupported_format_version_is_named(version: int) -> None:
    data = encode_snapshot(EXAMPLE)
    head = HEADER.pack(MAGIC, SNAPSHOT, version, data[11 : HEADER.size])
    assert_rejected(
        decode_snapshot,
        head + data[HEADER.size :],
        f"version {version}, but this release of deformer-stream reads versions 1 to {FORMAT_VERSION}",
    )


def test_snapshot_and_decisions_are_not_interchangeable() -> None:
    assert_rejected(decode_snapshot, encode_decisions(DECIDED), "of another kind")
    assert_rejected(decode_decisions, encode_snapshot(EXAMPLE), "of another kind")
    assert_rejected(decode_snapshot, b"PAR1" + bytes(100), "another program")


def add_header(body: bytes, kind: bytes = SNAPSHOT) -> bytes:
    """Return a body with a valid header."""
    return HEADER.pack(MAGIC, kind, 2, hashlib.sha256(body).digest()) + body


def encode_changed_table(change: Callable[[pa.Table], pa.Table]) -> bytes:
    """Return the example with its table changed by a function, under a valid checksum."""
    table = change(pa.ipc.open_stream(encode_snapshot(EXAMPLE)[HEADER.size :]).read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return add_header(sink.getvalue().to_pybytes())


def test_columns_and_rows_are_checked() -> None:
    assert_same_snapshot(decode_snapshot(encode_changed_table(lambda table: table)), EXAMPLE)
    assert_rejected(decode_snapshot, encode_changed_table(lambda table: table.drop_columns(["age"])), "columns")
    assert_rejected(decode_snapshot, encode_changed_table(lambda table: pa.concat_tables([table, table])), "2 rows")
    assert_rejected(decode_snapshot, encode_changed_table(lambda table: table.slice(0, 0)), "0 rows")
    null = pa.array([["a", None]], pa.large_list(pa.large_string()))
    at = list(pa.ipc.open_stream(encode_snapshot(EXAMPLE)[HEADER.size :]).schema.names).index("closed")
    assert_rejected(
        decode_snapshot, encode_changed_table(lambda table: table.set_column(at, "closed", null)), "missing"
    )
    two = pa.array([[0.0, 1.0]], pa.large_list(pa.float64()))
    for name in ("total", "excess", "p_value"):
        at = list(pa.ipc.open_stream(encode_snapshot(EXAMPLE)[HEADER.size :]).schema.names).index(name)
        data = encode_changed_table(lambda table, at=at, name=name: table.set_column(at, name, two))  # type: ignore[misc]
        assert_rejected(decode_snapshot, data, f"the column {name!r} does not have one value per record")


def test_inconsistent_time_slots_are_rejected() -> None:
    waiting, complete = SLOTTED.waiting, SLOTTED.complete_windows
    assert waiting is not None
    assert complete is not None
    faults: list[dict[str, Any]] = [
        {"rule": "median"},
        {"record": make_ints(0, 1)},
        {"record": make_ints(1, 3)},
        {"record": make_ints(1)},
        {"feature": np.array([1, 3], np.int16)},
        {"feature": np.array([1, 1], np.int16)},
        {"feature": np.array([1, 2], np.int16)},
        {"num_values": make_ints(-1, 0)},
        {"value": np.array([np.nan, 0.0])},
        {"value": np.array([0.5, 0.0])},
        {"value": np.array([4.0, 0.0])},
        {"deadline": np.array([1])},
        {"unseen": make_ints(2)},
        {"unseen_text": []},
    ]
    for fault in faults:
        assert_rejected(decode_snapshot, encode_snapshot(replace(SLOTTED, waiting=replace(waiting, **fault))), "")
    circular_waiting = CIRCULAR.waiting
    assert circular_waiting is not None
    assert circular_waiting.circular is not None
    for fault in ({"sine": np.array([0.0, np.nan])}, {"period": np.array([0.0, -1.0])}, {"start": np.zeros(1)}):
        sums = replace(circular_waiting.circular, **fault)
        damaged = replace(CIRCULAR, waiting=replace(circular_waiting, circular=sums))
        assert_rejected(decode_snapshot, encode_snapshot(damaged), "circular")
    wrong_rule = replace(CIRCULAR, waiting=replace(circular_waiting, rule="last"))
    assert_rejected(decode_snapshot, encode_snapshot(wrong_rule), "circular")
    for fault in ({"devices": []}, {"deadlines": np.array([1, 2])}, {"ids": []}):
        damaged = replace(SLOTTED, complete_windows=replace(complete, **fault))
        assert_rejected(decode_snapshot, encode_snapshot(damaged), "")


def test_inconsistent_snapshots_are_rejected() -> None:
    faults: list[dict[str, Any]] = [
        {"ids": ["a", "b", "a"]},
        {"ids": ["a", "b"]},
        {"idle_micros": EXAMPLE.idle_micros[:2]},
        {"idle_micros": np.array([0, 2**62, 0])},
        {"running": EXAMPLE.running[:2]},
        {"model": make_ints(2, 0, 0)},
        {"model": make_ints(-1, 0, 0)},
        {"counts": make_ints(4, 0, 1)},
        {"counts": make_ints(2, 1, 1)},
        {"counts": make_ints(3, -1, 1)},
        {"declared_missing": np.array([2, 0], np.int16)},
        {"declared_missing": np.array([2, 0, 1], np.int16)},
        {"features": np.array([1, 1, 1], np.int16)},
        {"features": np.array([1, 3, 1], np.int16)},
        {"features": np.array([1, -1, 1], np.int16)},
        {"values": np.array([3.0, np.nan, 2.0])},
        {"values": np.array([3.5, 0.0, 2.0])},
        {"values": np.array([4.0, 0.0, 2.0])},
        {"values": np.array([-1.0, 0.0, 2.0])},
        {"values": np.array([1e300, 0.0, 2.0])},
        {"running": change_running(EXAMPLE, max_statistic=[np.inf, 0.0, 0.0]).running},
        {"running": change_running(EXAMPLE, num_scored=[-1, 0, 0]).running},
        {"alert_seq": make_ints(-2, 0, 0)},
        {"alert_seq": make_ints(-1, -1, 0)},
        {"alert_alpha": np.array([0.01, 0.01, 0.01])},
        {"alert_alpha": np.array([-0.01, 1.0, 0.01])},
        {"alert_alpha": np.array([np.nan, 1.0, 0.01])},
        {"alert_alpha": EXAMPLE.alert_alpha[:2]},
        {"unseen_record": make_ints(3)},
        {"unseen_place": make_ints(2)},
        {"unseen_text": []},
        {"window_record": make_ints(3)},
        {"window_device": []},
        {"devices": ["a", "a"]},
        {"drift": replace(EXAMPLE.drift, num_records=8)},
        {"drift": replace(EXAMPLE.drift, wealth_by_bet=(1.0, 1.0))},
        {"drift": replace(EXAMPLE.drift, wealth_by_bet=(1.0, 1.0, np.nan))},
        {"drift": replace(EXAMPLE.drift, wealth_by_bet=(1.0, 1.0, -1.0))},
        {"drift": replace(EXAMPLE.drift, bin_counts_by_group={"": (8, -1)})},
        {"marks": EXAMPLE.marks[:1]},
        {"vocabulary": replace(VOCABULARY, names=("flow", "mode", "mode"))},
        {"vocabulary": replace(VOCABULARY, names=("flow", "mode"))},
        {"vocabulary": replace(VOCABULARY, kinds=("continuous", "discrete", "vague"))},
    ]
    for fault in faults:
        assert_rejected(decode_snapshot, encode_snapshot(replace(EXAMPLE, **fault)), "")


def test_inconsistent_ties_are_rejected() -> None:
    good = TIED.ties
    assert good is not None
    faults: list[dict[str, Any]] = [
        {"is_tied": np.array([False, True])},
        {"is_tied": np.array([True, False, False])},
        {"num_pending": make_ints(2, 0)},
        {"num_pending": make_ints(3, 0, 0)},
        {"num_pending": make_ints(-1, 0, 0)},
        {"num_pending": make_ints(1, 0, 0)},
        {"tie_time": np.array([5, 5])},
    ]
    for fault in faults:
        assert_rejected(decode_snapshot, encode_snapshot(replace(TIED, ties=replace(good, **fault))), "")
    assert_rejected(decode_decisions, encode_decisions(Decisions(tie_timeouts={"a": (0,)})), "before the first reading")


def test_inconsistent_decisions_are_rejected() -> None:
    assert_rejected(
        decode_decisions, encode_decisions(Decisions((), {"a": AlertState(-1)})), "before the first reading"
    )
    assert_rejected(
        decode_decisions, encode_decisions(Decisions((), {"a": AlertState(1, 1.0)})), "is not between 0 and 1"
    )


SEVERAL = {"fan/1": EXAMPLE, "pump ü": TIED}


def test_state_of_several_models_is_read_as_it_was_written() -> None:
    data = encode_snapshots(SEVERAL)
    assert data[8:11] == b"S\x00\x0b"
    found = decode_snapshots(data)
    assert list(found) == list(SEVERAL)
    for name, snapshot in SEVERAL.items():
        assert_same_snapshot(found[name], snapshot)
    decisions = {"a": DECIDED, "b": WAITED}
    assert decode_decisions_by_model(encode_decisions_by_model(decisions)) == decisions
    check_state(data, [encode_decisions_by_model(decisions)])
    assert decode_snapshots(encode_snapshots({})) == {}


def test_state_of_the_only_model_has_the_format_of_earlier_releases() -> None:
    assert encode_snapshots({ONLY_MODEL: EXAMPLE}) == encode_snapshot(EXAMPLE)
    assert encode_decisions_by_model({ONLY_MODEL: DECIDED}) == encode_decisions(DECIDED)
    assert_same_snapshot(decode_snapshots(encode_snapshot(EXAMPLE))[ONLY_MODEL], EXAMPLE)


def test_state_of_one_model_is_not_that_of_several() -> None:
    one, several, empty = encode_snapshot(EXAMPLE), encode_snapshots(SEVERAL), encode_snapshots({})
    for snapshot, has_one_model in ((one, True), (several, False), (empty, False)):
        check_state(snapshot, [], has_one_model)
    with pytest.raises(StateError, match=r"process with --model, which --models cannot continue.*--lost-state"):
        check_state(one, [], has_one_model=False)
    with pytest.raises(StateError, match=r"process with --models, which --model cannot continue.*--lost-state"):
        check_state(several, [], has_one_model=True)


def seal(body: bytes, kind: bytes = b"S") -> bytes:
    """Return the state of several models with a valid header."""
    return HEADER.pack(b"deformer", kind, SET_VERSION, hashlib.sha256(body).digest()) + body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the list of its models cannot be read"),
        (b"[[1, 2]]\n", "no name of its own"),
        (b'[["", 0]]\n', "no name of its own"),
        (b'[["a", 0], ["a", 0]]\n', "no name of its own"),
        (b'[["a", 1]]\n', "no valid length"),
        (b'[["a", -1]]\nx', "no valid length"),
        (b'[["a", true]]\nx', "no valid length"),
        (b"[]\nx", "more bytes"),
        (b"{}\nx", "more bytes"),
        (b'["a"]\n', "the list of its models cannot be read"),
        (b'[["a", 1]]\nx', "cut short"),
        (b"[" * 100_000, "the list of its models cannot be read"),
    ],
)
def test_damaged_list_of_models_raises_state_error(body: bytes, said: str) -> None:
    for decode in (decode_snapshots, lambda data: check_state(data, [])):
        with pytest.raises(StateError, match=said):
            decode(seal(body))


def test_state_of_several_models_has_a_checksum_and_a_kind() -> None:
    data = encode_snapshots(SEVERAL)
    with pytest.raises(StateError, match="checksum mismatch"):
        decode_snapshots(data[:-1])
    with pytest.raises(StateError, match="another kind"):
        decode_decisions_by_model(data)
    nested = f'[["a", {len(data)}]]\n'.encode() + data
    with pytest.raises(StateError, match="several models, where that of one model is expected"):
        decode_snapshots(seal(nested))
