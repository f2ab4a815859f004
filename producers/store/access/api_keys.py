"""API keys: made, shown once, rotated, disabled, revoked; kept hashed.

    psk_<id>_<secret>     `id` names the key everywhere; of `secret` the store keeps only the SHA-256

A key is a field of the hash `penstock:keys`, by its id: a JSON object with the fields of `Key`. SWAP changes it only
from what was read, and appends the change to the audit log (`audit`) in the same script. A secret has 256 random bits,
so a plain hash of it cannot be guessed, and a slow one would only cost each request time.

| dies after | what remains | who repairs it |
| --- | --- | --- |
| its creator: SWAP, before the key was shown | a key that nobody has | revoke it, make another one |
| its rotator: SWAP, before the secret was shown | a secret that nobody has; the old one works a while | rotate again |
| anybody, at another change | the change and its audit entry, or neither | nothing to repair |

**The principal** of a request is a key's holder, or anybody where a gateway takes requests without keys.

key ─▶ Principal: tenant, scopes, models, tiers ─▶ each endpoint asks it what the caller may do and see
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun, text
from producers.contract import keys
from producers.store import shadows
from producers.store.access.audit import Change
from producers.store.protocol import swap

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
#: The beginning of the names of tenants that the system itself has: no key is made for one. Copies of all tenants'
#: tasks have the tenant `shadows.TENANT`, and share a prefix cache: a key of that name, which an earlier release made,
#: may neither read nor submit.
RESERVED: Final = "~"
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
        """Whether it may use this model, and each of these tiers. `model`: a name; an adapter's may follow its base's,
        BASE:NAME."""
        named = {model, model.rpartition(":")[2]}
        return (not self.models or not named.isdisjoint(self.models)) and (not self.tiers or {*tiers} <= {*self.tiers})

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


log = logging.getLogger(__name__)

PREFIX: Final = "psk_"
ID: Final = re.compile(r"[0-9a-z]{16}")
#: A whole key, as callers send it. Scanners for leaked secrets can look for this.
TOKEN: Final = re.compile(rf"{PREFIX}({ID.pattern})_([A-Za-z0-9_-]{{43}})")
#: A whole key, also if its secret is cut or mistyped.
WITH_SECRET: Final = re.compile(rf"({PREFIX}{ID.pattern})_.*", re.DOTALL)
#: Time (s) for which an old secret still works after a rotation, unless the caller says otherwise.
OVERLAP_S: Final = 24 * 3600
#: Most keys: an answer lists them all.
MAX_KEYS: Final = 10_000
_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
#: The hash of no secret.
_NOTHING: Final = "0" * 64


class TooManyKeys(Exception):
    """There are MAX_KEYS already."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key. Times are unix seconds; `old_digest` works until `old_until`."""

    id: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_at: int
    digest: str
    models: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    expires_at: int | None = None
    disabled_at: int | None = None
    revoked_at: int | None = None
    old_digest: str | None = None
    old_until: int = 0
    limits: Limits = NO_LIMITS
    unconfirmed: bool = False
    """A restore disabled it, since no journal shows whether it was revoked (`docs/run/backup.md`)."""

    @classmethod
    def parse(cls, raw: Any) -> Key | None:
        """Returns None for an unreadable entry: it lets nobody in, and other keys still work."""
        try:
            values = json.loads(raw)
            attributes: dict[str, Any] = {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
            several = {name: tuple(attributes[name]) for name in ("scopes", "models", "tiers")}
            return cls(**attributes | several | {"limits": Limits.parse(attributes.get("limits", {}))})
        except (ValueError, TypeError, KeyError) as error:
            warn_throttled(log, "a key in %s cannot be read: %s", keys.API_KEYS, error)
            return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def state(self, now: float) -> str:
        """`active`, or why it lets nobody in: `revoked`, `expired`, `disabled`."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "expired"
        return "active" if self.disabled_at is None else "disabled"

    def ended(self, now: float) -> bool:
        """Whether it will never let anybody in again."""
        return self.state(now) in ("revoked", "expired")

    def opens(self, secret: str, now: float) -> bool:
        """Whether this secret lets its holder in now. Takes the same time for every answer."""
        return self.accepts(_digest(secret), now)

    def accepts(self, digest: str, now: float) -> bool:
        """As `opens`, by the secret's digest."""
        new = hmac.compare_digest(digest, self.digest)
        old = hmac.compare_digest(digest, self.old_digest or _NOTHING) and now < self.old_until
        return (new or old) and self.state(now) == "active"

    def principal(self) -> Principal:
        account = Account.of(self.id, self.limits)
        scopes = frozenset(self.scopes)
        if self.tenant == shadows.TENANT:
            scopes &= {"admin", "metrics"}
        return Principal(self.id, self.tenant, scopes, self.models, self.tiers, account)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A caller's credentials: a key, and the digest of its secret."""

    id: str
    digest: str = field(repr=False)


def credentials_of(token: str | None) -> Credentials | None:
    read = read_token(token or "")
    return None if read is None else Credentials(read[0], _digest(read[1]))


def read_token(token: str) -> tuple[str, str] | None:
    """The id and the secret in a key; None for a text of another form."""
    match = TOKEN.fullmatch(token)
    return None if match is None else (match[1], match[2])


def without_secret(text: str) -> str:
    """A caller's text for a key's id, as errors may show it: a whole key without its secret."""
    return WITH_SECRET.sub(r"\1", text)


def new_key(tenant: str, name: str, scopes: tuple[str, ...], **more: Any) -> tuple[Key, str]:
    """A key, and its text as its holder needs it, which nothing can show again."""
    key_id, secret = "".join(secrets.choice(_ALPHABET) for _ in range(16)), secrets.token_urlsafe(32)
    key = Key(key_id, tenant, name, scopes, int(time.time()), _digest(secret), **more)
    return key, f"{PREFIX}{key_id}_{secret}"


def rotated(key: Key, overlap_s: float, now: float) -> tuple[Key, str]:
    """The key with a new secret, and its text. The old secret works for `overlap_s` seconds more."""
    secret = secrets.token_urlsafe(32)
    new = replace(key, digest=_digest(secret), old_digest=key.digest, old_until=int(now + overlap_s))
    return new, f"{PREFIX}{key.id}_{secret}"


async def create(store: Redis, key: Key, audit: Change) -> None:
    """Keep a new key. Where there are MAX_KEYS, the oldest one that has ended for good makes room: the audit log says
    which.

    Raises TooManyKeys, redis.exceptions.RedisError or OSError; may be called again.
    """
    drops: list[Change] = []
    while await arun(store, _create_call(key, audit, *drops)) < 0:
        ended = [stored for stored in await every(store) if stored.ended(time.time())]
        if not ended:
            raise TooManyKeys
        drops = [replace(audit, did="key.drop", what=ended[-1].id, tenant=ended[-1].tenant)]
    for change in (*drops, audit):
        change.say()


def _create_call(key: Key, audit: Change, dropped: Change | None = None) -> Call:
    return swap(keys.API_KEYS, key.id, "", key.to_json(), max_fields=MAX_KEYS, audit=audit, dropped=dropped)


async def get(store: Redis, key_id: str) -> Key | None:
    """Raises redis.exceptions.RedisError or OSError."""
    raw = await store.execute_command("HGET", keys.API_KEYS, key_id)
    return None if raw is None else Key.parse(raw)


async def several(store: Redis, ids: Sequence[str]) -> dict[str, Key | None]:
    """Raises redis.exceptions.RedisError or OSError."""
    rows = await store.execute_command("HMGET", keys.API_KEYS, *ids)
    return {key_id: None if raw is None else Key.parse(raw) for key_id, raw in zip(ids, rows, strict=True)}


async def every(store: Redis) -> list[Key]:
    """All keys, the newest first. Raises redis.exceptions.RedisError or OSError."""
    rows = await store.execute_command("HVALS", keys.API_KEYS)
    return sorted(filter(None, map(Key.parse, rows)), key=lambda key: (key.created_at, key.id), reverse=True)


async def change(store: Redis, key_id: str, how: Callable[[Key], Key], audit: Change) -> Key | None:
    """Change a key by a function, which may be called again if another process changes it meanwhile. None where there
    is none. The audit entry gets the key's tenant. Raises redis.exceptions.RedisError or OSError."""
    while (raw := await store.execute_command("HGET", keys.API_KEYS, key_id)) is not None:
        if (old := Key.parse(raw)) is None:
            return None
        audit = replace(audit, tenant=old.tenant)
        if (new := how(old)) == old:
            return new
        if await arun(store, swap(keys.API_KEYS, key_id, text(raw), new.to_json(), audit=audit)):
            audit.say()
            return new
    return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
