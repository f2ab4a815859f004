"""Renders messages to prompts, with the chat templates that cards name by hash, each in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from engine.text import ConfinedTemplate, ModelError, RequestError, TemplateSource
from producers.errors import InvalidTask
from producers.gateway.http.errors import ONCE, RETRY_AFTER, Problem
from producers.gateway.lru_cache import LruCache
from producers.gateway.text.blobs import TEMPLATE, broken, read_blobs
from producers.gateway.text.executor import Executor, ExecutorBusy, ExecutorClosed

logger = logging.getLogger(__name__)

#: Most loaded templates, a process each; the least recently used is evicted first.
KEPT: Final = 8
#: Most requests waiting for one template. A render takes a fraction of a millisecond; of a hostile template, only its
#: own callers wait, and not for long.
WAITING: Final = 64
#: Longest wait (s) of a request for its turn.
PATIENCE_S: Final = 30.0


class Templates:
    """Renders chats. `store`: the server with the models' files."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._kept: LruCache[tuple[str, ...], _Renderer] = LruCache(KEPT, _Renderer.close)

    async def render(self, card: Mapping[str, Any], messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        """The messages as one text, see `ChatTemplate.render`.

        Raises InvalidTask if the template refuses the messages or is stopped over them, and Problem if it cannot be
        used or too many requests wait for it.
        """
        try:
            while True:
                renderer = await self._renderer(card)
                with suppress(ExecutorClosed):  # it was evicted meanwhile
                    return await renderer.render(messages, **options)
        except RequestError as error:
            raise InvalidTask(str(error), param=error.param, code=error.code) from error
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
    """A confined template and the thread that talks to its process."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._template = ConfinedTemplate(source)
        self._executor = Executor("penstock-template")

    async def render(self, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        if self._executor.waiting >= WAITING:
            raise _busy(f"{WAITING} requests wait for this model's chat template already")
        try:
            return await self._executor.run(partial(self._template.render, messages, **options), patience=PATIENCE_S)
        except ExecutorBusy:
            raise _busy(f"this model's chat template was busy with others' messages for {PATIENCE_S:g} s") from None

    def close(self) -> None:
        """Does not wait: a render that runs is ended by its limits, and the process then."""
        self._executor.close(self._template.close)


def _unusable(model: str, error: ModelError) -> Problem:
    """The model's own files are at fault; trying again does not help."""
    logger.error("the chat template of %s cannot be used: %s", model, error)
    return Problem(500, str(error), code="model_broken", param="model", headers=ONCE)


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="template_busy", headers=RETRY_AFTER)
