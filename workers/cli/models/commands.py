"""`penstock models`: lists, shows, pulls and publishes models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, PROCESS_STATUS, Failure, needs
from workers.cli.models.publish import publish
from workers.cli.models.references import Model, find_models
from workers.cli.options import DEFAULT_URL
from workers.cli.terminal.show import aligned, note, say

if TYPE_CHECKING:
    from engine.text import ModelCard

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
    as_json: Json = False,
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
def show(model: Model, as_json: Json = False) -> None:
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
    as_json: Json = False,
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


app.shown("penstock models publish tiny --broker redis://10.0.0.5:6379/0", status=OPERATOR_STATUS)(publish)
