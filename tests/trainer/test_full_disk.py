"""Tests of the files of a training run on a full disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deformer_stream.errors import Unavailable
from trainer import checkpoint
from trainer.array_files import create_array_file


def test_disk_space_is_allocated_before_an_array_is_written(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    values = create_array_file(path, np.float32, (1000, 100))
    assert path.stat().st_blocks * 512 >= path.stat().st_size > values.nbytes == 400_000
    assert not values.any()


def test_full_disk_is_reported_for_an_array(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"values\.npy: writing failed \(.*\); free disk space"):
        create_array_file(tmp_path / "values.npy", np.float32, (2**40, 2**20))


def test_full_disk_is_reported_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / (checkpoint.FILE_NAME + ".partial")).symlink_to("/dev/full")
    with pytest.raises(Unavailable, match=r"safetensors: writing failed \(No space left on device\); free disk space"):
        checkpoint.save(tmp_path, {"weight": torch.zeros(3)}, {"step": 1})
    assert checkpoint.load_state(tmp_path) is None
