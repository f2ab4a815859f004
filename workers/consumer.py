"""Celery's consumer, taught to keep what it cannot read."""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger
from celery.worker.consumer import Consumer as Stock

logger = get_logger(__name__)


class Consumer(Stock):
    """Stock acknowledges a message whose body cannot be decoded, which loses it."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        logger.critical("A message cannot be decoded (%r): dead-lettered", exc)
        message.reject()
