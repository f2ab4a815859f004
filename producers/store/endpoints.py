"""Webhook endpoints, and the secrets with which their deliveries and those of tasks' own webhooks are signed.

    create, change, remove: one script or command each     every: what an event's rows are made for (`_outbox.lua`)

An endpoint is a field of the hash `penstock:webhooks:endpoints`, by its id: a JSON object with the fields of
`Endpoint`. Sets have the ids of each tenant's (`scripts/_endpoints.lua`). Tenants' own secrets are fields of
`penstock:webhooks:secrets`, by tenant ('' for tasks without one). Secrets are encrypted where the process that makes
them has a key (`producers.contract.sealing`). Both hashes are changed by SWAP, which writes only over what was read,
and appends the change to the audit log. Every call may raise redis.exceptions.RedisError or OSError, and may be called
again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun, text
from producers.contract import keys
from producers.contract.keys import timed_id
from producers.contract.sealing import seal, unseal
from producers.contract.webhook import hint, new_secret
from producers.errors import SecretUnreadable
from producers.store import outbox
from producers.store.access.audit import Change
from producers.store.outbox import Row
from producers.store.protocol import endpoints as endpoints_call
from producers.store.protocol import swap

log = logging.getLogger(__name__)

PREFIX: Final = "whe_"
#: Most endpoints of all. Each tenant has a bound of its own, since an event looks at all endpoints of its tenant; this
#: one is far off, so that tenants do not take each other's places.
MAX_ENDPOINTS: Final = 10_000
#: Time (s) for which an old secret still signs after a rotation that keeps it.
OVERLAP_S: Final = 24 * 3600
#: Webhook ids of test events begin so. They are tried once.
TEST_PREFIX: Final = "evt_test_"


class TooManyEndpoints(Exception):
    """The tenant has as many as it may; or there are MAX_ENDPOINTS in `all`."""

    def __init__(self, *, all: bool) -> None:
        super().__init__(all)
        self.all = all


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """A secret, and the one before it while that still signs, as they are stored. `old_until`: unix time (s).

    What makes or reads one raises SecretUnreadable where its key is missing.
    """

    secret: str
    old: str | None = None
    old_until: int = 0

    @classmethod
    def new(cls) -> Self:
        return cls(seal(new_secret()))

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Fields of a later version are left out. Raises ValueError, TypeError or KeyError."""
        if not isinstance(values["secret"], str) or not isinstance(values["old"], str | None):
            raise TypeError("a secret is no text")
        return cls(**{spec.name: values[spec.name] for spec in fields(cls)})

    def signing(self, now: float) -> list[str]:
        """The secrets to sign with, in plain, the newest first."""
        both = [self.secret, self.old] if self.old is not None and now < self.old_until else [self.secret]
        return [unseal(stored) for stored in both]

    def plain(self) -> str:
        """The newest secret."""
        return unseal(self.secret)

    def hint(self) -> str:
        """The newest secret as it may be shown, less its last characters where they cannot be read here."""
        try:
            return hint(self.plain())
        except SecretUnreadable:
            return hint("")

    def rotated(self, now: float, *, keep_old: bool) -> Self:
        """A new secret; the present one still signs for OVERLAP_S, if it is to be kept."""
        self.plain()  # a process without its key would store the new one in plain
        if keep_old:
            return replace(self, secret=seal(new_secret()), old=self.secret, old_until=int(now) + OVERLAP_S)
        return replace(self, secret=seal(new_secret()), old=None, old_until=0)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of events. Times are unix seconds."""

    id: str
    url: str
    name: str
    event_types: tuple[str, ...]
    secrets: Secrets
    created_at: int
    updated_at: int
    tenant: str | None = None
    """The tenant whose tasks' events it gets; None: all tasks."""
    celery: bool = False
    """Whether it gets events of plain Celery tasks, too."""
    enabled: bool = True
    disabled_because: str | None = None

    @classmethod
    def parse(cls, raw: Any) -> Endpoint | None:
        """Returns None for an unreadable endpoint, so that others still get their events."""
        try:
            values = json.loads(raw)
            secrets = Secrets.parse(values["secrets"])
            attributes = {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
            return cls(**attributes | {"event_types": tuple(values["event_types"]), "secrets": secrets})
        except (ValueError, TypeError, KeyError) as error:
            warn_throttled(log, "an endpoint in %s cannot be read: %s", keys.WEBHOOK_ENDPOINTS, error)
            return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def new_id() -> str:
    """An id for an endpoint; ids sort by time."""
    return timed_id(PREFIX, time.time_ns() // 1_000_000)


async def create(store: Redis, endpoint: Endpoint, audit: Change, limit: int | None = None) -> Endpoint:
    """Make an endpoint, of which its tenant may have `limit` (None: any number). Returns it, or the one that
    has this id already. Raises TooManyEndpoints."""
    call = swap(
        keys.WEBHOOK_ENDPOINTS,
        endpoint.id,
        "",
        endpoint.to_json(),
        max_fields=MAX_ENDPOINTS,
        audit=audit,
        tenant_set=keys.endpoints_of(endpoint.tenant),
        max_in_set=limit,
    )
    while True:
        done = await arun(store, call)
        if done < 0:
            raise TooManyEndpoints(all=done == -1)
        if done:
            audit.say()
            return endpoint
        if (existing := await get(store, endpoint.id)) is not None:
            return existing


async def get(store: Redis, endpoint_id: str, tenant: str | None = None) -> Endpoint | None:
    """An endpoint. `tenant`: only if it is this tenant's. Another's is recognised by its text and not parsed: the time
    for parsing would show callers that it exists."""
    raw = await store.execute_command("HGET", keys.WEBHOOK_ENDPOINTS, endpoint_id)
    if raw is None or (tenant is not None and _tenant_in_json(tenant).encode() not in raw):
        return None
    return Endpoint.parse(raw)


def _tenant_in_json(tenant: str | None) -> str:
    """The part of an endpoint's JSON that names its tenant. No string in it can hold this text: quotes are escaped."""
    return f'"tenant": {json.dumps(tenant)}'


async def get_many(store: Redis, ids: Sequence[str]) -> dict[str, Endpoint]:
    """The existing endpoints among these, in one round trip."""
    if not ids:
        return {}
    rows = await store.execute_command("HMGET", keys.WEBHOOK_ENDPOINTS, *ids)
    read = {name: Endpoint.parse(raw) for name, raw in zip(ids, rows, strict=True) if raw is not None}
    return {name: endpoint for name, endpoint in read.items() if endpoint is not None}


async def every(store: Redis) -> list[Endpoint]:
    """All of them, the newest first."""
    rows = await store.execute_command("HVALS", keys.WEBHOOK_ENDPOINTS)
    return sorted(filter(None, map(Endpoint.parse, rows)), key=lambda endpoint: endpoint.id, reverse=True)


async def of_tenant(store: Redis, tenant: str | None) -> list[Endpoint]:
    """Endpoints of a tenant, or without one, the newest first."""
    rows = await arun(store, endpoints_call(tenant))
    return sorted(filter(None, map(Endpoint.parse, rows)), key=lambda endpoint: endpoint.id, reverse=True)


async def change(
    store: Redis, endpoint_id: str, how: Callable[[Endpoint], Endpoint], audit: Change | None
) -> Endpoint | None:
    """Change an endpoint by a function, which may be called again if another process changes it meanwhile.

    None where there is none.
    """
    while (raw := await store.execute_command("HGET", keys.WEBHOOK_ENDPOINTS, endpoint_id)) is not None:
        if (old := Endpoint.parse(raw)) is None:
            return None
        if (new := how(old)) == old:
            return new
        if await arun(store, swap(keys.WEBHOOK_ENDPOINTS, endpoint_id, text(raw), new.to_json(), audit=audit)):
            if audit is not None:
                audit.say()
            return new
    return None


async def remove(store: Redis, endpoint_id: str, audit: Change) -> bool:
    """Remove an endpoint. Its rows that are due become dead. False where there was none."""
    while (raw := await store.execute_command("HGET", keys.WEBHOOK_ENDPOINTS, endpoint_id)) is not None:
        tenant_set = keys.endpoints_of(None if (old := Endpoint.parse(raw)) is None else old.tenant)
        if await arun(
            store, swap(keys.WEBHOOK_ENDPOINTS, endpoint_id, text(raw), "", audit=audit, tenant_set=tenant_set)
        ):
            audit.say()
            return True
    return False


async def own_secrets(store: Redis, tenant: str | None) -> Secrets:
    """The tenant's secrets for its tasks' own webhooks, made at first need."""
    return await _change_secrets(store, tenant, lambda secrets: secrets, None)


async def rotate_own(store: Redis, tenant: str | None, audit: Change, *, keep_old: bool = True) -> Secrets:
    """Give a tenant a new secret for its tasks' own webhooks."""
    return await _change_secrets(store, tenant, lambda secrets: secrets.rotated(time.time(), keep_old=keep_old), audit)


async def _change_secrets(
    store: Redis, tenant: str | None, how: Callable[[Secrets], Secrets], audit: Change | None
) -> Secrets:
    fresh = Secrets.new()
    while True:
        raw = await store.execute_command("HGET", keys.WEBHOOK_SECRETS, tenant or "")
        old = None if raw is None else Secrets.parse(json.loads(raw))
        new = fresh if old is None else how(old)
        if new == old:
            return new
        stored = "" if raw is None else text(raw)
        if await arun(store, swap(keys.WEBHOOK_SECRETS, tenant or "", stored, json.dumps(asdict(new)), audit=audit)):
            if audit is not None:
                audit.say()
            return new


async def send_test(store: Redis, endpoint: Endpoint, event_type: str) -> str:
    """Put a made-up event into the outbox, for this endpoint alone. Returns the row's name."""
    webhook_id = TEST_PREFIX + secrets.token_hex(16)
    kind = "batch" if event_type.startswith("batch.") else "resp"
    row = {
        "webhook_id": webhook_id,
        "type": event_type,
        "object": f"{kind}_test",
        "url": endpoint.url,
        "endpoint": endpoint.id,
    }
    if endpoint.tenant is not None:
        row["tenant"] = endpoint.tenant
    name = f"{webhook_id}.{endpoint.id}"
    await arun(store, outbox.put(name, row))
    return name


async def tested(store: Redis, endpoint: Endpoint, event_type: str, patience_s: float) -> Row | None:
    """`send_test`, and wait for the end of its only try. None if nobody has tried it after `patience_s` seconds."""
    name = await send_test(store, endpoint, event_type)
    give_up, pause = time.monotonic() + patience_s, 0.01
    while time.monotonic() < give_up:
        row = await outbox.get(store, name)
        if row is not None and row.attempts:
            return row
        await asyncio.sleep(pause)
        pause = min(0.25, 1.5 * pause)
    return None
