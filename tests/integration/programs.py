"""Run the programs as processes of their own, as a user does, and inspect Kafka from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import RetriableError, UnknownTopicOrPartitionError

from connectors.kafka.ports import KafkaCluster
from tests.conftest import find_free_port, get_client_library

TIMEOUT_SECONDS = 120.0
MAX_LOG_CHARACTERS = 5_000
"""How much of the log of a process is shown when a test has waited for it in vain."""
PROGRAMS = {"deformer-stream": "deformer_stream.cli.main", "deformer-train": "trainer.cli"}


def make_command(program: str, *words: object) -> list[str]:
    """Return the command line of a program, run by this Python interpreter so that nothing must be on the path."""
    return [sys.executable, "-m", PROGRAMS[program], *map(str, words)]


def make_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without variables that configure the programs.

    The number of threads is 1, because several programs share the machine. The client library for Kafka is that of the
    test. `variables` are added.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DEFORMER_")}
    return {**clean, "OMP_NUM_THREADS": "1", "DEFORMER_CLIENT": get_client_library(), **(variables or {})}


def list_workers(pid: int) -> list[int]:
    """Return the worker processes that a process has started with the module `multiprocessing`."""
    workers: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            with contextlib.suppress(OSError):  # the process has ended
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    workers.append(int(child))
    return workers


def run(
    program: str, *words: object, timeout: float = TIMEOUT_SECONDS, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends, successfully or not.

    Args:
        program: The name of the program.
        *words: Its options.
        timeout: Maximum number of seconds.
        variables: Further environment variables.
    """
    return subprocess.run(
        make_command(program, *words),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=make_environment(variables),
        check=False,
    )


def run_successfully(program: str, *words: object, timeout: float = TIMEOUT_SECONDS) -> str:
    """Run a program, which must end with exit code 0, and return what it has written to standard error."""
    result = run(program, *words, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stderr


def list_error_lines(text: str) -> list[str]:
    """Return the lines of standard error that are not log entries."""
    return [line for line in text.splitlines() if line and not line.startswith("{")]


def wait_until(
    condition: Callable[[], bool], description: str, patience: float = TIMEOUT_SECONDS, pause: float = 0.05
) -> None:
    """Call a function repeatedly until it returns True.

    The calls become rarer, because requests to programs and brokers take time from other tests.

    Args:
        condition: The function.
        description: What is waited for, for the message of a time-out.
        patience: Maximum number of seconds.
        pause: Seconds between the first calls. Later, it is a twentieth of the time since the first call.

    Raises:
        AssertionError: The function has not returned True in time.
    """
    began = time.monotonic()
    while not condition():
        seconds = time.monotonic() - began
        assert seconds < patience, f"time-out while waiting for {description}"
        time.sleep(max(pause, seconds / 20))


class RunningConsumer:
    """`deformer-stream consume`, or another command with an HTTP server, as a background process.

    It is killed at the end of the `with` block if it is running.

    Args:
        log: The file for its standard error.
        *options: The options of the command.
        variables: Further environment variables.
        module: The Python module that runs the command, with arguments that come before it.
        command: The command.
        host: The address at which its HTTP server listens.

    Attributes:
        port: The port of its HTTP server.
        process: The process.
    """

    def __init__(
        self,
        log: Path,
        *options: object,
        variables: Mapping[str, str] | None = None,
        module: Sequence[object] = (PROGRAMS["deformer-stream"],),
        command: str = "consume",
        host: str = "127.0.0.1",
    ) -> None:
        self.port = find_free_port()
        self._log = log
        program = [sys.executable, "-m", *module, command, "--http", f"{host}:{self.port}", *options]
        with log.open("w") as standard_error:
            self.process = subprocess.Popen(
                [str(word) for word in program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=standard_error,
                env=make_environment(variables),
            )

    def __enter__(self) -> RunningConsumer:
        """Return the consumer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Kill the process if it is running."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def read_log(self) -> str:
        """Return everything that the process has written to standard error."""
        return self._log.read_text()

    def list_log_events(self, name: str) -> list[dict[str, Any]]:
        """Return the log entries with an event name."""
        lines = [json.loads(line) for line in self.read_log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def read_metrics(self) -> dict[str, float]:
        """Return the value of each metric; the keys are names with labels, as in the text format of Prometheus."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def wait_until_ready(self) -> None:
        """Wait until a partition has been restored."""
        self.wait_for(lambda: bool(self.list_log_events("partition_restored")), "partitions")

    def wait_for(
        self, condition: Callable[[], bool], description: str, patience: float = TIMEOUT_SECONDS, pause: float = 0.05
    ) -> None:
        """Wait until a function returns True, as `wait_until` does; fail if the consumer ends before."""

        def check() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.read_log()}"
            return condition()

        try:
            wait_until(check, description, patience, pause)
        except AssertionError as error:
            error.add_note(f"the last lines of the log of the process:\n{self.read_log()[-MAX_LOG_CHARACTERS:]}")
            raise

    def stop(self) -> dict[str, Any]:
        """End the process with SIGTERM, as an orchestrator does, and return its last log entry, which contains the
        totals.
        """
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT_SECONDS) == 0, self.read_log()
        assert list_error_lines(self.read_log()) == []
        (last,) = self.list_log_events("stopped")
        return last


class Cluster:
    """A view of the topics and groups of a Kafka cluster from outside.

    Args:
        bootstrap: The broker.
    """

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap, self.brokers = bootstrap, KafkaCluster(bootstrap)
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)

    def close(self) -> None:
        """Close the connection."""
        self._admin.close()

    def list_topics(self) -> set[str]:
        """Return the names of all topics."""
        return set(self._admin.list_topics())

    def read_committed_offsets(self, group: str) -> dict[int, int]:
        """Return the committed offset by partition, for a group that reads one topic; empty while Kafka creates the
        group.
        """
        try:
            offsets = self._admin.list_group_offsets([group])[group]
        except RetriableError:
            # After an outage, a client may continue to send requests to a broker that no longer leads the group.
            self.close()
            self._admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
            return {}
        return {tp.partition: offset.offset for tp, offset in offsets.items() if offset.offset >= 0}

    def read_end_offsets(self, topic: str) -> dict[int, int]:
        """Return the offset after the last message, by partition."""
        reader = KafkaConsumer(bootstrap_servers=self.bootstrap)
        try:
            numbers = reader.partitions_for_topic(topic)
            if numbers is None:
                raise UnknownTopicOrPartitionError(topic)
            partitions = [TopicPartition(topic, p) for p in numbers]
            return {tp.partition: end for tp, end in reader.end_offsets(partitions).items()}
        finally:
            reader.close()

    def read_topic(self, topic: str) -> list[Any]:
        """Return all committed messages of a topic, partition by partition.

        If a killed process has left a transaction open, the messages after its first one are not readable before the
        broker has aborted it. So this method waits until everything up to the end of the topic is readable.
        """
        found: list[Any] = []
        # A consumer that reads committed messages only would state the first offset of the open transaction.
        end_by_partition = self.read_end_offsets(topic)
        consumer = KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
        try:
            for partition, end in sorted(end_by_partition.items()):
                tp = TopicPartition(topic, partition)
                consumer.assign([tp])
                consumer.seek_to_beginning(tp)
                deadline = time.monotonic() + TIMEOUT_SECONDS
                while consumer.position(tp) < end:  # the end may be after transaction markers, which are no messages
                    assert time.monotonic() < deadline, f"time-out while reading {topic}"
                    found += [message for messages in consumer.poll(timeout_ms=1000).values() for message in messages]
        finally:
            consumer.close()
        return found

    def is_consumed(self, topic: str, group: str) -> Callable[[], bool]:
        """Return a function that checks whether a group has committed the offset at which the topic ends now."""
        ends = {p: end for p, end in self.read_end_offsets(topic).items() if end}

        def reached() -> bool:
            committed = self.read_committed_offsets(group)
            return all(committed.get(p) == end for p, end in ends.items())

        return reached


def consume_with_kills(
    folder: Path, options: Sequence[object], sender: threading.Thread, cluster: Cluster, topic: str
) -> None:
    """Consume a topic to its end with four processes, three of which kill themselves within a commit.

    Args:
        folder: Where the logs of the processes are written.
        options: Options of `deformer-stream consume`. The group has the name of the topic.
        sender: A thread that sends the messages meanwhile.
        cluster: The brokers.
        topic: The topic.
    """
    for step, num_calls in (("5.3-sending-offsets", 4), ("5.3-transaction-ended", 3), ("5.2-saved", 6)):
        module = ("tests.chaos.self_killing", step, num_calls)
        with RunningConsumer(folder / f"{step}.log", *options, module=module) as consumer:
            consumer.process.wait(120.0)
            assert consumer.process.returncode == -9, consumer.read_log()
    sender.join()
    with RunningConsumer(folder / "last.log", *options) as consumer:
        # The last kill may have come after all messages. A signal would end a process that is not ready at once.
        consumer.wait_until_ready()
        consumer.wait_for(cluster.is_consumed(topic, topic), "all messages")
        consumer.stop()
