"""Self-contained HTML pages: no scripts, no external resources, light and dark, fit for a phone.

Every function is pure and returns a piece of HTML as text; `page` puts pieces together. Whatever comes in as a title,
label or cell is escaped (names of features are user data), so pieces are only made here and in `charts`:

    page("Training", figures({"held-out NLL": "3.2 nats"}), heading("Loss"), line_chart({"loss": (steps, losses)}, ...))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 forbids

_STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1d2329;--soft:#5d6873;--line:#dfe3e6;--alarm:#c2410c;
--s0:#0b66c3;--s1:#0a7d5a;--s2:#8b3fb3;--s3:#8a4b2a;--s4:#946200;--s5:#c0266d}
@media (prefers-color-scheme:dark){:root{--ground:#14181c;--card:#1c2227;--ink:#e7ebee;--soft:#9aa6b1;--line:#343d45;
--alarm:#ff9a62;--s0:#6cb4ff;--s1:#4fd0a3;--s2:#cf9bf0;--s3:#d7a98c;--s4:#e3b341;--s5:#ff8fbc}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem}
p{max-width:44rem;margin:.5rem 0 1rem}p.lead{color:var(--soft)}
dl.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.25rem 0}
dl.figures div{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.7rem .9rem;
display:flex;flex-direction:column-reverse;justify-content:flex-end}
dl.figures dt{color:var(--soft);font-size:.85rem;line-height:1.35}
dl.figures dd{margin:0;font-size:1.4rem;font-weight:650;line-height:1.3;overflow-wrap:anywhere}
figure{margin:1rem 0;background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.9rem 1rem .6rem}
figcaption{font-weight:600;margin-bottom:.35rem}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--s0)}
svg{display:block;width:100%;min-width:32rem;height:auto}
svg text{fill:var(--soft);font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text.strong{fill:var(--ink)}svg text.rule{fill:var(--alarm)}
svg text.rule{paint-order:stroke;stroke:var(--card);stroke-width:4px}
svg .grid{stroke:var(--line);stroke-width:1}svg .axis{stroke:var(--soft);stroke-width:1}
svg .rule{stroke:var(--alarm);stroke-width:1.5;stroke-dasharray:5 4}
svg .bar{fill:var(--s0)}
svg .curve{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
svg.key{display:inline-block;width:28px;min-width:0;height:10px;margin-right:.4rem}
ul.legend{list-style:none;margin:0 0 .4rem;padding:0;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;font-size:.875rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}
table.wide{min-width:46rem}caption{text-align:left;font-weight:600;padding-bottom:.35rem}
th,td{text-align:left;padding:.4rem 1.1rem .4rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}td:first-child{white-space:nowrap}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}td.number{white-space:nowrap}
""" + "".join(f".s{i}{{stroke:var(--s{i});fill:var(--s{i})}}" for i in range(6))


def text(value: object) -> str:
    """Any value as harmless HTML and XML text: escaped, characters that XML forbids replaced."""
    return escape(_ILLEGAL.sub("\ufffd", str(value)), quote=True)


def number(value: float, digits: int = 3) -> str:
    """A number for people: `digits` significant digits, thousands grouped, powers of ten only where they are needed."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 8:
        mantissa, exponent = f"{value:.{max(digits - 1, 0)}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    plain = f"{value:,.{min(max(digits - 1 - size, 0), 12)}f}"
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain).replace("-", "−")


def percent(share: float, digits: int = 1) -> str:
    """0.0123 → `1.2%`."""
    return f"{100 * share:.{digits}f}%".replace("-", "−") if math.isfinite(share) else "–"


def page(title: str, *blocks: str, lead: str = "") -> str:
    """A whole document. blocks: pieces made by this module. lead: one sentence under the title."""
    under = f'<p class="lead">{text(lead)}</p>\n' if lead else ""
    body = "\n".join(blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Belt and braces: even a piece that slipped through unescaped could load and run nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{text(title)}</h1>\n"
        f"{under}{body}\n</main>\n</body>\n</html>\n"
    )


def extended(document: str, title: str, *blocks: str) -> str:
    """A document of `page` with more pieces at its end; a new one of this title where it is none."""
    head, end, tail = document.rpartition("\n</main>")
    return head + "\n" + "\n".join(blocks) + end + tail if end else page(title, *blocks)


def heading(words: str) -> str:
    """The title of a section."""
    return f"<h2>{text(words)}</h2>"


def paragraph(words: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{text(words)}</p>"


def figures(values: Mapping[str, str]) -> str:
    """Headline numbers: what it is → the number with its unit."""
    cards = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="figures">{cards}</dl>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table. Cells that are numbers, or a column of texts that begin like numbers, are set flush right.

    Raises ValueError where a row has another length than the header.
    """
    rows = [list(row) for row in rows]
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"every row needs {len(header)} cells, as the header has")
    kinds = [' class="number"' if rows and all(_numeric(row[i]) for row in rows) else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{text(_cell(cell))}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    opening = '<table class="wide">' if len(header) > 4 else "<table>"  # a phone scrolls it rather than squeezing it
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption or "table")}">{opening}{above}'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def _numeric(cell: object) -> bool:
    if isinstance(cell, str):
        return re.fullmatch(r"[–+−-]|[+−-]?[\d∞][\d,.]*(e[−-]?\d+)?\s?(%|[a-zA-Z°µ/]{0,6})", cell) is not None
    return isinstance(cell, int | float | np.number) and not isinstance(cell, bool)


def _cell(cell: object) -> object:
    return number(float(cell), 4) if isinstance(cell, float | np.floating) else cell
