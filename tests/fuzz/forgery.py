"""Damaged model directories and saved states whose checksums are nevertheless valid."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from deformer_stream import model_manifest, model_store
from deformer_stream.codec import state
from tests.fuzz.hostile import Random, alter_document, draw_column, mutate

Manifest = dict[str, Any]


def sign(manifest: Manifest) -> bytes:
    """Return a manifest as a file, with the fingerprints and the checksum that its contents require."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, ArithmeticError):  # then it is not the matter
        schema = model_store.Schema.from_json(manifest["features"], manifest.get("window"))
        manifest["schema_fingerprint"] = schema.fingerprint
    if {"schema_fingerprint", "hyperparameters", "calibration", "files"} <= manifest.keys():
        manifest["fingerprint"] = model_manifest.compute_fingerprint(manifest)
    manifest["sha256"] = model_manifest.compute_digest(manifest)
    return model_manifest.render_manifest(manifest)


def set_weights_entry(manifest: Manifest, weights: bytes) -> Manifest:
    """Return the manifest with the size and the checksum of these weights."""
    entry = {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return manifest | {"files": {model_store.WEIGHTS: entry}}


def write_damaged_model(r: Random, directory: Path, manifest: Manifest, weights: bytes) -> None:
    """Write a damaged model directory.

    Args:
        r: Random numbers.
        directory: The directory; existing files in it are removed.
        manifest: The manifest of a valid model; it is not changed.
        weights: The weights of a valid model.
    """
    directory.mkdir(exist_ok=True)
    _clear(directory)
    raw = sign(dict(manifest))
    act = r.randrange(8)
    if act == 0:
        raw = mutate(r, raw)
    elif act == 1:
        weights = mutate(r, weights)
    elif act < 5:
        changed = alter_document(r, manifest if r.random() < 0.8 else _add_period(r, manifest))
        raw = sign(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
    elif act < 7:
        weights = _damage_weights(r, weights)
        raw = sign(set_weights_entry(dict(manifest), weights))
    for name, data in ((model_store.MANIFEST, raw), (model_store.WEIGHTS, weights)):
        if act < 7 or r.random() < 0.5:
            (directory / name).write_bytes(data)
        else:
            _make_special_file(r, directory / name)


def _add_period(r: Random, manifest: Manifest) -> Manifest:
    """Return the manifest with a period, possibly an impossible one, for one of its features."""
    features = [dict(feature) for feature in manifest["features"]]
    r.choice(features)["period"] = r.choice([24.0, 24.0, 0, -1.0, 1e308, "24", [], None])
    return manifest | {"features": features}


def _damage_weights(r: Random, weights: bytes) -> bytes:
    """Return a damaged safetensors file: header length (8 bytes, little-endian), JSON header, numbers."""
    length = int.from_bytes(weights[:8], "little")
    header, numbers = weights[8 : 8 + length], weights[8 + length :]
    act = r.randrange(4)
    if act == 0:
        numbers = mutate(r, numbers)
    elif act == 1:
        header = mutate(r, header)
    elif act == 2:
        header = json.dumps(alter_document(r, json.loads(header))).encode()
    else:
        kinds = [b"F16", b"BF16", b"F64", b"I64", b"U8", b"BOOL", b"F8_E4M3", b"X", b"C64", b"F4"]
        header = header.replace(b"F32", r.choice(kinds), r.randrange(1, 4))
    size = len(header) if r.random() < 0.9 else r.getrandbits(64)
    return size.to_bytes(8, "little") + header + numbers


def _make_special_file(r: Random, path: Path) -> None:
    """Create something that is not a regular file, or nothing."""
    act = r.randrange(5)
    if act == 0:
        path.mkdir()
    elif act == 1:
        os.mkfifo(path)
    elif act == 2:
        path.symlink_to(path.name)
    elif act == 3:
        path.symlink_to("/dev/zero")


def _clear(directory: Path) -> None:
    """Remove everything in a directory."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def damage_state(r: Random, data: bytes) -> bytes:
    """Return a damaged saved state, in most cases with a valid checksum."""
    magic, kind, version, _ = state.HEADER.unpack_from(data)
    body = data[state.HEADER.size :]
    act = r.randrange(8)
    if act == 0:
        return mutate(r, data)
    body = mutate(r, body) if act < 3 else _change_columns(r, body)
    if r.random() < 0.1:
        kind, version = r.choice([b"S", b"D", b"X"]), r.choice([0, 1, 2, 65_535])
    return bytes(state.HEADER.pack(magic, kind, version, hashlib.sha256(body).digest()) + body)


def _change_columns(r: Random, body: bytes) -> bytes:
    """Return the body of a saved state with some columns changed, removed or exchanged."""
    batch = pa.ipc.open_stream(body).read_all().to_batches()[0]
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in r.sample(sorted(columns), r.randrange(1, 4)):
        act = r.randrange(10)
        if act == 0:
            del columns[name]
        elif act == 1:
            columns[name] = r.choice(list(columns.values()))
        elif act == 2:
            columns[name] = draw_column(r, 1)
        else:
            columns[name] = _change_cells(r, columns[name])
    made = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    if r.random() < 0.05:
        made = made.slice(0, 0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, made.schema, options=pa.ipc.IpcWriteOptions(compression=r.choice(["zstd", None]))
    ) as w:
        w.write_batch(made)
    return bytes(sink.getvalue().to_pybytes())


def _change_cells(r: Random, cells: pa.Array) -> pa.Array:
    """Return a column that holds one list, with some cells of the list changed."""
    kind = cells.type.value_type
    inside = cells.flatten().to_pylist()
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(inside) + 1)
        cell = (
            r.choice(["", "a", "x" * 2000, "continuous"]) if pa.types.is_large_string(kind) else _draw_number(r, kind)
        )
        act = r.randrange(4)
        if act == 0:
            inside.insert(at, None if r.random() < 0.1 else cell)
        elif act == 1 and inside:
            inside.pop(at % len(inside))
        elif inside:
            inside[at % len(inside)] = r.choice([cell, inside[0]])
    return pa.array([inside], pa.large_list(kind))


def _draw_number(r: Random, kind: pa.DataType) -> float | int:
    """Return a number that is unusual for the column type."""
    if pa.types.is_floating(kind):
        return r.choice([0.0, -1.0, 3.0, 0.5, 1e300, float("nan"), float("inf")])
    return r.choice([0, 1, -1, 2, 3, 2 ** (kind.bit_width - 1) - 1, -(2 ** (kind.bit_width - 1))])
