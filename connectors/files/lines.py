"""Read files of JSON lines as lists of lines, in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from deformer_stream.tables.data_files import DataFile, open_bytes
from deformer_stream.tables.table import map_read_errors

BLOCK_BYTES = 1 << 20
"""Bytes of text that are read at a time."""


def read_lines(path: DataFile, max_line_bytes: int) -> Iterator[list[bytes]]:
    """Read a file in blocks, and for each block yield the list of the lines that end in it, without their line ends.

    Args:
        path: The file.
        max_line_bytes: Longest line that is returned complete. Of a longer line, only the first `max_line_bytes + 1`
            bytes are returned, so that the decoder rejects it as too large.

    Raises:
        InputError: The file cannot be read.
    """
    splitter = LineSplitter(max_line_bytes)
    with map_read_errors(str(path)), open_bytes(path) as file:
        while block := file.read(BLOCK_BYTES):
            yield splitter.feed(block)
    yield splitter.finish()


class LineSplitter:
    """A converter from blocks of bytes to lines, in bounded memory.

    Blank lines are returned as well, so that lines can be numbered. Of a line that is too long, only the first
    `max_line_bytes + 1` bytes are kept. They are enough for the decoder to reject the line as too large. A byte order
    mark of UTF-8 before the first line is left out.

    Args:
        max_line_bytes: Maximum length of a line that is returned complete.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._unfinished_line = b""
        self._is_first_line = True

    def feed(self, block: bytes) -> list[bytes]:
        """Return the lines that end in this block of bytes, without their line ends."""
        *complete_lines, beginning = block.split(b"\n")  # the last part is the beginning of a line that ends later
        if complete_lines:
            complete_lines[0] = self._unfinished_line + complete_lines[0]
            self._unfinished_line = b""
        # The mark is removed before the first line is cut.
        self._unfinished_line = (self._unfinished_line + beginning)[: len(codecs.BOM_UTF8) + self._max_line_bytes + 1]
        return self._cut(complete_lines)

    def finish(self) -> list[bytes]:
        """Return the last line, as a list of one element, if the input did not end with a line end; otherwise []."""
        last_line, self._unfinished_line = self._unfinished_line, b""
        return self._cut([last_line] if last_line else [])

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        """Return at most `max_line_bytes + 1` bytes of each line, without a mark before the first line of the input."""
        if self._is_first_line and lines:
            self._is_first_line = False
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        return [line[: self._max_line_bytes + 1] for line in lines]
