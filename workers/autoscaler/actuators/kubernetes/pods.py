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

    `first`: names of workers, which begin with their pod's host name. A pod of several goes as late as its last one.
    """
    found: dict[str, str | None] = {}
    known = sorted((turn, pod.metadata.name) for pod in pods if (turn := _turn(pod, first)) is not None)
    for place, (_, name) in enumerate(known[:count]):
        found[name] = str(LOWEST + place)
    for pod in pods:
        if pod.metadata.name not in found and _is_ours(_cost(pod)):
            found[pod.metadata.name] = None  # of a scale-in before, for another load
    return {pod.metadata.name: found[pod.metadata.name] for pod in pods if _changes(pod, found)}


def _turn(pod: Any, first: Sequence[str]) -> int | None:
    """The last place of its workers; None where it has none."""
    host = pod.spec.hostname or pod.metadata.name[:63].rstrip("-.")  # longer ones are cut
    return max((place for place, name in enumerate(first) if name.startswith(f"{host}.")), default=None)


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
