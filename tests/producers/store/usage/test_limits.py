"""Accounts count what tasks reserve and use, and let none past a limit: the scripts beside a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis

from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.task import Task
from producers.store import protocol
from producers.store.access import api_keys
from producers.store.access.api_keys import Limits
from producers.store.usage.limits import needed, refused
from tests.exhaustive import few
from tests.histories import histories
from tests.producers.fake_worker import FakeWorker

#: Account -> its limits, small enough that each is met. A task is charged to one of them, or to both.
LIMITS = {
    "k" * 16: Limits(rpm=4, tpm=100, max_in_flight=3, budget_tokens=200, budget_money="0.000075"),
    "tenant:acme": Limits(rpm=5, tpm=120, max_in_flight=4, budget_tokens=300, budget_money="0.0001"),
}
EACH = [*([name] for name in LIMITS), [*LIMITS]]
PROMPT = 3
#: 10^-12 of the currency for a token of prompt, cached prompt and output.
RATES = [(200_001, 20_003, 600_007), (100, 900_000, 0)]


@dataclass(frozen=True)
class Asked:
    """What a task may need, as ADMIT is told. `tokens`: the estimate for `tpm`."""

    tokens: int
    output: int
    least: int
    width: int
    rates: tuple[int, int, int]
    prompt: int = PROMPT
    all: tuple[int, int] = (0, 0)
    """Prompts and least outputs of all tasks of its request."""

    def most(self, output: int) -> int:
        return self.prompt + self.width * output

    @property
    def together(self) -> Asked:
        return replace(self, prompt=self.all[0], width=1)

    def cost(self, output: int, cached: int | None = None) -> int:
        """In billionths; of a prompt that is at its dearest where it is not said how much of it is cached."""
        prompt, kept, made = self.rates
        dear = self.prompt * max(prompt, kept)
        read = dear if cached is None else (self.prompt - cached) * prompt + cached * kept
        return -(-(read + self.width * output * made) // 1000)


@dataclass
class Account:
    """What the scripts should have counted. `open`: task -> (reserved, its most cost, estimate, minute of charge)."""

    limits: Limits
    open: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    minute: int = 0
    requests: int = 0
    tokens: int = 0
    month: int = 0
    spent: int = 0
    paid: int = 0

    def at(self, now_ms: int) -> None:
        when = datetime.fromtimestamp(now_ms / 1000, UTC)
        if self.minute != now_ms // 60_000:
            self.minute, self.requests, self.tokens = now_ms // 60_000, 0, 0
        month = (when.year - 1970) * 12 + when.month - 1
        if self.month not in (month, month + 1):  # a clock that is set back begins no new budget
            self.month, self.spent, self.paid = month, 0, 0

    @property
    def reserved(self) -> int:
        return sum(reserved for reserved, *_ in self.open.values())

    @property
    def pledged(self) -> int:
        return sum(money for _, money, *_ in self.open.values())

    def fits(self, asked: Asked, output: int) -> bool:
        return self.over(asked, output) not in ("budget_tokens", "budget_money", "reserved")

    def over(self, asked: Asked, output: int) -> str | None:
        most = self.limits.counted
        tokens, money = most["budget_tokens"] - self.spent, most["budget_money"] - self.paid
        if tokens < max(asked.most(output), sum(asked.all)):
            return "budget_tokens"
        if money < max(asked.cost(output), asked.together.cost(asked.all[1])):
            return "budget_money"
        if tokens - self.reserved < asked.most(output) or money - self.pledged < asked.cost(output):
            return "reserved"
        if len(self.open) >= most["max_in_flight"]:
            return "max_in_flight"
        if self.requests >= most["rpm"]:
            return "rpm"
        return "tpm" if self.tokens + asked.tokens > most["tpm"] else None

    def charge(self, task: str, asked: Asked, output: int) -> None:
        self.requests, self.tokens = self.requests + 1, self.tokens + asked.tokens
        self.open[task] = asked.most(output), asked.cost(output), asked.tokens, self.minute

    def settle(self, task: str, used: int, cost: int) -> None:
        *_, estimate, minute = self.open.pop(task)
        self.spent, self.paid = self.spent + used, self.paid + cost
        if minute == self.minute:
            self.tokens = max(0, self.tokens + used - estimate)

    def left(self) -> list[tuple[int, int]]:
        """The rest of each limit a minute, and the limit. The rest is 0 where tasks used more than was estimated."""
        counts = ((self.limits.rpm or 0, self.requests), (self.limits.tpm or 0, self.tokens))
        return [(max(0, most - used), most) for most, used in counts]


class Machine(RuleBasedStateMachine):
    """A key and its tenant, whose tasks end in every way. The scripts' clock is one that the test sets."""

    valkey: Redis
    mutate: ClassVar[Callable[[str], str]] = staticmethod(lambda body: body)

    def __init__(self) -> None:
        super().__init__()
        self.valkey.flushall()
        self.worker = FakeWorker(self.valkey)
        self.accounts = {name: Account(limits) for name, limits in LIMITS.items()}
        #: Open task -> its accounts, what was asked, the most tokens of a choice.
        self.open: dict[str, tuple[list[str], Asked, int]] = {}
        self.used = 0
        self.number = 0
        self.now = 1_772_323_190_000  # 2026-02-28, 23:59:50: the month ends

    def run(self, call: Any) -> Any:
        """The call by the test's clock."""
        known = "redis.call('TIME')"
        body = call.script.text.replace(known, f"{{ {self.now // 1000}, {self.now % 1000 * 1000} }}")
        return self.valkey.eval(self.mutate(body), len(call.keys), *call.keys, *call.args)

    def turn(self, accounts: list[Account]) -> None:
        for account in accounts:
            account.at(self.now)

    @rule(seconds=st.sampled_from([0, 1, 5, 30, 60, -60, 86_400 * 31, 86_400 * 366]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * 1000

    @rule(
        names=st.sampled_from(EACH),
        tokens=st.sampled_from([1, 20, 60, 101]),
        output=st.sampled_from([0, 17, 57, 150, 400]),
        shorten=st.booleans(),
        width=st.sampled_from([1, 1, 2]),
        rates=st.sampled_from(RATES),
        together=st.sampled_from([(0, 0), (0, 0), (PROMPT, 90), (40, 150)]),
    )
    def admit(
        self,
        names: list[str],
        tokens: int,
        output: int,
        shorten: bool,
        width: int,
        rates: tuple[int, int, int],
        together: tuple[int, int] = (0, 0),
    ) -> None:
        self.number += 1
        name = f"t{self.number}"
        asked = Asked(tokens, output, min(output, 16) if shorten else output, width, rates, all=together)
        accounts = [replace(self.accounts[one]) for one in names]  # a refusal changes nothing
        self.turn(accounts)
        choices = (made for made in range(output, asked.least, -1) if all(one.fits(asked, made) for one in accounts))
        most = next(choices, asked.least)
        refusals = [(said, place) for place, one in enumerate(accounts) if (said := one.over(asked, most))]
        fields = {"task": "{}", "model": "tiny", "n": width, "tokens": tokens, "key": "k", "prompt_tokens": PROMPT}
        charge = json.dumps({**vars(asked), "limits": [account.limits.counted for account in accounts]})
        call = protocol.admit(name, "n", self.now, fields, accounts=names, charge=charge)
        said = self.run(call)
        expected = refusals[0] if refusals else ("new", len(accounts) - 1)
        assert (text(said[0]), said[1]) == expected
        assert bool(self.valkey.exists(keys.task(name))) == (not refusals)
        if not refusals:
            for one, account in zip(names, accounts, strict=True):
                account.charge(name, asked, most)
                self.accounts[one] = account
            self.open[name] = names, asked, most
            assert self.run(call) == b"mine", "a reply was lost: it is charged once"
            self.run(protocol.queued(name))
            shortened = self.valkey.hget(keys.task(name), "max_output")
            assert shortened == (b"%d" % most if most < output else None)
        least = [n for told in zip(*(one.left() for one in accounts), strict=True) for n in min(told)]
        assert said[2:] == [60_000 - self.now % 60_000, *least]

    @rule(names=st.sampled_from(EACH))
    def refuse(self, names: list[str]) -> None:
        """A request was refused after a gateway had worked for it: whatever is used up, it counts."""
        accounts = [self.accounts[one] for one in names]
        self.turn(accounts)
        for account in accounts:
            account.requests += 1
        said = self.run(refused([api_keys.Account(one, LIMITS[one]) for one in names]))
        used_up = [place for place, one in enumerate(accounts) if one.requests >= (one.limits.rpm or 0)]
        assert (text(said[0]), said[1]) == ("refused", used_up[0] if used_up else -1)
        least = [n for told in zip(*(one.left() for one in accounts), strict=True) for n in min(told)]
        assert said[2:] == [60_000 - self.now % 60_000, *least]

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 9),
        how=st.sampled_from(["finish", "cancel", "delete", "expire", "give up"]),
        made=st.integers(0, 400),
        cached=st.integers(0, PROMPT),
        repeat=st.booleans(),
    )
    def end(self, which: int, how: str, made: int, cached: int, repeat: bool) -> None:
        name = sorted(self.open)[which % len(self.open)]
        names, asked, most = self.open.pop(name)
        width = asked.width
        accounts = [self.accounts[one] for one in names]
        made = min(made, most)
        pool = keys.Pool("tiny", "v", "f")
        begun = how in ("finish", "give up")
        if begun:
            self.run(protocol.claim(name, "c", self.worker.incarnation, pool))
            self.valkey.hset(keys.task(name), mapping={f"next:{choice}": made for choice in range(width)})
        nexts = [made] * width
        calls = {
            "finish": protocol.finish(
                name, "c", "completed", reasons="[]", nexts=nexts, prompt_tokens=PROMPT, cached_tokens=cached
            ),
            "cancel": protocol.cancel(name),
            "delete": protocol.delete(name, "x"),
            "expire": protocol.expire(name),
            "give up": protocol.claim(name, "d", "other", pool, max_deaths=1),
        }
        if how == "expire":
            self.valkey.hset(keys.task(name), "deadline", 1)
        if how == "give up":
            self.valkey.hset(keys.task(name), "owner", "dead")
            self.valkey.set(keys.lease("other"), "{}")
        used = made * width + PROMPT if begun else 0
        self.used += used
        self.turn(accounts)
        for account in accounts:
            account.settle(name, used, asked.cost(made, cached if how == "finish" else 0) if begun else 0)
        for _ in range(1 + repeat):
            self.run(calls[how])

    @invariant()
    def the_accounts_are_the_models(self) -> None:
        for name, account in self.accounts.items():
            said = self.valkey.hgetall(keys.account(name))
            stored = {field.decode(): int(value) for field, value in said.items()}
            assert stored.get("open", 0) == len(account.open)
            assert (stored.get("reserved", 0), stored.get("pledged", 0)) == (account.reserved, account.pledged)
            if stored and account.month and stored["minute"] == account.minute:
                assert (stored["requests"], stored["tokens"]) == (account.requests, account.tokens)
                counted = (account.month, account.spent, account.paid)
                assert (stored["month"], stored["spent"], stored["paid"]) == counted
            if stored:
                assert (self.valkey.ttl(keys.account(name)) == -1) == bool(account.open)

    @invariant()
    def no_budget_is_overrun(self) -> None:
        for name, limits in LIMITS.items():
            counts = self.valkey.hmget(keys.account(name), "spent", "reserved", "paid", "pledged")
            spent, reserved, paid, pledged = (int(count or 0) for count in counts)
            assert spent + reserved <= limits.counted["budget_tokens"]
            assert paid + pledged <= limits.counted["budget_money"]

    @invariant()
    def the_ledger_has_what_was_settled(self) -> None:
        rows: Any = self.valkey.xrange(keys.LEDGER)
        assert sum(int(row[b"prompt"]) + int(row[b"output"]) for _, row in rows) == self.used


def checked(valkey: Redis, mutate: Callable[[str], str], examples: int = 60, **more: Any) -> None:
    run_state_machine_as_test(
        type("OnThisServer", (Machine,), {"valkey": valkey, "mutate": staticmethod(mutate)}),
        settings=histories(examples, 30, **more),
    )


@pytest.mark.parametrize("examples", few([12, 60], 12))
def test_scripts_and_model_agree(valkey: Redis, examples: int) -> None:
    checked(valkey, lambda body: body, examples)


@pytest.mark.parametrize(
    ("right", "wrong"),
    few(
        [
            ("a.spent + a.reserved + need", "a.spent + need"),
            ("asked.prompt + asked.width * output", "asked.prompt + output"),
            ("keep(a, true)", "keep(accounts[1], true)"),
            ("output = math.max(output, asked.least)", ""),
            ("a.tokens + used - charged.estimate", "a.tokens + used - charged.tokens"),
            ("math.max(r[1], r[2])", "r[1]"),
            ("math.ceil((fresh", "math.floor((fresh"),
            ("cost(charged.rates, prompt - cached,", "cost(charged.rates, prompt,"),
            ("a.paid + a.pledged + money >", "a.paid + money >"),
            ("math.max(need, all_need)", "need"),
            ("math.max(money, all_money)", "money"),
            ("a.requests = a.requests + 1", "a.open = a.open + 1"),
            ("if whose < 0 and limits[i].rpm", "if limits[i].rpm"),
        ],
        ("a.spent + a.reserved + need", "a.spent + need"),
        ("keep(a, true)", "keep(accounts[1], true)"),
    ),
)
def test_the_model_tells_a_wrong_script(valkey: Redis, right: str, wrong: str) -> None:
    def mutate(body: str) -> str:
        return body.replace(right, wrong)

    with pytest.raises(AssertionError):
        checked(valkey, mutate, phases=[Phase.generate], derandomize=True)


def test_a_clock_that_is_set_back_over_a_months_end_begins_no_new_budget(valkey: Redis) -> None:
    machine = type("OnThisServer", (Machine,), {"valkey": valkey})()
    machine.time_passes(30)
    machine.admit([*LIMITS], 1, 57, False, 1, RATES[0])
    machine.end(0, "finish", 57, 0, False)
    machine.time_passes(-60)
    machine.admit([*LIMITS], 1, 17, False, 1, RATES[0])
    machine.the_accounts_are_the_models()
    assert valkey.hget(keys.account("k" * 16), "spent") == b"60"


def test_the_largest_budget_in_money_is_counted_to_the_billionth(valkey: Redis) -> None:
    limits, dear = Limits(budget_money="1000000"), (10**12, 10**12, 10**12)  # a token costs 1
    for number, tokens in enumerate((900_000, 99_998, 1)):
        charge = {"limits": [limits.counted], "tokens": 1, "prompt": tokens, "output": 0, "least": 0, "width": 1}
        fields = {"task": "{}", "model": "tiny", "n": 1, "tokens": 1, "prompt_tokens": tokens}
        asked = json.dumps({**charge, "rates": dear if number else (10**12 - 1, 0, 0)})
        now = int(valkey.time()[0]) * 1000
        assert run(valkey, protocol.admit(f"t{number}", "n", now, fields, accounts=["a"], charge=asked))[0] == b"new"
    assert valkey.hget(keys.account("a"), "pledged") == b"999998999999100"
    for number in range(3):
        run(valkey, protocol.queued(f"t{number}"))
        run(valkey, protocol.cancel(f"t{number}"))
    assert valkey.hmget(keys.account("a"), "pledged", "paid", "open") == [b"0", b"0", b"0"]


def test_a_charge_from_before_accounts_had_names_is_settled(valkey: Redis) -> None:
    """Such a record has a bare number, which its key was charged; else the task could never end."""
    fields = {"task": "{}", "model": "tiny", "n": 1, "tokens": 9, "key": "k" * 16, "reserved": 9}
    run(valkey, protocol.admit("t", "n", 1 << 50, fields))
    valkey.hset(keys.account("k" * 16), mapping={"open": 2, "reserved": 20})
    run(valkey, protocol.queued("t"))
    run(valkey, protocol.cancel("t"))
    assert valkey.hmget(keys.account("k" * 16), "open", "reserved") == [b"1", b"11"]


def test_a_bare_number_without_a_key_keeps_no_task_from_ending(valkey: Redis) -> None:
    run(valkey, protocol.admit("t", "n", 1 << 50, {"task": "{}", "model": "tiny", "n": 1, "tokens": 9, "reserved": 9}))
    run(valkey, protocol.queued("t"))
    run(valkey, protocol.cancel("t"))
    assert valkey.hget(keys.task("t"), "status") == b"cancelled"


def test_each_text_of_a_task_that_generates_nothing_may_be_as_long_as_the_context() -> None:
    """No budget is overrun by many texts in one task."""
    task = Task(model="m", kind="embed", input=["a"] * 5 + [[1, 2, 3]])
    assert needed(task, {"context_length": 512}, False) == (5 * 512 + 3, 0, 0, 1)
    assert needed(Task(model="m", kind="embed", input=[[1], [2, 3]]), {"context_length": 512}, True) == (3, 0, 0, 1)
