"""`penstock batch`: files of requests in, files of answers out. It needs only a gateway's URL.

submit, ls, show, cancel -> the gateway's API (`workers.cli.client`); wait -> polls until the end -> writes the files
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import typer

from workers.cli.client import ENDED, PATIENCE_S, Gateway, Refused, Unreachable, pieces_of
from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure, touching
from workers.cli.options import DEFAULT_URL, Json, Url, finite
from workers.cli.terminal import note, printable, say
from workers.progress import Progress, bar

#: Longest first line (bytes) that is read for its URL.
LINE: Final = 4 << 20
#: Longest time (s) between two looks at a batch.
LOOK_S: Final = 2.0
#: Most reasons for a batch's failure that are printed.
REASONS: Final = 20

T = TypeVar("T")

BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id, as `penstock batch submit` printed it.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file to write the answers to. Unset: standard output.")
]
Errors = Annotated[Path | None, typer.Option(help="The file to write the failed requests to. Unset: none.")]
Timeout = Annotated[
    float | None, typer.Option(min=0, callback=finite, help="Longest wait (s). Unset: until the batch ends.")
]


_AN_ID = "batch_019a2b3c4d5e6f708192a3b4c5d6e7f8"
app = Commands("Tasks", CALLER_STATUS, "batch", "Batches: a file of requests in, a file of answers out.")


@app.shown("penstock batch submit requests.jsonl --wait --output answers.jsonl")
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The requests: JSON, one a line, as OpenAI's batches.")],
    endpoint: Annotated[
        str | None, typer.Option(help="The endpoint that all lines are for. Unset: the url of the first line.")
    ] = None,
    window: Annotated[
        str, typer.Option(help="The time after which unfinished requests expire: 30m, 24h, 7d at most.")
    ] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=TEXT", help="Metadata kept with the batch. May be repeated.")
    ] = None,
    waits: Annotated[bool, typer.Option("--wait", help="Wait for the batch, as `penstock batch wait` does.")] = False,
    output: Output = None,
    errors: Errors = None,
    timeout: Timeout = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Upload a file of requests, make a batch of it and print the batch's id."""
    from workers.cli.tasks import pair

    wait_options = {"--output": output, "--errors": errors, "--timeout": timeout}
    if not waits and (extra := [name for name, value in wait_options.items() if value is not None]):
        raise Failure(f"{extra[0]} needs --wait")
    gateway = Gateway(url)
    with touching(file, "read"):
        opened = open(file, "rb")  # noqa: SIM115 - closed below; other errors are not the file's
    with opened:
        fields: dict[str, Any] = {"endpoint": endpoint or _endpoint(file, opened), "completion_window": window}
        if metadata:
            fields["metadata"] = dict(map(pair, metadata))
        size = file.stat().st_size
        fields["input_file_id"] = gateway.upload(file.name, size, pieces_of(opened, size))["id"]
    batch = gateway.create_batch(fields)
    typer.echo(json.dumps(batch) if as_json else batch["id"], err=waits)
    if waits:
        _wait(gateway, batch["id"], output, errors, timeout, quiet=as_json)


def _endpoint(path: Path, file: BinaryIO) -> str:
    """The url of the file's first line. Raises Failure for a line that is not JSON, or has none."""
    line = file.readline(LINE)
    file.seek(0)
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the first line of {path} is not JSON: {error}") from None
    url = request.get("url") if isinstance(request, dict) else None
    if not isinstance(url, str):
        raise Failure(f"the first line of {path} has no url; name the endpoint with --endpoint")
    return url


@app.shown("penstock batch ls --limit 5", "ls")
def listed(
    limit: Annotated[int, typer.Option(min=1, help="Most batches to list.")] = 20,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List batches, the newest first."""
    count = 0
    for batch in Gateway(url).batches(limit):
        count += 1
        say(json.dumps(batch) if as_json else _row(batch))
    if not count and not as_json:
        note("There are no batches; penstock batch submit FILE makes one.")


def _row(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(batch["created_at"]))
    done = f"{counts['completed']} completed, {counts['failed']} failed of {counts['total']}"
    return f"{batch['id']}  {at}  {batch['status']:<11}  {batch['endpoint']}  {done}"


@app.shown(f"penstock batch show {_AN_ID}")
def show(batch_id: BatchId, url: Url = DEFAULT_URL) -> None:
    """Print all that is known of a batch, as JSON."""
    typer.echo(json.dumps(Gateway(url).batch(batch_id), indent=2))


@app.shown(f"penstock batch cancel {_AN_ID}")
def cancel(batch_id: BatchId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Cancel a batch. Requests that have ended are written to its files.

    Exit status 1: the batch had ended before.
    """
    try:
        batch = Gateway(url).cancel_batch(batch_id)
    except Refused as refused:
        if refused.http_status == 409:
            raise Failure(str(refused), Exit.TASK_FAILED) from None
        raise
    typer.echo(json.dumps(batch) if as_json else f"{batch_id} is {batch['status']}")


@app.shown(f"penstock batch wait {_AN_ID} --output answers.jsonl --errors failed.jsonl")
def wait(
    batch_id: BatchId, output: Output = None, errors: Errors = None, timeout: Timeout = None, url: Url = DEFAULT_URL
) -> None:
    """Wait until a batch ends, and write its answers.

    Exit status 1: it did not complete, or some of its requests failed.
    """
    _wait(Gateway(url), batch_id, output, errors, timeout)


def _wait(
    gateway: Gateway,
    batch_id: str,
    output: Path | None,
    errors: Path | None,
    timeout: float | None,
    *,
    quiet: bool = False,
) -> None:
    """`quiet`: show no progress."""
    try:
        batch = _ended(gateway, batch_id, timeout, quiet=quiet)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; the batch goes on: penstock batch wait {batch_id}", Exit.INTERRUPTED) from None
    _write(gateway, batch, output, errors)
    _report(gateway, batch, errors)


def _ended(gateway: Gateway, batch_id: str, timeout: float | None, *, quiet: bool) -> dict[str, Any]:
    """The batch, once it has ended. Shows its progress. Raises Failure, also after `timeout` seconds, and at once where
    no gateway answers at first: one that goes away later is waited for."""
    give_up = None if timeout is None else time.monotonic() + timeout
    pause = 0.1
    batch = gateway.batch(batch_id)
    with Progress(quiet=quiet) as progress:
        while True:
            progress.show(_progress(batch))
            if batch["status"] in ENDED:
                return batch
            remaining = pause if give_up is None else give_up - time.monotonic()
            if remaining <= 0:
                message = f"batch {batch_id} is still {batch['status']} after {timeout:g} s; it was not cancelled"
                raise Failure(message, Exit.TIMEOUT)
            time.sleep(min(pause, remaining))
            pause = min(LOOK_S, 1.5 * pause)
            batch = _patiently(lambda: gateway.batch(batch_id), progress)


def _write(gateway: Gateway, batch: dict[str, Any], output: Path | None, errors: Path | None) -> None:
    """Write an ended batch's answers, to standard output without a path; and its failed lines into `errors`."""
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


def _report(gateway: Gateway, batch: dict[str, Any], errors: Path | None) -> None:
    """Say on standard error how the batch ended. Raises Failure for one that did not complete, or has failed lines."""
    counts = batch["request_counts"]
    if batch["status"] == "completed":
        typer.echo(f"{counts['completed']} of {counts['total']} requests completed", err=True)
        if counts["failed"]:
            where = f"{errors} has" if errors else f"penstock batch wait {batch['id']} --errors FILE writes"
            failed = f"{counts['failed']} of {counts['total']} requests failed"
            raise Failure(f"{failed}{_first_error(gateway, batch)}; {where} all of them", Exit.TASK_FAILED)
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


def _first_error(gateway: Gateway, batch: dict[str, Any]) -> str:
    """The text about the first of a batch's failed lines; empty if that cannot be read."""
    if batch["error_file_id"] is None:
        return ""
    with suppress(ValueError, KeyError, TypeError, Failure):
        head = b""
        for piece in gateway.content(batch["error_file_id"], 0):
            head += piece
            if b"\n" in piece or len(head) > LINE:
                break
        line = json.loads(head.partition(b"\n")[0])
        error = line["error"] or line["response"]["body"]["error"]
        return printable(f", the first of them {line['custom_id']!r}: {error['message']}", sys.stderr.isatty())
    return ""


def _save(gateway: Gateway, file_id: str, path: Path | None) -> None:
    """Write a file. A download that breaks off goes on where it was."""
    written = 0

    def download() -> None:
        nonlocal written
        for piece in gateway.content(file_id, written):
            file.write(piece)
            written += len(piece)

    if path is None:
        file: BinaryIO = sys.stdout.buffer
        _patiently(download)
        file.flush()
        return
    with _opened(path) as file:
        _patiently(download)


def _opened(path: Path) -> BinaryIO:
    with touching(path, "write"):
        return open(path, "wb")


def _patiently(call: Callable[[], T], progress: Progress | None = None) -> T:
    """Returns the result of the call, which is repeated while the gateway is away, for PATIENCE_S. `progress` says
    so."""
    give_up, pause = time.monotonic() + PATIENCE_S, 0.1
    while True:
        try:
            return call()
        except Unreachable:
            if time.monotonic() > give_up:
                raise
            if progress is not None:
                progress.show("the gateway does not answer: trying again")
        time.sleep(pause)
        pause = min(LOOK_S, 2 * pause)


def _progress(batch: dict[str, Any]) -> str:
    """The text of a batch's progress."""
    counts = batch["request_counts"]
    ended = counts["completed"] + counts["failed"]
    failures = f", {counts['failed']} failed" if counts["failed"] else ""
    if not counts["total"]:
        return str(batch["status"])
    return f"{bar(ended, counts['total'])}  {ended} of {counts['total']} requests{failures}  {batch['status']}"
