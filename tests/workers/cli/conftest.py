"""A gateway with a fake worker behind it, and the commands run against it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import pytest
from typer.testing import CliRunner, Result

from tests.producers.conftest import worker
from tests.producers.gateway.conftest import Door, Open, model, open_door
from tests.workers.cli.running_up import up
from tests.workers.http_server import Handler, HttpServer
from workers import progress
from workers.cli import app_of, main
from workers.cli.local_pools import LocalPools, Plan
from workers.processes.supervisor import Program
from workers.settings import WorkerSettings

__all__ = ["model", "open_door", "up", "worker"]


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit status, and what it wrote."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    return open_door()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a `penstock` command within this process, which is too quick for progress on standard error."""
    monkeypatch.setattr(progress, "BELOW_S", 3600)

    def command(*args: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["penstock", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code
        assert status is None or isinstance(status, int)
        out, err = capfd.readouterr()
        return Ran(status or 0, out, err)

    return command


@pytest.fixture
def penstock(run: Run, door: Door, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run`, with the gateway's URL in the environment."""
    monkeypatch.setenv("PENSTOCK_URL", door.url)
    return run


@pytest.fixture
def operate(run: Run, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run`, with the test's Valkey as the broker and the store in the environment."""
    monkeypatch.setenv("BROKER_URL", valkey_url)
    return run


Answer = Callable[[BaseHTTPRequestHandler], None]


def send(status: int, body: bytes, **headers: str) -> Answer:
    """An answer that ends with its connection."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


class Scripted(HttpServer):
    """An HTTP server that answers each request as the next of `answers` says, and notes the paths."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.paths: list[str] = []
        scripted = self

        class Script(Handler):
            def do_GET(self) -> None:
                scripted.paths.append(self.path)
                answer = scripted.answers.pop(0) if scripted.answers else None
                if answer is not None:
                    answer(self)

            do_POST = do_GET

        super().__init__(Script)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


def invoke(*argv: str, env: Mapping[str, str] | None = None) -> Result:
    """Runs a command within this process. No other command is made, which spares 0.1 s."""
    return CliRunner().invoke(app_of(argv[0]), argv, env=env)


def told(monkeypatch: pytest.MonkeyPatch, *argv: str, env: Mapping[str, str] | None = None) -> WorkerSettings:
    """The settings that this `penstock worker` would run with."""
    given: list[WorkerSettings] = []
    monkeypatch.setattr("workers.runtime.worker.run_worker", lambda settings, level: given.append(settings) or 0)
    result = invoke(*argv, env=env)
    assert result.exit_code == 0, (result.output, result.exception)
    return given[0]


def worker_programs(plan: Plan, env: Mapping[str, str]) -> list[Program]:
    """The workers that a system on one machine would run at most, model by model."""
    pools = LocalPools(plan, "here.7.ab", env, lambda name, line: None)
    return [local.program(place) for local in pools.locals() for place in range(1, plan.rules.max + 1)]
