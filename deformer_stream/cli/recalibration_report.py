"""Write a model with its new calibration, and add a section about the calibration to the model's report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from deformer_stream import model_store
from deformer_stream.calibration.recalibrate import Recalibration
from deformer_stream.calibration.seen_records import SeenRecords
from deformer_stream.counts import format_count
from deformer_stream.model_store import Artifact
from deformer_stream.report import charts, pages


def write_recalibrated_model(
    recalibration: Recalibration,
    loaded: Artifact,
    directory: Path,
    alphas: Sequence[float],
    seen_records: SeenRecords,
    today: date,
) -> str:
    """Write a model directory with the new calibration, and return the fingerprint of the model in it.

    A section about the calibration is appended to the model's report, and a notice below its title says that the rest
    of the report describes the training. If the report cannot be read, the new report consists of the section only.

    Args:
        recalibration: The new calibration, together with the one that it replaces.
        loaded: The model with its old calibration.
        directory: The model directory to write. It may be the directory of the old model, which is then replaced.
        alphas: False-alarm rates whose thresholds the report shows.
        seen_records: Fingerprints of the records of the training and of the new calibration.
        today: The date of the new calibration.
    """
    new = recalibration.new
    # What the manifest of the new model states about the calibration; the keys are part of the file format.
    note = {
        "from": loaded.fingerprint,
        "date": today.isoformat(),
        "records": recalibration.num_records,
        "order": new.arrival_order,
        "ties": new.tie_policy,
        "groups": len(new.calibration_by_group),
        # Groups with too few records for a calibration of their own, which share one.
        "groups_pooled": len(recalibration.num_records_by_shared_group),
    }
    try:
        training_report = (loaded.directory / model_store.REPORT).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        training_report = ""
    notice = (
        f"This page describes the training. On {today.isoformat()}, its calibration was replaced by one of "
        f"{format_count(len(new.scores), 'record')}; the smallest α in reach is {pages.format_alpha(new.min_p_value)} "
        "now. The last section of the page, New calibration, has the thresholds in force."
    )
    training_report = pages.set_notice(training_report, notice)
    section = _render_section(recalibration, loaded.fingerprint, alphas, today)
    # "Calibration report" is the title of a new page, if there is no training report to append to.
    report = pages.append_blocks(training_report, "Calibration report", *section)
    training = loaded.manifest["training"] | {"recalibrated": note}
    return model_store.write(
        directory, loaded.scoring_model, new, training, report, seen_records, loaded.fault_classifier
    )


def _render_section(
    recalibration: Recalibration, old_fingerprint: str, alphas: Sequence[float], today: date
) -> list[str]:
    """Return the HTML elements of the report's section about the new calibration, in their order on the page.

    They are a heading, an introduction, and a histogram of the calibration records' anomaly scores. A table that
    compares the old and new thresholds follows, and a paragraph for each sentence about groups of records.

    Args:
        recalibration: The new calibration, together with the one that it replaces.
        old_fingerprint: Fingerprint of the model with its old calibration.
        alphas: False-alarm rates whose thresholds the section shows.
        today: The date of the new calibration.
    """
    new = recalibration.new
    ties = " (readings of one record with the same time scored together)" if new.tie_policy == "hold" else ""
    threshold_by_name = {f"α = {pages.format_alpha(alpha)}": new.compute_threshold(alpha) for alpha in alphas}
    header = ["α", "score that alerts (before)", "score that alerts (now)", "in reach?"]
    return [
        pages.render_heading(f"New calibration of {today.isoformat()}"),
        pages.render_paragraph(
            f"This model is calibrated by {recalibration.num_records:,} normal records in {new.arrival_order} "
            f"order{ties}. Its weights are those of the model {old_fingerprint}. The sections above about alerts and "
            "calibration describe what was in force before."
        ),
        charts.draw_histogram(
            new.scores,
            "Largest score of normal records",
            "score, nats",
            # A threshold is infinite if no score, or every score, raises an alert.
            vertical={name: threshold for name, threshold in threshold_by_name.items() if np.isfinite(threshold)},
        ),
        pages.render_table(header, recalibration.format_rows(alphas)),
        *(pages.render_paragraph(sentence + ".") for sentence in recalibration.describe_groups()),
    ]
