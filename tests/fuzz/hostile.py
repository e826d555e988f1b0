"""Generators of hostile messages, tables and files.

Every generator takes a `random.Random`. Tests pass a seeded one. The coverage-guided fuzzer passes `FedRandom`, whose
numbers are the bytes that the fuzzer mutates, so that both run the same generators.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import NO_TIME
from tests.models import SCHEMA

NOW, STAMP = 1_700_000_000_000_000, '"2023-11-14T22:13:20Z"'
"""The broker's time of most messages, microseconds, and the same as JSON text."""

Random = random.Random


class FedRandom(random.Random):
    """A random generator that returns given bytes, and after the last of them the numbers of a fixed seed."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int, /) -> int:
        n = (k + 7) // 8
        taken = self._data[self._at : self._at + n]
        self._at += n
        return int.from_bytes(taken, "little") & ((1 << k) - 1) if len(taken) == n else super().getrandbits(k)

    def random(self) -> float:
        return self.getrandbits(32) / 2**32


# --- text and values as JSON fragments -------------------------------------------------------------------------------

HERE = Path(__file__).parent
VALUES = (HERE / "values.txt").read_text("utf-8").splitlines()
TIMES = (HERE / "times.txt").read_text("utf-8").splitlines()
KEYS = [
    "record",
    "feature",
    "value",
    "values",
    "time",
    "device",
    "label",
    "",
    "a",
    "__proto__",
    "RECORD",
    "record\\u0000",
]
FEATURES = [*SCHEMA.names, "humidity", "", "Temperature", "\\u0000", "state\\n", "x" * 80]


def draw_size(r: Random, small: list[int], large: list[int]) -> int:
    """Return a size from `small`, or once in sixteen times from `large`, so that a million messages stay affordable."""
    return r.choice(small if r.randrange(16) else large)


def draw_literal(r: Random) -> str:
    """Return a fragment that is a JSON literal or almost one."""
    kind = r.randrange(12)
    if kind < 6:
        return r.choice(VALUES)
    if kind == 6:
        return r.choice(TIMES)
    if kind == 7:
        return "9" * draw_size(r, [19, 20, 309], [400, 401, 4301, 20_000])
    if kind == 8:
        return "0." + "3" * draw_size(r, [17, 40], [400, 20_000]) + r.choice(["", "e-400", "e400", "e-9999999999"])
    if kind == 9:
        deep = draw_size(r, [3, 20], [250, 300, 1000, 1100, 50_000])
        return r.choice(["[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "[" * deep])
    if kind == 10:
        return json.dumps(
            "".join(chr(r.choice([r.randrange(32), r.randrange(127, 160), r.randrange(0x3000)])) for _ in "abc")
        )
    return json.dumps(
        r.choice("xé\0😀") * draw_size(r, [1, 60], [1023, 1024, 1025, 5000]), ensure_ascii=r.random() < 0.5
    )


def draw_number(r: Random) -> str:
    """Return a JSON number."""
    return repr(round(r.gauss(20, 10), 3))


def draw_value(r: Random, feature: str) -> str:
    """Return a value that in most cases fits the feature."""
    labels = SCHEMA.features[SCHEMA.code_by_name[feature]].labels if feature in SCHEMA.code_by_name else ()
    if labels:
        return json.dumps(r.choice([*labels, "unheard of"]))
    return "null" if r.random() < 0.03 else draw_number(r)


def draw_record_id(r: Random) -> str:
    """Return a record id.

    Few ids are frequent, which gives duplicates, late events and complete records. Many ids are rare, which gives
    records that stay open.
    """
    return f"{r.choice('abcdefgh')}{r.randrange(200) if r.random() < 0.3 else r.getrandbits(16)}"


def draw_valid_message(r: Random) -> bytes:
    """Return a message in one of the public forms."""
    parts = [f'"{r.choice(["record", "record", "device"])}": "{draw_record_id(r)}"']
    if r.random() < 0.5:
        feature = r.choice(SCHEMA.names)
        parts += [f'"feature": "{feature}"', f'"value": {draw_value(r, feature)}']
    else:
        features = r.sample(SCHEMA.names, r.randrange(1, len(SCHEMA) + 1))
        parts.append('"values": {' + ", ".join(f'"{f}": {draw_value(r, f)}' for f in features) + "}")
    if r.random() < 0.6:
        parts.append(f'"time": {r.choice(["1700000000.25", str(1_700_000_000 + r.randrange(600)), STAMP])}')
    return ("{" + ", ".join(parts) + "}").encode()


def draw_unusual_message(r: Random) -> bytes:
    """Return an object with the public keys and unusual values: missing, repeated, of other types, beyond all
    limits.
    """
    parts = [
        ("record", f'"{draw_record_id(r)}"'),
        ("feature", json.dumps(r.choice(SCHEMA.names))),
        ("value", draw_number(r)),
    ]
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(parts) + 1)
        act = r.randrange(6)
        if act == 0 and parts:
            parts.pop(at % len(parts))
        elif act == 1 and parts:
            parts.insert(at, r.choice(parts))
        elif act == 2:
            parts.insert(at, ("time", r.choice(TIMES)))
        elif act == 3:
            inner = ", ".join(f'"{r.choice(FEATURES)}": {draw_literal(r)}' for _ in range(r.randrange(5)))
            parts = [part for part in parts if part[0] == "record"] + [("values", "{" + inner + "}")]
        elif act == 4:
            parts.insert(at, (r.choice(KEYS), draw_literal(r)))
        elif parts:
            parts[at % len(parts)] = (parts[at % len(parts)][0], draw_literal(r))
    text = "{" + ", ".join(f'"{key}": {fragment}' for key, fragment in parts) + "}"
    return text.encode("utf-8", "surrogatepass")


TOKENS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"null", b"NaN", b"1e999", b"\xff", b"\0", b"\n"]


def mutate(r: Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, inserted, removed, repeated or cut off."""
    new = bytearray(data)
    for _ in range(r.randrange(1, 5)):
        at = r.randrange(len(new) + 1)
        act = r.randrange(6)
        if act == 0 and new:
            new[at % len(new)] ^= 1 << r.randrange(8)
        elif act == 1:
            new[at:at] = r.choice(TOKENS)
        elif act == 2:
            del new[at : at + r.randrange(1, 9)]
        elif act == 3:
            new[at:at] = new[max(0, at - r.randrange(1, 30)) : at]
        elif act == 4:
            del new[at:]
        elif new:
            new[at % len(new)] = r.randrange(256)
    return bytes(new)


def draw_noise(r: Random) -> bytes | None:
    """Return a message that never was an event."""
    kind = r.randrange(8)
    if kind == 0:
        return r.choice([None, b"", b" ", b"\0", b"null", b"[]", b'"x"', b"17", b"NaN", b"{}", b"\xef\xbb\xbf{}"])
    if kind == 1:
        return draw_valid_message(r).decode().encode(r.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 2:
        return draw_literal(r).encode("utf-8", "surrogatepass")
    if kind == 3:
        return r.choice([b"[", b'{"a":', b"{", b'"', b"9", b"\\"]) * draw_size(r, [10, 100], [2000, 60_000])
    return r.getrandbits(8 * 24).to_bytes(24, "little")[: r.randrange(25)]


def draw_payload(r: Random) -> bytes | None:
    """Return a message value: one in three is valid, one is almost valid, one is noise."""
    kind = r.randrange(6)
    if kind < 2:
        return draw_valid_message(r)
    if kind == 2:
        return draw_unusual_message(r)
    if kind == 3:
        return mutate(r, draw_valid_message(r) if r.random() < 0.7 else draw_unusual_message(r))
    return draw_noise(r)


def draw_key(r: Random) -> bytes | None:
    """Return a message key."""
    kind = r.randrange(8)
    if kind < 4:
        return draw_record_id(r).encode()
    return [
        None,
        b"",
        bytes([r.randrange(256), r.randrange(256)]),
        r.choice([b"k", b"\0", b"\n"]) * draw_size(r, [1], [1025]),
    ][kind - 4]


def draw_broker_time(r: Random) -> int:
    """Return the broker timestamp of a message, in microseconds."""
    if r.random() < 0.8:
        return NOW + r.randrange(600_000_000)
    return r.choice([NO_TIME, 0, -1, NO_TIME + 1, 2**63 - 1, -(2**62), 2**62, 253_402_300_799_000_000])


def draw_messages(r: Random, n: int, draw: Callable[[Random], bytes | None] = draw_payload) -> Messages:
    """Return a poll of n messages."""
    drawn = [(draw_key(r), draw(r), draw_broker_time(r)) for _ in range(n)]
    return Messages(
        "hostile",
        [k for k, _, _ in drawn],
        [p for _, p, _ in drawn],
        np.array([t for _, _, t in drawn], np.int64),
        np.array([r.randrange(3) for _ in drawn], np.int32),
        np.arange(n, dtype=np.int64) + 100,
    )


# --- tables ----------------------------------------------------------------------------------------------------------

TEXTS: list[str | None] = [None, "", "a1", "b2", *SCHEMA.names, "run", "unheard", "1.5", "1_0", "nan", "-inf", "1e999"]
TEXTS += [
    "true",
    "3.0",
    "\0",
    "\n",
    "x" * 1025,
    "é😀",
    "1700000000",
    "2023-11-14T22:13:20Z",
    "2023-11-14",
    "0000-01-01T00Z",
]
NUMBERS = [0.0, -0.0, 1.5, 3.0, 1e308, -1e300, 5e-324, float("nan"), float("inf"), float("-inf"), 1.7e9, 1.7e12, 2.6e11]
WHOLE = [0, 1, -1, 3, 1_700_000_000, 1_700_000_000_000, 2**53 + 1, 2**63 - 1, -(2**63)]


def draw_texts(r: Random, n: int) -> pa.Array:
    """Return a column of text, some of which may not be valid UTF-8."""
    if n == 0:
        return pa.array([], pa.string())
    drawn: list[bytes | None] = []
    for _ in range(n):
        text = r.choice(TEXTS)
        raw = None if text is None else text.encode()
        drawn.append(raw if r.random() < 0.97 else r.choice([b"\xff", b"a\xc3", b"\xed\xa0\x80"]))
    kind = r.choice([pa.string(), pa.large_string(), pa.string()])
    size = np.cumsum([0, *(len(raw or b"") for raw in drawn)])
    offsets = pa.array(size, pa.int64() if kind == pa.large_string() else pa.int32()).buffers()[1]
    there = pa.array([raw is not None for raw in drawn]).buffers()[1]
    draw_column = pa.Array.from_buffers(kind, n, [there, offsets, pa.py_buffer(b"".join(raw or b"" for raw in drawn))])
    return draw_column.dictionary_encode() if r.random() < 0.2 else draw_column


def draw_column(r: Random, n: int) -> pa.Array:
    """Return a column of any type that a file may have."""
    whole: list[int | None] = [r.choice([*WHOLE, None]) for _ in range(n)]
    some: list[float | None] = [r.choice([*NUMBERS, None]) for _ in range(n)]
    small = [None if w is None else w % 100 for w in whole]
    kind = r.randrange(16)
    if kind < 4:
        return draw_texts(r, n)
    if kind < 6:
        made = pa.array(some, pa.float64())
        return made.cast(pa.float32()) if r.random() < 0.3 else made.dictionary_encode() if r.random() < 0.2 else made
    if kind == 6:
        return pa.array(whole, pa.int64())
    if kind == 7:
        unit = r.choice(["s", "ms", "us", "ns"])
        return pa.array(whole, pa.timestamp(unit, r.choice([None, "UTC", "Europe/Paris", "+05:00", "No/Where"])))
    if kind == 8:
        return pa.array(
            small, r.choice([pa.int8(), pa.uint64(), pa.date32(), pa.duration("s"), pa.time32("s"), pa.int16()])
        )
    if kind == 9:
        return pa.array([None if w is None else bool(w) for w in whole], pa.bool_())
    if kind == 10:
        return (
            pa.array(small, pa.int64())
            .cast(pa.decimal128(20, 0))
            .cast(r.choice([pa.decimal128(30, 3), pa.decimal256(40, 2)]))
        )
    if kind == 11:
        return pa.array([None if w is None else [w] for w in small], pa.list_(pa.int64()))
    if kind == 12:
        return pa.array([None if w is None else {"a": w} for w in small], pa.struct([("a", pa.int64())]))
    if kind == 13:
        return pa.array([None if w is None else bytes([w]) for w in small], r.choice([pa.binary(), pa.large_binary()]))
    if kind == 14:
        return pa.nulls(n)
    return pa.array([np.float16(w or 0) for w in small], pa.float16())


def draw_table(r: Random, n: int, names: list[str]) -> pa.RecordBatch:
    """Return a table with some of the named columns and others, in most cases of a plausible type."""
    columns: dict[str, pa.Array] = {}
    for name in names:
        kind = r.randrange(10)
        if kind == 0:
            continue
        if kind < 3:
            columns[name] = draw_column(r, n)
        elif name in ("record", "device", "label"):
            columns[name] = draw_texts(r, n)
        elif name == "feature":
            columns[name] = pa.array([r.choice([*SCHEMA.names, "nope", None]) for _ in range(n)], pa.string())
        elif name == "time":
            columns[name] = pa.array([r.choice([1.7e9, 1.7e12, None, 4.1e9]) for _ in range(n)], pa.float64())
        else:
            columns[name] = r.choice(
                [lambda: pa.array([r.choice(NUMBERS) for _ in range(n)]), lambda: draw_texts(r, n)]
            )()
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def draw_arrow_stream(r: Random) -> bytes:
    """Return a table as an Arrow stream; every second one is damaged or unusual."""
    names = r.choice([["record", "feature", "value", "time", "device", "label"], ["record", "time", *SCHEMA.names]])
    batch = draw_table(r, r.randrange(6), names)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=r.choice([None, None, None, "zstd", "lz4"]))
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for _ in range(1 + r.randrange(2)):
            writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream if r.randrange(2) else stream[:4] + mutate(r, stream[4:])


# --- files -----------------------------------------------------------------------------------------------------------

SCALARS: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 16, 2**31, 2**62, 2**63, 10**30, 0.5, 1e308, float("nan")]
SCALARS += [
    float("inf"),
    "",
    "a",
    "\n",
    "\ud800",
    "x" * 2000,
    [],
    {},
    [1],
    [[1.0]],
    {"a": 1},
    ["a"] * 3,
    [10**9],
    [-5, 5],
]


def alter_document(r: Random, document: Any) -> Any:
    """Return a JSON document with some values exchanged, removed, repeated or moved."""
    document = json.loads(json.dumps(document))
    for _ in range(r.randrange(1, 4)):
        place, parent = document, None
        name: Any = None
        while isinstance(place, dict | list) and place and (parent is None or r.random() < 0.75):
            parent, name = place, r.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            place = parent[name]
        act = r.randrange(5)
        if parent is None:
            document = copy.deepcopy(r.choice(SCALARS))
        elif act < 3:
            parent[name] = copy.deepcopy(r.choice(SCALARS))
        elif act == 3:
            del parent[name]
        elif isinstance(parent, list):
            parent.insert(name, copy.deepcopy(place))
        else:
            parent[str(r.choice(SCALARS))] = copy.deepcopy(place)
    return document
