"""The real scripts on a real server, one of them broken on purpose where asked, and what they leave there."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from redis import Redis

from producers.connection.script import Call, Script, run, script
from producers.contract import keys
from tests.histories import histories
from tests.waiting import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Mutant:
    """A script in which `old` was replaced by `new`."""

    package: str
    name: str
    old: str
    new: str

    def text(self) -> str:
        whole = script(self.package, self.name).text
        if whole.count(self.old) != 1:
            raise ValueError(f"{self.name}.lua holds {whole.count(self.old)} times, not once: {self.old}")
        return whole.replace(self.old, self.new)

    def broken(self, sent: Script) -> Script:
        """The script that is sent in its place."""
        return written(self.text()) if sent is script(self.package, self.name) else sent


def written(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Release:
    """A release whose processes send their own text of every script. `level`: its workers'; `minds_memory`: its scripts
    look at how full the server is; `counts_joins`: its leases say how often a looker joined;
    `minds_revoked`: its CLAIM looks for what was revoked; `places`: its FETCH leaves messages to who holds prefixes;
    `counts_cuts`: its APPEND tells the record of discarded tokens also where it has none to append."""

    level: int = 0
    minds_memory: bool = True
    counts_joins: bool = True
    minds_revoked: bool = True
    places: bool = True
    counts_cuts: bool = True

    def of(self, module: Any) -> Any:
        """A module that packs calls and reads their answers, as this release has it."""
        return module


@dataclass(slots=True)
class Server:
    """Sends calls. `heard` is every message since the last `listen`: (channel, payload)."""

    redis: Redis
    mutant: Mutant | None = None
    _ears: Any = field(init=False)
    _alive: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.redis.flushall()
        self._ears = self.redis.pubsub()
        self._ears.psubscribe("penstock:*")
        self.listen()

    def close(self) -> None:
        self._ears.close()
        for inc in list(self._alive):
            self.hear(inc, False)

    def run(self, call: Call) -> Any:
        if self.mutant:
            call = Call(self.mutant.broken(call.script), call.keys, call.args)
        return run(self.redis, call)

    @contextmanager
    def filled(self, share: float) -> Iterator[None]:
        """This share of the server's memory is in use, as the next script sees; 0: it has no bound."""
        if not share:
            yield
            return
        self.redis.delete(keys.WAITING_MEMORY)
        self.redis.config_set("maxmemory", int(self.redis.info("memory")["used_memory"] / share))
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", 0)
            self.redis.delete(keys.WAITING_MEMORY)

    def listen(self) -> list[tuple[str, str]]:
        """What was published since the last time, in order. A PING's answer stands behind all of it."""
        self._ears.ping("all")
        heard: list[tuple[str, str]] = []
        while True:
            message = self._ears.get_message(timeout=PATIENCE_S)
            if message is None:
                raise TimeoutError("the server did not answer a PING within a minute")
            if message["type"] == "pong":
                return heard
            if message["type"] == "pmessage":
                heard.append((message["channel"].decode(), message["data"].decode()))

    def hear(self, inc: str, alive: bool) -> None:
        """Whether somebody listens to this incarnation's alive channel, on a connection of its own."""
        if alive and inc not in self._alive:
            self._alive[inc] = self.redis.pubsub()
            self._alive[inc].subscribe(keys.alive(inc))
            assert self._alive[inc].get_message(timeout=PATIENCE_S)["type"] == "subscribe"
        elif not alive and (ear := self._alive.pop(inc, None)):
            ear.unsubscribe()
            while ear.get_message(timeout=PATIENCE_S)["type"] != "unsubscribe":
                pass
            ear.close()

    def heard(self) -> set[str]:
        return set(self._alive)

    def now(self) -> int:
        """The server's clock in ms."""
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def lease(self, inc: str, alive: bool) -> None:
        if alive:
            self.redis.set(keys.lease(inc), "{}")
        else:
            self.redis.delete(keys.lease(inc))

    def deadlines(self) -> set[str]:
        """What stands in the index of deadlines."""
        return {name.decode() for name in self.redis.zrange(keys.DEADLINES, 0, -1)}

    def rows(self) -> list[dict[str, str]]:
        """The outbox's rows, all of which are due."""
        names = [name.decode() for name in self.redis.zrange(keys.WEBHOOKS_DUE, 0, -1)]
        found = [self.redis.hgetall(keys.webhook_row(name)) for name in names]
        return [{field.decode(): value.decode() for field, value in row.items()} for row in found]

    def erased(self, task_ids: Iterable[str]) -> dict[str, str]:
        """The deleted tasks, whose ids are kept for a time, with the nonces of their DELETE; all in the index."""
        ids = list(task_ids)
        with self.redis.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.get(keys.erased(task_id))
                pipe.ttl(keys.erased(task_id))
            for index in (keys.ERASING, keys.TASKS, keys.REQUESTS):
                pipe.zrange(index, 0, -1)
            *found, erasing, tasks, requests = pipe.execute()
        kept = {task_id: nonce.decode() for task_id, nonce in zip(ids, found[::2], strict=True) if nonce is not None}
        assert {name.decode() for name in erasing} == set(kept)
        assert all(ttl > 0 for nonce, ttl in zip(found[::2], found[1::2], strict=True) if nonce is not None)
        assert not kept.keys() & {name.decode() for name in (*tasks, *requests)}
        return kept

    def revoked(self) -> set[str]:
        """The ids that are noted as revoked for some time yet."""
        return {name.decode() for name in self.redis.zrange(keys.REVOKED, self.now(), "+inf", byscore=True)}

    def waiting(self) -> tuple[Counter[str], ...]:
        """The counts of what waits: tasks and tokens by kind and queue, tasks by tenant."""
        found = [self.redis.hgetall(name) for name in (keys.WAITING, keys.WAITING_TOKENS, keys.WAITING_TENANTS)]
        return tuple(Counter({name.decode(): int(n) for name, n in one.items()}) for one in found)

    def ledger(self) -> list[dict[str, str]]:
        """The ledger's rows."""
        rows: Any = self.redis.xrange(keys.LEDGER)
        return [{field.decode(): value.decode() for field, value in row.items()} for _, row in rows]

    def stored(self, task_ids: Iterable[str]) -> dict[str, Stored]:
        """All that the store holds of these tasks."""
        ids = list(task_ids)
        with self.redis.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hgetall(keys.task(task_id))
                pipe.xrange(keys.stream(task_id))
                pipe.ttl(keys.task(task_id))
                pipe.ttl(keys.stream(task_id))
                pipe.hgetall(keys.result(task_id))
                pipe.ttl(keys.result(task_id))
            for index in (keys.SUBMITTING, keys.UNSETTLED, keys.SETTLED):
                pipe.zrange(index, 0, -1)
            *parts, listed, unsettled, settled = pipe.execute()
        found = {}
        for k, task_id in enumerate(ids):
            fields, entries, ttl, stream_ttl, blocks, result_ttl = parts[6 * k : 6 * k + 6]
            packed = [zlib.decompress(blocks[b"%d" % at]).decode().split("\n") for at in range(len(blocks))]
            found[task_id] = Stored(
                {name.decode(): value.decode() for name, value in fields.items()},
                [(entry_id.decode(), value[b"e"].decode()) for entry_id, value in entries]
                or [(f"{at}-0", entry) for at, entry in enumerate(itertools.chain(*packed), 1)],
                ttl,
                result_ttl if blocks else stream_ttl,
                task_id.encode() in listed,
                task_id.encode() in unsettled,
                task_id.encode() in settled,
                bool(blocks) and not entries,
            )
        return found


@dataclass(frozen=True, slots=True)
class Stored:
    """`entries` and their TTL are the stream's, or the compact result's."""

    fields: dict[str, str]
    entries: list[tuple[str, str]]
    ttl: int
    stream_ttl: int
    listed: bool
    unsettled: bool
    settled: bool
    compact: bool

    def json(self, name: str) -> Any:
        return json.loads(self.fields[name])


#: The release of this tree.
THIS = Release()


class Calls(RuleBasedStateMachine):
    """Calls to `server` and to a model beside it: `compare` holds the two against each other after each."""

    server: Server
    last: Callable[[], None] = staticmethod(lambda: None)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.close()

    def acts(self, who: str = "") -> Release:
        """The release of whoever acts: of a worker, by its incarnation; else of a gateway or sweeper."""
        return THIS

    def do(self, step: Callable[[], None]) -> None:
        self.last = step
        step()
        self.compare()

    @rule()
    def again(self) -> None:
        """The reply was lost: the very same call once more."""
        self.do(self.last)

    @abstractmethod
    def compare(self) -> None: ...


def run_machine(machine: Any, examples: int, steps: int) -> None:
    """Run a machine; raises AssertionError (or what the server says) where the two part.

    A broken script meets the same histories each time, enough of them for it to be noticed.
    """
    same = {"derandomize": True, "phases": [Phase.generate]} if machine.mutant else {}
    run_state_machine_as_test(machine, settings=histories(examples, steps, **same))


def notices(check: Callable[..., None], redis: Redis, mutant: Mutant, **options: Any) -> None:
    """Raises unless the check of the scripts fails with this one broken."""
    assert mutant.text()
    with pytest.raises(Exception):  # noqa: B017, PT011 - a wrong answer or record, or the server's own complaint
        check(redis, mutant, **options)
