"""Logs of evidence for tests: devices with normal records, and faults during which p-values are small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect
from deformer_stream.incidents.make_evidence import round_significant

START = 1_583_712_000_000_000
"""2020-03-09T00:00:00Z"""
SECOND = 1_000_000


def make_log(
    model: str,
    num_devices: int = 3,
    num_records: int = 200,
    interval: int = 10 * SECOND,
    faults: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    records_per_batch: int = 4,
    seed: int = 0,
    groups: Sequence[str] = (),
) -> Iterator[EvidenceBatch]:
    """Yield the batches of a log.

    Args:
        model: Fingerprint of the model.
        num_devices: Number of devices.
        num_records: Number of records of each device.
        interval: Microseconds between the records of a device.
        faults: By number of a device, the first and the last record of each of its faults.
        records_per_batch: Number of records of each device in a batch.
        seed: Seed of the p-values.
        groups: The group of each device. By default devices have none.
    """
    devices = [f"pump-{device}" for device in range(num_devices)]
    if groups:
        devices = [f"{group}/{device}" for group, device in zip(groups, devices, strict=True)]
    rng = np.random.default_rng(seed)
    faults = faults or {}
    for first in range(0, num_records, records_per_batch):
        ids: list[str] = []
        times: list[int] = []
        p_values: list[float] = []
        is_alerted: list[bool] = []
        alerts: list[AlertRow] = []
        for number in range(first, min(first + records_per_batch, num_records)):
            for device in range(num_devices):
                is_faulty = any(begin <= number <= end for begin, end in faults.get(device, ()))
                p_value = 0.001 if is_faulty else float(rng.uniform(0.002, 1.0))
                record, time = f"{devices[device]}@{number}", START + number * interval + device
                ids.append(record)
                times.append(time)
                p_values.append(p_value)
                is_alerted.append(p_value <= 0.01)
                if is_alerted[-1]:
                    suspect = Suspect("flow", 31.9, 119.0, 127.0, 1.0, "m³/h")
                    alerts.append(AlertRow(f"alert-of-{record}", record, time, p_value, 1, (suspect,), ("flow",)))
        p_array = round_significant(np.array(p_values), 6)
        yield EvidenceBatch(
            model,
            first // records_per_batch % 2,
            ClosedRows(
                ids,
                np.array(times, np.int64),
                p_array,
                round_significant(-np.log(p_array), 5),
                np.full(len(ids), 8, np.int32),
                np.array(is_alerted),
            ),
            tuple(alerts),
        )
