"""The SQS queues that a system needs, as they should be: names, attributes and tags. No function here calls AWS.

dead letters    pen-dead-letters[.fifo]     what SQS moves away after MAX_RECEIVES; no process reads it
tiers           four for each model version
plain Celery    one for each model, with celery=1 in the broker's URL
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from producers.broker.sqs.address import QUEUE_TAG, TIER_TAG, Address, is_celery, lists, split, sqs_name
from producers.connection.aws import partition_of
from producers.contract.keys import model_queue, version_queue
from producers.contract.levels import beside

#: Receives after which SQS moves a message to the dead letters. Penstock judges tasks by their records long before.
MAX_RECEIVES: Final = 1000
#: SQS's longest (s).
RETENTION_S: Final = 14 * 24 * 3600
LONG_POLL_S: Final = 20
#: Seconds for which SQS uses one data key of KMS again.
KEY_REUSE_S: Final = 300


@dataclass(frozen=True, slots=True)
class Encryption:
    """Encryption of queues and buckets. Without a choice, new ones use AWS's own keys, and others stay as they are."""

    kms_key: str = ""
    """Id, ARN or alias of a KMS key."""
    aws_keys: bool = False
    """Use AWS's own keys (SSE-SQS, SSE-S3), also where a KMS key was used before."""


#: Existing encryption stays; new queues and buckets use AWS's own keys.
AS_IT_IS: Final = Encryption()


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """An SQS queue as it should be."""

    name: str
    """SQS's name of it."""
    attributes: Mapping[str, str]
    """SQS's attributes, without the encryption and the redrive policy."""
    tags: Mapping[str, str] = field(default_factory=dict)
    list: str = ""
    """Penstock's name of it; empty for dead letters and the inbox."""
    dead_letters: str = ""
    """SQS's name of the queue for its dead letters, in the same account."""

    @property
    def fifo(self) -> bool:
        return self.name.endswith(".fifo")


def queue_specs(address: Address, names: Iterable[str], tags: Mapping[str, str]) -> list[QueueSpec]:
    """The queues of these lists, after those for their dead letters, which must exist first. `tags`: of all of them."""
    specs = [_of_list(address, name, tags) for name in dict.fromkeys(names)]
    kinds = sorted({spec.fifo for spec in specs})
    return [*(_dead_letters(address, fifo, tags) for fifo in kinds), *specs]


def inbox(address: Address, tags: Mapping[str, str], policy: Mapping[str, object]) -> list[QueueSpec]:
    """The queue of a bucket's notifications, after the queue for its dead letters. `policy`: who may send to it."""
    attributes = {**_attributes(address), "Policy": json.dumps(policy)}
    name = inbox_name(address.prefix)
    return [
        _dead_letters(address, False, tags),
        QueueSpec(name, attributes, tags, dead_letters=dead_letters_name(address.prefix, False)),
    ]


def inbox_name(prefix: str) -> str:
    """SQS's name of the queue of a bucket's notifications."""
    return f"{prefix}inbox"


def dead_letters_name(prefix: str, fifo: bool) -> str:
    """SQS's name of the queue for dead letters of standard or of FIFO queues: it must be of the same kind."""
    return f"{prefix}dead-letters{'.fifo' if fifo else ''}"


def lists_of(address: Address, models: Iterable[tuple[str, str]]) -> list[str]:
    """The lists of models, given by name and version."""
    names = []
    for model, version in models:
        names += [name for queue in beside(version_queue(model, version)) for name, _ in lists(queue)]
        if address.celery:
            names += [name for name, _ in lists(model_queue(model))]
    return names


def encrypted(choice: Encryption, existing: Mapping[str, str]) -> dict[str, str]:
    """The attributes of a queue's encryption that differ from the existing ones (none: a new queue)."""
    key, by_sqs = existing.get("KmsMasterKeyId", ""), existing.get("SqsManagedSseEnabled", "false") == "true"
    if choice.kms_key:
        by_kms = {"KmsMasterKeyId": choice.kms_key, "KmsDataKeyReusePeriodSeconds": str(KEY_REUSE_S)}
        return {} if key == choice.kms_key else by_kms
    if key and choice.aws_keys:
        return {"KmsMasterKeyId": "", "SqsManagedSseEnabled": "true"}
    return {} if key or by_sqs else {"SqsManagedSseEnabled": "true"}


def redrive(dead_letters_arn: str) -> dict[str, object]:
    """A redrive policy."""
    return {"deadLetterTargetArn": dead_letters_arn, "maxReceiveCount": MAX_RECEIVES}


def arn(region: str, account: str, name: str, partition: str = "") -> str:
    """A queue's ARN."""
    return f"arn:{partition or partition_of(region)}:sqs:{region}:{account}:{name}"


def _of_list(address: Address, name: str, tags: Mapping[str, str]) -> QueueSpec:
    queue, tier = split(name)
    queue_name = sqs_name(address, name)
    fifo = queue_name.endswith(".fifo")
    assert fifo == (address.fifo and not is_celery(queue))
    return QueueSpec(
        queue_name,
        {**_attributes(address), **_fifo(fifo)},
        {**tags, QUEUE_TAG: queue, TIER_TAG: tier},
        name,
        dead_letters_name(address.prefix, fifo),
    )


def _dead_letters(address: Address, fifo: bool, tags: Mapping[str, str]) -> QueueSpec:
    return QueueSpec(dead_letters_name(address.prefix, fifo), {**_attributes(address), **_fifo(fifo)}, tags)


def _attributes(address: Address) -> dict[str, str]:
    return {
        "DelaySeconds": "0",
        "MessageRetentionPeriod": str(RETENTION_S),
        "ReceiveMessageWaitTimeSeconds": str(LONG_POLL_S),
        "VisibilityTimeout": str(address.visibility),
    }


def _fifo(fifo: bool) -> dict[str, str]:
    """High throughput: SQS counts duplicates and rates by message group."""
    if not fifo:
        return {}
    return {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "false",
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }


def named_tags(tags: Mapping[str, str]) -> Sequence[Mapping[str, str]]:
    """Tags as CloudFormation and S3 write them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]
