"""The household power table is read and prepared as for the published results."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from deformer_stream.errors import InputError
from deformer_stream.model.schema import LINEAR_LIMIT
from experiments.power.data import FEATURES, compute_tail_correction, find_table, load_table, prepare_rows, read_table
from experiments.power.experiment import PRESETS
from tests.experiments.worlds import HEADER, write_power
from trainer.data import Split

ROWS = [
    "16/12/2006;17:24:00;4.216;0.418;234.840;18.400;0.000;1.000;17",
    "16/12/2006;17:25:00;?;?;?;?;?;?;",
    "17/12/2006;00:01:00;0.324;0.132;243.510;1.400;0.000;2.000;0",
]


def test_complete_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "household_power_consumption.txt"
    path.write_text("\n".join([HEADER, *ROWS]) + "\n")
    rows = read_table(find_table(tmp_path))
    expected = [[4.216, 0.418, 234.84, 18.4, 0.0, 1.0, 17.0, 1044.0], [0.324, 0.132, 243.51, 1.4, 0.0, 2.0, 0.0, 1.0]]
    np.testing.assert_array_equal(rows, expected)
    with zipfile.ZipFile(tmp_path / "power.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "household_power_consumption.txt")
    np.testing.assert_array_equal(read_table(tmp_path / "power.zip"), expected)


def test_invalid_files_are_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no household_power_consumption"):
        find_table(tmp_path)
    for name, content in [("a.txt", b"x;y\n1;2\n"), ("b.txt", b""), ("c.zip", b"no zip"), ("d.txt", b"\xff\xfe\x00")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} cannot be read") as error:
            read_table(tmp_path / name)
        assert "\n" not in str(error.value)
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.writestr("a.csv", "")
    with pytest.raises(InputError, match=r"e\.zip holds 0 \.txt files"):
        read_table(tmp_path / "e.zip")


def test_preparation_equals_that_of_the_authors() -> None:
    """Compared with the lines of their script (`uci_dataset.py`, `maf/datasets/power.py`) on random numbers."""
    raw = np.random.default_rng(1).normal(size=(203, 8))
    rng = np.random.RandomState(42)
    data = raw.copy()
    rng.shuffle(data)
    n = len(data)
    data = np.delete(data, 3, axis=1)
    data = np.delete(data, 1, axis=1)
    voltage, power, meters = 0.01 * rng.rand(n, 1), 0.001 * rng.rand(n, 1), rng.rand(n, 3)
    data = data + np.hstack((power, voltage, meters, np.zeros((n, 1))))
    test = data[-int(0.1 * n) :]
    rest = data[: -int(0.1 * n)]
    validation, train = rest[-int(0.1 * len(rest)) :], rest[: -int(0.1 * len(rest))]

    values, split = prepare_rows(raw)
    for part, expected in ((Split.TEST, test), (Split.VALIDATION, validation), (Split.TRAIN, train)):
        np.testing.assert_allclose(values[split == part], expected, rtol=1e-15)
    assert (len(train), len(validation), len(test)) == (165, 18, 20)


def test_readings_are_standardised_with_training_and_validation_rows(tmp_path: Path) -> None:
    data = load_table(write_power(tmp_path / "household_power_consumption.txt", 1000), PRESETS["small"], 0)
    schema, split = data.prepared.schema, data.prepared.split
    assert schema.names == FEATURES
    assert [int((split == part).sum()) for part in (Split.TRAIN, Split.VALIDATION, Split.CALIBRATION, Split.TEST)] == [
        794,
        44,
        44,
        98,
    ]
    known = data.prepared.values[split != Split.TEST].astype(np.float64)
    inside = (np.abs(known) < LINEAR_LIMIT).all(0)
    np.testing.assert_allclose(known.mean(0)[inside], 0.0, atol=1e-6)
    np.testing.assert_allclose(known.std(0)[inside], 1.0, atol=1e-6)
    assert inside.all()


def test_correction_is_the_change_of_variables(tmp_path: Path) -> None:
    """−ln p of standardised readings is −ln p of normalised ones − ln |dn/dz|, checked by finite differences."""
    schema = load_table(
        write_power(tmp_path / "household_power_consumption.txt", 500), PRESETS["small"], 0
    ).prepared.schema
    z = np.array([[0.0, 1.0, -7.9, 8.5, 20.0, -13.0], [0.1, -0.2, 0.3, 0.0, 0.0, 0.0]])
    codes = np.broadcast_to(np.arange(6), z.shape)
    location = np.array([f.location for f in schema.features])
    scale = np.array([f.scale for f in schema.features])
    step = 1e-6
    slope = (
        schema.normalise(codes, location + scale * (z + step)) - schema.normalise(codes, location + scale * (z - step))
    ) / (2 * step)
    np.testing.assert_allclose(compute_tail_correction(schema, location + scale * z), -np.log(slope).sum(1), atol=1e-7)
    assert compute_tail_correction(schema, location + scale * z)[1] == 0


@pytest.mark.data
def test_sample_of_the_data_set(data_dir: Path) -> None:
    """The sample has 2,880 rows of two days, which are shuffled and differ from the file by the noise only."""
    rows = read_table(find_table(data_dir))
    assert rows.shape == (2880, 8)
    np.testing.assert_array_equal(rows[0], [0.326, 0.128, 243.15, 1.4, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(rows[:, 7], np.tile(np.arange(1440.0), 2))
    values, split = prepare_rows(rows)
    assert [int((split == part).sum()) for part in (Split.TRAIN, Split.VALIDATION, Split.TEST)] == [2333, 259, 288]
    order = np.arange(2880)
    np.random.RandomState(42).shuffle(order)
    noise = values - rows[order][:, [0, 2, 4, 5, 6, 7]]
    assert (noise >= -1e-12).all()
    np.testing.assert_allclose(noise.max(0), [0.001, 0.01, 1, 1, 1, 0], rtol=0.01, atol=1e-12)
