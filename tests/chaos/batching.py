"""A batch, what serves its lines, and a look at whether each of them came out once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from redis import Redis

from producers.connection.aws import client as aws
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import batches, files
from producers.store.batches import Batch
from producers.store.blobs import Blobs, open_blobs
from producers.store.blobs.bucket import is_s3, read
from tests.producers.conftest import CARD, QUEUE
from tests.producers.fake_worker import FakeWorker

URL: Final = "/v1/completions"
#: A line's body that its endpoint refuses.
BAD: Final = {"model": "tiny", "prompt": [1], "temperature": -1}
GOOD: Final = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}


class Job:
    """A batch of these bodies; a line's custom_id is `r` and its number."""

    def __init__(
        self, redis: Redis, place: Path | str, bodies: Sequence[Mapping[str, Any]], url: str = URL, **fields: Any
    ) -> None:
        self.redis = redis
        self.count = len(bodies)
        self.blobs = open_blobs(place)
        self.id, self.input = make(redis, self.blobs, url, lines(bodies, url), **fields)

    def read(self) -> Batch:
        return Batch.parse(self.id, self.redis.hgetall(keys.batch(self.id)))

    def ended(self) -> bool:
        """It has ended, and is tidied up."""
        return self.redis.zscore(keys.BATCHES, self.id) is None

    def lines(self, kind: str) -> dict[str, dict[str, Any]]:
        """The lines of its output or error file, by custom_id. Raises ValueError if one is there twice."""
        name = self.read().fields.get(f"{kind}_file")
        if name is None:
            return {}
        found = [json.loads(line) for line in self.blobs.read(name, 0, 1 << 30).splitlines()]
        each = {line["custom_id"]: line for line in found}
        if len(each) != len(found):
            raise ValueError(f"{len(found)} lines of {len(each)} requests in the {kind} file")
        return each

    def faults(self) -> list[str]:
        """What is wrong once it has ended: each line must be in one file, and nothing else may be left."""
        output, error, batch = self.lines("output"), self.lines("error"), self.read()
        found = [] if not output.keys() & error.keys() else ["a line is in both files"]
        if output.keys() | error.keys() != {f"r{number}" for number in range(self.count)}:
            found.append(f"{len(output)} and {len(error)} lines of {self.count}")
        if (batch.count("completed"), batch.count("failed")) != (len(output), len(error)):
            found.append(
                f"it counts {batch.count('completed')} and {batch.count('failed')}: {len(output)}, {len(error)}"
            )
        mine = {self.input, batch.fields.get("output_file"), batch.fields.get("error_file")}
        if left := names_in(self.blobs.location) - mine:
            found.append(f"blobs are left: {left}")
        if left := [name for name in self.redis.keys(f"{keys.batch(self.id)}*") if text(name) != keys.batch(self.id)]:
            found.append(f"keys are left: {left}")
        for name in self.redis.keys(keys.task("*")):
            if not 0 < self.redis.ttl(name) <= 60 and self.redis.hget(name, "ttl") != b"60":
                found.append(f"{text(name)} is left: {self.redis.hgetall(name)}")
        return found


def names_in(place: str) -> set[str]:
    """The names of all blobs in a folder or a bucket."""
    if not is_s3(place):
        return {path.name for path in Path(place).iterdir() if path.is_file()}
    bucket = read(place)
    s3 = aws("s3", bucket.region, bucket.endpoint_url)
    found = s3.list_objects_v2(Bucket=bucket.name, Prefix=bucket.key()).get("Contents", [])
    return {one["Key"].removeprefix(bucket.key()) for one in found}


def make(
    redis: Redis, blobs: Blobs, url: str, content: Iterable[bytes], window_s: int = 3600, **fields: str
) -> tuple[str, str]:
    """An input file, and a batch for it: their ids."""
    now_ms = int(time.time() * 1000)
    file_id, batch_id = files.new_id(now_ms), batches.new_id(now_ms)
    redis.zadd(keys.FILE_NOTES, {file_id: now_ms // 1000})
    with blobs.writer(file_id) as writer:
        for piece in content:
            writer.write(piece)
        writer.commit()
    run(redis, files.file_made(files.File(file_id, writer.size, "in.jsonl", files.BATCH, now_ms // 1000)))
    made = {"endpoint": url, "input_file": file_id, "completion_window": f"{window_s}s"} | fields
    run(redis, batches.create(batch_id, window_s, made))
    return batch_id, file_id


def lines(bodies: Iterable[Mapping[str, Any]], url: str = URL) -> Iterable[bytes]:
    for number, body in enumerate(bodies):
        line = {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        yield json.dumps(line).encode() + b"\n"


class Serving:
    """Takes tasks of the model `tiny` and completes each with two tokens, on a thread."""

    def __init__(self, redis: Redis) -> None:
        redis.hset(keys.MODELS, "tiny", json.dumps(CARD))
        self._redis = redis
        self._worker = FakeWorker(redis)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.served: list[str] = []

    def _serve(self) -> None:
        while not self._stop.is_set():
            task_id = self._worker.take(QUEUE, 0.05)
            if task_id is None or self._worker.claim(task_id).answer != "go":
                continue
            self.served.append(task_id)
            self._worker.append(task_id, 0, ["Hello", " world"])
            self._worker.finish(task_id, [2])
            self._worker.settle(task_id)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
