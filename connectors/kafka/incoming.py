"""What the client has fetched, as messages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from kafka import TopicPartition

from connectors.kafka.runs import Run
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import NO_TIME


def messages_of(topic: str, fetched: Mapping[TopicPartition, list[Run]]) -> Messages | None:
    """The runs of a poll as they came, partition by partition; None if there are none."""
    pairs = [(tp.partition, run) for tp, runs in fetched.items() for run in runs]
    if not pairs:
        return None
    millis = np.concatenate([run.times for _, run in pairs])
    numbers, sizes = [partition for partition, _ in pairs], [len(run) for _, run in pairs]
    return Messages(
        topic=topic,
        keys=[key for _, run in pairs for key in run.keys],
        payloads=[value for _, run in pairs for value in run.values],
        times=np.where((millis < 0) | (millis >= 2**53), NO_TIME, millis * 1000),  # senders may state any
        partitions=np.repeat(np.array(numbers, np.int32), sizes),
        offsets=np.concatenate([run.offsets for _, run in pairs]),
    )
