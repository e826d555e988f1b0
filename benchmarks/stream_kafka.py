"""The road from end to end: a real Kafka, and the real program as a process. See `benchmarks.stream`."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import orjson
from kafka import KafkaConsumer, TopicPartition

from benchmarks.feed import BATCH, WILD, Events, Wire, calm_calibration, model_of, records_of
from benchmarks.recovery import measure_ready_seconds
from connectors.kafka import ensure_topics
from deformer_stream import model_store
from deformer_stream.runtime.timing import limit_rate
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, Consume

Rows = Iterator[dict[str, Any]]

PARTITIONS = 4
OPEN = 1024
"""Records open at once in each partition."""
PATIENCE = 120.0
LINGER = 0.005
"""Seconds for which a producer gathers messages, all partitions' in one request: a Kafka producer's default."""
READINGS = {"json": 1, "many": 4, "arrow": 1000}
"""Readings of a message."""


@contextmanager
def _consuming(options: argparse.Namespace, folder: Path, bootstrap: str, topic: str, *words: str) -> Iterator[Consume]:
    model = folder / f"{options.preset}-{options.features}-{options.gaussians}"
    if not model.exists():
        model_store.write(
            model, model_of(options.preset, options.features, options.gaussians), calm_calibration(), {}, ""
        )
    given = [word for setting in options.set for word in ("--" + setting).split("=", 1)]
    where = ["--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap, "--model", model, "--alerts", ""]
    log = folder / f"{topic}.log"
    with Consume(log, *where, *given, *words, variables={"OMP_NUM_THREADS": str(options.threads)}) as consumer:
        yield consumer


def _topic(bootstrap: str) -> str:
    """A new topic whose partitions have leaders: `Wire` takes no for an answer."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(bootstrap, {name: {"num_partitions": PARTITIONS}})
    with closing(Cluster(bootstrap)) as cluster:
        cluster.ends(name)
    return name


def _messages(options: argparse.Namespace, payload: str, wild: int = 0) -> list[Iterator[tuple[bytes | None, bytes]]]:
    """For each partition, without end."""
    feeds = [Events(options.features, OPEN, partition, wild=wild) for partition in range(PARTITIONS)]
    if payload == "arrow":
        return [feed.arrow(READINGS["arrow"]) for feed in feeds]
    return [feed.singles() if payload == "json" else feed.many(READINGS["many"]) for feed in feeds]


def _fill(options: argparse.Namespace, bootstrap: str, topic: str, payload: str) -> int:
    """Readings that the topic has now, at least `--events`."""
    wire, feeds = Wire(bootstrap, topic), _messages(options, payload)
    each = max(1, BATCH // READINGS[payload])
    sent = 0
    for partition in itertools.cycle(range(PARTITIONS)):
        wire.send([(partition, records_of(list(itertools.islice(feeds[partition], each))), each)])
        wire.settle(at_most=8)
        sent += each * READINGS[payload]
        if sent >= options.events and partition == PARTITIONS - 1:
            break
    wire.settle()
    wire.close()
    return sent


def throughput(options: argparse.Namespace, folder: Path) -> Rows:
    """From the first tenth of the events on, by what the program says that it has accepted."""
    with load_broker_script().start() as broker:
        for payload in options.payloads.split(","):
            topic = _topic(broker.bootstrap)
            sent = _fill(options, broker.bootstrap, topic, payload)
            with _consuming(options, folder, broker.bootstrap, topic) as consumer:
                seen = _watched(consumer, sent)
                cpu = _cpu_of(consumer.process.pid)
                consumer.stop()
            rated = [(at, n) for at, n in seen if 0.1 * sent <= n <= sent]
            (began, first), (ended, last) = rated[0], next(point for point in rated if point[1] == rated[-1][1])
            yield {
                "preset": options.preset,
                "features": options.features,
                "guide": options.gaussians,
                "threads": options.threads,
                "payload": payload,
                "readings_a_message": READINGS[payload],
                "events": sent,
                "events_/s": round((last - first) / (ended - began)),
                "cores_used": round(cpu / (ended - seen[0][0]), 2),
            }


def _watched(consumer: Consume, events: int) -> list[tuple[float, int]]:
    """Time and events accepted, until there are so many."""
    seen: list[tuple[float, int]] = []
    while not seen or seen[-1][1] < events:
        assert consumer.process.poll() is None, consumer.said()
        try:
            accepted = int(consumer.metrics()["deformer_events_total"])
        except (urllib.error.URLError, OSError):
            accepted = 0
        seen.append((time.monotonic(), accepted))
        stuck = next(at for at, n in seen if n == accepted)
        assert time.monotonic() - stuck < PATIENCE, f"stuck at {accepted} of {events}: {consumer.said()}"
        time.sleep(0.1)
    return seen


def _cpu_of(process: int) -> float:
    """Seconds of processor time so far."""
    with Path(f"/proc/{process}/stat").open() as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _resident_of(process: int) -> int:
    with Path(f"/proc/{process}/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@dataclass(frozen=True, slots=True)
class _Sent:
    """late: seconds that a request went after its time, at most. went: record whose reading is wild → when that went.
    Both of the time after the warm-up."""

    events: int
    late: float
    went: dict[str, float]


class _Producer:
    """Sends at a steady rate, a request every `LINGER`; and remembers when the wild ones went.

    A process of its own, or it would share an interpreter with who reads the alerts. ahead: the messages are put
    together before the first one goes, for that is no work of a stream's. warm: seconds that are not spoken of.
    """

    def __init__(
        self, options: argparse.Namespace, bootstrap: str, topic: str, wild: int = 0, warm: int = 0, ahead: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._results, theirs = context.Pipe()
        self._process = context.Process(target=_produce, args=(options, bootstrap, topic, wild, warm, ahead, theirs))
        self._process.start()
        self._results.recv()

    def start(self) -> None:
        self._results.send("go")

    def is_alive(self) -> bool:
        return not self._results.poll()

    def join(self) -> _Sent:
        """What it did, when it has done so."""
        sent: _Sent = self._results.recv()
        self._process.join()
        return sent


def _produce(
    options: argparse.Namespace, bootstrap: str, topic: str, wild: int, warm: int, ahead: bool, results: Connection
) -> None:
    mark = b"%r" % WILD
    wire, feeds = Wire(bootstrap, topic), _messages(options, "json", wild)

    def requests() -> Iterator[tuple[list[tuple[int, bytes, int]], list[str]]]:
        for numbers in shares(options.rate, warm + options.seconds):
            some = [list(itertools.islice(feed, n)) for feed, n in zip(feeds, numbers, strict=True)]
            marked = [key.decode() for messages in some for key, value in messages if key is not None and mark in value]
            yield [(p, records_of(messages), len(messages)) for p, messages in enumerate(some) if messages], marked

    prepared = list(requests()) if ahead else requests()
    results.send("ready")
    results.recv()
    times, events, went = list[float](), 0, dict[str, float]()
    for batches, marked in limit_rate(prepared, 1 / LINGER):
        times.append(wire.send(batches) if batches else time.time())
        wire.settle(at_most=16)
        events += sum(count for _, _, count in batches)
        for record in marked:
            went.setdefault(record, times[-1])  # a record alerts at its first wild reading
    wire.settle()
    wire.close()
    first = round(warm / LINGER)
    late = max(at - times[0] - turn * LINGER for turn, at in enumerate(times[first:], first))
    results.send(_Sent(events, late, {record: at for record, at in went.items() if at >= times[first]}))


def shares(rate: float, seconds: float) -> Iterator[list[int]]:
    """For each request, how many messages each partition gets: one after the other in turn."""
    for turn in range(round(seconds / LINGER)):
        begin, end = (int(rate * LINGER * t) for t in (turn, turn + 1))
        yield [len(range(begin + (p - begin) % PARTITIONS, end, PARTITIONS)) for p in range(PARTITIONS)]


class _Alerts(threading.Thread):
    """Reads the alerts as a client of committed messages does."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._reader = KafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )
        self._reader.assign([TopicPartition(topic, p) for p in self._reader.partitions_for_topic(topic)])
        self._reader.seek_to_end()
        for where in self._reader.assignment():
            self._reader.position(where)
        self.over = threading.Event()
        self.came: dict[str, float] = {}

    def run(self) -> None:
        while not self.over.is_set():
            found = self._reader.poll(timeout_ms=100)
            now = time.time()
            for messages in found.values():
                for message in messages:
                    self.came.setdefault(orjson.loads(message.value)["record"], now)
        self._reader.close()


def _lag(consumer: Consume) -> int:
    return int(sum(value for name, value in consumer.metrics().items() if name.startswith("deformer_consumer_lag")))


def sustained(options: argparse.Namespace, folder: Path) -> Rows:
    """The lag second by second while messages come at the rate."""
    with load_broker_script().start(lasting=True) as broker:
        topic = _topic(broker.bootstrap)
        with _consuming(options, folder, broker.bootstrap, topic) as consumer:
            consumer.wait_until_ready()
            producer = _Producer(options, broker.bootstrap, topic)
            producer.start()
            lags, memory = [], []
            began = time.monotonic()
            while producer.is_alive():
                time.sleep(1)
                lags.append(_lag(consumer))
                memory.append(_resident_of(consumer.process.pid))
            took = time.monotonic() - began
            sent = producer.join()
            accepted = int(consumer.metrics()["deformer_events_total"])
            consumer.stop()
        third = len(lags) // 3
        yield {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "produced_/s": round(sent.events / took),
            "accepted_/s": round(accepted / took),
            "seconds": round(took),
            "lag_first_third": round(median(lags[:third])),
            "lag_last_third": round(median(lags[-third:])),
            "largest_lag": max(lags),
            "resident_MiB_first_third": round(median(memory[:third]) / 2**20),
            "resident_MiB_last": round(memory[-1] / 2**20),
        }


def latency(options: argparse.Namespace, folder: Path) -> Rows:
    """From handing a reading to the broker's connection until its alert is read, by one clock, at each rate; of what
    was sent after `--warm` seconds, in which the broker's Java compiles itself."""
    for rate in map(int, options.rates.split(",")):
        yield _latency(argparse.Namespace(**{**vars(options), "rate": rate}), folder)


def _latency(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with load_broker_script().start(lasting=True) as broker:
        topic = _topic(broker.bootstrap)
        with _consuming(options, folder, broker.bootstrap, topic) as consumer:
            consumer.wait_until_ready()
            alerts = _Alerts(broker.bootstrap, f"{topic}-alerts")
            alerts.start()
            wild = options.rate // 5 // PARTITIONS + 1
            producer = _Producer(options, broker.bootstrap, topic, wild, options.warm, ahead=True)
            producer.start()
            time.sleep(options.warm)
            before = consumer.metrics()
            sent = producer.join()
            time.sleep(2)
            alerts.over.set()
            alerts.join()
            means = _means(before, consumer.metrics())
            consumer.stop()
        missing = sent.went.keys() - alerts.came.keys()
        millis = [1000 * (alerts.came[record] - at) for record, at in sent.went.items() if record in alerts.came]
        cuts = quantiles(millis, n=100)
        return {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "events_/s": round(sent.events / (options.warm + options.seconds)),
            "alerts": len(millis),
            "without_an_alert": len(missing),
            "median_ms": round(cuts[49], 1),
            "p90_ms": round(cuts[89], 1),
            "p99_ms": round(cuts[98], 1),
            **means,
            "producer_late_ms": round(1000 * sent.late),
        }


def _means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What batches and commits were like in the mean, between two readings of the metrics."""

    def mean(name: str) -> float:
        total, count = (
            after[f"deformer_{name}_{kind}"] - before[f"deformer_{name}_{kind}"] for kind in ("sum", "count")
        )
        return total / max(1.0, count)

    return {
        "batch_events": round(mean("batch_events")),
        "alert_out_after_ms": round(1000 * mean("event_to_alert_seconds"), 1),
        "scoring_ms": round(1000 * mean("scoring_seconds"), 1),
        "commit_ms": round(1000 * mean("commit_seconds"), 1),
    }


def start(options: argparse.Namespace, folder: Path, times: int = 5) -> Rows:
    """Until `/readyz` says so: partitions assigned and restored."""
    options = argparse.Namespace(**{**vars(options), "preset": "small", "features": 40})
    took = []
    with load_broker_script().start(lasting=True) as broker:
        for _ in range(times):
            topic = _topic(broker.bootstrap)
            began = time.monotonic()
            with _consuming(options, folder, broker.bootstrap, topic) as consumer:
                took.append(measure_ready_seconds(consumer, began))
                consumer.stop()
    yield {
        "preset": "small",
        "features": 40,
        "ready_after_s": str([round(s, 1) for s in took]),
        "median_s": round(median(took), 2),
    }
