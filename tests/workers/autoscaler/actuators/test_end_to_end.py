"""The autoscaler with the Kubernetes actuator: out with the queue, in by the idlest pods, through its own restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from producers import AsyncClient
from tests.workers.autoscaler.actuators.kubernetes_server import Kubernetes
from tests.workers.autoscaler.conftest import Fleet, until
from workers.autoscaler.actuators import open_actuator
from workers.autoscaler.autoscaler import Autoscaler, AutoscalerSettings
from workers.autoscaler.policy.rules import Rules
from workers.autoscaler.pools import PoolSettings, Scaled, fixed

URL = "kubernetes://default/worker-tiny"
TINY = PoolSettings("tiny", rules=Rules(min=0, max=3, cool_down=0.5, step=0.05, default_knee=8.0), actuator=URL)


@asynccontextmanager
async def autoscaler(client: AsyncClient, name: str) -> AsyncIterator[None]:
    """A process's autoscaler, from its start to its end."""
    actuator = open_actuator(URL, model="tiny", broker="", store="")
    assert actuator is not None
    settings = AutoscalerSettings(name, lease=60.0, every=0.05, glance=0.02, look=0.05)
    task = asyncio.create_task(Autoscaler(client, fixed([Scaled(TINY, actuator)]), settings).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await actuator.aclose()


async def test_out_with_the_queue_and_in_by_the_idlest_pods(
    fleet: Fleet, aclient: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes = Kubernetes(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.config))
    async with autoscaler(aclient, "one"):
        fleet.fill(20)
        await until(lambda: kubernetes.replicas == 3)
    for pod, running in zip(list(kubernetes.pods), (3, 0, 5), strict=True):
        fleet.lease(f"{pod}.7", running=running)
    fleet.empty()
    fleet.fill(8)  # two workers' load
    async with autoscaler(aclient, "two"):
        await until(lambda: kubernetes.replicas == 2)
        assert list(kubernetes.pods) == ["worker-tiny-0", "worker-tiny-2"], "the idle pod went"
        fleet.end("worker-tiny-1.7")
        fleet.empty()
        await until(lambda: kubernetes.replicas == 0)
    assert fleet.history()[0]["by"] == "one"
    assert fleet.state()["wanted"] == 0
    kubernetes.close()
