"""The work that a gateway does for one request before the store decides of it: whose it is, and whether any was done.

Rendering, tokenizing and compiling cost everybody on this gateway something, and ADMIT charges only what it admits. So
whose turn it is goes by tenant (`producers.gateway.executor`), and a request that is refused after work is charged all
the same (`producers.gateway.admission.spent`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from producers.gateway.http.authorization import tenant_of
from producers.store.access.principal import Account


async def _none() -> Sequence[Account]:
    return ()


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class Work:
    """`tenant`: who takes a turn; "" where none is named. `limited`: the accounts of its key and tenant. `size`: the
    texts of the request have no more bytes (UTF-8); None if nobody has measured that. `left`: returns once the caller
    has left, and is for after the body was read. `done`: some work was done."""

    tenant: str = ""
    limited: Callable[[], Awaitable[Sequence[Account]]] = _none
    size: int | None = None
    left: Callable[[], Awaitable[None]] = _never
    done: bool = False


def work_of(connection: HTTPConnection, tenant: str | None = None) -> Work:
    """The work of a request, at an endpoint that needs a scope. `tenant`: the one that its body names, if it names one.

    Raises Problem for a header that names no tenant.
    """
    state = connection.scope["state"]
    work: Work | None = state.get("work")
    if work is None:
        state["work"] = work = Work()
        if isinstance(connection, Request):
            work.left = partial(_disconnected, connection.receive)
        _belong(work, connection, tenant or tenant_of(connection))
    elif tenant is not None and tenant != work.tenant:
        _belong(work, connection, tenant)
    return work


def _belong(work: Work, connection: HTTPConnection, tenant: str | None) -> None:
    work.tenant = tenant or ""
    work.limited = partial(connection.app.state.gateway.accounts.limited, connection, tenant)
