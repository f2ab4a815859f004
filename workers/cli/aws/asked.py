"""Reads the options of `penstock aws`: what a system needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from workers.cli.aws.report import telling
from workers.cli.aws.versions import versions
from workers.cli.exits import Failure

if TYPE_CHECKING:
    from redis import Redis

    from producers.aws.account import Needs
    from producers.broker.sqs.address import Address
    from producers.broker.sqs.queues.wanted import Encryption
    from producers.store.blobs.bucket import Bucket


@contextmanager
def opened(broker: str, store: str | None) -> Iterator[tuple[Address, Redis | None]]:
    """The broker's address, and a client of the store, if one is given. Errors within it raise Failure."""
    from contextlib import closing

    from producers.broker.sqs.address import read
    from producers.connection.connect import connect

    with telling(broker):
        address = read(broker)
        if store is None:
            yield address, None
            return
        with closing(connect(store)) as server:
            yield address, server


def needs_of(
    address: Address,
    store: Redis | None,
    model: list[str] | None,
    predefined: list[str] | None,
    bucket: str | None,
    inbox: bool,
    kms_key: str | None,
    sse: str | None,
    tag: list[str] | None,
) -> Needs:
    """The needs that the options name. Raises Failure."""
    from producers.aws.account import Needs

    if inbox and bucket is None:
        raise Failure("--inbox needs --bucket: the bucket that tells of files in inbox/")
    models = versions(model or (), store, lambda line: typer.echo(line, err=True))
    if not models and bucket is None:
        raise Failure("nothing to do: give --model, --bucket or both")
    return Needs(
        address,
        models,
        _chosen(address, store, models, predefined or []),
        None if bucket is None else bucket_of(bucket),
        inbox,
        _encryption(kms_key, sse),
        dict(map(_tag, tag or ())),
    )


def _chosen(
    address: Address, store: Redis | None, models: list[tuple[str, str]], predefined: list[str]
) -> dict[str, str]:
    """List -> ARN. Raises Failure unless every list of one model has a queue, and a store to write it into."""
    from producers.broker.sqs.queues.wanted import lists_of

    if not predefined:
        return {}
    if store is None:
        raise Failure("--predefined needs --store: processes read there which queues were chosen")
    if len(models) != 1:
        raise Failure("--predefined is about one version of one model: give one --model, as NAME@VERSION if need be")
    arns = dict(map(_pair, predefined))
    lists = {_tier(name): name for name in lists_of(address, models)}
    if arns.keys() != lists.keys():
        raise Failure(f"--predefined names {', '.join(sorted(arns))}; it must name each of {', '.join(lists)} once")
    return {name: arns[tier] for tier, name in lists.items()}


def _tier(name: str) -> str:
    from producers.broker.sqs.names import is_celery, split

    queue, tier = split(name)
    return "celery" if is_celery(queue) else tier


def bucket_of(said: str) -> Bucket:
    """A bucket by its name or URL. Raises ValueError."""
    from producers.store.blobs.bucket import read

    return read(said if "://" in said else f"s3://{said}")


def arns_of(actuators: list[str] | None, region: str, account: str) -> dict[str, tuple[str, ...]]:
    """Kind -> ARNs of what the actuators act on, for `Scope`. Raises ValueError."""
    from urllib.parse import urlsplit

    from workers.autoscaler.actuators.aws import ec2, ecs

    found: dict[str, tuple[str, ...]] = {"services": (), "groups": ()}
    for url in actuators or ():
        parts = urlsplit(url)
        if parts.scheme not in ("ecs", "ec2"):
            raise ValueError(f"--actuator is {url!r}; it must begin with ecs:// or ec2://")
        kind, arn = ("services", ecs.arn) if parts.scheme == "ecs" else ("groups", ec2.arn)
        found[kind] += (arn(parts, region, account),)
    return found


def _encryption(kms_key: str | None, sse: str | None) -> Encryption:
    from producers.broker.sqs.queues.wanted import Encryption

    if sse not in (None, "sqs"):
        raise Failure(f"--sse is {sse!r}; it must be sqs, or use --kms-key")
    if sse and kms_key:
        raise Failure("--sse and --kms-key exclude each other")
    return Encryption(kms_key or "", sse is not None)


def _tag(said: str) -> tuple[str, str]:
    key, value = _pair(said)
    if key.startswith(("aws:", "penstock:")):
        raise Failure(f"the tag {key!r} cannot be set: aws: is AWS's own, penstock: is Penstock's")
    return key, value


def _pair(said: str) -> tuple[str, str]:
    name, equals, value = said.partition("=")
    if not equals or not name:
        raise Failure(f"{said!r} must be NAME=VALUE")
    return name, value
