"""Calls in an answer: as members of its messages, and as a stream's deltas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from producers.gateway.openai.answer import Output
from producers.gateway.openai.logprobs import CHAT
from producers.gateway.openai.tools.grammar import Calling
from producers.gateway.openai.tools.spoken import Arguments, Begun, Listener, Said
from producers.gateway.openai.whole import Choice, Scorer

#: The finish reason of an output that ends with calls.
CALLED = "tool_calls"


class CallingChoice(Choice):
    """A choice that may have calls. `task_id`, `index`: its own, by which its calls have their ids."""

    __slots__ = ("_calling", "_calls", "_listener", "_place", "_size")

    def __init__(self, scorer: Scorer | None, calling: Calling, task_id: str, index: int) -> None:
        super().__init__(scorer, CHAT)
        self._calling = calling
        self._listener = Listener(calling)
        self._place = task_id, index
        self._calls: list[tuple[str, list[str]]] = []
        self._size = 0

    @property
    def size(self) -> int:
        return super().size + self._size

    def take(self, output: Output) -> None:
        self._take(output, self._hear(self._listener.hear(output.tokens)))

    def close(self) -> list[dict[str, Any]]:
        """The message's `tool_calls`, once all of the output was taken."""
        self._take(Output(), self._hear(self._listener.end()))
        self.reason = CALLED if self.reason == "stop" and self._listener.called else self.reason
        return [
            {
                "id": self._calling.format.id_of(*self._place, at),
                "type": "function",
                "function": {"name": name, "arguments": "".join(parts)},
            }
            for at, (name, parts) in enumerate(self._calls)
        ]

    def _hear(self, said: Sequence[Said]) -> str:
        """Keep the calls. Returns the content."""
        for one in said:
            if isinstance(one, Begun):
                self._calls.append((one.name, []))
                self._size += 100
            elif isinstance(one, Arguments):
                self._calls[one.at][1].append(one.text)
                self._size += len(one.text)
        return "".join(one for one in said if isinstance(one, str))


def message(choice: Choice) -> Iterator[bytes | bytearray]:
    """The members of a message after its role: content, and calls if there are any."""
    calls = choice.close() if isinstance(choice, CallingChoice) else []
    if calls and not choice.text:
        yield b'"content":null'
    else:
        yield b'"content":"'
        yield choice.text
        yield b'"'
    yield b',"refusal":null,"annotations":[]'
    if calls:
        yield b',"tool_calls":' + json.dumps(calls, ensure_ascii=False, separators=(",", ":")).encode()


def deltas(said: Sequence[Said], calling: Calling, task_id: str, index: int) -> Iterator[dict[str, Any]]:
    """The deltas of a stream's choice `index`."""
    for one in said:
        if isinstance(one, str):
            yield {"content": one}
        elif isinstance(one, Begun):
            function = {"name": one.name, "arguments": ""}
            named = {"id": calling.format.id_of(task_id, index, one.at), "type": "function"}
            yield {"tool_calls": [{"index": one.at, **named, "function": function}]}
        else:
            yield {"tool_calls": [{"index": one.at, "function": {"arguments": one.text}}]}
