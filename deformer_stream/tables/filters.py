"""Conditions that choose rows of tables, written as in the WHERE clause of SQL: `site = 'A' AND day >= '2025-01-01'`.

A condition is parsed with sqlglot, and only comparisons of a column with a constant are accepted, and their
combinations. It is applied in three steps. The first compares the values that the folders of a path state, so that
other files are not opened. The second compares the statistics of Parquet row groups, so that others are not read. The
third compares the rows.

As in SQL, a comparison with a missing value is neither true nor false, and only rows for which the condition is true
are kept. NaN is a missing value, as everywhere in tables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.columns import decode_dictionary, encode_distinct, is_present, is_text, parse_times
from deformer_stream.codec.number_texts import parse_number_texts
from deformer_stream.codec.time_columns import convert_times
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, TimeFormat
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError
from deformer_stream.tables.labels import match_normal_label

MAX_TEXT_LENGTH = 10_000
"""Largest number of characters of a condition."""

_GRAMMAR = (
    "write comparisons of a column with a constant (=, <>, <, <=, >, >=, IN, BETWEEN, IS NULL), combined by AND, OR "
    "and NOT; put a column in double quotes if its name is a word of SQL"
)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NEQ": operator.ne,
    "LT": operator.lt,
    "LTE": operator.le,
    "GT": operator.gt,
    "GTE": operator.ge,
}
_MIRRORED = {"EQ": "EQ", "NEQ": "NEQ", "LT": "GT", "LTE": "GTE", "GT": "LT", "GTE": "LTE"}

Constant = str | int | float | bool
_Kind = Literal["number", "text", "time", "boolean"]
_Truth = TypeVar("_Truth", NDArray[np.bool_], bool)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A comparison of a column with a constant."""

    column: str
    operator: str
    constant: Constant


@dataclass(frozen=True, slots=True)
class _IsNull:
    """Whether a column has no value."""

    column: str


@dataclass(frozen=True, slots=True)
class _HasLabel:
    """Whether a column has a label, as `labels.match_normal_label` compares it."""

    column: str
    label: str


@dataclass(frozen=True, slots=True)
class _Not:
    """The opposite of a condition."""

    condition: _Node


@dataclass(frozen=True, slots=True)
class _Combination:
    """Conditions of which all (or at least one) must be true."""

    needs_all: bool
    conditions: tuple[_Node, ...]


_Leaf = _Comparison | _IsNull | _HasLabel
_Node = _Leaf | _Not | _Combination


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What is known about the values of a column in some rows.

    Attributes:
        values: The smallest and the largest value, (2,), both inclusive; None if they are not known. Null twice if all
            rows are known to have no value.
        may_be_null: Whether a row may have no value.
    """

    values: pa.Array | None = None
    may_be_null: bool = True


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A condition that has been parsed, before the types of the columns are known.

    Attributes:
        text: The condition as the user wrote it.
        columns: The names of its columns.
        label_column: The column that `select_label` has added to the condition; None if it is not added.
    """

    text: str
    columns: tuple[str, ...]
    _root: _Node
    label_column: str | None = None

    def get_flag(self, column: str) -> str:
        """Return the option that names a column of the condition, for error messages."""
        return "--label" if column == self.label_column else "--where"

    def bind(
        self, type_by_column: Mapping[str, pa.DataType], time_format: TimeFormat = DEFAULT_TIME_FORMAT
    ) -> BoundFilter:
        """Return the condition for columns of known types. Columns that are not given have unknown values.

        Args:
            type_by_column: The types of columns.
            time_format: The zone of times that have none; without a zone they count as UTC.

        Raises:
            ConfigError: A column cannot be compared with its constant.
        """
        leaves = list(_iterate_leaves(self._root))
        known = {
            name: _get_kind(name, type_by_column[name], leaves, self.get_flag(name))
            for name in self.columns
            if name in type_by_column
        }
        constants: dict[_Comparison, Constant] = {}
        for leaf in leaves:
            if isinstance(leaf, _Comparison) and leaf.column in known:
                constants[leaf] = _convert_constant(leaf, known[leaf.column], time_format)
        return BoundFilter(self._root, known, constants, time_format)


@dataclass(frozen=True, slots=True)
class BoundFilter:
    """A condition for columns of known types; made by `RowFilter.bind`."""

    _root: _Node
    _kind_by_column: Mapping[str, _Kind]
    _constants: Mapping[_Comparison, Constant]
    _time_format: TimeFormat

    def mask(self, columns: Mapping[str, pa.Array]) -> NDArray[np.bool_]:
        """Return for each of N rows whether the condition is true.

        Args:
            columns: The columns of the condition, each with N cells.

        Returns:
            (N,) bool.
        """
        values = {name: _Values(columns[name], kind, self._time_format) for name, kind in self._kind_by_column.items()}

        def evaluate(leaf: _Leaf) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
            """Return for each row whether a leaf is true, and whether it is false."""
            column = values[leaf.column]
            if isinstance(leaf, _IsNull):
                return ~column.is_present, column.is_present
            if isinstance(leaf, _HasLabel):
                has_label = match_normal_label(columns[leaf.column], leaf.label)
                return has_label, ~has_label
            is_equal = column.compare(_OPERATORS[leaf.operator], self._constants[leaf])
            return is_equal & column.is_present, ~is_equal & column.is_present

        return _evaluate(self._root, evaluate)[0]

    def may_match(self, ranges: Mapping[str, ValueRange]) -> bool:
        """Return False if the condition is known to be true for none of some rows.

        Args:
            ranges: What is known about columns in these rows; nothing is known about others.
        """
        unknown = ValueRange()

        def evaluate(leaf: _Leaf) -> tuple[bool, bool]:
            """Return whether a leaf may be true for a row, and whether it may be false."""
            if isinstance(leaf, _HasLabel):
                return True, True
            known = ranges.get(leaf.column, unknown)
            if leaf.column not in self._kind_by_column or known.values is None:
                return (known.may_be_null, True) if isinstance(leaf, _IsNull) else (True, True)
            bounds = _Values(known.values, self._kind_by_column[leaf.column], self._time_format)
            if isinstance(leaf, _IsNull):
                return known.may_be_null, bool(bounds.is_present.any())
            if not bounds.is_present.all():
                return (False, False) if known.values.null_count == len(known.values) else (True, True)
            return _compare_range(bounds, leaf.operator, self._constants[leaf])

        return _evaluate(self._root, evaluate)[0]


def _compare_range(bounds: _Values, name: str, constant: Constant) -> tuple[bool, bool]:
    """Return whether a comparison may be true for a value between two bounds, and whether it may be false."""
    is_below, is_above = bounds.compare(operator.lt, constant).tolist(), bounds.compare(operator.gt, constant).tolist()
    (low_is_below, high_is_below), (low_is_above, high_is_above) = is_below, is_above
    may_be_equal = not low_is_above and not high_is_below
    is_equal = may_be_equal and not low_is_below and not high_is_above
    if name in ("EQ", "NEQ"):
        answer = may_be_equal, not is_equal
        return answer if name == "EQ" else answer[::-1]
    may_be_below = low_is_below or (name == "LTE" and may_be_equal) or (name == "GT" and may_be_equal)
    may_be_above = high_is_above or (name == "GTE" and may_be_equal) or (name == "LT" and may_be_equal)
    return (may_be_below, may_be_above) if name in ("LT", "LTE") else (may_be_above, may_be_below)


class _Values:
    """N values of a column in a form in which they can be compared.

    Args:
        column: The cells.
        kind: What they are.
        time_format: The zone of times without one; without a zone they count as UTC.
    """

    def __init__(self, column: pa.Array, kind: _Kind, time_format: TimeFormat) -> None:
        column = decode_dictionary(column)
        self._indexes: NDArray[np.int64] | None = None
        self._values: Any
        if kind == "text":
            self._indexes, self._values = encode_distinct(column)
            self.is_present: NDArray[np.bool_] = is_present(column)
        elif kind == "time":
            self._values, errors = parse_times(convert_times(column, time_format), "--where")
            self.is_present = self._values != NO_TIME
            self.is_present[list(errors)] = False
        elif kind == "number":
            self._values = _get_numbers(column)
            self.is_present = is_present(column) & ~np.isnan(self._values)
        else:
            column = column if pa.types.is_boolean(column.type) else _parse_booleans(column)
            self.is_present = is_present(column)
            self._values = column.fill_null(False).to_numpy(zero_copy_only=False)

    def compare(self, compare: Callable[[Any, Any], Any], constant: Constant) -> NDArray[np.bool_]:
        """Return the result of a comparison for each value; it has no meaning for missing ones."""
        if self._indexes is None:
            return np.asarray(compare(self._values, constant), bool)
        results = [isinstance(value, str) and bool(compare(value, constant)) for value in self._values]
        return np.array([*results, False])[self._indexes]


def _parse_booleans(column: pa.Array) -> pa.Array:
    """Return N texts as booleans, null for other texts; N missing values of an unknown type likewise."""
    indexes, texts = encode_distinct(column)
    booleans = [{"true": True, "false": False}.get(str(text).strip().lower()) for text in texts]
    # `encode_distinct` gives null cells the index after the last distinct value.
    return pa.array([*booleans, None], pa.bool_()).take(pa.array(indexes))


def _get_numbers(column: pa.Array) -> NDArray[Any]:
    """Return N numbers; integers stay integers, because floats have fewer digits. Missing ones are 0 or NaN."""
    if is_text(column.type):  # a batch of a CSV file with a cell that is no number
        return parse_number_texts(column.cast(pa.string()))[0]
    if pa.types.is_integer(column.type):
        integers: NDArray[Any] = column.fill_null(0).to_numpy(zero_copy_only=False)
        return integers
    floats: NDArray[Any] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return floats


def _evaluate(node: _Node, evaluate: Callable[[_Leaf], tuple[_Truth, _Truth]]) -> tuple[_Truth, _Truth]:
    """Return whether a condition is true and whether it is false; of a missing value it is neither.

    Args:
        node: The condition.
        evaluate: Returns both for a comparison.
    """
    if isinstance(node, _Not):
        is_true, is_false = _evaluate(node.condition, evaluate)
        return is_false, is_true
    if not isinstance(node, _Combination):
        return evaluate(node)
    parts = [_evaluate(condition, evaluate) for condition in node.conditions]
    conjunction, disjunction = (operator.and_, operator.or_) if node.needs_all else (operator.or_, operator.and_)
    return reduce(conjunction, (part[0] for part in parts)), reduce(disjunction, (part[1] for part in parts))


def _iterate_leaves(node: _Node) -> Iterable[_Leaf]:
    """Yield the comparisons of a condition."""
    if isinstance(node, _Not):
        yield from _iterate_leaves(node.condition)
    elif isinstance(node, _Combination):
        for condition in node.conditions:
            yield from _iterate_leaves(condition)
    else:
        yield node


def _get_kind(name: str, column_type: pa.DataType, leaves: Iterable[_Leaf], flag: str) -> _Kind:
    """Return what the values of a column are compared as.

    Args:
        name: The column.
        column_type: Its type. A column without any value, whose type is not known, is as its first constant.
        leaves: The comparisons of the condition.
        flag: The option that names the column.

    Raises:
        ConfigError: They cannot be compared.
    """
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    if pa.types.is_null(column_type):
        constants = [leaf.constant for leaf in leaves if isinstance(leaf, _Comparison) and leaf.column == name]
        constant = next(iter(constants), "")
        return "text" if isinstance(constant, str) else "boolean" if isinstance(constant, bool) else "number"
    if pa.types.is_boolean(column_type):
        return "boolean"
    if is_text(column_type):
        return "text"
    if pa.types.is_timestamp(column_type) or pa.types.is_date(column_type):
        return "time"
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if any(is_type(column_type) for is_type in numeric):
        return "number"
    raise ConfigError(f"{flag}: column {name!r} of type {column_type} cannot be compared; choose another column")


def _convert_constant(leaf: _Comparison, kind: _Kind, time_format: TimeFormat) -> Constant:
    """Return the constant of a comparison in the form of the values of its column.

    Raises:
        ConfigError: It is of another kind.
    """
    constant = leaf.constant
    is_number = isinstance(constant, int | float) and not isinstance(constant, bool)
    if kind == "time" and isinstance(constant, str):
        times, errors = parse_times(convert_times(pa.array([constant]), time_format), "--where")
        if not errors and times[0] != NO_TIME:
            return int(times[0])
        raise ConfigError(
            f"--where: {constant!r} is no time, but column {leaf.column!r} has times; write it as '2025-01-31' or "
            "'2025-01-31T10:00:00Z'"
        )
    fits = {
        "number": is_number,
        "boolean": isinstance(constant, bool),
        "text": isinstance(constant, str),
        "time": False,
    }
    if fits[kind]:
        return constant
    form = {
        "number": "a number without quotes",
        "boolean": "TRUE or FALSE",
        "text": "a text in single quotes",
        "time": "a time in single quotes",
    }
    raise ConfigError(
        f"--where: column {leaf.column!r} cannot be compared with {constant!r}, because its values are of another "
        f"kind ({kind}); write {form[kind]}"
    )


def parse_where(text: str) -> RowFilter:
    """Parse a condition.

    Args:
        text: The condition, such as "site = 'A' AND (line IN (1, 2) OR speed IS NULL)". Names of columns with other
            characters than letters, digits and underscores are in double quotes.

    Raises:
        ConfigError: The text is no condition, or not one of the accepted forms.
    """
    import sqlglot
    from sqlglot import errors

    if len(text) > MAX_TEXT_LENGTH:
        raise ConfigError(f"--where: the condition is longer than {MAX_TEXT_LENGTH} characters; shorten it")
    try:
        statements = sqlglot.parse(text)
        if len(statements) != 1 or statements[0] is None:
            raise _make_error(text)
        root = _convert(statements[0])
    except errors.SqlglotError as error:
        message = str(error).splitlines()[0][:200]
        raise ConfigError(f"--where {text[:200]!r} cannot be parsed ({message}): {_GRAMMAR}") from None
    except RecursionError:
        raise ConfigError("--where: the condition is nested too deeply; simplify it") from None
    return RowFilter(text, tuple(dict.fromkeys(leaf.column for leaf in _iterate_leaves(root))), root)


def select_label(column: str, label: str, where: RowFilter | None = None) -> RowFilter:
    """Return the condition that a column has a label, as `--label` and `--normal` of the training choose rows.

    Args:
        column: The column of labels.
        label: The label.
        where: A further condition, None if there is none.
    """
    leaf = _HasLabel(column, label)
    if where is None:
        return RowFilter(f"{column} = {label}", (column,), leaf, column)
    columns = tuple(dict.fromkeys((*where.columns, column)))
    root = _Combination(True, (where._root, leaf))
    # A column of both options is named by the condition, which the user has written.
    label_column = None if column in where.columns else column
    return RowFilter(f"({where.text}) AND {column} = {label}", columns, root, label_column)


def _make_error(part: object) -> ConfigError:
    """Return the error for a part of a condition that is not accepted."""
    return ConfigError(f"--where: {str(part)[:200]!r} is not supported; {_GRAMMAR}")


def _convert(node: Any) -> _Node:
    """Return a condition from an expression of sqlglot. Only the forms below are accepted.

    Raises:
        ConfigError: The expression has another form.
    """
    from sqlglot import exp

    if isinstance(node, exp.Paren):
        return _convert(node.this)
    if isinstance(node, exp.Not):
        return _Not(_convert(node.this))
    if isinstance(node, exp.And | exp.Or):
        return _Combination(isinstance(node, exp.And), tuple(_convert(part) for part in node.flatten()))
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        return _IsNull(_get_column(node.this))
    if isinstance(node, exp.Between) and not node.args.get("symmetric"):
        column = _get_column(node.this)
        low, high = _get_constant(node.args["low"]), _get_constant(node.args["high"])
        return _Combination(True, (_Comparison(column, "GTE", low), _Comparison(column, "LTE", high)))
    if isinstance(node, exp.In) and node.expressions:
        column = _get_column(node.this)
        return _Combination(False, tuple(_Comparison(column, "EQ", _get_constant(part)) for part in node.expressions))
    name = type(node).__name__
    if name not in _OPERATORS:
        raise _make_error(node)
    if isinstance(node.this, exp.Column):
        return _Comparison(_get_column(node.this), name, _get_constant(node.expression))
    return _Comparison(_get_column(node.expression), _MIRRORED[name], _get_constant(node.this))


def _get_column(node: Any) -> str:
    """Return the name of a column; raise `ConfigError` for any other expression."""
    from sqlglot import exp

    if not isinstance(node, exp.Column) or len(node.parts) != 1 or not node.name:
        raise _make_error(node)
    return str(node.name)


def _get_constant(node: Any) -> Constant:
    """Return a constant; raise `ConfigError` for any other expression."""
    from sqlglot import exp

    if isinstance(node, exp.Boolean):
        return bool(node.this)
    if isinstance(node, exp.Literal) and node.is_string:
        return str(node.this)
    sign = 1
    if isinstance(node, exp.Neg):
        sign, node = -1, node.this
    if isinstance(node, exp.Literal) and not node.is_string:
        try:
            return sign * int(node.this)
        except ValueError:
            pass
        try:
            return sign * float(node.this)
        except ValueError:
            raise _make_error(node) from None
    raise _make_error(node)
