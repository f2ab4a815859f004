"""A key's account counts what its tasks reserve and use, and lets none past a limit: the scripts beside a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.store import protocol
from producers.store.access.principal import Limits
from tests.producers.fake_worker import FakeWorker

KEY = "k" * 16
#: Small enough that each is met.
LIMITS = Limits(rpm=4, tpm=100, max_in_flight=3, budget_tokens=200)


@dataclass
class Account:
    """What the scripts should have counted. `open`: task -> (reserved, minute of its charge)."""

    open: dict[str, tuple[int, int]] = field(default_factory=dict)
    minute: int = 0
    requests: int = 0
    tokens: int = 0
    month: tuple[int, int] = (0, 0)
    spent: int = 0
    used: int = 0

    def at(self, now_ms: int) -> None:
        when = datetime.fromtimestamp(now_ms / 1000, UTC)
        if self.minute != now_ms // 60_000:
            self.minute, self.requests, self.tokens = now_ms // 60_000, 0, 0
        if self.month != (when.year, when.month):
            self.month, self.spent = (when.year, when.month), 0

    @property
    def reserved(self) -> int:
        return sum(reserved for reserved, _ in self.open.values())

    def charge(self, task: str, tokens: int) -> str:
        if self.spent + self.reserved + tokens > (LIMITS.budget_tokens or 0):
            return "budget_tokens"
        if len(self.open) >= (LIMITS.max_in_flight or 0):
            return "max_in_flight"
        if self.requests >= (LIMITS.rpm or 0):
            return "rpm"
        if self.tokens + tokens > (LIMITS.tpm or 0):
            return "tpm"
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        self.open[task] = tokens, self.minute
        return "new"

    def settle(self, task: str, used: int) -> None:
        reserved, minute = self.open.pop(task)
        self.spent, self.used = self.spent + used, self.used + used
        if minute == self.minute:
            self.tokens = max(0, self.tokens + used - reserved)


class Machine(RuleBasedStateMachine):
    """One key, whose tasks end in every way. The scripts' clock is a key that the test sets."""

    valkey: Redis

    def __init__(self) -> None:
        super().__init__()
        self.valkey.flushall()
        self.worker = FakeWorker(self.valkey)
        self.account = Account()
        self.number = 0
        self.now = 1_772_323_190_000  # 2026-02-28, 23:59:50: the month ends

    def run(self, call: Any) -> Any:
        """The call by the test's clock."""
        known = "redis.call('TIME')"
        body = call.script.text.replace(known, f"{{ {self.now // 1000}, {self.now % 1000 * 1000} }}")
        return self.valkey.eval(body, len(call.keys), *call.keys, *call.args)

    @rule(seconds=st.sampled_from([0, 1, 5, 30, 60, 86_400 * 31, 86_400 * 366]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * 1000

    @rule(tokens=st.sampled_from([1, 20, 60, 101]))
    def admit(self, tokens: int) -> None:
        self.number += 1
        name = f"t{self.number}"
        fields = {"task": "{}", "model": "tiny", "n": 1, "tokens": tokens, "key": KEY, "prompt_tokens": 3}
        limits = json.dumps(LIMITS.counted)
        call = protocol.admit(name, "n", self.now, fields, account=KEY, limits=limits)
        self.account.at(self.now)
        expected = self.account.charge(name, tokens)
        said = self.run(call)
        assert text(said[0]) == expected
        left = max(0, 100 - self.account.tokens)  # tasks may have used more than was reserved for them
        assert said[1:] == [4 - self.account.requests, left, 60_000 - self.now % 60_000]
        assert bool(self.valkey.exists(keys.task(name))) == (expected == "new")
        if expected == "new":
            assert self.run(call) == b"mine", "a reply was lost: it is charged once"
            self.run(protocol.queued(name))

    @precondition(lambda self: self.account.open)
    @rule(
        which=st.integers(0, 9),
        how=st.sampled_from(["finish", "cancel", "delete", "expire", "give up"]),
        made=st.integers(0, 30),
        repeat=st.booleans(),
    )
    def end(self, which: int, how: str, made: int, repeat: bool) -> None:
        name = sorted(self.account.open)[which % len(self.account.open)]
        pool = keys.Pool("tiny", "v", "f")
        begun = how in ("finish", "give up")
        if begun:
            self.run(protocol.claim(name, "c", self.worker.incarnation, pool))
            self.valkey.hset(keys.task(name), "next:0", made)
        calls = {
            "finish": protocol.finish(name, "c", "completed", reasons="[]", nexts=[made], prompt_tokens=3),
            "cancel": protocol.cancel(name),
            "delete": protocol.delete(name),
            "expire": protocol.expire(name),
            "give up": protocol.claim(name, "d", "other", pool, max_deaths=1),
        }
        if how == "expire":
            self.valkey.hset(keys.task(name), "deadline", 1)
        if how == "give up":
            self.valkey.hset(keys.task(name), "owner", "dead")
            self.valkey.set(keys.lease("other"), "{}")
        self.account.at(self.now)
        self.account.settle(name, made + 3 if begun else 0)
        for _ in range(1 + repeat):
            self.run(calls[how])

    @invariant()
    def the_account_is_the_models(self) -> None:
        stored = {name.decode(): int(value) for name, value in self.valkey.hgetall(keys.account(KEY)).items()}
        assert stored.get("open", 0) == len(self.account.open)
        assert stored.get("reserved", 0) == self.account.reserved
        if stored and stored["minute"] == self.account.minute and self.account.month[0]:
            assert (stored["requests"], stored["tokens"]) == (self.account.requests, self.account.tokens)
            assert stored["spent"] == self.account.spent
            assert stored["month"] == (self.account.month[0] - 1970) * 12 + self.account.month[1] - 1

    @invariant()
    def the_ledger_has_what_was_settled(self) -> None:
        rows: Any = self.valkey.xrange(keys.LEDGER)
        assert sum(int(row[b"prompt"]) + int(row[b"output"]) for _, row in rows) == self.account.used


def test_scripts_and_model_agree(valkey: Redis) -> None:
    run_state_machine_as_test(
        type("OnThisServer", (Machine,), {"valkey": valkey}),
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
