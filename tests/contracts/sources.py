"""What every event source owes the road. A connector's tests subclass `SourceContract`, and publish and open for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deformer_stream.codec import Codec, get_position
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.runtime.ports import EventSource

SCHEMA = Schema(tuple(Feature(name, "continuous") for name in ("a", "b", "c")))

Reading = tuple[str, str, float]
"""Record, feature, value."""

READINGS: list[Reading] = [(f"r{i}", name, i + k / 10) for i in range(20) for k, name in enumerate("abc")]

PATIENCE = 30.0
"""Seconds within which everything published must have come."""


@dataclass
class Feed:
    """publish: make these readings available, in this order within each record. open: a source of all that was
    published and has not been committed. finite: it ends. remembers: what was committed does not come again."""

    publish: Callable[[list[Reading]], None]
    open: Callable[[], EventSource]
    finite: bool = True
    remembers: bool = False


@dataclass
class Collected:
    """by_record: readings as they came. places: positions of the messages that carried them."""

    by_record: dict[str, list[tuple[str, float]]]
    places: list[tuple[str, int, int]]


def collect(source: EventSource, count: int) -> Collected:
    """Poll until `count` events have come; more would show as well."""
    codec = Codec(SCHEMA)
    collected = Collected({}, [])
    seen = 0
    deadline = time.monotonic() + PATIENCE
    while seen < count:
        assert time.monotonic() < deadline, f"{seen} of {count} events came within {PATIENCE} seconds"
        polled = source.poll(0.1)
        assert polled.revoked_partitions == ()
        if polled.data is None:
            assert not source.is_exhausted, f"the source ended after {seen} of {count} events"
            continue
        batch, rejected = codec.decode(polled.data)
        assert rejected == []
        seen += len(batch)
        for record, code, value in zip(batch.record_ids, batch.features.tolist(), batch.values.tolist(), strict=True):
            collected.by_record.setdefault(record, []).append((SCHEMA.names[code], value))
        collected.places += [get_position(polled.data, i) for i in range(len(polled.data))]
    return collected


def by_record(readings: list[Reading]) -> dict[str, list[tuple[str, float]]]:
    result: dict[str, list[tuple[str, float]]] = {}
    for record, feature, value in readings:
        result.setdefault(record, []).append((feature, value))
    return result


class SourceContract:
    """Subclasses define a fixture `feed` that gives a fresh, empty `Feed`."""

    def test_everything_comes_once_and_in_order_within_its_record(self, feed: Feed) -> None:
        feed.publish(READINGS)
        source = feed.open()
        assert not source.is_exhausted
        collected = collect(source, len(READINGS))
        assert collected.by_record == by_record(READINGS)
        assert len(set(collected.places)) == len(collected.places)
        for _ in range(3):
            assert source.poll(0.05).data is None
        assert source.is_exhausted == feed.finite
        source.close()

    def test_a_poll_does_not_outlast_its_timeout_by_much(self, feed: Feed) -> None:
        feed.publish(READINGS)
        source = feed.open()
        collect(source, len(READINGS))
        began = time.monotonic()
        assert source.poll(0.2).data is None
        assert time.monotonic() - began < 5.0
        source.close()

    def test_a_second_reader_sees_the_same_positions(self, feed: Feed) -> None:
        feed.publish(READINGS)
        first = feed.open()
        before = collect(first, len(READINGS))
        first.close()
        second = feed.open()
        again = collect(second, len(READINGS))
        second.close()
        assert sorted(again.places) == sorted(before.places)
        assert again.by_record == before.by_record

    def test_what_was_committed_comes_again_only_where_nothing_is_remembered(self, feed: Feed) -> None:
        feed.publish(READINGS)
        first = feed.open()
        collect(first, len(READINGS))
        first.commit()
        first.close()
        if feed.remembers:
            more = [(f"later-{record}", feature, value) for record, feature, value in READINGS]
            feed.publish(more)
            expected = more
        else:
            expected = READINGS
        second = feed.open()
        assert collect(second, len(expected)).by_record == by_record(expected)
        second.close()

    def test_commit_before_the_first_poll_and_closing_twice_do_no_harm(self, feed: Feed) -> None:
        feed.publish(READINGS[:3])
        source = feed.open()
        source.commit()
        source.close()
        source.close()
        again = feed.open()
        assert collect(again, 3).by_record == by_record(READINGS[:3])
        again.close()
