"""Memory and speed of a large file's way through a watched folder: `python -m tests.bench.sources`.

Real processes: `penstock sources`, `penstock sweeper` and Valkey, no worker. A file is renamed into the inbox, copied,
checked, and its first lines are made and sent (`--window` of them). Then the batch is said to have ended, with a result
as large as its input, which goes to the outbox. Each row has the process that does it, and the most memory that it had
until then (VmHWM). Speeds are in MB (10^6 bytes).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import files
from tests.bench.batches import CARD
from tests.bench.files import Process, pieces, row
from tests.processes import valkey


def wait(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def measure(url: str, redis: Redis, folder: Path, count: int, window: int) -> None:
    redis.hset(keys.MODELS, "m", json.dumps(CARD))
    options = ("--broker", url, "--files-dir", str(folder / "files"))
    whole, inbox = folder / "whole", folder / "inbox"
    with whole.open("wb") as file:
        for piece in pieces(count):
            file.write(piece)
    size, batch = whole.stat().st_size, ""

    def field(name: str) -> str:
        return str(redis.hget(keys.batch(batch), name) or "")

    config = folder / "sources.toml"
    config.write_text(f'[files]\ntype = "folder"\nfolder = "{folder}"\nmax_file = {size}\n')
    with Process("sources", "--config", str(config), *options) as sources:
        wait(inbox.exists)
        os.rename(whole, inbox / "in.jsonl")
        began = time.perf_counter()
        wait(lambda: redis.keys(keys.inbox_lease("*")) or redis.zcard(keys.BATCHES))  # a small one is copied at once
        row("found", "sources", sources.most_mb, time.perf_counter() - began, size, count)
        began = time.perf_counter()
        wait(lambda: redis.zcard(keys.BATCHES))
        row("copy", "sources", sources.most_mb, time.perf_counter() - began, size, count)
        (batch,) = redis.zrange(keys.BATCHES, 0, -1)
        with Process("sweeper", "--max-batch-lines", str(window), *options) as sweeper:
            began = time.perf_counter()
            wait(lambda: field("status") != "validating")
            row("check", "sweeper", sweeper.most_mb, time.perf_counter() - began, size, count)
            began, cpu, made = time.perf_counter(), sweeper.cpu_s, min(count, window)
            wait(lambda: int(field("line") or 0) >= made)
            ended, each = time.perf_counter(), round(made / (sweeper.cpu_s - cpu))
            about = ("lines made and sent", "sweeper", sweeper.most_mb, ended - began)
            row(*about, size * made // count, made, lines_per_cpu_s=each)
        end(redis, batch, folder / "files")
        began = time.perf_counter()
        wait((folder / "outbox" / "in.jsonl").exists)
        row("result copied to the outbox", "sources", sources.most_mb, time.perf_counter() - began, size, count)
    assert (folder / "outbox" / "in.jsonl").stat().st_size == size


def end(redis: Redis, batch: str, blobs: Path) -> None:
    """End the batch; its output is as its input."""
    about = redis.hgetall(keys.batch(batch))
    output = files.new_id(int(about["created"]))
    os.link(blobs / about["input_file"], blobs / output)
    redis.zadd(keys.FILE_NOTES, {output: int(time.time())})
    run(redis, files.file_made(files.File(output, (blobs / output).stat().st_size, "out", files.BATCH_OUTPUT, 1)))
    redis.hset(keys.batch(batch), mapping={"output_file": output, "status": "completed"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000_000, help="of the file, 223 bytes each")
    parser.add_argument("--window", type=int, default=50_000, help="lines that are made and sent")
    args = parser.parse_args()
    with valkey() as (url, redis), tempfile.TemporaryDirectory() as folder:
        measure(url, redis, Path(folder), args.lines, args.window)


if __name__ == "__main__":
    main()
