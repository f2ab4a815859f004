"""Clients of other languages, which offer HTTP/2 with a request (`Upgrade: h2c`): it is answered as HTTP/1.1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from redis import Redis

from producers.contract import keys
from tests.conformance.javascript import run_source
from tests.producers.gateway.conftest import Door

CLIENTS = Path(__file__).parent / "clients"


def tasks(valkey: Redis) -> int:
    return len(list(valkey.scan_iter(keys.task("*"))))


def found(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program} on this machine (Debian: apt install {package})")
    return path


def test_the_jdks_client(door: Door, valkey: Redis, model: str) -> None:
    java = found("java", "openjdk-17-jdk-headless")
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
    command = [java, *flags, str(CLIENTS / "Client.java"), door.url, model]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.stdout.split("\n") == [*["202 HTTP_1_1"] * 3, "200 HTTP_1_1", "101", ""], run.stderr
    assert tasks(valkey) == 3


def test_nodes_fetch_and_http(door: Door, valkey: Redis, model: str) -> None:
    source = (CLIENTS / "client.mjs").read_text()
    run = run_source(source, door.url, model)
    assert run.stdout.split() == ["202"] * 4, run.stderr
    assert tasks(valkey) == 4


@pytest.mark.parametrize("framing", [[], ["-H", "Transfer-Encoding: chunked"]], ids=["Content-Length", "chunked"])
def test_curl_with_http2(door: Door, valkey: Redis, model: str, framing: list[str]) -> None:
    curl = found("curl", "curl")
    body = f'{{"model": "{model}", "prompt": "def f"}}'
    told = ["-sS", "--http2", "--max-time", "60", "-w", "%{http_code} %{http_version}\n", "-o", "/dev/null"]
    post = [f"{door.url}/v1/tasks", "-H", "Content-Type: application/json", *framing, "-d", body]
    command = [curl, *told, *post, "--next", *told, f"{door.url}/livez", "--next", *told, *post]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.stdout.split("\n") == ["202 1.1", "200 1.1", "202 1.1", ""], run.stderr
    assert tasks(valkey) == 2
