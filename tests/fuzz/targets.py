"""Fuzz targets: each one makes an input of bytes and asserts the invariants of the code that reads it."""

from __future__ import annotations

import atexit
import gzip
import hashlib
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from connectors.files import StateFolder
from connectors.files.lines import read_lines
from deformer_stream import model_store
from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern, PatternAdjuster
from deformer_stream.calibration.incident_budget import parse_budget, plan_budget
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.codec import Codec, FieldNames, TimeFormat, state
from deformer_stream.codec.bridge_messages import (
    BridgeMessage,
    TopicPattern,
    Translation,
    Translator,
    ValueTranslator,
    translate_all,
)
from deformer_stream.codec.encode_evidence import decode_evidence, encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.incident_state import (
    FORMAT_VERSION,
    INCIDENT_STATE,
    SET_VERSION,
    decode_incident_state,
    encode_incident_state,
)
from deformer_stream.codec.model_choice import ModelChoice, ModelCodecs
from deformer_stream.codec.output_formats import AvroFormat, OutputReader, OutputSchema, load_schema
from deformer_stream.codec.payloads import LongRows, Messages, WideRows
from deformer_stream.codec.schema_formats import RegisteredSchema, SchemaFormat, SchemaTranslator, frame
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.codec.state_header import HEADER, MAGIC
from deformer_stream.engine.events import ONLY_MODEL, RejectionReason
from deformer_stream.errors import ArtifactError, ConfigError, InputError, StateError
from deformer_stream.incident_store import IncidentCalibration, LogEntry, Replaced, parse_incident_calibration
from deformer_stream.incidents.fleet import FleetRule
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions, TrackerState
from deformer_stream.model_set import MODELS_FILE, read_model_set
from deformer_stream.runtime.plant_source import SavedEvent
from deformer_stream.runtime.ports import PartitionState
from deformer_stream.tables.data_files import describe_unknown_scheme, parse_url
from deformer_stream.tables.filters import parse_where
from deformer_stream.tables.table import Table
from tests.codec.sparkplug_messages import SimulatedNode
from tests.codec.state_examples import DECIDED, EXAMPLE
from tests.fuzz import forgery, hostile, invariants
from tests.incidents.evidence_logs import SECOND, make_log
from tests.incidents.examples import make_incident
from tests.models import SCHEMA, write_model
from tests.schema_registry import fetch_from

Target = Callable[[bytes], None]


def one_message(data: bytes) -> None:
    """Use the bytes as a message; the first byte says whether it has a key and a broker timestamp."""
    first, payload = data[:1] or b"\0", data[1:]
    keyed, late = first[0] & 1, first[0] & 2
    poll = Messages(
        "fuzz",
        [payload[:8] if keyed else None],
        [payload],
        np.array([hostile.draw_broker_time(hostile.FedRandom(first)) if late else hostile.NOW]),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
    )
    for codec in invariants.CODECS:
        invariants.assert_messages_independent(codec, poll)


def messages(data: bytes) -> None:
    """Use the bytes as the random numbers that choose hostile messages."""
    r = hostile.FedRandom(data)
    poll = hostile.draw_messages(r, r.randrange(4))
    for codec in invariants.CODECS:
        invariants.assert_messages_independent(codec, poll)


@cache
def make_registry_codec(schema_format: SchemaFormat) -> Codec:
    """Return the codec of a topic whose messages have one of two schemas."""
    union = [
        "null",
        "double",
        "string",
        "long",
        "boolean",
        "bytes",
        {"type": "map", "values": ["null", "double", "string"]},
    ]
    names = ("record", "device", "feature", "value", "values", "time")
    fields = [{"name": name, "type": union} for name in names]
    avro = json.dumps({"type": "record", "name": "Event", "fields": fields})
    proto = """syntax = "proto3"; import "google/protobuf/struct.proto"; import "google/protobuf/timestamp.proto";
    message Event { string record = 1; string feature = 2; double value = 3; google.protobuf.Timestamp time = 4; }
    message Many { optional string device = 1; google.protobuf.Struct values = 2; google.protobuf.Value time = 3;
      repeated Many more = 4; map<string, bytes> content = 5; }"""
    schemas = {
        "avro": RegisteredSchema("AVRO", avro, {}),
        "protobuf": RegisteredSchema("PROTOBUF", proto, {}),
        "json-schema": RegisteredSchema("JSON", "{}", {}),
    }
    translator = SchemaTranslator(schema_format, fetch_from(schemas[schema_format]), 16_384)
    return Codec(SCHEMA, max_message_bytes=16_384, translator=translator)


def registry_messages(data: bytes) -> None:
    """Use the bytes as a message in a format of a schema registry; the first byte selects it, and a valid header."""
    first = data[0] if data else 0
    formats: tuple[SchemaFormat, ...] = ("avro", "protobuf", "json-schema")
    payload = data[1:] if first & 128 else frame(1, data[1:])
    numbers = np.zeros(1, np.int64)
    poll = Messages("fuzz", [None], [payload], numbers, numbers.astype(np.int32), numbers)
    invariants.assert_messages_independent(make_registry_codec(formats[first % 3]), poll)


def avro_schemas(data: bytes) -> None:
    """Use the bytes as random numbers that choose an Avro schema, whose types may contain themselves, and a message."""
    r = hostile.FedRandom(data)
    names: list[str] = []

    def draw_type(depth: int) -> object:
        """Return a type; below a few levels a basic type or the name of a record, which may be an enclosing one."""
        act = r.randrange(9) if depth < 4 else r.randrange(3)
        if act == 0 and names:
            return r.choice(names)
        if act < 3:
            return r.choice(["null", "double", "string", "bytes", "long", "boolean"])
        if act == 3:
            return {"type": "bytes", "logicalType": "decimal", "precision": 1 + r.randrange(40), "scale": 0}
        if act == 4:
            return {"type": "array", "items": draw_type(depth + 1)}
        if act == 5:
            return {"type": "map", "values": draw_type(depth + 1)}
        if act == 6:
            return ["null", draw_type(depth + 1)]
        return draw_record(depth + 1)

    def draw_record(depth: int) -> object:
        name = f"R{len(names)}"
        names.append(name)
        fields = [{"name": f"f{index}", "type": draw_type(depth)} for index in range(r.randrange(4))]
        return {"type": "record", "name": name, "fields": fields}

    schema = RegisteredSchema("AVRO", json.dumps(draw_record(0)), {})
    codec = Codec(SCHEMA, translator=SchemaTranslator("avro", fetch_from(schema), 65_536))
    content = r.choice([r.randbytes(r.randrange(64)), b"\x02" * 50_000, b"\xfe\xff\xff\xff\x0f" * 20])
    numbers = np.zeros(1, np.int64)
    poll = Messages("fuzz", [None], [frame(1, content)], numbers, numbers.astype(np.int32), numbers)
    invariants.assert_messages_independent(codec, poll)


def long_tables(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a table in long layout."""
    r = hostile.FedRandom(data)
    table = hostile.draw_table(r, r.randrange(5), ["record", "device", "feature", "value", "time", "label"])
    for codec in invariants.CODECS:
        invariants.assert_table_decodes(codec, LongRows("fuzz.parquet", table, 3))


def wide_tables(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a table in wide layout."""
    r = hostile.FedRandom(data)
    table = hostile.draw_table(r, r.randrange(5), [*SCHEMA.names, "time"])
    ids = [r.choice(["a", "b", "", "é", "x" * 1025, "\udcff"]) for _ in range(table.num_rows)]
    time = "time" if "time" in table.schema.names else None
    for codec in invariants.CODECS:
        invariants.assert_table_decodes(codec, WideRows("fuzz.parquet", table, ids, 3, time))


def arrow_messages(data: bytes) -> None:
    """Use the bytes as random numbers that choose an Arrow stream, long or wide, possibly damaged or compressed."""
    r = hostile.FedRandom(data)
    codec = r.choice(invariants.CODECS)
    invariants.decode_checked(codec, hostile.draw_messages(r, 1 + r.randrange(3), hostile.draw_arrow_stream))


@cache
def _list_model_codecs() -> list[ModelCodecs]:
    """Return decoders of several models, which is determined by a feature, by the device or by the record."""
    codecs = dict(zip(("a", "p", "v"), invariants.CODECS, strict=True))
    names = FieldNames()
    return [
        ModelCodecs(ModelChoice(names.feature, re.compile("^[apv]")), dict(codecs), names, 16_384),
        ModelCodecs(ModelChoice(names.device, re.compile(".")), dict(codecs), names, 16_384),
        ModelCodecs(ModelChoice(names.record, re.compile("^(.)")), dict(codecs), names, 16_384),
        ModelCodecs(ModelChoice("value"), {**codecs, "idle": invariants.PLAIN}, names, 16_384),
    ]


def model_choices(data: bytes) -> None:
    """Use the bytes as random numbers that choose messages, Arrow streams and tables of several models."""
    r = hostile.FedRandom(data)
    codecs = r.choice(_list_model_codecs())
    act = r.randrange(4)
    if act < 2:
        draw = hostile.draw_payload if act else hostile.draw_arrow_stream
        invariants.assert_models_decode(codecs, hostile.draw_messages(r, 1 + r.randrange(4), draw))
        return
    names = (
        ["record", "device", "feature", "value", "time", "label"] if act == 2 else [*SCHEMA.names, "device", "value"]
    )
    table = hostile.draw_table(r, r.randrange(5), names)
    if act == 2:
        invariants.assert_models_decode(codecs, LongRows("fuzz.parquet", table, 3))
        return
    ids = [r.choice(["a", "b", "", "é", "x" * 1025, "\udcff"]) for _ in range(table.num_rows)]
    invariants.assert_models_decode(codecs, WideRows("fuzz.parquet", table, ids, 3, None))


@cache
def _load_valid_model() -> tuple[Path, forgery.Manifest, bytes]:
    """Return a folder to work in, and the manifest and weights of a valid model."""
    folder = Path(tempfile.mkdtemp(prefix="deformer-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_model(folder / "good")
    manifest = json.loads((folder / "good" / model_store.MANIFEST).read_bytes())
    return folder, manifest, (folder / "good" / model_store.WEIGHTS).read_bytes()


def model_directories(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged model directory."""
    folder, manifest, weights = _load_valid_model()
    forgery.write_damaged_model(hostile.FedRandom(data), folder / "spoiled", manifest, weights)
    invariants.check_directory(folder / "spoiled")


def saved_states(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged saved state."""
    r = hostile.FedRandom(data)
    good = r.choice([state.encode_snapshot(EXAMPLE), state.encode_decisions(DECIDED)])
    damaged = forgery.damage_state(r, good)
    invariants.check_saved_state(damaged)
    # The state of several models: one of them is damaged, or the list of the models.
    kind = good[8:9]
    both = state._encode_set(kind, {"a": good, "b": damaged})
    body = both[HEADER.size :]
    if r.random() < 0.5:
        body = hostile.mutate(r, body[:80]) + body[80:]
    header = HEADER.pack(MAGIC, kind, state.SET_VERSION, hashlib.sha256(body).digest())
    invariants.check_saved_state(header + body)


@cache
def _make_evidence() -> tuple[list[bytes], bytes]:
    """Return messages of evidence, and the state of a tracker that has handled them."""
    batches = list(make_log("m", 3, 40, faults={0: [(8, 20)], 1: [(9, 20)], 2: [(10, 39)]}, records_per_batch=8))
    tracker = _make_tracker()
    for batch in batches:
        tracker.handle(batch)
    return [encode_evidence(batch) for batch in batches], encode_incident_state({ONLY_MODEL: tracker.export_state()})


def _make_tracker() -> IncidentTracker:
    """Return a tracker that opens incidents soon."""
    plan = plan_budget(parse_budget("1 per d"), records_per_day=100)
    adjuster = PatternAdjuster([FalseAlarmPattern({"flow": 1.0}, {"i": 9.0, "j": 12.0}, ("i",))], 60 * SECOND)
    return IncidentTracker(plan, TrackerOptions(reorder=5 * SECOND, fleet=FleetRule(2, 600 * SECOND)), adjuster)


def evidence(data: bytes) -> None:
    """Use the bytes as the random numbers that choose damaged evidence, which is refused or handled."""
    r = hostile.FedRandom(data)
    payloads, _ = _make_evidence()
    tracker, latest = _make_tracker(), list[bytes]()
    for payload in payloads:
        damaged = payload
        if r.random() < 0.5:
            changed = hostile.alter_document(r, json.loads(payload))
            damaged = hostile.mutate(r, payload) if r.random() < 0.3 else json.dumps(changed).encode()
        try:
            batch = decode_evidence(damaged)
        except InputError as error:
            _check_message(error)
            continue
        again = encode_evidence(batch)
        assert encode_evidence(decode_evidence(again)) == again
        latest += [encode_incident(message) for message in tracker.handle(batch)]
    latest += [encode_incident(message) for message in tracker.finish()]
    for encoded in latest:
        assert encode_incident(decode_incident(encoded)) == encoded
    state = tracker.export_state()
    for states in ({ONLY_MODEL: state}, {"a": state, "b": state}):
        assert decode_incident_state(encode_incident_state(states)) == states


def incident_states(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged state of trackers, with a checksum that fits.

    It is the state of one model or of several, and a few times it states the version of the other kind.
    """
    r = hostile.FedRandom(data)
    _, valid = _make_evidence()
    version = r.choice([FORMAT_VERSION, SET_VERSION])
    if (version == SET_VERSION) == (r.random() < 0.9):
        names = r.sample(["a", "fan/ä", "x" * 300, ONLY_MODEL], r.randrange(1, 4))
        states = [decode_incident_state(valid)[ONLY_MODEL], TrackerState()]
        valid = encode_incident_state({name: r.choice(states) for name in names})
    body = hostile.mutate(r, valid[HEADER.size :])
    header = HEADER.pack(MAGIC, INCIDENT_STATE, version, hashlib.sha256(body).digest())
    damaged = header + body if r.random() < 0.8 else hostile.mutate(r, valid)
    try:
        state_by_name = decode_incident_state(damaged)
    except StateError as error:
        _check_message(error)
        return
    encoded = encode_incident_state(state_by_name)
    assert encode_incident_state(decode_incident_state(encoded)) == encoded


@cache
def _save_state_folder() -> tuple[Path, bytes, bytes]:
    """Return a folder to work in, and a snapshot and a journal of `consume` without Kafka."""
    folder = Path(tempfile.mkdtemp(prefix="deformer-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = StateFolder(folder)
    store.load()
    events = [SavedEvent(i, 10**15 + i, b'{"device":"p","feature":"x","value":%d}' % i) for i in range(4)]
    store.save(0, [], PartitionState(snapshot=state.encode_snapshot(EXAMPLE)), {"g/n": b"birth"})
    store.save(2, events[:2], PartitionState(decisions=state.encode_decisions(DECIDED)), {"g/n#seq": b"1"})
    store.save(4, events[2:], PartitionState(), {})
    store.close()
    return folder, (folder / "snapshot").read_bytes(), (folder / "journal").read_bytes()


def state_folders(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged folder of saved state, mostly with checksums that fit.

    What can be loaded is the state of a process, whose next commit can be loaded again.
    """
    r = hostile.FedRandom(data)
    folder, snapshot, journal = _save_state_folder()
    first, _, body = snapshot.partition(b"\n")
    damaged = [_damage_line(r, line) if r.random() < 0.5 else line for line in (first, *journal.splitlines())]
    (folder / "snapshot").write_bytes(b"\n".join([damaged[0], body if r.random() < 0.9 else hostile.mutate(r, body)]))
    (folder / "journal").write_bytes(b"".join(line + b"\n" for line in damaged[1:]))
    store = StateFolder(folder)
    try:
        saved = store.load()
        assert all(isinstance(json.loads(event.value), object) for event in saved.events)
        store.save(saved.next_offset + 1, [SavedEvent(saved.next_offset, 0, b"{}")], PartitionState(), {"k": b"v"})
        store.close()
        store = StateFolder(folder)
        assert store.load().translator_states == saved.translator_states | {"k": b"v"}
    except StateError as error:
        _check_message(error)
    finally:
        store.close()


def _damage_line(r: hostile.Random, line: bytes) -> bytes:
    """Return a damaged line of a folder of saved state, in most cases with a checksum that fits."""
    text = line.partition(b" ")[2]
    document = hostile.alter_document(r, json.loads(text))
    text = json.dumps(document).encode() if r.random() < 0.7 else hostile.mutate(r, text).replace(b"\n", b"")
    return b"%08x %b" % (zlib.crc32(text), text) if r.random() < 0.9 else hostile.mutate(r, line).replace(b"\n", b"")


@cache
def _encode_outputs() -> tuple[OutputReader, list[bytes]]:
    """Return a reader of output topics as Avro, and a message of evidence and one of an incident."""
    names: tuple[OutputSchema, ...] = ("evidence", "incidents")
    texts = [load_schema(name) for name in names]
    reader = OutputReader(fetch_from(*(RegisteredSchema("AVRO", text, {}) for text in texts)))
    evidence_format, incident_format = (AvroFormat(text, schema_id + 1) for schema_id, text in enumerate(texts))
    payloads, _ = _make_evidence()
    messages = [evidence_format.convert("evidence", payload) for payload in payloads[:4]]
    incident = encode_incident(make_incident(7, state="updated"))
    return reader, [*messages, incident_format.convert("incident", incident)]


def avro_outputs(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged message of an output topic as Avro."""
    r = hostile.FedRandom(data)
    reader, valid = _encode_outputs()
    message = hostile.mutate(r, r.choice(valid))
    for decode in (decode_evidence, decode_incident):
        try:
            decode(reader(message))
        except (InputError, ConfigError) as error:
            _check_message(error)


def incident_calibrations(data: bytes) -> None:
    """Use the bytes as the random numbers that choose a damaged incidents.json, mostly with a checksum that fits."""
    r = hostile.FedRandom(data)
    pattern = FalseAlarmPattern({"flow": 0.8, "level": 0.6}, {"i": 9.0, "j": 12.0}, ("i",), ("pump",))
    segments = (SegmentCalibration(86_400_000_000, (0.5, 2.0), 100.0, 2),)
    entry = LogEntry(5, "Ada", "approve", "3 removed")
    replaced = Replaced("m", segments, (pattern,), None, "ab")
    document = hostile.alter_document(
        r, IncidentCalibration("m", segments, (pattern,), (replaced,), (entry,)).to_json()
    )
    raw = json.dumps(document).encode()
    if isinstance(document, dict) and r.random() < 0.9:
        digest = hashlib.sha256(json.dumps(document, indent=1).encode()).hexdigest()
        raw = json.dumps(document | {"sha256": digest}).encode()
    try:
        calibration = parse_incident_calibration(raw, Path("incidents.json"))
    except ArtifactError as error:
        _check_message(error)
        return
    adjuster = PatternAdjuster(calibration.patterns, SECOND)
    for score in (-1.0, 10.0, 1e300):
        assert 0.01 <= adjuster.adjust("pump", 0, 0.01, score, {"flow": 1.0}) <= 1.0


def input_urls(data: bytes) -> None:
    """Use the bytes as the end of an input's URL; no server is asked."""
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    for scheme in ("s3://", "S3A:/", "gs://", "ftp://u:secret@", ""):
        entry = scheme + text
        try:
            url = parse_url(entry)
        except ConfigError as error:
            _check_message(error)
            continue
        assert url is None or (url.startswith(("s3://", "gs://")) and parse_url(url) == url)
        reason = describe_unknown_scheme(entry)
        assert reason is None or (url is None and "secret" not in reason)


def conditions(data: bytes) -> None:
    """Use the bytes as the condition of --where."""
    try:
        condition = parse_where(data.decode("utf-8", "replace"))
    except ConfigError as error:
        _check_message(error)
        return
    columns = {name: pa.array([1.5, None]) for name in condition.columns}
    try:
        bound = condition.bind({name: column.type for name, column in columns.items()})
    except ConfigError as error:
        _check_message(error)
        return
    assert bound.mask(columns).shape == (2,)
    assert bound.may_match({}) or not bound.mask(columns).any()


def condition_grammar(data: bytes) -> None:
    """Use the bytes as the random numbers that choose the words of a condition."""
    r = hostile.FedRandom(data)
    words = ["a", "b", '"x y"', "1", "-2.5", "'t'", "=", "<>", "<", ">=", "AND", "OR", "NOT", "(", ")", "IN", ","]
    words += ["BETWEEN", "IS", "NULL", "TRUE", "LIKE", "SELECT", ";", "'", "--", "a.b", "+"]
    conditions(" ".join(r.choice(words) for _ in range(r.randrange(16))).encode())


def model_sets(data: bytes) -> None:
    """Use the bytes as the file models.json, and as changes of a valid one."""
    valid = b'{"format": 1, "field": "type", "models": {"pump": {"folder": "pump", "fingerprint": "f", "records": 20, '
    valid += b'"adapted": false, "input": "00"}}, "fleets": {"_fleet-1": "00"}}'
    position = data[0] % len(valid) if data else 0
    with tempfile.TemporaryDirectory() as name:
        for content in (data, valid[:position] + data[1:] + valid[position + len(data) :]):
            (Path(name) / MODELS_FILE).write_bytes(content)
            try:
                models = read_model_set(Path(name))
            except ArtifactError as error:
                _check_message(error)
                continue
            assert models is not None
            for entry in models.entry_by_value.values():
                assert (Path(name) / entry.folder).resolve().parent == Path(name).resolve()


def compressed_files(data: bytes) -> None:
    """Use the bytes as compressed files, and as changes of a valid one."""
    valid = gzip.compress(b"flow,power\n" + b"1.5,2\n" * 50, mtime=0)
    position = data[0] % len(valid) if data else 0
    with tempfile.TemporaryDirectory() as name:
        for content in (data, valid[:position] + data[1:] + valid[position + len(data) :]):
            for path in (Path(name) / "t.csv.gz", Path(name) / "t.jsonl.gz"):
                path.write_bytes(content)
                try:
                    if path.name.startswith("t.csv"):
                        for batch in Table.open(path).iterate_batches([], 100):
                            assert batch.num_rows >= 0
                    else:
                        assert all(isinstance(line, bytes) for block in read_lines(path, 1000) for line in block)
                except InputError as error:
                    _check_message(error)


def bridge_payloads(data: bytes) -> None:
    """Use the bytes as a topic and a payload of MQTT, and as the random numbers that choose a JSON payload."""
    r = hostile.FedRandom(data)
    size = data[0] % 16 if data else 0
    topics = ["plant/pump/flow", data[1 : 1 + size].decode("utf-8", "replace")]
    document = hostile.alter_document(r, {"values": {"a": 1.5, "b": None}, "value": 2, "time": 5.25, "device": "d"})
    payloads = [data[1 + size :], hostile.draw_valid_message(r), json.dumps(document).encode()]
    for pattern in (None, "plant/{device}/{feature}", "{device}/#", "{feature}"):
        translator = ValueTranslator(TopicPattern(pattern), FieldNames(), TimeFormat(r.choice(["s", "ms", "ns"])), 4096)
        for topic in topics:
            for payload in payloads:
                _check_translation(translator, [BridgeMessage(topic, payload, hostile.NOW)], can_be_empty=False)


def sparkplug_payloads(data: bytes) -> None:
    """Use the bytes as random numbers that choose the messages of an edge node, some of them altered."""
    r = hostile.FedRandom(data)
    node, translator = SimulatedNode(), SparkplugTranslator(max_bytes=4096)
    messages = [node.birth({"x": 1.5, "n": -2, "s": "on"}), ("spBv1.0/plant/NBIRTH/line-1", data)]
    for _ in range(r.randrange(8)):
        node.alias_by_name.setdefault(r.choice(["x", "n", "s"]), 1)
        device, values = (
            r.choice(["", "d"]),
            {r.choice(sorted(node.alias_by_name)): r.choice([1.5, -3, True, "a", None])},
        )
        make = r.choice([node.birth, node.data, lambda _values, device: node.death(device)])
        topic, payload = make(values, device=device)
        if r.random() < 0.3:
            payload = hostile.mutate(r, payload)
        messages += [(topic, payload)] * r.randrange(3)
    received = [BridgeMessage(*message, hostile.NOW, r.random() < 0.2) for message in messages]
    translation = _check_translation(translator, received, can_be_empty=True)
    later = SparkplugTranslator(max_bytes=4096)
    for key, value in translation.states.items():
        later.restore(key, hostile.mutate(r, value) if r.random() < 0.3 else value)
    _check_translation(later, received, can_be_empty=True)


def _check_translation(translator: Translator, messages: list[BridgeMessage], can_be_empty: bool) -> Translation:
    """Translate messages; check that the events can be read and that rejections name a reason."""
    translation = translate_all(translator, messages)
    for event in translation.events:
        document = json.loads(event.value)
        values = document["values"] if "values" in document else {document["feature"]: document["value"]}
        assert len(values) == event.num_readings > 0
        assert event.key.decode() == document["device"] != ""
        assert all(isinstance(value, str | bool | int | float | None) for value in values.values())
        assert isinstance(document["time"], float)
    for rejection in translation.rejections:
        assert isinstance(rejection.reason, RejectionReason)
        assert "\n" not in rejection.detail
    assert can_be_empty or translation.events or translation.rejections
    return translation


def _check_message(error: Exception) -> None:
    """Check that an error has one line."""
    assert "\n" not in str(error)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(
            one_message,
            messages,
            arrow_messages,
            registry_messages,
            avro_schemas,
            long_tables,
            wide_tables,
            model_directories,
            saved_states,
            model_choices,
        ),
        *(evidence, incident_states, incident_calibrations, state_folders, avro_outputs),
        *(input_urls, conditions, condition_grammar, model_sets, compressed_files),
        *(bridge_payloads, sparkplug_payloads),
    )
}
