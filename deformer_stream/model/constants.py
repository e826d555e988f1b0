"""Constants of the network that its two implementations share: PyTorch and the compiled kernels.

This module does not import PyTorch, so that models can be read and scored without it.
"""

from __future__ import annotations

import math

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
"""−ln of the density of a standard normal variable at 0."""
SCALE_FLOOR = 1e-3
"""The smallest standard deviation of a mixture component, in normalised units.

Without a floor, the density could grow without bound at a value that occurs repeatedly in training.
"""
MAX_LOG_SCALE_CHANGE = 5.0
"""The limit of |ln f|, where f is the factor by which the network changes the scale of a component of the prior."""
MAX_CONDITIONING_VALUE = 20.0
"""The limit to which a normalised value is clipped when other readings are conditioned on it.

A reading with an extreme value then cannot distort the conditionals of the readings after it. The score of the reading
itself uses its unclipped value.
"""
NUM_PROCESS_COMPONENTS = 2
"""Number of Gaussians in the distribution of a reading under the Gaussian process prior: that of the process, and a
wider one for outliers."""
MAX_NEIGHBOR_VALUE = 6.0
"""The limit to which the difference of a neighbor's value from its mean is clipped, in normalised units.

An outlier then cannot distort the distributions of the readings after it.
"""
MIN_NOISE_VARIANCE = 1e-4
"""Smallest variance of the noise of a reading, in squared normalised units. It keeps covariance matrices regular."""
MAX_AGE = 4.0
"""The limit to which an age is clipped as an input of the network, in units of `ReadingTimes.duration`."""
ACTIVATION_CODES = {"gelu": 0, "relu": 1}
"""The number by which the compiled kernels select an activation function, by the name that the hyperparameter
`activation` uses. `layers.ACTIVATIONS` has the functions of PyTorch."""
LAYER_NORM_EPSILON = 1e-5
"""The number that layer normalisation adds to variances, the default of PyTorch."""
