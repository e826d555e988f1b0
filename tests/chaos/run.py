"""One chaos run: what an uninterrupted consumer says of a topic, and what consumers under fire say of it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kafka import KafkaProducer

from connectors.kafka import ensure_topics
from tests.chaos.dying import NO_TRANSACTIONS, STEPS, TRANSACTIONS
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, Consume, until
from tests.models import SCHEMA, draw_rows, write_model

ALPHA = 0.3
PATIENCE = 600.0
NONSENSE = 0.005
"""Share of events that are no JSON, so that dead letters are counted too."""


@dataclass(frozen=True)
class Size:
    """How large a run is. rate: events a second, so that there is something to do all the time."""

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
}


@dataclass
class World:
    """The cluster, the model, the topic, and the dice."""

    broker: Any
    size: Size
    model: Path
    logs: Path
    dice: random.Random
    cluster: Cluster

    def words(self, topic: str, group: str, delivery: str) -> list[object]:
        """The options that all consumers of a group share."""
        return [
            *("--topic", topic, "--group", group, "--alerts-topic", f"{group}-alerts"),
            *("--dead-letter-topic", f"{group}-dead", "--bootstrap-servers", self.broker.bootstrap),
            *("--model", self.model, "--alpha", ALPHA, "--alerts", "", "--record-timeout", "1d"),
            *("--delivery", delivery, "--snapshot-interval", self.size.snapshot_interval),
            *("--session-timeout", "10s", "--patience", "5m", "--max-poll-records", "500"),
            *("--explanations", "fast"),  # nothing is asked about them
        ]


def events(size: Size) -> Iterator[tuple[bytes, bytes]]:
    """Readings of interleaved records, some of them twice, some nonsense."""
    rng = np.random.default_rng(0)
    rows = draw_rows(SCHEMA, size.events // 5, 1)
    readings = [(f"r{i}", name, value) for i, row in enumerate(rows) for name, value in row.items()]
    place = np.argsort(np.arange(len(readings)) + rng.uniform(0, 2000, len(readings)))
    for count, i in enumerate(place[: size.events].tolist()):
        record, name, value = readings[i]
        document = json.dumps({"record": record, "feature": name, "value": value}).encode()
        yield record.encode(), b"nonsense %d" % count if rng.random() < NONSENSE else document


@dataclass
class Said:
    """What readers of committed messages find. alerts: id → how often; letters: source position → how often."""

    alerts: Counter[str] = field(default_factory=Counter)
    letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    content: dict[str, tuple[str, int]] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def said(world: World, group: str) -> Said:
    found = Said()
    for message in world.cluster.read(f"{group}-alerts"):
        alert = json.loads(message.value)
        found.alerts[alert["id"]] += 1
        found.content[alert["id"]] = alert["record"], alert["raised_at"]
        found.order[alert["record"]].append(alert["id"])
    for message in world.cluster.read(f"{group}-dead"):
        headers = {name: value.decode() for name, value in message.headers}
        found.letters[headers["partition"], headers["offset"]] += 1
    return found


class Fire:
    """Kills, moves and cuts off the consumers of one group until all of the quota is used up."""

    def __init__(self, world: World, mode: str) -> None:
        self.world, self.group = world, mode
        self.words = world.words(topic_of(mode), mode, mode)
        self.serial = 0
        self.counts: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        others = NO_TRANSACTIONS if mode == "exactly-once" else TRANSACTIONS
        self.left = [step for step in STEPS if step not in others]
        world.dice.shuffle(self.left)
        self.members: dict[int, Consume] = {i: self.start(i) for i in range(world.size.consumers)}
        self.guest: Consume | None = None

    def start(self, seat: int | None, dying: tuple[str, int] | None = None) -> Consume:
        """A consumer with a seat comes back to its partitions; a guest has none, so its coming moves partitions."""
        self.serial += 1
        seated = [] if seat is None else ["--instance", f"seat-{seat}"]
        log = self.world.logs / f"{self.group}-{self.serial:03d}.log"
        module = ("tests.chaos.dying", *dying) if dying else ("deformer_stream.cli.main",)
        return Consume(log, *self.words, *seated, module=module)

    def kill(self) -> None:
        """One of the seated ones dies and comes back. As long as a step of the road is left at which nobody has died,
        it comes back as one that dies there by itself, and then once more."""
        dice = self.world.dice
        seat = dice.choice(sorted(self.members))
        member = self.members[seat]
        if dice.random() < 0.8:  # the others die while they start
            member.wait_until_ready()
            time.sleep(dice.uniform(0, 3))
        self.slay(member)
        if self.left:
            step = self.left.pop()
            fated = self.members[seat] = self.start(seat, (step, dice.randint(1, 10)))
            try:
                assert fated.process.wait(120) == -signal.SIGKILL, fated.said()[-2000:]
                self.counts["kills"] += 1
                self.steps[step] += 1
            except subprocess.TimeoutExpired:  # it never came to that step: it dies as the others do
                print(f"chaos: {step} not reached", file=sys.stderr, flush=True)
                self.slay(fated)
        self.members[seat] = self.start(seat)

    def slay(self, member: Consume) -> None:
        member.process.kill()
        member.process.wait()
        self.counts["kills"] += 1

    def move(self) -> None:
        """A guest comes, or goes in order."""
        if self.guest is None:
            self.guest = self.start(None)
        else:
            self.guest.wait_until_ready()
            self.guest.stop()
            self.guest = None
        self.counts["rebalances"] += 1

    def cut(self) -> None:
        """A broker stops, in order or not, and comes back."""
        self.gather()
        node = self.world.dice.randint(1, self.world.size.brokers)
        stop = self.world.dice.choice([self.world.broker.stop_node, self.world.broker.kill])
        stop(node)
        time.sleep(self.world.dice.uniform(1, 5))
        self.world.broker.start_node(node)
        self.counts["broker_restarts"] += 1

    def black_out(self) -> None:
        """All brokers are away; nobody may end for it."""
        self.gather()
        nodes = range(1, self.world.size.brokers + 1)
        for node in nodes:
            self.world.broker.kill(node)
        time.sleep(self.world.size.blackout)
        self.settle()
        threads = [threading.Thread(target=self.world.broker.start_node, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.counts["blackouts"] += 1

    def rage(self) -> None:
        """Until the quota is used up; an injected death follows a plain one, so kills come in ones and twos."""
        size = self.world.size
        deeds = [self.move] * size.rebalances + [self.cut] * size.broker_restarts
        deeds += [self.black_out] * (size.blackout > 0)
        while deeds or self.counts["kills"] < size.kills:
            killing = self.counts["kills"] < size.kills
            share = len(deeds) / (len(deeds) + max(1, size.kills - self.counts["kills"]))
            deed = (
                deeds.pop(self.world.dice.randrange(len(deeds)))
                if deeds and (not killing or self.world.dice.random() < share)
                else self.kill
            )
            deed()
            print(f"chaos: {self.group} {dict(self.counts)}", file=sys.stderr, flush=True)
            self.settle()
            time.sleep(self.world.dice.uniform(0.5, 4))

    def gather(self) -> None:
        """Wait until everybody is ready: a program that starts while no broker is there ends, as it should."""
        self.settle()
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            member.wait_until_ready()

    def settle(self) -> None:
        """Whoever ended by itself must not have: a fault of its own is a finding. Only one that could not reach the
        brokers when it started is started again, as its supervisor would."""
        for seat, member in list(self.members.items()):
            if self._ended(member):
                self.members[seat] = self.start(seat)
        if self.guest is not None and self._ended(self.guest):
            self.guest = self.start(None)

    def _ended(self, member: Consume) -> bool:
        code = member.process.poll()
        if code == 4 and not member.events("ready"):
            self.counts["started_again"] += 1
            return True
        assert code is None, f"ended with {code}: {member.said()[-2000:]}"
        return False

    def end(self) -> None:
        """In order, so that what is left open is committed. One that has only begun to start knows no signal yet."""
        self.gather()
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            member.stop()

    def stop(self) -> None:
        for member in [*self.members.values(), *([self.guest] if self.guest else [])]:
            member.__exit__(None, None, None)


def chaos(size: Size, modes: list[str], seed: int, logs: Path) -> dict[str, Any]:
    """The whole run; its figures, with `ok`."""
    broker = load_broker_script().start(size.brokers)
    cluster = None
    try:
        cluster = Cluster(broker.bootstrap)
        world = World(broker, size, write_model(logs / "model"), logs, random.Random(seed), cluster)  # noqa: S311 -- dice, no secrets
        ensure_topics(broker.bootstrap, {topic_of(mode): {"num_partitions": size.partitions} for mode in modes})
        figures: dict[str, Any] = {"ok": True, "seed": seed, "events": size.events, "partitions": size.partitions}
        for mode in modes:
            figures[mode] = under_fire(world, mode)
        calm = in_peace(world, topic_of(modes[0]))
        for mode in modes:
            figures[mode] |= compared(calm, said(world, mode), mode)
            figures["ok"] &= figures[mode].pop("ok")
        figures["alerts"], figures["letters"] = len(calm.alerts), len(calm.letters)
        return figures
    finally:
        if cluster is not None:
            cluster.close()
        broker.stop()


def topic_of(mode: str) -> str:
    """Each run has the same events in a topic of its own, so that there is something to do all the time."""
    return f"events-{mode}"


def in_peace(world: World, topic: str) -> Said:
    """One consumer, uninterrupted."""
    with Consume(world.logs / "calm.log", *world.words(topic, "calm", "exactly-once")) as consumer:
        consumer.wait_for(world.cluster.all_consumed(topic, "calm"), "all events", PATIENCE)
        consumer.stop()
    return said(world, "calm")


def send(world: World, topic: str) -> None:
    """All events at the world's rate, by a sender that outlasts every outage and writes each once and in order."""
    sender = KafkaProducer(
        bootstrap_servers=world.broker.bootstrap.split(","),
        acks="all",
        enable_idempotence=True,
        delivery_timeout_ms=900_000,
    )
    began = time.monotonic()
    sent = []
    for count, (key, value) in enumerate(events(world.size)):
        time.sleep(max(0.0, began + count / world.size.rate - time.monotonic()))
        sent.append(sender.send(topic, key=key, value=value))
    sender.flush(timeout=PATIENCE)
    assert all(future.succeeded() for future in sent)
    sender.close()


def under_fire(world: World, mode: str) -> dict[str, Any]:
    """Several consumers in trouble, while the events come."""
    began = time.monotonic()
    fire = Fire(world, mode)
    try:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, world, topic_of(mode))
            fire.rage()
            sending.result()
        until(world.cluster.all_consumed(topic_of(mode), mode), "all events", PATIENCE)
        fire.end()
    finally:
        fire.stop()
    return {**fire.counts, "steps": dict(fire.steps), "seconds": round(time.monotonic() - began)}


def compared(calm: Said, found: Said, mode: str) -> dict[str, Any]:
    """What is missing, what came twice, what differs."""
    lost = calm.alerts.keys() - found.alerts.keys()
    extra = found.alerts.keys() - calm.alerts.keys()
    twice = sum(n - 1 for n in found.alerts.values())
    differing = [i for i in calm.content.keys() & found.content.keys() if calm.content[i] != found.content[i]]
    letters_lost = calm.letters.keys() - found.letters.keys()
    letters_twice = sum(n - 1 for n in found.letters.values())
    disorder = [r for r, ids in found.order.items() if list(dict.fromkeys(ids)) != calm.order.get(r)]
    once = mode == "exactly-once"
    return {
        "ok": not (lost or extra or differing or letters_lost or disorder) and not (once and (twice or letters_twice)),
        "lost": len(lost),
        "extra": len(extra),
        "doubled": twice,
        "differing": len(differing),
        "out_of_order": len(disorder),
        "letters_lost": len(letters_lost),
        "letters_extra": len(found.letters.keys() - calm.letters.keys()),
        "letters_doubled": letters_twice,
    }
