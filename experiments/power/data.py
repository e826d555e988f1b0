"""The household power table (UCI 235), prepared as by Papamakarios and others (2017) and by the DEformer's authors.

One row a minute. Rows with a missing reading are dropped, the rest shuffled; reactive power and intensity are left out;
uniform noise makes the readings continuous; the last tenth is the test, the last tenth of the rest validation. Shuffle
and noise come from the authors' generator with their seed, in their order, so that the split is theirs.

The published NLL is that of readings standardised with the mean and deviation of training and validation rows. The
model's units are those up to eight deviations and logarithmic beyond (`Schema.normalise`); the change of variables is
added.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from deformer_stream.errors import InputError
from deformer_stream.model.schema import LINEAR, Feature, Schema
from experiments.experiment import TEST, Data, Preset, in_memory
from trainer.data import CALIBRATION, TRAIN, VALIDATION

Floats = NDArray[np.float64]
FILE = "household_power_consumption"
READ = (
    "Global_active_power", "Global_reactive_power", "Voltage", "Global_intensity",
    "Sub_metering_1", "Sub_metering_2", "Sub_metering_3",
)  # fmt: skip
FEATURES = ("Global_active_power", "Voltage", "Sub_metering_1", "Sub_metering_2", "Sub_metering_3", "Time")
"""Time is the minute of the day."""
NOISE = {"Voltage": 0.01, "Global_active_power": 0.001, "Sub_metering_1": 1.0, "Sub_metering_2": 1.0,
         "Sub_metering_3": 1.0}  # fmt: skip
"""Width of the uniform noise on each feature, in its own units."""
SHUFFLE_SEED = 42
TENTH = 0.1


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The text, out of its zip where it is in one."""
    if path.suffix != ".zip":
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        if len(names) != 1:
            raise InputError(f"{path} holds {len(names)} .txt files: the zip of UCI data set 235 holds one")
        with archive.open(names[0]) as file:
            yield file


def find(path: Path) -> Path:
    """The file itself, or the one in a folder. Raises `InputError` where there is none."""
    if path.is_file():
        return path
    for folder in (path, path / "power", path / "power_sample"):
        for suffix in (".txt", ".zip"):
            if (folder / (FILE + suffix)).is_file():
                return folder / (FILE + suffix)
    raise InputError(f"{path}: there is no {FILE}.txt or .zip; --data names the file or its folder")


def read(path: Path) -> Floats:
    """(N, 8) complete rows: the seven readings in the order of the file (`READ`) and the minute of the day."""
    options = pyarrow.csv.ConvertOptions(
        null_values=["?", ""],
        include_columns=["Time", *READ],
        column_types={"Time": pa.string()} | dict.fromkeys(READ, pa.float64()),
    )
    try:
        with _opened(path) as file:
            table = pyarrow.csv.read_csv(
                file, parse_options=pyarrow.csv.ParseOptions(delimiter=";"), convert_options=options
            )
        table = table.drop_null()
        hours, minutes = (pc.cast(pc.utf8_slice_codeunits(table["Time"], at, at + 2), pa.float64()) for at in (0, 3))
    except (OSError, pa.ArrowException, zipfile.BadZipFile, KeyError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({why}): the text file of UCI data set 235 is expected") from None
    clock = hours.to_numpy() * 60.0 + minutes.to_numpy()
    return np.stack([*(table[name].to_numpy() for name in READ), clock], 1)


def prepare(rows: Floats) -> tuple[Floats, NDArray[np.uint8]]:
    """(N, 8) as of `read` → (N, 6) noisy readings in their own units (`FEATURES`), and the split (N,)."""
    rng = np.random.RandomState(SHUFFLE_SEED)
    rows = rows.copy()
    rng.shuffle(rows)
    n = len(rows)
    rows = np.delete(rows, [READ.index("Global_reactive_power"), READ.index("Global_intensity")], 1)
    # Drawn in this order by the authors' script.
    widths = [("Voltage",), ("Global_active_power",), ("Sub_metering_1", "Sub_metering_2", "Sub_metering_3")]
    for names in widths:
        columns = [FEATURES.index(name) for name in names]
        rows[:, columns] += NOISE[names[0]] * rng.rand(n, len(names))
    test = int(TENTH * n)
    validation = int(TENTH * (n - test))
    split = np.full(n, TRAIN, np.uint8)
    split[n - test :] = TEST
    split[n - test - validation : n - test] = VALIDATION
    return rows, split


def load(path: Path, preset: Preset, seed: int) -> Data:
    """The table, split. Every second validation row calibrates the model directory instead."""
    values, split = prepare(read(find(path)))
    if (split == VALIDATION).sum() < 2:
        raise InputError(f"{path}: {len(values)} complete rows are too few to be split")
    known = values[split != TEST]
    schema = Schema(
        tuple(
            Feature(
                name,
                "continuous",
                location=float(x.mean()),
                scale=float(x.std()),
                low=float(x.min()),
                high=float(x.max()),
            )
            for name, x in zip(FEATURES, known.T, strict=True)
        )
    )
    held = np.flatnonzero(split == VALIDATION)
    split[held[1::2]] = CALIBRATION
    codes = np.broadcast_to(np.arange(len(FEATURES)), values.shape)
    normal = schema.normalise(codes, values)
    return Data(in_memory(schema, normal.astype(np.float32), split), tail_correction(schema, values))


def tail_correction(schema: Schema, values: Floats) -> Floats:
    """(N,) nats to be added to the NLL in the model's units to have it in standardised ones: Σ −ln dn/dz, where
    n = ±(8 + ln(1 + |z| − 8)) beyond eight deviations z. values: (N, F) raw."""
    location = np.array([f.location for f in schema.features])
    scale = np.array([f.scale for f in schema.features])
    beyond = np.maximum(np.abs((values - location) / scale) - LINEAR, 0.0)
    result: Floats = np.log1p(beyond).sum(1)
    return result
