"""Codes of labels, the values of discrete features. All decoders use them, so that equal values have equal scores."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite, nan

from deformer_stream.codec.number_texts import MAX_EXACT_INTEGER, is_no_value, parse_exact_number, parse_number
from deformer_stream.codec.validation import MAX_TEXT_CHARS, RejectionError, is_unicode, quote
from deformer_stream.engine.events import RejectionReason
from deformer_stream.model.schema import format_label, spell_boolean


def encode_label(value: object, code_by_label: dict[str, int], name: str) -> tuple[float, str | None]:
    """Return the label code of a discrete value, and its text if the label did not occur in training.

    Args:
        value: The value: a text, a number or a boolean.
        code_by_label: The codes of the labels that occurred in training: 0 to K − 1 for K labels.
        name: The feature name, for error messages.

    Returns:
        For a label that occurred in training, its code and None. For a text that stands for "no value", such as
        "No Data", NaN and None if the known labels are numbers. For any other label, K (the code that all unseen labels
        share) and the label's text.

    Raises:
        RejectionError: If an unseen label is too long or cannot be encoded as UTF-8, or if a float may stand for
            several large integers.
    """
    if isinstance(value, float) and MAX_EXACT_INTEGER <= abs(value) < inf:
        value = _restore_integer(value, code_by_label, name)
    text = find_spelling(value, code_by_label)
    code = code_by_label.get(text)
    if code is not None:
        return code, None
    if is_no_value(text) and are_numbers(code_by_label):
        return nan, None
    if not is_unicode(text):
        raise RejectionError(
            RejectionReason.WRONG_TYPE,
            f"feature {quote(name)}: the label {quote(text)} is not valid Unicode text; send it encoded as UTF-8",
        )
    if len(text) > MAX_TEXT_CHARS:
        raise RejectionError(
            RejectionReason.TOO_LARGE,
            f"feature {quote(name)}: the label has {len(text)} characters; at most {MAX_TEXT_CHARS} are accepted; send "
            "a shorter label",
        )
    return len(code_by_label), text


def find_spelling(value: object, known_labels: Collection[str]) -> str:
    """Return the known label that a value stands for, or its own label if it stands for none.

    A table that was stored as text loses types (`3` becomes `3.0`, `true` becomes `True`), and programs write the same
    label in other letters (`HIGH`, ` high`). So a text that is not a known label is tried without the white space
    around it, as the number that it spells, as a boolean, and at last without regard to capital letters, if that leaves
    one known label.

    Args:
        value: A text, a number or a boolean.
        known_labels: The labels that occurred in training.
    """
    label = format_label(value)
    if label in known_labels:
        return label
    spellings = [label]
    if isinstance(value, str):
        spellings += [label.strip(), label.strip().lower()]
        number = parse_exact_number(label)
        if number is not None and isfinite(number):
            spellings.append(format_label(number))
    for spelling in spellings:
        for candidate in (spelling, spell_boolean(spelling, known_labels)):
            if candidate in known_labels:
                return candidate
    folded = label.strip().casefold()
    matches = [known for known in known_labels if known.strip().casefold() == folded]
    return matches[0] if len(matches) == 1 else label


def _restore_integer(number: float, known_labels: Collection[str], name: str) -> float | int:
    """Return the integer of the known label that a large number stands for; the number itself if there is none.

    A program that stores integers as float64, such as pandas in a column with missing values, rounds those beyond 2^53.

    Args:
        number: A finite number of at least 2^53.
        known_labels: The labels that occurred in training.
        name: The feature name, for the error message.

    Raises:
        RejectionError: Several known labels are rounded to this number.
    """
    integers = [known for label in known_labels if isinstance(known := parse_exact_number(label), int)]
    rounded = [known for known in integers if float(known) == number]
    if len(rounded) > 1:
        raise RejectionError(
            RejectionReason.WRONG_TYPE,
            f"feature {quote(name)}: the floating-point number {number!r} may stand for the labels "
            f"{rounded[0]} and {rounded[1]}; send labels of more than 15 digits as integers "
            "or texts",
        )
    return rounded[0] if rounded else number


def are_numbers(labels: Collection[str]) -> bool:
    """Return whether there are labels, and all of them are texts of numbers.

    In such a column a text for "no value", such as "No Data", is a missing reading and no further label.
    """
    return bool(labels) and all(parse_number(label) is not None for label in labels)
