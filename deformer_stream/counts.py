"""Counts with their noun, as texts for people: "1 step", "1,280 records"."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """Return a count with thousands separators and its noun, such as "1 step" or "1,280 records".

    Args:
        count: The count.
        noun: What is counted, in the singular. Its plural must end in an additional "s".
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
