"""The Kafka connector against a real broker."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as refusals
from kafka.admin import MemberToRemove

from connectors.kafka import KafkaSink, KafkaSource, ensure_topics, produce
from connectors.kafka.client import CONNECT_SECONDS, MAPPING, translate
from deformer_stream.core.batch import AlertRaised, Closed, Effects, EventBatch, Reason, Rejected, Scored
from deformer_stream.errors import ConfigError, DeformerError, Unavailable
from deformer_stream.ports import Messages, Payload, Polled
from tests.conftest import start_broker

pytestmark = pytest.mark.kafka

PATIENCE = 30.0
NOTHING_LISTENS = "127.0.0.1:1"
Topic = Callable[..., str]


class Bytes:
    """An encoder of alerts whose output has the length that the alert's record asks for."""

    def encode_alert(self, alert: AlertRaised, data: Payload | None) -> bytes:
        return b"x" * int(alert.record) if alert.record.isdigit() else f"{alert.id}:{alert.record}".encode()


def alert(record: str) -> AlertRaised:
    return AlertRaised("id-" + record, record, 1, 1, 8, 0, 0.001, 0.01, 9.0, -20.0, "model", 0, ())


def effects(alerts: list[AlertRaised], rejected: list[Rejected]) -> Effects:
    nothing = np.empty(0)
    closed = Closed(
        [], [], nothing.astype(np.int32), nothing.astype(bool), nothing, nothing, nothing, nothing.astype(np.int32)
    )
    return Effects(EventBatch.empty(), Scored.empty(), alerts, rejected, closed)


def until(poll: Callable[[], bool], what: str) -> None:
    """Repeat `poll` until it is true; it waits by itself."""
    deadline = time.monotonic() + PATIENCE
    while not poll():
        assert time.monotonic() < deadline, f"in vain: {what}"


class Reader:
    """A source and everything that came out of it: `got` maps a partition to its (offset, key, payload)."""

    def __init__(self, source: KafkaSource) -> None:
        self.source = source
        self.got: dict[int, list[tuple[int, bytes | None, bytes | None]]] = defaultdict(list)
        self.revoked: list[int] = []

    def poll(self, timeout: float = 0.2) -> Polled:
        polled = self.source.poll(timeout)
        self.revoked += polled.revoked
        if polled.data is not None:
            assert isinstance(polled.data, Messages)
            d = polled.data
            for p, o, k, v in zip(d.partitions.tolist(), d.offsets.tolist(), d.keys, d.payloads, strict=True):
                self.got[p].append((o, k, v))
        return polled

    def __len__(self) -> int:
        return sum(map(len, self.got.values()))

    def read(self, count: int) -> None:
        def enough() -> bool:
            self.poll()
            return len(self) >= count

        until(enough, f"{count} messages, got {len(self)}")

    def payloads(self) -> list[bytes | None]:
        return [v for rows in self.got.values() for _, _, v in rows]


@pytest.fixture
def open_reader(kafka: SimpleNamespace) -> Iterator[Callable[..., Reader]]:
    opened: list[KafkaSource] = []

    def make(topic: str, group: str = "g", **options: Any) -> Reader:
        opened.append(KafkaSource(kafka.bootstrap, topic, f"{group}-{topic}", **options))
        return Reader(opened[-1])

    yield make
    for source in opened:
        source.close()


def numbered(count: int, keys: int = 10, first: int = 0) -> list[tuple[bytes, bytes, int | None]]:
    return [(b"key-%d" % (i % keys), b"%d" % i, 1_700_000_000_000 + i) for i in range(first, first + count)]


def committed(kafka: SimpleNamespace, topic: str, group: str = "g") -> dict[int, int]:
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    offsets = admin.list_group_offsets([f"{group}-{topic}"])
    admin.close()
    return {tp.partition: o.offset for tp, o in offsets[f"{group}-{topic}"].items()}


# --- source -----------------------------------------------------------------------------------------------------------


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
    assert times == {i: (1_700_000_000_000 + i) * 1000 for i in range(1000)}
    for rows in reader.got.values():
        assert [o for o, _, _ in rows] == list(range(len(rows)))
        values = [int(v) for _, _, v in rows]
        assert values == sorted(values)
        assert all(k == b"key-%d" % (v % 10) for (_, k, _), v in zip(rows, values, strict=True))
    assert sorted(int(v) for v in reader.payloads()) == list(range(1000))
    assert not reader.source.exhausted
    assert reader.source.assigned == {0, 1, 2, 3}


def test_poll_returns_in_time_and_never_more_than_asked(kafka: SimpleNamespace, topic: Topic, open_reader: Any) -> None:
    name = topic(1)
    reader = open_reader(name, max_poll_records=7)
    until(lambda: reader.poll().data is None and bool(reader.source.assigned), "an assignment")
    began = time.monotonic()
    assert reader.poll(0.3).data is None
    assert time.monotonic() - began < 1.0
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
    assert sum(second.source.lag().values()) == 0


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
    assert reader.source.lag() == {(name, 0): 20}


def test_rebalance_hands_partitions_over_without_loss_or_repetition(
    kafka: SimpleNamespace, topic: Topic, open_reader: Any
) -> None:
    name = topic(4)
    produce(kafka.bootstrap, name, numbered(200, keys=40))
    first = open_reader(name)
    first.read(200)  # dealt with, as the next poll says, but never committed by a call
    second = open_reader(name)
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            second.poll(0.1)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        until(
            lambda: first.poll(0.1) is not None and len(first.source.assigned) == len(second.source.assigned) == 2,
            "2+2",
        )
        assert sorted(first.revoked) == sorted(second.source.assigned)
        produce(kafka.bootstrap, name, numbered(200, keys=40, first=200))
        until(lambda: first.poll(0.1) is not None and len(first) + len(second) >= 400, "all messages")
        first.source.commit()
        first.poll(0.5)
    finally:
        stop.set()
        thread.join()
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
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            second.poll(0.1)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while len(second.source.assigned) == 0 and time.monotonic() < deadline:
            first.source.commit()
            first.poll(0.01)
    finally:
        stop.set()
        thread.join()
    assert len(second.source.assigned) == 1
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
            refused.append(reader.source.assigned)
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
    until(lambda: reader.poll(0.1).data is None and reader.source.lag() == {(name, 0): 0}, "the end of the topic")
    assert reader.payloads() == [b"kept"]
    reader.source.commit()
    assert committed(kafka, name) == {0: 4}  # two messages and two transaction markers: the true next position


# --- refusals ---------------------------------------------------------------------------------------------------------


def one_line(error: DeformerError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 300
    return text


def test_unknown_topic(kafka: SimpleNamespace) -> None:
    with pytest.raises(Unavailable) as caught:
        KafkaSource(kafka.bootstrap, "no-such-topic", "g")
    assert (
        one_line(caught.value)
        == f"topic 'no-such-topic' does not exist on {kafka.bootstrap}: create it or check --topic"
    )
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda servers: KafkaSource(servers, "t", "g"),
        lambda servers: KafkaSink(servers, "a", "d", Bytes()),
        lambda servers: produce(servers, "t", [(b"k", b"v", None)]),
    ],
    ids=["source", "sink", "produce"],
)
def test_unreachable_broker(attempt: Callable[[str], object], capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        attempt(NOTHING_LISTENS)
    assert time.monotonic() - began < CONNECT_SECONDS + 2
    reason = "cannot be reached (Connection refused): start the broker or check --bootstrap-servers"
    assert one_line(caught.value) == f"Kafka at {NOTHING_LISTENS} {reason}"
    assert caught.value.exit_code == 4
    assert threading.active_count() == threads, "a network thread goes on"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("servers", ["localhost:port", "", "localhost", "localhost:99999", "a:1,b"])
def test_nonsense_address(servers: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form host:port") as caught:
        KafkaSource(servers, "t", "g")
    one_line(caught.value)


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_something_that_is_no_broker(mute: str) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no answer in time") as caught:
        KafkaSource(mute, "t", "g")
    assert time.monotonic() - began < CONNECT_SECONDS + 2
    one_line(caught.value)
    assert threading.active_count() == threads, "a network thread goes on"


def test_illegal_topic_name(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError):
        KafkaSource(kafka.bootstrap, "no spaces, please", "g")


def test_missing_certificate(kafka: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"--ssl-cafile /nowhere/ca.pem: there is no such file"):
        KafkaSource(kafka.bootstrap, "t", "g", security={"security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"})


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a broker that wants a login, where user `weak` has no rights at all."""
    with start_broker(users={"weak": "secret"}) as broker:
        yield broker.guarded


def login(password: str) -> dict[str, str]:
    user = {"sasl_plain_username": "weak", "sasl_plain_password": password}
    return {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", **user}


def test_wrong_password(guarded: str) -> None:
    with pytest.raises(ConfigError, match="refused the login") as caught:
        KafkaSource(guarded, "t", "g", security=login("wrong-password"))
    assert "wrong-password" not in one_line(caught.value)
    assert caught.value.exit_code == 2


def test_wrong_way_to_log_in(guarded: str) -> None:
    with pytest.raises(ConfigError, match="--sasl-mechanism"):
        KafkaSource(guarded, "t", "g", security=login("secret") | {"sasl_mechanism": "SCRAM-SHA-256"})


def test_a_login_that_is_missing(guarded: str) -> None:
    with pytest.raises(ConfigError, match="--security-protocol"):
        KafkaSource(guarded, "t", "g")


def test_creation_forbidden(guarded: str) -> None:
    with pytest.raises(ConfigError, match=r"topic 'alerts' does not exist on .* and may not be created") as caught:
        KafkaSink(guarded, "alerts", None, Bytes(), security=login("secret"))
    assert "grant this user the right" in one_line(caught.value)


def _kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def test_every_error_of_the_client_is_mapped() -> None:
    """A row of its own for whatever connecting can raise; the last row, "see the broker's log", takes none of these."""
    assert MAPPING[-1][0] == (refusals.KafkaError,)
    for kind in _kinds(refusals.KafkaError):
        error = kind({}) if kind is refusals.LogTruncationError else kind()
        ours = translate(error, "host:9092", "connecting")
        assert isinstance(ours, DeformerError)
        assert kind.__name__ in one_line(ours)
    connecting = [
        *_kinds(refusals.RetriableError),
        *_kinds(refusals.AuthorizationError),
        *_kinds(refusals.KafkaProtocolError),
        *_kinds(refusals.UnsupportedVersionError),
        refusals.KafkaConfigurationError,
        refusals.SaslAuthenticationFailedError,
        refusals.UnsupportedSaslMechanismError,
        refusals.IllegalSaslStateError,
        refusals.UnrecognizedBrokerVersion,
        refusals.InvalidTopicError,
        refusals.InvalidGroupIdError,
    ]
    for kind in connecting:
        assert any(issubclass(kind, kinds) for kinds, _, _ in MAPPING[:-1]), f"{kind.__name__} is not mapped"
    expected = {
        refusals.KafkaTimeoutError: Unavailable,
        refusals.KafkaConnectionError: Unavailable,
        refusals.NodeNotReadyError: Unavailable,
        refusals.UnknownTopicOrPartitionError: Unavailable,
        refusals.SaslAuthenticationFailedError: ConfigError,
        refusals.TopicAuthorizationFailedError: ConfigError,
        refusals.MessageSizeTooLargeError: ConfigError,
        refusals.KafkaConfigurationError: ConfigError,
    }
    assert {kind: type(translate(kind(), "h", "x")) for kind in expected} == expected


# --- sink -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_sink(kafka: SimpleNamespace) -> Iterator[Callable[..., KafkaSink]]:
    opened: list[KafkaSink] = []

    def make(alerts: str | None, letters: str | None, **options: Any) -> KafkaSink:
        opened.append(KafkaSink(kafka.bootstrap, alerts, letters, Bytes(), **options))
        return opened[-1]

    yield make
    for sink in opened:
        sink.close()


def records_of(kafka: SimpleNamespace, topic: str, count: int) -> list[Any]:
    """The first `count` messages of a topic with their headers, by partition."""
    reader = KafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=10000)
    reader.assign([TopicPartition(topic, p) for p in sorted(reader.partitions_for_topic(topic))])
    found = list(itertools.islice(reader, count))
    reader.close()
    assert len(found) == count
    return found


def test_alerts_are_keyed_by_record(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(3, "alerts")
    sink = open_sink(name, None)
    sink.write(effects([alert("pump-1"), alert("pumpe-ä")], [Rejected(0, Reason.LATE, "no topic for these")]), None)
    sink.flush()
    found = {r.key: r.value for r in records_of(kafka, name, 2)}
    assert found == {b"pump-1": b"id-pump-1:pump-1", "pumpe-ä".encode(): "id-pumpe-ä:pumpe-ä".encode()}


def test_missing_topics_are_created(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=3)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=5)  # there already: left as they are
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    found = {t["name"]: len(t["partitions"]) for t in admin.describe_topics([name + "-alerts", name + "-dead-letter"])}
    admin.close()
    assert found == {name + "-alerts": 3, name + "-dead-letter": 3}


def poll_of(payloads: list[bytes | None], keys: list[bytes | None]) -> Messages:
    n = len(payloads)
    place = np.arange(n)
    return Messages("events", keys, payloads, place * 0, np.full(n, 2, np.int32), place + 1840)


def test_dead_letters_are_unchanged_and_say_why(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "letters")
    sink = open_sink(None, name)
    data = poll_of([b"{", b"\xff\xfe", None, None], [b"k", None, b"k", None])
    details = ["Zeile 1: größer", "not UTF-8", "null", "nothing at all"]
    sink.write(effects([], [Rejected(i, Reason.NOT_JSON, text) for i, text in enumerate(details)]), data)
    sink.flush()
    found = records_of(kafka, name, 4)
    # A message without key and value cannot be sent by the client; an empty value stands for it.
    assert [(r.key, r.value) for r in found] == [(b"k", b"{"), (None, b"\xff\xfe"), (b"k", None), (None, b"")]
    for i, record in enumerate(found):
        headers = {k: v.decode() for k, v in record.headers}
        place = {"topic": "events", "partition": "2", "offset": str(1840 + i)}
        assert headers == {"reason": "not_json", "detail": details[i], **place}


def test_too_large_a_dead_letter_goes_without_its_payload(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "letters", **{"max.message.bytes": "2000"})
    sink = open_sink(None, name)
    data = poll_of([b"x" * 5000, b"small"], [b"big", b"small"])
    sink.write(effects([], [Rejected(i, Reason.TOO_LARGE, "large") for i in range(2)]), data)
    sink.flush()
    found = {r.key: r for r in records_of(kafka, name, 2)}
    assert found[b"small"].value == b"small"
    assert found[b"big"].value == b""
    assert ("payload_bytes", b"5000") in found[b"big"].headers
    sink.flush()  # nothing is left over


def test_our_dead_letter_topics_take_the_largest_event(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    events = topic(1)
    largest = b"x" * (2**20 - 200)  # with its key and framing just what a topic takes by default
    produce(kafka.bootstrap, events, [(b"k", largest, None)])
    sink = open_sink(None, events + "-dead-letter")
    sink.write(effects([], [Rejected(0, Reason.TOO_LARGE, "large " * 100)]), poll_of([largest], [b"k"]))
    sink.flush()
    assert records_of(kafka, events + "-dead-letter", 1)[0].value == largest


def test_an_alert_that_is_too_large_is_an_error_and_no_harm(
    kafka: SimpleNamespace, topic: Topic, open_sink: Any
) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    with pytest.raises(ConfigError, match=r"too large for its topic: raise the topic's max.message.bytes"):
        sink.write(effects([alert("2000000")], []), None)
    sink.write(effects([alert("a")], []), None)
    sink.flush()
    assert [r.value for r in records_of(kafka, name, 1)] == [b"id-a:a"]


# --- produce ----------------------------------------------------------------------------------------------------------


def test_produce_keeps_the_rate_and_reports(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-new"
    seen: list[int] = []
    began = time.monotonic()
    assert produce(kafka.bootstrap, name, numbered(100), rate=100, partitions=3, progress=seen.append) == 100
    assert 0.99 <= time.monotonic() - began < 5
    assert seen == sorted(seen)
    assert seen[-1] == 100
    assert len(seen) >= 5
    assert len(records_of(kafka, name, 100)) == 100


def test_produce_raises_when_a_message_is_refused(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1, "events", **{"max.message.bytes": "1000"})
    with pytest.raises(ConfigError, match="too large"):
        produce(kafka.bootstrap, name, [(b"k", b"x" * 5000, None)])


def test_produce_lets_errors_of_its_input_through(kafka: SimpleNamespace, topic: Topic) -> None:
    def broken() -> Iterator[tuple[bytes, bytes, None]]:
        yield b"k", b"v", None
        raise OSError("the disk is gone")

    name = topic(1)
    with pytest.raises(OSError, match="the disk is gone"):
        produce(kafka.bootstrap, name, broken())
    assert len(records_of(kafka, name, 1)) == 1


def test_topics_are_made_once_even_by_many(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-raced"
    failures: list[BaseException] = []

    def make() -> None:
        try:
            ensure_topics(kafka.bootstrap, {name: {"num_partitions": 2}})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
