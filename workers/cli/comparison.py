"""`penstock models diff` and `compare`: two models or versions, by their files and by their outputs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.exits import Exit, Failure, needs
from workers.cli.models import app
from workers.cli.options import ENGINE, Broker, DataDir, Json, Store, takes
from workers.cli.servers import addresses
from workers.cli.terminal import aligned, note, say

if TYPE_CHECKING:
    from engine import Output
    from engine.text import ModelCard, Tokenizer

#: Bytes of a file of prompts, and prompts of it that are generated from.
MAX_PROMPTS_BYTES: Final = 64 << 20
GENERATED: Final = 16
#: Tasks that are replayed at most, and pages of 100 of the store's list that are read for them.
MAX_REPLAYED, MAX_PAGES = 10_000, 200
#: Bytes of a line of an evaluation that are read at once.
MAX_LINE: Final = 1 << 16
#: Tokens of a prompt that are compared, and of an output.
MAX_PROMPT: Final = 1024
OUTPUT: Final = 32
#: How often outputs are made, to measure the time.
ROUNDS: Final = 3
First = Annotated[
    str, typer.Argument(metavar="A", help="A model, as all commands take it; NAME@VERSION of a pulled one.")
]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one.")]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a model. `files`: name -> bytes, SHA-256; `settings`: of config.json, flat; `tensors`: name ->
    data type and shape, of safetensors files."""

    name: str
    version: str
    files: Mapping[str, tuple[int, str]]
    settings: Mapping[str, Any]
    tensors: Mapping[str, str]


@app.shown("penstock models diff tiny tiny-v2")
def diff(first: First, second: Second, as_json: Json = False) -> None:
    """Show how the files, settings and tensors of two models differ. Equal files have equal SHA-256."""
    one, other = _contents(first), _contents(second)
    changes = {
        "files": _changes(one.files, other.files),
        "settings": _changes(one.settings, other.settings),
        "tensors": _changes(one.tensors, other.tensors),
    }
    if as_json:
        versions = [{"name": model.name, "version": model.version} for model in (one, other)]
        typer.echo(json.dumps({"models": versions, **changes}))
        return
    say(f"{one.name} {one.version}  {other.name} {other.version}")
    for kind, rows in changes.items():
        if not rows:
            say(f"{kind}: the same")
            continue
        say(f"{kind}:")
        for line in aligned([(f"  {name}", _shown(a), _shown(b)) for name, (a, b) in rows.items()], 3):
            say(line)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:,} bytes {value[1][:12]}" if isinstance(value, tuple) else str(value)


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> both values, None where one lacks it, of all names whose values differ."""
    names = sorted({*first, *second})
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _contents(reference: str) -> Contents:
    from engine.errors import ModelError
    from engine.text.gguf import parts_of
    from workers.library import find_model
    from workers.library.local_models import MANIFEST, files_of, manifest_of, own_file, sha256_of

    with needs("worker"):
        from engine.text.checkpoint import model_version
        from engine.text.config import read_config
        from engine.text.tensors import read_header
    model = find_model(reference, note)
    folder = model.folder
    try:
        names = files_of(folder) if folder.is_dir() else sorted(path.name for path in parts_of(folder))
        names = [name for name in names if not name.startswith(".")]
        where = folder if folder.is_dir() else folder.parent
        digests = manifest_of(where) if folder.is_dir() else {}
        files = {name: own_file(where, name) for name in names if name != MANIFEST}
        tensors = {
            name: f"{tensor.dtype} {list(tensor.shape)}"
            for path in files.values()
            if path.suffix == ".safetensors"
            for name, tensor in read_header(path).items()
        }
        return Contents(
            name=model.name,
            version=model_version(folder),
            files={name: (path.stat().st_size, digests.get(name) or sha256_of(path)) for name, path in files.items()},
            settings=dict(_flat(read_config(folder))),
            tensors=tensors,
        )
    except ModelError as error:
        raise Failure(f"{folder} holds no servable model: {error}") from error
    except OSError as error:
        raise Failure(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat += _flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | bool | list | tuple):
            flat.append((f"{before}{name}", list(value) if isinstance(value, tuple) else value))
    return flat


@app.shown(
    "penstock models compare tiny tiny-v2 --prompts prompts.txt --max-divergence 0.1 --min-speed 0.9",
)
@takes(engine=(ENGINE["device"], ENGINE["threads"]))
def compare(
    first: First,
    second: Second,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt a line: text, or JSON with `prompt`. The first 64 MiB."),
    ] = None,
    replay: Annotated[
        int | None,
        typer.Option(
            "--replay",
            metavar="N",
            min=1,
            max=MAX_REPLAYED,
            help="The prompts of A's last N tasks in a system's store.",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="With --replay: tasks of this tenant alone.")] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="COMMAND",
            help="Run it for each model, with PENSTOCK_FOLDER: a status but 0 is a failure, a number in the last line "
            "a score.",
        ),
    ] = None,
    max_score_drop: Annotated[
        float | None, typer.Option(help="With --evaluate: most that B's score may be below A's.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=1 << 20, help="Most tokens of prompts to compare.")] = 16384,
    max_divergence: Annotated[
        float | None, typer.Option(help="Most KL(A || B) of the next token, in nats, on average.")
    ] = None,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(help="Most that B's perplexity may be above A's: 0.01 is one percent.")
    ] = None,
    min_agreement: Annotated[
        float | None, typer.Option(help="Least share of positions at which both find the same token likeliest.")
    ] = None,
    min_same: Annotated[
        float | None, typer.Option(help="Least share of output tokens before the first difference.")
    ] = None,
    min_speed: Annotated[
        float | None, typer.Option(help="Least speed of B by that of A. It is the time on this machine, as it is.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0, help="What an hour of this machine costs: shows what a million tokens cost."),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    engine: dict[str, Any],
) -> None:
    """Compare two models on prompts: how far their next tokens diverge, perplexity, outputs, speed.

    Both must make the same token ids of the prompts. Without --replay it needs no system. Exit status 1: B is worse
    than one of the bounds allows, or --evaluate fails for it.
    """
    with needs("worker"):
        from engine.errors import EngineError
        from workers.library import find_model, verify
    if prompts is not None and replay is not None:
        raise Failure("--prompts and --replay both give prompts: leave one out")
    if prompts is None and replay is None and evaluate is None:
        raise Failure("nothing to compare by: give --prompts FILE, --replay N, or --evaluate COMMAND")
    for name, value, needed in (("--tenant", tenant, replay), ("--max-score-drop", max_score_drop, evaluate)):
        if value is not None and needed is None:
            raise Failure(f"{name} is for {'--replay' if name == '--tenant' else '--evaluate'}, which is not given")
    models = [find_model(reference, note) for reference in (first, second)]
    report: dict[str, Any] = {}
    try:
        for model in models:
            verify(model.folder)
        texts = None if prompts is None else _prompts(prompts)
        if replay is not None:
            texts = _replayed(models[0].name, models[0].folder, replay, tenant, addresses(broker, store, data_dir))
        if texts is not None:
            report = _report([model.folder for model in models], texts, tokens, **engine)
    except EngineError as error:
        raise Failure(str(error)) from error
    if report and price is not None:
        report["cost_per_million_tokens"] = [
            price / 3600 * 1e6 / max(speed, 1e-9) for speed in report["tokens_per_second"]
        ]
    given = (max_divergence, max_perplexity_increase, min_agreement, min_same, min_speed, price)
    if not report and any(bound is not None for bound in given):
        raise Failure("bounds of outputs or a price are given, and no prompts: give --prompts FILE or --replay N")
    bounds = {
        "divergence": (max_divergence, 1),
        "perplexity_increase": (max_perplexity_increase, 1),
        "agreement": (min_agreement, -1),
        "same": (min_same, -1),
        "speed": (min_speed, -1),
    }
    report["failed"] = [
        f"{name} is {report[name]:.4g}, and the bound {bound:g}"
        for name, (bound, sign) in bounds.items()
        if bound is not None and not sign * report[name] <= sign * bound
    ]
    if evaluate is not None:
        report["scores"] = scores = [_score(evaluate, model) for model in models]
        report["failed"] += _worse(scores, max_score_drop)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for line in aligned(_lines(report), 2):
            say(line)
    if report["failed"]:
        raise Failure("; ".join(report["failed"]), Exit.TASK_FAILED)


def _score(command: str, model: Any) -> tuple[int, float | None]:
    """The exit status of an evaluation of a model, and the number in the last line that it has written."""
    import os
    import subprocess

    env = {**os.environ, "PENSTOCK_FOLDER": str(model.folder), "PENSTOCK_MODEL": model.name}
    last = ""
    note(f"{model.name}: {command}")
    with subprocess.Popen(["/bin/sh", "-c", command], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while line := process.stdout.readline(MAX_LINE):
            if text := line.decode("utf-8", "replace").strip():
                note(last := text)
    try:
        number = float(last)
    except ValueError:
        number = math.nan
    return process.returncode, number if math.isfinite(number) else None


def _worse(scores: Sequence[tuple[int, float | None]], max_drop: float | None) -> list[str]:
    """Why the second model does not pass its evaluation. Raises Failure where the first one's cannot be compared."""
    (status, score), (other_status, other) = scores
    if other_status:
        return [f"the evaluation of B ended with status {other_status}"]
    if max_drop is None:
        return []
    if status or score is None or other is None:
        raise Failure(
            f"--max-score-drop compares the numbers in the last lines of both evaluations: A's has status {status} and "
            f"{score}, B's {other}"
        )
    return [] if score - other <= max_drop else [f"the score is {other:g}, and A's {score:g}: the most is {max_drop:g}"]


def _replayed(model: str, folder: Path, count: int, tenant: str | None, urls: tuple[str, str]) -> list[str | list[int]]:
    """The prompts of a model's last tasks that generate, as far as they are kept, and fit its tokenizer; shadow copies
    and lines of batches are none. Raises Failure."""
    from redis.exceptions import RedisError

    from engine.text import ModelCard
    from producers import Client
    from producers.client.directory import encoding_of_card
    from producers.connection.script import parsed, text
    from producers.connection.trouble import error_text
    from producers.contract import keys
    from producers.errors import PenstockError

    encoding = encoding_of_card(json.loads(ModelCard.from_folder(folder).to_json()))
    prompts: list[str | list[int]] = []
    passed, size, after = 0, 0, None
    try:
        with Client(*urls) as client, _connected(urls[1]) as records:
            for _ in range(MAX_PAGES):
                page = client.tasks.list(kind="all", model=model, tenant=tenant, limit=100, after=after)
                with records.pipeline(transaction=False) as pipe:
                    for task in page:
                        pipe.hmget(keys.task(task.id), "task", "encoding")
                    rows = pipe.execute()
                for raw, made_by in rows:
                    prompt = parsed(raw).get("prompt")
                    if isinstance(prompt, list) and text(made_by or "") != encoding:
                        prompt = None
                    if not prompt:
                        passed += 1
                        continue
                    size += len(prompt) * (4 if isinstance(prompt, list) else 1)
                    prompts.append(prompt)
                    if len(prompts) == count or size > MAX_PROMPTS_BYTES:
                        break
                after = page.next
                if after is None or len(prompts) == count or size > MAX_PROMPTS_BYTES:
                    break
    except (PenstockError, RedisError, OSError) as error:
        raise Failure(f"--replay: the tasks cannot be read: {error_text(error)}") from error
    if passed:
        note(f"--replay: {passed} tasks are passed over: no prompt is kept of them, or one of another tokenizer")
    if not prompts:
        raise Failure(f"--replay: the store keeps no prompt of a task of {model}" + (f" of {tenant}" if tenant else ""))
    return prompts


def _connected(store: str) -> Any:
    from workers.connect import connect

    return connect(store)


def _prompts(file: Path) -> list[str | list[int]]:
    """The prompts of a file. Raises Failure."""
    from producers.connection.script import parsed

    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_PROMPTS_BYTES)
        if len(raw) == MAX_PROMPTS_BYTES:  # the last line may be cut, in the middle of a character
            raw = raw[: raw.rfind(b"\n") + 1]
        lines = raw.decode("utf-8").split("\n")  # no other character ends a line: JSON may have U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"--prompts: {file} cannot be read as UTF-8 text: {error}") from error
    texts: list[str | list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt: Any = parsed(line).get("prompt") if line.startswith("{") else line.removesuffix("\r")
        if not isinstance(prompt, str):
            raise Failure(f"--prompts: line {number} of {file} begins with {{ and is no JSON object with a prompt")
        texts.append(prompt)
    if not texts:
        raise Failure(f"--prompts: {file} has no prompt")
    return texts


def _report(
    folders: Sequence[Path],
    texts: Sequence[str | list[int]],
    tokens: int,
    device: str | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    import torch

    from engine.engine import device_named
    from engine.execution.threads import threads_for
    from engine.quant.make.compare import compare as compare_outputs
    from engine.quant.make.model import decoder
    from engine.text import ModelCard, Tokenizer
    from producers.store.shadows import same_share

    cards = [ModelCard.from_folder(folder) for folder in folders]
    windows = _windows([Tokenizer(ModelCard.tokenizer_files(folder)) for folder in folders], cards, texts, tokens)
    generated = [_generated(folder, windows[:GENERATED], device, threads) for folder in folders]
    torch.set_num_threads(threads_for(threads, torch.get_num_threads()))
    torch_device = device_named(device or "auto")
    before, after = (decoder(folder, torch_device) for folder in folders)
    compared = compare_outputs(before, after, windows)
    outputs = [[output.token_ids for output in its] for its, _ in generated]
    speeds = [sum(map(len, ids)) / max(seconds, 1e-9) for ids, (_, seconds) in zip(outputs, generated, strict=True)]
    return {
        "models": [{"name": card.name, "version": card.version} for card in cards],
        "prompts": len(windows),
        **compared.to_json(),
        "same": same_share(*outputs),
        "tokens_per_second": speeds,
        "speed": speeds[1] / speeds[0] if speeds[0] else 0.0,
    }


def _windows(
    tokenizers: Sequence[Tokenizer], cards: Sequence[ModelCard], texts: Sequence[str | list[int]], tokens: int
) -> list[list[int]]:
    """The prompts' token ids; those that are given as such are the first model's. Raises Failure where the models make
    different ones."""
    from producers.client.directory import ENCODING_FILES

    if any(isinstance(prompt, list) for prompt in texts):
        files = [{name: card.files.get(name) for name in ENCODING_FILES} for card in cards]
        if files[0] != files[1]:
            raise Failure(
                f"the tasks' prompts are kept as token ids of {cards[0].name}, and {cards[1].name} has another "
                "tokenizer or chat template: give --prompts FILE"
            )
    if cards[0].vocab_size != cards[1].vocab_size:
        sizes = " and ".join(f"{card.name} has {card.vocab_size:,} tokens" for card in cards)
        raise Failure(f"{sizes}: models with different vocabularies cannot be compared token by token")
    longest = min(MAX_PROMPT, *(card.context_length - OUTPUT for card in cards))
    windows: list[list[int]] = []
    for number, prompt in enumerate(texts, 1):
        if isinstance(prompt, list):
            ids = others = prompt[:longest]
        else:
            ids, others = (tokenizer.encode(prompt)[:longest] for tokenizer in tokenizers)
        if ids != others:
            names = " and ".join(card.name for card in cards)
            raise Failure(f"{names} make different token ids of prompt {number}: nothing could be compared")
        if len(ids) > 1:
            windows.append(ids[:tokens])
            tokens -= len(windows[-1])
        if tokens < 2:
            break
    if not windows:
        raise Failure("the prompts have no token but the first: give longer ones")
    return windows


def _generated(
    folder: Path, prompts: Sequence[list[int]], device: str | None, threads: int | None
) -> tuple[list[Output], float]:
    """The likeliest continuation of each prompt, and the time (s) for all of them together: the shortest of ROUNDS."""
    from engine import Engine, EngineConfig, SamplingParams

    options: dict[str, Any] = {
        "device": device,
        "threads": threads,
        "max_num_seqs": GENERATED,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(**{name: value for name, value in options.items() if value is not None})
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    with Engine.load(folder, config) as engine:
        outputs = engine.generate(list(prompts), params)  # its first steps are slower
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            engine.generate(list(prompts), params)
            times.append(time.perf_counter() - began)
    return outputs, min(times)


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    evaluated = [
        ("evaluation", f"{name}: status {status}" + ("" if score is None else f", score {score:g}"))
        for name, (status, score) in zip("AB", report.get("scores", ()), strict=False)
    ]
    if "models" not in report:
        return evaluated
    costs = report.get("cost_per_million_tokens", ())
    evaluated += (
        [("cost", "{:.4g} a million output tokens, of the first {:.4g}".format(*reversed(costs)))] if costs else []
    )
    one, other = report["models"]
    speeds = report["tokens_per_second"]
    return [
        ("compared", f"{one['name']} {one['version']} with {other['name']} {other['version']}"),
        ("prompts", f"{report['prompts']:,}, of which {report['tokens']:,} tokens judge"),
        (
            "perplexity",
            f"{report['perplexity']:.3f}, of the first {report['perplexity_before']:.3f} "
            f"({report['perplexity_increase']:+.2%})",
        ),
        ("divergence", f"KL {report['divergence']:.5f} nats on average, p99 {report['divergence_p99']:.4f}"),
        ("agreement", f"{report['agreement']:.2%} of the likeliest tokens are the same"),
        ("outputs", f"{report['same']:.2%} of the tokens come before the first difference"),
        ("speed", f"{speeds[1]:,.0f} tokens a second, of the first {speeds[0]:,.0f} ({report['speed']:.2f} times)"),
        *evaluated,
    ]
