"""Tests that readings packed into fewer messages are the same readings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.encode_events import Packing, pack_readings
from deformer_stream.codec.model_choice import ModelChoice
from deformer_stream.codec.payloads import Messages
from tests.codec.arrow_examples import SCHEMA

value = st.one_of(st.none(), st.booleans(), st.floats(-1e12, 1e12), st.integers(-(2**60), 2**60), st.just("run"))
reading = st.fixed_dictionaries(
    {"record": st.sampled_from("abc"), "feature": st.sampled_from(SCHEMA.names), "value": value},
    optional={"time": st.integers(0, 10**9)},
)
odd = st.sampled_from([b"no JSON", b"[1]", b'{"record":"a","values":{"Current":1}}', b'{"record":7}'])


def group_by_record(messages: list[tuple[bytes | None, bytes]]) -> tuple[dict[str, list[Any]], list[Any]]:
    """Return the readings of each record in order, and the number of rejections by reason."""
    n = len(messages)
    zeros = np.zeros(n, np.int64)
    keys, payloads = [key for key, _ in messages], [payload for _, payload in messages]
    batch, rejections = Codec(SCHEMA).decode(Messages("t", keys, payloads, zeros, zeros.astype(np.int32), zeros))
    found = defaultdict(list)
    list_readings = zip(batch.record_ids, batch.features.tolist(), batch.values.tolist(), strict=True)
    for i, (record, feature, number) in enumerate(list_readings):
        # Adding zero turns -0.0 into 0.0: a number that is sent as a text has no sign of zero. The values are equal.
        found[record].append((feature, repr(number + 0.0), batch.unseen_labels.get(i)))
    reasons: dict[str, int] = defaultdict(int)
    for rejection in rejections:
        reasons[rejection.reason] += rejection.num_readings
    return dict(found), sorted(reasons.items())


@pytest.mark.parametrize("packing", ["json", "json-many", "arrow"])
@example(
    documents=[
        orjson.dumps({"record": "a", "feature": SCHEMA.names[0], "value": -0.0}),
        orjson.dumps({"record": "a", "feature": SCHEMA.names[1], "value": "run"}),
    ],
    gathered=2,
)
@given(documents=st.lists(st.one_of(reading.map(orjson.dumps), odd), max_size=30), gathered=st.integers(1, 12))
def test_packing_keeps_readings_order_and_partitions(packing: Packing, documents: list[bytes], gathered: int) -> None:
    def find_partition(key: bytes | None) -> int:
        return ord(key or b"a") % 2

    messages: list[tuple[bytes | None, bytes]] = []
    for document in documents:
        record = orjson.loads(document).get("record", "a") if document.startswith(b"{") else "a"
        messages.append((str(record).encode(), document))
    sent = list(pack_readings(messages, packing, gathered, find_partition))
    assert sum(message.num_readings for message in sent) == len(documents)
    assert len(sent) <= len(documents)
    assert group_by_record([(message.key, message.value) for message in sent]) == group_by_record(messages)
    for message in sent:
        if message.partition is not None:
            of_stream = group_by_record([(None, message.value)])[0]
            assert {find_partition(record.encode()) for record in of_stream} <= {message.partition}


def test_many_readings_become_few_messages() -> None:
    lines = [
        orjson.dumps({"record": f"r{i % 5}", "feature": name, "value": float(i), "time": i})
        for i in range(100)
        for name in ("Pressure", "Current")
    ]
    messages = [(orjson.loads(line)["record"].encode(), line) for line in lines]
    assert len(list(pack_readings(messages, "json-many"))) == 100
    (make_stream,) = pack_readings(messages, "arrow")
    assert (make_stream.key, make_stream.partition, make_stream.num_readings) == (None, 0, 200)
    (first, *_) = pack_readings(messages, "json-many")
    assert orjson.loads(first.value) == {"record": "r0", "time": 0, "values": {"Pressure": 0.0, "Current": 0.0}}


def test_readings_of_devices_are_packed_by_their_times() -> None:
    """A device has readings in several windows of time, so a message has the readings of one time."""
    lines = [
        orjson.dumps({"device": f"d{i % 2}", "feature": name, "value": float(i), "time": i})
        for i in range(10)
        for name in ("Pressure", "Current")
    ]
    messages = [(orjson.loads(line)["device"].encode(), line) for line in lines]
    packed = [orjson.loads(message.value) for message in pack_readings(messages, "json-many")]
    assert sorted(packed, key=lambda document: document["time"]) == [
        {"device": f"d{i % 2}", "time": i, "values": {"Pressure": float(i), "Current": float(i)}} for i in range(10)
    ]
    (stream,) = pack_readings(messages, "arrow")
    rows = pa.ipc.open_stream(stream.value).read_all().to_pylist()
    assert [(row["device"], row["feature"], row["value"], row["time"]) for row in rows] == [
        (document["device"], document["feature"], document["value"], document["time"])
        for document in map(orjson.loads, lines)
    ]


@pytest.mark.parametrize("models", [["pump", "fan"], [2, True], ["pump", None]])
def test_packed_readings_keep_the_field_that_determines_their_model(models: list[Any]) -> None:
    lines = [
        orjson.dumps(
            {"record": f"r{i}", **({} if model is None else {"type": model}), "feature": name, "value": 1.5, "time": i}
        )
        for i, model in enumerate(models)
        for name in ("Pressure", "Current")
    ]
    messages = [(orjson.loads(line)["record"].encode(), line) for line in lines]
    packed = [orjson.loads(m.value) for m in pack_readings(messages, "json-many", model_field="type")]
    assert [(document["record"], document.get("type"), len(document["values"])) for document in packed] == [
        (f"r{i}", model, 2) for i, model in enumerate(models)
    ]
    (stream,) = pack_readings(messages, "arrow", model_field="type")
    choice = ModelChoice("type")
    expected = [None if model is None else choice.choose(model) for model in models]
    rows = pa.ipc.open_stream(stream.value).read_all().to_pylist()
    assert [row["type"] for row in rows] == [model for model in expected for _ in range(2)]
    unknown = list(pack_readings(messages, "json-many"))  # a field of no known meaning is not dropped
    assert len(unknown) == sum(2 if model is not None else 1 for model in models)


def test_readings_of_a_record_with_two_models_stay_apart() -> None:
    lines = [orjson.dumps({"record": "r", "type": t, "feature": "Pressure", "value": 1.0}) for t in ("pump", "fan")]
    packed = [orjson.loads(m.value) for m in pack_readings([(b"r", x) for x in lines], "json-many", model_field="type")]
    assert [document["type"] for document in packed] == ["pump", "fan"]
