"""A watched folder, processes that serve it, and a look at whether each line came out once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.store.batches import Batch
from tests.chaos.batching import URL, lines
from tests.chaos.calls import sources
from tests.warm import Forked


class SourcesProcess:
    """`penstock sources`, with a table of its own."""

    def __init__(self, url: str, folder: Path, table: Mapping[str, Any], **options: str) -> None:
        """`folder`: for the configuration, the log, and files' content."""
        name = Path(tempfile.mkdtemp(dir=folder))
        config = name / "sources.toml"
        config.write_text("[files]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items()))
        self.log = name / "log"
        argv = [sys.executable, "-m", "workers.cli", "sources", "--broker", url, "--config", str(config)]
        argv += ["--files-dir", str(folder / "files")]
        argv += [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", value)]
        self.process = Forked(argv, os.environ, self.log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(60)
        if kind is not None:
            print(self.log.read_text()[-4000:])


class Watched:
    """A watched folder; `put` a file of these bodies there, whose lines' custom_ids are `r` and a number."""

    def __init__(self, redis: Redis, folder: Path, **table: Any) -> None:
        self.redis = redis
        self.root = folder / "watched"
        self.table = {"type": "folder", "folder": str(self.root), "settled_seconds": 0.0} | table
        self.inbox, self.outbox, self.done = (self.root / name for name in ("inbox", "outbox", "done"))
        self.inbox.mkdir(parents=True)

    def put(self, name: str, bodies: Sequence[Mapping[str, Any]], url: str = URL) -> None:
        self.put_bytes(name, b"".join(lines(bodies, url)))

    def put_bytes(self, name: str, content: bytes) -> None:
        """Rename a whole file into the inbox."""
        target, whole = self.inbox / name, self.root / ".whole"
        target.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(content)
        whole.rename(target)

    def open(self) -> dict[str, Any]:
        """Objects that are open, by the ids of their batches."""
        places = self.redis.keys(keys.inbox("folder:*"))
        return {text(k): v for place in places for k, v in self.redis.hgetall(place).items()}

    def batches(self) -> list[Batch]:
        """All batches, the oldest first."""
        names = [text(name) for name in self.redis.zrange(keys.BATCH_INDEX, "-", "+", bylex=True)]
        return [Batch.parse(name, self.redis.hgetall(keys.batch(name))) for name in names]

    def expanded(self) -> int:
        """Lines of all batches of which tasks were made."""
        return sum(batch.count("line") for batch in self.batches())

    def delivered(self, name: str) -> bool:
        """Its results are written, and nothing is left to do."""
        return (self.outbox / f"{name}.jsonl").exists() and not self.open()

    def lines(self, name: str) -> dict[str, dict[str, Any]]:
        """The lines of a result, by custom_id. Raises ValueError if one is there twice."""
        found = [json.loads(line) for line in (self.outbox / name).read_bytes().splitlines()]
        each = {line["custom_id"]: line for line in found}
        if len(each) != len(found):
            raise ValueError(f"{len(found)} lines of {len(each)} requests in {name}")
        return each

    def faults(self, name: str, count: int, refused: int = 0) -> list[str]:
        """What is wrong once a file of `count` lines is delivered, of which `refused` are bad."""
        found = []
        output, errors = self.lines(f"{name}.jsonl"), self.lines(f"{name}.errors.jsonl")
        if (len(output), len(errors)) != (count - refused, refused):
            found.append(f"{len(output)} and {len(errors)} lines of {count}, {refused} of them bad")
        if output.keys() | errors.keys() != {f"r{number}" for number in range(count)}:
            found.append("other lines than there were")
        if len(self.batches()) != 1:
            found.append(f"{len(self.batches())} batches of one file")
        if left := [path for path in self.outbox.rglob("*") if path.is_file() and not path.name.startswith(name)]:
            found.append(f"left in the outbox: {left}")
        if self.redis.keys(keys.file(self.batches()[0].input_file)):
            found.append("the copy of the input is left")
        return found


def free_leases(redis: Redis) -> None:
    """As if the time of a killed process's leases were over."""
    for name in redis.keys(keys.inbox_lease("*")):
        redis.delete(name)


def load_scripts(redis: Redis) -> None:
    """So that the first call of each script does what it is to do: see `producers.connection.script.run`."""
    for script in sources():
        redis.script_load(script.text)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
