"""The simulated pumps in continuous operation: faults that begin, last for a while and end, and readings in real time.

`simulate` draws records that are independent of each other. Here each pump takes the records of its own state, normal
or with one kind of fault. So a fault affects all records of a pump for some minutes.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import orjson

from deformer_stream.codec.payloads import Messages
from deformer_stream.demo.simulate import FEATURES, INTERVAL, MAX_DELAY, simulate
from deformer_stream.engine.events import NO_TIME
from deformer_stream.runtime.ports import PollResult, SourceCallbacks

NUM_PUMPS = 12
POOL_RECORDS = 6_000
"""Number of records that are simulated at once, half of them with a fault."""
MICROS = 1_000_000


@dataclass(frozen=True, slots=True)
class FaultPeriod:
    """A fault of one pump.

    Attributes:
        pump: Index of the pump, from 0.
        fault: Kind of the fault, a key of `simulate.MEANING_BY_FAULT`.
        start: Beginning, in seconds from the start of live operation. Negative times are in the past.
        end: End, in seconds from the start of live operation.
    """

    pump: int
    fault: str
    start: float
    end: float


FAULT_PERIODS = (
    FaultPeriod(4, "bearing wear", -880, -790),
    FaultPeriod(1, "blocked discharge", -760, -690),
    FaultPeriod(6, "phase imbalance", 0, 150),
    FaultPeriod(2, "swapped sensors", 20, 400),
    *(FaultPeriod(pump, "cavitation", 55 + 3 * i, 330) for i, pump in enumerate((8, 9, 10, 11))),
)
"""The faults of the first minutes: two that are over, then a single one, a lasting one, and one of four pumps."""

LATER_FAULTS = ("blocked discharge", "bearing wear", "cavitation", "swapped sensors")
"""Kinds of the faults after those, one at a time, and too rare for a fleet incident."""
LATER_START, LATER_PERIOD, LATER_DURATION = 720.0, 360.0, 150.0


def find_fault(pump: int, seconds: float) -> str:
    """Return the fault that a pump has at a time, "" if it has none.

    Args:
        pump: Index of the pump.
        seconds: The time, in seconds from the start of live operation.
    """
    for period in FAULT_PERIODS:
        if period.pump == pump and period.start <= seconds < period.end:
            return period.fault
    number, elapsed = divmod(seconds - LATER_START, LATER_PERIOD)
    if number < 0 or elapsed >= LATER_DURATION or pump != (5 * int(number) + 3) % NUM_PUMPS:
        return ""
    return LATER_FAULTS[int(number) % len(LATER_FAULTS)]


class _RecordPool:
    """Simulated records by pump and fault, from which the operation takes one after the other.

    Args:
        seed: Seed of the records.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rows_by_state: dict[tuple[int, str], list[tuple[list[float | str | None], list[float]]]] = {}

    def take(self, pump: int, fault: str) -> tuple[list[float | str | None], list[float]]:
        """Return the values of a record, None for readings that never arrive, and the delays of its readings."""
        while not self._rows_by_state.get((pump, fault)):
            self._refill()
        return self._rows_by_state[pump, fault].pop()

    def _refill(self) -> None:
        """Simulate further records."""
        fleet = simulate(POOL_RECORDS, self._seed, fault_share=0.5, num_pumps=NUM_PUMPS)
        self._seed += 2  # odd seeds are for streamed records, even ones for training records
        columns = [fleet.table.column(name).to_pylist() for name in FEATURES]
        records, faults = fleet.table.column("record").to_pylist(), fleet.table.column("fault").to_pylist()
        for row, (record, fault) in enumerate(zip(records, faults, strict=True)):
            state = int(record[5:7]) - 1, fault  # a record id is pump-07/000412
            values = [column[row] for column in columns]
            self._rows_by_state.setdefault(state, []).append((values, fleet.delays[row].tolist()))


def iterate_operation(start: int, history_seconds: float, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield the arrival time and the message of each reading, in order of arrival, without end.

    Args:
        start: Start of live operation, microseconds since 1970.
        history_seconds: Seconds of operation before it that are yielded, too.
        seed: Seed of the records, an odd number.
    """
    rng = np.random.default_rng([seed, 7])
    pool = _RecordPool(seed)
    num_records_by_pump = [0] * NUM_PUMPS
    waiting: list[tuple[int, int, bytes]] = []  # (arrival, number, message), a heap
    number = 0
    step = round(INTERVAL * MICROS)
    measured_at = start - round(history_seconds * MICROS)
    while True:
        pump = int(rng.integers(NUM_PUMPS))
        record = f"pump-{pump + 1:02d}/{num_records_by_pump[pump]:06d}"
        num_records_by_pump[pump] += 1
        values, delays = pool.take(pump, find_fault(pump, (measured_at - start) / MICROS))
        for feature, value, delay in zip(FEATURES, values, delays, strict=True):
            if value is None:
                continue
            arrival = measured_at + round(delay * MICROS)
            event = {"record": record, "feature": feature, "value": value, "time": arrival / MICROS}
            heapq.heappush(waiting, (arrival, number, orjson.dumps(event)))
            number += 1
        measured_at += step
        while waiting and waiting[0][0] < measured_at:
            arrival, _, message = heapq.heappop(waiting)
            yield arrival, message


class RealTimeSource:
    """A source that gives the pipeline each message when its time has come. It ends when `stop` is set.

    Args:
        messages: The messages with their times in microseconds since 1970, in order of time.
        stop: Set from outside to end the stream.
        chunk: Largest number of messages that a poll returns.
        now: Returns the present time, microseconds since 1970.
    """

    def __init__(
        self,
        messages: Iterator[tuple[int, bytes]],
        stop: threading.Event,
        chunk: int = 512,
        now: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._messages, self._stop, self._chunk, self._now = messages, stop, chunk, now
        self._next = next(messages)
        self._offset = 0

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits for long."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the stream has ended."""
        return self._stop.is_set()

    @property
    def delay(self) -> float:
        """Seconds by which the next message is late."""
        return (self._now() - self._next[0]) / MICROS

    def poll(self, timeout: float) -> PollResult:
        """Return the messages whose time has come, after at most `timeout` seconds."""
        wait = (self._next[0] - self._now()) / MICROS
        if wait > 0:
            self._stop.wait(min(wait, timeout))
        payloads: list[bytes | None] = []
        now = self._now()
        while len(payloads) < self._chunk and self._next[0] <= now:
            payloads.append(self._next[1])
            self._next = next(self._messages)
        if not payloads:
            return PollResult(None)
        num = len(payloads)
        offsets = np.arange(self._offset, self._offset + num, dtype=np.int64)
        self._offset += num
        times = np.full(num, NO_TIME, np.int64)
        return PollResult(Messages("pumps", [None] * num, payloads, times, np.zeros(num, np.int32), offsets))

    def commit(self) -> None:
        """Do nothing: the simulation has no offsets."""

    def close(self) -> None:
        """Do nothing: the simulation has no resources."""


RECORD_TIMEOUT = MAX_DELAY + 1
"""Seconds after which a record without a further reading is complete."""
