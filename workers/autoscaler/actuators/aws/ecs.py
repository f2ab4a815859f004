"""`ecs://CLUSTER/SERVICE[?region=R]`: sets the desired count of an ECS service.

ECS itself chooses which tasks end, among those that are not protected: a worker that holds tasks protects its own
(`workers/runtime/host/task_protection.py`). So only idle workers end, and a pool of busy ones stays until one is idle.

| dies after | what stands | who repairs it |
| --- | --- | --- |
| UpdateService | tasks that start or drain | nothing to repair |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import SplitResult

from producers.connection.aws import aws_errors, partition_of
from workers.autoscaler.actuators import SCHEMES
from workers.autoscaler.actuators.aws.calls import OPTIONS, Calls
from workers.autoscaler.actuators.base import Actual, ActuatorError, Address, read

#: How a task ends that did not do its work.
_FAILED: Final = frozenset({"TaskFailedToStart", "EssentialContainerExited"})
_STEADY: Final = "has reached a steady state"


def open_url(parts: SplitResult, **_: object) -> Ecs:
    """Raises ValueError for a wrong URL, ModuleNotFoundError without boto3."""
    return Ecs(read(parts, SCHEMES["ecs"][1], OPTIONS))


def arn(parts: SplitResult, region: str, account: str) -> str:
    """The service's ARN, in its URL's region if it has one. Raises ValueError."""
    address = read(parts, SCHEMES["ecs"][1], OPTIONS)
    region = address.options.get("region", region)
    return f"arn:{partition_of(region)}:ecs:{region}:{account}:service/{address.host}/{address.name}"


class Ecs:
    """An Actuator."""

    def __init__(self, address: Address) -> None:
        self.name = f"ecs {address.host}/{address.name}"
        self._cluster, self._service = address.host, address.name
        self._calls = Calls(self.name, "ecs", address)

    async def actual(self) -> Actual:
        """The service as it is now. Raises ActuatorError."""
        return await self._calls.run(self._actual)

    async def scale(self, wanted: int, first: Sequence[str]) -> None:
        """Set the number; ECS ends idle tasks, whatever is `first`. Raises ActuatorError."""
        await self._calls.run(lambda: self._scale(wanted))

    async def aclose(self) -> None:
        await self._calls.aclose()

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _scale(self, wanted: int) -> None:
        if self._described()["desiredCount"] == wanted:
            return
        with aws_errors(f"set the count to {wanted}", "ecs:UpdateService"):
            self._calls.client.update_service(cluster=self._cluster, service=self._service, desiredCount=wanted)

    def _actual(self) -> Actual:
        service = self._described()
        lacks = service["runningCount"] < service["desiredCount"]
        return actual_of(service, self._stopped() if lacks else [])

    def _described(self) -> dict[str, Any]:
        with aws_errors("look at the service", "ecs:DescribeServices"):
            said = self._calls.client.describe_services(cluster=self._cluster, services=[self._service])
        found = [one for one in said["services"] if one["status"] == "ACTIVE"]
        if not found:
            region = self._calls.client.meta.region_name
            raise ActuatorError(f"{self.name}: there is no such active service in {region} (wrong region or name?)")
        service: dict[str, Any] = found[0]
        return service

    def _stopped(self) -> list[dict[str, Any]]:
        """Tasks of the last hour that ended."""
        with aws_errors("list stopped tasks", "ecs:ListTasks"):
            listed = self._calls.client.list_tasks(
                cluster=self._cluster, serviceName=self._service, desiredStatus="STOPPED", maxResults=20
            )
        if not listed["taskArns"]:
            return []
        with aws_errors("look at stopped tasks", "ecs:DescribeTasks"):
            said = self._calls.client.describe_tasks(cluster=self._cluster, tasks=listed["taskArns"])
        tasks: list[dict[str, Any]] = said["tasks"]
        return tasks


def actual_of(service: dict[str, Any], stopped: Sequence[dict[str, Any]]) -> Actual:
    """The state by a service's description and those of its stopped tasks."""
    up = service["runningCount"] + service["pendingCount"]
    newest: dict[str, Any] = next((one for one in service.get("deployments", ()) if one["status"] == "PRIMARY"), {})
    lacks = service["runningCount"] < service["desiredCount"]
    why = (_why(newest, stopped) or _event(service)) if lacks else ""
    return Actual(service["desiredCount"], up, why, int(newest.get("failedTasks", 0)))


def _why(deployment: dict[str, Any], stopped: Sequence[dict[str, Any]]) -> str:
    failed = [task for task in stopped if task.get("stopCode") in _FAILED and _has_failed(task)]
    if failed:
        return _end(max(failed, key=lambda task: _seconds(task.get("stoppedAt"))))
    if deployment.get("rolloutState") == "FAILED":
        return str(deployment.get("rolloutStateReason") or "its deployment failed")
    return ""


def _has_failed(task: dict[str, Any]) -> bool:
    """A worker that drained ends with 0."""
    return any(container.get("exitCode", 1) != 0 for container in task.get("containers", ())) or not task["containers"]


def _seconds(at: Any) -> float:
    return float(at.timestamp()) if at is not None else 0.0


def _end(task: dict[str, Any]) -> str:
    """Why a task stopped, in words."""
    parts = [str(task.get("stoppedReason", ""))]
    for container in task.get("containers", ()):
        status = f"{container.get('name')} exited with {container['exitCode']}" if "exitCode" in container else ""
        parts += [status, container.get("reason", "")]
    return f"task {task['taskArn'].rpartition('/')[2]}: " + ": ".join(part for part in parts if part)


def _event(service: dict[str, Any]) -> str:
    """The service's last complaint since all was well: that no instance has room, say."""
    for event in service.get("events", ()):
        if _STEADY in event["message"]:
            return ""
        if "unable to" in event["message"]:
            return str(event["message"])
    return ""
