"""Binarised MNIST in the fixed binarisation of Larochelle and Murray (2011): files, features, and altered images.

The paper merges the training and validation images (60,000) and holds 2% of them out. Here one half of these stops the
training and chooses the weights, and the other half calibrates the model.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema
from experiments.experiment import ExperimentData, Preset, make_prepared_table
from trainer.data import Split

SIDE = 28
"""Width and height of an image in pixels."""

PIXELS = SIDE * SIDE
"""Number of pixels of an image."""

HELD_OUT_SHARE = 0.02
"""Share of the known images that is not used for training."""

UNSEEN_LABEL_MASS = 1e-9
"""Probability of a pixel that is neither black nor white.

No such pixel exists, but a feature needs a positive probability. It costs 784 · 1e-9 nats per image, which is too
little to change a result.
"""


def read_images(path: Path) -> NDArray[np.uint8]:
    """Return the images of a packed file as zeros and ones, (N, 784).

    Raises:
        InputError: The file is missing or has another content.
    """
    try:
        with path.open("rb") as file, np.load(file) as archive:
            bits = archive["bits"]
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: --data must name the folder with train.npz, valid.npz and test.npz"
        ) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({error}): it must be an .npz file with an array `bits`") from None
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] * 8 != PIXELS:
        raise InputError(
            f"{path} has the wrong content: `bits` is {bits.dtype} {bits.shape}, not uint8 (N, {PIXELS // 8})"
        )
    return np.unpackbits(bits, axis=1)


def load_images(path: Path, preset: Preset, seed: int) -> ExperimentData:
    """Return all images with their split.

    Args:
        path: The folder of the files, or the folder that contains it as `binarized_mnist`.
        preset: The preset, which says how the place of a pixel is described.
        seed: Seed of the choice of held-out images.
    """
    folder = path / "binarized_mnist" if (path / "binarized_mnist").is_dir() else path
    known = np.concatenate([read_images(folder / "train.npz"), read_images(folder / "valid.npz")])
    test = read_images(folder / "test.npz")
    num_held_out = max(2, round(HELD_OUT_SHARE * len(known)))
    held_out = np.random.default_rng([seed, 0x9815]).permutation(len(known))[:num_held_out]
    split = np.full(len(known) + len(test), Split.TEST, np.uint8)
    split[: len(known)] = Split.TRAIN
    split[held_out[::2]] = Split.VALIDATION
    split[held_out[1::2]] = Split.CALIBRATION
    values = np.concatenate([known, test]).astype(np.float32)
    prepared = make_prepared_table(make_pixel_schema(preset.waves), values, split)
    return ExperimentData(prepared, np.zeros(len(values)))


def make_pixel_schema(waves: tuple[float, ...] = ()) -> Schema:
    """Return a schema with one feature per pixel, row by row, whose labels are 0 for white and 1 for black.

    The coordinates of a pixel are its row and column, as in the paper, then the sine and cosine of both for each
    frequency. With these, attention finds neighbours by a scalar product.

    Args:
        waves: Frequencies in periods per side of the image.
    """
    features = []
    for i in range(PIXELS):
        row, column = divmod(i, SIDE)
        coordinates = [float(row), float(column)]
        for frequency in waves:
            for angle in (2 * math.pi * frequency * row / SIDE, 2 * math.pi * frequency * column / SIDE):
                coordinates += [math.sin(angle), math.cos(angle)]
        features.append(
            Feature(
                f"r{row:02}c{column:02}",
                "discrete",
                coordinates=tuple(coordinates),
                labels=("0", "1"),
                unseen=UNSEEN_LABEL_MASS,
            )
        )
    return Schema(tuple(features))


def make_shifted_images(images: NDArray[np.float32], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return altered images, which a model of digits should find less likely, by the name of the alteration.

    Args:
        images: (N, 784) images to alter.
        seed: Seed of the permutation of the pixels, which is the same for all images.
    """
    squares = images.reshape(-1, SIDE, SIDE)
    permutation = np.random.default_rng([seed, 0x0DD]).permutation(PIXELS)
    return {
        "rotated by 90°": np.ascontiguousarray(np.rot90(squares, axes=(1, 2))).reshape(images.shape),
        "inverted": 1.0 - images,
        "permuted": np.ascontiguousarray(images[:, permutation]),
    }


def make_missing_patterns(seed: int) -> dict[str, NDArray[np.bool_]]:
    """Return patterns of 100 missing pixels, each a mask of shape (784,), by name.

    Square, rows and scattered are those of figure 3 of the paper; the band is added.
    """
    square, rows, band = (np.zeros((SIDE, SIDE), np.bool_) for _ in range(3))
    square[9:19, 9:19] = True
    rows[[5, 10, 15]] = True
    rows[20, 6:22] = True
    band[:, 12:15] = True
    band[6:22, 15] = True
    scattered = np.zeros(PIXELS, np.bool_)
    scattered[np.random.default_rng([seed, 0x6A9]).permutation(PIXELS)[:100]] = True
    return {"square": square.ravel(), "rows": rows.ravel(), "band": band.ravel(), "scattered": scattered}
