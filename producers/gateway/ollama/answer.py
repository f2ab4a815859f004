"""Answers in Ollama's form: lines of JSON as the output comes, or one object. The last line has counts and times.

    outputs -> content, thinking, whole calls -> a line each -> the task's record -> the line that ends the answer

A heartbeat is a space, with which the next line begins: clients read each line as JSON. A call is answered once it is
whole, its arguments as an object; one that the output's end cuts is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from json.encoder import encode_basestring_ascii as quote
from typing import Any, ClassVar, Final

from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.contract.stream import End, Event, Token
from producers.gateway.context import Gateway
from producers.gateway.http.errors import problem_of, shaped
from producers.gateway.http.sse import Direct
from producers.gateway.openai.answer import ChunkStream, Output, output_batches, run_by_weight
from producers.gateway.openai.chat import PreparedChat
from producers.gateway.openai.complete import Choice, Whole
from producers.gateway.openai.logprobs import dumps
from producers.gateway.openai.output_parser import ParsedChoice
from producers.gateway.openai.tool_call_parser import CallArguments, CallEnd, CallStart, OutputPart, ReasoningText
from producers.gateway.tasks.foreground import Foreground

#: The path of which errors have Ollama's form.
PREFIX: Final = "/api/"
#: Characters that a line's JSON does not have as they are: it is ASCII, since clients may split lines at U+2028.
_ESCAPED: Final = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Form:
    """The members around an answer's text: `before` it, and `after` all that stands beside it."""

    before: str
    after: str


CHAT: Final = Form('"message": {"role": "assistant", "content": ', "}")
GENERATE: Final = Form('"response": ', "")


def timestamp(seconds: float | None = None) -> str:
    """A time (unix s), else now, as RFC 3339 has it."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def beginning(model: str) -> str:
    """The first members of each line and object. `model`: as the caller names it."""
    return f'{{"model": {quote(model)}, "created_at": "{timestamp()}", '


def loaded(model: str, form: Form, reason: str) -> bytes:
    """The answer to a request without a prompt, which only loads or unloads a model with Ollama."""
    return f'{beginning(model)}{form.before}""{form.after}, "done": true, "done_reason": "{reason}"}}\n'.encode()


def metrics(record: Record, usage: Mapping[str, int]) -> dict[str, int]:
    """Counts, and times in nanoseconds, of a task that has ended: until a worker began it, until its first token, and
    until its end. Raises BrokenRecord."""
    created, started, first, finished = (record.time(name) for name in ("created", "started", "first", "finished"))
    end = finished or first or started or created or 0
    times = [created or end, started or first or end, first or end, end]
    waited, prompt, output = (max(0, after - before) * 10**6 for before, after in pairwise(times))
    return {
        "total_duration": waited + prompt + output,
        "load_duration": waited,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": prompt,
        "eval_count": usage["output_tokens"],
        "eval_duration": output,
    }


def reason_of(reason: str | None) -> str:
    """`done_reason`: an output that ends with calls stops, too."""
    return "length" if reason == "length" else "stop"


def _call(call_id: str, index: int, name: str, arguments: str) -> str | None:
    """A call as JSON, its arguments as the model has written them; None if they are cut."""
    written = arguments or "{}"
    try:
        parsed = json.loads(written, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    # Not `parsed`: a number may be too large for a float, and half of a pair no text.
    written = _ESCAPED.sub(lambda match: " " if match[0] in "\t\n\r" else quote(match[0])[1:-1], written)
    function = f'{{"index": {index}, "name": {quote(name)}, "arguments": {written}}}'
    return f'{{"id": {quote(call_id)}, "function": {function}}}'


def _no_json(constant: str) -> Any:
    """Python reads NaN and infinities, too."""
    raise ValueError(constant)


class Lines:
    """Makes the lines of one stream. `model`: as the caller names it."""

    def __init__(self, prepared: PreparedChat, form: Form, model: str) -> None:
        self._prepared = prepared
        self._form = form
        self._model = model
        self._parser = None if prepared.syntax is None else prepared.syntax.parser()
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def tokens(self, tokens: list[Token]) -> bytes:
        """The lines of tokens that come on their own."""
        return self._of(Output(tokens))

    async def lines(self, foreground: Foreground, handle: AsyncHandle, direct: Direct) -> AsyncGenerator[bytes]:
        """All lines. Raises as `Foreground.events`, and BrokenRecord."""
        with self._prepared.chat.text_request.naming():
            reason, end = None, None
            async with aclosing(output_batches(foreground.events(direct), 1)) as batches:
                async for batch in batches:
                    end = batch.ends.get(0, end)
                    output = batch.outputs.get(0, Output())
                    reason = output.reason or reason
                    if output.tokens and (lines := await run_by_weight(batch.weight, partial(self._of, output))):
                        yield lines
            rest = b"" if self._parser is None else b"".join(self._each(self._parser.end()))
            usage = {"prompt_tokens": 0, "output_tokens": 0} if end is None else end.usage
            last = {"done": True, "done_reason": reason_of(reason), **metrics(await handle.status(), usage)}
            yield rest + self._line('""', json.dumps(last | foreground.shortened)[1:-1])

    def _of(self, output: Output) -> bytes:
        more = ""
        if (scorer := self._prepared.scorer) is not None and output.tokens:
            more = f', "logprobs": {json.dumps(scorer.of(output.tokens)["content"])}'
        text: list[OutputPart] = [output.text] if output.text else []
        parts = text if self._parser is None else self._parser.feed(output.tokens)
        return b"".join(self._each(parts, more)) or (self._line('""', '"done": false' + more) if more else b"")

    def _each(self, parts: Iterable[OutputPart], more: str = "") -> Iterator[bytes]:
        """A line for each part. `more`: members of the first line, with a leading comma."""
        for part in parts:
            text, beside = '""', ""
            if isinstance(part, str):
                text = quote(part)
            elif isinstance(part, ReasoningText):
                beside = f', "thinking": {quote(part.text)}'
            elif isinstance(part, CallStart):
                self._calls[part.index] = part.name, []
                continue
            elif isinstance(part, CallArguments):
                self._calls[part.index][1].append(part.text)
                continue
            elif isinstance(part, CallEnd):
                name, arguments = self._calls.pop(part.index)
                if (call := _call(self._id_of(part.index), part.index, name, "".join(arguments))) is None:
                    continue
                beside = f', "tool_calls": [{call}]'
            yield self._line(text, '"done": false' + more, beside)
            more = ""

    def _id_of(self, index: int) -> str:
        syntax = self._prepared.syntax
        assert syntax is not None, "an output without tools has no calls"
        assert syntax.calls is not None, "an output without tools has no calls"
        return syntax.calls.format.id_of(self._prepared.foreground.ids[0], 0, index)

    def _line(self, text: str, members: str, beside: str = "") -> bytes:
        """`text`: as JSON. `beside`: members next to it, with a leading comma."""
        form = self._form
        return f"{beginning(self._model)}{form.before}{text}{beside}{form.after}, {members}}}\n".encode()


class LineStream(ChunkStream):
    """Streams lines, then cancels the task if it has not ended. An error is a line, too."""

    media_type = "application/x-ndjson"
    heartbeat: ClassVar[bytes] = b" "

    def __init__(self, lines: AsyncGenerator[bytes], foreground: Foreground, gateway: Gateway, direct: Direct) -> None:
        super().__init__(lines, foreground, gateway, direct)
        self._waits = None  # there are no comments that could tell it

    def broken(self, error: Exception) -> bytes:
        return json.dumps(shaped(problem_of(error), PREFIX)).encode() + b"\n"


class WholeObject(Whole):
    """Collects an output for one object. `handle`: its task's."""

    def __init__(self, choice: Choice, form: Form, model: str, handle: AsyncHandle) -> None:
        super().__init__([choice], 1, _no_shape)
        self._choice = choice
        self._form = form
        self._model = model
        self._handle = handle
        self._record: Record | None = None

    async def take(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Raises BrokenRecord, TaskNotFound, redis.exceptions.RedisError or OSError, too."""
        await super().take(batch)
        if any(isinstance(event, End) for _, event in batch):
            self._record = await self._handle.status()

    def pieces(self, first: dict[str, Any]) -> Iterator[bytes | bytearray]:
        """The object's JSON. `first`: members of it beside all others."""
        choice, form = self._choice, self._form
        thinking, calls = bytearray(), list[str]()
        if isinstance(choice, ParsedChoice):
            choice.end()
            thinking = choice.reasoning
            for index, entry in enumerate(choice.tool_calls()):
                function = entry["function"]
                call = _call(entry["id"], index, function["name"], function["arguments"])
                calls += [] if call is None else [call]
        yield f'{beginning(self._model)}{form.before}"'.encode()
        yield choice.text
        yield b'"'
        if thinking:
            yield b', "thinking": "'
            yield thinking
            yield b'"'
        if calls:
            yield f', "tool_calls": [{", ".join(calls)}]'.encode()
        yield f"{form.after}, ".encode()
        if choice.arrays is not None:
            yield b'"logprobs": ['
            yield choice.arrays["content"]
            yield b"], "
        ends = {} if self._record is None or not self.ends else metrics(self._record, self.ends[-1].usage)
        yield dumps(first | {"done": True, "done_reason": reason_of(choice.reason), **ends})[1:]


def _no_shape(index: int, choice: Choice) -> Iterator[bytes]:
    """An object has no list of choices."""
    return iter(())
