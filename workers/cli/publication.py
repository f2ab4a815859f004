"""`penstock models publish`, `rm` and `gc`: versions of models go into the store or a bucket, and out of them.

`penstock up` publishes its own models by `publish_own`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.exits import Exit, Failure, needs, refusing, touching
from workers.cli.models import app, bucket_at
from workers.cli.options import MODEL, Broker, DataDir, Json, Store, complete_model, find_models
from workers.cli.servers import addresses, open_store, system
from workers.cli.terminal import note, say

if TYPE_CHECKING:
    from redis import Redis

    from producers.client.aio import AsyncClient
    from producers.store.blobs.bucket import Bucket
    from workers.library import LocalModels, ResolvedModel
    from workers.library.local_models import Pulled


@app.shown("penstock models publish tiny --broker redis://10.0.0.5:6379/0")
def publish(
    references: Annotated[list[str], typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model)],
    called: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME[@ALIAS]",
            help="The name to publish one model under. With an alias, only NAME@ALIAS leads to this version: other new "
            "tasks of the model go on as before.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="s3://BUCKET/PREFIX",
            help="Write the files into a bucket instead, at PREFIX/NAME/VERSION: workers take them from there. What is "
            "there already is not sent again. No card is written.",
        ),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Let clients use models, also with no worker up: write their cards into the store. Or, with --to, write their
    files into a bucket.

    New tasks of a published model go to the published version, until another one is published or `penstock rollout`
    ends. Workers of other versions take up only what was queued for these. On SQS, missing queues are made.
    """
    from workers.library.reference import split_reference

    name, _, alias = (called or "").partition("@")
    if to is not None and alias:
        raise Failure("an alias is in the store, and --to writes into a bucket: publish to the bucket without an alias")
    if called is not None:
        if len(references) > 1:
            raise Failure("--as names one model: publish the others apart")
        references = [f"{name}={split_reference(references[0])[1]}"]
    place = None if to is None else bucket_at(to)
    models = find_models(references)
    if place is not None:
        _publish_to_bucket(place, models, as_json)
        return
    with refusing(ValueError):
        urls = addresses(broker, store, data_dir)
        for model in models:
            published = publish_to(*urls, model, alias=alias or None)
            before = f", was {published['before']}" if published["before"] not in (None, published["version"]) else ""
            text = f"{published['name']} {published['version']}{before}"
            if alias:
                text = f"{published['name']}@{alias} {published['version']}"
            typer.echo(json.dumps(published) if as_json else text)


def _publish_to_bucket(place: Bucket, models: Iterable[ResolvedModel], as_json: bool) -> None:
    from workers.library import bucket

    for model in models:
        stored = bucket.publish(model.folder, model.name, place, note, quiet=as_json)
        row = {"name": model.name, "version": stored.model.version, "url": stored.model.bucket.url}
        typer.echo(json.dumps(row) if as_json else f"{model.name} {stored.model.version} {stored.model.bucket.url}")


@app.shown("penstock models rm tiny-v2 --broker redis://10.0.0.5:6379/0", "rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="Models in the store, or NAME@VERSION, or s3://BUCKET/PREFIX/NAME/VERSION."
        ),
    ],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove models from the store, so that clients know them no more, or a version's files from a bucket. No file on
    this machine is removed.

    A model that workers serve, an autoscaler scales, or aliases name, is refused: end these first. Tasks that wait for
    it stay until it is served again. NAME@VERSION removes a version that nothing uses. s3://... removes the files of a
    version in a bucket, unless a model in the store uses the version.
    """
    from producers.admin import routes
    from producers.store.access.audit import Change, append, operator
    from producers.store.fleet.routing import RoutingError
    from workers.connect import connect
    from workers.library.reference import S3

    with system(broker, store, data_dir) as (client, loop), connect(addresses(broker, store, data_dir)[1]) as records:
        for name in names:
            if name.startswith(S3):
                removed_there = _remove_from_bucket(records, name, as_json)
                loop.run(append(client.store, Change(operator(), "bucket.remove", removed_there)))
                continue
            model, _, version = name.partition("@")
            if version:
                with refusing(RoutingError):
                    routes.remove_version(records, model, version)
                row = {"name": model, "version": version, "waiting": 0}
                typer.echo(json.dumps(row) if as_json else f"{model} {version} removed")
                continue
            removed = loop.run(_removed(client, records, name))
            waiting = f"; {removed['waiting']} tasks still wait for it" if removed["waiting"] else ""
            typer.echo(json.dumps(removed) if as_json else f"{name} {removed['version']} removed{waiting}")


def _remove_from_bucket(store: Redis, place: str, as_json: bool) -> str:
    """Remove a version's files from a bucket. Answers its URL. Raises Failure where a model in the store uses it."""
    from producers.admin import routes
    from workers.library import bucket

    stored = bucket.BucketModel.parse(place)

    def check() -> None:
        for model in sorted(routes.models_of(store)):
            if using := routes.uses(store, model).get(stored.version):
                raise Failure(f"{stored.version} of {model} is in use: {'; '.join(dict.fromkeys(using))}")

    check()
    count = bucket.remove(stored, check)  # and again: a route may lead to it since
    row = {"name": stored.name, "version": stored.version, "objects": count}
    typer.echo(json.dumps(row) if as_json else f"{stored.bucket} removed, with {count} objects")
    return stored.bucket.url


async def _removed(client: AsyncClient, store: Redis, name: str) -> dict[str, Any]:
    """Remove a model's card. Raises Failure where it is in use, or is none."""
    import asyncio

    from producers.admin.listing import look
    from producers.contract import keys
    from producers.contract.levels import looked_after
    from producers.store.fleet import canaries, cards, rollouts, routing
    from workers.library import LocalModels

    while True:
        models = await look(client)
        model = models.get(name)
        if model is None:
            local = LocalModels.default().find(name)
            advice = "" if local is None else f". Its files are here: remove the folder {local.folder.parent} yourself"
            raise Failure(f"there is no model {name!r}; there are {', '.join(sorted(models)) or 'none'}{advice}")
        version = str(model.card["version"])
        if model.workers:
            raise Failure(f"{name} is served by {', '.join(model.workers)}: end them first (penstock drain)")
        if model.scaled_by:
            raise Failure(
                f"{name} is scaled by {', '.join(model.scaled_by)}: end that autoscaler, or take it out there"
            )
        canary = canaries.read(store, name)
        if canary is not None and canary.under_way:
            raise Failure(f"a rollout of {name} is under way: end it first (penstock rollout abort {name})")
        rollout = rollouts.read(store, name)
        promoted = canary is not None and canary.phase == "promoted"
        if rollout is not None and rollout.phase in rollouts.UNDER_WAY and not promoted:
            raise Failure(f"a rollout of {name} is under way: end it first (penstock rollout {name} --cancel)")
        state = routing.read(store, name)
        if state is not None and state.aliases:
            options = " ".join(f"--rm {alias}" for alias in sorted(state.aliases))
            raise Failure(
                f"{name} has the aliases {', '.join(sorted(state.aliases))}: remove them first (penstock models alias "
                f"{name} {options})"
            )
        if cards.remove(store, name, model.raw, version):
            canaries.forget(store, name)
            break
    queues = [*looked_after(keys.version_queue(name, version)), keys.model_queue(name)]
    waiting = await asyncio.gather(*map(client.broker.waiting, queues))
    return {"name": name, "version": version, "waiting": sum(sum(queue.tiers.values()) for queue in waiting)}


def publish_to(
    broker: str,
    store: str,
    model: ResolvedModel,
    over: str | None = None,
    publisher: str | None = None,
    alias: str | None = None,
) -> dict[str, str | None]:
    """Check the servers, make queues where these do not make themselves, and publish. Raises Refused, and Failure.

    `over`, `publisher`: as of `cards.publish`. `alias`: the version is only added, and this alias leads to it.
    """
    with needs("gateway"):
        from producers.admin import routes
        from producers.connection.connect import shown
        from producers.connection.trouble import error_text
        from producers.contract import keys
        from producers.contract.levels import beside
        from producers.store.fleet import cards
        from producers.store.fleet.routing import RoutingError
        from workers.connect import LOST, check_queues, check_servers, connect
        from workers.library.reference import described

        card, files = described(model, note)
    queues = [*beside(keys.version_queue(model.name, card["version"])), keys.model_queue(model.name)]
    check_servers(broker, store, queues=())
    check_queues(broker, store, queues, make=True)  # first: a published model's tasks are sent there
    try:
        with connect(store) as client:
            before = cards.read(client, model.name)
            if alias is None:
                cards.publish(client, card, files, over, publisher)
            elif before is None:
                raise Failure(f"there is no model {model.name!r} yet: publish its first version without an alias")
            else:
                cards.add_version(client, card, files)
                routes.set_aliases(client, model.name, {alias: card["version"]})
    except RoutingError as error:
        raise Failure(str(error)) from error
    except LOST as error:
        raise Failure(f"the store at {shown(store)} does not take it: {error_text(error)}", Exit.UNREACHABLE) from error
    published = {"name": model.name, "version": card["version"], "before": before and before["version"]}
    return published if alias is None else {**published, "alias": alias}


def publish_own(broker: str, store: str, model: ResolvedModel, publisher: str) -> str:
    """Publish a model of `penstock up`, but for one whose rolling update is under way, from or to this version.

    An `up` that ends in the middle of an update is started again with the folder that it had. It must neither turn the
    update back nor switch it: the other version's tasks would wait for workers that nobody starts. `publisher`: this
    `up`. Returns what the operator should know of it, or "". Raises Failure, and Refused.
    """
    from engine.text.checkpoint import model_version
    from producers.connection.trouble import error_text
    from producers.store.fleet import cards, rollouts
    from workers.connect import LOST, connect

    own_version = model_version(model.folder)
    try:
        with connect(store) as client:
            rollout, card = rollouts.read(client, model.name), cards.read(client, model.name)
            current = None if card is None else str(card["version"])
            versions = {rollout.before, rollout.version} if rollout and rollout.phase in rollouts.UNDER_WAY else set()
            left_alone = {own_version, current} == versions
            if left_alone:
                cards.take_over(client, model.name, publisher)
    except LOST as error:
        raise Failure(f"the store does not answer: {error_text(error)}", Exit.UNREACHABLE) from error
    if left_alone:
        return f"new tasks of {model.name} go to version {current}: its rollout goes on with `penstock rollout`"
    publish_to(broker, store, model, over=current, publisher=publisher)
    if current in (None, own_version):
        return ""
    return (
        f"new tasks of {model.name} go to version {own_version} from now on; until now, they went to version {current}"
    )


@app.shown("penstock models gc --data-dir data")
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without it they are only listed.")] = False,
    local: Annotated[
        bool,
        typer.Option("--local", help="Also those of the local model folder, but for the last pulled of each model."),
    ] = False,
    place: Annotated[
        str | None,
        typer.Option(
            "--bucket",
            metavar="s3://BUCKET/PREFIX",
            help="Also what broken publishes have left there a day ago: versions without a manifest, and uploads.",
        ),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove versions that nothing uses.

    In the store: no worker serves them, no routing or rollout names them, their stage is neither staging nor approved,
    and no tasks may wait for them. Of the local model folder it knows only what this system uses.
    """
    uploads_to = None if place is None else bucket_at(place)
    count = 0
    with open_store(broker, store, data_dir) as records:
        for row in _unused(records, local, uploads_to, yes):
            count += 1
            _show_removed(row, yes, as_json)
    if not count:
        note("Nothing is unused.")


def _unused(store: Redis, local: bool, place: Bucket | None, remove: bool) -> Iterator[dict[str, str]]:
    """What is unused, after its removal if it is to be removed."""
    from producers.admin import routes
    from producers.store.fleet.cards import profile_field
    from producers.store.fleet.routing import RoutingError
    from workers.library import LocalModels, bucket

    unused = routes.unused_versions(store)
    used = {version for name in routes.models_of(store) for version in routes.uses(store, name)}
    for name, version in unused:
        if remove:
            try:
                routes.remove_version(store, name, version)
            except RoutingError as error:
                note(str(error))
                continue
        yield {"version": profile_field(name, version)}
    models = LocalModels.default()
    for pulled in _unused_folders(models, used) if local else ():
        if remove:
            with touching(pulled.folder, "remove"):
                models.remove(pulled)
        yield {"folder": str(pulled.folder)}
    if place is None:
        return
    for stored in bucket.abandoned(place):
        if not remove or bucket.remove_abandoned(stored):
            yield {"bucket": str(stored.model.bucket)}
    if remove and (count := bucket.end_uploads(place)):
        note(f"ended {count} uploads to {place} that got nothing for a day")


def _unused_folders(models: LocalModels, used: set[str]) -> list[Pulled]:
    latest: set[str] = set()
    unused = []
    for pulled in models.all():
        if pulled.name in latest and pulled.version not in used:
            unused.append(pulled)
        latest.add(pulled.name)
    return unused


def _show_removed(row: Mapping[str, str], removed: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**row, "removed": removed}))
    else:
        say(f"{next(iter(row.values()))} {'removed' if removed else 'is unused; --yes removes it'}")
