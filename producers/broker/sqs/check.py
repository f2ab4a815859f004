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

#: Trouble of a fault of one queue, not of SQS or of the credentials.
_OF_ONE_QUEUE: Final = (None, Trouble.UNUSABLE)
#: A list that need not exist, of a name that Penstock's policies allow.
PROBE: Final = "penstock:queue:probe@0#default"


def check(address: Address, store: Redis, queues: Sequence[str] | None = None, *, make: bool = False) -> None:
    """Raise AwsError, which names queue, region and permission, if the queues cannot be used.

    `queues`: by Penstock's names; None: those of all versions that workers have announced, or the region alone while
    there are none. `make`: make missing ones, where the credentials may. Raises AwsNotInstalled without boto3, and
    redis.exceptions.RedisError.
    """
    sqs_queues = Queues(client("sqs", address.region, address.endpoint_url), address, store)
    expected = [
        queue for queue in (announced(store) if queues is None else queues) if address.celery or not is_celery(queue)
    ]
    names = [name for queue in expected for name, _ in lists(queue)]
    if not names:
        reach(sqs_queues)
    for name in names:
        try:
            sqs_queues.check(name)
        except AwsMissing as error:
            if not make:
                raise
            _make(address, name, error)
            sqs_queues.check(name)


def _make(address: Address, name: str, missing: AwsMissing) -> None:
    """Make a list's queue. Raises `missing` where the credentials may not."""
    try:
        for queue_name in make_missing(address, [name]):
            logger.info("made queue %s in %s", queue_name, address.region)
    except AwsError as error:
        if error.trouble is not Trouble.DENIED:
            raise
        message = f"{missing}. This process may not make it: {error}"
        raise AwsMissing(message, missing.code, missing.trouble) from error


def reach(queues: Queues) -> None:
    """Raise AwsError unless SQS answers and accepts the credentials. They may be valid for other queues only."""
    try:
        queues.url(PROBE)
    except AwsMissing:
        pass
    except AwsError as error:
        if not error.code.startswith("AccessDenied"):
            raise


def announced(store: Redis) -> list[str]:
    """The queues of the model versions that are published or announced by workers, without those that are retired."""
    cards = (parsed(card) for card in store.hvals(keys.MODELS))
    versions = {keys.version_queue(card["name"], card["version"]) for card in cards if "published" in card}
    versions |= {version_queue_of(text(pool)) for pool in store.hvals(keys.POOLS)}
    return sorted(queue for version in versions for queue in beside(version))


class Health:
    """Each list's fault, as of its last check. One thread at a time may check."""

    def __init__(self, connection: Connection) -> None:
        self._to = connection
        self._faults: dict[str, AwsError | None] = {}
        self._looks = 0

    def look(self) -> None:
        """Raise AwsError or redis.exceptions.RedisError unless SQS answers, and some announced model has its queues.

        A call checks the queues that are new or had a fault, and one more, by turns: one request, once all are known.
        Faults of one model among several are logged.
        """
        queues = {queue: [name for name, _ in lists(queue)] for queue in announced(self._to.store)}
        expected = [name for names in queues.values() for name in names]
        if not expected:
            reach(self._to.queues)
            return
        self._looks += 1
        doubtful = {name for name in expected if name not in self._faults or self._faults[name] is not None}
        for name in sorted({*doubtful, expected[self._looks % len(expected)]}):
            self._faults[name] = self._fault(name)
        errors = [error for name in expected if (error := self._faults[name]) is not None]
        if all(any(self._faults[name] is not None for name in names) for names in queues.values()):
            raise errors[0]
        for error in errors:
            warn_throttled(logger, "Tasks of a model cannot be sent: %s", error)

    def _fault(self, name: str) -> AwsError | None:
        try:
            self._to.queues.check(name, refresh=True)
        except AwsError as error:
            if trouble(error) not in _OF_ONE_QUEUE:
                raise
            return error
        return None
