"""Python and C describe the same structures, and arrays are checked before compiled code reads them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.errors import InvariantViolated
from deformer_stream.kernels import abi
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.kernels.kv_cache import CpuKVCache, PagePool
from deformer_stream.kernels.library import load_library
from deformer_stream.model.constants import ACTIVATION_CODES
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.layers import ACTIVATIONS
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import make_model

SOURCES = Path(abi.__file__).parent / "csrc"
CONFIG = ModelConfig(d_model=64, layers=1, heads=4, feedforward=32, mixtures=2, embedding=4, hidden=(8,), gaussians=2)
SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(3)))


def load_kernels() -> Any:
    library = load_library(False)
    assert library is not None, "the tests need compiled kernels: run `make kernels`"
    return library


def read_c_fields(name: str) -> list[str]:
    """Return the names of a structure's fields in csrc/abi.h, in their order."""
    header = re.sub(r"/\*.*?\*/", "", (SOURCES / "abi.h").read_text(), flags=re.DOTALL)
    structs = re.findall(r"typedef struct \{([^}]*)\} (\w+);", header)
    (body,) = (body for body, struct_name in structs if struct_name == name)
    fields = []
    for declaration in body.split(";"):
        pointer_to_function = re.search(r"\(\*(\w+)\)", declaration)
        if pointer_to_function:
            fields.append(pointer_to_function[1])
        else:
            fields += [re.findall(r"\w+", part)[-1] for part in declaration.split(",") if part.strip()]
    return fields


@pytest.mark.parametrize("struct", abi.STRUCTS)
def test_structures_have_the_fields_of_the_header_in_their_order(struct: type[abi.KernelStruct]) -> None:
    assert list(struct.kinds) == read_c_fields(struct.__name__)


def test_library_matches_this_module() -> None:
    assert abi.find_differences(load_kernels()) == []


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("ABI_VERSION", 999, f"the library has ABI version {abi.ABI_VERSION}, but Python needs version 999"),
        ("RUNNING_STATE_BYTES", 48, "structure RunningState has 72 bytes in the library, but 48 in Python"),
        ("CONSTANTS", {"LINEAR_LIMIT": 9.0}, "constant LINEAR_LIMIT is 8.0 in the library, but 9.0 in Python"),
        ("CONSTANTS", {"NO_SUCH": 1.0}, "constant NO_SUCH is nan in the library, but 1.0 in Python"),
    ],
)
def test_tampered_description_is_reported(
    name: str, value: Any, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abi, name, value)
    assert abi.find_differences(load_kernels()) == [difference]


def test_library_without_a_description_is_reported() -> None:
    (difference,) = abi.find_differences(ctypes.CDLL(None))
    assert "abi_version" in difference


def test_every_activation_of_the_model_is_known_to_the_kernels() -> None:
    for name in ACTIVATIONS:
        code = load_kernels().constant_value(f"ACTIVATION_{name.upper()}".encode())
        assert code == ACTIVATION_CODES[name]


def small_batch(kernels: CpuKernels) -> tuple[CpuKVCache, RaggedBatch]:
    cache = kernels.create_cache(1 << 20)
    cache.ensure_capacity(1)
    cache.allocate_all(np.array([0]), np.array([3]))
    arrays = np.arange(3), np.zeros(3, np.float32), np.array([0, 3]), np.array([0])
    return cache, RaggedBatch(*arrays, page_table=cache.page_table)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "features",
            np.arange(3, dtype=np.int32),
            "Batch.features has dtype int32, but the compiled kernels need int64",
        ),
        ("values", np.zeros(3), "Batch.values has dtype float64, but the compiled kernels need float32"),
        ("values", np.zeros(6, np.float32)[::2], "Batch.values is not contiguous"),
        ("depths", [0, 1, 2], "Batch.depths is a list, but the compiled kernels need an array"),
        ("page_table", np.zeros((1, 9), np.int64)[:, ::3], "Batch.page_table is not contiguous"),
        ("values", torch.zeros(3), "Batch.values is a Tensor, but the compiled kernels need an array"),
    ],
)
def test_array_that_does_not_fit_is_refused_by_name(name: str, wrong: Any, message: str) -> None:
    kernels = CpuKernels(make_model(SCHEMA, CONFIG, 0, torch.float32), load_kernels())
    cache, batch = small_batch(kernels)
    assert np.isfinite(kernels.score(cache, batch)).all()
    fields = {field: getattr(batch, field) for field in RaggedBatch.__slots__}
    with pytest.raises(TypeError, match=message):
        kernels.score(cache, RaggedBatch(**(fields | {name: wrong})))


@pytest.mark.parametrize("array", [np.arange(6.0), np.zeros((0, 3)), np.zeros(2, bool), np.arange(8)[2:]])
@pytest.mark.parametrize("is_writeable", [True, False])
def test_address_is_that_of_the_first_element(array: Any, is_writeable: bool) -> None:
    array.flags.writeable = is_writeable
    assert abi.address_of(array, array.dtype, "array") == array.ctypes.data


def test_running_statistics_of_another_size_are_refused() -> None:
    with pytest.raises(TypeError, match="`running` has 80 bytes per record, but the compiled kernels need 72"):
        abi.running_address(np.zeros(2, np.dtype([("x", np.float64, 10)])))
    with pytest.raises(TypeError, match="`running` is not contiguous"):
        abi.running_address(np.zeros(4, np.dtype([("x", np.float64, 9)]))[::2])


def test_structure_needs_exactly_its_fields() -> None:
    with pytest.raises(TypeError, match="missing or unknown: bias, offset"):
        abi.LinearMap(inputs=1, columns=32, weights=None, offset=None)


def test_batch_for_which_there_are_no_pages_is_refused() -> None:
    """The kernels would write to pages of other records."""
    pool = PagePool(4, (lambda num_readings: num_readings,), 64, 4 * 64)
    pool.ensure_capacity(2)
    pool.mark_in_use(np.array([0, 1]))
    with pytest.raises(InvariantViolated, match="no pages for 1 of 2 records"):
        pool.allocate_all(np.array([0, 1]), np.array([3, 3]))
