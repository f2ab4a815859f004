"""`penstock bench`: puts load on a running system over HTTP and measures latencies, rates and goodput."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure, touching
from workers.cli.option_groups import SAMPLING, takes
from workers.cli.options import DEFAULT_URL, Url
from workers.cli.terminal import aligned

if TYPE_CHECKING:
    from workers.trials.bench.figures import Limits
    from workers.trials.bench.load import Client, Load, Sample


app = Commands("Operations", CALLER_STATUS)


@app.shown("penstock bench tiny --rate 20 --requests 500 --ttft-limit 0.2 --out bench.json --plot bench.svg")
@takes(sampling=[SAMPLING["temperature"]])
def bench(
    model: Annotated[str, typer.Argument(help="A model that the system serves.")],
    *,
    requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 100,
    duration: Annotated[
        float | None, typer.Option(min=0, help="Send no more requests after this many seconds.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, at random times (open loop). Unset: closed loop.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="With --rate: 1 is Poisson arrivals, less makes bursts.")
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests at a time. Unset: 8 in a closed loop, no limit in an open one."),
    ] = None,
    warm_up_requests: Annotated[int, typer.Option(min=0, help="Requests to send first and not to measure.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean prompt length; prompts are random tokens.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean output length in tokens.")] = 64,
    length_spread: Annotated[
        float, typer.Option(min=0, max=1, help="Vary lengths by up to this share of the mean, either way.")
    ] = 0.0,
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with, to measure prefix caching.")
    ] = 0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: one text a line, or JSON lines with `prompt` and `max_tokens`."),
    ] = None,
    tiers: Annotated[str, typer.Option(help="Tiers of the requests, with weights: priority=1,batch=3.")] = "default",
    sampling: dict[str, Any],
    ttft_limit: Annotated[
        float | None, typer.Option(min=0, help="Longest TTFT of a request that counts as goodput (s).")
    ] = None,
    itl_limit: Annotated[
        float | None, typer.Option(min=0, help="Longest mean ITL of a request that counts as goodput (s).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed sends the same requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures and every request to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and load into this SVG file.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Put load on a running system and measure rates, latencies and goodput.

    Latencies count from the time at which a request was due, so that a stalled system does not look fast.
    """
    import asyncio

    from workers.cli.client import Gateway
    from workers.trials.bench.figures import Limits
    from workers.trials.bench.figures import plot as draw
    from workers.trials.bench.load import Load, read_prompts

    gateway = Gateway(url)
    served = {one["id"]: one for one in gateway.models()}
    if model not in served:
        raise Failure(f"{gateway.url} serves no model {model!r}; it has: {', '.join(sorted(served)) or 'none'}")
    try:
        given = read_prompts(prompts) if prompts is not None else []
    except (OSError, ValueError) as error:
        raise Failure(f"cannot use --prompts: {error}") from error
    load = Load(
        model=model,
        vocab_size=served[model]["vocab_size"],
        requests=requests + warm_up_requests,
        rate=rate,
        burstiness=burstiness,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        spread=length_spread,
        shared_prefix=shared_prefix_tokens,
        prompts=given,
        tiers=weights(tiers),
        extra=sampling,
        seed=seed,
    )
    for path in (out, plot):
        check_writable(path)
    cap = concurrency if concurrency is not None or rate is not None else 8
    limits = Limits(ttft_limit, itl_limit)
    try:
        samples, client = asyncio.run(_drive(gateway.url, load, cap, duration))
    except KeyboardInterrupt:
        raise Failure("interrupted; requests under way were cancelled", Exit.INTERRUPTED) from None
    figures = _figures(load, cap, gateway.url, samples, client, limits, warm_up_requests)
    if out is not None:
        each = [_each(sample) for sample in samples]
        out.write_text(json.dumps({**figures, "samples": each}) + "\n")
    if plot is not None:
        plot.write_text(draw(samples, _title(figures)))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _report(figures)
    if not figures["requests"]["completed"]:
        raise Failure(f"no request was completed: {figures['requests']['errors']}", Exit.TASK_FAILED)


async def _drive(url: str, load: Load, cap: int | None, duration: float | None) -> tuple[list[Sample], Client]:
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from workers.trials.bench.load import drive

    console = Console(file=sys.stderr)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        row = bar.add_task("requests", total=load.requests)
        note = lambda sample: bar.advance(row)  # noqa: E731
        return await drive(url, load.schedule(), concurrency=cap, duration=duration, note=note)


def _figures(
    load: Load, cap: int | None, url: str, samples: Sequence[Sample], client: Client, limits: Limits, warm_up: int
) -> dict[str, Any]:
    from dataclasses import asdict

    from workers.trials.bench.figures import summary

    settings = {name: value for name, value in asdict(load).items() if name != "prompts"}
    settings |= {"url": url, "concurrency": cap, "warm_up": warm_up, "prompts": len(load.prompts)}
    return {**summary(samples, client, limits, warm_up), "settings": settings}


def _report(figures: dict[str, Any]) -> None:
    requests, client = figures["requests"], figures["client"]
    typer.echo(_title(figures))
    for line in aligned(_table(figures)):
        typer.echo(line)
    typer.echo(
        f"requests  {requests['completed']} completed, {requests['failed']} failed in {figures['duration_s']:.2f} s: "
        f"{_number(figures['completed_per_s'])}/s completed, {_number(figures['offered_per_s'])}/s sent\n"
        f"tokens    {figures['prompt_tokens']:,} in, {figures['output_tokens']:,} out: "
        f"{_number(figures['output_tokens_per_s'])}/s out"
    )
    for error, count in requests["errors"].items():
        typer.echo(f"          {count} x {error}")
    if told := _goodput(figures["goodput"]):
        typer.echo(told)
    typer.echo(
        f"client    {100 * client['cpu']:.0f} % of a core; its event loop was late by "
        f"{1000 * client['loop_late_p99_s']:.1f} ms (p99), so times are no finer than that"
    )
    if client["bottleneck"]:
        typer.echo("          too much of a core: these figures measure the client rather than the system")


def _table(figures: dict[str, Any]) -> list[list[str]]:
    table = [["", "mean", "p50", "p95", "p99", "max"]]
    rows = {"TTFT": "ttft", "time between tokens": "itl", "end to end": "e2e", "queue wait": "queue_wait"}
    for name, key in rows.items():
        table.append([name, *_milliseconds(figures["latency_s"][key])])
    if len(figures["tiers"]) > 1:
        for tier, latencies in figures["tiers"].items():
            table.append([f"TTFT, {tier}", *_milliseconds(latencies["ttft"])])
    return table


def _goodput(goodput: dict[str, Any]) -> str:
    """The line for it; empty where nothing was asked for."""
    limits = {"TTFT": goodput["limits_s"]["ttft"], "between tokens": goodput["limits_s"]["itl"]}
    asked = [f"{name} at most {1000 * value:g} ms" for name, value in limits.items() if value is not None]
    share = 100 * (goodput["share"] or 0.0)
    return f"goodput   {_number(goodput['per_s'])}/s, {share:.1f} % of all: {', '.join(asked)}" if asked else ""


def _title(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    how = f"{settings['rate']:g} requests/s" if settings["rate"] is not None else "closed loop"
    cap = f", at most {settings['concurrency']} at a time" if settings["concurrency"] is not None else ""
    what = (
        f"{settings['prompts']} prompts"
        if settings["prompts"]
        else f"{settings['prompt_tokens']} tokens in, {settings['output_tokens']} out"
    )
    return f"{settings['model']}: {how}{cap}; {what}; {figures['requests']['sent']} requests"


def _each(sample: Sample) -> dict[str, Any]:
    same = ("number", "tier", "due", "sent", "ended", "error", "task_id", "queue_wait", "prompt_tokens")
    return {**{name: getattr(sample, name) for name in same}, "tokens": [round(at, 6) for at in sample.tokens]}


def _milliseconds(spread: dict[str, float] | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [f"{1000 * spread[name]:,.1f} ms" for name in ("mean", "p50", "p95", "p99", "max")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def weights(text: str, option: str = "--tiers") -> dict[str, float]:
    """Tiers with weights, as the option says them. Raises Failure."""
    from producers.contract.keys import TIERS

    found = {}
    for part in text.split(","):
        tier, equals, weight = part.strip().partition("=")
        try:
            found[tier] = float(weight) if equals else 1.0
        except ValueError:
            found[tier] = -1.0
        if tier not in TIERS or not 0 < found[tier] < float("inf"):
            raise Failure(f"{option} has {part!r}; it takes {', '.join(TIERS)}, each with a weight above 0 after =")
    return found


def check_writable(path: Path | None) -> None:
    """Refuses an unwritable output file before the work, rather than after it. Raises Failure."""
    if path is not None:
        with touching(path, "write"):
            path.open("a").close()
