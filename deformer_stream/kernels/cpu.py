"""The compiled CPU kernels: a model's weights in their memory layout, and the calls that score readings with them.

The kernels are C code that computes the same as `DEformer.forward_cached` and `DEformer.conditionals`, which are the
reference. They read the attention keys and values of open records directly from the pages of `CpuKVCache`, and need no
padding. A reading gets the same score to the last bit, however its record is split into batches and whatever other
records are in the batch. PyTorch computes the scores if there is no C compiler, if the model is on a GPU, and if
`is_supported` excludes the model.
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
"""Number of tokens that go through a layer together. They are few enough to stay in the processor's cache, and enough
that weights are read from memory once for many tokens."""
READINGS_PER_STEP = 32
"""Number of readings for which a thread computes surprisals or quantiles before it takes more from the shared counter.
The same number is in csrc/mixture_queries.c."""


def is_supported(model: DEformer) -> bool:
    """Return whether the compiled kernels can score readings with this model.

    They need float32 weights on the CPU, two tokens per reading (a query token and an observation token), and
    layers whose widths fill whole vectors of the processor.
    """
    config = model.config
    has_whole_vectors = config.d_model % 64 == 0 and config.d_model // config.heads % 16 == 0
    has_whole_tiles = config.feedforward % COLUMNS == 0 and config.heads <= MAX_HEADS
    is_float32_on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return has_whole_vectors and has_whole_tiles and config.tokens == "pair" and is_float32_on_cpu


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """New readings of R records, concatenated in the order of the records; M readings in total.

    Attributes:
        features: (M,) feature codes (indexes in the schema).
        values: (M,) values in normalised units; label codes for discrete features.
        offsets: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
        num_cached: (R,) the number of each record's readings that are in the KV cache before the call.
        page_table: (R, columns) the rows of the cache's page table that belong to the records.
        depths: (M,) the depth of each new reading. A reading of depth k sees the first k readings of its record in the
            cache, including those that this call has written. It is then written to the cache as reading number k (from
            0), over an earlier one. Several orders of readings can thus be scored as one record: orders that begin
            alike share nodes of a tree, and the nodes are listed depth first. With None, a reading sees all readings
            of its record before it.
        num_prefill_only: (R,) how many of each record's first new readings are only written to the cache and not
            scored, because they were scored before. With None, all new readings are scored.
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
        """Return the index of each record's first scored reading among all scored readings, (R + 1,).

        The last entry is the number of scored readings.
        """
        if self.num_prefill_only is None:
            return self.offsets
        num_unscored_before = np.append(0, np.cumsum(self.num_prefill_only))
        offsets: Ints = self.offsets - num_unscored_before
        return offsets

    def query_mask(self) -> Bools | slice:
        """Return an index that selects the scored readings among the new ones: a mask, (M,), or a slice of all."""
        if self.num_prefill_only is None:
            return slice(None)
        num_new = np.diff(self.offsets)
        first_of_record = self.offsets[:-1].repeat(num_new)
        position = np.arange(self.offsets[-1]) - first_of_record  # among the new readings of the record, from 0
        is_scored: Bools = position >= self.num_prefill_only.repeat(num_new)
        return is_scored


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def pad_with_zeros(t: Tensor, num_rows: int, num_columns: int | None = None) -> Tensor:
    """Return a vector or matrix with zeros appended.

    Args:
        t: A vector or a matrix.
        num_rows: The number of rows of the result (of entries, for a vector).
        num_columns: The number of columns of the result; by default that of the matrix. Ignored for a vector.
    """
    num_added_rows = num_rows - len(t)
    if t.dim() == 1:
        return nn.functional.pad(t.detach(), (0, num_added_rows))
    num_added_columns = 0 if num_columns is None else num_columns - t.shape[1]
    return nn.functional.pad(t.detach(), (0, num_added_columns, 0, num_added_rows))


def _float32(t: Tensor) -> Tensor:
    """Return a contiguous float32 tensor with the numbers of `t` and without gradients; a copy only if necessary."""
    return t.detach().float().contiguous()


def _int64(t: Any) -> Tensor:
    """Return a tensor or array-like as a contiguous tensor of int64."""
    return torch.as_tensor(t).to(torch.int64).contiguous()


class _WeightPacker:
    """A converter of a model's weights into the structures that compiled code reads (csrc/abi.h).

    Args:
        model: The model.
        dot_width: How many factors of a matrix product one instruction multiplies and adds, and which therefore lie
            side by side: 2 for pairs of bfloat16, else 1.
        cache: An empty cache of the model, from which the layout of the Gaussian prior's rows in pages is read.
    """

    def __init__(self, model: DEformer, dot_width: int, cache: CpuKVCache) -> None:
        self.model, self.dot_width, self.cache = model, dot_width, cache

    def pack(self) -> abi.Network:
        """Return the structure of the complete model, which keeps all packed weights alive."""
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
        """Return the weights of a Transformer layer: of two normalisations and four linear maps."""
        norms = {
            f"{name}_{part}": _float32(getattr(getattr(layer, name), part))
            for name in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        linears = {name: cast(nn.Linear, getattr(layer, name)) for name in ("qkv", "out", "up", "down")}
        biases = {f"{name}_bias": _float32(linear.bias) for name, linear in linears.items()}
        return abi.Layer(**norms, **biases, **{name: self._pack_factors(linear) for name, linear in linears.items()})

    def _pack_factors(self, linear: nn.Linear) -> Tensor:
        """Return the weights of a linear map in the order in which the kernels read them.

        Returns:
            (outputs / 32, inputs / dot_width, 32, dot_width), in bfloat16 if `dot_width` is 2, else in float32. So 32
            outputs, and for each of them `dot_width` inputs, lie side by side.
        """
        weight = linear.weight.detach()
        if self.model.config.precision == "bfloat16":
            weight = round_to_bfloat16(weight)
        num_outputs, num_inputs = weight.shape
        blocks = weight.view(num_outputs // COLUMNS, COLUMNS, num_inputs // self.dot_width, self.dot_width)
        packed = blocks.transpose(1, 2)
        return packed.to(torch.bfloat16 if self.dot_width == 2 else torch.float32).contiguous()

    def _pack_map(self, weight: Tensor, bias: Tensor, num_inputs: int) -> abi.LinearMap:
        """Return the structure of a linear map, in float32 whatever precision the layers have.

        Args:
            weight: (outputs, inputs) the weights. They are padded with zeros to a multiple of 32 outputs.
            bias: (outputs,) the bias, padded in the same way.
            num_inputs: The number of inputs of the packed map, at least that of the weight. The rest is zeros.
        """
        columns = round_up(len(weight), COLUMNS)
        # (columns / 32, inputs, 32): the weights of 32 outputs for one input lie side by side.
        packed = pad_with_zeros(weight, columns, num_inputs).view(-1, COLUMNS, num_inputs).transpose(1, 2)
        padded_bias = pad_with_zeros(bias, columns)
        return abi.LinearMap(inputs=num_inputs, columns=columns, weights=_float32(packed), bias=_float32(padded_bias))

    def _pack_encoder(self) -> abi.TokenEncoder:
        """Return the weights that compute query tokens z (which feature is next) and observation tokens u.

        An observation token (feature and value of a reading) is the output of several linear maps with ReLU between
        them. The model multiplies tokens by √d, for tokens of width d. Here this factor is part of the weights.
        """
        model = self.model
        root = math.sqrt(model.config.d_model)  # √d
        linears = cast(Sequence[nn.Linear], model.value_encoder.maps)
        weights = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        weights[-1] = root * weights[-1][0], root * weights[-1][1]
        # The first map is split by `_split_first_map`. The inputs of each later map are the padded outputs of the one
        # before it.
        width = round_up(len(weights[0][1]), COLUMNS)
        maps, num_inputs = [], width
        for weight, bias in weights[1:]:
            maps.append(self._pack_map(weight, bias, num_inputs))
            num_inputs = maps[-1].columns
        with torch.no_grad():
            identity, prior_map = model.embed_query_tokens(torch.arange(len(model.schema)), None), None
            if model.guidance is not None:  # the linear map that adds the prior's conditional to a query token
                # Its bias is added to every query token, so it is made a part of the identities.
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
        """Split the first linear map of observation tokens into terms that can be computed beforehand.

        The input of the map is a concatenation of four vectors: feature identity, value, sine and cosine (for features
        on a cycle), and label embedding. Its output is therefore a sum of four terms. For F features, the term of each
        feature and of each label is computed here once.

        Args:
            weight: (outputs, inputs) the weights of the map.
            bias: (outputs,) the bias of the map, which is added to the terms of the features.
            width: The number of outputs, padded with zeros.

        Returns:
            The arrays of `TokenEncoder` in csrc/abi.h by their names: feature_share (F, width), value_share (3, width)
            for value, sine and cosine, cycle (F, 2) angle of the value 0 and angle per unit, and label_share (rows of
            the label embedding, width).
        """
        model = self.model
        identities = model.embed_identities().detach().double()
        input_widths = [identities.shape[1], 1, 2 if model.cycle_angles is not None else 0, model.label_width]
        padded_weight = pad_with_zeros(weight, width).double()
        by_feature, by_value, by_cycle, by_label = torch.split(padded_weight, input_widths, 1)
        labels = torch.zeros(1, 0) if model.label_embedding is None else model.label_embedding.weight.detach()
        cycle = torch.zeros(len(identities), 2) if model.cycle_angles is None else model.cycle_angles
        return {
            "feature_share": _float32(identities @ by_feature.T + pad_with_zeros(bias, width)),
            "value_share": _float32(torch.cat([by_value, pad_with_zeros(by_cycle, width, 2)], 1).T),
            "cycle": _float32(cycle),
            "label_share": _float32(labels.double() @ by_label.T),
        }

    def _pack_prior(self, prior: GaussianPrior) -> abi.Prior:
        """Return the parameters of the Gaussian prior in float64, with the components in the last dimension.

        Components of weight 0 are added up to a multiple of `PRIOR_LANES`. If the prior has several variants, the first
        one is packed: it is the one that is used for scoring.
        """
        padded = round_up(prior.num_components, PRIOR_LANES)

        def pad(t: Tensor, fill: float) -> Tensor:
            """Return a tensor with `fill` for the additional components in its last dimension."""
            padding = (0, padded - prior.num_components)
            return nn.functional.pad(t.double(), padding, value=fill).contiguous()

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
        """Return the weights that compute the distribution of the next value from the output at a query token."""
        model, head, d = self.model, self.model.head, self.model.config.d_model
        norm = model.norm if isinstance(model.norm, nn.LayerNorm) else None
        # (F, 2) for each of F features ln of the probability of all labels that training has seen, and of all others.
        log_masses = torch.stack([torch.log1p(-head.unseen_mass), torch.log(head.unseen_mass)], 1)
        adjust = head.adjust  # its outputs change log weight, mean and log scale of each component of the prior
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
    """The compiled kernels (C code that scores readings on the CPU) together with the packed weights of one model.

    Args:
        model: A model for which `is_supported` returns True.
        library: The library that `build.load_kernels` returns for the precision of the model.

    Attributes:
        bytes_per_record: The size in bytes of the cache pages of a record that has a reading of every feature.
        network: The packed weights.
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
        """Return the kernels with the weights of a model.

        Returns:
            The kernels; None if `model.kernel_library` is None, or if the kernels do not support the model.
        """
        if model.kernel_library is None or not is_supported(model):
            return None
        return CpuKernels(model, model.kernel_library)

    def create_cache(self, max_bytes: int) -> CpuKVCache:
        """Return an empty KV cache for the model.

        Args:
            max_bytes: The largest size of the cache in bytes. It is larger only if one record would otherwise not fit.
        """
        return CpuKVCache(self.model, int(self.library.kv_item_bytes()), max_bytes)

    def score(self, kv_cache: CpuKVCache, batch: RaggedBatch) -> Floats:
        """Score new readings, and write their keys and values into the cache.

        Args:
            kv_cache: The cache. The caller must have allocated the pages of all new readings, and must add them to
                `num_cached_readings` afterwards.
            batch: The new readings, Z of which are scored.

        Returns:
            (3, Z) for each scored reading ln p of the value (its density or probability), ln of the p-value
            (probability of a value at most as likely), and centered NLL (−ln p minus its expected value).

        Raises:
            MemoryError: There is too little memory for intermediate results.
            TypeError: An array of the batch has another dtype than `RaggedBatch` states, or is not contiguous.
        """
        if batch.num_prefill_only is not None and self.model.cached_tokens_per_reading == 2:
            # Query tokens are cached, too, so all readings must go through the layers like scored ones.
            terms_of_all = self.score(kv_cache, replace(batch, num_prefill_only=None))
            return terms_of_all[:, batch.query_mask()]
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
        """Update the running statistics of R records with M new readings, reading by reading.

        Args:
            running: The running statistics of all records in the engine's table (`RUNNING_DTYPE`). Those of the R
                records are updated, except for the p-value.
            record_index: (R,) the entry of each record in `running`.
            offsets: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
            score_terms: (3, M) the result of `score`, in float64.
            is_scored: (M,) False for readings that change no statistic, such as those of context features; None if all
                readings count.
            is_decided: (M,) False for readings after which the anomaly score is not updated, because readings with the
                same event time follow; None if it is updated after each reading.
            columns: (3 or more, M) output. The first three rows receive, for each reading, ln p of the value (NaN if
                the reading is not scored), the sum of ln p over the record so far, and the record's anomaly score so
                far (larger is more anomalous).
            p_value_exponent: The power to which p-values of readings are raised before they are combined.
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
        """Return the distributions of the values of M new readings, (M,), and write the readings into the cache.

        Each distribution is conditional on the earlier readings of the same record.

        Args:
            kv_cache: The cache, in which the pages of all new readings are allocated.
            batch: The new readings. All must be scored ones: `num_prefill_only` is None.
        """
        hidden = torch.empty(len(batch.features), self.model.config.d_model)
        prior = self._score_batch(kv_cache, batch, hidden=hidden)
        head_input = self.model.norm(hidden)
        conditional: Conditional = self.model.head(head_input, torch.from_numpy(batch.features), prior)
        return conditional

    def conditionals_of_records(self, features: Tensor, values: Tensor, depths: Ints | None = None) -> Conditional:
        """Return the conditional distributions of all readings of complete records, like `DEformer.conditionals`.

        Args:
            features: (N, L) feature codes of N records with L readings each, without padding.
            values: (N, L) values in normalised units, or label codes.
            depths: (L,) None for records. Otherwise each row of `features` is a tree, in which orders of readings that
                begin alike share nodes, and this is the depth of each node (0 for a root). Nodes are listed depth
                first, and a node sees only its ancestors.

        Returns:
            Distributions of shape (N, L).
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
        """Return the surprisal (−ln p) of each value, and the moments of the surprisal under its distribution.

        This computes the same as `Conditional.compute_surprisal`.

        Args:
            conditional: Distributions of some shape S.
            values: (*S) one value for each distribution, in normalised units.

        Returns:
            Surprisals of shape S; None if the distributions have no continuous part (no mixture components).
        """
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
        num_steps = -(-values.numel() // READINGS_PER_STEP)  # rounded up
        _run_on_threads(self.library, "compute_surprisals", task, num_steps)
        return Surprisal(surprisal, minimum, mean, variance)

    def quantiles(self, conditional: Conditional, probabilities: Sequence[float]) -> Tensor:
        """Return quantiles of distributions, like `Conditional.quantiles`, but those of mixtures in float32.

        Args:
            conditional: Distributions of some shape S.
            probabilities: Q probabilities; a quantile is the value below which the distribution has this probability.

        Returns:
            (Q, *S) values in normalised units, or label codes.
        """
        continuous = torch.empty(len(probabilities), *conditional.discrete.shape)
        num_components, num_readings = conditional.means.shape[-1], conditional.discrete.numel()
        if not num_components or not continuous.numel():
            return conditional.quantiles(probabilities)  # there is no mixture, or nothing to compute
        task = abi.QuantileTask(
            **_mixture_arrays(conditional),
            levels=torch.tensor(probabilities, dtype=torch.float32),
            quantiles=continuous,
            num_readings=num_readings,
            num_components=num_components,
            num_levels=len(probabilities),
            next_reading=ctypes.c_int64(0),
        )
        num_steps = -(-num_readings // READINGS_PER_STEP)  # rounded up
        _run_on_threads(self.library, "compute_quantiles", task, num_steps)
        return conditional.quantiles(probabilities, continuous)

    def _score_batch(
        self,
        kv_cache: CpuKVCache,
        batch: RaggedBatch,
        hidden: Tensor | None = None,
        score_terms: Floats | None = None,
    ) -> PriorConditional | None:
        """Run the network over new readings, and write one of two kinds of output into an array.

        Args:
            kv_cache: The cache, into which the keys and values of all new readings are written.
            batch: The new readings, Z of which are scored.
            hidden: (Z, d) output, for tokens of width d: what the last layer computes at each query token. None if
                `score_terms` is wanted.
            score_terms: (3, Z) output: ln p, ln of the p-value, and centered NLL of each scored reading. None if
                `hidden` is wanted.

        Returns:
            The distributions of the scored readings under the Gaussian prior (an input of the network), (Z,); None if
            the model has no prior.
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
        num_tokens = int(batch.offsets[-1] + query_offsets[-1])  # an observation token each, a query token if scored
        num_units = num_tokens // TOKENS_PER_UNIT + 1  # as in the C function
        _run_on_threads(self.library, "score_batch", task, num_units)
        if prior is None or prior_terms is None:
            return None
        has_prior = prior.column_by_code[torch.from_numpy(batch.features)] >= 0  # else the prior lacks the feature
        log_weights, means, scales = prior_terms[..., : prior.num_components]  # without padding
        return PriorConditional(log_weights, means, scales, has_prior)


def _mixture_arrays(conditional: Conditional) -> dict[str, Tensor]:
    """Return log weights, means and scales of the mixtures of distributions, as fields of a kernel's arguments."""
    return {name: _float32(getattr(conditional, name)) for name in ("log_weights", "means", "scales")}


@contextlib.contextmanager
def attached_kernels(model: DEformer) -> Iterator[CpuKernels | None]:
    """Attach the compiled kernels to a model that was not read from a model directory, within a `with` block.

    Yields:
        The model's kernels, or None if compiled code is not available or does not support the model.
    """
    previous_library = model.kernel_library
    if previous_library is None:
        model.kernel_library = build.load_kernels(model.config.precision == "bfloat16")
    try:
        yield CpuKernels.for_model(model)
    finally:
        model.kernel_library = previous_library


def _run_on_threads(library: ctypes.CDLL, function: str, task: abi.KernelStruct, num_units: int) -> None:
    """Call a C function on all threads of PyTorch, which share one task and take units of work from its counter.

    Args:
        library: The compiled kernels.
        function: The name of the C function. It takes the address of a task, and returns a negative number if it cannot
            allocate memory.
        task: The arguments of the function, with a counter from which each thread takes its next unit of work.
        num_units: The number of units of work. At most this many threads are used.

    Raises:
        MemoryError: A thread could not allocate memory for intermediate results.
    """
    num_threads = torch.get_num_threads()
    team = abi.ThreadTeam(function=_function_address(library, function), task=task, calls_left=num_units, failed=0)
    run_parallel = _openmp_runner() if min(num_threads, num_units) > 1 else None
    if run_parallel is None:
        library.run_one_thread(ctypes.byref(team))
    else:
        run_parallel(library.run_one_thread, ctypes.byref(team), num_threads, 0)
    if team.failed:
        raise MemoryError(
            f"the compiled kernels could not allocate memory for {function}: "
            f"free memory, or score fewer records at once"
        )


@cache
def _function_address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of a function of a library, so that C code can call it."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@cache
def _openmp_runner() -> Callable[..., None] | None:
    """Return the function `GOMP_parallel` of GNU OpenMP, which calls another C function on several threads.

    It takes the address of that function, its argument, the number of threads, and flags (0). The function is that of
    the OpenMP library that PyTorch has loaded, so kernels run on the threads of PyTorch's operators. These threads wait
    actively for a while after their work, and threads of our own would compete with them for the processor's cores.

    Returns:
        The function; None if PyTorch uses no GNU OpenMP. The kernels then run on one thread.
    """
    runner: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if runner is None:
        reason = "PyTorch has not loaded GNU OpenMP (libgomp): install a build of PyTorch that uses it"
        log.get_logger("kernels").info("kernels_single_threaded", reason=reason)
        return None
    runner.restype, runner.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return cast("Callable[..., None]", runner)
