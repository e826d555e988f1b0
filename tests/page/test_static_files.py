"""The files of other projects are those that their authors have published."""

from __future__ import annotations

import hashlib
import re

from deformer_stream.page.views import STATIC_FOLDER


def test_scripts_of_other_projects_are_unchanged_and_have_their_licences() -> None:
    folder = STATIC_FOLDER / "vendor"
    rows = re.findall(r"^\| (\S+\.js) \| \S+ \| 0BSD \| ([0-9a-f]{64}) \|$", (folder / "README.md").read_text(), re.M)
    sum_by_name = dict(rows)
    assert set(sum_by_name) == {path.name for path in folder.glob("*.js")}
    for name, expected in sum_by_name.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    for name in ("htmx", "htmx-ext-sse"):
        assert "purpose with or without fee is hereby" in (folder / f"{name}-LICENSE.txt").read_text()


def test_own_files_load_nothing_from_other_hosts() -> None:
    for name in ("page.css", "page.js", "icon.svg"):
        text = (STATIC_FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.M) or "http" not in text
        assert "@import" not in text
        assert "url(" not in text
