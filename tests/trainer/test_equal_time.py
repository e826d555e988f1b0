"""Encoders of the events of one instant: the order of the events changes nothing, and the equations hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trainer.equal_time import (
    ENCODERS,
    DeepSetsEncoder,
    EncoderName,
    LstmSetEncoder,
    TransformerEncoder,
    TransitionMatrix,
    create_encoder,
)
from trainer.event_sets import make_event_sets

M, WIDTH, HEADS = 5, 8, 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ENCODERS)
def test_order_of_the_events_changes_nothing(name: EncoderName, seed: int) -> None:
    torch.manual_seed(seed)
    encoder = create_encoder(name, M, WIDTH, HEADS).double()
    matrix = TransitionMatrix(4, M).double()
    matrix.centres.normal_()
    matrix.probabilities.copy_(torch.softmax(torch.randn(4, 4), -1))
    events = torch.randn(3, 2 + seed, M, dtype=torch.float64)
    shuffled = events[:, torch.randperm(2 + seed)]
    encoded = encoder(events, matrix(events))
    assert encoded.shape == (3, M)
    torch.testing.assert_close(encoder(shuffled, matrix(shuffled)), encoded)
    # Each set is encoded on its own, and another event changes its result.
    torch.testing.assert_close(encoder(events[1:2], matrix(events[1:2])), encoded[1:2])
    changed = events.clone()
    changed[:, 0] += 1.0
    assert not torch.allclose(encoder(changed, matrix(changed)), encoded)


def test_deep_sets_is_the_mean_of_a_linear_map() -> None:
    encoder, events = DeepSetsEncoder(M), torch.randn(2, 3, M)
    expected = sum(events[:, j] @ encoder.map.weight.T for j in range(3)) / 3
    torch.testing.assert_close(encoder(events), expected)


def test_lstm_set_follows_its_equations() -> None:
    torch.manual_seed(0)
    encoder, events = LstmSetEncoder(M, WIDTH), torch.randn(3, M)
    q, c, summary = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH), torch.zeros(1, WIDTH + M)
    for _ in range(3):
        q, c = encoder.cell(summary, (q, c))
        d = torch.stack([encoder.logit(torch.tanh(encoder.hidden(torch.cat([e, q[0]])))) for e in events])
        r = (torch.softmax(d, 0) * events).sum(0)
        summary = torch.cat([q[0], r])[None]
    torch.testing.assert_close(encoder(events[None]), encoder.out(summary))


def test_transitions_are_added_to_the_attention_of_the_transformer() -> None:
    torch.manual_seed(0)
    encoder, events = TransformerEncoder(M, WIDTH, heads=1, has_transitions=True), torch.randn(3, M)
    nn.init.normal_(encoder.query_bias)
    transitions = torch.softmax(torch.randn(3, 3), -1)
    q, k, v = encoder.qkv(events).chunk(3, -1)
    b, t = encoder.query_bias[0, 0], encoder.direction[0, :, 0]
    x = []
    for j in range(3):
        attention = torch.softmax(torch.stack([q[j] @ k[i] for i in range(3)]) / WIDTH**0.5, 0)
        x.append(sum((attention[i] + (q[j] + b) @ (transitions[i, j] * t)) * v[i] for i in range(3)))
    hidden = events + encoder.out(torch.stack(x))  # type: ignore[arg-type]
    hidden = hidden + encoder.feedforward(hidden)
    expected = (torch.softmax(encoder.pooling(hidden), 0) * hidden).sum(0)
    torch.testing.assert_close(encoder(events[None], transitions[None])[0], expected)


def test_transition_matrix_has_the_frequencies_of_the_ordered_events() -> None:
    # One record goes round three distant clusters; the other has one event, which nothing follows.
    events = np.array([[0, 0], [10, 0], [0, 10]] * 20 + [[0, 0]], np.float32)
    records = np.array([0] * 60 + [1])
    matrix = TransitionMatrix(3, 2)
    matrix.fit(make_event_sets(events, records, np.arange(61)), seed=0)
    transitions = matrix(torch.tensor([[[0.5, 0.5], [9.0, 1.0], [1.0, 9.0]]]))[0]
    expected = torch.tensor([[0.0, 20.0, 0.0], [0.0, 0.0, 20.0], [19.0, 0.0, 0.0]]) + 1 / 3
    torch.testing.assert_close(transitions, expected / expected.sum(1, keepdim=True))


def test_transitions_between_instants_do_not_depend_on_the_order_of_their_events() -> None:
    a, b, c = [0, 0], [10, 0], [0, 10]
    records, times = np.array([0] * 40 + [1]), np.array([*np.arange(40) // 2, 0])
    for pair in ([a, b], [b, a]):  # instants with an event of a and of b alternate with instants with two events of c
        matrix = TransitionMatrix(3, 2)
        matrix.fit(make_event_sets(np.array([*pair, c, c] * 10 + [a], np.float32), records, times), seed=0)
        transitions = matrix(torch.tensor([[a, b, c]], dtype=torch.float32))[0]
        expected = torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 5.0], [4.5, 4.5, 0.0]]) + 1 / 3
        torch.testing.assert_close(transitions, expected / expected.sum(1, keepdim=True))


def test_no_event_has_the_type_of_an_empty_cluster() -> None:
    events = np.array([[10, 10], [20, 20]] * 5, np.float32)
    matrix = TransitionMatrix(4, 2)
    matrix.fit(make_event_sets(events, np.zeros(10, int), np.arange(10)), seed=0)
    near_zero, low, high = matrix.find_types(torch.tensor([[0.0, 0.0], [10.0, 10.0], [20.0, 20.0]])).tolist()
    assert near_zero == low != high
