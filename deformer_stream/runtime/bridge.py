"""The loop of the bridge: receive messages, translate them, write events to Kafka, and acknowledge the messages.

A message is acknowledged to its source after Kafka has acknowledged everything that follows from it. So no message is
lost by the end of this process at any moment. The source delivers messages without acknowledgement again, and their
events are then twice in the topic. While one batch is written, the next one is received.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from deformer_stream import log
from deformer_stream.codec.bridge_messages import BridgeMessage, Translation, Translator, translate_all
from deformer_stream.errors import Unavailable
from deformer_stream.runtime.bridge_metrics import BridgeMetrics, SourceMetrics

POLL_SECONDS = 0.5
"""Longest wait for messages in seconds, after which the loop looks whether it must stop."""

WRITE_POLL_SECONDS = 0.005
"""Longest wait for messages in seconds while a batch is written, so that it is acknowledged soon."""

MAX_WRITE_MESSAGES = 50_000
"""Largest number of messages of one write, so that their events take limited memory and are acknowledged soon."""


class BridgeSource(Protocol):
    """A system from which messages are received."""

    @property
    def is_connected(self) -> bool:
        """Whether messages can arrive now."""

    @property
    def num_connections(self) -> int:
        """How many connections were made so far."""

    def poll(self, timeout: float) -> Sequence[BridgeMessage]:
        """Return messages that have arrived, after at most about `timeout` seconds.

        It also sends what `acknowledge` and `publish` have left, and reconnects.

        Raises:
            Unavailable: The system could not be reached for too long.
            ConfigError: The system refuses the connection.
        """

    def acknowledge(self, messages: Sequence[BridgeMessage]) -> None:
        """Acknowledge messages in the order in which `poll` has returned them."""

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a message, without a guarantee that it arrives."""

    def close(self) -> None:
        """Send acknowledgements that are left, and close the connection. It does not raise."""


class BridgeSink(Protocol):
    """What events are written to."""

    def write(self, translation: Translation) -> None:
        """Write events, rejections and states, and return when all of them are acknowledged.

        Another thread than that of the source calls it.

        Raises:
            Unavailable: They were not acknowledged for too long.
            ConfigError: They are refused.
        """

    def stop_retries(self) -> None:
        """Make a write raise `Unavailable` in place of another attempt. Another thread may call it."""


class BridgePipeline:
    """The loop of the bridge.

    Args:
        source: Where messages come from.
        translator: Converts messages to events.
        sink: What events are written to.
        metrics: Receives counts and timings.
        source_metrics: Receives what the source reports.
    """

    def __init__(
        self,
        source: BridgeSource,
        translator: Translator,
        sink: BridgeSink,
        metrics: BridgeMetrics,
        source_metrics: SourceMetrics,
    ) -> None:
        self._source, self._translator, self._sink = source, translator, sink
        self._metrics, self._source_metrics = metrics, source_metrics
        self._received: list[BridgeMessage] = []  # not translated yet
        self._written: list[BridgeMessage] = []  # of the batch that is being written
        self._write: Future[int] | None = None

    def run(self, stop: threading.Event) -> None:
        """Pass messages on until the event is set. Messages that were not written by then are not acknowledged.

        Raises:
            Unavailable: The source or Kafka could not be reached for too long.
            ConfigError: The source or Kafka refuses the connection or a message.
        """
        with ThreadPoolExecutor(1, "bridge-write") as executor:
            try:
                while not stop.is_set():
                    self._step(executor)
            finally:
                self._sink.stop_retries()
            if self._write is not None:
                try:
                    self._finish_write(self._write)
                except Unavailable as error:  # the source delivers the messages to the next run
                    log.get_logger("bridge").warning("write_abandoned", error=str(error))

    def _step(self, executor: ThreadPoolExecutor) -> None:
        """Receive messages for a while, and begin or finish the write of a batch."""
        is_writing = self._write is not None
        messages = self._source.poll(WRITE_POLL_SECONDS if is_writing else POLL_SECONDS)
        self._received += messages
        if self._write is not None and self._write.done():
            self._finish_write(self._write)
        if self._write is None and self._received:
            self._begin_write(executor)
        num_unacknowledged = len(self._received) + len(self._written)
        self._source_metrics.update(messages, self._source.num_connections, num_unacknowledged)
        self._metrics.is_ready = self._source.is_connected
        self._metrics.record_progress()

    def _begin_write(self, executor: ThreadPoolExecutor) -> None:
        """Translate the oldest messages that have arrived, and begin to write what follows from them."""
        self._written, self._received = self._received[:MAX_WRITE_MESSAGES], self._received[MAX_WRITE_MESSAGES:]
        translation = translate_all(self._translator, self._written)
        for rejection in translation.rejections:
            self._metrics.rejected.labels(rejection.reason).inc()
        for topic, payload in translation.requests:
            self._source.publish(topic, payload)
        self._write = executor.submit(self._run_write, translation)

    def _run_write(self, translation: Translation) -> int:
        """Write a batch in the thread of the executor, and return the number of its readings."""
        started_at = time.monotonic()
        self._sink.write(translation)
        self._metrics.write.observe(time.monotonic() - started_at)
        return sum(event.num_readings for event in translation.events)

    def _finish_write(self, write: Future[int]) -> None:
        """Wait for the end of the write, and acknowledge its messages. Raise its error if it has failed."""
        self._write = None
        self._metrics.readings.inc(write.result())
        self._source.acknowledge(self._written)
        self._written = []
