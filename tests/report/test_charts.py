"""Charts: well-formed drawings for wide and narrow screens that show the numbers they were given."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.report import charts
from tests.report.reader import SVG, parse_drawings, paths_of, texts_of

pytestmark = pytest.mark.charts


def size_of(drawing_view_box: str) -> tuple[float, float]:
    width, height = map(float, drawing_view_box.split()[2:])
    return width, height


def test_every_chart_is_drawn_for_wide_and_for_narrow_screens() -> None:
    for chart in (
        charts.draw_lines({"a": ([0, 1], [0, 1])}, "x", "y", "t"),
        charts.draw_bars(["a"], [1.0], "t"),
        charts.draw_histogram([1.0, 2.0], "t", "x"),
    ):
        wide, narrow = parse_drawings(chart)
        assert size_of(wide.attrib["viewBox"])[0] == 800
        assert size_of(narrow.attrib["viewBox"])[0] == 340
        assert '<div class="wide">' in chart
        assert '<div class="narrow">' in chart


def test_charts_follow_the_theme_of_the_page() -> None:
    chart = charts.draw_lines({"a": ([0, 1], [0, 1])}, "x", "y", "t", horizontal={"h": 0.5}, vertical={"v": 0.5})
    assert not re.findall("#[0-9a-f]{6}", chart)
    assert {"var(--s0)", "var(--alarm)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", chart))
    assert "font-family" not in chart


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
@settings(deadline=None)
def test_ticks_are_few_round_and_inside_the_axis(low: float, span: float) -> None:
    high = low + span
    for layout in charts._LAYOUTS:
        axis = charts._tight_axis(low, high, "", layout, layout.width - 60)
        assert 1 <= len(axis.ticks) <= 9
        assert list(axis.ticks) == sorted(set(axis.ticks))
        slack = 1e-6 * (axis.high - axis.low)
        assert axis.low - slack <= axis.ticks[0]
        assert axis.ticks[-1] <= axis.high + slack
        steps = np.diff(axis.ticks)
        if len(steps) > 1 and span > 1e-6 * abs(high):
            np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
            assert round(steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9), 6) in (1, 2, 2.5, 5, 10)


def test_points_lie_at_equal_distances_if_their_values_do() -> None:
    for drawing in parse_drawings(charts.draw_lines({"a": ([0, 5, 10], [0, 50, 100])}, "x", "y", "t")):
        (path,) = paths_of(drawing, "curve")
        x, y = path[0::2], path[1::2]
        assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.02)
        assert x[1] > x[0]
        assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.02)
        assert y[1] < y[0]
        assert {"0", "20", "40", "60", "80", "100", "x", "y"} <= set(texts_of(drawing))


def test_logarithmic_axis_spaces_decades_evenly_and_omits_values_without_logarithm() -> None:
    chart = charts.draw_lines(
        {"a": ([-1, 0, 1, 10, 100], [1, 1, 1, 2, 3])}, "x", "y", "t", log_x=True, vertical={"no": 0.0}
    )
    (path,) = paths_of(parse_drawings(chart)[0], "curve")
    x = path[0::2]
    assert len(x) == 3
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.02)
    assert "no</text>" not in chart


def test_curve_of_one_point_is_visible() -> None:
    for drawing in parse_drawings(charts.draw_lines({"a": ([1], [2])}, "x", "y", "t")):
        assert [group for group in drawing.iter(f"{SVG}g") if group.get("class") == "points"]


def test_missing_value_interrupts_the_curve() -> None:
    chart = charts.draw_lines({"a": ([1, 2, 3, 4, 5], [1, 2, math.inf, 4, 5])}, "x", "y", "t")
    assert re.search(r'd="M[^M"]*M[^M"]*"', chart)


def test_steps_hold_the_value_until_the_next_x() -> None:
    steps = charts.draw_lines({"a": ([1, 2], [1, 5])}, "x", "y", "t", show_steps=True)
    (path,) = paths_of(parse_drawings(steps)[0], "curve")
    assert len(path) == 6
    assert path[1] == path[3]
    assert path[2] == path[4]


def test_shares_are_percentages_and_lines_have_names() -> None:
    chart = charts.draw_lines(
        {"a": ([0, 1], [0, 0.5])}, "x", "y", "t", horizontal={"alpha": 0.01}, x_unit="%", y_unit="%"
    )
    assert ">100%<" in chart
    assert ">50%<" in chart
    assert ">alpha<" in chart
    assert "ms<" in charts.draw_lines({"a": ([0, 1], [0, 3])}, "x", "y", "t", y_unit="ms")


def test_labels_of_close_vertical_lines_do_not_overlap() -> None:
    marks = {"α = 0.05": 13.0, "α = 0.01": 13.2, "α = 0.001": 13.3, "α = 0.5": 2.0}
    chart = charts.draw_histogram(np.linspace(0, 14, 100), "t", "x", vertical=marks)
    for drawing, layout in zip(parse_drawings(chart), charts._LAYOUTS, strict=True):
        boxes = []
        for text in drawing.iter(f"{SVG}text"):
            if text.text in marks:
                width = layout.text_width(text.text)
                is_right_aligned = "text-anchor: end" in text.attrib["style"]
                x, y = float(text.attrib["x"]), float(text.attrib["y"])
                boxes.append((x - width if is_right_aligned else x, x if is_right_aligned else x + width, y))
        assert len(boxes) == len(marks)
        assert all(0 <= left < right <= layout.width for left, right, _ in boxes)
        for i, (left, right, y) in enumerate(boxes):
            for other_left, other_right, other_y in boxes[i + 1 :]:
                assert abs(y - other_y) >= layout.font_size or right <= other_left or other_right <= left


@pytest.mark.parametrize("seed", range(20))
def test_no_vertical_line_crosses_the_label_of_another(seed: int) -> None:
    """A line ends at the row of its label, so it passes through all rows below."""
    rng = np.random.default_rng(seed)
    axis, left = charts._Axis(0.0, 100.0, [0.0, 100.0], ["0", "100"]), 40.0
    lines = {"m" * int(rng.integers(1, 14)) + str(i): float(x) for i, x in enumerate(rng.uniform(0, 100, 6))}
    for layout in charts._LAYOUTS:
        labels, num_rows = charts._arrange_line_labels(lines, axis, layout, left, log_x=False)
        assert len(labels) == len(lines)
        assert max(label.row for label in labels) == num_rows - 1
        plot_width = layout.width - left - charts.RIGHT_MARGIN
        x_by_label = {label.text: left + label.x / 100.0 * plot_width for label in labels}
        for label in labels:
            start = x_by_label[label.text]
            end = start + (1 if label.is_right else -1) * layout.text_width(label.text)
            for other in labels:
                if other is not label and other.row >= label.row:
                    assert not min(start, end) < x_by_label[other.text] < max(start, end)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_chart_without_data_says_so(values: list[float]) -> None:
    labels = [str(v) for v in values]
    for chart in (
        charts.draw_lines({"a": (values, values)}, "x", "y", "t"),
        charts.draw_bars(labels, values, "t"),
        charts.draw_histogram(values, "t", "x"),
    ):
        assert "no data" in chart
        assert len(parse_drawings(chart)) == 1
    assert "no data" in charts.draw_lines({}, "x", "y", "t")


def test_long_names_of_bars_are_complete_on_narrow_screens() -> None:
    names = ["bearing_temperature_drive_end_left", "bearing_temperature_drive_end_right", "flow"]
    for drawing in parse_drawings(charts.draw_bars(names, [1.0, -2.0, 0.5], "title")):
        texts = {"".join(element.itertext()).strip() for element in drawing.iter(f"{SVG}text")}
        assert set(names) <= texts


def test_bars_are_as_long_as_their_values() -> None:
    for drawing in parse_drawings(charts.draw_bars(["a", "b", "c", "d"], [1.0, 3.0, -2.0, math.nan], "t")):
        widths = [max(path[0::2]) - min(path[0::2]) for path in paths_of(drawing, "bar")]
        assert len(widths) == 3
        assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
        assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert parse_drawings(charts.draw_bars(["zero"], [0.0], "t"))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
@settings(deadline=None)
def test_histogram_counts_every_value_once(values: list[float]) -> None:
    wide, narrow = re.findall(r"<svg xmlns.*?</svg>", charts.draw_histogram(values, "t", "x"), re.S)
    for drawing in (wide, narrow):
        counts = re.findall(r"<title>[^<]*: (\d+)</title>", drawing)
        assert sum(map(int, counts)) == len(values)


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=30),
    st.booleans(),
    st.one_of(st.none(), st.floats()),
)
@settings(deadline=None)
def test_any_numbers_give_curves_inside_the_drawing(
    points: list[tuple[float, float]], log_x: bool, mark: float | None
) -> None:
    xs, ys = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    marks = {} if mark is None or abs(mark) > charts.MAX_MAGNITUDE else {"mark": mark}
    chart = charts.draw_lines({"a": (xs, ys)}, "x", "y", "t", log_x=log_x, horizontal=marks, vertical=marks)
    for drawing in parse_drawings(chart):
        width, height = size_of(drawing.attrib["viewBox"])
        for path in paths_of(drawing, "curve"):
            assert all(-1 <= x <= width + 1 for x in path[0::2])
            assert all(-1 <= y <= height + 1 for y in path[1::2])


def test_series_and_labels_must_have_one_value_each() -> None:
    with pytest.raises(ValueError, match="2 x values"):
        charts.draw_lines({"a": ([1, 2], [1])}, "x", "y", "t")
    with pytest.raises(ValueError, match="1 labels"):
        charts.draw_bars(["a"], [1, 2], "t")
