"""A small million: hostile messages at full rate, in this process and through a real Kafka, with the same books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deformer_stream.engine.events import RejectionReason
from tests.fuzz.million import agree, in_process, polls, through_kafka

MESSAGES = 20_000


def test_accepted_and_refused_are_all_that_was_sent(model_dir: Path) -> None:
    books = in_process(model_dir, polls(MESSAGES, 1))
    assert books.messages == MESSAGES
    assert set(books.refused) == {str(reason) for reason in RejectionReason}
    assert min(books.accepted, books.absent, books.refused.total()) > 0
    assert len(set(books.letters)) == len(books.letters)


@pytest.mark.kafka
@pytest.mark.slow
def test_through_kafka_the_books_are_the_same(
    kafka: SimpleNamespace, topic: Callable[..., str], model_dir: Path
) -> None:
    name = topic(1, **{"retention.ms": "-1"})
    books = in_process(model_dir, polls(MESSAGES, 2))
    agree(books, through_kafka(kafka.bootstrap, model_dir, polls(MESSAGES, 2), name))
