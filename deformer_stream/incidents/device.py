"""The device of a record and the group of a device, which are parts of their ids."""

from __future__ import annotations

WINDOW_SEPARATOR, RECORD_SEPARATOR = "@", "/"
"""The separators between the device and the rest of a record id: the first one if the record is a window (an interval
of time), the second one for other records."""

WHOLE_STREAM = ""
"""The device of a record whose id contains no device. All such records count as records of one device."""


def extract_device(record_id: str, separator: str | None = None) -> str:
    """Return the device of a record: its id before the last `@`, else its id before the last `/`, else `WHOLE_STREAM`.

    The id of a window is the device and the start of the window, such as `pump-07@2020-03-09T10:34:30Z`.

    Args:
        record_id: Id of the record.
        separator: The only separator that is used; None for `@`, else `/`.
    """
    for candidate in (WINDOW_SEPARATOR, RECORD_SEPARATOR) if separator is None else (separator,):
        device = record_id.rpartition(candidate)[0]
        if device:
            return device
    return WHOLE_STREAM


def extract_device_group(device: str) -> str:
    """Return the group of a device: its id before the last `/`, else "", the group of all devices without one.

    The group of `hall-2/pump-07` is `hall-2`. Fleet incidents are those of the devices of one group.
    """
    return device.rpartition(RECORD_SEPARATOR)[0]
