"""The structures and constants that Python shares with the compiled kernels (C code that scores readings).

Python passes arrays to C as addresses in structures, which `csrc/abi.h` declares in C and this module in Python.
`find_differences` compares both declarations when a library is loaded, because a library with another layout would read
wrong memory. The constructor of a structure checks dtype and contiguity of each array, because C code cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.constants import (
    ACTIVATION_CODES,
    MAX_AGE,
    MAX_CONDITIONING_VALUE,
    MAX_LOG_SCALE_CHANGE,
    MAX_NEIGHBOR_VALUE,
)
from deformer_stream.model.schema import LINEAR_LIMIT

ABI_VERSION = 2
"""The version of the interface, the same number as in csrc/abi.h. It is raised if a field gets another meaning."""

COLUMNS = 32
"""Number of outputs of a linear map that the kernels compute together. The outputs of each linear map are padded with
zero weights to a multiple of this number."""
KV_PAGE_TOKENS = 16
"""Tokens per page of the KV cache (cached attention keys and values). The attention scores of the sixteen tokens of a
page fill one vector of the processor."""
MAX_HEADS = 64
"""The largest number of attention heads of a model that the kernels support."""
PRIOR_LANES = 8
"""Number of mixture components of the Gaussian prior (a mixture whose exact conditionals are given to the network) that
the kernels compute together. A vector of the processor holds eight doubles."""
ROW_EXTRA_VECTORS = 4
"""Number of vectors, of one double per component of the Gaussian prior, that the KV cache stores for a reading after
its row of the Cholesky factor. They are 1 / pivot, whitened residual, feature code, and log-likelihood."""
MAX_NEIGHBORS = 32
"""The largest number of readings on which the Gaussian process conditions a reading that the kernels support."""
MAX_PROCESS_SCALES = 16
"""The largest number of time scales of the Gaussian process that the kernels support."""
READING_BYTES = 16
"""Size of an irregular reading in the KV cache: the age as a double, the value as a float, the feature code as an
int32."""

CONSTANTS: dict[str, float] = {
    "COLUMNS": COLUMNS,
    "KV_PAGE_TOKENS": KV_PAGE_TOKENS,
    "MAX_HEADS": MAX_HEADS,
    "PRIOR_LANES": PRIOR_LANES,
    "ROW_EXTRA_VECTORS": ROW_EXTRA_VECTORS,
    "MAX_NEIGHBORS": MAX_NEIGHBORS,
    "MAX_PROCESS_SCALES": MAX_PROCESS_SCALES,
    "READING_BYTES": READING_BYTES,
    "MAX_NEIGHBOR_VALUE": MAX_NEIGHBOR_VALUE,
    "MAX_AGE": MAX_AGE,
    "MAX_CONDITIONING_VALUE": MAX_CONDITIONING_VALUE,
    "LINEAR_LIMIT": LINEAR_LIMIT,
    "MAX_LOG_SCALE_CHANGE": MAX_LOG_SCALE_CHANGE,
    **{f"ACTIVATION_{name.upper()}": code for name, code in ACTIVATION_CODES.items()},
}
"""The value of each constant that both Python and C define, by its name in C; `find_differences` compares them."""

INTEGER, REAL, ADDRESS = "integer", "real", "address"
"""Kinds of fields of a structure that hold no array: an int64, a double, the address of a structure or function."""

Kind = str | np.dtype[Any]
"""The kind of a field of a structure: `INTEGER`, `REAL`, `ADDRESS`, or the dtype of the array whose address it holds.
The kind "factors" is an array of packed weights, in float32, or in bfloat16 as uint16."""

_INT64, _FLOAT32, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float64)
_BOOL, _BYTES, _INT8 = np.dtype(np.bool_), np.dtype(np.uint8), np.dtype(np.int8)
_FACTORS = "factors"
"""Kind of an array of packed weights of a Transformer layer: float32, or bits of bfloat16 (NumPy has no such dtype)
as uint16."""

_FACTOR_DTYPES = (_FLOAT32, np.dtype(np.uint16))
_C_OBJECTS = (ctypes.Structure, ctypes.Array, ctypes.c_int64)
_C_TYPES: dict[Kind, Any] = {INTEGER: ctypes.c_int64, REAL: ctypes.c_double}
_NO_BYTES = ctypes.c_char * 0
"""A C type of size 0, which can be placed at the beginning of any buffer, even of an empty one."""


def address_of(value: Any, kind: Kind, name: str) -> int | None:
    """Return the address of an array's first element for compiled code, after checking that the code can read it.

    Args:
        value: A NumPy array. None stands for no array, and None is returned for it (a null pointer in C).
        kind: The dtype that compiled code expects, or "factors" for packed weights (float32, or uint16 for bfloat16).
        name: The structure and field that the array is for, such as `Batch.values`, for the error message.

    Raises:
        TypeError: The value is no array, has another dtype, or is not contiguous.
    """
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} is a {type(value).__name__}, but the compiled kernels need an array: convert it with numpy.asarray"
        )
    if value.dtype != kind and not (kind == _FACTORS and value.dtype in _FACTOR_DTYPES):
        raise TypeError(
            f"the array {name} has dtype {value.dtype}, but the compiled kernels need {kind}: convert it with astype"
        )
    if not value.flags.c_contiguous:
        raise TypeError(
            f"the array {name} is not contiguous, but the compiled kernels need contiguous memory: convert it with "
            f"numpy.ascontiguousarray"
        )
    return _address_of_array(value)


def _address_of_array(array: Any) -> int:
    """Return the address of the first element of a contiguous NumPy array.

    `from_buffer` needs about a quarter of the time of `array.ctypes.data`, but refuses read-only arrays.
    """
    if array.flags.writeable:
        return ctypes.addressof(_NO_BYTES.from_buffer(array))
    return int(array.ctypes.data)


_Converter = Callable[[Any, Kind, str], int | None]
_Conversion = tuple[str, Kind, _Converter | None, str]
"""How a field is filled: its name, its kind, the function that turns a value into an address (None if the field holds a
number), and the name of structure and field for error messages."""


class KernelStruct(ctypes.Structure):
    """The base class of all structures that are passed to compiled code. csrc/abi.h declares each of them in C, too.

    The constructor takes the value of every field by keyword. It keeps these values alive as long as the structure,
    because C stores only their addresses. The kind of a field determines which value it takes:

    - A NumPy dtype: an array of this dtype, or None for a null pointer. C receives the address.
    - "factors": the same, for packed weights in float32, or in bfloat16 as uint16.
    - `ADDRESS`: another structure, an address as a number, or None for a null pointer.
    - `INTEGER` or `REAL`: a number (int64 or double in C).

    Attributes:
        kinds: The kind of each field by its name, in the order of the fields in C. Every subclass defines it.

    Raises:
        TypeError: A field is missing or unknown, or compiled code cannot read an array (see `address_of`).
    """

    kinds: ClassVar[dict[str, Kind]]
    _conversions: ClassVar[list[_Conversion]]

    def __init_subclass__(cls) -> None:
        cls._conversions = [
            (name, kind, _converter_of(kind), f"{cls.__name__}.{name}") for name, kind in cls.kinds.items()
        ]

    def __init__(self, **values: Any) -> None:
        # `_conversions` has an entry for each field. `convert` returns the address of the field's value; it is None for
        # a number, which needs no conversion. `label` names the field in error messages.
        try:
            fields = [
                values[name] if convert is None else convert(values[name], kind, label)
                for name, kind, convert, label in self._conversions
            ]
        except KeyError as error:  # a field has no value
            raise self._error_of_names(values) from error
        # Every field has a value here, so further values have names that are no fields.
        if len(values) > len(fields):
            raise self._error_of_names(values)
        super().__init__(*fields)
        # The structure stores only addresses of arrays. This reference keeps the arrays from being freed.
        self.referenced = values

    def _error_of_names(self, values: dict[str, Any]) -> TypeError:
        """Return an error that lists the fields without a value, and the values whose names are no fields."""
        names = ", ".join(sorted(values.keys() ^ self.kinds.keys()))
        return TypeError(
            f"the structure {type(self).__name__} needs one value for each of its fields; missing or unknown: {names}"
        )


def _converter_of(kind: Kind) -> _Converter | None:
    """Return the function that turns a field's value into an address, or None if a field of this kind is a number."""
    if kind in (INTEGER, REAL):
        return None
    return _address_of_object if kind == ADDRESS else address_of


def _address_of_object(value: Any, _kind: Kind, _name: str) -> int | None:
    """Return the address of a ctypes object: a structure, an array of structures, or an integer that threads share.

    A value that already is an address, or None for a null pointer, is returned unchanged.
    """
    if isinstance(value, _C_OBJECTS):
        return ctypes.addressof(value)
    address: int | None = value
    return address


def pack_array(struct_type: type[KernelStruct], structs: Sequence[KernelStruct]) -> Any:
    """Return a C array with copies of the given structures.

    The array keeps the originals alive, and thus the NumPy arrays to which the structures point.
    """
    array: Any = (struct_type * len(structs))(*structs)
    array.referenced = list(structs)
    return array


def _c_fields(kinds: dict[str, Kind]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a ctypes structure: pairs of a field's name and its C type.

    Args:
        kinds: By the name of each field, `INTEGER` (int64 in C), `REAL` (double), or any other kind, which is stored
            as an address (`c_void_p`).
    """
    return [(name, _C_TYPES.get(kind, ctypes.c_void_p)) for name, kind in kinds.items()]


class Layer(KernelStruct):
    """The weights of one Transformer layer: normalisation, attention and feed-forward part.

    The four weight matrices (`qkv`, `out`, `up`, `down`) are stored in the order in which the kernels read them.
    csrc/abi.h states the shape of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias"), _FLOAT32),
        **dict.fromkeys(("qkv_bias", "out_bias", "up_bias", "down_bias"), _FLOAT32),
        **dict.fromkeys(("qkv", "out", "up", "down"), _FACTORS),
    }
    _fields_ = _c_fields(kinds)


class LinearMap(KernelStruct):
    """The float32 weights of a linear map, stored in blocks of 32 outputs for compiled code.

    Outputs with zero weights are added up to a multiple of 32. csrc/abi.h states the shape of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "inputs": INTEGER,
        "columns": INTEGER,
        "weights": _FLOAT32,
        "bias": _FLOAT32,
    }
    _fields_ = _c_fields(kinds)


class TokenEncoder(KernelStruct):
    """The weights that compute the Transformer's input tokens from feature codes (indexes) and values of readings.

    csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "width": INTEGER,
        "num_maps": INTEGER,
        **dict.fromkeys(("identity", "feature_share", "value_share", "cycle", "label_share"), _FLOAT32),
        "first_label_row": _INT64,
        "num_labels": _INT64,
        **dict.fromkeys(("maps", "query_map", "time_map"), ADDRESS),
    }
    _fields_ = _c_fields(kinds)


class TimeScales(KernelStruct):
    """The constants from which compiled code computes the inputs that express the times of irregular readings.

    csrc/abi.h states the meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_inputs", "num_octaves"), INTEGER),
        **dict.fromkeys(("durations_per_second", "resolutions_per_second", "largest_log_gap"), REAL),
    }
    _fields_ = _c_fields(kinds)


class Prior(KernelStruct):
    """The parameters of the Gaussian prior for compiled code.

    The prior is a mixture of Gaussians that is fitted before training. Its exact conditionals are inputs of the
    network. csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_components", "padded_components", "num_features"), INTEGER),
        **dict.fromkeys(("log_weights", "means", "covariances"), _FLOAT64),
        **dict.fromkeys(("row_page", "row_place", "column_by_code"), _INT64),
    }
    _fields_ = _c_fields(kinds)


class Process(KernelStruct):
    """The parameters of the Gaussian process prior of irregular readings for compiled code.

    The process is fitted before training. Its conditionals are inputs of the network. csrc/abi.h states shape and
    meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_features", "num_scales", "num_neighbors"), INTEGER),
        "decay": REAL,
        **dict.fromkeys(("covariances", "negative_rates", "means", "variances", "noise_variances"), _FLOAT64),
        **dict.fromkeys(("inverse_deviations", "outlier_factors"), _FLOAT64),
        "log_weights": _FLOAT32,
    }
    _fields_ = _c_fields(kinds)


class Head(KernelStruct):
    """The weights of the output head, which computes the distribution of the next value from the Transformer's output.

    csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_components", "num_prior_components", "num_labels"), INTEGER),
        **dict.fromkeys(("norm_weight", "norm_bias", "scale_floor", "unseen_log_mass"), _FLOAT32),
        "label_counts": _INT64,
        "mixture_map": ADDRESS,
        "adjust_map": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class Network(KernelStruct):
    """A complete model for compiled code: its dimensions, and the addresses of the structures with its weights.

    csrc/abi.h states the meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("d", "num_heads", "feedforward", "num_layers"), INTEGER),
        **dict.fromkeys(("tokens_per_reading", "is_pre_norm", "activation"), INTEGER),
        **dict.fromkeys(("layers", "encoder", "prior", "process", "times", "head"), ADDRESS),
    }
    _fields_ = _c_fields(kinds)


class Batch(KernelStruct):
    """The arguments of the C function `score_batch`, which runs the network over new readings of several records.

    They are the model, the readings, the KV cache of the records, and the arrays for the results. csrc/abi.h states
    shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "network": ADDRESS,
        "features": _INT64,
        "values": _FLOAT32,
        **dict.fromkeys(("offsets", "query_offsets", "num_cached", "depths", "page_table"), _INT64),
        "ages": _FLOAT64,
        "page_pool": _BYTES,
        **dict.fromkeys(("prior_log_weights", "prior_means", "prior_scales"), _FLOAT32),
        "hidden": _FLOAT32,
        "score_terms": _FLOAT32,
        "log_p_prior": _FLOAT32,
        "next_unit": ADDRESS,
        **dict.fromkeys(("num_records", "page_table_columns", "page_bytes", "tokens_per_unit"), INTEGER),
    }
    _fields_ = _c_fields(kinds)


class SurprisalTask(KernelStruct):
    """The arguments of the C function `compute_surprisals`: mixtures of Gaussians, one value for each, and the outputs.

    The surprisal of a value is its negative log-density. csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("log_weights", "means", "scales", "values"), _FLOAT32),
        **dict.fromkeys(("surprisal", "minimum", "mean", "variance"), _FLOAT32),
        "num_readings": INTEGER,
        "num_components": INTEGER,
        "next_reading": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class QuantileTask(KernelStruct):
    """The arguments of the C function `compute_quantiles`: mixtures of Gaussians, probabilities, and the output.

    The probabilities (`levels`) are the same for all mixtures. csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("log_weights", "means", "scales", "levels", "quantiles"), _FLOAT32),
        **dict.fromkeys(("num_readings", "num_components", "num_levels"), INTEGER),
        "next_reading": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class ProcessTask(KernelStruct):
    """The arguments of the C function `condition_sequences`, which computes conditionals of the Gaussian process.

    csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "process": ADDRESS,
        "features": _INT64,
        "values": _FLOAT32,
        **dict.fromkeys(("ages", "means", "deviations"), _FLOAT64),
        **dict.fromkeys(("num_sequences", "num_readings", "first", "is_own_excluded"), INTEGER),
        "next_sequence": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class AdvanceTask(KernelStruct):
    """The arguments of the C function `advance_statistics`, which adds the scores of new readings to their records.

    It updates the running statistics of each record, such as its anomaly score so far. csrc/abi.h states shape and
    meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "record_index": _INT64,
        "offsets": _INT64,
        "score_terms": _FLOAT64,
        "is_scored": _BOOL,
        "is_decision_point": _BOOL,
        "distance_terms": _FLOAT64,
        **dict.fromkeys(("log_p_prior", "line_starts", "line_slopes"), _FLOAT64),
        "running": ADDRESS,
        "score_rows": _FLOAT64,
        "cusum_states": _FLOAT32,
        "codes": _INT64,
        "values": _FLOAT32,
        "log_p_others": _FLOAT64,
        "log_resolutions": _FLOAT64,
        "slopes": _FLOAT64,
        "intercepts": _FLOAT64,
        "level_edges": _FLOAT64,
        "level_log_p": _FLOAT64,
        "step_slopes": _FLOAT64,
        "step_edges": _FLOAT64,
        "step_log_p": _FLOAT64,
        "largest_kinds": _INT8,
        "num_records": INTEGER,
        "num_lines": INTEGER,
        "num_sensors": INTEGER,
        "num_cells": INTEGER,
        "num_step_cells": INTEGER,
        "p_value_exponent": REAL,
        "max_neg_log_p_prior": REAL,
        "record_slope": REAL,
        "record_intercept": REAL,
        "sensor_kappa": REAL,
        "offset_kappa": REAL,
        "step_kappa": REAL,
        "record_kappa": REAL,
        "max_surprise": REAL,
        "max_repetition": REAL,
        "max_extreme": REAL,
        "tie_tolerance": REAL,
    }
    _fields_ = _c_fields(kinds)


class DistanceTask(KernelStruct):
    """The arguments of the C function `measure_distances`, which compares prefixes of records with stored records.

    csrc/abi.h states shape and meaning of each field.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "offsets": _INT64,
        "num_before": _INT64,
        "excluded": _INT64,
        "bounds": _FLOAT64,
        "codes": _INT64,
        "positions": _FLOAT32,
        "stored": _FLOAT32,
        "feature_kinds": _INT8,
        "extents": _FLOAT32,
        "sums": _FLOAT32,
        "out": _FLOAT64,
        "num_records": INTEGER,
        "num_stored": INTEGER,
        "num_first": INTEGER,
        "missing_difference": REAL,
    }
    _fields_ = _c_fields(kinds)


class ThreadTeam(KernelStruct):
    """A C function that several threads execute at once, and its argument.

    Attributes:
        function: The address of the function.
        task: The address of its argument, which all threads share.
        calls_left: How many threads may still call the function. Further threads would find no work.
        failed: Set to 1 by C if the function could not allocate memory in one of the threads, else 0.
    """

    kinds: ClassVar[dict[str, Kind]] = {
        "function": ADDRESS,
        "task": ADDRESS,
        "calls_left": INTEGER,
        "failed": INTEGER,
    }
    _fields_ = _c_fields(kinds)


STRUCTS: tuple[type[KernelStruct], ...] = (
    *(Layer, LinearMap, TokenEncoder, TimeScales, Prior, Process, Head, Network),
    *(Batch, SurprisalTask, QuantileTask, ProcessTask, AdvanceTask, DistanceTask, ThreadTeam),
)
RUNNING_STATE_BYTES = 72
"""Size of the running statistics of one record: `RUNNING_DTYPE` of the engine, the structure RunningState in C."""


def find_differences(library: ctypes.CDLL) -> list[str]:
    """Compare what a compiled library and this module declare: ABI version, sizes of structures, shared constants.

    Returns:
        One sentence for each difference. The library must not be used unless the list is empty.
    """
    try:
        version, struct_size, constant_value = library.abi_version, library.struct_size, library.constant_value
    except AttributeError as error:
        return [f"the library does not export the functions that describe it: {error}"]
    # ctypes does not know the types of C functions, and would return all results as 32-bit integers.
    version.restype = struct_size.restype = ctypes.c_int64
    struct_size.argtypes = constant_value.argtypes = [ctypes.c_char_p]
    constant_value.restype = ctypes.c_double
    differences = []
    if version() != ABI_VERSION:
        differences.append(f"the library has ABI version {version()}, but Python needs version {ABI_VERSION}")
    expected_sizes = {struct.__name__: ctypes.sizeof(struct) for struct in STRUCTS}
    expected_sizes["RunningState"] = RUNNING_STATE_BYTES
    for name, size in expected_sizes.items():
        library_size = struct_size(name.encode())
        if library_size != size:
            differences.append(f"structure {name} has {library_size} bytes in the library, but {size} in Python")
    for name, value in CONSTANTS.items():
        library_value = constant_value(name.encode())
        # The library returns NaN for a name that it does not have, and NaN differs from every number.
        if library_value != value:
            differences.append(f"constant {name} is {library_value} in the library, but {value} in Python")
    return differences


def running_address(running: NDArray[np.void]) -> int:
    """Return the address of the array with all records' running statistics, which compiled code will update.

    Args:
        running: (records,) one entry per record, such as its anomaly score so far. The dtype is the engine's
            `RUNNING_DTYPE`, whose fields have the order and types of the C structure RunningState.

    Raises:
        TypeError: The array is not contiguous, or its entries do not have the size of RunningState.
    """
    num_bytes = running.dtype.itemsize
    if num_bytes != RUNNING_STATE_BYTES:
        raise TypeError(
            f"the array `running` has {num_bytes} bytes per record, but the compiled kernels need "
            f"{RUNNING_STATE_BYTES}: pass an array of the dtype RUNNING_DTYPE"
        )
    if not running.flags.c_contiguous:
        raise TypeError(
            "the array `running` is not contiguous, so the compiled kernels would update the statistics of wrong "
            "records: pass the complete array of running statistics instead of a slice with steps"
        )
    return _address_of_array(running)
