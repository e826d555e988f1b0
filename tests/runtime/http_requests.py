"""Requests to the HTTP server of a process."""

from __future__ import annotations

import urllib.error
import urllib.request


def request(port: int, path: str) -> tuple[int, str]:
    """Return status and body of an HTTP request."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
