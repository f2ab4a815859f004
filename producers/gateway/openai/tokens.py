"""`POST /tokenize` and `POST /detokenize`, in vLLM's shape: the tokens of a text or a chat, and the text of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel

from producers.contract.chat import MESSAGE, read_messages
from producers.contract.fields import MAX_PROMPT_TOKENS
from producers.errors import InvalidTask, shown
from producers.gateway.admission.limits import check_sees
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import SUBMITS, principal_of
from producers.gateway.http.errors import invalid_value
from producers.gateway.http.request_body import SETTINGS, documented, fields_of
from producers.gateway.http.request_state import work_of
from producers.gateway.openai.parameters import check_chats
from producers.gateway.tasks.views import errors

router = APIRouter(tags=["openai"])

_MODEL: Final = {"type": "string", "minLength": 1, "maxLength": 512}
TOKENIZE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "additionalProperties": False,
    "properties": {
        "model": _MODEL,
        "prompt": {"type": "string", "minLength": 1, "description": "a text; or give messages"},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": MESSAGE,
            "description": "a chat, by the model's template",
        },
        "add_special_tokens": {"type": "boolean", "description": "of a prompt; unset: true"},
        "add_generation_prompt": {"type": "boolean", "description": "of messages; unset: true"},
        "continue_final_message": {"type": "boolean", "description": "of messages; unset: false"},
        "return_token_strs": {"type": "boolean", "description": "unset: false"},
    },
}
DETOKENIZE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model", "tokens"],
    "additionalProperties": False,
    "properties": {
        "model": _MODEL,
        "tokens": {
            "type": "array",
            "maxItems": MAX_PROMPT_TOKENS,
            "items": {"type": "integer", "minimum": 0},
            "description": "token ids",
        },
    },
}


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Detokenized(BaseModel):
    prompt: str


@router.post(
    "/tokenize",
    dependencies=SUBMITS,
    response_model=Tokenized,
    responses=errors(404, 413, 415, 429),
    openapi_extra=documented(TOKENIZE),
)
async def tokenize(request: Request) -> Tokenized:
    """The tokens of a text, or of a chat, as a task of it would have them."""
    gateway, work = gateway_of(request), work_of(request)
    fields = await fields_of(request, _limit(request), TOKENIZE, {"messages": lambda value, _: read_messages(value)})
    if ("prompt" in fields) == ("messages" in fields):
        raise invalid_value("prompt", "give either a prompt or messages")
    card = await _card(request, fields["model"])
    if "prompt" in fields:
        tokens = await gateway.prompts.encode(
            card, fields["prompt"], work, special=fields.get("add_special_tokens", True)
        )
    else:
        check_chats(card)
        goes_on = fields.get("continue_final_message", False)
        template = {
            "add_generation_prompt": fields.get("add_generation_prompt", not goes_on),
            "continue_final_message": goes_on,
        }
        text = await gateway.templates.render(card, fields["messages"], work, **template)
        tokens = await gateway.prompts.encode(card, text, work, special=False)
    spelled = None
    if fields.get("return_token_strs"):
        tokenizer = await gateway.prompts.tokenizer(card)
        spelled = [tokenizer.token(token_id) for token_id in tokens]
    return Tokenized(count=len(tokens), max_model_len=card["context_length"], tokens=list(tokens), token_strs=spelled)


@router.post(
    "/detokenize",
    dependencies=SUBMITS,
    response_model=Detokenized,
    responses=errors(404, 413, 415, 429),
    openapi_extra=documented(DETOKENIZE),
)
async def detokenize(request: Request) -> Detokenized:
    """The text of tokens, without special ones."""
    fields = await fields_of(request, _limit(request), DETOKENIZE, {"tokens": _token_ids})
    card = await _card(request, fields["model"])
    if fields["tokens"] and (largest := max(fields["tokens"])) >= card["vocab_size"]:
        raise InvalidTask(
            f"tokens has {largest}; {card['name']} has tokens from 0 to {card['vocab_size'] - 1}", param="tokens"
        )
    (text,) = await gateway_of(request).prompts.decode_all(card, [fields["tokens"]], work_of(request))
    return Detokenized(prompt=text)


def _limit(request: Request) -> int:
    """The most bytes of a body: such requests do not count in a minute's."""
    return min(gateway_of(request).settings.max_body, SETTINGS)


async def _card(request: Request, model: str) -> Mapping[str, Any]:
    """The card of a model that the caller may use. Raises Problem and UnknownModel."""
    check_sees(principal_of(request), model)
    return (await gateway_of(request).client.resolve(model)).card


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_PROMPT_TOKENS:
        raise InvalidTask(
            f"{name} is not a list of at most {MAX_PROMPT_TOKENS} token ids", param=name, code="invalid_type"
        )
    wrong = next((token for token in value if type(token) is not int or token < 0), None)
    if wrong is not None or None in value:
        raise InvalidTask(f"{name} has {shown(wrong)}; a token id is an integer from 0 on", param=name)
    return value
