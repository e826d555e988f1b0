"""What every sink owes the road. A connector's tests subclass `SinkContract`, and open and read for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.runtime.ports import Sink
from tests.contracts.effects import effects_of, nothing


@dataclass
class Drain:
    """open: a sink. delivered: everything that has arrived where the sink writes, in order. expected: what one pair of
    effects and data is to become. safe_at_flush: what was flushed is delivered before the sink is closed.
    all_or_nothing:
    what was not flushed is never delivered."""

    open: Callable[[], Sink]
    delivered: Callable[[], list[Any]]
    expected: Callable[[Effects, Payload | None], list[Any]]
    safe_at_flush: bool = True
    all_or_nothing: bool = False


class SinkContract:
    """Subclasses define a fixture `drain` that gives a fresh, empty `Drain`."""

    def test_what_is_flushed_is_delivered_once_and_in_order(self, drain: Drain) -> None:
        sink = drain.open()
        expected: list[Any] = []
        for first in (0, 10, 20):
            effects, data = effects_of(first)
            sink.write(effects, data)
            expected += drain.expected(effects, data)
            sink.flush()
            if drain.safe_at_flush:
                assert drain.delivered() == expected
        sink.close()
        assert drain.delivered() == expected
        assert expected

    def test_effects_of_nothing_deliver_nothing(self, drain: Drain) -> None:
        sink = drain.open()
        sink.write(nothing(), None)
        sink.write(nothing(), effects_of(0)[1])
        sink.flush()
        sink.flush()
        sink.close()
        assert drain.delivered() == []

    def test_closing_ends_what_was_not_flushed_and_a_second_time_does_nothing(self, drain: Drain) -> None:
        sink = drain.open()
        effects, data = effects_of(5)
        sink.write(effects, data)
        sink.close()
        sink.close()
        assert drain.delivered() == ([] if drain.all_or_nothing else drain.expected(effects, data))
