"""A source without a log in the pipeline: nothing is lost by an end at any step, and what the translator restores."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from connectors.files import StateFolder
from deformer_stream.codec import Codec, WindowAssigner, encode_alert
from deformer_stream.codec.bridge_messages import BridgeMessage, PrefixTranslator, TopicPattern, ValueTranslator
from deformer_stream.codec.payloads import Payload
from deformer_stream.codec.sparkplug import PREFIX, SparkplugTranslator
from deformer_stream.codec.validation import FieldNames
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Effects
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.bridge_metrics import SourceMetrics
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.plant_source import PlantSource, SavedEvent
from deformer_stream.runtime.ports import PartitionState
from deformer_stream.testing import ManualClock
from tests.codec.sparkplug_messages import SimulatedNode
from tests.models import draw_rows
from tests.runtime.pipelines import make_engine

SECOND = 1_000_000
START = 1_600_000_000
NUM_DEVICES, NUM_RECORDS = 3, 60
STEPS = ("poll", "write", "flush", "save", "saved", "acknowledge", "acknowledged")


class KilledError(Exception):
    """The simulated end of the process."""


@dataclass
class PlantBroker:
    """What survives the end of a process: messages without acknowledgement, and the alerts that were published.

    Attributes:
        messages: The messages that were published, in order.
        num_acknowledged: How many of them are acknowledged.
        num_delivered: How many of them have been delivered at least once.
        alerts: The published alerts.
        rejected: Reasons of the rejections, in order.
        requests: Topics and payloads that the source has published.
    """

    messages: list[tuple[str, bytes]]
    num_acknowledged: int = 0
    num_delivered: int = 0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    requests: list[tuple[str, bytes]] = field(default_factory=list)


class Countdown:
    """Raises `KilledError` when a step is reached for the n-th time.

    Args:
        step: The step, "" for none.
        num_calls: How often the step is completed before.
    """

    def __init__(self, step: str = "", num_calls: int = 0) -> None:
        self._step, self._left = step, num_calls

    def reach(self, step: str) -> None:
        """Raise the error if it is time."""
        if step == self._step:
            if self._left == 0:
                raise KilledError(step)
            self._left -= 1


class Connection:
    """A connection to the broker, a `BridgeSource`. It delivers what is not acknowledged, a few messages a poll."""

    is_connected, num_connections = True, 1

    def __init__(self, broker: PlantBroker, countdown: Countdown, stop: threading.Event, chunk: int = 7) -> None:
        self._broker, self._countdown, self._stop, self._chunk = broker, countdown, stop, chunk
        self._next = broker.num_acknowledged

    def poll(self, timeout: float) -> Sequence[BridgeMessage]:
        self._countdown.reach("poll")
        broker = self._broker
        end = min(self._next + self._chunk, len(broker.messages))
        polled = [
            BridgeMessage(*broker.messages[place], START * SECOND + place, place < broker.num_delivered)
            for place in range(self._next, end)
        ]
        self._next, broker.num_delivered = end, max(broker.num_delivered, end)
        if not polled:
            self._stop.set()
        return polled

    def acknowledge(self, messages: Sequence[BridgeMessage]) -> None:
        self._countdown.reach("acknowledge")
        self._broker.num_acknowledged += len(messages)
        self._countdown.reach("acknowledged")

    def publish(self, topic: str, payload: bytes) -> None:
        self._broker.requests.append((topic, payload))

    def close(self) -> None: ...


class CrashingFolder(StateFolder):
    """A folder of states that may crash before and after a commit is saved."""

    countdown = Countdown()

    def save(
        self,
        next_offset: int,
        events: list[SavedEvent],
        state: PartitionState,
        translator_states: Mapping[str, bytes],
    ) -> None:
        self.countdown.reach("save")
        super().save(next_offset, events, state, translator_states)
        self.countdown.reach("saved")


class PublishingSink:
    """A sink whose alerts are published when it is flushed."""

    def __init__(self, broker: PlantBroker, countdown: Countdown) -> None:
        self._broker, self._countdown = broker, countdown
        self._pending: list[dict[str, Any]] = []

    def write(self, effects: Effects, data: Payload | None) -> None:
        self._countdown.reach("write")
        self._pending += [json.loads(encode_alert(alert, data)) for alert in effects.alerts]
        self._broker.rejected += [rejection.reason.value for rejection in effects.rejections]

    def flush(self) -> None:
        self._broker.alerts += self._pending
        self._pending = []
        self._countdown.reach("flush")

    def close(self) -> None: ...


def run_once(
    loaded: Artifact, broker: PlantBroker, folder: Path, countdown: Countdown | None = None, interval: float = 0.0
) -> Metrics:
    """Run the pipeline until all messages are handled, or to its simulated end."""
    countdown, stop, metrics = countdown or Countdown(), threading.Event(), Metrics()
    values, sparkplug = ValueTranslator(TopicPattern("plant/{device}/{feature}"), FieldNames()), SparkplugTranslator()
    store = CrashingFolder(folder)
    store.countdown = countdown
    try:
        source = PlantSource(
            Connection(broker, countdown, stop),
            PrefixTranslator({PREFIX: sparkplug}, values),
            sparkplug,
            store,
            "plant/#",
            SourceMetrics(metrics, sparkplug),
        )
        Pipeline(
            source,
            Codec(loaded.schema, window_assigner=WindowAssigner(10 * SECOND)),
            EngineSet.of_only_model(make_engine(loaded, record_timeout=3600 * SECOND)),
            [PublishingSink(broker, countdown)],
            ManualClock(),
            metrics,
            is_finite=False,
            commit_interval=interval,
            snapshot_interval=interval,
        ).run(stop)
    finally:
        store.close()
    return metrics


def make_messages(loaded: Artifact) -> list[tuple[str, bytes]]:
    """Return readings of several devices in windows of ten seconds, and messages that are refused."""
    messages = []
    for index, row in enumerate(draw_rows(loaded.schema, NUM_RECORDS, 3)):
        moment = START + 10 * (index // NUM_DEVICES) + 0.5
        for name, value in row.items():
            payload = json.dumps({"value": value, "time": moment}).encode()
            messages.append((f"plant/pump-{index % NUM_DEVICES}/{name}", payload))
        if index % 11 == 5:
            messages += [("plant/alone", b"1"), (f"plant/pump-{index % NUM_DEVICES}/unheard-of", b"1")]
    return messages


def collect(broker: PlantBroker) -> dict[str, dict[str, Any]]:
    """Return the alerts by id, without what may differ if they are repeated."""
    return {
        alert["id"]: {key: alert[key] for key in ("record", "alpha", "raised_at", "features_seen") if key in alert}
        for alert in broker.alerts
    }


def test_all_messages_are_scored_and_acknowledged(loaded: Artifact, tmp_path: Path) -> None:
    broker = PlantBroker(make_messages(loaded))
    metrics = run_once(loaded, broker, tmp_path)
    assert broker.num_acknowledged == len(broker.messages)
    num_refused = sum(topic == "plant/alone" or topic.endswith("unheard-of") for topic, _ in broker.messages)
    assert sorted(broker.rejected) == ["unknown_feature"] * (num_refused // 2) + ["unknown_topic"] * (num_refused // 2)
    get = metrics.registry.get_sample_value
    assert get("deformer_events_total") == len(broker.messages) - num_refused
    assert get("deformer_bridge_messages_total") == len(broker.messages)
    assert get("deformer_bridge_unacknowledged_messages") == 0
    assert len(collect(broker)) == len(broker.alerts) > 3
    assert {alert["source"]["topic"] for alert in broker.alerts} == {"plant/#"}
    # A restart has nothing to do, and publishes nothing again.
    run_once(loaded, broker, tmp_path)
    assert len(collect(broker)) == len(broker.alerts)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_an_end_at_any_step_loses_no_alert(loaded: Artifact, tmp_path: Path, step: str, interval: float) -> None:
    """Messages come again, and their readings are refused if they were saved."""
    whole = PlantBroker(make_messages(loaded))
    run_once(loaded, whole, tmp_path / "whole")
    broker, num_kills = PlantBroker(whole.messages), 0
    for num_calls in (0, 1, 2, 5):
        try:
            run_once(loaded, broker, tmp_path / "killed", Countdown(step, num_calls), interval)
        except KilledError:
            num_kills += 1
    run_once(loaded, broker, tmp_path / "killed")
    assert num_kills >= (4 if interval == 0.0 else 1)
    assert broker.num_acknowledged == len(broker.messages)
    assert collect(broker) == collect(whole)


def test_nothing_is_acknowledged_before_it_is_saved(loaded: Artifact, tmp_path: Path) -> None:
    broker = PlantBroker(make_messages(loaded))
    with pytest.raises(KilledError):
        run_once(loaded, broker, tmp_path, Countdown("save", 1))  # the first commit saves a state without events
    assert broker.num_delivered == 7
    assert broker.num_acknowledged == 0
    with pytest.raises(KilledError):
        run_once(loaded, broker, tmp_path, Countdown("saved", 0))
    assert broker.num_acknowledged == 0
    run_once(loaded, broker, tmp_path)
    # The readings that were saved are refused. The first record has six of them and is closed, the second one is open.
    assert sorted(broker.rejected[:7]) == ["duplicate", *["late"] * 6]


def test_births_of_sparkplug_survive_a_restart(loaded: Artifact, tmp_path: Path) -> None:
    """Data by alias are read after a restart, also after an end at which their birth was not acknowledged."""
    node = SimulatedNode()
    broker = PlantBroker([node.birth({"temperature": 20.0, "pressure": 1.0}, 1000 * START)])
    with pytest.raises(KilledError):
        run_once(loaded, broker, tmp_path, Countdown("saved", 1))
    assert (broker.num_delivered, broker.num_acknowledged) == (1, 0)
    broker.messages.append(node.data({"temperature": 21.0}, 1000 * START + 10_000))
    run_once(loaded, broker, tmp_path)
    broker.messages.append(node.data({"pressure": 1.2}, 1000 * START + 10_000))
    metrics = run_once(loaded, broker, tmp_path)
    assert broker.requests == []
    assert set(broker.rejected) == {"duplicate"}
    get = metrics.registry.get_sample_value
    assert get("deformer_sparkplug_nodes_online") == 1
    assert get("deformer_events_total") == 1
    # A message is lost while no process runs: the gap is noticed by the sequence number that was saved.
    node.data({"temperature": 0.0})
    broker.messages.append(node.data({"temperature": 22.0}, 1000 * START + 20_000))
    metrics = run_once(loaded, broker, tmp_path)
    assert [topic for topic, _ in broker.requests] == ["spBv1.0/plant/NCMD/line-1"]
    assert broker.rejected[-1] == "unknown_alias"
    assert metrics.registry.get_sample_value("deformer_sparkplug_gaps_total") == 1


def test_messages_that_give_no_event_are_acknowledged(loaded: Artifact, tmp_path: Path) -> None:
    node = SimulatedNode()
    broker = PlantBroker([node.birth({"temperature": 20.0}), node.death(), ("spBv1.0/STATE/host", b"{}")])
    run_once(loaded, broker, tmp_path)
    assert broker.num_acknowledged == 3
    assert broker.rejected == []
