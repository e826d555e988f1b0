"""`python -m experiments.NAME`: one command for every experiment. Heavy imports wait until there is work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli_utils import HELP, debug_option, debugging, run
from deformer_stream.settings import load, options
from experiments.options import ExperimentSettings

if TYPE_CHECKING:
    from experiments.experiment import Experiment

SECTION = "experiment"


def main(name: str, summary: str, experiment: Callable[[], Experiment]) -> None:
    """Run `python -m experiments.{name}` with the process's arguments. experiment: imports and returns it."""
    program = f"python -m experiments.{name}"

    @click.command(name=program, help=summary, context_settings=HELP)
    @options(ExperimentSettings)
    @debug_option
    def command(config: Path | None, **flags: Any) -> int:
        return carry_out(experiment, load(ExperimentSettings, flags, config, SECTION))

    run(command, program)


def carry_out(experiment: Callable[[], Experiment], settings: ExperimentSettings) -> int:
    """Run it to the end or to the next pause; returns the exit code."""
    began = time.monotonic()
    from deformer_stream import log

    log.configure(debugging())
    from experiments import run as runner
    from trainer import console
    from trainer.fit import Interrupted
    from trainer.job import StopSignals

    with StopSignals() as signals, console.ProgressDisplay() as watch:

        def stop() -> bool:
            pause = settings.pause_after
            return signals() or (pause is not None and time.monotonic() - began > pause)

        try:
            outcome = runner.run(experiment(), settings, say=console.say, observe=watch, stop=stop)
        except Interrupted:
            click.echo(f"stopped, progress is kept; add --resume to continue {settings.out}", err=True)
            return 128 + signals.received if signals.received else 0
    test = outcome.results["test"]
    scored = f"{test['records']} of {test['of']} test records, {test['orders']} orders"
    click.echo(f"test NLL   {test['nll']:.3f} nats ({scored})")
    click.echo(f"training   {outcome.results['seconds']:.0f} s, {outcome.results['steps']} steps")
    click.echo(f"results    {outcome.directory / runner.RESULTS}")
    click.echo(f"model      {outcome.directory / runner.MODEL} (report.html is there too)")
    return 0
