"""Why an alert: which readings the record would be normal without, and what was expected in their place.

Three questions are asked of the density p, s(v | …) = −ln p(v | …) in nats:

- *Who is to blame?* A reading is suspect in so far as the others are normal by themselves: its relief is the surprise
  of the whole record, Σs along an order, minus that of the record without it. For an exact density this is the
  reading's leave-one-out surprise; a network that is asked for a sound reading given a broken one answers with noise,
  so the rest is judged without the reading in question (`docs/experiments.md`).
- *How much of the surprise is whose?* The mean over orders of s(v_i | what came before) is the Shapley value of
  −ln p(v_S) (`attribution`; the values add up to it), the last term of an order that ends with v_i its leave-one-out
  surprise. All come from the orders of one pass (`engine.order_trees`).
- *What would it have taken?* The smallest set of readings whose replacement by what is expected given all others would
  have kept the record silent, each set verified along the real order of arrival. The readings outside of it are the
  trusted rest, given which expected ranges are stated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.engine.events import Contribution, ExpectedRange, Explanation
from deformer_stream.engine.order_trees import Orders, conditionals, each_last
from deformer_stream.engine.queries import likeliest, on_grid
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Effort = Literal["full", "fast", "off"]
"""full: all of the above. fast: each reading given the ones before it, one pass a record. off: no explanation."""

Alarming = Callable[[Floats, Sequence[str]], Bools]
"""Whether largest prefix statistics of R records, (R, C), raise an alert, given the records' ids."""

EXPECTED = (0.05, 0.5, 0.95)
"""The quantiles shown as what was expected."""
BATCH_READINGS = 8192
"""Readings in one pass."""
MOST_TESTED = 64
"""Readings of a record that may be blamed, the most surprising ones on arrival; the others are taken as given."""
TRIED = 4
"""Readings, the most suspicious ones, that are each tried as the only suspect: the first, then the others at once."""
MOST_SUSPECTS = 3
"""Largest set of suspects that is tried, grown one by one."""


@dataclass(slots=True)
class _Rows:
    """A records in which m readings came, W of them scored or context, all with equally many to test.

    codes, raw, values: (A, m) in order of arrival, raw and in normalised units. ends: (A, m), see `explain`. given:
    (A, g) places of the readings that are no one's fault. tested: (A, n) places of the others, in the record's own
    random order. names: A ids. compiled: what does the network's work, or None.
    """

    schema: Schema
    codes: Ints
    raw: Floats
    values: Floats
    ends: Bools
    given: Ints
    tested: Ints
    names: list[str]
    compiled: CpuKernels | None

    def take(self, rows: Ints) -> _Rows:
        return _Rows(
            self.schema,
            self.codes[rows],
            self.raw[rows],
            self.values[rows],
            self.ends[rows],
            self.given[rows],
            self.tested[rows],
            [self.names[row] for row in rows.tolist()],
            self.compiled,
        )


@dataclass(slots=True)
class _Reasons:
    """What is known of each reading of A records, by place, each (A, m); NaN where it was not asked.

    surprise: −ln of the highest-density p-value. expected: (3, A, m) raw units. mode: the likeliest label. attribution,
    alone (leave-one-out), relief: nats. suspect: whether it is in the smallest set. silent: (A,) whether there is one.
    """

    surprise: Floats
    expected: Floats
    mode: Ints
    attribution: Floats
    alone: Floats
    relief: Floats
    suspect: Bools
    silent: Bools

    @staticmethod
    def empty(A: int, m: int) -> _Reasons:
        surprise, attribution, alone, relief = np.full((4, A, m), np.nan)
        expected, mode = np.full((3, A, m), np.nan), np.zeros((A, m), np.int64)
        suspect, silent = np.zeros((A, m), bool), np.zeros(A, bool)
        return _Reasons(surprise, expected, mode, attribution, alone, relief, suspect, silent)


def explain(
    model: DEformer,
    codes: Ints,
    raw: Floats,
    unseen: Sequence[Mapping[int, str]],
    records: Sequence[str],
    alarming: Alarming,
    effort: Effort = "full",
    compiled: CpuKernels | None = None,
    ends: Bools | None = None,
) -> list[Explanation]:
    """Why each of A records is what it is, the most suspicious reading first; context is left out.

    codes: (A, m) in order of arrival, −1 padding at the end; raw: (A, m) raw units. unseen: per record, texts of labels
    the model does not know, by place. records: ids, from which random orders are drawn. With effort "fast" surprises
    and expected ranges are given the readings before, and the most surprising comes first. compiled: the model's
    compiled code, where it shall do the work. ends: (A, m) whether the alert looks at the prefix that ends there, which
    of a block of ties is its last reading only; None for everywhere."""
    out = [Explanation((), None)] * len(codes)
    if effort == "off":
        return out
    ends = np.ones(codes.shape, bool) if ends is None else ends
    for rows in _alike(model.schema, codes):
        length = int((codes[rows[0]] >= 0).sum())
        some, values = codes[rows, :length], raw[rows, :length]
        if effort == "fast":
            reasons = _on_arrival(model, some, values, compiled)
        else:
            names = [records[row] for row in rows]
            group = _arranged(model, some, values, ends[rows, :length], names, compiled)
            reasons = _reasons(model, group, alarming)
        for a, row in enumerate(rows.tolist()):
            out[row] = _told(model.schema, reasons, a, some[a], values[a], unseen[row])
    return out


def _alike(schema: Schema, codes: Ints) -> Iterator[Ints]:
    """Rows with equally many readings and equally much context, as many as go together."""
    there = codes >= 0
    count, context = there.sum(1), (there & schema.context[np.maximum(codes, 0)]).sum(1)
    for key in np.unique(np.stack([count, context]), axis=1).T.tolist():
        if key[0] == key[1]:
            continue  # nothing was scored
        rows = np.flatnonzero((count == key[0]) & (context == key[1]))
        size = max(1, BATCH_READINGS // (2 * key[0] * max(1, key[0].bit_length())))
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def _on_arrival(model: DEformer, codes: Ints, raw: Floats, compiled: CpuKernels | None) -> _Reasons:
    """Each reading given the ones before it."""
    A, m = codes.shape
    places = np.broadcast_to(np.arange(m), codes.shape)
    values = model.schema.normalise(codes, raw)
    rows = _Rows(model.schema, codes, raw, values, codes >= 0, places, places[:, :0], [], compiled)
    reasons = _Reasons.empty(A, m)
    _state(model, reasons, np.arange(A), places, _ask(model, rows, places, each_last(m, 0)), np.arange(m))
    return reasons


def _arranged(
    model: DEformer, codes: Ints, raw: Floats, ends: Bools, records: list[str], compiled: CpuKernels | None
) -> _Rows:
    """Who is tested, in which order: context never, and of many readings those that surprised most on arrival."""
    context = model.schema.context[codes]
    m, scored = codes.shape[1], int((~context[0]).sum())
    last = context
    if scored > MOST_TESTED:
        surprise = np.where(context, -np.inf, _on_arrival(model, codes, raw, compiled).surprise)
        last = surprise < -np.sort(-surprise, 1)[:, MOST_TESTED - 1 : MOST_TESTED]
        last |= np.cumsum(~last, 1) > MOST_TESTED  # of equal ones the first
    tested = min(scored, MOST_TESTED)
    place = np.argsort(~last, 1, kind="stable")
    drawn = np.stack([_rng(record).permutation(tested) for record in records])
    given = place[:, : m - tested]
    values = model.schema.normalise(codes, raw)
    own = np.take_along_axis(place[:, m - tested :], drawn, 1)
    return _Rows(model.schema, codes, raw, values, ends, given, own, records, compiled)


def _rng(record: str) -> np.random.Generator:
    digest = hashlib.blake2b(record.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Answers at the nodes of a tree of orders. places: (A, W) of the readings that it speaks of. codes, values: (A, T)
    at the nodes, as is the conditionals' shape. surprisal: (A, T) −ln p(v), 0 for context."""

    orders: Orders
    compiled: CpuKernels | None
    places: Ints
    codes: Ints
    values: torch.Tensor
    conditional: Conditional
    surprisal: Floats

    def take(self, rows: Ints) -> _Pass:
        kept = torch.from_numpy(rows).to(self.values.device)
        own = self.places[rows], self.codes[rows], self.values[kept], self.conditional[kept], self.surprisal[rows]
        return _Pass(self.orders, self.compiled, *own)

    def quantiles(self, nodes: Ints, qs: Sequence[float]) -> Floats:
        """(Q, A, K) at these nodes, normalised units."""
        asked = self.conditional[:, torch.from_numpy(nodes)]
        found = asked.quantiles(qs) if self.compiled is None else self.compiled.quantiles(asked, qs)
        return np.asarray(found.double().cpu().numpy())

    def surprise(self, nodes: Ints) -> Floats:
        """(A, K) −ln of the highest-density p-values at these nodes."""
        at = torch.from_numpy(nodes)
        return -_log_p_value(self.conditional[:, at], self.values[:, at], self.compiled)

    def rest(self, items: int) -> Floats:
        """(A, items) surprise of all but one, along orders that end with it; a mean where several do."""
        paths = self.orders.paths[: len(self.orders.paths) // items * items]
        ends = self.orders.last[: len(paths)]
        sums = np.where(paths >= 0, self.surprisal[:, paths], 0.0).sum(-1) - self.surprisal[:, ends]
        return np.asarray(sums.reshape(len(sums), -1, items).mean(1))


def _ask(model: DEformer, rows: _Rows, places: Ints, orders: Orders) -> _Pass:
    codes = np.take_along_axis(rows.codes, places, 1)
    x = to_tensor(np.take_along_axis(rows.values, places, 1), model)
    with torch.inference_mode():
        conditional = conditionals(model, orders, to_tensor(codes, model), x, rows.compiled)
        at = x[:, torch.from_numpy(orders.reading).to(model.device)]
        surprisal = -conditional.log_prob(at).double().cpu().numpy()
    nodes = codes[:, orders.reading]
    surprisal = np.where(model.schema.context[nodes], 0.0, surprisal)
    return _Pass(orders, rows.compiled, places, nodes, at, conditional, surprisal)


def _reasons(model: DEformer, rows: _Rows, alarming: Alarming) -> _Reasons:
    """Attribution and relief of every reading, then the suspects, then what was expected given the trusted rest."""
    g, n = rows.given.shape[1], rows.tested.shape[1]
    reasons = _Reasons.empty(*rows.codes.shape)
    seen = _ask(model, rows, np.concatenate([rows.given, rows.tested], 1), each_last(g, n, mirrored=True))
    _share(reasons, rows, seen)
    open_ = np.arange(len(rows.codes))
    if g:
        _state(model, reasons, open_, rows.given, seen, np.arange(g))
    best = np.argsort(seen.rest(n), 1)[:, :TRIED]
    found = _found(model, seen, seen.orders.last[:n])
    silent = np.zeros(best.shape, bool)
    for tried in (slice(0, 1), slice(1, TRIED)):
        loud = np.flatnonzero(~silent.any(1))
        sets = best[loud, tried, None]
        if sets.size:
            silent[loud, tried] = _silent(model, rows.take(loud), rows.tested[loud], found[loud], sets, alarming)
    reasons.silent[:] = silent.any(1)
    # The best of those that silence the record alone, or else the best; then one after the other.
    aside = np.take_along_axis(rows.tested, np.take_along_axis(best, silent.argmax(1)[:, None], 1), 1)
    for size in range(1, min(MOST_SUSPECTS, n) + 1):
        some = rows.take(open_)
        trusted = np.stack([t[~np.isin(t, a)] for t, a in zip(some.tested, aside, strict=True)])
        seen = _ask(model, some, np.concatenate([some.given, trusted, aside], 1), each_last(g, n - size, size))
        if size > 1:
            together = np.broadcast_to(np.arange(size), (len(open_), 1, size))
            found = _found(model, seen, seen.orders.last[n - size :])
            reasons.silent[open_] = _silent(model, some, aside, found, together, alarming)[:, 0]
        reasons.suspect[open_[:, None], aside] = True
        again = ~reasons.silent[open_] & (size < min(MOST_SUSPECTS, n))
        done = np.flatnonzero(~again)
        if len(done):
            places = np.concatenate([trusted, aside], 1)[done]
            _state(model, reasons, open_[done], places, seen.take(done), seen.orders.last)
        if not again.any():
            break
        following = np.take_along_axis(trusted, seen.rest(n - size).argmin(1)[:, None], 1)
        open_, aside = open_[again], np.concatenate([aside, following], 1)[again]
    return reasons


def _share(reasons: _Reasons, rows: _Rows, seen: _Pass) -> None:
    """Each reading's share in the surprise of the whole, and what is left without it."""
    A, n = rows.tested.shape
    paths, ends = seen.orders.paths, seen.orders.last
    place = np.argsort(seen.orders.reading[paths], 1)  # of each reading in each order
    shares = np.take_along_axis(seen.surprisal[:, paths], place[None], 2).mean(1)
    np.put_along_axis(reasons.attribution, seen.places, shares, 1)
    np.put_along_axis(reasons.alone, rows.tested, seen.surprisal[:, ends].reshape(A, -1, n).mean(1), 1)
    whole = seen.surprisal[:, paths].sum(-1).mean(1, keepdims=True)
    np.put_along_axis(reasons.relief, rows.tested, whole - seen.rest(n), 1)


def _state(model: DEformer, reasons: _Reasons, rows: Ints, places: Ints, seen: _Pass, nodes: Ints) -> None:
    """What was expected at these nodes, (K,), and how surprising was what came. rows: (A,); places: (A, K)."""
    schema, codes, conditional = model.schema, seen.codes[:, nodes], seen.conditional[:, torch.from_numpy(nodes)]
    where = rows[:, None], places
    reasons.surprise[where] = seen.surprise(nodes)
    reasons.expected[:, *where] = schema.denormalise(codes, seen.quantiles(nodes, EXPECTED))
    reasons.mode[where] = likeliest(schema, codes, conditional)


def _found(model: DEformer, seen: _Pass, nodes: Ints) -> Floats:
    """(A, K) what the model would fill in at these nodes, raw units."""
    schema, codes, conditional = model.schema, seen.codes[:, nodes], seen.conditional[:, torch.from_numpy(nodes)]
    median = schema.denormalise(codes, seen.quantiles(nodes, (0.5,))[0])
    number = on_grid(schema, codes, median)
    return np.where(schema.discrete[codes], likeliest(schema, codes, conditional), number)


def _silent(model: DEformer, rows: _Rows, places: Ints, found: Floats, sets: Ints, alarming: Alarming) -> Bools:
    """(A, C) whether a record would have stayed silent with these readings replaced, in its order of arrival.

    places, found: (A, K) readings and their replacements. sets: (A, C, k) which of them each set replaces."""
    A, C, _ = sets.shape
    raw = np.repeat(rows.raw[:, None], C, 1)
    record = np.arange(A)[:, None, None]
    np.put_along_axis(raw, places[record, sets], found[record, sets], 2)
    codes = np.repeat(rows.codes[:, None], C, 1).reshape(A * C, -1)
    values = rows.schema.normalise(codes, raw.reshape(A * C, -1))
    found = _statistics(model, rows.compiled, codes, values, np.repeat(rows.ends, C, 0))
    return ~alarming(found.reshape(A, C), rows.names)


def _statistics(model: DEformer, compiled: CpuKernels | None, codes: Ints, values: Floats, ends: Bools) -> Floats:
    """Largest prefix statistics, (R,), of R records without padding; arguments (R, m)."""
    with torch.inference_mode():
        features, x = to_tensor(codes, model), to_tensor(values, model)
        asked = (model.conditionals if compiled is None else compiled.whole)(features, x)
        log_p = _log_p_value(asked, x, compiled)
    return advance_prefix_state(PrefixState.initial(len(codes)), log_p, ~model.schema.context[codes], ends)[1].max_statistic


def _log_p_value(conditional: Conditional, values: torch.Tensor, compiled: CpuKernels | None) -> Floats:
    """ln of the highest-density p-values of readings."""
    found = conditional.surprisal(values) if compiled is None else compiled.surprisal(conditional, values)
    return np.asarray(conditional.score_terms(values, found).log_p_value.double().cpu().numpy())


def _told(
    schema: Schema, reasons: _Reasons, a: int, codes: Ints, raw: Floats, unseen: Mapping[int, str]
) -> Explanation:
    """One record's reasons in words and numbers."""
    parts = []
    for i in np.flatnonzero(~schema.context[codes]).tolist():
        feature = schema.features[codes[i]]
        attribution, alone, relief = (_number(of[a, i]) for of in (reasons.attribution, reasons.alone, reasons.relief))
        parts.append(
            Contribution(
                feature.name,
                _shown(feature, float(raw[i]), unseen.get(i)),
                float(reasons.surprise[a, i]),
                _expected(feature, reasons.expected[:, a, i], int(reasons.mode[a, i])),
                attribution,
                alone,
                relief,
                bool(reasons.suspect[a, i]),
            )
        )
    parts.sort(key=_rank)
    suspects = tuple(part.feature for part in parts if part.suspect)
    return Explanation(tuple(parts), suspects if reasons.silent[a] else None)


def _rank(part: Contribution) -> tuple[bool, bool, float]:
    """Suspects first. Of the others those that stand out with the suspects (relief) and without them (surprise): of two
    readings that do not fit together either may be the broken one, and a second fault shows once the first is aside."""
    tested = part.relief is not None
    return not part.suspect, not tested, -part.surprise - (part.relief or 0.0)


def _number(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _expected(feature: Feature, quantiles: Floats, mode: int) -> ExpectedRange:
    """Quantiles in raw units, or the likeliest label."""
    if feature.kind == "continuous":
        return ExpectedRange(*(float(q) for q in quantiles))
    return ExpectedRange(None, feature.labels[mode], None)


def _shown(feature: Feature, value: float, text: str | None) -> float | str | None:
    """A value as a person knows it: the number, or the label's text."""
    if feature.kind == "continuous":
        return value
    return feature.labels[int(value)] if value < len(feature.labels) else text
