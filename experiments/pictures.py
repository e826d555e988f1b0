"""Render black-and-white images as inline SVG for the pages of `deformer_stream.report.pages`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deformer_stream.report.pages import replace_illegal_characters

if TYPE_CHECKING:
    from markupsafe import Markup

BooleanImage = NDArray[np.bool_]

WIDTH = 660
"""Width of a gallery in SVG units; the page scales it."""

PAPER, INK, HIDDEN, FRAME = "#ffffff", "#15191d", "#d9480f", "#d5dade"
"""Colours of a white pixel, a black pixel, a missing pixel and the frame of an image.

They are the same in light and dark pages, because images are data and black on white is their usual appearance.
"""

_GAP = 3
"""Space between images in SVG units."""

_TEMPLATE = Path(__file__).with_name("gallery.html")


def to_path(image: BooleanImage) -> str:
    """Return the SVG path that covers the true pixels of an image of shape (H, W): one rectangle per horizontal run."""
    padded = np.zeros((image.shape[0], image.shape[1] + 2), np.int8)
    padded[:, 1:-1] = image
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    runs = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return "".join(f"M{start} {row}h{end - start}v1h{start - end}z" for row, start, end in runs)


def render_gallery(
    images: BooleanImage,
    title: str,
    num_columns: int,
    note: str = "",
    *,
    is_hidden: BooleanImage | None = None,
    column_heads: tuple[str, ...] = (),
) -> Markup:
    """Return images as a part of a page, in rows that are filled from left to right.

    Args:
        images: (N, H, W) N images of H × W pixels, true for black.
        title: Title above the images.
        num_columns: Number of images in a row.
        note: Text below the images.
        is_hidden: (N, H, W) pixels that are shown as missing; none by default.
        column_heads: A name above each column; no names by default.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    height, width = images.shape[1:]
    head_height = 24 if column_heads else 0
    scale = (WIDTH - _GAP * (num_columns + 1)) / num_columns / width
    column_width, row_height = width * scale + _GAP, height * scale + _GAP
    hidden = np.zeros_like(images) if is_hidden is None else is_hidden
    cells = [
        {
            "x": _GAP + i % num_columns * column_width,
            "y": head_height + _GAP + i // num_columns * row_height,
            "black": to_path(image & ~missing),
            "missing": to_path(missing),
        }
        for i, (image, missing) in enumerate(zip(images, hidden, strict=True))
    ]
    heads = [{"x": _GAP + (i + 0.5) * column_width, "name": name} for i, name in enumerate(column_heads)]
    num_rows = -(-len(images) // num_columns)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(paper=PAPER, ink=INK, hidden=HIDDEN, frame=FRAME)
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    return Markup(  # noqa: S704 - the template escapes its texts
        template.render(
            title=replace_illegal_characters(title),
            note=replace_illegal_characters(note),
            description=replace_illegal_characters(f"{title}: {len(images)} images"),
            heads=heads,
            cells=cells,
            image_width=width,
            image_height=height,
            scale=scale,
            total_width=WIDTH,
            total_height=head_height + _GAP + num_rows * row_height,
        )
    )


def compute_outlines(
    values_by_group: dict[str, NDArray[np.float64]], num_bins: int = 60
) -> dict[str, tuple[list[float], list[float]]]:
    """Return histograms as series for `charts.draw_lines(log_x=True, show_steps=True)`.

    Args:
        values_by_group: Positive numbers by the name of their group.
        num_bins: Number of bins; all groups have the same bins, and the edges of a bin have a constant ratio.

    Returns:
        For each group the bin edges, and the share of the group that is in each bin.
    """
    all_values = np.concatenate(list(values_by_group.values()))
    edges = np.geomspace(all_values.min() / 1.001, all_values.max() * 1.001, num_bins + 1)
    series = {}
    for name, values in values_by_group.items():
        counts, _ = np.histogram(values, edges)
        shares = np.concatenate([[0.0], counts / max(1, len(values)), [0.0]])
        series[name] = ([edges[0], *edges.tolist()], shares.tolist())
    return series
