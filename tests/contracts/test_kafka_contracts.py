"""The contracts, for the Kafka source and the Kafka sinks."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from kafka import KafkaConsumer, TopicPartition

from connectors.kafka import Delivery, KafkaEvidenceSink, KafkaSource, describe_evidence_topic, ensure_topics, produce
from deformer_stream.codec import encode_alert
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import Effects
from deformer_stream.incidents.make_evidence import make_evidence
from tests.connectors.kafka_helpers import make_sink, open_plain_source
from tests.contracts.sinks import SinkContract, SinkUnderTest
from tests.contracts.sources import Reading, SourceContract, SourceUnderTest

pytestmark = pytest.mark.kafka

Topic = Callable[..., str]


class TestKafkaSource(SourceContract):
    @pytest.fixture
    def feed(self, kafka: SimpleNamespace, topic: Topic) -> SourceUnderTest:
        name, group = topic(3), uuid.uuid4().hex

        def publish(readings: list[Reading]) -> None:
            documents = [{"record": r, "feature": f, "value": v} for r, f, v in readings]
            produce(kafka.cluster, name, [(d["record"].encode(), orjson.dumps(d), None) for d in documents])

        def open_() -> KafkaSource:
            return open_plain_source(kafka.cluster, name, group, max_poll_records=7)

        return SourceUnderTest(publish, open_, is_finite=False, has_offsets=True)


class PublicEncoder:
    """Encodes alerts as `Codec` does, without a model."""

    encode_alert = staticmethod(encode_alert)


def read_topic(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Return key and value of all messages of a topic with one partition."""
    reader = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=30_000)
    partition = TopicPartition(topic, 0)
    reader.assign([partition])
    end = reader.end_offsets([partition])[partition]
    found = [(message.key, message.value) for message in itertools.islice(reader, end)]
    reader.close()
    return found


class TestKafkaAlerts(SinkContract):
    @pytest.fixture
    def drain(self, kafka: SimpleNamespace, topic: Topic) -> SinkUnderTest:
        name = topic(1)

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            return [(alert.record.encode(), encode_alert(alert, data)) for alert in effects.alerts]

        return SinkUnderTest(
            lambda: make_sink(kafka.cluster, name, None, PublicEncoder()),
            lambda: read_topic(kafka.bootstrap, name),
            expected,
            all_or_nothing=True,
        )


class FlushingEvidenceSink(KafkaEvidenceSink):
    """A sink without a source. Its `flush` sends what was written, as the source's commit would."""

    def flush(self) -> None:
        """Send all messages without committing offsets."""
        self._delivery.seal_pending()
        self._delivery.send([])
        self._delivery.mark_committed()

    def close(self) -> None:
        """Close the producer, as the sink of alerts would."""
        self._delivery.close()


class TestKafkaEvidence(SinkContract):
    @pytest.fixture
    def drain(self, kafka: SimpleNamespace) -> SinkUnderTest:
        name = f"evidence-{uuid.uuid4().hex[:8]}"
        limits = ensure_topics(kafka.cluster, describe_evidence_topic(name))

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            return [(None, encode_evidence(batch)) for batch in make_evidence(effects)[0]]

        return SinkUnderTest(
            lambda: FlushingEvidenceSink(name, Delivery(kafka.cluster, limits), "events"),
            lambda: read_topic(kafka.bootstrap, name),
            expected,
            all_or_nothing=True,
        )


class TestKafkaDeadLetters(SinkContract):
    @pytest.fixture
    def drain(self, kafka: SimpleNamespace, topic: Topic) -> SinkUnderTest:
        name = topic(1)

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            if not isinstance(data, Messages):
                return []
            return [(data.keys[r.message_index], data.payloads[r.message_index] or b"") for r in effects.rejections]

        return SinkUnderTest(
            lambda: make_sink(kafka.cluster, None, name, PublicEncoder()),
            lambda: read_topic(kafka.bootstrap, name),
            expected,
            all_or_nothing=True,
        )
