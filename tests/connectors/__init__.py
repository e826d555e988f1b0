"""Tests of the connectors. The tests of Kafka need a real broker, which the fixture `kafka` starts."""

import pytest

pytest.register_assert_rewrite("tests.connectors.kafka_groups")
