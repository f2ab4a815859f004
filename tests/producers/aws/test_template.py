"""The CloudFormation template makes what `penstock aws setup` makes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.text.checkpoint import model_version
from producers.aws.account import Needs, provide
from producers.aws.policies import OF_TIERS, Scope, policy
from producers.aws.template import ROUTES, SERVICES, Template
from producers.broker.sqs.address import read
from producers.broker.sqs.specs import Encryption
from producers.store.blobs.bucket import Bucket
from tests.aws import ACCOUNT, REGION, Aws
from tests.processes import ROOT
from tests.workers.cli.conftest import Run, run
from workers.library.reference import bundled

__all__ = ["run"]

pytestmark = pytest.mark.slow
CHECKED_IN = ROOT / "infra" / "aws" / "penstock.json"
TINY = [("tiny", model_version(bundled()["tiny"]))]
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0a"


def test_the_template_in_the_repository_is_that_of_the_command(run: Run) -> None:
    options = "--broker sqs://us-east-1?prefix=pen-&celery=1 --model tiny --bucket s3://penstock-example/files --inbox"
    assert run("aws", "template", *options.split()).out == CHECKED_IN.read_text("utf-8")


@pytest.mark.exhaustive
def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    templates = {
        "all": Template(read("sqs://us-east-1?celery=1"), TINY, Bucket("penstock-example", "files"), inbox=True),
        "fifo": Template(read("sqs://us-east-1?fifo=1&celery=1&visibility=90"), TINY, encryption=Encryption(KEY)),
        "bucket": Template(read("sqs://us-east-1"), [], Bucket("penstock-example"), tags={"team": "ml"}),
    }
    for name, template in templates.items():
        (tmp_path / name).write_text(str(template))
    linter = Path(sys.executable).with_name("cfn-lint")
    linted = subprocess.run(
        [linter, "--include-checks", "I", "--", *map(tmp_path.joinpath, templates)], capture_output=True, text=True
    )
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize(
    ("url", "encryption"), [("visibility=30", Encryption(KEY)), ("fifo=1&celery=1&visibility=90", Encryption())]
)
def test_setup_finds_nothing_to_do_after_the_stack_was_made(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, url: str, encryption: Encryption
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    address, bucket = read(f"sqs://{REGION}?{url}"), Bucket("penstock-files", "files")
    tags = {"team": "ml"}
    made = Template(address, TINY, bucket, inbox=True, encryption=encryption, tags=tags)
    aws.client("cloudformation").create_stack(
        StackName="penstock", TemplateBody=str(made), Capabilities=["CAPABILITY_IAM"]
    )
    *queues, of_bucket = provide(Needs(address, TINY, {}, bucket, True, encryption, tags), None, apply=False)
    # moto makes no policies of queues, and of a bucket only the encryption and tags: these are compared below.
    assert {one.name: dict(one.details) for one in queues if one.action != "keep"} == {
        "pen-inbox": {"Policy": queues[-1].details["Policy"]}
    }
    assert of_bucket.details.keys() == {
        *("public_access_block", "bucket_lifecycle_configuration", "bucket_notification_configuration")
    }
    iam = aws.client("iam")
    for role in OF_TIERS:
        (name,) = [
            one["RoleName"] for one in iam.list_roles()["Roles"] if f"{role.capitalize()}Role" in one["RoleName"]
        ]
        said = iam.get_role_policy(RoleName=name, PolicyName=f"penstock-{role}")["PolicyDocument"]
        keys = (encryption.kms_key,) if encryption.kms_key else ()
        assert ast.literal_eval(said) == policy(
            role, Scope(address, ACCOUNT, files=bucket, inbox=bucket.name, kms_keys=keys)
        )


def test_what_moto_does_not_make_is_as_setup_asks_for_it(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's settings, read from what setup made, are those of the template."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    bucket = Bucket("penstock-example", "files")
    address = read(f"sqs://{REGION}")
    provide(Needs(address, [], {}, bucket, True), None, apply=True)
    s3, sqs = aws.client("s3"), aws.client("sqs")
    made: dict[str, Any] = Template(address, [], bucket, inbox=True).build()["Resources"]
    asked = made["Bucket"]["Properties"]
    block = s3.get_public_access_block(Bucket=bucket.name)["PublicAccessBlockConfiguration"]
    assert asked["PublicAccessBlockConfiguration"] == block
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket.name)["Rules"]
    (asked_rule,) = asked["LifecycleConfiguration"]["Rules"]
    assert asked_rule == {
        **{k: v for k, v in rule.items() if k not in ("ID", "Filter")},
        "Id": rule["ID"],
        "Prefix": "files/",
    }
    (told,) = s3.get_bucket_notification_configuration(Bucket=bucket.name)["QueueConfigurations"]
    directly = asked["NotificationConfiguration"]["Fn::If"][1]["QueueConfigurations"]
    assert [(one["Event"], one["Filter"]["S3Key"]["Rules"]) for one in directly] == [
        (event, told["Filter"]["Key"]["FilterRules"]) for event in told["Events"]
    ]
    url = sqs.get_queue_url(QueueName="pen-inbox")["QueueUrl"]
    said = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"])["Attributes"]["Policy"]
    written = json.dumps(made["InboxPolicy"]["Properties"]["PolicyDocument"]["Fn::If"][1])
    for part, value in {
        "${PenInbox.Arn}": f"arn:aws:sqs:{REGION}:{ACCOUNT}:pen-inbox",
        "${BucketName}": bucket.name,
        "${AWS::AccountId}": ACCOUNT,
        "${AWS::Partition}": "aws",
    }.items():
        written = written.replace(part, value)
    assert json.loads(written, object_hook=lambda one: one.get("Fn::Sub", one)) == json.loads(said)


@pytest.mark.parametrize("way", [way for way in ROUTES if way != "direct"])
def test_notifications_come_another_way(aws: Aws, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    made = Template(read(f"sqs://{REGION}"), [], Bucket("penstock-files"), inbox=True)
    aws.client("cloudformation").create_stack(
        StackName="penstock",
        TemplateBody=str(made),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": "Notifications", "ParameterValue": way}],
    )
    subscriptions = aws.client("sns").list_subscriptions()["Subscriptions"]
    rules = aws.client("events").list_rules()["Rules"]
    assert (len(subscriptions), len(rules)) == ((1, 0) if way == "sns" else (0, 1))


def test_several_services_take_the_roles(aws: Aws) -> None:
    aws.client("cloudformation").create_stack(
        StackName="penstock",
        TemplateBody=str(Template(read(f"sqs://{REGION}"), [])),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": "Service", "ParameterValue": ",".join(SERVICES[:2])}],
    )
    (trusts,) = {str(one["AssumeRolePolicyDocument"]) for one in aws.client("iam").list_roles()["Roles"]}
    assert ast.literal_eval(trusts)["Statement"][0]["Principal"] == {"Service": list(SERVICES[:2])}
