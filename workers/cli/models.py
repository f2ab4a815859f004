"""`penstock models ls`, `show`, `pull`, `card`, `sign` and `verify`: models on this machine, a hub or in a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, check_signing, needs, refusing
from workers.cli.options import (
    DEFAULT_URL,
    JsonOutput,
    Model,
    RequireSignature,
    Url,
    find_models,
    is_set,
)
from workers.cli.terminal import aligned, note, say

if TYPE_CHECKING:
    from engine.text import ModelCard
    from producers.store.blobs.bucket import Bucket

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
app = Commands(
    "Models", OPERATOR_STATUS, "models", "Models: their files, their versions in the store or a bucket, where tasks go."
)


@app.shown("penstock models ls --json", "ls")
def listed(
    context: typer.Context,
    bucket_url: Annotated[
        str | None, typer.Argument(metavar="s3://BUCKET/PREFIX", help="List the versions in a bucket instead.")
    ] = None,
    as_json: JsonOutput = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List bundled and pulled models, and those that a gateway serves: of the default URL only if it answers.

    Or the versions in a bucket: one without its manifest is incomplete, and nobody pulls it.
    """
    if bucket_url is not None:
        _list_bucket(bucket_url, as_json)
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


def _list_bucket(bucket_url: str, as_json: bool) -> None:
    from workers.library import bucket

    table = [("name", "version", "files", "size", "written", "")]
    versions = bucket.stored(bucket_at(bucket_url))
    if not versions:
        note(f"there are no versions of models in {bucket_url.partition('?')[0]}")
        return
    for stored in versions:
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


def bucket_at(bucket_url: str) -> Bucket:
    """The bucket that a URL names. Raises Failure."""
    from producers.store.blobs.bucket import read

    with refusing(ValueError):
        return read(bucket_url)


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
    """The source of a model, and its declared licence; None where nothing says so."""
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
            "smollm2; NAME=SOURCE stands for --name NAME.",
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
    from workers.library.reference import HUB, PACKAGED, S3, bundled, checked_name, name_of, split_reference

    prefixed, source = split_reference(source)
    name = name or prefixed or None
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

    A pulled model has a manifest; a bundled one, or a folder of yours, may have none. Of
    s3://BUCKET/PREFIX/NAME/VERSION the files in the bucket are read, and nothing is written here.
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
        raise Failure(
            f"{folder} has no {MANIFEST}: nothing says what its files should be. `penstock models pull` makes a "
            "version with one, `penstock models sign` writes one there"
        )
    verify(folder, say)
