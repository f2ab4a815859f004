"""Callers' commands: `penstock submit`, `embed`, `classify`, `rerank`, `tail`, `result`, `cancel`, `explain`, `tasks`.
All need a gateway."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final

import typer

from workers.cli.client import FINAL, Gateway, Refused, ignore
from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure
from workers.cli.options import DEFAULT_URL, SAMPLING, AsChat, OfTenant, OfTier, OpenObjects, Prompt, Url, takes
from workers.cli.terminal import (
    JsonLines,
    TextStream,
    WaitNotes,
    choices,
    note,
    note_end,
    prompt_text,
    say,
    text_from,
)
from workers.progress import Progress

TaskId = Annotated[str, typer.Argument(metavar="ID", help="The task's id, as `penstock submit` printed it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one event a line for a stream.")]


#: Texts of one request: the result fits also where vectors have 3,072 dimensions.
EMBEDDED: Final = 64
_AN_ID = "0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11"
commands = Commands("Tasks", CALLER_STATUS)
listing = Commands("Tasks", CALLER_STATUS, "tasks", "Tasks of all callers: list, retry, delete them.")
app = Commands("Tasks", CALLER_STATUS)
app.add_typer(commands)
app.add_typer(listing)


@commands.shown("penstock submit tiny 'Write fibonacci(n).' --max-tokens 64 --tier priority --stream")
@takes(sampling=SAMPLING.values())
def submit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a served model.")],
    prompt: Prompt,
    *,
    chat: AsChat = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    tier: Annotated[str, typer.Option(help="Service tier: priority, default, flex or batch.")] = "default",
    sampling: dict[str, Any],
    open_objects: OpenObjects = False,
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
    gateway = Gateway(url)
    text = prompt_text(prompt)
    if chat is None:
        chat = gateway.chats(model)
    all_fields = {
        "model": model,
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
        "tier": tier,
        **sampling,
        "open_objects": open_objects or None,
        "timeout": timeout,
        "tenant": tenant,
        "order_key": order_key,
        "metadata": dict(map(pair, metadata)) if metadata else None,
        "ttl": ttl,
        "webhook": None if webhook is None else {"url": webhook},
    }
    # Unset fields are left out: their defaults are the gateway's.
    fields = {name: value for name, value in all_fields.items() if value is not None}
    task = gateway.submit(fields, idempotency_key)
    if stream:
        if not as_json:
            typer.echo(f"task {task['id']}", err=True)
        _follow(gateway, task, 0, as_json)
    else:
        typer.echo(json.dumps(task) if as_json else task["id"])


Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="The texts. Unset: the lines of standard input, one text each."),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")]
OnError = Annotated[
    str, typer.Option(help="What a bad text fails: request, or item, which prints its error in its place.")
]
TextTier = Annotated[str, typer.Option(help="Service tier: priority, default or flex.")]


@commands.shown("penstock embed minilm 'A penstock feeds a turbine.' 'another text'")
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a served model that embeds.")],
    texts: Texts = None,
    *,
    dimensions: Annotated[
        int | None, typer.Option(help="Cut vectors to so many dimensions, where the model allows that.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="The model's prompt to put before each text.")] = None,
    truncate: Truncate = False,
    on_error: OnError = "request",
    tier: TextTier = "default",
    url: Url = DEFAULT_URL,
) -> None:
    """Print the vectors of texts: JSON with index and embedding, one a line, in order."""
    body = {"model": model, "service_tier": tier, "truncate": truncate, "on_error": on_error}
    body |= {name: value for name, value in (("dimensions", dimensions), ("prompt_name", prompt_name)) if value}
    for entry in _answered(url, "/v1/embeddings", body, texts):
        part_of = "error" if "error" in entry else "embedding"
        typer.echo(json.dumps({"index": entry["index"], part_of: entry[part_of]}))


@commands.shown("penstock classify classifier 'It works well.' 'It broke at once.'")
def classify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a served model that classifies.")],
    texts: Texts = None,
    *,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print labelled parts of texts, such as names, of a token classifier.")
    ] = False,
    aggregation_strategy: Annotated[
        str, typer.Option(help="With --tokens, how tokens become parts: none, simple, first, average or max.")
    ] = "simple",
    threshold: Annotated[
        float | None, typer.Option(help="Print labels, or parts, from this probability on. Unset: all.")
    ] = None,
    truncate: Truncate = False,
    on_error: OnError = "request",
    tier: TextTier = "default",
    url: Url = DEFAULT_URL,
) -> None:
    """Print the labels of texts with their probabilities, likeliest first: JSON, one a line, in order."""
    body: dict[str, Any] = {"model": model, "service_tier": tier, "truncate": truncate, "on_error": on_error}
    body |= {"aggregation_strategy": aggregation_strategy} if tokens else {"threshold": 0}
    body |= {} if threshold is None else {"threshold": threshold}
    name = "entities" if tokens else "labels"
    for entry in _answered(url, "/v1/token_classify" if tokens else "/v1/classify", body, texts):
        part_of = "error" if "error" in entry else name
        typer.echo(json.dumps({"index": entry["index"], part_of: entry[part_of]}, ensure_ascii=False))


@commands.shown("penstock rerank reranker 'What turns a turbine?' 'Water turns a turbine.' 'rain'")
def rerank(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a served model that ranks.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text by which documents are ranked.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT", help="The documents. Unset: the lines of standard input, at most 10,000."),
    ] = None,
    *,
    top_n: Annotated[int | None, typer.Option(help="Print only so many documents. Unset: all.")] = None,
    on_error: OnError = "request",
    tier: TextTier = "default",
    url: Url = DEFAULT_URL,
) -> None:
    """Print documents by their relevance to a query, the most relevant first: JSON, one a line."""
    texts = documents or list(_lines())
    body = {"model": model, "query": query, "documents": texts, "service_tier": tier, "on_error": on_error}
    answer = Gateway(url).json("POST", "/v1/rerank", body | ({} if top_n is None else {"top_n": top_n}))
    for result in [*answer["results"], *answer.get("errors", ())]:
        kept = {name: result[name] for name in ("index", "relevance_score", "error") if name in result}
        typer.echo(json.dumps(kept | {"document": texts[result["index"]]}, ensure_ascii=False))


def _lines() -> Iterator[str]:
    """The lines of standard input."""
    return (line.rstrip("\r\n") for line in iter(partial(text_from, sys.stdin.readline), ""))


def _answered(url: str, path: str, body: dict[str, Any], texts: list[str] | None) -> Iterator[dict[str, Any]]:
    """The entries of the answers for texts, or for the lines of standard input, by their numbers. Raises Failure."""
    gateway, lines, first = Gateway(url), iter(texts or _lines()), 0
    while part := list(islice(lines, EMBEDDED)):
        try:
            answer = gateway.json("POST", path, {**body, "input": part})
        except Refused as refused:
            raise Failure(f"texts {first} to {first + len(part) - 1}: {refused}", refused.status) from None
        yield from (entry | {"index": first + entry["index"]} for entry in answer["data"])
        first += len(part)


@commands.shown(f"penstock tail {_AN_ID} --from 40")
def tail(
    task_id: TaskId,
    start: Annotated[int, typer.Option("--from", min=0, help="The position of the first token to print.")] = 0,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print a task's text as it comes, from any position."""
    gateway = Gateway(url)
    _follow(gateway, gateway.task(task_id), start, as_json)


@commands.shown(f"penstock result {_AN_ID} --timeout 60 --json")
def result(
    task_id: TaskId,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Longest wait (s). 0: do not wait. Unset: until it ends.")
    ] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Wait until a task ends and print its text."""
    try:
        with Progress(quiet=as_json) as progress:
            task = _ended(Gateway(url), task_id, timeout, progress)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; the task goes on: penstock result {task_id}", Exit.INTERRUPTED) from None
    say(json.dumps(task) if as_json else choices(task["choices"]))
    if not as_json and task["status"] not in ("failed", "cancelled"):
        outputs = task["choices"]
        note_end(any(output["text"] for output in outputs), [output["finish_reason"] for output in outputs])
    _end(task_id, task["status"], task["error"])


@commands.shown(f"penstock cancel {_AN_ID}")
def cancel(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Cancel a task. Prints whether the cancel was accepted.

    Exit status 1: the task had ended before.
    """
    answer = Gateway(url).cancel(task_id)
    if as_json:
        typer.echo(json.dumps(answer))
    elif answer["accepted"]:
        typer.echo(f"{task_id} is cancelled")
    if not answer["accepted"]:
        raise Failure(f"task {task_id} is {answer['status']} already", Exit.TASK_FAILED)


@commands.shown(f"penstock explain {_AN_ID}")
def explain(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Explain where a task is: how many go before it, what keeps it, when it will start and end."""
    explanation = Gateway(url).explain(task_id)
    if as_json:
        typer.echo(json.dumps(explanation))
        return
    typer.echo(explanation["summary"])
    for reason in explanation["blocked_by"]:
        typer.echo(f"  {reason['name']:18} {reason['message']}")
    for attempt in explanation["attempts"]:
        typer.echo(f"  {attempt['why']:18} {_attempt(attempt)}")
    if explanation["phases"]:
        typer.echo("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in explanation["phases"].items()))


@listing.shown("penstock tasks ls --status failed --since 3600", "ls")
def listed(
    status: Annotated[
        str | None, typer.Option(help="queued, in_progress, completed, failed, cancelled or incomplete.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Tasks of this model.")] = None,
    tier: OfTier = None,
    kind: Annotated[
        str,
        typer.Option(
            help="task: of submit, /v1/tasks and the client; request: of OpenAI's endpoints, whose callers wait; "
            "response: in the background; all. Of requests and responses the last 10,000 are known."
        ),
    ] = "all",
    tenant: OfTenant = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=TEXT", help="Tasks with this metadata. May be repeated.")
    ] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Tasks of the last this many seconds.")] = None,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Begin with the oldest task.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks to list.")] = 20,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List tasks, the latest first: id, status, model, tier, kind, time of submission, output tokens.

    Lines of batches and plain Celery tasks are not listed; `penstock batch ls` lists batches.
    """
    query = {
        "kind": kind,
        "status": status,
        "model": model,
        "tier": tier,
        "tenant": tenant,
        "created_after": None if since is None else time.time() - since,
        "order": "asc" if oldest_first else "desc",
        "limit": min(limit, 100),
        **{f"metadata[{key}]": value for key, value in map(pair, metadata or ())},
    }
    tasks = _listed(Gateway(url), {name: value for name, value in query.items() if value is not None})
    count = 0
    for task in islice(tasks, limit):
        count += 1
        say(json.dumps(task) if as_json else _row(task))
    if not count and not as_json:
        note("There are no such tasks. `penstock submit MODEL TEXT` makes one; `penstock batch ls` lists batches.")


def _listed(gateway: Gateway, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of a list. A gateway of an earlier release knows no `kind`, and lists what is a `task` alone."""
    try:
        yield from gateway.tasks(query)
    except Refused as refused:
        if query["kind"] != "all" or refused.error.get("param") != "kind":
            raise
        note("The gateway is of an earlier release: requests of OpenAI's endpoints are not listed.")
        yield from gateway.tasks({name: value for name, value in query.items() if name != "kind"})


@listing.shown("penstock tasks retry 0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11")
def retry(task_id: TaskId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Submit a task that has ended once more, as a new task, and print its id."""
    task = Gateway(url).retry(task_id)
    typer.echo(json.dumps(task) if as_json else task["id"])


@listing.shown("penstock tasks delete 0b7c7c3e-6a51-4d3c-9f0e-8f5f3a1f2f11")
def delete(
    task_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of the tasks.")],
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete tasks and all that is stored of them, and print their ids. Those that have not ended are cancelled first.

    One that cannot be deleted is told, and the others are deleted all the same.
    """
    gateway = Gateway(url)
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


def _ended(gateway: Gateway, task_id: str, timeout: float | None, progress: Progress) -> dict[str, Any]:
    """The task, once it has ended. Raises Failure, also after `timeout` seconds."""
    give_up = math.inf if timeout is None else time.monotonic() + timeout
    notes = WaitNotes(progress.note)
    task = gateway.task(task_id)
    while task["status"] not in FINAL:
        end = f", {eta_text(task['eta'])}" if task.get("eta") else ""  # gateways of earlier releases tell none
        progress.show(f"{task['status']}{end} (why: penstock explain {task_id})")
        remaining = give_up - time.monotonic()
        if remaining <= 0:
            raise Failure(
                f"task {task_id} is still {task['status']} after {timeout:g} s; it was not cancelled", Exit.TIMEOUT
            )
        task = gateway.waited(task_id, remaining)
        if task.get("waits_for"):
            notes.show(task["waits_for"])
    return task


def eta_text(eta: dict[str, float]) -> str:
    """When a task ends, in words."""
    return f"ends in about {eta['p50_s']:.1f} s, in 9 of 10 cases within {eta['p90_s']:.1f} s"


def _attempt(attempt: dict[str, Any]) -> str:
    """The text of one start of a task."""
    parts = [attempt["worker"] or "a worker that told nothing"]
    parts += [] if attempt["duration_s"] is None else [f"for {attempt['duration_s']:.2f} s"]
    parts += [] if attempt["entries"] is None else [f"until its stream had {attempt['entries']} entries"]
    parts += [] if attempt["cached_tokens"] is None else [f"with {attempt['cached_tokens']} cached prompt tokens"]
    whys = ", ".join(dict.fromkeys(each["why"] for each in attempt["preempted"]))
    parts += [f"{attempt['preemptions']} times preempted ({whys})"] if attempt["preemptions"] else []
    return ", ".join(parts)


def _follow(gateway: Gateway, task: dict[str, Any], start: int, as_json: bool) -> None:
    """Show a task's events. Raises Failure if the task failed or the stream broke, with the command that resumes."""
    shown = JsonLines() if as_json else TextStream(task["n"])
    if task.get("eta") and not as_json:
        note(f"The task {eta_text(task['eta'])}.")
    last: dict[str, Any] = {"event": "none", "position": start - 1}
    is_empty = start == 0
    try:
        for last in gateway.events(task["id"], start, waits=ignore if as_json else WaitNotes().show):
            shown.show(last)
            is_empty = is_empty and not last.get("text")
    except KeyboardInterrupt:
        raise Failure(f"interrupted; the task goes on: {_tail(task, last)}", Exit.INTERRUPTED) from None
    except Failure as failure:
        raise Failure(f"{failure}; then: {_tail(task, last)}", failure.status) from None
    finally:
        shown.close()
    if last["event"] == "end":
        _end(task["id"], last["status"], last["error"])
        if not as_json:
            note_end(not is_empty, last["finish_reasons"])


def _tail(task: dict[str, Any], last: dict[str, Any]) -> str:
    return f"penstock tail {task['id']} --from {last['position'] + 1}"


def _end(task_id: str, status: str, error: dict[str, Any] | None) -> None:
    """Raises Failure for a task that failed or was cancelled."""
    if status in ("failed", "cancelled"):
        verb = "was cancelled" if status == "cancelled" else "failed"
        raise Failure(f"task {task_id} {verb}{': ' + error['message'] if error else ''}", Exit.TASK_FAILED)


def pair(text: str) -> tuple[str, str]:
    """The key and the text of an option KEY=TEXT. Raises Failure."""
    key, equals, value = text.partition("=")
    if not equals:
        raise Failure(f"--metadata is {text!r}; it must be KEY=TEXT")
    return key, value


def _row(task: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(task["created_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tokens = (task["usage"] or {}).get("output_tokens", "-")
    kind = task.get("kind", "task")  # a gateway of an earlier release does not say
    return f"{task['id']}  {task['status']:<11}  {task['model']}  {task['tier']:<8}  {kind:<8}  {at}  {tokens}"
