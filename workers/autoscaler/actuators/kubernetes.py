"""The actuator on Kubernetes: it sets the number of a Deployment's pods, and chooses which of them go first.

    kubernetes://NAMESPACE/DEPLOYMENT[?context=NAME]
    scale(target, first) ─▶ pods (listed by the selector of the scale) ─▶ deletion costs ─▶ the Deployment's scale

A pod that goes gets SIGTERM, and its worker drains. Rights: get and patch of deployments/scale, list and patch of pods;
with list of horizontalpodautoscalers it also refuses to work against one. The Deployment itself is never read.
Credentials: the file in KUBECONFIG, else the pod's service account, else ~/.kube/config. `context`: of such a file.

| dies after | state | who repairs it |
| --- | --- | --- |
| some deletion costs set | marked pods that run on | the next scale-in, which removes marks of pods that stay |
| all set, scale not patched | the same | the next tick scales |
| scale patched | pods that drain | nothing to repair |
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import SplitResult

from workers.autoscaler.actuators import SCHEMES, Actual, ActuatorError, Address, read

#: Time (s) until a HorizontalPodAutoscaler is looked for again.
RIVAL_S: Final = 60.0
#: Kubernetes ends the pods with the lowest cost first, among those that are ready.
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
#: The lowest cost there is, for the pod that goes first. Costs of operators are above these.
LOWEST: Final = -(2**31)
OURS: Final = 100_000
#: Reasons for which a container waits that the kubelet does not call its normal course.
_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
logger = logging.getLogger(__name__)
#: Longest time (s) that one request waits; and pods of one answer.
REQUEST_S: Final = 4.0
CHUNK: Final = 500


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
        """The largest number of starts in a row that failed in one pod."""
        self._well = {pod.metadata.uid: self._well.get(pod.metadata.uid, restarts(pod)) for pod in pods}
        self._well |= {pod.metadata.uid: restarts(pod) for pod in pods if ready(pod)}
        return max((failed_starts(pod, self._well[pod.metadata.uid]) for pod in pods), default=0)

    async def scale(self, target: int, first: Sequence[str]) -> None:
        """Set the number. Raises ActuatorError, also where a HorizontalPodAutoscaler sets it, too."""
        await self._refuse_rival()
        scale = await self._cluster.scale()
        current = scale.spec.replicas or 0
        if target == current:
            return
        if 0 < target < current:
            await self._mark(scale.status.selector or "", target, first)
        await self._cluster.set_replicas(target)

    async def _mark(self, selector: str, target: int, first: Sequence[str]) -> None:
        pods = [pod for pod in await self._cluster.pods(selector) if lives(pod)]
        marks = costs(pods, first, max(0, len(pods) - target))
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


def lives(pod: Any) -> bool:
    """Whether it counts towards the Deployment's number: it neither ends nor has ended."""
    return pod.metadata.deletionTimestamp is None and (pod.status.phase or "") not in ("Succeeded", "Failed")


def ailment(pod: Any) -> str:
    """The reason why a pod does not come up; empty while nothing is known to be wrong."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return f"pod {pod.metadata.name}: Unschedulable: {condition.message or 'no node has room for it'}"
    for container in _broken(pod):
        waiting = container.state.waiting
        why = ": ".join(part for part in (waiting.reason, waiting.message, _last_end(container)) if part)
        return f"pod {pod.metadata.name}: {why}"
    return ""


def failed_starts(pod: Any, before: int) -> int:
    """Starts of its containers that failed since it had been restarted `before` times; 0 if none is broken."""
    return max(1, restarts(pod) - before) if _broken(pod) else 0


def restarts(pod: Any) -> int:
    """The most restarts of one of its containers."""
    return max((container.restartCount or 0 for container in _containers(pod)), default=0)


def ready(pod: Any) -> bool:
    return any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions or ())


def costs(pods: Iterable[Any], first: Sequence[str], count: int) -> dict[str, str | None]:
    """The deletion costs to set so that `count` pods go in the order of `first`; None: the annotation goes.

    `first`: names of workers, which begin with their pod's host name. A pod of several goes as late as its last one.
    """
    new_costs: dict[str, str | None] = {}
    ranked = sorted((turn, pod.metadata.name) for pod in pods if (turn := _turn(pod, first)) is not None)
    for rank, (_, name) in enumerate(ranked[:count]):
        new_costs[name] = str(LOWEST + rank)
    for pod in pods:
        if pod.metadata.name not in new_costs and _is_ours(_cost(pod)):
            new_costs[pod.metadata.name] = None  # of a scale-in before, for another load
    return {pod.metadata.name: new_costs[pod.metadata.name] for pod in pods if _changes(pod, new_costs)}


def _turn(pod: Any, first: Sequence[str]) -> int | None:
    """The last rank of its workers; None without any."""
    host = pod.spec.hostname or pod.metadata.name[:63].rstrip("-.")  # longer ones are cut
    return max((rank for rank, name in enumerate(first) if name.startswith(f"{host}.")), default=None)


def _changes(pod: Any, costs: dict[str, str | None]) -> bool:
    return pod.metadata.name in costs and costs[pod.metadata.name] != _cost(pod)


def _cost(pod: Any) -> str | None:
    return (pod.metadata.annotations or {}).get(COST)


def _is_ours(cost: str | None) -> bool:
    try:
        return cost is not None and int(cost) < LOWEST + OURS
    except ValueError:
        return False


def _broken(pod: Any) -> list[Any]:
    """Containers that cannot be made, or that the kubelet starts again only after a pause."""
    waiting = [
        container
        for container in _containers(pod)
        if container.state is not None and container.state.waiting is not None
    ]
    return [container for container in waiting if (container.state.waiting.reason or "") not in _NORMAL]


def _containers(pod: Any) -> list[Any]:
    return [*(pod.status.initContainerStatuses or ()), *(pod.status.containerStatuses or ())]


def _last_end(container: Any) -> str:
    """The end of its last run, as text."""
    ended = container.lastState.terminated if container.lastState else None
    if ended is None:
        return ""
    return f"it ended with {ended.exitCode} ({ended.reason or 'no reason given'})"


class Cluster:
    """The API of one Deployment. Every method raises ActuatorError."""

    def __init__(self, namespace: str, deployment: str, context: str | None) -> None:
        """Raises ModuleNotFoundError without the library, ValueError without credentials."""
        import lightkube  # the first: its name is in the error where the extra is not installed
        from httpx2 import Timeout

        self._namespace, self._deployment = namespace, deployment
        self._client = lightkube.AsyncClient(_config(context), namespace=namespace, timeout=Timeout(REQUEST_S))
        self._sees_rivals = True

    async def scale(self) -> Any:
        """The Deployment's scale: `spec.replicas`, `status.selector`."""
        from lightkube.resources.apps_v1 import DeploymentScale

        async with _translated_errors(f"read the scale of {self._where}", "get on deployments/scale"):
            return await self._client.get(DeploymentScale, self._deployment)

    async def set_replicas(self, replicas: int) -> None:
        from lightkube.resources.apps_v1 import DeploymentScale
        from lightkube.types import PatchType

        async with _translated_errors(f"scale {self._where} to {replicas}", "patch on deployments/scale"):
            patch = {"spec": {"replicas": replicas}}
            await self._client.patch(DeploymentScale, self._deployment, patch, patch_type=PatchType.MERGE)

    async def pods(self, selector: str) -> list[Any]:
        """All pods of a selector, as the API writes it."""
        from lightkube.operators import exists
        from lightkube.resources.core_v1 import Pod

        if not selector:  # every pod of the namespace
            raise ActuatorError(f"{self._where} has no selector, so its pods cannot be told from others")
        async with _translated_errors(f"list the pods of {self._where}", "list on pods"):
            # The library writes `exists` of a label as the label alone: so the selector goes out as it came.
            return [pod async for pod in self._client.list(Pod, labels={selector: exists()}, chunk_size=CHUNK)]

    async def set_cost(self, pod: str, cost: str | None) -> None:
        """Set a pod's deletion cost; None removes it. A pod that is gone needs none."""
        from lightkube.resources.core_v1 import Pod
        from lightkube.types import PatchType

        patch = {"metadata": {"annotations": {COST: cost}}}
        async with _translated_errors(f"set the deletion cost of pod {pod}", "patch on pods", gone_is_fine=True):
            await self._client.patch(Pod, pod, patch, patch_type=PatchType.MERGE)

    async def rival(self) -> str:
        """The HorizontalPodAutoscaler of the same Deployment; empty without one, or without the right to list them."""
        from lightkube.resources.autoscaling_v2 import HorizontalPodAutoscaler

        try:
            async with _translated_errors(f"look for autoscalers of {self._where}", "list on horizontalpodautoscalers"):
                async for autoscaler in self._client.list(HorizontalPodAutoscaler):
                    target = autoscaler.spec.scaleTargetRef
                    if (target.kind, target.name) == ("Deployment", self._deployment):
                        return autoscaler.metadata.name or "" if autoscaler.metadata else ""
        except ActuatorError as error:
            if not isinstance(error, Denied):
                raise
            if self._sees_rivals:
                logger.info("%s. So a HorizontalPodAutoscaler of the same Deployment would not be noticed", error)
            self._sees_rivals = False
        return ""

    @property
    def _where(self) -> str:
        return f"deployment {self._namespace}/{self._deployment}"

    async def aclose(self) -> None:
        await self._client.close()


class Denied(ActuatorError):
    """The API server did not allow it."""


def _config(context: str | None) -> Any:
    """The connection's settings: of the file in KUBECONFIG, else the pod's service account, else ~/.kube/config."""
    from lightkube import KubeConfig
    from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG
    from lightkube.core.exceptions import ConfigError

    named = os.environ.get("KUBECONFIG")
    file = named or DEFAULT_KUBECONFIG
    try:
        return (KubeConfig.from_file(file) if named or context else KubeConfig.from_env()).get(context)
    except ConfigError as error:
        advice = "Run it in a pod with a service account, or name one file in KUBECONFIG"
        raise ValueError(f"no way to a Kubernetes cluster: {error}. {advice}") from error
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"the kubeconfig {file} makes no sense: {error!r}") from error


@asynccontextmanager
async def _translated_errors(doing: str, right: str, *, gone_is_fine: bool = False) -> AsyncIterator[None]:
    """Turns what the library raises into ActuatorError. `right`: the right that the request needs, for the message."""
    import httpx2
    from lightkube.core.exceptions import ApiError, ConfigError

    try:
        yield
    except ApiError as error:
        if error.status.code != 404 or not gone_is_fine:
            raise _refusal(doing, right, error.status.code or 0, error.status.message or "") from error
    except httpx2.HTTPStatusError as error:  # a proxy's answer, say
        raise _refusal(doing, right, error.response.status_code, error.response.reason_phrase) from error
    except httpx2.TimeoutException as error:
        raise ActuatorError(f"cannot {doing}: the API server did not answer within {REQUEST_S:g} s") from error
    except (httpx2.HTTPError, ConfigError, OSError, ValueError, KeyError) as error:
        raise ActuatorError(f"cannot {doing}: {str(error) or type(error).__name__}") from error


def _refusal(doing: str, right: str, code: int, message: str) -> ActuatorError:
    text = f"cannot {doing}: {code}: {message or 'no reason given'}"
    if code == 401:
        return Denied(f"{text} (the token is not, or no longer, good)")
    if code == 403:
        return Denied(f"{text} (its role needs {right})")
    if code == 404:
        return ActuatorError(f"{text} (wrong namespace or name, or another cluster)")
    if code == 409:
        return ActuatorError(f"{text} (something else changes it at the same time)")
    return ActuatorError(text)
