"""A chat template in its own process: the same text as in this one, and no way to harm it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError, RequestError
from engine.text import ChatTemplate, ConfinedTemplate, TemplateSource
from engine.text.confined_template import Limits
from tests.exhaustive import few
from tests.waiting import PATIENCE_S

MESSAGES = [{"role": "user", "content": "a\u2028🙂"}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

Make = Callable[..., ConfinedTemplate]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes confined templates, with tight limits where none are given, but for that by the clock: it is others who
    decide when a child runs."""
    made: list[ConfinedTemplate] = []

    def confine(text: str, **limits: Any) -> ConfinedTemplate:
        given = Limits(**{"cpu": 0.5, "wall": 100.0, "memory": 64 << 20, "output": 1 << 20, **limits})
        made.append(ConfinedTemplate(TemplateSource(text, {"bos_token": "<s>"}), given))
        return made[-1]

    yield confine
    for one in made:
        one.close()


def pid(template: ConfinedTemplate) -> int:
    assert template._process._child is not None
    return template._process._child.pid


def test_it_gives_what_the_template_gives(make: Make) -> None:
    here, there = ChatTemplate(PLAIN, {"bos_token": "<s>"}), make(PLAIN)
    for options in ({}, {"add_generation_prompt": False, "continue_final_message": True}, {"tools": [{"name": "é"}]}):
        assert there.render(MESSAGES, **options) == here.render(MESSAGES, **options)


@pytest.mark.parametrize(
    "text", [r"{{ 'a\u00e9\n' }}", "{{ m | wordwrap(3) }}", "{{ m | pprint }}", "{{ m | striptags }}"]
)
def test_what_jinja_imports_late_is_there(make: Make, text: str) -> None:
    there = make("{% set m = messages[0].content %}" + text + "{{ lipsum(n=0) }}")
    assert there.render(MESSAGES) == ChatTemplate(there.source.text).render(MESSAGES)


def test_one_process_serves_many_renders(make: Make) -> None:
    template = make("{{ messages[0].content }}")
    seen = set()
    for k in range(20):
        assert template.render([{"role": "user", "content": str(k)}]) == str(k)
        seen.add(pid(template))
    assert len(seen) == 1


TOO_MUCH = [
    (ENDLESS, "0.5 s of processor time"),
    ("{{ (9 ** (99999998 + one)) | string | length }}", "0.5 s of processor time"),
    ("{{ 'x' * one * 10000000000 }}", "64 MiB of memory"),
    ("{{ '%1000000000d' % one }}", "64 MiB of memory"),
    ("{{ '{:>1000000000}'.format(one) }}", "64 MiB of memory"),
    ("{{ 'x' | center(10000000000 * one) }}", "64 MiB of memory"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MiB of mem"),
    ("{{ 'x' * 2000000 * one }}", "2000000 bytes of output; at most 1048576"),
]


@pytest.mark.parametrize(("text", "why"), few(TOO_MUCH, TOO_MUCH[1], TOO_MUCH[2], TOO_MUCH[7]))
def test_a_template_over_its_limits_is_stopped_and_the_next_one_is_served(make: Make, text: str, why: str) -> None:
    # Not a constant: those are computed when a template is compiled, whatever the messages.
    begin = "{% set one = messages | length %}{% if messages[0].content == 'x' %}"
    template = make(begin + text + "{% else %}fine{% endif %}")
    fine, bad = [{"role": "user", "content": "fine"}], [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=why) as caught:
        template.render(bad)
    assert (caught.value.code, caught.value.param) == ("template_stopped", "messages")
    assert template.render(fine) == "fine"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}", RequestError, "recursion"),
        ("{{ messages.__class__.__mro__ }}", ModelError, "__class__"),
        ("{{ cycler.__init__.__globals__ }}", ModelError, "__init__"),
        ("{% include '/etc/passwd' %}", RequestError, "no loader"),
        ("{{ raise_exception('in its words') }}", RequestError, "in its words"),
        ("{{ nothing.at.all }}", RequestError, "undefined"),
        ("{{ 1 | no_such_filter }}", ModelError, "compiled"),
    ],
)
def test_a_template_s_fault_is_reported(make: Make, text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make(text).render(MESSAGES)


def test_nothing_of_a_template_runs_before_it_is_confined(make: Make) -> None:
    """Compiling computes what is constant, which here would take all memory."""
    text = "{{ 'x' * 10000000000 }}{{ 'x' | center(10000000000) }}"
    source = TemplateSource.from_bytes({"chat_template.jinja": text.encode()})
    assert source == TemplateSource(text)
    with pytest.raises(RequestError, match="64 MiB of memory"):
        make(text).render(MESSAGES)


def test_a_process_that_was_killed_has_a_successor(make: Make) -> None:
    template = make(PLAIN)
    right = template.render(MESSAGES)
    first = pid(template)
    os.kill(first, signal.SIGKILL)
    template._process._child.wait()  # type: ignore[union-attr]
    assert template.render(MESSAGES) == right
    assert pid(template) != first


def test_a_process_that_says_nothing_is_given_up(make: Make) -> None:
    template = make(PLAIN)
    template.render(MESSAGES)  # it has started, which takes a busy machine longer than that
    process = template._process
    process._limits = replace(process._limits, wall=0.3)
    first = pid(template)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"did not end within 0\.3 s"):
        template.render([{"role": "user", "content": "x" * 300_000}])  # more than a pipe holds
    assert not Path(f"/proc/{first}/stat").exists()


def test_close_ends_the_child_and_so_does_the_end_of_its_parent(make: Make) -> None:
    template = make(PLAIN)
    template.render(MESSAGES)
    child = template._process._child
    assert child is not None
    template.close()
    assert child.returncode is not None
    template.render(MESSAGES)
    orphan = template._process._child
    assert orphan is not None
    assert orphan.stdin is not None
    orphan.stdin.close()
    assert orphan.wait(PATIENCE_S) == 0
    template._process._child = None


def test_it_sees_none_of_our_environment(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_URL", "redis://:secret@host/0")
    template = make(PLAIN)
    template.render(MESSAGES)
    assert b"secret" not in Path(f"/proc/{pid(template)}/environ").read_bytes()


def test_threads_take_turns(make: Make) -> None:
    template = make("{{ messages[0].content }}")
    wrong: list[str] = []

    def ask(k: int) -> None:
        for i in range(25):
            text = f"{k}.{i}" * (k * 2000 + 1)
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("letter", few(["x", "\x00", "\n", "é", "語", "🙂"], "\x00", "🙂"))
def test_text_up_to_the_limit_comes_whole_whatever_its_letters(make: Make, letter: str) -> None:
    size = len(letter.encode())
    template = make("{% if messages | length > 1 %}{{ 'y' }}{% endif %}{{ messages[0].content }}")
    message = {"role": "user", "content": letter * ((1 << 20) // size) + "y" * ((1 << 20) % size)}
    assert template.render([message]) == message["content"]
    with pytest.raises(RequestError, match="1048577 bytes of output; at most 1048576"):
        template.render([message, message])


@pytest.mark.parametrize("letter", few(["x", "\x00", "🙂"], "🙂"))
def test_an_error_that_a_template_words_at_length_is_cut(make: Make, letter: str) -> None:
    template = make("{{ raise_exception(messages[0].content * 1000) }}", output=1000)
    with pytest.raises(RequestError, match=f"does not accept these messages: {letter}{{900}}") as caught:
        template.render([{"role": "user", "content": letter * 1000}])
    assert len(str(caught.value)) <= 1000
    assert caught.value.code == "invalid_value"


def test_a_process_that_answers_no_more_and_yet_lives_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has closed its end, which a template has no way to; but who knows."""
    template = make(PLAIN)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/sh")
        patched.setattr("engine.confined.process.CHILD", ["-c", "exec >&-; sleep 600"])
        with pytest.raises(RequestError, match="its process ended with status -9") as caught:
            template.render(MESSAGES)
    assert caught.value.code == "template_stopped"
    assert "a\u2028🙂" in template.render(MESSAGES)


def test_messages_that_are_no_json_are_refused(make: Make) -> None:
    with pytest.raises(RequestError, match="JSON data"):
        make(PLAIN).render([{"role": "user", "content": object()}])


def test_what_it_writes_is_text_whatever_the_messages_hold(make: Make) -> None:
    lone = json.loads('"\\ud800"')
    assert make("{{ messages[0].content }}").render([{"role": "user", "content": lone}]) == lone


def test_a_clock_in_a_template_is_this_machines(make: Make) -> None:
    text = make("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES)
    assert text in (time.strftime("%Y-%m-%d"), time.strftime("%Y-%m-%d", time.localtime(time.time() - 60)))
