"""Prompts to token ids, with the tokenizer and chat template that the model's card names by hash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from redis.asyncio import Redis

from engine.text import ChatTemplate, ModelError, RequestError, Tokenizer
from producers.errors import InvalidTask
from producers.gateway.blobs import TEMPLATE, TOKENIZER, broken, read_blobs
from producers.gateway.errors import Problem
from producers.gateway.kept import Kept

logger = logging.getLogger(__name__)

#: Tokenizers kept.
TOKENIZERS: Final = 16
#: Longer texts (characters) are encoded off the event loop; shorter ones take less than changing threads does.
INLINE: Final = 4096


class Prompts:
    """Encodes prompts. `store`: where the models' files are."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-tokenize")
        self._tokenizers: Kept[str, Tokenizer] = Kept(TOKENIZERS)
        self._templates: Kept[tuple[str, ...], ChatTemplate | None] = Kept(TOKENIZERS)

    async def encode(self, card: Mapping[str, Any], text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the tokens that the tokenizer puts around a text where `special` says so.

        Raises InvalidTask, Problem where the model's tokenizer is not to be had.
        """
        tokenizer = await self.tokenizer(card)
        if len(text) <= INLINE:
            ids = tokenizer.encode(text, special)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, tokenizer.encode, text, special)
        if not ids:
            raise InvalidTask("prompt has no token: the model's tokenizer drops all of it", param="prompt")
        return tuple(ids)

    async def tokenizer(self, card: Mapping[str, Any]) -> Tokenizer:
        """The model's. Raises as `encode` does."""
        digest = card["files"].get(TOKENIZER)
        if digest is None:
            raise InvalidTask(f"model {card['name']!r} has no tokenizer; give the prompt as token ids", param="prompt")
        return await self._tokenizers.get(digest, lambda: self._load(card))

    async def render(self, card: Mapping[str, Any], messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Messages as one text, see `ChatTemplate.render`.

        Raises InvalidTask where the template does not take the messages, Problem where it cannot be used.
        """
        key = tuple(card["files"].get(name, "") for name in TEMPLATE)
        template = await self._templates.get(key, lambda: self._load_template(card))
        if template is None:
            raise broken(card["name"], TEMPLATE[0])  # the card says that there is one
        if "developer" not in template.source:
            # OpenAI's newer name of the role; nearly all templates know the older one.
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
        try:
            return template.render(messages, **options)
        except RequestError as error:
            raise InvalidTask(str(error), param=error.param, code=error.code) from error
        except ModelError as error:
            raise unusable(card["name"], error) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, card: Mapping[str, Any]) -> Tokenizer:
        files = await read_blobs(self._store, card, (TOKENIZER,))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, Tokenizer.from_bytes, files)
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be used: %s", card["name"], error)
            raise broken(card["name"], TOKENIZER) from error

    async def _load_template(self, card: Mapping[str, Any]) -> ChatTemplate | None:
        files = await read_blobs(self._store, card, TEMPLATE)
        try:
            return ChatTemplate.from_bytes(files)
        except ModelError as error:
            raise unusable(card["name"], error) from error


def unusable(model: str, error: ModelError) -> Problem:
    """The model's own files are at fault; trying again does not help."""
    logger.error("the chat template of %s cannot be used: %s", model, error)
    return Problem(500, str(error), code="model_broken", param="model", headers={"x-should-retry": "false"})
