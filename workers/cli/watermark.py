"""`penstock watermark`: makes keys of watermarks, and finds out whether a text was written with one. Uses no server."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import Exit, Failure, needs, refusing, touching
from workers.cli.options import Json, ModelOption, find_models

#: The largest text (bytes), and the p below which it counts as marked.
MAX_BYTES: Final = 16 << 20
THRESHOLD: Final = 1e-4
STATUS: Final = "Exit status: 0 done, detect: it is marked; 1 it is not marked; 2 refused, 130 interrupted."
Keys = Annotated[Path, typer.Option(dir_okay=False, metavar="FILE", help="The file of keys, as --watermark-keys has.")]

app = Commands("Models", STATUS, "watermark", "Keys of watermarks, and texts that may have one.")


@app.shown("penstock watermark key news --keys watermarks.toml")
def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new key's name.")],
    keys: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, metavar="FILE", help="Add it to this file, made unless it is there. Unset: print it."
        ),
    ] = None,
) -> None:
    """Make a key with a secret drawn at random. Who has it finds, and could imitate, its watermark."""
    from engine.declared import WatermarkName
    from engine.errors import EngineError, RequestError
    from engine.watermark import read_watermarks, written

    with refusing(RequestError):
        if WatermarkName().check("NAME", name) is False:
            raise Failure(f"NAME is {name}, by which requests ask for no watermark; choose another one")
    text = written(name, secrets.token_hex(32))
    if keys is None:
        typer.echo(text, nl=False)
        return
    with touching(keys, "write"):
        there = keys.exists() and keys.stat().st_size > 0
        if there:
            with refusing(EngineError):
                if name in read_watermarks(keys).keys:
                    raise Failure(
                        f"{keys} has a key {name} already, by which marked texts are found: choose another name"
                    )
        # At the end, so that the file is never without the keys that it has.
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a") as file:
            file.write(f"\n{text}" if there else text)
            file.flush()
            os.fsync(file.fileno())
    typer.echo(f"{name} is in {keys}")


@app.shown("penstock watermark detect answer.txt --keys watermarks.toml --key news --model smollm2")
def detect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The text, in UTF-8; - reads standard input.")],
    model: ModelOption,
    keys: Keys,
    name: Annotated[str, typer.Option("--key", metavar="NAME", help="The name of the key.")],
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The p below which the text counts as marked.")
    ] = THRESHOLD,
    as_json: Json = False,
) -> None:
    """Tell whether a text was written by MODEL with this watermark: the exit status is 0 if so, else 1.

    p is the probability that a text without the watermark has as many green tokens. The model's tokenizer is needed,
    not its weights. Some 25 tokens are the least that can be told.
    """
    text = _text(file)
    with needs("worker"):
        from engine import EngineError
        from engine.sampling.watermark import detect as judge
        from engine.text import Tokenizer
        from engine.watermark import read_watermarks
    with refusing(EngineError):
        known = read_watermarks(keys).keys
        if name not in known:
            raise Failure(f"{keys} has no key {name}; it has {', '.join(sorted(known))}")
        (resolved,) = find_models([model])
        tokens = Tokenizer.from_folder(resolved.folder).encode(text, add_special_tokens=False)
    found = judge(known[name], tokens)
    marked = found.p < threshold
    if as_json:
        typer.echo(json.dumps({"marked": marked, **asdict(found)}))
    else:
        typer.echo(
            f"{'marked' if marked else 'not marked'}: {found.green} of {found.judged} tokens are green, "
            f"{known[name].gamma:.0%} by chance; z {found.z:.2f}, p {found.p:.2g}"
        )
    if not marked:
        raise typer.Exit(Exit.TASK_FAILED)


def _text(file: str) -> str:
    """The text of a file, or of standard input. Raises Failure."""
    if file == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        with touching(Path(file), "read"), Path(file).open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Failure(f"{file} has more than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Failure(f"{file} is not UTF-8: bad byte at {error.start}") from None
