"""Tests that the saved state of a partition is restored without changes by its next owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kafka.admin import ConfigResource, ConfigResourceType

from connectors.kafka import produce
from connectors.kafka.ports import Producer
from connectors.kafka.state import StateReference
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.runtime.ports import PartitionState, RestoredPartition
from tests.connectors.kafka_groups import MODES, Group, Reader, get_client_classes, list_alert_keys
from tests.connectors.kafka_helpers import make_messages, open_admin, read_topic, wait_until

pytestmark = pytest.mark.kafka

LARGE = np.random.default_rng(1).bytes(3_000_000)


def close(world: Group, reader: Reader) -> None:
    """Close a reader in an orderly way."""
    reader.close()


def abandon(world: Group, reader: Reader) -> None:
    """End a reader as if its process had been killed."""
    world.remove_member(reader)


CLEANER = "log.cleaner.backoff.ms"


def fail(*args: object, **options: object) -> None:
    """Raise a time-out in place of a call of the client."""
    raise Unavailable("no response")


End = Callable[[Group, Reader], None]


def restore(world: Group, **options: Any) -> tuple[Reader, RestoredPartition]:
    """Start a consumer and return it with the state that was restored for partition 0."""
    reader = world.add_reader(**options)
    wait_until(lambda: reader.poll() is not None and 0 in reader.restored, "partition 0")
    return reader, reader.restored[0]


@pytest.mark.parametrize(("mode", "end"), [(MODES[0], close), (MODES[1], close), (MODES[0], abandon)])
def test_saved_state_is_restored(group: Callable[..., Group], mode: str, end: End) -> None:
    world = group(mode=mode)
    produce(world.cluster, world.topic, make_messages(30))
    reader, begun = restore(world, max_poll_records=10)
    assert begun == RestoredPartition(0, 0)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=LARGE)})
    assert len([r for r in read_topic(world.bootstrap, world.state_topic) if r.value]) == 3, "in several messages"
    reader.source.commit({0: PartitionState(decisions=b"first")})  # without new messages
    reader.read(20)
    reader.source.commit({0: PartitionState(decisions=b"")})
    reader.source.commit()
    reader.read(30)
    reader.source.commit()
    end(world, reader)

    reader, begun = restore(world)
    assert begun.snapshot == LARGE
    assert begun == RestoredPartition(0, 30, LARGE, (b"first", b""))
    reader.poll_until_assigned(0)
    assert [offset for offset, _, _ in reader.messages_by_partition[0]] == list(range(10, 30)), (
        "the history since the snapshot"
    )
    reader.source.commit({0: PartitionState(decisions=b"third")})
    reader.source.commit({0: PartitionState(snapshot=b"small")})  # replaces everything before
    end(world, reader)

    reader, begun = restore(world)
    assert begun == RestoredPartition(0, 30, b"small", ())
    reader.poll_until_assigned(0)
    assert len(reader) == 0
    reader.source.commit({0: PartitionState(decisions=b"fourth")})
    end(world, reader)
    assert restore(world)[1] == RestoredPartition(0, 30, b"small", (b"fourth",))


def test_state_that_was_not_committed_is_not_restored(
    either: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends between sending and committing has no effect on later runs."""
    world = either()
    produce(world.cluster, world.topic, make_messages(20))
    reader, _ = restore(world, max_poll_records=10, patience=0.2)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=b"in force")})
    reader.source.commit({0: PartitionState(decisions=b"one")})
    reader.read(20)

    with monkeypatch.context() as patch:
        consumer_class, producer_class = get_client_classes()
        patch.setattr(consumer_class, "commit", fail)  # the last step in each mode
        patch.setattr(producer_class, "commit_transaction", fail)
        for saved in (PartitionState(decisions=b"never"), PartitionState(snapshot=b"never")):
            with pytest.raises(Unavailable):
                reader.source.commit({0: saved})
        assert reader.delivery is not None
        reader.delivery.renew_producer()  # as the next run does: the open transaction is aborted
    world.remove_member(reader)

    reader, begun = restore(world)
    assert begun == RestoredPartition(0, 10, b"in force", (b"one",))
    reader.read(10)
    reader.source.commit({0: PartitionState(decisions=b"two")})
    world.remove_member(reader)
    assert restore(world)[1] == RestoredPartition(0, 20, b"in force", (b"one", b"two"))


class ProcessKilled(Exception):  # noqa: N818
    """The process ends here."""


@pytest.mark.parametrize("instance", [None, "one"], ids=["another", "same-name"])
def test_run_that_ended_within_a_transaction(
    group: Callable[..., Group], instance: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run waits for the end of the transaction. The broker aborts it after its time-out, or immediately if
    the next run has the same name.
    """
    monkeypatch.setattr("connectors.kafka.delivery.TRANSACTION_SECONDS", 2.0)
    monkeypatch.setattr("connectors.kafka.client.REQUEST_SECONDS", 2.0)
    world = group()
    world.produce(20)
    reader, _ = restore(world, instance=instance, max_poll_records=10)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=b"in force")})
    reader.read(20)

    def kill_process(producer: Producer, timeout: float) -> None:
        raise ProcessKilled

    with monkeypatch.context() as patch:
        patch.setattr(get_client_classes()[1], "commit_transaction", kill_process)
        with pytest.raises(ProcessKilled):
            reader.source.commit({0: PartitionState(snapshot=b"never")})
    if instance is None:
        world.remove_member(reader)
    successor, begun = restore(world, instance=instance)
    assert begun == RestoredPartition(0, 10, b"in force")
    successor.read(10)
    successor.source.commit({0: PartitionState(decisions=b"one")})
    assert world.read_positions() == {0: 20}


def test_partitions_have_independent_states(either: Callable[..., Group]) -> None:
    world = either(3)
    produce(world.cluster, world.topic, make_messages(60, keys=30))
    reader = world.add_reader()
    reader.poll_until_assigned(0, 1, 2)
    reader.read(60)
    reader.source.commit({p: PartitionState(snapshot=b"snapshot %d" % p) for p in range(3)})
    reader.source.commit({1: PartitionState(decisions=b"of one"), 2: PartitionState(snapshot=b"newer")})
    reader.source.commit({0: PartitionState(decisions=b"of zero")})
    ends = {p: rows[-1][0] + 1 for p, rows in reader.messages_by_partition.items()}
    assert world.read_positions() == ends
    reader.close()
    reader = world.add_reader()
    reader.poll_until_assigned(0, 1, 2)
    assert reader.restored == {
        0: RestoredPartition(0, ends[0], b"snapshot 0", (b"of zero",)),
        1: RestoredPartition(1, ends[1], b"snapshot 1", (b"of one",)),
        2: RestoredPartition(2, ends[2], b"newer", ()),
    }


def test_many_decisions_are_restored_in_order(either: Callable[..., Group]) -> None:
    """To save time, the test sends the decisions of many commits together."""
    world = either()
    state, delivery = world.open_state_topic(), world.open_delivery()
    messages, kept = state.encode(0, 0, PartitionState(snapshot=LARGE), None, "c", "w")
    decisions = tuple(b"%d" % i * (i % 7) for i in range(1500))
    for i, decided in enumerate(decisions):
        more, kept = state.encode(0, i, PartitionState(decisions=decided), kept, f"c{i}", "w")
        messages += more
    at = world.commit(delivery, messages)[0]
    delivery.close()
    reader = state.open_reader()
    reader.add(0, replace(kept, first_offset=at))
    done: dict[int, Any] = {}
    wait_until(lambda: bool(done.update(reader.read(0.5)) or done), "the state")
    assert done == {0: (LARGE, decisions)}


def test_decisions_larger_than_a_message_are_restored(either: Callable[..., Group]) -> None:
    """Many decisions are made at once if many records time out together."""
    world = either()
    produce(world.cluster, world.topic, make_messages(1))
    reader, _ = restore(world)
    reader.read(1)
    reader.source.commit({0: PartitionState(snapshot=b"snapshot")})
    for decisions in (b"before", LARGE, b"after"):
        reader.source.commit({0: PartitionState(decisions=decisions)})
    reader.close()
    assert restore(world)[1] == RestoredPartition(0, 1, b"snapshot", (b"before", LARGE, b"after"))


def test_topic_with_too_small_messages_is_rejected(group: Callable[..., Group]) -> None:
    world = group(**{"max.message.bytes": "5000"})
    with pytest.raises(
        ConfigError,
        match=f"{world.state_topic}' has max.message.bytes=5000, too small for saved state: set it to 8192 or more",
    ):
        world.open_state_topic()


def test_state_is_split_into_small_messages(group: Callable[..., Group]) -> None:
    world = group(**{"max.message.bytes": "8192"})
    reader, _ = restore(world)
    reader.source.commit({0: PartitionState(snapshot=LARGE[:100_000])})
    reader.source.commit({0: PartitionState(decisions=LARGE[:50_000])})
    reader.close()
    assert restore(world)[1] == RestoredPartition(0, 0, LARGE[:100_000], (LARGE[:50_000],))


@contextmanager
def eager_cleaner(bootstrap: str) -> Iterator[None]:
    """Let the brokers compact topics ten times a second instead of every fifteen seconds."""
    with open_admin(bootstrap) as admin:
        brokers = [str(broker["broker_id"]) for broker in admin.describe_cluster()["brokers"]]
        admin.alter_configs([ConfigResource(ConfigResourceType.BROKER, b, {CLEANER: "100"}) for b in brokers])
        try:
            yield
        finally:
            admin.reset_configs([ConfigResource(ConfigResourceType.BROKER, b, [CLEANER]) for b in brokers])


def test_compaction_keeps_the_committed_state(group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed commits without transactions must not remove the committed state either. Aborted messages are never
    visible to the log cleaner.
    """
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

    def get_first_offset() -> int:
        time.sleep(0.1)
        return int(read_topic(world.bootstrap, world.state_topic, "read_uncommitted")[0].offset)

    with eager_cleaner(world.bootstrap):
        reader, _ = restore(world, patience=0.1)
        for i in range(4):
            reader.source.commit({0: PartitionState(snapshot=LARGE[i : i + 10_000])})
            reader.source.commit({0: PartitionState(decisions=b"%d" % i)})
            time.sleep(0.1)
        kept = StateReference.parse(world.read_committed()[0].metadata)
        assert kept is not None
        wait_until(lambda: get_first_offset() > 0, "the removal of the first snapshot")
        with monkeypatch.context() as patch:
            patch.setattr(get_client_classes()[0], "commit", fail)
            for saved in (b"never", LARGE[:30_000], b"never"):
                for kind in ("snapshot", "decisions"):
                    with pytest.raises(Unavailable):
                        reader.source.commit({0: PartitionState(**{kind: saved})})
                time.sleep(0.1)
        wait_until(
            lambda: get_first_offset() == kept.first_offset, "the removal of everything before the committed state"
        )
    reader.close()
    assert restore(world)[1] == RestoredPartition(0, 0, LARGE[3:10_003], (b"3",))


def test_alerts_and_state_are_complete_after_runs_of_random_length(either: Callable[..., Group]) -> None:
    """Runs have random numbers of polls and commits, and end in an orderly way or by a kill."""
    rng = np.random.default_rng(3)
    world = either(2)
    sent = 0
    for _ in range(5):
        more = int(rng.integers(40))
        produce(world.cluster, world.topic, make_messages(more, first=sent))
        sent += more
        member = world.add_member(max_poll_records=int(rng.integers(3, 12)))
        member.poll_until_assigned(0, 1)
        assert member.is_state_complete()
        for _ in range(int(rng.integers(8))):
            member.poll(0.05)
            if rng.random() < 0.7:
                member.commit(snapshots=np.flatnonzero(rng.random(2) < 0.3).tolist())
        assert member.is_state_complete()
        if rng.random() < 0.5:
            member.close()
        else:
            world.remove_member(member)
    member = world.add_member()
    member.poll_until_assigned(0, 1)
    wait_until(
        lambda: member.poll().data is None and sum(map(len, member.seen_offsets.values())) == sent, "all messages"
    )
    member.commit()
    assert member.is_state_complete()
    assert sum(world.read_positions().values()) == sent
    assert set(world.list_alerts()) == set(list_alert_keys(world.read_positions()))
    if world.mode == "exactly-once":
        assert sorted(world.list_alerts()) == list_alert_keys(world.read_positions())


def list_keys(world: Group) -> set[bytes]:
    """Return the keys in the state topic whose last message is not a tombstone."""
    last_values = {record.key: record.value for record in read_topic(world.bootstrap, world.state_topic)}
    return {key for key, value in last_values.items() if value is not None}


def test_process_that_lost_its_partition_cannot_overwrite_the_state_of_the_next_owner(
    group: Callable[..., Group],
) -> None:
    """Without transactions, its messages arrive in the state topic. They have other keys, and compaction keeps both."""
    world = group(mode="at-least-once")
    world.produce(20)
    older, _ = restore(world)
    older.read(20)
    for i in range(3):
        older.source.commit({0: PartitionState(snapshot=b"older %d" % i)})
    (reference,) = (StateReference.parse(offset.metadata) for offset in world.read_committed().values())
    keys_before = list_keys(world)
    world.remove_member(older)
    newer, begun = restore(world)
    assert begun.snapshot == b"older 2"
    newer.source.commit({0: PartitionState(snapshot=b"newer")})
    zombie, delivery = world.open_state_topic(), world.open_delivery()
    assert reference is not None
    for i in range(2):  # the older process does not know that it has lost the partition
        state = PartitionState(snapshot=b"zombie")
        messages, reference = zombie.encode(0, 20, state, reference, f"z{i}", reference.writer)
        assert {message.key for message in messages} <= keys_before
        world.commit(delivery, messages)
    delivery.close()
    newer.close()
    assert restore(world)[1] == RestoredPartition(0, 20, b"newer")


def test_keys_of_earlier_owners_are_deleted(either: Callable[..., Group]) -> None:
    world = either()
    world.produce(20)
    for snapshots in (1, 1, 3):
        reader, _ = restore(world)
        reader.poll_until_assigned(0)
        for i in range(snapshots):
            reader.source.commit({0: PartitionState(snapshot=LARGE if i == 0 else b"small")})
        reader.source.commit({0: PartitionState(decisions=b"decided")})
        reader.close()
    (reference,) = (StateReference.parse(offset.metadata) for offset in world.read_committed().values())
    assert reference is not None
    assert [writer for writer, _ in reference.num_keys_by_writer] == [reference.writer]
    assert all(key.startswith(reference.writer.encode()) for key in list_keys(world))
    assert restore(world)[1].snapshot == b"small"


def test_reference_of_an_older_version_is_read() -> None:
    metadata = '{"deformer":1,"kept":[7,1,3,2,"a-2","a-3"]}'
    reference = StateReference.parse(metadata)
    assert reference == StateReference(7, True, 3, 2, "a-2", "a-3", num_keys_by_writer=(("", 2),))
    assert StateReference.parse(reference.to_metadata()) == reference
