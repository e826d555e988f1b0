"""The classifier of partially ordered sequences: invariances, batches without padding, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainer.equal_time import ENCODERS, EncoderName
from trainer.event_sets import EventSets, make_event_sets
from trainer.sequence_classifier import (
    READERS,
    ReaderName,
    SequenceClassifier,
    SequenceClassifierConfig,
    compute_loss,
    iterate_batches,
    train_sequence_classifier,
)

SMALL = SequenceClassifierConfig(width=16, heads=2, layers=1, dropout=0.0, num_types=4, learning_rate=0.01)


def make_series(num_records: int, seed: int) -> tuple[EventSets, NDArray[np.int64]]:
    """Return ordered records of 6 to 9 events that rise (class 0) or fall (class 1), so that only order matters."""
    rng = np.random.default_rng(seed)
    classes = np.arange(num_records) % 2
    series = [np.sort(rng.normal(size=rng.integers(6, 10)))[:: 1 - 2 * label] for label in classes.tolist()]
    values = np.concatenate(series)
    events = np.stack([values, rng.normal(size=len(values))], 1).astype(np.float32)
    records = np.repeat(np.arange(num_records), [len(values) for values in series])
    return make_event_sets(events, records, np.arange(len(events))), classes


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_order_of_the_events_of_an_instant_changes_nothing(encoder: EncoderName, reader: ReaderName) -> None:
    ordered, _ = make_series(12, 0)
    records = ordered.merge(3)
    torch.manual_seed(0)
    model = SequenceClassifier(2, 2, replace(SMALL, encoder=encoder, reader=reader))
    if model.transitions is not None:
        model.transitions.fit(ordered, 0)
    model.double()
    set_of_event = np.repeat(np.arange(len(records.event_offsets) - 1), np.diff(records.event_offsets))
    order = np.lexsort((np.random.default_rng(1).random(len(set_of_event)), set_of_event))
    shuffled = EventSets(records.events[order], records.event_offsets, records.set_offsets)
    probabilities = model.predict(records)
    np.testing.assert_allclose(model.predict(shuffled), probabilities, atol=1e-12)
    # Batches change nothing either, but the order of the instants does.
    np.testing.assert_allclose(model.predict(records, batch=1), probabilities, atol=1e-12)
    assert not np.allclose(model.predict(make_series(12, 0)[0]), probabilities)


def test_a_set_with_one_event_is_passed_through() -> None:
    ordered, _ = make_series(4, 0)
    torch.manual_seed(0)
    first = SequenceClassifier(2, 2, replace(SMALL, encoder="transformer"))
    second = SequenceClassifier(2, 2, replace(SMALL, encoder="mean"))
    second.load_state_dict(first.state_dict(), strict=False)
    np.testing.assert_array_equal(first.predict(ordered), second.predict(ordered))


def test_batches_have_one_number_of_sets_and_every_record_once() -> None:
    num_sets = np.array([3, 1, 3, 3, 2, 1])
    batches = list(iterate_batches(num_sets, 2, np.random.default_rng(0)))
    assert sorted(np.concatenate(batches).tolist()) == list(range(6))
    assert all(len(set(num_sets[rows])) == 1 and len(rows) <= 2 for rows in batches)


@pytest.mark.parametrize("reader", READERS)
def test_classifier_learns_the_order_of_instants(reader: ReaderName) -> None:
    (train, classes), (test, test_classes) = make_series(200, 0), make_series(100, 1)
    config = replace(SMALL, encoder="transition", reader=reader, epochs=8)
    data = train.merge(2), classes, test.merge(2), test_classes
    model = train_sequence_classifier(*data, config, ordered=train, seed=0)
    probabilities = model.predict(test.merge(2))
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert (probabilities.argmax(1) == test_classes).mean() > 0.9
    again = train_sequence_classifier(*data, config, ordered=train, seed=0)
    np.testing.assert_array_equal(again.predict(test.merge(2)), probabilities)


def test_the_weights_of_classes_do_not_depend_on_the_batches() -> None:
    torch.manual_seed(0)
    logits, classes, weights = torch.randn(10, 2), np.arange(10) % 5 // 4, np.array([0.6, 2.5])
    expected = compute_loss(logits, classes, weights)
    single = [compute_loss(logits[row : row + 1], classes[row : row + 1], weights) for row in range(10)]
    torch.testing.assert_close(torch.stack(single).mean(), expected)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="encoder 'median' is unknown: use one of mean"):
        SequenceClassifierConfig(encoder="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reader 'gru' is unknown"):
        SequenceClassifierConfig(reader="gru")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width 10 is not a multiple of the number of heads, 4"):
        SequenceClassifierConfig(width=10)
