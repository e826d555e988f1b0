"""Record batches by hand, as a hostile producer sends them: the wire format of Kafka, and nobody who checks it first.

https://kafka.apache.org/documentation/#recordbatch, and Produce requests of version 7, which take every compression.
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
"""What a broker answers that does not lead the partition."""
Header = tuple[bytes, bytes]


def varint(number: int) -> bytes:
    """Zigzag, seven bits a byte, the lowest first."""
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest])


def record(place: int, key: bytes | None, value: bytes | None, headers: Sequence[Header] = ()) -> bytes:
    """The record at this place of its batch."""
    body = b"\0" + varint(0) + varint(place)
    for part in (key, value):
        body += varint(-1) if part is None else varint(len(part)) + part
    body += varint(len(headers))
    for name, content in headers:
        body += varint(len(name)) + name + varint(len(content)) + content
    return varint(len(body)) + body


def large_record(place: int, size: int) -> tuple[bytes, bytes]:
    """What stands before and after a value of `size` bytes, for who writes that piece by piece."""
    before = b"\0" + varint(0) + varint(place) + varint(-1) + varint(size)
    return varint(len(before) + size + 1) + before, varint(0)


def bomb(codec: int, size: int) -> bytes:
    """One record with a value of `size` bytes (a multiple of 2**20), compressed."""
    before, after = large_record(0, size)
    chunk = b"x" * 2**20
    pieces = [before, *([chunk] * (size // 2**20)), after]
    if codec == GZIP:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        return b"".join([*map(packer.compress, pieces), packer.flush()])
    compressor = cramjam.zstd.Compressor()
    for piece in pieces:
        compressor.compress(piece)
    return bytes(compressor.finish())


def compressed(codec: int, records: bytes) -> bytes:
    if codec == GZIP:
        return bytes(cramjam.gzip.compress(records))
    if codec == SNAPPY:
        return bytes(cramjam.snappy.compress_raw(records))
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(records))
    packer = cramjam.lz4.Compressor(level=1, block_linked=False)  # Kafka takes no linked blocks
    packer.compress(records)
    return bytes(packer.finish())


def java_snappy(records: bytes, block: int = 1024) -> bytes:
    """As Java clients write it: a head, then blocks, each after its length."""
    out = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    for at in range(0, len(records), block):
        packed = bytes(cramjam.snappy.compress_raw(records[at : at + block]))
        out += struct.pack(">I", len(packed)) + packed
    return out


def batch(records: bytes, count: int, codec: int = 0, stamp: int | None = None) -> bytes:
    """A batch of `count` records. stamp: milliseconds since 1970."""
    millis = int(time.time() * 1000) if stamp is None else stamp
    tail = struct.pack(">hiqqqhii", codec, count - 1, millis, millis, -1, -1, -1, count) + records
    return struct.pack(">qiibI", 0, 9 + len(tail), -1, 2, crc32c.crc32c(tail)) + tail


def send(bootstrap: str, topic: str, one_batch: bytes, partition: int = 0) -> int:
    """The offset at which the broker has put the batch. Raises AssertionError where it has not."""
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
