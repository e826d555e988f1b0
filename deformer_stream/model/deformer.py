"""The DEformer: a Transformer that gives the distribution of a record's next reading, in any arrival order.

The model factorises the density of a record with readings in the order o by the chain rule (Alcorn and Nguyen, "The
DEformer: An Order-Agnostic Distribution Estimating Transformer", arXiv 2106.06989):

    p(x) = Π_k p(x_{o_k} | x_{o_1}, …, x_{o_{k−1}})

Two tokens per reading enter the Transformer, interleaved as z_1, u_1, z_2, u_2, …:

- The query token z_k = g_z(identity of feature o_k) says which feature comes next. The output at z_k parametrises the
  conditional distribution of its value.
- The observation token u_k = g_u(identity of feature o_k, its value) says which value it had.

The causal mask lets z_k attend to u_1 … u_{k−1}, and u_k to u_1 … u_k. So no token depends on the value it predicts or
on later readings. There are no positional encodings: a feature's identity is all that the order needs.

The hyperparameters (`config.ModelConfig`) select variants:

- whether tokens also attend to earlier query tokens (`memory`);
- one token per reading in place of two (`tokens`);
- a Gaussian prior, which is fitted before training: a mixture of Gaussians (`gaussians`) or a Gaussian process
  (`neighbors`). Its conditionals are added to the query tokens, and its components join the output distribution.

If the readings of the schema are irregular (`Schema.reading_times`), a sensor has any number of readings in a record.
The identity of a reading is then its feature and its time (`time_inputs`). The readings that a method gets are the
context of the last one: the earlier readings of its record, or some of them (`bounded_context`).

`DEformer` computes the same conditionals in two ways:

- `conditionals` computes all conditionals of complete records at once. Training uses it; it is the reference.
- `forward_cached` adds readings to records whose keys and values are cached. Adding one reading is a step of streaming,
  adding several to an empty cache is a prefill. Any split of a record gives the conditionals of the first way.

Shapes use these letters: N is the number of records, L the number of (new) readings of each record, and F the number of
features. d is the width of a token (`d_model`), H the number of attention heads, and d_head = d / H. T is the number of
(new) tokens of each record, and P the number of cached tokens of the longest record. *S stands for a shape S of any
length.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.model.attention import attend
from deformer_stream.model.config import AttentionContext, ModelConfig
from deformer_stream.model.constants import MAX_CONDITIONING_VALUE
from deformer_stream.model.distributions import Conditional, Head, build_prior_conditional
from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.layers import Encoder, TransformerLayer
from deformer_stream.model.parameters import (
    ModelParameters,
    allocate_label_rows,
    compute_cycle_angles,
    compute_identity_width,
    count_cached_tokens,
    standardise_coordinates,
)
from deformer_stream.model.process_conditionals import apply_process, check_outlier_limit, fill_ages
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.schema import LINEAR_LIMIT, Schema
from deformer_stream.model.time_inputs import compute_gaps, encode_times

__all__ = ["DEformer", "KVCacheView", "ModelConfig", "StepOutput"]


@dataclass(frozen=True, slots=True)
class KVCacheView:
    """The attention keys and values of the earlier tokens of N records, padded at the end to P tokens per record.

    Attributes:
        keys: The attention keys, one tensor (N, H, P, d_head) per Transformer layer, for H attention heads of width
            d_head.
        values: The attention values, one tensor (N, H, P, d_head) per Transformer layer.
        lengths: (N,), the number of cached tokens of each record. Entries after them are padding of any value.
        readings: (N, P, 2), for each token two floating-point numbers that describe its reading: the feature code (the
            feature's index in the schema) and the normalised value or label code. None if the model does not need them
            (`DEformer.has_cached_readings`).
        ages: (N, P) float64, for each token the seconds from the origin of the record to its reading. None if the
            readings of the schema are not irregular.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Tensor
    readings: Tensor | None = None
    ages: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The conditional distributions of new readings, and the entries that the caller must append to the KV cache.

    There are L new readings for each of N records. They add M = L · `DEformer.cached_tokens_per_reading` tokens to the
    cache of each record.

    Attributes:
        conditional: The distribution of each new reading given the earlier readings of its record, of shape (N, L).
        keys: The attention keys of the new tokens, one tensor (N, H, M, d_head) per Transformer layer, for H attention
            heads of width d_head.
        values: The attention values of the new tokens, one tensor (N, H, M, d_head) per Transformer layer.
        readings: (N, M, 2), for each token two floating-point numbers that describe its reading: the feature code and
            the normalised value or label code. None if the model does not need them.
        ages: (N, M) float64, for each token the seconds from the origin of the record to its reading. None if the
            readings of the schema are not irregular.
    """

    conditional: Conditional
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    readings: Tensor | None = None
    ages: Tensor | None = None


class DEformer(nn.Module):
    """The density model of the records of one schema.

    It computes the distribution of each reading of a record given the readings that arrived before it. A batch of N
    records with at most L readings is given as two tensors, both in arrival order. `features` (N, L) int64 holds the
    codes of the features (indexes in the schema), −1 for padding at the end of a record. `values` (N, L) holds the
    values in normalised units (`Schema.normalise`), or the label's code for a discrete feature. A feature that was not
    observed does not appear. If readings are irregular, a third tensor `ages` (N, L) float64 holds the seconds from the
    origin of the record to each reading.

    Args:
        schema: The features of the records.
        config: The hyperparameters of the network.

    Attributes:
        kernel_library: The compiled CPU kernels that score in place of PyTorch, or None to score with PyTorch.
            `model_store.read` attaches them; `kernels.cpu.CpuKernels` calls them. The model's own methods ignore them.
        distance_library: As for `ModelParameters`.
        apply_layer: The function that computes a layer over complete records, `apply_layer` of this module. Training on
            a GPU replaces it by a compiled one.

    Raises:
        ValueError: The hyperparameter `identity` needs coordinates, but the features of the schema have none. Or the
            hyperparameters do not fit the schema, because only one of them is for irregular readings.
    """

    # Attributes that hold parameters or persistent buffers keep their names, because these are keys in
    # model.safetensors: embedding, label_embedding, identity_encoder, value_encoder, start, query_times,
    # observation_times, blocks, norm, gaussians, process, guidance, head, ranking, alert_distance, alert_prior.

    identity_encoder: Encoder | None
    start: nn.Parameter | None
    sensor_indexes: Tensor | None
    coordinates: Tensor | None
    cycle_angles: Tensor | None
    label_offsets: Tensor
    label_counts: Tensor
    is_context: Tensor

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        self.kernel_library: ctypes.CDLL | None = None
        self.distance_library: ctypes.CDLL | None = None
        self.apply_layer = apply_layer
        self._init_identities()
        self._init_labels()
        self._init_cycles()
        self._init_encoders()
        self._init_times()
        self.blocks = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        # With "post", the last layer has already normalised its output.
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.gaussians: GaussianPrior | None = None
        self.process: GaussianProcessPrior | None = None
        self.guidance: nn.Linear | None = None  # maps the prior's conditionals to what is added to the tokens
        # A prior contains only features whose values are numbers on a line, no labels or cyclic values.
        if schema.is_linear.any():
            if config.gaussians:
                self.gaussians = GaussianPrior(schema, config.gaussians)
            if config.neighbors:
                self.process = GaussianProcessPrior(
                    schema,
                    rank=config.process_rank,
                    num_scales=config.process_scales,
                    num_neighbors=config.neighbors,
                    decay=config.neighbor_decay,
                    outlier_limit=config.outlier_limit,
                )
                check_outlier_limit(config, len(schema))
        num_prior_components = self.num_prior_components
        if num_prior_components:
            # The inputs are the weight, the mean and the scale of each component (PriorConditional.to_network_input).
            self.guidance = nn.Linear(3 * num_prior_components, config.d_model)
        self.head = Head(schema, config.d_model, config.mixtures, num_prior_components)
        self.ranking = Ranking(schema, config.exemplars, config.num_ranking_terms) if config.exemplars else None
        self.alert_distance: AlertDistanceTensors | None = None
        if config.alert_exemplars:
            self.alert_distance = AlertDistanceTensors(schema, config.alert_exemplars)
        self.alert_prior: AlertPriorTensors | None = None
        if config.alert_prior:
            if not self.num_prior_components:
                raise ValueError("the hyperparameter alert_prior needs a feature that the Gaussian prior can contain")
            self.alert_prior = AlertPriorTensors(schema)
        self.register_buffer("is_context", torch.tensor(schema.is_context), persistent=False)

    def _init_identities(self) -> None:
        """Create the parts of the network that identify a feature: an embedding, standardised coordinates, or both.

        Coordinates are numbers that the schema gives for each feature, such as the row and column of a pixel. A sensor
        that can report several times in a record has one feature for each time slot of the record. These features share
        an embedding and differ in their coordinates, which express the time.
        """
        schema, config = self.schema, self.config
        num_coordinates = len(schema.features[0].coordinates or ())
        if config.identity != "embedding" and not num_coordinates:
            raise ValueError(
                f"the hyperparameter identity={config.identity!r} needs coordinates (numbers that identify a feature, "
                "such as its position), but the features of the schema have none: use identity='embedding'"
            )
        num_sensors = len(schema.sensor_names)
        self.embedding = nn.Embedding(num_sensors, config.embedding) if config.identity != "coordinates" else None
        # If no sensor has several features, row i of the embedding is for feature i, and no indexes are needed.
        sensor_indexes = torch.from_numpy(schema.sensor_indexes) if schema.has_repeating_sensors else None
        self.register_buffer("sensor_indexes", sensor_indexes, persistent=False)
        coordinates = None
        if config.identity != "embedding":
            coordinates = torch.from_numpy(standardise_coordinates(schema))
        self.register_buffer("coordinates", coordinates, persistent=False)

    def _init_labels(self) -> None:
        """Create the embedding of the labels of discrete features.

        Row 0 of the embedding is the zero vector, which continuous values get. Then each discrete sensor has one row
        for each label and one row for all labels that did not occur in training. If features are identified by their
        coordinates alone (given numbers, such as the row and column of a pixel), they all share one set of rows. A
        label then means the same for each feature, as the colour black does for each pixel.
        """
        counts = torch.tensor(self.schema.label_counts)
        num_rows, first_rows = allocate_label_rows(self.schema, is_shared=self.embedding is None)
        # One row means that no feature is discrete. The network then has no label embedding.
        self.label_width = self.config.embedding if num_rows > 1 else 0
        # With `padding_idx`, row 0 is the zero vector and stays so in training.
        self.label_embedding = nn.Embedding(num_rows, self.label_width, padding_idx=0) if self.label_width else None
        self.register_buffer("label_offsets", torch.from_numpy(first_rows), persistent=False)
        self.register_buffer("label_counts", counts, persistent=False)

    def _init_cycles(self) -> None:
        """Create the table that maps normalised values of cyclic features (such as times of day) to angles.

        The table is None if no feature is cyclic. Otherwise it has the shape (F, 2), with a row for each of the F
        features. Column 0 is the angle of the normalised value 0. Column 1 is the difference of angles that corresponds
        to a difference of 1 in normalised units. Both are in radians, and 0 for features that are not cyclic.
        """
        table = None
        if self.schema.is_cyclic.any():
            table = torch.from_numpy(compute_cycle_angles(self.schema))
        self.register_buffer("cycle_angles", table, persistent=False)

    def _init_encoders(self) -> None:
        """Create the encoders that make the tokens of the Transformer.

        With two tokens per reading, one encoder (g_z of the paper) makes query tokens, whose outputs predict values,
        from the vectors that identify features. The other encoder (g_u) makes observation tokens from these vectors and
        the observed values. With single tokens, one encoder makes each token from the vector that identifies the
        reading's feature and the vector that represents the previous reading. The first reading of a record has no
        previous reading, so the learned vector `start` takes its place.
        """
        hidden, d_model = self.config.hidden, self.config.d_model
        identity_width = compute_identity_width(self.schema, self.config)
        # A reading is represented by the vector that identifies its feature, one number, the sine and cosine of a
        # cyclic value, and the embedding of a label (`_build_reading_inputs`).
        cycle_width = 0 if self.cycle_angles is None else 2
        reading_width = identity_width + 1 + cycle_width + self.label_width
        if self.config.tokens == "single":
            self.identity_encoder = None
            self.value_encoder = Encoder(identity_width + reading_width, hidden, d_model)
            self.start = nn.Parameter(torch.randn(reading_width))
        else:
            self.identity_encoder = Encoder(identity_width, hidden, d_model)
            self.value_encoder = Encoder(reading_width, hidden, d_model)
            self.start = None

    def _init_times(self) -> None:
        """Create the linear maps of time inputs that are added to the tokens of irregular readings.

        Raises:
            ValueError: Readings are irregular, but the network has a mixture of Gaussians or a single token for each
                reading.
        """
        times, d = self.schema.reading_times, self.config.d_model
        if times is not None and (self.config.gaussians or self.config.tokens == "single"):
            raise ValueError(
                "a model of irregular readings needs two tokens for each reading (tokens='pair') and no mixture of "
                "Gaussians (gaussians=0): use neighbors for a prior"
            )
        self.query_times = None if times is None else nn.Linear(times.num_inputs, d)
        self.observation_times = None if times is None else nn.Linear(times.num_inputs, d)

    @property
    def num_prior_components(self) -> int:
        """The number of Gaussians in the distribution of a reading under the Gaussian prior, 0 without a prior."""
        if self.gaussians is not None:
            return self.gaussians.num_components
        return 0 if self.process is None else self.process.num_components

    @property
    def attention_context(self) -> AttentionContext | None:
        """The earlier tokens that a token attends to, if each reading has a query token and an observation token.

        A query token predicts the value of a reading, an observation token holds it. "values" means that only earlier
        observation tokens are attended to, "all" that earlier query tokens are too. The property is None for a model
        with a single token per reading, whose tokens attend to all earlier tokens.
        """
        return self.config.memory if self.config.tokens == "pair" else None

    @property
    def cached_tokens_per_reading(self) -> int:
        """The number of tokens that each reading adds to the KV cache.

        It is 2 if later tokens attend to both tokens of a reading, the query token and the observation token. It is 1
        if they attend to the observation token only, or if a reading has a single token.
        """
        return count_cached_tokens(self.config)

    @property
    def has_cached_readings(self) -> bool:
        """Whether the KV cache must also hold the reading (feature code and value) of each cached token.

        They are needed if the model has a Gaussian prior, because its distributions depend on the values of the earlier
        readings. They are also needed if each reading has a single token, because that token is made from the reading
        before it, which can be a cached one. Irregular readings need them for the time since the sensor's previous one.
        """
        return self.start is not None or self.num_prior_components > 0 or self.schema.reading_times is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.head.project.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.head.project.weight.device

    @property
    def is_float32_on_cpu(self) -> bool:
        """Whether the parameters are float32 numbers in the memory of the CPU."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    @staticmethod
    def from_parameters(parameters: ModelParameters) -> DEformer:
        """Return a network in evaluation mode with copies of the given parameters, on the CPU."""
        network = DEformer(parameters.schema, parameters.config)
        # torch.from_numpy warns of arrays that it must not write to, as those of a weights file are.
        network.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in parameters.arrays.items()})
        network.kernel_library, network.distance_library = parameters.kernel_library, parameters.distance_library
        return network.eval()

    def extract_parameters(self) -> ModelParameters:
        """Return the parameters as NumPy arrays. On the CPU they share the memory of the network's tensors."""
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in self.state_dict().items()}
        return ModelParameters(self.schema, self.config, arrays, self.kernel_library, self.distance_library)

    def conditionals(
        self,
        features: Tensor,
        values: Tensor,
        prior: PriorConditional | None = None,
        earlier_mask: Tensor | None = None,
        ages: Tensor | None = None,
        time_inputs: Tensor | None = None,
    ) -> Conditional:
        """Return the distribution of each reading given the earlier readings, for complete records.

        Args:
            features: (N, L), for each of N records the feature codes of L readings in arrival order; −1 for padding at
                the end.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            prior: The conditional distributions of the same readings under a Gaussian prior. By default they are
                computed with the model's own prior, if it has one. Training passes those of a prior that was fitted
                without the records of the batch.
            earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.
                With such a mask, one call computes several arrival orders of the same readings. Readings with which
                several orders begin are then present only once (`engine.order_trees`). If the model has a Gaussian
                prior, `prior` must then be passed too, because the default computation ignores the mask. The same holds
                for `time_inputs`.
            ages: (N, L) float64 seconds from the origin of the record to each reading, if readings are irregular.
            time_inputs: (N, L, T) inputs that express the times of irregular readings. By default they are computed
                from `ages` (`encode_times`).

        Returns:
            Distributions of shape (N, L); those of padding are meaningless.
        """
        codes = features.clamp(min=0)
        if prior is None:
            prior = self.apply_prior(features, values, ages)
        if time_inputs is None:
            time_inputs = self.encode_times(features, ages)
        num_readings = codes.shape[1]
        # Readings and densities need full precision, even if the caller computes the layers under autocast.
        full_precision = torch.autocast(self.device.type, enabled=False)
        with full_precision:
            # (N, 2L, d): the L query tokens, then the L observation tokens. (N, L, d) with single tokens.
            tokens = self._embed_tokens(codes, values, prior, None, earlier_mask, time_inputs)
            x = torch.cat(tokens, 1)
        for layer_index, layer in enumerate(self._iterate_layers()):
            # The head uses only the outputs of the first L tokens: the query tokens, or all single tokens.
            num_outputs = num_readings if layer_index == self.config.layers - 1 else x.shape[1]
            x = self.apply_layer(layer, x, num_outputs, self.attention_context, earlier_mask)
        with full_precision:
            return self._compute_conditional(x.to(self.dtype), codes, prior)

    def log_prob(
        self,
        features: Tensor,
        values: Tensor,
        prior: PriorConditional | None = None,
        ages: Tensor | None = None,
    ) -> Tensor:
        """Return ln p(value | earlier readings of the record) for each reading of complete records.

        Args:
            features: (N, L), for each of N records the feature codes of L readings in arrival order; −1 for padding at
                the end.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            prior: The conditional distributions of the same readings under a Gaussian prior. By default they are
                computed with the model's own prior, if it has one.
            ages: (N, L) float64 seconds from the origin of the record to each reading, if readings are irregular.

        Returns:
            (N, L) natural logarithms, larger is more probable. They are 0 for padding and for context features, which
            are inputs to the predictions of other features and are never scored.
        """
        log_prob = self.conditionals(features, values, prior, ages=ages).log_prob(values)
        is_padding = features < 0
        is_context = self.is_context[features.clamp(min=0)]
        return log_prob.masked_fill(is_padding | is_context, 0.0)

    def encode_times(self, features: Tensor, ages: Tensor | None, cache: KVCacheView | None = None) -> Tensor | None:
        """Return the inputs of the network that express the times of irregular readings.

        Args:
            features: (N, L), for each of N records the feature codes of L new readings in arrival order; −1 for
                padding.
            ages: (N, L) float64 seconds from the origin of the record to each reading.
            cache: The KV cache with the earlier readings of the records; None if there are none.

        Returns:
            (N, L, T) in the dtype of the model. None if the readings of the schema are not irregular.

        Raises:
            ValueError: Readings are irregular, but there are no ages.
        """
        if self.schema.reading_times is None:
            return None
        if ages is None:
            raise ValueError("the readings of the model's schema are irregular: pass the age of each reading (ages)")
        all_codes, all_ages = features, ages
        if cache is not None and cache.readings is not None and cache.ages is not None:
            cached_codes, _ = self._unpack_cached_readings(cache)
            all_codes = torch.cat([cached_codes, features], 1)
            all_ages = torch.cat([cache.ages[:, :: self.cached_tokens_per_reading], ages], 1)
        gaps = compute_gaps(all_codes, all_ages)[:, all_codes.shape[1] - features.shape[1] :]
        return encode_times(self.schema.reading_times, ages, gaps).to(self.dtype)

    def apply_prior(
        self, features: Tensor, values: Tensor, ages: Tensor | None = None, first: int = 0
    ) -> PriorConditional | None:
        """Return the distributions of the readings of contexts under the Gaussian prior, None if there is no prior.

        Args:
            features: (N, L), for each of N records the feature codes of L readings in arrival order; −1 for padding.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            ages: (N, L) float64 seconds from the origin of the record to each reading, if readings are irregular.
            first: Index of the first reading whose distribution is returned.
        """
        prior: PriorConditional | None = None
        if self.gaussians is not None:
            prior = cast(PriorConditional, self.gaussians(features, values))
            prior = prior[:, first:] if first else prior
        elif self.process is not None:
            prior = apply_process(self.process, features, values, fill_ages(features, ages), first)
        return prior

    def _unpack_cached_readings(self, cache: KVCacheView) -> tuple[Tensor, Tensor]:
        """Return the feature codes and the values of the cached readings, both (N, P'), for P' readings per record.

        The code of padding is −1. The cache must hold readings. If a reading has two cached tokens, it occurs once.
        """
        if cache.readings is None:
            raise ValueError("the KV cache has no readings (KVCacheView.readings is None)")
        is_padding = torch.arange(cache.readings.shape[1], device=self.device) >= cache.lengths[:, None]
        codes, values = cache.readings.unbind(-1)  # one entry per cached token
        codes = codes.long().masked_fill(is_padding, -1)
        # If a reading has two cached tokens, both have the same entry. Use the first one.
        step = self.cached_tokens_per_reading
        return codes[:, ::step], values[:, ::step]

    def prefill(self, features: Tensor, values: Tensor, ages: Tensor | None = None) -> StepOutput:
        """Return the conditional distributions and the KV cache entries of the first readings of records.

        Args:
            features: (N, L), for each of N records the feature codes of L readings in arrival order; −1 for padding at
                the end.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            ages: (N, L) float64 seconds from the origin of the record to each reading, if readings are irregular.

        Returns:
            The conditionals and the cache entries. Entries of padding are included; the caller must not store them.
        """
        # A prefill adds readings to an empty cache: no record has a cached token.
        num_records, num_heads = len(features), self.config.heads
        no_tokens = self._zeros(num_records, num_heads, 0, self.config.d_model // num_heads)
        no_tokens_by_layer = [no_tokens] * self.config.layers
        empty_cache = KVCacheView(
            keys=no_tokens_by_layer,
            values=no_tokens_by_layer,
            lengths=self._zeros(num_records),
            readings=self._zeros(num_records, 0, 2),
            ages=torch.zeros(num_records, 0, dtype=torch.float64, device=self.device),
        )
        return self.forward_cached(features, values, empty_cache, ages=ages)

    def forward_cached(
        self,
        features: Tensor,
        values: Tensor,
        cache: KVCacheView,
        prior: PriorConditional | None = None,
        ages: Tensor | None = None,
    ) -> StepOutput:
        """Return the conditional distributions and the KV cache entries of new readings, given cached earlier ones.

        A CUDA graph can capture this method if `prior` is passed in. The operations then do not depend on the contents
        of tensors, and create no tensor on the CPU. `compute_prior` cannot be captured, because it contains a Cholesky
        factorisation, which checks its result on the CPU.

        Args:
            features: (N, L), for each of N records the feature codes of L new readings in arrival order; −1 for padding
                at the end.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            cache: The cached tokens of the earlier readings of the N records.
            prior: The distributions of the new readings under the Gaussian prior, as `compute_prior` returns them for
                the same arguments. By default, this method calls it.
            ages: (N, L) float64 seconds from the origin of the record to each new reading, if readings are irregular.

        Returns:
            The conditionals and the cache entries. Entries of padding are included. For a record with n new readings,
            the caller must store only the first n · `cached_tokens_per_reading` entries.

        Raises:
            ValueError: The model needs the cached readings, but the cache does not hold them.
        """
        if cache.readings is None and self.has_cached_readings:
            reason = "makes a single token for each reading" if self.start is not None else "has a Gaussian prior"
            if self.schema.reading_times is not None:
                reason = "is for irregular readings"
            raise ValueError(
                f"the KV cache has no readings (KVCacheView.readings is None), but a model that {reason} needs them: "
                "store StepOutput.readings in the cache"
            )
        codes = features.clamp(min=0)
        prior = self.compute_prior(features, values, cache, ages) if prior is None else prior
        time_inputs = self.encode_times(features, ages, cache)
        # (N, T, d): z_1, u_1, z_2, u_2, …, or one token per reading.
        x = torch.stack(self._embed_tokens(codes, values, prior, cache, None, time_inputs), -2).flatten(1, 2)
        tokens_per_reading = 1 if self.attention_context is None else 2
        # The tokens that later tokens attend to: with "values" only u_1, u_2, …, otherwise all.
        stored_tokens = slice(1, None, 2) if self.attention_context == "values" else slice(None)
        T, P = x.shape[1], cache.keys[0].shape[2]
        is_hidden = ~self._build_token_mask(T)  # (T, T), among new tokens
        is_cache_padding = torch.arange(P, device=self.device) >= cache.lengths[:, None]
        is_cache_padding = is_cache_padding[:, None, None]  # (N, 1, 1, P), the same for all heads and queries
        stored_keys, stored_values = [], []
        for layer_index, layer in enumerate(self._iterate_layers()):
            q, k, v = layer.project_qkv(x)  # (N, H, T, d_head) each
            stored_keys.append(k[:, :, stored_tokens])
            stored_values.append(v[:, :, stored_tokens])
            if layer_index == self.config.layers - 1:
                # The head uses the output of the query tokens only: the first token of each pair, or single tokens.
                q, x = q[:, :, ::tokens_per_reading], x[:, ::tokens_per_reading]
                is_hidden = is_hidden[::tokens_per_reading]
            # For the one or two queries of a step, separate products with a softmax are faster than a fused kernel.
            new_scores = (q @ k.transpose(-1, -2)).masked_fill(is_hidden, -math.inf)  # (N, H, T, T)
            if P:
                cached_scores = q @ cache.keys[layer_index].transpose(-1, -2)  # (N, H, T, P)
                cached_scores = cached_scores.masked_fill(is_cache_padding, -math.inf)
                weights = torch.softmax(torch.cat([cached_scores, new_scores], -1), -1)  # (N, H, T, P + T)
                attended = weights[..., :P] @ cache.values[layer_index] + weights[..., P:] @ v
            else:
                attended = torch.softmax(new_scores, -1) @ v
            x = layer.apply_residual_branches(x, attended.transpose(1, 2).flatten(2))
        readings = None
        if self.has_cached_readings:
            readings = torch.stack([codes.to(self.dtype), values.to(self.dtype)], -1)  # (N, L, 2)
            readings = readings.repeat_interleave(self.cached_tokens_per_reading, 1)
        stored_ages = None
        if self.schema.reading_times is not None and ages is not None:
            stored_ages = ages.repeat_interleave(self.cached_tokens_per_reading, 1)
        conditional = self._compute_conditional(x, codes, prior)
        return StepOutput(conditional, stored_keys, stored_values, readings, stored_ages)

    def _compute_conditional(self, x: Tensor, codes: Tensor, prior: PriorConditional | None) -> Conditional:
        """Return the distributions of N · L readings.

        Args:
            x: (N, L, d) the outputs of the last layer at the tokens that predict the readings.
            codes: (N, L) the features of the readings.
            prior: The distributions of the same readings under the prior, None without a prior.
        """
        conditional: Conditional = self.head(self.norm(x), codes, prior)
        if self.alert_prior is None or prior is None:
            return conditional
        return replace(conditional, prior=build_prior_conditional(prior))

    def compute_prior(
        self, features: Tensor, values: Tensor, cache: KVCacheView, ages: Tensor | None = None
    ) -> PriorConditional | None:
        """Return the distributions of new readings under the Gaussian prior, given the earlier readings.

        The Gaussian prior was fitted before training; its conditionals are inputs of the network. The earlier readings
        of a new reading are all cached readings of its record and the new readings before it.

        Args:
            features: (N, L), for each of N records the feature codes of L new readings in arrival order; −1 for padding
                at the end.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            cache: The KV cache of the earlier readings. Only its attributes `readings`, `ages` and `lengths` are used.
                Records without cached readings have length 0.
            ages: (N, L) float64 seconds from the origin of the record to each new reading, if readings are irregular.

        Returns:
            Distributions of shape (N, L). None if the model has no prior, or if `cache.readings` is None, that is, if
            the cache does not store readings.
        """
        if not self.num_prior_components or cache.readings is None:
            return None
        # Return the distributions of the new readings only.
        return self.apply_prior(*self._append_to_cached(features, values, cache, ages))

    def compute_log_p_others(self, features: Tensor, values: Tensor, cache: KVCacheView, ages: Tensor) -> Tensor | None:
        """Return ln of the p-values of new readings given the earlier readings of other sensors, by the process.

        The arguments are those of `compute_prior`.

        Returns:
            (N, L) float64, 0 for readings that the process does not contain. None if the model has no process.
        """
        if self.process is None:
            return None
        all_codes, all_values, all_ages, first = self._append_to_cached(features, values, cache, ages)
        if all_ages is None:
            raise ValueError("the Gaussian process needs the age of each reading: pass ages")
        return self.process.compute_log_p_others(all_codes, all_values, all_ages, first)

    def _append_to_cached(
        self, features: Tensor, values: Tensor, cache: KVCacheView, ages: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return codes, values and ages of the cached and the new readings of records, and the number of cached ones.

        The code of padding is −1. The arguments are those of `compute_prior`.
        """
        cached_codes, cached_values = self._unpack_cached_readings(cache)
        all_codes = torch.cat([cached_codes, features], 1)
        all_values = torch.cat([cached_values.to(values.dtype), values], 1)
        all_ages = ages
        if ages is not None and cache.ages is not None:
            all_ages = torch.cat([cache.ages[:, :: self.cached_tokens_per_reading], ages], 1)
        return all_codes, all_values, all_ages, cached_codes.shape[1]

    def embed_query_tokens(
        self, features: Tensor, prior: PriorConditional | None, time_inputs: Tensor | None = None
    ) -> Tensor:
        """Return the query tokens: the inputs of the Transformer that say which feature's value to predict.

        The model must have two tokens per reading, not single tokens.

        Args:
            features: Feature codes in a batch of any shape S.
            prior: The conditional distributions of the same readings under the Gaussian prior, which are a further
                input of the tokens. None to leave them out.
            time_inputs: (*S, T) inputs that express the times of the readings. None if readings are not irregular.

        Returns:
            (*S, d), tokens of width d.
        """
        encoder = cast(Encoder, self.identity_encoder)
        token_by_feature = encoder(self.embed_identities())  # (F, d)
        # The backward pass of an embedding lookup is much faster than that of indexing.
        tokens = nn.functional.embedding(features, token_by_feature)
        return self._add_times(self._add_prior(tokens, prior), self.query_times, time_inputs)

    def embed_observation_tokens(self, features: Tensor, values: Tensor, time_inputs: Tensor | None = None) -> Tensor:
        """Return the observation tokens: the inputs of the Transformer that hold observed features and their values.

        The model must have two tokens per reading, not single tokens.

        Args:
            features: Feature codes in a batch of any shape S.
            values: The normalised values of continuous features and the label codes of discrete ones, of shape S.
            time_inputs: (*S, T) inputs that express the times of the readings. None if readings are not irregular.

        Returns:
            (*S, d), tokens of width d.
        """
        reading_inputs = self._build_reading_inputs(self.embed_identities(), features, values)
        return self._add_times(self.value_encoder(reading_inputs), self.observation_times, time_inputs)

    def embed_identities(self) -> Tensor:
        """Return the vector that identifies each of the F features: a learned embedding, coordinates or both.

        Coordinates are numbers that the schema gives for each feature, such as the row and column of a pixel; here they
        are standardised. Features of one sensor for several time slots share an embedding.

        Returns:
            (F, I), in the order of the features in the schema. I is the width of the embedding, the number of
            coordinates, or the sum of the two, depending on the hyperparameter `identity`.
        """
        vectors = []
        if self.embedding is not None:
            weight = self.embedding.weight  # one row per sensor; a sensor can have several features
            vectors.append(weight if self.sensor_indexes is None else weight[self.sensor_indexes])
        if self.coordinates is not None:
            vectors.append(self.coordinates.to(self.dtype))
        return torch.cat(vectors, -1)

    def _embed_tokens(
        self,
        features: Tensor,
        values: Tensor,
        prior: PriorConditional | None,
        cache: KVCacheView | None = None,
        earlier_mask: Tensor | None = None,
        time_inputs: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the input tokens of the Transformer: two tokens for each reading, or a single one.

        Of two tokens, the query token says which feature's value to predict, and the observation token holds the
        feature and its value. A single token holds the feature to predict, and the feature and value of the previous
        reading.

        Args:
            features: (N, L), for each of N records the feature codes of L readings; at padding any valid code.
            values: (N, L), the normalised values of continuous features and the label codes of discrete ones.
            prior: The conditional distributions of the readings under the Gaussian prior, of shape (N, L); None if the
                model has no prior.
            cache: The KV cache with the earlier readings; None if there are none. Single tokens use its last reading.
            earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.
            time_inputs: (N, L, T) inputs that express the times of irregular readings; None if they are not irregular.

        Returns:
            [query tokens, observation tokens], two tensors (N, L, d) of tokens of width d, or [single tokens], one such
            tensor.
        """
        if self.identity_encoder is not None:
            query_tokens = self.embed_query_tokens(features, prior, time_inputs)
            return [query_tokens, self.embed_observation_tokens(features, values, time_inputs)]
        identities = self.embed_identities()
        reading_inputs = self._build_reading_inputs(identities, features, values)
        previous = self._select_previous_readings(identities, reading_inputs, cache, earlier_mask)
        reading_identities = nn.functional.embedding(features, identities)
        single_tokens = self.value_encoder(torch.cat([reading_identities, previous], -1))
        return [self._add_prior(single_tokens, prior)]

    def _add_prior(self, tokens: Tensor, prior: PriorConditional | None) -> Tensor:
        """Return tokens plus a linear map of the Gaussian prior's distributions, so that these are network inputs.

        The Gaussian prior is a mixture of Gaussians that was fitted before training. The output of the map is
        multiplied by √d, as the outputs of the encoders are.

        Args:
            tokens: (*S, d), tokens of width d in a batch of any shape S.
            prior: The distributions of the same readings under the prior, in a batch of shape S. None returns the
                tokens unchanged.

        Returns:
            (*S, d), the tokens with the added terms.
        """
        if prior is None or self.guidance is None:
            return tokens
        prior_term: Tensor = self.guidance(prior.to_network_input().to(self.dtype))
        return tokens + math.sqrt(self.config.d_model) * prior_term

    def _add_times(self, tokens: Tensor, time_map: nn.Linear | None, time_inputs: Tensor | None) -> Tensor:
        """Return tokens plus a linear map of the inputs that express the times of their readings.

        The output of the map is multiplied by √d, as the outputs of the encoders are.

        Args:
            tokens: (*S, d), tokens of width d in a batch of any shape S.
            time_map: The linear map of the tokens; None if readings are not irregular, which returns the tokens.
            time_inputs: (*S, T) inputs that express the times.
        """
        if time_map is None or time_inputs is None:
            return tokens
        time_term: Tensor = time_map(time_inputs)
        return tokens + math.sqrt(self.config.d_model) * time_term

    def _build_reading_inputs(self, identities: Tensor, features: Tensor, values: Tensor) -> Tensor:
        """Return vectors that represent readings, as inputs of the encoder that makes tokens.

        A vector is the concatenation of the vector that identifies the feature, the normalised value, the sine and
        cosine of a cyclic value (if the schema has cyclic features) and the embedding of a label (if it has discrete
        features). Parts that do not apply to a feature are 0.

        Args:
            identities: (F, I), the vectors of width I that identify the F features, from `embed_identities`.
            features: Feature codes in a batch of any shape S.
            values: The normalised values of continuous features and the label codes of discrete ones, of shape S.

        Returns:
            (*S, W), where W is the sum of the widths of the parts.
        """
        is_discrete = self.label_counts[features] > 0
        # Clip extreme values, so that they cannot dominate the predictions of later readings.
        number = values.to(self.dtype).clamp(-MAX_CONDITIONING_VALUE, MAX_CONDITIONING_VALUE)
        number = number.masked_fill(is_discrete, 0.0)
        inputs = [nn.functional.embedding(features, identities), number.unsqueeze(-1)]
        if self.cycle_angles is not None:
            angle_at_zero, angle_per_scale = self.cycle_angles[features].to(self.dtype).unbind(-1)
            is_cyclic = (angle_per_scale != 0).unsqueeze(-1)
            # `Schema.normalise` made large values logarithmic. Undo that, because the angle is linear in the raw value.
            magnitude = number.abs()
            linear_beyond_limit = number.sign() * (LINEAR_LIMIT + (magnitude - LINEAR_LIMIT).expm1())
            linear_number = torch.where(magnitude > LINEAR_LIMIT, linear_beyond_limit, number)
            angle = angle_at_zero + angle_per_scale * linear_number
            inputs[1] = inputs[1].masked_fill(is_cyclic, 0.0)  # the angle replaces the number
            inputs.append(torch.stack([angle.sin(), angle.cos()], -1).masked_fill(~is_cyclic, 0.0))
        if self.label_embedding is not None:
            # The code after the last label stands for all labels that did not occur in training.
            label_code = torch.minimum(values.long().clamp(min=0), self.label_counts[features])
            # Row 0 is the zero vector, for continuous features.
            embedding_row = torch.where(is_discrete, self.label_offsets[features] + label_code, 0)
            inputs.append(self.label_embedding(embedding_row))
        return torch.cat(inputs, -1)

    def _select_previous_readings(
        self, identities: Tensor, reading_inputs: Tensor, cache: KVCacheView | None, earlier_mask: Tensor | None
    ) -> Tensor:
        """Return, for each reading, the vector that represents the reading before it.

        A model with a single token per reading makes the token from this vector. The reading before the first new
        reading of a record is its last cached reading. If there is none, the learned vector `start` takes its place.

        Args:
            identities: (F, I), the vectors of width I that identify the F features, from `embed_identities`.
            reading_inputs: (N, L, W), for each of N records the vectors of width W that represent its L readings, from
                `_build_reading_inputs`.
            cache: The KV cache with the earlier readings; None if there are none.
            earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

        Returns:
            (N, L, W), the vectors of the previous readings.
        """
        before_first = cast(Tensor, self.start).expand(len(reading_inputs), 1, -1)
        if cache is not None and cache.readings is not None and cache.readings.shape[1]:
            record_index = torch.arange(len(reading_inputs), device=self.device)
            # Each reading has one cached token. If a record has none, the index is −1, and `torch.where` below discards
            # the result.
            code, value = cache.readings[record_index, cache.lengths.long() - 1].unbind(-1)
            last_cached = self._build_reading_inputs(identities, code.long(), value).unsqueeze(1)
            has_cached_reading = (cache.lengths > 0)[:, None, None]
            before_first = torch.where(has_cached_reading, last_cached, before_first)
        if earlier_mask is None:
            return torch.cat([before_first, reading_inputs[:, :-1]], 1)
        # The reading before reading k is the latest of its earlier readings: the one that itself has the most earlier
        # readings. Row k, column j below is 0 if reading j is not earlier than reading k.
        num_earlier = earlier_mask.sum(1)
        rank_among_earlier = torch.where(earlier_mask, num_earlier + 1, 0)  # (L, L)
        latest_earlier_index = rank_among_earlier.argmax(1)
        # Index 0 of the concatenation is `before_first`, so reading j has the index j + 1.
        previous_index = torch.where(num_earlier > 0, latest_earlier_index + 1, 0)
        return torch.cat([before_first, reading_inputs], 1)[:, previous_index]

    def _build_token_mask(self, num_tokens: int) -> Tensor:
        """Return the mask that says to which of the new tokens of a record each new token attends.

        With two tokens per reading, the tokens are in the order z_1, u_1, z_2, u_2, …. The query token z_k predicts the
        value of the k-th new reading. The observation token u_k holds this value. With a single token per reading, the
        tokens are in the order of the readings.

        Each token attends to itself and to all tokens before it. If `attention_context` is "values", it does not attend
        to query tokens other than itself.

        Args:
            num_tokens: The number T of new tokens.

        Returns:
            (T, T) bool, true where the token of the row attends to the token of the column.
        """
        index = torch.arange(num_tokens, device=self.device)
        mask = index[:, None] >= index[None, :]  # rows are the tokens that attend, columns those attended to
        if self.attention_context == "values":
            is_observation_token = index[None, :] % 2 == 1  # u_1, u_2, … have odd indexes
            is_own_token = index[:, None] == index[None, :]
            mask = mask & (is_observation_token | is_own_token)
        return mask

    def _iterate_layers(self) -> Iterator[TransformerLayer]:
        """Iterate over the Transformer layers from the input to the output."""
        return (cast(TransformerLayer, layer) for layer in self.blocks)

    def _zeros(self, *shape: int) -> Tensor:
        """Return a tensor of zeros with the given shape, in the model's dtype and on its device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class AlertDistanceTensors(nn.Module):
    """The training records that the alert compares with an open record, and their distances, as parts of the network.

    Training sets the tensors; `alert_distance.AlertDistance` computes with them.

    Args:
        schema: The F features.
        num_stored: The number of stored training records.
    """

    # The names are part of the keys in model.safetensors; `AlertDistance` describes the tensors. `known`, (F, E), is
    # false where a stored record lacks a feature; its position is then 0.
    positions: Tensor
    known: Tensor
    deviations: Tensor
    starts: Tensor
    slopes: Tensor

    def __init__(self, schema: Schema, num_stored: int) -> None:
        super().__init__()
        num_counted = int((~schema.is_context).sum())
        self.register_buffer("positions", torch.zeros(len(schema), num_stored))
        self.register_buffer("known", torch.ones(len(schema), num_stored, dtype=torch.bool))
        self.register_buffer("deviations", torch.ones(len(schema)))
        self.register_buffer("starts", torch.zeros(num_counted, dtype=torch.float64))
        self.register_buffer("slopes", torch.zeros(num_counted, dtype=torch.float64))


class AlertPriorTensors(nn.Module):
    """The lines that turn combined p-values into terms of the alert, as parts of the network.

    Training sets the tensors; `alert_prior.AlertPrior` describes them and computes with them.

    Args:
        schema: The features.
    """

    # The names are part of the keys in model.safetensors.
    starts: Tensor
    slopes: Tensor

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        num_counted = int((~schema.is_context).sum())
        self.register_buffer("starts", torch.zeros(2, num_counted, dtype=torch.float64))
        self.register_buffer("slopes", torch.zeros(2, num_counted, dtype=torch.float64))


def to_tensor(array: NDArray[np.generic], model: DEformer) -> Tensor:
    """Return a NumPy array as a tensor on the model's device, with floating-point numbers in the model's dtype."""
    tensor = torch.from_numpy(array)
    return tensor.to(model.device, model.dtype) if tensor.is_floating_point() else tensor.to(model.device)


def apply_layer(
    layer: TransformerLayer,
    x: Tensor,
    num_outputs: int,
    attention_context: AttentionContext | None,
    earlier_mask: Tensor | None = None,
) -> Tensor:
    """Return the output of a layer over the tokens of complete records.

    Args:
        layer: The layer.
        x: (N, T, d) tokens of N records, in the order that `model.attention` describes.
        num_outputs: The number of tokens, from the first one on, whose output is computed.
        attention_context: What the tokens of pairs attend to (`attend`); None for single tokens.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        (N, num_outputs, d), the output of the first tokens.
    """
    q, k, v = layer.project_qkv(x)  # (N, H, T, d_head) each
    q, x = q[..., :num_outputs, :], x[..., :num_outputs, :]
    dropout = layer.dropout if layer.training else 0.0
    attended = attend(q, k, v, attention_context, dropout, earlier_mask)
    return layer.apply_residual_branches(x, attended.transpose(1, 2).flatten(2))  # heads concatenated
