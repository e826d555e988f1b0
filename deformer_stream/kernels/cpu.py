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
from deformer_stream.kernels import abi
from deformer_stream.kernels.abi import COLUMNS, MAX_HEADS, MAX_NEIGHBORS, MAX_PROCESS_SCALES, PRIOR_LANES
from deformer_stream.kernels.kv_cache import CpuKVCache, max_cached_readings, round_up
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional, Surprisal
from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.layers import TransformerLayer, get_activation, round_to_bfloat16
from deformer_stream.model.reading_times import ReadingTimes

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
MAX_COVARIANCES = 1 << 26
"""Largest number of covariances of features that the kernels store for the Gaussian process, for all time scales
together. They take eight bytes each."""


def is_supported(model: DEformer) -> bool:
    """Return whether the compiled kernels can score readings with this model.

    They need float32 weights on the CPU, two tokens per reading (a query token and an observation token), and
    layers whose widths fill whole vectors of the processor. If readings are irregular, their context must be limited.
    Their Gaussian process has at most `MAX_NEIGHBORS` neighbors, `MAX_PROCESS_SCALES` time scales, and covariances of
    at most `MAX_COVARIANCES` numbers.
    """
    config = model.config
    # A vector has 16 floats. Attention computes four vectors of its output together, and each head has whole vectors.
    has_whole_vectors = config.d_model % 64 == 0 and config.d_model // config.heads % 16 == 0
    # Matrix products compute tiles (parts of the result) of 32 columns.
    has_whole_tiles = config.feedforward % COLUMNS == 0
    is_float32_on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    has_token_pairs = config.tokens == "pair"
    return (
        is_float32_on_cpu
        and has_token_pairs
        and has_whole_vectors
        and has_whole_tiles
        and config.heads <= MAX_HEADS
        and (model.schema.reading_times is None or config.context_limit is not None)
        and config.neighbors <= MAX_NEIGHBORS
        and config.process_scales <= MAX_PROCESS_SCALES
        and (model.process is None or config.process_scales * len(model.schema) ** 2 <= MAX_COVARIANCES)
    )


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """New readings of R records, record after record without padding; M readings in total.

    Attributes:
        features: (M,) feature codes (indexes in the schema).
        values: (M,) values in normalised units; label codes for discrete features.
        offsets: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
        num_cached: (R,) the number of each record's readings that are in the KV cache before the batch is scored.
        page_table: (R, columns) for each record the indexes of its pages (fixed-size blocks) in the KV cache.
        depths: None if each reading is conditional on all earlier readings of its record. Otherwise the readings of a
            record are the nodes of a tree: each path from a root is one order of readings, and orders that begin alike
            share nodes. Then depths is (M,), the number of ancestors of each node. A node is conditional on its
            ancestors alone. Nodes are listed depth first. When a node with k ancestors is computed, these ancestors are
            the first k readings of its record in the cache. The node is then written at position k (from 0), where it
            replaces a node of an earlier path.
        num_prefill_only: (R,) how many of each record's first new readings are only written to the cache and not
            scored, because they were scored before. None if all new readings are scored.
        ages: (M,) seconds from the origin of the record to each reading. None if the readings of the schema are not
            irregular. The time since the previous reading of the same sensor is that among the earlier readings; of a
            node of a tree of orders, that among its ancestors.
    """

    features: Ints
    values: Floats
    offsets: Ints
    num_cached: Ints
    page_table: Ints
    depths: Ints | None = None
    num_prefill_only: Ints | None = None
    ages: Doubles | None = None

    @property
    def query_offsets(self) -> Ints:
        """Return the index of each record's first scored reading among all scored readings, (R + 1,).

        The last entry is the number of scored readings.
        """
        if self.num_prefill_only is None:
            return self.offsets
        num_unscored_before = np.append(0, np.cumsum(self.num_prefill_only))  # in all records before each record
        offsets: Ints = self.offsets - num_unscored_before
        return offsets

    def query_mask(self) -> Bools | slice:
        """Return an index that selects the scored readings among the M new ones.

        It is a mask, (M,), true for scored readings, or `slice(None)` if all are scored.
        """
        if self.num_prefill_only is None:
            return slice(None)
        # The first `num_prefill_only` new readings of each record are not scored.
        num_new = np.diff(self.offsets)
        first_of_record = self.offsets[:-1].repeat(num_new)
        position = np.arange(self.offsets[-1]) - first_of_record  # among the new readings of the record, from 0
        is_scored: Bools = position >= self.num_prefill_only.repeat(num_new)
        return is_scored


def pad_with_zeros(t: Tensor, num_rows: int, num_columns: int | None = None) -> Tensor:
    """Return a copy of a vector or matrix with zeros appended, up to a given size.

    Args:
        t: A vector or a matrix.
        num_rows: The number of rows of the result (of entries, for a vector).
        num_columns: The number of columns of the result; by default that of the matrix. Ignored for a vector.
    """
    num_added_rows = num_rows - len(t)
    if t.dim() == 1:
        return nn.functional.pad(t.detach(), (0, num_added_rows))
    num_added_columns = 0 if num_columns is None else num_columns - t.shape[1]
    # `pad` expects pairs (before, after), those of the last dimension first.
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
        dot_width: 2 if the processor multiplies pairs of bfloat16 numbers in one step, so that pairs of weights must
            be neighbours in memory; else 1.
        cache: An empty KV cache of the model. Compiled code must know where the cache stores the numbers of the
            Gaussian prior (a mixture whose exact conditionals are inputs of the network) in its pages.
    """

    def __init__(self, model: DEformer, dot_width: int, cache: CpuKVCache) -> None:
        self.model, self.dot_width, self.cache = model, dot_width, cache

    def pack(self) -> abi.Network:
        """Return the complete model as a structure for compiled code, which keeps all packed weights alive."""
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
            process=None if self.model.process is None else _pack_process(self.model.process),
            times=None if self.model.schema.reading_times is None else _pack_times(self.model.schema.reading_times),
            head=self._pack_head(),
        )

    def _pack_layer(self, layer: TransformerLayer) -> abi.Layer:
        """Return the weights of a Transformer layer as a structure for compiled code.

        They are those of two layer normalisations and of four linear maps: `qkv` (queries, keys and values), `out`
        (output of attention), `up` and `down` (into and out of the hidden layer of the feed-forward part).
        """
        norms = {
            f"{name}_{part}": _float32(getattr(getattr(layer, name), part))
            for name in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        linears = {name: cast(nn.Linear, getattr(layer, name)) for name in ("qkv", "out", "up", "down")}
        biases = {f"{name}_bias": _float32(linear.bias) for name, linear in linears.items()}
        weights = {name: self._pack_factors(linear) for name, linear in linears.items()}
        return abi.Layer(**norms, **biases, **weights)

    def _pack_factors(self, linear: nn.Linear) -> Tensor:
        """Return the weights of a linear map in the order in which compiled code reads them.

        Returns:
            (outputs / 32, inputs / dot_width, 32, dot_width), in bfloat16 if `dot_width` is 2, else in float32. The
            weights of 32 outputs for one input (for a pair of inputs, if `dot_width` is 2) are neighbours in memory.
        """
        weight = linear.weight.detach()
        if self.model.config.precision == "bfloat16":
            weight = round_to_bfloat16(weight)  # stored as float32 if the processor has no products of bfloat16 pairs
        num_outputs, num_inputs = weight.shape
        blocks = weight.view(num_outputs // COLUMNS, COLUMNS, num_inputs // self.dot_width, self.dot_width)
        packed = blocks.transpose(1, 2)
        return packed.to(torch.bfloat16 if self.dot_width == 2 else torch.float32).contiguous()

    def _pack_map(self, weight: Tensor, bias: Tensor, num_inputs: int) -> abi.LinearMap:
        """Return a linear map as a structure for compiled code, in float32 even if the model's layers use bfloat16.

        Args:
            weight: (outputs, inputs) the weights. Zero rows are added up to a multiple of 32 outputs.
            bias: (outputs,) the bias, padded in the same way.
            num_inputs: The number of inputs of the packed map. If it exceeds that of `weight`, the additional inputs
                have zero weights.
        """
        columns = round_up(len(weight), COLUMNS)
        # (columns / 32, inputs, 32): the weights of 32 outputs for one input are neighbours in memory.
        packed = pad_with_zeros(weight, columns, num_inputs).view(-1, COLUMNS, num_inputs).transpose(1, 2)
        padded_bias = pad_with_zeros(bias, columns)
        return abi.LinearMap(inputs=num_inputs, columns=columns, weights=_float32(packed), bias=_float32(padded_bias))

    def _pack_encoder(self) -> abi.TokenEncoder:
        """Return the weights that compute query tokens z (which feature is next) and observation tokens u.

        An observation token (feature and value of a reading) is the output of several linear maps with ReLU between
        them. A query token is the embedding of its feature, plus a linear map of the feature's distribution under the
        Gaussian prior (a mixture that is fitted before training), if the model has one. The model multiplies tokens by
        √d (d is the width of a token); here this factor is part of the weights. For irregular readings, a linear map of
        the time inputs is added to both tokens.
        """
        model = self.model
        root = math.sqrt(model.config.d_model)  # √d
        linears = cast(Sequence[nn.Linear], model.value_encoder.maps)
        weights = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        last_weight, last_bias = weights[-1]
        weights[-1] = root * last_weight, root * last_bias
        # The first map is split by `_split_first_map`. The inputs of each later map are the padded outputs of the one
        # before it.
        first_weight, first_bias = weights[0]
        width = round_up(len(first_bias), COLUMNS)
        maps, num_inputs = [], width
        for weight, bias in weights[1:]:
            maps.append(self._pack_map(weight, bias, num_inputs))
            num_inputs = maps[-1].columns
        query_map = time_map = None
        with torch.no_grad():
            # The query token of every feature, without the terms of the prior and of the time.
            identity = model.embed_query_tokens(torch.arange(len(model.schema)), None)
            # The linear maps of the prior's distribution and of the time inputs, as one map of both.
            query_linears = [linear for linear in (model.guidance, model.query_times) if linear is not None]
            if query_linears:
                # The biases are added to every query token, so they can be added to the embeddings here.
                for linear in query_linears:
                    identity = identity + root * linear.bias
                weight = torch.cat([root * linear.weight for linear in query_linears], 1)
                query_map = self._pack_map(weight, torch.zeros(len(weight)), weight.shape[1])
            if model.observation_times is not None:
                times = model.observation_times
                time_map = self._pack_map(root * times.weight, root * times.bias, times.in_features)
        return abi.TokenEncoder(
            width=width,
            num_maps=len(maps),
            identity=_float32(identity),
            **self._split_first_map(first_weight, first_bias, width),
            first_label_row=_int64(model.label_offsets),
            num_labels=_int64(model.label_counts),
            maps=abi.pack_array(abi.LinearMap, maps),
            query_map=query_map,
            time_map=time_map,
        )

    def _split_first_map(self, weight: Tensor, bias: Tensor, width: int) -> dict[str, Tensor]:
        """Split the first linear map of observation tokens into terms that can be computed beforehand.

        The input of the map is a concatenation of four vectors: embedding of the feature, value, sine and cosine (for
        features whose values lie on a cycle), and embedding of the label. Its output is therefore a sum of four terms.
        The terms of all F features and of all labels are computed here once, so that a reading needs only a lookup.

        Args:
            weight: (outputs, inputs) the weights of the map.
            bias: (outputs,) the bias of the map, which is added to the terms of the features.
            width: The number of outputs after zeros are appended.

        Returns:
            The arrays of `TokenEncoder` in csrc/abi.h by their names:

            - feature_share: (F, width) the term of each feature, bias included.
            - value_share: (3, width) the weights by which value, sine and cosine are multiplied.
            - cycle: (F, 2) angle of the value 0, and angle per unit of the value, in radians. Both are 0 for a feature
              without a cycle.
            - label_share: (rows of the label embedding, width) the term of each label.
        """
        model = self.model
        # The products are computed in float64, so that the stored terms are rounded to float32 only once.
        feature_embeddings = model.embed_identities().detach().double()
        num_cycle_inputs = 0 if model.cycle_angles is None else 2
        input_widths = [feature_embeddings.shape[1], 1, num_cycle_inputs, model.label_width]
        padded_weight = pad_with_zeros(weight, width).double()
        feature_weight, value_weight, cycle_weight, label_weight = torch.split(padded_weight, input_widths, 1)
        # A model without discrete features has embeddings of width 0, and the term is zero.
        labels = torch.zeros(1, 0) if model.label_embedding is None else model.label_embedding.weight.detach()
        cycle = torch.zeros(len(feature_embeddings), 2) if model.cycle_angles is None else model.cycle_angles
        # `value_share` has rows for sine and cosine, of zeros, even if there is no cycle.
        cycle_weight = pad_with_zeros(cycle_weight, width, 2)
        return {
            "feature_share": _float32(feature_embeddings @ feature_weight.T + pad_with_zeros(bias, width)),
            "value_share": _float32(torch.cat([value_weight, cycle_weight], 1).T),
            "cycle": _float32(cycle),
            "label_share": _float32(labels.double() @ label_weight.T),
        }

    def _pack_prior(self, prior: GaussianPrior) -> abi.Prior:
        """Return the parameters of the Gaussian prior as a structure for compiled code, in float64.

        The prior is a mixture of Gaussians. A vector of the processor holds one number of each of `PRIOR_LANES`
        components, so components are the last dimension. Components of weight 0 fill the last vector.
        """
        padded = round_up(prior.num_components, PRIOR_LANES)

        def pad(t: Tensor, fill: float) -> Tensor:
            """Return a copy of `t` whose last dimension is extended to `padded` components, with `fill` as value."""
            padding = (0, padded - prior.num_components)
            return nn.functional.pad(t.double(), padding, value=fill).contiguous()

        # The variant 0 of the prior is the one for scoring; a prior has further variants only during training.
        return abi.Prior(
            num_components=prior.num_components,
            padded_components=padded,
            num_features=prior.means.shape[-1],
            log_weights=pad(prior.log_weights[0], -math.inf),
            means=pad(prior.means[0].T, 0.0),
            covariances=pad(prior.covariances[0].permute(1, 2, 0), 1.0),  # not 0, to avoid divisions by 0
            # The KV cache stores a row of numbers of the prior for each reading. These arrays state the row's page and
            # its position in the page.
            row_page=self.cache.row_page,
            row_place=self.cache.row_place,
            column_by_code=_int64(prior.column_by_code),
        )

    def _pack_head(self) -> abi.Head:
        """Return the weights of the output head as a structure for compiled code.

        The head computes the distribution of the next value from the Transformer's output at a query token.
        """
        model, head, d = self.model, self.model.head, self.model.config.d_model
        # Only models that normalise before attention (pre-norm) have a normalisation after the last layer.
        norm = model.norm if isinstance(model.norm, nn.LayerNorm) else None
        # (F, 2) for each of F features ln of the probability of all labels that training has seen, and of all others.
        log_masses = torch.stack([torch.log1p(-head.unseen_mass), torch.log(head.unseen_mass)], 1)
        adjust = head.adjust  # its three outputs per component of the prior change log weight, mean and log scale
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


def _pack_process(process: GaussianProcessPrior) -> abi.Process:
    """Return the parameters of the Gaussian process prior as a structure for compiled code, in float64."""
    covariances = process.compute_covariances()  # (Q, F, F)
    noise_variances = process.compute_noise_variances()
    variances = covariances.diagonal(dim1=1, dim2=2).sum(0) + noise_variances
    share = process.outlier_share
    # The product of an infinite rate and the lag 0 would be NaN.
    rates = (1.0 / process.scales).clamp(max=torch.finfo(torch.float64).max)
    return abi.Process(
        num_features=covariances.shape[1],
        num_scales=len(covariances),
        num_neighbors=process.num_neighbors,
        decay=process.decay,
        covariances=covariances.transpose(0, 1).contiguous(),
        negative_rates=-rates,
        means=process.means.contiguous(),
        variances=variances,
        noise_variances=noise_variances,
        inverse_deviations=torch.where(process.is_linear[:-1], variances.rsqrt(), 0.0),
        outlier_factors=process.outlier_factor.contiguous(),
        log_weights=_float32(torch.stack([torch.log1p(-share), share.log()], -1)),
    )


def _pack_times(times: ReadingTimes) -> abi.TimeScales:
    """Return the constants of the inputs that express the times of readings as a structure for compiled code."""
    return abi.TimeScales(
        num_inputs=times.num_inputs,
        num_octaves=times.num_octaves,
        durations_per_second=1e6 / times.duration,
        resolutions_per_second=1e6 / times.resolution,
        largest_log_gap=math.log1p(times.duration / times.resolution),
    )


CUSUM_ARRAYS = (
    *("cusum_states", "codes", "values", "log_p_others"),
    *("log_resolutions", "slopes", "intercepts", "level_edges", "level_log_p", "largest_kinds"),
)
CUSUM_NUMBERS = (
    *("num_sensors", "num_cells", "record_slope", "record_intercept"),
    *("sensor_kappa", "offset_kappa", "record_kappa"),
    *("max_surprise", "max_repetition", "max_extreme", "tie_tolerance"),
)
"""The fields of `abi.AdvanceTask` that only cumulative sums need. They have the names of those of `CusumArguments`."""


@dataclass(frozen=True, slots=True)
class CusumArguments:
    """What `CpuKernels.advance` needs for cumulative sums.

    The numbers are those of `deformer_stream.calibration.cusum`.

    Attributes:
        cusum_states: (records, 5F + 1) the states of all open records, which are updated.
        codes: (M,) the sensors of the readings.
        values: (M,) their normalised values, as the network reads them.
        log_p_others: (M,) ln of the p-values given the readings of other sensors only; None if they are not computed.
        log_resolutions: (F,) ln of the width of each sensor's values, −inf if it is unknown.
        slopes: (5, F) slopes of the lines that turn the evidence of a sensor into statistics.
        intercepts: (5, F) their intercepts.
        level_edges: (F, K + 1) edges of the cells of each sensor's values, None without them.
        level_log_p: (F, K + 2) ln of the p-values below the cells, in each of them, and above them; None without them.
        largest_kinds: (M,) int8 output. It receives the code of the kind whose statistic has raised the anomaly score
            of the record with this reading (`find_largest_kinds`); −1 if the anomaly score has not risen.
        record_slope: Slope of the line of the record's sum.
        record_intercept: Its intercept.
        sensor_kappa: κ of the sums "improbable".
        offset_kappa: That of the sums "offset".
        record_kappa: κ of the sum of a record.
        max_surprise: Largest −ln p that a sum counts.
        max_repetition: Largest increment of the sum "repeated".
        max_extreme: Largest −ln p of the evidence "extreme".
        tie_tolerance: Largest difference of statistics that count as equal.
    """

    cusum_states: Floats
    codes: Ints
    values: Floats
    log_p_others: Doubles | None
    log_resolutions: Doubles
    slopes: Doubles
    intercepts: Doubles
    level_edges: Doubles | None
    level_log_p: Doubles | None
    largest_kinds: NDArray[np.int8]
    record_slope: float
    record_intercept: float
    sensor_kappa: float
    offset_kappa: float
    record_kappa: float
    max_surprise: float
    max_repetition: float
    max_extreme: float
    tie_tolerance: float

    @property
    def num_sensors(self) -> int:
        """The number F of sensors."""
        return len(self.log_resolutions)

    @property
    def num_cells(self) -> int:
        """The number K of cells of each sensor, 0 without cells."""
        return 0 if self.level_edges is None else self.level_edges.shape[1] - 1


class CpuKernels:
    """The compiled kernels (C code that scores readings on the CPU) together with the packed weights of one model.

    Args:
        model: A model for which `is_supported` returns True.
        library: The library that `load_library` returns for the precision of the model.

    Attributes:
        bytes_per_record: The size in bytes of the KV cache pages of a record that has a reading of every feature. If
            readings are irregular, it is that of the largest context.
        network: The model's weights in the structures that compiled code reads.
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
        """Return the kernels with the weights of a model, or None if PyTorch must compute its scores.

        Returns:
            The kernels; None if `model.kernel_library` is None (there is no compiled library), or if the kernels do not
            support the model.
        """
        if model.kernel_library is None or not is_supported(model):
            return None
        return CpuKernels(model, model.kernel_library)

    def create_cache(self, max_bytes: int, max_readings: int | None = None) -> CpuKVCache:
        """Return an empty KV cache for the model.

        Args:
            max_bytes: The largest size of the cache in bytes. The cache is larger only if one record needs more.
            max_readings: The largest number of readings of a record; by default the number that the model needs.
        """
        return CpuKVCache(self.model, int(self.library.kv_item_bytes()), max_bytes, max_readings)

    def score(self, kv_cache: CpuKVCache, batch: RaggedBatch, has_others: bool = False) -> Floats:
        """Score new readings, and write their keys and values into the cache.

        Args:
            kv_cache: The cache. The caller must have allocated pages for all new readings. Afterwards the caller must
                add the numbers of new readings to `kv_cache.num_cached_readings`.
            batch: The new readings. Z of them are scored; the others are only written to the cache.
            has_others: Whether to return a fourth row. The model must have a Gaussian process.

        Returns:
            (3, Z) one column for each scored reading. The first row is ln p of the value (its density or probability).
            The second row is ln of the p-value (probability of a value at most as likely). The third row is the
            centered NLL (−ln p minus its expected value). The fourth row, with `has_others`, is ln of the p-value under
            the process given the readings of other sensors only; it is 0 for readings that the process lacks.

        Raises:
            MemoryError: There is too little memory for intermediate results.
            TypeError: An array of the batch has another dtype than `RaggedBatch` states, or is not contiguous.
        """
        if batch.num_prefill_only is not None and self.model.cached_tokens_per_reading == 2:
            # This model also caches query tokens, which only scored readings have. So all readings are scored, and the
            # scores that are not requested are dropped.
            terms_of_all = self.score(kv_cache, replace(batch, num_prefill_only=None), has_others)
            return terms_of_all[:, batch.query_mask()]
        score_terms = np.empty((4 if has_others else 3, int(batch.query_offsets[-1])), np.float32)
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
        cusums: CusumArguments | None = None,
    ) -> None:
        """Update the running statistics of R records with M new readings, reading by reading.

        The running statistics of a record are sums over its readings, and its anomaly score so far. The anomaly score
        combines the p-values of the readings.

        Args:
            running: The running statistics of all open records, with the dtype `RUNNING_DTYPE`. Those of the R records
                are updated, except for the field `p_value`, which the caller computes from the anomaly score.
            record_index: (R,) the index of each record in `running`.
            offsets: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
            score_terms: (3, M) the result of `score` in float64: ln p, ln of the p-value, centered NLL.
            is_scored: (M,) False for readings that change no statistic. These are readings of context features (which
                condition the others but are not scored) and readings with a term that is not finite. None if all
                readings count.
            is_decided: (M,) False for readings after which the anomaly score is not updated, because readings with the
                same event time follow; None if it is updated after each reading.
            columns: (3 or more, M) output. The first three rows receive, for each reading, ln p of the value (NaN if
                the reading is not scored), the sum of ln p over the record so far, and the record's anomaly score so
                far (larger is more anomalous).
            p_value_exponent: The power to which p-values of readings are raised before they are combined.
            cusums: What the cumulative sums need, whose statistics take the place of combined p-values; None without
                sums. The states of the R records are updated.
        """
        # Without cumulative sums, the numbers of their fields are 0, and the addresses of their arrays NULL.
        cusum_fields: dict[str, Any] = dict.fromkeys(CUSUM_ARRAYS) | dict.fromkeys(CUSUM_NUMBERS, 0)
        if cusums is not None:
            cusum_fields = {name: getattr(cusums, name) for name in (*CUSUM_ARRAYS, *CUSUM_NUMBERS)}
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
            **cusum_fields,
        )
        self.library.advance_statistics(ctypes.byref(task))

    def conditionals(self, kv_cache: CpuKVCache, batch: RaggedBatch) -> Conditional:
        """Return the distributions of the values of M new readings, (M,), and write the readings into the cache.

        Each distribution is conditional on the earlier readings of the same record.

        Args:
            kv_cache: The cache, in which the pages of all new readings are allocated.
            batch: The new readings. Its `num_prefill_only` must be None, which means that all readings are scored.
        """
        # Compiled code runs the layers; normalisation and output head run in PyTorch, which returns distributions.
        hidden = torch.empty(len(batch.features), self.model.config.d_model)
        prior = self._score_batch(kv_cache, batch, hidden=hidden)
        head_input = self.model.norm(hidden)
        conditional: Conditional = self.model.head(head_input, torch.from_numpy(batch.features), prior)
        return conditional

    def conditionals_of_records(
        self, features: Tensor, values: Tensor, depths: Ints | None = None, ages: Tensor | None = None
    ) -> Conditional:
        """Return the conditional distributions of all readings of complete records, like `DEformer.conditionals`.

        Args:
            features: (N, L) feature codes of N records with L readings each, without padding.
            values: (N, L) values in normalised units, or label codes.
            depths: None if each reading is conditional on all earlier ones of its row. Otherwise each row is a tree of
                readings: each path from a root is one order of readings, and orders that begin alike share nodes. Then
                depths is (L,), the number of ancestors of each node. A node is conditional on its ancestors alone.
                Nodes are listed depth first.
            ages: (N, L) float64 seconds from the origin of the record to each reading, if readings are irregular.

        Returns:
            Distributions of shape (N, L).
        """
        N, L = features.shape
        # A context of irregular readings may exceed the limit of contexts in a stream.
        length = L if depths is None else int(depths.max(initial=-1)) + 1
        usual_readings = max_cached_readings(self.model)
        max_readings = max(usual_readings, length)
        num_usual_records = N * -(-max_readings // usual_readings)  # rounded up
        kv_cache = self.create_cache(num_usual_records * self.bytes_per_record, max_readings)
        # The cache is new and is not used again, so the records get its pages in order, without allocation.
        batch = RaggedBatch(
            features=features.flatten().numpy(),
            values=np.ascontiguousarray(values.flatten().numpy(), np.float32),
            offsets=L * np.arange(N + 1),
            num_cached=np.zeros(N, np.int64),
            page_table=np.arange(N * kv_cache.pages_per_record).reshape(N, -1),
            depths=None if depths is None else np.tile(depths, N),
            ages=None if ages is None else np.ascontiguousarray(ages.flatten().numpy(), np.float64),
        )
        return self.conditionals(kv_cache, batch).reshape(N, L)

    def surprisal(self, conditional: Conditional, values: Tensor) -> Surprisal | None:
        """Return the surprisal (−ln p) of each value under its distribution, as `Conditional.compute_surprisal` does.

        Args:
            conditional: Distributions of some shape S.
            values: (*S) one value for each distribution, in normalised units.

        Returns:
            Four tensors of shape S: the surprisal of each value; and the minimum, mean and variance of the surprisal
            of a random value from each distribution. None if the distributions have no mixture components, because all
            features are discrete.
        """
        num_components = conditional.means.shape[-1]
        if not num_components:
            return None
        surprisal, minimum, mean, variance = torch.empty(4, *values.shape)  # outputs of the C function
        task = abi.SurprisalTask(
            **_mixture_arrays(conditional),
            values=_float32(values),
            surprisal=surprisal,
            minimum=minimum,
            mean=mean,
            variance=variance,
            num_readings=values.numel(),
            num_components=num_components,
            next_reading=ctypes.c_int64(0),  # the counter from which each thread takes its next readings
        )
        num_steps = -(-values.numel() // READINGS_PER_STEP)  # rounded up
        _run_on_threads(self.library, "compute_surprisals", task, num_steps)
        return Surprisal(surprisal, minimum, mean, variance)

    def quantiles(self, conditional: Conditional, probabilities: Sequence[float]) -> Tensor:
        """Return quantiles of distributions, as `Conditional.quantiles` does.

        Compiled code computes the quantiles of continuous features, in float32, and PyTorch those of discrete ones.

        Args:
            conditional: Distributions of some shape S.
            probabilities: Q probabilities; a quantile is the value below which the distribution has this probability.

        Returns:
            (Q, *S) values in normalised units, or label codes.
        """
        # The output of the C function. It computes a quantile for discrete features, too, which is ignored at the end.
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
            next_reading=ctypes.c_int64(0),  # the counter from which each thread takes its next readings
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
        """Run the network over new readings, and write either hidden states or score terms into an array.

        The network has an observation token (feature and value) for each new reading. For each scored reading it also
        has a query token (feature only), at which it predicts the value.

        Args:
            kv_cache: The cache, into which the keys and values of all new readings are written.
            batch: The new readings, Z of which are scored.
            hidden: (Z, d) an array for the last layer's outputs, of width d, at the query tokens. None to compute
                `score_terms` instead.
            score_terms: (3, Z) an array with one column per scored reading. Its rows receive ln p of the value, ln of
                the p-value, and centered NLL (−ln p minus its expected value). A fourth row receives ln of the p-value
                given the readings of other sensors only. None to compute `hidden` instead.

        Returns:
            For each of the Z scored readings, the distribution of its value under the Gaussian prior (an input of the
            network). None if the model has no prior.
        """
        query_offsets = batch.query_offsets
        self._check_times(batch)
        num_components, prior_terms = self.model.num_prior_components, None
        if num_components:
            # The kernels compute whole vectors of components of a mixture.
            row_length = num_components if self.model.gaussians is None else round_up(num_components, PRIOR_LANES)
            prior_terms = torch.empty(3, int(query_offsets[-1]), row_length)
        log_weights, means, scales = (None,) * 3 if prior_terms is None else prior_terms
        task = abi.Batch(
            network=self.network,
            features=batch.features,
            values=batch.values,
            offsets=batch.offsets,
            query_offsets=query_offsets,
            num_cached=batch.num_cached,
            depths=batch.depths,
            ages=batch.ages,
            page_table=batch.page_table,
            page_pool=kv_cache.pool,
            prior_log_weights=log_weights,
            prior_means=means,
            prior_scales=scales,
            hidden=hidden,
            score_terms=score_terms,
            log_p_others=score_terms[3] if score_terms is not None and len(score_terms) > 3 else None,
            next_unit=ctypes.c_int64(0),
            num_records=len(batch.num_cached),
            page_table_columns=batch.page_table.shape[1],
            page_bytes=kv_cache.page_bytes,
            tokens_per_unit=TOKENS_PER_UNIT,
        )
        num_tokens = int(batch.offsets[-1] + query_offsets[-1])  # an observation token each, a query token if scored
        num_units = num_tokens // TOKENS_PER_UNIT + 1  # as in the C function
        _run_on_threads(self.library, "score_batch", task, num_units)
        if prior_terms is None:
            return None
        # A prior lacks labels and cyclic values.
        has_prior = torch.from_numpy(self.model.schema.is_linear[batch.features[batch.query_mask()]])
        log_weights, means, scales = prior_terms[..., :num_components]  # without padding
        return PriorConditional(log_weights, means, scales, has_prior)

    def _check_times(self, batch: RaggedBatch) -> None:
        """Check that a batch has the times that the model needs, because compiled code would read wrong memory.

        Raises:
            ValueError: Readings are irregular, and the ages are missing or have a wrong shape.
        """
        if self.model.schema.reading_times is None:
            return
        if batch.ages is None or batch.ages.shape != (len(batch.features),):
            raise ValueError(
                "the readings of the model's schema are irregular, but the batch does not have an age for each of "
                "them: pass RaggedBatch.ages"
            )


def _mixture_arrays(conditional: Conditional) -> dict[str, Tensor]:
    """Return the log weights, means and scales of the distributions' mixtures in float32, by these names."""
    return {name: _float32(getattr(conditional, name)) for name in ("log_weights", "means", "scales")}


@contextlib.contextmanager
def attached_kernels(model: DEformer) -> Iterator[CpuKernels | None]:
    """Attach the compiled kernels to a model within a `with` block, and detach them afterwards.

    This is for a model in training: a model that is read from a model directory has its kernels attached already.

    Yields:
        The model's kernels, or None if compiled code is not available or does not support the model.
    """
    previous_library = model.kernel_library
    if previous_library is None:
        model.kernel_library = load_library(model.config.precision == "bfloat16")
    try:
        yield CpuKernels.for_model(model)
    finally:
        model.kernel_library = previous_library


def _run_on_threads(library: ctypes.CDLL, function: str, task: abi.KernelStruct, num_units: int) -> None:
    """Call a C function once on each of PyTorch's threads, so that they share the work.

    The work consists of independent units. Each thread takes the next unit from a counter in `task` until none is left.

    Args:
        library: The compiled kernels.
        function: The name of the C function. It takes the address of a task, and returns a negative number if it cannot
            allocate memory.
        task: The arguments of the function, including the counter of units.
        num_units: The number of units of work. At most this many threads call the function.

    Raises:
        MemoryError: A thread could not allocate memory for intermediate results.
    """
    num_threads = torch.get_num_threads()
    team = abi.ThreadTeam(function=_function_address(library, function), task=task, calls_left=num_units, failed=0)
    run_parallel = _openmp_runner() if min(num_threads, num_units) > 1 else None
    # The C function `run_one_thread` calls the function of the team, and sets `failed` if that returns an error.
    if run_parallel is None:
        library.run_one_thread(ctypes.byref(team))
    else:
        no_flags = 0
        run_parallel(library.run_one_thread, ctypes.byref(team), num_threads, no_flags)
    if team.failed:
        raise MemoryError(
            f"the compiled kernels could not allocate memory for the intermediate results of the C function "
            f"{function}: free memory, or score fewer records at once"
        )


@cache
def _function_address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of a library's function, so that other C code can call the function."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@cache
def _openmp_runner() -> Callable[..., None] | None:
    """Return the function `GOMP_parallel` of GNU OpenMP, which calls another C function on several threads.

    `GOMP_parallel` takes the address of the other function, its argument, the number of threads, and flags (0). It is
    part of the OpenMP library that PyTorch has loaded, so kernels run on the threads of PyTorch's operators. After an
    operator, these threads spin (wait in a busy loop) for a while. Additional threads would compete with them for the
    processor's cores.

    Returns:
        `GOMP_parallel`; None if PyTorch uses no GNU OpenMP. The kernels then run on one thread.
    """
    # CDLL(None) contains the functions of all libraries that this process has loaded.
    runner: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if runner is None:
        reason = "PyTorch has not loaded GNU OpenMP (libgomp): install a build of PyTorch that uses it"
        log.get_logger("kernels").info("kernels_single_threaded", reason=reason)
        return None
    runner.restype, runner.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return cast("Callable[..., None]", runner)
