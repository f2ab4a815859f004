"""`penstock tasks`: lists tasks and retries them. It needs only a gateway's URL."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS
from workers.cli.options import DEFAULT_URL, Url
from workers.cli.tasks import Json, TaskId, gateway_at, pair
from workers.cli.terminal.show import say

app = Commands("Tasks", CALLER_STATUS, "tasks", "Tasks of all callers: list them, retry them.")


@app.shown("penstock tasks ls --status failed --since 3600", "ls")
def listed(
    status: Annotated[
        str | None, typer.Option(help="queued, in_progress, completed, failed, cancelled or incomplete.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Tasks of this model.")] = None,
    tier: Annotated[str | None, typer.Option(help="Tasks of this service tier.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tasks of this tenant.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=TEXT", help="Tasks with this metadata. May be repeated.")
    ] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Tasks of the last this many seconds.")] = None,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Begin with the oldest task.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks to list.")] = 20,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List tasks, the latest first: id, status, model, tier, time of submission, output tokens."""
    asked = {
        "status": status,
        "model": model,
        "tier": tier,
        "tenant": tenant,
        "created_after": None if since is None else time.time() - since,
        "order": "asc" if oldest_first else "desc",
        "limit": min(limit, 100),
        **{f"metadata[{key}]": value for key, value in map(pair, metadata or ())},
    }
    found = gateway_at(url).tasks({name: value for name, value in asked.items() if value is not None})
    for task in islice(found, limit):
        say(json.dumps(task) if as_json else _line(task))


@app.shown("penstock tasks retry 0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11")
def retry(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Submit a task that has ended once more, as a new task, and print its id."""
    task = gateway_at(url).retry(task_id)
    typer.echo(json.dumps(task) if as_json else task["id"])


def _line(task: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(task["created_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tokens = (task["usage"] or {}).get("output_tokens", "-")
    return f"{task['id']}  {task['status']:<11}  {task['model']}  {task['tier']:<8}  {at}  {tokens}"
