"""`penstock dlq`: the dead letters, for whoever minds a system. They need its broker and store, and no gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure
from workers.cli.options import Broker, DataDir, Json, Store
from workers.cli.servers import system
from workers.cli.terminal import note, say

if TYPE_CHECKING:
    from producers.admin.dead_letters import Letter
    from producers.client.aio import AsyncClient

Keys = Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Dead letters, by key or task id.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters that the other options select.")]
Reason = Annotated[str | None, typer.Option(help="Only dead letters whose reason contains this text.")]
OlderThan = Annotated[float | None, typer.Option(min=0, help="Only dead letters at least this old (s).")]


app = Commands(
    "Operations",
    OPERATOR_STATUS,
    "dlq",
    "Dead letters: tasks that were given up and messages that no worker could use.",
)


@app.shown("penstock dlq ls", "ls")
def listed(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    reason: Reason = None,
    older_than: OlderThan = None,
    as_json: Json = False,
) -> None:
    """List the dead letters, oldest first."""
    with system(broker, store, data_dir) as (client, loop):
        chosen = loop.run(_chosen(client, None, True, reason, older_than))
    for letter in chosen:
        line = f"{letter.key}  {_when(letter.at_ms)}  {letter.task_id or 'no task id'}  {letter.list_name}"
        say(json.dumps(_summary(letter)) if as_json else f"{line}  {letter.reason}")
    if not chosen and not as_json:
        typer.echo("There are no such dead letters." if reason or older_than else "There are no dead letters.")


@app.shown("BROKER_URL=redis://10.0.0.5:6379/0 penstock dlq show 3f9a51c07be2")
def show(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Dead letters, by key or task id.")],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show a dead letter: its message, its task's record, and the workers that died on it."""
    from producers.admin.dead_letters import BrokenRecord, record_of

    with system(broker, store, data_dir) as (client, loop):
        for letter in loop.run(_chosen(client, keys, False, None, None)):
            record, broken = None, "none, or past its time to live"
            try:
                record = loop.run(record_of(client, letter))
            except BrokenRecord as error:
                broken = str(error)
            details = {
                **_summary(letter),
                "message": letter.message,
                "task": dict(record.fields) if record else None,
                "lost": (record.json("lost") or []) if record else [],
            }
            if as_json:
                typer.echo(json.dumps(details))
            else:
                _describe(details, broken)


def _describe(details: dict[str, Any], broken: str) -> None:
    """Print all of a dead letter. `broken`: why there is no record."""
    for name in ("key", "at", "task_id", "list", "reason"):
        say(f"{name:<8} {details[name]}")
    task = details["task"]
    if task is None:
        say(f"record   {broken}")
    else:
        say(f"record   {task['status']}, model {task.get('model', '')}, taken up {_times(task)}")
        for loss in details["lost"]:
            say(f"  lost   {loss['owner']} at {_when(loss['at'])}, {loss['entries']} entries in the stream")
        say(f"  asked  {task.get('task', '')}")
    say(f"message  {details['message']}")


@app.shown("penstock dlq replay --all --reason 'workers died' --broker redis://10.0.0.5:6379/0")
def replay(
    keys: Keys = None,
    every: All = False,
    reason: Reason = None,
    older_than: OlderThan = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Submit given-up tasks again under new ids, and requeue messages that no worker could use.

    The given-up task itself stays failed. Exit status 1: a dead letter could not be replayed.
    """
    from producers.admin.dead_letters import replay as once_more
    from producers.errors import PenstockError

    failed = 0
    with system(broker, store, data_dir) as (client, loop):
        for letter in loop.run(_chosen(client, keys, every, reason, older_than)):
            outcome: dict[str, Any] = {"key": letter.key, "was": letter.task_id}
            try:
                done = loop.run(once_more(client, letter))
            except PenstockError as error:
                failed += 1
                outcome |= {"error": str(error)}
                note(f"{letter.key} stays: {error}")
            else:
                outcome |= {"task_id": done.task_id}
                if not as_json:
                    again = f"runs again as {done.task_id}" if done.new_task else "is back in its list"
                    say(f"{letter.key} {again}")
            if as_json:
                typer.echo(json.dumps(outcome))
    if failed:
        raise Failure(f"{failed} could not be replayed", Exit.TASK_FAILED)


@app.shown("penstock dlq purge --all --older-than 604800 --yes --broker redis://10.0.0.5:6379/0")
def purge(
    keys: Keys = None,
    every: All = False,
    reason: Reason = None,
    older_than: OlderThan = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Delete dead letters. Their tasks' records stay until they expire."""
    from producers.admin.dead_letters import purge as forget

    with system(broker, store, data_dir) as (client, loop):
        chosen = loop.run(_chosen(client, keys, every, reason, older_than))
        if not yes:
            if not sys.stdin.isatty():
                raise Failure(f"this would delete {len(chosen)} dead letters; say --yes")
            typer.confirm(f"Delete {len(chosen)} dead letters?", abort=True)
        gone = sum(loop.run(forget(client, letter)) for letter in chosen)
    typer.echo(f"{gone} dead letters deleted")


async def _chosen(
    client: AsyncClient, named: list[str] | None, every: bool, reason: str | None, older_than: float | None
) -> list[Letter]:
    """The dead letters that the options select. Raises Failure for no selection, or for one that does not exist."""
    from producers.admin.dead_letters import letters

    if not named and not every:
        raise Failure("name dead letters by key (penstock dlq ls shows the keys), or say --all")
    if named and every:
        raise Failure("give keys or --all, not both")
    until = await client.broker.now_ms() - (older_than or 0.0) * 1000
    chosen, missing = [], set(named or ())
    async for letter in letters(client):
        if named and not {letter.key, letter.task_id} & set(named):
            continue
        missing -= {letter.key, letter.task_id or ""}
        if (reason is None or reason in letter.reason) and (older_than is None or letter.at_ms <= until):
            chosen.append(letter)
    if missing:
        raise Failure(f"there is no dead letter {', '.join(sorted(missing))}; penstock dlq ls shows all dead letters")
    return chosen


def _summary(letter: Letter) -> dict[str, Any]:
    return {
        "key": letter.key,
        "at": _when(letter.at_ms),
        "task_id": letter.task_id,
        "list": letter.list_name,
        "reason": letter.reason,
    }


def _when(ms: int) -> str:
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    return f"{ms} ms"


def _times(fields: Mapping[str, str]) -> str:
    return f"{fields.get('claims', 0)} times, {fields.get('deaths', 0)} workers lost"
