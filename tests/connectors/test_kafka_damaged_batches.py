"""Tests of batches that a client library cannot decode, with a real broker."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import __version__ as kafka_version

from connectors.kafka import KafkaCluster, produce
from connectors.kafka.blocking_calls import BackgroundCall
from connectors.kafka.client import load_client
from connectors.kafka.compat import request_rejoin
from connectors.kafka.ports import ConsumerOptions, Offsets, TopicPartition
from deformer_stream.errors import Unavailable
from tests.connectors.kafka_groups import poll_in_background
from tests.connectors.kafka_helpers import TIMEOUT_SECONDS, Topic, make_messages, wait_until
from tests.connectors.raw_batches import encode_batch, encode_record, send_batch

pytestmark = pytest.mark.kafka

NOT_UTF8 = [(b"\xff", b"")]
"""Headers with a name that is not UTF-8."""


def send_batches(bootstrap: str, topic: str) -> None:
    """Send three batches; the second one has a header that kafka-python cannot decode."""
    spoiled = encode_record(0, b"k", b"1") + encode_record(1, b"k", b"2", NOT_UTF8) + encode_record(2, b"k", b"3")
    for batch in (
        encode_batch(encode_record(0, b"k", b"0"), 1),
        encode_batch(spoiled, 3),
        encode_batch(encode_record(0, b"k", b"4"), 1),
    ):
        send_batch(bootstrap, topic, batch)


@pytest.mark.parametrize("library", ["kafka-python", "librdkafka"])
def test_a_batch_that_cannot_be_decoded_is_an_error_in_every_poll(
    library: str, kafka: SimpleNamespace, topic: Topic
) -> None:
    name = topic(1)
    send_batches(kafka.bootstrap, name)
    cluster = KafkaCluster(kafka.bootstrap, library=library)  # type: ignore[arg-type]
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    values: list[bytes | None] = []
    errors: list[str] = []

    def read() -> bool:
        """Poll once, and return whether the last message was read or five polls have raised an error."""
        try:
            polled = consumer.poll(0.5)
        except Unavailable as error:
            errors.append(str(error))
        else:
            values.extend([] if polled is None else polled.values)
        return len(values) == 5 or len(errors) == 5

    try:
        consumer.assign({TopicPartition(name, 0): 0})
        wait_until(read, "the last message or five errors")
    finally:
        consumer.close()
    if library == "librdkafka":  # it does not decode headers that nobody reads
        assert (values, errors) == ([b"0", b"1", b"2", b"3", b"4"], [])
    else:
        assert values == [b"0", b"1"]
        assert len(set(errors)) == 1
        assert "the client cannot read a batch of messages" in errors[0]
        assert f"topic '{name}', partition 0, offset 2" in errors[0]
        assert "use the other --client" in errors[0]


def test_error_of_a_batch_is_raised_although_the_group_was_served_meanwhile(
    kafka: SimpleNamespace, topic: Topic
) -> None:
    """kafka-python drops the error that it stores if the partition is paused. A later poll would never end."""
    name = topic(1)
    send_batches(kafka.bootstrap, name)
    cluster = KafkaCluster(kafka.bootstrap)
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    try:
        consumer.assign({TopicPartition(name, 0): 0})
        values: list[bytes | None] = []

        def read() -> bool:
            polled = consumer.poll(0.5)
            values.extend([] if polled is None else polled.values)
            return len(values) == 2

        wait_until(read, "the messages before the batch")

        def serve_and_poll() -> None:
            consumer.serve_group(0.1)
            consumer.poll(0.1)

        call = BackgroundCall(serve_and_poll)
        assert call.wait(TIMEOUT_SECONDS), "the poll never ends"
        with pytest.raises(Unavailable, match="the client cannot read a batch of messages"):
            call.get()
    finally:
        consumer.close()


class SilentHandler:
    """A handler of rebalances that does nothing."""

    def on_assigned(self, partitions: frozenset[TopicPartition]) -> None: ...

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> Offsets:
        return {}

    def on_revoked_committed(self, error: Exception | None) -> None: ...

    def on_lost(self, partitions: frozenset[TopicPartition]) -> None: ...

    def on_wait(self) -> None: ...


def test_error_of_a_batch_is_raised_although_a_rebalance_takes_longer_than_polls(
    kafka: SimpleNamespace, topic: Topic
) -> None:
    """While this member joins again, which another one delays that does not poll, kafka-python keeps the error."""
    name, other_name = topic(1), topic(1, "other")
    send_batches(kafka.bootstrap, name)
    cluster = KafkaCluster(kafka.bootstrap)
    with ExitStack() as cleanup:
        consumer, other = (load_client(cluster).open_consumer(cluster, ConsumerOptions(name)) for _ in range(2))
        cleanup.callback(consumer.close)
        cleanup.callback(other.close)
        other.subscribe(other_name, SilentHandler())
        consumer.subscribe(name, SilentHandler())
        with poll_in_background(lambda: other.poll(0.1)):

            def has_joined() -> bool:
                consumer.serve_group(0.2)
                return bool(consumer.assignment and other.assignment)

            wait_until(has_joined, "both members")
            consumer.start(TopicPartition(name, 0), 0)
            values: list[bytes | None] = []

            def read() -> bool:
                polled = consumer.poll(0.5)
                values.extend([] if polled is None else polled.values)
                return len(values) == 2

            wait_until(read, "the messages before the batch")
        request_rejoin(consumer._consumer, kafka_version)  # type: ignore[attr-defined]

        def serve_and_poll() -> None:
            for _ in range(3):
                consumer.serve_group(0.1)
                assert consumer.poll(0.1) is None
                assert consumer.membership is None
            other.close()  # it leaves the group, which completes the rebalance

            def is_member() -> bool:
                consumer.serve_group(0.5)
                return consumer.membership is not None

            wait_until(is_member, "the end of the rebalance")
            consumer.poll(0.5)

        call = BackgroundCall(serve_and_poll)
        assert call.wait(2 * TIMEOUT_SECONDS), "the poll never ends"
        with pytest.raises(Unavailable, match="the client cannot read a batch of messages"):
            call.get()


def test_serving_the_group_after_messages_loses_none(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(10))
    cluster = KafkaCluster(kafka.bootstrap)
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions(max_messages=3))
    try:
        consumer.assign({TopicPartition(name, 0): 0})
        offsets: list[int] = []

        def read() -> bool:
            polled = consumer.poll(0.5)
            offsets.extend([] if polled is None else polled.offsets.tolist())
            consumer.serve_group(0.0)
            return len(offsets) >= 10

        wait_until(read, "all messages")
        assert offsets == list(range(10))
    finally:
        consumer.close()


@pytest.mark.parametrize("raised", [KeyError("partition"), RuntimeError("a bug")])
def test_other_errors_of_the_client_are_not_called_unreadable(
    kafka: SimpleNamespace, topic: Topic, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(1))
    cluster = KafkaCluster(kafka.bootstrap)
    consumer: Any = load_client(cluster).open_consumer(cluster, ConsumerOptions())

    def fail(**_: object) -> None:
        raise raised

    try:
        consumer.assign({TopicPartition(name, 0): 0})
        with monkeypatch.context() as patch:
            patch.setattr(consumer._consumer, "poll", fail)
            with pytest.raises(Unavailable, match=r"unexpected error of the client library.*report it"):
                consumer.poll(0.1)
        wait_until(lambda: consumer.poll(0.1) is not None, "the message")
    finally:
        consumer.close()
