"""The record table against plain dictionaries, by stateful property testing."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

import deformer_stream.engine
from deformer_stream.engine import idle_queue
from deformer_stream.engine.events import NO_TIME, CloseReason, EventBatch, RejectionReason, WindowMembership
from deformer_stream.engine.ingest import ingest
from deformer_stream.engine.records import MISROUTED_CHECK_INTERVAL, RecordTable
from deformer_stream.engine.snapshot import export_state, import_state
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))

RecordKey = tuple[int, str]
"""Partition and id of a record: the same id in two partitions is two records."""

EventTuple = tuple[int, str, int, float]
"""Partition, record id, feature code and value (NaN for "will not be observed")."""

record_ids = st.sampled_from("abcdefgh")
values = st.one_of(st.floats(-1, 1), st.just(float("nan")))


class RecordTableMachine(RuleBasedStateMachine):
    """Applies each operation to a `RecordTable` and to dictionaries, and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(idle_queue, "MIN_ENTRIES_TO_COMPACT", 8)
        self.patch.setattr(idle_queue, "SLICE_SIZE", 2)
        self.records = RecordTable(SCHEMA, max_closed_ids=5)
        self.open: dict[RecordKey, dict[int, float]] = {}
        self.last_accepted_at: dict[RecordKey, int] = {}
        self.closed: dict[int, list[str]] = {partition: [] for partition in range(3)}
        self.now = 0

    def teardown(self) -> None:
        self.patch.undo()

    def close_expected(self, partition: int, record_id: str) -> None:
        """Close a record in the dictionaries."""
        self.open.pop((partition, record_id), None)
        self.last_accepted_at.pop((partition, record_id), None)
        if record_id not in self.closed[partition]:
            self.closed[partition] = [*self.closed[partition], record_id][-5:]

    def keys_of(self, record_indices: Iterable[int]) -> list[RecordKey]:
        return [(int(self.records.partition_ids[index]), self.records.record_ids[index]) for index in record_indices]

    def close(self, record_indices: list[int], reason: CloseReason) -> None:
        """Close records in the table and free their rows."""
        closed = self.records.close(record_indices, reason)
        assert list(zip(closed.partitions.tolist(), closed.record_ids, strict=True)) == self.keys_of(record_indices)
        self.records.release(record_indices)

    def longest_idle_first(self, keys: Iterable[RecordKey]) -> list[RecordKey]:
        """Return the keys in the order in which the table selects records; ties go by partition and opening."""
        open_order = list(self.open)
        return sorted(keys, key=lambda key: (self.last_accepted_at[key], key[0], open_order.index(key)))

    @rule(
        events=st.lists(st.tuples(st.integers(0, 2), record_ids, st.integers(0, 3), values), max_size=12),
        elapsed=st.integers(0, 1),
    )
    def ingest_events(self, events: list[EventTuple], elapsed: int) -> None:
        self.now += elapsed
        self.ingest(events)

    @rule(
        partition=st.integers(0, 2),
        rows=st.lists(
            st.tuples(record_ids, st.dictionaries(st.integers(0, 3), values, min_size=1, max_size=4)), max_size=6
        ),
    )
    def ingest_rows(self, partition: int, rows: list[tuple[str, dict[int, float]]]) -> None:
        """Rows of a table, whose records may be open, closed or unknown."""
        self.now += 1
        events = [(partition, record_id, f, v) for record_id, readings in rows for f, v in readings.items()]
        self.ingest(events, np.cumsum([0, *(len(readings) for _, readings in rows)]))

    def ingest(self, events: list[EventTuple], row_boundaries: NDArray[np.int64] | None = None) -> None:
        """Ingest a batch in the table and in the dictionaries."""
        accepted, rejections = ingest(self.records, make_batch(events, row_boundaries), self.now, model_version=0)
        expected, expected_rejections, complete = [], [], []
        for i, (partition, record_id, feature, value) in enumerate(events):
            key = partition, record_id
            if key not in self.open and record_id in self.closed[partition]:
                expected_rejections.append((i, RejectionReason.LATE))
                continue
            readings = self.open.setdefault(key, {})
            if feature in readings:
                expected_rejections.append((i, RejectionReason.DUPLICATE))
                continue
            readings[feature] = value
            self.last_accepted_at[key] = self.now
            if not np.isnan(value):
                expected.append((i, sum(not np.isnan(v) for v in readings.values()) - 1))
            if len(readings) == 4:
                complete.append(key)
                self.close_expected(*key)
        assert list(zip(accepted.event_indices.tolist(), accepted.seq.tolist(), strict=True)) == expected
        assert [(rejection.message_index, rejection.reason) for rejection in rejections] == expected_rejections
        assert self.keys_of(accepted.close_reasons) == complete
        features, values = self.records.log.gather(accepted.record_indices, accepted.seq)
        assert features.tolist() == [events[event][2] for event in accepted.event_indices]
        assert values.tolist() == [events[event][3] for event in accepted.event_indices]
        closed = self.records.close(list(accepted.close_reasons), list(accepted.close_reasons.values()))
        assert closed.is_complete.all()
        self.records.release(list(accepted.close_reasons))

    @rule(age=st.integers(0, 3), restoring=st.sets(st.integers(0, 2), max_size=2))
    def close_idle_records(self, age: int, restoring: set[int]) -> None:
        record_indices, earliest = self.records.select_idle(self.now - age, restoring)
        is_idle = (k for k, at in self.last_accepted_at.items() if at <= self.now - age and k[0] not in restoring)
        expected = self.longest_idle_first(is_idle)
        assert self.keys_of(record_indices) == expected
        other_times = [at for key, at in self.last_accepted_at.items() if key not in expected]
        assert earliest == (min(other_times) if other_times else None)
        self.close(record_indices, CloseReason.TIMEOUT)
        for key in expected:
            self.close_expected(*key)

    @rule(
        num_records=st.integers(1, 3),
        restoring=st.sets(st.integers(0, 2), max_size=1),
        num_skipped=st.integers(0, 2),
        is_closed=st.booleans(),
    )
    def evict_records(self, num_records: int, restoring: set[int], num_skipped: int, is_closed: bool) -> None:
        skipped = list(self.open)[:num_skipped]
        rows = [self.records.partitions[partition].record_index_by_id[record_id] for partition, record_id in skipped]
        record_indices = self.records.select_longest_idle(num_records, restoring, skipped=rows)
        candidates = (key for key in self.open if key[0] not in restoring and key not in skipped)
        expected = self.longest_idle_first(candidates)[:num_records]
        assert self.keys_of(record_indices) == expected
        if is_closed:
            self.close(record_indices, CloseReason.EVICTED)
            for key in expected:
                self.close_expected(*key)

    @rule(num_bytes=st.integers(1, 2000))
    def select_records_by_bytes(self, num_bytes: int) -> None:
        """The shortest prefix of the longest idle records that frees the bytes."""
        record_indices = self.records.select_longest_idle(0, num_bytes=num_bytes)
        assert self.keys_of(record_indices) == self.longest_idle_first(self.open)[: len(record_indices)]
        freed_bytes = self.records.bytes_of(np.array(record_indices, np.int64))
        assert freed_bytes.sum() >= num_bytes or len(record_indices) == len(self.open)
        assert freed_bytes[:-1].sum() < num_bytes

    @rule(partition=st.integers(0, 2))
    def revoke_partition(self, partition: int) -> None:
        """Nothing remains of a revoked partition, not even its closed ids."""
        self.drop(partition)
        self.open = {key: readings for key, readings in self.open.items() if key[0] != partition}
        self.last_accepted_at = {key: at for key, at in self.last_accepted_at.items() if key[0] != partition}
        self.closed[partition] = []

    @rule(partition=st.integers(0, 2), downtime=st.integers(0, 5))
    def restart_partition(self, partition: int, downtime: int) -> None:
        """A partition comes back from its snapshot, with the ages that its records had."""
        snapshot = export_state(self.records, partition, self.now, {0: "model"})
        self.drop(partition)
        restored_at = self.now + downtime
        import_state(self.records, partition, snapshot, restored_at, np.zeros(len(snapshot), np.int64))
        for key in self.last_accepted_at:
            if key[0] == partition:
                self.last_accepted_at[key] += downtime
        reopened = {key: readings for key, readings in self.open.items() if key[0] == partition}
        self.open = {key: readings for key, readings in self.open.items() if key[0] != partition} | reopened

    def drop(self, partition: int) -> None:
        """Close the records of a partition in the table, and drop the partition."""
        record_indices = self.records.indices_of_partitions([partition])
        in_open_order = [key for key in self.open if key[0] == partition]
        assert self.keys_of(record_indices) == in_open_order
        self.close(record_indices, CloseReason.REVOKED)
        self.records.drop_partitions([partition])

    @rule(partition=st.integers(0, 2), ids=st.lists(record_ids, max_size=3, unique=True))
    def close_ids(self, partition: int, ids: list[str]) -> None:
        """Decisions of a previous run close ids, whether their records are open or not."""
        record_indices = self.records.close_ids(partition, ids)
        was_open = [(partition, record_id) for record_id in ids if (partition, record_id) in self.open]
        assert self.keys_of(record_indices) == was_open
        self.records.release(record_indices)
        for record_id in ids:
            self.close_expected(partition, record_id)

    @invariant()
    def table_agrees_with_dictionaries(self) -> None:
        partitions = self.records.partitions
        keys = {(p, record_id) for p, partition in partitions.items() for record_id in partition.record_index_by_id}
        assert keys == self.open.keys()
        for partition, closed in self.closed.items():
            assert list(partitions[partition].closed_ids if partition in partitions else []) == closed
        assert int(self.records.is_open.sum()) == len(self.open) == len(self.records)
        assert len(self.records._free_indices) + len(self.open) == self.records.capacity
        rows = []
        for (partition, record_id), readings in self.open.items():
            record_index = partitions[partition].record_index_by_id[record_id]
            observed = [feature for feature, value in readings.items() if not np.isnan(value)]
            assert self.records.num_readings[record_index] == len(observed)
            assert self.records.num_declared_missing[record_index] == len(readings) - len(observed)
            assert self.records.readings_of(record_index)[0].tolist() == observed
            rows.append(record_index)
        assert self.records.num_bytes == self.records.bytes_of(np.array(rows, np.int64)).sum()


def make_batch(events: list[EventTuple], row_boundaries: NDArray[np.int64] | None = None) -> EventBatch:
    """Return a batch of events without times, one message each."""
    n = len(events)
    return EventBatch(
        [record_id for _, record_id, _, _ in events],
        np.array([feature for _, _, feature, _ in events], np.int32),
        np.array([value for _, _, _, value in events], np.float64),
        np.full(n, NO_TIME, np.int64),
        np.arange(n, dtype=np.int32),
        np.array([partition for partition, _, _, _ in events], np.int32),
        row_boundaries=row_boundaries,
    )


def test_vectorized_and_sequential_ingest_leave_the_same_table() -> None:
    """With missing values, labels that the model does not have, and incomplete rows."""
    rng = np.random.default_rng(0)
    features_by_row = [rng.permutation(4)[: rng.integers(1, 5)] for _ in range(100)]
    features = np.concatenate(features_by_row).astype(np.int32)
    boundaries = np.cumsum([0, *map(len, features_by_row)])
    n = len(features)
    values = np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n))
    unseen_labels = {int(i): f"text {i}" for i in np.flatnonzero(~np.isnan(values))[::7]}
    ids = [f"r{row}" for row, some in enumerate(features_by_row) for _ in some]
    partitions, times = np.full(n, 3, np.int32), np.full(n, NO_TIME)
    in_rows = EventBatch(ids, features, values, times, features, partitions, unseen_labels, row_boundaries=boundaries)
    single_events = replace(in_rows, row_boundaries=None)
    sequential = replace(single_events, windows=WindowMembership([""] * n, np.zeros(n, np.int64)))
    tables = []
    for batch in (in_rows, single_events, sequential):
        records = RecordTable(SCHEMA)
        accepted, rejections = ingest(records, batch, 5, model_version=2)
        assert not rejections
        names = ("open_order", "num_readings", "num_declared_missing", "is_open", "last_accepted_at", "partition_ids")
        columns = {name: getattr(records, name)[:100].tolist() for name in (*names, "model_version", "observed_mask")}
        logs = [[part.tolist() for part in records.readings_of(record_index)] for record_index in range(100)]
        fields = [getattr(accepted, name).tolist() for name in ("event_indices", "record_indices", "seq")]
        partition = records.partition(3)
        ids_by_state = list(partition.closed_ids), partition.record_index_by_id
        tables.append((columns, logs, fields, accepted.close_reasons, records.unseen_labels, ids_by_state))
    assert tables[0] == tables[1] == tables[2]
    assert 10 < len(tables[0][3]) < 90


def one_reading_each(ids: list[str], partitions: list[int]) -> EventBatch:
    return make_batch([(partition, record_id, 0, 0.0) for record_id, partition in zip(ids, partitions, strict=True)])


def test_record_that_is_fed_through_several_partitions_is_counted_as_misrouted() -> None:
    records = RecordTable(SCHEMA)
    ids = [f"r{i // 3}" for i in range(300)]
    ingest(records, one_reading_each(ids, [i % 3 for i in range(300)]), 0, model_version=0)
    assert len(records) == 300
    assert 0 < records.num_misrouted <= 300 // MISROUTED_CHECK_INTERVAL
    assert records.misrouted_example is not None
    record_id, partition, other = records.misrouted_example
    assert partition != other
    assert {partition, other} <= {i % 3 for i, candidate in enumerate(ids) if candidate == record_id}


def test_records_with_one_partition_each_are_not_misrouted() -> None:
    records = RecordTable(SCHEMA)
    ingest(records, one_reading_each([f"r{i}" for i in range(300)], [i % 3 for i in range(300)]), 0, model_version=0)
    assert (records.num_misrouted, records.misrouted_example) == (0, None)


def test_record_with_one_of_1000_features_takes_few_bytes() -> None:
    """A row of fixed width took 10.7 KB. The limit includes 125 bytes of the observed mask and 200 for the id."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(1000)))
    records = RecordTable(schema)
    num_records = 2**14
    ingest(records, one_reading_each([f"r{i}" for i in range(num_records)], [0] * num_records), 0, model_version=0)
    assert records.num_bytes / num_records < 600
    arrays = [array for owner in (records, records.log) for array in vars(owner).values()]
    allocated = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert allocated / num_records < 500, "arrays that have just been doubled included"


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), record_ids, st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=40
    )
)
def test_pending_records_are_selected_by_the_time_of_their_last_event(
    steps: list[tuple[int, str, int, bool, int]],
) -> None:
    """Each step is an event; then the record gets a waiting reading or none. A missing value keeps what waits."""
    records = RecordTable(SCHEMA, holds_ties=True)
    pending: dict[RecordKey, int] = {}
    for now, (partition, record_id, feature, is_pending, age) in enumerate(steps):
        value = float("nan") if feature == 3 else 0.0
        accepted, rejections = ingest(
            records, make_batch([(partition, record_id, feature, value)]), now, model_version=0
        )
        key = partition, record_id
        if not rejections and len(accepted.record_indices):
            tie_time = np.array([now])
            records.set_pending(accepted.record_indices, np.array([int(is_pending)]), tie_time)
            pending.pop(key, None)
            if is_pending:
                pending[key] = now
        elif not rejections and key in pending:
            pending[key] = now
        record_indices, earliest = records.select_idle(now - age, excluded_partitions={2}, pending_only=True)
        if accepted.close_reasons:
            pending.pop(key, None)
            records.release(list(accepted.close_reasons))
        keys = [(int(records.partition_ids[index]), records.record_ids[index]) for index in record_indices]
        expected = sorted((k for k, at in pending.items() if at <= now - age and k[0] != 2), key=pending.__getitem__)
        assert keys == expected
        assert earliest == min((at for k, at in pending.items() if k not in expected), default=None)


def array_attributes() -> set[str]:
    """Return the names of the array attributes of a record table."""
    return {name for name, value in vars(RecordTable(SCHEMA)).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(
    "path", sorted(Path(*deformer_stream.engine.__path__).glob("*.py")), ids=lambda path: path.stem
)
def test_no_other_module_assigns_to_arrays_of_the_record_table(path: Path) -> None:
    names = array_attributes()
    assert {"is_open", "running", "alert_alpha", "num_pending"} <= names
    assignments = [
        f"{path.name}:{target.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for target in assigned_targets(node)
        if (attribute := outermost_attribute(target)) is not None and attribute.attr in names and is_table(attribute)
    ]
    assert (assignments != []) == (path.name == "records.py"), assignments


def assigned_targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to, and the first arguments of in-place NumPy calls such as `np.add.at`."""
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in ast.walk(target)]
        return [target for target in targets if isinstance(target, ast.Subscript | ast.Attribute)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        is_in_place = node.func.attr in ("at", "copyto", "put", "place", "putmask")
        return [node.args[0]] if is_in_place else []
    return []


def outermost_attribute(target: ast.expr) -> ast.Attribute | None:
    """Return the attribute that a target such as `records.running["p_value"][rows]` belongs to."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target if isinstance(target, ast.Attribute) else None


def is_table(attribute: ast.Attribute) -> bool:
    """Return whether the owner of an attribute is called like a record table: `records`, `self.records`, or `self`."""
    owner = attribute.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name in ("records", "table", "self")


RecordTableMachine.TestCase.settings = settings(max_examples=num_examples(100), stateful_step_count=30, deadline=None)
TestRecordTable = RecordTableMachine.TestCase
