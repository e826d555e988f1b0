"""Reading images, the features of pixels, altered images, and letters and shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deformer_stream.errors import InputError
from experiments.binarized_mnist.data import (
    PIXELS,
    SIDE,
    load_images,
    make_missing_patterns,
    make_pixel_schema,
    make_shifted_images,
    read_images,
)
from experiments.binarized_mnist.experiment import PRESETS
from experiments.binarized_mnist.foreign_images import (
    FONTS,
    LETTERS,
    LONGER_SIDE,
    Floats32,
    draw_letter,
    make_letters,
    make_shapes,
    reduce_drawing,
)
from tests.experiments.worlds import write_images
from trainer.data import Split

PARTS = (Split.TRAIN, Split.VALIDATION, Split.CALIBRATION, Split.TEST)


@pytest.mark.data
def test_images_are_split_as_in_the_paper(data_dir: Path) -> None:
    data = load_images(data_dir, PRESETS["paper"], 0).prepared
    assert [len(data.select_rows(part)) for part in PARTS] == [58_800, 600, 600, 10_000]
    assert data.select_rows(Split.TEST)[0] == 60_000
    assert set(np.unique(data.values)) == {0.0, 1.0}
    # Ink covers 13% of the digits of MNIST; a row-major image has none in its first rows.
    assert 0.12 < data.values.mean() < 0.14
    assert data.values[:, : 2 * SIDE].mean() < 1e-3
    again, other = (
        load_images(data_dir, PRESETS["paper"], 0).prepared,
        load_images(data_dir, PRESETS["paper"], 1).prepared,
    )
    assert again.fingerprint == data.fingerprint != other.fingerprint


def test_path_can_be_the_folder_or_its_parent(tmp_path: Path) -> None:
    inner = write_images(tmp_path / "binarized_mnist", 60, 40, 10)
    assert (
        load_images(tmp_path, PRESETS["small"], 3).prepared.fingerprint
        == load_images(inner, PRESETS["small"], 3).prepared.fingerprint
    )


def test_invalid_files_are_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.npz is missing: --data"):
        read_images(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 no archive")
    np.savez(tmp_path / "c.npz", images=np.zeros((3, 98), np.uint8))
    np.savez(tmp_path / "d.npz", bits=np.array([{"a": 1}], object))  # would need pickle
    for name in "bcd":
        with pytest.raises(InputError, match=rf"{name}\.npz cannot be read"):
            read_images(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "e.npz", bits=np.zeros((3, 97), np.uint8))
    with pytest.raises(InputError, match=r"uint8 \(3, 97\), not"):
        read_images(tmp_path / "e.npz")


def test_coordinates_are_unique_and_similar_for_close_pixels() -> None:
    plain, waves = make_pixel_schema(), make_pixel_schema((0.5, 1.0, 2.0))
    assert plain.names[29] == "r01c01"
    assert plain.features[29].coordinates == (1.0, 1.0)
    places = np.array([f.coordinates for f in waves.features])
    assert places.shape == (PIXELS, 2 + 3 * 4)
    assert len(np.unique(places.round(6), axis=0)) == PIXELS
    square = places[:, 2:].reshape(SIDE, SIDE, -1)
    likeness = square @ square[14, 14]
    assert likeness.argmax() == 14 * SIDE + 14
    assert likeness[14, 14] > likeness[14, 15] > likeness[14, 17] > likeness[14, 20]


def test_altered_images() -> None:
    image = np.zeros((1, PIXELS), np.float32)
    image[0, 2 * SIDE + 5] = 1
    others = make_shifted_images(np.repeat(image, 2, 0), 0)
    assert {name: x.sum(1).tolist() for name, x in others.items()} == {
        "rotated by 90°": [1, 1],
        "inverted": [PIXELS - 1] * 2,
        "permuted": [1, 1],
    }
    assert others["rotated by 90°"][0].argmax() == (SIDE - 1 - 5) * SIDE + 2  # counter-clockwise
    assert others["permuted"][0].argmax() == others["permuted"][1].argmax() != image.argmax()


@pytest.mark.parametrize("make", [make_letters, make_shapes])
def test_foreign_images_have_the_size_and_the_place_of_digits(make: Callable[[int, int], Floats32]) -> None:
    images = make(60, 3)
    assert images.shape == (60, PIXELS)
    assert set(np.unique(images)) == {0.0, 1.0}
    assert len(np.unique(images, axis=0)) >= 58
    np.testing.assert_array_equal(make(60, 3), images)
    assert (make(60, 4) != images).any()
    places = np.arange(SIDE)
    for image in images.reshape(-1, SIDE, SIDE):
        rows, columns = image.sum(1), image.sum(0)
        for ink in (rows, columns):
            assert abs(np.average(places, weights=ink) - (SIDE - 1) / 2) < 1
        longest = max(np.ptp(np.flatnonzero(ink)) + 1 for ink in (rows, columns))
        assert LONGER_SIDE - 2 <= longest <= LONGER_SIDE


def test_large_letters_fill_the_image() -> None:
    for image in make_letters(20, 3, SIDE).reshape(-1, SIDE, SIDE):
        assert max(np.ptp(np.flatnonzero(image.sum(axis))) + 1 for axis in (0, 1)) >= SIDE - 2


def test_printed_letters_are_drawn_in_every_font() -> None:
    """A font without a letter would draw the same box for all letters."""
    for font in FONTS:
        drawings = {reduce_drawing(draw_letter(letter, font, 0.0)).tobytes() for letter in LETTERS}
        assert len(drawings) == len(LETTERS), font


def test_missing_patterns_have_a_hundred_pixels() -> None:
    patterns = make_missing_patterns(0)
    assert len(patterns) >= 4
    assert all(mask.sum() == 100 for mask in patterns.values())
