"""One webhooks process: its signals, its health, its end."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.wake import wake
from producers.store import epoch
from workers.runtime.health import Health
from workers.runtime.signals import when_told
from workers.webhooks.deliverer import Deliverer, WebhookSettings
from workers.webhooks.limits import QUICK, SLOW

log = logging.getLogger(__name__)

#: Open files that the tries, connections kept for the next ones, and all else may need.
FILES: Final = 4 * (QUICK + SLOW)


async def run(settings: WebhookSettings) -> None:
    """Deliver until SIGTERM or SIGINT; a second signal gives all rows back at once.

    Raises ValueError for a bad URL or network, and workers.errors.Refused for a port that is taken.
    """
    _allow_files()
    health = Health(settings.health_port)
    async with AsyncClient(settings.store, settings.store) as client:
        deliverer = Deliverer(client, settings)
        health.serve(deliverer, asyncio.get_running_loop())
        when_told(deliverer.stop)
        beside = [
            asyncio.create_task(wake(client.store, deliverer.due), name="wake"),
            asyncio.create_task(epoch.watch(client.store, deliverer.stop), name="watch the epoch"),
        ]
        log.info("delivering webhooks; not public and allowed: %s", ", ".join(settings.allowed) or "nothing")
        try:
            await deliverer.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)


def _allow_files() -> None:
    """Raise the limit of open files as far as is allowed and of use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
