"""Tests of the dialect that is guessed for a CSV file."""

from __future__ import annotations

import pytest

from deformer_stream.errors import InputError
from deformer_stream.tables.csv_dialect import SAMPLE_BYTES, CsvDialect, CsvOptions, guess_dialect


def guess(text: str | bytes, encoding: str = "utf-8", options: CsvOptions | None = None) -> CsvDialect:
    """Return the dialect of a file with this content."""
    sample = text if isinstance(text, bytes) else text.encode(encoding)
    return guess_dialect(sample, options or CsvOptions(), "pumps.csv")


@pytest.mark.parametrize(
    ("text", "delimiter", "decimal"),
    [
        ("a,b\n1,2.5\n", ",", "."),
        ("a;b\n1,5;2\n2,5;3\n", ";", ","),
        ("a\tb\n1.5\t2\n", "\t", "."),
        ("a|b\n1|2\n", "|", None),
        ("a\n1\n2\n", ",", None),  # a single column
        ("a,b\n", ",", None),  # only a header
        ('"a,1","b"\n"1,5","2"\n"2,5","3"\n', ",", ","),  # quoted cells
        ("t;flow, m3/h;x\n1;1,5;2\n2;2,5;3\n", ";", ","),  # a comma in each line
        ("time;speed;flow\n1;1.234,5;60\n2;Bad;59,1\n", ";", ","),
        ("sep=;\na;b\n1;2\n", ";", None),  # as Excel expects it
        ("flow;power\n" + "10,12;20,31\n" * 9, ";", ","),  # a comma in each number, but not in the header
        ("Plant 7, hall 2\nflow;power\n" + "10,12;20,31\n" * 9, ";", ","),
        ("Export, line 3\nState, 2024\ntime;p;T\n" + "01.01.2024 10:00;1,5;5\n" * 9, ";", ","),
        ("level, m;flow, m3/h\n" + "100,5;2,5\n" * 9, ";", ","),  # as many commas in the header
        ("a,b;c;d, e\n" + "P-1;on;1,5\n" * 9, ";", ","),
        ("id,tags,flow\n" + "1,a;b;c,2.5\n" * 9, ",", "."),
        ("flow\tpower\nbar\tkW\n" + "10,12\t20,31\n" * 9, "\t", ","),
    ],
)
def test_delimiter_and_decimal_character_are_recognised(text: str, delimiter: str, decimal: str | None) -> None:
    dialect = guess(text)
    assert (dialect.delimiter, dialect.decimal, dialect.has_header) == (delimiter, decimal, True)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("cp1252", "cp1252"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
    ],
)
def test_encoding_is_recognised(encoding: str, expected: str) -> None:
    dialect = guess("Durchfluß;Druck\n1;2\n3;4\n", encoding)
    assert (dialect.encoding, dialect.column_names) == (expected, ("Durchfluß", "Druck"))


def test_a_character_that_the_sample_cuts_is_no_reason_against_utf8() -> None:
    text = ("a;b\n" + "1;ß\n" * SAMPLE_BYTES).encode()
    for size in range(SAMPLE_BYTES, SAMPLE_BYTES + 5):
        start = size - SAMPLE_BYTES  # moves the end of the sample by a byte
        assert guess(b" " * start + text[: SAMPLE_BYTES - start]).encoding == "utf-8"


@pytest.mark.parametrize(
    ("text", "has_header"),
    [
        ("1.5,2\n3,4\n", False),
        ("2025-01-01 00:00,1.5,on\n2025-01-01 00:01,1.6,on\n", False),
        ("on,off\noff,on\n", True),  # texts everywhere: names are more likely
        ("0,1,2\n3,4,5\n", True),  # names that count, as pandas writes them
        ("time,10,20\n2025-01-01,1,2\n", True),  # names of sensors that are numbers
        (",a,b\n0,1,2\n", True),
        ("a,b\nBad,Bad\n1,2\n", True),
    ],
)
def test_a_first_line_of_values_is_no_header(text: str, has_header: bool) -> None:
    dialect = guess(text)
    assert dialect.has_header is has_header
    if not has_header:
        assert dialect.column_names == tuple(f"column_{i}" for i in range(1, len(dialect.column_names) + 1))


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("time,speed,flow\n,rpm,m³/h\n2025-01-01,1,2\n2025-01-02,1,2\n", ("", "rpm", "m³/h")),
        ("time,speed,mode\ns,rpm,-\n1,2,on\n2,2,off\n", ("s", "rpm", "-")),
        ("speed,flow\nBad,Bad\n1,2\n", ()),  # cells without a value
        ("mode,speed\nnormal,\noff,2\nnormal,3\n", ()),  # a label that occurs again
        ("mode,state\non,off\noff,on\n", ()),  # no column of numbers
        ("time,speed\n2025-01-01,rpm\n2025-01-02,2\n", ()),  # a row with a time is a row of values
    ],
)
def test_a_second_line_with_units_is_recognised(text: str, units: tuple[str, ...]) -> None:
    dialect = guess(text)
    assert (dialect.units, dialect.has_units_row) == (units, bool(units))


def test_titles_and_comments_before_the_header_are_skipped() -> None:
    dialect = guess("Export of plant 7\n\n# made by X, Y\ntime\ta\tb\n1\t2\t3\n2\t2\t3\n")
    assert (dialect.num_skipped_lines, dialect.column_names) == (3, ("time", "a", "b"))
    assert guess("Export;;\na;b;c\n1;2;3\n").num_skipped_lines == 1
    assert guess(",a\n0,1\n1,2\n").num_skipped_lines == 0  # a column without a name
    assert guess("a\nx\ny\n").num_skipped_lines == 0  # a table with a single column has no title


def test_only_line_ends_end_lines() -> None:
    assert guess("a\u2028x;b\r\n1;2\r\n").column_names == ("a\u2028x", "b")
    assert guess("a;b\r1;2\r").column_names == ("a", "b")


def test_options_are_not_guessed() -> None:
    options = CsvOptions(delimiter=";", decimal=".", encoding="cp1252", has_header=False)
    dialect = guess("a,1;b\n1,5;2\n", options=options)
    assert (dialect.delimiter, dialect.decimal, dialect.encoding) == (";", ".", "cp1252")
    assert dialect.column_names == ("column_1", "column_2")


def test_dialect_is_described_in_one_line() -> None:
    text = "Druck;Durchfluß\nbar;m³/h\n59,1;2\n60,5;3\n"
    assert guess(text, "cp1252").describe() == (
        "delimiter ';', decimal comma, encoding cp1252, header in line 1, units in line 2"
    )
    assert guess("1.5,2\n3,4\n").describe() == (
        "delimiter comma, decimal point, encoding utf-8, no header, the columns are column_1 to column_2"
    )


@pytest.mark.parametrize(
    ("content", "words", "options"),
    [
        (b"", "it is empty, but the first line must be a header", CsvOptions()),
        (b"\n \n", "only empty lines", CsvOptions()),
        (b"\xff\xfe1", "--encoding", CsvOptions(encoding="utf-8")),
    ],
)
def test_files_without_a_dialect_are_refused(content: bytes, words: str, options: CsvOptions) -> None:
    with pytest.raises(InputError, match=r"pumps\.csv") as caught:
        guess(content, options=options)
    assert words in str(caught.value)
