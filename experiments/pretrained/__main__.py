"""Train the pretrained model on synthetic tables, or continue a stored run.

    python -m experiments.pretrained --out pretrained --steps 10000

The run in --out is continued if there is one. `python -m benchmarks.pretrained` compares it on the development sets.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the stored run.")
@click.option("--steps", type=click.IntRange(1), default=10_000, show_default=True, help="Steps of the whole run.")
@click.option("--pause-after", type=float, default=None, help="Seconds after which the run is stored and ends.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of tables and weights.")
def main(out: Path, steps: int, pause_after: float | None, seed: int) -> None:
    """Train on synthetic tables, or continue to train."""
    from experiments.pretrained.training import STATE_FILE, Run, TrainingSettings, train

    run = Run(TrainingSettings(seed=seed), out)
    if (out / STATE_FILE).exists():
        run.restore()
    train(run, steps, click.echo, pause_after=pause_after)


if __name__ == "__main__":
    main()
