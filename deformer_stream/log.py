"""Structured logs on standard error: readable text on a terminal, JSON lines otherwise.

A log line consists of a constant event name in snake_case, such as `partition_restored`, and keys with all variable
data. The key `logger` names the component.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure(debug: bool = False) -> None:
    """Configure the format and the level of logs for the whole process.

    Args:
        debug: Whether to log events of all levels. Otherwise the level is "info".
    """
    renderer = (
        structlog.dev.ConsoleRenderer(colors=True) if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            _name_logger,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose lines carry the name of a component in the key `logger`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger


def _name_logger(
    _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Rename the key `component` of a log line to `logger`.

    `structlog.get_logger` cannot bind the key `logger`, because one of its own parameters has that name. Binding it
    later would fix the configuration of loggers that are made when a module is imported.
    """
    if "component" in fields:
        fields["logger"] = fields.pop("component")
    return fields
