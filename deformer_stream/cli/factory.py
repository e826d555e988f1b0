"""What the settings of a command that takes the road say, built: model and engine, codec, source of files.

Part of the composition root. Everything heavy is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.files import FileSource, StandardInput
    from deformer_stream.codec import Codec, Fields, Order, Windows
    from deformer_stream.engine.engine import Engine
    from deformer_stream.engine.explain import Effort
    from deformer_stream.model.schema import Schema
    from deformer_stream.model_store import Artifact
    from deformer_stream.settings import ConsumeSettings, ReplaySettings, ScoringSettings, TableSettings


def model(settings: ConsumeSettings | ReplaySettings, drift: float | None = None) -> tuple[Artifact, Engine]:
    """The model and an engine; says so when alpha is out of reach. drift: as of the engine."""
    from deformer_stream import log, model_store

    loaded = model_store.read(settings.model, settings.device, settings.compiled == "auto")
    for alpha, needed in loaded.calibration.find_unreachable_alphas(settings.alpha).items():
        log.get("model").warning(
            f"alpha {alpha:g} is out of reach: with {len(loaded.calibration.scores)} calibration records the smallest "
            f"p-value is {loaded.calibration.min_p_value:.2g}, so no alert can be raised; calibrate on at least "
            f"{needed} records or raise --alpha"
        )
    groups = loaded.calibration.calibration_by_group
    for alpha in settings.alpha:
        short = [name for name, own in groups.items() if own.find_unreachable_alphas([alpha])]
        if short:
            named = ", ".join(short[:8]) + (", …" if len(short) > 8 else "")
            log.get("model").warning(
                f"alpha {alpha:g} is out of reach in {len(short)} of {len(groups)} groups: {named}"
            )
    calibrated = loaded.calibration.tie_policy
    if settings.ties is not None and settings.ties != calibrated:
        log.get("model").warning(
            f"--ties {settings.ties}: the model was calibrated with {calibrated}, so its false-alarm rate is not "
            f"guaranteed; leave the option out, or calibrate with it (deformer-stream calibrate --ties {settings.ties})"
        )
    timeout, effort = settings.record_timeout, settings.explanations
    return loaded, engine(loaded, settings, settings.alpha, timeout, drift, effort)


def engine(
    loaded: Artifact,
    settings: ScoringSettings,
    alphas: Sequence[float],
    timeout: float | None,
    drift: float | None = None,
    effort: Effort = "full",
) -> Engine:
    """timeout: seconds of silence that end a record. effort: spent on explaining alerts.

    Raises `ConfigError` where its memory cannot be had."""
    from deformer_stream.engine.engine import Engine, Limits
    from deformer_stream.errors import ConfigError

    wait = getattr(settings, "tie_wait", None)
    limits = Limits(
        None if timeout is None else round(timeout * 1e6),
        settings.max_open_records,
        settings.cache_memory,
        tie_wait=None if wait is None else round(wait * 1e6),
    )
    try:
        ties = settings.ties
        return Engine(loaded.model, loaded.calibration, loaded.fingerprint, alphas, limits, drift, effort, ties)
    except (RuntimeError, MemoryError):  # what torch and NumPy say when memory cannot be had
        raise ConfigError(f"--cache-memory {settings.cache_memory} bytes cannot be had: give less") from None


def shown(alphas: Sequence[float]) -> str:
    """For a person."""
    return ", ".join(f"{alpha:g}" for alpha in alphas)


def fields(settings: ScoringSettings) -> Fields:
    from deformer_stream.codec import Fields

    return Fields(
        record=settings.record_field,
        feature=settings.feature_field,
        value=settings.value_field,
        values=settings.values_field,
        time=settings.time_field,
        device=settings.device_field,
    )


def windows(schema: Schema, settings: ScoringSettings) -> Windows | None:
    """Those that the model knows, or those asked for. Raises `ConfigError`."""
    from deformer_stream.codec import Windows
    from deformer_stream.errors import ConfigError

    width = None if settings.window is None else round(settings.window * 1e6)
    found = Windows.asked(schema, width, round(settings.grace * 1e6))
    if found is not None and settings.device_field == settings.record_field:
        raise ConfigError("--device-field and --record-field must differ, or no event would be in a window")
    return found


def codec(loaded: Artifact, settings: ScoringSettings, **extra: Any) -> Codec:
    from deformer_stream.codec import Codec

    most = max(4096, len(loaded.schema))
    return Codec(
        loaded.schema,
        fields(settings),
        max_message_bytes=settings.max_message_bytes,
        max_readings=most,
        windows=windows(loaded.schema, settings),
        max_ahead=None if settings.max_ahead is None else round(settings.max_ahead * 1e6),
        **extra,
    )


def tables(
    inputs: Sequence[str], loaded: Artifact, settings: TableSettings
) -> tuple[Codec, FileSource | StandardInput]:
    """Files and how they are decoded. Readings of a wide row have no order of arrival; the one that the model was
    calibrated in keeps the guarantee."""
    from connectors.files import open_source

    source = open_source(
        list(inputs),
        loaded.schema,
        layout=settings.layout,
        order=settings.order or "arrival",
        seed=settings.seed,
        fields=fields(settings),
        record_column=settings.record_column,
        time_column=settings.time_column,
        max_message_bytes=settings.max_message_bytes,
        windows=windows(loaded.schema, settings),
    )
    return codec(loaded, settings, order=order_of_rows(loaded, settings), seed=settings.seed), source


def order_of_rows(loaded: Artifact, settings: TableSettings) -> Order:
    """Of the readings of a wide row."""
    calibrated = loaded.calibration.arrival_order
    return settings.order or ("random" if calibrated == "random" else "schema" if calibrated == "schema" else "arrival")
