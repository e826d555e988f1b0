"""Scoring of readings by the model version that was current when their record was opened.

`ModelVersion.score_readings` turns readings into log-likelihoods, running anomaly scores and p-values. It runs the
network on the new readings (`ModelVersion._compute_score_terms`); the keys and values of earlier readings are in the KV
cache. It then updates the running statistics of each record (`ModelVersion._update_statistics`). Both steps use the
compiled CPU kernels if the model has them. Otherwise the first uses PyTorch (`torch_scorer`, which alone imports it),
and the second NumPy (`running_statistics`).

If readings are irregular, the context of a reading is bounded (`deformer_stream.model.bounded_context`). New readings
are then scored in segments: a segment contains new readings of one record and one block. For them the cache holds the
context of the block, and the block's earlier readings. At the beginning of a block, the keys and values of the record
are dropped, and those of the context of the new block are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import P_VALUE_EXPONENT, Calibration
from deformer_stream.calibration.cusum import NO_KIND, Codes
from deformer_stream.calibration.drift import RecordReadings
from deformer_stream.calibration.fault_classifier import FaultClassifier, FaultName
from deformer_stream.engine.events import AlertState
from deformer_stream.engine.fault_inputs import name_faults
from deformer_stream.engine.passes import MAX_READINGS_PER_PASS, PassReadings
from deformer_stream.engine.record_contexts import ContextWalk, find_places
from deformer_stream.engine.record_scores import average_neg_log_p_by_feature, compute_ranking_terms
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.running_statistics import CusumInputs, advance_running_statistics
from deformer_stream.engine.ties import average_over_orders
from deformer_stream.errors import ConfigError, InvariantViolated
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.kernels.kv_cache import CacheShape, CpuKVCache, PagePool, cpu_cache_shape
from deformer_stream.kernels.prefix_distances import get_distance_function
from deformer_stream.model.alert_distance import IGNORED, AlertDistance, Prefixes
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.load_network import load_network
from deformer_stream.model.parameters import Model
from deformer_stream.model.score_terms import LOG_P_PRIOR, count_score_terms
from deformer_stream.ragged import ragged_indices, run_boundaries

if TYPE_CHECKING:
    from deformer_stream.engine.torch_scorer import TorchScorer
    from deformer_stream.kernels.torch_kv_cache import TorchKVCache
    from deformer_stream.model.deformer import DEformer

Cache = PagePool
"""A KV cache: `CpuKVCache` if a model has compiled kernels, `TorchKVCache` if not."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_BRANCHES = 128
"""Largest number of branches that the compiled kernels score in one call. A branch is a tie group (readings of one
record with the same event time) in another order."""

NO_ALPHAS = np.empty(0)
"""The false-alarm rates for readings that must not raise an alert, because they were scored before: none."""


@dataclass(frozen=True, slots=True)
class Segments:
    """New readings of S different records. If contexts are bounded, those of a record belong to one block.

    Attributes:
        record_index: (S,) row of each record in the table of open records. Closed records come first.
        block_starts: (S,) position in the record of the first reading of the block, 0 if contexts are not bounded.
        num_context: (S,) number of readings before the block that belong to its context, 0 if contexts are not bounded.
        starts: (S,) position in the record of the first new reading.
        num_new: (S,) number of new readings.
        context_starts: (S,) index in `context_places` of the first reading of the context, −1 if the context consists
            of the first readings that the log stores.
        context_places: Places in the log of readings of contexts, for all segments.
    """

    record_index: Ints
    block_starts: Ints
    num_context: Ints
    starts: Ints
    num_new: Ints
    context_starts: Ints
    context_places: Ints

    @property
    def num_before(self) -> Ints:
        """(S,) the number of readings that the cache must hold before the new ones are scored."""
        return self.num_context + self.starts - self.block_starts

    def select(self, members: slice | Ints) -> Segments:
        """Return some of the S segments."""
        return Segments(
            self.record_index[members],
            self.block_starts[members],
            self.num_context[members],
            self.starts[members],
            self.num_new[members],
            self.context_starts[members],
            self.context_places,
        )


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """The scores of M readings, and what follows from them for their records.

    Attributes:
        score_rows: (4, M) scores in four rows: the log-likelihood of each reading (NaN if it is not scored), its
            running sum over the record, the running anomaly score of the record, and the p-value of the record.
        num_crossed: (M,) the number of alphas that the p-value has reached with this reading for the first time. The
            reading raises an alert for each of them.
        kinds: (M,) the kind of the cumulative sum that has raised the anomaly score with this reading, as its index in
            `cusum.EVIDENCE_KINDS`; `NO_KIND` if the anomaly score has not risen, and without cumulative sums.
        num_rebuilt: The number of records whose keys and values were missing in the cache and were computed again.
    """

    score_rows: Floats
    num_crossed: Ints
    kinds: Codes
    num_rebuilt: int


class ModelVersion:
    """A model with its calibration, which scores all records that were opened while it was the current one.

    Attributes:
        model: The features, hyperparameters and weights: `ModelParameters`, or the network in PyTorch.
        calibration: The scores of normal records, from which p-values are computed.
        fingerprint: A hash that identifies the model with its calibration.
        schema: Describes the features of the model.
        kernels: The compiled CPU kernels, None if PyTorch runs the model.
        cache_shape: The properties of the network that determine the layout of its KV cache (keys and values of the
            readings of open records). Model versions with equal properties can use the same cache.
        fault_classifier: Names the known fault that a record looks like; None if the model has no such classifier. It
            changes no score, and may be replaced at any time.
        context_limit: How many earlier readings a reading is conditional on at most; None if readings are not
            irregular.

    Raises:
        ConfigError: The model is for irregular readings, but its contexts are not bounded.
    """

    def __init__(
        self,
        model: Model,
        calibration: Calibration,
        fingerprint: str,
        fault_classifier: FaultClassifier | None = None,
    ) -> None:
        self.model, self.calibration, self.fingerprint = model, calibration, fingerprint
        self.fault_classifier = fault_classifier
        self.schema = model.schema
        self._cusum_inputs = CusumInputs.for_scale(model.schema, calibration.cusum_scale)
        has_process = bool(model.config.neighbors and model.num_prior_components)
        # Whether the row `LOG_P_PRIOR` of score terms is conditional on the readings of other sensors only.
        self._has_others = self._cusum_inputs is not None and has_process
        self._alert_prior, self._ranking_lines = AlertPrior.from_model(model), AlertPrior.for_ranking(model)
        self._scores_prior = self._has_others or self._alert_prior is not None
        self._num_terms = count_score_terms(self._scores_prior)
        self.context_limit = model.config.context_limit if model.schema.reading_times is not None else None
        if model.schema.reading_times is not None and self.context_limit is None:
            raise ConfigError(
                "the model is for irregular readings, but its contexts are not bounded, so its records cannot be "
                "scored as a stream: train the model with the hyperparameter context_block of at least 1"
            )
        self._exemplars: Exemplars | None = None
        if model.config.exemplars:
            self._exemplars = Exemplars.from_parameters(model.extract_parameters())
        self.kernels = kernels = CpuKernels.for_model(model)
        # Adds readings to the running statistics of their records.
        self._advance = (
            advance_running_statistics
            if kernels is None
            else partial(kernels.advance, p_value_exponent=P_VALUE_EXPONENT)
        )
        self._distance = AlertDistance.from_model(model)
        self._measure_distances = get_distance_function(model)
        # Copies of the cached readings before tie groups, so that other orders of a group do not change the cache.
        self._branch_cache: CpuKVCache | None = None
        # Runs the network in PyTorch, None with compiled kernels.
        self._torch_scorer: TorchScorer | None = None
        if self.kernels is None:
            network = load_network(model)
            # Imported here, because scoring with compiled kernels needs no PyTorch.
            from deformer_stream.engine.torch_scorer import TorchScorer

            self._torch_scorer = TorchScorer(network, self._has_others)
        self.cache_shape: CacheShape = self._get_cache_shape()

    def _get_cache_shape(self) -> CacheShape:
        """Return the properties of the network that determine the layout of its KV cache."""
        return self.torch_scorer.cache_shape if self.kernels is None else cpu_cache_shape(self.kernels.parameters)

    @property
    def torch_scorer(self) -> TorchScorer:
        """Return the network in PyTorch, which a model version without compiled kernels has."""
        if self._torch_scorer is None:
            raise InvariantViolated("PyTorch scores a model with compiled kernels: this is a bug, please report it")
        return self._torch_scorer

    @property
    def network(self) -> DEformer:
        """The network in PyTorch, for computations that the compiled kernels do not offer.

        Raises:
            ConfigError: PyTorch is not installed.
        """
        return load_network(self.model)

    def create_cache(self, max_bytes: int) -> Cache:
        """Return an empty KV cache for this model, with at most `max_bytes` bytes of keys and values."""
        return (self.torch_scorer if self.kernels is None else self.kernels).create_cache(max_bytes)

    def release_cache(self) -> None:
        """Drop this object's reference to the KV cache that was used last, so that its memory can be freed."""
        if self._torch_scorer is not None:
            self._torch_scorer.release_cache()

    def score_readings(
        self, records: RecordTable, cache: Cache, record_index: Ints, seq: Ints, alphas: Floats
    ) -> ScoringResult:
        """Score M readings that are stored in the table, and update the running statistics of their records.

        The readings of one record must be in the order in which the table stores them, and all of its earlier readings
        must be scored already. Two kinds of readings are not scored and leave the statistics of their record unchanged.
        These are readings of context features, which only condition the others, and readings for which the network
        returns a number that is not finite.

        Args:
            records: The table of open records, which holds their readings.
            cache: The KV cache of the records: the network's keys and values of their earlier readings.
            record_index: (M,) the row of the table that belongs to the record of each reading.
            seq: (M,) position of each reading in its record, from 0.
            alphas: The false-alarm rates at which alerts are raised, descending.
        """
        # Sort by record. Records that this batch has closed come first, so that the open ones can then use their pages
        # (blocks of the cache). `capacity` exceeds every row, so adding it sorts open records after closed ones.
        sort_key = record_index + records.capacity * records.is_open[record_index]
        order = sort_key.argsort(kind="stable")
        sorted_record_index, sorted_seq = record_index[order], seq[order]
        # The readings of the r-th record are those from boundaries[r] to before boundaries[r + 1].
        boundaries = run_boundaries(sorted_record_index)
        first, num_new = boundaries[:-1], boundaries[1:] - boundaries[:-1]
        # All readings before a record's first new one are scored, so their number is the position of that reading.
        distinct_index, num_scored_before = sorted_record_index[first], sorted_seq[first]
        # Whether a reading is in the same tie group (readings with the same event time) as the one before it.
        is_tied = records.log.is_tied(sorted_record_index, sorted_seq) if records.holds_ties else None
        score_terms, num_rebuilt = self._compute_score_terms(
            records, cache, distinct_index, num_scored_before, num_new, is_tied
        )
        # The anomaly score of a record changes only at decision points: the last readings of its tie groups. A reading
        # is the last of its group if the next reading is not in the same group.
        is_decision_point = None if is_tied is None else ~np.append(is_tied[1:], False)
        # Assigning to `order` restores the given order.
        score_rows, num_crossed = np.empty((4, len(seq))), np.empty(len(seq), np.int64)
        kinds = np.empty(len(seq), np.int8)
        score_rows[:, order], num_crossed[order], kinds[order] = self._update_statistics(
            records, distinct_index, boundaries, sorted_seq, score_terms, alphas, is_decision_point
        )
        return ScoringResult(score_rows, num_crossed, kinds, num_rebuilt)

    def rank_records(self, records: RecordTable, record_index: Ints) -> Floats:
        """Return a score by which R closed records are ranked, (R,); larger is more anomalous.

        It is the sum of centered NLLs (negative log-likelihood minus its expected value) over the readings of the
        record. If the model has exemplars (stored training records), the sum is combined with the distance of the
        record to the nearest exemplars (`deformer_stream.model.ranking`). For wide records, the terms of the alert
        after all readings are added: in a sum over hundreds of readings, a few broken ones are lost.

        If readings are irregular, the sum is divided by the square root of the number of readings. Under the model, the
        centered NLLs are martingale differences of similar variances. So the quotient of a normal record has about the
        same variance whatever its length.

        Args:
            records: The table of records, in which the readings of these records are still available.
            record_index: (R,) row of each record in the table.
        """
        exemplars = self._exemplars
        centered_nll = records.running["centered_nll"][record_index]
        if records.is_irregular:
            # The variance of the sum grows with the number of readings, so records of 5 and of 1,500 readings would not
            # be comparable by their sums.
            return np.asarray(centered_nll / np.sqrt(np.maximum(records.running["num_scored"][record_index], 1)))
        if exemplars is None or not len(record_index):
            return centered_nll
        codes, values = records.log.gather_padded(record_index, records.num_readings[record_index])
        # Padding has the code −1, for which there are no units; `score` ignores its values.
        normalised_values = self.schema.normalise(np.maximum(codes, 0), values)
        terms = compute_ranking_terms(self._ranking_lines, records.running[record_index])
        return exemplars.score(codes, normalised_values, centered_nll) + terms

    def name_faults(self, records: RecordTable, record_index: Ints, num_readings: Ints) -> list[FaultName | None]:
        """Return which known fault each of R records looks like; None without a classifier.

        Args:
            records: The table of records, in which the readings of these records are available.
            record_index: (R,) row of each record in the table.
            num_readings: (R,) how many readings of each record are used, from the first.
        """
        if self.fault_classifier is None or not len(record_index):
            return [None] * len(record_index)
        codes, values = records.log.gather_padded(record_index, num_readings)
        is_reading = codes >= 0
        known = np.maximum(codes, 0)
        rows = np.nonzero(is_reading)[0]
        by_feature = np.full((len(record_index), len(self.schema)), np.nan)
        by_feature[rows, codes[is_reading]] = self.schema.normalise(known, values)[is_reading]
        return name_faults(self.model, self.kernels, self.fault_classifier, by_feature)

    def average_neg_log_p_by_feature(self, readings: Collection[RecordReadings]) -> dict[str, float]:
        """Return the mean of −ln p over the readings of each feature, in nats, by the feature's name."""
        return average_neg_log_p_by_feature(self.kernels, self.model, readings)

    def _compute_score_terms(
        self,
        records: RecordTable,
        cache: Cache,
        record_index: Ints,
        num_scored_before: Ints,
        num_new: Ints,
        is_tied: Bools | None,
    ) -> tuple[Floats, int]:
        """Run the network on the new readings of R records, M readings in total, and return their score terms.

        Args:
            records: The table of open records, which holds their readings.
            cache: The KV cache of the records (keys and values of their earlier readings). If it does not hold exactly
                the earlier readings of a record, they are computed again.
            record_index: (R,) row of each record in the table. Records that the current batch has closed come first;
                their rows stay in the table until they are scored.
            num_scored_before: (R,) number of readings of each record that are scored already.
            num_new: (R,) number of readings of each record to score.
            is_tied: (M,) whether a reading is in the same tie group as the reading before it; None without tie groups.

        Returns:
            First (3 or 4, M) score terms (`model.score_terms`), one record after the other. Second the number of
            records whose keys and values were missing in the cache and were computed again.
        """
        score_terms = np.empty((self._num_terms, int(num_new.sum())))
        if self.context_limit is None or records.contexts is None:
            none, no_places = np.zeros_like(num_new), np.empty(0, np.int64)
            segments = Segments(record_index, none, none, num_scored_before, num_new, none - 1, no_places)
            return score_terms, self._score_segments(records, cache, segments, is_tied, score_terms)
        first = np.cumsum(num_new) - num_new  # index of the first reading of each record among the M readings
        num_rebuilt = 0
        members, starts = np.arange(len(record_index)), num_scored_before
        walk = ContextWalk(records.contexts, records.log, record_index, self.context_limit)
        while len(members):
            # One round scores the next segment of each record that still has new readings.
            ends = (num_scored_before + num_new)[members]
            walk.enter_blocks(members, starts)
            segment_ends = np.minimum(ends, starts + self.context_limit.block - starts % self.context_limit.block)
            segments = Segments(
                record_index[members],
                walk.block_starts[members],
                walk.num_context[members],
                starts,
                segment_ends - starts,
                walk.context_starts[members],
                walk.context_places,
            )
            segment_terms = np.empty((self._num_terms, int(segments.num_new.sum())))
            num_rebuilt += self._score_segments(records, cache, segments, is_tied, segment_terms)
            segment, offset = ragged_indices(segments.num_new)
            first_column = first[members] + starts - num_scored_before[members]
            score_terms[:, first_column[segment] + offset] = segment_terms
            has_more = segment_ends < ends
            members, starts = members[has_more], segment_ends[has_more]
        return score_terms, num_rebuilt

    def _score_segments(
        self, records: RecordTable, cache: Cache, segments: Segments, is_tied: Bools | None, out: Floats
    ) -> int:
        """Run the network on the new readings of S records, M readings in total.

        Args:
            records: The table of open records, which holds their readings.
            cache: The KV cache of the records.
            segments: The new readings.
            is_tied: (M,) whether a reading is in the same tie group as the reading before it; None without tie groups,
                as always if contexts are bounded.
            out: (3 or 4, M) array that receives the score terms (`model.score_terms`), one record after the other.

        Returns:
            The number of records whose keys and values were missing in the cache and were computed again.
        """
        record_index, num_new, num_before = segments.record_index, segments.num_new, segments.num_before
        first = np.cumsum(num_new) - num_new  # index of the first reading of each record among the M readings
        num_rebuilt, num_closed = 0, len(record_index) - int(records.is_open[record_index].sum())
        for pass_records in _split_into_passes(cache, record_index, num_before, num_new, num_closed):
            pass_segments = segments.select(pass_records)
            index = pass_segments.record_index
            cache.mark_in_use(index)
            num_cached = cache.num_cached_readings[index]
            # The context of a block consists of readings of the block before and of its context. So if the cache holds
            # as many readings as are needed, they are the right ones.
            is_stale = num_cached != pass_segments.num_before
            if is_stale.any():
                # The record was evicted from the cache or scored again, or a new block begins: process the readings
                # that the cache must hold from the first on.
                cache.free(index[is_stale])
                num_cached[is_stale] = 0
                num_rebuilt += int((is_stale & (pass_segments.starts > pass_segments.block_starts)).sum())
            end = int(first[pass_records][-1] + num_new[pass_records][-1])
            span = slice(int(first[pass_records.start]), end)  # the readings of this pass
            readings = self._gather_readings(records, pass_segments, num_cached)
            if self.kernels is not None:
                self._score_ragged(self.kernels, cast(CpuKVCache, cache), readings, out[:, span])
            else:
                self.torch_scorer.score(cast("TorchKVCache", cache), readings, out[:, span])
            if is_tied is not None and is_tied[span].any():
                # The terms of tie groups must not depend on the order of their readings.
                row, offset = ragged_indices(pass_segments.num_new)
                score_branches = partial(self._score_branches, records, cache)
                out[:, span] = average_over_orders(
                    records,
                    index[row],
                    pass_segments.starts[row] + offset,
                    is_tied[span],
                    out[:, span],
                    score_branches,
                )
            if pass_records.stop < len(record_index):
                # Closed records need no cache any more; the next passes can use their pages.
                cache.free(record_index[pass_records.start : min(pass_records.stop, num_closed)])
        return num_rebuilt

    def _gather_readings(self, records: RecordTable, segments: Segments, num_cached: Ints) -> PassReadings:
        """Return the readings that must go through the network, so that the new readings of R records are scored.

        Args:
            records: The table of open records, which holds their readings.
            segments: The new readings.
            num_cached: (R,) number of readings of each record that the cache holds: 0, or `Segments.num_before`.
        """
        num_prefill_only = segments.num_before - num_cached
        # For each reading to process: the index of its record, and its position in the context of the last new reading.
        row, offset = ragged_indices(num_prefill_only + segments.num_new)
        position = num_cached[row] + offset
        rows = segments.record_index[row]
        places = position
        if self.context_limit is not None:
            # The context begins with readings from before the block. The readings of the block follow.
            block_places = records.find_places(segments.record_index, segments.block_starts)
            places = find_places(
                position,
                segments.num_context[row],
                segments.context_starts[row],
                segments.context_places,
                block_places[row],
            )
        codes, raw_values = records.log.gather(rows, places)
        ages = None if self.context_limit is None else records.ages_of(rows, places)
        values = self.schema.normalise(codes, raw_values)
        return PassReadings(segments.record_index, num_cached, num_prefill_only, segments.num_new, codes, values, ages)

    def _score_ragged(self, kernels: CpuKernels, cache: CpuKVCache, readings: PassReadings, out: Floats) -> None:
        """Score the new readings of R records by the compiled kernels, without padding, and add them to the cache.

        Args:
            kernels: The compiled kernels of this model.
            cache: The KV cache of the records: the network's keys and values of their earlier readings.
            readings: The readings that go through the network, M of which are new.
            out: (3 or 4, M) array that receives the score terms (`model.score_terms`), one record after the other.
        """
        num_processed = readings.num_processed
        cache.allocate_all(readings.record_index, num_processed)
        num_prefill_only = readings.num_prefill_only
        ragged_batch = RaggedBatch(
            readings.codes,
            readings.values.astype(np.float32),
            offsets=np.concatenate([[0], np.cumsum(num_processed)]),
            num_cached=readings.num_cached,
            page_table=cache.page_table[readings.record_index],
            num_prefill_only=num_prefill_only if num_prefill_only.any() else None,  # None: all readings are scored
            ages=readings.ages,
        )
        out[:] = kernels.score(cache, ragged_batch, self._scores_prior)
        cache.num_cached_readings[readings.record_index] += num_processed

    def _score_branches(
        self,
        records: RecordTable,
        cache: Cache,
        record_index: Ints,
        num_before: Ints,
        length: Ints,
        codes: Ints,
        raw_values: Floats,
    ) -> Floats:
        """Score tie groups in other orders than the stored one, without changing the cache.

        A tie group consists of the readings of one record with the same event time, so their order has no meaning. Its
        scores are averaged over several orders. A branch is a group in one of these orders; there are B branches. The
        parameters after `cache` are those of `engine.ties.ScoreBranches`.

        Args:
            records: The table of open records.
            cache: The KV cache, which holds the readings before each branch.
            record_index: (B,) the row of the table that belongs to the record of each branch.
            num_before: (B,) number of readings of the record before the branch.
            length: (B,) number of readings of each branch, T in total.
            codes: (T,) feature codes (indexes in the schema) of the readings, one branch after the other.
            raw_values: (T,) values of the readings in raw units, or label codes.

        Returns:
            (3 or 4, T) score terms of the readings (`model.score_terms`).
        """
        score_terms = np.empty((self._num_terms, len(codes)))
        first = np.cumsum(length) - length  # index of the first reading of each branch
        values = self.schema.normalise(codes, raw_values)
        if self.kernels is not None:
            if self._branch_cache is None:
                self._branch_cache = self.kernels.create_cache(MAX_BRANCHES * cache.pages_per_record * cache.page_bytes)
            num_calls = -(-len(record_index) // MAX_BRANCHES)  # rounded up
            for branches in np.array_split(np.arange(len(record_index)), num_calls):
                # Each branch starts from a copy of the readings before it.
                branch_records = record_index[branches], num_before[branches], length[branches]
                self._branch_cache.copy_from(cast(CpuKVCache, cache), *branch_records)
                span = slice(int(first[branches[0]]), int(first[branches[-1]] + length[branches[-1]]))
                ragged_batch = RaggedBatch(
                    codes[span],
                    values[span].astype(np.float32),
                    np.append(first[branches] - span.start, span.stop - span.start),
                    num_before[branches],
                    self._branch_cache.page_table[: len(branches)],
                )
                score_terms[:, span] = self.kernels.score(self._branch_cache, ragged_batch, self._scores_prior)
        else:
            arguments = record_index, num_before, length, codes, values
            self.torch_scorer.score_branches(cast("TorchKVCache", cache), *arguments, out=score_terms)
        return score_terms

    def _update_statistics(
        self,
        records: RecordTable,
        record_index: Ints,
        boundaries: Ints,
        seq: Ints,
        score_terms: Floats,
        alphas: Floats,
        is_decision_point: Bools | None,
    ) -> tuple[Floats, Ints, Codes]:
        """Add M readings to the running statistics of their R records, and compute p-values and alerts.

        The readings are given one record after the other. The running statistics of a record are sums and extremes over
        its scored readings, from which its anomaly score is computed.

        Args:
            records: The table of open records. Their running statistics, and the alphas at which they have alerted, are
                updated.
            record_index: (R,) row of each record in the table.
            boundaries: (R + 1,) index of the first reading of each record among the M readings, followed by M.
            seq: (M,) position of each reading in its record, from 0.
            score_terms: (3 or 4, M) score terms of the readings (`model.score_terms`).
            alphas: The false-alarm rates at which alerts are raised, descending.
            is_decision_point: (M,) whether a reading is the last one of its tie group; only such a reading can lower
                the p-value. None without tie groups.

        Returns:
            `score_rows`, `num_crossed` and `kinds` of a `ScoringResult`.
        """
        num_new = boundaries[1:] - boundaries[:-1]
        index_by_reading = record_index.repeat(num_new)
        # Readings of context features, which only condition the others, and those with a term that is not finite are
        # not scored. None if all are scored.
        is_scored: Bools | None = None
        is_context = self.schema.is_context
        if is_context.any():
            places = records.find_places(index_by_reading, seq)
            is_scored = ~is_context[records.log.gather_features(index_by_reading, places)]
        is_finite: Bools = np.all(np.isfinite(score_terms), axis=0)
        if not is_finite.all():
            is_scored = is_finite if is_scored is None else is_scored & is_finite
        score_rows, kinds = np.empty((4, len(seq))), np.full(len(seq), NO_KIND, np.int8)
        cusums = None
        if self._cusum_inputs is not None and records.is_irregular:
            log_p_others = score_terms[LOG_P_PRIOR] if self._has_others else None
            cusums = self._cusum_inputs.for_readings(records, index_by_reading, seq, log_p_others, kinds)
        distance_terms = self._compute_distance_terms(records, record_index, boundaries, seq)
        prior = None
        if self._alert_prior is not None:
            prior = PriorPValues(np.ascontiguousarray(score_terms[LOG_P_PRIOR]), self._alert_prior)
        # Compute rows 0 to 2: log-likelihoods, their running sums, and running anomaly scores.
        self._advance(
            records.running,
            record_index=record_index,
            boundaries=boundaries,
            score_terms=score_terms,
            is_scored=is_scored,
            is_decision_point=is_decision_point,
            score_rows=score_rows,
            cusums=cusums,
            distance_terms=distance_terms,
            prior=prior,
        )
        anomaly_scores = score_rows[2]
        # The record ids are only needed if groups of records have calibrations of their own.
        p_values = self.calibration.compute_p_values(
            anomaly_scores, lambda: [records.record_ids[index] for index in record_index.tolist()], num_new
        )
        score_rows[3] = p_values
        last_reading = boundaries[1:] - 1
        records.set_p_values(record_index, p_values[last_reading])
        return score_rows, _count_crossed_alphas(records, index_by_reading, seq, p_values, alphas), kinds

    def _compute_distance_terms(
        self, records: RecordTable, record_index: Ints, boundaries: Ints, seq: Ints
    ) -> Floats | None:
        """Return the terms of the statistic that come from distances to stored training records, (M,); None without.

        They are computed from all readings of the records, so they do not depend on how readings are divided into
        batches, and need no state.

        Args:
            records: The table of open records, which holds their readings.
            record_index: (R,) row of each record in the table.
            boundaries: (R + 1,) index of the first reading of each record among the M readings, followed by M.
            seq: (M,) position of each reading in its record, from 0.
        """
        distance = self._distance
        if distance is None or not len(seq):
            return None
        num_new = boundaries[1:] - boundaries[:-1]
        has_new = num_new > 0
        num_before = np.zeros(len(num_new), np.int64)
        num_before[has_new] = seq[boundaries[:-1][has_new]]
        num_readings = np.where(has_new, num_before + num_new, 0)
        row, position = ragged_indices(num_readings)
        codes, raw_values = records.log.gather(record_index[row], position)
        offsets = np.append(0, np.cumsum(num_readings))
        # The number of readings up to each one, without those of context features.
        counted_sums = (distance.kinds[codes] != IGNORED).cumsum()
        counts = counted_sums - np.append(0, counted_sums)[offsets[:-1]][row]
        positions = distance.compute_positions_of_raw(codes, raw_values)
        prefixes = Prefixes(codes, positions, offsets, num_before, bounds=distance.find_bounds(counts))
        distances = self._measure_distances(distance, prefixes)
        is_new = position >= num_before[row]
        return distance.compute_terms_of_distances(distances[is_new], counts[is_new])


def _count_crossed_alphas(
    records: RecordTable, record_index: Ints, seq: Ints, p_values: Floats, alphas: Floats
) -> Ints:
    """Return how many alphas the p-value reaches for the first time at each of M readings, and store these alerts.

    Args:
        records: The table of open records. It stores the smallest alpha at which each record has alerted, and is
            updated.
        record_index: (M,) the row of the table that belongs to the record of each reading. The readings of one record
            are in their order in the record.
        seq: (M,) position of each reading in its record, from 0.
        p_values: (M,) p-value of the record after each reading.
        alphas: The false-alarm rates at which alerts are raised, descending.

    Returns:
        (M,) the number of alphas that the p-value has reached with this reading and with no earlier one of the record.
    """
    num_crossed = np.zeros(len(seq), np.int64)
    if not len(alphas) or p_values.min(initial=1.0) > alphas[0]:
        return num_crossed  # the usual case: no p-value has reached the largest alpha
    # Alphas are descending, so a p-value reaches the first ones. A record has alerted at the alphas that are not
    # smaller than its `alert_alpha`. A record without an alert has the `alert_alpha` 1, which exceeds all alphas.
    num_reached = (p_values[:, None] <= alphas).sum(1)
    num_alerted_before = (alphas >= records.alert_alpha[record_index, None]).sum(1)
    for i in (num_reached > num_alerted_before).nonzero()[0].tolist():
        index = record_index[i]
        # Counted again, because an earlier iteration may have stored an alert of the same record.
        num_alerted = (alphas >= records.alert_alpha[index]).sum()
        num_new = int(num_reached[i] - num_alerted)
        if num_new > 0:
            num_crossed[i] = num_new
            smallest_reached = float(alphas[num_reached[i] - 1])
            records.mark_alerted(int(index), AlertState(int(seq[i]), smallest_reached))
    return num_crossed


def _split_into_passes(
    cache: Cache, record_index: Ints, num_scored_before: Ints, num_new: Ints, num_closed: int
) -> Iterator[slice]:
    """Divide R records into consecutive slices, each of which goes through the network in one pass.

    The keys and values of all readings of a slice fit into the cache together. A slice has at most
    `MAX_READINGS_PER_PASS` readings to process, unless it is a single record.

    The pages (fixed-size blocks of the cache) of closed records are free after their pass. If one pass for closed and
    open records would need pages that were never in use, they get separate slices. The open records then use the freed
    pages, and the process needs less memory.

    Args:
        cache: The KV cache of the records: the network's keys and values of their readings.
        record_index: (R,) row of each record in the record table. Records that the current batch has closed come first;
            their rows stay in the table until they are scored.
        num_scored_before: (R,) number of readings of each record that are scored already.
        num_new: (R,) number of readings of each record to score.
        num_closed: Number of closed records, which are the first of the R records.

    Yields:
        Slices of the R records.
    """
    num_readings = num_scored_before + num_new
    has_both = 0 < num_closed < len(record_index)
    separates_closed = has_both and cache.needs_untouched_pages(record_index, num_readings)
    # A quick sufficient condition: enough pages even if every record had the largest number of readings.
    fits_one_pass = (
        num_readings.sum() <= MAX_READINGS_PER_PASS and len(record_index) * cache.pages_per_record <= cache.num_pages
    )
    if fits_one_pass and not separates_closed and len(record_index):
        yield slice(0, len(record_index))
        return
    # Pages to allocate and readings to process, each summed over the records up to and including each one.
    page_sums = np.cumsum(cache.num_pages_for(num_readings))
    # If the cache does not hold a record's earlier readings, they are processed again.
    is_cached = cache.num_cached_readings[record_index] == num_scored_before
    reading_sums = np.cumsum(np.where(is_cached, num_new, num_readings))
    start = 0
    while start < len(record_index):
        # Upper bounds of the cumulative sums at the end of the slice that begins at `start`.
        max_pages = (int(page_sums[start - 1]) if start else 0) + cache.num_pages
        max_readings = (int(reading_sums[start - 1]) if start else 0) + MAX_READINGS_PER_PASS
        end_by_pages = int(np.searchsorted(page_sums, max_pages, "right"))
        end_by_readings = int(np.searchsorted(reading_sums, max_readings, "right"))
        end = min(end_by_pages, end_by_readings)
        if separates_closed and start < num_closed:
            end = min(end, num_closed)
        end = max(start + 1, end)  # a single record always fits the cache
        yield slice(start, end)
        start = end
