"""What the client has fetched, as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from kafka import TopicPartition

from deformer_stream.core.batch import NO_TIME
from deformer_stream.ports import Messages


def messages_of(topic: str, fetched: Mapping[TopicPartition, list[Any]]) -> Messages | None:
    """The records of a poll as they came, partition by partition; None if there are none."""
    records = [record for partition in fetched.values() for record in partition]
    if not records:
        return None
    n = len(records)
    millis = np.fromiter((r.timestamp for r in records), np.int64, n)
    return Messages(
        topic=topic,
        keys=[r.key for r in records],
        payloads=[r.value for r in records],
        times=np.where((millis < 0) | (millis >= 2**53), NO_TIME, millis * 1000),  # senders may state any
        partitions=np.fromiter((r.partition for r in records), np.int32, n),
        offsets=np.fromiter((r.offset for r in records), np.int64, n),
    )
