"""How compiled code sees a model: its weights as structures of C (`kernels.build/blocks.c` and what that includes)."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.kernels import build
from deformer_stream.kernels.kv_cache import PagePool, zeroed
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional, Surprisal
from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.layers import TransformerLayer, round_to_bfloat16

COLUMNS = 32
"""Columns of weights that lie together."""
LANES = 8
"""Gaussians side by side."""


def fields(numbers: str, spec: str) -> Any:
    """Fields of a structure by their names: pointers but those in `numbers`."""
    return tuple((n, ctypes.c_int64 if n in numbers.split() else ctypes.c_void_p) for n in spec.split())


class _Layer(ctypes.Structure):
    _fields_ = fields("", "norm1 norm1_bias norm2 norm2_bias qkv_bias out_bias up_bias down_bias qkv out up down")


class _Map(ctypes.Structure):
    _fields_ = fields("inputs columns", "inputs columns weights bias")


class _Encoders(ctypes.Structure):
    _fields_ = fields("width maps", "width maps identity feature number cycle label row labels map guidance")


class _Gaussians(ctypes.Structure):
    _fields_ = fields(
        "components padded features",
        "components padded features log_weights means covariances page_of place_in place",
    )


class _Head(ctypes.Structure):
    _fields_ = fields(
        "mixtures guides labels", "mixtures guides labels norm norm_bias floor unseen count project adjust"
    )


class _Network(ctypes.Structure):
    _fields_ = fields(
        "d heads feedforward layers kept pre relu",
        "d heads feedforward layers kept pre relu layer encoders gaussians head",
    )


class Layout:
    """network: the structure that stands for the model. pair: factors of a product that lie together. rows: in which
    page of a record the guide's row of its k-th reading lies, and at which vector, (readings,) each."""

    def __init__(self, model: DEformer, pair: int, rows: Sequence[Any] = ()) -> None:
        self._pair, self._rounds = pair, model.config.precision == "bfloat16"
        self._held: list[Any] = []  # what the structures point to
        config = model.config
        layers = (_Layer * config.layers)(*(self._layer(cast(TransformerLayer, block)) for block in model.blocks))
        parts = self._encoders(model), self._gaussians(model.gaussians, rows), self._head(model)
        self.network = _Network(
            *(config.d_model, config.heads, config.feedforward, config.layers, model.cached_tokens_per_reading),
            *(config.norm == "pre", config.activation == "relu", self._at(layers)),
            *(part and self._at(part) for part in parts),
        )

    def _at(self, structure: Any) -> int:
        self._held.append(structure)
        return ctypes.addressof(structure)

    def _kept(self, t: Tensor, dtype: torch.dtype | None = torch.float32) -> int:
        self._held.append(t.detach().to(dtype).contiguous())
        return int(self._held[-1].data_ptr())

    def _layer(self, block: TransformerLayer) -> _Layer:
        norms = [t for norm in (block.norm1, block.norm2) for t in (norm.weight, norm.bias)]
        maps = block.qkv, block.out, block.up, block.down
        return _Layer(*map(self._kept, (*norms, *(linear.bias for linear in maps))), *map(self._factors, maps))

    def _factors(self, linear: nn.Linear) -> int:
        """(columns / 32, inputs / pair, 32, pair)"""
        weight = round_to_bfloat16(linear.weight.detach()) if self._rounds else linear.weight.detach()
        n, k = weight.shape
        laid = weight.view(n // COLUMNS, COLUMNS, k // self._pair, self._pair).transpose(1, 2)
        return self._kept(laid, torch.bfloat16 if self._pair == 2 else torch.float32)

    def _map(self, weight: Tensor, bias: Tensor, inputs: int) -> _Map:
        """Of so many inputs, of which the last may be nothing. weight: (outputs, inputs); bias: (outputs,)."""
        outputs = up_to(len(weight), COLUMNS)
        laid = enlarged(weight, outputs, inputs).view(-1, COLUMNS, inputs).transpose(1, 2)
        return _Map(inputs, outputs, self._kept(laid), self._kept(enlarged(bias, outputs)))

    def _encoders(self, model: DEformer) -> _Encoders:
        """Tokens are scaled by √d; so is the last map that leads to them."""
        root, features = math.sqrt(model.config.d_model), torch.arange(len(model.schema))
        linears = cast(Sequence[nn.Linear], model.value_encoder.maps)
        pairs = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        pairs[-1] = root * pairs[-1][0], root * pairs[-1][1]
        width = up_to(len(pairs[0][1]), COLUMNS)
        tables = self._shares(model, *pairs[0], width)
        maps, inputs = [], width
        for weight, bias in pairs[1:]:
            maps.append(self._map(weight, bias, inputs))
            inputs = maps[-1].columns
        with torch.no_grad():
            identity, guidance = model.embed_query_tokens(features, None), None
            if model.guidance is not None:  # what it adds in any case is part of the identities
                identity = identity + root * model.guidance.bias
                told = root * model.guidance.weight, torch.zeros_like(model.guidance.bias)
                guidance = self._at(self._map(*told, model.guidance.in_features))
        counts = (self._kept(t, torch.int64) for t in (model.label_offsets, model.label_counts))
        given = *map(self._kept, (identity, *tables)), *counts
        return _Encoders(width, len(maps), *given, self._at((_Map * len(maps))(*maps)), guidance)

    def _shares(self, model: DEformer, weight: Tensor, bias: Tensor, width: int) -> list[Tensor]:
        """What features, numbers and labels add to the first hidden layer of u, with the angles of cycles."""
        known = model.embed_identities().detach().double()
        ends = [known.shape[1], 1, 2 if model.cycle_angles is not None else 0, model.label_width]
        own, number, turned, label = torch.split(enlarged(weight, width).double(), ends, 1)
        rows = torch.zeros(1, 0) if model.label_embedding is None else model.label_embedding.weight.detach()
        cycles = torch.zeros(len(known), 2) if model.cycle_angles is None else model.cycle_angles
        shares = known @ own.T + enlarged(bias, width)
        return [shares, torch.cat([number, enlarged(turned, width, 2)], 1).T, cycles, rows.double() @ label.T]

    def _gaussians(self, gaussians: GaussianPrior | None, rows: Sequence[Any]) -> _Gaussians | None:
        """The first variant with its components last, beside some that weigh nothing."""
        if gaussians is None:
            return None
        C = up_to(gaussians.num_components, LANES)
        parts = gaussians.log_weights[0], gaussians.means[0].T, gaussians.covariances[0].permute(1, 2, 0)
        given = [
            self._kept(nn.functional.pad(t.double(), (0, C - gaussians.num_components), value=fill), torch.float64)
            for t, fill in zip(parts, (-math.inf, 0.0, 1.0), strict=True)
        ]
        places = [self._kept(torch.as_tensor(t), torch.int64) for t in (*rows, gaussians.column_by_code)]
        return _Gaussians(gaussians.num_components, C, gaussians.means.shape[-1], *given, *places)

    def _head(self, model: DEformer) -> _Head:
        head, d = model.head, model.config.d_model
        norm = (model.norm.weight, model.norm.bias) if isinstance(model.norm, nn.LayerNorm) else ()
        unseen = torch.stack([torch.log1p(-head.unseen_mass), torch.log(head.unseen_mass)], 1)
        adjust, guides = None, 0
        if head.adjust is not None:
            adjust = self._at(self._map(head.adjust.weight, head.adjust.bias, d))
            guides = head.adjust.out_features // 3
        return _Head(
            *(head.num_components, guides, head.num_labels, *(map(self._kept, norm) if norm else (None, None))),
            *(self._kept(head.scale_floor), self._kept(unseen), self._kept(head.label_counts, torch.int64)),
            *(self._at(self._map(head.project.weight, head.project.bias, d)), adjust),
        )


def up_to(n: int, of: int) -> int:
    return -(-n // of) * of


def enlarged(t: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """With zeros, to so many rows, and columns of a matrix."""
    wider = () if t.dim() == 1 else (0, 0 if columns is None else columns - t.shape[1])
    return nn.functional.pad(t.detach(), (*wider, 0, rows - len(t)))


# The network's layers, its guide and its surprise by compiled code: ragged, straight from the pages of open records.
#
# What it computes is what `DEformer.extend` computes; that one stays the reference, and does the work where there is no
# compiler, on a GPU, for single tokens, and for widths that the code is not made for. A reading's numbers are the same
# bits however its record is cut into pieces and whatever goes through the layers beside it, for the order of every sum is
# fixed.


Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

PAGE_TOKENS = 16
"""Tokens a page holds: a vector of the processor has a lane for each."""
UNIT_TOKENS = 96
"""Tokens that go through a layer together: a weight is read once for them, and they stay in the processor's cache."""
ENTRIES = 5
"""Vectors of floats that a reading leaves for the guide besides its row of the Cholesky factor."""


class _Work(ctypes.Structure):
    _fields_ = fields(
        "records columns page_bytes unit_tokens",
        "network code value first asked start place pages pool log_weight mean scale hidden judged next "
        "records columns page_bytes unit_tokens",
    )


class _Surprise(ctypes.Structure):
    _fields_ = fields(
        "readings components",
        "log_weights means scales values surprisal least mean variance readings components next",
    )


class _Quantiles(ctypes.Structure):
    _fields_ = fields(
        "readings components quantiles", "log_weights means scales levels out readings components quantiles next"
    )


class _Readings(ctypes.Structure):
    _fields_ = fields("records", "slot first surprises scored decided running out records")


class _Parts(ctypes.Structure):
    _fields_ = fields("parts failed", "function work parts failed")


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The new readings of R records, one record after the other: M in all.

    features: (M,) codes. values: (M,) normalised units. first: (R + 1,) where each record's begin. start: (R,) readings
    that its pages hold. pages: (R, columns), rows of the cache's table. place: (M,) how many readings of its record
    each one sees, or None where it sees all before it; it goes into the place after those, over what is there. So a
    tree can be a record, its nodes depth first. silent: (R,) so many of each record's readings, its first ones, only go
    into the pages again; None where all are asked for.
    """

    features: Ints
    values: Floats
    first: Ints
    start: Ints
    pages: Ints
    place: Ints | None = None
    num_prefill_only: Ints | None = None

    @property
    def query_offsets(self) -> Ints:
        """(R + 1,) where each record's readings begin among those that are asked for."""
        return (
            self.first if self.num_prefill_only is None else self.first - np.append(0, np.cumsum(self.num_prefill_only))
        )

    def wanted(self) -> Bools | slice:
        """Which readings are asked for: Z of M."""
        if self.num_prefill_only is None:
            return slice(None)
        place = np.arange(self.first[-1]) - self.first[:-1].repeat(np.diff(self.first))
        wanted: Bools = place >= self.num_prefill_only.repeat(np.diff(self.first))
        return wanted


def fits(model: DEformer) -> bool:
    """Whether the compiled code is made for a model of these widths, and of pairs of tokens."""
    c = model.config
    widths = c.d_model % 64 == 0 and c.d_model // c.heads % 16 == 0 and c.heads <= 64 and c.feedforward % COLUMNS == 0
    return widths and c.tokens == "pair" and model.device.type == "cpu" and model.dtype == torch.float32


class CpuKVCache(PagePool):
    """Pages that compiled code reads and writes: keys and values of all layers, and the guide's Cholesky factors."""

    def __init__(self, model: DEformer, itemsize: int, memory: int) -> None:
        config, kept, readings = model.config, model.cached_tokens_per_reading, len(model.schema)
        page_bytes = 2 * config.layers * config.d_model * PAGE_TOKENS * itemsize
        takes: list[Callable[[Ints], Ints]] = [lambda n: -(-n * kept // PAGE_TOKENS)]
        if model.gaussians is not None:
            vector = 4 * up_to(model.gaussians.num_components, LANES)
            page_bytes = -(-max(page_bytes, (readings + ENTRIES) * vector) // 64) * 64
            self.page_of, self.place_in = _rows(readings, page_bytes // vector)
            ends = np.concatenate([[0], self.page_of + 1])  # columns of the table, less those of the tokens
            takes.append(lambda n: ends[n])
        super().__init__(readings, takes, page_bytes, memory)
        if len(takes) > 1:
            self.page_of += self.begins[1]
        self.pool = zeroed(self.pages * page_bytes)

    def fork(self, other: CpuKVCache, slots: Ints, lengths: Ints, counts: Ints) -> None:
        """Give the slots 0 … R − 1 here what R slots of another cache hold of their first `lengths` readings, and room
        for `counts` more, (R,) each; whatever was here is dropped."""
        self.drop(np.arange(len(self.length)))
        self.grow(len(slots))
        mine = np.arange(len(slots))
        self.reserve(mine, lengths + counts)
        row, column = self._places(self._more(np.zeros_like(lengths), lengths))
        here, there = (cache.pool.reshape(cache.pages, -1) for cache in (self, other))
        here[self.table[row, column]] = there[other.table[slots[row], column]]
        self.length[mine] = lengths + counts


def _rows(readings: int, vectors: int) -> tuple[Ints, Ints]:
    """(readings,) in which page of a record the guide's row of its k-th reading lies, and at which vector; no row
    straddles two. vectors: of a page."""
    page, place, places = 0, 0, []
    for k in range(readings):
        if place + k + ENTRIES > vectors:
            page, place = page + 1, 0
        places.append((page, place))
        place += k + ENTRIES
    columns = np.array(places, np.int64).reshape(-1, 2).T
    return np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[1])


class CpuKernels:
    """A model's weights, laid out for compiled code. library: what `blocks.c` and `density.c` became."""

    def __init__(self, model: DEformer, library: ctypes.CDLL) -> None:
        self.model, self.library = model, library
        library.advance.restype = None
        for number in (library.pair, library.cached_bytes):
            number.restype = ctypes.c_int64
        self.pair = int(library.pair())
        one = self.cache(0)
        self.record_bytes = one.pages_per_record * one.page_bytes
        self.layout = Layout(model, self.pair, () if model.gaussians is None else (one.page_of, one.place_in))

    @staticmethod
    def of(model: DEformer) -> CpuKernels | None:
        """None where no compiled code may score for the model."""
        return CpuKernels(model, model.kernel_library) if model.kernel_library is not None and fits(model) else None

    def cache(self, memory: int) -> CpuKVCache:
        return CpuKVCache(self.model, int(self.library.cached_bytes()), memory)

    def judge(self, cache: CpuKVCache, ragged: RaggedBatch) -> Floats:
        """ln p, ln of the p-value and excess of the new readings that are asked for, (3, Z), see `heads.Judgement`. The
        places of all in the pages must be reserved, and are filled."""
        if ragged.num_prefill_only is not None and self.model.cached_tokens_per_reading == 2:  # identity tokens are in the pages, too
            return self.judge(cache, replace(ragged, num_prefill_only=None))[:, ragged.wanted()]
        judged = np.empty((3, int(ragged.query_offsets[-1])), np.float32)
        self._score(cache, ragged, judged=judged)
        return judged

    def advance(
        self,
        running: NDArray[np.void],
        slots: Ints,
        edges: Ints,
        surprises: NDArray[np.float64],
        scored: Bools | None,
        decided: Bools | None,
        columns: NDArray[np.float64],
    ) -> None:
        """Go on with R records, whose slots are given, (R,), by M readings: a record's are those from one edge to the
        next, (R + 1,).

        running: `records.RUNNING` of all slots, brought up to date but for the p-value. surprises: (3, M) ln p, ln of
        the p-value, excess. scored, decided: (M,), see `conformal.advance`; None where all are. columns: its first
        rows, (M,) each, get ln p, NaN where it is not scored, its running sum, and the running statistic."""
        arrays = slots, edges, surprises, scored, decided, running, columns
        self.library.advance(ctypes.byref(_Readings(*map(pointer, arrays), len(slots))))

    def conditionals(self, cache: CpuKVCache, ragged: RaggedBatch) -> Conditional:
        """p(v | earlier) of new readings, all of which are asked for, (M,); else as `judge`."""
        hidden = torch.empty(len(ragged.features), self.model.config.d_model)
        guide = self._score(cache, ragged, hidden=hidden)
        conditional: Conditional = self.model.head(self.model.norm(hidden), torch.from_numpy(ragged.features), guide)
        return conditional

    def whole(self, features: Tensor, values: Tensor, depth: Ints | None = None) -> Conditional:
        """`DEformer.conditionals` of whole records. features, values: (N, L), no padding → shape (N, L).

        depth: (L,) of the nodes of a tree of orders (`engine.order_trees`), depth first: a reading sees those on its way."""
        N, L = features.shape
        cache = self.cache(N * self.record_bytes)
        pages = np.arange(N * cache.pages_per_record).reshape(N, -1)
        place = None if depth is None else np.tile(depth, N)
        first, start = L * np.arange(N + 1), np.zeros(N, np.int64)
        x = np.ascontiguousarray(values.flatten().numpy(), np.float32)
        ragged = RaggedBatch(features.flatten().numpy(), x, first, start, pages, place)
        return self.conditionals(cache, ragged).reshape(N, L)

    def surprisal(self, conditional: Conditional, values: Tensor) -> Surprisal | None:
        """`Conditional.surprisal` of readings."""
        if not conditional.means.shape[-1]:
            return None
        out = torch.empty(4, *values.shape)
        parts = conditional.log_weights, conditional.means, conditional.scales, values
        given = [t.float().contiguous() for t in parts]
        work = partial(_Surprise, *map(pointer, (*given, *out)), values.numel(), conditional.means.shape[-1])
        run(self.library, "measure_surprise", work, -(-values.numel() // 32))
        return Surprisal(*out)

    def quantiles(self, conditional: Conditional, qs: Sequence[float]) -> Tensor:
        """`Conditional.quantiles`, of mixtures in float32."""
        out = torch.empty(len(qs), *conditional.discrete.shape)
        if not conditional.means.shape[-1] or not out.numel():
            return conditional.quantiles(qs)
        parts = conditional.log_weights, conditional.means, conditional.scales, torch.tensor(qs)
        given = [t.float().contiguous() for t in parts]
        readings = conditional.discrete.numel()
        work = partial(_Quantiles, *map(pointer, (*given, out)), readings, conditional.means.shape[-1], len(qs))
        run(self.library, "find_quantiles", work, -(-readings // 32))
        return conditional.quantiles(qs, out)

    def _score(
        self, cache: CpuKVCache, ragged: RaggedBatch, hidden: Tensor | None = None, judged: Floats | None = None
    ) -> PriorConditional | None:
        """Into one of the two. Returns what the network was told."""
        gaussians, first, asked = self.model.gaussians, ragged.first, ragged.query_offsets
        expected = None if gaussians is None else torch.empty(3, int(asked[-1]), up_to(gaussians.num_components, LANES))
        given = ragged.features, ragged.values, first, asked, ragged.start, ragged.place, ragged.pages, cache.pool
        told = (None,) * 3 if expected is None else expected
        sizes = len(ragged.start), ragged.pages.shape[1], cache.page_bytes, UNIT_TOKENS
        pointers = [pointer(array) for array in (*given, *told, hidden, judged)]
        units = int(first[-1] + asked[-1]) // UNIT_TOKENS + 1
        network = ctypes.addressof(self.layout.network)
        run(self.library, "score_readings", lambda next: _Work(network, *pointers, next, *sizes), units)
        if gaussians is None or expected is None:
            return None
        known = gaussians.column_by_code[torch.from_numpy(ragged.features)] >= 0
        weights, means, scales = expected[..., : gaussians.num_components]
        return PriorConditional(weights, means, scales, known)


@contextlib.contextmanager
def attached_kernels(model: DEformer) -> Iterator[CpuKernels | None]:
    """Attach the compiled library to the model within a `with` block, as reading it from a model directory does.

    Yields the model's kernels, or None if compiled code is not available or not made for such a model.
    """
    before = model.kernel_library
    if before is None:
        model.kernel_library = build.library(model.config.precision == "bfloat16")
    try:
        yield CpuKernels.of(model)
    finally:
        model.kernel_library = before


def run(library: ctypes.CDLL, name: str, work: Callable[[int | None], ctypes.Structure], units: int) -> None:
    """The library's function of this name on all threads, which take units from a common counter. What the work points
    to must outlive the call. Raises MemoryError."""
    counter = ctypes.c_int64(0)
    job, threads = work(ctypes.addressof(counter)), torch.get_num_threads()
    parts = _Parts(_address(library, name), ctypes.addressof(job), units, 0)
    team = _team() if min(threads, units) > 1 else None
    if team is None:
        library.take_part(ctypes.byref(parts))
    else:
        team(library.take_part, ctypes.byref(parts), threads, 0)
    if parts.failed:
        raise MemoryError("the network's scratch does not fit into memory")


@cache
def _address(library: ctypes.CDLL, name: str) -> int | None:
    """Of a function."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@cache
def _team() -> Callable[..., None] | None:
    """OpenMP's, of the library that PyTorch has loaded: (function, what it is called with, threads, 0). Its threads are
    those that PyTorch's operators run on, which wait for more before they sleep: others would wait for the cores that
    they wait on. None where PyTorch does without OpenMP."""
    team: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if team is not None:
        team.restype, team.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return cast("Callable[..., None] | None", team)


def pointer(array: Any) -> int | None:
    return None if array is None else int(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)
