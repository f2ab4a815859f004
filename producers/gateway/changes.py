"""Routing of new tasks, changed by operators over HTTP: `POST /v1/routing/{model}`, from the generation that the caller
looked at to the next one.

It needs a key of the scope admin and is in the audit log, under the key. The work is `penstock models`' own
(`producers.admin.routes`), on a thread with a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Final, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from redis import Redis

from producers.admin import routes
from producers.connection.connect import connect
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import ADMINISTERS, actor_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import documented, read_as, schema_of
from producers.gateway.operations import RoutingView
from producers.gateway.tasks.views import errors
from producers.store.fleet.routing import DEFAULT, Routing, RoutingChanged, RoutingError, Rule

T = TypeVar("T")
router = APIRouter(prefix="/v1", tags=["fleet"], dependencies=ADMINISTERS)


class RuleChange(BaseModel):
    """A rule. Exactly one of tenant, tier and header is set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    to: str = Field(description="an alias or a version", max_length=200)
    tenant: str | None = Field(None, max_length=200)
    tier: str | None = Field(None, max_length=50)
    header: str | None = Field(None, max_length=500, description="`Name: value`")


class RoutingChange(BaseModel):
    """The parts of the routing that change. Unset parts stay."""

    model_config = ConfigDict(extra="forbid", strict=True)

    generation: int = Field(description="that was looked at; 0 without a routing. Another one by now: 409")
    aliases: dict[str, str | None] | None = Field(None, max_length=100, description="alias -> version; null removes it")
    split: dict[str, float] | None = Field(
        None, max_length=100, description="alias or version -> percent, in place of the whole split"
    )
    rules: list[RuleChange] | None = Field(
        None, max_length=100, description="in place of all rules; the first that fits goes before the split"
    )
    default: str | None = Field(
        None, max_length=200, description="alias or version of tasks that nothing else decides; the card goes with it"
    )


CHANGE: Final = schema_of(RoutingChange)


@router.post(
    "/routing/{model:path}",
    response_model=RoutingView,
    responses=errors(404, 409, 413, 415),
    openapi_extra=documented(CHANGE),
)
async def change_routing(request: Request, model: str) -> RoutingView:
    """Change aliases, the split, rules and the default of new tasks, in one step."""
    change = await read_as(request, RoutingChange, gateway_of(request).settings.max_body)
    if change.aliases and DEFAULT in change.aliases:
        message = "The default is no alias: the field `default` changes it, and the model's card with it."
        raise Problem(400, message, code="invalid_value", param=f"aliases.{DEFAULT}")
    by = actor_of(request).by

    def changed(before: Routing) -> Routing:
        new, aliases = change.aliases or {}, dict(before.aliases)
        if missing := [name for name, version in new.items() if version is None and name not in aliases]:
            raise RoutingError(f"{model} has no alias {missing[0]!r}")
        aliases = {name: to for name, to in {**aliases, **new}.items() if to is not None}
        aliases = {name: before.version_at(to) if name in new else to for name, to in aliases.items()}
        return replace(
            before,
            aliases=aliases,
            split=before.split if change.split is None else change.split,
            rules=before.rules if change.rules is None else tuple(Rule(**rule.model_dump()) for rule in change.rules),
            default=before.default
            if change.default is None
            else replace(before, aliases=aliases).version_at(change.default),
        )

    def work(store: Redis) -> Routing:
        routes.current(store, model)
        return routes.update(store, model, _words(change), changed, by=by, generation=change.generation)

    try:
        return RoutingView.of(await on_thread(request, work))
    except RoutingChanged:
        message = f"The routing of {model} has changed since generation {change.generation}: look again."
        raise Problem(409, message, code="routing_changed") from None
    except RoutingError as error:
        raise refused(str(error)) from None


def _words(change: RoutingChange) -> str:
    """For the audit log."""
    aliases = [f"-{name}" if to is None else f"{name}={to}" for name, to in (change.aliases or {}).items()]
    split = [f"{to} {percent:g}%" for to, percent in (change.split or {}).items()] or ["none"]
    changes = [*aliases, *([] if change.split is None else [f"split {', '.join(split)}"])]
    changes += [] if change.rules is None else [f"{len(change.rules)} rules"]
    changes += [] if change.default is None else [f"{DEFAULT}={change.default}"]
    return ", ".join(changes)


async def on_thread(request: Request, work: Callable[[Redis], T]) -> T:
    """Returns the result of `work`, called with a connection of its own. Raises what it raises."""
    url = gateway_of(request).settings.store

    def run() -> T:
        with closing(connect(url)) as store:
            return work(store)

    return await asyncio.to_thread(run)


def refused(why: str) -> Problem:
    if why.startswith("there is no model"):
        return Problem(404, f"{why}.", code="model_not_found")
    return Problem(400, f"{why}.", code="invalid_value")
