"""The header Idempotency-Key: a repeated request gets what the first one made.

    entry = await first(request, client, str(uuid4()), tenant=tenant)      None without the header
    if entry and entry.state == "made": answer with what entry.id names; if it is gone, say so
    else: make it with entry.id; if that exists already, answer with it    (a concurrent request, or a dead process)

Call it after all checks that may refuse the request, so that a corrected body may use the same key.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request

from producers.client.aio import AsyncClient
from producers.client.operations import stored
from producers.client.steps import persistently
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
    if not idempotency.KEY.fullmatch(key):
        raise wrong("Idempotency-Key", key, "1 to 255 visible ASCII characters, without spaces.")
    entry = idempotency.name(tenant, key)
    same = idempotency.digest(request.url.path.encode(), (digest or request.state.digest).encode())
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


async def made(client: AsyncClient, entry: Entry) -> None:
    """Say that what the key names was made, for what ADMIT does not make. Raises as `first`; may be repeated."""
    await client.run(persistently(idempotency.made(entry.name), client.patience))


def note_body(request: Request, body: bytes) -> None:
    """Keep the digest of an unpacked body for `first`, where the request has a key."""
    if HEADER in request.headers:
        request.state.digest = idempotency.digest(body)
