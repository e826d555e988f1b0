"""Make the pictures of the README and of the documentation's first page.

    deformer-stream demo --output demo-output
    python docs/images/make_pictures.py demo-output            (needs Chromium for the screenshot)

`idea.png` follows one faulty record of the demo reading by reading; `demo-report.png` is the head of the demo's report.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

import deformer_stream
from deformer_stream.demo.simulate import FEATURES, simulate

mpl.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ALPHA = 0.01
EARLIEST_ALERT, LATEST_ALERT = 3, 5
"""The picture shows a record that raised its alert at one of these readings."""

BLUE, RED, GREY = "#1f5fa8", "#c0392b", "#9aa0a6"


@dataclass(frozen=True, slots=True)
class FollowedRecord:
    """One record, scored after each reading.

    Attributes:
        name: The record id.
        fault: The simulated fault.
        labels: Feature and value of each reading, in order of arrival.
        p_values: The record's p-value after each reading.
        alert_index: Index of the reading that raised the alert.
    """

    name: str
    fault: str
    labels: list[str]
    p_values: list[float]
    alert_index: int


def follow_records(folder: Path) -> FollowedRecord:
    """Return the first faulty record of a simulated fleet that raises an early alert.

    The readings arrive in the order of the simulated delays. Records whose first readings raise the alert are skipped,
    since the picture should show the p-value before it.
    """
    detector = deformer_stream.load(folder / "model")
    scorer = detector.scorer(alpha=ALPHA)
    fleet = simulate(200, seed=3, fault_share=0.5)
    for index, row in enumerate(fleet.table.to_pylist()):
        if not row["fault"]:
            continue
        names = [FEATURES[feature] for feature in fleet.delays[index].argsort() if row[FEATURES[feature]] is not None]
        updates = [scorer.update(row["record"], name, row[name]) for name in names]
        alert_indexes = [i for i, update in enumerate(updates) if update.alert]
        if alert_indexes and EARLIEST_ALERT <= alert_indexes[0] + 1 <= LATEST_ALERT:
            labels = [label(name, row[name]) for name in names]
            p_values = [update.p_value for update in updates]
            return FollowedRecord(row["record"], row["fault"], labels, p_values, alert_indexes[0])
    raise SystemExit(
        f"no record raises an alert at readings {EARLIEST_ALERT} to {LATEST_ALERT}: train the demo with another --seed"
    )


def label(name: str, value: float | str) -> str:
    """Return the axis label of a reading: the sensor and its value."""
    text = value if isinstance(value, str) else f"{value:,.4g}"
    return f"{name.replace('_', ' ')}\n{text}"


def draw_idea(record: FollowedRecord, path: Path) -> None:
    """Draw the p-value of a record against its readings: solid until the alert, faint for readings still to come."""
    figure, axes = plt.subplots(figsize=(10, 4.2), dpi=140)
    count, alert = len(record.labels), record.alert_index
    positions = list(range(1, count + 1))
    axes.axvspan(alert + 1.5, count + 0.5, color="#f1f3f4", zorder=0)
    axes.step(positions, record.p_values, where="post", color=GREY, linewidth=1.5, zorder=1)
    axes.step(positions[: alert + 1], record.p_values[: alert + 1], where="post", color=BLUE, linewidth=2.5, zorder=2)
    axes.plot(positions[: alert + 1], record.p_values[: alert + 1], "o", color=BLUE, zorder=3)
    axes.plot([alert + 1], [record.p_values[alert]], "o", color=RED, markersize=11, zorder=4)
    axes.axhline(ALPHA, color=RED, linestyle="--", linewidth=1.2)
    axes.text(count + 0.45, ALPHA * 1.12, "α = 1%", color=RED, ha="right", va="bottom")
    axes.annotate(
        f"alert after {alert + 1} of {count} readings",
        (alert + 1, record.p_values[alert]),
        (alert + 2.0, 0.09),
        color=RED,
        fontsize=12,
        fontweight="bold",
        arrowprops={"arrowstyle": "->", "color": RED},
    )
    axes.text((alert + 2 + count) / 2, 0.55, "readings that have not arrived yet", color="#5f6368", ha="center")
    axes.set_yscale("log")
    axes.set_yticks([1.0, 0.1, 0.01, 0.001], ["1", "0.1", "0.01", "0.001"])
    axes.minorticks_off()
    axes.set_ylim(min(*record.p_values, ALPHA) / 2, 1.3)
    axes.set_xlim(0.5, count + 0.5)
    axes.set_xticks(positions, record.labels, rotation=38, ha="right", fontsize=8)
    axes.set_ylabel("p-value of the record")
    pump = record.name.partition("/")[0]
    axes.set_title(f"A record of {pump}, reading by reading ({record.fault})", loc="left", fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def take_screenshot(page: Path, path: Path, size: tuple[int, int]) -> None:
    """Render a page in headless Chromium and write a PNG of its first `size` pixels."""
    browser: Any = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is needed for the screenshot: install the package chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += [f"--user-data-dir={profile}", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
        target = [f"--window-size={size[0]},{size[1]}", f"--screenshot={path}", page.resolve().as_uri()]
        subprocess.run([browser, *options, *target], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output of `deformer-stream demo`")
    folder = parser.parse_args().folder
    draw_idea(follow_records(folder), HERE / "idea.png")
    take_screenshot(folder / "report.html", HERE / "demo-report.png", (980, 780))


if __name__ == "__main__":
    main()
