"""`/docs` shows all that /openapi.json has, and loads nothing from another host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tests.producers.gateway.conftest import Door

BROWSERS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")
#: As root there is no sandbox. Time is virtual: it passes only while nothing is loaded or computed. A whole browser
#: asks for updates, the time and dictionaries by itself, and finds no host but this one.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def test_the_page_and_what_it_loads_are_here(http: httpx.Client) -> None:
    page = http.get("/docs")
    loads = re.findall(r"""(?:href|src|url)(?:=|:\s*)["']([^"']+)""", page.text)
    assert {urlsplit(one).netloc for one in loads} == {""}
    answers = {one: http.get(urljoin("/docs", one)) for one in loads}
    assert len(answers) == 4
    assert {one: answer.status_code for one, answer in answers.items()} == dict.fromkeys(loads, 200)
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "object-src 'none'"} <= set(policy)
    assert "unsafe" not in page.headers["content-security-policy"]
    assert http.get("/docs/assets/none.js").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_run_nothing_that_a_stranger_could_put_in_them_and_are_in_no_frame(http: httpx.Client, path: str) -> None:
    """What stands in them is allowed by its hash."""
    page = http.get(path)
    policy = dict(line.split(" ", 1) for line in page.headers["content-security-policy"].split("; "))
    assert policy["frame-ancestors"] == "'none'"
    assert (page.headers["referrer-policy"], page.headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    for tag in ("script", "style"):
        texts = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in texts if text]
        assert policy[f"{tag}-src"].split() == ["'self'", *(f"'sha256-{one}'" for one in hashes)]
    assert not re.findall(r"\son\w+=|\sstyle=|javascript:", page.text)


def test_answers_are_kept_by_nobody_but_the_pages_files(http: httpx.Client) -> None:
    for path in ("/", "/docs", "/openapi.json", "/livez", "/v1/models", "/v1/tasks/none", "/nowhere", "/metrics"):
        assert http.get(path).headers.get_list("cache-control") == ["no-store"], path
    asset = http.get("/docs/assets/swagger-ui.css")
    again = http.get("/docs/assets/swagger-ui.css", headers={"if-none-match": asset.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.head("/docs/assets/swagger-ui.css").headers["content-length"] == str(len(asset.content))
    assert "cache-control" not in asset.headers
    assert (asset.headers["x-content-type-options"], asset.headers["content-type"][:8]) == ("nosniff", "text/css")


def test_lists_take_the_defaults_that_the_document_has(http: httpx.Client) -> None:
    """Clients that are made from it may send them."""
    defaults = {
        path: {
            one["name"]: one["schema"]["default"] for one in known.get("parameters", ()) if "default" in one["schema"]
        }
        for path, methods in http.get("/openapi.json").json()["paths"].items()
        if "{" not in path and (known := methods.get("get"))
    }
    assert defaults["/v1/files"]["order"] == "desc"
    answers = {path: http.get(path, params=sent).status_code for path, sent in defaults.items() if sent}
    assert answers == dict.fromkeys(answers, 200)


def test_the_document_says_what_a_response_takes_of_a_switch(http: httpx.Client) -> None:
    known = http.get("/openapi.json").json()["paths"]["/v1/responses/{response_id}"]["get"]["parameters"]
    schemas = {one["name"]: one["schema"] for one in known}
    assert schemas["stream"]["type"] == "boolean"
    assert schemas["include_obfuscation"]["enum"] == ["false"]


def test_a_file_that_is_uploaded_from_the_page_does_not_expire_unasked(http: httpx.Client) -> None:
    known = http.get("/openapi.json").json()["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert known["multipart/form-data"]["schema"]["properties"]["expires_after"]["example"] == {}


def test_a_browser_shows_every_operation_and_asks_no_other_host(door: Door, http: httpx.Client, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium-headless-shell)")
    log = tmp_path / "net.json"
    told = [*FLAGS, f"--user-data-dir={tmp_path}", f"--log-net-log={log}", "--enable-logging=stderr", "--dump-dom"]
    run = subprocess.run([browser, *told, f"{door.url}/docs"], capture_output=True, text=True, timeout=240, check=True)
    shown = run.stdout
    said = [line for line in run.stderr.splitlines() if "CONSOLE" in line and "source: chrome://" not in line]
    assert not said, "the policy refuses nothing that the page needs"
    paths = http.get("/openapi.json").json()["paths"]
    assert set(re.findall('data-path="(.+?)"', shown)) == paths.keys()
    assert shown.count('class="opblock opblock-') == sum(map(len, paths.values()))
    # What the page asks for, and not the browser.
    asked = re.findall(r'"network_isolation_key":"http://127\.0\.0\.1 .*"url":("http.+?")', log.read_text())
    assert {urlsplit(json.loads(url)).netloc for url in asked} == {urlsplit(door.url).netloc}
