"""Our programs as a person runs them, as processes of their own, and a look at Kafka from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import RetriableError

from tests.conftest import free_port

PATIENCE = 120.0
PROGRAMS = {"deformer-stream": "deformer_stream.cli.main", "deformer-train": "trainer.cli"}


def command(program: str, *words: object) -> list[str]:
    """The command line, run by this interpreter, so that nothing has to be on the path."""
    return [sys.executable, "-m", PROGRAMS[program], *map(str, words)]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what would configure the programs; one thread each, for several of them share this machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DEFORMER_")}
    return {**clean, "OMP_NUM_THREADS": "1", **(variables or {})}


def run(
    program: str, *words: object, timeout: float = PATIENCE, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever that is. variables: further ones of the environment."""
    return subprocess.run(
        command(program, *words),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(variables),
        check=False,
    )


def done(program: str, *words: object, timeout: float = PATIENCE) -> str:
    """Run to a good end; what it said on standard error."""
    result = run(program, *words, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stderr


def errors_of(text: str) -> list[str]:
    """The lines of standard error that are no log lines."""
    return [line for line in text.splitlines() if line and not line.startswith("{")]


def until(true: Callable[[], bool], what: str, patience: float = PATIENCE, pause: float = 0.05) -> None:
    """Ask again and again; the waiting between is no hiding of a race but what polling is."""
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(pause)


class Consume:
    """`deformer-stream consume` in the background; ended by its process id, at the latest with the `with` block."""

    def __init__(
        self,
        log: Path,
        *words: object,
        variables: Mapping[str, str] | None = None,
        module: Sequence[object] = (PROGRAMS["deformer-stream"],),
    ) -> None:
        """module: what runs the command, with words that go before it."""
        self.port = free_port()
        self._log = log
        program = [sys.executable, "-m", *module, "consume", "--http", f"127.0.0.1:{self.port}", *words]
        with log.open("w") as err:
            self.process = subprocess.Popen(
                [str(word) for word in program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(variables),
            )

    def __enter__(self) -> Consume:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of that name."""
        lines = [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def metrics(self) -> dict[str, float]:
        """Series with their labels → value, as Prometheus would read them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            rows = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: bool(self.events("partition_restored")), "partitions")

    def wait_for(self, true: Callable[[], bool], what: str, patience: float = PATIENCE, pause: float = 0.05) -> None:
        def check() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said()}"
            return true()

        until(check, what, patience, pause)

    def stop(self) -> dict[str, Any]:
        """Ask it to end as an orchestrator does; its last log line, with the totals of its life."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.said()
        assert errors_of(self.said()) == []
        (last,) = self.events("stopped")
        return last


class Cluster:
    """What Kafka itself says about topics and groups."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)

    def close(self) -> None:
        self._admin.close()

    def topics(self) -> set[str]:
        return set(self._admin.list_topics())

    def committed(self, group: str) -> dict[int, int]:
        """Partition → committed offset, of a group that reads one topic; nothing while Kafka prepares the group."""
        try:
            offsets = self._admin.list_group_offsets([group])[group]
        except RetriableError:
            # A client that has lived through an outage may go on asking a broker that no longer leads the group.
            self.close()
            self._admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
            return {}
        return {tp.partition: offset.offset for tp, offset in offsets.items() if offset.offset >= 0}

    def ends(self, topic: str) -> dict[int, int]:
        """Partition → offset of the next message."""
        reader = KafkaConsumer(bootstrap_servers=self.bootstrap)
        partitions = [TopicPartition(topic, p) for p in reader.partitions_for_topic(topic)]
        ends = {tp.partition: end for tp, end in reader.end_offsets(partitions).items()}
        reader.close()
        return ends

    def read(self, topic: str) -> list[Any]:
        """All committed messages of a topic, partition by partition."""
        found: list[Any] = []
        reader = KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
        try:
            for p in sorted(reader.partitions_for_topic(topic)):
                where = TopicPartition(topic, p)
                reader.assign([where])
                reader.seek_to_beginning(where)
                end = reader.end_offsets([where])[where]
                deadline = time.monotonic() + PATIENCE
                while reader.position(where) < end:  # past transaction markers too, which are no messages
                    assert time.monotonic() < deadline, f"{topic} cannot be read to its end"
                    found += [message for messages in reader.poll(timeout_ms=1000).values() for message in messages]
        finally:
            reader.close()
        return found

    def all_consumed(self, topic: str, group: str) -> Callable[[], bool]:
        """Whether the group has committed the end that the topic has now."""
        ends = {p: end for p, end in self.ends(topic).items() if end}

        def reached() -> bool:
            committed = self.committed(group)
            return all(committed.get(p) == end for p, end in ends.items())

        return reached
