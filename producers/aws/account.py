"""Makes all that a system needs in an AWS account, or tells what is missing. It may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redis import Redis

from producers.aws.bucket import BucketSetup, may_send
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, is_own
from producers.broker.sqs.setup import Finding, Setup, arn_of, own_account
from producers.broker.sqs.specs import AS_IT_IS, Encryption, arn, inbox, inbox_name, lists_of, wanted
from producers.connection.aws import partition_of
from producers.connection.script import text
from producers.store.blobs.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Needs:
    """A system's needs. `models`: names and versions."""

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

    Queues that were chosen before stay chosen. Raises AwsError, which names queue or bucket and the permission;
    ValueError for a bad ARN; redis.exceptions.RedisError.
    """
    setup = Setup(needs.address, needs.encryption, apply)
    known = {} if store is None else {text(name): text(url) for name, url in store.hgetall(keys.QUEUES).items()}
    names = lists_of(needs.address, needs.models)
    chosen = {**_chosen_before(needs.address, names, known), **needs.predefined}
    found = [setup.check(name, queue) for name, queue in chosen.items()]
    own = [name for name in names if name not in chosen]
    found += setup.provide(wanted(needs.address, own, needs.tags)) if own else []
    if store is not None:
        found += _write(store, known, found, apply)
    if needs.bucket is not None:
        found += _of_bucket(needs, needs.bucket, setup, {one.name for one in found})
    return found


def _chosen_before(address: Address, names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """List -> ARN of the queues in the store that `setup` did not make, under whatever prefix."""
    region = address.region
    return {name: arn_of(region, known[name]) for name in names if name in known and not is_own(name, known[name])}


def _of_bucket(needs: Needs, bucket: Bucket, setup: Setup, done: set[str]) -> list[Finding]:
    address = needs.address
    found, queue = [], ""
    if needs.inbox:
        account = address.account or own_account(address)
        queue = arn(address.region, account, inbox_name(address.prefix))
        may = may_send(queue, "s3", f"arn:{partition_of(address.region)}:s3:::{bucket.name}", account)
        found = setup.provide([one for one in inbox(address, needs.tags, may) if one.name not in done])
    region = bucket.region or address.region
    return [*found, BucketSetup(bucket, region, queue, needs.encryption, needs.tags, setup.apply).provide()]


def _write(store: Redis, known: Mapping[str, str], findings: Sequence[Finding], apply: bool) -> list[Finding]:
    """Write the URLs of usable queues into the store, where workers and senders look for them."""
    urls = {one.list: one.url for one in findings if one.list and one.url and one.action != "wrong"}
    differing = {name: url for name, url in urls.items() if known.get(name) != url}
    if differing and apply:
        store.hset(keys.QUEUES, items=[part for pair in differing.items() for part in pair])
    details = {name: f"{known.get(name, 'unset')} -> {url}" for name, url in differing.items()}
    return [Finding("store", keys.QUEUES, "change", details)] if differing else []
