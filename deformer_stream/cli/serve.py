"""The command `serve`, which shows incidents in a browser.

Heavy packages are imported inside the command, so that `--help` is printed without delay. PyTorch is not needed.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import registry_clients
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, stop_on_signals
from deformer_stream.extras import format_remedy, is_installed

if TYPE_CHECKING:
    from deformer_stream.page.app import Page
    from deformer_stream.settings.incident_commands import ServeSettings

PAGE_PACKAGES = ("itsdangerous", "sse_starlette", "starlette", "uvicorn")
"""The packages of the extra `page`."""


def build_serve() -> click.Command:
    """Return the command `serve`, which shows incidents in a browser."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.incident_commands import ServeSettings

    @click.command("serve", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["serve"], context_settings=HELP)
    @click.option(
        "--hash", "only_hash", is_flag=True, help="Ask for a password, print its hash for --users-file, and exit."
    )
    @add_options(ServeSettings)
    @add_debug_option
    def serve(config: Path | None, only_hash: bool, **flags: Any) -> None:
        """Show incidents in a browser, live, with buttons for labels.

        The page reads TOPIC-incidents, and writes labels to TOPIC-feedback. It listens on this machine only, unless
        --token-file or --users-file states who may log in. SIGINT and SIGTERM end it.
        """
        check_page_packages()
        if only_hash:
            print_hash()
            return
        stop = stop_on_signals()
        settings = load_settings(ServeSettings, flags, config, "serve")
        from deformer_stream import log
        from deformer_stream.page.app import Page, PageOptions
        from deformer_stream.page.server import PageServer, bind
        from deformer_stream.page.store import IncidentStore

        log.configure(is_debugging())
        host, port, page_options = _make_options(settings)
        with ExitStack() as cleanup:
            listener = bind(host, port)
            cleanup.callback(listener.close)
            connections = cleanup.enter_context(ExitStack())  # closed after the server
            page = Page(PageOptions(**page_options), IncidentStore())
            server = PageServer(page, listener)
            server.start()  # before a connection is made, which can wait for the end of an outage
            cleanup.callback(server.stop)
            _connect(settings, page, stop, connections)
            log.get_logger("page").info("ready", url=server.url, topic=settings.topic)
            while not stop.wait(1.0) and server.is_running:
                pass
        log.get_logger("page").info("stopped")

    return serve


def check_page_packages() -> None:
    """Raise `ConfigError` if the packages of the page are not installed."""
    from deformer_stream.errors import ConfigError

    missing = [name for name in PAGE_PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"the operator's page needs packages that are not installed ({', '.join(missing)}): {format_remedy('page')}"
        )


def print_hash() -> None:
    """Read a password from the terminal or from standard input, and print its hash.

    Raises:
        ConfigError: The password is empty.
    """
    from deformer_stream.errors import ConfigError
    from deformer_stream.page.security import hash_password

    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise ConfigError("the password is empty: enter one, or send it as a line to standard input")
    click.echo(hash_password(password))


def _make_options(settings: ServeSettings) -> tuple[str, int, dict[str, Any]]:
    """Return the host, the port and the other options of the page.

    Raises:
        ConfigError: The address can be reached by other machines, and nobody has to log in; or a file is not usable.
    """
    import getpass
    from urllib.parse import urlsplit
    from zoneinfo import ZoneInfo

    from deformer_stream.errors import ConfigError
    from deformer_stream.page.security import check_address, read_credentials
    from deformer_stream.runtime.http_server import parse_address

    host, port = parse_address(settings.http)
    credentials = read_credentials(settings.token_file, settings.users_file)
    check_address(host, credentials)
    try:
        external = urlsplit(settings.external_url or "http://localhost")
        is_address = external.scheme in ("http", "https") and bool(external.hostname)
    except ValueError:  # such as a bracket without its pair
        is_address = False
    if not is_address:
        raise ConfigError(
            f"--external-url {settings.external_url!r} is not an address: write one such as https://plant.example"
        )
    try:
        operator = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        operator = ""
    return (
        host,
        port,
        {
            "topic": settings.topic,
            "host": host,
            "port": port,
            "credentials": credentials,
            "external_url": settings.external_url,
            "trusted_proxies": settings.trusted_proxy,
            "operator": operator,
            "zone": ZoneInfo(settings.timezone) if settings.timezone else None,
            "model": settings.model,
            "metrics_urls": settings.metrics,
        },
    )


def _connect(settings: ServeSettings, page: Page, stop: threading.Event, cleanup: ExitStack) -> None:
    """Connect a page to its topics, and begin to read them.

    Args:
        settings: Options of the command.
        page: The page, which shows meanwhile that it is not connected.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the connections are added.

    Raises:
        ConfigError: This user may not read a topic.
        Unavailable: No broker responds.
    """
    from connectors.kafka import (
        KafkaFeedbackLog,
        KafkaIncidentLog,
        KafkaNextReadingLog,
        describe_incident_topics,
        ensure_topics,
    )
    from deformer_stream.cli.kafka_cluster import connect_with_retries, make_cluster
    from deformer_stream.page.followers import follow_logs
    from deformer_stream.page.security import is_loopback
    from deformer_stream.settings.topics import name_topic

    cluster = make_cluster(settings)
    registry = registry_clients.open_registry(settings, registry_clients.REGISTRY_PATIENCE, cleanup, stop=stop)
    reader = registry_clients.make_output_reader(registry)
    incidents_topic = name_topic(settings.incidents_topic, settings.topic, "incidents")
    feedback_topic = name_topic(settings.feedback_topic, settings.topic, "feedback")
    next_readings_topic = name_topic(settings.next_readings_topic, settings.topic, "next-readings")

    def connect(attempt: ExitStack) -> tuple[KafkaIncidentLog, KafkaFeedbackLog]:
        """Connect to the brokers; the connections are closed if that fails."""
        ensure_topics(cluster, describe_incident_topics(incidents_topic, feedback_topic))
        incident_log = KafkaIncidentLog(cluster, incidents_topic, reader)
        attempt.callback(incident_log.close)
        feedback_log = KafkaFeedbackLog(cluster, feedback_topic)
        attempt.callback(feedback_log.close)
        return incident_log, feedback_log

    # A page that other machines can reach is supervised. A person at a terminal sees an error at once.
    patience = None if is_loopback(page.options.host) else settings.patience
    incident_log, feedback_log = connect_with_retries(connect, patience, stop, lambda: None, cleanup)
    next_reading_log = KafkaNextReadingLog(cluster, next_readings_topic, reader)
    cleanup.callback(next_reading_log.close)
    page.followers = follow_logs(page.store, incident_log, feedback_log, next_reading_log)
    for follower in page.followers:
        cleanup.callback(follower.stop)
    page.feedback_log = feedback_log
