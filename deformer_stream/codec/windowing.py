"""Windows of event time: which record a reading belongs to that names its device and its time only.

{"device": "pump-7", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}  →  pump-7@2020-03-09T10:34:30Z
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.timestamps import rfc3339
from deformer_stream.engine.events import WindowMembership
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import WINDOW_SEPARATOR, format_duration, window_start

_start_text = lru_cache(maxsize=4096)(rfc3339)  # neighbours in a stream share their window


@dataclass(frozen=True, slots=True)
class Windows:
    """Tumbling windows of a device's time, aligned to 1970-01-01T00:00:00Z, each with its start and without its end.

    width: microseconds, at least 1. grace: microseconds that a window stays open after its end, in the device's time.
    """

    width: int
    grace: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.grace < 0:
            raise ConfigError(f"a window of {self.width} µs with {self.grace} µs of grace; give a positive width")

    @staticmethod
    def asked(schema: Schema, width: int | None, grace: int) -> Windows | None:
        """Those of the model, or, where its records are given by name, of the width asked for. Raises `ConfigError`
        where what is asked for is not what the model knows."""
        known = schema.window
        if width is not None and known is not None and width != known.width:
            raise ConfigError(
                f"--window {format_duration(width)}: the model's records are windows of {format_duration(known.width)}; leave the "
                "option out, or train a model with this one"
            )
        width = width if known is None else known.width
        if width is None and grace:
            raise ConfigError(f"--grace {format_duration(grace)} needs --window, or a model that was trained with one")
        return None if width is None else Windows(width, grace)

    def record(self, device: str, time: int) -> str | None:
        """The id of the device's window around this time (microseconds), `DEVICE@START`; None where it began before
        the year 1."""
        start = _start_text(window_start(time, self.width))
        return None if start is None else f"{device}{WINDOW_SEPARATOR}{start}"

    def of(self, devices: list[str], times: NDArray[np.int64]) -> WindowMembership:
        """What the engine has to know of N events. devices: "" where an event is in no window."""
        return WindowMembership(devices, window_start(times, self.width) + (self.width + self.grace))
