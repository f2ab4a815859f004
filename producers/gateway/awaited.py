"""The models that a gateway waits for before it is ready: for each to be there, and for what it needs to be loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from producers.admin.fleet import read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.gateway.http.work import Work
from producers.gateway.text.blobs import TOKENIZER
from producers.gateway.text.prompts import Prompts
from producers.gateway.text.templates import Templates

logger = logging.getLogger(__name__)

#: Pause (s) between two looks for the cards of models that are not there yet.
LOOK_S: Final = 0.2


class Awaited:
    """Models, each awaited until it is published or a worker has served it, and what it needs is loaded."""

    def __init__(self, client: AsyncClient, prompts: Prompts, templates: Templates, names: Iterable[str]) -> None:
        self._client = client
        self._prompts = prompts
        self._templates = templates
        self._unserved = set(names)
        self._unread = set(names)

    async def unserved(self) -> list[str]:
        """Those that nobody has published, and no worker has served yet.

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
        """Those whose tokenizer and chat template are not loaded yet."""
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
