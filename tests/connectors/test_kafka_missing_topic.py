"""A broker that responds without knowing the topic is reported as such, and not as a broker that does not respond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka.liveness import LivenessCheck
from connectors.kafka.ports import KafkaCluster, TopicPartition
from deformer_stream.errors import Unavailable


@pytest.mark.parametrize(
    ("has_topic", "message"),
    [
        (False, "Kafka at host:9092 responds, but has had no topic 'sensors' for \\d+ s: check whether"),
        (True, "Kafka at host:9092 has not responded for \\d+ s: check the brokers"),
    ],
)
def test_missing_topic_is_distinguished_from_a_silent_broker(
    monkeypatch: pytest.MonkeyPatch, has_topic: bool, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unavailable("no response")

    tp = TopicPartition("sensors", 0)
    consumer: Any = SimpleNamespace(
        get_position=lambda tp: 5,
        fetch_end_offsets=fail,
    )
    monkeypatch.setattr("connectors.kafka.liveness.has_topic", lambda cluster, topic: has_topic)
    monkeypatch.setattr("connectors.kafka.liveness.PROBE_SECONDS", 0.0)
    check = LivenessCheck(consumer, KafkaCluster("host:9092"), "sensors", 0.0)
    check.check_progress([tp])  # the position is new, so the broker counts as responding
    with pytest.raises(Unavailable, match=message):
        check.check_progress([tp])
