"""Recognition of fill values: values, such as 99999, that stand for a missing reading.

The fill values of each feature are part of the model (`Feature.fill_values`). Training and scoring treat a cell or a
field with such a value as empty. If a record has an id, each feature has one reading, and a fill value declares that it
will not come, as null does. If records are windows of time or readings are irregular, the sensor may report again
(`Schema.may_report_again`), and a fill value is no reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import isfinite

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.columns import (
    decode_dictionary,
    encode_distinct,
    is_numeric,
    is_present,
    is_text,
    to_float64,
)
from deformer_stream.codec.number_texts import parse_exact_number, standardize_number
from deformer_stream.model.schema import Schema, format_label


class FillValues:
    """The fill values of a feature.

    Args:
        texts: The fill values as `Feature.fill_values` lists them: numbers and other texts.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = frozenset(texts)

    @cached_property
    def numbers(self) -> frozenset[int | float]:
        """Those that are numbers, in double and in single precision, because a table may have either.

        Integers that float64 would round are exact, and have no other precision.
        """
        numbers = [number for text in self.texts if (number := parse_exact_number(text)) is not None]
        with np.errstate(over="ignore"):  # a number beyond single precision
            singles = [float(np.float32(number)) for number in numbers if isinstance(number, float)]
        return frozenset((*numbers, *filter(isfinite, singles)))

    def contains(self, value: object) -> bool:
        """Return whether a value is a fill value. A text may spell a number, and white space around it is ignored.

        Args:
            value: A number, a text or a boolean. Any other object is no fill value.
        """
        if not self.texts:
            return False
        if isinstance(value, str):
            text = value.strip()
            return text in self.texts or parse_exact_number(standardize_number(text)) in self.numbers
        if isinstance(value, bool):
            return format_label(value) in self.texts
        return isinstance(value, int | float) and value in self.numbers

    def find(self, column: pa.Array) -> NDArray[np.bool_]:
        """Return for each of N cells whether it has a fill value, (N,).

        Args:
            column: Numbers, texts or booleans. In a column of another type there are no fill values.
        """
        if not self.texts:  # the usual case
            return np.zeros(len(column), bool)
        values = decode_dictionary(column)
        if pa.types.is_integer(values.type):
            integers = np.asarray(values.fill_null(0).to_numpy(zero_copy_only=False))
            limits = np.iinfo(integers.dtype)
            wanted = [int(n) for n in self.numbers if limits.min <= n <= limits.max and n == int(n)]
            return np.isin(integers, np.array(wanted, integers.dtype)) & is_present(values)
        if pa.types.is_decimal(values.type):
            # Not exactly equal, because the conversion of decimals rounds.
            is_equal = np.isclose(to_float64(values)[:, None], list(map(float, self.numbers)), rtol=1e-12, atol=0.0)
            return np.asarray(is_equal.any(1))
        if is_numeric(values.type):
            return np.isin(to_float64(values), list(map(float, self.numbers)))
        if is_text(values.type) or pa.types.is_boolean(values.type):
            indexes, distinct_values = encode_distinct(column)
            is_fill = np.array([*map(self.contains, distinct_values), False])  # the last one is for null
            return is_fill[indexes]
        return np.zeros(len(column), bool)

    def remove(self, column: pa.Array) -> pa.Array:
        """Return N cells of which those with fill values are null (`set_null`)."""
        return set_null(column, self.find(column)) if self.texts else column


def set_null(column: pa.Array, is_null: NDArray[np.bool_]) -> pa.Array:
    """Return N cells in the same type, of which some are null. Views of texts may become texts.

    Args:
        column: The cells.
        is_null: (N,) whether a cell becomes null.
    """
    if not is_null.any():
        return column
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())  # Arrow cannot select elements of views
    return column.take(pa.array(np.arange(len(column)), mask=is_null))  # a null index selects null


def list_fill_values(schema: Schema) -> list[FillValues]:
    """Return the fill values of each feature of a schema."""
    return [FillValues(feature.fill_values) for feature in schema.features]
