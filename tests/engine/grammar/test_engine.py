"""Outputs of a form, from the engine: complete, ended in time, gone on with after a death, refused where impossible."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Request, RequestError, SamplingParams
from engine.errors import fields_of
from engine.grammar.source import budget_line
from engine.request import Event
from tests.engine.conftest import Load
from tests.engine.random_models import write_model
from tests.waiting import PATIENCE_S

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"
MAIL = r"[a-z]{1,8}@[a-z]{2,9}\.(com|org)"
#: What can be said without an end of the model's own: a list, closed by its last character.
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(TINY, EngineConfig(device="cpu", threads=1, max_num_seqs=8, kv_cache_bytes=8 << 20)) as made:
        yield made


def said(engine: Engine, **params: Any) -> tuple[str, str | None]:
    (found,) = engine.generate(["def main():"], SamplingParams(**({"max_tokens": 100, "seed": 1} | params)))
    assert found.error is None
    return found.text, found.finish_reason


def test_an_output_ends_with_its_form(engine: Engine) -> None:
    text, reason = said(engine, json_schema=LIST)
    assert reason == "stop"
    assert len(json.loads(text)) in range(2, 6)
    # Neither an end of the model's own nor min_tokens keeps it open: nothing can follow.
    text, reason = said(engine, regex=MAIL, ignore_eos=True, min_tokens=90)
    assert (re.fullmatch(MAIL, text) is not None, reason) == (True, "stop")
    text, reason = said(engine, grammar='start: "x" ("," "x"){2}', temperature=0)
    assert (text, reason) == ("x,x,x", "stop")


def test_an_output_is_one_of_the_choices(engine: Engine) -> None:
    choice = ["x", "x y", 'a "quoted"\n/line/', "é\x7f"]
    seen = {said(engine, choice=choice, temperature=5.0, seed=seed) for seed in range(12)}
    assert {text for text, _ in seen} <= {*choice}
    assert {reason for _, reason in seen} == {"stop"}
    assert len(seen) > 1
    assert said(engine, choice=["only this"]) == ("only this", "stop")


def test_an_output_may_end_only_where_its_form_is_complete(engine: Engine) -> None:
    ends = engine.tokenizer.eos_token_ids if engine.tokenizer else ()
    biased = {"logit_bias": dict.fromkeys(ends, 100), "temperature": 0}
    assert said(engine, regex="(ab)+", **biased) == ("ab", "stop")
    # Where it may end, it may also go on: up to max_tokens, or to a token that the caller names.
    assert said(engine, regex="(ab)+", ignore_eos=True, max_tokens=3, **biased)[1] == "length"
    assert said(engine, regex="(ab)+", ignore_eos=True, stop_token_ids=ends, **biased) == ("ab", "stop")


def test_of_several_outputs_each_has_the_form(engine: Engine) -> None:
    (found,) = engine.generate(["x = "], SamplingParams(max_tokens=300, seed=3, n=4, json_schema=LIST))
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    assert all(isinstance(json.loads(choice.text), list) for choice in found.choices)


def test_another_process_goes_on_with_the_same_tokens(engine: Engine) -> None:
    check_resumed(engine, SamplingParams(max_tokens=60, seed=5, regex=MAIL))


def test_reasoning_is_closed_after_its_budget_whoever_goes_on(engine: Engine) -> None:
    assert engine.tokenizer is not None
    (end,) = engine.tokenizer.encode(";", add_special_tokens=False)
    grammar = f"start: THOUGHT <[{end}]> ANSWER\nTHOUGHT: /[^;0-9]*/\nANSWER: /[0-9]{{3}}/"
    params = SamplingParams(max_tokens=60, seed=5, grammar=budget_line(6, end, None) + grammar)
    for seed in range(3):
        (output,) = engine.generate(["x = "], replace(params, seed=seed))
        assert output.token_ids.index(end) <= 6 + 3, "a character that has begun is finished"
        assert re.search("[0-9]{3}$", output.text)
    check_resumed(engine, params)


def test_only_a_grammar_has_a_budget(engine: Engine) -> None:
    line = budget_line(0, 999_999_999, None)
    assert re.fullmatch("// at most 0 tokens up to <9>\na", said(engine, regex=f"{line}a")[0])


def check_resumed(engine: Engine, params: SamplingParams) -> None:
    (whole,) = engine.generate(["x = "], params)
    prompt = engine.tokenizer.encode("x = ") if engine.tokenizer else []
    for published in range(len(whole.token_ids) + 1):
        events: list[Event] = []
        done = threading.Event()

        def take(event: Event, events: list[Event] = events, done: threading.Event = done) -> None:
            events.append(event)
            if event.done:
                done.set()

        engine.submit(Request(f"after-{published}", prompt, params, resume=[whole.token_ids[:published]]), take)
        assert done.wait(PATIENCE_S)
        assert whole.token_ids[:published] + [one for event in events for one in event.token_ids] == whole.token_ids
        assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"json_schema": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json_schema": {"$ref": "https://example.org/schema"}}, "https://example.org/schema"),
        ({"json_schema": functools.reduce(lambda one, _: {"items": one}, range(130), {})}, "recursion limit"),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json_schema": {"type": "integer", "multipleOf": 4999999}}, "least common multiple of its multipleOf"),
        (
            {"json_schema": {"allOf": [{"multipleOf": 997}, {"multipleOf": 99.1}]}},
            "least common multiple of its multipleOf",
        ),
        ({"grammar": r'start: %json {"multiple\u004ff": 4999999}'}, "least common multiple of its multipleOf"),
        ({"regex": r"[^\s\S]"}, "no text has this form"),
        ({"grammar": "start: start"}, "no text has this form"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": budget_line(0, 999_999_999, None) + "start: /a/"}, "its first line names token 999999999"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(engine: Engine, params: dict[str, Any], why: str) -> None:
    (name,) = params
    ended = threading.Event()
    events: list[Event] = []

    def take(event: Event) -> None:
        events.append(event)
        ended.set()

    engine.submit(Request("refused", [1], SamplingParams(**params, n=3)), take)
    assert ended.wait(PATIENCE_S)
    (event,) = events
    assert re.search(f"{name} cannot be followed.*{why}", event.error or "")
    assert (event.finish_reason, event.done, event.refused, event.param) == ("error", True, True, name)


def test_rules_that_name_each_other_at_any_length_harm_nobody(engine: Engine) -> None:
    """A usual stack ends after some thousands."""
    chain = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(500))
    assert said(engine, grammar=f'start: r0\n{chain}r500: "b"', max_tokens=4)[1] == "length"
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1700)} | {"a1700": {"const": 7}}
    assert said(engine, json_schema={"$ref": "#/$defs/a0", "$defs": links}) == ("7", "stop")


def test_a_form_that_grows_too_complex_fails_its_own_request_alone(engine: Engine) -> None:
    broad = "start: " + '"ab"? ' * 1000
    found = engine.generate(["x", "y"], [SamplingParams(grammar=broad, ignore_eos=True), SamplingParams(regex="abc")])
    assert found[0].finish_reason == "error"
    assert "grammar cannot be followed any further: Parser Error: Current row has" in (found[0].error or "")
    assert fields_of(found[0].error or "") == [[0, "grammar"]]
    assert (found[1].text, found[1].error) == ("abc", None)


def test_a_form_that_is_too_slow_ends_its_outputs_and_the_others_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammar.matcher._TOKEN_S", -1.0)  # each mask and each token costs a second
    monkeypatch.setattr("engine.grammar.matcher._OUTPUT_S", 20.5)
    slow, plain = SamplingParams(regex="[ab]{400}", max_tokens=100), SamplingParams(max_tokens=40, ignore_eos=True)
    *pair, other, short = engine.generate(["w", "x", "y", "z"], [slow, slow, plain, SamplingParams(regex="abc")])
    # The first of two outputs of one form to spend its time ends both.
    assert sorted(one.error or "" for one in pair) == [
        "regex cannot be followed any further: another output of this form took too long",
        "regex cannot be followed any further: finding its tokens took 21 s of processor time more than usual",
    ]
    assert max(len(one.token_ids) for one in pair) == 10
    assert (len(other.token_ids), other.error) == (40, None)
    assert (short.text, short.error) == ("abc", None)
    monkeypatch.undo()
    (again,) = engine.generate(["x"], slow)
    assert "regex cannot be followed: it is too slow: finding its tokens took 21 s" in (again.error or "")
    assert said(engine, regex="[ab]{40}")[1] == "stop"


def test_a_search_does_not_end_for_lack_of_time_as_if_nothing_could_follow(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammar.matcher._TOKEN_S", -1.0)  # each mask and each token costs a second
    monkeypatch.setattr("engine.grammar.matcher._OUTPUT_S", 9.5)
    (found,) = engine.generate(["w"], SamplingParams(regex="c|[cd]{400}", max_tokens=100, beam_width=2))
    assert found.error in {
        f"regex cannot be followed any further: {why}"
        for why in (
            "another output of this form took too long",
            "finding its tokens took 10 s of processor time more than usual",
        )
    }
    assert engine.stats().kv_blocks_used == 0


def test_what_an_output_uses_up_another_still_has(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar.source._LEXER_STATES", 400)
    params = SamplingParams(regex="[ab]*a[ab]{12}", temperature=5.0, seed=1, max_tokens=300, ignore_eos=True)
    first, again = engine.generate(["x"], params)[0], engine.generate(["x"], params)[0]
    assert first.error is not None
    assert "regex cannot be followed any further: lexer error: too many states" in first.error
    assert (again.token_ids, again.error) == (first.token_ids, first.error)


def test_a_form_needs_a_tokenizer_and_llguidance(
    load: Load, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"the model has no tokenizer\.json: it cannot follow regex"):
        load(write_model(tmp_path, tokenizer=False)).generate([[1, 2]], SamplingParams(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"regex needs the package llguidance.*penstock\[worker\]"):
        engine.generate(["x"], SamplingParams(regex="a"))
