"""Images and histograms are drawn as they were given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from experiments.pictures import compute_outlines, render_gallery, to_path


def rasterize(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the pixels that a path covers."""
    image = np.zeros(shape, bool)
    for x, y, width, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h(-\d+)z", path):
        assert int(back) == -int(width)
        assert not image[int(y), int(x) : int(x) + int(width)].any()
        image[int(y), int(x) : int(x) + int(width)] = True
    return image


@given(arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=12)))
def test_path_covers_exactly_the_black_pixels(image: np.ndarray) -> None:
    path = to_path(image)
    np.testing.assert_array_equal(rasterize(path, image.shape), image)
    assert path.count("M") == sum(len(re.findall("1+", "".join("01"[int(v)] for v in row))) for row in image)


def test_gallery_shows_images_and_missing_pixels() -> None:
    images = np.random.default_rng(0).random((7, 5, 4)) < 0.5
    hidden = np.zeros_like(images)
    hidden[2, 1, 1:3] = True
    figure = render_gallery(images, "a <b>", 3, "note & more", is_hidden=hidden, column_heads=("one", "two", "three"))
    assert "a &lt;b&gt;" in figure
    assert "note &amp; more" in figure
    svg = ET.fromstring(re.search(r"<svg.*</svg>", figure)[0])  # type: ignore[index]  # noqa: S314 - our own text
    groups = svg.findall("{http://www.w3.org/2000/svg}g")
    assert len(groups) == 7
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for group in groups:
        x, y, scale = map(float, re.findall(r"[\d.]+", group.get("transform", "")))
        assert x >= 0
        assert x + 4 * scale <= width + 0.01
        assert y + 5 * scale <= height + 0.5
    paths = [[p.get("d", "") for p in group.findall("{http://www.w3.org/2000/svg}path")] for group in groups]
    assert [len(p) for p in paths] == [1, 1, 2, 1, 1, 1, 1]
    np.testing.assert_array_equal(rasterize(paths[2][0], (5, 4)), images[2] & ~hidden[2])
    np.testing.assert_array_equal(rasterize(paths[2][1], (5, 4)), hidden[2])


@given(st.lists(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=30), min_size=1, max_size=3))
def test_outlines_are_shares_that_sum_to_one(groups: list[list[float]]) -> None:
    series = compute_outlines({str(i): np.array(values) for i, values in enumerate(groups)})
    for xs, ys in series.values():
        assert len(xs) == len(ys)
        assert abs(sum(ys) - 1) < 1e-9
        assert ys[0] == ys[-1] == 0
        assert (np.diff(xs) >= 0).all()
