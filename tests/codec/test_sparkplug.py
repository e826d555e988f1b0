"""Sparkplug B: births, data by alias, sequence numbers, deaths, and what is rejected."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from deformer_stream.codec.bridge_messages import MAX_READINGS, BridgeMessage, Translation
from deformer_stream.codec.sparkplug import SparkplugTranslator, load_payload_class
from tests.codec.sparkplug_messages import SimulatedNode

NOW = 1_700_000_000_000_000


def translate(
    translator: SparkplugTranslator, *messages: tuple[str, bytes], time: int = NOW, is_repeated: bool = False
) -> Translation:
    """Return what follows from messages."""
    translation = Translation()
    for topic, payload in messages:
        translator.translate(BridgeMessage(topic, payload, time, is_repeated), translation)
    return translation


def read(translation: Translation) -> list[dict[str, Any]]:
    """Return the events of a translation."""
    return [orjson.loads(event.value) for event in translation.events]


def list_reasons(translation: Translation) -> list[str]:
    """Return the reasons of the rejections."""
    return [rejection.reason for rejection in translation.rejections]


def test_payloads_have_the_bytes_of_the_specification() -> None:
    """Field numbers and wire types, by hand: metric `a`, alias 3, Double 1.5, sequence number 7."""
    metric = b"\x0a\x01a\x10\x03\x20\x0a\x69" + bytes.fromhex("000000000000f83f")
    data = b"\x08\xe8\x07" + b"\x12" + bytes([len(metric)]) + metric + b"\x18\x07"
    payload = load_payload_class()(timestamp=1000, seq=7)
    payload.metrics.add(name=b"a", alias=3, datatype=10, double_value=1.5)
    assert payload.SerializeToString() == data


def test_values_of_births_and_of_data_by_alias() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    found = translate(
        translator,
        node.birth({"ambient": 20.5}),
        node.birth({"flow": 1.5, "count": -7, "open": True, "mode": "auto"}, device="pump-1"),
        node.data({"flow": 2.5, "count": -8}, 1_600_000_001_000, "pump-1"),
        node.data({"ambient": 21.5}, 1_600_000_002_000),
    )
    assert (found.rejections, found.requests) == ([], [])
    assert read(found) == [
        {"device": "plant/line-1", "feature": "ambient", "value": 20.5, "time": 1.6e9},
        {
            "device": "plant/line-1/pump-1",
            "values": {"flow": 1.5, "count": -7, "open": True, "mode": "auto"},
            "time": 1.6e9,
        },
        {"device": "plant/line-1/pump-1", "values": {"flow": 2.5, "count": -8}, "time": 1.6e9 + 1},
        {"device": "plant/line-1", "feature": "ambient", "value": 21.5, "time": 1.6e9 + 2},
    ]
    assert translator.num_by_kind["DDATA"] == 1
    assert translator.num_online == 1


def test_sequence_numbers_start_again_after_255() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    found = translate(translator, node.birth({"x": 0.0}), *(node.data({"x": float(i)}) for i in range(600)))
    assert (len(found.events), found.rejections, found.requests) == (601, [], [])


def test_after_a_gap_aliases_are_rejected_until_the_next_birth() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"x": 0.0}), node.data({"x": 1.0}))
    node.data({"x": 2.0})  # lost
    gap = translate(translator, node.data({"x": 3.0}), node.data({"x": 4.0}))
    assert list_reasons(gap) == ["unknown_alias", "unknown_alias"]
    assert [topic for topic, _ in gap.requests] == ["spBv1.0/plant/NCMD/line-1"], "one request"
    request = load_payload_class().FromString(gap.requests[0][1])
    assert [(m.name, m.boolean_value) for m in request.metrics] == [(b"Node Control/Rebirth", True)]
    assert translator.num_gaps == 1
    again = translate(translator, node.data({"x": 5.0}), time=NOW + 11_000_000)
    assert len(again.requests) == 1, "the request is repeated"
    reborn = translate(translator, node.birth({"x": 6.0}), node.data({"x": 7.0}))
    assert [event["value"] for event in read(reborn)] == [6.0, 7.0]
    assert reborn.rejections == []


def test_an_alias_that_no_birth_has_declared_requests_a_birth() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"x": 0.0}))
    node.alias_by_name["y"] = 2
    found = translate(translator, node.data({"y": 1.0}, device="pump-1"), node.data({"y": 2.0}, device="pump-1"))
    assert list_reasons(found) == ["unknown_alias"] * 2
    assert [topic for topic, _ in found.requests] == ["spBv1.0/plant/NCMD/line-1"]
    assert translator.num_gaps == 0


def test_a_birth_may_have_more_metrics_than_an_event() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    values = {f"tag-{index}": float(index) for index in range(3 * MAX_READINGS)}
    found = translate(translator, node.birth(values), node.data({"tag-9000": 1.0}))
    assert (found.rejections, found.requests) == ([], [])
    *of_birth, of_data = read(found)
    assert all(len(event["values"]) <= MAX_READINGS for event in of_birth)
    assert {name: value for event in of_birth for name, value in event["values"].items()} == values
    assert (of_data["feature"], of_data["value"]) == ("tag-9000", 1.0)


def test_a_birth_that_is_refused_is_not_requested_again_at_once() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator(max_bytes=2000)
    values = {f"tag-{index}": float(index) for index in range(200)}
    found = translate(translator, node.birth(values), node.data({"tag-1": 1.0}))
    assert (list_reasons(found), found.requests) == (["too_large", "unknown_alias"], [])
    assert translate(translator, node.data({"tag-1": 1.0}), time=NOW + 300_000_000).requests == []
    assert len(translate(translator, node.data({"tag-1": 1.0}), time=NOW + 601_000_000).requests) == 1


@pytest.mark.parametrize("payload", [b"\xff\xff", b"x" * 3000])
def test_a_birth_of_a_device_that_is_rejected_does_not_concern_the_other_devices(payload: bytes) -> None:
    node, translator = SimulatedNode(), SparkplugTranslator(max_bytes=2000)
    translate(translator, node.birth({"x": 0.0}), node.birth({"y": 0.0}, device="pump-1"))
    topic, _ = node.birth({"z": 0.0}, device="pump-2")
    found = translate(translator, (topic, payload), node.data({"x": 1.0}), node.data({"y": 2.0}, device="pump-1"))
    assert ([event["value"] for event in read(found)], len(found.rejections), found.requests) == ([1.0, 2.0], 1, [])
    found = translate(translator, node.data({"z": 3.0}, device="pump-2"))
    assert (list_reasons(found), len(found.requests)) == (["unknown_alias"], 1)
    node.data({"x": 4.0})  # lost
    assert len(translate(translator, node.data({"x": 5.0}), time=NOW + 11_000_000).requests) == 1


def test_a_birth_that_does_not_declare_the_alias_is_not_requested_again_at_once() -> None:
    """Each birth repeats all metrics of the node, so an alias that is never declared must not request many."""
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"x": 0.0}))
    num_requests = 0
    for second in range(1, 1200):
        node.alias_by_name["y"] = 2
        found = translate(translator, node.data({"y": 1.0}), time=NOW + 1_000_000 * second)
        assert list_reasons(found) == ["unknown_alias"]
        if found.requests:
            num_requests += 1
            translate(translator, node.birth({"x": 0.0}), time=NOW + 1_000_000 * second)
    assert num_requests == 2


def test_values_of_one_metric_in_a_payload_stay_in_order() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"x": 0.0, "y": 0.0}))
    payload = load_payload_class()(timestamp=1_600_000_000_000, seq=1)
    for alias, time, value in ((1, 1, 1.0), (1, 2, 2.0), (1, 2, 3.0), (2, 2, 4.0)):
        payload.metrics.add(alias=alias, timestamp=1_600_000_000_000 + 1000 * time, double_value=value)
    found = translate(translator, (node.make_topic("NDATA"), payload.SerializeToString()))
    assert read(found) == [
        {"device": "plant/line-1", "feature": "x", "value": 1.0, "time": 1.6e9 + 1},
        {"device": "plant/line-1", "feature": "x", "value": 2.0, "time": 1.6e9 + 2},
        {"device": "plant/line-1", "values": {"x": 3.0, "y": 4.0}, "time": 1.6e9 + 2},
    ]


def test_a_lost_birth_does_not_attribute_values_to_the_wrong_sensor() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"flow": 1.0, "power": 2.0}), node.data({"flow": 1.5}))
    node.alias_by_name = {"power": 1, "flow": 2}
    node.birth({"flow": 1.0, "power": 2.0})  # lost
    found = translate(translator, node.data({"flow": 3.0}), node.data({"flow": 3.5}))
    assert (found.events, list_reasons(found)) == ([], ["unknown_alias"] * 2)


def test_a_node_that_dies_and_is_reborn() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    translate(translator, node.birth({"x": 1.0}))
    translate(translator, node.death())
    assert translator.num_online == 0
    late = translate(translator, node.data({"x": 2.0}))
    assert list_reasons(late) == ["unknown_alias"]
    old_death = node.death()
    node.birth_sequence += 1
    found = translate(translator, node.birth({"x": 3.0}), old_death, node.data({"x": 4.0}))
    assert [event["value"] for event in read(found)] == [3.0, 4.0], "a death of an earlier birth is ignored"
    assert translator.num_online == 1


def test_the_death_of_a_device_withdraws_its_aliases_only() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    found = translate(
        translator,
        node.birth({"x": 1.0}),
        node.birth({"y": 2.0}, device="d"),
        node.death("d"),
        node.data({"x": 3.0}),
        node.data({"y": 4.0}, device="d"),
    )
    assert [event.get("value") for event in read(found)] == [1.0, 2.0, 3.0]
    assert list_reasons(found) == ["unknown_alias"]


def test_messages_that_are_delivered_again_are_translated_again() -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    birth, *data = node.birth({"x": 0.0}), *(node.data({"x": float(i)}) for i in range(1, 4))
    translate(translator, birth, *data)
    found = translate(translator, *data[1:], is_repeated=True)
    assert [event["value"] for event in read(found)] == [2.0, 3.0]
    found = translate(translator, node.data({"x": 4.0}))
    assert (len(found.events), found.requests) == (1, []), "the sequence goes on"


def test_a_later_run_knows_the_aliases_if_no_message_is_missing() -> None:
    node, first = SimulatedNode(), SparkplugTranslator()
    states = translate(
        first, node.birth({"x": 0.0}), node.birth({"n": -5}, device="d"), node.data({"x": 1.0}), node.data({"x": 2.0})
    ).states
    assert states["plant/line-1#seq"] == b"3"
    message = node.data({"n": -6}, device="d")
    second = SparkplugTranslator()
    for key in sorted(states, reverse=True):  # the order says nothing
        second.restore(key, states[key])
    assert read(translate(second, message))[0]["value"] == -6
    node.data({"x": 3.0})
    third = SparkplugTranslator()
    for key, value in states.items():
        third.restore(key, value)
    found = translate(third, node.data({"x": 4.0}))
    assert (list_reasons(found), len(found.requests)) == (["unknown_alias"], 1)


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"v": 2}', b'{"v": 1, "bdSeq": null, "online": 1, "aliases": 3}']
)
def test_damaged_states_are_ignored(value: bytes) -> None:
    node, translator = SimulatedNode(), SparkplugTranslator()
    for key in ("plant/line-1", "plant/line-1#seq", "x", "a/b/c", ""):
        translator.restore(key, value)
    node.birth({"x": 0.0})
    assert list_reasons(translate(translator, node.data({"x": 1.0}))) == ["unknown_alias"]


def make_metrics(*metrics: dict[str, Any], **fields: Any) -> bytes:
    """Return a payload with metrics."""
    payload = load_payload_class()(**fields)
    for metric in metrics:
        payload.metrics.add(**metric)
    return bytes(payload.SerializeToString())


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        ("spBv1.0/plant/NDATA", b"", "not_sparkplug"),
        ("spBv1.0/plant/NDATA/n/d", b"", "not_sparkplug"),
        ("spBv1.0/plant/DDATA/n", b"", "not_sparkplug"),
        ("spBv1.0//NDATA/n", b"", "not_sparkplug"),
        ("spBv1.0/plant/XDATA/n", b"", "not_sparkplug"),
        ("spBv1.0/" + "g" * 1100 + "/NDATA/n", b"", "too_large"),
        ("spBv1.0/plant/NBIRTH/n", b"\xff\xff", "not_sparkplug"),
        ("spBv1.0/plant/NBIRTH/n", b"0.5", "not_sparkplug"),
        ("spBv1.0/plant/NBIRTH/n", b"x" * 5000, "too_large"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"double_value": 1.0}), "missing_field"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"\xff", "double_value": 1.0}), "wrong_type"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"n" * 1025, "double_value": 1.0}), "too_large"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "double_value": float("nan")}), "not_finite"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "float_value": float("inf")}), "not_finite"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "string_value": b"\xff"}), "wrong_type"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "string_value": b"a" * 1025}), "too_large"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "bytes_value": b"a"}), "wrong_type"),
        ("spBv1.0/plant/NBIRTH/n", make_metrics({"name": b"x", "dataset_value": b""}), "wrong_type"),
        (
            "spBv1.0/plant/NBIRTH/n",
            make_metrics({"name": b"x", "double_value": 1.0, "timestamp": 2**63}),
            "wrong_type",
        ),
        ("spBv1.0/plant/NDATA/n", make_metrics({"name": b"x", "int_value": 4294967295}), "unknown_alias"),
    ],
)
def test_what_is_rejected(topic: str, payload: bytes, reason: str) -> None:
    translator = SparkplugTranslator(max_bytes=4096)
    found = translate(translator, (topic, payload))
    assert (found.events, list_reasons(found)) == ([], [reason])
    assert found.rejections[0].message.payload == payload
    assert "\n" not in found.rejections[0].detail


def test_one_bad_metric_does_not_reject_the_others() -> None:
    payload = make_metrics(
        {"name": b"a", "double_value": 1.0},
        {"name": b"b", "double_value": float("nan")},
        {"name": b"c", "is_null": True},
    )
    found = translate(SparkplugTranslator(), ("spBv1.0/plant/NBIRTH/n", payload))
    assert [event["value"] for event in read(found)] == [1.0]
    assert list_reasons(found) == ["not_finite"], "null is no rejection"


@pytest.mark.parametrize(
    ("datatype", "transmitted", "value"),
    [
        (1, 0xFF, -1),
        (1, 0xFFFFFFFF, -1),
        (2, 0xFFFE, -2),
        (3, 0xFFFFFFFD, -3),
        (3, 5, 5),
        (5, 200, 200),
        (7, 2**32 - 1, 2**32 - 1),
    ],
)
def test_signed_numbers(datatype: int, transmitted: int, value: int) -> None:
    payload = make_metrics({"name": b"x", "datatype": datatype, "int_value": transmitted})
    assert read(translate(SparkplugTranslator(), ("spBv1.0/plant/NBIRTH/n", payload)))[0]["value"] == value


def test_values_of_several_times_are_several_events() -> None:
    history = [
        {"name": b"x", "double_value": float(i), "timestamp": 1_600_000_000_000 + 1000 * (i // 2)} for i in range(4)
    ]
    found = translate(SparkplugTranslator(), ("spBv1.0/plant/NBIRTH/n", make_metrics(*history)))
    assert sorted((event["time"], event["value"]) for event in read(found)) == [
        (1.6e9, 0.0),
        (1.6e9, 1.0),
        (1.6e9 + 1, 2.0),
        (1.6e9 + 1, 3.0),
    ]


def test_a_large_birth_is_divided_into_events_that_kafka_accepts() -> None:
    metrics = [{"name": b"%04d" % i + b"x" * 900, "double_value": float(i)} for i in range(2000)]
    translator = SparkplugTranslator(max_bytes=2**22, max_event_bytes=100_000)
    found = translate(translator, ("spBv1.0/plant/NBIRTH/n", make_metrics(*metrics)))
    assert max(len(event.value) for event in found.events) <= 100_000
    assert sum(event.num_readings for event in found.events) == 2000


def test_commands_and_states_of_hosts_are_no_readings() -> None:
    found = translate(
        SparkplugTranslator(),
        ("spBv1.0/STATE/host", b"ONLINE"),
        ("spBv1.0/plant/NCMD/n", b"?"),
        ("spBv1.0/plant/DCMD/n/d", b"?"),
    )
    assert (found.events, found.rejections) == ([], [])
