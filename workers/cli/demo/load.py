"""The demo's load: tasks of all tiers, streamed first, then fetched by polling and compared."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.table import Table
from rich.text import Text

from workers.cli.client import FINAL, Gateway
from workers.cli.exits import Exit, Failure
from workers.cli.terminal.show import printable

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
