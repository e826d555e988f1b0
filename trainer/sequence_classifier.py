"""A classifier of partially ordered sequences: an encoder of the events of one instant, and a reader of the instants.

A record is a sequence of sets of events (`event_sets`): a window of a series, or readings with ties. The encoder
reduces each set to a vector (`equal_time`), and the reader reads these vectors in the order of time:

    p(class | x) = softmax(C · reader(x̃_1, …, x̃_T)),    x̃_t = encoder(events of instant t)

The source (arXiv 2102.00380) names a system by encoder and reader, as in "trans-LSTM". Records are batched by their
number of sets, and sets by their number of events, so nothing is padded. A set with one event is passed through.

    from trainer.sequence_classifier import SequenceClassifierConfig, train_sequence_classifier

    config = SequenceClassifierConfig(encoder="transformer", reader="lstm")
    model = train_sequence_classifier(train, train_classes, validation, validation_classes, config)
    probabilities = model.predict(test)
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.equal_time import ENCODERS, EncoderName, SetEncoder, TransitionMatrix, create_encoder
from trainer.event_sets import EventSets

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ReaderName = Literal["lstm", "transformer"]
READERS: tuple[ReaderName, ...] = get_args(ReaderName)


@dataclass(frozen=True, slots=True)
class SequenceClassifierConfig:
    """The settings of a sequence classifier and of its training.

    Attributes:
        encoder: How the events of one instant become a vector: "mean", "deep_sets", "lstm_set", "transformer", or
            "transition", which is the transformer with a transition matrix.
        reader: What reads the vectors of the instants: "lstm" or "transformer".
        width: The width of the reader, and of the layers within the encoder; a multiple of `heads`.
        heads: The number of attention heads.
        layers: The number of layers of the Transformer that reads.
        dropout: The dropout probability during training, in [0, 1).
        num_types: The number of types of events in the transition matrix.
        learning_rate: The learning rate of AdamW.
        weight_decay: Decoupled weight decay.
        batch: The largest number of records of a step.
        epochs: The largest number of passes over the training records.
        patience: Number of passes without a smaller validation loss after which training stops.

    Raises:
        ValueError: The encoder or the reader is unknown, or the width is not a multiple of the number of heads.
    """

    encoder: EncoderName = "transformer"
    reader: ReaderName = "transformer"
    width: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    num_types: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch: int = 32
    epochs: int = 60
    patience: int = 10

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS:
            raise ValueError(f"the encoder {self.encoder!r} is unknown: use one of {', '.join(ENCODERS)}")
        if self.reader not in READERS:
            raise ValueError(f"the reader {self.reader!r} is unknown: use one of {', '.join(READERS)}")
        if self.width % self.heads:
            raise ValueError(f"the width {self.width} is not a multiple of the number of heads, {self.heads}")


class LstmReader(nn.Module):
    """The last hidden state of an LSTM: h_t = LSTM(x̃_t, h_{t−1}), and h_T is the result.

    Args:
        num_inputs: The width M of the vectors of instants.
        config: The settings.
    """

    def __init__(self, num_inputs: int, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, config.width, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the summaries of N sequences, (N, width).

        Args:
            x: (N, T, M) the vectors of T instants.
        """
        _, (hidden, _) = self.lstm(x)
        summary: Tensor = self.dropout(hidden[-1])
        return summary


class TransformerReader(nn.Module):
    """A Transformer with the usual sinusoidal positions: (1/T) Σ_t Transformer(W x̃_t + position(t)).

    Args:
        num_inputs: The width M of the vectors of instants.
        config: The settings.
    """

    def __init__(self, num_inputs: int, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(num_inputs, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.heads,
            dim_feedforward=2 * config.width,
            dropout=config.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, nn.LayerNorm(config.width), False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the summaries of N sequences, (N, width).

        Args:
            x: (N, T, M) the vectors of T instants.
        """
        embedded = self.embed(x)
        summary: Tensor = self.layers(embedded + _encode_positions(x.shape[1], embedded.shape[-1])).mean(1)
        return summary


def _encode_positions(num_positions: int, width: int) -> Tensor:
    """Return the sines and cosines of positions in geometrically spaced frequencies, (T, width)."""
    frequencies = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(num_positions).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


class SequenceClassifier(nn.Module):
    """The network: an encoder of the events of an instant, a reader of instants, and a softmax over the classes.

    Args:
        num_inputs: The width M of an event.
        num_classes: The number of classes.
        config: The settings.
    """

    location: Tensor
    scale: Tensor

    def __init__(self, num_inputs: int, num_classes: int, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.encoder: SetEncoder = create_encoder(config.encoder, num_inputs, config.width, config.heads)
        self.transitions = TransitionMatrix(config.num_types, num_inputs) if config.encoder == "transition" else None
        reader = LstmReader if config.reader == "lstm" else TransformerReader
        self.reader = reader(num_inputs, config)
        self.classes = nn.Linear(config.width, num_classes)
        # The mean and the standard deviation of the training events.
        self.register_buffer("location", torch.zeros(num_inputs))
        self.register_buffer("scale", torch.ones(num_inputs))

    def forward(self, records: EventSets) -> Tensor:
        """Return the logits of the classes, (R, num_classes).

        Args:
            records: R records with the same number of sets.
        """
        events = (torch.from_numpy(records.events) - self.location) / self.scale
        sizes = np.diff(records.event_offsets)
        encoded = events.new_empty(len(sizes), events.shape[1])
        for size in np.unique(sizes).tolist():
            sets = np.flatnonzero(sizes == size)
            members = events[torch.from_numpy(records.event_offsets[sets][:, None] + np.arange(size))]  # (B, n, M)
            encoded[torch.from_numpy(sets)] = self._encode(members)
        logits: Tensor = self.classes(self.reader(torch.unflatten(encoded, 0, (len(records), -1))))
        return logits

    def predict(self, records: EventSets, batch: int = 256) -> Floats:
        """Return the probabilities of the classes for R records with any numbers of sets, (R, num_classes).

        Args:
            records: The records.
            batch: The largest number of records that are classified together.
        """
        self.eval()
        probabilities = np.empty((len(records), self.classes.out_features))
        with torch.inference_mode():
            for rows in iterate_batches(records.num_sets, batch):
                probabilities[rows] = torch.softmax(self(records.select(rows)).double(), -1).numpy()
        return probabilities

    def _encode(self, events: Tensor) -> Tensor:
        """Return the vectors of B sets with n events each, (B, M), from the standardised events (B, n, M)."""
        if events.shape[1] == 1:
            return events[:, 0]
        encoded: Tensor = self.encoder(events, None if self.transitions is None else self.transitions(events))
        return encoded


def iterate_batches(num_sets: Ints, batch: int, rng: np.random.Generator | None = None) -> Iterator[Ints]:
    """Yield the records of batches, in each of which all records have the same number of sets.

    Args:
        num_sets: (R,) the number of sets of each record.
        batch: The largest number of records of a batch.
        rng: Shuffles the records and the batches; None to keep their order.
    """
    order = np.arange(len(num_sets)) if rng is None else rng.permutation(len(num_sets))
    order = order[np.argsort(num_sets[order], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(num_sets[order])) + 1)
    batches = [group[start : start + batch] for group in groups for start in range(0, len(group), batch)]
    sequence = range(len(batches)) if rng is None else rng.permutation(len(batches)).tolist()
    yield from (batches[i] for i in sequence)


def compute_loss(logits: Tensor, classes: Ints, weights: Floats) -> Tensor:
    """Return the weighted cross-entropy of a batch, divided by its number of records.

    It is not divided by the weights of its records. If records have many different numbers of sets, batches have one
    record, and the weights would cancel.

    Args:
        logits: (N, C) the logits of the classes.
        classes: (N,) the classes.
        weights: (C,) the weight of each class.
    """
    loss = nn.functional.cross_entropy(
        logits, torch.from_numpy(classes), torch.from_numpy(weights).to(logits.dtype), reduction="sum"
    )
    return loss / len(classes)


def train_sequence_classifier(
    train: EventSets,
    train_classes: Ints,
    validation: EventSets,
    validation_classes: Ints,
    config: SequenceClassifierConfig,
    *,
    ordered: EventSets | None = None,
    seed: int = 0,
    max_seconds: float = math.inf,
) -> SequenceClassifier:
    """Train a classifier until the validation loss no longer falls, or the time is over.

    The loss is the cross-entropy, in which each class has the same weight, whatever its number of records.

    Args:
        train: The training records.
        train_classes: (R,) their classes, from 0; each class has at least one record.
        validation: Records that choose the pass whose weights are kept.
        validation_classes: Their classes.
        config: The settings.
        ordered: The training records in full order, from which the transition matrix is estimated. By default `train`,
            from which only successions of instants are known.
        seed: Seed of the initial weights and of the batches.
        max_seconds: The largest duration of the training; at least one pass is made.

    Returns:
        The classifier in evaluation mode, with the weights of the smallest validation loss.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 0x5E9])
    counts = np.bincount(train_classes)
    model = SequenceClassifier(train.events.shape[1], len(counts), config)
    deviation = train.events.std(0, dtype=np.float64)
    model.location.copy_(torch.from_numpy(train.events.mean(0, dtype=np.float64)))
    model.scale.copy_(torch.from_numpy(np.where(deviation > 0, deviation, 1.0)))
    if model.transitions is not None:
        source = train if ordered is None else ordered
        standardised = (source.events - model.location.numpy()) / model.scale.numpy()
        model.transitions.fit(EventSets(standardised, source.event_offsets, source.set_offsets), seed)
    weights = len(train) / (len(counts) * counts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    best_loss, best_weights, passes_since_best = math.inf, model.state_dict(), 0
    end = time.monotonic() + max_seconds
    for _ in range(config.epochs):
        model.train()
        for rows in iterate_batches(train.num_sets, config.batch, rng):
            optimizer.zero_grad()
            torch.autograd.backward(compute_loss(model(train.select(rows)), train_classes[rows], weights))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        probabilities = model.predict(validation)[np.arange(len(validation)), validation_classes]
        # Double precision, in which the probability of a surprising record is not rounded to 0.
        validation_loss = float(-np.average(np.log(probabilities), weights=weights[validation_classes]))
        passes_since_best += 1
        if validation_loss < best_loss:
            best_loss, best_weights, passes_since_best = validation_loss, copy.deepcopy(model.state_dict()), 0
        if passes_since_best >= config.patience or time.monotonic() > end:
            break
    model.load_state_dict(best_weights)
    return model.eval()
