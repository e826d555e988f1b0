"""Tests of what sinks send to Kafka, with a producer in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from connectors.kafka import Delivery, KafkaCluster, KafkaSink
from connectors.kafka.bridge_sink import KafkaBridgeSink
from connectors.kafka.ports import OutgoingMessage
from deformer_stream.codec.bridge_messages import BridgeMessage, BridgeRejection, Translation, TranslationOptions
from deformer_stream.engine.events import RejectionReason, StormNotice
from tests.connectors.kafka_helpers import FakeAlertEncoder, make_alert, make_effects


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[OutgoingMessage]:
    """Return a list to which every producer adds what it sends."""
    sent: list[OutgoingMessage] = []

    def send(messages: Sequence[OutgoingMessage], timeout: float) -> list[int]:
        sent.extend(messages)
        return list(range(len(messages)))

    producer = SimpleNamespace(send=send, close=lambda: None)
    for module in ("delivery", "bridge_sink"):
        monkeypatch.setattr(
            f"connectors.kafka.{module}.load_client",
            lambda cluster: SimpleNamespace(open_producer=lambda *_, **__: producer),
        )
    return sent


def test_a_storm_notice_is_sent_although_one_of_its_partitions_has_moved(sent: list[OutgoingMessage]) -> None:
    """It counts alerts of other partitions, too, which no other process counts."""
    delivery = Delivery(KafkaCluster("fake:1"), {"alerts": 10_000})
    sink = KafkaSink("alerts", None, FakeAlertEncoder(), delivery)
    notice = StormNotice("storm-id", 0, 1_583_750_073_000_000, {0: 5, 2: 7}, ("pump-9",), 1000.0, "m")
    sink.write(replace(make_effects([make_alert("pump-1")], []), storm_notices=[notice]), None)
    delivery.drop_partitions([0])
    delivery.seal_pending()
    delivery.send([])
    assert [message.key for message in sent] == [b"pump-9"]
    assert dict(sent[0].headers)["ce_source"] == b"/events/0"


def test_dead_letters_of_the_bridge_have_ids_of_their_own(sent: list[OutgoingMessage]) -> None:
    """The same message can come twice at the same time, and a message can be rejected twice for one reason."""
    cluster, limits = KafkaCluster("fake:1"), {"events": 10_000, "letters": 10_000}
    sink = KafkaBridgeSink(cluster, "events", "letters", None, limits, "mqtt://plant", 1.0, TranslationOptions())
    message = BridgeMessage("plant/flow", b"{", 1_583_750_073_000_000)
    rejection = BridgeRejection(message, RejectionReason.NOT_JSON, "unexpected end")
    sink.write(Translation(rejections=[rejection, rejection]))
    ids = [dict(message.headers)["ce_id"] for message in sent]
    assert len(ids) == len(set(ids)) == 2
