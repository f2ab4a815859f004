"""A real model calls tools, and says JSON, for the unmodified `openai` client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.conformance.conftest import TINY, System
from tests.exhaustive import few
from tests.processes import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: As Qwen's, in short.
TEMPLATE = """{% if tools %}For each call, write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}assistant: """
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}]
MESSAGES: Any = [{"role": "user", "content": "Will it rain in Bern?"}]


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a system with a worker of the bundled model with another template."""
    folder = tmp_path_factory.mktemp("models") / "caller"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    worker = Worker(
        system.store_url,
        model=str(folder),
        engine_factory="workers.runtime.worker:load_engine",
        engine={"dtype": "float32", "threads": 1},
        warm=True,
        LOG_LEVEL="WARNING",
    )
    with worker, OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=180, max_retries=0) as made:
        worker.wait_until(lambda: bool(worker.incarnations), 180)
        yield made


@pytest.mark.parametrize(
    ("model", "stream"),
    few([(name, stream) for name in ("caller", "tiny") for stream in (False, True)], ("tiny", True)),
)
def test_a_response_calls_and_goes_on(client: OpenAI, model: str, stream: bool) -> None:
    """Also of the bundled model, whose template has no tools. The output ends with its one call, far from its limit."""
    tool: Any = {"type": "function", **TOOLS[0]["function"]}
    asked: Any = {"model": model, "tools": [tool], "max_output_tokens": 200, "extra_body": {"seed": 3}}
    once: Any = {"input": "Will it rain in Bern?", "tool_choice": "required", "parallel_tool_calls": False}
    if stream:
        with client.responses.stream(**asked, **once) as events:
            answer: Any = events.get_final_response()
    else:
        answer = client.responses.create(**asked, **once)
    assert answer.status == "completed"
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    jsonschema.validate(json.loads(call.arguments), PLACE)
    told: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It will."}]
    answer = client.responses.create(**asked, input=told, previous_response_id=answer.id)
    assert answer.status in ("completed", "incomplete")
    assert answer.output


@pytest.mark.parametrize("stream", few([False, True], True))
def test_a_call_is_made_and_answered(client: OpenAI, stream: bool) -> None:
    asked = {"model": "caller", "tools": TOOLS, "max_tokens": 200, "seed": 3}
    once = {"messages": MESSAGES, "tool_choice": "required", "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**asked, **once) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked, **once)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)
    told = {"role": "tool", "tool_call_id": call.id, "content": "It will."}
    answer = client.chat.completions.create(**asked, messages=[*MESSAGES, choice.message, told])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("ask", few(["chat", "responses", "streams"], "chat"))
def test_parse_gives_objects_of_a_class(client: OpenAI, ask: str) -> None:
    """Answers, and arguments of calls."""
    chat: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    asked: Any = {"model": "tiny", "input": "Who wrote it?", "max_output_tokens": 200, "extra_body": {"seed": 3}}
    once: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    tool = pydantic_function_tool(Person)
    if ask == "chat":
        answer = client.chat.completions.parse(**chat, response_format=Person).choices[0].message.parsed
        (call,) = client.chat.completions.parse(**chat, **once, tools=[tool]).choices[0].message.tool_calls or []
        made: list[Any] = [answer, call.function.parsed_arguments]
    elif ask == "responses":
        flat: Any = {"type": "function", **tool["function"]}
        (called,) = client.responses.parse(**asked, **once, tools=[flat]).output
        made = [client.responses.parse(**asked, text_format=Person).output_parsed]
        made.append(Person.model_validate_json(called.arguments))
    else:
        with client.chat.completions.stream(**chat, response_format=Person) as chunks:
            made = [chunks.get_final_completion().choices[0].message.parsed]
        with client.responses.stream(**asked, text_format=Person) as events:
            made.append(events.get_final_response().output_parsed)
    assert [type(one) for one in made] == [Person, Person]
