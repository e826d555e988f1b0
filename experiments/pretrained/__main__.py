"""Train the pretrained model on synthetic tables, or evaluate it on the development sets.

    python -m experiments.pretrained train --out pretrained --steps 10000
    python -m experiments.pretrained evaluate --out pretrained

Training continues the stored run in --out, if there is one. `evaluate` needs DEFORMER_DATA and scikit-learn, see
`experiments.pretrained.evaluation`.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.group(help=__doc__)
def main() -> None:
    """Run the program."""


@main.command("train")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the stored run.")
@click.option("--steps", type=click.IntRange(1), default=10_000, show_default=True, help="Steps of the whole run.")
@click.option("--pause-after", type=float, default=None, help="Seconds after which the run is stored and ends.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of tables and weights.")
def train_command(out: Path, steps: int, pause_after: float | None, seed: int) -> None:
    """Train on synthetic tables, or continue to train."""
    from experiments.pretrained.training import STATE_FILE, Run, TrainingSettings, train

    run = Run(TrainingSettings(seed=seed), out)
    if (out / STATE_FILE).exists():
        run.restore()
    train(run, steps, click.echo, pause_after=pause_after)


@main.command("evaluate")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the stored run.")
@click.option("--tables", default="", help="Comma-separated names of development sets; all by default.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of splits and orders.")
@click.option("--untrained", is_flag=True, help="Use initial weights in place of the stored ones.")
@click.option("--smoothing", type=float, default=0.0, show_default=True, help="Noise on all values, in deviations.")
@click.option("--rows", type=click.IntRange(1), default=2000, show_default=True, help="Largest number of scored rows.")
def evaluate_command(out: Path, tables: str, seed: int, untrained: bool, smoothing: float, rows: int) -> None:
    """Compare the densities with those of the guide on the development sets."""
    from experiments.pretrained.evaluation import evaluate

    evaluate(out, tables, seed, untrained, smoothing, rows)


if __name__ == "__main__":
    main()
