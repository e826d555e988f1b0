"""Tests of the benchmark of feedback: its simulated spans, and the kinds of incidents."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import incident_feedback
from benchmarks.incident_feedback import DRIFT, EPISODE, FAULTS, HARMLESS, HOUR_MICROS, Episode, classify, simulate_span
from tests.incidents.examples import make_incident


def test_a_span_has_a_record_an_hour_and_episodes_of_all_kinds() -> None:
    table, episodes = simulate_span(3, 40, has_episodes=True, has_drift=True)
    assert table.num_rows == 12 * 40 * 24
    assert "fault" not in table.column_names
    assert len(set(table["record"].to_pylist())) == table.num_rows
    kinds = Counter(episode.kind for episode in episodes)
    assert kinds[HARMLESS] > 10
    assert kinds[DRIFT] > 0
    assert sum(kinds[fault] for fault in FAULTS) > 5
    assert all(episode.end - episode.start == (EPISODE - 1) * HOUR_MICROS for episode in episodes)
    plain, no_episodes = simulate_span(3, 40, has_episodes=False, has_drift=False)
    assert no_episodes == []
    (first, *_) = [episode for episode in episodes if episode.kind == HARMLESS]
    flows = [
        [
            row["flow"]
            for row in rows.to_pylist()
            if row["record"].startswith(first.device)
            and first.start <= row["time"].timestamp() * 1e6 <= first.end
            and row["flow"] is not None
        ]
        for rows in (table, plain)
    ]
    ratio = np.array(flows[0]) / np.array(flows[1])
    assert 0.8 < ratio.mean() < 0.95
    assert simulate_span(3, 40, True, True)[0].equals(table), "equal arguments give equal spans"


def test_an_incident_has_the_kind_of_the_episode_that_it_overlaps() -> None:
    incident = replace(make_incident(1), device="pump-01", opened=100, last=200)
    harmless, fault = Episode("pump-01", HARMLESS, 50, 120), Episode("pump-01", FAULTS[0], 190, 400)
    assert classify(incident, [harmless]) == HARMLESS
    assert classify(incident, [harmless, fault]) == FAULTS[0]
    assert classify(incident, [replace(fault, device="pump-02"), replace(fault, start=201)]) == "other"


@pytest.mark.parametrize("same_suspects", [False, True])
def test_the_report_has_a_row_for_each_seed(same_suspects: bool) -> None:
    line = {
        "seed": 0,
        "drift": False,
        "clicks": 10,
        "past_kind": 20,
        "past_kind_removed": 18,
        "past_faults": 9,
        "past_faults_kept": 9,
        "patterns": 1,
        "kind_today": 25,
        "kind_then": 2,
        "faults": 12,
        "faults_today": 12,
        "faults_then": 12,
        "drifts": 0,
        "drifts_today": 0,
        "drifts_then": 0,
        "false_today": 30,
        "false_then": 6,
        "expected": [2, 15],
        "is_expected": True,
    }
    lines = [line, line | {"drift": True, "is_expected": False}] if same_suspects else [line]
    report = incident_feedback.format_report(lines, argparse.Namespace(seeds=1, same_suspects=same_suspects))
    assert "| 0 | 10 | 18 of 20 | 9 of 9 | 25 → 2 | 12 → 12 of 12 |" in report
    assert "92% are removed in the future span; the report had said 90%" in report
    assert ("**missed**" in report) == same_suspects
