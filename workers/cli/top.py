"""`penstock top`: the system live in a terminal: totals, findings, models, workers, queues, tasks.

    each --every seconds: GET /v1/overview, /v1/fleet, /v1/tasks ─▶ screen ─▶ rich, on the terminal's other screen

Without a terminal, or with --once, it prints one screen and ends. What workers and senders wrote is shown as text:
without control characters, and never as rich's markup.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

import typer

from workers.cli.client import Gateway, Refused, Unreachable
from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS
from workers.cli.options import DEFAULT_URL, Json, Url
from workers.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType
    from rich.table import Table

#: Rows of a table on a screen that has no height.
ROWS: Final = 20
#: Columns where there is no terminal.
WIDTH: Final = 200
#: Lines of a screen that are no rows: head, findings, titles, heads of columns.
BESIDE: Final = 14
#: Statuses of tasks that are shown, those that run first.
STATUSES: Final = ("in_progress", "queued")
#: Least time (s) between two lists of tasks: a gateway reads up to 2,000 records for each status.
TASKS_S: Final = 15.0

app = Commands("Operations", OPERATOR_STATUS)


@app.shown("penstock top --url http://10.0.0.5:8000")
def top(
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds until the screen is drawn anew.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end, as without a terminal.")] = False,
    tasks: Annotated[
        bool,
        typer.Option("--tasks/--no-tasks", help="Show tasks, every 15 s at most. For them a key needs the scope read."),
    ] = True,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Watch workers, queues and tasks. Ctrl-C ends it.

    Where the gateway asks for keys, PENSTOCK_API_KEY has to hold one with the scope metrics or admin. A gateway that is
    away is tried again.
    """
    gateway = Gateway(url)
    if as_json:
        typer.echo(json.dumps(_look(gateway, tasks)))
        return
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(markup=False, highlight=False, emoji=False, width=None if terminal else WIDTH)
    if once or not terminal:
        console.print(screen(_look(gateway, tasks), gateway.url, rows=ROWS))
        return
    from rich.live import Live

    state, away = _look(gateway, tasks), ""  # what is refused is refused before the screen changes
    listed_at = time.monotonic()
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            room = max(3, (console.height - BESIDE) // 4)
            live.update(screen(state, gateway.url, away, rows=room), refresh=True)
            time.sleep(every)
            try:
                lists = tasks and time.monotonic() - listed_at >= TASKS_S
                latest = _look(gateway, lists)
                if lists:
                    listed_at = time.monotonic()
                else:
                    latest["tasks"] = state["tasks"]
                state, away = latest, ""
            except (Unreachable, Refused) as failure:
                if isinstance(failure, Refused) and failure.http_status < 500 and failure.http_status != 429:
                    raise
                away = str(failure)


def _look(gateway: Gateway, tasks: bool) -> dict[str, Any]:
    """Answers of the gateway: `overview`, `fleet`, and `tasks`, null where the key may not read them."""
    state: dict[str, Any] = {
        "overview": gateway.json("GET", "/v1/overview"),
        "fleet": gateway.json("GET", "/v1/fleet?max_age=2"),
        "tasks": None,
    }
    if tasks:
        try:
            state["tasks"] = [task for status in STATUSES for task in _tasks(gateway, status)]
        except Refused as refused:
            if refused.http_status != 403:
                raise
    return state


def _tasks(gateway: Gateway, status: str) -> list[dict[str, Any]]:
    """The latest tasks of a status: one page, which the gateway finds among its latest 2,000. All pages are the whole
    index of a system where few tasks match."""
    query = urlencode({"kind": "all", "status": status, "limit": ROWS})
    data: list[dict[str, Any]] = gateway.json("GET", f"/v1/tasks?{query}")["data"]
    return data


def screen(state: Mapping[str, Any], url: str, away: str = "", *, rows: int = ROWS) -> RenderableType:
    """One screen, with at most `rows` rows of each table. `away`: why the last look failed, so that this is older."""
    from rich.console import Group
    from rich.text import Text

    overview, fleet = state["overview"], state["fleet"]
    totals, now = overview["totals"], fleet["at"]
    clock = datetime.fromtimestamp(overview["at"], UTC).strftime("%H:%M:%S")
    parts: list[RenderableType] = [
        Text(
            f"{_text(url)}  {clock} UTC  {totals['ready']} of {totals['workers']} workers ready  "
            f"{totals['running']} of {totals['capacity']} running  {totals['waiting']} waiting, oldest "
            f"{_age(totals['oldest_s'])}  {totals['dead_letters']} dead letters  {totals['webhooks_due']} webhooks due",
            style="bold",
        )
    ]
    if away:
        parts.append(Text(f"no answer, this is what was last seen: {_text(away)}", style="bold red"))
    for finding in overview["findings"][:5]:
        style = "red" if finding["status"] == "fail" else "yellow"
        parts.append(Text(f"{finding['check']}: {_text(finding['detail'])} -> {_text(finding['advice'])}", style=style))
    parts += [_models(overview["models"], rows), _workers(fleet["workers"], now, rows), _queues(fleet["queues"], rows)]
    if state["tasks"] is not None:
        parts.append(_running(state["tasks"], now, rows))
    return Group(*parts)


def _models(models: list[dict[str, Any]], rows: int) -> Table:
    heads = "workers running waiting tokens/s ended/s failed/s"
    table = _table("models", "model", *heads.split(), "wait p95", "first token p95", "overload")
    for model in models[:rows]:
        rates = [_number(model[name]) for name in ("tokens_per_s", "ended_per_s", "failed_per_s")]
        waits = [_age(model[name]["p95"]) for name in ("queue_wait", "first_token")]
        counts = [str(model[name]) for name in ("workers", "running", "waiting")]
        _row(table, model["name"], *counts, *rates, *waits, model["overload"])
    return _cut(table, len(models), rows)


def _workers(workers: list[dict[str, Any]], now: float, rows: int) -> Table:
    table = _table("workers", "worker", "state", "running", "waiting", "KV", "up", "device", "model", "version")
    order = {"unready": 0, "draining": 1, "ready": 2}
    for worker in sorted(workers, key=lambda worker: (order[worker["state"]], -(worker["running"] or 0)))[:rows]:
        state = f"{worker['state']}: {worker['unready'][0]}" if worker["unready"] else worker["state"]
        running = f"{_number(worker['running'])}/{_number(worker['capacity'])}"
        kv = "-" if worker["kv_used_ratio"] is None else f"{worker['kv_used_ratio']:.0%}"
        since = None if worker["since"] is None else now - worker["since"]
        share = worker.get("share")  # an earlier gateway does not tell it
        device = f"{worker['device'] or '-'}{'' if share is None else f' ({share:.0%})'}{_ranks(worker)}"
        cells = (running, _number(worker["waiting"]), kv, _age(since), device, worker["model"])
        _row(table, worker["name"], state, *cells, (worker["version"] or "-")[:12])
    return _cut(table, len(workers), rows)


def _ranks(worker: Mapping[str, Any]) -> str:
    """The ranks of a worker, with those of each stage by the stages; empty if one process computes its model."""
    ranks, tensor, pipeline = (worker.get(name) or 1 for name in ("ranks", "tensor_parallel", "pipeline_parallel"))
    return "" if ranks == 1 else f", {ranks} ranks: {tensor}x{pipeline}"


def _queues(queues: list[dict[str, Any]], rows: int) -> Table:
    waiting = [queue for queue in queues if queue["queued"] or queue["in_flight"] or queue["delayed"]]
    table = _table("queues", "queue", "waiting", "in flight", "delayed", "by tier, with the oldest")
    for queue in sorted(waiting, key=lambda queue: -queue["queued"])[:rows]:
        tiers = [
            f"{tier} {its['queued']} ({_age(its['oldest_s'])})" for tier, its in queue["tiers"].items() if its["queued"]
        ]
        counts = [str(queue[name]) for name in ("queued", "in_flight", "delayed")]
        _row(table, queue["name"], *counts, ", ".join(tiers))
    return _cut(table, len(waiting), rows)


def _running(tasks: list[dict[str, Any]], now: float, rows: int) -> Table:
    table = _table("tasks, latest first", "task", "status", "age", "tier", "model", "kind")
    for task in tasks[:rows]:
        age = _age(now - task["created_at"]) if isinstance(task.get("created_at"), int | float) else "-"
        _row(
            table, task["id"], task["status"], age, *(str(task.get(name) or "-") for name in ("tier", "model", "kind"))
        )
    return _cut(table, len(tasks), rows)


def _table(title: str, *heads: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title=Text(f"\n{title}"), title_justify="left", title_style="bold cyan")
    for head in heads:
        table.add_column(head, header_style="dim", no_wrap=True, overflow="ellipsis")
    return table


def _row(table: Table, *cells: object) -> None:
    from rich.text import Text

    table.add_row(*(Text(_text(cell)) for cell in cells))


def _cut(table: Table, count: int, rows: int) -> Table:
    if count > rows:
        _row(table, f"... {count - rows} more")
    elif not count:
        _row(table, "none")
    return table


def _text(value: object) -> str:
    return printable(str(value), terminal=True).replace("\n", " ").replace("\t", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def _age(seconds: float | None) -> str:
    """A time in its largest unit that gives at least one."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
