"""A schema registry for tests, in this process: the part of Confluent's REST interface that the client uses.

And Protobuf messages of schemas that are texts.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from deformer_stream.codec.protobuf_schemas import compile_schema
from deformer_stream.codec.schema_formats import FetchSchema, RegisteredSchema
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import RejectionReason

LOGIN = ("plant", "a secret")


def fetch_from(*schemas: RegisteredSchema) -> FetchSchema:
    """Return a function that returns the schema with an id; the first one has the id 1."""

    def fetch(schema_id: int) -> RegisteredSchema:
        if not 0 < schema_id <= len(schemas):
            raise RejectionError(RejectionReason.UNKNOWN_SCHEMA, f"no schema has the id {schema_id}")
        return schemas[schema_id - 1]

    return fetch


def make_message_class(text: str, name: str = "Event") -> Any:
    """Return the class of a Protobuf message, from a schema as text and the message's full name."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compile_schema(text, {})).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


class FakeRegistry:
    """The registered schemas, and faults.

    Attributes:
        url: The address.
        requests: Method and path of each request so far.
        num_unavailable: Number of the next requests that are answered with "503 Service Unavailable".
        needs_login: Whether requests without `LOGIN` are refused.
        is_read_only: Whether schemas can be looked up, and not be registered.
        is_compatible: Whether a further schema of a subject counts as compatible with the earlier ones.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[str] = []
        self.num_unavailable = 0
        self.needs_login = self.is_read_only = False
        self.is_compatible = True
        self._schemas: list[dict[str, Any]] = []  # the id is the index plus 1

    def add(self, text: str, schema_type: str = "AVRO", subject: str = "t-value", **references: str) -> int:
        """Register a schema and return its id.

        Args:
            text: The schema.
            schema_type: Its type.
            subject: The subject.
            references: The subject of each schema that it refers to, by the name of the reference.
        """
        document: dict[str, Any] = {"schema": text, "subject": subject, "version": 1}
        if schema_type != "AVRO":  # Confluent's registry leaves the default out
            document["schemaType"] = schema_type
        if references:
            document["references"] = [
                {"name": name, "subject": other, "version": 1} for name, other in references.items()
            ]
        if document not in self._schemas:
            self._schemas.append(document)
        return self._schemas.index(document) + 1

    def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
        """Return the status and the document of the answer to a request."""
        self.requests.append(f"{method} {path}")
        if self.num_unavailable:
            self.num_unavailable -= 1
            return 503, {"error_code": 50301, "message": "starting"}
        expected = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
        if self.needs_login and authorization != expected:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        if path == "/subjects":
            return 200, sorted({schema["subject"] for schema in self._schemas})
        if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
            index = int(found[1]) - 1
            if not 0 <= index < len(self._schemas):
                return 404, {"error_code": 40403, "message": "Schema not found"}
            return 200, self._schemas[index]
        if found := re.fullmatch(r"/subjects/([^/]+)/versions/1", path):
            matching = [schema for schema in self._schemas if schema["subject"] == found[1]]
            return (200, matching[0]) if matching else (404, {"error_code": 40401, "message": "Subject not found"})
        if method == "POST" and (found := re.fullmatch(r"/subjects/([^/]+)(/versions)?", path)):
            return self._register(json.loads(body), found[1], is_lookup=found[2] is None)
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _register(self, document: Any, subject: str, is_lookup: bool) -> tuple[int, Any]:
        """Return the answer to a request that looks a schema up or registers it."""
        texts = [schema["schema"] for schema in self._schemas if schema["subject"] == subject]
        if document["schema"] not in texts:
            if is_lookup:
                return 404, {"error_code": 40403 if texts else 40401, "message": "not found"}
            if self.is_read_only:
                return 403, {"error_code": 40301, "message": "this user may only read"}
            if texts and not self.is_compatible:
                return 409, {"error_code": 409, "message": "Schema being registered is incompatible\nin many ways"}
        return 200, {"id": self.add(document["schema"], document["schemaType"], subject)}


@contextmanager
def run_registry() -> Iterator[FakeRegistry]:
    """Run a registry without schemas on a free port of the loopback interface."""
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, document = registry.answer(self.command, self.path, content, self.headers.get("Authorization"))
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name that the server calls

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
