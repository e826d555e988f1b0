"""Record batches and Produce requests encoded by hand, to send what a hostile or faulty producer could send.

The format of batches is described at https://kafka.apache.org/documentation/#recordbatch. Produce requests have version
7, which accepts every compression.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Sequence

import cramjam
import crc32c

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
LEADERLESS = 6
"""The error code of a broker that does not lead the partition."""
Header = tuple[bytes, bytes]


def encode_varint(number: int) -> bytes:
    """Return a number as a zigzag varint: seven bits per byte, lowest bits first."""
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest])


def encode_record(place: int, key: bytes | None, value: bytes | None, headers: Sequence[Header] = ()) -> bytes:
    """Return a record; `place` is its index within the batch."""
    body = b"\0" + encode_varint(0) + encode_varint(place)
    for part in (key, value):
        body += encode_varint(-1) if part is None else encode_varint(len(part)) + part
    body += encode_varint(len(headers))
    for name, content in headers:
        body += encode_varint(len(name)) + name + encode_varint(len(content)) + content
    return encode_varint(len(body)) + body


def encode_large_record(place: int, size: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the value of a record, so that the value can be written in pieces.

    Args:
        place: The index of the record within its batch.
        size: The size of the value in bytes.
    """
    before = b"\0" + encode_varint(0) + encode_varint(place) + encode_varint(-1) + encode_varint(size)
    return encode_varint(len(before) + size + 1) + before, encode_varint(0)


def make_bomb(codec: int, size: int) -> bytes:
    """Return compressed records that consist of one record with a large value.

    Args:
        codec: The compression, GZIP or ZSTD.
        size: The size of the value in bytes, a multiple of 2**20.
    """
    before, after = encode_large_record(0, size)
    chunk = b"x" * 2**20
    pieces = [before, *([chunk] * (size // 2**20)), after]
    if codec == GZIP:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        return b"".join([*map(packer.compress, pieces), packer.flush()])
    compressor = cramjam.zstd.Compressor()
    for piece in pieces:
        compressor.compress(piece)
    return bytes(compressor.finish())


def compress(codec: int, records: bytes) -> bytes:
    """Return encoded records, compressed."""
    if codec == GZIP:
        return bytes(cramjam.gzip.compress(records))
    if codec == SNAPPY:
        return bytes(cramjam.snappy.compress_raw(records))
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(records))
    packer = cramjam.lz4.Compressor(level=1, block_linked=False)  # Kafka takes no linked blocks
    packer.compress(records)
    return bytes(packer.finish())


def compress_java_snappy(records: bytes, block: int = 1024) -> bytes:
    """Return records compressed as Java clients do it: a header, and then blocks with their lengths."""
    out = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    for at in range(0, len(records), block):
        packed = bytes(cramjam.snappy.compress_raw(records[at : at + block]))
        out += struct.pack(">I", len(packed)) + packed
    return out


def encode_batch(records: bytes, count: int, codec: int = 0, stamp: int | None = None) -> bytes:
    """Return a batch.

    Args:
        records: The encoded records, compressed if `codec` says so.
        count: Number of records.
        codec: The attributes of the batch, of which the lowest bits are the compression.
        stamp: The timestamp in milliseconds since 1970, by default the present time.
    """
    millis = int(time.time() * 1000) if stamp is None else stamp
    tail = struct.pack(">hiqqqhii", codec, count - 1, millis, millis, -1, -1, -1, count) + records
    return struct.pack(">qiibI", 0, 9 + len(tail), -1, 2, crc32c.crc32c(tail)) + tail


def send_batch(bootstrap: str, topic: str, one_batch: bytes, partition: int = 0) -> int:
    """Send a batch to a partition and return the offset that the broker has assigned to it.

    Raises:
        AssertionError: The broker rejects the batch.
    """
    host, port = bootstrap.split(",")[0].rsplit(":", 1)
    name = topic.encode()
    request = struct.pack(">hhih4s", 0, 7, 1, 4, b"test") + struct.pack(">hhi", -1, -1, 30_000)
    request += struct.pack(">ih", 1, len(name)) + name + struct.pack(">iii", 1, partition, len(one_batch)) + one_batch
    error, offset, deadline = LEADERLESS, 0, time.monotonic() + 30
    while error == LEADERLESS and time.monotonic() < deadline:  # as a partition is when its topic has just been made
        with socket.create_connection((host, int(port)), 60) as s, s.makefile("rb") as answers:
            s.sendall(struct.pack(">i", len(request)) + request)
            answer = answers.read(*struct.unpack(">i", answers.read(4)))
        error, offset = struct.unpack_from(">hq", answer, 4 + 4 + 2 + len(name) + 4 + 4)
    assert error == 0, f"the broker answers {error}"
    return int(offset)
