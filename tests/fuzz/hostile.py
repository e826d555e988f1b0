"""What a hostile sender might send: messages, tables and files, drawn from any source of random numbers.

Everything here takes a `random.Random`. Tests give it a seed; the coverage-guided fuzzer gives it `Fed`, whose numbers
are the bytes that the fuzzer mutates, so that both run the same generators.
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


class Fed(random.Random):
    """Random numbers that are the bytes given; after the last of them, those of a fixed seed."""

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


def rarely(r: Random, small: list[int], large: list[int]) -> int:
    """A large size once in sixteen times, so that what a million messages weigh stays bearable."""
    return r.choice(small if r.randrange(16) else large)


def literal(r: Random) -> str:
    """A fragment of JSON, or of what is none."""
    kind = r.randrange(12)
    if kind < 6:
        return r.choice(VALUES)
    if kind == 6:
        return r.choice(TIMES)
    if kind == 7:
        return "9" * rarely(r, [19, 20, 309], [400, 401, 4301, 20_000])
    if kind == 8:
        return "0." + "3" * rarely(r, [17, 40], [400, 20_000]) + r.choice(["", "e-400", "e400", "e-9999999999"])
    if kind == 9:
        deep = rarely(r, [3, 20], [250, 300, 1000, 1100, 50_000])
        return r.choice(["[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "[" * deep])
    if kind == 10:
        return json.dumps(
            "".join(chr(r.choice([r.randrange(32), r.randrange(127, 160), r.randrange(0x3000)])) for _ in "abc")
        )
    return json.dumps(r.choice("xé\0😀") * rarely(r, [1, 60], [1023, 1024, 1025, 5000]), ensure_ascii=r.random() < 0.5)


def number(r: Random) -> str:
    return repr(round(r.gauss(20, 10), 3))


def value_of(r: Random, feature: str) -> str:
    """A value that fits the feature, mostly."""
    labels = SCHEMA.features[SCHEMA.code_by_name[feature]].labels if feature in SCHEMA.code_by_name else ()
    if labels:
        return json.dumps(r.choice([*labels, "unheard of"]))
    return "null" if r.random() < 0.03 else number(r)


def owner(r: Random) -> str:
    """Ids of few records, which get duplicates, late events and all their readings, and of many, which stay open."""
    return f"{r.choice('abcdefgh')}{r.randrange(200) if r.random() < 0.3 else r.getrandbits(16)}"


def valid(r: Random) -> bytes:
    """A message in one of the public forms."""
    parts = [f'"{r.choice(["record", "record", "device"])}": "{owner(r)}"']
    if r.random() < 0.5:
        feature = r.choice(SCHEMA.names)
        parts += [f'"feature": "{feature}"', f'"value": {value_of(r, feature)}']
    else:
        features = r.sample(SCHEMA.names, r.randrange(1, len(SCHEMA) + 1))
        parts.append('"values": {' + ", ".join(f'"{f}": {value_of(r, f)}' for f in features) + "}")
    if r.random() < 0.6:
        parts.append(f'"time": {r.choice(["1700000000.25", str(1_700_000_000 + r.randrange(600)), STAMP])}')
    return ("{" + ", ".join(parts) + "}").encode()


def odd(r: Random) -> bytes:
    """An object with the public keys and whatever for values: absent, twice, of other types, beyond all bounds."""
    parts = [("record", f'"{owner(r)}"'), ("feature", json.dumps(r.choice(SCHEMA.names))), ("value", number(r))]
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
            inner = ", ".join(f'"{r.choice(FEATURES)}": {literal(r)}' for _ in range(r.randrange(5)))
            parts = [part for part in parts if part[0] == "record"] + [("values", "{" + inner + "}")]
        elif act == 4:
            parts.insert(at, (r.choice(KEYS), literal(r)))
        elif parts:
            parts[at % len(parts)] = (parts[at % len(parts)][0], literal(r))
    text = "{" + ", ".join(f'"{key}": {fragment}' for key, fragment in parts) + "}"
    return text.encode("utf-8", "surrogatepass")


TOKENS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"null", b"NaN", b"1e999", b"\xff", b"\0", b"\n"]


def mutated(r: Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, inserted, left out, repeated, or cut off."""
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


def noise(r: Random) -> bytes | None:
    """What never was an event."""
    kind = r.randrange(8)
    if kind == 0:
        return r.choice([None, b"", b" ", b"\0", b"null", b"[]", b'"x"', b"17", b"NaN", b"{}", b"\xef\xbb\xbf{}"])
    if kind == 1:
        return valid(r).decode().encode(r.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 2:
        return literal(r).encode("utf-8", "surrogatepass")
    if kind == 3:
        return r.choice([b"[", b'{"a":', b"{", b'"', b"9", b"\\"]) * rarely(r, [10, 100], [2000, 60_000])
    return r.getrandbits(8 * 24).to_bytes(24, "little")[: r.randrange(25)]


def payload(r: Random) -> bytes | None:
    """Of three messages one is valid, one is or was nearly so, one is noise."""
    kind = r.randrange(6)
    if kind < 2:
        return valid(r)
    if kind == 2:
        return odd(r)
    if kind == 3:
        return mutated(r, valid(r) if r.random() < 0.7 else odd(r))
    return noise(r)


def key(r: Random) -> bytes | None:
    kind = r.randrange(8)
    if kind < 4:
        return owner(r).encode()
    return [
        None,
        b"",
        bytes([r.randrange(256), r.randrange(256)]),
        r.choice([b"k", b"\0", b"\n"]) * rarely(r, [1], [1025]),
    ][kind - 4]


def time(r: Random) -> int:
    """The broker's time of a message, microseconds."""
    if r.random() < 0.8:
        return NOW + r.randrange(600_000_000)
    return r.choice([NO_TIME, 0, -1, NO_TIME + 1, 2**63 - 1, -(2**62), 2**62, 253_402_300_799_000_000])


def messages(r: Random, n: int, draw: Callable[[Random], bytes | None] = payload) -> Messages:
    """A poll of n messages."""
    drawn = [(key(r), draw(r), time(r)) for _ in range(n)]
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


def texts(r: Random, n: int) -> pa.Array:
    """A column of text, some of which may be no UTF-8."""
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
    column = pa.Array.from_buffers(kind, n, [there, offsets, pa.py_buffer(b"".join(raw or b"" for raw in drawn))])
    return column.dictionary_encode() if r.random() < 0.2 else column


def column(r: Random, n: int) -> pa.Array:
    """A column of any type that a file may have."""
    whole: list[int | None] = [r.choice([*WHOLE, None]) for _ in range(n)]
    some: list[float | None] = [r.choice([*NUMBERS, None]) for _ in range(n)]
    small = [None if w is None else w % 100 for w in whole]
    kind = r.randrange(16)
    if kind < 4:
        return texts(r, n)
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


def table(r: Random, n: int, names: list[str]) -> pa.RecordBatch:
    """Some of these columns and others, mostly of a type that makes sense."""
    columns: dict[str, pa.Array] = {}
    for name in names:
        kind = r.randrange(10)
        if kind == 0:
            continue
        if kind < 3:
            columns[name] = column(r, n)
        elif name in ("record", "device", "label"):
            columns[name] = texts(r, n)
        elif name == "feature":
            columns[name] = pa.array([r.choice([*SCHEMA.names, "nope", None]) for _ in range(n)], pa.string())
        elif name == "time":
            columns[name] = pa.array([r.choice([1.7e9, 1.7e12, None, 4.1e9]) for _ in range(n)], pa.float64())
        else:
            columns[name] = r.choice([lambda: pa.array([r.choice(NUMBERS) for _ in range(n)]), lambda: texts(r, n)])()
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def arrow(r: Random) -> bytes:
    """A table as an Arrow stream, one in two as its sender meant it."""
    names = r.choice([["record", "feature", "value", "time", "device", "label"], ["record", "time", *SCHEMA.names]])
    batch = table(r, r.randrange(6), names)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=r.choice([None, None, None, "zstd", "lz4"]))
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for _ in range(1 + r.randrange(2)):
            writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream if r.randrange(2) else stream[:4] + mutated(r, stream[4:])


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


def altered(r: Random, document: Any) -> Any:
    """A JSON document with a few values exchanged, left out, repeated or put elsewhere."""
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
