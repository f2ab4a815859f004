"""Is this process alive, and is it of use."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from redis.asyncio import Redis

from producers.gateway.context import gateway_of
from producers.gateway.errors import RETRY_AFTER, Problem, body_of
from producers.steps import FAILURES

router = APIRouter(tags=["health"])

#: A server that takes longer than this (s) to say PONG is of no use.
PATIENCE_S = 2.0


@router.get("/livez")
async def livez() -> JSONResponse:
    """The process answers. Do not restart it for what /readyz says."""
    return JSONResponse({"status": "ok"})


@router.get("/health", include_in_schema=False)  # as vLLM calls it: load generators wait for it
@router.get("/readyz", responses={503: {"description": "The store, the broker or both do not answer."}})
async def readyz(request: Request) -> JSONResponse:
    """Store and broker answer, so tasks can be taken."""
    client = gateway_of(request).client
    servers = {"store": client.store, "broker": client.broker}
    answers = dict(zip(servers, await asyncio.gather(*map(_answers, servers.values())), strict=True))
    checks = {name: "ok" if fine else "does not answer" for name, fine in answers.items()}
    if all(answers.values()):
        return JSONResponse({"status": "ready", "checks": checks})
    away = " and ".join(name for name, fine in answers.items() if not fine)
    problem = Problem(503, f"No answer from the {away}.", code="not_ready")
    return JSONResponse({**body_of(problem), "checks": checks}, 503, RETRY_AFTER)


async def _answers(server: Redis) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await server.execute_command("PING")
    except FAILURES:
        return False
    return True
