"""The contamination benchmark: replaced training records, counted alerts, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import contamination
from benchmarks.tables import split_table
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ConfigError

LABELS = np.array([0] * 200 + [1] * 30)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.01, 1), (0.1, 10), (0.3, 15)])
def test_anomalies_replace_training_normals(share: float, count: int) -> None:
    """At most half of all anomalies are used, so that the others can be tested."""
    clean = split_table(LABELS, seed=1)
    contaminated = contamination.contaminate(clean, share, seed=1)
    assert len(contaminated.train) == len(clean.train) == 100
    assert LABELS[contaminated.train].sum() == count
    assert (LABELS[contaminated.test] == contaminated.is_anomaly).all()
    assert len(contaminated.test) == len(clean.test) - count
    assert not set(contaminated.train.tolist()) & set(contaminated.test.tolist())


def test_alerts_are_counted_at_each_alpha() -> None:
    calibration = Calibration.from_statistics(np.arange(99.0), "random")
    statistics = np.array([0.0, 96.5, 98.5, 50.0, 98.5])
    is_anomaly = np.array([False, False, False, True, True])
    assert contamination.measure_alerts(calibration, statistics, is_anomaly) == {
        "0.05": {"false alarms": 0.6667, "detected": 0.5},
        "0.01": {"false alarms": 0.3333, "detected": 0.5},
    }


def test_only_anomalies_among_the_largest_statistics_are_confirmed() -> None:
    statistics = np.arange(150.0)
    is_anomaly = np.zeros(150, bool)
    is_anomaly[[10, 60, 149]] = True
    assert np.flatnonzero(contamination.confirm_anomalies(statistics, is_anomaly)).tolist() == [60, 149]


@pytest.mark.parametrize("shares", ["much", "0.5", "-0.1", ""])
def test_invalid_shares_are_rejected(shares: str) -> None:
    with pytest.raises(ConfigError, match="--shares"):
        contamination.parse_shares(shares)


def test_report_has_a_row_for_each_treatment_and_other_method() -> None:
    metrics, alerts = {"auroc": 0.9, "aupr": 0.8}, {"false alarms": 0.01, "detected": 0.5}
    own = metrics | {"0.05": alerts, "0.01": alerts}
    clean = {"table": "t", "contaminated": 0.0, "seed": 0, "as is": own, "forest": metrics, "neighbours": metrics}
    contaminated = clean | {"contaminated": 0.05, "trimmed": own, "declared": own}
    rows = contamination.format_results([clean, contaminated]).splitlines()
    assert len(rows) == 2 + 3 + 5
    assert len({row.count("|") for row in rows}) == 1
    assert "| t | 5.0% | 0 | declared | 0.900 | 0.800 | 1.0% | 50.0% | 1.0% | 50.0% |" in rows


def test_trainings_of_a_table_are_joined() -> None:
    """Means are only shown for treatments that all lines have."""
    key = {"table": "t", "share": 0.1, "seed": 0, "contaminated": 0.1}
    metrics = {"auroc": 0.9, "aupr": 0.8}
    lines = [
        {**key, "training": "auto", "auto": metrics, "reviewed": metrics},
        {**key, "training": "as is", "as is": metrics, "forest": metrics},
        {**key, "table": "S", "training": "as is", "as is": metrics, "forest": metrics},
    ]
    joined = contamination.join_trainings(lines)
    assert [line["table"] for line in joined] == ["S", "t"]
    assert {"as is", "forest", "auto", "reviewed"} <= set(joined[1])
    (mean,) = contamination.average_by_share(joined)
    assert "as is" in mean
    assert "auto" not in mean


@pytest.mark.parametrize(
    ("text", "expected"), [("", ["as is", "declared", "auto"]), ("auto", ["auto"]), ("auto,as is", ["auto", "as is"])]
)
def test_treatments_can_be_chosen(text: str, expected: list[str]) -> None:
    assert contamination.parse_treatments(text) == expected


def test_unknown_treatments_are_rejected() -> None:
    with pytest.raises(ConfigError, match="'trimmed' is none of"):
        contamination.parse_treatments("as is,trimmed")


def test_means_are_over_the_tables_with_the_same_share() -> None:
    def make_line(table: str, share: float, auroc: float) -> dict[str, Any]:
        metrics = {"auroc": auroc, "aupr": 0.5}
        own = metrics | {"0.05": {"false alarms": auroc / 10, "detected": 0.5}}
        line = {"table": table, "share": share, "contaminated": share / 2, "seed": 0}
        return line | {"neighbours": metrics, "as is": own, "forest": metrics}

    lines = [make_line("a", 0.1, 0.6), make_line("b", 0.1, 0.8), make_line("a", 0.0, 0.9)]
    means = contamination.average_by_share(lines)
    assert [mean["contaminated"] for mean in means] == [0.1, 0.0]
    assert means[0]["as is"]["auroc"] == pytest.approx(0.7)
    assert means[0]["as is"]["0.05"]["false alarms"] == pytest.approx(0.07)
    assert means[1]["forest"] == {"auroc": 0.9, "aupr": 0.5}
