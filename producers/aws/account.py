"""Makes all that a system needs in an AWS account, or tells what is missing. It may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redis import Redis

from producers.aws.bucket import BucketSetup, may_send
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address
from producers.broker.sqs.setup import Finding, Setup, own_account
from producers.broker.sqs.wanted import (
    AS_IT_IS,
    Encryption,
    arn,
    inbox,
    inbox_name,
    lists_of,
    partition_of,
    wanted,
)
from producers.connection.script import text
from producers.store.blobs.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Needs:
    """What a system needs. `models`: names and versions."""

    address: Address
    models: Sequence[tuple[str, str]]
    predefined: Mapping[str, str] = field(default_factory=dict)
    """List -> ARN of the queue that an operator chose for it."""
    bucket: Bucket | None = None
    inbox: bool = False
    """Whether the bucket tells a queue of new input files."""
    encryption: Encryption = AS_IT_IS
    tags: Mapping[str, str] = field(default_factory=dict)


def provide(needs: Needs, store: Redis | None, *, apply: bool) -> list[Finding]:
    """Make and correct what is needed, or only look (`apply`), and write the queues' URLs into the store.

    Raises AwsError, which names queue or bucket and the permission; ValueError for a bad ARN;
    redis.exceptions.RedisError.
    """
    setup = Setup(needs.address, needs.encryption, apply)
    names = [name for name in lists_of(needs.address, needs.models) if name not in needs.predefined]
    found = [setup.check(name, chosen) for name, chosen in needs.predefined.items()]
    found += setup.provide(wanted(needs.address, names, needs.tags)) if names else []
    if store is not None:
        found += _write(store, found, apply)
    return found + (_of_bucket(needs, needs.bucket, setup, apply) if needs.bucket else [])


def _of_bucket(needs: Needs, bucket: Bucket, setup: Setup, apply: bool) -> list[Finding]:
    address = needs.address
    found, queue = [], ""
    if needs.inbox:
        account = address.account or own_account(address)
        queue = arn(address.region, account, inbox_name(address.prefix))
        may = may_send(queue, "s3", f"arn:{partition_of(address.region)}:s3:::{bucket.name}", account)
        found = setup.provide(inbox(address, needs.tags, may))
    region = bucket.region or address.region
    return [*found, BucketSetup(bucket, region, queue, needs.encryption, needs.tags, apply).provide()]


def _write(store: Redis, findings: Sequence[Finding], apply: bool) -> list[Finding]:
    """Write the URLs of usable queues into the store, where workers and senders look for them."""
    urls = {one.list: one.url for one in findings if one.list and one.url and one.action != "wrong"}
    existing = {text(name): text(url) for name, url in store.hgetall(keys.QUEUES).items()}
    differing = {name: url for name, url in urls.items() if existing.get(name) != url}
    if differing and apply:
        store.hset(keys.QUEUES, items=[part for pair in differing.items() for part in pair])
    if not differing:
        return []
    return [Finding("store", keys.QUEUES, "change", {name: existing.get(name, "unset") for name in differing})]
