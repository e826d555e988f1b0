"""The command `python -m experiments.NAME`, which is the same for every experiment.

Heavy packages are imported when the experiment runs, so `--help` answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli_utils import HELP, add_debug_option, is_debugging, run
from deformer_stream.settings import add_options, load_settings
from experiments.options import ExperimentSettings

if TYPE_CHECKING:
    from experiments.experiment import Experiment

CONFIG_TABLE = "experiment"
"""The table of an experiment's options in a configuration file."""


def main(name: str, summary: str, import_experiment: Callable[[], Experiment]) -> None:
    """Run `python -m experiments.{name}` with the arguments of the process, and end the process.

    Args:
        name: Name of the experiment's package.
        summary: Help text of the command.
        import_experiment: Imports and returns the experiment.
    """
    program = f"python -m experiments.{name}"

    @click.command(name=program, help=summary, context_settings=HELP)
    @add_options(ExperimentSettings)
    @add_debug_option
    def command(config: Path | None, **flags: Any) -> int:
        return run_command(import_experiment, load_settings(ExperimentSettings, flags, config, CONFIG_TABLE))

    run(command, program)


def run_command(import_experiment: Callable[[], Experiment], settings: ExperimentSettings) -> int:
    """Run an experiment until it is complete or must pause, print its results, and return the exit code.

    The exit code is 0 if the experiment is complete or `--pause-after` has passed, else 128 plus the signal's number.
    """
    started_at = time.monotonic()
    from deformer_stream import log

    log.configure(is_debugging())
    from experiments import run as runner
    from trainer import console
    from trainer.fit import Interrupted
    from trainer.job import StopSignals

    with StopSignals() as signals, console.ProgressDisplay() as display:

        def should_stop() -> bool:
            limit = settings.pause_after
            return signals() or (limit is not None and time.monotonic() - started_at > limit)

        try:
            outcome = runner.run_experiment(
                import_experiment(),
                settings,
                report_progress=console.print_line,
                observe_step=display,
                should_stop=should_stop,
            )
        except Interrupted:
            click.echo(f"stopped; progress is saved in {settings.out}: add --resume to continue", err=True)
            return 128 + signals.received if signals.received else 0
    test = outcome.results["test"]
    scored = f"{test['records']} of {test['of']} test records, {test['orders']} orders"
    click.echo(f"test NLL   {test['nll']:.3f} nats ({scored})")
    click.echo(f"training   {outcome.results['seconds']:.0f} s, {outcome.results['steps']} steps")
    click.echo(f"results    {outcome.directory / runner.RESULTS}")
    click.echo(f"model      {outcome.directory / runner.MODEL} (contains report.html)")
    return 0
