"""Engines, and the messages of random records, for tests of the pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, SourceCallbacks
from deformer_stream.runtime.reload import ModelReload
from tests.models import draw_rows

ALPHA = 0.3
RECORDS = 40


def make_engine(loaded: Artifact, **limits: Any) -> Engine:
    """Return an engine for the model with these limits."""
    return Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits(**limits))


def make_model_reload(
    take_new_model: Callable[[], tuple[str, Artifact] | None], make_codec: Callable[[Artifact], Codec] | None = None
) -> ModelReload:
    """Return what gives new models to a pipeline.

    Args:
        take_new_model: See `ModelReload`.
        make_codec: See `ModelReload`. None for a codec without options.
    """
    return ModelReload(take_new_model, make_codec or (lambda artifact: Codec(artifact.schema)), make_engine)


def make_record_messages(loaded: Artifact) -> list[bytes]:
    """Return one message per record, and some messages that are rejected."""
    rows = draw_rows(loaded.schema, RECORDS, 3)
    messages = [json.dumps({"record": f"r{i}", "values": row}).encode() for i, row in enumerate(rows)]
    return [m for i, message in enumerate(messages) for m in ([message, b"not json"] if i % 7 == 0 else [message])]


class ScriptedSource:
    """A member of a group whose polls are given by a script.

    Args:
        turns: A function for each poll, which returns its result. When there are none left, the source is exhausted.

    Attributes:
        assigned_partitions: The partitions that are assigned now; the functions may change it.
        callbacks: The callbacks of the pipeline.
        waiting_partitions: The partitions that the pipeline has left out.
    """

    waiting_partitions: frozenset[int] = frozenset()
    assigned_partitions: frozenset[int] = frozenset()
    has_joined = False

    def __init__(self, turns: list[Callable[[], PollResult]]) -> None:
        self.turns = turns
        self.callbacks = SourceCallbacks()
        self.committed: list[Mapping[int, PartitionState]] = []

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        self.callbacks = callbacks

    def set_model_fingerprint(self, fingerprint: str) -> None: ...

    def leave_out(self, partitions: frozenset[int]) -> None:
        self.waiting_partitions = partitions

    @property
    def is_exhausted(self) -> bool:
        return not self.turns

    def poll(self, timeout: float) -> PollResult:
        return self.turns.pop(0)() if self.turns else PollResult(None)

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        self.committed.append(states)

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {}

    def close(self) -> None: ...
