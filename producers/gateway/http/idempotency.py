"""The header Idempotency-Key: a repeated request gets what the first one made.

    entry = await first(request, client, str(uuid4()), tenant=tenant)      None without the header
    if entry and entry.state == "made": answer with what entry.id names; if it is gone, say so
    else: make it with entry.id; if that exists already, answer with it    (a concurrent request, or a dead process)

Call it after all checks that may refuse the request, so that a corrected body may use the same key.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import Request
from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.directory import ResolvedModel, encoding_of
from producers.client.operations import stored
from producers.client.steps import Read, persistently
from producers.connection.script import text
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import TokenizerChanged, UnknownModel, shown
from producers.gateway.http import request_state
from producers.gateway.http.errors import ONCE, Problem, wrong
from producers.store import idempotency
from producers.store.idempotency import Entry, KeyBound, TooManyKeys

HEADER: Final = "idempotency-key"
#: The header of an answer that is not its request's own, but an earlier one's.
REPLAYED: Final = {"idempotent-replayed": "true"}
#: The name in a request's state of the digest of the only body that it may have.
REPLAYS: Final = "replays"
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
    `producers.gateway.http.request_body` read them. Raises Problem: 400 for a bad key, 422 for another request's key.
    Raises redis.exceptions.RedisError or OSError.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    entry, same = _named(request, key, tenant, digest)
    max_keys = (await request.app.state.gateway.accounts.kept(tenant)).max_idempotency_keys
    bound = None if max_keys is None else KeyBound(tenant or "", max_keys)
    try:
        existing = await client.run(stored(entry, same, new_id, client.patience, bound=bound))
    except TooManyKeys as error:
        message = f"This tenant has used {error.kept} idempotency keys within a day, the most; send it without one."
        raise Problem(429, message, code="too_many_idempotency_keys", param="Idempotency-Key", headers=ONCE) from None
    if existing is None:
        raise _reused(key)
    return existing


def _reused(key: str) -> Problem:
    return Problem(
        422,
        f"The Idempotency-Key {shown(key)} was used for another request (another body or URL) within the last 24 "
        "hours; give each request a key of its own.",
        code="idempotency_key_reused",
        param="Idempotency-Key",
    )


async def may_replay(connection: HTTPConnection, client: AsyncClient, *, tenant: str | None) -> bool:
    """Whether the request's key has made something, before its body is read: only the same body is let in then, see
    `note_body`. Raises Problem for a bad key, redis.exceptions.RedisError or OSError."""
    key = connection.headers.get(HEADER)
    if key is None:
        return False
    read = Read((("HMGET", _entry(key, tenant), "digest", "made"),))
    ((digest, done),) = await client.run(persistently(read, client.patience))
    if done is None:
        return False
    connection.scope["state"][REPLAYS] = text(digest)
    return True


async def made_prompts(
    request: HTTPConnection,
    client: AsyncClient,
    model: ResolvedModel,
    tasks: int,
    *,
    tenant: str | None,
    spelled: bool = False,
) -> list[tuple[int, ...]] | None:
    """The token ids of the prompts of a request's tasks, if an earlier request of the same key and body made all of
    them: a replay is rendered and tokenized no more. None if it did not, a prompt is kept as text, or `model` has
    another tokenizer by now.

    `spelled`: the answer spells token ids out. Raises as `first`, and TokenizerChanged where `model` would spell those
    of the earlier tasks wrongly.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    made_id = await _made_id(request, client, key, tenant)
    if made_id is None:
        return None
    fields = ("task", "version", "encoding")
    reads = tuple(("HMGET", keys.task(task_id), *fields) for task_id in idempotency.ids(made_id, tasks))
    prompts: list[tuple[int, ...]] = []
    for values in await client.run(persistently(Read(reads), client.patience)):
        kept = {name: text(value) for name, value in zip(fields, values, strict=True) if value is not None}
        if kept and not model.reads(encoding_of(kept)):
            if spelled:
                raise TokenizerChanged(
                    f"An earlier request made this answer, by version {kept.get('version')} of the model. The current "
                    "version has another tokenizer, which cannot spell its log probabilities; send the request with "
                    "another Idempotency-Key"
                )
            return None
        prompt = json.loads(kept["task"]).get("prompt") if "task" in kept else None
        if not isinstance(prompt, list):
            return None
        prompts.append(tuple(prompt))
    if (work := request.scope["state"].get("work")) is not None:
        work.done = False  # to read a replay is free
    return prompts


async def _made_id(request: HTTPConnection, client: AsyncClient, key: str, tenant: str | None) -> str | None:
    """Returns the id that an earlier request of the same key and body has made, if it has."""
    entry, same = _named(request, key, tenant)
    answer = await client.run(persistently(Read(idempotency.look(entry)), client.patience))
    return idempotency.made_id(same, answer)


async def was_made(request: HTTPConnection, client: AsyncClient, tasks: int, *, tenant: str | None) -> bool:
    """Whether an earlier request of the same key and body made all of its tasks, and they are there. It takes no key.
    Raises as `first`."""
    key = request.headers.get(HEADER)
    if key is None:
        return False
    made_id = await _made_id(request, client, key, tenant)
    if made_id is None:
        return False
    names = [keys.task(task_id) for task_id in idempotency.ids(made_id, tasks)]
    (there,) = await client.run(persistently(Read((("EXISTS", *names),)), client.patience))
    return int(there) == tasks


async def resolve(
    request: HTTPConnection, client: AsyncClient, task: Task, tasks: int, *, tenant: str | None
) -> ResolvedModel:
    """Returns the model of a request's tasks, of which `task` is the first. One that nobody serves any more is found,
    too, where an earlier request of the same key and body made them. Raises as `first`, and UnknownModel."""
    try:
        return await request_state.resolve(request, client, task)
    except UnknownModel:
        if not await was_made(request, client, tasks, tenant=tenant):
            raise
        return await request_state.resolve(request, client, task, withdrawn=True)


def _named(request: HTTPConnection, key: str, tenant: str | None, digest: str | None = None) -> tuple[str, str]:
    """The name of a key's entry, and the digest of the request. Raises Problem for a bad key."""
    return _entry(key, tenant), _digest(request, digest or request.state.digest)


def _entry(key: str, tenant: str | None) -> str:
    if not idempotency.KEY.fullmatch(key):
        raise wrong("Idempotency-Key", key, "1 to 255 visible ASCII characters, without spaces.")
    return idempotency.name(tenant, key)


def _digest(request: HTTPConnection, body: str) -> str:
    return idempotency.digest(request.url.path.encode(), body.encode())


async def mark_made(client: AsyncClient, entry: Entry) -> None:
    """Note that the entry's object was made, if it is not ADMIT that makes it. Raises as `first`; may be repeated."""
    await client.run(persistently(idempotency.mark_made(entry.name), client.patience))


def note_body(request: Request, body: bytes) -> None:
    """Keep the digest of an unpacked body for `first`, where the request has a key. Raises Problem for another request
    than the one as whose replay it was let in."""
    key = request.headers.get(HEADER)
    if key is None:
        return
    request.state.digest = idempotency.digest(body)
    replays = request.scope["state"].get(REPLAYS)
    if replays is not None and _digest(request, request.state.digest) != replays:
        raise _reused(key)
