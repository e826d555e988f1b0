"""Render self-contained HTML pages: no scripts, no external resources, light and dark, readable on a phone.

`render_page` assembles a document from parts, and every other `render_…` function returns one part. Parts are rendered
by the Jinja2 templates next to this module. They escape each title, label and cell, because names of features are user
data. An example:

    page = render_page(
        "Training",
        render_key_figures({"held-out NLL": "3.2 nats"}),
        render_heading("Loss"),
        charts.draw_lines({"loss": (steps, losses)}, "step", "nats", "Loss while training"),
    )
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_ILLEGAL_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LOOKS_LIKE_NUMBER = re.compile(r"[–+−-]|[+−-]?[\d∞][\d,.]*(e[−-]?\d+)?\s?(%|[a-zA-Z°µ/]{0,6})")


def replace_illegal_characters(value: object) -> str:
    """Return a value as text, with U+FFFD in place of characters that XML 1.0 forbids, such as NUL."""
    return _ILLEGAL_IN_XML.sub("\ufffd", str(value))


def keep_legal(value: Any) -> Any:
    """Return rendered HTML unchanged, and any other value as text without characters that XML forbids."""
    from markupsafe import Markup

    return value if isinstance(value, Markup) else replace_illegal_characters(value)


def format_number(value: float, digits: int = 3) -> str:
    """Return a number as text for a report, such as "12,300" or "−0.00123" (with the minus sign U+2212).

    An exponent is used only if the magnitude is below 1e-4 or at least 1e9, as in "1.5e−7".

    Args:
        value: The number. NaN becomes a dash, infinite numbers become "∞" and "−∞".
        digits: Number of significant digits. Trailing zeros after the decimal point are removed.
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    exponent_of_ten = math.floor(math.log10(abs(value)))
    if exponent_of_ten < -4 or exponent_of_ten > 8:
        mantissa, exponent = f"{value:.{max(digits - 1, 0)}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    # The first significant digit stands for 10 to the power of `exponent_of_ten`. Each further digit is one power less.
    # More than 12 decimals are never shown.
    num_decimals = min(max(digits - 1 - exponent_of_ten, 0), 12)
    text = f"{value:,.{num_decimals}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def format_percent(share: float, digits: int = 1) -> str:
    """Return a share of a whole as a percentage: 0.0123 becomes "1.2%".

    Args:
        share: The share; 1 becomes "100%". NaN and infinite numbers become a dash.
        digits: Number of decimals of the percentage.
    """
    return f"{100 * share:.{digits}f}%".replace("-", "−") if math.isfinite(share) else "–"


def format_alpha(alpha: float) -> str:
    """Return a false-alarm rate as a percentage with two significant digits, such as "1%" or "0.13%"."""
    return f"{format_number(100 * alpha, 2)}%"


def render_page(title: str, *blocks: str, lead: str = "") -> str:
    """Return a complete HTML document that consists of a title and the given parts.

    Args:
        title: Title of the document, also shown as its first heading.
        blocks: The parts in the order of the page: HTML that was rendered by this module or by `charts`. In a plain
            string, characters with a meaning in HTML are escaped.
        lead: Introductory sentence below the title; no sentence if it is empty.
    """
    return _environment().get_template("page.html").render(title=title, blocks=blocks, lead=lead)


def append_blocks(document: str, title: str, *blocks: str) -> str:
    """Return a document that was rendered by `render_page`, with more parts at its end.

    Args:
        document: The existing document. If it was not rendered by `render_page`, such as an empty text, the result is a
            new page that has only the additional parts.
        title: Title of the new page in that case, otherwise unused.
        blocks: The parts to append: HTML that was rendered by this module or by `charts`. Plain texts are escaped.
    """
    from markupsafe import Markup

    before, end_of_parts, after = document.rpartition("\n</main>")  # the parts of a page are inside the element "main"
    if not end_of_parts:
        return render_page(title, *blocks)
    return before + "\n" + str(Markup("\n").join(blocks)) + end_of_parts + after  # `join` escapes plain texts


def set_notice(document: str, words: str) -> str:
    """Return a document that was rendered by `render_page`, with a notice below its title.

    A document has one notice. It replaces an earlier one.

    Args:
        document: The existing document. If it was not rendered by `render_page`, it is returned unchanged.
        words: Plain text of the notice.
    """
    document = re.sub(r'\n<p class="notice">[^<]*</p>', "", document)
    title = re.search(r'<main>\s*<h1>[^<]*</h1>(\s*<p class="lead">[^<]*</p>)?', document)
    if title is None:
        return document
    return f"{document[: title.end()]}\n{render_part('notice', words)}{document[title.end() :]}"


def render_heading(words: str) -> Markup:
    """Return the heading of a section with the text `words`, as a part of a page."""
    return render_part("heading", words)


def render_paragraph(words: str) -> Markup:
    """Return a paragraph of the plain text `words`, as a part of a page."""
    return render_part("paragraph", words)


def render_warnings(messages: Sequence[str]) -> Markup:
    """Return a part that shows warnings in a frame, one sentence each, as a part of a page.

    Args:
        messages: The warnings. There is at least one.
    """
    return render_part("warnings", list(messages))


def render_key_figures(value_by_name: Mapping[str, str]) -> Markup:
    """Return a part that shows the most important numbers of a page in large type, one card for each number.

    Args:
        value_by_name: The description of each number as key, and the number with its unit as text as value.
    """
    return render_part("key_figures", value_by_name)


def render_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """Return a table for wide and narrow screens.

    On a narrow screen, each row of a table with more than four columns becomes a list of its cells, each with the title
    of its column. A table with fewer columns can be scrolled horizontally.

    A column is aligned to the right if every cell is a number, or a text that looks like one, such as "3.5 kW" or "–".

    Args:
        header: Titles of the columns.
        rows: Cells of each row. Floating-point numbers are shown with four significant digits.
        caption: Title of the table; no title if it is empty.

    Raises:
        ValueError: If a row has another number of cells than the header.
    """
    rows = [list(row) for row in rows]
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"row {i} of the table {caption!r} has {len(row)} cells; it must have {len(header)} cells, as the "
                f"header {list(header)} has"
            )
    columns = zip(*rows, strict=True) if rows else [()] * len(header)  # without rows, each column is empty
    # The CSS class of each column: "number" aligns it to the right.
    classes = ["number" if cells and all(map(_is_numeric, cells)) else "" for cells in columns]
    texts = [[_format_cell(cell) for cell in row] for row in rows]
    return render_part("table", list(header), texts, classes, caption)


def render_part(name: str, *arguments: object) -> Markup:
    """Return a part of a page (a piece of HTML), rendered by a Jinja2 macro of the file `templates/parts.html`.

    Args:
        name: Name of the macro, such as "table".
        arguments: The positional arguments of the macro. Texts among them are escaped.
    """
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html").module, name)
    return macro(*arguments)


@functools.cache
def _environment() -> Environment:
    """Return the Jinja2 environment that renders this package's templates. Only the first call creates it.

    Jinja2 is imported here, so that programs that write no report need not import it.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("deformer_stream.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name in a template is an error instead of an empty text
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=keep_legal,  # applied to each value that a template inserts
    )


def _is_numeric(cell: object) -> bool:
    """Return whether a table cell is a number, or a text that looks like one, such as "3.5 kW" or "–"."""
    if isinstance(cell, str):
        return _LOOKS_LIKE_NUMBER.fullmatch(cell) is not None
    return isinstance(cell, int | float | np.number) and not isinstance(cell, bool)


def _format_cell(cell: object) -> object:
    """Return a floating-point cell as text with four significant digits, and any other table cell unchanged."""
    return format_number(float(cell), 4) if isinstance(cell, float | np.floating) else cell
