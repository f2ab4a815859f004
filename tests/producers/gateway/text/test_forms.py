"""A form that is hard to read costs its own tenant its turn, and nobody else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.confined import Limits
from engine.errors import ErrorText, RequestError
from engine.grammar.trial import STACK_BYTES, STOPPED, Trials
from engine.text import Tokenizer
from producers.contract.task import Task
from producers.errors import InvalidTask
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_state import Work
from producers.gateway.openai.tools import make_calling, read_tools, schemas
from producers.gateway.text import forms
from producers.gateway.text.forms import Forms, Judge
from tests.engine.grammar.test_trial import ENDLESS
from tests.producers.gateway.conftest import TINY
from tests.producers.gateway.openai.conftest import MESSAGES
from tests.waiting import PATIENCE_S

#: Needs a trial, and passes it.
ODD = {"allOf": [{"type": "string"}, {"minLength": 2}]}


def task(grammar: str) -> Task:
    return Task(model="tiny", prompt=[1], grammar=grammar)


class Processes(Trials):
    """Trials of grammars that begin with `hold` last until they are let go on."""

    def __init__(self) -> None:
        super().__init__(at_once=forms.AT_ONCE)
        self.go = threading.Event()
        self.begun: list[str] = []
        self.most: int = 0
        self._running = 0

    def is_judged(self, name: str, text: str) -> bool:
        return not text.startswith("hold")

    def check(self, name: str, text: str) -> None:
        self.begun.append(text)
        self._running += 1
        self.most = max(self.most, self._running)
        if text.startswith("hold"):
            assert self.go.wait(PATIENCE_S)
        self._running -= 1


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)


def test_callers_are_told_of_a_schema_that_is_followed_to_the_letter(http: httpx.Client, model: str) -> None:
    dense = {"prefixItems": [{"allOf": [{"$ref": "#/$defs/a"}]}] * 900, "$defs": {"a": {"properties": {"x": {}}}}}
    for schema, warning in ((dense, "the outputs' schema is followed to the letter"), ({"type": "number"}, "")):
        body = {"model": model, "prompt": "x", "json_schema": schema}
        answer = http.post("/v1/tasks", json=body)
        assert answer.status_code == 202
        assert answer.headers.get("penstock-warning", "").startswith(warning)
        assert bool(warning) is ("penstock-warning" in answer.headers)


async def test_a_tenant_has_one_trial_at_a_time_and_a_bound_on_those_that_wait() -> None:
    trials = Processes()
    judging = Forms(trials)
    held = [asyncio.create_task(judging.check(task(f"hold {n}"), Work("one"))) for n in range(1 + forms.WAITING)]
    await until(lambda: len(trials.begun) == 1)
    with pytest.raises(Problem, match="8 requests of this tenant") as refused:
        await judging.check(task("hold more"), Work("one"))
    assert (refused.value.status, refused.value.code) == (429, "form_busy")
    assert refused.value.headers["retry-after"] == "1"
    await judging.check(task("light"), Work("one"))
    other = asyncio.create_task(judging.check(task("hold two"), Work("two")))
    await until(lambda: "hold two" in trials.begun)
    assert trials.begun == ["hold 0", "light", "hold two"]
    trials.go.set()
    await asyncio.gather(*held, other)
    assert trials.most == 2
    assert judging._turns == {}
    judging.close()


async def test_a_caller_who_leaves_keeps_the_tenants_turn_until_its_trial_ends() -> None:
    trials = Processes()
    judging = Forms(trials)
    left = asyncio.create_task(judging.check(task("hold 0"), Work("one")))
    await until(lambda: trials.begun == ["hold 0"])
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    after = asyncio.create_task(judging.check(task("hold 1"), Work("one")))
    await asyncio.sleep(0)
    await judging.check(task("light"), Work("two"))
    assert trials.begun == ["hold 0", "light"]
    trials.go.set()
    await after
    assert trials.begun == ["hold 0", "light", "hold 1"]
    judging.close()


async def test_an_endless_form_is_a_bad_request_and_the_next_one_is_judged() -> None:
    judging = Forms(Trials(None, Limits(cpu=0.3, wall=60.0, memory=512 << 20, stack=STACK_BYTES)))
    work = Work()
    with pytest.raises(InvalidTask, match="processor time") as refused:
        await judging.check(Task(model="tiny", prompt=[1], json_schema=json.loads(ENDLESS)), work)
    assert (refused.value.code, refused.value.param) == (STOPPED, "json_schema")
    assert work.done, "it counts, although it is refused"
    await judging.check(Task(model="tiny", prompt=[1], json_schema=ODD), Work())
    judging.close()


async def test_a_grammar_of_tools_counts_for_each_output() -> None:
    judging = Forms(Processes())
    large = Task(model="tiny", prompt=[1], n=8).model_copy(update={"grammar": "x" * 20_000})
    with pytest.raises(InvalidTask, match=r"grammar has 5000 parts, and with 8 outputs that is 40000"):
        await judging.check(large, Work())
    judging.close()


def test_a_functions_schema_that_is_never_read_is_no_any_object() -> None:
    """Else each of a hundred functions would take a trial's time."""
    judged: list[Any] = []

    def judge(name: str, text: str) -> None:
        judged.append(text)
        raise RequestError(ErrorText.of("{json_schema} cannot be followed: stopped"), param="json_schema", code=STOPPED)

    function = {"type": "function", "function": {"name": "f", "parameters": json.loads(ENDLESS)}}
    named = [{**function, "function": {**function["function"], "name": f"f{n}"}} for n in range(3)]
    tools = read_tools({"tools": named})
    assert tools is not None
    assert len(schemas(tools)) == 3
    taken: Judge = judge
    with pytest.raises(InvalidTask, match=r"tools\[0\]\.function\.parameters cannot be followed") as refused:
        make_calling(tools, "", Tokenizer.from_folder(TINY), taken)
    assert (refused.value.code, len(judged)) == (STOPPED, 1)


def test_the_bound_is_told_over_http(http: httpx.Client, model: str) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    named = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    body = {"model": model, "messages": MESSAGES, "n": 32, "response_format": named}
    answer = http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "form_too_large")
    assert error["param"] == "response_format"
    assert "4002 parts, and with 32 outputs that is 128064; at most 16384 are taken" in error["message"]
