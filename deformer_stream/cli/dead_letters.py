"""The command `dead-letters`, which lists and shows messages that were rejected, and sends them again.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, parse_span
from deformer_stream.counts import format_count

if TYPE_CHECKING:
    from connectors.kafka import DeadLetter, KafkaCluster, ReplayCounts
    from deformer_stream.settings.commands import DeadLettersSettings

Action = Literal["list", "show", "replay"]


@dataclass(slots=True)
class ReasonSummary:
    """The dead letters with one reason.

    Attributes:
        count: Their number.
        first: When the first one was rejected, microseconds since 1970.
        last: When the last one was rejected, microseconds since 1970.
        example: The detail of the last one.
    """

    count: int
    first: int
    last: int
    example: str


def build_dead_letters() -> click.Command:
    """Return the command `dead-letters`."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.commands import DeadLettersSettings

    name = "dead-letters"

    @click.command(name, cls=HelpCommand, examples=EXAMPLES_BY_COMMAND[name], context_settings=HELP)
    @click.argument("action", type=click.Choice(["list", "show", "replay"]))
    @add_options(DeadLettersSettings)
    @add_debug_option
    def dead_letters(action: Action, config: Path | None, **flags: Any) -> int:
        """Look at messages that consume or bridge has rejected, and send them again after a repair.

        list counts them by reason. show prints the latest ones as JSON lines. replay sends each message of --topic
        again, with its key and its time, to the partition from which it was read. What is rejected again becomes a new
        dead letter.
        Sending twice does no harm while the record is open, because consume rejects readings that it has already.
        Dead letters of bridge are in TOPIC-bridge-dead-letter (--dead-letter-topic). replay translates their messages
        to events as the bridge did, but for the options that are given here, such as --pattern. Messages of Sparkplug
        are not sent.
        """
        settings = load_settings(DeadLettersSettings, flags, config, name)
        from deformer_stream import log

        log.configure(is_debugging())
        from deformer_stream.cli.kafka_cluster import make_cluster

        cluster = make_cluster(settings)
        letters = _read(settings, cluster)
        if action == "list":
            _print_summaries(summarize(letters))
        elif action == "show":
            for letter in deque(letters, maxlen=settings.limit):
                click.echo(format_letter(letter))
        else:
            _replay(settings, cluster, letters)
        return 0

    return dead_letters


def _read(settings: DeadLettersSettings, cluster: KafkaCluster) -> Iterator[DeadLetter]:
    """Return the dead letters that the options select. The options are checked at once, before a connection is made.

    Raises:
        ConfigError: A time is not valid, there is no such reason, or this user may not read the topic.
        Unavailable: The topic cannot be read.
    """
    from connectors.kafka import read_dead_letters
    from deformer_stream.engine.events import RejectionReason
    from deformer_stream.errors import ConfigError
    from deformer_stream.settings.topics import name_topic

    since, until = parse_span(settings.since, settings.until)
    topic = name_topic(settings.dead_letter_topic, settings.topic, "dead-letter")
    reasons, known = set(settings.reason), [reason.value for reason in RejectionReason]
    if unknown := sorted(reasons.difference(known)):
        raise ConfigError(f"--reason {unknown[0]}: there is no such reason; choose {', '.join(known)}")
    return (
        letter
        for letter in read_dead_letters(cluster, topic)
        if (since is None or letter.time >= since)
        and (until is None or letter.time < until)
        and (not reasons or letter.reason in reasons)
    )


def summarize(letters: Iterable[DeadLetter]) -> dict[str, ReasonSummary]:
    """Return a summary of the dead letters with each reason, the most frequent reason first."""
    summaries: dict[str, ReasonSummary] = {}
    for letter in letters:
        summary = summaries.setdefault(letter.reason, ReasonSummary(0, letter.time, letter.time, ""))
        summary.count += 1
        summary.first = min(summary.first, letter.time)
        if letter.time >= summary.last:
            summary.last, summary.example = letter.time, letter.detail
    return dict(sorted(summaries.items(), key=lambda item: (-item[1].count, item[0])))


def _print_summaries(summaries: dict[str, ReasonSummary]) -> None:
    """Print a table with a line for each reason."""
    from deformer_stream.codec.alert_text import make_printable
    from deformer_stream.codec.timestamps import format_rfc3339

    if not summaries:
        click.echo("no dead letters")
        return
    width = max(len(make_printable(reason)) for reason in summaries)
    click.echo(f"{'count':>10}  {'reason':<{width}}  {'first':<27}  {'last':<27}  example")
    for reason, summary in summaries.items():
        first, last = (format_rfc3339(time) or "" for time in (summary.first, summary.last))
        name, example = make_printable(reason), make_printable(summary.example)
        click.echo(f"{summary.count:>10,}  {name:<{width}}  {first:<27}  {last:<27}  {example}")


def format_letter(letter: DeadLetter) -> str:
    """Return a dead letter as one line of JSON.

    The key and the value are text; bytes that are not UTF-8 are written as backslash escapes. Characters that could
    change what a terminal shows are escaped.
    """
    import json

    from deformer_stream.codec.timestamps import format_rfc3339

    def decode(content: bytes | None) -> str | None:
        return None if content is None else content.decode("utf-8", "backslashreplace")

    fields = {
        "time": format_rfc3339(letter.time),
        "reason": letter.reason,
        "detail": letter.detail,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        **({} if letter.source is None else {"source": letter.source}),
        "key": decode(letter.key),
        "value": decode(letter.value),
        "complete": letter.is_complete,
    }
    return json.dumps(fields).replace("\x7f", "\\u007f")  # the only control character that `json` leaves as it is


def _replay(settings: DeadLettersSettings, cluster: KafkaCluster, letters: Iterable[DeadLetter]) -> None:
    """Send the messages of dead letters again, and print how many.

    Raises:
        ConfigError: The brokers refuse a message, --pattern is not valid, or no message of the bridge can be sent.
        Unavailable: A topic does not exist, no broker responds, or a message is not acknowledged in time.
    """
    from connectors.kafka import LetterTranslator, send_again

    def report(num_sent: int) -> None:
        click.echo(f"{format_count(num_sent, 'message')} sent", err=True)

    translator = LetterTranslator(settings.topic, settings.get_translation(only_given=True))
    counts = send_again(cluster, letters, translator, settings.to, settings.dry_run, report)
    problems = describe_problems(counts)
    if problems and not counts.sent:
        from deformer_stream.errors import ConfigError

        raise ConfigError(f"nothing was sent: {'; '.join(problems)}")
    click.echo(describe_counts(counts, settings.dry_run))


def describe_counts(counts: ReplayCounts, is_dry_run: bool) -> str:
    """Return one line that says what was sent, and what was left out and why."""
    sent = "would be sent" if is_dry_run else _choose_verb(counts.sent, "was sent", "were sent")
    text = f"{format_count(counts.sent, 'message')} {sent} again"
    if counts.repeated:
        about = _choose_verb(counts.repeated, "is about the same message", "are about the same messages")
        text += f"; {format_count(counts.repeated, 'further dead letter')} {about}"
    if counts.incomplete:
        verb = _choose_verb(counts.incomplete, "does", "do")
        text += (
            f"; {format_count(counts.incomplete, 'dead letter')} {verb} not hold the message, which was too large: "
            "read it at the topic, partition and offset that `dead-letters show` prints"
        )
    return "; ".join([text, *describe_problems(counts)])


def _choose_verb(count: int, singular: str, plural: str) -> str:
    """Return the verb that belongs to a count."""
    return singular if count == 1 else plural


def describe_problems(counts: ReplayCounts) -> list[str]:
    """Return clauses that say why messages were not sent, and what to do."""
    from deformer_stream.codec.alert_text import make_printable

    clauses = []
    if counts.foreign:
        verb = _choose_verb(counts.foreign, "names", "name")
        clauses.append(
            f"{format_count(counts.foreign, 'dead letter')} {verb} another topic than --topic (such as "
            f"{make_printable(counts.foreign_topic)!r}), and a forged letter can name any: if it is a topic of events, "
            "give it as --topic, with --dead-letter-topic; or send all messages to one topic with --to"
        )
    if counts.untranslated:
        verb = _choose_verb(counts.untranslated, "is", "are")
        clauses.append(
            f"{format_count(counts.untranslated, 'message')} of the bridge {verb} rejected again "
            f"({make_printable(counts.example)}): correct the options, such as --pattern"
        )
    if counts.sparkplug:
        kind = _choose_verb(counts.sparkplug, "is a Sparkplug message", "are Sparkplug messages")
        clauses.append(
            f"{format_count(counts.sparkplug, 'dead letter')} {kind}, which only the bridge can translate, because "
            "that needs the births of the edge node: let the node publish its birth again"
        )
    return clauses
