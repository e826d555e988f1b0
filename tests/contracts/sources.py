"""The contract of all event sources: tests that each connector runs with a subclass of `SourceContract`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deformer_stream.codec import Codec, get_position
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.runtime.ports import EventSource, SourceCallbacks

SCHEMA = Schema(tuple(Feature(name, "continuous") for name in ("a", "b", "c")))

Reading = tuple[str, str, float]
"""Record, feature, value."""

READINGS: list[Reading] = [(f"r{i}", name, i + k / 10) for i in range(20) for k, name in enumerate("abc")]

TIMEOUT_SECONDS = 30.0
"""Seconds within which all published readings must arrive."""


@dataclass
class SourceUnderTest:
    """A source with the means to supply its input.

    Attributes:
        publish: Makes readings available, in this order within each record.
        open: Returns a source of all readings that were published and not committed.
        is_finite: Whether the source ends.
        has_offsets: Whether committed readings are not returned again by the next source.
    """

    publish: Callable[[list[Reading]], None]
    open: Callable[[], EventSource]
    is_finite: bool = True
    has_offsets: bool = False


@dataclass
class CollectedReadings:
    """What a source returned.

    Attributes:
        readings_by_record: The readings of each record, in order.
        positions: The positions of their messages.
    """

    readings_by_record: dict[str, list[tuple[str, float]]]
    positions: list[tuple[str, int, int]]


def collect(source: EventSource, count: int) -> CollectedReadings:
    """Poll until at least `count` events have arrived, and return them. Surplus events of the last poll are
    included.
    """
    source.set_callbacks(SourceCallbacks())  # as a pipeline does before the first poll
    codec = Codec(SCHEMA)
    collected = CollectedReadings({}, [])
    seen = 0
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while seen < count:
        assert time.monotonic() < deadline, f"{seen} of {count} events came within {TIMEOUT_SECONDS} seconds"
        polled = source.poll(0.1)
        assert polled.revoked_partitions == ()
        if polled.data is None:
            assert not source.is_exhausted, f"the source ended after {seen} of {count} events"
            continue
        batch, rejected = codec.decode(polled.data)
        assert rejected == []
        seen += len(batch)
        for record, code, value in zip(batch.record_ids, batch.features.tolist(), batch.values.tolist(), strict=True):
            collected.readings_by_record.setdefault(record, []).append((SCHEMA.names[code], value))
        collected.positions += [get_position(polled.data, i) for i in range(len(polled.data))]
    return collected


def group_by_record(readings: list[Reading]) -> dict[str, list[tuple[str, float]]]:
    """Return the readings of each record, in order."""
    result: dict[str, list[tuple[str, float]]] = {}
    for record, feature, value in readings:
        result.setdefault(record, []).append((feature, value))
    return result


class SourceContract:
    """The tests. A subclass defines a fixture `feed` that returns a fresh, empty `SourceUnderTest`."""

    def test_every_reading_arrives_once_and_in_order_within_its_record(self, feed: SourceUnderTest) -> None:
        feed.publish(READINGS)
        source = feed.open()
        assert not source.is_exhausted
        collected = collect(source, len(READINGS))
        assert collected.readings_by_record == group_by_record(READINGS)
        assert len(set(collected.positions)) == len(collected.positions)
        for _ in range(3):
            assert source.poll(0.05).data is None
        assert source.is_exhausted == feed.is_finite
        source.close()

    def test_poll_respects_its_timeout(self, feed: SourceUnderTest) -> None:
        feed.publish(READINGS)
        source = feed.open()
        collect(source, len(READINGS))
        began = time.monotonic()
        assert source.poll(0.2).data is None
        assert time.monotonic() - began < 5.0
        source.close()

    def test_second_reader_gets_the_same_positions(self, feed: SourceUnderTest) -> None:
        feed.publish(READINGS)
        first = feed.open()
        before = collect(first, len(READINGS))
        first.close()
        second = feed.open()
        again = collect(second, len(READINGS))
        second.close()
        assert sorted(again.positions) == sorted(before.positions)
        assert again.readings_by_record == before.readings_by_record

    def test_committed_readings_are_repeated_only_by_sources_without_offsets(self, feed: SourceUnderTest) -> None:
        feed.publish(READINGS)
        first = feed.open()
        collect(first, len(READINGS))
        first.commit()
        first.close()
        if feed.has_offsets:
            more = [(f"later-{record}", feature, value) for record, feature, value in READINGS]
            feed.publish(more)
            expected = more
        else:
            expected = READINGS
        second = feed.open()
        assert collect(second, len(expected)).readings_by_record == group_by_record(expected)
        second.close()

    def test_commit_before_first_poll_and_repeated_close_are_harmless(self, feed: SourceUnderTest) -> None:
        feed.publish(READINGS[:3])
        source = feed.open()
        source.commit()
        source.close()
        source.close()
        again = feed.open()
        assert collect(again, 3).readings_by_record == group_by_record(READINGS[:3])
        again.close()
