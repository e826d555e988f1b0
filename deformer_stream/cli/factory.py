"""Functions that create the parts of a pipeline from settings: engine, codec, window assigner and file source.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import threading

    from connectors.files import FileSource, InputFiles, ReadOptions, StandardInput
    from connectors.schema_registry import SchemaRegistry
    from deformer_stream.calibration.conformal import Calibration
    from deformer_stream.codec import Codec, FieldNames, Order, SchemaTranslator, WindowAssigner
    from deformer_stream.codec.model_choice import ModelChoice, ModelCodecs
    from deformer_stream.codec.output_formats import OutputFormat, OutputReader, OutputSchema
    from deformer_stream.engine.engine import Engine, Limits
    from deformer_stream.engine.engine_set import EngineSet
    from deformer_stream.engine.explain import ExplanationEffort
    from deformer_stream.model.schema import Schema
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.reload import ModelReloader, ModelSetReloader
    from deformer_stream.settings import (
        CalibrateSettings,
        ConsumeSettings,
        InputSettings,
        ReplaySettings,
        ScoringSettings,
    )
    from deformer_stream.settings.commands import ModelSetSettings
    from deformer_stream.settings.registry import OutputFormatSettings, RegistryAddressSettings, RegistrySettings
    from deformer_stream.tables.data_files import DataFile

MAX_LISTED_GROUPS = 8
"""Largest number of calibration groups that a warning names."""

DEFAULT_DRIFT_ODDS = 1000.0
"""Odds at which drift is reported if the option `--drift` is not set."""

DEFAULT_BATCH_EVENTS, MAX_BATCH_FACTOR = 8192, 8
"""Number of events of a poll of files with one model; and the largest factor by which it grows with several models."""

REGISTRY_PATIENCE = 10.0
"""Seconds for which requests to a schema registry are repeated by commands without the option `--patience`."""

MIN_READINGS_LIMIT = 4096
"""Smallest limit of the readings in a message. The limit is larger if the model has more features than this."""


def check_paths(
    inputs: Sequence[str | Path],
    model: Path | None,
    outputs: Mapping[str, str | Path | None] | None = None,
    models: Path | None = None,
) -> None:
    """Check that the input files and the model directory exist, before heavy packages are imported.

    So a wrong path is reported at once. The contents of files are checked later.

    Args:
        inputs: Files, folders and patterns; `-` is standard input.
        model: The model directory, None if the command needs none.
        outputs: The path of each output file by its flag, such as `--records`. It must not be an input.
        models: The folder of several models, None if the command has none.

    Raises:
        InputError: An input does not exist.
        ArtifactError: The model directory does not exist or is not one, or the folder has no models.
        ConfigError: An output file is also an input or another output.
    """
    from deformer_stream.errors import ArtifactError
    from deformer_stream.tables.discovery import check_no_overwrite

    check_no_overwrite(inputs, outputs or {})
    if model is not None and not (model / "manifest.json").exists():
        raise ArtifactError(
            f"{model / 'manifest.json'} is missing: give the directory that deformer-train wrote with --out"
        )
    if models is not None:
        from deformer_stream.model_set import find_models

        find_models(models)


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
    ) -> Codec | ModelCodecs:
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
        record_timeout=None if record_timeout is None else _to_micros(record_timeout),
        max_open_records=settings.max_open_records,
        max_record_bytes=settings.record_memory,
        cache_bytes=settings.cache_memory,
        tie_wait=None if tie_wait is None else _to_micros(tie_wait),
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


def _to_micros(seconds: float) -> int:
    """Return a number of seconds in microseconds, the unit of the engine, rounded to an integer."""
    return round(seconds * 1e6)


def format_alphas(alphas: Sequence[float]) -> str:
    """Return alphas (false-alarm rates) as a comma-separated text, such as "0.05, 0.01"."""
    return ", ".join(f"{alpha:g}" for alpha in alphas)


def get_field_names(settings: ScoringSettings) -> FieldNames:
    """Return the names of the JSON fields from which the codec reads events, as set by the options of the command."""
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
    """Return the object that assigns events without a record id to windows.

    A window is a record that collects the readings of one device within an interval of event time.

    Args:
        schema: The schema of the model, which may contain the length of the windows.
        settings: Options of the command, which may contain the length of the windows (`--window`).

    Returns:
        The window assigner; None if there are no windows, since every event contains a record id.

    Raises:
        ConfigError: The options contradict the model or each other.
    """
    from deformer_stream.codec import WindowAssigner
    from deformer_stream.errors import ConfigError

    width = None if settings.window is None else _to_micros(settings.window)
    assigner = WindowAssigner.from_options(schema, width, _to_micros(settings.grace))
    if assigner is not None and settings.device_field == settings.record_field:
        raise ConfigError(
            "--device-field and --record-field must differ, because one JSON field cannot be both the device and the "
            "record id of an event: name two different fields"
        )
    return assigner


def make_codec(loaded: Artifact, settings: ScoringSettings, **others: Any) -> Codec:
    """Return the codec that decodes messages into events for a model, and encodes alerts.

    Args:
        loaded: The model.
        settings: Options of the command.
        others: Further arguments of `Codec`.
    """
    from deformer_stream.codec import Codec

    window_assigner = make_window_assigner(loaded.schema, settings)
    return Codec(
        loaded.schema,
        get_field_names(settings),
        max_message_bytes=settings.max_message_bytes,
        # Messages with more readings are rejected. One with one reading for each feature must always be accepted.
        max_readings=max(MIN_READINGS_LIMIT, len(loaded.schema)),
        window_assigner=window_assigner,
        # Events further in the future than this are rejected. None accepts all times.
        max_ahead_micros=settings.get_max_ahead_micros(window_assigner is not None),
        **others,
    )


def open_registry(
    settings: RegistryAddressSettings,
    patience: float,
    cleanup: ExitStack,
    on_wait: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> SchemaRegistry | None:
    """Return the client of the schema registry, None if the options name none. It sends no request yet.

    Args:
        settings: The registry.
        patience: Seconds for which requests to the registry are repeated.
        cleanup: The connections are closed with it.
        on_wait: Called during such a wait.
        stop: Set when the command must end, also during such a wait.

    Raises:
        ConfigError: A file that the options name cannot be read.
    """
    from connectors.schema_registry import RegistryAddress, SchemaRegistry

    if settings.schema_registry is None:
        return None
    address = RegistryAddress(
        settings.schema_registry,
        settings.schema_registry_username,
        settings.read_registry_password(),
        settings.schema_registry_cafile,
    )
    registry = SchemaRegistry(address, patience, stop)
    cleanup.callback(registry.close)
    registry.on_wait = on_wait
    return registry


@contextmanager
def end_if_stopped(stop: threading.Event) -> Iterator[None]:
    """Return a context in which a service that does not respond is no error if the command must end.

    It is for the start of a command, which has nothing to finish yet.

    Raises:
        Exit: The command must end, and is not connected; exit code 0.
    """
    from deformer_stream import log
    from deformer_stream.errors import Unavailable

    try:
        yield
    except Unavailable as error:
        if not stop.is_set():
            raise
        log.get_logger("start").info("stopped", message=str(error))
        raise click.exceptions.Exit(0) from None


def make_translator(
    settings: RegistrySettings, registry: SchemaRegistry | None, max_message_bytes: int
) -> SchemaTranslator | None:
    """Return the object that converts the messages of a schema registry to JSON, None if the messages are JSON.

    Args:
        settings: The format of the messages.
        registry: The registry.
        max_message_bytes: Largest accepted message in bytes.

    Raises:
        ConfigError: The registry refuses the login, or the libraries of the format are not installed.
        Unavailable: The registry does not respond.
        Exit: It does not respond, and the command must end.
    """
    from deformer_stream.codec import SchemaTranslator

    if settings.format == "json" or registry is None:
        return None
    translator = SchemaTranslator(settings.format, registry.fetch, max_message_bytes)
    with end_if_stopped(registry.stop):
        registry.check()
    return translator


def register_output_schemas(
    settings: OutputFormatSettings, registry: SchemaRegistry | None, topic_by_schema: Mapping[OutputSchema, str]
) -> dict[OutputSchema, OutputFormat]:
    """Return the format of the messages of each output topic, after its schema was registered.

    Args:
        settings: The format.
        registry: The registry, for Avro.
        topic_by_schema: The topics by the names of their schemas.

    Raises:
        ConfigError: The registry refuses a schema or the login, or fastavro is not installed.
        Unavailable: The registry does not respond.
        Exit: It does not respond, and the command must end.
    """
    from deformer_stream.codec.output_formats import JSON_FORMAT, AvroFormat, check_avro_package, load_schema

    if settings.output_format == "json" or registry is None:
        return dict.fromkeys(topic_by_schema, JSON_FORMAT)
    check_avro_package("--output-format avro")
    text_by_name = {name: load_schema(name) for name in topic_by_schema}
    with end_if_stopped(registry.stop):
        return {
            name: AvroFormat(text, registry.register(f"{topic_by_schema[name]}-value", "AVRO", text))
            for name, text in text_by_name.items()
        }


def make_output_reader(registry: SchemaRegistry | None) -> OutputReader:
    """Return the function that converts messages which this program has written, JSON or Avro, to JSON.

    Args:
        registry: The registry, None if the messages are JSON.

    Raises:
        ConfigError: The registry refuses the login, or fastavro is not installed.
        Unavailable: The registry does not respond.
        Exit: It does not respond, and the command must end.
    """
    from deformer_stream.codec.output_formats import OutputReader

    if registry is None:
        return OutputReader()
    reader = OutputReader(registry.fetch)
    with end_if_stopped(registry.stop):
        registry.check()
    return reader


def open_inputs(
    inputs: Sequence[str], models: ServedModels, settings: InputSettings
) -> tuple[Codec | ModelCodecs, FileSource | StandardInput]:
    """Open the input files of a command, and create the codec that decodes their events.

    Args:
        inputs: Files or folders; `-` is standard input.
        models: The models that score the events.
        settings: Options of the command.

    Returns:
        The codec that decodes the events, and the source that reads them.

    Raises:
        ConfigError: The order of the readings is set, but the readings of the model are irregular; or as
            `ServedModels.check_same_form`.
    """
    from connectors.files import open_source

    source = open_source(list(inputs), list(models.schema_by_name.values()), _make_read_options(models, settings))
    return make_row_codecs(models, settings), source


def open_input_files(
    inputs: Sequence[str],
    models: ServedModels,
    settings: InputSettings,
    choose: Callable[[Sequence[DataFile]], Sequence[DataFile]] | None = None,
) -> InputFiles:
    """Open the input files of a command as `open_inputs` does, so that parts of them can be read.

    Args:
        inputs: Files, folders and patterns.
        models: The models that score the events.
        settings: Options of the command.
        choose: Returns those of the files to open; None for all of them.

    Raises:
        ConfigError: As for `open_inputs`.
    """
    from connectors.files import open_input_files

    options = _make_read_options(models, settings)
    return open_input_files(list(inputs), list(models.schema_by_name.values()), options, choose)


def make_row_codecs(models: ServedModels, settings: InputSettings) -> Codec | ModelCodecs:
    """Return the codec of a command that scores files with one model, or the codecs of several models."""
    return models.combine_codecs(
        lambda loaded: make_row_codec(loaded, settings, models.choice), settings, translator=None
    )


def make_row_codec(loaded: Artifact, settings: InputSettings, choice: ModelChoice | None = None) -> Codec:
    """Return the codec of a command that scores files. It orders the readings of a row of a wide table.

    Args:
        loaded: The model.
        settings: Options of the command.
        choice: What chooses the model, if it is one of several.
    """
    order = choose_order_of_rows(loaded, settings)
    return make_codec(
        loaded, settings, order=order, seed=settings.seed, model_field=None if choice is None else choice.field
    )


def choose_batch_events(models: ServedModels) -> int:
    """Return the number of events of a poll of files.

    Each of several models handles a part of a poll. Larger polls keep these parts large enough for efficient matrix
    products.
    """
    return DEFAULT_BATCH_EVENTS * min(len(models.artifact_by_name), MAX_BATCH_FACTOR)


def _make_read_options(models: ServedModels, settings: InputSettings) -> ReadOptions:
    """Return how files are read, which the options of a command determine.

    Raises:
        ConfigError: The order of the readings is set, but the readings of the model are irregular; or as
            `ServedModels.check_same_form`.
    """
    from connectors.files import ReadOptions
    from deformer_stream.errors import ConfigError
    from deformer_stream.tables.table import TableOptions

    schema = next(iter(models.schema_by_name.values()))
    if schema.reading_times is not None and settings.input_order not in (None, "arrival"):
        raise ConfigError(
            f"--order {settings.input_order} is for records with one reading of each feature, but the readings of the "
            "model are irregular and are scored in the order of arrival: leave the option out"
        )
    if models.choice is not None:
        models.check_same_form(settings)
    return ReadOptions(
        layout=settings.layout,
        order=settings.input_order or "arrival",  # without the option, logs are read in their own order
        seed=settings.seed,
        field_names=get_field_names(settings),
        record_column=settings.record_column,
        time_column=settings.time_column,
        device_column=settings.device_column,
        table_options=TableOptions.from_settings(settings),
        batch_events=choose_batch_events(models),
        max_message_bytes=settings.max_message_bytes,
        window_assigner=make_window_assigner(schema, settings),
        model_column=None if models.choice is None else models.choice.field,
    )


def choose_order_of_rows(loaded: Artifact, settings: InputSettings) -> Order:
    """Return the order in which the readings of a row of a wide table (one record per row) are scored.

    Such readings have no order of arrival. By default they are scored in the order in which the model was calibrated,
    because the false-alarm rate is guaranteed only for this order.

    Args:
        loaded: The model with its calibration.
        settings: Options of the command. `--order` has precedence.
    """
    return loaded.calibration.row_order if settings.input_order is None else settings.input_order
