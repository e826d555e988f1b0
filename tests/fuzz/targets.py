"""Fuzz targets: each one makes an input of bytes and asserts the invariants of the code that reads it."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from deformer_stream import model_store
from deformer_stream.codec import state
from deformer_stream.codec.payloads import LongRows, Messages, WideRows
from tests.codec.test_state import DECIDED, EXAMPLE
from tests.fuzz import forgery, hostile, invariants
from tests.models import SCHEMA, write_model

Target = Callable[[bytes], None]


def one_message(data: bytes) -> None:
    """Use the bytes as a message; the first byte says whether it has a key and a broker timestamp."""
    first, payload = data[:1] or b"\0", data[1:]
    keyed, late = first[0] & 1, first[0] & 2
    poll = Messages(
        "fuzz",
        [payload[:8] if keyed else None],
        [payload],
        np.array([hostile.draw_broker_time(hostile.FedRandom(first)) if late else hostile.NOW]),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
    )
    for codec in invariants.CODECS:
        invariants.assert_messages_independent(codec, poll)


def messages(data: bytes) -> None:
    """Use the bytes as the random numbers that choose hostile messages."""
    r = hostile.FedRandom(data)
    poll = hostile.draw_messages(r, r.randrange(4))
    for codec in invariants.CODECS:
        invariants.assert_messages_independent(codec, poll)


def long_tables(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a table in long layout."""
    r = hostile.FedRandom(data)
    table = hostile.draw_table(r, r.randrange(5), ["record", "device", "feature", "value", "time", "label"])
    for codec in invariants.CODECS:
        invariants.assert_table_decodes(codec, LongRows("fuzz.parquet", table, 3))


def wide_tables(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a table in wide layout."""
    r = hostile.FedRandom(data)
    table = hostile.draw_table(r, r.randrange(5), [*SCHEMA.names, "time"])
    ids = [r.choice(["a", "b", "", "é", "x" * 1025, "\udcff"]) for _ in range(table.num_rows)]
    time = "time" if "time" in table.schema.names else None
    for codec in invariants.CODECS:
        invariants.assert_table_decodes(codec, WideRows("fuzz.parquet", table, ids, 3, time))


def arrow_messages(data: bytes) -> None:
    """Use the bytes as random numbers that choose an Arrow stream, long or wide, possibly damaged or compressed."""
    r = hostile.FedRandom(data)
    codec = r.choice(invariants.CODECS)
    invariants.decode_checked(codec, hostile.draw_messages(r, 1 + r.randrange(3), hostile.draw_arrow_stream))


@cache
def _load_valid_model() -> tuple[Path, forgery.Manifest, bytes]:
    """Return a folder to work in, and the manifest and weights of a valid model."""
    folder = Path(tempfile.mkdtemp(prefix="deformer-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_model(folder / "good")
    manifest = json.loads((folder / "good" / model_store.MANIFEST).read_bytes())
    return folder, manifest, (folder / "good" / model_store.WEIGHTS).read_bytes()


def model_directories(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged model directory."""
    folder, manifest, weights = _load_valid_model()
    forgery.write_damaged_model(hostile.FedRandom(data), folder / "spoiled", manifest, weights)
    invariants.check_directory(folder / "spoiled")


def saved_states(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged saved state."""
    r = hostile.FedRandom(data)
    good = r.choice([state.encode_snapshot(EXAMPLE), state.encode_decisions(DECIDED)])
    invariants.check_saved_state(forgery.damage_state(r, good))


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (one_message, messages, arrow_messages, long_tables, wide_tables, model_directories, saved_states)
}
