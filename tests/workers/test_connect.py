"""Servers that cannot serve are refused when the worker starts, with what to do instead."""

from __future__ import annotations

import pytest

from tests.processes import Worker, valkey
from workers.connect import check_server
from workers.errors import Refused


def test_a_cluster_is_refused() -> None:
    with valkey(**{"cluster-enabled": "yes"}) as (url, _):
        with pytest.raises(Refused, match=r"the store at .* is a Redis Cluster.*Use a single primary"):
            check_server(url, "store")
        worker = Worker(url)
        assert worker.process.wait(30) != 0
        assert "is a Redis Cluster" in worker.log.read_text()
        worker.log.unlink()


def test_a_single_server_is_taken(valkey_url: str) -> None:
    check_server(valkey_url, "broker")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense", "redis://[bad"])
def test_a_server_that_is_not_there_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="cannot reach the broker at"):
        check_server(url, "broker")
