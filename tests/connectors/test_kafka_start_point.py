"""Where something that a restart needs is gone, it ends with the reason or goes on as told: nothing is lost unsaid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import OffsetAndMetadata
from structlog.testing import capture_logs

from connectors.kafka import ensure_topics, produce
from connectors.kafka.state import RESERVED_BYTES, StateReference
from deformer_stream.errors import StateError
from deformer_stream.runtime.ports import RestoredPartition, PartitionState
from tests.connectors.kafka_members import Group, Reader
from tests.connectors.kafka_world import admin_of, numbered, until

pytestmark = pytest.mark.kafka

SNAPSHOT = b"snapshot" * 1024  # in several messages
LARGEST = 2 * RESERVED_BYTES
Lost = Literal["refuse", "rebuild", "forget"]


@pytest.fixture
def world(group: Callable[..., Group]) -> Group:
    """Thirty events, of which twenty have been consumed: a snapshot at ten, decisions with the commit at twenty."""
    world = group(**{"max.message.bytes": str(LARGEST)})
    produce(world.bootstrap, world.topic, numbered(30))
    reader = world.reader(max_poll_records=10)
    reader.read(10)
    reader.source.commit({0: PartitionState(snapshot=SNAPSHOT)})
    reader.read(20)
    reader.source.commit({0: PartitionState(decisions=b"decisions")})
    reader.close()
    assert world.positions() == {0: 20}
    return world


def begin(world: Group, lost: Lost, **options: Any) -> tuple[Reader, list[str]]:
    """A new life that has read all there is; the warnings it gave."""
    with capture_logs() as lines:
        reader = world.reader(on_lost_state=lost, **options)
        reader.settle_on(0)
        until(lambda: reader.poll().data is None and reader.source.get_lag() == {(world.topic, 0): 0}, "the end")
    return reader, list_warnings(lines)


def list_warnings(log_entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the event and the loss of each warning in the log."""
    return [f"{entry['event']} {entry.get('where', '')}" for entry in log_entries if entry["log_level"] == "warning"]


def offsets(reader: Reader) -> list[int]:
    return [offset for offset, _, _ in reader.got[0]]


# --- what may happen --------------------------------------------------------------------------------------------------


def recreate(world: Group, topic: str) -> None:
    with admin_of(world.bootstrap) as admin:
        admin.delete_topics([topic])

        def gone() -> bool:
            return topic not in admin.list_topics()

        until(gone, "the end of the topic")
    ensure_topics(world.bootstrap, {topic: world.topics.get(topic, {"num_partitions": 1})})


def empty_state(world: Group) -> None:
    """Deleted; the program makes it again when it starts."""
    recreate(world, world.state_topic)


def write(world: Group, *messages: tuple[bytes, bytes, list[tuple[str, bytes]]]) -> None:
    sender = KafkaProducer(bootstrap_servers=world.bootstrap)
    for key, value, headers in messages:
        sender.send(world.state_topic, partition=0, key=key, value=value, headers=headers)
    sender.flush()
    sender.close()


def foreign_state(world: Group) -> None:
    """Other messages where ours should be, with and without headers like ours."""
    recreate(world, world.state_topic)
    ours = [("deformer", b"1"), ("commit", b"another"), ("after", b"")]
    loop = [("deformer", b"1"), ("commit", b"loop"), ("after", b"loop")]
    for headers in ([], ours, loop):
        write(world, *((b"1/%06d" % i, b"garbage", headers) for i in range(6)))


def delete_before(world: Group, topic: str, offset: int) -> None:
    """As retention does."""
    with admin_of(world.bootstrap) as admin:
        admin.delete_records({TopicPartition(topic, 0): offset})


def set_policy(world: Group, policy: str) -> None:
    with admin_of(world.bootstrap) as admin:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, world.state_topic, {"cleanup.policy": policy})])


def snapshot_cut_short(world: Group) -> None:
    kept = StateReference.parse(world.committed()[0].metadata)
    assert kept is not None
    set_policy(world, "delete")
    delete_before(world, world.state_topic, kept.first_offset + 1)
    set_policy(world, "compact")


def state_expired(world: Group) -> None:
    """Somebody has set the wrong cleanup policy."""
    set_policy(world, "delete")
    delete_before(world, world.state_topic, -1)
    set_policy(world, "compact")


def metadata(text: str) -> Callable[[Group], None]:
    def write_it(world: Group) -> None:
        with admin_of(world.bootstrap) as admin:
            admin.alter_group_offsets(world.name, {TopicPartition(world.topic, 0): OffsetAndMetadata(20, text, -1)})

    return write_it


def history_expired(world: Group) -> None:
    delete_before(world, world.topic, 15)


def events_expired(world: Group) -> None:
    delete_before(world, world.topic, 25)


def topic_replaced(world: Group) -> None:
    """The topic of events was deleted and made again, and then the group's offsets were restored."""
    before = world.committed()[0]
    recreate(world, world.topic)
    produce(world.bootstrap, world.topic, numbered(7))
    metadata(before.metadata)(world)


@dataclass
class Case:
    """What happens, what is said about it, and how a life begins then that is told to go on: what it restores, and the
    offsets that it reads."""

    damage: Callable[[Group], None]
    says: str
    rebuilt: tuple[RestoredPartition, range]
    forgotten: tuple[RestoredPartition, range]


STATELESS = {"rebuilt": (RestoredPartition(0, 20), range(30)), "forgotten": (RestoredPartition(0, 20), range(20, 30))}
CASES = [
    Case(empty_state, r"0 of 3 messages from offset 0 on are left, so the open records cannot be restored", **STATELESS),
    Case(foreign_state, r"0 of 3 messages from offset 0 on are left", **STATELESS),
    Case(snapshot_cut_short, r"2 of 3 messages from offset 0 on are left", **STATELESS),
    Case(state_expired, r"0 of 3 messages from offset 0 on are left", **STATELESS),
    Case(metadata('{"deformer":2,"kept":[]}'), "the saved state has format version 2, but this package reads 1", **STATELESS),
    Case(metadata('{"deformer":1,"kept":[10,1,0'), "the metadata of the committed offset is damaged", **STATELESS),
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
def test_what_is_gone_is_said_and_dealt_with_as_told(world: Group, case: Case) -> None:
    case.damage(world)
    committed = world.committed()
    with pytest.raises(StateError, match=case.says) as caught:
        begin(world, "refuse")
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert text.startswith(f"topic '{world.topic}', partition 0: ")
    assert "--lost-state rebuild" in text
    assert "\n" not in text
    world.close()
    assert world.committed() == committed, "a life that ends so leaves everything as it is"

    told: list[tuple[Lost, tuple[RestoredPartition, range]]] = [("forget", case.forgotten), ("rebuild", case.rebuilt)]
    for lost, (restored, read) in told:
        reader, warnings = begin(world, lost)
        assert any(case.says in line for line in warnings), warnings
        assert reader.restored == {0: restored}
        assert offsets(reader) == list(read)
        if lost == "rebuild":
            reader.source.commit({0: PartitionState(snapshot=b"new")})
            assert world.positions() == {0: read.stop}
        reader.close()


def test_what_was_rebuilt_is_kept_again(world: Group) -> None:
    empty_state(world)
    reader, _ = begin(world, "rebuild")
    reader.source.commit({0: PartitionState(snapshot=b"new")})
    reader.close()
    reader, warnings = begin(world, "refuse")
    assert reader.restored == {0: RestoredPartition(0, 30, b"new")}
    assert warnings == []


KEPT = StateReference(10, True, 7, 4, "a-1", "a-2")


@pytest.mark.parametrize("text", ["", "x", "{}", "[]", "17", "null", '{"flink": 1}', '"deformer"', "\u0000"])
def test_metadata_of_others_name_nothing(text: str) -> None:
    assert StateReference.parse(text) is None


def test_metadata_are_read_as_they_were_written() -> None:
    assert StateReference.parse(KEPT.to_metadata()) == KEPT
    assert len(replace(KEPT, position=2**62, first_offset=2**62, last_commit="x" * 40, commit="x" * 40).to_metadata()) < 512, "Kafka: 4096"


@given(st.integers(0, len(KEPT.to_metadata()) - 1), st.characters(codec="utf-8"))
def test_damaged_metadata_are_never_taken_for_others(place: int, other: str) -> None:
    """Wherever they are cut short; a changed letter may change a name, which is then found nowhere."""
    text = KEPT.to_metadata()
    for damaged in (text[:place], text[:place] + other + text[place + 1 :]):
        if damaged.startswith('{"deformer":'):
            with suppress(StateError):
                assert isinstance(StateReference.parse(damaged), StateReference)


@pytest.mark.parametrize("row", ["[]", '[10,1,0,"4","a","b"]', '[-1,1,0,4,"a","b"]', '[1,1,0,4,5,"b"]', "null", "{}"])
def test_nonsense_is_damage(row: str) -> None:
    with pytest.raises(StateError, match="the metadata of the committed offset is damaged"):
        StateReference.parse(f'{{"deformer":1,"kept":{row}}}')


def test_the_commit_of_another_program_is_a_position_and_no_more(world: Group) -> None:
    metadata('{"flink": 1}')(world)
    reader, warnings = begin(world, "refuse")
    assert reader.restored == {0: RestoredPartition(0, 20)}
    assert offsets(reader) == list(range(20, 30))
    assert warnings == []


def test_messages_that_expire_under_way(world: Group) -> None:
    reader, _ = begin(world, "forget")
    reader.source.commit()
    time.sleep(1.0)  # the client's last request has been answered: with nothing
    produce(world.bootstrap, world.topic, numbered(30, first=30))
    delete_before(world, world.topic, 50)
    with capture_logs() as lines:
        reader.read(30)
    assert reader.revoked == [0]
    assert offsets(reader) == [*range(10, 30), *range(50, 60)]
    said = list_warnings(lines)
    assert any("20 messages expired before they were consumed" in line for line in said), said

    time.sleep(1.0)
    produce(world.bootstrap, world.topic, numbered(10))
    delete_before(world, world.topic, 65)
    reader.source._on_lost_state = "refuse"
    with pytest.raises(StateError, match="messages expired before they were consumed"):
        reader.read(40)


def test_a_topic_that_is_replaced_under_way(world: Group) -> None:
    """Kafka forgets the group's offsets with the topic."""
    reader, _ = begin(world, "refuse")
    recreate(world, world.topic)
    produce(world.bootstrap, world.topic, numbered(7))
    with pytest.raises(StateError, match="consumed messages are gone, because the topic was replaced or truncated"):
        until(lambda: bool(reader.poll()) and False, "the end")
    world.close()
    reader, warnings = begin(world, "refuse")
    assert [text for text in warnings if text.startswith("state_without_committed_offset")]
    assert offsets(reader) == list(range(7))
