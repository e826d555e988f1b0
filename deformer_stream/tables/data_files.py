"""The files of data sets: local files, and files in Amazon S3 and Google Cloud Storage, read with `pyarrow.fs`.

Credentials are those that Arrow finds: environment variables, profiles and the identity of the machine. They are
refused as part of a URL, because a URL is shown in logs and messages. A file that is replaced while a command reads it
is reported, because its rows would be those of two versions.

For S3, `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` names another server than Amazon's, and `AWS_REGION` or
`AWS_DEFAULT_REGION` the region. Arrow does not read these variables itself. PyArrow is imported on first use.
"""

from __future__ import annotations

import gzip
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from deformer_stream.errors import ConfigError, InputError, summarize_error

if TYPE_CHECKING:
    import pyarrow as pa

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}([^/].*)", re.DOTALL)  # a `Path` has lost one of the two slashes
_SCHEME_BY_NAME = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs"}  # Hadoop and Arrow use the others
_GLOB_CHARACTERS = "*?["
_BUFFER_BYTES = 1 << 20  # bytes that one request reads from a file that is not read by position
_CONNECT_SECONDS = 10.0  # a server that does not respond is reported after a few attempts of this length


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in an object store, with those members of `Path` that readers of files use.

    Attributes:
        url: The URL, such as `s3://bucket/folder/pumps.parquet`.
        size: Number of bytes when the file was found.
        modified: When it was written, in nanoseconds since 1970, as of when it was found. 0 if it is not known.
    """

    url: str
    size: int = field(default=0, compare=False)
    modified: int = field(default=0, compare=False)
    _entity_tags: list[bytes] = field(default_factory=list, compare=False, repr=False)  # the first one that was seen

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> PurePosixPath:
        """The scheme, the bucket and the key as a path: `/s3/bucket/folder/pumps.parquet`."""
        return PurePosixPath("/" + self.url.replace("://", "/", 1))

    @property
    def name(self) -> str:
        """The name of the file without its folders."""
        return self.path.name

    @property
    def suffix(self) -> str:
        """The last ending of the name, such as `.gz`."""
        return self.path.suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the folders and of the file."""
        return self.path.parts

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading from its beginning to its end.

        Args:
            mode: Only "rb".

        Raises:
            InputError: The file was replaced since it was first opened.
            OSError: The file cannot be read.
            ValueError: The mode is another one.
        """
        if mode != "rb":
            raise ValueError(f"remote files can only be read, so the mode {mode!r} cannot be used")
        filesystem, path = _connect_to(self.url)
        # Arrow would decompress a file by its name; here all files are decompressed in one place.
        stream = self._check(filesystem.open_input_stream(path, compression=None))
        return cast(BinaryIO, io.BufferedReader(_RemoteStream(stream, self.check_version), _BUFFER_BYTES))

    def open_for_seeking(self) -> pa.NativeFile:
        """Open the file for reading at any position.

        Raises:
            InputError: The file was replaced since it was first opened.
            OSError: The file cannot be read.
        """
        filesystem, path = _connect_to(self.url)
        return self._check(filesystem.open_input_file(path))

    def check_version(self) -> None:
        """Check that the file was not replaced since it was first opened; called when it was read to its end.

        Raises:
            InputError: It was replaced.
            OSError: The object store cannot be reached.
        """
        self.open_for_seeking().close()

    def _check(self, stream: pa.NativeFile) -> pa.NativeFile:
        """Return an opened stream of the file, after checking that it is of the version that was opened first."""
        tag = (stream.metadata() or {}).get("ETag", b"")
        self._entity_tags[1:] = [tag]
        if self._entity_tags[0] != tag:
            stream.close()
            raise InputError(f"{self.url}: the file was replaced while it was read; start the command again")
        return stream


class _RemoteStream(io.RawIOBase):
    """The bytes of a remote file, which is checked at its end.

    Args:
        stream: The bytes.
        on_end: Called when all bytes were read.
    """

    def __init__(self, stream: pa.NativeFile, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer, and return their number; 0 at the end of the file."""
        content = self._stream.read(len(buffer))
        if not content:
            self._on_end()
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


DataFile = Path | RemoteFile
"""A file of a data set."""


def open_bytes(path: DataFile) -> BinaryIO:
    """Open a file for reading from its beginning to its end; it is decompressed if its name ends in .gz.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
    """
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    if isinstance(path, Path):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return _RemoteGzip(path.open("rb"))  # type: ignore[return-value]


class _RemoteGzip(gzip.GzipFile):
    """A compressed remote file, which is closed together with the stream of its bytes.

    Args:
        stream: The compressed bytes.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._stream = stream

    def close(self) -> None:
        """Close the file and the stream."""
        super().close()
        self._stream.close()


def parse_url(entry: object) -> str | None:
    """Return an input as a URL of an object store, such as `s3://bucket/folder`; None if it is no such URL.

    The schemes `s3a` and `s3n` count as `s3`, and `gcs` as `gs`, in lower or upper case.

    Args:
        entry: A text or a `Path`; a `Path` of a URL has only one slash after the scheme.

    Raises:
        ConfigError: The URL contains credentials.
    """
    match = _URL.fullmatch(str(entry))
    if match is None or match[1].lower() not in _SCHEME_BY_NAME:
        return None
    scheme, rest = _SCHEME_BY_NAME[match[1].lower()], match[2]
    bucket = rest.split("/", 1)[0]
    if "@" in bucket or ":" in bucket:  # a name of a bucket has neither
        raise ConfigError(
            f"{scheme}://…: a URL must not contain credentials, because it is shown in logs; set them in the "
            "environment or in a profile"
        )
    return f"{scheme}://{rest.rstrip('/')}"


def describe_unknown_scheme(entry: object) -> str | None:
    """Return why an input cannot be read if it is a URL of another system; None if it is no URL, or can be read."""
    match = _URL.fullmatch(str(entry))
    if match is None or match[1].lower() in _SCHEME_BY_NAME:
        return None
    # The rest of the URL may contain credentials.
    return f"{match[1]}://…: inputs with this scheme cannot be read; give s3://BUCKET/…, gs://BUCKET/… or a local path"


def is_pattern(path: str) -> bool:
    """Return whether a URL or a path is a pattern of files, such as `s3://bucket/logs/*.parquet`."""
    return any(character in path for character in _GLOB_CHARACTERS)


def find_remote(url: str) -> tuple[list[RemoteFile], PurePosixPath | None]:
    """Return the files that a URL denotes, sorted by path: one file, all files below a folder, or those of a pattern.

    Only the folders that a pattern can match are listed.

    Args:
        url: The URL of a file, of a folder, or a pattern with `*`, `?`, `[…]` and `**` (any number of folders). A
            folder that a pattern matches stands for the files in it. If there is a file or folder with exactly this
            name, it is no pattern.

    Returns:
        (files, folder). Files whose name, or a folder of which below that of the URL, begins with a dot or an
        underscore are part of the list. `folder` is the one that is searched, as `RemoteFile.path` states it; None if
        the URL is that of a single file.

    Raises:
        InputError: The object store cannot be read, or the file or folder does not exist.
        ConfigError: The URL has no bucket.
    """
    from pyarrow import fs

    scheme = url.split("://", 1)[0]
    try:
        filesystem, path = _connect_to(url)
        found = filesystem.get_file_info(path)
        if found.type == fs.FileType.File:
            return [_make_remote_file(scheme, found)], None
        base, pattern = path, tuple[str, ...]()
        if found.type == fs.FileType.NotFound and is_pattern(path):
            base, pattern = _split_pattern(path)
        entries = _list_matches(filesystem, base, pattern)
    except OSError as error:
        raise InputError(
            f"{url}: the object store cannot be read ({summarize_error(error)}); check the URL, the credentials, "
            "the region and AWS_ENDPOINT_URL"
        ) from error
    if not entries and not pattern and found.type == fs.FileType.NotFound:
        raise InputError(f"{url}: no such file or folder; check the URL")
    # Folders are compared part by part, as on disk. Keys with a double slash may have equal parts.
    files = {file.url: file for file in (_make_remote_file(scheme, entry) for entry in entries)}
    return sorted(files.values(), key=lambda file: (file.parts, file.url)), PurePosixPath(f"/{scheme}/{base}")


def _make_remote_file(scheme: str, info: Any) -> RemoteFile:
    """Return the file that a `pyarrow.fs.FileInfo` describes."""
    return RemoteFile(f"{scheme}://{info.path}", info.size or 0, info.mtime_ns or 0)


def _list_matches(filesystem: Any, path: str, pattern: tuple[str, ...]) -> list[Any]:
    """Return the files below a folder whose path matches a pattern, as objects of `pyarrow.fs.FileInfo`.

    Args:
        filesystem: The file system of `pyarrow.fs`.
        path: The folder, which need not exist.
        pattern: The parts of the pattern; all files below the folder match an empty one.

    Raises:
        OSError: The folder cannot be listed.
    """
    from pyarrow import fs

    # The rest of a pattern that may begin at any depth needs all files below the folder.
    is_recursive = not pattern or "**" in pattern[:1]
    # A bucket that may be listed only below a prefix cannot be asked for itself.
    selector = fs.FileSelector(path, recursive=is_recursive, allow_not_found=True)
    entries = filesystem.get_file_info(selector)
    if is_recursive:
        num_parts = len(PurePosixPath(path).parts)
        return [
            entry
            for entry in entries
            if entry.type == fs.FileType.File and _matches(PurePosixPath(entry.path).parts[num_parts:], pattern)
        ]
    matches: list[Any] = []
    for entry in entries:
        if not fnmatchcase(PurePosixPath(entry.path).name, pattern[0]):
            continue
        if entry.type == fs.FileType.Directory:
            matches += _list_matches(filesystem, entry.path, pattern[1:])
        elif len(pattern) == 1:
            matches.append(entry)
    return matches


def _split_pattern(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the part of a path without characters of patterns, and the remaining parts, which have them."""
    parts = path.split("/")
    num_fixed = next((index for index, part in enumerate(parts) if is_pattern(part)), len(parts))
    return "/".join(parts[:num_fixed]), tuple(part for part in parts[num_fixed:] if part)


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether the beginning of a path matches a pattern: the file itself, or a folder that contains it.

    Args:
        parts: The parts of the path.
        pattern: The parts of the pattern; `**` matches any number of parts.
    """
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _connect_to(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path of the URL in it: bucket and key.

    Raises:
        ConfigError: The URL has no bucket, or the endpoint is malformed.
        OSError: The region of the bucket cannot be found out.
    """
    scheme, path = url.split("://", 1)
    bucket = path.split("/", 1)[0]
    if not bucket or is_pattern(bucket):
        raise ConfigError(f"{url}: the URL must begin with the name of a bucket, such as s3://plant/logs")
    # The settings are arguments, so that a changed environment gives another connection.
    return (_connect_to_s3(bucket, *get_s3_server()) if scheme == "s3" else _connect_to_google()), path


def get_s3_server() -> tuple[str | None, str | None]:
    """Return the URL of the server for S3 and the region as the environment states them, None if it does not."""
    environ = os.environ
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    return endpoint, environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")


@lru_cache(maxsize=64)
def _connect_to_s3(bucket: str, endpoint: str | None, region: str | None) -> Any:
    """Return the file system of a bucket in S3.

    Args:
        bucket: The bucket.
        endpoint: The URL of a server other than Amazon's, None for Amazon's.
        region: The region; None to look it up, or, with an endpoint, for Arrow's default.
    """
    from pyarrow import fs

    if endpoint is None:
        region = region or fs.resolve_s3_region(bucket)
        return fs.S3FileSystem(region=region, connect_timeout=_CONNECT_SECONDS)
    server = urlsplit(endpoint)
    if server.scheme not in ("http", "https") or not server.netloc or "@" in server.netloc:
        raise ConfigError(
            "AWS_ENDPOINT_URL is not the URL of a server; write it as http://HOST:PORT or https://HOST, without "
            "credentials"
        )
    return fs.S3FileSystem(
        region=region, scheme=server.scheme, endpoint_override=server.netloc, connect_timeout=_CONNECT_SECONDS
    )


@lru_cache(maxsize=1)
def _connect_to_google() -> Any:
    """Return the file system of Google Cloud Storage, with the credentials of the environment."""
    from pyarrow import fs

    return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_CONNECT_SECONDS))
