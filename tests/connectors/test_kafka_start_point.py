"""Tests of restarts after a loss of saved state or events: the loss is reported and handled as the user has chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata
from structlog.testing import capture_logs

from connectors.kafka import ensure_topics, produce
from connectors.kafka.state import RESERVED_BYTES, StateReference
from deformer_stream.errors import StateError
from deformer_stream.runtime.ports import PartitionState, RestoredPartition
from tests.connectors.kafka_groups import Group, Reader
from tests.connectors.kafka_helpers import make_messages, open_admin, wait_until

pytestmark = pytest.mark.kafka

SNAPSHOT = b"snapshot" * 1024  # in several messages
LARGEST = 2 * RESERVED_BYTES
Lost = Literal["refuse", "rebuild", "forget"]


@pytest.fixture
def world(group: Callable[..., Group]) -> Group:
    """Return a group with thirty events, of which twenty are committed: a snapshot at ten, and decisions at twenty."""
    world = group(**{"max.message.bytes": str(LARGEST)})
    produce(world.cluster, world.topic, make_messages(30))
    reader = world.add_reader(max_poll_records=10)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=SNAPSHOT)})
    reader.read(20)
    reader.source.commit({0: PartitionState(decisions=b"decisions")})
    reader.close()
    assert world.read_positions() == {0: 20}
    return world


def read_to_the_end(world: Group, lost: Lost, **options: Any) -> tuple[Reader, list[str]]:
    """Start a consumer and read everything that exists.

    Returns:
        The consumer and the warnings in its log.
    """
    with capture_logs() as lines:
        reader = world.add_reader(on_lost_state=lost, **options)
        reader.poll_until_assigned(0)
        wait_until(lambda: reader.poll().data is None and reader.source.get_lag() == {(world.topic, 0): 0}, "the end")
    return reader, list_warnings(lines)


def list_warnings(log_entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the event and the loss of each warning in the log."""
    return [f"{entry['event']} {entry.get('where', '')}" for entry in log_entries if entry["log_level"] == "warning"]


def list_offsets(reader: Reader) -> list[int]:
    """Return the offsets of the messages that were read."""
    return [offset for offset, _, _ in reader.messages_by_partition[0]]


# --- losses of data --------------------------------------------------------------------------------------------------


def recreate_topic(world: Group, topic: str) -> None:
    """Delete a topic and create it again."""
    with open_admin(world.bootstrap) as admin:
        admin.delete_topics([topic])

        def is_deleted() -> bool:
            return topic not in admin.list_topics()

        wait_until(is_deleted, "the deletion of the topic")
    ensure_topics(world.cluster, {topic: world.topics.get(topic, {"num_partitions": 1})})


def empty_state(world: Group) -> None:
    """Delete the state topic; the program creates it again when it starts."""
    recreate_topic(world, world.state_topic)


def write_state(world: Group, *messages: tuple[bytes, bytes, list[tuple[str, bytes]]]) -> None:
    """Write messages to the state topic: keys, values and headers."""
    sender = KafkaProducer(bootstrap_servers=world.bootstrap)
    for key, value, headers in messages:
        sender.send(world.state_topic, partition=0, key=key, value=value, headers=headers)
    sender.flush()
    sender.close()


def foreign_state(world: Group) -> None:
    """Replace the state by other messages, with and without headers like those of the program."""
    recreate_topic(world, world.state_topic)
    ours = [("deformer", b"1"), ("commit", b"another"), ("after", b"")]
    loop = [("deformer", b"1"), ("commit", b"loop"), ("after", b"loop")]
    for headers in ([], ours, loop):
        write_state(world, *((b"1/%06d" % i, b"garbage", headers) for i in range(6)))


def delete_before(world: Group, topic: str, offset: int) -> None:
    """Delete the messages before an offset, as retention does."""
    with open_admin(world.bootstrap) as admin:
        admin.delete_records({TopicPartition(topic, 0): offset})


def set_policy(world: Group, policy: str) -> None:
    """Set the cleanup policy of the state topic."""
    with open_admin(world.bootstrap) as admin:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, world.state_topic, {"cleanup.policy": policy})])


def snapshot_cut_short(world: Group) -> None:
    """Delete the first message of the snapshot."""
    kept = StateReference.parse(world.read_committed()[0].metadata)
    assert kept is not None
    set_policy(world, "delete")
    delete_before(world, world.state_topic, kept.first_offset + 1)
    set_policy(world, "compact")


def state_expired(world: Group) -> None:
    """Delete all messages of the state topic, as happens with a wrong cleanup policy."""
    set_policy(world, "delete")
    delete_before(world, world.state_topic, -1)
    set_policy(world, "compact")


def replace_metadata(text: str) -> Callable[[Group], None]:
    """Return a function that replaces the metadata of the committed offset."""

    def replace(world: Group) -> None:
        with open_admin(world.bootstrap) as admin:
            admin.alter_group_offsets(world.name, {TopicPartition(world.topic, 0): OffsetAndMetadata(20, text, -1)})

    return replace


def history_expired(world: Group) -> None:
    """Delete events that are needed to rebuild open records."""
    delete_before(world, world.topic, 15)


def events_expired(world: Group) -> None:
    """Delete events that were not yet consumed."""
    delete_before(world, world.topic, 25)


def topic_replaced(world: Group) -> None:
    """Replace the events topic by a shorter one and restore the committed offsets of the group."""
    before = world.read_committed()[0]
    recreate_topic(world, world.topic)
    produce(world.cluster, world.topic, make_messages(7))
    replace_metadata(before.metadata)(world)


@dataclass
class Case:
    """A loss of data, and how a consumer starts after it.

    Attributes:
        damage: Causes the loss.
        says: A regular expression that matches a part of the message.
        rebuilt: What is restored with `--lost-state rebuild`, and the offsets that are read.
        forgotten: The same with `--lost-state forget`.
    """

    damage: Callable[[Group], None]
    says: str
    rebuilt: tuple[RestoredPartition, range]
    forgotten: tuple[RestoredPartition, range]


STATELESS = {"rebuilt": (RestoredPartition(0, 20), range(30)), "forgotten": (RestoredPartition(0, 20), range(20, 30))}
CASES = [
    Case(
        empty_state,
        r"it has 3 messages, but the state topic '.*' contains only 0 of them from offset 0 on\. The others.* deleted",
        **STATELESS,
    ),
    Case(foreign_state, r"it has 3 messages, .* only 0 of them from offset 0 on", **STATELESS),
    Case(snapshot_cut_short, r"it has 3 messages, .* only 2 of them from offset 0 on", **STATELESS),
    Case(state_expired, r"it has 3 messages, .* only 0 of them from offset 0 on", **STATELESS),
    Case(
        replace_metadata('{"deformer":2,"kept":[]}'),
        "the saved state has format version 2, but this package reads 1",
        **STATELESS,
    ),
    Case(
        replace_metadata('{"deformer":1,"kept":[10,1,0'), "the metadata of the committed offset is damaged", **STATELESS
    ),
    Case(
        history_expired,
        "the saved state needs messages from offset 10 on, but the first one is 15",
        (RestoredPartition(0, 20, SNAPSHOT, (b"decisions",)), range(15, 30)),
        (RestoredPartition(0, 20), range(20, 30)),
    ),
    Case(
        events_expired,
        "5 messages expired before they were consumed",
        (RestoredPartition(0, 25, SNAPSHOT, (b"decisions",)), range(25, 30)),
        (RestoredPartition(0, 25), range(25, 30)),
    ),
    Case(
        topic_replaced,
        "the group has consumed up to offset 20, but the topic ends at 7: it was replaced",
        (RestoredPartition(0, 0), range(7)),
        (RestoredPartition(0, 0), range(7)),
    ),
]
NAMES = ["empty", "foreign", "cut-short", "expired", "version", "torn", "history", "events", "topic"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_lost_state_is_reported_and_handled_as_chosen(world: Group, case: Case) -> None:
    case.damage(world)
    committed = world.read_committed()
    with pytest.raises(StateError, match=case.says) as caught:
        read_to_the_end(world, "refuse")
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert text.startswith(f"topic '{world.topic}', partition 0: ")
    assert "--lost-state rebuild" in text
    assert "\n" not in text
    world.close()
    assert world.read_committed() == committed, "a refused start changes nothing"

    choices: list[tuple[Lost, tuple[RestoredPartition, range]]] = [
        ("forget", case.forgotten),
        ("rebuild", case.rebuilt),
    ]
    for lost, (restored, read) in choices:
        reader, warnings = read_to_the_end(world, lost)
        assert any(re.search(case.says, line) for line in warnings), warnings
        assert reader.restored == {0: restored}
        assert list_offsets(reader) == list(read)
        if lost == "rebuild":
            reader.source.commit({0: PartitionState(snapshot=b"new")})
            assert world.read_positions() == {0: read.stop}
        reader.close()


def test_rebuild_is_needed_once(world: Group) -> None:
    """The partition has no further message, so that it gets no new snapshot."""
    delete_before(world, world.topic, 20)
    with open_admin(world.bootstrap) as admin:
        admin.delete_records({TopicPartition(world.topic, 0): 30})
    replace_position = world.read_committed()[0]
    with open_admin(world.bootstrap) as admin:
        admin.alter_group_offsets(
            world.name, {TopicPartition(world.topic, 0): OffsetAndMetadata(30, replace_position.metadata, -1)}
        )
    reader, warnings = read_to_the_end(world, "rebuild")
    assert any("the saved state needs messages from offset 10 on" in warning for warning in warnings)
    reader.source.commit()
    reader.close()
    reader, warnings = read_to_the_end(world, "refuse")
    assert reader.restored == {0: RestoredPartition(0, 30, SNAPSHOT, (b"decisions",))}
    assert warnings == []


def test_rebuilt_state_is_saved(world: Group) -> None:
    empty_state(world)
    reader, _ = read_to_the_end(world, "rebuild")
    reader.source.commit({0: PartitionState(snapshot=b"new")})
    reader.close()
    reader, warnings = read_to_the_end(world, "refuse")
    assert reader.restored == {0: RestoredPartition(0, 30, b"new")}
    assert warnings == []


KEPT = StateReference(10, True, 7, 4, "a-1", "a-2")


@pytest.mark.parametrize("text", ["", "x", "{}", "[]", "17", "null", '{"flink": 1}', '"deformer"', "\u0000"])
def test_metadata_of_other_programs_are_ignored(text: str) -> None:
    assert StateReference.parse(text) is None


def test_metadata_round_trip() -> None:
    assert StateReference.parse(KEPT.to_metadata()) == KEPT
    assert (
        len(replace(KEPT, position=2**62, first_offset=2**62, last_commit="x" * 40, commit="x" * 40).to_metadata())
        < 512
    ), "Kafka: 4096"


@given(st.integers(0, len(KEPT.to_metadata()) - 1), st.characters(codec="utf-8"))
def test_damaged_metadata_are_detected_or_remain_valid(place: int, other: str) -> None:
    """A changed letter in a commit name cannot be detected, but no message has that name."""
    text = KEPT.to_metadata()
    for damaged in (text[:place], text[:place] + other + text[place + 1 :]):
        if damaged.startswith('{"deformer":'):
            with suppress(StateError):
                assert isinstance(StateReference.parse(damaged), StateReference)


@pytest.mark.parametrize("row", ["[]", '[10,1,0,"4","a","b"]', '[-1,1,0,4,"a","b"]', '[1,1,0,4,5,"b"]', "null", "{}"])
def test_invalid_metadata_are_reported_as_damaged(row: str) -> None:
    with pytest.raises(StateError, match="the metadata of the committed offset is damaged"):
        StateReference.parse(f'{{"deformer":1,"kept":{row}}}')


def test_commit_of_another_program_is_used_as_a_position(world: Group) -> None:
    replace_metadata('{"flink": 1}')(world)
    reader, warnings = read_to_the_end(world, "refuse")
    assert reader.restored == {0: RestoredPartition(0, 20)}
    assert list_offsets(reader) == list(range(20, 30))
    assert warnings == []


@contextmanager
def stop_reading(reader: Reader) -> Iterator[None]:
    """Stop reading partition 0 while the block runs. What a client has fetched ahead of it is dropped at its end."""
    reader.source.leave_out(frozenset({0}))
    reader.poll()
    yield
    reader.source.leave_out(frozenset())


def test_messages_that_expire_while_consuming_are_reported(world: Group) -> None:
    reader, _ = read_to_the_end(world, "forget")
    reader.source.commit()
    with stop_reading(reader):
        produce(world.cluster, world.topic, make_messages(30, first=30))
        delete_before(world, world.topic, 50)
    with capture_logs() as lines:
        reader.read(30)
    assert reader.revoked == [0]
    assert list_offsets(reader) == [*range(10, 30), *range(50, 60)]
    said = list_warnings(lines)
    assert any("20 messages expired before they were consumed" in line for line in said), said

    with stop_reading(reader):
        produce(world.cluster, world.topic, make_messages(10))
        delete_before(world, world.topic, 65)
    reader.source._restorer._on_lost_state = "refuse"
    with pytest.raises(StateError, match="messages expired before they were consumed"):
        reader.read(40)


def test_topic_that_is_replaced_while_consuming_is_reported(world: Group) -> None:
    """Kafka deletes the offsets of the group together with the topic."""
    reader, _ = read_to_the_end(world, "refuse")
    recreate_topic(world, world.topic)
    produce(world.cluster, world.topic, make_messages(7))
    # kafka-python itself finds that the topic was replaced; with librdkafka its new end shows it.
    errors = "consumed messages are gone, because the topic was replaced or truncated|up to offset 30.* was replaced"
    with pytest.raises(StateError, match=errors):
        wait_until(lambda: bool(reader.poll()) and False, "the end")
    world.close()
    with pytest.raises(StateError, match="has saved state but no committed offset: the topic was deleted"):
        read_to_the_end(world, "refuse")
    world.close()
    reader, warnings = read_to_the_end(world, "forget")
    assert any("has saved state but no committed offset" in text for text in warnings)
    assert list_offsets(reader) == list(range(7))


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_group_whose_offsets_have_expired_does_not_start_again(world: Group, start: Any) -> None:
    """Kafka deletes the offsets of a group that has no process for a week. All messages would be handled again."""

    def is_deleted() -> bool:
        with open_admin(world.bootstrap) as admin, suppress(KafkaError):  # until the last process has left the group
            admin.delete_groups([world.name])
            return not world.read_positions()
        return False

    wait_until(is_deleted, "the deletion of the group")
    with pytest.raises(StateError, match=r"offsets\.retention\.minutes .*--reset-offsets") as caught:
        read_to_the_end(world, "refuse", start=start)
    assert ("first message" in str(caught.value)) == (start == "earliest")
    world.close()
    replace_metadata("")(world)  # as kafka-consumer-groups.sh sets an offset
    reader, _ = read_to_the_end(world, "refuse", start=start)
    assert list_offsets(reader) == list(range(20, 30))


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_no_poll_returns_is_not_needed_by_saved_state(group: Callable[..., Group], is_aborted: bool) -> None:
    """The position passes markers and aborted messages of transactions, which retention of an idle topic deletes."""
    world = group()
    produce(world.cluster, world.topic, make_messages(5))
    reader = world.add_reader(max_poll_records=10)
    reader.read(5)
    sender = KafkaProducer(bootstrap_servers=world.bootstrap, transactional_id=f"other-{world.topic}")
    sender.init_transactions()
    if is_aborted:
        reader.source.commit({0: PartitionState(snapshot=b"state")})
    sender.begin_transaction()
    sender.send(world.topic, partition=0, value=b"x").get(10)
    if is_aborted:
        sender.abort_transaction()
    else:
        sender.commit_transaction()
        reader.read(6)
        reader.source.commit(
            {0: PartitionState(snapshot=b"state")}
        )  # with kafka-python, its position includes the marker
    sender.close()

    def is_passed() -> bool:
        reader.poll()
        reader.source.commit()
        return world.read_positions() == {0: 7}

    wait_until(is_passed, "the end of the transaction to be passed")
    reader.close()
    delete_before(world, world.topic, 7)
    again, _ = read_to_the_end(world, "refuse")
    assert again.restored == {0: RestoredPartition(0, 7, b"state")}


def test_state_of_another_group_is_none(group: Callable[..., Group], world: Group) -> None:
    """Groups may share a state topic, and at-least-once delivery saves state before the offset is committed."""
    other = group()
    other.state_topic = world.state_topic
    other.max_bytes_by_topic[world.state_topic] = world.max_bytes_by_topic[world.state_topic]
    produce(other.cluster, other.topic, make_messages(5))
    reader, warnings = read_to_the_end(other, "refuse")
    assert list_offsets(reader) == list(range(5))
    assert warnings == []
    headers = [("deformer", b"1"), ("commit", b"c"), ("after", b"")]
    write_state(other, (b"w/1/000000", b"state", headers))
    reader.close()
    reader, warnings = read_to_the_end(other, "refuse")
    assert warnings == []


def test_state_of_an_aborted_transaction_is_none(group: Callable[..., Group]) -> None:
    """A process was killed within its first commit: nothing was lost, so the next one begins."""
    world = group()
    produce(world.cluster, world.topic, make_messages(5))
    ensure_topics(world.cluster, {world.state_topic: {"num_partitions": 1, "cleanup.policy": "compact"}})
    sender = KafkaProducer(bootstrap_servers=world.bootstrap, transactional_id=f"aborted-{world.topic}")
    sender.init_transactions()
    sender.begin_transaction()
    sender.send(world.state_topic, partition=0, key=b"1/000000", value=b"state").get(10)
    sender.abort_transaction()
    sender.close()
    reader, warnings = read_to_the_end(world, "refuse")
    assert list_offsets(reader) == list(range(5))
    assert warnings == []
