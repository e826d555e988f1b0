"""Tests of `replay` and `calibrate --engine ray`, which need Ray.

`make test-ray` installs it beside the tests and runs this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deformer_stream.errors import InputError
from deformer_stream.runtime.ray_tasks import RayPool
from tests.cli.shard_calibrations import compare as compare_calibrations
from tests.cli.shard_examples import ALPHA, OUTPUTS, compare, draw_readings, list_shards, write_lines
from tests.commands import RunCommand
from tests.conftest import ROOT
from tests.runtime.worker_tasks import count_attempts, prepare_tasks

pytestmark = pytest.mark.filterwarnings("default")  # Ray itself causes warnings


@pytest.fixture(scope="module", autouse=True)
def paths_of_processes() -> Iterator[None]:
    """Let processes of Ray import this checkout, and end Ray after the tests."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield
    ray.shutdown()


def make_pool(folder: Path, kind: str) -> RayPool[object]:
    return RayPool(prepare_tasks, (folder, kind), 2, lambda task: f"shard {task}")


def test_each_task_is_performed_once(tmp_path: Path) -> None:
    counts: list[int] = []
    results = dict(make_pool(tmp_path, "well").run(range(5), counts.append, lambda: False))
    assert {task: result[0] for task, result in results.items()} == {task: task * task for task in range(5)}  # type: ignore[index]
    assert count_attempts(tmp_path) == dict.fromkeys(range(5), 1)
    assert sorted(counts) == [10 + task for task in range(5)]


def test_the_task_of_a_process_that_was_killed_is_tried_again(tmp_path: Path) -> None:
    results = dict(make_pool(tmp_path, "killed once").run(range(4), lambda number: None, lambda: False))
    assert sorted(results) == [0, 1, 2, 3]
    assert count_attempts(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}


def test_errors_of_tasks_are_raised(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"task \d: the file cannot be read"):
        list(make_pool(tmp_path, "error").run(range(3), lambda number: None, lambda: False))


def test_shards_scored_by_ray_are_those_of_one_process(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / f"log-{i}.jsonl", draw_readings(100, i)) for i in range(2)]
    options = ("--model", model_dir, *ALPHA)
    compare(cli, tmp_path, inputs, options, OUTPUTS, ("--shards", "4", "--engine", "ray", "--workers", "2"))
    # Another engine continues the run.
    finished = list_shards(tmp_path / "in-shards")
    result = cli("replay", *inputs, *options, "--output-dir", tmp_path / "in-shards", *_name_outputs())
    assert "4 of 4 shards are finished" in result.err
    assert list_shards(tmp_path / "in-shards") == finished


def test_a_calibration_by_ray_is_that_of_one_process(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """The new models are equal byte by byte. Ray divides the rows among the shards, too."""
    inputs = [write_lines(tmp_path / f"log-{i}.jsonl", draw_readings(120, i)) for i in range(2)]
    shard_options = ("--shards", "4", "--engine", "ray", "--workers", "2")
    compare_calibrations(cli, tmp_path, model_dir, inputs, "--ties", "arrival", shard_options=shard_options)


def _name_outputs() -> list[str]:
    return [f"--{name}={path}" for name, path in OUTPUTS.items()]
