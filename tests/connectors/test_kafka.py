"""Kafka as a source of events, against a real broker."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka import errors as refusals
from kafka.admin import MemberToRemove

from connectors.kafka import produce
from deformer_stream.codec.payloads import Messages
from tests.connectors.kafka_members import following
from tests.connectors.kafka_world import PATIENCE, STAMP, Topic, committed, numbered, until

pytestmark = pytest.mark.kafka


def test_round_trip_keeps_order_keys_and_times(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(4)
    assert produce(kafka.bootstrap, name, numbered(1000)) == 1000
    reader = open_reader(name)
    assert reader.source.partitions == 4
    batches: list[Messages] = []

    def enough() -> bool:
        polled = reader.poll()
        if polled.data is not None:
            batches.append(polled.data)
        return len(reader) == 1000

    until(enough, "1000 messages")
    assert all(b.topic == name and len(b) == len(b.keys) == len(b.times) for b in batches)
    assert all(b.times.dtype == np.int64 and b.partitions.dtype == np.int32 for b in batches)
    times = {int(v): t for b in batches for v, t in zip(b.payloads, b.times.tolist(), strict=True) if v is not None}
    assert times == {i: (STAMP + i) * 1000 for i in range(1000)}
    for rows in reader.got.values():
        assert [o for o, _, _ in rows] == list(range(len(rows)))
        values = [int(v) for _, _, v in rows]
        assert values == sorted(values)
        assert all(k == b"key-%d" % (v % 10) for (_, k, _), v in zip(rows, values, strict=True))
    assert sorted(int(v) for v in reader.payloads()) == list(range(1000))
    assert not reader.source.is_exhausted
    assert reader.source.assigned_partitions == {0, 1, 2, 3}


def test_poll_returns_in_time_and_never_more_than_asked(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    reader = open_reader(name, max_poll_records=7)
    until(lambda: reader.poll().data is None and bool(reader.source.assigned_partitions), "an assignment")
    began = time.monotonic()
    assert reader.poll(0.3).data is None
    assert time.monotonic() - began < 5.0
    produce(kafka.bootstrap, name, numbered(20))
    sizes = []
    while len(reader) < 20:
        polled = reader.poll()
        sizes += [len(polled.data)] if polled.data is not None else []
    assert max(sizes) <= 7


def test_restart_goes_on_at_the_committed_position(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(4)
    produce(kafka.bootstrap, name, numbered(100))
    first = open_reader(name)
    first.read(100)
    first.source.commit()
    assert committed(kafka, name) == {p: rows[-1][0] + 1 for p, rows in first.got.items()}
    first.source.close()
    produce(kafka.bootstrap, name, numbered(50, first=100))
    second = open_reader(name)
    second.read(50)
    assert sorted(int(v) for v in second.payloads()) == list(range(100, 150))
    assert sum(second.source.get_lag().values()) == 0


def test_what_was_not_committed_comes_again(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, numbered(30))
    first = open_reader(name, max_poll_records=10)
    first.read(10)
    first.source.commit()
    first.read(20)
    first.source.close()
    second = open_reader(name)
    second.read(20)
    assert [int(v) for v in second.payloads()] == list(range(10, 30))


def test_latest_begins_at_the_end_and_holds_that_place(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, numbered(10))
    first = open_reader(name, start="latest")

    def placed() -> bool:
        first.poll()
        first.source.commit()
        return committed(kafka, name) == {0: 10}

    until(placed, "a committed place at the end")
    first.source.close()
    produce(kafka.bootstrap, name, numbered(5, first=10))
    second = open_reader(name, start="latest")
    second.read(5)
    assert [int(v) for v in second.payloads()] == list(range(10, 15))
    assert len(first) == 0


def test_lag_is_what_is_left_to_read(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    produce(kafka.bootstrap, name, numbered(30))
    reader = open_reader(name, max_poll_records=10)
    reader.read(10)
    assert reader.source.get_lag() == {(name, 0): 20}


def test_rebalance_hands_partitions_over_without_loss_or_repetition(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    name = topic(4)
    produce(kafka.bootstrap, name, numbered(200, keys=40))
    first = open_reader(name)
    first.read(200)  # dealt with, as the next poll says, but never committed by a call
    second = open_reader(name)
    with following(second.poll):
        until(
            lambda: first.poll(0.1) is not None and len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 2,
            "2+2",
        )
        assert sorted(first.revoked) == sorted(second.source.assigned_partitions)
        produce(kafka.bootstrap, name, numbered(200, keys=40, first=200))
        until(lambda: first.poll(0.1) is not None and len(first) + len(second) >= 400, "all messages")
        first.source.commit()
        first.poll(0.5)
    values = [int(v) for v in first.payloads() + second.payloads()]
    assert sorted(values) == list(range(400))
    second.source.commit()
    ends = {p: max(o for o, _, _ in first.got[p] + second.got[p]) + 1 for p in range(4)}
    assert committed(kafka, name) == ends


def test_a_commit_during_a_rebalance_ends_well(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    """The first member commits while the second is joining: what it keeps gets committed, nothing is delivered."""
    name = topic(2)
    produce(kafka.bootstrap, name, numbered(60, keys=20))
    first = open_reader(name)
    first.read(60)
    before = {p: rows[-1][0] + 1 for p, rows in first.got.items()}
    second = open_reader(name)
    with following(second.poll):
        deadline = time.monotonic() + PATIENCE
        while len(second.source.assigned_partitions) == 0 and time.monotonic() < deadline:
            first.source.commit()
            first.poll(0.01)
    assert len(second.source.assigned_partitions) == 1
    assert committed(kafka, name) == before
    assert len(second) == 0


def test_a_refused_commit_is_repeated_after_the_rebalance(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses a commit while it rebalances: positions stay, the commit follows, nothing is lost."""
    name = topic(2)
    produce(kafka.bootstrap, name, numbered(60, keys=20))
    reader = open_reader(name, max_poll_records=10)
    reader.read(10)
    really, refused = reader.source._consumer.commit, []

    def commit(*args: Any, **kwargs: Any) -> None:
        if len(refused) < 2:
            refused.append(reader.source.assigned_partitions)
            raise refusals.RebalanceInProgressError()
        really(*args, **kwargs)

    monkeypatch.setattr(reader.source._consumer, "commit", commit)
    reader.source.commit()
    assert len(refused) == 2
    assert sum(committed(kafka, name).values()) == 10
    reader.read(60)
    assert sorted(int(v) for v in reader.payloads()) == list(range(60))
    assert reader.revoked == []


def test_after_eviction_nothing_is_committed_for_lost_partitions(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    """A member that the group has thrown out cannot commit any more and learns what it has lost."""
    name = topic(1)
    produce(kafka.bootstrap, name, numbered(10))
    first = open_reader(name)
    first.read(10)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.remove_group_members(f"g-{name}", [MemberToRemove(first.source._consumer.group_metadata().member_id)])
    admin.close()
    first.source.commit()
    until(lambda: first.poll(0.1) is not None and first.revoked == [0], "the loss reported")
    first.read(20)  # the same messages again, for they were never committed
    assert [int(v) for v in first.payloads()] == [*range(10), *range(10)]


def test_null_keys_and_payloads_come_as_none(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    sender = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    sender.send(name, key=None, value=b"a")
    sender.send(name, key=b"k", value=None)
    sender.flush()
    sender.close()
    reader = open_reader(name)
    reader.read(2)
    assert [(k, v) for _, k, v in reader.got[0]] == [(None, b"a"), (b"k", None)]


def test_aborted_transactions_are_not_seen(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
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
    until(lambda: reader.poll(0.1).data is None and reader.source.get_lag() == {(name, 0): 0}, "the end of the topic")
    assert reader.payloads() == [b"kept"]
    reader.source.commit()
    assert committed(kafka, name) == {0: 4}  # two messages and two transaction markers: the true next position
