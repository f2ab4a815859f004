"""`/v1/usage`: who used how many tokens, from the ledger. A caller sees its tenant's."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import READS, principal_of
from producers.gateway.http.errors import RETRY_AFTER, Problem, invalid_value
from producers.gateway.http.request_body import query_parameters, query_schema
from producers.store.usage.report import PARTS, WAITING, BadSpan, TooManyReports, read_by, read_span, report

router = APIRouter(prefix="/v1/usage", tags=["usage"])

CSV: Final = "text/csv"
_SPAN: Final = {"type": "string", "minLength": 1, "maxLength": 40}
_QUERY: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "by": (_SPAN, f"what to group by, with commas between: {', '.join(PARTS)}; unset: one line for all"),
    "since": (_SPAN, "a date or time (UTC); unset: the beginning of this month"),
    "until": (_SPAN, "a date, which is included, or a time, which is not; unset: now"),
    "format": ({"enum": ["json", "csv"], "default": "json"}, f"csv: as with `Accept: {CSV}`"),
}


class Usage(BaseModel):
    """Usage in a span of time (unix s; `until` is not included), in lines by the values of `by`."""

    object: Literal["usage"] = "usage"
    since: int
    until: int
    by: list[str]
    data: list[dict[str, str | int | float]] = Field(description="numbers of tasks and tokens; with prices, costs")


@router.get(
    "",
    dependencies=READS,
    response_model=Usage,
    responses={200: {"content": {CSV: {"schema": {"type": "string"}}}}},
    openapi_extra={
        "parameters": [query_schema(name, description, **schema) for name, (schema, description) in _QUERY.items()]
    },
)
async def usage(request: Request) -> Response:
    """Add up what was used: by the caller's tenant, or by all for a key of the scope admin and where there are none."""
    query = query_parameters(request, _QUERY)
    if query.get("format", "json") not in ("json", "csv"):
        raise invalid_value("format", f"format is {shown(query['format'])}; it must be json or csv.")
    try:
        by, span = read_by([query.get("by", "")]), read_span(query.get("since"), query.get("until"))
    except BadSpan as error:
        raise invalid_value(error.param, f"{error}.") from None
    gateway, principal = gateway_of(request), principal_of(request)
    tenant = None if principal.sees_all else principal.tenant or ""
    try:
        async with gateway.reports.turn(tenant), gateway.large.turn(gateway.settings.patience):
            usage_report = await report(gateway.client.store, *span, by, tenant=tenant, prices=gateway.prices)
            if query.get("format", "csv" if CSV in request.headers.get("accept", "") else "json") == "csv":
                return Response(usage_report.csv(), media_type=CSV)
            return JSONResponse(Usage(since=span[0], until=span[1], by=list(by), data=usage_report.rows()).model_dump())
    except TooManyReports:
        text = f"{WAITING} reports of this tenant wait for another one already; try again once they are there."
        raise Problem(429, text, code="too_many_reports", headers=RETRY_AFTER) from None
