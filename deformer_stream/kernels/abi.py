"""The structures and constants that Python shares with the compiled kernels.

`csrc/abi.h` declares the same structures in C. `find_differences` compares both sides when a library is loaded, because
a library with another layout would read wrong memory. The constructor of a structure checks the arrays it gets.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.distributions import MAX_LOG_SCALE_CHANGE
from deformer_stream.model.gaussian_prior import MAX_CONDITIONING_VALUE
from deformer_stream.model.layers import ACTIVATIONS
from deformer_stream.model.schema import LINEAR_LIMIT

ABI_VERSION = 1
"""The version of the meaning of all fields; csrc/abi.h has the same number."""

COLUMNS = 32
"""Columns of a tile of packed weights: the number of outputs of a linear map is padded to a multiple of it."""
KV_PAGE_TOKENS = 16
"""Tokens of a page of the KV cache: a vector of the processor has sixteen lanes, one for each token's score."""
MAX_HEADS = 64
"""The largest number of attention heads for which the kernels have space."""
PRIOR_LANES = 8
"""Components of the Gaussian prior side by side: a vector of the processor holds eight doubles."""
ROW_EXTRA_VECTORS = 5
"""Vectors that a reading leaves in the KV cache for the Gaussian prior, besides its row of the Cholesky factor."""

CONSTANTS: dict[str, float] = {
    "COLUMNS": COLUMNS,
    "KV_PAGE_TOKENS": KV_PAGE_TOKENS,
    "MAX_HEADS": MAX_HEADS,
    "PRIOR_LANES": PRIOR_LANES,
    "ROW_EXTRA_VECTORS": ROW_EXTRA_VECTORS,
    "MAX_CONDITIONING_VALUE": MAX_CONDITIONING_VALUE,
    "LINEAR_LIMIT": LINEAR_LIMIT,
    "MAX_LOG_SCALE_CHANGE": MAX_LOG_SCALE_CHANGE,
    **{f"ACTIVATION_{name.upper()}": activation.kernel_code for name, activation in ACTIVATIONS.items()},
}
"""Constants that both sides define, by the name that they have in C."""

INTEGER, REAL, ADDRESS = "integer", "real", "address"
"""Kinds of fields that are no arrays: an int64, a double, and the address of another structure or of a function."""

Kind = str | np.dtype[Any]
"""What a field is: one of the kinds above, or the dtype of the array whose address it holds."""

_INT64, _FLOAT32, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float64)
_BOOL, _BYTES = np.dtype(np.bool_), np.dtype(np.uint8)
_FACTORS = "factors"
"""Packed factors of products: float32, or bfloat16, for which NumPy has no dtype."""

_TORCH_DTYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    _INT64: (torch.int64,),
    _FLOAT32: (torch.float32,),
    _FLOAT64: (torch.float64,),
    _FACTORS: (torch.float32, torch.bfloat16),
}
_C_OBJECTS = (ctypes.Structure, ctypes.Array, ctypes.c_int64)
_C_TYPES: dict[Kind, Any] = {INTEGER: ctypes.c_int64, REAL: ctypes.c_double}


def address_of(value: Any, kind: Kind, name: str) -> int | None:
    """Return the address of an array's first element for compiled code, after checking that the array fits.

    Args:
        value: A NumPy array, a tensor, or None for a null pointer.
        kind: The dtype that compiled code expects.
        name: What the array is, for the error message.

    Raises:
        TypeError: The array has another dtype, is not contiguous, or is not in the memory of the CPU.
    """
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        if value.dtype != kind:
            raise TypeError(f"{name} has dtype {value.dtype}, the compiled kernels need {kind}: convert the array")
        if not value.flags.c_contiguous:
            raise TypeError(f"{name} is not contiguous: pass numpy.ascontiguousarray of it to the compiled kernels")
        return int(value.ctypes.data)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, the compiled kernels need an array or a tensor")
    if value.dtype not in _TORCH_DTYPES.get(kind, ()):
        raise TypeError(f"{name} has dtype {value.dtype}, the compiled kernels need {kind}: convert the tensor")
    if not value.is_contiguous():
        raise TypeError(f"{name} is not contiguous: pass its contiguous() to the compiled kernels")
    if value.device.type != "cpu":
        raise TypeError(f"{name} is on {value.device}, the compiled kernels need it in CPU memory: pass its cpu()")
    return int(value.data_ptr())


class KernelStruct(ctypes.Structure):
    """A structure of csrc/abi.h.

    The constructor takes every field by keyword. A field of a dtype takes an array or tensor of that dtype, of which it
    stores the address. An address field takes another structure, an address as a number, or None for a null pointer.
    The structure keeps all of them alive.

    Attributes:
        kinds: What each field is, in the order of the fields in C.

    Raises:
        TypeError: A field is missing, or an array does not fit (see `address_of`).
    """

    kinds: ClassVar[dict[str, Kind]]
    _steps: ClassVar[list[tuple[str, Kind, bool, str]]]  # field, kind, whether it is an array, name for messages

    def __init_subclass__(cls) -> None:
        cls._steps = [
            (name, kind, isinstance(kind, np.dtype) or kind == _FACTORS, f"{cls.__name__}.{name}")
            for name, kind in cls.kinds.items()
        ]

    def __init__(self, **values: Any) -> None:
        if values.keys() != self.kinds.keys():
            wrong = ", ".join(sorted(values.keys() ^ self.kinds.keys()))
            raise TypeError(f"{type(self).__name__} needs exactly its own fields; missing or unknown: {wrong}")
        super().__init__(
            *[
                address_of(values[name], kind, label) if is_array else _to_number(values[name])
                for name, kind, is_array, label in self._steps
            ]
        )
        self.referenced = values


def _to_number(value: Any) -> Any:
    """Return a number as it is, and the address of an object of ctypes."""
    return ctypes.addressof(value) if isinstance(value, _C_OBJECTS) else value


def pack_array(struct_type: type[KernelStruct], structs: Sequence[KernelStruct]) -> Any:
    """Return a C array of structures, which keeps alive what the structures point to."""
    array: Any = (struct_type * len(structs))(*structs)
    array.referenced = list(structs)
    return array


def _c_fields(kinds: dict[str, Kind]) -> list[tuple[str, Any]]:
    return [(name, _C_TYPES.get(kind, ctypes.c_void_p)) for name, kind in kinds.items()]


class Layer(KernelStruct):
    """The weights of a Transformer layer."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias"), _FLOAT32),
        **dict.fromkeys(("qkv_bias", "out_bias", "up_bias", "down_bias"), _FLOAT32),
        **dict.fromkeys(("qkv", "out", "up", "down"), _FACTORS),
    }
    _fields_ = _c_fields(kinds)


class LinearMap(KernelStruct):
    """A linear map in float32, its columns padded to a multiple of `COLUMNS`."""

    kinds: ClassVar[dict[str, Kind]] = {
        "inputs": INTEGER,
        "columns": INTEGER,
        "weights": _FLOAT32,
        "bias": _FLOAT32,
    }
    _fields_ = _c_fields(kinds)


class TokenEncoder(KernelStruct):
    """The weights that make tokens from readings."""

    kinds: ClassVar[dict[str, Kind]] = {
        "width": INTEGER,
        "num_maps": INTEGER,
        **dict.fromkeys(("identity", "feature_share", "value_share", "cycle", "label_share"), _FLOAT32),
        "first_label_row": _INT64,
        "num_labels": _INT64,
        "maps": ADDRESS,
        "prior_map": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class Prior(KernelStruct):
    """The parameters of the Gaussian prior (a mixture whose exact conditionals are given to the network)."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_components", "padded_components", "num_features"), INTEGER),
        **dict.fromkeys(("log_weights", "means", "covariances"), _FLOAT64),
        **dict.fromkeys(("row_page", "row_place", "column_by_code"), _INT64),
    }
    _fields_ = _c_fields(kinds)


class Head(KernelStruct):
    """The weights that make conditionals from the network's outputs."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("num_components", "num_prior_components", "num_labels"), INTEGER),
        **dict.fromkeys(("norm_weight", "norm_bias", "scale_floor", "unseen_log_mass"), _FLOAT32),
        "label_counts": _INT64,
        "mixture_map": ADDRESS,
        "adjust_map": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class Network(KernelStruct):
    """A model."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("d", "num_heads", "feedforward", "num_layers"), INTEGER),
        **dict.fromkeys(("tokens_per_reading", "is_pre_norm", "activation"), INTEGER),
        **dict.fromkeys(("layers", "encoder", "prior", "head"), ADDRESS),
    }
    _fields_ = _c_fields(kinds)


class Batch(KernelStruct):
    """New readings of several records, which the network scores."""

    kinds: ClassVar[dict[str, Kind]] = {
        "network": ADDRESS,
        "features": _INT64,
        "values": _FLOAT32,
        **dict.fromkeys(("offsets", "query_offsets", "num_cached", "depths", "page_table"), _INT64),
        "page_pool": _BYTES,
        **dict.fromkeys(("prior_log_weights", "prior_means", "prior_scales"), _FLOAT32),
        "hidden": _FLOAT32,
        "score_terms": _FLOAT32,
        "next_unit": ADDRESS,
        **dict.fromkeys(("num_records", "page_table_columns", "page_bytes", "tokens_per_unit"), INTEGER),
    }
    _fields_ = _c_fields(kinds)


class SurprisalTask(KernelStruct):
    """Values whose surprisals under mixtures of Gaussians are computed."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("log_weights", "means", "scales", "values"), _FLOAT32),
        **dict.fromkeys(("surprisal", "minimum", "mean", "variance"), _FLOAT32),
        "num_readings": INTEGER,
        "num_components": INTEGER,
        "next_reading": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class QuantileTask(KernelStruct):
    """Mixtures of Gaussians whose quantiles are computed."""

    kinds: ClassVar[dict[str, Kind]] = {
        **dict.fromkeys(("log_weights", "means", "scales", "levels", "quantiles"), _FLOAT32),
        **dict.fromkeys(("num_readings", "num_components", "num_levels"), INTEGER),
        "next_reading": ADDRESS,
    }
    _fields_ = _c_fields(kinds)


class AdvanceTask(KernelStruct):
    """New score terms by which the running statistics of records advance."""

    kinds: ClassVar[dict[str, Kind]] = {
        "record_index": _INT64,
        "offsets": _INT64,
        "score_terms": _FLOAT64,
        "is_scored": _BOOL,
        "is_decided": _BOOL,
        "running": ADDRESS,
        "out": _FLOAT64,
        "num_records": INTEGER,
        "p_value_exponent": REAL,
    }
    _fields_ = _c_fields(kinds)


class ThreadTeam(KernelStruct):
    """A function of the library that several threads execute together."""

    kinds: ClassVar[dict[str, Kind]] = {
        "function": ADDRESS,
        "task": ADDRESS,
        "calls_left": INTEGER,
        "failed": INTEGER,
    }
    _fields_ = _c_fields(kinds)


STRUCTS: tuple[type[KernelStruct], ...] = (
    *(Layer, LinearMap, TokenEncoder, Prior, Head, Network),
    *(Batch, SurprisalTask, QuantileTask, AdvanceTask, ThreadTeam),
)
RUNNING_STATE_BYTES = 56
"""Size of a record's running statistics, the C structure RunningState: `RUNNING_DTYPE` of the engine."""


def find_differences(library: ctypes.CDLL) -> list[str]:
    """Compare a library with this module: version, sizes of all structures, and shared constants.

    Returns:
        One sentence for each difference; the library must not be used unless the list is empty.
    """
    try:
        version, struct_size, constant_value = library.abi_version, library.struct_size, library.constant_value
    except AttributeError as error:
        return [f"the library does not export the functions that describe it: {error}"]
    version.restype = struct_size.restype = ctypes.c_int64
    struct_size.argtypes = constant_value.argtypes = [ctypes.c_char_p]
    constant_value.restype = ctypes.c_double
    found = [] if version() == ABI_VERSION else [f"ABI version {version()} in the library, {ABI_VERSION} in Python"]
    sizes = {struct.__name__: ctypes.sizeof(struct) for struct in STRUCTS} | {"RunningState": RUNNING_STATE_BYTES}
    for name, size in sizes.items():
        if (in_library := struct_size(name.encode())) != size:
            found.append(f"structure {name} has {in_library} bytes in the library, {size} in Python")
    for name, value in CONSTANTS.items():
        in_library = constant_value(name.encode())
        if math.isnan(in_library) or in_library != value:
            found.append(f"constant {name} is {in_library} in the library, {value} in Python")
    return found


def running_address(running: NDArray[np.void]) -> int:
    """Return the address of an array of running statistics.

    Raises:
        TypeError: The entries of the array have another size than in compiled code, or it is not contiguous.
    """
    if running.dtype.itemsize != RUNNING_STATE_BYTES:
        size = running.dtype.itemsize
        raise TypeError(f"running has {size} bytes per record, the compiled kernels need {RUNNING_STATE_BYTES}")
    if not running.flags.c_contiguous:
        raise TypeError("running is not contiguous: the compiled kernels would write to the wrong records")
    return int(running.ctypes.data)
