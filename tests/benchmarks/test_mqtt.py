"""Tests of the messages of the MQTT benchmark: the bridge can find each reading again, and a model accepts each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.feed import OUTLIER_VALUE, make_schema
from benchmarks.mqtt import KINDS, NUM_DEVICES, NUM_FEATURES, READINGS_PER_ALERT, count_births, make_messages
from deformer_stream.codec import Codec, FieldNames, WindowAssigner
from deformer_stream.codec.bridge_messages import (
    BridgeMessage,
    PrefixTranslator,
    TopicPattern,
    ValueTranslator,
    translate_all,
)
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.sparkplug import PREFIX, SparkplugTranslator

SECOND = 1_000_000


def translate(kind: str, num_readings: int, is_scored: bool) -> Messages:
    """Return the events of the benchmark's messages as a poll."""
    translator = PrefixTranslator(
        {PREFIX: SparkplugTranslator()}, ValueTranslator(TopicPattern("plant/{device}/{feature}"), FieldNames())
    )
    arrived = [
        BridgeMessage(topic, payload, 1_700_000_000 * SECOND)
        for topic, payload in make_messages(kind, num_readings, is_scored)
    ]
    translation = translate_all(translator, arrived)
    assert translation.rejections == []
    n = len(translation.events)
    values = [event.value for event in translation.events]
    return Messages("t", [None] * n, values, np.zeros(n, np.int64), np.zeros(n, np.int32), np.arange(n))


@pytest.mark.parametrize("kind", KINDS)
def test_each_reading_for_the_bridge_has_its_number(kind: str) -> None:
    codec = Codec(make_schema(NUM_FEATURES), window_assigner=WindowAssigner(10**9 * SECOND))
    batch, rejections = codec.decode(translate(kind, 1000, is_scored=False))
    assert rejections == []
    assert sorted(batch.values[batch.values >= 0].tolist()) == list(range(1000))
    assert len(batch) == 1000 + count_births(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_readings_of_a_second_are_a_record_for_the_model(kind: str) -> None:
    """No reading is there twice, so a consumer accepts all of them; one in 10,000 is an outlier."""
    seconds = 2 * READINGS_PER_ALERT // (NUM_DEVICES * NUM_FEATURES)
    num_readings = seconds * NUM_DEVICES * NUM_FEATURES
    codec = Codec(make_schema(NUM_FEATURES), window_assigner=WindowAssigner(SECOND))
    batch, rejections = codec.decode(translate(kind, num_readings, is_scored=True))
    assert rejections == []
    counts = Counter(zip(batch.record_ids, batch.features.tolist(), strict=True))
    assert set(counts.values()) == {1}
    assert len(counts) == num_readings + count_births(kind)
    assert len(set(batch.record_ids)) == NUM_DEVICES * (seconds + bool(count_births(kind)))
    assert (batch.values == OUTLIER_VALUE).sum() == num_readings // READINGS_PER_ALERT
