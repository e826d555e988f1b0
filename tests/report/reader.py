"""Parse rendered pages and the charts in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
VOID_TAGS = {"meta", "img", "br"}


class Reader(HTMLParser):
    """A parser that checks that tags nest and that collects tags with their attributes, and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read_html(document: str) -> Reader:
    """Parse a document and fail if a tag stays open."""
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open_tags == []
    return reader


def parse_drawings(document: str) -> list[ElementTree.Element]:
    """Parse every drawing of a document as XML, and raise if one is not well-formed."""
    drawings = re.findall(r"<svg xmlns.*?</svg>", document, re.S)
    return [ElementTree.fromstring(svg) for svg in drawings]  # noqa: S314 - our own


def paths_of(drawing: ElementTree.Element, group: str) -> list[list[float]]:
    """Return the coordinates of each path that is directly in a group of the given class: x, y, x, y, and so on."""
    paths = [
        path
        for element in drawing.iter(f"{SVG}g")
        if element.get("class") == group
        for path in element.findall(f"{SVG}path")
    ]
    return [[float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", path.attrib["d"])] for path in paths]


def texts_of(drawing: ElementTree.Element) -> list[str]:
    """Return all texts of a drawing, without tooltips."""
    return [element.text or "" for element in drawing.iter(f"{SVG}text")]
