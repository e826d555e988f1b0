"""Tests of /healthz and /readyz of a running consumer: during an outage of the brokers, a restore and a rolling update.

`make test-outage` runs the outage with 90 seconds.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from connectors.kafka import describe_evidence_topic, describe_incident_topics, ensure_topics, produce
from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.runtime.process_metrics import STALL_SECONDS
from tests.conftest import find_free_port, start_broker
from tests.connectors.kafka_helpers import wait_for_transactions
from tests.incidents.evidence_logs import make_log
from tests.integration.programs import Cluster, RunningConsumer
from tests.mosquitto import run_mosquitto

pytestmark = pytest.mark.kafka

OUTAGE_SECONDS = float(os.environ.get("DEFORMER_OUTAGE_SECONDS", STALL_SECONDS + 8))
"""Length of the outage, longer than a process may be without progress."""

FEATURES = ("temperature", "pressure", "vibration")


@pytest.fixture(params=["kafka-python", "librdkafka"])
def client(request: pytest.FixtureRequest) -> str:
    """Return the name of a client library."""
    return str(request.param)


def make_options(bootstrap: str, topic: str, model: Path, client: str, *more: object) -> list[object]:
    """Return the options of a consumer whose group has the name of the topic."""
    return [
        *("--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap, "--model", model, "--alerts", ""),
        *("--record-timeout", "1d", "--client", client, "--explanations", "off", *more),
    ]


def send(cluster: Cluster, topic: str, first: int, count: int) -> None:
    """Send one reading for each of `count` records, whose ids are numbered from `first` on."""
    events = [{"record": f"r{first + i}", "feature": FEATURES[i % 3], "value": 0.1 * (i % 7)} for i in range(count)]
    produce(cluster.brokers, topic, [(event["record"].encode(), json.dumps(event).encode(), None) for event in events])


def send_invalid(cluster: Cluster, topic: str, count: int) -> None:
    """Send messages that become dead letters."""
    produce(cluster.brokers, topic, [(b"k%d" % i, b"nonsense", None) for i in range(count)])


def probe(consumer: RunningConsumer, path: str) -> int:
    """Return the status of a health check, 0 if the server is not reachable."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{consumer.port}{path}", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (urllib.error.URLError, ConnectionError):
        return 0


def has_commits(process: RunningConsumer) -> bool:
    """Return whether the metrics of a process have the number of its commits."""
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=10) as response:
        return b"deformer_commit_seconds_count" in response.read()


def has_processed(consumer: RunningConsumer, num_events: int, num_rejected: int) -> bool:
    """Return whether a consumer has processed a number of events and rejected a number of messages."""
    metrics = consumer.read_metrics()
    rejected = metrics.get('deformer_events_rejected_total{reason="not_json"}', 0)
    return metrics["deformer_events_total"] >= num_events and rejected == num_rejected


def wait_until_ready(consumer: RunningConsumer) -> None:
    """Wait until /readyz answers 200."""
    consumer.wait_for(lambda: probe(consumer, "/readyz") == 200, "/readyz", pause=0.2)


def make_evidence(model: Path) -> list[tuple[bytes, bytes, None]]:
    """Return messages of evidence of the model."""
    fingerprint = str(model_store.read_manifest(model)["fingerprint"])
    return [(b"", encode_evidence(batch), None) for batch in make_log(fingerprint, faults={0: [(30, 60)]})]


def run_incidents(log: Path, bootstrap: str, topic: str, model: Path, client: str) -> RunningConsumer:
    """Start `deformer-stream incidents` with a group that has the name of the topic."""
    return RunningConsumer(
        log,
        *("--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap, "--model", model, "--client", client),
        *("--records-per-day", "8640", "--fleet", "off", "--patience", "10m"),
        command="incidents",
    )


@pytest.mark.both_clients
@pytest.mark.parametrize(
    ("client", "session", "commit_interval"),
    [
        ("kafka-python", "45s", "100ms"),
        pytest.param("librdkafka", "45s", "100ms", marks=pytest.mark.long),
        ("librdkafka", "10s", "5s"),
    ],
)
def test_a_consumer_lives_through_an_outage_of_the_brokers(
    client: str, session: str, commit_interval: str, model_dir: Path, tmp_path: Path
) -> None:
    """The process is healthy all the time, and so is the one that makes incidents.

    Afterwards all is consumed, by the same process, with each effect once. With an interval of five seconds, the last
    events before the outage are not committed. No commit is in progress when the outage begins: if all brokers fail
    between the decision to commit and the end of the transaction, Kafka 4.3.1 and 4.4.0 may leave it open for ever.

    With a session shorter than the outage, librdkafka gives up the partitions, and is not ready until it has joined the
    group again. What was not committed is then processed again. On a busy machine the brokers start so late that this
    happens with 45 s, too, but after the outage.
    """
    loses_session = client == "librdkafka" and float(session.rstrip("s")) < OUTAGE_SECONDS
    with start_broker() as broker:
        cluster, name = Cluster(broker.bootstrap), "events"
        ensure_topics(cluster.brokers, {name: {"num_partitions": 2}})
        options = make_options(broker.bootstrap, name, model_dir, client, "--patience", "10m")
        options += ["--session-timeout", session, "--commit-interval", commit_interval]
        evidence = make_evidence(model_dir)
        ensure_topics(cluster.brokers, describe_evidence_topic(f"{name}-evidence"))
        with (
            RunningConsumer(tmp_path / "consumer.log", *options) as consumer,
            run_incidents(tmp_path / "incidents.log", broker.bootstrap, name, model_dir, client) as incidents,
        ):
            wait_until_ready(consumer)
            wait_until_ready(incidents)
            send(cluster, name, 0, 500)
            consumer.wait_for(cluster.is_consumed(name, name), "the first events")
            send(cluster, name, 500, 2_000)
            send_invalid(cluster, name, 100)
            produce(cluster.brokers, f"{name}-evidence", evidence[:75])
            consumer.wait_for(lambda: has_processed(consumer, 2_500, 100), "the events before the outage")
            incidents.wait_for(
                cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents"), "the evidence before the outage"
            )
            if commit_interval == "100ms":
                consumer.wait_for(cluster.is_consumed(name, name), "the commit before the outage")
            for suffix in ("dead-letter", f"{name}-state", "incidents", f"{name}-incidents-state"):
                wait_for_transactions(broker.bootstrap, f"{name}-{suffix}")
            broker.kill(1)
            end, seen = time.monotonic() + OUTAGE_SECONDS, list[tuple[int, int]]()
            incidents_seen: set[int] = set()
            while time.monotonic() < end:
                seen.append((probe(consumer, "/healthz"), probe(consumer, "/readyz")))
                incidents_seen.add(probe(incidents, "/healthz"))
                time.sleep(0.5)
            assert incidents_seen == {200}
            assert incidents.process.poll() is None, incidents.read_log()
            assert consumer.process.poll() is None, consumer.read_log()
            assert {healthy for healthy, _ in seen} == {200}
            assert {ready for _, ready in seen} <= ({200, 503} if loses_session else {200})
            broker.start_node(1)
            cluster.close()
            cluster = Cluster(broker.bootstrap)
            send(cluster, name, 2_500, 100)
            consumer.wait_for(cluster.is_consumed(name, name), "the events after the outage", patience=300.0, pause=0.5)
            totals = consumer.stop()
            produce(cluster.brokers, f"{name}-evidence", evidence[75:])
            consumed = cluster.is_consumed(f"{name}-evidence", f"{name}-{name}-incidents")
            incidents.wait_for(consumed, "the evidence after the outage", patience=300.0, pause=0.5)
            incidents.stop()
        ends = cluster.read_end_offsets(name)
        assert sum(ends.values()) == 2_700
        assert totals["open"] == 2_600
        letters = [dict(message.headers) for message in cluster.read_topic(f"{name}-dead-letter")]
        assert len({(letter["partition"], letter["offset"]) for letter in letters}) == len(letters) == 100
        # Only what was not committed when the process joined the group again may have been processed twice.
        _, _, *restored = consumer.list_log_events("partition_restored")
        num_uncommitted = sum(ends[line["partition"]] - line["committed_offset"] for line in restored)
        num_repeated = totals["events"] - 2_600
        assert 0 <= num_repeated <= num_uncommitted
        cluster.close()


def list_commands(bootstrap: str, model: Path, folder: Path, mqtt_port: int = 1) -> dict[str, tuple[object, ...]]:
    """Return the options of each command that connects to Kafka and has health checks, by a name."""
    kafka = ("--topic", "events", "--bootstrap-servers", bootstrap)
    token = folder / "token"
    token.write_text("a-token-of-a-plant-7\n")
    return {
        "consume": (*kafka, "--model", model, "--alerts", ""),
        "incidents": (*kafka, "--model", model, "--records-per-day", "100", "--fleet", "off"),
        "incidents --deliver-only": (*kafka, "--deliver-only", "--webhook", "http://127.0.0.1:9"),
        "bridge": (*kafka, "--source", f"mqtt://127.0.0.1:{mqtt_port}/plant/#"),
        "serve": (*kafka, "--token-file", token),
    }


def start_command(name: str, log: Path, options: tuple[object, ...]) -> RunningConsumer:
    """Start a command of `list_commands`. Other machines can reach the page, so that it waits for the brokers."""
    host = "0.0.0.0" if name == "serve" else "127.0.0.1"  # noqa: S104
    return RunningConsumer(log, *options, command=name.split()[0], host=host)


def wait_for_event(process: RunningConsumer, event: str) -> None:
    """Wait until a process has logged an event."""
    process.wait_for(lambda: bool(process.list_log_events(event)), event, pause=0.2)


@pytest.mark.parametrize("name", ["consume", "incidents", "incidents --deliver-only", "bridge", "serve"])
def test_a_command_that_is_ended_while_it_waits_for_the_brokers_ends_without_an_error(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    """Meanwhile it is healthy, but not ready."""
    options = list_commands(f"127.0.0.1:{find_free_port()}", model_dir, tmp_path)[name]
    with start_command(name, tmp_path / "log", options) as process:
        wait_for_event(process, "connection_failed_retrying")
        assert (probe(process, "/healthz"), probe(process, "/readyz")) == (200, 503)
        process.stop()
        assert process.list_log_events("ready") == []


def test_commands_that_start_in_an_outage_are_connected_after_its_end(model_dir: Path, tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        mosquitto = cleanup.enter_context(run_mosquitto(tmp_path / "mosquitto"))
        broker = cleanup.enter_context(start_broker())
        cluster = Cluster(broker.bootstrap)
        specs = {"events": {"num_partitions": 1}, **describe_evidence_topic("events-evidence")}
        ensure_topics(cluster.brokers, {**specs, **describe_incident_topics("events-incidents", "events-feedback")})
        cluster.close()
        broker.kill(1)
        commands = list_commands(broker.bootstrap, model_dir, tmp_path, mosquitto.port)
        names = list(commands)
        processes = [
            cleanup.enter_context(start_command(name, tmp_path / f"{name}.log", options))
            for name, options in commands.items()
        ]
        for process in processes:
            wait_for_event(process, "connection_failed_retrying")
        broker.start_node(1)
        for name, process in zip(names, processes, strict=True):
            wait_for_event(process, "ready")
            assert probe(process, "/healthz") == 200
            # The rule DeformerStreamCommitsFail reports every process with this metric that commits nothing.
            assert has_commits(process) == (name in ("consume", "incidents"))
        for process in processes:
            process.stop()


def test_a_consumer_is_ready_when_its_partitions_are_restored(
    client: str, cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """While it restores, /healthz passes and /readyz does not."""
    name = topic(4)
    send(cluster, name, 0, 20_000)
    # Without snapshots, everything is read and scored again after a kill.
    more = ("--snapshot-interval", "1d", "--session-timeout", "6s")
    options = make_options(cluster.bootstrap, name, model_dir, client, *more)
    with RunningConsumer(tmp_path / "first.log", *options) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "the events", pause=0.5)
        consumer.process.send_signal(signal.SIGKILL)
        consumer.process.wait()
    with RunningConsumer(tmp_path / "second.log", *options) as consumer:
        seen = list[tuple[int, int]]()

        def is_ready() -> bool:
            # In this order, so that a 200 of /readyz is never followed by a failed health check of the same moment.
            seen.append((probe(consumer, "/readyz"), probe(consumer, "/healthz")))
            return seen[-1][0] == 200

        consumer.wait_for(is_ready, "/readyz", pause=0.02)
        assert len(consumer.list_log_events("partition_restored")) == 4
        assert {healthy for _, healthy in seen} <= {0, 200}
        assert 503 in {ready for ready, _ in seen}
        assert consumer.read_metrics()["deformer_partitions_restoring"] == 0
        consumer.stop()


def test_rolling_update_with_more_replicas_than_partitions(
    client: str, cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """Three replicas share two partitions. All are ready, and each is restarted after the one before is ready again."""
    name, num_replicas = topic(2), 3
    num_sent = 0

    def start(replica: int, number: int) -> RunningConsumer:
        options = make_options(cluster.bootstrap, name, model_dir, client, "--instance", f"pod-{replica}")
        return RunningConsumer(tmp_path / f"{replica}-{number}.log", *options)

    def send_and_wait() -> None:
        nonlocal num_sent
        send(cluster, name, num_sent, 200)
        num_sent += 200
        replicas[0].wait_for(cluster.is_consumed(name, name), "the events", pause=0.5)

    replicas = [start(replica, 0) for replica in range(num_replicas)]
    num_scored = 0
    try:
        for replica in replicas:
            wait_until_ready(replica)
        send_and_wait()
        for i in range(num_replicas):
            num_scored += replicas[i].stop()["events"]
            replicas[i] = start(i, 1)
            wait_until_ready(replicas[i])
            send_and_wait()
            assert {probe(replica, "/healthz") for replica in replicas} == {200}
        num_restored = [len(replica.list_log_events("partition_restored")) for replica in replicas]
        assert 0 in num_restored, "a spare replica is ready without a partition"
        num_scored += sum(replica.stop()["events"] for replica in replicas)
    finally:
        for replica in replicas:
            replica.process.kill()
            replica.process.wait()
    assert num_scored == num_sent
