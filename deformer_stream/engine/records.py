"""The open records of a consumer: which records are open, their readings, and the running statistics of their scores.

A record is the unit that is scored; its readings arrive one by one. The accepted readings of a record are the truth
about it. Everything else in this module can be computed from them and from the recorded decisions of the engine.

`RecordTable` holds one row per open record in arrays. `deformer_stream.engine.ingest` decides which events of a batch
are accepted, and adds their readings. Only this module changes the arrays of the table, with two exceptions. The code
that computes scores updates `RecordTable.running` and `RecordTable.cusum_states` in place. The ingestion of single
events writes to `RecordTable.observed_mask` and `RecordTable.latest_time` (`RecordTable.view_mask`,
`RecordTable.view_latest_times`).

States of a record, and when it changes from one to the next:

    state        | how the table shows it                        | next state, and when
    -------------|-----------------------------------------------|----------------------------------------------------
    unknown      | its id is in no mapping of its partition      | open, when its first event is accepted
    open         | `is_open`, and `num_pending` is 0             | pending, when a reading arrives that waits for ties
                 |                                               | closed, see below
    pending      | `is_open`, and `num_pending` is positive      | open, when its tie group is decided
                 |                                               | closed, see below; its tie group is decided first
    closed       | id in `closed_ids`, the row is still readable | released, when its last scores have been computed
    released     | id in `closed_ids`, the row is free           | unknown, when newer ids displace it in `closed_ids`

A record is closed when it is complete, its window is over, or it is idle for too long. The other reasons are that too
many records are open, its partition is revoked, or the input ends (`CloseReason`). A pending record has readings of one
event time (a tie group) that are scored together once the group is complete (`deformer_stream.engine.ties`). An event
of a closed record is rejected as late. It is rejected as repeated if the record is a window of a model with windows,
and closed because it is complete. If the model combines the readings of a time slot, a record can also have readings
that wait for the end of their slot (`deformer_stream.engine.slot_readings`).

A record can also be pending because it was restored. Some of its readings waited in the previous run, and cannot wait
under the rules of this run. They are scored at the next opportunity, with the alerts that they raise.

If readings are irregular (`Schema.reading_times`), a record has any number of readings of a sensor, and each keeps its
time (`deformer_stream.engine.irregular_ingest`). It is complete when all sensors are declared as "will not report".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import StateLayout, create_states
from deformer_stream.engine.events import NO_ALERT, NO_TIME, AlertState, ClosedRecords, CloseReason, EventBatch
from deformer_stream.engine.idle_queue import IdleQueue
from deformer_stream.engine.partition import MAX_CLOSED_IDS, Partition
from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.engine.record_contexts import RecordContexts
from deformer_stream.engine.slot_readings import SLOT_READING_BYTES
from deformer_stream.errors import InvariantViolated
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import PerSlot
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

RUNNING_DTYPE = np.dtype(
    [
        ("num_scored", np.int64),
        ("neg_log_p_sum", np.float64),
        ("min_log_p", np.float64),
        ("max_statistic", np.float64),
        ("log_likelihood", np.float64),
        ("centered_nll", np.float64),
        ("p_value", np.float64),
        ("prior_neg_log_p_sum", np.float64),
        ("prior_min_log_p", np.float64),
    ]
)
"""The running statistics of a record, which are updated with each scored reading. Logarithms are natural.

- `num_scored`: number of scored readings.
- `neg_log_p_sum`: sum of -ln q over the scored readings. q is the p-value of a reading raised to `P_VALUE_EXPONENT`.
- `min_log_p`: smallest ln q of a scored reading.
- `max_statistic`: largest prefix statistic so far. A prefix statistic is the record's anomaly score after its first k
  readings.
- `log_likelihood`: sum of ln p(value | earlier values) over the scored readings.
- `centered_nll`: sum of their centered NLLs (negative log-likelihood minus the entropy of the value's conditional).
- `p_value`: p-value of the record, computed from `max_statistic`.
- `prior_neg_log_p_sum`, `prior_min_log_p`: as `neg_log_p_sum` and `min_log_p`, of the p-values under the Gaussian prior
  alone; 0 if these are no term of the alert.

The compiled kernels use the same memory layout."""

PREFIX_FIELDS = ("num_scored", "neg_log_p_sum", "min_log_p", "max_statistic", "prior_neg_log_p_sum", "prior_min_log_p")
"""Names of the running statistics that are the attributes of `calibration.conformal.PrefixState`, in their order."""

INITIAL_RUNNING = np.array((0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0), RUNNING_DTYPE)
"""The running statistics of a record before its first reading."""

MISROUTED_CHECK_INTERVAL = 17
"""One of this many opened records is checked: is its id open in another partition, too? The number is prime, so that
a regular pattern in the input does not always fall between two checks."""

MIN_CAPACITY = 64
"""Rows of the smallest record table."""

MAX_RECORDS_PER_PASS = 4096
"""Largest number of records whose older readings are dropped at a time, or that are restored at a time. The arrays with
an element for each reading would otherwise need several times the memory of the records."""

ID_BYTES = 200
"""Estimated bytes of a record's id as a Python string and of its entry in the mapping of its partition."""


@dataclass(frozen=True, slots=True)
class AcceptedReadings:
    """M readings that were accepted from a batch of events, in the order of acceptance.

    Attributes:
        event_indices: (M,) index of each reading's event in the batch.
        record_indices: (M,) row, in the record table, of each reading's record.
        seq: (M,) position of each reading in its record, from 0.
        close_reasons: The records that this batch has ended, in the order in which they ended. The key is the row in
            the record table; the value is the reason: the record is complete, or its window (interval of time) is over.
            Their ids are closed already, but their rows stay readable until `RecordTable.release`.
        missing_event_indices: (D,) index in the batch of each of D accepted events that declare a feature as missing
            ("will not be observed").
        missing_record_indices: (D,) row, in the record table, of the record of each of these events.
        waiting_record_indices: (W,) row, in the record table, of the record of each of W accepted events whose readings
            wait for the end of their time slot. They are not among the M readings.
    """

    event_indices: Ints
    record_indices: Ints
    seq: Ints
    close_reasons: dict[int, CloseReason]
    missing_event_indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    missing_record_indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    waiting_record_indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @staticmethod
    def empty() -> AcceptedReadings:
        """Return an instance with no reading, no closed record and no feature that is declared missing."""
        nothing = np.empty(0, np.int64)
        return AcceptedReadings(nothing, nothing, nothing, {})


class RecordTable:
    """The open records of one consumer, one row (record index) each.

    Each array attribute has one element per row. The number of rows, `capacity`, grows when no row is free. Ids are
    unique within a partition: the same id in two partitions is two records. Times are microseconds since 1970; the
    table reads no clock, so every current time is an argument.

    Args:
        schema: The features that records have.
        max_closed_ids: Largest number of ids of closed records that are kept per partition, and of devices whose
            watermark is kept.
        holds_ties: Whether a tie group (readings of one record with the same event time) is scored together. Its
            readings then wait until no further reading of the group is expected.

    Attributes:
        has_windows: Whether the model was trained on windows (records of one device's readings within an interval of
            event time). A second reading of a feature of a window is then a repeated reading and not a duplicate.
        is_irregular: Whether readings are irregular: a sensor reports any number of times in a record.
        contexts: The bounded contexts of the records, None if readings are not irregular.
        slot_rules: By feature code, which value stands for several readings of a sensor in one time slot. None if all
            of them are "first", so that no reading waits for the end of its slot.
        partitions: The `Partition` of each partition number.
        num_misrouted: How many opened records had an id that was open in another partition, too. This shows that a
            producer sends the readings of one record to several partitions. Only one of `MISROUTED_CHECK_INTERVAL`
            opened records is checked.
        misrouted_example: Record id, partition number and number of the other partition for the latest misrouted
            record; None if there is none.
        record_ids: Id of the record in each row, a list.
        unseen_labels: By row, then by place of the reading in the log: the text of a label that the model does not
            have.
        log: The accepted readings.
        is_open: Whether the row holds an open record.
        partition_ids: Partition number of the record.
        open_order: Sequence number of the opening of the record; larger for records that were opened later.
        model_version: Number of the model version that scores the record.
        last_accepted_at: When the last event of the record was accepted.
        num_readings: Number of accepted readings. If readings are irregular, older ones are dropped from the log, but
            are counted here.
        num_declared_missing: Number of features that an event has declared as "will not be observed".
        observed_mask: (capacity, bytes) bit set of features that were observed or declared missing. Feature f is bit
            f % 8, counted from the least significant, of byte f // 8. If readings are irregular, only those that were
            declared missing are in the set.
        origin: Event time from which the ages of readings are counted: the start of the record's window, else the time
            of its first reading; `NO_TIME` before the first reading. Only if readings are irregular.
        latest_time: (capacity, F) the latest event time of each sensor's readings, `NO_TIME` if there is none. After a
            restart, that of the readings that are still stored. Only if readings are irregular.
        latest_event_time: The latest event time of the record's readings, `NO_TIME` if none of them has a time. Dropped
            readings count, too.
        num_pending: How many readings at the end of the record wait for further readings of their tie group, or waited
            when the record was restored. They are not scored yet.
        tie_time: Event time of the record's last tie group, or of the readings that waited when the record was
            restored; `NO_TIME` if there is none.
        running: Running statistics of the record's scores, of dtype `RUNNING_DTYPE`. Kernels update them in place.
        cusum_states: (capacity, W) float32 states of the record's cumulative sums (`calibration.cusum.StateLayout`).
            Kernels update them in place. Only if readings are irregular.
        alert_seq: Position in the record of the reading that raised the first alert, -1 if there is none.
        alert_alpha: The strictest (smallest) alpha at which the record has alerted, `NO_ALERT` if there is none.
    """

    origin: Ints
    latest_time: Ints
    cusum_states: NDArray[np.float32]

    def __init__(self, schema: Schema, max_closed_ids: int = MAX_CLOSED_IDS, holds_ties: bool = False) -> None:
        self.schema = schema
        self.max_closed_ids = max_closed_ids
        self.holds_ties = holds_ties  # whether readings with the same event time wait for each other (a tie group)
        # Whether the model was trained on windows, so that a second reading of a feature is a repeated reading.
        self.has_windows = schema.window is not None
        self.is_irregular = schema.reading_times is not None
        self.contexts = RecordContexts(len(schema)) if self.is_irregular else None
        # The rule for several readings of a time slot, by feature code. None if every reading is scored at once.
        rules = [schema.per_slot_by_sensor[feature.sensor_name] for feature in schema.features]
        combines_readings = any(rule != "first" for rule in rules) and not self.is_irregular
        self.slot_rules: list[PerSlot] | None = rules if combines_readings else None
        self.partitions: dict[int, Partition] = {}
        # Records whose id is open in another partition, too, and the latest example: id, partition, other partition.
        self.num_misrouted = 0
        self.misrouted_example: tuple[str, int, int] | None = None
        self.record_ids: list[str] = []
        # By row, then by place of the reading in the log: text of a label that the model does not have.
        self.unseen_labels: dict[int, dict[int, str]] = {}
        self.log = ReadingLog(len(schema), holds_ties, self.is_irregular)
        self._num_opened = 0
        self._num_late_tie_groups = 0
        self._free_indices: list[int] = []  # rows without a record
        # Open records, and those with readings that wait for their tie group, by the time of their last event. A queue
        # calls the functions that it is given to skip outdated entries, and to order entries of the same time.
        partitions_of, open_order_of = _refer_weakly(self._partitions_of), _refer_weakly(self._open_order_of)
        self._idle_queue = IdleQueue(_refer_weakly(self._is_latest_event), partitions_of, open_order_of)
        self._pending_queue = IdleQueue(_refer_weakly(self._is_latest_pending), partitions_of, open_order_of)
        # The arrays of the table, at first without rows. `_grow` enlarges those that `_add_array` has registered.
        self._array_names: list[str] = []
        self.is_open: Bools = self._add_array("is_open", np.bool_)
        self.partition_ids: NDArray[np.int32] = self._add_array("partition_ids", np.int32)
        self.open_order: Ints = self._add_array("open_order", np.int64)
        self.model_version: Ints = self._add_array("model_version", np.int64)
        self.last_accepted_at: Ints = self._add_array("last_accepted_at", np.int64)
        self.num_readings: Ints = self._add_array("num_readings", np.int64)
        self.num_declared_missing: Ints = self._add_array("num_declared_missing", np.int64)
        bytes_per_mask = -(-len(schema) // 8)  # one bit per feature, rounded up to bytes
        self.observed_mask: NDArray[np.uint8] = self._add_array("observed_mask", np.uint8, (bytes_per_mask,))
        self.num_pending: Ints = self._add_array("num_pending", np.int64)  # readings that wait for their tie group
        self.tie_time: Ints = self._add_array("tie_time", np.int64)  # event time of the last tie group
        self.running: NDArray[np.void] = self._add_array("running", RUNNING_DTYPE)
        self.alert_seq: NDArray[np.int32] = self._add_array("alert_seq", np.int32)
        self.alert_alpha: Floats = self._add_array("alert_alpha", np.float64)
        self.latest_event_time: Ints = self._add_array("latest_event_time", np.int64)
        if self.is_irregular:
            self.origin = self._add_array("origin", np.int64)
            self.latest_time = self._add_array("latest_time", np.int64, (len(schema),))
            self.cusum_states = self._add_array("cusum_states", np.float32, (StateLayout(len(schema)).width,))
        # Bytes of a record without its readings, for `num_bytes`.
        arrays = [getattr(self, name) for name in self._array_names]
        row_widths = [array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in arrays]
        context_bytes = 0 if self.contexts is None else self.contexts.row_bytes
        self._row_bytes: int = sum(row_widths) + self.log.row_bytes + context_bytes + ID_BYTES

    def _add_array(self, name: str, dtype: Any, row_shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Return a new array with 0 rows, and register it so that `_grow` enlarges it with the table.

        Args:
            name: Attribute in which the caller stores the array.
            dtype: Type of the elements.
            row_shape: Shape of one row; empty for one element per row.
        """
        self._array_names.append(name)
        return np.zeros((0, *row_shape), dtype)

    def __len__(self) -> int:
        """Return the number of open records."""
        return sum(len(partition.record_index_by_id) for partition in self.partitions.values())

    @property
    def capacity(self) -> int:
        """Number of rows of the table, used or free."""
        return len(self.record_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in use, with their ids and readings; compared with the memory limit of open records.

        The number depends on the records only, not on the history of the process. A restarted consumer therefore evicts
        the same records. Arrays are enlarged by doubling, so the process may have up to twice as much allocated.
        """
        num_bytes = (self.capacity - len(self._free_indices)) * self._row_bytes + self.log.num_bytes
        if self.slot_rules is not None:
            num_bytes += SLOT_READING_BYTES * sum(len(p.slot_readings) for p in self.partitions.values())
        return num_bytes

    def bytes_of(self, record_indices: Ints) -> Ints:
        """Return, for each of R records, the bytes of its row, its id and its readings, (R,).

        Args:
            record_indices: (R,) rows of the records.
        """
        num_bytes: Ints = self.log.extent_bytes(record_indices) + self._row_bytes
        if self.slot_rules is not None:
            num_waiting = [
                self.partitions[partition].slot_readings.count(self.record_ids[row])
                for row, partition in zip(
                    record_indices.tolist(), self.partition_ids[record_indices].tolist(), strict=True
                )
            ]
            num_bytes += SLOT_READING_BYTES * np.array(num_waiting, np.int64)
        return num_bytes

    def partition(self, partition_id: int) -> Partition:
        """Return the `Partition` with this number, and create an empty one if the number is new."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            partition = self.partitions[partition_id] = Partition(self.max_closed_ids)
        return partition

    # Opening and closing records

    def allocate(self, record_id: str, partition_id: int, partition: Partition, is_restored: bool = False) -> int:
        """Return a free row of the table for a new record, and register the record's id as open.

        The caller must then pass the row to `initialize`: so far only its `observed_mask` is correct (all zero). The
        two steps are separate, because a batch opens many records one by one and initializes them at once.

        Args:
            record_id: Id of the new record.
            partition_id: Number of its partition.
            partition: The `Partition` of this number.
            is_restored: Whether the record was opened before, so that it is not checked again for being misrouted.
        """
        if not self._free_indices:
            self._grow()
        record_index = self._free_indices.pop()
        self.record_ids[record_index] = record_id
        partition.record_index_by_id[record_id] = record_index
        self._num_opened += 1
        # Whether the id is open in another partition, too. This searches all partitions, so only some ids are checked.
        is_checked = not is_restored and self._num_opened % MISROUTED_CHECK_INTERVAL == 0
        if is_checked and len(self.partitions) > 1:
            self._check_misrouted(record_id, partition_id)
        return record_index

    def _grow(self) -> None:
        """Double the number of rows, to at least `MIN_CAPACITY`. New rows are free and filled with zeros."""
        old_capacity = self.capacity
        new_capacity = max(MIN_CAPACITY, 2 * old_capacity)
        for name in self._array_names:
            array = getattr(self, name)
            larger = np.zeros((new_capacity, *array.shape[1:]), array.dtype)
            larger[:old_capacity] = array
            setattr(self, name, larger)
        self.log.resize(new_capacity)
        if self.contexts is not None:
            self.contexts.resize(new_capacity)
            self.latest_time[old_capacity:] = NO_TIME
        self.record_ids.extend([""] * (new_capacity - old_capacity))
        # In descending order, because `allocate` takes the last free row first: rows are used from the lowest on.
        self._free_indices.extend(range(new_capacity - 1, old_capacity - 1, -1))

    def _check_misrouted(self, record_id: str, partition_id: int) -> None:
        """Count a record that was just opened as misrouted if its id is open in another partition, too.

        The cause is a producer that does not use the record id as the Kafka message key. The readings of one record are
        then spread over partitions and scored as several records.

        Args:
            record_id: Id of the record.
            partition_id: Number of its partition.
        """
        for other_id, partition in self.partitions.items():
            if other_id != partition_id and record_id in partition.record_index_by_id:
                self.num_misrouted += 1
                self.misrouted_example = record_id, partition_id, other_id
                return

    def initialize(self, record_indices: Ints, partition_ids: NDArray[np.int32], model_version: int | Ints) -> None:
        """Set the rows of R new records to the state before their first reading.

        Args:
            record_indices: (R,) rows from the last R calls of `allocate`, in the order of the calls. `open_order`
                numbers the records in this order.
            partition_ids: (R,) partition number of each record.
            model_version: Number of the model version that scores the records: one for all, or (R,).
        """
        self.is_open[record_indices] = True
        self.partition_ids[record_indices] = partition_ids
        # `allocate` counted the records in `_num_opened`, so the last R numbers below it belong to these records.
        self.open_order[record_indices] = np.arange(self._num_opened - len(record_indices), self._num_opened)
        self.model_version[record_indices] = model_version
        self.num_readings[record_indices] = 0
        self.num_declared_missing[record_indices] = 0
        self.alert_seq[record_indices] = -1
        self.alert_alpha[record_indices] = NO_ALERT
        self.num_pending[record_indices] = 0
        self.tie_time[record_indices] = NO_TIME
        self.latest_event_time[record_indices] = NO_TIME
        if self.contexts is not None:
            self.origin[record_indices] = NO_TIME
            self.contexts.initialize(record_indices, self.model_version[record_indices])
        self.reset_scores(record_indices)

    def close(self, record_indices: Sequence[int], reason: CloseReason | Sequence[CloseReason]) -> ClosedRecords:
        """Close records, so that their later events are rejected, and return their final scores.

        The rows of the records stay readable until `release`.

        Args:
            record_indices: Rows of R records.
            reason: Why the records are closed: one reason for all, or R reasons.
        """
        reasons = [reason] * len(record_indices) if isinstance(reason, CloseReason) else list(reason)
        rows = np.array(record_indices, np.int64)
        ids = [self.record_ids[record_index] for record_index in record_indices]
        for record_index, record_id, partition_id in zip(
            record_indices, ids, self.partition_ids[rows].tolist(), strict=True
        ):
            partition = self.partitions[partition_id]
            # The id of a record that ended within a batch is closed already. If the limited set of closed ids has
            # dropped it since, a newer record can have the same id; that record must stay open.
            if partition.record_index_by_id.get(record_id) == record_index:
                partition.close(record_id)
        self.is_open[rows] = False
        return ClosedRecords(
            record_ids=ids,
            reasons=reasons,
            partitions=self.partition_ids[rows],
            num_readings=self.num_readings[rows].astype(np.int32),
            is_complete=self.is_complete(rows),
            log_likelihood=self.running["log_likelihood"][rows],
            anomaly_score=self.running["centered_nll"][rows],
            p_value=self.running["p_value"][rows],
            alert_seq=self.alert_seq[rows],
            alert_alpha=self.alert_alpha[rows],
            score=self.running["max_statistic"][rows],
            latest_time=self.find_latest_times(rows),
            record_p_value=np.full(len(rows), np.nan),  # the engine compares the records with the calibration
        )

    def close_ids(self, partition_id: int, record_ids: Iterable[str]) -> list[int]:
        """Close record ids of one partition, whether or not they have an open record.

        A consumer that replays a log uses this for records that the previous run closed by a decision (such as a
        timeout). Their later events are then rejected, as they were in the previous run.

        Args:
            partition_id: Number of the partition.
            record_ids: Ids of the records.

        Returns:
            The rows of those records that were open.
        """
        partition = self.partition(partition_id)
        closed_indices = [index for record_id in record_ids if (index := partition.close(record_id)) is not None]
        self.is_open[closed_indices] = False
        return closed_indices

    def release(self, record_indices: Collection[int]) -> None:
        """Make the rows of closed records, and the memory of their readings, available to new records."""
        rows = np.fromiter(record_indices, np.int64, len(record_indices))
        self.observed_mask[rows] = 0  # `allocate` returns rows with an empty mask
        if self.contexts is not None:
            self.latest_time[rows] = NO_TIME
            self.contexts.release(rows)
        self.log.free(rows)
        self._free_indices.extend(record_indices)
        if self.unseen_labels:
            for record_index in record_indices:
                self.unseen_labels.pop(record_index, None)

    def drop_partitions(self, partition_ids: Iterable[int]) -> None:
        """Remove partitions, with their closed ids and watermarks. Their records must be closed already."""
        for partition_id in partition_ids:
            self.partitions.pop(partition_id, None)

    def empty_copy(self, schema: Schema, holds_ties: bool) -> RecordTable:
        """Return a new record table without records, for another model.

        The counts of misrouted records and of late tie groups are copied, because they describe the input and not the
        model. A misrouted record has an id that is open in two partitions.

        Args:
            schema: The features of the other model.
            holds_ties: Whether the new table scores tie groups together.
        """
        table = RecordTable(schema, self.max_closed_ids, holds_ties)
        table.num_misrouted, table.misrouted_example = self.num_misrouted, self.misrouted_example
        table._num_late_tie_groups = self._num_late_tie_groups
        return table

    # Reading the table

    def is_complete(self, record_indices: Ints) -> Bools:
        """Return for each of R records whether all its features were observed or declared missing, (R,).

        Args:
            record_indices: (R,) rows of the records.
        """
        if self.is_irregular:
            # Any sensor can report again, unless it is declared as "will not report".
            is_over: Bools = self.num_declared_missing[record_indices] == len(self.schema)
            return is_over
        # A record has at most one reading or declaration of each feature.
        num_observed_or_missing = self.num_readings[record_indices] + self.num_declared_missing[record_indices]
        is_complete: Bools = num_observed_or_missing == len(self.schema)
        return is_complete

    def find_latest_times(self, record_indices: Ints) -> Ints:
        """Return the latest event time of the readings of R records, (R,), `NO_TIME` for a record without one.

        Args:
            record_indices: (R,) rows of the records.
        """
        return self.latest_event_time[record_indices]

    def readings_of(self, record_index: int) -> tuple[Ints, Floats]:
        """Return the feature codes and the raw values of the L stored readings of a record, each (L,), as copies.

        The readings are in the order in which the record stores them: by arrival, except that readings with the same
        event time may be sorted.
        """
        num_stored = int(self.count_stored(np.array([record_index]))[0])
        return self.log.gather(np.int64(record_index), np.arange(num_stored))

    def count_stored(self, record_indices: Ints) -> Ints:
        """Return the number of readings of R records that the log stores, (R,); it drops older irregular readings."""
        return self.find_places(record_indices, self.num_readings[record_indices])

    def find_places(self, record_indices: Ints, positions: Ints) -> Ints:
        """Return the places in the log of M readings, (M,).

        Args:
            record_indices: (M,) row of each reading's record.
            positions: (M,) position of each reading in its record, counted from 0 over all readings. If readings are
                irregular, the readings belong to the current or a later block of their records.
        """
        return positions if self.contexts is None else positions - self.contexts.num_dropped[record_indices]

    def drop_old_readings(self, record_indices: Ints) -> None:
        """Drop the irregular readings of R records on which no prediction depends any more.

        These are the readings that are not in the block of the next reading, and do not belong to its context. The
        result depends on the readings of a record, and not on when this method is called.

        Args:
            record_indices: (R,) rows of records; a row may occur several times. Closed records are left out.
        """
        if self.contexts is None:
            return
        rows = np.unique(record_indices[self.is_open[record_indices]])
        for start in range(0, len(rows), MAX_RECORDS_PER_PASS):
            part = rows[start : start + MAX_RECORDS_PER_PASS]
            kept = self.contexts.enter_blocks(self.log, part, self.num_readings[part])
            if self.unseen_labels:
                self._move_unseen_labels(*kept)

    def _move_unseen_labels(self, rows: Ints, places: Ints, counts: Ints) -> None:
        """Store the labels that the model does not have by the new places of their readings.

        Args:
            rows: (E,) rows of records from whose logs readings were dropped.
            places: (K,) former places of the readings that they still have, record after record.
            counts: (E,) number of these readings.
        """
        ends = np.cumsum(counts)
        for i in np.flatnonzero([row in self.unseen_labels for row in rows.tolist()]).tolist():
            text_by_place = self.unseen_labels.pop(int(rows[i]))
            new_place_by_old = {old: new for new, old in enumerate(places[ends[i] - counts[i] : ends[i]].tolist())}
            kept = {new_place_by_old[old]: text for old, text in text_by_place.items() if old in new_place_by_old}
            if kept:
                self.unseen_labels[int(rows[i])] = kept

    def ages_of(self, record_indices: Ints, places: Ints) -> Floats:
        """Return the ages of M irregular readings, (M,) float64 seconds from the origins of their records.

        An age is negative if the reading is before the origin.

        Args:
            record_indices: (M,) row of each reading's record.
            places: (M,) place of each reading in the log, from 0.
        """
        ages: Floats = (self.log.gather_times(record_indices, places) - self.origin[record_indices]) / 1e6
        return ages

    def count_sensors_seen(self, record_indices: Ints, num_readings: Ints) -> Ints:
        """Return how many different sensors the first readings of R records with irregular readings are from, (R,).

        The readings that were dropped are of sensors that have later readings.

        Args:
            record_indices: (R,) rows of the records; a row may occur several times.
            num_readings: (R,) number of readings of each record to count, from the first.
        """
        record, place = ragged_indices(self.find_places(record_indices, num_readings))
        codes = self.log.gather_features(record_indices[record], place)
        distinct = np.unique(record * len(self.schema) + codes)
        num_sensors: Ints = np.bincount(distinct // len(self.schema), minlength=len(record_indices))
        return num_sensors

    def missing_features(self, record_indices: Ints) -> tuple[Ints, Ints]:
        """Return the A features that were declared missing ("will not be observed") in any of R records.

        Args:
            record_indices: (R,) rows of the records.

        Returns:
            (A,) index into `record_indices` of each feature's record, and (A,) feature codes. They are ordered by the
            index and then by the code.
        """
        # Examine only records with a declaration. Unpack their bit sets to one boolean per record and feature.
        with_missing = np.flatnonzero(self.num_declared_missing[record_indices] > 0)
        rows = record_indices[with_missing]
        mask = np.unpackbits(self.observed_mask[rows], axis=1, count=len(self.schema), bitorder="little")
        is_missing = mask.astype(np.bool_)
        if not self.is_irregular:
            # The mask holds observed and missing features. Those with a reading are observed; the others are missing.
            record_of_reading, place = ragged_indices(self.num_readings[rows])
            observed_codes = self.log.gather_features(rows[record_of_reading], place)
            is_missing[record_of_reading, observed_codes] = False
        record_of_feature, code = np.nonzero(is_missing)
        return with_missing[record_of_feature], code

    def indices_of_partitions(self, partition_ids: Iterable[int] | None = None) -> list[int]:
        """Return the rows of the table that hold open records of some partitions, or of all.

        The rows are ordered by partition number. Within a partition, they are in the order in which the records were
        opened.

        Args:
            partition_ids: Numbers of the partitions, None for all.
        """
        is_selected = self.is_open
        if partition_ids is not None:
            is_selected = is_selected & np.isin(self.partition_ids, list(partition_ids))
        rows = np.flatnonzero(is_selected)
        order = np.lexsort((self.open_order[rows], self.partition_ids[rows]))  # the last key is the primary one
        record_indices: list[int] = rows[order].tolist()
        return record_indices

    def reading_counts(self, record_indices: Iterable[int]) -> dict[int, dict[str, int]]:
        """Return the number of readings of the records in these rows, by partition number and then by record id."""
        counts: dict[int, dict[str, int]] = {}
        for record_index in record_indices:
            count_by_id = counts.setdefault(int(self.partition_ids[record_index]), {})
            count_by_id[self.record_ids[record_index]] = int(self.num_readings[record_index])
        return counts

    # Finding records that have been idle

    def _partitions_of(self, record_indices: Ints) -> NDArray[np.int32]:
        return self.partition_ids[record_indices]

    def _open_order_of(self, record_indices: Ints) -> Ints:
        return self.open_order[record_indices]

    def _is_latest_event(self, record_indices: Ints, times: Ints) -> Bools:
        """Return which of E entries of the queue of idle records are current, (E,).

        The queue orders open records by the time of their last event. Each accepted event adds an entry to it: the row
        of the event's record, and the time. An entry is outdated if the record has been closed or has a later event.
        The queue calls this function to skip outdated entries.

        Args:
            record_indices: (E,) row of each entry's record.
            times: (E,) time of each entry, at which an event of the record was accepted, microseconds since 1970.
        """
        is_latest: Bools = self.is_open[record_indices] & (self.last_accepted_at[record_indices] == times)
        return is_latest

    def _is_latest_pending(self, record_indices: Ints, times: Ints) -> Bools:
        """Return which of E entries of the queue of pending records are current, (E,).

        A pending record has readings that wait for others with the same event time (a tie group). The queue orders
        these records by the time of their last event. An entry is current if its record is open and still pending, and
        has no later event. The queue calls this function to skip the other entries.

        Args:
            record_indices: (E,) row of each entry's record.
            times: (E,) time of each entry, at which an event of the record was accepted, microseconds since 1970.
        """
        has_pending = self.num_pending[record_indices] > 0
        is_latest: Bools = self._is_latest_event(record_indices, times) & has_pending
        return is_latest

    def select_idle(
        self, until: int, excluded_partitions: Collection[int] = (), pending_only: bool = False
    ) -> tuple[list[int], int | None]:
        """Return the open records that have been idle since a time, to close them or to score their waiting readings.

        Args:
            until: Records are selected if their last event was accepted at or before this time, in microseconds since
                1970.
            excluded_partitions: Partitions whose records are not selected. They are being restored: their history is
                still being read, so their records must not be closed.
            pending_only: Select only records with readings that wait for others of the same record with the same event
                time (a tie group).

        Returns:
            First the rows of the selected records, ordered by the time of their last event, then by partition and order
            of opening. Second the earliest time of a last event among the records that are not selected; None if there
            is no such record. The caller need not search again before that record has been idle for too long.
        """
        queue = self._pending_queue if pending_only else self._idle_queue
        selected = queue.select_until(until, excluded_partitions)
        return selected.tolist(), queue.earliest_time(selected)

    def select_longest_idle(
        self,
        num_records: int,
        excluded_partitions: Collection[int] = (),
        num_bytes: int = 0,
        skipped: Collection[int] = (),
    ) -> list[int]:
        """Return the records to close if the table exceeds its limits: those that have been idle for longest.

        Args:
            num_records: At least this number of records is selected.
            excluded_partitions: Partitions whose records are not selected. They are being restored: their history is
                still being read, so their records must not be closed.
            num_bytes: Closing the selected records frees at least this number of bytes.
            skipped: Rows of records that are being closed already. They are not selected, and do not count towards the
                two numbers.

        Returns:
            The rows of the fewest records that suffice, ordered by the time of their last event, then by partition and
            order of opening. If there are not enough records, all that may be selected are returned.
        """
        # Each record frees at least `_row_bytes`, so this number of records suffices (rounded up).
        num_candidates = max(num_records, -(-num_bytes // self._row_bytes), 1)
        while True:
            # Skipped records may be among the longest idle ones, so as many more are requested.
            num_requested = num_candidates + len(skipped)
            candidates = self._idle_queue.select_first(num_requested, excluded_partitions)
            has_all_records = len(candidates) < num_requested
            if skipped:
                candidates = candidates[~np.isin(candidates, list(skipped))]
            # The first k candidates free `freed_bytes[k - 1]`. The fewest that suffice for `num_bytes` are selected.
            freed_bytes = np.cumsum(self.bytes_of(candidates))
            num_for_bytes = int(np.searchsorted(freed_bytes, num_bytes)) + 1 if num_bytes > 0 else 0
            num_selected = max(num_records, num_for_bytes)
            if num_selected <= len(candidates) or has_all_records:
                selected: list[int] = candidates[:num_selected].tolist()
                return selected
            num_candidates *= 2

    # Adding readings

    def has_any_feature(self, record_indices: Ints, features: NDArray[np.int32]) -> bool:
        """Return whether the feature of any of M pairs of a record and a feature was observed or declared missing.

        Args:
            record_indices: (M,) row of each pair's record.
            features: (M,) feature code of each pair.
        """
        byte, bit = self._mask_bits(record_indices, features)
        return bool((self.observed_mask.reshape(-1)[byte] & bit).any())

    def mark_features(self, record_indices: Ints, features: NDArray[np.int32]) -> None:
        """Store for M pairs of a record and a feature that the feature was observed or declared missing.

        Args:
            record_indices: (M,) row of each pair's record.
            features: (M,) feature code of each pair.
        """
        np.bitwise_or.at(self.observed_mask.reshape(-1), *self._mask_bits(record_indices, features))

    def _mask_bits(self, record_indices: Ints, features: NDArray[np.int32]) -> tuple[Ints, NDArray[np.uint8]]:
        """Return, for M pairs of a record and a feature, the byte and the bit of the pair in `observed_mask`.

        Args:
            record_indices: (M,) row of each pair's record.
            features: (M,) feature code of each pair.

        Returns:
            (M,) index of the byte in the flattened mask; and (M,) a number in which only the feature's bit is 1.
        """
        byte = record_indices * self.observed_mask.shape[1] + (features >> 3)  # features // 8
        bit = np.left_shift(1, features & 7).astype(np.uint8)  # 2 ** (features % 8)
        return byte, bit

    def view_mask(self) -> tuple[memoryview, int]:
        """Return the bytes of `observed_mask` as a flat view, and the number of bytes per row.

        It is for code that tests and sets single bits, which is faster in a memoryview than in an array. The view is
        outdated after the next call of `allocate`, which may replace the array by a larger one.
        """
        return self.observed_mask.reshape(-1).data, self.observed_mask.shape[1]

    def view_latest_times(self) -> memoryview:
        """Return the elements of `latest_time` as a flat view: that of sensor f of the record in row r is at r · F + f.

        Like `view_mask`, it is for code that reads and writes single elements, and is outdated after the next call of
        `allocate`.
        """
        return self.latest_time.reshape(-1).data

    def add_readings(
        self, accepted: AcceptedReadings, batch: EventBatch, touched: Ints, num_readings: Ints, now: int
    ) -> None:
        """Write the accepted readings of a batch to the log, and count them and the declarations of missing features.

        The bits of their features in `observed_mask` must be set already. The timeouts of the records restart.

        Args:
            accepted: The accepted readings.
            batch: The events to which their event indices refer.
            touched: (T,) rows of the records with accepted events, each once.
            num_readings: (T,) number of readings of each of these records, earlier and accepted ones together.
            now: Time of arrival, microseconds since 1970.
        """
        # Reserve memory for earlier and accepted readings together, then write the accepted ones.
        self.log.reserve(touched, self.count_stored(touched), self.find_places(touched, num_readings))
        features, values = batch.features[accepted.event_indices], batch.values[accepted.event_indices]
        self.log.write(
            accepted.record_indices, self.find_places(accepted.record_indices, accepted.seq), features, values
        )
        if len(accepted.missing_record_indices):
            # Unlike `+=`, `add.at` counts a row as often as it occurs: a record can have several declared features.
            np.add.at(self.num_declared_missing, accepted.missing_record_indices, 1)
        np.maximum.at(self.latest_event_time, accepted.record_indices, batch.times[accepted.event_indices])
        self.num_readings[touched] = num_readings
        self.touch(touched, now)

    def set_origins(self, record_indices: Ints, origins: Ints) -> None:
        """Store the times from which the ages of the irregular readings of R records are counted.

        Args:
            record_indices: (R,) rows of the records.
            origins: (R,) event times, microseconds since 1970.
        """
        self.origin[record_indices] = origins

    def mark_closed(self, record_indices: Ints) -> None:
        """Store that R records whose ids are closed already (`Partition.close`) are not open any more.

        Args:
            record_indices: (R,) rows of the records.
        """
        self.is_open[record_indices] = False

    # Changing what is known about a record

    def touch(self, record_indices: Ints, now: int) -> None:
        """Store that events of R records were accepted now, which restarts the timeouts of these records.

        Args:
            record_indices: (R,) rows of the records.
            now: Current time, microseconds since 1970.
        """
        self.last_accepted_at[record_indices] = now
        self._idle_queue.push(record_indices, now)
        if self.holds_ties:
            # The timeout of a tie group restarts with every event of its record, even one without a reading (an event
            # that declares a feature as missing).
            self._pending_queue.push(record_indices[self.num_pending[record_indices] > 0], now)

    def reset_scores(self, record_indices: Ints) -> None:
        """Set the running statistics of the records in these rows to their values before the first reading."""
        self.running[record_indices] = INITIAL_RUNNING
        if self.is_irregular:
            self.cusum_states[record_indices] = create_states(len(record_indices), len(self.schema))

    def set_p_values(self, record_indices: Ints, p_values: Floats) -> None:
        """Store the current p-value of each of R records.

        Args:
            record_indices: (R,) rows of the records.
            p_values: (R,) p-values.
        """
        self.running["p_value"][record_indices] = p_values

    def mark_alerted(self, record_index: int, alert: AlertState) -> None:
        """Store that a record has alerted, so that it alerts again only at a stricter (smaller) alpha.

        Args:
            record_index: Row of the record.
            alert: The position of the reading that raised the alert, and the alpha (false-alarm rate). The table keeps
                the position of the first alert and the strictest alpha of all alerts.
        """
        if self.alert_seq[record_index] < 0:  # the record's first alert
            self.alert_seq[record_index] = alert.seq
        self.alert_alpha[record_index] = min(self.alert_alpha[record_index], alert.alpha)

    def set_pending(self, record_indices: Ints, num_pending: Ints, tie_time: Ints) -> None:
        """Store the state of the last tie group of R records.

        Args:
            record_indices: (R,) rows of the records.
            num_pending: (R,) how many readings at the end of each record wait for further readings of the group.
            tie_time: (R,) event time of the group, microseconds since 1970; `NO_TIME` if there is no group.
        """
        self.num_pending[record_indices] = num_pending
        self.tie_time[record_indices] = tie_time
        # The queue orders records with waiting readings by their last event, to find those whose wait is too long.
        waiting = record_indices[num_pending > 0]
        self._pending_queue.push(waiting, self.last_accepted_at[waiting])

    def add_pending(self, record_indices: Ints) -> None:
        """Store that M readings, the last ones of their records, are pending like the readings before them.

        Args:
            record_indices: (M,) row of each reading's record; a row may occur several times.
        """
        np.add.at(self.num_pending, record_indices, 1)

    def clear_pending(self, record_indices: Ints) -> None:
        """Store that the records in these rows have no reading that waits for its tie group.

        A tie group is the readings of one record with the same event time. No further reading of it is expected, so its
        readings are scored.
        """
        self.num_pending[record_indices] = 0

    def add_late_tie_groups(self, num_groups: int) -> None:
        """Add to the number of late tie groups, which a metric reports.

        A tie group is late if its time is not after that of the group before it in the record.
        """
        self._num_late_tie_groups += num_groups

    def pop_late_tie_groups(self) -> int:
        """Return the number of late tie groups since the last call, and set it to 0.

        A tie group is late if its time is not after that of the group before it in the record.
        """
        num_groups, self._num_late_tie_groups = self._num_late_tie_groups, 0
        return num_groups

    def add_unseen_label(self, record_index: int, place: int, text: str) -> None:
        """Store the text of a label that the model does not have, so that alerts and snapshots can contain it.

        Args:
            record_index: Row of the record.
            place: Place of the reading in the log, from 0.
            text: The label.
        """
        self.unseen_labels.setdefault(record_index, {})[place] = text

    def reorder_readings(self, record_indices: Ints, places: Ints, order: Ints) -> None:
        """Rearrange M readings within their records, so that readings with the same event time have a fixed order.

        Args:
            record_indices: (M,) row of each reading's record.
            places: (M,) position of each reading in its record, from 0.
            order: (M,) permutation of the M readings: reading `order[i]` moves to the position of reading i. Both must
                be of the same record.
        """
        features, values = self.log.gather(record_indices, places)
        self.log.write(record_indices, places, features[order], values[order])
        # Texts of unseen labels (labels that the model does not have) move with their readings. All are removed before
        # any is stored, so none is overwritten.
        moved = np.flatnonzero(order != np.arange(len(order)))
        text_by_target = {}
        for target, origin in zip(moved.tolist(), order[moved].tolist(), strict=True):
            text = self.unseen_labels.get(int(record_indices[origin]), {}).pop(int(places[origin]), None)
            if text is not None:
                text_by_target[target] = text
        for target, text in text_by_target.items():
            self.unseen_labels[int(record_indices[target])][int(places[target])] = text

    def restore_records(
        self,
        record_indices: Ints,
        *,
        last_accepted_at: Ints,
        num_readings: NDArray[np.int32],
        features: NDArray[np.int16],
        values: Floats,
        num_declared_missing: NDArray[np.int32],
        missing_features: NDArray[np.int16],
        running: NDArray[np.void],
        alert_seq: NDArray[np.int32],
        alert_alpha: Floats,
        num_dropped: Ints | None = None,
        latest_event_time: Ints | None = None,
        cusum_states: NDArray[np.float32] | None = None,
    ) -> None:
        """Store the readings and scores of R records from a snapshot (the saved state of a partition).

        The rows must be initialized already. The records have T readings in total, and A features are declared missing
        ("will not be observed").

        Args:
            record_indices: (R,) rows of the records.
            last_accepted_at: (R,) when the last event of each record was accepted, microseconds since 1970.
            num_readings: (R,) number of readings of each record in the snapshot.
            features: (T,) feature codes of the readings, one record after the other.
            values: (T,) raw values of the readings, in the same order.
            num_declared_missing: (R,) number of features of each record that are declared missing.
            missing_features: (A,) codes of these features, one record after the other.
            running: (R,) running statistics, of dtype `RUNNING_DTYPE`.
            alert_seq: (R,) position of the reading that raised the first alert, -1 if there is none.
            alert_alpha: (R,) strictest (smallest) alpha at which the record alerted, `NO_ALERT` if there is none.
            num_dropped: (R,) number of older irregular readings of each record that the snapshot does not have; None if
                readings are not irregular.
            latest_event_time: (R,) latest event time of the readings of each record, `NO_TIME` if there is none. None
                if the snapshot does not have it.
            cusum_states: (R, W) states of the cumulative sums. None if the snapshot does not have them: they stay as
                they are before the first reading.
        """
        self.last_accepted_at[record_indices] = last_accepted_at
        self.num_readings[record_indices] = num_readings
        if self.contexts is not None and num_dropped is not None:
            self.num_readings[record_indices] += num_dropped
            self.contexts.restore(record_indices, num_dropped)
        self.num_declared_missing[record_indices] = num_declared_missing
        self.log.reserve(record_indices, np.zeros(len(record_indices), np.int64), num_readings.astype(np.int64))
        record, place = ragged_indices(num_readings)
        self.log.write(record_indices[record], place, features, values)
        if self.holds_ties:
            # Each reading is a group of its own, until `restore_ties` stores the tie groups.
            self.log.mark_tied(record_indices[record], place, np.zeros(len(record), np.bool_))
        # One boolean per record and feature, then packed to the bit set of `observed_mask`.
        is_observed_or_missing = np.zeros((len(record_indices), len(self.schema)), np.bool_)
        if not self.is_irregular:  # otherwise the bit set holds only the features that are declared missing
            is_observed_or_missing[record, features] = True
        record_of_missing, _ = ragged_indices(num_declared_missing)
        is_observed_or_missing[record_of_missing, missing_features] = True
        self.observed_mask[record_indices] = np.packbits(is_observed_or_missing, axis=1, bitorder="little")
        self.running[record_indices] = running
        self.alert_seq[record_indices] = alert_seq
        self.alert_alpha[record_indices] = alert_alpha
        if latest_event_time is not None:
            self.latest_event_time[record_indices] = latest_event_time
        if cusum_states is not None:
            self.cusum_states[record_indices] = cusum_states
        self._idle_queue.push(record_indices, last_accepted_at)

    def restore_times(self, record_indices: Ints, origins: Ints, times: Ints) -> None:
        """Store when the irregular readings of R restored records were made.

        It must be called after `restore_records`. The records have T readings in total.

        Args:
            record_indices: (R,) rows of the records.
            origins: (R,) event time from which the ages of each record's readings are counted, `NO_TIME` if the record
                has no reading.
            times: (T,) event times of the readings, one record after the other, microseconds since 1970.
        """
        self.set_origins(record_indices, origins)
        record, place = ragged_indices(self.count_stored(record_indices))
        rows = record_indices[record]
        codes = self.log.gather_features(rows, place)
        np.maximum.at(self.latest_time, (rows, codes), times)
        # The snapshot may have the latest time, which can be that of a dropped reading.
        np.maximum.at(self.latest_event_time, rows, times)
        self.log.write_times(rows, place, times)

    def restore_ties(
        self, record_indices: Ints, is_tied: Bools, num_pending: NDArray[np.int32], tie_time: Ints
    ) -> None:
        """Store which readings of R restored records form tie groups.

        It must be called after `restore_records`. The records have T readings in total.

        Args:
            record_indices: (R,) rows of the records.
            is_tied: (T,) for each reading, one record after the other: whether it belongs to the same tie group as the
                reading before it.
            num_pending: (R,) how many readings at the end of each record wait for further readings of their tie group.
            tie_time: (R,) event time of each record's last tie group, microseconds since 1970; `NO_TIME` if none.
        """
        record, place = ragged_indices(self.num_readings[record_indices])
        self.log.mark_tied(record_indices[record], place, is_tied)
        self.set_pending(record_indices, num_pending.astype(np.int64), tie_time)


def _refer_weakly(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that calls a method of an object, without keeping the object in memory.

    A part of an object can call the object by it. If both kept each other, their memory would not be free as soon as
    they are no longer used, but only when the garbage collector searches all objects, which it does rarely.

    Args:
        method: The method.

    Raises:
        InvariantViolated: By the function that is returned: the object is no longer in memory.
    """
    reference, method_name = weakref.WeakMethod(method), method.__qualname__

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the method."""
        found = reference()
        if found is None:
            raise InvariantViolated(f"{method_name} is called, but its object is no longer in memory")
        return found(*args, **kwargs)

    return call
