"""Images that are no digits, drawn like those of MNIST: printed letters, and outlines of shapes.

The paper compares digits with the letters A to J of notMNIST, whose gray values are cut at one half (figure 4). The
same letters are printed here in the fonts that matplotlib contains, so that no further data set is needed.

As in MNIST, the longer side of a drawing has 20 pixels, and its center of mass is the center of the image. So only what
is drawn differs from digits, and not where it stands. Letters can also be larger: those of notMNIST fill the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from experiments.binarized_mnist.data import PIXELS, SIDE

Floats32 = NDArray[np.float32]

LETTERS = "ABCDEFGHIJ"

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10", "cmmi10"),
)
"""Names of fonts that matplotlib contains and that have the letters."""

MAX_LETTER_ANGLE = 10.0
"""Letters are turned by at most this angle in degrees to either side, so that few are equal."""

LONGER_SIDE = 20
"""Length of the longer side of a digit of MNIST, in pixels."""

_CANVAS = 160
"""Side of the square in which a drawing is made before it is reduced, in points."""

_RADIUS = 50.0
"""Radius of a shape on the canvas, in points."""

_STROKE_WIDTHS = (8, 18)
"""Range of the width of a shape's outline on the canvas, in points; 1.5 to 3.5 pixels after the reduction."""

_CORNERS_BY_SHAPE: dict[str, tuple[tuple[float, float], ...]] = {
    "triangle": tuple((angle, 1.0) for angle in (0.0, 120.0, 240.0)),
    "square": tuple((angle, 1.0) for angle in (0.0, 90.0, 180.0, 270.0)),
    "star": tuple((36.0 * corner, 0.4 if corner % 2 else 1.0) for corner in range(10)),
    "cross": tuple(
        corner
        for arm in (0.0, 90.0, 180.0, 270.0)
        for corner in ((arm - 17.0, 1.0), (arm + 17.0, 1.0), (arm + 45.0, 0.41))
    ),
}
"""The corners of each shape: the angle in degrees, and the distance from the center in units of the radius.

An arm of the cross ends in two corners, and the third is where it meets the next arm.
"""


def make_letters(num_images: int, seed: int, longer_side: int = LONGER_SIDE) -> Floats32:
    """Return printed letters from A to J, each in a random font and at a random small angle, (N, 784).

    Args:
        num_images: The number N of images.
        seed: Seed of the letters, the fonts and the angles.
        longer_side: Length of the longer side of a letter, in pixels.
    """
    rng = np.random.default_rng([seed, 0x1E77])
    images = []
    for _ in range(num_images):
        letter, font = LETTERS[rng.integers(len(LETTERS))], FONTS[rng.integers(len(FONTS))]
        drawing = draw_letter(letter, font, rng.uniform(-MAX_LETTER_ANGLE, MAX_LETTER_ANGLE))
        images.append(reduce_drawing(drawing, longer_side))
    return np.stack(images)


def make_shapes(num_images: int, seed: int) -> Floats32:
    """Return outlines of triangles, squares, stars and crosses of random width and angle, (N, 784)."""
    rng = np.random.default_rng([seed, 0x54A9])
    images = []
    for _ in range(num_images):
        corners = list(_CORNERS_BY_SHAPE.values())[rng.integers(len(_CORNERS_BY_SHAPE))]
        width = int(rng.integers(*_STROKE_WIDTHS, endpoint=True))
        images.append(reduce_drawing(_draw_shape(corners, width, rng.uniform(0.0, 360.0))))
    return np.stack(images)


def draw_letter(letter: str, font_name: str, angle: float) -> Image.Image:
    """Return a letter in white on a black canvas, turned by an angle in degrees."""
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font_name}.ttf"), _CANVAS // 2)
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    ImageDraw.Draw(canvas).text((_CANVAS / 2, _CANVAS / 2), letter, fill=255, font=font, anchor="mm")
    return canvas.rotate(angle, Image.Resampling.BILINEAR)


def _draw_shape(corners: Sequence[tuple[float, float]], width: int, angle: float) -> Image.Image:
    """Return the outline of a shape in white on a black canvas, turned by an angle in degrees."""
    angles, distances = np.radians([corner + angle for corner, _ in corners]), np.array([[far] for _, far in corners])
    around_center = _RADIUS * distances * np.stack([np.cos(angles), np.sin(angles)], 1)
    points = [(x, y) for x, y in (_CANVAS / 2 + around_center).tolist()]
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    # The first side is drawn again at the end, so that all corners are joined.
    ImageDraw.Draw(canvas).line(points + points[:2], fill=255, width=width, joint="curve")
    return canvas


def reduce_drawing(canvas: Image.Image, longer_side: int = LONGER_SIDE) -> Floats32:
    """Return a drawing in the middle of an image, its gray values cut at one half, (784,).

    Args:
        canvas: The drawing, white on black.
        longer_side: Length of its longer side in the image, in pixels.
    """
    drawing = canvas.crop(canvas.getbbox())
    scale = longer_side / max(drawing.size)
    width, height = (max(1, round(side * scale)) for side in drawing.size)
    ink = np.asarray(drawing.resize((width, height), Image.Resampling.BOX), np.float64) / 255.0
    rows, columns = (np.average(np.arange(ink.shape[axis]), weights=ink.sum(1 - axis)) for axis in (0, 1))
    center = (SIDE - 1) / 2
    top, left = (
        int(np.clip(round(center - mean), 0, SIDE - length)) for mean, length in ((rows, height), (columns, width))
    )
    image = np.zeros((SIDE, SIDE), np.float32)
    image[top : top + height, left : left + width] = ink > 0.5
    return image.reshape(PIXELS)
