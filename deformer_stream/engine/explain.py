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

An alert of a record with irregular readings is explained by `explain_context`. The first question is answered in the
same way, for the readings of the alert's context, each at its own time. These are the readings on which the alerting
reading is conditional, and itself. The second and the third are not, for two reasons. A faulty sensor has several
readings in a context, which make each other probable. So no single reading is the suspect. And the alert may depend on
readings before the context, so that replacements cannot be tested. The suspects are therefore the latest readings of
one sensor. If a cumulative sum of one sensor has raised the alert (`calibration.cusum`), they are readings of this
sensor (`_find_readings_of_evidence`). Otherwise they are those that are together most improbable given the readings of
all other sensors (`_find_suspect_readings`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.engine.conditionals import Conditionals, compute_conditionals
from deformer_stream.engine.estimates import find_likeliest_labels, round_to_quantum
from deformer_stream.engine.events import AlertCause, Contribution, ExpectedRange, Explanation
from deformer_stream.engine.order_trees import OrderTree, build_chain_tree, build_order_tree
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.prefix_distances import get_distance_function
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Feature, Schema

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

EXPECTED_QUANTILES = (0.05, 0.5, 0.95)
"""Probabilities of the quantiles that are shown as the expected range: a central 90% interval and the median."""

MAX_NODES_PER_PASS = 8192
"""Largest number of nodes of trees of orders in one forward pass, each of which costs as much as a reading. It is
enough to use all cores, and it bounds the memory of a pass."""

MAX_CANDIDATES = 64
"""Largest number of readings of a record that may become suspects (readings that explain the alert). If a record has
more, those that were most improbable on arrival are chosen, because the cost grows faster than their number."""

MAX_CONTEXT_CANDIDATES = 256
"""The same limit for a context of irregular readings. Contexts of usual sizes are below it. The cost of a context is
bounded in this way, whatever its size: about 4,600 nodes of a tree of orders for the attributions, and fewer for the
suspects and the expected values."""

EARLIER_ONSET_COST = 1.0
"""Nats that the excess of a sensor's latest readings loses for each reading but one.

Without it, a sensor that reports often is suspected too often, because the largest of many sums is large by chance.
With 1 in place of 0, the first suspect is the faulty sensor in 0% to 3% more of the alerts on intensive-care stays. But
a simulated sensor that has half of the readings and is always shifted comes first in 83% of the alerts in place of 88%.
By the surprise on arrival it comes first in 69%.
"""

NUM_SINGLE_SUSPECTS = 4
"""Number of readings of which each is tried as the only suspect (reading that explains the alert). First the reading is
tried whose removal makes the record most probable, then the others in one pass. A fault in one sensor is the most
frequent cause, and this ranking has it among the first few."""

MAX_SUSPECTS = 3
"""Largest set of suspects that is tried. Larger sets would no longer point to a cause."""


@dataclass(frozen=True, slots=True)
class _Readings:
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
    ) -> _Readings:
        """Return readings with their normalised values. The arguments are the attributes of the same names."""
        return _Readings(model, kernels, codes, raw_values, model.schema.normalise(codes, raw_values), ages)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.model.schema

    def select(self, rows: Ints) -> _Readings:
        """Return the readings of only some of the A records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return _Readings(
            self.model,
            self.kernels,
            codes=self.codes[rows],
            raw_values=self.raw_values[rows],
            values=self.values[rows],
            ages=None if self.ages is None else self.ages[rows],
        )


@dataclass(frozen=True, slots=True)
class _RecordGroup:
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

    readings: _Readings
    is_decision_point: Bools
    given_positions: Ints
    candidate_positions: Ints
    record_ids: list[str]

    def select(self, rows: Ints) -> _RecordGroup:
        """Return a group that contains only some of the A records of this group.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return _RecordGroup(
            readings=self.readings.select(rows),
            is_decision_point=self.is_decision_point[rows],
            given_positions=self.given_positions[rows],
            candidate_positions=self.candidate_positions[rows],
            record_ids=[self.record_ids[row] for row in rows.tolist()],
        )


@dataclass(slots=True)
class _Findings:
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
    def empty(num_records: int, num_readings: int) -> _Findings:
        """Return findings (the computed parts of explanations) in which nothing has been computed yet.

        Args:
            num_records: Number of records.
            num_readings: Number of readings of each record.
        """
        shape = num_records, num_readings
        return _Findings(
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
class _TreeOutput:
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

    def select(self, rows: Ints) -> _TreeOutput:
        """Return the network's output at the nodes of the same tree of orders, for only some of the A records.

        Args:
            rows: Indexes of these records, from 0 to A − 1.
        """
        return _TreeOutput(
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
        ConfigError: The readings of the model are irregular (see `explain_context`).
    """
    check_single_readings(model.schema, "explain")
    explanations = [Explanation((), None)] * len(codes)
    if effort == "off":
        return explanations
    is_decision_point = np.ones(codes.shape, bool) if is_decision_point is None else is_decision_point
    for rows in _group_similar_records(model.schema, codes):
        # All records of the group have equally many readings, so no padding is left.
        num_readings = int((codes[rows[0]] >= 0).sum())
        readings = _Readings.from_raw(model, kernels, codes[rows, :num_readings], raw_values[rows, :num_readings])
        if effort == "fast":
            findings = _compute_arrival_findings(readings)
        else:
            ids = [record_ids[row] for row in rows]
            group = _choose_candidates(readings, is_decision_point[rows, :num_readings], ids, MAX_CANDIDATES)
            findings = _find_suspects(group, alert_rule)
        for index, row in enumerate(rows.tolist()):
            explanations[row] = _build_explanation(readings, findings, index, unseen_labels[row])
    return explanations


def explain_context(
    model: Model,
    codes: Ints,
    raw_values: Floats,
    ages: Floats,
    times: Ints,
    record_id: str,
    unseen_labels: Mapping[int, str],
    effort: ExplanationEffort = "full",
    kernels: CpuKernels | None = None,
    evidence: AlertCause | None = None,
) -> Explanation:
    """Explain why a record with irregular readings has raised an alert, by the readings of the alert's context.

    The context consists of the readings on which the alerting reading is conditional, and of the reading itself. Each
    of them has one contribution, with its time. The suspects are readings of one sensor, or there are none.

    Args:
        model: The features, hyperparameters and weights.
        codes: (L,) feature codes of the context in the order of acceptance.
        raw_values: (L,) values in raw units, or label codes.
        ages: (L,) seconds from the origin of the record to each reading.
        times: (L,) event times, microseconds since 1970.
        record_id: Id of the record. It determines random orders of the readings, so a record always gets the same
            explanation.
        unseen_labels: Texts of labels that the model does not have, by position in the context, from 0.
        effort: How much to compute, see `ExplanationEffort`. With "fast", the most improbable reading given those
            before it comes first. There are no suspects, unless the evidence names a sensor: then they are its readings
            that repeat their value, or the alerting reading. For the readings of the current block, these are the
            distributions by which they were scored.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        evidence: Which cumulative sum has raised the alert. If it is that of a sensor, the suspects are readings of
            this sensor, the alerting reading among them.

    Returns:
        The explanation, without readings of context features, which are not scored. It is empty if there are no others,
        or if the effort is "off".
    """
    if effort == "off" or model.schema.is_context[codes].all():
        return Explanation(())
    readings = _Readings.from_raw(model, kernels, codes[None], raw_values[None], ages[None])
    if effort == "fast":
        findings = _compute_arrival_findings(readings)
        if evidence is not None and evidence.sensor is not None:
            is_repeated = evidence.kind == "repeated"
            suspects = _find_repeated_readings(readings) if is_repeated else [len(codes) - 1]
            findings.is_suspect[0, suspects] = True
    else:
        is_decision_point = np.ones((1, len(codes)), bool)
        group = _choose_candidates(readings, is_decision_point, [record_id], MAX_CONTEXT_CANDIDATES)
        findings = _compute_context_findings(group, evidence)
    return _build_explanation(readings, findings, 0, unseen_labels, times)


def _compute_context_findings(group: _RecordGroup, evidence: AlertCause | None) -> _Findings:
    """Return the complete findings for the readings of one context of irregular readings.

    Args:
        group: The context, as a group of one record, with its candidates (readings that may become suspects).
        evidence: Which cumulative sum has raised the alert, None if it was none.
    """
    given, candidates = group.given_positions, group.candidate_positions
    num_given, num_candidates = given.shape[1], candidates.shape[1]
    findings = _Findings.empty(*group.readings.codes.shape)
    positions = np.concatenate([given, candidates], 1)
    mirrored_tree = build_order_tree(num_given, num_candidates, is_mirrored=True)
    output = _compute_tree(group.readings, positions, mirrored_tree)
    _store_attributions(findings, candidates, output)
    if evidence is None or evidence.sensor is None:
        suspects = _find_suspect_readings(group)[None]
    else:
        suspects = _find_readings_of_evidence(group.readings, evidence.kind)[None]
    findings.is_suspect[0, suspects] = True
    # Suspects are computed given all other readings, and each other reading given all but itself and the suspects.
    # Those that the evidence names need not be candidates.
    given, trusted = _remove_from_rows(given, suspects), _remove_from_rows(candidates, suspects)
    num_given = given.shape[1]
    tree = build_order_tree(num_given, trusted.shape[1], suspects.shape[1])
    positions = np.concatenate([given, trusted, suspects], 1)
    output = _compute_tree(group.readings, positions, tree)
    nodes = np.concatenate([np.arange(num_given), tree.leaves])
    _store_surprise_and_expected_values(findings, np.zeros(1, np.int64), positions, output, nodes)
    return findings


def _find_suspect_readings(group: _RecordGroup) -> Ints:
    """Return the readings of a context of irregular readings to which its alert is attributed: those of one sensor.

    A sensor that becomes faulty at some time has faulty readings from then on. For each sensor and each number j, the
    last j readings of the sensor have an excess: −ln p of them given all other readings of the context, minus its
    expectation, minus `EARLIER_ONSET_COST` · (j − 1). The suspects are the readings with the largest excess. In an
    exact density, this is the logarithm of the ratio of the probabilities of two explanations. One is a fault after
    which the last j readings of a sensor are arbitrary, but as probable as usual. The other is no fault. The last term
    is the prior of j.

    −ln p minus its expectation is the sum of the centered NLLs of these readings in an order that ends with the
    sensor's readings. It is the mean over two orders of the sensors, of which one is the reverse of the other.

    Args:
        group: The context, as a group of one record with n candidates. Readings that are not candidates are given.

    Returns:
        (k,) positions of the suspects in the order of acceptance. Empty if no sensor has a positive excess: then the
        alert follows from readings before the context.
    """
    codes, given, candidates = group.readings.codes[0], group.given_positions[0], group.candidate_positions[0]
    # Sensors are in a random order, because candidates are; the readings of a sensor are in the order of acceptance.
    sensors = dict.fromkeys(codes[candidates].tolist())
    chains = [np.sort(candidates[codes[candidates] == sensor]) for sensor in sensors]
    tree = build_chain_tree(len(given), [len(chain) for chain in chains])
    output = _compute_tree(group.readings, np.concatenate([given, *chains])[None], tree)
    # The two orders that end with a chain are as long as all others, because each contains all readings.
    paths = tree.paths.reshape(2, len(chains), -1)
    suspects, largest_excess = np.empty(0, np.int64), 0.0
    for index, chain in enumerate(chains):
        last_nodes = paths[:, index, -len(chain) :]  # (2, n) for a chain of n readings
        terms = output.compute_centered_nll(last_nodes.ravel()).reshape(last_nodes.shape).mean(0)
        excess_by_length = _compute_excess_by_length(terms)
        length = int(excess_by_length.argmax()) + 1
        if excess_by_length[length - 1] > largest_excess:
            suspects, largest_excess = chain[-length:], float(excess_by_length[length - 1])
    return suspects


def _compute_excess_by_length(terms: Floats) -> Floats:
    """Return the excess of the last 1, 2, …, n readings of a sensor (`_find_suspect_readings`), (n,).

    Args:
        terms: (n,) centered NLLs of the readings in the order of acceptance, given the readings of all other sensors
            and the earlier ones of this sensor.
    """
    return np.asarray(np.cumsum(terms[::-1]) - EARLIER_ONSET_COST * np.arange(len(terms)))


def _find_readings_of_evidence(readings: _Readings, kind: str) -> Ints:
    """Return the readings of a context to which an alert is attributed that was raised by a sum of one sensor.

    The sensor is that of the last reading, which raised the alert. If the sensor repeats its value, the suspects are
    the readings that repeat it. Otherwise they are its last j readings, where j is the number with the largest excess
    (`_find_suspect_readings`). They are conditional on the readings of all other sensors.

    Args:
        readings: The readings of the context, as those of one record.
        kind: The kind of the sum.

    Returns:
        (k,) positions of the suspects in the order of acceptance. The last one is that of the last reading.
    """
    if kind == "repeated":
        return _find_repeated_readings(readings)
    codes = readings.codes[0]
    of_sensor = codes == codes[-1]
    chain, given = np.flatnonzero(of_sensor), np.flatnonzero(~of_sensor)
    tree = build_chain_tree(len(given), [len(chain)])
    output = _compute_tree(readings, np.concatenate([given, chain])[None], tree)
    terms = output.compute_centered_nll(tree.paths[0, -len(chain) :])
    return chain[-(int(_compute_excess_by_length(terms).argmax()) + 1) :]


def _find_repeated_readings(readings: _Readings) -> Ints:
    """Return the positions of the last readings of the last reading's sensor that have its value, (k,).

    Args:
        readings: The readings of the context, as those of one record.
    """
    codes = readings.codes[0]
    of_sensor = np.flatnonzero(codes == codes[-1])
    # Values are compared as the cumulative sums compare them.
    values = readings.values[0, of_sensor].astype(np.float32)
    is_other = np.flatnonzero(values != values[-1])
    return of_sensor[is_other[-1] + 1 :] if len(is_other) else of_sensor


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


def _compute_arrival_findings(readings: _Readings) -> _Findings:
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
    output = _compute_tree(readings, positions, arrival_tree)
    findings = _Findings.empty(num_records, num_readings)
    all_rows, all_nodes = np.arange(num_records), np.arange(num_readings)
    _store_surprise_and_expected_values(findings, all_rows, positions, output, all_nodes)
    return findings


def _choose_candidates(
    readings: _Readings, is_decision_point: Bools, record_ids: list[str], max_candidates: int
) -> _RecordGroup:
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
        surprise = _compute_arrival_findings(readings).surprise
        surprise = np.where(is_given, -np.inf, surprise)
        descending = -np.sort(-surprise, 1)
        smallest_of_candidates = descending[:, max_candidates - 1 : max_candidates]
        is_given = surprise < smallest_of_candidates
        is_given |= np.cumsum(~is_given, 1) > max_candidates  # of equal surprises, the first become candidates
    positions = np.argsort(~is_given, 1, kind="stable")  # given readings first, both kinds in order of arrival
    num_given = num_readings - num_candidates
    random_order = np.stack([_make_rng(record_id).permutation(num_candidates) for record_id in record_ids])
    return _RecordGroup(
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


def _compute_tree(readings: _Readings, positions: Ints, tree: OrderTree) -> _TreeOutput:
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
    return _TreeOutput(readings.schema, tree, positions, node_codes, node_values, conditional, surprisal)


def _find_suspects(group: _RecordGroup, alert_rule: AlertRule) -> _Findings:
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
    findings = _Findings.empty(*group.readings.codes.shape)
    positions = np.concatenate([group.given_positions, group.candidate_positions], 1)
    mirrored_tree = build_order_tree(num_given, num_candidates, is_mirrored=True)
    output = _compute_tree(group.readings, positions, mirrored_tree)
    _store_attributions(findings, group.candidate_positions, output)
    rows = np.arange(num_records)  # the undecided records, to which further suspects may be added
    if num_given:
        # The first nodes of the tree are the given readings, with the readings before them as ancestors.
        _store_surprise_and_expected_values(findings, rows, group.given_positions, output, np.arange(num_given))
    suspects, findings.is_silenced[:] = _try_single_suspects(group, output, alert_rule)
    for num_suspects in range(1, max_suspects + 1):
        undecided_group = group.select(rows)
        trusted = _remove_from_rows(undecided_group.candidate_positions, suspects)
        positions = np.concatenate([undecided_group.given_positions, trusted, suspects], 1)
        # Every suspect is computed given the trusted readings, and every trusted one given the other trusted ones.
        tree = build_order_tree(num_given, num_candidates - num_suspects, num_suspects)
        output = _compute_tree(undecided_group.readings, positions, tree)
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
            _store_surprise_and_expected_values(
                findings, rows[decided], candidates, output.select(decided), tree.leaves
            )
        if not is_undecided.any():
            break
        # The next suspect is the trusted candidate whose removal leaves the smallest surprisal.
        next_index = output.sum_without_each_item().argmin(1)
        next_suspect = np.take_along_axis(trusted, next_index[:, None], 1)
        rows, suspects = rows[is_undecided], np.concatenate([suspects, next_suspect], 1)[is_undecided]
    return findings


def _try_single_suspects(group: _RecordGroup, output: _TreeOutput, alert_rule: AlertRule) -> tuple[Ints, Bools]:
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


def _remove_from_rows(positions: Ints, removed: Ints) -> Ints:
    """Return the positions of readings without the removed ones, row by row, in the same order.

    Args:
        positions: (A, n) different positions in each of A rows.
        removed: (A, k) k of these positions to remove from each row.

    Returns:
        (A, n − k) the other positions of each row.
    """
    rows = zip(positions, removed, strict=True)
    return np.stack([row[~np.isin(row, removed_from_row)] for row, removed_from_row in rows])


def _store_attributions(findings: _Findings, candidates: Ints, output: _TreeOutput) -> None:
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


def _store_surprise_and_expected_values(
    findings: _Findings, rows: Ints, positions: Ints, output: _TreeOutput, nodes: Ints
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


def _compute_replacements(output: _TreeOutput, nodes: Ints) -> Floats:
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
    group: _RecordGroup, positions: Ints, replacements: Floats, sets: Ints, alert_rule: AlertRule
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
    copies = _Readings.from_raw(readings.model, readings.kernels, codes, flat_raw_values)
    anomaly_scores = _compute_max_statistics(copies, np.repeat(group.is_decision_point, num_sets, 0))
    return ~alert_rule(anomaly_scores.reshape(num_records, num_sets), group.record_ids)


def _compute_max_statistics(readings: _Readings, is_decision_point: Bools) -> Floats:
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


def _build_explanation(
    readings: _Readings, findings: _Findings, row: int, unseen_labels: Mapping[int, str], times: Ints | None = None
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
