"""A broker that responds without knowing the topic is reported as such, and not as a broker that does not respond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from connectors.kafka.liveness import LivenessCheck
from deformer_stream.errors import Unavailable


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (set(), "Kafka at host:9092 responds, but has had no topic 'sensors' for \\d+ s: check whether"),
        ({0}, "Kafka at host:9092 has not responded for \\d+ s: check the brokers"),
    ],
)
def test_missing_topic_is_distinguished_from_a_silent_broker(
    monkeypatch: pytest.MonkeyPatch, partitions: set[int], message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KafkaTimeoutError("Failed to get offsets by timestamps")

    tp = TopicPartition("sensors", 0)
    consumer: Any = SimpleNamespace(
        assignment=lambda: {tp},
        paused=set,
        position=lambda tp, timeout_ms: 5,
        end_offsets=fail,
        partitions_for_topic=lambda topic: partitions,
    )
    monkeypatch.setattr("connectors.kafka.liveness.PROBE_SECONDS", 0.0)
    check = LivenessCheck(consumer, "host:9092", "sensors", 0.0)
    check.check_progress()  # the position is new, so nothing is requested
    with pytest.raises(Unavailable, match=message):
        check.check_progress()
