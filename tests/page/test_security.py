"""Who may see and label incidents: addresses, host names, origins, tokens of forms, logins, and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers, MutableHeaders

from deformer_stream.errors import ConfigError
from deformer_stream.page import security
from deformer_stream.page.security import (
    MAX_BODY_BYTES,
    MAX_FAILURES,
    Credentials,
    LoginLimiter,
    Session,
    check_address,
    hash_password,
    is_same_origin,
    list_allowed_hosts,
    read_credentials,
    split_host,
    verify_password,
)
from tests.incidents.examples import make_incident
from tests.page.pages import BASE_URL, SAME_ORIGIN, Site, find_token, make_site

TOKEN = "a-token-of-a-plant-7"
ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - not bound
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def log_in(site: Site, password: str = TOKEN, user: str = "anna", **fields: str) -> Any:
    """Send the form to log in."""
    return site.post("/login", {"user": user, "password": password, **fields})


def make_site_with_login(**options: Any) -> tuple[Site, Any]:
    """Return a page that requires a token, and one of its incidents."""
    incident = make_incident(1)
    return make_site([incident], credentials=Credentials(token=TOKEN), **options), incident


# Addresses and files


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_an_address_of_this_machine_needs_no_login(host: str) -> None:
    check_address(host, Credentials())


@pytest.mark.parametrize("host", [ALL_INTERFACES, "::", "192.168.1.7", "plant.example", "localhost.example"])
def test_an_address_that_others_can_reach_needs_a_login(host: str) -> None:
    with pytest.raises(ConfigError, match="--token-file or --users-file"):
        check_address(host, Credentials())
    check_address(host, Credentials(token=TOKEN))


def test_passwords_are_stored_as_salted_hashes() -> None:
    first, second = hash_password("geheim ä"), hash_password("geheim ä")
    assert first != second
    assert "geheim" not in first
    assert verify_password("geheim ä", first)
    assert not verify_password("geheim a", first)


def test_files_of_tokens_and_users_are_read(tmp_path: Path) -> None:
    token_file, users_file = tmp_path / "token", tmp_path / "users"
    token_file.write_text(TOKEN + "\n")
    users_file.write_text(f"# operators\n\nanna:{hash_password('secret')}\nb:en:{hash_password('other')}\n")
    assert read_credentials(token_file, None) == Credentials(token=TOKEN)
    users = read_credentials(None, users_file)
    assert list(users.hash_by_user) == ["anna", "b:en"]
    assert users.verify("anna", "secret")
    assert not users.verify("anna", "other")
    assert not users.verify("nobody", "secret")
    assert not users.verify("anna", "x" * 5000)
    assert not read_credentials(None, None).is_required


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        ("token", ""),
        ("token", "short"),
        ("token", "two lines of\na token file"),
        ("token", "x" * 2000),
        ("users", ""),
        ("users", "anna"),
        ("users", "anna:secret-in-clear-text"),
        ("users", "anna:scrypt$1$1$1$AAAA$AAAA"),
        ("users", "anna:scrypt$32768$8$1$AAAA$not base64"),
        ("users", ":scrypt$32768$8$1$AAAA$AAAA"),
    ],
)
def test_files_that_are_not_as_expected_are_refused_without_their_content(
    tmp_path: Path, flag: str, content: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigError) as refusal:
        read_credentials(path if flag == "token" else None, path if flag == "users" else None)
    assert str(path) in str(refusal.value)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_two_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_credentials(tmp_path / "missing", None)
    with pytest.raises(ConfigError, match="cannot be used together"):
        read_credentials(tmp_path / "a", tmp_path / "b")


# Host names and origins


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "[::1", "127.0.0.1:x", "a/b"]
)
def test_a_request_under_a_foreign_host_name_is_refused(host: str) -> None:
    site = make_site([make_incident(1)])
    for path in ("/", "/health", "/static/x/page.css", "/events"):
        answer = site.get(path, headers={"Host": host})
        assert answer.status_code == 421
        assert "incident" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "127.0.0.1"])
def test_a_request_under_a_name_of_this_machine_is_answered(host: str) -> None:
    assert make_site().get("/", headers={"Host": host}).status_code == 200


def test_programs_read_health_and_metrics_under_any_host_name_without_a_login() -> None:
    site, incident = make_site_with_login(external_url="https://plant.example", base_url="https://plant.example")
    for path in ("/healthz", "/metrics"):
        answer = site.get(path, headers={"Host": "10.1.2.3:8080"})
        assert answer.status_code == 200
        assert incident.device not in answer.text
    assert site.get("/login", headers={"Host": "10.1.2.3:8080"}).status_code == 421


def test_host_names_that_are_allowed() -> None:
    token = Credentials(token=TOKEN)
    assert list_allowed_hosts(ALL_INTERFACES, token, None) is None
    assert list_allowed_hosts(ALL_INTERFACES, token, "https://Plant.example/x") == {
        "localhost",
        "127.0.0.1",
        "::1",
        "plant.example",
    }
    assert list_allowed_hosts("127.8.8.8", Credentials(), None) == {"localhost", "127.0.0.1", "::1", "127.8.8.8"}
    assert split_host("Plant.example:99999") is None


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Origin": BASE_URL}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": BASE_URL}, True),
        ({"Origin": "http://127.0.0.1:9999"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[::1"}, False),
        ({}, False),
    ],
)
def test_the_origin_of_a_request(headers: dict[str, str], is_own: bool) -> None:
    assert is_same_origin(Headers({"Host": "127.0.0.1:8080", **headers}), None) == is_own


def test_the_origin_may_be_that_of_the_proxy() -> None:
    headers = Headers({"Host": "127.0.0.1:8080", "Origin": "https://plant.example"})
    assert is_same_origin(headers, "https://plant.example/incidents")
    assert not is_same_origin(headers, "https://other.example")


@pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}])
def test_a_form_of_another_site_stores_nothing_even_with_a_token(headers: dict[str, str]) -> None:
    incident = make_incident(1)
    site = make_site([incident])
    path = f"/incidents/{incident.id}"
    form = {"label": "true", "token": find_token(site.get(path).text)}
    answer = site.client.post(f"{path}/feedback", data=form, headers=headers, follow_redirects=False)
    assert answer.status_code == 403
    assert site.feedback_log.poll(0) == []


@pytest.mark.parametrize("token", ["", "x", "InNoYXJlZCI.AAAAAAAAAAAAAAAAAAAAAAAAAAA", "é"])
def test_a_form_without_its_token_stores_nothing(token: str) -> None:
    incident = make_incident(1)
    site = make_site([incident])
    page = site.post(f"/incidents/{incident.id}/feedback", {"label": "true", "token": token, "note": "kept"})
    assert page.status_code == 403
    assert "Press the button again" in page.text
    assert "kept</textarea>" in page.text
    assert site.feedback_log.poll(0) == []


def test_a_token_of_another_run_of_the_program_is_refused() -> None:
    incident = make_incident(1)
    earlier, site = make_site([incident]), make_site([incident])
    token = find_token(earlier.get(f"/incidents/{incident.id}").text)
    assert site.post(f"/incidents/{incident.id}/feedback", {"label": "true", "token": token}).status_code == 403


def test_a_label_cannot_be_given_by_an_address() -> None:
    incident = make_incident(1)
    site = make_site([incident])
    assert site.get(f"/incidents/{incident.id}/feedback?label=true").status_code == 405
    assert site.feedback_log.poll(0) == []


# Limits


def test_large_bodies_are_refused_by_their_stated_and_by_their_real_size() -> None:
    incident = make_incident(1)
    site = make_site([incident])
    path = f"/incidents/{incident.id}/feedback"
    assert site.post(path, {"note": "x" * MAX_BODY_BYTES}).status_code == 413
    assert site.client.post(path, content=b"", headers={**SAME_ORIGIN, **FORM, "Content-Length": "x"}).status_code in (
        400,
        413,
    )

    def chunks() -> Any:
        for _ in range(20):
            yield b"note=" + b"x" * 1000 + b"&"

    answer = site.client.post(path, content=chunks(), headers={**SAME_ORIGIN, **FORM})
    assert answer.status_code == 413
    assert site.feedback_log.poll(0) == []


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"--x\r\n\r\n--x--", "multipart/form-data; boundary=x", 415),
        (b"", "", 415),
        (b"note=%FF", "application/x-www-form-urlencoded", 400),
        (b"\xff=1", "application/x-www-form-urlencoded", 400),
        (b"&".join(b"a=1" for _ in range(100)), "application/x-www-form-urlencoded", 400),
    ],
)
def test_what_is_no_form_is_refused(content: bytes, content_type: str, status: int) -> None:
    incident = make_incident(1)
    site = make_site([incident])
    headers = {**SAME_ORIGIN, "Content-Type": content_type}
    answer = site.client.post(f"/incidents/{incident.id}/feedback", content=content, headers=headers)
    assert answer.status_code == status


# Headers


def test_every_answer_has_the_security_headers() -> None:
    site, incident = make_site_with_login()
    for path in ("/", "/login", f"/incidents/{incident.id}", "/nowhere", "/healthz", "/events"):
        headers = site.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
    refused = site.get("/", headers={"Host": "a/b"})
    assert "content-security-policy" in refused.headers


# Logins


def test_without_a_login_nothing_is_shown() -> None:
    site, incident = make_site_with_login()
    for path in ("/", f"/incidents/{incident.id}", "/history", "/health", "/status", "/records", "/incidents/unknown"):
        answer = site.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login")
        assert incident.device not in answer.text
    assert incident.id not in site.get("/login").text
    assert site.get("/events").text == "event: change\ndata:\n\n"
    answer = site.post(f"/incidents/{incident.id}/feedback", {"label": "true"})
    assert answer.status_code == 303
    assert site.feedback_log.poll(0) == []


def test_htmx_is_sent_to_the_login_instead_of_a_fragment() -> None:
    site, incident = make_site_with_login()
    answer = site.get(f"/incidents/{incident.id}", headers={"HX-Request": "true"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == f"/login?next=%2Fincidents%2F{incident.id}"
    answer = site.get("/", headers={"HX-Request": "true", "HX-Current-URL": "http://[no-address"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login")


def test_without_a_login_its_form_leads_to_the_incidents() -> None:
    answer = make_site().post("/login", {"user": "anna", "password": "guess"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_a_person_with_the_token_labels_under_the_name_that_was_entered() -> None:
    site, incident = make_site_with_login()
    answer = log_in(site, next=f"/incidents/{incident.id}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/incidents/{incident.id}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert incident.device in site.get("/").text
    assert site.label(incident, "false-alarm").status_code == 303
    assert [label.by for label in site.feedback_log.poll(0)] == ["anna"]


def test_the_cookie_is_sent_over_https_only_if_people_use_https() -> None:
    site, _ = make_site_with_login(external_url="https://plant.example", base_url="https://plant.example")
    assert "; Secure" in log_in(site).headers["set-cookie"]
    assert "; Secure" not in log_in(make_site_with_login()[0]).headers["set-cookie"]


def test_a_person_can_log_out() -> None:
    site, _ = make_site_with_login()
    log_in(site)
    token = find_token(site.get("/").text)
    assert site.post("/logout", {"token": "x"}).status_code == 403
    assert site.get("/").status_code == 200
    assert site.post("/logout", {"token": token}).status_code == 303
    assert site.get("/").status_code == 303


def test_a_session_stays_ended_although_an_answer_to_an_earlier_request_arrives_later() -> None:
    """Each page contains the cookie with a new time, and another tab may have requested one just before."""
    site, _ = make_site_with_login()
    log_in(site)
    earlier = site.get("/")
    site.post("/logout", {"token": find_token(earlier.text)})
    cookie = earlier.headers["set-cookie"].partition(";")[0]
    assert site.get("/", headers={"Cookie": cookie}).status_code == 303
    log_in(site)
    assert site.get("/").status_code == 200


def test_the_number_of_ended_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MAX_ENDED_SESSIONS", 3)
    signer = security.SessionSigner("page", is_secure=False)
    for number in range(5):
        signer.end(MutableHeaders(), Session(str(number)))
    assert list(signer._ended_ids) == ["2", "3", "4"]


def test_the_token_of_a_form_is_bound_to_its_session() -> None:
    site, incident = make_site_with_login()
    log_in(site)
    foreign = find_token(site.get(f"/incidents/{incident.id}").text)
    site.client.cookies.clear()
    log_in(site, user="ben")
    answer = site.post(f"/incidents/{incident.id}/feedback", {"label": "true", "token": foreign})
    assert answer.status_code == 403
    assert site.feedback_log.poll(0) == []


@pytest.mark.parametrize("cookie", ["x", "e30.aaaaaa.bbbbbbbbbbbbbbbbbbbbbbbbbbb", ""])
def test_a_forged_session_is_none(cookie: str) -> None:
    site, _ = make_site_with_login()
    assert site.get("/", headers={"Cookie": f"deformer_page_8080={cookie}"}).status_code == 303


def test_a_session_ends_after_a_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    site, _ = make_site_with_login()
    log_in(site)
    assert site.get("/").status_code == 200
    monkeypatch.setattr(security, "SESSION_SECONDS", -1)
    assert site.get("/").status_code == 303


def test_wrong_passwords_are_refused_and_limited() -> None:
    site, _ = make_site_with_login()
    for _ in range(MAX_FAILURES):
        assert log_in(site, "wrong").status_code == 403
    assert log_in(site, "wrong").status_code == 429
    assert log_in(site, TOKEN).status_code == 429  # also the right one, which could otherwise be guessed
    assert site.get("/").status_code == 303


def test_the_limit_of_wrong_passwords_ends_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    limiter = LoginLimiter(lambda: now[0])
    for _ in range(MAX_FAILURES):
        limiter.add_failure("a")
    assert not limiter.is_allowed("a")
    assert limiter.is_allowed("b")
    now[0] = security.FAILURE_SECONDS + 1
    assert limiter.is_allowed("a")
    monkeypatch.setattr(security, "MAX_CLIENTS", 3)
    for client in "abcdef":
        limiter.add_failure(client)
    assert len(limiter._failures_by_client) == 3


@pytest.mark.parametrize(
    "target",
    ["//evil.example", "https://evil.example", "/\\evil.example", "\\evil", "/a\nb", "javascript:alert(1)", "x"],
)
def test_a_login_leads_to_no_other_site(target: str) -> None:
    site, _ = make_site_with_login()
    assert log_in(site, next=target).headers["location"] == "/"
    page = make_site_with_login()[0].client.get("/login", params={"next": target}).text
    assert re.search(r'name="next" value="/"', page)


def test_the_login_page_escapes_what_is_in_its_address() -> None:
    site, _ = make_site_with_login()
    page = site.client.get("/login", params={"next": '/"><script>alert(1)</script>'}).text
    assert "<script>alert" not in page
