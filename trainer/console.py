"""The output of `deformer-train` on the terminal: the progress and the final summary."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deformer_stream import log
from deformer_stream.calibration.conformal import DEFAULT_ALPHAS
from deformer_stream.counts import format_count
from deformer_stream.model.config import PRESETS
from trainer.fit import TrainingStatus
from trainer.irregular_job import IrregularOutput
from trainer.job import TrainingOutput
from trainer.per_value import PerValueOutput
from trainer.report import describe_expected_alerts

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two log lines about the progress if standard error is not a terminal."""

LOG = log.get_logger("train")


def _round(nats: float) -> float | None:
    """Return a loss in nats, rounded to four decimals for a log line; None for NaN, which JSON cannot represent."""
    return None if math.isnan(nats) else round(nats, 4)


class ProgressDisplay:
    """A display of the training progress on standard error: a bar on a terminal, otherwise a log line every 5 seconds.

    It is a context manager that shows the bar while it is open. The training loop calls it after every step.
    """

    def __init__(self) -> None:
        self._printed_at = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0)

    def __call__(self, status: TrainingStatus) -> None:
        """Show the progress: update the bar on a terminal, otherwise write a log line every `SECONDS_BETWEEN_LINES`.

        Args:
            status: The state of the training. Its losses are NaN as long as they are not known.
        """
        if self._bar is not None:  # there is a bar only if standard error is a terminal
            validation = "" if math.isnan(status.validation_nll) else f" · validation loss {status.validation_nll:.3f}"
            description = f"epoch {status.epoch} · training loss {status.train_nll:.3f}{validation}"
            self._bar.update(self._task, completed=status.progress, description=description)
        elif time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            LOG.info(
                "training",
                step=status.step,
                epoch=status.epoch,
                progress=round(status.progress, 3),
                train=_round(status.train_nll),  # `_round` replaces NaN by None, because JSON has no NaN
                validation=_round(status.validation_nll),
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
    """Write a line of text to standard error.

    On a terminal the line is written unchanged. Otherwise a log line with the event name `training_message` is written,
    which contains the text under the key `text`.
    """
    if sys.stderr.isatty():
        Console(stderr=True).print(line, markup=False)
    else:
        LOG.info("training_message", text=line)


def _describe_model(result: TrainingOutput | IrregularOutput) -> str:
    """Return one line, such as "4 layers of 128 (preset small), no Gaussian prior; ranks records by the density".

    It contains the number of layers and their width, and the size of the Gaussian prior (mixture of Gaussians fitted
    before training). Complete records are ranked from normal to anomalous by the density. If the model has exemplars
    (stored training records), the mean distance to the nearest of them counts too. If the density of the Gaussian prior
    does, its weight is stated. The end says how many training records the alert compares open records with, if any.
    """
    config = result.model.config
    prior = f"prior of {format_count(config.gaussians, 'Gaussian')}" if config.gaussians else "no Gaussian prior"
    if config.neighbors:
        prior = f"prior of {format_count(config.process_rank, 'factor')}"
    exemplars = f"{format_count(config.exemplars, 'exemplar')} and " if config.exemplars else ""
    prior_term = f" of network and prior (weight {config.prior_weight:.2f})" if config.prior_weight else ""
    alert_terms = ["the prior alone"] if config.alert_prior else []
    if config.alert_exemplars:
        alert_terms.append(f"the distance to {format_count(config.alert_exemplars, 'training record')}")
    alert = f"; the alert also uses {' and '.join(alert_terms)}" if alert_terms else ""
    name = result.summary["preset"]["name"]
    # Another size comes from the configuration file, or from the old model that was adapted.
    has_preset_size = (config.layers, config.d_model) == (PRESETS[name].layers, PRESETS[name].d_model)
    preset = f" (preset {name})" if has_preset_size else ""
    if isinstance(result, IrregularOutput):
        process = f"process with {format_count(config.neighbors, 'neighbor')}" if config.neighbors else "no process"
        return (
            f"{format_count(config.layers, 'layer')} of {config.d_model}{preset}, {process}; contexts of "
            f"{config.context_recent} recent readings, blocks of {config.context_block}"
        )
    return (
        f"{format_count(config.layers, 'layer')} of {config.d_model}{preset}, {prior}; "
        f"ranks records by {exemplars}the density{prior_term}{alert}"
    )


def _describe_held_out(result: TrainingOutput | IrregularOutput) -> str:
    """Return the text about the likelihood of records that were not used for training."""
    if isinstance(result, IrregularOutput):
        held_out = result.held_out
        words = {"marginal": "sensor alone", "last_value": "last value", "process": "process alone"}
        baselines = ", ".join(f"{words[name]} {nll:.3f}" for name, nll in held_out.baselines.items())
        return (
            f"−ln p is {held_out.mean_nll:.3f} nats a reading ({baselines}), from "
            f"{format_count(held_out.num_readings, 'reading')} of {format_count(held_out.num_records, 'record')}"
        )
    # Context features only help to predict the others. They add nothing to the likelihood, so they are not counted.
    num_scored_features = int((~result.data.schema.is_context).sum())
    mean_nll = result.held_out.mean_nll
    return (
        f"−ln p is {mean_nll:.3f} nats a record, {mean_nll / num_scored_features:.3f} a feature, from "
        f"{format_count(len(result.held_out.nll_by_record), 'record')}"
    )


def format_summary(result: TrainingOutput | IrregularOutput) -> str:
    """Return the lines that are printed after training: quality of the model, its directory, and the next command.

    The warnings, which were printed before, are repeated at the end, because they may have scrolled away.
    """
    calibration = result.calibration
    num_used, num_available = result.summary["records_used"], result.summary["records_available"]

    def describe_count(part: str) -> str:
        """Return how many records a part used, and how many it has if these are more."""
        used, available = num_used[part], num_available[part]
        return f"{used}" if used >= available else f"{used} of {available}"

    # Alpha is the false-alarm rate. A record raises an alert if its p-value is at most alpha. The smallest p-value is
    # 1 / (number of calibration records + 1), so no record can raise an alert at a smaller alpha.
    unreachable = [f"{alpha:.3g}" for alpha in calibration.find_unreachable_alphas(DEFAULT_ALPHAS)]
    reachability = (
        f"alpha {' and '.join(unreachable)} out of reach"
        if unreachable
        else f"alpha {DEFAULT_ALPHAS[-1]:g} is in reach"
    )
    return "\n".join(
        [
            f"records      {describe_count('train')} trained on, {describe_count('validation')} for validation, "
            f"{describe_count('calibration')} for calibration ({calibration.arrival_order} order)",
            f"model        {_describe_model(result)}",
            f"alerts       {describe_expected_alerts(result.data, calibration)}",
            f"p-values     smallest {calibration.min_p_value:.2g}: {reachability}",
            f"held out     {_describe_held_out(result)} "
            f"(smaller is better; {format_count(result.training_result.steps, 'step')}, "
            f"{result.summary['seconds']:.0f} s)",
            *(f"warning      {warning['message']}" for warning in result.summary["warnings"]),
            f"written      {result.directory} ({result.fingerprint}), report {result.directory / 'report.html'}",
            f"next         deformer-stream replay TABLE --model {result.directory} --records records.parquet",
        ]
    )


def format_models_per_value(result: PerValueOutput, column: str) -> str:
    """Return the lines that are printed after the training of one model for each value of a column (`--per`).

    Args:
        result: The models.
        column: The column.
    """
    width = max(len(model.value) for model in result.models)
    lines = []
    for model in result.models:
        start = "adapted from the fleet model" if model.entry.adapted else "trained on its own records"
        held_out = "finished in an earlier run"
        if isinstance(model.output, TrainingOutput | IrregularOutput):
            held_out = _describe_held_out(model.output)
        records = format_count(model.entry.records, "record")
        lines.append(f"{model.value:<{width}}  {records}, {start}; {held_out}")
    lines += [f"warning: {column} {value!r} has no new model: {why}" for value, why in result.reason_by_value.items()]
    return "\n".join([*lines, f"written: {format_count(len(result.models), 'model')} in {result.directory}"])
