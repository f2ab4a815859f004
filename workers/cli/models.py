"""`penstock models` lists, shows, pulls, publishes and removes models; `penstock rollout` replaces a version.

`penstock up` publishes its own models by `publish_own`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, PROCESS_STATUS, Exit, Failure, check_signing, needs, refusing
from workers.cli.options import (
    DEFAULT_URL,
    MODEL,
    Broker,
    DataDir,
    Json,
    Model,
    RequireSignature,
    Store,
    Url,
    complete_model,
    find_models,
    finite,
    is_set,
)
from workers.cli.terminal import aligned, note, say

if TYPE_CHECKING:
    from redis import Redis

    from engine.text import ModelCard
    from producers.client.aio import AsyncClient
    from producers.store.blobs.bucket import Bucket
    from producers.store.fleet.rollouts import Rollout
    from workers.library import ResolvedModel
    from workers.rollout import New

JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: Settings of config.json that give a model's size -> their names in `penstock models show`.
SHAPE: Final = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "intermediate_size": "feed-forward width",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts of a token",
    "moe_intermediate_size": "width of an expert",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key-value heads",
    "head_dim": "head size",
    "vocab_size": "vocabulary",
    "sliding_window": "sliding window",
}
rollout_app = Commands(
    "Operations",
    OPERATOR_STATUS,
    "rollout",
    "Replace a model's version: by steps that are judged (`start`), or at once.",
)

app = Commands("Models", PROCESS_STATUS, "models", "List, show, pull, publish and remove models.")


@app.shown("penstock models ls --json", "ls")
def listed(
    context: typer.Context,
    place: Annotated[
        str | None, typer.Argument(metavar="[s3://BUCKET/PREFIX]", help="List the versions in a bucket instead.")
    ] = None,
    as_json: JsonOutput = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List bundled and pulled models, and those that a gateway serves: of the default URL only if it answers.

    Or the versions in a bucket: one without its manifest is incomplete, and nobody pulls it.
    """
    if place is not None:
        _list_bucket(place, as_json)
        return
    rows = [*_here(), *_served(url, named=is_set(context, "url"))]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns = ("name", "where", "version", "parameters", "size", "context", "chat")
    table = [columns]
    for row in rows:
        size = "" if row["bytes"] is None else _megabytes(row["bytes"])
        count = "" if row["parameters"] is None else _count(row["parameters"])
        chat = "yes" if "chat" in row["capabilities"] else "no"
        table.append((row["name"], row["where"], row["version"], count, size, str(row["context_length"]), chat))
    for line in aligned(table, len(columns)):
        typer.echo(line)


def _list_bucket(place: str, as_json: bool) -> None:
    from workers.library import bucket

    table = [("name", "version", "files", "size", "written", "")]
    for stored in bucket.stored(bucket_at(place)):
        when = datetime.fromtimestamp(stored.at, UTC).isoformat(timespec="seconds")
        model = stored.model
        if as_json:
            row = {"name": model.name, "version": model.version, "url": model.bucket.url, "files": stored.files}
            typer.echo(json.dumps({**row, "bytes": stored.size, "written": when, "whole": stored.whole}))
            continue
        incomplete = "" if stored.whole else "incomplete"
        table.append((model.name, model.version, str(stored.files), _megabytes(stored.size), when, incomplete))
    for line in aligned(table, 6) if not as_json else ():
        typer.echo(line)


def bucket_at(place: str) -> Bucket:
    """The bucket that a URL names. Raises Failure."""
    from producers.store.blobs.bucket import read

    with refusing(ValueError):
        return read(place)


def _shown(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


@app.shown("penstock models show tiny")
def show(model: Model, as_json: JsonOutput = False) -> None:
    """Show a model's source, licence, architecture, size, chat template and files. Pulls a hub's model first."""
    folder, card = _card(model)
    from engine.text.config import Config, read_config
    from engine.text.gguf import TYPES, parts_of

    config = Config.of_model(read_config(folder))
    paths = sorted(folder.iterdir()) if folder.is_dir() else parts_of(folder)
    files = {path.name: path.stat().st_size for path in paths if _shown(path)}
    shape = {name: config.get(name) for name in SHAPE if name in config}
    metadata = {"dtype": config.get("dtype") or config.get("torch_dtype")}
    metadata |= {"quantization": config.get("quantization_config"), "shape": shape, "files": files}
    metadata |= {TYPES: config.get(TYPES)} if TYPES in config else {}
    metadata |= _origin(folder)
    if as_json:
        description = {**json.loads(card.to_json()), "folder": str(folder), **metadata, "tokenizer_files": card.files}
        typer.echo(json.dumps(description))
        return
    described = _described(card, folder, metadata)
    for line in aligned([item for item in described.items() if item[1] is not None], 2):
        say(line)
    typer.echo(f"files: {_megabytes(sum(files.values()))}")
    for name, size in files.items():
        say(f"  {size:>14,}  {name}")


def _described(card: ModelCard, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The facts to show of a model, by name. They may hold any text from the model's files."""
    from engine.text.config import packed_bits

    section, quantised = metadata["quantization"], None
    if isinstance(section, dict):
        bits = packed_bits({"quantization_config": section})("")
        numbers = (
            f"{bits} bits" if bits < 32 else "8-bit floats" if section.get("format") != "dense" else "not quantised"
        )
        sparsity = section.get("sparsity_config")
        structure = sparsity.get("sparsity_structure") if isinstance(sparsity, dict) else None
        quantised = f"{section.get('quant_method')}, {numbers}" + (f", pruned {structure}" if structure else "")
    return {
        "name": card.name,
        "version": card.version,
        "folder": str(folder),
        "source": metadata["source"],
        "licence": metadata["licence"],
        "architecture": card.architecture,
        "parameters": f"{card.parameters:,}",
        "stored as": _stored_as(metadata),
        "quantised": quantised,
        "context": f"{card.context_length:,} tokens",
        **{SHAPE[name]: f"{value:,}" if isinstance(value, int) else value for name, value in metadata["shape"].items()},
        "chat template": "yes" if "chat" in card.capabilities else "none: the model continues texts only",
        "defaults": ", ".join(f"{name} {value:g}" for name, value in card.defaults.items()) or "none",
    }


def _origin(folder: Path) -> dict[str, str | None]:
    """Where a model is from, and under which licence it is said to be; None where nothing says so."""
    from engine.text.gguf import gguf_of, read_gguf
    from workers.library.local_models import source_of
    from workers.library.reference import PACKAGED

    package = next((model for model in PACKAGED.values() if model.path() == folder), None)
    pulled, gguf = source_of(folder), gguf_of(folder)
    source = f"hf://{pulled.repo}@{pulled.commit}" if pulled is not None else None
    licence = read_gguf(gguf).get("general.license") if gguf is not None else None
    return {
        "source": package.source() if package is not None else source,
        "licence": licence[:200] if isinstance(licence, str) else None,
    }


def _stored_as(metadata: Mapping[str, Any]) -> str | None:
    """The dtype of the weights, or the types of a GGUF file and what becomes of them in memory."""
    from engine.text.gguf import TYPES, in_memory

    dtype: str | None = metadata["dtype"]
    return dtype if dtype is None or TYPES not in metadata else in_memory(metadata[TYPES], dtype)


@app.shown("penstock models pull hf://Qwen/Qwen3-0.6B@main --name qwen3")
def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="hf://OWNER/NAME[/FILE.gguf][@REVISION], s3://BUCKET/PREFIX/NAME/VERSION, a folder, a GGUF file or "
            "smollm2.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name here. Unset: the repository's, folder's or file's.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Copy a model from a hub, a bucket or a folder into the local model folder, with checksums.

    The local model folder is PENSTOCK_MODELS, else penstock/models in the user's data folder.
    """
    from engine.text.gguf import gguf_of
    from workers.library import LocalModels, find_model
    from workers.library.reference import HUB, PACKAGED, S3, bundled, checked_name, name_of

    if source in PACKAGED and not Path(source).exists():
        source, name = PACKAGED[source].hub, name or source
    called = checked_name(name or name_of(source), source)
    if called in bundled():
        raise Failure(f"{called!r} is the name of a bundled model; give another with --name")
    if source.startswith((HUB, S3)):
        with needs("worker"):
            say = (lambda line: None) if as_json else note
            folder = find_model(f"{called}={source}", say, quiet=as_json).folder
    elif Path(source).is_dir() or gguf_of(source) is not None:
        folder = LocalModels.default().copy(called, Path(source)).folder
    else:
        raise Failure(
            f"{source!r} is neither a folder nor a GGUF file; a hub's model is written hf://OWNER/NAME, a "
            "bucket's s3://BUCKET/PREFIX/NAME/VERSION"
        )
    pulled = {"name": called, "version": folder.name, "folder": str(folder)}
    typer.echo(json.dumps(pulled) if as_json else f"{called} {folder.name}")


@app.shown("penstock models card tiny")
def card(model: Model) -> None:
    """Print a model's card as JSON: the description that gateways and clients use."""
    typer.echo(_card(model)[1].to_json())


def _card(model: str) -> tuple[Path, ModelCard]:
    from engine.errors import ModelError

    with needs("gateway"):
        from engine.text import ModelCard
    (resolved,) = find_models([model])
    try:
        return resolved.folder, ModelCard.from_folder(resolved.folder, resolved.name)
    except ModelError as error:
        raise Failure(f"{resolved.folder} holds no servable model: {error}") from error


def _here() -> Iterator[dict[str, Any]]:
    """Rows of the models on this machine. It reads no tokenizer, since large ones take seconds."""
    from engine.errors import ModelError
    from engine.text.gguf import parts_of
    from workers.library import LocalModels
    from workers.library.reference import bundled, packaged

    with needs("gateway"):
        from engine.text import ModelCard, TemplateSource
        from engine.text.checkpoint import count_parameters, model_version
        from engine.text.config import Config, read_config
    places = [(name, "bundled", folder) for name, folder in bundled().items()]
    places += [(name, "package", file) for name, file in packaged().items()]
    places += [
        (pulled.name, "pulled", pulled.folder)
        for pulled in sorted(LocalModels.default().all(), key=lambda pulled: pulled.name)
    ]
    for name, where, folder in places:
        try:
            paths = folder.iterdir() if folder.is_dir() else parts_of(folder)
            chat = TemplateSource.from_bytes(ModelCard.tokenizer_files(folder)) is not None
            yield {
                "name": name,
                "where": where,
                "version": model_version(folder),
                "parameters": count_parameters(folder),
                "bytes": sum(path.stat().st_size for path in paths if path.is_file()),
                "context_length": Config.of_model(read_config(folder)).context_length(),
                "capabilities": ["generate", "chat"] if chat else ["generate"],
                "folder": str(folder),
            }
        except ModelError as error:
            typer.echo(f"penstock: {folder} holds no servable model: {error}", err=True)


def _served(url: str, *, named: bool) -> Iterator[dict[str, Any]]:
    """Rows of a gateway's models; none if it was not `named` and does not list them."""
    from workers.cli.client import Gateway, Refused, Unreachable

    gateway = Gateway(url)
    try:
        models = gateway.models()
    except (Unreachable, Refused) as failure:
        if named:
            raise
        if isinstance(failure, Refused):
            typer.echo(f"penstock: {gateway.url} does not list its models: {failure}", err=True)
        return
    for model in models:
        same = {name: model[name] for name in ("version", "context_length", "capabilities")}
        where = {"name": model["id"], "where": gateway.url, "parameters": None, "bytes": None, "folder": None}
        yield {**where, **same}


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def _count(parameters: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return f"{parameters / 1e3:.0f} K"


@app.shown("penstock models sign ./tiny-new --key signing.pem")
def sign(
    model: Model,
    key_file: Annotated[
        Path,
        typer.Option(
            "--key", metavar="FILE", help="A private ed25519 key (PEM), as `openssl genpkey -algorithm ed25519` makes."
        ),
    ],
) -> None:
    """Sign a model's folder for workers that demand it (`penstock worker --require-signature`). Prints the public key.

    The signature covers the SHA-256 of every file, by the folder's manifest.json; a folder without one gets one, and so
    another version. Other keys' signatures stay.
    """
    check_signing()
    from workers.library.signatures import sign

    (resolved,) = find_models([model])
    typer.echo(sign(resolved.folder, key_file))


@app.shown("penstock models verify tiny-v2 --require-signature signing.pub")
def verify(model: Model, require_signature: RequireSignature = None) -> None:
    """Compare a model's files with its manifest.json, and check its signature. Exit status 2: they differ.

    Of s3://BUCKET/PREFIX/NAME/VERSION the files in the bucket are read, and nothing is written here.
    """
    from workers.library import verify
    from workers.library.local_models import MANIFEST
    from workers.library.reference import S3

    if model.startswith(S3):
        from workers.library import bucket

        if require_signature:
            check_signing()
        stored = bucket.check(bucket.BucketModel.parse(model), require_signature or ())
        signed = ", which is signed" if require_signature else ""
        size = _megabytes(stored.size)
        say(f"{stored.files} files of {stored.model.bucket} are as its {MANIFEST} says ({size}){signed}")
        return
    (resolved,) = find_models([model])
    folder = resolved.folder
    if require_signature:
        check_signing()
        from workers.library.signatures import check_signature

        say(f"{folder} is signed by {check_signature(folder, require_signature)}")
    if not (folder / MANIFEST).is_file():
        raise Failure(f"{folder} has no {MANIFEST}: nothing says what its files should be")
    verify(folder, say)


@app.shown("penstock models publish tiny --broker redis://10.0.0.5:6379/0", status=OPERATOR_STATUS)
def publish(
    references: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL, autocompletion=complete_model)],
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
    """Write models' cards and tokenizers into the store: tasks for them are accepted and queued, with no worker up.

    New tasks of a published model go to the published version, until another one is published or `penstock rollout`
    ends. Workers of other versions take up only what was queued for these. On SQS, missing queues are made.
    """
    from workers.cli.servers import addresses
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


@app.shown("penstock models rm tiny-v2 --broker redis://10.0.0.5:6379/0", "rm", status=OPERATOR_STATUS)
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Models in the store, or NAME@VERSION, or s3://BUCKET/PREFIX/NAME/VERSION."
        ),
    ],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove models' cards from the store, so that clients know them no more. No file on this machine is removed.

    A model that workers serve, an autoscaler scales, or aliases name, is refused: end these first. Tasks that wait for
    it stay until it is served again. NAME@VERSION removes a version that nothing uses. s3://... removes the files of a
    version in a bucket, unless a model in the store uses the version.
    """
    from producers.admin import routes
    from producers.store.access.audit import Change, append, operator
    from producers.store.fleet.routing import RoutingError
    from workers.cli.servers import addresses, system
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

    while True:
        models = await look(client)
        model = models.get(name)
        if model is None:
            raise Failure(f"there is no model {name!r}; there are {', '.join(sorted(models)) or 'none'}")
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


@rollout_app.shown("penstock rollout tiny=./tiny-new --broker redis://10.0.0.5:6379/0", "now")
def rollout(
    model: Annotated[
        str | None, typer.Argument(metavar="NAME=MODEL", help=MODEL, autocompletion=complete_model)
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ready workers of the new version to wait for. Unset: as many as the old one has, and at least 1.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds that the new workers may take to become ready; the old version's tasks may take longer.",
        ),
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
    """Replace a model's version by another one in one step, without a failed request; `now` may be left out.

    New workers come up first: `penstock up` starts them, and an autoscaler with a pool of the new version; elsewhere
    deploy them now. Once they are ready, new tasks go to the new version. Workers of the old version finish what was
    queued for it, which is waited for; an autoscaler may keep them for longer. If this command is ended, run it again:
    it goes on. Exit status 1: the new workers did not become ready, and nothing was switched.
    """
    if model is None and not status:
        raise Failure("name the model and its new version: penstock rollout NAME=FOLDER")
    if status and cancel:
        raise Failure("give --status or --cancel, not both")

    import asyncio

    from workers.connect import connect

    with _refusals():
        urls = _checked(broker, store, data_dir)
        with connect(urls[1]) as client:
            if status or cancel:
                for record in _rollouts(client, model) if status else [_cancelled(client, str(model))]:
                    _print_rollout(record, as_json)
                return
            ended = asyncio.run(_carried(urls, client, _new_version(str(model), urls), workers, timeout, drain_old))
    _print_rollout(ended, as_json)
    if ended.phase != "done":
        raise Failure(f"the rollout is {ended.phase}: {ended.reason}", Exit.TASK_FAILED)


def _new_version(reference: str, urls: tuple[str, str]) -> New:
    """The new version, checked. On SQS its queues are made."""
    from producers.contract import keys
    from producers.contract.levels import beside
    from workers.connect import check_queues
    from workers.library.reference import described, split_reference, version_of
    from workers.rollout import New

    (model,) = find_models([reference])
    with needs("gateway"):
        url = split_reference(reference)[1] if version_of(reference) else ""
        new = New(model, *described(model, note), url)
    check_queues(*urls, beside(keys.version_queue(model.name, new.version)), make=True)
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


def _rollouts(store: Redis, model: str | None) -> list[Rollout]:
    from producers.store.fleet import rollouts
    from workers.library import name_of

    if model is None:
        return rollouts.all_of(store)
    record = rollouts.read(store, name_of(model))
    if record is None:
        raise Failure(f"{name_of(model)} was never rolled out")
    return [record]


def _cancelled(store: Redis, model: str) -> Rollout:
    from workers.library import name_of
    from workers.rollout import cancel

    return cancel(store, name_of(model))


def _print_rollout(record: Rollout, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(record)))
        return
    when = datetime.fromtimestamp(record.changed, UTC).isoformat(timespec="seconds")
    reason = f": {record.reason}" if record.reason else ""
    typer.echo(f"{record.model}  {record.before} -> {record.version}  {record.phase} since {when}{reason}")


def _checked(broker: str | None, store: str | None, data_dir: Path | None) -> tuple[str, str]:
    from workers.cli.servers import addresses
    from workers.connect import check_servers

    urls = addresses(broker, store, data_dir)
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
