"""The household power table (UCI 235), prepared like that of Papamakarios et al. (2017) and of the DEformer's authors.

The table has one row a minute. Rows with a missing reading are dropped and the others are shuffled. Reactive power and
intensity are left out. Uniform noise makes the readings continuous. The last tenth is the test set, and the last tenth
of the other rows is the validation set. Shuffle and noise use the authors' generator with their seed and in their
order, so the split is the same as theirs.

The published NLL is that of readings standardised with the mean and deviation of training and validation rows. The
model's units are linear up to eight deviations and logarithmic beyond (`Schema.normalise`), so a correction for the
change of variables is added.
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
from deformer_stream.model.schema import LINEAR_LIMIT, Feature, Schema
from experiments.experiment import ExperimentData, Preset, make_prepared_table
from trainer.data import Split

Floats = NDArray[np.float64]

FILE_NAME = "household_power_consumption"

COLUMNS = (
    "Global_active_power", "Global_reactive_power", "Voltage", "Global_intensity",
    "Sub_metering_1", "Sub_metering_2", "Sub_metering_3",
)  # fmt: skip
"""The columns of readings in the file."""

FEATURES = ("Global_active_power", "Voltage", "Sub_metering_1", "Sub_metering_2", "Sub_metering_3", "Time")
"""The features of a record. Time is the minute of the day."""

NOISE_WIDTH = {"Voltage": 0.01, "Global_active_power": 0.001, "Sub_metering_1": 1.0, "Sub_metering_2": 1.0,
               "Sub_metering_3": 1.0}  # fmt: skip
"""Width of the uniform noise on each feature, in the feature's own units."""

SHUFFLE_SEED = 42
HELD_OUT_SHARE = 0.1


@contextmanager
def _open_text(path: Path) -> Iterator[IO[bytes]]:
    """Open the text file, or the text file inside a zip file.

    Raises:
        InputError: A zip file does not contain exactly one text file.
    """
    if path.suffix != ".zip":
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        if len(names) != 1:
            raise InputError(f"{path} holds {len(names)} .txt files: the zip file of UCI data set 235 has exactly one")
        with archive.open(names[0]) as file:
            yield file


def find_table(path: Path) -> Path:
    """Return the path of the table, given the table itself or a folder that contains it.

    Raises:
        InputError: The folder has no such file.
    """
    if path.is_file():
        return path
    for folder in (path, path / "power", path / "power_sample"):
        for suffix in (".txt", ".zip"):
            if (folder / (FILE_NAME + suffix)).is_file():
                return folder / (FILE_NAME + suffix)
    raise InputError(f"{path}: there is no {FILE_NAME}.txt or .zip; --data must name the file or its folder")


def read_table(path: Path) -> Floats:
    """Return the complete rows of the table, (N, 8): the seven readings in file order, then the minute of the day.

    Raises:
        InputError: The file cannot be read or is another file.
    """
    options = pyarrow.csv.ConvertOptions(
        null_values=["?", ""],
        include_columns=["Time", *COLUMNS],
        column_types={"Time": pa.string()} | dict.fromkeys(COLUMNS, pa.float64()),
    )
    try:
        with _open_text(path) as file:
            table = pyarrow.csv.read_csv(
                file, parse_options=pyarrow.csv.ParseOptions(delimiter=";"), convert_options=options
            )
        table = table.drop_null()
        hours, minutes = (pc.cast(pc.utf8_slice_codeunits(table["Time"], at, at + 2), pa.float64()) for at in (0, 3))
    except (OSError, pa.ArrowException, zipfile.BadZipFile, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({reason}): it must be the text file of UCI data set 235") from None
    minute_of_day = hours.to_numpy() * 60.0 + minutes.to_numpy()
    return np.stack([*(table[name].to_numpy() for name in COLUMNS), minute_of_day], 1)


def prepare_rows(rows: Floats) -> tuple[Floats, NDArray[np.uint8]]:
    """Shuffle rows, add noise and split them, exactly as the authors' script does.

    Args:
        rows: (N, 8) the rows that `read_table` returns.

    Returns:
        The readings of `FEATURES` in their own units, (N, 6), and the part of the split of each row, (N,).
    """
    generator = np.random.RandomState(SHUFFLE_SEED)
    rows = rows.copy()
    generator.shuffle(rows)
    num_rows = len(rows)
    rows = np.delete(rows, [COLUMNS.index("Global_reactive_power"), COLUMNS.index("Global_intensity")], 1)
    # The authors' script draws the noise in this order.
    groups = [("Voltage",), ("Global_active_power",), ("Sub_metering_1", "Sub_metering_2", "Sub_metering_3")]
    for names in groups:
        columns = [FEATURES.index(name) for name in names]
        rows[:, columns] += NOISE_WIDTH[names[0]] * generator.rand(num_rows, len(names))
    num_test = int(HELD_OUT_SHARE * num_rows)
    num_validation = int(HELD_OUT_SHARE * (num_rows - num_test))
    split = np.full(num_rows, Split.TRAIN, np.uint8)
    split[num_rows - num_test :] = Split.TEST
    split[num_rows - num_test - num_validation : num_rows - num_test] = Split.VALIDATION
    return rows, split


def load_table(path: Path, preset: Preset, seed: int) -> ExperimentData:
    """Return the table with its split. Every second validation row calibrates the model instead.

    Args:
        path: The file, or a folder that contains it.
        preset: Not used, since the table is the same for all presets.
        seed: Not used, since the split is that of the authors.

    Raises:
        InputError: The table cannot be read or has too few rows.
    """
    values, split = prepare_rows(read_table(find_table(path)))
    if (split == Split.VALIDATION).sum() < 2:
        raise InputError(f"{path}: {len(values)} complete rows are too few to be split; use the complete data set")
    known = values[split != Split.TEST]
    schema = Schema(
        tuple(
            Feature(
                name,
                "continuous",
                location=float(column.mean()),
                scale=float(column.std()),
                low=float(column.min()),
                high=float(column.max()),
            )
            for name, column in zip(FEATURES, known.T, strict=True)
        )
    )
    validation_rows = np.flatnonzero(split == Split.VALIDATION)
    split[validation_rows[1::2]] = Split.CALIBRATION
    codes = np.broadcast_to(np.arange(len(FEATURES)), values.shape)
    normalised = schema.normalise(codes, values).astype(np.float32)
    prepared = make_prepared_table(schema, normalised, split)
    return ExperimentData(prepared, compute_tail_correction(schema, values))


def compute_tail_correction(schema: Schema, values: Floats) -> Floats:
    """Return the nats, (N,), that convert an NLL in the model's units into one of standardised readings.

    A reading that is z deviations from its mean is n = ±(8 + ln(1 + |z| − 8)) in the model's units if |z| exceeds 8,
    else n = z. The change of variables adds −ln dn/dz for each reading.

    Args:
        schema: The features with their means and deviations.
        values: (N, F) readings in raw units.
    """
    location = np.array([feature.location for feature in schema.features])
    scale = np.array([feature.scale for feature in schema.features])
    excess = np.maximum(np.abs((values - location) / scale) - LINEAR_LIMIT, 0.0)
    correction: Floats = np.log1p(excess).sum(1)
    return correction
