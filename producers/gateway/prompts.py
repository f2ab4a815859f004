"""Text prompts to token ids, with the tokenizer that the model's card names by hash."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from redis.asyncio import Redis

from engine.text import ModelError, Tokenizer
from producers import keys
from producers.errors import InvalidTask
from producers.gateway.errors import RETRY_AFTER, Problem

logger = logging.getLogger(__name__)

#: Tokenizers kept, the least recently used dropped first.
KEPT: Final = 16
#: Longer texts (characters) are encoded off the event loop; shorter ones take less than changing threads does.
INLINE: Final = 4096
FILE: Final = "tokenizer.json"


class Prompts:
    """Encodes prompts. `store`: where the files are, as `penstock:blob:<sha256>`."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-tokenize")
        # A load is a task that all who want it await, so that it happens once.
        self._loads: OrderedDict[str, asyncio.Task[Tokenizer]] = OrderedDict()

    async def encode(self, card: Mapping[str, Any], text: str) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InvalidTask, Problem where the model's tokenizer is not to be had."""
        digest = card["files"].get(FILE)
        if digest is None:
            raise InvalidTask(f"model {card['name']!r} has no tokenizer; give the prompt as token ids", param="prompt")
        tokenizer = await self._tokenizer(card["name"], digest)
        if len(text) <= INLINE:
            ids = tokenizer.encode(text)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, tokenizer.encode, text)
        if not ids:
            raise InvalidTask("prompt has no token: the model's tokenizer drops all of it", param="prompt")
        return tuple(ids)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tokenizer(self, model: str, digest: str) -> Tokenizer:
        load = self._loads.get(digest)
        if load is None:
            load = self._loads[digest] = asyncio.create_task(self._load(model, digest))
            load.add_done_callback(lambda done: self._forget_failed(digest, done))
        self._loads.move_to_end(digest)
        while len(self._loads) > KEPT:
            self._loads.popitem(last=False)
        return await asyncio.shield(load)

    def _forget_failed(self, digest: str, load: asyncio.Task[Tokenizer]) -> None:
        failed = load.cancelled() or load.exception() is not None
        if failed and self._loads.get(digest) is load:
            del self._loads[digest]

    async def _load(self, model: str, digest: str) -> Tokenizer:
        data = await self._store.execute_command("GET", keys.blob(digest))
        if data is None:
            raise _unavailable(
                f"The tokenizer of model {model!r} is not in the store; start a worker, which puts it there."
            )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _parse, data, digest)
        except ModelError as error:
            logger.error("the tokenizer of %s (%s) cannot be used: %s", model, keys.blob(digest), error)
            raise _unavailable(
                f"The tokenizer of model {model!r} in the store is broken; restart a worker of it, which puts it there "
                "anew, or give the prompt as token ids."
            ) from error


def _parse(data: bytes, digest: str) -> Tokenizer:
    if hashlib.sha256(data).hexdigest() != digest:
        raise ModelError("its content does not have the SHA-256 in its name")
    return Tokenizer.from_bytes({FILE: data})


def _unavailable(message: str) -> Problem:
    return Problem(503, message, code="model_unavailable", param="model", headers=RETRY_AFTER)
