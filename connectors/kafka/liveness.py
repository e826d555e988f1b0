"""A watch over the source: a partition that stops delivering, or a broker that is gone, must not be a silent idle."""

from __future__ import annotations

import time

import kafka.errors as errors
from kafka import KafkaConsumer, TopicPartition

from connectors.kafka.client import translate
from deformer_stream import log
from deformer_stream.errors import Unavailable

PROBE_SECONDS = 10.0
ANSWER_SECONDS = 2.0


class LivenessCheck:
    """Asks the broker now and then for the ends of partitions that have not moved.

    topic: its first partition is asked for by who reads none. patience: seconds without an answer, or without a message
    though there are some, after which Unavailable is raised.
    """

    def __init__(self, consumer: KafkaConsumer, bootstrap_servers: str, topic: str, patience: float) -> None:
        self._consumer, self._servers, self._patience = consumer, bootstrap_servers, patience
        self._first = TopicPartition(topic, 0)
        self._failing: float | None = None  # since when every poll has failed
        self._warned = -PROBE_SECONDS
        self._probed = self._answered = time.monotonic()
        self._seen: dict[TopicPartition, tuple[int, float]] = {}  # position and since when it is behind

    def record_failure(self, error: Exception) -> None:
        """A poll has failed. Raises our error where waiting does not help, or the patience is over."""
        now = time.monotonic()
        ours = translate(error, self._servers, f"reading topic {self._first.topic!r}")
        if not isinstance(ours, Unavailable):
            raise ours from error
        self._failing = self._failing or now
        if now - self._failing > self._patience:
            raise ours from error
        if now - self._warned >= PROBE_SECONDS:
            self._warned = now
            log.get("kafka").warning("reading failed, will be tried again", error=type(error).__name__)

    def record_success(self) -> None:
        """A poll has not failed; whether it brought something is looked at by `look`."""
        self._failing = None

    def check_progress(self) -> None:
        """Called with every poll. Raises Unavailable when the patience is over, ConfigError where asking is refused."""
        now = time.monotonic()
        if now - self._probed < PROBE_SECONDS:
            return
        self._probed = now
        reading = self._consumer.assignment() - self._consumer.paused()
        self._seen = {tp: seen for tp, seen in self._seen.items() if tp in reading}
        resting = [tp for tp in reading if not self._moved(tp, now)]
        asked = resting if reading else [self._first]
        if not asked:
            self._answered = now
            return
        try:
            ends = self._consumer.end_offsets(asked, timeout_ms=ANSWER_SECONDS * 1000)
        except errors.KafkaError as error:
            ours = translate(error, self._servers, "asking for the ends of partitions")
            if not isinstance(ours, Unavailable):
                raise ours from error
            if now - self._answered > self._patience:
                raise Unavailable(
                    f"Kafka at {self._servers} has not answered for {now - self._answered:.0f} s: look at the brokers"
                ) from error
            log.get("kafka").warning("the broker does not answer", since_seconds=round(now - self._answered))
            return
        self._answered = now
        for tp in resting:
            position, since = self._seen[tp]
            if ends[tp] <= position:
                self._seen[tp] = position, now
            elif now - since > self._patience:
                raise Unavailable(
                    f"topic {tp.topic!r}, partition {tp.partition} delivers nothing from offset {position} on, though "
                    f"it ends at {ends[tp]}: look at the brokers"
                )

    def _moved(self, tp: TopicPartition, now: float) -> bool:
        """Whether the partition's position is another than at the last look."""
        position = self._consumer.position(tp, timeout_ms=0)
        seen = self._seen.get(tp)
        if seen is None or position is None or seen[0] != position:
            self._seen[tp] = (-1 if position is None else int(position), now)
            return True
        return False
