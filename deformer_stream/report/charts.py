"""Draw charts for HTML reports: matplotlib figures as inline SVG with a title and a legend.

The charts are parts of the pages of `deformer_stream.report.pages`. Each chart is drawn twice, for wide and for narrow
screens, and the style sheet of the page shows one of the two drawings. Colours are CSS variables of the page, so a
chart follows its light or dark theme. Equal arguments give equal output. Titles, labels and names are escaped. Numbers
that are not finite are left out.
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

from deformer_stream.report.pages import format_number, render_part, replace_illegal_characters

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

MAX_MAGNITUDE = 1e100
"""Numbers of this magnitude or more count as not finite, since the arithmetic of axes would overflow."""

MIN_MAGNITUDE = 1e-100
"""Numbers closer to zero are drawn as zero, and left out of a logarithmic axis."""

PLOT_HEIGHT = 230
BAR_HEIGHT = 26
LINE_HEIGHT = 17
"""Heights in SVG units (CSS pixels at scale 1) of the plotting area, of a bar of `draw_bars` and of a line of text."""

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
    """The layout of one of the two drawings of a chart. Sizes are in SVG units (CSS pixels at scale 1).

    Attributes:
        name: CSS class of the drawing, "wide" or "narrow".
        width: Width of the drawing.
        font_size: Size of all text.
    """

    name: str
    width: float
    font_size: float

    def text_width(self, text: str) -> float:
        """Return an upper estimate of the width of a text in SVG units, independent of the fonts of this machine."""
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
        series: For each curve its name as key, and its x values and y values as value, in drawing order. NaN interrupts
            a curve.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        title: Title above the chart.
        log_x: Whether the horizontal axis is logarithmic.
        horizontal: y values that are marked by a labelled horizontal line, such as a threshold, by label.
        vertical: x values that are marked by a labelled vertical line, by label.
        x_unit: Unit in the tick labels of the horizontal axis; "%" shows shares (1 for all) as percentages.
        y_unit: Unit in the tick labels of the vertical axis; "%" shows shares (1 for all) as percentages.
        include_zero: Whether the vertical axis always includes zero.
        show_points: Whether each value is marked by a dot.
        show_steps: Whether each y value holds until the next x value. Then a curve consists of steps instead of slopes.

    Raises:
        ValueError: If a curve has different numbers of x and y values.
    """
    curves = {name: (_keep_finite(xs), _keep_finite(ys)) for name, (xs, ys) in series.items()}
    for name, (xs, ys) in curves.items():
        if len(xs) != len(ys):
            raise ValueError(
                f"the curve {name!r} has {len(xs)} x values and {len(ys)} y values; the numbers must be equal"
            )
    if log_x:
        curves = {name: (np.where(xs > MIN_MAGNITUDE, xs, np.nan), ys) for name, (xs, ys) in curves.items()}
    levels = {name: v for name, v in (horizontal or {}).items() if math.isfinite(v)}
    marks = {name: v for name, v in (vertical or {}).items() if math.isfinite(v) and (v > MIN_MAGNITUDE or not log_x)}
    # For each curve, which of its points can be drawn.
    visible = [np.isfinite(xs) & np.isfinite(ys) for xs, ys in curves.values()]
    if not any(mask.any() for mask in visible):
        return _draw_empty(title)
    x_values = [xs[mask] for (xs, _), mask in zip(curves.values(), visible, strict=True)]
    y_values = [ys[mask] for (_, ys), mask in zip(curves.values(), visible, strict=True)]
    all_x = np.concatenate([*x_values, list(marks.values())])
    all_y = np.concatenate([*y_values, list(levels.values()), [0.0] if include_zero else []])

    def draw(layout: _Layout) -> str:
        """Return the chart as SVG in this layout."""
        y_axis = _round_axis(all_y.min(), all_y.max(), y_unit)
        left = _left_margin(y_axis, layout)
        x_axis = _tight_axis(all_x.min(), all_x.max(), x_unit, layout, layout.width - left - 20, log_x)
        figure, axes = _new_axes(layout, x_axis, y_axis, x_label, y_label, log_x, marks)
        for i, (xs, ys) in enumerate(curves.values()):
            axes.plot(
                xs,
                ys,
                color=_color(i),
                linestyle=(0, _dashes(i) or None),
                linewidth=2.2,
                drawstyle="steps-post" if show_steps else "default",
                clip_on=False,
                gid=f"curve-{i}",
            )
            if show_points or visible[i].sum() == 1:  # a curve through one point would be invisible
                axes.plot(xs, ys, "o", color=_color(i), markersize=5, gid=f"points-{i}", clip_on=False)
        _draw_levels(axes, levels, layout)
        description = f"{title}: {y_label} against {x_label} for {', '.join(curves)}"
        return _to_svg(figure, description, salt=f"{title} {layout.name}")

    return _assemble(title, draw, list(curves))


def draw_bars(labels: Sequence[str], values: ArrayLike, title: str, x_label: str = "", *, unit: str = "") -> Markup:
    """Return a chart of horizontal bars that start at zero, each with its label and its number.

    Args:
        labels: Label of each bar, from top to bottom. A long label is shortened; its tooltip shows the full text.
        values: Value of each bar, which determines its length. A bar without a finite value is not drawn.
        title: Title above the chart.
        x_label: Name of the horizontal axis; no name if it is empty.
        unit: Unit of the numbers; "%" shows shares (1 for all) as percentages.

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
        """Return the chart as SVG in this layout."""
        max_characters = 30 if layout.name == "wide" else 16
        names = [_shorten(replace_illegal_characters(label), max_characters) for label in labels]
        number_width = max(map(layout.text_width, numbers)) + 8
        left = min(24 + max(map(layout.text_width, names)) + (number_width if low < 0 else 0), 0.6 * layout.width)
        right = min(12 + number_width, 0.25 * layout.width)
        x_axis = _tight_axis(low, high, unit, layout, layout.width - left - right)
        bottom = 46 if x_label else 26
        height = 12 + BAR_HEIGHT * len(labels) + bottom
        figure = _new_figure(layout.width, height)
        axes = figure.add_axes(
            (left / layout.width, bottom / height, 1 - (left + right) / layout.width, 1 - (bottom + 12) / height)
        )
        axes.set_ylim(len(labels) - 0.5, -0.5)
        _style_axes(axes, layout, "x")
        _set_x_axis(axes, x_axis, x_label, layout)
        axes.spines[["bottom"]].set_visible(False)
        axes.axvline(0.0, color=_SOFT, linewidth=1)
        axes.set_yticks([])
        tooltips = {}
        for i, (length, name, number) in enumerate(zip(lengths.tolist(), names, numbers, strict=True)):
            if math.isfinite(length):
                axes.barh([i], [length], height=0.7, color=_SERIES[0])[0].set_gid(f"bar-{i}")
                _annotate(axes, number, (length, i), (-6 if length < 0 else 6, 0), layout, _SOFT)
            # Names end at a common position, 12 units plus the longest name from the left edge of the drawing.
            name_at_left_edge = -left + 12 + max(map(layout.text_width, names))
            axes.annotate(
                name,
                (0, i),
                (name_at_left_edge, 0),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                horizontalalignment="right",
                verticalalignment="center_baseline",
                color=_INK,
                fontsize=layout.font_size,
                gid=f"label-{i}",
                parse_math=False,
                annotation_clip=False,
            )
            tooltips[f"label-{i}"] = replace_illegal_characters(labels[i])
        return _to_svg(figure, f"{title}: bars for {len(lengths)} labels", f"{title} {layout.name}", tooltips)

    return _assemble(title, draw)


def draw_histogram(
    values: ArrayLike,
    title: str,
    x_label: str,
    num_bins: int = 30,
    *,
    x_unit: str = "",
    vertical: Mapping[str, float] | None = None,
) -> Markup:
    """Return a histogram: a chart of bars whose heights are the numbers of values in adjacent intervals (bins).

    Args:
        values: The values to count. Values that are not finite are left out.
        title: Title above the chart.
        x_label: Name of the horizontal axis.
        num_bins: Approximate number of bins; their edges are round numbers.
        x_unit: Unit in the tick labels of the horizontal axis; "%" shows shares (1 for all) as percentages.
        vertical: x values that are marked by a labelled vertical line, such as a threshold, by label.
    """
    finite = _keep_finite(values)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return _draw_empty(title)
    marks = {name: v for name, v in (vertical or {}).items() if math.isfinite(v)}
    edges = _round_values(float(finite.min()), float(finite.max()), num_bins)
    # Rounding must not exclude the smallest or the largest value from its bin.
    edges[0], edges[-1] = min(edges[0], finite.min()), max(edges[-1], finite.max())
    counts, _ = np.histogram(finite, edges)
    low, high = min(edges[0], *marks.values(), math.inf), max(edges[-1], *marks.values(), -math.inf)

    def draw(layout: _Layout) -> str:
        """Return the chart as SVG in this layout."""
        y_axis = _round_axis(0.0, float(counts.max()), "")
        x_axis = _tight_axis(low, high, x_unit, layout, layout.width - _left_margin(y_axis, layout) - 20)
        figure, axes = _new_axes(layout, x_axis, y_axis, x_label, "count", False, marks)
        tooltips = {}
        for i, count in enumerate(counts.tolist()):
            if count:
                start, end = edges[i], edges[i + 1]
                (bar,) = axes.bar(
                    start, count, width=end - start, align="edge", color=_SERIES[0], edgecolor=_CARD, linewidth=0.8
                )
                bar.set_gid(f"bar-{i}")
                tooltips[f"bar-{i}"] = f"{format_number(start)} to {format_number(end)}: {count}"
        return _to_svg(figure, f"{title}: histogram of {len(finite)} values", f"{title} {layout.name}", tooltips)

    return _assemble(title, draw)


def _assemble(title: str, draw: Callable[[_Layout], str], legend: Sequence[str] = ()) -> Markup:
    """Return the HTML element of a chart: its title, its legend and one drawing for each layout.

    Args:
        title: Title of the chart.
        draw: A function that returns the SVG drawing for a layout (wide or narrow).
        legend: Names of the curves in drawing order; empty for a chart without a legend.
    """
    from markupsafe import Markup

    drawings = {layout.name: Markup(draw(layout)) for layout in _LAYOUTS}  # noqa: S704 - matplotlib escapes text
    rows = [(name, _CSS_BY_COLOR[_color(i)], " ".join(map(str, _dashes(i))) or "none") for i, name in enumerate(legend)]
    return render_part("chart", title, rows, drawings)


def _draw_empty(title: str) -> Markup:
    """Return a chart with this title and the text "no data". Its only drawing fits all screens."""
    from markupsafe import Markup

    figure = _new_figure(340, 70)
    figure.text(0.5, 0.5, "no data", color=_SOFT, fontsize=13, horizontalalignment="center")
    drawing = Markup(_to_svg(figure, f"{title}: no data", title))  # noqa: S704 - matplotlib escapes text
    return render_part("chart", title, [], {"all": drawing})


def _new_figure(width: float, height: float) -> Figure:
    """Return an empty transparent figure, whose size is given in SVG units.

    Matplotlib is imported here, so that programs that write no report need not import it.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a read-only home directory is no reason to warn
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
    marks: Mapping[str, float],
) -> tuple[Figure, Axes]:
    """Return a figure and its axes with grid, tick labels, axis names and labelled vertical lines.

    The name of the vertical axis is written above it, because horizontal text is easier to read.

    Args:
        layout: The layout of the drawing.
        x_axis: Range and ticks of the horizontal axis.
        y_axis: Range and ticks of the vertical axis.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        log_x: Whether the horizontal axis is logarithmic.
        marks: x value of each vertical line by its label.
    """
    from matplotlib.transforms import blended_transform_factory

    flags, num_rows = _arrange_flags(marks, x_axis, layout, _left_margin(y_axis, layout), log_x)
    left, right, bottom = _left_margin(y_axis, layout), 20, 48
    top = 12 + (LINE_HEIGHT + 6 if y_label else 0) + LINE_HEIGHT * num_rows
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
        12 / layout.width,
        1 - LINE_HEIGHT / height,
        _shorten(replace_illegal_characters(y_label), int(layout.width / layout.text_width("x")) - 2),
        color=_SOFT,
        fontsize=layout.font_size,
        parse_math=False,
    )
    for flag in flags:
        top_of_line = 1 + (flag.row + 0.8) * LINE_HEIGHT / PLOT_HEIGHT
        axes.plot(
            [flag.value, flag.value],
            [0, top_of_line],
            transform=blended_transform_factory(axes.transData, axes.transAxes),
            color=_ALARM,
            linewidth=1.5,
            linestyle=(0, (5, 4)),
            clip_on=False,
            scalex=False,
            scaley=False,
        )
        offset = (5 if flag.is_right else -5, 4 + flag.row * LINE_HEIGHT)
        axes.annotate(
            flag.name,
            (flag.value, 1),
            offset,
            xycoords=blended_transform_factory(axes.transData, axes.transAxes),
            textcoords="offset points",
            horizontalalignment="left" if flag.is_right else "right",
            color=_ALARM,
            fontsize=layout.font_size,
            parse_math=False,
            annotation_clip=False,
        )
    return figure, axes


@dataclass(frozen=True, slots=True)
class _Flag:
    """The label of a vertical line, placed beside the upper end of the line like a flag on its pole.

    Attributes:
        name: Text of the label.
        value: Position of the line on the horizontal axis.
        row: Row of text above the plotting area, counted from 0 at the bottom.
        is_right: Whether the text is to the right of its line, else to the left.
    """

    name: str
    value: float
    row: int
    is_right: bool


def _arrange_flags(
    marks: Mapping[str, float], x_axis: _Axis, layout: _Layout, left: float, log_x: bool
) -> tuple[list[_Flag], int]:
    """Place the labels of vertical lines in rows above the plotting area, so that no label overlaps a label or a line.

    All labels are on the same side of their lines: to the right if all of them fit there, else to the left. They are
    placed one after the other, starting with the outermost line on that side, each in the lowest row with enough space.
    So a line whose label is in a higher row crosses no label below.

    Args:
        marks: x value of each line by its label.
        x_axis: Range of the horizontal axis.
        layout: The layout of the drawing.
        left: Horizontal start of the plotting area in SVG units.
        log_x: Whether the horizontal axis is logarithmic.

    Returns:
        The placed labels, and the number of rows that they need.
    """
    scale = math.log if log_x else float
    start, end = scale(x_axis.low), scale(x_axis.high)
    width = layout.width - left - 20

    def position(value: float) -> float:
        """Return the horizontal position of an x value in SVG units."""
        return left + (scale(value) - start) / (end - start) * width

    names = {_shorten(replace_illegal_characters(name), 30): value for name, value in marks.items()}
    has_space_right = all(position(v) + 5 + layout.text_width(name) <= layout.width for name, v in names.items())
    order = sorted(names.items(), key=lambda item: item[1], reverse=has_space_right)
    flags: list[_Flag] = []
    # For each row, the position of the line of its last label. The next label of the row must end before it.
    line_of_last_label: list[float] = []
    for name, value in order:
        line = position(value)
        label_end = line + (1 if has_space_right else -1) * (10 + layout.text_width(name))
        free_rows = [
            row
            for row, other_line in enumerate(line_of_last_label)
            if (label_end <= other_line if has_space_right else label_end >= other_line)
        ]
        row = free_rows[0] if free_rows else len(line_of_last_label)
        line_of_last_label[row : row + 1] = [line]  # replaces the entry of the row, or appends a row
        flags.append(_Flag(name, value, row, has_space_right))
    return flags, len(line_of_last_label)


def _draw_levels(axes: Axes, levels: Mapping[str, float], layout: _Layout) -> None:
    """Draw labelled horizontal lines. A label that would overlap the label of a close line is moved to the left.

    Args:
        axes: The axes to draw on; the range of the vertical axis is set.
        levels: y value of each line by its label.
        layout: The layout of the drawing.
    """
    low, high = axes.get_ylim()
    placed_labels: list[tuple[float, float]] = []  # height and left end, in SVG units from the bottom right corner
    for name, value in sorted(levels.items(), key=lambda item: item[1]):
        height = (value - low) / (high - low) * PLOT_HEIGHT
        ends_of_close_labels = [end for other, end in placed_labels if abs(other - height) < LINE_HEIGHT]
        offset = min(ends_of_close_labels, default=0.0)
        text = _shorten(replace_illegal_characters(name), 30)
        placed_labels.append((height, offset - layout.text_width(text) - 8))
        axes.axhline(value, color=_ALARM, linewidth=1.5, linestyle=(0, (5, 4)), clip_on=False)
        axes.annotate(
            text,
            (1, value),
            (offset, 5),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            horizontalalignment="right",
            color=_ALARM,
            fontsize=layout.font_size,
            bbox={"facecolor": _CARD, "edgecolor": "none", "pad": 1.5},
            parse_math=False,
            annotation_clip=False,
        )


def _annotate(
    axes: Axes, text: str, xy: tuple[float, float], offset: tuple[float, float], layout: _Layout, color: str
) -> None:
    """Write a text beside a point.

    Args:
        axes: The axes to draw on.
        text: The text.
        xy: x and y value of the point.
        offset: Horizontal and vertical distance of the text from the point in SVG units. If the horizontal distance is
            negative, the text ends to the left of the point.
        layout: The layout of the drawing.
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
        parse_math=False,
        annotation_clip=False,
    )


def _style_axes(axes: Axes, layout: _Layout, grid: str) -> None:
    """Remove the frame (except its lower line) and the tick marks, and draw grid lines at the ticks of one axis.

    Args:
        axes: The axes to change.
        layout: The layout of the drawing.
        grid: The axis with grid lines, "x" or "y".
    """
    axes.patch.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines[["bottom"]].set_color(_SOFT)
    axes.tick_params(length=0, pad=6, labelsize=layout.font_size, labelcolor=_SOFT)
    axes.grid(axis=grid, color=_LINE, linewidth=1)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _set_x_axis(axes: Axes, x_axis: _Axis, label: str, layout: _Layout) -> None:
    """Set the range, the tick labels and the name `label` of the horizontal axis."""
    axes.set_xlim(x_axis.low, x_axis.high)
    axes.set_xticks(x_axis.ticks, x_axis.labels, parse_math=False)
    axes.set_xlabel(
        _shorten(replace_illegal_characters(label), int(layout.width / layout.text_width("x")) - 2),
        color=_SOFT,
        fontsize=layout.font_size,
        labelpad=5,
        parse_math=False,
    )


def _to_svg(figure: Figure, description: str, salt: str, tooltips: Mapping[str, str] | None = None) -> str:
    """Return a figure as an SVG element whose colours and fonts are those of the page.

    Args:
        figure: The figure.
        description: Text for screen readers.
        salt: A text that differs from that of all other drawings on the page. Ids in the SVG are derived from it.
        tooltips: Text that is shown when the pointer is over an element of the figure, by its gid (the id that was
            given to the matplotlib artist).
    """
    import matplotlib

    buffer = io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with (
        warnings.catch_warnings(),
        matplotlib.rc_context(
            {
                "svg.fonttype": "none",
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
    for attribute in ("width", "height", "version"):
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
        element.tail = None
        if element.text is not None and not element.text.strip() and element.tag != f"{_SVG}text":
            element.text = None
    ElementTree.register_namespace("", _SVG[1:-1])
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


def _to_css(style: str) -> str:
    """Return a style attribute with matplotlib's colours replaced by CSS variables, and without the names of fonts."""
    style = re.sub("font-family: [^;]*(; )?", "", style)
    return re.sub("#[0-9a-f]{6}", lambda match: _CSS_BY_COLOR.get(match[0], match[0]), style)


def _keep_finite(values: ArrayLike) -> Floats:
    """Return values as a flat array in which NaN replaces numbers that are not finite or too large to draw.

    Numbers that are too close to zero to draw become zero.
    """
    array = np.asarray(values, np.float64).reshape(-1)
    array = np.where(np.abs(array) < MIN_MAGNITUDE, 0.0, array)
    return np.where(np.abs(array) < MAX_MAGNITUDE, array, np.nan)


def _round_values(low: float, high: float, num_steps: int) -> Floats:
    """Return about `num_steps` + 1 round values at equal distances that enclose the interval from `low` to `high`."""
    from matplotlib.ticker import MaxNLocator

    low, high = _widen(low, high)
    values = MaxNLocator(num_steps, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1).tick_values(low, high)
    return np.array([float(f"{value:.12g}") for value in values])


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return the interval from `low` to `high`, widened on both sides if it is too narrow to be drawn."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, MIN_MAGNITUDE):
        return low, high
    half_width = 0.5 * size if size > MIN_MAGNITUDE else 1.0
    return low - half_width, high + half_width


def _round_axis(low: float, high: float, unit: str) -> _Axis:
    """Return an axis that begins and ends at round values, which enclose the data.

    Args:
        low: Smallest value of the data.
        high: Largest value of the data.
        unit: Unit in the tick labels; "%" shows shares (1 for all) as percentages.
    """
    ticks = _round_values(low, high, 6).tolist()
    return _Axis(ticks[0], ticks[-1], ticks, _label_ticks(ticks, unit, 6))


def _tight_axis(
    low: float, high: float, unit: str, layout: _Layout, space: float, is_logarithmic: bool = False
) -> _Axis:
    """Return an axis that begins and ends with the data, with as many tick labels as fit side by side.

    Args:
        low: Smallest value of the data.
        high: Largest value of the data.
        unit: Unit in the tick labels; "%" shows shares (1 for all) as percentages.
        layout: The layout of the drawing.
        space: Length of the axis in SVG units.
        is_logarithmic: Whether the scale is logarithmic.
    """
    if is_logarithmic:
        low, high = (low, high) if high > low * (1 + 1e-9) else (low / 3, high * 3)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        multiples = (1, 2, 5) if len(decades) <= 4 else (1,)
        candidates = [m * 10.0**d for d in decades for m in multiples if low <= m * 10.0**d <= high] or [low, high]
        choices = [candidates[::step] for step in range(1, len(candidates) + 1)]
    else:
        low, high = _widen(low, high)
        slack = 1e-9 * (high - low)
        candidates_by_steps = [_round_values(low, high, num_steps).tolist() for num_steps in (6, 5, 4, 3, 2)]
        choices = [[t for t in ticks if low - slack <= t <= high + slack] for ticks in candidates_by_steps]
    num_digits = 2 if is_logarithmic else 6
    # The choices have fewer and fewer ticks; the first one whose labels fit is used.
    for ticks in choices:
        labels = _label_ticks(ticks, unit, num_digits)
        if sum(layout.text_width(label) + 14 for label in labels) <= space:
            break
    return _Axis(low, high, ticks, labels)


def _label_ticks(ticks: Sequence[float], unit: str, num_digits: int) -> list[str]:
    """Return the texts of tick labels with their unit; the unit "%" shows shares (1 for all) as percentages."""
    factor = 100.0 if unit == "%" else 1.0
    return [_with_unit(format_number(factor * tick, num_digits), unit) for tick in ticks]


def _left_margin(y_axis: _Axis, layout: _Layout) -> float:
    """Return the width to the left of the plotting area that the vertical axis' tick labels need, in SVG units."""
    return min(max(36.0, 14 + max(map(layout.text_width, y_axis.labels))), 0.5 * layout.width)


def _with_unit(number: str, unit: str) -> str:
    """Return a number (as text) with its unit after a narrow space; a percent sign follows without a space."""
    return number + ("" if unit in ("", "%") else "\u202f") + _shorten(replace_illegal_characters(unit), 12)


def _shorten(text: str, max_characters: int) -> str:
    """Return a text on one line; if it is longer than `max_characters`, it is cut and ends with an ellipsis."""
    text = " ".join(text.split())
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def _color(series_index: int) -> str:
    """Return the colour with which matplotlib draws a curve; it is replaced by a CSS variable later."""
    return _SERIES[series_index % len(_SERIES)]


def _dashes(series_index: int) -> tuple[float, ...]:
    """Return the lengths of the dashes and gaps of a curve in SVG units, alternately; no lengths for a solid line."""
    return _DASHES[series_index % len(_DASHES)]
