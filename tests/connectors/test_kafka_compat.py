"""The attribute of kafka-python that is not public: its use, and what happens with another version."""

from __future__ import annotations

from unittest.mock import Mock

import kafka

from connectors.kafka.compat import request_rejoin


def test_the_installed_version_is_one_that_was_checked() -> None:
    assert request_rejoin(Mock(), kafka.__version__)


def test_a_checked_version_is_asked_to_join_again() -> None:
    consumer = Mock()
    assert request_rejoin(consumer, "3.0.12")
    consumer._coordinator.request_rejoin.assert_called_once_with()


def test_another_version_is_left_alone() -> None:
    consumer = Mock(spec=[])  # any attribute would raise AttributeError
    assert not request_rejoin(consumer, "3.1.0")
