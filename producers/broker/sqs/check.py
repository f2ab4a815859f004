"""Checks that SQS can be used, before a process starts and while it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from redis import Redis

from producers.broker.sqs.address import Address, is_celery, lists
from producers.broker.sqs.queues import Connection, Queues
from producers.broker.sqs.setup import make_missing
from producers.connection.aws import AwsError, AwsMissing, client
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import parsed, text
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys
from producers.contract.keys import version_queue_of
from producers.contract.levels import beside

logger = logging.getLogger(__name__)

#: The fault of one queue, not of SQS or of the credentials.
_ITS_OWN: Final = (None, Trouble.UNUSABLE)
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


def _make(address: Address, name: str, missing: AwsMissing) -> None:
    """Make a list's queue. Raises `missing` where the credentials may not."""
    try:
        for made in make_missing(address, [name]):
            logger.info("made queue %s in %s", made, address.region)
    except AwsError as error:
        if error.trouble is not Trouble.DENIED:
            raise
        said = f"{missing}. This process may not make it: {error}"
        raise AwsMissing(said, missing.code, missing.trouble) from error


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


class Health:
    """Remembers what was wrong with each list's queue when it was last looked at. One thread at a time may look."""

    def __init__(self, connection: Connection) -> None:
        self._to = connection
        self._faults: dict[str, AwsError | None] = {}
        self._looks = 0

    def look(self) -> None:
        """Raise AwsError or redis.exceptions.RedisError unless SQS answers, and some announced model has its queues.

        It asks for those that were not seen yet or had a fault, and for one more, by turns. Faults of one model among
        several are logged.
        """
        queues = {queue: [name for name, _ in lists(queue)] for queue in announced(self._to.store)}
        wanted = [name for names in queues.values() for name in names]
        if not wanted:
            reach(self._to.queues)
            return
        self._looks += 1
        doubtful = {name for name in wanted if name not in self._faults or self._faults[name] is not None}
        for name in sorted({*doubtful, wanted[self._looks % len(wanted)]}):
            self._faults[name] = self._fault(name)
        found = [error for name in wanted if (error := self._faults[name]) is not None]
        if all(any(self._faults[name] is not None for name in names) for names in queues.values()):
            raise found[0]
        for error in found:
            warn_throttled(logger, "Tasks of a model cannot be sent: %s", error)

    def _fault(self, name: str) -> AwsError | None:
        try:
            self._to.queues.check(name, anew=True)
        except AwsError as error:
            if trouble(error) not in _ITS_OWN:
                raise
            return error
        return None
