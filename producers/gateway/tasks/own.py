"""Tasks of the caller: another tenant's are answered exactly as unknown ones, after the same one look at the store."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncHandle
from producers.client.steps import Read, persistently
from producers.connection.script import text
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import TaskNotFound
from producers.gateway.context import gateway_of
from producers.gateway.http.caller import principal_of, same


def owned(connection: HTTPConnection, task: Task) -> Task:
    """The task, as its key's tenant's. Raises Problem where it names another one."""
    principal = principal_of(connection)
    same(principal, task.tenant, "tenant")
    return task if principal.key is None else task.model_copy(update={"tenant": principal.tenant})


async def task_of(connection: HTTPConnection, task_id: str) -> AsyncHandle:
    """The handle of a task that the caller may see. Raises TaskNotFound, redis.exceptions.RedisError or OSError."""
    client, principal = gateway_of(connection).client, principal_of(connection)
    handle = client.get(task_id)
    if not principal.sees_all:
        look = Read((("HGET", keys.task(task_id), "tenant"),))
        (tenant,) = await client.run(persistently(look, client.patience))
        if tenant is None or not principal.sees(text(tenant)):
            raise TaskNotFound(task_id)
    return handle
