"""Text prompts to token ids and back, with the tokenizer that the model's card names by hash."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from redis.asyncio import Redis

from engine.text import ModelError, RequestError, Tokenizer
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import RETRY_AFTER, Problem
from producers.gateway.text.blobs import TOKENIZER, broken, read_blobs
from producers.gateway.text.lane import Lane, LaneBusy, LaneClosed
from producers.gateway.text.lru_cache import Kept

logger = logging.getLogger(__name__)

P = TypeVar("P")
T = TypeVar("T")

#: Tokenizers kept.
KEPT: Final = 16
#: Threads of one tokenizer. It lets others run meanwhile; its patterns come with the model, from anybody.
THREADS: Final = 2
#: Requests that may wait for one tokenizer. It takes a millisecond for some thousand characters.
WAITING: Final = 256
#: Seconds that a request waits for its turn.
PATIENCE_S: Final = 10.0
#: Seconds for all texts of a request, from when the first is begun.
LIMIT_S: Final = 10.0


class InvalidPrompt(InvalidTask):
    """`at`: which of the texts it is."""

    def __init__(self, message: str, at: int, *, param: str | None = "prompt", code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)
        self.at = at


class Prompts:
    """Encodes prompts. `store`: where the models' files are."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._encoders: Kept[str, _Encoder] = Kept(KEPT, _Encoder.close)

    async def encode(self, card: Mapping[str, Any], text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the tokens that the tokenizer puts around a text where `special` says so.

        Raises InvalidTask, Problem where the model's tokenizer is not to be had or too many wait for it.
        """
        return (await self.encode_all(card, (text,), special=special))[0]

    async def encode_all(
        self, card: Mapping[str, Any], texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """Of each of a request's prompts. Raises as `encode` does, InvalidPrompt where one text is at fault."""

        def encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
            ids = tokenizer.encode(text, special)
            if not ids:
                raise RequestError("prompt has no token: the model's tokenizer drops all of it", param="prompt")
            return tuple(ids)

        return await self._each(card, texts, encoded)

    async def decode_all(self, card: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of a request's prompts, without special tokens. Raises as `encode_all` does."""
        return await self._each(card, prompts, Tokenizer.decode)

    async def tokenizer(self, card: Mapping[str, Any]) -> Tokenizer:
        """The model's. Raises as `encode` does."""
        return (await self._encoder(card)).tokenizer

    def close(self) -> None:
        self._encoders.clear()

    async def _each(self, card: Mapping[str, Any], prompts: Sequence[P], work: Callable[[Tokenizer, P], T]) -> list[T]:
        if not prompts:
            return []
        while True:
            encoder = await self._encoder(card)
            with suppress(LaneClosed):  # others wanted its place meanwhile
                return await encoder.each(prompts, work)

    async def _encoder(self, card: Mapping[str, Any]) -> _Encoder:
        digest = card["files"].get(TOKENIZER)
        if digest is None:
            raise InvalidTask(
                f"model {shown(card['name'])} has no tokenizer; give the prompt as token ids", param="prompt"
            )
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

    async def each(self, prompts: Sequence[P], work: Callable[[Tokenizer, P], T]) -> list[T]:
        if self._lane.waiting >= WAITING:
            raise _busy(f"{WAITING} requests wait for this model's tokenizer already")
        given_up = threading.Event()
        try:
            return await self._lane.run(
                partial(self._each, prompts, work, given_up), patience=PATIENCE_S, limit=LIMIT_S
            )
        except LaneBusy:
            raise _busy(f"this model's tokenizer was busy with others' prompts for {PATIENCE_S:g} s") from None
        except TimeoutError:
            what = "the prompt" if len(prompts) == 1 else f"the {len(prompts)} prompts"
            raise InvalidTask(
                f"the model's tokenizer was not done with {what} within {LIMIT_S:g} s", param="prompt"
            ) from None
        finally:
            given_up.set()

    def _each(self, prompts: Sequence[P], work: Callable[[Tokenizer, P], T], given_up: threading.Event) -> list[T]:
        """On a thread of the lane: one prompt after the other, so that it can be given up between two."""
        done: list[T] = []
        for at, prompt in enumerate(prompts):
            if given_up.is_set():
                break
            try:
                done.append(work(self.tokenizer, prompt))
            except RequestError as error:
                raise InvalidPrompt(str(error), at, param=error.param, code=error.code) from error
        return done

    def close(self) -> None:
        self._lane.close()


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="tokenizer_busy", headers=RETRY_AFTER)
