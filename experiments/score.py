"""The final figure: the NLL of every test record in several random orders, in pieces, so that it can be interrupted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer
from deformer_stream.progress import Progress
from trainer import checkpoint
from trainer.data import PreparedTable
from trainer.evaluate import held_out
from trainer.fit import CHECKPOINT_SECONDS, Interrupted

Floats = NDArray[np.float64]
PIECE_READINGS = 65_536
"""Readings scored between two looks at whether to stop."""


@dataclass(frozen=True, slots=True)
class OrderScores:
    """nll: (orders, N) −ln p of each record in each order, nats, the model's units. per_feature: (orders, F) means."""

    nll: Floats
    per_feature: Floats


def in_orders(
    model: DEformer,
    data: PreparedTable,
    rows: NDArray[np.int64],
    orders: int,
    seed: int,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> OrderScores:
    """Score the rows in `orders` random orders each; the k-th order of a row depends on seed, k and its place alone.

    folder: keeps what is done, and is continued from where it holds the same rows and seed of the same model; the
    caller removes it. Raises `Interrupted` when `stop` says so.
    """
    size = max(1, PIECE_READINGS // len(data.schema))
    starts = range(0, len(rows), size)
    nll = np.full((orders, len(rows)), np.nan)
    features = np.full((orders, len(starts), len(data.schema)), np.nan)
    done = 0
    identity = [seed, orders, len(rows), size, _digest(model, rows)]
    state = checkpoint.load_state(folder) if folder is not None else None
    if folder is not None and state is not None and state["identity"] == identity:
        tensors = checkpoint.load_tensors(folder)
        nll, features, done = tensors["nll"].numpy(), tensors["features"].numpy(), state["done"]

    def save() -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {"nll": torch.from_numpy(nll), "features": torch.from_numpy(features)}
            checkpoint.save(folder, tensors, {"identity": identity, "done": done})

    saved = time.monotonic()
    with Progress("scoring", orders * len(rows), "records") as progress:
        for k, start in [(k, start) for k in range(orders) for start in starts][done:]:
            piece = rows[start : start + size]
            held = held_out(model, data, piece, 1, seed + (1 + k) * 1_000_003 + start)
            nll[k, start : start + size] = held.nll
            features[k, start // size] = held.per_feature
            done += 1
            progress.reach(done * size)
            if stop():
                save()
                raise Interrupted
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                save()
                saved = time.monotonic()
    save()
    weights = np.array([len(rows[start : start + size]) for start in starts]) / len(rows)
    return OrderScores(nll, np.einsum("kpf,p->kf", features, weights))


def _digest(model: DEformer, rows: NDArray[np.int64]) -> str:
    """Tells weights and rows apart."""
    digest = hashlib.blake2b(rows.tobytes(), digest_size=8)
    for p in model.parameters():
        digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def auroc(normal: Floats, shifted: Floats) -> float:
    """P(a shifted record has a larger NLL than a normal one), ties counting half."""
    ordered = np.sort(normal)
    below = np.searchsorted(ordered, shifted, "left") + np.searchsorted(ordered, shifted, "right")
    return float(below.mean() / 2 / len(normal))
