"""Tests of files of evidence in order of time: few messages, and the same incidents, also with several models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from connectors.files import evidence_files
from connectors.files.evidence_files import merge_evidence_files, read_evidence, sort_evidence_file
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.incidents.events import EvidenceBatch
from tests.incidents.evidence_logs import SECOND, START, make_log

NUM_RECORDS = 60


def make_logs(num_models: int) -> list[list[EvidenceBatch]]:
    """Return the evidence of models whose records are closed at the same times."""
    return [
        [
            replace(batch, model_name=f"type-{number}" if num_models > 1 else "", partition=0)
            for batch in make_log(f"m{number}", 3, NUM_RECORDS, faults={0: [(5, 30)]}, seed=number)
        ]
        for number in range(num_models)
    ]


def write(path: Path, batches: Iterable[EvidenceBatch]) -> Path:
    path.write_bytes(b"".join(encode_evidence(batch) + b"\n" for batch in batches))
    return path


def list_rows(batches: Iterable[EvidenceBatch]) -> dict[str, list[tuple[str, int, float, bool]]]:
    """Return the rows of each model, in order."""
    rows: dict[str, list[tuple[str, int, float, bool]]] = {}
    for batch in batches:
        columns = batch.closed.times.tolist(), batch.closed.p_values.tolist(), batch.closed.is_alerted.tolist()
        rows.setdefault(batch.model_name, []).extend(zip(batch.closed.record_ids, *columns, strict=True))
    return rows


def list_alerts(batches: Iterable[EvidenceBatch]) -> set[tuple[str, str]]:
    """Return the model and the id of each alert."""
    return {(batch.model_name, alert.id) for batch in batches for alert in batch.alerts}


@pytest.mark.parametrize("num_models", [1, 2, 7])
@pytest.mark.parametrize("rows_per_chunk", [50, 10_000])
def test_shards_become_one_log_with_many_rows_of_a_model_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_models: int, rows_per_chunk: int
) -> None:
    monkeypatch.setattr(evidence_files, "ROWS_PER_CHUNK", rows_per_chunk)
    logs = make_logs(num_models)
    rng = np.random.default_rng(0)
    shards: list[list[EvidenceBatch]] = [[], [], []]
    for batch in [batch for log in logs for batch in log]:
        shards[rng.integers(0, 3)].append(batch)
    paths = [write(tmp_path / f"{number}.jsonl", shard) for number, shard in enumerate(shards)]
    for path in paths:
        sort_evidence_file(path)
        times = [row.time for row in evidence_files._iterate_rows(path)]
        assert times == sorted(times)
    merged = list(merge_evidence_files(paths))
    assert list_rows(merged) == {
        log[0].model_name: sorted(
            (row for rows in list_rows(log).values() for row in rows), key=lambda row: (row[1], row[0])
        )
        for log in logs
    }
    assert list_alerts(merged) == list_alerts(batch for log in logs for batch in log)
    num_rows = sum(len(batch.closed) + len(batch.alerts) for batch in merged)
    smallest = num_rows / evidence_files.ROWS_PER_BATCH
    assert len(merged) <= (num_models + 2 * smallest if rows_per_chunk > num_rows else num_rows / 4)
    assert {batch.model for batch in merged} == {f"m{number}" for number in range(num_models)}


def test_the_order_of_the_partitions_of_a_model_stays(tmp_path: Path) -> None:
    (log,) = make_logs(1)
    split = [replace(batch, partition=place % 2) for place, batch in enumerate(log)]
    path = write(tmp_path / "evidence.jsonl", split)
    sort_evidence_file(path)
    found = list(read_evidence([path]))
    assert {batch.partition for batch in found} == {0, 1}
    times = [time for batch in found for time in batch.closed.times.tolist()]
    assert times == sorted(times)
    assert times[0] == START
    assert times[-1] - START >= (NUM_RECORDS - 1) * 10 * SECOND
