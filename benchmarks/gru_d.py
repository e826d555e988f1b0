"""GRU-D, a recurrent network for irregularly sampled series, as a density model of the next reading.

Che, Purushotham, Cho, Sontag and Liu, "Recurrent Neural Networks for Multivariate Time Series with Missing Values"
(Scientific Reports 8, 2018). The network gets the values, a mask of the observed sensors and the time δ since each
sensor's last reading. With γ = exp(−max(0, W δ + b)), a missing input decays from the last value towards the mean, and
the hidden state decays towards zero:

    x̂ = m x + (1 − m) (γ_x x_last + (1 − γ_x) x_mean),    h ← γ_h h,    h ← GRU(h, [x̂, m])

W is diagonal for γ_x. The paper classifies series and makes a step for each instant. Here every reading is a step, so
that the readings of one instant are conditional on each other, and the network predicts each reading before it is read:
a mixture of Gaussians around the decayed last value. Its parameters are computed from the decayed hidden state, the
decay of the input, and an embedding of the sensor. Training maximises the likelihood by truncated backpropagation
through time, within a time limit. The learning rate follows a cosine. The weights are averaged over the last part of
training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.irregular_alerts import PrefixScores, combine_p_values
from benchmarks.irregular_peers import OUTLIER_SCALE, OUTLIER_SHARE, score_mixtures
from benchmarks.irregular_records import Readings, draw_grid_noise, fit_units
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HIDDEN, EMBEDDING, COMPONENTS = 96, 16, 8
RECORDS_PER_BATCH = 32
STEPS_PER_CHUNK = 64
"""Number of readings over which gradients are propagated back."""

LEARNING_RATE = 3e-3
MIN_SCALE = 1e-3


class GruDNetwork(nn.Module):
    """The network.

    Args:
        num_sensors: The number S of sensors.
        unit: Seconds that are 1 in the inputs δ.
    """

    def __init__(self, num_sensors: int, unit: float) -> None:
        super().__init__()
        self.num_sensors, self.unit = num_sensors, unit
        self.input_decay_weight = nn.Parameter(torch.full((num_sensors,), 0.05))
        self.input_decay_bias = nn.Parameter(torch.zeros(num_sensors))
        self.hidden_decay = nn.Linear(num_sensors, HIDDEN)
        nn.init.uniform_(self.hidden_decay.weight, 0.0, 0.02)
        nn.init.zeros_(self.hidden_decay.bias)
        self.from_input = nn.Linear(2 * num_sensors, 3 * HIDDEN)
        self.from_hidden = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.sensor = nn.Embedding(num_sensors, EMBEDDING)
        self.head = nn.Sequential(nn.Linear(HIDDEN + EMBEDDING + 4, 128), nn.ReLU(), nn.Linear(128, 3 * COMPONENTS))
        with torch.no_grad():
            self.head[2].weight.mul_(0.1)
            self.head[2].bias.zero_()
            self.head[2].bias[COMPONENTS : 2 * COMPONENTS] = torch.linspace(-1.5, 1.5, COMPONENTS)

    def forward(
        self, codes: Tensor, values: Tensor, last: Tensor, gaps: Tensor, is_present: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predict each reading from the ones before it.

        Args:
            codes: (N, T) sensor codes of T steps of N records, 0 for padding.
            values: (N, T) normalised values.
            last: (N, T, S) last value of each sensor before the step, 0 (the mean) before its first reading.
            gaps: (N, T, S) seconds since that value, or since the origin of the record.
            is_present: (N, T) false for padding at the end of records.
            hidden: (N, H) hidden state before the first step.

        Returns:
            The logarithms of the weights, the means, and the standard deviations of the Gaussians, (N, T, J) each, and
            the hidden state after the last step, (N, H).
        """
        delta = torch.log1p(gaps / self.unit) * 2
        input_decay = torch.exp(-torch.relu(self.input_decay_weight * delta + self.input_decay_bias))
        decayed = input_decay * last
        hidden_decay = torch.exp(-torch.relu(self.hidden_decay(delta)))
        mask = nn.functional.one_hot(codes, self.num_sensors).to(values.dtype) * is_present.unsqueeze(-1)
        inputs = torch.cat([decayed * (1 - mask) + values.unsqueeze(-1) * mask, mask], -1)
        projected = self.from_input(inputs)
        states = []
        for k in range(codes.shape[1]):
            hidden = hidden * hidden_decay[:, k]
            states.append(hidden)
            reset_x, update_x, new_x = projected[:, k].chunk(3, -1)
            reset_h, update_h, new_h = self.from_hidden(hidden).chunk(3, -1)
            update = torch.sigmoid(update_x + update_h)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            hidden = update * hidden + (1 - update) * new
        own = codes.unsqueeze(-1)
        own_decay, own_last = input_decay.gather(2, own), last.gather(2, own)
        own_gap = delta.gather(2, own)
        centre = decayed.gather(2, own)
        features = torch.cat([torch.stack(states, 1), self.sensor(codes), centre, own_last, own_decay, own_gap], -1)
        logits, offsets, log_scales = self.head(features).chunk(3, -1)
        scales = nn.functional.softplus(log_scales) + MIN_SCALE
        return torch.log_softmax(logits, -1), centre + offsets, scales, hidden


class GruD:
    """GRU-D behind the interface `irregular_alerts.Contender`.

    Args:
        seed: Seed of the initial weights and of the batches.
        max_seconds: Duration of the training.
        unit: Seconds that are 1 in the inputs δ: 3600 for ICU records.
    """

    name = "GRU-D"

    def __init__(self, seed: int, max_seconds: float, unit: float) -> None:
        self.seed, self.max_seconds, self.unit = seed, max_seconds, unit
        self.units: Schema
        self.network: GruDNetwork
        self.num_steps = 0

    def fit(self, train: Readings) -> None:
        """Train the network until the time is over."""
        self.units = fit_units(train)
        torch.manual_seed(self.seed)
        rng = np.random.default_rng([self.seed, 0x6D])
        self.network = GruDNetwork(len(train.sensors), self.unit)
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
        average = [parameter.detach().clone() for parameter in self.network.parameters()]
        z = self.units.normalise(train.codes, train.values)
        started = time.perf_counter()
        elapsed = 0.0
        while elapsed < self.max_seconds:
            rows = np.sort(rng.choice(len(train.records), min(RECORDS_PER_BATCH, len(train.records)), replace=False))
            noise = draw_grid_noise(self.units, train.codes, int(rng.integers(2**31)))
            hidden = torch.zeros(len(rows), HIDDEN)
            for _, batch in _iterate_chunks(train, z, rows):
                codes, values, last, gaps, is_present, index = batch
                share = min(1.0, elapsed / self.max_seconds)
                warm_up = min(1.0, (self.num_steps + 1) / 50)
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * warm_up * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
                log_weights, means, scales, hidden = self.network(codes, values, last, gaps, is_present, hidden)
                targets = values + torch.from_numpy(noise[index]).float() * is_present
                deviations = (targets.unsqueeze(-1) - means) / scales
                log_p = torch.logsumexp(log_weights - 0.5 * deviations.square() - scales.log(), -1)
                outlier = -0.5 * (targets / OUTLIER_SCALE).square() - math.log(OUTLIER_SCALE)
                log_p = torch.logaddexp(log_p + math.log1p(-OUTLIER_SHARE), outlier + math.log(OUTLIER_SHARE))
                loss = -log_p[is_present].mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
                optimizer.step()
                self.num_steps += 1
                hidden = hidden.detach()
                # An average over about the last tenth of the steps.
                rate = 11 / (self.num_steps + 10)
                with torch.no_grad():
                    for mean, parameter in zip(average, self.network.parameters(), strict=True):
                        mean.lerp_(parameter, rate)
                elapsed = time.perf_counter() - started
                if elapsed >= self.max_seconds:
                    break
        with torch.no_grad():
            for mean, parameter in zip(average, self.network.parameters(), strict=True):
                parameter.copy_(mean)

    def score(self, readings: Readings) -> PrefixScores:
        """Score each reading given the ones before it."""
        z = self.units.normalise(readings.codes, readings.values)
        log_weights, means, scales = (np.zeros((len(readings), COMPONENTS)) for _ in range(3))
        order = np.argsort(np.diff(readings.offsets), kind="stable")  # records of similar length share a batch
        for start in range(0, len(order), 128):
            rows = order[start : start + 128]
            hidden = torch.zeros(len(rows), HIDDEN)
            for _, (codes, values, last, gaps, is_present, index) in _iterate_chunks(readings, z, rows):
                with torch.inference_mode():
                    *mixture, hidden = self.network(codes, values, last, gaps, is_present, hidden)
                chosen = is_present.numpy()
                target = index[chosen]
                for array, tensor in zip((log_weights, means, scales), mixture, strict=True):
                    array[target] = tensor.numpy()[chosen]
        log_densities, log_p_values = score_mixtures(log_weights, means, scales, z)
        return PrefixScores(combine_p_values(log_p_values, readings.offsets), log_densities, log_p_values)


Chunk = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Ints]
"""Codes, values, last values, gaps, presence (see `GruDNetwork.forward`) and the indexes of the readings, (N, T)."""


def _iterate_chunks(readings: Readings, z: Floats, rows: Ints) -> Iterator[tuple[int, Chunk]]:
    """Yield the first step and the inputs of each chunk of the given records.

    Args:
        readings: The readings.
        z: (M,) their normalised values.
        rows: (N,) the records.
    """
    num_sensors = len(readings.sensors)
    starts, lengths = readings.offsets[rows], np.diff(readings.offsets)[rows]
    last, last_time = np.zeros((len(rows), num_sensors)), np.zeros((len(rows), num_sensors))
    every = np.arange(len(rows))
    for first in range(0, int(lengths.max()), STEPS_PER_CHUNK):
        steps = min(STEPS_PER_CHUNK, int(lengths.max()) - first)
        position = first + np.arange(steps)
        is_present = position < lengths[:, None]
        index = np.where(is_present, starts[:, None] + position, starts[:, None])
        codes = np.where(is_present, readings.codes[index], 0)
        values, times = np.where(is_present, z[index], 0.0), readings.times[index]
        last_values = np.empty((len(rows), steps, num_sensors), np.float32)
        gaps = np.empty((len(rows), steps, num_sensors), np.float32)
        for k in range(steps):
            last_values[:, k] = last
            np.maximum(times[:, k, None] - last_time, 0.0, out=gaps[:, k], casting="same_kind")
            present = every[is_present[:, k]]
            last[present, codes[present, k]] = values[present, k]
            last_time[present, codes[present, k]] = times[present, k]
        tensors = (
            torch.from_numpy(array) for array in (codes, values.astype(np.float32), last_values, gaps, is_present)
        )
        yield first, (*tensors, index)  # type: ignore[misc]
