"""From a fleet's model to that of one plant or device with few records (`deformer-train --init-from`).

Nothing that was learnt is lost: features keep their places, transforms and weights; features that are new come after
them, with weights of their own. The Gaussians are drawn towards the new records as far as their number warrants: the
maximum a posteriori adaptation of mixtures (Reynolds, Quatieri and Dunn, Digital Signal Processing 10, 2000).
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

PRIORS = (10.0, 100.0, 1000.0)
"""Records' worth of each old component's covariance, to choose from by cross-validation."""
CENTRE = 2.0
"""Records' worth of its mean: plants differ in their levels more than in what moves together."""
ROUNDS, DRAWS = 10, 3
LEARNING_RATE_FACTOR = 0.3
"""Of the preset's peak rate of learning: the weights are good already."""


def extend_model(old: DEformer, schema: Schema) -> DEformer:
    """A model of the larger schema that says of the old features what the old model says."""
    if schema.features[: len(old.schema)] != old.schema.features:
        raise ValueError("the features of the old model come first")
    if bool(old.schema.is_discrete.all()) and not bool(schema.is_discrete.all()):
        raise ConfigError("--init-from: the old model knows labels only and new features are measurements; train anew")
    try:
        model = DEformer(schema, replace(old.config, exemplars=0))
    except ValueError as error:
        raise ConfigError(f"--init-from: the old model cannot take new features ({error})") from None
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, weights in old.named_parameters():
            if name == "value_encoder.maps.0.weight":
                mine[name].zero_()  # what the old model was not told changes nothing at first
            place: tuple[slice | torch.Tensor, ...] = tuple(slice(0, n) for n in weights.shape)
            if name in ("value_encoder.maps.0.weight", "start"):
                place = *place[:-1], _inputs(old, model, weights.shape[-1])
            mine[name][place] = weights
    return model


def _inputs(old: DEformer, model: DEformer, count: int) -> torch.Tensor:
    """(count,) where the old model's inputs of a reading stand among the new one's: cycles come before labels."""
    place = torch.arange(count)
    more = 2 if old.cycle_angles is None and model.cycle_angles is not None else 0
    return place + more * (place >= count - old.label_width)


def adapt_priors(old: GaussianPrior, data: PreparedTable, before: int, seed: int) -> CrossFittedPriors:
    """The old Gaussians drawn to the table's training records. before: features of the old model."""
    rng = np.random.default_rng([seed, 0xADA7])
    fold_of = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(Split.TRAIN)
    values, _ = read_rows(data, rows)
    spread, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, 0xADA7))
    x = spread[:, np.flatnonzero(data.schema.is_linear)].double().numpy()
    prior = _with_new_features(extract_mixture(old), x, int(data.schema.is_linear[:before].sum()))
    folds, missing = fold_of[rows], np.isnan(x)
    for draw in range(DRAWS if missing.any() else 1):
        known = torch.from_numpy(np.where(missing, np.nan, x))
        x = np.asarray(build_prior(data.schema, [prior]).sample_missing(known, create_generator(seed, 0xADA7, draw)))
        nll, whole, parts = min((_adapted(x, folds, prior, worth) for worth in PRIORS), key=lambda one: one[0])
    return CrossFittedPriors(build_prior(data.schema, [whole]), build_prior(data.schema, parts), fold_of, nll)


def _with_new_features(old: Mixture, x: Floats, before: int) -> Mixture:
    """New features as linear functions of the old ones with Gaussian noise, the same in every component."""
    after = x.shape[1] - before
    if not after:
        return old
    filled = np.where(np.isnan(x), np.nanmean(np.where(np.isnan(x).all(0), 0.0, x), 0), x)
    known, new = filled[:, :before], filled[:, before:]
    centre = known.mean(0)
    scatter = (known - centre).T @ (known - centre) + 10.0 * np.eye(before)
    slope = np.linalg.solve(scatter, (known - centre).T @ (new - new.mean(0))).T
    rest = new - new.mean(0) - (known - centre) @ slope.T
    noise = (rest.T @ rest + np.eye(after)) / (len(x) + 1.0) + RIDGE**2 * np.eye(after)
    means = np.concatenate([old.means, new.mean(0) + (old.means - centre) @ slope.T], 1)
    across = slope @ old.covariances
    covariances = np.block([[old.covariances, across.transpose(0, 2, 1)], [across, across @ slope.T + noise]])
    return Mixture(old.log_weights, means, covariances)


def _adapted(x: Floats, folds: Ints, prior: Mixture, worth: float) -> tuple[float, Mixture, list[Mixture]]:
    """Cross-validated −ln p, the fit to all and those without each fold. Components keep their numbers."""
    parts = [_maximised_a_posteriori(x[folds != f], prior, worth) for f in range(NUM_FOLDS)]
    inside = [np.logaddexp.reduce(part.log_densities(x[folds == f]), 1) for f, part in enumerate(parts)]
    return -float(np.concatenate(inside).mean()), _maximised_a_posteriori(x, prior, worth), parts


def _maximised_a_posteriori(x: Floats, prior: Mixture, worth: float) -> Mixture:
    now = prior
    for _ in range(ROUNDS):
        densities = now.log_densities(x)
        memberships = np.exp(densities - np.logaddexp.reduce(densities, 1)[:, None])
        size = memberships.sum(0)
        means = (memberships.T @ x + CENTRE * prior.means) / (size + CENTRE)[:, None]
        moved = prior.means - means
        own = np.stack([(x - m).T @ ((x - m) * w[:, None]) for m, w in zip(means, memberships.T, strict=True)])
        old = worth * prior.covariances + CENTRE * moved[:, :, None] * moved[:, None, :]
        covariances = (own + old) / (size + worth)[:, None, None]
        weights = size + worth * np.exp(prior.log_weights)
        now = Mixture(np.log(weights / weights.sum()), means, covariances)
    return now
