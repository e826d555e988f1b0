"""The figures of the paper: samples, filled images, and the likelihood of digits and of other images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.auroc import compute_auroc
from deformer_stream.model.deformer import DEformer
from deformer_stream.report import charts, pages
from experiments.binarized_mnist.data import PIXELS, SIDE, make_missing_patterns, make_shifted_images
from experiments.binarized_mnist.foreign_images import make_letters, make_shapes
from experiments.completion import fill_missing
from experiments.experiment import ScoredRun, make_prepared_table
from experiments.pictures import compute_outlines, render_gallery
from experiments.score import score_in_orders
from trainer.data import Split

NUM_SAMPLES = 50
NUM_COLUMNS = 10
NUM_SAMPLE_ORDERS = 4
NUM_FILLED_IMAGES = 5
MAX_COMPARED_IMAGES = 1000
NUM_SHOWN_IMAGES = 20


def make_report(scored: ScoredRun) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the parts of the report's page, and their numbers for results.json."""
    samples, sample_blocks = _draw_samples(scored)
    separation, separation_blocks = _compare_with_other_images(scored)
    blocks = [*sample_blocks, *_show_test_images(scored), *_fill_test_images(scored), *separation_blocks]
    return blocks, {"samples": samples, "out_of_distribution": separation}


def _draw_samples(scored: ScoredRun) -> tuple[dict[str, Any], list[str]]:
    """Draw images from the model (figure 2 of the paper); return their numbers and the section that shows them."""
    images = fill_missing(scored.model, np.full((NUM_SAMPLES, PIXELS), np.nan), scored.seed, scored.should_stop)
    nll = _score_images(scored.model, images.astype(np.float32), NUM_SAMPLE_ORDERS, scored)
    order = np.argsort(nll)
    note = (
        f"NLL from {nll.min():.1f} to {nll.max():.1f} nats, mean {nll.mean():.1f} (test images: "
        f"{scored.nll.mean():.1f}), each the mean of {NUM_SAMPLE_ORDERS} orders."
    )
    title = f"{NUM_SAMPLES} samples, the likeliest first"
    return {"nll": float(nll.mean()), "count": NUM_SAMPLES}, [
        pages.render_heading("Samples"),
        pages.render_paragraph(
            "Each image was drawn pixel by pixel in a random order of its own, with the same cache of keys and values "
            "that streams use."
        ),
        render_gallery(_to_squares(images[order]) > 0, title, NUM_COLUMNS, note),
    ]


def _show_test_images(scored: ScoredRun) -> list[str]:
    """Return a gallery of test images at equal distances in the ranking from the likeliest to the least likely."""
    nll = scored.nll.mean(0)
    images = _choose_spread_images(scored.data.prepared.values[scored.rows], nll, NUM_SAMPLES)
    note = f"NLL from {nll.min():.1f} to {nll.max():.1f} nats, mean of {len(scored.nll)} orders."
    title = f"{len(images)} test images, from the likeliest to the least likely"
    return [render_gallery(_to_squares(images) > 0, title, NUM_COLUMNS, note)]


def _fill_test_images(scored: ScoredRun) -> list[str]:
    """Return the section in which 100 pixels of test images are missing and filled (figure 3 of the paper)."""
    patterns = make_missing_patterns(scored.seed)
    originals = scored.data.prepared.values[scored.rows[_choose_spread_rows(scored)]].astype(np.float64)
    masks = np.stack(list(patterns.values()))
    incomplete = np.where(masks[None], np.nan, originals[:, None]).reshape(-1, PIXELS)
    filled = fill_missing(scored.model, incomplete, scored.seed + 1, scored.should_stop)
    filled = filled.reshape(len(originals), len(masks), PIXELS)
    nothing_hidden = np.zeros(PIXELS, np.bool_)
    images, is_hidden = [], []
    for original, versions in zip(originals, filled, strict=True):
        images.append(original)
        is_hidden.append(nothing_hidden)
        for mask, version in zip(masks, versions, strict=True):
            images += [original, version]
            is_hidden += [mask, nothing_hidden]
    column_heads = ("test", *(head for name in patterns for head in (name, "filled")))
    return [
        pages.render_heading("Filling in"),
        pages.render_paragraph(
            "Of each test image 100 pixels are missing (orange) and drawn from the model given the other 684. The "
            "known pixels come first in the order, the missing ones last and in a random order. Each is a single draw, "
            "not the best of several."
        ),
        render_gallery(
            _to_squares(np.stack(images)) > 0,
            "Missing pixels, filled in",
            len(column_heads),
            is_hidden=_to_squares(np.stack(is_hidden)),
            column_heads=column_heads,
        ),
    ]


def _choose_spread_rows(scored: ScoredRun) -> NDArray[np.int64]:
    """Return indexes of test images that are spread evenly over the ranking by NLL."""
    ranked = np.argsort(scored.nll.mean(0))
    quantiles = (np.arange(NUM_FILLED_IMAGES) + 0.5) / NUM_FILLED_IMAGES
    return np.asarray(ranked[(len(ranked) * quantiles).astype(int)])


def _compare_with_other_images(scored: ScoredRun) -> tuple[dict[str, Any], list[str]]:
    """Compare the NLL of test images and of images that are no digits (figure 4 of the paper), in one order each.

    Returns:
        The mean NLL, the area under the ROC curve and the share of black pixels by kind of image, and the section that
        shows them.
    """
    num_images = min(MAX_COMPARED_IMAGES, len(scored.rows))
    chosen = np.random.default_rng([scored.seed, 0x00D]).permutation(len(scored.rows))[:num_images]
    normal_nll = scored.nll[0, chosen]
    images = scored.data.prepared.values[scored.rows[chosen]]
    foreign = {
        "letters": make_letters(num_images, scored.seed),
        "large letters": make_letters(num_images, scored.seed, SIDE),
        "shapes": make_shapes(num_images, scored.seed),
    }
    others = foreign | make_shifted_images(images, scored.seed)
    nll_by_kind = {name: _score_images(scored.model, other, 1, scored) for name, other in others.items()}
    separation = {
        name: {
            "nll": float(nll.mean()),
            "auroc": compute_auroc(normal_nll, nll),
            "black": float(others[name].mean()),
        }
        for name, nll in nll_by_kind.items()
    }
    rows = [
        [name, f"{row['nll']:.1f}", f"{row['auroc']:.4f}", f"{row['black']:.1%}"] for name, row in separation.items()
    ]
    rows.insert(0, ["test images", f"{normal_nll.mean():.1f}", "0.5000", f"{images.mean():.1%}"])
    shown = np.concatenate(
        [_choose_spread_images(other, nll_by_kind[name], NUM_SHOWN_IMAGES) for name, other in foreign.items()]
    )
    return separation | {"images": num_images}, [
        pages.render_heading("Images that are not digits"),
        pages.render_paragraph(
            f"{num_images:,} test images; as many printed letters from A to J, as large as digits and as large as the "
            "image, and outlines of triangles, squares, stars and crosses; and the test images rotated, inverted, and "
            "with their pixels permuted (by one permutation for all images). Each is scored in one random order."
        ),
        render_gallery(
            _to_squares(shown) > 0,
            "Letters and shapes, each from the likeliest to the least likely",
            NUM_COLUMNS,
        ),
        charts.draw_lines(
            compute_outlines({"test images": normal_nll} | nll_by_kind),
            "NLL, nats",
            "share of images",
            "NLL of digits and of images that are not digits",
            log_x=True,
            y_unit="%",
            show_steps=True,
        ),
        pages.render_table(
            ["images", "mean NLL, nats", "AUROC against test images", "black pixels"], rows, "Separation by NLL alone"
        ),
    ]


def _choose_spread_images(images: NDArray[np.float32], nll: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """Return at most `count` images at equal distances in the ranking from the likeliest to the least likely."""
    ranks = np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int)
    return np.asarray(images[np.argsort(nll)[ranks]])


def _score_images(
    model: DEformer, images: NDArray[np.float32], num_orders: int, scored: ScoredRun
) -> NDArray[np.float64]:
    """Return the NLL of each image in nats, (N,), averaged over random orders."""
    rows = np.arange(len(images))
    data = make_prepared_table(model.schema, images, np.full(len(images), Split.TEST, np.uint8))
    scores = score_in_orders(model, data, rows, num_orders, scored.seed, should_stop=scored.should_stop)
    return np.asarray(scores.nll.mean(0))


def _to_squares(images: NDArray[Any]) -> NDArray[Any]:
    """Return flat images, (..., 784), as squares, (N, 28, 28)."""
    return images.reshape(-1, SIDE, SIDE)
