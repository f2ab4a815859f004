"""IAM policies: the permissions that each process needs in AWS, and no others.

| process | queues of tiers | inbox | bucket |
| --- | --- | --- | --- |
| `producer` | send | | files: read results |
| `gateway` | send | | files |
| `worker` | receive, delete, hide, send again | | files |
| `sweeper` | delete, hide, send again | | files |
| `sources` | send | receive, delete, hide | files; read `inbox/`, write `outbox/` and `done/` |
| `autoscaler` | find | | |
| `setup` | make, change, tag | as the others | make, change |

Tiers are named by the prefix and the end of their names (`pen-*-priority`), so a new version of a model needs no new
policy, and no process reaches the dead letters. A process for webhooks needs nothing of AWS.

Of the ECS services and Auto Scaling groups that run workers, the autoscaler sets the number, and a worker protects its
own ECS task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.aws.bucket import DONE, INBOX, OUTBOX
from producers.broker.sqs.address import Address, celery_name
from producers.broker.sqs.specs import arn, inbox_name
from producers.connection.aws import partition_of
from producers.contract.keys import TIERS, model_queue
from producers.store.blobs.bucket import KMS_PERMISSIONS, OBJECT_PERMISSIONS, PERMISSIONS, Bucket

FIND: Final = ("sqs:GetQueueUrl", "sqs:GetQueueAttributes")
SEND: Final = ("sqs:SendMessage",)
PUT_DOWN: Final = ("sqs:DeleteMessage", "sqs:ChangeMessageVisibility")
TAKE: Final = ("sqs:ReceiveMessage", *PUT_DOWN)
MAKE: Final = (
    *("sqs:CreateQueue", "sqs:SetQueueAttributes", "sqs:GetQueueAttributes", "sqs:GetQueueUrl"),
    *("sqs:TagQueue", "sqs:ListQueueTags"),
)
MAKE_BUCKET: Final = (
    *("s3:CreateBucket", "s3:ListBucket", "s3:GetBucketLocation"),
    *("s3:GetBucketPublicAccessBlock", "s3:PutBucketPublicAccessBlock"),
    *("s3:GetEncryptionConfiguration", "s3:PutEncryptionConfiguration"),
    *("s3:GetLifecycleConfiguration", "s3:PutLifecycleConfiguration"),
    *("s3:GetBucketNotification", "s3:PutBucketNotification", "s3:GetBucketTagging", "s3:PutBucketTagging"),
)
#: Each process's actions on the tiers' queues, beside finding them.
OF_TIERS: Final = {
    "producer": SEND,
    "gateway": SEND,
    "worker": (*SEND, *TAKE),
    "sweeper": (*SEND, *PUT_DOWN),
    "sources": SEND,
}
#: The autoscaler's actions, by what they are on; those on no resource cannot be narrowed.
OF_SERVICES: Final = ("ecs:DescribeServices", "ecs:UpdateService")
OF_GROUPS: Final = ("autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup")
OF_ALL_GROUPS: Final = ("autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities")
#: A worker's, on its own task.
PROTECT: Final = ("ecs:GetTaskProtection", "ecs:UpdateTaskProtection")
ROLES: Final = (*OF_TIERS, "autoscaler", "setup")
#: Processes that read and write files.
FILES: Final = frozenset({"gateway", "worker", "sweeper", "sources"})
#: Processes that send links and chords.
_LINKS: Final = frozenset({"worker", "sweeper"})


@dataclass(frozen=True, slots=True)
class Scope:
    """The resources that policies name. Parts of ARNs may be CloudFormation's, such as `${AWS::AccountId}`."""

    address: Address
    account: str
    region: str = ""
    """The address's, unless given."""
    partition: str = ""
    files: Bucket | None = None
    """The bucket of files (`--files-dir`)."""
    inbox: str = ""
    """Name of the bucket with `inbox/`; empty: no such source."""
    chosen: tuple[str, ...] = ()
    """ARNs of an operator's own queues for the tiers; empty: those that are made."""
    kms_keys: tuple[str, ...] = ()
    """ARNs of the keys of queues and bucket."""
    receives: tuple[str, ...] = ()
    """ARNs of further queues that sources take messages from."""
    replies: tuple[str, ...] = ()
    """ARNs of queues and topics that results are sent to."""
    services: tuple[str, ...] = ()
    """ARNs of ECS services that run workers."""
    groups: tuple[str, ...] = ()
    """ARNs of Auto Scaling groups that run workers."""

    def queue(self, name: str) -> str:
        """A queue's ARN; the name may hold `*`."""
        return arn(self.region or self.address.region, self.account, name, self.partition)

    def s3(self, path: str) -> str:
        """The ARN of a bucket or of objects."""
        return f"arn:{self.partition or partition_of(self.address.region)}:s3:::{path}"

    @property
    def tiers(self) -> list[str]:
        """ARNs of the queues of all models and versions."""
        if self.chosen:
            return list(self.chosen)
        prefix, end = self.address.prefix, ".fifo" if self.address.fifo else ""
        tiers = [self.queue(f"{prefix}*-{tier}{end}") for tier in TIERS]
        return tiers + [self.queue(celery_name(prefix, model_queue("")) + "*")] * self.address.celery


def policy(role: str, scope: Scope) -> dict[str, Any]:
    """The policy of a process (`ROLES`), as IAM takes it."""
    statements = _of_setup(scope) if role == "setup" else _of_process(role, scope)
    statements += _keys(role, scope)
    return {"Version": "2012-10-17", "Statement": statements}


def _of_process(role: str, scope: Scope) -> list[dict[str, Any]]:
    every = [scope.queue(f"{scope.address.prefix}*")]
    statements = [
        _allow("Tiers", (*FIND, *OF_TIERS.get(role, ())), scope.tiers),
        _allow("Find", ("sqs:GetQueueUrl",), every),  # also queues that do not exist yet
    ]
    if scope.address.celery and role in _LINKS:
        statements.append(_allow("Celery", SEND, every))  # links and chords go to queues of any name
    if scope.files is not None and role == "producer":
        statements.append(
            _allow("Results", ("s3:GetObject",), [scope.s3(f"{scope.files.name}/{scope.files.key('*')}")])
        )
    if scope.files is not None and role in FILES:
        statements += [
            _allow("Bucket", PERMISSIONS, [scope.s3(scope.files.name)]),
            _allow("Files", OBJECT_PERMISSIONS, [scope.s3(f"{scope.files.name}/{scope.files.key('*')}")]),
        ]
    more = {"sources": _of_sources, "autoscaler": _of_autoscaler, "worker": _of_worker}
    return statements + (more[role](scope) if role in more else [])


def _of_autoscaler(scope: Scope) -> list[dict[str, Any]]:
    statements = []
    if scope.services:
        clusters = {"ArnEquals": {"ecs:cluster": _clusters(scope)}}
        statements += [
            _allow("Services", OF_SERVICES, scope.services),
            _allow("ListTasks", ("ecs:ListTasks",), ["*"]) | {"Condition": clusters},
            _allow("Tasks", ("ecs:DescribeTasks",), _tasks(scope)),
        ]
    if scope.groups:
        statements += [_allow("Groups", OF_GROUPS, scope.groups), _allow("AllGroups", OF_ALL_GROUPS, ["*"])]
    return statements


def _of_worker(scope: Scope) -> list[dict[str, Any]]:
    return [_allow("Protect", PROTECT, _tasks(scope))] if scope.services else []


def _tasks(scope: Scope) -> list[str]:
    """ARNs of all tasks of the services' clusters: a task's own does not name its service."""
    return [f"{cluster.replace(':cluster/', ':task/')}/*" for cluster in _clusters(scope)]


def _clusters(scope: Scope) -> list[str]:
    return sorted({service.replace(":service/", ":cluster/").rpartition("/")[0] for service in scope.services})


def _of_sources(scope: Scope) -> list[dict[str, Any]]:
    statements = []
    inboxes = [*scope.receives, *([scope.queue(inbox_name(scope.address.prefix))] if scope.inbox else [])]
    if inboxes:
        statements.append(_allow("Messages", (*FIND, *TAKE), inboxes))
    queues = [reply for reply in scope.replies if ":sqs:" in reply]
    topics = [reply for reply in scope.replies if ":sns:" in reply]
    if queues:
        statements.append(_allow("ReplyQueues", (*FIND, *SEND), queues))
    if topics:
        statements.append(_allow("ReplyTopics", ("sns:Publish",), topics))
    return statements + (_of_inbox(scope) if scope.inbox else [])


def _of_inbox(scope: Scope) -> list[dict[str, Any]]:
    inbox, outbox, done = (scope.s3(f"{scope.inbox}/{part}*") for part in (INBOX, OUTBOX, DONE))
    return [
        _allow("InboxBucket", ("s3:ListBucket",), [scope.s3(scope.inbox)]),
        _allow("Inbox", ("s3:GetObject", "s3:GetObjectVersion", "s3:DeleteObject"), [inbox]),
        _allow("Outbox", ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"), [outbox, done]),
    ]


def _of_setup(scope: Scope) -> list[dict[str, Any]]:
    statements = [_allow("Queues", MAKE, [scope.queue(f"{scope.address.prefix}*")])]
    buckets = dict.fromkeys([*([scope.files.name] if scope.files else []), *([scope.inbox] if scope.inbox else [])])
    if buckets:
        statements.append(_allow("Bucket", MAKE_BUCKET, [scope.s3(name) for name in buckets]))
    return statements


def _keys(role: str, scope: Scope) -> list[dict[str, Any]]:
    """The use of keys: SQS and S3 ask KMS in the process's name, for senders and receivers alike."""
    if not scope.kms_keys or role in ("setup", "autoscaler"):
        return []
    return [_allow("Keys", KMS_PERMISSIONS, scope.kms_keys)]


def _allow(sid: str, actions: Sequence[str], resources: Sequence[str]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
