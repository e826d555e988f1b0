"""Readings of many long records in order of time, as JSON messages that are sent to Kafka at a fixed rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.feed import ProduceConnection, encode_records, make_quiet_calibration
from benchmarks.icu import read_stays
from benchmarks.irregular_records import FIRST_TIME, Readings, make_readings
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import KINDS, CusumScale
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.runtime.timing import limit_rate
from trainer.recipes import irregular_model_config
from trainer.settings import TrainConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MINUTE = 60_000_000
"""Microseconds."""
OUTLIER_SHARE = 0.05
"""Share of the records that get an outlier, so that they raise an alert."""
OUTLIER = 1e6
"""Value of an outlier."""
EXTREME_NATS = 7.0
"""−ln p of a reading with which its record raises an alert. In models with random weights, that of an `OUTLIER` is
about 9, and that of other readings seldom above 2."""
QUIET_STATISTIC = 62.0
"""A statistic above all those of the quiet calibration."""


def make_irregular_model(preset: str, sensors: Sequence[str], precision: str = "float32") -> DEformer:
    """Return a model of irregular readings as `deformer-train` creates it, with random weights.

    Random weights are as fast as trained ones.

    Args:
        preset: The preset of the hyperparameters.
        sensors: Names of the sensors, all of which are continuous.
        precision: The precision of the layers' matrix products.
    """
    torch.manual_seed(0)
    settings = TrainConfig(out=Path("unused"), irregular=True, preset=preset)  # type: ignore[arg-type]
    config = replace(irregular_model_config(settings, len(sensors)), precision=precision)  # type: ignore[arg-type]
    features = tuple(Feature(name, "continuous") for name in sensors)
    model = DEformer(Schema(features, reading_times=ReadingTimes(2 * 24 * 60 * MINUTE, MINUTE)), config).eval()
    if model.process is not None:
        model.process.factors.copy_(0.3 * torch.randn(model.process.factors.shape))
    model.kernel_library = load_library(config.precision == "bfloat16")
    return model


def make_irregular_calibration(schema: Schema) -> Calibration:
    """Return a calibration with cumulative sums of all kinds, under which only an `OUTLIER` raises an alert.

    Args:
        schema: The sensors.
    """
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(len(schema)), 200)
    values = rng.normal(size=len(codes))
    marginals = Marginals.fit(schema, codes, values)
    is_first = np.arange(len(codes)) % 2 == 0
    steps, *_ = Steps.fit_halves(schema, codes, values, rng.permutation(values), is_first)
    # The sums cost what they cost in a trained model, but only single readings can have a large statistic.
    slopes = np.full((len(KINDS), len(schema)), 1e-9)
    slopes[KINDS.index("extreme")] = QUIET_STATISTIC / EXTREME_NATS
    scale = CusumScale(slopes, np.zeros_like(slopes), 1e-9, 0.0, marginals, steps)
    return replace(make_quiet_calibration(), cusum_scale=scale)


def read_or_simulate_records(folder: Path | None, num_records: int, num_readings: int) -> Readings:
    """Return intensive-care stays (`benchmarks.icu`), or simulated records if there is no data.

    Args:
        folder: The folder icu2012; None if there is none.
        num_records: Number of records.
        num_readings: Number of readings of a simulated record.
    """
    if folder is not None and folder.exists():
        stays, _ = read_stays(folder)
        return stays.select(np.random.default_rng(0).permutation(len(stays.records))[:num_records])
    rng = np.random.default_rng(0)
    n = num_records * num_readings
    names = np.array([f"sensor-{i:02d}" for i in range(40)], object)[rng.integers(0, 40, n)]
    records = np.array([f"device-{i:06d}" for i in range(num_records)], object)[rng.integers(0, num_records, n)]
    # Each record has a reading every five minutes on average.
    times = np.round(rng.random(n) * 300 * num_readings)
    return make_readings(records, names, np.round(rng.normal(size=n), 2), times)


@dataclass(frozen=True, slots=True)
class MessageFeed:
    """M messages in the order in which they are sent.

    Attributes:
        readings: The readings, record after record.
        order: (M,) index of the reading of each message.
        partitions: (M,) partition of each message, which follows from the record.
        values: (M,) value of each message; some are outliers.
    """

    readings: Readings
    order: Ints
    partitions: Ints
    values: Floats

    @staticmethod
    def in_order_of_time(readings: Readings, num_messages: int, num_partitions: int) -> MessageFeed:
        """Return the earliest readings by the time since the beginning of their records, with a few outliers."""
        order = np.argsort(readings.times, kind="stable")[:num_messages]
        record, values = readings.record_index[order], readings.values[order]
        rng = np.random.default_rng(1)
        chosen = rng.permutation(len(readings.records))[: max(1, round(OUTLIER_SHARE * len(readings.records)))]
        for own_record in chosen.tolist():
            own = np.flatnonzero(record == own_record)
            own = own[own > num_messages // 4]  # not during the start of the consumer
            if len(own):
                values[rng.choice(own)] = OUTLIER
        return MessageFeed(readings, order, record % num_partitions, values)

    def encode(self) -> list[tuple[bytes, bytes]]:
        """Return key and value of each message."""
        names = [record.encode() for record in self.readings.records]
        sensors = [sensor.encode() for sensor in self.readings.sensors]
        columns = (
            self.readings.record_index[self.order],
            self.readings.codes[self.order],
            self.values,
            self.readings.times[self.order] + FIRST_TIME,
        )
        return [
            (
                names[record],
                b'{"record":"%b","feature":"%b","value":%r,"time":%r}' % (names[record], sensors[code], v, t),
            )
            for record, code, v, t in zip(*(column.tolist() for column in columns), strict=True)
        ]


def produce(bootstrap: str, topic: str, feed: MessageFeed, rate: int, linger: float, results: Connection) -> None:
    """Send all messages at a steady rate, in a process of its own.

    It sends "ready" to `results`, begins when it receives a message, and sends for each message the time at which it
    was sent, (M,) seconds since 1970.

    Args:
        bootstrap: Host and port of the broker.
        topic: The topic.
        feed: The messages.
        rate: Messages per second.
        linger: Seconds between two requests.
        results: Connection to the process that measures.
    """
    messages, partitions = feed.encode(), feed.partitions.tolist()
    connection = ProduceConnection(bootstrap, topic)
    requests = []
    begins = np.minimum(np.arange(0, len(messages) / (rate * linger) + 1) * rate * linger, len(messages)).astype(int)
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        parts: dict[int, list[tuple[bytes | None, bytes]]] = {}
        for i in range(begin, end):
            parts.setdefault(partitions[i], []).append(messages[i])
        batches = [(partition, encode_records(part), len(part)) for partition, part in parts.items()]
        requests.append((end - begin, batches))
    results.send("ready")
    results.recv()
    times: list[float] = []
    for count, batches in limit_rate(iter(requests), 1 / linger):
        sent_at = connection.send(batches) if batches else time.time()
        connection.wait_for_acknowledgements(at_most=16)
        times += [sent_at] * count
    connection.wait_for_acknowledgements()
    connection.close()
    results.send(np.array(times))
