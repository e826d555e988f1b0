"""Whether a pipeline is ready and whether it is behind, for each kind of source."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.incident_pipeline import IncidentPipeline
from deformer_stream.runtime.ports import PollResult, RestoredPartition
from deformer_stream.runtime.source_status import is_behind, is_ready
from tests.runtime.pipelines import ScriptedSource


class ConnectingSource(ScriptedSource):
    """A source that can lose its connection."""

    is_connected = True


def make_source(assigned: set[int], has_joined: bool = True) -> ConnectingSource:
    source = ConnectingSource([])
    source.assigned_partitions, source.has_joined = frozenset(assigned), has_joined
    return source


def test_source_without_partitions_is_ready_and_never_behind() -> None:
    assert is_ready(None, set())
    assert not is_behind(None, 0)


def test_source_is_ready_if_all_assigned_partitions_are_restored() -> None:
    source = make_source({0, 1})
    assert not is_ready(source, {0})
    assert is_ready(source, {0, 1, 2})


@pytest.mark.parametrize("has_joined", [False, True])
def test_member_without_partitions_is_ready_once_it_has_joined(has_joined: bool) -> None:
    assert is_ready(make_source(set(), has_joined), set()) == has_joined


def test_source_without_a_connection_is_not_ready() -> None:
    source = make_source({0})
    source.is_connected = False
    assert not is_ready(source, {0})


@pytest.mark.parametrize(("num_unread", "expected"), [(9, False), (10, False), (11, True)])
def test_pipeline_is_behind_if_more_messages_are_unread(num_unread: int, expected: bool) -> None:
    source = make_source({0})
    source.get_lag = lambda: {("events", 0): num_unread - 4, ("events", 1): 4}  # type: ignore[method-assign]
    assert is_behind(source, 10) == expected


def test_process_that_makes_incidents_is_not_ready_while_its_source_has_no_connection() -> None:
    metrics, stop, seen = DetectionMetrics(), threading.Event(), list[bool]()
    source = make_source({0})

    def turn(is_connected: bool, result: PollResult) -> Callable[[], PollResult]:
        """Return a poll that sets whether the source is connected, and notes the readiness of the turn before."""

        def poll() -> PollResult:
            seen.append(metrics.is_ready)
            source.is_connected = is_connected
            if not source.turns:
                stop.set()
            return result

        return poll

    restored = PollResult(None, restored_partitions=(RestoredPartition(0, 0),), caught_up_partitions=(0,))
    source.turns = [turn(True, restored), turn(False, PollResult(None)), turn(True, PollResult(None))]
    writer = None  # no incident is written
    IncidentPipeline(source, writer, {}, None, metrics, lambda partition: iter(())).run(stop)  # type: ignore[arg-type]
    assert [*seen, metrics.is_ready] == [False, True, False, True]
