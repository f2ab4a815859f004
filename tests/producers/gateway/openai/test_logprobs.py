"""Log probabilities in the legacy endpoint's four lists; a chat's are in test_chat.py."""

from __future__ import annotations

from typing import Any

import pytest

from engine.output import OutputState
from engine.params import SamplingParams
from engine.text import Tokenizer
from producers.gateway.openai.logprobs import CompletionLogprobs
from tests.producers.gateway.conftest import TINY, Ask
from tests.producers.gateway.openai.conftest import Answering, chunks, says

TOKENIZER = Tokenizer.from_folder(TINY)


def generated(text: str, **params: Any) -> Any:
    """A worker that generates this text, cut and held back as the engine does."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    state = OutputState(SamplingParams(**params), (), TOKENIZER.new_detokenizer(), len(ids))

    def play(worker: Any, record: Any) -> None:
        for at, token_id in enumerate(ids):
            piece, reason, _ = state.push(token_id)
            worker.append(record.id, at, [piece], token_ids=[token_id], logprobs=[(-1.0, ())], finish_reason=reason)
            if reason is not None:
                worker.finish(record.id, [at + 1], reasons=[reason])
                return

    return play


def test_the_four_lists(complete: Ask, answering: Answering) -> None:
    top = ((9, -0.1), (6, -3.0))
    ids = TOKENIZER.encode("def x", add_special_tokens=False)

    def play(worker: Any, record: Any) -> None:
        worker.append(record.id, 0, ["def", " x"], token_ids=ids, logprobs=[(-5.0, top)] * 2)
        worker.finish(record.id, [2])

    answering.scripts = [play]
    logprobs = complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["def", " x"],
        "token_logprobs": [-5.0, -5.0],
        "top_logprobs": [{"%": -0.1, '"': -3.0, name: -5.0} for name in ("def", " x")],
        "text_offset": [0, 3],
    }
    assert answering.records[0].task["logprobs"] == 2


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("def read(path):\n    return path", {"stop": ("(paths", "):\n    pass")}),
        ("def read(path):\n    return path", {"stop": ("):",)}),
        ("def read(path):\n    return path", {"stop": ("):",), "include_stop": True}),
        ("x = 'é🙂'  # 🙂", {"stop": ("🙂🙂",)}),
    ],
    ids=["held back", "cut off", "kept", "half characters"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_offset_is_where_the_tokens_own_text_begins(
    complete: Ask, answering: Answering, text: str, params: dict[str, Any], stream: bool
) -> None:
    answering.scripts = [generated(text, **params)]
    answer = complete(logprobs=0, stream=stream)
    choices = [c["choices"][0] for c in chunks(answer)[:-1]] if stream else answer.json()["choices"]
    logprobs = [one["logprobs"] for one in choices if one["logprobs"]]
    tokens, offsets = ([value for one in logprobs for value in one[name]] for name in ("tokens", "text_offset"))
    said = "".join(one["text"] for one in choices)
    assert text.startswith(said)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for name, at in zip(tokens, offsets, strict=True):
        assert "bytes:" in name or text.startswith(name, at)
    ids = TOKENIZER.encode(text, add_special_tokens=False)[: len(tokens)]
    assert len(ids) == len(tokens) > 3
    held = [at for at, _ in enumerate(ids) if offsets[at] >= len(said)]
    assert bool(held) == (params["stop"] == ("):",) and "include_stop" not in params), "what was cut off is behind"


def test_offsets_begin_behind_an_echo_and_at_zero_without(complete: Ask, answering: Answering) -> None:
    for echo, begins in ((False, 0), (True, len("def f"))):
        answering.scripts = [generated("ab cd")]
        logprobs = complete(logprobs=0, echo=echo).json()["choices"][0]["logprobs"]
        assert logprobs["text_offset"][0] == begins


@pytest.mark.parametrize(
    ("data", "offsets"), [(b"\xceab", [0, 1, 2]), (b"\xce\xceab", [0, 1, 2, 3]), (b"\xce\xb1a", [0, 0, 1])]
)
def test_own_text_begins_behind_what_is_left_of_an_unfinished_character(data: bytes, offsets: list[int]) -> None:
    of = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.vocab_size)}
    rows = [(of[bytes([byte])], (-1.0, ())) for byte in data]
    assert CompletionLogprobs(TOKENIZER).rows(rows)["text_offset"] == offsets


def test_half_a_character_is_named_by_its_bytes(complete: Ask, answering: Answering) -> None:
    (half, *_) = TOKENIZER.encode("🙂")
    data = TOKENIZER.token_bytes(half)
    answering.scripts = [says("x", logprobs=[(-1.0, ((half, -0.5),))])]
    (top,) = complete(logprobs=1).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) in top
