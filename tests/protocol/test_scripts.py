"""The record's real scripts do what the model's functions say, answer for answer and field for field."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.contract.levels import queue_of
from producers.contract.record import error_json
from producers.contract.stream import encode_token
from producers.store import protocol
from tests.histories import examples
from tests.protocol.model import ALL, scripts
from tests.protocol.model.scripts import FINAL
from tests.protocol.server import THIS, Mutant, Release, run_machine
from tests.protocol.store import (
    INCS,
    LETTER,
    LIMIT,
    PASSED,
    POOL,
    POOLS,
    PROCESSES,
    TASKS,
    TTL,
    Pair,
    begun,
    claimed,
    deadline,
    prompt_fields,
    running,
    sent_to,
)
from tests.protocol.store_histories import HISTORIES

TEXTS = ("", "a", '"\\\n', "é🙂", "\u2028", "\x00")

#: Shares of `maxmemory` in use at which some tiers are refused, or may not write. Beyond it the server refuses ADMIT.
FULL = (0.8, 0.95, 1.05, 1.2)
#: Tier -> the share beyond which it is; the scripts have them, too (`_memory.lua`).
ADMITTED, WRITTEN = {"default": 0.85, "flex": 0.75}, {"default": 1.06, "flex": 1.04}

tasks = st.sampled_from(sorted(TASKS))
incs = st.sampled_from(INCS)
mostly = st.sampled_from([True, True, True, True, False])
pools = st.sampled_from([POOL] * 4 + [*POOLS])
rarely = mostly.map(lambda yes: not yes)
batches = st.lists(
    st.tuples(tasks, mostly, mostly, st.integers(0, 2), st.sampled_from([0, 0, 0, -1, -2, -3, 1]), st.integers(0, 4)),
    min_size=1,
    max_size=4,
)

#: How a history begins.
BEGIN: dict[str, Any] = {"begun": st.tuples(*[st.integers(0, 6)] * 3), "alive": st.tuples(*[st.booleans()] * 3)}


class StoreMachine(Pair):
    """Every rule is one call on both sides; what it does stands in a closure, so that `again` can call it once more."""

    @initialize(**BEGIN)
    def begin(self, begun: tuple[int, ...], alive: tuple[bool, ...]) -> None:
        """Each task begins somewhere on its way, so that few steps lead to places that are seldom reached."""
        self.open()
        self.tokens = 0
        self.claims = 0
        for t, inc, far in zip(sorted(TASKS), INCS, begun, strict=True):
            for step in COURSE[:far]:
                step(self, t, inc)
        for inc, lives in zip(INCS, alive, strict=True):
            self.lease(inc, lives)

    def need(self, t: str, release: Release) -> int:
        """The level that a task of this release's gateway needs."""
        return 0

    def serving(self) -> set[tuple[str, str, int]]:
        """The kinds of workers that live: version, pool, level of their release."""
        live = [(inc, pool) for inc, pool in zip(INCS, POOLS, strict=True) if inc in self.live]
        return {(pool.version, pool.fingerprint, self.acts(inc).level) for inc, pool in live}

    # ---- the scripts -----------------------------------------------------------------------------------------

    @rule(
        t=st.sampled_from(["t1", "t2"]),
        nonce=st.sampled_from(["mine", "another's"]),
        late=st.booleans(),
        share=st.sampled_from([0.0, 0.0, 0.0, *FULL[:2]]),
    )
    def admit(self, t: str, nonce: str, late: bool, share: float = 0.0) -> None:
        release = self.acts()
        need = self.need(t, release)

        def step() -> None:
            asked = self.server.now() - (protocol.SUBMIT_WINDOW_MS + 1000 if late else 0)
            fields = prompt_fields(t) | sent_to(t, need) | deadline(t)
            with self.server.filled(share):
                answer = self.server.run(release.of(protocol).admit(t, nonce, asked, fields))
            new = begun(scripts.SUBMITTED, t, need)
            expected, self.model[t] = scripts.admit(
                *(self.model[t], nonce, late, ALL, new),
                erased=t in self.erased,
                full=release.minds_memory and share > ADMITTED[str(fields.get("tier", "default"))],
            )
            assert text(answer[0] if isinstance(answer, list) else answer) == expected

        self.do(step)

    @rule(t=tasks, valid=mostly)
    @precondition(lambda self: any(self.model.values()))
    def queued(self, t: str, valid: bool) -> None:
        t = self.apt(t, lambda r: r.listed) if valid else t
        said = self.acts().of(protocol)

        def step() -> None:
            answer = text(self.server.run(said.queued(t)))
            expected, self.model[t] = scripts.queued(self.model[t], ALL)
            assert answer == expected

        self.do(step)

    @rule(t=tasks, inc=incs, condemned=rarely, same=rarely, valid=mostly, pool=pools)
    def claim(self, t: str, inc: str, condemned: bool, same: bool, valid: bool, pool: keys.Pool = POOL) -> None:
        self.claims += 1
        t = self.apt(t, lambda r: not r.settled and r.owner not in self.live) if valid else t
        c = self.held(t, True) if same else f"c{self.claims}"
        plain = {"queue": pool.version_queue} | prompt_fields(t) | deadline(t) if t == "p" else None
        made = begun(scripts.QUEUED, t) if plain else None
        release = self.acts(inc)
        said = release.of(protocol)

        def step() -> None:
            call = said.claim(t, c, inc, pool, plain=plain, condemned=condemned, max_deaths=LIMIT)
            answer = said.read_claim(t, self.server.run(call))
            kind = (pool.version, pool.fingerprint, release.level)
            serving = self.serving()
            before = self.model[t]
            expected, self.model[t] = scripts.claim(
                *(before, c, inc, self.live, ALL),
                limit=LIMIT,
                made=made,
                condemned=condemned,
                kind=kind,
                serving=serving,
                erased=t in self.erased,
                revoked=release.minds_revoked and t in self.revoked,
            )
            r = self.model[t]
            letter = LETTER if expected == "done" and r and r.letter else ""
            assert (answer.answer, answer.letter) == (expected, letter)
            self.note_what_was_taken_up(t, before)
            if expected == "elsewhere":
                assert r
                *home, need = (*scripts.elsewhere(r, kind, serving, ALL, bound=made is None), 0)[:3]
                known = {
                    (p.version, f): q for p in POOLS for f, q in ((None, p.version_queue), (p.fingerprint, p.queue))
                }
                if t == "t2" and not r.claims:
                    known[home[0], home[1]] = POOL.queue
                assert answer.queue == queue_of(known[home[0], home[1]], need)
            assert (answer.record is not None) == (expected in ("go", "settle"))
            if answer.record:
                assert answer.record.fields == self.server.stored([t])[t].fields

        self.do(step)

    @rule(batch=batches, share=st.sampled_from([0.0, 0.0, 0.0, *FULL]))
    @precondition(running)
    def append(self, batch: list[tuple[str, bool, bool, int, int, int]], share: float = 0.0) -> None:
        calls: list[protocol.Append] = []
        release: Release | None = None
        for t, apt, valid, choice, offset, count in batch:
            t = self.apt(t, lambda r: r.claim and not r.end and not r.cancel) if apt else t
            choice %= TASKS[t]
            r = self.model[t]
            release = release or self.owned(t)
            if r and r.owner and self.owned(t) is not release:  # one call is one worker's
                continue
            i = max(0, (r.next[choice] if r else 0) + offset)
            entries = []
            for k in range(count):
                self.tokens += 1
                reason = "stop" if k == count - 1 and self.tokens % 3 == 0 else None
                entries.append(encode_token(choice, i + k, self.tokens, TEXTS[self.tokens % len(TEXTS)], None, reason))
            calls.append(protocol.Append(t, self.held(t, valid), choice, i, entries))
        by = release or THIS
        said = by.of(protocol)
        share = share if by.minds_memory else 0.0  # beyond it the server refuses another's APPEND

        def step() -> None:
            with self.server.filled(share):
                answers = said.read_append(self.server.run(said.append(calls)))
            expected = []
            for a in calls:
                tier = str(sent_to(a.task_id).get("tier", "default")) if a.task_id != "p" else "default"
                answer, at, self.model[a.task_id] = scripts.append(
                    *(self.model[a.task_id], a.claim_id, a.choice, a.index, tuple(a.entries), ALL),
                    full=share > WRITTEN[tier],
                )
                expected.append((answer, at))
            assert answers == expected

        self.do(step)

    @rule(
        t=tasks,
        valid=mostly,
        status=st.sampled_from(["completed", "incomplete", "failed"]),
        wrong=st.sampled_from([9, 9, 9, 0, 1, 2]),
        native=st.booleans(),
    )
    @precondition(claimed)
    def finish(self, t: str, valid: bool, status: str, wrong: int, native: bool = False) -> None:
        t = self.apt(t, lambda r: r.claim) if valid else t
        r, c = self.model[t], self.held(t, valid)
        nexts = list(r.next if r else (0,) * TASKS[t])
        if wrong < len(nexts):
            nexts[wrong] += 1
        error = '{"code":"internal"}' if status == "failed" else "null"
        release = self.owned(t)
        said, settles = release.of(protocol), native and release is THIS
        more: dict[str, Any] = {"settle_ttl_s": TTL} if settles else {}

        def step() -> None:
            before = self.model[t]
            used = (before.counted if before else None) or 0  # a worker says what it has said before
            call = said.finish(
                t, c, status, reasons='["stop"]', nexts=nexts, error=error, prompt_tokens=used, cached_tokens=3, **more
            )
            answer = self.server.run(call)
            expected, after = scripts.finish(self.model[t], c, tuple(nexts), ALL, status, settles=settles)
            self.model[t] = after
            assert text(answer[0]) == expected
            if expected == "won":
                assert after
                assert text(answer[1]) == after.status
            elif expected == "resend":
                assert after
                assert tuple(answer[1:]) == after.next
            else:
                assert len(answer) == 1

        self.do(step)

    @rule(t=tasks, letter=rarely)
    @precondition(lambda self: any(r and r.end for r in self.model.values()))
    def settle(self, t: str, letter: bool = False) -> None:
        t = self.apt(t, lambda r: r.end and not r.settled)
        said = self.owned(t).of(protocol)

        def step() -> None:
            answer = self.server.run(said.settle(t, TTL, LETTER if letter else ""))
            expected, self.model[t] = scripts.settle(self.model[t], letter=letter, erased=t in self.erased)
            assert answer == expected

        self.do(step)

    @rule(t=tasks, gone=rarely)
    @precondition(lambda self: any(r and r.end for r in self.model.values()))
    def orphan(self, t: str, gone: bool) -> None:
        t = self.apt(t, lambda r: r.end and not r.settled)
        said = self.acts().of(protocol)

        def step() -> None:
            answer = text(self.server.run(said.orphan(t, gone=gone, default_ttl_s=TTL)))
            r = self.model[t]
            needs = t == "p" or bool(r and r.why == "dead")
            expected, self.model[t] = scripts.orphan(r, self.live, ALL, needs=needs, gone=gone)
            assert answer == expected

        self.do(step)

    @rule(t=tasks, valid=mostly, short=rarely)
    @precondition(lambda self: any(r and r.end for r in self.model.values()))
    def compact(self, t: str, valid: bool, short: bool) -> None:
        t = self.apt(t, lambda r: r.settled) if valid else t
        stored = self.server.stored([t])[t]
        entries = stored.entries[:-1] if short else stored.entries
        block = zlib.compress("\n".join(entry for _, entry in entries).encode())
        said = self.acts().of(protocol)

        def step() -> None:
            answer = text(self.server.run(said.compact(t, int(stored.fields.get("settled", 0)), len(entries), [block])))
            r = self.model[t]
            expected, self.model[t] = scripts.compact(r, len(entries), ALL)
            if r is None or (r.at == "stream" and not r.length and not r.end):
                expected = "gone"  # a stream without entries is none
            assert answer == expected

        self.do(step)

    @rule(t=tasks, valid=mostly, buried=rarely)
    @precondition(claimed)
    def release(self, t: str, valid: bool, buried: bool = False) -> None:
        t = self.apt(t, lambda r: r.claim) if valid else t
        c = self.held(t, valid)
        release = self.owned(t)
        said, ends = release.of(protocol), buried and release is THIS
        more: dict[str, Any] = {}
        if ends:
            more = {"error": error_json("dead_lettered", "broken"), "letter": LETTER, "default_ttl_s": TTL}

        def step() -> None:
            answer = self.server.run(said.release(t, c, **more))
            before = self.model[t]
            expected, self.model[t] = scripts.release(before, c, ALL, buried=ends)
            assert answer == expected
            self.released = t if expected and before and not before.end and not ends else ""

        self.do(step)

    @rule(some=st.sets(tasks, min_size=1), process=st.sampled_from(PROCESSES), on=mostly)
    def follow(self, some: set[str], process: str, on: bool) -> None:
        ids = sorted(some)

        def step() -> None:
            can = [(r := self.model[t]) is not None and (r.end is None or process in self.followers[t]) for t in ids]
            answer = self.server.run(protocol.follow(process, ids, on=on))
            assert answer == [int(on and possible) for possible in can]

        self.do(step)
        for t in ids:
            assert (process in self.followers[t]) == (on and self.model[t] is not None) or self.model[t].end

    @rule(t=tasks, first=st.booleans(), valid=mostly)
    @precondition(lambda self: any(r and r.lost for r in self.model.values()))
    def absolve(self, t: str, first: bool, valid: bool) -> None:
        """An owner that was counted dead, or one that was not."""
        t = self.apt(t, lambda r: r.lost)
        r = self.model[t]
        inc = r.lost[0 if first else -1] if valid and r and r.lost else "nobody"
        said = self.acts().of(protocol)

        def step() -> None:
            answer = self.server.run(said.absolve(t, inc))
            expected, self.model[t] = scripts.absolve(self.model[t], inc)
            assert answer == expected

        self.do(step)

    @rule(t=tasks, valid=mostly, now=rarely)
    @precondition(lambda self: any(self.model.values()))
    def cancel(self, t: str, valid: bool, now: bool) -> None:
        if not now:
            return
        t = self.apt(t, lambda r: not r.end) if valid else t
        said = self.acts().of(protocol)

        def step() -> None:
            accepted, status = self.server.run(said.cancel(t))
            told, expected, after = scripts.cancel(self.model[t], self.live, ALL)
            self.model[t] = after
            assert (accepted, text(status)) == (int(told), expected)
            if told and expected not in FINAL and after and after.owner in self.live:
                self.controls = [*self.controls, (keys.control(after.owner), f"cancel {t}")]

        self.do(step)

    @rule(t=tasks, now=rarely)
    def revoke(self, t: str, now: bool) -> None:
        if not now:
            return

        def step() -> None:
            answer = text(self.server.run(protocol.revoke(t)))
            expected, self.model[t] = scripts.revoke(self.model[t], self.live, ALL)
            assert answer == expected
            if expected == "noted":
                self.revoked.add(t)
                assert self.server.redis.zcard(keys.REVOKED) == len(self.revoked), "what is over is removed"

        self.do(step)

    @rule(t=tasks)
    @precondition(lambda self: self.revoked)
    def its_revocation_is_forgotten(self, t: str) -> None:
        """Once its time is over."""
        if t in self.revoked:
            self.revoked.discard(t)
            self.server.redis.zadd(keys.REVOKED, {t: PASSED})

    @rule(t=tasks, now=rarely)
    @precondition(lambda self: any(self.model.values()))
    def delete(self, t: str, now: bool) -> None:
        if not now:
            return
        self.deletes += 1
        nonce = f"d{self.deletes}"
        said = self.acts().of(protocol)

        def step() -> None:
            r = self.model[t]
            self.server.redis.set(keys.celery_result(t), "{}")
            answer = text(self.server.run(said.delete(t, nonce))[0])
            expected, last = scripts.delete(r, ALL)
            if r is None and self.erased.get(t) == nonce:
                expected = "mine"
            assert answer == expected
            assert self.server.redis.exists(keys.celery_result(t)) == (r is None)
            if r is None or last is None:
                return
            if last is not r and r.owner in self.live:
                self.controls = [*self.controls, (keys.control(r.owner), f"cancel {t}")]
            self.erase(t, last, nonce)

        self.do(step)
        if self.model[t] is None and self.published[t]:
            assert json.loads(self.published[t][-1])["end"]
            self.published[t] = []

    @rule(t=tasks)
    @precondition(lambda self: self.erased)
    def its_id_may_be_used_again(self, t: str) -> None:
        """A deleted task's, once its time is over."""
        if self.erased.pop(t, None):
            self.server.redis.delete(keys.erased(t))
            self.server.redis.zrem(keys.ERASING, t)

    @rule(t=tasks, valid=mostly, now=rarely)
    @precondition(lambda self: any(self.model.values()))
    def expire(self, t: str, valid: bool, now: bool) -> None:
        if not now:
            return
        t = self.apt(t, lambda r: r.expired and not r.end) if valid else t
        said = self.acts().of(protocol)

        def step() -> None:
            answer = text(self.server.run(said.expire(t)))
            expected, self.model[t] = scripts.expire(self.model[t], self.live, ALL)
            assert answer == expected

        self.do(step)

    @rule(batch=batches)
    @precondition(running)
    def append_more(self, batch: list[tuple[str, bool, bool, int, int, int]]) -> None:
        """What a worker does most of the time."""
        self.append(batch)

    # ---- what happens around them ----------------------------------------------------------------------------

    @rule(inc=incs, alive=mostly)
    def lease(self, inc: str, alive: bool) -> None:
        if alive:
            self.take_lease(inc)
        else:
            self.server.lease(inc, False)
        (self.live.add if alive else self.live.discard)(inc)

    @rule(t=tasks, now=st.booleans())
    @precondition(lambda self: any(r and not r.end and not r.expired for r in self.model.values()))
    def deadline_passes(self, t: str, now: bool) -> None:
        r = self.model[t]
        if r and not r.end and now:
            self.server.redis.hset(keys.task(t), "deadline", PASSED)
            self.server.redis.zadd(keys.DEADLINES, {t: PASSED})
            self.model[t] = r._replace(expired=True)

    @rule(t=tasks)
    @precondition(lambda self: any(r and r.stream and not r.end for r in self.model.values()))
    def failover_loses_the_tail(self, t: str) -> None:
        t = self.apt(t, lambda r: r.stream and not r.end)
        r = self.model[t]
        if not r or not r.stream or r.end:
            return
        choice = json.loads(r.stream[-1])[0]
        left = r._replace(stream=r.stream[:-1], next=tuple(n - (c == choice) for c, n in enumerate(r.next)))
        self.model[t] = left
        self.published[t].pop()
        redis = self.server.redis
        redis.delete(keys.stream(t))  # written anew: a replica that never had the entry knows no later id
        for at, entry in enumerate(left.stream):
            redis.xadd(keys.stream(t), {"e": entry}, id=f"{at + 1}-0")
        redis.hset(keys.task(t), f"next:{choice}", left.next[choice])
        if not left.stream:
            redis.hdel(keys.task(t), "first")

    @rule(t=tasks)
    @precondition(lambda self: any(r and r.settled for r in self.model.values()))
    def ttl_runs_out(self, t: str) -> None:
        t = self.apt(t, lambda r: r.settled)
        r = self.model[t]
        if r and r.settled:
            self.server.redis.delete(keys.task(t), keys.stream(t), keys.result(t))
            self.forget(t, r)
            self.published[t] = []


#: How a task goes on its way: (machine, task, incarnation).
COURSE: tuple[Callable[[StoreMachine, str, str], None], ...] = (
    lambda m, t, inc: m.admit(t, "mine", False) if t != "p" else None,
    lambda m, t, inc: m.queued(t, True) if t == "t2" else None,  # t1 is claimed before its sender says so
    lambda m, t, inc: m.claim(t, inc, False, False, False),
    lambda m, t, inc: m.append([(t, True, True, choice, 0, 2) for choice in range(TASKS[t])]),
    lambda m, t, inc: m.cancel(t, True, True) if t == "t1" else None,
    lambda m, t, inc: m.finish(t, True, "completed", 9),
)


def check_store(redis: Redis, mutant: Mutant | None = None, **options: Any) -> None:
    """Run the machine; raises AssertionError (or what the server says) where scripts and model part."""
    machine = type("Machine", (StoreMachine,), {"redis": redis, "mutant": mutant})
    for history in HISTORIES:
        history(machine)
    run_machine(machine, **options)


@pytest.mark.usefixtures("valkey_url")
def test_scripts_and_model_agree(valkey: Redis) -> None:
    check_store(valkey, examples=examples(25, 60), steps=40)
