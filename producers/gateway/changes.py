"""What operators change of models' versions over HTTP: aliases and the split of new tasks, and the end of a rollout.

    POST /v1/routing/{model}           from the generation that the caller looked at to the next one
    POST /v1/rollouts/{model}/abort    the version before gets all tasks again

Both need a key of the scope admin and are in the audit log, under the key. The work is `penstock models`' and `penstock
rollout`'s own (`producers.admin.routes`, `producers.rollouts.operations`), on a thread with a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Final, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis import Redis

from producers.admin import routes
from producers.connection.connect import connect
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import ADMINISTERS, actor_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import SETTINGS, documented, read_object
from producers.gateway.operations import RoutingView
from producers.gateway.tasks.views import errors
from producers.rollouts import operations
from producers.rollouts.operations import RolloutError
from producers.store.access import audit
from producers.store.fleet import canaries
from producers.store.fleet.routing import DEFAULT, Routing, RoutingError

T = TypeVar("T")
router = APIRouter(prefix="/v1", tags=["fleet"], dependencies=ADMINISTERS)


class RoutingChange(BaseModel):
    """What is to change. Unset: stays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    generation: int = Field(description="that was looked at; 0 without a routing. Another one by now: 409")
    aliases: dict[str, str | None] | None = Field(
        None, max_length=100, description="alias -> version; null removes it. `default` goes by its card"
    )
    split: dict[str, float] | None = Field(
        None, max_length=100, description="alias or version -> percent, in place of the whole split"
    )


CHANGE: Final = RoutingChange.model_json_schema()


class RolloutAborted(BaseModel):
    object: Literal["rollout.aborted"] = "rollout.aborted"
    model: str
    version: str = Field(description="that gets no new tasks any more")
    phase: str


class _Changed(Exception):
    """The routing has another generation."""


@router.post(
    "/routing/{model:path}",
    response_model=RoutingView,
    responses=errors(404, 409, 413, 415),
    openapi_extra=documented(CHANGE),
)
async def change_routing(request: Request, model: str) -> RoutingView:
    """Let aliases name other versions, or give versions other parts of the new tasks, in one step."""
    body = await read_object(request, min(gateway_of(request).settings.max_body, SETTINGS))
    try:
        change = RoutingChange.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Problem(400, f"{place}: {first['msg']}.", code="invalid_value", param=place[:100]) from None
    if change.aliases and DEFAULT in change.aliases:
        message = "The default is changed by a rollout, or `penstock models alias`, which change the model's card, too."
        raise Problem(400, message, code="invalid_value", param=f"aliases.{DEFAULT}")
    by = actor_of(request).by

    def changed(before: Routing) -> Routing:
        if before.generation != change.generation:
            raise _Changed
        new, aliases = change.aliases or {}, dict(before.aliases)
        if missing := [name for name, version in new.items() if version is None and name not in aliases]:
            raise RoutingError(f"{model} has no alias {missing[0]!r}")
        aliases = {name: to for name, to in {**aliases, **new}.items() if to is not None}
        aliases = {name: before.version_at(to) if name in new else to for name, to in aliases.items()}
        return replace(before, aliases=aliases, split=before.split if change.split is None else change.split)

    def work(store: Redis) -> Routing:
        routes.current(store, model)
        return routes.update(store, model, _words(change), changed, by=by)

    try:
        return RoutingView.of(await _on_thread(request, work))
    except _Changed:
        message = f"The routing of {model} has changed since generation {change.generation}: look again."
        raise Problem(409, message, code="routing_changed") from None
    except RoutingError as error:
        raise _refused(str(error)) from None


def _words(change: RoutingChange) -> str:
    """For the audit log."""
    aliases = [f"-{name}" if to is None else f"{name}={to}" for name, to in (change.aliases or {}).items()]
    split = [f"{to} {percent:g}%" for to, percent in (change.split or {}).items()] or ["none"]
    return ", ".join([*aliases, *([] if change.split is None else [f"split {', '.join(split)}"])])


@router.post("/rollouts/{model:path}/abort", response_model=RolloutAborted, responses=errors(404, 409))
async def abort_rollout(request: Request, model: str) -> RolloutAborted:
    """End a rollout that is under way: the version before gets all new tasks again. One that waits for its workers is
    cancelled; one that has ended, or whose version has all new tasks, is refused."""
    actor = actor_of(request)

    def work(store: Redis) -> RolloutAborted:
        judged = canaries.read(store, model)
        if judged is not None and judged.under_way:
            ended = operations.abort(store, model, actor.by)
            return RolloutAborted(model=model, version=ended.version, phase=ended.phase)
        short = operations.cancel(store, model)
        return RolloutAborted(model=model, version=short.version, phase=short.phase)

    try:
        aborted = await _on_thread(request, work)
    except (RolloutError, RoutingError) as error:
        raise Problem(409, f"{error}.", code="rollout_not_aborted") from None
    await audit.append(gateway_of(request).client.store, actor.did("rollout.abort", f"{model}@{aborted.version}"))
    return aborted


async def _on_thread(request: Request, work: Callable[[Redis], T]) -> T:
    """What `work` makes with a connection of its own. Raises what it raises."""
    url = gateway_of(request).settings.store

    def run() -> T:
        with closing(connect(url)) as store:
            return work(store)

    return await asyncio.to_thread(run)


def _refused(why: str) -> Problem:
    if why.startswith("there is no model"):
        return Problem(404, f"{why}.", code="model_not_found")
    return Problem(400, f"{why}.", code="invalid_value")
