"""`deformer-train TABLE… --out DIR`. Heavy imports wait until there is something to train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from deformer_stream.cli_utils import debug_option, debugging, run
from deformer_stream.settings import load, options
from trainer.settings import TrainConfig, TrainSettings


@click.command(name="deformer-train", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tables", nargs=-1, required=True, metavar="TABLE…", type=click.Path(path_type=Path))
@options(TrainSettings)
@debug_option
def command(tables: tuple[Path, ...], config: Path | None, **flags: Any) -> int:
    """Train a model on the normal records of Parquet files or folders.

    A row is a record and a null is "not observed" (wide), or a row is one reading (long). The kinds of columns are
    inferred and printed. The model directory holds weights, calibration and a report to open in a browser. The file of
    --config may also set hyperparameters of the model (d_model, layers, …) and of training (learning_rate, batch, …).
    """
    began = time.monotonic()
    settings = load(TrainConfig, flags, config, "train")
    from deformer_stream import log

    log.configure(debugging())
    from trainer import console
    from trainer.budget import Budget
    from trainer.distributed import joined
    from trainer.fit import Interrupted
    from trainer.job import StopSignals, assist, train

    with joined() as peers, StopSignals() as stop, console.ProgressDisplay() as watch:
        budget = Budget(settings.max_time, peers.clock, spent=peers.agree(time.monotonic() - began))
        try:
            if not peers.first:
                assist(tables, settings, stop, budget, peers)
                return 0
            result = train(
                tables,
                settings,
                show=console.show_kinds,
                observe=watch,
                say=console.say,
                stop=stop,
                budget=budget,
                peers=peers,
            )
        except Interrupted:
            click.echo(f"deformer-train: stopped, progress is kept; add --resume to continue {settings.out}", err=True)
            return 128 + stop.received
    click.echo(console.summary(result))
    return 0


def main() -> None:
    """Entry point of `deformer-train`."""
    run(command, "deformer-train")


if __name__ == "__main__":
    main()
