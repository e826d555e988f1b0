"""The benchmark of contamination puts in what it says, and judges who was not put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import contamination
from benchmarks.tables import split
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ConfigError

LABELS = np.array([0] * 200 + [1] * 30)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.01, 1), (0.1, 10), (0.3, 15)])
def test_anomalies_take_the_place_of_normals(share: float, count: int) -> None:
    """At most half of all anomalies, so that enough are left to be found."""
    clean = split(LABELS, seed=1)
    dirty = contamination.contaminated(clean, share, seed=1)
    assert len(dirty.train) == len(clean.train) == 100
    assert LABELS[dirty.train].sum() == count
    assert (LABELS[dirty.test] == dirty.anomaly).all()
    assert len(dirty.test) == len(clean.test) - count
    assert not set(dirty.train.tolist()) & set(dirty.test.tolist())


def test_alerts_are_judged_at_each_alpha() -> None:
    calibration = Calibration.from_statistics(np.arange(99.0), "random")
    statistics = np.array([0.0, 96.5, 98.5, 50.0, 98.5])
    found = contamination.judged(calibration, statistics, np.array([False, False, False, True, True]))
    assert found == {
        "0.05": {"false alarms": 0.6667, "detected": 0.5},
        "0.01": {"false alarms": 0.3333, "detected": 0.5},
    }


@pytest.mark.parametrize("shares", ["much", "0.5", "-0.1", ""])
def test_shares_that_are_none(shares: str) -> None:
    with pytest.raises(ConfigError, match="--shares"):
        contamination.shares_of(shares)


def test_the_report_has_a_row_for_each_way_and_peer() -> None:
    ranks, alerts = {"auroc": 0.9, "aupr": 0.8}, {"false alarms": 0.01, "detected": 0.5}
    both = ranks | {"0.05": alerts, "0.01": alerts}
    clean = {"table": "t", "contaminated": 0.0, "seed": 0, "as is": both, "forest": ranks, "neighbours": ranks}
    dirty = clean | {"contaminated": 0.05, "trimmed": both, "told": both}
    lines = contamination.report([clean, dirty]).splitlines()
    assert len(lines) == 2 + 3 + 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| t | 5.0% | 0 | told | 0.900 | 0.800 | 1.0% | 50.0% | 1.0% | 50.0% |" in lines


def test_means_are_over_the_tables_of_a_share() -> None:
    def line(table: str, share: float, auroc: float) -> dict[str, Any]:
        ranks = {"auroc": auroc, "aupr": 0.5}
        own = {"as is": ranks | {"0.05": {"false alarms": auroc / 10, "detected": 0.5}}, "forest": ranks}
        return {"table": table, "share": share, "contaminated": share / 2, "seed": 0, "neighbours": ranks} | own

    found = contamination.means([line("a", 0.1, 0.6), line("b", 0.1, 0.8), line("a", 0.0, 0.9)])
    assert [one["contaminated"] for one in found] == [0.1, 0.0]
    assert found[0]["as is"]["auroc"] == pytest.approx(0.7)
    assert found[0]["as is"]["0.05"]["false alarms"] == pytest.approx(0.07)
    assert found[1]["forest"] == {"auroc": 0.9, "aupr": 0.5}
