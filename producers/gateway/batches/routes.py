"""The routes of `/v1/batches`. What is in a batch is the sweeper's to run (`producers.sweeper.batches`)."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from producers.connection.script import arun, text
from producers.contract import keys
from producers.errors import shown
from producers.gateway.batches.request import SCHEMA, read
from producers.gateway.batches.views import BatchList, BatchView
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.files.routes import file_of
from producers.gateway.http import idempotency, trace
from producers.gateway.http.caller import CANCELS, PARAMETER, READS, SUBMITS, principal_of, tenant_of
from producers.gateway.http.errors import ONCE, Problem, gone, invalid_value
from producers.gateway.http.request.body import SETTINGS, read_object
from producers.gateway.tasks.own import sees
from producers.gateway.tasks.views import errors
from producers.store import batches
from producers.store.batches import Batch
from producers.store.files import BATCH
from producers.store.idempotency import Entry

router = APIRouter(prefix="/v1/batches", tags=["batches"])

#: Most batches in a page, and how many there are unless said otherwise.
MAX_PAGE: Final = 100
PAGE: Final = 20
ID: Final = re.compile(f"{batches.PREFIX}[0-9a-f]{{32}}")


@router.post(
    "",
    dependencies=SUBMITS,
    response_model=BatchView,
    responses=errors(404, 413, 415, 422),
    openapi_extra={
        "parameters": [idempotency.PARAMETER, PARAMETER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": SCHEMA}}},
    },
)
async def create(request: Request, response: Response) -> BatchView:
    """Make a batch of a file. Its lines run once all of them have been checked."""
    gateway = gateway_of(request)
    owner = tenant_of(request)
    window_s, fields = read(await read_object(request, min(gateway.settings.max_body, SETTINGS)))
    file = await file_of(request, str(fields["input_file"]), "input_file_id")
    if file.purpose != BATCH:
        raise invalid_value(
            "input_file_id", f'input_file_id is {file.id}, whose purpose is {shown(file.purpose)}; it must be "{BATCH}"'
        )
    new_id = batches.new_id(int(time.time() * 1000))
    entry = await idempotency.first(request, gateway.client, new_id, tenant=owner)
    if entry is not None and entry.state == "made":
        response.headers.update(idempotency.REPLAYED)
        return BatchView.of(await _original(gateway, entry))
    if entry is not None:
        new_id = entry.id
        fields["idempotency"] = entry.name
    if owner is not None:
        fields["tenant"] = owner
    principal = principal_of(request)
    if principal.key is not None:
        fields["principal"] = principal.to_json()
    if gateway.prices is not None:
        fields["prices"] = gateway.prices.to_json()
    most = (await gateway.accounts.kept(owner)).max_batches
    made = await arun(gateway.client.store, batches.create(new_id, window_s, {**fields, **trace.fields()}, most))
    if text(made) == "full":
        said = f"{most} batches of this tenant have not ended, the most; cancel one, or try again once one has ended."
        raise Problem(429, said, code="too_many_batches", headers=ONCE)
    return BatchView.of(await _batch(request, new_id))


async def _original(gateway: Gateway, entry: Entry) -> Batch:
    batch = await batches.read(gateway.client.store, entry.id)
    if batch is None:
        raise gone(f"batch {entry.id}, which is not kept any more; use another key.", code="batch_not_found")
    return batch


@router.get("", dependencies=READS, response_model=BatchList, openapi_extra={"parameters": [PARAMETER]})
async def listed(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most batches in the page")] = PAGE,
    after: Annotated[
        str | None, Query(pattern=f"^{ID.pattern}$", description="the id of the batch before the page")
    ] = None,
) -> BatchList:
    """List the tenant's batches, the newest first, a page at a time."""
    store, owner = gateway_of(request).client.store, tenant_of(request) or ""
    found = await batches.page(store, limit + 1, after=after, tenant=owner)
    return BatchList.of([*map(BatchView.of, found)], limit)


@router.get("/{batch_id}", dependencies=READS, response_model=BatchView, responses=errors(404))
async def look(request: Request, batch_id: str) -> BatchView:
    """Get a batch, and how many of its lines have ended."""
    return BatchView.of(await _batch(request, batch_id))


@router.post("/{batch_id}/cancel", dependencies=CANCELS, response_model=BatchView, responses=errors(404, 409))
async def cancel(request: Request, batch_id: str) -> BatchView:
    """Cancel a batch. Lines that have ended are written to its files, then it is `cancelled`."""
    gateway = gateway_of(request)
    batch = await _batch(request, batch_id)
    accepted, status = await arun(gateway.client.store, batches.cancel(batch.id))
    if not accepted and text(status) != "cancelled":
        raise Problem(409, f"batch {batch.id} is {text(status)} already", code="batch_ended", headers=ONCE)
    return BatchView.of(await _batch(request, batch_id))


async def _batch(request: Request, batch_id: str) -> Batch:
    batch = None
    if ID.fullmatch(batch_id) and await sees(request, keys.batch(batch_id)):
        batch = await batches.read(gateway_of(request).client.store, batch_id)
    if batch is None:
        raise Problem(
            404, f"There is no batch {shown(batch_id)}; an ended one is kept for 30 days.", code="batch_not_found"
        )
    return batch
