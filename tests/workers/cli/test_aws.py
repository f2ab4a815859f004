"""`penstock aws setup`, `check`, `policy` and `template`, against AWS on loopback and a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from redis import Redis

from engine.text.checkpoint import model_version
from producers.broker.sqs import keys as sqs_keys
from producers.broker.sqs.address import lists, read, sqs_name
from producers.contract import keys
from tests.aws import ACCOUNT, Aws
from tests.aws_faults import Fault, faulty
from tests.workers.cli.conftest import Ran, Run
from workers.library.reference import bundled

TINY = model_version(bundled()["tiny"])
TIERS = ("priority", "default", "flex", "batch")
Commands = Callable[..., Ran]


@pytest.fixture
def penstock_aws(run: Run, aws: Aws, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("BROKER_URL", aws.broker())
    monkeypatch.setenv("STORE_URL", valkey_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    return lambda *args: run("aws", *args)


def arn(name: str) -> str:
    return f"arn:aws:sqs:us-east-1:{ACCOUNT}:{name}"


def urls(valkey: Redis) -> dict[str, str]:
    return {name.decode(): url.decode() for name, url in valkey.hgetall(sqs_keys.QUEUES).items()}


def test_queues_of_a_model_are_made_before_any_worker_runs(penstock_aws: Commands, aws: Aws, valkey: Redis) -> None:
    planned = penstock_aws("setup", "--model", "tiny", "--dry-run")
    assert planned.status == 0
    assert planned.out.count("missing   queue pen-") == 5
    assert not urls(valkey)
    assert "QueueUrls" not in aws.client("sqs").list_queues()

    made = penstock_aws("setup", "--model", "tiny", "--tag", "team=ml")
    assert (made.status, made.out.count("created   queue pen-")) == (0, 5), made.err
    names = [name for name, _ in lists(keys.version_queue("tiny", TINY))]
    assert list(urls(valkey)) == names
    assert all(urls(valkey)[name].endswith(sqs_name(read("sqs://us-east-1"), name)) for name in names)

    again = penstock_aws("setup", "--model", "tiny", "--tag", "team=ml", "--json")
    assert {json.loads(line)["action"] for line in again.out.splitlines()} == {"keep"}
    assert penstock_aws("check", "--model", "tiny").status == 0


def test_the_version_that_is_served_has_queues_beside_that_of_the_files(penstock_aws: Commands, valkey: Redis) -> None:
    valkey.hset(keys.MODELS, "tiny", json.dumps({"version": "0123456789ab"}))
    valkey.hset(keys.MODELS, "elsewhere", json.dumps({"version": "ba9876543210"}))
    assert penstock_aws("setup", "--model", "tiny", "--model", "elsewhere", "--model", "x@000000000000").status == 0
    versions = {name.rpartition("#")[0].rpartition(":")[2] for name in urls(valkey)}
    assert versions == {f"tiny@{TINY}", "tiny@0123456789ab", "elsewhere@ba9876543210", "x@000000000000"}
    stored = "s3://no-such-bucket/all/tiny/ffffffffffff"
    assert penstock_aws("setup", "--model", stored, "--model", f"own={stored}").status == 0, "nothing is pulled"
    versions = {name.rpartition("#")[0].rpartition(":")[2] for name in urls(valkey)} - versions
    assert versions == {"tiny@ffffffffffff", "own@ffffffffffff"}
    unknown = penstock_aws("setup", "--model", "nowhere")
    assert unknown.status == 2
    assert "the store has no card of it; or give the version, as NAME@0123456789ab" in unknown.err


def test_what_is_missing_or_differs_is_told_and_set_right(penstock_aws: Commands, aws: Aws) -> None:
    checked = penstock_aws("check", "--model", "tiny")
    assert (checked.status, checked.out.count("missing ")) == (1, 5)
    penstock_aws("setup", "--model", "tiny")
    sqs = aws.client("sqs")
    (url,) = sqs.list_queues(QueueNamePrefix=f"pen-tiny_{TINY}_")["QueueUrls"][:1]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "3600"})
    checked = penstock_aws("check", "--model", "tiny")
    assert checked.status == 1
    assert "MessageRetentionPeriod: 3600 -> 1209600" in checked.out
    assert "differs " in checked.out
    worker = penstock_aws("check", "--model", "tiny", "--role", "worker")
    assert "has MessageRetentionPeriod 3600; it must be 172800 or more" in worker.out
    assert penstock_aws("setup", "--model", "tiny").out.count("changed ") == 1
    assert penstock_aws("check", "--model", "tiny", "--role", "worker").status == 0


def test_chosen_queues_are_used_and_none_is_made(penstock_aws: Commands, aws: Aws, valkey: Redis) -> None:
    sqs = aws.client("sqs")
    for tier in TIERS:
        sqs.create_queue(QueueName=f"ours-{tier}", Attributes={"MessageRetentionPeriod": "1209600"})
    chosen = [part for tier in TIERS for part in ("--predefined", f"{tier}={arn(f'ours-{tier}')}")]
    assert penstock_aws("setup", "--model", "tiny", *chosen).status == 0
    assert {url.rpartition("/")[2] for url in urls(valkey).values()} == {f"ours-{tier}" for tier in TIERS}
    assert len(sqs.list_queues()["QueueUrls"]) == 4
    assert penstock_aws("check", "--model", "tiny", "--role", "worker").status == 0

    again = penstock_aws("setup", "--model", "tiny")
    assert (again.status, again.out.count("as it is  queue ours-")) == (0, 4), "what was chosen stays"
    assert penstock_aws("check", "--model", "tiny").status == 0
    assert len(sqs.list_queues()["QueueUrls"]) == 4

    too_few = penstock_aws("setup", "--model", "tiny", *chosen[:2])
    assert (too_few.status, "it must name each of priority, default, flex, batch once" in too_few.err) == (2, True)
    url = sqs.get_queue_url(QueueName="ours-flex")["QueueUrl"]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "60"})
    valkey.delete(sqs_keys.QUEUES)
    short = penstock_aws("setup", "--model", "tiny", *chosen)
    assert (short.status, "wrong     queue ours-flex" in short.out) == (1, True)
    assert len(urls(valkey)) == 3, "what does not fit is not used"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["setup"], "nothing to do: give --model, --bucket or both"),
        (["setup", "--model", "tiny", "--inbox"], "--inbox needs --bucket"),
        (["setup", "--model", "tiny", "--sse", "kms"], "--sse is 'kms'; it must be sqs"),
        (["setup", "--model", "tiny", "--sse", "sqs", "--kms-key", "k"], "exclude each other"),
        (["setup", "--model", "tiny", "--tag", "aws:x=1"], "cannot be set"),
        (["setup", "--model", "tiny", "--tag", "x"], "'x' must be NAME=VALUE"),
        (["setup", "--model", "tiny", "--bucket", "A_b"], "names no bucket"),
        (["check", "--model", "tiny", "--role", "king"], "role is 'king'; it must be one of producer, gateway"),
        (["policy", "king"], "no process is called 'king'"),
        (["policy", "autoscaler", "--actuator", "local"], "it must begin with ecs:// or ec2://"),
        (["setup", "--model", "tiny", "--broker", "redis://127.0.0.1/0"], "does not begin with sqs://"),
    ],
)
def test_bad_options_are_refused(penstock_aws: Commands, aws: Aws, args: list[str], said: str) -> None:
    refused = penstock_aws(*args)
    assert (refused.status, said in refused.err) == (2, True), refused.err
    assert "QueueUrls" not in aws.client("sqs").list_queues()


def test_a_region_that_does_not_answer_is_told_with_the_one_that_was_meant(
    penstock_aws: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", "sqs://eu-centrall-1?endpoint_url=http://127.0.0.1:1")
    away = penstock_aws("setup", "--model", "tiny")
    assert away.status == 3
    assert "find queue pen-dead-letters in eu-centrall-1" in away.err
    assert "no region eu-centrall-1 is known; is it eu-central-1?" in away.err


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (Fault("throttle", times=3), 0, "created   queue pen-dead-letters"),
        (Fault("denied", "CreateQueue"), 2, "create queue pen-dead-letters in us-east-1: AccessDenied"),
        (Fault("expired"), 2, "the credentials have expired (it needs sqs:GetQueueUrl)"),
        (Fault("skewed"), 2, "this machine's clock is wrong (it needs sqs:GetQueueUrl)"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_faults_are_waited_out_or_told(run: Run, aws: Aws, fault: Fault, status: int, said: str) -> None:
    with faulty(aws) as (behind, faults):
        faults.put(fault)
        ran = run("aws", "setup", "--model", "x@000000000000", "--broker", behind.broker())
    assert ran.status == status
    assert said in ran.out + ran.err


def test_a_bucket_tells_the_queue_of_input_files(penstock_aws: Commands, aws: Aws) -> None:
    made = penstock_aws("setup", "--bucket", "s3://files-of-ours/penstock", "--inbox", "--tag", "team=ml")
    assert (made.status, "created   bucket files-of-ours" in made.out) == (0, True), made.err
    again = penstock_aws("check", "--bucket", "s3://files-of-ours/penstock", "--inbox")
    assert again.status == 0, again.out
    s3, sqs = aws.client("s3"), aws.client("sqs")
    s3.put_object(Bucket="files-of-ours", Key="inbox/day.jsonl", Body=b"{}")
    s3.put_object(Bucket="files-of-ours", Key="inbox/day.txt", Body=b"{}")
    url = sqs.get_queue_url(QueueName="pen-inbox")["QueueUrl"]
    found = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    told = [record["s3"]["object"]["key"] for one in found for record in json.loads(one["Body"]).get("Records", ())]
    assert list(map(unquote, told)) == ["inbox/day.jsonl"]


def test_a_policy_is_printed_for_the_account_of_the_credentials(penstock_aws: Commands) -> None:
    printed = penstock_aws("policy", "worker", "--files-dir", "s3://my-bucket/files")
    said = json.loads(printed.out)
    tiers, _, bucket, files = said["Statement"]
    assert arn("pen-*-priority") in tiers["Resource"]
    assert (bucket["Resource"], files["Resource"]) == (["arn:aws:s3:::my-bucket"], ["arn:aws:s3:::my-bucket/files/*"])


def test_policies_of_what_scales_name_the_services_and_groups(penstock_aws: Commands) -> None:
    urls = ("--actuator", "ecs://gpu/tiny", "--actuator", "ec2://workers?region=eu-west-1")
    said = {one["Sid"]: one for one in json.loads(penstock_aws("policy", "autoscaler", *urls).out)["Statement"]}
    assert said["Services"]["Resource"] == [f"arn:aws:ecs:us-east-1:{ACCOUNT}:service/gpu/tiny"]
    assert said["Tasks"]["Resource"] == [f"arn:aws:ecs:us-east-1:{ACCOUNT}:task/gpu/*"]
    (group,) = said["Groups"]["Resource"]
    assert group == f"arn:aws:autoscaling:eu-west-1:{ACCOUNT}:autoScalingGroup:*:autoScalingGroupName/workers"
    worker = {one["Sid"]: one for one in json.loads(penstock_aws("policy", "worker", *urls).out)["Statement"]}
    assert worker["Protect"]["Resource"] == said["Tasks"]["Resource"]
    assert "Groups" not in worker
