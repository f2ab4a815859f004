"""Reads a Deployment's pods: which of them live, what ails them, and which go first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

#: Kubernetes ends the pods with the lowest cost first, among those that are ready.
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
#: The lowest cost there is, for the pod that goes first. Costs of operators are above these.
LOWEST: Final = -(2**31)
OURS: Final = 100_000

#: Reasons for which a container waits that the kubelet does not call its normal course.
_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing", ""})


def lives(pod: Any) -> bool:
    """Whether it counts towards the Deployment's number: it neither ends nor has ended."""
    return pod.metadata.deletionTimestamp is None and (pod.status.phase or "") not in ("Succeeded", "Failed")


def ailment(pod: Any) -> str:
    """Why a pod does not come up, in words; empty while nothing is known to be wrong."""
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
    """How often its containers were started anew."""
    return max((container.restartCount or 0 for container in _containers(pod)), default=0)


def ready(pod: Any) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())


def costs(pods: Iterable[Any], first: Sequence[str], count: int) -> dict[str, str | None]:
    """The deletion costs to set so that `count` pods go in the order of `first`; None: the annotation goes.

    `first`: names of workers, `HOST.PID`, whose HOST is the pod's. A pod of several goes as late as the last of them.
    """
    turn = {name.rpartition(".")[0] or name: place for place, name in enumerate(first)}
    found: dict[str, str | None] = {}
    known = sorted((pod for pod in pods if host(pod) in turn), key=lambda pod: turn[host(pod)])
    for place, pod in enumerate(known[:count]):
        found[pod.metadata.name] = str(LOWEST + place)
    for pod in pods:
        if pod.metadata.name not in found and _is_ours(_cost(pod)):
            found[pod.metadata.name] = None  # of a scale-in before, for another load
    return {pod.metadata.name: found[pod.metadata.name] for pod in pods if _changes(pod, found)}


def host(pod: Any) -> str:
    """The pod's host name, with which its worker's name begins: its own name, of which the kernel takes 63 letters."""
    return str(pod.spec.hostname or pod.metadata.name[:63].rstrip("-."))


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
    found = [one for one in _containers(pod) if one.state is not None and one.state.waiting is not None]
    return [one for one in found if (one.state.waiting.reason or "") not in _NORMAL]


def _containers(pod: Any) -> list[Any]:
    return [*(pod.status.initContainerStatuses or ()), *(pod.status.containerStatuses or ())]


def _last_end(container: Any) -> str:
    """How its last run ended."""
    ended = container.lastState.terminated if container.lastState else None
    if ended is None:
        return ""
    return f"it ended with {ended.exitCode} ({ended.reason or 'no reason given'})"
