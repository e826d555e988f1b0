"""The parameters of a model as NumPy arrays, and what follows from the schema and the hyperparameters alone.

`ModelParameters` holds what a model directory stores, without a network that computes with it. The compiled kernels
pack the arrays and score with them, so that scoring needs no PyTorch. `deformer.DEformer` is the network of the same
parameters in PyTorch, which training, GPUs and machines without compiled kernels use.

Shapes use these letters: F is the number of features, d the width of a token (`d_model`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.config import ModelConfig
from deformer_stream.model.constants import NUM_PROCESS_COMPONENTS, SCALE_FLOOR
from deformer_stream.model.schema import Schema

Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class TensorDescription(NamedTuple):
    """The shape and the dtype of one tensor of a model."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Model(Protocol):
    """What scoring needs of a model: `ModelParameters`, or the network in PyTorch (`deformer.DEformer`)."""

    schema: Schema
    config: ModelConfig
    kernel_library: ctypes.CDLL | None
    distance_library: ctypes.CDLL | None

    @property
    def num_prior_components(self) -> int:
        """The number of Gaussians in the distribution of a reading under the Gaussian prior, 0 without a prior."""

    @property
    def cached_tokens_per_reading(self) -> int:
        """The number of tokens that each reading adds to the KV cache."""

    @property
    def is_float32_on_cpu(self) -> bool:
        """Whether the parameters are float32 numbers in the memory of the CPU."""

    def extract_parameters(self) -> ModelParameters:
        """Return the parameters as NumPy arrays, without copying those in the memory of the CPU."""


@dataclass(slots=True, eq=False)
class ModelParameters:
    """The features, hyperparameters and weights of a model.

    Attributes:
        schema: The features of the records.
        config: The hyperparameters of the network.
        arrays: The weights by their keys in model.safetensors (`describe_tensors`).
        kernel_library: The compiled CPU kernels that score with these weights, None if PyTorch has to.
        distance_library: The compiled CPU kernels that measure distances to training records (`alert_distance`) if
            PyTorch scores, for example on a GPU. None if there are none, or if `kernel_library` is set.
        network: The network in PyTorch; None until `load_network.load_network` builds it.
    """

    schema: Schema
    config: ModelConfig
    arrays: Mapping[str, Array]
    kernel_library: ctypes.CDLL | None = None
    distance_library: ctypes.CDLL | None = None
    network: Any = None  # a `DEformer`, whose module imports this one

    @property
    def num_prior_components(self) -> int:
        """The number of Gaussians in the distribution of a reading under the Gaussian prior, 0 without a prior."""
        return count_prior_components(self.schema, self.config)

    @property
    def has_mixture(self) -> bool:
        """Whether the Gaussian prior is a mixture of Gaussians (`gaussian_prior`)."""
        return "gaussians.means" in self.arrays

    @property
    def has_process(self) -> bool:
        """Whether the Gaussian prior is a Gaussian process (`gaussian_process`)."""
        return "process.means" in self.arrays

    @property
    def cached_tokens_per_reading(self) -> int:
        """The number of tokens that each reading adds to the KV cache (`DEformer.cached_tokens_per_reading`)."""
        return count_cached_tokens(self.config)

    @property
    def is_float32_on_cpu(self) -> bool:
        """Whether the parameters are float32 numbers; NumPy arrays are in the memory of the CPU."""
        return bool(self.arrays["head.project.weight"].dtype == np.float32)

    @property
    def num_learned_values(self) -> int:
        """The number of weights that training learns by gradients, without priors and exemplars."""
        fitted = "gaussians.", "process.", "ranking.", "alert_distance.", "alert_prior."
        return sum(array.size for name, array in self.arrays.items() if not name.startswith(fitted))

    def extract_parameters(self) -> ModelParameters:
        """Return this object."""
        return self

    def get_linear(self, name: str) -> tuple[Array, Array]:
        """Return the weight (outputs, inputs) and the bias (outputs,) of a linear map by its name."""
        return self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"]

    def get_encoder(self, name: str) -> list[tuple[Array, Array]]:
        """Return weight and bias of each linear map of the encoder with this name, from the input to the output."""
        return [self.get_linear(f"{name}.maps.{i}") for i in range(len(self.config.hidden) + 1)]

    def embed_identities(self) -> Floats:
        """Return the vector that identifies each feature, (F, width), as `DEformer.embed_identities` does."""
        vectors = []
        if self.config.identity != "coordinates":
            vectors.append(self.arrays["embedding.weight"][self.schema.sensor_indexes].astype(np.float64))
        if self.config.identity != "embedding":
            coordinates = standardise_coordinates(self.schema)
            vectors.append(coordinates.astype(self.arrays["head.project.weight"].dtype).astype(np.float64))
        return np.concatenate(vectors, 1)


def count_prior_components(schema: Schema, config: ModelConfig) -> int:
    """Return the number of Gaussians in the distribution of a reading under the Gaussian prior, 0 without a prior.

    A prior contains only features whose values are numbers on a line, no labels or cyclic values.
    """
    if not schema.is_linear.any():
        return 0
    return config.gaussians or (NUM_PROCESS_COMPONENTS if config.neighbors else 0)


def count_cached_tokens(config: ModelConfig) -> int:
    """Return the number of tokens that each reading adds to the KV cache (`DEformer.cached_tokens_per_reading`)."""
    return 2 if config.tokens == "pair" and config.memory == "all" else 1


def find_prior_columns(schema: Schema) -> Ints:
    """Return the column of each feature in the mixture of the Gaussian prior, (F + 1,).

    The column is −1 if the mixture does not contain the feature. The last entry, −1, is for the code −1 of padding.
    """
    linear_codes = np.flatnonzero(schema.is_linear)
    column_by_code = np.full(len(schema) + 1, -1)
    column_by_code[linear_codes] = np.arange(len(linear_codes))
    return column_by_code


def standardise_coordinates(schema: Schema) -> Floats:
    """Return the coordinates of the features, each standardised over the features, (F, coordinates).

    A coordinate that is equal for all features becomes 0.
    """
    coordinates = np.array([feature.coordinates for feature in schema.features], np.float64)
    deviation = coordinates.std(0)
    return np.asarray((coordinates - coordinates.mean(0)) / np.where(deviation > 0, deviation, 1.0))


def compute_cycle_angles(schema: Schema) -> Floats:
    """Return the table that maps normalised values of cyclic features (such as times of day) to angles, (F, 2).

    Column 0 is the angle of the normalised value 0. Column 1 is the difference of angles that corresponds to a
    difference of 1 in normalised units. Both are in radians, and 0 for features that are not cyclic.
    """
    # Normalised value 0 is the raw value `location`; a difference of 1 is the raw difference `scale`.
    fractions_of_period = [
        (0.0, 0.0) if f.period is None else (f.location % f.period / f.period, f.scale / f.period)
        for f in schema.features
    ]
    return 2.0 * math.pi * np.array(fractions_of_period, np.float64)


def compute_scale_floors(schema: Schema) -> Floats:
    """Return the smallest scale that a component of the distribution of each feature may have, (F,).

    It is half of the sensor's resolution (`quantum`, None if unknown) in normalised units, but within the limits
    `SCALE_FLOOR` and 1.
    """
    floors = [max(SCALE_FLOOR, (f.quantum or 0.0) / f.scale / 2) for f in schema.features]
    return np.minimum(np.array(floors, np.float64), 1.0)


def allocate_label_rows(schema: Schema, is_shared: bool) -> tuple[int, Ints]:
    """Return the number of rows of the label embedding, and the row of the first label of each feature.

    Row 0 is reserved for continuous values. The label with code c of a feature has the row of the feature's first label
    plus c. After its labels, a discrete feature has one more row for all labels that did not occur in training.

    Args:
        schema: The features.
        is_shared: Whether all features share one set of rows. Otherwise each sensor has rows of its own. If a sensor
            has a feature for each time slot of a record, these features share the sensor's rows.

    Returns:
        The number of rows (1 if no feature is discrete), and an array (F,) with the row of the first label of each
        feature, meaningless for continuous ones.
    """
    # A discrete feature needs one row per label, and one for all labels that did not occur in training.
    num_rows_by_feature = np.where(schema.label_counts > 0, schema.label_counts + 1, 0)
    num_rows_by_sensor = num_rows_by_feature[schema.first_codes]  # the features of a sensor have the same labels
    if is_shared:
        # The rows suffice for the feature with the most labels, and the first label of every feature has row 1.
        return 1 + int(num_rows_by_sensor.max()), np.ones(len(schema), np.int64)
    # A sensor's rows begin after row 0 and the rows of all sensors before it.
    first_row_by_sensor = 1 + num_rows_by_sensor.cumsum() - num_rows_by_sensor
    return 1 + int(num_rows_by_sensor.sum()), first_row_by_sensor[schema.sensor_indexes]


def compute_identity_width(schema: Schema, config: ModelConfig) -> int:
    """Return the width of the vector that identifies a feature: a learned embedding, coordinates or both.

    Coordinates are numbers that the schema gives for each feature, such as the row and column of a pixel. The
    hyperparameter `identity` says which of the two are used.
    """
    embedding_width = config.embedding if config.identity != "coordinates" else 0
    # All features of a schema have equally many coordinates.
    num_coordinates = len(schema.features[0].coordinates or ()) if config.identity != "embedding" else 0
    return embedding_width + num_coordinates


def describe_tensors(schema: Schema, config: ModelConfig) -> dict[str, TensorDescription]:
    """Return the shape and the dtype of each tensor of a model by its key in model.safetensors.

    They are those of the state dict of `DEformer(schema, config)`, which is not built for this. So a forged manifest
    with huge hyperparameters causes no allocation of memory.

    Args:
        schema: The features of the model.
        config: The hyperparameters of the model.
    """
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    tensors: dict[str, TensorDescription] = {}

    def add(name: str, *shape: int, dtype: np.dtype[Any] = single) -> None:
        tensors[name] = TensorDescription(shape, dtype)

    def add_map(name: str, num_inputs: int, num_outputs: int) -> None:
        add(f"{name}.weight", num_outputs, num_inputs)
        add(f"{name}.bias", num_outputs)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", config.d_model)
        add(f"{name}.bias", config.d_model)

    def add_encoder(name: str, num_inputs: int) -> None:
        for i, (before, after) in enumerate(pairwise((num_inputs, *config.hidden, config.d_model))):
            add_map(f"{name}.maps.{i}", before, after)

    d, num_features, num_linear = config.d_model, len(schema), int(schema.is_linear.sum())
    identity_width = compute_identity_width(schema, config)
    num_label_rows, _ = allocate_label_rows(schema, is_shared=config.identity == "coordinates")
    label_width = config.embedding if num_label_rows > 1 else 0
    reading_width = identity_width + 1 + (2 if schema.is_cyclic.any() else 0) + label_width
    if config.identity != "coordinates":
        add("embedding.weight", len(schema.sensor_names), config.embedding)
    if label_width:
        add("label_embedding.weight", num_label_rows, label_width)
    if config.tokens == "single":
        add_encoder("value_encoder", identity_width + reading_width)
        add("start", reading_width)
    else:
        add_encoder("identity_encoder", identity_width)
        add_encoder("value_encoder", reading_width)
    if schema.reading_times is not None:
        add_map("query_times", schema.reading_times.num_inputs, d)
        add_map("observation_times", schema.reading_times.num_inputs, d)
    for i in range(config.layers):
        add_norm(f"blocks.{i}.norm1")
        add_norm(f"blocks.{i}.norm2")
        add_map(f"blocks.{i}.qkv", d, 3 * d)
        add_map(f"blocks.{i}.out", d, d)
        add_map(f"blocks.{i}.up", d, config.feedforward)
        add_map(f"blocks.{i}.down", config.feedforward, d)
    if config.norm == "pre":
        add_norm("norm")
    if config.gaussians and num_linear:
        shape = (1, config.gaussians)
        add("gaussians.log_weights", *shape, dtype=double)
        add("gaussians.means", *shape, num_linear, dtype=double)
        add("gaussians.covariances", *shape, num_linear, num_linear, dtype=double)
    if config.neighbors and num_linear:
        num_scales = config.process_scales
        for name in ("means", "noise", "outlier_share", "outlier_factor"):
            add(f"process.{name}", num_features, dtype=double)
        add("process.factors", num_scales, num_features, config.process_rank, dtype=double)
        add("process.deviations", num_scales, num_features, dtype=double)
        add("process.scales", num_scales, dtype=double)
    num_components = 0 if schema.is_discrete.all() else config.mixtures
    add_map("head.project", d, 3 * num_components + int(schema.label_counts.max()))
    num_prior_components = count_prior_components(schema, config)
    if num_prior_components:
        # The inputs are the weight, the mean and the scale of each component (`PriorConditional.to_network_input`).
        add_map("guidance", 3 * num_prior_components, d)
        add_map("head.adjust", d, 3 * num_prior_components)
    if config.exemplars:
        add("ranking.positions", config.exemplars, num_features)
        add("ranking.known", config.exemplars, num_features, dtype=np.dtype(np.bool_))
        add("ranking.deviations", num_features)
        add("ranking.typical", config.num_ranking_terms, 2, dtype=double)
    num_counted = int((~schema.is_context).sum())
    if config.alert_exemplars:
        add("alert_distance.positions", num_features, config.alert_exemplars)
        add("alert_distance.known", num_features, config.alert_exemplars, dtype=np.dtype(np.bool_))
        add("alert_distance.deviations", num_features)
        add("alert_distance.starts", num_counted, dtype=double)
        add("alert_distance.slopes", num_counted, dtype=double)
    if config.alert_prior:
        add("alert_prior.starts", 2, num_counted, dtype=double)
        add("alert_prior.slopes", 2, num_counted, dtype=double)
    return tensors


def count_state_values(schema: Schema, config: ModelConfig) -> int:
    """Return the total number of elements of all tensors of a model, without building the model.

    `model_store` compares it with the size of the weights file. Without this check, a forged manifest with huge
    hyperparameters could cause the allocation of far more memory than the weights file needs.
    """
    return sum(math.prod(tensor.shape) for tensor in describe_tensors(schema, config).values())


def check_parameters(schema: Schema, config: ModelConfig, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a weights file in the dtypes of the model, after checking that they fit it.

    Args:
        schema: The features of the model.
        config: The hyperparameters of the model.
        arrays: The arrays by their keys.

    Raises:
        ValueError: An array is missing or unknown, has another shape, or holds parameters that no model can have.
    """
    described = describe_tensors(schema, config)
    if config.prior_weight and "gaussians.means" not in described:
        raise ValueError("the hyperparameter prior_weight needs a feature that the Gaussian prior can contain")
    if config.alert_prior and not count_prior_components(schema, config):
        raise ValueError("the hyperparameter alert_prior needs a feature that the Gaussian prior can contain")
    for name in ("alert_exemplars", "alert_prior"):
        if getattr(config, name) and (schema.reading_times is not None or schema.is_context.all()):
            raise ValueError(
                f"the hyperparameter {name} needs features that are scored, and that have one reading in a record"
            )
    missing, unknown = described.keys() - arrays.keys(), arrays.keys() - described.keys()
    if missing or unknown:
        raise ValueError(
            f"the weights do not have the names that the hyperparameters describe; missing: {sorted(missing)[:5]}, "
            f"unknown: {sorted(unknown)[:5]}"
        )
    for name, (shape, _) in described.items():
        if arrays[name].shape != shape:
            raise ValueError(
                f"the tensor {name} has the shape {arrays[name].shape}, but the hyperparameters describe {shape}"
            )
    checked = {name: arrays[name].astype(dtype, copy=False) for name, (_, dtype) in described.items()}
    _check_prior(checked)
    _check_alert_distance(checked)
    _check_alert_prior(checked)
    return checked


def _check_prior(arrays: Mapping[str, Array]) -> None:
    """Check that the parameters of the Gaussian prior are in range.

    Raises:
        ValueError: A covariance matrix is not positive definite, or a parameter of the Gaussian process is not finite
            or out of range.
    """
    covariances = arrays.get("gaussians.covariances")
    if covariances is not None:
        try:
            np.linalg.cholesky(covariances)
        except np.linalg.LinAlgError:
            raise ValueError(
                "the tensor gaussians.covariances of the weights file contains a covariance matrix of the Gaussian "
                "prior that is not positive definite, so the file is damaged: restore it or train the model again"
            ) from None
    process = {name: array for name, array in arrays.items() if name.startswith("process.")}
    if not process:
        return
    is_valid = all(bool(np.isfinite(array).all()) for array in process.values())
    is_valid &= all(bool((process[f"process.{name}"] > 0).all()) for name in ("scales", "outlier_factor"))
    share = process["process.outlier_share"]
    is_valid &= bool(((share > 0) & (share < 1)).all())
    if not is_valid:
        raise ValueError(
            "the tensors process.* of the weights file are not the parameters of a Gaussian process, so the file is "
            "damaged: restore it or train the model again"
        )


def _check_alert_distance(arrays: Mapping[str, Array]) -> None:
    """Check that the numbers of the distance in the alert (`alert_distance`) are in range.

    Raises:
        ValueError: A number is not finite, or out of range.
    """
    if "alert_distance.positions" not in arrays:
        return
    names = "positions", "deviations", "starts", "slopes"
    positions, deviations, starts, slopes = (arrays[f"alert_distance.{name}"] for name in names)
    is_finite = all(bool(np.isfinite(array).all()) for array in (positions, deviations, starts, slopes))
    if not (is_finite and (deviations > 0).all() and (slopes >= 0).all()):
        raise ValueError("a tensor alert_distance of the weights file contains numbers that are out of range")


def _check_alert_prior(arrays: Mapping[str, Array]) -> None:
    """Check that the numbers of the Gaussian prior in the alert (`alert_prior`), which are finite, are in range.

    Raises:
        ValueError: A slope is negative.
    """
    slopes = arrays.get("alert_prior.slopes")
    if slopes is not None and (slopes < 0).any():
        raise ValueError("the tensor alert_prior.slopes of the weights file contains a negative number")
