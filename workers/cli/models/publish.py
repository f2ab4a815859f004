"""`penstock models publish`, and what `penstock up` publishes: clients may send tasks before any worker is up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.exits import Exit, Failure, needs, refusing
from workers.cli.models.references import MODEL, complete_model, find_models
from workers.cli.options import AnyBroker, Json, Store
from workers.cli.terminal.show import note

if TYPE_CHECKING:
    from workers.library import Found


def publish(
    references: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL, autocompletion=complete_model)],
    broker: AnyBroker = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write models' cards and tokenizers into the store: tasks for them are accepted and queued, with no worker up.

    New tasks of a published model go to the published version, until another one is published or `penstock rollout`
    ends. Workers of other versions take up only what was queued for these. On SQS, missing queues are made.
    """
    from producers.connection.local import servers

    found = find_models(references)
    with refusing(ValueError):
        urls = servers(broker, store)
        for one in found:
            told = publish_to(*urls, one)
            before = f", was {told['before']}" if told["before"] not in (None, told["version"]) else ""
            typer.echo(json.dumps(told) if as_json else f"{told['name']} {told['version']}{before}")


def publish_to(broker: str, store: str, found: Found, over: str | None = None) -> dict[str, str | None]:
    """Check the servers, make queues where these do not make themselves, and publish. Raises Refused, and Failure.

    `over`: as of `cards.publish`.
    """
    with needs("gateway"):
        from producers.connection.connect import shown
        from producers.connection.trouble import said
        from producers.contract import keys
        from producers.contract.levels import beside
        from producers.store.fleet import cards
        from workers.connect import LOST, check_queues, check_servers, connect
        from workers.library.verify import described

        card, files = described(found, note)
    queues = [*beside(keys.version_queue(found.name, card["version"])), keys.model_queue(found.name)]
    check_servers(broker, store, queues=())
    check_queues(broker, store, queues, make=True)  # first: a published model's tasks are sent there
    try:
        with connect(store) as client:
            before = cards.read(client, found.name)
            cards.publish(client, card, files, over)
    except LOST as error:
        raise Failure(f"the store at {shown(store)} does not take it: {said(error)}", Exit.UNREACHABLE) from error
    return {"name": found.name, "version": card["version"], "before": before and before["version"]}


def publish_own(broker: str, store: str, found: Found) -> str:
    """Publish a model of `penstock up`, but for one whose rolling update is under way, from or to this version.

    An `up` that ends in the middle of an update is started again with the folder that it had. It must neither turn the
    update back nor switch it: the other version's tasks would wait for workers that nobody starts. Returns what the
    operator should know of it, or "". Raises Failure, and Refused.
    """
    from engine.text.checkpoint import model_version
    from producers.connection.trouble import said
    from producers.store.fleet import cards, rollouts
    from workers.connect import LOST, connect

    own = model_version(found.folder)
    try:
        with connect(store) as client:
            rollout, card = rollouts.read(client, found.name), cards.read(client, found.name)
    except LOST as error:
        raise Failure(f"the store does not answer: {said(error)}", Exit.UNREACHABLE) from error
    standing = None if card is None else str(card["version"])
    under_way = rollout is not None and rollout.phase in rollouts.UNDER_WAY
    if rollout is not None and under_way and {own, standing} == {rollout.before, rollout.version}:
        return f"new tasks of {found.name} go to version {standing}: its rollout goes on with `penstock rollout`"
    publish_to(broker, store, found, over=standing)
    if standing in (None, own):
        return ""
    return f"new tasks of {found.name} go to version {own} from now on; until now, they went to version {standing}"
