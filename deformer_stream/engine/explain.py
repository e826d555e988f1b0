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
"""How much is computed for an explanation.

"full" computes everything that the module describes. "fast" takes one forward pass per record: surprise and expected
range of each reading given the earlier ones. "off" returns empty explanations.
"""

AlertRule = Callable[[Floats, Sequence[str]], Bools]
"""Decides which records raise an alert.

Its arguments are the largest prefix statistics of R records, (R, C) with C variants of each, and the R record ids. It
returns booleans of shape (R, C).
"""

EXPECTED_QUANTILES = (0.05, 0.5, 0.95)
"""Probabilities of the quantiles that are shown as the expected range: a central 90% interval and the median."""

MAX_READINGS_PER_PASS = 8192
"""Largest number of tree nodes in one forward pass: enough to use all cores, and it bounds the memory of a pass."""

MAX_CANDIDATES = 64
"""Largest number of readings of a record that may become suspects. If there are more, the ones with the largest
surprise on arrival are chosen, because the cost of a tree of orders grows faster than the number of its readings."""

NUM_SINGLE_SUSPECTS = 4
"""Number of readings that are tried as the only suspect: first the one with the largest relief, then the others in one
pass. A fault in one sensor is the most frequent cause, and relief names it within the first few."""

MAX_SUSPECTS = 3
"""Largest set of suspects that is tried. Larger sets would no longer point to a cause."""


@dataclass(slots=True)
class _RecordGroup:
    """A records with m readings each, that have equally many candidates (readings that may become suspects).

    A position is the index of a reading in its record's order of arrival.

    Attributes:
        schema: The features.
        codes: (A, m) feature codes.
        raw_values: (A, m) values in raw units.
        values: (A, m) values in normalised units.
        is_decision_point: (A, m) whether the alert rule considers the prefix that ends with this reading.
        given_positions: (A, g) positions of the readings that are never suspects, such as context.
        candidate_positions: (A, n) positions of the candidates, in a random order that depends on the record id.
        record_ids: A record ids.
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
        """Return the group with only these records."""
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
    """The results for each reading of A records with m readings, by position; NaN where nothing was computed.

    Attributes:
        surprise: (A, m) −ln of the highest-density p-value of the reading, given the trusted readings.
        expected: (3, A, m) the quantiles `EXPECTED_QUANTILES` in raw units, given the trusted readings.
        likeliest_label: (A, m) code of the most probable label, 0 for continuous features.
        attribution: (A, m) mean surprisal over orders, in nats.
        leave_one_out: (A, m) surprisal given all other readings, in nats.
        relief: (A, m) surprisal of the record minus that of the record without the reading, in nats.
        is_suspect: (A, m) whether the reading belongs to the set of suspects.
        is_silenced: (A,) whether replacing the suspects avoids the alert.
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
        """Return findings in which nothing has been computed yet."""
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

    Attributes:
        tree: The tree, over W readings of each record.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        positions: (A, W) positions of the tree's readings in the records.
        codes: (A, T) feature codes at the nodes.
        values: (A, T) normalised values at the nodes.
        conditional: The distributions at the nodes given their ancestors, of shape (A, T).
        surprisal: (A, T) −ln p of the values at the nodes, 0 for context.
    """

    tree: OrderTree
    kernels: CpuKernels | None
    positions: Ints
    codes: Ints
    values: torch.Tensor
    conditional: Conditional
    surprisal: Floats

    def select(self, rows: Ints) -> _TreeOutput:
        """Return the output for only these records."""
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
        """Return quantiles at K nodes, (Q, A, K) in normalised units for Q probabilities."""
        conditional = self.conditional[:, torch.from_numpy(nodes)]
        if self.kernels is None:
            quantiles = conditional.quantiles(probabilities)
        else:
            quantiles = self.kernels.quantiles(conditional, probabilities)
        return np.asarray(quantiles.double().cpu().numpy())

    def compute_surprise(self, nodes: Ints) -> Floats:
        """Return −ln of the highest-density p-values of the values at K nodes, (A, K)."""
        index = torch.from_numpy(nodes)
        return -_compute_log_p_value(self.conditional[:, index], self.values[:, index], self.kernels)

    def sum_without_each_item(self) -> Floats:
        """Return the surprisal of each record without item i, for every item i, (A, n) in nats.

        It is the sum over the order that ends with item i, without its last term. If several orders end with the item,
        it is their mean.
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
    """Explain A records; each explanation lists the record's readings, most suspicious first, without context.

    Args:
        model: The network, in evaluation mode.
        codes: (A, m) feature codes in order of arrival, −1 as padding at the end.
        raw_values: (A, m) values in raw units.
        unseen_labels: For each record, the texts of labels that the model does not know, by position.
        record_ids: A record ids, which determine the random orders, so the same record always gets the same ones.
        alert_rule: Decides whether a record with replaced readings still raises an alert.
        effort: How much to compute. With "fast", surprises and expected ranges are conditioned on earlier readings, and
            the largest surprise comes first.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        is_decision_point: (A, m) whether the alert rule considers the prefix that ends with this reading. In a tie
            group (readings with the same event time) that is the last reading only. None if all prefixes count.
    """
    explanations = [Explanation((), None)] * len(codes)
    if effort == "off":
        return explanations
    is_decision_point = np.ones(codes.shape, bool) if is_decision_point is None else is_decision_point
    for rows in _group_similar_records(model.schema, codes):
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
    """Yield the rows of records with equally many readings and equally much context, a bounded number at a time.

    Such records have trees of the same shape, so they can be computed together. Records without a scored reading are
    skipped.
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
    """Return the surprise and the expected range of each reading given the earlier readings of its record.

    Args:
        model: The network.
        codes: (A, m) feature codes in order of arrival, without padding.
        raw_values: (A, m) values in raw units.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
    """
    num_records, num_readings = codes.shape
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
    """Return the records with their candidates, the readings that may become suspects, in random order.

    Context readings are never candidates. If a record has more than `MAX_CANDIDATES` other readings, the candidates are
    those with the largest surprise on arrival.

    Args:
        model: The network.
        codes: (A, m) feature codes in order of arrival, without padding; all records have equally much context.
        raw_values: (A, m) values in raw units.
        is_decision_point: (A, m) whether the alert rule considers the prefix that ends with this reading.
        record_ids: A record ids, which determine the random orders.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
    """
    is_given = model.schema.is_context[codes]
    num_readings, num_scored = codes.shape[1], int((~is_given[0]).sum())
    num_candidates = min(num_scored, MAX_CANDIDATES)
    if num_scored > MAX_CANDIDATES:
        surprise = _score_on_arrival(model, codes, raw_values, kernels).surprise
        surprise = np.where(is_given, -np.inf, surprise)
        smallest = -np.sort(-surprise, 1)[:, MAX_CANDIDATES - 1 : MAX_CANDIDATES]
        is_given = surprise < smallest
        is_given |= np.cumsum(~is_given, 1) > MAX_CANDIDATES  # of equal surprises, the first become candidates
    positions = np.argsort(~is_given, 1, kind="stable")
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
    """Return a random number generator that depends on the record id only."""
    digest = hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest))


def _compute_tree(model: DEformer, group: _RecordGroup, positions: Ints, tree: OrderTree) -> _TreeOutput:
    """Run the network over a tree of orders.

    Args:
        model: The network.
        group: The A records.
        positions: (A, W) positions of the readings that the tree numbers 0 … W − 1.
        tree: A tree over W readings.
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
    """Return attributions, reliefs, suspects and expected ranges of all readings of A records.

    First each of the few readings with the largest relief is tried as the only suspect. If that does not avoid the
    alert, further suspects are added one by one, each time the reading whose removal leaves the smallest surprisal.
    """
    num_records, num_candidates = group.candidate_positions.shape
    num_given = group.given_positions.shape[1]
    max_suspects = min(MAX_SUSPECTS, num_candidates)
    findings = _Findings.empty(*group.codes.shape)
    positions = np.concatenate([group.given_positions, group.candidate_positions], 1)
    output = _compute_tree(model, group, positions, build_order_tree(num_given, num_candidates, is_mirrored=True))
    _store_attributions(findings, group, output)
    rows = np.arange(num_records)  # records whose suspects are not final yet
    if num_given:
        _store_expected_ranges(model, findings, rows, group.given_positions, output, np.arange(num_given))
    suspects, findings.is_silenced[:] = _try_single_suspects(model, group, output, alert_rule)
    for num_suspects in range(1, max_suspects + 1):
        open_group = group.select(rows)
        trusted = _remove_positions(open_group.candidate_positions, suspects)
        positions = np.concatenate([open_group.given_positions, trusted, suspects], 1)
        # Every suspect is computed given the trusted readings, and every trusted one given the other trusted ones.
        tree = build_order_tree(num_given, num_candidates - num_suspects, num_suspects)
        output = _compute_tree(model, open_group, positions, tree)
        if num_suspects > 1:
            suspect_leaves = tree.leaves[num_candidates - num_suspects :]
            replacements = _compute_replacements(model, output, suspect_leaves)
            full_set = np.broadcast_to(np.arange(num_suspects), (len(rows), 1, num_suspects))
            is_silenced = _test_replacements(model, open_group, suspects, replacements, full_set, alert_rule)
            findings.is_silenced[rows] = is_silenced[:, 0]
        findings.is_suspect[rows[:, None], suspects] = True
        is_open = ~findings.is_silenced[rows] & (num_suspects < max_suspects)
        final = np.flatnonzero(~is_open)
        if len(final):
            candidates = np.concatenate([trusted, suspects], 1)[final]
            _store_expected_ranges(model, findings, rows[final], candidates, output.select(final), tree.leaves)
        if not is_open.any():
            break
        next_index = output.sum_without_each_item().argmin(1)
        next_suspect = np.take_along_axis(trusted, next_index[:, None], 1)
        rows, suspects = rows[is_open], np.concatenate([suspects, next_suspect], 1)[is_open]
    return findings


def _try_single_suspects(
    model: DEformer, group: _RecordGroup, output: _TreeOutput, alert_rule: AlertRule
) -> tuple[Ints, Bools]:
    """Return the best single suspect of each of A records, and whether replacing it avoids the alert.

    The suspect with the largest relief is tested first. Only for records that still raise an alert, the next ones are
    tested too. If none of them avoids the alert, the first one is returned.

    Args:
        model: The network.
        group: The A records with n candidates each.
        output: The network's output for a tree whose items are the candidates.
        alert_rule: Decides whether a record with a replaced reading still raises an alert.

    Returns:
        The positions of the suspects, (A, 1), and whether the alert is avoided, (A,).
    """
    replacements = _compute_replacements(model, output, output.tree.leaves[: output.tree.num_items])
    # (A, k) indexes into the candidates, largest relief first.
    ranked = np.argsort(output.sum_without_each_item(), 1)[:, :NUM_SINGLE_SUSPECTS]
    is_silenced = np.zeros(ranked.shape, bool)
    for columns in (slice(0, 1), slice(1, NUM_SINGLE_SUSPECTS)):
        rows = np.flatnonzero(~is_silenced.any(1))
        single_sets = ranked[rows, columns, None]
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


def _remove_positions(positions: Ints, removed: Ints) -> Ints:
    """Return each row of positions, (A, n), without the k positions in the same row of `removed`, (A, n − k)."""
    return np.stack([row[~np.isin(row, other)] for row, other in zip(positions, removed, strict=True)])


def _store_attributions(findings: _Findings, group: _RecordGroup, output: _TreeOutput) -> None:
    """Store the attribution of every reading, and the leave-one-out surprisal and the relief of every candidate.

    Args:
        findings: The results, which are changed.
        group: The A records with n candidates each.
        output: The network's output for a mirrored tree whose items are the candidates.
    """
    tree, candidates = output.tree, group.candidate_positions
    path_surprisal = output.surprisal[:, tree.paths]  # (A, P, W), by position in the order
    depth_by_reading = np.argsort(tree.reading_index[tree.paths], 1)  # (P, W)
    attribution = np.take_along_axis(path_surprisal, depth_by_reading[None], 2).mean(1)
    np.put_along_axis(findings.attribution, output.positions, attribution, 1)
    last_terms = output.surprisal[:, tree.leaves].reshape(len(candidates), -1, tree.num_items)
    np.put_along_axis(findings.leave_one_out, candidates, last_terms.mean(1), 1)
    record_surprisal = path_surprisal.sum(-1).mean(1, keepdims=True)
    np.put_along_axis(findings.relief, candidates, record_surprisal - output.sum_without_each_item(), 1)


def _store_expected_ranges(
    model: DEformer, findings: _Findings, rows: Ints, positions: Ints, output: _TreeOutput, nodes: Ints
) -> None:
    """Store the surprise, the expected range and the likeliest label of readings, computed at nodes of a tree.

    Args:
        model: The network.
        findings: The results, which are changed.
        rows: (A,) the records of the output, as rows of the findings.
        positions: (A, K) positions of the readings.
        output: The network's output for the A records.
        nodes: (K,) the nodes at which these readings are.
    """
    schema, codes = model.schema, output.codes[:, nodes]
    cells = rows[:, None], positions
    findings.surprise[cells] = output.compute_surprise(nodes)
    quantiles = output.compute_quantiles(nodes, EXPECTED_QUANTILES)
    findings.expected[:, *cells] = schema.denormalise(codes, quantiles)
    conditional = output.conditional[:, torch.from_numpy(nodes)]
    findings.likeliest_label[cells] = find_likeliest_labels(schema, codes, conditional)


def _compute_replacements(model: DEformer, output: _TreeOutput, nodes: Ints) -> Floats:
    """Return the values by which readings at K nodes are replaced, (A, K) in raw units.

    They are conditional medians rounded to the sensor's resolution, or the most probable label.
    """
    schema, codes = model.schema, output.codes[:, nodes]
    median = schema.denormalise(codes, output.compute_quantiles(nodes, (0.5,))[0])
    number = round_to_quantum(schema, codes, median)
    label = find_likeliest_labels(schema, codes, output.conditional[:, torch.from_numpy(nodes)])
    return np.where(schema.is_discrete[codes], label, number)


def _test_replacements(
    model: DEformer, group: _RecordGroup, positions: Ints, replacements: Floats, sets: Ints, alert_rule: AlertRule
) -> Bools:
    """Return whether each record would have raised no alert with some of its readings replaced.

    Args:
        model: The network.
        group: The A records, which are scored in their order of arrival.
        positions: (A, K) positions of readings.
        replacements: (A, K) their replacements in raw units.
        sets: (A, C, k) C sets of k readings each, as indexes into the K readings. A set is replaced as a whole.
        alert_rule: Decides whether the largest prefix statistic raises an alert.

    Returns:
        (A, C) whether replacing the set avoids the alert.
    """
    num_records, num_sets, _ = sets.shape
    record = np.arange(num_records)[:, None, None]
    raw_values = np.repeat(group.raw_values[:, None], num_sets, 1)
    np.put_along_axis(raw_values, positions[record, sets], replacements[record, sets], 2)
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
    """Return the largest prefix statistic of each of R records, (R,), larger is more anomalous.

    Args:
        model: The network.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        codes: (R, m) feature codes in order of arrival, without padding.
        values: (R, m) values in normalised units.
        is_decision_point: (R, m) whether the alert rule considers the prefix that ends with this reading.
    """
    compute_conditionals = model.conditionals if kernels is None else kernels.conditionals_of_records
    with torch.inference_mode():
        x = to_tensor(values, model)
        log_p = _compute_log_p_value(compute_conditionals(to_tensor(codes, model), x), x, kernels)
    is_scored = ~model.schema.is_context[codes]
    _, state = advance_prefix_state(PrefixState.initial(len(codes)), log_p, is_scored, is_decision_point)
    return state.max_statistic


def _compute_log_p_value(conditional: Conditional, values: torch.Tensor, kernels: CpuKernels | None) -> Floats:
    """Return ln of the highest-density p-values of values under their distributions, all of the same shape."""
    surprisal = conditional.compute_surprisal(values) if kernels is None else kernels.surprisal(conditional, values)
    log_p_value = conditional.compute_score_terms(values, surprisal).log_p_value
    return np.asarray(log_p_value.double().cpu().numpy())


def _build_explanation(
    schema: Schema, findings: _Findings, row: int, codes: Ints, raw_values: Floats, unseen_labels: Mapping[int, str]
) -> Explanation:
    """Return the explanation of one record.

    Args:
        schema: The features.
        findings: The results for several records.
        row: The row of this record in the findings.
        codes: (m,) feature codes of this record in order of arrival.
        raw_values: (m,) values in raw units.
        unseen_labels: Texts of labels that the model does not know, by position.
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
    suspects = tuple(part.feature for part in contributions if part.suspect)
    return Explanation(tuple(contributions), suspects if findings.is_silenced[row] else None)


def _make_sort_key(part: Contribution) -> tuple[bool, bool, float]:
    """Return a sort key by which the most suspicious contribution comes first.

    Suspects precede all others, and candidates precede readings that could not become suspects. Within these groups the
    sum of surprise and relief decides. Relief is large for either of two readings that contradict each other. Surprise,
    which is given the trusted readings, is large for a second fault.
    """
    is_candidate = part.relief is not None
    return not part.suspect, not is_candidate, -part.surprise - (part.relief or 0.0)


def _none_if_nan(value: np.float64) -> float | None:
    """Return the number, or None for NaN, which stands for a result that was not computed."""
    return None if np.isnan(value) else float(value)


def _make_expected_range(feature: Feature, quantiles: Floats, label_code: int) -> ExpectedRange:
    """Return the expected range of a reading: three quantiles in raw units, or the text of the most probable label."""
    if feature.kind == "continuous":
        return ExpectedRange(*(float(quantile) for quantile in quantiles))
    return ExpectedRange(None, feature.labels[label_code], None)


def _format_value(feature: Feature, value: float, unseen_label: str | None) -> float | str | None:
    """Return a reading as it was sent: the number, or the text of the label."""
    if feature.kind == "continuous":
        return value
    return feature.labels[int(value)] if value < len(feature.labels) else unseen_label
