"""Record batches and Produce requests encoded by hand, to send what a hostile or faulty producer could send.

The format of batches is described at https://kafka.apache.org/documentation/#recordbatch. Produce requests have version
7, which accepts every compression.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

import crc32c

GZIP = 1
"""The number of the compression in the attributes of a batch."""
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
