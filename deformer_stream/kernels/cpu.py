"""The compiled CPU kernels: calls that score readings with the packed weights of a model.

The kernels are C code that computes the same as `DEformer.forward_cached` and `DEformer.conditionals`, which are the
reference. They read the attention keys and values of open records directly from the pages of `CpuKVCache`, and need no
padding. A reading gets the same score to the last bit, however its record is split into batches and whatever other
records are in the batch. PyTorch computes the scores if there are no compiled kernels for the processor, if the model
is on a GPU, and if `is_supported` excludes the model. This module itself needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deformer_stream.kernels import abi
from deformer_stream.kernels.abi import COLUMNS, MAX_HEADS, MAX_NEIGHBORS, MAX_PROCESS_SCALES, PRIOR_LANES
from deformer_stream.kernels.kv_cache import CpuKVCache, max_cached_readings, round_up
from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.packing import WeightPacker
from deformer_stream.kernels.threads import run_on_threads
from deformer_stream.model.alert_prior import MAX_NEG_LOG_P, PriorPValues
from deformer_stream.model.conditional_arrays import ConditionalArrays, HeadArrays, PriorArrays, SurprisalArrays
from deformer_stream.model.parameters import Model, ModelParameters
from deformer_stream.model.score_terms import LOG_P_PRIOR, count_score_terms

Ints = NDArray[np.int64]
Floats32 = NDArray[np.float32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

TOKENS_PER_UNIT = 96
"""Number of tokens that go through a layer together. They are few enough to stay in the processor's cache, and enough
that weights are read from memory once for many tokens."""
READINGS_PER_STEP = 32
"""Number of readings for which a thread computes surprisals or quantiles before it takes more from the shared counter.
The same number is in csrc/mixture_queries.c."""
MAX_COVARIANCES = 1 << 26
"""Largest number of covariances of features that the kernels store for the Gaussian process, for all time scales
together. They take eight bytes each."""


def is_supported(model: Model) -> bool:
    """Return whether the compiled kernels can score readings with this model.

    They need float32 weights on the CPU, two tokens per reading (a query token and an observation token), and
    layers whose widths fill whole vectors of the processor. If readings are irregular, their context must be limited.
    Their Gaussian process has at most `MAX_NEIGHBORS` neighbors, `MAX_PROCESS_SCALES` time scales, and covariances of
    at most `MAX_COVARIANCES` numbers, and gives all readings their weight (`outlier_limit` 0).
    """
    config = model.config
    # A vector has at most 16 floats. Attention sums four vectors of its output together. Each head has whole vectors.
    has_whole_vectors = config.d_model % 64 == 0 and config.d_model // config.heads % 16 == 0
    # Matrix products compute tiles (parts of the result) of 32 columns.
    has_whole_tiles = config.feedforward % COLUMNS == 0
    has_token_pairs = config.tokens == "pair"
    return (
        model.is_float32_on_cpu
        and has_token_pairs
        and has_whole_vectors
        and has_whole_tiles
        and config.heads <= MAX_HEADS
        and (model.schema.reading_times is None or config.context_limit is not None)
        and config.neighbors <= MAX_NEIGHBORS
        and not config.outlier_limit
        and config.process_scales <= MAX_PROCESS_SCALES
        and (not config.neighbors or config.process_scales * len(model.schema) ** 2 <= MAX_COVARIANCES)
    )


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """New readings of R records, record after record without padding; M readings in total.

    Attributes:
        features: (M,) feature codes (indexes in the schema).
        values: (M,) values in normalised units; label codes for discrete features.
        offsets: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
        num_cached: (R,) the number of each record's readings that are in the KV cache before the batch is scored.
        page_table: (R, columns) for each record the indexes of its pages (fixed-size blocks) in the KV cache.
        depths: None if each reading is conditional on all earlier readings of its record. Otherwise the readings of a
            record are the nodes of a tree: each path from a root is one order of readings, and orders that begin alike
            share nodes. Then depths is (M,), the number of ancestors of each node. A node is conditional on its
            ancestors alone. Nodes are listed depth first. When a node with k ancestors is computed, these ancestors are
            the first k readings of its record in the cache. The node is then written at position k (from 0), where it
            replaces a node of an earlier path.
        num_prefill_only: (R,) how many of each record's first new readings are only written to the cache and not
            scored, because they were scored before. None if all new readings are scored.
        ages: (M,) seconds from the origin of the record to each reading. None if the readings of the schema are not
            irregular. The time since the previous reading of the same sensor is that among the earlier readings; of a
            node of a tree of orders, that among its ancestors.
    """

    features: Ints
    values: Floats32
    offsets: Ints
    num_cached: Ints
    page_table: Ints
    depths: Ints | None = None
    num_prefill_only: Ints | None = None
    ages: Floats | None = None

    @property
    def query_offsets(self) -> Ints:
        """Return the index of each record's first scored reading among all scored readings, (R + 1,).

        The last entry is the number of scored readings.
        """
        if self.num_prefill_only is None:
            return self.offsets
        num_unscored_before = np.append(0, np.cumsum(self.num_prefill_only))  # in all records before each record
        offsets: Ints = self.offsets - num_unscored_before
        return offsets

    def query_mask(self) -> Bools | slice:
        """Return an index that selects the scored readings among the M new ones.

        It is a mask, (M,), true for scored readings, or `slice(None)` if all are scored.
        """
        if self.num_prefill_only is None:
            return slice(None)
        # The first `num_prefill_only` new readings of each record are not scored.
        num_new = np.diff(self.offsets)
        first_of_record = self.offsets[:-1].repeat(num_new)
        position = np.arange(self.offsets[-1]) - first_of_record  # among the new readings of the record, from 0
        is_scored: Bools = position >= self.num_prefill_only.repeat(num_new)
        return is_scored


CUSUM_ARRAYS = (
    *("cusum_states", "codes", "values", "log_p_others"),
    *("log_resolutions", "slopes", "intercepts", "level_edges", "level_log_p"),
    *("step_slopes", "step_edges", "step_log_p", "largest_kinds"),
)
CUSUM_NUMBERS = (
    *("num_sensors", "num_cells", "num_step_cells", "record_slope", "record_intercept"),
    *("sensor_kappa", "offset_kappa", "step_kappa", "record_kappa"),
    *("max_surprise", "max_repetition", "max_extreme", "tie_tolerance"),
)
"""The fields of `abi.AdvanceTask` that only cumulative sums need. They have the names of those of `CusumArguments`."""


@dataclass(frozen=True, slots=True)
class CusumArguments:
    """What `CpuKernels.advance` needs for cumulative sums.

    The numbers are those of `deformer_stream.calibration.cusum`.

    Attributes:
        cusum_states: (records, 6F + 1) the states of all open records, which are updated.
        codes: (M,) the sensors of the readings.
        values: (M,) their normalised values, as the network reads them.
        log_p_others: (M,) ln of the p-values given the readings of other sensors only; None if they are not computed.
        log_resolutions: (F,) ln of the width of each sensor's values, −inf if it is unknown.
        slopes: (6, F) slopes of the lines that turn the evidence of a sensor into statistics.
        intercepts: (6, F) their intercepts.
        level_edges: (F, K + 1) edges of the cells of each sensor's values, None without them.
        level_log_p: (F, K + 2) ln of the p-values below the cells, in each of them, and above them; None without them.
        step_slopes: (F,) slopes of the regressions on the previous value of the sensor, None without cells of steps.
        step_edges: (F, K' + 1) edges of the cells of each sensor's steps, None without them.
        step_log_p: (F, K' + 2) ln of the p-values below the cells, in each of them, and above them; None without them.
        largest_kinds: (M,) int8 output. It receives the code of the kind whose statistic has raised the anomaly score
            of the record with this reading (`find_largest_kinds`); −1 if the anomaly score has not risen.
        record_slope: Slope of the line of the record's sum.
        record_intercept: Its intercept.
        sensor_kappa: κ of the sums "improbable" and "level".
        offset_kappa: That of the sums "offset".
        step_kappa: That of the sums "step".
        record_kappa: κ of the sum of a record.
        max_surprise: Largest −ln p that a sum counts.
        max_repetition: Largest increment of the sum "repeated".
        max_extreme: Largest −ln p of the evidence "extreme".
        tie_tolerance: Largest difference of statistics that count as equal.
    """

    cusum_states: Floats32
    codes: Ints
    values: Floats32
    log_p_others: Floats | None
    log_resolutions: Floats
    slopes: Floats
    intercepts: Floats
    level_edges: Floats | None
    level_log_p: Floats | None
    step_slopes: Floats | None
    step_edges: Floats | None
    step_log_p: Floats | None
    largest_kinds: NDArray[np.int8]
    record_slope: float
    record_intercept: float
    sensor_kappa: float
    offset_kappa: float
    step_kappa: float
    record_kappa: float
    max_surprise: float
    max_repetition: float
    max_extreme: float
    tie_tolerance: float

    @property
    def num_sensors(self) -> int:
        """The number F of sensors."""
        return len(self.log_resolutions)

    @property
    def num_cells(self) -> int:
        """The number K of cells of each sensor, 0 without cells."""
        return 0 if self.level_edges is None else self.level_edges.shape[1] - 1

    @property
    def num_step_cells(self) -> int:
        """The number K' of cells of each sensor's steps, 0 without cells."""
        return 0 if self.step_edges is None else self.step_edges.shape[1] - 1


class CpuKernels:
    """The compiled kernels (C code that scores readings on the CPU) together with the packed weights of one model.

    Args:
        model: A model for which `is_supported` returns True.
        library: The library that `load_library` returns for the precision of the model.

    Attributes:
        parameters: The features, hyperparameters and weights of the model.
        bytes_per_record: The size in bytes of the KV cache pages of a record that has a reading of every feature. If
            readings are irregular, it is that of the largest context.
        network: The model's weights in the structures that compiled code reads.
    """

    def __init__(self, model: Model, library: ctypes.CDLL) -> None:
        self.parameters: ModelParameters = model.extract_parameters()
        self.library = library
        self._head: HeadArrays | None = None  # created when distributions are first needed
        library.advance_statistics.restype = None
        for function in (library.dot_width, library.kv_item_bytes):
            function.restype = ctypes.c_int64
        empty_cache = self.create_cache(0)
        self.bytes_per_record = empty_cache.pages_per_record * empty_cache.page_bytes
        self.network = WeightPacker(self.parameters, int(library.dot_width()), empty_cache).pack()

    @staticmethod
    def for_model(model: Model) -> CpuKernels | None:
        """Return the kernels with the weights of a model, or None if PyTorch must compute its scores.

        Returns:
            The kernels; None if `model.kernel_library` is None (there is no compiled library), or if the kernels do not
            support the model.
        """
        if model.kernel_library is None or not is_supported(model):
            return None
        return CpuKernels(model, model.kernel_library)

    def create_cache(self, max_bytes: int, max_readings: int | None = None) -> CpuKVCache:
        """Return an empty KV cache for the model.

        Args:
            max_bytes: The largest size of the cache in bytes. The cache is larger only if one record needs more.
            max_readings: The largest number of readings of a record; by default the number that the model needs.
        """
        return CpuKVCache(self.parameters, int(self.library.kv_item_bytes()), max_bytes, max_readings)

    def score(self, kv_cache: CpuKVCache, batch: RaggedBatch, scores_prior: bool = False) -> Floats32:
        """Score new readings, and write their keys and values into the cache.

        Args:
            kv_cache: The cache. The caller must have allocated pages for all new readings. Afterwards the caller must
                add the numbers of new readings to `kv_cache.num_cached_readings`.
            batch: The new readings. Z of them are scored; the others are only written to the cache.
            scores_prior: Whether to return the row `LOG_P_PRIOR`. The model must have a Gaussian prior.

        Returns:
            (3 or 4, Z) the score terms of the scored readings (`model.score_terms`).

        Raises:
            MemoryError: There is too little memory for intermediate results.
            TypeError: An array of the batch has another dtype than `RaggedBatch` states, or is not contiguous.
        """
        if batch.num_prefill_only is not None and self.parameters.cached_tokens_per_reading == 2:
            # This model also caches query tokens, which only scored readings have. So all readings are scored, and the
            # scores that are not requested are dropped.
            terms_of_all = self.score(kv_cache, replace(batch, num_prefill_only=None), scores_prior)
            return terms_of_all[:, batch.query_mask()]
        score_terms = np.empty((count_score_terms(scores_prior), int(batch.query_offsets[-1])), np.float32)
        self._score_batch(kv_cache, batch, score_terms=score_terms)
        return score_terms

    def advance(
        self,
        running: NDArray[np.void],
        *,
        record_index: Ints,
        boundaries: Ints,
        score_terms: Floats,
        is_scored: Bools | None,
        is_decision_point: Bools | None,
        score_rows: Floats,
        p_value_exponent: float,
        cusums: CusumArguments | None = None,
        distance_terms: Floats | None = None,
        prior: PriorPValues | None = None,
    ) -> None:
        """Update the running statistics of R records with M new readings, reading by reading.

        The running statistics of a record are sums over its readings, and its anomaly score so far. The anomaly score
        combines the p-values of the readings.

        Args:
            running: The running statistics of all open records, with the dtype `RUNNING_DTYPE`. Those of the R records
                are updated, except for the field `p_value`, which the caller computes from the anomaly score.
            record_index: (R,) the index of each record in `running`.
            boundaries: (R + 1,) the index of each record's first reading among the M readings; the last entry is M.
            score_terms: (3 or 4, M) the result of `score` in float64. `LOG_P_PRIOR` is not used.
            is_scored: (M,) False for readings that change no statistic. These are readings of context features (which
                condition the others but are not scored) and readings with a term that is not finite. None if all
                readings count.
            is_decision_point: (M,) False for readings after which the anomaly score is not updated, because readings
                with the same event time follow; None if it is updated after each reading.
            score_rows: (3 or more, M) output. The first three rows receive, for each reading, ln p of the value (NaN if
                the reading is not scored), the sum of ln p over the record so far, and the record's anomaly score so
                far (larger is more anomalous).
            p_value_exponent: The power to which p-values of readings are raised before they are combined.
            cusums: What the cumulative sums need, whose statistics take the place of combined p-values; None without
                sums. The states of the R records are updated.
            distance_terms: (M,) terms of the statistic that come from distances to stored training records; None
                without them.
            prior: The p-values of the M readings under the Gaussian prior alone; None if they are no term.
        """
        # Without cumulative sums, the numbers of their fields are 0, and the addresses of their arrays NULL.
        cusum_fields: dict[str, Any] = dict.fromkeys(CUSUM_ARRAYS) | dict.fromkeys(CUSUM_NUMBERS, 0)
        if cusums is not None:
            cusum_fields = {name: getattr(cusums, name) for name in (*CUSUM_ARRAYS, *CUSUM_NUMBERS)}
        task = abi.AdvanceTask(
            record_index=record_index,
            offsets=boundaries,
            score_terms=score_terms,
            is_scored=is_scored,
            is_decision_point=is_decision_point,
            distance_terms=distance_terms,
            log_p_prior=None if prior is None else prior.log_p,
            line_starts=None if prior is None else prior.lines.starts,
            line_slopes=None if prior is None else prior.lines.slopes,
            num_lines=0 if prior is None else prior.lines.starts.shape[1],
            max_neg_log_p_prior=MAX_NEG_LOG_P,
            running=abi.running_address(running),
            score_rows=score_rows,
            num_records=len(record_index),
            p_value_exponent=p_value_exponent,
            **cusum_fields,
        )
        self.library.advance_statistics(ctypes.byref(task))

    def conditionals(self, kv_cache: CpuKVCache, batch: RaggedBatch) -> ConditionalArrays:
        """Return the distributions of the values of M new readings, (M,), and write the readings into the cache.

        Each distribution is conditional on the earlier readings of the same record.

        Args:
            kv_cache: The cache, in which the pages of all new readings are allocated.
            batch: The new readings. Its `num_prefill_only` must be None, which means that all readings are scored.
        """
        # Compiled code runs the layers; normalisation and output head run in NumPy, which returns distributions.
        hidden = np.empty((len(batch.features), self.parameters.config.d_model), np.float32)
        prior = self._score_batch(kv_cache, batch, hidden=hidden)
        if self._head is None:
            self._head = HeadArrays(self.parameters)
        return self._head.compute_conditional(hidden, batch.features, prior)

    def conditionals_of_records(
        self, features: ArrayLike, values: ArrayLike, depths: Ints | None = None, ages: ArrayLike | None = None
    ) -> ConditionalArrays:
        """Return the conditional distributions of all readings of complete records, like `DEformer.conditionals`.

        Args:
            features: (N, L) feature codes of N records with L readings each, without padding.
            values: (N, L) values in normalised units, or label codes.
            depths: None if each reading is conditional on all earlier ones of its row. Otherwise each row is a tree of
                readings: each path from a root is one order of readings, and orders that begin alike share nodes. Then
                depths is (L,), the number of ancestors of each node. A node is conditional on its ancestors alone.
                Nodes are listed depth first.
            ages: (N, L) seconds from the origin of the record to each reading, if readings are irregular.

        Returns:
            Distributions of shape (N, L).
        """
        codes = np.ascontiguousarray(features, np.int64)
        N, L = codes.shape
        # A context of irregular readings may exceed the limit of contexts in a stream.
        length = L if depths is None else int(depths.max(initial=-1)) + 1
        kv_cache, page_table = self.create_cache_of_records(N, length)
        batch = RaggedBatch(
            features=codes.ravel(),
            values=np.ascontiguousarray(values, np.float32).ravel(),
            offsets=L * np.arange(N + 1),
            num_cached=np.zeros(N, np.int64),
            page_table=page_table,
            depths=None if depths is None else np.tile(depths, N),
            ages=None if ages is None else np.ascontiguousarray(ages, np.float64).ravel(),
        )
        return self.conditionals(kv_cache, batch).reshape(N, L)

    def create_cache_of_records(self, num_records: int, max_readings: int) -> tuple[CpuKVCache, Ints]:
        """Return a cache for complete records that is used only once, and the table of their pages.

        The records get the pages of the new cache in order, without allocation.

        Args:
            num_records: The number N of records.
            max_readings: The largest number of readings of a record.

        Returns:
            The cache, and (N, columns) for each record the indexes of its pages.
        """
        usual_readings = max_cached_readings(self.parameters)
        max_readings = max(usual_readings, max_readings)
        num_usual_records = num_records * -(-max_readings // usual_readings)  # rounded up
        kv_cache = self.create_cache(num_usual_records * self.bytes_per_record, max_readings)
        return kv_cache, np.arange(num_records * kv_cache.pages_per_record).reshape(num_records, -1)

    def surprisal(self, conditional: ConditionalArrays, values: ArrayLike) -> SurprisalArrays | None:
        """Return the surprisal (−ln p) of each value under its distribution, as `Conditional.compute_surprisal` does.

        Args:
            conditional: Distributions of some shape S.
            values: (*S) one value for each distribution, in normalised units.

        Returns:
            Four arrays of shape S: the surprisal of each value; and the minimum, mean and variance of the surprisal
            of a random value from each distribution. None if the distributions have no mixture components, because all
            features are discrete.
        """
        num_components = conditional.num_components
        if not num_components:
            return None
        single_values = np.ascontiguousarray(values, np.float32)
        # The outputs of the C function.
        surprisal, minimum, mean, variance = np.empty((4, *single_values.shape), np.float32)
        task = abi.SurprisalTask(
            **_mixture_arrays(conditional),
            values=single_values,
            surprisal=surprisal,
            minimum=minimum,
            mean=mean,
            variance=variance,
            num_readings=single_values.size,
            num_components=num_components,
            next_reading=ctypes.c_int64(0),  # the counter from which each thread takes its next readings
        )
        num_steps = -(-single_values.size // READINGS_PER_STEP)  # rounded up
        run_on_threads(self.library, "compute_surprisals", task, num_steps)
        return SurprisalArrays(surprisal, minimum, mean, variance)

    def quantiles(self, conditional: ConditionalArrays, probabilities: Sequence[float]) -> Floats:
        """Return quantiles of distributions, as `Conditional.quantiles` does.

        Compiled code computes the quantiles of continuous features, in float32, and NumPy those of discrete ones.

        Args:
            conditional: Distributions of some shape S.
            probabilities: Q probabilities; a quantile is the value below which the distribution has this probability.

        Returns:
            (Q, *S) values in normalised units, or label codes.
        """
        num_components, num_readings = conditional.num_components, conditional.discrete.size
        if not num_components:
            return conditional.quantiles(probabilities, None)
        # The output of the C function. It computes a quantile for discrete features, too, which is ignored at the end.
        continuous = np.empty((len(probabilities), *conditional.discrete.shape), np.float32)
        if continuous.size:
            task = abi.QuantileTask(
                **_mixture_arrays(conditional),
                levels=np.array(probabilities, np.float32),
                quantiles=continuous,
                num_readings=num_readings,
                num_components=num_components,
                num_levels=len(probabilities),
                next_reading=ctypes.c_int64(0),  # the counter from which each thread takes its next readings
            )
            num_steps = -(-num_readings // READINGS_PER_STEP)  # rounded up
            run_on_threads(self.library, "compute_quantiles", task, num_steps)
        return conditional.quantiles(probabilities, continuous)

    def _score_batch(
        self,
        kv_cache: CpuKVCache,
        batch: RaggedBatch,
        hidden: Floats32 | None = None,
        score_terms: Floats32 | None = None,
    ) -> PriorArrays | None:
        """Run the network over new readings, and write either hidden states or score terms into an array.

        The network has an observation token (feature and value) for each new reading. For each scored reading it also
        has a query token (feature only), at which it predicts the value.

        Args:
            kv_cache: The cache, into which the keys and values of all new readings are written.
            batch: The new readings, Z of which are scored.
            hidden: (Z, d) an array for the last layer's outputs, of width d, at the query tokens. None to compute
                `score_terms` instead.
            score_terms: (3 or 4, Z) an array that receives the score terms of the scored readings
                (`model.score_terms`). None to compute `hidden` instead.

        Returns:
            For each of the Z scored readings, the distribution of its value under the Gaussian prior (an input of the
            network). None if the model has no prior.
        """
        query_offsets = batch.query_offsets
        self._check_times(batch)
        ages = batch.ages
        if ages is None and self.parameters.has_process:
            ages = np.zeros(len(batch.features))  # all readings of a record have one time
        num_components, prior_terms = self.parameters.num_prior_components, None
        if num_components:
            # The kernels compute whole vectors of components of a mixture.
            row_length = round_up(num_components, PRIOR_LANES) if self.parameters.has_mixture else num_components
            prior_terms = np.empty((3, int(query_offsets[-1]), row_length), np.float32)
        log_weights, means, scales = (None,) * 3 if prior_terms is None else prior_terms
        task = abi.Batch(
            network=self.network,
            features=batch.features,
            values=batch.values,
            offsets=batch.offsets,
            query_offsets=query_offsets,
            num_cached=batch.num_cached,
            depths=batch.depths,
            ages=ages,
            page_table=batch.page_table,
            page_pool=kv_cache.pool,
            prior_log_weights=log_weights,
            prior_means=means,
            prior_scales=scales,
            hidden=hidden,
            score_terms=score_terms,
            log_p_prior=score_terms[LOG_P_PRIOR]
            if score_terms is not None and len(score_terms) > LOG_P_PRIOR
            else None,
            next_unit=ctypes.c_int64(0),
            num_records=len(batch.num_cached),
            page_table_columns=batch.page_table.shape[1],
            page_bytes=kv_cache.page_bytes,
            tokens_per_unit=TOKENS_PER_UNIT,
        )
        num_tokens = int(batch.offsets[-1] + query_offsets[-1])  # an observation token each, a query token if scored
        num_units = num_tokens // TOKENS_PER_UNIT + 1  # as in the C function
        run_on_threads(self.library, "score_batch", task, num_units)
        if prior_terms is None:
            return None
        return PriorArrays(*prior_terms[..., :num_components])  # without padding

    def _check_times(self, batch: RaggedBatch) -> None:
        """Check that a batch has the times that the model needs, because compiled code would read wrong memory.

        Raises:
            ValueError: Readings are irregular, and the ages are missing or have a wrong shape.
        """
        if self.parameters.schema.reading_times is None:
            return
        if batch.ages is None or batch.ages.shape != (len(batch.features),):
            raise ValueError(
                "the readings of the model's schema are irregular, but the batch does not have an age for each of "
                "them: pass RaggedBatch.ages"
            )


def _mixture_arrays(conditional: ConditionalArrays) -> dict[str, Floats32]:
    """Return the log weights, means and scales of the distributions' mixtures in float32, by these names."""
    names = "log_weights", "means", "scales"
    return {name: np.ascontiguousarray(getattr(conditional, name), np.float32) for name in names}


@contextlib.contextmanager
def attached_kernels(model: Model) -> Iterator[CpuKernels | None]:
    """Attach the compiled kernels to a model within a `with` block, and detach them afterwards.

    This is for a model in training: a model that is read from a model directory has its kernels attached already.

    Yields:
        The model's kernels, or None if compiled code is not available or does not support the model.
    """
    previous_library = model.kernel_library
    if previous_library is None:
        model.kernel_library = load_library(model.config.precision == "bfloat16")
    try:
        yield CpuKernels.for_model(model)
    finally:
        model.kernel_library = previous_library
