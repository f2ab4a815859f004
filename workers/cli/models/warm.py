"""`penstock warm`: a model's kernels compiled before it is served, for this machine's GPU or for one elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.exits import PROCESS_STATUS, Exit, Failure, needs
from workers.cli.models.references import MODEL, complete_model, find_models
from workers.cli.options import Deterministic, DType, KvCacheDType, Quantization

if TYPE_CHECKING:
    from engine.execution.warm import Warmed


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    example = "Example: penstock warm hf://meta-llama/Llama-3.1-8B-Instruct --arch sm_90 --cache /opt/penstock/triton"
    app.command(epilog=f"{example}\n\n{PROCESS_STATUS}", rich_help_panel="Models")(warm)


def warm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model)],
    arch: Annotated[
        str | None, typer.Option(help="The GPU's architecture, as in sm_90 (H100, H200); unset: that of the GPU here.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(envvar="TRITON_CACHE_DIR", help="Where the kernels go; unset: Triton's own folder.")
    ] = None,
    dtype: DType = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = None,
    deterministic: Deterministic = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096, help="Sequences in one batch, as the worker's.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a model's GPU kernels ahead, so that a worker starts without a compiler. Takes no GPU and no weights,
    but those of a checkpoint that is quantised."""

    with needs("worker"):
        from engine.errors import EngineError
        from engine.execution.warm import architecture_here, default_cache
        from engine.execution.warm import warm as compile_all
    if quantization not in (None, "none", "fp8"):
        raise Failure(f"--quantization is {quantization!r}; it must be none or fp8")
    if kv_cache_dtype not in (None, "auto", "int8", "fp8"):
        raise Failure(f"--kv-cache-dtype is {kv_cache_dtype!r}; it must be auto, int8 or fp8")
    (found,) = find_models([model], lambda line: typer.echo(line, err=True))
    try:
        made = compile_all(
            found.folder,
            arch or architecture_here(),
            cache or default_cache(),
            dtype=dtype or "auto",
            quantization=quantization or "none",
            kv_cache_dtype=kv_cache_dtype or "auto",
            deterministic=deterministic,
            max_num_seqs=max_num_seqs,
        )
    except EngineError as error:
        raise Failure(f"cannot compile the kernels of {model}: {error}") from error
    except OSError as error:
        raise Failure(f"cannot write {cache or default_cache()}: {error}") from error
    if as_json:
        typer.echo(json.dumps(_data(made)))
    else:
        _report(found.name, made)
    if not made.verified:
        raise Failure(
            "a second look did not find all of it in the cache: it is being changed meanwhile", Exit.TASK_FAILED
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
        spent = f"built {len(built)} in {sum(one.seconds for one in built):.1f} s" if built else "in the cache already"
        typer.echo(f"{kernel.ljust(width)}  {len(these)} of it, {size:,.0f} kB, {spent}")
    total = sum(one.binary.stat().st_size for one in made.builds) / 1e6
    typer.echo(
        f"{name} in {made.dtype} on {made.arch}: {len(made.builds)} kernels, {total:.1f} MB, in {made.seconds:.1f} s\n"
        f"They are found where TRITON_CACHE_DIR={made.cache}, at this very path."
    )
