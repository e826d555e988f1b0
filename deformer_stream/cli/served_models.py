"""The models of a command: loading them, their engines, and the reload of changed models.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deformer_stream.cli.codecs import get_field_names, make_window_assigner

if TYPE_CHECKING:
    import threading

    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.codec import Codec, SchemaTranslator
    from deformer_stream.codec.model_choice import ModelChoice, ModelDecoder
    from deformer_stream.engine.engine import Engine, Limits
    from deformer_stream.engine.engine_set import EngineSet
    from deformer_stream.engine.explain import ExplanationEffort
    from deformer_stream.model.schema import Schema
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.reload import ModelReloader, ModelSetReloader
    from deformer_stream.settings import (
        CalibrateSettings,
        ConsumeSettings,
        ReplaySettings,
        ScoringSettings,
    )
    from deformer_stream.settings.commands import ModelSetSettings

MAX_LISTED_GROUPS = 8
"""Largest number of calibration groups that a warning names."""

DEFAULT_DRIFT_ODDS = 1000.0
"""Odds at which drift is reported if the option `--drift` is not set."""


@dataclass(slots=True)
class ServedModels:
    """The models of a command, and what creates their parts of the pipeline.

    Attributes:
        artifact_by_name: The models when the command began; the name of the only model is `ONLY_MODEL`.
        choice: Decides to which of several models a message belongs. None if there is one model.
        make_engine: Returns a new engine of one of the models, or of a further one.
        limits: The limits of the engines of several models together.
    """

    artifact_by_name: dict[str, Artifact]
    choice: ModelChoice | None
    make_engine: Callable[[Artifact], Engine]
    limits: Limits | None = None

    def make_engines(self) -> EngineSet:
        """Return a new engine of each model.

        Raises:
            ConfigError: As `make_engine`.
        """
        from deformer_stream.engine.engine_set import EngineSet

        engine_by_name = {name: self.make_engine(artifact) for name, artifact in self.artifact_by_name.items()}
        return EngineSet(engine_by_name, self.limits)

    @property
    def schema_by_name(self) -> dict[str, Schema]:
        """The schema of each model."""
        return {name: artifact.schema for name, artifact in self.artifact_by_name.items()}

    @property
    def has_faults(self) -> bool:
        """Whether a model has a classifier of faults."""
        return any(artifact.fault_classifier is not None for artifact in self.artifact_by_name.values())

    @property
    def training_label(self) -> tuple[str, str] | None:
        """The options `--label` and `--normal` of the training; None without them, or if those of the models differ."""
        options = [artifact.manifest["training"].get("options", {}) for artifact in self.artifact_by_name.values()]
        (label, normal), *others = {(entry.get("label"), entry.get("normal")) for entry in options}
        return (label, normal) if isinstance(label, str) and isinstance(normal, str) and not others else None

    @property
    def fault_entries(self) -> list[Any]:
        """What identifies the classifier of faults of each model: the entry of its manifest, None without one."""
        return [artifact.manifest.get("faults") for artifact in self.artifact_by_name.values()]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the only model, or of the set of models."""
        from deformer_stream.codec.model_choice import compute_set_fingerprint

        fingerprint_by_name = {name: artifact.fingerprint for name, artifact in self.artifact_by_name.items()}
        if self.choice is None:
            return next(iter(fingerprint_by_name.values()))
        return compute_set_fingerprint(self.choice, fingerprint_by_name)

    def check_same_form(self, settings: ScoringSettings) -> None:
        """Check that files can be read in one way for all models.

        Args:
            settings: Options of the command.

        Raises:
            ConfigError: Only some of the models have windows or irregular readings, so that the rows of a table are
                records of some models and readings of others.
        """
        from deformer_stream.errors import ConfigError

        schemas = self.schema_by_name.values()
        forms = {(make_window_assigner(s, settings) is None, s.reading_times is None) for s in schemas}
        if len(forms) > 1:
            raise ConfigError(
                "only some of the models have time windows or irregular readings, so files cannot be read in one way "
                "for all of them: use a folder of models for each kind"
            )

    def combine_codecs(
        self, make_codec: Callable[[Artifact], Codec], settings: ScoringSettings, translator: SchemaTranslator | None
    ) -> ModelDecoder:
        """Return the codec of the only model, or the codecs of several ones.

        Args:
            make_codec: Returns the codec of a model.
            settings: Options of the command.
            translator: Converts messages in a format of a schema registry to JSON, for several models; None if they are
                JSON. `make_codec` considers it for the only model.
        """
        from deformer_stream.codec.model_choice import ModelCodecs

        codec_by_name = {name: make_codec(artifact) for name, artifact in self.artifact_by_name.items()}
        if self.choice is None:
            return next(iter(codec_by_name.values()))
        names = get_field_names(settings)
        return ModelCodecs(self.choice, codec_by_name, names, settings.max_message_bytes, translator)


def load_models(
    settings: ConsumeSettings | ReplaySettings,
    drift_odds: float | None = None,
    states_suspicious: bool = False,
    *,
    warns: bool = True,
) -> ServedModels:
    """Load the model of a command, or its several models.

    The memory of the KV caches is divided equally among the models.

    Args:
        settings: Options of the command.
        drift_odds: Drift (records are more anomalous than the calibration records) is reported when the evidence for it
            reaches these odds. Infinite to track drift without reporting it, None to ignore drift.
        states_suspicious: Whether the reading to take next is also stated of suspicious records without an alert, if
            the options request it.
        warns: Whether warnings are logged, as by `load_model`.

    Raises:
        ArtifactError: A model cannot be read, or the folder has no models.
        ConfigError: The options do not fit a model, or no field determines the model of a message.
    """
    from deformer_stream.engine.engine import Limits
    from deformer_stream.engine.events import ONLY_MODEL

    choice: ModelChoice | None = None
    path_by_name: Mapping[str, Path | None] = {ONLY_MODEL: settings.model}
    if settings.models is not None:
        choice, path_by_name = _find_models(settings, settings.models)
    artifact_by_name = {
        name: load_model(settings, path, warns=warns, name=name or None) for name, path in path_by_name.items()
    }
    _check_models_differ(artifact_by_name)
    shared = settings.model_copy(update={"cache_memory": settings.cache_memory // len(artifact_by_name)})

    def make_alerting_engine(artifact: Artifact) -> Engine:
        """Return a new engine that raises alerts as the options say, with its share of the memory."""
        return make_engine(
            artifact,
            shared,
            alphas=settings.alpha,
            record_timeout=settings.record_timeout,
            drift_odds=drift_odds,
            effort=settings.explanations,
            max_suggested=settings.next_reading,
            suspicious=settings.suspicious if states_suspicious else None,
        )

    limits = Limits(max_open_records=settings.max_open_records, max_record_bytes=settings.record_memory)
    return ServedModels(artifact_by_name, choice, make_alerting_engine, limits)


def load_model_to_calibrate(settings: CalibrateSettings) -> ServedModels:
    """Load the model of `calibrate`, whose engine raises no alerts.

    Raises:
        ArtifactError: The model cannot be read.
    """
    from deformer_stream import model_store
    from deformer_stream.engine.events import ONLY_MODEL

    loaded = model_store.read(settings.model, settings.device, settings.compiled == "auto")
    return ServedModels(
        {ONLY_MODEL: loaded},
        None,
        lambda artifact: make_engine(artifact, settings, alphas=(), record_timeout=settings.record_timeout),
    )


def _check_models_differ(artifact_by_name: Mapping[str, Artifact]) -> None:
    """Check that no two models of a folder are the same, because then the ids of their alerts could be equal.

    Raises:
        ConfigError: Two models have the same fingerprint.
    """
    from deformer_stream.errors import ConfigError

    name_by_fingerprint: dict[str, str] = {}
    for name, artifact in artifact_by_name.items():
        other = name_by_fingerprint.setdefault(artifact.fingerprint, name)
        if other != name:
            raise ConfigError(
                f"--models: {other!r:.80} and {name!r:.80} are the same model, so the ids of their alerts could be "
                "equal: train a model for each, or let --model-pattern give both the same name"
            )


def _find_models(settings: ModelSetSettings, folder: Path) -> tuple[ModelChoice, dict[str, Path]]:
    """Return what chooses one of the models of a folder, and the directories of the models by name.

    Raises:
        ArtifactError: The folder has no models.
        ConfigError: No field determines the model of a message.
    """
    from deformer_stream.codec.model_choice import ModelChoice
    from deformer_stream.errors import ConfigError
    from deformer_stream.model_set import find_models

    field, path_by_name = find_models(folder)
    if settings.model_by is not None:
        field = settings.model_by
    elif settings.model_pattern is not None:
        field = settings.device_field
    if field is None:
        raise ConfigError(
            f"{folder} has no file models.json that names the field with the model of a message: give it with "
            "--model-by, or find the model in the device with --model-pattern"
        )
    return ModelChoice(field, settings.model_pattern), path_by_name


def make_reloader(
    models: ServedModels, settings: ConsumeSettings, reload_requested: threading.Event
) -> ModelReloader | ModelSetReloader:
    """Return the object that watches the directory of the only model, or those of several ones.

    Args:
        models: The models in use.
        settings: Options of the command.
        reload_requested: Set from outside (by SIGHUP) to read the directories at once.
    """
    from deformer_stream.model_set import find_models
    from deformer_stream.runtime.reload import ModelReloader, ModelSetReloader

    is_compiled, folder = settings.compiled == "auto", settings.models
    if folder is None:
        (loaded,) = models.artifact_by_name.values()
        return ModelReloader(loaded, settings.device, reload_requested, is_compiled)
    return ModelSetReloader(
        lambda: find_models(folder)[1], models.artifact_by_name, settings.device, reload_requested, is_compiled
    )


def load_model(
    settings: ConsumeSettings | ReplaySettings,
    directory: Path | None = None,
    *,
    warns: bool = True,
    name: str | None = None,
) -> Artifact:
    """Load the model of a command.

    A warning is logged if an option voids the model's false-alarm guarantee, or if an alpha (false-alarm rate) is too
    small for any alert.

    Args:
        settings: Options of the command.
        directory: The directory of the model; None for that of the option `--model`.
        warns: Whether these warnings are logged.
        name: The name of the model among several ones, for these warnings.

    Returns:
        The model with its calibration.
    """
    from deformer_stream import model_store
    from deformer_stream.errors import InvariantViolated

    use_compiled_kernels = settings.compiled == "auto"
    directory = settings.model if directory is None else directory
    if directory is None:
        raise InvariantViolated("neither the options nor the caller name the model directory: report this bug")
    loaded = model_store.read(directory, settings.device, use_compiled_kernels)
    replace_units(loaded, settings)
    if warns:
        named = {} if name is None else {"name": name}
        _warn_about_alphas(loaded.calibration, settings.alpha, named)
        _warn_about_ties(loaded.calibration, settings.ties, named)
    return loaded


def replace_units(loaded: Artifact, settings: ConsumeSettings | ReplaySettings) -> None:
    """Replace the units of features that a loaded model stores by those of the option `--units`.

    Units are texts for people, so neither the scores nor the fingerprint of the model change.

    Args:
        loaded: The model, which is changed in place.
        settings: Options of the command.
    """
    loaded.replace_schema(loaded.schema.with_units(settings.units))


def _warn_about_alphas(calibration: Calibration, alphas: Sequence[float], named: Mapping[str, str]) -> None:
    """Log a warning for each alpha (false-alarm rate) at which the calibration has too few records for any alert.

    Calibration groups (records with a calibration of their own) are checked separately.

    Args:
        calibration: The calibration of the model.
        alphas: The alphas of the option `--alpha`.
        named: The name of the model, as further keys of the log line.
    """
    from deformer_stream import log

    logger = log.get_logger("model")
    for alpha, num_required in calibration.find_unreachable_alphas(alphas).items():
        logger.warning(
            "alpha_out_of_reach",
            alpha=alpha,
            calibration_records=len(calibration.scores),
            required_records=num_required,
            message=f"alpha {alpha:g} is out of reach (it raises no alert), because the smallest possible p-value with "
            f"{len(calibration.scores)} calibration records is {calibration.min_p_value:.2g}: calibrate on at least "
            f"{num_required} records or use a larger --alpha",
            **named,
        )
    groups = calibration.calibration_by_group
    for alpha in alphas:
        names = calibration.find_unreachable_groups(alpha)
        if names:
            listed = ", ".join(names[:MAX_LISTED_GROUPS]) + (", …" if len(names) > MAX_LISTED_GROUPS else "")
            logger.warning(
                "alpha_out_of_reach_in_groups",
                alpha=alpha,
                groups=names[:MAX_LISTED_GROUPS],
                message=f"alpha {alpha:g} is out of reach in {len(names)} of {len(groups)} calibration groups, because "
                f"these have too few records for any alert ({listed}): calibrate on more records or use a larger "
                "--alpha",
                **named,
            )


def _warn_about_ties(calibration: Calibration, ties: str | None, named: Mapping[str, str]) -> None:
    """Log a warning if the option `--ties` differs from the tie policy with which the model was calibrated.

    The tie policy says how readings of one record with the same event time are scored.

    Args:
        calibration: The calibration of the model.
        ties: Value of the option, None if it is not set.
        named: The name of the model, as further keys of the log line.
    """
    from deformer_stream import log

    if ties is not None and ties != calibration.tie_policy:
        log.get_logger("model").warning(
            "tie_policy_differs_from_calibration",
            ties=ties,
            calibrated_ties=calibration.tie_policy,
            message=f"--ties {ties} voids the guarantee of the false-alarm rate, because the model was calibrated with "
            f"{calibration.tie_policy}; leave the option out, or run deformer-stream calibrate --ties {ties}",
            **named,
        )


def make_engine(
    loaded: Artifact,
    settings: ScoringSettings,
    *,
    alphas: Sequence[float],
    record_timeout: float | None,
    drift_odds: float | None = None,
    effort: ExplanationEffort = "full",
    max_suggested: int = 0,
    suspicious: float | None = None,
) -> Engine:
    """Return a new engine, which scores events with a model and raises alerts.

    Args:
        loaded: The model with its calibration.
        settings: Options of the command: memory limits, and how readings with the same event time are scored.
        alphas: False-alarm rates at which alerts are raised; empty to score without alerts.
        record_timeout: Seconds without an event after which a record is closed; None for no time-out.
        drift_odds: Drift (records are more anomalous than the calibration records) is reported when the evidence for it
            reaches these odds. Infinite to track drift without reporting it, None to ignore drift.
        effort: How thoroughly alerts are explained: "full", "fast" or "off".
        max_suggested: Largest number of records of a poll for which the reading to take next is stated.
        suspicious: Largest p-value of a record without an alert for which it is stated; None for no such records.

    Raises:
        ConfigError: The memory of the cache (`--cache-memory`) cannot be allocated, or the reading to take next is
            requested although readings are irregular.
    """
    from deformer_stream import log
    from deformer_stream.durations import to_micros
    from deformer_stream.engine.engine import Engine, Limits
    from deformer_stream.errors import ConfigError
    from deformer_stream.settings import ReplaySettings

    # The longest time that readings wait for further readings of the same event time. `calibrate` lacks this option.
    tie_wait = getattr(settings, "tie_wait", None)
    if "tie_wait" in settings.model_fields_set and loaded.schema.reading_times is not None:
        log.get_logger("model").warning(
            "option_without_effect",
            option="--tie-wait",
            message="--tie-wait has no effect, because irregular readings are scored one after the other; leave it out",
        )
    limits = Limits(
        record_timeout=None if record_timeout is None else to_micros(record_timeout),
        max_open_records=settings.max_open_records,
        max_record_bytes=settings.record_memory,
        cache_bytes=settings.cache_memory,
        tie_wait=None if tie_wait is None else to_micros(tie_wait),
    )
    if max_suggested and loaded.schema.reading_times is not None:
        raise ConfigError(
            "--next-reading has no meaning for irregular readings, which sensors send at any time; leave the option out"
        )
    try:
        return Engine(
            model=loaded.scoring_model,
            calibration=loaded.calibration,
            fingerprint=loaded.fingerprint,
            alpha=alphas,
            limits=limits,
            drift=drift_odds,
            effort=effort,
            ties=settings.ties,
            max_suggested=max_suggested,
            suspicious=suspicious,
            fault_classifier=loaded.fault_classifier,
            names_faults_at_close=isinstance(settings, ReplaySettings),  # only its --records has these names
        )
    except (RuntimeError, MemoryError):  # PyTorch and NumPy raise these if an allocation fails
        raise ConfigError(
            f"the cache of {settings.cache_memory} bytes cannot be allocated, because there is not enough memory; "
            "use a smaller --cache-memory"
        ) from None
