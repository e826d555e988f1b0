"""Adapt a model that was trained on many machines (the old model) to one machine with few records (`--init-from`).

The features of the old model keep their order, normalisation and weights. New features are appended and get new
weights. The Gaussian prior is moved towards the new records: the more records there are, the further. The method is
maximum a posteriori adaptation of mixtures (Reynolds, Quatieri and Dunn, Digital Signal Processing 10, 2000).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_prior import GaussianPrior
from deformer_stream.model.mixture import Mixture
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import (
    NUM_FOLDS,
    RIDGE,
    CrossFittedPriors,
    Floats,
    Ints,
    build_prior,
    compute_cross_validated_nll,
    extract_mixture,
)
from trainer.sampling import Noise, create_generator, read_rows

COVARIANCE_STRENGTHS = (10.0, 100.0, 1000.0)
"""Candidates for the weight of an old Gaussian's covariance, as a number of records. Cross-validation selects one."""

MEAN_STRENGTH = 2.0
"""Weight of an old Gaussian's mean, as a number of records.

It is small, because machines differ in the means of their measurements more than in the correlations.
"""

NUM_ROUNDS = 10
"""Number of rounds of expectation-maximisation."""

NUM_DRAWS = 3
"""How often missing readings are imputed at random."""

LEARNING_RATE_FACTOR = 0.3
"""Learning rate of an adaptation relative to that of the preset. It is small, because the old weights are good."""

ADAPT_SEED = 0xADA7
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""


def extend_model(old: DEformer, schema: Schema) -> DEformer:
    """Return a copy of a model with more features.

    Before training, the copy predicts the old features exactly as the old model does. The exemplars (stored training
    records) are not copied.

    Args:
        old: The model that is adapted.
        schema: The features of the old model, followed by new ones.

    Raises:
        ConfigError: The old model's architecture does not permit the new features.
        ValueError: The schema does not begin with the features of the old model.
    """
    # The units of features and their fill values may differ, because the network does not depend on them.
    kept, features = (
        [replace(feature, unit=None, fill_values=()) for feature in features]
        for features in (old.schema.features, schema.features)
    )
    if features[: len(kept)] != kept:
        raise ValueError(
            "the schema of the adapted model must begin with the features of the old model: append new features to them"
        )
    if bool(old.schema.is_discrete.all()) and not bool(schema.is_discrete.all()):
        raise ConfigError(
            "--init-from: measurements cannot be added to the old model, because it has only labels; "
            "exclude the new columns, or train anew without --init-from"
        )
    try:
        model = DEformer(
            schema,
            replace(
                old.config, exemplars=0, prior_weight=0.0, marginal_weight=0.0, alert_exemplars=0, alert_prior=False
            ),
        )
    except ValueError as error:
        raise ConfigError(
            f"--init-from: the new features cannot be added to the old model ({error}); "
            "exclude the new columns, or train anew without --init-from"
        ) from None
    new_parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, old_parameter in old.named_parameters():
            # New features, labels and inputs are appended, so old weights are the first entries of each dimension.
            old_entries: tuple[slice | torch.Tensor, ...] = tuple(slice(0, size) for size in old_parameter.shape)
            if name in ("value_encoder.maps.0.weight", "start"):
                # The value encoder encodes a reading. `start` is its input before a record's first reading. The last
                # dimension of both parameters is that of the encoder's inputs. Inputs are the exception to the rule
                # above: new ones may lie between old ones.
                old_entries = *old_entries[:-1], _locate_old_inputs(old, model, old_parameter.shape[-1])
            if name == "value_encoder.maps.0.weight":
                new_parameters[name].zero_()  # new inputs have no effect before training
            new_parameters[name][old_entries] = old_parameter
    return model


def _locate_old_inputs(old: DEformer, model: DEformer, num_inputs: int) -> torch.Tensor:
    """Return the index that each input of the old model's value encoder has in the new model.

    The value encoder is the network that encodes a reading's value. Its last inputs are for labels. If only the new
    model has features on a cycle, it has two more inputs (sine and cosine) before those for labels.

    Args:
        old: The old model.
        model: The new model, with more features.
        num_inputs: Number of inputs of the old value encoder.

    Returns:
        (num_inputs,) indexes, ascending.
    """
    old_indexes = torch.arange(num_inputs)
    # `cycle_angles` is None if no feature is on a cycle.
    num_inserted = 2 if old.cycle_angles is None and model.cycle_angles is not None else 0
    is_label_input = old_indexes >= num_inputs - old.label_width  # `label_width` is the number of inputs for labels
    return old_indexes + num_inserted * is_label_input  # only inputs for labels are shifted


def adapt_priors(old: GaussianPrior, data: PreparedTable, num_old_features: int, seed: int) -> CrossFittedPriors:
    """Adapt the Gaussian prior of the old model to the training records of a table.

    The Gaussian prior is a mixture of Gaussians, whose conditionals are inputs of the network. Missing readings are
    imputed at random several times, first from the old mixture and then from the adapted one. The strength of the
    adaptation is chosen by cross-validation.

    Args:
        old: The prior (mixture of Gaussians) of the old model.
        data: The prepared table, whose schema begins with the features of the old model.
        num_old_features: Number of features of the old model.
        seed: Seed of folds, noise and imputed readings.

    Returns:
        The adapted prior and its variants. The records are divided at random into `NUM_FOLDS` folds, and each variant
        is adapted without the records of one fold. In training, each record gets the variant that was adapted without
        it.
    """
    rng = np.random.default_rng([seed, ADAPT_SEED])
    fold_by_row = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(Split.TRAIN)
    values, _ = read_rows(data, rows)
    # Readings of a sensor with a limited resolution get uniform noise of the width of its step, as in training.
    noisy, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, ADAPT_SEED))
    # Only continuous features that are not cyclic belong to the prior.
    x = noisy[:, np.flatnonzero(data.schema.is_linear)].double().numpy()
    num_old_linear = int(data.schema.is_linear[:num_old_features].sum())
    prior = _add_new_features(extract_mixture(old), x, num_old_linear)
    adapted = prior
    folds, is_missing = fold_by_row[rows], np.isnan(x)
    for draw in range(NUM_DRAWS if is_missing.any() else 1):  # the result of the last draw is used
        observed = torch.from_numpy(np.where(is_missing, np.nan, x))
        imputing_prior = build_prior(data.schema, [adapted])
        x = np.asarray(imputing_prior.sample_missing(observed, create_generator(seed, ADAPT_SEED, draw)))
        candidates = (_adapt_mixture(x, folds, prior, strength) for strength in COVARIANCE_STRENGTHS)
        nll, adapted, by_fold = min(candidates, key=lambda candidate: candidate[0])  # the smallest −ln p
    return CrossFittedPriors(build_prior(data.schema, [adapted]), build_prior(data.schema, by_fold), fold_by_row, nll)


def _add_new_features(old: Mixture, x: Floats, num_old: int) -> Mixture:
    """Extend a mixture of Gaussians by new features, which are linear functions of the old ones plus Gaussian noise.

    The linear functions are fitted to the records by ridge regression. They are the same in every Gaussian.

    Args:
        old: The mixture of Gaussians over the old model's continuous features.
        x: (N, D) records with the D old and new features, NaN if missing.
        num_old: Number of old features, which come first.

    Returns:
        The mixture of all D features. It is `old` if there are no new ones.
    """
    num_new = x.shape[1] - num_old
    if not num_new:
        return old
    # For the regression, missing readings are replaced by the mean of the feature, or by 0 if it has no readings.
    column_means = np.nanmean(np.where(np.isnan(x).all(0), 0.0, x), 0)
    filled = np.where(np.isnan(x), column_means, x)
    old_values, new_values = filled[:, :num_old], filled[:, num_old:]
    old_mean, new_mean = old_values.mean(0), new_values.mean(0)
    old_centred, new_centred = old_values - old_mean, new_values - new_mean
    # Model: new = new_mean + slope · (old − old_mean) + noise. A ridge of 10 keeps the slope small for few records.
    scatter = (old_values - old_mean).T @ (old_values - old_mean) + 10.0 * np.eye(num_old)
    slope = np.linalg.solve(scatter, old_centred.T @ new_centred).T  # (number of new features, number of old features)
    residuals = new_centred - old_centred @ slope.T
    # One record with variance 1, and the ridge, keep the covariance of the noise invertible.
    noise_covariance = (residuals.T @ residuals + np.eye(num_new)) / (len(x) + 1.0) + RIDGE**2 * np.eye(num_new)
    means = np.concatenate([old.means, new_mean + (old.means - old_mean) @ slope.T], 1)
    # With the old covariance C, Cov(new, old) = slope · C and Cov(new, new) = slope · C · slopeᵀ + noise.
    cross = slope @ old.covariances
    new_covariances = cross @ slope.T + noise_covariance
    covariances = np.block([[old.covariances, cross.transpose(0, 2, 1)], [cross, new_covariances]])
    return Mixture(old.log_weights, means, covariances)


def _adapt_mixture(x: Floats, folds: Ints, prior: Mixture, strength: float) -> tuple[float, Mixture, list[Mixture]]:
    """Adapt a mixture of Gaussians to all records, and for cross-validation to the records outside each fold.

    The order of the Gaussians stays the same, because the network identifies them by their index.

    Args:
        x: (N, D) records with D features, without missing values.
        folds: (N,) fold of each record.
        prior: The mixture that is adapted.
        strength: Weight of the old covariances, as a number of records.

    Returns:
        (nll, adapted, by_fold). `nll` is the cross-validated −ln p of a record: mean over the records, in nats, smaller
        is better. `adapted` is the mixture adapted to all records. `by_fold` has for each fold the mixture adapted to
        the records outside it.
    """
    by_fold = [_maximize_a_posteriori(x[folds != fold], prior, strength) for fold in range(NUM_FOLDS)]
    nll = compute_cross_validated_nll(x, folds, by_fold)
    return nll, _maximize_a_posteriori(x, prior, strength), by_fold


def _maximize_a_posteriori(x: Floats, prior: Mixture, strength: float) -> Mixture:
    """Adapt a mixture of K Gaussians to records by expectation-maximisation.

    The old mixture defines the prior distribution of the parameters. The old covariance of each Gaussian has the weight
    of `strength` records, and its old mean that of `MEAN_STRENGTH` records.

    Args:
        x: (N, D) records with D features, without missing values.
        prior: The old mixture.
        strength: Weight of the old covariances, as a number of records.
    """
    mixture = prior
    for _ in range(NUM_ROUNDS):
        # E step: `memberships` (N, K) is the share of each record that belongs to each Gaussian.
        log_densities = mixture.compute_log_densities(x)
        memberships = np.exp(log_densities - np.logaddexp.reduce(log_densities, 1)[:, None])
        # M step: weighted means of the estimate from the records and the old parameters.
        sizes = memberships.sum(0)  # (K,) number of records of each Gaussian
        means = (memberships.T @ x + MEAN_STRENGTH * prior.means) / (sizes + MEAN_STRENGTH)[:, None]
        scatter = np.stack(  # (K, D, D) Σ membership · (x − mean)(x − mean)ᵀ
            [(x - mean).T @ ((x - mean) * weights[:, None]) for mean, weights in zip(means, memberships.T, strict=True)]
        )
        # The distance of the old mean from the new one increases the covariance, as if there were records at it.
        shift = prior.means - means
        shift_scatter = MEAN_STRENGTH * shift[:, :, None] * shift[:, None, :]
        prior_scatter = strength * prior.covariances + shift_scatter
        covariances = (scatter + prior_scatter) / (sizes + strength)[:, None, None]
        # Like the old covariances, the old probabilities of the components count as `strength` records.
        component_weights = sizes + strength * np.exp(prior.log_weights)
        mixture = Mixture(np.log(component_weights / component_weights.sum()), means, covariances)
    return mixture
