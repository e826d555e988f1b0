"""Encoders of the events of one instant: each reduces a set of events to one vector, whatever their order.

The events e_1 … e_n ∈ R^M of an instant become one vector x̃ ∈ R^M, which a sequence model then reads. An instant with
one event needs no encoder: x̃ = e_1. The encoders are those of Ger, Klabjan and Utke, "Classification Models for
Partially Ordered Sequences" (arXiv 2102.00380).

In the shapes, B is the number of sets, n the number of events of each set, and M the width of an event. An encoder gets
sets of equal size, so that nothing is padded. `SetEncoder.forward` has the arguments of all encoders.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from trainer.event_sets import EventSets
from trainer.gaussian_prior import initialize_memberships

EncoderName = Literal["mean", "deep_sets", "lstm_set", "transformer", "transition"]
ENCODERS: tuple[EncoderName, ...] = get_args(EncoderName)

MAX_CLUSTERED_EVENTS = 10_000
"""Largest number of training events that are clustered into types."""


class SetEncoder(nn.Module):
    """The interface of the encoders."""

    def forward(self, events: Tensor, transitions: Tensor | None = None) -> Tensor:
        """Return one vector for each set; the order of the events of a set changes nothing.

        Args:
            events: (B, n, M) the events of B sets.
            transitions: (B, n, n) the probability at [i, j] that an event of the type of e_j follows one of the type of
                e_i (`TransitionMatrix`). Only the encoder "transition" uses it.

        Returns:
            (B, M).
        """
        raise NotImplementedError


class MeanEncoder(SetEncoder):
    """The mean of the events: x̃ = (1/n) Σ_j e_j."""

    def forward(self, events: Tensor, transitions: Tensor | None = None) -> Tensor:
        """Return one vector for each set (see `SetEncoder`)."""
        return events.mean(1)


class DeepSetsEncoder(SetEncoder):
    """The mean of linear maps of the events: x̃ = (1/n) Σ_j W e_j (Zaheer et al., "Deep Sets", 2017).

    Args:
        num_inputs: The width M of an event.
    """

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(num_inputs, num_inputs, bias=False)

    def forward(self, events: Tensor, transitions: Tensor | None = None) -> Tensor:
        """Return one vector for each set (see `SetEncoder`)."""
        encoded: Tensor = self.map(events).mean(1)
        return encoded


class LstmSetEncoder(SetEncoder):
    """An LSTM that reads the set n times by attention (Vinyals, Bengio and Kudlur, "Order Matters", 2015).

    For t = 1 … n, with q*_0 = 0:

        q_t = LSTM(q*_{t−1}),    d_{i,t} = V · tanh(W [e_i, q_t]),    a_t = softmax(d_t),
        r_t = Σ_i a_{i,t} e_i,    q*_t = [q_t, r_t]

    The result is a linear map of q*_n, which has the width of an event again, so that an instant with one event can be
    passed through.

    Args:
        num_inputs: The width M of an event.
        width: The width of q_t and of the hidden layer of the attention.
    """

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width + num_inputs, width)
        self.hidden, self.logit = nn.Linear(num_inputs + width, width), nn.Linear(width, 1, bias=False)
        self.out = nn.Linear(width + num_inputs, num_inputs)

    def forward(self, events: Tensor, transitions: Tensor | None = None) -> Tensor:
        """Return one vector for each set (see `SetEncoder`)."""
        num_sets, num_events, _ = events.shape
        query = cell = events.new_zeros(num_sets, self.cell.hidden_size)
        summary = events.new_zeros(num_sets, self.cell.input_size)  # q*
        for _ in range(num_events):
            query, cell = self.cell(summary, (query, cell))
            pairs = torch.cat([events, query.unsqueeze(1).expand(-1, num_events, -1)], -1)
            attention = torch.softmax(self.logit(torch.tanh(self.hidden(pairs))), 1)  # (B, n, 1)
            summary = torch.cat([query, (attention * events).sum(1)], -1)
        encoded: Tensor = self.out(summary)
        return encoded


class TransformerEncoder(SetEncoder):
    """Self-attention among the events without positions, and pooling by attention.

    For each head, with queries q, keys k and values v of width w, which are linear maps of the events:

        a_{ji} = softmax_i(q_j · k_i / √w),    x_j = Σ_i a_{ji} v_i

    The heads are concatenated and mapped to the width of an event. As in a Transformer layer, the events are added, and
    a feed-forward network follows: y_j = h_j + FFN(h_j), h_j = e_j + O x_j. Then x̃ = Σ_j softmax_j(p · y_j) y_j with a
    trainable vector p.

    With a transition matrix T, where T_{ij} is the probability that an event of the type of e_j follows one of the type
    of e_i, the attention is

        x_j = Σ_i [softmax_i(q_j · k_i / √w) + (q_j + b)ᵀ (T_{ij} t)] v_i

    with trainable vectors b and t. (The source writes (q_j + b)ᵀ T_{ij}; t makes a vector of the probability.)

    Args:
        num_inputs: The width M of an event.
        width: The width of all heads together; a multiple of `heads`.
        heads: The number of heads.
        has_transitions: Whether the attention uses a transition matrix.
    """

    def __init__(self, num_inputs: int, width: int, heads: int, has_transitions: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(num_inputs, 3 * width), nn.Linear(width, num_inputs)
        self.feedforward = nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, num_inputs))
        self.pooling = nn.Linear(num_inputs, 1, bias=False)
        self.has_transitions = has_transitions
        if has_transitions:  # b and t, a vector for each head
            self.query_bias = nn.Parameter(torch.zeros(heads, 1, width // heads))
            self.direction = nn.Parameter(torch.randn(heads, width // heads, 1) / width)

    def forward(self, events: Tensor, transitions: Tensor | None = None) -> Tensor:
        """Return one vector for each set (see `SetEncoder`)."""
        q, k, v = torch.unflatten(self.qkv(events), -1, (3, self.heads, -1)).transpose(1, 3).unbind(2)  # (B, H, n, w)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)  # row j, column i
        if self.has_transitions and transitions is not None:
            gate = (q + self.query_bias) @ self.direction  # (B, H, n, 1)
            weights = weights + gate * transitions.transpose(1, 2).unsqueeze(1)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        hidden = events + self.out(attended)
        hidden = hidden + self.feedforward(hidden)
        pooled: Tensor = (torch.softmax(self.pooling(hidden), 1) * hidden).sum(1)
        return pooled


class TransitionMatrix(nn.Module):
    """The probability that an event of one type follows an event of another, from ordered events.

    The type of an event is its nearest centre of K clusters. If a cluster is empty, as with fewer than K different
    events, no event has its type. With c_{ab} successions of an event of type a by one of type b in training,
    T_{ab} = (c_{ab} + 1/K) / (Σ_b c_{ab} + 1). Events of one instant do not follow each other. Each pair of events of
    an instant with n and of the next with m events counts 1 / (n m).

    Args:
        num_types: The number K of types.
        num_inputs: The width M of an event.
    """

    centres: Tensor
    is_empty: Tensor
    probabilities: Tensor

    def __init__(self, num_types: int, num_inputs: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(num_types, num_inputs))
        self.register_buffer("is_empty", torch.zeros(num_types, dtype=torch.bool))
        self.register_buffer("probabilities", torch.full((num_types, num_types), 1.0 / num_types))

    def fit(self, ordered: EventSets, seed: int) -> None:
        """Estimate the types and the matrix.

        Args:
            ordered: Training records, best with one event in each set.
            seed: Seed of the choice of events that are clustered, and of the first centres.
        """
        num_types = len(self.centres)
        rows = np.random.default_rng([seed, 0x7A]).permutation(len(ordered.events))[:MAX_CLUSTERED_EVENTS]
        sample = ordered.events[rows].astype(np.float64)
        memberships = initialize_memberships(sample, num_types, seed, separates_repeated=False)
        counts = memberships.sum(0)[:, None]
        self.centres.copy_(torch.from_numpy(memberships.T @ sample / np.maximum(counts, 1.0)))
        self.is_empty.copy_(torch.from_numpy(counts[:, 0] == 0))
        types = self.find_types(torch.from_numpy(ordered.events)).numpy()
        sizes = np.diff(ordered.event_offsets)
        cells = np.arange(len(sizes)).repeat(sizes) * num_types + types
        # (S, K): the shares of the types among the events of each set.
        shares = np.bincount(cells, 1.0 / sizes.repeat(sizes), len(sizes) * num_types).reshape(-1, num_types)
        followed = np.delete(np.arange(len(sizes)), ordered.set_offsets[1:] - 1)  # not the last sets of records
        pairs = shares[followed].T @ shares[followed + 1]
        successions = pairs + 1.0 / num_types
        self.probabilities.copy_(torch.from_numpy(successions / successions.sum(1, keepdims=True)))

    def find_types(self, events: Tensor) -> Tensor:
        """Return the types of events (*S, M), int64 of shape S."""
        distances: Tensor = torch.cdist(events.flatten(0, -2), self.centres).masked_fill(self.is_empty, torch.inf)
        return torch.unflatten(distances.argmin(-1), 0, events.shape[:-1])

    def forward(self, events: Tensor) -> Tensor:
        """Return the probability at [i, j] that the type of event j follows that of event i, (B, n, n).

        Args:
            events: (B, n, M) the events of B sets.
        """
        types = self.find_types(events)
        return self.probabilities[types.unsqueeze(2), types.unsqueeze(1)]


def create_encoder(name: EncoderName, num_inputs: int, width: int, heads: int) -> SetEncoder:
    """Return an encoder of events of width `num_inputs`; the other arguments are those of the encoders."""
    if name == "mean":
        return MeanEncoder()
    if name == "deep_sets":
        return DeepSetsEncoder(num_inputs)
    if name == "lstm_set":
        return LstmSetEncoder(num_inputs, width)
    return TransformerEncoder(num_inputs, width, heads, has_transitions=name == "transition")
