"""Tests of restores with a time budget, of waits that report progress, and of partitions that are added or left out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from connectors.kafka import produce
from connectors.kafka.client import load_client
from connectors.kafka.membership import PARTITIONS_PER_STEP
from connectors.kafka.ports import CommittedOffset, OutgoingMessage, TopicPartition
from connectors.kafka.source import KafkaSource
from connectors.kafka.state import StateReader
from deformer_stream.codec.payloads import Messages
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.runtime.ports import PartitionState
from tests.connectors.kafka_groups import Group
from tests.connectors.kafka_helpers import TIMEOUT_SECONDS, make_messages, wait_until
from tests.connectors.raw_batches import encode_batch, encode_record, send_batch

pytestmark = pytest.mark.kafka

BOTH_CLIENTS = pytest.mark.usefixtures("client_library")
"""Runs a test with both client libraries. The others run with librdkafka by `make test-librdkafka`."""


@BOTH_CLIENTS
def test_partitions_are_restored_by_one_reader_in_several_polls(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = group(8)
    world.produce(80)
    first = world.add_member()
    first.read(80)
    first.commit(snapshots=range(8))
    first.close()
    monkeypatch.setattr("connectors.kafka.restore.RESTORE_SECONDS", 0.0)
    opened: list[Any] = []
    original = StateReader._open_consumer

    def record(reader: StateReader) -> Any:
        consumer = original(reader)
        opened.append(consumer)
        return consumer

    monkeypatch.setattr(StateReader, "_open_consumer", record)
    second = world.add_member(max_poll_records=10)
    restored_by_poll: list[int] = []

    def is_restored() -> bool:
        restored_by_poll.append(len(second.poll().restored_partitions))
        return second.caught_up == set(range(8))

    wait_until(is_restored, "all partitions")
    assert sum(restored_by_poll) == 8
    assert max(restored_by_poll) == 1, "no snapshot is verified after the time of a poll"
    assert len({id(consumer) for consumer in opened}) == 1
    assert second.is_state_complete()
    assert second.handled_offsets == []
    reader = second.source._restorer._reader
    assert reader is not None
    assert reader._consumer is None, "the reader is closed when no partition waits"


@BOTH_CLIENTS
@pytest.mark.parametrize("has_state", [True, False])
def test_offsets_of_many_partitions_are_requested_together(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    """With kafka-python each of these requests can wait for half a second until the broker answers another one."""
    world = group(20)
    world.produce(80)
    if has_state:
        first = world.add_member()
        first.read(80)
        first.commit(snapshots=range(20))
        first.close()
    monkeypatch.setattr("connectors.kafka.restore.RESTORE_SECONDS", TIMEOUT_SECONDS)
    second = world.add_member()
    consumer = second.source._consumer
    counts_by_method: dict[str, list[int]] = {"fetch_first_offsets": [], "fetch_end_offsets": []}

    def record_calls(name: str) -> Callable[..., object]:
        method = getattr(consumer, name)

        def call(tps: Iterable[TopicPartition], timeout: float) -> object:
            requested = list(tps)
            counts_by_method[name].append(len(requested))
            return method(requested, timeout)

        return call

    for name in counts_by_method:
        monkeypatch.setattr(consumer, name, record_calls(name))
    second.poll_until_assigned(*range(20))
    assert counts_by_method["fetch_first_offsets"] == [20]
    # Without committed offsets, those of the state topic are requested, too.
    num_requests = 1 if has_state else 2
    assert counts_by_method["fetch_end_offsets"][:num_requests] == [20] * num_requests


@BOTH_CLIENTS
def test_many_partitions_are_restored_although_requests_are_slow(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kafka-python requests the committed offsets one after the other, and their sum has a time limit."""
    world = group(20)
    first = world.add_member()
    first.poll_until_assigned(*range(20))
    first.commit(snapshots=range(20))
    first.close()
    second = world.add_member()
    consumer = second.source._consumer
    original, requests = consumer.fetch_committed, list[list[TopicPartition]]()

    def fetch(tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, CommittedOffset | None]:
        requests.append(list(tps))
        if len(requests[-1]) > 10 or len(requests) == 2:  # more do not fit into the time limit
            raise Unavailable("no response in time")
        return original(requests[-1], timeout)

    monkeypatch.setattr(consumer, "fetch_committed", fetch)
    second.poll_until_assigned(*range(20))
    num_by_partition = Counter(tp for request in requests for tp in request)
    assert num_by_partition.total() == 20 + len(requests[1]), "what was found before the error is kept"


def test_partitions_are_begun_although_another_one_has_no_leader(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for the offsets of many partitions fails if one of them has no leader."""
    world = group(20)
    monkeypatch.setattr("connectors.kafka.restore.RESTORE_SECONDS", TIMEOUT_SECONDS)
    monkeypatch.setattr("connectors.kafka.client.RETRY_SECONDS", 0.01)
    member = world.add_member()
    consumer = member.source._consumer
    original, without_leader = consumer.fetch_first_offsets, {TopicPartition(world.topic, 0)}

    def fetch(tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        requested = list(tps)
        if without_leader & set(requested):
            raise Unavailable("no leader")
        return original(requested, timeout)

    monkeypatch.setattr(consumer, "fetch_first_offsets", fetch)
    others = set(range(PARTITIONS_PER_STEP, 20))
    wait_until(lambda: bool(member.poll()) and member.caught_up == others, "the partitions of other steps")
    without_leader.clear()
    member.poll_until_assigned(*range(20))


def test_nothing_is_requested_after_an_error_that_is_permanent(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = group(20)
    monkeypatch.setattr("connectors.kafka.restore.RESTORE_SECONDS", TIMEOUT_SECONDS)
    member = world.add_member()
    consumer = member.source._consumer
    original, num_requests = consumer.fetch_committed, Counter[str]()

    def fetch(tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, CommittedOffset | None]:
        num_requests["committed"] += 1
        if num_requests["committed"] == 2:
            raise ConfigError("the group may not be read")
        return original(tps, timeout)

    monkeypatch.setattr(consumer, "fetch_committed", fetch)
    monkeypatch.setattr(consumer, "fetch_first_offsets", lambda *arguments: num_requests.update(["first"]))
    with pytest.raises(ConfigError, match="the group may not be read"):
        wait_until(lambda: bool(member.poll()) and False, "the error")
    assert num_requests == {"committed": 2}


@BOTH_CLIENTS
def test_transaction_that_hides_the_committed_offsets_is_reported(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka returns no committed offsets while a transaction that changes them is open."""
    world = group(1)
    world.produce(5)
    first = world.add_member()
    first.read(5)
    first.commit()
    producer = load_client(world.cluster).open_producer(world.cluster, f"{world.name}/other")
    with closing(producer):
        producer.open_transactions(TIMEOUT_SECONDS)
        producer.begin_transaction()
        changed = {TopicPartition(world.topic, 0): CommittedOffset(4)}
        producer.send_offsets(changed, first.source._consumer.membership, TIMEOUT_SECONDS)
        first.close()
        monkeypatch.setattr("connectors.kafka.client.REQUEST_SECONDS", 2.0)
        second = world.add_member(patience=1.0)
        with pytest.raises(Unavailable, match=r"responds, but does not return the committed offsets.*find-hanging"):
            wait_until(lambda: bool(second.poll().restored_partitions), "an error")


def test_restore_that_finds_no_broker_goes_on_in_the_next_poll(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = group(2)
    world.produce(20)
    first = world.add_member()
    first.read(20)
    first.commit(snapshots=range(2))
    first.close()
    original, failures = StateReader.read, []

    def read(*args: Any, **options: Any) -> Any:
        if len(failures) < 2:
            failures.append(True)
            raise Unavailable("no response")
        return original(*args, **options)

    monkeypatch.setattr(StateReader, "read", read)
    monkeypatch.setattr("connectors.kafka.client.RETRY_SECONDS", 0.01)
    second = world.add_member()
    waits: list[bool] = []
    second.source.set_callbacks(replace(second.source.callbacks, on_wait=lambda: waits.append(True)))
    second.poll_until_assigned(0, 1)
    assert len(failures) == 2
    assert len(waits) >= 2
    assert second.is_state_complete()


def test_progress_is_reported_while_a_commit_is_repeated(
    either: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = either(1)
    world.produce(20)
    member = world.add_member()
    member.read(20)
    waits: list[bool] = []
    member.source.set_callbacks(replace(member.source.callbacks, on_wait=lambda: waits.append(True)))
    original, failures = KafkaSource._try_to_commit, []

    def fail(source: KafkaSource) -> None:
        if len(failures) < 3:
            failures.append(True)
            raise Unavailable("no response")
        original(source)

    monkeypatch.setattr(KafkaSource, "_try_to_commit", fail)
    monkeypatch.setattr("connectors.kafka.client.RETRY_SECONDS", 0.01)
    member.commit()
    assert len(waits) >= 3
    world.check_effects(member)


@BOTH_CLIENTS
def test_progress_is_reported_while_revoked_partitions_are_committed(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = group(1)
    world.produce(10)
    member = world.add_member()
    member.read(10)
    member.poll(0.0)  # so that what was read counts as written
    has_waited, waits = threading.Event(), list[bool]()

    def wait() -> None:
        waits.append(True)
        has_waited.set()

    producer: Any = member.delivery._producer
    commit = producer.commit_transaction
    monkeypatch.setattr(producer, "commit_transaction", lambda timeout: has_waited.wait(30.0) and commit(timeout))
    member.source.set_callbacks(replace(member.source.callbacks, on_wait=wait))
    assert member.source.on_revoked(member.source._consumer.assignment) == {}
    assert waits
    assert world.read_positions() == {0: 10}


def test_partitions_that_are_added_begin_with_their_first_message(
    either: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --from latest. The state topic gets the partitions, too."""
    monkeypatch.setattr("connectors.kafka.client.METADATA_SECONDS", 1.0)
    world = either(1)
    member = world.add_member(start="latest")
    member.poll_until_assigned(0)
    member.commit()
    client = load_client(world.cluster)
    admin, producer = client.open_admin(world.cluster), None
    try:
        admin.add_partitions(world.topic, 3, 30.0)
        producer = client.open_producer(world.cluster)
        wait_until(lambda: admin.describe_topics([world.topic], 30.0)[world.topic].num_partitions == 3, "3 partitions")
        producer.send([OutgoingMessage(0, world.topic, b"k", b"1", (), number) for number in (1, 2, 2)], 30.0)
        member.poll_until_assigned(0, 1, 2)
        wait_until(lambda: bool(member.poll()) and len(member.handled_offsets) == 3, "the messages")
        member.commit(snapshots=range(3))
        assert admin.describe_topics([world.state_topic], 30.0)[world.state_topic].num_partitions == 3
    finally:
        admin.close()
        if producer is not None:
            producer.close()
    assert world.read_positions() == {0: 0, 1: 1, 2: 2}
    member.close()
    successor = world.add_member()
    successor.poll_until_assigned(0, 1, 2)
    assert successor.is_state_complete()
    assert successor.handled_offsets == []


def test_partitions_that_were_added_while_no_process_ran_begin_with_their_first_message(
    either: Callable[..., Group],
) -> None:
    """Also with --from latest, which applies to the partitions that the topic had when the group began."""
    world = either(2)
    produce(world.cluster, world.topic, make_messages(10))
    member = world.add_member(start="latest")
    member.poll_until_assigned(0, 1)
    member.commit(snapshots=range(2))
    member.close()
    client = load_client(world.cluster)
    with ExitStack() as stack:
        admin = client.open_admin(world.cluster)
        stack.callback(admin.close)
        admin.add_partitions(world.topic, 4, 30.0)
        admin.add_partitions(world.state_topic, 4, 30.0)
        producer = client.open_producer(world.cluster)
        stack.callback(producer.close)
        producer.send([OutgoingMessage(0, world.topic, b"k", b"1", (), number) for number in (2, 3, 3)], 30.0)
    successor = world.add_member(start="latest")
    successor.poll_until_assigned(0, 1, 2, 3)
    wait_until(lambda: bool(successor.poll()) and len(successor.handled_offsets) == 3, "the messages")


@BOTH_CLIENTS
def test_partitions_are_not_added_to_the_state_topic_if_that_is_refused(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.client.METADATA_SECONDS", 1.0)
    world = group(1)
    member = world.add_member(creates_partitions=False)
    member.poll_until_assigned(0)
    with closing(load_client(world.cluster).open_admin(world.cluster)) as admin:
        admin.add_partitions(world.topic, 2, 30.0)
        message = f"topic '{world.state_topic}' has 1 partitions, but it needs 2.*--missing-topics refuse"
        with pytest.raises(ConfigError, match=message):
            wait_until(lambda: bool(member.poll()) and False, "the refusal")
        assert admin.describe_topics([world.state_topic], 30.0)[world.state_topic].num_partitions == 1


@BOTH_CLIENTS
def test_waiting_partitions_are_neither_read_nor_committed(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.liveness.PROBE_SECONDS", 0.5)
    world = group(2)
    reader = world.add_reader()
    reader.poll_until_assigned(0, 1)
    produce(world.cluster, world.topic, make_messages(40, keys=20))
    reader.source.commit({p: PartitionState(snapshot=b"first") for p in range(2)})
    before = world.read_positions()
    reader.source.leave_out(frozenset({0}))
    wait_until(lambda: bool(reader.poll()) and sum(reader.source.get_lag().values()) > 0, "the lag of partition 0")
    wait_until(lambda: bool(reader.poll()) and reader.source.get_lag().get((world.topic, 1)) == 0, "partition 1")
    assert not reader.messages_by_partition[0]
    reader.source.commit({1: PartitionState(decisions=b"one")})
    assert world.read_positions() == {0: before[0], 1: len(reader.messages_by_partition[1])}
    reader.source.leave_out(frozenset())
    reader.read(40)
    assert [offset for offset, _, _ in reader.messages_by_partition[0]] == list(
        range(len(reader.messages_by_partition[0]))
    )


@BOTH_CLIENTS
def test_returned_messages_are_not_committed_and_are_read_again(group: Callable[..., Group]) -> None:
    world = group(2)
    reader = world.add_reader()
    reader.poll_until_assigned(0, 1)
    produce(world.cluster, world.topic, make_messages(40, keys=20))
    reader.read(40)
    reader.source.commit({p: PartitionState(snapshot=b"first") for p in range(2)})
    before = world.read_positions()
    produce(world.cluster, world.topic, make_messages(20, keys=20))
    returned: list[Messages] = []

    def has_returned() -> bool:
        data = reader.source.poll(0.2).data
        if isinstance(data, Messages):
            reader.source.return_messages(data)
            returned.append(data)
        return bool(returned)

    wait_until(has_returned, "messages")
    first_offsets = {
        p: int(returned[0].offsets[returned[0].partitions == p].min()) for p in set(returned[0].partitions)
    }
    reader.source.commit({p: PartitionState(snapshot=b"second") for p in range(2)})
    assert world.read_positions() == before
    assert {p: before[p] for p in first_offsets} == first_offsets
    reader.read(60)
    for rows in reader.messages_by_partition.values():
        assert [offset for offset, _, _ in rows] == list(range(len(rows)))
    reader.source.commit()
    assert sum(world.read_positions().values()) == 60


def test_spare_member_has_joined_without_partitions(group: Callable[..., Group]) -> None:
    world = group(1)
    first = world.add_member()
    first.poll_until_assigned(0)
    second = world.add_member()
    assert not second.source.has_joined

    def both() -> bool:
        first.poll(0.1)
        second.poll(0.1)
        return second.source.has_joined

    wait_until(both, "the second member")
    assert len(first.source.assigned_partitions | second.source.assigned_partitions) == 1


@pytest.mark.parametrize("client_library", ["kafka-python"], indirect=True)  # librdkafka can read it
def test_batch_that_the_client_cannot_read_ends_the_process(group: Callable[..., Group], client_library: str) -> None:
    """The name of a header is not UTF-8, which kafka-python cannot decode. What comes before is consumed."""
    world = group(1)
    send_batch(world.bootstrap, world.topic, encode_batch(encode_record(0, b"k", b"before"), 1))
    send_batch(world.bootstrap, world.topic, encode_batch(encode_record(0, b"k", b"bad", [(b"\xff", b"")]), 1))
    reader = world.add_reader(patience=1.0)
    with pytest.raises(Unavailable, match="the client cannot read a batch of messages") as caught:
        wait_until(lambda: bool(reader.poll()) and False, "an error")
    assert "\n" not in str(caught.value)
    assert [payload for _, _, payload in reader.messages_by_partition[0]] == [b"before"]
