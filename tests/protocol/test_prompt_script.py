"""PROMPT, and what APPEND and FINISH do about it: of one task, as the model says."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.contract.stream import encode_prompt, encode_token
from producers.store import protocol
from tests.exhaustive import one_of_each
from tests.histories import examples
from tests.protocol.model import ALL, scripts
from tests.protocol.server import Mutant, notices, run_machine
from tests.protocol.store import DEADLINES, INCS, LIMIT, POOL, TASKS, Pair, begun, sent_to

TASK = "t2"  # whose record has a deadline
CHOICES = TASKS[TASK]
mostly = st.sampled_from([True, True, True, False])


class PromptMachine(Pair):
    """Claims are numbered; the last one made holds the task, as long as nobody ended it."""

    @initialize()
    def begin(self) -> None:
        self.open()
        self.claims = itertools.count(1)
        self.owners = itertools.cycle(INCS)
        fields = {"n": CHOICES, "deadline": DEADLINES[TASK]} | sent_to(TASK)
        self.server.run(self.acts().of(protocol).admit(TASK, "mine", self.server.now(), fields))
        new = begun(scripts.SUBMITTED, TASK)
        _, self.model[TASK] = scripts.admit(None, "mine", False, ALL, new)
        self.compare()
        self.take_up()

    @rule()
    def take_up(self) -> None:
        """Its worker is lost, another takes the task up."""
        r = self.model[TASK]
        if r and r.owner:
            self.server.lease(r.owner, False)
            self.live.discard(r.owner)
        inc, c = next(self.owners), f"c{next(self.claims)}"
        self.server.lease(inc, True)
        self.live.add(inc)
        said = self.acts(inc).of(protocol)

        def step() -> None:
            answer = said.read_claim(TASK, self.server.run(said.claim(TASK, c, inc, POOL, max_deaths=LIMIT)))
            before = self.model[TASK]
            expected, self.model[TASK] = scripts.claim(
                *(before, c, inc, self.live, ALL), limit=LIMIT, kind=(POOL.version, POOL.fingerprint)
            )
            assert answer.answer == expected
            self.note_what_was_taken_up(TASK, before)

        self.do(step)

    @rule(valid=mostly, tokens=st.sampled_from([1, 512, 513]), full=mostly.map(lambda yes: not yes))
    def prompt(self, valid: bool, tokens: int, full: bool = False) -> None:
        c, entries = self.held(TASK, valid), encode_prompt([7] * tokens, [None] * tokens)
        release = self.owned(TASK)
        full = full and release.minds_memory

        def step() -> None:
            with self.server.filled(1.2 if full else 0.0):
                answer = text(self.server.run(release.of(protocol).prompt(TASK, c, entries)))
            expected, self.model[TASK] = scripts.prompt(self.model[TASK], c, len(entries), ALL, full=full)
            assert answer == expected

        self.do(step)

    @rule(
        valid=mostly,
        choice=st.integers(0, CHOICES - 1),
        scored=mostly,
        discarded=st.sampled_from([5, 0]),
        says=st.sampled_from([(1, 0), (1, 2), (0, 3)]),
    )
    def append(self, valid: bool, choice: int, scored: bool, discarded: int, says: tuple[int, int]) -> None:
        """`says`: how many tokens, and how long the prompt is, 0 where nothing is said of that."""
        r, c = self.model[TASK], self.held(TASK, valid)
        i, (count, counted) = r.next[choice] if r else 0, says
        entries = [encode_token(choice, i, 40 + i, "a")] * count
        one = protocol.Append(TASK, c, choice, i, entries, scored, discarded, counted)
        release = self.owned(TASK)
        by = release.of(protocol)

        def step() -> None:
            ((answer, at),) = by.read_append(self.server.run(by.append([one])))
            news = discarded if release.counts_cuts or (answer == "ok" and entries) else 0
            said, expected, self.model[TASK] = scripts.append(
                self.model[TASK], c, choice, i, tuple(entries), ALL, scored=scored, discarded=news, counted=counted
            )
            assert (answer, at) == (said, expected)

        self.do(step)

    @rule(valid=mostly, scored=mostly, now=st.booleans())
    def finish(self, valid: bool, scored: bool, now: bool) -> None:
        if not now:
            return
        r, c = self.model[TASK], self.held(TASK, valid)
        nexts = r.next if r else (0,) * CHOICES
        said = self.owned(TASK).of(protocol)

        def step() -> None:
            before = self.model[TASK]
            used = (before.counted if before else None) or 0  # a worker says what it has said before
            answer = self.server.run(
                said.finish(TASK, c, "completed", reasons="[]", nexts=nexts, prompt_tokens=used, scored=scored)
            )
            expected, self.model[TASK] = scripts.finish(self.model[TASK], c, nexts, ALL, scored=scored)
            assert text(answer[0]) == expected

        self.do(step)

    @rule(now=mostly)
    def cancel(self, now: bool) -> None:
        if now:
            return
        accepted, status = self.server.run(self.acts().of(protocol).cancel(TASK))
        told, expected, after = scripts.cancel(self.model[TASK], self.live, ALL)
        self.model[TASK] = after
        assert (accepted, text(status)) == (int(told), expected)
        if told and after and not after.end and after.owner in self.live:
            self.controls = [(keys.control(after.owner), f"cancel {TASK}")]
        self.compare()

    def delete(self) -> None:
        """Seldom by luck, as nothing comes after it."""
        self.server.run(self.acts().of(protocol).delete(TASK, "x"))
        r = self.model[TASK]
        _, last = scripts.delete(r, ALL)
        assert r
        assert last
        self.controls = [(keys.control(r.owner), f"cancel {TASK}")]
        self.erase(TASK, last, "x")
        self.compare()
        self.published[TASK] = []

    @rule()
    def failover_loses_the_prompt(self) -> None:
        """Nothing that came after it can have stayed."""
        r = self.model[TASK]
        if not r or not r.prompt or r.stream or r.end:
            return
        self.model[TASK] = r._replace(prompt=())
        self.published[TASK] = []
        self.server.redis.delete(keys.stream(TASK))
        self.server.redis.hdel(keys.task(TASK), "prompt")


MUTANTS = {
    "PROMPT does not see a cancel": ("prompt", "if r[3] then", "if false then"),
    "PROMPT asks for no claim": ("prompt", "r[1] ~= ARGV[2] or r[2]", "r[2]"),
    "PROMPT writes after the end": ("prompt", "r[1] ~= ARGV[2] or r[2]", "r[1] ~= ARGV[2]"),
    "PROMPT takes what is gone for another's": ("prompt", "'other' or 'gone'", "'other'"),
    "PROMPT sees no memory": ("prompt", "not may_write(task, now_ms())", "false"),
    "PROMPT writes twice": ("prompt", "if r[4] then", "if false then"),
    "PROMPT keeps silent about it": ("prompt", "redis.call('HSET', task, 'prompt', #ARGV - 2)", ""),
    "PROMPT is published elsewhere": ("prompt", "(at + k - 3)", "(at + k - 2)"),
    "APPEND forgets what was discarded": ("append", "discarded ~= '0'", "false"),
    "APPEND goes on without the prompt": ("append", " or scored == '1' and not r[6]", ""),
    "APPEND takes the prompt for a token": ("append", "if next == '0' then", "if at == 0 then"),
    "APPEND asks for no claim": ("append", "r[1] ~= claim or r[2]", "r[2]"),
    "APPEND does not count the prompt": ("append", "prompt ~= '0'", "false"),
    "APPEND counts the prompt again": ("append", "'HSETNX', task, 'prompt_tokens'", "'HSET', task, 'prompt_tokens'"),
    "APPEND takes no prompt for one of none": ("append", "prompt ~= '0'", "true"),
    "the end forgets what was discarded": ("finish", "tonumber(r[2] or '0')", "0"),
    "FINISH goes on without the prompt": ("finish", "ARGV[8] == '0' or r[4]", "true"),
}


def check(redis: Redis, mutant: Mutant | None = None, **options: Any) -> None:
    """Run the machine; raises AssertionError (or what the server says) where scripts and model part."""
    machine = type("Machine", (PromptMachine,), {"redis": redis, "mutant": mutant})
    history = machine()
    history.begin()
    history.delete()
    history.prompt(True, 1)
    history.append(True, 0, True, 5, (1, 0))
    history.finish(True, True, True)
    history.teardown()
    for cancelled in (True, False):  # luck seldom cancels before the prompt is there, or ends what has discarded some
        history = machine()
        history.begin()
        history.cancel(not cancelled)
        history.prompt(True, 1)
        history.append(True, 0, True, 5, (1, 0))
        history.finish(True, True, True)
        history.teardown()
    run_machine(machine, **options)


@pytest.mark.usefixtures("valkey_url")
def test_scripts_and_model_agree(valkey: Redis) -> None:
    check(valkey, examples=examples(15, 40), steps=25)


@pytest.mark.parametrize("broken", one_of_each(itemgetter(0), MUTANTS))
def test_a_broken_script_is_noticed(broken: str, valkey: Redis) -> None:
    notices(check, valkey, Mutant(protocol.PACKAGE, *MUTANTS[broken]), examples=500, steps=25)
