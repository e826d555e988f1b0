"""The options of every command that reads tables: how CSV files are written, and the zone of times."""

from __future__ import annotations

import codecs
from typing import Annotated, ClassVar, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from deformer_stream.durations import TimeUnit
from deformer_stream.settings.base import Settings

_DELIMITER_BY_NAME = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


def _parse_delimiter(value: object) -> object:
    """Return the character that a name such as "tab" means; any other value unchanged."""
    return _DELIMITER_BY_NAME.get(value.lower(), value) if isinstance(value, str) else value


def _check_delimiter(value: str) -> str:
    """Return a delimiter; raise `ValueError` if it is not a single character that can separate cells."""
    if len(value) != 1 or value.isalnum() or value in "\r\n\"'.+-":
        raise ValueError("this is not a delimiter; write one character, such as ; or tab")
    return value


def _check_encoding(value: str) -> str:
    """Return the name of an encoding; raise `ValueError` if it is unknown."""
    try:
        codecs.lookup(value)
    except LookupError:
        raise ValueError("this encoding is unknown; write a name such as utf-8, utf-16 or cp1252") from None
    return value


def check_timezone(value: str) -> str:
    """Return the name of a time zone; raise `ValueError` if it is unknown."""
    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError):  # an unknown name, an impossible one, or the name of a folder
        raise ValueError(
            "this time zone is unknown; write a name such as Europe/Berlin, America/Chicago or UTC"
        ) from None
    return value


class TimeSettings(Settings):
    """The options of every command that reads times of readings: how they are written."""

    timezone: Annotated[str, AfterValidator(check_timezone)] | None = Field(
        None,
        description="Time zone of times that are written without one, such as Europe/Berlin. Default: UTC for "
        "timestamps; texts need this option in messages, and in tables if records are time windows or a row is a "
        "reading.",
    )
    time_unit: TimeUnit = Field("s", description="Unit of times that are written as numbers since 1970.")


class TableSettings(TimeSettings):
    """The options of every command that reads tables."""

    contradictory: ClassVar[tuple[str, ...]] = ("header", "no_header")

    where: str | None = Field(
        None,
        min_length=1,
        description="Condition for the rows of tables to read, as in SQL, such as \"site = 'A' AND day >= "
        "'2025-01-01'\". Files and parts of files without such rows are not read. Default: all rows.",
    )
    delimiter: Annotated[str, BeforeValidator(_parse_delimiter), AfterValidator(_check_delimiter)] | None = Field(
        None, description="Character between the cells of CSV files, such as ; or tab. Default: recognised."
    )
    decimal: Literal[".", ","] | None = Field(
        None, description="Decimal character of numbers in CSV files and in columns of text. Default: recognised."
    )
    encoding: Annotated[str, AfterValidator(_check_encoding)] | None = Field(
        None, description="Encoding of CSV files, such as utf-8 or cp1252. Default: recognised."
    )
    header: bool | None = Field(
        None, description="CSV files have a line with the names of the columns. Default: recognised."
    )
    no_header: bool = Field(
        False,
        description="CSV files have no line with names; the columns are then column_1, column_2 and so on. Default: "
        "recognised.",
    )

    @model_validator(mode="after")
    def _check_header(self) -> Self:
        """Raise `ValueError` if files are said to have a header and to have none."""
        if self.header and self.no_header:
            raise ValueError("--header and --no-header contradict each other; leave one of them out")
        return self


class WindowedTableSettings(TableSettings):
    """The options of every command that can form windows of the rows of wide tables."""

    device_column: str = Field(
        "device",
        min_length=1,
        description="Column of wide tables with the device, if records are time windows. The name of the file is the "
        "device if there is no such column.",
    )
