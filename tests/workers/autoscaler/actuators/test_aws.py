"""The actuators on AWS, against moto's server: what they set, which instances go, and what they say when refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from producers.aws.policies import Scope
from producers.broker.sqs.address import read
from tests.aws import ACCOUNT, REGION, Aws
from tests.producers.aws.users import user
from workers.autoscaler.actuators import Actual, Actuator, ActuatorError, open_actuator
from workers.autoscaler.actuators.aws import actual_of, failures_of
from workers.cli.aws import arns_of


def opened(aws: Aws, url: str) -> Actuator:
    made = open_actuator(f"{url}?region={REGION}&endpoint={aws.url}", model="tiny", broker="", store="")
    assert made is not None
    return made


@pytest.fixture
def service(aws: Aws) -> Any:
    """An ECS service of no tasks; what it now is, when called."""
    ecs = aws.client("ecs")
    ecs.create_cluster(clusterName="gpu")
    container = {"name": "worker", "image": "penstock", "memory": 512}
    ecs.register_task_definition(family="worker", containerDefinitions=[container])
    ecs.create_service(cluster="gpu", serviceName="worker-tiny", taskDefinition="worker", desiredCount=0)
    return lambda: ecs.describe_services(cluster="gpu", services=["worker-tiny"])["services"][0]


@pytest_asyncio.fixture
async def ecs(aws: Aws, service: Any) -> AsyncIterator[Actuator]:
    made = opened(aws, "ecs://gpu/worker-tiny")
    yield made
    await made.aclose()


@pytest.fixture
def group(aws: Aws) -> Any:
    """An Auto Scaling group of 0 to 4 instances; what it now is, when called."""
    scaling = aws.client("autoscaling")
    scaling.create_launch_configuration(LaunchConfigurationName="gpu", ImageId="ami-12c6146b", InstanceType="g5.xlarge")
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="workers",
        LaunchConfigurationName="gpu",
        MinSize=0,
        MaxSize=4,
        AvailabilityZones=[f"{REGION}a"],
        NewInstancesProtectedFromScaleIn=True,
    )
    return lambda: scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["workers"])["AutoScalingGroups"][0]


@pytest_asyncio.fixture
async def ec2(aws: Aws, group: Any) -> AsyncIterator[Actuator]:
    made = opened(aws, "ec2://workers")
    yield made
    await made.aclose()


def instances(group: Any) -> list[str]:
    return [one["InstanceId"] for one in group()["Instances"]]


async def test_an_ecs_service_is_scaled_and_counted(ecs: Actuator, service: Any) -> None:
    assert await ecs.actual() == Actual(0, 0)
    await ecs.scale(3, [])
    assert service()["desiredCount"] == 3
    assert await ecs.actual() == Actual(3, 3)
    await ecs.scale(1, ["ip-10-0-0-1.7"])
    assert service()["desiredCount"] == 1


async def test_a_group_is_scaled_out_and_the_idlest_instances_go(ec2: Actuator, group: Any) -> None:
    assert await ec2.actual() == Actual(0, 0)
    await ec2.scale(4, [])
    assert await ec2.actual() == Actual(4, 4)
    a, b, c, d = instances(group)
    await ec2.scale(2, [f"{c}.1", f"{a}.1", f"{b}.1", f"{c}.2", f"{d}.1"])  # c has a second, busier worker
    assert instances(group) == [c, d]
    assert group()["DesiredCapacity"] == 2
    await ec2.scale(1, [f"{d}.1"])
    assert instances(group) == [d], "an instance without a worker goes before an idle one"
    await ec2.scale(0, ["named-otherwise.1"])
    assert instances(group) == []


async def test_workers_on_none_of_the_instances_end_nothing(ec2: Actuator, group: Any) -> None:
    await ec2.scale(2, [])
    with pytest.raises(ActuatorError, match=r"'ip-10-0-0-1.7' is on none of its instances.*--name"):
        await ec2.scale(1, ["ip-10-0-0-1.7"])
    assert group()["DesiredCapacity"] == 2


async def test_a_group_is_scaled_as_far_as_it_allows(ec2: Actuator, group: Any) -> None:
    with pytest.raises(ActuatorError, match="9 instances are wanted, and the group allows 0 to 4"):
        await ec2.scale(9, [])
    assert group()["DesiredCapacity"] == 4


async def test_the_autoscalers_own_policy_is_enough(
    aws: Aws, service: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arns = arns_of(["ecs://gpu/worker-tiny", "ec2://workers"], REGION, ACCOUNT)
    for name, value in user(aws, "autoscaler", Scope(read(aws.broker()), ACCOUNT, **arns)).items():
        monkeypatch.setenv(name, value)
    with aws.enforcing():
        for url in ("ecs://gpu/worker-tiny", "ec2://workers"):
            actuator = opened(aws, url)
            await actuator.scale(2, [])
            assert await actuator.actual() == Actual(2, 2)
            await actuator.scale(0, [])
            await actuator.aclose()
    assert (service()["desiredCount"], instances(group)) == (0, [])


@pytest.mark.parametrize(
    ("url", "right"),
    [("ecs://gpu/worker-tiny", "ecs:DescribeServices"), ("ec2://workers", "autoscaling:DescribeAutoScalingGroups")],
)
async def test_a_missing_right_is_named(
    aws: Aws, service: Any, group: Any, monkeypatch: pytest.MonkeyPatch, url: str, right: str
) -> None:
    iam = aws.client("iam")
    iam.create_user(UserName="nobody")
    key = iam.create_access_key(UserName="nobody")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    actuator = opened(aws, url)
    with aws.enforcing(), pytest.raises(ActuatorError, match=rf"AccessDenied.*it needs {right}"):
        await actuator.scale(1, [])
    await actuator.aclose()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ecs://gpu/other", "no such active service in us-east-1"),
        ("ecs://cpu/other", "Cluster not"),
        ("ec2://other", "no such group in us-east-1"),
        ("ec2://away", "cannot look at the group"),
    ],
)
async def test_what_is_not_there_is_told(aws: Aws, service: Any, url: str, why: str) -> None:
    actuator = opened(Aws("http://127.0.0.1:1") if url == "ec2://away" else aws, url)
    with pytest.raises(ActuatorError, match=why):
        await actuator.actual()
    await actuator.aclose()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ecs://gpu", "must look like ecs://CLUSTER/SERVICE"),
        ("ec2://workers/more", "must look like ec2://GROUP"),
        ("ec2://workers?zone=a", "zone=a makes no sense"),
    ],
)
def test_wrong_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_actuator(url, model="tiny", broker="", store="")


def described(**more: Any) -> dict[str, Any]:
    """A service as ECS describes it, with one of three tasks running."""
    deployment = {"status": "PRIMARY", "failedTasks": 4, "rolloutState": "IN_PROGRESS"}
    return {"desiredCount": 3, "runningCount": 1, "pendingCount": 1, "deployments": [deployment], **more}


def task(number: int, **more: Any) -> dict[str, Any]:
    at = datetime(2026, 1, 1, 0, number, tzinfo=UTC)
    return {"taskArn": f"arn:aws:ecs:us-east-1:1:task/gpu/{number}", "stoppedAt": at, "containers": [], **more}


def test_tasks_that_fail_are_told_with_the_last_ones_reason() -> None:
    drained, exited = [{"name": "worker", "exitCode": 0}], "EssentialContainerExited"
    killed = [{"name": "worker", "exitCode": 137, "reason": "OutOfMemoryError: container killed"}]
    stopped = [
        task(1, stopCode="TaskFailedToStart", stoppedReason="CannotPullContainerError: not found"),
        task(2, stopCode=exited, stoppedReason="Essential container in task exited", containers=killed),
        task(3, stopCode="ServiceSchedulerInitiated", stoppedReason="Scaling activity initiated"),
        task(4, stopCode=exited, stoppedReason="Essential container in task exited", containers=drained),
    ]
    actual = actual_of(described(), stopped)
    assert (actual.wanted, actual.up, actual.failures) == (3, 2, 4)
    assert actual.failing == (
        "task 2: Essential container in task exited: worker exited with 137: OutOfMemoryError: container killed"
    )


def test_a_cluster_without_room_is_told_until_the_service_is_steady_again() -> None:
    room = {"message": "(service w) was unable to place a task because no container instance met its requirements."}
    steady = {"message": "(service w) has reached a steady state."}
    assert "unable to place" in actual_of(described(events=[room, steady]), []).failing
    assert actual_of(described(events=[steady, room]), []).failing == ""
    assert actual_of(described(events=[room], runningCount=3), []).failing == ""


def test_launches_that_failed_in_a_row_are_counted() -> None:
    def launch(status: str, why: str = "") -> dict[str, Any]:
        return {"Description": "Launching a new EC2 instance", "StatusCode": status, "StatusMessage": why}

    ended = {"Description": "Terminating EC2 instance: i-1", "StatusCode": "Successful"}
    failed = [launch("Failed", "InsufficientInstanceCapacity"), ended, launch("Failed", "older")]
    assert failures_of([launch("InProgress"), *failed, launch("Successful"), launch("Failed")]) == (
        "InsufficientInstanceCapacity",
        2,
    )
    assert failures_of([launch("Successful"), *failed]) == ("", 0)
