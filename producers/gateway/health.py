"""`/livez` and `/readyz`: whether this process is alive, and whether it can take tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from producers.client.steps import FAILURES
from producers.connection.aws import AwsError
from producers.connection.trouble import NotPrimary, Trouble, error_text, trouble
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http.errors import RETRY_AFTER, Problem, body_of
from producers.gateway.metrics import read_servers
from producers.gateway.readiness_checks import lasts
from producers.gateway.tasks.views import ErrorView
from producers.store.fleet.scaling import is_fresh, states
from producers.store.waiting import STAGES, model_of

router = APIRouter(tags=["health"])

#: JSON, status, and headers beside the usual ones.
Answer = tuple[dict[str, Any], int, Mapping[str, str] | None]

#: Time limit (s) for a server's PONG.
PATIENCE_S = 2.0
SILENT = "does not answer"
#: While the gateway is behind with its work, all who ask within this time (s) are told the same; at other times, all
#: who ask while an answer is made: it takes ten calls to the servers.
AGE_S: Final = 0.5


@dataclass(slots=True)
class Readiness:
    """The latest answer: its JSON, status and headers."""

    latest: asyncio.Task[Answer] | None = None
    at: float = float("-inf")
    """When the answer was begun, by the event loop's clock."""

    async def answer(self, gateway: Gateway, behind: bool) -> Answer:
        now = asyncio.get_running_loop().time()
        if self.latest is None or (self.latest.done() and not (behind and now - self.at < AGE_S)):
            self.latest, self.at = asyncio.create_task(_looked(gateway)), now
        return await asyncio.shield(self.latest)


@router.get("/livez")
async def livez() -> JSONResponse:
    """The process is alive. Do not restart it because of /readyz."""
    return JSONResponse({"status": "ok"})


@router.get("/health", include_in_schema=False)  # vLLM's name, which load generators poll
@router.get(
    "/readyz",
    responses={503: {"model": ErrorView, "description": "The gateway cannot take tasks now; the error says why."}},
)
async def readyz(request: Request) -> JSONResponse:
    """Store and broker answer, files' bucket lets us in, and each awaited model is published or served, and loaded.

    `degraded`: whether overload refuses or shortens tasks, or a server is nearly full or cannot write its files;
    `checks.overload` says how, model by model, and `checks.storage` which server. It is ready all the same: what it
    refuses, others would refuse, too, and a gateway that is taken out of service would cut its streams.
    """
    state = request.app.state
    content, status, headers = await state.readiness.answer(gateway_of(request), state.fair_share.behind)
    return JSONResponse(content, status, headers)


async def _looked(gateway: Gateway) -> Answer:
    client = gateway.client
    broker = client.reserved.ping if client.one_server else client.broker.ping
    servers: dict[str, Callable[[], Awaitable[object]]] = {"store": client.reserved.ping, "broker": broker}
    faults = dict(zip(servers, await asyncio.gather(*map(_fault, servers.values())), strict=True))
    checks = {name: fault or "ok" for name, fault in faults.items()}
    if away := " and ".join(name for name, fault in faults.items() if fault == SILENT):
        return _not_ready(f"No answer from the {away}.", checks)
    if refusing := " ".join(f"The {name} cannot be used: {fault}." for name, fault in faults.items() if fault):
        return _not_ready(refusing, checks)
    if error := await gateway.reach.error(PATIENCE_S):
        checks["files"] = str(error)
        if lasts(error):
            return _not_ready("The place of files cannot be used.", checks)
    if missing := await gateway.awaited.unserved():
        checks["models"] = f"{', '.join(missing)}: not published, and served by no worker yet"
        return _not_ready(f"{checks['models']}; `penstock models publish` lets tasks wait for a worker.", checks)
    if unread := gateway.awaited.unread:
        checks["models"] = f"{', '.join(unread)}: tokenizer and chat template are being loaded"
        return _not_ready(f"{checks['models']}.", checks)
    starts, storage, overload = await asyncio.gather(_starts(gateway), _storage(gateway), _overload(gateway))
    more = starts | storage | overload
    return {"status": "ready", "degraded": bool(storage or overload), "checks": checks | more}, 200, None


async def _overload(gateway: Gateway) -> dict[str, str]:
    """The models that are overloaded, with their stages."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            queues = await gateway.admission.overload.all(gateway.client.reserved)
    except FAILURES:
        return {}
    stages = {queue: STAGES[pressure.stage] for queue, pressure in queues.items() if pressure.stage}
    summary = "; ".join(f"{model_of(queue)}: {stage}" for queue, stage in stages.items())
    return {"overload": summary} if stages else {}


async def _storage(gateway: Gateway) -> dict[str, str]:
    """The servers that are filling or full, or cannot write their files."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            servers = await read_servers(gateway.client)
    except FAILURES:
        return {}
    problems = [f"{name}: {storage.problem()}" for name, storage in servers.items() if storage.problem()]
    return {"storage": "; ".join(problems)} if problems else {}


async def _starts(gateway: Gateway) -> dict[str, str]:
    """The reasons why workers do not come up. The gateway is ready all the same: tasks wait in their queues."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            seconds, _ = await gateway.client.reserved.time()
            pool_states = await states(gateway.client.reserved)
    except FAILURES:
        return {}
    fresh = {pool: state for pool, state in pool_states.items() if is_fresh(state.get("at"), seconds)}
    troubles = [f"{pool}: {state['trouble']}" for pool, state in sorted(fresh.items()) if state.get("trouble")]
    return {"workers": "; ".join(troubles)} if troubles else {}


def _not_ready(why: str, checks: dict[str, str]) -> Answer:
    problem = Problem(503, why, code="not_ready")
    return {**body_of(problem), "checks": checks}, 503, RETRY_AFTER


async def _fault(ping: Callable[[], Awaitable[object]]) -> str:
    """Returns a server's fault; empty if it has none. A server that cannot write its files refuses PING, too:
    `_storage` reports it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ping()
    except FAILURES as error:
        if trouble(error) is Trouble.FULL:
            return ""
        tells_cause = isinstance(error, (AwsError, NotPrimary)) or trouble(error) is not Trouble.AWAY
        return error_text(error).rstrip(".") if tells_cause else SILENT
    return ""
