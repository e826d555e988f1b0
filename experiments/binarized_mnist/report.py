"""The paper's figures: samples by NLL, filled-in images, NLL of digits and of what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer
from deformer_stream.report import charts, html
from experiments.binarized_mnist.data import PIXELS, SIDE, gaps, shifted
from experiments.complete import complete
from experiments.experiment import TEST, Scored, in_memory
from experiments.pictures import gallery, outlines
from experiments.score import auroc, in_orders

SAMPLES, COLUMNS = 50, 10
SAMPLE_ORDERS = 4
FILLED = 5
SHIFTED = 1000


def report(scored: Scored) -> tuple[list[str], dict[str, Any]]:
    """Blocks of the page, and what they say as numbers."""
    samples, sample_blocks = _samples(scored)
    separated, histogram = _out_of_distribution(scored)
    blocks = [*sample_blocks, *_test_images(scored), *_filled(scored), *histogram]
    return blocks, {"samples": samples, "out_of_distribution": separated}


def _samples(scored: Scored) -> tuple[dict[str, Any], list[str]]:
    """Figure 2 of the paper."""
    drawn = complete(scored.model, np.full((SAMPLES, PIXELS), np.nan), scored.seed, scored.stop)
    nll = _nll(scored.model, drawn.astype(np.float32), SAMPLE_ORDERS, scored)
    order = np.argsort(nll)
    note = (
        f"NLL from {nll.min():.1f} to {nll.max():.1f} nats, mean {nll.mean():.1f} (test images: "
        f"{scored.nll.mean():.1f}), each the mean of {SAMPLE_ORDERS} orders."
    )
    title = f"{SAMPLES} samples, the likeliest first"
    return {"nll": float(nll.mean()), "count": SAMPLES}, [
        html.heading("Samples"),
        html.paragraph(
            "Each image was drawn pixel by pixel in a random order of its own, through the cache that streams use."
        ),
        gallery(_square(drawn[order]) > 0, title, COLUMNS, note),
    ]


def _test_images(scored: Scored) -> list[str]:
    """As many test images, evenly from the likeliest to the least likely."""
    nll = scored.nll.mean(0)
    ranked = np.argsort(nll)
    chosen = ranked[np.linspace(0, len(ranked) - 1, min(SAMPLES, len(ranked))).round().astype(int)]
    images = _square(scored.data.prepared.values[scored.rows[chosen]]) > 0
    note = f"NLL from {nll.min():.1f} to {nll.max():.1f} nats, mean of {len(scored.nll)} orders."
    title = f"{len(chosen)} test images, from the likeliest to the least likely"
    return [gallery(images, title, COLUMNS, note)]


def _filled(scored: Scored) -> list[str]:
    """Figure 3: 100 pixels taken away and drawn jointly given the other 684."""
    patterns = gaps(scored.seed)
    originals = scored.data.prepared.values[scored.rows[_spread(scored)]].astype(np.float64)
    masks = np.stack(list(patterns.values()))
    holed = np.where(masks[None], np.nan, originals[:, None]).reshape(-1, PIXELS)
    drawn = complete(scored.model, holed, scored.seed + 1, scored.stop).reshape(len(originals), len(masks), PIXELS)
    nothing = np.zeros(PIXELS, np.bool_)
    images, hidden = [], []
    for original, fills in zip(originals, drawn, strict=True):
        images += [original]
        hidden += [nothing]
        for mask, fill in zip(masks, fills, strict=True):
            images += [original, fill]
            hidden += [mask, nothing]
    heads = ("test", *(head for name in patterns for head in (name, "filled")))
    return [
        html.heading("Filling in"),
        html.paragraph(
            "Of each test image 100 pixels are taken away (orange) and drawn from the model given the other 684: the "
            "known pixels come first in the order, the missing ones last, in a random order. One draw, not the best of "
            "several."
        ),
        gallery(
            _square(np.stack(images)) > 0, "Missing pixels, filled in", len(heads),
            hidden=_square(np.stack(hidden)), heads=heads,
        ),
    ]  # fmt: skip


def _spread(scored: Scored) -> NDArray[np.int64]:
    """Some test images from all over the range of NLL."""
    ranked = np.argsort(scored.nll.mean(0))
    return np.asarray(ranked[(len(ranked) * (np.arange(FILLED) + 0.5) / FILLED).astype(int)])


def _out_of_distribution(scored: Scored) -> tuple[dict[str, Any], list[str]]:
    """Figure 4, with what digits turn into in place of letters: one order each."""
    count = min(SHIFTED, len(scored.rows))
    chosen = np.random.default_rng([scored.seed, 0x00D]).permutation(len(scored.rows))[:count]
    groups = {"test images": scored.nll[0, chosen]}
    images = scored.data.prepared.values[scored.rows[chosen]]
    for name, others in shifted(images, scored.seed).items():
        groups[name] = _nll(scored.model, others, 1, scored)
    normal = groups["test images"]
    separated = {
        name: {"nll": float(nll.mean()), "auroc": auroc(normal, nll)}
        for name, nll in groups.items()
        if nll is not normal
    }
    rows = [[name, f"{row['nll']:.1f}", f"{row['auroc']:.4f}"] for name, row in separated.items()]
    return separated | {"images": count}, [
        html.heading("What is no digit"),
        html.paragraph(
            f"{count:,} test images and the same images rotated, inverted, and with their pixels permuted (by one "
            "permutation for all), each scored in one random order."
        ),
        charts.line_chart(
            outlines(groups),
            "NLL, nats",
            "share of images",
            "NLL of digits and of what is none",
            log_x=True,
            y_unit="%",
            steps=True,
        ),
        html.table(["images", "mean NLL, nats", "AUROC against test images"], rows, "Told apart by their NLL alone"),
    ]


def _nll(model: DEformer, images: NDArray[np.float32], orders: int, scored: Scored) -> NDArray[np.float64]:
    """(N,) mean over orders."""
    rows = np.arange(len(images))
    data = in_memory(model.schema, images, np.full(len(images), TEST, np.uint8))
    return np.asarray(in_orders(model, data, rows, orders, scored.seed, stop=scored.stop).nll.mean(0))


def _square(images: NDArray[Any]) -> NDArray[Any]:
    return images.reshape(-1, SIDE, SIDE)
