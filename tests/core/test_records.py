"""Records against a plain dictionary model, by stateful testing; and the cache likewise."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deformer_stream.core.batch import NO_TIME, Closing, EventBatch, Reason
from deformer_stream.core.cache import PAGE_TOKENS, KeyValueCache
from deformer_stream.core.heads import Conditional
from deformer_stream.core.model import DEformer, Extension, ModelConfig
from deformer_stream.core.records import Records
from deformer_stream.core.schema import Feature, Schema

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))


class RecordsMachine(RuleBasedStateMachine):
    """Every step is done twice: by `Records` and by dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records(SCHEMA, remembered=5)
        self.open: dict[str, dict[int, float]] = {}
        self.last: dict[str, int] = {}
        self.source: dict[str, int] = {}
        self.closed: list[str] = []
        self.now = 0

    def remember(self, record: str) -> None:
        for table in (self.open, self.last, self.source):
            table.pop(record)
        self.closed = [*self.closed, record][-5:]

    @rule(
        events=st.lists(
            st.tuples(
                st.sampled_from("abcdefgh"), st.integers(0, 3), st.one_of(st.floats(-1, 1), st.just(float("nan")))
            ),
            max_size=12,
        ),
        source=st.integers(0, 2),
    )
    def arrive(self, events: list[tuple[str, int, float]], source: int) -> None:
        self.now += 1
        n = len(events)
        batch = EventBatch(
            [r for r, _, _ in events],
            np.array([f for _, f, _ in events], np.int32),
            np.array([v for _, _, v in events], np.float64),
            np.full(n, NO_TIME, np.int64),
            np.arange(n, dtype=np.int32),
            np.full(n, source, np.int32),
        )
        accepted, rejected = self.records.accept(batch, self.now)
        expected, refused, complete = [], [], []
        for i, (record, feature, value) in enumerate(events):
            if record not in self.open and record in self.closed:
                refused.append((i, Reason.LATE))
                continue
            if record not in self.open:
                self.open[record], self.source[record] = {}, source
            row = self.open[record]
            if feature in row:
                refused.append((i, Reason.DUPLICATE))
                continue
            row[feature] = value
            self.last[record] = self.now
            if not np.isnan(value):
                expected.append((i, sum(not np.isnan(v) for v in row.values()) - 1))
            if len(row) == 4:
                complete.append(record)
                self.remember(record)
        assert list(zip(accepted.events.tolist(), accepted.seq.tolist(), strict=True)) == expected
        assert [(r.message, r.reason) for r in rejected] == refused
        assert [self.records.ids[s] for s in accepted.ended] == complete
        for event, slot, seq in zip(accepted.events, accepted.slots, accepted.seq, strict=True):
            assert self.records.log_feature[slot, seq] == events[event][1]
            assert self.records.log_value[slot, seq] == events[event][2]
        closed = self.records.close(list(accepted.ended), list(accepted.ended.values()))
        assert closed.complete.all()
        self.records.release(list(accepted.ended))

    @rule(age=st.integers(0, 3))
    def expire(self, age: int) -> None:
        slots, earliest = self.records.idle(self.now - age)
        expected = {r for r, at in self.last.items() if at <= self.now - age}
        assert {self.records.ids[s] for s in slots} == expected
        rest = [at for r, at in self.last.items() if r not in expected]
        assert earliest == (min(rest) if rest else None)
        self.records.close(slots, Closing.TIMEOUT)
        self.records.release(slots)
        # Several records that end at once are remembered in the order of their slots.
        for slot in slots:
            self.remember(self.records.ids[slot])

    @rule(source=st.integers(0, 2))
    def revoke(self, source: int) -> None:
        slots = self.records.of_sources([source])
        expected = {r for r, s in self.source.items() if s == source}
        assert {self.records.ids[s] for s in slots} == expected
        self.records.close(slots, Closing.REVOKED)
        self.records.release(slots)
        for record in expected:
            for table in (self.open, self.last, self.source):
                table.pop(record)  # type: ignore[attr-defined]

    @rule(excess=st.integers(1, 3))
    def find_stalest(self, excess: int) -> None:
        slots = self.records.stalest(excess)
        assert len(slots) == min(excess, len(self.open))
        chosen = [self.last[self.records.ids[s]] for s in slots]
        assert chosen == sorted(self.last.values())[: len(slots)]

    @invariant()
    def agree(self) -> None:
        assert set(self.records.slot_of) == set(self.open)
        assert list(self.records.closed_ids) == self.closed
        assert int(self.records.is_open.sum()) == len(self.open) == len(self.records)
        assert len(self.records.free) + len(self.open) == self.records.capacity
        for record, row in self.open.items():
            slot = self.records.slot_of[record]
            seen = [f for f, v in row.items() if not np.isnan(v)]
            assert self.records.count[slot] == len(seen)
            assert self.records.absent[slot] == len(row) - len(seen)
            assert self.records.log_feature[slot, : len(seen)].tolist() == seen


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
        self.cache.pin(rows)
        self.fill += 1
        values = [torch.randn(len(rows), 2, fresh, 2) for _ in range(4)]
        nothing = torch.zeros(0)
        extension = Extension(Conditional(nothing, nothing, nothing, nothing, nothing), values[:2], values[2:])
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
        held = [self.cache.table[s, : self.cache._held(self.cache.length[[s]])[0]] for s in range(self.SLOTS)]
        pages = np.concatenate([*held, self.cache.free[: self.cache.free_count]])
        assert sorted(pages.tolist()) == list(range(self.cache.pages)), "every page is in one place"
        assert self.cache.bytes == used * self.cache.page_bytes
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
