"""`infra/aws`: by CloudFormation's linter, and against the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from producers.aws import policies
from tests.infra.deploy.code import grace, parsed, variables
from tests.infra.deploy.templates import chosen, template, words
from tests.processes import ROOT
from workers.autoscaler.actuators import checked

FOLDER = ROOT / "infra" / "aws"
TEMPLATES = sorted(FOLDER.glob("*.yaml"))
#: Longest time (s) that Fargate gives a container to stop.
FARGATE_S = 120


@cache
def resources(name: str, here: bool = True) -> dict[str, Any]:
    """`here`: what the condition WorkersHere is. Other conditions stay."""
    text = (FOLDER / name).read_text("utf-8")
    found = template(text)["Resources"]
    return {key: chosen(one, here) for key, one in found.items() if here or one.get("Condition") != "WorkersHere"}


def lint(*paths: Path) -> str:
    linter = Path(sys.executable).with_name("cfn-lint")
    return subprocess.run([linter, "--include-checks", "I", "--", *paths], capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_linter_finds_nothing_but_what_is_wrong(tmp_path: Path) -> None:
    """One run of the linter, which takes seconds to start."""
    wrong = tmp_path / "wrong.yaml"
    text = (FOLDER / "ecs.yaml").read_text("utf-8")
    wrong.write_text(text.replace("DesiredCount: 2", "DesiredCnt: 2").replace("!Ref TaskGroup", "!Ref TasksGroup"))
    found = lint(*TEMPLATES, wrong)
    assert {line for line in found.splitlines() if ".yaml:" in line} == {
        line for line in found.splitlines() if line.startswith(str(wrong))
    }
    assert "DesiredCnt" in found
    assert "TasksGroup" in found


TASKS = {name: one for name, one in resources("ecs.yaml").items() if one["Type"] == "AWS::ECS::TaskDefinition"}


@pytest.mark.parametrize(("name", "here"), [*((name, True) for name in TASKS), ("AutoscalerTask", False)])
def test_a_task_is_right(name: str, here: bool) -> None:
    (container,) = resources("ecs.yaml", here)[name]["Properties"]["ContainerDefinitions"]
    argv = words(container["Command"])
    options = parsed(argv)
    assert grace(argv) <= container["StopTimeout"] <= FARGATE_S
    given = {one["Name"] for one in (*container["Environment"], *container["Secrets"])}
    assert {"BROKER_URL", "STORE_URL"} <= given <= variables()
    assert "STORE_URL" in {one["Name"] for one in container["Secrets"]}
    assert container["ReadonlyRootFilesystem"] is True
    assert container["User"] == "10001"
    port = options.get("health_port") or options.get("port")
    if port is not None:
        assert f"127.0.0.1:{port}/livez" in " ".join(container["HealthCheck"]["Command"])
    if "actuator" in options:
        assert checked(options["actuator"]).startswith("ecs://" if here else "ec2://")


def test_each_process_is_a_service() -> None:
    services = {
        one["Properties"]["ServiceName"] for one in resources("ecs.yaml").values() if one["Type"] == "AWS::ECS::Service"
    }
    assert services == {"gateway", "sweeper", "webhooks", "worker", "autoscaler"}


def test_an_update_leaves_the_numbers_that_scaling_has_set() -> None:
    """CloudFormation sends DesiredCount with every update of a service."""
    services = [one["Properties"] for one in resources("ecs.yaml").values() if one["Type"] == "AWS::ECS::Service"]
    fixed = {one["ServiceName"] for one in services if "DesiredCount" in one}
    assert fixed == {"sweeper", "webhooks", "autoscaler"}


def test_where_a_group_has_the_workers_no_others_run() -> None:
    left = str(resources("ecs.yaml", here=False))
    assert [name for name in ("WorkerService", "'Protect'") if name in left] == []


def test_rights_are_those_that_the_processes_need() -> None:
    def actions(name: str, here: bool = True) -> set[str]:
        properties = resources("ecs.yaml", here)[name]["Properties"]
        documents = [properties] if "PolicyDocument" in properties else properties["Policies"]
        statements = [one for document in documents for one in document["PolicyDocument"]["Statement"]]
        return {one for statement in statements for one in _listed(statement["Action"])}

    own = {*policies.OF_SERVICES, "ecs:ListTasks", "ecs:DescribeTasks", *policies.FIND}
    assert actions("AutoscalerRole") == own
    assert actions("AutoscalerRole", False) == {*policies.OF_GROUPS, *policies.OF_ALL_GROUPS, *policies.FIND}
    assert actions("Protect") == set(policies.PROTECT)


def test_queues_may_have_any_prefix() -> None:
    assert "pen-" not in str(resources("ecs.yaml"))


def _listed(one: str | list[str]) -> list[str]:
    return [one] if isinstance(one, str) else one


def user_data() -> str:
    data = resources("ec2-gpu.yaml")["Template"]["Properties"]["LaunchTemplateData"]["UserData"]
    return str(data["Fn::Base64"]["Fn::Sub"])


def test_the_unit_on_an_instance_is_that_of_the_repository() -> None:
    unit = (ROOT / "infra" / "systemd" / "penstock-worker@.service").read_text("utf-8")
    (written,) = re.findall(r"<<'UNIT'\n(.*?)^UNIT$", user_data(), re.MULTILINE | re.DOTALL)
    assert written.replace("${!", "${") == unit[unit.index("[Unit]") :]


def test_an_instance_runs_what_the_autoscaler_can_find() -> None:
    data = user_data()
    (options,) = re.findall(r'"(--gpus [^"]*)"', data)
    argv = shlex.split(options.replace("$instance", "i-0a"))
    said = parsed(["worker", "--model", "tiny", *argv])
    assert said["name"].partition(".")[0] == "i-0a"
    assert said["spot_provider"] == "aws"
    assert subprocess.run(["bash", "-n"], input=re.sub(r"\$\{[^}]*\}", "x", data), text=True).returncode == 0


def test_an_instance_has_the_servers_and_files_of_a_worker_on_ecs() -> None:
    (written,) = re.findall(r"printf '([^']*)'[^>]*>/etc/penstock/penstock.env", user_data())
    (container,) = TASKS["WorkerTask"]["Properties"]["ContainerDefinitions"]
    given = {one["Name"] for one in (*container["Environment"], *container["Secrets"])}
    assert set(re.findall(r"([A-Z_]+)=%s", written)) == given


def test_an_instance_waits_until_its_workers_have_drained() -> None:
    (hook,) = resources("ec2-gpu.yaml")["Group"]["Properties"]["LifecycleHookSpecificationList"]
    drain = float(re.findall(r"--drain-timeout (\d+)", user_data())[0])
    assert hook["HeartbeatTimeout"] >= grace(["worker", "--model", "tiny", "--drain-timeout", str(drain)])


def test_cloudwatch_steps_from_zero_alone_and_never_in() -> None:
    """A step to one worker from any other number would end workers."""
    scaling = resources("ecs-cloudwatch.yaml")
    step = scaling["WorkerFromZero"]["Properties"]["StepScalingPolicyConfiguration"]
    assert step["AdjustmentType"] == "ExactCapacity"
    (condition,) = [one for one in scaling["WaitingAtZero"]["Properties"]["Metrics"] if one["ReturnData"]]
    assert condition["Expression"].startswith("IF(FILL(workers, 0) < 1 AND ")
    assert scaling["WorkerScale"]["Properties"]["MinCapacity"] == 0
