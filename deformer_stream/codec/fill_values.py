"""Recognition of fill values: values, such as 99999, that stand for a missing reading.

The fill values of each feature are part of the model (`Feature.fill_values`). Training and scoring treat a cell or a
field with such a value as empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import isfinite

import numpy as np
import pyarrow as pa

from deformer_stream.codec.columns import decode_dictionary, encode_distinct, is_numeric, is_text, to_float64
from deformer_stream.codec.number_texts import parse_number, standardize_number
from deformer_stream.model.schema import Schema, format_label


class FillValues:
    """The fill values of a feature.

    Args:
        texts: The fill values as `Feature.fill_values` lists them: numbers and other texts.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = frozenset(texts)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.texts)

    @cached_property
    def numbers(self) -> frozenset[float]:
        """Those that are numbers, in double and in single precision, because a table may have either."""
        numbers = [number for text in self.texts if (number := parse_number(text)) is not None]
        with np.errstate(over="ignore"):  # a number beyond single precision
            singles = [single for number in numbers if isfinite(single := float(np.float32(number)))]
        return frozenset((*numbers, *singles))

    def contains(self, value: object) -> bool:
        """Return whether a value is a fill value. A text may spell a number, and white space around it is ignored.

        Args:
            value: A number, a text or a boolean. Any other object is no fill value.
        """
        if not self.texts:
            return False
        if isinstance(value, str):
            text = value.strip()
            return text in self.texts or parse_number(standardize_number(text)) in self.numbers
        if isinstance(value, bool):
            return format_label(value) in self.texts
        return isinstance(value, int | float) and value in self.numbers

    def remove(self, column: pa.Array) -> pa.Array:
        """Return a column in which cells with fill values are null.

        Args:
            column: N numbers, texts or booleans. A column of another type is returned unchanged.

        Returns:
            The N cells, in the same type; views of texts may become texts.
        """
        if not self.texts:
            return column
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())  # Arrow cannot select elements of views
        values = decode_dictionary(column)
        if is_numeric(values.type):
            # Not exactly equal, because the conversion of decimals rounds.
            is_fill = np.isclose(to_float64(values)[:, None], list(self.numbers), rtol=1e-12, atol=0.0).any(1)
        elif is_text(values.type) or pa.types.is_boolean(values.type):
            indexes, distinct_values = encode_distinct(column)
            is_fill = np.array([*map(self.contains, distinct_values), False])[indexes]  # the last one is for null
        else:
            return column
        if not is_fill.any():
            return column
        return column.take(pa.array(np.arange(len(column)), mask=is_fill))  # a null index selects null


def list_fill_values(schema: Schema) -> list[FillValues]:
    """Return the fill values of each feature of a schema."""
    return [FillValues(feature.fill_values) for feature in schema.features]
