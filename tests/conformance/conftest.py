"""One real system for all of these tests: Valkey, a worker with the bundled model, a gateway on a socket."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from redis import Redis

from producers.contract import keys
from producers.gateway import GatewaySettings
from tests.processes import Worker, valkey
from tests.waiting import PATIENCE_S, StepGate
from tests.warm import Forked, warm_gateway
from workers.cli.servers import open_port

TINY = Path(__file__).parents[2] / "workers" / "models" / "tiny"
#: Seconds; short, so that what is lost is found soon, and longer than a busy machine holds the worker up.
WORKER_LEASE = 10.0


@dataclass(frozen=True)
class System:
    store_url: str
    store: Redis
    worker: Worker
    url: str
    files_dir: str
    steps: StepGate

    def status(self, task_id: str) -> str | None:
        """`task_id` may have the prefix of an OpenAI id."""
        task_id = task_id.removeprefix("chat").removeprefix("cmpl-")
        found: str | None = self.store.hget(keys.task(task_id), "status")
        return found


@contextmanager
def gateway(store_url: str, port: int = 0, **fields: object) -> Iterator[tuple[str, BaseProcess]]:
    """A gateway process and its URL."""
    listener = open_port("127.0.0.1", port)
    settings = GatewaySettings(store_url, store_url, **fields)  # type: ignore[arg-type]
    process = warm_gateway(settings, listener)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    try:
        yield address, process
    finally:
        process.kill()
        process.join()


@contextmanager
def sweeping(store_url: str, files_dir: str, folder: Path) -> Iterator[None]:
    """A sweeper process, which writes its log into the folder."""
    options = ["--broker", store_url, "--files-dir", files_dir, "--log-level", "warning"]
    sweeper = Forked([sys.executable, "-m", "workers.cli", "sweeper", *options], {}, folder / "sweeper.log")
    try:
        yield
    finally:
        sweeper.terminate()
        sweeper.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    steps = StepGate(tmp_path_factory.mktemp("steps"))
    with valkey() as (store_url, store):
        worker = Worker(
            store_url,
            model=str(TINY),
            engine_factory="workers.runtime.worker:load_engine",
            engine={"dtype": "float32", "threads": 1},
            lease=WORKER_LEASE,
            warm=True,
            LOG_LEVEL="WARNING",
            **steps.environment,
        )
        with worker:
            worker.wait_until(lambda: bool(worker.incarnations), 180)
            files = str(tmp_path_factory.mktemp("files"))
            with gateway(store_url, files_dir=files) as (url, _):
                yield System(store_url, store, worker, url, files, steps)
