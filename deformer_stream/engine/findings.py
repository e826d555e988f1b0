"""What is computed about the readings of records that have raised alerts, for their explanations.

`engine.explain` and `engine.explain_contexts` decide which readings are suspects. Both choose candidates, and compute
the distributions of readings in many orders (`compute_tree`). They store what follows from these in `Findings`, and
turn the findings into explanations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.conditionals import Conditionals, compute_conditionals
from deformer_stream.engine.estimates import find_likeliest_labels
from deformer_stream.engine.events import Contribution, ExpectedRange, Explanation
from deformer_stream.engine.order_trees import OrderTree, build_order_tree
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EXPECTED_QUANTILES = (0.05, 0.5, 0.95)
"""Probabilities of the quantiles that are shown as the expected range: a central 90% interval and the median."""


@dataclass(frozen=True, slots=True)
class ExplainedReadings:
    """The readings of A records, m of each, and the model by which they are explained.

    Attributes:
        model: The features, hyperparameters and weights.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        codes: (A, m) feature codes (indexes in the schema) in order of arrival, without padding.
        raw_values: (A, m) values in raw units, or label codes.
        values: (A, m) values in normalised units, or label codes.
        ages: (A, m) float64 seconds from the origin of the record to each reading; None if readings are not irregular.
    """

    model: Model
    kernels: CpuKernels | None
    codes: Ints
    raw_values: Floats
    values: Floats
    ages: Floats | None = None

    @staticmethod
    def from_raw(
        model: Model, kernels: CpuKernels | None, codes: Ints, raw_values: Floats, ages: Floats | None = None
    ) -> ExplainedReadings:
        """Return readings with their normalised values. The arguments are the attributes of the same names."""
        return ExplainedReadings(model, kernels, codes, raw_values, model.schema.normalise(codes, raw_values), ages)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.model.schema

    def select(self, rows: Ints) -> ExplainedReadings:
        """Return the readings of only some of the A records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return ExplainedReadings(
            self.model,
            self.kernels,
            codes=self.codes[rows],
            raw_values=self.raw_values[rows],
            values=self.values[rows],
            ages=None if self.ages is None else self.ages[rows],
        )


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """A records that have raised alerts and are explained together. Each has m readings: g given ones and n candidates.

    Suspects are the readings of a record to which its alert is attributed. Candidates are the readings that may become
    suspects; the g other readings are given. A position is the index of a reading in its record's order of arrival,
    from 0.

    Attributes:
        readings: The readings of the records.
        is_decision_point: (A, m) whether the record can raise an alert after this reading.
        given_positions: (A, g) positions of the given readings, such as those of context features (which condition the
            other readings and are not scored).
        candidate_positions: (A, n) positions of the candidates, in a random order that depends on the record id only.
        record_ids: Ids of the A records.
    """

    readings: ExplainedReadings
    is_decision_point: Bools
    given_positions: Ints
    candidate_positions: Ints
    record_ids: list[str]

    def select(self, rows: Ints) -> RecordGroup:
        """Return a group that contains only some of the A records of this group.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return RecordGroup(
            readings=self.readings.select(rows),
            is_decision_point=self.is_decision_point[rows],
            given_positions=self.given_positions[rows],
            candidate_positions=self.candidate_positions[rows],
            record_ids=[self.record_ids[row] for row in rows.tolist()],
        )


@dataclass(slots=True)
class Findings:
    """The computed parts of the explanations of A records with m readings each; NaN where nothing was computed.

    Columns are readings in order of arrival. Suspects are the readings of a record to which its alert is attributed;
    trusted readings are all others. The surprisal of a reading is −ln p of its value. The surprisal of a record is the
    sum over its readings.

    Attributes:
        surprise: (A, m) −ln of the highest-density p-value of the reading (probability of a value at most as likely as
            the observed one) given the trusted readings, in nats.
        expected: (3, A, m) the 5%, 50% and 95% quantiles given the trusted readings, in raw units; not used for
            discrete features.
        likeliest_label: (A, m) code of the most probable label given the trusted readings, 0 for continuous features.
        attribution: (A, m) mean surprisal of the reading given the readings before it, over several orders, in nats.
        leave_one_out: (A, m) surprisal of the reading given all other readings, in nats.
        relief: (A, m) surprisal of the record minus that of the record without the reading, in nats.
        is_suspect: (A, m) whether the reading is a suspect.
        is_silenced: (A,) whether there would be no alert if the suspects had expected values.
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
    def empty(num_records: int, num_readings: int) -> Findings:
        """Return findings (the computed parts of explanations) in which nothing has been computed yet.

        Args:
            num_records: Number of records.
            num_readings: Number of readings of each record.
        """
        shape = num_records, num_readings
        return Findings(
            surprise=np.full(shape, np.nan),
            expected=np.full((len(EXPECTED_QUANTILES), *shape), np.nan),
            likeliest_label=np.zeros(shape, np.int64),
            attribution=np.full(shape, np.nan),
            leave_one_out=np.full(shape, np.nan),
            relief=np.full(shape, np.nan),
            is_suspect=np.zeros(shape, bool),
            is_silenced=np.zeros(num_records, bool),
        )


@dataclass(frozen=True, slots=True)
class TreeOutput:
    """The network's output at the T nodes of a tree of orders, for A records.

    Attributes:
        schema: The features of the model.
        tree: The tree, which orders W readings of each record.
        positions: (A, W) entry [a, w] is for the reading of record a that has number w in the tree. It is the position
            of this reading in the record's order of arrival, from 0.
        codes: (A, T) feature codes at the nodes.
        values: (A, T) values at the nodes, in normalised units or label codes.
        conditional: The distributions at the nodes given their ancestors, of shape (A, T).
        surprisal: (A, T) −ln p of the values at the nodes, in nats; 0 for context features, which are not scored.
    """

    schema: Schema
    tree: OrderTree
    positions: Ints
    codes: Ints
    values: Floats
    conditional: Conditionals
    surprisal: Floats

    def select(self, rows: Ints) -> TreeOutput:
        """Return the network's output at the nodes of the same tree of orders, for only some of the A records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return TreeOutput(
            schema=self.schema,
            tree=self.tree,
            positions=self.positions[rows],
            codes=self.codes[rows],
            values=self.values[rows],
            conditional=self.conditional[rows],
            surprisal=self.surprisal[rows],
        )

    def compute_quantiles(self, nodes: Ints, probabilities: Sequence[float]) -> Floats:
        """Return quantiles of the network's distributions at some nodes of the tree of orders.

        Args:
            nodes: (K,) indexes of the nodes in the tree.
            probabilities: Q probabilities between 0 and 1.

        Returns:
            (Q, A, K) quantiles of each of the A records, in normalised units.
        """
        return self.conditional[:, nodes].quantiles(probabilities)

    def compute_surprise(self, nodes: Ints) -> Floats:
        """Return how improbable the values at some nodes of the tree of orders are.

        Args:
            nodes: (K,) indexes of the nodes in the tree.

        Returns:
            (A, K) −ln of the highest-density p-value (probability of a value at most as likely as the observed one) for
            each of A records, in nats; larger is more improbable.
        """
        return -self.conditional[:, nodes].compute_score_terms(self.values[:, nodes]).log_p_value

    def compute_centered_nll(self, nodes: Ints) -> Floats:
        """Return the centered NLL of the values at some nodes of the tree of orders: −ln p minus its expectation.

        Args:
            nodes: (K,) indexes of the nodes in the tree.

        Returns:
            (A, K) nats; positive if the value is less probable than usual.
        """
        return self.conditional[:, nodes].compute_score_terms(self.values[:, nodes]).centered_nll

    def sum_without_each_item(self) -> Floats:
        """Return for each of n readings (the items) the surprisal that each record would have without this reading.

        The surprisal of a record is the sum of −ln p over its readings, each given the readings before it in some
        order. One or two orders of the tree end with each item. No other reading of such an order depends on the item,
        so the sum without the last term is the surprisal of the record without the item. If there are two orders, the
        mean of both is returned. The remaining orders of the tree end with extra readings. They are not used.

        Returns:
            (A, n) surprisal in nats: entry [a, i] is that of record a without item i.
        """
        # The last orders of the tree end with extra readings and not with items.
        num_orders = len(self.tree.paths) - self.tree.num_extra
        paths, last_nodes = self.tree.paths[:num_orders], self.tree.leaves[:num_orders]
        is_node = paths >= 0  # short orders are padded with −1
        # `take` returns an array in C order. So the order of sums does not depend on how many records are explained.
        totals = np.where(is_node, self.surprisal.take(paths, 1), 0.0).sum(-1)  # (A, num_orders)
        totals_without_last = totals - self.surprisal[:, last_nodes]
        # Orders 0 … n − 1 end with items 0 … n − 1, and so do the next n orders if there are two per item.
        by_item = totals_without_last.reshape(len(totals), -1, self.tree.num_items)
        mean_by_item: Floats = by_item.mean(1)
        return mean_by_item


def compute_arrival_findings(readings: ExplainedReadings) -> Findings:
    """Compute how improbable each reading was and which values were expected, given the readings that arrived before.

    Args:
        readings: The readings of A records.

    Returns:
        Findings with the attributes `surprise`, `expected` and `likeliest_label`. The others are not computed.
    """
    num_records, num_readings = readings.codes.shape
    # This tree has one order, the order of arrival: node t stands for reading t.
    arrival_tree = build_order_tree(num_given=num_readings, num_items=0)
    positions = np.broadcast_to(np.arange(num_readings), readings.codes.shape)
    output = compute_tree(readings, positions, arrival_tree)
    findings = Findings.empty(num_records, num_readings)
    all_rows, all_nodes = np.arange(num_records), np.arange(num_readings)
    store_surprise_and_expected_values(findings, all_rows, positions, output, all_nodes)
    return findings


def choose_candidates(
    readings: ExplainedReadings, is_decision_point: Bools, record_ids: list[str], max_candidates: int
) -> RecordGroup:
    """Choose the candidates of A records: the readings to which the alert can be attributed.

    Readings of context features are never candidates, because they are not scored. If a record has more
    other readings than may become candidates, the candidates are those that were most improbable given the earlier
    ones.

    Args:
        readings: The readings of A records. All records have equally many context features.
        is_decision_point: (A, m) whether the record can raise an alert after this reading.
        record_ids: The A record ids, from which the random order of the candidates is drawn.
        max_candidates: Largest number of candidates of a record.

    Returns:
        The records with their candidates in random order.
    """
    # Given readings are those that are not candidates.
    is_given = readings.schema.is_context[readings.codes]
    num_readings, num_scored = is_given.shape[1], int((~is_given[0]).sum())
    num_candidates = min(num_scored, max_candidates)
    if num_scored > max_candidates:
        surprise = compute_arrival_findings(readings).surprise
        surprise = np.where(is_given, -np.inf, surprise)
        descending = -np.sort(-surprise, 1)
        smallest_of_candidates = descending[:, max_candidates - 1 : max_candidates]
        is_given = surprise < smallest_of_candidates
        is_given |= np.cumsum(~is_given, 1) > max_candidates  # of equal surprises, the first become candidates
    positions = np.argsort(~is_given, 1, kind="stable")  # given readings first, both kinds in order of arrival
    num_given = num_readings - num_candidates
    random_order = np.stack([_make_rng(record_id).permutation(num_candidates) for record_id in record_ids])
    return RecordGroup(
        readings=readings,
        is_decision_point=is_decision_point,
        given_positions=positions[:, :num_given],
        candidate_positions=np.take_along_axis(positions[:, num_given:], random_order, 1),
        record_ids=record_ids,
    )


def _make_rng(record_id: str) -> np.random.Generator:
    """Return a random number generator that is seeded by the record id, so that each run draws the same numbers."""
    digest = hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest))


def compute_tree(readings: ExplainedReadings, positions: Ints, tree: OrderTree) -> TreeOutput:
    """Compute the distributions of the readings of A records, for many orders of the readings in one forward pass.

    Args:
        readings: The readings of the A records.
        positions: (A, W) entry [a, w] is for the reading of record a that has number w in the tree. It is the position
            of this reading in the record's order of arrival, from 0.
        tree: The orders of W readings, which are the same for all records.

    Returns:
        The distribution at each node of each record, and the surprisal (−ln p) of the observed value under it.
    """
    # (A, W): the readings in the numbering of the tree.
    codes = np.take_along_axis(readings.codes, positions, 1)
    values = np.take_along_axis(readings.values, positions, 1)
    ages = None if readings.ages is None else np.take_along_axis(readings.ages, positions, 1)
    conditional = compute_conditionals(readings.model, readings.kernels, codes, values, ages, tree)
    node_values = values[:, tree.reading_index]  # (A, T)
    surprisal = -conditional.log_prob(node_values)
    node_codes = codes[:, tree.reading_index]
    # Context features condition the others but are not scored, so they add nothing to sums of surprisals.
    surprisal = np.where(readings.schema.is_context[node_codes], 0.0, surprisal)
    return TreeOutput(readings.schema, tree, positions, node_codes, node_values, conditional, surprisal)


def remove_from_rows(positions: Ints, removed: Ints) -> Ints:
    """Return the positions of readings without the removed ones, row by row, in the same order.

    Args:
        positions: (A, n) different positions in each of A rows.
        removed: (A, k) k of these positions to remove from each row.

    Returns:
        (A, n − k) the other positions of each row.
    """
    rows = zip(positions, removed, strict=True)
    return np.stack([row[~np.isin(row, removed_from_row)] for row, removed_from_row in rows])


def store_attributions(findings: Findings, candidates: Ints, output: TreeOutput) -> None:
    """Store in the findings how much each reading contributes to the surprisal of its record.

    The surprisal of a reading is −ln p of its value given the readings before it in some order. The surprisal of a
    record is the sum over its readings. Three contributions are stored:

    - `attribution`: the mean surprisal of the reading over all orders.
    - `leave_one_out`, only of candidates: the surprisal given all other readings.
    - `relief`, only of candidates: the surprisal of the record minus the surprisal of the record without the reading.

    Args:
        findings: The results for A records with W readings each, in which the contributions are stored.
        candidates: (A, n) positions of the candidates of each record.
        output: The network's output for P orders of all W readings. Each candidate is last in two of them.
    """
    tree = output.tree
    # (A, P, W): the terms of each order from first to last. `take` returns an array in C order. So the order of sums
    # does not depend on how many records are explained.
    terms_by_depth = output.surprisal.take(tree.paths, 1)
    # (P, W): the depth at which each order has reading 0, 1, …, so that the terms can be sorted by reading.
    depth_by_reading = np.argsort(tree.reading_index[tree.paths], 1)
    terms_by_reading = np.take_along_axis(terms_by_depth, depth_by_reading[None], 2)
    np.put_along_axis(findings.attribution, output.positions, terms_by_reading.mean(1), 1)
    # (A, 2, n): the last term of an order is the surprisal given all other readings.
    last_terms = output.surprisal[:, tree.leaves].reshape(len(candidates), -1, tree.num_items)
    np.put_along_axis(findings.leave_one_out, candidates, last_terms.mean(1), 1)
    record_surprisal = terms_by_depth.sum(-1).mean(1, keepdims=True)  # (A, 1): the mean over the orders
    relief = record_surprisal - output.sum_without_each_item()
    np.put_along_axis(findings.relief, candidates, relief, 1)


def store_surprise_and_expected_values(
    findings: Findings, rows: Ints, positions: Ints, output: TreeOutput, nodes: Ints
) -> None:
    """Store in the findings how improbable K readings of each of A records are, and which values were expected.

    The results are stored in the attributes `surprise`, `expected` and `likeliest_label`. They are taken from K nodes
    of a tree of orders. All records have the same tree, but a node can hold a different reading of each record.

    Args:
        findings: The findings to change.
        rows: (A,) the row of each record in the findings.
        positions: (A, K) for each record the positions of its readings at the nodes, in its order of arrival, from 0.
        output: The network's output at the nodes of the tree, for the A records.
        nodes: (K,) indexes of the nodes in the tree.
    """
    schema, codes = output.schema, output.codes[:, nodes]
    cells = rows[:, None], positions  # where the results of these readings are in the arrays of the findings
    findings.surprise[cells] = output.compute_surprise(nodes)
    quantiles = output.compute_quantiles(nodes, EXPECTED_QUANTILES)
    findings.expected[:, *cells] = schema.denormalise(codes, quantiles)
    log_mass = output.conditional[:, nodes].get_log_mass()
    findings.likeliest_label[cells] = find_likeliest_labels(schema, codes, log_mass)


def build_explanation(
    readings: ExplainedReadings,
    findings: Findings,
    row: int,
    unseen_labels: Mapping[int, str],
    times: Ints | None = None,
) -> Explanation:
    """Return the explanation of the alert of one record: a list of its readings, the most suspicious first.

    Suspects are the readings of the record to which the alert is attributed. They are marked in the list. If replacing
    the suspects by expected values avoids the alert, the explanation also names their features in `silenced_by`.

    Args:
        readings: The readings of several records.
        findings: The results for these records.
        row: The row of this record in the readings and in the findings.
        unseen_labels: Texts of labels that the model does not have, by position in the order of arrival, from 0.
        times: (m,) event times of the readings, microseconds since 1970, if readings are irregular.

    Returns:
        The explanation, without the readings of context features, which are not scored.
    """
    schema, codes, raw_values = readings.schema, readings.codes[row], readings.raw_values[row]
    contributions = []
    for position in np.flatnonzero(~schema.is_context[codes]).tolist():
        feature, cell = schema.features[codes[position]], (row, position)
        contributions.append(
            Contribution(
                feature=feature.name,
                value=_format_value(feature, float(raw_values[position]), unseen_labels.get(position)),
                surprise=float(findings.surprise[cell]),
                expected=_make_expected_range(
                    feature, findings.expected[:, *cell], int(findings.likeliest_label[cell])
                ),
                attribution=_none_if_nan(findings.attribution[cell]),
                leave_one_out=_none_if_nan(findings.leave_one_out[cell]),
                relief=_none_if_nan(findings.relief[cell]),
                suspect=bool(findings.is_suspect[cell]),
                unit=feature.unit,
                sensor=feature.sensor,
                time=None if times is None else int(times[position]),
            )
        )
    # The sort is stable: equal ones stay in arrival order.
    contributions.sort(key=_make_sort_key if times is None else _make_context_sort_key)
    suspects = tuple(contribution.feature for contribution in contributions if contribution.suspect)
    # If no set of suspects avoids the alert, the marked ones are only the largest set that was tried.
    silenced_by = suspects if findings.is_silenced[row] else None
    return Explanation(tuple(contributions), silenced_by)


def _make_sort_key(contribution: Contribution) -> tuple[bool, bool, float]:
    """Return a sort key by which the most suspicious reading comes first.

    Suspects (readings to which the alert is attributed) precede all others. Readings that were not considered as
    suspects come last. Within each of these classes, readings are ordered by the sum of surprise and relief, the
    largest first. The surprise is −ln of the reading's p-value given the readings that are not suspects. It is large
    for any improbable reading, also for a further fault that is not a suspect. The relief is the decrease of the
    record's −ln p if the reading is left out. It is large for each of two readings that contradict each other.
    """
    is_candidate = contribution.relief is not None  # the relief is computed for readings that may become suspects
    suspicion = contribution.surprise + (contribution.relief or 0.0)
    # In ascending order, False precedes True.
    return not contribution.suspect, not is_candidate, -suspicion


def _make_context_sort_key(contribution: Contribution) -> tuple[bool, float]:
    """Return a sort key by which the most suspicious reading of a context of irregular readings comes first.

    Suspects precede all others. Within each class, readings are ordered by their surprise, the largest first. The
    relief is no part of the key, because it depends on how predictable a sensor is. The readings of a very noisy
    sensor, of which there can be many, would come first.
    """
    return not contribution.suspect, -contribution.surprise


def _none_if_nan(value: np.float64) -> float | None:
    """Return the number as a float, or None for NaN, which stands for a result that was not computed."""
    return None if np.isnan(value) else float(value)


def _make_expected_range(feature: Feature, quantiles: Floats, label_code: int) -> ExpectedRange:
    """Return what was expected of a reading: three quantiles, or the text of the most probable label.

    Args:
        feature: The feature of the reading.
        quantiles: (3,) the 5%, 50% and 95% quantiles in raw units, which are used if the feature is continuous.
        label_code: Code of the most probable label, which is used if the feature is discrete.
    """
    if feature.kind == "continuous":
        low, median, high = quantiles.tolist()
        return ExpectedRange(low, median, high)
    return ExpectedRange(low=None, median=feature.labels[label_code], high=None)


def _format_value(feature: Feature, value: float, unseen_label: str | None) -> float | str | None:
    """Return the value of a reading as it was sent: a number, or the text of a label.

    Args:
        feature: The feature of the reading.
        value: The value in raw units, or the code of the label. A code beyond the feature's labels stands for a label
            that the model does not have.
        unseen_label: The text of such a label; None if the model has the label, or if the text is not known.

    Returns:
        The number or text; None if the model does not have the label and its text is not known.
    """
    if feature.kind == "continuous":
        return value
    has_model_label = value < len(feature.labels)
    return feature.labels[int(value)] if has_model_label else unseen_label
