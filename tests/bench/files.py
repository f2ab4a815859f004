"""Memory that a large batch's input takes, and its speed: `python -m tests.bench.files`.

Real processes: `penstock gateway`, `penstock sweeper` and Valkey, no worker. A file is uploaded, downloaded, checked as
a batch's input, and its first lines are made and sent, until as many wait as a sweeper sends ahead. Each row has the
process that does it, and the most memory that it had until then (VmHWM). Speeds are in MB (10^6 bytes).

With `--bucket` files are in S3 (moto's server on loopback, which holds them in its own memory, and is slower than S3).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from redis import Redis

from producers.contract import keys
from producers.sweeper.batches.expand import WINDOW
from tests.aws import REGION, running_aws
from tests.bench.batches import CARD
from tests.bench.gateways import cpu_s, rss_mb
from tests.processes import free_port, valkey
from workers.cli.client import Gateway as Client

URL: Final = "/v1/completions"
LINE: Final = (
    '{"custom_id": "request-%012d", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": '
    '"The penstock feeds the turbine, and the turbine feeds the grid, request %012d.", "max_tokens": 16}}\n'
)
#: Lines that are sent in one piece.
LINES: Final = 4096


def pieces(count: int) -> Iterator[bytes]:
    """A batch's input of so many lines, each with an id of its own."""
    for first in range(0, count, LINES):
        yield "".join(LINE % (k, k) for k in range(first, min(first + LINES, count))).encode()


class Process:
    """A penstock process."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "workers.cli", *args, "--log-level", "warning"])

    @property
    def most_mb(self) -> float:
        """The most memory that it had so far."""
        return round(rss_mb(self._process.pid), 1)

    @property
    def cpu_s(self) -> float:
        """Seconds of a processor that it took so far."""
        return cpu_s(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


class Gateway(Process):
    """A gateway process on a port of its own."""

    def __init__(self, *args: str) -> None:
        port = free_port()
        self.client = Client(f"http://127.0.0.1:{port}")
        super().__init__("gateway", "--port", str(port), *args)
        while not self.client.ready():
            time.sleep(0.05)


def row(what: str, process: str, most_mb: float, seconds: float, size: int, lines: int, **more: float) -> None:
    speed = {"mb_per_s": round(size / 1e6 / seconds, 1), "lines_per_s": round(lines / seconds)} | more
    found = {"what": what, "process": process, "most_mb": most_mb, "seconds": round(seconds, 1)}
    print(json.dumps(found | speed), flush=True)


def measure(url: str, redis: Redis, place: str, count: int) -> None:
    size = count * len(LINE % (0, 0))
    redis.hset(keys.MODELS, "m", json.dumps(CARD))
    options = ("--broker", url, "--files-dir", place)
    with Gateway(*options, "--max-file", str(size)) as gateway:
        print(
            json.dumps({"what": "nothing yet", "process": "gateway", "most_mb": gateway.most_mb, "file_mb": size / 1e6})
        )
        began = time.perf_counter()
        client = gateway.client
        file_id = client.upload("in.jsonl", size, pieces(count))["id"]
        row("upload", "gateway", gateway.most_mb, time.perf_counter() - began, size, count)
        began = time.perf_counter()
        assert sum(map(len, client.content(file_id, 0))) == size
        row("download", "gateway", gateway.most_mb, time.perf_counter() - began, size, count)
        with Process("sweeper", *options) as sweeper:
            asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
            batch_id = client.create_batch(asked)["id"]
            began = time.perf_counter()
            while (batch := client.batch(batch_id))["status"] == "validating":
                time.sleep(0.05)
            assert batch["request_counts"]["total"] == count, batch
            row("check", "sweeper", sweeper.most_mb, time.perf_counter() - began, size, count)
            began, made = time.perf_counter(), min(count, WINDOW)
            while int(redis.hget(keys.batch(batch_id), "line") or 0) < made:
                time.sleep(0.05)
            row("first lines", "sweeper", sweeper.most_mb, time.perf_counter() - began, made * size // count, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000_000, help="of the file, 223 bytes each")
    parser.add_argument("--bucket", action="store_true", help="keep files in S3 instead of a folder")
    args = parser.parse_args()
    with valkey() as (url, redis), _bucket() if args.bucket else tempfile.TemporaryDirectory() as place:
        measure(url, redis, place, args.lines)


@contextmanager
def _bucket() -> Iterator[str]:
    with running_aws() as aws:
        aws.client("s3").create_bucket(Bucket="files")
        yield f"s3://files/bench?region={REGION}&endpoint_url={aws.url}"


if __name__ == "__main__":
    main()
