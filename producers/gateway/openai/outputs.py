"""The events of a request's tasks, sorted into its choices: choice c of task k of n choices each is k * n + c."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from producers.events import End, Event, Prompt, Token


@dataclass(slots=True)
class Output:
    """One choice, or what is new of it."""

    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class News:
    """What a batch of events brought. `prompts`, `ends`: by task; a prompt comes before its first token, in parts."""

    outputs: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[Prompt]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many there are in all outputs."""
        return sum(len(output.tokens) for output in self.outputs.values())

    def take(self, batch: Sequence[tuple[int, Event]], n: int) -> None:
        """Add a batch of events, each with its task's number; `n` choices a task."""
        for number, event in batch:
            if isinstance(event, Token):
                output = self.output(number * n + event.choice)
                output.tokens.append(event)
                output.reason = event.finish_reason
            elif isinstance(event, Prompt):
                self.prompts.setdefault(number, []).append(event)
            else:
                self.ends[number] = event
                # A choice without a token has its reason here alone.
                for choice, reason in enumerate(event.reasons):
                    if reason is not None:
                        self.output(number * n + choice).reason = reason

    def output(self, choice: int) -> Output:
        return self.outputs.setdefault(choice, Output())


async def news(events: AsyncGenerator[list[tuple[int, Event]]], n: int) -> AsyncGenerator[News]:
    """Each batch by itself: what a stream sends on."""
    async with aclosing(events):
        async for batch in events:
            fresh = News()
            fresh.take(batch, n)
            yield fresh


async def whole(events: AsyncGenerator[list[tuple[int, Event]]], tasks: int, n: int) -> News:
    """All of it, every choice in order: what an answer in one piece is made from."""
    all_news = News()
    for choice in range(tasks * n):
        all_news.output(choice)
    async with aclosing(events):
        async for batch in events:
            all_news.take(batch, n)
    return all_news
