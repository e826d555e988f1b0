"""The precisions of the compiled kernels."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
