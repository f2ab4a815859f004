"""Actuators on AWS: an ECS service, and an EC2 Auto Scaling group.

    actual, scale ─▶ a thread with boto3's client ─▶ AWS; its refusals name the action that the role lacks

Neither hands out work: a worker that goes drains by SIGTERM, or by what its instance's metadata say. What each process
may do in AWS is in `producers/aws/policies.py`.

`ecs://CLUSTER/SERVICE[?region=R]` sets the desired count of an ECS service. ECS itself chooses which tasks end, among
those that are not protected: a worker that holds tasks protects its own (`workers/runtime/aws.py`). So
only idle workers end, and a pool of busy ones stays until one is idle.

`ec2://GROUP[?region=R]` sets the desired capacity of a group, and which instances go first. A worker is found by
its name, which begins with its instance's id: `--name "$INSTANCE_ID.1"`. Where an instance runs several workers, it
goes as late as the last of them. Instances without a worker, which still boot, go before all. An instance that goes
waits in the group's lifecycle hook. Its metadata announce it, and its workers drain (`--spot-provider aws`). Nobody
completes the hook: it ends by its heartbeat timeout, the drain time and 30 s.

| dies after | state | who repairs it |
| --- | --- | --- |
| UpdateService | tasks that start or drain | nothing to repair |
| some of the instances were ended | the capacity is lower by these; the others run | the next tick takes the others |
| SetDesiredCapacity | instances that start | nothing to repair |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult

from producers.connection.aws import AwsError, AwsNotInstalled, aws_errors, client, partition_of
from workers.autoscaler.actuators import SCHEMES, Actual, ActuatorError, Address, read

T = TypeVar("T")
#: Options of the URLs; `endpoint`: another server than AWS's.
OPTIONS: Final = ("region", "endpoint")
#: Silence (s) after which a request is tried once more, within the time limit of a call (`workers.autoscaler.control`).
SILENT_S: Final = 4.0
#: Number of activities that are read to explain why instances do not come.
ACTIVITIES: Final = 20
#: Stop codes of tasks that failed.
_FAILED: Final = frozenset({"TaskFailedToStart", "EssentialContainerExited"})
_STEADY: Final = "has reached a steady state"


class Calls:
    """`client`: of the service, for use within `run`."""

    def __init__(self, name: str, service: str, address: Address) -> None:
        """Raises ModuleNotFoundError without boto3, ValueError without a region."""
        try:
            self.client: Any = client(
                service, address.options.get("region"), address.options.get("endpoint"), silent_s=SILENT_S
            )
        except AwsNotInstalled as error:
            raise ModuleNotFoundError(str(error), name="boto3") from error
        except AwsError as error:
            raise ValueError(f"{name}: {str(error).rstrip('.')}: give ?region=REGION") from error
        self._name = name
        # One thread: what hangs holds up the next call alone, which its time limit ends.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="actuator")

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function of blocking calls. AwsError becomes ActuatorError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except AwsError as error:
            raise ActuatorError(f"{self._name}: {error}") from error

    async def aclose(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def open_url(parts: SplitResult, **_: object) -> Ecs | Ec2:
    """The actuator of an ECS or EC2 URL. Raises ValueError for a wrong URL, ModuleNotFoundError without boto3."""
    if parts.scheme == "ecs":
        return Ecs(read(parts, SCHEMES["ecs"][1], OPTIONS))
    return Ec2(read(parts, SCHEMES["ec2"][1], OPTIONS, named=False))


def group_arn(parts: SplitResult, region: str, account: str) -> str:
    """The ARN of the group, whose id nobody knows, in its URL's region if it has one. Raises ValueError."""
    address = read(parts, SCHEMES["ec2"][1], OPTIONS, named=False)
    region = address.options.get("region", region)
    group = f"autoScalingGroup:*:autoScalingGroupName/{address.host}"
    return f"arn:{partition_of(region)}:autoscaling:{region}:{account}:{group}"


class Ec2:
    """An Actuator."""

    def __init__(self, address: Address) -> None:
        self.name = f"ec2 {address.host}"
        self._group = address.host
        self._calls = Calls(self.name, "autoscaling", address)

    async def actual(self) -> Actual:
        """The group as it is now. Raises ActuatorError."""
        return await self._calls.run(self._actual)

    async def scale(self, target: int, first: Sequence[str]) -> None:
        """Set the capacity, or have instances go. Raises ActuatorError, also where the group allows no such size."""
        await self._calls.run(lambda: self._scale(target, first))

    async def aclose(self) -> None:
        await self._calls.aclose()

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _actual(self) -> Actual:
        group = self._described()
        up = len(_living(group))
        why, failures = failures_of(self._activities()) if up < group["DesiredCapacity"] else ("", 0)
        return Actual(group["DesiredCapacity"], up, why, failures)

    def _scale(self, target: int, first: Sequence[str]) -> None:
        group = self._described()
        minimum, maximum, current = group["MinSize"], group["MaxSize"], group["DesiredCapacity"]
        allowed = min(max(target, minimum), maximum)
        if allowed > current:
            with aws_errors(f"set its capacity to {allowed}", "autoscaling:SetDesiredCapacity"):
                self._calls.client.set_desired_capacity(AutoScalingGroupName=self._group, DesiredCapacity=allowed)
        elif allowed < current:
            self._shrink(_living(group), current - allowed, first)
        if allowed != target:
            raise ActuatorError(
                f"{self.name}: {target} instances are wanted, and the group allows {minimum} to {maximum}; change its "
                "MinSize or MaxSize, or the autoscaler's --min or --max"
            )

    def _shrink(self, living: Sequence[str], count: int, first: Sequence[str]) -> None:
        for instance in victims(self.name, living, count, first):
            with aws_errors(f"end {instance}", "autoscaling:TerminateInstanceInAutoScalingGroup"):
                self._calls.client.terminate_instance_in_auto_scaling_group(
                    InstanceId=instance, ShouldDecrementDesiredCapacity=True
                )

    def _described(self) -> dict[str, Any]:
        with aws_errors("look at the group", "autoscaling:DescribeAutoScalingGroups"):
            response = self._calls.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self._group])
        if not response["AutoScalingGroups"]:
            region = self._calls.client.meta.region_name
            raise ActuatorError(f"{self.name}: there is no such group in {region} (wrong region or name?)")
        group: dict[str, Any] = response["AutoScalingGroups"][0]
        return group

    def _activities(self) -> list[dict[str, Any]]:
        with aws_errors("look at the group's activities", "autoscaling:DescribeScalingActivities"):
            response = self._calls.client.describe_scaling_activities(
                AutoScalingGroupName=self._group, MaxRecords=ACTIVITIES
            )
        activities: list[dict[str, Any]] = response["Activities"]
        return activities


def _living(group: dict[str, Any]) -> list[str]:
    """Ids of the instances that run or start."""
    states = ((instance["InstanceId"], instance["LifecycleState"]) for instance in group["Instances"])
    return [instance for instance, state in states if state == "InService" or state.startswith("Pending")]


def victims(name: str, living: Sequence[str], count: int, first: Sequence[str]) -> list[str]:
    """The instances that go: those without a worker, then in the order of `first`. Raises ActuatorError."""
    turn = {worker.partition(".")[0]: rank for rank, worker in enumerate(first)}
    if count < len(living) and first and not any(instance in turn for instance in living):
        raise ActuatorError(
            f"{name}: the worker {first[0]!r} is on none of its instances, so the idle ones cannot be told; start "
            'workers with --name "$INSTANCE_ID.1"'
        )
    return sorted(living, key=lambda instance: turn.get(instance, -1))[:count]


def failures_of(activities: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """The reason why the last launches failed, and the number of them in a row. `activities`: the newest first."""
    launches = [activity for activity in activities if str(activity.get("Description", "")).startswith("Launching")]
    ended = [launch for launch in launches if launch["StatusCode"] in ("Failed", "Cancelled", "Successful")]
    failed = 0
    for launch in ended:
        if launch["StatusCode"] == "Successful":
            break
        failed += 1
    return (str(ended[0].get("StatusMessage") or ended[0].get("Cause", "")), failed) if failed else ("", 0)


def service_arn(parts: SplitResult, region: str, account: str) -> str:
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

    async def scale(self, target: int, first: Sequence[str]) -> None:
        """Set the number; ECS ends idle tasks, whatever is `first`. Raises ActuatorError."""
        await self._calls.run(lambda: self._scale(target))

    async def aclose(self) -> None:
        await self._calls.aclose()

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _scale(self, target: int) -> None:
        if self._described()["desiredCount"] == target:
            return
        with aws_errors(f"set the count to {target}", "ecs:UpdateService"):
            self._calls.client.update_service(cluster=self._cluster, service=self._service, desiredCount=target)

    def _actual(self) -> Actual:
        service = self._described()
        lacks = service["runningCount"] < service["desiredCount"]
        return actual_of(service, self._stopped() if lacks else [])

    def _described(self) -> dict[str, Any]:
        with aws_errors("look at the service", "ecs:DescribeServices"):
            response = self._calls.client.describe_services(cluster=self._cluster, services=[self._service])
        services = [service for service in response["services"] if service["status"] == "ACTIVE"]
        if not services:
            region = self._calls.client.meta.region_name
            raise ActuatorError(f"{self.name}: there is no such active service in {region} (wrong region or name?)")
        service: dict[str, Any] = services[0]
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
            response = self._calls.client.describe_tasks(cluster=self._cluster, tasks=listed["taskArns"])
        tasks: list[dict[str, Any]] = response["tasks"]
        return tasks


def actual_of(service: dict[str, Any], stopped: Sequence[dict[str, Any]]) -> Actual:
    """The state by a service's description and those of its stopped tasks."""
    up = service["runningCount"] + service["pendingCount"]
    newest: dict[str, Any] = next(
        (deployment for deployment in service.get("deployments", ()) if deployment["status"] == "PRIMARY"), {}
    )
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
    """Whether a container failed. A worker that drained ends with 0."""
    return any(container.get("exitCode", 1) != 0 for container in task.get("containers", ())) or not task["containers"]


def _seconds(at: Any) -> float:
    return float(at.timestamp()) if at is not None else 0.0


def _end(task: dict[str, Any]) -> str:
    """The text of why a task stopped."""
    parts = [str(task.get("stoppedReason", ""))]
    for container in task.get("containers", ()):
        status = f"{container.get('name')} exited with {container['exitCode']}" if "exitCode" in container else ""
        parts += [status, container.get("reason", "")]
    return f"task {task['taskArn'].rpartition('/')[2]}: " + ": ".join(part for part in parts if part)


def _event(service: dict[str, Any]) -> str:
    """The service's last complaint since its last steady state: that no instance has room, say."""
    for event in service.get("events", ()):
        if _STEADY in event["message"]:
            return ""
        if "unable to" in event["message"]:
            return str(event["message"])
    return ""
