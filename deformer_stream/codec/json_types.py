"""Types of JSON values that several message formats share, with the limits that their decoders check."""

from __future__ import annotations

from typing import Annotated

import msgspec

from deformer_stream.codec.timestamps import MAX_MICROS, MIN_MICROS

Micros = Annotated[int, msgspec.Meta(ge=MIN_MICROS, le=MAX_MICROS)]
"""A time in the years 1 to 9999, in microseconds since 1970."""

MessageId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z_-]{1,64}\Z")]
"""The id of an incident or of a label. It can be a part of a URL and of the name of a file."""
