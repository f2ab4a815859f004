"""Types of a task's fields: what each takes, and its JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, WithJsonSchema

from engine.bounds import MAX_INT32, Integer, Number, Strings, TokenIds
from engine.bounds import Biases as BiasesBound
from engine.declared import declared
from engine.params import DEFAULTS, SamplingParams
from producers.contract.chat import MESSAGE, read_messages
from producers.contract.task.limits import MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS
from producers.contract.webhook import WEBHOOK, Webhook
from producers.errors import InvalidTask, shown


def _prompt(value: Any) -> Any:
    """Check a prompt by hand: pydantic's union would give one message per member and token. Raises InvalidTask."""
    if isinstance(value, str):
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidTask(
                f"prompt is not valid Unicode: a lone surrogate at character {error.start}", param="prompt"
            ) from None
        if size > MAX_PROMPT_BYTES:
            raise InvalidTask(f"prompt has {size} bytes of UTF-8; at most {MAX_PROMPT_BYTES} are taken", param="prompt")
    elif isinstance(value, (list, tuple)):
        if len(value) > MAX_PROMPT_TOKENS:
            raise InvalidTask(
                f"prompt has {len(value)} token ids; at most {MAX_PROMPT_TOKENS} are taken", param="prompt"
            )
        for at, token in enumerate(value):
            if type(token) is not int or not 0 <= token <= MAX_INT32:
                raise InvalidTask(
                    f"prompt[{at}] is {shown(token)}; a token id is an integer from 0 to {MAX_INT32}", param="prompt"
                )
    if not isinstance(value, (str, list, tuple)):
        raise InvalidTask(
            f"prompt is {shown(value)}; it must be text or a list of token ids", param="prompt", code="invalid_type"
        )
    if not value:
        raise InvalidTask("prompt is empty; give text, or at least one token id", param="prompt", code="empty_prompt")
    return value if isinstance(value, str) else tuple(value)


def _messages(value: Any) -> Any:
    """Check messages. Like a prompt, they are limited by size, here as stored JSON. Raises InvalidTask."""
    messages = read_messages(list(value) if isinstance(value, tuple) else value)
    try:
        size = len(json_of(messages))
    except (RecursionError, UnicodeEncodeError) as error:
        raise InvalidTask(f"messages cannot be kept as JSON: {error}", param="messages") from None
    if size > MAX_PROMPT_BYTES:
        raise InvalidTask(f"messages have {size} bytes as JSON; at most {MAX_PROMPT_BYTES} are taken", param="messages")
    return tuple(messages)


def json_of(messages: Any) -> bytes:
    return json.dumps(messages, ensure_ascii=False).encode()


def stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _biases(value: Any) -> Any:
    """Turn decimal string keys, as JSON has them, into token ids."""
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and DECIMAL.fullmatch(k) else k: bias for k, bias in value.items()}


DECIMAL: Final = re.compile("0|[1-9][0-9]{0,9}")


def known_tier(value: Any) -> Any:
    return "default" if value == "auto" else value


def sampling(name: str, words: str = "") -> Any:
    """The field of a sampling parameter, with the limits that the engine has. `words`: what it must be, in other words.

    Its default is the engine's; None where a model may have its own.
    """
    one = declared(SamplingParams)[name]
    assert one.bound is not None
    limits: dict[str, Any] = {}
    match one.bound:
        case Integer() as bound:
            limits = {"ge": bound.low, "le": bound.high}
        case Number() as bound:
            limits = {"gt" if bound.above else "ge": bound.low, "le": bound.high}
        case Strings() | TokenIds() as bound:
            limits = {"max_length": bound.limit, "json_schema_extra": {"maxItems": bound.limit}}
        case BiasesBound() as bound:
            names = {"maxProperties": bound.limit, "propertyNames": {"pattern": f"^({DECIMAL.pattern})$"}}
            limits = {"max_length": bound.limit, "json_schema_extra": names, "default_factory": dict}
    if "default_factory" not in limits:
        limits["default"] = None if name in DEFAULTS else one.default
    return Field(description=words or one.bound.words, **limits)


_BIASES: Final[Any] = declared(SamplingParams)["logit_bias"].bound
_STOPS: Final[Any] = declared(SamplingParams)["stop"].bound

Tier = Literal["priority", "default", "flex", "batch"]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=_STOPS.longest)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple, json_schema_input_type=list[Text])]
Ids = Annotated[tuple[Count, ...], BeforeValidator(as_tuple, json_schema_input_type=list[Count])]
Bias = Annotated[float, Field(ge=-_BIASES.reach, le=_BIASES.reach)]
Biases = Annotated[dict[Count, Bias], BeforeValidator(_biases, json_schema_input_type=dict[str, Bias])]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
MessageList = Annotated[list[Message], Field(min_length=1)]
Messages = Annotated[
    tuple[dict[str, Any], ...],
    BeforeValidator(_messages, json_schema_input_type=MessageList),
]
#: A prompt's JSON schema, for OpenAPI; `_prompt` enforces it.
PromptText = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_BYTES)]
PromptIds = Annotated[list[Count], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
OwnWebhook = Annotated[Webhook, PlainValidator(Webhook.read), WithJsonSchema(WEBHOOK)]
Prompt = Annotated[str | tuple[int, ...], BeforeValidator(_prompt, json_schema_input_type=PromptText | PromptIds)]
