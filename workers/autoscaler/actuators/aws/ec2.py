"""`ec2://GROUP[?region=R]`: sets the desired capacity of an EC2 Auto Scaling group, and says which instances go first.

A worker is found by its name, which begins with its instance's id: `--name "$INSTANCE_ID.1"`. Where an instance runs
several workers, it goes as late as the last of them. Instances without a worker, which still boot, go before all.

An instance that goes waits in the group's lifecycle hook. Its metadata say so, and its workers drain
(`--spot-provider aws`). Nobody completes the hook: it ends by its heartbeat timeout, the drain time and 30 s.

| dies after | what stands | who repairs it |
| --- | --- | --- |
| some of the instances told to go | the capacity is lower by these; the others run | the next tick takes the others |
| SetDesiredCapacity | instances that start | nothing to repair |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import SplitResult

from producers.connection.aws import aws_errors, partition_of
from workers.autoscaler.actuators import SCHEMES
from workers.autoscaler.actuators.aws.calls import OPTIONS, Calls
from workers.autoscaler.actuators.base import Actual, ActuatorError, Address, read

#: Activities that are looked at to say why instances do not come.
ACTIVITIES: Final = 20


def open_url(parts: SplitResult, **_: object) -> Ec2:
    """Raises ValueError for a wrong URL, ModuleNotFoundError without boto3."""
    return Ec2(read(parts, SCHEMES["ec2"][1], OPTIONS, named=False))


def arn(parts: SplitResult, region: str, account: str) -> str:
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

    async def scale(self, wanted: int, first: Sequence[str]) -> None:
        """Set the capacity, or have instances go. Raises ActuatorError, also where the group allows no such size."""
        await self._calls.run(lambda: self._scale(wanted, first))

    async def aclose(self) -> None:
        await self._calls.aclose()

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _actual(self) -> Actual:
        group = self._described()
        up = len(_living(group))
        why, failures = failures_of(self._activities()) if up < group["DesiredCapacity"] else ("", 0)
        return Actual(group["DesiredCapacity"], up, why, failures)

    def _scale(self, wanted: int, first: Sequence[str]) -> None:
        group = self._described()
        least, most, had = group["MinSize"], group["MaxSize"], group["DesiredCapacity"]
        allowed = min(max(wanted, least), most)
        if allowed > had:
            with aws_errors(f"set its capacity to {allowed}", "autoscaling:SetDesiredCapacity"):
                self._calls.client.set_desired_capacity(AutoScalingGroupName=self._group, DesiredCapacity=allowed)
        elif allowed < had:
            self._shrink(_living(group), had - allowed, first)
        if allowed != wanted:
            raise ActuatorError(
                f"{self.name}: {wanted} instances are wanted, and the group allows {least} to {most}; change its "
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
            said = self._calls.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self._group])
        if not said["AutoScalingGroups"]:
            region = self._calls.client.meta.region_name
            raise ActuatorError(f"{self.name}: there is no such group in {region} (wrong region or name?)")
        group: dict[str, Any] = said["AutoScalingGroups"][0]
        return group

    def _activities(self) -> list[dict[str, Any]]:
        with aws_errors("look at the group's activities", "autoscaling:DescribeScalingActivities"):
            said = self._calls.client.describe_scaling_activities(
                AutoScalingGroupName=self._group, MaxRecords=ACTIVITIES
            )
        activities: list[dict[str, Any]] = said["Activities"]
        return activities


def _living(group: dict[str, Any]) -> list[str]:
    """Ids of the instances that run or start."""
    states = ((one["InstanceId"], one["LifecycleState"]) for one in group["Instances"])
    return [instance for instance, state in states if state == "InService" or state.startswith("Pending")]


def victims(name: str, living: Sequence[str], count: int, first: Sequence[str]) -> list[str]:
    """The instances that go: those without a worker, then in the order of `first`. Raises ActuatorError."""
    turn = {worker.partition(".")[0]: place for place, worker in enumerate(first)}
    if count < len(living) and first and not any(instance in turn for instance in living):
        raise ActuatorError(
            f"{name}: the worker {first[0]!r} is on none of its instances, so the idle ones cannot be told; start "
            'workers with --name "$INSTANCE_ID.1"'
        )
    return sorted(living, key=lambda instance: turn.get(instance, -1))[:count]


def failures_of(activities: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """Why the last launches failed, and how many of them in a row. `activities`: the newest first."""
    launches = [one for one in activities if str(one.get("Description", "")).startswith("Launching")]
    ended = [one for one in launches if one["StatusCode"] in ("Failed", "Cancelled", "Successful")]
    failed = 0
    for one in ended:
        if one["StatusCode"] == "Successful":
            break
        failed += 1
    return (str(ended[0].get("StatusMessage") or ended[0].get("Cause", "")), failed) if failed else ("", 0)
