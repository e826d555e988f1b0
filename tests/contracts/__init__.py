"""Contract suites: one set of tests for every source, one for every sink."""

import pytest

pytest.register_assert_rewrite("tests.contracts.sources", "tests.contracts.sinks")
