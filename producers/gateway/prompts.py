"""Text prompts to token ids, with the tokenizer that the model's card names by hash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from engine.text import ModelError, RequestError, Tokenizer
from producers.errors import InvalidTask
from producers.gateway.blobs import TOKENIZER, broken, read_blobs
from producers.gateway.errors import RETRY_AFTER, Problem
from producers.gateway.kept import Kept
from producers.gateway.lane import Lane, LaneClosed

logger = logging.getLogger(__name__)

#: Tokenizers kept.
KEPT: Final = 16
#: Threads of one tokenizer. It lets others run meanwhile; its patterns come with the model, from anybody.
THREADS: Final = 2
#: Requests that may wait for one tokenizer. It takes a millisecond for some thousand characters.
WAITING: Final = 256
#: Seconds for one text.
LIMIT_S: Final = 10.0


class Prompts:
    """Encodes prompts. `store`: where the models' files are."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._encoders: Kept[str, _Encoder] = Kept(KEPT, _Encoder.close)

    async def encode(self, card: Mapping[str, Any], text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the tokens that the tokenizer puts around a text where `special` says so.

        Raises InvalidTask, Problem where the model's tokenizer is not to be had or too many wait for it.
        """
        while True:
            encoder = await self._encoder(card)
            with suppress(LaneClosed):  # others wanted its place meanwhile
                ids = await encoder.encode(text, special)
                break
        if not ids:
            raise InvalidTask("prompt has no token: the model's tokenizer drops all of it", param="prompt")
        return tuple(ids)

    async def tokenizer(self, card: Mapping[str, Any]) -> Tokenizer:
        """The model's. Raises as `encode` does."""
        return (await self._encoder(card)).tokenizer

    def close(self) -> None:
        self._encoders.clear()

    async def _encoder(self, card: Mapping[str, Any]) -> _Encoder:
        digest = card["files"].get(TOKENIZER)
        if digest is None:
            raise InvalidTask(f"model {card['name']!r} has no tokenizer; give the prompt as token ids", param="prompt")
        return await self._encoders.get(digest, lambda: self._load(card))

    async def _load(self, card: Mapping[str, Any]) -> _Encoder:
        files = await read_blobs(self._store, card, (TOKENIZER,))
        try:
            return _Encoder(await asyncio.to_thread(Tokenizer.from_bytes, files))
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be used: %s", card["name"], error)
            raise broken(card["name"], TOKENIZER) from error


class _Encoder:
    """A tokenizer, and the threads that it may keep busy."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._lane = Lane("penstock-tokenize", THREADS)

    async def encode(self, text: str, special: bool) -> list[int]:
        if self._lane.waiting >= WAITING:
            raise Problem(
                429,
                f"{WAITING} requests wait for this model's tokenizer already; try again in a moment.",
                code="tokenizer_busy",
                headers=RETRY_AFTER,
            )
        try:
            return await self._lane.run(partial(self.tokenizer.encode, text, special), LIMIT_S)
        except RequestError as error:
            raise InvalidTask(str(error), param=error.param, code=error.code) from error
        except TimeoutError:
            raise InvalidTask(
                f"the model's tokenizer did not encode the prompt within {LIMIT_S:g} s", param="prompt"
            ) from None

    def close(self) -> None:
        self._lane.close()
