"""Checks that SQS can be used, before a process starts and while it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from redis import Redis

from producers.broker.sqs.address import Address
from producers.broker.sqs.names import is_celery, lists
from producers.broker.sqs.queues.lookup import Queues
from producers.broker.sqs.queues.setup import make_missing
from producers.connection.aws import AwsError, AwsMissing, client
from producers.connection.script import parsed, text
from producers.connection.trouble import Trouble
from producers.contract import keys
from producers.contract.keys import version_queue_of
from producers.contract.levels import beside

log = logging.getLogger(__name__)

#: A list that need not exist, of a name that Penstock's policies allow to be asked for.
PROBE: Final = "penstock:queue:probe@0#default"


def check(address: Address, store: Redis, queues: Sequence[str] | None = None, *, make: bool = False) -> None:
    """Raise AwsError, which names queue, region and permission, if the queues cannot be used.

    `queues`: by Penstock's names; None: those of all versions that workers have announced, or the region alone while
    there are none. `make`: make missing ones, where the credentials may. Raises AwsNotInstalled without boto3, and
    redis.exceptions.RedisError.
    """
    sqs = client("sqs", address.region, address.endpoint_url)
    found = Queues(sqs, address, store)
    asked = [
        queue for queue in (announced(store) if queues is None else queues) if address.celery or not is_celery(queue)
    ]
    names = [name for queue in asked for name, _ in lists(queue)]
    if not names:
        reach(found)
    for name in names:
        try:
            found.check(name)
        except AwsMissing as error:
            if not make:
                raise
            _make(address, name, error)
            found.check(name)


def reach(queues: Queues) -> None:
    """Raise AwsError unless SQS answers, and knows the credentials. They may be good for other queues alone."""
    try:
        queues.url(PROBE)
    except AwsMissing:
        pass
    except AwsError as error:
        if not error.code.startswith("AccessDenied"):
            raise


def announced(store: Redis) -> list[str]:
    """The queues of the model versions that are published or that workers have announced, and no sweeper forgot."""
    cards = (parsed(card) for card in store.hvals(keys.MODELS))
    found = {keys.version_queue(card["name"], card["version"]) for card in cards if "published" in card}
    found |= {version_queue_of(text(about)) for about in store.hvals(keys.POOLS)}
    return sorted(queue for version in found for queue in beside(version))


def _make(address: Address, name: str, missing: AwsMissing) -> None:
    """Make a list's queue. Raises `missing` where the credentials may not."""
    try:
        for made in make_missing(address, [name]):
            log.info("made queue %s in %s", made, address.region)
    except AwsError as error:
        if error.trouble is not Trouble.DENIED:
            raise
        said = f"{missing}. This process may not make it: {error}"
        raise AwsMissing(said, missing.code, missing.trouble) from error
