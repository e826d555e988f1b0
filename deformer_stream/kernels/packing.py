"""The weights of a model in the memory layout that the compiled kernels read (csrc/abi.h).

The weights are NumPy arrays (`model.parameters`), so packing needs no PyTorch. Products of weights are computed in
float64, so that packed numbers are rounded to float32 only once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.kernels import abi
from deformer_stream.kernels.abi import COLUMNS, PRIOR_LANES
from deformer_stream.kernels.kv_cache import CpuKVCache, round_up
from deformer_stream.model.constants import ACTIVATION_CODES, MIN_NOISE_VARIANCE
from deformer_stream.model.parameters import (
    ModelParameters,
    allocate_label_rows,
    compute_cycle_angles,
    compute_scale_floors,
    find_prior_columns,
)
from deformer_stream.model.reading_times import ReadingTimes

Array = NDArray[Any]
Floats32 = NDArray[np.float32]
Floats = NDArray[np.float64]

PROCESS_ARRAYS = ("means", "factors", "deviations", "noise", "scales", "outlier_share", "outlier_factor")
"""Names of the arrays of a Gaussian process prior: the buffers of `GaussianProcessPrior`."""


def pad_with_zeros(array: Array, num_rows: int, num_columns: int | None = None) -> Array:
    """Return a copy of a vector or matrix with zeros appended, up to a given size.

    Args:
        array: A vector or a matrix.
        num_rows: The number of rows of the result (of entries, for a vector).
        num_columns: The number of columns of the result; by default that of the matrix. Ignored for a vector.
    """
    padding = [(0, num_rows - len(array))]
    if array.ndim == 2:
        padding.append((0, 0 if num_columns is None else num_columns - array.shape[1]))
    return np.pad(array, padding)


def round_to_bfloat16(array: Floats32) -> NDArray[np.uint16]:
    """Return finite float32 numbers rounded to the nearest bfloat16 (of two, to the even one), as their bits.

    NumPy has no dtype for bfloat16. The bits are the upper half of those of the same number in float32.
    """
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    # Half of the last digit that is kept, minus one if that digit is even, so that a tie is rounded to an even digit.
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> Floats32:
    """Return the float32 numbers of the bits of bfloat16 numbers."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float32(array: Array) -> Floats32:
    """Return a contiguous float32 array with the numbers of `array`; a copy only if necessary."""
    return np.ascontiguousarray(array, np.float32)


class WeightPacker:
    """A converter of a model's weights into the structures that compiled code reads (csrc/abi.h).

    Args:
        parameters: The model.
        dot_width: 2 if the processor multiplies pairs of bfloat16 numbers in one step, so that pairs of weights must
            be neighbours in memory; else 1.
        cache: An empty KV cache of the model. Compiled code must know where the cache stores the numbers of the
            Gaussian prior (a mixture whose exact conditionals are inputs of the network) in its pages.
    """

    def __init__(self, parameters: ModelParameters, dot_width: int, cache: CpuKVCache) -> None:
        self.parameters, self.dot_width, self.cache = parameters, dot_width, cache

    def pack(self) -> abi.Network:
        """Return the complete model as a structure for compiled code, which keeps all packed weights alive."""
        parameters, config = self.parameters, self.parameters.config
        times = parameters.schema.reading_times
        layers = [self._pack_layer(f"blocks.{i}") for i in range(config.layers)]
        return abi.Network(
            d=config.d_model,
            num_heads=config.heads,
            feedforward=config.feedforward,
            num_layers=config.layers,
            tokens_per_reading=parameters.cached_tokens_per_reading,
            is_pre_norm=config.norm == "pre",
            activation=ACTIVATION_CODES[config.activation],
            layers=abi.pack_array(abi.Layer, layers),
            encoder=self._pack_encoder(),
            prior=self._pack_prior() if parameters.has_mixture else None,
            process=self._pack_process() if parameters.has_process else None,
            times=None if times is None else _pack_times(times),
            head=self._pack_head(),
        )

    def _pack_layer(self, name: str) -> abi.Layer:
        """Return the weights of a Transformer layer as a structure for compiled code.

        They are those of two layer normalisations and of four linear maps: `qkv` (queries, keys and values), `out`
        (output of attention), `up` and `down` (into and out of the hidden layer of the feed-forward part).
        """
        arrays = self.parameters.arrays
        norms = {
            f"{norm}_{part}": _float32(arrays[f"{name}.{norm}.{part}"])
            for norm in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        linears = {linear: self.parameters.get_linear(f"{name}.{linear}") for linear in ("qkv", "out", "up", "down")}
        biases = {f"{linear}_bias": _float32(bias) for linear, (_, bias) in linears.items()}
        weights = {linear: self._pack_factors(weight) for linear, (weight, _) in linears.items()}
        return abi.Layer(**norms, **biases, **weights)

    def _pack_factors(self, weight: Array) -> Array:
        """Return the weights of a linear map, (outputs, inputs), in the order in which compiled code reads them.

        Returns:
            (outputs / 32, inputs / dot_width, 32, dot_width), as bits of bfloat16 if `dot_width` is 2, else in float32.
            The weights of 32 outputs for one input (for a pair of inputs, if `dot_width` is 2) are neighbours in
            memory.
        """
        num_outputs, num_inputs = weight.shape
        factors: Array = _float32(weight)
        if self.parameters.config.precision == "bfloat16":
            factors = round_to_bfloat16(factors)
            if self.dot_width == 1:  # the processor has no products of bfloat16 pairs
                factors = widen_bfloat16(factors)
        blocks = factors.reshape(num_outputs // COLUMNS, COLUMNS, num_inputs // self.dot_width, self.dot_width)
        return np.ascontiguousarray(blocks.swapaxes(1, 2))

    def _pack_map(self, weight: Array, bias: Array, num_inputs: int) -> abi.LinearMap:
        """Return a linear map as a structure for compiled code, in float32 even if the model's layers use bfloat16.

        Args:
            weight: (outputs, inputs) the weights. Zero rows are added up to a multiple of 32 outputs.
            bias: (outputs,) the bias, padded in the same way.
            num_inputs: The number of inputs of the packed map. If it exceeds that of `weight`, the additional inputs
                have zero weights.
        """
        columns = round_up(len(weight), COLUMNS)
        # (columns / 32, inputs, 32): the weights of 32 outputs for one input are neighbours in memory.
        packed = pad_with_zeros(weight, columns, num_inputs).reshape(-1, COLUMNS, num_inputs).swapaxes(1, 2)
        padded_bias = pad_with_zeros(bias, columns)
        return abi.LinearMap(inputs=num_inputs, columns=columns, weights=_float32(packed), bias=_float32(padded_bias))

    def _pack_encoder(self) -> abi.TokenEncoder:
        """Return the weights that compute query tokens z (which feature is next) and observation tokens u.

        An observation token (feature and value of a reading) is the output of several linear maps with ReLU between
        them. A query token is the embedding of its feature, plus a linear map of the feature's distribution under the
        Gaussian prior, if the model has one. The model multiplies tokens by √d (d is the width of a token); here this
        factor is part of the weights. For irregular readings, a linear map of the time inputs is added to both tokens.
        """
        parameters, schema = self.parameters, self.parameters.schema
        root = math.sqrt(parameters.config.d_model)  # √d
        weights = [(w.astype(np.float64), b.astype(np.float64)) for w, b in parameters.get_encoder("value_encoder")]
        weights[-1] = root * weights[-1][0], root * weights[-1][1]
        # The first map is split by `_split_first_map`. The inputs of each later map are the padded outputs of the one
        # before it.
        first_weight, first_bias = weights[0]
        width = round_up(len(first_bias), COLUMNS)
        maps, num_inputs = [], width
        for weight, bias in weights[1:]:
            maps.append(self._pack_map(weight, bias, num_inputs))
            num_inputs = maps[-1].columns
        identity = self._embed_query_tokens()
        # The linear maps of the prior's distribution and of the time inputs, as one map of both.
        names = ["guidance"] if parameters.num_prior_components else []
        names += ["query_times"] if schema.reading_times is not None else []
        query_map = time_map = None
        if names:
            query_linears = [parameters.get_linear(name) for name in names]
            # The biases are added to every query token, so they can be added to the embeddings here.
            for _, bias in query_linears:
                identity = identity + root * bias.astype(np.float64)
            weight = np.concatenate([root * weight.astype(np.float64) for weight, _ in query_linears], 1)
            query_map = self._pack_map(weight, np.zeros(len(weight)), weight.shape[1])
        if schema.reading_times is not None:
            weight, bias = (root * array.astype(np.float64) for array in parameters.get_linear("observation_times"))
            time_map = self._pack_map(weight, bias, weight.shape[1])
        _, first_label_row = allocate_label_rows(schema, parameters.config.identity == "coordinates")
        return abi.TokenEncoder(
            width=width,
            num_maps=len(maps),
            identity=_float32(identity),
            **self._split_first_map(first_weight, first_bias, width),
            first_label_row=np.ascontiguousarray(first_label_row, np.int64),
            num_labels=np.ascontiguousarray(schema.label_counts, np.int64),
            maps=abi.pack_array(abi.LinearMap, maps),
            query_map=query_map,
            time_map=time_map,
        )

    def _embed_query_tokens(self) -> Floats:
        """Return the query token of every feature, without the terms of the prior and of the time, (F, d)."""
        tokens = self.parameters.embed_identities()
        *hidden_maps, (last_weight, last_bias) = self.parameters.get_encoder("identity_encoder")
        for weight, bias in hidden_maps:
            tokens = np.maximum(tokens @ weight.T.astype(np.float64) + bias, 0.0)
        return math.sqrt(self.parameters.config.d_model) * (tokens @ last_weight.T.astype(np.float64) + last_bias)

    def _split_first_map(self, weight: Floats, bias: Floats, width: int) -> dict[str, Floats32]:
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
        schema = self.parameters.schema
        feature_embeddings = self.parameters.embed_identities()
        # A model without discrete features has no embedding of labels. One of width 0 has the term zero.
        labels = self.parameters.arrays.get("label_embedding.weight", np.zeros((1, 0))).astype(np.float64)
        has_cycles = bool(schema.is_cyclic.any())
        input_widths = [feature_embeddings.shape[1], 1, 2 if has_cycles else 0, labels.shape[1]]
        ends = np.cumsum(input_widths)[:-1]
        feature_weight, value_weight, cycle_weight, label_weight = np.split(pad_with_zeros(weight, width), ends, 1)
        # `value_share` has rows for sine and cosine, of zeros, even if there is no cycle.
        cycle_weight = pad_with_zeros(cycle_weight, width, 2)
        return {
            "feature_share": _float32(feature_embeddings @ feature_weight.T + pad_with_zeros(bias, width)),
            "value_share": _float32(np.concatenate([value_weight, cycle_weight], 1).T),
            "cycle": _float32(compute_cycle_angles(schema) if has_cycles else np.zeros((len(schema), 2))),
            "label_share": _float32(labels @ label_weight.T),
        }

    def _pack_prior(self) -> abi.Prior:
        """Return the parameters of the Gaussian prior as a structure for compiled code, in float64.

        The prior is a mixture of Gaussians. A vector of the processor holds one number of each of several
        components, so components are the last dimension. Components of weight 0 fill the last `PRIOR_LANES` of them.
        """
        # The variant 0 of the prior is the one for scoring; a prior has further variants only during training.
        log_weights, means, covariances = (
            self.parameters.arrays[f"gaussians.{name}"][0].astype(np.float64)
            for name in ("log_weights", "means", "covariances")
        )
        num_components = len(log_weights)
        padded = round_up(num_components, PRIOR_LANES)

        def pad(array: Floats, fill: float) -> Floats:
            """Return a copy whose last dimension is extended to `padded` components, with `fill` as value."""
            padding = [(0, 0)] * (array.ndim - 1) + [(0, padded - num_components)]
            return np.ascontiguousarray(np.pad(array, padding, constant_values=fill))

        return abi.Prior(
            num_components=num_components,
            padded_components=padded,
            num_features=means.shape[-1],
            log_weights=pad(log_weights, -math.inf),
            means=pad(means.T, 0.0),
            covariances=pad(covariances.transpose(1, 2, 0), 1.0),  # not 0, to avoid divisions by 0
            # The KV cache stores a row of numbers of the prior for each reading. These arrays state the row's page and
            # its position in the page.
            row_page=self.cache.row_page,
            row_place=self.cache.row_place,
            column_by_code=find_prior_columns(self.parameters.schema),
        )

    def _pack_process(self) -> abi.Process:
        """Return the parameters of the Gaussian process prior."""
        parameters = self.parameters
        arrays = {name: parameters.arrays[f"process.{name}"] for name in PROCESS_ARRAYS}
        config = parameters.config
        return pack_process(arrays, parameters.schema.is_linear, config.neighbors, config.neighbor_decay)

    def _pack_head(self) -> abi.Head:
        """Return the weights of the output head as a structure for compiled code.

        The head computes the distribution of the next value from the Transformer's output at a query token.
        """
        parameters, schema, d = self.parameters, self.parameters.schema, self.parameters.config.d_model
        # Only models that normalise before attention (pre-norm) have a normalisation after the last layer.
        has_norm = "norm.weight" in parameters.arrays
        # (F, 2) for each of F features ln of the probability of all labels that training has seen, and of all others.
        unseen_mass = np.array([feature.unseen for feature in schema.features], np.float64)
        log_masses = np.stack([np.log1p(-unseen_mass), np.log(unseen_mass)], 1)
        num_prior_components = parameters.num_prior_components
        # Three outputs per component of the prior change log weight, mean and log scale.
        adjust_map = self._pack_map(*parameters.get_linear("head.adjust"), d) if num_prior_components else None
        return abi.Head(
            num_components=0 if schema.is_discrete.all() else parameters.config.mixtures,
            num_prior_components=num_prior_components,
            num_labels=int(schema.label_counts.max()),
            norm_weight=_float32(parameters.arrays["norm.weight"]) if has_norm else None,
            norm_bias=_float32(parameters.arrays["norm.bias"]) if has_norm else None,
            scale_floor=_float32(compute_scale_floors(schema)),
            unseen_log_mass=_float32(log_masses),
            label_counts=np.ascontiguousarray(schema.label_counts, np.int64),
            mixture_map=self._pack_map(*parameters.get_linear("head.project"), d),
            adjust_map=adjust_map,
        )


def pack_process(
    arrays: Mapping[str, NDArray[Any]], is_linear: NDArray[np.bool_], num_neighbors: int, decay: float
) -> abi.Process:
    """Return the parameters of a Gaussian process prior as a structure for compiled code, in float64.

    Args:
        arrays: The arrays `PROCESS_ARRAYS` by name, with the shapes of the buffers of `GaussianProcessPrior`.
        is_linear: (F,) whether the process contains the feature.
        num_neighbors: The largest number of neighbors of a reading.
        decay: The factor of the correlation of a reading for each later reading of its sensor.
    """
    arrays = {name: np.asarray(arrays[name], np.float64) for name in PROCESS_ARRAYS}
    factors, deviations, share = arrays["factors"], arrays["deviations"], arrays["outlier_share"]
    num_features = deviations.shape[1]
    # (Q, F, F) the covariance matrix of the features for each of Q time scales (`GaussianProcessPrior`).
    covariances = factors @ factors.swapaxes(1, 2) + deviations[:, :, None] ** 2 * np.eye(num_features)
    noise_variances = arrays["noise"] ** 2 + MIN_NOISE_VARIANCE
    variances = covariances.diagonal(axis1=1, axis2=2).sum(0) + noise_variances
    # The product of an infinite rate and the lag 0 would be NaN.
    with np.errstate(over="ignore"):
        rates = np.minimum(1.0 / arrays["scales"], np.finfo(np.float64).max)
    return abi.Process(
        num_features=num_features,
        num_scales=len(covariances),
        num_neighbors=num_neighbors,
        decay=decay,
        covariances=np.ascontiguousarray(covariances.swapaxes(0, 1)),
        negative_rates=-rates,
        means=np.ascontiguousarray(arrays["means"]),
        variances=variances,
        noise_variances=noise_variances,
        inverse_deviations=np.where(is_linear, 1.0 / np.sqrt(variances), 0.0),
        outlier_factors=np.ascontiguousarray(arrays["outlier_factor"]),
        log_weights=_float32(np.stack([np.log1p(-share), np.log(share)], -1)),
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
