"""Test of the admin client of librdkafka after a restart of a broker, when partitions have other leader epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from connectors.kafka.librdkafka_admin import LibrdkafkaAdmin
from connectors.kafka.ports import TopicPartition
from deformer_stream.errors import Unavailable
from tests.connectors.kafka_helpers import Topic

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize("code", [KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH])
def test_a_client_with_outdated_metadata_is_replaced(kafka: SimpleNamespace, topic: Topic, code: int) -> None:
    admin, tp = LibrdkafkaAdmin(kafka.cluster), TopicPartition(topic(1), 0)

    def fail(*_: Any, **options: Any) -> Any:
        raise KafkaException(KafkaError(code))

    outdated = admin._client = SimpleNamespace(list_offsets=fail)
    with pytest.raises(Unavailable, match="requesting the offsets"):
        admin.fetch_log_ends([tp], timeout=10.0)
    assert admin._client is not outdated
    assert admin.fetch_log_ends([tp], timeout=10.0) == {tp: 0}
    admin.close()
