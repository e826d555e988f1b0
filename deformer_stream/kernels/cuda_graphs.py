"""Forward passes of the PyTorch model over a KV cache; on a GPU, passes of common shapes are captured as CUDA graphs.

A forward pass consists of some hundred small operators. A GPU finishes one of them before Python can launch the next. A
CUDA graph holds the launches of a whole pass and replays them at once. A graph has fixed shapes and fixed addresses, so
shapes are rounded up, and inputs are copied to fixed memory. The padding this adds is written to a page of the cache
that no record has. Inputs are sent in one copy from pinned memory, and the results come back in one copy.

The conditionals of the Gaussian prior are computed before each replay, because libraries that factorise matrices do not
guarantee that they can be captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.kernels.kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, KVCacheView, to_tensor
from deformer_stream.model.gaussian_prior import PriorConditional

T = TypeVar("T", NDArray[Any], Tensor)
Floats = NDArray[np.float64]
ForwardPass = Callable[[], Tensor]
"""A forward pass that reads its inputs from fixed memory and returns the score terms."""
Capture = Callable[[ForwardPass], ForwardPass]
"""A function that captures a forward pass and returns a function that replays it."""

MIN_RECORDS, MAX_RECORDS = 16, 1024
"""Passes of fewer records are padded; passes of more records are not captured, because their operators are large."""
MAX_READINGS = 4
"""The largest number of new readings per record for which a pass is captured."""
MAX_GRAPHS = 64
"""Captured shapes that are kept, the most recently used ones."""
NUM_WARM_UP_PASSES = 3
"""Passes before a capture: libraries initialise themselves at their first use, which cannot be captured."""


class ForwardInputs(NamedTuple, Generic[T]):
    """The inputs of a forward pass over L new readings of each of R records.

    Attributes:
        features: (R, L) feature codes, −1 for padding at the end.
        values: (R, L) values in normalised units.
        pages: (R, P) the pages of each record's cached tokens, see `TorchKVCache.locate_tokens`.
        num_tokens: (R,) the number of each record's cached tokens.
        places: (R, T) where the new tokens are written, see `TorchKVCache.allocate_tokens`.
    """

    features: T
    values: T
    pages: T
    num_tokens: T
    places: T


class CudaGraphs:
    """Runs forward passes of a model, writes the new keys and values into a cache, and returns the score terms.

    On a GPU it captures a CUDA graph for each common shape.

    Args:
        model: The model, in eval mode.
        cache: The cache of the records.
    """

    def __init__(self, model: DEformer, cache: TorchKVCache) -> None:
        self.model, self.cache = model, cache
        self.capture = create_capture(model.device)
        self.graph_by_shape: dict[BatchShape, CapturedGraph] = {}  # the most recently used one at the end

    def __call__(self, inputs: ForwardInputs[NDArray[Any]]) -> Floats:
        """Run one forward pass.

        Returns:
            (3, R, L): natural logarithm of the density or mass at each value, natural logarithm of the p-value, and
            centered NLL. The entries of padding have no meaning.
        """
        with torch.inference_mode():
            graph = self._find_or_capture(inputs)
            if graph is not None:
                return graph(inputs, self.compute_prior)
            tensors = ForwardInputs(*(to_tensor(array, self.model) for array in inputs))
            return np.asarray(self.compute_score_terms(tensors, self.compute_prior(tensors)).cpu().numpy())

    def compute_prior(self, inputs: ForwardInputs[Tensor]) -> PriorConditional | None:
        """Return the Gaussian prior's conditionals of the new readings, or None if the model has no prior."""
        cached_readings = self.cache.gather_readings(inputs.pages)
        return self.model.compute_prior(
            inputs.features, inputs.values, KVCacheView((), (), inputs.num_tokens, cached_readings)
        )

    def compute_score_terms(self, inputs: ForwardInputs[Tensor], prior: PriorConditional | None) -> Tensor:
        """Run the network and return the score terms, see `__call__`.

        No operation here depends on what a tensor holds or creates a tensor on the CPU, so all can be captured.
        """
        cached = self.cache.gather_pages(inputs.pages, inputs.num_tokens)
        output = self.model.forward_cached(inputs.features, inputs.values, cached, prior)
        self.cache.write(output, inputs.places)
        conditional = output.conditional
        terms = conditional.compute_score_terms(inputs.values, conditional.compute_surprisal(inputs.values))
        return torch.stack([terms.log_prob, terms.log_p_value, terms.centered_nll]).double()

    def _find_or_capture(self, inputs: ForwardInputs[NDArray[Any]]) -> CapturedGraph | None:
        """Return the graph for the shape of the inputs, captured if necessary; None if such passes are not captured."""
        shape = None if self.capture is None else round_up_shape(inputs)
        if shape is None or self.capture is None:
            return None
        graph = self.graph_by_shape.pop(shape, None)
        if graph is None:
            try:
                graph = CapturedGraph(self, shape, self.capture)
            except RuntimeError as error:  # errors of CUDA are RuntimeErrors, too
                warnings.warn(
                    f"CUDA graphs are not used, scoring on the GPU is slower: {error}", RuntimeWarning, stacklevel=2
                )
                self.capture = None
                return None
        self.graph_by_shape[shape] = graph
        if len(self.graph_by_shape) > MAX_GRAPHS:
            del self.graph_by_shape[next(iter(self.graph_by_shape))]
        return graph


BatchShape = tuple[int, int, int]
"""The shape of a forward pass: number of records, new readings per record, and pages per record."""


def round_up_shape(inputs: ForwardInputs[NDArray[Any]]) -> BatchShape | None:
    """Return the shape to which inputs are padded for a CUDA graph.

    Its numbers are powers of two, so that there are few different shapes. None if a pass is so large that the time to
    launch its operators does not matter.
    """
    (num_records, num_readings), num_pages = inputs.features.shape, inputs.pages.shape[1]
    if num_records > MAX_RECORDS or num_readings > MAX_READINGS:
        return None
    return (
        _round_up_to_power_of_two(max(num_records, MIN_RECORDS)),
        _round_up_to_power_of_two(num_readings),
        _round_up_to_power_of_two(max(num_pages, 1)),
    )


def _round_up_to_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class CapturedGraph:
    """A captured forward pass of one shape, with the memory from which it reads its inputs.

    Args:
        graphs: The model and the cache.
        shape: The shape of the inputs, padding included.
        capture: Captures a forward pass.
    """

    def __init__(self, graphs: CudaGraphs, shape: BatchShape, capture: Capture) -> None:
        (num_records, num_readings, num_pages), model = shape, graphs.model
        padding_page = graphs.cache.padding_page
        padding_place = padding_page * graphs.cache.PAGE_TOKENS
        self.device, is_pinned = model.device, model.device.type == "cuda"
        self.padding: ForwardInputs[Any] = ForwardInputs(
            features=-1, values=0.0, pages=padding_page, num_tokens=0, places=padding_place
        )
        readings_shape = num_records, num_readings
        shapes: ForwardInputs[Any] = ForwardInputs(
            features=readings_shape,
            values=readings_shape,
            pages=(num_records, num_pages),
            num_tokens=(num_records,),
            places=(num_records, num_readings * model.cached_tokens_per_reading),
        )
        dtypes: ForwardInputs[Any] = ForwardInputs(
            features=torch.int64, values=model.dtype, pages=torch.int64, num_tokens=torch.int64, places=torch.int64
        )
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        # All inputs lie in one block of memory, so that they reach the device in one copy.
        self.host_block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
        self.device_block = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.host_result = torch.empty(3, *readings_shape, dtype=torch.float64, pin_memory=is_pinned)

        def split(block: Tensor) -> ForwardInputs[Tensor]:
            parts = zip(torch.split(block, sizes), dtypes, shapes, strict=True)
            return ForwardInputs(*(part.view(dtype).view(shape) for part, dtype, shape in parts))

        self.host_arrays = [part.numpy() for part in split(self.host_block)]
        inputs = split(self.device_block)
        self._send(())  # the pass that is captured consists of padding only, and changes no record's pages
        self.inputs, self.prior = inputs, graphs.compute_prior(inputs)
        self.replay = capture(lambda: graphs.compute_score_terms(inputs, self.prior))

    def __call__(
        self,
        inputs: ForwardInputs[NDArray[Any]],
        compute_prior: Callable[[ForwardInputs[Tensor]], PriorConditional | None],
    ) -> Floats:
        """Replay the pass with new inputs and return the score terms, (3, R, L), see `CudaGraphs.__call__`.

        Args:
            inputs: Inputs that are not larger than the shape of the graph.
            compute_prior: Returns the Gaussian prior's conditionals of the padded inputs.
        """
        num_records, num_readings = inputs.features.shape
        self._send(inputs)
        prior = compute_prior(self.inputs)
        if self.prior is not None and prior is not None:
            for captured, new in zip(self.prior.tensors, prior.tensors, strict=True):
                captured.copy_(new)
        self.host_result.copy_(self.replay(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.host_result[:, :num_records, :num_readings].numpy().copy()

    def _send(self, inputs: ForwardInputs[NDArray[Any]] | tuple[()]) -> None:
        """Copy inputs to the memory of the graph, surrounded by padding; without inputs, padding only."""
        for array, padding in zip(self.host_arrays, self.padding, strict=True):
            array.fill(padding)
        for array, part in zip(self.host_arrays, inputs, strict=False):
            array[tuple(map(slice, part.shape))] = part
        self.device_block.copy_(self.host_block, non_blocking=True)


def create_capture(device: torch.device) -> Capture | None:
    """Return a function that captures CUDA graphs on a device; None if the device is no GPU.

    All graphs share one pool of memory. This is safe, because one replay ends before the next begins.
    """
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(forward_pass: ForwardPass) -> ForwardPass:
        current_stream = torch.cuda.current_stream(device)
        stream.wait_stream(current_stream)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UP_PASSES):
                forward_pass()
        current_stream.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only operations of this thread are captured: another thread may be reading a model onto the device.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = forward_pass()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture
