"""Black-and-white images as inline SVG for `deformer_stream.report.html`: a path per image, a rectangle per run of ink."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.report.charts import WIDTH
from deformer_stream.report.html import text

Bits = NDArray[np.bool_]
PAPER, INK, HIDDEN, FRAME = "#ffffff", "#15191d", "#d9480f", "#d5dade"
"""The same in light and dark pages: images are data, and black on white is how they are known."""


def runs(image: Bits) -> str:
    """The SVG path that covers the true pixels of (H, W), row by row."""
    padded = np.zeros((image.shape[0], image.shape[1] + 2), np.int8)
    padded[:, 1:-1] = image
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return "".join(f"M{a} {y}h{b - a}v1h{a - b}z" for y, a, b in spans)


def gallery(
    images: Bits, title: str, columns: int, note: str = "", *, hidden: Bits | None = None, heads: tuple[str, ...] = ()
) -> str:
    """Images in rows of `columns`, read like text.

    images: (N, H, W). hidden: (N, H, W), pixels shown as missing. heads: a name above each column. note: below.
    """
    height, width = images.shape[1:]
    lines = -(-len(images) // columns)
    gap, top = 3, 24 if heads else 0
    scale = (WIDTH - gap * (columns + 1)) / columns / width
    side_x, side_y = width * scale + gap, height * scale + gap
    parts = [
        f'<text x="{gap + (i + 0.5) * side_x:.1f}" y="16" text-anchor="middle">{text(name)}</text>'
        for i, name in enumerate(heads)
    ]
    for i, image in enumerate(images):
        x, y = gap + i % columns * side_x, top + gap + i // columns * side_y
        gone = hidden[i] if hidden is not None else np.zeros_like(image)
        parts.append(
            f'<g transform="translate({x:.2f} {y:.2f}) scale({scale:.4f})" shape-rendering="crispEdges">'
            f'<rect width="{width}" height="{height}" fill="{PAPER}" stroke="{FRAME}" stroke-width="{1 / scale:.2f}"/>'
            f'<path fill="{INK}" d="{runs(image & ~gone)}"/>'
            + (f'<path fill="{HIDDEN}" d="{runs(gone)}"/>' if gone.any() else "")
            + "</g>"
        )
    total = top + gap + lines * side_y
    below = f"<p>{text(note)}</p>" if note else ""
    return (
        f'<figure><figcaption>{text(title)}</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{text(title)}"><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {total:.0f}" aria-label="{text(f"{title}: {len(images)} images")}">{"".join(parts)}'
        f"</svg></div>{below}</figure>"
    )


def outlines(groups: dict[str, NDArray[np.float64]], bins: int = 60) -> dict[str, tuple[list[float], list[float]]]:
    """Histograms as series for `charts.line_chart(log_x=True, steps=True)`: shares of each group of positive numbers,
    over common bins of equal ratio."""
    everything = np.concatenate(list(groups.values()))
    edges = np.geomspace(everything.min() / 1.001, everything.max() * 1.001, bins + 1)
    series = {}
    for name, values in groups.items():
        counts, _ = np.histogram(values, edges)
        shares = np.concatenate([[0.0], counts / max(1, len(values)), [0.0]])
        series[name] = ([edges[0], *edges.tolist()], shares.tolist())
    return series
