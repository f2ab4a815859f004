"""Tools for templates that have none: what a prompt says of them, of calls and of their outputs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.errors import RequestError
from engine.text import ChatTemplate, has_tools
from engine.text.spelled_tools import list_tools
from tests.engine.text.well_known import KNOWN

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "é": 1}}}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
USER = {"role": "user", "content": "Rain?"}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "yes"},
    {"role": "tool", "tool_call_id": "a", "content": "no"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SPELLED = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
WITHOUT = [name for name in KNOWN if not has_tools(KNOWN[name].source)]


def test_which_templates_have_tools() -> None:
    assert has_tools("{% if tools %}")
    assert has_tools("{{ message['tool_calls'] }}")
    assert not has_tools("{{ message.content }} <toolbox>")
    assert {"SmolLM 2", "Gemma 2", "Phi-3", "ChatML"} <= {*WITHOUT}


@pytest.mark.parametrize("name", WITHOUT)
def test_every_well_known_template_without_tools_gets_them(name: str) -> None:
    """Gemma 2 and Mistral refuse a system's message, others leave it out: there a user's has the text."""
    known = KNOWN[name]
    template = ChatTemplate(known.source, {"bos_token": known.bos, "eos_token": known.eos})
    text = template.render(CALLED, tools=TOOLS)
    assert list_tools(TOOLS) in text
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert f"{SPELLED}\n{SPELLED}" in text
    assert "<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n</tool_response>" in text
    assert "Rain?" in text
    assert "None" not in text


def test_the_text_joins_a_systems_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = ChatTemplate(PLAIN).render([system, USER], tools=TOOLS)
    assert text.startswith("[system]Be brief.\n\nYou can call functions.")
    assert text.endswith("[user]Rain?")
    assert text.count("[system]") == 1
    assert ChatTemplate(PLAIN).render([USER], tools=TOOLS).startswith("[system]You can call functions.")


def test_a_template_without_a_system_has_it_in_the_first_users_message() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    text = ChatTemplate(refuses).render([USER, *CALLED[1:]], tools=TOOLS)
    assert text.startswith("[user]You can call functions.")
    assert "\n\nRain?[assistant]" in text
    users = "{% for m in messages if m.role == 'user' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert ChatTemplate(users).render([USER], tools=TOOLS).startswith("[user]You can call functions.")
    with pytest.raises(RequestError, match="leaves out the text that names the tools") as refused:
        ChatTemplate("{{ messages[0].role }}").render([USER], tools=TOOLS)
    assert refused.value.param == "tools"
    with pytest.raises(RequestError, match="no system"):
        ChatTemplate(refuses).render([{"role": "system", "content": "x"}, USER], tools=TOOLS)


@pytest.mark.parametrize("content", ["And snow?", [{"type": "text", "text": "And snow?"}]])
def test_a_history_goes_on_where_a_template_takes_users_and_assistants_in_turns(content: Any) -> None:
    parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    parts = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    turns = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turns') }}{% endif %}"
        f"[{{{{ m.role }}}}]{parts}{{% endfor %}}"
    )
    after = {"role": "user", "content": content}
    for tools in ({"tools": TOOLS}, {}):
        text = ChatTemplate(turns).render([*CALLED, after], **tools)
        assert re.search(r"\[user\]<tool_response>\nyes.*\nno\n</tool_response>\s*And snow\?$", text, re.DOTALL)
    with pytest.raises(RequestError, match="not in turns"):
        ChatTemplate(turns).render([USER, USER], tools=TOOLS)


def test_calls_in_a_history_are_text_without_tools_too() -> None:
    """As in a turn that may not call any more."""
    text = ChatTemplate(PLAIN).render(CALLED)
    assert text.startswith(f"[user]Rain?[assistant]{SPELLED}")
    assert "[tool]" not in text
    assert ChatTemplate(PLAIN).render([USER]) == "[user]Rain?"


def test_a_template_of_its_own_tools_is_left_alone() -> None:
    own = "{{ tools | length }}" + PLAIN
    assert ChatTemplate(own).render([USER], tools=TOOLS) == "1[user]Rain?"
    several = ChatTemplate(PLAIN, None, "{{ tools | length }}")
    assert several.render([USER], tools=TOOLS) == "1"
    assert several.render(CALLED) == "[user]Rain?[assistant][tool]yes[tool]no"


@pytest.mark.parametrize("with_tools", ["", "{{ tools | length }} tools"])
def test_a_template_of_its_own_tools_gets_them_as_text_where_that_is_asked_for(with_tools: str) -> None:
    """As one whose way to call them is not known."""
    own = "{% if tools %}{{ tools | length }} tools{% endif %}" + PLAIN
    text = ChatTemplate(own, None, with_tools).render(CALLED, tools=TOOLS, tools_as_text=True)
    assert text == ChatTemplate(PLAIN).render(CALLED, tools=TOOLS)
    assert ChatTemplate(own).render(CALLED, tools_as_text=True) == ChatTemplate(PLAIN).render(CALLED)


@pytest.mark.parametrize("arguments", ['{"place": "Zü', "[1]"])
def test_arguments_that_are_text_are_spelled_out_where_a_template_takes_objects_alone(arguments: str) -> None:
    objects = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}{% endfor %}"""
    function: dict[str, Any] = {"name": "weather", "arguments": arguments}
    cut = {"role": "assistant", "content": "So.", "tool_calls": [{"type": "function", "function": function}]}
    text = ChatTemplate(objects).render([*CALLED, cut, USER])
    assert text == (
        "[user]Rain?[assistant]place=Zürichplace=Zürich[tool]yes[tool]no"
        f'[assistant]So.\n<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>[user]Rain?'
    )
