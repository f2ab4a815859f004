"""The JSON of webhook endpoints, in OpenAI's form. Times are unix seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from producers.contract.webhook import EVENT_TYPES, MAX_URL
from producers.gateway.tasks.views import Named, Page
from producers.store.endpoints import Endpoint

MAX_NAME = 256

URL: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_URL, "description": "an https:// URL"}
TYPES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "enum": list(EVENT_TYPES)}}
CHANGEABLE: dict[str, dict[str, Any]] = {
    "url": URL,
    "event_types": TYPES,
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "unset: the URL's host"},
    "celery": {"type": "boolean", "description": "whether it hears of plain Celery tasks, too; unset: false"},
    "enabled": {"type": "boolean", "description": "false: its events are given up; unset: true"},
}
CREATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["url", "event_types"],
    "properties": {
        **CHANGEABLE,
        "tenant": {"type": "string", "minLength": 1, "maxLength": 200, "description": "unset: all tenants' tasks"},
    },
}
UPDATE: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": CHANGEABLE}
ROTATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "keep_old_secret_active_for_24_hours": {
            "type": "boolean",
            "description": "whether deliveries are signed with both secrets for 24 hours; unset: true",
        }
    },
}
TEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["event_type"],
    "properties": {"event_type": {"type": "string", "enum": list(EVENT_TYPES)}},
}


class EndpointView(Named):
    """A webhook endpoint. Its secret is shown once, when it is made or rotated; `signing_secret_hint` is its end."""

    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    url: str
    name: str
    event_types: list[str]
    tenant: str | None
    celery: bool
    enabled: bool
    disabled_because: str | None
    created_at: int
    updated_at: int
    signing_secret_hint: str

    @classmethod
    def of(cls, one: Endpoint, **more: Any) -> Self:
        shown = {name: value for name, value in asdict(one).items() if name != "secrets"}
        return cls(**shown, signing_secret_hint=one.secrets.hint(), **more)


class EndpointWithSecret(EndpointView):
    signing_secret: str


class EndpointList(Page[EndpointView]):
    pass


class EndpointDeleted(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class EndpointTested(BaseModel):
    """What the endpoint answered to a test event. `success` is true for every answer, whatever its status."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int = Field(description="the HTTP status that the endpoint answered with")
    success: Literal[True] = True


class EventTypes(BaseModel):
    object: Literal["list"] = "list"
    data: list[str]
