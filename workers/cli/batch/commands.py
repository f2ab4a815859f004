"""`penstock batch submit`, `ls`, `show`, `cancel` and `wait`. They need only a gateway's URL."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure, touching
from workers.cli.options import DEFAULT_URL, Json, Url
from workers.cli.options.checks import finite
from workers.cli.terminal.show import say

if TYPE_CHECKING:
    from workers.cli.batch.client import BatchGateway

#: Longest first line (bytes) that is read for its URL.
LINE: Final = 4 << 20
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
    from workers.cli.batch.client import pieces_of
    from workers.cli.tasks import pair

    given = {"--output": output, "--errors": errors, "--timeout": timeout}
    if not waits and (extra := [name for name, value in given.items() if value is not None]):
        raise Failure(f"{extra[0]} needs --wait")
    gateway = _gateway(url)
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
        _wait(gateway, batch["id"], output, errors, timeout)


@app.shown("penstock batch ls --limit 5", "ls")
def listed(
    limit: Annotated[int, typer.Option(min=1, help="Most batches to list.")] = 20,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List batches, the newest first."""
    for batch in _gateway(url).batches(limit):
        say(json.dumps(batch) if as_json else _row(batch))


@app.shown(f"penstock batch show {_AN_ID}")
def show(batch_id: BatchId, url: Url = DEFAULT_URL) -> None:
    """Print all that is known of a batch, as JSON."""
    typer.echo(json.dumps(_gateway(url).batch(batch_id), indent=2))


@app.shown(f"penstock batch cancel {_AN_ID}")
def cancel(batch_id: BatchId, as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Cancel a batch. Requests that have ended are written to its files.

    Exit status 1: the batch had ended before.
    """
    from workers.cli.client import Refused

    try:
        batch = _gateway(url).cancel_batch(batch_id)
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

    Exit status 0: it completed, also if some of its requests failed.
    """
    _wait(_gateway(url), batch_id, output, errors, timeout)


def _wait(
    gateway: BatchGateway, batch_id: str, output: Path | None, errors: Path | None, timeout: float | None
) -> None:
    from workers.cli.batch import results

    try:
        batch = results.awaited(gateway, batch_id, timeout)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; the batch goes on: penstock batch wait {batch_id}", Exit.INTERRUPTED) from None
    results.write(gateway, batch, output, errors)
    results.told(batch, errors)


def _row(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
    done = f"{counts['completed']} completed, {counts['failed']} failed of {counts['total']}"
    return f"{batch['id']}  {at}  {batch['status']:<11}  {batch['endpoint']}  {done}"


def _endpoint(path: Path, file: BinaryIO) -> str:
    """The url of the file's first line. Raises Failure for a line without one."""
    line = file.readline(LINE)
    file.seek(0)
    try:
        url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError, RecursionError):
        url = None
    if not isinstance(url, str):
        raise Failure(f"the first line of {path} has no url; name the endpoint with --endpoint")
    return url


def _gateway(url: str) -> BatchGateway:
    from workers.cli.batch.client import BatchGateway

    return BatchGateway(url)
