"""Reads the bodies of `/api/chat` and `/api/generate` as the chats that OpenAI's endpoint makes of its own.

Each field and option is in one of the tables below. What Ollama's own server would ignore, too, is named in the
answer's header Penstock-Warning; what would change the answer, and is not offered, is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from producers.contract.chat import read_string
from producers.errors import shown
from producers.gateway.http.errors import Problem
from producers.gateway.openai import chat
from producers.gateway.openai.chat import ChatRequest
from producers.gateway.openai.parameters import TRUNCATE, flag, refusal, refused

#: Option -> the chat's parameter. Those of INTEGERS may come as 5.0, as some clients write all numbers.
OPTIONS: Final = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
INTEGERS: Final = frozenset({"top_k", "seed", "num_predict"})
#: Options about the machine and its memory: workers have their own settings, and no answer depends on them.
OF_THE_MACHINE: Final = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa", "low_vram"),
        *("f16_kv", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"),
    }
)
#: Most characters of a model's name, with an alias or a tag.
MAX_MODEL: Final = 512
#: Fields of both bodies that this module reads, or that ask for nothing here.
TAKEN: Final = (
    *("model", "stream", "format", "options", "keep_alive", "think", "truncate", "shift", "logprobs", "top_logprobs"),
)
#: Fields of the gateway's own, as of `/v1/chat/completions`.
SAME: Final = ("service_tier", "metadata", "timeout", "user")
OF_CHAT: Final = ("messages", "tools")
OF_GENERATE: Final = ("prompt", "system", "raw")
#: Fields that are refused unless they are empty -> what to do in place of them.
REFUSED: Final = {
    "images": "the models here read text",
    "suffix": "nothing is filled in between two texts here",
    "template": "a model's own template is used; raw: true sends a prompt as it is",
    "context": "send the conversation as messages to /api/chat",
    **dict.fromkeys(("width", "height", "steps"), "no images are made here"),
    "_debug_render_only": "POST /tokenize has the tokens of a chat",
}
#: Efforts of reasoning -> OpenAI's.
EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
#: A task's field -> its name in these bodies.
NAMES: Final = {
    **{ours: f"options.{name}" for name, ours in OPTIONS.items()},
    "json_schema": "format",
}


def read_chat(body: Mapping[str, Any], model: str, tenant: str | None, warnings: list[str]) -> ChatRequest:
    """The chat in the body of `/api/chat`. `warnings`: gets what is not followed. Raises Problem and InvalidTask."""
    parameters = _parameters(body, model, OF_CHAT, warnings)
    messages = body["messages"]
    if isinstance(messages, list):
        messages = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        last = messages[-1]
        if isinstance(last, dict) and last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            parameters["continue_final_message"] = True
    parameters["messages"] = messages
    if body.get("tools"):
        parameters["tools"] = body["tools"]
    return _named(chat.read_chat(parameters, tenant), "messages")


def read_generate(body: Mapping[str, Any], model: str, tenant: str | None, warnings: list[str]) -> ChatRequest:
    """The chat in the body of `/api/generate`: one message of a user, or with `raw` a text that no template renders. So
    it is, too, where the model has no template, and no `system` is given. Raises as `read_chat`."""
    parameters = _parameters(body, model, OF_GENERATE, warnings)
    prompt, system, raw = read_string(body["prompt"], "prompt"), body.get("system"), flag(_given(body), "raw")
    system = None if system is None else read_string(system, "system")
    if raw and system:
        raise refused("system", system, (), "and raw is true: raw prompts have no template")
    parameters["messages"] = [*([{"role": "system", "content": system}] if system else [])]
    parameters["messages"].append({"role": "user", "content": prompt})
    read = _named(chat.read_chat(parameters, tenant), "prompt")
    return read if system else replace(read, text=prompt, begun=prompt if raw else None)


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _named(read: ChatRequest, prompt: str) -> ChatRequest:
    """The chat, whose errors have these bodies' names."""
    names = {**read.text_request.names, **NAMES, "prompt": prompt, "prompt_ids": prompt}
    reasoning = read.reasoning
    asks = "think" if reasoning.parameter is not None else None
    return replace(
        read,
        text_request=replace(read.text_request, names=names),
        reasoning=replace(reasoning, parameter=asks, effort_name="think"),
        cut=True,
    )


def _parameters(body: Mapping[str, Any], model: str, own: tuple[str, ...], warnings: list[str]) -> dict[str, Any]:
    """A chat's parameters but its messages. `own`: further fields that the body may have."""
    given = _given(body)
    for name, why in REFUSED.items():
        if given.get(name):
            raise refused(name, given[name], (), f"which is not offered here: {why}")
    warn_of_unknown(given, (*TAKEN, *SAME, *own, *REFUSED), warnings)
    parameters = {"model": model, "stream": flag(given, "stream", True)}
    parameters |= {name: given[name] for name in SAME if name in given}
    parameters |= _options(given.get("options", {}), warnings)
    parameters |= _form(given.get("format", ""))
    parameters |= _thinking(given.get("think"))
    if flag(given, "truncate"):
        parameters[TRUNCATE] = -1
    if flag(given, "logprobs"):
        parameters["logprobs"] = True
        parameters["top_logprobs"] = given.get("top_logprobs", 0)
    return parameters


def warn_of_unknown(given: Iterable[str], known: Collection[str], warnings: list[str]) -> None:
    """Warn of fields that are ignored."""
    if unknown := [name for name in given if name not in known]:
        warnings.append(f"unknown fields are ignored: {', '.join(map(_short, unknown[:20]))}")


def _short(name: str) -> str:
    return shown(name)[1:-1]


def _options(options: Any, warnings: list[str]) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise refusal("options", options, "an object", code="invalid_type")
    parameters: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if value is None or name in OF_THE_MACHINE:
            continue
        if name not in OPTIONS:
            ignored.append(name)
            continue
        if name in INTEGERS:
            value = _integer(f"options.{name}", value)
        elif name != "stop" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise refusal(f"options.{name}", value, "a number", code="invalid_type")
        if name == "num_predict" and value <= 0:  # any number of tokens, up to the end of the context
            continue
        parameters[OPTIONS[name]] = value
    if ignored:
        warnings.append(f"options are not followed: {', '.join(map(_short, ignored[:20]))}")
    if parameters.get("stop") in ([], ""):
        del parameters["stop"]
    return parameters


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise refusal(name, value, "an integer", code="invalid_type")
    return int(value)


def _form(form: Any) -> dict[str, Any]:
    if form == "":
        return {}
    if form == "json":
        return {"json_schema": {"type": "object"}}
    if not isinstance(form, dict):
        raise refusal("format", form, '"json" or a JSON schema, which is an object')
    return {"json_schema": form}


def _thinking(think: Any) -> dict[str, Any]:
    if think is None or think == "":
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    if think is True:  # a template that knows efforts reasons at its middle one, and no budget ends it
        return {"reasoning_effort": "medium", "thinking_budget": -1}
    if not isinstance(think, str) or think not in EFFORTS:
        raise refusal("think", think, f"true, false, {', '.join(EFFORTS)}")
    return {"reasoning_effort": EFFORTS[think]}


def _message(message: Any, path: str) -> Any:
    """A message as OpenAI has it."""
    if not isinstance(message, dict):
        return message  # it is refused with the others
    if message.get("images"):
        raise refused(f"{path}.images", message["images"], (), f"which is not offered here: {REFUSED['images']}")
    role = message.get("role")
    read: dict[str, Any] = {"role": role.lower() if isinstance(role, str) else role}
    read["content"] = message["content"] if message.get("content") is not None else ""
    names = {"tool_calls": "tool_calls", "tool_call_id": "tool_call_id"}
    names |= {"thinking": "reasoning_content", "tool_name": "name"}
    return read | {ours: message[name] for name, ours in names.items() if message.get(name)}


def check_model(body: Mapping[str, Any], *names: str) -> str:
    """The model that a body names. `names`: the fields that may, in order. Raises Problem and InvalidTask."""
    name = next((name for name in names if body.get(name)), None)
    if name is None:
        raise Problem(400, f"{names[0]} is missing", code="missing_required_parameter", param=names[0])
    model = body[name]
    if not isinstance(model, str):
        raise refusal(name, model, "the name of a model", code="invalid_type")
    if len(model) > MAX_MODEL:
        raise refusal(name, model, f"a name of at most {MAX_MODEL} characters")
    return read_string(model, name)
