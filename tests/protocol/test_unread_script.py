"""UNREAD as the model says: of one task, with owners, ends and leases that lapse, are renewed, and lapse again."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from redis import Redis

from producers.client import leases
from producers.connection.script import text
from producers.contract import keys
from producers.store import protocol
from tests.exhaustive import one_of_each
from tests.histories import examples
from tests.protocol.model import ALL, scripts
from tests.protocol.model.scripts import FINAL
from tests.protocol.server import Mutant, notices, run_machine
from tests.protocol.store import DEADLINES, INCS, LIMIT, POOL, TASKS, Pair, begun, sent_to

TASK = "t2"
CHOICES = TASKS[TASK]
HOUR_MS = 3_600_000
#: How a history begins.
BEGIN: dict[str, Any] = {"far": st.integers(0, 4), "dead": st.booleans()}


class UnreadMachine(Pair):
    """The lease that was found lapsed is not always the one that is there."""

    @initialize(**BEGIN)
    def begin(self, far: int, dead: bool) -> None:
        self.open()
        self.claims = itertools.count(1)
        self.ended: int | None = None  # when the lease ends; None where there is none
        for step in (self.admit, self.queued, self.claim, self.finish)[:far]:
            step()
        if dead:
            self.owner_dies()
        self.compare()

    def compare(self) -> None:
        super().compare()
        stored = self.server.redis.zscore(keys.READERS, TASK)
        assert (None if stored is None else int(stored)) == self.ended

    @rule(lease=st.sampled_from(["over", "over", "over before", "renewed", "later", "as it is"]), found=st.booleans())
    def unread(self, lease: str, found: bool) -> None:
        """What was found lapsed is `found`, or another lease than there is now."""
        if lease == "renewed":
            self.server.run(self.acts().of(leases).hold([TASK], HOUR_MS))
            self.ended = int(self.server.redis.zscore(keys.READERS, TASK) or 0)
        elif lease != "as it is":
            self.ended = {"over": 2, "over before": 1, "later": self.server.now() + HOUR_MS}[lease]
            self.server.redis.zadd(keys.READERS, {TASK: self.ended})
        over = self.ended if found and self.ended else 2
        said_by = self.acts().of(protocol)

        def step() -> None:
            answer = self.server.run(said_by.unread(TASK, over))
            before = self.model[TASK]
            said, self.ended, after = scripts.unread(before, self.ended, over, self.server.now(), self.live, ALL)
            self.model[TASK] = after
            assert answer[0] == int(said is not None)
            if said is None:
                assert len(answer) == 1
                return
            assert (bool(answer[1]), text(answer[2])) == said
            if said[0] and said[1] not in FINAL and after and after.owner in self.live:
                self.controls = [(keys.control(str(after.owner)), f"cancel {TASK}")]

        self.do(step)

    @rule(step=st.sampled_from(["admit", "queued", "claim", "owner_dies", "finish"]))
    def goes_on(self, step: str) -> None:
        getattr(self, step)()

    # ---- what the task comes through ------------------------------------------------------------------------------

    def admit(self) -> None:
        fields = {"n": CHOICES, "deadline": DEADLINES[TASK]} | sent_to(TASK)
        self.server.run(self.acts().of(protocol).admit(TASK, "mine", self.server.now(), fields))
        new = begun(scripts.SUBMITTED, TASK)
        _, self.model[TASK] = scripts.admit(self.model[TASK], "mine", False, ALL, new)

    def queued(self) -> None:
        self.server.run(self.acts().of(protocol).queued(TASK))
        _, self.model[TASK] = scripts.queued(self.model[TASK], ALL)

    def claim(self) -> None:
        c, inc = f"c{next(self.claims)}", INCS[0]
        self.server.lease(inc, True)
        self.live.add(inc)
        self.server.run(self.acts(inc).of(protocol).claim(TASK, c, inc, POOL, max_deaths=LIMIT))
        kind = (POOL.version, POOL.fingerprint)
        _, self.model[TASK] = scripts.claim(self.model[TASK], c, inc, self.live, ALL, limit=LIMIT, kind=kind)

    def owner_dies(self) -> None:
        self.server.lease(INCS[0], False)
        self.live.discard(INCS[0])

    def finish(self) -> None:
        c, nexts = self.held(TASK, True), (0,) * CHOICES
        self.server.run(self.owned(TASK).of(protocol).finish(TASK, c, "completed", reasons="[]", nexts=nexts))
        _, self.model[TASK] = scripts.finish(self.model[TASK], c, nexts, ALL)


MUTANTS = {
    "UNREAD asks for no lease": ("unread", "not ends or ", "ends and "),
    "UNREAD believes any lease": ("unread", "tonumber(ends) ~= over or ", ""),
    "UNREAD knows no clock": ("unread", " or over > now_ms()", ""),
    "UNREAD leaves the lease": ("unread", "redis.call('ZREM', KEYS[3], id)\n", ""),
    "UNREAD leaves the task": ("unread", "cancel(KEYS[1], KEYS[2], id)", "{ 1, 'cancelled' }"),
}


def check(redis: Redis, mutant: Mutant | None = None, **options: Any) -> None:
    """Run the machine; raises AssertionError (or what the server says) where scripts and model part."""
    machine = type("Machine", (UnreadMachine,), {"redis": redis, "mutant": mutant})
    run_machine(machine, **options)


@pytest.mark.usefixtures("valkey_url")
def test_script_and_model_agree(valkey: Redis) -> None:
    check(valkey, examples=examples(12, 25), steps=10)


@pytest.mark.parametrize("broken", one_of_each(itemgetter(0), MUTANTS))
def test_a_broken_script_is_noticed(broken: str, valkey: Redis) -> None:
    notices(check, valkey, Mutant(protocol.PACKAGE, *MUTANTS[broken]), examples=100, steps=10)
