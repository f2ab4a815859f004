"""Errors name a task's fields as their caller does, and leave alone what else the message says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producers.errors import InvalidTask
from producers.gateway.http.errors import Problem
from producers.gateway.openai.batch_lines import CHATS, COMPLETIONS, RESPONSES, read_line
from producers.gateway.openai.pooling import EMBEDDINGS, SCORE
from producers.gateway.text.forms import Forms
from tests.producers.gateway.conftest import CARD
from tests.producers.gateway.openai.conftest import MESSAGES
from tests.producers.gateway.openai.test_batch_lines import call

GENERATES = json.loads(CARD.to_json())
POOLS = GENERATES | {"capabilities": ["embed", "rerank"], "pooling": {"dimensions": 8}}
ASKED: dict[str, dict[str, Any]] = {
    CHATS: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "def f"},
    RESPONSES: {"input": "Write f."},
    EMBEDDINGS: {"input": "a"},
    SCORE: {"text_1": "a", "text_2": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}
#: (path, fields, parameter, message).
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHATS,
        {"max_completion_tokens": 4, "min_tokens": 5},
        "min_tokens",
        "min_tokens is 5, more than max_completion_tokens (4)",
    ),
    (
        CHATS,
        {"max_completion_tokens": 4, "min_tokens": -1},
        "min_tokens",
        "min_tokens is -1; min_tokens must be an integer from 0 to 2147483647, at most max_completion_tokens",
    ),
    (
        CHATS,
        {"max_completion_tokens": -1},
        "max_completion_tokens",
        "max_completion_tokens is -1; max_completion_tokens must be an integer from 0 to 2147483647 "
        "(unset: as far as the context goes)",
    ),
    (
        CHATS,
        {"guided_regex": "a", "guided_json": {}},
        "guided_regex",
        "guided_json and guided_regex are both given; an output has one form",
    ),
    (
        CHATS,
        {"guided_choice": ["a", 5]},
        "guided_choice",
        "guided_choice[1] is 5; guided_choice must be a list of at most 1000 strings, each of 1 to 1024 characters",
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"grammar": ""}},
        "structured_outputs.grammar",
        "structured_outputs.grammar has 0 characters; it must have 1 to 131072",
    ),
    (
        RESPONSES,
        {"max_output_tokens": 4, "min_tokens": 5},
        "min_tokens",
        "min_tokens is 5, more than max_output_tokens (4)",
    ),
    (EMBEDDINGS, {"input": ["a", ""]}, "input", "input[1] is empty; give text, or at least one token id"),
    (SCORE, {"text_2": ["a", ""]}, "text_2", "text_2[1] is empty; give text, or at least one token id"),
    ("/v2/rerank", {"documents": ["a", "b\0"]}, "documents", "documents[1] has a NUL character"),
]
#: The same, where a value contains the name of a field that has another one here.
QUOTED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHATS,
        {"max_completion_tokens": 4, "metadata": {"max_tokens": 3}},
        "metadata",
        'metadata["max_tokens"] is 3; metadata must be at most 16 strings by name; a name has 1 to 64 characters, a '
        "string at most 512",
    ),
    (
        CHATS,
        {"guided_regex": "a", "stop": ["regex", 5]},
        "stop",
        "stop[1] is 5; stop must be a string, or a list of at most 16, each of 1 to 256 characters",
    ),
    (
        CHATS,
        {"guided_regex": "a", "timeout": "regex"},
        "timeout",
        'timeout is "regex"; timeout must be seconds, above 0 and up to 604800 (7 days)',
    ),
    (
        RESPONSES,
        {"max_output_tokens": 4, "user": "u", "temperature": "max_tokens of input"},
        "temperature",
        'temperature is "max_tokens of input"; temperature must be a number from 0 (greedy) to 100',
    ),
    (
        SCORE,
        {"text_2": [{"input": "query"}]},
        "text_2",
        'text_2[0] is {"input": "query"}; it must be text or a list of token ids',
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "message"), [*REFUSED, *QUOTED])
def test_a_refusal_names_what_the_caller_wrote(path: str, fields: dict[str, Any], param: str, message: str) -> None:
    card = GENERATES if path in (CHATS, COMPLETIONS, RESPONSES) else POOLS
    body = {"model": card["name"], **ASKED[path], **fields}
    with pytest.raises((InvalidTask, Problem)) as refused:
        read_line(path, body, card, 5_000, Forms().check_now, call)
    assert (refused.value.param, refused.value.message) == (param, message)


def test_what_a_parser_says_of_a_form_stays_as_it_is() -> None:
    body = {"model": CARD.name, **ASKED[CHATS], "guided_regex": "(regex"}
    with pytest.raises(InvalidTask, match=r"^guided_regex cannot be followed: .*\(regex") as refused:
        read_line(CHATS, body, GENERATES, 5_000, Forms().check_now, call)
    assert "guided_regex parse error" not in refused.value.message
