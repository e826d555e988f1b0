"""Pages: no text that comes in can become markup; charts are well-formed and show the numbers they were given."""

import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.report import charts, html

HOSTILE = "</td><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;\x00\x0b\ud800\uffff"
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def drawings(document: str) -> list[ElementTree.Element]:
    """Every SVG, parsed as XML; raises where one is not well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg xmlns.*?</svg>", document, re.S)]  # noqa: S314 - ours


def numbers_of_path(svg: ElementTree.Element) -> list[list[float]]:
    return [
        [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", path.attrib["d"])]
        for path in svg.iter("{http://www.w3.org/2000/svg}path")
    ]


def everything(words: str) -> str:
    xs, ys = [1.0, 2.0, 3.0], [0.5, math.nan, 2.0]
    return html.page(
        words,
        html.heading(words),
        html.paragraph(words),
        html.figures({words: words}),
        html.table([words, "n"], [[words, 1], [words, 2.5]], caption=words),
        charts.line_chart(
            {words: (xs, ys), "b": (xs, xs)}, words, words, words, horizontal={words: 1.0}, vertical={words: 2.0}
        ),
        charts.bar_chart([words, "b"], [1.0, -2.0], words, words, unit=words),
        charts.histogram([1.0, 2.0, 2.0], words, words, x_unit=words, vertical={words: 1.5}),
        lead=words,
    )


def test_hostile_text_stays_text() -> None:
    document = everything(HOSTILE)
    document.encode()
    reader = read(document)
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    shown = HOSTILE.translate({0: "\ufffd", 11: "\ufffd", 0xD800: "\ufffd", 0xFFFF: "\ufffd"})
    assert shown in reader.texts
    assert len(drawings(document)) == 3


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_gives_a_well_formed_page_of_the_same_structure(words: str) -> None:
    plain, reader = read(everything("plain words")), read(everything(words))
    named = [tag for tag, _ in reader.tags]
    expected = [tag for tag, _ in plain.tags]
    if words:
        assert named == expected
    assert len(drawings(everything(words))) == 3


def test_a_page_needs_nothing_from_outside() -> None:
    document = everything("x")
    assert not re.findall(r"""(?:src=|href|url\(|@import)""", document)
    assert "default-src 'none'" in document
    assert "prefers-color-scheme:dark" in document
    assert 'name="viewport"' in document


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (-0.3, 0.31, [-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3]),
        (3, 3, [1.5, 2, 2.5, 3, 3.5, 4, 4.5]),
        (0, 0, [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_nice_ticks(low: float, high: float, expected: list[float]) -> None:
    assert charts.nice_ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    high = low + span
    ticks = charts.nice_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))
    slack = 1e-6 * (ticks[1] - ticks[0])
    if high - low > 1e-9 * max(abs(low), abs(high)):
        assert low - slack <= ticks[0]
        assert ticks[-1] <= high + slack


def test_numbers_for_people() -> None:
    assert [html.number(v) for v in (0, 1234567, 0.012345, -2.5, 1e-7, 1e12, 100.0, 99.96)] == [
        "0", "1,234,567", "0.0123", "−2.5", "1.00e−7", "1.00e12", "100", "100",
    ]  # fmt: skip
    assert [html.number(v) for v in (math.nan, math.inf, -math.inf)] == ["–", "∞", "−∞"]
    assert html.percent(0.0123) == "1.2%"
    assert html.percent(math.nan) == "–"


def test_curves_lie_where_the_axes_say() -> None:
    (svg,) = drawings(charts.line_chart({"a": ([0, 5, 10], [0, 50, 100])}, "x", "y", "t"))
    (path,) = numbers_of_path(svg)
    x, y = path[0::2], path[1::2]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.02)
    assert x[1] > x[0]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.02)
    assert y[1] < y[0]
    texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "20", "40", "60", "80", "100", "x", "y"} <= set(texts)


def test_a_logarithmic_axis_spaces_decades_evenly_and_leaves_out_what_has_no_logarithm() -> None:
    chart = charts.line_chart(
        {"a": ([-1, 0, 1, 10, 100], [1, 1, 1, 2, 3])}, "x", "y", "t", log_x=True, vertical={"no": 0.0}
    )
    (path,) = numbers_of_path(drawings(chart)[0])
    x = path[0::2]
    assert len(x) == 3
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.02)
    assert "no</text>" not in chart


def test_a_gap_breaks_the_curve_and_steps_hold_the_value() -> None:
    gap = charts.line_chart({"a": ([1, 2, 3, 4, 5], [1, 2, math.inf, 4, 5])}, "x", "y", "t")
    assert re.search(r'd="M[^M]*M[^M]*"', gap)
    steps = charts.line_chart({"a": ([1, 2], [1, 5])}, "x", "y", "t", steps=True)
    (path,) = numbers_of_path(drawings(steps)[0])
    assert len(path) == 6
    assert path[1] == path[3]
    assert path[2] == path[4]


def test_percent_units_and_rules() -> None:
    chart = charts.line_chart(
        {"a": ([0, 1], [0, 0.5])}, "x", "y", "t", horizontal={"alpha": 0.01}, x_unit="%", y_unit="%"
    )
    assert ">100%<" in chart
    assert ">50%<" in chart
    assert ">alpha<" in chart
    assert "ms<" in charts.line_chart({"a": ([0, 1], [0, 3])}, "x", "y", "t", y_unit="ms")


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_to_draw_is_said(values: list[float]) -> None:
    labels = [str(v) for v in values]
    for chart in (
        charts.line_chart({"a": (values, values)}, "x", "y", "t"),
        charts.bar_chart(labels, values, "t"),
        charts.histogram(values, "t", "x"),
    ):
        assert "no data" in chart
        assert len(drawings(chart)) == 1
    assert "no data" in charts.line_chart({}, "x", "y", "t")


def test_bars_are_as_long_as_their_values() -> None:
    (svg,) = drawings(charts.bar_chart(["a", "b", "c", "d"], [1.0, 3.0, -2.0, math.nan], "t"))
    widths = [float(r.attrib["width"]) for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(widths) == 3
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert drawings(charts.bar_chart(["zero"], [0.0], "t"))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
@settings(deadline=None)
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    counts = re.findall(r"<title>[^<]*: (\d+)</title>", charts.histogram(values, "t", "x"))
    assert sum(map(int, counts)) == len(values)


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=30),
    st.booleans(),
    st.one_of(st.none(), st.floats()),
)
@settings(deadline=None)
def test_any_numbers_give_a_drawing_inside_its_frame(
    points: list[tuple[float, float]], log: bool, rule: float | None
) -> None:
    xs, ys = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    rules = {} if rule is None or abs(rule) > 1e300 else {"rule": rule}
    chart = charts.line_chart({"a": (xs, ys)}, "x", "y", "t", log_x=log, horizontal=rules, vertical=rules)
    for path in numbers_of_path(drawings(chart)[0]):
        assert all(-1 <= x <= charts.WIDTH + 1 for x in path[0::2])
        assert all(-1 <= y <= 312 + 1 for y in path[1::2])


def test_tables_set_numbers_flush_right() -> None:
    document = html.table(["name", "share", "n"], [["a", "12.1%", 3], ["b", "–", 1234.5]])
    assert '<th scope="col">name</th><th scope="col" class="number">share</th>' in document
    assert '<td class="number">1,234</td>' in document or '<td class="number">1,235</td>' in document
    with pytest.raises(ValueError, match="2 cells"):
        html.table(["a", "b"], [["only one"]])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 x values"):
        charts.line_chart({"a": ([1, 2], [1])}, "x", "y", "t")
    with pytest.raises(ValueError, match="1 labels"):
        charts.bar_chart(["a"], [1, 2], "t")


def test_a_page_can_go_on() -> None:
    longer = html.extended(html.page("Report", html.paragraph("first")), "Other", html.paragraph("<second>"))
    assert longer == html.page("Report", html.paragraph("first"), html.paragraph("<second>"))
    assert html.extended("<p>foreign</p>", "Other", html.paragraph("x")) == html.page("Other", html.paragraph("x"))
