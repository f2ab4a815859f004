"""Sends a response's story as server-sent events: read from the beginning, since each number counts those before."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.types import Receive, Scope, Send

from producers.client.aio import AsyncHandle
from producers.contract.stream.events import End, Event, Token
from producers.errors import TaskNotFound
from producers.gateway.context import Gateway
from producers.gateway.http.errors import Problem, problem_of
from producers.gateway.http.sse import LiveStream
from producers.gateway.openai.answer import made, weight
from producers.gateway.openai.responses.story import Story
from producers.gateway.tasks.foreground import Foreground, stopping


class ResponseStream(LiveStream):
    """One response's events. With a `foreground`, its task ends with the stream.

    An error comes as the event `error`. Its sequence number is that of the last event before it, with which the stream
    is taken up again.
    """

    def __init__(
        self, story: Story, handle: AsyncHandle, gateway: Gateway, foreground: Foreground | None = None
    ) -> None:
        batches = handle.batches() if foreground is None else foreground.only()
        settings = gateway.settings
        super().__init__(
            self._frames(batches, handle), gateway.streams, heartbeat=settings.heartbeat, stall=settings.stall
        )
        self._story = story
        self._foreground = foreground
        self._told = story.after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._foreground is not None:
                await self._foreground.close()

    def cut(self) -> bytes:
        if self._foreground is not None:
            return self.broken(stopping())
        return self.broken(
            Problem(
                503,
                "This gateway is stopping; the response goes on. Take the stream up again with starting_after.",
                code="stopping",
            )
        )

    def broken(self, error: Exception) -> bytes:
        problem = problem_of(error)
        said = {"code": problem.code, "message": problem.message, "param": problem.param}
        event = {"type": "error", "sequence_number": self._told, **said}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()

    async def _frames(self, batches: AsyncGenerator[list[Event]], handle: AsyncHandle) -> AsyncGenerator[bytes]:
        async with aclosing(self._events(batches, handle)) as chunks:
            try:
                async for chunk in chunks:
                    told = self._story.number - 1
                    if chunk:
                        yield chunk
                        self._told = max(self._told, told)
            except TaskNotFound:
                raise Problem(404, "The response was deleted.", code="response_not_found") from None

    async def _events(self, batches: AsyncGenerator[list[Event]], handle: AsyncHandle) -> AsyncGenerator[bytes]:
        story = self._story
        yield story.opening()
        async with aclosing(batches):
            async for events in batches:
                effort = weight(event.logprobs for event in events if isinstance(event, Token))
                yield await made(effort, partial(story.told, events))
                if isinstance(events[-1], End):
                    record = await handle.status()
                    for event in story.end(record):
                        yield event
                    return
