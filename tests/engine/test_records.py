"""Records against a plain dictionary model, by stateful testing; and the cache likewise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME, CloseReason, EventBatch, RejectionReason, WindowMembership
from deformer_stream.engine.records import MISROUTED_CHECK_INTERVAL, RecordTable
from deformer_stream.kernels.kv_cache import PAGE_TOKENS, KeyValueCache
from deformer_stream.model.deformer import DEformer, ModelConfig, StepOutput
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))


Key = tuple[int, str]
"""Partition and id: the same id in two partitions is two records."""


class RecordsMachine(RuleBasedStateMachine):
    """Every step is done twice: by `Records` and by dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.records = RecordTable(SCHEMA, remembered=5)
        self.open: dict[Key, dict[int, float]] = {}
        self.last: dict[Key, int] = {}
        self.closed: dict[int, list[str]] = {source: [] for source in range(3)}
        self.now = 0

    def remember(self, source: int, record: str) -> None:
        self.open.pop((source, record), None)
        self.last.pop((source, record), None)
        if record not in self.closed[source]:
            self.closed[source] = [*self.closed[source], record][-5:]

    def keys(self, slots: list[int]) -> list[Key]:
        return [(int(self.records.partition_ids[slot]), self.records.record_ids[slot]) for slot in slots]

    def end(self, slots: list[int], reason: CloseReason) -> None:
        closed = self.records.close(slots, reason)
        assert list(zip(closed.partitions.tolist(), closed.record_ids, strict=True)) == self.keys(slots)
        self.records.release(slots)

    def in_order(self, keys: Iterable[Key]) -> list[Key]:
        """The longest silent first; of those, by partition and opening."""
        opened = list(self.open)
        return sorted(keys, key=lambda key: (self.last[key], key[0], opened.index(key)))

    @rule(
        events=st.lists(
            st.tuples(
                st.integers(0, 2),
                st.sampled_from("abcdefgh"),
                st.integers(0, 3),
                st.one_of(st.floats(-1, 1), st.just(float("nan"))),
            ),
            max_size=12,
        )
    )
    def arrive(self, events: list[tuple[int, str, int, float]]) -> None:
        self.enter(events)

    @rule(
        source=st.integers(0, 2),
        rows=st.lists(
            st.tuples(
                st.sampled_from("abcdefgh"),
                st.dictionaries(
                    st.integers(0, 3), st.one_of(st.floats(-1, 1), st.just(float("nan"))), min_size=1, max_size=4
                ),
            ),
            max_size=6,
        ),
    )
    def arrive_in_rows(self, source: int, rows: list[tuple[str, dict[int, float]]]) -> None:
        """Whatever is known of their records by then."""
        events = [(source, record, f, v) for record, readings in rows for f, v in readings.items()]
        self.enter(events, np.cumsum([0, *(len(readings) for _, readings in rows)]))

    def enter(self, events: list[tuple[int, str, int, float]], rows: NDArray[np.int64] | None = None) -> None:
        self.now += 1
        n = len(events)
        batch = EventBatch(
            [r for _, r, _, _ in events],
            np.array([f for _, _, f, _ in events], np.int32),
            np.array([v for _, _, _, v in events], np.float64),
            np.full(n, NO_TIME, np.int64),
            np.arange(n, dtype=np.int32),
            np.array([s for s, _, _, _ in events], np.int32),
            row_boundaries=rows,
        )
        accepted, rejected = self.records.ingest(batch, self.now)
        expected, refused, complete = [], [], []
        for i, (source, record, feature, value) in enumerate(events):
            key = source, record
            if key not in self.open and record in self.closed[source]:
                refused.append((i, RejectionReason.LATE))
                continue
            row = self.open.setdefault(key, {})
            if feature in row:
                refused.append((i, RejectionReason.DUPLICATE))
                continue
            row[feature] = value
            self.last[key] = self.now
            if not np.isnan(value):
                expected.append((i, sum(not np.isnan(v) for v in row.values()) - 1))
            if len(row) == 4:
                complete.append(key)
                self.remember(*key)
        assert list(zip(accepted.event_indices.tolist(), accepted.seq.tolist(), strict=True)) == expected
        assert [(r.message_index, r.reason) for r in rejected] == refused
        assert self.keys(list(accepted.close_reasons)) == complete
        for event, slot, seq in zip(accepted.event_indices, accepted.record_indices, accepted.seq, strict=True):
            assert self.records.log_feature[slot, seq] == events[event][2]
            assert self.records.log_value[slot, seq] == events[event][3]
        closed = self.records.close(list(accepted.close_reasons), list(accepted.close_reasons.values()))
        assert closed.is_complete.all()
        self.records.release(list(accepted.close_reasons))

    @rule(age=st.integers(0, 3), holding=st.sets(st.integers(0, 2), max_size=1))
    def expire(self, age: int, holding: set[int]) -> None:
        slots, earliest = self.records.select_idle(self.now - age, holding)
        expected = self.in_order(k for k, at in self.last.items() if at <= self.now - age and k[0] not in holding)
        assert self.keys(slots) == expected
        rest = [at for key, at in self.last.items() if key not in expected]
        assert earliest == (min(rest) if rest else None)
        self.end(slots, CloseReason.TIMEOUT)
        for key in expected:
            self.remember(*key)

    @rule(source=st.integers(0, 2))
    def revoke(self, source: int) -> None:
        """Nothing remains of a partition, not even what was closed."""
        slots = self.records.indices_of_partitions([source])
        assert self.keys(slots) == [key for key in self.open if key[0] == source], "in the order of their opening"
        self.end(slots, CloseReason.REVOKED)
        self.records.drop_partitions([source])
        self.open = {key: row for key, row in self.open.items() if key[0] != source}
        self.last = {key: at for key, at in self.last.items() if key[0] != source}
        self.closed[source] = []

    @rule(source=st.integers(0, 2), ids=st.lists(st.sampled_from("abcdefgh"), max_size=3, unique=True))
    def shut(self, source: int, ids: list[str]) -> None:
        """Decisions of an earlier life: ids are closed whether they are open or not."""
        slots = self.records.close_ids(source, ids)
        assert self.keys(slots) == [(source, record) for record in ids if (source, record) in self.open]
        self.records.release(slots)
        for record in ids:
            self.remember(source, record)

    @rule(excess=st.integers(1, 3), holding=st.sets(st.integers(0, 2), max_size=1))
    def find_stalest(self, excess: int, holding: set[int]) -> None:
        slots = self.records.select_longest_idle(excess, holding)
        assert self.keys(slots) == self.in_order(key for key in self.open if key[0] not in holding)[:excess]

    @invariant()
    def agree(self) -> None:
        partitions = self.records.partitions
        assert {(p, r): s for p, it in partitions.items() for r, s in it.record_index_by_id.items()}.keys() == self.open.keys()
        for source, closed in self.closed.items():
            assert list(partitions[source].closed_ids if source in partitions else []) == closed
        assert int(self.records.is_open.sum()) == len(self.open) == len(self.records)
        assert len(self.records.free_indices) + len(self.open) == self.records.capacity
        for (source, record), row in self.open.items():
            slot = partitions[source].record_index_by_id[record]
            seen = [f for f, v in row.items() if not np.isnan(v)]
            assert self.records.num_readings[slot] == len(seen)
            assert self.records.num_declared_missing[slot] == len(row) - len(seen)
            assert self.records.log_feature[slot, : len(seen)].tolist() == seen


def test_rows_leave_what_their_events_leave() -> None:
    """With gaps, labels nobody knows, and rows that are not whole; slot by slot, and one event after the other."""
    rng = np.random.default_rng(0)
    told = [rng.permutation(4)[: rng.integers(1, 5)] for _ in range(100)]
    codes, rows = np.concatenate(told).astype(np.int32), np.cumsum([0, *map(len, told)])
    n = len(codes)
    values = np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n))
    unseen = {int(i): f"text {i}" for i in np.flatnonzero(~np.isnan(values))[::7]}
    names = [f"r{row}" for row, some in enumerate(told) for _ in some]
    batch = EventBatch(names, codes, values, np.full(n, NO_TIME), codes, np.full(n, 3, np.int32), unseen, row_boundaries=rows)
    kept = []
    alone = replace(batch, row_boundaries=None, windows=WindowMembership([""] * n, np.zeros(n, np.int64)))
    for given in (batch, replace(batch, row_boundaries=None), alone):
        records = RecordTable(SCHEMA)
        accepted, rejected = records.ingest(given, 5, 2)
        assert not rejected
        columns = {name: getattr(records, name)[:100].tolist() for name in ("open_order", "num_readings", "num_declared_missing", "is_open")}
        columns |= {name: getattr(records, name)[:100].tolist() for name in ("last_accepted_at", "partition_ids", "model_version")}
        logs = [[part.tolist() for part in records.readings_of(slot)] for slot in range(100)]
        fields = [getattr(accepted, name).tolist() for name in ("event_indices", "record_indices", "seq")]
        known = (
            records.observed_mask[:100].tolist(),
            records.unseen_labels,
            list(records.partition(3).closed_ids),
            records.partition(3).record_index_by_id,
        )
        kept.append((columns, logs, fields, accepted.close_reasons, known))
    assert kept[0] == kept[1] == kept[2]
    assert 10 < len(kept[0][3]) < 90


def one_each(names: list[str], sources: list[int]) -> EventBatch:
    n = len(names)
    ints = np.arange(n, dtype=np.int32)
    times = np.full(n, NO_TIME)
    return EventBatch(names, np.zeros(n, np.int32), np.zeros(n), times, ints, np.array(sources, np.int32))


def test_a_record_that_is_fed_through_several_partitions_is_noticed() -> None:
    records = RecordTable(SCHEMA)
    names = [f"r{i // 3}" for i in range(300)]
    records.ingest(one_each(names, [i % 3 for i in range(300)]), 0)
    assert len(records) == 300
    assert 0 < records.num_misrouted <= 300 // MISROUTED_CHECK_INTERVAL
    assert records.misrouted_example is not None
    name, here, there = records.misrouted_example
    assert here != there
    assert {here, there} <= {i % 3 for i, record in enumerate(names) if record == name}


def test_records_with_one_partition_each_are_not_misrouted() -> None:
    records = RecordTable(SCHEMA)
    records.ingest(one_each([f"r{i}" for i in range(300)], [i % 3 for i in range(300)]), 0)
    assert (records.num_misrouted, records.misrouted_example) == (0, None)


class CacheMachine(RuleBasedStateMachine):
    """Whatever is gathered is what was appended, pages are never shared nor lost."""

    SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(20)))
        self.model = DEformer(schema, ModelConfig(d_model=4, layers=2, heads=2, feedforward=4, mixtures=1, hidden=(4,)))
        page = 2 * 2 * PAGE_TOKENS * 4 * 4
        self.cache = KeyValueCache(self.model, 9 * page)
        self.cache.grow(self.SLOTS)
        self.truth: dict[int, list[torch.Tensor]] = {}
        self.fill = 0

    @rule(
        slots=st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=6),
        counts=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    )
    def append(self, slots: set[int], counts: list[int]) -> None:
        fresh = max(counts)
        rows = np.array(sorted(s for s in slots if self.cache.length[s] + fresh <= 20), np.int64)
        self.cache.mark_in_use(rows)
        self.fill += 1
        values = [torch.randn(len(rows), 2, fresh, 2) for _ in range(4)]
        nothing = torch.zeros(0)
        extension = StepOutput(Conditional(nothing, nothing, nothing, nothing, nothing), values[:2], values[2:])
        for slot in range(self.SLOTS):
            if self.cache.length[slot] == 0:
                self.truth.pop(slot, None)
        held = {s: self.truth.get(s, []) for s in rows.tolist()}
        self.cache.append(rows, extension, np.array(counts[: len(rows)], np.int64))
        for slot in range(self.SLOTS):
            if self.cache.length[slot] == 0:
                self.truth.pop(slot, None)
        for i, slot in enumerate(rows.tolist()):
            if self.cache.length[slot]:
                n = counts[i]
                piece = torch.stack(
                    [torch.cat([v[i] for v in values[:2]], -1), torch.cat([v[i] for v in values[2:]], -1)]
                )[:, :, :n]
                self.truth[slot] = [*held[slot], piece]

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), max_size=4))
    def drop(self, slots: set[int]) -> None:
        self.cache.drop(np.array(sorted(slots), np.int64))
        for slot in slots:
            self.truth.pop(slot, None)

    @invariant()
    def agree(self) -> None:
        used = self.cache.pages - self.cache.free_count
        held = [self.cache.table[s, : self.cache.held(self.cache.length[[s]])[0]] for s in range(self.SLOTS)]
        pages = np.concatenate([*held, self.cache.free[: self.cache.free_count]])
        assert sorted(pages.tolist()) == list(range(self.cache.pages)), "every page is in one place"
        assert self.cache.bytes == used * self.cache.page_bytes
        assert used <= self.cache.high_water
        untouched = np.arange(self.cache.pages - 1, self.cache.high_water - 1, -1)
        np.testing.assert_array_equal(self.cache.free[: len(untouched)], untouched)
        for slot, pieces in self.truth.items():
            past = self.cache.gather(np.array([slot]))
            whole = torch.cat(pieces, 2)
            n = int(past.lengths[0])
            assert n == whole.shape[2]
            got = torch.stack(
                [torch.cat([k[0, :, :n] for k in past.keys], -1), torch.cat([v[0, :, :n] for v in past.values], -1)]
            )
            assert torch.equal(got, whole)


RecordsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRecords = RecordsMachine.TestCase
TestCache = CacheMachine.TestCase
