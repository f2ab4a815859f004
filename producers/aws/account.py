"""A system's needs in an AWS account: made and corrected (`provide`), or tried as one of its processes (`probe`).

Both may be repeated. `probe` changes nothing, so it tries neither sending nor receiving: both would change what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from producers.aws.bucket import BucketSetup, may_send
from producers.aws.policies import FILES, OF_TIERS
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, is_own, sqs_name
from producers.broker.sqs.queues import Queues
from producers.broker.sqs.setup import Finding, Setup, arn_of, own_account
from producers.broker.sqs.specs import AS_IT_IS, Encryption, arn, inbox, inbox_name, lists_of, queue_specs
from producers.connection.aws import AwsError, aws_errors, client, partition_of
from producers.connection.script import text
from producers.connection.trouble import Trouble
from producers.store.blobs.bucket import Bucket

#: A receipt handle, and an object's key, that do not exist.
NOBODYS: Final = "penstock-probe"


@dataclass(frozen=True, slots=True)
class Needs:
    """A system's needs. `models`: names and versions."""

    address: Address
    models: Sequence[tuple[str, str]]
    predefined: Mapping[str, str] = field(default_factory=dict)
    """List -> ARN of the queue that an operator chose for it."""
    bucket: Bucket | None = None
    inbox: bool = False
    """Whether the bucket notifies a queue of new input files."""
    encryption: Encryption = AS_IT_IS
    tags: Mapping[str, str] = field(default_factory=dict)


# ---- provide --------------------------------------------------------------------------------------------------------


def provide(needs: Needs, store: Redis | None, *, apply: bool) -> list[Finding]:
    """Make and correct what is needed, or only look (`apply`), and write the queues' URLs into the store.

    Queues that were chosen before stay chosen. Raises AwsError, which names queue or bucket and the permission;
    ValueError for a bad ARN; redis.exceptions.RedisError.
    """
    setup = Setup(needs.address, needs.encryption, apply)
    stored = {} if store is None else {text(name): text(url) for name, url in store.hgetall(keys.QUEUES).items()}
    names = lists_of(needs.address, needs.models)
    chosen = {**_chosen_before(needs.address, names, stored), **needs.predefined}
    findings = [setup.check(name, queue) for name, queue in chosen.items()]
    not_chosen = [name for name in names if name not in chosen]
    findings += setup.provide(queue_specs(needs.address, not_chosen, needs.tags)) if not_chosen else []
    if store is not None:
        findings += _write_urls(store, stored, findings, apply)
    if needs.bucket is not None:
        findings += _provide_bucket(needs, needs.bucket, setup, {finding.name for finding in findings})
    return findings


def _chosen_before(address: Address, names: Sequence[str], stored: Mapping[str, str]) -> dict[str, str]:
    """List -> ARN of the queues in the store that `setup` did not make, under whatever prefix."""
    region = address.region
    return {name: arn_of(region, stored[name]) for name in names if name in stored and not is_own(name, stored[name])}


def _provide_bucket(needs: Needs, bucket: Bucket, setup: Setup, done: set[str]) -> list[Finding]:
    address = needs.address
    findings, queue = [], ""
    if needs.inbox:
        account = address.account or own_account(address)
        queue = arn(address.region, account, inbox_name(address.prefix))
        may = may_send(queue, "s3", f"arn:{partition_of(address.region)}:s3:::{bucket.name}", account)
        findings = setup.provide([spec for spec in inbox(address, needs.tags, may) if spec.name not in done])
    region = bucket.region or address.region
    return [*findings, BucketSetup(bucket, region, queue, needs.encryption, needs.tags, setup.apply).provide()]


def _write_urls(store: Redis, stored: Mapping[str, str], findings: Sequence[Finding], apply: bool) -> list[Finding]:
    """Write the URLs of usable queues into the store, where workers and senders look for them."""
    usable = (finding for finding in findings if finding.list and finding.url and finding.action != "wrong")
    urls = {finding.list: finding.url for finding in usable}
    differing = {name: url for name, url in urls.items() if stored.get(name) != url}
    if differing and apply:
        store.hset(keys.QUEUES, items=[part for pair in differing.items() for part in pair])
    details = {name: f"{stored.get(name, 'unset')} -> {url}" for name, url in differing.items()}
    return [Finding("store", keys.QUEUES, "change", details)] if differing else []


# ---- probe ----------------------------------------------------------------------------------------------------------


def probe(role: str, needs: Needs, store: Redis) -> list[Finding]:
    """Try, with the credentials of this process, what a process of this role does. Nothing is changed.

    Returns findings on what it can and cannot do. Raises ValueError for an unknown role, and AwsError.
    """
    if role not in OF_TIERS:
        raise ValueError(f"role is {role!r}; it must be one of {', '.join(OF_TIERS)}")
    address = needs.address
    sqs = client("sqs", address.region, address.endpoint_url)
    queues = Queues(sqs, address, store)
    findings = []
    for name in lists_of(address, needs.models):
        wrong = dict(_probe_list(role, queues, sqs, name))
        findings.append(Finding("queue", sqs_name(address, name), "wrong" if wrong else "keep", wrong, list=name))
    if needs.inbox and role == "sources":
        queue_name = inbox_name(address.prefix)
        wrong = dict(_probe_inbox(sqs, queue_name))
        findings.append(Finding("queue", queue_name, "wrong" if wrong else "keep", wrong))
    if needs.bucket is not None and role in FILES:
        findings.append(_probe_bucket(needs.bucket, address.region))
    return findings


def _probe_list(role: str, queues: Queues, sqs: Any, name: str) -> Iterator[tuple[str, str]]:
    """Each fault of a list's queue: (setting or permission, reason)."""
    try:
        url = queues.check(name).url
    except AwsError as error:
        yield "settings", _refused(error)
        return
    for permission, call in _put_down(sqs, url).items():
        if permission in OF_TIERS[role]:
            yield from _tried(permission, call, queues.aws_errors("put down messages of", name, permission))


def _probe_inbox(sqs: Any, name: str) -> Iterator[tuple[str, str]]:
    """Each fault of the queue of the bucket's events, as `_probe_list`."""
    try:
        with aws_errors(f"find queue {name}", "sqs:GetQueueUrl"):
            url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    except AwsError as error:
        yield "settings", _refused(error)
        return
    for permission, call in _put_down(sqs, url).items():
        yield from _tried(permission, call, aws_errors(f"put down messages of queue {name}", permission))


def _put_down(sqs: Any, url: str) -> dict[str, Callable[[], Any]]:
    """Permission -> a call that needs it, for a message that nobody has received."""
    receipt = {"QueueUrl": url, "ReceiptHandle": NOBODYS}
    return {
        "sqs:DeleteMessage": lambda: sqs.delete_message(**receipt),
        "sqs:ChangeMessageVisibility": lambda: sqs.change_message_visibility(**receipt, VisibilityTimeout=0),
    }


def _tried(permission: str, call: Callable[[], Any], errors: AbstractContextManager[None]) -> Iterator[tuple[str, str]]:
    try:
        with errors:
            call()
    except AwsError as error:
        if error.trouble is not None:  # else it only says that this receipt does not exist
            yield permission, _refused(error)


def _probe_bucket(bucket: Bucket, region: str) -> Finding:
    s3 = client("s3", bucket.region or region, bucket.endpoint_url)
    wrong = {}
    calls: dict[str, Callable[[], Any]] = {
        "s3:ListBucket": lambda: s3.list_objects_v2(Bucket=bucket.name, Prefix=bucket.key(), MaxKeys=1),
        "s3:GetObject": lambda: s3.get_object(Bucket=bucket.name, Key=bucket.key(NOBODYS)),
    }
    for permission, call in calls.items():
        try:
            with aws_errors(f"read {bucket}", permission):
                call()
        except AwsError as error:
            if error.code != "NoSuchKey":
                wrong[permission] = _refused(error)
    return Finding("bucket", bucket.name, "wrong" if wrong else "keep", wrong)


def _refused(error: AwsError) -> str:
    """The error's text. Raises it again where AWS is away, since nothing is known then."""
    if error.trouble is Trouble.AWAY:
        raise error
    return str(error)
