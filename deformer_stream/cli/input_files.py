"""The input files of a command: checks of their paths, and the source that reads them.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deformer_stream.cli.codecs import get_field_names, make_row_codec, make_window_assigner

if TYPE_CHECKING:
    from connectors.files import FileSource, InputFiles, ReadOptions, StandardInput
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.codec.model_choice import ModelDecoder
    from deformer_stream.settings import InputSettings
    from deformer_stream.tables.data_files import DataFile

DEFAULT_BATCH_EVENTS, MAX_BATCH_FACTOR = 8192, 8
"""Number of events of a poll of files with one model; and the largest factor by which it grows with several models."""


def check_paths(
    inputs: Sequence[str | Path],
    model: Path | None,
    outputs: Mapping[str, str | Path | None] | None = None,
    models: Path | None = None,
    other_inputs: Iterable[Path] = (),
) -> None:
    """Check that the input files and the model directory exist, before heavy packages are imported.

    So a wrong path is reported at once. The contents of files are checked later.

    Args:
        inputs: Files, folders and patterns; `-` is standard input.
        model: The model directory, None if the command needs none.
        outputs: The path of each output by its flag, such as `--records`. It must not be an input.
        models: The folder of several models, None if the command has none.
        other_inputs: Files that are read and are no data files.

    Raises:
        InputError: An input does not exist.
        ArtifactError: The model directory does not exist or is not one, or the folder has no models.
        ConfigError: An output is also an input or another output.
    """
    from deformer_stream.errors import ArtifactError
    from deformer_stream.tables.discovery import check_no_overwrite

    check_no_overwrite(inputs, outputs or {}, other_inputs)
    if model is not None and not (model / "manifest.json").exists():
        from deformer_stream.model_manifest import name_remedy_if_missing

        raise ArtifactError(f"{model / 'manifest.json'} is missing: {name_remedy_if_missing(model)}")
    if models is not None:
        from deformer_stream.model_set import find_models

        find_models(models)


def open_inputs(
    inputs: Sequence[str], models: ServedModels, settings: InputSettings
) -> tuple[ModelDecoder, FileSource | StandardInput]:
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


def open_inputs_for_shards(
    inputs: Sequence[str],
    models: ServedModels,
    settings: InputSettings,
    choose: Callable[[Sequence[DataFile]], Sequence[DataFile]] | None = None,
) -> InputFiles:
    """Open the input files of a command as `open_inputs` does, so that shards can read parts of them.

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


def make_row_codecs(models: ServedModels, settings: InputSettings) -> ModelDecoder:
    """Return the codec of a command that scores files with one model, or the codecs of several models."""
    return models.combine_codecs(
        lambda loaded: make_row_codec(loaded, settings, models.choice), settings, translator=None
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
    from deformer_stream.tables.filters import select_label
    from deformer_stream.tables.table import TableOptions

    schema = next(iter(models.schema_by_name.values()))
    if schema.reading_times is not None and settings.input_order not in (None, "arrival"):
        raise ConfigError(
            f"--order {settings.input_order} is for records with one reading of each feature, but the readings of the "
            "model are irregular and are scored in the order of arrival: leave the option out"
        )
    if models.choice is not None:
        models.check_same_form(settings)
    table_options = TableOptions.from_settings(settings)
    if settings.label_of_rows is not None:
        table_options = replace(table_options, where=select_label(*settings.label_of_rows, table_options.where))
    return ReadOptions(
        layout=settings.layout,
        order=settings.input_order or "arrival",  # without the option, logs are read in their own order
        seed=settings.seed,
        field_names=get_field_names(settings),
        record_column=settings.record_column,
        time_column=settings.time_column,
        device_column=settings.device_column,
        table_options=table_options,
        batch_events=choose_batch_events(models),
        max_message_bytes=settings.max_message_bytes,
        window_assigner=make_window_assigner(schema, settings),
        model_column=None if models.choice is None else models.choice.field,
        label_column=None if settings.label_of_records is None else settings.label_of_records[0],
    )
