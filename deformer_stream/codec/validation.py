"""Refusing, within the codec: an exception that becomes a `Rejected`, and how foreign text is quoted in its detail."""

from __future__ import annotations

from deformer_stream.engine.events import RejectionReason


class Refusal(Exception):  # noqa: N818  (control flow, not an error)
    """Control flow within the codec: this event becomes a `Rejected`."""

    def __init__(self, reason: RejectionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def brief(text: str, limit: int = 60) -> str:
    """Foreign text, quoted, on one line, printable, and of bounded length."""
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "…"


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8. What is no UTF-8 in a table comes with lone surrogates in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
