"""The client of the schema registry that the options of a command name, and the formats that need it.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import threading

    from connectors.schema_registry import SchemaRegistry
    from deformer_stream.codec import SchemaTranslator
    from deformer_stream.codec.output_formats import OutputFormat, OutputReader, OutputSchema
    from deformer_stream.settings.registry import OutputFormatSettings, RegistryAddressSettings, RegistrySettings

REGISTRY_PATIENCE = 10.0
"""Seconds for which requests to a schema registry are repeated by commands without the option `--patience`."""


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
