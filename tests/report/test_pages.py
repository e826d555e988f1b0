"""Pages: no text of a caller can become markup, and a page needs nothing from outside."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deformer_stream.report import charts, pages
from tests.effort import num_examples
from tests.report.reader import SVG, parse_drawings, read_html

pytestmark = pytest.mark.charts
HOSTILE = "</td><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;\x00\x0b\ud800\uffff"
NUM_DRAWINGS = 6
"""Three charts, each for wide and for narrow screens."""


def page_of(words: str) -> str:
    """Return a page with every kind of part, which shows `words` wherever a text can be shown."""
    xs, ys = [1.0, 2.0, 3.0], [0.5, math.nan, 2.0]
    return pages.render_page(
        words,
        pages.render_heading(words),
        pages.render_paragraph(words),
        pages.render_key_figures({words: words}),
        pages.render_warnings([words, words]),
        pages.render_table([words, "n"], [[words, 1], [words, 2.5]], caption=words),
        pages.render_table([words, "b", "c", "d", words], [[words, 1, 2, 3, words]]),
        charts.draw_lines(
            {words: (xs, ys), words + " 2": (xs, xs)},
            words,
            words,
            words,
            horizontal={words: 1.0},
            vertical={words: 2.0},
        ),
        charts.draw_bars([words, "b"], [1.0, -2.0], words, words, unit=words),
        charts.draw_histogram([1.0, 2.0, 2.0], words, words, x_unit=words, vertical={words: 1.5}),
        lead=words,
    )


def test_hostile_text_stays_text() -> None:
    document = page_of(HOSTILE)
    document.encode()
    reader = read_html(document)
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    shown = HOSTILE.translate({0: "\ufffd", 11: "\ufffd", 0xD800: "\ufffd", 0xFFFF: "\ufffd"})
    assert shown in reader.texts
    assert len(parse_drawings(document)) == NUM_DRAWINGS


@pytest.mark.parametrize("name", ["x" * 5_000, "$x^2$ \\frac", "_nolegend_", "あいう\u202e", "a\nb\tc", "\"'`<>&%{}"])
def test_unusual_names_are_shown_as_they_are(name: str) -> None:
    document = page_of(name)
    assert name in read_html(document).texts
    assert len(parse_drawings(document)) == NUM_DRAWINGS


@given(st.text())
@example("0" * 16)  # names, numbers and units that together are wider than a phone
@settings(max_examples=num_examples(50), deadline=None)
def test_any_text_gives_a_well_formed_page_of_the_same_structure(words: str) -> None:
    document = page_of(words)
    if words:
        assert html_tags(document) == TAGS_OF_PLAIN_PAGE
    assert {element.tag for drawing in parse_drawings(document) for element in drawing.iter()} <= TAGS_OF_DRAWINGS
    assert len(parse_drawings(document)) == NUM_DRAWINGS


def html_tags(document: str) -> list[str]:
    """Return the tags outside drawings; in a drawing, the number of tick labels depends on the length of the unit."""
    return [tag for tag, _ in read_html(re.sub(r"<svg xmlns.*?</svg>", "", document, flags=re.S)).tags]


TAGS_OF_PLAIN_PAGE = html_tags(page_of("plain words"))
TAGS_OF_DRAWINGS = {
    SVG + tag for tag in ("svg", "g", "path", "text", "tspan", "title", "use", "defs", "clipPath", "rect")
}


def test_page_needs_nothing_from_outside() -> None:
    document = page_of("x")
    # Only references to other elements of the same document are allowed.
    assert not re.findall(r"""(?:src=|href="[^#]|url\([^#]|@import)""", document)
    assert "default-src 'none'" in document
    assert "prefers-color-scheme:dark" in document
    assert 'name="viewport"' in document
    assert "<script" not in document


def test_equal_arguments_give_equal_pages() -> None:
    assert page_of("x") == page_of("x")


def test_plain_string_as_block_is_escaped() -> None:
    assert "<p>&lt;b&gt;</p>" in pages.render_page("t", pages.render_paragraph("<b>"))
    assert "\n&lt;b&gt;\n" in pages.render_page("t", "<b>")


def test_numbers_are_formatted_for_people() -> None:
    assert [pages.format_number(v) for v in (0, 1234567, 0.012345, -2.5, 1e-7, 1e12, 100.0, 99.96)] == [
        "0", "1,234,567", "0.0123", "−2.5", "1.00e−7", "1.00e12", "100", "100",
    ]  # fmt: skip
    assert [pages.format_number(v) for v in (math.nan, math.inf, -math.inf)] == ["–", "∞", "−∞"]
    assert pages.format_percent(0.0123) == "1.2%"
    assert pages.format_percent(math.nan) == "–"


@pytest.mark.parametrize(("alpha", "text"), [(0.01, "1%"), (0.05, "5%"), (0.001, "0.1%"), (1 / 801, "0.12%")])
def test_alphas_are_percentages(alpha: float, text: str) -> None:
    assert pages.format_alpha(alpha) == text


def test_tables_align_numbers_to_the_right() -> None:
    document = pages.render_table(["name", "share", "n"], [["a", "12.1%", 3], ["b", "–", 1234.5]])
    assert '<th scope="col">name</th><th scope="col" class="number">share</th>' in document
    assert '<td class="number">1,234</td>' in document or '<td class="number">1,235</td>' in document
    with pytest.raises(ValueError, match="2 cells"):
        pages.render_table(["a", "b"], [["only one"]])


def test_cells_of_wide_tables_name_their_column_for_narrow_screens() -> None:
    wide = pages.render_table(["a", "b", "c", "d", "e <"], [["v", "w", "x", "y", "z"]])
    titles = [attributes.get("data-title") for tag, attributes in read_html(wide).tags if tag == "td"]
    assert titles == ["a", "b", "c", "d", "e <"]
    narrow = pages.render_table(["a", "b"], [["v", "w"]])
    assert "data-title" not in narrow


def test_warnings_are_listed_in_a_frame() -> None:
    page = pages.render_page("title", pages.render_warnings(["too few records", "too few steps"]))
    texts = read_html(page).texts
    assert "Warnings" in texts
    assert [text for text in texts if text.startswith("too")] == ["too few records", "too few steps"]
    assert "Warning" in read_html(pages.render_warnings(["one"])).texts


def test_blocks_are_appended_to_a_page() -> None:
    first, second = pages.render_paragraph("first"), pages.render_paragraph("<second>")
    extended = pages.append_blocks(pages.render_page("Report", first), "Other", second)
    assert extended == pages.render_page("Report", first, second)
    assert "&lt;script&gt;" in pages.append_blocks(extended, "Other", "<script>"), "plain text is escaped"
    foreign = pages.append_blocks("<p>foreign</p>", "Other", pages.render_paragraph("x"))
    assert foreign == pages.render_page("Other", pages.render_paragraph("x"))
