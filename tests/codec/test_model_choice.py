"""Tests of the choice of a model by a field of each message or row."""

from __future__ import annotations

import json
import re
from io import BytesIO
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from deformer_stream.codec import Codec, FieldNames, arrow_messages
from deformer_stream.codec.model_choice import ModelChoice, ModelCodecs, compute_set_fingerprint
from deformer_stream.codec.payloads import LongRows, Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.codec.schema_formats import RegisteredSchema, SchemaTranslator, frame
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.tables.parts import encode_values
from tests.codec.arrow_examples import make_stream, make_views
from tests.schema_registry import fetch_from

PUMP = Schema((Feature("flow", "continuous"), Feature("power", "continuous")))
FAN = Schema((Feature("power", "continuous"), Feature("speed", "continuous")))


def make_codecs(field: str = "type", pattern: str | None = None, **options: Any) -> ModelCodecs:
    codec_by_model = {name: Codec(schema, model_field=field) for name, schema in (("fan", FAN), ("pump", PUMP))}
    choice = ModelChoice(field, None if pattern is None else re.compile(pattern))
    return ModelCodecs(choice, codec_by_model, FieldNames(), **options)


def make_messages(*payloads: bytes | None, keys: list[bytes | None] | None = None) -> Messages:
    n = len(payloads)
    numbers = np.arange(n)
    keys = [None] * n if keys is None else keys
    return Messages("t", keys, list(payloads), np.full(n, NO_TIME), np.zeros(n, np.int32), numbers)


def list_events(batches: dict[str, EventBatch]) -> list[tuple[int, str, str, int, float]]:
    """Return message index, model, record, feature code and value of each event, by message."""
    return sorted(
        (int(index), name, record, int(code), float(value))
        for name, batch in batches.items()
        for index, record, code, value in zip(
            batch.message_indices, batch.record_ids, batch.features, batch.values, strict=True
        )
    )


def decode(codecs: ModelCodecs, data: Payload) -> tuple[list[tuple[int, str, str, int, float]], list[Rejection]]:
    batches, rejections = codecs.decode_by_model(data)
    assert list(batches) == sorted(batches)
    assert all(batches.values())
    return list_events(batches), rejections


def test_each_message_is_decoded_with_the_schema_of_its_model() -> None:
    data = make_messages(
        b'{"type": "pump", "record": "a", "feature": "power", "value": 1}',
        b'{"type": "fan", "record": "a", "feature": "power", "value": 2}',
        b'{"record": "b", "values": {"power": 3, "speed": 4}, "type": "fan"}',
        b'{"type": "fan", "record": "c", "feature": "flow", "value": 5}',
        b'{"type": "pump", "record": "c", "feature": "flow", "value": null}',
    )
    events, rejections = decode(make_codecs(), data)
    assert events[:4] == [
        (0, "pump", "a", 1, 1.0),
        (1, "fan", "a", 0, 2.0),
        (2, "fan", "b", 0, 3.0),
        (2, "fan", "b", 1, 4.0),
    ]
    assert events[4][:4] == (4, "pump", "c", 0)
    assert [(r.message_index, r.reason) for r in rejections] == [(3, RejectionReason.UNKNOWN_FEATURE)]


@pytest.mark.parametrize(
    ("payload", "reason", "said"),
    [
        (b'{"type": "valve", "record": "a", "feature": "power", "value": 1}', "unknown_model", "no model 'valve'"),
        (b'{"record": "a", "feature": "power", "value": 1}', "missing_field", "'type'"),
        (b'{"type": null, "record": "a"}', "missing_field", "'type'"),
        (b'{"type": "", "record": "a"}', "missing_field", "empty"),
        (b'{"type": ["pump"], "record": "a"}', "wrong_type", "'type'"),
        (b'{"type": 1.5, "record": "a"}', "wrong_type", "'type'"),
        (b'{"type": 7, "record": "a"}', "unknown_model", "no model '7'"),
        (b'{"type": "' + b"x" * 2000 + b'"}', "too_large", "2000 characters"),
        (b'{"type": "pump"', "not_json", ""),
        (b"[1]", "not_json", "a list"),
        (b"\xff\xfe", "not_json", ""),
        (None, "not_json", "tombstone"),
        (b'{"type": "pump", "x": "' + b"x" * 5000 + b'"}', "too_large", "bytes"),
        (UnreadablePayload(RejectionReason.MALFORMED_ROW, "line 3", 2), "malformed_row", "line 3"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "not_json", "Arrow"),
    ],
)
def test_messages_without_a_model_are_rejected_alone(payload: bytes | None, reason: str, said: str) -> None:
    good = b'{"type": "pump", "record": "a", "feature": "power", "value": 1}'
    events, (rejection,) = decode(make_codecs(max_message_bytes=4096), make_messages(payload, good))
    assert [index for index, *_ in events] == [1]
    assert (rejection.message_index, str(rejection.reason)) == (0, reason)
    assert said in rejection.detail
    assert rejection.num_readings == (2 if reason == "malformed_row" else 1)


def test_pattern_finds_the_model_and_the_key_replaces_the_device() -> None:
    codecs = make_codecs("device", "^(pump|fan|valve)-")
    event = b'"record": "a", "feature": "power", "value": 1}'
    data = make_messages(
        *(b'{"device": "pump-7", ' + event, b"{" + event, b"{" + event, b'{"device": "x", ' + event),
        *(b'{"device": "valve-1", ' + event, b'{"device": "fan-1", ' + event),
        keys=[None, b"fan-3", b"\xff", b"fan-3", None, None],
    )
    events, rejections = decode(codecs, data)
    assert [event[:2] for event in events] == [(0, "pump"), (1, "fan"), (5, "fan")]
    reasons = [(r.message_index, str(r.reason)) for r in rejections]
    assert reasons == [(2, "missing_field"), (3, "unknown_model"), (4, "unknown_model")]
    assert "--model-pattern" in rejections[1].detail


def test_whole_match_is_the_name_of_a_pattern_without_groups() -> None:
    assert ModelChoice("device", re.compile("[a-z]+")).choose("7 pump 8 fan") == "pump"


def test_arrow_stream_is_divided_by_rows() -> None:
    columns: dict[str, Any] = {
        "type": ["pump", "fan", "pump"],
        "record": ["a", "b", "c"],
        "feature": ["power", "power", "flow"],
        "value": [1.0, 2.0, 3.0],
    }
    wide = {"type": pa.array(["fan", "fan"]).dictionary_encode(), "record": ["a", "b"], "power": [1.0, 2.0]}
    data = make_messages(
        make_stream(columns), make_stream(wide), make_stream({**columns, "type": ["pump", None, "fan"]})
    )
    events, rejections = decode(make_codecs(), data)
    assert [(index, name, record) for index, name, record, *_ in events] == [
        *((0, "fan", "b"), (0, "pump", "a"), (0, "pump", "c")),
        *((1, "fan", "a"), (1, "fan", "b")),
    ]
    assert [(r.message_index, str(r.reason)) for r in rejections] == [(2, "missing_field")]


def test_arrow_columns_that_cannot_be_filtered_are_divided() -> None:
    """Views of texts, as some data frames write them, and a run-end encoded column that is not read."""
    names = {
        "type": ["pump", "pump", "fan", "fan"],
        "record": list("aabb"),
        "feature": ["power", "flow", "power", "speed"],
    }
    plain = {**names, "value": [1.0, 2.0, 3.0, None]}
    special = {name: pa.array(cells, pa.string_view()) for name, cells in names.items()} | {
        "value": pa.array(plain["value"]),
        "site": pc.run_end_encode(pa.array(["x", "x", None, "y"])),
    }
    found, expected = (decode(make_codecs(), make_messages(make_stream(columns))) for columns in (special, plain))
    np.testing.assert_equal(found[0], expected[0])
    assert len(found[0]) == 4
    assert not found[1]


def test_dictionaries_that_make_a_small_arrow_stream_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model would get the whole dictionary with each batch."""
    monkeypatch.setattr(arrow_messages, "MAX_SPLIT_BYTES", 2**20)
    features = pa.array(["power", "x" * 100_000])

    def make_batch() -> dict[str, Any]:
        return {
            "type": ["pump", "fan"],
            "record": ["a", "b"],
            "feature": pa.DictionaryArray.from_arrays(pa.array([0, 0]), features),
            "value": [1.0, 2.0],
        }

    few, many = (make_stream(*(make_batch() for _ in range(n))) for n in (2, 20))
    assert len(many) < 2**18
    events, rejections = decode(make_codecs(), make_messages(few, many))
    assert {index for index, *_ in events} == {0}
    assert [(r.message_index, str(r.reason)) for r in rejections if "divided" in r.detail] == [(1, "too_large")]


@pytest.mark.parametrize("name", ["type", "site"])
def test_long_text_that_many_views_share_is_not_copied_when_rows_are_divided(name: str) -> None:
    """A message of a megabyte would take two gigabytes, also by a column that no model reads."""
    num_rows = 2_000
    columns = {
        "type": pa.array(["pump", "fan"] * (num_rows // 2)),
        "record": ["a"] * num_rows,
        "power": [1.0] * num_rows,
    }
    stream = make_stream({**columns, name: make_views(num_rows, "x" * 900_000)})
    events, (rejection,) = decode(make_codecs(), make_messages(stream))
    assert (events, str(rejection.reason)) == ([], "too_large")
    assert "texts of more than" in rejection.detail


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"record": ["a"], "feature": ["power"], "value": [1.0]}, "missing_field"),
        ({"type": ["valve"], "record": ["a"], "feature": ["power"], "value": [1.0]}, "unknown_model"),
        ({"type": [[1]], "record": ["a"], "feature": ["power"], "value": [1.0]}, "wrong_type"),
        ({"type": [1.5], "record": ["a"], "feature": ["power"], "value": [1.0]}, "wrong_type"),
        ({"type": pa.array([], pa.string()), "record": pa.array([], pa.string())}, "missing_field"),
        ({"type": ["pump"] * 70_000, "record": ["a"] * 70_000, "power": [1.0] * 70_000}, "too_large"),
    ],
)
def test_arrow_streams_without_a_model_are_rejected(columns: dict[str, Any], reason: str) -> None:
    events, (rejection,) = decode(make_codecs(max_message_bytes=2**24), make_messages(make_stream(columns)))
    assert (events, str(rejection.reason)) == ([], reason)


def test_message_with_bad_readings_of_two_models_has_one_rejection() -> None:
    columns = {"type": ["pump", "fan"], "record": ["a", "b"], "feature": ["x", "y"], "value": [1.0, 2.0]}
    events, (rejection,) = decode(make_codecs(), make_messages(make_stream(columns)))
    assert (events, rejection.reason, rejection.num_readings) == ([], RejectionReason.UNKNOWN_FEATURE, 2)


def test_rows_of_tables_are_divided() -> None:
    long = pa.RecordBatch.from_pydict(
        {
            "type": ["pump", "fan", None, "valve"],
            "record": ["a", "b", "c", "d"],
            "feature": ["power"] * 4,
            "value": ["1", "2", "3", "4"],
        }
    )
    events, rejections = decode(make_codecs(), LongRows("t.csv", long, 10))
    assert [event[:4] for event in events] == [(0, "pump", "a", 1), (1, "fan", "b", 0)]
    assert [(r.message_index, str(r.reason)) for r in rejections] == [(2, "missing_field"), (3, "unknown_model")]
    wide = pa.RecordBatch.from_pydict({"type": ["fan", "pump"], "power": [1.0, 2.0], "flow": [None, 3.0]})
    events, rejections = decode(make_codecs(), WideRows("t.csv", wide, ["a", "b"], 0))
    values = [(index, name, record, code) for index, name, record, code, value in events if not np.isnan(value)]
    assert (values, rejections) == ([(0, "fan", "a", 0), (1, "pump", "b", 0), (1, "pump", "b", 1)], [])


def test_record_id_of_a_wide_table_can_determine_the_model() -> None:
    wide = pa.RecordBatch.from_pydict({"power": [1.0, 2.0]})
    batches, rejections = make_codecs("record", "^[a-z]+").decode_by_model(
        WideRows("t.csv", wide, ["pump1", "fan1"], 0)
    )
    assert ({name: set(batch.record_ids) for name, batch in batches.items()}, rejections) == (
        {"fan": {"fan1"}, "pump": {"pump1"}},
        [],
    )


def test_models_of_numbers_and_booleans_have_the_names_of_training() -> None:
    """A column of whole numbers with a missing cell is stored as floats. `--per` names its models 1 and 2."""
    codec = next(iter(make_codecs().codec_by_model.values()))
    codecs = ModelCodecs(ModelChoice("type"), dict.fromkeys(("1", "2", "true"), codec), FieldNames())
    for types, names in (([1.0, None, 2.0], ["1", "2"]), ([True, None, True], ["true", "true"])):
        columns = {"type": types, "record": ["a", "b", "c"], "feature": ["power"] * 3, "value": ["1", "2", "3"]}
        events, (rejection,) = decode(codecs, LongRows("t.parquet", pa.RecordBatch.from_pydict(columns), 0))
        assert [event[:3] for event in events] == [(0, names[0], "a"), (2, names[1], "c")]
        assert (rejection.message_index, str(rejection.reason)) == (1, "missing_field")
        documents = [{"type": kind, "record": "a", "feature": "power", "value": 1} for kind in types]
        events, _ = decode(codecs, make_messages(*(json.dumps(document).encode() for document in documents)))
        assert [event[:2] for event in events] == [(0, names[0]), (2, names[1])]


NUMBERS = [1.0, 2.0, 2.5, -0.0, None, float("nan"), float("inf"), 1e20]
"""Values of a field of floats. A whole number names a model, and the others are rejected."""

NUMBER_NAMES = ["1", "2", "wrong_type", "0", "missing_field", "missing_field", "wrong_type", "100000000000000000000"]
"""The name of the model of each number, or the reason of its rejection."""


def make_number_codecs() -> ModelCodecs:
    codec = Codec(PUMP, model_field="type")
    return ModelCodecs(ModelChoice("type"), {name: codec for name in NUMBER_NAMES if name.isdigit()}, FieldNames())


def name_numbers(columns: dict[str, Any], batch_rows: int) -> list[str]:
    """Return the model of each row of a long table, or the reason of its rejection, if it is read in batches."""
    codecs, names = make_number_codecs(), {}
    table = pa.RecordBatch.from_pydict(columns)
    for start in range(0, len(table), batch_rows):
        events, rejections = decode(codecs, LongRows("t.parquet", table.slice(start, batch_rows), start))
        names |= {start + event[0]: event[1] for event in events}
        names |= {start + r.message_index: str(r.reason) for r in rejections}
    return [names[row] for row in range(len(table))]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("storage", ["double", "dictionary"])
def test_name_of_a_number_in_a_table_does_not_depend_on_the_other_rows_of_its_batch(
    storage: str, batch_rows: int
) -> None:
    """A batch of whole numbers was accepted, and one with another number ended the run."""
    column = pa.array(NUMBERS, pa.float64())
    n = len(NUMBERS)
    columns: dict[str, Any] = {
        "type": column if storage == "double" else column.dictionary_encode(),
        "record": [str(i) for i in range(n)],
        "feature": ["power"] * n,
        "value": ["1"] * n,
    }
    assert name_numbers(columns, batch_rows) == NUMBER_NAMES


@pytest.mark.parametrize("column_type", [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2)])
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_numbers_of_all_types_name_the_same_models(column_type: pa.DataType, is_dictionary: bool) -> None:
    types = pa.array([1.0, 2.0, 2.5, None]).cast(column_type)
    if is_dictionary:
        types = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None]), types)
    columns = {"type": types, "record": list("abcd"), "feature": ["power"] * 4, "value": ["1"] * 4}
    expected = ["1", "2", "wrong_type", "missing_field"]
    assert name_numbers(columns, 4) == expected
    batch = pa.RecordBatch.from_pydict(columns)
    rows = [dict(zip(batch.schema.names, batch.slice(i, 1).columns, strict=True)) for i in range(4)]
    events, rejections = decode(make_number_codecs(), make_messages(*(make_stream(row) for row in rows)))
    assert [name for _, name, *_ in events] + [str(r.reason) for r in rejections] == expected


def test_numbers_name_the_same_models_in_messages_of_all_formats() -> None:
    def make_columns(number: float | None) -> dict[str, Any]:
        return {"type": pa.array([number], pa.float64()), "record": ["a"], "feature": ["power"], "value": [1.0]}

    schema = fastavro.parse_schema(
        {
            "type": "record",
            "name": "Reading",
            "fields": [
                *({"name": name, "type": "string"} for name in ("record", "feature")),
                {"name": "type", "type": ["null", "double"]},
                {"name": "value", "type": "double"},
            ],
        }
    )

    def write_avro(number: float | None) -> bytes:
        content = BytesIO()
        fastavro.schemaless_writer(content, schema, {"record": "a", "feature": "power", "type": number, "value": 1.0})
        return frame(1, content.getvalue())

    documents = [{"type": number, "record": "a", "feature": "power", "value": 1} for number in NUMBERS]
    payloads: dict[str, list[bytes]] = {
        "json": [json.dumps(document).encode() for document in documents],
        "arrow": [make_stream(make_columns(number)) for number in NUMBERS],
        "avro": [write_avro(number) for number in NUMBERS],
    }
    registered = RegisteredSchema("AVRO", json.dumps(schema), {})
    for name, messages in payloads.items():
        codecs = make_number_codecs()
        if name == "avro":
            translator = SchemaTranslator("avro", fetch_from(registered), 2**20)
            codecs = ModelCodecs(codecs.choice, codecs.codec_by_model, FieldNames(), translator=translator)
        events, rejections = decode(codecs, make_messages(*messages))
        found = {event[0]: event[1] for event in events} | {r.message_index: str(r.reason) for r in rejections}
        assert [found[i] for i in range(len(NUMBERS))] == NUMBER_NAMES, name


def test_names_of_whole_numbers_are_those_of_training() -> None:
    indexes, texts = encode_values(pa.array(NUMBERS, pa.float64()))
    of_training = [texts[i] if i >= 0 else "missing_field" for i in indexes]
    whole = [i for i, name in enumerate(NUMBER_NAMES) if name != "wrong_type"]
    assert [of_training[i] for i in whole] == [NUMBER_NAMES[i] for i in whole]


@pytest.mark.parametrize("column", [pa.array([b"pump"]), pa.array([["pump"]]), pa.array([0], pa.timestamp("us"))])
def test_column_of_a_type_that_names_no_model_is_refused(column: pa.Array) -> None:
    table = pa.RecordBatch.from_pydict({"type": column, "record": ["a"], "feature": ["power"], "value": ["1"]})
    with pytest.raises(InputError, match=r"column 'type' has the type .*, which names no model"):
        make_codecs().decode_by_model(LongRows("t.csv", table, 0))


def test_fingerprint_of_a_set_depends_on_the_choice_and_on_all_models() -> None:
    models = {"pump": "1", "fan": "2"}
    fingerprint = compute_set_fingerprint(ModelChoice("type"), models)
    assert compute_set_fingerprint(ModelChoice("type"), dict(reversed(models.items()))) == fingerprint
    others = [
        compute_set_fingerprint(ModelChoice("kind"), models),
        compute_set_fingerprint(ModelChoice("type", re.compile("a")), models),
        compute_set_fingerprint(ModelChoice("type"), {**models, "fan": "3"}),
        compute_set_fingerprint(ModelChoice("type"), {"pump": "1"}),
    ]
    assert len({fingerprint, *others}) == 5
