"""Tests of what is collected for a calibration: parts in any order give the same, also after they were files."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.files.calibration_files import read_collected_records, write_collected_records
from deformer_stream.errors import InputError
from deformer_stream.runtime import calibration_sink
from deformer_stream.runtime.calibration_sink import CollectedRecords

IDS = st.text(max_size=3) | st.sampled_from(["a", "b", "\udcff"])


def make(record_ids: list[str], seeds: list[int], has_scores: bool) -> CollectedRecords:
    """Return records whose numbers follow from seeds."""
    numbers = np.array(seeds, np.float64)
    readings = {record: [(seed % 3, seed / 7), (1, 0.5)] for record, seed in zip(record_ids, seeds, strict=True)}
    fingerprints = np.array(seeds, np.uint64)
    scores = numbers / 3 if has_scores else None
    return CollectedRecords(record_ids, numbers, scores, fingerprints, readings, len(seeds) > 2, False)


def to_comparable(records: CollectedRecords) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else dict(value) if isinstance(value, dict) else value
        for name, value in asdict(records).items()
    }


@given(st.lists(st.tuples(IDS, st.integers(0, 99)), max_size=30), st.integers(1, 4), st.booleans(), st.randoms())
def test_parts_are_merged_to_the_same_records(
    rows: list[tuple[str, int]], num_parts: int, has_scores: bool, random: Any
) -> None:
    """Records with the same id are in the same part, in the order of closing. Records of a part are in any order."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(calibration_sink, "NUM_RECORDS_WITH_READINGS", 5)

        def merge(chosen: list[tuple[str, int]]) -> CollectedRecords:
            return CollectedRecords.merge([make([i for i, _ in chosen], [s for _, s in chosen], has_scores)])

        whole = merge(rows)
        parts: list[list[tuple[str, int]]] = [[] for _ in range(num_parts)]
        for row in sorted(rows, key=lambda row: row[0] > "a"):  # stable
            parts[len(row[0].encode("utf-8", "surrogatepass")) % num_parts].append(row)
        random.shuffle(parts)
        read = []
        for number, part in enumerate(parts):
            folder = Path(name) / str(number)
            folder.mkdir()
            write_collected_records(folder, merge(part))
            read.append(read_collected_records(folder))
        merged = CollectedRecords.merge(iter(read))
        one_by_one = reduce(lambda before, part: CollectedRecords.merge([before, part]), read)
    assert merged.record_ids == sorted(record for record, _ in rows)
    assert len(whole.readings_by_record) == min(5, len({record for record, _ in rows}))
    different = {"has_wide_rows"}  # it depends on the sizes of the parts here
    assert to_comparable(one_by_one) == to_comparable(merged)
    expected, found = to_comparable(whole), to_comparable(merged)
    assert {k: v for k, v in found.items() if k not in different} == {
        k: v for k, v in expected.items() if k not in different
    }


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_collected_records(tmp_path, make(["a"], [1], True))
    (tmp_path / "records.arrow").write_bytes(b"ARROW1")
    with pytest.raises(InputError, match="start again"):
        read_collected_records(tmp_path)
