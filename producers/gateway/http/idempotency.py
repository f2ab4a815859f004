"""The header Idempotency-Key: a repeated request gets what the first one made.

    entry = await first(request, client, str(uuid4()), tenant=tenant)      None without the header
    if entry and entry.state == "made": answer with what entry.id names; if it is gone, say so
    else: make it with entry.id; if that exists already, answer with it    (a concurrent request, or a dead process)

Call it after all checks that may refuse the request, so that a corrected body may use the same key.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request
from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.operations import stored
from producers.client.steps import Read, persistently
from producers.contract import keys
from producers.errors import shown
from producers.gateway.http.errors import Problem, wrong
from producers.store import idempotency
from producers.store.idempotency import Entry

HEADER: Final = "idempotency-key"
#: The header of an answer that is not its request's own, but an earlier one's.
REPLAYED: Final = {"idempotent-replayed": "true"}
#: The header for OpenAPI (`parameters` of an operation, whose `responses` then have 422).
PARAMETER: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "any name of this request: within 24 hours, the same key and body make nothing twice",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


async def first(
    request: Request, client: AsyncClient, new_id: str, *, tenant: str | None = None, digest: str | None = None
) -> Entry | None:
    """The entry of the request's key, with `new_id` for a new key; None without a key.

    `digest` (`idempotency.digest`) says which bodies are the same; by default, those of equal bytes once unpacked, as
    `producers.gateway.http.request.body` read them. Raises Problem: 400 for a bad key, 422 for another request's key.
    Raises redis.exceptions.RedisError or OSError.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    entry, same = _named(request, key, tenant, digest)
    found = await client.run(stored(entry, same, new_id, client.patience))
    if found is None:
        raise Problem(
            422,
            f"The Idempotency-Key {shown(key)} was used for another request (another body or URL) within the last 24 "
            "hours; give each request a key of its own.",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )
    return found


async def was_made(request: HTTPConnection, client: AsyncClient, tasks: int, *, tenant: str | None) -> bool:
    """Whether an earlier request of the same key and body made all of its tasks, and they are there. It takes no key.
    Raises as `first`."""
    key = request.headers.get(HEADER)
    if key is None:
        return False
    entry, same = _named(request, key, tenant)
    found = await client.run(persistently(Read(idempotency.look(entry)), client.patience))
    if (made_id := idempotency.made_id(same, found)) is None:
        return False
    names = [keys.task(one) for one in idempotency.ids(made_id, tasks)]
    (there,) = await client.run(persistently(Read((("EXISTS", *names),)), client.patience))
    return int(there) == tasks


def _named(request: HTTPConnection, key: str, tenant: str | None, digest: str | None = None) -> tuple[str, str]:
    """The name of a key's entry, and the digest of the request. Raises Problem for a bad key."""
    if not idempotency.KEY.fullmatch(key):
        raise wrong("Idempotency-Key", key, "1 to 255 visible ASCII characters, without spaces.")
    same = idempotency.digest(request.url.path.encode(), (digest or request.state.digest).encode())
    return idempotency.name(tenant, key), same


async def made(client: AsyncClient, entry: Entry) -> None:
    """Say that what the key names was made, for what ADMIT does not make. Raises as `first`; may be repeated."""
    await client.run(persistently(idempotency.made(entry.name), client.patience))


def note_body(request: Request, body: bytes) -> None:
    """Keep the digest of an unpacked body for `first`, where the request has a key."""
    if HEADER in request.headers:
        request.state.digest = idempotency.digest(body)
