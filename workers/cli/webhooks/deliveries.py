"""`penstock webhooks ls`, `show` and `replay`: the outbox's rows, each the delivery of an event to one place."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from workers.cli.admin.servers import system
from workers.cli.exits import Exit, Failure
from workers.cli.options import AnyBroker, Json, Store
from workers.cli.terminal.show import note, say

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient
    from producers.store.outbox import Row, State

STATES: Final = ("due", "dead", "delivered")

Names = Annotated[list[str], typer.Argument(metavar="ID...", help="Deliveries, by their name or their webhook-id.")]


def _moment(text: str | None) -> int | None:
    """A time as unix seconds. Raises typer.BadParameter."""
    if text is None:
        return None
    try:
        if text.isascii() and text.isdecimal():
            return int(text)
        at = datetime.fromisoformat(text)
        return int((at if at.tzinfo else at.astimezone()).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time; it must look like 2026-11-20T08:00, or be unix seconds"
        ) from None


def _state(text: str | None) -> str | None:
    if text is not None and text not in STATES:
        raise typer.BadParameter(f"{text!r} is unknown; there are {', '.join(STATES)}")
    return text


AnyState = Annotated[str | None, typer.Option(callback=_state, help="due, dead or delivered. Unset: all three.")]
OfEndpoint = Annotated[
    str | None,
    typer.Option(help="Only this endpoint's; `own`: of webhooks that tasks brought along; `reply`: sources' replies."),
]
Since = Annotated[
    str | None, typer.Option(callback=_moment, metavar="TIME", help="Only events from this time on: 2026-11-20T08:00.")
]
Until = Annotated[str | None, typer.Option(callback=_moment, metavar="TIME", help="Only events up to this time.")]


def listed(
    state: AnyState = None,
    endpoint: OfEndpoint = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Most deliveries of a state.")] = 50,
    broker: AnyBroker = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """List deliveries, the last of each state first."""
    from producers.store import outbox

    any_found = False
    with system(broker, store) as (client, loop):
        for one in (state,) if state else STATES:
            rows = outbox.rows(client.store, cast("State", one), endpoint=endpoint, since=_s(since), until=_s(until))
            for row in loop.run(_first(rows, limit)):
                any_found = True
                tell(json.dumps(_shown(row)) if as_json else described(row))
    if not any_found and not as_json:
        typer.echo("There are no such deliveries.")


def show(names: Names, broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """Show deliveries with their tries: when, what the receiver answered, and how long that took."""
    with system(broker, store) as (client, loop):
        for row in (row for name in names for row in loop.run(_named(client, name))):
            if as_json:
                typer.echo(json.dumps(_shown(row)))
                continue
            tell(described(row))
            for one in row.attempts:
                what = one.error if one.status is None else f"{one.status} {one.answer}"
                tell(f"  {_when(one.at)}  {one.latency_ms} ms  {what}")


def replay(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Deliveries, by their name or their webhook-id.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that the other options select.")] = False,
    state: Annotated[
        str, typer.Option(callback=_state, help="With no ID: replay those that are dead, delivered or due.")
    ] = "dead",
    endpoint: OfEndpoint = None,
    since: Since = None,
    until: Until = None,
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Deliver again, now, with the webhook-id that it had. Exit status 1: one is being tried at this moment.

    Name deliveries, or select them by --endpoint, --since and --until, or say --all.
    """
    selected = bool(every or endpoint or since is not None or until is not None)
    if bool(names) == selected:
        raise Failure("name deliveries, or select some with --endpoint, --since, --until or --all; not both")
    from producers.connection.script import arun, text
    from producers.store import outbox

    with system(broker, store) as (client, loop):
        if names:
            rows = [row for name in names for row in loop.run(_named(client, name))]
        else:
            found = outbox.rows(client.store, cast("State", state), endpoint=endpoint, since=_s(since), until=_s(until))
            rows = loop.run(_first(found, None))  # all: a replayed row leaves the list
        once = dict.fromkeys(row.name for row in rows)
        answers = {name: text(loop.run(arun(client.store, outbox.replay(name)))) for name in once}
    held = [name for name, answer in answers.items() if answer == "held"]
    for name in held:
        note(f"{name} is being tried at this moment")
    typer.echo(f"{list(answers.values()).count('replayed')} deliveries are due again")
    if held:
        raise typer.Exit(Exit.TASK_FAILED)


def described(row: Row) -> str:
    """A delivery in a line."""
    last = row.attempts[-1] if row.attempts else None
    said = "" if last is None else f"  last: {last.status if last.status is not None else last.error}"
    return f"{row.name}  {row.state}  {_when(row.at)}  {row.type}  {row.object}  {row.url}  {row.tries} tries{said}"


def tell(line: str) -> None:
    """Print a line that may hold a receiver's text, which may have several."""
    say(line.replace("\n", " "))


async def _named(client: AsyncClient, name: str) -> list[Row]:
    """The rows of a name or of a webhook-id. Raises Failure if there is none."""
    from producers.store import endpoints, outbox

    names = [name]
    if "." not in name:
        names += [f"{name}.own", f"{name}.reply", *(f"{name}.{one.id}" for one in await endpoints.every(client.store))]
    found = [row for one in names if (row := await outbox.get(client.store, one)) is not None]
    if not found:
        raise Failure(f"there is no delivery {name}; penstock webhooks ls shows what there is")
    return found


async def _first(rows: AsyncIterator[Row], most: int | None) -> list[Row]:
    """The first rows; None: all."""
    found: list[Row] = []
    async for row in rows:
        found.append(row)
        if len(found) == most:
            break
    return found


def _shown(row: Row) -> dict[str, Any]:
    """A row for programs, without its secret."""
    return {name: value for name, value in asdict(row).items() if name != "secret"}


def _s(moment: Any) -> int | None:
    """What `_moment` made of an option; typer knows it as text."""
    return cast("int | None", moment)


def _when(seconds: int) -> str:
    if abs(seconds - time.time()) > 100 * 365 * 86400:
        return f"{seconds} s"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
