"""Entering irregular readings into the record table: a sensor reports any number of times in a record.

Each reading keeps its event time. The rules differ from those of `deformer_stream.engine.ingest`:

- A sensor can report again. A reading is a duplicate if its context has the same value of the sensor at the same time:
  the same message was delivered twice. Another value at the same time is accepted. The context consists of the earlier
  readings of the same block, the latest readings before the block, and the latest one of each sensor before the block
  (`deformer_stream.model.bounded_context`). Older readings are not stored any more, so they are not compared.
- A null value declares that the sensor will not report any more in the record. Later readings of it are duplicates.
- A record is complete when all sensors are declared so.
- An event without a time is rejected.
- The ages of a record's readings are counted from its origin: the start of the window, if the record is one, else the
  time of its first accepted reading. A later reading can have an earlier time, so an age can be negative.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import EventBatch, Rejection, RejectionReason
from deformer_stream.engine.ingest import ReadingCollector, ingest_sequential
from deformer_stream.engine.partition import Partition
from deformer_stream.engine.record_contexts import RecordContexts
from deformer_stream.engine.records import AcceptedReadings, RecordTable

Ints = NDArray[np.int64]


def ingest_irregular(
    records: RecordTable, batch: EventBatch, now: int, model_version: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """Store the irregular readings of a batch of events in a record table, and open the records that are new.

    Args:
        records: The table, whose readings are irregular.
        batch: Events in the order of arrival.
        now: Time of arrival, microseconds since 1970.
        model_version: Number of the model version that scores the records that are opened.

    Returns:
        The accepted readings and the rejections.
    """
    if not len(batch) or records.contexts is None:
        return AcceptedReadings.empty(), []
    collector = IrregularCollector(records, records.contexts, batch, model_version)
    return ingest_sequential(collector, batch, now, model_version)


class IrregularCollector(ReadingCollector):
    """A collector of the irregular readings that are accepted from a batch of events one by one.

    Args:
        records: The record table.
        contexts: The blocks and contexts of its records.
        batch: The events from which readings are accepted.
        model_version: Number of the model version that scores the records that are opened.
    """

    def __init__(self, records: RecordTable, contexts: RecordContexts, batch: EventBatch, model_version: int) -> None:
        super().__init__(records)
        self._times, self._values = batch.times.tolist(), batch.values.tolist()
        self._contexts, self._limit_of_opened = contexts, contexts.limit_of(model_version)
        # A flat memoryview, whose single elements are accessed faster than those of an array.
        self._latest_time = records.view_latest_times()
        self._num_before: dict[int, int] = {}  # readings of touched records before this batch, by row of the table
        # The feature codes of the readings accepted from this batch, by row of the table.
        self._new_codes: dict[int, list[int]] = {}
        # The readings accepted from this batch, which are not in the log yet: row, feature, time, value, and the text
        # of a label that the model does not have. Of equal readings, the position in the record of the latest one.
        self._new_positions: dict[tuple[int, int, int, float, str | None], int] = {}

    def open_record(self, record_id: str, partition_id: int, partition: Partition) -> int:
        """Return the row of the table for a new record, as `ReadingCollector.open_record` does."""
        record_index = super().open_record(record_id, partition_id, partition)
        self._latest_time = self.records.view_latest_times()  # the table may have grown
        self._num_before[record_index], self._new_codes[record_index] = 0, []
        return record_index

    def touch(self, record_index: int) -> int:
        """Include a record among those with accepted events, and return the number of its readings.

        Args:
            record_index: Row of the record in the table.
        """
        count = self._new_counts.get(record_index)
        if count is None:  # the first accepted event of a record that was open before this batch
            count = self._new_counts[record_index] = int(self.records.num_readings[record_index])
            self._num_before[record_index], self._new_codes[record_index] = count, []
            num_missing = int(self.records.num_declared_missing[record_index])
            self._num_awaited[record_index] = self._num_features - num_missing
        return count

    def accept(
        self,
        event_index: int,
        record_index: int,
        partition: Partition | None,
        feature: int,
        is_missing: bool,
        unseen_label: str | None,
    ) -> bool:
        """Add one reading, or the declaration that a sensor will not report any more, to its record.

        Args:
            event_index: Index of the event in the batch.
            record_index: Row of the record in the table.
            partition: The partition of the record, to close the record if it is complete afterwards. None if the caller
                closes the record anyway.
            feature: Feature code.
            is_missing: Whether the event declares that the sensor will not report.
            unseen_label: Text of the value if it is a label that the model does not have, otherwise None.

        Returns:
            False if the reading is a duplicate or the sensor was declared so before. Nothing is changed then.
        """
        # Feature f is bit f % 8 of byte f // 8 in the row of its record.
        byte, bit = record_index * self._mask_width + (feature >> 3), 1 << (feature & 7)
        if self._mask[byte] & bit:
            return False
        if is_missing:
            self.touch(record_index)
            self._mask[byte] |= bit
            self._missing_records.append(record_index)
            self._missing_events.append(event_index)
            self._num_awaited[record_index] -= 1
            if not self._num_awaited[record_index] and partition is not None:
                self.close_complete(record_index, partition)
            return True
        time, value, sensor = self._times[event_index], self._values[event_index], record_index * self._num_features
        sensor += feature
        reading = (record_index, feature, time, value, unseen_label)
        if time <= self._latest_time[sensor]:  # only such a reading can be a duplicate
            if self._is_duplicate(*reading):
                return False
        else:
            self._latest_time[sensor] = time
        position = self.touch(record_index)  # position of the new reading: the number of earlier ones
        self._new_positions[reading] = position
        self._new_codes[record_index].append(feature)
        self._new_counts[record_index] = position + 1
        self._event_indices.append(event_index)
        self._record_indices.append(record_index)
        self._seq.append(position)
        if unseen_label is not None:
            place = position - int(self._contexts.num_dropped[record_index])
            self.records.add_unseen_label(record_index, place, unseen_label)
        return True

    def _is_duplicate(self, record_index: int, feature: int, time: int, value: float, unseen_label: str | None) -> bool:
        """Return whether the context of a new reading has a reading with the same sensor, time and value.

        The context depends on the readings of the record, and not on how they are divided into batches. It may contain
        readings of this batch, and readings in the log may have left it within this batch.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code.
            time: Event time, microseconds since 1970.
            value: Raw value, or label code.
            unseen_label: Text of the value if it is a label that the model does not have, otherwise None.
        """
        num_before, new_codes = self._num_before.get(record_index), self._new_codes.get(record_index, [])
        if num_before is None:  # no event of the record was accepted from this batch so far
            num_before = int(self.records.num_readings[record_index])
        num_dropped = int(self._contexts.num_dropped[record_index])
        block, recent = int(self._contexts.block[record_index]), int(self._contexts.recent[record_index])
        if record_index in self._partition_by_opened:  # `store` will set the two numbers in the table
            block, recent = self._limit_of_opened.block, self._limit_of_opened.recent
        position = num_before + len(new_codes)  # of the new reading
        block_start = max(position - position % block, num_dropped)
        equal = self._new_positions.get((record_index, feature, time, value, unseen_label))
        if equal is None:
            equal = self._find_stored(record_index, num_before - num_dropped, feature, time, value, unseen_label)
            if equal is None:
                return False
            if block_start == self._contexts.block_starts[record_index]:
                return True  # the log has only readings of the context
            equal += num_dropped
        if equal >= block_start - recent:
            return True
        # An older reading belongs to the context if no later one of its sensor is before the block.
        if feature in new_codes[max(equal + 1 - num_before, 0) : max(block_start - num_before, 0)]:
            return False
        places = np.arange(equal + 1, min(block_start, num_before)) - num_dropped
        later_codes = self.records.log.gather_features(np.full(len(places), record_index), places)
        return feature not in later_codes

    def _find_stored(
        self, record_index: int, num_stored: int, feature: int, time: int, value: float, unseen_label: str | None
    ) -> int | None:
        """Return the place in the log of the last reading of a record with this sensor, time and value, None if none.

        Args:
            record_index: Row of the record in the table.
            num_stored: Number of readings of the record in the log.
            feature: Feature code.
            time: Event time, microseconds since 1970.
            value: Raw value, or label code.
            unseen_label: Text of the value if it is a label that the model does not have, otherwise None.
        """
        places = self.records.log.find_repetitions(record_index, num_stored, feature, time, value)
        # All labels that the model does not have share a code, so their texts are compared.
        text_by_place = self.records.unseen_labels.get(record_index, {})
        return next((place for place in places[::-1].tolist() if text_by_place.get(place) == unseen_label), None)

    def explain_rejection(
        self, record_index: int, feature: int, is_in_window: bool
    ) -> tuple[RejectionReason, str | None]:
        """Return the reason for which an event was rejected, and the text that explains the cause.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code of the event, which `accept` has rejected.
            is_in_window: Ignored. The method of the base class needs it, because the repeated readings of a window have
                a reason of their own there.
        """
        if self.has_feature(record_index, feature):
            return (
                RejectionReason.DUPLICATE,
                "a null has declared that the sensor will not report any more in the record",
            )
        return RejectionReason.DUPLICATE, "the record has this value of the sensor at the same time already"

    def store(self, batch: EventBatch, now: int, model_version: int) -> AcceptedReadings:
        """Write the accepted readings to the arrays of the table, and return them.

        Args:
            batch: The events to which the event indices refer.
            now: Time of arrival, microseconds since 1970.
            model_version: Number of the model version that scores the records that were opened.
        """
        accepted = super().store(batch, now, model_version)
        records, rows = self.records, accepted.record_indices
        times = batch.times[accepted.event_indices]
        records.log.write_times(rows, records.find_places(rows, accepted.seq), times)
        # The first reading of a record determines the origin, from which the ages of all its readings are counted.
        first = np.flatnonzero(accepted.seq == 0)
        if len(first):
            origins = times[first]
            if batch.windows is not None and batch.windows.starts is not None:
                events = accepted.event_indices[first]
                is_in_window = np.array([bool(batch.windows.devices[event]) for event in events.tolist()], bool)
                origins = np.where(is_in_window, batch.windows.starts[events], origins)
            records.set_origins(rows[first], origins)
        return accepted
