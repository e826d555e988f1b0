"""Adapt a model that was trained on many machines to one machine or plant with few records (`--init-from`).

Features keep their positions, transforms and weights. Features that are new are appended and get new weights. The
Gaussian prior is moved towards the new records as far as their number justifies: the maximum a posteriori adaptation
of mixtures (Reynolds, Quatieri and Dunn, Digital Signal Processing 10, 2000).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_prior import GaussianPrior
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import (
    NUM_FOLDS,
    RIDGE,
    CrossFittedPriors,
    Floats,
    Ints,
    Mixture,
    build_prior,
    extract_mixture,
)
from trainer.sampling import Noise, create_generator, read_rows

COVARIANCE_STRENGTHS = (10.0, 100.0, 1000.0)
"""Candidates for the weight of an old component's covariance, as a number of records. Cross-validation selects one."""

MEAN_STRENGTH = 2.0
"""Weight of an old component's mean, as a number of records. It is small because machines differ in the levels of their
measurements more than in the correlations."""

NUM_ROUNDS = 10
"""Rounds of expectation-maximisation."""

NUM_DRAWS = 3
"""How often missing readings are imputed at random."""

LEARNING_RATE_FACTOR = 0.3
"""Learning rate of an adaptation relative to that of the preset, as the weights are good already."""

ADAPT_SEED = 0xADA7
"""Constant that separates the random numbers of this module from others of the same seed."""


def extend_model(old: DEformer, schema: Schema) -> DEformer:
    """Return a model with more features that gives the same conditionals as the old model for the old features.

    Args:
        old: The model that is adapted.
        schema: The old features, followed by new ones.

    Raises:
        ConfigError: The old model cannot have the new features.
        ValueError: The schema does not begin with the old features.
    """
    if schema.features[: len(old.schema)] != old.schema.features:
        raise ValueError("the features of the old model come first")
    if bool(old.schema.is_discrete.all()) and not bool(schema.is_discrete.all()):
        raise ConfigError(
            "--init-from: the old model has labels only and new features are measurements; train anew without it"
        )
    try:
        model = DEformer(schema, replace(old.config, exemplars=0))
    except ValueError as error:
        raise ConfigError(f"--init-from: the old model cannot take new features ({error}); train anew") from None
    new_parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, old_parameter in old.named_parameters():
            if name == "value_encoder.maps.0.weight":
                new_parameters[name].zero_()  # inputs that the old model did not have have no effect at first
            index: tuple[slice | torch.Tensor, ...] = tuple(slice(0, size) for size in old_parameter.shape)
            if name in ("value_encoder.maps.0.weight", "start"):
                index = *index[:-1], _locate_old_inputs(old, model, old_parameter.shape[-1])
            new_parameters[name][index] = old_parameter
    return model


def _locate_old_inputs(old: DEformer, model: DEformer, num_inputs: int) -> torch.Tensor:
    """Return the position of each of the old value encoder's inputs among those of the new one, (num_inputs,).

    Two inputs for positions on a cycle are inserted before the inputs for labels, if only the new model has cycles.
    """
    positions = torch.arange(num_inputs)
    num_inserted = 2 if old.cycle_angles is None and model.cycle_angles is not None else 0
    return positions + num_inserted * (positions >= num_inputs - old.label_width)


def adapt_priors(old: GaussianPrior, data: PreparedTable, num_old_features: int, seed: int) -> CrossFittedPriors:
    """Return the old Gaussian prior, moved towards the training records of a table.

    Args:
        old: The prior of the model that is adapted.
        data: The prepared table.
        num_old_features: Number of features of the old model.
        seed: Seed of folds, noise and imputed readings.
    """
    rng = np.random.default_rng([seed, ADAPT_SEED])
    fold_by_row = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(Split.TRAIN)
    values, _ = read_rows(data, rows)
    noisy, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, ADAPT_SEED))
    x = noisy[:, np.flatnonzero(data.schema.is_linear)].double().numpy()
    num_old_linear = int(data.schema.is_linear[:num_old_features].sum())
    prior = _add_new_features(extract_mixture(old), x, num_old_linear)
    folds, is_missing = fold_by_row[rows], np.isnan(x)
    for draw in range(NUM_DRAWS if is_missing.any() else 1):
        observed = torch.from_numpy(np.where(is_missing, np.nan, x))
        imputing_prior = build_prior(data.schema, [prior])
        x = np.asarray(imputing_prior.sample_missing(observed, create_generator(seed, ADAPT_SEED, draw)))
        candidates = (_adapt_mixture(x, folds, prior, strength) for strength in COVARIANCE_STRENGTHS)
        nll, adapted, by_fold = min(candidates, key=lambda candidate: candidate[0])
    return CrossFittedPriors(build_prior(data.schema, [adapted]), build_prior(data.schema, by_fold), fold_by_row, nll)


def _add_new_features(old: Mixture, x: Floats, num_old: int) -> Mixture:
    """Return a mixture in which the new features depend linearly on the old ones, with Gaussian noise.

    The linear function is fitted by ridge regression and is the same in every component.

    Args:
        old: The mixture of the old features.
        x: (N, D) records with old and new features, NaN if missing.
        num_old: Number of old features, which come first.
    """
    num_new = x.shape[1] - num_old
    if not num_new:
        return old
    column_means = np.nanmean(np.where(np.isnan(x).all(0), 0.0, x), 0)
    filled = np.where(np.isnan(x), column_means, x)
    old_values, new_values = filled[:, :num_old], filled[:, num_old:]
    old_mean, new_mean = old_values.mean(0), new_values.mean(0)
    scatter = (old_values - old_mean).T @ (old_values - old_mean) + 10.0 * np.eye(num_old)
    slope = np.linalg.solve(scatter, (old_values - old_mean).T @ (new_values - new_mean)).T
    residuals = new_values - new_mean - (old_values - old_mean) @ slope.T
    noise = (residuals.T @ residuals + np.eye(num_new)) / (len(x) + 1.0) + RIDGE**2 * np.eye(num_new)
    means = np.concatenate([old.means, new_mean + (old.means - old_mean) @ slope.T], 1)
    cross = slope @ old.covariances
    covariances = np.block([[old.covariances, cross.transpose(0, 2, 1)], [cross, cross @ slope.T + noise]])
    return Mixture(old.log_weights, means, covariances)


def _adapt_mixture(x: Floats, folds: Ints, prior: Mixture, strength: float) -> tuple[float, Mixture, list[Mixture]]:
    """Adapt a mixture to all records and to those outside each fold. The order of the components stays the same.

    Args:
        x: (N, D) records.
        folds: (N,) fold of each record.
        prior: The mixture that is adapted.
        strength: Weight of the old covariances, as a number of records.

    Returns:
        The cross-validated −ln p of a record, in nats; the mixture adapted to all records; and those without each fold.
    """
    by_fold = [_maximize_a_posteriori(x[folds != fold], prior, strength) for fold in range(NUM_FOLDS)]
    log_likelihoods = [
        np.logaddexp.reduce(mixture.compute_log_densities(x[folds == fold]), 1) for fold, mixture in enumerate(by_fold)
    ]
    nll = -float(np.concatenate(log_likelihoods).mean())
    return nll, _maximize_a_posteriori(x, prior, strength), by_fold


def _maximize_a_posteriori(x: Floats, prior: Mixture, strength: float) -> Mixture:
    """Adapt a mixture to records, (N, D), by expectation-maximisation with the old mixture as the prior distribution.

    Each component's old covariance counts as much as `strength` records, and its mean as `MEAN_STRENGTH` records.
    """
    mixture = prior
    for _ in range(NUM_ROUNDS):
        log_densities = mixture.compute_log_densities(x)
        memberships = np.exp(log_densities - np.logaddexp.reduce(log_densities, 1)[:, None])
        sizes = memberships.sum(0)
        means = (memberships.T @ x + MEAN_STRENGTH * prior.means) / (sizes + MEAN_STRENGTH)[:, None]
        scatter = np.stack(
            [(x - mean).T @ ((x - mean) * weights[:, None]) for mean, weights in zip(means, memberships.T, strict=True)]
        )
        shift = prior.means - means
        shift_scatter = MEAN_STRENGTH * shift[:, :, None] * shift[:, None, :]
        prior_scatter = strength * prior.covariances + shift_scatter
        covariances = (scatter + prior_scatter) / (sizes + strength)[:, None, None]
        component_weights = sizes + strength * np.exp(prior.log_weights)
        mixture = Mixture(np.log(component_weights / component_weights.sum()), means, covariances)
    return mixture
