"""A sink that prints alerts and drift notices on a terminal, one line of text for each."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TextIO

from deformer_stream.codec.alert_text import format_alert_line, format_drift_line, format_storm_line
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects


class TerminalAlerts:
    """Prints the alerts and drift notices of a run on standard output, as lines for a person.

    Programs read `AlertLines` instead, which writes the same alerts as JSON.

    Args:
        stream: The text stream to print to; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Print the alerts and notices of one batch, the alerts first.

        Args:
            effects: The results of the engine, with the alerts and notices.
            data: The messages or rows of the batch; not used.
        """
        if not effects.alerts and not effects.drift_notices and not effects.storm_notices:
            return
        today = datetime.now().astimezone().date()
        lines = [format_alert_line(alert, today=today) for alert in effects.alerts]
        lines += [format_drift_line(notice, today=today) for notice in effects.drift_notices]
        lines += [format_storm_line(notice, today=today) for notice in effects.storm_notices]
        # A terminal that cannot show a character, such as the cube of m³, shows a question mark in its place.
        encoding = self._stream.encoding or "utf-8"
        text = "".join(f"{line}\n" for line in lines)
        self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def flush(self) -> None:
        """Pass all lines to the terminal."""
        self._stream.flush()

    def close(self) -> None:
        """Pass all lines to the terminal, which stays open."""
        self.flush()
