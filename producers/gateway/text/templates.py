"""Renders messages to prompts, with the chat templates that cards name by hash, each in a process of its own.

messages ─▶ sizes: what no request may have is refused here, for every endpoint
         ─▶ small: the template's process, in turns of tenants │ large: another process of the same template ─▶ text
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from engine.errors import ErrorText
from engine.text import ConfinedTemplate, ModelError, RequestError, TemplateSource
from producers.contract.chat import MAX_MESSAGES, too_many
from producers.contract.task import MAX_PROMPT_BYTES
from producers.errors import InvalidTask
from producers.gateway.executor import CallerLeft, Executor, ExecutorBusy, ExecutorClosed, ExecutorFull
from producers.gateway.http.errors import CLIENT_LEFT, ONCE, RETRY_AFTER, Problem
from producers.gateway.http.request_state import Work
from producers.gateway.lru_cache import LruCache
from producers.gateway.text.blobs import TEMPLATE, broken, read_blobs

logger = logging.getLogger(__name__)

#: Most loaded templates, a process each; the least recently used is evicted first.
KEPT: Final = 8
#: Most requests waiting for one template. A render takes a fraction of a millisecond; of a hostile template, only its
#: own callers wait, and not for long.
WAITING: Final = 64
#: Longest wait (s) of a request for its turn.
PATIENCE_S: Final = 30.0
#: Messages, and bytes of them with the template's variables as JSON, above which a request is no small one's company.
MANY, LARGE = 256, 64 * 1024


class Templates:
    """Renders chats. `store`: the server with the models' files."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._kept: LruCache[tuple[str, ...], _Renderer] = LruCache(KEPT, _Renderer.close)

    async def render(
        self, card: Mapping[str, Any], messages: Sequence[dict[str, Any]], work: Work, /, **options: Any
    ) -> str:
        """The messages as one text, see `ChatTemplate.render`.

        Raises InvalidTask if they are too large, or the template refuses them or is stopped over them, and Problem if
        it cannot be used or too many requests wait for it.
        """
        large = check_size(messages, work, options)
        try:
            while True:
                renderer = await self._renderer(card)
                with suppress(ExecutorClosed):  # it was evicted meanwhile
                    return await renderer.render(messages, work, large, **options)
        except RequestError as error:
            raise InvalidTask(error.message, param=error.param, code=error.code) from error
        except ModelError as error:
            raise _unusable(card["name"], error) from error

    async def with_tools(self, card: Mapping[str, Any]) -> str:
        """The text of the model's template for chats with tools. Raises Problem if it cannot be used."""
        source = (await self._renderer(card)).source
        return source.with_tools or source.text

    async def _renderer(self, card: Mapping[str, Any]) -> _Renderer:
        key = tuple(card["files"].get(name, "") for name in TEMPLATE)
        return await self._kept.get(key, lambda: self._load(card))

    def close(self) -> None:
        """End all processes."""
        self._kept.clear()

    async def _load(self, card: Mapping[str, Any]) -> _Renderer:
        files = await read_blobs(self._store, card, TEMPLATE)
        try:
            source = await asyncio.to_thread(TemplateSource.from_bytes, files)
        except ModelError as error:
            raise _unusable(card["name"], error) from error
        if source is None:
            raise broken(card["name"], TEMPLATE[0])  # the card says that there is one
        return _Renderer(source)


class _Renderer:
    """A confined template and the threads that talk to its processes. That for large messages starts with the first."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._small, self._large = (
            (ConfinedTemplate(source), Executor(name)) for name in ("penstock-template", "penstock-template-large")
        )

    async def render(self, messages: Sequence[dict[str, Any]], work: Work, large: bool, /, **options: Any) -> str:
        template, executor = self._large if large else self._small
        render = partial(template.render, messages, **options)
        turn: dict[str, Any] = {"tenant": work.tenant, "max_jobs": WAITING, "patience": PATIENCE_S}
        try:
            if large:
                text = await executor.run_killable(render, template.kill, work.caller_left, **turn)
            else:
                text = await executor.run(render, **turn)
        except ExecutorFull:
            raise _busy(f"{WAITING} requests wait for this model's chat template already") from None
        except ExecutorBusy:
            raise _busy(f"this model's chat template was busy with others' messages for {PATIENCE_S:g} s") from None
        except ExecutorClosed:
            raise
        except BaseException as error:
            work.done = True
            if isinstance(error, CallerLeft):
                raise Problem(CLIENT_LEFT, "The client left before its chat was read.", code="client_left") from None
            raise
        work.done = True
        return text

    def close(self) -> None:
        """Does not wait: a render that runs is ended by its limits, and the process then."""
        for template, executor in (self._small, self._large):
            executor.close(template.close)


def check_size(messages: Sequence[Mapping[str, Any]], work: Work, variables: Mapping[str, Any]) -> bool:
    """Whether these are large messages. Raises InvalidTask for more of them than any request may have.

    A plain chat costs no look at its text: its body is small.
    """
    if len(messages) > MAX_MESSAGES:
        raise too_many(len(messages))
    if work.size is not None and work.size <= LARGE:
        return len(messages) > MANY
    try:
        size = len(json.dumps({"messages": messages, **variables}, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        message = "the messages or the template's variables are nested too deep"
        raise InvalidTask(message, param="messages", code="too_deep") from None
    if size > MAX_PROMPT_BYTES:
        raise InvalidTask(
            ErrorText.of(
                "{messages}, tools and the template's variables have {} bytes as JSON; at most {} are taken",
                size,
                MAX_PROMPT_BYTES,
            ),
            param="messages",
        )
    return size > LARGE or len(messages) > MANY


def _unusable(model: str, error: ModelError) -> Problem:
    """The model's own files are at fault; trying again does not help."""
    logger.error("the chat template of %s cannot be used: %s", model, error)
    return Problem(500, str(error), code="model_broken", param="model", headers=ONCE)


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="template_busy", headers=RETRY_AFTER)
