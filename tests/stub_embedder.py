"""An engine without a model that makes rows of texts: each is the text's first token and its length.

Behaves like `engine.PoolingEngine` as far as the worker uses it. Environment: as of `tests.stub_engine`, where it makes
sense; STUB_GO: while this file is not there, nothing ends; with STUB_HUNG_BY, nothing that has this token. A text that
contains DEADLY kills the process.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from engine.errors import TextError
from engine.request import Event, Request
from engine.text.tokenizer import EncodedText
from tests.stub_engine import DEADLY, StubEngine


class StubTexts:
    vocab_size = 256

    def text_before(self, name: str | None) -> str:
        return ""

    def prompt_tokens(self, before: str) -> int:
        return 0

    def encoded(self, text: str | list[int], truncate: bool, second: str | None = None) -> EncodedText:
        ids = [*map(ord, text)] if isinstance(text, str) else text
        return EncodedText(ids, None, len(ids))


class StubEmbedder(StubEngine):
    kind = "embed"

    def __init__(self, name: str = "stub") -> None:
        super().__init__(name)
        self.texts = StubTexts()
        card = json.loads(self.card.to_json())
        card |= {"capabilities": ["embed"], "pooling": {"dimensions": 2, "matryoshka": False, "prompts": {}}}
        self.card = SimpleNamespace(to_json=lambda: json.dumps(card), name=name, version=card["version"])  # type: ignore[assignment]

    def submit(self, request: Request, on_event: Any) -> None:
        self._inbox.append((request, on_event))
        self._wake.set()

    def _step(self) -> None:
        self._steps += 1
        for key, running in list(self._running.items()):
            request = running.request
            if DEADLY in request.prompt_ids:
                os._exit(9)
            held = not self.hung_by or self.hung_by in request.prompt_ids
            if held and self.go and not os.path.exists(self.go):
                continue
            assert request.pooling is not None
            rows: list[list[float] | TextError] = []
            start = 0
            for number, length in enumerate(request.pooling.lengths):
                error = request.pooling.errors.get(number)
                rows.append(error or [float(request.prompt_ids[start]), float(length)])
                start += length
            del self._running[key]
            running.on_event(Event(key, finish_reason="stop", done=True, prompt_tokens=start, rows=rows))


def load(model: str, options: dict[str, Any]) -> tuple[StubEmbedder, dict[str, bytes]]:
    return StubEmbedder(model), {}
