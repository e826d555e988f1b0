"""The command `deformer-train TABLE… --out DIR`.

PyTorch and other heavy modules are imported inside the command, so that `--help` and usage errors are shown at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, run
from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError
from deformer_stream.settings import add_options, load_settings
from deformer_stream.tables.discovery import TABLES, check_no_overwrite, find_data_files
from trainer.settings import TrainConfig, TrainSettings

EXAMPLES = (
    (
        "Train for at most ten minutes on the rows of a table, which are normal records:",
        "deformer-train normal.parquet --out model --max-time 10m",
    ),
    (
        "Train on the normal rows only, and leave two columns out:",
        "deformer-train pumps.parquet --out model --label fault --normal none --exclude id,operator",
    ),
    (
        "Train on windows of a minute of the readings of each device:",
        "deformer-train readings.parquet --out model --window 60s --slots 6",
    ),
    (
        "Train on long records whose sensors report at any times:",
        "deformer-train stays.parquet --out model --layout long --irregular",
    ),
    (
        "Let the alerts of a trained model name known faults, of which a table has labelled records:",
        "deformer-train --model model --faults past-faults.parquet --label fault",
    ),
    (
        "Train one model for each type of machine; types with few records start from a model of all types:",
        "deformer-train machines.parquet --out models --per type",
    ),
)
"""For each example at the end of the help, what it does and the command line."""


@click.command("deformer-train", cls=HelpCommand, examples=EXAMPLES, context_settings=HELP)
@click.argument("tables", nargs=-1, metavar="TABLE…", type=click.Path(path_type=Path))
@add_options(TrainSettings)
@add_debug_option
def command(tables: tuple[Path, ...], config: Path | None, **flags: Any) -> int:
    """Train a model on the normal records of Parquet or CSV files, folders, or quoted patterns such as 'logs/*.csv'.

    Tables have one of two layouts. Wide: a row is a record, and a null is a reading that was not observed. Long: a
    row is one reading, with columns record, feature, value and perhaps time. Whether a column holds measurements or
    labels, or only identifies rows, is inferred and printed; --dry-run shows it without training.

    The model directory contains the weights, the calibration of the alerts, and a report to open in a browser. The file
    given by --config may also set hyperparameters of the model (d_model, layers, …) and of training (learning_rate,
    batch, …).

    Standard output receives the result: the table of features and the summary. Standard error receives the progress
    and the log, as JSON lines unless it is a terminal. So `deformer-train … > result.txt 2> log.jsonl` separates them.
    """
    started = time.monotonic()
    # If the process did other work before (as tests do), its age is not the time of this command.
    is_fresh_process = "torch" not in sys.modules
    if not tables:
        return _learn_faults(flags, config)
    if flags.get("model") is not None:
        raise ConfigError(
            "--model cannot be combined with TABLE, because nothing is trained: name the labelled records with --faults"
        )
    settings = load_settings(TrainConfig, flags, config, "train")
    find_data_files(tables, TABLES)  # reports a wrong path before PyTorch is imported
    if settings.faults not in (None, "off"):
        find_data_files([Path(str(settings.faults))], TABLES)
    if settings.dry_run:
        from trainer.preview import print_preview

        print_preview(tables, settings)
        return 0
    _check_no_overwrite(tables, settings)
    from deformer_stream import log

    log.configure(is_debugging())
    from trainer import console
    from trainer.budget import TimeBudget, read_process_age
    from trainer.distributed import join_process_group
    from trainer.feature_table import print_features
    from trainer.fit import Interrupted
    from trainer.irregular_job import train_irregular
    from trainer.job import StopSignals, run_worker_rank, train

    with join_process_group() as ranks, StopSignals() as stop_signals, console.ProgressDisplay() as display:
        seconds_so_far = time.monotonic() - started
        if is_fresh_process:
            seconds_so_far = max(seconds_so_far, read_process_age())
        budget = TimeBudget(settings.max_time, ranks.read_clock, spent=ranks.broadcast(seconds_so_far))
        try:
            if settings.per is not None:
                from trainer.per_value import train_per_value

                trained = train_per_value(
                    tables,
                    settings,
                    on_status=display,
                    on_message=console.print_line,
                    should_stop=stop_signals,
                    budget=budget,
                    ranks=ranks,
                )
                click.echo(console.format_models_per_value(trained, settings.per))
                return 0
            if not ranks.is_first and not settings.irregular:
                run_worker_rank(tables, settings, stop_signals, budget, ranks)
                return 0
            run_job = train_irregular if settings.irregular else train
            output = run_job(
                tables,
                settings,
                on_prepared=print_features,
                on_status=display,
                on_message=console.print_line,
                should_stop=stop_signals,
                budget=budget,
                ranks=ranks,
            )
        except Interrupted:
            click.echo(
                "deformer-train: training was stopped and its progress is saved; "
                f"run the same command with --resume to continue the training of {settings.out}",
                err=True,
            )
            return 128 + stop_signals.received  # the shell's exit status of a process that a signal ended
    click.echo(console.format_summary(output))
    return 0


def _check_no_overwrite(tables: Sequence[Path], settings: TrainConfig) -> None:
    """Check that no model directory that is replaced holds a table that is read.

    Args:
        tables: The tables to train on.
        settings: The options, which name the directory, or the folder of those of several models.

    Raises:
        ConfigError: One does.
    """
    replaced = [settings.out]
    if settings.per is not None:
        replaced = [manifest.parent for manifest in settings.out.glob("*/manifest.json")]
    for directory in replaced:
        check_no_overwrite(tables, {"--out": directory})
        if settings.faults not in (None, "off"):  # it can be one of the tables
            check_no_overwrite([Path(str(settings.faults))], {"--out": directory})


def _learn_faults(flags: dict[str, Any], config: Path | None) -> int:
    """Add the names of faults to the model of `--model`, print what was learnt, and return the exit status.

    Args:
        flags: The options of the command line by name, None if not set.
        config: The configuration file.

    Raises:
        UsageError: There is no `--model`, so that TABLE is missing.
        DeformerError: A file or an option cannot be used.
    """
    # The model directory is --model, and not the --out of the environment or of the file.
    settings = load_settings(TrainConfig, flags | {"out": flags.get("out") or Path("model")}, config, "train")
    if settings.model is None:
        raise click.UsageError("Missing argument 'TABLE…'.")
    for name in ("out", "per", "init_from", "resume", "dry_run", "max_time"):
        if flags.get(name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"--model cannot be combined with {option}, because nothing is trained: leave it out")
    if settings.faults in (None, "off"):
        raise ConfigError("--model needs --faults: name the table with the labelled records of known faults")
    faults = Path(str(settings.faults))
    find_data_files([faults], TABLES)  # reports a wrong path before PyTorch is imported
    check_no_overwrite([faults], {"--model": settings.model})
    from deformer_stream import log

    log.configure(is_debugging())
    from deformer_stream.codec.alert_text import make_printable
    from trainer.console import print_line
    from trainer.faults import learn_faults

    classifier = learn_faults([faults], settings.model, settings, print_line)
    if classifier is not None:
        for name, count in classifier.num_records_by_fault.items():
            click.echo(f"{make_printable(name)}: {format_count(count, 'labelled record')}")
        click.echo(f"{settings.model} names {format_count(len(classifier.names), 'fault')}; its scores are unchanged")
    return 0


def main() -> None:
    """Run `deformer-train` with the command-line arguments of this process, and exit with its status."""
    run(command, "deformer-train")


if __name__ == "__main__":
    main()
