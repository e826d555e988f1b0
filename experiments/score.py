"""Score test records in several random orders, in small pieces so that the work can be interrupted and continued."""

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
from trainer.evaluate import evaluate_held_out
from trainer.fit import CHECKPOINT_SECONDS, Interrupted

Floats = NDArray[np.float64]

READINGS_PER_PIECE = 65_536
"""Number of readings that are scored between two checks whether to stop."""


@dataclass(frozen=True, slots=True)
class OrderScores:
    """Negative log-likelihoods in several random orders, in nats and in the model's units.

    Attributes:
        nll: (orders, N) of each of N records in each order.
        per_feature: (orders, F) mean over the records of each feature, given the features before it in the order.
    """

    nll: Floats
    per_feature: Floats


def score_in_orders(
    model: DEformer,
    data: PreparedTable,
    rows: NDArray[np.int64],
    num_orders: int,
    seed: int,
    checkpoint_folder: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    is_low_precision: bool = False,
) -> OrderScores:
    """Score records in several random orders each.

    The k-th order of a record depends only on the seed, k and the record's place in `rows`.

    Args:
        model: The model.
        data: The prepared table.
        rows: Row numbers of the records to score.
        num_orders: Number of random orders.
        seed: Seed of the orders.
        checkpoint_folder: Folder in which the progress is saved. Saved progress of the same model, rows and seed is
            continued. The caller removes the folder.
        should_stop: Returns whether to save the progress and stop.
        is_low_precision: Whether the matrix products of the layers are computed in bfloat16. Densities are computed in
            float32.

    Raises:
        Interrupted: `should_stop` returned true.
    """
    piece_size = max(1, READINGS_PER_PIECE // len(data.schema))
    starts = range(0, len(rows), piece_size)
    nll = np.full((num_orders, len(rows)), np.nan)
    per_feature = np.full((num_orders, len(starts), len(data.schema)), np.nan)
    num_done = 0
    identity = [seed, num_orders, len(rows), piece_size, _compute_digest(model, rows)]
    if checkpoint_folder is not None:
        state = checkpoint.load_state(checkpoint_folder)
        if state is not None and state["identity"] == identity:
            tensors = checkpoint.load_tensors(checkpoint_folder)
            nll, per_feature, num_done = tensors["nll"].numpy(), tensors["features"].numpy(), state["done"]

    def save() -> None:
        if checkpoint_folder is not None:
            checkpoint_folder.mkdir(parents=True, exist_ok=True)
            tensors = {"nll": torch.from_numpy(nll), "features": torch.from_numpy(per_feature)}
            checkpoint.save(checkpoint_folder, tensors, {"identity": identity, "done": num_done})

    saved_at = time.monotonic()
    pieces = [(order, start) for order in range(num_orders) for start in starts]
    with Progress("scoring", num_orders * len(rows), "records") as progress:
        for order, start in pieces[num_done:]:
            piece = rows[start : start + piece_size]
            with torch.autocast(model.device.type, torch.bfloat16, enabled=is_low_precision):
                scores = evaluate_held_out(model, data, piece, 1, seed + (1 + order) * 1_000_003 + start)
            nll[order, start : start + piece_size] = scores.nll_by_record
            per_feature[order, start // piece_size] = scores.nll_by_feature
            num_done += 1
            progress.set_done(order * len(rows) + start + len(piece))
            if should_stop():
                save()
                raise Interrupted
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                save()
                saved_at = time.monotonic()
    save()
    weights = np.array([len(rows[start : start + piece_size]) for start in starts]) / len(rows)
    return OrderScores(nll, np.einsum("kpf,p->kf", per_feature, weights))


def _compute_digest(model: DEformer, rows: NDArray[np.int64]) -> str:
    """Return a digest of the weights and the row numbers, so that progress of another model is never continued."""
    digest = hashlib.blake2b(rows.tobytes(), digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
