"""Structured logs on standard error: readable text on a terminal, JSON lines otherwise.

A log line consists of a constant event name in snake_case, such as `partition_restored`, and keys with all variable
data. The key `logger` names the component.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure(debug: bool = False, *, only_warnings: bool = False) -> None:
    """Configure logging for the whole process: lines on standard error, with the time and the level of each event.

    The lines are readable text if standard error is a terminal, otherwise JSON.

    Args:
        debug: Whether to log events of all levels. Otherwise events below the level "info" are dropped.
        only_warnings: Without `debug`, drop events below the level "warning", for processes beside the main one.
    """
    level = logging.DEBUG if debug else logging.WARNING if only_warnings else logging.INFO
    # The renderer for terminals writes exceptions itself.
    renderers: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    if sys.stderr.isatty():
        renderers = [_escape_texts, structlog.dev.ConsoleRenderer(colors=True)]
    structlog.configure(
        processors=[
            _name_logger,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # so that loggers that exist already use these settings, too
    )


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger for a component of the program.

    Args:
        component: The name of the component, which each log line of the logger contains under the key `logger`.
    """
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger


def _name_logger(
    _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Rename the key `component` of a log line to `logger`.

    This is a processor of structlog: a function through which each log line passes before it is written.
    `structlog.get_logger` cannot set the key `logger` itself, because one of its own parameters has that name. The
    method `bind` of a logger could do this. But a bound logger keeps the settings with which it was created, and a
    later call of `configure` would not change them.

    Args:
        _logger: The logger; not used.
        _method: The name of the logging method, such as "info"; not used.
        fields: The keys and values of the log line, which are changed in place.

    Returns:
        `fields`.
    """
    if "component" in fields:
        fields["logger"] = fields.pop("component")
    return fields


def _escape_texts(
    _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what a terminal would interpret in the texts of a log line, such as in an id that a device has sent.

    This is a processor of structlog, as `_name_logger`. JSON needs none, because it escapes such characters itself.

    Args:
        _logger: The logger; not used.
        _method: The name of the logging method; not used.
        fields: The keys and values of the log line.
    """
    return {name: _escape(value) if isinstance(value, str) else value for name, value in fields.items()}


def _escape(text: str) -> str:
    """Return a text with escape sequences in place of characters that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
