"""What a person sees while a model is trained: kinds, progress, summary."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deformer_stream import log
from deformer_stream.calibration.conformal import DEFAULT_ALPHAS
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from trainer.data import PreparedTable
from trainer.fit import TrainingStatus
from trainer.job import TrainingOutput
from trainer.report import describe

LINE_SECONDS = 5.0
LOG = log.get("train")


def print_features(data: PreparedTable) -> None:
    """The table of features on standard output."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    table = Table("feature", "kind", "values in training", "resolution", "why", "missing", box=None, pad_edge=False)
    for feature in collapse_time_slots(data.schema).features:
        missing = data.missing_by_feature.get(feature.name, 0)
        table.add_row(feature.name, *describe(feature), feature.reason, str(missing) if missing else "")
    for column in data.excluded_columns:
        table.add_row(column.name, "left out", "", "", column.reason, "")
    console.print(table, markup=False)
    if said := describe_records(data.schema):
        console.print(said, markup=False)
    for name, count in data.infinite_by_feature.items():
        console.print(f"{name}: {count} infinite readings refused", markup=False)
    for reason, count in data.skipped_by_reason.items():
        console.print(f"left out: {count} {reason}", markup=False)


def _rounded(nats: float) -> float | None:
    """JSON has no word for a number that is not known yet."""
    return None if math.isnan(nats) else round(nats, 4)


class ProgressDisplay:
    """A bar on a terminal, a log line every few seconds otherwise; a context manager, called with every status."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[words]}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("training", total=1.0, words="")

    def __call__(self, status: TrainingStatus) -> None:
        if self._bar is not None:
            known = "" if math.isnan(status.validation_nll) else f" · validation {status.validation_nll:.3f} nats"
            words = f"epoch {status.epoch} · train {status.train_nll:.3f}{known}"
            self._bar.update(self._task, completed=status.progress, words=words)
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            LOG.info(
                "training",
                step=status.step,
                epoch=status.epoch,
                progress=round(status.progress, 3),
                train=_rounded(status.train_nll),
                validation=_rounded(status.validation_nll),
            )

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_line(line: str) -> None:
    """One line about what happens."""
    if sys.stderr.isatty():
        Console(stderr=True).print(line, markup=False)
    else:
        LOG.info(line)


def _described(result: TrainingOutput) -> str:
    config, kept = result.model.config, result.model.config.exemplars
    guide = f"guided by {config.gaussians} Gaussian{'s' * (config.gaussians != 1)}" if config.gaussians else "no guide"
    ranks = f"ranks records by {kept} exemplars and the density" if kept else "ranks records by the density"
    return f"{config.layers} layers of {config.d_model}, {guide}; {ranks}"


def format_summary(result: TrainingOutput) -> str:
    """The last lines: what the model is worth, where it is, what to do next."""
    rows, calibration, held = result.summary["rows"], result.calibration, result.held_out
    scored = int((~result.data.schema.is_context).sum())
    p = calibration.min_p_value
    beyond = [f"{alpha:.3g}" for alpha in calibration.find_unreachable_alphas(DEFAULT_ALPHAS)]
    reach = f"alpha {' and '.join(beyond)} out of reach" if beyond else f"alpha {DEFAULT_ALPHAS[-1]:g} is in reach"
    return "\n".join(
        [
            f"records      {rows['train']} trained on, {rows['validation']} for validation, "
            f"{rows['calibration']} for calibration ({calibration.arrival_order} order)",
            f"model        {_described(result)}",
            f"held out     {held.mean_nll:.3f} nats a record, {held.mean_nll / scored:.3f} a feature "
            f"({result.training_result.steps} steps, {result.summary['seconds']:.0f} s)",
            f"p-values     smallest {p:.2g}: {reach}",
            f"written      {result.directory} ({result.fingerprint}), report {result.directory / 'report.html'}",
            f"next         deformer-stream replay TABLE --model {result.directory} --records records.parquet",
        ]
    )
