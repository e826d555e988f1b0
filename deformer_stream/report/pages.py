"""Render self-contained HTML pages: no scripts, no external resources, light and dark, readable on a phone.

`render_page` assembles a document from parts, and every other `render_…` function returns one part. Parts come from the
Jinja2 templates next to this module, which escape each title, label and cell, because names of features are user data:

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
    """Return a value as text in which U+FFFD replaces the characters that XML 1.0 forbids, such as NUL."""
    return _ILLEGAL_IN_XML.sub("\ufffd", str(value))


def format_number(value: float, digits: int = 3) -> str:
    """Format a number for reading: grouped thousands, a real minus sign, an exponent only for extreme sizes.

    Args:
        value: The number. NaN becomes a dash.
        digits: Number of significant digits.
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    exponent_of_ten = math.floor(math.log10(abs(value)))
    if exponent_of_ten < -4 or exponent_of_ten > 8:
        mantissa, exponent = f"{value:.{max(digits - 1, 0)}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    num_decimals = min(max(digits - 1 - exponent_of_ten, 0), 12)
    text = f"{value:,.{num_decimals}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def format_percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage: 0.0123 becomes `1.2%`; a share that is not finite becomes a dash."""
    return f"{100 * share:.{digits}f}%".replace("-", "−") if math.isfinite(share) else "–"


def render_page(title: str, *blocks: str, lead: str = "") -> str:
    """Return a complete HTML document.

    Args:
        title: Title of the document, also shown as its first heading.
        blocks: Parts in the order of the page, made by this module or by `charts`. A plain string is escaped.
        lead: One sentence below the title; no sentence if it is empty.
    """
    return _environment().get_template("page.html").render(title=title, blocks=blocks, lead=lead)


def append_blocks(document: str, title: str, *blocks: str) -> str:
    """Return a document of `render_page` with more parts at its end.

    Args:
        document: The existing document. If it was not made by `render_page`, a new page replaces it.
        title: Title of the new page in that case.
        blocks: The parts to append.
    """
    before, end_of_main, after = document.rpartition("\n</main>")
    if not end_of_main:
        return render_page(title, *blocks)
    return before + "\n" + "\n".join(blocks) + end_of_main + after


def render_heading(words: str) -> Markup:
    """Return the heading of a section."""
    return render_part("heading", words)


def render_paragraph(words: str) -> Markup:
    """Return a paragraph of plain text."""
    return render_part("paragraph", words)


def render_key_figures(value_by_name: Mapping[str, str]) -> Markup:
    """Return the most important numbers of a page as cards.

    Args:
        value_by_name: The number with its unit, by its description.
    """
    return render_part("key_figures", value_by_name)


def render_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """Return a table inside an element that scrolls horizontally on a narrow screen.

    A column is aligned to the right if all its cells are numbers or texts that begin like a number.

    Raises:
        ValueError: A row has another length than the header.
    """
    rows = [list(row) for row in rows]
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"a row has the wrong number of cells: the header requires {len(header)} cells")
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    classes = ["number" if cells and all(map(_is_numeric, cells)) else "" for cells in columns]
    texts = [[_format_cell(cell) for cell in row] for row in rows]
    return render_part("table", list(header), texts, classes, caption)


def render_part(name: str, *arguments: object) -> Markup:
    """Return the output of a macro of `templates/parts.html`, whose text arguments are escaped.

    Args:
        name: Name of the macro.
        arguments: Its positional arguments.
    """
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html").module, name)
    return macro(*arguments)


@functools.cache
def _environment() -> Environment:
    """Return the Jinja2 environment of this package's templates; Jinja2 is imported when the first page is made."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def keep_legal(value: Any) -> Any:
        return value if isinstance(value, Markup) else replace_illegal_characters(value)

    return Environment(
        loader=PackageLoader("deformer_stream.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=keep_legal,
    )


def _is_numeric(cell: object) -> bool:
    """Return whether a table cell is a number, or a text that reads as a number with an optional unit."""
    if isinstance(cell, str):
        return _LOOKS_LIKE_NUMBER.fullmatch(cell) is not None
    return isinstance(cell, int | float | np.number) and not isinstance(cell, bool)


def _format_cell(cell: object) -> object:
    """Return a table cell as it is shown: floating-point numbers with four significant digits."""
    return format_number(float(cell), 4) if isinstance(cell, float | np.floating) else cell
