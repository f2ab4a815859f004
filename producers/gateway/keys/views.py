"""The JSON of keys and of the audit log. Times are unix seconds, unless said otherwise."""

from __future__ import annotations

import time
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from producers.admin.keys import (
    CHANGEABLE,
    LONGEST_S,
    MAX_MODELS,
    MAX_NAME,
    MAX_OVERLAP_S,
    MOST,
    MOST_MONEY,
    USUAL,
    about,
)
from producers.contract import keys
from producers.contract.task import MAX_TENANT
from producers.store.access.api_keys import OVERLAP_S, Key
from producers.store.access.principal import SCOPES


def _names(most: int, description: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
    items: dict[str, Any] = {"type": "string", "enum": list(known)} if known else {"type": "string", "minLength": 1}
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items, "description": description}


def count(description: str) -> dict[str, Any]:
    """The schema of a limit."""
    return {"type": "integer", "minimum": 1, "maximum": MOST, "description": f"{description}; unset: no limit"}


LIMITS: dict[str, str] = {
    "rpm": "most tasks that may be submitted in a minute",
    "tpm": "most tokens that the tasks of a minute may need",
    "max_in_flight": "most tasks that have not ended",
    "budget_tokens": "most tokens in a month (UTC)",
    "max_prompt": "most tokens of a prompt",
    "max_output": "most tokens of a choice's output",
    "max_waiting": "most of its tasks that wait for a worker",
    "max_streams": "most streams and waiting requests that are open at one gateway",
    "shorten_to": "most tokens of a choice's output under overload, of the default tier",
}
KEPT: dict[str, str] = {
    "max_file_bytes": "most bytes of all files that are kept",
    "max_files": "most files that are kept",
    "max_batches": "most batches that have not ended",
    "max_lines": "most lines of batches that wait, run, or are to be written",
    "max_endpoints": "most webhook endpoints",
    "max_task_bytes": "most bytes of tasks and their results that are kept",
    "max_idempotency_keys": "most idempotency keys that begin within a day",
}
MONEY: dict[str, Any] = {
    "type": ["string", "number"],
    "description": f"most that a month's tasks (UTC) may cost, in the currency of the prices; up to {MOST_MONEY}",
}
#: Those of a key, and those of a tenant alone.
LIMIT_SCHEMAS: dict[str, Any] = {**{name: count(said) for name, said in LIMITS.items()}, "budget_money": MONEY}
KEPT_SCHEMAS: dict[str, Any] = {
    name: {**count(said), "description": f"{said}; unset: the gateway's"} for name, said in KEPT.items()
}
CREATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["tenant"],
    "properties": {
        "tenant": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT},
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "unset: the tenant"},
        "scopes": _names(len(SCOPES), f"unset: {', '.join(USUAL)}", tuple(SCOPES)),
        "models": _names(MAX_MODELS, "the models that it may use; unset: all"),
        "tiers": _names(len(keys.TIERS), "the tiers that it may use; unset: all", tuple(keys.TIERS)),
        "expires_at": {
            "type": "integer",
            "description": f"unix seconds, at most {LONGEST_S // (365 * 24 * 3600)} years ahead; unset: never",
        },
        **LIMIT_SCHEMAS,
    },
}


def changes(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body that changes some of these fields; null unsets one."""
    nullable = {
        name: {**one, "type": [*([one["type"]] if isinstance(one["type"], str) else one["type"]), "null"]}
        for name, one in properties.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": nullable}


CHANGE = changes({name: CREATE["properties"][name] for name in CHANGEABLE if name != "name"})
CHANGE["properties"]["name"] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
ROTATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "overlap": {
            "type": "number",
            "minimum": 0,
            "maximum": MAX_OVERLAP_S,
            "description": f"seconds for which the old secret still works; unset: {OVERLAP_S}",
        }
    },
}


class LimitsView(BaseModel):
    """Limits; null: none."""

    rpm: int | None
    tpm: int | None
    max_in_flight: int | None
    budget_tokens: int | None
    budget_money: str | None
    max_prompt: int | None
    max_output: int | None
    max_waiting: int | None
    max_streams: int | None


class TenantLimits(LimitsView):
    """The limits that all keys of a tenant share."""

    object: Literal["tenant_limits"] = "tenant_limits"
    tenant: str
    max_file_bytes: int | None
    max_files: int | None
    max_batches: int | None
    max_lines: int | None
    max_endpoints: int | None
    max_task_bytes: int | None
    max_idempotency_keys: int | None


class KeyView(LimitsView):
    """An API key, without its secret."""

    id: str
    object: Literal["api_key"] = "api_key"
    tenant: str
    name: str
    scopes: list[str]
    models: list[str] = Field(description="the models that it may use; empty: all")
    tiers: list[str] = Field(description="the tiers that it may use; empty: all")
    shorten_to: int | None
    state: Literal["active", "disabled", "expired", "revoked"]
    created_at: int
    expires_at: int | None
    disabled_at: int | None
    revoked_at: int | None
    old_secret_until: int | None = Field(description="until when the secret before the last rotation works, too")

    @classmethod
    def of(cls, one: Key, **more: Any) -> Self:
        return cls(**about(one, time.time()), **more)


class KeyWithSecret(KeyView):
    key: str = Field(description="what its holder sends; it is shown this once")


class KeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyView]


class ChangeView(BaseModel):
    """A change of a key, a webhook endpoint, a webhook secret or a model's version."""

    at: int = Field(description="unix milliseconds")
    by: str = Field(description="a key's id, `local` for a caller without one, `cli:USER@HOST`, or a process")
    did: str
    what: str
    tenant: str | None = None
    address: str | None = None


class ChangeList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ChangeView]
