"""`penstock tasks`: lists, retries and deletes tasks. It needs only a gateway's URL."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from workers.cli.client import Refused
from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Failure
from workers.cli.options import DEFAULT_URL, Url
from workers.cli.tasks import Json, TaskId, gateway_at, pair
from workers.cli.terminal.show import say

app = Commands("Tasks", CALLER_STATUS, "tasks", "Tasks of all callers: list, retry, delete them.")


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


@app.shown("penstock tasks delete 0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11")
def delete(
    task_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of the tasks.")],
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete tasks and all that is stored of them, and print their ids. Those that have not ended are cancelled first.

    One that cannot be deleted is told, and the others are deleted all the same.
    """
    gateway = gateway_at(url)
    refused: list[Refused] = []
    for task_id in task_ids:
        try:
            answer = gateway.delete(task_id)
        except Refused as error:
            typer.echo(f"{task_id} is not deleted: {error}", err=True)
            refused.append(error)
        else:
            typer.echo(json.dumps(answer) if as_json else task_id)
    if refused:
        raise Failure(f"{len(refused)} of {len(task_ids)} tasks are not deleted", refused[-1].status)


def _line(task: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(task["created_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tokens = (task["usage"] or {}).get("output_tokens", "-")
    return f"{task['id']}  {task['status']:<11}  {task['model']}  {task['tier']:<8}  {at}  {tokens}"
