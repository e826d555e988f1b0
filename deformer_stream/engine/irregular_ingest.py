"""Entering irregular readings into the record table: a sensor reports any number of times in a record.

Each reading keeps its event time. The rules differ from those of `records.ingest`:

- A sensor can report again. A reading is a duplicate if the record has the same value of the sensor at the same time:
  the same message was delivered twice. Another value at the same time is accepted.
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
from deformer_stream.engine.records import (
    AcceptedReadings,
    Partition,
    ReadingCollector,
    RecordTable,
    ingest_sequential,
)

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
    if not len(batch):
        return AcceptedReadings.empty(), []
    return ingest_sequential(IrregularCollector(records, batch), batch, now, model_version)


class IrregularCollector(ReadingCollector):
    """A collector of the irregular readings that are accepted from a batch of events one by one.

    Args:
        records: The record table.
        batch: The events from which readings are accepted.
    """

    def __init__(self, records: RecordTable, batch: EventBatch) -> None:
        super().__init__(records)
        self._times, self._values = batch.times.tolist(), batch.values.tolist()
        # A flat memoryview, whose single elements are accessed faster than those of an array.
        self._latest_time = records.latest_time.reshape(-1).data
        self._num_stored: dict[int, int] = {}  # readings in the log before this batch, by row of the table
        # The readings accepted from this batch, which are not in the log yet: row, feature, time, value, and the text
        # of a label that the model does not have.
        self._new_readings: set[tuple[int, int, int, float, str | None]] = set()

    def open_record(self, record_id: str, partition_id: int, partition: Partition) -> int:
        """Return the row of the table for a new record, as `ReadingCollector.open_record` does."""
        record_index = super().open_record(record_id, partition_id, partition)
        self._latest_time = self.records.latest_time.reshape(-1).data  # the table may have grown
        self._num_stored[record_index] = 0
        return record_index

    def touch(self, record_index: int) -> int:
        """Include a record among those with accepted events, and return the number of its readings.

        Args:
            record_index: Row of the record in the table.
        """
        count = self._new_counts.get(record_index)
        if count is None:  # the first accepted event of a record that was open before this batch
            count = self._new_counts[record_index] = int(self.records.num_readings[record_index])
            self._num_stored[record_index] = count
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
            if reading in self._new_readings or self._is_stored(*reading):
                return False
        else:
            self._latest_time[sensor] = time
        self._new_readings.add(reading)
        place = self.touch(record_index)  # position of the new reading: the number of earlier ones
        self._new_counts[record_index] = place + 1
        self._event_indices.append(event_index)
        self._record_indices.append(record_index)
        self._seq.append(place)
        if unseen_label is not None:
            self.records.add_unseen_label(record_index, place, unseen_label)
        return True

    def _is_stored(self, record_index: int, feature: int, time: int, value: float, unseen_label: str | None) -> bool:
        """Return whether the log has a reading of a record with this sensor, time and value.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code.
            time: Event time, microseconds since 1970.
            value: Raw value, or label code.
            unseen_label: Text of the value if it is a label that the model does not have, otherwise None.
        """
        num_stored = self._num_stored.get(record_index)
        if num_stored is None:  # no event of the record was accepted from this batch so far
            num_stored = int(self.records.num_readings[record_index])
        places = self.records.log.find_repetitions(record_index, num_stored, feature, time, value)
        # All labels that the model does not have share a code, so their texts are compared.
        text_by_place = self.records.unseen_labels.get(record_index, {})
        return any(text_by_place.get(place) == unseen_label for place in places.tolist())

    def explain_rejection(
        self, record_index: int, feature: int, is_in_window: bool
    ) -> tuple[RejectionReason, str | None]:
        """Return the reason for which an event was rejected, and the text that tells a person the cause.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code of the event, which `accept` has rejected.
            is_in_window: Ignored. The method of the base class needs it, because the repeated readings of a window have
                a reason of their own there.
        """
        if self.has_feature(record_index, feature):
            return RejectionReason.DUPLICATE, "the record has declared that this sensor will not report any more"
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
        records.log.write_times(rows, accepted.seq, times)
        # The first reading of a record determines the origin, from which the ages of all its readings are counted.
        first = np.flatnonzero(accepted.seq == 0)
        if len(first):
            origins = times[first]
            if batch.windows is not None and batch.windows.starts is not None:
                events = accepted.event_indices[first]
                is_in_window = np.array([bool(batch.windows.devices[event]) for event in events.tolist()], bool)
                origins = np.where(is_in_window, batch.windows.starts[events], origins)
            records.origin[rows[first]] = origins
        return accepted
