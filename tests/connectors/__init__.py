"""Tests of the connectors, on the real systems."""

import pytest

pytest.register_assert_rewrite("tests.connectors.kafka_members")
