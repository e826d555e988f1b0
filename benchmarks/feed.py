"""Events for the benchmarks of the stream: many open records, reading by reading, as messages and as Kafka's own bytes.

A client in Python takes longer to send a message than the consumer may take to score it, and both would share the
cores. So here record batches are put together by hand, cheaply, and sent over one connection for each topic.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_
from itertools import islice

import numpy as np
import orjson
import pyarrow as pa
import torch

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import fits
from deformer_stream.model.deformer import PRESETS, DEformer
from deformer_stream.model.schema import Feature, Schema
from tests.connectors.raw import batch, varint

BATCH = 500
"""Messages of a record batch: what a producer gathers in some milliseconds at the rates measured here."""
WILD = 1e9
"""A value that no model expects: its record alerts at once, whatever came before."""
ANSWERED = 4 + 2 + 8 + 8 + 8
"""Bytes that a broker answers about a partition: its number, an error, offset, time, where the log begins."""
_VARINT = [varint(n) for n in range(2**14)]


def schema_of(features: int) -> Schema:
    return Schema(tuple(Feature(f"f{i}", "continuous") for i in range(features)))


def model_of(preset: str, features: int, gaussians: int, precision: str = "float32") -> DEformer:
    """Random weights, for what they are changes nothing about their speed; with compiled code where it fits. gaussians:
    of the guide, 0 is none."""
    torch.manual_seed(0)
    config = with_(PRESETS[preset], gaussians=gaussians, precision=precision)  # type: ignore[arg-type]
    model = DEformer(schema_of(features), config).eval()
    if fits(model):
        model.library = build.library(model.config.precision == "bfloat16")
    return model


def calm_calibration() -> Calibration:
    """Nothing alerts but what is `WILD`."""
    return Calibration.from_statistics(60 + np.arange(199) / 100, "random")


@dataclass(frozen=True, slots=True)
class Events:
    """Readings of records of which `open` are open at once, each completed by its last reading; then the next ones
    come. partition: of these records, part of their ids. wild: one in so many readings is `WILD`, at random, 0 for
    none."""

    features: int
    open: int
    partition: int = 0
    seed: int = 0
    wild: int = 0

    def readings(self) -> Iterator[tuple[str, str, float]]:
        """Record, feature, value, for ever."""
        rng = np.random.default_rng((self.seed, self.partition))
        generation = 0
        while True:
            orders = np.argsort(rng.random((self.open, self.features)), 1)
            values = np.round(rng.normal(size=(self.open, self.features)), 5).tolist()
            names = [f"p{self.partition}-{generation}/{i:05d}" for i in range(self.open)]
            for place in range(self.features):
                codes = orders[:, place].tolist()
                wild = (rng.random(self.open) * self.wild < 1).tolist() if self.wild else [False] * self.open
                for i in rng.permutation(self.open).tolist():
                    yield names[i], f"f{codes[i]}", WILD if wild[i] else values[i][place]
            generation += 1

    def singles(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and JSON of one reading each, whose time is the broker's."""
        for record, feature, value in self.readings():
            owner = record.encode()
            yield owner, b'{"record":"%b","feature":"%b","value":%r}' % (owner, feature.encode(), value)

    def many(self, readings: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and JSON of so many readings of a record each; a divisor of the number of features."""
        rng = np.random.default_rng((self.seed, self.partition))
        generation = 0
        while True:
            for start in range(0, self.features, readings):
                for i in rng.permutation(self.open).tolist():
                    record = f"p{self.partition}-{generation}/{i:05d}"
                    values = {f"f{start + k}": v for k, v in enumerate(rng.normal(size=readings).tolist())}
                    yield record.encode(), orjson.dumps({"record": record, "time": 1583750073.5, "values": values})
            generation += 1

    def arrow(self, rows: int) -> Iterator[tuple[None, bytes]]:
        """Arrow streams of so many readings."""
        readings = self.readings()
        while True:
            records, features, values = zip(*islice(readings, rows), strict=True)
            table = pa.record_batch(
                [records, pa.array(features).dictionary_encode(), values, np.full(rows, 1583750073.5)],
                ["record", "feature", "value", "time"],
            )
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_batch(table)
            yield None, sink.getvalue().to_pybytes()


def records_of(messages: list[tuple[bytes | None, bytes]]) -> bytes:
    """Messages as the records of one batch."""
    parts = []
    for place, (key, value) in enumerate(messages):
        length = _VARINT[len(value)] if len(value) < len(_VARINT) else varint(len(value))
        owner = b"\1" if key is None else _VARINT[len(key)] + key
        body = b"\0\0" + _VARINT[place] + owner + length + value + b"\0"
        parts += [_VARINT[len(body)] if len(body) < len(_VARINT) else varint(len(body)), body]
    return b"".join(parts)


class Wire:
    """One connection that sends batches (Produce, version 7) and reads the acknowledgements when asked to."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        host, port = bootstrap.split(",")[0].rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._topic = topic.encode()
        self._sent = 0

    def send(self, batches: Sequence[tuple[int, bytes, int]]) -> float:
        """Send batches of now, of different partitions, in one request: partition, records and how many these are. The
        time of sending, seconds since 1970."""
        now = time.time()
        name = self._topic
        body = struct.pack(">hhih4s", 0, 7, 1, 4, b"feed") + struct.pack(">hhi", -1, 1, 30_000)
        body += struct.pack(">ih", 1, len(name)) + name + struct.pack(">i", len(batches))
        for partition, records, count in batches:
            data = batch(records, count, 0, int(now * 1000))
            body += struct.pack(">ii", partition, len(data)) + data
        self._socket.sendall(struct.pack(">i", len(body)) + body)
        self._sent += 1
        return now

    def settle(self, at_most: int = 0) -> None:
        """Read acknowledgements until at most so many are outstanding. Raises AssertionError where a batch was
        refused."""
        while self._sent > at_most:
            answer = self._answers.read(*struct.unpack(">i", self._answers.read(4)))
            at = 4 + 4 + 2 + len(self._topic)
            (partitions,) = struct.unpack_from(">i", answer, at)
            found = (struct.unpack_from(">ih", answer, at + 4 + ANSWERED * i) for i in range(partitions))
            refused = {partition: error for partition, error in found if error}
            assert not refused, f"the broker answers {refused}"
            self._sent -= 1

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
