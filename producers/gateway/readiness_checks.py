"""Checks before `/readyz` says that a gateway is ready: models' files, and the store of files' content."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from producers.admin.fleet import read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.trouble import Trouble, trouble
from producers.gateway.http.request_state import Work
from producers.gateway.text.prompts import TOKENIZER, Prompts, Templates
from producers.store.blobs import Blobs

#: Time (s) for which a look counts. Many may ask: balancers, supervisors, people.
EVERY_S: Final = 15.0
logger = logging.getLogger(__name__)
#: Pause (s) between two looks for the cards of models that are not there yet.
LOOK_S: Final = 0.2


class Reach:
    """Checks the store of files' content on request, one check at a time."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._error: OSError | None = None
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def error(self, patience_s: float) -> OSError | None:
        """The fault that the last look saw, None if there was none. Waits for a look for up to `patience_s`."""
        if self._looking is None and time.monotonic() - self._looked > EVERY_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait((self._looking,), timeout=patience_s)
        return self._error

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._blobs.check)
            self._error = None
        except OSError as error:
            self._error = error
        finally:
            self._looked, self._looking = time.monotonic(), None


def lasts(error: OSError) -> bool:
    """Whether an operator has to act: the bucket is missing, or refuses. One that is away may come back."""
    return trouble(error) is not Trouble.AWAY


class Awaited:
    """Models, each awaited until it is published or a worker has served it, and what it needs is loaded."""

    def __init__(self, client: AsyncClient, prompts: Prompts, templates: Templates, names: Iterable[str]) -> None:
        self._client = client
        self._prompts = prompts
        self._templates = templates
        self._unserved = set(names)
        self._unread = set(names)

    async def unserved(self) -> list[str]:
        """Returns the models that nobody has published, and no worker has served yet.

        A model without workers takes tasks, which wait in its queue, also one that lost its workers later. Raises
        redis.RedisError and OSError.
        """
        if self._unserved:
            cards = await self._client.models()
            self._unserved.difference_update(card["name"] for card in cards if "published" in card)
        if self._unserved:
            fleet = await read_fleet(self._client.store, self._client.broker)
            self._unserved.difference_update(pool.model for pool in fleet.pools if pool.workers)
        return sorted(self._unserved)

    @property
    def unread(self) -> list[str]:
        """The models whose tokenizer and chat template are not loaded yet."""
        return sorted(self._unread)

    async def run(self) -> None:
        """Load the tokenizer and the chat template of each, once its card is there."""
        while self._unread:
            with suppress(*FAILURES):
                for card in await self._client.models():
                    if card["name"] in self._unread:
                        await self._load(card)
                        self._unread.discard(card["name"])
            await asyncio.sleep(LOOK_S)

    async def _load(self, card: Mapping[str, Any]) -> None:
        """Load a model's tokenizer and template. Logs what is wrong with them: the model's requests try again, and
        say so. Raises redis.RedisError and OSError."""
        try:
            if TOKENIZER in card["files"]:
                await self._prompts.tokenizer(card)
            if "chat" in card["capabilities"]:
                # The first render starts the template's process, and compiles it there.
                await self._templates.render(card, [{"role": "user", "content": "Hello"}], Work())
        except FAILURES:
            raise
        except Exception as error:  # noqa: BLE001 - the gateway would never be ready, for one model's files
            logger.warning("the tokenizer or chat template of %s is not loaded: %r", card["name"], error)
