"""A watch over the source: a partition that stops delivering, or a broker that is gone, must not be a silent idle."""

from __future__ import annotations

import time

import kafka.errors as errors
from kafka import KafkaConsumer, TopicPartition

from connectors.kafka.client import translate
from deformer_stream import log
from deformer_stream.errors import ConfigError, Unavailable

PROBE_SECONDS = 10.0
ANSWER_SECONDS = 2.0


class Watch:
    """Asks the broker now and then for the ends of partitions that have not moved.

    patience: seconds without an answer, or without a message though there are some, after which Unavailable is raised.
    """

    def __init__(self, consumer: KafkaConsumer, bootstrap_servers: str, patience: float) -> None:
        self._consumer, self._servers, self._patience = consumer, bootstrap_servers, patience
        self._probed = self._answered = time.monotonic()
        self._seen: dict[TopicPartition, tuple[int, float]] = {}  # position and since when

    def look(self) -> None:
        """Called with every poll. Raises Unavailable when the patience is over, ConfigError where asking is refused."""
        now = time.monotonic()
        if now - self._probed < PROBE_SECONDS:
            return
        self._probed = now
        resting = [tp for tp in self._consumer.assignment() - self._consumer.paused() if not self._moved(tp, now)]
        if not resting:
            self._answered = now
            return
        try:
            ends = self._consumer.end_offsets(resting, timeout_ms=ANSWER_SECONDS * 1000)
        except errors.KafkaError as error:
            ours = translate(error, self._servers, "asking for the ends of partitions")
            if isinstance(ours, ConfigError):
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
            if ends[tp] > position and now - since > self._patience:
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
