"""How a block of tied readings is judged: over several of its orders, so that none of them counts more.

Of a block b after a past s, with K of its orders o (`MOST_ORDERS`, the canonical one first, in pairs of an order and
its reverse; the one pair that two readings have):

    ln p(b | s) = logmeanexp_o Σ_i ln p(b_i | s, those before i in o)

a proper mixture of K densities. A reading's ln p is its mean over the orders and an equal share of what the mixture
adds. What the alert goes by is symmetric, too: a reading's p-value is the smallest that it has in any of the orders, as
a rule one in which many of the others have come before it; calibration takes the same. The canonical order is the past
of what follows. Context stands first in every order, for it conditions and is not judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.records import Records

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_ORDERS = 4
"""Eight said the same of records at twice the cost (docs/experiments.md)."""

Judge = Callable[[Ints, Ints, Ints, Ints, Floats], Floats]
"""What the network says of B branches that leave the logs of slots (B,) at places (B,), with so many readings each,
(B,); codes and raw values (T,) of all, one branch after the other: ln p, ln of the p-value and excess, (3, T)."""


def orders(record: str, codes: Ints, given: int) -> Ints:
    """Orders of a block besides the canonical one, (K − 1, m). codes: (m,), of which the first `given` keep their
    places. They depend on the record's id and the codes only."""
    n = len(codes) - given
    if n <= 2:
        drawn = np.arange(n)[None, ::-1][: n - 1]
    else:
        text = record.encode("utf-8", "surrogatepass") + b"\0" + codes.astype(">i8").tobytes()
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))
        some = np.stack([np.arange(n), *(rng.permutation(n) for _ in range(MOST_ORDERS // 2 - 1))])
        drawn = np.concatenate([some[1:], some[:, ::-1]])
    return np.concatenate([np.tile(np.arange(given), (len(drawn), 1)), drawn + given], 1)


def symmetric(records: Records, slot: Ints, place: Ints, tied: Bools, found: Floats, judge: Judge) -> Floats:
    """What is said of M readings, (3, M): ln p, ln of the p-value and excess, the same for every order of a block.

    The readings are whole blocks in canonical order, (M,) each: slot, place, and whether a reading goes with the one
    before it. found: (3, M), in that order."""
    begin = np.flatnonzero(~tied)
    size = np.diff(np.append(begin, len(tied)))
    codes = records.log_feature[slot, place].astype(np.int64)
    context = records.schema.context[codes]
    given = np.add.reduceat(context.astype(np.int64), begin)
    blocks = np.flatnonzero(size - given > 1)
    if not len(blocks):
        return found
    rows, count = [], np.ones(len(begin), np.int64)
    for one in blocks.tolist():
        at, m = int(begin[one]), int(size[one])
        drawn = orders(records.ids[slot[at]], codes[at : at + m], int(given[one]))
        count[one] += len(drawn)
        rows.append((drawn + at).ravel())
    row, branch = np.concatenate(rows), np.repeat(blocks, count[blocks] - 1)
    where = records.log_value[slot[row], place[row]]
    first, length = begin[branch], size[branch]
    more = judge(slot[first], place[first], length, codes[row], where)
    out = found.copy()
    for kind in (0, 2):
        np.add.at(out[kind], row, more[kind])
    np.minimum.at(out[1], row, more[1])
    block = np.cumsum(~tied) - 1
    out[[0, 2]] /= count[block]
    together = np.add.reduceat(np.where(context, 0.0, found[0]), begin)
    other = np.add.reduceat(np.where(context[row], 0.0, more[0]), np.cumsum(length) - length)
    np.logaddexp.at(together, branch, other)
    together -= np.log(count)
    together -= np.add.reduceat(np.where(context, 0.0, out[0]), begin)
    out[0] += (together / np.maximum(size - given, 1))[block]
    return out
