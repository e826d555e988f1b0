"""Forward passes of the PyTorch model over a KV cache; on a GPU, passes of common shapes are captured as CUDA graphs.

A forward pass consists of some hundred small operators, and a GPU finishes each of them before Python can launch the
next one. A CUDA graph contains the launches of a whole pass and replays them at once. Its shapes and addresses are
fixed. Therefore shapes are rounded up, and inputs are copied to fixed memory: in one copy, from pinned memory. The
tokens of the padding that this adds are written to a page of the cache that belongs to no record.

The conditionals of the Gaussian prior are inputs of the network. They are computed before each replay, because
libraries that factorise matrices do not guarantee that they can be captured.
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

from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, KVCacheView, to_tensor
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.score_terms import count_score_terms

T = TypeVar("T", NDArray[Any], Tensor)
Floats = NDArray[np.float64]
ForwardPass = Callable[[], Tensor]
"""A function that runs a forward pass on inputs in fixed memory. It returns the score terms (`model.score_terms`) of R
records with L readings each, (3 or 4, R, L)."""
Capture = Callable[[ForwardPass], ForwardPass]
"""A function that captures a forward pass as a CUDA graph, and returns a function that replays the graph."""

MIN_RECORDS, MAX_RECORDS = 16, 1024
"""Numbers of records of captured passes. A pass with fewer records is padded to the minimum. A pass with more than the
maximum is not captured: its operators are so large that the time to launch them does not matter."""
MAX_READINGS = 4
"""The largest number of new readings per record for which a pass is captured."""
MAX_GRAPHS = 64
"""The largest number of captured graphs that are kept. If there are more, the least recently used one is dropped."""
NUM_WARM_UP_PASSES = 3
"""Number of passes that are executed before a capture, because libraries initialise themselves at their first uses and
this initialisation cannot be captured."""


class ForwardInputs(NamedTuple, Generic[T]):
    """The inputs of a forward pass over L new readings of each of R records, as NumPy arrays or as tensors.

    Attributes:
        features: (R, L) feature codes; −1 for padding at the end.
        values: (R, L) values in normalised units, or label codes.
        pages: (R, P) for each record the indexes of the pages (fixed-size blocks of the KV cache) that hold its earlier
            tokens, padded at the end to P pages; from `TorchKVCache.locate_tokens`.
        num_tokens: (R,) the number of cached tokens of each record.
        token_places: (R, T) for each of the T new tokens of a record its place in the cache: the index of its page
            times `PAGE_TOKENS`, plus its position in the page; from `TorchKVCache.allocate_tokens`.
    """

    features: T
    values: T
    pages: T
    num_tokens: T
    token_places: T


class CudaGraphs:
    """A runner of forward passes of one model over one KV cache, which captures CUDA graphs on a GPU.

    A pass scores new readings, and writes their keys and values into the cache. On a GPU, a pass of a common shape is
    captured the first time and replayed afterwards, because that is faster than to launch its operators one by one.

    Args:
        model: The model, in eval mode.
        cache: The cache of the records.

    Attributes:
        capture: The function that captures a pass; None if the device is no GPU or a capture has failed.
        graph_by_shape: The captured graphs by the shape of their inputs, the most recently used one at the end.
    """

    def __init__(self, model: DEformer, cache: TorchKVCache) -> None:
        self.model, self.cache = model, cache
        self.capture = create_capture(model.device)
        self.graph_by_shape: dict[BatchShape, CapturedGraph] = {}

    def __call__(
        self, inputs: ForwardInputs[NDArray[Any]], ages: Floats | None = None, has_others: bool = False
    ) -> Floats:
        """Run one forward pass over the new readings of R records, and write their keys and values into the cache.

        Args:
            inputs: The inputs, with L readings per record; records with fewer new readings are padded.
            ages: (R, L) float64 seconds from the origin of the record to each reading, if readings are irregular. Such
                passes are not captured.
            has_others: Whether to return the row `LOG_P_PRIOR` given the readings of other sensors only. The model must
                have a Gaussian process.

        Returns:
            (3 or 4, R, L) the score terms of each reading (`model.score_terms`). Those of padding have no meaning.
        """
        with torch.inference_mode():
            graph = self._find_or_capture(inputs) if ages is None else None
            if graph is not None:
                return graph(inputs, self.compute_prior)
            # Without a graph, the operators are executed one by one.
            tensors = ForwardInputs(*(to_tensor(array, self.model) for array in inputs))
            # Ages stay float64, whatever the dtype of the model.
            age_tensor = None if ages is None else torch.from_numpy(ages).to(self.model.device)
            prior = self.compute_prior(tensors, age_tensor)
            log_p_others = self._compute_log_p_others(tensors, age_tensor) if has_others else None
            if log_p_others is not None:
                terms = self.compute_score_terms(tensors, prior, age_tensor)
                return np.asarray(torch.cat([terms, log_p_others.unsqueeze(0)]).cpu().numpy())
            return np.asarray(self.compute_score_terms(tensors, prior, age_tensor).cpu().numpy())

    def compute_prior(self, inputs: ForwardInputs[Tensor], ages: Tensor | None = None) -> PriorConditional | None:
        """Return the distributions of the new readings, (R, L), under the Gaussian prior; None if the model has none.

        Args:
            inputs: The inputs of a forward pass, with L new readings for each of R records. Earlier readings are read
                from the pages of the cache.
            ages: (R, L) seconds from the origin of the record to each reading, if readings are irregular.
        """
        return self.model.compute_prior(inputs.features, inputs.values, self._view_readings(inputs), ages)

    def _compute_log_p_others(self, inputs: ForwardInputs[Tensor], ages: Tensor | None) -> Tensor | None:
        """Return ln of the p-values of the new readings given the readings of other sensors only, (R, L)."""
        if ages is None:
            return None
        return self.model.compute_log_p_others(inputs.features, inputs.values, self._view_readings(inputs), ages)

    def _view_readings(self, inputs: ForwardInputs[Tensor]) -> KVCacheView:
        """Return a view of the cached readings, from which the prior is computed, without keys and values of layers."""
        cached_readings, cached_ages = self.cache.gather_readings(inputs.pages), self.cache.gather_ages(inputs.pages)
        return KVCacheView((), (), inputs.num_tokens, cached_readings, cached_ages)

    def compute_score_terms(
        self, inputs: ForwardInputs[Tensor], prior: PriorConditional | None, ages: Tensor | None = None
    ) -> Tensor:
        """Run the network, write the new keys and values into the cache, and return the score terms.

        A CUDA graph can capture this method, because no operation depends on the contents of a tensor or creates a
        tensor on the CPU.

        Args:
            inputs: The inputs, with L new readings for each of R records.
            prior: The result of `compute_prior` for these inputs.
            ages: (R, L) seconds from the origin of the record to each reading, if readings are irregular.

        Returns:
            (3 or 4, R, L) the score terms of each reading (`model.score_terms`). There are 4 only if p-values under the
            Gaussian prior alone are a term of the alert.
        """
        cached = self.cache.gather_pages(inputs.pages, inputs.num_tokens)
        output = self.model.forward_cached(inputs.features, inputs.values, cached, prior, ages)
        self.cache.write(output, inputs.token_places)
        conditional = output.conditional
        terms = conditional.compute_score_terms(inputs.values, conditional.compute_surprisal(inputs.values))
        return terms.stack().double()

    def _find_or_capture(self, inputs: ForwardInputs[NDArray[Any]]) -> CapturedGraph | None:
        """Return the CUDA graph for inputs of this shape, and capture it if there is none yet.

        Returns:
            The graph. None if there is no GPU, or if an earlier capture has failed. None also if the inputs have too
            many records or too many readings per record, so that a graph would not be faster.
        """
        if self.capture is None:  # there is no GPU, or an earlier capture has failed
            return None
        # A graph can be replayed for one shape only. Inputs are padded to a larger shape, so that few graphs suffice.
        shape = round_up_shape(inputs)
        if shape is None:  # too many records or readings
            return None
        # The graph is removed, and inserted again at the end, so that graphs are in the order of their last use.
        graph = self.graph_by_shape.pop(shape, None)
        if graph is None:
            try:
                graph = CapturedGraph(self, shape, self.capture)
            except RuntimeError as error:  # errors of CUDA are RuntimeErrors, too
                warnings.warn(
                    f"scoring on the GPU is slower, because a CUDA graph could not be captured: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self.capture = None  # so that it is not tried again for every pass
                return None
        self.graph_by_shape[shape] = graph
        if len(self.graph_by_shape) > MAX_GRAPHS:
            least_recently_used = next(iter(self.graph_by_shape))
            del self.graph_by_shape[least_recently_used]
        return graph


BatchShape = tuple[int, int, int]
"""The shape of a forward pass: number of records, number of new readings per record, number of pages per record."""


def round_up_shape(inputs: ForwardInputs[NDArray[Any]]) -> BatchShape | None:
    """Return the shape to which inputs are padded for a CUDA graph, or None if such a pass is not captured.

    The shape is (records, new readings per record, pages per record). The numbers are powers of two, so that there are
    few different shapes. A pass with more than `MAX_RECORDS` records or `MAX_READINGS` new readings per record is not
    captured: its operators take so long that the time to launch them does not matter.
    """
    (num_records, num_readings), num_pages = inputs.features.shape, inputs.pages.shape[1]
    if num_records > MAX_RECORDS or num_readings > MAX_READINGS:
        return None
    return (
        _round_up_to_power_of_two(max(num_records, MIN_RECORDS)),  # a minimum, so that small passes share a graph
        _round_up_to_power_of_two(num_readings),
        _round_up_to_power_of_two(max(num_pages, 1)),  # 0 pages if all records are new
    )


def _round_up_to_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`, which must be positive."""
    return 1 << (n - 1).bit_length()


class CapturedGraph:
    """The CUDA graph of a forward pass of one shape, with the fixed memory from which it reads its inputs.

    Args:
        graphs: The runner with the model and the KV cache.
        shape: The shape of the inputs, padding included: number of records, of new readings per record, and of pages
            per record.
        capture: The function that captures a forward pass.
    """

    def __init__(self, graphs: CudaGraphs, shape: BatchShape, capture: Capture) -> None:
        model, cache = graphs.model, graphs.cache
        num_records, num_readings, num_pages = shape
        self.device, is_pinned = model.device, model.device.type == "cuda"
        # The values that fill positions without a reading. Padding is read from one additional page of the cache and
        # written to another one, so that it changes no record.
        self.padding: ForwardInputs[Any] = ForwardInputs(
            features=-1,
            values=0.0,
            pages=cache.blank_page,
            num_tokens=0,
            token_places=cache.padding_page * cache.PAGE_TOKENS,
        )
        readings_shape = num_records, num_readings
        shapes: ForwardInputs[Any] = ForwardInputs(
            features=readings_shape,
            values=readings_shape,
            pages=(num_records, num_pages),
            num_tokens=(num_records,),
            token_places=(num_records, num_readings * model.cached_tokens_per_reading),
        )
        dtypes: ForwardInputs[Any] = ForwardInputs(
            features=torch.int64,
            values=model.dtype,
            pages=torch.int64,
            num_tokens=torch.int64,
            token_places=torch.int64,
        )
        num_bytes = [prod(size) * dtype.itemsize for size, dtype in zip(shapes, dtypes, strict=True)]
        # All inputs lie in one block of memory, so that one copy transfers them to the device.
        self.host_block = torch.empty(sum(num_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        self.device_block = torch.empty(sum(num_bytes), dtype=torch.uint8, device=self.device)
        num_terms = count_score_terms(model.config.alert_prior)
        self.host_result = torch.empty(num_terms, *readings_shape, dtype=torch.float64, pin_memory=is_pinned)

        def split(block: Tensor) -> ForwardInputs[Tensor]:
            """Return a view of each input in a block of bytes, with the dtype and the shape of the input."""
            pieces = zip(torch.split(block, num_bytes), dtypes, shapes, strict=True)
            return ForwardInputs(*(piece.view(dtype).view(size) for piece, dtype, size in pieces))

        self.host_arrays = [tensor.numpy() for tensor in split(self.host_block)]
        inputs = split(self.device_block)
        self._send(())  # the pass that is captured consists of padding only, and changes no record's pages
        # A graph always reads from the addresses that it read at the capture: those of `inputs` and `self.prior`. The
        # prior is computed outside the graph, because the libraries that factorise its matrices may not be capturable.
        self.inputs, self.prior = inputs, graphs.compute_prior(inputs)
        self.replay = capture(lambda: graphs.compute_score_terms(inputs, self.prior))

    def __call__(
        self,
        inputs: ForwardInputs[NDArray[Any]],
        compute_prior: Callable[[ForwardInputs[Tensor]], PriorConditional | None],
    ) -> Floats:
        """Replay the pass with new inputs, which also writes the new keys and values into the cache.

        Args:
            inputs: The inputs, L new readings of each of R records. They must not be larger than the graph's shape.
            compute_prior: A function that returns the distributions of the padded inputs under the Gaussian prior (an
                input of the network), or None if the model has no prior. The graph does not contain its operators.

        Returns:
            The score terms of the new readings, (3 or 4, R, L), as `CudaGraphs.compute_score_terms` returns them.
        """
        num_records, num_readings = inputs.features.shape
        self._send(inputs)
        prior = compute_prior(self.inputs)
        if self.prior is not None and prior is not None:
            # The graph reads the prior from the tensors that existed when the pass was captured.
            for captured, new in zip(self.prior.tensors, prior.tensors, strict=True):
                captured.copy_(new)
        self.host_result.copy_(self.replay(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # until the copy has ended
        # The first entries are those of the inputs, without padding. The next call overwrites them, so return a copy.
        return self.host_result[:, :num_records, :num_readings].numpy().copy()

    def _send(self, inputs: ForwardInputs[NDArray[Any]] | tuple[()]) -> None:
        """Copy inputs, padded to the graph's shape, to the memory on the device from which the graph reads.

        Args:
            inputs: The inputs of a pass, at most as large as the graph's shape; or an empty tuple to copy only padding.
        """
        for host_array, padding in zip(self.host_arrays, self.padding, strict=True):
            host_array.fill(padding)
        for host_array, array in zip(self.host_arrays, inputs, strict=False):  # not strict: `inputs` may be empty
            first_entries = tuple(slice(length) for length in array.shape)
            host_array[first_entries] = array
        self.device_block.copy_(self.host_block, non_blocking=True)


def create_capture(device: torch.device) -> Capture | None:
    """Return a function that captures forward passes on a device as CUDA graphs; None if the device is no GPU.

    All graphs that it captures share one pool of memory for intermediate results. This is safe, because each replay
    ends before the next one begins.
    """
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(forward_pass: ForwardPass) -> ForwardPass:
        """Capture the operators of a forward pass as a CUDA graph, and return a function that replays them."""
        # CUDA cannot capture the default stream, so warm-up and capture use another one. Each stream waits for the
        # other, because the passes read and write the same tensors.
        current_stream = torch.cuda.current_stream(device)
        stream.wait_stream(current_stream)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UP_PASSES):  # libraries initialise themselves, which cannot be captured
                forward_pass()
        current_stream.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only operations of this thread are captured: another thread may be reading a model onto the device.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = forward_pass()

        def replay() -> Tensor:
            """Replay the graph, and return the tensor into which it writes its result at each replay."""
            graph.replay()
            return result

        return replay

    return capture
