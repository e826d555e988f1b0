"""Hyperparameters of the network, and named presets of them.

This module imports neither torch nor NumPy, so that the command line can read the presets quickly.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from deformer_stream.model.bounded_context import ContextLimit

Norm = Literal["pre", "post"]
ActivationName = Literal["gelu", "relu"]
Identity = Literal["embedding", "coordinates", "both"]
AttentionContext = Literal["all", "values"]
Tokens = Literal["pair", "single"]
Precision = Literal["float32", "bfloat16"]

IRREGULAR = (
    *("neighbors", "neighbor_decay", "process_rank", "process_scales", "outlier_limit"),
    *("context_recent", "context_block"),
)
"""Names of the hyperparameters of models for irregular readings. They have their default values in other models, except
those of the process that is the prior of wide records."""

LEFT_OUT_IF_DEFAULT = (*IRREGULAR, "prior_weight", "marginal_weight", "alert_exemplars", "alert_prior")
"""Names of the hyperparameters that are not stored if they have their default values.

So the manifests and fingerprints of models without them stay as they are.
"""

NON_NEGATIVE = (
    "gaussians",
    "exemplars",
    "alert_exemplars",
    *(name for name in IRREGULAR if name not in ("neighbor_decay", "outlier_limit")),
)
"""Names of the integer hyperparameters that may be 0."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hyperparameters of a network.

    A reading (one value of one feature) enters the Transformer as two tokens. The output of the query token predicts
    the value, and the observation token holds the value. The names of the attributes are keys of the entry
    `hyperparameters` in the manifest of a model directory, and keys of the configuration file of deformer-train. They
    must not be renamed.

    Attributes:
        d_model: The width of a token in the Transformer layers; a multiple of `heads`.
        layers: The number of Transformer layers.
        heads: The number of attention heads in each layer.
        feedforward: The width of the hidden layer of each feed-forward network.
        mixtures: The number of Gaussian components of the distribution that is predicted for a continuous value.
        dropout: The dropout probability during training, in [0, 1).
        norm: "pre" applies layer normalisation before each sublayer, "post" after it as in the original Transformer.
        activation: The activation function of the feed-forward networks.
        identity: The input that identifies a feature: a learned embedding, the feature's coordinates (given numbers,
            such as the row and column of a pixel), or both.
        embedding: The width of the learned embeddings of features and of labels.
        hidden: The widths of the hidden layers of the encoders that make tokens from readings.
        memory: The attention context, that is, the earlier tokens that a token attends to. "all" means query tokens
            and observation tokens, as in the paper. "values" means observation tokens only; this halves the KV cache
            and loses little, because a query token holds nothing that the observation token of its reading lacks.
        tokens: "pair" makes a query token and an observation token for each reading. "single" makes one token, which
            holds the identity of the reading's feature, and the identity and value of the previous reading. It attends
            to itself and to all earlier tokens; `memory` then has no effect.
        gaussians: The number of components of the Gaussian prior, 0 for a network without a prior. The prior is a
            mixture of Gaussians that is fitted before training. Its exact conditional distributions are inputs of the
            network.
        neighbors: The number of earlier readings on which the Gaussian process prior of irregular readings, or of wide
            records, is conditioned for each reading; 0 for a network without it. It takes the place of the mixture of
            `gaussians`. All readings of a record that are not irregular have one time.
        neighbor_decay: The factor by which the correlation of a reading is multiplied for each later reading of its
            sensor, before the neighbors are chosen (`gaussian_process`); greater than 0, at most 1. 1 has no effect.
        process_rank: The rank of the covariance matrices of the Gaussian process prior, without their diagonals.
        process_scales: The number of time scales of the Gaussian process prior.
        outlier_limit: The number of standard deviations between a reading and what the Gaussian process predicts from
            others, beyond which the reading counts less as a condition of others (`process_conditionals`). 0 for no
            limit. It needs as many neighbors as a context has readings, and is for imputation.
        context_recent: The number of latest readings before a block that belong to the context of the readings of the
            block (`bounded_context.ContextLimit`).
        context_block: The number of readings of a block. 0 if a reading is conditional on all earlier readings.
        exemplars: The number of training records that are stored as exemplars. Complete records are ranked by their
            distance to the nearest exemplars. 0 stores none.
        prior_weight: The weight of the density of the Gaussian prior (`gaussians`) in the ranking of complete records.
            Training learns it for each table. 0 if it is no term of the ranking.
        marginal_weight: The weight in the ranking of the density of the readings without regard to one another
            (`marginal_density`). Training chooses it by the share of the features that have labels. 0 if it is no term.
        alert_exemplars: The number of training records that are stored for the alert. The distance of an open record to
            the nearest ones is a term of the alert's statistic (`alert_distance`). 0 without this term.
        alert_prior: Whether the p-values of readings under the Gaussian prior alone are a term of the alert's statistic
            (`alert_prior`).
        precision: "bfloat16" rounds the factors of the matrix products in the Transformer layers to bfloat16 when the
            model scores, but not in training. Sums, and everything outside the layers, are float32.

    Raises:
        ValueError: A value is out of range or not one of the allowed names; the message lists the allowed ones.
    """

    d_model: int = 128
    layers: int = 4
    heads: int = 4
    feedforward: int = 512
    mixtures: int = 16
    dropout: float = 0.0
    norm: Norm = "pre"
    activation: ActivationName = "gelu"
    identity: Identity = "embedding"
    embedding: int = 20
    hidden: tuple[int, ...] = (128,)
    memory: AttentionContext = "values"
    tokens: Tokens = "pair"
    gaussians: int = 0
    neighbors: int = 0
    neighbor_decay: float = 1.0
    process_rank: int = 0
    process_scales: int = 0
    outlier_limit: float = 0.0
    context_recent: int = 0
    context_block: int = 0
    exemplars: int = 0
    prior_weight: float = 0.0
    marginal_weight: float = 0.0
    alert_exemplars: int = 0
    alert_prior: bool = False
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "heads", "feedforward", "mixtures", "embedding"):
            _check_integer(f"the hyperparameter {name}", getattr(self, name), minimum=1)
        for name in NON_NEGATIVE:
            _check_integer(f"the hyperparameter {name}", getattr(self, name), minimum=0)
        if self.neighbors and (self.gaussians or not self.process_scales):
            raise ValueError(
                "the hyperparameter neighbors needs process_scales of at least 1, and cannot be combined with "
                "gaussians: a network has one prior"
            )
        if not 0 < self.neighbor_decay <= 1:
            raise ValueError(
                f"the hyperparameter neighbor_decay is {self.neighbor_decay}, but it must be greater than 0, and at "
                "most 1"
            )
        if not 0 <= self.outlier_limit < math.inf:
            raise ValueError(f"the hyperparameter outlier_limit is {self.outlier_limit}, but it must be 0 or positive")
        for name in ("prior_weight", "marginal_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"the hyperparameter {name} is {getattr(self, name)}, but it must be 0 or positive")
        if self.prior_weight and not (self.gaussians and self.exemplars):
            raise ValueError("the hyperparameter prior_weight needs gaussians and exemplars of at least 1")
        if self.marginal_weight and not self.exemplars:
            raise ValueError("the hyperparameter marginal_weight needs exemplars of at least 1")
        if not isinstance(self.alert_prior, bool):
            raise ValueError(f"the hyperparameter alert_prior is {self.alert_prior!r}, but it must be true or false")
        if self.alert_prior and not (self.gaussians or self.neighbors):
            raise ValueError("the hyperparameter alert_prior needs gaussians or neighbors of at least 1")
        for width in self.hidden:
            _check_integer("each width in the hyperparameter hidden", width, minimum=1)
        if self.d_model % self.heads:
            raise ValueError(
                f"the hyperparameter d_model is {self.d_model}, which is not a multiple of the number of heads, "
                f"{self.heads}: change one of the two"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"the hyperparameter dropout is {self.dropout}, but it must be at least 0 and less than 1")
        _check_choice("norm", self.norm, Norm)
        _check_choice("activation", self.activation, ActivationName)
        _check_choice("identity", self.identity, Identity)
        _check_choice("memory", self.memory, AttentionContext)
        _check_choice("tokens", self.tokens, Tokens)
        _check_choice("precision", self.precision, Precision)

    @property
    def num_ranking_terms(self) -> int:
        """The number of terms of the ranking of complete records (`Ranking.typical`)."""
        return 2 + (self.prior_weight > 0) + (self.marginal_weight > 0)

    @property
    def context_limit(self) -> ContextLimit | None:
        """How many earlier readings the context of a reading has at most, None if there is no limit."""
        from deformer_stream.model.bounded_context import ContextLimit  # its module imports NumPy

        return ContextLimit(self.context_recent, self.context_block) if self.context_block else None

    def to_json(self) -> dict[str, Any]:
        """Return a dict from hyperparameter names to values, for the manifest (manifest.json) of a model directory.

        Those of `LEFT_OUT_IF_DEFAULT` are left out if they have their default values.
        """
        defaults = {field.name: field.default for field in fields(self) if field.name in LEFT_OUT_IF_DEFAULT}
        return {name: value for name, value in asdict(self).items() if value != defaults.get(name)}

    @staticmethod
    def from_json(row: dict[str, Any]) -> ModelConfig:
        """Return the hyperparameters from the JSON object that `to_json` returned.

        Args:
            row: A dict from hyperparameter names to values. `hidden` is required; other missing keys get their default.

        Raises:
            ValueError: A value is not allowed.
            TypeError: A key is unknown.
            KeyError: The key `hidden` is missing.
        """
        hidden = tuple(row["hidden"])  # JSON has lists only, but the attribute must be hashable
        return ModelConfig(**dict(row, hidden=hidden))


def _check_integer(subject: str, value: object, minimum: int) -> None:
    """Raise ValueError if the value of a hyperparameter is not an integer of at least `minimum`.

    Args:
        subject: The first words of the error message, which name the hyperparameter: "the hyperparameter heads".
        value: The value, of any type. A boolean is refused, although it is an instance of int.
        minimum: The smallest allowed value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{subject} must be an integer of at least {minimum}, but it is {value!r}")


def _check_choice(name: str, value: object, literal_type: Any) -> None:
    """Raise ValueError if the value of a hyperparameter is not one of the strings of a Literal type.

    Args:
        name: The name of the hyperparameter, for the error message.
        value: The value, of any type.
        literal_type: A type such as `Literal["pre", "post"]`.
    """
    allowed_values = get_args(literal_type)
    if value not in allowed_values:
        allowed_text = ", ".join(allowed_values)
        raise ValueError(f"the hyperparameter {name} must be one of {allowed_text}, but it is {value!r}")


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(d_model=64, layers=2, heads=4, feedforward=256, mixtures=8, hidden=(64,)),
    "small": ModelConfig(),
    "base": ModelConfig(d_model=256, layers=6, heads=8, feedforward=1024, mixtures=24, hidden=(256,)),
    "paper": ModelConfig(
        d_model=512,
        layers=6,
        heads=8,
        feedforward=2048,
        mixtures=150,
        dropout=0.2,
        norm="post",
        activation="relu",
        hidden=(128, 256),
        memory="all",
    ),
}
"""Hyperparameters by preset name, from the smallest network to the one of the paper (arXiv 2106.06989)."""
