"""A bound on the number of alerts per second that a process sends.

If the model or the plant has a fault, every record may raise an alert. Nobody can read that many alerts, and sending
them delays other processes that use the same brokers. A token bucket therefore decides which alerts are sent. The
others are held back: they are counted, summarised in notices, and part of the evidence, but never sent later. Their
records count as alerted, so neither this run nor the next one raises the same alerts again.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from deformer_stream.engine.alerts import select_most_severe
from deformer_stream.engine.events import Alert, Effects, StormNotice

BURST_SECONDS = 10.0
"""A burst of as many alerts as may be sent in this time is sent at once."""

MAX_ALERTS_AT_ONCE = 1000
"""Largest number of alerts of one batch that are sent. Each is explained before, which takes up to 20 ms with the
default settings, and a group takes the partitions away from a process that does not poll for its poll interval."""

NOTICE_SECONDS = 10.0
"""Shortest time between two notices."""

MAX_NAMED_RECORDS = 5
"""Largest number of records that a notice names."""


class TokenBucket(NamedTuple):
    """The state of a token bucket; one token permits one alert.

    Attributes:
        num_tokens: The number of tokens at `time`.
        time: Monotonic seconds.
    """

    num_tokens: float
    time: float


def take_tokens(
    bucket: TokenBucket, num_requested: int, now: float, rate: float, capacity: float
) -> tuple[TokenBucket, int]:
    """Add the tokens of the time since the last call, and take as many as are requested and available.

    Args:
        bucket: The state after the last call.
        num_requested: The number of tokens that are requested.
        now: The time, in monotonic seconds.
        rate: Tokens that are added per second.
        capacity: Largest number of tokens in the bucket, at least 1.

    Returns:
        The new state, and the number of tokens that were taken.
    """
    num_tokens = min(capacity, bucket.num_tokens + rate * max(0.0, now - bucket.time))
    num_taken = min(num_requested, int(num_tokens))
    return TokenBucket(num_tokens - num_taken, now), num_taken


class AlertLimiter:
    """Decides which alerts are sent, and makes notices about the others.

    Args:
        max_rate: Largest number of alerts per second that may be sent for long, more than 0. A burst of
            `BURST_SECONDS * max_rate` alerts is possible.
        now: Returns monotonic seconds.
    """

    def __init__(self, max_rate: float, now: Callable[[], float] = time.monotonic) -> None:
        self._max_rate, self._capacity = max_rate, max(1.0, BURST_SECONDS * max_rate)
        self._now = now
        self._bucket = TokenBucket(self._capacity, now())
        self._last_notice = -NOTICE_SECONDS + now()
        # Alerts held back since the last notice: their number by partition, the first records, and the first id.
        self._num_by_partition: Counter[int] = Counter()
        self._records: list[str] = []
        self._first_id, self._last_partition = "", 0

    def count_permitted(self) -> int:
        """Return how many alerts may be sent now, at most `MAX_ALERTS_AT_ONCE`."""
        self._bucket, _ = take_tokens(self._bucket, 0, self._now(), self._max_rate, self._capacity)
        return min(int(self._bucket.num_tokens), MAX_ALERTS_AT_ONCE)

    def limit(
        self, effects: Effects, clock_time: int, is_final: bool = False, num_permitted: int | None = None
    ) -> Effects:
        """Return the effects of one batch with the alerts that may not be sent in `held_back_alerts`.

        See `limit_all`.
        """
        return self.limit_all([effects], clock_time, is_final, num_permitted)[0]

    def limit_all(
        self, all_effects: Sequence[Effects], clock_time: int, is_final: bool = False, num_permitted: int | None = None
    ) -> list[Effects]:
        """Return the effects of one poll with the alerts that may not be sent in `held_back_alerts`.

        The most severe alerts of the poll are sent, and among equally severe ones the first (`select_most_severe`). A
        notice is added if alerts were held back since the last one, at most once in `NOTICE_SECONDS`.

        Args:
            all_effects: The effects of each model, as the engines have returned them; at least one.
            clock_time: The time of the pipeline's clock, microseconds since 1970.
            is_final: Whether the run ends, so that a notice must not wait.
            num_permitted: What `count_permitted` has returned before the batch was handled. None to call it now.
        """
        now, alerts = self._now(), [alert for effects in all_effects for alert in effects.alerts]
        limited = list(all_effects)
        num_permitted = self.count_permitted() if num_permitted is None else num_permitted
        num_requested = min(len(alerts), num_permitted)
        self._bucket, num_sent = take_tokens(self._bucket, num_requested, now, self._max_rate, self._capacity)
        if num_sent < len(alerts):
            selected = select_most_severe([alert.alpha for alert in alerts], num_sent)
            self._count([alert for i, alert in enumerate(alerts) if i not in selected])
            start = 0
            for place, effects in enumerate(all_effects):
                numbered = list(enumerate(effects.alerts, start))
                start += len(numbered)
                sent = [alert for i, alert in numbered if i in selected]
                held_back = [alert for i, alert in numbered if i not in selected]
                limited[place] = replace(effects, alerts=sent, held_back_alerts=held_back)
        is_due = is_final or now - self._last_notice >= NOTICE_SECONDS
        if self._num_by_partition and is_due:
            self._last_notice = now
            # The last effects state the notice, because it summarises the alerts of all models.
            limited[-1] = replace(limited[-1], storm_notices=[self._make_notice(clock_time, limited[-1].model)])
        return limited

    def _count(self, held_back: Sequence[Alert]) -> None:
        """Count alerts that are held back, for the next notice."""
        if not self._num_by_partition:
            self._first_id = held_back[0].id
        self._num_by_partition.update(alert.partition for alert in held_back)
        self._last_partition = held_back[-1].partition
        for alert in held_back[:MAX_NAMED_RECORDS]:
            if len(self._records) < MAX_NAMED_RECORDS and alert.record not in self._records:
                self._records.append(alert.record)

    def _make_notice(self, clock_time: int, model: str) -> StormNotice:
        """Return a notice about the alerts that were held back since the last one, and count anew."""
        name = f"storm {self._first_id} {self._num_by_partition.total()}"
        notice = StormNotice(
            id=hashlib.sha256(name.encode()).hexdigest()[:32],
            partition=self._last_partition,
            time=clock_time,
            num_by_partition=dict(self._num_by_partition),
            records=tuple(self._records),
            max_rate=self._max_rate,
            model=model,
        )
        self._num_by_partition, self._records = Counter(), []
        return notice
