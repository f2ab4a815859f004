"""Waits for a batch, and writes its files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import typer

from workers.cli.batch.client import ENDED, BatchGateway
from workers.cli.client import PATIENCE_S, Unreachable
from workers.cli.exits import Exit, Failure, touching
from workers.cli.terminal.show import printable

T = TypeVar("T")

#: Longest time (s) between two looks at a batch.
LOOK_S: Final = 2.0
#: Most reasons for a batch's failure that are printed.
REASONS: Final = 20


def awaited(gateway: BatchGateway, batch_id: str, timeout: float | None) -> dict[str, Any]:
    """The batch, once it has ended. Shows its progress on a terminal. Raises Failure, also after `timeout` seconds."""
    give_up = None if timeout is None else time.monotonic() + timeout
    pause = 0.1
    with _progress() as show:
        while True:
            batch = _patiently(lambda: gateway.batch(batch_id))
            show(batch)
            if batch["status"] in ENDED:
                return batch
            left = pause if give_up is None else give_up - time.monotonic()
            if left <= 0:
                message = f"batch {batch_id} is still {batch['status']} after {timeout:g} s; it was not cancelled"
                raise Failure(message, Exit.TIMEOUT)
            time.sleep(min(pause, left))
            pause = min(LOOK_S, 1.5 * pause)


def write(gateway: BatchGateway, batch: dict[str, Any], output: Path | None, errors: Path | None) -> None:
    """Write an ended batch's answers, to standard output without a path; and its failed lines, if asked for."""
    if batch["output_file_id"] is not None:
        _save(gateway, batch["output_file_id"], output)
    elif output is not None:
        _opened(output).close()
    if errors is None:
        return
    if batch["error_file_id"] is not None:
        _save(gateway, batch["error_file_id"], errors)
    else:
        _opened(errors).close()


def told(batch: dict[str, Any], errors: Path | None) -> None:
    """Say on standard error how the batch ended. Raises Failure for one that did not complete."""
    counts = batch["request_counts"]
    if batch["status"] == "completed":
        hint = "" if errors is not None or not counts["failed"] else "; --errors FILE writes the failed ones"
        typer.echo(f"{counts['completed']} of {counts['total']} requests completed{hint}", err=True)
        return
    reasons = (batch["errors"] or {"data": []})["data"]
    for reason in reasons[:REASONS]:
        where = "" if reason["line"] is None else f"line {reason['line']}: "
        typer.echo(printable(f"{where}{reason['message']} ({reason['code']})", sys.stderr.isatty()), err=True)
    if len(reasons) > REASONS:
        typer.echo(f"... and {len(reasons) - REASONS} more", err=True)
    done = f", with {counts['completed']} of {counts['total']} requests completed" if counts["total"] else ""
    ended = {"failed": "failed", "expired": "has expired", "cancelled": "was cancelled"}[batch["status"]]
    raise Failure(f"batch {batch['id']} {ended}{done}", Exit.TASK_FAILED)


def _save(gateway: BatchGateway, file_id: str, path: Path | None) -> None:
    """Write a file. A download that breaks off goes on where it was."""
    written = 0

    def rest() -> None:
        nonlocal written
        for piece in gateway.content(file_id, written):
            file.write(piece)
            written += len(piece)

    if path is None:
        file: BinaryIO = sys.stdout.buffer
        _patiently(rest)
        file.flush()
        return
    with _opened(path) as file:
        _patiently(rest)


def _opened(path: Path) -> BinaryIO:
    with touching(path, "write"):
        return open(path, "wb")


def _patiently(call: Callable[[], T]) -> T:
    """What the call returns; it is repeated while the gateway is away, for PATIENCE_S."""
    give_up, pause = time.monotonic() + PATIENCE_S, 0.1
    while True:
        try:
            return call()
        except Unreachable:
            if time.monotonic() > give_up:
                raise
        time.sleep(pause)
        pause = min(LOOK_S, 2 * pause)


@contextmanager
def _progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a batch on one line of a terminal's standard error; elsewhere nothing."""
    shown = sys.stderr.isatty()

    def show(batch: dict[str, Any]) -> None:
        if shown:
            counts = batch["request_counts"]
            ended = counts["completed"] + counts["failed"]
            typer.echo(f"\r\033[K{batch['status']}  {ended} of {counts['total'] or '?'} requests", err=True, nl=False)

    try:
        yield show
    finally:
        if shown:
            typer.echo("\r\033[K", err=True, nl=False)
