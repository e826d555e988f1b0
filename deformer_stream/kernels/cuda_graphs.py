"""Passes of readings through the network by PyTorch's operators; on a GPU those of common shapes are recorded.

A pass is some hundreds of small operators. A GPU is done with one of them before it can be told of the next, so it is
told of all of them once (a CUDA graph) and from then on to do them again. What is recorded has fixed shapes and finds
its arrays in fixed memory: shapes are rounded up, and what that adds is padding, which goes to a page that no record
has; arrays go over in one copy from pinned memory, judgements come back in one, and only then does anybody wait.

The libraries that factorise matrices do not promise to be recordable, so the Gaussians are asked beforehand.
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

from deformer_stream.kernels.kv_cache import PAGE_TOKENS, KeyValueCache
from deformer_stream.model.deformer import DEformer, KVCacheView, to_tensor
from deformer_stream.model.gaussian_prior import PriorConditional

T = TypeVar("T", NDArray[Any], Tensor)
Floats = NDArray[np.float64]
Work = Callable[[], Tensor]
Recorder = Callable[[Work], Work]
"""From what is to be done again and again, on the same memory, to a quicker way to do just that."""

FEWEST_RECORDS, MOST_RECORDS = 16, 1024
MOST_READINGS = 4
MOST_RECORDED = 64
"""Shapes that stay recorded, those used last."""
WARM_UPS = 3
"""Libraries make themselves ready when they are used for the first time, which cannot be recorded."""


class ForwardInputs(NamedTuple, Generic[T]):
    """New readings of R records. features: (R, L) codes, −1 for padding, at the end. values: (R, L) normalised units.
    pages, tokens: where what came before is, `KeyValueCache.seen`. places: where they go, `KeyValueCache.room`."""

    features: T
    values: T
    pages: T
    tokens: T
    places: T


class CudaGraphs:
    """How readings go through a model in eval mode, and leave their keys and values in a cache."""

    def __init__(self, model: DEformer, cache: KeyValueCache) -> None:
        self.model, self.cache = model, cache
        self.record = recorder(model.device)
        self.recorded: dict[Shape, CapturedGraph] = {}  # the one used last at the end

    def __call__(self, new: ForwardInputs[NDArray[Any]]) -> Floats:
        """ln p, ln of the p-value and excess of each reading, (3, R, L); of no meaning where there is padding."""
        with torch.inference_mode():
            recorded = self._recorded(new)
            if recorded is not None:
                return recorded(new, self.expected)
            given = ForwardInputs(*(to_tensor(array, self.model) for array in new))
            return np.asarray(self.judged(given, self.expected(given)).cpu().numpy())

    def expected(self, given: ForwardInputs[Tensor]) -> PriorConditional | None:
        """What the Gaussians expect of the readings."""
        past = KVCacheView((), (), given.tokens, self.cache.told(given.pages))
        return self.model.compute_prior(given.features, given.values, past)

    def judged(self, given: ForwardInputs[Tensor], guide: PriorConditional | None) -> Tensor:
        """See `__call__`. Nothing here looks at what tensors hold or makes one on the CPU, so it can be recorded."""
        past = self.cache.past(given.pages, given.tokens)
        told = self.model.forward_cached(given.features, given.values, past, guide)
        self.cache.keep(told, given.places)
        judged = told.conditional.compute_score_terms(given.values, told.conditional.compute_surprisal(given.values))
        return torch.stack([judged.log_prob, judged.log_p_value, judged.centered_nll]).double()

    def _recorded(self, new: ForwardInputs[NDArray[Any]]) -> CapturedGraph | None:
        """What was recorded for passes of such a shape, or is now, where the shape is a common one."""
        shape = None if self.record is None else common(new)
        if shape is None or self.record is None:
            return None
        recorded = self.recorded.pop(shape, None)
        if recorded is None:
            try:
                recorded = CapturedGraph(self, shape, self.record)
            except RuntimeError as error:  # CUDA's own errors are such, too
                warnings.warn(f"operators are started one by one, for: {error}", RuntimeWarning, stacklevel=2)
                self.record = None
                return None
        self.recorded[shape] = recorded
        if len(self.recorded) > MOST_RECORDED:
            del self.recorded[next(iter(self.recorded))]
        return recorded


Shape = tuple[int, int, int]
"""Records, readings of each, and pages of each."""


def common(new: ForwardInputs[NDArray[Any]]) -> Shape | None:
    """What the shape of a pass is rounded up to: powers of two, so that there are few. None where a pass is so large
    that it does not matter how its operators are started."""
    (records, readings), pages = new.features.shape, new.pages.shape[1]
    if records > MOST_RECORDS or readings > MOST_READINGS:
        return None
    return _power(max(records, FEWEST_RECORDS)), _power(readings), _power(max(pages, 1))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class CapturedGraph:
    """Passes of one shape: the memory in which they find their arrays, and what was recorded over it."""

    def __init__(self, passes: CudaGraphs, shape: Shape, record: Recorder) -> None:
        (records, readings, pages), model = shape, passes.model
        page, place = passes.cache.nowhere, passes.cache.nowhere * PAGE_TOKENS
        self.device, pinned = model.device, model.device.type == "cuda"
        self.padding: ForwardInputs[Any] = ForwardInputs(-1, 0.0, page, 0, place)
        each = records, readings
        shapes: ForwardInputs[Any] = ForwardInputs(
            each, each, (records, pages), (records,), (records, readings * model.cached_tokens_per_reading)
        )
        types: ForwardInputs[Any] = ForwardInputs(torch.int64, model.dtype, torch.int64, torch.int64, torch.int64)
        sizes = [prod(lengths) * kind.itemsize for lengths, kind in zip(shapes, types, strict=True)]
        self.here = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        self.there = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.answer = torch.empty(3, *each, dtype=torch.float64, pin_memory=pinned)

        def parts(block: Tensor) -> ForwardInputs[Tensor]:
            cut = zip(torch.split(block, sizes), types, shapes, strict=True)
            return ForwardInputs(*(part.view(kind).view(lengths) for part, kind, lengths in cut))

        self.arrays = [part.numpy() for part in parts(self.here)]
        given = parts(self.there)
        self._send(())  # while it is recorded there is nothing but padding
        self.given, self.guide = given, passes.expected(given)
        self.work = record(lambda: passes.judged(given, self.guide))

    def __call__(
        self, new: ForwardInputs[NDArray[Any]], expected: Callable[[ForwardInputs[Tensor]], PriorConditional | None]
    ) -> Floats:
        """See `Passes`."""
        records, readings = new.features.shape
        self._send(new)
        fresh = expected(self.given)
        if self.guide is not None and fresh is not None:
            for kept, part in zip(self.guide.tensors, fresh.tensors, strict=True):
                kept.copy_(part)
        self.answer.copy_(self.work(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.answer[:, :records, :readings].numpy().copy()

    def _send(self, new: ForwardInputs[NDArray[Any]] | tuple[()]) -> None:
        for array, nothing in zip(self.arrays, self.padding, strict=True):
            array.fill(nothing)
        for array, part in zip(self.arrays, new, strict=False):
            array[tuple(map(slice, part.shape))] = part
        self.there.copy_(self.here, non_blocking=True)


def recorder(device: torch.device) -> Recorder | None:
    """Records CUDA graphs that share their memory, since one is done before the next begins; None on a CPU."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(work: Work) -> Work:
        here = torch.cuda.current_stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        here.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another may be reading a model onto the device.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            out = work()

        def again() -> Tensor:
            graph.replay()
            return out

        return again

    return record
