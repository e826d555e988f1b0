"""Model directories and saved states as someone would alter them who knows how they are signed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from deformer_stream import model_store
from deformer_stream.codec import state
from tests.fuzz.hostile import Random, altered, column, mutated

Manifest = dict[str, Any]


def signed(manifest: Manifest) -> bytes:
    """The manifest as a file, with the fingerprints and the checksum that it should have."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, ArithmeticError):  # then it is not the matter
        schema = model_store.Schema.from_json(manifest["features"], manifest.get("window"))
        manifest["schema_fingerprint"] = schema.fingerprint
    if {"schema_fingerprint", "hyperparameters", "calibration", "files"} <= manifest.keys():
        manifest["fingerprint"] = model_store._compute_fingerprint(manifest)
    manifest["sha256"] = model_store._compute_digest(manifest)
    return model_store._render_manifest(manifest)


def fitted(manifest: Manifest, weights: bytes) -> Manifest:
    """The manifest with the size and the checksum of these weights."""
    entry = {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return manifest | {"files": {model_store.WEIGHTS: entry}}


def spoil(r: Random, directory: Path, manifest: Manifest, weights: bytes) -> None:
    """Write a model directory with something wrong in it. manifest, weights: of a good one, left as they are."""
    directory.mkdir(exist_ok=True)
    _remove(directory)
    raw = signed(dict(manifest))
    act = r.randrange(8)
    if act == 0:
        raw = mutated(r, raw)
    elif act == 1:
        weights = mutated(r, weights)
    elif act < 5:
        changed = altered(r, manifest if r.random() < 0.8 else _with_a_cycle(r, manifest))
        raw = signed(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
    elif act < 7:
        weights = _spoiled(r, weights)
        raw = signed(fitted(dict(manifest), weights))
    for name, data in ((model_store.MANIFEST, raw), (model_store.WEIGHTS, weights)):
        if act < 7 or r.random() < 0.5:
            (directory / name).write_bytes(data)
        else:
            _strange(r, directory / name)


def _with_a_cycle(r: Random, manifest: Manifest) -> Manifest:
    features = [dict(feature) for feature in manifest["features"]]
    r.choice(features)["period"] = r.choice([24.0, 24.0, 0, -1.0, 1e308, "24", [], None])
    return manifest | {"features": features}


def _spoiled(r: Random, weights: bytes) -> bytes:
    """safetensors: the length of a JSON header (8 bytes, little-endian), the header, the numbers."""
    length = int.from_bytes(weights[:8], "little")
    header, numbers = weights[8 : 8 + length], weights[8 + length :]
    act = r.randrange(4)
    if act == 0:
        numbers = mutated(r, numbers)
    elif act == 1:
        header = mutated(r, header)
    elif act == 2:
        header = json.dumps(altered(r, json.loads(header))).encode()
    else:
        kinds = [b"F16", b"BF16", b"F64", b"I64", b"U8", b"BOOL", b"F8_E4M3", b"X", b"C64", b"F4"]
        header = header.replace(b"F32", r.choice(kinds), r.randrange(1, 4))
    size = len(header) if r.random() < 0.9 else r.getrandbits(64)
    return size.to_bytes(8, "little") + header + numbers


def _strange(r: Random, path: Path) -> None:
    """What is no file, or nothing."""
    act = r.randrange(5)
    if act == 0:
        path.mkdir()
    elif act == 1:
        os.mkfifo(path)
    elif act == 2:
        path.symlink_to(path.name)
    elif act == 3:
        path.symlink_to("/dev/zero")


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def spoiled_state(r: Random, data: bytes) -> bytes:
    """A saved state with something wrong in it; its checksum is right, mostly."""
    magic, kind, version, _ = state.HEADER.unpack_from(data)
    body = data[state.HEADER.size :]
    act = r.randrange(8)
    if act == 0:
        return mutated(r, data)
    body = mutated(r, body) if act < 3 else _other_columns(r, body)
    if r.random() < 0.1:
        kind, version = r.choice([b"S", b"D", b"X"]), r.choice([0, 1, 2, 65_535])
    return bytes(state.HEADER.pack(magic, kind, version, hashlib.sha256(body).digest()) + body)


def _other_columns(r: Random, body: bytes) -> bytes:
    batch = pa.ipc.open_stream(body).read_all().to_batches()[0]
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in r.sample(sorted(columns), r.randrange(1, 4)):
        act = r.randrange(10)
        if act == 0:
            del columns[name]
        elif act == 1:
            columns[name] = r.choice(list(columns.values()))
        elif act == 2:
            columns[name] = column(r, 1)
        else:
            columns[name] = _other_cells(r, columns[name])
    made = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    if r.random() < 0.05:
        made = made.slice(0, 0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, made.schema, options=pa.ipc.IpcWriteOptions(compression=r.choice(["zstd", None]))
    ) as w:
        w.write_batch(made)
    return bytes(sink.getvalue().to_pybytes())


def _other_cells(r: Random, cells: pa.Array) -> pa.Array:
    """A column of one list, of the same type, with other cells in it."""
    kind = cells.type.value_type
    inside = cells.flatten().to_pylist()
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(inside) + 1)
        cell = r.choice(["", "a", "x" * 2000, "continuous"]) if pa.types.is_large_string(kind) else _number(r, kind)
        act = r.randrange(4)
        if act == 0:
            inside.insert(at, None if r.random() < 0.1 else cell)
        elif act == 1 and inside:
            inside.pop(at % len(inside))
        elif inside:
            inside[at % len(inside)] = r.choice([cell, inside[0]])
    return pa.array([inside], pa.large_list(kind))


def _number(r: Random, kind: pa.DataType) -> float | int:
    if pa.types.is_floating(kind):
        return r.choice([0.0, -1.0, 3.0, 0.5, 1e300, float("nan"), float("inf")])
    return r.choice([0, 1, -1, 2, 3, 2 ** (kind.bit_width - 1) - 1, -(2 ** (kind.bit_width - 1))])
