"""The console's files: small, of this server alone, and without a way to make markup of what others wrote."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import httpx
import pytest

from producers.gateway.console import STATIC
from tests.processes import ROOT

FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".svg"))
MODULES = [path for path in FILES if path.suffix == ".js"]


def test_all_files_together_are_small(http: httpx.Client) -> None:
    """A first visit loads all of them."""
    page = http.get("/console")
    sizes = [len(page.content), *(len(http.get(f"/console/assets/{path.name}").content) for path in FILES)]
    assert sum(sizes) < 200_000
    assert max(sizes) < 40_000


def test_the_page_lets_nothing_in_that_is_not_of_this_server(http: httpx.Client) -> None:
    headers = http.get("/console").headers
    policy = dict(line.split(" ", 1) for line in headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy.pop("trusted-types") == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert {name for name, value in policy.items() if value == "'none'"} == {
        *("default-src", "base-uri", "form-action", "frame-ancestors"),
    }
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    text = http.get("/console").text
    assert not re.findall(r"\son\w+=|\sstyle=|javascript:|<style|<script>|https?://", text)


def test_files_are_asked_for_again_only_when_they_have_changed(http: httpx.Client) -> None:
    first = http.get("/console/assets/app.js")
    assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache")
    again = http.get("/console/assets/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("none.js", "index.html", "..%2Fapp.py", "%2e%2e/app.py"):
        assert http.get(f"/console/assets/{name}").status_code == 404


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_makes_markup_code_or_requests_of_its_own(path: Path) -> None:
    source = path.read_text()
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\b"
        r"|new Function|setHTML|sessionStorage|indexedDB|document\.cookie",
        source,
    )
    assert "https:" not in source
    assert path.name == "api.js" or not re.findall(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource", source)
    assert path.name == "app.js" or "localStorage" not in source


def test_the_wheel_has_the_files() -> None:
    """Each is matched by the package's data."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["producers"]
    matched = {path for pattern in data for path in (ROOT / "producers").glob(pattern)}
    assert {*FILES, STATIC / "index.html"} <= matched
