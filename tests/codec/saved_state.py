"""The saved state of a process with one model, as a value."""

from __future__ import annotations

from deformer_stream.codec.state import decode_decisions_by_model, decode_snapshots
from deformer_stream.engine.events import ONLY_MODEL, Decisions
from deformer_stream.engine.snapshot import Snapshot


def decode_snapshot(data: bytes, description: str = "the saved snapshot") -> Snapshot:
    """Return the snapshot of the only model."""
    return decode_snapshots(data, description)[ONLY_MODEL]


def decode_decisions(data: bytes, description: str = "the saved decisions") -> Decisions:
    """Return the decisions of the only model."""
    return decode_decisions_by_model(data, description)[ONLY_MODEL]
