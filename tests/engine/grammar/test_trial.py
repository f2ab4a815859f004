"""Forms are judged in a process that ends at its limits, those that are surely read soon here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.confined import Limits, Stopped
from engine.errors import RequestError
from engine.grammar import source, trial
from engine.grammar.child import judged, packed
from engine.grammar.source import SLOW
from engine.grammar.trial import MAKING, STOPPED, Trials, light
from engine.params import MAX_FORM_PARTS, SamplingParams, parts_of_form
from engine.text import Tokenizer

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"
#: llguidance computes over it for hours.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{0,{i + 2}}}b"} for i in range(40)]})
BRIEF = Limits(cpu=0.3, wall=60.0, memory=512 << 20, stack=trial.STACK_BYTES)


def spinner(setup: Any) -> Callable[[Any], None]:
    """A target whose work for "spin" never ends."""

    def work(form: list[str]) -> None:
        while form[1].startswith("spin"):
            pass

    return work


@pytest.mark.parametrize("making", [False, True])
def test_a_form_that_is_read_for_hours_is_ended_and_others_go_on(making: bool) -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    setup = packed(tokenizer.to_json(), tokenizer.eos_token_ids) if making else None
    trials = Trials(setup, BRIEF if not making else Limits(cpu=1.0, memory=MAKING.memory, stack=trial.STACK_BYTES))
    try:
        for tried in (False, True):  # the second time it is remembered
            assert trials.is_judged("json_schema", ENDLESS) == tried
            with pytest.raises(RequestError, match=r"json_schema cannot be followed: .*processor time") as refused:
                trials.check("json_schema", ENDLESS)
            assert (refused.value.code, refused.value.param) == (STOPPED, "json_schema")
        trials.check("json_schema", '{"allOf": [{"type": "string"}, {"minLength": 2}]}')
        with pytest.raises(RequestError, match=r"json_schema cannot be followed: Unsatisfiable"):
            trials.check("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}')
    finally:
        trials.close()


def test_a_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Fake:
        def __init__(self, *args: Any) -> None:
            pass

        def call(self, form: list[str]) -> None:
            asked.append((form[0], form[1]))
            if "bad" in form[1]:
                raise RequestError("grammar is bad", param="grammar")

    monkeypatch.setattr(trial, "ConfinedProcess", Fake)
    monkeypatch.setattr(trial, "KEPT", 2)
    trials = Trials()
    good, bad, other = (f"start: {one} & /x/" for one in ("good", "bad", "other"))
    assert not trials.is_judged("grammar", good)
    for _ in range(2):
        trials.check("grammar", good)
        with pytest.raises(RequestError, match="grammar is bad"):
            trials.check("grammar", bad)
    assert asked == [("grammar", good), ("grammar", bad)]
    trials.check("grammar", other)
    assert not trials.is_judged("grammar", good), "the oldest made room"
    assert trials.is_judged("grammar", bad)


@pytest.mark.parametrize(
    ("failure", "code", "remembered"),
    [
        (Stopped("it took more than 2 s of processor time", again=True), STOPPED, True),
        (Stopped("it did not end within 10 s"), STOPPED, False),  # the machine may have been busy
        (RequestError("it is too slow", code=SLOW), SLOW, True),
    ],
)
def test_a_verdict_that_hangs_on_the_machine_is_remembered_for_a_while(
    failure: Exception, code: str, remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Fake:
        def __init__(self, *args: Any) -> None:
            pass

        def call(self, form: Any) -> None:
            asked.append(form)
            raise failure

    monkeypatch.setattr(trial, "ConfinedProcess", Fake)
    trials = Trials()

    def check() -> None:
        with pytest.raises(RequestError) as refused:
            trials.check("grammar", "start: a & b")
        assert refused.value.code == code

    check()
    check()
    assert len(asked) == (1 if remembered else 2)
    monkeypatch.setattr(trial, "REMEMBERED_S", -1.0)
    trials = Trials()
    check()
    assert not trials.is_judged("grammar", "start: a & b")


@pytest.mark.parametrize("making", [False, True])
def test_a_form_whose_tokens_take_too_long_is_refused(making: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    judge = judged(packed(tokenizer.to_json(), tokenizer.eos_token_ids) if making else None)
    several = json.dumps({"items": {"anyOf": [{"properties": {name: {"type": "integer"}}} for name in "abc"]}})
    forms = [["json_schema", several], ["regex", r"\w{2,9}(, \w+)*"], ["grammar", 'start: "a"+ | /[bc]/']]
    for form in forms:
        judge(form)
    monkeypatch.setattr(source, "_TOKEN_S", 0.0)
    for form in forms:
        with pytest.raises(RequestError, match="cannot be followed: it is too slow: finding one token took") as refused:
            judge(form)
        assert (refused.value.code, refused.value.param) == (SLOW, form[0])


def test_tokens_that_a_grammar_names_are_no_fault_where_only_bytes_are_known() -> None:
    judged(None)(["grammar", 'start: <[2000]> "a" <|im_end|>'])


def test_more_trials_than_processes_wait() -> None:
    trials = Trials(None, Limits(cpu=60), at_once=2, target=f"{__name__}:spinner")
    failed: list[str] = []

    def spin(text: str) -> None:
        try:
            trials.check("grammar", f"spin & {text}")
        except RequestError as error:
            failed.append(error.code)

    threads = [threading.Thread(target=spin, args=(str(n),)) for n in range(2)]
    for one in threads:
        one.start()
    while len([one for one in trials._processes if one._child is not None]) < 2:
        pass
    third = threading.Thread(target=trials.check, args=("grammar", "start: a & b"))
    third.start()
    trials._processes[0].kill()
    third.join()
    trials.kill()
    for one in threads:
        one.join()
    assert failed == [STOPPED, STOPPED]
    trials.close()


def test_small_plain_forms_need_no_trial() -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "boss": {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"p": {"type": "object", "properties": {"allOf": {"type": "integer", "minimum": 3}}}},
    }
    assert light("json_schema", json.dumps(person))
    for odd in (
        {"allOf": []},
        {"properties": {"a": {"pattern": "a"}}},
        {"items": {"anyOf": [{}], "type": "object"}},
        {"$ref": "#", "anyOf": [{}]},
        {"$defs": {"a": {"oneOf": [{}]}}},
        {"properties": [1]},
        {"properties": {f"p{i}": {"type": "string"} for i in range(150)}},
    ):
        assert not light("json_schema", json.dumps(odd)), odd
    assert light("regex", "[a-z]{1,8}@x")
    assert not light("regex", "a" * 200)
    assert light("grammar", 'start: "a" | "b"')
    assert not light("grammar", "start: A\nA: /a/ & /b/")


def test_a_forms_parts_times_the_outputs_are_bounded() -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    assert parts_of_form("json_schema", json.dumps(schema)) == 4001
    around = 'start: "%json {" "call: " %json '
    assert parts_of_form("grammar", f"{around}{json.dumps(schema)}") == 4001 + -(-len(around) // 4)
    assert parts_of_form("regex", "%json []") == 2
    SamplingParams(json_schema=schema, n=4)
    with pytest.raises(
        RequestError, match=r"4001 parts.*32 outputs that is 128032; at most 16384 .* 4 outputs"
    ) as large:
        SamplingParams(json_schema=schema, n=32)
    assert (large.value.code, large.value.param) == ("form_too_large", "json_schema")
    with pytest.raises(RequestError, match="at most 16384"):
        SamplingParams(json_schema=schema, n=1, best_of=5)
    with pytest.raises(RequestError, match=r"json_schema has 20001 parts.*make it smaller"):
        SamplingParams(json_schema={"enum": [1] * 20_000})
    with pytest.raises(RequestError, match="regex has 2000 parts"):
        SamplingParams(regex="a" * 8000, n=9)
    with pytest.raises(RequestError, match=r"choice has 3[0-9]{4} characters .* at most 32768"):
        SamplingParams(choice=["a" * 1000 + str(at) for at in range(36)])
    with pytest.raises(RequestError, match="regex and choice are both given"):
        SamplingParams(choice=["a"], regex="a")
    assert MAX_FORM_PARTS == 16_384
