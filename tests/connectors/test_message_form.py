"""Tests of the key of the messages of `produce`, and of the field that determines their model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files import MessageForm, SendOptions, iterate_events
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.incidents.device import extract_device

BY_DEVICE = MessageForm(get_device=extract_device)
BY_TYPE = MessageForm(model_field="type")
OF_MODELS = MessageForm(
    model_field="type", features_by_model={"pump": frozenset({"a", "b"}), "fan": frozenset({"a"}), "2": frozenset("b")}
)


def write_parquet(path: Path, **columns: Any) -> Path:
    """Write columns as a Parquet file."""
    pq.write_table(pa.table(columns), path)
    return path


def send(path: Path, **options: Any) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the keys and the documents of the messages of a file."""
    return [(key, orjson.loads(value)) for key, value, _ in iterate_events([path], SendOptions(**options))]


def test_records_are_keyed_by_their_devices_if_the_form_says_so(tmp_path: Path) -> None:
    ids = ["hall-2/pump-7/10:34:33", "hall-2/pump-7/10:34:34", "hall-2/pump-8@2020-03-09T10:34:30Z"]
    path = write_parquet(tmp_path / "t.parquet", record=ids, a=[1.0, 2.0, 3.0])
    assert [key for key, _ in send(path)] == [record.encode() for record in ids]
    sent = send(path, form=BY_DEVICE)
    assert [key for key, _ in sent] == [b"hall-2/pump-7", b"hall-2/pump-7", b"hall-2/pump-8"]
    assert [document["record"] for _, document in sent] == ids
    by_separator = MessageForm(get_device=partial(extract_device, separator="/pump"))
    assert {key for key, _ in send(path, form=by_separator)} == {b"hall-2"}
    by_number = write_parquet(tmp_path / "n.parquet", a=[1.0, 2.0])
    assert [key for key, _ in send(by_number, prefix="press-1/", form=BY_DEVICE)] == [b"press-1", b"press-1"]


def test_a_record_without_a_device_has_no_key_and_is_reported(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", record=["p/1", "17"], a=[1.0, 2.0])
    with pytest.raises(InputError, match=r"--key device: the record id '17' contains no device, .*--record-prefix"):
        send(path, form=BY_DEVICE)


def test_readings_of_devices_are_keyed_by_the_device_in_any_form(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", device=["hall-2/p1", "p2"], time=[5.0, 6.0], a=[1.0, 2.0])
    for form in (MessageForm(), BY_DEVICE):
        assert [key for key, _ in send(path, has_windows=True, form=form)] == [b"hall-2/p1", b"p2"]


def test_json_lines_are_keyed_by_record_or_device(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [b'{"record":"p/1","device":"d"}', b'{"device":"hall/d"}', b"junk", b'{"record":true,"device":"d"}', b"[]"]
    path.write_bytes(b"\n".join([*lines, b""]))
    sent = list(iterate_events([path]))
    assert [value for _, value, _ in sent] == lines
    assert [key for key, _, _ in sent] == [b"p/1", b"hall/d", b"", b"", b""]
    assert [key for key, _, _ in iterate_events([path], SendOptions(form=BY_DEVICE))] == [
        b"p",
        b"hall/d",
        b"",
        b"",
        b"",
    ]


def test_each_message_of_a_wide_table_names_its_model(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", record=["x", "y"], type=["pump", "fan"], a=[1.0, 2.0], b=[3.0, None])
    expected = [
        (b"x", {"record": "x", "type": "pump", "feature": "a", "value": 1.0, "time": 0.0}),
        (b"x", {"record": "x", "type": "pump", "feature": "b", "value": 3.0, "time": 0.0}),
        (b"y", {"record": "y", "type": "fan", "feature": "a", "value": 2.0, "time": 1.0}),
    ]
    assert send(path, form=BY_TYPE) == send(path, form=OF_MODELS, features=("a", "b")) == expected


def test_each_message_of_a_long_table_and_of_windows_names_its_model(tmp_path: Path) -> None:
    log = write_parquet(
        tmp_path / "log.parquet", record=["x", "y"], feature=["a", "b"], value=[1.0, 2.0], type=[True, None]
    )
    assert [document for _, document in send(log, form=BY_TYPE)] == [
        {"record": "x", "type": True, "feature": "a", "value": 1.0, "time": 0.0},
        {"record": "y", "feature": "b", "value": 2.0, "time": 1.0},
    ]
    windowed = write_parquet(tmp_path / "w.parquet", device=["p1"], type=["pump"], time=[5.0], a=[1.0])
    assert send(windowed, form=BY_TYPE, has_windows=True) == [
        (b"p1", {"device": "p1", "type": "pump", "feature": "a", "value": 1.0, "time": 5.0})
    ]
    (tmp_path / "t.csv").write_text("record,type,a\n007,012,1\n")
    assert send(tmp_path / "t.csv", form=BY_TYPE)[0][1]["type"] == "012"


def test_only_the_features_of_the_model_of_a_row_are_sent(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "t.parquet",
        record=["w", "x", "y", "z"],
        type=["pump", "fan", "mill", None],
        a=[1.0] * 4,
        b=[2.0] * 4,
        c=[3.0] * 4,
    )
    sent = send(path, form=OF_MODELS, features=("a", "b"))
    assert [(document["record"], document["feature"]) for _, document in sent if document["record"] in "wx"] == [
        ("w", "a"),
        ("w", "b"),
        ("x", "a"),
    ]
    # Rows without a model become dead letters. They are complete, for a model that is trained later.
    others = [document for _, document in sent if document["record"] in "yz"]
    assert {"a", "b", "c"} <= {document["feature"] for document in others}
    assert {document["record"]: document.get("type") for document in others} == {"y": "mill", "z": None}
    numbers = write_parquet(tmp_path / "n.parquet", record=["x"], type=[2], a=[1.0], b=[2.0])
    assert [document["feature"] for _, document in send(numbers, form=OF_MODELS, features=("a", "b"))] == ["b"]


def test_the_record_or_the_device_can_determine_the_model(tmp_path: Path) -> None:
    form = MessageForm(model_field="device", features_by_model={"p1": frozenset("a"), "p2": frozenset("b")})
    path = write_parquet(tmp_path / "w.parquet", device=["p1", "p2"], time=[5.0, 6.0], a=[1.0, 2.0], b=[3.0, 4.0])
    sent = send(path, form=form, has_windows=True, features=("a", "b"))
    assert [(document["device"], document["feature"]) for _, document in sent] == [("p1", "a"), ("p2", "b")]
    ids = write_parquet(tmp_path / "i.parquet", id=["x"], a=[1.0])
    (message,) = send(ids, form=MessageForm(model_field="id"), record_column="id")
    assert message[1] == {"record": "x", "id": "x", "feature": "a", "value": 1.0, "time": 0.0}


def test_a_field_that_cannot_determine_the_model_is_reported(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", record=["x"], a=[1.0])
    with pytest.raises(InputError, match=r"there is no column 'type', which determines the model .*--model-by"):
        send(path, form=BY_TYPE)
    with pytest.raises(ConfigError, match="--model-by value: messages have a field of this name already"):
        MessageForm(model_field="value")
