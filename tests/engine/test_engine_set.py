"""Tests of several engines in one process: each is as if it were alone, but for the limits that they share."""

from __future__ import annotations

import numpy as np

from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import CloseReason, EventBatch
from tests.engine.streams import batch_of, build_model

MODEL, CALIBRATION = build_model()
SECOND = 1_000_000


def make_set(names: str, limits: Limits) -> EngineSet:
    engines = {name: Engine(MODEL, CALIBRATION, f"model-{name}", 0.3, limits, effort="off") for name in names}
    return EngineSet(engines, limits)


def make_batch(records: list[str], feature: int = 0) -> EventBatch:
    return batch_of([(record, feature, 1.0) for record in records])


def test_effects_name_their_model_and_come_in_order_of_the_names() -> None:
    engines = make_set("ba", Limits())
    effects = engines.handle({"b": make_batch(["r"]), "a": make_batch(["r"])}, 0)
    assert [(part.model_name, part.model) for part in effects] == [("a", "model-a"), ("b", "model-b")]
    assert engines.num_open_records == engines.count_open_records(0) == 2
    assert [part.model_name for part in engines.handle({"b": make_batch(["r"], 1)}, 0)] == ["b"]


def test_records_time_out_without_events_of_their_model() -> None:
    engines = make_set("ab", Limits(record_timeout=SECOND))
    engines.handle({"a": make_batch(["r"]), "b": make_batch(["s"])}, 0)
    assert engines.handle({}, SECOND // 2) == []
    engines.handle({"b": make_batch(["t"])}, SECOND // 2)
    (first, second) = engines.handle({}, SECOND + 1)
    assert (first.closed.record_ids, second.closed.record_ids) == (["r"], ["s"])
    assert engines.handle({}, SECOND + 2) == []
    (last,) = engines.handle({}, 2 * SECOND)
    assert (last.model_name, last.closed.record_ids) == ("b", ["t"])


def test_limit_of_open_records_holds_for_all_models_together() -> None:
    engines = make_set("ab", Limits(max_open_records=10))
    engines.handle({"a": make_batch([f"r{i}" for i in range(9)])}, 0)
    assert engines.num_open_records == 9
    (part,) = engines.handle({"b": make_batch(["s0", "s1"])}, 1)
    # Each model may have its share, so the model that has more than its own gives way.
    assert len(part.closed) == 0
    (part,) = engines.handle({}, 2)
    assert (part.model_name, part.closed.record_ids, part.closed.reasons) == ("a", ["r0"], [CloseReason.EVICTED])
    assert engines.num_open_records == 10


def test_limit_of_memory_holds_for_all_models_together() -> None:
    unlimited = make_set("ab", Limits())
    unlimited.handle({"a": make_batch([f"r{i}" for i in range(40)])}, 0)
    size = unlimited.engine_by_name["a"].records.num_bytes
    engines = make_set("ab", Limits(max_record_bytes=size))
    engines.handle({"a": make_batch([f"r{i}" for i in range(40)])}, 0)
    for step in range(4):
        engines.handle({"b": make_batch([f"s{step}-{i}" for i in range(5)])}, step + 1)
    engines.handle({}, 10)
    total = sum(engine.records.num_bytes for engine in engines.engine_by_name.values())
    assert total <= size
    assert len(engines.engine_by_name["b"].records) == 20


def test_snapshots_have_the_models_with_state_only() -> None:
    engines = make_set("abc", Limits())
    engines.handle({"a": make_batch(["r"]), "c": make_batch(["r", "s"])}, 0)
    snapshots = engines.snapshot(0, now=0)
    assert {name: len(snapshot) for name, snapshot in snapshots.items()} == {"a": 1, "c": 2}
    other = make_set("ab", Limits())  # a process without the model "c"
    other.restore(0, snapshots, now=0)
    assert {name: len(engine.records) for name, engine in other.engine_by_name.items()} == {"a": 1, "b": 0}
    assert not other.partitions_to_rescore
    assert [part.closed.record_ids for part in other.revoke([0])] == [["r"], []]


def test_nothing_is_decided_about_a_partition_that_one_model_scores_again() -> None:
    limits = Limits(record_timeout=SECOND)
    engines = make_set("ab", limits)
    engines.handle({"a": make_batch(["r"]), "b": make_batch(["s"])}, 0)
    engine = engines.engine_by_name["a"]
    engine.change_model(MODEL, CALIBRATION, "new", "rescore")
    assert engines.partitions_to_rescore == {0}
    assert [len(part.closed) for part in engines.handle({}, 2 * SECOND)] in ([], [0], [0, 0])
    while engines.partitions_to_rescore:
        engines.rescore(100)
    closed = [record for part in engines.handle({}, 3 * SECOND) for record in part.closed.record_ids]
    assert sorted(closed) == ["r", "s"]


def test_added_engine_takes_part() -> None:
    engines = make_set("b", Limits())
    engines.add("a", Engine(MODEL, CALIBRATION, "model-a", 0.3, effort="off"))
    assert engines.fingerprint_by_name == {"a": "model-a", "b": "model-b"}
    effects = engines.handle({name: make_batch(["r"]) for name in "ab"}, 0)
    assert np.array_equal(effects[0].scored.score, effects[1].scored.score)
