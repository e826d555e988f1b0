"""The attributes of kafka-python that are not public: with which versions they are used.

What happens with another version when partitions are added is tested with a real broker in
`tests/contracts/test_kafka_clients.py`.
"""

from __future__ import annotations

import re
from unittest.mock import Mock

from connectors.kafka.compat import CHECKED_VERSIONS, drop_kept_messages, request_rejoin
from tests.conftest import ROOT


def test_the_version_of_the_constraints_is_one_that_was_checked() -> None:
    (version,) = re.findall(r"^kafka-python==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version in CHECKED_VERSIONS


def test_a_checked_version_is_asked_to_join_again() -> None:
    consumer = Mock()
    assert request_rejoin(consumer, "3.0.12")
    consumer._coordinator.request_rejoin.assert_called_once_with()


def test_another_version_is_left_alone() -> None:
    consumer = Mock(spec=[])  # any attribute would raise AttributeError
    assert not request_rejoin(consumer, "3.0.13")
    assert not request_rejoin(consumer, "3.1.0")
    drop_kept_messages(consumer, "3.0.13")


def test_only_messages_of_partitions_that_are_not_paused_are_dropped() -> None:
    consumer = Mock()
    consumer._fetcher._paused_partition_records = {"first": Mock(), "second": Mock()}
    consumer.paused.return_value = {"second", "third"}
    drop_kept_messages(consumer, "3.0.12")
    assert set(consumer._fetcher._paused_partition_records) == {"second"}
