"""Celery's consumer, taught to keep what it cannot read, to print nothing of what callers sent, and whom to hold up."""

from __future__ import annotations

from typing import Any, Final

from celery.utils.log import get_logger
from celery.worker.consumer import Consumer as Stock

from producers.contract.message import is_plain
from workers.pool import control  # noqa: F401 - registers its commands

logger = get_logger(__name__)

#: Printed in logs instead of a message's body. `penstock dlq show` shows the whole message to users of the broker.
UNSHOWN: Final = "(not shown)"
#: Headers in which Celery's senders repeat the arguments.
ARGUMENTS: Final = ("argsrepr", "kwargsrepr")


class Consumer(Stock):
    """Stock acknowledges a message whose body cannot be decoded, which loses it, and logs the bodies of others; and its
    rate limits hold up every task, also those of HTTP and the clients, for whom the gateway has bounds of its own."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        logger.critical("A message cannot be decoded (%s: %s): dead-lettered", type(exc).__name__, exc)
        message.reject()

    def on_unknown_message(self, body: Any, message: Any) -> None:
        super().on_unknown_message(UNSHOWN, _without_arguments(message))

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        super().on_unknown_task(UNSHOWN, _without_arguments(message), exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        super().on_invalid_task(UNSHOWN, message, exc)

    def _limit_task(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_task(request, bucket, tokens)
        return self._limit_move_to_pool(request)

    def _limit_post_eta(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_post_eta(request, bucket, tokens)
        self.qos.decrement_eventually()
        return self._limit_move_to_pool(request)


def _without_arguments(message: Any) -> Any:
    """Strip a refused message of its copies of the arguments before it is logged. The broker keeps it as it came."""
    for name in ARGUMENTS:
        message.headers.pop(name, None)
    return message
