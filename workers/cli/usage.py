"""`penstock usage`: who used how many tokens, and what they cost. It needs the store, but no gateway."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, refusing
from workers.cli.options import DataDir, Json, KeyStore, Prices
from workers.cli.servers import records
from workers.cli.terminal import aligned, say

if TYPE_CHECKING:
    from producers.store.usage.report import Report

#: The columns that a person sees, and their heads.
_COLUMNS = {
    "tasks": "tasks",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "recomputed_tokens": "recomputed",
    "seconds": "seconds",
    "engine_seconds": "engine s",
    "cost": "cost",
}


app = Commands("Operations", OPERATOR_STATUS)


@app.shown("penstock usage --by tenant,model --since 2026-11-01 --prices prices.toml")
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
    data_dir: DataDir = None,
    store: KeyStore = None,
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
    with records(store, data_dir) as (client, loop):
        found = loop.run(report(client, *span, parts, prices=table))
    if as_csv:
        typer.echo(found.csv(), nl=False)
    elif as_json:
        for row in found.rows():
            typer.echo(json.dumps(row))
    else:
        _show(found)


def _show(found: Report) -> None:
    rows = found.rows()
    if not rows:
        typer.echo("No task ended in this time.")
        return
    heads = [*found.by, *(name for name in _COLUMNS if name in rows[0])]
    table = [[_COLUMNS.get(name, name) for name in heads], *([_cell(row[name]) for name in heads] for row in rows)]
    if found.currency:
        table[0][-1] = found.currency
    for line in aligned(table, len(found.by)):
        say(line)
    if unpriced := sum(row.get("unpriced_tasks", 0) for row in rows):
        typer.echo(f"{unpriced} tasks have no price: they cost nothing here")


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value) or "-"
