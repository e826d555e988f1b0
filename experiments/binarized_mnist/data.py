"""Binarised MNIST (the fixed binarisation of Larochelle and Murray, 2011): images, what pixels are called, what the
model is told of their identity, and what is done to images to make them something else.

The paper merges the training and validation images (60,000) and holds 2% of them out. Half of these stop the training
and choose the weights, the other half calibrate the model directory.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema
from experiments.experiment import TEST, Data, Preset, in_memory
from trainer.data import CALIBRATION, TRAIN, VALIDATION

SIDE = 28
PIXELS = SIDE * SIDE
HELD_OUT = 0.02
NEVER = 1e-9
"""Mass of a pixel that is neither black nor white: there is none, and 784 · 1e-9 nats cannot be seen."""


def read(path: Path) -> NDArray[np.uint8]:
    """(N, 784) zeros and ones of a packed file. Raises `InputError` naming the file."""
    try:
        with path.open("rb") as file, np.load(file) as archive:
            bits = archive["bits"]
    except FileNotFoundError:
        raise InputError(f"{path} is missing: --data names the folder with train.npz, valid.npz and test.npz") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({error}): an .npz with `bits` is expected") from None
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] * 8 != PIXELS:
        raise InputError(f"{path}: bits are {bits.dtype} {bits.shape}, not uint8 (N, {PIXELS // 8})")
    return np.unpackbits(bits, axis=1)


def load(path: Path, preset: Preset, seed: int) -> Data:
    """All images, split. path: the folder of the files, or one with `binarized_mnist` in it."""
    folder = path / "binarized_mnist" if (path / "binarized_mnist").is_dir() else path
    known = np.concatenate([read(folder / "train.npz"), read(folder / "valid.npz")])
    test = read(folder / "test.npz")
    split = np.full(len(known) + len(test), TEST, np.uint8)
    held = np.random.default_rng([seed, 0x9815]).permutation(len(known))[: max(2, round(HELD_OUT * len(known)))]
    split[: len(known)] = TRAIN
    split[held[::2]], split[held[1::2]] = VALIDATION, CALIBRATION
    values = np.concatenate([known, test]).astype(np.float32)
    return Data(in_memory(pixels(preset.waves), values, split), np.zeros(len(values)))


def pixels(waves: tuple[float, ...] = ()) -> Schema:
    """One feature per pixel, row-major, with black and white (1) as labels.

    Coordinates: row and column as in the paper, then sine and cosine of both for each frequency (periods per side),
    with which attention finds neighbours by a scalar product.
    """
    features = []
    for i in range(PIXELS):
        row, column = divmod(i, SIDE)
        place = [float(row), float(column)]
        for frequency in waves:
            for angle in (2 * math.pi * frequency * row / SIDE, 2 * math.pi * frequency * column / SIDE):
                place += [math.sin(angle), math.cos(angle)]
        name = f"r{row:02}c{column:02}"
        features.append(Feature(name, "discrete", coordinates=tuple(place), labels=("0", "1"), unseen=NEVER))
    return Schema(tuple(features))


def shifted(images: NDArray[np.float32], seed: int) -> dict[str, NDArray[np.float32]]:
    """What is not a digit as the model knows them. images: (N, 784). Permuted: all by one permutation of the pixels."""
    square = images.reshape(-1, SIDE, SIDE)
    permutation = np.random.default_rng([seed, 0x0DD]).permutation(PIXELS)
    return {
        "rotated by 90°": np.ascontiguousarray(np.rot90(square, axes=(1, 2))).reshape(images.shape),
        "inverted": 1.0 - images,
        "permuted": np.ascontiguousarray(images[:, permutation]),
    }


def gaps(seed: int) -> dict[str, NDArray[np.bool_]]:
    """Patterns of 100 missing pixels, each (784,): square, rows, scattered as in the authors' figure 3, and a band."""
    square, rows, band = (np.zeros((SIDE, SIDE), np.bool_) for _ in range(3))
    square[9:19, 9:19] = True
    rows[[5, 10, 15]] = True
    rows[20, 6:22] = True
    band[:, 12:15] = True
    band[6:22, 15] = True
    scattered = np.zeros(PIXELS, np.bool_)
    scattered[np.random.default_rng([seed, 0x6A9]).permutation(PIXELS)[:100]] = True
    return {"square": square.ravel(), "rows": rows.ravel(), "band": band.ravel(), "scattered": scattered}
