"""Hears at once of rows that become due, so that nothing polls the store for them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from redis.asyncio import Redis

from producers.client.steps import FAILURES, backoff
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys

log = logging.getLogger(__name__)


async def wake(store: Redis, due: asyncio.Event) -> None:
    """Set `due` for each message, until cancelled. A lost connection is made again, and sets it, too."""
    attempt = 0
    while True:
        channel = store.pubsub()
        try:
            await channel.subscribe(keys.WEBHOOKS_WAKE)
            due.set()  # for what came before
            while True:
                await channel.get_message(ignore_subscribe_messages=True, timeout=None)
                due.set()
                attempt = 0
        except FAILURES as error:
            warn_throttled(log, "lost the store's wake-up connection, connecting again: %s", error)
        finally:
            with suppress(*FAILURES):
                await channel.aclose()
        await asyncio.sleep(backoff(attempt))
        attempt += 1
