"""`/metrics`, in Prometheus' text format: this gateway's own figures, and those of all pools.

    GET /metrics ─▶ read_fleet ─▶ own: requests of this gateway
                                  pools: queues, sweepers     workers: their leases     scaling: decisions, profiles
                    PRESSURE   ─▶ pools: the store's counts of what waits, and the overload that follows
                    INFO       ─▶ servers: how full store and broker are

Labels are bounded: routes by their templates, models and pools by what is deployed, workers by those alive. Every
gateway reports the same for the pools: take `max by (pool)` over gateways, not the sum.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from producers.admin.fleet import read_fleet
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.gateway.metrics.own import UNKNOWN, Metrics, Stream
from producers.gateway.storage import read_servers
from producers.store.waiting import queues

__all__ = ["UNKNOWN", "Metrics", "Stream", "router"]

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' format. It answers also while store or broker is away: see `penstock_up`."""
    gateway = request.app.state.gateway
    found = gateway.metrics
    try:
        async with asyncio.timeout(SILENT_S):  # Prometheus waits for 10 s
            found.fleet = await read_fleet(gateway.client.store, gateway.client.broker)
            found.waiting = await queues(gateway.client.store)
            found.overload = await gateway.admission.overload.all(gateway.client.reserved)
            found.storage = await read_servers(gateway.client)
    except FAILURES:
        found.fleet, found.waiting, found.overload, found.storage = None, {}, {}, {}
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)
