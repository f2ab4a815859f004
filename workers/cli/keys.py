"""`penstock tenants`, `keys`, `audit` and `usage`: who may use a system, who changed that, and who used how much.

They need the store, and no gateway; tenants also the broker.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, refusing
from workers.cli.options import Broker, DataDir, Json, Prices, Store, takes
from workers.cli.servers import records, system
from workers.cli.terminal import aligned, say

if TYPE_CHECKING:
    from producers.store.access.api_keys import Key
    from producers.store.usage.report import Report

MONEY: Final = "budget_money"
#: What limits may be set, and the help of their options.
LIMITS: Final = {
    "rpm": "Most tasks that may be submitted in a minute.",
    "tpm": "Most tokens that the tasks of a minute may need.",
    "max_in_flight": "Most tasks that have not ended.",
    "budget_tokens": "Most tokens in a month (UTC).",
    MONEY: "Most that tasks may cost in a month, in the prices' currency.",
    "max_prompt": "Most tokens of a prompt.",
    "max_output": "Most tokens of a choice's output.",
    "max_waiting": "Most tasks that wait for a worker.",
    "max_streams": "Most streams and waiting requests that are open at one gateway process.",
    "shorten_to": "Most tokens of a choice's output under overload, default tier.",
}
#: The same of a tenant alone: what is kept for it.
KEPT: Final = {
    "max_file_bytes": "Most bytes of all files that are kept.",
    "max_files": "Most files that are kept.",
    "max_batches": "Most batches that have not ended.",
    "max_lines": "Most lines of batches that wait, run, or are to be written.",
    "max_endpoints": "Most webhook endpoints.",
    "max_task_bytes": "Most bytes of tasks and their results that are kept.",
    "max_idempotency_keys": "Most idempotency keys that begin within a day.",
}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id; `penstock keys ls` shows all.")]
SCOPES = "What it may do, of submit, read, cancel, metrics and admin, between commas. Unset: submit,read,cancel."
tenant_commands = Commands(
    "Operations", OPERATOR_STATUS, "tenants", "Tenants, the weights by which they share each tier, and their limits."
)
key_commands = Commands("Operations", OPERATOR_STATUS, "keys", "API keys: make, list, rotate, disable and revoke them.")
#: The columns that a person sees, and their heads.
_COLUMNS = {
    "tasks": "tasks",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "recomputed_tokens": "recomputed",
    "seconds": "seconds",
    "engine_seconds": "engine s",
    "idle_seconds": "idle s",
    "starting_seconds": "starting s",
    "joules": "joules",
    "overhead_joules": "overhead J",
    "device_cost": "device",
    "overhead_cost": "overhead",
    "cost": "cost",
}
usage_app = Commands("Operations", OPERATOR_STATUS)


def limit_options(kind: type) -> list[Parameter]:
    """The options of a key's limits, as numbers or, for `limits`, as texts."""
    return _limit_options(LIMITS, kind)


def tenant_limit_options() -> list[Parameter]:
    """The options of a tenant's limits, as texts."""
    return _limit_options({name: help_text for name, help_text in LIMITS.items() if name != "shorten_to"} | KEPT, str)


def _limit_options(helps: Mapping[str, str], kind: type) -> list[Parameter]:
    kinds = {name: str if name == MONEY else kind for name in helps}
    annotations = {
        name: Annotated[value_type | None, typer.Option(help=helps[name])] for name, value_type in kinds.items()
    }
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


app = Commands("Operations", OPERATOR_STATUS)
app.add_typer(key_commands)


@key_commands.shown("penstock keys create --tenant acme --scopes submit,read --expires 30d")
@takes(bounds=limit_options(int))
def create(
    *,
    tenant: Annotated[str, typer.Option(help="Whose key it is: what it makes is this tenant's.")],
    name: Annotated[str | None, typer.Option(help="What people call the key. Unset: the tenant.")] = None,
    scopes: Annotated[str | None, typer.Option(help=SCOPES)] = None,
    models: Annotated[str | None, typer.Option(help="Models that it may use, between commas. Unset: all.")] = None,
    tiers: Annotated[str | None, typer.Option(help="Tiers that it may use, between commas. Unset: all.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 30d, 12h, or 2027-01-31 (UTC). Unset: never.")
    ] = None,
    bounds: dict[str, Any],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it. Nothing can show it again: the store keeps a hash."""
    fields = {
        "tenant": tenant,
        "name": name,
        "scopes": _names(scopes),
        "models": _names(models),
        "tiers": _names(tiers),
        "expires_at": _moment(expires, "--expires"),
        **bounds,
    }
    from producers.admin import keys
    from producers.store.access.api_keys import TooManyKeys
    from producers.store.access.audit import Actor, operator

    with records(broker, store, data_dir) as (client, loop):
        try:
            created = loop.run(keys.create(client, fields, Actor(operator())))
        except TooManyKeys:
            raise Failure("there are 10,000 keys, the most; revoke one first") from None
    _shown_once(*created, as_json)


@key_commands.shown("penstock keys ls --tenant acme", "ls")
def listed(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="The beginning of an id or of a key.")] = "",
    tenant: Annotated[str | None, typer.Option(help="Keys of this tenant.")] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List keys, the newest first: id, state, tenant, scopes, name."""
    from producers.admin import keys

    with records(broker, store, data_dir) as (client, loop):
        descriptions = [keys.view(key, time.time()) for key in loop.run(keys.matching(client, prefix, tenant))]
    for key in descriptions:
        line = f"{key['id']}  {key['state']:<8}  {key['tenant']}  {','.join(key['scopes'])}  {key['name']}"
        say(json.dumps(key) if as_json else line)
    if not descriptions and not as_json:
        typer.echo("There are no such keys." if prefix or tenant else "There are no keys.")


@key_commands.shown("penstock keys show 3k9vq0x7m2c4t8da")
def show(
    key_id: KeyId, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Show a key: its state, tenant, scopes, models, tiers and times."""
    from producers.store.access import api_keys

    with records(broker, store, data_dir) as (client, loop):
        key = _existing(loop.run(api_keys.get(client, key_id)), key_id)
    _described(key, as_json)


@key_commands.shown("penstock keys limit 3k9vq0x7m2c4t8da --rpm 60 --budget-tokens none")
@takes(bounds=limit_options(str))
def limit(
    key_id: KeyId,
    *,
    bounds: dict[str, Any],
    models: Annotated[str | None, typer.Option(help="Models that it may use, between commas; none: all.")] = None,
    tiers: Annotated[str | None, typer.Option(help="Tiers that it may use, between commas; none: all.")] = None,
    expires: Annotated[str | None, typer.Option(help="When it ends, as of `keys create`; none: never.")] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change what a key may use; `none` unsets a limit. Gateways know it within a second.

    What was counted before stays counted; a key without limits counts nothing.
    """
    changes: dict[str, Any] = {**parsed_limits(bounds)}
    for name, text in (("models", models), ("tiers", tiers)):
        if text is not None:
            changes[name] = None if text == "none" else _names(text)
    if expires is not None:
        changes["expires_at"] = None if expires == "none" else _moment(expires, "--expires")
    if not changes:
        raise Failure("nothing is to change; `penstock keys limit --help` shows what may")
    from producers.admin import keys
    from producers.store.access.audit import Actor, operator

    with records(broker, store, data_dir) as (client, loop):
        key = _existing(loop.run(keys.change(client, key_id, changes, Actor(operator()))), key_id)
    _described(key, as_json)


@key_commands.shown("penstock keys rotate 3k9vq0x7m2c4t8da --overlap 1h")
def rotate(
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="Time for which the old secret still works; 0: not at all.")] = "24h",
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Give a key a new secret and print it. The id stays, and the old secret works until the overlap ends."""
    from producers.admin import keys
    from producers.store.access.audit import Actor, operator

    seconds = _duration(overlap, "--overlap")
    with records(broker, store, data_dir) as (client, loop):
        rotated = loop.run(keys.rotate(client, key_id, seconds, Actor(operator())))
    _shown_once(_existing(rotated and rotated[0], key_id), rotated[1] if rotated else "", as_json)


@key_commands.shown("penstock keys disable 3k9vq0x7m2c4t8da")
def disable(
    key_id: KeyId, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Let a key in no more, until it is enabled."""
    _turn("disable", key_id, (broker, store, data_dir), as_json)


@key_commands.shown("penstock keys enable 3k9vq0x7m2c4t8da")
def enable(
    key_id: KeyId, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Let a key in again that was disabled."""
    _turn("enable", key_id, (broker, store, data_dir), as_json)


@key_commands.shown("penstock keys revoke 3k9vq0x7m2c4t8da --store redis://10.0.0.5:6379/0")
def revoke(
    key_id: KeyId, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """End a key for good. Gateways know it within a second."""
    _turn("revoke", key_id, (broker, store, data_dir), as_json)


@key_commands.shown("penstock keys confirm --all")
def confirm(
    key_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The keys' ids.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All keys that a restore disabled.")] = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Let keys in again that a restore without a journal disabled. Others stay as they are."""
    from producers.admin import keys
    from producers.store.access import api_keys
    from producers.store.access.audit import Actor, operator

    if bool(key_ids) == every:
        raise Failure("name keys by id, or say --all")
    with records(broker, store, data_dir) as (client, loop):
        ids = [key.id for key in loop.run(api_keys.every(client)) if key.unconfirmed] if every else key_ids or []
        for key_id in ids:
            key = _existing(loop.run(keys.turn(client, key_id, "confirm", Actor(operator()))), key_id)
            description = keys.view(key, time.time())
            typer.echo(json.dumps(description) if as_json else f"{key.id} is {description['state']}")
    if not ids and not as_json:
        typer.echo("No key waits to be confirmed.")


@app.shown("penstock audit --limit 20")
def audit(
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Most changes to list.")] = 50,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List changes of keys, webhook endpoints and models' versions, the latest first, and who made them."""
    from producers.store.access.audit import latest

    with records(broker, store, data_dir) as (client, loop):
        changes = loop.run(latest(client, limit))
    for change in changes:
        whose = f"  tenant {change['tenant']}" if change.get("tenant") else ""
        address = f" from {change['address']}" if change.get("address") else ""
        line = f"{_when(change['at'] // 1000)}  {change['did']}  {change['what']}{whose}  by {change['by']}{address}"
        say(json.dumps(change) if as_json else line)


def _turn(verb: str, key_id: str, servers: tuple[Any, Any, Any], as_json: bool) -> None:
    from producers.admin import keys
    from producers.store.access.audit import Actor, operator

    with records(*servers) as (client, loop):
        key = _existing(loop.run(keys.turn(client, key_id, verb, Actor(operator()))), key_id)
    description = keys.view(key, time.time())
    typer.echo(json.dumps(description) if as_json else f"{key.id} is {description['state']}")


def _existing(key: Key | None, key_id: str) -> Key:
    from producers.store.access.api_keys import without_secret

    if key is None:
        raise Failure(f"there is no key with the id {without_secret(key_id)}; `penstock keys ls` shows all")
    return key


def _shown_once(key: Key, token: str, as_json: bool) -> None:
    from producers.admin.keys import view

    if as_json:
        typer.echo(json.dumps({"key": token, **view(key, time.time())}))
        return
    typer.echo(f"The key {key.id}, shown this once; callers send it as `Authorization: Bearer KEY`:", err=True)
    typer.echo(token)


def _described(key: Key, as_json: bool) -> None:
    from producers.admin import keys

    description = keys.view(key, time.time())
    if as_json:
        typer.echo(json.dumps(description))
        return
    for name, value in description.items():
        if value is None or value == ():
            continue
        text = ", ".join(value) if isinstance(value, tuple) else value
        say(f"{name:<16} {_when(value) if name.endswith(('_at', '_until')) else text}")


def parsed_limits(options: Mapping[str, str]) -> dict[str, int | str | None]:
    """The limits in options that were given; `none` unsets one. Raises Failure for what is no number."""
    for name, value in options.items():
        if value != "none" and name != MONEY and re.fullmatch(r"[0-9]{1,100}", value) is None:
            raise Failure(f"--{name.replace('_', '-')} is {value!r}; it must be a whole number, or none")
    return {n: None if value == "none" else value if n == MONEY else int(value) for n, value in options.items()}


def _names(text: str | None) -> list[str] | None:
    """The names in an option, between commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _duration(text: str, option: str) -> int:
    """Seconds. Raises Failure for what is no length of time."""
    read = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if read is None and text != "0":
        raise Failure(f"{option} is {text!r}; it must look like 24h, 30m or 7d, or be 0")
    return 0 if read is None else int(read[1]) * _SECONDS[read[2]]


def _moment(text: str | None, option: str) -> int | None:
    """Unix seconds of a time, or of the end of a length of time that begins now. Raises Failure."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}[smhdw]", text):
        return int(time.time()) + _duration(text, option)
    try:
        at = datetime.fromisoformat(text)
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise Failure(
            f"{option} is {text!r}; it must look like 30d, 12h, 2027-01-31 or 2027-01-31T08:00+01:00"
        ) from None


def _when(seconds: int) -> str:
    """A time as it is shown, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@tenant_commands.shown("penstock tenants ls", "ls")
def list_tenants(broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List tenants with waiting tasks, by tier, and tenants with a weight."""
    from producers.admin.tenants import tenants

    with system(broker, store, data_dir) as (client, loop):
        rows, unsorted = loop.run(tenants(client))
    for row in rows:
        if as_json:
            typer.echo(json.dumps({"tenant": row.name, "weight": row.weight, "waiting": row.waiting}))
            continue
        waiting = ", ".join(f"{count} {tier}" for tier, count in row.waiting.items() if count) or "nothing"
        name = row.name or "(no tenant)"
        say(f"{name}  weight {row.weight:g}  waiting: {waiting}")
    if not as_json and not rows:
        typer.echo("No tenant has waiting tasks.")
    if not as_json and unsorted:
        typer.echo(f"{unsorted} tasks are not sorted by tenant yet: workers sort them")


@tenant_commands.shown("penstock tenants weigh acme 4 --broker redis://10.0.0.5:6379/0")
def weigh(
    tenant: Annotated[
        str, typer.Argument(help="The tenant's name as in its tasks; '' stands for all tasks without one.")
    ],
    weight: Annotated[
        float, typer.Argument(help="A tenant of weight 2 gets twice the tokens of one of weight 1. The default is 1.")
    ],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Set a tenant's weight. It applies from the next fetch on, and within seconds in running engines."""
    with system(broker, store, data_dir) as (client, loop):
        loop.run(client.broker.weigh(tenant, weight))


@tenant_commands.shown("penstock tenants limit acme --rpm 600 --budget-tokens none", "limit")
@takes(bounds=tenant_limit_options())
def limit_tenant(
    tenant: Annotated[str, typer.Argument(help="The tenant's name, as in its keys or tasks.")],
    *,
    bounds: dict[str, Any],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Change what all of a tenant's keys may use together; `none` unsets a limit. Without options, show its limits."""
    from producers.admin import tenants
    from producers.store.access.audit import Actor, operator
    from producers.store.access.tenants import TooManyTenants

    changes = parsed_limits(bounds)
    with records(broker, store, data_dir) as (client, loop):
        try:
            new = loop.run(tenants.limit(client, tenant, changes, Actor(operator())))
        except TooManyTenants:
            raise Failure("10,000 tenants have limits, the most; unset those of one first") from None
    limits = {name: getattr(new, name) for name in tenants.LIMITED}
    text = ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None) or "no limits"
    say(json.dumps({"tenant": tenant, **limits}) if as_json else f"{tenant}: {text}")


@usage_app.shown("penstock usage --by tenant,model --since 2026-11-01 --prices prices.toml")
def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(help="Group by key, tenant, model, version, tier or day. May be repeated. Unset: one line."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="A date or time (UTC), rounded down to an hour. Unset: this month's beginning.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="A date, which is included, or a time, which is not. Unset: now.")
    ] = None,
    prices: Prices = None,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Show who used how many tokens, from the ledger of ended tasks. Days and times are UTC."""
    from producers.store.usage.prices import BadPrices
    from producers.store.usage.prices import Prices as Table
    from producers.store.usage.report import BadSpan, read_by, read_span, report

    if as_json and as_csv:
        raise Failure("--json and --csv exclude each other")
    with refusing(BadSpan, BadPrices):
        parts, span = read_by(by or ()), read_span(since, until)
        table = None if prices is None else Table.read(prices)
    with records(broker, store, data_dir) as (client, loop):
        result = loop.run(report(client, *span, parts, prices=table))
    if as_csv:
        typer.echo(result.csv(), nl=False)
    elif as_json:
        for row in result.rows():
            typer.echo(json.dumps(row))
    else:
        _print_usage(result)


def _print_usage(report: Report) -> None:
    rows = report.rows()
    if not rows:
        typer.echo("No task ended in this time.")
        return
    heads = [*report.by, *(name for name in _COLUMNS if name in rows[0])]
    table = [[_COLUMNS.get(name, name) for name in heads], *([_cell(row[name]) for name in heads] for row in rows)]
    if report.currency:
        table[0][-1] = report.currency
    for line in aligned(table, len(report.by)):
        say(line)
    if unpriced := sum(row.get("unpriced_tasks", 0) for row in rows):
        typer.echo(f"{unpriced} tasks have no price: they cost nothing here")


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value) or "-"
