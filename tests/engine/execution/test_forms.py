"""Requests whose outputs are to have a form wait for their matchers beside the steps, in turns of tenants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine.errors import RequestError
from engine.execution.loop import StepLoop
from engine.kv import KvSpace
from engine.params import SamplingParams
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.looping import PATIENCE, Listener, Steps, request, until
from tests.engine.stepping import made


class FakeMatcher:
    def __init__(self) -> None:
        self.foreseen: list[int] = []
        self.error = ""

    def foresee(self, published: Sequence[int]) -> None:
        self.foreseen += published

    def push(self, token_id: int) -> bool:
        return False


class FakeGrammars:
    """Regular expressions that begin with `hang` need a trial. `trying` and `making` are called for the work."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.matchers: list[FakeMatcher] = []
        self.given_up = False
        self.trying: Callable[[str], None] = lambda regex: None
        self.making: Callable[[str], None] = lambda regex: None

    def tried(self, params: SamplingParams) -> bool:
        return not str(params.regex).startswith("hang")

    def try_out(self, params: SamplingParams) -> None:
        self.trying(str(params.regex))

    def maker(self, params: SamplingParams) -> Callable[[], FakeMatcher]:
        def make() -> FakeMatcher:
            self.made.append(str(params.regex))
            self.making(str(params.regex))
            self.matchers.append(FakeMatcher())
            return self.matchers[-1]

        return make

    def give_up(self) -> None:
        self.given_up = True

    def close(self) -> None:
        pass


class Held:
    """Work that lasts until it is let go on."""

    def __init__(self, only: str = "") -> None:
        self.only = only
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, regex: str) -> None:
        if regex.startswith(self.only):
            self.begun.set()
            assert self.go.wait(PATIENCE)


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


@pytest.fixture
def steps() -> Steps:
    return Steps(late=False)


@pytest.fixture
def scheduler(grammars: FakeGrammars) -> Scheduler:
    return made(
        spaces=[KvSpace(64)],
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        grammars=grammars,
    )


@pytest.fixture
def loop(steps: Steps, scheduler: Scheduler) -> Iterator[StepLoop]:
    one = StepLoop(scheduler, steps, lambda: None)
    yield one
    one.close()
    scheduler.check_integrity()


def formed(name: str, regex: str = "a", tenant: str = "", **params: Any) -> Request:
    asked = request(name, regex=regex, **params)
    asked.tenant = tenant
    return asked


def test_steps_go_on_while_matchers_are_made(loop: StepLoop, steps: Steps, grammars: FakeGrammars) -> None:
    held = grammars.making = Held()
    loop.submit(formed("formed", n=3), heard := Listener())
    assert held.begun.wait(PATIENCE)
    loop.submit(request("plain", max_tokens=40), plain := Listener())
    assert len(plain.wait().tokens) == 40
    assert len(steps.plans) >= 40
    assert not any("formed" in plan for plan in steps.plans)
    assert (heard.events, loop.stats().waiting) == ([], 1)
    held.go.set()
    assert len(heard.wait().tokens) == 12
    assert len(grammars.made) == 3, "a matcher for each output"


def test_tenants_take_turns_of_one_output(loop: StepLoop, grammars: FakeGrammars) -> None:
    held = grammars.making = Held()
    loop.submit(formed("1", "large", "one", n=4), first := Listener())
    assert held.begun.wait(PATIENCE)
    loop.submit(formed("2", "small", "two", n=2), second := Listener())
    held.go.set()
    first.wait()
    second.wait()
    assert grammars.made == ["large", "small", "large", "small", "large", "large"]


def test_a_trial_that_lasts_holds_up_no_form_that_needs_none(loop: StepLoop, grammars: FakeGrammars) -> None:
    held = grammars.trying = Held()
    loop.submit(formed("odd", "hang"), odd := Listener())
    assert held.begun.wait(PATIENCE)
    loop.submit(formed("usual", "a"), usual := Listener())
    assert len(usual.wait().tokens) == 4
    assert odd.events == []
    held.go.set()
    assert len(odd.wait().tokens) == 4


def test_a_refused_form_ends_its_own_request_alone(loop: StepLoop, grammars: FakeGrammars) -> None:
    def refuse(regex: str) -> None:
        raise RequestError(f"{regex} cannot be followed", param="regex")

    held = grammars.making = Held("a")
    grammars.trying = refuse
    loop.submit(formed("good"), good := Listener())
    loop.submit(formed("bad", "hang", n=2), bad := Listener())
    (event,) = bad.wait().events
    assert (event.error, event.finish_reason, event.refused, event.param) == (
        "hang cannot be followed",
        "error",
        True,
        "regex",
    )
    held.go.set()
    assert len(good.wait().tokens) == 4


def test_a_fault_while_matchers_are_made_is_the_engines(loop: StepLoop, grammars: FakeGrammars) -> None:
    def fail(regex: str) -> None:
        raise BaseException("a panic")

    grammars.making = fail
    loop.submit(formed("a"), heard := Listener())
    (event,) = heard.wait().events
    assert (event.error, event.refused) == ("its form could not be prepared: BaseException: a panic", False)


@pytest.mark.parametrize("regex", ["a", "hang"])
def test_an_abort_meanwhile_frees_what_was_made(loop: StepLoop, grammars: FakeGrammars, regex: str) -> None:
    held = Held(regex)
    grammars.making = grammars.trying = held
    dropped = formed("a", regex, n=3)
    loop.submit(dropped, heard := Listener())
    assert held.begun.wait(PATIENCE)
    assert loop.abort("a")
    loop.submit(request("a"), again := Listener())
    again.wait()
    held.go.set()
    until(lambda: loop.stats().waiting == 0)
    assert (heard.events, dropped.matchers) == ([], [])
    assert len(grammars.made) <= 1


@pytest.mark.parametrize("regex", ["a", "hang"])
def test_closing_meanwhile_ends_the_request(loop: StepLoop, grammars: FakeGrammars, regex: str) -> None:
    held = Held(regex)
    grammars.making = grammars.trying = held
    loop.submit(formed("a", regex), heard := Listener())
    assert held.begun.wait(PATIENCE)
    loop.close()
    (event,) = heard.wait().events
    assert (event.finish_reason, event.error) == ("abort", "the engine was closed")
    assert grammars.given_up
    held.go.set()


def test_published_tokens_are_taken_before_the_request_reaches_a_step(loop: StepLoop, grammars: FakeGrammars) -> None:
    resumed = formed("a", n=2)
    resumed.resume = [[5, 6], [7]]
    loop.submit(resumed, heard := Listener())
    heard.wait()
    assert [one.foreseen for one in grammars.matchers] == [[5, 6], [7]]
