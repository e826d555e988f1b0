"""What is fuzzed: each target takes bytes, makes an input of them, and holds the code to its laws."""

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
from tests.fuzz import forgery, hostile, laws
from tests.models import SCHEMA, write_model

Target = Callable[[bytes], None]


def one_message(data: bytes) -> None:
    """The bytes are a message; its first byte says whether it has a key, and a time from the broker."""
    first, payload = data[:1] or b"\0", data[1:]
    keyed, late = first[0] & 1, first[0] & 2
    poll = Messages(
        "fuzz",
        [payload[:8] if keyed else None],
        [payload],
        np.array([hostile.time(hostile.Fed(first)) if late else hostile.NOW]),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
    )
    for codec in laws.CODECS:
        laws.messages_hold(codec, poll)


def messages(data: bytes) -> None:
    """The bytes choose among what a hostile sender might send."""
    r = hostile.Fed(data)
    poll = hostile.messages(r, r.randrange(4))
    for codec in laws.CODECS:
        laws.messages_hold(codec, poll)


def long_tables(data: bytes) -> None:
    r = hostile.Fed(data)
    table = hostile.table(r, r.randrange(5), ["record", "device", "feature", "value", "time", "label"])
    for codec in laws.CODECS:
        laws.table_holds(codec, LongRows("fuzz.parquet", table, 3))


def wide_tables(data: bytes) -> None:
    r = hostile.Fed(data)
    table = hostile.table(r, r.randrange(5), [*SCHEMA.names, "time"])
    ids = [r.choice(["a", "b", "", "é", "x" * 1025, "\udcff"]) for _ in range(table.num_rows)]
    time = "time" if "time" in table.schema.names else None
    for codec in laws.CODECS:
        laws.table_holds(codec, WideRows("fuzz.parquet", table, ids, 3, time))


def arrow_messages(data: bytes) -> None:
    """Tables as messages, readings in rows or in columns, some of them damaged or compressed."""
    r = hostile.Fed(data)
    codec = r.choice(laws.CODECS)
    laws.decoded(codec, hostile.messages(r, 1 + r.randrange(3), hostile.arrow))


@cache
def _good_model() -> tuple[Path, forgery.Manifest, bytes]:
    """A folder to work in, and the files of a good model."""
    folder = Path(tempfile.mkdtemp(prefix="deformer-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_model(folder / "good")
    manifest = json.loads((folder / "good" / model_store.MANIFEST).read_bytes())
    return folder, manifest, (folder / "good" / model_store.WEIGHTS).read_bytes()


def model_directories(data: bytes) -> None:
    folder, manifest, weights = _good_model()
    forgery.spoil(hostile.Fed(data), folder / "spoiled", manifest, weights)
    laws.directory_holds(folder / "spoiled")


def saved_states(data: bytes) -> None:
    r = hostile.Fed(data)
    good = r.choice([state.encode_snapshot(EXAMPLE), state.encode_decisions(DECIDED)])
    laws.state_holds(forgery.spoiled_state(r, good))


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (one_message, messages, arrow_messages, long_tables, wide_tables, model_directories, saved_states)
}
