"""`kubernetes://NAMESPACE/DEPLOYMENT[?context=NAME]`: sets the number of a Deployment's pods.

Credentials: the file in KUBECONFIG, else the pod's service account, else ~/.kube/config. `context`: of such a file.

| dies after | what stands | who repairs it |
| --- | --- | --- |
| some deletion costs set | marked pods that run on | the next scale-in, which removes marks of pods that stay |
| all set, scale not patched | the same | the next tick scales |
| scale patched | pods that drain | nothing to repair |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import SplitResult

from workers.autoscaler.actuators import SCHEMES
from workers.autoscaler.actuators.base import Actual, ActuatorError, Address, read
from workers.autoscaler.actuators.kubernetes.cluster import Cluster
from workers.autoscaler.actuators.kubernetes.pods import ailment, costs, failed_starts, lives, ready, restarts

#: Time (s) until a HorizontalPodAutoscaler is looked for again.
RIVAL_S: Final = 60.0


def open_url(parts: SplitResult, **_: object) -> Kubernetes:
    """Raises ValueError for a wrong URL or kubeconfig, ModuleNotFoundError without the library."""
    return Kubernetes(read(parts, SCHEMES["kubernetes"][1], ("context",)))


class Kubernetes:
    """An Actuator."""

    def __init__(self, address: Address) -> None:
        self.name = f"kubernetes {address.host}/{address.name}"
        self._cluster = Cluster(address.host, address.name, address.options.get("context"))
        self._looked_at = float("-inf")
        self._well: dict[str, int] = {}
        """A pod's uid -> its restarts when it was first seen, or last ready: those before are no failures in a row."""

    async def actual(self) -> Actual:
        """The Deployment as it is now. Raises ActuatorError."""
        scale = await self._cluster.scale()
        pods = [pod for pod in await self._cluster.pods(scale.status.selector or "") if lives(pod)]
        ill = [why for pod in pods if (why := ailment(pod))]
        return Actual(scale.spec.replicas or 0, len(pods) - len(ill), ill[0] if ill else "", self._failures(pods))

    def _failures(self, pods: Sequence[Any]) -> int:
        """The most starts in a row that failed in one pod."""
        self._well = {pod.metadata.uid: self._well.get(pod.metadata.uid, restarts(pod)) for pod in pods}
        self._well |= {pod.metadata.uid: restarts(pod) for pod in pods if ready(pod)}
        return max((failed_starts(pod, self._well[pod.metadata.uid]) for pod in pods), default=0)

    async def scale(self, wanted: int, first: Sequence[str]) -> None:
        """Set the number. Raises ActuatorError, also where a HorizontalPodAutoscaler sets it, too."""
        await self._refuse_rival()
        scale = await self._cluster.scale()
        had = scale.spec.replicas or 0
        if wanted == had:
            return
        if 0 < wanted < had:
            await self._mark(scale.status.selector or "", wanted, first)
        await self._cluster.set_replicas(wanted)

    async def _mark(self, selector: str, wanted: int, first: Sequence[str]) -> None:
        pods = [pod for pod in await self._cluster.pods(selector) if lives(pod)]
        marks = costs(pods, first, max(0, len(pods) - wanted))
        await asyncio.gather(*(self._cluster.set_cost(pod, cost) for pod, cost in marks.items()))

    async def _refuse_rival(self) -> None:
        if time.monotonic() - self._looked_at < RIVAL_S:
            return
        rival = await self._cluster.rival()
        if rival:
            raise ActuatorError(
                f"{self.name}: the HorizontalPodAutoscaler {rival} sets its number, too. Delete it (or KEDA's "
                "ScaledObject), or run the autoscaler with --actuator export and let it act"
            )
        self._looked_at = time.monotonic()

    async def aclose(self) -> None:
        await self._cluster.aclose()
