"""Wakes the senders of the outbox when a row becomes due, so that nothing polls the store."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from redis.asyncio import Redis

from producers.client.steps import FAILURES, backoff
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import text
from producers.contract import keys

log = logging.getLogger(__name__)


async def wake(store: Redis, due: asyncio.Event, source: str = "") -> None:
    """Set `due` whenever a row becomes due, until cancelled. A new connection after a lost one sets it, too.

    `source`: the source whose replies to wait for; without one, webhooks.
    """
    attempt = 0
    while True:
        channel = store.pubsub()
        try:
            await channel.subscribe(keys.WEBHOOKS_WAKE)
            due.set()  # for what came before
            while True:
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=None)
                if message is None or text(message["data"]) == source:
                    due.set()
                attempt = 0
        except FAILURES as error:
            warn_throttled(log, "lost the store's wake-up connection, connecting again: %s", error)
        finally:
            with suppress(*FAILURES):
                await channel.aclose()
        await asyncio.sleep(backoff(attempt))
        attempt += 1
