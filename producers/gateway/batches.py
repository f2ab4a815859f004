"""`/v1/batches`: its routes, the checks of their bodies, and the JSON of batches.

body -> read (checked) -> BATCH_CREATE -> BatchView. The sweeper does all else (`producers.sweeper.batches`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from producers.connection.script import arun, text
from producers.contract import keys
from producers.errors import shown
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.files import file_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, PARAMETER, READS, SUBMITS, principal_of, tenant_of
from producers.gateway.http.errors import ONCE, Problem, check_given, gone, invalid_value, unknown_parameter, wrong
from producers.gateway.http.request_body import SETTINGS, read_object
from producers.gateway.http.request_state import current_trace
from producers.gateway.tasks.ownership import audit_operator, foreign_tenant, sees
from producers.gateway.tasks.views import Named, Page, errors
from producers.gateway.uploads import EXPIRES_AFTER, expires_after
from producers.store import batches
from producers.store.batches import (
    ENDPOINTS,
    METADATA_FORM,
    NAME,
    PAIRS,
    TEXT,
    WINDOW,
    WINDOW_FORM,
    Batch,
    is_metadata,
    window_s,
)
from producers.store.files import BATCH
from producers.store.idempotency import Entry

#: The body's JSON schema.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {
            "type": "string",
            "pattern": f"^{WINDOW.pattern}$",
            "description": "such as 24h; 7d at most",
        },
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": PAIRS,
            "propertyNames": {"maxLength": NAME},
            "additionalProperties": {"type": "string", "maxLength": TEXT},
        },
        "output_expires_after": {"anyOf": [EXPIRES_AFTER, {"type": "null"}]},
    },
    "additionalProperties": False,
}
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
router = APIRouter(prefix="/v1/batches", tags=["batches"])
#: Most batches in a page, and how many there are unless said otherwise.
MAX_PAGE: Final = 100
PAGE: Final = 20
ID: Final = re.compile(f"{batches.PREFIX}[0-9a-f]{{32}}")


def read(body: Mapping[str, Any]) -> tuple[int, dict[str, str | int]]:
    """The completion window (s), and the batch's fields (`producers.store.batches.create`). Raises Problem."""
    values = {name: value for name, value in body.items() if value is not None}
    for name in values:
        if name not in SCHEMA["properties"]:
            raise unknown_parameter(name, f"there are {', '.join(SCHEMA['properties'])}")
    check_given(values, *SCHEMA["required"])
    if values["endpoint"] not in ENDPOINTS:
        raise wrong("endpoint", values["endpoint"], f"one of {', '.join(ENDPOINTS)}")
    if not isinstance(values["input_file_id"], str):
        raise wrong("input_file_id", values["input_file_id"], "the id of a file")
    fields: dict[str, str | int] = {
        "endpoint": values["endpoint"],
        "input_file": values["input_file_id"],
        "completion_window": values["completion_window"],
    }
    seconds = window_s(values["completion_window"])
    if seconds is None:
        raise wrong("completion_window", values["completion_window"], WINDOW_FORM)
    if "metadata" in values:
        if not is_metadata(values["metadata"]):
            raise wrong("metadata", values["metadata"], METADATA_FORM)
        fields["metadata"] = json.dumps(values["metadata"])
    if "output_expires_after" in values:
        fields["output_kept"] = expires_after("output_expires_after", values["output_expires_after"])
    return seconds, fields


class Reason(BaseModel):
    """Why a batch failed as a whole. `line` is from 1; null where no line is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Reasons(BaseModel):
    object: Literal["list"] = "list"
    data: list[Reason]


class Counts(BaseModel):
    total: int = Field(description="0 until the input is validated")
    completed: int
    failed: int


class BatchView(Named):
    """A batch. Times are unix seconds."""

    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Reasons | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = Field(description="the answers; null until it ends, or without any")
    error_file_id: str | None = Field(description="the lines that failed; null until it ends, or without any")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> Self:
        def at(name: str) -> int | None:
            time = batch.time(name)
            return None if time is None else time // 1000

        times: dict[str, Any] = {name: at(name) for name in cls.model_fields if name.endswith("_at")}
        reasons = batch.json("reasons")
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            errors=None if reasons is None else Reasons(data=reasons),
            input_file_id=batch.input_file,
            completion_window=batch.fields["completion_window"],
            status=cast(Status, batch.status),
            output_file_id=batch.fields.get("output_file"),
            error_file_id=batch.fields.get("error_file"),
            **times | {"created_at": at("created") or 0, "expires_at": at("deadline") or 0},
            request_counts=Counts(
                total=batch.total or 0, completed=batch.count("completed"), failed=batch.count("failed")
            ),
            metadata=batch.metadata,
        )


class BatchList(Page[BatchView]):
    pass


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
    max_batches = (await gateway.accounts.kept(owner)).max_batches
    answer = await arun(
        gateway.client.store, batches.create(new_id, window_s, {**fields, **current_trace()}, max_batches)
    )
    if text(answer) == "full":
        kept = f"{max_batches} batches of this tenant have not ended, the most"
        message = f"{kept}; cancel one, or try again once one has ended."
        raise Problem(429, message, code="too_many_batches", headers=ONCE)
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
    rows = await batches.page(store, limit + 1, after=after, tenant=owner)
    return BatchList.of([*map(BatchView.of, rows)], limit)


@router.get("/{batch_id}", dependencies=READS, response_model=BatchView, responses=errors(404))
async def look(request: Request, batch_id: str) -> BatchView:
    """Get a batch, and how many of its lines have ended."""
    return BatchView.of(await _batch(request, batch_id))


@router.post("/{batch_id}/cancel", dependencies=CANCELS, response_model=BatchView, responses=errors(404, 409))
async def cancel(request: Request, batch_id: str) -> BatchView:
    """Cancel a batch. Lines that have ended are written to its files, then it is `cancelled`."""
    gateway = gateway_of(request)
    batch = await _batch(request, batch_id)
    other = await foreign_tenant(request, keys.batch(batch.id))
    accepted, status = await arun(gateway.client.store, batches.cancel(batch.id))
    if not accepted and text(status) != "cancelled":
        raise Problem(409, f"batch {batch.id} is {text(status)} already", code="batch_ended", headers=ONCE)
    await audit_operator(request, "batch.cancel", batch.id, other if accepted else None)
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
