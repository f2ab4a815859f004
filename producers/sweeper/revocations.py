"""Hears Celery's `revoke` and `terminate` where no worker is up to hear them.

    sender: PUBLISH on the control channel ─▶ workers that are up: their Celery revokes, and remembers the id
                                           ─▶ each sweeper: REVOKE ─▶ cancelled │ noted for CLAIM │ left to its worker

Each sweeper hears, whether it leads or not: REVOKE may be called twice, and so the one that follows a dead leader has
missed nothing. Redis keeps no such message: with no sweeper up, or while its connection is lost, only workers hear it.
Nothing is answered, so that `inspect` and `ping` count workers alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, backoff, persistently
from producers.connection.connect import SILENT_S, connect_async
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import sleep_unless_cancelled
from producers.contract.message import id_of
from producers.store import protocol

log = logging.getLogger(__name__)

#: Commands of Celery's remote control that end tasks by their ids.
COMMANDS: Final = frozenset({"revoke", "terminate"})
#: Interval (s) of pings on a quiet connection. It is lost if nothing came for two of them.
PING_S: Final = 5.0
#: Time (s) for which an unreachable store is tried for one id.
PATIENCE_S: Final = 60.0


async def hear(client: AsyncClient, control_url: str) -> None:
    """Follow revocations until cancelled. `control_url`: the server that carries Celery's remote control."""
    attempt = 0
    while True:
        server = connect_async(control_url)
        try:
            async with aclosing(_broadcasts(server)) as payloads:
                async for payload in payloads:
                    attempt = 0
                    await _revoke_all(client, revoked_ids(payload))
        except FAILURES as error:
            warn_throttled(log, "cannot hear whether Celery revokes tasks, trying again: %s", error)
        except Exception:
            log.exception("a revocation was not followed, going on")
        finally:
            with suppress(*FAILURES):
                await server.aclose()
        await sleep_unless_cancelled(backoff(attempt))
        attempt += 1


async def _broadcasts(server: Redis) -> AsyncGenerator[bytes]:
    """The payloads of the control channel. Raises ConnectionError if the server is silent."""
    database = server.connection_pool.connection_kwargs.get("db") or 0
    channel = server.pubsub()
    try:
        async with asyncio.timeout(SILENT_S):
            await channel.subscribe(f"/{database}.celery.pidbox")
        heard_at = time.monotonic()
        while True:
            message = await channel.get_message(ignore_subscribe_messages=False, timeout=PING_S)
            if message is None:
                if time.monotonic() - heard_at > 2 * PING_S:
                    raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s")
                await channel.ping()
                continue
            heard_at = time.monotonic()
            if message["type"] == "message":
                yield message["data"]
    finally:
        with suppress(*FAILURES):
            await channel.aclose()


def revoked_ids(payload: bytes) -> list[str]:
    """The ids that a broadcast to all workers ends, at most as many as are noted; none in any other message."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        envelope = json.loads(payload)
        body = envelope["body"]
        if envelope["content-type"] != "application/json":
            return []
        if envelope["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        command: Mapping[str, Any] = json.loads(body)
        if command["method"] not in COMMANDS or command.get("destination") or command.get("pattern"):
            return []
        named = command["arguments"]["task_id"]
        ids = (id_of({"id": task_id}) for task_id in (named if isinstance(named, list) else [named]))
        return list(dict.fromkeys(task_id for task_id in ids if task_id is not None))[: protocol.MAX_REVOKED]
    return []


async def _revoke_all(client: AsyncClient, task_ids: list[str]) -> None:
    for task_id in task_ids:
        try:
            await client.run(persistently(protocol.revoke(task_id), PATIENCE_S))
        except FAILURES as error:
            warn_throttled(log, "task %s was revoked, and is not cancelled: %s", task_id, error)
    if task_ids:
        log.info("Celery revoked %d tasks", len(task_ids))
