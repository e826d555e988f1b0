"""Longest time between two polls while open records are scored again: `python -m benchmarks.model_change`.

A million readings of open records, divided among 64 partitions, are scored again by a new model. This is measured after
a change of the model of a running process, and then in a process with the new model that restores the snapshots of the
old one. New events arrive all the time. The pipeline is the real one; the source is in memory, so that no broker is
needed. It records the times of its polls. With --at-once the work is not divided, as in earlier releases.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.feed import make_model, make_quiet_calibration
from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL
from deformer_stream.runtime import pipeline as pipeline_module
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, RestoredPartition, SourceCallbacks
from deformer_stream.runtime.reload import ModelReload
from deformer_stream.runtime.timing import WallClock

MESSAGES_PER_POLL = 8192
LIVE_MESSAGES_PER_POLL = 256
"""Messages of new records in each poll while records are scored again."""

NUM_EXPECTED = 2
"""Features of which the open records have no reading, so that they stay open."""


class MemoryGroup:
    """The only member of a group with a topic in memory.

    Args:
        messages: The messages that open the records, by partition.
        restored: Saved state by partition, or None if there is none; the messages are then not sent.

    Attributes:
        poll_times: When each poll began and ended, in monotonic seconds.
    """

    has_joined = True

    def __init__(self, messages: Mapping[int, list[bytes]], restored: Mapping[int, bytes] | None = None) -> None:
        self.waiting_partitions: frozenset[int] = frozenset()
        self.assigned_partitions = frozenset(messages)
        self.poll_times: list[tuple[float, float]] = []
        self.num_live = 0
        self._restored = dict(restored or {})
        self._is_new = True
        self._payloads = [
            (partition, payload) for partition, lines in messages.items() for payload in (() if restored else lines)
        ]
        self._next_offsets = dict.fromkeys(messages, 0)

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits, and no partition is given up."""

    def set_model_fingerprint(self, fingerprint: str) -> None:
        """Do nothing: there are no other members."""

    def leave_out(self, partitions: frozenset[int]) -> None:
        """Return no messages of these partitions."""
        self.waiting_partitions = partitions

    @property
    def is_sent(self) -> bool:
        """Whether all messages that open records were returned."""
        return not self._payloads

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has ended, which it never does."""
        return False

    def poll(self, timeout: float) -> PollResult:
        """Return the next messages: those that open records, then messages of new records."""
        start = time.monotonic()
        restored: tuple[RestoredPartition, ...] = ()
        if self._is_new:
            self._is_new = False
            restored = tuple(RestoredPartition(p, 0, self._restored.get(p)) for p in sorted(self.assigned_partitions))
        rows, self._payloads = self._payloads[:MESSAGES_PER_POLL], self._payloads[MESSAGES_PER_POLL:]
        readable = sorted(self.assigned_partitions - self.waiting_partitions)
        if not rows and readable and not restored:
            for i in range(LIVE_MESSAGES_PER_POLL):
                payload = json.dumps({"record": f"live-{self.num_live}", "values": {"f0": 0.5}}).encode()
                rows.append((readable[i % len(readable)], payload))
                self.num_live += 1
        result = PollResult(self._make_messages(rows), (), restored, tuple(r.partition for r in restored))
        self.poll_times.append((start, time.monotonic()))
        return result

    def _make_messages(self, rows: list[tuple[int, bytes]]) -> Messages | None:
        """Return messages with the next offsets of their partitions."""
        if not rows:
            return None
        offsets = np.empty(len(rows), np.int64)
        for i, (partition, _) in enumerate(rows):
            offsets[i] = self._next_offsets[partition]
            self._next_offsets[partition] += 1
        partitions = np.array([partition for partition, _ in rows], np.int32)
        payloads: list[bytes | None] = [payload for _, payload in rows]
        return Messages("events", [None] * len(rows), payloads, np.full(len(rows), NO_TIME), partitions, offsets)

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Drop the states, because no other process will need them."""

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return nothing: the lag is unknown."""
        return {}

    def close(self) -> None:
        """Do nothing."""

    def find_longest_gap(self, since: float) -> float:
        """Return the longest time between the end of a poll and the start of the next one, in seconds."""
        polls = [times for times in self.poll_times if times[1] >= since]
        return max(later[0] - earlier[1] for earlier, later in pairwise(polls))


def make_model_version(options: argparse.Namespace, fingerprint: str) -> Any:
    """Return a model with random weights and its calibration, as far as the pipeline needs them."""
    model = make_model(options.preset, options.readings + NUM_EXPECTED, gaussians=0)
    return SimpleNamespace(
        scoring_model=model,
        calibration=make_quiet_calibration(),
        fingerprint=fingerprint,
        schema=model.schema,
        fault_classifier=None,
    )


def make_engine(version: Any) -> Engine:
    """Return an engine that closes no record."""
    limits = Limits(max_open_records=2**40, max_record_bytes=2**40)
    return Engine(version.scoring_model, version.calibration, version.fingerprint, 0.01, limits)


def make_pipeline(version: Any, source: MemoryGroup, take_new_model: Callable[[], Any]) -> Pipeline:
    """Return a pipeline whose engine closes no record. `take_new_model` is that of `ModelReload`."""
    codec, clock, metrics = Codec(version.schema), WallClock(), Metrics()
    return Pipeline(
        source,
        codec,
        EngineSet.of_only_model(make_engine(version)),
        [],
        clock,
        metrics,
        is_finite=False,
        open_records="rescore",
        model_reload=ModelReload(take_new_model, lambda artifact: Codec(artifact.schema), make_engine),
    )


def make_lines(options: argparse.Namespace) -> dict[int, list[bytes]]:
    """Return a message for each record, by partition."""
    rng = np.random.default_rng(0)
    lines: dict[int, list[bytes]] = {partition: [] for partition in range(options.partitions)}
    for i, values in enumerate(rng.normal(size=(options.records, options.readings)).round(3).tolist()):
        document = {"record": f"plant/device-{i}", "values": {f"f{k}": value for k, value in enumerate(values)}}
        lines[i % options.partitions].append(json.dumps(document).encode())
    return lines


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the longest time between polls and the duration of the work, for a change of the model and a restore."""
    old, new = (make_model_version(options, fingerprint) for fingerprint in ("old", "new"))
    source, stop = MemoryGroup(make_lines(options)), threading.Event()
    changed_at, done_at = math.inf, math.inf
    snapshots: dict[int, bytes] = {}

    def take_new_model() -> Any:
        """Return the new model when all records are open, and stop when they are scored again."""
        nonlocal changed_at, done_at
        if not source.is_sent or pipeline.totals.events < options.records * options.readings:
            return None
        if changed_at == math.inf:
            snapshots.update(
                {
                    p: encode_snapshot(pipeline.engines.engine_by_name[ONLY_MODEL].snapshot(p, 0))
                    for p in source.assigned_partitions
                }
            )
            source.poll_times.append((time.monotonic(), time.monotonic()))
            changed_at = time.monotonic()
            return ONLY_MODEL, new
        if not source.waiting_partitions and not pipeline.engines.partitions_to_rescore:
            done_at = min(done_at, time.monotonic())
            if time.monotonic() - done_at > 1.0:
                stop.set()
        return None

    pipeline = make_pipeline(old, source, take_new_model)
    num_live_before = source.num_live
    pipeline.run(stop)
    change = {
        "what": "change of the model",
        "longest_gap_seconds": round(source.find_longest_gap(changed_at), 3),
        "seconds": round(done_at - changed_at, 2),
        "new_events_meanwhile": source.num_live - num_live_before,
    }
    source, stop = MemoryGroup(make_lines(options), snapshots), threading.Event()
    started_at = time.monotonic()

    def stop_if_restored() -> Any:
        if pipeline.recovery.restored_partitions == source.assigned_partitions:
            stop.set()
        return None

    pipeline = make_pipeline(new, source, stop_if_restored)
    pipeline.run(stop)
    restore = {
        "what": "restore of snapshots of another model",
        "longest_gap_seconds": round(source.find_longest_gap(started_at), 3),
        "seconds": round(source.poll_times[-1][1] - started_at, 2),
        "new_events_meanwhile": source.num_live,
    }
    return [change, restore]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model_change",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--records", type=int, default=125_000, help="number of open records; 125000 by default")
    parser.add_argument("--readings", type=int, default=8, help="number of readings of each record; 8 by default")
    parser.add_argument("--partitions", type=int, default=64, help="number of partitions; 64 by default")
    parser.add_argument("--preset", default="tiny", help="preset of the hyperparameters; tiny by default")
    parser.add_argument("--at-once", action="store_true", help="do not divide the work")
    options = parser.parse_args()
    if options.at_once:
        pipeline_module.RECOVERY_SECONDS = math.inf
    setting = {
        "readings": options.records * options.readings,
        "partitions": options.partitions,
        "preset": options.preset,
        "at_once": options.at_once,
    }
    rows = measure(options)
    peak_mib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    lines = [setting | row | {"peak_mib": peak_mib} for row in rows]
    for line in lines:
        print(json.dumps(line))
    if options.at_once:
        return
    header = format_markdown_header(["open readings scored again after", "longest time between polls, s", "all, s"])
    cells = [[row["what"], f"{row['longest_gap_seconds']:.2f}", f"{row['seconds']:.1f}"] for row in rows]
    table = "\n".join([*header, *map(format_markdown_row, cells)])
    explanation = f"{setting['readings']:,} readings in {options.partitions} partitions, preset {options.preset}."
    publish_results(
        "model_change",
        f"# Change of the model\n\n{describe_machine()}, {format_today()}. {explanation}\n\n{table}\n",
        lines,
    )


if __name__ == "__main__":
    main()
