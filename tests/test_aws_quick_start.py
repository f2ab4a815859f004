"""The examples of docs/run/aws.md run as they are written, against AWS on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from producers.aws.policies import Scope
from producers.broker.sqs.address import read
from tests.aws import ACCOUNT, Aws
from tests.processes import ROOT, free_port, guarded
from tests.producers.aws.users import user
from tests.waiting import PATIENCE_S

PAGE: Final = (ROOT / "docs" / "run" / "aws.md").read_text("utf-8")
#: Commands that go on until they are told to stop.
PROCESSES: Final = ("up", "worker", "gateway", "sweeper")
#: Commands of the page, and the port that is free here in place of 8000.
SHIM: Final = """#!/bin/sh
case $1 in up|gateway) set -- "$@" --port {port};; esac
exec {python} -P -m workers.cli "$@"
"""


def lines(heading: str) -> list[str]:
    """The commands of a section."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^    (\S.*)$", section, re.MULTILINE)


class Terminal:
    """Runs lines as a shell does in a folder of its own."""

    def __init__(self, folder: Path, aws: Aws) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        (folder / "penstock").write_text(SHIM.format(python=sys.executable, port=port))
        (folder / "penstock").chmod(0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BROKER", "STORE"))}
        path = f"{folder}:{os.environ['PATH']}"
        self._environ = {**kept, "PATH": path, "AWS_ENDPOINT_URL": aws.url, "PENSTOCK_URL": self.url}
        self._exports: list[str] = []
        self.users: dict[str, dict[str, str]] = {}
        """The credentials of a process, by its name; others have those of the tests."""

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def run(self, line: str) -> str:
        """Run a line to its end. Returns what it prints."""
        if line.startswith("export "):
            self._exports.append(line)
            return ""
        done = subprocess.run(
            self._shell(line), cwd=self._folder, env=self._environ_of(line), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, line: str) -> Iterator[None]:
        """Within it, the line's process runs; it ends as Ctrl-C ends it."""
        with (self._folder / "log").open("a") as log:
            process = subprocess.Popen(
                guarded(*self._shell(f"exec {line}")),
                cwd=self._folder,
                env=self._environ_of(line),
                stdout=log,
                stderr=log,
            )
        try:
            yield
            assert process.poll() is None, f"{line} ended: {(self._folder / 'log').read_text()}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)

    def ready(self) -> None:
        """Wait until a gateway serves a model."""
        deadline = time.monotonic() + 240
        while not self._serves():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return bool(json.loads(answer.read())["data"])
        except OSError:
            return False

    def _environ_of(self, line: str) -> dict[str, str]:
        role = next((role for role in self.users if re.search(rf"\b{role}\b", line)), "")
        return self._environ | self.users.get(role, {})

    def _shell(self, line: str) -> list[str]:
        return ["bash", "-c", "\n".join([*self._exports, line])]


def follow(terminal: Terminal, section: list[str]) -> list[str]:
    """Run a section's lines in order, processes beside all that follows. Returns what the others print."""
    printed = []
    with ExitStack() as running:
        serving = False
        for line in section:
            if line.split()[1] in PROCESSES:
                running.enter_context(terminal.running(line))
                serving = True
                continue
            if serving:
                terminal.ready()
            printed.append(terminal.run(line))
    return printed


@pytest.fixture
def terminal(tmp_path: Path, aws: Aws) -> Terminal:
    return Terminal(tmp_path, aws)


@pytest.mark.slow
def test_the_quick_start(terminal: Terminal, aws: Aws) -> None:
    _, setup, streamed, text = follow(terminal, lines("Quick start"))
    assert setup.count("created   queue pen-") == 5
    assert re.search(r"store   redis://:\*\*\*@127\.0\.0\.1:\d+/0, kept in ", terminal.log), "up's own server"
    assert streamed.strip()
    assert text.strip()
    for url in aws.client("sqs").list_queues()["QueueUrls"]:
        assert waiting(aws, url) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_several_machines_and_each_process_with_its_own_policy(terminal: Terminal, aws: Aws, valkey_url: str) -> None:
    scope = Scope(read("sqs://us-east-1"), ACCOUNT)
    terminal.users = {role: user(aws, role, scope) for role in ("setup", "worker", "gateway", "sweeper")}
    section = [line.replace("redis://10.0.0.5:6379/0", valkey_url) for line in lines("Several machines")]
    with aws.enforcing():
        *_, checked, text = follow(terminal, section)
        assert text.strip()
    assert checked.count("in order  queue pen-tiny") == 4
    assert "AccessDenied" not in terminal.log


def waiting(aws: Aws, url: str) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = aws.client("sqs").get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return sum(map(int, found.values()))
