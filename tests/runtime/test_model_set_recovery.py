"""Tests of invariant 5 with several models: after restarts and hand-overs, the effects equal those of one run."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from deformer_stream.codec import Codec, FieldNames
from deformer_stream.codec.model_choice import ModelChoice, ModelCodecs
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.errors import StateError
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import pipeline as pipeline_module
from deformer_stream.runtime import recovery as recovery_module
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import RestoredPartition
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.testing import ManualClock
from tests.effort import num_examples
from tests.runtime.group_members import (
    ALPHA,
    DRIFT,
    PARTITIONS,
    AsyncGroupMember,
    Cluster,
    CrashError,
    GroupMember,
    WaitingGroupMember,
    make_cluster,
)
from tests.runtime.pipelines import make_model_reload

NAMES = ("fan", "pump", "valve")


def add_types(world: Cluster) -> Cluster:
    """Add a type to each message: a model, one that does not exist, or none. A record id occurs with several types."""
    rng = np.random.default_rng(0)
    for messages in world.events:
        for i, message in enumerate(messages):
            if message != b"nonsense":
                document = json.loads(message)
                number = int(document["record"][1:])
                document["record"] = f"r{number // 2}"
                document["type"] = (*NAMES, "lathe")[number % 4] if rng.random() > 0.03 else None
                messages[i] = json.dumps(document).encode()
    return world


def make_engines(loaded: Artifact, suffix: str = "") -> EngineSet:
    """Return an engine for each name; the models have equal weights and different fingerprints."""
    return EngineSet(
        {
            name: Engine(
                loaded.model, loaded.calibration, f"{name}{suffix}", ALPHA, Limits(), drift=DRIFT, effort="off"
            )
            for name in NAMES
        }
    )


def run_member(
    world: Cluster,
    loaded: Artifact,
    assigned: set[int],
    seed: int,
    chance: float,
    snapshot_interval: float,
    kind: type[GroupMember],
    change_model: float = 0.0,
) -> GroupMember:
    """Run one member until the end of the input or its crash; see `tests.runtime.test_recovery.run_member`."""
    member, rng = kind(world, assigned, seed, chance, chance), np.random.default_rng(seed)

    def take_new_model() -> tuple[str, Artifact] | None:
        if rng.random() >= change_model:
            return None
        name = str(rng.choice(NAMES))
        return name, replace(loaded, fingerprint=f"{name}-{rng.integers(2**40)}")

    codecs: dict[str, Codec] = {name: Codec(loaded.schema) for name in NAMES}
    pipeline = Pipeline(
        member,
        ModelCodecs(ModelChoice("type"), codecs, FieldNames()),
        make_engines(loaded),
        [member],
        ManualClock(),
        Metrics(),
        is_finite=False,
        commit_interval=float(np.random.default_rng(seed).choice([0.0, 0.02])),
        snapshot_interval=snapshot_interval,
        open_records="rescore",
        model_reload=make_model_reload(take_new_model),
        saves_event_times=True,
    )
    with suppress(CrashError):
        pipeline.run(threading.Event())
    return member


@settings(max_examples=num_examples(10))
@given(
    seed=st.integers(0, 2**20),
    snapshot_interval=st.sampled_from([0.0, 0.03, 100.0]),
    kind=st.sampled_from([GroupMember, AsyncGroupMember]),
)
def test_many_runs_commit_the_same_as_one_run(
    loaded: Artifact, seed: int, snapshot_interval: float, kind: type[GroupMember]
) -> None:
    uninterrupted, interrupted = (add_types(make_cluster(loaded, seed % 5, records=32)) for _ in range(2))
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 100.0, GroupMember)
    assert uninterrupted.done
    num_runs = 0
    while not interrupted.done:
        rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
        run_member(interrupted, loaded, rest, seed + num_runs, 0.03, snapshot_interval, kind)
        num_runs += 1
        assert num_runs < 500
    assert len(uninterrupted.alerts) > 10
    assert {reason for *_, reason in uninterrupted.letters} >= {"unknown_model", "missing_field", "not_json"}
    assert Counter(interrupted.alerts) == Counter(uninterrupted.alerts)
    assert Counter(interrupted.letters) == Counter(uninterrupted.letters)
    assert Counter(interrupted.notices) == Counter(uninterrupted.notices)
    assert Counter(interrupted.evidence) == Counter(uninterrupted.evidence)


@settings(max_examples=num_examples(10))
@given(seed=st.integers(0, 2**20), snapshot_interval=st.sampled_from([0.0, 0.03, 100.0]))
def test_models_are_replaced_one_by_one_while_partitions_are_restored_in_parts(
    loaded: Artifact, seed: int, snapshot_interval: float
) -> None:
    uninterrupted, interrupted = (add_types(make_cluster(loaded, seed % 5, records=32)) for _ in range(2))
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 100.0, GroupMember)
    num_runs = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery_module, "RESCORED_READINGS", 3 + seed % 40)
        patch.setattr(recovery_module, "REPLAYED_MESSAGES", 1 + seed % 7)
        patch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
        while not interrupted.done:
            rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
            run_member(interrupted, loaded, rest, seed + num_runs, 0.01, snapshot_interval, WaitingGroupMember, 0.02)
            num_runs += 1
            assert num_runs < 1000
    # The id of an alert names the model.
    assert Counter(alert[1:] for alert in interrupted.alerts) == Counter(alert[1:] for alert in uninterrupted.alerts)
    assert Counter(interrupted.letters) == Counter(uninterrupted.letters)
    assert Counter(interrupted.evidence) == Counter(uninterrupted.evidence)


def test_state_of_one_model_is_not_restored_by_several(loaded: Artifact) -> None:
    engine = Engine(loaded.model, loaded.calibration, "one", ALPHA)
    recovery = Recovery(make_engines(loaded), Metrics())
    recovery.start_restore(RestoredPartition(0, 5, encode_snapshot(engine.snapshot(0, now=0))))
    codecs = ModelCodecs(ModelChoice("type"), {name: Codec(loaded.schema) for name in NAMES}, FieldNames())
    with pytest.raises(StateError, match=r"saved by a process with --model, which --models cannot continue.*--group"):
        recovery.advance(codecs, now=0)


def test_records_of_a_missing_model_are_dropped_and_logged(loaded: Artifact) -> None:
    world = add_types(make_cluster(loaded, 0, records=32))
    for messages in world.events:
        del messages[len(messages) // 2 :]  # records stay open
    run_member(world, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, GroupMember)
    engines = make_engines(loaded)
    del engines.engine_by_name["valve"]
    recovery = Recovery(engines, Metrics())
    for partition, kept in world.kept.items():
        recovery.start_restore(RestoredPartition(partition, kept.position, kept.snapshot, kept.decisions))
        recovery.mark_caught_up(partition)
    codecs = ModelCodecs(ModelChoice("type"), {name: Codec(loaded.schema) for name in ("fan", "pump")}, FieldNames())
    with capture_logs() as logs:
        recovery.advance(codecs, now=0)
    assert recovery.restored_partitions == set(range(PARTITIONS))
    assert engines.num_open_records > 0
    assert [line["model"] for line in logs if line["event"] == "model_missing"] == ["valve"] * PARTITIONS
