"""The load test with fewer messages: in this process and through a Kafka broker, with equal accounts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deformer_stream.engine.events import RejectionReason
from tests.fuzz.million import OTHER_REASONS, assert_equal_accounts, draw_polls, run_in_process, run_through_kafka

MESSAGES = 20_000


def test_every_message_is_accepted_or_rejected(model_dir: Path) -> None:
    account = run_in_process(model_dir, draw_polls(MESSAGES, 1))
    assert account.messages == MESSAGES
    assert set(account.rejected) == {str(reason) for reason in set(RejectionReason) - OTHER_REASONS}
    assert min(account.accepted, account.absent, account.rejected.total()) > 0
    assert len(set(account.letters)) == len(account.letters)


@pytest.mark.kafka
@pytest.mark.slow
def test_kafka_run_gives_the_same_account(kafka: SimpleNamespace, topic: Callable[..., str], model_dir: Path) -> None:
    name = topic(1, **{"retention.ms": "-1"})
    account = run_in_process(model_dir, draw_polls(MESSAGES, 2))
    assert_equal_accounts(account, run_through_kafka(kafka.bootstrap, model_dir, draw_polls(MESSAGES, 2), name))
