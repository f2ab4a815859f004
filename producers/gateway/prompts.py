"""Text prompts to token ids, with the tokenizer that the model's card names by hash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from redis.asyncio import Redis

from engine.text import ModelError, RequestError, Tokenizer
from producers.errors import InvalidTask
from producers.gateway.blobs import TOKENIZER, broken, read_blobs
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

    async def encode(self, card: Mapping[str, Any], text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the tokens that the tokenizer puts around a text where `special` says so.

        Raises InvalidTask, Problem where the model's tokenizer is not to be had.
        """
        tokenizer = await self.tokenizer(card)
        try:
            if len(text) <= INLINE:
                ids = tokenizer.encode(text, special)
            else:
                ids = await asyncio.get_running_loop().run_in_executor(self._threads, tokenizer.encode, text, special)
        except RequestError as error:
            raise InvalidTask(str(error), param=error.param, code=error.code) from error
        if not ids:
            raise InvalidTask("prompt has no token: the model's tokenizer drops all of it", param="prompt")
        return tuple(ids)

    async def tokenizer(self, card: Mapping[str, Any]) -> Tokenizer:
        """The model's. Raises as `encode` does."""
        digest = card["files"].get(TOKENIZER)
        if digest is None:
            raise InvalidTask(f"model {card['name']!r} has no tokenizer; give the prompt as token ids", param="prompt")
        return await self._tokenizers.get(digest, lambda: self._load(card))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, card: Mapping[str, Any]) -> Tokenizer:
        files = await read_blobs(self._store, card, (TOKENIZER,))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, Tokenizer.from_bytes, files)
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be used: %s", card["name"], error)
            raise broken(card["name"], TOKENIZER) from error
