"""Tests of Kafka as a source of events, with a real broker."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import MemberToRemove

from connectors.kafka import produce
from connectors.kafka.ports import RebalanceInProgress
from deformer_stream.codec.payloads import Messages
from tests.connectors.kafka_groups import get_member_id, poll_in_background
from tests.connectors.kafka_helpers import (
    FIRST_TIMESTAMP_MS,
    TIMEOUT_SECONDS,
    Topic,
    make_messages,
    read_committed_offsets,
    wait_until,
)

pytestmark = pytest.mark.kafka


def test_round_trip_keeps_order_keys_and_times(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(4)
    assert produce(kafka.cluster, name, make_messages(1000)) == 1000
    reader = open_reader(name)
    assert reader.source.partitions == 4
    batches: list[Messages] = []

    def is_complete() -> bool:
        polled = reader.poll()
        if polled.data is not None:
            batches.append(polled.data)
        return len(reader) == 1000

    wait_until(is_complete, "1000 messages")
    assert all(b.topic == name and len(b) == len(b.keys) == len(b.times) for b in batches)
    assert all(b.times.dtype == np.int64 and b.partitions.dtype == np.int32 for b in batches)
    times = {int(v): t for b in batches for v, t in zip(b.payloads, b.times.tolist(), strict=True) if v is not None}
    assert times == {i: (FIRST_TIMESTAMP_MS + i) * 1000 for i in range(1000)}
    for rows in reader.messages_by_partition.values():
        assert [o for o, _, _ in rows] == list(range(len(rows)))
        values = [int(v) for _, _, v in rows]
        assert values == sorted(values)
        assert all(k == b"key-%d" % (v % 10) for (_, k, _), v in zip(rows, values, strict=True))
    assert sorted(int(v) for v in reader.list_payloads()) == list(range(1000))
    assert not reader.source.is_exhausted
    assert reader.source.assigned_partitions == {0, 1, 2, 3}


def test_poll_obeys_its_timeout_and_maximum_size(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    reader = open_reader(name, max_poll_records=7)
    wait_until(lambda: reader.poll().data is None and bool(reader.source.assigned_partitions), "an assignment")
    began = time.monotonic()
    assert reader.poll(0.3).data is None
    assert time.monotonic() - began < 5.0
    produce(kafka.cluster, name, make_messages(20))
    sizes = []
    while len(reader) < 20:
        polled = reader.poll()
        sizes += [len(polled.data)] if polled.data is not None else []
    assert max(sizes) <= 7


def test_restart_continues_at_the_committed_offset(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(4)
    produce(kafka.cluster, name, make_messages(100))
    first = open_reader(name)
    first.read(100)
    first.source.commit()
    assert read_committed_offsets(kafka, name) == {
        p: rows[-1][0] + 1 for p, rows in first.messages_by_partition.items()
    }
    first.source.close()
    produce(kafka.cluster, name, make_messages(50, first=100))
    second = open_reader(name)
    second.read(50)
    assert sorted(int(v) for v in second.list_payloads()) == list(range(100, 150))
    assert sum(second.source.get_lag().values()) == 0


def test_messages_that_were_not_committed_are_delivered_again(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(30))
    first = open_reader(name, max_poll_records=10)
    first.read(10)
    first.source.commit()
    first.read(20)
    first.source.close()
    second = open_reader(name)
    second.read(20)
    assert [int(v) for v in second.list_payloads()] == list(range(10, 30))


def test_start_at_latest_commits_the_end_of_the_topic(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(10))
    first = open_reader(name, start="latest")

    def is_committed() -> bool:
        first.poll()
        first.source.commit()
        return read_committed_offsets(kafka, name) == {0: 10}

    wait_until(is_committed, "a committed offset at the end")
    first.source.close()
    produce(kafka.cluster, name, make_messages(5, first=10))
    second = open_reader(name, start="latest")
    second.read(5)
    assert [int(v) for v in second.list_payloads()] == list(range(10, 15))
    assert len(first) == 0


def test_lag_is_the_number_of_unread_messages(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(30))
    reader = open_reader(name, max_poll_records=10)
    reader.read(10)
    assert reader.source.get_lag() == {(name, 0): 20}


def test_rebalance_moves_partitions_without_loss_or_repetition(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    name = topic(4)
    produce(kafka.cluster, name, make_messages(200, keys=40))
    first = open_reader(name)
    first.read(200)  # handled, as the next poll states, but not committed by a call
    second = open_reader(name)
    with poll_in_background(second.poll):
        wait_until(
            lambda: (
                first.poll(0.1) is not None
                and len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 2
            ),
            "2+2",
        )
        assert sorted(first.revoked) == sorted(second.source.assigned_partitions)
        produce(kafka.cluster, name, make_messages(200, keys=40, first=200))
        wait_until(lambda: first.poll(0.1) is not None and len(first) + len(second) >= 400, "all messages")
        first.source.commit()
        first.poll(0.5)
    values = [int(v) for v in first.list_payloads() + second.list_payloads()]
    assert sorted(values) == list(range(400))
    second.source.commit()
    ends = {
        p: max(o for o, _, _ in first.messages_by_partition[p] + second.messages_by_partition[p]) + 1 for p in range(4)
    }
    assert read_committed_offsets(kafka, name) == ends


def test_commit_during_a_rebalance_succeeds(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    """The first member commits while the second one joins. The partitions that it keeps are committed, and nothing
    is delivered.
    """
    name = topic(2)
    produce(kafka.cluster, name, make_messages(60, keys=20))
    first = open_reader(name)
    first.read(60)
    before = {p: rows[-1][0] + 1 for p, rows in first.messages_by_partition.items()}
    second = open_reader(name)
    with poll_in_background(second.poll):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(second.source.assigned_partitions) == 0 and time.monotonic() < deadline:
            first.source.commit()
            first.poll(0.01)
    assert len(second.source.assigned_partitions) == 1
    assert read_committed_offsets(kafka, name) == before
    assert len(second) == 0


def test_commit_that_was_refused_during_a_rebalance_is_repeated(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets stay the same until the commit is repeated, so nothing is lost."""
    name = topic(2)
    produce(kafka.cluster, name, make_messages(60, keys=20))
    reader = open_reader(name, max_poll_records=10)
    reader.read(10)
    original_commit, refused = reader.source._consumer.commit, []

    def commit(*args: Any, **kwargs: Any) -> None:
        if len(refused) < 2:
            refused.append(reader.source.assigned_partitions)
            raise RebalanceInProgress("refused")
        original_commit(*args, **kwargs)

    monkeypatch.setattr(reader.source._consumer, "commit", commit)
    reader.source.commit()
    assert len(refused) == 2
    assert sum(read_committed_offsets(kafka, name).values()) == 10
    reader.read(60)
    assert sorted(int(v) for v in reader.list_payloads()) == list(range(60))
    assert reader.revoked == []


def test_removed_member_commits_nothing_and_reports_its_lost_partitions(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    name = topic(1)
    produce(kafka.cluster, name, make_messages(10))
    first = open_reader(name)
    first.read(10)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.remove_group_members(f"g-{name}", [MemberToRemove(get_member_id(first.source))])
    admin.close()
    first.source.commit()
    wait_until(lambda: first.poll(0.1) is not None and first.revoked == [0], "the loss reported")
    first.read(20)  # the same messages again, because they were not committed
    assert [int(v) for v in first.list_payloads()] == [*range(10), *range(10)]


def test_null_keys_and_payloads_are_none(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    sender = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    sender.send(name, key=None, value=b"a")
    sender.send(name, key=b"k", value=None)
    sender.flush()
    sender.close()
    reader = open_reader(name)
    reader.read(2)
    assert [(k, v) for _, k, v in reader.messages_by_partition[0]] == [(None, b"a"), (b"k", None)]


def test_messages_of_aborted_transactions_are_skipped(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    sender = KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=name)
    sender.init_transactions()
    for value, end in ((b"aborted", sender.abort_transaction), (b"kept", sender.commit_transaction)):
        sender.begin_transaction()
        sender.send(name, key=b"k", value=value)
        sender.flush()
        end()
    sender.close()
    reader = open_reader(name)
    reader.read(1)
    wait_until(
        lambda: reader.poll(0.1).data is None and reader.source.get_lag() == {(name, 0): 0}, "the end of the topic"
    )
    assert reader.list_payloads() == [b"kept"]
    reader.source.commit()
    assert read_committed_offsets(kafka, name) == {0: 4}  # two messages, two markers
