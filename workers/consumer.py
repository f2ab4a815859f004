"""Celery's consumer, taught to keep what it cannot read, and whom a rate limit is for."""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger
from celery.worker.consumer import Consumer as Stock

from producers.message import is_plain
from workers import control  # noqa: F401 - registers its commands

logger = get_logger(__name__)


class Consumer(Stock):
    """Stock acknowledges a message whose body cannot be decoded, which loses it; and its rate limits hold up every
    task, also those of HTTP and the clients, for whom the gateway has bounds of its own."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        logger.critical("A message cannot be decoded (%r): dead-lettered", exc)
        message.reject()

    def _limit_task(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_task(request, bucket, tokens)
        return self._limit_move_to_pool(request)

    def _limit_post_eta(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_post_eta(request, bucket, tokens)
        self.qos.decrement_eventually()
        return self._limit_move_to_pool(request)
