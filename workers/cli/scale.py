"""`penstock scale`: how many workers pools have and why, another try for one whose workers do not come up, a number
that an operator sets, and `scale simulate`, which runs a trace of arrivals through the scaling policy, beside others.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, refusing, touching
from workers.cli.options import Broker, DataDir, Json, Store
from workers.cli.servers import system
from workers.cli.terminal import aligned, say
from workers.cli.trials import check_writable, weights
from workers.progress import Progress, bar

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from producers.client.aio import AsyncClient
    from producers.contract.profile import Profile
    from workers.trials.simulate.compare import Compared

#: Columns of a simulation's table.
_HEADS: Final = (
    *("", "in time", "priority p99", "default p95", "worker-hours", "of clairvoyant", "cost", "most", "turns"),
)

_LATER = "no autoscaler leads; the next one tries at once"
Pool = Annotated[str, typer.Argument(help="A pool, or a model with all its pools; penstock scale ls shows all.")]


app = Commands("Operations", OPERATOR_STATUS, "scale", "Scaling: how many workers each pool has, and why.")


@app.shown("penstock scale ls", "ls")
def listed(broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the pools that are scaled, with the number of workers that each should have."""
    from workers.autoscaler.explain import summary

    with system(broker, store, data_dir) as (client, loop):
        now, states = loop.run(_states(client))
    for pool, state in states.items():
        say(json.dumps({"pool": pool, **state}) if as_json else summary(pool, state, now))
    if not states and not as_json:
        say(_nobody())


@app.shown("penstock scale explain tiny --history 20")
def explain(
    pool: Annotated[
        str | None,
        typer.Argument(help="A pool, or a model with all its pools; penstock scale ls shows all. Unset: all."),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    history: Annotated[int, typer.Option(min=0, max=10_000, help="Number of last changes to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Tell why a pool has the number of workers that it has: what was seen, the formula, limits, trouble, changes."""
    from producers.store.fleet.scaling import decisions
    from workers.autoscaler.explain import explained

    with system(broker, store, data_dir) as (client, loop):
        now, states = loop.run(_states(client))
        for name in _named(pool, states) if pool is not None else list(states):
            changes = loop.run(decisions(client.store, name, history)) if history else []
            state = states.get(name)
            if state is None and not changes:
                raise Failure(_unknown(name, states))
            if as_json:
                say(json.dumps({"pool": name, **(state or {}), "history": changes}))
            else:
                for line in explained(name, state, changes, now):
                    say(line)
    if pool is None and not states and not as_json:
        say(_nobody())


@app.shown("penstock scale retry tiny")
def retry(pool: Pool, broker: Broker = None, store: Store = None, data_dir: DataDir = None) -> None:
    """Try at once to start workers of a pool whose starts failed. The failures so far are forgotten."""
    from producers.store.fleet import scaling

    with system(broker, store, data_dir) as (client, loop):
        now, states = loop.run(_states(client))
        for name in _named(pool, states):
            if name not in states:
                raise Failure(_unknown(name, states))
            loop.run(scaling.retry(client.store, name))
            say(f"{name}: {'the next try is now' if scaling.is_fresh(states[name].get('at'), now) else _LATER}")


@app.shown("penstock scale pin tiny 2 --for 2h")
def pin(
    pool: Pool,
    workers: Annotated[int, typer.Argument(min=0, help="Its number of workers, at most its setting max.")],
    time: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="How long: 90s, 10m, 2h, at most 366d. Unset: until `scale unpin`."),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Set a pool's number of workers, in place of the policy, which goes on from there when the pin ends."""
    from producers.store.access.audit import Change, operator
    from producers.store.fleet import scaling
    from workers.cli.rollouts import seconds

    lasts = None if time is None else seconds(time)
    if lasts is not None and not scaling.SHORTEST_PIN_S <= lasts <= scaling.LONGEST_PIN_S:
        raise Failure(f"--for is {time}; it must be from 1s to 366d, or left out: until `scale unpin`")
    with system(broker, store, data_dir) as (client, loop):
        now, states = loop.run(_states(client))
        names = _named(pool, states)
        for name in names:
            if name not in states:
                raise Failure(_unknown(name, states))
            with refusing(ValueError):
                scaling.checked_pin(states[name], workers)
        for name in names:
            pinned = scaling.Pin(workers, operator(), now, None if lasts is None else now + lasts)
            change = Change(operator(), "scaling.pin", f"{name}: {workers}")
            loop.run(scaling.pin(client.store, name, pinned, change))
            leads = scaling.is_fresh(states[name].get("at"), now)
            until = "until it is unpinned" if time is None else f"for {time}"
            say(f"{name}: pinned at {workers}, {until}" + ("" if leads else f"; {_LATER.partition(';')[0]} now"))


@app.shown("penstock scale unpin tiny")
def unpin(pool: Pool, broker: Broker = None, store: Store = None, data_dir: DataDir = None) -> None:
    """Let the policy decide a pool's number of workers again."""
    from producers.store.access.audit import Change, operator
    from producers.store.fleet import scaling

    with system(broker, store, data_dir) as (client, loop):
        _, states = loop.run(_states(client))
        for name in _named(pool, states):
            removed = loop.run(scaling.unpin(client.store, name, Change(operator(), "scaling.unpin", name)))
            if not removed and name not in states:
                raise Failure(_unknown(name, states))
            say(f"{name}: {'the policy decides again' if removed else 'it was not pinned'}")


async def _states(client: AsyncClient) -> tuple[float, dict[str, dict[str, Any]]]:
    """The store's clock (unix s), and the state of each pool by its name."""
    from producers.store.fleet.scaling import states

    seconds, micros = await client.store.time()
    return seconds + micros / 1e6, dict(sorted((await states(client.store)).items()))


def _named(pool: str, states: dict[str, Any]) -> list[str]:
    """The pools that a name means: that pool, or all that are versions of a model."""
    return [pool] if pool in states else [name for name in states if name.rpartition("@")[0] == pool] or [pool]


def _unknown(pool: str, states: dict[str, Any]) -> str:
    return f"nobody scales a pool {pool}; there are {', '.join(states)}" if states else _nobody()


def _nobody() -> str:
    return "No pool is scaled: start `penstock autoscaler`, or `penstock up --min 0 --max 2`."


@app.shown("penstock scale simulate --synthetic diurnal --max 30 --cool-down 30 --plot day.svg")
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
    turn_share: Annotated[
        float, typer.Option(min=0.02, max=1, help="Part of its device's time that a worker has, beside other models.")
    ] = 1.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Time in which a worker that ends finishes tasks; it hands the rest back.")
    ] = 30.0,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL@VERSION", help="Take knee, tokens a second and cold start from this version's kept profile."
        ),
    ] = None,
    min_workers: Annotated[int, typer.Option("--min", min=0, help="Workers at least.")] = 0,
    max_workers: Annotated[int, typer.Option("--max", min=1, help="Workers at most.")] = 30,
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
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Run a trace of arrivals through the scaling policy: waits, worker-hours and cost, beside other scalers.

    The policy is the autoscaler's own code. Exit status 1: the objective was missed, or a kept decision differs.
    """
    from workers.autoscaler.pools import one_pool
    from workers.trials.simulate.compare import Objective, Settings, compared
    from workers.trials.simulate.simulation import WorkerModel
    from workers.trials.simulate.traces import Synthetic, read, write

    if sum(source is not None for source in (trace, synthetic, decisions)) != 1:
        raise Failure("give one of --trace FILE, --synthetic SHAPE and --decisions FILE")
    if decisions is not None:
        _replay(decisions, as_json)
        return
    for path in (write_trace, plot, out):
        check_writable(path)
    kept = _profile(profile, broker, store, data_dir) if profile is not None else {}
    options = {"knee": knee, "tokens_per_s": tokens_per_s, "prompt_cost": prompt_cost, "cold_start": cold_start}
    model_fields = {**kept, **{name: value for name, value in options.items() if value is not None}}
    with refusing(ValueError):
        model = WorkerModel(
            **model_fields,
            slots=slots or 2 * model_fields.get("knee", WorkerModel().knee),
            drain=drain_timeout,
            turn_share=turn_share,
        )
        rules = one_pool(
            {"model": "simulated", "min": min_workers, "max": max_workers, "cool_down": cool_down}, rule or []
        ).rules
        if trace is not None:
            with touching(trace, "read"):
                arrivals, name = read(trace), str(trace)
        else:
            shares = weights(mix, "--mix")
            drawn = (str(synthetic), tasks, duration, peak, bursts, shares, prompt_tokens, output_tokens, seed)
            arrivals, name = Synthetic(*drawn).arrivals(), f"{synthetic} with seed {seed}"
    if write_trace is not None:
        write(write_trace, arrivals)
    with Progress(quiet=as_json) as progress:
        comparison = compared(
            arrivals,
            Settings(model, rules, Objective(objective), every, price),
            compare,
            lambda scaler, at: progress.show(f"{bar(at, arrivals[-1].at)}  {scaler}"),
        )
    _report(comparison, name, plot, out, as_json)
    if not comparison.holds:
        missed = f"{comparison.met:.2%} of the priority tasks had their first token within {objective:g} s"
        raise Failure(f"the objective was missed: {missed}", Exit.TASK_FAILED)


async def kept_profile(store: Redis, version: str) -> Profile:
    """The kept measurements of a version's workers. Raises Failure."""
    from producers.connection.script import text
    from producers.contract import keys
    from producers.contract.profile import Profile

    kept = await store.execute_command("HGET", keys.PROFILES, version)
    if kept is None:
        raise Failure(
            f"no profile of {version!r} is kept; it is written as MODEL@VERSION, once a worker has measured it"
        )
    return Profile.from_json(text(kept))


def _profile(version: str, broker: str | None, store: str | None, data_dir: Path | None) -> dict[str, Any]:
    """The measurements of a version's workers. Their tokens a second count prompts like outputs."""
    with system(broker, store, data_dir) as (client, loop):
        measured = loop.run(kept_profile(client.store, version))
    start = measured.cold_start.get("total")
    fields = {"knee": measured.knee and max(1, round(measured.knee)), "tokens_per_s": measured.tokens_per_s}
    fields |= {"cold_start": start, "prompt_cost": 1.0 if measured.tokens_per_s else None}
    return {name: value for name, value in fields.items() if value is not None}


def _replay(path: Path, as_json: bool) -> None:
    from workers.trials.simulate.replay import replay

    with refusing(ValueError), touching(path, "read"):
        result = replay(path)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(f"{result.decisions} decisions computed again, {len(result.differences)} differ")
        for difference in result.differences:
            typer.echo(
                f"{difference.pool} at {difference.at:.3f}: kept {difference.kept}, computed {difference.computed}: "
                f"{difference.why}"
            )
    if result.differences:
        raise Failure(f"{len(result.differences)} decisions come out otherwise", Exit.TASK_FAILED)


def _report(comparison: Compared, name: str, plot: Path | None, out: Path | None, as_json: bool) -> None:
    """Print the figures; draw and write them."""
    from workers.trials.simulate.compare import plot as draw

    report = {"trace": name, **comparison.to_dict()}
    if plot is not None:
        plot.write_text(draw(comparison.outcomes, f"{name}: {report['tasks']:,} tasks", comparison.settings.price))
    if out is not None:
        samples = {scaler: [asdict(sample) for sample in its.samples] for scaler, its in comparison.outcomes.items()}
        out.write_text(json.dumps({**report, "samples": samples}) + "\n")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_table(report, comparison)


def _print_table(report: dict[str, Any], comparison: Compared) -> None:
    settings = comparison.settings
    model, rules = settings.model, settings.rules
    typer.echo(
        f"{report['trace']}: {report['tasks']:,} tasks; a worker: knee {model.knee}, {model.tokens_per_s:g} tokens/s, "
        f"cold start {model.cold_start:g} s; {rules.min} to {rules.max} workers, cool-down {rules.cool_down:g} s"
    )
    for line in aligned([_HEADS, *(_row(scaler, its) for scaler, its in report["scalers"].items())]):
        typer.echo(line)
    typer.echo(
        f"in time: priority's first token within {settings.objective.ttft:g} s; the objective is "
        f"{settings.objective.share:.0%}. most: with workers that drain."
    )
    typer.echo(f"All work is {report['scalers']['policy']['work_hours']:,.1f} worker-hours: no schedule needs fewer.")


def _row(scaler: str, its: dict[str, Any]) -> tuple[object, ...]:
    ratio = its["of_clairvoyant"]
    return (
        scaler,
        f"{its['priority_in_time']:.2%}",
        _seconds(its["ttft_s"], "priority", "p99"),
        _seconds(its["ttft_s"], "default", "p95"),
        f"{its['worker_hours']:,.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{its['cost']:,.2f}",
        its["most_workers"],
        its["turns"],
    )


def _seconds(times: dict[str, Any], tier: str, quantile: str) -> str:
    value = times.get(tier, {}).get(quantile)
    return "-" if value is None else f"{value:,.1f} s"
