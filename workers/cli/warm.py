"""`penstock warm`: compiles a model's kernels before it is served, for this machine's GPU or for another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, needs
from workers.cli.option_groups import ENGINE, takes
from workers.cli.options import Model, find_models

if TYPE_CHECKING:
    from engine.execution.warm import Warmed


app = Commands("Models", PROCESS_STATUS)


#: Settings that decide which kernels a model has.
SETTINGS: Final = ("dtype", "quantization", "kv_cache_dtype", "deterministic")


@app.shown("penstock warm hf://meta-llama/Llama-3.1-8B-Instruct --arch sm_90 --cache-dir /opt/penstock/triton")
@takes(engine=[ENGINE[name] for name in SETTINGS])
def warm(
    model: Model,
    *,
    arch: Annotated[
        str | None, typer.Option(help="The GPU's architecture, such as sm_90 (H100, H200). Unset: this machine's GPU.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(envvar="TRITON_CACHE_DIR", help="Folder for the kernels. Unset: Triton's own cache.")
    ] = None,
    engine: dict[str, Any],
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=4096, help="The same as the worker's --max-num-seqs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a model's GPU kernels ahead of time, so that a worker starts without compiling.

    Needs no GPU, and weights only of a quantised checkpoint.
    """

    with needs("worker"):
        from engine.errors import EngineError
        from engine.execution.warm import architecture_here, default_cache
        from engine.execution.warm import warm as compile_all
    (found,) = find_models([model])
    try:
        made = compile_all(
            found.folder, arch or architecture_here(), cache_dir or default_cache(), max_num_seqs=max_num_seqs, **engine
        )
    except EngineError as error:
        raise Failure(f"cannot compile the kernels of {model}: {error}") from error
    except OSError as error:
        raise Failure(f"cannot write {cache_dir or default_cache()}: {error}") from error
    if as_json:
        typer.echo(json.dumps(_data(made)))
    else:
        _report(found.name, made)
    if not made.verified:
        raise Failure(
            "a second look did not find all kernels in the cache: another process is changing it", Exit.TASK_FAILED
        )


def _data(made: Warmed) -> dict[str, object]:
    kernels = [
        {
            "kernel": one.kernel,
            "key": one.key,
            "cached": one.cached,
            "seconds": round(one.seconds, 3),
            "bytes": one.binary.stat().st_size,
            "shared_bytes": one.shared,
        }
        for one in made.builds
    ]
    return {
        "arch": made.arch,
        "cache": str(made.cache),
        "dtype": made.dtype,
        "seconds": round(made.seconds, 3),
        "verified": made.verified,
        "kernels": kernels,
    }


def _report(name: str, made: Warmed) -> None:
    names = list(dict.fromkeys(one.kernel for one in made.builds))
    width = max(map(len, names))
    for kernel in names:
        these = [one for one in made.builds if one.kernel == kernel]
        size = sum(one.binary.stat().st_size for one in these) / 1e3
        built = [one for one in these if not one.cached]
        spent = f"built {len(built)} in {sum(one.seconds for one in built):.1f} s" if built else "already in the cache"
        typer.echo(f"{kernel.ljust(width)}  {len(these)} of it, {size:,.0f} kB, {spent}")
    total = sum(one.binary.stat().st_size for one in made.builds) / 1e6
    typer.echo(
        f"{name} in {made.dtype} on {made.arch}: {len(made.builds)} kernels, {total:.1f} MB, in {made.seconds:.1f} s\n"
        f"Workers find them with TRITON_CACHE_DIR={made.cache}, at this very path."
    )
