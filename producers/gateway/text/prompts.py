"""Tokenises and detokenises prompts, with the tokenizer that the model's card names by hash."""

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
from producers.gateway.lru_cache import LruCache
from producers.gateway.text.blobs import TOKENIZER, broken, read_blobs
from producers.gateway.text.executor import Executor, ExecutorBusy, ExecutorClosed

logger = logging.getLogger(__name__)

P = TypeVar("P")
T = TypeVar("T")

#: Most loaded tokenizers.
KEPT: Final = 16
#: Threads of one tokenizer. It releases the GIL, but a model's own patterns may be arbitrarily slow.
THREADS: Final = 2
#: Most requests waiting for one tokenizer, which takes a millisecond for some thousand characters.
WAITING: Final = 256
#: Longest wait (s) of a request for its turn.
PATIENCE_S: Final = 10.0
#: Time limit (s) for all texts of a request, from the start of the first.
LIMIT_S: Final = 10.0


class InvalidPrompt(InvalidTask):
    """A prompt that the tokenizer refuses. `at`: its index in the request."""

    def __init__(self, message: str, at: int, *, param: str | None = "prompt", code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)
        self.at = at


class Prompts:
    """Encodes and decodes prompts. `store`: the server with the models' files."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._encoders: LruCache[str, _Encoder] = LruCache(KEPT, _Encoder.close)

    async def encode(self, card: Mapping[str, Any], text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt; with `special`, including the tokenizer's special tokens around it.

        Raises InvalidTask, and Problem if the tokenizer is unavailable or too many requests wait for it.
        """
        return (await self.encode_all(card, (text,), special=special))[0]

    async def encode_all(
        self, card: Mapping[str, Any], texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of each of a request's prompts. Raises as `encode`, and InvalidPrompt for a refused text."""

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
        """The model's tokenizer. Raises as `encode` does."""
        return (await self._encoder(card)).tokenizer

    def close(self) -> None:
        self._encoders.clear()

    async def _each(self, card: Mapping[str, Any], prompts: Sequence[P], work: Callable[[Tokenizer, P], T]) -> list[T]:
        if not prompts:
            return []
        while True:
            encoder = await self._encoder(card)
            with suppress(ExecutorClosed):  # it was evicted meanwhile
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
            return _Encoder(await asyncio.to_thread(Tokenizer, files))
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be used: %s", card["name"], error)
            raise broken(card["name"], TOKENIZER) from error


class _Encoder:
    """A tokenizer and its threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._executor = Executor("penstock-tokenize", THREADS)

    async def each(self, prompts: Sequence[P], work: Callable[[Tokenizer, P], T]) -> list[T]:
        if self._executor.waiting >= WAITING:
            raise _busy(f"{WAITING} requests wait for this model's tokenizer already")
        given_up = threading.Event()
        try:
            return await self._executor.run(
                partial(self._each, prompts, work, given_up), patience=PATIENCE_S, limit=LIMIT_S
            )
        except ExecutorBusy:
            raise _busy(f"this model's tokenizer was busy with others' prompts for {PATIENCE_S:g} s") from None
        except TimeoutError:
            what = "the prompt" if len(prompts) == 1 else f"the {len(prompts)} prompts"
            raise InvalidTask(
                f"the model's tokenizer was not done with {what} within {LIMIT_S:g} s", param="prompt"
            ) from None
        finally:
            given_up.set()

    def _each(self, prompts: Sequence[P], work: Callable[[Tokenizer, P], T], given_up: threading.Event) -> list[T]:
        """Process prompts one by one on a thread of the executor; stop between two if the caller has given up."""
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
        self._executor.close()


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="tokenizer_busy", headers=RETRY_AFTER)
