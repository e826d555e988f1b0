"""Tables of irregular readings for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from deformer_stream.model.bounded_context import ContextLimit
from deformer_stream.model.deformer import ModelConfig
from tests.trainer.tables import write
from trainer.data import DataOptions
from trainer.examples import BlockExamples, Blocks
from trainer.irregular_table import IrregularTable, prepare_irregular_table

CONFIG = ModelConfig(
    d_model=16,
    layers=1,
    heads=2,
    feedforward=32,
    mixtures=3,
    embedding=4,
    hidden=(8,),
    neighbors=3,
    process_rank=2,
    process_scales=3,
)

START = 1_600_000_000.0


def fleet(rng: np.random.Generator, num_records: int = 120, max_readings: int = 60) -> dict[str, Any]:
    """Return a long table of machines whose three sensors follow a slow common process, with noise.

    The sensors report at random times. The third one is a label that depends on the sign of the process.
    """
    columns: dict[str, list[Any]] = {"record": [], "feature": [], "value": [], "time": []}
    for record in range(num_records):
        num_readings = int(rng.integers(4, max_readings))
        times = np.sort(rng.uniform(0, 3600, num_readings)).round(1)
        level, phase = rng.normal(), rng.uniform(0, 2 * np.pi)
        for t in times.tolist():
            sensor = ("a", "b", "state")[int(rng.integers(3))]
            process = level + np.sin(phase + t / 900)
            value = {"a": process, "b": -2 * process, "state": "on" if process > 0 else "off"}[sensor]
            if not isinstance(value, str):
                value = repr(float(value + 0.1 * rng.normal()))
            for name, cell in zip(columns, (f"m{record}", sensor, value, START + 7200 * record + t), strict=True):
                columns[name].append(cell)
    return columns


def prepared_irregular(folder: Path, columns: dict[str, Any], **options: Any) -> IrregularTable:
    table = write(folder / "table.parquet", {name: pa.array(values) for name, values in columns.items()})
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return prepare_irregular_table([table], DataOptions(**options), work)


def divided(folder: Path, table: IrregularTable, recent: int = 5, block: int = 8, **options: Any) -> BlockExamples:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return BlockExamples(table, Blocks.divide(table, ContextLimit(recent, block), work), **options)
