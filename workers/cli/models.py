"""`penstock models`: lists, shows, pulls and publishes models. `penstock up` publishes its own by `publish_own`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, PROCESS_STATUS, Exit, Failure, needs, refusing
from workers.cli.options import DEFAULT_URL, MODEL, AnyBroker, Json, Model, Store, complete_model, find_models
from workers.cli.terminal import aligned, note, say

if TYPE_CHECKING:
    from engine.text import ModelCard
    from workers.library import ResolvedModel

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


app = Commands("Models", PROCESS_STATUS, "models", "List, show, pull and publish models.")


@app.shown("penstock models ls --json", "ls")
def listed(
    as_json: JsonOutput = False,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_URL", help=f"A gateway whose models are listed, too. Unset: {DEFAULT_URL}, if it answers."
        ),
    ] = None,
) -> None:
    """List bundled and pulled models, and those that a running gateway serves."""
    rows = [*_here(), *_served(url)]
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


def _shown(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


@app.shown("penstock models show tiny")
def show(model: Model, as_json: JsonOutput = False) -> None:
    """Show a model's architecture, size, context length, chat template and files. Pulls a hub's model first."""
    folder, found = _card(model)
    from engine.text.config import Config, read_config

    config = Config.of_model(read_config(folder))
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if _shown(path)}
    shape = {name: config.get(name) for name in SHAPE if name in config}
    about = {"dtype": config.get("dtype") or config.get("torch_dtype")}
    about |= {"quantization": config.get("quantization_config"), "shape": shape, "files": files}
    if as_json:
        said = {**json.loads(found.to_json()), "folder": str(folder), **about, "tokenizer_files": found.files}
        typer.echo(json.dumps(said))
        return
    described = _described(found, folder, about)
    for line in aligned([item for item in described.items() if item[1] is not None], 2):
        say(line)
    typer.echo(f"files: {_megabytes(sum(files.values()))}")
    for name, size in files.items():
        say(f"  {size:>14,}  {name}")


def _described(found: ModelCard, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a model, by name; it may hold any text from the model's files."""
    from engine.text.config import packed_bits

    section, quantised = about["quantization"], None
    if isinstance(section, dict):
        bits = packed_bits({"quantization_config": section})
        quantised = f"{section.get('quant_method')}, {f'{bits} bits' if bits < 32 else '8-bit floats'}"
    return {
        "name": found.name,
        "version": found.version,
        "folder": str(folder),
        "architecture": found.architecture,
        "parameters": f"{found.parameters:,}",
        "stored as": about["dtype"],
        "quantised": quantised,
        "context": f"{found.context_length:,} tokens",
        **{SHAPE[name]: f"{value:,}" if isinstance(value, int) else value for name, value in about["shape"].items()},
        "chat template": "yes" if "chat" in found.capabilities else "none: the model continues texts only",
        "defaults": ", ".join(f"{name} {value:g}" for name, value in found.defaults.items()) or "none",
    }


@app.shown("penstock models pull hf://Qwen/Qwen3-0.6B@main --name qwen3")
def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="hf://OWNER/NAME[@REVISION], or a folder.")],
    name: Annotated[
        str | None, typer.Option(help="The model's name here. Unset: the repository's or folder's.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Copy a model from a hub or a folder into the local model folder, with checksums.

    The local model folder is PENSTOCK_MODELS, else penstock/models in the user's data folder.
    """
    from workers.library import LocalModels, find_model
    from workers.library.reference import HUB, bundled, checked_name, name_of

    called = checked_name(name or name_of(source), source)
    if called in bundled():
        raise Failure(f"{called!r} is the name of a bundled model; give another with --name")
    if source.startswith(HUB):
        with needs("worker"):
            folder = find_model(f"{called}={source}", note).folder
    elif Path(source).is_dir():
        folder = LocalModels.default().copy(called, Path(source)).folder
    else:
        raise Failure(f"{source!r} is not a folder; a hub's model is written hf://OWNER/NAME")
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
    (found,) = find_models([model])
    try:
        return found.folder, ModelCard.from_folder(found.folder, found.name)
    except ModelError as error:
        raise Failure(f"{found.folder} holds no servable model: {error}") from error


def _here() -> Iterator[dict[str, Any]]:
    """Rows of the models on this machine. It reads no tokenizer, since large ones take seconds."""
    from engine.errors import ModelError
    from workers.library import LocalModels
    from workers.library.reference import bundled

    with needs("gateway"):
        from engine.text import ModelCard, TemplateSource
        from engine.text.checkpoint import count_parameters, model_version
        from engine.text.config import Config, read_config
    places = [(name, "bundled", folder) for name, folder in bundled().items()]
    places += [
        (one.name, "pulled", one.folder) for one in sorted(LocalModels.default().all(), key=lambda one: one.name)
    ]
    for name, where, folder in places:
        try:
            chat = TemplateSource.from_bytes(ModelCard.tokenizer_files(folder)) is not None
            yield {
                "name": name,
                "where": where,
                "version": model_version(folder),
                "parameters": count_parameters(folder),
                "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
                "context_length": Config.of_model(read_config(folder)).context_length(),
                "capabilities": ["generate", "chat"] if chat else ["generate"],
                "folder": str(folder),
            }
        except ModelError as error:
            typer.echo(f"penstock: {folder} holds no servable model: {error}", err=True)


def _served(url: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a gateway's models; none if no gateway was named and the one at the default URL does not list them."""
    from workers.cli.client import Gateway, Refused, Unreachable

    gateway = Gateway(url or DEFAULT_URL)
    try:
        models = gateway.models()
    except (Unreachable, Refused) as failure:
        if url is not None:
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


@app.shown("penstock models publish tiny --broker redis://10.0.0.5:6379/0", status=OPERATOR_STATUS)
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


def publish_to(broker: str, store: str, found: ResolvedModel, over: str | None = None) -> dict[str, str | None]:
    """Check the servers, make queues where these do not make themselves, and publish. Raises Refused, and Failure.

    `over`: as of `cards.publish`.
    """
    with needs("gateway"):
        from producers.connection.connect import shown
        from producers.connection.trouble import error_text
        from producers.contract import keys
        from producers.contract.levels import beside
        from producers.store.fleet import cards
        from workers.connect import LOST, check_queues, check_servers, connect
        from workers.library.reference import described

        card, files = described(found, note)
    queues = [*beside(keys.version_queue(found.name, card["version"])), keys.model_queue(found.name)]
    check_servers(broker, store, queues=())
    check_queues(broker, store, queues, make=True)  # first: a published model's tasks are sent there
    try:
        with connect(store) as client:
            before = cards.read(client, found.name)
            cards.publish(client, card, files, over)
    except LOST as error:
        raise Failure(f"the store at {shown(store)} does not take it: {error_text(error)}", Exit.UNREACHABLE) from error
    return {"name": found.name, "version": card["version"], "before": before and before["version"]}


def publish_own(broker: str, store: str, found: ResolvedModel) -> str:
    """Publish a model of `penstock up`, but for one whose rolling update is under way, from or to this version.

    An `up` that ends in the middle of an update is started again with the folder that it had. It must neither turn the
    update back nor switch it: the other version's tasks would wait for workers that nobody starts. Returns what the
    operator should know of it, or "". Raises Failure, and Refused.
    """
    from engine.text.checkpoint import model_version
    from producers.connection.trouble import error_text
    from producers.store.fleet import cards, rollouts
    from workers.connect import LOST, connect

    own = model_version(found.folder)
    try:
        with connect(store) as client:
            rollout, card = rollouts.read(client, found.name), cards.read(client, found.name)
    except LOST as error:
        raise Failure(f"the store does not answer: {error_text(error)}", Exit.UNREACHABLE) from error
    standing = None if card is None else str(card["version"])
    under_way = rollout is not None and rollout.phase in rollouts.UNDER_WAY
    if rollout is not None and under_way and {own, standing} == {rollout.before, rollout.version}:
        return f"new tasks of {found.name} go to version {standing}: its rollout goes on with `penstock rollout`"
    publish_to(broker, store, found, over=standing)
    if standing in (None, own):
        return ""
    return f"new tasks of {found.name} go to version {own} from now on; until now, they went to version {standing}"
