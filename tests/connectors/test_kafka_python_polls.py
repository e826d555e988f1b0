"""Tests of polls of kafka-python during a rebalance, with a client in memory that stores an error as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition as KafkaTopicPartition
from kafka.errors import CorruptRecordError

from connectors.kafka.kafka_python_client import KafkaPythonConsumer
from connectors.kafka.ports import ConsumerOptions, KafkaCluster, TopicPartition
from deformer_stream.errors import Unavailable

TP = TopicPartition("events", 0)


class StoringClient:
    """A client whose first poll returns a message and stores the error of the batch after it.

    Attributes:
        is_joining: Whether polls end before the group has accepted this member.
    """

    def __init__(self) -> None:
        self.is_joining = False
        self._paused: set[Any] = set()
        self._error: Exception | None = None
        self._num_polls = 0
        self._fetcher = SimpleNamespace(_paused_partition_records={})  # of `compat.drop_kept_messages`

    def assign(self, tps: list[Any]) -> None: ...

    def assignment(self) -> set[Any]:
        return {KafkaTopicPartition(*TP)}

    def seek(self, tp: Any, offset: int) -> None: ...

    def pause(self, *tps: Any) -> None:
        self._paused |= set(tps)

    def resume(self, *tps: Any) -> None:
        self._paused -= set(tps)

    def position(self, tp: Any, timeout_ms: int) -> int:
        return 1

    def highwater(self, tp: Any) -> int:
        return 2

    def poll(self, timeout_ms: int, max_records: int) -> dict[Any, list[Any]]:
        if self.is_joining:
            return {}
        self._num_polls += 1
        if self._num_polls == 1:
            self._error = CorruptRecordError("the batch is damaged")
            return {KafkaTopicPartition(*TP): [SimpleNamespace(offset=0, key=b"k", value=b"v", timestamp=0)]}
        assert not self._paused, "the error is lost, and a later poll never ends"
        assert self._error is not None
        raise self._error


@pytest.mark.parametrize("call", ["serve_group", "poll"])
@pytest.mark.parametrize("stops", [False, True])
def test_error_of_a_batch_is_raised_although_a_rebalance_takes_long(
    monkeypatch: pytest.MonkeyPatch, call: str, stops: bool
) -> None:
    """During a rebalance, a poll for one message returns nothing, so the error may still be stored."""
    stored = StoringClient()
    monkeypatch.setattr("connectors.kafka.kafka_python_client.connect", lambda *args, **settings: stored)
    consumer = KafkaPythonConsumer(KafkaCluster("fake:1"), ConsumerOptions())
    consumer.assign({TP: 0})
    polled = consumer.poll(0.0)
    assert polled is not None
    stored.is_joining = True
    if stops:
        consumer.stop([TP])
    for _ in range(2):
        consumer.serve_group(0.0)
        assert consumer.poll(0.0) is None
    stored.is_joining = False
    with pytest.raises(Unavailable, match="the client cannot read a batch of messages"):
        getattr(consumer, call)(0.0)
