"""Engines, and the messages of random records, for tests of the pipeline."""

from __future__ import annotations

import json
from typing import Any

from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.model_store import Artifact
from tests.models import draw_rows

ALPHA = 0.3
RECORDS = 40


def make_engine(loaded: Artifact, **limits: Any) -> Engine:
    """Return an engine for the model with these limits."""
    return Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits(**limits))


def make_record_messages(loaded: Artifact) -> list[bytes]:
    """Return one message per record, and some messages that are rejected."""
    rows = draw_rows(loaded.schema, RECORDS, 3)
    messages = [json.dumps({"record": f"r{i}", "values": row}).encode() for i, row in enumerate(rows)]
    return [m for i, message in enumerate(messages) for m in ([message, b"not json"] if i % 7 == 0 else [message])]
