"""Snapshots: the state of a Kafka partition as a value that can be stored, and its export and import.

The state of a partition follows from its log and from a few decisions that the log alone cannot reproduce, such as
timeouts (`deformer_stream.engine.events.Decisions`). A consumer that is assigned the partition imports the latest
snapshot, and then reads only the messages after it.

A snapshot names the features and labels that its codes stand for (`Vocabulary`). Another model can therefore read it,
after its codes have been translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.id_set import BoundedIdSet, StringColumn
from deformer_stream.engine.partition import Partition
from deformer_stream.engine.records import MAX_RECORDS_PER_PASS, RecordTable
from deformer_stream.engine.slot_readings import SlotReading
from deformer_stream.model.schema import FeatureKind, Schema
from deformer_stream.model.windows import PerSlot
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The features and labels that the codes of a model stand for.

    Snapshots contain codes. The vocabulary is stored with them, so that another model can read them.

    Attributes:
        names: Name of each feature. The index of a name is the feature code.
        kinds: Kind of each feature, "continuous" or "discrete".
        labels: Labels of each feature, empty for a continuous feature. The index of a label is the label code.
    """

    names: tuple[str, ...]
    kinds: tuple[FeatureKind, ...]
    labels: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        """Return the number of features."""
        return len(self.names)

    @staticmethod
    def from_schema(schema: Schema) -> Vocabulary:
        """Return the vocabulary of a model with this schema."""
        features = schema.features
        return Vocabulary(schema.names, tuple(f.kind for f in features), tuple(f.labels for f in features))


@dataclass(frozen=True, slots=True)
class TieGroups:
    """The tie groups of R records with T readings in total, one record after the other.

    A tie group is the readings of one record with the same event time, which are scored together.

    Attributes:
        is_tied: (T,) whether a reading belongs to the same tie group as the reading before it in its record.
        num_pending: (R,) int32 number of readings at the end of each record that wait for further readings of their tie
            group and are not scored yet.
        tie_time: (R,) int64 event time of each record's last tie group, microseconds since 1970; `NO_TIME` if there is
            none.
    """

    is_tied: NDArray[np.bool_]
    num_pending: NDArray[np.int32]
    tie_time: Ints


@dataclass(frozen=True, slots=True)
class CircularSums:
    """The sums from which circular means of S readings are computed (`deformer_stream.model.cycles`).

    Attributes:
        sine: (S,) float64 sum of the sines of the readings.
        cosine: (S,) float64 sum of the cosines.
        period: (S,) float64 period of the cycle in raw units. 0 if the mean of the reading is not circular.
        start: (S,) float64 smallest raw value of the cycle.
    """

    sine: NDArray[np.float64]
    cosine: NDArray[np.float64]
    period: NDArray[np.float64]
    start: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WaitingReadings:
    """S readings that wait for the end of their time slot, in the order of arrival.

    A time slot is a part of a window (a record of one device's readings within an interval of event time). The readings
    of a sensor in one slot are combined to one (`deformer_stream.engine.slot_readings.SlotReading`).

    Attributes:
        rule: Which value stands for a time slot with several readings (`Window.per_slot`).
        record: (S,) int32 index of the record of each reading among the records of the snapshot.
        feature: (S,) int16 feature code.
        deadline: (S,) int64 event time at which the time slot is over, microseconds since 1970.
        num_values: (S,) int32 number of readings with a value. 0 if the feature was only declared as "will not be
            observed".
        value: (S,) float64 combined value so far: the last, smallest or largest value, or the sum for the rule "mean".
            It is the last value, too, if the mean is circular. For a discrete feature it is the label code. 0 if there
            is no value.
        time: (S,) int64 latest event time of the readings, microseconds since 1970.
        unseen: (U,) int32 index among the S readings of each of U readings with an unseen label.
        unseen_text: Texts of the U labels.
        circular: Sums for circular means. None if no mean of the S readings is circular.
    """

    rule: PerSlot
    record: NDArray[np.int32]
    feature: NDArray[np.int16]
    deadline: Ints
    num_values: NDArray[np.int32]
    value: NDArray[np.float64]
    time: Ints
    unseen: NDArray[np.int32]
    unseen_text: list[str]
    circular: CircularSums | None = None

    def __len__(self) -> int:
        """Return the number of readings."""
        return len(self.record)


@dataclass(frozen=True, slots=True)
class CompleteWindows:
    """C windows whose record was closed because it is complete, and whose device has not reached their end yet.

    Later readings of such a window are repeated readings. Without this state they would be late after a restart.

    Attributes:
        ids: Ids of the C records, in the order of completion.
        devices: The device of each window.
        deadlines: (C,) int64 event time at which each window ends, microseconds since 1970.
    """

    ids: list[str]
    devices: list[str]
    deadlines: Ints


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When the irregular readings of R records were made, T readings in total, one record after the other.

    Attributes:
        times: (T,) int64 event time of each reading, microseconds since 1970.
        origins: (R,) int64 event time from which the ages of each record's readings are counted, `NO_TIME` if the
            record has no reading yet.
        num_dropped: (R,) int64 number of older readings of each record that are not among the T readings, because no
            prediction depends on them any more.
    """

    times: Ints
    origins: Ints
    num_dropped: Ints


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one partition with R open records, which have T readings in total.

    Array fields have the names of the columns in which `deformer_stream.codec.state` stores them. Records are in the
    order in which they were opened. Readings are stored one record after the other, in order of arrival. Positions of
    readings in their record count from 0. Logarithms are natural. If readings are irregular, the snapshot does not have
    older readings on which no prediction depends any more (`EventTimes.num_dropped`).

    A window is a record that collects the readings of one device within an interval of event time. An unseen label is
    a label of a discrete feature that the model does not have.

    Attributes:
        vocabulary: The features and labels that the feature codes and label codes stand for.
        models: Fingerprints of the models that score the records.
        ids: R record ids.
        model: (R,) int32 index into `models` of the model that scores each record.
        idle_micros: (R,) int64 microseconds from the last accepted event of the record to the snapshot.
        counts: (R,) int32 number of readings of each record that the snapshot has.
        features: (T,) int16 feature code of each reading.
        values: (T,) float64 raw value of each reading. For a discrete feature it is the label code, or the number of
            labels if the label is unseen.
        num_declared_missing: (R,) int32 number of features that were declared as "will not be observed".
        declared_missing: (A,) int16 feature codes of these A features, one record after the other.
        running: (R,) running statistics of the records' scores, of dtype `RUNNING_DTYPE`.
        alert_seq: (R,) int32 position of the reading that raised the first alert, -1 if there is none. Dropped readings
            are counted.
        alert_alpha: (R,) float64 strictest (smallest) alpha at which the record has alerted, `NO_ALERT` if none.
        unseen_record: (U,) int32 index into `ids` of the record of each of U readings with an unseen label.
        unseen_place: (U,) int32 position of each of these readings among those of its record in the snapshot.
        unseen_text: Texts of the U labels.
        window_record: (W,) int32 index into `ids` of each of W open windows.
        window_device: Devices of the W windows.
        window_deadline: (W,) int64 event time at which each window closes, microseconds since 1970.
        closed: Ids of closed records, in the order of closing. Late events of these records are rejected.
        devices: Names of D devices, ordered by when their last event was processed.
        marks: (D,) int64 watermark (latest event time) of each device, microseconds since 1970.
        drift: The evidence that the partition's records no longer resemble the calibration records; None if there is
            none.
        ties: Tie groups (readings of one record with the same event time, which are scored together), and readings that
            waited in another way and are not scored yet. None if each reading is scored when it arrives.
        waiting: Readings that wait for the end of their time slot; None if there are none.
        complete_windows: Windows that are complete, but not over; None if there are none.
        event_times: When the readings were made. None if readings are not irregular: a feature then has at most one
            reading in a record.
        cusums: (R, W) states of the cumulative sums of irregular readings (`calibration.cusum.StateLayout`). None if
            readings are not irregular, or if the sums are those of another model.
        latest_event_time: (R,) int64 latest event time of each record's readings, microseconds since 1970, `NO_TIME` if
            it is not known. None if it was not saved. It is then that of the readings in `event_times`, if there are
            any, although a dropped reading may have been later.
    """

    vocabulary: Vocabulary
    models: tuple[str, ...]
    ids: list[str]
    model: NDArray[np.int32]
    idle_micros: Ints
    counts: NDArray[np.int32]
    features: NDArray[np.int16]
    values: NDArray[np.float64]
    num_declared_missing: NDArray[np.int32]
    declared_missing: NDArray[np.int16]
    running: NDArray[np.void]
    alert_seq: NDArray[np.int32]
    alert_alpha: NDArray[np.float64]
    unseen_record: NDArray[np.int32]
    unseen_place: NDArray[np.int32]
    unseen_text: list[str]
    window_record: NDArray[np.int32]
    window_device: list[str]
    window_deadline: Ints
    closed: StringColumn
    devices: list[str]
    marks: Ints
    drift: DriftState | None = None
    ties: TieGroups | None = None
    waiting: WaitingReadings | None = None
    complete_windows: CompleteWindows | None = None
    event_times: EventTimes | None = None
    cusums: NDArray[np.float32] | None = None
    latest_event_time: Ints | None = None

    def __len__(self) -> int:
        """Return the number of open records."""
        return len(self.ids)

    def reading_positions(self) -> tuple[Ints, Ints]:
        """Return the record and the position of each of the T readings of the snapshot.

        Returns:
            (T,) index into `ids` of each reading's record; and (T,) the reading's position in that record, from 0.
        """
        return ragged_indices(self.counts)


def export_state(
    records: RecordTable,
    partition_id: int,
    now: int,
    fingerprint_by_version: Mapping[int, str],
    drift: DriftState | None = None,
) -> Snapshot:
    """Return a snapshot of the state of one partition.

    Args:
        records: The record table.
        partition_id: Number of the partition. A partition without any event so far has an empty snapshot.
        now: Current time, microseconds since 1970. The snapshot stores how long each record has been idle.
        fingerprint_by_version: Fingerprint (hash) of each model, by the number of its model version in the record
            table.
        drift: The evidence that the partition's records no longer resemble the calibration records; None if there is
            none.
    """
    partition = records.partitions.get(partition_id) or Partition(records.max_closed_ids)
    ids = list(partition.record_index_by_id)
    rows = np.fromiter(partition.record_index_by_id.values(), np.int64, len(ids))
    versions, model = np.unique(records.model_version[rows], return_inverse=True)
    counts = records.count_stored(rows)
    features, values, times = _gather_readings(records, rows, counts)
    missing_record, missing_feature = records.missing_features(rows)
    unseen = _collect_unseen_labels(records, rows)
    windows = partition.watermarks.open_windows()
    position_by_id = dict(zip(ids, range(len(ids)), strict=True)) if windows else {}
    complete = partition.watermarks.complete_windows()
    watermark_by_device = partition.watermarks.watermark_by_device
    ties = None
    if records.holds_ties or records.num_pending[rows].any():
        record, place = ragged_indices(counts)
        ties = TieGroups(
            is_tied=records.log.is_tied(rows[record], place) if records.holds_ties else np.zeros(len(record), np.bool_),
            num_pending=records.num_pending[rows].astype(np.int32),
            tie_time=records.tie_time[rows],
        )
    event_times = None
    if times is not None:
        event_times = EventTimes(times, records.origin[rows], records.num_readings[rows] - counts)
    return Snapshot(
        vocabulary=Vocabulary.from_schema(records.schema),
        models=tuple(fingerprint_by_version[version] for version in versions.tolist()),
        ids=ids,
        model=model.astype(np.int32),
        idle_micros=now - records.last_accepted_at[rows],
        counts=counts.astype(np.int32),
        features=features,
        values=values,
        num_declared_missing=np.bincount(missing_record, minlength=len(ids)).astype(np.int32),
        declared_missing=missing_feature.astype(np.int16),
        running=records.running[rows],
        alert_seq=records.alert_seq[rows],
        alert_alpha=records.alert_alpha[rows],
        unseen_record=np.array([position for position, _, _ in unseen], np.int32),
        unseen_place=np.array([label_place for _, label_place, _ in unseen], np.int32),
        unseen_text=[text for _, _, text in unseen],
        window_record=np.array([position_by_id[record_id] for record_id, _, _ in windows], np.int32),
        window_device=[device for _, device, _ in windows],
        window_deadline=np.array([deadline for _, _, deadline in windows], np.int64),
        closed=partition.closed_ids.to_column(),
        devices=list(watermark_by_device),
        marks=np.fromiter(watermark_by_device.values(), np.int64, len(watermark_by_device)),
        drift=drift,
        ties=ties,
        waiting=_export_waiting(records.schema, partition, position_by_id),
        complete_windows=None
        if not complete
        else CompleteWindows(
            [record_id for record_id, _, _ in complete],
            [device for _, device, _ in complete],
            np.array([deadline for _, _, deadline in complete], np.int64),
        ),
        event_times=event_times,
        cusums=records.cusum_states[rows] if records.is_irregular else None,
        latest_event_time=records.latest_event_time[rows],
    )


def _gather_readings(
    records: RecordTable, rows: Ints, counts: Ints
) -> tuple[NDArray[np.int16], NDArray[np.float64], Ints | None]:
    """Return the T readings of R records, record after record.

    Args:
        records: The record table.
        rows: (R,) rows of the records in the table.
        counts: (R,) number of readings of each record in the log.

    Returns:
        (T,) feature codes; (T,) raw values; and (T,) event times, microseconds since 1970, None if readings are not
        irregular.
    """
    ends = np.append(0, np.cumsum(counts))
    features, values = np.empty(ends[-1], np.int16), np.empty(ends[-1])
    times = np.empty(ends[-1], np.int64) if records.is_irregular else None
    for start in range(0, len(rows), MAX_RECORDS_PER_PASS):
        part = rows[start : start + MAX_RECORDS_PER_PASS]
        record, place = ragged_indices(counts[start : start + MAX_RECORDS_PER_PASS])
        readings = slice(ends[start], ends[start + len(part)])
        features[readings], values[readings] = records.log.gather(part[record], place)
        if times is not None:
            times[readings] = records.log.gather_times(part[record], place)
    return features, values, times


def _export_waiting(schema: Schema, partition: Partition, position_by_id: Mapping[str, int]) -> WaitingReadings | None:
    """Return the readings of a partition that wait for the end of their time slot, or None if there are none.

    Args:
        schema: The features of the model.
        partition: The partition.
        position_by_id: By record id, the index of the record among those of the snapshot.
    """
    entries = partition.slot_readings.entries()
    if not entries or schema.window is None:
        return None
    readings = [reading for _, reading in entries]
    unseen = [(i, reading.unseen_label) for i, reading in enumerate(readings) if reading.unseen_label is not None]
    cycles = [schema.slot_mean_cycles[reading.feature] for reading in readings]
    circular = None
    if any(cycle is not None for cycle in cycles):
        circular = CircularSums(
            sine=np.array([reading.sine for reading in readings], np.float64),
            cosine=np.array([reading.cosine for reading in readings], np.float64),
            period=np.array([0.0 if cycle is None else cycle.period for cycle in cycles], np.float64),
            start=np.array([0.0 if cycle is None else cycle.start for cycle in cycles], np.float64),
        )
    return WaitingReadings(
        rule=schema.window.per_slot,
        record=np.array([position_by_id[record_id] for record_id, _ in entries], np.int32),
        feature=np.array([reading.feature for reading in readings], np.int16),
        deadline=np.array([reading.deadline for reading in readings], np.int64),
        num_values=np.array([reading.num_values for reading in readings], np.int32),
        value=np.array([reading.value if reading.num_values else 0.0 for reading in readings], np.float64),
        time=np.array([reading.time for reading in readings], np.int64),
        unseen=np.array([i for i, _ in unseen], np.int32),
        unseen_text=[text for _, text in unseen],
        circular=circular,
    )


def _collect_unseen_labels(records: RecordTable, rows: Ints) -> list[tuple[int, int, str]]:
    """Return the labels that occur in some records and that the model does not have.

    Args:
        records: The record table.
        rows: (R,) rows of the records in the table.

    Returns:
        A tuple for each label: the index of its record in `rows`, the position of its reading in the record (from 0),
        and the text. The tuples are sorted.
    """
    # The index in `rows` of each row of the table, −1 for rows of other records.
    index_by_row = np.full(records.capacity, -1, np.int64)
    index_by_row[rows] = np.arange(len(rows))
    labels = [
        (int(index_by_row[row]), place, text)
        for row, text_by_place in records.unseen_labels.items()
        for place, text in text_by_place.items()
        if index_by_row[row] >= 0
    ]
    return sorted(labels)


def import_state(records: RecordTable, partition_id: int, snapshot: Snapshot, now: int, model_version: Ints) -> Ints:
    """Load the snapshot of a partition with R open records into a record table; the inverse of `export_state`.

    Args:
        records: The record table, which must not have records of the partition yet.
        partition_id: Number of the partition.
        snapshot: State of the partition. Its codes must be those of the table's schema, and it must have event times
            if and only if the readings of the schema are irregular (see `snapshot_adaptation`).
        now: Current time, microseconds since 1970. The idle time of each record continues from its value in the
            snapshot, so the time between the two runs does not count.
        model_version: (R,) number of the model version that scores each record from now on.

    Returns:
        (R,) rows of the records in the table.
    """
    partition = records.partition(partition_id)
    allocated = [records.allocate(record_id, partition_id, partition, is_restored=True) for record_id in snapshot.ids]
    rows = np.array(allocated, np.int64)
    records.initialize(rows, np.full(len(rows), partition_id, np.int32), model_version)
    reading_ends, missing_ends = (
        np.append(0, np.cumsum(counts)) for counts in (snapshot.counts, snapshot.num_declared_missing)
    )
    event_times = snapshot.event_times
    for start in range(0, len(rows), MAX_RECORDS_PER_PASS):
        part = slice(start, min(start + MAX_RECORDS_PER_PASS, len(rows)))
        readings, missing = (slice(ends[part.start], ends[part.stop]) for ends in (reading_ends, missing_ends))
        records.restore_records(
            rows[part],
            last_accepted_at=now - snapshot.idle_micros[part],
            num_readings=snapshot.counts[part],
            features=snapshot.features[readings],
            values=snapshot.values[readings],
            num_declared_missing=snapshot.num_declared_missing[part],
            missing_features=snapshot.declared_missing[missing],
            running=snapshot.running[part],
            alert_seq=snapshot.alert_seq[part],
            alert_alpha=snapshot.alert_alpha[part],
            num_dropped=None if event_times is None else event_times.num_dropped[part],
            latest_event_time=None if snapshot.latest_event_time is None else snapshot.latest_event_time[part],
            cusum_states=None if snapshot.cusums is None else snapshot.cusums[part],
        )
        if event_times is not None:
            records.restore_times(rows[part], event_times.origins[part], event_times.times[readings])
    # If only the table or only the snapshot has tie groups (readings of one record with the same event time), none are
    # loaded. The caller then scores the records again, except for the readings that waited.
    ties = snapshot.ties
    if ties is not None and records.holds_ties:
        records.restore_ties(rows, ties.is_tied, ties.num_pending, ties.tie_time)
    elif ties is not None:
        records.set_pending(rows, ties.num_pending.astype(np.int64), ties.tie_time)
    # Texts of labels that the model does not have.
    label_rows = rows[snapshot.unseen_record].tolist()
    for row, place, text in zip(label_rows, snapshot.unseen_place.tolist(), snapshot.unseen_text, strict=True):
        records.add_unseen_label(row, place, text)
    # Open windows (records of one device's readings within an interval of time).
    window_ids = [snapshot.ids[index] for index in snapshot.window_record.tolist()]
    windows = zip(window_ids, snapshot.window_device, snapshot.window_deadline.tolist(), strict=True)
    for record_id, device, deadline in windows:
        partition.watermarks.open_window(device, record_id, deadline)
    partition.closed_ids = BoundedIdSet(records.max_closed_ids, snapshot.closed)
    complete = snapshot.complete_windows
    complete_windows = (
        () if complete is None else zip(complete.ids, complete.devices, complete.deadlines.tolist(), strict=True)
    )
    partition.watermarks.restore(zip(snapshot.devices, snapshot.marks.tolist(), strict=True), complete_windows)
    if snapshot.waiting is not None:
        _import_waiting(partition, snapshot.ids, snapshot.waiting)
    return rows


def _import_waiting(partition: Partition, record_ids: list[str], waiting: WaitingReadings) -> None:
    """Load the readings that wait for the end of their time slot into a partition, whose windows are open already.

    Args:
        partition: The partition.
        record_ids: Ids of the records of the snapshot.
        waiting: The readings.
    """
    text_by_reading = dict(zip(waiting.unseen.tolist(), waiting.unseen_text, strict=True))
    columns = (waiting.record, waiting.feature, waiting.deadline, waiting.num_values, waiting.value, waiting.time)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (record, feature, deadline, num_values, value, time) in enumerate(rows):
        record_id = record_ids[record]
        device = partition.watermarks.device_of(record_id)
        if device is not None:  # the decoder has checked that the record is a window
            reading = SlotReading(
                feature, deadline, num_values, value if num_values else np.nan, time, i, text_by_reading.get(i)
            )
            if waiting.circular is not None:
                reading.sine, reading.cosine = float(waiting.circular.sine[i]), float(waiting.circular.cosine[i])
            partition.slot_readings.restore(device, record_id, reading)
