"""Explanations of alerts: the readings without which the record would be normal, and the values expected instead.

The method answers three questions about a record with readings v_1, …, v_n. The surprisal of a reading is −ln p of its
value given earlier readings, in nats; the surprisal of a record is the sum over its readings in some order.

1. How much does each reading contribute to the surprisal of the record? Its attribution is its mean surprisal over
   orders of the readings. That is its Shapley value in the game −ln p(v_S), so attributions add up to the record's
   surprisal. Its leave-one-out surprisal is −ln p(v_i | all other readings).
2. Which reading is to blame? The relief of a reading is the surprisal of the record minus the surprisal of the record
   without it. In an exact density, relief and leave-one-out surprisal are equal. A network gives poor estimates for a
   normal reading given a broken one, so the relief evaluates the others without the broken one
   (docs/experiments/07-attribution-of-alerts.md).
3. Which values would have avoided the alert? Suspects are the smallest set of readings, found by greedy search, whose
   replacement by expected values makes the record raise no alert. Each set is tested in the record's order of arrival.

Expected ranges are conditioned on the trusted readings, which are all readings but the suspects. The orders of one
record share prefixes and are computed together as a tree (`engine.order_trees`).
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
from deformer_stream.engine.imputation import find_likeliest_labels, round_to_quantum
from deformer_stream.engine.order_trees import OrderTree, build_order_tree, compute_tree_conditionals
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ExplanationEffort = Literal["full", "fast", "off"]
"""How much is computed to explain an alert.

"full" computes which readings are to blame, how much each contributes, and which values were expected. "fast" takes one
forward pass per record: it computes how improbable each reading was given the earlier ones, and which values were
expected. "off" returns empty explanations.
"""

AlertRule = Callable[[Floats, Sequence[str]], Bools]
"""A function that decides which records raise an alert.

Its arguments are the anomaly scores of R records, (R, C) with C variants of each record, and the R record ids, from
which it finds their calibration groups. It returns booleans of shape (R, C).
"""

EXPECTED_QUANTILES = (0.05, 0.5, 0.95)
"""Probabilities of the quantiles that are shown as the expected range: a central 90% interval and the median."""

MAX_READINGS_PER_PASS = 8192
"""Largest number of readings (nodes of trees of orders) in one forward pass. It is enough to use all cores, and it
bounds the memory of a pass."""

MAX_CANDIDATES = 64
"""Largest number of readings of a record that may become suspects (readings that explain the alert). If a record has
more, those that were most improbable on arrival are chosen, because the cost grows faster than their number."""

NUM_SINGLE_SUSPECTS = 4
"""Number of readings of which each is tried as the only suspect (reading that explains the alert). First the reading is
tried whose removal makes the record most probable, then the others in one pass. A fault in one sensor is the most
frequent cause, and this ranking has it among the first few."""

MAX_SUSPECTS = 3
"""Largest set of suspects that is tried. Larger sets would no longer point to a cause."""


@dataclass(slots=True)
class _RecordGroup:
    """A records with m readings each that are explained together, because all have n candidates and g other readings.

    A candidate is a reading that may become a suspect, that is part of the explanation of the alert. A position is the
    index of a reading in its record's order of arrival, from 0.

    Attributes:
        schema: Describes the features.
        codes: (A, m) feature codes (indexes in the schema) in order of arrival.
        raw_values: (A, m) values in raw units, or label codes.
        values: (A, m) values in normalised units, or label codes.
        is_decision_point: (A, m) whether the record can raise an alert after this reading.
        given_positions: (A, g) positions of the readings that are never suspects, such as those of context features.
        candidate_positions: (A, n) positions of the candidates, in a random order that depends on the record id only.
        record_ids: Ids of the A records.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
    """

    schema: Schema
    codes: Ints
    raw_values: Floats
    values: Floats
    is_decision_point: Bools
    given_positions: Ints
    candidate_positions: Ints
    record_ids: list[str]
    kernels: CpuKernels | None

    def select(self, rows: Ints) -> _RecordGroup:
        """Return a group of some of the records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return _RecordGroup(
            self.schema,
            self.codes[rows],
            self.raw_values[rows],
            self.values[rows],
            self.is_decision_point[rows],
            self.given_positions[rows],
            self.candidate_positions[rows],
            [self.record_ids[row] for row in rows.tolist()],
            self.kernels,
        )


@dataclass(slots=True)
class _Findings:
    """The results for each reading of A records with m readings, in order of arrival; NaN where nothing was computed.

    Suspects are readings whose replacement by expected values may avoid the alert; trusted readings are all others. The
    surprisal of a reading is −ln p of its value. The surprisal of a record is the sum over its readings.

    Attributes:
        surprise: (A, m) −ln of the highest-density p-value of the reading (probability of a value at most as likely as
            the observed one) given the trusted readings, in nats.
        expected: (3, A, m) the 5%, 50% and 95% quantiles given the trusted readings, in raw units.
        likeliest_label: (A, m) code of the most probable label given the trusted readings, 0 for continuous features.
        attribution: (A, m) mean surprisal of the reading given the readings before it, over several orders, in nats.
        leave_one_out: (A, m) surprisal of the reading given all other readings, in nats.
        relief: (A, m) surprisal of the record minus that of the record without the reading, in nats.
        is_suspect: (A, m) whether the reading is a suspect.
        is_silenced: (A,) whether replacing the suspects of the record avoids its alert.
    """

    surprise: Floats
    expected: Floats
    likeliest_label: Ints
    attribution: Floats
    leave_one_out: Floats
    relief: Floats
    is_suspect: Bools
    is_silenced: Bools

    @staticmethod
    def empty(num_records: int, num_readings: int) -> _Findings:
        """Return findings for records of equal length in which nothing has been computed yet."""
        shape = num_records, num_readings
        surprise, attribution, leave_one_out, relief = np.full((4, *shape), np.nan)
        return _Findings(
            surprise,
            np.full((3, *shape), np.nan),
            np.zeros(shape, np.int64),
            attribution,
            leave_one_out,
            relief,
            np.zeros(shape, bool),
            np.zeros(num_records, bool),
        )


@dataclass(frozen=True, slots=True)
class _TreeOutput:
    """The network's output at the T nodes of a tree of orders, for A records.

    A tree of orders is a trie of several orders of a record's readings: orders that begin alike share nodes. Each node
    stands for a reading given the readings at its ancestors.

    Attributes:
        tree: The tree, which orders W readings of each record.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        positions: (A, W) positions, in the order of arrival of each record, of the readings that the tree numbers
            0 … W − 1.
        codes: (A, T) feature codes (indexes in the schema) at the nodes.
        values: (A, T) values at the nodes, in normalised units or label codes.
        conditional: The distributions at the nodes given their ancestors, of shape (A, T).
        surprisal: (A, T) −ln p of the values at the nodes, in nats; 0 for context features, which are not scored.
    """

    tree: OrderTree
    kernels: CpuKernels | None
    positions: Ints
    codes: Ints
    values: torch.Tensor
    conditional: Conditional
    surprisal: Floats

    def select(self, rows: Ints) -> _TreeOutput:
        """Return the output for some of the records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        index = torch.from_numpy(rows).to(self.values.device)
        return _TreeOutput(
            self.tree,
            self.kernels,
            self.positions[rows],
            self.codes[rows],
            self.values[index],
            self.conditional[index],
            self.surprisal[rows],
        )

    def compute_quantiles(self, nodes: Ints, probabilities: Sequence[float]) -> Floats:
        """Return quantiles of the distributions at some nodes.

        Args:
            nodes: (K,) indexes of the nodes in the tree.
            probabilities: Q probabilities between 0 and 1.

        Returns:
            (Q, A, K) quantiles of each of the A records, in normalised units.
        """
        conditional = self.conditional[:, torch.from_numpy(nodes)]
        if self.kernels is None:
            quantiles = conditional.quantiles(probabilities)
        else:
            quantiles = self.kernels.quantiles(conditional, probabilities)
        return np.asarray(quantiles.double().cpu().numpy())

    def compute_surprise(self, nodes: Ints) -> Floats:
        """Return how improbable the values at some nodes are given their ancestors.

        Args:
            nodes: (K,) indexes of the nodes in the tree.

        Returns:
            (A, K) −ln of the highest-density p-values, the probabilities of a value at most as likely as the observed.
        """
        index = torch.from_numpy(nodes)
        return -_compute_log_p_value(self.conditional[:, index], self.values[:, index], self.kernels)

    def sum_without_each_item(self) -> Floats:
        """Return the surprisal that each record would have without one of its items, for every item.

        The surprisal of a record is the sum of −ln p over its readings in some order. An item is a reading that the
        tree has at the end of an order. Without the last term, the sum over this order is the surprisal of the record
        without the item. If several orders end with the item, the result is their mean.

        Returns:
            (A, n) surprisal of each of A records without item i, in nats, for i from 0 to n − 1.
        """
        num_paths = len(self.tree.paths) - self.tree.num_extra
        paths, leaves = self.tree.paths[:num_paths], self.tree.leaves[:num_paths]
        totals = np.where(paths >= 0, self.surprisal[:, paths], 0.0).sum(-1)
        sums = totals - self.surprisal[:, leaves]
        return np.asarray(sums.reshape(len(sums), -1, self.tree.num_items).mean(1))


def explain_records(
    model: DEformer,
    codes: Ints,
    raw_values: Floats,
    unseen_labels: Sequence[Mapping[int, str]],
    record_ids: Sequence[str],
    alert_rule: AlertRule,
    effort: ExplanationEffort = "full",
    kernels: CpuKernels | None = None,
    is_decision_point: Bools | None = None,
) -> list[Explanation]:
    """Explain why A records have raised alerts.

    An explanation lists the readings of a record except those of context features, the most suspicious first. It also
    names the suspects: a small set of readings whose replacement by expected values would have avoided the alert.

    Args:
        model: The network, in evaluation mode.
        codes: (A, L) feature codes (indexes in the schema) in order of arrival, −1 as padding at the end; L is the
            number of readings of the longest record.
        raw_values: (A, L) values in raw units, or label codes; those of padding are ignored.
        unseen_labels: For each record, the texts of labels that the model does not have. The key is the position of
            the reading in the order of arrival, from 0.
        record_ids: The A record ids. They determine random orders of the readings, so a record always gets the same
            explanation.
        alert_rule: Decides whether a record with replaced readings still raises an alert.
        effort: How much to compute, see `ExplanationEffort`. With "fast", the most improbable reading comes first, and
            there are no suspects.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        is_decision_point: (A, L) whether the record can raise an alert after this reading. In a tie group (readings
            with the same event time), that is true for the last reading only. None if it is true for all readings.

    Returns:
        One explanation per record, empty if the record has only context features or if the effort is "off".
    """
    explanations = [Explanation((), None)] * len(codes)
    if effort == "off":
        return explanations
    is_decision_point = np.ones(codes.shape, bool) if is_decision_point is None else is_decision_point
    for rows in _group_similar_records(model.schema, codes):
        # All records of the group have equally many readings, so no padding is left.
        num_readings = int((codes[rows[0]] >= 0).sum())
        group_codes, group_raw_values = codes[rows, :num_readings], raw_values[rows, :num_readings]
        if effort == "fast":
            findings = _score_on_arrival(model, group_codes, group_raw_values, kernels)
        else:
            group = _choose_candidates(
                model,
                group_codes,
                group_raw_values,
                is_decision_point[rows, :num_readings],
                [record_ids[row] for row in rows],
                kernels,
            )
            findings = _find_suspects(model, group, alert_rule)
        for index, row in enumerate(rows.tolist()):
            explanations[row] = _build_explanation(
                model.schema, findings, index, group_codes[index], group_raw_values[index], unseen_labels[row]
            )
    return explanations


def _group_similar_records(schema: Schema, codes: Ints) -> Iterator[Ints]:
    """Group records that can be computed together, because they have equally many readings and context features.

    Args:
        schema: Describes the features.
        codes: (A, L) feature codes of A records with at most L readings, −1 as padding at the end.

    Yields:
        Rows of the records of one group, from 0 to A − 1. The size of a group is bounded, so that one forward pass has
        at most `MAX_READINGS_PER_PASS` readings. Records with context features only are left out.
    """
    is_reading = codes >= 0
    num_readings = is_reading.sum(1)
    num_context = (is_reading & schema.is_context[np.maximum(codes, 0)]).sum(1)
    for readings, context in np.unique(np.stack([num_readings, num_context]), axis=1).T.tolist():
        if readings == context:
            continue
        rows = np.flatnonzero((num_readings == readings) & (num_context == context))
        num_nodes = 2 * readings * max(1, readings.bit_length())  # upper bound of the nodes of a mirrored tree
        batch_size = max(1, MAX_READINGS_PER_PASS // num_nodes)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


def _score_on_arrival(model: DEformer, codes: Ints, raw_values: Floats, kernels: CpuKernels | None) -> _Findings:
    """Compute for each reading how improbable it was and which values were expected, given the earlier readings.

    Args:
        model: The network.
        codes: (A, m) feature codes (indexes in the schema) in order of arrival, without padding.
        raw_values: (A, m) values in raw units, or label codes.
        kernels: The model's compiled kernels, or None to compute with PyTorch.

    Returns:
        Findings in which only the surprise, the expected range and the likeliest label are computed.
    """
    num_records, num_readings = codes.shape
    # A tree with a single order, the order of arrival: all readings are given and none is a candidate.
    positions = np.broadcast_to(np.arange(num_readings), codes.shape)
    values = model.schema.normalise(codes, raw_values)
    group = _RecordGroup(model.schema, codes, raw_values, values, codes >= 0, positions, positions[:, :0], [], kernels)
    findings = _Findings.empty(num_records, num_readings)
    output = _compute_tree(model, group, positions, build_order_tree(num_readings, 0))
    _store_expected_ranges(model, findings, np.arange(num_records), positions, output, np.arange(num_readings))
    return findings


def _choose_candidates(
    model: DEformer,
    codes: Ints,
    raw_values: Floats,
    is_decision_point: Bools,
    record_ids: list[str],
    kernels: CpuKernels | None,
) -> _RecordGroup:
    """Choose the candidates of A records: the readings that may become suspects, that is explain the alert.

    Readings of context features are never candidates. If a record has more than `MAX_CANDIDATES` other readings, the
    candidates are those that were most improbable given the earlier ones.

    Args:
        model: The network.
        codes: (A, m) feature codes (indexes in the schema) in order of arrival, without padding. All records have
            equally many context features.
        raw_values: (A, m) values in raw units, or label codes.
        is_decision_point: (A, m) whether the record can raise an alert after this reading.
        record_ids: The A record ids, from which the random order of the candidates is drawn.
        kernels: The model's compiled kernels, or None to compute with PyTorch.

    Returns:
        The records with their candidates in random order.
    """
    # Given readings are those that are not candidates.
    is_given = model.schema.is_context[codes]
    num_readings, num_scored = codes.shape[1], int((~is_given[0]).sum())
    num_candidates = min(num_scored, MAX_CANDIDATES)
    if num_scored > MAX_CANDIDATES:
        surprise = _score_on_arrival(model, codes, raw_values, kernels).surprise
        surprise = np.where(is_given, -np.inf, surprise)
        descending = -np.sort(-surprise, 1)
        smallest_of_candidates = descending[:, MAX_CANDIDATES - 1 : MAX_CANDIDATES]
        is_given = surprise < smallest_of_candidates
        is_given |= np.cumsum(~is_given, 1) > MAX_CANDIDATES  # of equal surprises, the first become candidates
    positions = np.argsort(~is_given, 1, kind="stable")  # given readings first, both kinds in order of arrival
    num_given = num_readings - num_candidates
    random_order = np.stack([_make_rng(record_id).permutation(num_candidates) for record_id in record_ids])
    return _RecordGroup(
        model.schema,
        codes,
        raw_values,
        model.schema.normalise(codes, raw_values),
        is_decision_point,
        positions[:, :num_given],
        np.take_along_axis(positions[:, num_given:], random_order, 1),
        record_ids,
        kernels,
    )


def _make_rng(record_id: str) -> np.random.Generator:
    """Return a random number generator that is seeded by the record id, so that each run draws the same numbers."""
    digest = hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest))


def _compute_tree(model: DEformer, group: _RecordGroup, positions: Ints, tree: OrderTree) -> _TreeOutput:
    """Run the network on a tree of orders (a trie of several orders of a record's readings) for each of A records.

    Args:
        model: The network.
        group: The A records.
        positions: (A, W) positions, in the order of arrival of each record, of the readings that the tree numbers
            0 … W − 1.
        tree: The tree, which orders W readings.
    """
    codes = np.take_along_axis(group.codes, positions, 1)
    values = to_tensor(np.take_along_axis(group.values, positions, 1), model)
    with torch.inference_mode():
        conditional = compute_tree_conditionals(model, tree, to_tensor(codes, model), values, group.kernels)
        node_values = values[:, torch.from_numpy(tree.reading_index).to(model.device)]
        surprisal = -conditional.log_prob(node_values).double().cpu().numpy()
    node_codes = codes[:, tree.reading_index]
    surprisal = np.where(model.schema.is_context[node_codes], 0.0, surprisal)
    return _TreeOutput(tree, group.kernels, positions, node_codes, node_values, conditional, surprisal)


def _find_suspects(model: DEformer, group: _RecordGroup, alert_rule: AlertRule) -> _Findings:
    """Find the suspects of A records, and compute all results that the findings hold for their readings.

    Suspects are a small set of readings whose replacement by expected values avoids the alert; the other readings are
    trusted. First, single readings are tried, those first whose removal makes the record most probable. If none avoids
    the alert, further suspects are added one by one, up to `MAX_SUSPECTS`. Each time the reading is added whose removal
    leaves the smallest surprisal (sum of −ln p) of the trusted readings.

    Args:
        model: The network.
        group: The A records with their candidates (readings that may become suspects).
        alert_rule: Decides whether a record with replaced readings still raises an alert.
    """
    num_records, num_candidates = group.candidate_positions.shape
    num_given = group.given_positions.shape[1]
    max_suspects = min(MAX_SUSPECTS, num_candidates)
    findings = _Findings.empty(*group.codes.shape)
    positions = np.concatenate([group.given_positions, group.candidate_positions], 1)
    output = _compute_tree(model, group, positions, build_order_tree(num_given, num_candidates, is_mirrored=True))
    _store_attributions(findings, group, output)
    rows = np.arange(num_records)  # the undecided records, to which further suspects may be added
    if num_given:
        # The first nodes of the tree are the given readings, with the readings before them as ancestors.
        _store_expected_ranges(model, findings, rows, group.given_positions, output, np.arange(num_given))
    suspects, findings.is_silenced[:] = _try_single_suspects(model, group, output, alert_rule)
    for num_suspects in range(1, max_suspects + 1):
        undecided_group = group.select(rows)
        trusted = _remove_from_rows(undecided_group.candidate_positions, suspects)
        positions = np.concatenate([undecided_group.given_positions, trusted, suspects], 1)
        # Every suspect is computed given the trusted readings, and every trusted one given the other trusted ones.
        tree = build_order_tree(num_given, num_candidates - num_suspects, num_suspects)
        output = _compute_tree(model, undecided_group, positions, tree)
        if num_suspects > 1:  # single suspects have been tested already
            suspect_leaves = tree.leaves[num_candidates - num_suspects :]
            replacements = _compute_replacements(model, output, suspect_leaves)
            # One set per record, which consists of all suspects.
            full_set = np.broadcast_to(np.arange(num_suspects), (len(rows), 1, num_suspects))
            is_silenced = _test_replacements(model, undecided_group, suspects, replacements, full_set, alert_rule)
            findings.is_silenced[rows] = is_silenced[:, 0]
        findings.is_suspect[rows[:, None], suspects] = True
        is_undecided = ~findings.is_silenced[rows] & (num_suspects < max_suspects)
        decided = np.flatnonzero(~is_undecided)
        if len(decided):
            # The leaves of the tree are first the trusted candidates and then the suspects.
            candidates = np.concatenate([trusted, suspects], 1)[decided]
            _store_expected_ranges(model, findings, rows[decided], candidates, output.select(decided), tree.leaves)
        if not is_undecided.any():
            break
        # The next suspect is the trusted candidate whose removal leaves the smallest surprisal.
        next_index = output.sum_without_each_item().argmin(1)
        next_suspect = np.take_along_axis(trusted, next_index[:, None], 1)
        rows, suspects = rows[is_undecided], np.concatenate([suspects, next_suspect], 1)[is_undecided]
    return findings


def _try_single_suspects(
    model: DEformer, group: _RecordGroup, output: _TreeOutput, alert_rule: AlertRule
) -> tuple[Ints, Bools]:
    """Find for each of A records a single reading whose replacement by its expected value avoids the alert.

    The candidate is tested first whose removal makes the record most probable. Only for records that still raise an
    alert, the next `NUM_SINGLE_SUSPECTS` − 1 candidates are tested too. If none of them avoids the alert, the first one
    is returned.

    Args:
        model: The network.
        group: The A records with n candidates (readings that may become suspects) each.
        output: The network's output for a tree of orders in which each candidate is last.
        alert_rule: Decides whether a record with a replaced reading still raises an alert.

    Returns:
        (A, 1) position of each record's suspect in the order of arrival; and (A,) whether replacing it avoids the
        alert.
    """
    replacements = _compute_replacements(model, output, output.tree.leaves[: output.tree.num_items])
    # (A, k) indexes into the candidates; the one whose removal leaves the smallest surprisal is first.
    ranked = np.argsort(output.sum_without_each_item(), 1)[:, :NUM_SINGLE_SUSPECTS]
    is_silenced = np.zeros(ranked.shape, bool)
    for columns in (slice(0, 1), slice(1, NUM_SINGLE_SUSPECTS)):
        rows = np.flatnonzero(~is_silenced.any(1))
        single_sets = ranked[rows, columns, None]  # (rows, columns, 1): sets of one candidate each
        if single_sets.size:
            is_silenced[rows, columns] = _test_replacements(
                model,
                group.select(rows),
                group.candidate_positions[rows],
                replacements[rows],
                single_sets,
                alert_rule,
            )
    best = np.take_along_axis(ranked, is_silenced.argmax(1)[:, None], 1)  # the first column if none avoids the alert
    return np.take_along_axis(group.candidate_positions, best, 1), np.asarray(is_silenced.any(1))


def _remove_from_rows(positions: Ints, removed: Ints) -> Ints:
    """Return positions of readings without those that are removed, row by row, in the same order.

    Args:
        positions: (A, n) distinct positions in each of A rows.
        removed: (A, k) positions to remove from each row; all of them occur there.

    Returns:
        (A, n − k) the other positions of each row.
    """
    rows = zip(positions, removed, strict=True)
    return np.stack([row[~np.isin(row, removed_from_row)] for row, removed_from_row in rows])


def _store_attributions(findings: _Findings, group: _RecordGroup, output: _TreeOutput) -> None:
    """Store how much each reading contributes to the surprisal of its record, the sum of −ln p over its readings.

    The attribution of a reading is its mean surprisal over the orders of the tree. For the candidates (readings that
    may become suspects), the surprisal given all other readings and the relief are stored as well. The relief is the
    surprisal of the record minus that of the record without the reading.

    Args:
        findings: The results for A records, which are changed.
        group: The A records with n candidates each.
        output: The network's output for a tree of P orders of all W readings. In two of them each candidate is last.
    """
    tree, candidates = output.tree, group.candidate_positions
    path_surprisal = output.surprisal[:, tree.paths]  # (A, P, W): the terms of each order from first to last
    # (P, W): the depth at which each order has reading 0, 1, …, with which the terms are sorted by reading.
    depth_by_reading = np.argsort(tree.reading_index[tree.paths], 1)
    attribution = np.take_along_axis(path_surprisal, depth_by_reading[None], 2).mean(1)
    np.put_along_axis(findings.attribution, output.positions, attribution, 1)
    # (A, orders per candidate, n): the last term of an order is the surprisal given all other readings.
    last_terms = output.surprisal[:, tree.leaves].reshape(len(candidates), -1, tree.num_items)
    np.put_along_axis(findings.leave_one_out, candidates, last_terms.mean(1), 1)
    record_surprisal = path_surprisal.sum(-1).mean(1, keepdims=True)
    np.put_along_axis(findings.relief, candidates, record_surprisal - output.sum_without_each_item(), 1)


def _store_expected_ranges(
    model: DEformer, findings: _Findings, rows: Ints, positions: Ints, output: _TreeOutput, nodes: Ints
) -> None:
    """Store how improbable K readings of each record are, and which values were expected instead.

    These are the surprise, the expected range and the likeliest label in `_Findings`. They are conditioned on the
    ancestors of the reading's node in a tree of orders.

    Args:
        model: The network.
        findings: The results, which are changed.
        rows: (A,) rows of the findings that belong to the A records of the output.
        positions: (A, K) positions of the readings in the order of arrival of their records.
        output: The network's output at the nodes of the tree.
        nodes: (K,) indexes of the nodes at which the tree has these readings.
    """
    schema, codes = model.schema, output.codes[:, nodes]
    cells = rows[:, None], positions
    findings.surprise[cells] = output.compute_surprise(nodes)
    quantiles = output.compute_quantiles(nodes, EXPECTED_QUANTILES)
    findings.expected[:, *cells] = schema.denormalise(codes, quantiles)
    conditional = output.conditional[:, torch.from_numpy(nodes)]
    findings.likeliest_label[cells] = find_likeliest_labels(schema, codes, conditional)


def _compute_replacements(model: DEformer, output: _TreeOutput, nodes: Ints) -> Floats:
    """Return the expected values by which readings are replaced, to test whether that avoids the alert.

    A continuous reading is replaced by its conditional median, rounded to the sensor's resolution; a discrete one by
    its most probable label. Both are conditioned on the ancestors of the reading's node in a tree of orders.

    Args:
        model: The network.
        output: The network's output at the nodes of the tree, for A records.
        nodes: (K,) indexes of the nodes at which the tree has the readings.

    Returns:
        (A, K) values in raw units, or label codes.
    """
    schema, codes = model.schema, output.codes[:, nodes]
    median = schema.denormalise(codes, output.compute_quantiles(nodes, (0.5,))[0])
    number = round_to_quantum(schema, codes, median)
    label = find_likeliest_labels(schema, codes, output.conditional[:, torch.from_numpy(nodes)])
    return np.where(schema.is_discrete[codes], label, number)


def _test_replacements(
    model: DEformer, group: _RecordGroup, positions: Ints, replacements: Floats, sets: Ints, alert_rule: AlertRule
) -> Bools:
    """Return whether each record would have raised no alert if some of its readings had had other values.

    Several sets of readings are tested independently. For each set, all of its readings are replaced, and the record is
    scored again in its order of arrival.

    Args:
        model: The network.
        group: The A records.
        positions: (A, K) positions, in the order of arrival, of readings that may be replaced.
        replacements: (A, K) the values that replace them, in raw units or label codes.
        sets: (A, C, k) for each record C sets of k readings, as indexes into the K readings.
        alert_rule: Decides whether a record with a given anomaly score raises an alert.

    Returns:
        (A, C) whether replacing the set avoids the alert.
    """
    num_records, num_sets, _ = sets.shape
    # (A, C, m): one copy of each record for each set, in which the readings of the set are replaced.
    raw_values = np.repeat(group.raw_values[:, None], num_sets, 1)
    record = np.arange(num_records)[:, None, None]
    np.put_along_axis(raw_values, positions[record, sets], replacements[record, sets], 2)
    # (A · C, m): all copies are scored as records of their own.
    flat_raw_values = raw_values.reshape(num_records * num_sets, -1)
    codes = np.repeat(group.codes, num_sets, 0)
    statistics = _compute_max_statistics(
        model,
        group.kernels,
        codes,
        group.schema.normalise(codes, flat_raw_values),
        np.repeat(group.is_decision_point, num_sets, 0),
    )
    return ~alert_rule(statistics.reshape(num_records, num_sets), group.record_ids)


def _compute_max_statistics(
    model: DEformer, kernels: CpuKernels | None, codes: Ints, values: Floats, is_decision_point: Bools
) -> Floats:
    """Return the largest prefix statistic of each of R records, (R,); larger is more anomalous.

    A prefix statistic is the anomaly score of a record after its first k readings; the maximum is over all k.

    Args:
        model: The network.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        codes: (R, m) feature codes (indexes in the schema) of m readings in order of arrival, without padding.
        values: (R, m) values in normalised units, or label codes.
        is_decision_point: (R, m) whether the record can raise an alert after this reading.
    """
    compute_conditionals = model.conditionals if kernels is None else kernels.conditionals_of_records
    with torch.inference_mode():
        x = to_tensor(values, model)
        log_p = _compute_log_p_value(compute_conditionals(to_tensor(codes, model), x), x, kernels)
    is_scored = ~model.schema.is_context[codes]
    _, state = advance_prefix_state(PrefixState.initial(len(codes)), log_p, is_scored, is_decision_point)
    return state.max_statistic


def _compute_log_p_value(conditional: Conditional, values: torch.Tensor, kernels: CpuKernels | None) -> Floats:
    """Return ln of the highest-density p-values of values, the probabilities of a value that is at most as likely.

    Args:
        conditional: Distributions of any shape.
        values: The values in normalised units or label codes, of the same shape.
        kernels: The model's compiled kernels, or None to compute with PyTorch.

    Returns:
        Natural logarithms of the same shape.
    """
    surprisal = conditional.compute_surprisal(values) if kernels is None else kernels.surprisal(conditional, values)
    log_p_value = conditional.compute_score_terms(values, surprisal).log_p_value
    return np.asarray(log_p_value.double().cpu().numpy())


def _build_explanation(
    schema: Schema, findings: _Findings, row: int, codes: Ints, raw_values: Floats, unseen_labels: Mapping[int, str]
) -> Explanation:
    """Return the explanation of the alert of one record: its readings, the most suspicious first, and its suspects.

    Args:
        schema: Describes the features.
        findings: The results for several records.
        row: The row of this record in the findings.
        codes: (m,) feature codes (indexes in the schema) of the record's m readings in order of arrival.
        raw_values: (m,) values in raw units, or label codes.
        unseen_labels: Texts of labels that the model does not have, by position in the order of arrival, from 0.

    Returns:
        The explanation. It lists no reading of a context feature. It names suspects only if replacing them avoids the
        alert.
    """
    contributions = []
    for position in np.flatnonzero(~schema.is_context[codes]).tolist():
        feature, cell = schema.features[codes[position]], (row, position)
        contributions.append(
            Contribution(
                feature.name,
                _format_value(feature, float(raw_values[position]), unseen_labels.get(position)),
                float(findings.surprise[cell]),
                _make_expected_range(feature, findings.expected[:, *cell], int(findings.likeliest_label[cell])),
                _none_if_nan(findings.attribution[cell]),
                _none_if_nan(findings.leave_one_out[cell]),
                _none_if_nan(findings.relief[cell]),
                bool(findings.is_suspect[cell]),
            )
        )
    contributions.sort(key=_make_sort_key)
    suspects = tuple(contribution.feature for contribution in contributions if contribution.suspect)
    return Explanation(tuple(contributions), suspects if findings.is_silenced[row] else None)


def _make_sort_key(contribution: Contribution) -> tuple[bool, bool, float]:
    """Return a sort key by which the most suspicious reading comes first.

    Suspects (readings whose replacement may avoid the alert) precede all others. Readings that could not become
    suspects are last. Otherwise the larger sum of surprise and relief comes first. The surprise is −ln of the reading's
    p-value given the readings that are not suspects; it is large for a second fault. The relief is the decrease of the
    record's −ln p without the reading; it is large for either of two readings that contradict each other.
    """
    is_candidate = contribution.relief is not None
    total = contribution.surprise + (contribution.relief or 0.0)
    return not contribution.suspect, not is_candidate, -total


def _none_if_nan(value: np.float64) -> float | None:
    """Return the number, or None for NaN, which stands for a result that was not computed."""
    return None if np.isnan(value) else float(value)


def _make_expected_range(feature: Feature, quantiles: Floats, label_code: int) -> ExpectedRange:
    """Return what was expected of a reading: three quantiles, or the text of the most probable label.

    Args:
        feature: The feature of the reading.
        quantiles: (3,) the 5%, 50% and 95% quantiles in raw units, which are used if the feature is continuous.
        label_code: Code of the most probable label, which is used if the feature is discrete.
    """
    if feature.kind == "continuous":
        return ExpectedRange(*(float(quantile) for quantile in quantiles))
    return ExpectedRange(None, feature.labels[label_code], None)


def _format_value(feature: Feature, value: float, unseen_label: str | None) -> float | str | None:
    """Return the value of a reading as it was sent: a number, or the text of a label.

    Args:
        feature: The feature of the reading.
        value: The value in raw units, or the code of the label. A code beyond the feature's labels stands for a label
            that the model does not have.
        unseen_label: The text of such a label, if any.
    """
    if feature.kind == "continuous":
        return value
    return feature.labels[int(value)] if value < len(feature.labels) else unseen_label
