"""`penstock rollout`: replaces a model's version by another one while tasks run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, needs, refusing
from workers.cli.options import MODEL, AnyBroker, Store, complete_model, find_models, finite
from workers.cli.terminal import note

if TYPE_CHECKING:
    from redis import Redis

    from producers.store.fleet.rollouts import Rollout
    from workers.rollout import New


app = Commands("Operations", OPERATOR_STATUS)


@app.shown("penstock rollout tiny=./tiny-new --broker redis://10.0.0.5:6379/0")
def rollout(
    model: Annotated[
        str | None, typer.Argument(metavar="NAME=MODEL", help=MODEL, autocompletion=complete_model)
    ] = None,
    broker: AnyBroker = None,
    store: Store = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ready workers of the new version to wait for. Unset: as many as the old one has, and at least 1.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds that the new workers may take to become ready, together."),
    ] = 600.0,
    drain_old: Annotated[
        bool,
        typer.Option("--drain-old", help="Tell workers of the old version to drain once nothing is left for them."),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End the model's rollout, which must not have switched yet.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show the model's last rollout, or those of all models, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rollout's last state as JSON.")] = False,
) -> None:
    """Replace a model's version by another one, without a failed request.

    New workers come up first: `penstock up` starts them, and an autoscaler with a pool of the new version; elsewhere
    deploy them now. Once they are ready, new tasks go to the new version. Workers of the old version finish what was
    queued for it. If this command is ended, run it again: it goes on. Exit status 1: the new workers did not become
    ready, and nothing was switched.
    """
    if model is None and not status:
        raise Failure("name the model and its new version: penstock rollout NAME=FOLDER")
    if status and cancel:
        raise Failure("give --status or --cancel, not both")

    import asyncio

    from workers.connect import connect

    with _refusals():
        urls = _checked(broker, store)
        with connect(urls[1]) as client:
            if status or cancel:
                for one in _shown(client, model) if status else [_cancelled(client, str(model))]:
                    _print(one, as_json)
                return
            ended = asyncio.run(_carried(urls, client, _new(str(model), urls), workers, timeout, drain_old))
    _print(ended, as_json)
    if ended.phase != "done":
        raise Failure(f"the rollout is {ended.phase}: {ended.reason}", Exit.TASK_FAILED)


def _new(reference: str, urls: tuple[str, str]) -> New:
    """The new version, checked. On SQS its queues are made."""
    from producers.contract import keys
    from producers.contract.levels import beside
    from workers.connect import check_queues
    from workers.library.reference import described
    from workers.rollout import New

    (found,) = find_models([reference])
    with needs("gateway"):
        new = New(found, *described(found, note))
    check_queues(*urls, beside(keys.version_queue(found.name, new.version)), make=True)
    return new


async def _carried(
    urls: tuple[str, str], store: Redis, new: New, workers: int | None, limit_s: float, drain_old: bool
) -> Rollout:
    """Begin the rollout, or go on with it, until it has ended."""
    from producers.admin.fleet import read_fleet
    from producers.client.aio import AsyncClient
    from workers.rollout import Carrier, begin, ready

    async with AsyncClient(*urls) as client:
        fleet = await read_fleet(client.store, client.broker)
        begun = begin(store, new, workers, ready(fleet, new.model.name))
        if begun.phase == "starting":
            note(f"{begun.model}: {begun.before} -> {begun.version}")
        return await Carrier(client, store, new, note, limit_s, drain_old).run(begun)


def _shown(store: Redis, model: str | None) -> list[Rollout]:
    from producers.store.fleet import rollouts
    from workers.library import name_of

    if model is None:
        return rollouts.all_of(store)
    found = rollouts.read(store, name_of(model))
    if found is None:
        raise Failure(f"{name_of(model)} was never rolled out")
    return [found]


def _cancelled(store: Redis, model: str) -> Rollout:
    from workers.library import name_of
    from workers.rollout import cancel

    return cancel(store, name_of(model))


def _print(one: Rollout, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(one)))
        return
    when = datetime.fromtimestamp(one.changed, UTC).isoformat(timespec="seconds")
    reason = f": {one.reason}" if one.reason else ""
    typer.echo(f"{one.model}  {one.before} -> {one.version}  {one.phase} since {when}{reason}")


def _checked(broker: str | None, store: str | None) -> tuple[str, str]:
    from producers.connection.local import servers
    from workers.connect import check_servers

    urls = servers(broker, store)
    check_servers(*urls, queues=())
    return urls


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises Failure for a bad URL, for a server that does not answer, and for Ctrl-C."""
    from producers.client.steps import FAILURES
    from producers.connection.trouble import error_text

    try:
        with refusing(ValueError):
            yield
    except FAILURES as error:
        raise Failure(
            f"broker or store do not answer ({error_text(error)}); run this again", Exit.UNREACHABLE
        ) from error
    except KeyboardInterrupt:
        raise Failure("interrupted; the rollout stays where it is: run this again to go on", Exit.INTERRUPTED) from None
