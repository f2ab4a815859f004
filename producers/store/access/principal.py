"""The principal of a request: a key's holder, or anybody where a gateway takes requests without keys.

key ─▶ Principal: tenant, scopes, models, tiers ─▶ each endpoint asks it what the caller may do and see
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

#: Scope -> what it lets a key do.
SCOPES: Final[dict[str, str]] = {
    "submit": "submit and retry tasks, submit responses, batches; upload files",
    "read": "see, list and stream what its tenant has made",
    "cancel": "cancel and delete what its tenant has made",
    "metrics": "read /metrics and /v1/fleet, the figures of all tenants, and nothing else",
    "admin": "see and do everything, for all tenants: also keys and the audit log",
}


#: Limits by what a key has used before, which the store decides.
COUNTED: Final = ("rpm", "tpm", "max_in_flight", "budget_tokens", "budget_money")
#: Limits of what is kept for a tenant, which its keys have in common. Every tenant has them by the gateway's settings.
KEPT: Final = (
    *("max_file_bytes", "max_files", "max_batches", "max_lines", "max_endpoints", "max_task_bytes"),
    "max_idempotency_keys",
)
#: The unit of a budget in money: billionths of the currency. Sums below 2^53 of them are exact in scripts.
BILLION: Final = 10**9


@dataclass(frozen=True)
class Limits:
    """The limits of a key's use; None: unlimited. Minutes and months are the store's, in UTC."""

    rpm: int | None = None
    """Tasks that are submitted in a minute."""
    tpm: int | None = None
    """Tokens for which tasks are submitted in a minute."""
    max_in_flight: int | None = None
    """Tasks that have not ended."""
    budget_tokens: int | None = None
    """Tokens of tasks that end in a month, and of those that have not ended."""
    budget_money: str | None = None
    """The most that these tasks may cost in a month: a decimal number, in the currency of the gateways' prices."""
    max_waiting: int | None = None
    """Tasks that wait for a worker."""
    max_streams: int | None = None
    """Streams and waiting requests that are open at one gateway (`producers/gateway/http/sse.py`)."""
    max_prompt: int | None = None
    max_output: int | None = None
    """Tokens of one task's prompt, and of one choice's output."""
    shorten_to: int | None = None
    """Tokens of a choice's output under overload, of tasks of the default tier (`producers.gateway.admission`)."""
    max_file_bytes: int | None = None
    """Bytes of all files that are kept for a tenant. Limits of what is kept (KEPT) are a tenant's, never a key's."""
    max_files: int | None = None
    max_batches: int | None = None
    """Batches that have not ended."""
    max_lines: int | None = None
    """Lines of batches that are in the store: they wait, run, or their results are not written yet."""
    max_endpoints: int | None = None
    """Webhook endpoints."""
    max_task_bytes: int | None = None
    """Bytes of tasks, responses and their results in the store (`producers/store/scripts/_kept.lua`)."""
    max_idempotency_keys: int | None = None
    """Idempotency keys that began within a day."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The limits that were kept. One that this release does not know keeps no other one from holding."""
        return cls(**{spec.name: values[spec.name] for spec in fields(cls) if spec.name in values})

    @cached_property  # asked for by each request
    def counted(self) -> dict[str, int]:
        """The limits of COUNTED that are set; the budget in money in billionths."""
        values = {name: getattr(self, name) for name in COUNTED}
        if self.budget_money is not None:
            values["budget_money"] = int(Decimal(self.budget_money) * BILLION)
        return {name: limit for name, limit in values.items() if limit is not None}

    @cached_property
    def limits_tasks(self) -> bool:
        """Whether any of them limits tasks, not what is kept."""
        return any(getattr(self, spec.name) is not None for spec in fields(self) if spec.name not in KEPT)

    @cached_property
    def size_tasks(self) -> bool:
        """Whether each task's size is limited."""
        return self.max_prompt is not None or self.max_output is not None

    @cached_property
    def counted_json(self) -> str:
        """`counted`, as scripts take it (JSON)."""
        return json.dumps(self.counted)


NO_LIMITS: Final = Limits()
#: The beginning of a tenant's account's name. The name of a key's account is the key's id.
TENANT: Final = "tenant:"


class Account(NamedTuple):
    """The account of a key or a tenant, and its limits."""

    name: str
    limits: Limits

    @property
    def whose(self) -> str:
        """`key` or `tenant`."""
        return "tenant" if self.name.startswith(TENANT) else "key"

    @classmethod
    def of(cls, name: str, limits: Limits) -> Account | None:
        """An account, or None if no limit applies to tasks."""
        return cls(name, limits) if limits.limits_tasks else None


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. `key`: the key's id; None without keys: then the caller names its tenant."""

    key: str | None
    tenant: str | None
    scopes: frozenset[str]
    models: tuple[str, ...] = ()
    """The models that it may use; empty: all."""
    tiers: tuple[str, ...] = ()
    """The tiers that it may use; empty: all."""
    account: Account | None = None
    """Its key's account, if the key has limits."""

    @property
    def limits(self) -> Limits:
        return NO_LIMITS if self.account is None else self.account.limits

    @property
    def sees_all(self) -> bool:
        """Whether it may see other tenants' tasks and files."""
        return "admin" in self.scopes

    def may(self, scope: str) -> bool:
        return scope in self.scopes or self.sees_all

    def sees(self, tenant: str | None) -> bool:
        """Whether it may see what this tenant (None: without one) has made."""
        return self.sees_all or tenant == self.tenant

    def may_use(self, model: str, tiers: Sequence[str] = ()) -> bool:
        """Whether it may use this model, and each of these tiers."""
        return (not self.models or model in self.models) and (not self.tiers or {*tiers} <= {*self.tiers})

    def to_json(self) -> str:
        """All but its scopes, to be kept beside work that is done later."""
        kept = {"key": self.key, "tenant": self.tenant, "models": self.models, "tiers": self.tiers}
        return json.dumps(kept)

    @classmethod
    def parse(cls, kept: str) -> Self:
        """The inverse of `to_json`. It has no scopes."""
        values = json.loads(kept)
        return cls(values["key"], values["tenant"], frozenset(), tuple(values["models"]), tuple(values["tiers"]))


#: Every caller of a gateway that needs no keys.
LOCAL: Final = Principal(None, None, frozenset(SCOPES))
