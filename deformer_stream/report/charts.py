"""Draw charts for HTML reports: matplotlib figures as inline SVG with a title and a legend.

The charts are parts of the pages of `deformer_stream.report.pages`. Each chart is drawn twice, for wide and for narrow
screens, and the style sheet of the page shows one of the two drawings. Colours are CSS variables of the page, so a
chart follows its light or dark theme. Equal arguments give equal output. Titles, labels and names are escaped. Numbers
that are not finite are left out.

Matplotlib is in the extras `report` and `train`. Without it, a chart is its title and a sentence that names the extra.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deformer_stream.extras import format_remedy, is_installed
from deformer_stream.report.pages import format_number, render_part, replace_illegal_characters

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

_MISSING_MATPLOTLIB = f"charts need matplotlib, which is not installed: {format_remedy('report')}"

MAX_MAGNITUDE = 1e100
"""Numbers of this magnitude or more count as not finite, since the arithmetic of axes would overflow."""

MIN_MAGNITUDE = 1e-100
"""Numbers closer to zero are drawn as zero, and left out of a logarithmic axis."""

PLOT_HEIGHT = 230
BAR_HEIGHT = 26
LINE_HEIGHT = 17
"""Heights in SVG units (CSS pixels at scale 1) of the plotting area, of a bar of `draw_bars` and of a line of text."""

MARGIN = 12
RIGHT_MARGIN = 20
"""Free space in SVG units: at the edges of a drawing, and to the right of a plotting area with two labelled axes."""

NUM_BINS = 30
"""Approximate number of bins of a histogram; their edges are round numbers."""

MAX_LABEL_CHARACTERS = 30
"""Length from which the label of a line is shortened."""

MAX_NAME_CHARACTERS = 44
"""Length from which the name of a bar is shortened. A narrow drawing has space for this many."""

# Matplotlib draws with these colours. In the finished SVG each one is replaced by a CSS variable of the page.
_INK, _SOFT, _LINE, _ALARM, _CARD = "#010101", "#020202", "#030303", "#040404", "#050505"
_SERIES = ("#100000", "#110000", "#120000", "#130000", "#140000", "#150000")
_CSS_BY_COLOR = {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _LINE: "var(--line)",
    _ALARM: "var(--alarm)",
    _CARD: "var(--card)",
    **{color: f"var(--s{i})" for i, color in enumerate(_SERIES)},
}

# Curves also differ by their dashes, for readers who cannot distinguish the colours.
_DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 4), (9, 3, 2, 3))

_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sizes of one of the two drawings of a chart (for wide and narrow screens), in SVG units.

    An SVG unit is a CSS pixel if the page is not zoomed.

    Attributes:
        name: CSS class of the drawing, "wide" or "narrow".
        width: Width of the drawing.
        font_size: Size of all text.
    """

    name: str
    width: float
    font_size: float

    def text_width(self, text: str) -> float:
        """Return an upper estimate of the width of a text in SVG units, because the reader's fonts are not known."""
        return 0.6 * self.font_size * len(text)


_LAYOUTS = (_Layout("wide", 800, 13), _Layout("narrow", 340, 12))


@dataclass(frozen=True, slots=True)
class _Axis:
    """The range and the labelled values of one axis, in the unit of the data.

    Attributes:
        low: Smallest value shown.
        high: Largest value shown.
        ticks: Values that have a label.
        labels: The text of each tick's label.
    """

    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]


def draw_lines(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    x_label: str,
    y_label: str,
    title: str,
    log_x: bool = False,
    horizontal: Mapping[str, float] | None = None,
    *,
    vertical: Mapping[str, float] | None = None,
    x_unit: str = "",
    y_unit: str = "",
    include_zero: bool = False,
    show_points: bool = False,
    show_steps: bool = False,
) -> Markup:
    """Return a chart of one curve per series over common axes.

    Args:
        series: The name of each curve as key, and the pair (x values, y values) as value, in drawing order. NaN
            interrupts a curve.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        title: Title above the chart.
        log_x: Whether the horizontal axis is logarithmic.
        horizontal: Horizontal lines to add, such as a threshold: the label of each line as key, its y value as value.
        vertical: Vertical lines to add: the label of each line as key, its x value as value.
        x_unit: Unit shown after the numbers of the horizontal axis. With "%", the value 1 is shown as 100%.
        y_unit: Unit shown after the numbers of the vertical axis. With "%", the value 1 is shown as 100%.
        include_zero: Whether the vertical axis always includes zero.
        show_points: Whether each point of a curve is marked by a dot.
        show_steps: Whether to draw steps (each y value holds until the next x value) instead of straight connections.

    Raises:
        ValueError: If a curve has different numbers of x and y values.
    """
    curves = {name: (_keep_finite(xs), _keep_finite(ys)) for name, (xs, ys) in series.items()}
    for name, (xs, ys) in curves.items():
        if len(xs) != len(ys):
            raise ValueError(
                f"the curve {name!r} has {len(xs)} x values and {len(ys)} y values; the numbers must be equal"
            )
    if log_x:  # numbers up to zero have no logarithm; NaN leaves these points out
        curves = {name: (np.where(xs > MIN_MAGNITUDE, xs, np.nan), ys) for name, (xs, ys) in curves.items()}
    horizontal_lines = {label: y for label, y in (horizontal or {}).items() if math.isfinite(y)}
    vertical_lines = {
        label: x for label, x in (vertical or {}).items() if math.isfinite(x) and (x > MIN_MAGNITUDE or not log_x)
    }
    # For each curve, which of its points can be drawn.
    visible = [np.isfinite(xs) & np.isfinite(ys) for xs, ys in curves.values()]
    if not any(mask.any() for mask in visible):
        return _draw_empty(title)
    x_values = [xs[mask] for (xs, _), mask in zip(curves.values(), visible, strict=True)]
    y_values = [ys[mask] for (_, ys), mask in zip(curves.values(), visible, strict=True)]
    # The ranges of the axes follow from all numbers that must be visible.
    all_x = np.concatenate([*x_values, list(vertical_lines.values())])
    all_y = np.concatenate([*y_values, list(horizontal_lines.values()), [0.0] if include_zero else []])

    def draw(layout: _Layout) -> str:
        """Return the chart of curves as SVG, in the sizes of the layout (for wide or narrow screens)."""
        # From the enclosing function: `all_x` and `all_y` are all numbers that must be visible, `curves` the x and y
        # values by name, and `visible` the mask of the finite points of each curve.
        # The vertical axis is extended to round numbers. The horizontal axis ends exactly at the data.
        y_axis = _round_axis(all_y.min(), all_y.max(), y_unit)
        plot_width = layout.width - _left_margin(y_axis, layout) - RIGHT_MARGIN
        x_axis = _tight_axis(all_x.min(), all_x.max(), x_unit, layout, plot_width, log_x)
        figure, axes = _new_axes(layout, x_axis, y_axis, x_label, y_label, log_x, vertical_lines)
        for i, (xs, ys) in enumerate(curves.values()):
            axes.plot(
                xs,
                ys,
                color=_color(i),
                linestyle=(0, _dashes(i) or None),  # offset and dashes; no dashes draw a solid line
                linewidth=2.2,
                drawstyle="steps-post" if show_steps else "default",
                clip_on=False,  # a curve along the edge of the plotting area keeps its full width
                gid=f"curve-{i}",  # from it `_to_svg` derives the CSS class of the curve
            )
            if show_points or visible[i].sum() == 1:  # a curve with only one point has no visible line
                axes.plot(xs, ys, "o", color=_color(i), markersize=5, gid=f"points-{i}", clip_on=False)
        _draw_horizontal_lines(axes, horizontal_lines, layout)
        description = f"{title}: {y_label} against {x_label} for {', '.join(curves)}"
        # The salt makes the ids in this SVG different from those of other drawings on the page.
        return _to_svg(figure, description, salt=f"{title} {layout.name}")

    return _render_chart(title, draw, list(curves))


def draw_bars(labels: Sequence[str], values: ArrayLike, title: str, x_label: str = "", *, unit: str = "") -> Markup:
    """Return a chart of horizontal bars that start at zero, each with its label and its number.

    Args:
        labels: Label of each bar, from top to bottom. A long label is shortened; its tooltip shows the full text.
        values: Value of each bar, which determines its length. A bar without a finite value is not drawn.
        title: Title above the chart.
        x_label: Name of the horizontal axis; no name if it is empty.
        unit: Unit shown after the numbers. With "%", the value 1 is shown as 100%.

    Raises:
        ValueError: If there is not one value for each label.
    """
    lengths = _keep_finite(values)
    if len(lengths) != len(labels):
        raise ValueError(
            f"the bar chart has {len(labels)} labels and {len(lengths)} values; each bar needs one label and one value"
        )
    if not np.isfinite(lengths).any():
        return _draw_empty(title)
    low, high = min(0.0, float(np.nanmin(lengths))), max(0.0, float(np.nanmax(lengths)))
    factor = 100.0 if unit == "%" else 1.0
    numbers = [_with_unit(format_number(factor * v), unit) for v in lengths.tolist()]

    def draw(layout: _Layout) -> str:
        """Return the bar chart as SVG, in the sizes of the layout (for wide or narrow screens)."""
        # From the enclosing function: `lengths` has the value of each bar, `numbers` the text of each value. `low` and
        # `high` are the bounds of the horizontal axis, which includes zero.
        names = [_shorten(replace_illegal_characters(label), MAX_NAME_CHARACTERS) for label in labels]
        name_width = max(map(layout.text_width, names))
        # The number of a bar is written at its end: to the left of a negative bar, to the right of any other bar.
        number_width = min(max(map(layout.text_width, numbers)) + 8, 0.25 * layout.width)
        left_number_width = number_width if low < 0 else 0
        # Names that leave too little space for bars and numbers are written above their bars.
        is_name_above = name_width + left_number_width > 0.45 * layout.width
        row_height = BAR_HEIGHT + (LINE_HEIGHT if is_name_above else 0)
        left = MARGIN + left_number_width + (0 if is_name_above else MARGIN + name_width)
        right = min(MARGIN + number_width, 0.25 * layout.width)
        x_axis = _tight_axis(low, high, unit, layout, layout.width - left - right)
        bottom = 46 if x_label else 26
        height = MARGIN + row_height * len(labels) + bottom
        figure = _new_figure(layout.width, height)
        # Matplotlib measures the plotting area in fractions of the figure: left edge, lower edge, width, height.
        axes = figure.add_axes(
            (left / layout.width, bottom / height, 1 - (left + right) / layout.width, 1 - (bottom + MARGIN) / height)
        )
        axes.set_ylim(len(labels) - 0.5, -0.5)  # row i is at height i, the first row at the top
        bar_offset = 0.5 * (row_height - BAR_HEIGHT) / row_height  # a bar is in the lower part of its row
        _style_axes(axes, layout, "x")
        _set_x_axis(axes, x_axis, x_label, layout)
        axes.spines[["bottom"]].set_visible(False)
        axes.axvline(0.0, color=_SOFT, linewidth=1)
        axes.set_yticks([])  # the loop below writes the names, each with a gid for its tooltip
        tooltips = {}  # full text of each name by the gid of the name
        for i, (length, name, number) in enumerate(zip(lengths.tolist(), names, numbers, strict=True)):
            if math.isfinite(length):
                y = i + bar_offset
                (bar,) = axes.barh([y], [length], height=0.7 * BAR_HEIGHT / row_height, color=_SERIES[0])
                bar.set_gid(f"bar-{i}")
                _annotate(axes, number, (length, y), (-6 if length < 0 else 6, 0), layout, _SOFT)
            # Names beside their bars end at the same position. Positions are measured from the left edge of the
            # plotting area and from the middle of the row.
            name_x = -left + MARGIN + (0 if is_name_above else name_width)
            name_y = 0.5 * BAR_HEIGHT if is_name_above else 0
            axes.annotate(
                name,
                (0, i),
                (name_x, name_y),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                horizontalalignment="left" if is_name_above else "right",
                verticalalignment="center_baseline",
                color=_INK,
                fontsize=layout.font_size,
                bbox={"facecolor": _CARD, "edgecolor": "none", "pad": 0.5},  # covers the lines of the grid
                gid=f"label-{i}",
                parse_math=False,
                annotation_clip=False,
            )
            tooltips[f"label-{i}"] = replace_illegal_characters(labels[i])
        return _to_svg(figure, f"{title}: bars for {len(lengths)} labels", f"{title} {layout.name}", tooltips)

    return _render_chart(title, draw)


def draw_histogram(
    values: ArrayLike,
    title: str,
    x_label: str,
    *,
    x_unit: str = "",
    vertical: Mapping[str, float] | None = None,
) -> Markup:
    """Return a histogram: a chart of bars whose heights are the numbers of values in adjacent intervals (bins).

    Args:
        values: The values to count. Values that are not finite are left out.
        title: Title above the chart.
        x_label: Name of the horizontal axis.
        x_unit: Unit shown after the numbers of the horizontal axis. With "%", the value 1 is shown as 100%.
        vertical: Vertical lines to add, such as a threshold: the label of each line as key, its x value as value.
    """
    finite = _keep_finite(values)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return _draw_empty(title)
    vertical_lines = {label: x for label, x in (vertical or {}).items() if math.isfinite(x)}
    edges = _round_values(float(finite.min()), float(finite.max()), NUM_BINS)
    # A rounded outer edge must not exclude the smallest or the largest value.
    edges[0], edges[-1] = min(edges[0], finite.min()), max(edges[-1], finite.max())
    counts, _ = np.histogram(finite, edges)
    shown_x = [edges[0], edges[-1], *vertical_lines.values()]
    low, high = min(shown_x), max(shown_x)

    def draw(layout: _Layout) -> str:
        """Return the histogram as SVG, in the sizes of the layout (for wide or narrow screens)."""
        # From the enclosing function: `finite` has the values that are drawn, `counts` the number of values in each
        # bin, `edges` the bounds of the bins. `low` and `high` are the smallest and largest x that must be visible.
        # The horizontal axis ends exactly at `low` and `high`. The vertical axis is extended to a round number.
        y_axis = _round_axis(low=0.0, high=float(counts.max()), unit="")
        plot_width = layout.width - _left_margin(y_axis, layout) - RIGHT_MARGIN
        x_axis = _tight_axis(low, high, x_unit, layout, plot_width)
        figure, axes = _new_axes(
            layout, x_axis, y_axis, x_label, y_label="count", log_x=False, vertical_lines=vertical_lines
        )
        tooltips = {}  # range and count of each bar by the gid of the bar
        for i, count in enumerate(counts.tolist()):
            if count:  # an empty bin has no bar
                start, end = edges[i], edges[i + 1]
                (bar,) = axes.bar(
                    start, count, width=end - start, align="edge", color=_SERIES[0], edgecolor=_CARD, linewidth=0.8
                )
                bar.set_gid(f"bar-{i}")
                tooltips[f"bar-{i}"] = f"{format_number(start)} to {format_number(end)}: {count}"
        description = f"{title}: histogram of {len(finite)} values"
        # The salt makes the ids in this SVG different from those of other drawings on the page.
        return _to_svg(figure, description, salt=f"{title} {layout.name}", tooltips=tooltips)

    return _render_chart(title, draw)


def explain_missing_charts() -> str | None:
    """Return why reports have no charts, with the remedy; None if they have them."""
    return None if is_installed("matplotlib") else _MISSING_MATPLOTLIB


def _render_chart(title: str, draw: Callable[[_Layout], str], legend: Sequence[str] = ()) -> Markup:
    """Return a chart as HTML: its title, its legend, and one drawing each for wide and for narrow screens.

    Args:
        title: Title of the chart.
        draw: A function that returns the chart as SVG, in the sizes of the given layout.
        legend: Names of the curves in drawing order; empty for a chart without a legend.
    """
    if reason := explain_missing_charts():
        return _render_without_drawing(title, reason)
    from markupsafe import Markup

    drawings = {layout.name: Markup(draw(layout)) for layout in _LAYOUTS}  # noqa: S704 - matplotlib escapes text
    # The name, the CSS colour and the dashes (as in the CSS property stroke-dasharray) of each curve.
    legend_rows = [
        (name, _CSS_BY_COLOR[_color(i)], " ".join(map(str, _dashes(i))) or "none") for i, name in enumerate(legend)
    ]
    return render_part("chart", title, legend_rows, drawings)


def _draw_empty(title: str) -> Markup:
    """Return a chart that has only a title and the text "no data". One drawing serves wide and narrow screens."""
    if reason := explain_missing_charts():
        return _render_without_drawing(title, reason)
    from markupsafe import Markup

    figure = _new_figure(340, 70)
    figure.text(0.5, 0.5, "no data", color=_SOFT, fontsize=13, horizontalalignment="center")
    drawing = Markup(_to_svg(figure, f"{title}: no data", title))  # noqa: S704 - matplotlib escapes text
    return render_part("chart", title, [], {"all": drawing})


def _render_without_drawing(title: str, reason: str) -> Markup:
    """Return a chart that has only a title and the reason why it is not drawn."""
    return render_part("chart", title, [], {"all": render_part("paragraph", reason)})


def _new_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure with a transparent background; `width` and `height` are in SVG units.

    Matplotlib is imported here, so that programs that write no report need not import it.
    """
    # Matplotlib warns if it cannot write its cache to the home directory. The charts do not need the cache.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))  # matplotlib writes 72 SVG units for an inch
    figure.patch.set_visible(False)
    return figure


def _new_axes(
    layout: _Layout,
    x_axis: _Axis,
    y_axis: _Axis,
    x_label: str,
    y_label: str,
    log_x: bool,
    vertical_lines: Mapping[str, float],
) -> tuple[Figure, Axes]:
    """Return a matplotlib figure with one pair of axes, on which the caller draws the data.

    The axes have a grid, tick labels, names and labelled vertical lines. The name of the vertical axis is written above
    it, because horizontal text is easier to read.

    Args:
        layout: The sizes of the drawing.
        x_axis: Range and ticks of the horizontal axis.
        y_axis: Range and ticks of the vertical axis.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        log_x: Whether the horizontal axis is logarithmic.
        vertical_lines: x value of each vertical line by its label.
    """
    from matplotlib.transforms import blended_transform_factory

    left, right, bottom = _left_margin(y_axis, layout), RIGHT_MARGIN, 48
    line_labels, num_rows = _arrange_line_labels(vertical_lines, x_axis, layout, left, log_x)
    top = MARGIN + (LINE_HEIGHT + 6 if y_label else 0) + LINE_HEIGHT * num_rows
    height = top + PLOT_HEIGHT + bottom
    figure = _new_figure(layout.width, height)
    axes = figure.add_axes(
        (left / layout.width, bottom / height, 1 - (left + right) / layout.width, PLOT_HEIGHT / height)
    )
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    _style_axes(axes, layout, "y")
    _set_x_axis(axes, x_axis, x_label, layout)
    axes.set_ylim(y_axis.low, y_axis.high)
    axes.set_yticks(y_axis.ticks, y_axis.labels, parse_math=False)
    figure.text(
        MARGIN / layout.width,
        1 - LINE_HEIGHT / height,
        _shorten(replace_illegal_characters(y_label), int(layout.width / layout.text_width("x")) - 2),
        color=_SOFT,
        fontsize=layout.font_size,
        parse_math=False,
    )
    for label in line_labels:
        # x is in data units. y is a share of the plotting area's height, so values above 1 are above this area.
        top_of_line = 1 + (label.row + 0.8) * LINE_HEIGHT / PLOT_HEIGHT
        axes.plot(
            [label.x, label.x],
            [0, top_of_line],
            transform=blended_transform_factory(axes.transData, axes.transAxes),
            color=_ALARM,
            linewidth=1.5,
            linestyle=(0, (5, 4)),
            clip_on=False,
            scalex=False,
            scaley=False,
        )
        offset = (5 if label.is_right else -5, 4 + label.row * LINE_HEIGHT)
        axes.annotate(
            label.text,
            (label.x, 1),
            offset,
            xycoords=blended_transform_factory(axes.transData, axes.transAxes),
            textcoords="offset points",
            horizontalalignment="left" if label.is_right else "right",
            color=_ALARM,
            fontsize=layout.font_size,
            parse_math=False,
            annotation_clip=False,
        )
    return figure, axes


@dataclass(frozen=True, slots=True)
class _LineLabel:
    """The label of a vertical line of a chart, written beside the upper end of the line.

    Attributes:
        text: Text of the label.
        x: Position of the line on the horizontal axis.
        row: Row of text above the plotting area, counted from 0 at the bottom.
        is_right: Whether the text is to the right of its line, else to the left.
    """

    text: str
    x: float
    row: int
    is_right: bool


def _arrange_line_labels(
    vertical_lines: Mapping[str, float], x_axis: _Axis, layout: _Layout, left: float, log_x: bool
) -> tuple[list[_LineLabel], int]:
    """Choose a row above the plotting area for the label of each vertical line, so that labels do not overlap.

    A line is drawn up to the row of its label. All labels are to the right of their lines if all of them fit there, and
    otherwise all are to the left. Labels to the right are placed one after the other from the rightmost line to the
    leftmost. Labels to the left are placed from left to right.

    So the label that was last placed in a row belongs to the row's nearest line in the direction of the text. The next
    label is put into the lowest row in which it ends before this line. If there is no such row, a new row is added at
    the top.

    Args:
        vertical_lines: x value of each line by its label.
        x_axis: Range of the horizontal axis.
        layout: The sizes of the drawing.
        left: Distance of the plotting area from the left edge of the drawing in SVG units.
        log_x: Whether the horizontal axis is logarithmic.

    Returns:
        The placed labels, and the number of rows that they need.
    """
    scale = math.log if log_x else float
    start, end = scale(x_axis.low), scale(x_axis.high)
    plot_width = layout.width - left - RIGHT_MARGIN

    def to_svg_x(x: float) -> float:
        """Return the distance of an x value of the data from the left edge of the drawing in SVG units."""
        return left + (scale(x) - start) / (end - start) * plot_width

    x_by_text = {
        _shorten(replace_illegal_characters(label), MAX_LABEL_CHARACTERS): x for label, x in vertical_lines.items()
    }
    fits_right = all(to_svg_x(x) + 5 + layout.text_width(text) <= layout.width for text, x in x_by_text.items())
    direction = 1 if fits_right else -1  # of the text, seen from its line
    line_labels: list[_LineLabel] = []
    # For each row, the last line that was drawn through it. The next label of the row must end before this line.
    line_of_last_label: list[float] = []
    for text, x in sorted(x_by_text.items(), key=lambda item: item[1], reverse=fits_right):
        line = to_svg_x(x)
        label_end = line + direction * (10 + layout.text_width(text))
        free_rows = [
            row
            for row, other_line in enumerate(line_of_last_label)
            if (label_end <= other_line if fits_right else label_end >= other_line)
        ]
        row = free_rows[0] if free_rows else len(line_of_last_label)
        # The line of this label passes through all rows below it, so labels in these rows must end before it, too.
        line_of_last_label[: row + 1] = [line] * (row + 1)  # appends a row if `row` is a new one
        line_labels.append(_LineLabel(text, x, row, fits_right))
    return line_labels, len(line_of_last_label)


def _draw_horizontal_lines(axes: Axes, horizontal_lines: Mapping[str, float], layout: _Layout) -> None:
    """Draw labelled horizontal lines, with each label at the right end of its line.

    If the labels of two close lines would overlap, one of them is moved to the left.

    Args:
        axes: The axes to draw on. The range of the vertical axis must have been set.
        horizontal_lines: y value of each line by its label.
        layout: The sizes of the drawing.
    """
    low, high = axes.get_ylim()
    # Of each label that was drawn: its height above the horizontal axis, and its left end, measured from the right
    # edge of the plotting area (so it is negative). Both are in SVG units.
    placed_labels: list[tuple[float, float]] = []
    for label, y in sorted(horizontal_lines.items(), key=lambda item: item[1]):
        height = (y - low) / (high - low) * PLOT_HEIGHT
        left_ends_of_close_labels = [
            left_end for other_height, left_end in placed_labels if abs(other_height - height) < LINE_HEIGHT
        ]
        right_end = min(left_ends_of_close_labels, default=0.0)
        text = _shorten(replace_illegal_characters(label), MAX_LABEL_CHARACTERS)
        placed_labels.append((height, right_end - layout.text_width(text) - 8))  # with a gap of 8 units
        axes.axhline(y, color=_ALARM, linewidth=1.5, linestyle=(0, (5, 4)), clip_on=False)
        axes.annotate(
            text,
            (1, y),  # the right end of the line: x = 1 is the right edge of the plotting area, y is in data units
            (right_end, 5),  # offset of the label's lower right corner from this point
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            horizontalalignment="right",
            color=_ALARM,
            fontsize=layout.font_size,
            bbox={"facecolor": _CARD, "edgecolor": "none", "pad": 1.5},  # keeps the text readable above curves
            parse_math=False,  # a dollar sign is an ordinary character
            annotation_clip=False,  # the text may extend beyond the plotting area
        )


def _annotate(
    axes: Axes, text: str, xy: tuple[float, float], offset: tuple[float, float], layout: _Layout, color: str
) -> None:
    """Write a text beside a data point, such as the number at the end of a bar.

    Args:
        axes: The axes to draw on.
        text: The text.
        xy: x and y value of the point.
        offset: Horizontal and vertical distance of the text from the point in SVG units. If the horizontal distance is
            negative, the text ends to the left of the point.
        layout: The sizes of the drawing.
        color: Colour of the text.
    """
    axes.annotate(
        replace_illegal_characters(text),
        xy,
        offset,
        textcoords="offset points",
        horizontalalignment="right" if offset[0] < 0 else "left",
        verticalalignment="center_baseline",
        color=color,
        fontsize=layout.font_size,
        parse_math=False,  # a dollar sign is an ordinary character
        annotation_clip=False,  # the text may extend beyond the plotting area
    )


def _style_axes(axes: Axes, layout: _Layout, grid: str) -> None:
    """Remove the frame around the plotting area (except its lower line) and the tick marks, and add grid lines.

    Args:
        axes: The axes to change.
        layout: The sizes of the drawing.
        grid: The axis at whose ticks grid lines are drawn, "x" or "y".
    """
    axes.patch.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines[["bottom"]].set_color(_SOFT)
    axes.tick_params(length=0, pad=6, labelsize=layout.font_size, labelcolor=_SOFT)
    axes.grid(axis=grid, color=_LINE, linewidth=1)  # type: ignore[arg-type]
    axes.set_axisbelow(True)  # draws the grid below the data


def _set_x_axis(axes: Axes, x_axis: _Axis, label: str, layout: _Layout) -> None:
    """Set the range and the tick labels of the horizontal axis, and its name to `label`."""
    axes.set_xlim(x_axis.low, x_axis.high)
    axes.set_xticks(x_axis.ticks, x_axis.labels, parse_math=False)
    # As many characters as fit into the width of the drawing, less two for its margins.
    max_characters = int(layout.width / layout.text_width("x")) - 2
    axes.set_xlabel(
        _shorten(replace_illegal_characters(label), max_characters),
        color=_SOFT,
        fontsize=layout.font_size,
        labelpad=5,
        parse_math=False,
    )


def _to_svg(figure: Figure, description: str, salt: str, tooltips: Mapping[str, str] | None = None) -> str:
    """Return a matplotlib figure as an SVG element, which takes its colours and fonts from the page.

    Args:
        figure: The figure to convert.
        description: Text for screen readers.
        salt: A text that no other drawing of the page has. Ids in the SVG are derived from it, so that they are unique.
        tooltips: Tooltips by gid, the id that was set on a matplotlib artist such as a bar. A tooltip is shown when the
            pointer is over the element.
    """
    import matplotlib

    buffer = io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # so that equal charts give equal output
    with (
        warnings.catch_warnings(),
        matplotlib.rc_context(
            {
                "svg.fonttype": "none",  # keeps text as text instead of outlines
                "svg.hashsalt": ascii(salt),
                "lines.scale_dashes": False,
                "path.simplify": False,
            }
        ),
    ):
        # Matplotlib warns of characters that its own font lacks. The page is shown with other fonts.
        warnings.simplefilter("ignore")
        figure.savefig(buffer, format="svg", metadata=no_metadata)
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314 - matplotlib wrote it
    for attribute in ("width", "height", "version"):  # the style sheet of the page sets the size
        del root.attrib[attribute]
    root.set("role", "img")
    root.set("aria-label", replace_illegal_characters(description))
    style_of_all_elements = root.find(f"{_SVG}defs")
    if style_of_all_elements is not None:
        root.remove(style_of_all_elements)  # it would apply to the whole page
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _to_css(element.attrib["style"]))
        if element.tag == f"{_SVG}g":
            gid = element.attrib.pop("id", "")
            if gid in (tooltips or {}):
                title = ElementTree.Element(f"{_SVG}title")
                title.text = (tooltips or {})[gid]
                element.insert(0, title)
            if re.fullmatch("(curve|points|bar|label)-[0-9]+", gid):
                element.set("class", gid.partition("-")[0])
        # The white space between elements only makes the page larger.
        element.tail = None
        if element.text is not None and not element.text.strip() and element.tag != f"{_SVG}text":
            element.text = None
    ElementTree.register_namespace("", _SVG[1:-1])
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


def _to_css(style: str) -> str:
    """Return the `style` attribute of an SVG element with CSS variables instead of colours, and without fonts."""
    style = re.sub("font-family: [^;]*(; )?", "", style)
    return re.sub("#[0-9a-f]{6}", lambda match: _CSS_BY_COLOR.get(match[0], match[0]), style)


def _keep_finite(values: ArrayLike) -> Floats:
    """Return numbers as a flat array of numbers that can be drawn.

    Numbers with a magnitude of at least `MAX_MAGNITUDE` become NaN, because the arithmetic of axes would overflow.
    Numbers with a magnitude below `MIN_MAGNITUDE` become zero.
    """
    array = np.asarray(values, np.float64).reshape(-1)
    array = np.where(np.abs(array) < MIN_MAGNITUDE, 0.0, array)
    return np.where(np.abs(array) < MAX_MAGNITUDE, array, np.nan)


def _round_values(low: float, high: float, num_steps: int) -> Floats:
    """Return round numbers at equal distances, from at most `low` to at least `high`, in about `num_steps` steps."""
    from matplotlib.ticker import MaxNLocator

    low, high = _widen(low, high)
    values = MaxNLocator(num_steps, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1).tick_values(low, high)
    return np.array([float(f"{value:.12g}") for value in values])  # removes rounding errors such as 0.30000000000000004


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return the bounds `low` and `high` of an axis, moved apart if they are equal or nearly equal."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, MIN_MAGNITUDE):
        return low, high
    half_width = 0.5 * size if size > MIN_MAGNITUDE else 1.0
    return low - half_width, high + half_width


def _round_axis(low: float, high: float, unit: str) -> _Axis:
    """Return an axis that begins and ends at round numbers and contains all data.

    Args:
        low: Smallest value of the data.
        high: Largest value of the data.
        unit: Unit shown after the numbers of the axis. With "%", the value 1 is shown as 100%.
    """
    ticks = _round_values(low, high, num_steps=6).tolist()
    return _Axis(ticks[0], ticks[-1], ticks, _label_ticks(ticks, unit, num_digits=6))


def _tight_axis(
    low: float, high: float, unit: str, layout: _Layout, space: float, is_logarithmic: bool = False
) -> _Axis:
    """Return a horizontal axis that ends exactly at the data's bounds, with as many tick labels as fit side by side.

    Args:
        low: Smallest value of the data. It must be positive if the scale is logarithmic.
        high: Largest value of the data.
        unit: Unit shown after the numbers of the axis. With "%", the value 1 is shown as 100%.
        layout: The sizes of the drawing.
        space: Length of the axis in SVG units.
        is_logarithmic: Whether the scale is logarithmic.
    """
    tick_choices: list[list[float]]  # fewer and fewer ticks
    if is_logarithmic:
        if high <= low * (1 + 1e-9):  # nearly equal bounds are moved apart
            low, high = low / 3, high * 3
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        multiples = (1, 2, 5) if len(powers) <= 4 else (1,)  # of each power of ten; fewer on a long axis
        round_values = [m * 10.0**power for power in powers for m in multiples]
        # If no round value is in the range, the bounds are labelled.
        round_values = [value for value in round_values if low <= value <= high] or [low, high]
        # All values, then every second, every third, and so on.
        tick_choices = [round_values[::step] for step in range(1, len(round_values) + 1)]
    else:
        low, high = _widen(low, high)
        tolerance = 1e-9 * (high - low)  # a tick at a bound must not be lost by rounding
        values_by_choice = [_round_values(low, high, num_steps).tolist() for num_steps in (6, 5, 4, 3, 2)]
        tick_choices = [
            [value for value in values if low - tolerance <= value <= high + tolerance] for values in values_by_choice
        ]
    num_digits = 2 if is_logarithmic else 6
    for ticks in tick_choices:
        labels = _label_ticks(ticks, unit, num_digits)
        needed_space = sum(layout.text_width(label) + 14 for label in labels)  # with a gap of 14 units per label
        if needed_space <= space:
            break  # if no choice fits, the last one with the fewest ticks is used
    return _Axis(low, high, ticks, labels)


def _label_ticks(ticks: Sequence[float], unit: str, num_digits: int) -> list[str]:
    """Return the ticks of an axis as texts with `num_digits` significant digits and the unit.

    With the unit "%", the value 1 becomes the text "100%".
    """
    factor = 100.0 if unit == "%" else 1.0
    return [_with_unit(format_number(factor * tick, num_digits), unit) for tick in ticks]


def _left_margin(y_axis: _Axis, layout: _Layout) -> float:
    """Return the width in SVG units that the tick labels of the vertical axis need beside the plotting area."""
    return min(max(36.0, 14 + max(map(layout.text_width, y_axis.labels))), 0.5 * layout.width)


def _with_unit(number: str, unit: str) -> str:
    """Return the text of a number with its unit after a narrow space, or with a percent sign without a space."""
    return number + ("" if unit in ("", "%") else "\u202f") + _shorten(replace_illegal_characters(unit), 12)


def _shorten(text: str, max_characters: int) -> str:
    """Return a text on one line, cut to `max_characters` with an ellipsis at the end if it is longer."""
    text = " ".join(text.split())
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def _color(series_index: int) -> str:
    """Return the colour with which matplotlib draws a curve. `_to_svg` replaces it by a CSS variable."""
    return _SERIES[series_index % len(_SERIES)]


def _dashes(series_index: int) -> tuple[float, ...]:
    """Return the lengths (dash, gap, dash, gap, ...) of a curve's line style in SVG units; none for a solid line."""
    return _DASHES[series_index % len(_DASHES)]
