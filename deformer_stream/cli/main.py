"""The entry points of `deformer-stream` and `deformer-replay`.

A command is built when it is first used, and imports heavy packages only when it runs, so that `--help` is printed
without delay. The docstring of the package says where each command is defined.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from deformer_stream.cli import (
    bridge,
    calibrate,
    completion,
    dead_letters,
    feedback,
    incidents,
    inspection,
    propose,
    serve,
    stream,
    tables,
)
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli.init import command as init
from deformer_stream.cli_utils import (
    HELP,
    HelpCommand,
    LazyGroup,
    add_debug_option,
    interrupt_on_termination,
    is_debugging,
    run,
    stop_on_signals,
)

SUMMARY_BY_COMMAND = {
    "init": "Look at a table or a topic, and write a configuration to start with.",
    "consume": "Score a live stream and raise alerts while records are open.",
    "replay": "Score historical logs as a stream would have been scored.",
    "calibrate": "Calibrate a model again on normal records, without training.",
    "incidents": "Make one incident of each fault, and notify receivers.",
    "serve": "Show incidents in a browser, with buttons for labels.",
    "feedback": "Say whether an incident is a real fault or a false alarm.",
    "propose": "Make a candidate calibration of incidents from labels, and show what it would change.",
    "dead-letters": "List, show or send again the messages that consume has rejected.",
    "bridge": "Pass readings from MQTT, Sparkplug B or OPC UA on to a Kafka topic.",
    "produce": "Send a table as an asynchronous stream of readings.",
    "impute": "Fill the missing values of a table, with intervals.",
    "sample": "Draw normal records from a model.",
    "inspect": "Verify a model directory and show its contents.",
    "config": "Print the options in force, with secrets masked.",
    "demo": "Simulate pumps, train for a minute, and show early alerts.",
    "completion": "Print the script that completes commands in a shell.",
}


def build_demo() -> click.Command:
    """Return the command `demo`, which trains a small model on simulated data and shows its alerts."""
    from deformer_stream.settings import DemoSettings, add_options, load_settings

    @click.command("demo", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["demo"], context_settings=HELP)
    @add_options(DemoSettings)
    @add_debug_option
    def command(config: Path | None, **flags: Any) -> int:
        """Simulate a fleet of pumps, train for a minute, and show alerts that precede the end of a record."""
        settings = load_settings(DemoSettings, flags, config, "demo")
        interrupt_on_termination()  # so that the training ends with the demo and saves its progress
        if settings.page:
            serve.check_page_packages()
            from deformer_stream import log
            from deformer_stream.demo import page_demo

            log.configure(is_debugging())
            return page_demo.run_page_demo(
                settings.output, settings.seed, settings.train_time, stop_on_signals, open_browser=sys.stdout.isatty()
            )
        from deformer_stream.demo import run as demo

        # The demo passes the training time as an option to `deformer-train`, so it is a text such as "60s".
        return demo.run_demo(settings.output, settings.seed, f"{settings.train_time:.12g}s")

    return command


BUILDER_BY_COMMAND = {
    "init": init.build_init,
    "consume": stream.build_consume,
    "replay": stream.build_replay,
    "calibrate": calibrate.build_calibrate,
    "incidents": incidents.build_incidents,
    "serve": serve.build_serve,
    "feedback": feedback.build_feedback,
    "propose": propose.build_propose,
    "dead-letters": dead_letters.build_dead_letters,
    "bridge": bridge.build_bridge,
    "produce": tables.build_produce,
    "impute": tables.build_impute,
    "sample": tables.build_sample,
    "inspect": inspection.build_inspect,
    "config": inspection.build_config,
    "demo": build_demo,
    "completion": completion.build_completion,
}


def build_group() -> click.Group:
    """Return the command `deformer-stream`, a group that contains all other commands."""
    from deformer_stream import __version__

    text = "Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete."
    group = LazyGroup(BUILDER_BY_COMMAND, SUMMARY_BY_COMMAND, name="deformer-stream", help=text, context_settings=HELP)
    click.version_option(__version__, prog_name="deformer-stream")(group)
    return group


def main() -> None:
    """Run `deformer-stream` with the arguments of the process; the entry point of the package."""
    run(build_group(), "deformer-stream")


def replay_main() -> None:
    """Run `deformer-replay` with the arguments of the process. It is the same command as `deformer-stream replay`."""
    run(stream.build_replay(), "deformer-replay")


if __name__ == "__main__":
    main()
