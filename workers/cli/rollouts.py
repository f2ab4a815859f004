"""`penstock rollout` replaces a model's version: at once (`now`), or by steps that are judged (`start` and others)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, needs, refusing, touching
from workers.cli.options import MODEL, Broker, DataDir, Json, Store, StoredModel, complete_model, find_models, finite
from workers.cli.servers import open_store
from workers.cli.terminal import aligned, note, say

if TYPE_CHECKING:
    from redis import Redis

    from producers.store.fleet.canaries import Canary, Plan
    from producers.store.fleet.rollouts import Rollout
    from workers.rollout import New

#: Bytes of a file of phrases.
MAX_REFUSALS_BYTES: Final = 1 << 16
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


app = Commands(
    "Operations",
    OPERATOR_STATUS,
    "rollout",
    "Replace a model's version: by steps that are judged (`start`), or at once.",
)


class _Group(TyperGroup):
    """`penstock rollout NAME=MODEL` and its options stand for `penstock rollout now NAME=MODEL`."""

    default = "now"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else [self.default, *args])


app.info.cls = _Group


@app.shown("penstock rollout tiny=./tiny-new --broker redis://10.0.0.5:6379/0", "now")
def rollout(
    model: Annotated[
        str | None, typer.Argument(metavar="NAME=MODEL", help=MODEL, autocompletion=complete_model)
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ready workers of the new version to wait for. Unset: as many as the old one has, and at least 1.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds that the new workers may take to become ready; the old version's tasks may take longer.",
        ),
    ] = 600.0,
    drain_old: Annotated[
        bool,
        typer.Option("--drain-old", help="Tell workers of the old version to drain once nothing is left for them."),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End the model's rollout, which must not have switched yet.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show the model's last rollout, or those of all models, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rollout's last state as JSON.")] = False,
) -> None:
    """Replace a model's version by another one in one step, without a failed request; `now` may be left out.

    New workers come up first: `penstock up` starts them, and an autoscaler with a pool of the new version; elsewhere
    deploy them now. Once they are ready, new tasks go to the new version. Workers of the old version finish what was
    queued for it, which is waited for; an autoscaler may keep them for longer. If this command is ended, run it again:
    it goes on. Exit status 1: the new workers did not become ready, and nothing was switched.
    """
    if model is None and not status:
        raise Failure("name the model and its new version: penstock rollout NAME=FOLDER")
    if status and cancel:
        raise Failure("give --status or --cancel, not both")

    import asyncio

    from workers.connect import connect

    with _refusals():
        urls = _checked(broker, store, data_dir)
        with connect(urls[1]) as client:
            if status or cancel:
                records = _rollouts(client, model) if status else [_cancelled(client, str(model))]
                if not records:
                    note("No model has a rollout.")
                for record in records:
                    _print_rollout(record, as_json)
                return
            ended = asyncio.run(_carried(urls, client, _new_version(str(model), urls), workers, timeout, drain_old))
    _print_rollout(ended, as_json)
    if ended.phase != "done":
        raise Failure(f"the rollout is {ended.phase}: {ended.reason}", Exit.TASK_FAILED)


def _new_version(reference: str, urls: tuple[str, str]) -> New:
    """The new version, checked. On SQS its queues are made."""
    from producers.contract import keys
    from producers.contract.levels import beside
    from workers.connect import check_queues
    from workers.library.reference import described, split_reference, version_of
    from workers.rollout import New

    (model,) = find_models([reference])
    with needs("gateway"):
        url = split_reference(reference)[1] if version_of(reference) else ""
        new = New(model, *described(model, note), url)
    check_queues(*urls, beside(keys.version_queue(model.name, new.version)), make=True)
    return new


async def _carried(
    urls: tuple[str, str], store: Redis, new: New, workers: int | None, limit_s: float, drain_old: bool
) -> Rollout:
    """Begin the rollout, or go on with it, until it has ended."""
    from producers.admin.fleet import read_fleet
    from producers.client.aio import AsyncClient
    from workers.rollout import Carrier, begin, ready

    async with AsyncClient(*urls) as client:
        fleet = await read_fleet(client.store, client.broker)
        begun = begin(store, new, workers, ready(fleet, new.model.name))
        if begun.phase == "starting":
            note(f"{begun.model}: {begun.before} -> {begun.version}")
        return await Carrier(client, store, new, note, limit_s, drain_old).run(begun)


def _rollouts(store: Redis, model: str | None) -> list[Rollout]:
    from producers.store.fleet import rollouts
    from workers.library import name_of

    if model is None:
        return rollouts.all_of(store)
    record = rollouts.read(store, name_of(model))
    if record is None:
        raise Failure(f"{name_of(model)} was never rolled out")
    return [record]


def _cancelled(store: Redis, model: str) -> Rollout:
    from workers.library import name_of
    from workers.rollout import cancel

    return cancel(store, name_of(model))


def _print_rollout(record: Rollout, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(record)))
        return
    when = datetime.fromtimestamp(record.changed, UTC).isoformat(timespec="seconds")
    reason = f": {record.reason}" if record.reason else ""
    typer.echo(f"{record.model}  {record.before} -> {record.version}  {record.phase} since {when}{reason}")


def _checked(broker: str | None, store: str | None, data_dir: Path | None) -> tuple[str, str]:
    from workers.cli.servers import addresses
    from workers.connect import check_servers

    urls = addresses(broker, store, data_dir)
    check_servers(*urls, queues=())
    return urls


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises Failure for a bad URL, for a server that does not answer, and for Ctrl-C."""
    from producers.client.steps import FAILURES
    from producers.connection.trouble import error_text

    try:
        with refusing(ValueError):
            yield
    except FAILURES as error:
        raise Failure(
            f"broker or store do not answer ({error_text(error)}); run this again", Exit.UNREACHABLE
        ) from error
    except KeyboardInterrupt:
        raise Failure("interrupted; the rollout stays where it is: run this again to go on", Exit.INTERRUPTED) from None


def seconds(text: str) -> float:
    """A time such as `90`, `90s`, `10m`, `2h`. Raises Failure."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None:
        raise Failure(f"{text!r} is no time: write seconds, or 90s, 10m, 2h")
    return float(match[1]) * _UNITS[match[2]]


def _steps(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise Failure(f"{text!r} are no steps: write percentages with commas between, as 1,5,25,100") from None


def _metrics(changed: Sequence[str], dropped: Sequence[str]) -> dict[str, dict[str, float]]:
    """All metrics but the dropped ones, with what is changed: NAME=MARGIN or NAME=MARGIN:TOLERANCE. Raises Failure."""
    from producers.rollouts.metrics import BY_NAME, defaults, usual

    metrics = defaults()
    for name in [*dropped, *(item.partition("=")[0] for item in changed)]:
        if name not in BY_NAME:
            raise Failure(f"there is no metric {name!r}; there are {', '.join(BY_NAME)}")
        metrics.setdefault(name, usual(name))
    for item in changed:
        match = re.fullmatch(r"(\w+)=(\d*\.?\d+)(?::(\d*\.?\d+))?", item)
        if match is None:
            raise Failure(f"{item!r} is not NAME=MARGIN or NAME=MARGIN:TOLERANCE, as failed=0.02 or per_token=0:0.1")
        metrics[match[1]]["margin"] = float(match[2])
        if match[3] is not None:
            metrics[match[1]]["tolerance"] = float(match[3])
    kept = {name: values for name, values in metrics.items() if name not in dropped}
    if not kept:
        raise Failure("no metric is left: leave out one --without")
    return kept


def _phrases(file: Path | None) -> tuple[str, ...]:
    """The phrases of a file, a line each. Raises Failure."""
    if file is None:
        return ()
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_REFUSALS_BYTES + 1)
        if len(raw) > MAX_REFUSALS_BYTES:
            raise Failure(f"--refusals: {file} has more than {MAX_REFUSALS_BYTES:,} bytes")
        phrases = tuple(line for line in raw.decode("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"--refusals: {file} cannot be read as UTF-8 text: {error}") from error
    if not phrases:
        raise Failure(f"--refusals: {file} has no phrase: write one a line")
    return phrases


@app.shown("penstock rollout start tiny --to candidate --steps 1,5,25,100 --hold 10m --data-dir data")
def start(
    name: StoredModel,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="VERSION", help="The candidate: a version, an alias, or a model's FOLDER or s3:// URL."
        ),
    ],
    steps: Annotated[
        str, typer.Option(metavar="PERCENTAGES", help="Parts of new tasks; 100 makes it the default.")
    ] = "1,5,25,50,100",
    hold: Annotated[str, typer.Option(metavar="TIME", help="Shortest time of a step: 90s, 10m, 2h.")] = "10m",
    min_samples: Annotated[int, typer.Option(min=1, help="Fewest comparisons of a step.")] = 50,
    workers: Annotated[int, typer.Option(min=1, help="Ready workers of the candidate to wait for, at 0%.")] = 1,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Longest time for them to become ready.")] = "10m",
    lost: Annotated[
        str, typer.Option(metavar="TIME", help="Time without a ready worker of it after which it is rolled back.")
    ] = "30s",
    warm_up: Annotated[
        str, typer.Option(metavar="TIME", help="Time from the first traffic whose tasks' times are not compared.")
    ] = "30s",
    block: Annotated[
        str, typer.Option(metavar="TIME", help="Time whose comparisons of times count as one; 0: each counts.")
    ] = "10s",
    per_tenant: Annotated[
        int, typer.Option(min=0, help="Most tasks of one tenant that are compared in a step; 0: no bound.")
    ] = 0,
    alpha: Annotated[
        float, typer.Option(help="Probability of rolling back a candidate that is no worse: of all metrics and looks.")
    ] = 0.01,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME=MARGIN[:TOLERANCE]",
            help="How much worse a metric may become. An unknown NAME lists them.",
        ),
    ] = None,
    without: Annotated[list[str] | None, typer.Option("--without", metavar="NAME", help="Leave a metric out.")] = None,
    refusals: Annotated[
        Path | None,
        typer.Option(
            "--refusals", metavar="FILE", help="How refusals begin, a phrase a line, instead of the usual ones."
        ),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Give a candidate a growing part of a model's new tasks, compare it with the default, and promote it or roll back.

    The sweeper that leads carries it out. The candidate's workers come up first: `penstock up` and autoscalers start
    them where it is a FOLDER; else start them now. `status` says why a candidate was rolled back.
    """
    from producers.rollouts import operations
    from producers.store.fleet.canaries import Plan

    plan = Plan(
        _steps(steps),
        *(seconds(hold), min_samples, workers, seconds(timeout), seconds(lost), seconds(warm_up), alpha),
        _metrics(metric or (), without or ()),
        _phrases(refusals),
        seconds(block),
        per_tenant,
    )
    plan = _refusing(lambda: operations.checked(plan))
    reference = ""
    if "/" in to or Path(to).exists():
        to, reference = _published(name, to, broker, store, data_dir)
    with open_store(broker, store, data_dir) as records:
        state = operations.start(records, name, to, plan, reference)
        note(f"{name}: {state.before} -> {state.version}; see `penstock rollout status {name}`")
        _warn_unled(records)
        _show(records, state, as_json)


def _refusing(plan: Any) -> Plan:
    with refusing(ValueError):
        checked: Plan = plan()
    return checked


def _published(name: str, folder: str, broker: str | None, store: str | None, data_dir: Path | None) -> tuple[str, str]:
    """Add the version of a folder to the store. Returns it, and its reference."""
    from producers.store.fleet import cards
    from workers.connect import connect

    urls = _checked(broker, store, data_dir)
    new = _new_version(f"{name}={folder}", urls)
    with connect(urls[1]) as records:
        cards.add_version(records, new.card, new.files)
    return new.version, new.reference


@app.shown("penstock rollout status tiny --data-dir data")
def status(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A model; unset, all.")] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show where rollouts are, what they wait for, and what they have compared."""
    from producers.store.fleet import canaries

    with open_store(broker, store, data_dir) as records:
        states = [state for state in canaries.all_of(records) if name in (None, state.model)]
        if name is not None and not states:
            raise Failure(f"{name} has no rollout: `penstock rollout start {name} --to VERSION` begins one")
        if not states:
            note("No model has a rollout.")
        for state in states:
            _show(records, state, as_json)
        if any(state.under_way for state in states):
            _warn_unled(records)


@app.shown("penstock rollout pause tiny --data-dir data")
def pause(
    name: StoredModel, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Let a rollout stay at its step. It is still rolled back if it turns out worse."""
    from producers.rollouts import operations

    with open_store(broker, store, data_dir) as records:
        _show(records, operations.pause(records, name), as_json)


@app.shown("penstock rollout resume tiny --data-dir data")
def resume(
    name: StoredModel, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Go on with a paused rollout."""
    from producers.rollouts import operations

    with open_store(broker, store, data_dir) as records:
        _show(records, operations.resume(records, name), as_json)


@app.shown("penstock rollout promote tiny --data-dir data")
def promote(
    name: StoredModel,
    full: Annotated[bool, typer.Option("--full", help="Make the candidate the default now.")] = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Go to a rollout's next step now, whatever it has compared."""
    from producers.rollouts import operations

    with open_store(broker, store, data_dir) as records:
        _show(records, operations.promote(records, name, full=full), as_json)


@app.shown("penstock rollout abort tiny --data-dir data")
def abort(
    name: StoredModel, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """End a rollout: the default gets all tasks again, within a second."""
    from producers.rollouts import operations

    with open_store(broker, store, data_dir) as records:
        _show(records, operations.abort(records, name), as_json)


@app.shown("penstock rollout report tiny --out report.html --data-dir data")
def report(
    name: StoredModel,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there: HTML for .html, else JSON.")
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Report what a model's last rollout compared and decided, and why: as JSON, or as one HTML page with plots."""
    from producers.rollouts.report import html
    from producers.rollouts.report import report as reported
    from producers.store.fleet import canaries

    with open_store(broker, store, data_dir) as records:
        state = canaries.read(records, name)
        if state is None:
            raise Failure(f"{name} has no rollout: `penstock rollout start {name} --to VERSION` begins one")
        data = reported(records, state)
    if out is None:
        typer.echo(json.dumps(data))
        return
    with touching(out, "write"):
        out.write_text(html(data) if out.suffix == ".html" else json.dumps(data) + "\n", "utf-8")
    note(f"{name}: {state.phase}; written to {out}")


def _warn_unled(store: Redis) -> None:
    from producers.contract import keys

    if not store.exists(keys.SWEEPER):
        note("no sweeper leads (`penstock sweeper`): rollouts stand still until one does")


def _show(store: Redis, state: Canary, as_json: bool) -> None:
    from producers.rollouts.controller import start_trouble, waits_for
    from producers.rollouts.metrics import Evidence, findings
    from producers.store.fleet import canaries

    evidence = Evidence.of(canaries.read_evidence(store, state.model), state)
    found = findings(state, evidence)
    compared = evidence.compared(state.step, copies=not state.percent)
    waits = ""
    if state.under_way:
        waits = waits_for(state, found, compared, canaries.now_ms(store), start_trouble(store, state))
    if as_json:
        metrics = {finding.settings.metric.name: finding.figures() for finding in found}
        typer.echo(json.dumps({**asdict(state), "waits": waits, "metrics": metrics}))
        return
    when = datetime.fromtimestamp((state.since or state.begun) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    say(f"{state.model}: {state.before} -> {state.version}: {state.phase} at {state.percent:g}% since {when}")
    say(f"  {state.reason}")
    if waits:
        say(f"  waits {waits}")
    rows = [("  metric", "comparisons", "difference", "bounds", "odds it is worse")]
    for finding in found:
        lower, mean, upper = finding.bounds
        odds = f"{min(finding.odds, 1e9):,.3g} to 1"
        figures = (f"{100 * mean:+.1f}", f"{100 * lower:+.1f} to {100 * upper:+.1f}", odds)
        rows.append((f"  {finding.settings.metric.name}", str(finding.count), *figures))
    for line in aligned(rows, 5) if state.traffic else ():
        say(line)
