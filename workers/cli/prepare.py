"""`penstock quantize` and `penstock warm`: what prepares a model before it is served.

quantize writes a smaller checkpoint of a model and reports how its output changed. The folder is built under a
temporary name and renamed when it is complete; a killed run's leftovers are removed. warm compiles a model's kernels,
for this machine's GPU or for another.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engine.errors import ErrorText, message_of
from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, needs
from workers.cli.options import ENGINE, JsonOutput, Model, find_models, takes
from workers.cli.terminal import aligned
from workers.progress import Progress

if TYPE_CHECKING:
    from engine.execution.warm import Warmed
    from engine.quant.make import Comparison, Recipe, VectorComparison

QUANTIZE_STATUS: Final = "Exit status: 0 done, 1 it failed, 2 refused, 130 interrupted."
#: Share of the user's own text, at its end, that judges the result; the rest calibrates.
_HELD_OUT: Final = 0.1
_REPORT: Final = "quantization_report.json"
_METHODS: Final = ("gptq", "nearest")
#: Characters taken from each file of the default text: many files are better than a few long ones.
_OF_A_FILE: Final = 8000
#: Settings that decide which kernels a model has.
KERNEL_SETTINGS: Final = ("dtype", "quantization", "kv_cache_dtype", "deterministic")

app = Commands("Models", QUANTIZE_STATUS)


@dataclass(frozen=True, slots=True)
class Texts:
    calibration: list[str]
    held_out: list[str]
    source: str


@app.shown("penstock quantize tiny-v2 ./tiny-v2-int4 --bits 4")
@takes(engine=(ENGINE["device"], ENGINE["threads"]))
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist yet.")],
    *,
    bits: Annotated[int, typer.Option(help="Bits of each weight: 8 or 4.")] = 8,
    method: Annotated[
        str | None,
        typer.Option(
            help="gptq: round so that outputs on the calibration text change least. nearest: round each weight. Unset: "
            "gptq; of encoders nearest, which is all that they have."
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale: 128, 64 or 32. Unset: all with 8 bits, of encoders 64; with 4 bits the "
            "most that fit, and fewer in narrow models."
        ),
    ] = None,
    head_bits: Annotated[
        int, typer.Option(help="Bits of the output head and of an embedding tied to it: 16 (unchanged) or 8.")
    ] = 16,
    down_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the matrices that lead back from the feed-forward blocks, which lose most by 4: 4 or 8. "
            "Unset: --bits."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File with text like what the model will read; its end is held out. Unset: Python's library and the "
            "prose of its documentation."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=256, help="Most calibration tokens to use.")] = 16384,
    evaluation_tokens: Annotated[int, typer.Option(min=256, help="Most held-out tokens to judge with.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    engine: dict[str, Any],
) -> None:
    """Write a copy of a model with 8-bit or 4-bit weights, and report how much its output changed.

    Makes a folder that this and other engines serve: safetensors in the "pack-quantized" format of compressed-tensors,
    with a manifest.
    """

    if bits not in (4, 8):
        raise Failure(f"--bits is {bits}; it must be 8 or 4")
    if method not in (None, *_METHODS):
        raise Failure(f"--method is {method!r}; it must be one of {', '.join(_METHODS)}")
    if head_bits not in (16, 8):
        raise Failure(f"--head-bits is {head_bits}; it must be 16 (unchanged) or 8")
    if down_bits not in (None, 4, 8):
        raise Failure(f"--down-bits is {down_bits}; it must be 4 or 8")
    if down_bits == 4 and bits == 8:
        raise Failure("--down-bits 4 with --bits 8: these matrices need more bits than others, not fewer")
    with needs("worker"):
        from engine.errors import EngineError
        from engine.models.encoders import ENCODERS
        from engine.quant.make import Recipe
        from engine.quant.make.model import GROUPS
        from engine.text.config import architectures, read_config
        from workers.library import verify
    if group_size is not None and group_size not in GROUPS:
        raise Failure(f"--group-size is {group_size}; it must be one of {', '.join(map(str, GROUPS))}")
    if os.path.lexists(out):
        raise Failure(f"{out} exists already; name a new folder")
    texts = _texts(calibration)
    (resolved,) = find_models([model])
    try:
        verify(resolved.folder)
        down = down_bits if down_bits != bits else None
        encoder = not ENCODERS.keys().isdisjoint(architectures(read_config(resolved.folder)))
        options = {"--bits": bits != 8, "--method": method == "gptq", "--head-bits": head_bits == 8}
        options["--down-bits"] = down_bits is not None
        if encoder and (odd := next((name for name, given in options.items() if given), None)):
            raise Failure(f"{odd}: {resolved.name} is an encoder; its matrices get 8 bits, rounded to nearest")
        method = method or ("nearest" if encoder else "gptq")
        recipe = Recipe(bits, method, group_size, 8 if head_bits == 8 else None, down)  # type: ignore[arg-type]  # one of _METHODS
        with Progress(quiet=as_json) as progress, unfinished(out, progress.note) as work:
            counts = (calibration_tokens, evaluation_tokens)
            report = _make(resolved.folder, work, recipe, texts, counts, progress.show, encoder=encoder, **engine)
    except EngineError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"cannot write {out}: {error}") from error
    report = {"folder": str(out), **report}
    typer.echo(json.dumps(report) if as_json else _table(report))


def _texts(calibration: Path | None) -> Texts:
    if calibration is None:
        from workers.library.corpus import documentation, standard_library

        try:
            kinds = standard_library(), documentation()
        except FileNotFoundError as error:
            raise Failure(f"{error}; or give a text with --calibration") from error
        for files in kinds:
            random.Random(0).shuffle(files)  # noqa: S311  # data, not secrets
        # In turns, so that whatever part is used has as much prose as code.
        turns = [file for pair in zip_longest(*kinds) for file in pair if file is not None]
        return Texts(
            [file.text[:_OF_A_FILE] for file in turns if not file.held_out],
            [file.text[:_OF_A_FILE] for file in turns if file.held_out],
            "Python's standard library and documentation",
        )
    try:
        text = calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"--calibration: {calibration} cannot be read as UTF-8 text: {error}") from error
    border = int(len(text) * (1 - _HELD_OUT))
    return Texts([text[:border]], [text[border:]], str(calibration))


def _make(
    folder: Path,
    work: Path,
    recipe: Recipe,
    texts: Texts,
    tokens: tuple[int, int],
    show: Callable[[str], None],
    *,
    encoder: bool,
    device: str | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    import torch

    from engine.engine import device_named
    from engine.execution.threads import threads_for
    from engine.quant.make import compare, compare_encoders, quantise, quantise_encoder, windows
    from engine.quant.make import model as make
    from engine.text import ModelCard, Tokenizer
    from engine.text.config import Config, read_config
    from engine.text.pooling import text_length
    from workers.library.local_models import write_manifest

    show(f"reading {folder.name} and {texts.source}")
    torch.set_num_threads(threads_for(threads, torch.get_num_threads()))
    torch_device = device_named(device or "auto")
    settings = read_config(folder)
    context = text_length(settings) if encoder else Config.of_model(settings).context_length()
    tokenizer = Tokenizer(ModelCard.tokenizer_files(folder))
    learnt, judged = (
        windows(tokenizer, part, count, context)
        for part, count in zip((texts.calibration, texts.held_out), tokens, strict=True)
    )
    if not learnt or not judged:
        raise Failure(f"{texts.source} is too short to calibrate and judge with: give a text of some pages")
    comparison: Comparison | VectorComparison
    if encoder:
        recipe = quantise_encoder(folder, work, recipe, torch_device)
    else:
        recipe = quantise(folder, work, recipe, learnt, torch_device, lambda part: show(f"{part} is done"))
    _copy_rest(folder, work)
    show("comparing the outputs of both models")
    if encoder:
        comparison = compare_encoders(make.encoder(folder, torch_device), make.encoder(work, torch_device), judged)
    else:
        comparison = compare(make.decoder(folder, torch_device), make.decoder(work, torch_device), judged)
    report = _report(folder, work, recipe, texts, sum(map(len, learnt)), comparison)
    (work / _REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _say_in_readme(work / "README.md", report)
    write_manifest(work)
    return report


def _copy_rest(folder: Path, work: Path) -> None:
    """Copy tokenizer, chat template and settings unchanged."""
    from engine.text.files import read_files
    from workers.library.local_models import INDEX, KEPT, MANIFEST, MODULE_FILE, files_of, own_file

    if not (folder / "config.json").exists():  # a GGUF file has them within
        for name, content in read_files(folder).items():
            if name != "config.json":
                (work / name).write_bytes(content)
    if not folder.is_dir():
        return
    for name in files_of(folder):
        if MODULE_FILE.fullmatch(name) or (KEPT.fullmatch(name) and name not in ("config.json", MANIFEST, INDEX)):
            (work / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(own_file(folder, name), work / name)


def _say_in_readme(path: Path, report: dict[str, Any]) -> None:
    """Write the README: the report first, then the original model's text."""
    whole = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # Fields for a hub's own use come first, if there are any.
    fields = re.match(r"---\n.*?\n---\n", whole, re.DOTALL)
    head = fields[0] if fields else ""
    body = whole[len(head) :].lstrip("\n")
    paragraphs = [f"Quantised by `penstock quantize`; measures are in [{_REPORT}]({_REPORT})."]
    paragraphs += ["The text below describes the original model."] if body else []
    table = [f"| {name} | {value} |" for name, value in _lines(report).items()]
    text = "\n".join([*paragraphs, "", "| | |", "| --- | --- |", *table])
    path.write_text("\n".join(filter(None, [head, text + "\n", body])), encoding="utf-8")


def _report(
    folder: Path, work: Path, recipe: Recipe, texts: Texts, calibrated: int, comparison: Comparison | VectorComparison
) -> dict[str, Any]:
    from engine.text.checkpoint import model_version
    from engine.text.gguf import model_name, parts_of

    def size(where: Path) -> int:
        paths = [*where.glob("*.safetensors"), *where.glob("*.gguf")] if where.is_dir() else parts_of(where)
        return sum(path.stat().st_size for path in paths)

    return {
        "of": {"name": model_name(folder), "version": model_version(folder), "bytes": size(folder)},
        "bytes": size(work),
        "bits": recipe.bits,
        "method": recipe.method,
        "group_size": recipe.group,
        "head_bits": recipe.head,
        "down_bits": recipe.down,
        "text": texts.source,
        "calibration_tokens": calibrated if recipe.method == "gptq" else 0,
        **comparison.to_json(),
    }


def _lines(report: dict[str, Any]) -> dict[str, str]:
    group = "one scale for each output" if report["group_size"] is None else f"groups of {report['group_size']}"
    return {
        "made of": f"{report['of']['name']} {report['of']['version']}",
        "weights": f"{report['bits']} bits, {group}, {report['method']}",
        **({} if report["down_bits"] is None else {"down projections": f"{report['down_bits']} bits"}),
        "output head": "as it was" if report["head_bits"] is None else f"{report['head_bits']} bits",
        "size": f"{report['bytes'] / 1e6:,.1f} MB, was {report['of']['bytes'] / 1e6:,.1f} MB",
        "text": f"{report['text']}: {report['calibration_tokens']:,} tokens calibrated, {report['tokens']:,} judge",
        **({"vectors": _vectors(report)} if "cosine" in report else _next_tokens(report)),
    }


def _vectors(report: dict[str, Any]) -> str:
    return f"cosine to the original's {report['cosine']:.5f} on average, {report['cosine_least']:.5f} at least"


def _next_tokens(report: dict[str, Any]) -> dict[str, str]:
    return {
        "perplexity": f"{report['perplexity']:.3f}, was {report['perplexity_before']:.3f} "
        f"({report['perplexity_increase']:+.2%})",
        "divergence": f"KL {report['divergence']:.5f} nats on average, p99 {report['divergence_p99']:.4f}",
        "agreement": f"{report['agreement']:.2%} of the likeliest tokens are the same",
    }


def _table(report: dict[str, Any]) -> str:
    return "\n".join(aligned([("folder", report["folder"]), *_lines(report).items()], 2))


@contextmanager
def unfinished(out: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Makes a folder beside `out`, and renames it to `out` at the end or removes it after an error.

    The folder is locked while its process lives. The next call for the same target removes unlocked ones, which killed
    processes left. Raises Failure if `out` was made meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for leftover in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.partial")):
        if re.fullmatch(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial", leftover.name):
            _remove_leftover(leftover, say)
    while (begun := _begun(out)) is None:
        pass  # another process removed the folder before it was locked
    work, lock = begun
    try:
        yield work
        if os.path.lexists(out):
            raise Failure(f"{out} was made meanwhile; it is left as it is")
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _begun(out: Path) -> tuple[Path, int] | None:
    """A new folder and the descriptor that locks it; None if another process removed it before it was locked."""
    work = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    work.mkdir()
    try:
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink > 0:
            return work, lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _remove_leftover(leftover: Path, say: Callable[[str], None]) -> None:
    """Remove the folder, unless its process is alive."""
    try:
        lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # removed meanwhile, or not a folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(leftover, ignore_errors=True)
        say(f"removed {leftover}, which a killed run had left")
    except BlockingIOError:
        say(f"{leftover} is being made by another process; it is left alone")
    finally:
        os.close(lock)


@app.shown(
    "penstock warm hf://meta-llama/Llama-3.1-8B-Instruct --arch sm_90 --cache-dir /opt/penstock/triton",
    status=PROCESS_STATUS,
)
@takes(engine=[ENGINE[name] for name in (*KERNEL_SETTINGS, "tensor_parallel")])
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
    as_json: JsonOutput = False,
) -> None:
    """Compile a model's GPU kernels ahead of time, so that a worker starts without compiling.

    Needs no GPU, and weights only of a quantised checkpoint.
    """

    with needs("worker"):
        from engine.errors import EngineError
        from engine.execution.warm import architecture_here, default_cache
        from engine.execution.warm import warm as compile_all
    (resolved,) = find_models([model])
    try:
        warmed = compile_all(
            resolved.folder,
            arch or architecture_here(),
            cache_dir or default_cache(),
            max_num_seqs=max_num_seqs,
            **engine,
        )
    except EngineError as error:
        raise Failure(ErrorText.of("cannot compile the kernels of {}: {}", model, message_of(error))) from error
    except OSError as error:
        raise Failure(f"cannot write {cache_dir or default_cache()}: {error}") from error
    if as_json:
        typer.echo(json.dumps(_data(warmed)))
    else:
        _print_warmed(resolved.name, warmed)
    if not warmed.verified:
        raise Failure(
            "a second look did not find all kernels in the cache: another process is changing it", Exit.TASK_FAILED
        )


def _data(warmed: Warmed) -> dict[str, object]:
    kernels = [
        {
            "kernel": build.kernel,
            "key": build.key,
            "cached": build.cached,
            "seconds": round(build.seconds, 3),
            "bytes": build.binary.stat().st_size,
            "shared_bytes": build.shared,
        }
        for build in warmed.builds
    ]
    return {
        "arch": warmed.arch,
        "cache": str(warmed.cache),
        "dtype": warmed.dtype,
        "seconds": round(warmed.seconds, 3),
        "verified": warmed.verified,
        "kernels": kernels,
    }


def _print_warmed(name: str, warmed: Warmed) -> None:
    names = list(dict.fromkeys(build.kernel for build in warmed.builds))
    width = max(map(len, names))
    for kernel in names:
        these = [build for build in warmed.builds if build.kernel == kernel]
        size = sum(build.binary.stat().st_size for build in these) / 1e3
        built = [build for build in these if not build.cached]
        spent = (
            f"built {len(built)} in {sum(build.seconds for build in built):.1f} s" if built else "already in the cache"
        )
        typer.echo(f"{kernel.ljust(width)}  {len(these)} of it, {size:,.0f} kB, {spent}")
    total = sum(build.binary.stat().st_size for build in warmed.builds) / 1e6
    typer.echo(
        f"{name} in {warmed.dtype} on {warmed.arch}: {len(warmed.builds)} kernels, "
        f"{total:.1f} MB, in {warmed.seconds:.1f} s\n"
        f"Workers find them with TRITON_CACHE_DIR={warmed.cache}, at this very path."
    )
