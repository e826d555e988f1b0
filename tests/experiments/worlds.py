"""Small data sets in the formats of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.settings import load_settings
from experiments.options import ExperimentSettings

TINY = "d_model=16,heads=1,layers=1,feedforward=32,hidden=16"
HEADER = (
    "Date;Time;Global_active_power;Global_reactive_power;Voltage;Global_intensity;"
    "Sub_metering_1;Sub_metering_2;Sub_metering_3"
)


def settings(out: Path, data: Path, **given: Any) -> ExperimentSettings:
    return load_settings(ExperimentSettings, {"out": out, "data": data, "device": "cpu", **given}, None, "experiment")


def corner(n: int, seed: int) -> NDArray[np.uint8]:
    """Return (n, 784) images of one shape in the upper left, shifted by up to two pixels, 2% of pixels inverted."""
    rng = np.random.default_rng(seed)
    images = np.zeros((n, 28, 28), np.uint8)
    for image, (r, c) in zip(images, rng.integers(3, 6, (n, 2)), strict=True):
        image[r : r + 16, c : c + 4] = 1
        image[r : r + 4, c : c + 12] = 1
    images ^= rng.random(images.shape) < 0.02
    return images.reshape(n, -1)


def write_images(folder: Path, train: int, valid: int, test: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, n) in enumerate([("train", train), ("valid", valid), ("test", test)]):
        np.savez(folder / f"{name}.npz", bits=np.packbits(corner(n, seed), axis=1))
    return folder


def power_lines(n: int, seed: int) -> list[str]:
    """Return rows in which the sub-meters depend on the power; one row in fifty has no readings."""
    rng = np.random.default_rng(seed)
    lines = [HEADER]
    for i in range(n):
        clock = f"16/12/2006;{i // 60 % 24:02}:{i % 60:02}:00"
        if i % 50 == 49:
            lines.append(clock + ";?;?;?;?;?;?;")
            continue
        power = float(rng.gamma(2.0, 0.5))
        kitchen, laundry, heater = int(power > 1.5) * 20, int(rng.integers(0, 3)), round(6 * power)
        voltage = 240 - 2 * power + rng.normal()
        lines.append(
            f"{clock};{power:.3f};{rng.random():.3f};{voltage:.3f};{4 * power:.3f};{kitchen}.000;{laundry}.000;{heater}"
        )
    return lines


def write_power(path: Path, n: int, seed: int = 0) -> Path:
    path.write_text("\n".join(power_lines(n, seed)) + "\n")
    return path
