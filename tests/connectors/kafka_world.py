"""What the tests of the Kafka connector share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from kafka import KafkaAdminClient

from deformer_stream.core.batch import AlertRaised, Closed, Effects, EventBatch, Rejected, Scored
from deformer_stream.ports import Payload

PATIENCE = 30.0
Topic = Callable[..., str]


class Bytes:
    """An encoder of alerts whose output has the length that the alert's record asks for."""

    def encode_alert(self, alert: AlertRaised, data: Payload | None) -> bytes:
        return b"x" * int(alert.record) if alert.record.isdigit() else f"{alert.id}:{alert.record}".encode()


def alert(record: str) -> AlertRaised:
    return AlertRaised("id-" + record, record, 1, 1, 8, 0, 0.001, 0.01, 9.0, -20.0, "model", 0, ())


def effects(alerts: list[AlertRaised], rejected: list[Rejected]) -> Effects:
    nothing = np.empty(0)
    closed = Closed(
        [], [], nothing.astype(np.int32), nothing.astype(bool), nothing, nothing, nothing, nothing.astype(np.int32)
    )
    return Effects(EventBatch.empty(), Scored.empty(), alerts, rejected, closed)


def numbered(count: int, keys: int = 10, first: int = 0) -> list[tuple[bytes, bytes, int | None]]:
    return [(b"key-%d" % (i % keys), b"%d" % i, 1_700_000_000_000 + i) for i in range(first, first + count)]


def committed(kafka: SimpleNamespace, topic: str, group: str = "g") -> dict[int, int]:
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    offsets = admin.list_group_offsets([f"{group}-{topic}"])
    admin.close()
    return {tp.partition: o.offset for tp, o in offsets[f"{group}-{topic}"].items()}
