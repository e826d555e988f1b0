"""Tests of a producer that is replaced while a request ignores its time limit, with producers in memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from connectors.kafka import Delivery, KafkaCluster
from deformer_stream.errors import Unavailable


class HangingProducers:
    """Producers of which all but the first wait until the test lets them connect, or begin transactions.

    Attributes:
        may_connect: Set by the test.
        may_open_transactions: Set, unless the test clears it.
        calls: What was called, in order.
    """

    def __init__(self) -> None:
        self.may_connect, self.may_open_transactions = threading.Event(), threading.Event()
        self.may_open_transactions.set()
        self.calls: list[str] = []

    def open_producer(self, *_: object, **__: object) -> SimpleNamespace:
        """Return a producer."""
        number = self.calls.count("open")
        self.calls.append("open")
        if number:
            assert self.may_connect.wait(30.0)

        def open_transactions(timeout: float) -> None:
            self.calls.append(f"transactions {number}")
            assert self.may_open_transactions.wait(30.0)

        return SimpleNamespace(open_transactions=open_transactions, close=lambda: self.calls.append(f"close {number}"))


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> HangingProducers:
    """Return producers that a `Delivery` opens."""
    producers = HangingProducers()
    monkeypatch.setattr("connectors.kafka.delivery.load_client", lambda cluster: producers)
    monkeypatch.setattr("connectors.kafka.delivery.MAX_OPENING_SECONDS", 0.01)
    return producers


def test_only_one_producer_is_opened_at_a_time(producers: HangingProducers) -> None:
    """A second one would fence the first one, which uses the same transactional id."""
    delivery = Delivery(KafkaCluster("fake:1"), {"alerts": 1000}, "id")
    for _ in range(3):
        with pytest.raises(Unavailable, match="did not respond within"):
            delivery.renew_producer()
    producers.may_connect.set()
    while delivery._opening is not None:
        try:
            delivery.renew_producer()
        except Unavailable:
            continue
    assert producers.calls == ["open", "transactions 0", "close 0", "open", "transactions 1"]
    assert not delivery.has_failed
    delivery.close()
    assert producers.calls[-1] == "close 1"


def test_producer_that_connects_after_the_delivery_was_closed_fences_nobody(producers: HangingProducers) -> None:
    delivery = Delivery(KafkaCluster("fake:1"), {"alerts": 1000}, "id")
    with pytest.raises(Unavailable):
        delivery.renew_producer()
    opening = delivery._opening
    assert opening is not None
    delivery.close()
    producers.may_connect.set()
    assert opening.wait(30.0)
    assert producers.calls == ["open", "transactions 0", "close 0", "open", "close 1"]


def test_producer_that_opens_transactions_while_the_delivery_is_closed_is_closed(producers: HangingProducers) -> None:
    delivery = Delivery(KafkaCluster("fake:1"), {"alerts": 1000}, "id")
    producers.may_open_transactions.clear()
    producers.may_connect.set()
    while "transactions 1" not in producers.calls:
        with pytest.raises(Unavailable):
            delivery.renew_producer()
    opening = delivery._opening
    assert opening is not None
    delivery.close()
    producers.may_open_transactions.set()
    assert opening.wait(30.0)
    assert producers.calls[-2:] == ["transactions 1", "close 1"]
