"""Scoring the records of partitions again after a change of the model or a restore, a part of them at a time.

A partition waits in the queue until the current model has scored all of its records. Then its restored readings that no
model has scored, because they waited for others, are returned to be scored with alerts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift import DriftMonitor
from deformer_stream.engine.closing import ClosingRules
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.scoring import NO_ALPHAS
from deformer_stream.engine.snapshot import Snapshot, import_state
from deformer_stream.engine.snapshot_adaptation import adapt_snapshot
from deformer_stream.engine.ties import sort_groups
from deformer_stream.errors import InvariantViolated
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Rescoring:
    """A partition whose records the current model must score again before the partition takes further events.

    Attributes:
        snapshot: The state of the partition before. It stays the partition's snapshot until all records are scored.
        time: The time to which the idle times of the snapshot refer, in microseconds since 1970.
        record_index: Rows of the records in the table that must be scored; None until the snapshot is loaded.
        num_scored: How many of these records are scored already.
        num_dropped_by_feature: Number of readings that were dropped when the snapshot was loaded, by feature name.
    """

    snapshot: Snapshot
    time: int
    record_index: Ints | None = None
    num_scored: int = 0
    num_dropped_by_feature: Counter[str] = field(default_factory=Counter)


class RescoringQueue:
    """The partitions whose records the current model must score again before they take further events.

    Args:
        versions: The models and the KV caches.
        closing_rules: The rules of closing, which depend on partitions with other features than before.

    Attributes:
        unscored_partitions: Partitions with restored readings that no model has scored yet, because they waited before.
    """

    def __init__(self, versions: ModelVersions, closing_rules: ClosingRules) -> None:
        self._versions, self._closing_rules = versions, closing_rules
        self.unscored_partitions: set[int] = set()
        self._rescoring_by_partition: dict[int, _Rescoring] = {}  # in the order in which they are scored
        self._num_dropped_by_feature: Counter[str] = Counter()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions in the queue, in its order."""
        return tuple(self._rescoring_by_partition)

    def restart(self, snapshot_by_partition: Mapping[int, Snapshot]) -> None:
        """Replace the queue by all partitions of a new table of records, after a change of the model.

        Args:
            snapshot_by_partition: Their states at the time 0.
        """
        self.unscored_partitions.clear()  # the snapshots show which readings are not scored
        self._rescoring_by_partition = {
            partition: _Rescoring(snapshot, time=0) for partition, snapshot in snapshot_by_partition.items()
        }

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Remove partitions that were assigned to another consumer."""
        for partition in partitions:
            self._rescoring_by_partition.pop(partition, None)
            self.unscored_partitions.discard(partition)

    def get_snapshot(self, partition: int, now: int) -> Snapshot | None:
        """Return the state that a partition in the queue had before, None if the partition is not in the queue.

        Args:
            partition: Number of the partition.
            now: The current time in microseconds since 1970.
        """
        rescoring = self._rescoring_by_partition.get(partition)
        if rescoring is None:
            return None
        snapshot = rescoring.snapshot
        return replace(snapshot, idle_micros=snapshot.idle_micros + (now - rescoring.time))

    def check_is_done(self, method: str, partitions: Collection[int]) -> None:
        """Check that none of these partitions is in the queue.

        Args:
            method: Name of the method of `Engine` that was called.
            partitions: The partitions for which it was called.

        Raises:
            InvariantViolated: One of them is in the queue.
        """
        for partition in partitions:
            if partition in self._rescoring_by_partition:
                raise InvariantViolated(
                    f"Engine.{method} was called before Engine.rescore had scored all records of partition "
                    f"{partition}: report this bug"
                )

    def add(
        self, records: RecordTable, partition: int, snapshot: Snapshot, now: int, drift_monitor: DriftMonitor | None
    ) -> None:
        """Load the snapshot of a partition; the partition stays in the queue if records must be scored again.

        Args:
            records: The table of open records, which has no state of the partition.
            partition: Number of the partition.
            snapshot: The state of the partition.
            now: The current time in microseconds since 1970.
            drift_monitor: Receives the evidence of drift; None if drift is not monitored.
        """
        self._rescoring_by_partition[partition] = _Rescoring(snapshot, now)
        self._load_snapshot(records, partition, drift_monitor)

    def advance(self, records: RecordTable, max_readings: int, drift_monitor: DriftMonitor | None) -> None:
        """Load the snapshot of the first partition in the queue, or score a part of its records, without alerts.

        Args:
            records: The table of open records.
            max_readings: About how many readings to score: as many records as have no more readings, but at least one.
            drift_monitor: Receives the evidence of drift; None if drift is not monitored.
        """
        partition = next(iter(self._rescoring_by_partition), None)
        if partition is None:
            return
        rescoring = self._rescoring_by_partition[partition]
        if rescoring.record_index is None:
            self._load_snapshot(records, partition, drift_monitor)
            return
        waiting = rescoring.record_index[rescoring.num_scored :]
        num_readings = records.count_stored(waiting).cumsum()
        waiting = waiting[: max(1, int(np.searchsorted(num_readings, max_readings, side="right")))]
        self._score(records, waiting)
        records.drop_old_readings(waiting)
        rescoring.num_scored += len(waiting)
        self._remove_if_done(partition)

    def pop_dropped_readings(self) -> Counter[str]:
        """Return the number of dropped readings since the last call by the name of their feature, and reset it."""
        dropped, self._num_dropped_by_feature = self._num_dropped_by_feature, Counter()
        return dropped

    def pop_unscored(self, records: RecordTable, restoring_partitions: Collection[int] = ()) -> tuple[Ints, Ints]:
        """Return the readings of restored records that no model has scored yet, and do not return them again.

        They waited for the end of their time slot, or for readings with the same event time. Under the present rules
        they do not wait.

        Args:
            records: The table of open records.
            restoring_partitions: Partitions whose readings a later call returns, because their events are still being
                replayed.

        Returns:
            (M,) row of each reading's record in the table, and (M,) position of each reading in its record.
        """
        partitions = self.unscored_partitions.difference(restoring_partitions)
        if not partitions:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self.unscored_partitions -= partitions
        rows = np.array(records.indices_of_partitions(partitions), np.int64)
        num_pending = records.num_pending[rows]
        record, place = ragged_indices(num_pending)
        return rows[record], place + (records.num_readings[rows] - num_pending)[record]

    def _load_snapshot(self, records: RecordTable, partition: int, drift_monitor: DriftMonitor | None) -> None:
        """Load the snapshot of a partition in the queue, and determine which of its records must be scored again.

        A record is scored again in two cases: the engine does not have the model that scored it, or the snapshot has
        other features, labels or rules for readings with the same event time.

        Args:
            records: The table of open records, which has no state of the partition.
            partition: Number of the partition.
            drift_monitor: Receives the evidence of drift; None if drift is not monitored.
        """
        rescoring = self._rescoring_by_partition[partition]
        adapted = adapt_snapshot(rescoring.snapshot, self._versions.current.schema, records.holds_ties)
        snapshot = adapted.snapshot
        rescoring.num_dropped_by_feature = adapted.num_dropped_by_feature
        if adapted.is_translated:
            self._closing_rules.add_translated_partition(partition)
        # Models whose scores of records remain valid, with their version numbers.
        versions = self._versions.fingerprint_by_number.items() if adapted.has_valid_scores else ()
        version_by_fingerprint = {fingerprint: number for number, fingerprint in versions}
        # The version number of each record's model, −1 if its scores are not valid. `snapshot.model` holds, for each
        # record, the index of its model in `snapshot.models`.
        snapshot_versions = [version_by_fingerprint.get(fingerprint, -1) for fingerprint in snapshot.models]
        version_by_record = np.array(snapshot_versions, np.int64)[snapshot.model]
        needs_rescoring = version_by_record < 0
        version_by_record = np.where(needs_rescoring, self._versions.current_number, version_by_record)
        if drift_monitor is not None:
            drift_monitor.import_state(partition, snapshot.drift)
        record_index = import_state(records, partition, snapshot, rescoring.time, version_by_record)
        if not records.holds_ties and records.num_pending[record_index].any():
            self.unscored_partitions.add(partition)
        self._versions.grow_caches(records)
        records.drop_old_readings(record_index[~needs_rescoring])
        rescoring.record_index = record_index[needs_rescoring]
        self._remove_if_done(partition)

    def _score(self, records: RecordTable, record_index: Ints) -> None:
        """Score all readings of records again, without alerts, after their model or the rules of scoring have changed.

        If the new p-value of a record is small enough for an alert, the record raises it when its next reading is
        scored. Readings that no model has scored yet because they wait, or waited under the rules before, are left out:
        they are scored later, with alerts. Older irregular readings are left out, too; they are not stored any more.

        Args:
            records: The table of open records.
            record_index: (R,) row of each record in the table.
        """
        records.reset_scores(record_index)
        # The waiting readings are the last ones of a record, so those to score are the first ones.
        num_stored = records.count_stored(record_index)
        num_to_score = num_stored - records.num_pending[record_index]
        # Of each reading: index into `record_index`, and place in the log.
        record, place = ragged_indices(num_to_score)
        num_dropped = records.num_readings[record_index] - num_stored
        if records.holds_ties and len(record):
            # The order within a tie group follows from the features of the model, which may differ from those before.
            is_tied = records.log.is_tied(record_index[record], place)
            sort_groups(records, record_index[record], place, np.cumsum(~is_tied))
        self._versions.score_readings(records, record_index[record], num_dropped[record] + place, NO_ALPHAS)

    def _remove_if_done(self, partition: int) -> None:
        """Remove a partition from the queue if all of its records are scored."""
        rescoring = self._rescoring_by_partition[partition]
        if rescoring.record_index is not None and rescoring.num_scored == len(rescoring.record_index):
            # Only now, because the snapshot is loaded once more if the model changes before all records are scored.
            self._num_dropped_by_feature += rescoring.num_dropped_by_feature
            del self._rescoring_by_partition[partition]
            self._closing_rules.reset_timeouts()
