"""Builds the application and its parts, and closes them with it. It also serves `/v1/models`, from the store."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse

from producers.client.aio import AsyncClient
from producers.client.leases import ReaderLeases
from producers.connection.addresses import networks
from producers.connection.turns import Turns
from producers.gateway import (
    batches,
    changes,
    console,
    dead_letters,
    files,
    fleet,
    health,
    keys,
    metrics,
    operations,
    overview,
    pages,
    rollouts,
    tenants,
    usage,
    webhooks,
)
from producers.gateway.admission.authentication import Callers
from producers.gateway.admission.limits import Accounts, Admission, Destinations, check_sees
from producers.gateway.anthropic import routes as messages
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.estimates import Estimates
from producers.gateway.executor import Executor
from producers.gateway.fair_share import FairShare
from producers.gateway.http import errors
from producers.gateway.http.authorization import MEASURES, READS, principal_of
from producers.gateway.http.edge import Edge, InTurn
from producers.gateway.http.request_body import BodyRoom
from producers.gateway.http.request_state import TracedClient
from producers.gateway.http.sse import Bounds as StreamBounds
from producers.gateway.http.sse import Streams
from producers.gateway.metrics import Metrics
from producers.gateway.ollama import models as ollama_models
from producers.gateway.ollama import routes as ollama
from producers.gateway.openai import chat, completions, pooling, tokens
from producers.gateway.openai.responses import routes as responses
from producers.gateway.pages import Documented
from producers.gateway.readiness_checks import Awaited, Reach
from producers.gateway.samples import Samples, read
from producers.gateway.settings import GatewaySettings
from producers.gateway.tasks import events, explain, feedback, views
from producers.gateway.tasks import routes as tasks
from producers.gateway.text.forms import Forms
from producers.gateway.text.prompts import Prompts, Templates
from producers.gateway.wait_reasons import WaitReasons
from producers.release import release
from producers.store import epoch
from producers.store.blobs import open_blobs
from producers.store.blobs.bucket import is_s3
from producers.store.usage.prices import Prices
from producers.store.usage.report import Reports
from producers.store.waiting import Bounds
from producers.sweeper import sweeper
from producers.tracing.export import tracer

models_router = APIRouter(prefix="/v1/models", tags=["models"])
#: Most bytes of large bodies in memory at once, until they are parsed, and of one tenant.
BODY_BYTES: Final = (1 << 30, 1 << 28)
#: Most large results (`large.LARGE`) in memory at once, and of one tenant; each may have tens of megabytes.
LARGE_RESULTS: Final = (4, 2)
#: Most pieces of files that are read or written at once, each on a thread, and of one tenant: others need threads, too.
FILE_PIECES: Final = (4, 2)
#: Response headers that a web page may read.
EXPOSED: Final = (
    "idempotent-replayed",
    "location",
    "penstock-alias",
    "penstock-degraded",
    "penstock-generation",
    "penstock-shortened",
    "penstock-version",
    "penstock-waits-for",
    "penstock-warning",
    "preference-applied",
    "request-id",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{part}-{of}" for part in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
    "x-request-id",
    "x-should-retry",
)


@models_router.get("", dependencies=READS, response_model=views.ModelList, response_model_exclude_none=True)
async def listed(request: Request) -> Any:
    """List the models that the caller may use, and their aliases; with the header anthropic-version in Anthropic's
    form, by pages."""
    client = gateway_of(request).client
    usable = [card for card in await client.models() if principal_of(request).may_use(card["name"])]
    aliases = await client.aliases([card["name"] for card in usable if "parent" not in card])  # adapters have none
    data = []
    for card in usable:
        data.append(views.ModelView.of(card))
        data += [views.ModelView.of(other, alias) for alias, other in aliases.get(card["name"], {}).items()]
    return messages.model_page(request, data) if errors.is_anthropic(request.scope) else views.ModelList(data=data)


@models_router.get(
    "/{name:path}",
    dependencies=READS,
    response_model=views.ModelView,
    response_model_exclude_none=True,
    responses=views.errors(404),
)
async def one(request: Request, name: str) -> Any:
    """Get one model. Its name may have slashes, and an alias or version of it behind @."""
    check_sees(principal_of(request), name)
    view = views.ModelView.of(await gateway_of(request).client.card(name), name.partition("@")[2])
    return JSONResponse(messages.model_of(view)) if errors.is_anthropic(request.scope) else view


#: All routers, beside that of the metrics.
ROUTERS: Final = (
    *(
        pages.router,
        tasks.router,
        events.router,
        explain.router,
        feedback.router,
        files.router,
        batches.router,
        webhooks.router,
    ),
    *(keys.router, tenants.router, usage.router, models_router, health.router, fleet.router, dead_letters.router),
    *(console.router, overview.router, operations.router, changes.router, rollouts.router),
    *(chat.router, completions.router, responses.router, pooling.router, tokens.router, messages.router),
    *(ollama.router, ollama_models.router),
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """The gateway as an ASGI application, to be started once. It connects when it is started.

    Raises ValueError for a broker or store that is no Redis or Valkey, a bad network in `webhook_allow`, prices
    that cannot be read, `files_redirect` without a bucket, and traces that cannot be sent as the environment says.
    """
    client = TracedClient(settings.broker, settings.store, patience=settings.patience, files_dir=settings.files_dir)
    allowed = networks(settings.webhook_allow)
    if settings.files_redirect and not is_s3(settings.files_dir):
        raise ValueError(f"--files-redirect needs a bucket: --files-dir is {settings.files_dir!r}, not s3://...")
    prices = None if settings.prices is None else Prices.read(Path(settings.prices))
    bounds = StreamBounds(settings.max_streams, settings.max_streams_per_tenant)
    streams, fair_share = Streams(bounds.within(settings.most_connections)), FairShare()
    spans = tracer("gateway")
    figures = Metrics(streams.open, settings.process, spans)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with client:
            gateway = app.state.gateway = _parts(settings, client, prices, Destinations(allowed), streams, figures)
            async with _running(gateway, fair_share):
                yield
        if spans is not None:
            await asyncio.to_thread(spans.close)

    app = Documented(
        title="Penstock",
        version=release(),
        lifespan=lifespan,
        default_response_class=JSONResponse,
        # FastAPI's own pages load scripts from other servers (`pages` do not).
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # `pages` have it
        responses=views.errors(*views.ANYWHERE),
        redirect_slashes=False,  # unknown paths get our JSON error, not a redirect without a body
    )
    app.state.streams = streams
    app.state.fair_share = fair_share
    app.state.readiness = health.Readiness()
    app.state.metrics = figures
    app.add_middleware(Edge, metrics=figures, streams=streams, tracer=spans)
    if settings.cors_origins:  # outside the edge, so that pages can read the errors of both
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    # Outside of CORS, too.
    app.add_middleware(InTurn, fair_share=fair_share, connections=settings.most_connections)
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(metrics.router, dependencies=MEASURES)
    return app


def _parts(
    settings: GatewaySettings,
    client: AsyncClient,
    prices: Prices | None,
    destinations: Destinations,
    streams: Streams,
    figures: Metrics,
) -> Gateway:
    blobs = open_blobs(settings.files_dir)
    prompts, templates = Prompts(client.store), Templates(client.store)
    accounts = Accounts(client, prices, settings.kept)
    streams.limits_of = accounts.limits_of
    bounds = Bounds(
        settings.max_queued_in_all,
        settings.max_queued,
        settings.max_queued_per_tenant,
        kept=settings.max_task_bytes,
    )
    admission = Admission(client, bounds, accounts.spent, settings.max_wait)
    return Gateway(
        settings=settings,
        client=client,
        prompts=prompts,
        templates=templates,
        forms=Forms(),
        blobs=blobs,
        reach=Reach(blobs),
        readers=ReaderLeases(client, settings.reader_lease, settings.patience),
        callers=Callers(client.reserved) if settings.auth == "keys" else None,
        accounts=accounts,
        admission=admission,
        destinations=destinations,
        metrics=figures,
        streams=streams,
        bodies=Executor("penstock-body", 2),
        body_room=BodyRoom(*BODY_BYTES),
        large=Turns(*LARGE_RESULTS),
        file_pieces=Turns(*FILE_PIECES),
        reports=Reports(),
        prices=prices,
        awaited=Awaited(client, prompts, templates, settings.awaited),
        samples=Samples(partial(read, client, admission)),
        waits=(waits := WaitReasons(client)),
        estimates=Estimates(client, waits),
    )


def _end() -> None:
    """End this process as SIGTERM does: open streams get their time."""
    signal.raise_signal(signal.SIGTERM)


@asynccontextmanager
async def _running(gateway: Gateway, fair_share: FairShare) -> AsyncGenerator[None]:
    """Keep running what a gateway does beside its requests; close its parts at the end."""
    client, settings = gateway.client, gateway.settings
    keeping = [
        asyncio.create_task(gateway.readers.run(), name="renew reader leases"),
        asyncio.create_task(gateway.awaited.run(), name="load awaited models"),
        asyncio.create_task(fair_share.run(), name="look at the loop"),
        asyncio.create_task(gateway.samples.run(), name="sample for consoles"),
        asyncio.create_task(epoch.watch(client.reserved, _end), name="watch the epoch"),
    ]
    if gateway.callers is not None:
        keeping.append(asyncio.create_task(gateway.streams.watch(client.reserved), name="watch keys"))
    if settings.sweep:
        sweeping = sweeper.run(client, reader_lease_s=settings.reader_lease)
        keeping.append(asyncio.create_task(sweeping, name="sweep"))
    try:
        yield
    finally:
        gateway.prompts.close()
        gateway.templates.close()
        gateway.bodies.close()
        gateway.forms.close()
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)
        await gateway.destinations.aclose()
