"""Parts that the endpoints' answers share: the head, outputs by choice, usage, and the stream's chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.client.directory import ResolvedModel
from producers.contract.stream import End, Event, Logprobs, Prompt, Token
from producers.gateway.context import Gateway
from producers.gateway.fair_share import in_thread
from producers.gateway.http import idempotency
from producers.gateway.http.errors import body_of, problem_of
from producers.gateway.http.sse import Direct, LiveStream
from producers.gateway.openai.parameters import TextRequest
from producers.gateway.tasks.foreground import Foreground, stopping

T = TypeVar("T")

#: The last event of a complete stream.
DONE: Final = b"data: [DONE]\n\n"
#: Most tokens and log probabilities turned into JSON on the event loop; more are done in a thread.
INLINE: Final = 1000
#: Finish reasons that OpenAI knows, too; a failed task's choice has none of them.
REASONS: Final = ("stop", "length")
#: Finish reason that only `/v1/tasks` has -> OpenAI's name of it: `deadline` is a limit of time.
FINISH_REASONS: Final = {"deadline": "length"}


@dataclass(slots=True)
class Output:
    """One choice's new output."""

    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class OutputBatch:
    """The contents of a batch of events. `prompts`, `ends`: by task. A prompt comes in parts before its first token."""

    outputs: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[Prompt]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The work of encoding it: number of tokens and log probabilities."""
        prompts = (entry for parts in self.prompts.values() for part in parts for entry in part.logprobs)
        tokens = (token.logprobs for output in self.outputs.values() for token in output.tokens)
        return weight(prompts) + weight(tokens)

    def take(self, batch: Sequence[tuple[int, Event]], n: int) -> None:
        """Add a batch of (task's number, event). `n`: choices of each task."""
        for number, event in batch:
            if isinstance(event, Token):
                output = self.output(number * n + event.choice)
                output.tokens.append(event)
                output.reason = event.finish_reason
            elif isinstance(event, Prompt):
                self.prompts.setdefault(number, []).append(event)
            elif isinstance(event, End):
                self.ends[number] = event
                # A choice without a token has its finish reason only here.
                for choice, reason in enumerate(event.reasons):
                    if reason is not None:
                        self.output(number * n + choice).reason = FINISH_REASONS.get(reason, reason)

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> OutputBatch:
        """New tokens of a request's only task."""
        batch = cls()
        for token in tokens:
            batch.output(token.choice).tokens.append(token)
        return batch

    def output(self, choice: int) -> Output:
        return self.outputs.setdefault(choice, Output())


def weight(logprobs: Iterable[Logprobs | None]) -> int:
    """The number of tokens and log probabilities in total."""
    return sum(1 if entry is None else 2 + len(entry[1]) for entry in logprobs)


async def output_batches(events: AsyncGenerator[list[tuple[int, Event]]], n: int) -> AsyncGenerator[OutputBatch]:
    """Yields the outputs of each batch of events, for a stream."""
    async with aclosing(events):
        async for batch in events:
            fresh = OutputBatch()
            fresh.take(batch, n)
            yield fresh


def head(kind: str, prefix: str, foreground: Foreground, resolved: ResolvedModel) -> dict[str, Any]:
    """The first fields of an answer or chunk. The id contains the first task's id in `/v1/tasks`."""
    return {
        "id": f"{prefix}-{foreground.ids[0]}",
        "object": kind,
        "created": int(foreground.created),
        "model": resolved.card["name"],
        "system_fingerprint": fingerprint(resolved),
    }


def fingerprint(resolved: ResolvedModel) -> str | None:
    """`system_fingerprint`: the version and its pool, since answers to one seed may differ between either; None without
    a pool, or with several."""
    return named(resolved.card["version"], resolved.fingerprint)


def named(version: str, pool: str | None) -> str | None:
    """The `system_fingerprint` of a version's pool, by its engine's fingerprint."""
    return f"fp_{version}_{pool}" if pool else None


async def respond(
    text_request: TextRequest, foreground: Foreground, answer: Callable[[], Awaitable[Response]]
) -> Response:
    """Submit the tasks and answer. Without an answer the tasks are cancelled; a stream's tasks end with the stream."""
    with text_request.naming():
        try:
            await foreground.submit()
            response = await answer()
            response.headers.update(idempotency.REPLAYED if foreground.replayed else {})
            return response
        except BaseException:
            await foreground.close()
            raise


async def run_by_weight(weight: int, make: Callable[[], T]) -> T:
    """Call `make`, in a thread if its `weight` is large, so that the event loop serves others."""
    return make() if weight <= INLINE else await in_thread(make)


def usage_of(ends: Iterable[End], reasoning: int = 0) -> dict[str, Any]:
    """The usage of a request: for each task, its prompt once and the tokens of all choices. `reasoning`: those of them
    that are reasoning."""
    prompt = cached = output = 0
    for end in ends:
        prompt += end.usage["prompt_tokens"]
        cached += end.usage["cached_tokens"]
        output += end.usage["output_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class Chunks:
    """Encodes a stream's chunks, in ASCII, because many clients split lines at U+2028 and the like.

    `prompts`: number of tokens of each choice's prompt. With `continuous_usage_stats`, each chunk has the usage
    of its choice so far, as with vLLM.
    """

    def __init__(self, head: dict[str, Any], text_request: TextRequest, prompts: Sequence[int]) -> None:
        self._begin = json.dumps(head)[:-1]
        # If usage is requested, OpenAI has the field in every chunk.
        self._end = ', "usage": null}' if text_request.include_usage else "}"
        self._prompts = prompts if text_request.continuous_usage else ()
        self._output_tokens = [0] * len(prompts)

    def count(self, index: int, tokens: int) -> None:
        """Add tokens to a choice's usage, which its next chunk reports."""
        self._output_tokens[index] += tokens

    def of(self, choice: dict[str, Any], members: str = "") -> bytes:
        """Returns the chunk of a choice. `members`: JSON members beside it, each with a leading comma."""
        return self.around(choice["index"], json.dumps(choice), members)

    def around(self, index: int, choice: str, members: str = "") -> bytes:
        """Returns the chunk of a choice. `choice`: its JSON."""
        return f'data: {self._begin}, "choices": [{choice}]{members}{self._tail(index)}\n\n'.encode()

    def alike(self, indexes: Iterable[int], remainder: str) -> Iterator[bytes]:
        """Equal chunks for several choices. `remainder`: their JSON after the index."""
        for index in indexes:
            begin = f'data: {self._begin}, "choices": [{{"index": {index}'
            yield f"{begin}, {remainder}]{self._tail(index)}\n\n".encode()

    def _tail(self, index: int) -> str:
        """The JSON of a chunk after its choice."""
        if not self._prompts:
            return self._end
        prompt, output = self._prompts[index], self._output_tokens[index]
        used = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return f', "usage": {json.dumps(used)}}}'

    def usage(self, ends: Iterable[End], reasoning: int = 0) -> bytes:
        return f'data: {self._begin}, "choices": [], "usage": {json.dumps(usage_of(ends, reasoning))}}}\n\n'.encode()


class ChunkStream(LiveStream):
    """Streams a request's chunks, then cancels its open tasks. It cannot be resumed, so it sends errors as events."""

    def __init__(self, chunks: AsyncGenerator[bytes], foreground: Foreground, gateway: Gateway, direct: Direct) -> None:
        settings = gateway.settings
        super().__init__(
            chunks,
            gateway.streams,
            heartbeat=settings.heartbeat,
            stall=settings.stall,
            waits=foreground.waits,
            direct=direct,
        )
        self._foreground = foreground

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._foreground.close()

    def cut(self) -> bytes:
        return self.broken(stopping())

    def broken(self, error: Exception) -> bytes:
        return f"data: {json.dumps(body_of(problem_of(error)))}\n\n".encode()
