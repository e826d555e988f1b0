"""The contracts, for all connectors that need no service: memory, files and standard streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest

from connectors.files import (
    AlertLines,
    EvidenceLines,
    ReadOptions,
    RecordsTable,
    RejectedLines,
    ScoresTable,
    StandardInput,
    open_source,
)
from deformer_stream.codec import encode_alert, encode_rejected
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import ONLY_MODEL, Effects
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.runtime.ports import EventSource
from deformer_stream.testing import MemorySink, MemorySource
from tests.contracts import effects as made
from tests.contracts.sinks import SinkContract, SinkUnderTest
from tests.contracts.sources import SCHEMA, Reading, SourceContract, SourceUnderTest


def encode_lines(readings: list[Reading]) -> list[bytes]:
    """Return readings as JSON messages."""
    return [orjson.dumps({"record": r, "feature": f, "value": v}) for r, f, v in readings]


def make_long_table(readings: list[Reading]) -> pa.Table:
    """Return readings as a table in long layout."""
    return pa.table({name: [row[k] for row in readings] for k, name in enumerate(("record", "feature", "value"))})


def make_wide_table(readings: list[Reading]) -> pa.Table:
    """Return readings as a table in wide layout. They must be sorted by record and by column."""
    ids = list(dict.fromkeys(record for record, _, _ in readings))
    columns = {name: [value for _, feature, value in readings if feature == name] for name in "abc"}
    return pa.table({"record": ids, **columns})


class TestMemory(SourceContract):
    @pytest.fixture
    def feed(self) -> SourceUnderTest:
        published: list[bytes] = []
        return SourceUnderTest(
            lambda readings: published.extend(encode_lines(readings)), lambda: MemorySource(published, chunk=7)
        )


WRITERS: dict[str, Callable[[Path, list[Reading]], object]] = {
    "events.jsonl": lambda path, readings: path.write_bytes(b"\n".join(encode_lines(readings)) + b"\n"),
    "long.parquet": lambda path, readings: pq.write_table(make_long_table(readings), path, row_group_size=11),
    "long.csv": lambda path, readings: pc_csv.write_csv(make_long_table(readings), path),
    "wide.parquet": lambda path, readings: pq.write_table(make_wide_table(readings), path, row_group_size=3),
    "wide.csv": lambda path, readings: pc_csv.write_csv(make_wide_table(readings), path),
}


class TestFiles(SourceContract):
    @pytest.fixture(params=list(WRITERS))
    def feed(self, request: pytest.FixtureRequest, tmp_path: Path) -> SourceUnderTest:
        path = tmp_path / request.param
        write = WRITERS[request.param]
        return SourceUnderTest(
            lambda readings: write(path, readings), lambda: open_source([path], [SCHEMA], ReadOptions(batch_events=8))
        )  # type: ignore[arg-type]


class TestStandardInput(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[SourceUnderTest]:
        path = tmp_path / "events.jsonl"
        descriptors: list[int] = []

        def publish(readings: list[Reading]) -> None:
            path.write_bytes(b"\n".join(encode_lines(readings)))  # no line end after the last

        def open_() -> EventSource:
            descriptors.append(os.open(path, os.O_RDONLY))
            return StandardInput(descriptors[-1], batch_events=8)

        yield SourceUnderTest(publish, open_)
        for descriptor in descriptors:
            os.close(descriptor)


class TestMemorySink(SinkContract):
    @pytest.fixture
    def drain(self) -> SinkUnderTest:
        sink = MemorySink()
        return SinkUnderTest(lambda: sink, lambda: sink.alerts, lambda effects, data: effects.alerts)


def read_json_lines(path: Path) -> list[Any]:
    """Return the documents of a file with JSON lines."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


class TestAlertLines(SinkContract):
    """A file that is appended to has its name at once, and one that is replaced has it when it is complete."""

    @pytest.fixture(params=["append", "replace"])
    def drain(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkUnderTest:
        path, append = tmp_path / "alerts.jsonl", request.param == "append"

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            return [orjson.loads(encode_alert(alert, data)) for alert in effects.alerts]

        return SinkUnderTest(
            lambda: AlertLines(path, append), lambda: read_json_lines(path), expected, safe_at_flush=append
        )


class TestEvidenceLines(SinkContract):
    @pytest.fixture
    def drain(self, tmp_path: Path) -> SinkUnderTest:
        path = tmp_path / "evidence.jsonl"

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            return [orjson.loads(encode_evidence(batch)) for batch in make_evidence(effects)[0]]

        return SinkUnderTest(lambda: EvidenceLines(path), lambda: read_json_lines(path), expected, safe_at_flush=False)


class TestRejectedLines(SinkContract):
    @pytest.fixture(params=["append", "replace"])
    def drain(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkUnderTest:
        path, append = tmp_path / "rejected.jsonl", request.param == "append"

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            assert data is not None
            return [orjson.loads(encode_rejected(rejected, data)) for rejected in effects.rejections]

        return SinkUnderTest(
            lambda: RejectedLines(path, append), lambda: read_json_lines(path), expected, safe_at_flush=append
        )


class TestScoresParquet(SinkContract):
    @pytest.fixture
    def drain(self, tmp_path: Path) -> SinkUnderTest:
        path = tmp_path / "scores.parquet"

        def expected(effects: Effects, data: Payload | None) -> list[Any]:
            events, seq = effects.scored.event_indices.tolist(), effects.scored.seq.tolist()
            return [(effects.batch.record_ids[e], s) for e, s in zip(events, seq, strict=True)]

        def delivered() -> list[Any]:
            table = pq.read_table(path)
            return list(zip(table["record"].to_pylist(), table["seq"].to_pylist(), strict=True))

        return SinkUnderTest(
            lambda: ScoresTable(path, {ONLY_MODEL: made.SCHEMA}), delivered, expected, safe_at_flush=False
        )


class TestRecordsParquet(SinkContract):
    @pytest.fixture
    def drain(self, tmp_path: Path) -> SinkUnderTest:
        path = tmp_path / "records.parquet"

        def delivered() -> list[Any]:
            return list(pq.read_table(path)["record"].to_pylist())

        return SinkUnderTest(
            lambda: RecordsTable(path),
            delivered,
            lambda effects, data: effects.closed.record_ids,
            safe_at_flush=False,
        )
