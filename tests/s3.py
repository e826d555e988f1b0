"""A local S3 server for tests, and faults in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import make_server

BUCKET = "plant"

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


class Faults:
    """Failures of the server, which sits in front of moto's.

    Attributes:
        num_throttled: Number of the next reads of objects that are answered with "503 Slow Down".
        num_cut: Number of the next reads of objects whose connection ends in the middle of the content.
        num_reads: Number of reads of objects so far.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self.num_throttled = self.num_cut = self.num_reads = 0

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        if environ["REQUEST_METHOD"] != "GET" or environ["PATH_INFO"].count("/") < 2:
            return self._application(environ, start_response)
        self.num_reads += 1
        if self.num_throttled:
            self.num_throttled -= 1
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        answer = self._application(environ, start_response)
        if not self.num_cut:
            return answer
        self.num_cut -= 1
        content = b"".join(answer)
        return [content[: len(content) // 2]]  # fewer bytes than the header has announced


@contextmanager
def run_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[fs.S3FileSystem, Faults]]:
    """Start a server with an empty bucket, which commands in this process use as well."""
    import threading

    faults = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    store = fs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)
    store.create_dir(BUCKET)
    store.delete_dir_contents(BUCKET)
    try:
        yield store, faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_object(store: fs.S3FileSystem, key: str, content: bytes) -> None:
    """Write an object of the bucket."""
    with store.open_output_stream(f"{BUCKET}/{key}", compression=None) as stream:
        stream.write(content)


def write_parquet(store: fs.S3FileSystem, key: str, columns: dict[str, Any], **options: Any) -> None:
    """Write a Parquet file of the bucket."""
    pq.write_table(pa.table(columns), f"{BUCKET}/{key}", filesystem=store, **options)
