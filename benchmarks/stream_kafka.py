"""The parts of `benchmarks.stream` that use a real Kafka and run the consumer as a process."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import orjson
from kafka import KafkaConsumer, TopicPartition

from benchmarks.feed import (
    BATCH_MESSAGES,
    OUTLIER_VALUE,
    EventFeed,
    ProduceConnection,
    encode_records,
    make_model,
    make_quiet_calibration,
    train_model,
)
from benchmarks.irregular_feed import (
    MessageFeed,
    make_irregular_calibration,
    make_irregular_model,
    produce,
    read_or_simulate_records,
)
from benchmarks.recovery import measure_ready_seconds
from benchmarks.stream_local import make_encoders
from benchmarks.tables import get_tables_folder
from connectors.kafka import KafkaCluster, ensure_topics
from deformer_stream import model_store
from deformer_stream.codec.schema_formats import frame
from deformer_stream.runtime.timing import limit_rate
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, RunningConsumer
from tests.schema_registry import run_registry

Rows = Iterator[dict[str, Any]]
ChangeMessage = Callable[[tuple[bytes | None, bytes]], tuple[bytes | None, bytes]]

PARTITIONS = 4
OPEN_RECORDS = 1024
"""Records that are open at once in each partition."""
NUMBERS_OF_MODELS = (1, 10, 50)
STALL_SECONDS = 120.0
"""Seconds without progress of the consumer after which a benchmark fails."""
LINGER_SECONDS = 0.005
"""Seconds for which the producer gathers the messages of one request: the default of a Kafka producer."""
READINGS_PER_MESSAGE = {"json": 1, "many": 4, "arrow": 1000}
"""Readings of a message by message format."""
REGISTRY_RUNS = (("json", "json"), ("json-schema", "json"), ("avro", "json"), ("protobuf", "json"), ("json", "avro"))
"""Values of --format and --output-format whose throughput is compared. The first ones need no schema registry."""
REGISTRY_READINGS_PER_ALERT = 5000


@contextmanager
def _run_consumer(
    options: argparse.Namespace, folder: Path, bootstrap: str, topic: str, *words: str
) -> Iterator[RunningConsumer]:
    """Run `deformer-stream consume` on a topic within a `with` block, with the model of the options."""
    model = folder / f"{options.preset}-{options.features}-{options.gaussians}"
    if options.trained and not model.exists():
        train_model(model, options.preset, options.features)
    if not model.exists():
        model_store.write(
            model, make_model(options.preset, options.features, options.gaussians), make_quiet_calibration(), {}, ""
        )
    with _run_model(options, folder, model, bootstrap, topic, *words) as consumer:
        yield consumer


@contextmanager
def _run_model(
    options: argparse.Namespace, folder: Path, model: Path, bootstrap: str, topic: str, *words: str
) -> Iterator[RunningConsumer]:
    """Run `deformer-stream consume` on a topic within a `with` block, with the model of a directory."""
    with _run_options(options, folder, bootstrap, topic, "--model", str(model), *words) as consumer:
        yield consumer


@contextmanager
def _run_options(
    options: argparse.Namespace, folder: Path, bootstrap: str, topic: str, *words: str
) -> Iterator[RunningConsumer]:
    """Run `deformer-stream consume` on a topic within a `with` block, with options that name its models."""
    settings = [word for setting in options.set for word in ("--" + setting).split("=", 1)]
    kafka = ["--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap, "--client", options.client]
    arguments = [*kafka, "--alerts", ""]
    log = folder / f"{topic}.log"
    with RunningConsumer(
        log, *arguments, *settings, *words, variables={"OMP_NUM_THREADS": str(options.threads)}
    ) as consumer:
        yield consumer


def _create_topic(bootstrap: str) -> str:
    """Create a topic and wait until its partitions have leaders, because `ProduceConnection` does not retry."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(KafkaCluster(bootstrap), {name: {"num_partitions": PARTITIONS}})
    with closing(Cluster(bootstrap)) as cluster:
        cluster.read_end_offsets(name)
    return name


def _make_messages(
    options: argparse.Namespace, payload: str, readings_per_outlier: int = 0
) -> list[Iterator[tuple[bytes | None, bytes]]]:
    """Return for each partition an endless iterator over key and value of its messages.

    Args:
        options: The command's options.
        payload: The message format.
        readings_per_outlier: How many readings come on average to one outlier; 0 for none.
    """
    feeds = [
        EventFeed(options.features, OPEN_RECORDS, partition, readings_per_outlier=readings_per_outlier)
        for partition in range(PARTITIONS)
    ]
    if payload == "arrow":
        return [feed.arrow_messages(READINGS_PER_MESSAGE["arrow"]) for feed in feeds]
    if payload == "many":
        return [feed.json_messages_of_many(READINGS_PER_MESSAGE["many"]) for feed in feeds]
    return [feed.json_messages() for feed in feeds]


def _fill_topic(
    options: argparse.Namespace,
    bootstrap: str,
    topic: str,
    payload: str,
    change: ChangeMessage | None = None,
    readings_per_outlier: int = 0,
) -> int:
    """Produce at least `--events` readings and return their number; `change` is applied to each message."""
    connection = ProduceConnection(bootstrap, topic)
    feeds = _make_messages(options, payload, readings_per_outlier)
    batch_size = max(1, BATCH_MESSAGES // READINGS_PER_MESSAGE[payload])
    sent = 0
    for partition in itertools.cycle(range(PARTITIONS)):
        messages = list(itertools.islice(feeds[partition], batch_size))
        if change is not None:
            messages = [change(message) for message in messages]
        connection.send([(partition, encode_records(messages), batch_size)])
        connection.wait_for_acknowledgements(at_most=8)
        sent += batch_size * READINGS_PER_MESSAGE[payload]
        if sent >= options.events and partition == PARTITIONS - 1:
            break
    connection.wait_for_acknowledgements()
    connection.close()
    return sent


def throughput(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure accepted events per second for each message format, without the first tenth of the events."""
    with load_broker_script().start() as broker:
        for payload in options.payloads.split(","):
            topic = _create_topic(broker.bootstrap)
            sent = _fill_topic(options, broker.bootstrap, topic, payload)
            with _run_consumer(options, folder, broker.bootstrap, topic) as consumer:
                progress = _wait_for_events(consumer, sent)
                cpu_seconds = _read_cpu_seconds(consumer.process.pid)
                consumer.stop()
            ended = next(at for at, n in progress if n == progress[-1][1])
            yield {
                "preset": options.preset,
                "features": options.features,
                "gaussians": None if options.trained else options.gaussians,
                "model": "trained" if options.trained else "random",
                "threads": options.threads,
                "payload": payload,
                "readings_a_message": READINGS_PER_MESSAGE[payload],
                "events": sent,
                "events_/s": round(_measure_rate(progress, sent)),
                "cores_used": round(cpu_seconds / (ended - progress[0][0]), 2),
            }


def models(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure accepted events per second and memory with 1, 10 and 50 models, in turn, on the same messages.

    The shares are those of the throughput with one model in the same round, by the clock and by the processor time of
    the consumer, which other processes of the machine hardly change. The memory is that of the process after the last
    event; that of a further model is the difference from the process with one model, divided among the others.
    """
    for number in range(max(NUMBERS_OF_MODELS)):
        # Models with equal weights are refused: the ids of their alerts could be equal.
        model = make_model(options.preset, options.features, options.gaussians, seed=number)
        model_store.write(folder / "models" / str(number), model, make_quiet_calibration(), {}, "")
    for num_models in NUMBERS_OF_MODELS[1:]:
        subset = folder / f"models-{num_models}"
        subset.mkdir()
        for number in range(num_models):
            (subset / str(number)).symlink_to(folder / "models" / str(number))
    rates: dict[int, list[float]] = {num_models: [] for num_models in NUMBERS_OF_MODELS}
    cpu_rates: dict[int, list[float]] = {num_models: [] for num_models in NUMBERS_OF_MODELS}
    resident: dict[int, list[int]] = {num_models: [] for num_models in NUMBERS_OF_MODELS}
    with load_broker_script().start() as broker:
        for _, num_models in itertools.product(range(options.rounds), NUMBERS_OF_MODELS):
            # A topic for each run: the brokers have it in memory, as that of the run before.
            topic = _create_topic(broker.bootstrap)
            sent = _fill_topic(options, broker.bootstrap, topic, "json", _name_types)
            words = ["--model", str(folder / "models" / "0"), "--record-timeout", "1d"]
            if num_models > 1:
                words = [
                    "--models",
                    str(folder / f"models-{num_models}"),
                    "--model-by",
                    f"one_of_{num_models}",
                    *words[2:],
                ]
            with _run_options(options, folder, broker.bootstrap, topic, *words) as consumer:
                rate, cpu_rate = _measure_rates(consumer, sent)
                rates[num_models].append(rate)
                cpu_rates[num_models].append(cpu_rate)
                resident[num_models].append(_read_resident_bytes(consumer.process.pid))
                consumer.stop()
    for num_models in NUMBERS_OF_MODELS:
        shares, cpu_shares = (_compute_shares(part[num_models], part[1]) for part in (rates, cpu_rates))
        further = [more - alone for more, alone in zip(resident[num_models], resident[1], strict=True)]
        yield {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "models": num_models,
            "rounds": options.rounds,
            "events": options.events,
            "events_/s": round(median(rates[num_models])),
            "share_of_one_model": round(median(shares), 3),
            "events_/cpu_s": round(median(cpu_rates[num_models])),
            "share_by_cpu": round(median(cpu_shares), 3),
            "smallest_share_by_cpu": round(min(cpu_shares), 3),
            "resident_MiB": round(median(resident[num_models]) / 2**20, 1),
            "MiB_a_further_model": round(median(further) / 2**20 / max(1, num_models - 1), 2),
        }


def registry(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure accepted events per second of the formats of a schema registry against JSON, in turn, `--rounds` times.

    Messages have one reading, and several. All runs write evidence, and those with one reading a few alerts, as JSON or
    as Avro. The shares are those of the throughput with JSON alone in the same round, by the clock and by the processor
    time of the consumer, which other processes of the machine hardly change.
    """
    payloads = [payload for payload in options.payloads.split(",") if payload != "arrow"]
    runs = [(payload, *formats) for payload in payloads for formats in choose_registry_runs(options.outputs)]
    rates: dict[tuple[str, str, str], list[float]] = {run: [] for run in runs}
    cpu_rates: dict[tuple[str, str, str], list[float]] = {run: [] for run in runs}
    with load_broker_script().start() as broker, run_registry() as schemas:
        for _, (payload, message_format, output_format) in itertools.product(range(options.rounds), runs):
            topic = _create_topic(broker.bootstrap)
            change = None
            if message_format != "json":
                schema, encode = make_encoders(READINGS_PER_MESSAGE[payload] == 1)[message_format]
                schema_id = schemas.add(schema.text, schema.type, f"{topic}-value")
                change = make_conversion(schema_id, encode)
            sent = _fill_topic(options, broker.bootstrap, topic, payload, change, REGISTRY_READINGS_PER_ALERT)
            words = ["--format", message_format, "--output-format", output_format, "--evidence", "on"]
            if {message_format, output_format} != {"json"}:
                words += ["--schema-registry", schemas.url]
            with _run_consumer(options, folder, broker.bootstrap, topic, *words) as consumer:
                run = payload, message_format, output_format
                rate, cpu_rate = _measure_rates(consumer, sent)
                rates[run].append(rate)
                cpu_rates[run].append(cpu_rate)
                consumer.stop()
    for run in runs:
        alone = run[0], "json", "json"
        shares, cpu_shares = (_compute_shares(part[run], part[alone]) for part in (rates, cpu_rates))
        yield {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "format": run[1],
            "output": run[2],
            "readings_a_message": READINGS_PER_MESSAGE[run[0]],
            "rounds": options.rounds,
            "events": options.events,
            "events_/s": round(median(rates[run])),
            "share_of_json": round(median(shares), 3),
            "events_/cpu_s": round(median(cpu_rates[run])),
            "share_by_cpu": round(median(cpu_shares), 3),
        }


def choose_registry_runs(outputs: str) -> list[tuple[str, str]]:
    """Return the formats of messages and outputs that are compared, the first of which is JSON for both.

    Args:
        outputs: Formats of the outputs, comma-separated.
    """
    chosen = [formats for formats in REGISTRY_RUNS if formats[1] in outputs.split(",")]
    return list(dict.fromkeys([REGISTRY_RUNS[0], *chosen]))


def make_conversion(schema_id: int, encode: Callable[[dict[str, Any]], bytes]) -> ChangeMessage:
    """Return the function that converts a JSON message to a format of a schema registry."""
    return lambda message: (message[0], frame(schema_id, encode(orjson.loads(message[1]))))


def _name_types(message: tuple[bytes | None, bytes]) -> tuple[bytes | None, bytes]:
    """Return a message with fields that divide the records among models, one for each number of models."""
    key, value = message
    number = int((key or b"").rpartition(b"/")[2])
    fields = "".join(f'"one_of_{n}":"{number % n}",' for n in NUMBERS_OF_MODELS[1:])
    return key, b"{" + fields.encode() + value[1:]


def _measure_rate(progress: list[tuple[float, int]], sent: int) -> float:
    """Return events per second of a progress of times and numbers of events, without the first tenth of the events."""
    measured = [(at, n) for at, n in progress if 0.1 * sent <= n <= sent]
    began, first = measured[0]
    ended, last = next(point for point in measured if point[1] == measured[-1][1])
    return (last - first) / (ended - began)


def _measure_rates(consumer: RunningConsumer, sent: int) -> tuple[float, float]:
    """Wait for this many events, and return those per second of the clock and per second of processor time."""
    cpu_progress: list[tuple[float, int]] = []
    progress = _wait_for_events(consumer, sent, cpu_progress)
    return _measure_rate(progress, sent), _measure_rate(cpu_progress, sent)


def _compute_shares(rates: list[float], reference_rates: list[float]) -> list[float]:
    """Return the rate of each round as a share of the reference rate of the same round."""
    return [rate / reference for rate, reference in zip(rates, reference_rates, strict=True)]


def _wait_for_events(
    consumer: RunningConsumer, events: int, cpu_progress: list[tuple[float, int]] | None = None
) -> list[tuple[float, int]]:
    """Wait until the consumer has accepted this many events; return the progress, times and numbers of events.

    Args:
        consumer: The consumer.
        events: The number of events.
        cpu_progress: The same progress is appended with the consumer's seconds of processor time in place of times.
    """
    progress: list[tuple[float, int]] = []
    while not progress or progress[-1][1] < events:
        assert consumer.process.poll() is None, consumer.read_log()
        try:
            accepted = int(consumer.read_metrics()["deformer_events_total"])
        except (urllib.error.URLError, OSError):
            accepted = 0
        progress.append((time.monotonic(), accepted))
        if cpu_progress is not None:
            cpu_progress.append((_read_cpu_seconds(consumer.process.pid), accepted))
        last_progress = next(at for at, n in progress if n == accepted)
        assert time.monotonic() - last_progress < STALL_SECONDS, (
            f"the consumer stopped at {accepted} of {events} events: {consumer.read_log()}"
        )
        time.sleep(0.1)
    return progress


def _read_cpu_seconds(process: int) -> float:
    """Return the seconds of processor time that a process has used."""
    with Path(f"/proc/{process}/stat").open() as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _read_resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    with Path(f"/proc/{process}/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@dataclass(frozen=True, slots=True)
class _ProducerResult:
    """What a producer has sent.

    Attributes:
        num_events: All events, those of the warm-up included.
        max_delay: The longest delay of a request after its planned time, in seconds, after the warm-up.
        sent_at_by_record: For records with an outlier after the warm-up, when the outlier was sent.
    """

    num_events: int
    max_delay: float
    sent_at_by_record: dict[str, float]


class _Producer:
    """A process that produces messages at a steady rate, one request every `LINGER_SECONDS`.

    It is a process of its own, because it would otherwise share the GIL with the thread that reads the alerts.

    Args:
        options: The command's options, among them the rate.
        bootstrap: Host and port of the broker.
        topic: The topic.
        readings_per_outlier: How many readings come on average to one outlier; 0 for none.
        warm_up: Seconds at the beginning that are not part of the result.
        is_prepared: Whether all messages are encoded before the first one is sent.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        bootstrap: str,
        topic: str,
        readings_per_outlier: int = 0,
        warm_up: int = 0,
        is_prepared: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._results, results_of_process = context.Pipe()
        arguments = options, bootstrap, topic, readings_per_outlier, warm_up, is_prepared, results_of_process
        self._process = context.Process(target=_produce, args=arguments)
        self._process.start()
        self._results.recv()

    def start(self) -> None:
        """Begin to produce."""
        self._results.send("go")

    def is_alive(self) -> bool:
        """Return whether the process still produces."""
        return not self._results.poll()

    def join(self) -> _ProducerResult:
        """Wait for the end of the process and return what it has sent."""
        result: _ProducerResult = self._results.recv()
        self._process.join()
        return result


def _produce(
    options: argparse.Namespace,
    bootstrap: str,
    topic: str,
    readings_per_outlier: int,
    warm_up: int,
    is_prepared: bool,
    results: Connection,
) -> None:
    """Produce messages in the process of a `_Producer`, and send a `_ProducerResult` back."""
    outlier = b"%r" % OUTLIER_VALUE
    connection, feeds = ProduceConnection(bootstrap, topic), _make_messages(options, "json", readings_per_outlier)

    def make_requests() -> Iterator[tuple[list[tuple[int, bytes, int]], list[str]]]:
        """Yield the batches of each request, and the records that have an outlier in it."""
        for numbers in share_messages(options.rate, warm_up + options.seconds):
            by_partition = [list(itertools.islice(feed, n)) for feed, n in zip(feeds, numbers, strict=True)]
            messages = itertools.chain.from_iterable(by_partition)
            records = [key.decode() for key, value in messages if key is not None and outlier in value]
            yield [(p, encode_records(part), len(part)) for p, part in enumerate(by_partition) if part], records

    requests = list(make_requests()) if is_prepared else make_requests()
    results.send("ready")
    results.recv()
    times, num_events, sent_at_by_record = list[float](), 0, dict[str, float]()
    for batches, records in limit_rate(requests, 1 / LINGER_SECONDS):
        times.append(connection.send(batches) if batches else time.time())
        connection.wait_for_acknowledgements(at_most=16)
        num_events += sum(count for _, _, count in batches)
        for record in records:
            sent_at_by_record.setdefault(record, times[-1])  # a record raises its alert at its first outlier
    connection.wait_for_acknowledgements()
    connection.close()
    first = round(warm_up / LINGER_SECONDS)
    max_delay = max(at - times[0] - i * LINGER_SECONDS for i, at in enumerate(times[first:], first))
    measured = {record: at for record, at in sent_at_by_record.items() if at >= times[first]}
    results.send(_ProducerResult(num_events, max_delay, measured))


def share_messages(rate: float, seconds: float) -> Iterator[list[int]]:
    """Yield for each request how many messages each partition gets, in turn.

    Args:
        rate: Messages per second.
        seconds: How long messages are sent, one request every `LINGER_SECONDS`.
    """
    for request in range(round(seconds / LINGER_SECONDS)):
        begin, end = (int(rate * LINGER_SECONDS * i) for i in (request, request + 1))
        yield [len(range(begin + (p - begin) % PARTITIONS, end, PARTITIONS)) for p in range(PARTITIONS)]


class AlertReader(threading.Thread):
    """A thread that reads alerts as a client does that reads only committed messages.

    Attributes:
        is_over: Set to end the thread.
        received_at_by_record: When the first alert of each record was received.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._reader = KafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )
        self._reader.assign([TopicPartition(topic, p) for p in self._reader.partitions_for_topic(topic)])
        self._reader.seek_to_end()
        for partition in self._reader.assignment():
            self._reader.position(partition)
        self.is_over = threading.Event()
        self.received_at_by_record: dict[str, float] = {}

    def run(self) -> None:
        """Read alerts until `is_over` is set."""
        while not self.is_over.is_set():
            polled = self._reader.poll(timeout_ms=100)
            now = time.time()
            for messages in polled.values():
                for message in messages:
                    self.receive(orjson.loads(message.value), now)
        self._reader.close()

    def receive(self, alert: dict[str, Any], now: float) -> None:
        """Store when an alert was received."""
        self.received_at_by_record.setdefault(alert["record"], now)


def _read_lag(consumer: RunningConsumer) -> int:
    """Return the consumer lag of all partitions, in messages."""
    return int(
        sum(value for name, value in consumer.read_metrics().items() if name.startswith("deformer_consumer_lag"))
    )


def sustained(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure consumer lag and memory every second while messages are produced at a steady rate.

    Memory grows until each partition holds its largest number of ids of closed records
    (`engine.Limits.max_closed_ids`). At 10,000 readings per second this takes eleven minutes.
    """
    with load_broker_script().start(is_long_running=True) as broker:
        topic = _create_topic(broker.bootstrap)
        with _run_consumer(options, folder, broker.bootstrap, topic) as consumer:
            consumer.wait_until_ready()
            producer = _Producer(options, broker.bootstrap, topic)
            producer.start()
            lags, memory = [], []
            began = time.monotonic()
            while producer.is_alive():
                time.sleep(1)
                lags.append(_read_lag(consumer))
                memory.append(_read_resident_bytes(consumer.process.pid))
            seconds = time.monotonic() - began
            produced = producer.join()
            accepted = int(consumer.read_metrics()["deformer_events_total"])
            consumer.stop()
        third = len(lags) // 3
        yield {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "produced_/s": round(produced.num_events / seconds),
            "accepted_/s": round(accepted / seconds),
            "seconds": round(seconds),
            "lag_first_third": round(median(lags[:third])),
            "lag_last_third": round(median(lags[-third:])),
            "largest_lag": max(lags),
            "resident_MiB_first_third": round(median(memory[:third]) / 2**20),
            "resident_MiB_second_third": round(median(memory[third:-third]) / 2**20),
            "resident_MiB_last": round(memory[-1] / 2**20),
        }


def latency(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure the time from sending a reading to receiving its alert, by one clock, at each rate.

    Readings of the first `--warm` seconds do not count, because the broker's Java compiler is still at work then.
    """
    for rate in map(int, options.rates.split(",")):
        yield _measure_latency(argparse.Namespace(**{**vars(options), "rate": rate}), folder)


def _measure_latency(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the row of one rate."""
    with load_broker_script().start(is_long_running=True) as broker:
        topic = _create_topic(broker.bootstrap)
        with _run_consumer(options, folder, broker.bootstrap, topic) as consumer:
            consumer.wait_until_ready()
            alerts = AlertReader(broker.bootstrap, f"{topic}-alerts")
            alerts.start()
            readings_per_outlier = options.rate // 5 // PARTITIONS + 1  # about five alerts per second and partition
            producer = _Producer(options, broker.bootstrap, topic, readings_per_outlier, options.warm, is_prepared=True)
            producer.start()
            time.sleep(options.warm)
            before = consumer.read_metrics()
            produced = producer.join()
            time.sleep(2)
            alerts.is_over.set()
            alerts.join()
            means = _compute_means(before, consumer.read_metrics())
            consumer.stop()
        sent_at, received_at = produced.sent_at_by_record, alerts.received_at_by_record
        missing = sent_at.keys() - received_at.keys()
        milliseconds = [1000 * (received_at[record] - at) for record, at in sent_at.items() if record in received_at]
        percentiles = quantiles(milliseconds, n=100)
        return {
            "preset": options.preset,
            "features": options.features,
            "threads": options.threads,
            "events_/s": round(produced.num_events / (options.warm + options.seconds)),
            "alerts": len(milliseconds),
            "without_an_alert": len(missing),
            "median_ms": round(percentiles[49], 1),
            "p90_ms": round(percentiles[89], 1),
            "p99_ms": round(percentiles[98], 1),
            **means,
            "producer_late_ms": round(1000 * produced.max_delay),
        }


def evidence(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure throughput and latency with and without evidence for incidents, in turn, `--rounds` times.

    The last row has the ratio of the medians.
    """
    rows: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for number in range(options.rounds):
        for setting in ("off", "on") if number % 2 == 0 else ("on", "off"):
            changed = {"set": [*options.set, f"evidence={setting}"], "payloads": "json", "rate": options.evidence_rate}
            arguments = argparse.Namespace(**{**vars(options), **changed})
            (throughput_row,) = throughput(arguments, folder)
            latency_row = _measure_latency(arguments, folder)
            row = {
                "evidence": setting,
                "preset": options.preset,
                "features": options.features,
                "throughput_/s": throughput_row["events_/s"],
                "cores_used": throughput_row["cores_used"],
                "rate_/s": latency_row["events_/s"],
                **{name: latency_row[name] for name in ("alerts", "median_ms", "p90_ms", "p99_ms", "commit_ms")},
            }
            rows[setting].append(row)
            yield row
    ratios = {
        name: round(median(row[name] for row in rows["on"]) / median(row[name] for row in rows["off"]), 3)
        for name in ("throughput_/s", "cores_used", "rate_/s", "alerts", "median_ms", "p90_ms", "p99_ms", "commit_ms")
    }
    yield {"evidence": "on / off", "preset": options.preset, "features": options.features, **ratios}


def _compute_means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return mean size and durations of batches and commits between two readings of the metrics."""

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


def irregular(options: argparse.Namespace, folder: Path) -> Rows:
    """Measure whether the consumer keeps up with irregular readings of many long records at a fixed rate.

    The records begin at the same time, and their readings are sent in order of time. A few have an outlier. The latency
    is the time from sending the reading that raises an alert to receiving the alert.
    """
    num_messages = options.irregular_rate * options.seconds
    tables = get_tables_folder()
    records = read_or_simulate_records(tables.parent / "icu2012", options.stays, num_messages // options.stays)
    feed = MessageFeed.in_order_of_time(records, num_messages, PARTITIONS)
    model = Path(options.model) if options.model else folder / "irregular"
    if not options.model:
        network = make_irregular_model(options.preset, records.sensors)
        model_store.write(model, network, make_irregular_calibration(network.schema), {}, "")
    load_before = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    with load_broker_script().start(is_long_running=True) as broker:
        topic = _create_topic(broker.bootstrap)
        results, results_of_process = context.Pipe()
        with (
            # Records stay open, however long the consumer takes.
            _run_model(options, folder, model, broker.bootstrap, topic, "--record-timeout", "24h") as consumer,
            closing(KafkaConsumer(bootstrap_servers=broker.bootstrap)) as reader,
        ):
            consumer.wait_until_ready()
            alerts = IrregularAlertReader(broker.bootstrap, f"{topic}-alerts")
            alerts.start()
            process = context.Process(
                target=produce,
                args=(broker.bootstrap, topic, feed, options.irregular_rate, LINGER_SECONDS, results_of_process),
            )
            process.start()
            results.recv()
            before, began = consumer.read_metrics(), time.monotonic()
            cpu_before = _read_cpu_seconds(consumer.process.pid)
            results.send("go")
            lags, memory = [], []
            while not results.poll():
                time.sleep(1)
                lags.append(_count_unprocessed(reader, topic, consumer.read_metrics()))
                memory.append(_read_resident_bytes(consumer.process.pid))
            sent_at, seconds = results.recv(), time.monotonic() - began
            lag_at_end = _count_unprocessed(reader, topic, consumer.read_metrics())
            _wait_for_irregular_events(consumer, len(sent_at))
            drained_after = time.monotonic() - began - seconds
            cpu_seconds = _read_cpu_seconds(consumer.process.pid) - cpu_before
            process.join()
            time.sleep(2)
            alerts.is_over.set()
            alerts.join()
            after = consumer.read_metrics()
            consumer.stop()
    sent_at_by_source = _find_sending_times(feed, sent_at)
    milliseconds = sorted(
        1000 * (received_at - sent_at_by_source[source]) for source, received_at in alerts.received_at_by_source
    )
    # A model with random weights need not raise alerts.
    percentiles = [round(ms, 1) for ms in quantiles(milliseconds, n=100)] if len(milliseconds) > 1 else [None] * 99
    third = len(lags) // 3
    yield {
        "records": len(records.records),
        "model": "trained" if options.model else f"random {options.preset}",
        "threads": options.threads,
        "planned_/s": options.irregular_rate,
        "produced_/s": round(len(sent_at) / seconds),
        "accepted_/s": round(_count_events(after) / (seconds + drained_after)),
        "rejected": round(_count_rejected(after)),
        "cores_used": round(cpu_seconds / (seconds + drained_after), 2),
        "seconds": round(seconds),
        "lag_first_third": round(median(lags[:third])),
        "lag_last_third": round(median(lags[-third:])),
        "largest_lag": max(lags),
        "lag_at_end": lag_at_end,
        "drained_after_s": round(drained_after, 1),
        "alerts": len(milliseconds),
        "median_ms": percentiles[49],
        "p90_ms": percentiles[89],
        "p99_ms": percentiles[98],
        # Not the time to an alert, which is measured from the event times of the table.
        **{name: mean for name, mean in _compute_means(before, after).items() if name != "alert_out_after_ms"},
        "cache_rebuilds": round(after.get("deformer_cache_rebuilds_total", 0)),
        "resident_MiB": round(max(memory) / 2**20),
        "load_before": round(load_before, 1),
    }


def _count_events(metrics: dict[str, float]) -> float:
    """Return the number of accepted events."""
    return metrics.get("deformer_events_total", 0.0)


def _count_rejected(metrics: dict[str, float]) -> float:
    """Return the number of rejected events."""
    return sum(value for name, value in metrics.items() if name.startswith("deformer_events_rejected_total"))


def _count_unprocessed(reader: KafkaConsumer, topic: str, metrics: dict[str, float]) -> int:
    """Return how many messages of a topic the consumer has neither accepted nor rejected.

    The metric `deformer_consumer_lag` is not used. It refers to the end of the topic at the consumer's last fetch,
    which can be long ago if the consumer does not keep up.
    """
    end_offsets = reader.end_offsets([TopicPartition(topic, partition) for partition in range(PARTITIONS)])
    return int(sum(end_offsets.values()) - _count_events(metrics) - _count_rejected(metrics))


def _wait_for_irregular_events(consumer: RunningConsumer, num_events: int) -> None:
    """Wait until the consumer has accepted or rejected this many events."""
    num_done, progress_at = -1.0, time.monotonic()
    while num_done < num_events:
        metrics = consumer.read_metrics()
        now = _count_events(metrics) + _count_rejected(metrics)
        if now > num_done:
            num_done, progress_at = now, time.monotonic()
        assert time.monotonic() - progress_at < STALL_SECONDS, f"the consumer stopped at {num_done} of {num_events}"
        time.sleep(0.1)


def _find_sending_times(feed: MessageFeed, sent_at: np.ndarray) -> dict[tuple[int, int], float]:
    """Return when each message was sent, by its partition and its offset."""
    sent_at_by_source = {}
    for partition in range(PARTITIONS):
        own = sent_at[feed.partitions == partition].tolist()
        sent_at_by_source |= {(partition, offset): at for offset, at in enumerate(own)}
    return sent_at_by_source


class IrregularAlertReader(AlertReader):
    """A thread that reads alerts, and finds the messages that have raised them.

    Attributes:
        received_at_by_source: Partition and offset of the message that raised each alert, and when it was received.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(bootstrap, topic)
        self.received_at_by_source: list[tuple[tuple[int, int], float]] = []

    def receive(self, alert: dict[str, Any], now: float) -> None:
        """Store when an alert was received."""
        source = alert["source"]
        self.received_at_by_source.append(((source["partition"], source["offset"]), now))


def start(options: argparse.Namespace, folder: Path, times: int = 5) -> Rows:
    """Measure the seconds from the start of a process until `/readyz` reports that its partitions are restored."""
    options = argparse.Namespace(**{**vars(options), "preset": "small", "features": 40})
    seconds = []
    with load_broker_script().start(is_long_running=True) as broker:
        for _ in range(times):
            topic = _create_topic(broker.bootstrap)
            began = time.monotonic()
            with _run_consumer(options, folder, broker.bootstrap, topic) as consumer:
                seconds.append(measure_ready_seconds(consumer, began))
                consumer.stop()
    yield {
        "preset": "small",
        "features": 40,
        "ready_after_s": str([round(s, 1) for s in seconds]),
        "median_s": round(median(seconds), 2),
    }
