"""A store with real scripts beside the model's records: calls go to both, and everything that is stored is compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from redis import Redis

from producers.contract import keys
from producers.contract.levels import queue_of, split
from producers.contract.webhook import FINAL_EVENTS, TASK_EVENTS, Webhook
from producers.store import protocol
from tests.protocol.model.scripts import Rec
from tests.protocol.server import Calls, Mutant, Release, Server, Stored

#: Task -> choices. `p` comes from plain Celery.
TASKS = {"t1": 1, "t2": 2, "p": 3}
PROMPT = 7
#: Whose prompts came as token ids, so that their records say how many they are.
COUNTED = ("t1", "p")
LIMIT = 2
#: So long that none lapses by itself.
LEASE_MS = 10**8
#: Why a message is kept as a dead letter.
LETTER = "given up"
TTL = 500
#: When the deadline of a task is, ms: long ago, once it has passed. `t1` has none at first.
FAR, PASSED = 9_000_000_000_000, 1
DEADLINES = {"t2": FAR, "p": FAR}
INCS = ("i1", "i2", "i3")
#: Processes that follow tasks.
PROCESSES = ("a", "b")
#: Pools of two versions, and which has each of the incarnations, should it serve.
POOLS = (keys.Pool("m", "1", "a"), keys.Pool("m", "1", "b"), keys.Pool("m", "2", "a"))
POOL = POOLS[0]
#: An endpoint that hears of every task's end, and what hears of `t1` besides.
ENDPOINT = {"id": "we_1", "url": "https://e.example/", "event_types": FINAL_EVENTS, "tenant": None, "celery": True}
OWN = Webhook("https://own.example/", TASK_EVENTS, "whsec_c2VjcmV0")
#: Every field that a record may have (see `producers.contract.record`), but for `next:<choice>`.
FIELDS = {
    *("v", "status", "nonce", "created", "queued", "started", "first", "finished", "settled", "deadline", "plain"),
    *("n", "prompt_tokens", "cancel", "claim", "owner", "deaths", "lost", "claims", "stuck", "mark", "end"),
    *("reasons", "usage", "error", "began", "waits", "tier", "tokens", "tenant", "prompt", "discarded", "again"),
    *("letter", "version", "queue", "fingerprint", "origin", "webhook", "webhook_secret", "kept", "rows", "level"),
    "followers",
}


def prompt_fields(t: str) -> dict[str, str | int]:
    return {"n": TASKS[t]} | ({"prompt_tokens": PROMPT} if t in COUNTED else {})


def sent_to(t: str, need: int = 0) -> dict[str, str | int]:
    """The version that a client sends a task to: of `t2` an earlier release's says its pool. And who wants to hear.
    `need`: the level that the task needs."""
    if t == "t2":
        return {"queue": POOL.queue, "origin": "task", "tier": "flex", "tokens": 9, "tenant": "a"}
    level = {"level": need} if need else {}
    return {
        "version": POOL.version,
        "queue": queue_of(POOL.version_queue, need),
        "origin": "task",
        **OWN.fields(),
        **level,
    }


def rows_of(t: str, told: Iterable[str]) -> Counter[str]:
    """The rows of a task's events, by name and without what is a task's alone: `t1 completed own`."""
    rows = Counter(f"{t} {event} we_1" for event in told if event != "in_progress")
    return rows + Counter(f"{t} {event} own" for event in told if t == "t1")


#: What a row of the ledger says of a task that ended, and of which.
BILLED = ("id", "status", "prompt", "output", "discarded", "again", "attempts", "deaths", "longest")
#: Times that a row has if they have been.
TIMED = ("created", "started", "first")


def billed(t: str, r: Rec, again: int, deaths: int) -> Counter[tuple[str, ...]]:
    """The row of a task that ended. `again`: what later workers took up; `deaths`: as it was known then."""
    if not r.end:
        return Counter()
    prompt = (r.counted or 0) if r.claims else 0
    counts = (prompt, sum(r.next) + r.discarded, r.discarded, again, r.claims, deaths, max(r.next))
    times = (name for name, been in zip(TIMED, (t != "p", r.claims, any(r.next)), strict=True) if been)
    return Counter([(t, r.end, *map(str, counts), *times)])


def _shorter(rows: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """The same rows as an earlier release writes them."""
    shorter: Counter[tuple[str, ...]] = Counter()
    for row, times in rows.items():
        shorter[row[: len(BILLED) - 1]] += times
    return shorter


def begun(r: Rec, t: str, need: int = 0) -> Rec:
    """A new record, as the model has it."""
    kind = (POOL.version, None) if t != "p" else None
    hook = frozenset(event.removeprefix("response.") for event in (TASK_EVENTS if t == "t1" else FINAL_EVENTS))
    counted = PROMPT if t in COUNTED else None
    return r._replace(next=(0,) * TASKS[t], counted=counted, kind=kind, hook=hook, need=need)


def reason_of(r: Rec, choice: int) -> str:
    """Of a choice of a task that is incomplete."""
    mine = [entry for entry in map(json.loads, r.stream) if entry[0] == choice]
    return mine[-1][5] if mine and len(mine[-1]) > 5 else {"expired": "deadline"}.get(str(r.why), "error")


def counts(records: Iterable[dict[str, str]]) -> tuple[Counter[str], ...]:
    """What is counted of the tasks that wait: tasks and tokens by kind and queue, tasks by tenant."""
    tasks, tokens, tenants = Counter[str](), Counter[str](), Counter[str]()
    for r in (one for one in records if "waits" in one):
        place = f"{r.get('tier', 'default')} {r['queue']}"
        assert r["waits"] == place.replace(" ", f" {r.get('tokens', 0)} ", 1)
        tasks += Counter([place.partition(" ")[0], place])
        tokens += Counter({place: int(r.get("tokens", 0))})
        tenants += Counter([r.get("tenant", "")])
    return tasks, tokens, tenants


class Pair(Calls):
    """`model` is what the records should be; `published` what was heard; `controls` what workers should be told;
    `rows` what the outbox has, of them `past` of records that are gone; `owed` what the ledger has of those; `taken_up`
    `followers`: who followed a task before a call, and `released` the one that it gave back;
    the tokens that later workers took up; `died` the deaths that were counted at a task's end; `erased` the tasks that
    were deleted, with the nonce of that; `revoked` those that were revoked while they had no record."""

    redis: Redis
    mutant: Mutant | None = None
    earlier: Release | None = None
    """A release whose scripts are called, too."""

    def open(self) -> None:
        self.server = Server(self.redis, self.mutant)
        self.model: dict[str, Rec | None] = dict.fromkeys(TASKS)
        self.published: dict[str, list[str]] = {t: [] for t in TASKS}
        self.controls: list[tuple[str, str]] = []
        self.followers: dict[str, set[str]] = {t: set() for t in TASKS}
        self.released = ""
        self.live: set[str] = set(INCS)
        self.rows: Counter[str] = Counter()
        self.past: Counter[str] = Counter()
        self.owed: Counter[tuple[str, ...]] = Counter()
        self.taken_up: Counter[str] = Counter()
        self.died: dict[str, int] = {}
        self.erased: dict[str, str] = {}
        self.revoked: set[str] = set()
        self.deletes = 0
        self.redis.hset(keys.WEBHOOK_ENDPOINTS, "we_1", json.dumps(ENDPOINT))
        for inc, pool in zip(INCS, POOLS, strict=True):
            self.take_lease(inc)
            self.redis.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))

    def take_lease(self, inc: str) -> None:
        release, pool = self.acts(inc), POOLS[INCS.index(inc)]
        about = json.dumps({"level": release.level} if release.level else {})
        assert self.server.run(release.of(protocol).lease(inc, pool.queue, about, LEASE_MS, take=True)) == 1

    def owned(self, t: str) -> Release:
        """The release of the worker that has a task, or had it last."""
        r = self.model[t]
        return self.acts(str(r.owner) if r and r.owner else "")

    def apt(self, t: str, wanted: Callable[[Rec], Any]) -> str:
        """This task if it is such a one; else another that is, if there is any."""
        fits = [other for other in sorted(TASKS) if (r := self.model[other]) and wanted(r)]
        return t if t in fits or not fits else fits[0]

    def forget(self, t: str, r: Rec) -> None:
        """A record is gone, and leaves its rows."""
        self.past += rows_of(t, r.told)
        self.owed += billed(t, r, self.taken_up.pop(t, 0), self.died.pop(t, r.deaths))
        self.model[t] = None

    def erase(self, t: str, last: Rec, nonce: str) -> None:
        """A task is deleted: the ledger's row is left of it, and the rows of earlier lives of its id."""
        self.forget(t, last)
        self.past -= rows_of(t, last.told)
        self.rows -= rows_of(t, last.told)
        self.erased[t] = nonce

    def note_what_was_taken_up(self, t: str, before: Rec | None) -> None:
        """After a CLAIM: what an earlier worker had computed by then is computed again."""
        r = self.model[t]
        if before and r and r.claims > before.claims > 0 and r.length:
            self.taken_up[t] += (r.counted or 0) + len(r.stream)

    def held(self, t: str, valid: bool) -> str:
        """The claim that holds the task; or one that does not."""
        r = self.model[t]
        return str(r.claim) if valid and r and r.claim else "nobody's"

    def compare(self) -> None:
        controls, wakes = [], 0
        told: dict[str, dict[str, list[str]]] = {t: {name: [] for name in ("", *PROCESSES)} for t in TASKS}
        for channel, payload in self.server.listen():
            wakes += channel == keys.WEBHOOKS_WAKE
            if channel.startswith("penstock:tokens:@"):
                lines = payload.split("\n")
                for t, message in zip(lines[::2], lines[1::2], strict=True):
                    told[t][channel.removeprefix("penstock:tokens:@")].append(message)
            elif channel.startswith("penstock:tokens:"):
                told[channel.removeprefix("penstock:tokens:")][""].append(payload)
            elif channel != keys.WEBHOOKS_WAKE:
                controls.append((channel, payload))
        for t, by_process in told.items():
            self._same_told(t, by_process)
        self.released = ""
        assert controls == self.controls
        self.controls = []
        self._same_rows(wakes)
        assert self.server.erased(TASKS) == self.erased
        assert self.server.revoked() == self.revoked
        now = Counter(self.owed)
        for t, r in self.model.items():
            if r and r.end:
                now += billed(t, r, self.taken_up[t], self.died.setdefault(t, r.deaths))
        rows = self.server.ledger()
        mine = [row for row in rows if "longest" in row]
        found = Counter((*(row[name] for name in BILLED), *(name for name in TIMED if row[name])) for row in mine)
        if len(mine) < len(rows):  # written by the scripts of 0.1.0, which have neither the longest choice nor times
            assert self.earlier is not None
            assert found <= now
            assert Counter(tuple(row[name] for name in BILLED[:-1]) for row in rows) == _shorter(now)
        else:
            assert found == now
        waited_for = {t for t, r in self.model.items() if r and not r.end and (r.expired or r.cancel or t in DEADLINES)}
        assert self.server.deadlines() == waited_for
        kept = self.server.stored(TASKS)
        for t, stored in kept.items():
            self._same(t, self.model[t], stored)
        assert self.server.waiting() == counts(stored.fields for stored in kept.values())
        self._same_bytes([stored.fields for stored in kept.values()])

    def _same_told(self, t: str, told: dict[str, list[str]]) -> None:
        """What was published of a task: on its own channel, and the same to those who followed it before, which nobody
        of an earlier release does; what APPEND tells them is not on its own channel, where nobody listens."""
        own = told.pop("")
        lines = {process: [line for line in said if line] for process, said in told.items()}
        heard = [process for process, said in lines.items() if said]
        assert set(heard) <= self.followers[t], "told to a process that does not follow it"
        assert not own or not heard or [lines[process] for process in heard] == [own] * len(heard)
        messages = own or (lines[heard[0]] if heard else [])
        by_earlier = self.earlier is not None and own and not heard
        assert not messages or by_earlier or all(lines[process] == messages for process in self.followers[t])
        for message in messages:
            position, *entries = json.loads(message)
            assert position == len(self.published[t]), "published at another position than in the stream"
            self.published[t] += map(json.dumps, entries)
        released = {process for process, said in told.items() if "" in said}
        assert released <= self.followers[t]
        if self.released == t and not self.earlier:
            assert released == self.followers[t], "whoever follows a task was not told that its worker gave it back"
        self.followers[t] = set((self.redis.hget(keys.task(t), "followers") or b"").decode().split())

    def _same_bytes(self, records: list[dict[str, str]]) -> None:
        """A tenant's bytes are those of its records without an end, and what counts until an end, also of records that
        have gone by then, and of the ids that are kept of deleted tasks."""
        ids = len(self.erased)
        for tenant in ("", "a"):
            mine = [r["kept"].split() for r in records if "kept" in r and r.get("tenant", "") == tenant]
            said = {name.decode(): int(number) for name, number in self.redis.hgetall(keys.kept(tenant)).items()}
            ends = {int(name): number for name, number in said.items() if name.isdecimal()}
            assert said.get("total", 0) == sum(int(one[0]) for one in mine if len(one) == 1) + sum(ends.values())
            for end in {one[1] for one in mine if len(one) == 2}:
                assert ends[int(end)] >= sum(int(one[0]) for one in mine if one[1:] == [end])
            spare = sum(ends.values()) - sum(int(one[0]) for one in mine if len(one) == 2)
            ids -= spare // 120
            assert not ends or said["next"] <= min(ends), "or they would count for ever"
        assert ids <= 0, "an id that is kept is not counted"

    def _same_rows(self, wakes: int) -> None:
        """Rows outlive the records of earlier lives; each is written once, with the end that it tells of."""
        stored = self.server.rows()
        now = sum((rows_of(t, r.told) for t, r in self.model.items() if r), Counter(self.past))
        found = Counter(
            f"{row['object']} {row['type'].removeprefix('response.')} {row.get('endpoint', 'own')}" for row in stored
        )
        assert found == now
        assert wakes == (now - self.rows).total()
        self.rows = now

    def _same(self, t: str, r: Rec | None, stored: Stored) -> None:
        fields = stored.fields
        if r is None:
            assert not fields
            assert not stored.entries
            assert not stored.listed
            assert not stored.unsettled
            return
        nexts = tuple(int(fields.get(f"next:{c}", 0)) for c in range(TASKS[t]))
        assert set(fields) <= FIELDS | {f"next:{c}" for c in range(TASKS[t])}
        real = Rec(
            status=fields["status"],
            cancel="cancel" in fields,
            expired=fields.get("deadline") == str(PASSED),
            claim=fields.get("claim"),
            owner=fields.get("owner"),
            deaths=int(fields["deaths"]),
            settled="settled" in fields,
            stream=tuple(e for _, e in stored.entries if e.startswith("[")),
            next=nexts,
            end=fields.get("end"),
            claims=int(fields.get("claims", 0)),
            nonce=fields.get("nonce"),
            listed=stored.listed,
            why=self._why(fields),
            stuck=int(fields.get("stuck", 0)),
            mark=int(fields.get("mark", 0)),
            prompt=self._prompt(stored),
            discarded=int(fields.get("discarded", 0)),
            counted=int(fields["prompt_tokens"]) if "prompt_tokens" in fields else None,
            at="result" if stored.compact else "stream",
            dated="queued" in fields,
            kind=self._kind(fields),
            need=int(fields.get("level", 0)),
            hook=r.hook,
            told=r.told,
            waits=int("waits" in fields),
            letter="letter" in fields,
            lost=tuple(one["owner"] for one in json.loads(fields.get("lost", "[]"))),
        )
        times = [int(fields[name]) for name in ("created", "queued", "started") if name in fields]
        assert times == sorted(times)
        assert stored.unsettled == (r.end is not None and not r.settled)
        assert not (r.settled and self.followers[t]) or self.earlier
        if r.settled:  # what was settled in an earlier life may stand there, too
            assert stored.settled == (r.at == "stream")
        assert int(fields.get("prompt", 0)) == len(r.prompt)
        assert real == r
        assert [name for name, _ in stored.entries] == [f"{at + 1}-0" for at in range(len(stored.entries))]
        assert [json.dumps(json.loads(e)) for _, e in stored.entries] == self.published[t]
        assert ("first" in fields) == bool(r.stream)
        assert (0 < stored.ttl <= TTL) if r.settled else stored.ttl == -1
        assert (
            (stored.ttl < stored.stream_ttl <= TTL + 60)
            if r.settled
            else stored.stream_ttl == (-1 if stored.entries else -2)
        )
        if r.end:
            self._same_end(r, stored)
        else:
            assert len(stored.entries) == len(r.prompt) + len(r.stream)

    @staticmethod
    def _kind(fields: dict[str, str]) -> tuple[str, str | None] | None:
        queue, level = split(fields.get("queue", ""))
        assert level == int(fields.get("level", 0))
        found = next((p for p in POOLS if queue in (p.queue, p.version_queue)), None)
        assert fields.get("version") in (None, found and found.version)
        resolved = "version" in fields or "plain" not in fields
        return (found.version, fields.get("fingerprint")) if found and resolved else None

    @staticmethod
    def _prompt(stored: Stored) -> tuple[int, ...]:
        """Of each entry of the prompt's, how many tokens stand before it."""
        found, tokens = [], 0
        for _, entry in stored.entries:
            if entry.startswith('{"prompt"'):
                found.append(tokens)
            tokens += entry.startswith("[")
        return tuple(found)

    @staticmethod
    def _why(fields: dict[str, str]) -> str | None:
        error = json.loads(fields.get("error", "null"))
        known = {"expired": "expired", "dead_lettered": "dead", "release_missing": "unserved"}
        return known.get(error["code"]) if error else None

    @staticmethod
    def _same_end(r: Rec, stored: Stored) -> None:
        assert len(stored.entries) == len(r.prompt) + len(r.stream) + 1
        end = json.loads(stored.entries[-1][1])
        assert end["end"] == r.end
        assert {"reasons": end["reasons"], "usage": end["usage"], "error": end["error"]} == {
            name: stored.json(name) for name in ("reasons", "usage", "error")
        }
        assert end["usage"]["output_tokens"] == sum(r.next) + r.discarded
        if r.why in {"expired", "unserved"}:
            assert end["reasons"] == ([reason_of(r, c) for c in range(len(r.next))] if r.end == "incomplete" else [])
        assert end["usage"]["prompt_tokens"] == ((r.counted or 0) if "started" in stored.fields else 0)


def running(machine: Pair) -> bool:
    return any(r and r.claim and not r.end for r in machine.model.values())


def claimed(machine: Pair) -> bool:
    return any(r and r.claim for r in machine.model.values())


def deadline(t: str) -> dict[str, int]:
    return {"deadline": DEADLINES[t]} if t in DEADLINES else {}
