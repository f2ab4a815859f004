"""The stage of an attack: a real Valkey, a gateway process that asks for keys, an attacker and a victim.

    with stage("--max-body", "65536") as hostile:             # further options of `penstock gateway`
        task_id = hostile.finished("attacker", tokens=20_000)  # a finished task with that many tokens in its stream
        links = [hostile.unread("attacker", f"/v1/tasks/{task_id}/events") for _ in range(150)]
        assert hostile.http("victim", "GET", "/v1/tasks").status_code == 200

The model `tiny` is published, with its tokenizer and chat template, and no worker runs: submitted tasks wait. With
`worker=True` one worker with the stub engine (`tests.stub_engine`) serves the model `stub`, too; a mapping has other
settings of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import keys as admin
from producers.connection.script import run
from producers.contract import keys
from producers.store.access.audit import Actor
from producers.store.protocol import admit
from tests.processes import Worker, free_port, running_valkey
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, QUEUE, publish
from tests.waiting import PATIENCE_S, within
from tests.warm import Forked

#: Scopes of an ordinary tenant's key.
TENANT: Final = ("submit", "read", "cancel")
#: Most tokens that one APPEND takes here.
BATCH: Final = 500


@dataclass(slots=True)
class Stage:
    """A gateway under attack. Callers are named: `attacker`, `victim`, `admin`, or who was given a key by `key`."""

    url: str
    """The store's."""
    redis: Redis
    port: int
    pid: int
    """The gateway's process, for its memory, its processor time or its pinning to a core."""
    log: Path
    """What the gateway says."""
    keys: dict[str, str] = field(default_factory=dict)
    """Caller -> its key's text."""
    _sockets: list[socket.socket] = field(default_factory=list)

    def key(self, caller: str, *, tenant: str | None = None, **fields: Any) -> str:
        """Make a key for a caller, of its own tenant unless told otherwise, with these fields and limits. Returns its
        text."""

        async def made() -> str:
            async with AsyncRedis.from_url(self.url) as store:
                _, token = await admin.create(store, {"tenant": tenant or caller, **fields}, Actor("test"))
            return token

        self.keys[caller] = asyncio.run(made())
        return self.keys[caller]

    def revoke(self, caller: str) -> None:
        """Revoke a caller's key, as `penstock keys revoke` does: not through the gateway."""

        async def done() -> None:
            async with AsyncRedis.from_url(self.url) as store:
                await admin.turn(store, self.keys[caller].split("_")[1], "revoke", Actor("test"))

        asyncio.run(done())

    def headers(self, caller: str | None) -> dict[str, str]:
        """The credentials of a caller; of None, none."""
        return {} if caller is None else {"authorization": f"Bearer {self.keys[caller]}"}

    def http(self, caller: str | None, method: str, path: str, **more: Any) -> httpx.Response:
        """One request on a connection of its own, which must be answered within a minute. `more`: as httpx takes it."""
        url, headers = f"http://127.0.0.1:{self.port}{path}", {**self.headers(caller), **more.pop("headers", {})}
        return httpx.request(method, url, headers=headers, timeout=PATIENCE_S, **more)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection to the gateway, closed at the end. `receive_buffer`: bytes that the kernel keeps unread."""
        link = socket.socket()
        if receive_buffer is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        link.settimeout(PATIENCE_S)
        link.connect(("127.0.0.1", self.port))
        self._sockets.append(link)
        return link

    def request(
        self, caller: str | None, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A request's bytes."""
        given = {"host": "stage", **self.headers(caller), **(headers or {})}
        if body:
            given["content-length"] = str(len(body))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def unread(self, caller: str, path: str) -> socket.socket:
        """A connection that has asked for this and takes nothing of the answer beyond what the kernel keeps (4 KB)."""
        link = self.connect(receive_buffer=4096)
        link.sendall(self.request(caller, "GET", path))
        return link

    def finished(self, tenant: str, *, tokens: int, text: str = " word", logprobs: int = 0) -> str:
        """The id of a finished task of this tenant, whose stream has so many tokens, each with this text and so many
        alternatives with their log probabilities."""
        task_id, now = f"{tenant}-{time.monotonic_ns()}", int(self.redis.time()[0] * 1000)  # type: ignore[index]
        record = {"task": "{}", "model": CARD.name, "version": CARD.version, "queue": QUEUE, "tier": "default", "n": 1}
        run(self.redis, admit(task_id, "", now, {**record, "tenant": tenant, "kind": "task"}))
        self.redis.hset(keys.task(task_id), mapping={"status": "queued", "queued": now})
        worker = FakeWorker(self.redis)
        assert worker.claim(task_id).answer == "go"
        scores = [(-0.123456, [(k, -1.234567 * k) for k in range(logprobs)])] * BATCH if logprobs else None
        for index in range(0, tokens, BATCH):
            count = min(BATCH, tokens - index)
            answer, _ = worker.append(task_id, index, [text] * count, logprobs=scores and scores[:count])
            assert answer == "ok"
        assert worker.finish(task_id, [tokens])[0] == "won"
        worker.settle(task_id)
        return task_id

    def close(self) -> None:
        for link in self._sockets:
            link.close()


def status_of(link: socket.socket) -> int:
    """The status of the answer that comes next on a raw connection: reads its first line only. 0: it was closed."""
    line = b""
    while not line.endswith(b"\r\n"):
        if not (byte := link.recv(1)):
            return 0
        line += byte
    return int(line.split()[1])


@contextlib.contextmanager
def stage(*options: str, worker: bool | Mapping[str, Any] = False) -> Iterator[Stage]:
    """A gateway process with these options besides `--auth keys`, ready; everything is ended afterwards."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_valkey())
        url = f"redis://127.0.0.1:{server.port}/0"
        redis = stack.enter_context(Redis.from_url(url))
        publish(redis)
        if worker:
            stack.enter_context(Worker(url, **(worker if isinstance(worker, Mapping) else {}))).wait_ready()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-hostile-")))
        port, log = free_port(), folder / "gateway.log"
        command = (
            "-m",
            "workers.cli",
            "gateway",
            "--broker",
            url,
            "--auth",
            "keys",
            "--port",
            str(port),
            "--files-dir",
            str(folder),
        )
        process = Forked((*command, *options), {}, log)
        stack.callback(_end, process)
        hostile = Stage(url, redis, port, process.pid, log)
        stack.callback(hostile.close)
        for caller in ("attacker", "victim"):
            hostile.key(caller, scopes=TENANT)
        hostile.key("admin", scopes=("admin",))
        assert within(lambda: process.poll() is not None or _ready(port)), log.read_text()
        assert process.poll() is None, log.read_text()
        yield hostile


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _end(process: Forked) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("the gateway did not stop") from None
