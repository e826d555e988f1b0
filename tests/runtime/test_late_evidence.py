"""Tests of the warning that much of the evidence comes out of order of time."""

from __future__ import annotations

import pytest

from deformer_stream import log
from deformer_stream.runtime.late_evidence import MIN_RECORDS, REPEAT_SECONDS, LateEvidenceWarning

EVENT = "evidence_out_of_order"


def test_a_share_of_more_than_a_tenth_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    warning = LateEvidenceWarning()
    warning.restart(5000)  # of earlier runs
    warning.count_records(MIN_RECORDS)
    warning.check(5000 + MIN_RECORDS // 10)
    assert EVENT not in capsys.readouterr().err
    warning.count_records(MIN_RECORDS)
    warning.check(5000 + 2 * MIN_RECORDS // 10 + 1)
    written = capsys.readouterr().err
    assert f'"late": {MIN_RECORDS // 10 + 1}, "records": {MIN_RECORDS}' in written
    assert "produce --key device" in written


def test_few_records_are_not_judged_before_there_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    warning = LateEvidenceWarning()
    for num_late in range(1, MIN_RECORDS):
        warning.count_records(1)
        warning.check(num_late)
    assert EVENT not in capsys.readouterr().err
    warning.count_records(1)
    warning.check(MIN_RECORDS)
    assert EVENT in capsys.readouterr().err


def test_it_is_reported_again_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(False)
    clock = [0.0]
    warning = LateEvidenceWarning(lambda: clock[0])
    num_late = 0
    for seconds, is_reported in ((0.0, True), (REPEAT_SECONDS - 1, False), (REPEAT_SECONDS, True)):
        clock[0] = seconds
        num_late += MIN_RECORDS
        warning.count_records(MIN_RECORDS)
        warning.check(num_late)
        assert (EVENT in capsys.readouterr().err) == is_reported
