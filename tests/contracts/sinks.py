"""The contract of all sinks: tests that each connector runs with a subclass of `SinkContract`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.runtime.ports import Sink
from tests.contracts.effects import make_effects, make_empty_effects


@dataclass
class SinkUnderTest:
    """A sink with the means to observe what it delivers.

    Attributes:
        open: Returns a sink.
        delivered: Returns everything that has arrived at the sink's destination, in order.
        expected: Returns what one pair of effects and poll must become.
        safe_at_flush: Whether everything that was flushed is delivered before the sink is closed.
        all_or_nothing: Whether what was not flushed is never delivered.
    """

    open: Callable[[], Sink]
    delivered: Callable[[], list[Any]]
    expected: Callable[[Effects, Payload | None], list[Any]]
    safe_at_flush: bool = True
    all_or_nothing: bool = False


class SinkContract:
    """The tests. A subclass defines a fixture `drain` that returns a fresh, empty `SinkUnderTest`."""

    def test_flushed_effects_are_delivered_once_and_in_order(self, drain: SinkUnderTest) -> None:
        sink = drain.open()
        expected: list[Any] = []
        for first in (0, 10, 20):
            effects, data = make_effects(first)
            sink.write(effects, data)
            expected += drain.expected(effects, data)
            sink.flush()
            if drain.safe_at_flush:
                assert drain.delivered() == expected
        sink.close()
        assert drain.delivered() == expected
        assert expected

    def test_empty_effects_deliver_nothing(self, drain: SinkUnderTest) -> None:
        sink = drain.open()
        sink.write(make_empty_effects(), None)
        sink.write(make_empty_effects(), make_effects(0)[1])
        sink.flush()
        sink.flush()
        sink.close()
        assert drain.delivered() == []

    def test_close_handles_unflushed_effects_and_can_be_repeated(self, drain: SinkUnderTest) -> None:
        sink = drain.open()
        effects, data = make_effects(5)
        sink.write(effects, data)
        sink.close()
        sink.close()
        assert drain.delivered() == ([] if drain.all_or_nothing else drain.expected(effects, data))
