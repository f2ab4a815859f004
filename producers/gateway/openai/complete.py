"""Builds complete answers. They may have tens of megabytes as JSON, and many times that as objects.

events -> each choice's text and log probabilities as JSON, as they come
       -> beyond `large.LARGE`: the rest stays in the store, until the tasks have ended and it is the answer's turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response

from producers.contract.stream import End, Event, Prompt, Token
from producers.gateway.context import Gateway
from producers.gateway.openai.answer import Output, OutputBatch, run_by_weight, usage_of
from producers.gateway.openai.logprobs import Arrays, Lists, dumps
from producers.gateway.tasks import large
from producers.gateway.tasks.foreground import Foreground, answered

#: Time (s) for which a large answer waits for its permit. Its output is generated already, so it waits longer than a
#: stored result that is read again.
PATIENCE_S: Final = 30.0


class Before(Protocol):
    """An answer's part about one task's prompt. `size`: approximate bytes."""

    @property
    def size(self) -> int: ...

    def take(self, part: Prompt) -> None: ...

    def members(self) -> Iterator[bytes | bytearray]:
        """JSON members that it adds to the answer beside `choices`, each with a leading comma."""
        ...


class Scorer(Protocol):
    """Encodes one choice's log probabilities as its tokens come."""

    def of(self, tokens: Sequence[Token]) -> Lists: ...


class Choice:
    """One choice's collected output as JSON. `text`: without quotes. `token_ids`: its tokens, each with a comma behind
    it, if the answer is to have them; else None."""

    __slots__ = ("_scorer", "arrays", "reason", "text", "token_ids")

    def __init__(self, scorer: Scorer | None, names: Sequence[str]) -> None:
        self._scorer = scorer
        self.text = bytearray()
        self.arrays = None if scorer is None else Arrays(names)
        self.reason: str | None = None
        self.token_ids: bytearray | None = None

    @property
    def size(self) -> int:
        return len(self.text) + (0 if self.arrays is None else self.arrays.size) + len(self.token_ids or b"")

    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def finish_reason(self) -> bytes:
        return b"null" if self.reason is None else quote(self.reason).encode()

    def take(self, output: Output) -> None:
        self._take(output, output.text)

    def _take(self, output: Output, text: str) -> None:
        """`text`: the output's content."""
        self.text += quote(text)[1:-1].encode()
        if self._scorer is not None and self.arrays is not None:
            self.arrays.add(self._scorer.of(output.tokens))
        if self.token_ids is not None:
            self.token_ids += b"".join(b"%d," % token.token_id for token in output.tokens)
        self.reason = output.reason or self.reason

    def with_token_ids(self) -> Iterator[bytes | bytearray]:
        """Its member of token ids with a leading comma, if the answer is to have them."""
        if self.token_ids is not None:
            yield b',"token_ids":['
            yield self.token_ids[:-1]
            yield b"]"


#: A function that yields a choice's JSON.
Shape = Callable[[int, Choice], Iterator[bytes | bytearray]]


class Whole:
    """Collects all choices of a request, `n` a task. `prompts`: each task's part. `size`: bytes so far. `ends`: its
    tasks'."""

    def __init__(self, choices: Sequence[Choice], n: int, shape: Shape, prompts: Sequence[Before] = ()) -> None:
        self.n = n
        self.size = sum(prompt.size for prompt in prompts)
        self._choices = choices
        self._shape = shape
        self._prompts = prompts
        self.ends: list[End] = []

    async def take(self, batch: Sequence[tuple[int, Event]]) -> None:
        outputs = OutputBatch()
        outputs.take(batch, self.n)
        await run_by_weight(outputs.weight, lambda: self.add(outputs))

    def add(self, batch_output: OutputBatch) -> None:
        self.ends += batch_output.ends.values()
        for number, parts in batch_output.prompts.items():
            prompt = self._prompts[number]
            before = prompt.size
            for part in parts:
                prompt.take(part)
            self.size += prompt.size - before
        for index, output in batch_output.outputs.items():
            choice = self._choices[index]
            before = choice.size
            choice.take(output)
            self.size += choice.size - before

    def pieces(self, first: dict[str, Any]) -> Iterator[bytes | bytearray]:
        """The answer's JSON in pieces. `first`: its first fields."""
        yield dumps(first)[:-1] + b',"choices":['
        for index, choice in enumerate(self._choices):
            yield b"," if index else b""
            yield from self._shape(index, choice)
        yield b'],"usage":' + dumps(usage_of(self.ends, sum(choice.reasoning_tokens for choice in self._choices)))
        for prompt in self._prompts:
            yield from prompt.members()
        yield b"}"


async def whole_answer(
    request: Request, gateway: Gateway, foreground: Foreground, whole: Whole, first: dict[str, Any]
) -> Response:
    """The response, once all tasks have ended. Raises what `answered` does; the tasks are cancelled then."""
    release: Callable[[], None] | None = None
    try:
        try:
            release = await answered(request, gateway, lambda: _collected(gateway, foreground, whole))
        finally:
            await foreground.close()
        return large.Sent(whole.pieces(first), gateway.settings.stall, release)
    except BaseException:
        if release is not None:
            release()
        raise


async def _collected(gateway: Gateway, foreground: Foreground, whole: Whole) -> Callable[[], None] | None:
    """Take all events. Returns the release of the answer's permit, if it is large enough to need one."""
    postponed: dict[int, int] = {}
    async with aclosing(foreground.events()) as batches:
        async for batch in batches:
            now: list[tuple[int, Event]] = []
            for number, event in batch:
                if isinstance(event, End) or (number not in postponed and whole.size <= large.LARGE):
                    now.append((number, event))
                else:
                    postponed.setdefault(number, event.position)
            await whole.take(now)
    if whole.size <= large.LARGE and not postponed:
        return None
    release = await large.turn(gateway, PATIENCE_S, _kept(foreground.ids))
    try:
        for number, start in postponed.items():
            async with aclosing(foreground.again(number, start)) as remaining:
                async for events in remaining:
                    await whole.take([(number, event) for event in events if not isinstance(event, End)])
    except BaseException:
        release()
        raise
    return release


def _kept(ids: Sequence[str]) -> str:
    """The hint in the error for an answer that got no permit."""
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"what was generated is kept for five minutes, see GET /v1/tasks/ID for {', '.join(ids[:3])}{more}"
