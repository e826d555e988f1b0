"""The compiled CPU kernels: a model's weights in their layout, and the calls that score readings with them.

The kernels compute the same as `DEformer.forward_cached` and `DEformer.conditionals`, which are the reference. They
read the keys and values of open records directly from the pages of `CpuKVCache`, and work without padding. A reading's
score is the same bits however its record is cut into batches, and whatever else is in the batch. PyTorch computes the
scores if there is no compiler, on a GPU, and for models that `is_supported` excludes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream import log
from deformer_stream.kernels import abi, build
from deformer_stream.kernels.abi import COLUMNS, MAX_HEADS, PRIOR_LANES
from deformer_stream.kernels.kv_cache import CpuKVCache
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional, Surprisal
from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.layers import TransformerLayer, get_activation, round_to_bfloat16

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

TOKENS_PER_UNIT = 96
"""Tokens that go through a layer together: few enough to stay in the processor's cache, enough to reuse weights."""
READINGS_PER_STEP = 32
"""Readings that a thread takes at once to compute surprisals or quantiles, as in csrc/mixture_queries.c."""


def is_supported(model: DEformer) -> bool:
    """Return whether the compiled kernels can score for this model.

    They need float32 weights on the CPU, two tokens per reading, and widths that fill whole vectors.
    """
    config = model.config
    has_whole_vectors = config.d_model % 64 == 0 and config.d_model // config.heads % 16 == 0
    has_whole_tiles = config.feedforward % COLUMNS == 0 and config.heads <= MAX_HEADS
    is_float32_on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return has_whole_vectors and has_whole_tiles and config.tokens == "pair" and is_float32_on_cpu


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """New readings of R records, one record after the other, M readings in all.

    Attributes:
        features: (M,) feature codes.
        values: (M,) values in normalised units; label codes of discrete features.
        offsets: (R + 1,) where each record's readings begin; the last entry is M.
        num_cached: (R,) readings of each record that its pages hold.
        page_table: (R, columns) rows of the cache's page table.
        depths: (M,) how many readings of its record each reading sees. The reading is written to the cache behind
            those, over what was there. A tree of orders can thus be a record, with its nodes depth first. None if each
            reading sees all readings before it.
        num_prefill_only: (R,) how many of each record's first readings are only written to the cache and not scored.
            None if all readings are scored.
    """

    features: Ints
    values: Floats
    offsets: Ints
    num_cached: Ints
    page_table: Ints
    depths: Ints | None = None
    num_prefill_only: Ints | None = None

    @property
    def query_offsets(self) -> Ints:
        """Return where each record's scored readings begin among all scored readings, (R + 1,)."""
        if self.num_prefill_only is None:
            return self.offsets
        offsets: Ints = self.offsets - np.append(0, np.cumsum(self.num_prefill_only))
        return offsets

    def query_mask(self) -> Bools | slice:
        """Return a mask of the readings that are scored, (M,), or a full slice if all are."""
        if self.num_prefill_only is None:
            return slice(None)
        lengths = np.diff(self.offsets)
        place = np.arange(self.offsets[-1]) - self.offsets[:-1].repeat(lengths)
        is_query: Bools = place >= self.num_prefill_only.repeat(lengths)
        return is_query


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def pad_with_zeros(t: Tensor, num_rows: int, num_columns: int | None = None) -> Tensor:
    """Return a vector or matrix with zeros appended, so that it has this many rows and columns."""
    columns = () if t.dim() == 1 else (0, 0 if num_columns is None else num_columns - t.shape[1])
    return nn.functional.pad(t.detach(), (*columns, 0, num_rows - len(t)))


def _float32(t: Tensor) -> Tensor:
    """Return a contiguous float32 copy of a weight, detached from the graph of gradients."""
    return t.detach().float().contiguous()


def _int64(t: Any) -> Tensor:
    """Return a contiguous tensor of int64."""
    return torch.as_tensor(t).to(torch.int64).contiguous()


class _WeightPacker:
    """Packs a model's weights into the structures of csrc/abi.h.

    Args:
        model: The model.
        dot_width: How many factors of a product lie side by side (2 if pairs of bfloat16 are multiplied, else 1).
        cache: An empty cache of the model, whose layout the structure of the Gaussian prior needs.
    """

    def __init__(self, model: DEformer, dot_width: int, cache: CpuKVCache) -> None:
        self.model, self.dot_width, self.cache = model, dot_width, cache

    def pack(self) -> abi.Network:
        """Return the structure of the model, which keeps all packed weights alive."""
        config = self.model.config
        layers = [self._pack_layer(cast(TransformerLayer, layer)) for layer in self.model.blocks]
        return abi.Network(
            d=config.d_model,
            num_heads=config.heads,
            feedforward=config.feedforward,
            num_layers=config.layers,
            tokens_per_reading=self.model.cached_tokens_per_reading,
            is_pre_norm=config.norm == "pre",
            activation=get_activation(config.activation).kernel_code,
            layers=abi.pack_array(abi.Layer, layers),
            encoder=self._pack_encoder(),
            prior=None if self.model.gaussians is None else self._pack_prior(self.model.gaussians),
            head=self._pack_head(),
        )

    def _pack_layer(self, layer: TransformerLayer) -> abi.Layer:
        norms = {
            f"{name}_{part}": _float32(getattr(getattr(layer, name), part))
            for name in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        linears = {name: cast(nn.Linear, getattr(layer, name)) for name in ("qkv", "out", "up", "down")}
        biases = {f"{name}_bias": _float32(linear.bias) for name, linear in linears.items()}
        return abi.Layer(**norms, **biases, **{name: self._pack_factors(linear) for name, linear in linears.items()})

    def _pack_factors(self, linear: nn.Linear) -> Tensor:
        """Return the weights of a layer's map, (columns / 32, inputs / dot_width, 32, dot_width)."""
        weight = linear.weight.detach()
        if self.model.config.precision == "bfloat16":
            weight = round_to_bfloat16(weight)
        n, k = weight.shape
        packed = weight.view(n // COLUMNS, COLUMNS, k // self.dot_width, self.dot_width).transpose(1, 2)
        return packed.to(torch.bfloat16 if self.dot_width == 2 else torch.float32).contiguous()

    def _pack_map(self, weight: Tensor, bias: Tensor, num_inputs: int) -> abi.LinearMap:
        """Return a float32 map, padded with zeros to `num_inputs` inputs and to a multiple of 32 outputs.

        Args:
            weight: (outputs, inputs)
            bias: (outputs,)
            num_inputs: Inputs of the packed map, at least those of the weight.
        """
        columns = round_up(len(weight), COLUMNS)
        packed = pad_with_zeros(weight, columns, num_inputs).view(-1, COLUMNS, num_inputs).transpose(1, 2)
        padded_bias = pad_with_zeros(bias, columns)
        return abi.LinearMap(inputs=num_inputs, columns=columns, weights=_float32(packed), bias=_float32(padded_bias))

    def _pack_encoder(self) -> abi.TokenEncoder:
        """Return the weights of query and observation tokens; the factor √d of tokens is part of the last map."""
        model = self.model
        root = math.sqrt(model.config.d_model)
        linears = cast(Sequence[nn.Linear], model.value_encoder.maps)
        weights = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        weights[-1] = root * weights[-1][0], root * weights[-1][1]
        width = round_up(len(weights[0][1]), COLUMNS)
        maps, num_inputs = [], width
        for weight, bias in weights[1:]:
            maps.append(self._pack_map(weight, bias, num_inputs))
            num_inputs = maps[-1].columns
        with torch.no_grad():
            identity, prior_map = model.embed_query_tokens(torch.arange(len(model.schema)), None), None
            if model.guidance is not None:  # its bias is added to every query token, so it goes into the identities
                identity = identity + root * model.guidance.bias
                no_bias = torch.zeros_like(model.guidance.bias)
                prior_map = self._pack_map(root * model.guidance.weight, no_bias, model.guidance.in_features)
        return abi.TokenEncoder(
            width=width,
            num_maps=len(maps),
            identity=_float32(identity),
            **self._split_first_map(*weights[0], width),
            first_label_row=_int64(model.label_offsets),
            num_labels=_int64(model.label_counts),
            maps=abi.pack_array(abi.LinearMap, maps),
            prior_map=prior_map,
        )

    def _split_first_map(self, weight: Tensor, bias: Tensor, width: int) -> dict[str, Tensor]:
        """Split the first map of observation tokens into the shares of features, values and labels.

        The input of that map is a concatenation, so its output is a sum with one term for each part. The terms of the
        features and of the labels can be computed beforehand.
        """
        model = self.model
        identities = model.embed_identities().detach().double()
        parts = [identities.shape[1], 1, 2 if model.cycle_angles is not None else 0, model.label_width]
        by_feature, by_value, by_cycle, by_label = torch.split(pad_with_zeros(weight, width).double(), parts, 1)
        labels = torch.zeros(1, 0) if model.label_embedding is None else model.label_embedding.weight.detach()
        cycle = torch.zeros(len(identities), 2) if model.cycle_angles is None else model.cycle_angles
        return {
            "feature_share": _float32(identities @ by_feature.T + pad_with_zeros(bias, width)),
            "value_share": _float32(torch.cat([by_value, pad_with_zeros(by_cycle, width, 2)], 1).T),
            "cycle": _float32(cycle),
            "label_share": _float32(labels.double() @ by_label.T),
        }

    def _pack_prior(self, prior: GaussianPrior) -> abi.Prior:
        """Return the first variant of the prior, components last, padded by components of weight 0."""
        padded = round_up(prior.num_components, PRIOR_LANES)

        def pad(t: Tensor, fill: float) -> Tensor:
            added = (0, padded - prior.num_components)
            return nn.functional.pad(t.double(), added, value=fill).contiguous()

        return abi.Prior(
            num_components=prior.num_components,
            padded_components=padded,
            num_features=prior.means.shape[-1],
            log_weights=pad(prior.log_weights[0], -math.inf),
            means=pad(prior.means[0].T, 0.0),
            covariances=pad(prior.covariances[0].permute(1, 2, 0), 1.0),
            row_page=self.cache.row_page,
            row_place=self.cache.row_place,
            column_by_code=_int64(prior.column_by_code),
        )

    def _pack_head(self) -> abi.Head:
        model, head, d = self.model, self.model.head, self.model.config.d_model
        norm = model.norm if isinstance(model.norm, nn.LayerNorm) else None
        log_masses = torch.stack([torch.log1p(-head.unseen_mass), torch.log(head.unseen_mass)], 1)
        adjust = head.adjust
        return abi.Head(
            num_components=head.num_components,
            num_prior_components=0 if adjust is None else adjust.out_features // 3,
            num_labels=head.num_labels,
            norm_weight=None if norm is None else _float32(norm.weight),
            norm_bias=None if norm is None else _float32(norm.bias),
            scale_floor=_float32(head.scale_floor),
            unseen_log_mass=_float32(log_masses),
            label_counts=_int64(head.label_counts),
            mixture_map=self._pack_map(head.project.weight, head.project.bias, d),
            adjust_map=None if adjust is None else self._pack_map(adjust.weight, adjust.bias, d),
        )


class CpuKernels:
    """The compiled kernels with one model's weights.

    Args:
        model: A model that `is_supported`.
        library: The library of the model's precision, see `build.load_kernels`.

    Attributes:
        bytes_per_record: Bytes of the cache pages of a record with all its readings.
    """

    def __init__(self, model: DEformer, library: ctypes.CDLL) -> None:
        self.model, self.library = model, library
        library.advance_statistics.restype = None
        for function in (library.dot_width, library.kv_item_bytes):
            function.restype = ctypes.c_int64
        empty_cache = self.create_cache(0)
        self.bytes_per_record = empty_cache.pages_per_record * empty_cache.page_bytes
        self.network = _WeightPacker(model, int(library.dot_width()), empty_cache).pack()

    @staticmethod
    def for_model(model: DEformer) -> CpuKernels | None:
        """Return the kernels for a model, or None if no library is attached to it or the kernels do not support it."""
        if model.kernel_library is None or not is_supported(model):
            return None
        return CpuKernels(model, model.kernel_library)

    def create_cache(self, max_bytes: int) -> CpuKVCache:
        """Return an empty KV cache of at most `max_bytes`; the pages of one record always fit."""
        return CpuKVCache(self.model, int(self.library.kv_item_bytes()), max_bytes)

    def score(self, kv_cache: CpuKVCache, batch: RaggedBatch) -> Floats:
        """Score readings and write their keys and values into the cache.

        The pages of all readings must be allocated before.

        Returns:
            (3, Z), for the Z scored readings: natural logarithm of the density or mass at the value (larger is
            likelier), natural logarithm of the p-value, and centered NLL (−ln p minus its expectation).
        """
        if batch.num_prefill_only is not None and self.model.cached_tokens_per_reading == 2:
            # Query tokens are cached, too, so all readings must go through the layers as scored ones.
            return self.score(kv_cache, replace(batch, num_prefill_only=None))[:, batch.query_mask()]
        score_terms = np.empty((3, int(batch.query_offsets[-1])), np.float32)
        self._score_batch(kv_cache, batch, score_terms=score_terms)
        return score_terms

    def advance(
        self,
        running: NDArray[np.void],
        record_index: Ints,
        offsets: Ints,
        score_terms: Doubles,
        is_scored: Bools | None,
        is_decided: Bools | None,
        columns: Doubles,
        p_value_exponent: float,
    ) -> None:
        """Advance the running statistics of R records by M new readings, one record after the other.

        Args:
            running: The running statistics of all records (`RUNNING_DTYPE`), updated except for the p-value.
            record_index: (R,) the entries of the records in `running`.
            offsets: (R + 1,) where each record's readings begin.
            score_terms: (3, M) the result of `score`, in float64.
            is_scored: (M,) False for readings that change nothing, such as those of context features; None if all
                readings count.
            is_decided: (M,) whether the statistic of the prefix that ends here counts; None if it does everywhere.
            columns: (3 or more, M) output. Its first rows get ln p (NaN if not scored), the running sum of ln p, and
                the running statistic (larger is more anomalous).
            p_value_exponent: The power to which p-values are raised before they are combined.
        """
        task = abi.AdvanceTask(
            record_index=record_index,
            offsets=offsets,
            score_terms=score_terms,
            is_scored=is_scored,
            is_decided=is_decided,
            running=abi.running_address(running),
            out=columns,
            num_records=len(record_index),
            p_value_exponent=p_value_exponent,
        )
        self.library.advance_statistics(ctypes.byref(task))

    def conditionals(self, kv_cache: CpuKVCache, batch: RaggedBatch) -> Conditional:
        """Return the conditional distributions of new readings, (M,), and write the readings into the cache.

        All readings of the batch must be scored ones (`num_prefill_only` is None).
        """
        hidden = torch.empty(len(batch.features), self.model.config.d_model)
        prior = self._score_batch(kv_cache, batch, hidden=hidden)
        head_input = self.model.norm(hidden)
        conditional: Conditional = self.model.head(head_input, torch.from_numpy(batch.features), prior)
        return conditional

    def conditionals_of_records(self, features: Tensor, values: Tensor, depths: Ints | None = None) -> Conditional:
        """Return what `DEformer.conditionals` returns: the conditionals of all readings of complete records.

        Args:
            features: (N, L) feature codes of N records with L readings each, without padding.
            values: (N, L) values in normalised units.
            depths: (L,) for a tree of orders instead of a record, the depth of each node, nodes depth first. A node
                sees only its ancestors.

        Returns:
            Conditionals of shape (N, L).
        """
        N, L = features.shape
        kv_cache = self.create_cache(N * self.bytes_per_record)
        batch = RaggedBatch(
            features=features.flatten().numpy(),
            values=np.ascontiguousarray(values.flatten().numpy(), np.float32),
            offsets=L * np.arange(N + 1),
            num_cached=np.zeros(N, np.int64),
            page_table=np.arange(N * kv_cache.pages_per_record).reshape(N, -1),
            depths=None if depths is None else np.tile(depths, N),
        )
        return self.conditionals(kv_cache, batch).reshape(N, L)

    def surprisal(self, conditional: Conditional, values: Tensor) -> Surprisal | None:
        """Return what `Conditional.compute_surprisal` returns: surprisals of values, and moments of the surprisal."""
        num_components = conditional.means.shape[-1]
        if not num_components:
            return None
        surprisal, minimum, mean, variance = torch.empty(4, *values.shape)
        task = abi.SurprisalTask(
            **_mixture_arrays(conditional),
            values=_float32(values),
            surprisal=surprisal,
            minimum=minimum,
            mean=mean,
            variance=variance,
            num_readings=values.numel(),
            num_components=num_components,
            next_reading=ctypes.c_int64(0),
        )
        _run_on_threads(self.library, "compute_surprisals", task, -(-values.numel() // READINGS_PER_STEP))
        return Surprisal(surprisal, minimum, mean, variance)

    def quantiles(self, conditional: Conditional, probabilities: Sequence[float]) -> Tensor:
        """Return what `Conditional.quantiles` returns; the quantiles of mixtures are computed in float32."""
        continuous = torch.empty(len(probabilities), *conditional.discrete.shape)
        num_components, num_readings = conditional.means.shape[-1], conditional.discrete.numel()
        if not num_components or not continuous.numel():
            return conditional.quantiles(probabilities)
        task = abi.QuantileTask(
            **_mixture_arrays(conditional),
            levels=torch.tensor(probabilities, dtype=torch.float32),
            quantiles=continuous,
            num_readings=num_readings,
            num_components=num_components,
            num_levels=len(probabilities),
            next_reading=ctypes.c_int64(0),
        )
        _run_on_threads(self.library, "compute_quantiles", task, -(-num_readings // READINGS_PER_STEP))
        return conditional.quantiles(probabilities, continuous)

    def _score_batch(
        self,
        kv_cache: CpuKVCache,
        batch: RaggedBatch,
        hidden: Tensor | None = None,
        score_terms: Floats | None = None,
    ) -> PriorConditional | None:
        """Run the network over new readings and write one of the two outputs.

        Args:
            kv_cache: The cache, which gets the keys and values of all readings.
            batch: The readings, Z of which are scored.
            hidden: (Z, d) output: the outputs of the layers at query tokens; or None.
            score_terms: (3, Z) output, see `score`; or None.

        Returns:
            The conditionals of the Gaussian prior that the network was given, or None if the model has no prior.
        """
        prior, query_offsets = self.model.gaussians, batch.query_offsets
        prior_terms: Tensor | None = None
        if prior is not None:
            prior_terms = torch.empty(3, int(query_offsets[-1]), round_up(prior.num_components, PRIOR_LANES))
        log_weights, means, scales = (None,) * 3 if prior_terms is None else prior_terms
        task = abi.Batch(
            network=self.network,
            features=batch.features,
            values=batch.values,
            offsets=batch.offsets,
            query_offsets=query_offsets,
            num_cached=batch.num_cached,
            depths=batch.depths,
            page_table=batch.page_table,
            page_pool=kv_cache.pool,
            prior_log_weights=log_weights,
            prior_means=means,
            prior_scales=scales,
            hidden=hidden,
            score_terms=score_terms,
            next_unit=ctypes.c_int64(0),
            num_records=len(batch.num_cached),
            page_table_columns=batch.page_table.shape[1],
            page_bytes=kv_cache.page_bytes,
            tokens_per_unit=TOKENS_PER_UNIT,
        )
        num_units = int(batch.offsets[-1] + query_offsets[-1]) // TOKENS_PER_UNIT + 1
        _run_on_threads(self.library, "score_batch", task, num_units)
        if prior is None or prior_terms is None:
            return None
        has_prior = prior.column_by_code[torch.from_numpy(batch.features)] >= 0
        log_weights, means, scales = prior_terms[..., : prior.num_components]
        return PriorConditional(log_weights, means, scales, has_prior)


def _mixture_arrays(conditional: Conditional) -> dict[str, Tensor]:
    return {name: _float32(getattr(conditional, name)) for name in ("log_weights", "means", "scales")}


@contextlib.contextmanager
def attached_kernels(model: DEformer) -> Iterator[CpuKernels | None]:
    """Attach the compiled library to the model within a `with` block, as reading it from a model directory does.

    Yields:
        The model's kernels, or None if compiled code is not available or does not support the model.
    """
    before = model.kernel_library
    if before is None:
        model.kernel_library = build.load_kernels(model.config.precision == "bfloat16")
    try:
        yield CpuKernels.for_model(model)
    finally:
        model.kernel_library = before


def _run_on_threads(library: ctypes.CDLL, function: str, task: abi.KernelStruct, num_units: int) -> None:
    """Execute a function of the library on all threads, which take units of work from a counter of the task.

    Args:
        library: The compiled kernels.
        function: The name of a function that takes the address of a task and returns a negative number if memory is
            short.
        task: The task, which has a counter that all threads share.
        num_units: The number of units of work; there is no use for more threads.

    Raises:
        MemoryError: A thread could not allocate its scratch memory.
    """
    num_threads = torch.get_num_threads()
    team = abi.ThreadTeam(function=_function_address(library, function), task=task, calls_left=num_units, failed=0)
    run_parallel = _openmp_runner() if min(num_threads, num_units) > 1 else None
    if run_parallel is None:
        library.run_one_thread(ctypes.byref(team))
    else:
        run_parallel(library.run_one_thread, ctypes.byref(team), num_threads, 0)
    if team.failed:
        raise MemoryError(f"the compiled kernels have too little memory for {function}: free memory or lower the batch")


@cache
def _function_address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of a function of the library."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@cache
def _openmp_runner() -> Callable[..., None] | None:
    """Return OpenMP's function that calls another one on several threads, from the library that PyTorch has loaded.

    Its arguments are the function, the function's argument, the number of threads and 0. PyTorch's operators run on the
    same threads, which wait actively for a while after their work. Other threads would compete with them for the cores.
    None if PyTorch was built with another OpenMP or none; the kernels then run on one thread.
    """
    runner: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if runner is None:
        log.get_logger("kernels").info("kernels_single_threaded", reason="PyTorch has not loaded GNU OpenMP (libgomp)")
        return None
    runner.restype, runner.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return cast("Callable[..., None]", runner)
