"""A client for schema registries with the REST interface of Confluent Schema Registry.

Apicurio Registry (at the path /apis/ccompat/v7) and Karapace have the same interface.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from deformer_stream import log
from deformer_stream.codec.schema_formats import RegisteredSchema
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, StoppedWaiting, Unavailable

REQUEST_SECONDS = 5.0
"""Seconds after which a request without an answer has failed; it is repeated."""

RETRY_SECONDS = 1.0
"""Seconds to wait after a failed request before the next attempt."""

UNKNOWN_SECONDS = 30.0
"""Seconds for which an id without a usable schema is not requested again, so that bad messages cause few requests."""

MAX_UNKNOWN_IDS = 10_000
"""Number of ids without a usable schema that are stored."""

MAX_SCHEMA_ID = 2**31 - 1
"""Largest id of a registry. Damaged messages can state a larger one, and registries refuse such a request in other ways
than that for an unknown id."""

MAX_REFERENCES = 1000
"""Largest number of schemas that a schema may refer to, directly or indirectly."""

MAX_REFERENCE_DEPTH = 50
"""Largest number of schemas that refer to each other in a chain, because each one is requested within a nested call."""

_HEADERS = {
    "Accept": "application/vnd.schemaregistry.v1+json",
    "Content-Type": "application/vnd.schemaregistry.v1+json",
}
_UNKNOWN_LOGIN, _FORBIDDEN = 401, 403
_UNUSABLE_STATUSES = (301, 302, 303, 307, 308, 400, 404, 405, 406, 409, 415, 422)
"""Statuses that the same request will have again: the address is wrong, or the registry refuses the request."""

# httpx logs the address of each request.
logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """Where a schema registry is, and how to connect.

    Attributes:
        url: The address, without a login.
        username: User name of the login, None for none.
        password: Password of the login. It is not part of `repr` and must never be logged.
        ca_file: PEM file of the authority that signed the registry's certificate, None for those of the system.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None


class SchemaRegistry:
    """A client of a schema registry. While the registry cannot be reached, requests are repeated.

    Args:
        address: The registry.
        patience: Seconds for which a request is repeated before it has failed.
        stop: Set when the command must end. A request that fails is then not repeated, and raises `StoppedWaiting`.
            None if nothing sets it.

    Attributes:
        on_wait: A function that is called before each repeated request.
        stop: The same event.

    Raises:
        ConfigError: The file of the authority cannot be read.
    """

    def __init__(self, address: RegistryAddress, patience: float, stop: threading.Event | None = None) -> None:
        self.on_wait: Callable[[], None] = lambda: None
        self.stop = stop or threading.Event()
        self._url, self._patience = address.url.rstrip("/"), patience
        # Ids without a usable schema: the monotonic time of the next request, and the problem.
        self._unusable_by_id: dict[int, tuple[float, str]] = {}
        verify: Any = True
        if address.ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=str(address.ca_file))
            except OSError as error:  # `ssl.SSLError` is one
                raise ConfigError(
                    f"--schema-registry-cafile {address.ca_file} is not a PEM file with certificates: give one"
                ) from error
        login = None if address.username is None else (address.username, address.password or "")
        self._client = httpx.Client(auth=login, verify=verify, timeout=REQUEST_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def check(self) -> None:
        """Check at the start of a command that the registry responds.

        Raises:
            ConfigError: The registry refuses the login, or the address is not one of a schema registry.
            Unavailable: The registry does not respond within the patience.
        """
        self._request("GET", "/subjects")

    def fetch(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with an id and all schemas that it refers to.

        Args:
            schema_id: The id, as messages state it.

        Raises:
            RejectionError: The registry has no such schema or not all that it refers to, or it refers to too many.
            ConfigError: The registry refuses the login or the request.
            Unavailable: The registry does not respond within the patience.
        """
        unknown = f"the schema registry has no schema with id {schema_id}: check --schema-registry, or register it"
        if schema_id > MAX_SCHEMA_ID:
            raise RejectionError(RejectionReason.UNKNOWN_SCHEMA, unknown)
        next_request, problem = self._unusable_by_id.get(schema_id, (0.0, ""))
        if time.monotonic() < next_request:
            raise RejectionError(RejectionReason.UNKNOWN_SCHEMA, problem)
        try:
            answer = self._request_schema(f"/schemas/ids/{schema_id}", unknown)
            references: dict[str, str] = {}
            self._add_references(schema_id, answer, references, set())
        except RejectionError as error:
            if len(self._unusable_by_id) >= MAX_UNKNOWN_IDS:
                self._unusable_by_id.clear()
            self._unusable_by_id[schema_id] = time.monotonic() + UNKNOWN_SECONDS, error.detail
            raise
        self._unusable_by_id.pop(schema_id, None)
        return RegisteredSchema(str(answer.get("schemaType") or "AVRO"), str(answer["schema"]), references)

    def _request_schema(self, path: str, problem: str) -> Mapping[str, Any]:
        """Return the registry's answer with a schema.

        Args:
            path: The path of the request.
            problem: Why messages are rejected if there is no such schema.

        Raises:
            RejectionError: There is no such schema.
            ConfigError: The registry refuses the login or the request, or its answer is not a schema.
            Unavailable: The registry does not respond within the patience.
        """
        answer = self._request("GET", path, is_optional=True)
        if answer is None:
            raise RejectionError(RejectionReason.UNKNOWN_SCHEMA, problem)
        if not isinstance(answer, dict) or "schema" not in answer:
            raise ConfigError(
                f"{self._url} is not a schema registry, because the response to {path} has no schema: check the path "
                "of the address"
            )
        return answer

    def _add_references(
        self, schema_id: int, answer: Mapping[str, Any], references: dict[str, str], open_names: set[str]
    ) -> None:
        """Add the schemas that a schema refers to, each after those that it refers to itself.

        Args:
            schema_id: The id of the schema with which messages are encoded.
            answer: The registry's answer with the schema.
            references: Schemas by the name of the reference, which are added to.
            open_names: Names of the references whose own references are being added.

        Raises:
            RejectionError: There are too many references, or the registry does not have one of them.
        """
        for reference in answer.get("references") or ():
            if not isinstance(reference, dict) or not {"name", "subject", "version"} <= set(reference):
                raise RejectionError(
                    RejectionReason.UNKNOWN_SCHEMA,
                    f"schema {schema_id} of the registry has a reference without name, subject or version: register it "
                    "again",
                )
            name = str(reference["name"])
            if name in references or name in open_names:
                continue
            if len(references) + len(open_names) >= MAX_REFERENCES or len(open_names) >= MAX_REFERENCE_DEPTH:
                raise RejectionError(
                    RejectionReason.UNKNOWN_SCHEMA,
                    f"schema {schema_id} of the registry refers to more than {MAX_REFERENCES} schemas, or to a chain "
                    f"of more than {MAX_REFERENCE_DEPTH}: use fewer",
                )
            subject, version = quote(str(reference["subject"]), safe=""), reference["version"]
            found = self._request_schema(
                f"/subjects/{subject}/versions/{version}",
                f"schema {schema_id} of the registry refers to version {version} of {subject}, which the registry "
                "does not have: register it again",
            )
            self._add_references(schema_id, found, references, open_names | {name})
            references[name] = str(found["schema"])

    def register(self, subject: str, schema_type: str, text: str) -> int:
        """Register a schema under a subject and return its id; one that is registered already keeps its id.

        The schema is looked up first, because a user may be allowed to read schemas and not to register them.

        Args:
            subject: The subject, for example the name of the topic followed by -value.
            schema_type: "AVRO", "PROTOBUF" or "JSON".
            text: The schema.

        Raises:
            ConfigError: The registry refuses the login, the user may not register schemas, or the schema is not
                compatible with earlier ones.
            Unavailable: The registry does not respond within the patience.
        """
        path, body = f"/subjects/{quote(subject, safe='')}", {"schema": text, "schemaType": schema_type}
        remedy = f"the schema of {subject} must be registered, and be compatible with the earlier ones of the subject"
        forbidden = (
            f"this user may read schemas, but not register that of {subject}: permit it, or start the command once as "
            "a user who may"
        )
        found = self._request("POST", path, body, is_optional=True)
        answer = self._request("POST", f"{path}/versions", body, False, remedy, forbidden) if found is None else found
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
            raise ConfigError(
                f"{self._url} is not a schema registry, because the response to {path} has no id: check the path of "
                "the address"
            )
        return int(answer["id"])

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        is_optional: bool = False,
        remedy: str | None = None,
        forbidden: str = "check the permissions of the user of --schema-registry-username",
    ) -> Any:
        """Return the answer to a request, None if it is optional and there is no such object.

        Args:
            method: The method of HTTP.
            path: The path, without the address of the registry.
            body: What is sent as JSON, None for nothing.
            is_optional: Whether the object may be missing.
            remedy: What to check if the registry refuses the request, None to check the address.
            forbidden: What to check if the registry forbids the request to this user.

        Raises:
            ConfigError: The registry refuses the login or the request.
            Unavailable: The registry does not respond within the patience, or `StoppedWaiting` if the command must end.
        """
        deadline = time.monotonic() + self._patience
        is_logged = False
        while True:
            try:
                response = self._client.request(method, self._url + path, json=body, headers=_HEADERS)
                if response.status_code == 404 and is_optional and _has_error_code(response):
                    return None
                if response.status_code == 200:
                    return _parse_answer(response, self._url)
                self._check_status(response, f"{method} {path}", remedy, forbidden)
                problem = f"HTTP status {response.status_code}"
            except httpx.InvalidURL as error:
                raise ConfigError("--schema-registry: the address is not valid: write https://HOST:PORT") from error
            except httpx.HTTPError as error:
                problem = type(error).__name__
            if not is_logged:
                log.get_logger("schema_registry").warning("schema_registry_unavailable", url=self._url, problem=problem)
                is_logged = True
            self.on_wait()
            message = (
                f"the schema registry {self._url} does not respond ({problem}): check that it runs, and "
                "--schema-registry"
            )
            is_late = time.monotonic() > deadline
            if self.stop.wait(0.0 if is_late else RETRY_SECONDS):
                raise StoppedWaiting(message)
            if is_late:
                raise Unavailable(message)

    def _check_status(self, response: httpx.Response, request: str, remedy: str | None, forbidden: str) -> None:
        """Raise `ConfigError` if the same request would be refused again.

        Args:
            response: The answer of the registry.
            request: The method and the path of the request, for the error message.
            remedy: What to check, None for the address.
            forbidden: What to check if the registry forbids the request to this user.
        """
        status = response.status_code
        if status == _UNKNOWN_LOGIN:
            raise ConfigError(
                f"the schema registry {self._url} refuses the login (HTTP status {status}): check "
                "--schema-registry-username and --schema-registry-password-file"
            )
        if status == _FORBIDDEN:
            raise ConfigError(
                f"the schema registry {self._url} forbids the request {request} (HTTP status "
                f"{status}{_quote_message(response)}): {forbidden}"
            )
        if status in _UNUSABLE_STATUSES:
            raise ConfigError(
                f"the schema registry {self._url} refuses the request {request} (HTTP status "
                f"{status}{_quote_message(response)}): "
                + (remedy or "check --schema-registry; the path of Apicurio is /apis/ccompat/v7")
            )


def _has_error_code(response: httpx.Response) -> bool:
    """Return whether an answer is one of a registry, which states an error code, and not of another web server."""
    try:
        document = response.json()
    except ValueError:
        return False
    return isinstance(document, dict) and "error_code" in document


def _quote_message(response: httpx.Response) -> str:
    """Return the error message of a registry for the end of a sentence, empty if there is none."""
    try:
        message = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    lines = str(message).splitlines() or [""]
    return f", {lines[0][:200]}"


def _parse_answer(response: httpx.Response, url: str) -> Any:
    """Return the JSON of an answer.

    Raises:
        ConfigError: The answer is not JSON.
    """
    try:
        return response.json()
    except ValueError as error:
        raise ConfigError(
            f"{url} is not a schema registry, because the response is not JSON: check the path of the address"
        ) from error
