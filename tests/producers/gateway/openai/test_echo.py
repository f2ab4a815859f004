"""Completions that begin with their prompt, and how likely it was, as harnesses ask for it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from engine.errors import RequestError
from engine.text import Tokenizer
from tests.producers.gateway.conftest import TINY, Ask, Door
from tests.producers.gateway.openai.conftest import Answering, chunks, says

TOKENIZER = Tokenizer.from_folder(TINY)


def scores(*pieces: str, n: int = 1, top: int = 1) -> Any:
    """A worker that scores the prompt too: token k has the log probability -k, and alternatives, the first is `!`."""

    def play(worker: Any, record: Any) -> None:
        ids = record.task["prompt"]
        alternatives = tuple((5 + k, -0.25) for k in range(top))
        worker.prompt(record.id, ids, [None, *((-float(k), alternatives) for k in range(1, len(ids)))])
        says(*pieces, n=n, logprobs=[(-0.5, ())])(worker, record)

    return play


def only_scores(worker: Any, record: Any) -> None:
    """Nothing is generated."""
    ids, n = record.task["prompt"], record.n
    worker.prompt(record.id, ids, [None, *[(-1.0, ())] * (len(ids) - 1)])
    worker.finish(record.id, [0] * n, reasons=["length"] * n)


def together(said: list[Any], index: int) -> dict[str, Any]:
    """A choice's chunks as one."""
    mine = [choice for chunk in said for choice in chunk["choices"] if choice["index"] == index]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    logprobs = {name: [value for one in mine for value in (one["logprobs"] or {}).get(name, [])] for name in names}
    (reason,) = [one["finish_reason"] for one in mine if one["finish_reason"]]
    text = "".join(one["text"] for one in mine)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class TestText:
    def test_the_prompt_comes_first(self, complete: Ask, answering: Answering) -> None:
        ids = TOKENIZER.encode("class Q")
        assert complete(echo=True).json()["choices"][0]["text"] == "def fHello, world"
        assert complete(echo=True, prompt=ids).json()["choices"][0]["text"] == "class QHello, world"

    def test_a_stream_begins_with_it(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [says("a", n=2)]
        *said, _ = chunks(complete(echo=True, stream=True, n=2, prompt=["x", [5]]))
        texts = ["".join(c["choices"][0]["text"] for c in said if c["choices"][0]["index"] == k) for k in range(4)]
        assert texts == ["xa", "xa", "!a", "!a"]

    def test_a_prompt_is_put_into_text_once(
        self, complete: Ask, answering: Answering, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode, calls = Tokenizer.decode, []
        monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: calls.append(ids) or decode(self, ids))
        answering.scripts = [says("a", n=8)]
        for stream in (False, True):
            assert complete(echo=True, prompt=[5, 6], n=8, stream=stream).status_code == 200
        assert calls == [[5, 6]] * 2

    def test_token_ids_that_have_no_text_are_refused(
        self, complete: Ask, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(self: Tokenizer, ids: Any) -> str:
            raise RequestError("the model's tokenizer fails on these tokens", param="prompt")

        monkeypatch.setattr(Tokenizer, "decode", fails)
        answer = complete(echo=True, prompt=[5, 6])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert len(door.app.state.gateway.readers) == 0


def test_each_choice_has_its_prompts_scores_in_vllms_form(complete: Ask, answering: Answering) -> None:
    def script(worker: Any, record: Any) -> None:
        ids = record.task["prompt"]
        worker.prompt(record.id, ids, [None, *[(-1.0, ((5, -0.5),))] * (len(ids) - 1)])
        says("a", n=2)(worker, record)

    answering.scripts = [script, script]
    choices = complete(prompt=[[7, 8], [9, 10, 11]], n=2, prompt_logprobs=1).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a"] * 4
    assert [record.task["prompt_logprobs"] for record in answering.records] == [1, 1]
    for choice, ids in zip(choices, ([7, 8],) * 2 + ([9, 10, 11],) * 2, strict=True):
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [row.keys() for row in rest] == [{str(token), "5"} for token in ids[1:]]
        assert rest[0]["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": "!"}


class TestScores:
    PROMPT = "class Queue:\n    pass 🙂"

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_the_prompts_tokens_come_before_the_outputs(
        self, complete: Ask, answering: Answering, as_ids: bool
    ) -> None:
        answering.scripts = [scores("x", "y")]
        ids = TOKENIZER.encode(self.PROMPT)
        (choice,) = complete(prompt=ids if as_ids else self.PROMPT, echo=True, logprobs=1).json()["choices"]
        assert answering.records[0].task["prompt_logprobs"] == 1
        assert choice["text"] == self.PROMPT + "xy"
        logprobs = choice["logprobs"]
        count = len(ids)
        assert logprobs["token_logprobs"] == [None, *(-float(k) for k in range(1, count)), -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1]["!"] == -0.25
        assert len(logprobs["top_logprobs"][1]) == 2, "the token itself is there, too"
        assert logprobs["text_offset"][count] == len(self.PROMPT)
        ends = logprobs["text_offset"][1 : count + 1]
        texts = [choice["text"][at:end] for at, end in zip(logprobs["text_offset"], ends, strict=False)]
        assert "".join(texts) == self.PROMPT
        plain = [(name, text) for name, text in zip(logprobs["tokens"], texts, strict=False) if "bytes:" not in name]
        assert all(name == text for name, text in plain)

    def test_a_special_token_in_a_text_has_its_place(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [only_scores]
        prompt = "<|user|>\nHi<|assistant|>\n"
        (choice,) = complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0).json()["choices"]
        logprobs = choice["logprobs"]
        for name, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert prompt.startswith(name, at)
        assert "<|assistant|>" in logprobs["tokens"]

    def test_nothing_need_be_generated(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [only_scores]
        for stream in (False, True):
            answer = complete(prompt="import os", echo=True, logprobs=0, max_tokens=0, stream=stream)
            choice = together(chunks(answer)[:-1], 0) if stream else answer.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("import os", "length")
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0]

    def test_a_stream_says_what_one_piece_says(self, complete: Ask, answering: Answering) -> None:
        """Also where the prompt comes in several parts."""
        answering.scripts = [scores("x", "y", n=3)]
        prompts = ["import os\n" * 300, "def f", self.PROMPT]
        asked = {"prompt": prompts, "echo": True, "logprobs": 1, "n": 3, "max_tokens": 2}
        assert len(TOKENIZER.encode(prompts[0])) > 512
        *said, _ = chunks(complete(**asked, stream=True))
        choices = complete(**asked).json()["choices"]
        assert [together(said, index) for index in range(9)] == choices
        assert [choice["text"] for choice in choices] == [prompt + "xy" for prompt in prompts for _ in range(3)]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_large_prompt_is_made_once_and_off_the_event_loop(
        self, complete: Ask, answering: Answering, door: Door, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        answering.scripts = [scores("x", n=4, top=20)]
        spell, calls = Tokenizer.token_bytes, Counter[int | None]()

        def counted(self: Tokenizer, token_id: int) -> bytes:
            calls[threading.get_ident()] += 1
            return spell(self, token_id)

        monkeypatch.setattr(Tokenizer, "token_bytes", counted)
        assert complete(prompt=[7] * 600, echo=True, logprobs=20, n=4, stream=stream).status_code == 200
        assert calls.pop(door.thread_id, 0) <= 4 * 2, "that of the outputs alone"
        assert sum(calls.values()) <= 600 * 22
