"""Sorts the events of a request's tasks into its choices: choice c of task k, with n choices each, is k * n + c."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from producers.contract.stream.events import End, Event, Logprobs, Prompt, Token

#: Finish reason that only `/v1/tasks` has -> OpenAI's name: `deadline` is a limit of time.
WORDS: Final = {"deadline": "length"}


@dataclass(slots=True)
class Output:
    """One choice's new output."""

    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class News:
    """The contents of a batch of events. `prompts`, `ends`: by task. A prompt comes in parts before its first token."""

    outputs: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[Prompt]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The work of encoding it: number of tokens and log probabilities."""
        prompts = (one for parts in self.prompts.values() for part in parts for one in part.logprobs)
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
            else:
                self.ends[number] = event
                # A choice without a token has its finish reason only here.
                for choice, reason in enumerate(event.reasons):
                    if reason is not None:
                        self.output(number * n + choice).reason = WORDS.get(reason, reason)

    def output(self, choice: int) -> Output:
        return self.outputs.setdefault(choice, Output())


def weight(logprobs: Iterable[Logprobs | None]) -> int:
    """The number of tokens and log probabilities in total."""
    return sum(1 if one is None else 2 + len(one[1]) for one in logprobs)


async def news(events: AsyncGenerator[list[tuple[int, Event]]], n: int) -> AsyncGenerator[News]:
    """The outputs of each batch, for a stream."""
    async with aclosing(events):
        async for batch in events:
            fresh = News()
            fresh.take(batch, n)
            yield fresh
