"""`deformer-train TABLE… --out DIR`. Heavy imports wait until there is something to train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from deformer_stream.cli_utils import add_debug_option, is_debugging, run
from deformer_stream.settings import add_options, load_settings
from trainer.settings import TrainConfig, TrainSettings


@click.command(name="deformer-train", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tables", nargs=-1, required=True, metavar="TABLE…", type=click.Path(path_type=Path))
@add_options(TrainSettings)
@add_debug_option
def command(tables: tuple[Path, ...], config: Path | None, **flags: Any) -> int:
    """Train a model on the normal records of Parquet files or folders.

    A row is a record and a null is "not observed" (wide), or a row is one reading (long). The kinds of columns are
    inferred and printed. The model directory holds weights, calibration and a report to open in a browser. The file of
    --config may also set hyperparameters of the model (d_model, layers, …) and of training (learning_rate, batch, …).
    """
    began = time.monotonic()
    settings = load_settings(TrainConfig, flags, config, "train")
    from deformer_stream import log

    log.configure(is_debugging())
    from trainer import console
    from trainer.budget import TimeBudget
    from trainer.distributed import join_process_group
    from trainer.fit import Interrupted
    from trainer.job import StopSignals, run_worker_rank, train

    with join_process_group() as peers, StopSignals() as stop, console.ProgressDisplay() as watch:
        budget = TimeBudget(settings.max_time, peers.read_clock, spent=peers.broadcast(time.monotonic() - began))
        try:
            if not peers.is_first:
                run_worker_rank(tables, settings, stop, budget, peers)
                return 0
            result = train(
                tables,
                settings,
                on_prepared=console.print_features,
                on_status=watch,
                on_message=console.print_line,
                should_stop=stop,
                budget=budget,
                ranks=peers,
            )
        except Interrupted:
            click.echo(f"deformer-train: stopped, progress is kept; add --resume to continue {settings.out}", err=True)
            return 128 + stop.received
    click.echo(console.format_summary(result))
    return 0


def main() -> None:
    """Entry point of `deformer-train`."""
    run(command, "deformer-train")


if __name__ == "__main__":
    main()
