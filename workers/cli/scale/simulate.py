"""`penstock scale simulate`: a trace of arrivals, run through the scaling policy and through others beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from workers.cli.admin.bench import check_writable, weights
from workers.cli.admin.servers import system
from workers.cli.exits import Exit, Failure, refusing, touching
from workers.cli.options import AnyBroker, Store

EXAMPLE = "penstock scale simulate --synthetic diurnal --max 30 --cool-down 30 --plot day.svg"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(help="A recorded trace: CSV with the columns time, tier, prompt_tokens, output_tokens."),
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="A drawn trace instead: diurnal, burst or flat.")
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            help="Compute kept decisions again instead, and tell which differ: what penstock scale explain "
            "--history N --json prints."
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, max=10_000_000, help="Tasks of a drawn trace.")] = 100_000,
    duration: Annotated[float, typer.Option(min=1, help="Length of a drawn trace, in seconds.")] = 86_400.0,
    peak: Annotated[float, typer.Option(help="Rate of the busiest hour of a drawn day, in means: 1 to 2.")] = 1.75,
    bursts: Annotated[
        int, typer.Option(min=0, help="Bursts of a drawn trace: 2 to 4 times the rate, for 2 to 10 minutes.")
    ] = 12,
    mix: Annotated[
        str, typer.Option(help="Tiers of a drawn trace, with weights.")
    ] = "priority=20,default=40,flex=15,batch=25",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean prompt of a drawn trace, in tokens.")] = 1200,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean output of a drawn trace, in tokens.")] = 1500,
    seed: Annotated[int, typer.Option(help="Random seed of a drawn trace.")] = 0,
    write_trace: Annotated[Path | None, typer.Option(help="Write the trace to this CSV file.")] = None,
    knee: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences from which on more raise a worker's throughput little. Unset: 16."),
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Tokens a second that a worker generates at its knee. Unset: 320.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Most sequences in a worker's batch. Unset: twice the knee.")
    ] = None,
    prompt_cost: Annotated[
        float | None, typer.Option(min=0, help="Cost of a prompt's token, in tokens of the output. Unset: 0.05.")
    ] = None,
    cold_start: Annotated[
        float | None, typer.Option(min=0, help="Time from the order to start a worker until it takes tasks. Unset: 60.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Time in which a worker that ends finishes tasks; it hands the rest back.")
    ] = 30.0,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL@VERSION", help="Take knee, tokens a second and cold start from this version's kept profile."
        ),
    ] = None,
    least: Annotated[int, typer.Option("--min", min=0, help="Workers at least.")] = 0,
    most: Annotated[int, typer.Option("--max", min=1, help="Workers at most.")] = 30,
    cool_down: Annotated[float | None, typer.Option(help="Interval of scaling in, in seconds. Unset: 300.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any other rule of the policy, as headroom=0.9 or target_wait.default=5. May be repeated.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, max=15, help="Interval of the policy's decisions.")] = 1.0,
    objective: Annotated[
        float, typer.Option(min=0, help="TTFT from the arrival that 99 % of priority tasks should have, in seconds.")
    ] = 2.0,
    compare: Annotated[
        bool, typer.Option(help="Simulate KEDA's listLength, an HPA on CPU and a clairvoyant schedule, too.")
    ] = True,
    price: Annotated[float, typer.Option(min=0, help="Price of a worker-hour.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw queue, workers, TTFT and cost into this SVG file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the figures, and samples of each minute, to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Run a trace of arrivals through the scaling policy: waits, worker-hours and cost, beside other scalers.

    The policy is the autoscaler's own code. Exit status 1: the objective was missed, or a kept decision differs.
    """
    from workers.autoscaler.config import one_pool
    from workers.autoscaler.simulate.compare import Objective, Settings, compared
    from workers.autoscaler.simulate.synthetic import Synthetic
    from workers.autoscaler.simulate.trace import read, write
    from workers.autoscaler.simulate.worker import WorkerModel
    from workers.cli.scale.simulated import progress, report

    if sum(one is not None for one in (trace, synthetic, decisions)) != 1:
        raise Failure("give one of --trace FILE, --synthetic SHAPE and --decisions FILE")
    if decisions is not None:
        _replay(decisions, as_json)
        return
    for path in (write_trace, plot, out):
        check_writable(path)
    kept = _profile(profile, broker, store) if profile is not None else {}
    asked = {"knee": knee, "tokens_per_s": tokens_per_s, "prompt_cost": prompt_cost, "cold_start": cold_start}
    told = {**kept, **{name: value for name, value in asked.items() if value is not None}}
    with refusing(ValueError):
        model = WorkerModel(**told, slots=slots or 2 * told.get("knee", WorkerModel().knee), drain=drain_timeout)
        rules = one_pool({"model": "simulated", "min": least, "max": most, "cool_down": cool_down}, rule or []).rules
        if trace is not None:
            with touching(trace, "read"):
                arrivals, name = read(trace), str(trace)
        else:
            shares = weights(mix, "--mix")
            drawn = (str(synthetic), tasks, duration, peak, bursts, shares, prompt_tokens, output_tokens, seed)
            arrivals, name = Synthetic(*drawn).arrivals(), f"{synthetic} with seed {seed}"
    if write_trace is not None:
        write(write_trace, arrivals)
    with progress(arrivals[-1].at) as note:
        found = compared(arrivals, Settings(model, rules, Objective(objective), every, price), compare, note)
    report(found, name, plot, out, as_json)
    if not found.holds:
        missed = f"{found.met:.2%} of the priority tasks had their first token within {objective:g} s"
        raise Failure(f"the objective was missed: {missed}", Exit.TASK_FAILED)


def _profile(version: str, broker: str | None, store: str | None) -> dict[str, Any]:
    """The measurements of a version's workers. Their tokens a second count prompts like outputs."""
    from producers.connection.script import text
    from producers.contract import keys
    from producers.contract.profile import Profile

    with system(broker, store) as (client, loop):
        kept = loop.run(client.store.execute_command("HGET", keys.PROFILES, version))
    if kept is None:
        raise Failure(
            f"no profile of {version!r} is kept; it is written as MODEL@VERSION, once a worker has measured it"
        )
    measured = Profile.from_json(text(kept))
    start = measured.cold_start.get("total")
    found = {"knee": measured.knee and max(1, round(measured.knee)), "tokens_per_s": measured.tokens_per_s}
    found |= {"cold_start": start, "prompt_cost": 1.0 if measured.tokens_per_s else None}
    return {name: value for name, value in found.items() if value is not None}


def _replay(path: Path, as_json: bool) -> None:
    from workers.autoscaler.simulate.replay import replay

    with refusing(ValueError), touching(path, "read"):
        found = replay(path)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        typer.echo(f"{found.decisions} decisions computed again, {len(found.differences)} differ")
        for one in found.differences:
            typer.echo(f"{one.pool} at {one.at:.3f}: kept {one.kept}, computed {one.computed}: {one.why}")
    if found.differences:
        raise Failure(f"{len(found.differences)} decisions come out otherwise", Exit.TASK_FAILED)
