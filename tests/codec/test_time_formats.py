"""Tests of `TimeFormat`, the unit and the zone of times, in columns and in messages of every kind."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.columns import parse_times
from deformer_stream.codec.time_columns import convert_times
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, MAX_MICROS, TimeFormat, guess_unit
from deformer_stream.codec.validation import RejectionError
from deformer_stream.durations import UNITS_PER_SECOND, TimeUnit
from deformer_stream.engine.events import NO_TIME, RejectionReason
from deformer_stream.errors import ConfigError
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import SCHEMA, decode, make_reading

BERLIN = TimeFormat.from_names("s", "Europe/Berlin")
NOON = 1_583_750_073_250_000  # microseconds since 1970
UNITS: list[TimeUnit] = ["s", "ms", "us", "ns"]


def decode_times(time: Any, time_format: TimeFormat) -> list[int]:
    """Return a time, in microseconds since 1970, as each decoder of messages reads it.

    These are the fast path for JSON, the path for all other JSON, the library's documents, and Arrow streams.
    """
    codec = Codec(SCHEMA, time_format=time_format)
    fast, other = make_reading(1.0, time=time), {"record": "r", "values": {"Pressure": 1.0}, "time": time}
    stream = make_stream({"record": ["r"], "time": pa.array([time]), "Pressure": [1.0]})
    batches = [decode(fast, codec=codec), decode(other, codec=codec), codec.decode_document(other)]
    batches.append(decode(stream, codec=codec))
    assert not any(rejections for _, rejections in batches)
    return [int(batch.times[0]) for batch, _ in batches]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("as_type", [int, float])
def test_every_decoder_reads_numbers_in_the_unit(unit: TimeUnit, as_type: type) -> None:
    number = as_type(NOON / 1e6 * UNITS_PER_SECOND[unit])
    expected = NOON if as_type is float or unit != "s" else NOON - 250_000
    assert set(decode_times(number, TimeFormat(unit))) == {expected}


@given(st.sampled_from(UNITS), st.floats(-6e10, 2.5e11))
def test_all_decoders_round_alike(unit: TimeUnit, seconds: float) -> None:
    number = seconds * UNITS_PER_SECOND[unit]
    times = set(decode_times(number, TimeFormat(unit)))
    column, errors = parse_times(convert_times(pa.array([number]), TimeFormat(unit)), "t")
    assert (times, errors) == ({int(column[0])}, {})


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2025-07-01 12:00:00", datetime(2025, 7, 1, 10, tzinfo=UTC)),
        ("2025-07-01T12:00:00.5", datetime(2025, 7, 1, 10, 0, 0, 500_000, tzinfo=UTC)),
        ("01.07.2025 12:00", datetime(2025, 7, 1, 10, tzinfo=UTC)),
        ("2025-07-01T12", datetime(2025, 7, 1, 10, tzinfo=UTC)),
        ("2025-10-26 02:30:00", datetime(2025, 10, 26, 0, 30, tzinfo=UTC)),  # occurs twice: the first of the two
        ("2025-07-01T12:00:00Z", datetime(2025, 7, 1, 12, tzinfo=UTC)),  # a text that states its zone
    ],
)
def test_every_decoder_reads_texts_without_a_zone(time: str, expected: datetime) -> None:
    assert set(decode_times(time, BERLIN)) == {int(expected.timestamp() * 1e6)}


@pytest.mark.parametrize("time", ["2025-07-01 12:00:00", "01.07.2025 12:00"])
def test_messages_without_a_zone_are_rejected_if_none_is_known(time: str) -> None:
    stream = make_stream({"record": ["r"], "time": [time], "Pressure": [1.0]})
    for message in (make_reading(1.0, time=time), stream):
        batch, (rejection,) = decode(message)
        assert (len(batch), rejection.reason) == (0, RejectionReason.WRONG_TYPE)
    assert "--timezone" in decode(make_reading(1.0, time="2025-07-01 12:00:00"))[1][0].detail


@pytest.mark.parametrize(
    ("time", "words"),
    [
        ("noon", "not RFC 3339"),
        ("0001-01-01 00:00:00", "outside the years 1 to 9999"),  # in UTC it is a day of the year 0
        (1e30, "outside the years 1 to 9999"),
        (float("nan"), "not finite"),
    ],
)
def test_times_that_cannot_be_read_in_a_zone_are_rejected(time: str | float, words: str) -> None:
    with pytest.raises(RejectionError, match=words):
        BERLIN.parse(time)
    if not isinstance(time, str):
        return
    batch, (rejection,) = decode(make_reading(1.0, time=time), codec=Codec(SCHEMA, time_format=BERLIN))
    assert (len(batch), rejection.reason) == (0, RejectionReason.WRONG_TYPE)


def test_numbers_that_are_out_of_range_in_the_unit_are_rejected() -> None:
    with pytest.raises(RejectionError, match=r"the time 17000000000000000 lies .* in milliseconds; .* --time-unit"):
        TimeFormat("ms").parse(17_000_000_000_000_000)
    with pytest.raises(RejectionError, match="set --time-unit ms"):
        TimeFormat().parse(1_700_000_000_000)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_timestamps_that_microseconds_cannot_express_are_rejected(unit: Any) -> None:
    """Without care, the product would overflow, and the time would be another one in the range."""
    column = pa.array([2**62 // 3, -(2**62), None, 0], pa.timestamp(unit))
    times, errors = parse_times(convert_times(column, BERLIN), "t")
    assert set(errors) == {0, 1}
    assert times.tolist() == [NO_TIME, NO_TIME, NO_TIME, -3_600_000_000]
    stream = make_stream({"record": ["r"] * 4, "time": column, "Pressure": [1.0] * 4})
    batch, rejections = decode(stream, codec=Codec(SCHEMA, time_format=BERLIN))
    assert (len(batch), [r.reason for r in rejections]) == (2, [RejectionReason.WRONG_TYPE])
    assert batch.times.max() < MAX_MICROS


@pytest.mark.parametrize("unit", UNITS)
def test_numbers_as_texts_are_read_in_the_unit(unit: TimeUnit) -> None:
    text = str(int(NOON / 1e6 * UNITS_PER_SECOND[unit]))
    expected = NOON if unit != "s" else NOON - 250_000
    for texts in ([text], [text, "31.12.2025 12:00"]):
        times, errors = parse_times(convert_times(pa.array(texts), TimeFormat(unit)), "t")
        assert (times[0], errors) == (expected, {})


def test_the_unit_is_guessed_only_if_seconds_are_impossible() -> None:
    assert [guess_unit([NOON / 1e6 * UNITS_PER_SECOND[unit], 5, 7e30][:1]) for unit in UNITS] == UNITS
    assert guess_unit([]) == guess_unit([np.nan, np.inf]) == guess_unit([1e30]) == guess_unit([-1e15, 3.0]) == "s"
    assert guess_unit([NOON / 1e3, NOON / 1e3, 0.0, np.nan]) == "ms"


def test_an_unknown_zone_is_refused() -> None:
    for name in ("Mars/Olympus", "", "../etc", "Europe", "x\0y"):
        with pytest.raises(ConfigError, match="time zone"):
            TimeFormat.from_names("s", name)


@pytest.mark.parametrize(
    "text",
    [
        "2025-12-31 23:59:59",
        "2025-12-31T23:59:59",
        "2025/12/31 23:59:59",
        "31.12.2025 23:59:59",
        "31-Dec-2025 23:59:59",
        "31-dec-25 23:59:59",
        "31 Dec 2025 23:59:59",
        "2025-12-31T22:59:59Z",
        "2025-12-31T23:59:59+01:00",
        "1767221999",
    ],
)
def test_every_spelling_of_a_time_is_the_same_moment(text: str) -> None:
    expected = datetime(2025, 12, 31, 22, 59, 59, tzinfo=UTC)
    mixed = convert_times(pa.array([text, None, "2025-12-31T22:59:59Z"]), BERLIN)
    assert mixed.to_pylist() == [expected, None, expected]
    if not text.isdigit():  # numbers are left to the decoder
        assert convert_times(pa.array([text, None]), BERLIN).to_pylist() == [expected, None]


@pytest.mark.parametrize("text", ["05/06/2025 10:00", "31.02.2025", "noon", "2025-13-01", "20250102", "31-Foo-2025"])
def test_other_texts_are_no_times(text: str) -> None:
    converted = convert_times(pa.array([text, "2025-01-01T00:00:00Z", "x"]), BERLIN)
    if text != "20250102":  # a number of seconds
        assert converted.to_pylist()[0] == text
    assert converted.type == pa.string()
    assert converted.to_pylist()[1:] == ["2025-01-01 00:00:00.000000Z", "x"]


def test_fractions_and_dates_without_a_time_of_day() -> None:
    texts = ["31.12.2025 23:59:59,25", "01.01.2026"]
    assert convert_times(pa.array(texts), DEFAULT_TIME_FORMAT).to_pylist() == [
        datetime(2025, 12, 31, 23, 59, 59, 250_000, tzinfo=UTC),
        datetime(2026, 1, 1, tzinfo=UTC),
    ]


def test_hours_that_occur_twice_or_not_at_all_have_a_definite_time() -> None:
    texts = ["2025-10-26 02:30:00", "2025-03-30 02:30:00", "2025-07-01 12:00:00"]
    expected = [
        datetime(2025, 10, 26, 0, 30, tzinfo=UTC),  # the first of the two
        datetime(2025, 3, 30, 1, 30, tzinfo=UTC),
        datetime(2025, 7, 1, 10, tzinfo=UTC),
    ]
    assert convert_times(pa.array(texts), BERLIN).to_pylist() == expected
    assert convert_times(pa.array([*texts, "x"]), BERLIN).to_pylist()[:3] == [
        f"{moment:%Y-%m-%d %H:%M:%S}.000000Z" for moment in expected
    ]


@given(st.lists(st.datetimes(datetime(1950, 1, 1), datetime(2100, 1, 1)), max_size=20))
def test_columns_and_single_cells_are_localised_alike(moments: list[datetime]) -> None:
    column = pa.array(moments, pa.timestamp("us"))
    expected = [moment.replace(tzinfo=BERLIN.timezone).astimezone(UTC) for moment in moments]
    assert convert_times(column, BERLIN).to_pylist() == expected
    texts = [moment.isoformat(" ") for moment in moments]
    assert convert_times(pa.array([*texts, "x"], pa.string()), BERLIN).to_pylist()[:-1] == [
        f"{moment:%Y-%m-%d %H:%M:%S.%f}Z" if moment.year >= 1000 else "" for moment in expected
    ]


def test_timestamps_without_a_zone_stay_unless_a_zone_is_given() -> None:
    column = pa.array([datetime(2025, 7, 1, 12)], pa.timestamp("ms"))
    assert convert_times(column, DEFAULT_TIME_FORMAT) is column
    assert convert_times(column, BERLIN).to_pylist() == [datetime(2025, 7, 1, 10, tzinfo=UTC)]
    with_zone = column.cast(pa.timestamp("ms", "UTC"))
    assert convert_times(with_zone, BERLIN) is with_zone
    numbers = pa.array([1.0])
    assert convert_times(numbers, BERLIN) is numbers
