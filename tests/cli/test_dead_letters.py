"""Tests of what `dead-letters` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from connectors.kafka import ReplayCounts
from connectors.kafka.dead_letters import DeadLetter, LetterTranslator, send_again
from deformer_stream.cli.dead_letters import (
    ReasonSummary,
    build_dead_letters,
    describe_counts,
    format_letter,
    summarize,
)
from deformer_stream.errors import ConfigError

SECOND = 1_000_000


def make_letter(reason: str, time: int = 0, **fields: Any) -> DeadLetter:
    """Return a dead letter that was rejected at a time in seconds since 1970."""
    values = {"detail": f"detail {time}", "topic": "events", "partition": 1, "offset": time, "sent_at": None}
    content = {"key": b"r1", "value": b"{", "is_complete": True}
    return DeadLetter(**{"time": time * SECOND, "reason": reason, **values, **content, **fields})


LETTERS = [make_letter("late", 5), make_letter("not_json", 1), make_letter("not_json", 9), make_letter("not_json", 4)]


def run(monkeypatch: pytest.MonkeyPatch, *words: str, letters: list[DeadLetter] | None = None) -> str:
    """Run the command on dead letters, which must succeed, and return what it prints."""
    monkeypatch.setattr("connectors.kafka.read_dead_letters", lambda cluster, topic: iter(letters or LETTERS))
    result = CliRunner().invoke(build_dead_letters(), [*words, "--topic", "events"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_letters_are_counted_by_reason() -> None:
    assert list(summarize(LETTERS).items()) == [
        ("not_json", ReasonSummary(3, 1 * SECOND, 9 * SECOND, "detail 9")),
        ("late", ReasonSummary(1, 5 * SECOND, 5 * SECOND, "detail 5")),
    ]
    assert summarize([]) == {}


def test_list_prints_a_line_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, "list").splitlines()
    assert lines[0].split() == ["count", "reason", "first", "last", "example"]
    assert lines[1].split() == ["3", "not_json", "1970-01-01T00:00:01Z", "1970-01-01T00:00:09Z", "detail", "9"]
    assert lines[2].split()[:2] == ["1", "late"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [5, 1, 9, 4]),
        (["--reason", "late"], [5]),
        (["--reason", "late,not_json", "--limit", "2"], [9, 4]),
        (["--since", "1970-01-01T00:00:05Z"], [5, 9]),
        (["--until", "1970-01-01T00:00:05Z"], [1, 4]),
        (["--since", "1970-01-01T00:00:02Z", "--until", "1970-01-01T00:00:09Z"], [5, 4]),
        (["--reason", "too_large"], []),
    ],
)
def test_letters_are_selected(options: list[str], expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(monkeypatch, "show", *options)
    assert [json.loads(line)["offset"] for line in output.splitlines()] == expected


def test_list_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "list", "--reason", "too_large") == "no dead letters\n"


def test_hostile_content_does_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = [
        make_letter("\x1b[2Jlate", detail="a\nb\x1b]0;title\x07\u202e", key=b"\xff\x1b", value=b"\x00\x7f\x1b[31m")
    ]
    for action in ("list", "show"):
        output = run(monkeypatch, action, letters=hostile)
        assert all(character.isprintable() or character == "\n" for character in output), action
        assert len(output.splitlines()) == (2 if action == "list" else 1)
    fields = json.loads(format_letter(hostile[0]))
    assert (fields["key"], fields["value"]) == ("\\xff\x1b", "\x00\x7f\x1b[31m")


def test_tombstones_are_null() -> None:
    fields = json.loads(format_letter(make_letter("not_json", key=None, value=None)))
    assert (fields["key"], fields["value"], fields["complete"]) == (None, None, True)


def test_time_that_is_not_valid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(build_dead_letters(), ["list", "--topic", "events", "--since", "yesterday"])
    assert "--since 'yesterday': this is not RFC 3339" in str(result.exception)


BRIDGE_LETTER = make_letter(
    "unknown_topic", 3, topic="plant/x", partition=None, offset=None, source="mqtt://broker", key=None
)


def test_letters_of_the_bridge_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [*LETTERS, BRIDGE_LETTER]
    assert "unknown_topic" in run(monkeypatch, "list", letters=letters)
    fields = json.loads(run(monkeypatch, "show", letters=letters).splitlines()[-1])
    assert (fields["source"], fields["topic"], fields["offset"]) == ("mqtt://broker", "plant/x", None)
    assert "source" not in json.loads(format_letter(LETTERS[0]))


def test_letters_of_the_bridge_are_translated_with_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = b'{"pattern":"plant/{device}/{feature}"}'
    letters = [replace(BRIDGE_LETTER, value=b"1.5", translation=pattern)]
    words = ("replay", "--dry-run", "--pattern", "{device}/{feature}")
    assert run(monkeypatch, *words, letters=letters) == "1 message would be sent again\n"
    partly = [*letters, replace(BRIDGE_LETTER, topic="alone")]
    text = run(monkeypatch, *words, letters=partly)
    assert text.startswith("1 message would be sent again; 1 message of the bridge is rejected again (unknown_topic: ")


@pytest.mark.parametrize(
    ("letter", "cause"),
    [
        (BRIDGE_LETTER, "1 message of the bridge is rejected again (not_json"),
        (replace(BRIDGE_LETTER, topic="spBv1.0/plant/NDATA/line"), "1 dead letter is a Sparkplug message, "),
        (make_letter("late", topic="other\x1b"), "1 dead letter names another topic than --topic (such as "),
    ],
)
def test_replay_that_can_send_nothing_fails(letter: DeadLetter, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.kafka.read_dead_letters", lambda cluster, topic: iter([letter]))
    result = CliRunner().invoke(build_dead_letters(), ["replay", "--topic", "events", "--dry-run"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"nothing was sent: {cause}")
    assert "\n" not in str(result.exception)


def test_pattern_that_is_not_valid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.kafka.read_dead_letters", lambda cluster, topic: iter([BRIDGE_LETTER]))
    words = ["replay", "--topic", "events", "--pattern", "a/{x}"]
    assert "--pattern" in str(CliRunner().invoke(build_dead_letters(), words).exception)


def test_counts_are_described() -> None:
    assert describe_counts(ReplayCounts(1204), is_dry_run=True) == "1,204 messages would be sent again"
    text = describe_counts(ReplayCounts(2, repeated=1, incomplete=3), is_dry_run=False)
    assert text.startswith("2 messages were sent again; 1 further dead letter is about the same message; 3 dead ")
    text = describe_counts(ReplayCounts(1, repeated=2, incomplete=1), is_dry_run=False)
    assert text.startswith(
        "1 message was sent again; 2 further dead letters are about the same messages; 1 dead letter "
    )
    assert "1 dead letter does not hold the message" in text
    assert "4 dead letters are Sparkplug" in describe_counts(ReplayCounts(2, sparkplug=4), is_dry_run=False)


def test_a_reason_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `replay` would send nothing, and say so as if there was nothing to send."""
    with pytest.raises(ConfigError, match=r"--reason unknown_modell: there is no such reason; .*unknown_model,"):
        run(monkeypatch, "replay", "--reason", "late,unknown_modell")


def test_a_topic_that_was_created_again_has_other_messages_at_the_same_offsets() -> None:
    letters = [make_letter("late", value=b'{"a": 1}'), make_letter("late", value=b'{"a": 2}')]
    letters += [make_letter("not_json", value=b'{"a": 2}')]  # a second reason of the same message
    no_cluster: Any = None  # nothing is sent
    counts = send_again(no_cluster, letters, LetterTranslator("events"), is_dry_run=True)
    assert (counts.sent, counts.repeated) == (2, 1)
