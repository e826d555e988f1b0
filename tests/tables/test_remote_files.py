"""Tests of input files in an object store, with a local S3 server, and of compressed JSON lines."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from connectors.files.lines import read_lines
from connectors.files.open_tables import make_record_prefixes
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.tables import discovery
from deformer_stream.tables.data_files import RemoteFile, parse_url
from deformer_stream.tables.discovery import check_no_overwrite, find_data_files, find_files
from deformer_stream.tables.table import Table

BUCKET = "plant"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a local S3 server, and return its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> fs.S3FileSystem:
    """Return the file system of the local server, which commands use as well; the bucket is empty."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    filesystem = fs.S3FileSystem(
        endpoint_override=server.removeprefix("http://"), scheme="http", allow_bucket_creation=True
    )
    filesystem.create_dir(BUCKET)
    filesystem.delete_dir_contents(BUCKET)
    return filesystem


def write(store: fs.S3FileSystem, key: str, content: bytes) -> None:
    """Write an object."""
    with store.open_output_stream(f"{BUCKET}/{key}", compression=None) as stream:
        stream.write(content)


def write_table(store: fs.S3FileSystem, key: str, **columns: list[object]) -> None:
    """Write a Parquet file."""
    pq.write_table(pa.table(columns), f"{BUCKET}/{key}", filesystem=store)


def find(*inputs: str) -> list[str]:
    """Return the URLs below the bucket of the files that some inputs in it denote."""
    files = find_data_files([f"s3://{BUCKET}/{entry}" for entry in inputs])
    return [str(file).removeprefix(f"s3://{BUCKET}/") for file in files]


def test_folders_files_and_patterns_denote_the_same_files_as_on_disk(store: fs.S3FileSystem) -> None:
    for key in ("b.parquet", "a.csv", "a.CSV.GZ", "notes.txt", "_b.csv", ".c.csv", "d/1.csv", "d/e/2.csv", "_d/3.csv"):
        write(store, key, b"x")
    assert find("") == find("**") == ["a.CSV.GZ", "a.csv", "b.parquet", "d/1.csv", "d/e/2.csv"]
    assert find("?.csv") == ["a.csv"]
    assert find("**/[12].csv") == ["d/1.csv", "d/e/2.csv"]
    assert find("d", "a.csv") == ["d/1.csv", "d/e/2.csv", "a.csv"]
    assert find("_d") == ["_d/3.csv"]  # the name of the given folder itself does not matter


def test_inputs_without_files_are_refused(store: fs.S3FileSystem) -> None:
    write(store, "notes.txt", b"x")
    cases = {
        "*.csv": "no Parquet, CSV or JSON lines file matches",
        "none.csv": "no such file or folder",
        "notes.txt": "unknown kind of file",
        "": "no Parquet, CSV or JSON lines file in this folder",
    }
    for entry, words in cases.items():
        with pytest.raises(InputError, match=words):
            find(entry)


def test_a_table_with_a_log_of_versions_is_refused(store: fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "is_installed", lambda module: False)
    write(store, "delta/part-0.parquet", b"x")
    write(store, "delta/_delta_log/00000000000000000000.json", b"{}")
    write(store, "iceberg/data/part-0.parquet", b"x")
    write(store, "iceberg/metadata/00001-5d1c.metadata.json", b"{}")
    for entry in ("delta", "iceberg", "*"):
        with pytest.raises(InputError, match=r"may be those of older versions.*plain Parquet"):
            find(entry)


def test_tables_of_partitions_are_read(store: fs.S3FileSystem) -> None:
    write_table(store, "logs/site=A/day=2025-01-31/0.parquet", x=[1.0, 2.0])
    write_table(store, "logs/site=B/day=2025-02-01/0.parquet", x=[3.0])
    write(store, "logs/site=C/day=2025-02-02/0.csv.gz", gzip.compress("x;y\n1,5;ä\n2,5;b\n".encode("cp1252")))
    tables = Table.open_all(find_data_files([f"s3://{BUCKET}/logs"]))
    assert [table.stem for table in tables] == ["0", "0", "0"]
    rows = [row for table in tables for batch in table.iterate_batches(["x", "site"], 10) for row in batch.to_pylist()]
    assert rows == [
        {"x": 1.0, "site": "A"},
        {"x": 2.0, "site": "A"},
        {"x": 3.0, "site": "B"},
        {"x": 1.5, "site": "C"},
        {"x": 2.5, "site": "C"},
    ]
    assert str(tables[0].schema.field("day").type) == "date32[day]"


def test_record_ids_of_files_of_the_same_name_have_their_folders() -> None:
    files = [RemoteFile("s3://plant/a/1.csv"), RemoteFile("s3://plant/b/1.csv")]
    assert list(make_record_prefixes(files).values()) == ["a/1", "b/1"]


def test_damaged_files_are_reported_with_their_url(store: fs.S3FileSystem) -> None:
    write(store, "cut.parquet", b"PAR1...")
    write(store, "cut.csv.gz", gzip.compress(b"a,b\n1,2\n" * 1000)[:-20])
    for name in ("cut.parquet", "cut.csv.gz"):
        with pytest.raises(InputError, match=rf"^s3://{BUCKET}/{name}: the file cannot be read") as caught:
            Table.open(find_data_files([f"s3://{BUCKET}/{name}"])[0])
        assert "\n" not in str(caught.value)


def test_an_unreachable_server_is_reported_without_secrets(
    store: fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="the object store cannot be read") as caught:
        find("")
    assert "secret-of-the-test" not in str(caught.value)


def test_urls_with_credentials_are_refused_without_repeating_them() -> None:
    with pytest.raises(ConfigError, match="must not contain credentials") as caught:
        find_data_files(["s3://key:password@plant/logs"])
    assert "password" not in str(caught.value)
    assert "key" not in str(caught.value).split("credentials")[0]


def test_a_path_of_a_url_is_the_url() -> None:
    assert parse_url(Path("s3://plant/logs/*.csv")) == parse_url("s3://plant/logs/*.csv") == "s3://plant/logs/*.csv"
    assert parse_url("gs://plant/logs/") == "gs://plant/logs"
    assert parse_url("logs/s3://a") is None
    with pytest.raises(ConfigError, match="name of a bucket"):
        find_data_files(["s3://*/logs"])


def test_schemes_have_several_names_and_others_are_refused() -> None:
    for url in ("s3a://plant/logs", "S3://plant/logs", "s3n://plant/logs", Path("s3a://plant/logs")):
        assert parse_url(url) == "s3://plant/logs"
    assert parse_url("gcs://plant/logs") == "gs://plant/logs"
    for url in ("abfs://user:password@plant/logs/*.csv", "https://plant/a.csv"):
        with pytest.raises(InputError, match=r"://…: inputs with this scheme cannot be read; give s3://") as caught:
            find_data_files([url])
        assert "password" not in str(caught.value)


def test_the_name_of_a_file_is_no_pattern(store: fs.S3FileSystem) -> None:
    for key in ("a[1].csv", "a1.csv", "day=*/1.csv", "day=2/1.csv"):
        write(store, key, b"x")
    assert find("a[1].csv") == ["a[1].csv"]
    assert find("a[1]*") == ["a1.csv"]
    assert find("day=*") == ["day=*/1.csv"]


def test_files_are_sorted_as_on_disk(store: fs.S3FileSystem, tmp_path: Path) -> None:
    keys = ["d.csv", "d/1.csv", "d-e/1.csv", "d/e/1.csv", "b/z.csv", "b.csv"]
    for key in keys:
        write(store, key, b"x")
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    assert find("") == [str(file.relative_to(tmp_path)) for file in find_files([tmp_path])]


def test_a_pattern_lists_only_folders_that_it_can_match(
    store: fs.S3FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("a/x/1.csv", "a/y/1.csv", "b/x/1.csv"):
        write(store, key, b"x")
    caplog.clear()
    with caplog.at_level("INFO", "werkzeug"):
        assert find("a*/x/*.csv") == ["a/x/1.csv"]
    assert "prefix=a/" in caplog.text  # the server logs its requests
    assert "prefix=b/" not in caplog.text
    assert "prefix=a/y" not in caplog.text


def test_a_table_that_is_replaced_during_the_run_is_reported(store: fs.S3FileSystem) -> None:
    for name in ("t.parquet", "t.csv"):

        def put(value: float, name: str = name) -> None:
            """Write a version of the file."""
            if name.endswith(".csv"):
                write(store, name, b"x,y\n" + b"%.1f,1\n" % value * 10)
            else:
                pq.write_table(pa.table({"x": [value] * 10}), f"{BUCKET}/{name}", filesystem=store, row_group_size=5)

        put(1.0)
        (table,) = Table.open_all(find_data_files([f"s3://{BUCKET}/{name}"]))
        batches = table.iterate_batches(["x"], 3)
        assert next(batches).column(0).to_pylist() == [1.0, 1.0, 1.0]
        put(2.0)
        message = rf"^s3://{BUCKET}/{name}: the file was replaced while it was read; start the command again"
        if name == "t.parquet":  # the short CSV file is read at once, the row groups one after the other
            with pytest.raises(InputError, match=message):
                list(batches)
        with pytest.raises(InputError, match=message):
            next(table.iterate_batches(["x"], 3))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_lines_that_are_replaced_while_they_are_read_are_reported(store: fs.S3FileSystem, name: str) -> None:
    # The content is longer than what is read at a time, also when it is compressed.
    lines = b"".join(os.urandom(32).hex().encode() + b"\n" for _ in range(60_000))
    content = gzip.compress(lines, 1) if name.endswith(".gz") else lines
    write(store, name, content)
    (file,) = find_data_files([f"s3://{BUCKET}/{name}"])
    blocks = read_lines(file, 1000)
    next(blocks)
    write(store, name, content + b"\n")
    with pytest.raises(InputError, match="the file was replaced while it was read"):
        list(blocks)


def test_the_columns_of_a_row_group_are_requested_together(
    store: fs.S3FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {f"x{number}": [float(row * number) for row in range(1000)] for number in range(20)}
    pq.write_table(pa.table(columns), f"{BUCKET}/t.parquet", filesystem=store, row_group_size=500)
    (table,) = Table.open_all(find_data_files([f"s3://{BUCKET}/t.parquet"]))
    caplog.clear()
    with caplog.at_level("INFO", "werkzeug"):
        batches = list(table.iterate_batches(list(columns), 100))
    assert pa.Table.from_batches(batches).to_pydict() == columns
    assert caplog.text.count('"GET ') <= 2 * 2 + 2  # not one for each of the 40 column chunks


def test_commands_for_local_files_only_refuse_urls() -> None:
    with pytest.raises(InputError, match=r"s3://plant/e.jsonl: this command reads local files only"):
        find_files(["s3://plant/e.jsonl"])


def test_an_output_is_no_remote_input(store: fs.S3FileSystem, tmp_path: Path) -> None:
    write(store, "a.csv", b"x")
    check_no_overwrite([f"s3://{BUCKET}/a.csv"], {"--alerts": tmp_path / "a.csv"})


def test_json_lines_may_be_compressed(store: fs.S3FileSystem, tmp_path: Path) -> None:
    content = gzip.compress(b"".join(json.dumps({"record": i}).encode() + b"\n" for i in range(5000)))
    (tmp_path / "e.jsonl.gz").write_bytes(content)
    write(store, "e.jsonl.gz", content)
    for entry in (tmp_path / "e.jsonl.gz", f"s3://{BUCKET}/e.jsonl.gz"):
        (file,) = find_data_files([entry])
        lines = [line for block in read_lines(file, 1000) for line in block]
        assert [json.loads(line)["record"] for line in lines] == list(range(5000))
