"""The loop of the bridge: what is acknowledged, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import orjson
import pytest

from deformer_stream.codec.bridge_messages import BridgeMessage, TopicPattern, Translation, ValueTranslator
from deformer_stream.codec.validation import FieldNames
from deformer_stream.errors import Unavailable
from deformer_stream.runtime import bridge
from deformer_stream.runtime.bridge import BridgePipeline
from deformer_stream.runtime.bridge_metrics import BridgeMetrics, SourceMetrics

TIMEOUT_SECONDS = 60.0


class ListedMessages:
    """A source of given messages, a few with each poll, that ends the loop after the last one.

    Attributes:
        acknowledged: The payloads that were acknowledged, in order.
    """

    def __init__(self, payloads: Sequence[bytes], stop: threading.Event) -> None:
        self._payloads, self._stop = list(payloads), stop
        self.acknowledged: list[bytes] = []
        self.num_connections, self.is_connected = 1, True

    def poll(self, timeout: float) -> Sequence[BridgeMessage]:
        polled, self._payloads = self._payloads[:3], self._payloads[3:]
        if not polled:
            time.sleep(min(timeout, 0.001))
        return [BridgeMessage("p/x", payload, 10**15) for payload in polled]

    def acknowledge(self, messages: Sequence[BridgeMessage]) -> None:
        self.acknowledged += [message.payload for message in messages]
        if len(self.acknowledged) == 10:
            self._stop.set()

    def publish(self, topic: str, payload: bytes) -> None:
        raise AssertionError("values cause no requests")

    def close(self) -> None:
        pass


class SlowSink:
    """A sink that checks, before it accepts a batch, that nothing of it is acknowledged yet.

    Attributes:
        written: The values that were written, in order.
        max_written: Largest number of values of one write.
    """

    def __init__(self, source: ListedMessages, fails_at: int = 100) -> None:
        self._source, self._fails_at = source, fails_at
        self.written: list[int] = []
        self.max_written = 0
        self.may_retry = True

    def write(self, translation: Translation) -> None:
        time.sleep(0.005)
        values = [orjson.loads(event.value)["value"] for event in translation.events]
        assert not {b"%d" % value for value in values} & set(self._source.acknowledged)
        if self._fails_at in values:
            raise Unavailable("Kafka is away")
        self.written += values
        self.max_written = max(self.max_written, len(values))

    def stop_retries(self) -> None:
        self.may_retry = False


def run_pipeline(payloads: Sequence[bytes], **options: int) -> tuple[BridgePipeline, ListedMessages, SlowSink]:
    """Run a loop until ten messages are acknowledged, and return it with its source and its sink."""
    stop = threading.Event()
    source = ListedMessages(payloads, stop)
    sink = SlowSink(source, **options)
    metrics = BridgeMetrics()
    pipeline = BridgePipeline(
        source, ValueTranslator(TopicPattern(None), FieldNames()), sink, metrics, SourceMetrics(metrics)
    )
    pipeline.run(stop)
    assert metrics.is_healthy()
    assert metrics.is_ready
    assert metrics.registry.get_sample_value("deformer_bridge_messages_total") == len(payloads)
    assert metrics.registry.get_sample_value("deformer_bridge_connections_total") == 1
    return pipeline, source, sink


def test_messages_are_acknowledged_in_order_after_they_were_written() -> None:
    payloads = [b"%d" % i for i in range(10)]
    _, source, sink = run_pipeline(payloads)
    assert source.acknowledged == payloads
    assert sink.written == list(range(10))
    assert not sink.may_retry


def test_a_write_takes_a_limited_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "MAX_WRITE_MESSAGES", 2)
    payloads = [b"%d" % i for i in range(10)]
    _, source, sink = run_pipeline(payloads)
    assert source.acknowledged == payloads
    assert sink.written == list(range(10))
    assert sink.max_written == 2


def test_refused_messages_are_acknowledged_too() -> None:
    _, source, sink = run_pipeline([b"1", b"\xff", *(b"%d" % i for i in range(2, 10))])
    assert len(source.acknowledged) == 10
    assert sink.written == [1, *range(2, 10)]


def test_a_batch_that_cannot_be_written_is_not_acknowledged() -> None:
    stop = threading.Event()
    source = ListedMessages([b"%d" % i for i in range(10)], stop)
    sink = SlowSink(source, fails_at=7)
    metrics = BridgeMetrics()
    translator = ValueTranslator(TopicPattern(None), FieldNames())
    pipeline = BridgePipeline(source, translator, sink, metrics, SourceMetrics(metrics))
    with pytest.raises(Unavailable, match="Kafka is away"):
        pipeline.run(stop)
    assert b"7" not in source.acknowledged
    assert {b"%d" % value for value in sink.written} == set(source.acknowledged)
