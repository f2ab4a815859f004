"""Reads the options of `penstock aws`: what a system needs. No worker has to run to know a model's version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from workers.cli.aws.report import telling
from workers.cli.exits import Failure, needs
from workers.cli.models.references import find_models
from workers.errors import Refused

if TYPE_CHECKING:
    from redis import Redis

    from producers.aws.account import Needs
    from producers.broker.sqs.address import Address
    from producers.broker.sqs.queues.wanted import Encryption
    from producers.store.blobs.bucket import Bucket

_WITH_VERSION: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9a-f]{12})")


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
    models = versions(model or (), store)
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


def versions(references: Sequence[str], store: Redis | None) -> list[tuple[str, str]]:
    """Names and versions of models. Two for one name if another version is served than that on this machine.

    Raises Refused for a model that is found nowhere; redis.exceptions.RedisError.
    """
    return list(dict.fromkeys(pair for one in references for pair in _of(one, store)))


def _of(reference: str, store: Redis | None) -> list[tuple[str, str]]:
    if given := _WITH_VERSION.fullmatch(reference):
        return [(given[1], given[2])]
    from workers.library import name_of

    name = name_of(reference)
    served = _served(name, store)
    if served and reference.startswith("hf://"):  # no need to download it
        return served
    try:
        return [*served, *_local(reference)]
    except Refused as refused:
        if served:
            return served
        unserved = "; the store has no card of it" if store is not None else ""
        raise Failure(f"{refused}{unserved}; or give the version, as NAME@0123456789ab") from refused


def _served(name: str, store: Redis | None) -> list[tuple[str, str]]:
    """The version of the store's card."""
    from producers.contract import keys

    card = None if store is None else store.hget(keys.MODELS, name)
    return [] if card is None else [(name, str(json.loads(card)["version"]))]


def _local(reference: str) -> list[tuple[str, str]]:
    with needs("worker"):
        from engine.text.checkpoint import model_version
    return [(one.name, model_version(one.folder)) for one in find_models([reference])]
