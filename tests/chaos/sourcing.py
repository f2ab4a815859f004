"""A watched folder, processes that serve it, and a look at whether each line came out once."""

from __future__ import annotations

import json
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.store.batches import Batch
from tests.chaos.batching import URL, lines
from tests.chaos.calls import sources
from tests.receiver import Process


class SourcesProcess(Process):
    """`penstock sources` with a configuration: TOML's text, or one table.

    `folder`: for the configuration, and for files' content unless `options` name another place. `module`: which
    stands for the command. It prints its log when the block fails.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        config: str | Mapping[str, Any],
        *options: str,
        module: str = "workers.cli",
        **env: str,
    ) -> None:
        path = Path(tempfile.mkdtemp(dir=folder)) / "sources.toml"
        path.write_text(config if isinstance(config, str) else _table(config))
        argv = ("--broker", url, "--config", str(path), "--files-dir", str(folder / "files"), *options)
        super().__init__(module, "sources", *argv, **env)

    @property
    def pid(self) -> int:
        return self.process.pid

    def reasons(self) -> list[str]:
        """Why it is not ready; empty while it is. It needs `--health-port`."""
        found = re.search(r"/readyz on port (\d+)", self.log.read_text())
        if found is None:
            return ["it does not listen yet"]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=10)
        except urllib.error.HTTPError as error:
            said: list[str] = json.loads(error.read())["reasons"]
            return said
        return []

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(self.log.read_text()[-4000:])
        super().__exit__(*error)


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


def _table(table: Mapping[str, Any]) -> str:
    return "[files]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
