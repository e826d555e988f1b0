"""The command `calibrate`, which replaces the calibration of a model by one from new normal records.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import codecs, incident_files, input_files, served_models
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli.label_report import adopt_training_label
from deformer_stream.cli_utils import (
    HELP,
    INTERRUPTED_EXIT_CODE,
    HelpCommand,
    add_debug_option,
    is_debugging,
    stop_on_signals,
)
from deformer_stream.errors import ConfigError, InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deformer_stream.calibration.recalibrate import CalibrationStatistics, Recalibration
    from deformer_stream.calibration.seen_records import SeenRecords
    from deformer_stream.cli.calibration_review import RecordKey
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.incident_store import IncidentCalibration
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.calibration_sink import CollectedRecords
    from deformer_stream.settings import CalibrateSettings


def build_calibrate() -> click.Command:
    """Return the command `calibrate`."""
    from deformer_stream.settings import CalibrateSettings, PathText, add_options, load_settings

    @click.command("calibrate", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["calibrate"], context_settings=HELP)
    @click.argument("inputs", metavar="[INPUT...]", nargs=-1, type=PathText())
    @add_options(CalibrateSettings)
    @add_debug_option
    def calibrate(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Calibrate a model again on normal records, without training.

        INPUT is a table or log as for the command replay. Its records must be normal, and new: records that
        training or the calibration in force has used are refused, unless --seen-records says otherwise.

        With --incidents and without INPUT, only the segments of the incident budget are calibrated.

        With --review, no model is written. The records with the largest scores are listed as CSV instead, and only
        those that a person confirms as anomalies are left out by --anomalous.

        With --workers, the input is divided into shards, which several processes score. The same command continues a
        run that was interrupted.
        """
        settings = load_settings(CalibrateSettings, flags, config, "calibrate")
        input_files.check_paths(
            [*inputs, *settings.incidents],
            settings.model,
            _get_written_model(settings, has_records=bool(inputs)),
            other_inputs=() if settings.anomalous is None else (settings.anomalous,),
        )
        if inputs:
            return _calibrate_on_records(inputs, settings)
        for flag in settings.list_shard_flags():
            raise ConfigError(f"{flag} divides input into shards, but no input is given: leave it out")
        if settings.review is not None or settings.anomalous is not None:
            raise ConfigError("--review and --anomalous need INPUT, whose records they are about: add it")
        return incident_files.calibrate_incidents(settings)

    return calibrate


def _get_written_model(settings: CalibrateSettings, has_records: bool) -> dict[str, Path | None]:
    """Return the model directory that is replaced, by the option that names it; empty if none is.

    Args:
        settings: Options of `calibrate`.
        has_records: Whether records are calibrated. Otherwise one file is added to the directory of the model.
    """
    if settings.review is not None:
        return {}
    if settings.out is not None:
        return {"--out": settings.out}
    return {"--model": settings.model} if has_records else {}


def _calibrate_on_records(inputs: Sequence[str], settings: CalibrateSettings) -> int:
    """Calibrate a model on the records of tables or logs, or list these records for review.

    Args:
        inputs: Files, folders and patterns of files; `-` is standard input.
        settings: Options of `calibrate`.

    Returns:
        The exit code of the command.

    Raises:
        DeformerError: An option, a file or the model directory cannot be used.
    """
    # These imports take seconds.
    from deformer_stream import log, model_store
    from deformer_stream.calibration.recalibrate import recalibrate
    from deformer_stream.cli.calibration_records import (
        delete_shards,
        get_shards_folder,
        score_records,
        score_records_in_shards,
    )
    from deformer_stream.incident_store import read_incident_calibration

    log.configure(is_debugging())
    target = settings.out or settings.model
    model_store.check_output_directory(target)
    stop = stop_on_signals()
    models = served_models.load_model_to_calibrate(settings)
    (loaded,) = models.artifact_by_name.values()
    seen_records = model_store.read_seen_records(loaded.directory, loaded.manifest)
    incidents_before = read_incident_calibration(loaded.directory)
    settings = _choose_normal_rows(inputs, settings, models)
    is_sharded = bool(settings.list_shard_flags())
    shards_folder = get_shards_folder(target)
    if is_sharded:
        scored = score_records_in_shards(inputs, models, settings, shards_folder, stop)
    else:
        scored = score_records(inputs, models, settings, stop)
    if scored is None:
        click.echo("the calibration was interrupted, so no model was written", err=True)
        return INTERRUPTED_EXIT_CODE
    records = scored.records
    if settings.label_of_rows is not None and not len(records.max_statistics):
        raise InputError(f"no row has {settings.label} = {settings.normal}: check --label and --normal")
    selection = _select_records(records, loaded, seen_records, settings)
    if settings.review is not None:
        keys = list(compress(selection.keys, selection.is_used))
        max_statistics = records.max_statistics[selection.is_used]
        _print_review(keys, max_statistics, settings.review, shards_folder if is_sharded else None)
        return 0
    statistics = _collect_statistics(records, selection, loaded, settings)
    recalibration = recalibrate(
        loaded.calibration, statistics, settings.alpha, settings.group_by, settings.trim, settings.seed
    )
    new_fingerprints = records.fingerprints[selection.is_new]
    fingerprint, new_segments = _write_model(
        recalibration, loaded, target, settings, seen_records, new_fingerprints, incidents_before
    )
    # The new model can be the one that scored the shards. They belong to the old one, so no run could continue.
    if is_sharded:
        delete_shards(shards_folder)
    notes = [*selection.notes, scored.warning] if scored.warning else [*selection.notes]
    if settings.label_of_rows is not None:
        notes.insert(0, f"only rows with {settings.label} = {settings.normal} were used (--label, --normal)")
    written = f"the model was written to {target} (fingerprint {fingerprint})"
    _print_result(recalibration, statistics, settings.alpha, scored.num_rejected, "; ".join([written, *notes]))
    if new_segments is not None:
        incident_files.print_segments(settings, new_segments)
    return 0


def _choose_normal_rows(inputs: Sequence[str], settings: CalibrateSettings, models: ServedModels) -> CalibrateSettings:
    """Return the settings with the options `--label` and `--normal` of the training, if they select rows of the input.

    The model was trained on these rows only. Others, such as known faults, would raise the thresholds.

    Args:
        inputs: Files, folders and patterns of files; `-` is standard input.
        settings: Options of `calibrate`. If they have a label, they stay as they are.
        models: The model.
    """
    from connectors.files.open_tables import open_table_files
    from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
    from deformer_stream.tables.table import TableOptions

    adopted = adopt_training_label(settings, models)
    label = adopted.label
    if label is None or label == settings.label or "-" in inputs:
        return settings
    files = [file for file in find_data_files(inputs) if not has_ending(file, JSON_LINES)]
    tables = open_table_files(files, TableOptions.from_settings(settings, {label}))
    return adopted if any(label in table.schema.names for table in tables.values()) else settings


def _collect_statistics(
    records: CollectedRecords, selection: _RecordSelection, loaded: Artifact, settings: CalibrateSettings
) -> CalibrationStatistics:
    """Return the statistics of the selected records, from which the calibration is made.

    Args:
        records: The scored records of the input.
        selection: Those of them that are used.
        loaded: The model.
        settings: Options of `calibrate`.
    """
    from deformer_stream.calibration.recalibrate import CalibrationStatistics

    is_used = selection.is_used
    record_ids = list(compress(records.record_ids, is_used))
    if settings.order == "next":
        arrival_order = "next"
    else:
        arrival_order = records.find_arrival_order(codecs.choose_order_of_rows(loaded, settings), settings.input_order)
    return CalibrationStatistics(
        max_statistics=records.max_statistics[is_used],
        record_ids=record_ids,
        mean_neg_log_p_by_feature=records.average_neg_log_p_by_feature(loaded.scoring_model, record_ids)
        or loaded.calibration.mean_neg_log_p_by_feature,  # none of the used records has kept readings
        arrival_order=arrival_order,
        tie_policy=settings.ties or loaded.calibration.tie_policy,
        record_scores=None if records.record_scores is None else records.record_scores[is_used],
    )


def _write_model(
    recalibration: Recalibration,
    loaded: Artifact,
    target: Path,
    settings: CalibrateSettings,
    seen_records: SeenRecords | None,
    new_fingerprints: NDArray[np.uint64],
    incidents_before: IncidentCalibration | None,
) -> tuple[str, IncidentCalibration | None]:
    """Write the model with its new calibration, and with new segments for the incident budget if there is evidence.

    Args:
        recalibration: The new calibration.
        loaded: The model.
        target: The directory to write.
        settings: Options of `calibrate`.
        seen_records: Fingerprints of the records that the model has seen, None if they are not known.
        new_fingerprints: Fingerprints of the records of the new calibration.
        incidents_before: The incident calibration of the model, None if it has none.

    Returns:
        The fingerprint of the new model; and its incident calibration, None if its segments are not new.
    """
    from deformer_stream.cli.recalibration_report import write_recalibrated_model
    from deformer_stream.cli.seen_records import replace_calibration_records
    from deformer_stream.incident_store import write_incident_calibration

    segments = None
    if settings.incidents:
        # Before the model is written: its new list of seen records would not allow a repetition of a run that fails.
        segments = incident_files.collect_segments(settings, loaded.manifest, recalibration.new)
    seen_records = replace_calibration_records(seen_records, new_fingerprints)
    today = datetime.now(UTC).date()
    fingerprint = write_recalibrated_model(recalibration, loaded, target, settings.alpha, seen_records, today)
    # Its history is kept. Without new evidence, its segments belong to the calibration before.
    incidents = incidents_before
    if segments is not None:
        incidents = incident_files.replace_segments(incidents_before, fingerprint, segments)
    if incidents is not None:
        write_incident_calibration(target, incidents)
    return fingerprint, None if segments is None else incidents


@dataclass(frozen=True, slots=True)
class _RecordSelection:
    """Which of the N records of the input a calibration uses.

    Attributes:
        keys: The keys of the records, by which a person names them.
        is_new: (N,) whether the record may be used, because the model has not seen it, or by `--seen-records`.
        is_used: (N,) whether the record is used: it may be, and is not a confirmed anomaly.
        notes: Clauses for the user about the other records.
    """

    keys: list[RecordKey]
    is_new: NDArray[np.bool_]
    is_used: NDArray[np.bool_]
    notes: list[str]


def _select_records(
    records: CollectedRecords, loaded: Artifact, seen_records: SeenRecords | None, settings: CalibrateSettings
) -> _RecordSelection:
    """Select the records that a calibration uses: those that are new and are not confirmed as anomalies.

    Args:
        records: The scored records of the input.
        loaded: The model.
        seen_records: Fingerprints of the records that the model has seen, None if they are not known.
        settings: Options of `calibrate`.

    Raises:
        ConfigError: The list of `--anomalous` cannot be used.
        InputError: The model has seen records that must be new, the list does not fit the records, or no record is
            left.
    """
    from deformer_stream.cli.calibration_review import mark_kept_records, number_records
    from deformer_stream.cli.seen_records import select_new_records

    data_fingerprint = loaded.manifest["training"].get("fingerprint", "unknown")
    is_new, note = select_new_records(seen_records, records.fingerprints, settings.seen_records, data_fingerprint)
    notes = [note] if note else []
    is_used = is_new
    keys = number_records(records.record_ids)
    if settings.anomalous is not None:
        is_kept, note = mark_kept_records(keys, settings.anomalous)
        is_used = is_new & is_kept
        if not is_used.any():
            raise InputError(
                "none of the records is left to calibrate with: each was seen by the model or is confirmed by "
                "--anomalous; add new records to the input"
            )
        notes.append(note)
    return _RecordSelection(keys, is_new, is_used, notes)


def _print_review(
    keys: Sequence[RecordKey], max_statistics: NDArray[np.float64], count: int, shards_folder: Path | None
) -> None:
    """Print the records with the largest statistics as CSV (`--review`), and what to do next.

    Args:
        keys: The keys of N records.
        max_statistics: (N,) their largest anomaly scores.
        count: Largest number of records to list.
        shards_folder: The folder of the shards, which stays for the next command; None if there are no shards.
    """
    from deformer_stream.cli.calibration_review import format_review

    click.echo(format_review(keys, max_statistics, count), nl=False)
    click.echo(
        f"listed {min(count, len(keys))} of {len(keys)} records; no model was written: write yes in the column "
        "anomalous of each anomaly, and run calibrate with --anomalous FILE instead",
        err=True,
    )
    if shards_folder is not None:
        click.echo(
            f"the scored shards remain in {shards_folder}: calibrate with the same input, options and --out does not "
            "score them again, and deletes them when it has written the model",
            err=True,
        )


def _print_result(
    recalibration: Recalibration,
    statistics: CalibrationStatistics,
    alphas: Sequence[float],
    num_rejected: int,
    outcome: str,
) -> None:
    """Print the old and the new thresholds, and a last line about the model that was written.

    Args:
        recalibration: The new calibration, together with the one that it replaces.
        statistics: The records from which it was made.
        alphas: The false-alarm rates whose thresholds are printed.
        num_rejected: Number of readings of the input that were rejected.
        outcome: The end of the last line.
    """
    from deformer_stream.cli.config_report import align_columns
    from deformer_stream.counts import format_count
    from deformer_stream.report.charts import explain_missing_charts

    click.echo(align_columns([("alpha", "before", "now", "in reach?"), *recalibration.format_rows(alphas)]))
    for sentence in recalibration.describe_groups():
        click.echo(sentence)
    ties = ", with readings of the same event time scored together" if statistics.tie_policy == "hold" else ""
    rejected = f" ({format_count(num_rejected, 'reading')} refused)" if num_rejected else ""
    click.echo(
        f"calibrated on {recalibration.num_records} records in {statistics.arrival_order} order{ties}{rejected}; "
        f"{outcome}",
        err=True,
    )
    if reason := explain_missing_charts():
        click.echo(f"the report was written without charts: {reason}", err=True)
