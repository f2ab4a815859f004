"""Hides other tenants' objects: they are answered exactly as unknown ones, after the same look at the store.

sees ─▶ one field of the object's hash, its tenant ─▶ only then is the object itself read
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncHandle
from producers.client.operations import not_found
from producers.client.steps import Read, persistently
from producers.connection.script import text
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.admission.limits import check_may_use
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import TENANT, actor_of, principal_of, same, tenant_of
from producers.gateway.http.errors import invalid_value
from producers.store.access import audit

#: Time (s) for which a cancel waits for the task's worker, which needs a step.
CANCEL_S: Final = 1.0


def owned(connection: HTTPConnection, task: Task) -> Task:
    """The task, as its key's tenant's or the one's that the header names. Raises Problem where it names another one,
    or what its key may not use."""
    principal, tenant = principal_of(connection), tenant_of(connection)
    same(principal, task.tenant, "tenant")
    check_may_use(principal, task, "tier")
    if principal.key is None:
        if None not in (tenant, task.tenant) and tenant != task.tenant:
            message = f"tenant is {shown(task.tenant)}, and the header {TENANT} says {shown(tenant)}; give one of them"
            raise invalid_value("tenant", message)
        tenant = tenant or task.tenant
    return task if task.tenant == tenant else task.model_copy(update={"tenant": tenant})


async def sees(connection: HTTPConnection, name: str) -> bool:
    """Whether the caller may see what this hash of the store tells of: a task, a file, a batch.

    It reads the tenant alone: how large another tenant's record is must not show in the time of the answer. Raises
    redis.exceptions.RedisError or OSError.
    """
    client, principal = gateway_of(connection).client, principal_of(connection)
    if principal.sees_all:
        return True
    (tenant,) = await client.run(persistently(Read((("HGET", name, "tenant"),)), client.patience))
    return tenant is not None and principal.sees(text(tenant))


async def task_of(connection: HTTPConnection, task_id: str) -> AsyncHandle:
    """The handle of a task that the caller may see. Raises TaskNotFound, redis.exceptions.RedisError or OSError."""
    if not await sees(connection, keys.task(task_id)):
        raise not_found(task_id)
    return gateway_of(connection).client.get(task_id)


async def foreign_tenant(connection: HTTPConnection, name: str) -> str | None:
    """The tenant of an object, where that is another one than the caller's key's; else None. Only keys of the scope
    admin reach such objects. Raises as `sees` does."""
    client, principal = gateway_of(connection).client, principal_of(connection)
    if principal.key is None or not principal.sees_all:
        return None
    (tenant,) = await client.run(persistently(Read((("HGET", name, "tenant"),)), client.patience))
    return None if tenant is None or text(tenant) == principal.tenant else text(tenant)


async def audit_operator(connection: HTTPConnection, did: str, object_id: str, tenant: str | None) -> None:
    """Append to the audit log what an operator's key did with an object of this other tenant; nothing for None."""
    if tenant is not None:
        change = actor_of(connection).did(did, object_id, tenant)
        await audit.append(gateway_of(connection).client.store, change)


async def cancelled(handle: AsyncHandle) -> tuple[bool, Record]:
    """Cancel a task. Returns whether that was accepted, and its record: final, unless its worker takes too long.

    Raises TaskNotFound, redis.exceptions.RedisError or OSError.
    """
    accepted = await handle.cancel()
    give_up, pause = time.monotonic() + CANCEL_S, 0.01
    while not (record := await handle.status()).final and time.monotonic() < give_up:
        await asyncio.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return accepted, record
