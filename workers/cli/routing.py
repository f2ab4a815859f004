"""`penstock models alias`, `split`, `rule`, `stage`, `shadow`, `routing`, `versions`: where new tasks go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.exits import Failure
from workers.cli.models import app
from workers.cli.options import Broker, DataDir, Json, OfTenant, OfTier, Store, StoredModel
from workers.cli.servers import open_store
from workers.cli.terminal import aligned, say

if TYPE_CHECKING:
    from redis import Redis

    from producers.store.fleet.routing import Routing, Rule
    from producers.store.shadows import Report

IfGeneration = Annotated[
    int | None,
    typer.Option(
        "--if-generation",
        metavar="GENERATION",
        min=0,
        help="Change it only if it still has the generation that was looked at; 0: none yet.",
    ),
]


def _parted(items: Sequence[str], expected: str) -> dict[str, str]:
    """`NAME=VALUE` of each. Raises Failure for another form, and for a name that is given twice."""
    parted: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise Failure(f"{item!r} is not {expected}")
        if parted.setdefault(name, value) != value:
            raise Failure(f"{name} is given twice")
    return parted


@app.shown("penstock models alias tiny default=34b1e3f2 --data-dir data")
def alias(
    name: StoredModel,
    aliases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALIAS=VERSION...]",
            help="Let an alias name a version, or what another alias names. `default` is where tasks go that nothing "
            "else decides.",
        ),
    ] = None,
    remove: Annotated[list[str] | None, typer.Option("--rm", metavar="ALIAS", help="Remove an alias.")] = None,
    generation: IfGeneration = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Give versions of a model names: a task's `model` may be NAME@ALIAS. Without arguments: show them.

    `default=VERSION` moves all new tasks to that version within a second, and back again: workers of both versions go
    on with what they have. A change is one step for all gateways, and stands in the audit log.
    """
    from producers.admin import routes

    with open_store(broker, store, data_dir) as records:
        changes, removed = _parted(aliases or (), "ALIAS=VERSION"), remove or ()
        state = before = routes.current(records, name)
        if changes or removed:
            state = routes.set_aliases(records, name, changes, removed, generation)
        _show(state, as_json)
        _show_replaced(records, before, state, as_json)


@app.shown("penstock models split tiny candidate=5 --data-dir data")
def split(
    name: StoredModel,
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET=PERCENT...]", help="An alias or a version, and its part of new tasks."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the split: the default gets all tasks.")] = False,
    sticky: Annotated[
        str | None,
        typer.Option(
            metavar="caller|tenant",
            help="What keeps tasks together: the caller's key (`sticky`, the header Penstock-Sticky, `user`), or their "
            "tenant.  [default: caller]",
        ),
    ] = None,
    generation: IfGeneration = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Send parts of a model's new tasks to other versions; the default gets the rest. Without arguments: show it.

    Tasks with equal keys go to the same version, and a change of a percentage moves few more of them than it has to.
    """
    from producers.admin import routes

    percents = {target: _percent(target, value) for target, value in _parted(parts or (), "TARGET=PERCENT").items()}
    if off and percents:
        raise Failure("--off ends the split: give no parts with it")
    with open_store(broker, store, data_dir) as records:
        state = before = routes.current(records, name)
        if percents or off or sticky:
            state = routes.set_split(records, name, percents if percents or off else None, sticky, generation)
        _show(state, as_json)
        _show_replaced(records, before, state, as_json)


@app.shown("penstock models rule tiny --tenant acme --to candidate --data-dir data")
def rule(
    name: StoredModel,
    to: Annotated[str | None, typer.Option(metavar="TARGET", help="An alias or a version.")] = None,
    tenant: OfTenant = None,
    tier: OfTier = None,
    header: Annotated[
        str | None, typer.Option(metavar="'NAME: VALUE'", help="Tasks whose request has this header.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all rules first.")] = False,
    generation: IfGeneration = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Send some tasks of a model to a version, before the split: of a tenant, a tier, or with a header.

    A rule is added behind the others; the first that fits decides. Without arguments: show them.
    """
    from producers.admin import routes
    from producers.store.fleet.routing import Rule

    conditions = (tenant, tier, header)
    if (to is None) != (conditions == (None, None, None)):
        raise Failure("a rule needs --to TARGET, and one of --tenant, --tier and --header")
    with open_store(broker, store, data_dir) as records:
        new = [] if to is None else [Rule(to, *conditions)]
        state = before = routes.current(records, name)
        if clear:
            state = routes.set_rules(records, name, new, generation)
        elif new:
            state = routes.add_rule(records, name, new[0], generation)
        _show(state, as_json)
        _show_replaced(records, before, state, as_json)


@app.shown(
    "penstock models stage tiny 34b1e3f2=approved --reason 'passed evaluation' --data-dir data",
)
def stage(
    name: StoredModel,
    stages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERSION=STAGE...]",
            help="A version, or an alias of it, and its stage: none, staging, approved or archived.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; for the audit log.")] = "",
    require: Annotated[
        bool | None,
        typer.Option(
            "--require-approval/--no-require-approval",
            help="Whether the default, the split and rules may lead to approved versions alone.",
        ),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say how far versions of a model have come. Without arguments: show it.

    An archived version gets no new tasks, and no alias, split or rule may lead to it. With --require-approval, what
    decides where tasks go by itself may lead to approved versions alone; an alias may lead to any, for those who name
    it. Who changed which stage, when and why stands in the audit log.
    """
    from producers.admin import routes

    changes = _parted(stages or (), "VERSION=STAGE")
    with open_store(broker, store, data_dir) as records:
        state = routes.set_stages(records, name, changes, reason) if changes else None
        if require is not None:
            state = routes.set_approval(records, name, required=require)
        _show(state or routes.current(records, name), as_json)


@app.shown("penstock models shadow tiny --to candidate --percent 5 --data-dir data")
def shadow(
    name: StoredModel,
    to: Annotated[str | None, typer.Option(metavar="TARGET", help="An alias or a version that gets copies.")] = None,
    percent: Annotated[
        float | None, typer.Option(help="How many percent of the tasks of other versions are copied.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Copy nothing more.")] = False,
    pairs: Annotated[int, typer.Option(min=0, max=1000, help="Show so many of the latest pairs, too.")] = 0,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Copy a sample of a model's new tasks to another version, and compare the outputs. Alone: show how they compare.

    Callers notice nothing: copies have the tier batch and the tenant ~shadow, are charged to nobody, and give way as
    soon as live tasks wait for the version. A sweeper makes them; so there must be one, and a worker of the version.
    """
    from producers.admin import routes
    from producers.store import shadows
    from producers.store.fleet.routing import Shadow

    if (to is None) != (percent is None) or (off and to is not None):
        raise Failure("give --to TARGET and --percent together, or --off, or nothing of them")
    with open_store(broker, store, data_dir) as records:
        if to is not None and percent is not None:
            state = routes.set_shadow(records, name, Shadow(to, percent))
        else:
            state = routes.set_shadow(records, name, None) if off else routes.current(records, name)
        entries, drops = (records.execute_command(*command) for command in shadows.pairs_read(name, shadows.KEPT))
        _show_pairs(state, shadows.Report.of(entries, drops), pairs, as_json)


def _show_pairs(state: Routing, report: Report, limit: int, as_json: bool) -> None:
    from producers.store.shadows import summaries

    between = summaries(report.pairs)
    if as_json:
        target = None if state.shadow is None else asdict(state.shadow)
        shown: dict[str, Any] = {"model": state.model, "shadow": target, "drops": dict(report.drops)}
        shown |= {"summaries": list(map(asdict, between)), "pairs": list(map(asdict, report.pairs[:limit]))}
        typer.echo(json.dumps(shown))
        return
    where = "nothing is copied" if state.shadow is None else f"{state.shadow.percent:g}% go to {state.shadow.to}, too"
    say(f"{state.model}: {where}")
    for each in between:
        say(f"  {each.version} and {each.shadow}: {each.pairs} pairs, of which both completed {each.completed}")
        if each.completed:
            say(f"    tokens before the first difference: {each.same:.1%}; equal outputs: {each.equal:.1%}")
            length = "" if each.length is None else f"; tokens: {each.length:.2f} times as many"
            duration = "" if each.time is None else f"; time: {each.time:.2f} times as long"
            say(f"    same finish reasons: {each.same_reason:.1%}{length}{duration}")
    if report.drops:
        say("  dropped: " + ", ".join(f"{count} {reason}" for reason, count in report.drops.items()))
    for row in report.pairs[:limit]:
        same = "-" if row.same is None else f"{row.same:.1%}"
        say(f"  {row.task}  {' '.join(row.statuses)}  tokens {row.tokens[0]} {row.tokens[1]}  same {same}")


@app.shown("penstock models routing tiny --history --data-dir data")
def routing(
    name: StoredModel,
    history: Annotated[bool, typer.Option("--history", help="Show what it was before, too.")] = False,
    back_to: Annotated[
        int | None, typer.Option(metavar="GENERATION", min=1, help="Restore what an earlier generation said.")
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show where a model's new tasks go: its aliases, split and rules; or restore an earlier state of them."""
    from producers.admin import routes
    from producers.store.fleet import routing as kept

    with open_store(broker, store, data_dir) as records:
        state = routes.current(records, name) if back_to is None else routes.restore(records, name, back_to)
        _show(state, as_json)
        for old in kept.history(records, name)[1:] if history else ():
            _show(old, as_json)


@app.shown("penstock models versions tiny --data-dir data")
def versions(
    name: StoredModel, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """List the versions of a model that the store knows: those that were published, or that workers announced."""
    from producers.admin import routes
    from producers.contract import keys
    from producers.store.fleet import cards

    with open_store(broker, store, data_dir) as records:
        state = routes.current(records, name)
        versions = cards.versions_of(records.hgetall(keys.VERSIONS), name)
    for version, card in versions.items():
        aliases = sorted(at for at, named in {"default": state.default, **state.aliases}.items() if named == version)
        if as_json:
            row = {"name": name, "version": version, "aliases": aliases, "stage": state.stage(version)}
            typer.echo(json.dumps({**row, "at": card.get("at")}))
            continue
        say(f"{version}  {_when(card.get('at', 0))}  {state.stage(version):8}  {', '.join(aliases)}".rstrip())


def _percent(target: str, value: str) -> float:
    try:
        return float(value.removesuffix("%"))
    except ValueError:
        raise Failure(f"{target} has {value!r}; a part of a split is a number, in percent") from None


def _show(state: Routing, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"model": state.model, **json.loads(state.to_json())}))
        return
    by = f", {_when(state.at)} by {state.by}" if state.generation else ": new tasks go to the model's default"
    say(f"{state.model}: generation {state.generation}{by}")
    rows: list[tuple[str, ...]] = [("  default", state.default, _default_share(state.split))]
    rows += [(f"  {name}", version, _part(state.split, name)) for name, version in sorted(state.aliases.items())]
    rows += [
        ("  (version)", target, _part(state.split, target)) for target in state.split if target not in state.aliases
    ]
    for line in aligned(rows, 3):
        say(line)
    for number, each in enumerate(state.rules, 1):
        say(f"  rule {number}: {_condition(each)} go to {each.to}")
    for version, its_stage in sorted(state.stages.items()):
        say(f"  {version} is {its_stage}")
    if state.shadow is not None:
        say(f"  {state.shadow.percent:g}% of other versions' tasks are copied to {state.shadow.to}")
    if state.approval:
        say("  the default, the split and rules lead to approved versions alone")
    if state.split:
        say(f"  tasks stay together by their {'key' if state.sticky == 'caller' else 'tenant'}")


def _show_replaced(store: Redis, before: Routing, after: Routing, as_json: bool) -> None:
    """What a change replaced, and who had set it when: perhaps somebody else, a moment ago."""
    from producers.store.fleet.routing import history

    if as_json or after.generation == before.generation:
        return
    states = {state.generation: state for state in history(store, after.model)}
    replaced = states.get(after.generation - 1, before)
    was = {"default": replaced.default, **replaced.aliases}
    now = {"default": after.default, **after.aliases}
    changed = [f"{name} was {to}" for name, to in was.items() if now.get(name) != to]
    if replaced.split != after.split:
        parts = ", ".join(f"{to} {percent:g}%" for to, percent in replaced.split.items())
        changed.append(f"the split was {parts or 'off'}")
    if replaced.rules != after.rules:
        changed.append(f"there were {len(replaced.rules)} rules")
    if changed:
        by = f", of {_when(replaced.at)} by {replaced.by}" if replaced.generation else ""
        say(f"  before, in generation {replaced.generation}{by}: {'; '.join(changed)}")


def _part(split: Mapping[str, float], target: str) -> str:
    return f"{split[target]:g}%" if target in split else ""


def _default_share(split: Mapping[str, float]) -> str:
    return f"{100 - sum(split.values()):g}%"


def _condition(rule: Rule) -> str:
    facts: dict[str, Any] = {"tenant": rule.tenant, "tier": rule.tier, "header": rule.header}
    return next(f"tasks with {name} {value!r}" for name, value in facts.items() if value is not None)


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
