"""Create the parts of a pipeline from settings: engine, codec, window assigner and source of files.

Heavy packages are imported inside the functions, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.files import FileSource, StandardInput
    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.codec import Codec, FieldNames, Order, WindowAssigner
    from deformer_stream.engine.engine import Engine
    from deformer_stream.engine.explain import ExplanationEffort
    from deformer_stream.model.schema import Schema
    from deformer_stream.model_store import Artifact
    from deformer_stream.settings import ConsumeSettings, InputSettings, ReplaySettings, ScoringSettings

MAX_LISTED_GROUPS = 8
MIN_READINGS_LIMIT = 4096
"""A message may have as many readings as the model has features, and at least this number."""


def load_engine(settings: ConsumeSettings | ReplaySettings, drift_odds: float | None = None) -> tuple[Artifact, Engine]:
    """Load a model, return it with a new engine, and log a warning if an option makes its guarantee void.

    Args:
        settings: Options of the command.
        drift_odds: Odds at which drift is reported; infinite to track drift without a report, None to ignore drift.
    """
    from deformer_stream import model_store

    loaded = model_store.read(settings.model, settings.device, settings.compiled == "auto")
    _warn_about_alphas(loaded.calibration, settings.alpha)
    _warn_about_ties(loaded.calibration, settings.ties)
    timeout, effort = settings.record_timeout, settings.explanations
    return loaded, make_engine(loaded, settings, settings.alpha, timeout, drift_odds, effort)


def _warn_about_alphas(calibration: Calibration, alphas: Sequence[float]) -> None:
    """Log a warning for each alpha at which no alert is possible, in all groups or in some."""
    from deformer_stream import log

    logger = log.get_logger("model")
    for alpha, num_required in calibration.find_unreachable_alphas(alphas).items():
        logger.warning(
            f"alpha {alpha:g} is out of reach: with {len(calibration.scores)} calibration records the smallest p-value "
            f"is {calibration.min_p_value:.2g}, so no alert can be raised; calibrate on at least {num_required} "
            "records or raise --alpha"
        )
    groups = calibration.calibration_by_group
    for alpha in alphas:
        names = [name for name, group in groups.items() if group.find_unreachable_alphas([alpha])]
        if names:
            listed = ", ".join(names[:MAX_LISTED_GROUPS]) + (", …" if len(names) > MAX_LISTED_GROUPS else "")
            logger.warning(f"alpha {alpha:g} is out of reach in {len(names)} of {len(groups)} groups: {listed}")


def _warn_about_ties(calibration: Calibration, ties: str | None) -> None:
    """Log a warning if `--ties` differs from the calibration."""
    from deformer_stream import log

    if ties is not None and ties != calibration.tie_policy:
        log.get_logger("model").warning(
            f"--ties {ties}: the model was calibrated with {calibration.tie_policy}, so its false-alarm rate is not "
            f"guaranteed; leave the option out, or calibrate with it (deformer-stream calibrate --ties {ties})"
        )


def make_engine(
    loaded: Artifact,
    settings: ScoringSettings,
    alphas: Sequence[float],
    record_timeout: float | None,
    drift_odds: float | None = None,
    effort: ExplanationEffort = "full",
) -> Engine:
    """Return a new engine.

    Args:
        loaded: The model with its calibration.
        settings: Limits and the tie policy.
        alphas: False-alarm rates at which alerts are raised; none to score without alerts.
        record_timeout: Seconds without an event after which a record is closed; None for no timeout.
        drift_odds: Odds at which drift is reported, None to ignore drift.
        effort: How alerts are explained.

    Raises:
        ConfigError: The system refuses to allocate the cache.
    """
    from deformer_stream.engine.engine import Engine, Limits
    from deformer_stream.errors import ConfigError

    tie_wait = getattr(settings, "tie_wait", None)
    limits = Limits(
        record_timeout=None if record_timeout is None else _to_micros(record_timeout),
        max_open_records=settings.max_open_records,
        max_record_bytes=settings.record_memory,
        cache_bytes=settings.cache_memory,
        tie_wait=None if tie_wait is None else _to_micros(tie_wait),
    )
    try:
        return Engine(
            loaded.model, loaded.calibration, loaded.fingerprint, alphas, limits, drift_odds, effort, settings.ties
        )
    except (RuntimeError, MemoryError):  # PyTorch and NumPy raise these if an allocation fails
        raise ConfigError(
            f"--cache-memory {settings.cache_memory}: this number of bytes cannot be allocated; use a smaller one"
        ) from None


def _to_micros(seconds: float) -> int:
    """Return seconds as whole microseconds, the unit of time of the engine."""
    return round(seconds * 1e6)


def format_alphas(alphas: Sequence[float]) -> str:
    """Return alphas as a comma-separated text."""
    return ", ".join(f"{alpha:g}" for alpha in alphas)


def get_field_names(settings: ScoringSettings) -> FieldNames:
    """Return the names of the JSON fields of an event."""
    from deformer_stream.codec import FieldNames

    return FieldNames(
        record=settings.record_field,
        feature=settings.feature_field,
        value=settings.value_field,
        values=settings.values_field,
        time=settings.time_field,
        device=settings.device_field,
    )


def make_window_assigner(schema: Schema, settings: ScoringSettings) -> WindowAssigner | None:
    """Return what assigns events to windows, of the model or of `--window`; None if records have ids of their own.

    Raises:
        ConfigError: The options contradict the model or each other.
    """
    from deformer_stream.codec import WindowAssigner
    from deformer_stream.errors import ConfigError

    width = None if settings.window is None else _to_micros(settings.window)
    assigner = WindowAssigner.from_options(schema, width, _to_micros(settings.grace))
    if assigner is not None and settings.device_field == settings.record_field:
        raise ConfigError(
            "--device-field and --record-field must differ, because an event with a record id belongs to no window"
        )
    return assigner


def make_codec(loaded: Artifact, settings: ScoringSettings, **others: Any) -> Codec:
    """Return the codec that decodes events for a model; `others` are further arguments of `Codec`."""
    from deformer_stream.codec import Codec

    return Codec(
        loaded.schema,
        get_field_names(settings),
        max_message_bytes=settings.max_message_bytes,
        max_readings=max(MIN_READINGS_LIMIT, len(loaded.schema)),
        window_assigner=make_window_assigner(loaded.schema, settings),
        max_ahead_micros=None if settings.max_ahead is None else _to_micros(settings.max_ahead),
        **others,
    )


def open_inputs(
    inputs: Sequence[str], loaded: Artifact, settings: InputSettings
) -> tuple[Codec, FileSource | StandardInput]:
    """Open the input files of a command and return the codec for them and the source that reads them."""
    from connectors.files import open_source

    source = open_source(
        list(inputs),
        loaded.schema,
        layout=settings.layout,
        order=settings.order or "arrival",
        seed=settings.seed,
        field_names=get_field_names(settings),
        record_column=settings.record_column,
        time_column=settings.time_column,
        max_message_bytes=settings.max_message_bytes,
        window_assigner=make_window_assigner(loaded.schema, settings),
    )
    return make_codec(loaded, settings, order=choose_order_of_rows(loaded, settings), seed=settings.seed), source


def choose_order_of_rows(loaded: Artifact, settings: InputSettings) -> Order:
    """Return the order in which the readings of a row of a wide table are scored.

    Such readings have no order of arrival. The order in which the model was calibrated keeps its guarantee.
    """
    if settings.order is not None:
        return settings.order
    calibrated_order = loaded.calibration.arrival_order
    if calibrated_order == "random":
        return "random"
    return "schema" if calibrated_order == "schema" else "arrival"
