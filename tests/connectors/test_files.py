"""Tests of files as sources: layouts, record ids, orders, errors, and bounded memory."""

from __future__ import annotations

import codecs
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from connectors.files import FileSource, ReadOptions, StandardInput, open_source, sources
from connectors.files.lines import LineSplitter
from deformer_stream.codec import Codec, Order, WindowAssigner, encode_rejected
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from tests.connectors.data_files import SCHEMA, read_events, write_parquet


def write_lines(path: Path, *documents: Any) -> Path:
    """Write documents as JSON lines; bytes are written as they are."""
    path.write_bytes(b"".join((d if isinstance(d, bytes) else orjson.dumps(d)) + b"\n" for d in documents))
    return path


# --- what is read


def test_wide_parquet_has_record_ids_times_and_ignored_columns(tmp_path: Path) -> None:
    stamps = pa.array([1, 2], pa.timestamp("s"))
    path = write_parquet(
        tmp_path / "w.parquet",
        b=[1.0, 2.0],
        anomaly=[0, 1],
        record=["x", None],
        when=stamps,
        later=stamps,
        state=["on", "off"],
    )
    source = open_source([path], [SCHEMA])
    assert isinstance(source, FileSource)
    assert (source.num_rows, source.ignored_columns) == (2, ("anomaly", "later"))
    data = source.poll(0).data
    assert data is not None
    batch, rejected = Codec(SCHEMA).decode(data)
    assert batch.record_ids == ["x"] * 3
    assert batch.times.tolist() == [1_000_000] * 3
    assert [(r.message_index, r.reason.value) for r in rejected] == [(1, "missing_field")]


def test_rows_without_record_id_are_named_by_file_and_number(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "v1" / "0.parquet", a=[1.0, 2.0])
    two = write_parquet(tmp_path / "v2" / "1.parquet", a=[3.0])
    same = write_parquet(tmp_path / "v2" / "0.parquet", a=[4.0])
    write_parquet(tmp_path / "v2" / "sub" / "1.pq", a=[5.0])
    (tmp_path / "v2" / "notes.txt").write_text("no table")

    def ids(*inputs: Path) -> list[str]:
        return list(dict.fromkeys(record for record, _, _ in read_events(inputs)[0]))

    assert ids(one) == ["0", "1"]
    assert ids(one, two) == ["0:0", "0:1", "1:0"]
    assert ids(one, same) == ["v1/0:0", "v1/0:1", "v2/0:0"]
    assert ids(tmp_path) == ["v1/0:0", "v1/0:1", "v2/0:0", "v2/1:0", "v2/sub/1:0"]
    with pytest.raises(InputError, match="names this file twice"):
        ids(one, one)


def test_wide_csv_is_read_with_its_own_delimiter_and_types(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(
        "datetime;a;state;changepoint;record\n2020-03-09 10:34:33;1.5;3.0;0;007\n2020-03-09 10:34:33.25;;on;0.5;008\n"
    )
    source = open_source([path], [SCHEMA])
    data = source.poll(0).data
    assert data is not None
    batch, rejected = Codec(SCHEMA).decode(data)
    assert batch.record_ids == ["007"] * 3 + ["008"] * 3
    assert batch.times.tolist() == [1583750073000000] * 3 + [1583750073250000] * 3
    assert source.ignored_columns == ("changepoint",)
    assert [e for e in read_events([path])[0] if e[2] is not None] == [
        ("007", "a", 1.5),
        ("007", "state", "3"),
        ("008", "state", "on"),
    ]
    assert rejected == []


def test_long_csv_rejects_only_the_row_with_a_bad_value(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text(
        "record,feature,value,time\n01,a,1.5,2020-03-09T10:34:33Z\n01,b,high,\n01,state,on,2020-03-09T10:34:34.5Z\n01,b,,\n"
    )
    events, rejected, places = read_events([path])
    assert events == [("01", "a", 1.5), ("01", "state", "on"), ("01", "b", None)]
    assert [(r.message_index, r.reason.value) for r in rejected] == [(1, "wrong_type")]
    assert places == [("l.csv", 0, 0), ("l.csv", 0, 2), ("l.csv", 0, 3)]


def test_json_lines_of_every_form_are_read(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "e.jsonl",
        {"record": "r", "feature": "a", "value": 1},
        b"",
        b"  \r",
        b"nonsense",
        {"record": "r", "values": {"b": 2, "state": "new"}},
    )
    with path.open("ab") as file:
        file.write(b'{"record":"s","feature":"a","value":3}\r')  # no line end
    events, rejected, places = read_events([path])
    assert events == [("r", "a", 1), ("r", "b", 2), ("r", "state", "new"), ("s", "a", 3)]
    assert [r.reason.value for r in rejected] == ["not_json"]
    assert places == [("e.jsonl", 0, 0), ("e.jsonl", 0, 4), ("e.jsonl", 0, 4), ("e.jsonl", 0, 5)]


def test_line_that_is_too_long_is_rejected_in_bounded_memory(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "e.jsonl",
        {"record": "r", "feature": "a", "value": 1},
        b"x" * 5_000_000,
        {"record": "q", "feature": "a", "value": 1},
    )
    events, rejected, _ = read_events([path], max_message_bytes=1000)
    assert [e[0] for e in events] == ["r", "q"]
    splitter = LineSplitter(10)
    assert [len(line) for block in (b"y" * 999, b"y" * 999, b"y\nz") for line in splitter.feed(block)] == [11]
    assert splitter.finish() == [b"z"]
    assert len(rejected) == 1


def test_a_byte_order_mark_before_the_first_line_is_left_out(tmp_path: Path) -> None:
    """Programs of Windows write it, and the first reading was refused."""
    lines = [{"record": name, "feature": "a", "value": 1} for name in "rq"]
    path = write_lines(tmp_path / "e.jsonl", *lines)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    events, rejected, _ = read_events([path])
    assert ([event[0] for event in events], rejected) == (["r", "q"], [])
    splitter = LineSplitter(10)
    found = [line for byte in codecs.BOM_UTF8 + b"a\n" + codecs.BOM_UTF8 for line in splitter.feed(bytes([byte]))]
    assert (found, splitter.finish()) == ([b"a"], [codecs.BOM_UTF8])
    for end in (b"", b"\n"):
        splitter = LineSplitter(5)
        assert splitter.feed(codecs.BOM_UTF8 + b"abcdefgh" + end) + splitter.finish() == [b"abcdef"], (
            "one byte too many"
        )


def test_polls_are_bounded_and_the_source_ends(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "w.parquet", a=np.arange(1000.0), b=np.arange(1000.0))
    source = open_source(
        [path, write_lines(tmp_path / "e.jsonl", *[{"record": "r", "feature": "a", "value": 1}] * 50)],
        [SCHEMA],
        ReadOptions(batch_events=30),
    )
    sizes = []
    while (data := source.poll(0).data) is not None:
        sizes.append(len(data))
    assert sizes == [10] * 100 + [30, 20]
    assert source.is_exhausted
    assert source.poll(0).data is None
    assert source.num_rows is None  # lines are not counted before they are read


def test_layout_and_column_names_can_be_chosen(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "odd.parquet", record=["x"], feature=["f"], value=[1.0], a=[2.0], unit=["u"], at=[5]
    )
    events, _, _ = read_events([path], layout="wide", record_column="unit", time_column="at")
    assert [e for e in events if e[2] is not None] == [("u", "a", 2.0)]
    assert len(read_events([path])[1]) == 1  # read as a long table, feature "f" is unknown


# --- orders


def test_a_chosen_record_column_is_no_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of the default name is one, if the model has it, because nobody has chosen it."""
    entries: list[tuple[str, dict[str, Any]]] = []
    logger = SimpleNamespace(info=lambda event, **data: entries.append((event, data)))
    monkeypatch.setattr(sources.log, "get_logger", lambda name: logger)
    for name in ("t.parquet", "t.csv"):
        table = pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0], "state": ["on", "off"]})
        path = tmp_path / name
        if name == "t.parquet":
            pq.write_table(table, path)
        else:
            pacsv.write_csv(table, path)
        events, refused, _ = read_events([path], record_column="state", order="schema")
        observed = [event for event in events if event[2] is not None]
        assert observed == [("on", "a", 1.0), ("on", "b", 3.0), ("off", "a", 2.0), ("off", "b", 4.0)]
        assert refused == []
        ((_, data),) = [entry for entry in entries if entry[0] == "record_column_is_no_feature"]
        assert data["column"] == "state"
        entries.clear()
        assert open_source([path], [SCHEMA], ReadOptions(record_column="state")).missing_columns == ()
        entries.clear()
    schema = Schema((Feature("a", "continuous"), Feature("record", "continuous")))
    path = write_table(tmp_path / "t.parquet", pa.table({"a": [1.0, 2.0], "record": [7.0, 8.0]}))
    data = open_source([path], [schema]).poll(0.0).data
    assert isinstance(data, WideRows)
    assert data.record_ids == ["0", "1"]
    assert data.table.schema.names == ["a", "record"]
    assert entries == []


def test_events_of_devices_are_assigned_to_windows(tmp_path: Path) -> None:
    rows = [("p", "a", 1.0, 33), ("q", "b", 2.0, 34), ("p", "b", 3.0, 40)]
    devices, features, values, times = map(list, zip(*rows, strict=True))
    columns = {"device": devices, "feature": features, "value": values, "time": times}
    table = write_parquet(tmp_path / "log.parquet", **columns)
    text = tmp_path / "log.csv"
    text.write_text("device,feature,value,time\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    events = write_lines(tmp_path / "log.jsonl", *(dict(zip(columns, row, strict=True)) for row in rows))
    windows = WindowAssigner(10_000_000)
    at = "1970-01-01T00:00:"
    expected = [(f"p@{at}30Z", "a", 1.0), (f"q@{at}30Z", "b", 2.0), (f"p@{at}40Z", "b", 3.0)]
    for path in (table, text, events):
        assert read_events([path], window_assigner=windows)[:2] == (expected, []), path
        with pytest.raises(ConfigError, match="arrival"):
            open_source([path], [SCHEMA], ReadOptions(order="random", window_assigner=windows))
    source = open_source([table], [SCHEMA], ReadOptions(window_assigner=windows))
    assert isinstance(source, FileSource)
    assert source.ignored_columns == ()
    with pytest.raises(InputError, match="no column is a feature"):
        open_source([table], [SCHEMA])  # without windows it is no long table
    wide = write_parquet(tmp_path / "wide.parquet", record=["r"], a=[1.0], device=["p"])
    assert read_events([wide], "random", window_assigner=windows)[0] == read_events([wide], "random")[0]
    for missing in ("device", "time"):
        rest = {name: column for name, column in columns.items() if name != missing}
        path = write_parquet(tmp_path / f"no-{missing}.parquet", **rest)
        with pytest.raises(InputError, match=f"'{missing}'"):
            open_source([path], [SCHEMA], ReadOptions(layout="long", window_assigner=windows))


def test_random_order_is_the_same_for_every_layout(tmp_path: Path) -> None:
    ids = [f"pump {i}" for i in range(40)]
    states = ["on", None, "odd", "3"] * 10
    table = write_parquet(tmp_path / "w.parquet", record=ids, a=np.arange(40.0), b=[None, 1.0] * 20, state=states)
    wide = {"a": np.arange(40.0).tolist(), "b": [None, 1.0] * 20, "state": states}
    rows = [(ids[i], name, wide[name][i]) for name in wide for i in range(40)]  # sorted by feature: records far apart
    log = write_parquet(
        tmp_path / "l.parquet",
        record=[r for r, _, _ in rows],
        feature=[f for _, f, _ in rows],
        value=[v if isinstance(v, float) else None for _, _, v in rows],
        label=[v if isinstance(v, str) else None for _, _, v in rows],
    )
    text = write_lines(tmp_path / "e.jsonl", *({"record": r, "feature": f, "value": v} for r, f, v in rows))
    many = write_lines(
        tmp_path / "m.jsonl", *({"record": ids[i], "values": {n: wide[n][i] for n in wide}} for i in range(40))
    )
    orders: tuple[Order, ...] = ("random", "schema")
    for order in orders:
        expected, _, _ = read_events([table], order, seed=3)
        for path in (log, text, many):
            events, rejected, places = read_events([path], order, seed=3, batch_events=7)
            assert events == expected
            assert rejected == []
            if path in (log, text):  # a position is where the event stood before it was moved
                assert [(r, f) for r, f, _ in events] == [rows[offset][:2] for _, _, offset in places]
    assert read_events([table], "random", seed=4)[0] != read_events([table], "random", seed=3)[0]


def test_reordering_joins_records_across_files_and_keeps_invalid_events(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "1.parquet", record=["x", "y", None], feature=["b", "a", "a"], value=[1.0, 2.0, 3.0])
    two = write_parquet(tmp_path / "2.parquet", record=["x", "x"], feature=["zzz", "a"], value=pa.array([4, 5]))
    events, rejected, places = read_events([one, two], "schema")
    assert events == [("x", "a", 5.0), ("x", "b", 1.0), ("y", "a", 2.0)]
    assert sorted(r.reason.value for r in rejected) == ["missing_field", "unknown_feature"]
    assert places == [("2.parquet", 0, 1), ("1.parquet", 0, 0), ("1.parquet", 0, 1)]
    good = {"record": "r", "feature": "b", "value": 1}
    text = write_lines(
        tmp_path / "e.jsonl",
        good,
        b"junk",
        b"[]",
        {"feature": "a", "value": 1},
        {"record": "r", "feature": "a", "value": 2},
        b'{"record":"r","values":{"a":' + b"[" * 300 + b"]" * 300 + b"}}",
        b"x" * 2_000_000,
    )
    events, rejected, _ = read_events([text], "random")
    assert sorted(events) == [("r", "a", 2), ("r", "b", 1)]
    assert sorted(r.reason.value for r in rejected) == [
        "missing_field",
        "not_json",
        "not_json",
        "too_large",
        "wrong_type",
    ]


def test_empty_inputs_have_no_events(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "w.parquet", a=pa.array([], pa.float64()))
    log = write_parquet(
        tmp_path / "l.parquet", **{name: pa.array([], pa.string()) for name in ("record", "feature", "value")}
    )
    text = write_lines(tmp_path / "e.jsonl")
    orders: tuple[Order, ...] = ("arrival", "random")
    for order in orders:
        assert read_events([table, log, text], order) == ([], [], [])


# --- faults


def test_input_errors_name_the_file_and_the_reason(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "good.parquet", a=np.arange(5000.0))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-200])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "data.xlsx").write_text("")
    (tmp_path / "void").mkdir()
    write_parquet(tmp_path / "other.parquet", x=[1.0], y=[2.0])
    write_parquet(tmp_path / "floats.parquet", record=[1.5], a=[1.0])
    write_parquet(tmp_path / "words.parquet", a=["high"])
    write_parquet(tmp_path / "numbered.parquet", record=["x"], feature=[1], value=[1.0])
    cases = {
        "missing.parquet": "no such file",
        "cut.parquet": "cannot be read",
        "empty.csv": "header",
        "data.xlsx": "unknown kind of file",
        "void": "no Parquet, CSV or JSON lines",
        "other.parquet": "no column is a feature of the model",
        "floats.parquet": "record ids are text or whole numbers",
        "words.parquet": "column 'a' has the type string",
        "numbered.parquet": "feature names are text",
    }
    for name, says in cases.items():
        with pytest.raises(InputError) as caught:
            read_events([tmp_path / name])
        message = str(caught.value)
        assert name in message
        assert says in message
        assert "\n" not in message
        assert caught.value.exit_code == 3
    with pytest.raises(InputError, match="there is no column 'record', which a long table"):
        read_events([good], layout="long")
    with pytest.raises(InputError, match="no time column 'noon'"):
        read_events([good], time_column="noon")
    with pytest.raises(InputError, match="no record column 'pump'"):
        read_events([good], record_column="pump")
    with pytest.raises(InputError, match="two columns are called 'a'"):
        read_events([write_table(tmp_path / "twice.parquet", pa.table([[1.0], [2.0]], names=["a", "a"]))])
    with pytest.raises(InputError, match="no input"):
        read_events([])


def write_table(path: Path, table: pa.Table) -> Path:
    """Write a table as a Parquet file."""
    pq.write_table(table, path)
    return path


def test_file_with_damaged_content_is_an_input_error(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", a=np.random.default_rng(0).normal(size=50_000))
    content = bytearray(path.read_bytes())
    content[1000:300_000] = b"\xff" * 299_000
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"d\.parquet: the file cannot be read"):
        read_events([path])


def test_standard_input_cannot_be_combined_with_files_or_an_order(tmp_path: Path) -> None:
    for arguments, order in (([Path("-"), tmp_path], "arrival"), ([Path("-")], "random")):
        with pytest.raises(ConfigError, match="standard input"):
            open_source(arguments, [SCHEMA], ReadOptions(order=order))  # type: ignore[arg-type]


def test_standard_input_returns_available_lines_within_the_timeout() -> None:
    reader, writer = os.pipe()
    source = StandardInput(reader)
    began = time.monotonic()
    assert source.poll(0.1).data is None
    assert 0.05 < time.monotonic() - began < 5.0
    os.write(writer, b'{"record":"r"}\n{"rec')
    data = source.poll(5.0).data
    assert data is not None
    assert (data.payloads, data.offsets.tolist(), data.times.tolist()) == ([b'{"record":"r"}'], [0], [NO_TIME])  # type: ignore[union-attr]
    assert not source.is_exhausted
    os.write(writer, b'ord":"s"}')
    os.close(writer)
    data = source.poll(5.0).data
    assert data is not None
    assert (data.payloads, data.offsets.tolist()) == ([b'{"record":"s"}'], [1])  # type: ignore[union-attr]
    assert source.is_exhausted
    source.close()
    os.close(reader)


def test_folder_of_a_delta_table_is_read_as_the_files_of_its_version(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"record": ["r"], "a": [1.0]}))
    write_deltalake(tmp_path, pa.table({"record": ["s"], "a": [2.0]}), mode="append")
    events = [event for event in read_events([tmp_path])[0] if event[2] is not None]
    assert sorted(events) == [("r", "a", 1.0), ("s", "a", 2.0)]  # the names of files are random
    DeltaTable(tmp_path).delete("record = 's'")
    events, rejected, _ = read_events([tmp_path])
    assert [event for event in events if event[2] is not None] == [("r", "a", 1.0)]
    assert rejected == []
    DeltaTable(tmp_path).delete()
    with pytest.raises(InputError, match="the current version of this Delta Lake table has no files"):
        read_events([tmp_path])


# --- malformed rows of CSV files


MALFORMED = "record,a,b\nx,1,2\ny,3\nz,5,6\nw,7,8,9\n"


def test_malformed_rows_of_a_wide_table_are_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(MALFORMED)
    events, refused, _ = read_events([tmp_path / "w.csv"])
    readings = [event for event in events if event[1] != "state"]  # the table has no column for it
    assert readings == [("x", "a", 1.0), ("x", "b", 2.0), ("z", "a", 5.0), ("z", "b", 6.0)]
    assert [(r.reason.value, r.detail, r.num_readings) for r in refused] == [
        ("malformed_row", "line 3 of the file has 2 cells in place of 3", 1),
        ("malformed_row", "line 5 of the file has 4 cells in place of 3", 1),
    ]


def test_a_dead_letter_holds_the_malformed_row(tmp_path: Path) -> None:
    # A row that would be a valid message must not become an event.
    row = '{"record":"x","feature":"a","value":1}'
    (tmp_path / "w.csv").write_text(f"record;a\n{row}\nx;1\n")
    source = open_source([tmp_path / "w.csv"], [SCHEMA])
    data = source.poll(0.0).data
    assert data is not None
    events, refused = Codec(SCHEMA).decode(data)
    assert len(events) == 0
    document = orjson.loads(encode_rejected(refused[0], data))
    assert document["payload"] == row
    assert document["source"] == {"topic": str(tmp_path / "w.csv"), "partition": 0, "offset": 1}


@pytest.mark.parametrize("order", ["arrival", "random"])
def test_malformed_rows_of_long_tables_are_dead_letters(tmp_path: Path, order: Order) -> None:
    (tmp_path / "one.csv").write_text("record,feature,value\nx,a,1\nx,b\n")
    (tmp_path / "two.csv").write_text("record,feature,value\nx\nx,b,2\n")
    events, refused, _ = read_events([tmp_path / "one.csv", tmp_path / "two.csv"], order)
    assert sorted(events) == [("x", "a", 1.0), ("x", "b", 2.0)]
    assert [r.detail.split(" of")[0] for r in refused] == ["line 3", "line 2"]


def test_malformed_rows_of_windowed_tables_are_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("time,a,b\n10,1,2\n11\n95,3,4\n")
    events, refused, _ = read_events([tmp_path / "w.csv"], window_assigner=WindowAssigner(60_000_000))
    assert (len(events), [r.reason.value for r in refused]) == (4, ["malformed_row"])


def test_memory_for_malformed_rows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PENDING_BAD_ROWS", 3)
    (tmp_path / "w.csv").write_text("record,a,b\n" + "x\n" * 10 + "y,1,2\n" + "z\n")
    events, refused, _ = read_events([tmp_path / "w.csv"])
    assert (len(events), sum(r.num_readings for r in refused), len(refused)) == (3, 11, 4)
    assert refused[-1].detail == "8 further rows of the file, after line 4, are like this one"
