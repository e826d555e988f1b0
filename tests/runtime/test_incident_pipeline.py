"""The loop that makes incidents: the same messages whatever the restarts, and what it does with unusual input."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest

from deformer_stream import log
from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.codec.encode_evidence import LaterEvidenceError, encode_evidence
from deformer_stream.codec.incident_state import decode_incident_state
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.state_header import HEADER
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL
from deformer_stream.errors import ConfigError, StateError, StoppedWaiting
from deformer_stream.incidents.events import EvidenceBatch, Incident
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions
from deformer_stream.runtime import incident_pipeline, late_evidence
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.incident_pipeline import IncidentPipeline
from deformer_stream.runtime.incident_plan import DetectionPlan, make_get_device
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, RestoredPartition, SourceCallbacks
from deformer_stream.runtime.process_metrics import STALL_SECONDS
from tests.incidents.evidence_logs import SECOND, make_log
from tests.runtime.pipelines import ScriptedSource

MODEL = "model-1"
FAULTS = {0: [(20, 40)], 1: [(22, 30), (60, 75)], 2: [(24, 45)], 3: [(90, 99)]}
STEPS = ("poll", "decode", "write", "collect", "commit", "committed")


def make_plan(model: str = MODEL, reorder: int = 5 * SECOND) -> DetectionPlan:
    """Return a plan with the e-detector and fleet incidents."""
    options = TrackerOptions(reorder=reorder, fleet=FleetRule(3, 600 * SECOND))
    return DetectionPlan(plan_budget(parse_budget("1 per 30d"), records_per_day=8640), options, (), model)


def load_only(name: str) -> DetectionPlan:
    """Return the plan of the only model."""
    assert name == ONLY_MODEL
    return make_plan()


PLANS = {ONLY_MODEL: make_plan()}


def make_batches(model: str = MODEL) -> list[EvidenceBatch]:
    return list(make_log(model, num_devices=4, num_records=120, faults=FAULTS))


class KilledError(Exception):
    """The simulated end of the process."""


@dataclass
class Broker:
    """What survives the end of a process: evidence, incidents, and the last commit of each partition.

    Attributes:
        payloads: The messages of evidence, by partition.
        written: The committed messages about incidents, with their partition.
        offsets: Committed offset by partition.
        snapshots: By partition, the saved state and the offset of the first message that it does not include.
        num_commits: Number of commits.
        arrivals: The timestamps of the messages of evidence, by partition; they have none by default.
    """

    payloads: dict[int, list[bytes | None]]
    written: list[tuple[int, Incident]] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    num_commits: int = 0
    arrivals: dict[int, list[int]] = field(default_factory=dict)

    def read_history(self, partition: int) -> list[Incident]:
        """Return the committed messages about the incidents of a partition."""
        return [incident for number, incident in self.written if number == partition]


class BrokerSource:
    """A source and a writer whose commits take effect completely or not at all, as with Kafka's transactions."""

    waiting_partitions: frozenset[int] = frozenset()
    has_joined = True

    def __init__(self, broker: Broker, reach: Callable[[str], None], stop: threading.Event, seed: int) -> None:
        self.broker, self.reach, self.stop = broker, reach, stop
        self.rng = np.random.default_rng(seed)
        self.callbacks = SourceCallbacks()
        self.positions: dict[int, int] = {}
        self.pending: list[tuple[int, Incident]] = []
        self.catching_up: set[int] = set()
        self.to_revoke: tuple[int, ...] = ()

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        self.callbacks = callbacks

    def set_model_fingerprint(self, fingerprint: str) -> None: ...

    def leave_out(self, partitions: frozenset[int]) -> None:
        self.waiting_partitions = partitions

    @property
    def is_exhausted(self) -> bool:
        return False

    @property
    def assigned_partitions(self) -> frozenset[int]:
        return frozenset(self.positions)

    def poll(self, timeout: float) -> PollResult:
        self.reach("poll")
        if not self.positions and not self.to_revoke:
            restored = []
            for partition in self.broker.payloads:
                snapshot, position = self.broker.snapshots.get(partition, (None, self.broker.offsets.get(partition, 0)))
                self.positions[partition] = position
                restored.append(RestoredPartition(partition, self.broker.offsets.get(partition, 0), snapshot))
            self.catching_up = set(self.positions)
            return PollResult(None, restored_partitions=tuple(restored), caught_up_partitions=self.pop_caught_up())
        partitions, offsets, payloads, times = [], [], [], []
        for partition in sorted(self.positions):
            end = min(self.positions[partition] + int(self.rng.integers(0, 4)), len(self.broker.payloads[partition]))
            for offset in range(self.positions[partition], end):
                partitions.append(partition)
                offsets.append(offset)
                payloads.append(self.broker.payloads[partition][offset])
                times.append(self.broker.arrivals[partition][offset] if self.broker.arrivals else NO_TIME)
            self.positions[partition] = end
        if all(end >= len(self.broker.payloads[p]) for p, end in self.positions.items()):
            self.stop.set()
        data = Messages(
            "evidence",
            [None] * len(payloads),
            payloads,
            np.array(times, np.int64),
            np.array(partitions, np.int32),
            np.array(offsets, np.int64),
        )
        revoked, self.to_revoke = self.to_revoke, ()
        return PollResult(data if payloads else None, revoked, (), self.pop_caught_up())

    def pop_caught_up(self) -> tuple[int, ...]:
        done = {p for p in self.catching_up if self.positions[p] >= self.broker.offsets.get(p, 0)}
        self.catching_up -= done
        return tuple(sorted(done))

    def return_messages(self, messages: Messages) -> None:
        for partition in set(messages.partitions.tolist()):
            self.positions[partition] = int(messages.offsets[messages.partitions == partition].min())

    def write(self, incident: Incident, partition: int) -> None:
        self.reach("write")
        self.pending.append((partition, incident))

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        self.reach("commit")
        not_committed = self.catching_up | self.waiting_partitions
        assert not not_committed & set(states), "state of a partition that is being restored"
        assert not not_committed & {partition for partition, _ in self.pending}
        for partition, position in self.positions.items():
            if partition not in not_committed:
                assert position >= self.broker.offsets.get(partition, 0)
                self.broker.offsets[partition] = position
        for partition, state in states.items():
            assert state.snapshot is not None
            self.broker.snapshots[partition] = state.snapshot, self.positions[partition]
        self.broker.written += self.pending
        self.pending = []
        self.broker.num_commits += 1
        self.reach("committed")

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {("evidence", p): len(self.broker.payloads[p]) - end for p, end in self.positions.items()}

    def close(self) -> None: ...


def make_broker(batches: list[EvidenceBatch] | None = None, num_partitions: int = 1) -> Broker:
    batches = make_batches() if batches is None else batches
    payloads: dict[int, list[bytes | None]] = {p: [] for p in range(num_partitions)}
    for i, batch in enumerate(batches):
        payloads[i % num_partitions].append(encode_evidence(batch))
    return Broker(payloads)


def run_once(
    broker: Broker,
    seed: int = 0,
    step: str = "",
    num_calls: int = 0,
    monkeypatch: pytest.MonkeyPatch | None = None,
    load_plan: Callable[[], DetectionPlan] = make_plan,
    load_named: Callable[[str], DetectionPlan] | None = None,
    names: Sequence[str] = (ONLY_MODEL,),
    is_told_to_end: bool = False,
    **options: float,
) -> DetectionMetrics:
    """Run the loop to the end of the evidence, or to its simulated end at the n-th call of a step.

    Args:
        broker: What survives the end.
        seed: Seed of the numbers of messages that polls return.
        step: The step of the simulated end.
        num_calls: How often the step is completed before.
        monkeypatch: Needed for steps that are methods of the loop.
        load_plan: Returns the plan of the only model.
        load_named: Returns the plan of one of several models.
        names: The names of the models when the loop begins.
        is_told_to_end: Whether the step waits for a service and the process is told to end, in place of a kill.
        options: Arguments of `IncidentPipeline`.
    """
    left = num_calls

    def reach(reached: str) -> None:
        nonlocal left
        if reached == step:
            if left == 0 and is_told_to_end:
                stop.set()
                raise StoppedWaiting(step)
            if left == 0:
                raise KilledError(step)
            left -= 1

    stop, metrics = threading.Event(), DetectionMetrics()
    source = BrokerSource(broker, reach, stop, seed)
    clock = iter(range(10**9))  # every reading of the clock is a second later, so that commits and snapshots are due
    arguments = {"commit_interval": 20.0, "snapshot_interval": 150.0} | options
    load = load_named or (lambda name: load_plan())
    plans = {name: load(name) for name in names}

    def read_history(partition: int) -> list[Incident]:
        reach("history")
        return broker.read_history(partition)

    pipeline = IncidentPipeline(
        source, source, plans, load, metrics, read_history, now=lambda: float(next(clock)), **arguments
    )
    if monkeypatch is not None:
        for name, stage in (("_decode", "decode"), ("_collect_states", "collect")):
            original = getattr(IncidentPipeline, name)

            def call(*values: object, original: Callable[..., object] = original, stage: str = stage) -> object:
                reach(stage)
                return original(*values)

            monkeypatch.setattr(pipeline, name, lambda *values, call=call, pipeline=pipeline: call(pipeline, *values))
    pipeline.run(stop)
    return metrics


def group_by_id(broker: Broker) -> dict[str, list[Incident]]:
    """Return the committed messages of each incident, in order."""
    messages: dict[str, list[Incident]] = {}
    for _, incident in broker.written:
        messages.setdefault(incident.id, []).append(incident)
    return messages


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Incident]]:
    """Return the messages of an uninterrupted run."""
    broker = make_broker()
    run_once(broker)
    return group_by_id(broker)


def test_uninterrupted_run_gives_the_messages_of_the_tracker(expected: dict[str, list[Incident]]) -> None:
    tracker: IncidentTracker = make_plan().make_tracker()
    direct: dict[str, list[Incident]] = {}
    for batch in make_batches():
        for incident in tracker.handle(batch):
            direct.setdefault(incident.id, []).append(incident)
    assert direct == expected
    assert {messages[0].kind for messages in expected.values()} == {"device", "fleet"}
    assert sum(messages[-1].state == "resolved" for messages in expected.values()) >= 3


@pytest.mark.parametrize("step", STEPS)
def test_end_at_any_step_changes_no_message(
    step: str, expected: dict[str, list[Incident]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_calls in (0, 1, 2, 5, 11, 23, 40):
        broker = make_broker()
        was_killed = False
        try:
            run_once(broker, num_calls, step, num_calls, monkeypatch)
        except KilledError:
            was_killed = True
            run_once(broker, num_calls + 1)
        assert group_by_id(broker) == expected, num_calls
        assert was_killed or num_calls > 5


@pytest.mark.parametrize(("step", "max_calls"), [("decode", 12), ("history", 3)])
def test_end_while_decoding_waits_for_a_service_changes_no_message(
    monkeypatch: pytest.MonkeyPatch, step: str, max_calls: int
) -> None:
    """Every second process is killed after commits without its state, so the next one decodes its history again."""
    batches = list(make_log(MODEL, num_devices=4, num_records=120, faults=FAULTS, records_per_batch=1))
    expected = make_broker(batches, num_partitions=3)
    run_once(expected)
    for seed in range(5):
        broker, positions, rng = make_broker(batches, num_partitions=3), [0], np.random.default_rng(seed)
        for turn in range(0, 40, 2):
            run_once(broker, seed + turn, step, int(rng.integers(0, max_calls)), monkeypatch, is_told_to_end=True)
            positions.append(sum(broker.offsets.values()))
            with suppress(KilledError):
                run_once(broker, seed, "committed", 2, commit_interval=1.0, snapshot_interval=15.0)
            positions.append(sum(broker.offsets.values()))
        assert positions == sorted(positions)
        assert positions[-1] > len(batches) / 4, "what was handled is committed"
        run_once(broker, seed)
        assert group_by_id(broker) == group_by_id(expected)
        assert len(broker.written) == len(expected.written) > 10


def test_source_that_takes_no_messages_back_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the last commit would include messages that were not handled."""
    broker = make_broker()
    monkeypatch.delattr(BrokerSource, "return_messages")
    with pytest.raises(StoppedWaiting):
        run_once(broker, 0, "decode", 3, monkeypatch, is_told_to_end=True)
    assert not any(broker.offsets.values())


def test_twenty_ends_in_a_row_change_no_message(
    expected: dict[str, list[Incident]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    broker = make_broker()
    for kill in range(20):
        # The process reaches at least a poll, and rarely more than a commit or two.
        step, num_calls = STEPS[kill % len(STEPS)], int(rng.integers(0, 6))
        with suppress(KilledError):
            run_once(broker, kill, step, num_calls, monkeypatch, snapshot_interval=40.0)
    assert broker.offsets.get(0, 0) > 0
    run_once(broker)
    assert group_by_id(broker) == expected


def test_each_partition_has_a_tracker_of_its_own() -> None:
    """Without a commit of the last snapshot, messages of one partition are handled again, those of others are not."""
    broker, whole = make_broker(num_partitions=2), make_broker(num_partitions=2)
    run_once(whole)
    with pytest.raises(KilledError):
        run_once(broker, 3, "commit", 4)
    run_once(broker, 4)
    assert group_by_id(broker) == group_by_id(whole)


def test_opening_is_committed_at_once() -> None:
    commits_by_interval = {}
    for interval in (0.0, 1e6):
        broker = make_broker()
        run_once(broker, commit_interval=interval)
        commits_by_interval[interval] = broker.num_commits
    num_urgent = len({i for i, m in enumerate(broker.written) if m[1].state in ("open", "resolved")})
    assert 4 <= commits_by_interval[1e6] <= num_urgent + 1
    assert commits_by_interval[0.0] > commits_by_interval[1e6]


def test_messages_that_are_no_evidence_are_skipped_and_counted(
    expected: dict[str, list[Incident]], capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(False)
    broker = make_broker()
    for place, payload in ((0, b"{"), (5, None), (9, b'{"v":2}'), (11, b'{"v":3}')):
        broker.payloads[0].insert(place, payload)
    metrics = run_once(broker)
    assert metrics.registry.get_sample_value("deformer_evidence_skipped_total") == 4
    assert group_by_id(broker) == expected
    assert capsys.readouterr().err.count("message_skipped") == 1


def test_evidence_of_a_later_version_ends_the_loop_and_is_not_lost(expected: dict[str, list[Incident]]) -> None:
    """`consume` was replaced by a later release before `incidents`."""
    broker, num_earlier = make_broker(), 9
    readable = broker.payloads[0]
    later = [json.dumps(json.loads(value or b"") | {"v": 3}).encode() for value in readable[num_earlier:]]
    broker.payloads[0] = [*readable[:num_earlier], *later]
    for _ in range(3):  # it is started again
        with pytest.raises(LaterEvidenceError) as ended:
            run_once(broker, commit_interval=0.0)
        assert str(ended.value) == (
            f"topic evidence, partition 0, offset {num_earlier}: evidence of format version 3 cannot be read: this "
            "release reads versions 1 to 2; use the release that wrote it for `incidents`, too"
        )
        assert broker.offsets.get(0, 0) <= num_earlier
    broker.payloads[0] = readable  # as the release that wrote it reads them
    run_once(broker)
    assert group_by_id(broker) == expected


def test_records_that_the_earlier_model_finishes_are_no_reason_for_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure(False)
    models = [MODEL if i < 5 or i % 3 == 0 else "model-2" for i in range(len(make_batches()))]
    batches = [replace(batch, model=model) for batch, model in zip(make_batches(), models, strict=True)]
    loaded = iter([MODEL])
    broker = make_broker(batches)
    metrics = run_once(broker, load_plan=lambda: make_plan(next(loaded, "model-2")))
    written = capsys.readouterr().err
    assert written.count("plan_changed") == 1
    assert "incident_model_differs" not in written
    assert not any(message.resolution == "model-changed" for _, message in broker.written)
    num_left_out = metrics.registry.get_sample_value("deformer_evidence_unusual_total", {"kind": "other_model"})
    assert num_left_out == sum(len(batch.closed) for batch in batches[6:] if batch.model == MODEL) > 0


def test_metrics_count_records_and_messages(expected: dict[str, list[Incident]]) -> None:
    metrics = run_once(make_broker())
    get = metrics.registry.get_sample_value
    assert get("deformer_evidence_records_total") == 480
    num_messages = {state: get("deformer_incident_messages_total", {"state": state}) for state in ("open", "resolved")}
    states = [message.state for messages in expected.values() for message in messages]
    assert num_messages == {state: states.count(state) for state in num_messages}
    assert get("deformer_incidents_accepted_per_day") == pytest.approx(4 / 30)  # 4 devices, 1 per 30d
    assert metrics.is_ready
    assert get("deformer_ready") == 1
    assert metrics.is_healthy()


def test_a_spare_member_is_ready_once_it_has_joined() -> None:
    """It loses its readiness while a partition that it takes over is restored."""
    metrics, stop, seen = DetectionMetrics(), threading.Event(), list[bool]()

    def turn(
        result: PollResult, has_joined: bool = True, assigned: frozenset[int] = frozenset()
    ) -> Callable[[], PollResult]:
        def poll() -> PollResult:
            seen.append(metrics.is_ready)
            source.has_joined, source.assigned_partitions = has_joined, assigned
            if not source.turns:
                stop.set()
            return result

        return poll

    source, zero = ScriptedSource([]), frozenset({0})
    source.turns = [
        turn(PollResult(None), has_joined=False),
        turn(PollResult(None)),
        turn(PollResult(None), assigned=zero),  # its state is not read yet
        turn(PollResult(None, restored_partitions=(RestoredPartition(0, 0),)), assigned=zero),
        turn(PollResult(None, caught_up_partitions=(0,)), assigned=zero),
        turn(PollResult(None, revoked_partitions=(0,))),  # another member takes it over
        turn(PollResult(None)),
    ]
    broker = make_broker()
    writer = BrokerSource(broker, lambda step: None, stop, seed=0)
    IncidentPipeline(source, writer, PLANS, load_only, metrics, broker.read_history).run(stop)
    assert seen == [False, False, True, False, False, True, True]


def test_process_is_healthy_while_a_commit_waits_for_the_brokers() -> None:
    seconds, healthy = 0.0, list[bool]()
    metrics, stop = DetectionMetrics(now=lambda: seconds), threading.Event()

    def reach(step: str) -> None:
        nonlocal seconds
        if step == "commit":
            for _ in range(10):  # an outage that is much longer than a stall
                seconds += STALL_SECONDS / 2
                source.callbacks.on_wait()
                healthy.append(metrics.is_healthy())

    broker = make_broker()
    source = BrokerSource(broker, reach, stop, seed=0)
    IncidentPipeline(source, source, PLANS, load_only, metrics, broker.read_history, commit_interval=0.0).run(stop)
    assert healthy
    assert all(healthy)


def test_records_of_late_batches_are_counted_once_over_restarts() -> None:
    batches = make_batches()
    late = [*batches[10:], *batches[:10]]
    broker = make_broker(late)
    first = run_once(broker)
    num_late = first.registry.get_sample_value("deformer_evidence_unusual_total", {"kind": "late"})
    assert num_late
    again = run_once(broker)
    assert not again.registry.get_sample_value("deformer_evidence_unusual_total", {"kind": "late"})


def test_much_evidence_out_of_order_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a backlog of events that are keyed by record, and so come partition by partition."""
    log.configure(False)
    monkeypatch.setattr(late_evidence, "MIN_RECORDS", 50)
    batches = make_batches()
    run_once(make_broker(batches))
    assert "evidence_out_of_order" not in capsys.readouterr().err
    run_once(make_broker([*batches[len(batches) // 2 :], *batches[: len(batches) // 2]]))
    assert capsys.readouterr().err.count("evidence_out_of_order") == 1


def make_leaping_broker() -> Broker:
    """Return a broker with evidence in which the clock of each device leaps ahead by a year once."""
    batches = make_batches()
    arrivals = [int(batch.closed.times[-1]) for batch in batches]
    batches[6].closed.times[:] += 365 * 86_400 * SECOND
    broker = make_broker(batches)
    broker.arrivals = {0: arrivals}
    return broker


def make_bounded_plan() -> DetectionPlan:
    """Return a plan with a limit of times that lie ahead of their arrival."""
    plan = make_plan()
    return replace(plan, options=replace(plan.options, max_ahead=3600 * SECOND))


def test_a_clock_that_leaps_ahead_gives_the_same_incidents_after_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrival is the timestamp of the message, and not the clock of the process. So it is the same again."""
    load_plan = make_bounded_plan
    whole, held = make_leaping_broker(), make_leaping_broker()
    metrics = run_once(whole, load_plan=load_plan)
    assert metrics.registry.get_sample_value("deformer_evidence_unusual_total", {"kind": "ahead"}) == 16
    messages = group_by_id(whole)
    assert sum(one[-1].state == "resolved" for one in messages.values()) >= 3
    assert max(one[-1].last for one in messages.values()) <= max(whole.arrivals[0])
    for num_calls in range(0, 30, 3):
        broker = make_leaping_broker()
        with suppress(KilledError):
            run_once(broker, num_calls, "commit", num_calls, monkeypatch, load_plan=load_plan)
        run_once(broker, num_calls + 1, load_plan=load_plan)
        assert group_by_id(broker) == messages, num_calls
    run_once(held)
    assert not any(one[-1].state == "resolved" for one in group_by_id(held).values()), "without a limit"


def test_plan_is_loaded_again_when_the_model_changes(expected: dict[str, list[Incident]]) -> None:
    """`consume` takes a new model from the model directory while it runs, and so does this process."""
    batches = make_batches()
    changed = [*batches[:20], *(replace(batch, model="model-2") for batch in batches[20:])]
    models = iter(["model-1", "model-2"])
    broker = make_broker(changed)
    run_once(broker, load_plan=lambda: make_plan(next(models)))
    found = {message.model for messages in group_by_id(broker).values() for message in messages}
    assert found == {"model-1", "model-2"}


def make_other_plan(
    records_per_day: float = 8640, fleet: FleetRule | None = None, separator: str = "@"
) -> DetectionPlan:
    """Return a plan that differs from that of `make_plan`."""
    plan = make_plan()
    budget_plan = plan_budget(parse_budget("1 per 30d"), records_per_day=records_per_day)
    options = replace(plan.options, fleet=fleet, get_device=make_get_device(separator))
    return replace(plan, plan=budget_plan, options=options, device_by=separator)


STRICTER = partial(make_other_plan, 1e60, FleetRule(3, 600 * SECOND))
LOOSER = partial(make_other_plan, 0.1, FleetRule(3, 600 * SECOND))
WITHOUT_FLEETS = make_other_plan
OTHER_DEVICES = partial(make_other_plan, 8640, FleetRule(3, 600 * SECOND), "-")


@pytest.mark.parametrize("changed", [STRICTER, LOOSER, WITHOUT_FLEETS, OTHER_DEVICES])
@pytest.mark.parametrize("num_commits", range(1, 14, 2))
def test_a_changed_plan_leaves_no_incident_open_that_the_tracker_does_not_have(
    changed: Callable[[], DetectionPlan], num_commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages since the last saved state were handled under one plan, and are handled again under another one."""
    broker = make_broker()
    with suppress(KilledError):  # with rare snapshots and urgent commits, so that many messages are handled again
        run_once(broker, num_commits, "committed", num_commits, snapshot_interval=1e6)
    run_once(broker, num_commits + 1, load_plan=changed)
    check_history(broker, changed())
    # Without another change, a restart writes nothing.
    num_written = len(broker.written)
    run_once(broker, 5, load_plan=changed)
    assert len(broker.written) == num_written


def check_history(broker: Broker, plan: DetectionPlan) -> None:
    """Check that every incident opens once, and that those that are open at the end are open in the saved state."""
    messages_by_id = group_by_id(broker)
    for messages in messages_by_id.values():
        assert [message.state for message in messages].count("open") == 1
        assert messages[0].state == "open"
        assert [message.revision for message in messages] == sorted({message.revision for message in messages})
    tracker = plan.make_tracker()
    state = decode_incident_state(broker.snapshots[0][0])[ONLY_MODEL]
    assert state.plan == plan.identity
    tracker.import_state(state)
    open_ids = {id_ for id_, messages in messages_by_id.items() if messages[-1].state != "resolved"}
    devices = [device.incident for device in state.state_by_device.values() if device.incident is not None]
    fleets = [fleet for group in state.state_by_group.values() for fleet in group.fleets]
    assert open_ids == {incident.id for incident in [*devices, *fleets] if incident.resolved is None}


def test_the_reason_says_that_the_plan_has_changed() -> None:
    broker = make_broker(make_batches()[:9])
    run_once(broker)
    opened = {id_ for id_, messages in group_by_id(broker).items() if messages[-1].state != "resolved"}
    assert {messages[-1].kind for messages in group_by_id(broker).values()} == {"device", "fleet"}
    run_once(broker, load_plan=WITHOUT_FLEETS)
    last = {id_: messages[-1] for id_, messages in group_by_id(broker).items()}
    (fleet,) = (message for message in last.values() if message.kind == "fleet")
    assert (fleet.state, fleet.resolution) == ("resolved", "plan-changed")
    assert fleet.id in opened
    assert {message.parent for message in last.values()} == {None}
    assert {message.former_parent for message in last.values()} == {None, fleet.id}


def test_incidents_of_a_lost_state_are_resolved() -> None:
    broker = make_broker(make_batches()[:9])
    run_once(broker)
    open_ids = {id_ for id_, messages in group_by_id(broker).items() if messages[-1].state != "resolved"}
    assert open_ids
    del broker.snapshots[0]
    run_once(broker)
    for id_, messages in group_by_id(broker).items():
        if id_ in open_ids:
            assert (messages[-1].state, messages[-1].resolution) == ("resolved", "state-lost")


def lose_state(broker: Broker) -> None:
    """Delete the saved state and the committed offsets, so that the next run begins at the first message."""
    broker.snapshots.clear()
    broker.offsets.clear()


def test_incidents_that_open_again_after_a_lost_state_are_reopened() -> None:
    """The topic has resolved them, so receivers must not take them for what they have seen before."""
    whole = make_broker(make_batches()[:9])
    run_once(whole)
    last = {id_: messages[-1] for id_, messages in group_by_id(whole).items()}
    assert {(message.kind, message.state == "resolved") for message in last.values()} == {
        ("device", False),
        ("fleet", False),
    }
    lose_state(whole)
    run_once(whole)
    check_history(whole, make_plan())
    for id_, messages in group_by_id(whole).items():
        end = next(number for number, message in enumerate(messages) if message.state == "resolved")
        assert (messages[end].resolution, messages[end].revision) == ("state-lost", last[id_].revision + 1)
        assert {message.num_reopened for message in messages[: end + 1]} == {0}
        assert {message.num_reopened for message in messages[end + 1 :]} == {1}
        assert messages[end + 1].state == messages[-1].state == "updated"
    for num_commits in range(6):  # a restart continues in the same way
        broker = make_broker(make_batches()[:9])
        run_once(broker)
        lose_state(broker)
        with suppress(KilledError):
            run_once(broker, num_commits, "committed", num_commits, commit_interval=1.0, snapshot_interval=1e6)
        run_once(broker, num_commits + 1)
        assert group_by_id(broker) == group_by_id(whole), num_commits


def test_incidents_are_reopened_after_the_state_is_lost_twice() -> None:
    """The second time, the topic has resolved them already."""
    broker = make_broker(make_batches()[:9])
    run_once(broker)
    lose_state(broker)
    with suppress(KilledError):
        run_once(broker, 0, "committed", 0, commit_interval=1e6)
    assert {messages[-1].resolution for messages in group_by_id(broker).values()} == {"state-lost"}
    lose_state(broker)
    run_once(broker)
    check_history(broker, make_plan())
    assert {messages[-1].num_reopened for messages in group_by_id(broker).values()} == {1}


def test_a_change_of_the_model_is_committed_with_the_state_that_names_its_plan() -> None:
    """The next run loads the new model only. It has no messages of the old one to handle again."""
    batches = make_batches()
    changed = [*batches[:20], *(replace(batch, model="model-2") for batch in batches[20:])]
    whole = make_broker(changed)
    models = iter(["model-1", "model-2"])
    run_once(whole, 3, load_plan=lambda: make_plan(next(models)))
    for num_calls in range(1, 12):
        broker, loaded = make_broker(changed), ["model-1", "model-2"]
        with suppress(KilledError):
            run_once(
                broker,
                3,
                "committed",
                num_calls,
                load_plan=lambda loaded=loaded: make_plan(loaded.pop(0)),
                snapshot_interval=1e6,
            )
        models = iter(["model-1", "model-2"] if loaded else ["model-2"])
        run_once(broker, 4, load_plan=lambda models=models: make_plan(next(models)))
        assert group_by_id(broker) == group_by_id(whole), num_calls


def test_model_that_the_directory_does_not_have_is_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_pipeline, "PLAN_RETRY_SECONDS", math.inf)
    log.configure(False)
    num_loads = 0

    def load_plan() -> DetectionPlan:
        nonlocal num_loads
        num_loads += 1
        if num_loads == 2:
            raise ConfigError("the budget is out of reach")
        return make_plan()

    other = [replace(batch, model="a" if i % 2 else "b") for i, batch in enumerate(make_batches())]
    run_once(make_broker(other), load_plan=load_plan)
    assert num_loads == 3
    written = capsys.readouterr().err
    assert written.count("plan_not_loaded") == written.count("incident_model_differs") == 1


def test_plan_of_a_model_that_arrives_later_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a model may be copied to this machine later than to that of the consumer."""
    log.configure(False)
    num_loads = 0

    def load_plan() -> DetectionPlan:
        nonlocal num_loads
        num_loads += 1
        plan = make_plan()
        return replace(plan, model="later") if num_loads >= 4 else plan

    run_once(make_broker([replace(batch, model="later") for batch in make_batches()]), load_plan=load_plan)
    assert num_loads == 4  # none after the plan was found
    written = capsys.readouterr().err
    assert written.count("incident_model_differs") == 1
    assert written.count("plan_changed") == 1


def test_state_is_handed_over_with_a_revoked_partition(expected: dict[str, list[Incident]]) -> None:
    broker, stop = make_broker(), threading.Event()
    source = BrokerSource(broker, lambda step: None, stop, 7)
    metrics = DetectionMetrics()
    pipeline = IncidentPipeline(source, source, PLANS, load_only, metrics, broker.read_history, commit_interval=0.0)
    for _ in range(12):
        polled = source.poll(0.0)
        pipeline._update_partitions(polled)
        pipeline._handle(polled)
    source.commit(pipeline._prepare_handover(frozenset((0,))))
    assert broker.snapshots[0][1] == source.positions[0] > 0
    run_once(broker)
    assert group_by_id(broker) == expected


def test_alerts_without_suspects_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    batches = [
        replace(batch, alerts=tuple(replace(alert, suspects=()) for alert in batch.alerts)) for batch in make_batches()
    ]
    run_once(make_broker(batches))
    assert capsys.readouterr().err.count("alerts_without_suspects") == 1


def test_damaged_state_ends_the_run() -> None:
    broker = make_broker()
    with pytest.raises(KilledError):
        run_once(broker, 1, "commit", 3)
    state, position = broker.snapshots[0]
    decode_incident_state(state)
    broker.snapshots[0] = state[:-1] + bytes([state[-1] ^ 1]), position
    with pytest.raises(StateError, match="partition 0"):
        run_once(broker)


# Several models: fingerprints by name, and which devices each of them scores.
MODEL_BY_NAME = {"fan": "model-f", "pump": "model-p"}


def load_named(name: str, changed: Mapping[str, str] = MappingProxyType({})) -> DetectionPlan:
    """Return the plan of one of several models. Each has a budget of its own.

    Args:
        name: The name.
        changed: Fingerprints by name that are not those of `MODEL_BY_NAME`.

    Raises:
        ConfigError: There is no such model.
    """
    model = {**MODEL_BY_NAME, **changed}.get(name)
    if model is None:
        raise ConfigError(f"no model {name}")
    plan = make_plan(model)
    records_per_day = 8640 if name == "pump" else 100
    return replace(plan, model_name=name, plan=plan_budget(parse_budget("1 per 30d"), records_per_day=records_per_day))


def make_mixed_batches(is_named: bool = True) -> list[EvidenceBatch]:
    """Return the evidence of two models, whose messages alternate. Both have a device `pump-0`."""
    logs = [
        [
            replace(batch, model_name=name if is_named else ONLY_MODEL)
            for batch in make_log(model, num_devices=4, num_records=120, faults=FAULTS, seed=seed)
        ]
        for seed, (name, model) in enumerate(MODEL_BY_NAME.items())
    ]
    return [batch for pair in zip(*logs, strict=True) for batch in pair]


run_named = partial(run_once, load_named=load_named, names=tuple(MODEL_BY_NAME))


@pytest.fixture(scope="module")
def of_each_model() -> dict[str, list[Incident]]:
    """Return the messages of a process for each model, which reads the evidence of this model only."""
    found: dict[str, list[Incident]] = {}
    for name in MODEL_BY_NAME:
        broker = make_broker([batch for batch in make_mixed_batches() if batch.model_name == name])
        run_once(broker, load_plan=partial(load_named, name))
        found |= group_by_id(broker)
    return found


@pytest.mark.parametrize("is_named", [True, False])
def test_several_models_have_the_incidents_of_a_process_each(
    of_each_model: dict[str, list[Incident]], is_named: bool
) -> None:
    """Evidence of earlier releases names no model; its fingerprint determines it."""
    broker = make_broker(make_mixed_batches(is_named))
    metrics = run_named(broker)
    found = group_by_id(broker)
    assert found == of_each_model
    assert {(m.model_name, m.model) for messages in found.values() for m in messages} == set(MODEL_BY_NAME.items())
    assert {messages[0].kind for messages in found.values()} == {"device", "fleet"}
    get = metrics.registry.get_sample_value
    assert get("deformer_incidents_accepted_per_day") == pytest.approx(8 / 30)
    assert not get("deformer_evidence_unusual_total", {"kind": "other_model"})


def test_ends_in_a_row_change_no_message_of_several_models(
    of_each_model: dict[str, list[Incident]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    broker = make_broker(make_mixed_batches())
    for kill in range(24):
        with suppress(KilledError):
            run_named(broker, kill, STEPS[kill % len(STEPS)], int(rng.integers(0, 8)), monkeypatch)
    assert broker.offsets.get(0, 0) > 0
    run_named(broker)
    assert group_by_id(broker) == of_each_model


def test_a_new_version_of_one_model_resets_only_its_own_devices(of_each_model: dict[str, list[Incident]]) -> None:
    """The model of the pumps is replaced while its devices and those of the fans have incidents."""
    batches = make_mixed_batches()
    changed = [
        replace(batch, model="model-p2") if batch.model_name == "pump" and place >= 14 else batch
        for place, batch in enumerate(batches)
    ]
    versions = iter(["model-p", "model-p2"])

    def load(name: str) -> DetectionPlan:
        return load_named(name, {"pump": next(versions)} if name == "pump" else {})

    broker = make_broker(changed)
    run_named(broker, 2, load_named=load)
    found = group_by_id(broker)
    fans = {id_: messages for id_, messages in found.items() if messages[0].model_name == "fan"}
    assert fans == {id_: messages for id_, messages in of_each_model.items() if messages[0].model_name == "fan"}
    pumps = [messages for messages in found.values() if messages[0].model_name == "pump"]
    assert {message.model for messages in pumps for message in messages} == {"model-p", "model-p2"}
    assert any(message.resolution == "model-changed" for messages in pumps for message in messages)


def test_a_model_is_added_when_its_evidence_comes(of_each_model: dict[str, list[Incident]]) -> None:
    """The next run has both models from its start, and must not write anything again."""
    broker = make_broker(make_mixed_batches())
    run_named(broker, names=("pump",))
    assert group_by_id(broker) == of_each_model
    num_written = len(broker.written)
    run_named(broker)
    assert len(broker.written) == num_written


def test_evidence_of_models_that_the_folder_does_not_have_is_reported_and_counted(
    of_each_model: dict[str, list[Incident]], capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(False)
    extra = [replace(batch, model_name="valve", model="model-v") for batch in make_batches()[:3]]
    unnamed = [replace(batch, model="model-u") for batch in make_batches()[:2]]
    broker = make_broker([*extra, *unnamed, *make_mixed_batches()])
    metrics = run_named(broker)
    assert group_by_id(broker) == of_each_model
    num_records = sum(len(batch.closed) for batch in [*extra, *unnamed])
    assert metrics.registry.get_sample_value("deformer_evidence_unusual_total", {"kind": "other_model"}) == num_records
    written = capsys.readouterr().err
    assert written.count("plan_not_loaded") == written.count("incident_model_unknown") == 1


def test_incidents_of_a_model_that_was_removed_are_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    broker = make_broker(make_mixed_batches()[:18])
    run_named(broker)
    open_before = {id_ for id_, messages in group_by_id(broker).items() if messages[-1].state != "resolved"}
    run_named(broker, names=("fan",))
    last = {id_: messages[-1] for id_, messages in group_by_id(broker).items()}
    assert {last[id_].model_name for id_ in open_before} == {"fan", "pump"}
    for id_ in open_before:
        is_removed = last[id_].model_name == "pump"
        assert last[id_].resolution == ("plan-changed" if is_removed else None)
    assert capsys.readouterr().err.count("model_missing") == 1
    assert set(decode_incident_state(broker.snapshots[0][0])) == {"fan"}


def test_state_of_one_model_is_continued_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pumps had sent evidence, with one model. Their open incidents go on, and are not sent again."""
    batches = make_mixed_batches()
    pumps = [replace(batch, model_name=ONLY_MODEL) for batch in batches if batch.model_name == "pump"]
    broker = make_broker(pumps[:9])
    run_once(broker, load_plan=partial(make_plan, "model-p"))
    assert HEADER.unpack_from(broker.snapshots[0][0])[2] == 2
    before = group_by_id(broker)
    open_before = {id_ for id_, messages in before.items() if messages[-1].state != "resolved"}
    assert {before[id_][0].kind for id_ in open_before} == {"device", "fleet"}
    broker.payloads[0] += [encode_evidence(batch) for batch in batches[18:]]
    run_named(broker, 3)
    after = group_by_id(broker)
    assert set(decode_incident_state(broker.snapshots[0][0])) == set(MODEL_BY_NAME)
    whole = make_broker(pumps)
    run_once(whole, load_plan=partial(make_plan, "model-p"))
    for id_ in open_before:
        assert [replace(message, model_name=ONLY_MODEL) for message in after[id_]] == group_by_id(whole)[id_]
        assert after[id_][-1].model_name == "pump"
