"""What the tests of the Kafka connector share: topics looked at from outside, and consumers of the simplest kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from connectors.kafka import Delivery, KafkaSink, ensure_topics, describe_output_topics
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Alert, ClosedRecords, Effects, EventBatch, Rejection, ScoredReadings
from tests.integration import programs

PATIENCE = 30.0
STAMP = time.time_ns() // 1_000_000
"""Of the first of `numbered`. Of today: a topic keeps messages for a week by their own times."""

Topic = Callable[..., str]


class Bytes:
    """An encoder of alerts whose output has the length that the alert's record asks for."""

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        return b"x" * int(alert.record) if alert.record.isdigit() else f"{alert.id}:{alert.record}".encode()


class SentAtFlush(KafkaSink):
    """A sink without a source: its flush stands for the commit that sends what was written."""

    def flush(self) -> None:
        self._delivery.seal_pending()
        self._delivery.send([])
        self._delivery.mark_committed()


def sink_of(bootstrap: str, alerts: str | None, letters: str | None, encoder: Any, partitions: int = 1) -> SentAtFlush:
    """A sink with its topics made as `consume` makes them."""
    specs = describe_output_topics(alerts or "no alerts", letters or "no letters", "no state", partitions)
    limits = ensure_topics(bootstrap, {name: specs[name] for name in (alerts, letters) if name is not None})
    return SentAtFlush(alerts, letters, encoder, Delivery(bootstrap, None, limits))


def alert(record: str, message: int = 0) -> Alert:
    return Alert("id-" + record, record, 1, 1, 8, 0, 0.001, 0.01, 9.0, -20.0, "model", message, ())


def effects(alerts: list[Alert], rejected: list[Rejection]) -> Effects:
    return Effects(EventBatch.empty(), ScoredReadings.empty(), alerts, rejected, ClosedRecords.concatenate([]))


def numbered(count: int, keys: int = 10, first: int = 0) -> list[tuple[bytes, bytes, int | None]]:
    return [(b"key-%d" % (i % keys), b"%d" % i, STAMP + i) for i in range(first, first + count)]


until = partial(programs.until, patience=PATIENCE, pause=0.01)


def committed(kafka: SimpleNamespace, topic: str, group: str = "g") -> dict[int, int]:
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    offsets = admin.list_group_offsets([f"{group}-{topic}"])
    admin.close()
    return {tp.partition: o.offset for tp, o in offsets[f"{group}-{topic}"].items()}


@contextmanager
def admin_of(bootstrap: str) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        yield admin
    finally:
        admin.close()


def read(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Any]:
    """What a reader of the topic sees now; one that reads committed messages waits for those that are on their way."""
    reader = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level=isolation)
    partitions = [TopicPartition(topic, p) for p in sorted(reader.partitions_for_topic(topic))]
    reader.assign(partitions)
    ends = reader.end_offsets(partitions)
    found: list[Any] = []

    def reached() -> bool:
        for records in reader.poll(timeout_ms=100).values():
            found.extend(records)
        return all(reader.position(tp) >= ends[tp] for tp in partitions)

    until(reached, f"the end of {topic}")
    reader.close()
    return found


def settle(bootstrap: str, topic: str) -> None:
    """Wait until no transaction is under way in the topic: its messages become visible a moment after its commit."""
    committed, all_ = (
        KafkaConsumer(bootstrap_servers=bootstrap, isolation_level=f"read_{level}")
        for level in ("committed", "uncommitted")
    )
    partitions = [TopicPartition(topic, p) for p in sorted(all_.partitions_for_topic(topic))]
    until(lambda: committed.end_offsets(partitions) == all_.end_offsets(partitions), f"no transaction in {topic}")
    for reader in (committed, all_):
        reader.close()
