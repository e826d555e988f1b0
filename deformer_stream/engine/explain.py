"""Explanations of alerts: the readings without which the record would be normal, and the values expected instead.

The method answers three questions about a record with readings v_1, …, v_n. The surprisal of a reading is −ln p of its
value given earlier readings, in nats. The surprisal of a record is the sum over its readings in some order.

1. How much does each reading contribute to the surprisal of the record? Its attribution is its mean surprisal over
   orders of the readings. That is its Shapley value in the game −ln p(v_S), so attributions add up to the record's
   surprisal. Its leave-one-out surprisal is −ln p(v_i | all other readings).
2. Which readings are suspicious? The relief of a reading is the surprisal of the record minus the surprisal of the
   record without it. In an exact density, relief and leave-one-out surprisal are equal. A network gives poor estimates
   for a normal reading given a broken one, so the relief evaluates the others without the broken one
   (docs/experiments/07-attribution-of-alerts.md).
3. Which values would have avoided the alert? Suspects are the smallest set of readings, found by greedy search, whose
   replacement by expected values makes the record raise no alert. Each set is tested in the record's order of arrival.

Expected ranges are conditioned on the trusted readings, which are all readings but the suspects. The orders of one
record are computed together as a tree of orders (`engine.order_trees`): a trie in which orders that begin alike share
nodes. Each node stands for a reading given the readings at its ancestors.

Alerts of records with irregular readings are explained by `engine.explain_contexts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.engine.conditionals import compute_conditionals
from deformer_stream.engine.estimates import find_likeliest_labels, round_to_quantum
from deformer_stream.engine.events import Explanation
from deformer_stream.engine.findings import (
    ExplainedReadings,
    Findings,
    RecordGroup,
    TreeOutput,
    build_explanation,
    choose_candidates,
    compute_arrival_findings,
    compute_tree,
    remove_from_rows,
    store_attributions,
    store_surprise_and_expected_values,
)
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.prefix_distances import get_distance_function
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ExplanationEffort = Literal["full", "fast", "off"]
"""How much is computed to explain an alert.

"full" computes which readings are suspects, how much each contributes, and which values were expected. "fast" takes one
forward pass per record: it computes how improbable each reading was given the earlier ones, and which values were
expected. "off" returns empty explanations.
"""

AlertRule = Callable[[Floats, Sequence[str]], Bools]
"""A function that decides which records raise an alert.

Its arguments are the anomaly scores of R records, (R, C) with C variants of each record, and the R record ids, from
which it finds their calibration groups. It returns booleans of shape (R, C).
"""

MAX_NODES_PER_PASS = 8192
"""Largest number of nodes of trees of orders in one forward pass, each of which costs as much as a reading. It is
enough to use all cores, and it bounds the memory of a pass."""

MAX_CANDIDATES = 64
"""Largest number of readings of a record that may become suspects (readings that explain the alert). If a record has
more, those that were most improbable on arrival are chosen, because the cost grows faster than their number."""

NUM_SINGLE_SUSPECTS = 4
"""Number of readings of which each is tried as the only suspect (reading that explains the alert). First the reading is
tried whose removal makes the record most probable, then the others in one pass. A fault in one sensor is the most
frequent cause, and this ranking has it among the first few."""

MAX_SUSPECTS = 3
"""Largest set of suspects that is tried. Larger sets would no longer point to a cause."""


def explain_records(
    model: Model,
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

    An explanation lists the readings of a record, the most suspicious first. Readings of context features, which are
    not scored, are left out. It also names the suspects: a small set of readings whose replacement by expected values
    would have avoided the alert.

    Args:
        model: The features, hyperparameters and weights.
        codes: (A, L) feature codes in order of arrival, −1 as padding at the end; L is the number of readings of the
            longest record.
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
            with the same event time, which are scored together), this is true for the last reading only. None if it is
            true for all readings.

    Returns:
        One explanation per record. It is empty if the record has only context features or if the effort is "off".

    Raises:
        ConfigError: The readings of the model are irregular (see `explain_contexts`).
    """
    check_single_readings(model.schema, "explain")
    explanations = [Explanation((), None)] * len(codes)
    if effort == "off":
        return explanations
    is_decision_point = np.ones(codes.shape, bool) if is_decision_point is None else is_decision_point
    for rows in _group_similar_records(model.schema, codes):
        # All records of the group have equally many readings, so no padding is left.
        num_readings = int((codes[rows[0]] >= 0).sum())
        readings = ExplainedReadings.from_raw(
            model, kernels, codes[rows, :num_readings], raw_values[rows, :num_readings]
        )
        if effort == "fast":
            findings = compute_arrival_findings(readings)
        else:
            ids = [record_ids[row] for row in rows]
            group = choose_candidates(readings, is_decision_point[rows, :num_readings], ids, MAX_CANDIDATES)
            findings = _find_suspects(group, alert_rule)
        for index, row in enumerate(rows.tolist()):
            explanations[row] = build_explanation(readings, findings, index, unseen_labels[row])
    return explanations


def _group_similar_records(schema: Schema, codes: Ints) -> Iterator[Ints]:
    """Divide records into groups that can be computed together: with equally many readings and context features.

    Args:
        schema: Describes the features.
        codes: (A, L) feature codes of A records with at most L readings, −1 as padding at the end.

    Yields:
        The row numbers of the records of one group, from 0 to A − 1. The size of a group is bounded, so that one
        forward pass has at most `MAX_NODES_PER_PASS` nodes, unless a single record needs more. Records that
        have only context features are left out, because these features are not scored.
    """
    is_reading = codes >= 0
    readings_by_record = is_reading.sum(1)
    context_by_record = (is_reading & schema.is_context[np.maximum(codes, 0)]).sum(1)
    distinct_counts = np.unique(np.stack([readings_by_record, context_by_record]), axis=1)
    for num_readings, num_context in distinct_counts.T.tolist():
        if num_readings == num_context:
            continue
        rows = np.flatnonzero((readings_by_record == num_readings) & (context_by_record == num_context))
        batch_size = max(1, MAX_NODES_PER_PASS // bound_num_nodes(num_readings))
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


def bound_num_nodes(num_items: int) -> int:
    """Return an upper bound of the number of nodes of the tree `build_order_tree(0, num_items, is_mirrored=True)`.

    The tree holds two orders for each of n readings (the items), in which this reading is the last one. It consists of
    two parts with one order per item. To share nodes between orders, `build_order_tree` divides the items into halves
    until one item is left. A part therefore has at most ⌈log2 n⌉ + 1 levels, each with at most n nodes.
    """
    return 2 * num_items * ((num_items - 1).bit_length() + 1)


def _find_suspects(group: RecordGroup, alert_rule: AlertRule) -> Findings:
    """Find the suspects of A records, and compute the complete findings for their readings.

    Suspects are a small set of readings whose replacement by expected values avoids the alert; the other readings are
    trusted. First, single readings are tried, beginning with the one whose removal makes the record most probable. If
    none avoids the alert, further suspects are added to the first one, up to `MAX_SUSPECTS`. The next suspect is always
    the reading whose removal leaves the smallest surprisal (sum of −ln p) of the trusted readings.

    Args:
        group: The A records with their candidates.
        alert_rule: Decides whether a record with replaced readings still raises an alert.

    Returns:
        The findings. If no set of suspects avoids the alert of a record, they hold the largest set that was tried.
    """
    num_records, num_candidates = group.candidate_positions.shape
    num_given = group.given_positions.shape[1]
    max_suspects = min(MAX_SUSPECTS, num_candidates)
    findings = Findings.empty(*group.readings.codes.shape)
    positions = np.concatenate([group.given_positions, group.candidate_positions], 1)
    mirrored_tree = build_order_tree(num_given, num_candidates, is_mirrored=True)
    output = compute_tree(group.readings, positions, mirrored_tree)
    store_attributions(findings, group.candidate_positions, output)
    rows = np.arange(num_records)  # the undecided records, to which further suspects may be added
    if num_given:
        # The first nodes of the tree are the given readings, with the readings before them as ancestors.
        store_surprise_and_expected_values(findings, rows, group.given_positions, output, np.arange(num_given))
    suspects, findings.is_silenced[:] = _try_single_suspects(group, output, alert_rule)
    for num_suspects in range(1, max_suspects + 1):
        undecided_group = group.select(rows)
        trusted = remove_from_rows(undecided_group.candidate_positions, suspects)
        positions = np.concatenate([undecided_group.given_positions, trusted, suspects], 1)
        # Every suspect is computed given the trusted readings, and every trusted one given the other trusted ones.
        tree = build_order_tree(num_given, num_candidates - num_suspects, num_suspects)
        output = compute_tree(undecided_group.readings, positions, tree)
        if num_suspects > 1:  # single suspects have been tested already
            suspect_leaves = tree.leaves[num_candidates - num_suspects :]
            replacements = _compute_replacements(output, suspect_leaves)
            # One set per record, which consists of all suspects.
            full_set = np.broadcast_to(np.arange(num_suspects), (len(rows), 1, num_suspects))
            is_silenced = _test_replacements(undecided_group, suspects, replacements, full_set, alert_rule)
            findings.is_silenced[rows] = is_silenced[:, 0]
        findings.is_suspect[rows[:, None], suspects] = True
        is_undecided = ~findings.is_silenced[rows] & (num_suspects < max_suspects)
        decided = np.flatnonzero(~is_undecided)
        if len(decided):
            # The leaves of the tree are first the trusted candidates and then the suspects.
            candidates = np.concatenate([trusted, suspects], 1)[decided]
            store_surprise_and_expected_values(findings, rows[decided], candidates, output.select(decided), tree.leaves)
        if not is_undecided.any():
            break
        # The next suspect is the trusted candidate whose removal leaves the smallest surprisal.
        next_index = output.sum_without_each_item().argmin(1)
        next_suspect = np.take_along_axis(trusted, next_index[:, None], 1)
        rows, suspects = rows[is_undecided], np.concatenate([suspects, next_suspect], 1)[is_undecided]
    return findings


def _try_single_suspects(group: RecordGroup, output: TreeOutput, alert_rule: AlertRule) -> tuple[Ints, Bools]:
    """Find for each of A records a single reading whose replacement by its expected value avoids the alert.

    The first reading to test is the candidate whose removal makes the record most probable. If its replacement does not
    avoid the alert, the next `NUM_SINGLE_SUSPECTS` − 1 candidates are tested too. If none of them avoids the alert,
    the first candidate is returned.

    Args:
        group: The A records with n candidates (readings to which the alert can be attributed) each.
        output: The network's output for orders of the readings, in which each candidate is last once or twice.
        alert_rule: Decides whether a record with a replaced reading still raises an alert.

    Returns:
        (A, 1) position of the found reading in each record's order of arrival; and (A,) whether replacing it avoids the
        alert.
    """
    # (A, n): the expected value of each candidate given all other readings, taken from an order that ends with it.
    last_nodes = output.tree.leaves[: output.tree.num_items]
    replacements = _compute_replacements(output, last_nodes)
    # (A, k) indexes into the candidates; the one whose removal leaves the smallest surprisal (−ln p) is first.
    ranked = np.argsort(output.sum_without_each_item(), 1)[:, :NUM_SINGLE_SUSPECTS]
    avoids_alert = np.zeros(ranked.shape, bool)
    # One pass tests the first candidate of all records, a second pass the next ones of records that still need them.
    for columns in (slice(0, 1), slice(1, NUM_SINGLE_SUSPECTS)):
        rows = np.flatnonzero(~avoids_alert.any(1))
        single_sets = ranked[rows, columns, None]  # (rows, columns, 1): sets of one candidate each
        if single_sets.size:  # there are records to test, and candidates that have not been tested
            avoids_alert[rows, columns] = _test_replacements(
                group.select(rows),
                group.candidate_positions[rows],
                replacements[rows],
                single_sets,
                alert_rule,
            )
    first_column = avoids_alert.argmax(1)[:, None]  # 0 if no candidate avoids the alert
    found = np.take_along_axis(ranked, first_column, 1)
    found_avoids_alert = np.take_along_axis(avoids_alert, first_column, 1)[:, 0]
    return np.take_along_axis(group.candidate_positions, found, 1), found_avoids_alert


def _compute_replacements(output: TreeOutput, nodes: Ints) -> Floats:
    """Return the expected values by which readings are replaced, to test whether that avoids the alert.

    A continuous reading is replaced by its conditional median, rounded to the resolution of the sensor; a discrete one
    by its most probable label. Both are taken from a tree of orders.

    Args:
        output: The network's output at the nodes of the tree, for A records.
        nodes: (K,) indexes of the nodes whose readings are replaced.

    Returns:
        (A, K) values in raw units, or label codes.
    """
    schema, codes = output.schema, output.codes[:, nodes]
    normalised_median = output.compute_quantiles(nodes, (0.5,))[0]
    number = round_to_quantum(schema, codes, schema.denormalise(codes, normalised_median))
    label = find_likeliest_labels(schema, codes, output.conditional[:, nodes].get_log_mass())
    return np.where(schema.is_discrete[codes], label, number)


def _test_replacements(
    group: RecordGroup, positions: Ints, replacements: Floats, sets: Ints, alert_rule: AlertRule
) -> Bools:
    """Return whether the alert of each of A records is avoided if some of its readings are replaced by other values.

    Several sets of readings are tested independently. For each set, all of its readings are replaced, and the record is
    scored again in its order of arrival.

    Args:
        group: The A records with m readings each.
        positions: (A, K) positions, in the order of arrival, of readings that may be replaced.
        replacements: (A, K) the values that replace them, in raw units or label codes.
        sets: (A, C, k) for each record C sets of k readings. A reading is given by its column in `positions`, from 0 to
            K − 1.
        alert_rule: Decides whether a record with a given anomaly score raises an alert.

    Returns:
        (A, C) whether replacing the set avoids the alert.
    """
    num_records, num_sets, _ = sets.shape
    # (A, C, m): one copy of each record for each set, in which the readings of the set are replaced.
    readings = group.readings
    raw_values = np.repeat(readings.raw_values[:, None], num_sets, 1)
    record = np.arange(num_records)[:, None, None]
    replaced_positions, new_values = positions[record, sets], replacements[record, sets]  # (A, C, k) each
    np.put_along_axis(raw_values, replaced_positions, new_values, 2)
    # (A · C, m): all copies are scored as records of their own.
    flat_raw_values = raw_values.reshape(num_records * num_sets, -1)
    codes = np.repeat(readings.codes, num_sets, 0)
    copies = ExplainedReadings.from_raw(readings.model, readings.kernels, codes, flat_raw_values)
    anomaly_scores = _compute_max_statistics(copies, np.repeat(group.is_decision_point, num_sets, 0))
    return ~alert_rule(anomaly_scores.reshape(num_records, num_sets), group.record_ids)


def _compute_max_statistics(readings: ExplainedReadings, is_decision_point: Bools) -> Floats:
    """Return the anomaly score of each of R records after its last reading, (R,); larger is more anomalous.

    A prefix statistic is computed after each reading. It combines the p-values of this reading and all readings before
    it. The anomaly score is the largest of these statistics. Readings after which the record cannot raise an alert are
    left out of this maximum.

    Args:
        readings: The readings of the R records, m of each.
        is_decision_point: (R, m) whether the record can raise an alert after this reading.
    """
    model, codes, values = readings.model, readings.codes, readings.values
    scored = compute_conditionals(model, readings.kernels, codes, values).compute_score_terms(values)
    is_scored = ~model.schema.is_context[codes]
    terms = None
    distance = AlertDistance.from_model(model)
    if distance is not None:
        terms = distance.compute_terms(codes, values, get_distance_function(model))
    # The state after all readings contains the largest prefix statistic.
    prior = PriorPValues.pair(AlertPrior.from_model(model), scored.log_p_prior)
    initial = PrefixState.initial(len(codes))
    _, state = advance_prefix_state(initial, scored.log_p_value, is_scored, is_decision_point, terms, prior)
    return state.max_statistic
