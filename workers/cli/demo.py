"""`penstock demo`: starts the whole system, shows it at work, and removes it.

demo -> `Load` submits tasks of all tiers, follows their tokens, fetches them again and compares -> a closing summary
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.client import FINAL, Gateway
from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, check_extras
from workers.cli.options import ModelOption, find_models
from workers.cli.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

    from producers.admin.fleet import Fleet
    from workers.cli.system import System

#: Looks at the workers' leases, 0.1 s apart, until they report all tokens made.
LOOKS: Final = 100
#: Every prompt begins with this text, as a service's prompts do: the engine computes it once.
PREAMBLE: Final = '''\
"""Small tools for text and numbers.

This module collects functions that are used all over the program. They take plain values, return plain values, and
raise ValueError for what they cannot use.
"""

import os
import sys


'''
PROMPTS: Final = (
    "def fibonacci(n):",
    "class Stack:",
    "def read_lines(path):",
    "def is_prime(number):",
    "class Point:",
    "def main(argv=None):",
    "def join(parts, sep=', '):",
    "async def fetch(url, timeout=10):",
)
#: Tiers in order of submission: urgent tasks arrive while the engine is busy with others.
TIERS: Final = ("batch", "flex", "default", "priority")
#: Longest time for the whole load (s).
PATIENCE_S: Final = 300.0
STYLES: Final = {"priority": "bold red", "default": "yellow", "flex": "cyan", "batch": "blue"}


app = Commands("Start here", PROCESS_STATUS)


@app.shown("penstock demo")
def demo(
    model: ModelOption = "tiny",
    tasks: Annotated[int, typer.Option(min=1, max=500, help="Number of tasks to submit.")] = 24,
) -> None:
    """Start everything in a temporary folder, run tasks of all tiers, show them, and stop everything."""
    from workers.errors import Refused

    check_extras("gateway", "worker", "webhooks")
    from workers.cli.system import running_system

    models = find_models([model], typer.echo)
    # The batch holds a third of the load, so that tiers matter. A short lease keeps its figures fresh.
    options = ("--max-num-seqs", str(max(2, tasks // 3)), "--lease", "5")
    typer.echo("Starting an embedded Valkey server, a gateway, a worker and a sweeper ...")
    try:
        with running_system(models, drain=3.0, worker_options=options) as system:
            _use(system, tasks)
    except Refused as refused:
        raise Failure(f"the demo failed: {refused}", refused.status) from refused
    except (KeyboardInterrupt, SystemExit):
        raise Failure("interrupted; everything was stopped", Exit.INTERRUPTED) from None
    typer.echo("Everything was stopped. To keep it running for use: penstock up")


def _use(system: System, tasks: int) -> None:
    """Run the load and print the report."""
    import time

    from rich.console import Console

    from producers.admin.fleet import read_fleet
    from workers.cli import servers

    gateway, console, kv = Gateway(system.url), Console(), KvUse()
    (model,) = gateway.models()
    load = Load(gateway, model["id"], tasks, console)
    load.run()
    with servers.system(system.broker, system.store) as (client, loop):
        tokens = sum(task.result["usage"]["output_tokens"] for task in load.tasks)
        # A lease's figures are as old as its last renewal.
        for _ in range(LOOKS):
            if kv.note(loop.run(read_fleet(client.store, client.broker))) >= tokens:
                break
            time.sleep(0.1)
    report(console, load.tasks, kv)


@dataclass(slots=True)
class Task:
    """One task of the load, as a caller sees it."""

    number: int
    tier: str
    fields: dict[str, Any]
    id: str = ""
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    status: str = "queued"
    #: The final answer of polling.
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The streamed text."""
        return "".join(self.texts)


class Load:
    """The demo's tasks. `run` follows all of them to their end; it raises Failure for a task that does not complete."""

    def __init__(self, gateway: Gateway, model: str, count: int, console: Console) -> None:
        self._gateway = gateway
        self._console = console
        self._failure: Failure | None = None
        self.tasks = list(itertools.islice(_tasks(model, count), count))

    def run(self) -> None:
        """Submit, follow, fetch, compare."""
        self._follow_all()
        if self._failure is not None:
            raise self._failure
        self._console.rule("results, fetched by polling")
        give_up = time.monotonic() + PATIENCE_S
        waiting = deque(self.tasks)
        while waiting:
            task = waiting.popleft()
            task.result = self._gateway.task(task.id)
            if task.result["status"] not in FINAL:
                if time.monotonic() > give_up:
                    raise Failure(f"task {task.id} is still {task.result['status']}", Exit.TIMEOUT)
                waiting.append(task)
                time.sleep(0.05)
                continue
            self._print(task)
            if task.result["status"] != "completed":
                raise Failure(f"task {task.id} {task.result['status']}: {task.result['error']}", Exit.TASK_FAILED)
            if task.result["choices"][0]["text"] != task.text:
                raise Failure(f"task {task.id} streamed another text than it stored", Exit.TASK_FAILED)

    def _follow_all(self) -> None:
        threads = []
        with self._display() as display:
            for task in self.tasks:
                task.id = self._gateway.submit(task.fields)["id"]
                thread = threading.Thread(target=self._follow, args=(task, display), daemon=True)
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()

    def _follow(self, task: Task, display: Board | Lines) -> None:
        try:
            for event in self._gateway.events(task.id):
                if event["event"] == "token":
                    task.tokens += 1
                    task.texts.append(event["text"])
                    task.status = "in_progress"
                else:
                    task.status = event["status"]
                display.show(task)
        except Failure as failure:
            self._failure = failure

    def _display(self) -> Board | Lines:
        return Board(self.tasks, self._console) if self._console.is_terminal else Lines(self._console)

    def _print(self, task: Task) -> None:
        from rich.text import Text

        usage = task.result["usage"]
        reason = task.result["choices"][0]["finish_reason"]
        head = f"#{task.number:02} {task.tier:8} {task.result['status']} ({reason})"
        head += f"  {usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them cached"
        head += f", {usage['output_tokens']} output tokens"
        self._console.print(Text(head, style=STYLES[task.tier]))
        for line in task.result["choices"][0]["text"].strip("\n").split("\n")[:4]:
            self._console.print(Text(f"    {printable(line, True)}", overflow="ellipsis", no_wrap=True))


class Board:
    """A live table of the tasks, for a terminal."""

    def __init__(self, tasks: list[Task], console: Console) -> None:
        from rich.live import Live

        self._tasks = tasks
        self._console = console
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=12)

    def show(self, task: Task) -> None:
        """Does nothing: the live table reads the tasks itself."""

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def _table(self) -> ConsoleRenderable:
        from rich.table import Table
        from rich.text import Text

        table = Table("#", "tier", "status", "tokens", "text", expand=True, box=None, pad_edge=False)
        table.columns[4].ratio = 1
        for task in self._in_view():
            style = STYLES[task.tier]
            tail = printable(task.text[-300:].replace("\n", "\u23ce"), True)
            width = max(10, self._console.width - 40)
            table.add_row(
                str(task.number),
                Text(task.tier, style=style),
                task.status,
                str(task.tokens),
                Text(tail[-width:], no_wrap=True),
            )
        return table

    def _in_view(self) -> list[Task]:
        """The tasks that fit the terminal's lines, running ones first."""
        lines = max(1, self._console.height - 2)
        order = {"in_progress": 0, "queued": 1}
        chosen = sorted(self._tasks, key=lambda task: (order.get(task.status, 2), task.number))[:lines]
        return sorted(chosen, key=lambda task: task.number)


class Lines:
    """Prints each task's finished lines of text, each after the task's number; for a pipe or a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[int, int] = {}
        self._lock = threading.Lock()

    def show(self, task: Task) -> None:
        """Print the task's new lines, and at its end the rest without a line break."""
        done = task.status in FINAL
        with self._lock:
            shown = self._shown.get(task.number, 0)
            text = task.text
            until = len(text) if done else text.rfind("\n") + 1
            for line in text[shown:until].split("\n")[: None if done else -1]:
                if line.strip():
                    self._write(task, line)
            self._shown[task.number] = max(shown, until)
            if done:
                self._write(task, f"-- {task.status}, {task.tokens} tokens")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: every line is printed already."""

    def _write(self, task: Task, line: str) -> None:
        self._console.out(f"[#{task.number:02} {task.tier:8}] {line}", highlight=False)


def _tasks(model: str, count: int) -> Iterator[Task]:
    """`count` tasks, spread evenly over the tiers. Prompts, lengths and seeds vary; runs are repeatable."""
    for number in range(count):
        tier = TIERS[number * len(TIERS) // count]
        fields = {
            "model": model,
            "prompt": PREAMBLE + PROMPTS[number % len(PROMPTS)],
            "max_tokens": 32 + 16 * (number % 4),
            "min_tokens": 16,
            "seed": number,
            "tier": tier,
        }
        yield Task(number, tier, fields)


class KvUse:
    """The highest use of any worker's KV cache, in blocks, as leases report it."""

    def __init__(self) -> None:
        self.used = 0
        self.total = 0

    def note(self, fleet: Fleet) -> int:
        """Note the leases' figures. Returns the number of tokens that the workers have made."""
        workers = [worker for pool in fleet.pools for worker in pool.workers]
        for worker in workers:
            self.used = max(self.used, worker["kv_blocks_most"])
            self.total = worker["kv_blocks_total"]
        return sum(worker["generated_tokens"] for worker in workers)


def report(console: Console, tasks: Sequence[Task], kv: KvUse) -> None:
    """Print tasks, speed, times to the first token by tier, KV use."""
    from rich.table import Table

    from producers.contract import keys
    from workers.trials.bench.figures import percentile

    results = [task.result for task in tasks]
    output = sum(result["usage"]["output_tokens"] for result in results)
    prompt = sum(result["usage"]["prompt_tokens"] for result in results)
    cached = sum(result["usage"]["cached_tokens"] for result in results)
    elapsed = max(result["finished_at"] for result in results) - min(result["created_at"] for result in results)
    table = Table("tier", title="summary", title_justify="left")
    for heading in ("tasks", "tokens", "TTFT p50", "TTFT p95"):
        table.add_column(heading, justify="right")
    for tier in keys.TIERS:
        mine = [result for result in results if result["tier"] == tier]
        if not mine:
            continue
        waits = [result["first_token_at"] - result["created_at"] for result in mine]
        tokens = sum(result["usage"]["output_tokens"] for result in mine)
        shown = [f"{1000 * percentile(waits, share):,.0f} ms" for share in (0.5, 0.95)]
        table.add_row(tier, str(len(mine)), str(tokens), *shown)
    console.print(table)
    console.print(
        f"{len(results)} tasks, {output} tokens in {elapsed:.2f} s: {output / elapsed:,.0f} tokens/s", highlight=False
    )
    console.print(
        f"KV cache: at most {kv.used} of {kv.total} blocks in use; {cached} of {prompt} prompt tokens came from the "
        "prefix cache",
        highlight=False,
    )
