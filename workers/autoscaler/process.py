"""One autoscaler process: its signals, its health, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from producers.client.aio import AsyncClient
from workers.autoscaler.autoscaler import Autoscaler, AutoscalerSettings
from workers.autoscaler.pools import Scaled, fixed
from workers.runtime.health import Health

log = logging.getLogger(__name__)


async def run(
    broker: str,
    store: str,
    pools: Sequence[Scaled],
    settings: AutoscalerSettings,
    *,
    dry_run: bool,
    health: Health | None,
    show: Callable[[str, dict[str, Any], bool], None],
) -> None:
    """Scale until SIGTERM or SIGINT; then let another lead at once. Workers of local actuators drain before the end."""
    async with AsyncClient(broker, store) as client:
        autoscaler = Autoscaler(client, fixed(pools), settings, dry_run=dry_run, show=show)
        if health is not None:
            health.serve(autoscaler)
            log.info("/livez and /readyz on port %d", health.port)
        task = asyncio.create_task(autoscaler.run(), name="autoscaler")
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
        log.info("pools: %s", ", ".join(f"{one.settings.name} ({one.settings.actuator})" for one in pools))
        try:
            with suppress(asyncio.CancelledError):
                await task
        finally:
            await asyncio.gather(*(one.actuator.aclose() for one in pools if one.actuator is not None))
