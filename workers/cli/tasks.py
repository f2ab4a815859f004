"""`penstock submit`, `tail`, `result`, `cancel` and `explain`: a caller's commands. They need only a gateway's URL."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure
from workers.cli.options import DEFAULT_URL, AsChat, Prompt, Url
from workers.cli.options.declared import SAMPLING, takes
from workers.cli.terminal.stdin import text_from

if TYPE_CHECKING:
    from workers.cli.client import Gateway

TaskId = Annotated[str, typer.Argument(metavar="ID", help="The task's id, as `penstock submit` printed it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one event a line for a stream.")]


_AN_ID = "0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11"
app = Commands("Tasks", CALLER_STATUS)


@app.shown("penstock submit tiny 'def fibonacci(n):' --max-tokens 64 --tier priority --stream")
@takes(sampling=SAMPLING.values())
def submit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a served model.")],
    prompt: Prompt,
    *,
    chat: AsChat = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    tier: Annotated[str, typer.Option(help="Service tier: priority, default, flex or batch.")] = "default",
    sampling: dict[str, Any],
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the task ends with the output so far.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="The tenant that the task belongs to.")] = None,
    order_key: Annotated[
        str | None, typer.Option(help="With FIFO queues: tasks of one key and tier run one after another, in order.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=TEXT", help="Metadata kept with the task. May be repeated.")
    ] = None,
    ttl: Annotated[int | None, typer.Option(help="Seconds for which the result is kept.")] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Call this https:// URL when the task has ended.")
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="A name of this task: for 24 hours, the same KEY submits nothing twice."),
    ] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Submit a task and print its id, or with --stream its text as it comes."""
    gateway = gateway_at(url)
    text = text_from(sys.stdin.read) if prompt == "-" else prompt
    asked = {
        "model": model,
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        "tier": tier,
        **sampling,
        "timeout": timeout,
        "tenant": tenant,
        "order_key": order_key,
        "metadata": dict(map(pair, metadata)) if metadata else None,
        "ttl": ttl,
        "webhook": None if webhook is None else {"url": webhook},
    }
    # Unset fields are left out: their defaults are the gateway's.
    fields = {name: value for name, value in asked.items() if value is not None}
    task = gateway.submit(fields, idempotency_key)
    if stream:
        if not as_json:
            typer.echo(f"task {task['id']}", err=True)
        _follow(gateway, task, 0, as_json)
    else:
        typer.echo(json.dumps(task) if as_json else task["id"])


@app.shown(f"penstock tail {_AN_ID} --from 40")
def tail(
    task_id: TaskId,
    start: Annotated[int, typer.Option("--from", min=0, help="The position of the first token to print.")] = 0,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print a task's text as it comes, from any position."""
    gateway = gateway_at(url)
    _follow(gateway, gateway.task(task_id), start, as_json)


@app.shown(f"penstock result {_AN_ID} --timeout 60 --json")
def result(
    task_id: TaskId,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Longest wait (s). 0: do not wait. Unset: until it ends.")
    ] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Wait until a task ends and print its text."""
    from workers.cli.client import FINAL
    from workers.cli.terminal.show import choices, say

    gateway = gateway_at(url)
    give_up = None if timeout is None else time.monotonic() + timeout
    pause = 0.02
    while (task := gateway.task(task_id))["status"] not in FINAL:
        left = pause if give_up is None else give_up - time.monotonic()
        if left <= 0:
            raise Failure(
                f"task {task_id} is still {task['status']} after {timeout:g} s; it was not cancelled", Exit.TIMEOUT
            )
        time.sleep(min(pause, left))
        pause = min(0.5, 1.5 * pause)
    say(json.dumps(task) if as_json else choices(task["choices"]))
    _end(task_id, task["status"], task["error"])


@app.shown(f"penstock cancel {_AN_ID}")
def cancel(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Cancel a task. Prints whether the cancel was accepted.

    Exit status 1: the task had ended before.
    """
    answer = gateway_at(url).cancel(task_id)
    if as_json:
        typer.echo(json.dumps(answer))
    elif answer["accepted"]:
        typer.echo(f"{task_id} is cancelled")
    if not answer["accepted"]:
        raise Failure(f"task {task_id} is {answer['status']} already", Exit.TASK_FAILED)


@app.shown(f"penstock explain {_AN_ID}")
def explain(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Explain where a task is: how many go before it, what keeps it, when it will start and end."""
    said = gateway_at(url).explain(task_id)
    if as_json:
        typer.echo(json.dumps(said))
        return
    typer.echo(said["summary"])
    for reason in said["blocked_by"]:
        typer.echo(f"  {reason['name']:18} {reason['message']}")
    for one in said["attempts"]:
        typer.echo(f"  {one['why']:18} {_attempt(one)}")
    if said["phases"]:
        typer.echo("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in said["phases"].items()))


def _attempt(one: dict[str, Any]) -> str:
    """A start of a task, in words."""
    said = [one["worker"] or "a worker that told nothing"]
    said += [] if one["duration_s"] is None else [f"for {one['duration_s']:.2f} s"]
    said += [] if one["entries"] is None else [f"until its stream had {one['entries']} entries"]
    said += [] if one["cached_tokens"] is None else [f"with {one['cached_tokens']} cached prompt tokens"]
    whys = ", ".join(dict.fromkeys(each["why"] for each in one["preempted"]))
    said += [f"{one['preemptions']} times preempted ({whys})"] if one["preemptions"] else []
    return ", ".join(said)


def _follow(gateway: Gateway, task: dict[str, Any], start: int, as_json: bool) -> None:
    """Show a task's events. Raises Failure if the task failed or the stream broke; it says how to resume."""
    from workers.cli.terminal.show import JsonLines, TextStream

    shown = JsonLines() if as_json else TextStream(task["n"])
    last: dict[str, Any] = {"event": "none", "position": start - 1}
    try:
        for last in gateway.events(task["id"], start):
            shown.show(last)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; the task goes on: {_tail(task, last)}", Exit.INTERRUPTED) from None
    except Failure as failure:
        raise Failure(f"{failure}; then: {_tail(task, last)}", failure.status) from None
    finally:
        shown.close()
    if last["event"] == "end":
        _end(task["id"], last["status"], last["error"])


def _tail(task: dict[str, Any], last: dict[str, Any]) -> str:
    return f"penstock tail {task['id']} --from {last['position'] + 1}"


def _end(task_id: str, status: str, error: dict[str, Any] | None) -> None:
    """Raises Failure for a task that failed or was cancelled."""
    if status in ("failed", "cancelled"):
        what = "was cancelled" if status == "cancelled" else "failed"
        raise Failure(f"task {task_id} {what}{': ' + error['message'] if error else ''}", Exit.TASK_FAILED)


def gateway_at(url: str) -> Gateway:
    """The gateway's client. Raises Failure for a bad URL."""
    from workers.cli.client import Gateway

    return Gateway(url)


def pair(text: str) -> tuple[str, str]:
    """The key and the text of an option KEY=TEXT. Raises Failure."""
    key, equals, value = text.partition("=")
    if not equals:
        raise Failure(f"--metadata is {text!r}; it must be KEY=TEXT")
    return key, value
