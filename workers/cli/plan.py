"""`penstock plan`: what a model needs and makes on a GPU, how many workers a load needs, and what they cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, needs, refusing, touching
from workers.cli.options import Broker, DataDir, JsonOutput, Model, Store, find_models
from workers.cli.servers import system
from workers.cli.terminal import aligned, say
from workers.progress import Progress

if TYPE_CHECKING:
    from engine.models import Size
    from engine.roofline import Gpu
    from workers.trials.plan import Load, Margins, Need, Rates
    from workers.trials.simulate.traces import Arrival

#: Contexts and batches of the table of the KV cache.
CONTEXTS: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 17)
BATCHES: Final = (1, 16, 64, 256)
KV_DTYPES: Final = ("auto", "fp8", "int8")
#: Columns of the table of GPUs.
_HEADS: Final = (
    *("GPU", "memory", "below", "needed", "at once", "knee", "first token", "a token", "tokens/s", "1,000 cost"),
)
_GB: Final = 1e9
#: Sequences at once of a step of several GPUs, as `workers.trials.plan.TOGETHER`.
_TOGETHER: Final = (1, 16, 64)

app = Commands("Operations", OPERATOR_STATUS)


@app.shown("penstock plan ./llama-8b --gpu H200 --price H200=3.80 --rate 4 --prompt-tokens 1000 --output-tokens 250")
def plan(
    model: Model,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A GPU, such as H200; an unknown name lists them. May be repeated. Unset: all."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a mean prompt. Unset: 1000, at most 4/5 of the model's context."),
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a mean output. Unset: 250, at most 1/5 of the model's context.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Sequences at once in a worker. Unset: what the memory holds, at most 256."),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Data type of the weights: auto (as in the checkpoint), fp8, int8 or int4.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Data type of the KV cache: auto (that of the weights), fp8 or int8.")
    ] = ("auto"),
    overhead: Annotated[
        float, typer.Option(min=0, max=10, help="Memory for all else, as a share of weights and KV cache.")
    ] = 0.3,
    memory_line: Annotated[float, typer.Option(min=0.01, max=1, help="Share of a GPU's memory that may be used.")] = (
        0.85
    ),
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, max=1e6, help="Plan workers for so many tasks a second, at random times (a Poisson process)."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A file of arrivals to plan workers for: CSV with time (s), tier, prompt_tokens, output_tokens."
        ),
    ] = None,
    max_wait: Annotated[
        float, typer.Option(min=0, help="Seconds within which 95% of the tasks are to have their first token.")
    ] = 2.0,
    max_workers: Annotated[int, typer.Option("--max", min=1, max=1000, help="Try up to so many workers.")] = 100,
    cold_start: Annotated[
        float | None,
        typer.Option(
            min=0, max=86_400, help="Seconds until a started worker takes tasks. Unset: the profile's, or 60."
        ),
    ] = None,
    cool_down: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds for which a worker stays up with nothing to do.")
    ] = 300.0,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PRICE",
            help="Price of a worker's hour, of all GPUs (3.80) or of one (H200=3.80). May be repeated.",
        ),
    ] = None,
    reserved_price: Annotated[
        float | None, typer.Option(min=0, help="Price of an hour of a worker that is always up, where it is lower.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="MODEL@VERSION", help="Plan by what this version's workers measured."),
    ] = None,
    as_json: JsonOutput = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Plan capacity: memory, GPUs that fit, speed, workers for a load, and cost.

    Speed is estimated: a roofline of the GPU's memory and compute, times the share of it that was measured on an H200
    and an H100. With --profile it is what workers measured. Needs config.json, and files of weights only for a
    quantised checkpoint.
    """
    with needs("worker"):
        from engine.errors import EngineError
        from engine.models import size_of
        from workers.trials.plan import WEIGHTS, Load, Margins, Need
    if weights not in ("auto", *WEIGHTS):
        raise Failure(f"--weights is {weights!r}; it must be one of auto, {', '.join(WEIGHTS)}")
    if kv_cache_dtype not in KV_DTYPES:
        raise Failure(f"--kv-cache-dtype is {kv_cache_dtype!r}; it must be one of {', '.join(KV_DTYPES)}")
    if rate is not None and trace is not None:
        raise Failure("give one of --rate and --trace")
    gpus = [] if profile is not None and not gpu else _gpus(gpu)
    prices = _prices(price or [], [*(each.name for each in gpus), *([] if profile is None else [profile])])
    if (rate is not None or trace is not None) and not gpu and profile is None:
        raise Failure("say with --gpu NAME or --profile MODEL@VERSION whose workers to plan for --rate or --trace")
    kept = _profile(profile, broker, store, data_dir) if profile is not None else None
    (resolved,) = find_models([model])
    with refusing(EngineError, ValueError):
        size = size_of(resolved.folder)
        need = Need.of(size, weights, kv_cache_dtype)
    context = size.settings.context_length
    load = Load(prompt_tokens or max(1, min(1000, 4 * context // 5)), output_tokens or max(1, min(250, context // 5)))
    margins = Margins(overhead, memory_line)
    if load.prompt + load.output > context:
        raise Failure(
            f"--prompt-tokens {load.prompt} and --output-tokens {load.output} are more than the model's context of "
            f"{context} tokens"
        )
    report = _memory(resolved.name, size, need, load, margins)
    arrivals = _arrivals(rate, trace, load)
    report["gpus"] = [_on(each, need, load, margins, concurrency, cold_start, prices) for each in gpus]
    rated = [(row["gpu"], row["rates"], row["price"]) for row in report["gpus"] if row["rates"] is not None]
    if kept is not None:
        from workers.trials.plan import rates_of

        with refusing(ValueError):
            measured = rates_of(kept, load, cold_start)
        cost = prices.get(profile or "", prices.get(""))
        report["profile"] = {"version": profile, **_figures(measured, cost)}
        rated.append((str(profile), measured, cost))
    for row in report["gpus"]:
        if row["rates"] is not None:
            row.update(_figures(row["rates"], row["price"]))
    if arrivals is not None:
        with Progress(quiet=as_json) as progress:
            limits = (max_wait, max_workers, cool_down, reserved_price)
            report["load"] = _load(arrivals, rated, limits, progress)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)


def _gpus(names: list[str] | None) -> list[Gpu]:
    from engine.roofline import GPUS

    by_name = {each.name.lower(): each for each in GPUS}
    for name in names or []:
        if name.lower() not in by_name:
            raise Failure(f"--gpu is {name!r}; the table has {', '.join(each.name for each in GPUS)}")
    return [by_name[name.lower()] for name in names] if names else list(GPUS)


def _prices(texts: list[str], names: list[str]) -> dict[str, float]:
    """Prices of an hour by the GPU's name, or a profile's; "": of all others. Raises Failure."""
    prices: dict[str, float] = {}
    by_name = {name.lower(): name for name in names}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not isfinite(value) or value < 0:
            raise Failure(f"--price is {text!r}; it must be a number from 0 on, or NAME=NUMBER")
        if name and name.lower() not in by_name:
            raise Failure(f"--price names {name!r}; there are {', '.join(names) or 'no GPUs in this plan'}")
        prices[by_name.get(name.lower(), name)] = value
    return prices


def _profile(version: str, broker: str | None, store: str | None, data_dir: Path | None) -> Any:
    from workers.cli.scale import kept_profile

    with system(broker, store, data_dir) as (client, loop):
        return loop.run(kept_profile(client.store, version))


def _arrivals(rate: float | None, trace: Path | None, load: Load) -> list[Arrival] | None:
    if rate is not None:
        from workers.trials.plan import poisson

        return poisson(rate, load)
    if trace is None:
        return None
    from workers.trials.simulate.traces import read

    with refusing(ValueError), touching(trace, "read"):
        return read(trace)


def _memory(name: str, size: Size, need: Need, load: Load, margins: Margins) -> dict[str, Any]:
    """The memory that a model needs, by context and batch."""
    contexts = [each for each in CONTEXTS if each <= size.settings.context_length]
    return {
        "model": name,
        "weights": size.elements,
        "dtype": need.form or str(size.dtype).removeprefix("torch."),
        "weight_bytes": round(need.weight_bytes),
        "context_length": size.settings.context_length,
        "kv_bytes_per_token": need.work.kv_bytes,
        "kv_bytes": {
            context: {batch: round(batch * need.work.kv_bytes_of(context)) for batch in BATCHES} for context in contexts
        },
        "load": None,
        "tokens": asdict(load),
        "overhead": margins.overhead,
        "memory_line": margins.line,
        "profile": None,
    }


def _on(
    gpu: Gpu,
    need: Need,
    load: Load,
    margins: Margins,
    concurrency: int | None,
    cold_start: float | None,
    prices: dict[str, float],
) -> dict[str, Any]:
    """A GPU's row, with `rates` as an object yet; None where the model does not fit."""
    from engine.execution.placement import SEQUENCES
    from workers.trials.plan import divided, ranks_needed, rates_on

    room = need.room(gpu, load, margins)
    sequences = concurrency or min(room, SEQUENCES["cuda"])
    lacks = "fp8" if need.form == "fp8" and gpu.fp8_tflops is None else None
    fits = 1 <= sequences <= room and lacks is None
    return {
        "gpu": gpu.name,
        "source": gpu.source,
        "memory_bytes": gpu.memory_bytes,
        "line_bytes": gpu.memory_bytes * margins.line,
        "needed_bytes": need.total(max(1, sequences), load, margins),
        "room": room,
        "short": sequences > room,
        "fits": fits,
        "lacks": lacks,
        "ranks": None if lacks else ranks_needed(gpu, need, load, margins),
        # Where one GPU is enough, several are no question.
        "divided": [] if room or lacks else [asdict(each) for each in divided(gpu, need, load, margins)],
        "price": prices.get(gpu.name, prices.get("")),
        "rates": rates_on(gpu, need, load, sequences, 60.0 if cold_start is None else cold_start) if fits else None,
    }


def _figures(rates: Rates, price: float | None) -> dict[str, Any]:
    cost = None if price is None else price / 3600 / rates.output_tokens_per_s * 1000
    return {"rates": asdict(rates), "price": price, "per_1000_output_tokens": cost}


def _load(
    arrivals: list[Arrival],
    rated: list[tuple[str, Rates, float | None]],
    limits: tuple[float, int, float, float | None],
    progress: Progress,
) -> dict[str, Any]:
    """Workers for the arrivals, and what they cost, for each kind of worker."""
    from workers.trials.plan import break_even, needed, scaled

    max_wait, most, cool_down, reserved = limits
    output, span = sum(max(1, arrival.output) for arrival in arrivals), max(arrivals[-1].at, 1.0)
    rows = []
    for name, rates, price in rated:
        fleet, holds = needed(arrivals, rates.worker, max_wait, most, partial(_note, progress, name))
        on_demand = scaled(arrivals, rates.worker, most, cool_down)
        always = price if reserved is None else reserved
        task_s = rates.ttft_s + rates.tpot_s * output / len(arrivals)
        ratio = always / price if price and always is not None else 1.0
        even = break_even(rates.worker.cold_start, task_s, cool_down, ratio)
        row: dict[str, Any] = {"worker": name, "holds": holds, "always_up": asdict(fleet), "scaled": asdict(on_demand)}
        for kind, its, cost in (("always_up", fleet, always), ("scaled", on_demand, price)):
            total = None if cost is None else cost * its.worker_hours
            row[kind] |= {"cost": total, "per_1000_output_tokens": None if total is None else total / output * 1000}
        rows.append({**row, "break_even": asdict(even)})
    return {"tasks": len(arrivals), "seconds": span, "output_tokens": output, "max_wait_s": max_wait, "workers": rows}


def _note(progress: Progress, name: str, workers: int) -> None:
    progress.show(f"{name}: {workers} workers")


def _print(report: dict[str, Any]) -> None:
    load = report["tokens"]
    say(
        f"{report['model']}: {report['weights']:,} weights in {report['dtype']}, {_size(report['weight_bytes'])}; "
        f"KV cache {report['kv_bytes_per_token']:,.0f} bytes a token; context {report['context_length']:,}"
    )
    if report["kv_bytes"]:
        table = [["KV cache", *(f"{batch} at once" for batch in BATCHES)]]
        for context, sizes in report["kv_bytes"].items():
            table.append([f"{context:,} tokens each", *(_size(size) for size in sizes.values())])
        _show(table)
    if report["gpus"]:
        say(
            f"\n{load['prompt']:,} + {load['output']:,} tokens; weights and KV cache, and {report['overhead']:.0%} "
            f"more, below {report['memory_line']:.0%} of the memory:"
        )
        heads = [
            "GPU",
            "memory",
            "below",
            "needed",
            "at once",
            "knee",
            "first token",
            "a token",
            "tokens/s",
            "1,000 cost",
        ]
        _show([heads, *(_gpu_row(row) for row in report["gpus"])])
        say("Estimates by the roofline; measured on an H200 and an H100 alone. 1,000 output tokens, at full load.")
        _divided(report["gpus"])
    if (measured := report["profile"]) is not None:
        say(f"\n{measured['version']}, as its workers measured:")
        heads = ["", "at once", "first token", "a token", "tokens/s", "1,000 cost"]
        _show([heads, [measured["version"], *_rate_cells(measured)]])
    if report["load"] is not None:
        _print_load(report["load"])


def _gpu_row(row: dict[str, Any]) -> list[str]:
    cells = [row["gpu"], *(_size(row[name]) for name in ("memory_bytes", "line_bytes", "needed_bytes"))]
    if row["rates"] is None:
        return [
            *cells,
            _lack(row) if row["lacks"] or row["room"] < 1 else f"room for {row['room']}",
            *["-"] * 5,
        ]
    at_once, *rest = _rate_cells(row)
    return [*cells, at_once, str(row["rates"]["knee"]), *rest]


def _lack(row: dict[str, Any]) -> str:
    if row["lacks"]:
        return f"no {row['lacks']}"
    return "does not fit" if row["ranks"] is None else f"takes {row['ranks']}"


def _divided(rows: list[dict[str, Any]]) -> None:
    """Steps of several GPUs together, where one does not hold the model."""
    table = [["GPUs", "at once", *(f"a step of {batch}" for batch in _TOGETHER)]]
    for row in rows:
        for each in row["divided"]:
            steps = [each["step_s"].get(batch) for batch in _TOGETHER]
            cells = ["-" if step is None else f"{step * 1e3:,.2f} ms" for step in steps]
            table.append([f"{each['ranks']} x {row['gpu']}", str(each["room"]), *cells])
    if len(table) > 1:
        say("\nSeveral GPUs of one machine together, by --tensor-parallel (estimates; no GPU has run it):")
        _show(table)


def _rate_cells(row: dict[str, Any]) -> list[str]:
    rates, cost = row["rates"], row["per_1000_output_tokens"]
    return [
        str(rates["sequences"]),
        f"{rates['ttft_s'] * 1e3:,.1f} ms",
        f"{rates['tpot_s'] * 1e3:,.2f} ms",
        f"{rates['output_tokens_per_s']:,.0f}",
        "-" if cost is None else f"{cost:,.5f}",
    ]


def _print_load(load: dict[str, Any]) -> None:
    if not load["workers"]:
        say(f"\n{load['tasks']:,} tasks: no workers are planned for them, as none of these GPUs serves the model.")
        return
    say(
        f"\n{load['tasks']:,} tasks in {load['seconds']:,.0f} s; 95% are to have their first token within "
        f"{load['max_wait_s']:g} s of their arrival:"
    )
    heads = ["", "workers", "p50", "p95", "busy", "worker-hours", "cost", "1,000 cost"]
    table = [heads]
    for row in load["workers"]:
        for name, its in ((row["worker"], row["always_up"]), ("  scaled, down to none", row["scaled"])):
            waits = ["-" if its[key] is None else f"{its[key]:,.3g} s" for key in ("wait_p50_s", "wait_p95_s")]
            costs = ["-" if its[key] is None else f"{its[key]:,.{digits}f}" for key, digits in _COSTS]
            hours = [f"{its['busy']:.0%}", f"{its['worker_hours']:,.2f}"]
            table.append([name, str(its["workers"]), *waits, *hours, *costs])
    _show(table)
    for row in load["workers"]:
        even = row["break_even"]
        cheaper = even["cheaper_below"]
        below = "at any rate" if cheaper is None else f"below {cheaper:,.1f} tasks an hour"
        say(
            f"{row['worker']}: {below}, scale-to-zero costs less than one worker that is always up; below "
            f"{even['cold_below']:,.0f} tasks an hour, over 5% of them wait for a start."
        )
        if not row["holds"]:
            say(f"{row['worker']}: {row['always_up']['workers']} workers do not keep that wait; see --max, --max-wait.")


_COSTS: Final = (("cost", 2), ("per_1000_output_tokens", 5))


def _show(table: list[list[str]]) -> None:
    for line in aligned(table):
        say(line)


def _size(size: float) -> str:
    for unit, factor in (("GB", _GB), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"
