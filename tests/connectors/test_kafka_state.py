"""What is kept of a partition comes back bit for bit, to whoever has the partition next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import kafka.errors as refusals
import numpy as np
import pytest
from kafka import KafkaConsumer
from kafka.admin import ConfigResource, ConfigResourceType

from connectors.kafka import produce
from connectors.kafka.state import StateReference
from connectors.kafka.transactions import Transactions
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.runtime.ports import RestoredPartition, PartitionState
from tests.connectors.kafka_members import MODES, Group, Reader, of_each
from tests.connectors.kafka_world import admin_of, numbered, read, until

pytestmark = pytest.mark.kafka

LARGE = np.random.default_rng(1).bytes(3_000_000)


def close(world: Group, reader: Reader) -> None:
    reader.close()


def abandon(world: Group, reader: Reader) -> None:
    world.abandon(reader)


CLEANER = "log.cleaner.backoff.ms"


def fail(*args: object, **options: object) -> None:
    raise refusals.KafkaTimeoutError()


End = Callable[[Group, Reader], None]


def restored(world: Group, **options: Any) -> tuple[Reader, RestoredPartition]:
    """A new life, and what it begins with."""
    reader = world.reader(**options)
    until(lambda: reader.poll() is not None and 0 in reader.restored, "partition 0")
    return reader, reader.restored[0]


@pytest.mark.parametrize(("mode", "end"), [(MODES[0], close), (MODES[1], close), (MODES[0], abandon)])
def test_what_was_saved_comes_back(group: Callable[..., Group], mode: str, end: End) -> None:
    world = group(mode=mode)
    produce(world.bootstrap, world.topic, numbered(30))
    reader, begun = restored(world, max_poll_records=10)
    assert begun == RestoredPartition(0, 0)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=LARGE)})
    assert len([r for r in read(world.bootstrap, world.state_topic) if r.value]) == 3, "in several messages"
    reader.source.commit({0: PartitionState(decisions=b"first")})  # without new messages
    reader.read(20)
    reader.source.commit({0: PartitionState(decisions=b"")})
    reader.source.commit()
    reader.read(30)
    reader.source.commit()
    end(world, reader)

    reader, begun = restored(world)
    assert begun.snapshot == LARGE
    assert begun == RestoredPartition(0, 30, LARGE, (b"first", b""))
    reader.settle_on(0)
    assert [offset for offset, _, _ in reader.got[0]] == list(range(10, 30)), "the history since the snapshot"
    reader.source.commit({0: PartitionState(decisions=b"third")})
    reader.source.commit({0: PartitionState(snapshot=b"small")})  # stands for everything before
    end(world, reader)

    reader, begun = restored(world)
    assert begun == RestoredPartition(0, 30, b"small", ())
    reader.settle_on(0)
    assert len(reader) == 0
    reader.source.commit({0: PartitionState(decisions=b"fourth")})
    end(world, reader)
    assert restored(world)[1] == RestoredPartition(0, 30, b"small", (b"fourth",))


def test_what_was_not_committed_does_not_come_back(
    either: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life that ends between sending and committing leaves no trace in the next one, nor in the one after that."""
    world = either()
    produce(world.bootstrap, world.topic, numbered(20))
    reader, _ = restored(world, max_poll_records=10, patience=0.2)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=b"in force")})
    reader.source.commit({0: PartitionState(decisions=b"one")})
    reader.read(20)

    with monkeypatch.context() as patch:
        patch.setattr(KafkaConsumer, "commit", fail)  # the last step in each mode
        patch.setattr(Transactions, "end", fail)
        for saved in (PartitionState(decisions=b"never"), PartitionState(snapshot=b"never")):
            with pytest.raises(Unavailable):
                reader.source.commit({0: saved})
        assert reader.delivery is not None
        reader.delivery.renew_producer()  # as a successor does: what is open is aborted
    world.abandon(reader)

    reader, begun = restored(world)
    assert begun == RestoredPartition(0, 10, b"in force", (b"one",))
    reader.read(10)
    reader.source.commit({0: PartitionState(decisions=b"two")})
    world.abandon(reader)
    assert restored(world)[1] == RestoredPartition(0, 20, b"in force", (b"one", b"two"))


class Killed(Exception):  # noqa: N818
    """The process ends here."""


@pytest.mark.parametrize("instance", [None, "one"], ids=["another", "same-name"])
def test_a_life_that_ended_within_a_transaction(
    group: Callable[..., Group], instance: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits for the transaction's end: the broker aborts it after a while, or a successor with the same
    name does so at once."""
    monkeypatch.setattr("connectors.kafka.delivery.TRANSACTION_SECONDS", 1.0)
    monkeypatch.setattr("connectors.kafka.start_point.DELIVERY_SECONDS", 2.0)
    world = group()
    world.produce(20)
    reader, _ = restored(world, instance=instance, max_poll_records=10)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=b"in force")})
    reader.read(20)

    def die(transactions: Transactions) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "end", die)
        with pytest.raises(Killed):
            reader.source.commit({0: PartitionState(snapshot=b"never")})
    if instance is None:
        world.abandon(reader)
    successor, begun = restored(world, instance=instance)
    assert begun == RestoredPartition(0, 10, b"in force")
    successor.read(10)
    successor.source.commit({0: PartitionState(decisions=b"one")})
    assert world.positions() == {0: 20}


def test_partitions_are_kept_apart(either: Callable[..., Group]) -> None:
    world = either(3)
    produce(world.bootstrap, world.topic, numbered(60, keys=30))
    reader = world.reader()
    reader.settle_on(0, 1, 2)
    reader.read(60)
    reader.source.commit({p: PartitionState(snapshot=b"snapshot %d" % p) for p in range(3)})
    reader.source.commit({1: PartitionState(decisions=b"of one"), 2: PartitionState(snapshot=b"newer")})
    reader.source.commit({0: PartitionState(decisions=b"of zero")})
    ends = {p: rows[-1][0] + 1 for p, rows in reader.got.items()}
    assert world.positions() == ends
    reader.close()
    reader = world.reader()
    reader.settle_on(0, 1, 2)
    assert reader.restored == {
        0: RestoredPartition(0, ends[0], b"snapshot 0", (b"of zero",)),
        1: RestoredPartition(1, ends[1], b"snapshot 1", (b"of one",)),
        2: RestoredPartition(2, ends[2], b"newer", ()),
    }


def test_a_thousand_decisions_come_back_in_order(either: Callable[..., Group]) -> None:
    """Sent together, for speed; each is a commit's."""
    world = either()
    state, delivery = world.state(), world.delivery()
    messages, kept = state.encode(0, 0, PartitionState(snapshot=LARGE), None, "c")
    decisions = tuple(b"%d" % i * (i % 7) for i in range(1500))
    for i, decided in enumerate(decisions):
        more, kept = state.encode(0, i, PartitionState(decisions=decided), kept, f"c{i}")
        messages += more
    at = world.commit(delivery, messages)[0]
    delivery.close()
    assert state.read(0, replace(kept, first_offset=at)) == (LARGE, decisions)


def test_decisions_may_be_larger_than_a_message(either: Callable[..., Group]) -> None:
    """When a thousand senders fall silent, as many records end at once."""
    world = either()
    produce(world.bootstrap, world.topic, numbered(1))
    reader, _ = restored(world)
    reader.read(1)
    reader.source.commit({0: PartitionState(snapshot=b"snapshot")})
    for decisions in (b"before", LARGE, b"after"):
        reader.source.commit({0: PartitionState(decisions=decisions)})
    reader.close()
    assert restored(world)[1] == RestoredPartition(0, 1, b"snapshot", (b"before", LARGE, b"after"))


def test_too_small_a_topic_is_refused(group: Callable[..., Group]) -> None:
    world = group(**{"max.message.bytes": "5000"})
    with pytest.raises(ConfigError, match=f"{world.state_topic}' has max.message.bytes=5000, too small for saved state: set it to 8192 or more"):
        world.state()


def test_small_messages_are_enough(group: Callable[..., Group]) -> None:
    world = group(**{"max.message.bytes": "8192"})
    reader, _ = restored(world)
    reader.source.commit({0: PartitionState(snapshot=LARGE[:100_000])})
    reader.source.commit({0: PartitionState(decisions=LARGE[:50_000])})
    reader.close()
    assert restored(world)[1] == RestoredPartition(0, 0, LARGE[:100_000], (LARGE[:50_000],))


@contextmanager
def eager_cleaner(bootstrap: str) -> Iterator[None]:
    """Let the brokers look for what can be compacted ten times a second, not every fifteen seconds."""
    with admin_of(bootstrap) as admin:
        brokers = [str(broker["broker_id"]) for broker in admin.describe_cluster()["brokers"]]
        admin.alter_configs([ConfigResource(ConfigResourceType.BROKER, b, {CLEANER: "100"}) for b in brokers])
        try:
            yield
        finally:
            admin.reset_configs([ConfigResource(ConfigResourceType.BROKER, b, [CLEANER]) for b in brokers])


def test_compaction_removes_what_is_superseded_and_never_what_is_in_force(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are closed after a moment and compacted at once. What comes to nothing supersedes what came to nothing;
    without transactions, that is: what is aborted supersedes nothing anyway."""
    world = group(
        mode="at-least-once",
        **{
            "max.message.bytes": "8192",
            "segment.ms": "50",
            "max.compaction.lag.ms": "50",
            "min.cleanable.dirty.ratio": "0",
            "delete.retention.ms": "0",
        },
    )

    def first_there() -> int:
        time.sleep(0.1)
        return int(read(world.bootstrap, world.state_topic, "read_uncommitted")[0].offset)

    with eager_cleaner(world.bootstrap):
        reader, _ = restored(world, patience=0.1)
        for i in range(4):
            reader.source.commit({0: PartitionState(snapshot=LARGE[i : i + 10_000])})
            reader.source.commit({0: PartitionState(decisions=b"%d" % i)})
            time.sleep(0.1)
        kept = StateReference.parse(world.committed()[0].metadata)
        assert kept is not None
        until(lambda: first_there() > 0, "the end of the first snapshot")
        with monkeypatch.context() as patch:
            patch.setattr(KafkaConsumer, "commit", fail)
            for saved in (b"never", LARGE[:30_000], b"never"):
                for kind in ("snapshot", "decisions"):
                    with pytest.raises(Unavailable):
                        reader.source.commit({0: PartitionState(**{kind: saved})})
                time.sleep(0.1)
        until(lambda: first_there() == kept.first_offset, "the end of everything before what is in force")
    reader.close()
    assert restored(world)[1] == RestoredPartition(0, 0, LARGE[3:10_003], (b"3",))


def test_whatever_the_lives_are_alerts_come_once_and_the_state_is_complete(either: Callable[..., Group]) -> None:
    """Lives of any length, with commits of any kind between, that end well or badly."""
    rng = np.random.default_rng(3)
    world = either(2)
    sent = 0
    for _ in range(5):
        more = int(rng.integers(40))
        produce(world.bootstrap, world.topic, numbered(more, first=sent))
        sent += more
        member = world.join(max_poll_records=int(rng.integers(3, 12)))
        member.settle_on(0, 1)
        assert member.complete()
        for _ in range(int(rng.integers(8))):
            member.turn(0.05)
            if rng.random() < 0.7:
                member.commit(snapshots=np.flatnonzero(rng.random(2) < 0.3).tolist())
        assert member.complete()
        if rng.random() < 0.5:
            member.close()
        else:
            world.abandon(member)
    member = world.join()
    member.settle_on(0, 1)
    until(lambda: member.turn().data is None and sum(map(len, member.seen.values())) == sent, "all messages")
    member.commit()
    assert member.complete()
    assert sum(world.positions().values()) == sent
    assert set(world.alerts()) == set(of_each(world.positions()))
    if world.mode == "exactly-once":
        assert sorted(world.alerts()) == of_each(world.positions())
