"""One run of the chaos test: an uninterrupted consumer, and groups of consumers that are disturbed, read the same
events.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kafka import KafkaProducer

from connectors.kafka import KafkaCluster, TopicSpec, ensure_topics
from tests.chaos.self_killing import NO_TRANSACTIONS, STEPS, TRANSACTIONS
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, RunningConsumer, wait_until
from tests.models import SCHEMA, draw_rows, write_model

ALPHA = 0.3
TIMEOUT_SECONDS = 600.0
"""Largest time of a wait, among others for a process that is to kill itself at a step."""
OUTAGE_SECONDS = 40.0
"""Largest time after the restart of a broker in which a commit can wait for it: one attempt takes up to 35 s."""
KILLS_AT_A_STEP = 2
"""Number of kills of `Disturbance.kill_and_restart` as long as there are steps: one before the step, and that at it."""
NUM_INTERLEAVED = 2000
"""Largest number of places by which a reading arrives late."""
RECORDS_PER_DRAW = 1000
INVALID_SHARE = 0.005
"""Share of events that are not JSON, so that dead letters are compared too."""


EQUAL_FIELDS = ("record", "raised_at", "score", "running_log_likelihood", "p_value", "alpha", "model")
"""The fields of an alert that must be those of the uninterrupted consumer, to the last bit."""

MAX_DIFFERENCES = 5
"""Number of differing alerts whose values are printed."""


def list_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return both values of each field in which two alerts must be equal and differ, by the name of the field."""
    return {name: [first[name], second[name]] for name in EQUAL_FIELDS if first[name] != second[name]}


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        events: Smallest number of events. More are sent as long as there are disturbances.
        rate: Events per second.
        partitions: Number of partitions of the events topic, at least one for each consumer and one for the guest.
        consumers: Number of consumers of a group.
        kills: Minimum number of kills.
        rebalances: Number of times that a further consumer joins or leaves.
        broker_restarts: Number of restarts of a broker.
        brokers: Number of brokers.
        blackout: Seconds during which all brokers are down, once per run; 0 for never.
        snapshot_interval: The option of that name.
    """

    events: int
    rate: float
    partitions: int
    consumers: int
    kills: int
    rebalances: int
    broker_restarts: int
    brokers: int
    blackout: float
    """Seconds for which, once, no broker is there."""
    snapshot_interval: str = "2s"


SIZES = {
    "full": Size(200_000, 400.0, 8, 3, 24, 10, 3, 3, 60.0),
    "small": Size(12_000, 250.0, 4, 2, 4, 2, 1, 1, 0.0, "1s"),
    "tiny": Size(4_000, 200.0, 3, 2, 3, 1, 1, 1, 0.0, "1s"),
}


@dataclass
class World:
    """What all parts of a run share.

    Attributes:
        broker: The cluster of brokers.
        size: The size of the run.
        model: The model directory.
        logs: The folder for the logs of the consumers.
        rng: The random numbers of the run.
        cluster: A view of the topics and groups.
    """

    broker: Any
    size: Size
    model: Path
    logs: Path
    rng: random.Random
    cluster: Cluster

    def make_options(self, topic: str, group: str, delivery: str) -> list[object]:
        """Return the options that all consumers of a group share."""
        return [
            *("--topic", topic, "--group", group, "--alerts-topic", f"{group}-alerts"),
            *("--dead-letter-topic", f"{group}-dead", "--bootstrap-servers", self.broker.bootstrap),
            *("--model", self.model, "--alpha", ALPHA, "--alerts", "", "--record-timeout", "1d"),
            *("--delivery", delivery, "--snapshot-interval", self.size.snapshot_interval),
            *("--session-timeout", "10s", "--patience", "5m", "--max-poll-records", "500"),
            *("--explanations", "fast"),  # explanations are not compared
        ]


def iterate_events() -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of readings of interleaved records without end, some of them not JSON."""
    rng = np.random.default_rng(0)
    waiting: list[tuple[float, str, dict[str, Any]]] = []  # a heap by the place of the reading in the stream
    num_yielded = 0
    for place, (record, name, value) in enumerate(iterate_readings()):
        document = {"record": record, "feature": name, "value": value}
        heapq.heappush(waiting, (place + rng.uniform(0, NUM_INTERLEAVED), record + name, document))
        while waiting and waiting[0][0] <= place:
            document = heapq.heappop(waiting)[2]
            message = json.dumps(document).encode()
            is_invalid = rng.random() < INVALID_SHARE
            yield document["record"].encode(), b"nonsense %d" % num_yielded if is_invalid else message
            num_yielded += 1


def iterate_readings() -> Iterator[tuple[str, str, float | str]]:
    """Yield record, feature and value of the readings of random records without end, record by record."""
    for draw in itertools.count():
        for i, row in enumerate(draw_rows(SCHEMA, RECORDS_PER_DRAW, seed=draw + 1)):
            for name, value in row.items():
                yield f"r{draw * RECORDS_PER_DRAW + i}", name, value


@dataclass
class Output:
    """The output of a group, as a reader of committed messages sees it.

    Attributes:
        alerts: Number of alerts by alert id.
        letters: Number of dead letters by partition and offset of the event.
        content: The last alert with an id, by id.
        order: Alert ids by record, in order.
    """

    alerts: Counter[str] = field(default_factory=Counter)
    letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    content: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_output(world: World, group: str) -> Output:
    """Read the output of a group."""
    found = Output()
    for message in world.cluster.read_topic(f"{group}-alerts"):
        alert = json.loads(message.value)
        found.alerts[alert["id"]] += 1
        found.content[alert["id"]] = alert
        found.order[alert["record"]].append(alert["id"])
    for message in world.cluster.read_topic(f"{group}-dead"):
        headers = {name: value.decode() for name, value in message.headers}
        found.letters[headers["partition"], headers["offset"]] += 1
    return found


class Disturbance:
    """The disturbances of one consumer group: kills, rebalances, broker restarts and a blackout.

    Args:
        world: What all parts of the run share.
        mode: The delivery of the group, which is also its name.
        sending: The task that sends the events until the last disturbance has happened.
    """

    def __init__(self, world: World, mode: str, sending: Future[int]) -> None:
        self.world, self.group, self.sending = world, mode, sending
        self.options = world.make_options(get_topic(mode), mode, mode)
        self.num_started = 0
        self.restarted_at = -OUTAGE_SECONDS  # monotonic time of the last restart of a broker
        self.counts: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.steps_left = list_steps(mode)
        world.rng.shuffle(self.steps_left)
        self.members: dict[int, RunningConsumer] = {i: self.start(i) for i in range(world.size.consumers)}
        self.guest: RunningConsumer | None = None

    def start(self, seat: int | None, dying: tuple[str, int] | None = None) -> RunningConsumer:
        """Start a consumer.

        Args:
            seat: Its instance name, with which it keeps its partitions over a restart. None for a guest, which has no
                instance name, so that its arrival causes a rebalance.
            dying: The step at which it kills itself and the number of the call, or None.
        """
        self.num_started += 1
        seated = [] if seat is None else ["--instance", f"seat-{seat}"]
        log = self.world.logs / f"{self.group}-{self.num_started:03d}.log"
        module = ("tests.chaos.self_killing", *dying) if dying else ("deformer_stream.cli.main",)
        return RunningConsumer(log, *self.options, *seated, module=module)

    def kill_and_restart(self) -> None:
        """Kill a consumer and start it again.

        If there is a step at which no consumer was to die yet, the new consumer kills itself at that step, and is then
        started again. If it has not reached the step after `TIMEOUT_SECONDS`, the step is missing in `steps`.
        """
        rng = self.world.rng
        seat = rng.choice(sorted(self.members))
        member = self.members[seat]
        if rng.random() < 0.8:  # the other consumers are killed while they start
            member.wait_until_ready()
            time.sleep(rng.uniform(0, 3))
        self.kill_process(member)
        if self.steps_left:
            step = self.steps_left.pop()
            member = self.members[seat] = self.start(seat, (step, rng.randint(1, 10)))
            if self.wait_for_end(member):
                assert member.process.returncode == -signal.SIGKILL, member.read_log()[-2000:]
                self.counts["kills"] += 1
                self.steps[step] += 1
            else:
                print(f"chaos: {step} not reached", file=sys.stderr, flush=True)
                self.kill_process(member)
        self.members[seat] = self.start(seat)

    def wait_for_end(self, member: RunningConsumer) -> bool:
        """Wait until a process has ended, and return whether it has within `TIMEOUT_SECONDS`.

        Events are sent meanwhile, so that the process has something to do.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(1.0)
                return True
            if self.sending.done():
                raise AssertionError("the sender has ended before the last disturbance") from self.sending.exception()
        return False

    def kill_process(self, member: RunningConsumer) -> None:
        """Kill a process and count it."""
        member.process.kill()
        member.process.wait()
        self.counts["kills"] += 1

    def change_group(self) -> None:
        """Let a guest join, or leave in an orderly way."""
        if self.guest is None:
            self.guest = self.start(None)
        else:
            self.guest.wait_until_ready()
            self.stop(self.guest)
            self.guest = None
        self.counts["rebalances"] += 1

    def stop(self, member: RunningConsumer) -> None:
        """End a consumer with SIGTERM, after the time in which its commit can wait for a broker that was restarted.

        Within that time it would end with exit code 4, because a process that is to end makes one attempt only.
        """
        time.sleep(max(0.0, self.restarted_at + OUTAGE_SECONDS - time.monotonic()))
        member.stop()

    def restart_broker(self) -> None:
        """Stop or kill a broker and start it again."""
        self.wait_until_ready()
        node = self.world.rng.randint(1, self.world.size.brokers)
        stop = self.world.rng.choice([self.world.broker.stop_node, self.world.broker.kill])
        stop(node)
        time.sleep(self.world.rng.uniform(1, 5))
        self.world.broker.start_node(node)
        self.restarted_at = time.monotonic()
        self.counts["broker_restarts"] += 1

    def black_out(self) -> None:
        """Kill all brokers and start them again; no consumer may end because of that."""
        self.wait_until_ready()
        nodes = range(1, self.world.size.brokers + 1)
        for node in nodes:
            self.world.broker.kill(node)
        time.sleep(self.world.size.blackout)
        self.restart_failed_starts()
        threads = [threading.Thread(target=self.world.broker.start_node, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.restarted_at = time.monotonic()
        self.counts["blackouts"] += 1

    def run(self) -> None:
        """Disturb the group until all planned disturbances have happened."""
        size = self.world.size
        disturbances = [self.change_group] * size.rebalances + [self.restart_broker] * size.broker_restarts
        disturbances += [self.black_out] * (size.blackout > 0)
        while disturbances or self.counts["kills"] < size.kills:
            has_kills_left = self.counts["kills"] < size.kills
            share = len(disturbances) / (len(disturbances) + max(1, size.kills - self.counts["kills"]))
            if disturbances and (not has_kills_left or self.world.rng.random() < share):
                disturb = disturbances.pop(self.world.rng.randrange(len(disturbances)))
            else:
                disturb = self.kill_and_restart
            disturb()
            print(f"chaos: {self.group} {dict(self.counts)}", file=sys.stderr, flush=True)
            self.restart_failed_starts()
            time.sleep(self.world.rng.uniform(0.5, 4))

    def wait_until_ready(self) -> None:
        """Wait until all consumers are ready, because a consumer that starts without a broker ends, as it should."""
        self.restart_failed_starts()
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            member.wait_until_ready()

    def restart_failed_starts(self) -> None:
        """Check that no consumer has ended, and start those again that could not reach a broker when they started."""
        for seat, member in list(self.members.items()):
            if self.has_failed_to_start(member):
                self.members[seat] = self.start(seat)
        if self.guest is not None and self.has_failed_to_start(self.guest):
            self.guest = self.start(None)

    def has_failed_to_start(self, member: RunningConsumer) -> bool:
        """Return whether a consumer has ended because it could not reach a broker when it started.

        Raises:
            AssertionError: It has ended for another reason.
        """
        code = member.process.poll()
        if code == 4 and not member.list_log_events("ready"):
            self.counts["started_again"] += 1
            return True
        assert code is None, f"ended with {code}: {member.read_log()[-2000:]}"
        return False

    def stop_all(self) -> None:
        """Stop all consumers in an orderly way, so that everything is committed. Before that, all of them must be
        ready, because a program that is starting does not handle signals yet.
        """
        self.wait_until_ready()
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            self.stop(member)

    def kill_all(self) -> None:
        """Kill all consumers."""
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            member.__exit__(None, None, None)


def run_chaos(size: Size, modes: list[str], seed: int, logs: Path) -> dict[str, Any]:
    """Run the whole test and return its figures.

    The key `ok` says whether nothing was lost or duplicated, and all planned disturbances have happened.
    """
    broker = load_broker_script().start(size.brokers)
    cluster = None
    try:
        cluster = Cluster(broker.bootstrap)
        world = World(broker, size, write_model(logs / "model"), logs, random.Random(seed), cluster)  # noqa: S311 -- no secrets
        topics: dict[str, TopicSpec] = {get_topic(mode): {"num_partitions": size.partitions} for mode in modes}
        ensure_topics(KafkaCluster(broker.bootstrap), topics)
        figures: dict[str, Any] = {"ok": True, "seed": seed, "events": size.events, "partitions": size.partitions}
        for mode in modes:
            figures[mode] = run_disturbed(world, mode)
        for mode in modes:
            calm = run_undisturbed(world, mode)
            figures[mode] |= {"alerts": len(calm.alerts), "letters": len(calm.letters)}
            figures[mode] |= compare_outputs(calm, read_output(world, mode), mode)
            figures["ok"] &= figures[mode].pop("ok") and not figures[mode]["missing"]
        return figures
    finally:
        if cluster is not None:
            cluster.close()
        broker.stop()


def get_topic(mode: str) -> str:
    """Return the events topic of a group. Each group has a topic of its own, so that events arrive during its whole
    run.
    """
    return f"events-{mode}"


def run_undisturbed(world: World, mode: str) -> Output:
    """Read all events of a mode with one uninterrupted consumer and return its output."""
    topic, group = get_topic(mode), f"calm-{mode}"
    with RunningConsumer(world.logs / f"{group}.log", *world.make_options(topic, group, "exactly-once")) as consumer:
        consumer.wait_for(world.cluster.is_consumed(topic, group), "all events", TIMEOUT_SECONDS)
        consumer.stop()
    return read_output(world, group)


def send(world: World, topic: str, is_over: threading.Event) -> int:
    """Send events at the rate of the run, with a producer that survives every outage and keeps the order.

    Args:
        world: What all parts of the run share.
        topic: The events topic.
        is_over: Set when no disturbance is left. Until then events are sent, and at least `Size.events` of them.

    Returns:
        The number of events.
    """
    sender = KafkaProducer(
        bootstrap_servers=world.broker.bootstrap.split(","),
        acks="all",
        enable_idempotence=True,
        delivery_timeout_ms=900_000,
    )
    began = time.monotonic()
    num_sent, failures = 0, list[BaseException]()
    for key, value in iterate_events():
        if num_sent >= world.size.events and is_over.is_set():
            break
        time.sleep(max(0.0, began + num_sent / world.size.rate - time.monotonic()))
        sender.send(topic, key=key, value=value).add_errback(failures.append)
        num_sent += 1
        assert not failures, failures
    sender.flush(timeout=TIMEOUT_SECONDS)
    assert not failures, failures
    sender.close()
    return num_sent


def run_disturbed(world: World, mode: str) -> dict[str, Any]:
    """Disturb several consumers while the events arrive, and return the numbers of disturbances."""
    began = time.monotonic()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, world, get_topic(mode), is_over)
        disturbance = None
        try:
            disturbance = Disturbance(world, mode, sending)
            disturbance.run()
            is_over.set()
            num_events = sending.result()
            wait_until(world.cluster.is_consumed(get_topic(mode), mode), "all events", TIMEOUT_SECONDS)
            disturbance.stop_all()
        finally:
            is_over.set()
            if disturbance is not None:
                disturbance.kill_all()
    counts, steps = dict(disturbance.counts), dict(disturbance.steps)
    missing = list_missing_disturbances(world.size, mode, counts, steps)
    return {
        "events": num_events,
        **counts,
        "steps": steps,
        "missing": missing,
        "seconds": round(time.monotonic() - began),
    }


def list_steps(mode: str) -> list[str]:
    """Return the steps at which consumers of a delivery can kill themselves."""
    others = NO_TRANSACTIONS if mode == "exactly-once" else TRANSACTIONS
    return [step for step in STEPS if step not in others]


def list_missing_disturbances(size: Size, mode: str, counts: Mapping[str, int], steps: Mapping[str, int]) -> list[str]:
    """Return the planned disturbances that have not happened, each as a text.

    Args:
        size: The size of the run.
        mode: The delivery of the group.
        counts: Numbers of disturbances by name.
        steps: Numbers of consumers that have killed themselves, by step.
    """
    planned_counts = {
        "kills": size.kills,
        "rebalances": size.rebalances,
        "broker_restarts": size.broker_restarts,
        "blackouts": int(size.blackout > 0),
    }
    # One step after the other, as long as there are kills.
    num_steps = min(len(list_steps(mode)), -(-size.kills // KILLS_AT_A_STEP))
    missing = [
        f"{name}: {counts.get(name, 0)} of {number}"
        for name, number in planned_counts.items()
        if counts.get(name, 0) < number
    ]
    if len(steps) < num_steps:
        missing.append(f"steps: {len(steps)} of {num_steps}")
    return missing


def compare_outputs(calm: Output, found: Output, mode: str) -> dict[str, Any]:
    """Compare the output of a disturbed group with that of the uninterrupted consumer.

    Args:
        calm: The output of the uninterrupted consumer.
        found: The output of the group.
        mode: The delivery of the group.

    Returns:
        Numbers of missing, additional, repeated and different alerts and dead letters.
    """
    lost = calm.alerts.keys() - found.alerts.keys()
    extra = found.alerts.keys() - calm.alerts.keys()
    num_repeated = sum(n - 1 for n in found.alerts.values())
    both = calm.content.keys() & found.content.keys()
    differing = [i for i in both if list_differences(calm.content[i], found.content[i])]
    letters_lost = calm.letters.keys() - found.letters.keys()
    num_repeated_letters = sum(n - 1 for n in found.letters.values())
    disorder = [r for r, ids in found.order.items() if list(dict.fromkeys(ids)) != calm.order.get(r)]
    is_exactly_once = mode == "exactly-once"
    return {
        "ok": not (lost or extra or differing or letters_lost or disorder)
        and not (is_exactly_once and (num_repeated or num_repeated_letters)),
        "lost": len(lost),
        "extra": len(extra),
        "doubled": num_repeated,
        "differing": len(differing),
        "differences": [list_differences(calm.content[i], found.content[i]) for i in differing[:MAX_DIFFERENCES]],
        "out_of_order": len(disorder),
        "letters_lost": len(letters_lost),
        "letters_extra": len(found.letters.keys() - calm.letters.keys()),
        "letters_doubled": num_repeated_letters,
    }
