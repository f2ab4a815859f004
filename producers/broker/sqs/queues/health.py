"""Looks whether SQS answers, and has the queues that it should have: one request a look, once each queue was seen."""

from __future__ import annotations

import logging
from typing import Final

from producers.broker.sqs.connection import Connection
from producers.broker.sqs.names import lists
from producers.broker.sqs.queues.check import announced, reach
from producers.connection.aws import AwsError
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import Trouble, trouble

logger = logging.getLogger(__name__)

#: The fault of one queue, not of SQS or of the credentials.
_ITS_OWN: Final = (None, Trouble.UNUSABLE)


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
