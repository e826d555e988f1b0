"""Events for the benchmarks of streams: readings of many open records, as messages and as Kafka record batches.

A Kafka client in Python needs more time to send a message than the consumer needs to score it, and both would share the
processor's cores. Therefore this module encodes record batches itself and sends them over one connection per topic.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import torch

from benchmarks.tables import train_detector
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.kernels.cpu import is_supported
from deformer_stream.kernels.library import load_library
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema
from tests.connectors.raw_batches import encode_batch, encode_varint

BATCH_MESSAGES = 500
"""Messages of a record batch: as many as a producer gathers in a few milliseconds at the rates measured here."""
TRAINING_RECORDS = 20_000
"""Records of the table of `train_model`: more than the largest number of exemplars."""
TRAINING_TIME = "60s"
"""The time limit of `train_model`."""
OUTLIER_VALUE = 1e9
"""A value that is so improbable that its record raises an alert at once."""
ACKNOWLEDGEMENT_BYTES = 4 + 2 + 8 + 8 + 8
"""Bytes of a broker's response per partition: number, error code, offset, time, and start of the log."""
_VARINT = [encode_varint(n) for n in range(2**14)]


def make_schema(features: int) -> Schema:
    """Return a schema of continuous features f0, f1, and so on."""
    return Schema(tuple(Feature(f"f{i}", "continuous") for i in range(features)))


def make_model(preset: str, features: int, gaussians: int, precision: str = "float32", seed: int = 0) -> DEformer:
    """Return a model with random weights, which are as fast as trained ones, and with compiled kernels if possible.

    Args:
        preset: The preset of the hyperparameters.
        features: The number of features.
        gaussians: Components of the Gaussian prior, 0 for none.
        precision: The precision of the layers' matrix products.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    config = with_(PRESETS[preset], gaussians=gaussians, precision=precision)  # type: ignore[arg-type]
    model = DEformer(make_schema(features), config).eval()
    if is_supported(model):
        model.kernel_library = load_library(model.config.precision == "bfloat16")
    return model


def train_model(directory: Path, preset: str, features: int) -> None:
    """Train a model as `deformer-train` does by default, on readings with the distribution of those of `EventFeed`.

    Other than a model with random weights, it has all terms of the alert and of the ranking of whole records.

    Args:
        directory: Where the model directory is written.
        preset: The preset of the hyperparameters.
        features: The number of features.
    """
    values = np.random.default_rng(0).normal(size=(TRAINING_RECORDS, features))
    rows = pa.table({f"f{i}": values[:, i] for i in range(features)})
    train_detector(rows, 0, TRAINING_TIME, directory, preset=preset)


def make_quiet_calibration() -> Calibration:
    """Return a calibration under which only records with an `OUTLIER_VALUE` raise an alert."""
    return Calibration.from_statistics(60 + np.arange(199) / 100, "random")


@dataclass(frozen=True, slots=True)
class EventFeed:
    """An endless sequence of readings of records, a fixed number of which is open at once.

    When all features of the open records have arrived, the next records begin.

    Attributes:
        features: The number of features of a record.
        num_open: The number of records that are open at once.
        partition: The partition of the records, which is part of their ids.
        seed: Seed of the orders and values.
        readings_per_outlier: How many readings come on average to one `OUTLIER_VALUE`; 0 for no outliers.
    """

    features: int
    num_open: int
    partition: int = 0
    seed: int = 0
    readings_per_outlier: int = 0

    def readings(self) -> Iterator[tuple[str, str, float]]:
        """Yield record id, feature name and value of each reading, without end."""
        rng = np.random.default_rng((self.seed, self.partition))
        generation = 0
        while True:
            orders = np.argsort(rng.random((self.num_open, self.features)), 1)
            values = np.round(rng.normal(size=(self.num_open, self.features)), 5).tolist()
            names = [f"p{self.partition}-{generation}/{i:05d}" for i in range(self.num_open)]
            for place in range(self.features):
                codes = orders[:, place].tolist()
                is_outlier = [False] * self.num_open
                if self.readings_per_outlier:
                    is_outlier = (rng.random(self.num_open) * self.readings_per_outlier < 1).tolist()
                for i in rng.permutation(self.num_open).tolist():
                    yield names[i], f"f{codes[i]}", OUTLIER_VALUE if is_outlier[i] else values[i][place]
            generation += 1

    def json_messages(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and JSON value of messages with one reading each, which leave the time to the broker."""
        for record, feature, value in self.readings():
            owner = record.encode()
            yield owner, b'{"record":"%b","feature":"%b","value":%r}' % (owner, feature.encode(), value)

    def json_messages_of_many(self, readings: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and JSON value of messages with several readings of one record each.

        Args:
            readings: Readings of a message, a divisor of the number of features.
        """
        rng = np.random.default_rng((self.seed, self.partition))
        generation = 0
        while True:
            for start in range(0, self.features, readings):
                for i in rng.permutation(self.num_open).tolist():
                    record = f"p{self.partition}-{generation}/{i:05d}"
                    values = {f"f{start + k}": v for k, v in enumerate(rng.normal(size=readings).tolist())}
                    yield record.encode(), orjson.dumps({"record": record, "time": 1583750073.5, "values": values})
            generation += 1

    def arrow_messages(self, rows: int) -> Iterator[tuple[None, bytes]]:
        """Yield Arrow streams with this many readings each, without a key."""
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


def encode_records(messages: list[tuple[bytes | None, bytes]]) -> bytes:
    """Encode messages, key and value each, as the records of one Kafka record batch."""
    parts = []
    for place, (key, value) in enumerate(messages):
        length = _VARINT[len(value)] if len(value) < len(_VARINT) else encode_varint(len(value))
        owner = b"\1" if key is None else _VARINT[len(key)] + key
        body = b"\0\0" + _VARINT[place] + owner + length + value + b"\0"
        parts += [_VARINT[len(body)] if len(body) < len(_VARINT) else encode_varint(len(body)), body]
    return b"".join(parts)


class ProduceConnection:
    """A connection to a Kafka broker that sends record batches of one topic (Produce requests, version 7).

    Args:
        bootstrap: Host and port of the broker, which must lead all partitions of the topic.
        topic: The topic.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        host, port = bootstrap.split(",")[0].rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._topic = topic.encode()
        self._sent = 0

    def send(self, batches: Sequence[tuple[int, bytes, int]]) -> float:
        """Send batches of different partitions in one request.

        Args:
            batches: Partition, encoded records (see `encode_records`) and number of records of each batch.

        Returns:
            The time of the request, in seconds since 1970, which is also the timestamp of the records.
        """
        now = time.time()
        name = self._topic
        body = struct.pack(">hhih4s", 0, 7, 1, 4, b"feed") + struct.pack(">hhi", -1, 1, 30_000)
        body += struct.pack(">ih", 1, len(name)) + name + struct.pack(">i", len(batches))
        for partition, records, count in batches:
            data = encode_batch(records, count, 0, int(now * 1000))
            body += struct.pack(">ii", partition, len(data)) + data
        self._socket.sendall(struct.pack(">i", len(body)) + body)
        self._sent += 1
        return now

    def wait_for_acknowledgements(self, at_most: int = 0) -> None:
        """Read acknowledgements until at most `at_most` are outstanding.

        Raises:
            AssertionError: The broker has rejected a batch.
        """
        while self._sent > at_most:
            answer = self._answers.read(*struct.unpack(">i", self._answers.read(4)))
            at = 4 + 4 + 2 + len(self._topic)
            (partitions,) = struct.unpack_from(">i", answer, at)
            results = (struct.unpack_from(">ih", answer, at + 4 + ACKNOWLEDGEMENT_BYTES * i) for i in range(partitions))
            errors = {partition: error for partition, error in results if error}
            assert not errors, f"the broker rejected batches; error codes by partition: {errors}"
            self._sent -= 1

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self._socket.close()
