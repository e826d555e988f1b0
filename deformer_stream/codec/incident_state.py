"""Encoding of the states of incident trackers as bytes, and decoding, for the state topic of `incidents`.

The header is that of all saved state (`state_header`). The body is the length of the content (8 bytes, big-endian) and
the content as MessagePack, compressed with zstd if it is large. MessagePack holds numbers that JSON cannot express,
such as the logarithm of 0. The content is parsed only after the checksum is verified, and against the types of the
state.

- Version 2 has the `TrackerState` of the only model. It is still written if there is one model, so that earlier
  releases can read it.
- Version 3 has a map with the name and the `TrackerState` of each of several models.

The checksum does not include the header. So the content itself must show which of the two versions it has. A map of
models, read as the state of one model, would be a state without devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import cramjam
import msgspec

from deformer_stream.codec.state_header import HEADER, MAGIC
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import StateError
from deformer_stream.incidents.tracker import TrackerState

INCIDENT_STATE = b"I"
"""The byte `kind` of the header."""

FORMAT_VERSION = 2
"""The format version of the state of one model."""

SET_VERSION = 3
"""The format version of the state of several models."""

MIN_COMPRESSED_BYTES = 16_384
"""Size in bytes from which the content is compressed."""

MAX_CONTENT_BYTES = 2**31
"""Largest size of the content that is decoded. Ten thousand devices need a few MiB."""

_LENGTH_BYTES = 8
_REMEDY = "choose with --lost-state how to continue without it"


class _Parts(msgspec.Struct):
    """Parts that the content of version 2 always has, and that of version 3 does not."""

    state_by_device: msgspec.Raw
    order: msgspec.Raw


_parts_decoder = msgspec.msgpack.Decoder(_Parts)
_decoder = msgspec.msgpack.Decoder(TrackerState)
_set_decoder = msgspec.msgpack.Decoder(dict[str, TrackerState])


def encode_incident_state(state_by_name: Mapping[str, TrackerState]) -> bytes:
    """Return the state of the tracker of each model as bytes.

    Args:
        state_by_name: The states by name of the model; the name of the only model is `ONLY_MODEL`.
    """
    has_one_model = state_by_name.keys() == {ONLY_MODEL}
    version = FORMAT_VERSION if has_one_model else SET_VERSION
    content = msgspec.msgpack.encode(state_by_name[ONLY_MODEL] if has_one_model else dict(state_by_name))
    body = len(content).to_bytes(_LENGTH_BYTES, "big")
    body += bytes(cramjam.zstd.compress(content)) if len(content) >= MIN_COMPRESSED_BYTES else content
    return HEADER.pack(MAGIC, INCIDENT_STATE, version, hashlib.sha256(body).digest()) + body


def decode_incident_state(data: bytes, description: str = "the saved state of incidents") -> dict[str, TrackerState]:
    """Return the states that were encoded as `data`, by name of the model; `ONLY_MODEL` for that of one model.

    Args:
        data: The result of `encode_incident_state`.
        description: What the error message calls the data, such as "saved state of partition 0 at offset 17".

    Raises:
        StateError: If the data is damaged or has an unsupported format version.
    """
    if len(data) < HEADER.size + _LENGTH_BYTES:
        raise StateError(f"{description} was cut short: {_REMEDY}")
    magic, kind, version, digest = HEADER.unpack_from(data)
    if magic != MAGIC or kind != INCIDENT_STATE:
        raise StateError(f"{description} was written by another program: {_REMEDY}")
    if version not in (FORMAT_VERSION, SET_VERSION):
        raise StateError(
            f"{description} has format version {version}, but this release of deformer-stream reads {FORMAT_VERSION} "
            f"and {SET_VERSION}: use the release that wrote it, or {_REMEDY}"
        )
    body = data[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise StateError(f"{description} was altered (its checksum does not match): {_REMEDY}")
    length, content = int.from_bytes(body[:_LENGTH_BYTES], "big"), body[_LENGTH_BYTES:]
    try:
        if not 0 < length <= MAX_CONTENT_BYTES:
            raise ValueError(f"it states a length of {length} bytes")
        if length >= MIN_COMPRESSED_BYTES:
            buffer = bytearray(length)  # so that a forged state cannot need more memory than it states
            if cramjam.zstd.decompress_into(content, buffer) != length:
                raise ValueError("it is shorter than stated")
            content = bytes(buffer)
        if version == FORMAT_VERSION:
            _parts_decoder.decode(content)
            return {ONLY_MODEL: _decoder.decode(content)}
        state_by_name = _set_decoder.decode(content)
        if ONLY_MODEL in state_by_name:
            raise ValueError("one of several models has no name")
        return state_by_name
    except (ValueError, msgspec.DecodeError, cramjam.DecompressionError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StateError(f"{description} cannot be decoded ({reason}): {_REMEDY}") from error


def check_incident_state(snapshot: bytes, decisions: tuple[bytes, ...]) -> None:
    """Check that the saved state of a partition can be decoded.

    Args:
        snapshot: The encoded state.
        decisions: Not used, because the results of a tracker follow from the log alone.

    Raises:
        StateError: It cannot be decoded.
    """
    decode_incident_state(snapshot)
