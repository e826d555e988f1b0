"""The web application of the operator's page: routes, forms and sessions.

Every address gives a whole page that works without JavaScript. With it, htmx requests the same address again when the
server has sent a notice, and replaces the parts that have changed. So there is one rendering of each page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from deformer_stream import log
from deformer_stream.codec.feedback_messages import MAX_NAME_CHARS, MAX_NOTE_CHARS, add_id
from deformer_stream.codec.validation import MAX_TEXT_CHARS
from deformer_stream.errors import InputError, Unavailable
from deformer_stream.feedback_labels import LABELS, Label
from deformer_stream.incidents.device import WHOLE_STREAM
from deformer_stream.incidents.events import FeedbackLabel
from deformer_stream.incidents.overlay import choose_seen_members
from deformer_stream.page import views
from deformer_stream.page.followers import LogFollower
from deformer_stream.page.live import ChangeNotifier
from deformer_stream.page.security import (
    MAX_BODY_BYTES,
    BodyTooLargeError,
    Credentials,
    LoginLimiter,
    SecurityMiddleware,
    Session,
    SessionSigner,
    list_allowed_hosts,
)
from deformer_stream.page.store import IncidentStore, ShownIncident
from deformer_stream.page.system_state import SystemState
from deformer_stream.page.texts import Clock
from deformer_stream.page.views import Notice
from deformer_stream.runtime.incident_ports import FeedbackLog

MAX_PASSWORD_CHECKS = 2
"""Maximum number of passwords that are checked at the same time. Each check takes 32 MiB of memory and a core."""
BODY_SECONDS = 30.0
"""Time within which a form must arrive."""
STATIC_SECONDS = 365 * 24 * 3600
"""Time for which browsers keep static files. Their address contains a digest, so a new release is loaded at once."""
CONTENT_TYPE_BY_SUFFIX = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}

NOT_CONNECTED = "The brokers of Kafka have not responded yet"
"""Beginning of the messages before Kafka is connected."""

LOGGER = log.get_logger("page")


@dataclass(frozen=True, slots=True)
class PageOptions:
    """What the page shows, and who may see it.

    Attributes:
        topic: Name of the stream, shown in the head of the page.
        host: Host on which the page listens.
        port: Port on which the page listens.
        credentials: Who may log in.
        external_url: Address under which people reach the page, None if they connect directly.
        trusted_proxies: Addresses and networks of proxies, whose header `X-Forwarded-For` states the client.
        operator: Name that labels get if nobody logs in.
        zone: Time zone of the page, None for that of this machine.
        model: Model directory, None if it is not known.
        metrics_urls: Addresses of the metrics of `consume` and `incidents`.
    """

    topic: str
    host: str = "127.0.0.1"
    port: int = 8080
    credentials: Credentials = field(default_factory=Credentials)
    external_url: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    operator: str = ""
    zone: tzinfo | None = None
    model: Path | None = None
    metrics_urls: tuple[str, ...] = ()


class LoginNeededError(Exception):
    """A request without a session, if a login is required."""


@dataclass
class Page:
    """The parts of the application that its routes use.

    Attributes:
        options: What the page shows, and who may see it.
        store: The incidents and labels.
        feedback_log: The log to which labels are appended, None before Kafka is connected.
        followers: The readers of the logs, whose failures are shown.
        get_notice: Returns a message for the top of all pages, or None.
    """

    options: PageOptions
    store: IncidentStore
    feedback_log: FeedbackLog | None = None
    followers: tuple[LogFollower, ...] = ()
    get_notice: Callable[[], Notice | None] = lambda: None

    def __post_init__(self) -> None:
        external = urlsplit(self.options.external_url or "")
        self.prefix = external.path.rstrip("/")
        # A browser sends cookies to all ports of a host, so the port is a part of the name.
        cookie_name = f"deformer_page_{self.options.port}"
        self.signer = SessionSigner(cookie_name, external.scheme == "https", f"{self.prefix}/")
        self.limiter = LoginLimiter()
        self._has_warned_of_proxy = False
        self._password_checks = asyncio.Semaphore(MAX_PASSWORD_CHECKS)
        self.notifier = ChangeNotifier(self.store)
        self.open_rows = views.OpenRows(self.store)
        self.system_state = SystemState(self.options.model, self.options.metrics_urls, self.store)
        # Without a login everybody who can connect has the same rights, so all have the same session.
        self._shared_session = Session("shared", self.options.operator)

    def get_session(self, request: Request) -> Session:
        """Return the session of a request.

        Raises:
            LoginNeededError: A login is required, and the request has no session.
        """
        if not self.options.credentials.is_required:
            return self._shared_session
        session = self.signer.read(request)
        if session is None:
            raise LoginNeededError
        return session

    def respond(
        self,
        request: Request,
        template: str,
        context: Mapping[str, Any],
        status: int = 200,
        session: Session | None = None,
    ) -> HTMLResponse:
        """Return a page as the answer to a request.

        Args:
            request: The request.
            template: Name of the template.
            context: The content of the page.
            status: Status code.
            session: The session, None for a page that needs none.
        """
        response = HTMLResponse(views.render(template, {**self.make_base_context(request, session), **context}), status)
        if session is not None and self.options.credentials.is_required:
            self.signer.write(response.headers, session)  # with a new time, so that an open page stays logged in
        return response

    def make_base_context(self, request: Request, session: Session | None) -> dict[str, Any]:
        """Return what all pages show."""
        token = self.notifier.make_token()
        clock = self.make_clock()
        return {
            "topic": self.options.topic,
            "page_path": request.url.path,
            "clock": clock,
            "url": self.make_url,
            "static": self.make_static_url,
            "token": token,
            "session": session,
            "has_login": self.options.credentials.is_required,
            "form_token": "" if session is None else self.signer.make_form_token(session),
            "num_to_see": len(self.open_rows.get()[0]) if session is not None else 0,
            "notice": self._choose_notice() if session is not None else None,
            "logs": [follower.status for follower in self.followers] if session is not None else [],
            "last_change": self.store.last_change,
        }

    def _choose_notice(self) -> Notice | None:
        """Return the message for the top of all pages, or None."""
        if self.feedback_log is None:
            return Notice(f"{NOT_CONNECTED}, so no incidents are shown.", is_warning=True)
        return self.get_notice()

    def _append_label(self, label: FeedbackLabel) -> None:
        """Append a label to its log.

        Raises:
            Unavailable: It could not be stored.
        """
        if self.feedback_log is None:
            raise Unavailable(f"{NOT_CONNECTED}: try again later")
        self.feedback_log.append(label)

    def make_clock(self) -> Clock:
        """Return the present time in the time zone of the page."""
        return Clock(self.store.now(), self.options.zone)

    def make_url(self, path: str, query: str = "") -> str:
        """Return the address of a page within this server."""
        return f"{self.prefix}{path}{'?' if query else ''}{query}"

    def make_static_url(self, name: str) -> str:
        """Return the address of a static file, which contains a digest of its content."""
        digest, _ = views.read_static_files()[name]
        return f"{self.prefix}/static/{digest}/{name}"

    # Pages

    def show_open(self, request: Request) -> Response:
        """Show the open incidents."""
        session = self.get_session(request)
        token = self.notifier.make_token()  # before the store is read, so that no change is missed
        return self.respond(
            request,
            "open.html",
            {**views.make_open_context(self.store, self.open_rows), "token": token},
            session=session,
        )

    def show_incident(self, request: Request) -> Response:
        """Show one incident."""
        return self._respond_incident(request, self.get_session(request))

    def _respond_incident(
        self,
        request: Request,
        session: Session,
        status: int = 200,
        error: str = "",
        entered: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the page of an incident, with an error of its form and what was entered there."""
        token = self.notifier.make_token()
        shown = self._find_incident(request)
        context = {
            **views.make_incident_context(self.store, shown, self.make_clock()),
            "token": token,
            "error": error,
            "entered": {"name": "", "note": "", **(entered or {})},
            "max_name": MAX_NAME_CHARS,
            "max_note": MAX_NOTE_CHARS,
        }
        return self.respond(request, "incident.html", context, status, session)

    def _find_incident(self, request: Request) -> ShownIncident:
        """Return the incident that the address of a request names.

        Raises:
            HTTPException: It is not stored.
        """
        shown = self.store.get(request.path_params["incident_id"])
        if shown is None:
            raise HTTPException(404, "This incident is not known here. It may have been dropped because it is old.")
        return shown

    def show_history(self, request: Request) -> Response:
        """Show all incidents, with a filter."""
        session = self.get_session(request)
        token = self.notifier.make_token()
        entered, wanted = views.parse_history_query(request.query_params, self.make_clock())
        result = self.store.search(wanted, entered.page, views.PAGE_SIZE)
        context = {
            "query": entered,
            "result": result,
            "devices": self.store.list_devices()[: views.MAX_OFFERED_DEVICES],
            "num_dropped": self.store.num_dropped,
            "token": token,
            "live_url": self.make_url("/history", entered.to_url(result.page)),
        }
        return self.respond(request, "history.html", context, session=session)

    def show_state(self, request: Request) -> Response:
        """Show the state of the system: logs, model, calibration, budget and processes."""
        session = self.get_session(request)
        context = {**self.system_state.describe(self.make_clock()), **views.count_open(self.open_rows)}
        return self.respond(request, "state.html", context, session=session)

    def show_status(self, request: Request) -> Response:
        """Show only the parts that all pages have, for pages that do not update themselves otherwise."""
        return self.respond(request, "status.html", {}, session=self.get_session(request))

    # Labels

    async def add_label(self, request: Request) -> Response:
        """Store the label of an incident that a person has given, and show the incident again."""
        session = self.get_session(request)
        form = await _read_form(request)
        entered = {"name": form.get("name", "").strip(), "note": form.get("note", "").strip()}

        def make() -> FeedbackLabel:
            incident, label = self._find_incident(request).incident, _read_label(form)
            return FeedbackLabel(
                label,
                self.store.choose_label_time(incident=incident.id),
                by=session.user,
                incident=incident.id,
                name=entered["name"] if label == "true" else None,
                note=entered["note"],
                severity=_read_count(form, "severity", incident.severity),
                num_reopened=_read_count(form, "reopened", incident.num_reopened),
                members=None
                if label == "cleared"
                else choose_seen_members(incident, _read_count(form, "members", len(incident.members))),
            )

        path = f"/incidents/{quote(request.path_params['incident_id'])}"
        return await self._store_label(request, session, form, entered, make, self._respond_incident, path)

    async def _store_label(
        self,
        request: Request,
        session: Session,
        form: Mapping[str, str],
        entered: Mapping[str, str],
        make: Callable[[], FeedbackLabel],
        respond: Callable[[Request, Session, int, str, Mapping[str, str]], Response],
        path: str,
    ) -> Response:
        """Store a label that a person has given with a form, and send the browser to the page that shows it.

        Args:
            request: The request.
            session: Its session.
            form: The fields of the form.
            entered: What was entered, which an answer with an error shows again.
            make: Returns the label without an id. It raises `InputError` if what was entered is not valid.
            respond: Returns the page with the form: from the request, the session, a status, an error and `entered`.
            path: The page that shows the label.
        """

        async def respond_error(status: int, text: str) -> Response:
            """Return the page with an error, and with what was entered."""
            return await run_in_threadpool(respond, request, session, status, text, entered)

        if not self.signer.check_form_token(session, form.get("token", "")):
            return await respond_error(403, "The page was too old, and nothing was stored. Press the button again.")
        try:
            made = await run_in_threadpool(lambda: add_id(make()))
        except InputError as error:
            return await respond_error(400, f"Nothing was stored: {error}")
        subject = {"incident": made.incident, "record": made.record, "device": made.device}
        subject = {kind: name for kind, name in subject.items() if name is not None}
        try:
            await run_in_threadpool(self._append_label, made)
        except Unavailable as error:
            LOGGER.warning("label_not_stored", **subject, error=str(error))
            return await respond_error(503, f"Nothing was stored: {error}")
        await run_in_threadpool(self.store.add_labels, [made])  # so that the next page shows it at once
        LOGGER.info("label_stored", **subject, label=made.label, by=session.user)
        return RedirectResponse(self.make_url(path), 303)

    # Labels of records

    def show_records(self, request: Request) -> Response:
        """Show the labels of single records, and the form for a new one."""
        return self._respond_records(request, self.get_session(request))

    def _respond_records(
        self,
        request: Request,
        session: Session,
        status: int = 200,
        error: str = "",
        entered: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the page of labels of records, with an error of its form and what was entered there."""
        token = self.notifier.make_token()
        context = {
            **views.make_records_context(self.store),
            "token": token,
            "error": error,
            "entered": {"record": request.query_params.get("record", ""), "name": "", "note": "", **(entered or {})},
            "max_record": MAX_TEXT_CHARS,
            "max_name": MAX_NAME_CHARS,
            "max_note": MAX_NOTE_CHARS,
        }
        return self.respond(request, "records.html", context, status, session)

    async def add_record_label(self, request: Request) -> Response:
        """Store the label of a record that a person has given, and show the labels again."""
        session = self.get_session(request)
        form = await _read_form(request)
        entered = {name: form.get(name, "").strip() for name in ("record", "name", "note")}

        def make() -> FeedbackLabel:
            label, record = _read_label(form), entered["record"]
            if not record:
                raise InputError("name the record")
            return FeedbackLabel(
                label,
                self.store.choose_label_time(record=record),
                by=session.user,
                record=record,
                name=entered["name"] if label == "true" else None,
                note=entered["note"],
            )

        return await self._store_label(request, session, form, entered, make, self._respond_records, "/records")

    # Maintenance windows

    def show_maintenance(self, request: Request) -> Response:
        """Show the maintenance windows of devices, and the form for a new one."""
        session = self.get_session(request)
        entered = {"device": request.query_params.get("device", "").strip()[:MAX_TEXT_CHARS]}
        return self._respond_maintenance(request, session, entered=entered)

    def _respond_maintenance(
        self,
        request: Request,
        session: Session,
        status: int = 200,
        error: str = "",
        entered: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the page of maintenance windows, with an error of its form and what was entered there."""
        token = self.notifier.make_token()
        context = {
            **views.make_maintenance_context(self.store, self.make_clock()),
            "token": token,
            "error": error,
            "entered": {"device": "", "from": "", "to": "", "note": "", **(entered or {})},
            "max_device": MAX_TEXT_CHARS,
            "max_note": MAX_NOTE_CHARS,
        }
        return self.respond(request, "maintenance.html", context, status, session)

    async def add_window(self, request: Request) -> Response:
        """Store a maintenance window that a person has entered, or take one back, and show the windows again."""
        session = self.get_session(request)
        form = await _read_form(request)
        entered = {name: form.get(name, "").strip() for name in ("device", "from", "to", "note")}

        def make() -> FeedbackLabel:
            window = form.get("window")
            return self._take_window_back(window, session) if window else self._make_window(entered, session)

        return await self._store_label(request, session, form, entered, make, self._respond_maintenance, "/maintenance")

    def _make_window(self, entered: Mapping[str, str], session: Session) -> FeedbackLabel:
        """Return the label, without an id, of the maintenance window that a person has entered.

        Raises:
            InputError: The device or a time is missing or not valid.
        """
        device = entered["device"]
        if not device and WHOLE_STREAM not in self.store.list_devices():
            raise InputError("name the device")
        times = []
        for name, text in (("beginning", entered["from"]), ("end", entered["to"])):
            try:
                times.append(views.parse_local_time(text, self.make_clock()))
            except (ValueError, OverflowError):
                raise InputError(f"the {name} was not understood: write 2026-11-23T22:00") from None
        return self._make_window_label("maintenance", session, device, times[0], times[1], entered["note"])

    def _take_window_back(self, window_id: str, session: Session) -> FeedbackLabel:
        """Return the label, without an id, that takes a maintenance window back.

        Raises:
            InputError: The window is not stored.
        """
        found = next((one.window for one in self.store.list_windows() if one.window.id == window_id), None)
        if found is None or found.device is None or found.start is None or found.end is None:
            raise InputError("this maintenance window is not known any more")
        return self._make_window_label("cleared", session, found.device, found.start, found.end, "")

    def _make_window_label(
        self, label: Label, session: Session, device: str, start: int, end: int, note: str
    ) -> FeedbackLabel:
        """Return a label of a device, without an id."""
        now = self.store.choose_label_time(device=device)
        return FeedbackLabel(label, now, by=session.user, device=device, start=start, end=end, note=note)

    # Sessions

    def show_login(self, request: Request) -> Response:
        """Show the form to log in."""
        if not self.options.credentials.is_required or self.signer.read(request) is not None:
            return RedirectResponse(self.make_url("/"), 303)
        return self._respond_login(request)

    def _respond_login(self, request: Request, status: int = 200, error: str = "") -> Response:
        """Return the form to log in."""
        context = {
            "error": error,
            "needs_user": self.options.credentials.token is None,
            "next_path": _clean_path(request.query_params.get("next", "")),
        }
        return self.respond(request, "login.html", context, status)

    async def log_in(self, request: Request) -> Response:
        """Check a token or a password, and begin a session."""
        if not self.options.credentials.is_required:
            return RedirectResponse(self.make_url("/"), 303)
        form = await _read_form(request)
        client = request.client.host if request.client else ""
        name, password = form.get("user", "").strip(), form.get("password", "")
        async with self._password_checks:
            if not self.limiter.is_allowed(client):
                return self._respond_login(request, 429, "Too many wrong attempts. Try again in five minutes.")
            if not await run_in_threadpool(self.options.credentials.verify, name, password):
                self.limiter.add_failure(client)
                LOGGER.warning("login_refused", client=client)
                self._warn_of_proxy(request, client)
                return self._respond_login(request, 403, "This is not right. Try again.")
        response = RedirectResponse(self.make_url(_clean_path(form.get("next", ""))), 303)
        self.signer.write(response.headers, self.signer.make(name))
        return response

    def _warn_of_proxy(self, request: Request, client: str) -> None:
        """Log once that wrong passwords of all people behind a proxy count as those of one client."""
        forwarded = request.headers.get("x-forwarded-for")
        # If the proxy is trusted, the client is one of the addresses that it names.
        is_trusted = forwarded is None or (bool(self.options.trusted_proxies) and client in forwarded)
        if not is_trusted and not self._has_warned_of_proxy:
            self._has_warned_of_proxy = True
            LOGGER.warning(
                "proxy_not_trusted",
                client=client,
                message="a proxy is in front of the page, so wrong passwords of one person can keep all others from "
                "logging in: give its address as --trusted-proxy",
            )

    async def log_out(self, request: Request) -> Response:
        """End the session."""
        session = self.get_session(request)
        form = await _read_form(request)
        if not self.signer.check_form_token(session, form.get("token", "")):
            raise HTTPException(403, "The page was too old. Load it again, then log out.")
        response = RedirectResponse(self.make_url("/login"), 303)
        self.signer.end(response.headers, session)
        return response

    # For programs

    async def send_events(self, request: Request) -> Response:
        """Send notices of changes to a browser until it disconnects."""
        try:
            self.get_session(request)
        except LoginNeededError:
            # One notice: the browser then requests its page, and is sent to the login.
            return PlainTextResponse("event: change\ndata:\n\n", media_type="text/event-stream")
        if self.notifier.is_full:
            return PlainTextResponse("Too many browsers are connected.\n", 503)
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return EventSourceResponse(
            self.notifier.stream(since, request.query_params.get("incident")), ping=15, send_timeout=30
        )

    def send_health(self, request: Request) -> Response:
        """Send whether the threads that read the logs run, with status 200 or 503.

        A broker that cannot be reached does not count: the page shows what it has, and says since when it is old.
        """
        stopped = [follower.status.name for follower in self.followers if not follower.is_running]
        if stopped:
            return PlainTextResponse(f"the log of {stopped[0]} is not read any more\n", 503)
        return PlainTextResponse("ok\n")

    def send_readiness(self, request: Request) -> Response:
        """Send whether everything has been read that the logs held at the start, with status 200 or 503."""
        if self.feedback_log is None:
            return PlainTextResponse(f"{NOT_CONNECTED}\n", 503)
        behind = [follower.status.name for follower in self.followers if not follower.status.is_caught_up]
        if behind:
            return PlainTextResponse(f"the log of {behind[0]} is being read\n", 503)
        return PlainTextResponse("ok\n")

    def send_metrics(self, request: Request) -> Response:
        """Send metrics for Prometheus."""
        registry = CollectorRegistry()
        for name, text, value in (
            ("page_incidents", "Incidents that the page holds.", self.store.num_incidents),
            ("page_incidents_open", "Open incidents.", self.store.num_open),
            (
                "page_maintenance_windows",
                "Maintenance windows of devices that include the present time and were not taken back for it.",
                self.store.count_active_windows(self.store.now()),
            ),
            ("page_connections", "Browsers that are notified of changes.", self.notifier.num_connections),
        ):
            Gauge(f"deformer_{name}", text, registry=registry).set(value)
        readable = Gauge("deformer_page_log_readable", "Whether a log can be read.", ["log"], registry=registry)
        for follower in self.followers:
            readable.labels(follower.status.name).set(follower.status.failure is None)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def send_static(self, request: Request) -> Response:
        """Send a static file."""
        name = request.path_params["name"]
        found = views.read_static_files().get(name)
        if found is None:
            raise HTTPException(404, "There is no such file.")
        digest, content = found
        is_current = request.path_params["digest"] == digest
        cache = f"public, max-age={STATIC_SECONDS}, immutable" if is_current else "no-store"
        content_type = CONTENT_TYPE_BY_SUFFIX.get(Path(name).suffix, "application/octet-stream")
        return Response(content, headers={"Content-Type": content_type, "Cache-Control": cache})

    # Errors

    def handle_login_needed(self, request: Request, error: Exception) -> Response:
        """Send a browser to the login."""
        # For a part of a page, the person is led back to the page that the browser shows.
        try:
            shown = urlsplit(request.headers.get("hx-current-url") or request.url.path).path
        except ValueError:  # the header is no address
            shown = "/"
        path = _clean_path(shown.removeprefix(self.prefix))
        query = "" if path == "/" or request.method != "GET" else f"next={quote(path, safe='')}"
        target = self.make_url("/login", query)
        if request.headers.get("hx-request"):  # htmx would put the form to log in into the page
            return PlainTextResponse("Log in again.\n", 401, {"HX-Redirect": target})
        return RedirectResponse(target, 303)

    def handle_http_error(self, request: Request, error: Exception) -> Response:
        """Show an error as a page."""
        if not isinstance(error, HTTPException):
            raise error
        try:
            session: Session | None = self.get_session(request)
        except LoginNeededError:
            session = None
        text = error.detail if error.status_code != 404 or error.detail != "Not Found" else "There is no such page."
        context = {"status": error.status_code, "text": text}
        response = self.respond(request, "error.html", context, error.status_code, session)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    def handle_large_body(self, request: Request, error: Exception) -> Response:
        """Refuse a request whose body is too large."""
        return PlainTextResponse(f"The request has more than {MAX_BODY_BYTES} bytes.\n", 413, {"Connection": "close"})

    def make_routes(self) -> list[Route | Mount]:
        """Return the routes of the application."""
        incident = "/incidents/{incident_id}"
        routes: list[Route | Mount] = [
            Route("/", self.show_open),
            Route("/history", self.show_history),
            Route("/health", self.show_state),
            Route("/status", self.show_status),
            Route(incident, self.show_incident),
            Route(f"{incident}/feedback", self.add_label, methods=["POST"]),
            Route("/maintenance", self.show_maintenance, methods=["GET"]),
            Route("/maintenance", self.add_window, methods=["POST"]),
            Route("/records", self.show_records, methods=["GET"]),
            Route("/records", self.add_record_label, methods=["POST"]),
            Route("/login", self.show_login, methods=["GET"]),
            Route("/login", self.log_in, methods=["POST"]),
            Route("/logout", self.log_out, methods=["POST"]),
            Route("/events", self.send_events),
            Route("/static/{digest}/{name:path}", self.send_static),
        ]
        for_programs: list[Route | Mount] = [
            Route("/healthz", self.send_health),
            Route("/readyz", self.send_readiness),
            Route("/metrics", self.send_metrics),
        ]
        if not self.prefix:
            return [*for_programs, *routes]
        return [*for_programs, Mount(self.prefix, routes=routes), Route("/", self._redirect_to_prefix)]

    def _redirect_to_prefix(self, request: Request) -> Response:
        """Send a browser to the path below which the pages are."""
        return RedirectResponse(self.make_url("/"), 303)


def make_app(page: Page) -> Starlette:
    """Return the application of a page."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        page.notifier.start()
        try:
            yield
        finally:
            page.notifier.stop()

    options = page.options
    allowed_hosts = list_allowed_hosts(options.host, options.credentials, options.external_url)
    handlers: dict[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
        HTTPException: page.handle_http_error,
        LoginNeededError: page.handle_login_needed,
        BodyTooLargeError: page.handle_large_body,
    }
    middleware = Middleware(SecurityMiddleware, allowed_hosts=allowed_hosts, external_url=options.external_url)
    return Starlette(routes=page.make_routes(), middleware=[middleware], exception_handlers=handlers, lifespan=lifespan)


def _read_label(form: Mapping[str, str]) -> Label:
    """Return the label that a button of a form stands for.

    Raises:
        InputError: The label is unknown.
    """
    label = next((label for label in LABELS if label == form.get("label")), None)
    if label is None:
        raise InputError("the label is unknown: press one of the buttons")
    return label


def _read_count(form: Mapping[str, str], name: str, default: int) -> int:
    """Return a number that the page has shown to the person; the default if the form does not state it."""
    text = form.get(name, "")
    return int(text[:6]) if text.isascii() and text.isdigit() else default


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, of each the last value.

    Raises:
        HTTPException: The body is not a form, or does not arrive in time.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/x-www-form-urlencoded":
        raise HTTPException(415, "The request is not a form.")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, "The form did not arrive in time. Send it again.") from None
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError:  # also of texts that are not UTF-8
        raise HTTPException(400, "The form was not understood.") from None
    return {name: values[-1] for name, values in fields.items()}


def _clean_path(path: str) -> str:
    """Return a path within this server that a person may be sent to after the login, "/" for any other text."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return path if is_local and len(path) <= 300 else "/"
