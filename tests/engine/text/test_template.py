"""Chat templates, compared with transformers' apply_chat_template, and hostile ones."""

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelError, RequestError
from engine.text.template import ChatTemplate
from tests.engine.text.well_known import KNOWN

TOOLS = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- set ns.last = loop.index0 %}
  {{- message | tojson }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}
{% for tool in tools %}{{ tool.name | upper }}{% endfor %}{% endif %}
{{ ns.last }} {{ strftime_now('%Y') }} {{ documents is none }} {{ missing is defined }}
{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}
"""
MESSAGES = [
    {"role": "user", "content": "  <b>Hé</b> & 'you'? 🗼 "},
    {"role": "assistant", "content": "yes\n"},
    {"role": "user", "content": ""},
]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "é"}}}}


@pytest.fixture(scope="session")
def theirs(byte_level):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<|begin|>", eos_token="<|end|>")


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_template_gives_what_transformers_gives(theirs, prompt, tools):
    """Parts of what templates may use that those of well_known.py do not."""
    right = theirs.apply_chat_template(
        MESSAGES, chat_template=TOOLS, add_generation_prompt=prompt, tools=tools, tokenize=False
    )
    ours = ChatTemplate(TOOLS, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    assert ours.render(MESSAGES, add_generation_prompt=prompt, tools=tools) == right


def test_what_a_template_refuses_is_the_callers_fault_and_said_in_its_words():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[{}], [{"role": 1, "content": None}], [{"role": "user", "content": [1]}]])
def test_messages_that_a_template_cannot_use_are_refused(messages):
    with pytest.raises(RequestError, match="does not accept these messages"):
        ChatTemplate("{{ messages[0].role + ': ' + messages[0].content }}").render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{% for i in range(999999999) %}{{ i }}{% endfor %}",
    ],
)
def test_a_hostile_template_is_stopped(source):
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises((ModelError, RequestError)):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_what_the_sandbox_stops_is_the_models_fault():
    with pytest.raises(ModelError, match=r"chat template was stopped.*__class__"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([])


def test_what_is_set_for_the_assistants_text_ends_with_it_as_in_transformers():
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render([]) == render_jinja_template([[]], chat_template=source)[0][0] == "ba"


CALLED = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Bern"}}}],
    },
    {"role": "tool", "content": "yes"},
]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ m.content | trim }}{{ m['content'] }}{{ 'a' ~ m.content }}{{ 'b' + m.content + 'c' }}", "abc"),
        ("{{ m.content is none }} {{ m.content == none }} {{ m.content != none }}", "True True False"),
        ("{% if m.content is not none %}text{% else %}{{ m.tool_calls | length }}{% endif %}", "1"),
        ("{{ '</think>' in m.content }}{{ m.content.split('a')[-1].lstrip() }}{{ m.content or 'no' }}", "Falseno"),
    ],
)
def test_a_content_that_is_null_is_no_text_and_still_none(source, text):
    assert ChatTemplate("{% set m = messages[1] %}{{ tools or '' }}" + source).render(CALLED) == text


@pytest.mark.parametrize("name", KNOWN)
def test_no_well_known_template_prints_none_for_a_call_alone(name):
    known = KNOWN[name]
    template = ChatTemplate(known.source, {"bos_token": known.bos, "eos_token": known.eos})
    with_text = [CALLED[0], {"role": "assistant", "content": ""}, {"role": "user", "content": "yes"}]
    alone = [CALLED[0], {"role": "assistant", "content": None}, {"role": "user", "content": "yes"}]
    try:
        right = template.render(with_text)
    except RequestError:
        return
    made = template.render(alone)
    assert "None" not in made
    assert made == right or "is not none" in known.source


def test_objects_with_methods_do_not_reach_a_template():
    class Loaded:
        def save(self):
            raise AssertionError("called from a template")

    with pytest.raises(RequestError, match="must be JSON data, not Loaded"):
        ChatTemplate("{{ messages[0].content.save() }}").render([{"role": "user", "content": Loaded()}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}no end"])
def test_a_broken_template_is_refused_when_it_is_read(source):
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate(source)


def files(**names: str | bytes) -> dict[str, bytes]:
    return {name.replace("__", "."): text if isinstance(text, bytes) else text.encode() for name, text in names.items()}


def test_the_file_of_its_own_comes_before_the_config():
    config = json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    both = files(tokenizer_config__json=config, chat_template__jinja="{{ bos_token }}file{{ eos_token }}")
    assert ChatTemplate.from_bytes(both).render([]) == "<s>file</s>"
    assert ChatTemplate.from_bytes(files(tokenizer_config__json=config)).render([]) == "config"


def test_of_several_named_templates_the_default_is_taken():
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    config = json.dumps({"chat_template": several})
    assert ChatTemplate.from_bytes(files(tokenizer_config__json=config)).render([]) == "plain"


def test_a_model_may_have_no_template():
    assert ChatTemplate.from_bytes({}) is None
    assert ChatTemplate.from_bytes(files(tokenizer_config__json="{}")) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer_config__json": '{"chat_template": 5}'}, "not a string"),
        ({"tokenizer_config__json": "[]"}, "tokenizer_config.json must hold a JSON object"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"chat_template__jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
    ],
)
def test_a_broken_file_is_named(given, message):
    with pytest.raises(ModelError, match=message):
        ChatTemplate.from_bytes(files(**given))
